"Token files, windows and batches: properties and round trips"
import gc
import itertools
import json
import math
import random
import subprocess
import sys
import threading
import time
import tracemalloc
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings, strategies as st

from lmcourse.tokenization.tokenizer import Tokenizer
from lmcourse.tools.config import TrainConfig
from lmcourse.tools.documents import documents
from lmcourse.training.data import (WINDOWS, BatchPrefetcher, Batches, TokenDataset, count_windows, document_batches, document_windows,
                                    evaluation_batches, floor, get_batch, reach_of_starts, row_spans, sequential_windows, share_within, to_tensors, unfinished,
                                    windows_at_starts, windows_within, write_tokens)


class Bytes:
    end_of_text, digest = 256, "bytes"

    def __init__(self, vocab_size=257):
        self.vocab_size = vocab_size

    def encode(self, text):
        return list(text.encode())


@pytest.mark.parametrize("vocab_size, dtype", [(257, "uint16"), (65_536, "uint16"), (65_537, "uint32")])
@pytest.mark.parametrize("batch_bytes", [1, 7, 1 << 20])
def test_round_trip(tmp_path, vocab_size, dtype, batch_bytes):
    texts = ["Tom ran.", "", "naïve \n 🙂", "x" * 30]
    info = write_tokens(tmp_path / "sub/a", iter(texts), Bytes(vocab_size), "here", meta=dict(made="today", tokens=-1), batch_bytes=batch_bytes)
    dataset = TokenDataset.open(tmp_path / "sub/a")
    assert [bytes(dataset.document(i)[:-1].tolist()).decode() for i in range(4)] == texts
    assert all(dataset.document(i)[-1] == 256 for i in range(4)) and dataset.tokens.dtype == dtype
    assert info == dataset.info == json.loads((tmp_path / "sub/a.json").read_text())
    size = sum(len(t.encode()) for t in texts)
    assert (info["bytes"], info["tokens"], info["documents"], info["made"]) == (size, size + 4, 4, "today")
    assert sorted(p.name for p in (tmp_path / "sub").iterdir()) == ["a.bin", "a.idx", "a.json"]


def test_ids_past_sixteen_bits(tmp_path):
    tokenizer = Bytes(70_000)
    tokenizer.encode = lambda text: [69_999]
    write_tokens(tmp_path / "a", ["x"], tokenizer, "here")
    assert TokenDataset.open(tmp_path / "a").tokens.tolist() == [69_999, 256]
    tokenizer.vocab_size = 69_999
    with pytest.raises(ValueError, match="ids from 69999 to 69999, expected 0 to 69998"):
        write_tokens(tmp_path / "b", ["x"], tokenizer, "here")
    assert not list(tmp_path.glob("b*"))


@pytest.fixture(scope="module")
def learnt():
    return Tokenizer.train(list(documents("stories", max_bytes=200_000)), 400)


def traced_peak(*args, **kw):
    pace = gc.get_threshold()
    gc.set_threshold(700, 10, 10)           # Python's own; tests look for garbage less often
    tracemalloc.start()
    write_tokens(*args, **kw)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    gc.set_threshold(*pace)
    return peak


def test_memory_is_bounded(tmp_path, learnt):
    "Eight times the text needs no more memory, with either kind of tokenizer."
    learnt.encode_batch(["a"])
    def texts(n): return ("abcdefgh " * 50 + str(i) for i in range(n))
    for tokenizer in (Bytes(), learnt):
        peaks = [traced_peak(tmp_path / "a", texts(n), tokenizer, "here", nats=len, batch_bytes=1 << 14, threads=2) for n in (4000, 500, 4000)][1:] # The first call may compile
        assert (tmp_path / "a.idx").stat().st_size == 4000 * 8
        assert peaks[1] < peaks[0] + 400_000 < peaks[0] + 4000 * 450    # 4000 floors in the JSON are a part of it


@settings(deadline=None, max_examples=30)
@given(st.lists(st.text(max_size=30), min_size=1, max_size=20), st.integers(1, 60))
def test_batches_of_documents_are_the_documents(texts, most):
    batches = list(document_batches(iter(texts), most))
    assert [t for b in batches for t in b] == texts and all(batches)
    for b in batches[:-1]: assert sum(len(t.encode()) for t in b) >= most > sum(len(t.encode()) for t in b[:-1])


# A kill at any moment

def same_files(a, b):
    return all((a.parent / f"{a.name}{s}").read_bytes() == (b.parent / f"{b.name}{s}").read_bytes() for s in (".bin", ".idx", ".json"))


@settings(deadline=None, max_examples=25)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), min_size=1, max_size=20), st.integers(1, 60), st.integers(1, 3))
def test_threads_and_batches_change_no_byte(tmp_path_factory, learnt, texts, batch_bytes, threads):
    folder = tmp_path_factory.mktemp("a")
    serial = SimpleNamespace(encode=learnt.encode, end_of_text=learnt.end_of_text, vocab_size=learnt.vocab_size, digest=learnt.digest)
    texts = [t for t in texts if "<|endoftext|>" not in t] or ["a"]
    write_tokens(folder / "a", texts, serial, "here", nats=len)
    write_tokens(folder / "b", texts, learnt, "here", nats=len, threads=threads, batch_bytes=batch_bytes)
    assert same_files(folder / "a", folder / "b")


WRITE = """
import itertools, os, sys, time
sys.path[:0] = {path!r}
from lmcourse.training.data import write_tokens
class T:
    end_of_text, vocab_size, digest = 256, 257, ''
    def encode(self, text): return list(text.encode())
def texts():
    for i in range({documents}):
        yield f'document {{i}} ' * (i % 7)
        if i % 50 == 0: print(i, flush=True), time.sleep(0.002)
{more}
write_tokens({prefix!r}, texts(), T(), 'there', nats=len, batch_bytes={batch_bytes})
print('done', flush=True)
"""


def start_writing(prefix, documents=1500, batch_bytes=2000, more=""):
    code = WRITE.format(path=sys.path, prefix=str(prefix), documents=documents, batch_bytes=batch_bytes, more=more)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


class Seen(Bytes):
    def __init__(self):
        super().__init__()
        self.digest, self.seen = "", []

    def encode(self, text):
        self.seen.append(text)
        return super().encode(text)


def some_texts(n):
    return [f"document {i} " * (i % 7) for i in range(n)]


def kill_again_and_again(tmp_path, kills, seed):
    "Kill at random moments, each time going on, until one process comes to the end."
    rng, done, prefix = random.Random(seed), 0, tmp_path / "a"
    write_tokens(tmp_path / "whole", some_texts(1500), Bytes(), "there", nats=len)
    write_tokens(prefix, ["old"], Bytes(), "old")
    for kill in range(kills):
        with start_writing(prefix) as process:
            for _ in range(rng.randrange(30)): process.stdout.readline()
            time.sleep(rng.random() * 0.02)
            process.kill()
        now = unfinished(prefix).get("documents", 0)
        assert now >= done or not unfinished(prefix)            # nothing that was noted is lost
        done = now
        try: assert TokenDataset.open(prefix).num_documents in (1, 1500)        # the old files or the new ones, whole
        except ValueError: assert (tmp_path / "a.json.tmp").exists()          # the kill came between the renames
    seen = Seen()
    seen.digest = "bytes"
    write_tokens(tmp_path / "whole", some_texts(1500), seen, "there", nats=len)
    again = Seen()
    write_tokens(prefix, iter(some_texts(1500)), again, "there", nats=len, batch_bytes=2000)
    assert again.seen == some_texts(1500)[done:]
    info = json.loads((tmp_path / "a.json").read_text())
    assert info == json.loads((tmp_path / "whole.json").read_text()) | dict(tokenizer="")
    assert (tmp_path / "a.bin").read_bytes() == (tmp_path / "whole.bin").read_bytes()
    assert sorted(f.name for f in tmp_path.glob("a.*")) == ["a.bin", "a.idx", "a.json"]
    return done


def test_kills_lose_nothing_that_was_noted(tmp_path):
    kill_again_and_again(tmp_path, 3, 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 11))
def test_many_kills(tmp_path, seed):
    kill_again_and_again(tmp_path, 6, seed)


@pytest.mark.parametrize("at", range(6))
def test_a_kill_between_any_two_renames(tmp_path, at):
    "The process ends itself at a rename or removal, before it or after it; the texts are not tokenized again."
    die = f"""
real, calls = os.replace, itertools.count()
def replace(a, b):
    last = str(b).endswith('.json') or '.part' not in str(b)
    n = next(calls) if last else -1
    if n == {at // 2 if at % 2 == 0 else -2}: os._exit(9)
    real(a, b)
    if n == {at // 2 if at % 2 else -2}: os._exit(9)
os.replace = replace
"""
    write_tokens(tmp_path / "whole", some_texts(100), Seen(), "there", nats=len)
    with start_writing(tmp_path / "a", 100, more=die) as process: process.stdout.read()
    assert process.returncode == 9
    try: assert TokenDataset.open(tmp_path / "a").num_documents == 100
    except FileNotFoundError: pass                              # never anything between
    whole, again = (tmp_path / "a.json").exists(), Seen()
    write_tokens(tmp_path / "a", some_texts(100), again, "there", nats=len)
    assert same_files(tmp_path / "a", tmp_path / "whole") and len(list(tmp_path.glob("a.*"))) == 3
    assert again.seen == (some_texts(100) if whole else [])     # what is whole is written anew when asked for


def cut_off(prefix, texts, **kw):
    "Leave `prefix` unfinished after these texts."
    def lost():
        yield from texts
        raise ConnectionError("lost")
    with pytest.raises(ConnectionError): write_tokens(prefix, lost(), kw.pop("tokenizer", Bytes()), kw.pop("source", "here"), batch_bytes=1, **kw)


@pytest.mark.parametrize("change", [dict(source="there"), dict(meta=dict(a=1)), dict(tokenizer="other"), dict(nats=len)])
def test_another_job_starts_anew(tmp_path, change):
    cut_off(tmp_path / "a", ["one", "two", "three"])
    assert unfinished(tmp_path / "a") == dict(documents=2, bytes=6)
    tokenizer = Seen()
    tokenizer.digest = change.pop("tokenizer", "bytes")
    write_tokens(tmp_path / "a", ["one", "two"], tokenizer, change.pop("source", "here"), **change)
    assert tokenizer.seen == ["one", "two"] and TokenDataset.open(tmp_path / "a").num_documents == 2
    assert not unfinished(tmp_path / "a") and len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("texts", [["one", "TWO", "three"], ["one"], [], ["onetw", "o", "three"], ["one", "tw", "o"]])
def test_other_documents_are_refused(tmp_path, texts):
    cut_off(tmp_path / "a", ["one", "two", "three"])
    with pytest.raises(ValueError, match="the first 2 documents are not those of the unfinished files, which are removed now: run it again"):
        write_tokens(tmp_path / "a", texts, Bytes(), "here")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("suffix", [".bin", ".idx", ".nats", ".json"])
@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: bytes([b[0] ^ 1]) + b[1:], lambda b: b"", lambda b: None])
def test_a_damaged_part_is_not_gone_on_with(tmp_path, suffix, damage):
    cut_off(tmp_path / "a", ["one", "two", "three"], nats=len)
    part, tokenizer = tmp_path / f"a{suffix}.part", Seen()
    tokenizer.digest = "bytes"
    if (left := damage(part.read_bytes())) is None: part.unlink()
    else: part.write_bytes(left)
    write_tokens(tmp_path / "a", ["one", "two", "three"], tokenizer, "here", nats=len)
    write_tokens(tmp_path / "b", ["one", "two", "three"], Bytes(), "here", nats=len)
    assert same_files(tmp_path / "a", tmp_path / "b")
    if not (suffix == ".json" and part.suffix == ".part" and left and left.strip().endswith(b"}")): assert tokenizer.seen == ["one", "two", "three"]


def test_what_is_beyond_the_note_is_cut_off(tmp_path):
    cut_off(tmp_path / "a", ["one", "two", "three"])
    with open(tmp_path / "a.bin.part", "ab") as f: f.write(b"half a batch")
    write_tokens(tmp_path / "a", ["one", "two", "three"], Bytes(), "here")
    write_tokens(tmp_path / "b", ["one", "two", "three"], Bytes(), "here")
    assert same_files(tmp_path / "a", tmp_path / "b")


def test_unfinished_files_are_no_corpus(tmp_path):
    cut_off(tmp_path / "a", ["one", "two", "three"])
    assert all(".part" in f.name for f in tmp_path.iterdir())
    with pytest.raises(FileNotFoundError, match=r"a\.json: no such file"): TokenDataset.open(tmp_path / "a")


def test_bad_input_leaves_nothing_even_after_a_cut(tmp_path):
    cut_off(tmp_path / "a", ["one", "two", "three"])
    with pytest.raises(TypeError, match="a document is a NoneType"): write_tokens(tmp_path / "a", ["one", "two", None], Bytes(), "here")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="half of a surrogate pair"): write_tokens(tmp_path / "a", ["\ud800"], Bytes(), "here")
    with pytest.raises(TypeError, match="one string"): write_tokens(tmp_path / "a", "one", Bytes(), "here")
    with pytest.raises(TypeError, match="not JSON serializable"): write_tokens(tmp_path / "a", ["one"], Bytes(), "here", meta=dict(a=tmp_path))
    assert not list(tmp_path.iterdir())


def test_ctrl_c_can_be_gone_on_from(tmp_path):
    def texts():
        yield from ("one", "two")
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt): write_tokens(tmp_path / "a", texts(), Bytes(), "here", batch_bytes=1)
    assert unfinished(tmp_path / "a") == dict(documents=1, bytes=3)


@pytest.mark.parametrize("limit", [0, 100, 1000, 5000])
def test_a_full_disk_leaves_nothing(tmp_path, limit):
    "The system itself refuses the next byte: that of the starts first, which wait in a buffer."
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"): write_tokens(tmp_path/"x", ["a"]*2000, Bytes(), "s", batch_bytes=100)
    finally: resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform == "win32", reason="no locks of this kind")
def test_two_processes_do_not_write_the_same_files(tmp_path):
    with start_writing(tmp_path / "a", more="import time\nreal = texts\ndef texts():\n    yield from real()\n    time.sleep(60)") as process:
        assert process.stdout.readline() == "0\n"
        with pytest.raises(BlockingIOError, match="another process is writing these files"): write_tokens(tmp_path / "a", ["one"], Bytes(), "here")
        process.kill()
    write_tokens(tmp_path / "a", ["one"], Bytes(), "here")
    assert len(list(tmp_path.iterdir())) == 3


def test_documents_are_numbered_from_the_first(tmp_path):
    tokenizer = SimpleNamespace(encode=lambda text: [int(text)], end_of_text=9, vocab_size=10, digest="")
    for bad in ("9", "10", "-1"):
        with pytest.raises(ValueError, match="document 5"): write_tokens(tmp_path / "a", [*"01234", bad], tokenizer, "here", batch_bytes=2)
    assert not list(tmp_path.iterdir())


def test_swapped_file_is_refused(tmp_path):
    write_tokens(tmp_path / "a", ["abc", "de"], Bytes(), "here")
    write_tokens(tmp_path / "b", ["abd", "de"], Bytes(), "there")
    (tmp_path / "b.bin").replace(tmp_path / "a.bin")
    with pytest.raises(ValueError, match=r"a\.bin: SHA-256 .* another file, or damaged"):
        TokenDataset.open(tmp_path / "a")
    TokenDataset.open(tmp_path / "a", verify=False)


def corpus(lengths):
    lengths = np.array(lengths)
    tokens = np.concatenate([np.append(np.arange(n) % 250 + 1, 0) for n in lengths]).astype(np.uint16)
    return TokenDataset(tokens, np.append(0, np.cumsum(lengths + 1)[:-1]), dict(end_of_text=0))


lengths = st.lists(st.integers(0, 40), min_size=1, max_size=8)


@settings(deadline=None, max_examples=60)
@given(lengths, st.integers(1, 45), st.integers(1, 5))
def test_evaluation_counts_each_token_once(lengths, context, batch_size):
    dataset = corpus(lengths)
    seen = [[] for _ in lengths]
    for inputs, targets, which in evaluation_batches(dataset, context, batch_size=batch_size):
        assert inputs.shape == targets.shape and len(inputs) == len(which) <= batch_size and inputs.shape[1] <= context
        assert inputs.dtype == targets.dtype == np.int64
        for x, y, i in zip(inputs, targets, which):
            both = (y[:-1] != -100) & (y[1:] != -100)
            assert (x[1:][both] == y[:-1][both]).all()              # An input is the target before it
            seen[i].append((x, y))
    for i, rows in enumerate(seen):
        assert sorted(np.concatenate([y[y != -100] for _, y in rows]).tolist()) == sorted(dataset.document(i).tolist())
        assert sum(y[0] != -100 and x[0] == 0 for x, y in rows) == 1    # One row begins with the document


@given(st.integers(1, 300), st.integers(1, 64))
def test_rows_see_half_a_context(targets, context):
    spans = row_spans(targets, context)
    assert [i for _, new, end in spans for i in range(new, end)] == list(range(targets))
    assert all(0 < end - begin <= context and (begin == 0 or new - begin >= context // 2) for begin, new, end in spans)


def test_document_windows_are_the_rows_of_the_batches():
    dataset = corpus([3, 20, 0, 9])
    rows = sorted((x.tolist(), y.tolist()) for x, y in document_windows(dataset, 8, documents=3))
    batched = [(x.tolist(), y.tolist()) for a, b, _ in evaluation_batches(dataset, 8, 3, batch_size=1) for x, y in zip(a, b)]
    assert rows == sorted(batched)


def test_windows_are_uniform_and_reach_the_end():
    inputs, targets = get_batch(np.arange(20, dtype=np.uint16), 20_000, 15, rng=np.random.default_rng(0))
    assert torch.equal(inputs + 1, targets) and targets.max() == 19
    counts = torch.bincount(inputs[:, 0])
    assert len(counts) == 5 and (counts - 4000).abs().max() < 300
    dataset = corpus([5, 5, 5])
    inputs, targets = to_tensors(windows_at_starts(dataset, 3000, 7, np.random.default_rng(0)))
    assert torch.equal(inputs[:, 1:], targets[:, :-1]) and (inputs[:, 0] == 0).all() and (targets[:, 0] == 1).all()
    assert inputs.dtype == targets.dtype == torch.int64


def test_windows_at_starts_fill_the_corpus_exactly():
    dataset = corpus([5, 5])
    rng = np.random.default_rng(0)
    windows_at_starts(dataset, 4, 12, rng)
    with pytest.raises(ValueError, match="has 12 tokens, and one window needs 13"):
        windows_at_starts(dataset, 4, 13, rng)
    with pytest.raises(ValueError, match="has 12 tokens, and one window needs 13"):
        get_batch(dataset.tokens, 4, 12)
    assert reach_of_starts(dataset, 12) == 1 and reach_of_starts(dataset, 3) == 0.5


@settings(deadline=None)
@given(lengths, st.integers(1, 20))
def test_reach_is_a_count(lengths, context):
    dataset = corpus(lengths)
    if dataset.num_tokens < context:
        return
    reached = {i for s in dataset.starts.tolist() if s + context <= dataset.num_tokens for i in range(s, s + context)}
    assert reach_of_starts(dataset, context) == pytest.approx(len(reached) / dataset.num_tokens)


@pytest.mark.parametrize("windows", WINDOWS)
def test_batches_depend_on_seed_and_step_alone(windows):
    dataset, config = corpus([11, 7, 13, 30, 8, 9] * 20), SimpleNamespace(batch_size=3, windows=windows, seed=5, stride=5)
    batches = Batches(dataset, config, 16)
    there = [batches[t] for t in range(50)]
    back = [Batches(dataset, config, 16)[t] for t in reversed(range(50))][::-1]
    assert all((a == b).all() for x, y in zip(there, back) for a, b in zip(x, y))
    assert len({x.tobytes() for x, _ in there}) > 25
    assert there[0][0].shape == (3, 16) and there[0][0].dtype == np.int64
    with pytest.raises(ValueError):
        batches[-1]


@pytest.mark.parametrize("floor", [math.nan, math.inf, -1.])
def test_a_floor_that_no_probability_has_is_refused(tmp_path, floor):
    with pytest.raises(ValueError, match=f"nats of document 1 = {floor}, expected -log p"):
        write_tokens(tmp_path / "a", ["a", "bb", "c"], Bytes(), "here", nats=lambda text: floor if text == "bb" else 1., batch_bytes=1)
    assert not list(tmp_path.iterdir())


def test_floor(tmp_path):
    write_tokens(tmp_path / "a", ["a", "bb", "ccc"], Bytes(), "here", nats=len)
    dataset = TokenDataset.open(tmp_path / "a")
    assert floor(dataset) == 6 / 9 and floor(dataset, 2) == 3 / 5 and floor(dataset, 100) == 6 / 9
    assert math.isclose(dataset.info["nats"], 6)
    with pytest.raises(ValueError, match="documents = 0"):
        floor(dataset, 0)


@pytest.mark.parametrize("windows", WINDOWS)
def test_a_batch_costs_what_is_in_it(windows):
    "Not what the corpus holds"
    def allocated(documents): # Bytes, at the peak
        batches = Batches(corpus([250] * documents), TrainConfig(batch_size=2, windows=windows), 256)
        tracemalloc.start()
        x, y = batches[1]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak/(x.nbytes + y.nbytes)
    assert allocated(2000) < 10 and allocated(2000) < 1.5*allocated(200)


@settings(deadline=None, max_examples=60)
@given(lengths, st.integers(1, 45), st.integers(0, 10**6))
def test_windows_within_never_cross(lengths, context, seed):
    dataset = corpus(lengths)
    rows = {(x.tobytes(), y.tobytes()) for x, y in ((np.append(0, d)[:-1].astype(np.int64), d.astype(np.int64)) for d in map(dataset.document, range(len(lengths))))}
    inputs, targets = windows_within(dataset, 6, context, np.random.default_rng(seed))
    assert inputs.shape == targets.shape == (6, context) and inputs.dtype == targets.dtype == np.int64
    for x, y in zip(inputs, targets):
        n = (y != -100).sum()
        assert n and (y[:n] != -100).all() and (x[n:] == 0).all()
        pieces = [(a[i:i + n], b[i:i + n]) for a, b in ((np.frombuffer(p, np.int64), np.frombuffer(q, np.int64)) for p, q in rows) for i in range(len(a) - n + 1)]
        assert any((x[:n] == a).all() and (y[:n] == b).all() for a, b in pieces)
        assert n == context or any(len(b) == n and (y[:n] == b).all() for _, b in pieces)       # a short row is a whole document


def test_windows_within_draw_documents_by_their_length():
    dataset = corpus([3, 7, 15])            # 4, 8 and 16 targets
    _, targets = windows_within(dataset, 28_000, 6, np.random.default_rng(0))
    assert abs((targets[:, 4] == -100).sum() - 4000) < 250          # only the first document is shorter than the window
    assert abs((targets != -100).mean() - share_within(dataset, 6)) < 0.005
    firsts = np.bincount(targets[:, 0])
    assert abs(firsts[1] - 4000 - 8000/3 - 16000/11) < 300 and abs(firsts[11] - 16000/11) < 200


@settings(deadline=None)
@given(st.integers(2, 60), st.integers(1, 20), st.integers(1, 25), st.integers(1, 4))
def test_a_pass_in_order(tokens, context, stride, batch_size):
    row = np.arange(tokens, dtype=np.uint16)
    if tokens <= context:
        with pytest.raises(ValueError, match="one window needs"): count_windows(tokens, context, stride)
        return
    windows = count_windows(tokens, context, stride)
    assert windows == len([s for s in range(0, tokens, stride) if s + context + 1 <= tokens])
    batches = [sequential_windows(row, t, batch_size, context, stride) for t in range(windows)]         # `batch_size` passes
    starts = np.concatenate([x[:, 0] for x, _ in batches])
    assert starts.tolist() == [s * stride for s in range(windows)] * batch_size
    assert all((y == x + 1).all() and (x == x[:, :1] + np.arange(context)).all() for x, y in batches)


# Batches ahead of time

def our_threads():
    return [t for t in threading.enumerate() if t.name.startswith("BatchPrefetcher")]


@pytest.fixture
def no_thread_left():
    assert not our_threads()
    yield
    gc.collect()
    assert not our_threads()


class Numbered:
    "The batch of a step is its number; what was made is written down."
    def __init__(self, delay=lambda step: 0, fails=None):
        self.delay, self.fails, self.made = delay, fails, []

    def __getitem__(self, step):
        time.sleep(self.delay(step))
        if step == self.fails: raise OSError(f"no batch {step}")
        self.made.append(step)
        return np.full((2, 3), step), np.full((2, 3), step + 1)


def wait_until(done, seconds=120): # Only against waiting for ever
    end = time.monotonic() + seconds
    while not done() and time.monotonic() < end: time.sleep(0.001)


@pytest.mark.parametrize("depth", [1, 3, 50])
@pytest.mark.parametrize("slow", ["neither", "thread", "loop", "both"])
def test_the_order_does_not_depend_on_time(no_thread_left, depth, slow):
    rng = random.Random(0)
    pause = lambda *_: rng.random() * 0.003
    seen = []
    with BatchPrefetcher(Numbered(pause if slow in ("thread", "both") else lambda step: 0), range(7, 47), depth) as ahead:
        for x, y in ahead:
            seen.append(int(x[0, 0]))
            assert x.shape == (2, 3) and torch.equal(y, x + 1) and x.dtype == torch.int64
            if slow in ("loop", "both"): time.sleep(pause())
        assert seen == list(range(7, 47)) and not our_threads()
        assert list(ahead) == []


def test_prefetched_batches_are_those_of_the_steps(no_thread_left):
    batches = Batches(corpus([30] * 50), TrainConfig(batch_size=3, seed=5), 16)
    for step, (x, y) in zip(itertools.count(700), BatchPrefetcher(batches, range(700, 720)), strict=False):
        assert (x.numpy() == batches[step][0]).all() and (y.numpy() == batches[step][1]).all()


@pytest.mark.parametrize("depth", [1, 4])
def test_the_queue_is_bounded(no_thread_left, depth):
    batches = Numbered()
    with BatchPrefetcher(batches, itertools.count(), depth) as ahead:
        for taken in range(1, 4):
            next(ahead)
            wait_until(lambda: len(batches.made) >= taken + depth)
            time.sleep(0.05)                                    # time to make more, if it were not bounded
            assert len(batches.made) == taken + depth


def test_an_error_in_a_batch_comes_up_in_the_loop(no_thread_left):
    seen = []
    with pytest.raises(OSError, match="no batch 5") as caught:
        for x, _ in (ahead := BatchPrefetcher(Numbered(fails=5), itertools.count(), 2)): seen.append(int(x[0, 0]))
    assert seen == [0, 1, 2, 3, 4] and list(ahead) == []
    assert "__getitem__" in [f.name for f in caught.traceback]          # and with the place where it arose
    def steps():
        yield 0
        raise RuntimeError("no more steps")
    with pytest.raises(RuntimeError, match="no more steps"): list(BatchPrefetcher(Numbered(), steps()))


def test_leaving_early_ends_the_thread(no_thread_left):
    for taken in (0, 1, 5):
        with BatchPrefetcher(Numbered(lambda step: 0.001), itertools.count(), 2) as ahead:
            for _ in range(taken): next(ahead)
        assert not our_threads() and list(ahead) == []
        ahead.close()
    with pytest.raises(ZeroDivisionError):
        with BatchPrefetcher(Numbered(), itertools.count()) as ahead: next(ahead), 1/0
    assert not our_threads()


def test_letting_go_ends_the_thread(no_thread_left):
    ahead = BatchPrefetcher(Numbered(), itertools.count(), 2)
    next(ahead)
    assert our_threads()
    del ahead
    gc.collect()
    assert not our_threads()
    for _ in BatchPrefetcher(Numbered(), itertools.count(), 2): break
    gc.collect()
    assert not our_threads()


def test_many_prefetchers_leave_no_thread(no_thread_left):
    rng = random.Random(0)
    for _ in range(100):
        ahead = BatchPrefetcher(Numbered(fails=rng.choice([None, 3])), range(rng.randrange(6)), rng.randrange(1, 4))
        try:
            for _ in range(rng.randrange(8)): next(ahead, None)
        except OSError: pass
    del ahead


def test_a_program_can_end_while_the_thread_is_at_work():
    code = f"""
import itertools, sys
sys.path[:0] = {sys.path!r}
import numpy as np
from lmcourse.training.data import BatchPrefetcher
class B:
    def __getitem__(self, step): return np.zeros((2, 3)), np.zeros((2, 3))
ahead = BatchPrefetcher(B(), itertools.count())
next(ahead)
print('end')
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_waiting_is_measured(no_thread_left, monkeypatch):
    "By a clock that moves only while the loop waits, and one that moves only while it computes"
    now = [0.]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    with BatchPrefetcher(Numbered(), range(10)) as ahead:
        class Slow(deque):
            def popleft(self):
                now[0] += 0.25
                return super().popleft()
        ahead._jobs = Slow(ahead._jobs)
        for _ in ahead: now[0] += 7
        assert ahead.waited_s == 11*0.25                        # ten batches, and that there are no more


@pytest.mark.cuda
def test_batches_reach_the_gpu(no_thread_left):
    batches = Batches(corpus([30] * 500), TrainConfig(batch_size=64, seed=5), 16)
    for step, (x, y) in enumerate(BatchPrefetcher(batches, range(200), device="cuda")):
        assert x.device.type == y.device.type == "cuda"
        assert (x.cpu().numpy() == batches[step][0]).all() and (y.cpu().numpy() == batches[step][1]).all()
    with BatchPrefetcher(batches, range(1), device="cuda") as ahead: assert all(t.is_pinned() for t in ahead._jobs[0].result())
