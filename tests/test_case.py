"A run computed again: the right forward pass and the right step are the trainer's, wrong ones are wrong as others make them."
import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import faults
from faults import patched

from lmcourse.ablations.case import (EXACT, Forward, Step, _to_the_next_float, engine_of, explain, explain_step, explains, logits_as, loss_as, losses_as,
                                     mean_loss, open_case, rate_at, reference_model, replay_steps, replayable, wrong_forwards)
from lmcourse.architecture import attention_torch
from lmcourse.architecture.attention_torch import RoPE, apply_rope_half
from lmcourse.architecture.transformer_torch import TransformerLM
from lmcourse.tools.config import ModelConfig, TrainConfig
from lmcourse.training.data import evaluation_batches
from lmcourse.training.evaluation import evaluate
from lmcourse.training.runs import read_metrics

TINY = ModelConfig(vocab_size=320, context_length=64, d_model=32, num_layers=2, num_heads=2, d_ff=64)
SHORT = TrainConfig(steps=20, batch_size=8, lr=1e-2, warmup_steps=5, weight_decay=.01, eval_every=10,
                    checkpoint_every=10, log_every=2, eval_documents=5)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("case")
    faults.write_data(folder/"data", 320, 400_000, 20, 5)
    yield folder
    torch.set_num_threads(threads)


def trained(place, name, fault=None, model=None, train=None):
    run, f = place/name, (faults.FAULTS | faults.FIRST).get(fault)
    model, train = dict(model or (f.model if f else {})), dict(train or (f.train if f else {}))
    if not run.exists(): faults.train(fault, replace(TINY, **model), replace(SHORT, **train), place/"data"/(f.data if f else "whole"), run)
    return run


@pytest.fixture(scope="module")
def healthy(place): return trained(place, "healthy", train=dict(steps=80, warmup_steps=20, eval_every=40, checkpoint_every=40))


# The forward pass

VARIANTS = {"post": dict(norm_position="post"), "sublayer": dict(norm_position="sublayer"), "learned": dict(position="learned"),
            "none": dict(position="none"), "gelu": dict(ffn="gelu"), "tied": dict(tie_embeddings=True),
            "relu": dict(ffn="relu", norm="layernorm", bias=True), "sinusoidal": dict(position="sinusoidal"),
            "more": dict(num_kv_heads=1, qk_norm=True, z_loss=1e-3, window=16, scale_embeddings=True, tie_embeddings=True)}

@pytest.mark.parametrize("name", VARIANTS)
def test_the_right_forward_pass_is_the_models(place, name):
    case = open_case(trained(place, f"variant-{name}", model=VARIANTS[name]))
    ids = torch.randint(320, (2, 50), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(logits_as(case, Forward(), ids), case.reference(ids))
    expected = evaluate(case.reference, case.sets[1], 64, 7).loss
    assert loss_as(case, Forward(), evaluation_batches(case.sets[1], 64, 7)) == pytest.approx(expected, rel=1e-6)
    outputs = {n: f for n,f in wrong_forwards(case).items() if f.shift == 1 and f.average == "tokens" and not f.smoothing and not f.padding}
    for wrong,forward in outputs.items():
        if forward.wrap: continue
        assert (logits_as(case, forward, ids) - case.reference(ids)).abs().max() > 1e-4, wrong


def last_stream(model, ids): # What the last block gives
    x = model.embed(ids)
    for layer in model.layers: x = layer(x)
    return x


def no_residual(self, x, positions=None, cache=None): return self.add(self.attn(self.ln1(x), positions=positions, cache=cache), self.ffn, self.ln2)
def first_places(self, T, positions=None): return self.table[:1].expand(T, -1, -1)
def without_norm(self, ids): return self.lm_head(last_stream(self, ids))
def attention(**more): return faults.attend(lambda q, k, v: faults.F.scaled_dot_product_attention(q, k, v, **dict(is_causal=True) | more))


OTHERS = { # What the doctor should say, to a change of the evaluation that is made by other code than his
    "no causal mask": lambda: attention(is_causal=False),
    "attention scale 1": lambda: attention(scale=1.),
    "attention scale 1/K": lambda: attention(scale=1/16),
    "attention scale 1/sqrt(D)": lambda: attention(scale=32**-.5),
    "position ids reset every 32 tokens": faults.FIRST["positions reset"].changes,
    "position ids all 0": lambda: [(RoPE, "at", first_places)],
    "RoPE pairs in the other layout": lambda: [(attention_torch, "_rotate", lambda x, table: apply_rope_half(x, *table.unbind(-1)))],
    "labels shifted by 0": faults.FIRST["shifted labels"].changes,
    "labels shifted by 2": faults.FAULTS["targets two ahead"].changes,
    "no final norm": lambda: [(TransformerLM, "forward", without_norm)],
    "heads merged without transposing": faults.FAULTS["heads merged without transposing"].changes,
    "no residual around attention, its output doubled": faults.FAULTS["residual lost"].changes,
    "no residual around attention": lambda: [(faults.TransformerBlock, "forward", no_residual)],
    "softmax before the loss": faults.FAULTS["softmax before the loss"].changes,
    "label smoothing 0.1": lambda: faults.FAULTS["label smoothing in evaluation"].changes()[1:],
    "mean of batch means": faults.FAULTS["mean of batch means"].changes,
    "token ids wrap at 256": faults.FAULTS["token ids wrap"].changes,
}

QUICK = "no causal mask", "attention scale 1", "labels shifted by 0", "softmax before the loss", "mean of batch means"

@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow]*(n not in QUICK)) for n in OTHERS])
def test_an_evaluation_with_a_fault_is_named(healthy, name):
    case = open_case(healthy)
    case = replace(case, weights={n: 8*w if "q_proj" in n else w for n,w in case.weights.items()}) # Attention is sharp now, so that places and scale matter
    rows = lambda count=8: evaluation_batches(case.sets[1], 64, count)
    right = evaluate(case.reference, case.sets[1], 64, 8).loss
    with patched(OTHERS[name]()): logged = faults.training_loop.evaluate(case.reference, case.sets[1], 64, 8).loss
    found, forward, value = explain(case, logged, right, rows, lambda: rows(3))
    assert found == name and value == pytest.approx(logged, abs=.02 if forward.shift == 2 else 2e-3) # a last target has no next


def test_dropout_is_named_by_its_size(healthy):
    case = open_case(healthy)
    rows = lambda count=None: evaluation_batches(case.sets[1], 64, count)
    right, logged = (loss_as(case, f, rows()) for f in (Forward(), Forward(dropout=.2)))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        assert explain(case, logged, right, rows, lambda: rows(12))[0] == "dropout left on (p = 0.2)"


def test_shifts_move_the_targets(place, healthy):
    case = open_case(healthy)
    x, y = np.array([[1, 2, 3, 4]]), np.array([[2, 3, -100, 5]])
    right, zero, two = (losses_as(case, Forward(shift=s), [(x, y)])[0] for s in (1, 0, 2))
    assert np.isnan(right).tolist() == [[False, False, True, False]] == np.isnan(zero).tolist() and np.isnan(two).tolist() == [[False, True, False, True]]
    log_p = -case.reference(torch.from_numpy(x)).log_softmax(-1)[0]
    np.testing.assert_allclose(zero[0, :2], [log_p[0, 1].item(), log_p[1, 2].item()], rtol=1e-5)
    np.testing.assert_allclose(two[0, [0, 2]], [log_p[0, 3].item(), log_p[2, 5].item()], rtol=1e-5)
    padded = losses_as(case, Forward(padding=True), [(x, y)])[0]
    assert np.isfinite(padded).all() and padded[0, 2] == pytest.approx(log_p[2, case.sets[0].end_of_text].item(), rel=1e-5)


def test_means_by_hand():
    losses = [np.array([[1., 2.], [np.nan, 6.]]), np.array([[7., np.nan]])]
    assert mean_loss(losses) == 4 and mean_loss(losses, "rows") == pytest.approx((1.5 + 6 + 7)/3) and mean_loss(losses, "batches") == 5


def test_a_gap_that_nothing_explains_has_no_name(healthy):
    case = open_case(healthy)
    rows = lambda: evaluation_batches(case.sets[1], 64, 3)
    right = loss_as(case, Forward(), rows())
    assert explain(case, right + 0.77, right, rows, rows) is None
    assert explains(2.01, 2., 1., Forward()) and not explains(2.03, 2., 1., Forward()) and explains(2.1, 2., 1., Forward(dropout=.1))


# Steps

TRAININGS = {"plain": {}, "within": dict(windows="within"), "parts": dict(micro_batch=2), "NumPy": dict(engine="numpy"), "Muon": dict(optimizer="muon"),
             "in order": dict(windows="sequential"), "constant": dict(schedule="constant", cooldown_steps=5), "bfloat16": dict(dtype="bfloat16")}

@pytest.mark.parametrize("name", TRAININGS)
def test_steps_made_again_are_the_logs(place, name):
    case = open_case(trained(place, f"training-{name}", train=TRAININGS[name]))
    assert replayable(case) == [0, 10] and all(replay_steps(case, s).off(case.train.dtype) < .1 for s in (0, 10))


def test_steps_are_repeated_without_triton_and_not_from_a_start_that_the_seed_does_not_give(healthy):
    case = open_case(healthy)
    others = replace(case, train=replace(case.train, attention="triton", kernels="triton", init_from="elsewhere"))
    assert engine_of(others, 40).model.parts == engine_of(case, 40).model.parts and replayable(others) == [40]


def test_replays_leave_torchs_random_state_alone(healthy):
    before = torch.get_rng_state()
    replay_steps(open_case(healthy), 40)
    assert torch.equal(before, torch.get_rng_state())


def test_the_last_digit_of_the_weights_changes_next_to_nothing(healthy):
    opened = open_case(healthy)
    model, before = opened.reference, {n: p.clone() for n,p in opened.reference.named_parameters()}
    _to_the_next_float(model)
    for n,p in model.named_parameters(): assert (p > before[n]).all() and torch.allclose(p, before[n], rtol=2e-7, atol=1e-40)
    assert replay_steps(opened, 40, Step(rounded=True)).off() < .1


WRONG = {"gradients left scaled": "gradient × 1024", "accumulated without dividing": "gradient × 4", "gradient ascent": "gradient with the wrong sign",
         "L2 instead of decay": "weight decay in the gradient (L2)", "workers with one seed": "4 windows repeated to fill each batch",
         "padding counted": "padding counted in the loss", "not shuffled": "batches are not shuffled", "shifted labels": "labels shifted by 0"}

@pytest.mark.parametrize("fault", WRONG)
def test_steps_with_a_fault_are_explained_by_it(place, fault):
    longer = dict(context_length=768) if fault == "padding counted" else None      # than any of these stories
    case = open_case(trained(place, f"wrong-{fault}", fault, longer))
    made = {s: replay_steps(case, s) for s in replayable(case)}
    odd = {s: r for s,r in made.items() if r.off() >= 1}
    name, step, again = explain_step(case, odd, 100)
    assert name == WRONG[fault] and again.off() < EXACT and step != Step() and explain_step(case, odd, 0) is None


def test_batches_that_come_again_are_found(place):
    def item(self, step, right=faults.Batches.__getitem__): return right(self, step % 6)
    faults.FIRST["six batches"] = faults.Fault("", "", "", lambda: [(faults.Batches, "__getitem__", item)])
    try: case = open_case(trained(place, "six batches", "six batches"))
    finally: del faults.FIRST["six batches"]
    assert replay_steps(case, 0).off() < .1
    assert explain_step(case, {10: replay_steps(case, 10)}, 100)[0] == "the same batches again every 6 steps"


def test_a_log_that_no_step_gives(healthy):
    case = open_case(healthy)
    lines = [m | dict(loss=m["loss"] + .3) if "loss" in m else m for m in case.lines]
    case = replace(case, lines=lines)
    assert explain_step(case, {0: replay_steps(case, 0)}, 100) is None
    none = replace(case, lines=[{k: v for k,v in m.items() if k != "grad_norm"} | dict(loss=math.nan) for m in case.lines])
    assert replay_steps(none, 0).off() == math.inf


def test_the_rate_of_a_step(healthy):
    case = open_case(healthy)
    assert [rate_at(case, m["step"]) for m in case.logged] == [m["lr"] for m in case.logged]


# Bad input

def test_other_tokens_are_no_fault_of_the_run(healthy, tmp_path):
    "As after preparing another text into the folder that the run has read"
    shutil.copytree(healthy, tmp_path/"run")
    values = json.loads((tmp_path/"run/config.json").read_text())
    values["data"] = str((healthy/values["data"]).resolve())
    for name in ("train", "valid"):
        (tmp_path/"run/config.json").write_text(json.dumps(values | {"tokens": values["tokens"] | {name: "0"*64}}))
        with pytest.raises(ValueError, match=f"run: began with other tokens: {name}.bin had the SHA-256 000000000000…"): open_case(tmp_path/"run")


def test_a_damaged_checkpoint(healthy, tmp_path):
    shutil.copytree(healthy, tmp_path/"run")
    config = json.loads((tmp_path/"run/config.json").read_text())
    (tmp_path/"run/config.json").write_text(json.dumps(config | dict(data=str(healthy.parent/"data/whole"))))
    path = max((tmp_path/"run/checkpoints").glob("*/model.safetensors"))
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match="damaged") as e: open_case(tmp_path/"run")
    assert "\n" not in str(e.value)


def test_weights_of_another_config(healthy):
    weights = open_case(healthy).weights
    with pytest.raises(ValueError, match="token_embeddings.weight is not there"): reference_model(TINY, {k: v for k,v in weights.items() if "token" not in k})
    with pytest.raises(ValueError, match="layers.1.* is not of this config"): reference_model(replace(TINY, num_layers=1), weights)
    with pytest.raises(ValueError, match="of another shape"): reference_model(replace(TINY, d_ff=32), weights)


def test_the_log_is_read(healthy): assert open_case(healthy).lines == read_metrics(healthy)
