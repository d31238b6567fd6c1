"""What the tests of all chapters' graders share: wrong answers are refused in the right words, right ones pass in silence.

In a test file of a chapter, with `WRONG` a list of (task, answer, words that the refusal must hold) and `RIGHT` one of (task, answer):

    from graders import Graders, fails
    graders = Graders(ex, WRONG, RIGHT)
    test_wrong_answers, test_right_answers, test_each_grader, test_same_words = graders.tests()

`pytest -s` prints how many wrong answers each grader refuses, and how many right ones it accepts.
"""
import random
import re
import sys
from collections import Counter

import numpy as np
import pytest


def fails(*args, **kwargs): raise RuntimeError("two\nlines")


def spoiled(right):
    "What no task takes: (answer, words)."
    return [(fails, "your code raised"), (lambda *a: None if right(*a) is not None else 0, "expected"), (lambda *a: str(right(*a)), "expected"),
            (lambda *a: [right(*a)], "expected"), (7, "expected a function"), (lambda: 0, "your code raised")]


def states():
    "Of the random generators that everybody shares: a grader must leave them as they are."
    torch = sys.modules.get("torch")
    return repr(random.getstate()), repr(np.random.get_state()), torch and torch.get_rng_state().numpy().tobytes()


class Graders:
    def __init__(self, module, wrong, right):
        self.module, self.wrong, self.right = module, list(wrong), list(right)
        self.tasks = [name.removeprefix("check_") for name in module.__all__ if name.startswith("check_")]

    def grade(self, task, answer): return getattr(self.module, f"check_{task}")(answer)

    def refused(self, task, answer):
        "The `AssertionError` that the grader raises."
        with pytest.raises(AssertionError) as e: self.grade(task, answer)
        return e.value

    def stops(self, task, as_class=False):
        "What the reader's code raises is kept as the cause, and Ctrl-C passes through."
        def stop(*args): raise KeyboardInterrupt
        fault, stop = (type("Answer", (), {"__init__": f}) if as_class else f for f in (fails, stop))
        assert type(self.refused(task, fault).__cause__) is RuntimeError
        with pytest.raises(KeyboardInterrupt): self.grade(task, stop)

    def tests(self, least_wrong=3, least_right=2):
        "Four test functions, to be bound to names that begin with `test_`."
        def note(record, task, kind): record("grader", (self.module.__name__, task, kind))

        @pytest.mark.parametrize("task, answer, words", self.wrong, ids=[f"{task}-{i}" for i, (task, *_) in enumerate(self.wrong)])
        def wrong(task, answer, words, capsys, record_property):
            note(record_property, task, "wrong")
            said = str(self.refused(task, answer))
            assert words in said, f"{words!r} is not in {said!r}"
            assert "\n" not in said and len(said) < 500, said
            assert capsys.readouterr() == ("", "")

        @pytest.mark.parametrize("task, answer", self.right, ids=[f"{task}-{i}" for i, (task, _) in enumerate(self.right)])
        def right(task, answer, capsys, record_property):
            note(record_property, task, "right")
            before = states()
            assert self.grade(task, answer) is None
            assert capsys.readouterr() == ("", "") and states() == before

        def each():
            wrong, right = (Counter(task for task, *_ in answers) for answers in (self.wrong, self.right))
            for task in dict.fromkeys([*wrong, *right, *self.tasks]):
                assert task in self.tasks, f"there is no check_{task}"
                assert wrong[task] >= least_wrong and right[task] >= least_right, f"{task}: {wrong[task]} wrong, {right[task]} right answers"

        def same():
            for task, answer in {task: answer for task, answer, _ in self.wrong}.items():
                first, second = (re.sub("0x[0-9a-f]+", "", str(self.refused(task, answer))) for _ in range(2))
                assert first == second
        return wrong, right, each, same


def score_lines(reports):
    "One line a grader, from (test report) objects that carry the property `grader`."
    score = {}
    for report in reports:
        for name, value in report.user_properties:
            if name == "grader": score.setdefault(tuple(value[:2]), Counter()).update([value[2], (value[2], report.passed)])
    for (module, task), n in score.items():
        yield (f"{module}.check_{task} refuses {n['wrong', True]} of {n['wrong']} wrong answers, "
               f"accepts {n['right', True]} of {n['right']} right ones")
