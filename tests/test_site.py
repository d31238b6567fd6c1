"The parts of the site's builder, on small pieces of text; the site itself is built and looked at by `tools/check.py`."
import json
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))
pytest.importorskip("nbconvert")
from docs.extras import llms, markdown, search_index
from docs.notebook import code_cell, enrich, facts, labels, load, md, options, plain, reading
from run_nbs import note_time
from docs.page import dead_links, finish, html, links, sections
from bs4 import BeautifulSoup

from lmcourse.tools.pages import heading_anchor

new_code, new_md, PIXEL = nbformat.v4.new_code_cell, nbformat.v4.new_markdown_cell, "iVBORw0KGgo="


def png(): return nbformat.v4.new_output("display_data", data={"image/png": PIXEL, "text/plain": "<Figure>"})


def notebook(tmp_path, *cells, name="02a_memory.ipynb"):
    path = tmp_path / name
    path.write_text(nbformat.v4.writes(nbformat.v4.new_notebook(cells=list(cells))), encoding="utf-8")
    return path


# Markdown

@pytest.mark.parametrize("heading, key", [("When must reshape copy?", "when-must-reshape-copy"), ("1. A list", "a-list"), ("f_np.g", "f_np.g"), ("12", "section")])
def test_anchor_is_that_of_pandoc(heading, key): assert heading_anchor(heading) == key


def test_callouts_become_boxes_and_folds():
    box = md("::: {.callout-tip}\n## Why\nBecause.\n:::\n")
    assert '<div class="callout tip"><p class="callout-title">Why</p>' in box and "Because." in box
    fold = md('::: {.callout-note collapse="true"}\nHidden.\n:::\n')
    assert fold.startswith('<details class="callout note"><summary class="callout-title">Note</summary>')
    assert md("::: plain text") == "::: plain text"


def test_footnotes_ids_and_attributes():
    assert md("A[^1].\n\n[^1]: Note.") == 'A<sup><a href="#fn1">1</a></sup>.\n\n<div class="footnote" id="fn1">\n\n<sup>1</sup> Note.\n\n</div>'
    assert md("## Title {#here}") == '## Title <span data-id="here"></span>'
    assert md('[a](b.html){target="_blank"}') == "[a](b.html)"


# Cells

def test_options_are_taken_off_the_cell():
    c = new_code("#| echo: false\n#| fig-cap: \"A: b\"\nx = 1\n#| not: one")
    assert options(c) == {"echo": False, "fig-cap": "A: b"} and c.source == "x = 1\n#| not: one"


def test_what_options_hide_is_hidden():
    printed = nbformat.v4.new_output("stream", name="stderr", text="warning")
    assert not code_cell(new_code("#| include: false\nx", outputs=[printed]))
    c = new_code("#| warning: false\n#| echo: false\nx", outputs=[printed])
    assert code_cell(c) and not c.outputs and c.metadata["transient"] == {"remove_source": True}
    c = new_code("#| code-fold: true\n#| code-summary: Answer\nx")
    assert code_cell(c) and c.metadata["fold"] == [False, "Answer"]


def test_plain_markdown_has_code_and_printed_outputs_and_no_pictures():
    shown = nbformat.v4.new_output("execute_result", data={"text/plain": "2", "text/html": "<b>2</b>"})
    nb = nbformat.v4.new_notebook(cells=[new_md("<div></div>", id="facts"), new_md("Text."), new_code("1 + 1", outputs=[shown]), new_code("plot()", outputs=[png()])])
    nb.cells[3].metadata["alt"] = "Plot: loss"
    assert plain(nb, dict(title="T", description="D.")) == "# T\n\n> D.\n\nText.\n\n```python\n1 + 1\n```\n\n```\n2\n```\n\n```python\nplot()\n```\n\n(Plot: Plot: loss)\n"


@pytest.mark.parametrize("source, said", [
    ("ax.set(xlabel='step', ylabel='loss (nats)')", "loss (nats) against step"),
    ("ax.set_title('Runs'); ax.set_ylabel('loss')", "Runs: loss"),
    ("for ax in axes: ax.set(xlabel='n', ylabel='ms')\nfig.suptitle('Both')", "Both: ms against n"),
    ("%timeit x\nplot(x, xlabel=name)", ""),
])
def test_a_plot_is_described_by_its_labels(source, said): assert labels(source) == said


def test_enriched_notebook_has_facts_once_and_every_plot_a_text(tmp_path):
    head = nbformat.v4.new_raw_cell("---\ntitle: T\n---")
    path = notebook(tmp_path, head, new_md("## Speed {#s}"), new_code("ax.set(ylabel='ms')", outputs=[png()]), new_code("#| fig-cap: Own\nplot()", outputs=[png()]))
    for _ in range(2): enrich(path, "<div>facts</div>")
    cells = nbformat.read(path, 4).cells
    assert [c.cell_type for c in cells] == ["raw", "markdown", "markdown", "code", "code"] and cells[1].source == "<div>facts</div>"
    assert cells[3].source == '#| fig-alt: "Plot in “Speed”: ms"\nax.set(ylabel=\'ms\')' and cells[4].source == "#| fig-cap: Own\nplot()"
    nb, front, _ = load(path)
    assert front == {"title": "T"} and nb.cells[-1].metadata["alt"] == "Own"


def test_facts_count_words_lines_and_cells_that_are_skipped(tmp_path):
    path = notebook(tmp_path, new_md("# T\n" + "word "*399 + "\n```sh\nmake docs\n```"), new_code("#| default_exp accounting.memory"),
                    new_code("#| slow\n" + "x = 1\n"*20), new_code("#| cuda\ny"), new_code("#| slow\nz"))
    cells = json.loads(path.read_text())["cells"]
    assert reading(cells) == (4, 400, 22)
    line = facts(path, {"02a_memory": dict(seconds=12.4, memory_mb=910, machine="2 cores")}, "https://github.com/me/repo", "main")
    assert "4 min to read (400 words, 22 lines of code) · 12 s and 0.9 GB to run on 2 cores · 2 cells slow, skipped unless asked for · 1 cell for a GPU" in line
    for url in ("/blob/main/lmcourse/accounting/memory.py", "https://colab.research.google.com/github/me/repo/blob/main/"): assert url in line
    assert "to run" not in facts(path, {}, "https://github.com/me/repo", "main")


# Pages

PAGE = '''<div><p>First <b>words</b>.</p></div><h2>One</h2><p>Text <code>f(x)</code>, \\(a\\)</p><div class="highlight"><pre>code</pre></div>
<ul><li>a</li><li>b</li></ul><h4>Two</h4><p><a href="01a_bpe.ipynb#learn">x</a> <a href="https://me.io/c/bpe.html#y">y</a></p><h2>One</h2>'''


def test_page_gets_ids_links_levels_and_sections(tmp_path):
    body, toc, found = finish(PAGE, "a.html", "https://me.io/c", tmp_path)
    assert toc == [("one", "One", "h2"), ("two", "Two", "h3"), ("one-1", "One", "h2")]
    assert 'href="bpe.html#learn"' in body and 'href="bpe.html#y"' in body
    assert found == [["", "", "First words."], ["one", "One", "Text f(x), a a b"], ["two", "Two", "x y"], ["one-1", "One", ""]]


def test_picture_becomes_a_file_with_a_text(tmp_path):
    body, _, _ = finish(f'<div class="cell"><div data-alt="Plot: loss"><img src="data:image/png;base64,{PIXEL}"></div></div>', "a.html", "https://x", tmp_path)
    assert (tmp_path / "a_files/figure-0.png").read_bytes()[:4] == b"\x89PNG" and 'alt="Plot: loss"' in body and "base64" not in body


def test_sections_leave_code_and_tables_of_outputs_out():
    soup = BeautifulSoup('<p>a</p><div class="input">b</div><div class="output_text">c</div><div class="output_html">d</div><script>e</script><pre>f</pre>', "html.parser")
    assert sections(soup) == [["", "", "a"]]


def test_cells_become_html(tmp_path):
    nb, _, _ = load(notebook(tmp_path, new_md("Costs $2 \\times 3$, not \\$5."), new_code("#| code-fold: true\ndef f(): return '<b>'")))
    made = html(nb)
    assert r"<span>\(2 \times 3\)</span>" in made and '<details class="code-fold"><summary>Code</summary>' in made and "&lt;b&gt;" in made


def test_links_are_those_of_tags_alone():
    text = '<p id="a">href="no" <a class="x" href="b.html#c">b</a></p><script>document.write("<a href=\'d\'>")</script><img alt="id" src="e.png"/>'
    ids, found = links(text)
    assert ids == {"a"} and [address for _, address in found] == ["b.html#c", "e.png"]


def test_a_dead_link_is_named_and_a_method_leads_to_its_class(tmp_path):
    (tmp_path / "a.html").write_text('<h2 id="top"></h2><a href="b.html#c.d"></a><a href="b.html#gone"></a><a href="none.html"></a><a href="#top"></a>')
    (tmp_path / "b.html").write_text('<h2 id="c"></h2>')
    assert list(dead_links(tmp_path)) == ["a.html: b.html#gone", "a.html: none.html"]
    assert 'href="b.html#c"' in (tmp_path / "a.html").read_text()


# Beside the pages

def test_search_index_is_a_script_that_sets_one_name():
    pages = [["a.html", "Ä </script>", [["i", "H", "text"]]]]
    name, _, value = search_index(pages).partition(" = ")
    assert name == "window.searchIndex" and json.loads(value) == pages


def test_markdown_links_to_markdown():
    text = "[a](03c_attention_np.ipynb#x) [b](https://me.io/c/bpe.html#y) [c](https://other.io/z.html) [d](images/p.svg)"
    assert markdown(text, "https://me.io/c") == "[a](attention_np.html.md) [b](bpe.html.md) [c](https://other.io/z.html) [d](images/p.svg)"


def test_llms_txt_lists_every_page():
    class cfg: title, description, doc_host, doc_baseurl = "t", "d", "https://me.io", "/c"
    text = llms(cfg, [("", ["index.ipynb"]), ("01 One", ["01a_bpe.ipynb"])], {"index.ipynb": "index.html", "01a_bpe.ipynb": "bpe.html"}, {"index.ipynb": {}, "01a_bpe.ipynb": dict(title="BPE", description="Merges.")})
    assert text.startswith("# t\n\n> d\n") and "## 01 One\n\n- [BPE](https://me.io/c/bpe.html.md): Merges.\n" in text


def test_a_time_is_noted_and_those_of_lost_notebooks_go(tmp_path):
    (tmp_path / "a.ipynb").touch()
    (tmp_path / "times.json").write_text('{"gone": {}}')
    note_time(tmp_path / "a.ipynb", 1.26, tmp_path / "times.json")
    runs = json.loads((tmp_path / "times.json").read_text())
    assert runs.keys() == {"a"} and runs["a"]["seconds"] == 1.3 and 10 < runs["a"]["memory_mb"] < 1e6 and " of " in runs["a"]["machine"]


def test_times_are_of_notebooks_that_exist():
    times = ROOT / "nbs/results/times.json"
    if not times.exists(): pytest.skip("no times have been measured")
    for name, run in json.loads(times.read_text(encoding="utf-8")).items():
        assert (ROOT / f"nbs/{name}.ipynb").exists(), f"{times.name} has {name}: python tools/run_nbs.py --times"
        assert run.keys() == {"seconds", "memory_mb", "machine"}
