"""A stand-in for CuPy where there is no GPU: arrays that NumPy's own functions refuse, and a module with functions that CuPy has.

Code that runs here asks an array for its module and calls that one. Refused with `TypeError`: NumPy functions on these arrays, and NumPy
arrays beside them. Not there: what CuPy lacks. As in CuPy, every result is an array, sums of everything too. An assignment that names
an element twice is refused, because a GPU keeps any one of the values. `ndarray.waits` counts looks at a number itself, for which a
program waits for its GPU.

    on_strict(f)(x, params)    # f with strict arrays for NumPy's, and the result back in NumPy's
"""
import dataclasses
import operator
import sys
from functools import wraps
from types import SimpleNamespace

import numpy as np
import scipy.special

# All are in CuPy 14.
FUNCTIONS = """abs absolute add all allclose amax amin any append arange argmax argmin argsort array array_equal asarray ascontiguousarray atleast_1d
    atleast_2d bincount bitwise_and bitwise_or broadcast_arrays broadcast_to ceil clip column_stack concatenate copy copyto cos cosh count_nonzero cumprod
    cumsum diag diff digitize divide dot dstack einsum empty empty_like equal exp exp2 expand_dims expm1 eye flatnonzero flip floor floor_divide full
    full_like greater greater_equal hstack identity inner interp isclose isfinite isin isinf isnan kron less less_equal linspace log log10 log1p log2
    logaddexp logical_and logical_not logical_or logical_xor matmul max maximum mean meshgrid min minimum mod moveaxis multiply nan_to_num negative
    nonzero not_equal ones ones_like outer pad partition power prod ravel reciprocal remainder repeat reshape result_type rint roll round searchsorted
    shape sign sin sinh sort split sqrt square squeeze stack std subtract sum swapaxes take take_along_axis tan tanh tensordot tile trace transpose tri tril
    tril_indices triu triu_indices true_divide unique unravel_index vdot vstack where zeros zeros_like""".split()
METHODS = """all any argmax argmin argsort astype clip copy cumprod cumsum diagonal dot fill flatten max mean min nonzero prod ravel repeat reshape round
    searchsorted sort squeeze std sum swapaxes take trace transpose var view""".split()
PLAIN = "shape dtype ndim size itemsize nbytes strides flags".split()  # Not arrays themselves
CONSTANTS = """bool_ e float16 float32 float64 floating inf int8 int16 int32 int64 integer intp nan newaxis pi uint8 uint16 uint32 uint64""".split()
OPERATORS = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split()


class ndarray:
    "An array that only meets its own kind, and Python's and NumPy's single numbers."
    __slots__ = "_a",
    __array_ufunc__ = __hash__ = None
    waits = 0

    def __array__(self, *args, **kwargs): raise TypeError("implicit conversion to a NumPy array; CuPy wants .get() or asnumpy")
    def __array_function__(self, function, *args): raise TypeError(f"numpy.{function.__name__} on an array of another module")
    def __getitem__(self, key): return _wrap(self._a[_unwrap(key)])
    def __setitem__(self, key, value):
        cells = np.arange(self._a.size).reshape(self._a.shape)[_unwrap(key)]
        if np.unique(cells).size < cells.size: raise ValueError("an assignment that names an element twice; on a GPU any one of them wins")
        self._a[_unwrap(key)] = _unwrap(value)
    def __len__(self): return len(self._a)
    def __iter__(self): return (self[i] for i in range(len(self)))
    def __repr__(self): return f"strict {self._a!r}"
    def __neg__(self): return _wrap(-self._a)
    def __abs__(self): return _wrap(abs(self._a))
    def __invert__(self): return _wrap(~self._a)
    def __bool__(self): return bool(self.get())
    def __int__(self): return int(self.get())
    def __float__(self): return float(self.get())
    def item(self): return self.get().item()
    def tolist(self): return self.get().tolist()
    def get(self):
        "A copy as a NumPy array."
        ndarray.waits += 1
        return self._a.copy()
    @property
    def T(self): return _wrap(self._a.T)
    @property
    def base(self): return _wrap(self._a.base)


def asnumpy(a): return a.get()

def _wrap(result):
    if isinstance(result, (tuple, list)): return type(result)(map(_wrap, result)) if type(result) in (tuple, list) else tuple(map(_wrap, result))
    if not isinstance(result, (np.ndarray, np.generic)): return result
    new = object.__new__(ndarray)
    new._a = np.asarray(result)
    return new

def _unwrap(value):
    if isinstance(value, ndarray): return value._a
    if isinstance(value, np.ndarray): raise TypeError("a NumPy array among arrays of another module")
    if isinstance(value, dict): return {k: _unwrap(v) for k, v in value.items()}
    return type(value)(map(_unwrap, value)) if type(value) in (tuple, list) else value

def _strict(f): # `f` of NumPy for these arrays; a result that was asked for with `out=` is that very array
    @wraps(f)
    def call(*args, **kwargs):
        result = f(*_unwrap(args), **_unwrap(kwargs))
        return kwargs["out"] if kwargs.get("out") is not None else _wrap(result)
    return call

def _in_place(f):
    def call(self, other): f(self._a, _unwrap(other)); return self
    return call

def _fill():
    for name in FUNCTIONS: globals()[name] = _strict(getattr(np, name))
    for name in ("array", "asarray"): # These two may be given a NumPy array: it is moved to the GPU on purpose
        globals()[name] = lambda a, dtype=None, f=getattr(np, name): _wrap(f(a._a if isinstance(a, ndarray) else a, dtype))
    for name in METHODS: setattr(ndarray, name, _strict(getattr(np.ndarray, name)))
    for name in PLAIN: setattr(ndarray, name, property(lambda self, name=name: getattr(self._a, name)))
    for name in CONSTANTS: globals()[name] = getattr(np, name)
    for name in OPERATORS:
        f = getattr(operator, f"__{name}__")
        setattr(ndarray, f"__{name}__", _strict(f))
        setattr(ndarray, f"__r{name}__", _strict(lambda a, b, f=f: f(b, a)))
        setattr(ndarray, f"__i{name}__", _in_place(getattr(operator, f"__i{name}__")))
    for name in "eq ne lt le gt ge".split(): setattr(ndarray, f"__{name}__", _strict(getattr(operator, name)))

_fill()
sys.modules.setdefault("cupyx.scipy.special", SimpleNamespace(ndtr=_strict(scipy.special.ndtr)))


def _convert(tree, leaf):
    if isinstance(tree, dict): return {k: _convert(v, leaf) for k, v in tree.items()}
    if type(tree) in (tuple, list): return type(tree)(_convert(v, leaf) for v in tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return dataclasses.replace(tree, **{f.name: _convert(getattr(tree, f.name), leaf) for f in dataclasses.fields(tree) if f.init})
    return leaf(tree)

def to_strict(tree):
    "The tree of tuples, lists, dicts and dataclasses with strict arrays for NumPy's."
    return _convert(tree, lambda a: _wrap(a.copy()) if isinstance(a, np.ndarray) else a)

def to_numpy(tree):
    "The tree with NumPy arrays for strict ones. `TypeError` if one of NumPy's is in it: something left the module."
    def leaf(a):
        if isinstance(a, (np.ndarray, np.generic)): raise TypeError(f"a NumPy {type(a).__name__} in the result")
        return a._a.copy() if isinstance(a, ndarray) else a
    return _convert(tree, leaf)

def on_strict(f):
    "`f` with strict arrays for NumPy's among its arguments, and its result back in NumPy's."
    return lambda *args, **kwargs: to_numpy(f(*to_strict(args), **to_strict(kwargs)))
