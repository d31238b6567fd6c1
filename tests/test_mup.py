"""Maximal update parametrization: where its factors act, and where it is refused."""
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from lmcourse.architecture.pretrained import config_from_hf, config_to_hf, params_of, to_hf
from lmcourse.architecture.transformer_np import init_params, learning_rate_scales, loss_and_grads, transformer_forward
from lmcourse.architecture.transformer_torch import TransformerLM
from lmcourse.inference.fast_decoder import FastDecoder
from lmcourse.inference.kv_cache import CachedDecoder
from lmcourse.parallelism.batch_size import new_run, run_steps, small_model, wsd_rates
from lmcourse.scaling import mup
from lmcourse.scaling.mup import best_rate, width_slope
from lmcourse.tools.checks import check_close
from lmcourse.tools.config import ModelConfig, TrainConfig
from lmcourse.tools.machine import compiles
from lmcourse.training.data import TokenDataset
from lmcourse.training.optim_np import AdamWNp
from lmcourse.training.optim_torch import OPTIMIZERS, parameter_groups

WIDE = small_model(64, 2, base=16, vocab_size=40, context_length=12)


def tokens(documents=60, length=20):
    rng = np.random.default_rng(0)
    return TokenDataset(rng.integers(40, size=documents*length).astype(np.uint16), np.arange(documents)*length,
                        dict(end_of_text=0, vocab_size=40))


@pytest.fixture(autouse=True)
def short(monkeypatch): monkeypatch.setattr(mup, "small_model", lambda *a, **k: small_model(*a, vocab_size=40, context_length=12, **k))


def data(): # With as many documents as `run_steps` leaves out at the end
    return tokens(60)


@pytest.mark.parametrize("position", ["pre", "post", "sublayer"])
@pytest.mark.parametrize("norm", ["rmsnorm", "none"])
def test_logits_are_scaled_in_every_engine(position, norm):
    config = replace(WIDE, norm_position=position, norm=norm)
    model = TransformerLM(config)
    plain = TransformerLM(replace(config, mup_base_width=None))
    plain.load_state_dict(model.state_dict())
    ids = torch.arange(10)
    with torch.no_grad(): logits = model(ids[None])[0]
    with torch.no_grad(): check_close(logits, plain(ids[None])[0]/4, 1e-5, 1e-7)
    check_close(transformer_forward(params_of(model), ids.numpy(), config)[0], logits.numpy(), 1e-4, 1e-5)
    if compiles(): check_close(FastDecoder(model).feed(ids.tolist(), all=True), logits, 1e-4, 1e-5)
    check_close(CachedDecoder(model).feed(ids.tolist(), all=True), logits, 1e-4, 1e-5)
    targets = (ids + 1)[None]
    loss, grads = loss_and_grads(params_of(model), ids[None].numpy(), targets.numpy(), config)
    model.loss(ids[None], targets).backward()
    check_close(float(model.loss(ids[None], targets)), float(loss), 1e-5)
    for name, p in model.named_parameters():
        g = grads[name]
        check_close(g.dense() if hasattr(g, "dense") else g, p.grad.numpy(), 1e-3, 1e-6, name)


def test_at_the_base_width_nothing_changes():
    for engine in ("torch", "numpy"):
        runs = [new_run(replace(WIDE, mup_base_width=base), engine=engine) for base in (None, 64)]
        losses = [run_steps(r, data(), [.01]*4, batch_size=2) for r in runs]
        assert losses[0] == losses[1]
        for a, b in zip(*(r.model.parameters() for r in runs)): assert torch.equal(a, b)
    assert not learning_rate_scales(replace(WIDE, mup_base_width=64)) and len(parameter_groups(runs[1].model, .1)) == 2


def test_rates_of_hidden_matrices_alone_are_scaled():
    model = TransformerLM(WIDE)
    groups = parameter_groups(model, .1)
    slow = {id(p) for g in groups if g.get("lr_scale", 1) == .25 for p in g["params"]}
    names = {name for name, p in model.named_parameters() if id(p) in slow}
    assert names == set(learning_rate_scales(WIDE)) and len(names) == 14
    assert sum(len(g["params"]) for g in groups) == len(list(model.parameters()))
    assert all(n.startswith("layers.") and n.endswith(("proj.weight", "w1.weight", "w2.weight", "w3.weight")) for n in names)


@pytest.mark.parametrize("engine", ["torch", "numpy"])
def test_a_first_step_moves_hidden_matrices_by_a_quarter(engine):
    run = new_run(WIDE, engine=engine)
    before = {n: p.detach().clone() for n, p in run.model.named_parameters()}
    run_steps(run, data(), [1e-3], batch_size=2)
    far = {n: (p - before[n]).abs().max().item() for n, p in run.model.named_parameters()}
    for name, moved in far.items():
        assert moved == pytest.approx(2.5e-4 if name in learning_rate_scales(WIDE) else 1e-3, rel=.02), name


def test_adamw_np_scales_by_name():
    params = {n: np.ones((2, 2), np.float32) for n in "ab"}
    AdamWNp(params, weight_decay=0., lr_scales={"b": .5}).step({n: np.ones((2, 2), np.float32) for n in "ab"}, .1)
    check_close(params["a"], np.full((2, 2), .9, np.float32), 1e-5)
    check_close(params["b"], np.full((2, 2), .95, np.float32), 1e-5)


def test_the_head_begins_as_large_as_at_the_base():
    for make in (lambda c: init_params(c)["lm_head.weight"], lambda c: TransformerLM(c).lm_head.weight.detach().numpy()):
        wide, base = (make(ModelConfig(vocab_size=512, d_model=d, num_heads=4, num_layers=1, mup_base_width=32)) for d in (512, 32))
        assert wide.std() == pytest.approx(base.std(), rel=.02)
        check_close(float(wide.std()), (2/(512 + 32))**.5, .03)


def test_exported_weights_hold_the_factor():
    pytest.importorskip("transformers")
    model = TransformerLM(replace(WIDE, num_heads=4, head_dim=None))
    theirs = to_hf(model).eval()
    ids = torch.arange(9)[None]
    with torch.no_grad(): check_close(theirs(ids).logits, model(ids), 1e-4, 1e-5)
    assert config_from_hf(config_to_hf(model.config)).mup_base_width is None


@pytest.mark.parametrize("changes, words", [
    (dict(tie_embeddings=True), "tie_embeddings = True with mup_base_width = 16, expected tie_embeddings = False"),
    (dict(num_experts=4), "num_experts = 4 with mup_base_width = 16, expected num_experts = none"),
    (dict(kv_lora_rank=8, num_kv_heads=None, head_dim=None), "kv_lora_rank = 8 with mup_base_width"),
    (dict(mup_base_width=0), "mup_base_width = 0, expected more than 0")])
def test_what_is_refused(changes, words):
    with pytest.raises(ValueError, match=words): replace(WIDE, **changes)


def test_muon_is_refused():
    with pytest.raises(ValueError, match="Muon does not compute mup_base_width = 16: adamw does"):
        OPTIMIZERS["muon"](TransformerLM(WIDE), TrainConfig(optimizer="muon"))
    with pytest.raises(ValueError, match="mup_base_width"): new_run(WIDE).__class__(WIDE, TrainConfig(optimizer="muon", device="cpu"))


def test_fits():
    assert width_slope([1, 2, 4], [3, 12, 48]) == pytest.approx(2)
    assert best_rate([1., 2., 4., 8.], [np.log(r/3)**2 for r in (1, 2, 4, 8)]) == pytest.approx(3)
    for losses in ([1, 2, 3], [3, 2, 1], [3, 2, 1, np.nan]):
        with pytest.raises(ValueError, match="try more rates|no loss at 8.0, beside the lowest at 4.0"): best_rate([1., 2., 4., 8.][:len(losses)], losses)
    assert best_rate([1., 2., 4., 8.], [2, 1, 2, np.nan]) == pytest.approx(2)       # A run that diverged, further away


def test_a_failed_forward_leaves_no_hook():
    def hooks(): return sum(len(m._forward_hooks) for m in model.modules())
    model = TransformerLM(WIDE)
    before = hooks()
    with pytest.raises(ValueError, match="1000 tokens"): mup.watched_outputs(model, torch.zeros(1, 1000, dtype=torch.long))
    assert hooks() == before


def test_tail_rates():
    rates = wsd_rates(100, .5, 10, .2)
    assert len(rates) == 100 and rates[0] == .05 and rates[9:81] == [.5]*72 and rates[99] == pytest.approx(.025)
    assert wsd_rates(3, 1., 0, 0.) == [1.]*3
    for bad in (dict(steps=0), dict(warmup=-1), dict(cooldown=1.5)):
        with pytest.raises(ValueError, match="wsd_rates"): wsd_rates(**dict(steps=5, lr=1.) | bad)


def test_windows_come_in_order_and_start_with_a_story():
    seen = []
    class Engine:
        model = type("M", (), dict(config=WIDE))
        def forward_backward(self, batch): seen.append([t.numpy() for t in batch]); return 1.
        def optimizer_step(self, lr): seen.append(lr)
    d = data()
    assert run_steps(Engine(), d, [.1, .2], first=3, batch_size=2) == [1., 1.]
    assert seen[1] == .1 and seen[3] == .2
    for k, (inputs, targets) in enumerate(seen[::2]):
        for j in range(2):
            at = d.starts[3 + 2*k + j]
            assert np.array_equal(targets[j], d.tokens[at:at + 12])
            assert np.array_equal(inputs[j], np.append(0, targets[j][:-1]))


def test_the_coordinate_check_needs_stories_that_it_does_not_train_on():
    with pytest.raises(ValueError, match="307 stories for 1 steps, expected at least 308"): mup.coordinate_check(tokens(307), [16], 16, steps=1)
