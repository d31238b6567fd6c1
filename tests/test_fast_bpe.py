"The compiled tokenizer against the readable one, against `regex`, and at the edge of memory."
import os
import random
import subprocess
import sys
import unicodedata
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, islice
from pathlib import Path
from threading import Barrier, Event
from unittest.mock import patch

import numpy as np
import pytest
import regex
from hypothesis import given, settings, strategies as st

from lmcourse.tokenization import fast_bpe
from lmcourse.tokenization.bpe import count_words, train_bpe_heap, pretokenize, special_pattern
from lmcourse.tokenization.encoding import encode_word, make_vocab
from lmcourse.tokenization.fast_bpe import (Encoder, FilePieces, Gathered, Specials, WordTable, Words, character_classes, count_words_fast, first_invalid,
                                            in_turns, last_cut, pretoken_ends, text_pieces, train_bpe_fast)
from lmcourse.tokenization.tokenizer import ReadableEncoder, Rules, Vocabulary
from lmcourse.tools.stories import Stories

END = "<|endoftext|>"
STORIES = list(islice(Stories(0), 200))
CHARACTERS = "aabc sdtmrvel'  \n\t.1٣é好🙂\u3000\xa0\u2003\x1c\x85\u0301ªʰⅧ²\0"
TEXT = st.text(st.sampled_from(CHARACTERS) | st.characters(codec="utf-8"), max_size=150)


def ends(data):
    found = np.empty(len(data) + 64, np.int64)
    return found[:pretoken_ends(np.frombuffer(data, np.uint8), character_classes(), found)].tolist()


def expected_ends(text): return list(accumulate(len(w.encode("utf-8", "surrogateescape")) for w in pretokenize(text)))


# Cuts

@settings(max_examples=1000, deadline=None)
@given(TEXT, TEXT)
def test_cuts(text, more):
    for t in (text, text + more*3): assert ends(t.encode()) == expected_ends(t)


@settings(max_examples=500, deadline=None)
@given(st.lists(st.binary(max_size=6) | st.sampled_from([b"\xe2\x80", b"\xf0\x9f\x99\x82", b"\xed\xb0\x80", b"\xf4\x90\x80\x80", b"\xc0\xa0", b"\xe0\x80\xa0", b" the end, isn't it?"])).map(b"".join))
def test_cuts_of_any_bytes(data):
    assert ends(data) == expected_ends(data.decode("utf-8", "surrogateescape"))
    try: data.decode(); bad = -1
    except UnicodeDecodeError as e: bad = e.start
    assert first_invalid(np.frombuffer(data, np.uint8), character_classes()) == bad


def test_valid_utf8_is_what_python_says():
    for first in range(0x80, 0x100):
        for second in range(256):
            for rest in (b"", b"\x80", b"\xbf\xbf", b"\x80\x80 ", b"\xc0\x80"):
                data = bytes([first, second]) + rest
                try: data.decode(); bad = -1
                except UnicodeDecodeError as e: bad = e.start
                assert first_invalid(np.frombuffer(data, np.uint8), character_classes()) == bad, data


@pytest.mark.slow
def test_every_code_point_in_context():
    points = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    for form in ("a{0}{0} {0}  ", "1{0}a '{0}"):
        for i in range(0, len(points), 100_000):
            text = "".join(form.format(chr(c)) for c in points[i:i+100_000])
            assert ends(text.encode()) == expected_ends(text)


def mixed_text(size, seed=0): # Stories, sources of the running Python, names of characters, noise
    rng, parts, total = random.Random(seed), [], 0
    files = sorted(Path(os.__file__).parent.glob("**/*.py"))
    rng.shuffle(files)
    stories = Stories(seed)
    letters = [chr(c) for c in range(0x30000) if unicodedata.category(chr(c)) not in ("Cn", "Cs")]
    while total < size:
        try: source = files.pop().read_text(encoding="utf-8")[:100_000]
        except UnicodeDecodeError: continue
        noise = "".join(rng.choices(CHARACTERS, k=2000)) + "".join(rng.choices(letters, k=2000)) + " ".join("".join(rng.choices(letters, k=4)) for _ in range(500))
        parts += [source, *islice(stories, 20), noise]
        total += sum(len(p.encode()) for p in parts[-22:])
    return "".join(parts)


def test_cuts_of_ten_megabytes():
    text = mixed_text(10_000_000)
    assert len(text.encode()) > 10_000_000 and ends(text.encode()) == expected_ends(text)


# Special tokens and pieces

SPECIALS = st.lists(st.text(st.sampled_from("ab< >"), min_size=1, max_size=4), max_size=4, unique=True)
WHITE = regex.findall(r"\s", "".join(map(chr, [*range(0xD800), *range(0xE000, 0x110000)])))
LIKE_WHITE = ["\u0105", "\u0160", "à", "。", "！", "\u2580", "\u202a", "\u2060", "\u1681", "\u300a", "\U0001f600"]  # end in the same bytes, or nearly
SMALL = st.text(st.sampled_from("ab<> \n好\u3000") | st.sampled_from(WHITE) | st.sampled_from(LIKE_WHITE), max_size=40)


@settings(max_examples=1000, deadline=None)
@given(SMALL, SPECIALS)
def test_special_tokens_are_found_as_by_a_pattern(text, special):
    for t in (text, " "*70 + text*3):
        data = t.encode()
        found = Specials([s.encode() for s in special])
        starts, stops, numbers = found.segments(np.frombuffer(data, np.uint8))
        parts = [data[i:j].decode() for i, j in zip(starts, stops)]
        marks = [found.tokens[n].decode() for n in numbers[:-1]]
        assert special_pattern(special).split(t) == [x for pair in zip(parts, marks) for x in pair] + parts[-1:]


def test_many_special_tokens_leave_the_shared_random_numbers_alone():
    "The package `regex` empties its full cache of patterns by `random.sample`: patterns made for one tokenizer must not fill it."
    regex.purge()
    before = random.getstate()
    for i in range(600):
        special_pattern([f"<{i}>"])
        last_cut(b"a<b>"*3, [b"<%d>" % i])
        ReadableEncoder(Vocabulary(VOCAB, [], rules=Rules(f" ?a{{{i}}}")))
    assert random.getstate() == before


@settings(max_examples=2000, deadline=None)
@given(SMALL, SPECIALS, st.booleans())
def test_a_cut_changes_nothing(text, special, spaces):
    data = text.encode()
    cut = last_cut(data, [s.encode() for s in special], spaces)
    assert 0 <= cut < max(len(data), 1)
    assert count_words([data[:cut].decode()], special) + count_words([data[cut:].decode()], special) == count_words([text], special)


def test_text_is_cut_before_white_space_after_every_character_but_white_space():
    assert len(WHITE) == 25
    for c in [*map(chr, range(0xD800)), *map(chr, range(0xE000, 0x110000, 7)), *WHITE]:
        for end in "\n ": assert last_cut(f"{c}{end}".encode(), []) == (0 if c in WHITE else len(c.encode())), (c, end)


@settings(max_examples=1000, deadline=None)
@given(SMALL, st.integers(1, 9), st.sampled_from([[], ["<a b>"], ["<a b>", "b c"]]))
def test_pieces_change_nothing(text, size, special):
    text, marks = text.replace("é", "é<a b> b c "), [t.encode() for t in special]
    for whole in (text, text.encode()):
        with patch.object(fast_bpe, "PIECE", size): parts = [data[i:j] for data, i, j in text_pieces(whole, marks)]
        assert b"".join(parts) == text.encode() and all(parts)
        assert sum((count_words([part.decode()], special) for part in parts), Counter()) == count_words([text], special)


def test_lines_in_chinese_are_cut():
    text = "天气很好。\n"*10_000
    for whole, size in ((text, 6), (text.encode(), 16)):
        with patch.object(fast_bpe, "PIECE", 1000*size): pieces = list(text_pieces(whole, []))
        assert len(pieces) == 11 and all(16_000 - 16 <= stop - start <= 16_000 for _, start, stop in pieces[:-1])
    assert len(text.encode()) - 2 <= last_cut(text.encode(), []) < len(text.encode())


def test_a_text_that_cannot_be_cut_is_one_piece():
    with patch.object(fast_bpe, "PIECE", 8): assert [stop - start for _, start, stop in text_pieces("x"*1000 + " y"*50, [])][:2] == [1022, 6]


def turns(work, pieces, threads):
    found, copied = [], []
    in_turns(work, pieces, threads, lambda *result: found.append(result) or (lambda: copied.append(result)))
    assert sorted(found) == sorted(copied)
    return [one for one, in found]


def test_pieces_are_taken_in_turns():
    both = Barrier(2, timeout=30)                                  # two calls at the same time, or an error
    assert turns(lambda k: (both.wait(), (k,))[1], ((k,) for k in range(6)), 2) == list(range(6))
    second = Event()
    def first_is_late(k):
        if k == 0: assert second.wait(30)
        if k == 2: second.set()
        return k,
    assert turns(first_is_late, ((k,) for k in range(5)), 2) == list(range(5))
    for threads in (1, 2, 5):
        with pytest.raises(ZeroDivisionError): turns(lambda k: (1//k,), ((k,) for k in (3, 0, 2)), threads)
        with pytest.raises(ValueError, match="surrogate"): turns(len, ((fast_bpe.utf8(t),) for t in ("\ud800", "a")), threads)
        assert turns(len, iter(()), threads) == []


@pytest.mark.parametrize("pieces", [1, 2, 4, 100])
def test_ids_are_gathered(pieces):
    gathered = Gathered(np.uint16, pieces)
    for ids, ends in (([1, 2], [1, 2]), ([], [0]), ([3, 4, 5], []), ([6], [1])): gathered.take(np.array(ids, np.uint16), np.array(ends, np.int64))()
    assert gathered.ids.tolist() == [1, 2, 3, 4, 5, 6] and gathered.ids.dtype == np.uint16
    assert np.concatenate(gathered.ends).tolist() == [0, 1, 2, 2, 6]


def test_a_small_batch_holds_little_memory():
    ids, _ = BIG.encode_batch(["a b"])
    assert len(ids) == 2 and (ids if ids.base is None else ids.base).size == 2


@pytest.mark.parametrize("seen", [1, 2])
def test_white_space_is_not_cut_where_only_its_end_is_looked_at(tmp_path, seen):
    text = "a"*1000 + "\u3000 " + "x"*((1 << 16) - seen - 1)                                     # the last 64 KiB begin inside U+3000
    (tmp_path/"text").write_text(text + "y"*1000 + "\u3000 " + "z"*1000, encoding="utf-8")
    pieces, found, buffer = FilePieces(tmp_path/"text", [], size=len(text.encode())), Counter(), np.empty(0, np.uint8)
    while len((read := pieces.read(buffer))[0]): found += count_words([read[0].tobytes().decode()]); buffer = read[1]
    assert found == count_words([(tmp_path/"text").read_text(encoding="utf-8")])


def test_a_piece_that_decodes_to_nothing_is_not_the_end_of_the_file(tmp_path):
    (tmp_path/"text").write_bytes(b"\x90"*((1 << 22) - 4) + b" the end"*3)                      # the first piece ends before the first space
    for threads in (1, 3): assert count_words_fast(tmp_path/"text", None, threads, "ignore").counter() == {b" the": 3, b" end": 3}
    (tmp_path/"text").write_bytes(b"\x90"*5_000_000)
    for threads in (1, 3): assert count_words_fast(tmp_path/"text", None, threads, "ignore").counter() == {}


@pytest.mark.parametrize("errors", ["ignore", "replace"])
def test_pieces_of_invalid_text(tmp_path, errors):
    "Bytes that are left out must not hide where a word or a special token goes on"
    rng, special = random.Random(0), ["<x y>", "a<x y>"]
    parts = [b"a", b" ", b"\n", b"\xff", b"\xe5", "好".encode(), b"  ", b"<x y>", b"<x", b" y>", b"'s", b"\xc3"]
    for _ in range(300):
        data = b"".join(rng.choices(parts, k=30))
        (tmp_path/"text").write_bytes(data)
        pieces, found, buffer = FilePieces(tmp_path/"text", [s.encode() for s in special], errors, size=5), Counter(), np.empty(0, np.uint8)
        while len((read := pieces.read(buffer))[0]): found += count_words([read[0].tobytes().decode()], special); buffer = read[1]
        pieces.close()
        assert found == count_words([data.decode(errors=errors)], special), data


def test_a_file_is_closed(tmp_path, monkeypatch):
    opened, real = [], open
    monkeypatch.setattr("builtins.open", lambda *args, **how: opened.append(real(*args, **how)) or opened[-1])
    (tmp_path/"text").write_bytes(b"the end")
    count_words_fast(tmp_path/"text")
    (tmp_path/"text").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="not UTF-8"): count_words_fast(tmp_path/"text")
    count_words_fast(tmp_path/"text", errors="ignore")
    assert len(opened) >= 3 and all(file.closed for file in opened)


@settings(max_examples=300, deadline=None)
@given(SMALL, SPECIALS, st.integers(1, 30))
def test_a_file_in_pieces_is_the_file(tmp_path_factory, text, special, size):
    file = tmp_path_factory.getbasetemp()/"pieces.txt"
    file.write_bytes(text.encode())
    pieces, buffer, found, counts = FilePieces(file, [s.encode() for s in special], size=size), np.empty(0, np.uint8), b"", Counter()
    while True:
        piece, buffer = pieces.read(buffer)
        if not len(piece): break
        found += piece.tobytes()
        counts += count_words([piece.tobytes().decode()], special)
    assert found == text.encode() and counts == count_words([text], special)


def test_a_file_is_counted_as_its_text(tmp_path):
    text = mixed_text(9_000_000, 1).replace("the end", END)
    (tmp_path/"text").write_bytes(text.encode())
    expected = count_words([text], [END])
    for threads in (1, 3): assert count_words_fast(tmp_path/"text", [END], threads).counter() == expected
    (tmp_path/"empty").write_bytes(b"")
    assert count_words_fast(tmp_path/"empty").counter() == {}


def test_a_special_token_is_not_cut_where_only_its_end_is_looked_at(tmp_path):
    (tmp_path/"text").write_text("x"*65_534 + "<|a b|>" + "y"*100_000)                         # the last 64 KiB of the first piece begin inside it
    pieces, found, buffer = FilePieces(tmp_path/"text", [b"<|a b|>"], size=1 << 17), [], np.empty(0, np.uint8)
    while len((read := pieces.read(buffer))[0]): found.append(read[0].tobytes()); buffer = read[1]
    assert sum(piece.count(b"<|a b|>") for piece in found) == 1


def test_a_text_without_white_space(tmp_path):
    text = "好"*3_000_000 + END + "a"*3_000_000 + "\u3000"*3_000_000
    (tmp_path/"text").write_bytes(text.encode())
    assert count_words_fast(tmp_path/"text", [END], 2).counter() == count_words([text], [END])


def test_many_words_and_long_ones():
    rng = random.Random(0)
    texts = [" ".join(str(rng.random()) + "x"*rng.randrange(40) for _ in range(200)) for _ in range(200)] + ["y"*n for n in range(1, 2000, 7)]
    for threads in (1, 4): assert count_words_fast(texts, threads=threads).counter() == count_words(texts)


@pytest.mark.parametrize("text", ["a\0b", "\0", "é\0", "", "a", "a<|endoftext|>\0"])
def test_a_batch_of_texts_with_any_byte_between(text):
    for texts in ([text], [text]*3, ["b", text, "c d"]*9, [text, "好", ""]*9):
        ids, offsets = BIG.encode_batch(texts)
        assert [ids[i:j].tolist() for i, j in zip(offsets, offsets[1:])] == [BIG.encode_list(t.encode()) for t in texts]


def test_a_special_token_with_a_zero_does_not_join_two_texts():
    zero = Encoder(VOCAB | {len(VOCAB): b"a\0b"}, MERGES, {b"a\0b": len(VOCAB)}, 10)
    for texts in (["a", "b\0c"]*20, ["a", "b"]*20, ["xa\0b"]*20):
        ids, offsets = zero.encode_batch(texts)
        assert [ids[i:j].tolist() for i, j in zip(offsets, offsets[1:])] == [zero.encode_list(t.encode()) for t in texts]


def test_few_texts_are_shared_out_one_by_one(monkeypatch):
    shared = []
    monkeypatch.setattr(fast_bpe, "PIECE", 1 << 10)
    monkeypatch.setattr(fast_bpe, "in_turns", lambda work, pieces, threads, take: (shared.append(found := list(pieces)), in_turns(work, found, threads, take)))
    ids, offsets = BIG.encode_batch(["a b "*2000, "", "é c"], 3)
    assert [len(pieces) for pieces in shared] == [8] and offsets.tolist()[1:] == [len(BIG.encode(b"a b "*2000))]*2 + [len(ids)]
    assert ids.tolist() == BIG.encode_list(b"a b "*2000) + BIG.encode_list("é c".encode())


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_a_long_text_has_the_same_ids_in_pieces(threads):
    text = END.join(STORIES) + "a"*50_000 + " "*1000 + "好"*1000 + "ab "*1000
    with patch.object(fast_bpe, "PIECE", 1 << 12):
        for whole in (text, text.encode(), text.encode() + b"\xff\xfe x"*5000):
            assert BIG.encode(whole, threads).tolist() == BIG.encode(whole).tolist()


def test_long_words_with_the_same_hash_are_two():
    def mixed(h, block): h = (h ^ block)*0x9E3779B97F4A7C15 % 2**64; return h ^ h >> 29
    start, one, two, second = 24*0x9E3779B97F4A7C15 % 2**64, 1, 2, 3
    words = [b"".join(x.to_bytes(8, "little") for x in blocks) for blocks in
             ((one, second, 9), (two, second ^ mixed(start, one) ^ mixed(start, two), 9))]
    table = WordTable()
    table.add(Words.of({words[0]: 5, words[1]: 7}))
    used = table.rows[table.rows[:, 1] != 0]
    assert len(used) == 2 and (used[0, :2] == used[1, :2]).all() and table.words().counter() == {words[0]: 5, words[1]: 7}


# Merges

@settings(max_examples=500, deadline=None)
@given(st.dictionaries(st.binary(min_size=1, max_size=20) | st.text(st.sampled_from("ab\0"), min_size=1, max_size=30).map(str.encode), st.integers(1, 5), max_size=12), st.integers(0, 80))
def test_merges(counts, n): assert train_bpe_fast(Words.of(counts), n) == train_bpe_heap(counts, n)


def test_ties_go_to_the_greatest_pair_of_byte_strings():
    for counts, best in (({b"ab": 1, b"ac": 1, b"bb": 1}, (b"b", b"b")), ({b"\xffa": 1, b"az": 1}, (b"\xff", b"a")), ({b"a\0": 1, b"a\1": 1}, (b"a", b"\1"))):
        assert train_bpe_fast(Words.of(counts), 1) == [best] == train_bpe_heap(counts, 1)
    long = {b"abcdefghij" + x: 1 for x in (b"x", b"xy", b"xyz", b"a", b"\0", b"\0\0")}          # alike in the first eight bytes
    assert train_bpe_fast(Words.of(long), 50) == train_bpe_heap(long, 50)
    last = {b"abcdefghij" + bytes([x]) + end: n for x in b"XZWYUV" for end, n in ((b"", 2), (b"1", 1))}  # tokens that differ in the last byte alone
    assert train_bpe_fast(Words.of(last), 50) == train_bpe_heap(last, 50)


def test_room_is_made_for_the_merges_that_a_text_can_have():
    words = {b"abcd": 2, b"xyz": 1}
    assert train_bpe_fast(Words.of(words), 10**15) == train_bpe_heap(words, 10**15) and len(train_bpe_heap(words, 10**15)) == 5


def test_more_room_is_made():
    rng = random.Random(0)
    many = {rng.randbytes(12): rng.randrange(1, 9) for _ in range(15_000)}                      # more than 2**16 pairs
    assert train_bpe_fast(Words.of(many), 2000) == train_bpe_heap(many, 2000)
    long = {b"ab"*70_000: 3, b"abab"*5: 1}                                                      # tokens of more than 2**16 bytes
    assert train_bpe_fast(Words.of(long), 40) == train_bpe_heap(long, 40)


def test_too_much_is_refused():
    words = Words.of({b"ab": 1})
    with pytest.raises(OverflowError, match="expected less than 2\\*\\*29 and 2\\*\\*37"): train_bpe_fast(words._replace(counts=np.array([1 << 36], np.uint64)), 1)
    assert train_bpe_fast(words._replace(counts=np.array([1 << 35], np.uint64)), 1) == [(b"a", b"b")]


# Ids

MERGES = train_bpe_heap(count_words(STORIES + [CHARACTERS*3, "ééé 好好 🙂🙂"*3]), 900)
VOCAB = make_vocab(MERGES, [END, END*2])
RANKS = {pair: rank for rank, pair in enumerate(MERGES)}
NUMBER = {token: i for i, token in VOCAB.items()}


def encoder(bits=18): return Encoder(VOCAB, MERGES, {END.encode(): 0, (END*2).encode(): 1}, bits)


def ids_slowly(text):
    return [NUMBER[token] for word in pretokenize(text) for token in encode_word(word.encode("utf-8", "surrogateescape"), RANKS)]


BIG, TIGHT = encoder(), encoder(5)


@settings(max_examples=1000, deadline=None)
@given(TEXT.filter(lambda text: END not in text))              # Hypothesis tries the strings of the code too
def test_ids(text):
    assert BIG.encode(text.encode()).tolist() == TIGHT.encode(text.encode()).tolist() == ids_slowly(text)


@pytest.mark.parametrize("ending", ["  ", "   ", "\n\n", "'l", "'r", "'v", "'", "''", "a", "1", ".", "a ", "a\n"])
@pytest.mark.parametrize("behind", ["a", "l", "e", "s", "1", ".", " ", "\n", "é", "\u3000", "'s"])
def test_what_lies_behind_a_text_is_not_seen(ending, behind):
    "The copy of a short text still has what an earlier text left there; a text in a batch has the next one behind it."
    merges = [(a.encode(), b.encode()) for a, b in ("'l", "'r", "'v", ("'l", "l"), "  ", "\n\n", "''", ("  ", " "))]
    vocab = make_vocab(merges, [])
    number, ranks, encoder = {t: i for i, t in vocab.items()}, {pair: k for k, pair in enumerate(merges)}, Encoder(vocab, merges, {}, 10)
    def slowly(text): return [number[token] for word in pretokenize(text) for token in encode_word(word.encode(), ranks)]
    for text in (ending, "b" + ending, "the end, " + ending, "word "*11 + ending, "word "*13 + ending, "é" + ending):
        encoder.encode_list((text + behind*70).encode())
        assert encoder.encode_list(text.encode()) == slowly(text)
        for texts in ([text, behind*70]*8, [text, behind*5000]*8):                    # short, and not
            ids, offsets = encoder.encode_batch(texts)
            assert ids[:offsets[1]].tolist() == slowly(text)


@settings(max_examples=300, deadline=None)
@given(st.text(st.sampled_from("theand"), min_size=60, max_size=400) | st.text(st.sampled_from("é好"), min_size=30, max_size=200))
def test_ids_of_long_words(word): assert BIG.encode(word.encode()).tolist() == ids_slowly(word)


def test_a_million_letters_in_a_row():
    data = b"the"*300_000                                                                       # in the square of that time it would take days
    assert b"".join(VOCAB[i] for i in BIG.encode(data).tolist()) == data


def test_a_full_cache_starts_anew():
    rng, small = random.Random(0), encoder(12)
    text = " ".join("".join(rng.choices("abcdefgh", k=rng.randrange(1, 70))) for _ in range(60_000))     # more than the table, the store and the pool hold
    expected = small.encode(text.encode()).tolist()
    assert expected == BIG.encode(text.encode()).tolist() and expected[:3000] == ids_slowly(text[:20_000])[:3000]


def test_ids_with_gaps_keep_all_their_bits():
    vocab = {i: bytes([i]) for i in range(256)} | {70_000: b"ab", 70_001: b"<e>"}
    assert Encoder(vocab, [(b"a", b"b")], {b"<e>": 70_001}).encode(b"abc<e>").tolist() == [70_000, 99, 70_001]
    with pytest.raises(ValueError, match=r"id 16,777,216, expected less than 2\*\*24"): Encoder(vocab | {1 << 24: b"cd"}, [], {})

def test_many_ids_need_four_bytes():
    vocab = VOCAB | {i: b"<%d>" % i for i in range(len(VOCAB), 70_000)}
    wide = Encoder(vocab, MERGES, {b"<69999>": 69_999})
    assert BIG.encode(b"a").dtype == np.uint16 and wide.encode(b"a").dtype == np.uint32
    assert wide.encode(b"the end<69999>").tolist() == ids_slowly("the end") + [69_999]


# At the edge of memory: the kernels read 8, 16 and 64 bytes at once, and must not read behind the text

EDGE = """
import ctypes, mmap, random, sys
import numpy as np
from lmcourse.tokenization import fast_bpe as F
from lmcourse.tokenization.encoding import make_vocab
page, size = mmap.PAGESIZE, 4*mmap.PAGESIZE
area = mmap.mmap(-1, size + page)
address = ctypes.addressof(ctypes.c_char.from_buffer(area))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.mprotect(ctypes.c_void_p(address + size), page, 0) == 0
if len(sys.argv) > 1: print(area[size])                       # the page behind the text can't be read
rng, merges = random.Random(0), [(b"t", b"h"), (b"th", b"e"), (b" ", b"the")]
encoder = F.Encoder(make_vocab(merges, ["<|end|>"]), merges, {b"<|end|>": 0})
pieces = ["the", " ", "'s", "'ll", "é", "好", "🙂", "x"*17, "\\n", "<|end|>", "<|en", "1", "a"*70, "'", "\\u3000"]
for n in range(4000):
    data = "".join(rng.choices(pieces, k=rng.randrange(1, 30))).encode()[:rng.randrange(1, 200)]
    if n % 8 == 0: data = b"the end "*513 + data                  # not short: read where it is
    area[size - len(data):size] = data
    text = np.frombuffer(area, np.uint8)[size - len(data):size]
    text.flags.writeable = False
    plain = np.frombuffer(data, np.uint8)
    assert F.first_invalid(text, F.character_classes()) == F.first_invalid(plain, F.character_classes())
    tables = []
    for t in (text, plain):
        starts, stops, _ = encoder.inner.specials[()].segments(t)
        table = F.WordTable()
        table.count(t, starts, stops)
        tables.append((encoder.inner.run(t)[0].tolist(), table.words().counter()))
    assert tables[0] == tables[1]
print("done")
"""


def test_threads_share_an_encoder_of_short_texts():
    "Each call has a workplace of its own, although all threads begin with none."
    texts = [text for text in STORIES for text in text.split(".")][:400]
    shared, expected = encoder(12), list(map(BIG.encode_list, map(str.encode, texts)))
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            for found in pool.map(lambda _: [shared.encode_list(t.encode()) for t in texts], range(16)): assert found == expected
    finally: sys.setswitchinterval(before)
    places = shared.inner.free
    assert 1 <= len(places) <= 8 and len({address for _, address, *_ in places}) == len(places)


@pytest.mark.parametrize("size", [4095, 4096, 4097])
def test_a_short_text_ends_where_it_is_said(size):
    text = ("the end, " * 500)[:size]
    assert BIG.encode_list(text.encode()) == BIG.encode(text.encode()).tolist() == ids_slowly(text)
    marked = text[:size - len(END)] + END
    assert BIG.encode_list(marked.encode()) == BIG.encode(marked.encode()).tolist() == ids_slowly(text[:size - len(END)]) + [0]
    assert BIG.encode_list(b"") == [] and BIG.encode_list(b"<|") == ids_slowly("<|")


@pytest.mark.skipif(sys.platform != "linux", reason="mprotect as on Linux")
def test_nothing_is_read_behind_the_text():
    run = lambda *args: subprocess.run([sys.executable, "-c", EDGE, *args], capture_output=True, text=True)
    assert run("look").returncode == -11                       # the guard works
    done = run()
    assert done.returncode == 0 and done.stdout == "done\n", done.stderr[-2000:]


def test_without_a_folder_for_machine_code_each_process_compiles_for_itself():
    script = """
from numba.core import caching
vars(caching)["CacheImpl" if hasattr(caching, "CacheImpl") else "_CacheImpl"]._locator_classes = []   # as where neither the package's folder nor the home can be written
import numpy as np
from lmcourse.tokenization import fast_bpe as F
print(F.first_invalid(np.frombuffer(b"the \\xff", np.uint8), F.character_classes()))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "4\n", done.stderr[-2000:]


@pytest.mark.slow
def test_every_index_is_within_its_array(tmp_path):
    env = os.environ | dict(NUMBA_BOUNDSCHECK="1", NUMBA_CACHE_DIR=str(tmp_path))
    tests = ["test_merges", "test_ids", "test_ids_of_long_words", "test_more_room_is_made", "test_many_words_and_long_ones", "test_a_full_cache_starts_anew", "test_cuts"]
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__, "-k", " or ".join(tests)], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout[-3000:]


FIRST_USE = """
import random
import numpy as np
from numba.core import event
from lmcourse.tokenization import fast_bpe
from lmcourse.tokenization.bpe import count_words, train_bpe_heap
from lmcourse.tokenization.tokenizer import Tokenizer
compiled = []
class Listener(event.Listener):
    def on_start(self, happening): compiled.append(happening.data["dispatcher"].py_func.__module__)
    def on_end(self, happening): pass
event.register("numba:compile", Listener())
rng = random.Random(0)
words = [bytes(rng.choices(range(97, 123), k=12)).decode() for _ in range(9000)]
tokenizer = Tokenizer.train([" ".join(words)], 1500)
assert fast_bpe.learn_kernel.signatures and not fast_bpe.count_kernel.signatures, "a small text is counted without compiling"
assert tokenizer.merges == train_bpe_heap(count_words([" ".join(words)]), 1243)
fast_bpe.move_pairs(np.zeros((2, 4), np.uint64), np.zeros((4, 4), np.uint64))
fast_bpe.count_words_fast([" ".join(words)], threads=1)
assert fast_bpe.move_rows.signatures
print(sorted({module for module in compiled if module.startswith("numba.")}))
"""


def test_first_use_compiles_no_more_than_it_needs(tmp_path):
    "A row assigned to a row would compile a check that writes a message: two seconds for nothing."
    out = subprocess.run([sys.executable, "-c", FIRST_USE], env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True, check=True).stdout
    assert out.strip() in ("['numba.cpython.builtins']", "[]"), "[]: Numba 0.60"
