"Files of saved runs: a first line that says where they come from, a line a run, and a saved run is found again."
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
import results


def test_a_saved_run_is_found_again_and_the_first_line_is_written_once(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    assert results.saved("a.jsonl") == [] and results.done("a.jsonl", dict(seed=0)) is None
    for seed in range(2): results.write("a.jsonl", dict(seed=seed, loss=.5 + seed), "make it", lambda: dict(tokens=9))
    about, *runs = map(json.loads, (tmp_path/"a.jsonl").read_text().splitlines())
    assert about.items() >= dict(kind="about", command="make it", tokens=9).items() and {"machine", "date"} <= about.keys()
    assert runs == results.saved("a.jsonl")[1:] == [dict(seed=0, loss=.5), dict(seed=1, loss=1.5)]
    assert results.done("a.jsonl", dict(seed=1)) == runs[1] and results.done("a.jsonl", dict(seed=2)) is None
