"What is read of a notebook, how its headings are addressed, and that a dead link is found."
import json
from pathlib import Path

import pytest

from lmcourse.tools.pages import check_links, page_anchors, page_files, page_text

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "nbs" / path for path in page_files(ROOT / "nbs").values()]


def write(path, *cells):
    path.write_text(json.dumps(dict(cells=[dict(cell_type=kind, source=source.splitlines(keepends=True)) for kind, source in cells])), encoding="utf-8")
    return path


def test_pages_are_found_from_any_folder_of_the_course(tmp_path):
    for name in ("index", "02_two/02a_b", "01_one/01b_a", "01_one/01a_z", "01_one/.ipynb_checkpoints/01a_z", "_own/c"):
        (path := tmp_path / f"{name}.ipynb").parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert list(page_files(tmp_path)) == ["01a_z", "01b_a", "02a_b", "index"] and page_files(tmp_path)["01a_z"] == Path("01_one/01a_z.ipynb")
    assert page_files(tmp_path / "01_one") == dict(zip(("01a_z", "01b_a", "02a_b", "index"), map(Path, (
        "01a_z.ipynb", "01b_a.ipynb", "../02_two/02a_b.ipynb", "../index.ipynb"))))
    (tmp_path / "index.ipynb").unlink()
    with pytest.raises(FileNotFoundError, match="01_one: expected a folder of the course"): page_files(tmp_path / "01_one")


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
