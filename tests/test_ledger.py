"The ledger of published numbers: what it must not take."
import shutil
from importlib.resources import files

import pytest

from lmcourse.tools.ledger import read_ledger, record


def test_one_key_is_no_list_of_runs(tmp_path):
    path = shutil.copy(files("lmcourse")/"data"/"ledger.json", tmp_path/"ledger.json")
    before, key = path.read_bytes(), next(iter(read_ledger(path)))
    with pytest.raises(ValueError, match="runs = 'abc', expected a list"): record(key, 1., "the same", "here", "abc", "mean of result.loss", path)
    assert path.read_bytes() == before
    assert record(key, 1., "the same", "here", (k for k in ["a", "b"]), "mean of result.loss", path).ours[-1].runs == ("a", "b")
