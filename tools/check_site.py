"""Look at every page of the site in a browser, and use it as a reader would. Usage: tools/check_site.py [_docs] [page ...]

On each page: errors in the console, failed requests, weight, headings, texts of links and pictures, contrast of all text on the
light and on the dark page, and a telephone's screen: nothing to scroll sideways, nothing too small to tap. Then a walk: menu, search,
a folded answer, the tokens of a text, the theme, a copy button, the next page. Needs Playwright and a Chromium; without them it says so.
"""
import argparse, multiprocessing, os, shutil, sys, time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

AUDIT = (Path(__file__).parent / "docs/audit.js").read_text(encoding="utf-8")
FLAGS = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update --disable-sync".split()
WIDE, PHONE = dict(width=1280, height=900), dict(width=360, height=740)
MOST_BYTES, CDN = 1_000_000, "https://cdn.jsdelivr.net/npm/katex@"     # Formulas come from there where the site was built without npm
PATIENCE = 30_000                                                       # Milliseconds until a part of a page counts as missing


def chromium(playwright):
    "The path of a Chromium or Chrome on this machine, or None."
    named = [shutil.which(n) for n in ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")]
    mac = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"
    return next((p for p in ["/usr/bin/chromium", *named, mac, playwright.chromium.executable_path] if p and os.path.exists(p)), None)


def listen(page, faults):
    "Have what goes wrong on `page` noted in `faults`. Nothing but files is loaded."
    def refuse(route):
        if not route.request.url.startswith(CDN): faults.append(f"asks the network for {route.request.url}")
        route.abort()
    page.route(lambda url: not url.startswith(("file:", "data:")), refuse)
    page.on("console", lambda m: m.type == "error" and not m.location["url"].startswith("http") and faults.append(f"console: {m.text}"))
    page.on("pageerror", lambda e: faults.append(f"error in a script: {e}"))
    page.on("requestfailed", lambda r: r.url.startswith("file:") and "ABORTED" not in (r.failure or "") and faults.append(f"can't load {r.url.rpartition('/')[2]}"))


def look(page, path, faults):
    "Open the page at `path` and add what is wrong with it to `faults`."
    if (size := path.stat().st_size) > MOST_BYTES: faults.append(f"{size:,} bytes of HTML, at most {MOST_BYTES:,}")
    page.set_viewport_size(WIDE)
    page.emulate_media(color_scheme="light")
    page.goto(path.as_uri(), wait_until="load")
    page.evaluate("for (const d of document.querySelectorAll('details')) d.open = true")
    faults += page.evaluate(AUDIT, dict(structure=True, contrast=True))
    page.emulate_media(color_scheme="dark")
    faults += [f"dark: {f}" for f in page.evaluate(AUDIT, dict(contrast=True))]
    page.set_viewport_size(PHONE)
    faults += [f"on a phone: {f}" for f in page.evaluate(AUDIT, dict(phone=True))]


# The walk

def menu_and_turning(page, site):
    page.goto((site / "index.html").as_uri())
    link = page.locator(".sidebar a").nth(3)
    title = link.inner_text()
    link.click()
    assert page.locator("h1").inner_text() == title, f"the sidebar's {title!r} leads to {page.locator('h1').inner_text()!r}"
    page.locator("a.next").click()
    assert page.locator("h1").inner_text() != title
    page.locator("a.prev").click()
    assert page.locator("h1").inner_text() == title, "forward and back is another page"


def searching(page, site, query="rmsnorm_forward"):
    page.goto((site / "index.html").as_uri())
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


def a_folded_answer(page, site):
    page.goto((site / "architecture.html").as_uri())
    fold = page.locator("details", has=page.locator("summary", has_text="Answer")).first
    assert not fold.locator("pre").first.is_visible(), "an answer stands open"
    fold.locator("summary").click()
    assert fold.locator("pre").first.is_visible(), "an answer does not open"


def the_tokens_of_a_text(page, site):
    page.goto((site / "explorer.html").as_uri())
    token = page.locator(".lm-text .lm-token", has=page.locator(".lm-info")).first
    assert not token.locator(".lm-info").is_visible()
    token.hover()
    assert token.locator(".lm-info").is_visible(), "pointing at a token shows nothing"
    page.mouse.move(0, 0)
    token.focus()
    assert token.locator(".lm-info").is_visible(), "a token that has the focus shows nothing"


def the_theme(page, site):
    colour = "getComputedStyle(document.body).backgroundColor"
    page.emulate_media(color_scheme="light")
    page.goto((site / "index.html").as_uri())
    before = page.evaluate(colour)
    page.locator("#lm-theme").click()
    after = page.evaluate(colour)
    assert after != before, "the theme's button does nothing"
    page.goto((site / "memory.html").as_uri())
    assert page.evaluate(colour) == after, "the next page forgets the theme"
    page.locator("#lm-theme").click()
    assert page.evaluate(colour) == before, "the theme does not come back"


def a_copy_button(page, site):
    page.goto((site / "memory.html").as_uri())
    area = page.locator(".input_area").first
    area.hover()
    area.locator(".copy").click()
    assert page.evaluate("navigator.clipboard.readText()") == area.locator("pre").inner_text().rstrip(), "what is copied is not what stands there"


def the_menu_of_a_phone_without_scripts(page, site):
    page = page.context.browser.new_page(java_script_enabled=False, viewport=PHONE)
    page.set_default_timeout(PATIENCE)
    page.goto((site / "memory.html").as_uri())
    assert not page.locator("#lm-find").is_visible() and not page.locator(".sidebar").is_visible()
    page.mouse.wheel(0, 3000)
    page.locator("label.menu").click()
    page.locator(".sidebar a").nth(2).click()
    assert "memory.html" not in page.url
    page.close()


WALK = (menu_and_turning, searching, a_folded_answer, the_tokens_of_a_text, the_theme, a_copy_button, the_menu_of_a_phone_without_scripts)


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
            look(page, site / name, faults)
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
    pages, steps = args.pages or sorted(f.relative_to(site).as_posix() for f in site.rglob("*.html")), () if args.pages else WALK
    with ProcessPoolExecutor(n, multiprocessing.get_context("spawn")) as pool:
        parts = list(pool.map(check, [path]*n, [site]*n, [pages[i::n] for i in range(n)], [steps[i::n] for i in range(n)]))
    print(f"{len(pages)} pages in Chromium {parts[0][1]}, {time.time() - start:.0f} s")
    if found := sorted(fault for part, _ in parts for fault in part): sys.exit(f"{len(found)} faults:\n  " + "\n  ".join(found))


if __name__ == "__main__": main()
