"Kneser-Ney sums to one and equals the course's n-grams; AUC equals the count of pairs; weights equal likelihood ratios; classifiers find planted classes on webs that no page has shown."
import math
import random

import numpy as np
import pytest

from lmcourse.curation.language import char_ngrams
from lmcourse.curation.quality import (KneserNey, auc, bag_log_probs, classify_nsfw, classify_quality, classify_toxic_speech, dsir_log_weights, gumbel_top_k, word_ngrams)
from lmcourse.curation.web import planted_web
from lmcourse.tools.checks import check_close, expect_error
from lmcourse.tools.ngram import ngram_losses
from lmcourse.tools.stories import Stories


@pytest.fixture(scope="module")
def stories():
    source = Stories(77)
    return [next(source) for _ in range(80)]


@pytest.mark.parametrize("order", [1, 2, 3, 5])
@pytest.mark.parametrize("least", [1, 2])
def test_probabilities_sum_to_one(order, least, stories):
    model = KneserNey(stories[:20], order, least)
    words = sorted(model.words)
    rng = random.Random(order)
    for _ in range(8):
        context = tuple(rng.choice([*words, "never"]) for _ in range(order - 1))
        check_close(sum(model.prob(context, w) for w in words), 1., 1e-10)
        assert all(model.prob(context, w) > 0 for w in words[:50])


def test_all_short_texts_together_have_a_probability_below_one():
    "The spelling of unknown words included: of one byte each, and none that is white space."
    model = KneserNey(["a b", "b a a", "b"], 3, 1)
    letters = [w for w in map(chr, range(1, 128)) if len(f"x{w}x".split()) == 1]
    ones = sum(math.exp(model.log_prob(w)) for w in letters)
    twos = sum(math.exp(model.log_prob(f"{v} {w}")) for v in ("a", "b", "c", "\1") for w in letters)
    assert .1 < math.exp(model.log_prob("")) + ones + twos < 1


@pytest.mark.parametrize("order", [1, 2, 4, 5])
def test_equal_to_the_n_grams_of_the_course(order, stories):
    model = KneserNey(stories[:40], order, 1)
    codes = {w: i for i, w in enumerate(sorted(model.words))}
    read, judged = ([np.array([codes[w] for w in model.tokens(t)]) for t in part] for part in (stories[:40], stories[40:60]))
    losses = ngram_losses(np.concatenate(read), np.concatenate(judged), len(codes), codes["\n"], order)[-1]
    spelt = [sum((len(w.encode()) + 1)*math.log(256) for w in t.split() if w not in model.known) for t in stories[40:60]]
    per_text = np.add.reduceat(losses, np.cumsum([0, *map(len, judged[:-1])])) + spelt
    check_close(np.array([-model.log_prob(t) for t in stories[40:60]]), per_text, 1e-9)


def test_no_model_beats_the_grammar(stories):
    grammar = Stories()
    exact = sum(grammar.log_prob(t) for t in stories[60:])
    losses = [sum(KneserNey(stories[:n], order).log_prob(t) for t in stories[60:]) for n, order in ((10, 5), (60, 1), (60, 5))]
    assert all(x < exact for x in losses) and losses[2] > losses[0] and losses[2] > losses[1]


def test_marks_in_a_text_are_unknown_words():
    model = KneserNey(["a b", "\0 a"], 2, 1)
    assert "\0" not in model.known and model.log_prob("\0") < math.log(model.prob(("\n",), "\0"))


@pytest.mark.parametrize("seed", range(5))
def test_auc_is_the_count_of_pairs(seed):
    rng = np.random.default_rng(seed)
    s, w = rng.integers(0, 6, 40), rng.random(40) < .3
    pairs = float(np.mean([(a > b) + .5*(a == b) for a in s[w] for b in s[~w]]))
    check_close(auc(s, w), pairs, 1e-12)
    check_close(auc(-s, w), 1 - pairs, 1e-12)
    check_close(auc(np.exp(s/2), w), pairs, 1e-12)
    check_close(auc(s, ~w), 1 - pairs, 1e-12)


def test_weights_are_likelihood_ratios():
    p, q = dict(a=.5, b=.25, c=.25), dict(a=.125, b=.125, c=.75)
    target, raw = (bag_log_probs([" ".join(k for k, v in x.items() for _ in range(int(8*v)))], str.split, 1 << 14, 0) for x in (p, q))
    both = np.isfinite(target)
    assert both.sum() == 3
    target, raw = np.where(both, target, 0), np.where(both, raw, 0)
    for text in ("a", "a b c", "c c c", "", "b a b a a"):
        ratio = float(math.prod(p[w]/q[w] for w in text.split()))
        check_close(float(np.exp(dsir_log_weights([text], target, raw, str.split)[0])), ratio, 1e-12)


def test_smoothed_counts_are_a_distribution(stories):
    for smoothing in (1e-3, 1., 5.):
        check_close(float(np.exp(bag_log_probs(stories[:5], word_ngrams, 500, smoothing)).sum()), 1., 1e-10)
    assert (bag_log_probs([], word_ngrams, 4) == math.log(1/4)).all()


def test_drawing_follows_weights_and_puts_nothing_back():
    rng, weights, n = np.random.default_rng(1), np.array([1., 3., 6.]), 6000
    pairs = np.zeros((3, 3))
    for _ in range(n):
        i, j = gumbel_top_k(np.log(weights), 2, rng)
        pairs[i, j] += 1
    for i in range(3):
        for j in range(3):
            p = 0 if i == j else weights[i]/10*weights[j]/(10 - weights[i])
            assert abs(pairs[i, j]/n - p) < 4*(p*(1 - p)/n)**.5 + 1e-12
    with expect_error(ValueError, "k = 9 of 3"): gumbel_top_k(weights, 9, rng)


@pytest.mark.parametrize("text, longest, grams", [("The cat's hat.", 2, ["the", "cat's", "hat", "the cat's", "cat's hat"]), ("", 3, []), ("A, a; A!", 1, ["a", "a", "a"]), ("x", 3, ["x"])])
def test_word_grams(text, longest, grams): assert word_ngrams(text, longest) == grams


@pytest.mark.parametrize("classify, kind, yes, no", [(classify_quality, "spam", "low", "high"), (classify_nsfw, "nsfw", "nsfw", "non-nsfw"), (classify_toxic_speech, "toxic", "toxic", "non-toxic")])
def test_classifiers_find_planted_pages_that_they_have_not_seen(classify, kind, yes, no):
    pages = planted_web(60, seed=41, shares={"story": 1, kind: 1})
    answers = [classify(p.text) for p in pages]
    assert {label for label, _ in answers} <= {yes, no} and all(.5 <= p <= 1 for _, p in answers)
    assert auc([p if label == yes else 1 - p for label, p in answers], [p.kind == kind for p in pages]) > .99
    assert np.mean([label == (yes if p.kind == kind else no) for (label, _), p in zip(answers, pages)]) > .9


def test_what_is_rejected():
    for bad, words in ((lambda: KneserNey(["", " "]), "2 texts, expected 1 or more with words"), (lambda: auc([1.], [1, 0]), "1 scores"), (lambda: auc([1., 2.], [0, 0]), "expected both kinds"),
                       (lambda: bag_log_probs(["", " "], char_ngrams, smoothing=0), "without a gram")):
        with expect_error(ValueError, words): bad()
