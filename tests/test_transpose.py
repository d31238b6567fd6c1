"Transposed copies, and work on torch's threads: equal to torch's to the last bit, whatever the sizes, strides and threads."
import ctypes

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from lmcourse.architecture import onednn, transpose
from lmcourse.architecture.fused import FusedFeedForward
from lmcourse.architecture.onednn import FusedLinear, OneDNNLinear
from lmcourse.architecture.layers_torch import Linear, linears
from lmcourse.architecture.transpose import on_threads, threads_for, transposed
from lmcourse.tools.checks import check_close
from lmcourse.tools.compiled import add_one, give_way, kernel, peek, quick
from lmcourse.tools.machine import compiles

needs_compiler = pytest.mark.skipif(not compiles(), reason="nothing is compiled here")
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
    asked = []
    monkeypatch.setattr(transpose, "threads_for", lambda *a: (asked.append(threads_for(*a)), asked[-1])[1])
    for x in (wide[:, :C].contiguous(), wide[:, :C], wide[:, 5:], wide[:, :C].T.contiguous().T):
        y = transposed(x)
        assert y.is_contiguous() and torch.equal(y, x.T) and y.shape == (C, R)
    shared = compiles() and R*C >= transpose.SHARED and transpose.torch_threads()
    if compiles(): assert len(asked) >= 3 and {parts for _, parts in asked} == {min(n, -(-R//16)) if shared else 1}


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
def test_small_products_stay_with_torch_where_little_is_gained(halves, monkeypatch):
    small, large = drawn(8, 24), drawn(40, 24)
    def called(layer, x):
        with torch.profiler.profile() as record: layer(x.requires_grad_()).square().sum().backward()
        return sum("_linear_pointwise" in e.name for e in record.events())
    layer = OneDNNLinear(24, 40)
    assert [called(layer, x) for x in (small, large)] == ([0, 3] if halves else [3, 3])
    monkeypatch.undo()                                          # As on this machine
    assert isinstance(onednn._pays(large, large.T), bool)
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


@kernel
def meet(met, ends, part, start, stop):
    "Wait until all parts have begun, which takes as many threads"
    add_one(met, 0)
    for _ in range(1_000_000):
        if peek(met, 0) == len(ends): break
        give_way()
    ends[part, 0], ends[part, 1], ends[part, 2] = start, stop, peek(met, 0)


@kernel
def meet_all(met, ends, items, threads): on_threads(meet, (met, ends), items, threads)


def parts_of(items, work):
    chosen, ends = threads_for(items, work), np.zeros((max(1, torch.get_num_threads()), 3), int)
    meet_all(np.zeros(1, int), ends[:chosen[1]], items, chosen)
    return [tuple(row) for row in ends[:chosen[1]].tolist()]


@needs_compiler
def test_work_is_shared_out(threads):
    threads(3)
    alone, size = [(0, 10, 1)], transpose.SHARED
    assert parts_of(10, size) == ([(0, 3, 3), (3, 6, 3), (6, 10, 3)] if transpose.torch_threads() else alone)
    assert parts_of(2, size) == ([(0, 1, 2), (1, 2, 2)] if transpose.torch_threads() else [(0, 2, 1)])
    assert parts_of(10, size - 1) == alone and parts_of(1, size) == [(0, 1, 1)]


def test_without_openmp_one_thread_does_it(threads, monkeypatch):
    threads(2)
    monkeypatch.setattr(transpose, "threadpool_info", lambda: [dict(user_api="blas", filepath="nowhere")])
    assert transpose.torch_threads.__wrapped__() == 0
    monkeypatch.setattr(transpose, "torch_threads", lambda: 0)
    assert threads_for(10, transpose.SHARED) == (0, 1)


@needs_compiler
def test_fewer_threads_than_parts_do_all_of_them(threads, monkeypatch):
    "OpenMP may grant fewer threads than asked for."
    threads(3)
    entry, asked = ctypes.CFUNCTYPE(None, ctypes.c_void_p), []
    def one_thread(f, data, n, flags):
        asked.append((n, flags))
        entry(f)(data)
    openmp = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)(one_thread)
    monkeypatch.setattr(transpose, "torch_threads", lambda: ctypes.cast(openmp, ctypes.c_void_p).value)
    x, found = np.arange(10), np.zeros((3, 3), int)
    mark_all(x, found, threads_for(10, transpose.SHARED))
    assert asked == [(3, 0)] and found.tolist() == [[0, 3, 0 + 1 + 2], [3, 6, 3 + 4 + 5], [6, 10, 6 + 7 + 8 + 9]]


@kernel
def mark(x, found, part, start, stop): found[part, 0], found[part, 1], found[part, 2] = start, stop, x[start:stop].sum()


@kernel
def mark_all(x, found, threads): on_threads(mark, (x, found), len(x), threads)


@quick
def meet_with_lock(met, ends, items, threads): on_threads(meet, (met, ends), items, threads)


@needs_compiler
def test_threads_work_while_the_caller_has_pythons_lock(threads):
    "They need no Python, so nobody waits for the thread that called."
    threads(2)
    ends = np.zeros((2, 3), int)
    meet_with_lock(np.zeros(1, int), ends, 10, threads_for(10, transpose.SHARED))
    if transpose.torch_threads(): assert ends[:, 2].tolist() == [2, 2]


def test_plain_python_takes_one_part():
    found = []
    transpose._in_one_part(lambda *a: found.append(a), (1, 2), 10, (0, 4))
    assert found == [(1, 2, 0, 0, 10)]


@pytest.mark.parametrize("kind", [FusedLinear, OneDNNLinear])
def test_outputs_of_one_operator_are_ordinary_tensors(kind):
    "They may be changed in place, and a backward pass within autocast keeps its formats"
    if kind is OneDNNLinear and not hasattr(torch.ops.mkldnn, "_linear_pointwise"): pytest.skip("this torch has no oneDNN")
    x, layers = drawn(2, 5, 24).requires_grad_(), three(kind)
    def gradients(autocast, ys):
        ys[0].add_(1)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast): return torch.autograd.grad(sum(y.square().sum() for y in ys), [x, *(layer.weight for layer in layers)])
    for apply in (lambda: linears(x, *layers), lambda: [FusedFeedForward(24, 40, linear=kind, generator=torch.Generator().manual_seed(0))(x), *linears(x, *layers)]):
        plain, inside = (gradients(autocast, apply()) for autocast in (False, True))
        check_close(inside, plain, 1e-4, 1e-4)
    a, b = linears(x, *layers[:2])
    assert torch.autograd.grad(a.sum(), x, retain_graph=True)[0].equal(torch.autograd.grad(a.sum(), x)[0])


def test_who_watches_all_layers_sees_each_of_them():
    x, seen = drawn(3, 24).requires_grad_(), []
    layers = three(FusedLinear)
    hook = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    try: linears(x, *layers)
    finally: hook.remove()
    assert seen == layers
    layers[1].forward = lambda x: seen.clear()
    assert linears(x, *layers)[1] is None and not seen


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
    for kind in (Linear, OneDNNLinear, FusedLinear):
        leaf, layers = x.clone().requires_grad_(), three(kind)
        ys = linears(leaf, *layers)
        assert [y.shape for y in ys] == [(*shape[:-1], n) for n in (16, 40, 8)]
        loss = sum((y.square()*(i + 1)).sum() for i, y in enumerate(ys))/max(1, x.numel())
        found.append([*(y.detach() for y in ys), *torch.autograd.grad(loss, [leaf, *(layer.weight for layer in layers)])])
    for ours in found[1:]: check_close(ours, found[0], 1e-4, 1e-4)
    assert made == ([5, 5] if x.numel() else [])
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
    right([three(FusedLinear)[0], *three(OneDNNLinear)[1:]])
    right(three(type("Mine", (FusedLinear,), dict(forward=lambda self, x: super(type(self), self).forward(x) + 1))))
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
    for kind in (Linear, OneDNNLinear, FusedLinear):
        with flop_counter() as counter: sum(y.sum() for y in linears(drawn(5, 24).requires_grad_(), *three(kind))).backward()
        counts.append(counter.get_total_flops())
    assert counts == [3*2*5*24*(16 + 40 + 8)]*3
