"Help, version and shell completion: every command explains itself in the same way, and starts fast."
import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
from functools import cache

import pytest

from lmcourse import __version__
from lmcourse.app import cli

PAGES = [[], *([name] for name in cli.COMMANDS), *(["bench", part] for part in cli.BENCHES)]


def help_of(words, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    return page_of(tuple(words))


@cache
def page_of(words):
    with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit) as ended: cli.main([*words, "--help"])
    assert not ended.value.code
    return re.sub(r"\x1b\[[\d;]*m", "", out.getvalue())


def arguments(page):
    "(name, help) of each argument and subcommand on a page."
    rows = [line[1:].rstrip("│ ") for line in page.split("\n") if re.match(r"[│ ] ", line)]     # The box is drawn only for a terminal that has its signs
    found = []
    for row in rows:
        if set(row.strip()) <= {"─", "-"}: continue
        if m := re.match(r" (--?\S.*?|[A-Z]+|  • \w+)(?:  +(\S.*))?$", row): found.append([m[1].strip(" •"), m[2] or ""])
        elif found and not row.startswith(" ("): found[-1][1] += " " + row.strip()
    return found


def explained(text): return re.sub(r"\((default: .*?|required|optional|one or more)\)", "", text).strip()


@pytest.mark.parametrize("words", PAGES, ids=lambda w: " ".join(w) or "lmcourse")
def test_every_command_explains_itself(words, monkeypatch):
    page = help_of(words, monkeypatch)
    first, _, rest = page.partition("\n\n")
    assert first.startswith(f"usage: {' '.join(['lmcourse', *words])} ")
    summary = rest.split("\n")[0]
    assert summary.endswith(".") and len(summary) <= 110 and summary[0].isupper(), summary
    assert not re.search(r"\bNone\b|default: \)|MISSING|<class|dataclass|PosixPath", page), page
    assert "Raises" not in page and "Error`" not in page        # That is for readers of the code
    found = dict(arguments(page))
    assert "-h, --help" in found
    for name, text in found.items(): assert len(explained(text)) > 4, (name, text)


def test_a_page_without_explanations_is_noticed():
    page = "usage: x\n\nDo.\n\n│ options │\n│ -h, --help  show this help message │\n│ --seed INT  (default: 0) │\n│ --long-name-of-it INT │\n│             Of it (default: 1) │"
    assert arguments(page) == [["-h, --help", "show this help message"], ["--seed INT", "(default: 0)"], ["--long-name-of-it INT", " Of it (default: 1)"]]
    assert not explained("(default: 0)")


def test_the_first_page_names_all_commands_and_exit_statuses(monkeypatch):
    page = help_of([], monkeypatch)
    for name in cli.COMMANDS: assert f"• {name} " in page
    for words in ("lmcourse --version", "0 all is well", "1 an answer is not right yet (or a bug, with a traceback)", "2 input rejected in one line", "130 stopped"): assert words in page


def test_the_same_option_has_the_same_words(monkeypatch):
    said = {}
    for words in PAGES:
        for name, text in arguments(help_of(words, monkeypatch)):
            if name.split()[0] in ("--threads", "--rounds", "--work", "RUN", "CORPUS", "--help"): said.setdefault(name, set()).add(explained(text))
    assert said["RUN"] == {"Folder of a run", "Folders of runs", "Folder of a run, or of a Hugging Face model"} and len(said["CORPUS"]) == 1 and len(said["--rounds INT"]) == 1
    assert said["--threads INT|none"] == {"Threads; by default one per core", "Threads of each; by default one per core"}


@pytest.mark.parametrize("words, value", [("--window none", None), ("--window None", None), ("--window 7", 7), ("", None)])
def test_none_is_a_value_like_any_other(words, value):
    assert cli.parse(["account", *words.split()]).model.window == value


def test_a_folder_may_be_called_none(): assert str(cli.parse(["generate", "none"]).folder) == "none" and cli.parse(["generate"]).folder is None


@pytest.mark.parametrize("words", ["account --window many", "account --mfu none", "prepare a b --tokenizer c --threads 1.5"])
def test_only_where_it_makes_sense(words):
    with pytest.raises(ValueError, match="window|mfu|threads"): cli.parse(words.split())


# Version, and what waits for nothing

def test_version():
    for module in ("lmcourse", "lmcourse.app.cli"):
        code = f"import sys, runpy; sys.argv = ['lmcourse', '--version']; from {module}{'.__main__' if module == 'lmcourse' else ''} import main; main()"
        assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == f"lmcourse {__version__}\n"


@pytest.mark.parametrize("code", ["import lmcourse", "import lmcourse, lmcourse.__main__", "sys.argv[1:] = ['--version']; runpy.run_module('lmcourse', run_name='__main__', alter_sys=True)"])
def test_the_library_and_the_version_wait_for_no_other_package(code):
    code = (f"import runpy, sys\nbefore = set(sys.modules)\ntry: {code}\nexcept SystemExit: pass\n"
            "print(sorted(m for m in set(sys.modules) - before if m.partition('.')[0] not in {*sys.stdlib_module_names, 'lmcourse'}))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_help_does_not_import_torch():
    code = "import sys\nfrom lmcourse.app.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\nassert 'torch' not in sys.modules and 'datasets' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)


def test_who_stops_reading_makes_no_mistake():
    for words in ("--version", "--help", "exercises", "train --help", "completion bash"):
        script = f"{sys.executable} -m lmcourse {words} | true; echo ${{PIPESTATUS[0]}}"
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
        assert done.stderr == "" and done.stdout.strip() in ("0", "141"), done


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_is_told_in_one_line():
    for words in ("--version", "--help"):
        with open("/dev/full", "w") as full:
            done = subprocess.run([sys.executable, "-m", "lmcourse", words], stdout=full, stderr=subprocess.PIPE, text=True)
        assert (done.returncode, done.stderr) == (2, "lmcourse: no space left on device\n"), words


# Shell completion

@cache
def completion(shell):
    with contextlib.redirect_stdout(io.StringIO()) as out: cli.main(["completion", shell])
    return out.getvalue()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_a_script_of_that_shell(shell):
    script = completion(shell)
    assert "_tyro_lmcourse" in script and "'check'" in script and "--min-lr" in script
    for theirs, ours in cli.COMPLETIONS[shell].items(): assert ours in script, f"tyro's script has no {theirs!r}"
    if shutil.which(shell): subprocess.run([shell, "-n"], input=script, text=True, check=True)


def test_another_shell_is_refused():
    with pytest.raises(ValueError, match="bash"): cli.parse(["completion", "tcsh"])


BASH = """eval "$(cat completion)"
complete -p lmcourse
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); COMP_LINE="${{COMP_WORDS[*]}}"; COMP_POINT=${{#COMP_LINE}}
_tyro_lmcourse
echo "${{COMPREPLY[@]}}"
"""


@pytest.mark.parametrize("words, answers", [
    ("lmcourse exer", "exercises"), ("lmcourse pr", "prepare"), ("lmcourse bench gen", "generation"), ("lmcourse train --min-", "--min-lr"),
    ("lmcourse train --norm layer", "layernorm"), ("lmcourse check --pro", "--progress"), ("lmcourse check 03.rope my_ro", "")])
def test_bash_completes(words, answers, tmp_path):
    if not shutil.which("bash"): pytest.skip("no bash")
    (tmp_path/"completion").write_text(completion("bash"))
    done = subprocess.run(["bash", "--norc", "-c", BASH.format(words=words)], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.split("\n")[:2] == ["complete -o default -F _tyro_lmcourse lmcourse", answers] and not done.stderr, done
