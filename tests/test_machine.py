"What is kept of compiled code, and where."
import pytest

pytest.importorskip("numba")
from lmcourse.tools.machine import compile_once

SOURCE = "def twice(x): return 2*x\n"


def test_machine_code_is_kept_where_there_is_a_file(tmp_path):
    "A cell of a notebook has a name for its file, and no file: Numba would look for a folder below the home"
    (tmp_path/"own.py").write_text(SOURCE)
    for name, kept in ((str(tmp_path/"own.py"), True), ("<ipython-input-1-abc>", False)):
        place = {}
        exec(compile(SOURCE, name, "exec"), place)
        f = compile_once(place["twice"])
        assert f(21) == 42 and bool(list(tmp_path.rglob("*.nbc"))) == kept, name
        for file in tmp_path.rglob("*.nb?"): file.unlink()
