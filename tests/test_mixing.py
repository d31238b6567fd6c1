"Decontamination and mixing: equal to the definition on any text; no source is ahead by more than a document; every epoch reads each document once."
from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcourse.curation.exact import normalize
from lmcourse.curation.minhash import shingles
from lmcourse.curation.mixing import contamination, decontaminate, effective_tokens, mix

WORDS = st.lists(st.sampled_from("abcÉ"), min_size=1, max_size=8).map(" ".join)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.one_of(WORDS, st.just("...")), max_size=5), st.lists(WORDS, min_size=1, max_size=4), st.integers(1, 5))
def test_containment_is_that_of_sets(documents, tests, n):
    shares, which = contamination(documents, tests, n)
    for d, share, w in zip(documents, shares, which):
        found = []
        for t in tests:
            k = min(n, len(normalize(t).split()))
            found.append(len(shingles(t, k) & shingles(d, k)) / len(shingles(t, k)))
        assert np.isclose(share, max(found)) and np.isclose(found[w], max(found)) | (share == 0)
    assert decontaminate(documents, tests, n, 1.).tolist() == [s < 1 for s in shares]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=6), min_size=1, max_size=4), st.lists(st.integers(0, 9), min_size=4, max_size=4),
       st.integers(1, 400), st.integers(0, 3))
def test_no_source_is_ahead_by_more_than_a_document(sizes, weights, tokens, seed):
    weights = [w + (k == 0) for k, w in enumerate(weights[:len(sizes)])]
    shares = {f"s{k}": w / sum(weights) for k, w in enumerate(weights)}
    named = {f"s{k}": s for k, s in enumerate(sizes)}
    order, longest, taken = mix(named, shares, tokens, seed), max(map(max, sizes)), Counter()
    for name, i in order:
        assert sum(taken.values()) < tokens
        taken[name] += named[name][i]
        total = sum(taken.values())
        assert all(taken[n] - shares[n] * total <= longest + 1e-6 for n in shares)
    assert sum(taken.values()) >= tokens
    for name, docs in named.items():
        times = Counter(i for n, i in order if n == name)
        counts = [times[i] for i in range(len(docs))]
        assert max(counts) - min(counts) <= 1


def test_repetition_is_worth_less_each_time():
    worth = [effective_tokens(1, e) for e in range(1, 60)]
    gains = np.diff(worth)
    assert worth[0] == 1 and (gains > 0).all() and (np.diff(gains) < 0).all() and gains[0] < 1
