"What stands beside the pages: the search index, and the pages as markdown with a list of them (llms.txt)."
import json, re

from nbdev.doclinks import _nbpath2html
from pathlib import Path


def search_index(pages):
    "The script that the search reads: pages (address, title, sections), sections (id, heading, text)."
    return f"window.searchIndex = {json.dumps(pages, ensure_ascii=False, separators=(',', ':'))}\n"


def markdown(text, base):
    "A page's markdown with its links leading to the other pages' markdown."
    text = re.sub(rf"\]\({re.escape(base)}/([\w./-]+\.html)(?:#[^)]*)?\)", r"](\1.md)", text)
    return re.sub(r"\]\((?!\w+:)([^)#\s]+\.ipynb)(?:#[^)]*)?\)", lambda m: f"]({_nbpath2html(Path(m[1])).as_posix()}.md)", text)


def llms(cfg, nav, pages, fronts):
    "llms.txt: what the site is, and each page with its sentence and the address of its markdown."
    lines = [f"# {cfg.title}", "", f"> {cfg.description}", "",
             "Each page is a notebook, given here as markdown with its code and printed outputs. Numbered notebooks export the library of the same name."]
    for section, items in nav:
        lines += ["", f"## {section or 'Start'}", ""]
        lines += [f"- [{fronts[n].get('title', n)}]({cfg.doc_host}{cfg.doc_baseurl}/{pages[n]}.md): {fronts[n].get('description', '')}" for n in items]
    return "\n".join(lines) + "\n"
