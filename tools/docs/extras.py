"What stands beside the pages: the search index, and the pages as markdown with a list of them (llms.txt)."
import json, re, sys
from pathlib import Path

from nbdev.doclinks import _nbpath2html


def search_index(pages):
    "The script that the search reads: pages (address, title, sections), sections (id, heading, text)."
    return f"window.searchIndex = {json.dumps(pages, ensure_ascii=False, separators=(',', ':'))}\n"


def markdown(text, base):
    "A page's markdown with its links leading to the other pages' markdown."
    text = re.sub(rf"\]\({re.escape(base)}/([\w./-]+\.html)(?:#[^)]*)?\)", r"](\1.md)", text)
    return re.sub(r"\]\((?!\w+:)([^)#\s]+\.ipynb)(?:#[^)]*)?\)", lambda m: f"]({_nbpath2html(Path(m[1])).as_posix()}.md)", text)


def read_redirects(path=Path(__file__).parent / "redirects.txt"):
    "Where pages were, and where they are now: a line each in redirects.txt."
    return dict(line.split() for line in path.read_text(encoding="utf-8").splitlines())


def write_redirects(out, base, moved):
    "At each old address a small page that leads to the new one. The script goes first, since it keeps what stands behind `#`."
    for old, new in moved.items():
        if (out / old).exists(): sys.exit(f"redirects.txt: {old} is a page of today")
        if not (out / new).exists(): sys.exit(f"redirects.txt: {old} leads to {new}, which is no page")
        to = "../" * old.count("/") + new
        (out / old).write_text(f'''<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Moved</title>
<link rel="canonical" href="{base}/{new}">
<script>location.replace("{to}" + location.search + location.hash)</script>
<meta http-equiv="refresh" content="0; url={to}">
</head><body><p>This page has moved to <a href="{to}">{new}</a>.</p></body></html>
''', encoding="utf-8")


def write_404(out, base, title):
    "The page for an address that leads nowhere. It is shown at any address, so its links are whole; the shelf of pages is one click away."
    (out / "404.html").write_text(f'''<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>There is no such page – {title}</title>
<meta name="description" content="This address leads to no page of {title}."><meta name="color-scheme" content="light dark">
<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">
<style>body {{ max-width: 36rem; margin: 4rem auto; padding: 0 1rem; font: 17px/1.6 system-ui, sans-serif }} a {{ color: light-dark(#1f5fa8, #7db4f0) }}</style>
</head><body><h1>There is no such page</h1>
<p>The address may be mistyped, or the page has moved. <a href="{base}/index.html">The first page of {title}</a> has the list of chapters and the search.</p>
</body></html>
''', encoding="utf-8")


def llms(cfg, nav, pages, fronts):
    "llms.txt: what the site is, and each page with its sentence and the address of its markdown."
    lines = [f"# {cfg.title}", "", f"> {cfg.description}", "",
             "Each page is a notebook, given here as markdown with its code and printed outputs. Numbered notebooks export the library of the same name."]
    for section, main, more in nav:
        lines += ["", f"## {section or 'Start'}", ""]
        lines += [f"- [{fronts[n].get('title', n)}]({cfg.doc_host}{cfg.doc_baseurl}/{pages[n]}.md): {fronts[n].get('description', '')}" for n in main + more]
    return "\n".join(lines) + "\n"
