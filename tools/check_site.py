"""Look at every page of the site in a browser, and use it as a reader would. Usage: tools/check_site.py [_docs] [page ...]

On each page: errors in the console, failed requests, weight, headings, texts of links and pictures, contrast of all text on the
light and on the dark page, and a telephone's screen: nothing to scroll sideways, nothing too small to tap. Then a walk: menu, search,
a folded answer, the tokens of a text, the theme, a copy button, the next page. The site may be either builder's: Quarto's, whose search
reads a file that only a server hands out, is served on this machine. Needs Playwright and a Chromium; without them it says so.
"""
import argparse, functools, http.server, multiprocessing, os, shutil, sys, threading, time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

AUDIT = (Path(__file__).parent / "docs/audit.js").read_text(encoding="utf-8")
FLAGS = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update --disable-sync".split()
WIDE, PHONE = dict(width=1280, height=900), dict(width=360, height=740)
MOST_BYTES, CDN = 1_000_000, "https://cdn.jsdelivr.net/npm/katex@"     # Formulas come from there where the site was built without npm
HOST = "http://localhost:"                                              # Of a site that is served
PATIENCE = 30_000                                                       # Milliseconds until a part of a page counts as missing


def chromium(playwright):
    "The path of a Chromium or Chrome on this machine, or None."
    named = [shutil.which(n) for n in ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")]
    mac = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"
    return next((p for p in ["/usr/bin/chromium", *named, mac, playwright.chromium.executable_path] if p and os.path.exists(p)), None)


# What each builder calls the parts that a reader uses
OWN = dict(links=".sidebar a", next="a.next", prev="a.prev", theme="#lm-theme", area=".input_area", copy=".copy", title="main h1")
QUARTO = dict(links="#quarto-sidebar a.sidebar-link", next=".nav-page-next a", prev=".nav-page-previous a", theme=".quarto-color-scheme-toggle",
              area="div.sourceCode", copy=".code-copy-button", title="main h1.title")


class Site:
    "A built site: where its files lie, at what address the browser finds them, and what its parts are called."
    def __init__(self, root, address=None):
        self.root, self.address = root, address or root.as_uri()
        self.quarto = (root / "site_libs/quarto-nav").exists()
        self.parts = QUARTO if self.quarto else OWN

    def at(self, path): return f"{self.address}/{path}"

    def find(self, name):
        "The address of the page called `name`, in the folder of its chapter. (At the top may be a page that leads there.)"
        return self.at(max(self.root.rglob(name), key=lambda path: len(path.parts)).relative_to(self.root).as_posix())


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args): pass


def serve(root):
    "Hand out the files of `root` on a free port of this machine; the server, whose `shutdown` ends it."
    server = http.server.ThreadingHTTPServer(("localhost", 0), functools.partial(Quiet, directory=root))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def listen(page, faults):
    "Have what goes wrong on `page` noted in `faults`. Nothing but files is loaded, and what this machine serves."
    def refuse(route):
        if not route.request.url.startswith(CDN): faults.append(f"asks the network for {route.request.url}")
        route.abort()
    page.route(lambda url: not url.startswith(("file:", "data:", HOST)), refuse)
    page.on("console", lambda m: (m.type == "error" or m.text.startswith("LaTeX")) and not m.location["url"].startswith("https")
            and faults.append(f"console: {m.text}"))
    page.on("pageerror", lambda e: faults.append(f"error in a script: {e}"))
    page.on("requestfailed", lambda r: r.url.startswith(("file:", HOST)) and "ABORTED" not in (r.failure or "") and faults.append(f"can't load {r.url.rpartition('/')[2]}"))


def look(page, path, faults, address=None):
    "Open the page at `path`, which the browser finds at `address`, and add what is wrong with it to `faults`."
    if (size := path.stat().st_size) > MOST_BYTES: faults.append(f"{size:,} bytes of HTML, at most {MOST_BYTES:,}")
    page.set_viewport_size(WIDE)
    page.emulate_media(color_scheme="light")
    page.goto(address or path.as_uri(), wait_until="load")
    page.evaluate("for (const d of document.querySelectorAll('details')) d.open = true")
    faults += page.evaluate(AUDIT, dict(structure=True, contrast=True))
    page.emulate_media(color_scheme="dark")
    faults += [f"dark: {f}" for f in page.evaluate(AUDIT, dict(contrast=True))]
    page.set_viewport_size(PHONE)
    faults += [f"on a phone: {f}" for f in page.evaluate(AUDIT, dict(phone=True))]


# The walk

def moved(path):
    "Whether the page at `path` only leads to another one."
    return 'http-equiv="refresh"' in path.read_text(encoding="utf-8")[:1000]


def an_old_address(page, site):
    page.goto(site.at("memory.html#floats"))
    now = site.find("memory.html")
    assert now != site.at("memory.html"), "the page has never moved"
    page.wait_for_url(now + "#floats")


def menu_and_turning(page, site):
    page.goto(site.at("index.html"))
    link, head = page.locator(site.parts["links"]).nth(1), page.locator(site.parts["title"])
    title = link.inner_text()
    link.click()
    assert head.inner_text() == title, f"the sidebar's {title!r} leads to {head.inner_text()!r}"
    page.locator(site.parts["next"]).click()
    assert head.inner_text() != title
    if not site.quarto: assert page.locator(".sidebar details[open] a[aria-current]").count() == page.locator(".sidebar details[open]").count() == 1
    page.locator(site.parts["prev"]).click()
    assert head.inner_text() == title, "forward and back is another page"


def searching(page, site, query="rmsnorm_forward"):
    if site.quarto: return searching_in_quarto(page, site, query)
    page.goto(site.at("index.html"))
    assert not page.evaluate("'searchIndex' in window"), "the index is loaded before it is asked for"
    page.keyboard.press("/")
    page.keyboard.type(query)
    page.locator("#lm-search li a").first.wait_for()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_url(lambda url: url.endswith("#" + query))
    top = page.evaluate("document.getElementById(decodeURIComponent(location.hash.slice(1))).getBoundingClientRect().top")
    assert 0 <= top < WIDE["height"], f"the section that was found is {top:.0f} pixels from the top"
    page.keyboard.press("Control+k")
    page.locator("#lm-search input").fill("qqxzjv")
    page.wait_for_function("document.querySelector('#lm-search [role=status]').textContent == '0 places'")
    page.locator("#lm-search input").fill("learning rate")
    page.locator("#lm-search li mark").first.wait_for()
    page.keyboard.press("Escape")
    assert not page.locator("#lm-search").is_visible()


def searching_in_quarto(page, site, query):
    page.goto(site.at("index.html"))
    page.keyboard.press("/")
    page.locator("input.aa-Input").fill(query)
    page.locator(".aa-Item a").first.click()
    page.wait_for_url(lambda url: url.endswith("#" + query))


def a_folded_answer(page, site):
    page.goto(site.find("architecture.html"))
    fold = page.locator("details", has=page.locator("summary", has_text="Answer")).first
    assert not fold.locator("pre").first.is_visible(), "an answer stands open"
    fold.locator("summary").click()
    assert fold.locator("pre").first.is_visible(), "an answer does not open"


def the_tokens_of_a_text(page, site):
    page.goto(site.find("explorer.html"))
    token = page.locator(".lm-text .lm-token", has=page.locator(".lm-info")).first
    assert not token.locator(".lm-info").is_visible()
    token.hover()
    assert token.locator(".lm-info").is_visible(), "pointing at a token shows nothing"
    page.mouse.move(0, 0)
    token.focus()
    assert token.locator(".lm-info").is_visible(), "a token that has the focus shows nothing"


def a_slider(page, site):
    page.goto(site.find("show.html"))
    sliders = page.locator(".lm-sliders").first
    sliders.locator("input").first.focus()                              # Pictures out of sight aren't loaded yet
    before = sliders.locator("img:visible").get_attribute("alt")
    page.keyboard.press("ArrowRight")
    assert sliders.locator("img:visible").get_attribute("alt") != before, "a slider changes nothing"


def the_theme(page, site):
    colour = "getComputedStyle(document.body).backgroundColor"
    page.emulate_media(color_scheme="light")
    page.goto(site.at("index.html"))
    before = page.evaluate(colour)
    page.locator(site.parts["theme"]).first.click()
    after = page.evaluate(colour)
    assert after != before, "the theme's button does nothing"
    page.goto(site.find("memory.html"))
    try: page.wait_for_function(f"{colour} === {after!r}", timeout=5000)      # The page may be shown before its script has run
    except Exception as e: raise AssertionError("the next page forgets the theme") from e
    page.locator(site.parts["theme"]).first.click()
    assert page.evaluate(colour) == before, "the theme does not come back"


def a_copy_button(page, site):
    page.goto(site.find("memory.html"))
    area = page.locator(f"{site.parts['area']}:visible").first       # Imports are folded
    area.hover()
    area.locator(site.parts["copy"]).click()
    assert page.evaluate("navigator.clipboard.readText()") == area.locator("pre").inner_text().rstrip(), "what is copied is not what stands there"


def the_menu_of_a_phone_without_scripts(page, site):
    if site.quarto: return                                              # Its menu is a script
    page = page.context.browser.new_page(java_script_enabled=False, viewport=PHONE)
    page.set_default_timeout(PATIENCE)
    page.goto(site.find("memory.html"))
    assert not page.locator("#lm-find").is_visible() and not page.locator(".sidebar").is_visible()
    page.mouse.wheel(0, 3000)
    page.locator("label.menu").click()
    page.locator(".sidebar summary").first.click()
    page.locator(".sidebar details a").first.click()
    assert "memory.html" not in page.url
    page.close()


WALK = (menu_and_turning, searching, a_folded_answer, the_tokens_of_a_text, a_slider, the_theme, a_copy_button, the_menu_of_a_phone_without_scripts)
WALK += (an_old_address,)


def check(path, site, names, steps):
    "All faults of these pages and steps, each with its name, and the version of the Chromium at `path`, a new one."
    from playwright.sync_api import sync_playwright
    found = []
    def new_page(context):
        page, faults = context.new_page(), []
        page.set_default_timeout(PATIENCE)
        page.set_viewport_size(WIDE)
        listen(page, faults)
        return page, faults
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=path, args=FLAGS)
        context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
        page, faults = new_page(context)                                # One for all, since each costs a process
        for name in names:
            look(page, site.root / name, faults, site.at(name))
            found += [f"{name}: {f}" for f in faults]
            faults.clear()
        for step in steps:
            page, faults = new_page(context)                            # Without what the one before it has set
            try: step(page, site)
            except Exception as e: faults.append(f"{type(e).__name__}: {str(e).strip().partition(chr(10))[0]}")
            page.close()
            found += [f"{step.__name__.replace('_', ' ')}: {f}" for f in faults]
        version = browser.version
        browser.close()
    return found, version


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", nargs="?", type=Path, default=Path(__file__).resolve().parent.parent / "_docs")
    parser.add_argument("pages", nargs="*", help="only these, without the walk")
    args = parser.parse_args()
    try: from playwright.sync_api import sync_playwright
    except ImportError: return print("skipped: Playwright is not installed")
    if not ((site := args.site.resolve()) / "index.html").exists(): sys.exit(f"no site in {site}: build it first")
    with sync_playwright() as p: path = chromium(p)
    if not path: return print("skipped: there is no Chromium on this machine")
    start, n = time.time(), min(os.cpu_count() or 1, 4)                 # A browser each: one uses little more than a core
    pages, steps = args.pages or sorted(f.relative_to(site).as_posix() for f in site.rglob("*.html") if not moved(f)), () if args.pages else WALK
    server = serve(site) if Site(site).quarto else None
    site = Site(site, server and f"{HOST}{server.server_address[1]}")
    with ProcessPoolExecutor(n, multiprocessing.get_context("spawn")) as pool:
        parts = list(pool.map(check, [path]*n, [site]*n, [pages[i::n] for i in range(n)], [steps[i::n] for i in range(n)]))
    if server: server.shutdown()
    print(f"{len(pages)} pages in Chromium {parts[0][1]}, {time.time() - start:.0f} s")
    if found := sorted(fault for part, _ in parts for fault in part): sys.exit(f"{len(found)} faults:\n  " + "\n  ".join(found))


if __name__ == "__main__": main()
