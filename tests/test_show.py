"Tables, plots and progress: what is shown is what was given, and nothing else is changed."
import contextlib
import io
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from bs4 import BeautifulSoup
from hypothesis import given, settings, strategies as st

from lmcourse.tools.show import COLORS, GREY, Table, duration, escape_markdown, figure, progress, si, text_plot

CELL = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(st.characters(codec="utf-8", exclude_categories=("C",)), max_size=12))


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.lists(st.fixed_dictionaries({"a": CELL, "b|<i>": CELL}), min_size=1, max_size=4))
def test_any_table_renders_whole_in_all_three_forms(rows):
    table = Table(rows)
    soup = BeautifulSoup(table._repr_html_(), "html.parser")
    assert [[td.text for td in tr.find_all("td")] for tr in soup.tbody.find_all("tr")] == [[re.sub("`([^`]+)`", r"\1", c) for c in row] for row in table.cells]
    assert [th.text for th in soup.find_all("th")] == table.headings
    lines = table._repr_markdown_().split("\n")
    assert len(lines) == len(rows) + 2
    assert all(len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) == 3 for line in lines)
    assert all(len(line) <= 100 for line in repr(table).split("\n") if line.isascii())


def test_code_in_a_cell_stays_code_in_markdown():
    assert Table([{"a": "`x|y_z` and a|b_c ` <t>"}])._repr_markdown_().split("\n")[2] == r"| `x\|y_z` and a\|b\_c \` \<t> |"


def test_what_markdown_would_change_stays_as_it_is():
    text = "x~1~, ~~y~~, 2^n^, R&amp;D"
    assert Table([{"a": text}])._repr_markdown_().split("\n")[2] == r"| x\~1\~, \~\~y\~\~, 2\^n\^, R\&amp;D |"
    assert escape_markdown(f"{text} `a|b~c`") == r"x\~1\~, \~\~y\~\~, 2\^n\^, R\&amp;D `a|b~c`"


def test_a_heading_is_written_in_words():
    "A name of Python's with spaces, anything else as it is"
    table = Table([{"loss_after_step": 1, "_a": 2, "top_k 6": 3, "`log_prob`": 4, "x_1": 5}], units=dict(loss_after_step="nats"))
    assert table.headings == ["loss after step (nats)", "_a", "top_k 6", "`log_prob`", "x 1"] and "loss_after_step" in table.columns


def test_code_in_a_cell_is_code():
    assert "><code>f(&lt;a&gt;)</code> of `x</td>" in Table([{"a": "`f(<a>)` of `x"}])._repr_html_()


@settings(deadline=None, derandomize=True, max_examples=200)
@given(st.floats(1e-12, 1e25))
def test_si_keeps_three_digits(v):
    number, _, prefix = si(v, "B").rpartition("B")[0].partition(" ")
    power = "pnµm kMGTPEZY".index(prefix or " ") - 4
    assert math.isclose(float(number)*1000.0**power, v, rel_tol=0.0051) and 1 <= float(number) < 1000


@settings(deadline=None, derandomize=True, max_examples=200)
@given(st.floats(0.001, 1e8))
def test_duration_says_about_the_same_and_never_60_of_anything(s):
    size = {"ms": 1e-3, "s": 1, "min": 60, "h": 3600, "d": 86400}
    parts = [(float(n.replace(",", "")), u) for n, u in re.findall(r"([\d.,]+) (\w+)", duration(s))]
    assert math.isclose(sum(n*size[u] for n, u in parts), s, rel_tol=0.021)   # half an hour of a day
    assert 1 <= len(parts) <= 2 and all(n < {"ms": 1000, "s": 60, "min": 60, "h": 24, "d": 1e9}[u] for n, u in parts)


def test_duration_rounds_before_it_splits():
    assert [duration(s) for s in (59.96, 125.6, 3599.7, 86399, 0)] == ["1 min", "2 min 6 s", "1 h", "1 d", "0 s"]


def test_numbers_in_a_column():
    def column(*values): return [r[0] for r in Table([dict(v=v) for v in values]).cells]
    assert column(1.529, 1.35, 2.0) == ["1.529", "1.350", "2.000"]                 # typed: as typed, same decimals
    assert column(0.1 + 0.2, 1/3) == ["0.3000", "0.3333"]                          # computed: four digits
    assert column(1234567, None, -5) == ["1,234,567", "–", "-5"]                   # whole numbers are exact
    assert column(1e-6, 0.5, 12345.678) == ["1e-6", "0.5", "12,346"]               # too far apart to share decimals
    assert column(True, False, None) == ["yes", "no", "–"]
    assert column(math.nan, math.inf, 0.0) == ["nan", "inf", "0"]
    assert column(1.5, 1e9, math.nan)[2] == "nan"               # Where the others are far apart
    assert column(0.0, 7e-234, 1/3) == ["0.0000", "7e-234", "0.3333"]              # what is tiny leaves the others alone


def test_alignment_and_wrapping():
    t = Table([dict(name="x", n=1, note="word "*40), dict(name="日本", n=1000, note="")], units={"n": "s"})
    lines = t.__repr__().split("\n")
    assert max(map(len, lines)) <= 100 and t.right == [False, True, False] and t.headings == ["name", "n (s)", "note"]
    assert sum(line.count("word") for line in lines) == 40
    assert lines[2].index("    1  word") and lines[-1].startswith("日本  1,000")        # wide characters take two columns
    assert str(Table([])) == "(no rows)" and "<table" in Table([])._repr_html_()


def test_bad_tables():
    with pytest.raises(TypeError, match="list"): Table([[1, 2]])
    with pytest.raises(ValueError, match="speed"): Table([dict(a=1)], units=dict(speed="m/s"))


def test_rows_may_come_from_a_generator():
    assert str(Table(dict(a=i) for i in range(3))) == str(Table([dict(a=i) for i in range(3)]))


def test_figure_changes_no_setting_and_is_grey_all_over():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    before = dict(matplotlib.rcParams)
    fig, axes = figure(3)
    for ax in axes[:2]:
        ax.plot([1, 10], [1e7, 2e7], label="a")
        ax.set(xlabel="x", ylabel="y", xscale="log", title="t")
        ax.legend(); ax.text(2, 1.5e7, "here"); ax.axhline(1e7, label="floor")
    twin = axes[0].twinx()
    twin.set(ylabel="right")
    assert twin.plot([1, 10], [3, 4])[0].get_color() == COLORS[0]
    image = axes[2].imshow([[1, 2]])
    fig.colorbar(image).set_label("weight")
    assert dict(matplotlib.rcParams) == before
    fig.canvas.draw()
    texts = [t for t in fig.findobj(matplotlib.text.Text) if t.get_text()]
    assert len(texts) > 20 and {matplotlib.colors.to_hex(t.get_color()) for t in texts} == {GREY}
    assert axes[1].lines[0].get_color() == COLORS[0] and {t.get_size() for ax in (*axes[:2], twin) for t in ax.get_yticklabels()} == {9}
    pixels = io.BytesIO()
    fig.savefig(pixels, format="png")
    pixels.seek(0)
    assert plt.imread(pixels)[0, 0, 3] == 0                                        # the corner is transparent
    plt.close(fig)
    fig, ax = figure()
    assert ax.get_xlabel() == ""                                                   # one plot: no array
    plt.close(fig)


def test_text_plot_has_its_size_and_marks_every_end():
    plot = text_plot({"up": ([0, 1], [0, 1]), "down": ([0, 1], [1, 0])}, width=20, height=5, xlabel="x", ylabel="y")
    lines = plot.split("\n")
    assert len(lines) == 8 and lines[0].strip() == "y" and lines[1].startswith("1 ┤") and lines[5].startswith("0 ┤") and "x" in lines[-1]
    assert lines[1].endswith("up") and lines[5].endswith("down")
    dots = [line[3:23].ljust(20) for line in lines[1:6]]
    assert all("⠀" < dots[r][c] for r, c in ((0, 0), (0, 19), (4, 0), (4, 19), (2, 10)))   # four corners and the middle
    assert dots[0][5:15].strip() == "" and dots[2][:5].strip() == ""
    assert text_plot({"a": ([1], [2])}) and text_plot({"a": ([1, 2], [math.nan]*2)}) == "(nothing to plot)"
    assert text_plot({"a": ([0, 3], [0, 3])}, width=2, height=1).startswith(f"3 ┤{chr(0x2800 + 64 + 32)}{chr(0x2800 + 2 + 8)} a")  # dots 7 6, then 2 4
    many = text_plot({f"s{i}": ([0, 1], [i, i]) for i in range(9)}, height=3)              # more names than rows
    assert len(many.split("\n")) == 5
    with pytest.raises(ValueError, match="shape"): text_plot({"a": ([1, 2], [1])})


class Terminal(io.StringIO):
    def isatty(self): return True


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()], ids=["file", "terminal"])
def test_progress_speaks_only_to_a_terminal(stream):
    with contextlib.redirect_stderr(stream):
        assert list(progress(range(3), desc="steps")) == [0, 1, 2]
        bar = progress(total=5, unit="B")
        bar.update(5); bar.set_postfix_str("loss 1.2"); bar.close()
    assert bool(stream.getvalue()) == ("steps: 100%" in stream.getvalue()) == stream.isatty()


def test_import_is_light():
    code = "import sys, lmcourse.tools.show; print([m for m in ('matplotlib', 'tqdm', 'torch', 'pandas') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parent.parent)
    assert out.stdout.strip() == "[]"


def test_words_of_the_first_column_are_broken_last():
    name, words = "compute_naive_policy_gradient_loss", "it is minus the advantage times the log-probability, for each token"
    table = Table([dict(exercise=f"14.{name}", state="open", define=f"{name}: (rewards, log_probs) gives a tensor", right_if=words)])
    lines = str(table).splitlines()
    assert max(map(len, lines)) <= 100 and any(f"14.{name}" in line for line in lines) and "advantage" in str(table)


def test_control_characters_are_written_and_not_obeyed():
    table = Table([{"a\tb": "x\x1b[31m\r\ny\x07", "n": 1}])
    assert repr(table).split("\n")[::2] == [r"a\tb               n", r"x\x1b[31m\r y\x07  1"]
    for text in (str(table), table._repr_html_(), table._repr_markdown_()): assert not re.search("[\\x00-\\x09\\x0b-\\x1f\\x7f]", text)
