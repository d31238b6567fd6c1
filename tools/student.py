"""The student edition: all notebooks, those of exercises without answers. Usage: python tools/student.py [--out _student]

Chapters are copied with their outputs. A notebook of exercises (NNz) keeps its tasks and hints; graders, wrong answers that they refuse and folded
answers make room for an empty answer and the call of the grader. The graders themselves are in the library, and with them what they compare with.
"""
import argparse, ast, hashlib, json, re, shutil, sys, tempfile
from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TASK = re.compile(r"## \d+\. ")
EXPORTED = re.compile(r"#\|\s*(?:exports?i?|default_exp)\b")
ANSWER = re.compile(r"^#\| *code-summary: *Answer", re.M)
DETAILS = re.compile(r"<details><summary>(?!Hint).*?</details>\n*", re.S)                # What explains an answer
HINT = re.compile(r"<details><summary>Hint.*?</details>", re.S)
UNTRUE = {r",? and an answer to unfold": "", r", and (with )?a folded answer": "", r"hints and answers are folded": "hints are folded", r", where the answers are folded": "",
          r"Work in (a notebook or file of your own|your own notebook or file)\b[^.]*\.":
          "Write each answer into its empty cell and run the cell below it, or work in a file of your own. Hints are folded."} # Without answers

README = """# The student edition of {title}

The notebooks of the course in `nbs`, with their outputs. Those of exercises, {exercises}, have tasks and hints but no answers: write yours into the empty cell and run the next one, which calls the grader. It says nothing if the answer is right.

The notebooks need Python 3.11 or newer and the library:

    python -m pip install jupyter "{title} @ git+{url}"
    jupyter lab --notebook-dir=nbs

On Linux, torch brings several GB of CUDA libraries. Without a GPU, add this to the first line: `--extra-index-url https://download.pytorch.org/whl/cpu`.

The command does the same: `lmcourse exercises` lists what there is, `lmcourse check 03 nbs/03_architecture/03z_architecture.ipynb` looks at the answers in a notebook, `lmcourse check 03.softmax my_softmax.py` at one in a file.

Graders compare with the course's own functions, and chapters build those before your eyes. So the library is no secret, and whoever looks up an answer there finds one. The exercises are for trying yourself.

Text, figures and code are under the Apache License 2.0, see `LICENSE`.
"""


def names(source):
    "All names that `source` uses"
    return {n.id for n in ast.walk(ast.parse(re.sub(r"^( *)[%!].*$", r"\1pass", source, flags=re.M))) if isinstance(n, ast.Name)}


def statements(source, kind): return [n for n in ast.parse(re.sub(r"^( *)[%!].*$", r"\1pass", source, flags=re.M)).body if isinstance(n, kind)]


def needed_imports(sources, used, given):
    "Lines that import those of `used` which the cells `sources` import; of the library itself only its tools, and those of `given`"
    lines, modules = set(), {}
    for n in (n for s in sources for n in statements(s, (ast.Import, ast.ImportFrom))):
        ours = isinstance(n, ast.ImportFrom) and n.module.startswith("lmcourse.") and not n.module.startswith("lmcourse.tools.")
        for a in n.names:
            what, name = a.name + (f" as {a.asname}" if a.asname else ""), (a.asname or a.name).split(".")[0]
            if name not in (given if ours else used): continue
            if isinstance(n, ast.Import): lines.add(f"import {what}")
            else: modules.setdefault(n.module, set()).add(what)
    lines |= {f"from {m} import {', '.join(sorted(what, key=lambda n: (n.lower(), n)))}" for m, what in modules.items()}
    return sorted(lines, key=lambda l: ("lmcourse" in l, l.startswith("from"), l.split()[1]))


def described(source):
    "(name of a grader, its argument, the argument's type, what stands beside it) of each public grader in an exported cell"
    for f in statements(source, ast.FunctionDef):
        if not f.name.startswith("check_"): continue
        arg = f.args.args[0]
        comment = " ".join(filter(None, (line.partition("#")[2].strip() for line in source.splitlines()[f.lineno:arg.lineno])))  # Also in the lines above it
        yield f.name, arg.arg, ast.unparse(arg.annotation) if arg.annotation else "", comment


def written(task, arg):
    "(name, source) of what the text of `task` begins: `arg` put together of functions, the class or function named so, or the last one"
    found = {}
    for block in re.findall(r"(?:^ {4}.*\n(?:[ \t]*\n(?= {4}))?)+", task + "\n", re.M):
        source = re.sub(r"^ {4}", "", block, flags=re.M).rstrip()
        try: tree = ast.parse(source)
        except SyntaxError: continue
        if not tree.body: continue
        if all(isinstance(n, (ast.ClassDef, ast.FunctionDef)) for n in tree.body): found |= {n.name: source for n in tree.body}
        if isinstance(last := tree.body[-1], ast.Assign) and isinstance(last.targets[0], ast.Name) and last.targets[0].id == arg: return arg, source
    same = [n for n in found if n.replace("_", "").lower() == arg.replace("_", "").lower()]
    name = (same or list(found) or [None])[-1]
    return name, found.get(name)


def stub(task, grader, arg, kind, comment):
    "(name, source) of the empty answer. Numbers get the name of their exercise, so that one notebook can hold all of them."
    if kind == "dict" or arg == "answer":
        keys, name = re.findall(r"'([^']+)'", comment) if kind == "dict" else [], grader.removeprefix("check_")
        return name, f"# {comment}\n{name} = {{{', '.join(f'{k!r}: None' for k in keys)}}}" if keys else f"# {comment}\n{name} = None"
    name, source = written(task, arg)
    if source: return name, source
    call = re.search(rf"`({arg}\([^`]*\))`", comment) or re.search(r"`(\w+\([^`]*\))`", comment)
    signature = re.search(rf"`({arg}\([\w, ]+\))`", task)
    head, said = (call or signature)[1] if call or signature else f"{arg}(*args)", re.sub(r"^`[^`]*`[:,]? *", "", comment)
    if kind == "type": return arg, f"class {arg}:\n    # {comment}\n    ..."
    return head.partition("(")[0], f"def {head}:\n    # {said}\n    ...".replace("    # \n", "")


def cell(kind, source, like=None, **metadata):
    made = dict(cell_type=kind, id=hashlib.sha1(f"{kind}{source}".encode()).hexdigest()[:8], metadata=metadata, source=source.splitlines(keepends=True))
    if kind == "code": made |= dict(execution_count=None, outputs=like["outputs"] if like else [])
    return made


def without_answers(nb):
    "The cells of an exercise notebook as a student gets them"
    cells = [(c, "".join(c["source"])) for c in nb["cells"]]
    code = [s for c, s in cells if c["cell_type"] == "code"]
    module = next(m[1] for s in code if (m := re.match(r"#\| default_exp (\S+)", s)))
    used, kept, graders = set().union(*(names(s) for s in code if ANSWER.search(s))), [], []
    mentioned = used & set(re.findall(r"`(\w+)`", "".join(s for c, s in cells if c["cell_type"] == "markdown")))
    public = [n.name for s in code if re.match(r"#\|\s*exports?\b", s) for n in statements(s, (ast.FunctionDef, ast.ClassDef)) if n.name[0] != "_"]
    task, found, given, plain = "", [], True, True        # Text of the task, its graders; whether they are still to come, and no text on them has come

    def close():
        nonlocal found
        for name, arg, kind, comment in found:
            called, source = stub(task, name, arg, kind, comment)
            used.update(names(source))
            kept.extend([cell("code", source), cell("code", f"{name}({called})", tags=["raises-exception"])])
            graders.append(name)
        found = []

    for i, (c, source) in enumerate(cells):
        if c["cell_type"] == "markdown":
            for pattern, instead in UNTRUE.items(): source = re.sub(pattern, instead, source)
            for part in re.split(r"^(?=## )", DETAILS.sub("", source), flags=re.M):
                if part.startswith("## Proof"):     # Of the graders
                    close()
                    task, given, plain, part = "", False, True, part[max(part.find("> **Takeaway"), 0):] if "> **Takeaway" in part else ""
                elif part.startswith("## "):
                    close()
                    task, given, plain = part if TASK.match(part) else "", True, True
                elif not plain: part = "\n\n".join(HINT.findall(part) if "> **Takeaway" not in part else [part[part.index("> **Takeaway"):]])
                elif task: task += part
                if part.startswith("> **Takeaway"): close()
                if part.strip(): kept.append(cell("markdown", part.strip("\n")))
        elif EXPORTED.match(source):
            more = list(described(source)) if task and re.match(r"#\|\s*export\b", source) else []
            found, given, plain = found + more, given and not more, plain and not more
        elif ANSWER.search(source): given, plain = False, not task
        elif given and "expect_error" not in source and not re.match(r"#\| *hide", source):
            if all(isinstance(n, (ast.Import, ast.ImportFrom)) for n in ast.parse(source).body): continue
            kept.append(cell("code", source, c))
            used |= names(source); mentioned |= names(source)
    close()
    # F only where a task names it: in chapter 03 you write for yourself what it offers
    said = set(re.findall(r"`(\w+)\.\w", "".join("".join(c["source"]) for c in kept if c["cell_type"] == "markdown")))
    imports = needed_imports(code, used - {"F"} | said, mentioned) + [f"from lmcourse.{module} import ({', '.join(public)})"]
    at = 1 + next(i for i, c in enumerate(kept[1:]) if c["cell_type"] == "markdown") + 1   # Behind the question
    kept.insert(at, cell("code", wrapped("\n".join(imports))))
    return dict(nb, cells=unique(kept)), graders


def wrapped(source, width=140):
    "Long lists of imported names over several lines"
    def fold(m):
        lines, line = [], m[1] + "("
        for n in m[2].split(", "):
            if len(line) + len(n) > width: lines.append(line.rstrip()); line = " "*(len(m[1]) + 1)
            line += n + ", "
        return "\n".join([*lines, line.removesuffix(", ") + ")"])
    return re.sub(r"^(from \S+ import )\((.*)\)$", fold, source, flags=re.M)


def unique(cells):
    "The same cells, none with the id of another"
    seen = set()
    for c in cells:
        while c["id"] in seen: c["id"] = hashlib.sha1(c["id"].encode()).hexdigest()[:8]
        seen.add(c["id"])
    return cells


MADE = ".made.json"                                                                     # Digests of an edition's files


def digests(out):
    "Path to digest, of all files of an edition but what systems and Jupyter put there"
    files = {p.relative_to(out): p for p in sorted(out.rglob("*")) if p.is_file()}
    return {name.as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for name, p in files.items()
            if not any(part.startswith(".") or part in ("__pycache__", "Thumbs.db") for part in name.parts)}


def refuse_work(out):
    "Exit if the folder `out` is neither new nor an edition in which nobody has worked"
    readme, away = out / "README.md", f"move {out} away, or name a new folder"
    ours = readme.is_file() and readme.read_text(encoding="utf-8").startswith("# The student edition")
    if out.exists() and not ours and any(out.iterdir()): sys.exit(f"{out} holds something else: name a new folder")
    if repository := next(out.rglob(".git"), None): sys.exit(f"{repository.parent} is a git repository: {away}")
    if ours and not (out / MADE).is_file():
        sys.exit(f"an older version made {out}, so nobody can tell whether somebody has worked in it: move it away, or name a new folder")
    made = json.loads((out / MADE).read_text(encoding="utf-8")) if ours else {}
    if work := [name for name, digest in digests(out).items() if made.get(name) != digest]:
        what = f"{work[0]} has" if len(work) == 1 else f"{work[0]} and {len(work) - 1} more have"
        sys.exit(f"{what} changed since the edition was made: {away}")


def make(out, nbs=ROOT / "nbs"):
    """Write the edition of the notebooks in `nbs` into the folder `out`; the graders of each notebook of exercises.
    `out` must be new, or an earlier edition in which nobody has worked: answers are never replaced."""
    out = Path(out).resolve()
    refuse_work(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f"{out.name}.") as beside:  # An interrupt leaves `out` as it was
        done = write(Path(beside) / "new", Path(nbs))
        if out.exists(): out.rename(Path(beside) / "old")
        (Path(beside) / "new").rename(out)
    return done


def write(out, nbs):
    "Write the edition into the folder `out`, which doesn't exist yet; the graders of each notebook of exercises"
    done = {}
    shutil.copytree(nbs, out / "nbs", ignore=shutil.ignore_patterns(".*", "_*", "*.yml", "*.css", "__pycache__"))
    for path in sorted((out / "nbs").rglob("[0-9][0-9]z_*.ipynb")):
        nb, done[path.stem] = without_answers(json.loads(path.read_text(encoding="utf-8")))
        path.write_text(json.dumps(nb, ensure_ascii=False, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    settings = ConfigParser(delimiters=["="])
    settings.read(ROOT / "settings.ini", encoding="utf-8")
    s = settings["DEFAULT"]
    (out / "README.md").write_text(README.format(title=s["title"], url=s["git_url"], exercises=", ".join(f"`{n}`" for n in done)), encoding="utf-8")
    shutil.copy(ROOT / "LICENSE", out)
    (out / MADE).write_text(json.dumps(digests(out), indent=1) + "\n", encoding="utf-8")
    return done


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "_student", help="folder to write to; an earlier edition there is replaced, unless somebody has worked in it")
    out = parser.parse_args().out.resolve()
    for name, graders in make(out).items(): print(f"{name}: {len(graders)} tasks")
    print(f"the student edition is in {out}")
    if "github.com/example/" in (out / "README.md").read_text(encoding="utf-8"):
        print("its README.md names an example's address: write your account into `user` in settings.ini, and make it again")
