"Ring attention is attention, however the tokens are dealt out."
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcourse.parallelism.collectives import check_sent
from lmcourse.parallelism.context_parallel import block_attention, contiguous, merge_attention, ring_attention, ring_attention_backward, ring_attention_bytes, zigzag
from lmcourse.parallelism.ranks import Network


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 5), st.integers(1, 3), st.integers(0, 14), st.randoms())
def test_tokens_in_any_order_on_any_rank_give_the_attention_and_gradients_of_one(size, heads, tokens, random):
    rng = np.random.default_rng(random.getrandbits(32))
    q, k, v, dout = rng.standard_normal((4, tokens, heads, 2))*3
    shuffled = np.split(rng.permutation(tokens), np.sort(rng.integers(0, tokens + 1, size - 1)))
    def work(port, places):
        mine = places[port.rank]
        out, cache = ring_attention(q[mine], k[mine], v[mine], places, port)
        return mine, (out, *ring_attention_backward(dout[mine], cache, port))
    right = Network(1).run(work, [np.arange(tokens)])[0][1]
    for places in (shuffled, contiguous(tokens, size), zigzag(tokens, size)):
        net = Network(size)
        for mine, arrays in net.run(work, places):
            for got, whole in zip(arrays, right, strict=True): np.testing.assert_allclose(got, whole[mine], rtol=1e-11, atol=1e-12)
        check_sent(net, [sum(ring_attention_bytes(places, r, heads*2*8)) for r in range(size)])


def test_pages_can_be_merged_in_any_order_and_empty_ones_change_nothing():
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 6, 2, 3))
    pages = [block_attention(q, k[i:i + 2], v[i:i + 2], np.ones((6, 2), bool)) for i in (0, 2, 4)]
    empty = block_attention(q, k, v, np.zeros((6, 6), bool))
    whole = block_attention(q, k, v, np.ones((6, 6), bool))
    for order in ((0, 1, 2), (2, 0, 1)):
        found = empty
        for i in order: found = merge_attention(found, pages[i])
        for a, b in zip(merge_attention(found, empty), whole): np.testing.assert_allclose(a, b, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("dtype, limit", [(np.float32, 2e-6), (np.float16, 1e-2)])
def test_short_floats_with_hidden_pages(dtype, limit):
    given = np.random.default_rng(0).standard_normal((4, 23, 2, 4))
    def work(port, arrays):
        places = contiguous(23, port.size)
        mine = places[port.rank]
        q, k, v, dout = arrays[:, mine]
        out, cache = ring_attention(q, k, v, places, port)
        return mine, (out, *ring_attention_backward(dout, cache, port))
    right = Network(1).run(work, given)[0][1]
    for mine, arrays in Network(3).run(work, given.astype(dtype)):
        for got, whole in zip(arrays, right, strict=True):
            assert got.dtype == dtype
            np.testing.assert_allclose(got, whole[mine], rtol=limit, atol=limit)


def test_tokens_that_are_not_the_plans_are_rejected():
    x = np.ones((2, 1, 2))
    with pytest.raises(ValueError, match=r"rank 0 of 1 has 2 tokens, but the plan is for \[1, 1\]"):
        Network(1).run(lambda port: ring_attention(x, x, x, contiguous(2, 2), port))
