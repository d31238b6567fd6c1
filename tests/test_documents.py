"Corpora by name, and the n-grams beside them."
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcourse.tools.documents import documents, split_text
from lmcourse.tools.ngram import ngram_losses


@given(st.lists(st.sampled_from(["<|endoftext|>", "\n", " ", "a", "é", "bc"])).map("".join))
def test_the_two_parts_of_a_text_are_the_text(text):
    parts = [d for split in ("train", "valid") for d in split_text(text, split)]
    assert all(d.strip() and "<|endoftext|>" not in d for d in parts)
    assert "".join("".join(parts).split()) == "".join(text.replace("<|endoftext|>", "").split())


@pytest.mark.parametrize("most", [1, 5, 6, 7, 50, 99, 10_000])
def test_a_text_is_not_longer_than_asked_for(tmp_path, most):
    (tmp_path/"book.txt").write_text("\u00e9t\u00e9 un\n"*30 + "<|endoftext|>" + "\u00e9t\u00e9 deux\n"*30, encoding="utf-8")
    name = f"text:{tmp_path}/book.txt"
    whole, part = ("".join(documents(name, max_bytes=m)) for m in (None, most))
    assert whole.startswith(part) and len(part.encode()) <= most
    if most > 9: assert part == whole or part.endswith("\n") and len(part.encode()) > most - 12


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
