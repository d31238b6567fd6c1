"""Change one thing at a time in a module, and see whether its tests notice. Usage: tools/mutants.py MODULE --tests FILE ... [--count 50]

A *mutant* is the module with one small fault: `<` for `<=`, `+` for `-`, a number one larger, a call left out, a condition turned round.
Each runs against the named tests (test files, and notebooks, whose cells check too) in a clone of the last commit. One that all tests
pass has *survived*: either a test is missing, or the change makes no difference. A line for each goes to --out, so that a run that was
stopped goes on where it was.
"""
import argparse, ast, json, os, random, shlex, subprocess, sys, tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT, BIN = Path(__file__).resolve().parent.parent, Path(sys.executable).parent
SWAPS = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.In: "not in", ast.NotIn: "in",
         ast.Is: "is not", ast.IsNot: "is", ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "*"}


class Finder(ast.NodeVisitor):
    "All places of a source that can be changed: (line, what it was, what it becomes, start, end), in bytes."

    def __init__(self, source):
        self.lines, self.found = source.encode().splitlines(keepends=True), []
        self.starts = [sum(map(len, self.lines[:i])) for i in range(len(self.lines) + 1)]
        self.text = b"".join(self.lines)
        self.visit(ast.parse(source))

    def span(self, node): return (self.starts[node.lineno - 1] + node.col_offset, self.starts[node.end_lineno - 1] + node.end_col_offset)

    def code(self, node): return self.text[slice(*self.span(node))].decode()

    def add(self, node, new):
        start, end = self.span(node)
        self.found.append((node.lineno, self.code(node), new, start, end))

    def visit_Compare(self, node):
        self.generic_visit(node)
        if len(node.ops) == 1 and type(node.ops[0]) in SWAPS:
            self.add(node, f"({self.code(node.left)} {SWAPS[type(node.ops[0])]} {self.code(node.comparators[0])})")

    def visit_BinOp(self, node):
        self.generic_visit(node)
        if type(node.op) in SWAPS and not any(isinstance(n, (ast.JoinedStr, ast.Constant)) and not isinstance(getattr(n, "value", 0), (int, float)) for n in (node.left, node.right)):
            self.add(node, f"({self.code(node.left)} {SWAPS[type(node.op)]} {self.code(node.right)})")

    def visit_BoolOp(self, node):
        self.generic_visit(node)
        word = " or " if isinstance(node.op, ast.And) else " and "
        self.add(node, "(" + word.join(f"({self.code(v)})" for v in node.values) + ")")

    def visit_UnaryOp(self, node):
        self.generic_visit(node)
        if isinstance(node.op, ast.Not): self.add(node, f"bool({self.code(node.operand)})")

    def visit_Constant(self, node):
        if isinstance(node.value, bool): self.add(node, str(not node.value))
        elif isinstance(node.value, (int, float)): self.add(node, repr(node.value + 1) if node.value == int(node.value) else repr(node.value*2))

    def visit_IfExp(self, node):
        self.generic_visit(node)
        self.add(node, f"({self.code(node.orelse)} if {self.code(node.test)} else {self.code(node.body)})")

    def visit_If(self, node):
        self.generic_visit(node)
        self.add(node.test, f"not ({self.code(node.test)})")

    def visit_Expr(self, node):
        if isinstance(node.value, ast.Constant): return                     # A docstring
        self.generic_visit(node)
        if isinstance(node.value, ast.Call): self.add(node, "None")

    def visit_AugAssign(self, node):
        self.generic_visit(node)
        if type(node.op) in (ast.Add, ast.Sub): self.add(node, f"{self.code(node.target)} {'-=' if isinstance(node.op, ast.Add) else '+='} ({self.code(node.value)})")

    def visit_Return(self, node):
        self.generic_visit(node)
        if node.value is not None and not isinstance(node.value, ast.Constant): self.add(node, "return None")

    def visit_FunctionDef(self, node):
        for part in (*node.args.defaults, *(d for d in node.args.kw_defaults if d), *node.body): self.visit(part)

    def visit_AnnAssign(self, node):
        if node.value: self.visit(node.value)

    def visit_Assign(self, node):
        if not (isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__"): self.visit(node.value)

    def visit_Raise(self, node): "What an error says is not looked at."
    def visit_JoinedStr(self, node): "Nor is a text."


def outcome(clone, file, mutant, tests, seconds):
    "`killed` or `survived`, for one mutant in a clone that is left as it was."
    line, was, new, start, end = mutant
    whole = file.read_bytes()
    file.write_bytes(whole[:start] + new.encode() + whole[end:])
    env = os.environ | {"PYTHONPATH": str(clone), "OMP_NUM_THREADS": "1", "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        for test in tests:
            command = ["nbdev_test", "--n_workers", "0", "--path", test] if test.endswith(".ipynb") else [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *shlex.split(test)]
            try: code = subprocess.run(command, cwd=clone, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=seconds).returncode
            except subprocess.TimeoutExpired: return "killed"
            if code: return "killed"
        return "survived"
    finally: file.write_bytes(whole)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("module", help="of the library, say ablations/sweep")
    p.add_argument("--tests", nargs="+", required=True, help="test files (quoted options may follow) and notebooks, quickest first")
    p.add_argument("--count", type=int, default=50)
    p.add_argument("--seed", type=int, default=0, help="which ones are drawn")
    p.add_argument("--seconds", type=int, default=300, help="after which a test counts as failed")
    p.add_argument("--processes", type=int, default=1)
    p.add_argument("--out", type=Path, default=Path("mutants.jsonl"))
    a = p.parse_args()
    source = (ROOT / f"lmcourse/{a.module}.py").read_text(encoding="utf-8")
    every = Finder(source).found
    chosen = random.Random(a.seed).sample(every, min(a.count, len(every)))
    known = {(*r["at"], r["new"]) for r in map(json.loads, a.out.read_text(encoding="utf-8").splitlines()) if r["module"] == a.module} if a.out.exists() else set()
    with tempfile.TemporaryDirectory(prefix="lmcourse-mutants-") as tmp:
        clones = [Path(tmp).resolve() / f"clone{i}" for i in range(a.processes)]
        for clone in clones: subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
        if (clones[0] / f"lmcourse/{a.module}.py").read_text(encoding="utf-8") != source: sys.exit("commit first: the clones have another module")

        def work(i):
            for mutant in chosen[i::a.processes]:
                line, was, new, start, end = mutant
                if (start, end, new) in known: continue
                found = outcome(clones[i], clones[i] / f"lmcourse/{a.module}.py", mutant, a.tests, a.seconds)
                row = dict(module=a.module, line=line, was=was, new=new, at=(start, end), outcome=found)
                with open(a.out, "a", encoding="utf-8") as f: f.write(json.dumps(row) + "\n")
                if found == "survived": print(f"{a.module}:{line}: {was!r} -> {new!r}", flush=True)

        with ThreadPoolExecutor(a.processes) as pool: list(pool.map(work, range(a.processes)))
    rows = [json.loads(line) for line in a.out.read_text(encoding="utf-8").splitlines()]
    rows = [r for r in rows if r["module"] == a.module]
    print(f"{a.module}: {len(every)} places, {len(rows)} tried, {sum(r['outcome'] == 'survived' for r in rows)} survived")


if __name__ == "__main__": main()
