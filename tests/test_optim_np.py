"NumPy's AdamW beside torch's and beside its own formula, for dense gradients and for rows."
import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import strict_array
from lmcourse.architecture.layers_np import RowGradient
from lmcourse.tools.checks import check_close, expect_error
from lmcourse.training.optim_np import AdamWNp, adamw_step_np, clip_scale, grad_norm_np

torch = pytest.importorskip("torch")


def rows_of(rng, V, D, dtype=np.float32):
    rows = np.sort(rng.choice(V, rng.integers(0, V + 1), replace=False))
    return RowGradient(rows, rng.standard_normal((len(rows), D)).astype(dtype), (V, D))

@settings(max_examples=40, deadline=None)
@given(V=st.integers(1, 9), D=st.integers(1, 9), seed=st.integers(0, 99), b1=st.sampled_from([0., .9]), b2=st.sampled_from([.9, .999]),
       decay=st.sampled_from([0., .3]), scale=st.sampled_from([1., .5]), double=st.booleans())
def test_equals_torch(V, D, seed, b1, b2, decay, scale, double):
    rng, dtype = np.random.default_rng(seed), np.float64 if double else np.float32
    draw = lambda *shape: rng.standard_normal(shape).astype(dtype)
    params = dict(matrix=draw(V, D), vector=draw(D), table=draw(V, D), still=draw(2, 2))
    twin = {name: torch.nn.Parameter(torch.from_numpy(p.copy())) for name, p in params.items()}
    groups = [dict(params=[twin["matrix"], twin["table"], twin["still"]]), dict(params=[twin["vector"]], weight_decay=0.)]
    ours = AdamWNp(params, (b1, b2), 1e-8, decay)
    theirs = torch.optim.AdamW(groups, lr=.01, betas=(b1, b2), eps=1e-8, weight_decay=decay)
    for _ in range(4):
        grads = dict(matrix=draw(V, D), vector=draw(D), table=rows_of(rng, V, D, dtype))
        ours.step(grads, .01, scale)
        for name, g in grads.items(): twin[name].grad = torch.from_numpy(scale*(g.dense() if isinstance(g, RowGradient) else g))
        theirs.step()
    check_close(params, {name: p.detach().numpy() for name, p in twin.items()}, rtol=1e-5, atol=2e-6 if not double else 1e-9)

def test_there_is_no_step_before_the_first():
    for t in (0, -1):
        with pytest.raises(ValueError, match=f"adamw_step_np: t = {t}, expected 1 or more"): adamw_step_np(*np.ones((4, 2)), t, .1)

@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0)])
def test_an_array_without_elements_has_nothing_to_learn(shape):
    params = dict(empty=np.zeros(shape, np.float32), full=np.ones(2, np.float32))
    for g in [np.zeros(shape, np.float32)] + [RowGradient(np.arange(0), np.zeros((0, *shape[1:]), np.float32), shape)]*(len(shape) > 1):
        AdamWNp(params).step(dict(empty=g, full=np.ones(2, np.float32)), .1)
    assert params["full"].max() < 1

@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_first_gradient_that_comes_late_makes_a_first_step(dtype):
    params = dict(always=np.ones((2, 2), dtype), late=np.ones((2, 2), dtype))
    twin = {name: torch.nn.Parameter(torch.from_numpy(p.copy())) for name, p in params.items()}
    ours, theirs = AdamWNp(params, weight_decay=0.), torch.optim.AdamW(twin.values(), lr=.1, weight_decay=0.)
    for step in range(12):
        grads = {name: np.ones((2, 2), dtype) for name in params if name == "always" or step >= 9}
        ours.step(grads, .1)
        for name, g in grads.items(): twin[name].grad = torch.from_numpy(g)
        theirs.step()
    check_close(params, {name: p.detach().numpy() for name, p in twin.items()}, rtol=1e-5, atol=1e-6)

def test_rows_are_the_dense_gradient_to_the_bit():
    rng = np.random.default_rng(0)
    start = rng.standard_normal((50, 8), dtype=np.float32)
    by_rows, dense = dict(p=start.copy()), dict(p=start.copy())
    one, other = AdamWNp(by_rows), AdamWNp(dense)
    for _ in range(5):
        g = rows_of(rng, 50, 8)
        one.step(dict(p=g), .1)
        other.step(dict(p=g.dense()), .1)
    check_close(by_rows, dense, 0, 0)

LAYOUTS = dict(matrix=lambda d: d(4, 3), fortran=lambda d: np.asfortranarray(d(4, 3)), strided=lambda d: d(4, 6)[:, ::2], vector=lambda d: d(5), every_other=lambda d: d(8)[::2],
               three=lambda d: d(2, 3, 4), turned=lambda d: d(4, 3, 2).T, number=lambda d: d(1)[0:1].reshape(()))

@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("betas", ((.9, .999), (.999, .99999)))
def test_every_layout_moves_by_the_formula(layout, betas):
    rng = np.random.default_rng(0)
    p = LAYOUTS[layout](lambda *shape: rng.standard_normal(shape, dtype=np.float32))
    exact, m, v, params = p.astype(np.float64), 0, 0, dict(p=p)
    optimizer = AdamWNp(params, betas)
    for t in range(1, 4):
        g = rng.standard_normal(p.shape, dtype=np.float32)
        optimizer.step(dict(p=g), .1)
        exact, m, v = adamw_step_np(exact, g.astype(np.float64), m, v, t, .1, betas, 1e-8, .01 if p.ndim > 1 else 0.)
    assert params["p"] is p
    check_close(p, exact.astype(np.float32), rtol=1e-5, atol=2e-6)

@pytest.mark.parametrize("shape", ((7, 3), (7,), (7, 2, 3)))
def test_rows_of_any_shape(shape):
    rng = np.random.default_rng(0)
    start, values = rng.standard_normal(shape, dtype=np.float32), rng.standard_normal((2, *shape[1:]), dtype=np.float32)
    g = RowGradient(np.array([2, 5]), values, shape)
    by_rows, dense = dict(p=start.copy()), dict(p=start.copy())
    AdamWNp(by_rows).step(dict(p=g), .1)
    AdamWNp(dense).step(dict(p=g.dense()), .1)
    check_close(by_rows, dense, 0, 0)

@pytest.mark.parametrize("dtype", (np.float32, np.float64))
def test_a_scale_is_that_of_the_gradients(dtype): # One that never changes would cancel between the two means
    rng = np.random.default_rng(0)
    start = rng.standard_normal((5, 3)).astype(dtype)
    by_scale, by_hand = dict(p=start.copy()), dict(p=start.copy())
    one, other = AdamWNp(by_scale), AdamWNp(by_hand)
    for scale in (1., .1, 3.):
        g = rng.standard_normal((5, 3)).astype(dtype)
        one.step(dict(p=g), .1, scale)
        other.step(dict(p=g*dtype(scale)), .1)
    check_close(by_scale, by_hand, 1e-6, 1e-6)
    assert abs(by_scale["p"] - start).max() > .1

def test_a_lazy_optimizer_is_noticed(): # One that leaves rows without a gradient alone is another one
    p = dict(p=np.ones((3, 2), np.float32))
    optimizer = AdamWNp(p, weight_decay=0)
    optimizer.step(dict(p=np.ones((3, 2), np.float32)), .1)
    before = p["p"].copy()
    optimizer.step(dict(p=RowGradient(np.array([1]), np.ones((1, 2), np.float32), (3, 2))), .1)
    assert (p["p"] != before).all()

def test_other_arrays_take_the_formula():
    rng = np.random.default_rng(0)
    def run(p, g):
        params = dict(p=p.copy())
        optimizer = AdamWNp(params, weight_decay=.1)
        optimizer.m, optimizer.v = dict(p=p*0), dict(p=p*0)
        for _ in range(3): optimizer.step(dict(p=g), .01)
        return params["p"]
    p, g = rng.standard_normal((2, 4, 3)).astype(np.float32)
    check_close(strict_array.on_strict(run)(p, g), run(p, g), rtol=1e-5, atol=1e-7)

def test_arguments_of_the_formula_stay():
    arrays = [np.full(3, v) for v in (1., 2., 3., 4.)]
    adamw_step_np(*arrays, 1, .1)
    check_close(arrays, [np.full(3, v) for v in (1., 2., 3., 4.)], 0, 0)

def test_length_and_clipping():
    rng = np.random.default_rng(0)
    grads = dict(a=rng.standard_normal((5, 4)), b=rows_of(rng, 9, 4, np.float64), c=rng.standard_normal(3))
    dense = [g.dense() if isinstance(g, RowGradient) else g for g in grads.values()]
    norm = math.sqrt(sum((g**2).sum() for g in dense))
    check_close(grad_norm_np(grads), norm)
    check_close(clip_scale(norm, norm/2), .5, rtol=1e-5)
    assert clip_scale(norm, 2*norm) == 1 and clip_scale(0., 1.) == 1
    assert clip_scale(math.nan, 1.) == clip_scale(math.inf, 1.) == 1    # Such a step must not be made; the gradients stay as they are
    for bad in (0, -1, math.nan):
        with expect_error(ValueError, "expected more than 0"): clip_scale(1., bad)

def test_bad_gradients_move_nothing():
    params = dict(p=np.ones((3, 2), np.float32))
    optimizer = AdamWNp(params)
    for bad, words in ((dict(q=params["p"]), "'q', which is no parameter"), (dict(p=np.ones((2, 3), np.float32)), "(2, 3), expected (3, 2)")):
        with expect_error(ValueError, words): optimizer.step({"p": params["p"]} | bad, .1)
    assert optimizer.t == dict(p=0) and (params["p"] == 1).all()
    for numbers, words in ((dict(betas=(1., .9)), "betas"), (dict(eps=-1.), "eps"), (dict(weight_decay=-1.), "weight_decay")):
        with expect_error(ValueError, words): AdamWNp(params, **numbers)
    for dtype in (np.float16, np.int64):
        with expect_error(TypeError, "q is"): AdamWNp(params | dict(q=np.ones(3, dtype)))
