"The ledger: its file is in order, quoting and recording work, a bad file is refused by key, and every number of ours follows from the files of runs."
import json
import math
import os
import re
import shutil
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest

from lmcourse.tools.ledger import Measured, compare, find, follows, ledger_table, published, read_ledger, record

KEY = "cs336-report.lr-sweep.5e-4"
NBS = Path(__file__).parents[2]/"nbs"
RUNS = dict(runs=["a1", "b2", "c3"], how="mean of result.loss")
LINES = [dict(key=k, status="done", result=dict(loss=v, tokens=10)) for k, v in (("a1", 1.25), ("b2", 1.5), ("c3", 1.75))]


@pytest.fixture
def path(tmp_path):
    "A copy that may be changed"
    return shutil.copy(resources.files("lmcourse")/"data"/"ledger.json", tmp_path/"ledger.json")


def test_file_is_as_it_would_be_written(path):
    "So that recording a number changes only its own lines"
    text = path.read_text(encoding="utf-8")
    assert text == "[\n" + ",\n".join(json.dumps(raw, ensure_ascii=False) for raw in json.loads(text)) + "\n]\n"


def test_file_names_no_machine_path():
    for e in read_ledger().values():
        assert not any(w in f"{e.where} {e.setup} {e.remark}" for w in ("/work", "/home", "/tmp", "../", "seeds")), e.key


def test_find_and_published_agree():
    everything = find()
    assert len(everything) == len(read_ledger()) and all(published(e.key) == e for e in everything[::40])
    assert [e.key.split(".")[-1] for e in find("cs336-report.batch-sweep.fixed-lr")] == ["1", "8", "32", "64", "128", "256", "512"]
    assert find(KEY) == [published(KEY)]
    for bad in ("cs336-report.lr-sweep.5e-5", "cs336-report.lr-swep", ""):
        with pytest.raises(ValueError, match="unknown published number"): published(bad)
    with pytest.raises(ValueError, match="did you mean 'cs336-report.lr-sweep'"): find("cs336-report.lr-swee")


def test_record_round_trip(path):
    before = read_ledger(path)
    made = record(KEY, 1.5, "half the steps", "a machine, a day, a command", **RUNS, path=path).ours
    assert made == (Measured(1.5, "half the steps", "a machine, a day, a command", ("a1", "b2", "c3"), "mean of result.loss"),)
    assert made == published(KEY, path=path).ours and hash(made)
    record(KEY, 1.4, "half the steps", "another day", how="notebook 06b_studies", path=path)
    record(KEY, 1.3, "half the steps", "another day", how="notebook 06b_studies", path=path)                  # replaces
    after = read_ledger(path)
    assert [(m.value, m.runs) for m in after[KEY].ours] == [(1.5, ("a1", "b2", "c3")), (1.3, ())]
    assert {k: e for k, e in after.items() if k != KEY} == {k: e for k, e in before.items() if k != KEY}
    test_file_is_as_it_would_be_written(path)
    row, = compare(KEY, path=path).rows
    assert (row["published"], row["correct"], row["ours"], row["difference"]) == (1.443, 1.455, 1.3, -0.155)


def test_failed_write_leaves_the_old_file(path, monkeypatch):
    old = path.read_bytes()
    def fail(*a): raise OSError("disk full")
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"): record(KEY, 1.0, "a", "b", **RUNS, path=path)
    assert path.read_bytes() == old and list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), True, None, "1"])
def test_record_refuses(path, value):
    old = path.read_bytes()
    with pytest.raises(ValueError, match=f"{KEY}.*a finite value"): record(KEY, value, "a", "b", **RUNS, path=path)
    with pytest.raises(ValueError, match="unknown"): record(KEY + "5", 1.0, "a", "b", **RUNS, path=path)
    assert path.read_bytes() == old


@pytest.mark.parametrize("change, words", [
    (dict(setup=" "), "words in setup"), (dict(made=""), "words in setup"), (dict(runs="a1"), "a list of the runs"), (dict(runs=[1]), "a list of the runs"), (dict(runs=["a1", "a1"]), "each run once"),
    (dict(how="by hand"), "'mean of'"), (dict(how=""), "'mean of'"), (dict(how="mean of "), "'mean of'"), (dict(how="notebook 06b_studies"), "'mean of'"), (dict(runs=[]), "'notebook' and its name"),
    (dict(runs=[], how="notebook"), "'notebook' and its name"), (dict(more=1), "the fields value, setup, made, runs, how")])
def test_measured_that_does_not_say_where_it_comes_from_is_refused(path, change, words):
    entries = json.loads(path.read_text())
    next(e for e in entries if e["key"] == KEY)["ours"] = [dict(value=1.5, setup="a", made="b") | RUNS | change]
    path.write_text(json.dumps(entries))
    with pytest.raises(ValueError, match=f"{KEY}.*among ours.*{words}"): read_ledger(path)


@pytest.mark.parametrize("change, words", [
    (lambda es, e: e.pop("remark"), "remark"), (lambda es, e: e.update(extra=1), "extra"), (lambda es, e: e.update(value=float("nan")), "value"),
    (lambda es, e: e.update(value="1"), "value"), (lambda es, e: e.update(value=True), "value"), (lambda es, e: e.update(correct=float("inf")), "correct"),
    (lambda es, e: e.update(where=" "), "where"), (lambda es, e: e.update(ours=[dict(value=1)]), "among ours"), (lambda es, e: e.update(ours=None), "ours"),
    (lambda es, e: es.insert(es.index(e), dict(e)), "twice"), (lambda es, e: es.append(es.pop(es.index(e))), "expected entries sorted by key")])
def test_bad_file_is_refused_by_key(path, change, words):
    entries = json.loads(path.read_text())
    change(entries, next(e for e in entries if e["key"] == KEY))
    path.write_text(json.dumps(entries))
    with pytest.raises(ValueError, match=words) as e: read_ledger(path)
    assert KEY in str(e.value)


@pytest.mark.parametrize("text, words", [("{}", "expected a list"), ("[1]", "expected an object"), ("[", "not JSON")])
def test_file_that_is_no_ledger(path, text, words):
    path.write_text(text)
    with pytest.raises(ValueError, match=words): read_ledger(path)


def test_compare():
    table = compare("cs336-report.lr-sweep", ours={"2e-3": 1.3401234, KEY: 1.46})
    rows = {r["key"]: r for r in table.rows}
    assert (rows["2e-3"]["ours"], rows["2e-3"]["difference"]) == (1.3401, -0.0089)         # one decimal more than published
    assert rows["5e-4"]["difference"] == 0.005                                             # from the correct number
    assert rows["3e-4"]["ours"] is None and "unit" not in rows["3e-4"] and "published (nats per token)" in table.headings
    with pytest.raises(ValueError, match="did you mean '2e-3'"): compare("cs336-report.lr-sweep", ours={"2e-33": 1})


def test_ledger_table(path):
    record(KEY, 1.4664, "three seeds", "a day", **RUNS, path=path)
    everything = ledger_table(path=path).rows
    assert [r["key"] for r in everything] == [e.key for e in find()] and all(r["set-up"] and r["remark"] for r in everything)
    rows = {r["key"]: r for r in ledger_table("cs336-report.lr-sweep", "numpy-report.smoke", path=path).rows}
    assert len(rows) == 7 + 3 and rows["numpy-report.smoke.first"]["ours"] is None
    assert (rows[KEY]["published"], rows[KEY]["correct"], rows[KEY]["ours"], rows[KEY]["runs"], rows[KEY]["our set-up"]) == (
        "1.443 nats per token", "1.455 nats per token", "1.4664 nats per token", 3, "three seeds")
    assert "runs" not in ledger_table("numpy-report.smoke", path=path).columns
    shown = {e.key: (e, r["published"]) for e, r in zip(find(), everything)}
    for e, text in shown.values(): assert float(text.removesuffix(e.unit).replace(",", "")) == e.value, text
    with pytest.raises(ValueError, match="did you mean"): ledger_table("numpy-report.smok")


# Ours

def test_follows():
    m = Measured(1.5, "a", "b", ("a1", "b2", "c3"), "mean of result.loss")
    assert follows(m, LINES) == follows(m, {line["key"]: line for line in LINES}) == follows(m, iter(LINES)) == 1.5
    assert follows(replace(m, how="mean of result.tokens", runs=("b2",)), LINES) == 10
    assert follows(m, [dict(key="a1", status="crashed", result=None), *LINES]) == 1.5                  # made again later
    for lines, words in ((LINES[1:], "no line of the run a1 among 2"), ([], "no line of the run a1, b2, c3 among 0"), ([*LINES, dict(key="c3", status="diverged", result=None)], "c3 is diverged"),
                         ([*LINES, dict(LINES[0], result={})], "a1 has result.loss = None"), ([*LINES, dict(LINES[0], result=None)], "a1 has result.loss = None"),
                         ([*LINES, dict(LINES[0], result=dict(loss=float("nan")))], "a1 has result.loss = nan"), ([*LINES, dict(LINES[0], result=dict(loss="1"))], "a1 has result.loss = '1'")):
        with pytest.raises(ValueError, match=words): follows(m, lines)
    for bad, words in ((dict(runs=()), "no runs"), (dict(how="median of result.loss"), "expected 'mean of'"), (dict(how="mean of result"), "result = {'loss'")):
        with pytest.raises(ValueError, match=words): follows(replace(m, **bad), LINES)


def run_lines(folder):
    "The lines of all files of runs in `folder`; what has no key and status is no run"
    lines = [json.loads(line) for p in sorted(Path(folder).glob("*.jsonl")) for line in p.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [line for line in lines if {"key", "status"} <= set(line)]


def numbers_shown(name, nbs):
    "The numbers in the saved outputs of a notebook, each as (value, half a unit of its last digit)"
    path = next(Path(nbs).rglob(f"{name}.ipynb"), None)
    if path is None: raise ValueError(f"there is no such notebook as {name}")
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        for out in cell.get("outputs", ()):
            text = "".join(out.get("text", out.get("data", {}).get("text/plain", "")))
            for m in re.finditer(r"\d[\d,]*(?:\.(\d+))?", text): yield float(m[0].replace(",", "")), 0.5*10.0**-len(m[1] or "")


def faults(ledger, nbs):
    "The numbers of ours that do not follow from the files of runs, or that their notebook does not show; each with what is wrong"
    lines = run_lines(Path(nbs)/"results")
    for e in ledger.values():
        for m in e.ours:
            try:
                if m.runs: ok = math.isclose(again := follows(m, lines), m.value, rel_tol=1e-9); what = f"the runs give {again}"
                else: ok = any(abs(v - m.value) <= half for v, half in numbers_shown(m.how.split()[1], nbs)); what = f"{m.how} does not show it"
            except (ValueError, OSError) as error: ok, what = False, str(error)
            if not ok: yield f"{e.key}: ours is {m.value}, but {what}"


def test_every_number_of_ours_follows():
    assert list(faults(read_ledger(), NBS)) == []


def test_a_number_of_ours_that_does_not_follow_is_found(path, tmp_path):
    (tmp_path/"results").mkdir()
    results = tmp_path/"results/runs.jsonl"
    def write(*lines): results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    def check(words, value=1.5, **change):
        record(KEY, value, "a", "b", **RUNS | change, path=path)
        found = [f for f in faults(read_ledger(path), tmp_path) if f.startswith(KEY)]              # others follow from other runs
        assert len(found) == bool(words) and all(words in f for f in found), found
    write(*LINES)
    check("")
    check("the runs give 1.5", value=1.501)                                                            # the ledger was changed
    check("result.los = None", how="mean of result.los")
    check("no line of the run d4", runs=["a1", "b2", "c3", "d4"])
    check("the runs give 1.375", runs=["a1", "b2"])
    write(*LINES, dict(LINES[0], result=dict(loss=1.0)))
    check("the runs give 1.4166")                                                                      # a run was changed
    write(*LINES[:2])
    check("no line of the run c3")                                                                     # a run was removed
    write(*LINES, dict(LINES[2], status="crashed"))
    check("c3 is crashed")
    results.unlink()
    check("no line of the run")
    check("no such notebook as 06b_studies", runs=[], how="notebook 06b_studies")
    (tmp_path/"06b_studies.ipynb").write_text(json.dumps(dict(cells=[dict(outputs=[dict(text=["took 1,234.57 s"])]), dict(outputs=[dict(data={"text/plain": "1.4"})])])))
    check("", value=1234.5681, runs=[], how="notebook 06b_studies")
    check("does not show it", value=1234.4, runs=[], how="notebook 06b_studies")
