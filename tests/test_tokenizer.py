"Round trips, files, bad input, and the same ids as other libraries."
import copy
import json
import os
import random
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from lmcourse.tokenization.bpe import PRETOKENIZE
from lmcourse.tokenization.tokenizer import Tokenizer, byte_alphabet, read_merges, read_vocab, text_to_token, token_to_text
from lmcourse.tools.stories import Stories

END = "<|endoftext|>"
STORIES = list(islice(Stories(0), 60))
TOKENIZER = Tokenizer.train(STORIES + ["Ünïcödé naïve 你好 你好 🙂🙂 été l'été\n\n\t  12 123"], 800, [END, END*2, "<|ünï cöde|>"])
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


@settings(deadline=None)
@given(st.lists(TEXT, max_size=4))
def test_iterable_is_each_text_by_itself(texts):
    assert list(TOKENIZER.encode_iterable(iter(texts))) == [i for t in texts for i in TOKENIZER.encode(t)]


def test_iterable_is_lazy():
    def endless():
        while True: yield "the end "
    ids = TOKENIZER.encode("the end ")
    assert list(islice(TOKENIZER.encode_iterable(endless()), 2*len(ids))) == ids*2


def test_a_full_store_of_words_changes_nothing():
    small = Tokenizer(TOKENIZER.vocab, TOKENIZER.merges, TOKENIZER.special_tokens)
    small._words.limit = 3
    for text in STORIES[:5]:
        assert small.encode(text) == TOKENIZER.encode(text) and len(small._words) <= 3
    assert small.encode("a"*500) == TOKENIZER.encode("a"*500) and "a"*500 not in small._words


def test_special_tokens():
    one, two, odd = (TOKENIZER.encode(s) for s in TOKENIZER.special_tokens)
    assert [one, two, odd] == [[0], [1], [2]] and TOKENIZER.end_of_text == 0
    assert TOKENIZER.encode(END*3) == [1, 0] and TOKENIZER.encode("<|ünï cöde|>x")[0] == 2
    none = Tokenizer(TOKENIZER.vocab, TOKENIZER.merges)
    assert not {0, 1, 2} & set(none.encode(END*2)) and none.decode([0]) == END
    with pytest.raises(ValueError, match="no special token <|endoftext|>"): none.end_of_text
    more = Tokenizer(TOKENIZER.vocab, TOKENIZER.merges, [END, "<|new|>", " the"])
    assert more.vocab_size == 801 and more.encode("<|new|>") == [800] and more.encode("in the end").count(more.ids[b" the"]) == 1


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
    ({**BYTES, 116: b"th"}, [], "no token for the byte 116"),
    ({}, [], "no token for the byte 0"),
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
    again = Tokenizer.load(tmp_path/"a"/"b")
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
    assert Tokenizer.load(tmp_path/"t").digest == TOKENIZER.digest
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
    assert Tokenizer.load(tmp_path/"t").encode("ééa bé") == [256, 257, 195, 169]


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
            ("merges.txt", "\n", "\nq zq\n", "not in vocab"), ("tokenizer.json", "added_tokens", "added", "no added_tokens"), ("tokenizer.json", "{", "[", "not JSON"),
            ("tokenizer.json", f'"{END}": 0', f'"{END}": 1', "not of the same tokenizer")]:
        with pytest.raises(ValueError, match=words): Tokenizer.load(damaged(name, old, new))
    folder = damaged("vocab.json", "{", "{")
    (folder/"merges.txt").unlink()
    with pytest.raises(FileNotFoundError, match="merges.txt not found"): Tokenizer.load(folder)
    with pytest.raises(FileNotFoundError, match="no tokenizer"): Tokenizer.load(tmp_path/"nowhere")


def test_files_that_are_something_else(tmp_path):
    file = tmp_path/"file"
    for text, words in [("[1]", "a list, expected an object"), ('{"a": 0, "a": 1}', "'a' stands there twice"), ("", "not JSON"), ('{"a": true}', "expected an integer")]:
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


# Other libraries

def hard_texts(seed=0, n=300):
    rng = random.Random(seed)
    alphabet = "aabc ABé好🙂'sd\n\t\r 12٣!.-\u00a0\u2003\x1c\x85\u0301\u200d" + "".join(chr(rng.choice([rng.randrange(0xd800), rng.randrange(0xe000, 0x30000)])) for _ in range(100))
    return HARD + ["".join(rng.choices(alphabet, k=rng.randrange(60))) for _ in range(n)]


def test_hugging_face_gives_the_same_ids(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    TOKENIZER.save(tmp_path/"t")
    other = tokenizers.Tokenizer.from_file(str(tmp_path/"t/tokenizer.json"))
    for text in hard_texts():
        ids = TOKENIZER.encode(text)
        assert other.encode(text).ids == ids, text
        assert other.decode(ids, skip_special_tokens=False) == text
    assert other.get_vocab_size() == TOKENIZER.vocab_size


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
    t.save(tmp_path/"gpt2")
    assert Tokenizer.load(tmp_path/"gpt2").digest == t.digest
    if tokenizers := pytest.importorskip("tokenizers"):
        other = tokenizers.Tokenizer.from_file(str(tmp_path/"gpt2/tokenizer.json"))
        for text in hard_texts(1): assert other.encode(text).ids == t.encode(text), text


def test_gpt2_against_tiktoken():
    tiktoken, t = pytest.importorskip("tiktoken"), gpt2()
    ranks = {token: i for i, token in t.vocab.items() if i != t.end_of_text}
    other = tiktoken.Encoding("gpt2", pat_str=PRETOKENIZE.pattern, mergeable_ranks=ranks, special_tokens={END: t.end_of_text})
    for text in hard_texts(2, 2000): assert other.encode(text, allowed_special="all") == t.encode(text), text
