"Parameter cells hold for other values, and `live` shows a picture with and without widgets."
import ast
import contextlib
import dis
import importlib
import io
import json
import re
import sys
import types
from functools import partial
from pathlib import Path

import pytest

from lmcourse.tools import show
from lmcourse.tools.pages import page_files
from lmcourse.tools.show import Table, controls, figure, live

NBS = Path(__file__).parent.parent / "nbs"
PAGES = {name: NBS / path for name, path in page_files(NBS).items()}
MARK = "# Parameters: change these and run the cells below"


def cells(name):
    "The cells of a notebook as (kind, source), without what is exported, skipped, hidden or a magic."
    found = [(c["cell_type"], "".join(c["source"])) for c in json.loads(PAGES[name].read_text(encoding="utf-8"))["cells"]]
    return [(kind, src) for kind, src in found if kind == "markdown" or not re.search(r"^(#\| *(slow|cuda|hide|default_exp|exports?i?\b|eval: *false)|[%!])", src, flags=re.M)]


def sections(name):
    "Where each marked cell stands, and where the section around it ends: the next heading."
    found = cells(name)
    for i, (kind, src) in enumerate(found):
        if kind == "code" and src.startswith(MARK):
            yield i, next((j for j in range(i, len(found)) if found[j][0] == "markdown" and re.search(r"^#", found[j][1], flags=re.M)), len(found))


def names(src):
    "What a cell makes, what it only changes (`x.method = f`, `x[k] = v`), and which names of other cells it reads."
    made, read, todo = set(), set(), [compile(src, "cell", "exec")]
    while todo:
        code = todo.pop()
        for i in dis.get_instructions(code):
            if i.opname == "STORE_NAME" and code.co_name == "<module>": made.add(i.argval)
            if i.opname in ("LOAD_NAME", "LOAD_GLOBAL") and i.argval not in made: read.add(i.argval)
        todo += [c for c in code.co_consts if isinstance(c, types.CodeType)]
    parts = [t for n in ast.walk(ast.parse(src)) if isinstance(n, ast.Assign) for target in n.targets for t in ast.walk(target)]
    changed = {t.value.id for t in parts if isinstance(t, (ast.Attribute, ast.Subscript)) and isinstance(t.value, ast.Name)}
    return made, changed - made, read


def setup(found, start, stop):
    "The cells before `start` that the cells up to `stop` need: from the last to the first, each that makes or changes a name which is still wanted."
    wanted, chosen = set(), []
    for j in reversed(range(stop)):
        if found[j][0] != "code": continue
        made, changed, read = names(found[j][1])
        if j < start and not (made | changed) & wanted: continue
        wanted = wanted - made | read
        if j < start: chosen.insert(0, found[j][1])
    return chosen


def run(src, space):
    "What a notebook would show of a cell: what it prints, its last expression, its figures."
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    tree, printed, shown = ast.parse(src), io.StringIO(), []
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) and not src.rstrip().endswith(";") else None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "cell", "exec"), space)
        value = eval(compile(ast.Expression(last.value), "cell", "eval"), space) if last else None
    if value is not None: shown.append(picture(value) if hasattr(value, "savefig") else str(value))
    shown += [picture(plt.figure(n)) for n in plt.get_fignums()]
    plt.close("all")
    return [x for x in [printed.getvalue(), *shown] if x]


def picture(fig):
    file = io.BytesIO()
    fig.savefig(file, format="raw", dpi=50)
    return file.getvalue()


# Other values for each marked cell: what a reader might write there. A cell whose output none of them changes is found out.
OTHER = {
    "01f_explorer": [dict(text="'def f(x): return x*x'", learnt_from="'code'", vocab_size="400"),
                     dict(text="'ab ab abc'", learnt_from="'ab abc abcd ' * 50", vocab_size="260"), dict(text="''")],
    "02j_run_cost": [dict(where="'l4'", batch="1"), dict(dtype="'float32'", preset="'gpt2-small'", tokens="512")],
    "02k_account": [dict(yours="ModelConfig(vocab_size=100, context_length=8, d_model=16, num_layers=1, num_heads=2, position='learned')", batch_size="1"),
                    dict(dtype="'float32'", recompute="True", where="'h100'", share=".9")],
    "02l_your_gpu": [dict(dollars="{'h100': 2., 't4': .1}"), dict(preset="'ts-7m'"), dict(yours="device_of('l4')", minutes="1")],
    "05a_sampling": [dict(chosen="dict(temperature=0, top_k=None, top_p=None, min_p=None)"), dict(given="{'a': 1., 'b': 1., 'c': -9.}", seed="7"),
                     dict(chosen="dict(temperature=3., top_k=2, top_p=1, min_p=0)")],
    "07a_kv_cache": [dict(preset="'gpt2-xl'", num_kv_heads="None", texts="1", tokens="5", where="'a100'"), dict(window="1024", dtype="'float32'", tokens="100_000"),
                     dict(num_kv_heads="1")],
    "07c_speculative": [dict(rate="0", lookahead="1"), dict(rate="1.", lookahead="16", draft_cost="0"), dict(draft_cost=".9", pass_cost="3")],
}


def changed(src, values):
    "The parameter cell with other values; each must be for a name of its own."
    made, _, _ = names(src)
    assert set(values) <= made, values
    return src + "".join(f"\n{name} = {value}" for name, value in values.items())


def test_every_chapter_with_numbers_to_play_with_has_a_parameter_cell():
    marked = {name for name in PAGES if any(sections(name))}
    assert marked == set(OTHER), "a parameter cell needs other values in OTHER, to be tried with"
    assert {name[:2] for name in marked} >= {"01", "02", "05", "07"}


@pytest.mark.parametrize("name", OTHER)
def test_what_follows_a_parameter_cell_holds_for_other_values(name, monkeypatch):
    """The library's own module stands for the exported cells. Of the others before the section those are run that it needs, as their names tell,
    then the section: with its own values, and with others. All must run, and each cell that shows something must show something else at least once."""
    monkeypatch.chdir(PAGES[name].parent)
    home = re.search(r"#\| *default_exp +([\w.]+)", PAGES[name].read_text(encoding="utf-8"))[1]
    found = cells(name)
    for start, stop in sections(name):
        space = vars(importlib.import_module(f"lmcourse.{home}")) | {"__name__": "__main__"}
        for src in setup(found, start, stop): exec(compile(src, name, "exec"), space)
        parts = [src for kind, src in found[start + 1:stop] if kind == "code"]
        first = found[start][1]
        for src in [first, *parts]: assert not any(isinstance(n, ast.Assert) for n in ast.walk(ast.parse(src))), f"an assertion can't hold for any values: {src}"
        others = [changed(first, values) for values in OTHER[name] if set(values) & names(first)[0]] # A page may have several such cells
        runs = [[run(src, space) for src in [cell, *parts]][1:] for cell in [first, *others]]
        for i, src in enumerate(parts): assert not runs[0][i] or any(other[i] != runs[0][i] for other in runs[1:]), f"always the same: {src}"
        assert all(any(outputs) for outputs in runs)


def test_the_check_of_parameter_cells_sees_what_is_wrong():
    found = [("code", "import math"), ("code", "a = 1"), ("code", "b = math.pi\nc = b"), ("code", "c = 3"), ("code", "def f(): return a"),
             ("code", "d = {}"), ("code", "d['k'] = a"), ("code", MARK + "\nx = 1"), ("code", "f(), c, d, x")]
    assert setup(found, 7, 9) == ["a = 1", "c = 3", "def f(): return a", "d = {}", "d['k'] = a"]
    assert names(changed(MARK + "\nx = 1", dict(x="2")))[0] == {"x"}
    with pytest.raises(AssertionError): changed(MARK + "\nx = 1", dict(y="2"))
    assert run("print(1)\n2 + 1", {}) == ["1\n", "3"] and run("2;", {}) == []


# `live`

class Part:
    "What the fake widgets have in common: a value that can be watched, and children."
    def __init__(self, children=(), value=None, **how): self.children, self.how, self._value, self.watchers = list(children), how, value, []
    def observe(self, f, names): self.watchers.append(f)
    def _repr_mimebundle_(self, **kwargs): return {"application/vnd.jupyter.widget-view+json": {}}
    value = property(lambda self: self._value, lambda self, v: (setattr(self, "_value", v), [f(None) for f in self.watchers]))


@pytest.fixture
def fake(monkeypatch):
    "A notebook with a kernel, and an `ipywidgets` that keeps what it was told."
    made = {name: type(name, (Part,), {}) for name in ("Textarea", "Dropdown", "SelectionSlider", "HTML", "VBox")}
    monkeypatch.setitem(sys.modules, "ipywidgets", types.SimpleNamespace(**made))
    monkeypatch.setattr(show, "_has_kernel", lambda: True)
    return made


def draw(size, colour="red", text=""):
    if size > 5: raise ValueError("no more than <5>")
    return Table([dict(size=size, colour=colour, text=text)])


CHOICES = dict(size=[1, 3, 9], colour=("blue", "red"), text="a text")


def test_without_a_kernel_there_is_a_picture_alone():
    shown = live(draw, **CHOICES)
    assert isinstance(shown, Table) and shown.rows == [dict(size=1, colour="red", text="a text")]      # A default, else the first


def test_a_kernel_is_told_from_a_plain_shell(monkeypatch):
    for shell, seen in ((None, False), (types.SimpleNamespace(), False), (types.SimpleNamespace(kernel=None), False), (types.SimpleNamespace(kernel=1), True)):
        monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
        assert show._has_kernel() == seen
    monkeypatch.delitem(sys.modules, "IPython")
    assert not show._has_kernel()


def test_with_a_kernel_but_no_ipywidgets_too(fake, monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    assert live(draw, **CHOICES).rows == [dict(size=1, colour="red", text="a text")]
    with pytest.raises(ModuleNotFoundError, match="pip install ipywidgets"): controls(draw, **CHOICES)


def test_controls_of_the_right_kind_change_the_picture(fake):
    widget = live(draw, **CHOICES)
    size, colour, text, view = widget.children
    assert all(isinstance(w, fake[k]) for w, k in zip(widget.children, ("SelectionSlider", "Dropdown", "Textarea", "HTML"), strict=True))
    assert size.how["options"] == [("1", 1), ("3", 3), ("9", 9)] and (size.value, colour.value, text.value) == (1, "red", "a text")
    assert view.value == draw(1, "red", "a text")._repr_html_()
    assert widget._repr_mimebundle_().keys() == {"application/vnd.jupyter.widget-view+json", "text/html"}
    size.value, colour.value, text.value = 3, "blue", "<b>"
    assert view.value == draw(3, "blue", "<b>")._repr_html_()
    size.value = 9
    assert view.value == "no more than &lt;5&gt;"
    size.value = 1
    assert view.value == draw(1, "blue", "<b>")._repr_html_() == widget._repr_mimebundle_()["text/html"]


def test_a_default_that_is_no_choice_joins_them(fake):
    size, view = live(partial(draw, size=2), size=[1, 3]).children
    assert size.how["options"] == [("1", 1), ("2", 2), ("3", 3)] and size.value == 2
    colour, _ = live(partial(draw, 1, colour="green"), colour=["blue"]).children
    assert [v for _, v in colour.how["options"]] == ["green", "blue"] and colour.value == "green"
    for choices in (dict(size=[]), dict(size=())):
        with pytest.raises(ValueError, match="size has no values to choose from"): live(draw, **choices)
    with pytest.raises(TypeError, match="colours"): live(draw, size=[1], colours=["a"])


def test_a_plot_is_shown_once(fake, monkeypatch):
    plt = pytest.importorskip("matplotlib.pyplot")
    def plot(n):
        fig, ax = figure()
        ax.plot(range(n))
        return ax
    slider, view = live(plot, n=[2, 5]).children
    before = view.value
    slider.value = 5
    assert view.value.startswith("<img") and "data:image/png;base64," in view.value and view.value != before
    monkeypatch.undo()
    assert isinstance(live(plot, n=[2, 5]), plt.Figure) and not plt.get_fignums()
    assert isinstance(live(lambda n: figure(n)[1], n=[2]), plt.Figure) and not plt.get_fignums()


@pytest.mark.slow
def test_in_a_kernel_of_jupyter(tmp_path):
    "The widget, and beside it the picture for those who read the saved notebook."
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    code = "from lmcourse.tools.show import Table, live\nlive(lambda n: Table([dict(n=n)]), n=[7, 8])"
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    nbclient.NotebookClient(nb, timeout=60, kernel_name="python3", resources={"metadata": {"path": str(NBS)}}).execute()
    data = nb.cells[0].outputs[0].data
    assert "application/vnd.jupyter.widget-view+json" in data and ">7</td>" in data["text/html"]
