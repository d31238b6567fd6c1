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
    ("<p>Text", "<script>console.warn('LaTeX-incompatible input')</script><p>Text", "console: LaTeX"),
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
    for name in ("index", "memory", "architecture", "explorer", "show"): (tmp_path / f"{name}.html").write_text(GOOD, encoding="utf-8")
    for step in check_site.WALK:
        page = browser.new_page()
        page.set_default_timeout(check_site.PATIENCE)
        with pytest.raises((AssertionError, playwright.Error)): step(page, check_site.Site(tmp_path))
        page.close()


# Quarto's pages

# What Bootstrap and its themes say of the parts that go wrong, and a page built as Quarto builds it
BOOTSTRAP = """[hidden] { display: none !important } pre { overflow: visible } img { vertical-align: middle } code { color: #7d12ba; background: #f8f9fa; white-space: pre }
.navbar { background: #2780e3 } .navbar-title { color: #fdfefe } .figure-caption { color: #9a9da0 } .blockquote { color: #999b9e } .breadcrumb-item { color: #aaa }
body { margin: 0; font: 16px sans-serif; --bs-body-color: light-dark(#373a3c, #fff); color: var(--bs-body-color) } .katex-display { display: block; white-space: nowrap } a { color: light-dark(#1f5fa8, #7db4f0) }"""
QUARTO = f"""<!doctype html><html lang="en"><head><title>T</title><meta name="description" content="D."><meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,"><style>{BOOTSTRAP}</style><style>STYLES</style></head>
<body><div class="navbar"><span class="navbar-brand navbar-title">Site</span></div><nav class="quarto-page-breadcrumbs"><li class="breadcrumb-item">01 One</li></nav>
<main class="content"><h1 class="title">One</h1><p>The name <a href="#"><code>x</code></a> of <code>one_very_long_name.of_another_very_long_name.and_a_third_one</code></p>
<span class="math display"><span class="katex-display">{"a + " * 99}</span></span><pre class="sourceCode"><code>{"x = 1; " * 40}</code></pre>
<table><tr>{"<td>wide_without_a_break</td>" * 9}</tr></table><div class="cell-output cell-output-display"><table><tr>{"<td>wide_without_a_break</td>" * 9}</tr></table></div>
<figure class="figure"><img alt="A red dot" width="900" height="9" src="data:image/gif;base64,R0lGODlhAQABAAAAACw="><figcaption class="figure-caption">A caption</figcaption></figure>
<blockquote class="blockquote"><p>What to keep.</p></blockquote></main></body></html>"""


def test_styles_mend_what_bootstrap_does_to_a_page(browser, tmp_path):
    styles = (Path(check_site.__file__).parents[1] / "nbs/styles.css").read_text(encoding="utf-8")
    assert faults(browser, QUARTO.replace("STYLES", styles), tmp_path / "a.html") == []
    found = "\n".join(faults(browser, QUARTO.replace("STYLES", ""), tmp_path / "a.html"))
    for words in ("on a phone", "<code>", '"Site"', '"A caption"', '"What to keep."', '"01 One"', "dark: "): assert words in found


def test_a_token_says_what_it_is_below_bootstrap(browser, tmp_path):
    from lmcourse.tokenization.explorer import explore
    from lmcourse.tokenization.tokenizer import Tokenizer
    picture = explore(Tokenizer.train(["a text, and another text"] * 9, 266, []), "a text")._repr_html_()
    (tmp_path / "explorer.html").write_text(QUARTO.replace("STYLES", "").replace("<main", picture + "<main"), encoding="utf-8")
    page = browser.new_page()
    check_site.the_tokens_of_a_text(page, check_site.Site(tmp_path))
    page.close()


def test_a_site_of_quarto_is_known_and_served(browser, tmp_path):
    (tmp_path / "site_libs/quarto-nav").mkdir(parents=True)
    (tmp_path / "01_one").mkdir()
    (tmp_path / "01_one/memory.html").write_text("<h1>Moved</h1>")
    (tmp_path / "memory.html").write_text('<script>location.replace("01_one/memory.html" + location.hash)</script>')
    server = check_site.serve(tmp_path)
    site, page, found = check_site.Site(tmp_path, f"{check_site.HOST}{server.server_address[1]}"), browser.new_page(), []
    check_site.listen(page, found)
    check_site.an_old_address(page, site)
    assert site.quarto and page.locator("h1").inner_text() == "Moved" and found == ["console: Failed to load resource: the server responded with a status of 404 (File not found)"] * len(found)
    page.close()
    server.shutdown()
