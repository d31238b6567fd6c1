"The checks pass what is equal and fail on each way of being different."
import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from lmcourse.tools.checks import check_close, expect_error, gradcheck

FLOATS = arrays(np.float64, array_shapes(max_dims=3, max_side=4), elements=st.floats(-1e6, 1e6))


@settings(deadline=None, derandomize=True, max_examples=60)
@given(FLOATS, st.data())
def test_one_changed_element_is_found_and_named(a, data):
    check_close(a, a.copy())
    at = data.draw(st.tuples(*(st.integers(0, n - 1) for n in a.shape)))
    b = a.copy()
    b[at] += 1e-3 + 1e-4*abs(b[at])
    with pytest.raises(AssertionError) as e: check_close(b, a)
    assert f"element {at}" in str(e.value)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(FLOATS, st.data())
def test_nothing_is_broadcast(a, data):
    "Every array that broadcasts with `a` to other shapes, or to its own from a smaller one, is refused"
    b = data.draw(st.sampled_from([a[None], a.mean(keepdims=True) if a.size > 1 else a[..., None], a[..., None], a[()][..., :0], np.float64(a.flat[0])]))
    for pair in ((a, b), (b, a)):
        with pytest.raises(AssertionError, match="shape"): check_close(*pair)


@pytest.mark.parametrize("a, b", [
    (np.float32([1]), np.float64([1])), (np.int32([1]), np.int64([1])), (np.array([True]), np.array([1])), (1, 1.0), (True, 1), (np.float32(1), 1),
    (math.nan, math.nan), (math.inf, -math.inf), (1.0, math.inf), (math.inf, 1.0), (2**60, 2**60 + 1), (np.uint8([0]), np.uint8([255])),
    ([1.0], np.ones(1)), ({"a": 1}, {"b": 1}), ({"a": 1}, {}), ([1], []), ((1, (2.0, [3.0])), (1, (2.0, [3.1]))), (None, 0), ("a", "b"), ("1", 1), ({}, [])], ids=str)
def test_different(a, b):
    with pytest.raises(AssertionError): check_close(a, b)
    with pytest.raises(AssertionError): check_close(b, a)


@pytest.mark.parametrize("a, b", [
    (1.0, 1.0 + 1e-6), (np.float32(0.1), 0.1), (-math.inf, -math.inf), ([None, "x", {"k": (1, 2.0)}], (None, "x", {"k": [1, 2.0]})),
    (np.zeros((0, 3)), np.zeros((0, 3))), (2**70, 2**70), (np.array(1 + 1j), np.array(1 + 1j))], ids=str)
def test_equal(a, b): check_close(a, b); check_close(b, a)


def test_tolerance_is_relative_to_the_expected_value():
    check_close(110.0, 100.0, rtol=0.1, atol=0)
    with pytest.raises(AssertionError): check_close(110.1, 100.0, rtol=0.1, atol=0)
    check_close(0.5, 0.0, rtol=0, atol=0.5)
    with pytest.raises(AssertionError, match=r"\(1,\).*2 of 3"): check_close(np.array([1., 9., 3.]), np.array([1., 2., 4.]))


def test_tensors():
    torch = pytest.importorskip("torch")
    w = torch.ones(2, 3, requires_grad=True)
    check_close(w, np.ones((2, 3), "float32"))
    check_close(torch.tensor([1/3], dtype=torch.bfloat16), torch.tensor([1/3], dtype=torch.bfloat16))
    check_close(torch.tensor(2.0), 2.0)
    for other in (torch.ones(3), torch.ones(2, 3).double(), torch.ones(2, 3).bfloat16(), torch.ones(2, 3)*1.001):
        with pytest.raises(AssertionError): check_close(w, other)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_gradcheck_accepts_the_gradient_and_names_the_wrong_element(number):
    rng = np.random.default_rng(number)
    xs = tuple(rng.normal(size=s) for s in ((2, 3), (3,), ())[:number])
    saved = [x.copy() for x in xs]
    f = lambda *xs: sum(np.sin(x).sum()*(i + 1) for i, x in enumerate(xs))
    grads = [np.asarray((i + 1)*np.cos(x)) for i, x in enumerate(xs)]
    gradcheck(f, xs if number > 1 else xs[0], grads if number > 1 else grads[0])
    gradcheck(lambda *xs: float(f(*xs)), xs, grads)                        # a Python number
    for i, g in enumerate(grads):
        at = tuple(n - 1 for n in g.shape)
        wrong = [h.copy() for h in grads]
        wrong[i][at] += 1e-3
        with pytest.raises(AssertionError) as e: gradcheck(f, xs, wrong)
        assert f"input {i}, element {at}: analytic" in str(e.value)
        wrong[i][at] = np.nan
        with pytest.raises(AssertionError, match="analytic nan"): gradcheck(f, xs, wrong)
    for x, s in zip(xs, saved): np.testing.assert_array_equal(x, s)


def test_gradcheck_leaves_arrays_alone_when_f_writes_or_fails():
    x = np.arange(3.0)
    def f(x): x *= 2; return x.sum()
    gradcheck(f, x, np.full(3, 2.0))
    def g(x): raise RuntimeError("half-way")
    with pytest.raises(RuntimeError): gradcheck(g, x, x)
    np.testing.assert_array_equal(x, np.arange(3.0))


@pytest.mark.parametrize("inputs, grads, f, words", [
    (np.ones(2, "float32"), np.ones(2), np.sum, "float64"), ([1.0, 2.0], np.ones(2), np.sum, "inputs"), (np.ones(2), (np.ones(2), np.ones(2)), np.sum, "1 inputs"),
    (np.ones(2), np.ones(2), lambda x: x, "one number"), (np.ones(2), np.ones(2), lambda x: np.float32(x.sum()), "float32")])
def test_gradcheck_refuses(inputs, grads, f, words):
    with pytest.raises(ValueError, match=words): gradcheck(f, inputs, grads)


def test_expect_error_can_fail():
    with expect_error(LookupError, "b"): {"a": 1}["b"]                     # a subclass will do
    with pytest.raises(AssertionError, match="no ValueError"):
        with expect_error(ValueError): pass
    with pytest.raises(AssertionError, match="without 'x' in its message"):
        with expect_error(ValueError, "x"): raise ValueError("y")
    with pytest.raises(KeyError):
        with expect_error(ValueError): {}[0]
    with pytest.raises(AssertionError, match="no AssertionError"):
        with expect_error(AssertionError): pass
