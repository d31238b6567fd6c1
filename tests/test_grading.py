"What all graders share: values in few words, calls on copies, predicted numbers; and the helper of their tests."
import copy
import importlib
import math
import re
import subprocess
import sys
from collections import Counter
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from graders import Graders, fails, score_lines
from hypothesis import given
from hypothesis import strategies as st

from lmcourse.app.grade import exercise_tasks
from lmcourse.tools.grading import check_cases, check_numbers, require_class, require_function, run_answer, same_value, short, short_args

VALUES = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.sampled_from([np.arange(3.), torch.arange(20)]),
                      lambda v: st.lists(v) | st.tuples(v) | st.dictionaries(st.text(), v), max_leaves=8)


class NoRepr:
    def __repr__(self): raise RuntimeError("no")


class Lines:
    def __repr__(self): return "Lines(\n    a=1,\n)"


def test_torch_is_not_imported():
    code = "import sys, lmcourse.tools.grading; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


@given(VALUES, st.integers(20, 200))
def test_anything_is_one_short_line(value, most):
    text = short(value, most)
    assert "\n" not in text and len(text) <= most + 3
    assert "\n" not in short_args((value, value))


@pytest.mark.parametrize("value, text", [
    (np.zeros((2, 3), np.float32), "float32 (2, 3)"), (torch.zeros(0, 2), "float32 (0, 2)"), (np.array(2.5), "float64 2.5"),
    (torch.zeros(2, 3, device="meta"), "float32 (2, 3)"), (torch.zeros(3, dtype=torch.int64, device="meta"), "int64 (3,)"),
    (np.array([1, 2]), "int64 [1, 2]"), (torch.tensor(4), "int64 4"), (torch.arange(9), "int64 (9,)"), (np.array([True]), "bool (1,)"),
    (np.float32(2), "np.float32(2.0)"), (np.ndarray, "<class 'numpy.ndarray'>"), (torch.Tensor, "<class 'torch.Tensor'>"),
    ((np.ones(9),), "(float64 (9,),)"), ([], "[]"), ({}, "{}"), ((), "()"), (Lines(), "Lines( a=1, )"), (NoRepr(), "a NoRepr"), ([NoRepr()], "a list"),
    (Counter("aab"), "Counter({'a': 2, 'b': 1})"), (ValueError("a\nb"), r"ValueError('a\nb')")])
def test_values(value, text): assert short(value) == text


def test_a_list_that_holds_itself():
    loop = []
    loop.append(loop)
    assert short(loop) == "a list"


LOOP = SimpleNamespace()
LOOP.self = LOOP


def changes(change):
    def f(*args): change(*args); return "result"
    return f


def nan_array(): return np.array([np.nan, 1])


@pytest.mark.parametrize("change, args, words", [
    (lambda x: x.sort(), ([2, 1],), "for ([2, 1]): your code changed its arguments to ([1, 2])"),
    (lambda x: x.zero_(), (torch.ones(2, 3),), "for (float32 (2, 3)): your code changed its argument in place"),
    (lambda x: x.fill(0), (nan_array(),), "changed its argument in place"),
    (lambda x: x.resize_(3), (torch.ones(4),), "changed its arguments to (float32 (3,))"),
    (lambda d: d["a"].append(1), ({"a": []},), "changed its arguments to ({'a': [1]})"),
    (lambda d: d.update({"b": d.pop("b")} | {"a": d.pop("a")}), ({"a": 1, "b": 2},), "changed its arguments to ({'b': 2, 'a': 1})"),
    (lambda d: d.update(a=1.), ({"a": 1},), "changed its arguments to ({'a': 1.0})"),
    (lambda s: s.add(2), ({1},), "changed its arguments to ({1, 2})"), (lambda b: b.append(0), (bytearray(b"a"),), "changed its arguments"),
    (lambda o: o.x.append(1), (SimpleNamespace(x=[]),), "changed its arguments"),
    (lambda m: torch.nn.init.zeros_(m.weight), (torch.nn.Linear(2, 2),), "changed its argument in place"),
    (lambda p: p["w"].__setitem__(0, 5), ({"w": np.ones(3)},), "for ({'w': float64 (3,)}): your code changed its argument in place")])
def test_changed_arguments_are_noticed(change, args, words):
    before = copy.deepcopy(args)
    with pytest.raises(AssertionError) as e: run_answer(changes(change), *args)
    assert words in str(e.value) and "\n" not in str(e.value)
    assert repr(args) == repr(before)


@pytest.mark.parametrize("args", [(nan_array(), float("nan")), (torch.tensor([np.nan]),), (np.random.default_rng(0),), (torch.Generator(),),
                                  (object(),), (len, int, {"f": print}), (torch.nn.Linear(2, 2),), (SimpleNamespace(a=SimpleNamespace()),), (LOOP,)])
def test_unchanged_arguments_pass(args): assert run_answer(lambda *a: len(a), *args) == len(args)


def test_random_generators_are_copies():
    rng, g = np.random.default_rng(0), torch.Generator().manual_seed(0)
    run_answer(lambda rng, g: (rng.random(5), torch.rand(5, generator=g)), rng, g)
    assert rng.random() == np.random.default_rng(0).random() and torch.rand(1, generator=g) == torch.rand(1, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("f, words", [
    (None, "expected a function, got None"), ("f", "expected a function, got 'f'"), (fails, r"for (1): your code raised RuntimeError('two\nlines')"),
    (lambda: 1, "your code raised TypeError("), (lambda x: sys.exit(0), "your code raised SystemExit(0)"), (lambda x: fails(NoRepr()), "RuntimeError")])
def test_what_a_wrong_function_does(f, words):
    with pytest.raises(AssertionError) as e: run_answer(f, 1)
    assert words in str(e.value)


def test_what_is_said_of_the_call():
    for shown, words in ((("a",), "for ('a'): your code"), ("with x: ", "with x: your code"), ("", "your code")):
        with pytest.raises(AssertionError) as e: run_answer(fails, 1, shown=shown)
        assert str(e.value).startswith(words) and type(e.value.__cause__) is RuntimeError


def test_a_message_names_arguments_as_the_function_does():
    def swapped(size, num_bytes): return 0
    for f, words in ((swapped, "for size = 96, num_bytes = 4: expected 144, got 0"), (lambda *a: 0, "for (96, 4): "), (lambda num_bytes, size=1, more=2: 0, "for num_bytes = 96, size = 4: "),
                     (lambda size: size, "for (96, 4): your code raised TypeError("), (max, "for (96, 4): expected 144, got 96")):
        with pytest.raises(AssertionError) as e: check_cases(f, lambda num_bytes, size: 2*(size - 1)*num_bytes//size, [(96, 4)], {})
        assert str(e.value).startswith(words), str(e.value)


@pytest.mark.parametrize("result, words", [
    (None, "expected 2, got None: is a return or yield missing? Printing a value doesn't return it"), ((i for i in [2]), "expected 2, got a generator"), (object(), "expected 2, got <object object>")])
def test_what_is_no_result_is_named(result, words):
    "Without a place in memory, which would differ each time."
    with pytest.raises(AssertionError) as e: check_cases(lambda x: result, lambda x: 2, [(1,)], {})
    assert str(e.value) == f"for x = 1: {words}"


@pytest.mark.parametrize("require, answer, words", [
    (require_function, int, "expected a function, got the class int"), (require_function, 3, "expected a function, got 3"),
    (require_class, fails, "expected a class, got the function fails"), (require_class, [1], "expected a class, got [1]")])
def test_functions_and_classes_are_told_apart(require, answer, words):
    with pytest.raises(AssertionError, match=f"^{re.escape(words)}$"): require(answer)
    require_function(len), require_class(int)


def test_ctrl_c_passes():
    def stop(): raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt): run_answer(stop)


RIGHT, WHY = dict(n=32_000, s=.5), dict(n={31_999: "is one too few"}, s={2: "is upside down", 2.001: "is the other"})


@pytest.mark.parametrize("answer, words", [
    (dict(n=31_999, s=.5), "n: 31,999 is one too few"), (dict(n=31_999., s=.5), "n: 31,999.0 is one too few"), (dict(n=1, s=.5), "n: 1 is too small"),
    (dict(n=10**6, s=.5), "n: 1,000,000 is too large"), (dict(n=32_000.5, s=.5), "n: 32,000.5 is not a whole number"),
    (dict(n=float("inf"), s=.5), "n: inf is not a whole number"), (dict(n=32_000, s=float("nan")), "s: nan is not a number"),
    (dict(n=32_000, s=float("-inf")), "s: -inf is too small"), (dict(n=True, s=.5), "n: True is not a number"), (dict(n="32000", s=.5), "n: '32000' is not a number"),
    (dict(n=None, s=.5), "n: None is not a number"), (dict(n=np.bool_(1), s=.5), "is not a number"), (dict(n=1j, s=.5), "n: 1j is not a number"),
    (dict(n=[32_000], s=.5), "n: [32000] is not a number"), (dict(n=np.arange(2), s=.5), "n: int64 [0, 1] is not a number"),
    (dict(n=32_000, s=Fraction(1, 3)), "s: 0.333"), (dict(n=32_000, s=2), "s: 2 is upside down"),
    (dict(n=32_000), "expected a dict with the keys n, s, got {'n': 32000}: s is missing"), (dict(n=32_000, s=.5, t=0), "'t' is not asked for"),
    ({}, "n is missing"), ([1, 2], "expected a dict with the keys n, s, got [1, 2]"), (None, "got None")])
def test_wrong_numbers(answer, words):
    with pytest.raises(AssertionError) as e: check_numbers(answer, RIGHT, WHY)
    assert words in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize("n", [32_000, 32_000., np.int32(32_000), np.array(32_000), torch.tensor(32_000), Fraction(32_000)])
def test_right_numbers(n): check_numbers(dict(s=.5, n=n), RIGHT, {})


def test_allowance():
    check_numbers(dict(n=32_000, s=.501), RIGHT, {}, rtol=.01)
    check_numbers(dict(n=32_000., s=.9), RIGHT, {}, atol=.5)
    for n, words in ((32_000.4, "n: 32,000.4 is not a whole number"), (32_001, "n: 32,001 is too large")):
        with pytest.raises(AssertionError, match=words): check_numbers(dict(n=n, s=.5), RIGHT, {}, rtol=.01)
    for s, words in ((2.0001, "upside down"), (2.0009, "the other"), (1.9, "is too large")):
        with pytest.raises(AssertionError, match=words): check_numbers(dict(n=32_000, s=s), RIGHT, WHY, rtol=.01)


@pytest.mark.parametrize("got, right, same", [
    ([10**6 + 1], [10**6], False), ([10**6], [10**6], True), ([1e6 + .4], [10**6], False), ([1e6], [10**6], True), ([1.0000001], [1.], True), ([1.00001], [1.], False),
    ([True, False], [True, False], True), ([True, True], [True, False], False), ([1], [True], False), ([math.nan], [math.nan], True)])
def test_whole_numbers_and_truths_in_arrays_are_compared_exactly(got, right, same): assert same_value(np.array(got), np.array(right)) is same


def test_a_number_beyond_every_float_is_wrong_and_nothing_more():
    assert not same_value(10**400, 1.5) and not same_value(1.5, 10**400) and same_value(10**400, 10**400)
    with pytest.raises(AssertionError, match="s: inf is too large"): check_numbers(dict(n=32_000, s=10**400), RIGHT, WHY, rtol=.1)
    with pytest.raises(AssertionError, match="n: inf is not a whole"): check_numbers(dict(n=10**5000, s=.5), RIGHT, WHY)


# The helper of the tests

@pytest.mark.parametrize("answer, ending", [
    (lambda v: sum(v)/(len(v) - 1), "expected 1.0, got 2.0: divide by n"), (max, "expected 1.0, got 2"), (lambda v: sum(v) if sum(v) > 5 else np.mean(v), "expected 3.0, got 9: that is the sum")])
def test_a_mistake_is_named_where_it_fits_half_of_the_cases(answer, ending):
    cases, mistakes = [([0, 2],), ([1, 2, 6],), ([3, 3],), ([4, 4],)], {"that is the sum": sum, "divide by n": lambda v: sum(v)/(len(v) - 1)}
    with pytest.raises(AssertionError, match=f"^for .*: {ending}$"): check_cases(answer, lambda v: sum(v)/len(v), cases, mistakes)


def one_grader(check): return SimpleNamespace(__name__="m", __all__=["check_a", "other"], check_a=check)


def is_one(x):
    if x != 1: raise AssertionError("that is not one")


class Quiet:
    def readouterr(self): return "", ""


def test_the_helper_of_the_tests_can_fail():
    noted = []
    record = lambda name, value: noted.append((name, value))
    wrong, right, each, same = Graders(one_grader(is_one), [("a", 2, "not one"), ("a", 3, "not one"), ("a", 4, "not one")], [("a", 1), ("a", 1.)]).tests()
    wrong("a", 2, "not one", Quiet(), record), right("a", 1, Quiet(), record), each(), same()
    with pytest.raises(pytest.fail.Exception): wrong("a", 1, "not one", Quiet(), record)
    with pytest.raises(AssertionError): wrong("a", 2, "other words", Quiet(), record)
    with pytest.raises(AssertionError): right("a", 2, Quiet(), record)
    with pytest.raises(AssertionError, match="2 wrong, 0 right"): Graders(one_grader(is_one), [("a", 2, ""), ("a", 3, "")], []).tests()[2]()
    with pytest.raises(AssertionError, match="there is no check_b"): Graders(one_grader(is_one), [("b", 2, "")], []).tests()[2]()
    def draws(x): np.random.rand()
    with pytest.raises(AssertionError): Graders(one_grader(draws), [], []).tests()[1]("a", 1, Quiet(), record)
    reports = [SimpleNamespace(user_properties=[note], passed=passed) for note, passed in zip(noted, (True, True, False, False, False, False))]
    assert list(score_lines(reports)) == ["m.check_a refuses 1 of 3 wrong answers, accepts 1 of 3 right ones"]


# All graders

TASKS = [t for t in exercise_tasks() if t.kind in ("Callable", "type")]
ELSEWHERE = {"02.flop_rate", "04.clipping", "04.accumulation", "04.training", "11.predict_best", "13.exact_line_deduplication", "13.minhash_deduplication"}  # These do more than return


@pytest.mark.parametrize("task", TASKS, ids=[t.id for t in TASKS])
def test_every_grader_knows_a_function_from_a_class_and_a_result_from_nothing(task):
    grade = getattr(importlib.import_module(f"lmcourse.exercises.{task.topic}"), f"check_{task.name}")
    def nothing(*args, **named): pass
    answers = [(nothing, "got the function nothing")]
    if task.kind == "Callable": answers = [(type("Answer", (), {}), "got the class Answer"), (nothing, "" if task.id in ELSEWHERE else "got None: is a return or yield missing?")]
    for answer, words in answers:
        with pytest.raises(AssertionError) as e: grade(answer)
        assert words in str(e.value) and "\n" not in str(e.value)
