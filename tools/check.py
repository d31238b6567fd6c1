"""Everything a change must pass, in an environment that is ready. Usage: tools/check.py [--slow] [--only STEP ...] [--without NAME ...]

`--slow` adds the long tier: notebook cells and tests that are marked `slow`. `--only` takes some of the steps: packages, style,
types, sync, site, pages, notebooks, tests, browser; in the long tier, lab and floors.
"""
import argparse, importlib.util, os, shutil, signal, subprocess, sys, tempfile, time
from contextlib import contextmanager, nullcontext
from pathlib import Path

ROOT, BIN = Path(__file__).resolve().parent.parent, Path(sys.executable).parent
# One thread a process, if nothing else is said: nbdev_test runs a notebook on each core, pytest a file of tests. Where a page asks for more,
# those that wait leave the cores to others instead of spinning.
ENV = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"} | os.environ | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}


def start(*command, cwd=ROOT, **more):
    "`command`, in a process group of its own."
    return subprocess.Popen(command, cwd=cwd, env=ENV, start_new_session=True, **more)


def end(process):
    "End `process` and all that it has started."
    if process.poll() is None: os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def finish(process, seconds=5400):
    "Wait for `process`, and end it after `seconds`: it hangs, since no machine is that slow."
    try: code = process.wait(seconds)
    except BaseException as e:
        end(process)
        if isinstance(e, subprocess.TimeoutExpired): sys.exit(f"{process.args[0]} took more than {seconds} s and was ended")
        raise
    if code: sys.exit(f"failed ({code}): {' '.join(process.args)}")


def run(*command, cwd=ROOT): finish(start(*command, cwd=cwd))


@contextmanager
def meanwhile(*command):
    "Run `command` beside what is in the block, which must not fail. What it has said comes afterwards."
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        process = start(*command, stdout=said, stderr=subprocess.STDOUT)
        try:
            yield
            finish(process)
        finally:
            end(process)
            said.seek(0)
            print(said.read(), end="", flush=True)


def files(top):
    "The content of every file under `top` that counts, by relative path."
    skip = {"__pycache__", ".ipynb_checkpoints", ".last_checked"}
    paths = [p for name in ("lmcourse", "nbs") for p in (top / name).rglob("*") if p.is_file() and not skip & set(p.parts)]
    return {p.relative_to(top): p.read_bytes() for p in paths}


def in_sync():
    "Export and clean a copy: nothing may change."
    with tempfile.TemporaryDirectory(prefix="lmcourse-") as tmp:
        copy = Path(tmp).resolve()
        for name in ("lmcourse", "nbs"): shutil.copytree(ROOT / name, copy / name, symlinks=True)
        for name in ("settings.ini", "_quarto.yml"): shutil.copy(ROOT / name, copy)
        for command in ("nbdev_export", "nbdev_clean"): run(command, cwd=copy)
        run(sys.executable, "-c", "from nbdev.quarto import refresh_quarto_yml; refresh_quarto_yml()", cwd=copy)
        ours, theirs = files(ROOT), files(copy)
    if odd := sorted(str(p) for p in ours.keys() | theirs.keys() if ours.get(p) != theirs.get(p)):
        sys.exit("not what nbdev_export and nbdev_clean would write: " + ", ".join(odd))


TRITON = tuple(f"09{name}" for name in ("c_traffic", "d_matmul", "e_rows", "f_flash", "g_grouped", "i_use", "j_machine_code", "k_decode", "l_serving"))    # They run its kernels


# nbdev_test's processes are copies of one that has loaded what most pages import, which isn't searched for garbage with each of them
NBDEV_TEST = """import gc, sys
if sys.platform == "linux": import lmcourse.training.trainer
gc.freeze()
gc.set_threshold(20_000, 20, 20)
from nbdev.test import nbdev_test
nbdev_test(timing=True, skip_file_re=sys.argv[1], flags=sys.argv[2])"""


def notebooks(slow, without=()):
    "Run them. Each must be able to run after any other: none may leave a file behind."
    if not importlib.util.find_spec("triton"):
        print(f"no triton here, which has wheels for Linux alone: without {', '.join(TRITON)}", flush=True)
        without = (*without, *TRITON)
    before = files(ROOT).keys()
    run(sys.executable, "-c", NBDEV_TEST, "|".join(["^[_.]", *(f"^{name}.ipynb$" for name in without)]), "slow" if slow else "")
    if left := sorted(map(str, files(ROOT).keys() - before)): sys.exit("left behind by a notebook: " + ", ".join(left))


def tests(slow, *chosen):
    processes = ["-n", str(min(4, os.cpu_count() or 1)), "--dist", "loadfile", "--no-loadscope-reorder",
                 "--max-worker-restart", "0"]                   # A test that crashes its process fails; xdist would wait for ever
    run(sys.executable, "-m", "pytest", "-q", *processes, *chosen, *(["-m", "not bench"] if slow else []))


# Steps that are one command, and the one that each of them runs beside: both leave a core idle now and then
TYPES, BROWSER = ("mypy",), (sys.executable, "tools/check_site.py")
BESIDE = {"site": ("types", TYPES), "tests": ("browser", BROWSER)}


def steps(slow, without=()):
    python = (sys.executable, "-m")
    return {
        "packages": lambda: run(*python, "pip", "check"),
        "style": lambda: run("ruff", "check"),
        "types": lambda: run(*TYPES),
        "sync": in_sync,
        "site": lambda: run(sys.executable, "tools/build_docs.py", "--force"),
        "pages": lambda: tests(slow, "tests/pages"),    # Prose, links, layout: what a look at the files can tell
        "notebooks": lambda: notebooks(slow, without),
        "tests": lambda: tests(slow, "tests", "--ignore=tests/pages", *(f"--ignore=tests/{name}.py" for name in without)),
        "browser": lambda: run(*BROWSER),
    } | ({
        "lab": lambda: run(sys.executable, "tools/check_lab.py"),
        "floors": lambda: run(sys.executable, "tools/floors.py"),
    } if slow else {})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slow", action="store_true", help="add the long tier")
    parser.add_argument("--only", nargs="+", metavar="STEP", choices=list(steps(True)), help="some steps: " + ", ".join(steps(True)))
    parser.add_argument("--without", nargs="+", default=(), metavar="NAME", help="notebooks and files of tests that are left out: 03h_fast_np, test_cli")
    words = parser.parse_args()
    for name in words.without:
        if not [*(ROOT / "nbs").rglob(f"{name}.ipynb"), *(ROOT / "tests").glob(f"{name}.py")]: parser.error(f"--without: there is no notebook and no file of tests called {name}")
    ENV |= {"HYPOTHESIS_PROFILE": "random" if words.slow else "same"} # A change is not refused for what another one did
    if words.slow: ENV["LMCOURSE_SLOW"] = "1"
    chosen = {name: step for name, step in steps(words.slow, words.without).items() if not words.only or name in words.only}
    pairs = {name: (other, command) for name, (other, command) in BESIDE.items() if {name, other} <= chosen.keys()}
    for other, _ in pairs.values(): del chosen[other]
    for name, step in chosen.items():
        other, command = pairs.get(name, (None, None))
        print(f"== {name}" + (f", and {other} beside it" if other else ""), flush=True)
        began = time.time()
        with meanwhile(*command) if command else nullcontext(): step()
        print(f"   {time.time() - began:.0f} s", flush=True)
