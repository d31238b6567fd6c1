"What is read of a notebook, how its headings are addressed, and that a dead link is found."
import json
from pathlib import Path

import pytest

from lmcourse.tools.pages import check_links, page_anchors, page_text

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "nbs").glob("*.ipynb"))


def write(path, *cells):
    path.write_text(json.dumps(dict(cells=[dict(cell_type=kind, source=source.splitlines(keepends=True)) for kind, source in cells])), encoding="utf-8")
    return path


def test_text_is_markdown_without_code(tmp_path):
    page = write(tmp_path / "a.ipynb", ("markdown", "# A\n\n```sh\n# no heading\n```\nafter"), ("code", "# code\n1"), ("raw", "raw"), ("markdown", "Ω `x`"))
    assert page_text(page) == "# A\n\n\nafter\n\nΩ `x`" == page_text(str(page))
    assert page_anchors(page) == {"a"}


@pytest.mark.parametrize("content", ["", "[]", "{}", '"text"', '{"cells": 3}', "null"])
def test_what_is_no_notebook_is_refused(tmp_path, content):
    path = tmp_path / "a.ipynb"
    path.write_text(content)
    with pytest.raises(ValueError, match="a.ipynb: not a notebook"): page_text(path)
    with pytest.raises(FileNotFoundError): page_text(tmp_path / "b.ipynb")


@pytest.mark.parametrize("heading, anchor", [
    ("Windows that start anywhere", "windows-that-start-anywhere"), ("2ND and 6ND", "nd-and-6nd"), ("When must `reshape` copy?", "when-must-reshape-copy"),
    ("Speed, and the hours for 825 GB", "speed-and-the-hours-for-825-gb"), ("64 bytes at once", "bytes-at-once"), ("What it can't know", "what-it-cant-know"),
    ("A.b_c-d", "a.b_c-d"), ("123", "section"), ("Größe", "größe"), ("Own {#mine}", "mine"), ("K–N", "kn")])
def test_anchors(tmp_path, heading, anchor):
    assert page_anchors(write(tmp_path / "a.ipynb", ("markdown", f"## {heading}"))) == {anchor}


def test_equal_headings_are_told_apart(tmp_path):
    assert page_anchors(write(tmp_path / "a.ipynb", ("markdown", "## Same\n\n### Same\n\n## Same"))) == {"same", "same-1", "same-2"}


def test_links(tmp_path):
    write(tmp_path / "a.ipynb", ("markdown", "# One\n\n## Two words"))
    assert check_links("[x](a.ipynb), [y](a.ipynb#two-words) [z](https://example.org/b.ipynb) [w](a.csv)", tmp_path) == 2 and check_links("", tmp_path) == 0
    with pytest.raises(AssertionError, match="no page b.ipynb"): check_links("[x](b.ipynb)", tmp_path)
    with pytest.raises(AssertionError, match="no heading two in a.ipynb"): check_links("[x](a.ipynb#two)", tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_every_link_of_every_page_leads_somewhere(page): check_links(page_text(page), page.parent)
