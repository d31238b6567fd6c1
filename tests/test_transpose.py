"Transposed copies, and work on torch's threads: equal to torch's to the last bit, whatever the sizes, strides and threads."
import threading
import time

import pytest

torch = pytest.importorskip("torch")

from lmcourse.architecture import onednn, transpose
from lmcourse.architecture.onednn import OneDNNLinear
from lmcourse.architecture.layers_torch import Linear, linears
from lmcourse.architecture.transpose import transposed
from lmcourse.tools.checks import check_close, expect_error
from lmcourse.tools.machine import compiles

needs_onednn = pytest.mark.skipif(not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this torch has no oneDNN")


def drawn(*shape, seed=0): return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("shape", [(1, 1), (16, 16), (15, 33), (40, 5), (1, 700), (700, 1), (1024, 512), (999, 333)])
def test_a_transposed_copy(shape, n, threads, monkeypatch):
    threads(n)
    (R, C), wide = shape, drawn(shape[0], shape[1] + 5)
    if compiles(): monkeypatch.setattr(transpose, "transpose_rows", rows := Counted(transpose.transpose_rows))
    for x in (wide[:, :C].contiguous(), wide[:, :C], wide[:, 5:], wide[:, :C].T.contiguous().T):
        y = transposed(x)
        assert y.is_contiguous() and torch.equal(y, x.T) and y.shape == (C, R)
    if compiles() and R*C >= transpose.SHARED and n > 1: assert rows.calls >= 2*n


class Counted:
    def __init__(self, f): self.f, self.calls = f, 0
    def __call__(self, *args):
        self.calls += 1
        return self.f(*args)


def test_what_is_left_to_torch():
    x = drawn(40, 24)
    for odd in (x.double(), x.half(), x[:, ::2], x[::2], x[:0], x[:, :0], x.requires_grad_(), x.T, x.to(torch.int64)):
        y = transposed(odd)
        assert torch.equal(y, odd.T) and y.is_contiguous() and y.dtype == odd.dtype
    assert transposed(torch.empty(3, 5, device="meta")).shape == (5, 3)


@pytest.fixture(params=[False, True], autouse=True)
def halves(request, monkeypatch):
    "A processor on which every product gains, and one on which only large ones do"
    monkeypatch.setattr(onednn, "_HALVES", request.param)
    monkeypatch.setattr(onednn, "_SMALLEST", 2*24*40*20)
    return request.param


@needs_onednn
def test_small_and_transposed_products_stay_with_torch_where_little_is_gained(halves, monkeypatch):
    small, large = drawn(8, 24), drawn(40, 24)
    def called(layer, x):
        with torch.profiler.profile() as record: layer(x.requires_grad_()).square().sum().backward()
        return sum("_linear_pointwise" in e.name for e in record.events())
    layer = OneDNNLinear(24, 40)
    assert [called(layer, x) for x in (small, large)] == ([0, 2] if halves else [3, 3])
    monkeypatch.undo()                                          # As on this machine
    assert onednn._pays(large, large.T) in (True, False)
    assert len(torch._dynamo.explain(layer)(large.detach().requires_grad_()).graphs) == 1, "the compiler looks into what is asked"
    total, a, b = drawn(8, 3), drawn(5, 8).T, drawn(5, 3)
    right = total + a@b
    onednn.add_product(total, a, b)
    check_close(total, right, 1e-5, 1e-5)


@needs_onednn
@pytest.mark.parametrize("sizes", [(64, 48, 80), (17, 5, 3), (1, 1, 1), (300, 16, 700), (16, 300, 2), (3, 700, 300)])
def test_products_of_transposed_factors(sizes):
    M, K, N = sizes
    a, b, wide = drawn(M, K, seed=1), drawn(K, N, seed=2), drawn(K, 3*M, seed=3)
    right = a.double()@b.double()
    for first in (a, a.T.contiguous().T):
        for second in (b, b.T.contiguous().T): check_close(onednn._mm(first, second), right.float(), 1e-4, 1e-4)
    gaps = wide[:, M:2*M].T                                     # Rows of a transposed matrix, as of the logits' gradient
    check_close(onednn._mm(gaps, b), (gaps.double()@b.double()).float(), 1e-4, 1e-4)
    assert onednn._mm(a.T.contiguous().T, b).is_contiguous()


def test_work_is_shared_out(threads):
    threads(3)
    names, result = [], []
    def part(i, j):
        names.append(threading.get_native_id())
        time.sleep(.02)                                         # so that each thread gets a part
        return i, j
    for _ in range(3): result.append(transpose.share(part, 10, transpose.SHARED))
    assert result == [[(0, 3), (3, 6), (6, 10)]]*3 and len(names) == 9
    if transpose.torch_threads(): assert len(set(names)) == 3 and threading.get_native_id() in names   # torch's own, the same each time
    assert transpose.share(part, 10, transpose.SHARED - 1) == [(0, 10)] and transpose.share(part, 2, transpose.SHARED) == [(0, 1), (1, 2)]
    assert transpose.share(part, 1, transpose.SHARED) == [(0, 1)]


def test_an_error_on_another_thread_is_raised(threads):
    threads(2)
    def part(i, j):
        time.sleep(.02)
        if i: raise ValueError(f"part from {i}")
    with expect_error(ValueError, "part from 5"): transpose.share(part, 10, transpose.SHARED)
    def stopped(i, j): raise KeyboardInterrupt                  # As Ctrl-C in a notebook does, in the main thread
    with pytest.raises(KeyboardInterrupt): transpose.share(stopped, 10, transpose.SHARED)
    assert transpose.share(lambda i, j: j, 10, transpose.SHARED) == [5, 10]


def test_without_openmp_one_thread_does_it(threads, monkeypatch):
    threads(2)
    monkeypatch.setattr(transpose, "threadpool_info", lambda: [dict(user_api="blas", filepath="nowhere")])
    assert transpose.torch_threads.__wrapped__() is None
    monkeypatch.setattr(transpose, "torch_threads", lambda: None)
    assert transpose.share(lambda i, j: (i, j), 10, transpose.SHARED) == [(0, 10)]


def test_fewer_threads_than_parts_do_all_of_them(threads, monkeypatch):
    "OpenMP may grant fewer threads than asked for."
    threads(3)
    monkeypatch.setattr(transpose, "torch_threads", lambda: lambda f, data, n, flags: f(None))
    assert transpose.share(lambda i, j: (i, j), 10, transpose.SHARED) == [(0, 3), (3, 6), (6, 10)]


def three(kind, frozen=(), bias=False):
    layers = [kind(24, n, bias=bias and not i) for i, n in enumerate((16, 40, 8))]
    for i, layer in enumerate(layers):
        layer.weight.data = drawn(*layer.weight.shape, seed=i)
        layer.weight.requires_grad_(i not in frozen)
    return layers


@needs_onednn
@pytest.mark.parametrize("shape", [(24,), (5, 24), (2, 3, 24), (0, 24), (40, 32, 24)])
def test_layers_of_one_input(shape, monkeypatch):
    made = []
    monkeypatch.setattr(onednn._Joint, "apply", lambda *inputs, apply=onednn._Joint.apply: (made.append(len(inputs)), apply(*inputs))[1])
    found, x = [], drawn(*shape, seed=9)
    for kind in (Linear, OneDNNLinear):
        leaf, layers = x.clone().requires_grad_(), three(kind)
        ys = linears(leaf, *layers)
        assert [y.shape for y in ys] == [(*shape[:-1], n) for n in (16, 40, 8)]
        loss = sum((y.square()*(i + 1)).sum() for i, y in enumerate(ys))/max(1, x.numel())
        found.append([*(y.detach() for y in ys), *torch.autograd.grad(loss, [leaf, *(layer.weight for layer in layers)])])
    check_close(found[1], found[0], 1e-4, 1e-4)
    assert made == ([4] if x.numel() else [])
    leaf, layers = x.clone().requires_grad_(), three(OneDNNLinear)     # One of the outputs isn't used
    check_close(torch.autograd.grad(linears(leaf, *layers)[1].sum(), leaf)[0], (torch.ones(*shape[:-1], 40)@layers[1].weight).detach(), 1e-4, 1e-4)


@needs_onednn
def test_layers_that_are_watched_frozen_or_of_another_kind_are_called(monkeypatch):
    monkeypatch.setattr(onednn._Joint, "apply", lambda *_: pytest.fail("joint"))
    x, seen = drawn(3, 24).requires_grad_(), []
    def right(layers, x=x): check_close(linears(x, *layers), [layer(x) for layer in layers], 0, 0)
    watched = three(OneDNNLinear)
    for register in (watched[2].register_forward_hook, watched[2].register_forward_pre_hook, watched[2].register_full_backward_hook):
        hook = register(lambda *_: seen.append(_))
        linears(x, *watched)[2].sum().backward()
        hook.remove()
    assert len(seen) == 3
    right(three(OneDNNLinear, frozen=[1]))
    right(three(OneDNNLinear, bias=True))
    right([*three(OneDNNLinear)[:2], three(Linear)[2]])
    right([three(Linear)[0], *three(OneDNNLinear)[1:]])
    right(three(OneDNNLinear), x.detach())
    with torch.no_grad(): right(three(OneDNNLinear))
    right([layer.double() for layer in three(OneDNNLinear)], x.double())
    with torch.autocast("cpu", torch.bfloat16): assert linears(x, *three(OneDNNLinear))[0].dtype == torch.bfloat16
    layers = three(OneDNNLinear)
    compiled = torch.compile(lambda x: linears(x, *layers), backend="aot_eager", fullgraph=True)
    check_close(compiled(x), [layer(x) for layer in layers], 1e-5, 1e-5)


@needs_onednn
def test_products_of_one_input_are_counted():
    from lmcourse.accounting.flops import flop_counter
    counts = []
    for kind in (Linear, OneDNNLinear):
        with flop_counter() as counter: sum(y.sum() for y in linears(drawn(5, 24).requires_grad_(), *three(kind))).backward()
        counts.append(counter.get_total_flops())
    assert counts == [3*2*5*24*(16 + 40 + 8)]*2
