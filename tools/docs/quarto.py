"What Quarto has rendered, made like the other site: nothing is asked of other hosts, no link is dead, the search knows names and leaves code out."
import json, re

from bs4 import BeautifulSoup

from .page import dead_links, fold_answers, fold_proof, sections, vendor_katex

VERSION = "1.7.34"              # The one that these steps were tried with


def local(text, page, base, katex):
    "The HTML `text` of `page`: KaTeX is that of the site, no script is another host's, and links within the site are relative."
    root = "../" * page.count("/")
    text = re.sub(r'https://cdn\.jsdelivr\.net/npm/katex@[^/"]+/dist', katex if "://" in katex else root + katex, text)
    def without(m):
        src = re.search(r'\ssrc="(?:https?:)?//([^"]*)"', m[1])
        return "" if src and "/katex@" not in src[1] or "define('jquery'" in m[2] else m[0]
    text = re.sub(r"(<script\b[^>]*>)(.*?)</script>\n?", without, text, flags=re.S)
    return re.sub(rf'(<(?:a|img)\b[^>]*\s(?:href|src)="){re.escape(base)}(?:/|(?=["#]))([^"#]*)', lambda m: m[1] + root + (m[2] or "index.html"), text)


def search_json(out, lists):
    "Quarto's search.json anew: a section each heading, without code. Of pages in `lists`, which repeat others, only the beginning."
    old = json.loads((out / "search.json").read_text(encoding="utf-8"))
    crumbs, new = {o["href"].partition("#")[0]: o["crumbs"] for o in old if o.get("crumbs")}, []
    for page in dict.fromkeys(o["href"].partition("#")[0] for o in old):
        main = BeautifulSoup((out / page).read_text(encoding="utf-8"), "html.parser").find("main")
        title = main.find("h1").extract().get_text().strip()
        for head in main.find_all(id="title-block-header"): head.unwrap()
        for key, heading, text in sections(main)[:1 if page.rpartition("/")[2] in lists else None]:
            at = f"{page}#{key}" if key else page
            new.append(dict(objectID=at, href=at, title=title, section=heading, text=text) | ({"crumbs": crumbs[page]} if page in crumbs else {}))
    (out / "search.json").write_text(json.dumps(new, ensure_ascii=False), encoding="utf-8")


def finish_site(out, base, lists=()):
    "All of it for the site in the folder `out`; its dead links."
    katex = vendor_katex(out)
    for path in out.rglob("*.html"):
        text = local(path.read_text(encoding="utf-8"), path.relative_to(out).as_posix(), base, katex)
        if 'id="proof"' in text or "<summary>Answer</summary>" in text:
            soup = BeautifulSoup(text, "html.parser")
            fold_proof(soup)
            fold_answers(soup)
            text = str(soup)
        path.write_text(text, encoding="utf-8")
    search_json(out, lists)
    return list(dead_links(out))
