"The ledger: its file is in order, quoting and recording work, and a bad file is refused by key."
import json
import shutil
from importlib import resources

import pytest

from lmcourse.tools.ledger import Measured, compare, find, published, read_ledger, record

KEY = "cs336-report.lr-sweep.5e-4"


@pytest.fixture
def path(tmp_path):
    "A copy that may be changed"
    return shutil.copy(resources.files("lmcourse")/"data"/"ledger.json", tmp_path/"ledger.json")


def test_file_is_as_it_would_be_written(path):
    "So that recording a number changes only its own lines"
    text = path.read_text(encoding="utf-8")
    assert text == json.dumps(json.loads(text), ensure_ascii=False, indent=1) + "\n"


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
    assert record(KEY, 1.5, "half the steps", "a machine, a day, a command", path=path).ours == (Measured(1.5, "half the steps", "a machine, a day, a command"),)
    record(KEY, 1.4, "half the steps", "another day", path=path)
    record(KEY, 1.3, "half the steps", "another day", path=path)                  # replaces
    after = read_ledger(path)
    assert [m.value for m in after[KEY].ours] == [1.5, 1.3]
    assert {k: e for k, e in after.items() if k != KEY} == {k: e for k, e in before.items() if k != KEY}
    test_file_is_as_it_would_be_written(path)
    row, = compare(KEY, path=path).rows
    assert (row["published"], row["correct"], row["ours"], row["difference"]) == (1.443, 1.455, 1.3, -0.155)


def test_failed_write_leaves_the_old_file(path, monkeypatch):
    import lmcourse.tools.ledger as module
    old = path.read_bytes()
    def fail(*a): raise OSError("disk full")
    monkeypatch.setattr(module.os, "replace", fail)
    with pytest.raises(OSError, match="disk full"): record(KEY, 1.0, "a", "b", path=path)
    assert path.read_bytes() == old and list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), True, None, "1"])
def test_record_refuses(path, value):
    old = path.read_bytes()
    with pytest.raises(ValueError, match=KEY): record(KEY, value, "a", "b", path=path)
    with pytest.raises(ValueError, match="unknown"): record(KEY + "5", 1.0, "a", "b", path=path)
    assert path.read_bytes() == old


@pytest.mark.parametrize("change, words", [
    (lambda es, e: e.pop("remark"), "remark"), (lambda es, e: e.update(extra=1), "extra"), (lambda es, e: e.update(value=float("nan")), "value"),
    (lambda es, e: e.update(value="1"), "value"), (lambda es, e: e.update(value=True), "value"), (lambda es, e: e.update(correct=float("inf")), "correct"),
    (lambda es, e: e.update(where=" "), "where"), (lambda es, e: e.update(ours=[dict(value=1)]), "among ours"), (lambda es, e: e.update(ours=None), "ours"),
    (lambda es, e: es.insert(es.index(e), dict(e)), "twice"), (lambda es, e: es.append(es.pop(es.index(e))), "order of the keys")])
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
    assert rows["1e-2"]["ours"] is None and "unit" not in rows["1e-2"] and "published (nats per token)" in table.headings
    with pytest.raises(ValueError, match="did you mean '2e-3'"): compare("cs336-report.lr-sweep", ours={"2e-33": 1})
