"Token files, windows and batches: properties and round trips"
import json
import math
import signal
import subprocess
import sys
import time
import tracemalloc

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings, strategies as st

from lmcourse.tools.config import TrainConfig
from lmcourse.training import data
from lmcourse.training.data import (Batches, TokenDataset, document_batch, document_windows, evaluation_batches, floor, get_batch,
                                    reach_of_starts, row_spans, write_tokens)


class Bytes:
    end_of_text, digest = 256, "bytes"

    def __init__(self, vocab_size=257):
        self.vocab_size = vocab_size

    def encode(self, text):
        return list(text.encode())


@pytest.mark.parametrize("vocab_size, dtype", [(257, "uint16"), (65_536, "uint16"), (65_537, "uint32")])
@pytest.mark.parametrize("buffer", [1, 7, 1 << 20])
def test_round_trip(tmp_path, monkeypatch, vocab_size, dtype, buffer):
    monkeypatch.setattr(data, "BUFFER", buffer)
    texts = ["Tom ran.", "", "naïve \n 🙂", "x" * 30]
    info = write_tokens(tmp_path / "sub/a", iter(texts), Bytes(vocab_size), "here", meta=dict(made="today", tokens=-1))
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


def test_memory_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "BUFFER", 1 << 12)
    tracemalloc.start()
    write_tokens(tmp_path / "a", ("abcdefgh" * 50 for _ in range(3000)), Bytes(), "here")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (tmp_path / "a.bin").stat().st_size == 3000 * 401 * 2
    assert peak < 1_000_000


def test_a_kill_leaves_the_old_files(tmp_path):
    write_tokens(tmp_path / "a", ["old"], Bytes(), "here")
    code = f"""
import itertools, sys
sys.path[:0] = {sys.path!r}
from lmcourse.training import data
class T: end_of_text, vocab_size, digest, encode = 256, 257, '', lambda self, text: list(text.encode())
data.BUFFER = 1
def texts():
    for i in itertools.count():
        yield 'new'
        if i == 10_000: print('going', flush=True)
data.write_tokens({str(tmp_path / "a")!r}, texts(), T(), 'there')
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"going\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (tmp_path / "a.bin.tmp").stat().st_size > 0
    assert bytes(TokenDataset.open(tmp_path / "a").document(0)[:-1].tolist()) == b"old"
    write_tokens(tmp_path / "a", ["new"], Bytes(), "here")
    assert len(list(tmp_path.iterdir())) == 3


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
    inputs, targets = document_batch(dataset, 3000, 7, rng=np.random.default_rng(0))
    assert torch.equal(inputs[:, 1:], targets[:, :-1]) and (inputs[:, 0] == 0).all() and (targets[:, 0] == 1).all()
    assert inputs.dtype == targets.dtype == torch.int64


def test_windows_at_starts_fill_the_corpus_exactly():
    dataset = corpus([5, 5])
    document_batch(dataset, 4, 12)
    with pytest.raises(ValueError, match="has 12 tokens, and one window needs 13"):
        document_batch(dataset, 4, 13)
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


@pytest.mark.parametrize("windows", ["random", "documents"])
def test_batches_depend_on_seed_and_step_alone(windows):
    dataset, config = corpus([11, 7, 13, 30, 8, 9] * 20), TrainConfig(batch_size=3, windows=windows, seed=5)
    batches = Batches(dataset, config, 16)
    there = [batches[t] for t in range(50)]
    back = [Batches(dataset, config, 16)[t] for t in reversed(range(50))][::-1]
    assert all((a == b).all() for x, y in zip(there, back) for a, b in zip(x, y))
    assert len({x.tobytes() for x, _ in there}) > 30
    assert there[0][0].shape == (3, 16) and there[0][0].dtype == np.int64
    with pytest.raises(ValueError):
        batches[-1]


def test_floor(tmp_path):
    write_tokens(tmp_path / "a", ["a", "bb", "ccc"], Bytes(), "here", nats=len)
    dataset = TokenDataset.open(tmp_path / "a")
    assert floor(dataset) == 6 / 9 and floor(dataset, 2) == 3 / 5 and floor(dataset, 100) == 6 / 9
    assert math.isclose(dataset.info["nats"], 6)
    with pytest.raises(ValueError, match="documents = 0"):
        floor(dataset, 0)


def test_a_batch_is_cheap():
    batches = Batches(corpus([250] * 2000), TrainConfig(batch_size=2, windows="documents"), 256)
    times = []
    for t in range(100):
        start = time.perf_counter()
        batches[t]
        times.append(time.perf_counter() - start)
    assert sorted(times)[50] < 1e-3
