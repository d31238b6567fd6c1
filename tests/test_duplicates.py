"Exact and near duplicates: fast equals slow on any text, the order of the input changes nothing, files are written whole."
import hashlib
import subprocess
import sys
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcourse.curation.exact import BloomFilter, document_hash, drop_repeats, exact_duplicates, exact_line_deduplication, normalize
from lmcourse.curation.minhash import (
    MinHash, band_keys, candidate_probability, candidates, cluster, distinct, candidate_groups, minhash, minhash_deduplication, minhash_naive, near_duplicates,
    near_duplicates_naive, shingle_hashes)
from lmcourse.tools.stories import Stories

# Words of few letters, so that there are many duplicates, and texts of any characters
SMALL = st.lists(st.lists(st.sampled_from(["a", "b", "c", "É", "e", "."]), max_size=9).map(" ".join), max_size=9)
ANY = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@given(ANY)
def test_normalizing_twice_changes_nothing(text):
    once = normalize(text)
    assert normalize(once) == once == once.strip() and "  " not in once and document_hash(text) == document_hash(once)


@settings(max_examples=60, deadline=None)
@given(st.lists(ANY, max_size=4), st.integers(1, 4), st.integers(0, 3))
def test_signatures_are_bit_equal(texts, ngram, seed):
    config = MinHash(ngram=ngram, hashes=5, bands=1, rows=1, seed=seed)
    assert minhash(texts, config).tolist() == [minhash_naive(t, config).tolist() for t in texts]


@settings(max_examples=60, deadline=None)
@given(SMALL, st.sampled_from([MinHash(1, 12, 4, 3, .5), MinHash(2, 12, 12, 1, .3), MinHash(2, 7, 2, 3, 1.), MinHash(3, 4, 1, 4, .01)]), st.randoms())
def test_clusters_are_those_of_the_slow_way_in_any_order(texts, config, random):
    found = near_duplicates(texts, config).tolist()
    assert found == near_duplicates_naive(texts, config) and all(found[i] == i for i in found)
    order = list(range(len(texts)))
    random.shuffle(order)
    turned = near_duplicates([texts[i] for i in order], config).tolist()
    def groups(first, names): return sorted(sorted(names[i] for i in range(len(first)) if first[i] == f) for f in set(first))
    assert groups(turned, order) == groups(found, list(range(len(texts))))


def test_a_stranger_is_no_candidate():
    texts = list(islice(Stories(seed=81), 30))
    keys = band_keys(minhash([*texts, texts[3]], MinHash()), MinHash())
    assert candidates(keys).tolist() == [3, 30]


def test_signatures_are_the_same_in_another_process():
    "No salt of Python's, no order of a set"
    code = "from lmcourse.curation.minhash import *; import hashlib; print(hashlib.sha256(minhash(['a red kite in the park', 'Crème'], MinHash()).tobytes()).hexdigest())"
    here = hashlib.sha256(minhash(["a red kite in the park", "Crème"], MinHash()).tobytes()).hexdigest()
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == here


def test_files(tmp_path):
    one, two = islice(Stories(seed=83), 2)
    for name, text in (("b.txt", one), ("c.txt", one + " The end."), ("a.txt", two), ("d.txt", "")): (tmp_path / name).write_text(text, encoding="utf-8")
    for order in (1, -1):
        out = tmp_path / f"out{order}"
        minhash_deduplication(sorted(tmp_path.glob("*.txt"))[::order], 100, 20, 5, .8, out)
        assert {p.name: p.read_text(encoding="utf-8") for p in out.iterdir()} == {"a.txt": two, "b.txt": one, "d.txt": ""}
    minhash_deduplication(sorted(tmp_path.glob("*.txt")), 100, 20, 5, 1., out)                      # Then c is no duplicate
    assert len([*out.iterdir()]) == 4
    minhash_deduplication(sorted(tmp_path.glob("*.txt")), 100, 20, 5, .8, out)
    assert {p.name for p in out.iterdir()} == {"a.txt", "b.txt", "d.txt"}
    with pytest.raises(ValueError, match="the folder of the input files, expected another"): minhash_deduplication([tmp_path/"b.txt"], 100, 20, 5, .8, tmp_path/"out1"/"..")


def test_lines_are_counted_over_all_files_and_kept_as_they_are(tmp_path):
    for name, data in (("a", b"one\r\ntwo\nthree"), ("b", b"two\r\n\xff\nfour\n"), ("c", b"")): (tmp_path / name).write_bytes(data)
    exact_line_deduplication([tmp_path / n for n in "abc"], tmp_path / "out")
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == {"a": b"one\r\nthree", "b": b"\xff\nfour\n", "c": b""}
    exact_line_deduplication([tmp_path / n for n in "abc"], tmp_path)       # In place
    assert (tmp_path / "a").read_bytes() == b"one\r\nthree"


@settings(max_examples=80, deadline=None)
@given(st.lists(st.text("abé", max_size=8), max_size=4), st.integers(1, 4))
def test_repeats_are_those_of_the_definition(texts, k):
    seen, kept = set(), []
    for text in texts:
        cut = set()
        for i in range(len(text) - k + 1):
            if text[i:i + k] in seen: cut |= set(range(i, i + k))
            seen.add(text[i:i + k])
        kept.append("".join(c for i, c in enumerate(text) if i not in cut))
    assert drop_repeats(texts, k) == kept


def test_what_was_added_is_found():
    bloom = BloomFilter(300, .001)
    for i in range(300): bloom.add(f"é{i}")
    assert all(f"é{i}" in bloom for i in range(300)) and .4 < bloom.fill() < .6


def test_copies_point_to_the_first(): assert exact_duplicates(["", "A.", "b", "a", "", "B!"]) == [0, 1, 2, 1, 4, 2]


@pytest.mark.parametrize("s", [0., .37, 1.])
def test_one_band_of_one_row_is_the_similarity(s): assert np.isclose(candidate_probability(s, 1, 1), s)


@pytest.mark.parametrize("most", [1, 7, 10_000])
def test_groups_that_met_are_compared_one_after_another(most):
    rng = np.random.default_rng(most)
    words = [f"w{i}" for i in range(300)]
    texts = [" ".join(rng.choice(words, 40)) for _ in range(60)]
    for i in range(60, 110):
        copy = texts[int(rng.integers(len(texts)))].split()
        copy[int(rng.integers(len(copy)))] = "other"
        texts.append(" ".join(copy))
    config = MinHash()
    keys = band_keys(minhash(texts, config), config)
    groups = candidate_groups(keys, most)
    assert sorted(i for g in groups for i in g.tolist()) == candidates(keys).tolist() and all((np.diff(g) > 0).all() for g in groups)
    assert all(len(g) <= most or len(candidate_groups(keys[g], 1)) == 1 for g in groups)        # More only in a single group
    met = [{(band, k) for i in g.tolist() for band, k in enumerate(keys[i].tolist())} for g in groups]
    assert all(not a & b for n, a in enumerate(met) for b in met[:n]) and len(groups) > {1: 9, 7: 4, 10_000: 0}[most]
    first = np.arange(len(texts))
    for g in groups: first[g] = g[cluster(keys[g], *distinct(*shingle_hashes([texts[i] for i in g], config.ngram)), config.threshold)[0]]
    assert first.tolist() == near_duplicates(texts, config).tolist()


def test_arrays_hold_at_most_what_was_asked_for():
    keys = np.repeat(np.arange(7, dtype=np.uint64), 6)[:, None]
    assert [len(g) for g in candidate_groups(keys, 10)] == [6]*7 and [len(g) for g in candidate_groups(keys, 12)] == [12]*3 + [6]


def test_no_meetings(): assert candidate_groups(np.arange(6, dtype=np.uint64).reshape(3, 2)) == [] == candidate_groups(np.zeros((0, 2), np.uint64))
