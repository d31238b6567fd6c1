"What the pages have measured, the file of all ratios, and what the first page and README say about speed are the same."
import re
from pathlib import Path

import pytest

from lmcourse.app.benchmarks import claims_table, comparison_table, page_rows, read_rows
from lmcourse.tools.files import read_json
from lmcourse.tools.pages import page_files

ROOT = Path(__file__).parents[2]
NBS, FILE = ROOT/"nbs", ROOT/"nbs/results/benchmarks.jsonl"
AGAIN = ("""bring it up to date: python -c "from lmcourse.app.benchmarks import update_rows; update_rows('nbs', 'nbs/results/benchmarks.jsonl')" """
         "and python tools/run_nbs.py nbs/90_app/90h_benchmarks.ipynb")


def outputs(page, kind):
    "All saved outputs of a page of one kind, as one text"
    cells = read_json(NBS/page_files(NBS)[page])["cells"]
    found = [o.get("data", {}).get(kind) or (o.get("text") if kind == "text/plain" else None) for c in cells for o in c.get("outputs", [])]
    return "\n".join("".join(text) for text in found if text)


def test_the_file_has_what_the_pages_have_measured():
    rows = read_rows(FILE)
    measured = [row for path in page_files(NBS).values() for row in page_rows(NBS/path)]
    assert len(measured) > 50, "the pages' outputs can't be read any more"
    assert not [row for row in measured if row not in rows], AGAIN
    fresh = {(row["page"], row["machine"]) for row in measured}
    assert not [row for row in rows if (row["page"], row["machine"]) in fresh and row not in measured], AGAIN


def test_the_page_shows_the_file():
    shown, rows = outputs("90h_benchmarks", "text/markdown"), read_rows(FILE)
    for page in {row["page"] for row in rows if row["ratio"] is not None}:
        assert comparison_table(rows, page, NBS/"90_app") in shown, f"{page}: {AGAIN}"
    assert claims_table(rows, NBS/"90_app") in shown, AGAIN


def test_a_table_has_a_column_for_each_machine_and_says_what_did_not_hold():
    of = dict(page="90a_bench", least=1, date=None)
    rows = [of | dict(machine="A", what="x, against y", ratio=2., held=True), of | dict(machine="B", what="x, against y", ratio=.5, held=False, date="2026-11-25"),
            of | dict(machine="B", what="z", ratio=None, least=None, held=False), of | dict(machine="B", what="a_b", ratio=None, least=None, held=True)]
    title, _, head, _, line = comparison_table(rows, "90a_bench", NBS).splitlines()
    assert title == "[Benchmark: tokenizers](90_app/90a_bench.ipynb)" and line == "| x, against y | 1 | 2 | 0.5, did not hold |"
    assert head.endswith("| A<br>no date | B<br>2026\N{NON-BREAKING HYPHEN}11\N{NON-BREAKING HYPHEN}25 |")
    assert claims_table(rows, NBS).splitlines()[2:] == [f"| B | 2 | 1 | “z” ({title}) |"]


@pytest.mark.parametrize("where", ["README.md", "index.ipynb"])
def test_speeds_on_the_first_page_are_those_of_the_file(where):
    text = (ROOT/where).read_text(encoding="utf-8") if where == "README.md" else outputs("index", "text/markdown")
    shown = {name: (train, encode) for name, train, encode in re.findall(r"^\| (\w+) \| ([\d.,–]+) \| ([\d.,–]+) \|$", text, flags=re.M)}
    rows = [row for row in read_rows(FILE) if row["page"] == "90a_bench"]
    machine = next(row["machine"] for row in page_rows(NBS/page_files(NBS)["90a_bench"]))
    of = {row["what"]: row for row in rows if row["machine"] == machine}
    expected = {"lmcourse": (of["web: training, against rustbpe"]["ours"], of["web: encoding, documents, batch, against tiktoken"]["ours"])}
    for name in ("tiktoken", "tokenizers", "rustbpe"):
        expected[name] = tuple(of.get(f"web: {task}, against {name}", {}).get("theirs") for task in ("training", "encoding, documents, batch"))
    said = {name: tuple("–" if value is None else f"{value:.3g}" for value in values) for name, values in expected.items()}
    assert shown == said, f"{where} must say what {FILE.name} says"
