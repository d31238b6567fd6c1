"Attention by hand: against torch in values and every gradient, in blocks against whole, and what must not change."
import tracemalloc
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

import strict_array
from lmcourse.architecture.attention_np import (attention_backward, attention_forward, blockwise_attention_backward,
    blockwise_attention_forward, causal_attention_backward, causal_attention_forward, causal_mask_np, half_split_order, multihead_backward,
    multihead_forward, rope_backward, rope_forward, rope_half_backward, rope_half_forward, rope_tables_np, visible_blocks)
from lmcourse.architecture.attention_torch import CausalSelfAttention, apply_rope, causal_attention, causal_mask, rope_tables
from lmcourse.tools.checks import check_close, expect_error, gradcheck
from lmcourse.tools.config import ModelConfig

few = settings(max_examples=25, deadline=None)
leads = st.lists(st.integers(1, 3), max_size=3).map(tuple)
sizes, seeds, blocks = st.integers(1, 7), st.integers(0, 1000), st.sampled_from([1, 2, 3, 5, 64])
heads = st.sampled_from([(1, 1), (4, 1), (4, 2), (6, 3), (3, 3)])
windows = st.one_of(st.none(), sizes)
floats = st.sampled_from([np.float32, np.float64])
CLOSE = {np.float32: (1e-3, 1e-5), np.float64: (1e-9, 1e-12)}
ATTEND = {"whole": (causal_attention_forward, causal_attention_backward), "blocks": (blockwise_attention_forward, blockwise_attention_backward)}


def randn(*shape, seed=0, dtype=np.float64): return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def qkv(lead, H, G, T, S, K=4, seed=0, dtype=np.float64):
    "Queries, keys and values as views of rows `(..., T, H*K)`: so a layer has them."
    split = lambda n, rows, i: randn(*lead, rows, n*K, seed=seed + i, dtype=dtype).reshape(*lead, rows, n, K).swapaxes(-2, -3)
    return split(H, T, 0), split(G, S, 1), split(G, S, 2)


def pull(y): return np.cos(np.arange(y.size)).reshape(y.shape).astype(y.dtype)


def both_ways(forward, backward, *arrays):
    "Output and gradients; the arguments are not touched, and a second pass back finds the cache as it was."
    before = [a.copy() for a in arrays]
    y, cache = forward(*arrays)
    y_before, dy = y.copy(), pull(y)
    results = [backward(dy, cache) for _ in range(2)]
    check_close(results[1], results[0], 0, 0)
    check_close([*arrays, y, dy], [*before, y_before, pull(y)], 0, 0)
    return [y, *(results[0] if isinstance(results[0], tuple) else results[:1])]


def torch_ways(f, *arrays):
    tensors = [torch.from_numpy(a.copy()).requires_grad_() for a in arrays]
    y = f(*tensors)
    return [y.detach(), *torch.autograd.grad(y, tensors, torch.from_numpy(pull(y.detach().numpy())))]


# Positions

@few
@given(leads, st.integers(1, 9), st.integers(0, 3), st.integers(1, 5), st.sampled_from([10., 10_000., 1e6]), floats, seeds)
def test_rope_is_the_twins(lead, T, more, pairs, theta, dtype, seed):
    tables, x = rope_tables_np(T + more, 2*pairs, theta, dtype), randn(*lead, T, 2*pairs, seed=seed, dtype=dtype)
    theirs = rope_tables(T + more, 2*pairs, theta, torch.from_numpy(x).dtype)
    check_close(tables, theirs, 1e-6, 1e-7)
    ours = both_ways(lambda x: rope_forward(x, *tables), rope_backward, x)
    check_close(ours, torch_ways(lambda x: apply_rope(x, *(t[:T] for t in theirs)), x), *CLOSE[dtype])
    check_close(rope_backward(ours[0], tables), x, *CLOSE[dtype])                               # There and back
    check_close(np.linalg.norm(ours[0], axis=-1), np.linalg.norm(x, axis=-1), *CLOSE[dtype])


@few
@given(leads, st.integers(1, 9), st.integers(1, 5), seeds)
def test_half_split_rope_is_another_order_of_the_same(lead, T, pairs, seed):
    tables, x, p = rope_tables_np(T, 2*pairs, dtype=np.float64), randn(*lead, T, 2*pairs, seed=seed), half_split_order(2*pairs)
    assert sorted(p.tolist()) == list(range(2*pairs)) and all(b - a == 1 for a, b in zip(p[:pairs], p[pairs:]))
    ours = both_ways(lambda x: rope_half_forward(x, *tables), rope_half_backward, x[..., p])
    check_close(ours[0], rope_forward(x, *tables)[0][..., p])
    check_close(ours[1], rope_backward(pull(ours[0])[..., np.argsort(p)], tables)[..., p])
    cos, sin = (np.concatenate([t, t], -1) for t in tables)
    half = x[..., p]
    check_close(ours[0], half*cos + np.concatenate([-half[..., pairs:], half[..., :pairs]], -1)*sin)    # As other libraries write it


@few
@given(st.integers(1, 9), st.integers(0, 30), seeds)
def test_rope_scores_know_distances_only(T, shift, seed):
    cos, sin = rope_tables_np(40, 8, dtype=np.float64)
    q, k = randn(2, T, 8, seed=seed)
    def scores(start): return rope_forward(q, cos[start:], sin[start:])[0]@rope_forward(k, cos[start:], sin[start:])[0].T
    check_close(scores(shift), scores(0), atol=1e-10)


def test_far_angles_are_exact():
    for dtype in (np.float32, np.float64):
        cos, sin = rope_tables_np(200_000, 4, 100., dtype)
        for t in (12_345, 99_999, 199_999):
            check_close((cos[t], sin[t]), tuple(np.array([f(t), f(t/10)], dtype) for f in (np.cos, np.sin)), 1e-6, 1e-7)


def test_rope_takes_tables_of_each_sequence():
    cos, sin = rope_tables_np(20, 8, dtype=np.float64)
    x, positions = randn(2, 3, 4, 8), np.array([[0, 1, 2, 3], [9, 3, 11, 19]])                  # B H T K, B T
    own = [t[positions][:, None] for t in (cos, sin)]
    y, dx = both_ways(lambda x: rope_forward(x, *own), rope_backward, x)
    for b in range(2):
        check_close(y[b], rope_forward(x[b], cos[positions[b]], sin[positions[b]])[0])
        check_close(rope_backward(y, own)[b], x[b])


# Attention

@few
@given(leads, sizes, sizes, sizes, st.sampled_from([None, (), (1,)]), floats, seeds)
def test_attention_is_torchs(lead, T, S, K, mask_lead, dtype, seed):
    arrays = [randn(*lead, n, K, seed=seed + i, dtype=dtype) for i, n in enumerate((T, S, S))]
    mask = None if mask_lead is None else np.random.default_rng(seed).random((*mask_lead[:len(lead)], T, S)) < .5   # Some rows see nothing
    theirs = partial(F.scaled_dot_product_attention, attn_mask=None if mask is None else torch.from_numpy(mask))
    ours = both_ways(partial(attention_forward, mask=mask), attention_backward, *arrays)
    check_close(ours, torch_ways(theirs, *arrays), *CLOSE[dtype])
    if mask is not None: assert not ours[0][..., ~mask.reshape(T, S).any(-1), :].any()


@few
@given(st.tuples(sizes, sizes), st.tuples(st.booleans(), st.booleans()), st.booleans(), seeds)
def test_gradients_of_what_is_shared_are_sums(lead, shared, masked, seed):
    q, (k, v) = randn(*lead, 3, 4, seed=seed), randn(2, *(1 if s else n for n, s in zip(lead, shared)), 5, 4, seed=seed + 1)
    mask = np.random.default_rng(seed).random((3, 5)) < .5 if masked else None
    forward = partial(attention_forward, mask=mask)
    ours = both_ways(forward, attention_backward, q, k, v)
    theirs = both_ways(forward, attention_backward, q, *(np.broadcast_to(z, (*lead, 5, 4)) for z in (k, v)))
    axes = tuple(i for i, s in enumerate(shared) if s)
    check_close(ours, theirs[:2] + [z.sum(axes, keepdims=True) for z in theirs[2:]], 1e-9, 1e-12)


def test_gradients_by_differences():
    tables, mask = rope_tables_np(3, 4, dtype=np.float64), np.array([[True, True, False], [False, False, False], [False, True, True]])
    q, k, v = randn(3, 2, 3, 4)
    for forward, backward, arrays in (
            (partial(rope_forward, cos=tables[0], sin=tables[1]), rope_backward, (q,)),
            (partial(rope_half_forward, cos=tables[0], sin=tables[1]), rope_half_backward, (q,)),
            (partial(attention_forward, mask=mask), attention_backward, (q, k, v)),
            (partial(causal_attention_forward, window=2), causal_attention_backward, (q, k[:1], v[:1])),
            (partial(blockwise_attention_forward, window=2, block=2), blockwise_attention_backward, (q, k[:1], v[:1]))):
        y, *grads = both_ways(forward, backward, *arrays)
        gradcheck(lambda *a: (forward(*a)[0]*pull(y)).sum(), arrays, tuple(grads))


def test_large_scores_do_not_overflow():
    q, k, v = qkv((), 2, 2, 6, 6)
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        for forward, backward in ATTEND.values():
            y, *grads = both_ways(lambda q, k, v: forward(q, k, v, 4), backward, 300*q, 300*k, v)
            assert all(np.isfinite(z).all() for z in (y, *grads))
            check_close(y, F.scaled_dot_product_attention(*map(torch.from_numpy, (300*q, 300*k, v)), causal_mask(6, window=4)), atol=1e-6)


@few
@given(st.integers(1, 9), st.integers(0, 5), windows)
def test_mask_is_the_twins(T, more, window):
    check_close(causal_mask_np(T, T + more, window), causal_mask(T, T + more, window))
    check_close(causal_mask_np(T), causal_mask(T))


@few
@given(leads, heads, sizes, st.integers(0, 4), windows, floats, seeds)
def test_causal_attention_is_the_twins(lead, heads, T, more, window, dtype, seed):
    arrays = qkv(lead, *heads, T, T + more, seed=seed, dtype=dtype)
    ours = both_ways(lambda *a: causal_attention_forward(*a, window), causal_attention_backward, *arrays)
    check_close(ours, torch_ways(partial(causal_attention, window=window), *arrays), *CLOSE[dtype])


@settings(max_examples=60, deadline=None)
@given(leads, heads, sizes, st.integers(0, 4), windows, blocks, floats, seeds)
def test_blocks_are_the_whole(lead, heads, T, more, window, block, dtype, seed):
    arrays = qkv(lead, *heads, T, T + more, seed=seed, dtype=dtype)
    ours = both_ways(lambda *a: blockwise_attention_forward(*a, window, block), blockwise_attention_backward, *arrays)
    check_close(ours, both_ways(lambda *a: causal_attention_forward(*a, window), causal_attention_backward, *arrays), *CLOSE[dtype])
    check_close(ours, torch_ways(partial(causal_attention, window=window), *arrays), *CLOSE[dtype])


@pytest.mark.parametrize("attend", ATTEND)
def test_nothing_in_nothing_out(attend):
    for lead, H, G, T, S in (((0,), 4, 2, 3, 5), ((2, 0), 2, 2, 3, 3), ((2,), 4, 2, 0, 3)):
        arrays = qkv(lead, H, G, T, S)
        assert [z.shape for z in both_ways(*ATTEND[attend], *arrays)] == [arrays[0].shape, *(z.shape for z in arrays)]


def test_blocks_of_the_usual_size():
    for S, window in ((200, None), (200, 70), (300, 100)):
        arrays = qkv((2,), 4, 2, 200, S, 16)
        ours = both_ways(partial(blockwise_attention_forward, window=window), blockwise_attention_backward, *arrays)
        check_close(ours, torch_ways(partial(causal_attention, window=window), *arrays), 1e-8, 1e-10)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 40), st.integers(0, 40), st.one_of(st.none(), st.integers(1, 50)), st.integers(1, 20))
def test_visible_blocks_hold_all_that_is_seen_and_no_key_that_is_not(T, more, window, block):
    mask, held = causal_mask_np(T, T + more, window), np.zeros((T, T + more), int)
    for rows, first, parts in visible_blocks(T, T + more, window, block):
        assert first == rows.start + more and 0 < rows.stop - rows.start <= block
        for cols in parts:
            held[rows, cols] += 1
            assert 0 < cols.stop - cols.start <= block and mask[rows, cols].any(0).all()
    assert held.max() == 1 and held[mask].all()


def test_blocks_that_nobody_sees_are_not_read():
    q, k, v = qkv((), 2, 1, 64, 64)
    dout = randn(2, 64, 4)
    for window, spoilt in ((None, slice(32, 64)), (16, slice(0, 16))):          # Above the diagonal, beyond the window
        bad_k, bad_v = k.copy(), v.copy()
        bad_k[:, spoilt] = bad_v[:, spoilt] = np.nan
        clean = slice(0, 32) if window is None else slice(32, 64)
        (y, cache), (bad_y, bad_cache) = (blockwise_attention_forward(q, *kv, window, 16) for kv in ((k, v), (bad_k, bad_v)))
        check_close(bad_y[:, clean], y[:, clean], 0, 0)
        dq, bad_dq = (blockwise_attention_backward(dout, c)[0] for c in (cache, bad_cache))
        check_close(bad_dq[:, clean], dq[:, clean], 0, 0)


# Memory

def peak(f):
    tracemalloc.start()
    try: f(); return tracemalloc.get_traced_memory()[1]
    finally: tracemalloc.stop()


def test_blocks_never_hold_all_scores():
    def step(forward, backward, T):
        arrays = qkv((), 1, 1, T, T, 8, dtype=np.float32)
        def go(): y, cache = forward(*arrays); backward(y, cache)
        return peak(go)
    blocked, whole = ([step(*ATTEND[name], T) for T in (512, 1024, 2048)] for name in ("blocks", "whole"))
    assert all(b < 2.1*a for a, b in zip(blocked, blocked[1:])) and all(b > 3.8*a for a, b in zip(whole, whole[1:]))
    assert blocked[-1] < 2048**2*4/16 < whole[-1]


@pytest.mark.parametrize("attend", ATTEND)
@pytest.mark.parametrize("H, G", [(4, 4), (4, 2), (4, 1)])
def test_heads_merge_without_a_copy(attend, H, G):
    q, k, v = qkv((2, 3), H, G, 5, 5)
    tables = rope_tables_np(5, 4)
    turned = rope_forward(q, *tables)[0]
    for z in (turned, rope_backward(turned, tables), *both_ways(*ATTEND[attend], q, k, v)):
        rows = z.swapaxes(-2, -3)
        assert rows.flags.c_contiguous and np.shares_memory(rows.reshape(2, 3, 5, -1), z)


def test_shared_heads_are_not_copied():
    q, k, v = (z.copy() for z in qkv((), 16, 1, 2, 4096, 64, dtype=np.float32))     # Two queries at the end of a long text
    for forward, _ in ATTEND.values():
        assert peak(lambda: forward(q, k, v)) < 2*k.nbytes < 16*k.nbytes


# Types

@pytest.mark.parametrize("attend", ATTEND)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_types_are_kept(attend, dtype):
    arrays, tables = qkv((2,), 4, 2, 6, 6), rope_tables_np(6, 4)
    small = [a.astype(dtype) for a in arrays]
    exact, ours = both_ways(*ATTEND[attend], *(a.astype(np.float64) for a in small)), both_ways(*ATTEND[attend], *small)
    assert {z.dtype for z in ours} == {np.dtype(dtype)}
    tolerance = dict(rtol=2e-3, atol=2e-3) if dtype == np.float16 else dict(rtol=1e-4, atol=1e-5)
    check_close([z.astype(np.float64) for z in ours], exact, **tolerance)
    for forward, backward in ((rope_forward, rope_backward), (rope_half_forward, rope_half_backward)):
        turned = both_ways(partial(forward, cos=tables[0], sin=tables[1]), backward, small[0])
        assert {z.dtype for z in turned} == {np.dtype(dtype)}


def test_float16_scores_are_float32():
    q = np.full((1, 2, 4), 200, np.float16)                                     # Scores of 80,000: beyond float16
    for forward, backward in ATTEND.values():
        assert all(np.isfinite(z).all() for z in both_ways(forward, backward, q, q, q/200))


# The layer

config = ModelConfig(vocab_size=10, context_length=12, d_model=24, num_heads=6, head_dim=4)
VARIANTS = [dict(), dict(num_kv_heads=1), dict(num_kv_heads=2), dict(window=1), dict(window=3), dict(qk_norm=True), dict(bias=True),
            dict(position="none"), dict(position="learned", qk_norm=True), dict(rope_theta=10., norm_eps=.1, qk_norm=True),
            dict(num_kv_heads=3, window=5, qk_norm=True, bias=True, head_dim=8)]


def layer_of(c, dtype=np.float64):
    "The torch layer, its parameters in NumPy, and tables."
    layer = CausalSelfAttention(c, dtype=torch.from_numpy(np.empty(0, dtype)).dtype)
    for i, p in enumerate(layer.parameters()): p.data += torch.from_numpy(.3*randn(*p.shape, seed=i, dtype=dtype))
    tables = rope_tables_np(c.context_length, c.head_size, c.rope_theta, dtype) if c.position == "rope" else None
    return layer, {n: w.numpy() for n, w in layer.state_dict().items()}, tables


def as_pair(params, c, tables, attend):
    def backward(dy, cache):
        dx, grads = multihead_backward(dy, cache)
        assert grads.keys() == params.keys()
        return dx, *(grads[n] for n in params)
    return lambda x, *w: multihead_forward(x, dict(zip(params, w)), c, tables, attend), backward


@pytest.mark.parametrize("attend", [ATTEND["whole"], (partial(blockwise_attention_forward, block=5), blockwise_attention_backward)], ids=ATTEND)
@pytest.mark.parametrize("dtype", CLOSE, ids=lambda d: d.__name__)
@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_layer_is_the_twins(changes, dtype, attend):
    c = replace(config, **changes)
    layer, params, tables = layer_of(c, dtype)
    for shape in ((2, 12, 24), (7, 24), (2, 1, 3, 24)):
        ours = both_ways(*as_pair(params, c, tables, attend), randn(*shape, dtype=dtype), *params.values())
        def theirs(x, *w): return torch.func.functional_call(layer, dict(zip(params, w)), x)
        check_close(ours, torch_ways(theirs, randn(*shape, dtype=dtype), *params.values()), *((2e-3, 2e-4) if dtype == np.float32 else CLOSE[dtype]))


@few
@given(leads, st.integers(1, 12), heads, st.sampled_from([2, 4, 6]), windows, st.tuples(*[st.booleans()]*3), blocks, seeds)
def test_layer_of_any_shape(lead, T, heads, K, window, switches, block, seed):
    (H, G), (qk_norm, bias, turned) = heads, switches
    c = replace(config, num_heads=H, num_kv_heads=G, head_dim=K, window=window, qk_norm=qk_norm, bias=bias, position="rope" if turned else "none")
    layer, params, tables = layer_of(c)
    attend, x = (partial(blockwise_attention_forward, block=block), blockwise_attention_backward), randn(*lead, T, 24, seed=seed)
    def theirs(x, *w): return torch.func.functional_call(layer, dict(zip(params, w)), x)
    check_close(both_ways(*as_pair(params, c, tables, attend), x, *params.values()), torch_ways(theirs, x, *params.values()), 1e-8, 1e-10)


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
@pytest.mark.parametrize("attend", ATTEND)
def test_nothing_comes_from_the_future(changes, attend):
    c = replace(config, **changes)
    _, params, tables = layer_of(c)
    run = lambda x: multihead_forward(x, params, c, tables, ATTEND[attend])[0]
    x = randn(2, 12, 24)
    for t in (0, 5, 11):
        other = x.copy(); other[:, t] += 1
        changed = (run(other) != run(x)).any((0, 2)).tolist()
        assert changed == [t <= s and (c.window is None or s < t + c.window) for s in range(12)]


def test_order_of_heads_does_not_matter():
    c = replace(config, num_kv_heads=3, bias=True, qk_norm=True)
    _, params, tables = layer_of(c)
    x, order = randn(2, 12, 24), [2, 0, 1]                                      # Of key/value heads; each brings its two query heads
    rows = lambda w: w.reshape(3, -1, *w.shape[1:])[order].reshape(w.shape)
    moved = params | {n: rows(w) for n, w in params.items() if n[:6] in ("q_proj", "k_proj", "v_proj")}
    moved["output_proj.weight"] = rows(params["output_proj.weight"].T).T
    (y, dx, *_), (other_y, other_dx, *_) = (both_ways(*as_pair(p, c, tables, ATTEND["whole"]), x, *p.values()) for p in (params, moved))
    check_close((other_y, other_dx), (y, dx), 1e-9, 1e-12)


# Another array module

def both_ways_plain(forward, backward, *arrays):
    y, cache = forward(*arrays)
    return y, backward(y, cache)


def check_strict(f, *args):
    "`f` gives the same on arrays that refuse NumPy's functions, and nowhere waits for a number."
    waits = strict_array.ndarray.waits
    check_close(strict_array.on_strict(f)(*args), f(*args), *((2e-3, 2e-3) if args[0].dtype == np.float16 else (1e-5, 1e-6)))
    assert strict_array.ndarray.waits == waits


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_pairs_run_on_another_module(dtype):
    q, k, v = (z.astype(dtype) for z in qkv((2,), 4, 2, 5, 7))
    mask, tables = np.random.default_rng(0).random((5, 5)) < .4, rope_tables_np(9, 4)
    for pair in ((rope_forward, rope_backward), (rope_half_forward, rope_half_backward)):
        check_strict(partial(both_ways_plain, *pair), q, *tables)
    for m in (mask, np.ones((5, 5), bool)): check_strict(partial(both_ways_plain, attention_forward, attention_backward), q, q, q, m)
    check_strict(partial(both_ways_plain, attention_forward, attention_backward), q, k[:, :1], v[:, :1])
    for window in (None, 3):
        for forward, backward in (ATTEND["whole"], (partial(blockwise_attention_forward, block=2), blockwise_attention_backward)):
            check_strict(partial(both_ways_plain, partial(forward, window=window), backward), q, k, v)


def test_tables_and_masks_are_made_in_the_module():
    for ours, theirs in ((rope_tables_np(5, 4, xp=strict_array), rope_tables_np(5, 4)), (causal_mask_np(3, 5, 2, strict_array), causal_mask_np(3, 5, 2))):
        check_close(strict_array.to_numpy(ours), theirs)


@pytest.mark.parametrize("attend", ATTEND)
@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_layer_runs_on_another_module(changes, attend):
    c = replace(config, **changes)
    _, params, tables = layer_of(c, np.float32)
    def run(x, params, tables):
        y, cache = multihead_forward(x, params, c, tables, ATTEND[attend])
        return y, multihead_backward(y, cache)
    check_strict(run, randn(2, 7, 24, dtype=np.float32), params, tables)


def test_arrays_of_two_modules_are_refused():
    q = randn(2, 3, 4)
    for forward in (attention_forward, causal_attention_forward, blockwise_attention_forward):
        with expect_error(TypeError, "expected all of one"): forward(q, strict_array.asarray(q), q)
    with expect_error(TypeError, "expected all of one"): rope_forward(strict_array.asarray(q), *rope_tables_np(3, 4))
    with expect_error(TypeError, "expected all of one"): attention_forward(*[strict_array.asarray(q)]*3, np.ones((3, 3), bool))


# Bad input

def test_bad_input_is_refused():
    q, k, v = qkv((2,), 4, 2, 5, 5)
    tables = rope_tables_np(5, 4)
    for mask in (np.ones((5, 5)), np.ones((5, 5), np.int64)):
        with expect_error(TypeError, f"mask is {mask.dtype}"): attention_forward(q, q, q, mask)
    for shape in ((4, 5), (5, 6), (3, 5, 5), (7, 2, 4, 5, 5)):
        with expect_error(ValueError, f"mask {shape} does not fit scores (2, 4, 5, 5)"): attention_forward(q, q, q, np.ones(shape, bool))
    for bad in ((q, k, k), (q, q[0], q[0]), (q, q[..., :3], q[..., :3]), (q, q, q[:, :, :4])):
        with expect_error(ValueError, f"queries {bad[0].shape}, keys {bad[1].shape}, values {bad[2].shape}"): attention_forward(*bad)
    for forward, _ in ATTEND.values():
        with expect_error(ValueError, "4 query heads cannot share 3 key/value heads"): forward(q, *randn(2, 2, 3, 5, 4))
        with expect_error(ValueError, "5 queries at the end of 4 keys"): forward(q, k[:, :, :4], v[:, :, :4])
        with expect_error(ValueError, "4 query heads cannot share 0 key/value heads"): forward(q, k[:, :0], v[:, :0])
        with expect_error(ValueError, "window = 0"): forward(q, k, v, 0)
        for bad in ((q[0, 0], k[0, 0], v[0, 0]), (q, k[:1], v[:1]), (q, k, v[..., :3]), (q, k[..., :3], v[..., :3])):
            with expect_error(ValueError, f"queries {bad[0].shape}, keys {bad[1].shape}, values {bad[2].shape}"): forward(*bad)
        with expect_error(TypeError, "int64"): forward(*(z.astype(np.int64) for z in (q, k, v)))
        with expect_error(TypeError, "float32, float64"): forward(q, k, v.astype(np.float32))
    with expect_error(ValueError, "block = 0"): blockwise_attention_forward(q, k, v, block=0)
    with expect_error(ValueError, "5 queries at the end of 4 keys"): causal_mask_np(5, 4)
    with expect_error(ValueError, "keys (2, 2, 0, 4)"): attention_forward(k, k[:, :, :0], v[:, :, :0])
    with expect_error(ValueError, "head_dim = 7 is odd"): rope_tables_np(5, 7)
    with expect_error(ValueError, "theta = 0.0, expected more than 0"): rope_tables_np(5, 4, 0.0)
    with expect_error(ValueError, "head_dim = 7 is odd"): half_split_order(7)
    for forward in (rope_forward, rope_half_forward):
        with expect_error(ValueError, "has 6 positions, but RoPE's tables end after 5"): forward(randn(6, 4), *tables)
        with expect_error(ValueError, "cosines (5, 2) and sines (1, 2)"): forward(randn(5, 4), tables[0], tables[1][:1])
        for K in (3, 6):
            with expect_error(ValueError, f"for head_dim = 4, not for x (5, {K})"): forward(randn(5, K), *tables)
        with expect_error(TypeError, "int64"): forward(np.ones((5, 4), np.int64), *tables)


def test_a_gradient_must_look_like_the_output():
    q = randn(2, 5, 4)
    for forward, backward in (*ATTEND.values(), (attention_forward, attention_backward)):
        y, cache = forward(q, q, q)
        for bad in (y[0], y[:1], y[..., :3]):
            with expect_error(ValueError, f"dout has shape {bad.shape}, expected (2, 5, 4)"): backward(bad, cache)
        with expect_error(TypeError, "dout is float32, expected float64"): backward(y.astype(np.float32), cache)


def test_layer_refuses():
    _, params, tables = layer_of(config)
    with expect_error(ValueError, "position = 'rope' needs tables"): multihead_forward(randn(12, 24), params, config)
    with expect_error(ValueError, "has 13 positions"): multihead_forward(randn(13, 24), params, config, tables)
    run = lambda p, **changes: multihead_forward(randn(12, 24), p, replace(config, **changes), tables)
    with expect_error(ValueError, "q_proj.bias is missing, expected (24,); "): run(params, bias=True)
    with expect_error(ValueError, "q_norm.weight is missing, expected (4,); k_norm.weight is missing"): run(params, qk_norm=True)
    with expect_error(ValueError, "extra is (2,), expected no such parameter"): run(params | {"extra": randn(2)})
    with expect_error(ValueError, "k_proj.weight is (24, 24), expected (8, 24); v_proj"): run(params, num_kv_heads=2)
    with expect_error(ValueError, "(12, 23)"): multihead_forward(randn(12, 23), params, config, tables)
    with expect_error(TypeError, "float32"): multihead_forward(randn(12, 24, dtype=np.float32), params, config, tables)
