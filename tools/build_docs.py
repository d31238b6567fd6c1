"""Build the site without Quarto: nbdev's own processing, then nbconvert and one page template.

`nbdev_docs` needs Quarto; this gives the same pages, addresses and anchors from the same notebooks where there is none.
Usage: python tools/build_docs.py [--out _docs] [--force] [--readme]
"""
import argparse, base64, os, re, shutil, subprocess, sys, tempfile
from pathlib import Path

import nbformat, yaml
from bs4 import BeautifulSoup
from fastcore.basics import num_cpus
from jinja2 import Environment, FileSystemLoader
from nbconvert import HTMLExporter, MarkdownExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer
from nbdev.config import get_config
from nbdev.doclinks import _build_modidx, _nbpath2html
from nbdev.quarto import refresh_quarto_yml
from nbdev.serve import proc_nbs

HERE, KATEX = Path(__file__).parent / "docs", "0.19.1"
# Formulas get delimiters that no prose has: with bare dollars, two amounts of money would make a formula.
IPythonRenderer.inline_math = lambda self, body: rf"<span>\({self.escape_html(body)}\)</span>"
IPythonRenderer.block_math = lambda self, body: rf"<span>\[{self.escape_html(body)}\]</span>"


def sidebar(cfg, found):
    "Sections [(title, [notebook, ...])] from _quarto.yml, which must name every notebook and no other."
    items = yaml.safe_load((cfg.config_path / "_quarto.yml").read_text(encoding="utf-8"))["website"]["sidebar"]["contents"]
    nav = [("", [o]) if isinstance(o, str) else (o["section"], o["contents"] or []) for o in items]
    if odd := {n for _, s in nav for n in s} ^ set(found): sys.exit(f"in only one of _quarto.yml and nbs: {', '.join(sorted(odd))}")
    return nav


def anchor(text):
    "The id that Pandoc (so Quarto, so nbdev's links) gives a heading."
    return re.sub(r"^[^a-z]+", "", re.sub(r"[^\w\-. ]", "", text.lower()).strip().replace(" ", "-")) or "section"


def md(text):
    "Quarto's markdown that nbconvert does not know, as HTML: callouts, footnotes, heading ids and attributes of links."
    def callout(m):
        kind, attrs, body = m[1], m[2], m[3].strip()
        title = re.match(r"#+\s+(.*)\n?", body)
        tag, head = ("details", "summary") if "collapse" in attrs else ("div", "p")
        return (f'<{tag} class="callout {kind}"><{head} class="callout-title">{title[1] if title else kind.title()}'
                f'</{head}>\n\n{body[title.end():] if title else body}\n\n</{tag}>')
    text = re.sub(r"^:::+ *\{\.callout-(\w+)([^}]*)\}\n(.*?)^:::+ *$", callout, text, flags=re.S | re.M)
    text = re.sub(r"^\[\^(\w+)\]: (.*)$", r'<div class="footnote" id="fn\1">\n\n<sup>\1</sup> \2\n\n</div>', text, flags=re.M)
    text = re.sub(r"\[\^(\w+)\]", r'<sup><a href="#fn\1">\1</a></sup>', text)
    text = re.sub(r"^(#+ .*?) *\{#([\w-]+)\}$", r'\1 <span data-id="\2"></span>', text, flags=re.M)
    return re.sub(r"(\]\([^)]*\))\{[^}\n]*\}", r"\1", text)


def options(cell):
    "Take the leading `#| key: value` lines off a code cell."
    lines, opts = cell.source.splitlines(), {}
    while lines and (m := re.match(r"#\|\s*([\w-]+)\s*:?\s*(.*)", lines[0])):
        opts[m[1]] = yaml.safe_load(m[2]) if m[2] else True
        lines.pop(0)
    cell.source = "\n".join(lines).strip("\n")
    return opts


def code_cell(c):
    "Apply a code cell's options; whether anything of it is shown."
    o = options(c)
    if o.get("output") is False: c.outputs = []
    if o.get("warning") is False: c.outputs = [x for x in c.outputs if x.get("name") != "stderr"]
    for out in c.outputs:
        if out.output_type == "stream" and o.get("output") == "asis":
            out.update(output_type="display_data", data={"text/markdown": out.pop("text")}, metadata={})
        if "text/markdown" in out.get("data", {}): out.data["text/markdown"] = md(out.data["text/markdown"])
    if o.get("echo") is False or not c.source: c.metadata["transient"] = {"remove_source": True}
    if o.get("code-fold"): c.metadata["fold"] = [o["code-fold"] == "show", o.get("code-summary", "Code")]
    c.metadata["caption"] = o.get("fig-cap", "")
    return o.get("include") is not False and (c.source or c.outputs)


def load(path):
    "The notebook at `path` made ready for nbconvert, and its front matter."
    nb, front = nbformat.v4.reads(path.read_text(encoding="utf-8")), {}
    for i, c in enumerate(nb.cells):
        c.id = c.get("id") or f"c{i}"
        if c.cell_type == "raw" and c.source.startswith("---"): front = next(yaml.safe_load_all(c.source))
        if c.cell_type == "markdown": c.source = md(c.source)
    nb.cells = [c for c in nb.cells if c.cell_type == "markdown" or c.cell_type == "code" and code_cell(c)]
    nb.metadata["language_info"] = {"name": "python"}
    return nb, front


def finish(html, page, base, out):
    "Heading ids, relative links and plots as files: the page's HTML and its table of contents."
    soup, toc, seen, root = BeautifulSoup(html, "html.parser"), [], {}, "../" * page.count("/")
    for a in soup.find_all("a", href=True):
        url, _, frag = a["href"].partition("#")
        if a["href"].startswith(base): a["href"] = root + a["href"].removeprefix(base).lstrip("/")
        elif url.endswith(".ipynb") and "://" not in url: a["href"] = str(_nbpath2html(Path(url))) + ("#" + frag if frag else "")
        if a.get_text() == "source" and "/blob/" in a["href"]: a["class"] = "source"
    for h in soup.find_all(re.compile("^h[1-6]$")):
        mark, text = h.find("span", attrs={"data-id": True}), h.get_text().strip()
        key = mark["data-id"] if mark else anchor(text)
        n = seen[key] = seen.get(key, -1) + 1
        h["id"] = f"{key}-{n}" if n else key
        if h.name in ("h2", "h3"): toc.append((h["id"], text, h.name))
        h.append(soup.new_tag("a", attrs={"class": "anchor", "href": f"#{h['id']}", "aria-label": "Link to this section"}, string="#"))
    for fold in soup.find_all("details", class_="code-fold"):    # the source that follows says all that nbdev's signature says
        for cell in fold.find_parent(class_="cell").find_previous_siblings(class_="cell"):
            if not (name := cell.select_one(".output_markdown a.source ~ h3, .output_markdown p:has(a.source) ~ h3")): break
            if re.search(rf"(def|class) {name.get_text().rstrip('#').split('.')[-1]}\b", fold.get_text()):
                for tag in cell.select(".output_markdown > .highlight, .output_markdown > p:not(:has(a.source))"): tag.decompose()
    for i, img in enumerate(soup.find_all("img", src=re.compile("^data:image/png;base64,"))):
        name = out / page.replace(".html", f"_files/figure-{i}.png")
        name.parent.mkdir(parents=True, exist_ok=True)
        name.write_bytes(base64.b64decode(img["src"].partition(",")[2]))
        caption = img.find_next("p", class_="figcaption")
        img["src"], img["alt"] = f"{name.parent.name}/{name.name}", caption.get_text() if caption else "Plot of the cell above"
    return str(soup), toc


def dead_links(out):
    "Links within the site that lead nowhere. A method that has no heading of its own is linked to its class."
    soups = {p.relative_to(out): BeautifulSoup(p.read_text(encoding="utf-8"), "html.parser") for p in out.rglob("*.html")}
    ids = {page: {tag["id"] for tag in soup.find_all(id=True)} for page, soup in soups.items()}
    for page, soup in soups.items():
        for tag, key in [(a, "href") for a in soup.find_all(["a", "link"], href=True)] + [(i, "src") for i in soup.find_all(src=True)]:
            url, _, frag = tag[key].partition("#")
            if re.match(r"\w+:", url): continue
            to = Path(os.path.normpath(page.parent / url)) if url else page
            if frag not in ids.get(to, {frag}) and "." in frag: frag = frag.partition(".")[0]; tag[key] = f"{url}#{frag}"
            if not (out / to).exists() or frag and frag not in ids.get(to, {frag}): yield f"{page}: {tag[key]}"
        (out / page).write_text(str(soup), encoding="utf-8")


def vendor_katex(out):
    "Copy KaTeX (from npm) into the site, so that formulas need no network; its address."
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / f"lmcourse/katex-{KATEX}"
    if not cache.exists() and shutil.which("npm"):
        with tempfile.TemporaryDirectory() as tmp:
            subprocess.run(["npm", "pack", "--silent", f"katex@{KATEX}"], cwd=tmp, stdout=subprocess.DEVNULL, timeout=60)
            for tgz in Path(tmp).glob("*.tgz"): shutil.unpack_archive(tgz, tmp); shutil.copytree(f"{tmp}/package/dist", cache)
    if not cache.exists(): return f"https://cdn.jsdelivr.net/npm/katex@{KATEX}/dist"
    for f in (f for pat in ("katex.min.*", "contrib/auto-render.min.js", "fonts/*.woff2") for f in cache.glob(pat)):
        to = out / "site_libs/katex" / f.relative_to(cache)
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(f, to)
    return "site_libs/katex"


def readme(nb, front, base, cfg, pages):
    "README.md from the first page. Its links lead to the notebooks, so that they work wherever the repository is read."
    if any("image/png" in o.get("data", {}) for c in nb.cells for o in c.get("outputs", [])): sys.exit("README: put the plot into a file of nbs")
    text = MarkdownExporter().from_notebook_node(nb)[0]
    for name, page in pages.items(): text = text.replace(f"]({base}/{page}", f"](nbs/{name}")
    text = re.sub(r"\]\((nbs/[^)#]+\.ipynb)#[^)]*\)", r"](\1)", text)
    text = re.sub(r"\]\((?!\w+:|#|nbs/)", "](nbs/", text)
    text = f"# {front['title']}\n\n> {front.get('description', '')}\n\n" + re.sub(r"\n{3,}", "\n\n", text.strip()) + "\n"
    (cfg.config_path / "README.md").write_text(text, encoding="utf-8")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, help="folder of the site, replaced as a whole (default: _docs)")
    p.add_argument("--force", action="store_true", help="process every notebook anew")
    p.add_argument("--readme", action="store_true", help="write README.md from nbs/index.ipynb, and no site")
    args, cfg = p.parse_args(), get_config()
    if bad := [d for d in cfg.config_path.parts if d.startswith(".") or d in ("_docs", "_proc", "_site")]:
        sys.exit(f"nbdev skips every notebook below a folder with a name like {bad[0]}: build the site elsewhere")
    refresh_quarto_yml(); _build_modidx()
    proc, base = proc_nbs(force=args.force, n_workers=num_cpus()), str(cfg.doc_host) + str(cfg.doc_baseurl)
    found = [f.relative_to(proc) for f in sorted(proc.rglob("*.ipynb"))]
    nbs = {f.as_posix(): load(proc / f) for f in found if (cfg.nbs_path / f).exists()}
    pages = {n: _nbpath2html(Path(n)).as_posix() for n in nbs}
    if args.readme: return readme(*nbs[cfg.readme_nb], base, cfg, pages)
    nav, out = sidebar(cfg, nbs), (args.out or cfg.doc_path).absolute()
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(proc, out, ignore=shutil.ignore_patterns("*.ipynb", "*.yml", "styles.css", ".*"))
    katex, order = vendor_katex(out), [n for _, items in nav for n in items]
    export = HTMLExporter(template_name="lmcourse", extra_template_basedirs=[str(HERE)], exclude_anchor_links=True,
                          exclude_input_prompt=True, exclude_output_prompt=True)
    page = Environment(loader=FileSystemLoader(HERE), autoescape=True).get_template("page.html.j2")
    for n, before, after in zip(order, [None] + order, order[1:] + [None]):
        (out / pages[n]).parent.mkdir(parents=True, exist_ok=True)
        body, toc = finish(export.from_notebook_node(nbs[n][0])[0], pages[n], base, out)
        (out / pages[n]).write_text(page.render(
            cfg=cfg.d, front=nbs[n][1], body=body, toc=toc, here=n, nav=nav, pages=pages, katex=katex, prev=before, next=after,
            titles={k: front.get("title", k) for k, (_, front) in nbs.items()}, root="../" * pages[n].count("/"),
            source=f"{cfg.git_url}/blob/{cfg.branch}/{cfg.nbs_path.name}/{n}"), encoding="utf-8")
    shutil.copy(HERE / "site.css", out)
    (out / ".nojekyll").touch()                       # GitHub Pages then serves the files as they are
    if bad := list(dead_links(out)): sys.exit("links that lead nowhere:\n  " + "\n  ".join(bad))
    print(f"{len(order)} pages in {out}")


if __name__ == "__main__": main()
