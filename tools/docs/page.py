"A page's HTML after nbconvert: heading ids, links, plots as files, sections for the search; and the check of all links."
import base64, os, re, shutil, struct, subprocess, tempfile
from functools import cache
from pathlib import Path

from bs4 import BeautifulSoup, NavigableString
from nbconvert import HTMLExporter
from nbconvert.exporters.templateexporter import TemplateExporter
from nbconvert.filters import Highlight2HTML
from nbconvert.filters.markdown_mistune import IPythonRenderer
from nbdev.doclinks import _nbpath2html

from lmcourse.tools.pages import heading_anchor

HERE, KATEX = Path(__file__).parent, "0.19.1"
WIDE = 1300 # Pixels of a picture from which its words are too small on a phone, unless it scrolls
# Formulas get delimiters that no prose has: with bare dollars, two amounts of money would make a formula.
IPythonRenderer.inline_math = lambda self, body: rf"<span>\({self.escape_html(body)}\)</span>"
IPythonRenderer.block_math = lambda self, body: rf"<span>\[{self.escape_html(body)}\]</span>"


@cache
def exporter():
    "What makes HTML of cells, one for all pages of a process: its templates are compiled once."
    make = HTMLExporter(template_name="lmcourse", extra_template_basedirs=[str(HERE)], exclude_anchor_links=True,
                        exclude_input_prompt=True, exclude_output_prompt=True, filters={"clean_html": lambda text: text})
    make.register_filter("highlight_code", Highlight2HTML(pygments_lexer="python", parent=make))
    return make


def html(nb):
    "The cells of a notebook as HTML. What nbconvert does against hostile notebooks, and its second reading of the page, are left out: half of the time."
    return TemplateExporter.from_notebook_node(exporter(), nb)[0]


def finish(html, page, base, out):
    "Heading ids, relative links and plots as files: the page's HTML, its table of contents, its sections (id, heading, text)."
    soup, toc, seen, level = BeautifulSoup(html, "html.parser"), [], {}, 1
    root = "../" * page.count("/")
    for a in soup.find_all("a", href=True):
        url, _, frag = a["href"].partition("#")
        if a["href"].startswith(base): a["href"] = root + a["href"].removeprefix(base).lstrip("/")
        elif url.endswith(".ipynb") and "://" not in url: a["href"] = str(_nbpath2html(Path(url))) + ("#" + frag if frag else "")
        if a.get_text() == "source" and "/blob/" in a["href"]: a["class"] = "source"
    for h in soup.find_all(re.compile("^h[1-6]$")):
        mark, text = h.find("span", attrs={"data-id": True}), h.get_text().strip()
        key = mark["data-id"] if mark else heading_anchor(text)
        n = seen[key] = seen.get(key, -1) + 1
        h["id"] = f"{key}-{n}" if n else key
        if h.find_parent(class_="output_markdown") and h.find_previous("a", class_="source"): h["class"] = "name"
        level = min(int(h.name[1]), level + 1)                # nbdev's headings of names are h3, whatever stands above them
        h.name = f"h{level}"
        if h.name in ("h2", "h3"): toc.append((h["id"], text, h.name))
    found = sections(soup)
    fold_proof(soup)
    fold_answers(soup)
    for h in soup.find_all(id=True, name=re.compile("^h[1-6]$")):
        h.append(soup.new_tag("a", attrs={"class": "anchor", "href": f"#{h['id']}", "aria-label": f"Link to {h.get_text().strip()}"}, string="#"))
    for i, img in enumerate(soup.find_all("img", src=re.compile("^data:image/(png|svg)"))):
        kind = "png" if "png" in img["src"][:15] else "svg"
        name = out / page.replace(".html", f"_files/figure-{i}.{kind}")
        name.parent.mkdir(parents=True, exist_ok=True)
        name.write_bytes(data := base64.b64decode(img["src"].partition(",")[2]))
        img["src"], img["loading"] = f"{name.parent.name}/{name.name}", "lazy"
        if shape := picture_shape(data, kind):                # The page keeps the place free until the picture is there
            width = int(img.get("width", round(shape[0])))
            img["width"], img["height"] = width, round(width*shape[1]/shape[0])
            if kind == "png" and width > WIDE: img["class"] = "wide"
        img["alt"] = around["data-alt"] if (around := img.find_parent(attrs={"data-alt": True})) else img.get("alt", "")
    return str(soup), toc, found


def picture_shape(data, kind):
    "Width and height of a PNG or an SVG, or nothing."
    if kind == "png": return struct.unpack(">II", data[16:24])
    found = re.search(rb'viewBox="\S+ \S+ ([\d.]+) ([\d.]+)"', data)
    return found and tuple(map(float, found.groups()))


def fold_proof(soup):
    "Under a heading “Proof” the heading and its sentence stay open; the cells that check are folded, up to the next heading or box."
    for head in soup.find_all("h2"):
        if head.get_text().strip() != "Proof": continue
        cells = []
        for after in (head.find_parent(class_="cell") or head).find_next_siblings():
            if after.name in ("h2", "blockquote", "script", "footer") or after.find(["h2", "blockquote"]): break
            cells.append(after)
        while cells and "cell" not in cells[0].get("class", []): cells.pop(0)   # A sentence of Quarto's is no cell
        while cells and "cell" not in cells[-1].get("class", []): cells.pop()
        if not cells: continue
        fold, summary = soup.new_tag("details", attrs={"class": "proof"}), soup.new_tag("summary", string="Show the checks")
        cells[0].insert_before(fold)
        for part in (summary, *cells): fold.append(part)


def fold_answers(soup):
    "What an answer prints is what its task asks for: it is folded with the answer's code."
    def holds(part): return part.find("summary", string="Answer")
    for cell in soup.find_all(class_="cell"):
        if not (summary := holds(cell)): continue
        for part in cell.find_all(recursive=False):
            if not holds(part): summary.parent.append(part)


BLOCKS = {"p", "li", "td", "th", "tr", "div", "summary", "ul", "ol", "table", "details"}
UNSEARCHED = {"input", "output_text", "output_html", "output_png", "highlight", "source", "facts",      # Classes; code is not prose
              "sourceCode", "cell-output", "code-fold", "quarto-title-breadcrumbs", "nav-page"}              # and those of Quarto's pages


def sections(soup):
    "The page in sections for the search: [id, heading, text], the first one without a heading."
    found = [["", "", []]]
    def walk(tag):
        for o in tag.children:
            if type(o) is NavigableString: found[-1][2].append(o)
            elif re.match(r"h[1-6]$", getattr(o, "name", None) or ""):       # Quarto's ids are those of the sections around
                found.append([o.get("id") or getattr(o.find_parent("section", id=True), "attrs", {}).get("id", ""), o.get_text().strip(), []])
            elif getattr(o, "name", None) and o.name not in ("script", "style", "pre", "svg") and not UNSEARCHED & set(o.get("class", [])):
                walk(o)
                if o.name in BLOCKS: found[-1][2].append(" ")
    walk(soup)
    return [[key, heading, re.sub(r"\\[()\[\]]", "", " ".join("".join(text).split()))] for key, heading, text in found]


def links(text):
    "The ids of a page, and its links as (whole tag, address)."
    text = re.sub(r"<(script|style)\b.*?</\1>", "", text, flags=re.S)
    tags = re.findall(r"<[a-z][^>]*>", text)
    ids = {m[1] for t in tags if (m := re.search(r'\sid="([^"]*)"', t))}
    return ids, [(t, m[1]) for t in tags if (m := re.search(r'^<(?:a|link|img|script)\b[^>]*\s(?:href|src)="([^"]*)"', t))]


def dead_links(out):
    "Links within the site that lead nowhere. A method that has no heading of its own is linked to its class."
    texts = {p.relative_to(out): p.read_text(encoding="utf-8") for p in out.rglob("*.html")}
    found = {page: links(text) for page, text in texts.items()}
    for page, (_, tags) in found.items():
        for tag, address in tags:
            url, _, frag = address.partition("#")
            if re.match(r"\w+:", url): continue
            to = Path(os.path.normpath(page.parent / url)) if url else page
            ids = found[to][0] if to in found else {frag}
            if frag not in ids and "." in frag:
                frag = frag.partition(".")[0]
                texts[page] = texts[page].replace(tag, tag.replace(f'"{address}"', f'"{url}#{frag}"'))
            if not (out / to).exists() or frag and frag not in ids: yield f"{page}: {address}"
        (out / page).write_text(texts[page], encoding="utf-8")


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
