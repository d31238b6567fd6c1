"Facts about the repository that nbdev takes for granted and does not check."
import ast
import importlib
import json
import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from collections import Counter
from configparser import ConfigParser
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
NBS = sorted((ROOT / "nbs").glob("*.ipynb"))
CELLS = {nb.stem: json.loads(nb.read_text(encoding="utf-8"))["cells"] for nb in NBS}
CODE = {name: ["".join(c["source"]) for c in cells if c["cell_type"] == "code"] for name, cells in CELLS.items()}
HOMES = [(m[1], name) for name, cells in CODE.items() for src in cells if (m := re.match(r"#\|\s*default_exp\s+(\S+)", src))]
MODULES = {".".join(p.relative_to(ROOT / "lmcourse").with_suffix("").parts): p
           for p in sorted((ROOT / "lmcourse").rglob("*.py")) if not p.name.startswith("_")}
SETTINGS = ConfigParser(delimiters=["="])
SETTINGS.read(ROOT / "settings.ini", encoding="utf-8")
SETTINGS = SETTINGS["DEFAULT"]
EXTRAS = {k: shlex.split(v) for k, v in SETTINGS.items() if k.endswith("_requirements")}

notebooks = pytest.mark.parametrize("name", CELLS)
modules = pytest.mark.parametrize("module", MODULES)


def imports(source, inside=True):
    "(module, names) of each import in `source`; without those inside functions if not `inside`. Magics are left out."
    tree = ast.parse(re.sub(r"^( *)[%!].*$", r"\1pass", source, flags=re.M))
    hidden = {} if inside else {n for f in ast.walk(tree) if isinstance(f, (ast.FunctionDef, ast.AsyncFunctionDef)) for n in ast.walk(f)}
    for n in ast.walk(tree):
        if n in hidden: continue
        if isinstance(n, ast.Import): yield from ((a.name, ()) for a in n.names)
        if isinstance(n, ast.ImportFrom): yield "." * n.level + (n.module or ""), tuple(a.name for a in n.names)


def packages(module, inside=True):
    "Packages that a module of the library imports, by their first name; the library itself is left out."
    return {m.split(".")[0] for m, _ in imports(MODULES[module].read_text(encoding="utf-8"), inside) if not m.startswith(".")}


# Notebooks and modules

def test_quarto_config_is_the_one_at_the_top():
    assert (ROOT / "nbs/_quarto.yml").is_symlink() and (ROOT / "nbs/_quarto.yml").resolve() == (ROOT / "_quarto.yml").resolve()


def test_each_module_has_one_home_notebook_and_each_home_a_module():
    assert max(Counter(m for m, _ in HOMES).values(), default=1) == 1, HOMES
    assert sorted(MODULES) == sorted(m for m, _ in HOMES)


def test_chapter_number_is_the_subpackage_and_the_notebook_is_named_as_its_module():
    chapters = {}
    for module, name in HOMES:
        package, _, last = module.rpartition(".")
        assert re.fullmatch(rf"\d\d[a-z]?_{last}", name), f"{name} writes {module}"
        if name[2] == "z": assert package == "exercises", name      # of any chapter
        else: assert chapters.setdefault(name[:2], package) == package, f"{name}: chapter {name[:2]} is {chapters[name[:2]]}"


@modules
def test_module_is_made_of_its_notebook_alone(module):
    text = MODULES[module].read_text(encoding="utf-8")
    cells = set(re.findall(r"^# %% (\S+\.ipynb) #", text, flags=re.M))
    assert {(MODULES[module].parent / c).resolve() for c in cells} <= {ROOT.resolve() / f"nbs/{dict(HOMES)[module]}.ipynb"}


@notebooks
def test_export_goes_only_to_the_home_module(name):
    for src in CODE[name]: assert not re.search(r"^#\|\s*exports?i? +\w", src, flags=re.M), src


@notebooks
def test_imports_have_cells_of_their_own(name):
    "The site is built by running cells that import; anything else in such a cell runs too, out of its context."
    for src in CODE[name]:
        if re.match(r"#\|\s*(hide|eval: *false)|.*^ *[%!]", src, flags=re.S | re.M): continue
        assert len({isinstance(n, (ast.Import, ast.ImportFrom)) for n in ast.parse(src).body}) < 2, src


@notebooks
def test_imports_name_what_they_import_from_notebooks_that_sort_before(name):
    homes = dict(HOMES)
    for src in CODE[name]:
        for module, names in imports(src):
            assert "*" not in names, src
            assert not module.startswith("."), f"import absolutely in a notebook: {src}"
            if not (found := re.match(r"lmcourse\.(.+)", module)): continue
            targets = [m for m in (found[1], *(f"{found[1]}.{n}" for n in names)) if m in homes]
            assert targets and all(homes[m] <= name for m in targets), f"{name} imports {module}"


# What a notebook looks like

@notebooks
def test_first_cell_is_title_and_sentence_alone(name):
    "nbdev makes the page's heading of this cell and drops whatever else stands in it."
    assert re.fullmatch(r"# \S.*\n+> \S.*\n*(- [\w-]+: .*\n*)*", "".join(CELLS[name][0]["source"]))


@pytest.mark.parametrize("name", [n for n in CELLS if n < "08" and n not in ("00h_grading", "00j_pages")])
def test_a_page_ends_with_its_takeaway_and_what_to_read_next(name):
    "In a box, once. The two left out are tools that other pages use."
    prose = "\n".join("".join(c["source"]) for c in CELLS[name] if c["cell_type"] == "markdown")
    end = re.split(r"^> \*\*Takeaway:\*\* \S", prose, flags=re.M)
    assert len(end) == 2 and len(re.findall(r"^\*\*Next:\*\* .*\]\(", end[1], flags=re.M)) == 1


@notebooks
def test_cells_are_short_and_have_stable_ids(name):
    ids = [c["id"] for c in CELLS[name]]
    assert len(ids) == len(set(ids))
    for src in CODE[name]: assert len(src.strip().splitlines()) <= 30 or one_kernel(src), src


def one_kernel(src):
    "A loop that is compiled whole can't be split without cost: a cell may be one such function, and nothing else."
    body = ast.parse(src).body
    return len(body) == 1 and isinstance(body[0], ast.FunctionDef) and body[0].decorator_list and len(src.strip().splitlines()) <= 45


@notebooks
def test_notebook_is_saved_with_its_outputs(name):
    shown = [c for c in CELLS[name] if c["cell_type"] == "code" and not re.match(r"#\|\s*(hide|default_exp|exports?i?\b)", "".join(c["source"]))]
    assert not shown or any(c["outputs"] for c in shown)
    assert not any(o["output_type"] == "error" for c in shown for o in c["outputs"])


def test_sidebar_lists_every_notebook_in_order():
    items = yaml.safe_load((ROOT / "_quarto.yml").read_text(encoding="utf-8"))["website"]["sidebar"]["contents"]
    listed = [n for i in items for n in ([i] if isinstance(i, str) else i["contents"])]
    assert listed == ["index.ipynb"] + [nb.name for nb in NBS if nb.name != "index.ipynb"]
    for i in items[1:]: assert {n[:2] for n in i["contents"]} == {i["section"][:2]}


def test_readme_is_made_from_the_first_page():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for cell in CELLS["index"]:
        lines = [l for l in "".join(cell["source"]).splitlines() if cell["cell_type"] == "code" or l.startswith("#")]
        if not lines or lines[0].startswith("#|"): continue
        for line in lines: assert line in readme, f"python tools/build_docs.py --readme (README.md lacks {line!r})"
    for link in re.findall(r"\]\((?!\w+:|#)([^)#]+)", readme): assert (ROOT / link).exists(), f"README.md links to {link}"


# The library

@modules
def test_library_imports_what_it_declares(module):
    declared = {Requirement(r).name for key in EXTRAS for r in EXTRAS[key] if key != "dev_requirements"}
    declared |= {Requirement(r).name for r in shlex.split(SETTINGS["requirements"])} | set(sys.stdlib_module_names) | {"lmcourse"}
    assert packages(module) <= declared


@modules
def test_what_only_some_paths_need_is_imported_where_it_is_used(module):
    late = {"datasets", "matplotlib", "tyro"} | {Requirement(r).name for key in EXTRAS for r in EXTRAS[key]}
    if not module.startswith("app."): assert not packages(module, inside=False) & late


@modules
def test_numpy_modules_and_the_first_chapters_never_import_torch(module):
    if module.endswith("_np") or dict(HOMES)[module][:2] in ("00", "01"): assert "torch" not in packages(module)


def test_no_public_name_stands_twice_and_all_of_them_exist():
    names = [(n, m) for m in MODULES for n in importlib.import_module(f"lmcourse.{m}").__all__
             if hasattr(importlib.import_module(f"lmcourse.{m}"), n) or pytest.fail(f"{m}.__all__ has {n}")]
    twice = {n for n, k in Counter(n for n, _ in names).items() if k > 1}
    assert not twice, [(n, m) for n, m in names if n in twice]


# The package

def test_versions_agree():
    version = SETTINGS["version"]
    assert importlib.import_module("lmcourse").__version__ == version
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["version"] == version
    assert f"\n## {version}\n" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (project["name"], project["requires-python"]) == (SETTINGS["repo"], ">=" + SETTINGS["min_python"])


def test_constraints_pin_every_requirement_within_its_bounds():
    lines = [l for l in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if l and not l.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", l) for l in lines), "exact versions, without +cpu and the like"
    pins = {name.lower(): version for name, _, version in (l.partition("==") for l in lines)}
    for r in map(Requirement, shlex.split(SETTINGS["requirements"]) + EXTRAS["dev_requirements"]):
        assert r.name in pins and pins[r.name] in r.specifier, f"{r} and constraints.txt: {pins.get(r.name)}"


def test_no_path_of_a_machine():
    tops = [p for p in ROOT.iterdir() if p.is_file() and p.name != ".DS_Store"]
    below = [p for d in ("lmcourse", "nbs", "tests", "tools", ".github", ".devcontainer", ".ci") for p in (ROOT / d).rglob("*") if p.is_file()]
    for p in tops + [p for p in below if "__pycache__" not in p.parts and ".ipynb_checkpoints" not in p.parts]:
        found = re.search(rb"(?<![\w.~-])/(home|root|work|Users)/\w\S*", p.read_bytes())
        assert not found, f"{p}: {found[0]}"


def test_package_data_is_small():
    data = [p for p in (ROOT / "lmcourse/data").rglob("*") if p.is_file()]
    assert data and sum(p.stat().st_size for p in data) < 2_000_000


def test_annotations_are_shipped_and_checked():
    "Whoever imports the library sees its types; those that mypy reads are all but the index for the site."
    assert (ROOT / "lmcourse/py.typed").exists()
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    assert tools["mypy"]["files"] == ["lmcourse", "tests/typed_use.py"] and tools["mypy"]["exclude"] == [r"_modidx\.py$"]
    ours = [o for o in tools["mypy"]["overrides"] for m in o["module"] if m.startswith("lmcourse")]
    assert not any(o.keys() & {"ignore_errors", "follow_imports"} for o in ours), "check what is written here"


def test_importing_the_package_is_quick_and_loads_nothing():
    script = "import sys, time; start = time.perf_counter(); import lmcourse; print(time.perf_counter() - start, *sorted({'torch', 'numpy', 'numba'} & {*sys.modules}))"
    seconds, *loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()
    assert not loaded and float(seconds) < 0.2


@pytest.mark.slow
def test_wheel_has_modules_data_and_the_command(tmp_path):
    copy = "lmcourse settings.ini setup.py pyproject.toml MANIFEST.in README.md LICENSE CITATION.cff CHANGELOG.md constraints.txt".split()
    subprocess.run(["cp", "-R", *(ROOT / f for f in copy), tmp_path], check=True)
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path / "dist", tmp_path], check=True)
    file = next((tmp_path / "dist").glob("*.whl"))
    wheel = zipfile.ZipFile(file)
    assert file.stat().st_size < 2_000_000, f"{file.stat().st_size:,} bytes"
    assert not [n for n in wheel.namelist() if n.endswith((".ipynb", ".md", ".yml")) or not n.startswith(("lmcourse/", "lmcourse-"))]
    ours = {p.relative_to(ROOT).as_posix() for p in (ROOT / "lmcourse").rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    assert ours <= set(wheel.namelist())
    entries = next(wheel.read(n).decode() for n in wheel.namelist() if n.endswith("entry_points.txt"))
    assert "lmcourse = lmcourse.__main__:main" in entries.replace("lmcourse=", "lmcourse = ")
