"The student edition: every task is there, no answer is, and its cells run up to the empty answers."
import ast
import importlib
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parent.parent
FILES = {p.relative_to(ROOT / "nbs"): p.read_bytes() for p in (ROOT / "nbs").rglob("*") if p.is_file() and ".ipynb_checkpoints" not in p.parts}
PAGES = {p.stem: p for p in FILES if p.suffix == ".ipynb"}
EXERCISES = sorted(name for name in PAGES if re.match(r"\d\dz_", name))
exercises = pytest.mark.parametrize("name", EXERCISES)


def load():
    spec = importlib.util.spec_from_file_location("student", ROOT / "tools/student.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


student = load()


@pytest.fixture(scope="module")
def edition(tmp_path_factory):
    nbs, out = tmp_path_factory.mktemp("nbs"), tmp_path_factory.mktemp("student")
    for p, content in FILES.items():
        (nbs / p).parent.mkdir(parents=True, exist_ok=True)
        (nbs / p).write_bytes(content)
    return out, student.make(out, nbs)


def read(path): return json.loads(path.read_text(encoding="utf-8"))["cells"]
def whole(name): return json.loads(FILES[PAGES[name]])["cells"]
def text(c): return "".join(c["source"])
def answers(name): return [text(c) for c in whole(name) if "code-summary: Answer" in text(c)]
def tasks(name): return "\n".join(text(c) for c in whole(name) if c["cell_type"] == "markdown")
def squeezed(source): return re.sub(r"\s", "", source)


def lines_of(source):
    "Lines of an answer that could be nothing else: long enough, no import, no signature, no call of a grader"
    return [l for l in source.splitlines() if len(squeezed(l)) > 24 and not re.match(r"\s*(#|from |import |check_|class |def |with expect_error|[\w, ]+\):$)", l)] # Nor the end of a signature


def leaks(name, cells):
    "Lines of answers in `name` that stand in `cells`, though no task says them"
    found, said = squeezed("\n".join(map(text, cells))), squeezed(tasks(name))
    return [l for a in answers(name) for l in lines_of(a) if squeezed(l) in found and squeezed(l) not in said]


@exercises
def test_jupyterlab_collapses_answers_and_nothing_else(name):
    hidden = dict(outputs_hidden=True, source_hidden=True)
    for c in whole(name): assert c["metadata"].get("jupyter") == (hidden if "code-summary: Answer" in text(c) else None), text(c)


@exercises
def test_the_first_sentence_ends_without_the_answers(edition, name):
    assert not re.search(r",[.,;]|answer", text(read(edition[0] / "nbs" / PAGES[name])[0]))


@exercises
def test_no_answer_is_left(edition, name):
    cells = read(edition[0] / "nbs" / PAGES[name])
    assert sum(len(lines_of(a)) for a in answers(name)) > 10 and not leaks(name, cells)
    for c in cells:
        assert "code-summary: Answer" not in text(c) and "expect_error" not in text(c) and not re.match(r"#\| *(export|hide|default_exp)", text(c))
        assert not re.search(r"answers? (are|is) folded|answer to unfold|folded answer|of your own, next to this page|^## Proof", text(c), re.M)
        assert c["cell_type"] == "code" or not re.search(r"<summary>(?!Hint)", text(c))
    assert "into its empty cell" in text(cells[1])


def test_an_answer_that_is_left_is_found():
    name = EXERCISES[0]
    assert len(leaks(name, whole(name))) > 10
    one = max(answers(name), key=lambda a: len(lines_of(a)))
    assert leaks(name, [dict(cell_type="code", source=[one])])


@exercises
def test_every_task_has_an_empty_answer_and_its_grader(edition, name):
    out, graders = edition
    cells = read(out / "nbs" / PAGES[name])
    module = importlib.import_module(f"lmcourse.exercises.{name[4:]}")
    assert set(graders[name]) == {n for n in module.__all__ if n.startswith("check_")}
    for n in graders[name]: assert sum(c["cell_type"] == "code" and text(c).startswith(f"{n}(") for c in cells) == 1, n
    headings = re.findall(r"^## \d+\. .*$", tasks(name), re.M)
    assert headings and headings == re.findall(r"^## \d+\. .*$", "\n".join(text(c) for c in cells if c["cell_type"] == "markdown"), re.M)
    assert "Takeaway" in tasks(name) and "**Takeaway" in text(cells[-1])
    hints = tasks(name).count("<summary>Hint")
    assert sum(text(c).count("<summary>Hint") for c in cells if c["cell_type"] == "markdown") == hints


@exercises
def test_cells_run_up_to_the_empty_answers(edition, name, monkeypatch):
    monkeypatch.chdir((edition[0] / "nbs" / PAGES[name]).parent)
    scope = {}
    for c in read(edition[0] / "nbs" / PAGES[name]):
        if c["cell_type"] != "code": continue
        code = compile(text(c), f"{name}, {c['id']}", "exec")
        if not text(c).startswith("check_"): exec(code, scope)
        else:
            assert c["metadata"]["tags"] == ["raises-exception"]         # Run all goes on behind it
            with pytest.raises(AssertionError): exec(code, scope)


@exercises
def test_modules_that_a_task_names_are_imported(edition, name):
    cells = read(edition[0] / "nbs" / PAGES[name])
    said = {m for c in cells if c["cell_type"] == "markdown" for m in re.findall(r"`(F|nn|np|torch|math)\.\w", text(c))}
    lines = {l for c in cells if c["cell_type"] == "code" for l in text(c).splitlines() if "import " in l}
    assert all(any(re.search(rf"\b{m}$", l) for l in lines) for m in said), (said, lines)


def test_notebooks_are_valid_and_chapters_as_they_were(edition):
    out = edition[0] / "nbs"
    assert {p.relative_to(out) for p in out.rglob("*.ipynb")} == set(PAGES.values())
    for p in out.rglob("*.ipynb"):
        nbformat.validate(nbformat.reads(p.read_text(encoding="utf-8"), as_version=4))
        if p.stem not in EXERCISES: assert p.read_bytes() == FILES[p.relative_to(out)]
        for link in re.findall(r"\]\((?!\w+:|#)([^)#\s]+)", "\n".join(text(c) for c in read(p) if c["cell_type"] == "markdown")):
            assert (p.parent / link).exists() or not (ROOT / "nbs" / PAGES[p.stem].parent / link).exists(), f"{p.name} links to {link}"
    readme = (edition[0] / "README.md").read_text(encoding="utf-8")
    assert (edition[0] / "LICENSE").is_file() and "no answers" in readme
    # A class without GPUs need not download CUDA
    assert "--extra-index-url https://download.pytorch.org/whl/cpu" in readme and "whl/cpu" in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_the_command_writes_it_anew_and_nothing_else_is_removed(tmp_path):
    def run(out, **kw): return subprocess.run([sys.executable, ROOT / "tools/student.py", "--out", out], capture_output=True, text=True, **kw)
    out = tmp_path / "edition"
    first = run(out)
    example = "github.com/example/" in (out / "README.md").read_text(encoding="utf-8")     # Until the owner names an account
    assert first.returncode == 0 and ("write your account into `user` in settings.ini" in first.stdout) == example
    gone = out / "nbs" / PAGES["01a_unicode"]
    gone.unlink()                                           # What is missing is no work
    assert run(".", cwd=out).returncode == 0 and gone.exists()
    for content in ("notes.txt", "README.md"):
        other = tmp_path / content[:3]
        other.mkdir()
        (other / content).write_text("precious")
        done = run(other)
        assert done.returncode and "holds something else" in done.stderr and (other / content).read_text() == "precious"


@pytest.fixture
def small(tmp_path):
    "A folder with one notebook of exercises, and the edition of it"
    nbs, out = tmp_path / "nbs", tmp_path / "edition"
    page = nbs / PAGES["01z_tokenization"]
    page.parent.mkdir(parents=True)
    page.write_bytes(FILES[PAGES["01z_tokenization"]])
    student.make(out, nbs)
    return nbs, out


@pytest.mark.parametrize("name", [PAGES["01z_tokenization"], "mine.py"], ids=str)
def test_work_in_an_edition_is_never_replaced(small, name):
    nbs, out = small
    (out / "nbs/.ipynb_checkpoints").mkdir()
    (out / "nbs/.ipynb_checkpoints/01z.ipynb").write_text("{}")
    student.make(out, nbs)                                  # Nobody has worked there
    work = out / "nbs" / name
    work.write_text("my answers")
    with pytest.raises(SystemExit, match=re.escape(f"nbs/{Path(name).as_posix()} has changed since the edition was made: move {out} away")): student.make(out, nbs)
    assert work.read_text() == "my answers"


def test_what_a_system_leaves_in_folders_is_no_work(small):
    nbs, out = small
    for name in (".DS_Store", "nbs/Thumbs.db", "nbs/.Trash-1000/info"):
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text("")
    student.make(out, nbs)


@pytest.mark.parametrize("name", [".git", "nbs/.git"])
def test_an_edition_under_version_control_is_somebodys(small, name):
    nbs, out = small
    (out / name).mkdir()
    (out / name / "HEAD").write_text("ref: refs/heads/main")
    with pytest.raises(SystemExit, match=re.escape(f"{(out / name).parent} is a git repository: move {out} away, or name a new folder")): student.make(out, nbs)
    assert (out / name / "HEAD").exists()


def test_of_an_edition_without_digests_nobody_can_tell(small):
    nbs, out = small
    (out / student.MADE).unlink()
    with pytest.raises(SystemExit, match=f"older version made {re.escape(str(out))}, so nobody can tell whether somebody has worked in it: move it away"): student.make(out, nbs)


def test_an_interrupt_leaves_the_edition_as_it_was(small, monkeypatch):
    def interrupted(*_): raise KeyboardInterrupt
    nbs, out = small
    before = student.digests(out)
    with monkeypatch.context() as m:
        m.setattr(student.shutil, "copy", interrupted)
        for where in (out, out.with_name("new")):
            with pytest.raises(KeyboardInterrupt): student.make(where, nbs)
    assert {p.name for p in out.parent.iterdir()} == {"nbs", "edition"} and student.digests(out) == before
    student.make(out, nbs)


def test_cleaning_up_leaves_the_student_edition():
    rules = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "_student" in rules and "_student" not in rules[rules.index("clean: "):rules.index("# The environment")]


def test_the_command_checks_answers_in_the_notebook(edition, tmp_path):
    from lmcourse.app.grade import check_file, exercise_tasks, find_tasks
    nb = json.loads((edition[0] / "nbs" / PAGES["01z_tokenization"]).read_text(encoding="utf-8"))
    for c in nb["cells"]:
        if text(c).startswith("# 'utf-8'"): c["source"] = ["sizes = {'utf-8': 17, 'utf-16': 22, 'utf-32': 36}"]
    path = tmp_path / "mine.ipynb"
    path.write_text(json.dumps(nb))
    right, empty = (check_file(find_tasks(name, exercise_tasks())[0], path, seconds=60, alone=False) for name in ("01.sizes", "01.ids"))
    assert right.state == "right", right
    assert empty.state == "unusable" and empty.words == "ids is still empty: no answer to 01.ids yet", empty


@pytest.mark.parametrize("touch", [False, True])
def test_untouched_answers_are_no_answers_and_touched_ones_are(edition, tmp_path, monkeypatch, touch):
    from lmcourse.app import grade
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "answer_file", None)           # Where a file runs; afterwards it is gone
    tasks, empty, touched = grade.exercise_tasks(), [], set()
    for name in EXERCISES:
        nb = json.loads((edition[0] / "nbs" / PAGES[name]).read_text(encoding="utf-8"))
        for c, after in zip(nb["cells"], nb["cells"][1:]):
            if not touch or not text(after).startswith("check_"): continue
            changed, n = re.subn(r"(?<=[=:;] )\.{3}|^( +)\.{3}$", r"\g<1>0", text(c), count=1, flags=re.M)
            c["source"] = [changed]
            if n: touched.add(f"{name[:2]}.{text(after).partition('(')[0].removeprefix('check_')}")
        path = tmp_path / f"{name}.ipynb"
        path.write_text(json.dumps(nb), encoding="utf-8")
        found = grade._run_file(path)
        for t in tasks:
            if t.chapter != name[:2]: continue
            try: grade._pick(t, found, alone=False)
            except grade.NotDefined as e:
                assert f"is still empty: no answer to {t.id} yet" in str(e)
                empty.append(t.id)
    if touch: assert len(touched) > 100 and not touched & set(empty)
    else: assert empty == [t.id for t in tasks]


@exercises
def test_every_empty_function_names_its_arguments(edition, name):
    assert not [line for c in read(edition[0] / "nbs" / PAGES[name]) if c["cell_type"] == "code" for line in text(c).splitlines() if "(*args)" in line]


@pytest.mark.parametrize("task, arg, kind, comment, expected", [
    ("text\n\n    def f(x): ...    # (B, T)\n", "f", "Callable", "", ("f", "def f(x): ...    # (B, T)")),
    ("    class RoPE(nn.Module):\n        def forward(self, x): ...\n", "ro_pe", "type", "", ("RoPE", "class RoPE(nn.Module):\n    def forward(self, x): ...")),
    ("    split('a') == ['a']\n", "split", "Callable", "`split(text)` gives a list", ("split", "def split(text):\n    # gives a list\n    ...")),
    ("    def f(): ...\n    def g(): ...\n\n    pair = f, g\n", "pair", "tuple", "`f()` and `g()`", ("pair", "def f(): ...\ndef g(): ...\n\npair = f, g")),
    ("**Implement** `loss(x, y_2)`: a number.\n\n    loss(1, 2) == 3\n", "loss", "Callable", "CS336's arguments; gives a number",
     ("loss", "def loss(x, y_2):\n    # CS336's arguments; gives a number\n    ...")),
    ("", "loss", "Callable", "`loss(x)`, one array, gives a number", ("loss", "def loss(x):\n    # one array, gives a number\n    ...")),
    ("", "answer", "dict", "'a' and 'b', in nats", ("losses", "# 'a' and 'b', in nats\nlosses = {'a': None, 'b': None}"))])
def test_stubs(task, arg, kind, comment, expected):
    assert student.stub(task, "check_losses", arg, kind, comment) == expected
    ast.parse(expected[1])
