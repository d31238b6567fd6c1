"Corpora by name, and the n-grams beside them."
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcourse.tools.documents import documents, split_text
from lmcourse.tools.ngram import ngram_losses


@given(st.text())
def test_the_two_parts_of_a_text_are_the_text(text):
    parts = [split_text(text, split) for split in ("train", "valid")]
    joined = "".join(d for part in parts for d in part)
    assert joined.replace("\n", "").strip() in text.replace("\n", "") or "<|endoftext|>" in text


def test_a_line_is_never_cut(tmp_path):
    (tmp_path/"book.txt").write_text("".join(f"line {i}\n" for i in range(100)))
    train, valid = ("".join(documents(f"text:{tmp_path}/book.txt", s)) for s in ("train", "valid"))
    assert train.endswith("\n") and valid.startswith("line ") and len(valid) < len(train)/5


def test_training_and_validation_stories_differ():
    train, valid = (set(documents("stories", s, 500_000)) for s in ("train", "valid"))
    assert len(train) > 500 and not train & valid


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.lists(st.integers(0, 3), max_size=6), st.integers(1, 4))
def test_ngram_probabilities_add_up_to_one(train, prefix, order):
    ends = np.concatenate([[0, *prefix, w] for w in range(4)])
    losses = ngram_losses(np.array([*train, 0]), ends, 4, 0, order)
    assert np.allclose(np.exp(-losses).reshape(order, 4, -1)[:, :, -1].sum(1), 1)


def test_an_ngram_knows_what_always_follows():
    losses = ngram_losses(np.tile([1, 2, 3, 0], 500), np.array([1, 2, 3, 0]), 4, 0, 3)
    assert (losses[1:] < 0.02).all() and (losses[0] > 1).all()


def test_bad_ids_are_refused():
    with pytest.raises(ValueError, match="ids from -1 to 1, expected 0 to 3"): ngram_losses(np.array([1, -1]), np.array([0]), 4, 0)
