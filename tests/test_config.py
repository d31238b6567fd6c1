"Configs: what is saved comes back, what makes no sense is refused."
import json
import math
import os
import typing
from dataclasses import dataclass, fields, replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lmcourse.ablations.sweep import RunData
from lmcourse.tools.config import Config, ModelConfig, TrainConfig, UserError, describe, refuse_unwritable, unknown

YARN = dict(rope_type="yarn", factor=4., original_max_position_embeddings=64)
DEVICES = ["auto", "cpu", "cuda", "cuda:1", "mps"]


def values(hint):
    if typing.get_origin(hint) is typing.Literal: return st.sampled_from(typing.get_args(hint))
    if hint is bool: return st.booleans()
    if hint is float: return st.floats(1e-6, 0.5)
    if hint == dict|None: return st.builds(lambda factor: dict(rope_type="linear", factor=factor), st.floats(1, 9))
    if hint is str: return st.sampled_from(DEVICES)         # The one text among the fields
    return st.integers(1, 1000)


@pytest.mark.parametrize("cls", [ModelConfig, TrainConfig])
@pytest.mark.parametrize("suffix", ["json", "toml"])
@given(data=st.data())
def test_any_field_survives_a_file(tmp_path_factory, cls, suffix, data):
    hints = typing.get_type_hints(cls)
    changes = {f.name: data.draw(values(hints[f.name])) for f in data.draw(st.permutations(fields(cls)))[:8]}
    try: config = cls.from_dict(changes)
    except ValueError: assume(False)
    path = tmp_path_factory.mktemp("c")/f"config.{suffix}"
    config.save(path)
    assert cls.load(path) == config


@pytest.mark.parametrize("suffix", ["json", "toml"])
def test_a_scaling_survives_a_file_and_old_files_have_none(tmp_path, suffix):
    config = ModelConfig(rope_scaling=YARN | dict(beta_fast=16))
    config.save(tmp_path/f"c.{suffix}")
    assert ModelConfig.load(tmp_path/f"c.{suffix}") == config
    assert ModelConfig.from_dict({k: v for k, v in ModelConfig().to_dict().items() if k != "rope_scaling"}) == ModelConfig()


def test_configs_are_frozen_and_hashed_by_value():
    given = dict(YARN)
    a, b = ModelConfig(rope_scaling=given), ModelConfig(rope_scaling=dict(reversed(YARN.items())))
    given["factor"] = 9.
    assert a == b and hash(a) == hash(b) and len({a, b, ModelConfig()}) == 2 and a.rope_scaling == YARN


@pytest.mark.parametrize("cls", [ModelConfig, TrainConfig])
def test_every_field_has_its_comment(cls):
    text = str(describe(cls()))
    assert all(f.name in text for f in fields(cls))


@pytest.mark.parametrize("name", sorted(ModelConfig.presets()))
def test_presets_are_valid_and_derived_sizes_follow(name):
    config = ModelConfig.preset(name)
    wider = replace(config, d_model=2*config.d_model)
    assert wider.head_size == (config.head_dim or 2*config.head_size) and wider.kv_heads == config.kv_heads
    if config.d_ff is None: assert wider.ffn_size > config.ffn_size


RUNS = {"ts-36m": (35_938_816, 163_840_000), "owt-58m": (58_466_816, 327_680_000), "leaderboard-42m": (42_082_816, 1_310_720_000),
        "ts-17m": (22_696_448, 327_680_000), "ts-17m-cpu": (22_696_448, 40_960_000)}


@pytest.mark.parametrize("name", RUNS)
def test_the_runs_of_the_reports_have_their_parameters_and_tokens(name):
    from lmcourse.accounting.parameters import count_parameters
    model, train = ModelConfig.preset(name), TrainConfig.preset(name)
    assert (count_parameters(model).unique, train.steps*train.batch_size*model.context_length) == RUNS[name]
    assert (train.beta1, train.beta2, train.weight_decay, train.grad_clip, train.warmup_steps, train.min_lr) == (0.9, 0.999, 0.01, 1.0, 200, 1e-4)
    assert (train.dtype == "bfloat16") == model.tie_embeddings == (name == "leaderboard-42m")


def test_the_configuration_of_the_numpy_report():
    theirs = dict(d_model=512, num_heads=4, num_layers=4, d_ff=2048, vocab_size=151_669, context_length=512, tie_embeddings=True, seed=42, lr=3e-4,
                  beta1=0.9, beta2=0.95, weight_decay=0.01, grad_clip=1.0, batch_size=16, steps=1000, warmup_steps=0, eval_every=50, log_every=10,
                  prefetch=8, min_lr=1e-6, plateau_patience=5, plateau_factor=0.5, cooldown_steps=0, early_stop_patience=10,
                  early_stop_min_delta=0.001, target_loss=None, engine="numpy", schedule="constant")
    ours = ModelConfig.preset("hinterland-np").to_dict() | TrainConfig.preset("hinterland-np").to_dict()
    assert {k: ours[k] for k in theirs} == theirs


def test_a_training_preset_has_a_model():
    assert set(TrainConfig.presets()) <= set(ModelConfig.presets())


@pytest.mark.parametrize("changes, words", [
    (dict(d_model=100, num_heads=16), "d_model = 100 is not a multiple of num_heads = 16"),
    (dict(num_kv_heads=3), "num_heads = 16 is not a multiple of num_kv_heads = 3"),
    (dict(window=0), "window = 0, expected more than 0"),
    (dict(norm="batch"), "expected one of rmsnorm, layernorm, none"),
    (dict(rope_theta=float("nan")), "rope_theta = nan, expected a finite number"),
    (dict(z_loss=-1.0), "z_loss = -1.0, expected 0 or more"),
    (dict(bias=1), "bias = 1, expected bool"),
    (dict(num_layers=True), "num_layers = True, expected int"),
    (dict(position="sinusoidal", d_model=5, num_heads=1), "even d_model"),
    (dict(rope_scaling="yarn"), "rope_scaling = 'yarn', expected dict or none"),
    (dict(rope_scaling={}), "rope_scaling has rope_type = None, expected one of linear, llama3, yarn"),
    (dict(rope_scaling=dict(rope_type="dynamic", factor=2.)), "rope_type = 'dynamic', expected one of linear, llama3, yarn"),
    (dict(num_experts_per_tok=0), "num_experts_per_tok = 0, expected more than 0"),
    (dict(rope_scaling=dict(rope_type="linear")), "of type linear has no factor, expected factor"),
    (dict(rope_scaling=YARN, position="learned"), "rope_scaling with position = 'learned', expected none"),
    (dict(rope_scaling=YARN | dict(mscale=1.)), "of type yarn has mscale, expected only factor, original_max_position_embeddings, beta_slow, beta_fast, attention_factor"),
    (dict(rope_scaling=YARN | dict(factor=.5)), "has factor = 0.5, expected a finite number of 1 or more"),
    (dict(rope_scaling=YARN | dict(factor=math.nan)), "has factor = nan, expected a finite number"),
    (dict(rope_scaling=YARN | dict(factor=True)), "has factor = True, expected a finite number"),
    (dict(rope_scaling=YARN | dict(attention_factor=0)), "has attention_factor = 0, expected a finite number above 0"),
    (dict(rope_scaling=YARN | dict(beta_fast=1)), "slows down from 1 to 1.0 turns, expected fewer at the end"),
    (dict(rope_scaling=YARN | dict(original_max_position_embeddings=6)), "has original_max_position_embeddings = 6, expected 7 or more, for 1.0 turns"),
    (dict(rope_scaling=YARN, rope_theta=1.), "with rope_theta = 1.0, expected rope_theta above 1"),
    (dict(rope_scaling=dict(rope_type="llama3", factor=8., original_max_position_embeddings=64, low_freq_factor=1.)), "of type llama3 has no high_freq_factor"),
])
def test_what_does_not_fit_is_refused(changes, words):
    with pytest.raises(ValueError, match=words): ModelConfig(**changes)


KINDS = {(cls, name): {hint, *typing.get_args(hint)} for cls in (ModelConfig, TrainConfig, RunData) for name, hint in typing.get_type_hints(cls).items()}
NUMBERS = [(*field, v) for field, kinds in KINDS.items() if kinds & {int, float} for v in (math.inf, -math.inf, math.nan, 10**400) if float in kinds or v != 10**400]


@pytest.mark.parametrize("cls, name, value", NUMBERS, ids=lambda x: getattr(x, "__name__", str(x)[:8]))
def test_every_number_is_finite(cls, name, value):
    with pytest.raises(ValueError, match=f"{cls.__name__}: {name} = "): cls(**{name: value})


@pytest.mark.parametrize("device", ["banana", "", "cpu ", "CPU", "cuda:", "cuda:x", "cpu\n", "tpu", "meta"])
def test_a_device_that_there_is_nowhere_is_refused(device):
    with pytest.raises(ValueError, match="TrainConfig: device = .*expected auto, cpu, cuda or mps"): TrainConfig(device=device)


@pytest.mark.parametrize("device", DEVICES)
def test_devices(device): assert TrainConfig(device=device).device == device


@dataclass(frozen=True)
class Note(Config):
    text:str = ""


@given(st.text())
def test_any_text_survives_toml(tmp_path_factory, text):
    "Also the one character that JSON takes as it is and TOML does not."
    assume(text.encode(errors="replace").decode() == text)
    path = tmp_path_factory.mktemp("c")/"c.toml"
    for note in (Note(text), Note(f'a\x7fb"\\u007f\n\x00ü{text}')):
        note.save(path)
        assert Note.load(path) == note


def test_where_nothing_can_be_kept_is_said_before_work(tmp_path, monkeypatch):
    (tmp_path/"file").write_text("")
    monkeypatch.chdir(tmp_path)
    for place in (".", "file", "new", "new/newer", tmp_path/"new"): refuse_unwritable(place)
    for place in ("file/new", "file/new/newer", tmp_path/"file"/"new"):
        with pytest.raises(UserError, match="can't be created: file is a file"): refuse_unwritable(place)
    with pytest.raises(UserError, match="file is a file, expected a folder"): refuse_unwritable("file", folder=True)
    def none(*args, **more): raise PermissionError(13, "Permission denied")
    monkeypatch.setattr("os.access", lambda path, mode: False)
    monkeypatch.setattr("tempfile.TemporaryFile", none)
    for place in ("file", "new", "new/newer"):
        with pytest.raises(UserError, match=f"{place}: .* can't be written"): refuse_unwritable(place)


def test_a_name_that_is_not_utf_8_is_rejected_before_work():
    "Weights couldn't be read from there."
    with pytest.raises(UserError, match="expected a name in UTF-8"): refuse_unwritable("caf\udce9/run")
    refuse_unwritable("café/run")


@pytest.mark.skipif(not hasattr(os, "seteuid") or os.geteuid() != 0, reason="only root can become nobody")
def test_a_folder_that_may_not_be_looked_into(tmp_path):
    tmp_path.chmod(0o700)
    os.seteuid(65534)
    try:
        with pytest.raises(UserError, match="can't be written"): refuse_unwritable(tmp_path/"new"/"newer")
    finally: os.seteuid(0)


def test_equal_numbers_are_saved_alike():
    whole, real = (TrainConfig(grad_clip=x) for x in (0, 0.))
    assert whole == real and json.dumps(whole.to_dict()) == json.dumps(real.to_dict())


def test_windows_of_a_step_are_whole():
    assert TrainConfig(tokens_per_step=512).windows_per_step(256) == 2 and TrainConfig(batch_size=3).windows_per_step(256) == 3
    for tokens in (100, 300):
        with pytest.raises(ValueError, match=f"tokens_per_step = {tokens}, expected a multiple of the context length, 256"):
            TrainConfig(tokens_per_step=tokens).windows_per_step(256)


@pytest.mark.parametrize("name, known, answer", [
    ("gpt2", ["gpt2-xl", "gpt2-medium", "gpt3"], "did you mean 'gpt2-xl' or 'gpt2-medium'?"), ("a10", ["a100", "a100-40gb"], "did you mean 'a100'?"),
    ("gpt2-smal", ["gpt2-small", "gpt2-xl"], "did you mean 'gpt2-small'?"), ("x", ["gpt2"], "there are gpt2"), (3, ["3", "30"], "did you mean '3' or '30'?")])
def test_who_names_a_family_is_told_its_members(name, known, answer): assert str(unknown("preset", name, known)) == f"unknown preset {name!r}: {answer}"
