"Facts about the repository that nbdev takes for granted and does not check."
import ast
import base64
import importlib
import io
import json
import os
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

from lmcourse.tools.pages import page_files

ROOT = Path(__file__).parents[2]
PAGES = page_files(ROOT / "nbs")
CELLS = {name: json.loads((ROOT / "nbs" / nb).read_text(encoding="utf-8"))["cells"] for name, nb in PAGES.items()}
CODE = {name: ["".join(c["source"]) for c in cells if c["cell_type"] == "code"] for name, cells in CELLS.items()}
FIRST = ["index", "meet"]         # Pages without a number, before the chapters
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

def test_no_two_files_of_tests_share_a_name(): # pytest imports them by it: `make bench` would stop before its first test
    names = [path.stem for path in (ROOT / "tests").rglob("test_*.py")]
    assert len({*names}) == len(names)


def test_quarto_config_is_the_one_at_the_top():
    assert (ROOT / "nbs/_quarto.yml").is_symlink() and (ROOT / "nbs/_quarto.yml").resolve() == (ROOT / "_quarto.yml").resolve()


def test_the_licence_names_who_holds_the_rights():
    named = re.findall(r"^ {3}Copyright (.+)$", (ROOT / "LICENSE").read_text(encoding="utf-8"), flags=re.M)
    assert named == [f"2026 {SETTINGS['author']}"] and SETTINGS["copyright"].startswith("2026 ")


def test_each_module_has_one_home_notebook_and_each_home_a_module():
    assert max(Counter(m for m, _ in HOMES).values(), default=1) == 1, HOMES
    assert sorted(MODULES) == sorted(m for m, _ in HOMES)


def test_chapter_number_is_the_subpackage_and_the_notebook_is_named_as_its_module():
    chapters = {}
    for module, name in HOMES:
        package, _, last = module.rpartition(".")
        assert re.fullmatch(rf"\d\d[a-z]{{0,2}}_{last}", name), f"{name} writes {module}"
        if name[2] == "z": assert package == "exercises", name      # of any chapter
        else: assert chapters.setdefault(name[:2], package) == package, f"{name}: chapter {name[:2]} is {chapters[name[:2]]}"


def test_a_notebook_lies_in_the_folder_of_its_chapter():
    "Named like its subpackage: exercises too, which write modules of another one. Pages without a number lie at the top."
    packages = {name[:2]: module.rpartition(".")[0] for module, name in HOMES if name[2] != "z"}
    for name, nb in PAGES.items():
        folder = nb.parent.as_posix()
        if name in FIRST: assert folder == "."
        elif name[:2] in packages: assert folder == f"{name[:2]}_{packages[name[:2]]}", nb
        else: assert re.fullmatch(rf"{name[:2]}_[a-z]+", folder), nb


def test_no_number_stands_twice():
    assert max(Counter(name.partition("_")[0] for name in PAGES).values()) == 1


@modules
def test_module_is_made_of_its_notebook_alone(module):
    text = MODULES[module].read_text(encoding="utf-8")
    cells = set(re.findall(r"^# %% (\S+\.ipynb) #", text, flags=re.M))
    assert {(MODULES[module].parent / c).resolve() for c in cells} <= {ROOT.resolve() / "nbs" / PAGES[dict(HOMES)[module]]}


@notebooks
def test_export_goes_only_to_the_home_module(name):
    for src in CODE[name]: assert not re.search(r"^#\|\s*exports?i? +\w", src, flags=re.M), src


@notebooks
def test_imports_have_cells_of_their_own(name):
    "The site is built by running cells that import; anything else in such a cell runs too, out of its context."
    for src in CODE[name]:
        if re.match(r"#\|\s*(hide|eval: *false)|.*^ *[%!]", src, flags=re.S | re.M): continue
        tree = ast.parse(src)
        assert len({isinstance(n, (ast.Import, ast.ImportFrom)) for n in tree.body}) < 2, src
        if re.match(r"#\|\s*exports?i?\b", src, flags=re.M): continue  # Exported cells run too, one after another, as in the module
        inside = {n for part in tree.body for n in ast.walk(part)} - {*tree.body}
        assert not any(isinstance(n, (ast.Import, ast.ImportFrom)) for n in inside), f"say importlib.import_module: {src}"


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

BUILT_IN = {"reshape"}                                      # Names in headings that are others' than the library's

@notebooks
def test_captions_and_texts_of_pictures_can_be_read(name):
    "They are YAML: a text in double quotes has none inside."
    for src in CODE[name]:
        for text in re.findall(r"^#\| *fig-(?:alt|cap): *(.*)$", src, flags=re.M):
            assert isinstance(read := yaml.safe_load(text), str), text
            assert "](" not in read, f"the site writes a link in a caption as it stands: {read}"


@notebooks
def test_no_link_is_put_around_code_that_becomes_a_link(name):
    "nbdev links every name of the library that stands in backticks; a link around it is then none, and its address is printed."
    text = "\n".join("".join(c["source"]) for c in CELLS[name] if c["cell_type"] == "markdown")
    for words, code, target in re.findall(r"\[([^\]\[]*`([^`\s]+)`[^\]\[]*)\]\(([^)]*)\)", text):
        assert target.startswith("http") or not code.isidentifier() or code in BUILT_IN, f"[{words}]({target})"


@notebooks
def test_every_picture_has_a_caption_and_a_text_for_readers_who_cannot_see_it(name):
    for c in CELLS[name]:
        if any(kind in ("image/png", "image/svg+xml") for out in c.get("outputs", []) for kind in out.get("data", {})):
            src = "".join(c["source"])
            for text in ("fig-cap", "fig-alt"): assert re.search(rf"^#\| *{text}: *\S", src, flags=re.M), f"no {text}:\n{src}"


@notebooks
def test_first_cell_is_title_and_sentence_alone(name):
    "nbdev makes the page's heading of this cell and drops whatever else stands in it."
    assert re.fullmatch(r"# \S.*\n+> \S.*\n*(- [\w-]+: .*\n*)*", "".join(CELLS[name][0]["source"]))


@pytest.mark.parametrize("name", [n for n in CELLS if n < "90" and n not in ("00i_grading", "00k_pages")])
def test_a_page_ends_with_its_takeaway_and_what_to_read_next(name):
    "In a box, once. The two left out are tools that other pages use."
    prose = "\n".join("".join(c["source"]) for c in CELLS[name] if c["cell_type"] == "markdown")
    end = re.split(r"^> \*\*Takeaway:\*\* \S", prose, flags=re.M)
    assert len(end) == 2 and len(re.findall(r"^\*\*Next:\*\* .*\]\(", end[1], flags=re.M)) == 1


@notebooks
def test_the_takeaway_follows_the_proof(name):
    "The folded checks never separate a reader from the next page, which is always the last thing to see."
    starts = [next((i for i, c in enumerate(CELLS[name]) if c["cell_type"] == "markdown" and mark in "".join(c["source"])), None)
              for mark in ("## Proof\n", "> **Takeaway")]
    assert None in starts or starts[0] < starts[1]


@notebooks
def test_cells_are_short_and_have_stable_ids(name):
    ids = [c["id"] for c in CELLS[name]]
    assert len(ids) == len(set(ids))
    for src in CODE[name]: assert len(src.strip().splitlines()) <= 40 or one_whole(src), src


def test_lines_are_short():
    "100 characters, but for a few that have no place to be cut at."
    long = [l for name, sources in CODE.items() for src in sources for l in src.splitlines() if len(l) > 100 and not l.startswith("#|")]
    assert len(long) <= 5, "\n".join(long)


def checks_silently(src):
    "Whether a cell's own lines check something; those inside functions and classes don't count."
    lines = [n for n in ast.parse(re.sub(r"^( *)[%!].*$", r"\1pass", src, flags=re.M)).body
             if not isinstance(n, (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef))]
    return any(isinstance(n, ast.Assert) or isinstance(n, ast.Call) and re.match("(check|test|expect)_", getattr(n.func, "id", ""))
               for line in lines for n in ast.walk(line))


def story_of(cells):
    "The cells of a page, without those of its section Proof."
    proof = False
    for cell in cells:
        heads = re.findall(r"^## .*", "".join(cell["source"]), flags=re.M) if cell["cell_type"] == "markdown" else []
        if heads: proof = heads[-1].startswith("## Proof")
        if not proof: yield cell


def pictures(cell):
    "How many pictures a cell shows."
    src = "".join(cell["source"])
    if cell["cell_type"] == "markdown": return len(re.findall(r"!\[|<svg|```mermaid", src))
    data = [o.get("data", {}) for o in cell.get("outputs", [])]
    return sum(bool({"image/png", "image/svg+xml"} & set(d)) or bool(re.search("<(svg|img|div|span)", "".join(d.get("text/html", "")))) for d in data)


@notebooks
def test_pictures_fit_light_and_dark_pages(name):
    "Their background is transparent, as `figure` makes it."
    from matplotlib.image import imread
    for c in CELLS[name]:
        for png in [o["data"]["image/png"] for o in c.get("outputs", []) if "image/png" in o.get("data", {})]:
            corner = imread(io.BytesIO(base64.b64decode("".join(png))), format="png")[1, 1]
            assert len(corner) == 4 and corner[3] == 0, "".join(c["source"])


def cut_bars(src):
    "Whether a cell draws bars whose lengths don't start at zero: their axis is logarithmic, or its limit lies above zero."
    for call, axis, edge in ((r"\.bar\(", "y", "bottom"), (r"\.barh\(", "x", "left")):
        log = rf"\b(set_)?{axis}scale(=|\()['\"]log|\.(semilog{axis}|loglog)\(|\blog=True"
        above = rf"\b(set_)?{axis}lim[=(]({edge}=)?[(\[]*0*\.?0*[1-9]"
        if re.search(call, src) and re.search(f"{log}|{above}", src): return True
    return False


@notebooks
def test_bars_begin_at_zero(name):
    "A bar says its number by its length. Where a logarithmic axis is needed, dots do."
    cut = [src for src in CODE[name] if "figure(" in src and cut_bars(src)]
    assert not cut, "\n\n".join(cut)


def test_cut_bars_are_seen():
    assert cut_bars("ax.bar(x, y); ax.set(yscale='log')") and cut_bars("ax.barh(x, y); ax.set(xlim=(.5, 1))")
    for rest in (".set(ylim=(0.5, 1))", ".set(ylim=[2, 3])", ".set(ylim=.5)", ".set_ylim((2, 3))", ".set_ylim(0.05, 1)", ".set_ylim(bottom=2)", ".bar(x, y, log=True)", ".semilogy()", ".loglog()"):
        assert cut_bars(f"ax.bar(x, y); ax{rest}") and cut_bars(f"ax.bar(x, y); ax{rest}".replace("bar(", "barh(").replace("ylim", "xlim").replace("bottom", "left").replace("logy", "logx"))
    for rest in ("ylim=0", "ylim=(0., 3)", "ylim=[0.0, 1]", "ylim=(-1, 3)", "ylim=(None, 2)", "xlim=(2, 3)"): assert not cut_bars(f"ax.bar(x, y); ax.set({rest})")
    assert not cut_bars("ax.bar(x, y); ax.set_ylim(top=2)") and not cut_bars("ax.bar(x, y); ax.semilogx()")
    assert not cut_bars("ax.bar(x, y); ax.set(xscale='log', ylim=(0, 1))") and not cut_bars("ax.plot(x, y); ax.set(yscale='log')")


PROSE = [n for n in CELLS if n[2:3] != "z" and n not in FIRST]   # Graders' pages are another kind


@pytest.mark.parametrize("name", PROSE)
def test_story_comes_before_proof(name):
    "At most one cell in ten of the story only checks."
    code = [c for c in story_of(CELLS[name]) if c["cell_type"] == "code" and not re.match(r"#\|\s*(export|hide|default)", "".join(c["source"]))]
    silent = [c["id"] for c in code if not c["outputs"] and checks_silently("".join(c["source"]))]
    assert len(silent) <= -(-len(code) // 10), silent


def test_pages_have_pictures():
    "At least one for every 500 words of a page's story."
    few = []
    for name in PROSE:
        story = list(story_of(CELLS[name]))
        words = sum(len("".join(c["source"]).split()) for c in story if c["cell_type"] == "markdown")
        if "01" <= name[:2] <= "14" and words > 500 * max(1, sum(map(pictures, story))): few.append(name)
    assert not few, few


def test_a_silent_check_is_seen():
    assert checks_silently("x = 1\nassert x") and checks_silently("with expect_error(ValueError): f()")
    assert not checks_silently("from a import check_close\ndef f(x): assert x")


def loses_its_prints(src):
    "A semicolon at the end of a cell hides its picture's name, and in execnb what the cell prints too."
    printing = (isinstance(n, ast.Call) and getattr(n.func, "id", "") == "print" for n in ast.walk(ast.parse(src)))
    return src.rstrip().endswith(";") and any(printing)


def test_what_a_cell_prints_is_shown():
    assert loses_its_prints("print(1)\nax.plot([1]);\n") and not loses_its_prints("print(1)\nax.plot([1])") and not loses_its_prints("ax.plot([1]);")
    lost = [f"{name}: {''.join(c['source'])[-60:]!r}" for name in CELLS for c in CELLS[name]
            if c["cell_type"] == "code" and "print(" in (src := "".join(c["source"])) and src.rstrip().endswith(";") and loses_its_prints(src)]
    assert not lost, lost


def one_whole(src):
    "A class stands whole in one cell, with all its methods; a loop that is compiled can't be split without cost."
    body, lines = ast.parse(src).body, len(src.strip().splitlines())
    if any(isinstance(x, ast.ClassDef) for x in body): return lines <= 90
    return len(body) == 1 and isinstance(body[0], ast.FunctionDef) and body[0].decorator_list and lines <= 60


COMPILED = {"kernel", "quick", "inner", "called", "fused", "intrinsic", "njit", "jit", "triton.jit", "cuda.jit"}   # Numba and Triton find these types out by themselves


def untyped(source):
    "`function(argument)` for each argument without a type, of the public functions and methods in `source`. What a compiler types is left out."
    found = []
    def look(body, inside=None):
        for node in body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"): look(node.body, node.name)
            elif isinstance(node, (ast.If, ast.Try)): look(node.body, inside)
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                decorators = {ast.unparse(d).split("(")[0] for d in node.decorator_list}
                if re.match("_(?!_)", node.name) or decorators & COMPILED: continue
                a = node.args
                arguments = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, [a.vararg, a.kwarg])]
                if inside and "staticmethod" not in decorators: arguments = arguments[1:]       # self or cls
                found.extend(f"{node.name}({x.arg})" for x in arguments if x.annotation is None)
    look(ast.parse(source).body)
    return found


def test_arguments_are_typed():
    assert untyped("def f(a, b:int, *c, d=1, **e): pass\nclass C:\n    def m(self, x): pass\n    @staticmethod\n    def s(y:int, z): pass") == [
        "f(a)", "f(d)", "f(c)", "f(e)", "m(x)", "s(z)"]
    assert untyped("@kernel\ndef f(a): pass\ndef _g(a): pass\nclass _C:\n    def m(self, a): pass\nasync def h(a): pass") == ["h(a)"]
    assert {module: found for module, path in MODULES.items() if (found := untyped(path.read_text(encoding="utf-8")))} == {}


def test_methods_stand_in_their_class():
    "None is assigned from outside."
    for name in CODE:
        for src in CODE[name]:
            if not re.match(r"#\|\s*exports?i?\b", src): continue
            for node in ast.parse(src).body:
                targets = [t for x in node.targets for t in ast.walk(x)] if isinstance(node, ast.Assign) else []
                assert not any(isinstance(t, ast.Attribute) and isinstance(t.value, ast.Name) and t.value.id[0].isupper() for t in targets), src


@notebooks
def test_notebook_is_saved_with_its_outputs(name):
    shown = [c for c in CELLS[name] if c["cell_type"] == "code" and not re.match(r"#\|\s*(hide|default_exp|exports?i?\b)", "".join(c["source"]))]
    assert not shown or any(c["outputs"] for c in shown)
    assert not any(o["output_type"] == "error" for c in shown for o in c["outputs"])


def sidebar():
    "(section, pages of the main line, companions) in the order of the sidebar."
    for o in yaml.safe_load((ROOT / "_quarto.yml").read_text(encoding="utf-8"))["website"]["sidebar"]["contents"]:
        listed = [o] if isinstance(o, str) else o["contents"]
        inner = [n for n in listed if not isinstance(n, str)]
        assert [n["section"] for n in inner] in ([], ["Companions"]) and listed[-1:] == (inner or listed[-1:]), o
        yield "" if isinstance(o, str) else o["section"], [n for n in listed if isinstance(n, str)], [n for i in inner for n in i["contents"]]


def test_sidebar_lists_every_notebook_once():
    "Its order is that of readers: the first pages, the chapters, and the tools of the course at the end. A page stands in a section of its number."
    found = list(sidebar())
    listed = {n for _, main, more in found for n in main + more}
    odd = listed ^ {nb.as_posix() for nb in PAGES.values()}
    assert not odd, f"in only one of _quarto.yml and nbs: {sorted(odd)}"
    assert sorted(n for _, main, more in found for n in main + more) == sorted(nb.as_posix() for nb in PAGES.values())
    assert [main for section, main, _ in found if not section] == [[f"{n}.ipynb"] for n in FIRST] and [s for s, _, _ in found[:len(FIRST)]] == [""] * len(FIRST)
    elsewhere = {Path(n).stem for s, main, more in found for n in main + more if s and Path(n).stem[:2] != s[:2]}
    assert elsewhere == {"00j_autograd"}, "backpropagation is read where layers need it"
    assert found[-1][0] == "00 Tools of the course" and "00a_checks" in str(found[-1])


def test_next_leads_along_the_main_line():
    "The first link behind **Next:** is the page that follows in the sidebar, companions left out."
    line = [n for _, main, _ in sidebar() for n in main]
    for here, after in zip(line, line[1:]):
        prose = "\n".join("".join(c["source"]) for c in CELLS[Path(here).stem] if c["cell_type"] == "markdown")
        if found := re.search(r"^\*\*Next:\*\* .*?\]\(([^)#]+)", prose, flags=re.M):
            assert Path(found[1]).stem == Path(after).stem, f"{here} leads to {found[1]}, the sidebar to {after}"


def test_numpy_twins_are_companions():
    "One of each pair is on the main line: the one in torch."
    main, more = ({Path(n).stem for part in sidebar() for n in part[i]} for i in (1, 2))
    assert {n for n in PAGES if n.endswith("_np")} <= more and {n for n in PAGES if n.endswith("_torch")} <= main


def test_readme_is_made_from_the_first_page():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for cell in CELLS["index"]:
        lines = [l for l in "".join(cell["source"]).splitlines() if cell["cell_type"] == "code" or l.startswith("#")]
        if not lines or lines[0].startswith("#|"): continue
        for line in lines: assert line in readme, f"python tools/build_docs.py --readme (README.md lacks {line!r})"
    assert len(readme.splitlines()) <= 150, "README.md is a door, not a book"
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


def test_public_names_exist_and_are_few():
    "What a module offers is what a reader would import: a longer list is cut down by an `__all__` of its own"
    for m in MODULES:
        module = importlib.import_module(f"lmcourse.{m}")
        names = getattr(module, "__all__", [])
        assert all(hasattr(module, n) for n in names) and len(names) <= 34, m


@pytest.mark.parametrize("what, home", [
    (r"json\.loads?\(.*(read_text|read_utf8|open)\(|^def read_json\(", "tools.files"),
    (r"cpu_count|sched_getaffinity|cpuinfo|VmHWM|MemAvailable|SC_PHYS_PAGES", "tools.machine"),
    (r"\bnjit\(|@njit|@intrinsic\b|import.*\bir\b", "tools.compiled architecture.transpose architecture.fused_attention"), # The tiles are the pages' subject
    (r"\[:, None\] *[-+].*np\.arange\(", "training.data"),
    (r"^def ngram_losses|ngram_losses\(.*vocab_size", "tools.ngram training.data"),
    (r"os\.replace\(", "tools.files tokenization.token_files"),             # The second gives several files their names at once
    (r"os\.rename\(", "training.checkpoint training.sharding"),  # Folders, one of which stays until the other is there
])
def test_shared_ground_stands_in_one_place(what, home):
    "Files, the machine, compiled code and windows of tokens."
    found = {m for m, p in MODULES.items() if not m.startswith("exercises.") and re.search(what, p.read_text(encoding="utf-8"), flags=re.M)}
    assert found <= {*home.split()}, found
    assert found & {*home.split()}, "nothing is looked for"


# The package

def test_versions_agree():
    version = SETTINGS["version"]
    assert importlib.import_module("lmcourse").__version__ == version
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["version"] == version
    assert f"\n## {version}\n" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["name"] == SETTINGS["repo"]


def test_python_versions_agree():
    "settings.ini says them; tools that can't read it say them again."
    first, last = (int(SETTINGS[k].removeprefix("3.")) for k in ("min_python", "max_python"))
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    assert (tools["ruff"]["target-version"], tools["mypy"]["python_version"]) == (f"py3{first}", f"3.{first}")
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text(encoding="utf-8"))
    assert workflow["jobs"]["test"]["strategy"]["matrix"]["python"] == [f"3.{m}" for m in range(first, last + 1)]
    names = "python3 " + " ".join(f"python3.{m}" for m in range(last, first - 1, -1))
    assert names in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_how_to_use_the_command_is_said_before_a_run_that_may_be_stopped():
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    for what in ("quickstart", "pipeline"):
        assert re.search(rf"^{what}: .*\n\t@echo \"to use the command lmcourse [^\n]*activate\"\n\t\$\(BIN\)/lmcourse {what}", text, flags=re.M), what


def test_every_requirement_of_the_package_has_a_floor():
    "`tools/floors.py` runs the tests with them; what tests alone need is held by constraints.txt."
    for key in ("requirements", "interop_requirements", "serve_requirements", "notebook_requirements"):
        for r in map(Requirement, shlex.split(SETTINGS[key])): assert [s.operator for s in r.specifier] == [">="], f"{key}: {r}"


def test_constraints_pin_every_requirement_within_its_bounds():
    lines = [l for l in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if l and not l.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", l) for l in lines), "exact versions, without +cpu and the like"
    pins = {name.lower(): version for name, _, version in (l.partition("==") for l in lines)}
    for r in map(Requirement, shlex.split(SETTINGS["requirements"]) + EXTRAS["dev_requirements"]):
        assert r.name in pins and pins[r.name] in r.specifier, f"{r} and constraints.txt: {pins.get(r.name)}"


def test_no_path_of_a_machine():
    tops = [p for p in ROOT.iterdir() if p.is_file() and p.name not in (".DS_Store", ".git")]
    below = [p for d in ("lmcourse", "nbs", "tests", "tools", ".github", ".devcontainer", ".ci") for p in (ROOT / d).rglob("*") if p.is_file()]
    for p in tops + [p for p in below if "__pycache__" not in p.parts and ".ipynb_checkpoints" not in p.parts]:
        found = re.search(rb"(?<![\w.~-])/(home|root|work|Users)/\w\S*", p.read_bytes())
        assert not found, f"{p}: {found[0]}"


def test_package_data_is_small():
    data = [p for p in (ROOT / "lmcourse/data").rglob("*") if p.is_file()]
    assert data and sum(p.stat().st_size for p in data) < 2_100_000


def test_annotations_are_shipped_and_checked():
    "Whoever imports the library sees its types; those that mypy reads are all but the index for the site."
    assert (ROOT / "lmcourse/py.typed").exists()
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    assert tools["mypy"]["files"] == ["lmcourse", "tests/typed_use.py"] and tools["mypy"]["exclude"] == [r"_modidx\.py$"]
    assert "method-assign" not in tools["mypy"]["disable_error_code"], "methods stand in their class"
    ours = [o for o in tools["mypy"]["overrides"] for m in o["module"] if m.startswith("lmcourse")]
    assert not any(o.keys() & {"ignore_errors", "follow_imports"} for o in ours), "check what is written here"


def test_importing_the_package_loads_nothing_else():
    "Neither a library nor a module of ours: the time of an import is that of what it imports."
    script = "import sys; before = {*sys.modules}; import lmcourse; print(*sorted({*sys.modules} - before))"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()
    assert "lmcourse" in loaded and not [m for m in loaded if m.startswith("lmcourse.") or m.partition(".")[0] not in {"lmcourse", *sys.stdlib_module_names}], loaded


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    "What pip installs from a clone, and a release: the wheel that is made from the archive of the sources."
    folder = tmp_path_factory.mktemp("wheels")
    copy = "lmcourse settings.ini setup.py pyproject.toml MANIFEST.in README.md LICENSE CITATION.cff CHANGELOG.md constraints.txt".split()
    subprocess.run(["cp", "-R", *(ROOT / f for f in copy), folder], check=True)
    subprocess.run([sys.executable, "-c", "from setuptools import build_meta; build_meta.build_sdist('.')"], cwd=folder, check=True, capture_output=True)
    for name, source in ("clone", folder), ("release", next(folder.glob("*.tar.gz"))):
        subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder / name, source], check=True)
    return {name: next((folder / name).glob("*.whl")) for name in ("clone", "release")}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["clone", "release"])
def test_wheel_has_modules_data_and_the_command(wheels, name):
    wheel = zipfile.ZipFile(wheels[name])
    most = dict(clone=2_200_000, release=2_000_000)[name]                # A release has no graders and benches
    assert wheels[name].stat().st_size < most, f"{wheels[name].stat().st_size:,} bytes"
    assert not [n for n in wheel.namelist() if n.endswith((".ipynb", ".md", ".yml")) or not n.startswith(("lmcourse/", "lmcourse-"))]
    ours = {p.relative_to(ROOT).as_posix() for p in (ROOT / "lmcourse").rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    left_out = {n for n in ours if re.match(r"lmcourse/(exercises/|app/(bench\w*|grade|throughput)\.py)", n)}
    site = {"lmcourse/_modidx.py", "lmcourse/tools/pages.py", "lmcourse/app/benchmarks.py"}  # Built from a clone, which has them
    assert len(left_out) > 10 and ours & set(wheel.namelist()) == ours - site - (left_out if name == "release" else set())
    entries = next(wheel.read(n).decode() for n in wheel.namelist() if n.endswith("entry_points.txt"))
    assert "lmcourse = lmcourse.__main__:main" in entries.replace("lmcourse=", "lmcourse = ")


@pytest.mark.slow
def test_a_release_works_without_graders_and_benches(wheels, tmp_path):
    zipfile.ZipFile(wheels["release"]).extractall(tmp_path)
    modules = [m for m in MODULES if (tmp_path / MODULES[m].relative_to(ROOT)).exists()]
    def ask(*words): return subprocess.run([sys.executable, *words], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    script = "import importlib, sys, lmcourse; print(lmcourse.__file__); [importlib.import_module(f'lmcourse.{m}') for m in sys.argv[1:]]"
    done = ask("-c", script, *modules)
    assert done.returncode == 0 and done.stdout.startswith(str(tmp_path)), done.stderr
    assert ask("-m", "lmcourse", "account", "--preset", "gpt2-small").returncode == 0
    done = ask("-m", "lmcourse", "exercises")
    assert done.returncode == 2 and f"pip install 'lmcourse @ git+{SETTINGS['git_url']}'" in done.stderr
