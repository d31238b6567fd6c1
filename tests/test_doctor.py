"The doctor names faults that are planted, leaves healthy runs alone, and refuses what is no run."
import json
import math
import shutil
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from lmcourse.ablations import doctor
from lmcourse.ablations.doctor import (FAULTS, Forward, correlation, envelope_values, examine, explain, logits_as, look_inside, losses_as, make_envelope,
                                       mean_loss, open_case, practice_data, reference_model, report, table_of, train_with, trials, wrong_forwards)
from lmcourse.architecture import attention_torch
from lmcourse.architecture.attention_torch import RoPE, apply_rope_half
from lmcourse.architecture.transformer_torch import TransformerLM
from lmcourse.tools.config import ModelConfig, TrainConfig
from lmcourse.training.data import evaluation_batches
from lmcourse.training.trainer import evaluate, read_metrics

TINY = ModelConfig(vocab_size=320, context_length=64, d_model=32, num_layers=2, num_heads=2, d_ff=64)
SHORT = TrainConfig(steps=80, batch_size=8, lr=1e-2, warmup_steps=20, weight_decay=.01, eval_every=40, checkpoint_every=80, log_every=2, eval_documents=5)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("doctor")
    practice_data(folder/"data", 320, 400_000, 20, 5)
    yield folder
    torch.set_num_threads(threads)


def trained(place, name, fault=None, model=TINY, train=SHORT, data=None):
    run = place/name
    if not run.exists(): train_with(fault, model, train, place/"data"/(data or (FAULTS[fault].data if fault else "whole")), run)
    return run


@pytest.fixture(scope="module")
def healthy(place): return trained(place, "healthy")


@pytest.fixture
def copy(healthy, tmp_path): # One that may be spoilt
    shutil.copytree(healthy, tmp_path/"run")
    config = json.loads((tmp_path/"run/config.json").read_text())
    (tmp_path/"run/config.json").write_text(json.dumps(config | dict(data=str(healthy.parent/"data/whole"))))
    return tmp_path/"run"


def change_config(run, part, **values):
    config = json.loads((run/"config.json").read_text())
    config[part] |= values
    (run/"config.json").write_text(json.dumps(config))


def change_lines(run, change):
    lines = [change(m) for m in read_metrics(run)]
    (run/"metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in lines))


def names(findings): return [f.name for f in findings.causes]


# Faults and healthy runs

@pytest.mark.parametrize("fault", [f for f in FAULTS if f not in ("overfitting", "positions reset")]) # These two need more steps
def test_a_planted_fault_is_named_first(place, fault):
    first = examine(trained(place, fault, fault), {}).causes[0]
    assert first.name.startswith(FAULTS[fault].names), first
    assert any(c.isdigit() for c in first.sentence) and 0 < first.weight <= 1


def test_overfitting_is_named_first(place):
    train = replace(SHORT, steps=200, eval_every=20, checkpoint_every=200)
    assert examine(trained(place, "overfitting", "overfitting", train=train), {}).causes[0].name == "overfitting"


def no_final_norm(): return [(TransformerLM, "forward", lambda self, ids: self.lm_head(last_stream(self, ids)))]


def last_stream(model, ids): # What the last block gives
    x = model.embed(ids)
    for layer in model.layers: x = layer(x)
    return x


OTHERS = { # What the doctor should say, to a change of the evaluation that is made by other code than his
    "no causal mask": lambda: doctor._attention(is_causal=False),
    "attention scale 1": lambda: doctor._attention(scale=1.),
    "attention scale 1/K": lambda: doctor._attention(scale=1/16),
    "attention scale 1/sqrt(D)": lambda: doctor._attention(scale=32**-.5),
    "position ids reset every 32 tokens": lambda: doctor._places(),
    "position ids all 0": lambda: [(RoPE, "at", lambda self, T, positions=None: self.table[:1].expand(T, -1, -1))],
    "RoPE pairs in the other layout": lambda: [(attention_torch, "_turn", lambda x, table: apply_rope_half(x, *table.unbind(-1)))],
    "labels shifted by 0": lambda: doctor._labels(0),
    "labels shifted by 2": lambda: doctor._labels(2),
    "no final norm": no_final_norm,
}

@pytest.mark.parametrize("name", OTHERS)
def test_an_evaluation_with_a_fault_is_named(healthy, name):
    case = open_case(healthy)
    weights = {n: 8*w if "q_proj" in n else w for n,w in case.weights.items()}      # Attention is sharp now, so that places and scale matter
    case = replace(case, weights=weights)
    right, rows = evaluate(case.reference, case.sets[1], 64).loss, lambda: evaluation_batches(case.sets[1], 64)
    with ExitStack() as stack:
        for change in OTHERS[name](): stack.enter_context(doctor._swapped(*change))
        logged = evaluate(case.reference, case.sets[1], 64).loss
    found, forward, value = explain(case, logged, right, rows, lambda: evaluation_batches(case.sets[1], 64, 12))
    assert found == name and value == pytest.approx(logged, abs=.02 if forward.shift == 2 else 2e-3) # a last target has no next
    assert set(wrong_forwards(case)) - set(OTHERS) == {"position ids reset every 16 tokens", "position ids reset every 8 tokens"}


@pytest.mark.parametrize("seed", [5, 6])
def test_healthy_seeds_raise_nothing(place, seed):
    findings = examine(trained(place, f"seed-{seed}", train=replace(SHORT, seed=seed)), {})
    assert findings.causes == () and report(findings)[0].endswith("nothing wrong found")
    assert len(table_of(findings)) == len(findings.looked) > 15


VARIANTS = {"post": dict(norm_position="post"), "learned": dict(position="learned"), "none": dict(position="none"), "gelu": dict(ffn="gelu"),
            "tied": dict(tie_embeddings=True), "relu": dict(ffn="relu", norm="layernorm", bias=True), "sinusoidal": dict(position="sinusoidal"),
            "more": dict(num_kv_heads=1, qk_norm=True, z_loss=1e-3, window=16, scale_embeddings=True, tie_embeddings=True)}

@pytest.mark.parametrize("name", VARIANTS)
def test_healthy_variants_raise_nothing(place, name):
    run = trained(place, f"variant-{name}", model=replace(TINY, **VARIANTS[name]), train=replace(SHORT, steps=20, checkpoint_every=20, lr=5e-3))
    assert names(examine(run, {})) == []


@pytest.mark.parametrize("change", [dict(optimizer="muon"), dict(engine="numpy"), dict(batch_size=2), dict(windows="within"), dict(windows="sequential"),
                                    dict(lr=1e-4, warmup_steps=0)], ids=str)
def test_other_ways_to_train_raise_nothing(place, change):
    run = trained(place, f"train-{change}", train=replace(SHORT, **dict(steps=20, checkpoint_every=20, lr=5e-3) | change))
    assert names(examine(run, {})) == []


# The forward pass

@pytest.mark.parametrize("name", VARIANTS)
def test_the_right_forward_pass_is_the_models(place, name):
    case = open_case(trained(place, f"variant-{name}", model=replace(TINY, **VARIANTS[name]), train=replace(SHORT, steps=20, checkpoint_every=20, lr=5e-3)))
    ids = torch.randint(320, (2, 50), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(logits_as(case, Forward(), ids), case.reference(ids))
    expected = evaluate(case.reference, case.sets[1], 64, 7).loss
    assert mean_loss(losses_as(case, Forward(), evaluation_batches(case.sets[1], 64, 7))) == pytest.approx(expected, rel=1e-6)
    for wrong,forward in wrong_forwards(case).items():
        if forward.shift == 1: assert (logits_as(case, forward, ids) - case.reference(ids)).abs().max() > 1e-4, wrong


def test_shifts_move_the_targets(place, healthy):
    case = open_case(healthy)
    x, y = np.array([[1, 2, 3, 4]]), np.array([[2, 3, -100, 5]])
    right, zero, two = (losses_as(case, Forward(shift=s), [(x, y)])[0] for s in (1, 0, 2))
    assert np.isnan(right).tolist() == [[False, False, True, False]] == np.isnan(zero).tolist() and np.isnan(two).tolist() == [[False, True, False, True]]
    log_p = -case.reference(torch.from_numpy(x)).log_softmax(-1)[0]
    np.testing.assert_allclose(zero[0, :2], [log_p[0, 1].item(), log_p[1, 2].item()], rtol=1e-5)
    np.testing.assert_allclose(two[0, [0, 2]], [log_p[0, 3].item(), log_p[2, 5].item()], rtol=1e-5)


def test_a_gap_that_nothing_explains_has_no_name(healthy):
    case = open_case(healthy)
    rows = lambda: evaluation_batches(case.sets[1], 64, 3)
    right = mean_loss(losses_as(case, Forward(), rows()))
    assert explain(case, right + 0.77, right, rows, rows) is None


def test_a_logged_loss_that_nothing_explains(copy):
    change_lines(copy, lambda m: m | dict(valid_loss=m["valid_loss"] + .5) if m.get("final") else m)
    assert names(examine(copy, {})) == ["another forward pass"]


def test_training_alone_with_shifted_labels(place):
    from lmcourse.training.data import Batches
    right = Batches.__getitem__
    Batches.__getitem__ = lambda self, step: (right(self, step)[0],)*2
    try: run = trained(place, "training-labels")
    finally: Batches.__getitem__ = right
    assert examine(run, {}).causes[0].name == "labels shifted by 0"


# The log and the files

def test_a_schedule_that_is_not_the_configs(copy):
    change_lines(copy, lambda m: m | dict(lr=10*m["lr"]) if "lr" in m else m)
    assert examine(copy, {}).causes[0].name == "learning rate × 10"


def test_a_warm_up_that_did_not_happen(copy):
    change_lines(copy, lambda m: m | dict(lr=0.01) if "lr" in m and m["step"] < 20 else m)
    assert examine(copy, {}).causes[0].name == "no warm-up"


def test_a_loss_that_is_no_number(copy):
    change_lines(copy, lambda m: m | dict(loss=math.nan) if m["step"] == 40 and "loss" in m else m)
    assert examine(copy, {}).causes[0].name == "diverged"


def test_a_run_that_starts_far_too_high(copy):
    change_lines(copy, lambda m: m | dict(loss=30.) if m["step"] == 2 else m)
    assert names(examine(copy, {}))[0] == "another start"


def test_initial_weights_that_blow_up(healthy):
    case = replace(open_case(healthy), model=replace(TINY, norm="none", num_layers=8))
    assert list(doctor.check_start(case))[-1].name == "initial weights that blow up"


def test_the_most_likely_cause_comes_first(copy):
    change_lines(copy, lambda m: m | dict(lr=10*m["lr"]) if "lr" in m else m | dict(valid_loss=.001))
    findings = examine(copy, {})
    lines = report(findings)
    assert [f.weight for f in findings.causes] == sorted((f.weight for f in findings.causes), reverse=True)
    assert "learning rate × 10 (weight 0.95)" in lines[0] and lines[1].startswith("  ") and any(l.startswith("also seen: the answer leaks") for l in lines)
    assert lines[-1] == str(table_of(findings)) and any(l == "remark: no envelope fits this run" for l in lines)


def test_a_sorted_corpus_in_order(place):
    whole = open_case(trained(place, "healthy")).sets[0]
    order = np.argsort(whole.ends - whole.starts, kind="stable")
    case = open_case(trained(place, f"train-{dict(windows='sequential')}", train=replace(SHORT, steps=20, checkpoint_every=20, lr=5e-3, windows="sequential")))
    lengths = (whole.ends - whole.starts)[order]
    dataset = type(whole)(np.concatenate([whole.document(i) for i in order]), np.cumsum(lengths) - lengths, whole.info)
    found = list(doctor.check_order(replace(case, sets=(dataset, case.sets[1]))))
    assert found[-1].name == "batches are not shuffled"
    assert "random order" in list(doctor.check_order(case))[-1]


def test_correlation():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 12))
    assert correlation(a, 3*a + np.arange(12)) == pytest.approx(1) and abs(correlation(a, b)) < .7 and correlation(a, np.arange(12)) == 0


def test_other_validation_documents(copy):
    change_lines(copy, lambda m: m | dict(tokens=m["tokens"] + 1) if m.get("final") else m)
    assert examine(copy, {}).causes[0].name == "evaluated on other documents"


def test_dead_units_are_counted(healthy):
    case = open_case(healthy)
    with torch.no_grad(): case.reference.layers[1].ffn.w1.weight[:48] = 0
    assert look_inside(case, 3)["dead"] == {0: 0, 1: .75}


# Envelopes

def test_an_envelope_knows_its_runs_and_refuses_others(place, copy):
    runs = [trained(place, f"env-{s}", train=replace(SHORT, steps=20, checkpoint_every=20, seed=s)) for s in range(5)]
    e = json.loads(json.dumps(make_envelope(runs, dict(machine="none"))))
    assert e["seeds"] == list(range(5)) and len(e["values"]["loss"]["mean"]) == 10
    new = trained(place, "env-new", train=replace(SHORT, steps=20, checkpoint_every=20, seed=9))
    findings = examine(new, dict(short=e))
    assert findings.causes == () and any("envelope short" in l.what for l in findings.looked)
    values = envelope_values(open_case(new))
    np.testing.assert_allclose(e["values"]["loss"]["mean"], np.mean([envelope_values(open_case(r))["loss"] for r in runs], 0), rtol=1e-5)
    high = {k: dict(v, mean=[x*(.5 if k == "loss" else 1) for x in v["mean"]]) for k,v in e["values"].items()}
    assert names(examine(new, dict(short=e | dict(values=high)))) == ["outside the envelope"] and values["steps"] == e["steps"]
    assert any("no envelope fits this run" in r and "steps" in r for r in examine(copy, dict(short=e)).remarks)
    with pytest.raises(ValueError, match="an envelope of 4 runs"): make_envelope(runs[:4], {})
    with pytest.raises(ValueError, match="differs from .* in steps"): make_envelope([*runs, place/"healthy"], {})


# Bad input

def test_no_run(tmp_path):
    with pytest.raises(FileNotFoundError, match="no run folder"): examine(tmp_path)


def test_no_checkpoint(copy):
    shutil.rmtree(copy/"checkpoints")
    with pytest.raises(FileNotFoundError, match="no checkpoint yet"): examine(copy)


def test_no_data(copy):
    change = json.loads((copy/"config.json").read_text()) | dict(data="nowhere")
    (copy/"config.json").write_text(json.dumps(change))
    with pytest.raises(FileNotFoundError, match="no such file"): examine(copy)


@pytest.mark.parametrize("text, words", [("", "no line with a training loss"), ("[]\n", "line 1 is"), ('{"step": 1}\n', "expected a step with a loss"),
                                         ("{\n", "not JSON"), ('{"step": "1", "loss": 3}\n', "line 1 is"), ('{"step": 2, "valid_loss": 3.0}\n', "no line with")])
def test_damaged_metrics(copy, text, words):
    (copy/"metrics.jsonl").write_text(text)
    with pytest.raises(ValueError, match=words) as e: examine(copy)
    assert "\n" not in str(e.value)


def test_a_damaged_checkpoint(copy):
    path = next((copy/"checkpoints").glob("*/model.safetensors"))
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match="damaged") as e: examine(copy)
    assert "\n" not in str(e.value)


def test_weights_of_another_config(copy, healthy):
    change_config(copy, "model", d_ff=32)
    with pytest.raises(ValueError, match="weights don't fit the config: .* of another shape"): examine(copy)
    weights = open_case(healthy).weights
    with pytest.raises(ValueError, match="token_embeddings.weight is not there"): reference_model(TINY, {k: v for k,v in weights.items() if "token" not in k})
    with pytest.raises(ValueError, match="layers.1.* is not of this config"): reference_model(replace(TINY, num_layers=1), weights)


def test_unknown_fault(place, tmp_path):
    with pytest.raises(ValueError, match="no mask"): train_with("no mosk", TINY, SHORT, place/"data/whole", tmp_path/"run")
    assert not (tmp_path/"run").exists()


# The whole proof, of several hours on a busy machine

@pytest.mark.slow
def test_ten_of_twelve_faults_and_no_healthy_seed(tmp_path):
    jobs = [(fault, 50) for fault in FAULTS] + [(None, seed) for seed in range(100, 120)]
    rows = list(trials(tmp_path, ModelConfig.preset("small"), TrainConfig.preset("small", checkpoint_every=1000), jobs))
    assert sum(r["right"] for r in rows if r["fault"]) >= 10 and all(r["right"] for r in rows if not r["fault"])
