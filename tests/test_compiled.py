"What is kept of compiled code, and where."
import pytest

pytest.importorskip("numba")
from lmcourse.tools import compiled
from lmcourse.tools.compiled import compile_once

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


def test_two_processes_that_compile_at_once_keep_what_both_made(tmp_path):
    "Numba numbers its files: both would take the same number, and one would then run the other's machine code"
    (file := tmp_path/"own.py").write_text(SOURCE)
    def process(): # As one that begins now
        place = {}
        exec(compile(SOURCE, str(file), "exec"), place)
        return compile_once(place["twice"])
    first, second = process(), process()
    ours, theirs = first._cache._cache_file, second._cache._cache_file
    theirs._load_index = dict                               # It looked when nothing was there
    write = ours._save_data
    def meanwhile(*args):
        assert second(2.5) == 5.0
        write(*args)
    ours._save_data = meanwhile
    assert first(21) == 42
    assert process()(2.5) == 5.0 and process()(21) == 42


@pytest.mark.parametrize("chosen", ["", "+avx2,+fma"])
def test_the_features_are_those_that_numba_compiles_for(monkeypatch, chosen):
    monkeypatch.setattr(compiled.numba_config, "CPU_FEATURES", chosen)
    assert compiled.host_features() == chosen
