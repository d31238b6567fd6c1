"""Run the library with the lowest versions that settings.ini names, in an environment of their own. Usage: tools/floors.py [test ...]

The environment lies in `.floors`, of the lowest Python, and is made anew when a requirement changes: pip installs the package with its
extras as a user would, each requirement at its floor. Every module is imported, then tests run: the files named, or those that
between them use each requirement. Prints one line of JSON.
"""
import argparse, json, os, shlex, shutil, subprocess, sys, time
from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = ("interop", "serve", "notebook")
TESTING = ("pytest", "hypothesis")                              # Nothing else of the development tools
TESTS = """account config names help documents tokenizer fast_bpe layers optim transformer accounting data checkpoint pretrained
generate sampling kv_cache engine serve trainer transpose fused fused_attention""".split()
IMPORTS = """import importlib, json, pkgutil, lmcourse
for m in pkgutil.walk_packages(lmcourse.__path__, "lmcourse."): importlib.import_module(m.name)"""
VERSIONS = "import json, sys; from importlib.metadata import version; print(json.dumps({n: version(n) for n in sys.argv[1:]}))"


def read_requirements():
    "What the package and the extras under test ask for, and the lowest Python."
    config = ConfigParser(delimiters=["="])
    config.read(ROOT / "settings.ini", encoding="utf-8")
    cfg = config["DEFAULT"]
    return [r for key in ("", *(f"{e}_" for e in EXTRAS)) for r in shlex.split(cfg[f"{key}requirements"])], cfg["min_python"]


def lowest(requirements):
    "Pins: each `name>=version` as `name==version`. `ValueError` for one without a floor."
    if odd := [r for r in requirements if r.count(">=") != 1 or "," in r]: raise ValueError(f"expected name>=version, but settings.ini has {' '.join(odd)}")
    return [r.replace(">=", "==") for r in requirements]


def make(folder, python, pins):
    "The environment in `folder`, kept as long as it has what is asked for: its Python."
    inside, stamp, words = folder / "bin/python", folder / "pins.txt", "\n".join(pins) + "\n"
    if stamp.exists() and stamp.read_text() == words: return inside
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([python, "-m", "venv", folder], check=True)
    (wanted := folder / "wanted.txt").write_text(words)
    pip = [inside, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *shlex.split(os.environ.get("PIP_EXTRA", ""))]
    subprocess.run([*pip, "-c", wanted, "-e", f"{ROOT}[{','.join(EXTRAS)}]", *TESTING], check=True)
    subprocess.run([inside, "-m", "pip", "check"], check=True, stdout=subprocess.DEVNULL)
    wanted.rename(stamp)
    return inside


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", metavar="test", help="files of tests")
    words = parser.parse_args()
    requirements, first = read_requirements()
    pins, start = lowest(requirements), time.time()
    python = shutil.which(f"python{first}")
    if not python: return print(f"skipped: no python{first} here, the lowest that settings.ini names")
    inside = make(ROOT / ".floors", python, pins)
    env = os.environ | {"PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"}
    def run(*command, **kw): return subprocess.run([inside, *command], cwd=ROOT, env=env, text=True, **kw)
    names = [p.partition("==")[0] for p in pins]
    versions = json.loads(run("-c", VERSIONS, *names, check=True, capture_output=True).stdout)
    chosen = words.tests or [f"tests/test_{t}.py" for t in TESTS]
    passed = not run("-c", IMPORTS).returncode and not run("-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen).returncode
    print(json.dumps(dict(passed=passed, python=run("-V", capture_output=True).stdout.split()[1], minutes=round((time.time() - start)/60, 1),
                          versions=versions)))
    return 0 if passed else "failed with the versions above"


if __name__ == "__main__": sys.exit(main())
