"Rollouts: log-probabilities are the model's after every update; batches made ahead come from weights of a known age."
import threading
import time

import pytest

torch = pytest.importorskip("torch")

from recorder import recorder

from lmcourse.alignment import rollouts
from lmcourse.alignment.briefs import brief_prompts
from lmcourse.alignment.rollouts import AsyncBatches, Rollout, Sampler, rollout_tensors
from lmcourse.alignment.sft import get_response_log_probs
from lmcourse.architecture.transformer_torch import TransformerLM
from lmcourse.tools.config import ModelConfig
from lmcourse.training.models import load_model

TOKENIZER = load_model()[1]
CONFIG = ModelConfig(vocab_size=TOKENIZER.vocab_size, context_length=64, d_model=32, num_layers=2, num_heads=4, d_ff=64, tie_embeddings=True, qk_norm=True)


@torch.no_grad()
def moved(model, seed):
    g = torch.Generator().manual_seed(seed)
    for p in model.parameters(): p.mul_(1 + .2*torch.randn(p.shape, generator=g))


def test_the_policy_samples_with_the_products_of_training(monkeypatch):
    within, model = [], TransformerLM(CONFIG, 0)
    monkeypatch.setattr(rollouts, "tf32_products", recorder(within))
    sampler, (device,) = Sampler(model, TOKENIZER, 4, 2), {p.device for p in model.parameters()}
    run = sampler.engine.run
    monkeypatch.setattr(sampler.engine, "run", lambda requests: within.append("run") or run(requests))
    sampler(brief_prompts(1, 2))
    assert within == [device, "run", "left"]


def test_log_probs_are_the_models_after_every_update_the_end_included():
    model = TransformerLM(CONFIG, 0)
    with torch.no_grad(): model.token_embeddings.weight[TOKENIZER.end_of_text] *= 3.
    sampler, ends = Sampler(model, TOKENIZER, 20, 8), 0
    for k in range(5):
        rollouts = sampler(brief_prompts(4, 2), 6, k)
        rows = rollout_tensors(rollouts, TOKENIZER.end_of_text)
        with torch.no_grad(): found = get_response_log_probs(model, rows["input_ids"], rows["labels"])["log_probs"]
        assert ((found - rows["old_log_probs"])*rows["response_mask"]).abs().max() < 1e-5
        assert {r.version for r in rollouts} == {k}
        for r, mask in zip(rollouts, rows["response_mask"]):
            assert mask.sum() == len(r.log_probs) == len(r.ids) - r.start and r.finished == (r.ids[-1] == TOKENIZER.end_of_text)
            assert r.finished or len(r.log_probs) == 20
            ends += r.finished
        moved(model, k)
        sampler.load(model)
    assert ends > 0, "no rollout ended, so the end token's log-probability was not looked at"


def test_the_same_seed_gives_the_same_rollouts_in_any_company():
    sampler, prompts = Sampler(TransformerLM(CONFIG, 1), TOKENIZER, 8, 4), brief_prompts(3, 5)
    a = sampler(prompts, 2, 9)
    assert a == sampler(prompts, 2, 9) == Sampler(TransformerLM(CONFIG, 1), TOKENIZER, 8, 2)(prompts, 2, 9) and a != sampler(prompts, 2, 8)


@pytest.mark.parametrize("k", [0, 1, 2, 5])
def test_a_batch_comes_from_weights_exactly_that_old_however_slow_a_side_is(k):
    model = torch.nn.Linear(1, 1, bias=False)
    with torch.no_grad(): model.weight.fill_(0.)
    gate = threading.Event()
    def make(weights, step):
        if step % 3 == 1: gate.wait(.01)
        return step, weights.weight.item()
    batches = AsyncBatches(make, model, k)
    batches.go_to(4)
    for step in range(4, 14):
        assert next(batches) == (step, float(max(4, step - k) - 4))
        if step % 2: time.sleep(.005)
        with torch.no_grad(): model.weight.add_(1.)
    batches.close()


@pytest.mark.parametrize("k", [0, 1, 3])
def test_an_error_of_the_writer_reaches_the_trainer_and_skips_no_step(k):
    fault, found = [1], []
    def make(weights, step):
        if step in fault: raise ValueError(f"planted {fault.pop()}")
        return step
    batches = AsyncBatches(make, torch.nn.Linear(1, 1), k)
    for _ in range(5):
        try: found.append(next(batches))
        except ValueError as e: found.append(str(e))
    batches.close()
    assert found == [0, "planted 1", 1, 2, 3]


def test_tensors_by_hand():
    a = Rollout("p", "r", (0, 5, 6, 7), 2, (-1., -2.), 0, False)
    b = Rollout("p", "r", (0, 5, 0), 2, (-3.,), 0, True)
    rows = rollout_tensors([a, b], 9)
    assert rows["input_ids"].tolist() == [[0, 5, 6], [0, 5, 0]] and rows["labels"].tolist() == [[5, 6, 7], [5, 0, 9]]
    assert rows["response_mask"].tolist() == [[False, True, True], [False, True, False]] and rows["old_log_probs"].tolist() == [[0, -1, -2], [0, -3, 0]]


def test_rejected():
    model = TransformerLM(CONFIG, 0)
    sampler = Sampler(model, TOKENIZER, 8, 4)
    with pytest.raises(ValueError, match="max_tokens = 0"): Sampler(model, TOKENIZER, 0)
    with pytest.raises(ValueError, match="at least one prompt"): sampler([])
    with pytest.raises(ValueError, match="group_size = 0"): sampler(["a"], 0)
    with pytest.raises(ValueError, match="context_length is 64"): sampler(["a", "a b c d "*40])
    sampler.load(model)                                                     # Nothing is left in the engine
    with pytest.raises(ValueError, match="staleness = -1"): AsyncBatches(None, model, -1)
