"Round trips, files, bad input, and the same ids as other libraries."
import copy
import json
import os
import random
import subprocess
import sys
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from lmcourse.tokenization.bpe import PRETOKENIZE, count_words, train_bpe_heap
from lmcourse.tokenization.encoding import byte_alphabet, make_vocab
from lmcourse.tokenization import tokenizer as tokenizer_module, vocabulary
from lmcourse.tokenization.tokenizer import ReadableEncoder, Rules, Tokenizer, read_merges, read_vocab, text_to_token, token_to_text, train_bpe
from lmcourse.tools.stories import Stories

END = "<|endoftext|>"
STORIES = list(islice(Stories(0), 60))
TOKENIZER = Tokenizer.train(STORIES + ["Ünïcödé naïve 你好 你好 🙂🙂 été l'été\n\n\t  12 123"], 800, [END, END*2, "<|ünï cöde|>"])
TOKENIZER.encode("x"*5000)                                             # from here on the compiled encoder, for short texts too
LLAMA3 = Rules(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+", whole_words=True)
QWEN = Rules(LLAMA3.pattern.replace("{1,3}", ""), nfc=True)
TEXT = st.lists(st.text(st.characters(codec="utf-8"), max_size=20) | st.sampled_from([END, END[:5], "<|ünï cöde|>", " the", "'s", "  ", "\n\n"])).map("".join)
HARD = ["", " ", "\n", "   three", "tabs\t\tand \u00a0nbsp \u2003 em \u3000", "isn't ISN'T 'S ''s 'llama", "x²½Ⅷ٣४ 12,345.67", "e\u0301 é \u200d👩‍👩‍👧‍👧",
        "\x00\x1c\x1d\x1e\x1f\x85\u2028\u2029", "الكل جميعا ไทย हिन्दी 한국어 русский", "a" * 300, "<|endoftext", f"{END}{END}{END} x {END}", "\ufeffbom\ufffd",
        "\U000e0001\U0010ffff\U0001f9ff"] + STORIES[:3]


@settings(max_examples=300, deadline=None)
@given(TEXT)
def test_every_text_comes_back(text):
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text and all(0 <= i < TOKENIZER.vocab_size for i in ids)
    assert b"".join(map(TOKENIZER.token_bytes, ids)) == text.encode()


@settings(deadline=None)
@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=30))
def test_any_ids_can_be_shown(ids):
    expected = b"".join(TOKENIZER.vocab[i] for i in ids).decode("utf-8", "replace")
    assert TOKENIZER.decode(ids) == expected


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60) | st.lists(st.sampled_from([b"\xff", b"\xc3", b"\xa9", b"\xe5\xa5", b"\xbd", b"\xed\xa0\x80", b"\xc1\x81", b" ", b"a", b"'s"])).map(b"".join))
def test_all_bytes_come_back(data):
    ids = TOKENIZER.encode_bytes(data)
    assert TOKENIZER.decode_bytes(ids) == data
    assert ids == ReadableEncoder(TOKENIZER).encode(data).tolist()


@settings(max_examples=300, deadline=None)
@given(TEXT)
def test_compiled_and_readable_are_equal(text):
    ids = TOKENIZER.encode(text)
    assert ReadableEncoder(TOKENIZER).encode(text.encode()).tolist() == ids
    for threads in (1, 3): assert TOKENIZER.encode_array(text*200, threads).tolist() == ReadableEncoder(TOKENIZER).encode(text.encode()*200).tolist()
    array = TOKENIZER.encode_array(text.encode())
    assert array.dtype == np.uint16 and array.tolist() == ids


def test_merges_in_any_order_are_joined_one_at_a_time(tmp_path):
    "Joining a pair may make one of lower rank, which comes next: in the compiled encoder, the readable one, and Hugging Face's"
    rng, texts = random.Random(0), hard_texts(1, 50) + ["ab"*40 + "a", " "*70, "the"*60]
    aba = Tokenizer(BYTES | {256: b"ab", 257: b"aba"}, [(b"ab", b"a"), (b"a", b"b")])
    shuffled = [Tokenizer(TOKENIZER.vocab, rng.sample(TOKENIZER.merges, len(TOKENIZER.merges)), TOKENIZER.special_tokens) for _ in range(5)]
    for i, t in enumerate([aba, *shuffled]):
        t.save(tmp_path/str(i))
        try: other = __import__("tokenizers").Tokenizer.from_file(str(tmp_path/str(i)/"tokenizer.json"))
        except ImportError: other = None
        for text in texts:
            ids = t.encode(text)
            assert ReadableEncoder(t).encode(text.encode()).tolist() == ids, text
            assert other is None or other.encode(text).ids == ids, text
    assert aba.encode("abab") == [257, 98]


@settings(max_examples=100, deadline=None)
@given(st.lists(TEXT, max_size=6), st.integers(1, 3))
def test_batch_is_each_text_by_itself(texts, threads):
    ids, offsets = TOKENIZER.encode_batch(texts, threads)
    assert len(offsets) == len(texts) + 1 and [ids[i:j].tolist() for i, j in zip(offsets, offsets[1:])] == [TOKENIZER.encode(t) for t in texts]


@settings(max_examples=100, deadline=None)
@given(TEXT, st.data())
def test_iterable_is_the_chunks_put_together(text, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    chunks = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)])]
    assert list(TOKENIZER.encode_iterable(iter(chunks))) == TOKENIZER.encode(text)


@pytest.mark.parametrize("rules", [Rules(), LLAMA3])
def test_iterable_over_long_texts(rules):
    t = Tokenizer(TOKENIZER.vocab, TOKENIZER.merges, TOKENIZER.special_tokens, rules)
    rng = random.Random(0)
    for text in ["".join(rng.choices(HARD + STORIES, k=400)), "a"*200_000 + " b"*50_000, "好"*100_000, "\u3000 "*60_000, "<|ünï cöde|>"*9_000, " <|ünï cöde|"*9_000]:
        for size in (1, 999, 70_000):
            if size == 1: text = text[:70_000]
            data = text.encode()
            expected = t.encode_bytes(data)
            assert list(t.encode_iterable(text[i:i+size] for i in range(0, len(text), size))) == expected
            assert list(t.encode_iterable(data[i:i+size] for i in range(0, len(data), size))) == expected     # characters cut in two


def test_iterable_is_lazy():
    def endless():
        while True: yield "the end "
    ids = TOKENIZER.encode("the end "*5)
    assert list(islice(TOKENIZER.encode_iterable(endless()), 10)) == ids[:10]


@pytest.mark.parametrize("line", ["天气很好。\n", "それは、\n", "à \n", "“Yes”\n", "the end\n"])
def test_iterable_cuts_lines_whatever_they_end_in(line):
    def lines():
        for _ in range(50_000): yield line
        raise AssertionError("50,000 lines are held")
    assert next(TOKENIZER.encode_iterable(lines())) == TOKENIZER.encode(line)[0]


def test_iterable_holds_little():
    script = """
import resource, sys
from itertools import repeat
from lmcourse.tokenization.tokenizer import Tokenizer
t = Tokenizer.from_folder(sys.argv[1])
text = "Once upon a time there was a clever hen. " * 2000
for _ in t.encode_iterable([text]*5): pass
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for n, _ in enumerate(t.encode_iterable(repeat(text, 100_000_000//len(text)))): pass
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)/1024, n)
"""
    pytest.importorskip("resource")
    with tempfile.TemporaryDirectory() as tmp:
        TOKENIZER.save(f"{tmp}/t")
        done = subprocess.run([sys.executable, "-c", script, f"{tmp}/t"], capture_output=True, text=True, check=True)
    grown, last = done.stdout.split()
    assert float(grown) < 50 and int(last) > 10_000_000


def test_a_full_store_of_words_changes_nothing():
    small = ReadableEncoder(TOKENIZER)
    small.words.limit = 3
    for text in STORIES[:5]:
        assert small.encode(text.encode()).tolist() == TOKENIZER.encode(text) and len(small.words) <= 3
    assert small.encode(b"a"*500).tolist() == TOKENIZER.encode("a"*500) and "a"*500 not in small.words


def test_threads_share_a_tokenizer():
    t, texts = copy.deepcopy(TOKENIZER), STORIES*20 + HARD*20
    with ThreadPoolExecutor(8) as pool: found = list(pool.map(t.encode, texts))
    assert found == [TOKENIZER.encode(text) for text in texts]


def test_special_tokens():
    one, two, odd = (TOKENIZER.encode(s) for s in TOKENIZER.special_tokens)
    assert [one, two, odd] == [[0], [1], [2]] and TOKENIZER.end_of_text == 0
    assert TOKENIZER.encode(END*3) == [1, 0] and TOKENIZER.encode("<|ünï cöde|>x")[0] == 2
    none = Tokenizer(TOKENIZER.vocab, TOKENIZER.merges)
    assert not {0, 1, 2} & set(none.encode(END*2)) and none.decode([0]) == END
    with pytest.raises(ValueError, match="no special token <|endoftext|>"): none.end_of_text
    more = Tokenizer(TOKENIZER.vocab, TOKENIZER.merges, [END, "<|new|>", " the"])
    assert more.vocab_size == 801 and more.encode("<|new|>") == [800] and more.encode("in the end").count(more.ids[b" the"]) == 1


MADE = Tokenizer(TOKENIZER.vocab, TOKENIZER.merges, [END, " the", "th", "的", "<|"])         # merges make some of these too
WHOLE = Tokenizer(TOKENIZER.vocab, TOKENIZER.merges, [END, " the", "th", "endoftext"], LLAMA3)  # and words of the text are some
OUTSIDE = st.lists(TEXT | st.sampled_from([" the", "the", "th", "thth", "的", "<|", "endoftext"])).map("".join)


@settings(max_examples=300, deadline=None)
@given(OUTSIDE, st.sampled_from([TOKENIZER, MADE, WHOLE]), st.integers(1, 3), st.data())
def test_a_text_from_outside_holds_no_special_token(given, t, times, data):
    special = {t.ids[s.encode()] for s in t.special_tokens}
    for text in (given, given*times + "x"*5000):                         # also long enough for the compiled encoder
        ids = t.encode(text, special=False)
        assert t.decode(ids) == text and not special & set(ids)
        assert t.encode_bytes(text.encode(), special=False) == t.encode_array(text, times, special=False).tolist() == ids
        many, offsets = t.encode_batch([text, "", text], times, special=False)
        assert many.tolist() == ids*2 and offsets.tolist() == [0, len(ids), len(ids), 2*len(ids)]
        i = data.draw(st.integers(0, len(text)))
        assert list(t.encode_iterable([text[:i], text[i:]], special=False)) == ids
        if not any(s in text for s in t.special_tokens): assert t.encode(text) == ids


def test_special_tokens_are_ids_unless_the_caller_says_otherwise():
    text = f"the end{END}the end"
    assert TOKENIZER.encode(text).count(0) == 1 == TOKENIZER.encode(text, special=True).count(0)
    plain = Tokenizer(TOKENIZER.vocab, TOKENIZER.merges)
    assert TOKENIZER.encode(text, special=False) == plain.encode(text)
    for method in ("encode", "encode_bytes", "encode_array"):
        given = text.encode() if method == "encode_bytes" else text
        assert 0 in getattr(TOKENIZER, method)(given) and 0 not in getattr(TOKENIZER, method)(given, special=False)


HANDOUT = ({0: b" ", 1: b"a", 2: b"c", 3: b"e", 4: b"h", 5: b"t", 6: b"th", 7: b" c", 8: b" a", 9: b"the", 10: b" at"},
           [(b"t", b"h"), (b" ", b"c"), (b" ", b"a"), (b"th", b"e"), (b" a", b"t")])           # the example of CS336's first assignment


@pytest.mark.parametrize("special", [None, [END]])
def test_a_vocabulary_without_all_bytes(tmp_path, special):
    t = Tokenizer(*HANDOUT, special)
    assert t.encode("the cat ate") == [9, 7, 1, 5, 10, 3] and t.decode([9, 7, 1, 5, 10, 3]) == "the cat ate"
    assert t.encode_array("the cat ate"*1000).tolist() == list(t.encode_iterable(["the c", "at ate"]*1000)) != []
    t.save(tmp_path/"t")
    assert Tokenizer.from_folder(tmp_path/"t").encode("the cat") == [9, 7, 1, 5]
    for f in (t.encode, t.encode_array, lambda x: t.encode_batch([x]), lambda x: list(t.encode_iterable([x])), lambda x: t.encode(x, special=False)):
        with pytest.raises(ValueError, match="the byte 0x64 \\(b'd'\\) of the text has no token in this vocabulary, which lacks 250 of 256"): f("the dog")
    with pytest.raises(ValueError, match="b'th' is not in vocab"): Tokenizer({0: b"t", 1: b"h", 2: b"e"}, [(b"t", b"h")])
    with pytest.raises(ValueError, match="vocab is empty"): Tokenizer({}, [])


def test_a_single_byte_is_no_special_token():
    for make in (lambda: Tokenizer(TOKENIZER.vocab, TOKENIZER.merges, ["a"]), lambda: train_bpe(["the end"], 300, ["a"]), lambda: Tokenizer(*HANDOUT, ["z"])):
        with pytest.raises(ValueError, match="special token '[az]' is a single byte"): make()


def test_little_text_waits_for_no_compiler():
    "Neither the first training nor the first ids load Numba; much text does, and gives the same."
    script = """
import sys
from itertools import islice
from lmcourse.tokenization.tokenizer import Tokenizer, train_bpe
from lmcourse.tools.stories import Stories
stories = list(islice(Stories(0), 30))
tokenizer = Tokenizer(*train_bpe(stories, 500, threads=1), ["<|endoftext|>"])
def ids(text): return [tokenizer.encode(text), tokenizer.encode_array(text).tolist(), tokenizer.encode_batch([text], 2)[0].tolist(), list(tokenizer.encode_iterable([text]))]
few = ids(stories[0])
assert few == [few[0]]*4 and tokenizer.decode(few[0]) == stories[0] and "numba" not in sys.modules
many = ids("\\n".join(stories))
assert many == [many[0]]*4 and "numba" in sys.modules and ids(stories[0]) == few
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_little_text_and_much_are_learnt_alike(tmp_path, monkeypatch):
    for text, few in [("\n".join(STORIES), 1 << 20), ("\n".join(STORIES), 10), ("the "*5 + "a"*100, 1 << 20), ("the end"*9 + END, 1 << 20), ("", 10)]:
        monkeypatch.setattr(tokenizer_module, "_FEW_BYTES", few)
        (tmp_path/"text").write_text(text, encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = train_bpe_heap(count_words([text], [END]), 300 - 257)
            for source in (tmp_path/"text", [text], iter([text])): assert train_bpe(source, 300)[1] == expected
    with pytest.raises(TypeError, match="text 1 is a int"): train_bpe(["a", 1], 300)
    with pytest.raises(TypeError, match="expected an iterable"): train_bpe(b"a", 300)


@pytest.mark.parametrize("ids, error", [([-1], ValueError), ([800], ValueError), ([10**30], ValueError), ([1.], TypeError), (["1"], TypeError), ([None], TypeError)])
def test_ids_that_are_none(ids, error):
    with pytest.raises(error, match="expected 0 to 799" if error is ValueError else None): TOKENIZER.decode(ids)


def test_arrays_of_ids():
    np = pytest.importorskip("numpy")
    ids = np.array(TOKENIZER.encode(STORIES[0]), dtype=np.uint16)
    assert TOKENIZER.decode(ids) == STORIES[0]


def test_texts_that_are_none():
    with pytest.raises(ValueError, match="surrogate"): TOKENIZER.encode("a\udc80")
    with pytest.raises(TypeError, match="is a bytes"): TOKENIZER.encode(b"a")
    with pytest.raises(TypeError, match="is a NoneType"): TOKENIZER.encode(None)
    with pytest.raises(TypeError, match="expected an iterable"): next(TOKENIZER.encode_iterable("a"))
    for bad in (3, [65], None):
        with pytest.raises(TypeError, match=f"chunk 1 is a {type(bad).__name__}, expected str or bytes"): list(TOKENIZER.encode_iterable(["a", bad]))
    assert list(TOKENIZER.encode_iterable(["th", b"e", bytearray(b" e"), memoryview(b"nd")])) == TOKENIZER.encode("the end")
    with pytest.raises(TypeError, match="expected an iterable"): TOKENIZER.encode_batch("a")
    with pytest.raises(TypeError, match="is a int"): TOKENIZER.encode_batch(["a", 1])
    readable = Tokenizer(TOKENIZER.vocab, TOKENIZER.merges, rules=Rules(nfc=True))
    for t in (TOKENIZER, readable):
        for texts in ([b"a"], ["é", b"a"], ["é", b"a"]*20, ["a"]*40 + [1]):
            with pytest.raises(TypeError, match="text is a (bytes|int), expected a str"): t.encode_batch(texts)


def test_arguments_are_not_changed():
    vocab, merges = dict(TOKENIZER.vocab), list(TOKENIZER.merges)
    Tokenizer(vocab, merges, ["<|new|>"])
    assert vocab == TOKENIZER.vocab and merges == TOKENIZER.merges


def test_a_copy_for_another_process():
    assert copy.deepcopy(TOKENIZER).encode(STORIES[0]) == TOKENIZER.encode(STORIES[0])


BYTES = {i: bytes([i]) for i in range(256)}


@pytest.mark.parametrize("vocab, merges, words", [
    ({**BYTES, 257: b"th"}, [], "257 ids, 257 among them and 256 not, expected 0 to 256"),
    ({**BYTES, -1: b"th"}, [], "-1 among them"),
    ({**BYTES, 256: b"t"}, [], "ids 116 and 256 of vocab are both b't'"),
    ({**BYTES, 256: b""}, [], "empty token"),
    ({**BYTES, 256: b"th"}, [(b"t", b"h"), (b"th", b"e")], "but b'the' is not in vocab"),
    ({**BYTES, 256: b"the"}, [(b"th", b"e")], "but b'th' is not in vocab"),
    ({**BYTES, 256: b"th"}, [(b"t", b"h")]*2, "merges 0 and 1 are both"),
    ({**BYTES, 256: b"th"}, [(b"t", b"h", b"e")], "expected two byte strings")])
def test_vocabularies_that_do_not_fit(vocab, merges, words):
    with pytest.raises(ValueError, match=words): Tokenizer(vocab, merges)


@pytest.mark.parametrize("vocab", [{**BYTES, 256: "th"}, {**BYTES, "256": b"th"}, {**BYTES, True: b"\x01"}, {**BYTES, 2.5: b"th"}])
def test_vocabularies_of_other_types(vocab):
    if len(vocab) == 256: vocab = {True: b"\x01", **{i: t for i, t in BYTES.items() if i != 1}}
    with pytest.raises(TypeError, match="expected an int to bytes"): Tokenizer(vocab, [])


def test_every_saved_field_comes_back(tmp_path):
    TOKENIZER.save(tmp_path/"a"/"b")
    again = Tokenizer.from_folder(tmp_path/"a"/"b")
    assert sorted(p.name for p in (tmp_path/"a"/"b").iterdir()) == ["merges.txt", "tokenizer.json", "vocab.json"]
    assert [p.name for p in (tmp_path/"a").iterdir()] == ["b"]
    assert (again.vocab, again.merges, again.special_tokens) == (TOKENIZER.vocab, TOKENIZER.merges, TOKENIZER.special_tokens)
    assert again.digest == TOKENIZER.digest and len(again.digest) == 64
    by_files = Tokenizer.from_files(tmp_path/"a/b/vocab.json", str(tmp_path/"a/b/merges.txt"), TOKENIZER.special_tokens)
    assert by_files.digest == TOKENIZER.digest
    (tmp_path/"empty").mkdir()
    again.save(tmp_path/"empty")
    for name in ("vocab.json", "merges.txt", "tokenizer.json"):
        assert (tmp_path/"empty"/name).read_bytes() == (tmp_path/"a/b"/name).read_bytes()


def test_digest_is_of_the_content_and_not_of_the_format(tmp_path):
    TOKENIZER.save(tmp_path/"t")
    for name in ("vocab.json", "tokenizer.json"):
        path = tmp_path/"t"/name
        path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")), indent=3, sort_keys=True), encoding="utf-8")
    merges = tmp_path/"t/merges.txt"
    merges.write_bytes(merges.read_bytes().split(b"\n", 1)[1].replace(b"\n", b"\r\n"))
    assert Tokenizer.from_folder(tmp_path/"t").digest == TOKENIZER.digest
    base = (TOKENIZER.vocab, TOKENIZER.merges, TOKENIZER.special_tokens)
    swapped = {**base[0], 600: base[0][601], 601: base[0][600]}
    others = [Tokenizer(swapped, *base[1:]), Tokenizer(base[0], base[1][::-1], base[2]), Tokenizer(base[0], base[1][:-1], base[2]), Tokenizer(*base[:2], [END])]
    assert len({t.digest for t in others} | {TOKENIZER.digest}) == 5
    assert Tokenizer(*base[:2], base[2][::-1]).digest == TOKENIZER.digest


def test_saving_overwrites_nothing(tmp_path):
    (tmp_path/"file").write_text("mine")
    (tmp_path/"full").mkdir(); (tmp_path/"full/mine").write_text("mine")
    for name in ("file", "full"):
        with pytest.raises(FileExistsError, match="not an empty folder"): TOKENIZER.save(tmp_path/name)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["file", "full", "mine"]


def test_a_failed_save_leaves_nothing(tmp_path, monkeypatch):
    write, calls = Path.write_text, []
    def failing(self, *args, **kwargs):
        calls.append(self)
        if len(calls) == 3: raise OSError("disk full")
        return write(self, *args, **kwargs)
    monkeypatch.setattr(Path, "write_text", failing)
    with pytest.raises(OSError, match="disk full"): TOKENIZER.save(tmp_path/"t")
    assert not list(tmp_path.iterdir())


def test_special_tokens_that_can_not_be_told_apart(tmp_path):
    t = Tokenizer(BYTES, [], ["é"])          # in GPT-2's alphabet `é` is the byte 0xE9
    with pytest.raises(ValueError, match="'é' reads like another token"): t.save(tmp_path/"t")
    assert not list(tmp_path.iterdir())
    Tokenizer(BYTES, [], ["éé", "a b", "Ġ"*3]).save(tmp_path/"t")
    assert Tokenizer.from_folder(tmp_path/"t").encode("ééa bé") == [256, 257, 195, 169]


@pytest.mark.parametrize("change", [lambda lines: lines[:20], lambda lines: [], lambda lines: [lines[1], lines[0], *lines[2:]]])
def test_merges_that_a_copy_has_lost_or_in_another_order(tmp_path, change):
    "All tokens would still be there, but texts would be cut into other ones."
    TOKENIZER.save(tmp_path/"t")
    first, *lines = (path := tmp_path/"t/merges.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join([first, *(left := change(lines))]), encoding="utf-8")
    with pytest.raises(ValueError, match=f"t: tokenizer.json has {len(lines)} merges and merges.txt {len(left)}, expected the same ones"): Tokenizer.from_folder(tmp_path/"t")


def test_damaged_folders(tmp_path):
    def damaged(name, old, new):
        folder = tmp_path/str(len(list(tmp_path.iterdir())))
        TOKENIZER.save(folder)
        text = (folder/name).read_text(encoding="utf-8")
        assert old in text
        (folder/name).write_text(text.replace(old, new, 1), encoding="utf-8")
        return folder
    for name, old, new, words in [
            ("vocab.json", "{", "", "vocab.json: not JSON"), ("vocab.json", ': 300,', ': 301,', "both have the id 301"), ("vocab.json", ': 300,', ': "300",', "expected an integer"),
            ("vocab.json", ': 300,', ': 3000,', "3000 among them and 300 not"), ("merges.txt", "\n", "\nno such token\n", "line 2: 'no such token'"),
            ("merges.txt", "\n", "\nq zq\n", "not in vocab"), ("tokenizer.json", "added_tokens", "added", "not a whole tokenizer.json"), ("tokenizer.json", "{", "[", "not JSON"),
            ("tokenizer.json", f'"{END}": 0', f'"{END}": 1', "both have the id 1"), ("tokenizer.json", ': 300,', ': 3000,', "not of the same tokenizer")]:
        with pytest.raises(ValueError, match=words): Tokenizer.from_folder(damaged(name, old, new))
    folder = damaged("vocab.json", "{", "{")
    (folder/"merges.txt").unlink()
    with pytest.raises(FileNotFoundError, match="merges.txt not found"): Tokenizer.from_folder(folder)
    with pytest.raises(FileNotFoundError, match="no tokenizer"): Tokenizer.from_folder(tmp_path/"nowhere")


def test_files_that_are_something_else(tmp_path):
    file = tmp_path/"file"
    for text, words in [("[1]", "a list, expected an object"), ('{"a": 0, "a": 1}', "'a' appears twice"), ("", "not JSON"), ('{"a": true}', "expected an integer")]:
        file.write_text(text)
        with pytest.raises(ValueError, match=words): read_vocab(file)
    file.write_bytes(b"\xff\xfe")
    for read in (read_vocab, read_merges):
        with pytest.raises(ValueError, match="not UTF-8"): read(file)
        with pytest.raises(FileNotFoundError): read(tmp_path/"nowhere")
    for text in ("a", "a b c", "a  b", "a 好", " a", "a b\n#version: 0.2 x"):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match="expected two tokens"): read_merges(file)


@given(st.binary())
def test_byte_alphabet(token):
    text = token_to_text(token)
    assert text_to_token(text) == token and not any(c.isspace() for c in text) and text.isprintable()
    assert len(byte_alphabet()) == 256


# Training

@pytest.mark.parametrize("threads", [1, 2, 5])
def test_training_is_the_readable_one(tmp_path, threads):
    texts = STORIES + ["<|ünï cöde|>".join(["été "*30, "好 "*30])]*3
    special = [END, "<|ünï cöde|>"]
    merges = train_bpe_heap(count_words(texts, special), 700)
    file = tmp_path/"texts.txt"
    file.write_text(END.join(texts), encoding="utf-8")
    for source in (file, str(file), texts, iter(texts)):
        assert train_bpe(source, 958, special, threads=threads) == (make_vocab(merges, special), merges)


def test_too_few_pairs_are_said():
    with pytest.warns(UserWarning, match="pairs for only 10 merges, not 143, so the vocabulary has 267 tokens, not 400"):
        vocab, merges = train_bpe(["ten tents then tend the tent"], 400, [END])
    assert (len(vocab), len(merges)) == (267, 10)
    for empty in ([], [""], ["", END]):
        with pytest.warns(UserWarning, match="pairs for only 0 merges"): assert train_bpe(empty, 258) == (make_vocab([], [END]), [])


@pytest.mark.parametrize("size, special, error, words", [
    (256, [END], ValueError, "vocab_size = 256, expected at least 257"), (-1, [], ValueError, "expected at least 256"), (300., [], TypeError, "expected an int"),
    ("300", [], TypeError, "expected an int"), (300, [""], ValueError, "a special token is empty"), (300, [END]*2, ValueError, "given twice"),
    (300, ["a"], ValueError, "single byte"), (300, [END, "é"], ValueError, "'é' reads like another token"), (300, END, TypeError, "expected a list of strings"), (300, ["\ud800"], ValueError, "surrogate")])
def test_bad_settings_are_refused_before_anything_is_read(size, special, error, words):
    def texts():
        raise AssertionError("read")
        yield
    with pytest.raises(error, match=words): train_bpe(texts(), size, special)


def test_bad_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="a text itself is given as"): train_bpe("ten tents then", 300)
    file = tmp_path/"file"
    file.write_bytes(b"a "*3_000_000 + b"\xc3(")
    with pytest.raises(ValueError, match="byte 0xc3 at 6000000 is not UTF-8"): train_bpe(file, 258)
    with pytest.raises(ValueError, match="errors = 'surrogateescape'"): train_bpe(file, 258, errors="surrogateescape")
    with pytest.raises(ValueError, match="threads = 0"): train_bpe(file, 258, threads=0)
    assert train_bpe(file, 258, errors="ignore")[1] == [(b" ", b"a")]
    with pytest.warns(UserWarning): assert train_bpe(file, 300, errors="replace")[1] == [(b" ", b"a"), (b"\xef", b"\xbf"), (b"\xef\xbf", b"\xbd")] + train_bpe(file, 300, errors="replace")[1][3:]


# Other libraries

def hard_texts(seed=0, n=300):
    rng = random.Random(seed)
    alphabet = "aabc ABé好🙂'sd\n\t\r 12٣!.-\u00a0\u2003\x1c\x85\u0301\u200d" + "".join(chr(rng.choice([rng.randrange(0xd800), rng.randrange(0xe000, 0x30000)])) for _ in range(100))
    return HARD + ["".join(rng.choices(alphabet, k=rng.randrange(60))) for _ in range(n)]


@pytest.mark.parametrize("rules", [Rules(), LLAMA3, QWEN, Rules(r"\d"), Rules(r" ?\p{L}+")])
def test_hugging_face_gives_the_same_ids(tmp_path, rules):
    tokenizers = pytest.importorskip("tokenizers")
    ours = Tokenizer(TOKENIZER.vocab, TOKENIZER.merges, TOKENIZER.special_tokens, rules)
    ours.save(tmp_path/"t")
    other = tokenizers.Tokenizer.from_file(str(tmp_path/"t/tokenizer.json"))
    for text in hard_texts():
        ids = ours.encode(text)
        assert other.encode(text).ids == ids, text
        if not rules.nfc: assert other.decode(ids, skip_special_tokens=False) == text
    assert other.get_vocab_size() == ours.vocab_size
    other.save(str(tmp_path/"again.json"))           # as that library writes it
    again = Tokenizer.from_tokenizer_json(tmp_path/"again.json")
    assert again.digest == ours.digest and again.rules == rules


def test_whole_words_come_before_merges():
    vocab = make_vocab([(b"a", b"b"), (b"c", b"d"), (b"b", b"c"), (b"ab", b"cd")])
    short = [(b"b", b"c"), (b"a", b"b"), (b"c", b"d"), (b"ab", b"cd")]
    assert len(Tokenizer(vocab, short).encode("abcd")) == 3 and Tokenizer(vocab, short, rules=Rules(whole_words=True)).encode("abcd") == [259]


def test_a_token_of_a_tokenizer_json_is_converted_once(monkeypatch, tmp_path):
    "Merges name each token again and again"
    TOKENIZER.save(tmp_path/"t")
    texts, convert = [], vocabulary.text_to_token
    monkeypatch.setattr(vocabulary, "text_to_token", lambda text: texts.append(text) or convert(text))
    again = Tokenizer.from_tokenizer_json(tmp_path/"t/tokenizer.json")
    assert again.digest == TOKENIZER.digest and len(texts) == len({*texts}) == TOKENIZER.vocab_size


@pytest.mark.parametrize("change, words", [
    (dict(normalizer=dict(type="Lowercase")), "normalizer"), (dict(model=dict(type="WordPiece")), "a model of type WordPiece"),
    (dict(pre_tokenizer=dict(type="Metaspace")), "the pre-tokenizer Metaspace"), (dict(pre_tokenizer=None), "the pre-tokenizer None"),
    (dict(pre_tokenizer=dict(type="ByteLevel", add_prefix_space=True)), "add_prefix_space"), (dict(model=dict(type="BPE")), "not a whole tokenizer.json"),
    (dict(pre_tokenizer=dict(type="ByteLevel", use_regex=False)), "a second pattern"), (dict(added_tokens=[dict(id=0, content="<s>", lstrip=True)]), "with a condition"),
    (dict(pre_tokenizer=dict(type="Sequence", pretokenizers=[dict(type="Digits"), dict(type="ByteLevel")])), "Digits"), (dict(added_tokens=3), "not a whole"),
    (dict(pre_tokenizer=dict(type="Sequence", pretokenizers=[dict(type="Split", pattern=dict(Regex="("), behavior="Isolated"), dict(type="ByteLevel", use_regex=False)])),
     r"tokenizer.json: the pattern '\('"),
    (dict(normalizer=dict(type="NFC"), added_tokens=[dict(id=0, content="é", normalized=True)]), "the normalized added token 'é'")])
def test_other_kinds_of_tokenizer_are_refused_by_name(tmp_path, change, words):
    TOKENIZER.save(tmp_path/"t")
    file = tmp_path/"t/tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | change), encoding="utf-8")
    for f in (lambda: Tokenizer.from_tokenizer_json(file), lambda: Tokenizer.from_folder(tmp_path/"t")):
        with pytest.raises(ValueError, match=words): f()


@pytest.mark.parametrize("damage, words", [
    (lambda model: model["vocab"].update(zz=5), "'zz' and '.' both have the id 5"), (lambda model: model["vocab"].update(zz=0), "'zz' and '<.endoftext.>' both have the id 0"),
    (lambda model: model["vocab"].update(a="5"), "the id of 'a' is '5', expected an integer"), (lambda model: model["vocab"].update(a=None), "the id of 'a' is None")])
def test_ids_of_a_tokenizer_json(tmp_path, damage, words):
    TOKENIZER.save(tmp_path/"t")
    file = tmp_path/"t/tokenizer.json"
    damage((whole := json.loads(file.read_text(encoding="utf-8")))["model"])
    file.write_text(json.dumps(whole), encoding="utf-8")
    with pytest.raises(ValueError, match=f"tokenizer.json: {words}"): Tokenizer.from_tokenizer_json(file)


def gpt2():
    folder = os.environ.get("LMCOURSE_DATA", "")
    files = [Path(folder)/"gpt2_vocab.json", Path(folder)/"gpt2_merges.txt"]
    if not folder or not all(f.is_file() for f in files): pytest.skip("LMCOURSE_DATA has no gpt2_vocab.json and gpt2_merges.txt")
    return Tokenizer.from_files(*files, [END])


def test_gpt2(tmp_path):
    t = gpt2()
    assert (t.vocab_size, len(t.merges), t.end_of_text) == (50257, 50000, 50256)
    assert t.encode("Hello, world!") == [15496, 11, 995, 0] and t.encode(f" the{END}") == [262, 50256]
    for text in hard_texts(): assert t.decode(t.encode(text)) == text
    assert [t.token_bytes(i) for i in range(256)] == list(make_vocab([], gpt2_order=True).values())
    t.save(tmp_path/"gpt2")
    assert Tokenizer.from_folder(tmp_path/"gpt2").digest == t.digest
    if tokenizers := pytest.importorskip("tokenizers"):
        other = tokenizers.Tokenizer.from_file(str(tmp_path/"gpt2/tokenizer.json"))
        for text in hard_texts(1): assert other.encode(text).ids == t.encode(text), text


def test_gpt2_against_tiktoken():
    tiktoken, t = pytest.importorskip("tiktoken"), gpt2()
    ranks = {token: i for i, token in t.vocab.items() if i != t.end_of_text}
    other = tiktoken.Encoding("gpt2", pat_str=PRETOKENIZE.pattern, mergeable_ranks=ranks, special_tokens={END: t.end_of_text})
    for text in hard_texts(2, 2000): assert other.encode(text, allowed_special="all") == t.encode(text), text


def test_a_small_text_waits_for_no_compiler_however_many_merges_are_wanted(monkeypatch):
    from lmcourse.tokenization import tokenizer
    monkeypatch.setattr(tokenizer, "_ready", lambda *kernels: False)
    assert tokenizer._few_merges({b"ab": 3, b"abc": 1}, 10**9) and not tokenizer._few_merges({b"ab"*9 + bytes([i, j]): 1 for i in range(20) for j in range(20)}, 10**9)
