"Notebooks as nbdev has processed them, made ready for a page: markdown that only Quarto knows, options of cells, facts, plain text."
import ast, html, json, math, re

import nbformat, yaml
from nbdev.doclinks import _nbpath2html

from lmcourse.tools.pages import reading_time


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


def whole_summary(text):
    "The documentation of a name with its whole first sentence in italics: nbdev stops at the end of the first line."
    def joined(m):
        first, dot, rest = f"{m[1]} {' '.join(m[2].split())}".partition(". ")
        return f"*{first}{dot.strip()}* {rest}".rstrip() + "\n"
    return re.sub(r"^\*([^*\n]*[^*\n.])\*\n((?:[^\n*]+(?:\n|\Z))+)", joined, text, flags=re.M)


def options(cell):
    "Take the leading `#| key: value` lines off a code cell."
    lines, opts = cell.source.splitlines(), {}
    while lines and (m := re.match(r"#\|\s*([\w-]+)\s*:?\s*(.*)", lines[0])):
        opts[m[1]] = yaml.safe_load(m[2]) if m[2] else True
        lines.pop(0)
    cell.source = "\n".join(lines).strip("\n")
    return opts


def caption(text):
    "A caption as HTML: code between backticks and emphasis between stars are all the markdown that it knows."
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))
    return re.sub(r"(?<![\w*])\*(\S(?:[^*]*\S)?)\*(?![\w*])", r"<em>\1</em>", text)


def code_cell(c):
    "Apply a code cell's options; whether anything of it is shown."
    o = options(c)
    if o.get("output") is False: c.outputs = []
    if o.get("warning") is False: c.outputs = [x for x in c.outputs if x.get("name") != "stderr"]
    for out in c.outputs:
        if out.output_type == "stream" and o.get("output") == "asis":
            out.update(output_type="display_data", data={"text/markdown": out.pop("text")}, metadata={})
    if o.get("echo") is False or not c.source: c.metadata["transient"] = {"remove_source": True}
    if o.get("code-fold"): c.metadata["fold"] = [o["code-fold"] == "show", o.get("code-summary", "Code")]
    c.metadata["caption"] = caption(o.get("fig-cap", ""))
    c.metadata["alt"] = o.get("fig-alt") or o.get("fig-cap", "")
    return o.get("include") is not False and (c.source or c.outputs)


def load(path):
    "The notebook at `path` made ready for nbconvert, its front matter, and the page as plain markdown."
    nb, front = nbformat.v4.reads(path.read_text(encoding="utf-8")), {}
    for i, c in enumerate(nb.cells):
        c.id = c.get("id") or f"c{i}"
        if c.cell_type == "raw" and c.source.startswith("---"): front = next(yaml.safe_load_all(c.source))
    nb.cells = [c for c in nb.cells if c.cell_type == "markdown" or c.cell_type == "code" and code_cell(c)]
    text = plain(nb, front)
    for c in nb.cells:
        if c.cell_type == "markdown": c.source = md(c.source)
        for out in c.get("outputs", []):
            if "text/markdown" in out.get("data", {}): out.data["text/markdown"] = md(whole_summary(out.data["text/markdown"]))
    nb.metadata["language_info"] = {"name": "python"}
    return nb, front, text


def plain(nb, front):
    "A page as markdown, with code and printed outputs in fences: for programs that read."
    parts = [f"# {front.get('title', '')}\n\n> {front.get('description', '')}"]
    for c in nb.cells:
        if c.id == "facts" or c.source.startswith("<!-- WARNING"): continue
        if c.cell_type == "markdown": parts.append(c.source); continue
        if c.source and not c.metadata.get("transient"): parts.append(f"```python\n{c.source}\n```")
        for out in c.outputs:
            data = out.get("data", {})
            if "text/markdown" in data: parts.append(data["text/markdown"])
            elif "image/png" in data: parts.append(f"(Plot: {c.metadata.alt or 'see the page'})")
            elif text := out.get("text") or data.get("text/plain"): parts.append(f"```\n{text.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


# What is added to a processed notebook, so that Quarto's pages have it too

def labels(source):
    "What a plot shows, from the titles and axis labels that its code sets; '' if it sets none."
    said = {key: [] for key in ("title", "suptitle", "ylabel", "xlabel")}
    for n in ast.walk(ast.parse(re.sub(r"^( *)[%!].*$", r"\1pass", source, flags=re.M))):
        if not isinstance(n, ast.Call): continue
        name = getattr(n.func, "attr", "").removeprefix("set_")
        found = [(k.arg, k.value) for k in n.keywords] + [(name, a) for a in n.args[:1]]
        for key, value in found:
            if key in said and isinstance(value, ast.Constant) and isinstance(value.value, str): said[key].append(value.value)
    first = {k: ", ".join(dict.fromkeys(v)) for k, v in said.items()}
    axes = f"{first['ylabel']} against {first['xlabel']}" if first["ylabel"] and first["xlabel"] else first["ylabel"] or first["xlabel"]
    return ": ".join(filter(None, (first["suptitle"] or first["title"], axes)))


def facts(nbs, page, times, git, branch):
    "The line under a page's title: time to read and to run, and where its notebook `page` of the folder `nbs` and its module are."
    source = nbs / page
    cells = json.loads(source.read_text(encoding="utf-8"))["cells"]
    code = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
    minutes, words, lines = reading_time(cells)
    said = [f"{math.ceil(minutes)} min to read ({words:,} words, {lines:,} lines of code)"]
    if run := times.get(source.stem):
        took = f"{run['seconds']:.0f} s" if run["seconds"] >= 1 else "under 1 s"
        said.append(f"{took} and {run['memory_mb'] / 1000:.1f} GB to run on {run['machine']}")
    for flag, why in (("slow", "slow"), ("cuda", "for a GPU")):
        if n := sum(bool(re.search(rf"^#\| *{flag}\b", c, flags=re.M)) for c in code):
            said.append(f"{n} cell{'s' * (n != 1)} {why}, skipped unless asked for")
    module = next((m[1] for c in code if (m := re.match(r"#\|\s*default_exp\s+(\S+)", c))), None)
    at = f"{git}/blob/{branch}"
    links = [("Notebook", f"{at}/{nbs.name}/{page}")]
    if module: links.append(("Module", f"{at}/lmcourse/{module.replace('.', '/')}.py"))
    links.append(("Open in Colab", links[0][1].replace("https://github.com", "https://colab.research.google.com/github")))
    shown = " ".join(f'<a href="{url}">{name}</a>' for name, url in links)
    return (f'<div class="facts"><p>{" · ".join(said)}</p>\n'
            f"<p>{shown} (there, begin with <code>!pip install git+{git}</code>)</p></div>")


DOC = re.compile(r"(.*?^### +(\S+)[^\n]*\n)(.*)", re.S | re.M)       # nbdev's text on a name: its heading, its signature and docstring


def documented(cell):
    "The name on which a cell has nbdev's text, or none."
    said = [o.data["text/markdown"] for o in cell.get("outputs", []) if "text/markdown" in o.get("data", {})]
    return m[2] if len(said) == 1 and (m := DOC.match(said[0])) else None


def in_order(cells):
    "nbdev puts the last name of a cell before its source and the others after it, backwards. Here all stand before it, as they are defined."
    for i, c in enumerate(cells):
        if c.cell_type != "code" or not re.search(r"^#\| code-fold", c.source, flags=re.M): continue
        defined = {name: k for k, name in enumerate(re.findall(r"^(?:def|class) +(\w+)", c.source, flags=re.M))}
        first, last = i, i + 1
        while first and documented(cells[first - 1]) in defined: first -= 1
        while last < len(cells) and documented(cells[last]) in defined: last += 1
        docs = sorted(cells[first:i] + cells[i + 1:last], key=lambda d: defined[documented(d)])
        for d in docs[1:]:
            for o in d.outputs: o.data["text/markdown"] = o.data["text/markdown"].removeprefix("---\n\n")       # One rule for all
        cells[first:last] = docs + [c]


def without_echo(cells):
    "Where the source of a name follows it says all that nbdev's signature says: of that, the heading stays."
    for i, c in enumerate(cells):
        if c.cell_type != "code" or not re.search(r"^#\| code-fold", c.source, flags=re.M): continue
        for before in reversed(cells[:i]):
            said = [o.data for o in before.get("outputs", []) if DOC.match(o.get("data", {}).get("text/markdown", ""))]
            if not said: break
            for data in said:
                if (m := DOC.match(data["text/markdown"])) and re.search(rf"(def|class) {m[2].split('.')[-1]}\b", c.source):
                    data["text/markdown"] = m[1]


def unlink_parameters(cells):
    "A name that is a parameter in the code of the page means that, and not what another page calls so: nbdev links it all the same."
    named, known = set(), set()
    for c in cells:
        if c.cell_type != "code": continue
        try: tree = ast.parse(re.sub(r"^( *)[%!].*$", r"\1pass", c.source, flags=re.M))
        except SyntaxError: continue
        named |= {a.arg for n in ast.walk(tree) if isinstance(n, ast.arguments) for a in (*n.posonlyargs, *n.args, *n.kwonlyargs)}
        known |= {n.name for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.ClassDef, ast.alias))}
    link = re.compile(r"\[(`(\w+)`)\]\(https?://[^)]*\)")
    def plain(text): return link.sub(lambda m: m[1] if m[2] in named - known else m[0], text)
    for c in cells:
        if c.cell_type == "markdown": c.source = plain(c.source)
        for o in c.get("outputs", []):
            if "text/markdown" in o.get("data", {}): o.data["text/markdown"] = plain(o.data["text/markdown"])


def origins(cells):
    "Where the code of a page has its names from: the modules that they are imported from, and `None` for what the page defines itself."
    found = {}
    for c in cells:
        if c["cell_type"] != "code": continue
        try: tree = ast.parse(re.sub(r"^( *)[%!].*$", r"\1pass", "".join(c["source"]), flags=re.M))
        except SyntaxError: continue
        named = [(n.name, None) for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))]
        for n in ast.walk(tree):
            if isinstance(n, ast.ImportFrom): named += [(a.asname or a.name, n.module) for a in n.names]
        for name, module in named: found.setdefault(name, set()).add(module)
    return found


def unlink_homonyms(cells, own, known):
    """nbdev links each backticked word that is a public name of any page. A link stays if it leads to a name of the page `own` itself, or of a
    page from which the code imports it. It goes if the code has that name from elsewhere, or if a plain lower-case word, without parentheses,
    is no name in the code at all: `form` may then be the column of a table, and `generate` a command. A private name has no place to lead to."""
    def leads(module, page): return module == "lmcourse" or module and page.endswith("/" + module.removeprefix("lmcourse.").replace(".", "/"))
    def plain(m):
        if m[2].startswith("_"): return m[1]
        page, modules = re.sub(r"/\d+_", "/", m[3]), known.get(m[2])
        if m[3].endswith("/" + own) or any(leads(module, page) for module in modules or ()): return m[0]
        return m[1] if modules or re.fullmatch("`[a-z]+`", m[1]) else m[0]
    link = re.compile(r"\[(`(\w+)(?:\(\))?`)\]\((https?://[^)#]*)\.html#[^)]*\)")
    for c in cells:
        if c.cell_type == "markdown": c.source = link.sub(plain, c.source)
        for o in c.get("outputs", []):
            if "text/markdown" in o.get("data", {}): o.data["text/markdown"] = link.sub(plain, o.data["text/markdown"])


def unlink_code(cells):
    "nbdev makes links in the comments of a signature too, where they would be shown as they are written."
    fence, link = re.compile(r"^```.*?^```", re.S | re.M), re.compile(r"\[(`[^`\]]+`)\]\(https?://[^)]*\)")
    for c in cells:
        for o in c.get("outputs", []):
            if "text/markdown" in (data := o.get("data", {})):
                data["text/markdown"] = fence.sub(lambda m: link.sub(r"\1", m[0]), data["text/markdown"])


def plain_signature(text):
    "A signature with functions and classes by their names, not their addresses; none where nbdev could not find the arguments."
    text = re.sub(r"<function (?:\w+\.)*(\w+) at 0x[0-9a-f]+>|<class '(?:\w+\.)*(\w+)'>", lambda m: m[1] or m[2], text)
    return re.sub(r"```python\n(?:def|class) [\w.]+\(\n    \*args, \*\*kwargs,?\n\):\n```\n+", "", text)


def without_stand_in(cells):
    "Where a function has no docstring, nbdev shows that of Python's own call."
    for c in cells:
        for o in c.get("outputs", []):
            if DOC.match(said := o.get("data", {}).get("text/markdown", "")): o.data["text/markdown"] = plain_signature(said)
            if (said := o.get("data", {}).get("text/markdown", "")).endswith(of_call := "*Call self as a function.*"):
                o.data["text/markdown"] = said.removesuffix(of_call).rstrip() + "\n"


def spoken(text):
    "A caption as a text that is read aloud, and that an address can hold: Quarto decodes it as one, and stumbles over a bare percent sign."
    return re.sub(r"(?<=\d) ?%", " percent", text).replace("%", "percent").replace("`", "")


def only_imports(source):
    "Whether a cell, without options, is more than two lines of imports: the reader wants to see what follows."
    if source.startswith("#|") or source.count("\n") < 2: return False
    try: return all(isinstance(n, (ast.Import, ast.ImportFrom)) for n in ast.parse(source).body)
    except SyntaxError: return False


def enrich(path, line, source=None):
    """Make the processed notebook at `path` ready for either builder: the line of facts, no signature above the source that says the
    same, and for each plot a text for those who can't see it. The notebook at `source`, by default the same, has hidden imports too."""
    nb = nbformat.v4.reads(path.read_text(encoding="utf-8"))
    nb.cells = [c for c in nb.cells if c.get("id") != "facts"]
    head = next((i for i, c in enumerate(nb.cells) if c.cell_type == "raw"), -1) + 1
    if line: nb.cells.insert(head, nbformat.v4.new_markdown_cell(line, id="facts"))
    in_order(nb.cells)
    without_echo(nb.cells)
    without_stand_in(nb.cells)
    for c in nb.cells: c.metadata.pop("jupyter", None)      # What JupyterLab collapses is folded here by `#| code-fold`
    for c in nb.cells:                  # nbdev opens the source of all that is exported; that of long or inner parts stays folded
        if c.metadata.get("code-fold"): c.source = re.sub(r"^#\| code-fold: show$", "#| code-fold: true", c.source, flags=re.M)
        if c.cell_type == "code" and only_imports(c.source): c.source = f"#| code-fold: true\n#| code-summary: Imports\n{c.source}"
    unlink_parameters(nb.cells)
    page = f"{path.parent.name}/{_nbpath2html(path).stem}"
    unlink_homonyms(nb.cells, page, origins(json.loads((source or path).read_text(encoding="utf-8"))["cells"]))
    unlink_code(nb.cells)
    front = nb.cells[head - 1].source if head else ""
    heading = (re.findall(r"^title: *(.*?) *$", front, flags=re.M) or [""])[0].strip("\"'")        # Until the first one on the page
    for c in nb.cells:
        if c.cell_type == "markdown": heading = (re.findall(r"^#+ +(.*?)(?: *\{.*\})?$", c.source, flags=re.M) or [heading])[-1]
        if c.cell_type != "code" or re.search(r"^#\| fig-alt", c.source, flags=re.M): continue
        if not any(o.get("data", {}).keys() & {"image/png", "image/svg+xml"} for o in c.outputs): continue
        if cap := re.search(r"^#\| fig-cap: (.*)$", c.source, flags=re.M): alt = yaml.safe_load(cap[1])
        else: alt = "Plot" + (f" in “{heading}”" if heading else "") + (f": {said}" if (said := labels(c.source)) else "")
        c.source = f"#| fig-alt: {json.dumps(spoken(alt), ensure_ascii=False)}\n{c.source}"
    path.write_text(nbformat.v4.writes(nb), encoding="utf-8")
