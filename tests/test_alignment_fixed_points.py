"Algorithms on the enumerable world: short runs move to their targets, seeds repeat, noise dies out at the optimum, and the saved runs belong to this world."
import json
from pathlib import Path

import pytest
import torch

from lmcourse.alignment.fixed_points import Batch, algorithms, train_toy
from lmcourse.alignment.toy import parrot, total_variation

TOY = parrot()
CHOSEN = algorithms(TOY)


@pytest.mark.parametrize("name", CHOSEN)
def test_a_short_run_comes_nearer_to_its_target_and_repeats(name):
    loss, target, updates = CHOSEN[name]
    first, again = (train_toy(TOY, loss, 120, updates=updates, batch=128, every=60) for _ in range(2))
    assert [k for k, _ in first] == [0, 60, 120] and all(torch.equal(p, q) for (_, p), (_, q) in zip(first, again))
    for _, p in first: assert abs(p.sum().item() - 1) < 1e-12 and (p >= 0).all()
    if target is not None: assert total_variation(first[-1][1], target) < .75*total_variation(first[0][1], target)
    other = train_toy(TOY, loss, 120, updates=updates, batch=128, every=60, seed=1)
    assert not torch.equal(other[-1][1], first[-1][1])


def drawn(p, seed, values=0.):
    ids = torch.multinomial(p, 64, True, generator=torch.Generator().manual_seed(seed))
    table = TOY.table(p).requires_grad_()
    now, mask = TOY.log_probs(table)[ids], TOY.mask[ids]
    return table, Batch(now, now.detach(), TOY.log_probs(TOY.ref)[ids], mask, TOY.rewards[ids], mask*values, TOY.beta, 8)


@pytest.mark.parametrize("name", [n for n in CHOSEN if "in the reward" in n])
def test_no_batch_moves_a_policy_off_the_optimum(name):
    for seed in range(3):
        table, b = drawn(TOY.optimum(), seed)
        assert torch.autograd.grad(CHOSEN[name][0](b), table)[0].abs().max() < 1e-8
    table, b = drawn(TOY.probs(TOY.ref), 0)
    assert torch.autograd.grad(CHOSEN[name][0](b), table)[0].abs().max() > 1e-3


def test_dr_grpo_is_rloo_with_a_larger_kl():
    table, b = drawn(TOY.probs(TOY.ref + torch.randn(40, 4, generator=torch.Generator().manual_seed(0)).double()), 0)
    dr, = torch.autograd.grad(CHOSEN["Dr. GRPO, k3 of each token"][0](b), table, retain_graph=True)
    rloo, = torch.autograd.grad(CHOSEN["RLOO, k3 of each token"][0](b._replace(beta=TOY.beta*8/7)), table)
    torch.testing.assert_close(dr, rloo*7/8, rtol=1e-9, atol=1e-14)


def test_saved_runs_are_of_this_world():
    rows = [json.loads(line) for line in (Path(__file__).parents[1]/"nbs/results/fixed_points.jsonl").read_text(encoding="utf-8").splitlines()]
    assert sorted((r["algorithm"], r["seed"]) for r in rows) == sorted((name, seed) for name in CHOSEN for seed in range(3))
    ref = TOY.probs(TOY.ref)
    for r in rows:
        target = CHOSEN[r["algorithm"]][1]
        assert r["steps"] == list(range(0, 3001, 100)) and r["to_optimum"][0] == pytest.approx(total_variation(ref, TOY.optimum()), abs=1e-6)
        assert r["to_target"] is None if target is None else r["to_target"][0] == pytest.approx(total_variation(ref, target), abs=1e-6)


def test_bad_input_is_rejected():
    loss = CHOSEN["DAPO"][0]
    for how, words in ((dict(steps=0), "steps = 0"), (dict(batch=100), "batch = 100"), (dict(updates=0), "updates = 0")):
        with pytest.raises(ValueError, match=words): train_toy(TOY, loss, **how)
