"The check of the site in a browser finds each fault that it looks for, and none on a page without."
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
playwright = pytest.importorskip("playwright.sync_api")
import check_site

GOOD = '''<!doctype html><html lang="en"><head><title>T</title><meta name="description" content="D."><meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,"><style>body { font-size: 16px; overflow-wrap: anywhere } button, summary { min-height: 30px; min-width: 30px }</style></head>
<body><h1>One</h1><p>Text with <a style="color: light-dark(#00e, #9af)" href="#a">a link</a>.</p><h2 id="a">Two</h2><img alt="A red dot" src="data:image/gif;base64,R0lGODlhAQABAAAAACw=">
<details><summary>More of it to read</summary><p>Hidden text</p></details><button>Press</button></body></html>'''

FAULTS = [ # (what is replaced, by what, what is said)
    (' lang="en"', "", "no lang"),
    ("<title>T</title>", "", "no title"),
    ('content="D."', 'content=""', "no description"),
    ("<h1>One</h1>", "", "0 headings of the first level"),
    ("h2", "h3", '<h3> "Two" follows an h1'),
    ('alt="A red dot"', 'alt=""', 'alt text ""'),
    ('alt="A red dot"', 'alt="figure-0.png"', "says nothing"),
    ("a link</a>", "</a>", "a link without text to #a"),
    ("Press", "", "a button without a name"),
    ("<button>", '<input type="text"><button>', "an input without a label (text)"),
    ("<h1>", '<h1 id="a">', "the id a stands twice"),
    ("<p>Text", '<p style="color: #888">Text', "contrast 3.54"),
    ("<p>Text", '<p style="opacity: .5">Text', "contrast"),
    ("<p>Hidden", '<p style="color: #999; background: #fff">Hidden', 'contrast 2.85 (153,153,153,1 on 255,255,255) in <p> "Hidden text"'),
    ("<p>Text", '<p style="color: #000">Text', "dark: contrast"),
    ("<p>Text", '<p style="color: light-dark(#000, #444)">Text', "dark: contrast"),
    ("<p>Text", '<p style="width: 500px">Text', "on a phone: 148 pixels wider"),
    ("<button>", '<button style="min-height: 0; min-width: 0; padding: 0; border: 0; line-height: 1; font-size: 10px">', 'pixels to tap: <button> "Press"'),
    ("<p>Text", "<script>console.error('broken')</script><p>Text", "console: broken"),
    ("<p>Text", "<script>missing()</script><p>Text", "error in a script: missing is not defined"),
    ("<p>Text", '<script src="none.js"></script><p>Text', "can't load none.js"),
    ("<p>Text", '<script src="https://example.org/x.js"></script><p>Text', "asks the network for https://example.org/x.js"),
    ("<p>Text", f"<!--{'x'*1_000_000}--><p>Text", "bytes of HTML, at most 1,000,000"),
]


# First, because Playwright starts only once in a thread

def test_without_a_browser_it_says_so(monkeypatch, capsys, tmp_path):
    (tmp_path / "index.html").write_text(GOOD, encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["check_site.py", str(tmp_path)])
    monkeypatch.setattr(check_site, "chromium", lambda p: None)
    check_site.main()
    assert "skipped: there is no Chromium" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "playwright.sync_api", None)
    check_site.main()
    assert "skipped: Playwright is not installed" in capsys.readouterr().out


def test_without_a_site_it_fails(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["check_site.py", str(tmp_path)])
    with pytest.raises(SystemExit, match="build it first"): check_site.main()


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as p:
        if not (path := check_site.chromium(p)): pytest.skip("there is no Chromium on this machine")
        browser = p.chromium.launch(executable_path=path, args=check_site.FLAGS)
        yield browser
        browser.close()


def faults(browser, text, path):
    path.write_text(text, encoding="utf-8")
    page, found = browser.new_page(), []
    check_site.listen(page, found)
    check_site.look(page, path, found)
    page.close()
    return found


def test_a_good_page_has_no_faults(browser, tmp_path): assert faults(browser, GOOD, tmp_path / "a.html") == []


@pytest.mark.parametrize("old, new, words", FAULTS, ids=[words for _, _, words in FAULTS])
def test_a_planted_fault_is_named(browser, tmp_path, old, new, words):
    assert old in GOOD
    assert any(words in f for f in faults(browser, GOOD.replace(old, new), tmp_path / "a.html")), faults(browser, GOOD.replace(old, new), tmp_path / "a.html")


def test_each_step_of_the_walk_fails_on_a_page_that_lacks_its_part(browser, tmp_path, monkeypatch):
    monkeypatch.setattr(check_site, "PATIENCE", 300)
    for name in ("index", "memory", "architecture", "explorer"): (tmp_path / f"{name}.html").write_text(GOOD, encoding="utf-8")
    for step in check_site.WALK:
        page = browser.new_page()
        page.set_default_timeout(check_site.PATIENCE)
        with pytest.raises((AssertionError, playwright.Error)): step(page, tmp_path)
        page.close()
