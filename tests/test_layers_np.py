"The layers by hand: against torch in values and every gradient, over shapes and types, on strict arrays, and with input that must be refused."
import math
import tracemalloc
from functools import partial

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

import strict_array
from strict_array import on_strict, to_numpy, to_strict
from lmcourse.architecture import layers_torch
from lmcourse.architecture.layers_np import (ACTIVATIONS_NP, RowGradient, array_module, at_least_float32_np, cross_entropy_backward, cross_entropy_forward,
    embedding_backward, embedding_forward, ffn_backward, ffn_forward, gelu_backward, gelu_forward, layernorm_backward, layernorm_forward,
    linear_backward, linear_forward, linear_init, normal_cdf, relu_backward, relu_forward, rmsnorm_backward, rmsnorm_forward, silu_backward,
    silu_forward, softmax_backward, softmax_forward, truncated_normal_np)
from lmcourse.tools.checks import check_close, expect_error, gradcheck
from lmcourse.tools.config import FFN_KINDS

few = settings(max_examples=25, deadline=None)
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
seeds = st.integers(0, 1000)


def randn(*shape, seed=0, dtype=np.float64): return np.random.default_rng(seed).standard_normal(shape).astype(dtype)

def run(forward, backward, *inputs, seed=7):
    "Output, the `dy` that was sent back, and what came out, as a flat list of arrays without `None`."
    y, cache = forward(*inputs)
    dy = randn(*y.shape, seed=seed, dtype=y.dtype)
    return y, dy, flat(backward(dy, cache))

def flat(grads):
    if isinstance(grads, RowGradient): return [grads.dense()]
    if isinstance(grads, dict): return list(grads.values())
    return [g for member in grads for g in flat(member)] if isinstance(grads, tuple) else [] if grads is None else [grads]

def check_torch(forward, backward, theirs, *inputs, rtol=1e-9, atol=1e-11):
    "Values and every gradient are those of `theirs` under autograd."
    y, dy, grads = run(forward, backward, *inputs)
    leaves = [torch.tensor(x, requires_grad=x.dtype.kind == "f") for x in inputs]
    out = theirs(*leaves)
    wanted = torch.autograd.grad(out, [x for x in leaves if x.requires_grad], torch.from_numpy(dy))
    check_close([y, *grads], [out, *wanted], rtol, atol)


# Against torch

@few
@given(shapes, st.integers(1, 9), st.integers(1, 9), st.booleans(), seeds)
def test_linear(lead, n_in, n_out, bias, seed):
    check_torch(linear_forward, linear_backward, F.linear, randn(*lead, n_in, seed=seed), randn(n_out, n_in, seed=seed + 1),
                *[randn(n_out, seed=seed + 2)]*bias)


@few
@given(shapes, st.integers(1, 9), st.integers(1, 5), st.sampled_from([np.int64, np.int32, np.uint16, np.uint8]), seeds)
def test_embedding(lead, V, D, dtype, seed):
    ids = np.random.default_rng(seed).integers(0, V, lead).astype(dtype) if lead else np.array(seed % V, dtype)
    theirs = lambda ids, w: F.embedding(ids.long(), w)
    check_torch(embedding_forward, embedding_backward, theirs, ids, randn(V, D, seed=seed))
    grad = embedding_backward(randn(*lead, D), embedding_forward(ids, randn(V, D))[1])
    assert grad.rows.dtype == np.int64 and grad.rows.tolist() == sorted(set(ids.ravel().tolist()))
    assert grad.shape == (V, D) and grad.values.shape == (len(grad.rows), D)


@pytest.mark.parametrize("counts", [[1000], [1], [511, 512, 513], [3, 1, 4, 1, 5, 9, 2, 6]])
def test_rows_of_equal_ids_are_added_up(counts):
    "Whole numbers, so that nothing is rounded and every row must be there exactly once."
    ids = np.random.default_rng(0).permutation(np.repeat(10*np.arange(len(counts)), counts))
    dy = np.random.default_rng(1).integers(-50, 50, (len(ids), 3)).astype(np.float32)
    wanted = np.zeros((99, 3), np.float32)
    np.add.at(wanted, ids, dy)
    check_close(embedding_backward(dy, (ids, np.zeros((99, 3), np.float32))).dense(), wanted, 0, 0)


@few
@given(shapes, st.integers(1, 9), st.sampled_from([1e-5, .1]), st.booleans(), seeds)
def test_norms(lead, d, eps, has_bias, seed):
    x, gain, bias = randn(*lead, d, seed=seed), randn(d, seed=seed + 1), randn(d, seed=seed + 2)
    check_torch(partial(rmsnorm_forward, eps=eps), rmsnorm_backward, lambda x, g: F.rms_norm(x, (d,), g, eps), x, gain)
    check_torch(partial(layernorm_forward, eps=eps), layernorm_backward, lambda x, g, b=None: F.layer_norm(x, (d,), g, b, eps),
                x, gain, *[bias]*has_bias, atol=1e-9)      # A row of one number is all rounding


FUNCTIONS = [(*pair, layers_torch.ACTIVATIONS[name]) for name, pair in ACTIVATIONS_NP.items()]
FUNCTIONS.append((partial(gelu_forward, approximate="none"), gelu_backward, F.gelu))


@few
@given(shapes, seeds)
def test_functions(shape, seed):
    x = 4*randn(*shape, seed=seed)
    for forward, backward, theirs in FUNCTIONS: check_torch(forward, backward, theirs, x)
    for axis in range(-len(shape), len(shape)):
        if x.shape[axis]: check_torch(partial(softmax_forward, axis=axis), softmax_backward, partial(F.softmax, dim=axis), x)


def test_functions_at_all_places():
    x = np.concatenate([np.linspace(-45, 45, 2001), [0., -0., 1e-300, -1e-300]])
    for dtype, rtol, atol in ((np.float64, 1e-9, 1e-12), (np.float32, 1e-4, 1e-6)):
        for forward, backward, theirs in FUNCTIONS: check_torch(forward, backward, theirs, x.astype(dtype), rtol=rtol, atol=atol)


def test_normal_cdf():
    x = np.linspace(-36, 40, 3001)
    check_close(normal_cdf(x), np.array([math.erfc(-v/math.sqrt(2))/2 for v in x]), rtol=1e-12, atol=0)
    assert normal_cdf(np.zeros(1, np.float32)).dtype == np.float32
    ends = normal_cdf(np.array([-1e300, 1e300, -np.inf, np.inf, np.nan]))
    assert ends[:4].tolist() == [0, 1, 0, 1] and np.isnan(ends[4])


def ffn_params(kind, D, d_ff, bias, seed=0, dtype=np.float64):
    names = ["w1", "w2"] + ["w3"]*FFN_KINDS[kind].gated
    sizes = {"w1": (d_ff, D), "w2": (D, d_ff), "w3": (d_ff, D)}
    params = {f"{n}.weight": randn(*sizes[n], seed=seed + i, dtype=dtype) for i, n in enumerate(names)}
    return params | ({f"{n}.bias": randn(sizes[n][0], seed=seed + 5 + i, dtype=dtype) for i, n in enumerate(names)} if bias else {})


@pytest.mark.parametrize("kind", FFN_KINDS)
@settings(max_examples=8, deadline=None)
@given(shapes, st.integers(1, 6), st.integers(1, 6), st.booleans(), seeds)
def test_ffn_is_its_twin(kind, lead, D, d_ff, bias, seed):
    x, params = randn(*lead, D, seed=seed), ffn_params(kind, D, d_ff, bias, seed)
    twin = layers_torch.FeedForward(D, d_ff, kind, bias, dtype=torch.float64)
    twin.load_state_dict({k: torch.from_numpy(p) for k, p in params.items()})
    y, cache = ffn_forward(x, params, kind)
    dx, grads = ffn_backward(dy := randn(*y.shape, seed=seed + 9), cache)
    leaf = torch.tensor(x, requires_grad=True)
    out = twin(leaf)
    out.backward(torch.from_numpy(dy))
    check_close((y, dx, grads), (out, leaf.grad, {k: p.grad for k, p in twin.named_parameters()}), 1e-9, 1e-11)


@few
@given(shapes, st.integers(1, 9), st.sampled_from([0., .1]), st.booleans(), seeds)
def test_cross_entropy_is_its_twin(shape, V, z_loss, has_ignored, seed):
    rng = np.random.default_rng(seed)
    logits, targets = 3*randn(*shape, V, seed=seed), np.asarray(rng.integers(0, V, shape))
    for ignored in (-100, -1, V) if has_ignored else (-100,):
        some = np.where(rng.random(shape) < .7*has_ignored, ignored, targets)
        if (some == ignored).all(): continue
        forward = lambda z: cross_entropy_forward(z, some, ignored, z_loss)
        backward = lambda dy, cache: dy*cross_entropy_backward(cache)
        check_torch(forward, backward, lambda z: layers_torch.cross_entropy(z, torch.from_numpy(some), ignored, z_loss), logits)
        theirs = lambda z: F.cross_entropy(z.reshape(-1, V), torch.from_numpy(some).flatten(), ignore_index=ignored)
        if not z_loss: check_torch(forward, backward, theirs, logits)


@pytest.mark.parametrize("z_loss", [0., .1])
def test_no_target_counts(z_loss):
    z = torch.randn(2, 3, requires_grad=True)
    F.cross_entropy(z, torch.tensor([-100, -100])).backward()
    loss, cache = cross_entropy_forward(z.detach().numpy(), np.array([-100, -100]), z_loss=z_loss)
    assert np.isnan(loss) and loss.dtype == np.float32
    check_close(cross_entropy_backward(cache), z.grad, 0, 0)
    assert np.isnan(cross_entropy_forward(np.zeros((0, 3)), np.zeros(0, np.int64))[0])


# By finite differences

def pairs(D=5, V=7, dtype=np.float64):
    "Name -> forward, backward, and inputs that have a gradient; each with everything it can have."
    x, gain, bias = randn(2, 3, D, dtype=dtype), randn(D, seed=1, dtype=dtype), randn(D, seed=2, dtype=dtype)
    ids, targets = np.array([[1, 0, 6], [1, 1, 5]]), np.array([[1, -100, 4], [0, 0, -100]])
    found = dict(linear=(linear_forward, linear_backward, (x, randn(4, D, seed=3, dtype=dtype), randn(4, seed=4, dtype=dtype))),
                 linear_no_bias=(linear_forward, linear_backward, (x, randn(4, D, seed=3, dtype=dtype))),
                 embedding=(lambda w: embedding_forward(array_module(w).asarray(ids), w), embedding_backward, (randn(V, D, dtype=dtype),)),
                 rmsnorm=(rmsnorm_forward, rmsnorm_backward, (x, gain)),
                 layernorm=(layernorm_forward, layernorm_backward, (x, gain, bias)),
                 layernorm_no_bias=(layernorm_forward, layernorm_backward, (x, gain)),
                 **{name: (*pair, (x,)) for name, pair in ACTIVATIONS_NP.items()},
                 gelu_exact=(partial(gelu_forward, approximate="none"), gelu_backward, (x,)),
                 softmax=(softmax_forward, softmax_backward, (x,)), softmax_1=(partial(softmax_forward, axis=1), softmax_backward, (x,)),
                 cross_entropy=(lambda z: cross_entropy_forward(z, array_module(z).asarray(targets % D), z_loss=.1),
                                lambda dy, cache: (dy*cross_entropy_backward(cache)).astype(cache[0].dtype), (x,)),
                 cross_entropy_ignored=(lambda z: cross_entropy_forward(z, array_module(z).asarray(targets), z_loss=.1),
                                lambda dy, cache: (dy*cross_entropy_backward(cache)).astype(cache[0].dtype), (x,)))
    for kind in FFN_KINDS:
        for has_bias in (True, False):
            params = ffn_params(kind, D, 4, has_bias, dtype=dtype)
            def forward(x, *ws, kind=kind, names=tuple(params)): return ffn_forward(x, dict(zip(names, ws)), kind)
            def backward(dy, cache, names=tuple(params)): dx, grads = ffn_backward(dy, cache); return dx, *(grads[n] for n in names)
            found[kind + "_ffn" + "_bias"*has_bias] = forward, backward, (x, *params.values())
    return found

every = pytest.mark.parametrize("name", pairs())


@every
def test_gradients_by_finite_differences(name):
    forward, backward, inputs = pairs()[name]
    y, dy, grads = run(forward, backward, *inputs)
    gradcheck(lambda *xs: (forward(*xs)[0]*dy).sum(), inputs, tuple(grads))


# Types, extremes, memory

@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@every
def test_types_are_kept(name, dtype):
    forward, backward, inputs = pairs(dtype=dtype)[name]
    y, dy, grads = run(forward, backward, *inputs)
    wide = [a.astype(np.float64) for a in inputs]
    y64, cache = forward(*wide)
    grads64 = flat(backward(dy.astype(np.float64), cache))
    assert [g.dtype for g in grads] == [dtype]*len(inputs)
    assert y.dtype == (np.float32 if dtype == np.float16 and "entropy" in name else dtype)
    tol = {np.float16: 2e-2, np.float32: 1e-5, np.float64: 1e-12}[dtype]
    check_close([a.astype(np.float64) for a in (y, *grads)], [y64.astype(np.float64), *grads64], tol, tol)


def test_wide_sums():
    "In float16 each of these would overflow, or stop at 2048 where 1 is no longer a step."
    x, ones = np.full((5000, 64), 300, np.float16), np.ones(64, np.float16)
    check_close(rmsnorm_forward(x, ones)[0], np.ones_like(x), 1e-3)
    check_close(layernorm_forward(x, ones, ones)[0], np.ones_like(x), 1e-3)
    check_close(linear_backward(np.ones((5000, 2), np.float16), (x[:, :1]/300, np.ones((2, 1), np.float16), True))[2], np.full(2, 5000, np.float16), 1e-3)
    check_close(layernorm_backward(x/300, layernorm_forward(x, ones, ones)[1])[2], np.full(64, 5000, np.float16), 1e-3)
    check_close(embedding_backward(x/300, (np.zeros(5000, int), np.ones((1, 64), np.float16))).values, np.full((1, 64), 5000, np.float16), 1e-3)
    check_close(softmax_forward(np.zeros((1, 40_000), np.float16))[0].astype(np.float64).sum(), 1., 1e-2)
    check_close(cross_entropy_forward(np.zeros((1, 70_000), np.float16), np.array([3]))[0], np.float32(math.log(70_000)))
    big = np.array([30_000], np.float16)
    h = rmsnorm_backward(np.array([4., 0.], np.float16), rmsnorm_forward(np.ones(2, np.float16), np.repeat(big, 2))[1])[0]
    check_close(h, np.array([60_000, -60_000], np.float16), 1e-3)           # dy · gain is 120,000, beyond float16


def test_gain_of_another_type():
    "A 16-bit stream with float32 gains: each gradient has the type of what it belongs to."
    x, gain = randn(3, 4, dtype=np.float16), randn(4, dtype=np.float32)
    y, cache = layernorm_forward(x, gain, gain)
    assert [a.dtype for a in (y, *layernorm_backward(y, cache))] == [np.float16, np.float16, np.float32, np.float32]
    y, cache = rmsnorm_forward(x, gain)
    assert [a.dtype for a in (y, *rmsnorm_backward(y, cache))] == [np.float16, np.float16, np.float32]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_extreme_numbers(dtype):
    top = 1e30 if dtype == np.float32 else 1e300
    x = np.array([[top, -top, 0.], [0., 0., 0.], [-1e4, 1e4, 1e4]], dtype)
    for forward, backward in ((relu_forward, relu_backward), (silu_forward, silu_backward), (gelu_forward, gelu_backward),
                              (partial(gelu_forward, approximate="none"), gelu_backward)):
        y, cache = forward(x)
        check_close(y, np.maximum(x, 0), 0, 1e-30)
        check_close(np.where(x == 0, 0, backward(np.ones_like(x), cache)).astype(dtype), (x > 0).astype(dtype), 0, 1e-30)
    check_close(softmax_forward(x)[0], np.array([[1, 0, 0], [1/3]*3, [0, .5, .5]], dtype))
    for z_loss in (0., 1e-4):
        loss, cache = cross_entropy_forward(x[1:], np.array([2, 0]), z_loss=z_loss)
        check_close(loss, dtype((math.log(3) + 2e4 + math.log(2) + z_loss*(math.log(3)**2 + (1e4 + math.log(2))**2))/2), 1e-5)
        assert np.isfinite(cross_entropy_backward(cache)).all()
    loss, cache = cross_entropy_forward(x[:2], np.array([0, 1]))
    check_close((loss, cross_entropy_backward(cache)), (dtype(math.log(3)/2), np.array([[0]*3, [1/6, -1/3, 1/6]], dtype)))


@pytest.mark.filterwarnings("error")
def test_norms_of_zero_and_of_large_rows():
    gain = np.array([1., 2., 3.], np.float32)
    x = np.array([[0, 0, 0], [1e17, -1e17, 1e17], [5, 5, 5]], np.float32)
    y, cache = rmsnorm_forward(x, gain)
    check_close(y, np.array([[0]*3, [1, -2, 3], [1, 2, 3]], np.float32), 1e-5)
    dx = rmsnorm_backward(np.ones_like(x), cache)[0]
    check_close(dx[0], gain/np.float32(math.sqrt(1e-5)), 1e-5)             # At 0 only eps is under the root
    y, cache = layernorm_forward(x, gain)
    check_close(y[[0, 2]], np.zeros((2, 3), np.float32))
    assert all(np.isfinite(g).all() for g in flat(layernorm_backward(np.ones_like(x), cache)))


def test_large_logits_lose_no_digits():
    "A common part of 10,000 would cost float32 four digits if log Z were formed first."
    z, targets = randn(6, 9, dtype=np.float32), np.arange(6)
    moved = (np.round(z*64)/64 + 1e4).astype(np.float32)                   # Exact in float32
    (loss, cache), (loss_moved, cache_moved) = (cross_entropy_forward(a, targets) for a in (moved - np.float32(1e4), moved))
    check_close((loss_moved, cross_entropy_backward(cache_moved)), (loss, cross_entropy_backward(cache)), 1e-6)


@every
def test_nothing_is_changed_and_backward_can_be_repeated(name):
    forward, backward, inputs = pairs()[name]
    before = [a.copy() for a in inputs]
    y, cache = forward(*inputs)
    dy = randn(*y.shape)
    dy_before, y_before = dy.copy(), y.copy()
    first, second = flat(backward(dy, cache)), flat(backward(dy, cache))
    check_close(first, second, 0, 0)
    check_close([*inputs, dy, y], [*before, dy_before, y_before], 0, 0)
    for g in first: assert not any(np.shares_memory(g, a) for a in (*inputs, dy, *second))


@every
def test_memory_order_does_not_matter(name):
    forward, backward, inputs = pairs()[name]
    y, dy, grads = run(forward, backward, *inputs)
    strided = [np.asfortranarray(np.repeat(a, 2, -1))[..., ::2] for a in inputs]
    y2, _, grads2 = run(forward, backward, *strided)
    check_close([y2, *grads2], [y, *grads], 1e-12, 1e-14)


def peak_bytes(f, *args):
    tracemalloc.start()
    try: result = f(*args); return tracemalloc.get_traced_memory()[1], result
    finally: tracemalloc.stop()


def test_memory():
    "The most that is held is what comes out, plus little: no copies, no one-hot, no whole table, no product for each sequence."
    x, w, dy = randn(20, 50, 64, dtype=np.float32), randn(256, 64, dtype=np.float32), randn(20, 50, 256, dtype=np.float32)
    peak, (y, cache) = peak_bytes(linear_forward, x, w)
    assert peak < y.nbytes + 5000
    assert peak_bytes(linear_backward, dy, cache)[0] < x.nbytes + w.nbytes + 5000
    logits, targets = randn(1000, 1000, dtype=np.float32), np.arange(1000)
    peak, (_, cache) = peak_bytes(cross_entropy_forward, logits, targets)
    assert peak < 1.05*logits.nbytes and peak_bytes(cross_entropy_backward, cache)[0] < 1.05*logits.nbytes
    table = np.broadcast_to(np.float32(0), (10**9, 64))
    assert peak_bytes(embedding_backward, x, (np.arange(1000).reshape(20, 50)*10**6, table))[0] < 3*x.nbytes


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32])
def test_targets_of_any_whole_type(dtype):
    logits, targets = randn(3, 300), np.array([7, 255, 0])
    wanted, cache = cross_entropy_forward(logits, targets)
    loss, cache_of_type = cross_entropy_forward(logits, targets.astype(dtype))
    check_close((loss, cross_entropy_backward(cache_of_type)), (wanted, cross_entropy_backward(cache)), 0, 0)
    loss, cache = cross_entropy_forward(logits, targets.astype(dtype), ignore_index=255)
    check_close(loss, cross_entropy_forward(logits[[0, 2]], targets[[0, 2]])[0])
    assert not cross_entropy_backward(cache)[1].any()


# On another array module

@every
def test_strict_arrays_give_the_same(name):
    forward, backward, inputs = pairs(dtype=np.float32)[name]
    y, dy, grads = run(forward, backward, *inputs)
    def both(dy, *inputs): y, cache = forward(*inputs); return y, flat(backward(dy, cache))
    strict_array.ndarray.waits = 0
    check_close(on_strict(both)(np.asarray(dy), *inputs), (np.asarray(y), grads), 1e-6, 1e-7)
    if "entropy" in name or name == "embedding": assert strict_array.ndarray.waits <= 2    # The smallest and the largest id
    else: assert strict_array.ndarray.waits == 0


def test_strict_arrays_are_refused_beside_numpys():
    x, w = to_strict(randn(2, 3)), randn(4, 3)
    for f in (lambda: linear_forward(x, w), lambda: rmsnorm_forward(x, w[0]), lambda: layernorm_forward(x, to_strict(w[0]), w[0]),
              lambda: embedding_forward(to_strict(np.array([1])), w), lambda: cross_entropy_forward(x, np.array([1, 2]))):
        with expect_error(TypeError, "arrays of numpy and strict_array, expected all of one"): f()


def test_the_strict_module_refuses_what_cupy_refuses():
    a, n = to_strict(np.arange(4.)), np.arange(4.)
    for f in (lambda: np.exp(a), lambda: a + n, lambda: n + a, lambda: a[n.astype(int)], lambda: np.asarray(a), lambda: np.concatenate([a, a]),
              lambda: strict_array.where(n > 1, a, 0), lambda: strict_array.concatenate([a, n]), lambda: np.sum(a), lambda: range(a[0].astype(int)),
              lambda: a.__iadd__(n)):
        with pytest.raises(TypeError): f()
    with expect_error(AttributeError, "vectorize"): strict_array.vectorize
    with expect_error(AttributeError, "at"): strict_array.add.at
    with expect_error(ValueError, "names an element twice"): a[to_strict(np.array([1, 1]))] = 0
    with expect_error(TypeError, "a NumPy ndarray in the result"): to_numpy((a, n))
    a[to_strict(np.array([3, 1]))] += 1
    b = strict_array.exp(a, out=a)
    assert b is a and array_module(a) is strict_array and type(a.sum()) is strict_array.ndarray and (2/a).dtype == np.float64
    check_close(to_numpy(a), np.exp([0., 2., 2., 4.]))


def test_array_module():
    assert array_module(np.ones(1), None, np.float32(1)) is np
    for bad in (1., [1.], torch.ones(1)):
        with expect_error(TypeError, f"got {type(bad).__module__}.{type(bad).__qualname__}"): array_module(bad)
    with expect_error(TypeError, "no module"): array_module(None)


# Initial weights

@pytest.mark.parametrize("std", [.02, 1., 5.])
def test_truncated_normal(std):
    w = truncated_normal_np((1000, 500), std, np.random.default_rng(0))
    assert w.dtype == np.float32 and abs(w).max() <= 3*std*(1 + 1e-6) and abs(w).max() > 2.9*std
    check_close(float(w.std()), std*math.sqrt(.9733), rtol=.005)           # 1.2% less than if all beyond were moved to the edge
    check_close(float(w.mean()), 0., atol=.01*std)


def test_initial_weights():
    w = linear_init(300, 100, np.random.default_rng(0))
    assert w.shape == (100, 300) and w.dtype == np.float32
    check_close(float(w.var()), 2/400*.9733, rtol=.05)
    for dtype in (np.float16, np.float64): check_close(linear_init(300, 100, np.random.default_rng(0), dtype), w.astype(dtype), 0, 0)
    assert (linear_init(300, 100, np.random.default_rng(1)) != w).any()
    rng = np.random.default_rng(0)
    assert (linear_init(300, 100, rng) == w).all() and (linear_init(300, 100, rng) != w).any()
    assert truncated_normal_np(5, 1., rng).shape == (5,) and truncated_normal_np((), 1., rng).shape == ()


# What is refused

X, W, IDS = randn(2, 3), randn(4, 3), np.array([0, 3])
ROWS = dict(rows=np.array([0, 2]), shape=(4, 3))

@pytest.mark.parametrize("f, kind, words", [
    (lambda: linear_forward(X, W.T), ValueError, "weight (3, 4) does not fit x (2, 3), expected (out, 3)"),
    (lambda: linear_forward(X, W[0]), ValueError, "weight (3,) does not fit"),
    (lambda: linear_forward(np.array(1.), W), ValueError, "does not fit x ()"),
    (lambda: linear_forward(X, W, X[0]), ValueError, "linear: bias has shape (3,), expected (4,)"),
    (lambda: linear_forward(X, W.astype(np.float32)), TypeError, "arrays of float32, float64, expected one floating-point type"),
    (lambda: linear_forward(IDS, np.ones((2, 2), int)), TypeError, "arrays of int64"),
    (lambda: linear_forward(X.tolist(), W), TypeError, "got builtins.list"),
    (lambda: linear_backward(X, linear_forward(X, W)[1]), ValueError, "dy has shape (2, 3), expected (2, 4)"),
    (lambda: linear_backward(randn(2, 4, dtype=np.float32), linear_forward(X, W)[1]), TypeError, "dy is float32, expected float64"),
    (lambda: embedding_forward(np.array([0, 4]), W), IndexError, "id 4 is out of range, expected 0 to 3 for V = 4"),
    (lambda: embedding_forward(np.array([-2, 1]), W), IndexError, "id -2 is out of range"),
    (lambda: embedding_forward(np.array([70_000], np.uint32), W), IndexError, "id 70000"),
    (lambda: embedding_forward(np.array([1.]), W), TypeError, "ids are float64, expected whole numbers"),
    (lambda: embedding_forward(np.array([True]), W), TypeError, "ids are bool"),
    (lambda: embedding_forward(IDS, W[0]), ValueError, "embedding: weight has shape (3,), expected (V, D)"),
    (lambda: embedding_backward(X[0], embedding_forward(IDS, W)[1]), ValueError, "dy has shape (3,), expected (2, 3)"),
    (lambda: RowGradient(values=randn(3, 3), **ROWS), ValueError, "values has shape (3, 3), expected (2, 3)"),
    (lambda: rmsnorm_forward(X, W[:, 0]), ValueError, "rmsnorm: weight (4,) does not fit x (2, 3), expected (3,)"),
    (lambda: rmsnorm_forward(X, W), ValueError, "rmsnorm: weight (4, 3) does not fit"),
    (lambda: rmsnorm_forward(np.array(1.), np.array(1.)), ValueError, "x with a dimension"),
    (lambda: rmsnorm_forward(X, np.ones(3, int)), TypeError, "int64"),
    (lambda: rmsnorm_forward(np.ones((2, 3), int), X[0]), TypeError, "int64"),
    (lambda: rmsnorm_backward(X[:1], rmsnorm_forward(X, X[0])[1]), ValueError, "dy has shape (1, 3), expected (2, 3)"),
    (lambda: layernorm_forward(X, W[:, 0]), ValueError, "layernorm: weight (4,) does not fit x (2, 3), expected (3,)"),
    (lambda: layernorm_forward(X, X[0], np.ones(1)), ValueError, "layernorm: bias (1,) does not fit"),
    (lambda: layernorm_backward(X[:1], layernorm_forward(X, X[0])[1]), ValueError, "dy has shape (1, 3)"),
    (lambda: relu_backward(X[0], relu_forward(X)[1]), ValueError, "dy has shape (3,)"),
    (lambda: silu_backward(X[0], silu_forward(X)[1]), ValueError, "dy has shape (3,)"),
    (lambda: gelu_backward(X[0], gelu_forward(X)[1]), ValueError, "dy has shape (3,)"),
    (lambda: softmax_backward(X[0], softmax_forward(X)[1]), ValueError, "dy has shape (3,)"),
    (lambda: silu_forward(IDS), TypeError, "int64"),
    (lambda: gelu_forward(X, "erf"), ValueError, "unknown approximation of gelu 'erf'"),
    (lambda: ffn_forward(X, {}, "swigul"), ValueError, "did you mean 'swiglu'?"),
    (lambda: ffn_forward(X, {"w1.weight": W}, "swiglu"), ValueError, "swiglu: w2.weight is missing, w3.weight is missing"),
    (lambda: ffn_forward(X, {f"w{i}.weight": W for i in (1, 2, 3, 4)}, "gelu"), ValueError, "gelu: w3.weight does not belong, w4.weight does not"),
    (lambda: ffn_forward(X, {"w1.weight": W, "w2.weight": W}, "gelu"), ValueError, "weight (4, 3) does not fit x (2, 4)"),
    (lambda: ffn_forward(X, {"w1.weight": W, "w2.weight": W.T, "w3.weight": W[:1]}), ValueError, "w3.weight (1, 3) does not fit w1.weight (4, 3)"),
    (lambda: ffn_forward(X, {"w1.weight": W[:1], "w2.weight": W.T, "w3.weight": W}), ValueError, "w3.weight (4, 3) does not fit w1.weight (1, 3)"),
    (lambda: cross_entropy_forward(X, np.array([[0, 1]])), ValueError, "targets (1, 2) don't fit logits (2, 3), expected (2,)"),
    (lambda: cross_entropy_forward(X, np.array([0, 3])), IndexError, "target 3 is out of range, expected 0 to 2 for V = 3"),
    (lambda: cross_entropy_forward(X, np.array([0, -100]), ignore_index=-1), IndexError, "target -100"),
    (lambda: cross_entropy_forward(X, np.array([0., 1.])), TypeError, "targets are float64"),
    (lambda: cross_entropy_forward(X, np.array([0, 1]), z_loss=-.1), ValueError, "z_loss = -0.1, expected 0 or more"),
    (lambda: cross_entropy_forward(X, np.array([0, 1]), z_loss=math.nan), ValueError, "z_loss = nan"),
    (lambda: cross_entropy_forward(np.array(1.), np.array(0)), ValueError, "logits is one number"),
    (lambda: cross_entropy_forward(np.ones((2, 3), int), np.array([0, 1])), TypeError, "int64"),
    (lambda: truncated_normal_np((2, 2), 1., 0), TypeError, "rng is a int"),
    (lambda: truncated_normal_np((2, 2), -1., np.random.default_rng(0)), ValueError, "std = -1.0, expected 0 or more"),
    (lambda: truncated_normal_np((2, 2), 1., np.random.default_rng(0), np.int64), TypeError, "dtype is int64, expected a floating-point type"),
    (lambda: relu_forward(IDS), TypeError, "int64"),
    (lambda: at_least_float32_np(IDS), TypeError, "an array of int64"),
])
def test_bad_input(f, kind, words):
    with expect_error(kind, words): f()
