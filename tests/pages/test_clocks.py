"No test asks a clock: a slow, busy or foreign machine turns nothing red. `clocks.py` says how it is found."
import json
from pathlib import Path

import pytest
from clocks import clock_assertions

ROOT = Path(__file__).parents[2]
NBS, TESTS = sorted((ROOT / "nbs").rglob("*.ipynb")), sorted((ROOT / "tests").rglob("*.py"))

TIMED = [
    "start = time.perf_counter(); f(); assert time.perf_counter() - start < 2",
    "from time import perf_counter\nbegin = perf_counter()\nseconds = perf_counter() - begin\nassert 0 < seconds < 1",
    "times = {'a': []}\nfor name in times:\n    t = time.process_time()\n    times[name].append(time.process_time() - t)\nassert min(times['a']) < 1",
    "times = {}\nfor f, kept in times.items():\n    kept.append(time.monotonic())\nbest = min(times[f])\nassert best < 1",
    "def ratio(f, g):\n    t = [time.perf_counter() for _ in range(3)]\n    return t[1]/t[2]\nrows = [dict(way=k, speed=ratio(k, 1)) for k in 'ab']\nassert rows[0]['speed'] > 1",
    "best = best_seconds({'a': f})\nrates = {k: 1e9/s for k, s in best.items()}\nassert rates['a'] > 5",
    "assert trainer.elapsed < 3", "found, took = timed(f)\nassert took['wall_s'] < 1", "check_close(measure_step(trainer), .1)",
    "with patch.object(json, 'loads', f): at = time.perf_counter()\nassert at == 7",
    "with patch('time.sleep', f): pass\nassert time.perf_counter() < 7",
    "best = best_seconds({})\nassert best is not None and best < 3",
    "rows = []\nfor k in 'ab':\n    t = time.time()\n    rows.append(dict(name=k, ms=1e3*(time.time() - t)))\nassert rows[0]['ms'] < rows[1]['ms']",
]
NOT_TIMED = [
    "start = time.perf_counter(); n = f(); assert n < 2",
    "rows = [dict(way=k, speed=time.perf_counter(), steps=3) for k in 'ab']\nassert rows[0]['steps'] > 1",
    "end = time.time() + 60\nwhile not ready() and time.time() < end: pass\nassert ready()",
    "report_speed({'twice as fast': time.perf_counter() > 2})", "assert trainer.elapsed >= 0",
    "def test(monkeypatch):\n    monkeypatch.setattr('time.perf_counter', lambda: now)\n    assert time.perf_counter() == 3",
    "def ticks(monkeypatch): monkeypatch.setattr(time, 'perf_counter', next)\ndef test(ticks): assert time.perf_counter() == 3",
    "with patch.object(time, 'perf_counter', lambda: 7): at = time.perf_counter()\nassert at == 7",
    "rows = [dict(rate=time.perf_counter())]\nrows = [dict(rate=published)]\nassert rows[0]['rate'] == 3",
]


@pytest.mark.parametrize("source", TIMED)
def test_an_assertion_on_a_clock_is_found(source): assert len(clock_assertions(source)) == 1


@pytest.mark.parametrize("source", NOT_TIMED)
def test_one_on_something_else_is_not(source): assert clock_assertions(source) == []


def test_a_cell_that_only_measures_leaves_nothing_to_others():
    cells = ["#| bench\nrate = time.perf_counter()", "rate = published\nassert rate == 3", "def made_up(): return dict(wall_s=3)\nassert made_up()['wall_s'] == 3"]
    assert clock_assertions(cells) == [] and clock_assertions([cells[0] + "\nassert rate < 3", *cells[1:]]) == ["assert rate < 3"]


def test_notebooks_and_tests_ask_no_clock():
    cells = {p: ["".join(c["source"]) for c in json.loads(p.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == "code"] for p in NBS}
    found = {p.name: clock_assertions(code) for p, code in cells.items()} | {p.name: clock_assertions(p.read_text(encoding="utf-8")) for p in TESTS}
    assert not {name: lines for name, lines in found.items() if lines}
