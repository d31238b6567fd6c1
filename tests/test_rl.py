"Reinforcement learning on briefs: batches, the gradient, going on bit by bit, and what is rejected."
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from lmcourse.alignment.briefs import SLOTS, Demonstrators, brief_prompts, prompt_words
from lmcourse.alignment.rl import ALGORITHMS, REWARDS, RlConfig, RolloutBatches, imitation_weights, measure_policy, policy_objective, resume_rl, slot_confidence, start_rl
from lmcourse.alignment.rollouts import AsyncBatches
from lmcourse.alignment.sft import get_response_log_probs
from lmcourse.architecture.transformer_torch import TransformerLM
from lmcourse.tools.config import ModelConfig, TrainConfig
from lmcourse.training.data import TokenDataset, write_tokens
from lmcourse.training.engines import World
from lmcourse.training.models import load_model

TOKENIZER = load_model()[1]
CONFIG = ModelConfig(vocab_size=TOKENIZER.vocab_size, context_length=96, d_model=32, num_layers=1, num_heads=2, d_ff=64, norm="layernorm", bias=True)
REWARDS["letters"] = lambda prompt, response: float("e" in response)       # Something that a model without training gets now and then
FEW = RlConfig(reward="letters", prompts=2, group_size=4, max_tokens=8)
TRAIN = TrainConfig(steps=6, lr=1e-2, min_lr=1e-2, schedule="constant", warmup_steps=1, weight_decay=0.)


@pytest.fixture(scope="module")
def valid(tmp_path_factory):
    folder = tmp_path_factory.mktemp("valid")
    write_tokens(folder/"valid", map("".join, islice(Demonstrators(0., 5), 4)), TOKENIZER, "briefs")
    return TokenDataset.open(folder/"valid")


@torch.no_grad()
def small(seed):
    "A model that ends its responses now and then, which one without training never does."
    model = TransformerLM(CONFIG, seed)
    model.ln_final.bias.fill_(1.)
    model.lm_head.weight[TOKENIZER.end_of_text] += .19
    return model


def weights(trainer): return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


@pytest.mark.parametrize("algorithm, kl", [(name, kl) for name in ALGORITHMS for kl in (0., .1) if not (name == "expert" and kl)])
def test_a_run_that_is_stopped_goes_on_bit_by_bit(algorithm, kl, valid, tmp_path):
    model, config = small(3), replace(FEW, algorithm=algorithm, kl=kl)
    whole, stopped, resumed = (start_rl(model, TOKENIZER, config, TRAIN, valid) for _ in range(3))
    for _ in range(4): whole.train_step()
    for _ in range(3): stopped.train_step()
    stopped.save(tmp_path)
    resume_rl(resumed, tmp_path)
    assert resumed.step == 3
    resumed.train_step()
    assert torch.equal(weights(whole), weights(resumed))
    assert not torch.equal(weights(whole), weights(stopped)) and max(line["reward"] for line in whole.batches.make.log) > 0
    for t in (whole, stopped, resumed): t.batches.close()


@pytest.mark.parametrize("algorithm", ["rloo", "grpo"])
def test_on_fresh_samples_the_gradient_is_the_naive_one(algorithm):
    model, config = small(1), replace(FEW, algorithm=algorithm)
    batch = RolloutBatches(model, TOKENIZER, config)(model, 0)
    ids, labels, mask, _, advantages = batch
    log_probs = get_response_log_probs(model, ids, labels)["log_probs"]
    by_row = -(advantages[:, None]*log_probs*mask).sum(1)
    naive = (by_row/(mask.sum(1) if algorithm == "grpo" else 8)).mean()
    a, b = (torch.autograd.grad(x, model.layers[0].ffn.w2.weight, retain_graph=True)[0] for x in (naive, policy_objective(config).loss(model, *batch)))
    assert torch.allclose(a, b, rtol=1e-4, atol=1e-7) and a.abs().max() > 0


def test_micro_batches_give_the_step_of_the_batch(valid):
    model = small(2)
    once, twice = (start_rl(model, TOKENIZER, FEW, replace(TRAIN, micro_batch=m), valid) for m in (8, 2))
    for t in (once, twice): t.train_step(); t.batches.close()
    assert torch.allclose(weights(once), weights(twice), atol=1e-5)


def test_a_step_has_the_prompts_of_its_config_whatever_the_tokens_per_step(valid):
    trainer = start_rl(small(1), TOKENIZER, FEW, replace(TRAIN, tokens_per_step=96*4), valid)
    assert trainer.plan.windows == len(trainer.batches.make(trainer.model, 0)[0]) == 8
    trainer.batches.close()


def test_rewards_that_vary_are_learnt(valid):
    model = small(4)
    config = RlConfig(reward="letters", prompts=4, group_size=8, max_tokens=8)
    trainer = start_rl(model, TOKENIZER, config, replace(TRAIN, steps=25, lr=3e-2, min_lr=3e-2), valid)
    for _ in range(25): trainer.train_step()
    trainer.batches.close()
    rewards = [line["reward"] for line in trainer.batches.make.log]
    assert sum(rewards[-5:]) > sum(rewards[:5]), rewards
    assert [line["step"] for line in trainer.batches.make.log] == list(range(25))


def test_a_copy_of_the_reference_has_no_divergence_and_a_moved_one_has():
    model, other = TransformerLM(CONFIG, 5), TransformerLM(CONFIG, 5)
    prompts = brief_prompts(6, 1)
    same = measure_policy(model, TOKENIZER, prompts, 0, other, 8)
    assert abs(same["kl"]) < 1e-4 and same["success"] == 0 and 0 < same["entropy"] <= torch.tensor(float(CONFIG.vocab_size)).log() + 1e-4
    with torch.no_grad(): other.lm_head.weight.mul_(8.)
    assert measure_policy(model, TOKENIZER, prompts, 0, other, 8)["kl"] > .01 and "kl" not in measure_policy(model, TOKENIZER, prompts, 0, None, 8)


def test_weights_of_imitation_have_the_mean_one_or_are_nothing():
    assert imitation_weights(torch.tensor([1., 0., 0., 0.]), 2).tolist() == [4, 0, 0, 0]
    assert imitation_weights(torch.zeros(4), 2).tolist() == [0]*4


@pytest.mark.parametrize("kwargs, words", [
    (dict(algorithm="ppo"), "algorithm = 'ppo'"), (dict(reward="x"), "reward = 'x'"), (dict(group_size=1), "group_size = 1, expected an integer, 2 or more"), (dict(kl=-.1), "kl = -0.1"),
    (dict(kl=float("nan")), "kl = nan"), (dict(kl=float("inf")), "kl = inf"), (dict(prompts=2.5), "prompts = 2.5"), (dict(prompts=0), "prompts = 0"), (dict(max_tokens=0), "max_tokens"), (dict(staleness=-1), "staleness"), (dict(clip=-1.), "clip")])
def test_rejected(kwargs, words):
    with pytest.raises(ValueError, match=words): RlConfig(**kwargs)


def test_confidence_is_read_off_where_a_word_of_the_prompt_comes_again():
    model, pairs = small(3), list(islice(Demonstrators(0., 9), 5))
    found, end = slot_confidence(model, TOKENIZER, pairs), TOKENIZER.end_of_text
    for slot in SLOTS:
        expected = []
        for prompt, response in pairs:
            word, ids = prompt_words(prompt)[slot], TOKENIZER.encode(response)
            texts = [TOKENIZER.decode([t]) for t in ids]
            for i in range(len(ids)):
                n = next((n for n in range(1, len(ids) - i + 1) if "".join(texts[i:i + n]) == f" {word}"), None)
                if n is None or i + n < len(ids) and texts[i + n][0].isalpha(): continue
                row, nats = [end, *TOKENIZER.encode(prompt), *ids[:i]], 0.
                for k in range(n):
                    with torch.no_grad(): p = model(torch.tensor([row]))[0, -1].softmax(-1)
                    if k == 0: first = (p.max().item(), int(p.argmax()) == ids[i])
                    nats -= p[ids[i + k]].log().item()
                    row.append(ids[i + k])
                expected.append((*first, nats))
        assert len(expected) == len(found[slot]) > 5
        for (confidence, right, nats), got in zip(expected, found[slot]):
            assert got["confidence"] == pytest.approx(confidence, abs=1e-5) and got["right"] == right and got["nats"] == pytest.approx(nats, abs=1e-4)


def test_confidence_is_measured_on_the_device_of_the_model():
    "The meta device stands in for a GPU: only where the rows are is looked at."
    asked, model, pairs = [], torch.nn.Linear(1, 1, device="meta"), list(islice(Demonstrators(0., 9), 1))
    def answer(ids):
        asked.append(ids.device.type)
        return torch.zeros(*ids.shape, TOKENIZER.vocab_size)
    model.forward = answer
    assert slot_confidence(model, TOKENIZER, pairs)["kind"] and asked == ["meta"]


def test_a_policy_is_measured_on_at_least_one_prompt():
    with pytest.raises(ValueError, match="no prompts"): measure_policy(small(0), TOKENIZER, [])


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_trainer_that_trained_on_goes_back_to_its_checkpoint(staleness):
    batches = AsyncBatches(lambda model, step: step, torch.nn.Linear(1, 1), staleness)
    assert [next(batches) for _ in range(3)] == [0, 1, 2]
    resume_rl(SimpleNamespace(batches=batches, step=1, resume=lambda run: None), "run")
    assert [next(batches) for _ in range(3)] == [1, 2, 3]
    batches.close()


def test_the_runs_of_the_course_measure_the_policy_that_they_end_with(monkeypatch):
    "Also where the time is up between two measurements."
    monkeypatch.syspath_prepend(Path(__file__).parents[1]/"tools")
    import alignment_runs
    times = iter(range(99))
    monkeypatch.setattr(alignment_runs, "measure_policy", lambda *args: {})
    monkeypatch.setattr(alignment_runs.time, "process_time", lambda: next(times))
    trainer = SimpleNamespace(train_step=lambda: None, model=None, batches=None)
    for limit, steps in ((dict(cpu_s=12.), [0, 10, 13]), ({}, [0, 10, 20, 25])):
        assert alignment_runs.curve(trainer, 25, None, None, row := dict(limit)) == steps[-1]
        assert [c["step"] for c in row["curve"]] == steps


def test_processes_share_prompts_only_where_they_can():
    for few, words in ((replace(FEW, prompts=3), "prompts = 3 for 2 processes"), (replace(FEW, staleness=1), "staleness = 1 for 2 processes")):
        with pytest.raises(ValueError, match=words): RolloutBatches(small(0), TOKENIZER, few, world=World(0, 2))
