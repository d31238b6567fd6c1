"What the pages have measured, the file of all ratios, and what the first page and README say about speed are the same."
import re
from pathlib import Path

import pytest

from lmcourse.app.benchmarks import machine_table, page_rows, read_rows
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
    for machine in {row["machine"] for row in rows}:
        assert machine_table(rows, machine, NBS/"90_app") in shown, f"{machine}: {AGAIN}"


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
