"`lmcourse check` and `lmcourse exercises`: right and wrong answers, and files that hang, crash, shout or cheat."
import ast
import csv
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import processes
import pytest

from lmcourse.app import grade
from lmcourse.tools.config import UserError

ROOT = Path(__file__).parent.parent
SPLIT = """import re
def split(text, special_tokens):
    special = sorted(special_tokens, key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, special))})", text) if special else [text]
    return [p for p in parts if p]
"""
SIZES = "answer = {'utf-8': 17, 'utf-16': 22, 'utf-32': 36}\n"
LOOP = "def split(text, special_tokens):\n    while True: pass\n"


def ask(*words): return processes.here(*words, cwd=".")


every_task = cache(grade.exercise_tasks)


@pytest.fixture(autouse=True)
def tasks_are_read_once(monkeypatch): # Each command parses all modules of exercises, which takes longer than the check
    monkeypatch.setattr(grade, "exercise_tasks", lambda: [*every_task()])


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check(source, *words, exercise="01.split", name="mine.py"):
    Path(name).write_text(source, encoding="utf-8")
    return ask("check", exercise, name, *words)


# The list of exercises

def test_the_exercises_are_those_of_the_modules():
    tasks = grade.exercise_tasks()
    assert len({t.id for t in tasks}) == len(tasks)
    for path in (ROOT/"nbs").rglob("??z_*.ipynb"):
        chapter, _, topic = path.stem.partition("z_")
        exported = ast.parse((ROOT/f"lmcourse/exercises/{topic}.py").read_text(encoding="utf-8"))
        graders = [f.name for f in exported.body if isinstance(f, ast.FunctionDef) and f.name.startswith("check_")]
        assert [f"check_{t.name}" for t in tasks if t.chapter == chapter] == graders, path.name
    for t in tasks: assert t.form and t.right_if and t.defines and "`AssertionError`" not in t.right_if, t


def test_a_chapter_s_list_names_the_page_of_its_tasks():
    for task in grade.exercise_tasks(): assert f"check_{task.name}" in (ROOT/"nbs"/task.page).read_text(encoding="utf-8")
    assert "the page nbs/01_tokenization/01z_tokenization.ipynb explains the tasks" in ask("exercises", "01").stdout


def test_torch_is_not_imported_for_the_list():
    code = "import sys; from lmcourse.app.cli import main; main(['exercises']); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize("name, ids", [("01.split", ["01.split"]), ("1.split", ["01.split"]), ("tokenization.split", ["01.split"])])
def test_names_of_an_exercise(name, ids): assert [t.id for t in grade.find_tasks(name, grade.exercise_tasks())] == ids


# Answers

def test_right(here):
    got = check(SPLIT)
    assert (got.returncode, got.stdout, got.stderr) == (0, "01.split: right\n", "")
    assert ask("exercises").stdout.startswith("01 tokenization: 1 of 9 done\n   done  split\n")


def test_a_class_for_chapter_03(here):
    source = '''import torch
class RoPE(torch.nn.Module):
    def __init__(self, theta, d_k, max_seq_len, device=None):
        super().__init__()
        angles = torch.outer(torch.arange(max_seq_len), theta**(-torch.arange(0, d_k, 2)/d_k))
        self.register_buffer("turn", torch.polar(torch.ones_like(angles), angles).to(device), persistent=False)

    def forward(self, x, token_positions):
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())*self.turn[token_positions]).flatten(-2)
'''
    got = check(source, exercise="03.rope")
    assert (got.returncode, got.stdout) == (0, "03.rope: right\n"), got.stdout + got.stderr
    got = check(source.replace("RoPE", "Turn"), exercise="03.rope")
    assert got.returncode == 2 and "defines no RotaryPositionalEmbedding, which 03.rope asks for (case and underscores do not matter); it defines Turn" in got.stderr


def test_a_wrong_answer_says_why_on_one_line(here):
    got = check(SPLIT.replace("if p]", "]"))
    assert got.returncode == 1 and got.stdout.startswith("01.split: not yet: for text = '', special_tokens = ['x']: expected [], got ['']") and got.stdout.count("\n") == 1
    assert "   tried split\n" in ask("exercises").stdout


@pytest.mark.parametrize("source, words, lines", [
    ("def split(text, special_tokens):\n    return text[99]\n", "your code raised IndexError(", ["mine.py, line 2, in split", "return text[99]"]),
    ("x = 1\nif x:\n    y = x/0\n", "your file raised ZeroDivisionError: division by zero", ["mine.py, line 3", "y = x/0"]),
    ("def split(text special_tokens):\n    pass\n", "your file raised SyntaxError: ", ["mine.py, line 1", "def split(text special_tokens):", "    ^"]),
    ("def split(a, b):\n  x = 1\n   y = 2\n", "your file raised SyntaxError: unexpected indent", ["mine.py, line 3"]),
    ("import nothing_of_that_name\n", "your file raised ModuleNotFoundError: No module named", ["mine.py, line 1"]),
    ("import sys\nsys.exit(0)\n", "your file called sys.exit(0)", ["mine.py, line 2"]),
    ("import sys\ndef split(a, b): sys.exit()\n", "your code raised SystemExit(", ["mine.py, line 2, in split"]),
    ("def split(a, b): raise KeyboardInterrupt\n", "your code raised KeyboardInterrupt", ["mine.py, line 1, in split"]),
    ("raise BaseException('odd')\n", "your file raised BaseException: odd", ["mine.py, line 1"]),
    ("assert 1 == 2, 'no'\n", "your file raised AssertionError: no", ["mine.py, line 1"]),
    ("def split(a, b): return split(a, b)\n", "your code raised RecursionError(", ["mine.py, line 1, in split"]),
    ("def split(a, b): return input('ready? ')\n", "your code raised EOFError(", ["mine.py, line 1, in split"]),
    ("raise ValueError('a\\nb' + 'c'*5000)\n", "your file raised ValueError: a bccc", ["mine.py, line 1"]),
    ("x = '\x00'\n", "your file raised", []), ("# coding: nothing\n", "your file raised SyntaxError", []),
    ("import os\nos._exit(0)\n", "your code ended the process with exit status 0, before the grader was done", []),
    ("import os\ndef split(a, b): os._exit(0)\n", "ended the process with exit status 0", []),
    ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n", "your code ended the process by SIGSEGV", [])])
def test_what_goes_wrong_is_told_in_the_readers_own_lines(here, source, words, lines):
    got = check(source)
    first, *block = got.stdout.splitlines()
    assert got.returncode == 1 and first.startswith("01.split: not yet: ") and words in first and len(first) < 600, got.stdout + got.stderr
    for line in lines: assert line in got.stdout
    assert all(b.startswith("    ") for b in block) and "lmcourse" not in "".join(block) and "Traceback" not in got.stdout
    assert len(block) <= 8


def test_generated_code_is_not_the_readers(here):
    source = ("from dataclasses import dataclass\n@dataclass\nclass Part:\n    text: str\n    def __post_init__(self): raise ValueError('no')\n"
              "def split(a, b): return Part(a)\n")
    lines = [line.strip() for line in check(source).stdout.splitlines()[1:]]
    assert [line for line in lines if line.startswith("mine.py, line ")] == ["mine.py, line 6, in split", "mine.py, line 5, in __post_init__"]
    assert len(lines) == 4 and "<string>" not in "".join(lines), lines


def test_a_file_that_is_not_utf_8(here):
    Path("mine.py").write_bytes(b"x = '\xff'\n")
    got = ask("check", "01.split", "mine.py")
    assert got.returncode == 1 and "your file raised SyntaxError: invalid or missing encoding declaration" in got.stdout


def test_a_loop_without_end(here):
    got = check(LOOP, "--seconds", 3)
    assert got.returncode == 1
    assert got.stdout == ("01.split: not yet: no result after 3 seconds: is there an endless loop? (--seconds allows more time)\n"
                       "    last seen in mine.py, line 2, in split\n")


def test_the_time_limit_begins_when_the_file_does(here, monkeypatch):
    "On a busy machine it takes seconds to import a grader."
    (here/"slow").mkdir()
    (here/"slow/sitecustomize.py").write_text("import time\ntime.sleep(2.5)\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(here/"slow"), *filter(None, [os.environ.get("PYTHONPATH")])]))
    assert check(SPLIT, "--seconds", 2).stdout == "01.split: right\n"


CHILD = "import subprocess, sys\np = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\nopen('child', 'w').write(str(p.pid))\n"


@pytest.mark.skipif(not processes.TOLD, reason="looks into /proc")
@pytest.mark.parametrize("source", [CHILD + SPLIT, CHILD + "while True: pass\n", CHILD + "import os\nos._exit(3)\n"])
def test_what_the_file_has_started_is_ended_too(here, source):
    check(source, "--seconds", 2)
    assert processes.gone(int(Path("child").read_text()))


@pytest.mark.skipif(not processes.TOLD, reason="looks into /proc")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_everything(here, how):
    Path("mine.py").write_text("import os\nopen('pid', 'w').write(str(os.getpid()))\n" + CHILD + "while True: pass\n")
    process = subprocess.Popen([sys.executable, "-m", "lmcourse", "check", "01.split", "mine.py"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    processes.wait_for(lambda: Path("child").exists() and Path("child").read_text())
    process.send_signal(how)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out, err) == (130, "", "lmcourse: interrupted\n")
    assert processes.gone(int(Path("pid").read_text()), int(Path("child").read_text()))
    assert not Path("progress.json").exists()


# What the file prints

def test_prints_are_shown_apart_from_the_result(here):
    got = check("print('hello')\nimport sys\nprint('\\x1b[31mred\\x1b[0m\\rover', 'no end', end='', file=sys.stderr)\n" + SPLIT)
    assert got.stdout == "01.split: right\n" and got.stderr == "| hello\n| [31mred[0m\n| over no end\n"


@pytest.mark.parametrize("many", ["print('x'*1000)", "print('x'*10**6, end='')", "import os; os.write(2, b'\\xff\\n'*10**5)"])
def test_megabytes_are_counted(here, many):
    got = check(f"for _ in range(50): {many}\n" + SPLIT)
    assert got.returncode == 0 and got.stdout == "01.split: right\n"
    assert len(got.stderr) < 50_000 and "characters more\n" in got.stderr


def test_prints_come_while_it_runs(here):
    shown = []
    Path("mine.py").write_text("print('before')\nwhile True: pass\n")
    [task] = grade.find_tasks("01.split", grade.exercise_tasks())
    assert grade.check_file(task, Path("mine.py"), 2, write=shown.append).state == "wrong" and "".join(shown) == "| before\n"


# Cheating, as far as it comes to mind at once

@pytest.mark.parametrize("source", [
    "import os\nprint('01.split: right', flush=True)\nos._exit(0)\n",
    "import lmcourse.exercises.tokenization as ex\nex.check_split = lambda f: None\ndef split(a, b): return []\n",
    "import atexit, os\natexit.register(os._exit, 0)\ndef split(a, b): return []\n",
    "import sys\nsys.exit(0)\n", "import json, sys\nprint(json.dumps(dict(state='right', words='', lines=[])))\nsys.exit(0)\n",
    "import os, glob, json\nfor f in glob.glob('/tmp/*/where'):\n    open(f[:-5] + 'report', 'w').write(json.dumps(dict(state='right', words='', lines=[])))\nos._exit(0)\n",
    "def split(a, b): return type('All', (list,), {'__eq__': lambda s, o: True})()\n"])
def test_a_forged_success_does_not_count(here, source):
    got = check(source)
    assert got.returncode == 1 and got.stdout.startswith("01.split: not yet: "), got.stdout + got.stderr
    assert not json.loads(Path("progress.json").read_text())["tasks"]["01.split"]["right"]


# Names and files

@pytest.mark.parametrize("source", [
    SPLIT.replace("def split", "def Split"), SPLIT.replace("def split", "def _s") + "S_PLIT = _s\n", "split = None\n" + SPLIT.replace("def split", "def SPLIT"),
    SPLIT + "if __name__ == '__main__': raise RuntimeError\n", SPLIT + "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: 'int' = 1\n"])
def test_case_and_underscores_do_not_matter(here, source): assert check(source).returncode == 0


def test_a_predicted_number_may_bear_the_name_of_its_task(here):
    assert check(SIZES, exercise="01.sizes").returncode == 0
    assert check("answer = {}\n" + SIZES.replace("answer", "sizes"), exercise="01.sizes").returncode == 0
    assert check("sizes = [1, 2]\n" + SIZES, exercise="01.sizes").returncode == 0
    assert "expected a dict" in check("answer = 3\n", exercise="01.sizes").stdout


def test_a_helper_with_the_short_name_of_the_task_is_not_the_answer(here):
    answer = "from torch.nn.functional import scaled_dot_product_attention as known\ndef scaled_dot_product_attention(Q, K, V, mask=None): return known(Q, K, V, mask)\n"
    assert "right" in check(f"{answer}class Attention: pass\nattention = Attention()\n", exercise="03.attention").stdout
    assert "right" in check(answer.replace("def scaled_dot_product_attention", "def attention"), exercise="03.attention").stdout


def test_a_call_of_the_grader_without_its_tag_stops_no_other_answer(here):
    "Not every program keeps tags, and a student may write the call once more."
    assert check(notebook("sizes = dict()", " check_sizes(sizes)\n", SPLIT), name="mine.ipynb").returncode == 0


@pytest.mark.parametrize("line", ["from lmcourse.exercises.tokenization import check_sizes", "from lmcourse.exercises.tokenization import *"])
@pytest.mark.parametrize("name", ["mine.py", "mine.ipynb"])
def test_a_file_may_call_graders_itself(here, name, line):
    "A page's first lines show how, and a wrong answer must not stop the others."
    source = f"sizes = {{'utf-8': 17, 'utf-16': 22, 'utf-32': 34}}\n{line}\ncheck_sizes(sizes)\n{SPLIT}"
    got = check(source if name == "mine.py" else notebook(source), exercise="01", name=name)
    assert [line for line in got.stdout.splitlines() if line.startswith(("01.sizes", "01.split"))] == ["01.sizes: not yet: utf-32: 34 is too small", "01.split: right"]


@pytest.mark.parametrize("lines", ["from lmcourse.exercises.accounting import check_formats\ncheck_formats(None)",
                                   "from lmcourse.exercises import scaling, accounting as a\na.check_formats(None)",
                                   "import importlib\nimportlib.import_module('lmcourse.exercises.accounting').check_formats(None)"])
def test_a_file_may_call_graders_of_other_chapters(here, lines): assert check(f"{lines}\n{SPLIT}").returncode == 0


def test_a_chapter_that_does_not_exist_is_the_reason(here):
    assert check(f"# lmcourse.exercises.nothing, or lmcourse.exercises. None\n{SPLIT}").returncode == 0
    assert "your file raised ModuleNotFoundError: No module named 'lmcourse.exercises.nothing'" in check(f"import lmcourse.exercises.nothing\n{SPLIT}").stdout


@pytest.mark.parametrize("cell", [dict(source=None), dict(source=[None]), dict(metadata=dict(tags=3))])
def test_a_damaged_cell_makes_no_notebook(here, cell):
    def pieces(**fields):
        whole = json.loads(notebook(SPLIT))
        whole["cells"][0] |= fields
        Path("odd.ipynb").write_text(json.dumps(whole))
        return grade._pieces(Path("odd.ipynb"))
    with pytest.raises(ValueError, match="not a notebook"): pieces(**cell)
    assert pieces(metadata=dict(tags=None))


def test_half_of_a_surrogate_pair_is_a_reason_like_any_other(here):
    got = check("raise ValueError('\\ud800 x')\n")
    assert got.returncode == 1 and "\\ud800 x" in got.stdout


def test_a_neighbouring_file_can_be_imported(here):
    (here/"parts").mkdir()
    (here/"parts/helper.py").write_text(SPLIT.replace("def split", "def other") + "def fails(a, b): return a[99]\n")
    assert check("from helper import other as split\n", name="parts/mine.py").returncode == 0
    got = check("from helper import fails\ndef split(a, b): return fails(a, b)\n", name="parts/mine.py")
    assert got.returncode == 1 and "mine.py, line 2, in split" in got.stdout and "helper.py, line 6, in fails" in got.stdout


@pytest.mark.parametrize("name", ["json.py", "random.py", "torch.py", "my answer.py", "2.py", "répondre.py", "lmcourse.py"])
def test_any_name_of_a_file(here, name): assert check(SPLIT, name=name).returncode == 0


def test_files_in_the_current_folder_do_not_stand_for_those_of_python(here):
    for name in ("random.py", "json.py", "lmcourse.py", "sitecustomize.py"): (here/name).write_text("raise RuntimeError('not this one')\n")
    (here/"sub").mkdir()
    assert check(SPLIT, name="sub/mine.py").returncode == 0


@pytest.mark.parametrize("words, answer", [
    ("01.splt mine.py", "unknown exercise '01.splt': did you mean '01.split'?"), ("split mine.py", "did you mean '01.split'?"),
    ("99.split mine.py", "unknown chapter '99'"), ("1 none.py", "none.py: no such file"), ("01.split none.py", "none.py: no such file"),
    ("01.split text.txt", "text.txt: expected a file that ends in .py or .ipynb"), ("01.split bad.ipynb", "bad.ipynb: not a notebook"),
    ("01.split empty", "empty: no file is named after 01.split; names are split (with .py or .ipynb)"),
    ("03 .", "lmcourse: .: no file is named after any task of chapter 03"), ("03 .", "(with .py or .ipynb); look into its folders one by one"),
    ("mine.py 01.split", "mine.py is a file: name the exercise first, as in `lmcourse check 01.sizes mine.py`"),
    ("01 answer.py", "answer.py: `answer` may be to any task: name the task, as in 01.sizes, or the answer after its task, as in sizes = …"),
    ("01.split other.py", "other.py: defines no split, which 01.split asks for (case and underscores do not matter); it defines other, value"),
    ("01 other.py", "other.py: defines no answer to any task of chapter 01; names are sizes, same_look"), ("01.split blank.py", "it defines nothing"),
    ("01.encode ours.py", "encode comes from lmcourse.tokenization.encoding; 01.encode asks for your own"),
    ("01.split mine.py --seconds 0", "seconds = 0.0, expected more than 0"), ("01.split mine.py --seconds nan", "seconds = nan"),
    ("01.split mine.py --progress none/progress.json", "none: no such folder"), ("01.split mine.py --progress damaged.json", "damaged.json: no progress file; move it away"),
    ("01.split mine.py --progress list.json", "list.json: no progress file"), ("01.split mine.py --progress later.json", "format 9, but this version reads 1"),
    ("01.split mine.py --progress half.json", "half.json: no progress file"), ("01.split mine.py --progress binary.json", "binary.json: no progress file"), ("01.split", "FILE")])
def test_what_can_not_be_checked_is_one_line(here, words, answer):
    for name, text in {"mine.py": SPLIT, "text.txt": SPLIT, "bad.ipynb": "{}", "other.py": "import re\ndef other(): pass\nvalue, _own = 1, 2\n", "blank.py": "", "answer.py": SIZES,
                       "ours.py": "from lmcourse.tokenization.encoding import encode_word as encode\n", "damaged.json": '{"format": 1, "ta', "list.json": "[1]",
                       "later.json": '{"format": 9}', "half.json": '{"format": 1, "tasks": {"01.split": {"tries": "a"}}}'}.items(): Path(name).write_text(text)
    Path("binary.json").write_bytes(b"\xff\xfe")
    Path("empty").mkdir()
    before = {p: p.read_bytes() for p in here.rglob("*") if p.is_file()}
    got = ask("check", *words.split())
    assert got.returncode == 2 and got.stdout == "" and got.stderr.startswith("lmcourse: ") and got.stderr.count("\n") == 1 and answer in got.stderr, got.stderr
    assert {p: p.read_bytes() for p in here.rglob("*") if p.is_file() and "__pycache__" not in p.parts} == before


def test_an_answer_of_the_right_kind_is_preferred(here):
    [task] = grade.find_tasks("03.linear", grade.exercise_tasks())
    Linear = type("Linear", (), {})
    assert grade._pick(task, {"linear": Linear(), "Linear": Linear}, True) == "Linear"
    assert grade._pick(task, {"linear": Linear()}, True) == "linear"


# Notebooks

def notebook(*cells, **more): return json.dumps(dict(cells=[dict(cell_type="code", source=c.splitlines(keepends=True)) for c in cells]
                                                     + [dict(cell_type="markdown", source=["def split(:"])], nbformat=4, nbformat_minor=5, **more))


def test_a_notebook(here):
    magics = "%matplotlib inline\n!ls\nimport re\nre.split?\nfiles = !ls\n  \nif True:\n    %time pass\n"
    got = check(notebook(magics, "%%bash\nls (\n", "%%time\nimport re", SPLIT, "x = '''\n%d\n''' % 3\nassert x == '\\n3\\n'"), name="mine.ipynb")
    assert got.returncode == 0, got.stdout
    got = check(notebook("%load_ext x\n", "def split(text, special_tokens):\n    return text[99]\n"), name="mine.ipynb")
    assert got.returncode == 1 and "mine.ipynb, code cell 2, line 2, in split\n        return text[99]\n" in got.stdout
    got = check(notebook("x = 1\n", "def split(:\n"), name="mine.ipynb")
    assert got.returncode == 1 and "mine.ipynb, code cell 2, line 1\n        def split(:\n" in got.stdout
    assert check(notebook(), name="mine.ipynb").returncode == 2
    assert check(notebook("import asyncio\ndisplay(1, clear=True)\nawait asyncio.sleep(0)\n", SPLIT), name="mine.ipynb").returncode == 0
    got = check(notebook("get_ipython()\n", SPLIT), name="mine.ipynb")
    assert got.returncode == 1 and "'get_ipython' is not defined (it exists only in Jupyter)" in got.stdout


# Chapters and folders

def test_a_chapter_in_one_file(here):
    source = SIZES + "ids = {}\n" + SPLIT + "def step(words, numbers):\n    while True: pass\nencode = 3\n"
    got = check(source, "--seconds", 3, exercise="01")
    assert got.returncode == 1
    assert [line.split(": ")[:2] for line in got.stdout.splitlines() if line[0] != " "] == [
        ["01.split", "right"], ["01.step", "not yet"], ["01.ids", "not yet"], ["01.encode", "not yet"], ["chapter 01", "1 right, 3 not yet, 5 without an answer"]]
    assert set(json.loads(Path("progress.json").read_text())["tasks"]) == {"01.split", "01.step", "01.ids", "01.encode"}
    assert check(SPLIT, exercise="tokenization").returncode == 0


def test_a_folder_with_a_file_for_each(here):
    Path("mine").mkdir()
    for name, source in (("split.py", SPLIT), ("Sizes.py", SIZES), ("notes.py", "x = 1"), ("encode.py", "other = 1")): Path("mine", name).write_text(source)
    got = ask("check", "01", "mine")
    assert (got.returncode, got.stdout.splitlines()[:2]) == (0, ["01.sizes: right", "01.split: right"])
    assert "01.encode: encode.py: defines no encode" in got.stdout and "2 right, 0 not yet, 7 without an answer" in got.stdout
    assert "not graded, no answer to a task of this chapter: notes.py\n" in got.stdout
    assert ask("check", "01.split", "mine").stdout == "01.split: right\n"


def test_files_of_a_folder_may_have_other_names(here):
    Path("mine").mkdir()
    both = SIZES.replace("answer", "sizes") + SPLIT
    for names in (("01.sizes.py", "01_split.py"), ("my_sizes.py", "1-split.py"), ("tokenization_sizes.py", "My_Split.py")):
        for name, source in zip(names, (SIZES, SPLIT)): Path("mine", name).write_text(source)
        assert ask("check", "01", "mine").stdout.splitlines() == ["01.sizes: right", "01.split: right", "chapter 01: 2 right, 0 not yet, 7 without an answer"]
        for name in names: Path("mine", name).unlink()
    Path("mine", "week1.py").write_text(both)                           # One file for several
    assert ask("check", "01", "mine").stdout.startswith("01.sizes: right\n01.split: right\nchapter 01: 2 right")
    Path("mine", "split.py").write_text("def split(text, special_tokens): return 1\n")   # Its name counts more
    assert "01.sizes: right\n01.split: not yet" in ask("check", "01", "mine").stdout
    Path("mine", "week1.py").write_text(both.replace("sizes", "answer"))   # Of two answers that are called so, which?
    assert "without an answer" in (told := ask("check", "01", "mine").stdout) and "01.sizes" not in told


def test_pages_of_the_course_are_no_answers(here):
    "They lie beside the exercises of the student edition, and define what it asks for."
    Path("mine").mkdir()
    Path("mine/01c_encoding.ipynb").write_text(notebook(SPLIT))
    got = ask("check", "01", "mine")
    assert got.returncode == 2 and "mine: no file is named after any task of chapter 01" in got.stderr
    Path("mine/00z_notes.py").write_text(SPLIT.replace("[p for p", "[None for p"))
    Path("mine/01z_tokenization.ipynb").write_text(notebook(SPLIT))
    assert ask("check", "01", "mine").stdout.splitlines() == [
        "01.split: right", "not graded, no answer to a task of this chapter: 00z_notes.py", "chapter 01: 1 right, 0 not yet, 8 without an answer"]


def test_a_file_that_cannot_be_parsed_is_named_in_a_folder_too(here):
    Path("mine").mkdir()
    Path("mine/week1.py").write_text("def split(text:\n")
    Path("mine/sizes.py").write_text(SIZES)
    got = ask("check", "01", "mine").stdout
    assert got.startswith("01.sizes: right\n01.same_look: not yet: your file raised SyntaxError") and "week1.py, line 1" in got
    assert ask("check", "01.split", "mine").stdout.startswith("01.split: not yet: your file raised SyntaxError")


def test_a_file_that_never_ends_is_waited_for_once(here):
    got = check(SIZES.replace("answer", "sizes") + SPLIT + "while True: pass\n", "--seconds", 3, exercise="01").stdout.splitlines()
    assert got[:2] == ["01.sizes: not yet: your file isn't done after 3 seconds: is there an endless loop? (--seconds allows more time)",
                       "    last seen in mine.py, line 7"]
    assert got[2:] == ["01.split: not yet: mine.py has to run to its end first", "chapter 01: 0 right, 2 not yet, 7 without an answer"]


def test_an_empty_place_is_no_answer_and_no_try(here):
    empty = "sizes = {'utf-8': None, 'utf-16': None}\nsame_look = None\ndef split(text, special_tokens):\n    # gives a list\n    ...\n"
    got = check("from collections import Counter\n" + empty + "def step(words, numbers): return 1\n", exercise="01")
    assert "\nstill empty: sizes, same_look, split\n" in got.stdout and "01.split" not in got.stdout
    assert "chapter 01: 0 right, 1 not yet, 8 without an answer" in got.stdout
    assert set(json.loads(Path("progress.json").read_text())["tasks"]) == {"01.step"}
    got = check(empty, exercise="01")
    assert (got.returncode, got.stderr) == (2, "lmcourse: mine.py: no answer to any task of chapter 01 yet\n")
    assert check(empty).stderr == "lmcourse: mine.py: split is still empty: no answer to 01.split yet\n"
    got = check("from collections import Counter\ndef other(): return 1\n")
    assert got.stderr.endswith("it defines other\n")                    # And not what it imports


def test_an_error_in_the_file_is_told_once(here):
    cells = SIZES.replace("answer", "sizes"), SPLIT, "def step(words, numbers): return 1\n"
    got = check(notebook(*cells, "1/0\n"), exercise="01", name="mine.ipynb")
    assert got.returncode == 1 and got.stdout.count("ZeroDivisionError") == 1
    assert "\n01.split to 01.step: not yet: mine.ipynb has to run to its end first\nchapter 01: 0 right, 3 not yet, 6 without" in got.stdout
    assert len(json.loads(Path("progress.json").read_text())["tasks"]) == 3
    assert check(notebook(*cells, "#| hide\nimport nbdev; nbdev.nbdev_export()"), exercise="01", name="mine.ipynb").stdout.startswith("01.sizes: right")


# Progress

def test_progress(here):
    record = lambda: json.loads(Path("progress.json").read_text(encoding="utf-8"))["tasks"]
    check("def split(a, b): return []\n")
    assert record()["01.split"] | dict(date="", last="") == dict(tries=1, right=False, date="", file="mine.py", last="")
    check(SPLIT)
    check("def split(a, b): return []\n")
    assert record()["01.split"]["right"] and record()["01.split"]["tries"] == 3
    Path("progress.json").write_text(json.dumps(dict(format=1, tasks=record() | {"77.later": dict(tries=1, right=True)})))
    check(SIZES, exercise="01.sizes")
    assert set(record()) == {"01.split", "01.sizes", "77.later"}
    assert not [p for p in here.iterdir() if ".part" in p.name]
    listed = ask("exercises", "01")
    assert listed.returncode == 0 and listed.stdout.splitlines()[-1].startswith("2 of 9 done") and "01.split" in listed.stdout
    assert ask("exercises").stdout.splitlines()[-1].startswith("2 of ")


def test_progress_behind_a_symbolic_link(here):
    Path("progress.json").symlink_to("real.json")
    check(SPLIT)
    assert Path("progress.json").is_symlink() and grade.read_progress(Path("real.json"))


def test_a_current_folder_that_has_been_removed_is_told_before_any_work(here, monkeypatch):
    (here/"gone").mkdir()
    monkeypatch.chdir("gone")
    (here/"gone").rmdir()
    with pytest.raises(UserError, match="the current folder has been removed"): grade.find_answers("01.split", here/"mine.py", progress=Path("progress.json"))


def test_no_progress_and_another_file(here):
    check(SPLIT, "--progress", "none")
    assert not Path("progress.json").exists()
    check(SPLIT, "--progress", "other.json")
    assert not Path("progress.json").exists() and "1 of" in ask("exercises", "--progress", "other.json").stdout


def test_exercises_with_a_damaged_file_or_a_wrong_name(here):
    Path("progress.json").write_text("{")
    for words in (["exercises"], ["exercises", "01"]):
        got = ask(*words)
        assert got.returncode == 2 and got.stdout == "" and "progress.json: no progress file" in got.stderr and Path("progress.json").read_text() == "{"
    Path("progress.json").unlink()
    assert "did you mean 'tokenization'" in ask("exercises", "tokenisation").stderr


def test_answers_that_are_checked_at_once_are_all_saved(tmp_path):
    tasks = every_task()[:12]
    with ThreadPoolExecutor(len(tasks)) as pool:
        list(pool.map(lambda task: grade.note_verdict(tmp_path/"progress.json", grade.Verdict(task, "right"), "mine.py"), tasks))
    assert {*grade.read_progress(tmp_path/"progress.json")} == {task.id for task in tasks}
    assert [p.name for p in tmp_path.iterdir()] == ["progress.json"]


# Classes

HANDINS = {
    "student-1/sizes.py": SIZES, "student-1/week1.py": SPLIT,
    "student-2/homework.zip": "", "student-3/week1.py": SIZES.replace("answer", "sizes") + LOOP, "student-4/week1.py": SIZES.replace("answer", "sizes") + "def split(text:\n",
    "student-5.py": "open('mine.txt', 'w').write('')\nopen('../mine.txt', 'w').write('')\nimport os\ndef split(a, b): os._exit(0)\n",
    "student-6/nbs/01_tokenization/01z_tokenization.ipynb": "", "student-6/nbs/01_tokenization/01c_encoding.ipynb": "", "student-6/nbs/02z_accounting.ipynb": "", "student-6/nbs/meet.ipynb": "",
    "student-6/nbs/venv/site-packages/steps.py": "def step(words, numbers): return 1\n", "student-6/=cmd.py": "x = 1\n"}


def hand_in(folder, which=HANDINS):
    for name, source in which.items():
        (path := Path(folder, name)).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("01z_tokenization.ipynb"): source = notebook(SIZES.replace("answer", "sizes"), SPLIT, "def step(words, numbers):\n    ...\n")
        elif name.endswith(".ipynb"): source = notebook("def step(words, numbers): return 1\n")
        path.write_text(source)


def table(path="grades.csv"):
    with open(path, encoding="utf-8-sig", newline="") as f: return {row["student"]: row for row in csv.DictReader(f)}


def test_a_class(here): # It waits for a loop without end
    hand_in("handins")
    Path("handins/notes.txt").write_text("x")
    Path("handins/student-1/link.py").symlink_to(here/"handins/student-3/week1.py")
    before = {p: p.read_bytes() for p in here.rglob("*") if p.is_file()}
    got = ask("grade", "01", "handins", "grades.csv", "--seconds", 3)
    assert got.returncode == 0 and got.stderr == ""
    assert {p: p.read_bytes() for p in here.rglob("*") if p.is_file() and p.name != "grades.csv"} == before
    lines = got.stdout.splitlines()
    assert lines[0] == "grades.csv: 6 hand-ins, 9 exercises"             # At once: the first result may take a while
    assert sorted(lines[1:7]) == ["student-1: 2 right, 0 not yet, 7 without an answer", "student-2: 0 right, 0 not yet, 9 without an answer; not graded: homework.zip",
                                 "student-3: 1 right, 1 not yet, 7 without an answer", "student-4: 0 right, 9 not yet, 0 without an answer",
                                 "student-5.py: 0 right, 1 not yet, 8 without an answer", "student-6: 2 right, 0 not yet, 7 without an answer; not graded: '=cmd.py"]
    assert lines[7:] == ["notes.txt: not graded, neither a folder nor .py or .ipynb"]
    rows = table()
    assert list(rows["student-1"]) == ["student", "right", *(t.id for t in every_task() if t.chapter == "01"), "files not graded", "version"]
    assert {name: (row["right"], row["01.sizes"]) for name, row in rows.items() if row["01.sizes"] in ("right", "no answer")} == {
        "student-1": ("2", "right"), "student-2": ("0", "no answer"), "student-3": ("1", "right"), "student-5.py": ("0", "no answer"), "student-6": ("2", "right")}
    assert rows["student-3"]["01.split"].endswith("(last seen in week1.py, line 3, in split)")
    assert rows["student-4"]["01.grows"].startswith("not yet: your file raised SyntaxError") and rows["student-4"]["01.grows"].endswith("(week1.py, line 2)")
    assert rows["student-5.py"]["01.split"] == "not yet: your code ended the process with exit status 0, before the grader was done"
    assert [rows["student-6"][n] for n in ("01.split", "01.step")] == ["right", "no answer"]


def test_a_class_goes_on_where_it_stopped(here, monkeypatch):
    hand_in("handins", {name: HANDINS[name] for name in ("student-1/sizes.py", "student-2/homework.zip", "student-4/week1.py")})
    graded, said, real = [], [], grade.grade_hand_in
    def noted(tasks, hand_in, seconds):
        graded.append(hand_in.name)
        return real(tasks, hand_in, seconds)
    monkeypatch.setattr(grade, "grade_hand_in", noted)
    def again():
        graded.clear(), said.clear()
        grade.grade_class("01.sizes", Path("handins"), Path("grades.csv"), say=said.append)
        return sorted(graded)
    assert again() == ["student-1", "student-2", "student-4"] and len(said) == 4
    first = Path("grades.csv").read_bytes()
    assert again() == [] and said == ["grades.csv: 3 hand-ins, 1 exercises"] and Path("grades.csv").read_bytes() == first
    Path("handins/student-4/week1.py").write_text(SIZES)            # Handed in again, and a new one
    hand_in("handins", {"student-9/sizes.py": SIZES.replace("17", "18")})
    assert again() == ["student-4", "student-9"]
    assert [row["01.sizes"][:7] for row in table().values()] == ["right", "no answ", "right", "not yet"] and [*table()] == sorted(table())
    monkeypatch.setattr(grade, "_contents", lambda hand_in: {}[hand_in.name])  # Nothing that one hand-in brings stops the others
    again()
    assert table()["student-1"]["01.sizes"] == "no answer: KeyError('student-1')" and len(table()) == 4
    monkeypatch.undo()
    monkeypatch.chdir(here)
    assert again() == [] and table()["student-1"]["01.sizes"] == "right"    # It is tried again


@pytest.mark.skipif(not processes.TOLD, reason="looks into /proc")
def test_ctrl_c_ends_a_class_and_keeps_what_is_done(here):
    loop = f"import os\nopen({str(here/'pids')!r}, 'a').write(str(os.getpid()) + ' ')\nwhile True: pass\n"
    hand_in("handins", {"student-1/split.py": SPLIT} | {f"student-{n}/split.py": loop for n in range(2, 6)})
    process = subprocess.Popen([sys.executable, "-m", "lmcourse", "grade", "01.split", "handins", "grades.csv", "--seconds", "3000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    processes.wait_for(lambda: Path("pids").exists() and Path("pids").read_text() and Path("grades.csv").exists())
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (130, "lmcourse: interrupted; go on with the same command\n")
    assert processes.gone(*map(int, Path("pids").read_text().split())) and {name: row["01.split"] for name, row in table().items()} == {"student-1": "right"}


@pytest.mark.parametrize("words, answer", [
    ("01 none grades.csv", "none: no such folder"), ("01 empty grades.csv", "empty: expected a folder, .py or .ipynb per student"), ("01.splt handins grades.csv", "did you mean '01.split'?"),
    ("01 handins other.csv", "other.csv: no table of these exercises; move it away"), ("01 handins binary.csv", "binary.csv: no table of these exercises"),
    ("01 handins handins", "handins"), ("01 handins empty/none/g.csv", "none"), ("01 handins grades.csv --seconds 0", "seconds = 0.0"), ("01 handins", "TABLE")])
def test_what_makes_no_class_is_one_line(here, words, answer):
    hand_in("handins", {"student-1/split.py": "raise SystemExit\n"})
    Path("empty").mkdir()
    Path("other.csv").write_text("student,03.rope\nme,right\n")
    Path("binary.csv").write_bytes(b"\xff\xfe")
    got = ask("grade", *words.split())
    assert got.returncode == 2 and got.stdout == "" and got.stderr.startswith("lmcourse: ") and got.stderr.count("\n") == 1 and answer in got.stderr, got.stderr
    assert Path("other.csv").read_text() == "student,03.rope\nme,right\n" and not Path("grades.csv").exists()


@pytest.mark.parametrize("files, words", [
    ({"mine.ipynb": "{}"}, "mine.ipynb: not a notebook"), ({"a.py": SIZES}, "a.py: `answer` may be to any task"), ({"a.py": "x = 1\n"}, "a.py: defines no answer to any task"),
    ({"a.py": "from lmcourse.tokenization.encoding import encode_word as encode\n"}, "encode comes from lmcourse.tokenization.encoding"),
    ({"a.py": "from helper import *\n", "helper.py": SPLIT.replace("def split", "def other") + "Split = other\n"}, "defines no encode")])
def test_why_a_hand_in_has_no_answer(here, files, words):
    Path("mine").mkdir()
    for name, source in files.items(): Path("mine", name).write_text(source)
    cells, _ = grade.grade_hand_in(grade.find_tasks("01", every_task()), Path("mine"))
    assert cells["01.encode"].startswith("no answer: ") and words in cells["01.encode"] and str(here) not in str(cells)
    assert (cells["01.split"] == "right") == ("helper.py" in files)


def test_a_grader_that_is_never_imported_is_not_awaited_for_ever(tmp_path, monkeypatch):
    "Its process doesn't say that the file has begun"
    monkeypatch.setattr(grade, "_IMPORTS", .2)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    assert not grade._wait(process, dict(where=str(tmp_path/"where")), .1, grade._Echo(print))
    assert process.poll() is not None
