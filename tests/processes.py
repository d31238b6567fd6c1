"What other processes do, where the system tells in /proc; limits of time only keep a failing test from hanging."
import contextlib
import io
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from lmcourse.app import cli

TOLD = Path("/proc/self/task").exists()


def wait_for(true, seconds=300):
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end: raise TimeoutError(f"waited {seconds} s in vain")
        time.sleep(.002)


def children(pid):
    try: return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except OSError: return []


def alive(pid):
    try: return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError: return False


def gone(*pids):
    wait_for(lambda: not any(map(alive, pids)))
    return True


# The command

def lmcourse(*words, cwd, processes=()):
    "A process of its own. It takes seconds to load torch, and what doesn't need that is `here`. `processes`: words of torchrun."
    return subprocess.run([sys.executable, *processes, "-m", "lmcourse", *map(str, words)], cwd=cwd, capture_output=True, text=True)


def here(*words, cwd):
    "The same command in this process."
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(cwd), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try: code = cli.main(list(map(str, words))) or 0
        except SystemExit as end: code = end.code
    return SimpleNamespace(returncode=code, stdout=out.getvalue(), stderr=err.getvalue())
