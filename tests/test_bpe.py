"Properties of the trainers and of `encode_word` over many random texts."
from collections import Counter

import pytest
from hypothesis import given, settings, strategies as st

from lmcourse.tokenization.bpe import (best_pair, count_words, encode_word, merge_pair, pretokenize, special_list, special_pattern,
                                       train_bpe, train_bpe_slow, utf8)

END = "<|endoftext|>"
TEXT = st.text(st.sampled_from("aab bc'é好🙂\n1!") | st.characters(codec="utf-8"), max_size=60)


def pairs_left(merges, words):
    return any(len(encode_word(w, {p: r for r, p in enumerate(merges)})) > 1 for w in words)


@settings(max_examples=200, deadline=None)
@given(st.lists(TEXT, max_size=5), st.integers(0, 40))
def test_both_trainers_are_one_function(texts, n):
    try: expected = train_bpe_slow(texts, 257 + n)
    except ValueError as e:
        with pytest.raises(ValueError) as fast: train_bpe(texts, 257 + n)
        assert str(fast.value) == str(e)
        return
    assert train_bpe(texts, 257 + n) == expected
    assert len(set(expected[0].values())) == 257 + n


@settings(max_examples=100, deadline=None)
@given(st.text("ab", min_size=2, max_size=200), st.integers(1, 20))
def test_trainers_agree_where_pairs_overlap_and_tie(letters, n):
    texts = [letters, letters[::-1], " ".join(letters[i:i+7] for i in range(0, len(letters), 7))]
    results = []
    for f in (train_bpe, train_bpe_slow):
        try: results.append(f(texts, 257 + n))
        except ValueError as e: results.append(str(e))
    assert results[0] == results[1]


@settings(max_examples=100, deadline=None)
@given(st.lists(TEXT, min_size=1, max_size=4), st.text("aab bc", max_size=30))
def test_encode_word_applies_the_merges_in_order(texts, other):
    words = count_words(texts)
    if not any(len(w) > 1 for w in words): return
    for n in range(60, -1, -1):
        try: vocab, merges = train_bpe(texts, 256 + n, ()); break
        except ValueError: pass
    ranks = {p: r for r, p in enumerate(merges)}
    for word in [*words, other.encode()]:
        parts = [bytes([b]) for b in word]
        for pair in merges: parts = merge_pair(parts, pair)
        assert encode_word(word, ranks) == parts and b"".join(parts) == word


def test_ids_are_special_tokens_then_bytes_then_merges():
    vocab, merges = train_bpe(["ten tents then tend the tent"], 264, [END, "<|pad|>"])
    assert list(vocab) == list(range(264))
    assert [vocab[0], vocab[1]] == [END.encode(), b"<|pad|>"]
    assert [vocab[2 + i] for i in range(256)] == [bytes([i]) for i in range(256)]
    assert [vocab[258 + i] for i in range(6)] == [a + b for a, b in merges]


def test_ties_go_to_the_greatest_pair_of_byte_strings():
    assert train_bpe(["ab xy"], 258)[1] == [(b"x", b"y")]
    assert train_bpe(["ab ac"], 258, ())[1][0] == (b"a", b"c")
    assert best_pair({(b"ab", b"a"): 1, (b"a", b"z"): 1, (b"ab", b""): 1}) == (b"ab", b"a")
    # by bytes and not by ids: `é` is 0xC3 0xA9 and beats `zz`, and a token made late does not win by its id
    assert train_bpe(["zz é"], 257, ())[1] == [(b"\xc3", b"\xa9")]
    # after `ab`, which is id 256, comes `zc` and not `abc`, although 256 is more than 122
    assert train_bpe(["ab ab ab abc zc".replace(" ", "\n")], 258, ())[1] == [(b"a", b"b"), (b"z", b"c")]


def test_no_merge_crosses_a_special_token_or_a_word():
    docs = [f"ab{END}ab{END}", f"{END}ab"]
    assert train_bpe(docs, 258) == train_bpe(["ab", "ab", "ab"], 258)
    assert count_words(docs, [END]) == Counter({b"ab": 3})
    assert all(pair != (b"b", b"<") for pair in train_bpe([f"ab{END}"*9], 258)[1])
    with pytest.raises(ValueError, match="pairs for 0 merges and not for 1: vocab_size can be at most 257"): train_bpe(["a.b.c"], 258)


def test_longest_special_token_wins():
    assert special_pattern(["<a>", "<a><a>", "<a>b"]).split("<a><a>x<a>b") == ["", "<a><a>", "x", "<a>b", ""]
    assert special_pattern(["a|b", "."]).split("xa|b.y") == ["x", "a|b", "", ".", "y"]
    assert special_pattern(None).split("a") == special_pattern([]).split("a") == ["a"]


@settings(deadline=None)
@given(TEXT)
def test_pretokens_are_the_text(text):
    assert "".join(pretokenize(text)) == text


def test_texts_may_come_from_a_generator():
    assert train_bpe((t for t in ["ten", "tents"]), 259) == train_bpe(["ten", "tents"], 259)


@pytest.mark.parametrize("size, special, words", [
    (256, [END], "vocab_size = 256, expected at least 257"), (255, [], "expected at least 256"), (-1, [], "expected at least 256"),
    (400, [END], "pairs for 10 merges and not for 143: vocab_size can be at most 267"),
    (300, [""], "a special token is empty"), (300, [END, END], "given twice"), (300, ["a"], "single byte"), (300, ["\ud800"], "surrogate")])
def test_values_that_make_no_sense(size, special, words):
    for f in (train_bpe, train_bpe_slow):
        with pytest.raises(ValueError, match=words): f(["ten tents then tend the tent"], size, special)


@pytest.mark.parametrize("texts, size, special, words", [
    ("ten tents", 300, [END], r"expected an iterable of them: \[text\]"), (["ten", b"tents"], 300, [END], "text 1 is a bytes"),
    (["ten"], 300., [END], "vocab_size = 300.0, expected an int"), (["ten"], True, [END], "expected an int"), (["ten"], "300", [END], "expected an int"),
    (["ten"], 300, END, "expected a list of strings"), (["ten"], 300, [1], "special token 1 is a int")])
def test_types_that_make_no_sense(texts, size, special, words):
    for f in (train_bpe, train_bpe_slow):
        with pytest.raises(TypeError, match=words): f(texts, size, special)


def test_an_empty_corpus_has_no_merges():
    assert train_bpe([], 257) == ({0: END.encode(), **{i + 1: bytes([i]) for i in range(256)}}, [])
    with pytest.raises(ValueError, match="vocab_size can be at most 257"): train_bpe(["", ""], 258)


def test_half_of_a_surrogate_pair_is_refused():
    with pytest.raises(ValueError, match="half of a surrogate pair"): train_bpe(["a\ud800"], 257)
    assert utf8("é") == b"\xc3\xa9" and special_list(None) == []
