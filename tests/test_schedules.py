"""Branches of a run, the gradient noise scale with its error, and the critical batch size."""
import copy, json, math
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from lmcourse.scaling.mup import new_run, run_steps, small_model, tail_rates
from lmcourse.scaling.schedules import batch_gradients, branch_steps, fit_critical_batch, gradient_noise
from lmcourse.tools.checks import check_close
from lmcourse.training.data import TokenDataset
from lmcourse.training.engines import noise_scale

MODEL = small_model(16, 1, vocab_size=40, context_length=12)
RESULTS = Path(__file__).parent.parent/"nbs/results/schedules.jsonl"


def data():
    rng = np.random.default_rng(0)
    return TokenDataset(rng.integers(40, size=1200).astype(np.uint16), np.arange(60)*20, dict(end_of_text=0, vocab_size=40))


@pytest.mark.parametrize("engine", ["torch", "numpy"])
def test_a_branch_is_the_shorter_run(engine):
    long, short = tail_rates(20, .02, 3), tail_rates(10, .02, 3)
    trunk, alone = new_run(MODEL, engine=engine), new_run(MODEL, engine=engine)
    run_steps(trunk, data(), long[:8], batch_size=2)
    if engine == "torch":
        branch = copy.deepcopy(trunk)
        rest = run_steps(branch, data(), short[8:], first=16, batch_size=2)
        assert run_steps(trunk, data(), long[8:10], first=16, batch_size=2)[0] == rest[0]    # The trunk goes on untouched
    else: run_steps(trunk, data(), short[8:], first=16, batch_size=2); branch = trunk
    run_steps(alone, data(), short, batch_size=2)
    for a, b in zip(branch.model.parameters(), alone.model.parameters()): assert torch.equal(a, b)


def test_branch_steps_counts_the_trunk_once():
    assert branch_steps([100]) == 100 and branch_steps([100, 200], .1) == 180 + 10 + 20
    assert branch_steps([10, 10], 0.) == 10 and branch_steps([10, 20], 1.) == 30
    for share in (-.1, 1.1):
        with pytest.raises(ValueError, match="expected 0 to 1"): branch_steps([10], share)


def test_noise_of_planted_gradients():
    rng = np.random.default_rng(3)
    G, spread, b = rng.normal(size=30)*.5, rng.uniform(.5, 2, 30), 4
    truth, found = (spread**2).sum()/(G @ G), []
    for _ in range(200):
        g = G + spread*rng.normal(size=(48, 30))/b**.5
        found.append(gradient_noise(g @ g.T, b))
        small, large = (g**2).sum(1).mean(), (g.mean(0)**2).sum()
        check_close(found[-1][0], noise_scale(small, large, b, 48*b), 1e-9)
    values, errors = np.array(found).T
    assert abs(values.mean()/truth - 1) < .05
    assert .85 < np.mean(abs(values - truth) < 2*errors) and .7 < errors.mean()/values.std() < 1.4


def test_noise_without_a_signal_is_not_a_number():
    g = np.concatenate([np.eye(4), -np.eye(4)])
    assert math.isnan(gradient_noise(g @ g.T, 1)[0])
    for bad in (np.eye(2), np.ones((4, 3))):
        with pytest.raises(ValueError, match="gradient_noise"): gradient_noise(bad, 1)


def test_gradients_of_windows_add_up_to_that_of_their_batch():
    run, d = new_run(MODEL), data()
    before = [p.detach().clone() for p in run.model.parameters()]
    dots = batch_gradients(run, d, 4, first=2)
    assert all(torch.equal(a, b) for a, b in zip(before, run.model.parameters()))
    at = d.starts[2:6]
    targets = torch.from_numpy(d.tokens[at[:, None] + np.arange(12)].astype(np.int64))
    inputs = torch.cat([torch.zeros(4, 1, dtype=torch.int64), targets[:, :-1]], 1)
    run.model.loss(inputs, targets).backward()
    check_close(float(dots.mean()), sum((p.grad**2).sum().item() for p in run.model.parameters()), 1e-4)


def test_critical_batch():
    B = np.array([1., 2, 8, 32])
    check_close(list(fit_critical_batch(B, 70*(1 + 5/B))), [70., 5.], 1e-9)
    for bad in (([1], [1]), ([1, 2], [1]), ([1, 0], [1, 1]), ([1, 2], [0, 1])):
        with pytest.raises(ValueError, match="fit_critical_batch"): fit_critical_batch(*bad)


def test_saved_runs_are_whole():
    about, *rows = map(json.loads, RESULTS.read_text().splitlines())
    assert {"machine", "date", "command"} <= about.keys()
    assert {(r["steps"], r["seed"]) for r in rows if r["kind"] == "branch"} == {(n, s) for n in (150, 300, 600) for s in range(3)}
    same = [r["loss"] for r in rows if r["kind"] in ("branch", "alone") and r["steps"] == 300 and r["seed"] == 0]
    assert len(same) == 2 and same[0] == same[1]
