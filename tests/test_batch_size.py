"""The gradient noise scale with its error, steps to a loss, and the critical batch size; and the bench on which small models train."""
import json, math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from lmcourse.parallelism.batch_size import (
    batch_gradients,
    fit_critical_batch,
    gradient_noise,
    new_run,
    run_steps,
    small_model,
    steps_to_loss,
    story_batch,
    wsd_rates,
)
from lmcourse.tools.checks import check_close
from lmcourse.training.data import TokenDataset
from lmcourse.training.engines import noise_scale

MODEL = small_model(16, 1, vocab_size=40, context_length=12)
RESULTS = Path(__file__).parent.parent/"nbs/results/batch_size.jsonl"


def data():
    rng = np.random.default_rng(0)
    return TokenDataset(rng.integers(40, size=1200).astype(np.uint16), np.arange(60)*20, dict(end_of_text=0, vocab_size=40))


def test_windows_need_more_stories_than_tokens():
    "Fewer would give a negative row, and so a window that begins anywhere."
    with pytest.raises(ValueError, match="60 stories for windows of 60 tokens, expected more than 60"): story_batch(data(), [0], 60)
    assert story_batch(data(), [0], 59)[0].shape == (1, 59)


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
    for bad in (([1], [1]), ([4, 4], [10, 10]), ([1, 2, 4], [10, 20, 40]), ([1, 2], [1]), ([1, 0], [1, 1]), ([1, 2], [0, 1]), ([1, 2], [9, np.nan])):
        with pytest.raises(ValueError, match="fit_critical_batch"): fit_critical_batch(*bad)


def test_a_batch_begins_with_stories():
    d = data()
    inputs, targets = story_batch(d, [3, 5, 48 + 3], 12)                        # 60 stories, the last 12 are left out
    assert inputs.shape == targets.shape == (3, 12) and (inputs[:, 0] == 0).all() and torch.equal(inputs[:, 1:], targets[:, :-1])
    assert targets[1].tolist() == d.tokens[100:112].tolist() and torch.equal(targets[0], targets[2])


def test_steps_read_their_rows_in_order():
    d, whole, parts = data(), new_run(MODEL), new_run(MODEL)
    losses = run_steps(whole, d, [.01]*6, first=5, batch_size=3)
    assert losses == run_steps(parts, d, [.01]*2, 5, 3) + run_steps(parts, d, [.01]*4, 5 + 6, 3)


def test_rates_of_a_run():
    rates = wsd_rates(50, .3, 5, .4)
    assert rates[4:31] == [.3]*27 and all(a < b for a, b in pairwise(rates[:5])) and all(a > b for a, b in pairwise(rates[30:]))
    assert wsd_rates(1, 1., 0, 0.) == [1.]
    for bad in ((0, 1.), (5, 1., -1), (5, 1., 1, 2.)):
        with pytest.raises(ValueError, match="wsd_rates"): wsd_rates(*bad)
    for width in (0, 12):
        with pytest.raises(ValueError, match=f"width = {width}, expected a multiple of 8"): small_model(width)


def test_steps_to_a_loss():
    curve = 6*np.arange(1, 1001.)**-.25
    for target in (3., 2., 1.5):
        assert abs(steps_to_loss(curve, target)/(6/target)**4 - 1) < .02
    noisy = curve*np.exp(.1*np.random.default_rng(0).standard_normal(1000))
    assert abs(steps_to_loss(noisy, 1.5)/256 - 1) < .1                          # One lucky step doesn't count
    assert math.isnan(steps_to_loss(curve, 1.)) and math.isnan(steps_to_loss([], 1.)) and steps_to_loss([1., 1.], 2.) == 1
    assert steps_to_loss([3., 2., 1.], 2., window=0) == 2                       # One step alone
    with pytest.raises(ValueError, match="window = -1"): steps_to_loss([1.], 2., window=-1)


def test_saved_runs_are_whole():
    about, *rows = map(json.loads, RESULTS.read_text().splitlines())
    assert {"machine", "date", "command", "floor"} <= about.keys() and RESULTS.stat().st_size < 200_000
    noise = [r for r in rows if r["kind"] == "noise"]
    assert {r["seed"] for r in noise} == {0, 1, 2} and all(r["gradients"] >= 500 and r["error"] < r["noise"] for r in noise)
    assert all(len({r["seed"] for r in rows if r["kind"] == "batch" and r["batch"] == B}) == 3 for B in (2, 4, 8, 16, 32))
