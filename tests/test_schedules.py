"""Branches of a run, and what they cost."""
import copy, json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from lmcourse.parallelism.batch_size import new_run, run_steps, small_model, wsd_rates
from lmcourse.scaling.schedules import branch_steps
from lmcourse.training.data import TokenDataset

MODEL = small_model(16, 1, vocab_size=40, context_length=12)
RESULTS = Path(__file__).parent.parent/"nbs/results/schedules.jsonl"


def data():
    rng = np.random.default_rng(0)
    return TokenDataset(rng.integers(40, size=1200).astype(np.uint16), np.arange(60)*20, dict(end_of_text=0, vocab_size=40))


@pytest.mark.parametrize("engine", ["torch", "numpy"])
def test_a_branch_is_the_shorter_run(engine):
    long, short = wsd_rates(20, .02, 3), wsd_rates(10, .02, 3)
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


def test_saved_runs_are_whole():
    about, *rows = map(json.loads, RESULTS.read_text().splitlines())
    assert {"machine", "date", "command"} <= about.keys()
    assert {(r["steps"], r["seed"]) for r in rows if r["kind"] == "branch"} == {(n, s) for n in (150, 300, 600) for s in range(3)}
    same = [r["loss"] for r in rows if r["kind"] in ("branch", "alone") and r["steps"] == 300 and r["seed"] == 0]
    assert len(same) == 2 and same[0] == same[1]
