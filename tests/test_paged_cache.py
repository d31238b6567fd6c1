"Keys and values in blocks: which are taken, what they are called, and attention through tables of them."
import math
import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from test_engine import small

from lmcourse.architecture import transpose
from lmcourse.inference import paged_cache
from lmcourse.inference.engine import PagedModel
from lmcourse.inference.paged_cache import (BlockPool, PagedSequence, batched_attention, chunk_name, gathered_attention, new_blocks, paged_attention,
                                            plan_attention, rows_of)
from lmcourse.tools.checks import check_close, expect_error


# Blocks

def test_pool_by_hand():
    pool = BlockPool(2, 4)
    a, b = pool.take(), pool.take()
    with expect_error(IndexError, "all 2 blocks are in use"): pool.take()
    pool.name(a, b"x", 4); pool.name(b, b"x", 4)
    assert pool.blocks == {b"x": a} and not pool.names[b]
    pool.release(a)
    with expect_error(ValueError, f"block {a} has no users"): pool.release(a)
    pool.share(a)
    assert pool.users == [1, 1] and not pool.free
    for size in ((0, 4), (4, 0)):
        with expect_error(ValueError, "expected 1 or more"): BlockPool(*size)


def test_blocks_that_hold_nothing_of_use_are_taken_first_and_then_the_one_that_was_idle_longest():
    pool = BlockPool(4, 4)
    a, b, c, d = (pool.take() for _ in range(4))
    for block, name in ((a, b"a"), (c, b"c"), (d, b"d")): pool.name(block, name, 4)
    for block in (a, c, b, d): pool.release(block)
    assert list(pool.free) == [b, a, c, d]                      # b has no name: nobody will ask for what it holds
    pool.share(a)                                               # somebody did ask for this one, so it comes last now
    pool.release(a)
    assert list(pool.free) == [b, c, d, a] and pool.blocks == {b"a": a, b"c": c, b"d": d}
    assert [pool.take() for _ in range(3)] == [b, c, d] and pool.blocks == {b"a": a}


def test_the_name_of_a_block_depends_on_everything_before():
    assert chunk_name(b"", [1, 2]) != chunk_name(chunk_name(b"", [3]), [1, 2]) != chunk_name(b"", [2, 1])


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system doesn't tell")
def test_a_cache_takes_memory_only_where_it_is_written():
    def resident(): return int(Path("/proc/self/statm").read_text().split()[1])*os.sysconf("SC_PAGE_SIZE")
    before, shape = resident(), (4, 2, 500, 4, 16, 400)
    cache = new_blocks(shape, torch.zeros(1))
    assert cache.shape == shape and cache.nbytes == 4*math.prod(shape) > 4e8 and resident() - before < 1e8
    assert cache.data_ptr() % 64 == 0 and cache.is_contiguous() and not cache[1, 0, 7].any()
    cache[1, 0, 7] = 1.
    assert cache.sum() == cache[1, 0, 7].numel()
    for like in (torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.bfloat16)):
        other = new_blocks((2, 3), like)
        assert other.dtype == like.dtype and not other.any()


# Attention

def test_a_plan_sees_the_window_s_blocks_only():
    s, t = PagedSequence(range(30)), PagedSequence(range(4))
    s.blocks, s.computed, s.dropped, t.blocks = [7, 8], 29, 6, [3]
    one, many = plan_attention(rows_of({s: 1, t: 4}, 4), 4, 2, 5)
    assert one.tables.tolist() == [[7, 8]] and many.tables.tolist() == [[3]]
    assert one.mask[0, 0].int().tolist() == [[0, 1, 1, 1, 1, 1, 0, 0]]*2             # Positions 24 to 31; 25 to 29 are seen
    assert many.mask[0, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]*2


@pytest.mark.parametrize("size", [8, 16, 32])
@pytest.mark.parametrize("window", [None, 3, 20])
def test_both_attentions_agree_in_blocks_of_any_size(size, window):
    "Also where the last block is full, begun, or has more keys than are taken at a time"
    model = small(window=window, num_kv_heads=2)
    sequences = [PagedSequence((5*k + 3*j) % 97 for j in range(n)) for k, n in enumerate((1, 8, 16, 17, 33, 47, 64))]
    found = []
    for attend in (paged_attention, gathered_attention, batched_attention):
        paged, free = PagedModel(model, 512//size, size), list(range(512//size))
        paged.attend = attend
        for s in sequences: s.blocks = [free.pop() for _ in range(-(-len(s.ids)//size))]
        found.append(paged.forward(rows_of({s: s.missing for s in sequences}, size)))
    check_close(found[0], found[1], 1e-5, 1e-5)
    check_close(found[0], found[2], 1e-5, 1e-5)
    check_close(found[0].double(), torch.stack([model(torch.tensor(s.ids))[-1] for s in sequences]).detach(), 1e-5, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_threads_share_the_queries_and_no_bit_depends_on_their_number(dtype, monkeypatch):
    monkeypatch.setattr(transpose, "SHARED", 1)                     # Small jobs are shared, too
    asked, choose = [], paged_cache.threads_for
    monkeypatch.setattr(paged_cache, "threads_for", lambda *args: (asked.append(choose(*args)), asked[-1])[1])
    sequences, free = [PagedSequence(range(n)) for n in (1, 9, 30, 64)], list(range(16))
    for s in sequences: s.blocks = [free.pop() for _ in range(-(-len(s.ids)//8))]
    rows, g = rows_of({s: s.missing for s in sequences}, 8), torch.Generator().manual_seed(0)
    q, keys, values = (3*torch.randn(shape, generator=g, dtype=dtype) for shape in ((104, 4, 8), (16, 2, 8, 8), (16, 2, 8, 8)))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(paged_attention(q, keys, values, rows, 20))
    finally: torch.set_num_threads(before)
    if transpose.torch_threads(): assert [parts for _, parts in asked] == [1, 2, 3]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    check_close(found[0], gathered_attention(q, keys, values, rows, 20), *((1e-5, 1e-5) if dtype == torch.float32 else (1e-12, 1e-12)))
