"Hashed grams, softmax regression and thresholds: equal to slow versions, the same in every process, right on sentences and pages that were not learnt from."
import os
import random
import subprocess
import sys

import numpy as np
import pytest

from lmcourse.curation.language import TextClassifier, best_threshold, char_ngrams, hashed_vector, identify_language, language_model
from lmcourse.curation.web import fill, language_sentences, planted_web
from lmcourse.tools.checks import check_close, expect_error
from lmcourse.tools.stories import Stories


@pytest.mark.parametrize("text, longest, grams", [("ab", 1, "_ a b _"), ("ab", 2, "_ a b _ _a ab b_"), ("A b", 9, "_ a _ _a a_ _a_ _ b _ _b b_ _b_"), ("", 4, "")])
def test_grams(text, longest, grams): assert char_ngrams(text, longest) == grams.split()


def test_a_vector_marks_each_bucket_once():
    for n in (0, 1, 5, 300):
        grams = [f"g{i}" for i in range(n)]
        v = hashed_vector(grams*2, 64)
        assert v.shape == (64,) and ((v > 0).sum() <= min(n, 64)) and len(set(v[v > 0])) <= 1
        check_close(float(v@v), float(n > 0), 1e-12)


def test_hashing_is_the_same_in_every_process():
    "Python's own hash would differ: another seed of it in another process."
    script = "from lmcourse.curation.language import char_ngrams, hashed_vector; print(hashed_vector(char_ngrams('Une petite maison'), 999).nonzero()[0].tolist())"
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=os.environ | {"PYTHONHASHSEED": "7"}).stdout
    assert other.strip() == str(hashed_vector(char_ngrams("Une petite maison"), 999).nonzero()[0].tolist())


def test_fitting_is_at_the_optimum_and_order_does_not_matter():
    texts, labels = ["aa ab", "ba bb", "ab ab a", "b", "c ca"], list("xyxyz")
    one = TextClassifier("xyz", buckets=128).fit(texts, labels, steps=2000, decay=.01)
    two = TextClassifier("xyz", buckets=128).fit(texts[::-1], labels[::-1], steps=2000, decay=.01)
    check_close(one.weights, two.weights, 1e-6, 1e-8)
    probs = one.probs(texts)
    target = np.array([[k == label for k in "xyz"] for label in labels], float)
    check_close(one.inputs(texts).T@(probs - target)/5 + .01*one.weights, np.zeros_like(one.weights), 0, 1e-6)


def test_many_texts_at_once_are_as_one_by_one():
    texts = [fill(t, random.Random(1)) for v in language_sentences().values() for t in v][::6]
    model = language_model()
    check_close(model.probs(texts), np.concatenate([model.probs([t]) for t in texts]), 1e-9)
    for t in texts[:5]:
        label, p = model(t)
        assert label == model.labels[model.probs([t])[0].argmax()] and p == model.probs([t])[0].max()


def test_sentences_and_pages_that_were_not_learnt():
    rng, right, n = random.Random(3), 0, 0
    for language, templates in language_sentences().items():
        for t in templates[1::2]: right, n = right + (identify_language(fill(t, rng))[0] == language), n + 1
    assert right/n > .95
    pages = [p for p in planted_web(300, seed=31, shares=dict(story=1, foreign=2)) if p.text]
    assert np.mean([identify_language(p.text)[0] == p.language for p in pages]) >= .99
    stories = Stories(99)
    assert all(identify_language(next(stories))[0] == "en" for _ in range(50))


@pytest.mark.parametrize("text", ["", " ", "123 456", "日本語のページ", "\0\0", "€"*1000])
def test_any_text_gets_an_answer_with_a_probability(text):
    label, p = identify_language(text)
    assert label in language_sentences() and 1/8 <= p <= 1


def test_thresholds_are_the_best_and_in_the_middle():
    rng = np.random.default_rng(0)
    for _ in range(200):
        s, ok = rng.integers(0, 8, 15)/7, rng.random(15) < .4
        if ok.all() or not ok.any(): continue
        tries = [((s >= c) != ok).sum() for c in np.r_[np.unique(s), 2]]
        t = best_threshold(s, ok)
        assert ((s >= t) != ok).sum() == min(tries) and not np.isclose(s, t).any()
    check_close(best_threshold(np.array([0., .2, .8, 1.]), np.array([False, False, True, True])), .5)
    with expect_error(ValueError, "expected both kinds"): best_threshold(np.ones(3), np.zeros(3, bool))


def test_babels_names_of_territories():
    "Hard: two words at most. Far above one in eight."
    babel = pytest.importorskip("babel")
    names = {k: babel.Locale(k).territories for k in language_sentences()}
    exam = [(k, n) for k in names for c, n in names[k].items() if len(c) == 2 and sum(names[o].get(c) == n for o in names) == 1]
    got = language_model().probs([n for _, n in exam]).argmax(1)
    assert np.mean([language_model().labels[i] == k for i, (k, _) in zip(got, exam)]) > .4
