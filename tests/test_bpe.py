"Properties of the learners, of numbering and of `encode_word` over many random texts, and the facts of the pre-tokenizer."
import random
from collections import Counter
from unicodedata import normalize

import pytest
import regex
from hypothesis import given, settings, strategies as st

from lmcourse.tokenization.bpe import HeapEntry, PairIndex, best_pair, count_pairs, count_words
from lmcourse.tokenization.bpe import train_bpe_counted, train_bpe_heap, train_bpe_indexed, train_bpe_naive
from lmcourse.tokenization.bpe import merge_pair, pretokenize, special_list, special_pattern
from lmcourse.tokenization.bpe import split_bytes
from lmcourse.tokenization.encoding import byte_alphabet, encode_word, make_vocab, merges_wanted
from lmcourse.tokenization.unicode import utf8

END = "<|endoftext|>"
TEXT = st.text(st.sampled_from("aab bc'é好🙂\n1!") | st.characters(codec="utf-8"), max_size=60)
SMALL = st.lists(st.sampled_from([b"a", b"b", b"\0", b"\xff"]), max_size=9).map(b"".join)
COUNTS = st.dictionaries(SMALL, st.integers(1, 4), max_size=8)
LEARNERS = [train_bpe_naive, train_bpe_counted, train_bpe_indexed, train_bpe_heap]
TEN = ["ten tents then tend the tent"]

learners = pytest.mark.parametrize("learn", LEARNERS, ids=lambda f: f.__name__)


def run(learn, counts, n):
    "Any of the learners on the same words."
    return learn([w for w, k in counts.items() for _ in range(k)] if learn is train_bpe_naive else counts, n)


def oracle(counts, n):
    "BPE once more, with none of the functions that are tested: a word is a list of (start, end)."
    merges, words = [], [[[(i, i + 1) for i in range(len(w))], w, k] for w, k in counts.items()]
    while len(merges) < n:
        found = {}
        for spans, w, k in words:
            for (a, b), (_, c) in zip(spans, spans[1:]): found[w[a:b], w[b:c]] = found.get((w[a:b], w[b:c]), 0) + k
        if not found: break
        merges.append(max(found, key=lambda pair: (found[pair], pair)))
        for word in words:
            spans, w, _ = word
            word[0], joined = [], False
            for here, after in zip(spans, spans[1:] + [None]):
                if joined: joined = False
                elif after and (w[slice(*here)], w[slice(*after)]) == merges[-1]: word[0].append((here[0], after[1])); joined = True
                else: word[0].append(here)
    return merges


# The learners

@settings(max_examples=150, deadline=None)
@given(COUNTS, st.integers(0, 30))
def test_all_learners_are_one_function(counts, n):
    expected = oracle(counts, n)
    for learn in LEARNERS: assert run(learn, counts, n) == expected, learn.__name__


@settings(max_examples=100, deadline=None)
@given(st.lists(TEXT, max_size=5), st.integers(0, 60))
def test_learners_agree_on_texts(texts, n):
    counts = count_words(texts)
    expected = oracle(counts, n)
    for learn in LEARNERS: assert run(learn, counts, n) == expected, learn.__name__
    assert len({a + b for a, b in expected}) == len(expected)


@settings(max_examples=60, deadline=None)
@given(st.text("ab", min_size=2, max_size=200), st.integers(1, 40))
def test_learners_agree_where_pairs_overlap_and_tie(letters, n):
    counts = count_words([letters, letters[::-1], " ".join(letters[i:i+7] for i in range(0, len(letters), 7))])
    expected = oracle(counts, n)
    for learn in LEARNERS: assert run(learn, counts, n) == expected, learn.__name__


@settings(max_examples=60, deadline=None)
@given(COUNTS, st.randoms(use_true_random=False), st.integers(1, 30))
def test_the_order_of_words_does_not_matter(counts, rng, n):
    shuffled = dict(rng.sample(list(counts.items()), len(counts)))
    for learn in LEARNERS: assert run(learn, shuffled, n) == run(learn, counts, n)


def test_learners_agree_on_many_merges():
    "Long enough for counts in the heap to grow stale more than once."
    rng = random.Random(1)
    counts = Counter(bytes(rng.choices(b"aaabbcde", k=rng.randint(1, 12))) for _ in range(600))
    merges = train_bpe_counted(counts, 200)
    assert train_bpe_indexed(counts, 200) == train_bpe_heap(counts, 200) == merges and len(merges) == 200
    again = Counter(best for _, best in stale_pops(counts, 200))
    assert len(again) > 30 and max(again.values()) > 1


def stale_pops(counts, n):
    "Entries of the heap whose count was too high when they came up."
    index, heap, learnt = PairIndex(counts), [], 0
    heap = sorted(HeapEntry((k, pair)) for pair, k in index.pairs.items())
    while learnt < n and heap:
        count, best = heap.pop(0)
        assert count >= index.pairs[best], "an entry says too little"
        if count != index.pairs[best]: yield count, best
        if count == index.pairs[best]:
            learnt += 1
            heap += [HeapEntry((index.pairs[pair], pair)) for pair in index.join(best)]
        elif index.pairs[best]: heap.append(HeapEntry((index.pairs[best], best)))
        heap.sort()


@settings(max_examples=60, deadline=None)
@given(COUNTS, st.integers(1, 20))
def test_the_index_is_what_a_fresh_count_says(counts, n):
    index, numbers = PairIndex(counts), list(counts.values())
    for pair in train_bpe_counted(counts, n):
        before = index.pairs.copy()
        new = index.join(pair)
        assert index.pairs == count_pairs(index.words, numbers) and b"".join(map(b"".join, index.words)) == b"".join(counts)
        assert new == {p for p in index.pairs if pair[0] + pair[1] in p} and not new & before.keys()
        assert all(k <= before[p] for p, k in index.pairs.items() if p not in new)
        for p in index.pairs: assert {i for i, parts in enumerate(index.words) if p in zip(parts, parts[1:])} <= index.where[p]


@learners
@pytest.mark.parametrize("counts, merges", [
    ({b"ab": 1, b"xy": 1}, [(b"x", b"y"), (b"a", b"b")]),                               # Neither the first seen nor the smallest
    ({b"xy": 1, b"ab": 1}, [(b"x", b"y"), (b"a", b"b")]),                               # nor the last seen
    ({b"ab": 1, b"ac": 1}, [(b"a", b"c"), (b"a", b"b")]),                               # The second part decides where the first is the same
    ({b"ab": 2, b"xy": 1}, [(b"a", b"b"), (b"x", b"y")]),                               # The count comes before that
    ({b"zz": 1, "é".encode(): 1}, [(b"\xc3", b"\xa9"), (b"z", b"z")]),                  # Bytes, from 0 to 255
    ({b"ab": 3, b"abc": 1, b"zc": 1}, [(b"a", b"b"), (b"z", b"c"), (b"ab", b"c")]),     # Not by id: `ab` has a higher one than `z`
    ({b"ab": 3, b"aba": 2, b"az": 2}, [(b"a", b"b"), (b"ab", b"a"), (b"a", b"z")]),     # Not by the joined bytes: `az` > `aba`
    ({b"a\0": 5, b"a\0\1": 2, b"a\1": 2}, [(b"a", b"\0"), (b"a\0", b"\1"), (b"a", b"\1")]), # A longer first part is greater, also with a zero
    ({b"bc": 2, b"bd": 1, b"cd": 1, b"abc": 1}, [(b"b", b"c"), (b"c", b"d"), (b"b", b"d"), (b"a", b"bc")]), # Ties of counts that have fallen
], ids=repr)
def test_ties_go_to_the_greatest_pair_of_byte_strings(learn, counts, merges):
    assert run(learn, counts, 9) == merges == oracle(counts, 9)


def test_the_best_pair():
    assert best_pair({(b"ab", b"a"): 1, (b"a", b"z"): 1, (b"ab", b""): 1}) == (b"ab", b"a")
    assert best_pair({(b"z", b"z"): 1, (b"a", b"a"): 2}) == (b"a", b"a")
    assert min(HeapEntry((1, (b"a", b"b"))), HeapEntry((1, (b"a", b"c")))) == (1, (b"a", b"c"))
    assert min(HeapEntry((9, (b"a", b"b"))), HeapEntry((10, (b"a", b"a")))) == (10, (b"a", b"a"))


@learners
def test_when_pairs_run_out_a_learner_returns_what_it_has(learn):
    counts = count_words(TEN)
    assert len(run(learn, counts, 10)) == 10 and run(learn, counts, 1000) == run(learn, counts, 10)
    assert run(learn, counts, 4) == run(learn, counts, 10)[:4] and run(learn, counts, 0) == run(learn, counts, -1) == []
    assert run(learn, {}, 5) == run(learn, {b"": 3, b"a": 2}, 5) == []


@learners
def test_overlaps_are_joined_from_left_to_right(learn):
    assert run(learn, {b"aaaaa": 1}, 9) == [(b"a", b"a"), (b"aa", b"aa"), (b"aaaa", b"a")]
    assert run(learn, {b"aaa": 1}, 9) == [(b"a", b"a"), (b"aa", b"a")]
    assert run(learn, {b"baaab": 1}, 1) == [(b"a", b"a")]
    # Three `aa` in `aaaa` are counted, although two of them can be joined
    assert run(learn, {b"aaaa": 1, b"xy": 2}, 1) == [(b"a", b"a")]


@learners
def test_learners_leave_their_arguments_alone(learn):
    counts = count_words(TEN)
    words = list(counts.elements())
    before = Counter(counts), list(words)
    learn(words if learn is train_bpe_naive else counts, 10)
    assert (counts, words) == before and list(counts) == list(before[0])


def test_split_bytes():
    assert split_bytes([b"ab", b"", "é".encode()]) == [[b"a", b"b"], [], [b"\xc3", b"\xa9"]]


# Words and special tokens

def test_no_merge_crosses_a_special_token_or_a_word():
    docs = [f"ab{END}ab{END}", f"{END}ab"]
    assert count_words(docs, [END]) == Counter({b"ab": 3})
    assert train_bpe_heap(count_words(["a.b.c"]), 9) == []
    merges = train_bpe_heap(count_words([f"ab{END}"*9], [END]), 99)
    assert merges == [(b"a", b"b")] and train_bpe_heap(count_words([f"ab{END}"*9]), 99) != merges


def test_longest_special_token_wins():
    assert special_pattern(["<a>", "<a><a>", "<a>b"]).split("<a><a>x<a>b") == ["", "<a><a>", "x", "<a>b", ""]
    assert special_pattern(["a|b", "."]).split("xa|b.y") == ["x", "a|b", "", ".", "y"]
    assert special_pattern(None).split("a") == special_pattern([]).split("a") == ["a"]


@settings(deadline=None)
@given(TEXT)
def test_pretokens_are_the_text(text):
    assert "".join(pretokenize(text)) == text and "" not in pretokenize(text)


@pytest.mark.parametrize("text, pieces", [
    ("don't we'll I'd", ["don", "'t", " we", "'ll", " I", "'d"]), ("DON'T IT'S", ["DON", "'", "T", " IT", "'", "S"]), ("I'M I'Ve", ["I", "'", "M", " I", "'", "Ve"]), ("don\u2019t", ["don", "\u2019", "t"]),
    ("'twas", ["'t", "was"]), (" 'tis", [" '", "tis"]), ("they're've", ["they", "'re", "'ve"]), ("it'sm", ["it", "'s", "m"]),
    ("a   b", ["a", "  ", " b"]), ("a \n b", ["a", " \n", " b"]), ("a\n\nb", ["a", "\n", "\n", "b"]), ("a  ", ["a", "  "]), ("a\tb", ["a", "\t", "b"]),
    ("x12y", ["x", "12", "y"]), ("3.14", ["3", ".", "14"]), (" -- ok", [" --", " ok"]), ("_a", ["_", "a"]),
    ("x\u00b2\u00bd", ["x", "\u00b2\u00bd"]), ("\u0663\u0664 \u4e94", ["\u0663\u0664", " \u4e94"]),                # Numbers and letters of other scripts
    ("one\u00a0two", ["one", "\u00a0", "two"]), ("a\u3000\u3000b", ["a", "\u3000", "\u3000", "b"]),               # White space that no word takes along
    ("a\x1cb", ["a", "\x1c", "b"]), ("a \x1c\x1f b", ["a", " \x1c\x1f", " b"]),                                   # Space to `str.isspace`, signs here
    ("caf\u00e9", ["caf\u00e9"]), (normalize("NFD", "caf\u00e9s"), ["cafe", "\u0301", "s"]), ("a\0b", ["a", "\0", "b"]),
    ("\u0939\u093f\u0928\u094d\u0926\u0940", list("\u0939\u093f\u0928\u094d\u0926\u0940")), ("\U0001f642\u200d\u2642", ["\U0001f642\u200d\u2642"])], ids=ascii)
def test_facts_of_the_pattern(text, pieces):
    assert list(pretokenize(text)) == pieces


def test_what_is_white_space_and_what_goes_along():
    every = [chr(i) for i in range(0x110000) if not 0xD800 <= i < 0xE000]
    space = set(regex.findall(r"\s", "".join(every)))
    assert {c for c in every if c.isspace()} - space == set("\x1c\x1d\x1e\x1f") and not space - {c for c in every if c.isspace()}
    assert {c for c in every[:0x3100] if list(pretokenize(c + "a")) == [c + "a"] and not regex.match(r"\p{L}", c)} == {" "}


def test_texts_may_come_from_a_generator():
    assert count_words(t for t in ["ten", "tents"]) == count_words(["ten", "tents"]) == {b"ten": 1, b"tents": 1}
    assert count_words([]) == count_words(["", ""]) == Counter()


@settings(max_examples=50, deadline=None)
@given(st.lists(TEXT, max_size=5))
def test_counts_are_the_bytes_of_the_texts(texts):
    counts = count_words(texts)
    assert sum(len(w)*n for w, n in counts.items()) == len("".join(texts).encode()) and all(w and n > 0 for w, n in counts.items())


# Ids

def test_ids_are_special_tokens_then_bytes_then_merges():
    merges = train_bpe_heap(count_words(TEN), 6)
    vocab = make_vocab(merges, [END, "<|pad|>"])
    assert list(vocab) == list(range(264))
    assert [vocab[0], vocab[1]] == [END.encode(), b"<|pad|>"]
    assert [vocab[2 + i] for i in range(256)] == [bytes([i]) for i in range(256)]
    assert [vocab[258 + i] for i in range(6)] == [a + b for a, b in merges]
    assert make_vocab([]) == {i: bytes([i]) for i in range(256)}


def test_ids_in_the_order_of_gpt2():
    merges = train_bpe_heap(count_words(TEN), 6)
    vocab = make_vocab(merges, [END, "<|pad|>"], gpt2_order=True)
    assert list(vocab) == list(range(264))
    # As in the published vocab.json: printable ASCII, the rest of Latin-1, then what has no shape
    assert [vocab[i] for i in (0, 1, 32, 64, 93, 94, 187, 188, 198, 220, 221, 255)] == [b"!", b'"', b"A", b"a", b"~", b"\xa1", b"\xff", b"\0", b"\n", b" ", b"\x7f", b"\xad"]
    assert [vocab[256 + i] for i in range(6)] == [a + b for a, b in merges]
    assert [vocab[262], vocab[263]] == [END.encode(), b"<|pad|>"]
    assert sorted(vocab.values()) == sorted(make_vocab(merges, [END, "<|pad|>"]).values())


def test_the_alphabet_of_bytes():
    alphabet = byte_alphabet()
    assert sorted(alphabet) == list(range(256)) and len(set(alphabet.values())) == 256
    assert all(c.isprintable() and not c.isspace() for c in alphabet.values())
    assert sum(ord(c) == b for b, c in alphabet.items()) == 188 and {ord(c) for b, c in alphabet.items() if ord(c) != b} == set(range(256, 324))
    assert "".join(alphabet[b] for b in b" \n\t\0\x7f\xa0\xad") == "ĠĊĉĀġłŃ"


def test_merges_wanted():
    assert merges_wanted(256) == merges_wanted(257, [END]) == merges_wanted(256, None) == 0
    assert merges_wanted(50_257, [END]) == 50_000 and merges_wanted(300, iter(["<a>", "<b>"])) == 42


# Encoding

@settings(max_examples=100, deadline=None)
@given(st.lists(TEXT, min_size=1, max_size=4), st.integers(0, 60), st.text("aab bc", max_size=30))
def test_encode_word_applies_the_merges_in_order(texts, n, other):
    counts = count_words(texts)
    merges = train_bpe_heap(counts, n)
    ranks = {p: r for r, p in enumerate(merges)}
    for word in [*counts, other.encode()]:
        parts = split_bytes([word])[0]
        for pair in merges: parts = merge_pair(parts, pair)
        assert encode_word(word, ranks) == parts and b"".join(parts) == word


@settings(max_examples=60, deadline=None)
@given(COUNTS, st.integers(0, 30))
def test_a_trained_word_is_cut_as_training_left_it(counts, n):
    merges = train_bpe_heap(counts, n)
    ranks = {p: r for r, p in enumerate(merges)}
    index = PairIndex(counts)
    for pair in merges: index.join(pair)
    assert [encode_word(w, ranks) for w in counts] == index.words


# Bad input

@pytest.mark.parametrize("size, special, words", [
    (256, [END], "vocab_size = 256, expected at least 257: 256 bytes and 1 special token$"), (255, [], "expected at least 256"), (-1, [], "expected at least 256"),
    (300, [""], "a special token is empty"), (300, [END, END], "given twice"), (300, ["a"], "'a' is a single byte"), (300, ["\ud800"], "surrogate")])
def test_sizes_and_special_tokens_that_make_no_sense(size, special, words):
    with pytest.raises(ValueError, match=words): merges_wanted(size, special)
    if size == 300:
        for order in (False, True):
            with pytest.raises(ValueError, match=words): make_vocab([], special, order)


@pytest.mark.parametrize("size, special, words", [
    (300., [END], "vocab_size = 300.0, expected an int"), (True, [END], "expected an int"), ("300", [END], "expected an int"), (None, [END], "expected an int"),
    (300, END, "expected a list of strings"), (300, END.encode(), "expected a list of strings"), (300, [1], "special token 1 is a int")])
def test_types_that_make_no_sense(size, special, words):
    with pytest.raises(TypeError, match=words): merges_wanted(size, special)


@pytest.mark.parametrize("merges, special, error, words", [
    ([(b"a", b"b"), (b"a", b"b")], [], ValueError, r"ids 256 and 257 would both be b'ab'"), ([(b"a", b"")], [], ValueError, "ids 97 and 256 would both be b'a'"),
    ([(b"t", b"he")], ["the"], ValueError, "ids 0 and 257 would both be b'the'"), (["ab"], [], TypeError, "merge 0 is 'ab', expected a pair of byte strings"),
    ([(b"a", b"b"), (b"a", b"b", b"c")], [], TypeError, "merge 1 is"), ([b"ab"], [], TypeError, "merge 0 is b'ab'"), ([(b"a", "b")], [], TypeError, "merge 0 is"),
    ([], END, TypeError, "expected a list of strings")])
def test_merges_that_make_no_sense(merges, special, error, words):
    with pytest.raises(error, match=words): make_vocab(merges, special)


@pytest.mark.parametrize("texts, special, words", [
    ("ten tents", [END], r"expected an iterable of them: \[text\]"), (["ten", b"tents"], [END], "text 1 is a bytes"), (["ten"], END, "expected a list of strings")])
def test_texts_that_make_no_sense(texts, special, words):
    with pytest.raises(TypeError, match=words): count_words(texts, special)


def test_half_of_a_surrogate_pair_is_refused():
    for bad in ("a\ud800", "\udfff", "\ude00\ud83d"):
        with pytest.raises(ValueError, match="half of a surrogate pair"): count_words([bad])
        with pytest.raises(ValueError, match="half of a surrogate pair"): utf8(bad)
    assert utf8("é") == b"\xc3\xa9" and utf8("\0\uffff\U0010ffff") == b"\0\xef\xbf\xbf\xf4\x8f\xbf\xbf" and special_list(None) == []
