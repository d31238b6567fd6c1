"""Build the site: nbdev's own processing, then Quarto, or nbconvert and one page template.

`nbdev_docs` needs Quarto; this gives the same pages, addresses and anchors from the same notebooks where there is none.
Usage: python tools/build_docs.py [--out _docs] [--force] [--readme] [--quarto]
"""
import argparse, gc, json, multiprocessing, re, shutil, subprocess, sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from IPython.core import interactiveshell

# What takes as long as the site itself, also in the processes of a pool, which read this file: searches for garbage, a fifth of nbdev's
# processing; one more for the shell of each notebook when a process ends; a grammar of addresses for nbformat that nothing asks for
gc.set_threshold(20_000, 20, 20)
interactiveshell.atexit = SimpleNamespace(register=lambda f: None)
sys.modules.setdefault("rfc3987_syntax", None)

import yaml
from fastcore.basics import num_cpus
from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape
from nbconvert import MarkdownExporter
from nbdev.config import get_config
from nbdev.doclinks import _build_modidx, _nbpath2html
from nbdev.quarto import refresh_quarto_yml
from nbdev.serve import proc_nbs

from docs import quarto
from docs.extras import llms, markdown, read_redirects, search_index, write_404, write_redirects
from docs.notebook import enrich, facts, load
from docs.page import HERE, dead_links, finish, html, vendor_katex


FIRST = "index.ipynb"           # Not nbdev's `readme_nb`: by that setting it would write README.md anew whenever the file looks old
LISTS = {"97c_api"}             # Its tables repeat what stands on other pages: the search knows it by its title


def sidebar(cfg, found):
    "Sections [(title, [notebook, ...], [companion, ...])] from _quarto.yml, which must name every notebook and no other."
    items = yaml.safe_load((cfg.config_path / "_quarto.yml").read_text(encoding="utf-8"))["website"]["sidebar"]["contents"]
    nav = []
    for o in items:
        title, listed = ("", [o]) if isinstance(o, str) else (o["section"], o["contents"])
        nav.append((title, [n for n in listed if isinstance(n, str)], [n for part in listed if not isinstance(part, str) for n in part["contents"]]))
    if odd := {n for _, main, more in nav for n in main + more} ^ set(found): sys.exit(f"in only one of _quarto.yml and nbs: {', '.join(sorted(odd))}")
    return nav


def readme(proc, found, cfg):
    "README.md from the first page. Its links lead to the notebooks, so that they work wherever the repository is read."
    (nb, front, _), base = load(proc / FIRST), f"{cfg.doc_host}{cfg.doc_baseurl}"
    if any("image/png" in o.get("data", {}) for c in nb.cells for o in c.get("outputs", [])): sys.exit("README: put the plot into a file of nbs")
    text = MarkdownExporter().from_notebook_node(nb)[0]
    for n in found: text = text.replace(f"]({base}/{_nbpath2html(Path(n)).as_posix()}", f"](nbs/{n}")
    text = re.sub(r"\]\((nbs/[^)#]+\.ipynb)#[^)]*\)", r"](\1)", text)
    text = re.sub(r"\]\((?!\w+:|#|nbs/)", "](nbs/", text)
    text = f"# {front['title']}\n\n> {front.get('description', '')}\n\n" + re.sub(r"\n{3,}", "\n\n", text.strip()) + "\n"
    (cfg.config_path / "README.md").write_text(text, encoding="utf-8")


def process(cfg, force):
    "The notebooks as nbdev processes them, each with its line of facts: the folder, and the names."
    refresh_quarto_yml(); _build_modidx()
    proc, times = proc_nbs(force=force, n_workers=num_cpus()), cfg.nbs_path / "results/times.json"
    times = json.loads(times.read_text(encoding="utf-8")) if times.exists() else {}
    found = [f.relative_to(proc).as_posix() for f in sorted(proc.rglob("*.ipynb")) if (cfg.nbs_path / f.relative_to(proc)).exists()]
    for f in set(proc.rglob("*.ipynb")) - {proc / n for n in found}: f.unlink()          # Of notebooks that were moved
    for n in found:
        line = facts(cfg.nbs_path, n, times, cfg.git_url, cfg.branch) if n != FIRST else None
        enrich(proc / n, line, cfg.nbs_path / n)
    return proc, found


def one_page(n, page, proc, base, out):
    "Everything of notebook `n` that goes on its page, and beside it."
    nb, front, text = load(proc / n)
    body, toc, found = finish(html(nb), page, base, out)
    to = out / f"{page}.md"
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text(markdown(text, base), encoding="utf-8")
    return front, dict(body=body, toc=toc, maths=r"\(" in body or r"\[" in body), found


def build(cfg, proc, found, out):
    "The whole site in the folder `out`."
    nav, base = sidebar(cfg, found), f"{cfg.doc_host}{cfg.doc_baseurl}"
    pages = {n: _nbpath2html(Path(n)).as_posix() for n in found}
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(proc, out, ignore=shutil.ignore_patterns("*.ipynb", "*.yml", "styles.css", "theme.scss", "results", "_docs", ".*"))
    katex, order = vendor_katex(out), [n for _, main, more in nav for n in main + more]
    with multiprocessing.get_context("spawn").Pool(min(num_cpus(), 8)) as pool:
        made = dict(zip(order, pool.starmap(partial(one_page, proc=proc, base=base, out=out), [(n, pages[n]) for n in order], chunksize=1)))
    fronts = {n: front for n, (front, _, _) in made.items()}
    titles = {n: fronts[n].get("title", n) for n in order}
    jinja = Environment(loader=FileSystemLoader(HERE), autoescape=True)
    jinja.filters |= {"code": lambda text: Markup(re.sub("`(.+?)`", r"<code>\1</code>", str(escape(text)))),
                      "breaks": lambda text: Markup(re.sub(r"([._])(?=\w)", r"\1<wbr>", str(escape(text))))}
    page = jinja.get_template("page.html.j2")
    for n, before, after in zip(order, [None] + order, order[1:] + [None]):
        (out / pages[n]).write_text(page.render(
            cfg=cfg.d, front=fronts[n], here=n, nav=nav, pages=pages, katex=katex, prev=before, next=after, titles=titles,
            root="../" * pages[n].count("/"), source=f"{cfg.git_url}/blob/{cfg.branch}/{cfg.nbs_path.name}/{n}", **made[n][1]), encoding="utf-8")
    (out / "search-index.js").write_text(search_index([[pages[n], titles[n], made[n][2][:1 if Path(n).stem in LISTS else None]] for n in order]), encoding="utf-8")
    (out / "llms.txt").write_text(llms(cfg, nav, pages, fronts), encoding="utf-8")
    for f in ("site.css", "site.js"): shutil.copy(HERE / f, out)
    write_redirects(out, base, read_redirects())
    write_404(out, base, cfg.title)
    (out / ".nojekyll").touch()                       # GitHub Pages then serves the files as they are
    if bad := list(dead_links(out)): sys.exit("links that lead nowhere:\n  " + "\n  ".join(bad))
    print(f"{len(order)} pages in {out}")


def render(cfg, proc, found, out):
    "The same site, its pages made by Quarto."
    if not shutil.which("quarto"): sys.exit(f"there is no quarto on the PATH: install {quarto.VERSION}, or build the site without it")
    if (have := subprocess.run(["quarto", "--version"], capture_output=True, text=True).stdout.strip()) != quarto.VERSION:
        print(f"Quarto {have}: these steps were tried with {quarto.VERSION}", file=sys.stderr)
    base = f"{cfg.doc_host}{cfg.doc_baseurl}"
    subprocess.run(["quarto", "render", "--no-cache"], cwd=proc, check=True)
    shutil.rmtree(out, ignore_errors=True)
    shutil.move(proc / cfg.doc_path.name, out)
    bad = quarto.finish_site(out, base, {_nbpath2html(Path(f"{name}.ipynb")).name for name in LISTS})
    write_redirects(out, base, read_redirects())
    write_404(out, base, cfg.title)
    if bad: sys.exit("links that lead nowhere:\n  " + "\n  ".join(bad))
    print(f"{len(found)} pages in {out}")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, help="folder of the site, replaced as a whole (default: _docs)")
    p.add_argument("--force", action="store_true", help="process every notebook anew")
    p.add_argument("--readme", action="store_true", help="write README.md from nbs/index.ipynb, and no site")
    p.add_argument("--quarto", action="store_true", help="have Quarto make the pages, as nbdev_docs does")
    args, cfg = p.parse_args(), get_config()
    if bad := [d for d in cfg.config_path.parts if d.startswith(".") or d in ("_docs", "_proc", "_site")]:
        sys.exit(f"nbdev skips every notebook below a folder with a name like {bad[0]}: build the site elsewhere")
    proc, found = process(cfg, args.force)
    out = (args.out or cfg.doc_path).absolute()
    if args.readme: readme(proc, found, cfg)
    elif args.quarto:
        render(cfg, proc, found, out)
    else: build(cfg, proc, found, out)


if __name__ == "__main__": main()
