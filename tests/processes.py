"What other processes do, where the system tells in /proc; limits of time only keep a failing test from hanging."
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import cache
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


def descendants(pid): return [p for child in children(pid) for p in (child, *descendants(child))]


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


# Scripts

# A process that has loaded torch, with one thread, makes a copy of itself for each order, which then is that script's alone.
COPIES = """
import gc, json, os, signal, sys
import torch, torch._dynamo, torch.distributed, torch.distributed.pipelining, lmcourse.training.trainer, lmcourse.parallelism.mesh
from numba.core.registry import cpu_target
for context in (cpu_target.typing_context, cpu_target.target_context): context.refresh() # As before a first kernel: most of a second
gc.freeze() # Else each copy, when it ends, searches all this for garbage
for line in iter(sys.stdin.readline, ""):
    code, folder, seconds, environment, *sys.argv[1:] = json.loads(line)
    if not (copy := os.fork()): break
    print(os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]), flush=True)
else: sys.exit()
signal.alarm(seconds)
os.environ.clear()
os.environ.update(environment)
for number, name in enumerate((os.devnull, f"{folder}/out", f"{folder}/err")): os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), number)
exec(code)
"""


@cache
def copier(): return subprocess.Popen([sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{COPIES}"], env=os.environ | {"OMP_NUM_THREADS": "1"},
                                      stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def script(code, *words, seconds=300, anew=sys.platform != "linux", **environment):
    "What a script prints that ends well. With an environment of its own, or `anew`, it begins with nothing loaded."
    environment, words = os.environ | {"OMP_NUM_THREADS": "1"} | (own := environment), list(map(str, words))
    if anew or own:
        done = subprocess.run([sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{code}", *words], capture_output=True, text=True, timeout=seconds, env=environment)
        code, out, err = done.returncode, done.stdout, done.stderr
    else:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps([code, folder, seconds, environment, *words]), file=copier().stdin, flush=True)
            code, out, err = int(copier().stdout.readline()), *(Path(folder, name).read_text() for name in ("out", "err"))
    assert code == 0, err[-6000:]
    return out
