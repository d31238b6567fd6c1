"The parts of the site's builder, on small pieces of text; the site itself is built and looked at by `tools/check.py`."
import base64
import json
import re
import shutil
import sys
from pathlib import Path

import nbformat
import pytest
import yaml

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))
pytest.importorskip("nbconvert")
from docs import quarto
from docs.extras import llms, markdown, read_redirects, search_index, write_404, write_redirects
from docs.notebook import caption, code_cell, documented, enrich, facts, labels, load, md, options, plain, plain_signature, spoken, whole_summary
from run_nbs import note_time
from docs.page import dead_links, finish, fold_answers, fold_proof, html, links, sections
from bs4 import BeautifulSoup
from nbdev.doclinks import _nbpath2html

from lmcourse.tools.pages import heading_anchor, page_files, reading_time

new_code, new_md, PIXEL = nbformat.v4.new_code_cell, nbformat.v4.new_markdown_cell, "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJ"


def png(): return nbformat.v4.new_output("display_data", data={"image/png": PIXEL, "text/plain": "<Figure>"})


def notebook(tmp_path, *cells, name="02h_memory.ipynb"):
    path = tmp_path / name
    path.write_text(nbformat.v4.writes(nbformat.v4.new_notebook(cells=list(cells))), encoding="utf-8")
    return path


# Markdown

@pytest.mark.parametrize("heading, key", [("When must reshape copy?", "when-must-reshape-copy"), ("1. A list", "a-list"), ("f_np.g", "f_np.g"), ("12", "section"),
                                          ("Train & evaluate", "train-evaluate"), ("Élan vital", "élan-vital")])
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


def test_long_imports_are_folded_and_nothing_else_is(tmp_path):
    def made(source):
        enrich(path := notebook(tmp_path, new_code(source)), None)
        return nbformat.v4.reads(path.read_text(encoding="utf-8")).cells[0].source
    lines = ["import json, re", "from pathlib import Path", "import torch", "from lmcourse.tools.show import (COLORS,", "    figure)"]
    folded = made(source := "\n".join(lines))
    assert folded == f"#| code-fold: true\n#| code-summary: Imports\n{source}" == made(folded)
    for other in (lines[0], "\n".join(lines[:2]), source + "\nx = 1", "#| echo: false\n" + source): assert made(other) == other


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


def test_code_of_a_signature_has_no_links(tmp_path):
    link = "[`perplexity`](https://x.org/a.html#perplexity)"
    text = f"### f\n\n```python\ndef f(\n    model, # As for {link}\n)\n```\n\nAs {link} says.\n"
    out = nbformat.v4.new_output("display_data", data={"text/markdown": text})
    path = tmp_path/"a.ipynb"
    path.write_text(nbformat.v4.writes(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("from a import perplexity", outputs=[out])])))
    enrich(path, None)
    said = nbformat.v4.reads(path.read_text()).cells[0].outputs[0].data["text/markdown"]
    assert "# As for `perplexity`\n" in said and f"As {link} says." in said


def test_a_summary_of_two_lines_is_in_italics_to_its_end():
    one = "```python\ndef f()\n```\n\n*Add up.*\n"
    assert whole_summary(one) == one and whole_summary("*A* word\nmore\n") == "*A* word\nmore\n"
    assert whole_summary("*Return what is left after*\nall that. Raises `E`\nif not.\n\nMore.") == "*Return what is left after all that.* Raises `E` if not.\n\nMore."
    assert whole_summary("*Return what is left*\nand all.") == "*Return what is left and all.*\n"
    assert whole_summary("*Whole sentence.*\nAnother one.") == "*Whole sentence.*\nAnother one."


def test_enriched_notebook_has_facts_once_and_every_plot_a_text(tmp_path):
    head = nbformat.v4.new_raw_cell("---\ntitle: T\n---")
    path = notebook(tmp_path, head, new_code("plot()", outputs=[png()]))
    enrich(path, None)
    assert nbformat.read(path, 4).cells[1].source == '#| fig-alt: "Plot in “T”"\nplot()'
    path = notebook(tmp_path, head, new_md("## Speed {#s}"), new_code("ax.set(ylabel='ms')", outputs=[png()]), new_code("#| fig-cap: Own\nplot()", outputs=[png()]))
    for _ in range(2): enrich(path, "<div>facts</div>")
    cells = nbformat.read(path, 4).cells
    assert [c.cell_type for c in cells] == ["raw", "markdown", "markdown", "code", "code"] and cells[1].source == "<div>facts</div>"
    assert cells[3].source == '#| fig-alt: "Plot in “Speed”: ms"\nax.set(ylabel=\'ms\')' and cells[4].source == "#| fig-alt: \"Own\"\n#| fig-cap: Own\nplot()"
    nb, front, _ = load(path)
    assert front == {"title": "T"} and nb.cells[-1].metadata["alt"] == "Own"


def doc(name):
    text = f'---\n\n[source](https://x){{target="_blank"}}\n\n### {name}\n\n```python\ndef {name}(x):\n```\n\n*Says what.*\nAnd more.'
    return new_code("#| echo: false\n#| output: asis\nshow_doc(f)", outputs=[nbformat.v4.new_output("display_data", data={"text/markdown": text})])


def test_no_signature_stands_above_the_source_that_says_the_same(tmp_path):
    source = new_code("#| code-fold: show\ndef f(x):\n    'Says what.'\n    return x\ndef g(x): return x")
    path = notebook(tmp_path, doc("f"), doc("g"), source, doc("h"), new_md("Text."))
    for _ in range(2): enrich(path, None)
    f, g, _, h, _ = nbformat.read(path, 4).cells
    for rule, name, c in (("---\n\n", "f", f), ("", "g", g)):
        assert c.outputs[0].data["text/markdown"] == f'{rule}[source](https://x){{target="_blank"}}\n\n### {name}\n'
    assert "Says what" in h.outputs[0].data["text/markdown"]


def test_all_names_of_a_cell_stand_before_it_in_its_order(tmp_path):
    "nbdev has the last one before it, and the others behind it, backwards"
    source = new_code("#| code-fold: show\nclass a: pass\n\ndef b(x): return x\ndef c(x): return x")
    other = new_code("#| code-fold: show\ndef d(x): return x")
    path = notebook(tmp_path, doc("c"), source, doc("b"), doc("a"), doc("d"), other)
    for _ in range(2): enrich(path, None)
    cells = nbformat.read(path, 4).cells
    assert [documented(c) for c in cells] == ["a", "b", "c", None, "d", None]
    assert [c.outputs[0].data["text/markdown"].startswith("---") for c in cells if c.outputs] == [True, False, False, True]


def test_a_signature_shows_names_and_no_addresses():
    said = "### f\n\n```python\ndef f(\n    parts:Parts=Parts(norm=<function make.norm at 0x7fbf1ff97a60>, of=<class 'a.b.Linear'>), # Of what\n):\n```\n"
    assert plain_signature(said) == "### f\n\n```python\ndef f(\n    parts:Parts=Parts(norm=norm, of=Linear), # Of what\n):\n```\n"
    assert plain_signature("### Way\n\n```python\ndef Way(\n    *args, **kwargs\n):\n```\n\n*A way.*") == "### Way\n\n*A way.*"
    assert plain_signature(kept := "### g\n\n```python\ndef g(\n    f, *args, **kwargs\n):\n```\n") == kept


def test_all_of_them_reach_the_page(tmp_path):
    "Signatures are mended in the notebook, for either builder; summaries and captions where ours reads it"
    c = doc("h")
    c.outputs[0].data["text/markdown"] = "---\n\n### h\n\n```python\ndef h(\n    f=<function a.b at 0x7f>\n):\n```\n\n*Says what*\nit does."
    path = notebook(tmp_path, new_md("# T"), c, new_code("#| fig-cap: Of *x*\nplot()", outputs=[png()]))
    enrich(path, None)
    assert "f=b\n" in nbformat.read(path, 4).cells[1].outputs[0].data["text/markdown"]
    _, said, plot = load(path)[0].cells
    assert "*Says what it does.*" in said.outputs[0].data["text/markdown"] and plot.metadata["caption"] == "Of <em>x</em>"


def test_a_caption_knows_code_and_emphasis():
    assert caption("*banana* and `a < b*c*d`: 2 * 3 * 4 < 5 & more") == "<em>banana</em> and <code>a &lt; b*c*d</code>: 2 * 3 * 4 &lt; 5 &amp; more"


def test_a_kernel_and_a_function_without_docstring_say_nothing_of_pythons_call(tmp_path):
    "nbdev has no source link and no signature for what is compiled, and for both the docstring of a call"
    def bare(name):
        c = doc(name)
        text = c.outputs[0].data["text/markdown"].replace('[source](https://x){target="_blank"}\n\n', "")
        c.outputs[0].data["text/markdown"] = text.replace("*Says what.*\nAnd more.", "*Call self as a function.*")
        return c
    path = notebook(tmp_path, bare("f"), new_code("#| code-fold: show\n@jit\ndef f(x): pass"), bare("h"), new_md("Text."))
    for _ in range(2): enrich(path, None)
    f, _, h, _ = nbformat.read(path, 4).cells
    assert f.outputs[0].data["text/markdown"] == "---\n\n### f\n"
    assert "def h(x)" in (text := h.outputs[0].data["text/markdown"]) and "Call self" not in text


def test_source_that_its_cell_folds_is_folded_with_either_builder(tmp_path):
    "nbdev opens the source of what is exported."
    shown = '#| code-fold: show\n#| code-summary: "Exported source"\ndef f(x): return x'
    path = notebook(tmp_path, new_code(shown), new_code(shown, metadata={"code-fold": True}))
    for _ in range(2): enrich(path, None)
    assert [c.source.splitlines()[0] for c in nbformat.read(path, 4).cells] == ["#| code-fold: show", "#| code-fold: true"]


def test_the_name_of_a_parameter_leads_to_no_other_page(tmp_path):
    text = f"As [`draw`](https://me.io/c/cli.html#draw) says, [`used`](https://me.io/a.html#used) and [`f`](https://me.io/{tmp_path.name}/memory.html#f)."
    path = notebook(tmp_path, new_md(text), new_code("from a import used\ndef f(x, *, draw, used=used): return x"))
    enrich(path, None)
    assert nbformat.read(path, 4).cells[0].source == text.replace("[`draw`](https://me.io/c/cli.html#draw)", "`draw`")


@pytest.mark.parametrize("name, to, kept", [
    ("sample", "05_generation/sampling", True), ("pool", "11_scaling/study", True),                     # Imported, under its name or another
    ("train_bpe", "01_tokenization/bpe", True), ("Engine", "07_inference/engine", True), ("mix()", "13_curation/mixing", True),       # No plain words
    ("form", "00_tools/grammar", False), ("generate", "05_generation/generate", False),                 # A column, a command
    ("pack", "03_architecture/fused_attention", False), ("Linear", "03_architecture/layers_torch", False), ("count()", "00_tools/x", False), ("_answers", "grade", False)])
def test_a_name_leads_to_another_page_only_if_it_is_that_of_the_other_page(tmp_path, name, to, kept):
    code = "from lmcourse.generation.sampling import sample\nfrom lmcourse.scaling.study import collect as pool\nfrom torch.nn import Linear\nform = 1"
    path = notebook(tmp_path, new_md(text := f"As [`{name}`](https://me.io/c/{to}.html#{name.removesuffix('()')}) says."), new_code("def pack(): return generate.count"),
                    new_code("def count(): pass"))
    source = notebook(tmp_path, new_code(code), *nbformat.read(path, 4).cells, name="source.ipynb")      # A hidden cell is not in the processed notebook
    for _ in range(2): enrich(path, None, source)
    assert nbformat.read(path, 4).cells[0].source == (text if kept else f"As `{name}` says.")


def test_a_text_of_a_picture_has_no_bare_percent_sign():
    assert spoken("share (% of FLOPs) of `x`, 5%, 7 %") == "share (percent of FLOPs) of x, 5 percent, 7 percent"


def test_facts_count_words_lines_and_cells_that_are_skipped(tmp_path):
    path = notebook(tmp_path, new_md("# T\n" + "word "*399 + "\n```sh\nmake docs\n```"), new_code("#| default_exp accounting.memory"),
                    new_code("#| slow\n" + "x = 1\n"*20), new_code("#| cuda\ny"), new_code("#| slow\nz"))
    cells = json.loads(path.read_text())["cells"]
    assert reading_time(cells)[1:] == (400, 22)
    line = facts(tmp_path, path.name, {"02h_memory": dict(seconds=12.4, memory_mb=910, machine="2 cores")}, "https://github.com/me/repo", "main")
    assert "4 min to read (400 words, 22 lines of code) · 12 s and 0.9 GB to run on 2 cores · 2 cells slow, skipped unless asked for · 1 cell for a GPU" in line
    for url in ("/blob/main/lmcourse/accounting/memory.py", "https://colab.research.google.com/github/me/repo/blob/main/"): assert url in line
    assert "to run" not in facts(tmp_path, path.name, {}, "https://github.com/me/repo", "main")


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


def test_a_page_keeps_a_place_for_its_pictures(tmp_path):
    "In their proportions, so that the text does not jump when they load"
    svg = base64.b64encode(b'<svg width="460pt" viewBox="0 0 460.8 230.4">').decode()
    body, _, _ = finish(f'<img src="data:image/png;base64,{PIXEL}"><img src="data:image/svg+xml;base64,{svg}" width="640"><img src="data:image/svg+xml;base64,PHN2Zy8+">',
                        "a.html", "https://x", tmp_path)
    assert [(i.get("width"), i.get("height")) for i in BeautifulSoup(body, "html.parser").find_all("img")] == [("1", "1"), ("640", "320"), (None, None)]


def test_a_wide_picture_scrolls_on_a_phone(tmp_path):
    for width, wide in ((1300, False), (1301, True)):
        data = base64.b64encode(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + width.to_bytes(4, "big") + (100).to_bytes(4, "big")).decode()
        body, _, _ = finish(f'<img src="data:image/png;base64,{data}">', "a.html", "https://x", tmp_path)
        assert ('class="wide"' in body) == wide and f'width="{width}"' in body


def test_the_checks_under_proof_are_folded_up_to_the_box():
    ours = """<div class="cell"><h2>Idea</h2></div><div class="cell">A</div><div class="cell"><h2>Proof</h2><p>Edges.</p></div>
<div class="cell">B</div><div class="cell">C</div><div class="cell"><blockquote>Takeaway</blockquote></div>"""
    theirs = '<section id="proof"><h2>Proof</h2><p>Edges.</p><div class="cell">B</div><div class="cell">C</div><blockquote>Takeaway</blockquote></section>'
    for text in (ours, theirs):
        soup = BeautifulSoup(text, "html.parser")
        fold_proof(soup)
        (fold,) = soup.find_all("details")
        assert [c.get_text() for c in fold.find_all(class_="cell")] == ["B", "C"] and not fold.find(["h2", "p"])
        assert soup.get_text(" ").split()[-8:] == ["Proof", "Edges.", "Show", "the", "checks", "B", "C", "Takeaway"]
    plain = BeautifulSoup('<div class="cell"><h2>Proof</h2></div><div class="cell"><blockquote>T</blockquote></div>', "html.parser")
    fold_proof(plain)
    assert not plain.find("details")


def test_the_output_of_an_answer_is_folded_with_its_code(tmp_path):
    shown = nbformat.v4.new_output("execute_result", data={"text/plain": "31742"})
    cells = [new_code(f"#| code-fold: true\n#| code-summary: {s}\nx", outputs=[shown]) for s in ("Answer", "A wrong answer that the grader names")]
    ours, _, _ = finish(html(load(notebook(tmp_path, *cells))[0]), "a.html", "https://me.io/c", tmp_path)
    theirs = '<div class="cell"><details class="code-fold"><summary>Answer</summary><div>x</div></details><div class="cell-output">31742</div></div>'
    theirs += theirs.replace("Answer", "A wrong answer")
    soup = BeautifulSoup(theirs, "html.parser")
    fold_answers(soup)
    for page in (BeautifulSoup(ours, "html.parser"), soup):
        answer, wrong = page.find_all("details")
        assert "31742" in answer.get_text() and "31742" not in wrong.get_text() and page.get_text().count("31742") == 2


def test_a_picture_that_says_what_it_shows_keeps_its_text(tmp_path):
    said, _, _ = finish('<div><img alt="A wave; n 2" src="data:image/svg+xml;base64,PHN2Zy8+"></div>', "a.html", "https://me.io/c", tmp_path)
    assert 'alt="A wave; n 2"' in said


def test_a_line_of_code_fits_wherever_the_contents_stand_beside_it():
    css = (ROOT/"tools/docs/site.css").read_text(encoding="utf-8")
    narrow = int(re.search(r"@media \(max-width: (\d+)px\) \{ \.layout \{ grid-template-columns: [^}]*\} \.toc \{ display: none", css)[1])
    side, toc, gap, around, font = (float(re.search(p, css)[1]) for p in (
        r"grid-template-columns: ([\d.]+)rem", r"56rem\) ([\d.]+)rem", r"gap: ([\d.]+)rem; justify", r"justify-content: center; padding: 0 ([\d.]+)rem", r"pre \{ font-size: ([\d.]+)rem"))
    room = (narrow + 1)/16 - side - toc - 2*gap - 2*around - 2         # rem, without the box's own padding
    assert room/(font*0.602) >= 100                                      # a character of DejaVu Sans Mono is 0.602 wide


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


def test_an_old_address_leads_to_the_new_one(tmp_path):
    (tmp_path / "01_one").mkdir()
    (tmp_path / "01_one/a.html").write_text("a")
    write_redirects(tmp_path, "https://me.io/c", {"a.html": "01_one/a.html", "01_one/b.html": "01_one/a.html"})
    text = (tmp_path / "a.html").read_text()
    for part in ('canonical" href="https://me.io/c/01_one/a.html"', '"01_one/a.html" + location.search + location.hash', 'url=01_one/a.html"', '<a href="01_one/a.html">'):
        assert part in text
    assert '<a href="../01_one/a.html">' in (tmp_path / "01_one/b.html").read_text() and not list(dead_links(tmp_path))
    with pytest.raises(SystemExit, match="a.html is a page of today"): write_redirects(tmp_path, "", {"a.html": "01_one/a.html"})
    with pytest.raises(SystemExit, match="c.html leads to d.html, which is no page"): write_redirects(tmp_path, "", {"c.html": "d.html"})


def test_every_page_that_moved_is_found_from_its_old_address():
    "The first edition had its pages at the top; whoever linked to them finds them still."
    pages = {_nbpath2html(path).as_posix() for path in page_files(ROOT / "nbs").values()}
    moved = read_redirects()
    assert set(moved.values()) <= pages and not moved.keys() & pages
    assert len(moved) >= 66


def test_an_address_that_leads_nowhere_leads_home(tmp_path):
    write_404(tmp_path, "https://me.io/c", "T")
    assert '<a href="https://me.io/c/index.html">' in (tmp_path / "404.html").read_text()        # Whole: the page is shown at any depth


# What Quarto has rendered

RENDERED = '''<html><head>
<link rel="canonical" href="https://me.io/c/01_one/a.html">
<script src="https://cdnjs.cloudflare.com/ajax/libs/require.js/2.3.6/require.min.js" integrity="sha512-x" crossorigin="anonymous"></script>
<script src="https://cdnjs.cloudflare.com/ajax/libs/jquery/3.5.1/jquery.min.js" data-relocate-top="true"></script>
<script type="application/javascript">define('jquery', [],function() {return window.jQuery;})</script>
<script src="../site_libs/quarto.js"></script>
<script src="https://cdn.jsdelivr.net/npm/katex@latest/dist/katex.min.js"></script>
<link rel="stylesheet" href="https://cdn.jsdelivr.net/npm/katex@latest/dist/katex.min.css" />
</head><body><main class="content"><header id="title-block-header"><h1 class="title">Page A</h1></header>
<p>Before <span class="math inline">\\(x\\)</span>.</p>
<section id="norm" class="level2"><h2>norm</h2><p>Prose.</p><div class="sourceCode"><pre><code>hidden = 1</code></pre></div>
<div class="cell-output"><table><tr><td>hidden</td></tr></table></div>
<p><a href="https://me.io/c/01_one/a.html#norm">self</a> <a href="https://me.io/c/">home</a> <a href="https://me.io/course">other</a> <a href="#norm.open">method</a></p></section>
</main></body></html>'''


def test_a_quarto_page_asks_no_other_host_and_links_within_the_site(tmp_path, monkeypatch):
    monkeypatch.setattr(quarto, "vendor_katex", lambda out: "site_libs/katex")
    for name in ("01_one/a.html", "index.html", "site_libs/quarto.js", "site_libs/katex/katex.min.js", "site_libs/katex/katex.min.css"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(RENDERED if name == "01_one/a.html" else "<main><h1>Home</h1></main>")
    (tmp_path / "search.json").write_text('[{"objectID": "01_one/a.html", "href": "01_one/a.html", "crumbs": ["01 One"]}, {"href": "01_one/a.html#norm"}]')
    (tmp_path / "01_one/b.html").write_text('<a href="gone.html">')
    assert quarto.finish_site(tmp_path, "https://me.io/c") == ["01_one/b.html: gone.html"]
    text = (tmp_path / "01_one/a.html").read_text()
    assert re.findall(r'(?:href|src)="([^"]*)"', text) == [
        "https://me.io/c/01_one/a.html", "../site_libs/quarto.js", "../site_libs/katex/katex.min.js", "../site_libs/katex/katex.min.css",
        "../01_one/a.html#norm", "../index.html", "https://me.io/course", "#norm"]
    assert "jquery" not in text
    assert json.loads((tmp_path / "search.json").read_text()) == [
        dict(objectID="01_one/a.html", href="01_one/a.html", title="Page A", section="", text="Before x.", crumbs=["01 One"]),
        dict(objectID="01_one/a.html#norm", href="01_one/a.html#norm", title="Page A", section="norm", text="Prose. self home other method", crumbs=["01 One"])]


def test_the_version_of_quarto_is_the_same_wherever_it_is_named():
    flow = yaml.safe_load((ROOT / ".github/workflows/docs.yml").read_text(encoding="utf-8"))
    uses = [s for job in flow["jobs"].values() for s in job["steps"] if "quarto-actions" in s.get("uses", "")]
    assert uses and all(s["with"]["version"] == quarto.VERSION for s in uses)
    assert re.search(r"Quarto ([\d.]+),", (ROOT / "Makefile").read_text(encoding="utf-8"))[1] == quarto.VERSION


def test_what_is_published_is_what_is_checked():
    flow = yaml.safe_load((ROOT / ".github/workflows/docs.yml").read_text(encoding="utf-8"))
    build = [s.get("run", s.get("uses", "")) for s in flow["jobs"]["build"]["steps"]]
    assert not any("quarto" in s for s in build) and not flow["concurrency"]["cancel-in-progress"]
    assert [i for i, s in enumerate(build) if s == "make docs"][0] < [i for i, s in enumerate(build) if "check_site.py" in s][0] < [
        i for i, s in enumerate(build) if "upload-pages" in s][0]


def test_quarto_finds_the_source_and_loads_no_fonts():
    site = yaml.safe_load((ROOT / "_quarto.yml").read_text(encoding="utf-8"))
    assert site["website"]["repo-subdir"] == "nbs"
    for themes in site["format"]["html"]["theme"].values():
        assert "$web-font-path: false;" in (ROOT / "nbs" / themes[1]).read_text(encoding="utf-8")


def test_nbdev_leaves_the_readme_alone(tmp_path, monkeypatch):
    from nbdev.quarto import nbdev_readme
    shutil.copy(ROOT / "settings.ini", tmp_path)
    (tmp_path / "nbs").mkdir()
    (tmp_path / "README.md").write_text("ours")
    (tmp_path / "nbs/index.ipynb").write_text((ROOT / "nbs/index.ipynb").read_text(encoding="utf-8"))          # Newer, as in a clone
    monkeypatch.chdir(tmp_path)
    nbdev_readme.__wrapped__(chk_time=True)
    assert (tmp_path / "README.md").read_text() == "ours" and not (tmp_path / "_proc").exists()


def test_llms_txt_lists_every_page():
    class cfg: title, description, doc_host, doc_baseurl = "t", "d", "https://me.io", "/c"
    text = llms(cfg, [("", ["index.ipynb"], []), ("01 One", [], ["01a_bpe.ipynb"])], {"index.ipynb": "index.html", "01a_bpe.ipynb": "bpe.html"}, {"index.ipynb": {}, "01a_bpe.ipynb": dict(title="BPE", description="Merges.")})
    assert text.startswith("# t\n\n> d\n") and "## 01 One\n\n- [BPE](https://me.io/c/bpe.html.md): Merges.\n" in text


def test_a_time_is_noted_and_those_of_lost_notebooks_go(tmp_path):
    for name in ("index.ipynb", "results/times.json", "01_one/a.ipynb", "01_one/b.ipynb"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"gone": {}, "b": {}}')
    times = tmp_path / "results/times.json"
    note_time(tmp_path / "01_one/a.ipynb", 1.26, times)
    runs = json.loads(times.read_text())
    assert runs.pop("b") == {}
    assert runs.keys() == {"a"} and runs["a"]["seconds"] == 1.3 and 10 < runs["a"]["memory_mb"] < 1e6 and " of " in runs["a"]["machine"]


def test_times_are_of_notebooks_that_exist():
    times = ROOT / "nbs/results/times.json"
    if not times.exists(): pytest.skip("no times have been measured")
    for name, run in json.loads(times.read_text(encoding="utf-8")).items():
        assert name in page_files(ROOT / "nbs"), f"{times.name} has {name}: python tools/run_nbs.py --times"
        assert run.keys() == {"seconds", "memory_mb", "machine"}
