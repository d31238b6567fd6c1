"Graders of the exercises: what each refuses, in which words, and that other right answers pass."
import codecs
import re
from collections import Counter
from itertools import islice

import numpy as np
import pytest
import regex
from graders import Graders, fails

from lmcourse.exercises import tokenization as ex
from lmcourse.tokenization.bpe import best_pair, count_pairs, count_words, train_bpe_heap
from lmcourse.tokenization.bpe import train_bpe_naive, merge_pair, pretokenize, special_pattern
from lmcourse.tokenization.bpe import split_bytes
from lmcourse.tokenization.encoding import encode_word
from lmcourse.tokenization.unicode import utf8
from lmcourse.tools.stories import Stories

SIZES = {"utf-8": 17, "utf-16": 22, "utf-32": 36}
IDS = dict(merges=31_742, byte=99, last=31_999, gpt2_last=31_997, uint16=65_278)
STORY = next(Stories(1))
BIG = STORY.upper()


def tokens(text, ranks): return [t for word in pretokenize(text) for t in encode_word(utf8(word), ranks)]


RATIO = len(BIG)/len(tokens(BIG, ex.story_ranks()))
EACH = [len(word)/len(encode_word(word.encode(), ex.story_ranks())) for word in pretokenize(BIG)]


# Splitting at special tokens

def split_right(text, special): return [part for part in special_pattern(special).split(text) if part]


def split_by_hand(text, special):
    at = [(text.find(token, i), -len(token)) for i in range(len(text)) for token in special if text.startswith(token, i)]
    if not at: return [text] if text else []
    start, n = min(at)
    end = start - n
    return [p for p in (text[:start], text[start:end]) if p] + split_by_hand(text[end:], special)


def split_by(pattern, special, text): return [p for p in regex.split(f"({pattern})", text) if p] if special else [text] if text else []


def split_as_given(text, special): return split_by("|".join(map(regex.escape, special)), special, text)


def split_shortest(text, special): return split_by("|".join(map(regex.escape, sorted(special, key=len))), special, text)


def split_unescaped(text, special): return split_by("|".join(sorted(special, key=len, reverse=True)), special, text)


def split_longest_anywhere(text, special):
    parts = [text]
    for token in sorted(special, key=len, reverse=True):
        parts = [q for p in parts for q in ([p] if p in special else re.split(f"({re.escape(token)})", p))]
    return [p for p in parts if p]


def split_without_them(text, special): return [p for p in special_pattern(special).split(text)[::2] if p]


def split_with_empty(text, special): return special_pattern(special).split(text)


def split_stripped(text, special): return [p.strip() for p in split_right(text, special) if p.strip()]


def split_sorting(text, special): special.sort(key=len, reverse=True); return split_right(text, special)


def split_without_list(text, special): return [p for p in regex.split(f"({'|'.join(map(regex.escape, sorted(special, key=len, reverse=True)))})", text) if p]


# One step of training

def step(choose=best_pair, join=merge_pair, count=count_pairs):
    def f(words, numbers):
        pair = choose(count(words, numbers))
        return pair, [join(parts, pair) for parts in words]
    return f


def by(key, best=max): return lambda pairs: best(pairs, key=lambda pair: key(pair, pairs[pair]))


def from_the_right(parts, pair):
    parts, i = list(parts), len(parts) - 2
    while i >= 0:
        if (parts[i], parts[i+1]) == pair: parts[i:i+2] = [pair[0] + pair[1]]; i -= 1
        i -= 1
    return parts


def first_only(parts, pair):
    i = next((i for i in range(len(parts) - 1) if (parts[i], parts[i+1]) == pair), None)
    return parts if i is None else [*parts[:i], pair[0] + pair[1], *parts[i+2:]]


def in_place(parts, pair): parts[:] = merge_pair(parts, pair); return parts


def without_overlap(words, numbers):
    pairs = Counter()
    for parts, n in zip(words, numbers):
        last, free = None, 0
        for i, pair in enumerate(zip(parts, parts[1:])):
            if pair == last and i < free: continue
            pairs[pair] += n
            last, free = pair, i + 2
    return pairs


def step_gives(change):
    def f(words, numbers): return change(*step()(words, numbers))
    return f


# How large it can get

def bound(words_of, size=len, more=0, specials=True):
    def f(text, special): return 256 + more + specials*len(special) + sum(size(w) - 1 for w in words_of(text, special))
    return f


def distinct(text, special): return {w for part in special_pattern(special).split(text)[::2] for w in pretokenize(part)}


def distinct_bytes(text, special): return {utf8(w) for w in distinct(text, special)}


# Encoding a word

def by_choice(choose):
    def f(word, ranks):
        parts = split_bytes([word])[0]
        while True:
            known = [(i, pair) for i, pair in enumerate(zip(parts, parts[1:])) if pair in ranks]
            if not known: return parts
            i, pair = choose(known, ranks)
            parts[i:i+2] = [pair[0] + pair[1]]
    return f


def greedy(word, ranks):
    known, parts, i = {a + b for a, b in ranks}, [], 0
    while i < len(word):
        parts.append(next(word[i:j] for j in range(len(word), i, -1) if j == i + 1 or word[i:j] in known))
        i += len(parts[-1])
    return parts


def in_order_of_the_dict(word, ranks):
    parts = split_bytes([word])[0]
    for pair in ranks: parts = merge_pair(parts, pair)
    return parts


def each_once(word, ranks):
    parts = split_bytes([word])[0]
    for pair in sorted(ranks, key=ranks.get): parts = first_only(parts, pair)
    return parts


def one_round(word, ranks):
    parts = split_bytes([word])[0]
    known = [pair for pair in zip(parts, parts[1:]) if pair in ranks]
    return merge_pair(parts, min(known, key=ranks.get)) if known else parts


def using_up(word, ranks):
    parts = split_bytes([word])[0]
    while known := [pair for pair in zip(parts, parts[1:]) if pair in ranks]:
        best = min(known, key=ranks.get)
        parts = merge_pair(parts, best)
        del ranks[best]
    return parts


def as_text(word, ranks): return [t.decode("latin-1") for t in encode_word(word, ranks)]


# Encoding a stream

def stream(hold=2, final=True, errors="strict"):
    def f(chunks, ranks):
        decoder, held = codecs.getincrementaldecoder("utf-8")(errors), ""
        for chunk in chunks:
            words = list(pretokenize(held + decoder.decode(chunk)))
            sure = words[:max(len(words) - hold, 0)]
            for word in sure: yield from encode_word(utf8(word), ranks)
            held = "".join(words[len(sure):])
        held += decoder.decode(b"", final=final)
        for word in pretokenize(held): yield from encode_word(utf8(word), ranks)
    return f


def chunk_by_chunk(errors):
    def f(chunks, ranks):
        for chunk in chunks: yield from tokens(chunk.decode(errors=errors), ranks)
    return f


def whole_first(chunks, ranks): return iter(tokens(b"".join(chunks).decode(), ranks))


def end_lost(chunks, ranks):
    decoder, held = codecs.getincrementaldecoder("utf-8")(), []
    for chunk in chunks:
        *sure, a, b = ["", "", *pretokenize("".join(held) + decoder.decode(chunk))]
        for word in sure: yield from encode_word(utf8(word), ranks)
        held = [a, b]


def first_then_all(chunks, ranks):
    decoder, held, done = codecs.getincrementaldecoder("utf-8")(), "", 0
    for chunk in chunks:
        held += decoder.decode(chunk)
        if not done:
            words = list(pretokenize(held))[:-2]
            done = len(words)
            for word in words: yield from encode_word(utf8(word), ranks)
    for word in list(pretokenize(held + decoder.decode(b"", final=True)))[done:]: yield from encode_word(utf8(word), ranks)


def hoard(chunks, ranks):
    "Keeps the whole text, and splits it again and again"
    decoder, held, done = codecs.getincrementaldecoder("utf-8")(), "", 0
    for chunk in chunks:
        held += decoder.decode(chunk)
        found = [t for word in list(pretokenize(held))[:-2] for t in encode_word(utf8(word), ranks)]
        yield from found[done:]
        done = max(done, len(found))
    yield from [t for word in pretokenize(held + decoder.decode(b"", final=True)) for t in encode_word(utf8(word), ranks)][done:]


def buffered(size):
    "Another right answer: collects some of the text before it encodes"
    def f(chunks, ranks):
        decoder, held = codecs.getincrementaldecoder("utf-8")(), ""
        for chunk in chunks:
            held += decoder.decode(chunk)
            if len(held) < size: continue
            *sure, a, b = ["", "", *pretokenize(held)]
            for word in sure: yield from encode_word(utf8(word), ranks)
            held = a + b
        yield from tokens(held + decoder.decode(b"", final=True), ranks)
    return f


def at_spaces(chunks, ranks):
    "Another right answer: what comes before the last space that follows a letter is sure."
    decoder, held = codecs.getincrementaldecoder("utf-8")(), ""
    for chunk in chunks:
        held += decoder.decode(chunk)
        cut = max((m.start() + 1 for m in regex.finditer(r"\p{L} ", held)), default=0)
        yield from tokens(held[:cut], ranks)
        held = held[cut:]
    yield from tokens(held + decoder.decode(b"", final=True), ranks)


def at_last_white_space(chunks, ranks):
    "Cuts a run of white space in two if it arrives in two chunks."
    decoder, held = codecs.getincrementaldecoder("utf-8")(), ""
    for chunk in chunks:
        held += decoder.decode(chunk)
        cut = max(held.rfind(" "), held.rfind("\n"), 0)
        yield from tokens(held[:cut], ranks)
        held = held[cut:]
    yield from tokens(held + decoder.decode(b"", final=True), ranks)


WRONG = [
    ("sizes", SIZES | {"utf-8": 8}, "utf-8: 8 is the number of characters"),
    ("sizes", SIZES | {"utf-8": 15}, "short by one for each 🙂"),
    ("sizes", SIZES | {"utf-8": 18}, "utf-8: 18 is too large"),
    ("sizes", SIZES | {"utf-16": 20}, "utf-16: 20 leaves out the byte order mark"),
    ("sizes", SIZES | {"utf-16": 18}, "utf-16: 18 takes 🙂 for one unit"),
    ("sizes", SIZES | {"utf-16": 16}, "for one unit of two bytes, but it is a pair of surrogates, and leaves out the byte order mark"),
    ("sizes", SIZES | {"utf-32": 32}, "utf-32: 32 leaves out the byte order mark"),
    ("sizes", SIZES | {"utf-32": 36.5}, "utf-32: 36.5 is not a whole number"),
    ("sizes", (17, 22, 36), "expected a dict with the keys utf-8, utf-16, utf-32"),
    ("sizes", {"utf-8": 17}, "expected a dict with the keys"),
    ("sizes", None, "got None"),

    ("same_look", ("é", "é"), "the two texts are the same, '\\xe9'"),
    ("same_look", ("\xe9", "e\u0301"), "'\\xe9' has 2 bytes and 'e\\u0301' has 3"),
    ("same_look", ("\u2126", "\u03a9"), "has 3 bytes and '\\u03a9' has 2"),
    ("same_look", ("o", "о"), "'o' and '\\u043e' have different NFC"),
    ("same_look", ("ﬁ", "fi"), "have different NFC (only NFKC joins them)"),
    ("same_look", ("\u00b5", "\u03bc"), "have different NFC (only NFKC joins them)"),
    ("same_look", ("a\u0301\u0300", "a\u0300\u0301"), "have different NFC"),
    ("same_look", "éé", "expected a pair of str"),
    ("same_look", (b"a", b"b"), "expected a pair of str"),
    ("same_look", ("a\ud800", "a"), "half of a surrogate pair"),

    ("split", split_as_given, "the longest is taken"), ("split", split_shortest, "the longest is taken"),
    ("split", split_unescaped, "characters such as | have no special meaning"), ("split", split_longest_anywhere, "the first from the left is taken"),
    ("split", split_without_them, "expected ['a', 'X', 'b'], got ['a', 'b']: each special token is a part of its own"), ("split", split_with_empty, "an empty text has no parts"), ("split", lambda t, s: split_right(t, s) if s else [t], "also without special tokens"),
    ("split", split_stripped, "white space stays"), ("split", split_sorting, "changed its arguments"),
    ("split", split_without_list, "without special tokens the text is one part"), ("split", lambda t, s: iter(split_right(t, s)), "that has the type list_iterator, not list"),
    ("split", lambda t, s: [p.encode() for p in split_right(t, s)], "got [b'a', b'X', b'b']: b'a' has the type bytes, not str"), ("split", lambda t, s: None, "expected ['a', 'X', 'b'], got None: is a return or yield missing?"),
    ("split", lambda t: [t], "your code raised TypeError"), ("split", fails, "your code raised RuntimeError('two\\nlines')"),
    ("split", ["a"], "expected a function, got ['a']"),

    ("step", step(by(lambda pair, n: (-n, pair), min)), "have the same count, and (b'a', b'c') is the greater one"),
    ("step", step(by(lambda pair, n: n)), "is the greater one"),
    ("step", step(lambda pairs: by(lambda pair, n: n)(dict(reversed(pairs.items())))), "is the greater one"),
    ("step", step(by(lambda pair, n: (n, pair[0] + pair[1]))), "(b'ab', b'c') is the greater one"),
    ("step", step(by(lambda pair, n: (n, len(pair[0] + pair[1]), pair))), "is the greater one"),
    ("step", step(by(lambda pair, n: (n, [p.decode(errors="ignore") for p in pair]))), "(b'\\xc3', b'\\xa9') is the greater one"),
    ("step", step(by(lambda pair, n: pair)), "has the count 1, but"),
    ("step", step(count=lambda words, numbers: count_pairs(words, [1]*len(words))), "(b'c', b'd') has the count 2, but (b'a', b'b') has 5"),
    ("step", step(count=without_overlap), "(b'b', b'c') has the count 1, but (b'a', b'a') has 2"),
    ("step", step(join=from_the_right), "expected [b'aa', b'a'], got [b'a', b'aa']: every occurrence is joined, from left to right"),
    ("step", step(join=first_only), "every occurrence is joined"), ("step", step(join=in_place), "changed its arguments"),
    ("step", step(join=lambda parts, pair: parts), "every occurrence is joined"),
    ("step", step(join=lambda parts, pair: merge_pair(parts, pair)[:-1] or parts), "expected [b'a', b'b'], got [b'a']: put together, these are not the bytes that were given"),
    ("encode", lambda word, ranks: [b""]*len(word), "got [b'', b'', b'']: put together, these are not the bytes that were given"),
    ("step", step(join=lambda parts, pair: tuple(merge_pair(parts, pair))), "that has the type tuple, not list"),
    ("step", step(join=lambda parts, pair: [t.decode("latin-1") for t in merge_pair(parts, pair)]), "got ['a', 'b']: 'a' has the type str, not bytes"),
    ("step", step(join=lambda parts, pair: [bytearray(t) for t in merge_pair(parts, pair)]), "bytearray(b'a') has the type bytearray, not bytes"),
    ("step", step_gives(lambda pair, words: pair), "expected a tuple of two bytes as the pair, got b'c'"),
    ("step", step_gives(lambda pair, words: words), "expected (pair, words), got ["),
    ("step", step_gives(lambda pair, words: (b"".join(pair), words)), "expected a tuple of two bytes as the pair, got b'cb'"),
    ("step", step_gives(lambda pair, words: (list(pair), words)), "expected a tuple of two bytes"),
    ("step", step_gives(lambda pair, words: (tuple(p.decode("latin-1") for p in pair), words)), "expected a tuple of two bytes"),
    ("step", step_gives(lambda pair, words: (pair, words[:-1])), "expected a list of 2 words"),
    ("step", step_gives(lambda pair, words: (pair, iter(words))), "expected a list of 2 words"), ("step", fails, "raised RuntimeError"),

    ("bound", bound(lambda t, s: [w for w, n in count_words([t], s).items() for _ in range(n)]), "267 tokens are too many: how often can its distinct words be joined?"),
    ("bound", bound(distinct), "for text = 'привет', special = []: 261 tokens, but training fills 267"),
    ("bound", bound(distinct_bytes, more=-1), "257 tokens, but training fills 258"),
    ("bound", bound(distinct_bytes, more=1), "259 tokens are too many"),
    ("bound", bound(distinct_bytes, specials=False), "tokens, but training fills"),
    ("bound", bound(lambda t, s: distinct_bytes(t, [])), "text = 'ab<|endoftext|>cd', special = ['<|endoftext|>']"),
    ("bound", bound(distinct_bytes, size=lambda w: len(w) + 1), "tokens are too many"),
    ("bound", lambda t, s: 256 + len(s) + max(len(utf8(t)) - 1, 0), "tokens are too many"),
    ("bound", lambda t, s: 256 + len(s) + max((len(w) - 1 for w in distinct_bytes(t, s)), default=0), "tokens, but training fills"),
    ("bound", lambda t, s: 256 + len(s) + len(count_pairs(split_bytes(distinct_bytes(t, s)), [1]*99)), "tokens, but training fills"),
    ("bound", lambda t, s: sum(len(w) - 1 for w in distinct_bytes(t, s)), "2 tokens, but training fills 258"),
    ("bound", lambda t, s: float(bound(distinct_bytes)(t, s)), "expected a whole number, got 258.0"), ("bound", lambda t, s: True, "expected a whole number, got True"),
    ("bound", lambda t, s: None, "expected a whole number, got None: is a return or yield missing?"), ("bound", fails, "raised RuntimeError"), ("bound", 258, "expected a function, got 258"),

    ("ids", IDS | {"merges": 31_744}, "merges: 31,744 forgets that special tokens take ids too"),
    ("ids", IDS | {"merges": 31_998}, "forgets that the bytes take ids too"), ("ids", IDS | {"merges": 31_741}, "merges: 31,741 is too small"),
    ("ids", IDS | {"byte": 97}, "byte: 97 forgets that special tokens come first"), ("ids", IDS | {"byte": 98}, "byte: 98 is too small"),
    ("ids", IDS | {"byte": 100}, "ids begin at 0"), ("ids", IDS | {"last": 32_000}, "last: 32,000 is one too many: ids begin at 0"),
    ("ids", IDS | {"last": 31_742}, "is the number of merges, not an id"), ("ids", IDS | {"gpt2_last": 31_999}, "in GPT-2's, special tokens come last"),
    ("ids", IDS | {"gpt2_last": 31_998}, "gpt2_last: 31,998 is one too many"), ("ids", IDS | {"uint16": 65_277}, "65,536 ids fit, 0 to 65,535"),
    ("ids", IDS | {"uint16": 65_280}, "uint16: 65,280 forgets that special tokens"), ("ids", IDS | {"uint16": 65_536}, "is the number of all ids"),
    ("ids", IDS | {"byte": b"a"}, "byte: b'a' is not a number"), ("ids", IDS | {"byte": True}, "byte: True is not a number"),
    ("ids", dict(merges=31_742), "expected a dict with the keys merges, byte"), ("ids", list(IDS.values()), "expected a dict"),

    ("encode", greedy, "expected [b'a', b'bc'], got [b'ab', b'c']: the pair of lowest rank is joined first, wherever it is"),
    ("encode", by_choice(lambda known, ranks: known[0]), "the pair of lowest rank is joined first"),
    ("encode", by_choice(lambda known, ranks: max(known, key=lambda k: ranks[k[1]])), "the pair of lowest rank is joined first"),
    ("encode", by_choice(lambda known, ranks: max(known, key=lambda k: len(k[1][0] + k[1][1]))), "the pair of lowest rank is joined first"),
    ("encode", by_choice(lambda known, ranks: min(reversed(known), key=lambda k: ranks[k[1]])), "expected [b'aa', b'a'], got [b'a', b'aa']: a pair is joined from left to right"),
    ("encode", in_order_of_the_dict, "the pair of lowest rank is joined first"), ("encode", each_once, "expected [b'ab', b'ab'], got [b'ab', b'a', b'b']: every occurrence"),
    ("encode", one_round, "expected"), ("encode", using_up, "changed its arguments"), ("encode", as_text, "got ['a', 'bc']: 'a' has the type str, not bytes"),
    ("encode", lambda word, ranks: tuple(encode_word(word, ranks)), "got (b'a', b'bc'): that has the type tuple, not list"), ("encode", lambda word, ranks: list(word), "got [97, 98, 99]: 97 has the type int, not bytes"),
    ("encode", lambda word, ranks: encode_word(word, ranks) or [b""], "an empty word has no tokens"), ("encode", fails, "raised RuntimeError"),
    ("encode", lambda word, ranks: [t for t in encode_word(word, ranks) if t.decode() or 1], "raised UnicodeDecodeError"),

    ("encode_chunks", chunk_by_chunk("strict"), "unexpected end of data"), ("encode_chunks", chunk_by_chunk("replace"), "put together, these are not the bytes that were given"),
    ("encode_chunks", chunk_by_chunk("ignore"), "put together, these are not the bytes that were given"), ("encode_chunks", stream(hold=0), "expected the same tokens as for the whole text"),
    ("encode_chunks", stream(hold=1), "expected the same tokens as for the whole text"), ("encode_chunks", end_lost, "put together, these are not the bytes that were given"),
    *(("encode_chunks", answer, "kB after ") for answer in (whole_first, first_then_all, hoard, lambda chunks, ranks: list(stream()(chunks, ranks)))),
    ("encode_chunks", at_last_white_space, "expected the same tokens as for the whole text"),
    ("encode_chunks", stream(final=False), "these bytes aren't valid UTF-8, expected a ValueError"), ("encode_chunks", stream(errors="replace"), "expected a ValueError, got"),
    ("encode_chunks", stream(errors="ignore"), "expected a ValueError, got"),
    ("encode_chunks", lambda chunks, ranks: (t.decode("latin-1") for t in stream()(chunks, ranks)), "'Ã©' has the type str, not bytes"),
    ("encode_chunks", lambda chunks, ranks: encode_word(b"".join(chunks), ranks), "expected the same tokens as for the whole text"),
    ("encode_chunks", lambda chunks, ranks: print(end=""), "got None: is a return or yield missing? Printing a value doesn't return it"), ("encode_chunks", lambda chunks, ranks: 7, "'int' object is not iterable"), ("encode_chunks", fails, "raised RuntimeError"), ("encode_chunks", None, "expected a function, got None"),

    ("grows", (STORY, 2.84), "it does not get larger"), ("grows", (STORY.title(), 2.2), "it does not get larger"),
    ("grows", ("zqxj vkwq "*30, 1.), "these aren't words that the tokenizer knows: in lower case, too"), ("grows", ("काला कुत्ता "*30, 1.), "'क' is not ASCII"),
    ("grows", (BIG[:150], RATIO), "the text has 150 characters, expected at least 200"), ("grows", (BIG, 1/RATIO), "is tokens per byte"),
    ("grows", (BIG, sum(EACH)/len(EACH)), "is the mean over words"), ("grows", (BIG, 1.5), "bytes per token: 1.5 is wrong"), ("grows", (BIG, float("nan")), "nan is not a number"),
    ("grows", (BIG, "1.2"), "'1.2' is not a number"), ("grows", BIG, "expected (text, bytes per token)"), ("grows", (BIG.encode(), RATIO), "expected (text, bytes per token)"),
]

RIGHT = [("sizes", SIZES), ("sizes", dict(reversed(SIZES.items()))), ("same_look", ("a\u0323\u0307", "a\u0307\u0323")), ("same_look", ["\uf900", "\u8c48"]),
         ("split", split_right), ("split", split_by_hand), ("step", step()), ("step", step(by(lambda pair, n: (n, pair)))), ("bound", bound(distinct_bytes)),
         ("bound", lambda t, s: 256 + len(s) + len(train_bpe_naive(list(distinct_bytes(t, s)), 1000))),
         ("ids", IDS), ("ids", {k: float(v) for k, v in reversed(IDS.items())}), ("encode", encode_word), ("encode", by_choice(lambda known, ranks: min(known, key=lambda k: ranks[k[1]]))),
         ("encode_chunks", stream()), ("encode_chunks", stream(hold=3)), ("encode_chunks", buffered(1000)), ("encode_chunks", buffered(16_000)), ("encode_chunks", at_spaces), ("grows", (BIG, RATIO)), ("grows", [BIG, round(RATIO, 2)]), ("grows", (BIG, np.float32(RATIO))), ("grows", (BIG, np.array(RATIO)))]


GRADERS = Graders(ex, WRONG, RIGHT)
refused = GRADERS.refused
test_wrong_answers_are_refused_in_one_line_that_says_why, test_right_answers_pass_in_silence, test_every_grader_is_tried, test_a_grader_says_the_same_each_time = GRADERS.tests()


@pytest.mark.parametrize("task", ["split", "step", "bound", "encode", "encode_chunks"])
def test_what_the_students_code_raises_is_kept(task): GRADERS.stops(task)


def test_only_a_value_error_is_right_for_bytes_that_are_no_text():
    def other_error(chunks, ranks):
        try: yield from stream()(chunks, ranks)
        except UnicodeDecodeError: raise KeyError("bad") from None
    assert "expected a ValueError, your code raised KeyError('bad')" in str(refused("encode_chunks", other_error))


def test_random_cases_find_what_the_fixed_ones_do_not():
    "A function that knows the fixed cases by heart and is wrong elsewhere."
    fixed = {repr(case[:2]) for case in ex._SPLITS}
    assert "expected" in str(refused("split", lambda t, s: split_right(t, s) if repr((t, s)) in fixed else split_shortest(t, s)))
    known = {repr(tuple(case)) for case in ex._STEPS}
    right, smallest = step(), step(by(lambda pair, n: (-n, pair), min))
    assert "is the greater one" in str(refused("step", lambda w, n: (right if repr((w, n)) in known else smallest)(w, n)))
    def by_heart(word, ranks): return (encode_word if len(ranks) < 5 else greedy)(word, ranks)
    assert "expected" in str(refused("encode", by_heart))


def test_story_ranks_are_the_callers_own():
    ex.story_ranks().clear()
    merges = train_bpe_heap(count_words(islice(Stories(0), 300)), 744)
    assert ex.story_ranks() == {pair: rank for rank, pair in enumerate(merges)} and len(merges) == 744
