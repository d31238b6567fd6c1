"""Finds assertions that depend on a clock, by following values through the code without running it.

A value is *timed* if it comes from a clock, from a function of the library that gives times, or is computed from a timed one.
What a dict or a record holds is followed by the name of the field, so `row["ms"]` is timed and `row["tokens"]` beside it is not.
A limit on waiting (`while not ready() and time.time() < end`) is no assertion; a comparison with 0 or None holds on any clock.
Where a clock is set by hand (`with patch("time.perf_counter", ...)`, a fixture that does so) or times are made up (`made_up(...)`), nothing is timed.
"""
import ast
import re

CLOCKS = {"perf_counter", "perf_counter_ns", "process_time", "thread_time", "monotonic", "time_ns", "time.time", "getloadavg", "default_timer", "timeit"}
FUNCTIONS = {"best_seconds", "measure_device", "measure_step", "timed"}                         # Of the library, which give times
FIELDS = {"elapsed", "waited", "wall_s", "cpu_s", "rest_s", "first_s", "waited_s", "step_s"}    # Of its records
CHECKS = {"check_close"}
BY_HAND = re.compile(r"(setattr|patch|patch\.object)\(\s*(['\"]time\.|time\b|\w+, ['\"]best_seconds)")
MADE_UP = re.compile(r"\bmade_up\b")
ASKED_FOR = re.compile(r"^#\|\s*(notest|slow|cuda|bench)\b", re.M)                              # Cells that tests leave out


def name_of(node):
    "`time.time` of `time.time`, `perf_counter` of any `x.perf_counter`, `f` of `f`; empty for anything else."
    if isinstance(node, ast.Name): return node.id
    if isinstance(node, ast.Attribute): return "time.time" if ast.unparse(node) == "time.time" else node.attr
    return ""


def roots(node):
    "The names that an expression's value may be a part of: `times` for `times[k]` and `times.items()`."
    if isinstance(node, ast.Name): return {node.id}
    if isinstance(node, (ast.Attribute, ast.Subscript)): return roots(node.value)
    if isinstance(node, ast.Call): return set().union(roots(node.func) if isinstance(node.func, ast.Attribute) else set(), *map(roots, node.args))
    return set()


class Flow(ast.NodeVisitor):
    "Goes through a program once, in order: what is timed, and which assertions ask about it."

    def __init__(self):
        self.names, self.functions, self.fields, self.found = set(), set(FUNCTIONS), set(FIELDS), []
        self.by_hand, self.values = set(), set()        # Functions and fixtures that set a clock, and what was measured by it

    def timed(self, node):
        "Whether the value of an expression depends on a clock."
        if isinstance(node, (ast.Attribute, ast.Subscript)) and roots(node) & self.values: return False
        if isinstance(node, ast.Call):
            called = name_of(node.func)
            if called in CLOCKS or isinstance(node.func, ast.Name) and called in self.functions: return True
            if called in ("len", "sorted", "isinstance", "type", "range", "dict", "report_speed"): return called == "sorted" and any(map(self.timed, node.args))
            return any(map(self.timed, [*node.args, *(k.value for k in node.keywords)])) or (isinstance(node.func, ast.Attribute) and self.timed(node.func.value))
        if isinstance(node, ast.Name): return node.id in self.names
        if isinstance(node, ast.Attribute): return node.attr in FIELDS or self.timed(node.value)
        if isinstance(node, ast.Subscript):
            if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str): return node.slice.value in self.fields or self.timed(node.value)
            return self.timed(node.value)
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp)): return self.comprehension(node, [node.elt])
        if isinstance(node, ast.DictComp): return self.comprehension(node, [node.value])
        if isinstance(node, (ast.Dict, ast.Lambda, ast.Constant)): return False
        return any(self.timed(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr))

    def comprehension(self, node, results):
        before = set(self.names)
        for g in node.generators:
            if self.timed(g.iter): self.bind(g.target)
        found = any(map(self.timed, results))
        self.names = before
        return found

    def bind(self, target, timed=True):
        for n in ast.walk(target):
            if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store): (self.names.add if timed else self.names.discard)(n.id)
        if timed and isinstance(target, ast.Subscript):
            if isinstance(target.slice, ast.Constant) and isinstance(target.slice.value, str): self.fields.add(target.slice.value)
            else: self.names |= roots(target.value)

    def visit_Assign(self, node):
        self.generic_visit(node)
        for target in node.targets:
            if isinstance(target, ast.Name): self.values.discard(target.id)
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple) and len(target.elts) == len(node.value.elts):
                for t, v in zip(target.elts, node.value.elts): self.bind(t, self.timed(v))
            else: self.bind(target, self.timed(node.value))
        if isinstance(node.value, ast.Lambda) and self.timed(node.value.body): self.functions |= {t.id for t in node.targets if isinstance(t, ast.Name)}

    def visit_AugAssign(self, node):
        self.generic_visit(node)
        if self.timed(node.value): self.bind(node.target)

    def visit_NamedExpr(self, node):
        self.generic_visit(node)
        if self.timed(node.value): self.bind(node.target)

    def visit_For(self, node):
        for _ in range(2):                              # What the end of a round puts into a list is there in the next one
            if self.timed(node.iter): self.bind(node.target)
            self.generic_visit(node)
            if any(n.id in self.names for n in ast.walk(node.target) if isinstance(n, ast.Name)): self.names |= roots(node.iter)

    def visit_Call(self, node):
        "`dict(ms=...)` and other records keep what is timed by the field's name; lists become timed by what is put in."
        self.generic_visit(node)
        if name_of(node.func) == "dict": self.keep({k.arg: k.value for k in node.keywords if k.arg})
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("append", "extend", "insert") and any(map(self.timed, node.args)):
            self.names |= roots(node.func.value)
        if name_of(node.func) in CHECKS and any(map(self.timed, node.args)): self.found.append(node)

    def visit_Dict(self, node):
        self.generic_visit(node)
        self.keep({k.value: v for k, v in zip(node.keys, node.values) if isinstance(k, ast.Constant) and isinstance(k.value, str)})

    def keep(self, values):
        "Fields of a record are what was last put into one of that name."
        timed = {name for name, v in values.items() if self.timed(v)}
        self.fields = self.fields - (set(values) - FIELDS) | timed

    def visit_With(self, node):
        if not BY_HAND.search(" ".join(ast.unparse(i.context_expr) for i in node.items)): return self.generic_visit(node)
        for n in ast.walk(node):
            if isinstance(n, ast.Assign):
                for target in n.targets: self.bind(target, False); self.values |= roots(target)

    def visit_FunctionDef(self, node):
        "A function is timed if it gives what is timed; one that puts a clock of its own in the place of the real one is not."
        given = {a.arg for a in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]}
        if BY_HAND.search(text := ast.unparse(node)): return self.by_hand.add(node.name)
        if given & self.by_hand or MADE_UP.search(text): return
        before = set(self.names)
        self.names -= given
        self.generic_visit(node)
        given = [r.value for r in ast.walk(node) if isinstance(r, (ast.Return, ast.Yield)) and r.value is not None]
        if any(map(self.timed, given)): self.functions.add(node.name)
        self.names = before

    def visit_Assert(self, node):
        self.generic_visit(node)
        for n in ast.walk(node.test):
            if not isinstance(n, ast.Compare) or not self.timed(n): continue
            zero = [isinstance(s, ast.Constant) and s.value in (0, None) for s in (n.left, *n.comparators)]
            if not (any(zero) and len(zero) == 2): self.found.append(node); break


def clock_assertions(sources):
    "The assertions of a program, given as its cells or as one text, that ask about time: a list of lines."
    flow = Flow()
    for source in [sources] if isinstance(sources, str) else sources:
        if not isinstance(sources, str) and MADE_UP.search(source): continue
        before = set(flow.names), set(flow.functions), set(flow.fields)
        flow.visit(ast.parse(re.sub(r"^( *)[%!].*$", r"\1pass", source, flags=re.M)))
        if ASKED_FOR.search(source): flow.names, flow.functions, flow.fields = before
    return list(dict.fromkeys(map(ast.unparse, flow.found)))
