"The layers that treat each token by itself: over shapes, types and devices, in values and gradients."
import math
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from lmcourse.architecture import layers_torch
from lmcourse.architecture.layers_torch import (Embedding, FeedForward, LayerNorm, Linear, RMSNorm, check_same, cross_entropy, gelu, layernorm,
    linear_cross_entropy, relu, rmsnorm, silu, softmax, token_losses, truncated_normal)
from lmcourse.architecture import onednn as onednn_module
from lmcourse.architecture.onednn import onednn_products, vectors_idle
from lmcourse.tools.checks import check_close, expect_error
from lmcourse.tools.config import FFN_KINDS

few = settings(max_examples=25, deadline=None)
shapes = st.lists(st.integers(1, 4), max_size=3).map(tuple)
seeds = st.integers(0, 1000)


def randn(*shape, seed=0, dtype=torch.float64): return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@few
@given(shapes, st.integers(1, 9), st.integers(1, 9), st.booleans(), seeds)
def test_linear_is_torchs(lead, n_in, n_out, bias, seed):
    ours = Linear(n_in, n_out, bias, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    theirs = torch.nn.Linear(n_in, n_out, bias, dtype=torch.float64)
    if bias: ours.bias.data.normal_()
    theirs.load_state_dict(ours.state_dict())
    check_same(ours, theirs, randn(*lead, n_in, seed=seed))


@few
@given(shapes, st.integers(2, 9), st.sampled_from([1e-5, .1]), seeds)
def test_norms_are_torchs(lead, d, eps, seed):
    x, gain, bias = randn(*lead, d, seed=seed), randn(d, seed=seed + 1), randn(d, seed=seed + 2)
    check_same(partial(rmsnorm, eps=eps), lambda x, g: F.rms_norm(x, (d,), g, eps), x, gain)
    check_same(partial(layernorm, eps=eps), lambda x, g, b: F.layer_norm(x, (d,), g, b, eps), x, gain, bias)
    for norm, formula, weights in ((RMSNorm(d, eps), partial(rmsnorm, eps=eps), dict(weight=gain)),
                                   (LayerNorm(d, eps), partial(layernorm, eps=eps), dict(weight=gain, bias=bias))):
        names = list(weights)
        check_same(formula, lambda x, *w: torch.func.functional_call(norm, dict(zip(names, w)), x), x, *weights.values())


@few
@given(shapes.filter(len), seeds)
def test_functions_are_torchs(shape, seed):
    x = 3*randn(*shape, seed=seed)
    for ours, theirs in ((relu, F.relu), (silu, F.silu), (gelu, partial(F.gelu, approximate="tanh")), (partial(gelu, approximate="none"), F.gelu)):
        check_same(ours, theirs, x)
        assert ours(torch.tensor([math.nan])).isnan()
    for dim in range(-len(shape), len(shape)): check_same(partial(softmax, dim=dim), partial(F.softmax, dim=dim), x)


@few
@given(shapes.filter(len), st.integers(2, 9), st.sampled_from([0., .1]), seeds)
def test_cross_entropy_is_the_mean_of_token_losses(shape, V, z_loss, seed):
    logits, rng = 3*randn(*shape, V, seed=seed), torch.Generator().manual_seed(seed)
    targets = torch.randint(V, shape, generator=rng)
    counts = torch.rand(shape, generator=rng) < .7
    counts.view(-1)[0] = True
    def formula(z): return (token_losses(z, targets) + z_loss*z.logsumexp(-1)**2)[counts].mean()
    for ignored in (-100, -1, V): check_same(formula, lambda z: cross_entropy(z, targets.where(counts, ignored), ignored, z_loss), logits)
    check_same(lambda z: cross_entropy(z, targets), lambda z: F.cross_entropy(z.flatten(0, -2), targets.flatten()), logits)


def test_gradients_are_right_by_finite_differences():
    x, gain, bias = (t.requires_grad_() for t in (randn(3, 5), randn(5, seed=1), randn(5, seed=2)))
    targets = torch.tensor([1, -100, 4])
    for f, inputs in ((rmsnorm, (x, gain)), (layernorm, (x, gain, bias)), (softmax, (x,)), (silu, (x,)), (gelu, (x,)),
                      (lambda z: cross_entropy(z, targets, z_loss=.1), (x,))):
        assert torch.autograd.gradcheck(f, inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_types_come_back_and_sums_are_wide(dtype):
    x = randn(4, 512, dtype=torch.float32).to(dtype)*40                 # The sum of squares is beyond float16
    y = x.double()
    rtol = 2*torch.finfo(dtype).eps if dtype.itemsize == 2 else 1e-5
    for f in (lambda x: rmsnorm(x, torch.ones(512, dtype=x.dtype)), RMSNorm(512), lambda x: layernorm(x, torch.ones(512, dtype=x.dtype)),
              LayerNorm(512), LayerNorm(512, bias=False), softmax):
        assert f(x).dtype == dtype
        check_close(f(x).double(), f(y), rtol, 1e-6)
    for module in (RMSNorm(512), LayerNorm(512)): assert module.to(dtype)(x).dtype == dtype
    assert cross_entropy(x, torch.zeros(4, dtype=torch.long), z_loss=1e-4).dtype == (dtype if dtype == torch.float64 else torch.float32)


def test_losses_of_any_size_are_finite():
    z = torch.tensor([[1e30, -1e30, 0.], [0., -1e4, 1e4]], requires_grad=True)
    loss = cross_entropy(z, torch.tensor([0, 2]))
    loss.backward()
    assert loss == 0 and z.grad.isfinite().all()
    check_close(token_losses(z, torch.tensor([1, 1])), torch.tensor([2e30, 2e4]))


@pytest.mark.parametrize("std", [.02, 1., 5.])
def test_truncated_normal(std):
    w = truncated_normal((300, 300), std, generator=torch.Generator().manual_seed(0))
    assert w.abs().max() <= 3*std and w.abs().max() > 2.9*std
    check_close(w.std().item(), std*math.sqrt(.9733), rtol=.02)
    check_close(w.mean().item(), 0., atol=.02*std)


def test_initial_sizes():
    check_close(Linear(300, 100).weight.var().item(), 2/400*.9733, rtol=.05)
    check_close(Embedding(300, 100, std=.5).weight.var().item(), .25*.9733, rtol=.05)
    assert not Linear(3, 2, bias=True).bias.any() and Linear(3, 2).bias is None


def test_a_seed_gives_the_same_weights_and_disturbs_nobody():
    def weights(seed): return FeedForward(4, 6, generator=torch.Generator().manual_seed(seed)).state_dict()
    before = torch.get_rng_state()
    check_close(weights(3), weights(3), 0, 0)
    assert not torch.equal(weights(3)["w1.weight"], weights(4)["w1.weight"]) and torch.equal(before, torch.get_rng_state())
    half = Linear(4, 6, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(3)).weight
    check_close(half, Linear(4, 6, generator=torch.Generator().manual_seed(3)).weight.bfloat16(), 0, 0)


def test_linear_and_embedding_are_torchs_with_first_weights_of_their_own():
    "Also where no generator is given, and nothing else is drawn"
    drawn = lambda shape, std, **how: torch.nn.init.trunc_normal_(torch.empty(shape), 0, std, -3*std, 3*std, **how)
    line, table = Linear(6, 4, True, generator=torch.Generator().manual_seed(5)), Embedding(7, 5, .3, generator=torch.Generator().manual_seed(5))
    assert type(line) is torch.nn.Linear and issubclass(Linear, torch.nn.Linear) and isinstance(table, torch.nn.Embedding)
    check_close(line.weight, drawn((4, 6), .2**.5, generator=torch.Generator().manual_seed(5)), 0, 0)
    check_close(table.weight, drawn((7, 5), .3, generator=torch.Generator().manual_seed(5)), 0, 0)
    assert list(line.state_dict()) == ["weight", "bias"] and (line.in_features, line.out_features, table.num_embeddings, table.embedding_dim) == (6, 4, 7, 5)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        found = Linear(6, 4).weight, Embedding(7, 5).weight, torch.rand(1)
        torch.manual_seed(3)
        check_close(found, (drawn((4, 6), .2**.5), drawn((7, 5), 1.), torch.rand(1)), 0, 0)


def test_a_layer_that_is_derived_keeps_its_class():
    class Wide(Linear): pass
    assert type(Wide(2, 3)) is Wide and Wide(2, 3, dtype=torch.float64)(torch.ones(2, dtype=torch.float64)).shape == (3,)


def test_losses_do_not_depend_on_what_is_added_to_all_logits():
    z, targets = randn(64, 50, dtype=torch.float32), torch.arange(64)%50
    check_close(token_losses(z + 1e5, targets), token_losses((z + 1e5).double() - 1e5, targets).float(), rtol=1e-6)
    check_same(lambda z: token_losses(z, targets), lambda z: F.cross_entropy(z, targets, reduction="none"), z)


def test_meta_has_shapes_only():
    with torch.device("meta"): inside = Linear(10**6, 10**6)
    for m in (inside, Linear(10**6, 10**6, device="meta"), Embedding(10**6, 10**6, device="meta"), FeedForward(10**5, 10**6, device="meta")):
        assert all(p.is_meta for p in m.parameters())


@pytest.mark.parametrize("kind", FFN_KINDS)
@pytest.mark.parametrize("bias", [False, True])
def test_feed_forward(kind, bias):
    a = getattr(layers_torch, FFN_KINDS[kind].activation)   # By its formula
    net = FeedForward(4, 6, kind, bias, dtype=torch.float64)
    for p in net.parameters(): p.data.normal_(generator=torch.Generator().manual_seed(p.numel()))
    w = net.state_dict()
    names = ["w1", "w2"] + ["w3"]*FFN_KINDS[kind].gated
    assert set(w) == {f"{n}.weight" for n in names} | {f"{n}.bias" for n in names if bias}
    line = lambda n, x: x@w[f"{n}.weight"].T + w.get(f"{n}.bias", 0)
    x = randn(2, 3, 4)
    check_close(net(x), line("w2", a(line("w1", x))*(line("w3", x) if "w3" in names else 1)))


@pytest.mark.parametrize("ids, kind, words", [
    (torch.tensor([5]), IndexError, "id 5 is not in a table of 5: expected 0 to 4"), (torch.tensor([0, -3]), IndexError, "id -3 is"),
    (torch.tensor([1.]), TypeError, "torch.float32"), (torch.tensor([True]), TypeError, "torch.bool")])
def test_ids_that_are_refused(ids, kind, words):
    with expect_error(kind, words): Embedding(5, 2)(ids)


def test_other_bad_input():
    assert Embedding(5, 2)(torch.zeros(0, dtype=torch.long)).shape == (0, 2)
    with expect_error(ValueError, "targets (3,) don't fit logits (2, 4), expected (2,)"): cross_entropy(torch.zeros(2, 4), torch.zeros(3, dtype=torch.long))
    with expect_error(ValueError, "unknown feed-forward network 'tanh'"): FeedForward(2, 2, "tanh")
    with expect_error(ValueError, "unknown approximation of gelu 'erf'"): gelu(torch.ones(1), "erf")


def test_check_same_can_fail():
    x = randn(3)
    for wrong in (lambda x: x*x + 1e-3, lambda x: x*x.detach(), lambda x: (x*x)[None], lambda x: (x*x).float()):
        with expect_error(AssertionError): check_same(wrong, torch.square, x)


@settings(max_examples=40, deadline=None)
@given(N=st.integers(1, 9), D=st.integers(1, 5), V=st.integers(1, 9), tokens=st.sampled_from([1, 2, 5, None]), z_loss=st.sampled_from([0., .05]),
       ignored=st.integers(0, 9), seed=st.integers(0, 9), dtype=st.sampled_from([torch.float64, torch.float32]))
def test_head_and_loss_in_one(N, D, V, tokens, z_loss, ignored, seed, dtype):
    rng = torch.Generator().manual_seed(seed)
    x, head = torch.randn(N, D, generator=rng, dtype=dtype), 3*torch.randn(V, D, generator=rng, dtype=dtype)
    targets = torch.randint(V, (N,), generator=rng).masked_fill(torch.arange(N) >= max(1, ignored), -100)
    one = lambda x, W: linear_cross_entropy(x, W, targets, z_loss=z_loss, tokens=tokens)
    check_same(lambda x, W: cross_entropy(x@W.T, targets, z_loss=z_loss), one, x, head,
               rtol=1e-4 if dtype == torch.float32 else 1e-9, atol=1e-5 if dtype == torch.float32 else 1e-11)


@pytest.mark.parametrize("z_loss", [0., .05])
@pytest.mark.parametrize("tokens", [None, 4])
def test_a_gpu_pads_the_head_and_nobody_notices(monkeypatch, tokens, z_loss):
    "Done so on the processor: ids that don't exist have no probability and no gradient"
    x, head, targets = randn(10, 6), 3*randn(33, 6, seed=1), torch.arange(10).masked_fill(torch.arange(10) == 3, -100)
    expected, shapes, real = (lambda x, W: cross_entropy(x@W.T, targets, z_loss=z_loss)), [], layers_torch._some_tokens
    def some(x, weight, *more): shapes.append(weight.shape); return real(x, weight, *more)
    monkeypatch.setattr(layers_torch, "_row_padding", lambda x, rows: -rows % 64)
    monkeypatch.setattr(layers_torch, "_some_tokens", some)
    check_same(expected, lambda x, W: linear_cross_entropy(x, W, targets, z_loss=z_loss, tokens=tokens), x, head)
    assert set(shapes) == {(64, 6)}


@pytest.mark.parametrize("device, rows, more", [("cpu", 50_257, 0), ("cuda", 50_257, 47), ("cuda", 10_000, 0), ("cuda", 32_001, 63)])
def test_which_heads_are_padded(device, rows, more):
    import types
    assert layers_torch._row_padding(types.SimpleNamespace(device=torch.device(device)), rows) == more


def test_no_tokens_are_no_parts():
    for device in ("cpu", "cuda", "mps"): assert layers_torch._tokens_at_a_time(device, 0, 100) >= 1
    assert layers_torch._tokens_at_a_time("mps", 10**6, 2**16) <= 2**12


@pytest.mark.parametrize("n, V, parts", [(32_768, 32_000, 2), (16_384, 50_257, 2), (100, 50_257, 1), (600, 97, 2), (32_769, 32_000, 2), (10**5, 2**30, 391)])
def test_a_gpu_gets_equal_parts(n, V, parts):
    tokens = layers_torch._tokens_at_a_time("cuda", n, V)
    assert -(-n//tokens) == parts and tokens <= max(256, n/parts + 1)


def test_head_and_loss_in_one_under_autocast():
    rng = torch.Generator().manual_seed(0)
    x, head = torch.randn(3, 7, 16, generator=rng, requires_grad=True), torch.randn(50, 16, generator=rng, requires_grad=True)
    targets = torch.randint(50, (3, 7), generator=rng)
    exact = torch.autograd.grad(cross_entropy(x@head.T, targets), (x, head))
    with torch.autocast("cpu", torch.bfloat16): loss = linear_cross_entropy(x, head, targets, tokens=4)
    assert loss.dtype == torch.float32
    grads = torch.autograd.grad(loss, (x, head))
    assert all(g.dtype == torch.float32 for g in grads)
    for g, e in zip(grads, exact): check_close(g, e, rtol=.05, atol=.02*e.abs().max().item())
    check_close(loss, cross_entropy(x@head.T, targets), rtol=.01)


def test_head_and_loss_in_one_holds_no_logits():
    V, N = 20_000, 2048
    x, head, targets = torch.randn(N, 4), torch.randn(V, 4), torch.zeros(N, dtype=torch.long)
    with torch.profiler.profile(profile_memory=True) as record: linear_cross_entropy(x, head, targets)
    largest = max(e.cpu_memory_usage for e in record.events())
    assert largest < 4*V*N/4


def test_head_and_loss_in_one_where_no_target_counts():
    for x, targets in ((randn(3, 4), torch.full((3,), -100)), (randn(0, 4), torch.zeros(0, dtype=torch.long))):
        head, x = randn(5, 4).requires_grad_(), x.requires_grad_()
        loss = linear_cross_entropy(x, head, targets)
        assert loss.isnan() and all(not g.any() for g in torch.autograd.grad(loss, (x, head)))


@pytest.mark.parametrize("wants", [(False, False), (True, False), (False, True), (True, True)])
def test_head_and_loss_in_one_does_no_more_than_is_wanted(wants):
    x, head, targets = randn(6, 4), randn(5, 4, seed=1), torch.arange(6)%5
    inputs = [a.requires_grad_(w) for a, w in zip((x, head), wants)]
    def products(f):
        with torch.profiler.profile() as record: f()
        return sum(e.name == "aten::mm" for e in record.events())
    assert products(lambda: linear_cross_entropy(x, head, targets, tokens=3)) == 2*(1 + sum(wants))
    with torch.no_grad(): assert products(lambda: linear_cross_entropy(x, head, targets, tokens=3)) == 2
    wanted = [a for a in inputs if a.requires_grad]
    if not wanted: return
    check_close(*(torch.autograd.grad(f(), wanted) for f in (lambda: linear_cross_entropy(x, head, targets, tokens=3), lambda: cross_entropy(x@head.T, targets))), 1e-10)


def test_head_and_loss_in_one_with_large_logits():
    x, targets, head = randn(64, 8, dtype=torch.float32), torch.zeros(64, dtype=torch.long), randn(9, 8, seed=1, dtype=torch.float32)
    x[:, 0], head[:, 0] = 1e3, 1e3                                      # All logits near a million
    check_close(linear_cross_entropy(x, head, targets), cross_entropy(x@head.T, targets), 1e-5)


def test_head_and_loss_in_one_in_float16():
    "A scaled loss, as mixed precision has it, must reach gradients that are too small for float16 themselves"
    x, head, targets = randn(4096, 8), randn(2000, 8, seed=1), torch.zeros(4096, dtype=torch.long)
    grads = lambda f, *a: torch.autograd.grad(2**14*f(*a, targets), a)
    exact = grads(lambda x, W, t: cross_entropy(x@W.T, t), x.half().double().requires_grad_(), head.half().double().requires_grad_())
    for g, e in zip(grads(linear_cross_entropy, x.half().requires_grad_(), head.half().requires_grad_()), exact): assert (g.double() - e).norm() < 1e-3*e.norm()


def test_in_float16_a_sum_over_many_tokens_does_not_overflow():
    head = torch.zeros(8, 4, dtype=torch.float16, requires_grad=True)
    linear_cross_entropy(torch.ones(2**17, 4, dtype=torch.float16), head, torch.zeros(2**17, dtype=torch.long)).backward()
    check_close(head.grad, (1/8 - torch.eye(8)[:, :1]).expand(8, 4).half(), 1e-3)


def test_where_torch_cannot_replace_a_product_nothing_is_replaced(monkeypatch):
    "A build without oneDNN"
    monkeypatch.setattr(onednn_module, "_can_replace_products", lambda: False)
    monkeypatch.setattr(onednn_module, "vectors_idle", vectors_idle.__wrapped__)
    assert not onednn_module.vectors_idle()
    with onednn_products(): assert (torch.ones(2, 3)@torch.ones(3, 2)).sum() == 12
    with pytest.raises(RuntimeError, match=f"torch {torch.__version__.split('+')[0]}.* can't replace a product, expected a build with oneDNN"):
        with onednn_products(True): pass


onednn = pytest.mark.skipif(not onednn_module._can_replace_products(), reason="this torch has no oneDNN, or replaces no operator")


@pytest.fixture(autouse=True)
def every_product_gains(monkeypatch): monkeypatch.setattr(onednn_module, "_HALVES", False)


@onednn
def test_products_by_onednn_refuse_what_torch_refuses():
    a, b = torch.ones(2, 3), torch.ones(3, 5)
    bad = [lambda: torch.mm(a[None], b), lambda: torch.mm(a[0], b), lambda: torch.mm(a, b[:, 0]), lambda: torch.mm(a, b.T), lambda: torch.mm(a, b.double()),
           lambda: torch.mm(a.double(), b), lambda: torch.mm(a, b, out=torch.empty(2, 5, dtype=torch.double)), lambda: torch.mm(a, b, out=torch.empty(2, 5, dtype=torch.long))]
    with onednn_products(True):
        for f in bad:
            with pytest.raises(RuntimeError, match="matrix|multiplied|dtype"): f()
        with pytest.warns(UserWarning, match="resized"): torch.mm(a, b, out=torch.empty(7, 5))
        for x in (a.half(), a.bfloat16(), a.to(torch.cfloat), a.long()): assert torch.equal(x@b.to(x.dtype), torch.full((2, 5), 3, dtype=x.dtype))
        for x in (torch.ones(1, 1).expand(2, 3), torch.ones(2, 1).expand(2, 3)): check_close(x@torch.ones(1, 5).expand(3, 5), torch.full((2, 5), 3.))
        strided = torch.empty(5, 2).T
        assert torch.mm(a, b, out=strided) is strided and (strided == 3).all()
        check_close(torch.func.vmap(torch.mm)(a.expand(4, 2, 3), b.expand(4, 3, 5)), torch.full((4, 2, 5), 3.))
        check_close(torch.func.grad(lambda a: (a@b).sum())(a), torch.full((2, 3), 5.))


@onednn
def test_products_by_onednn():
    rng = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=rng, dtype=torch.float64)
    with onednn_products(True):
        for m, k, n in ((1, 1, 1), (3, 5, 2), (64, 7, 33), (300, 4, 5), (4, 300, 2)):
            for a in (draw(m, k), draw(k, m).T, draw(2*m, k)[::2], draw(m, 2*k)[:, ::2]):
                for b in (draw(k, n), draw(n, k).T, draw(k, 2*n)[:, ::2]):
                    y = a.float()@b.float()
                    assert y.is_contiguous()
                    check_close(y, (a.numpy()@b.numpy()).astype("float32"), rtol=1e-4, atol=1e-4)
        line, x = torch.nn.Linear(5, 3, bias=False), torch.randn(2, 4, 5, requires_grad=True)
        line(x).square().sum().backward()
        with pytest.raises(RuntimeError): torch.ones(2, 3)@torch.ones(2, 3)
    expected = torch.autograd.grad(line(x).square().sum(), (x, line.weight))
    check_close((x.grad, line.weight.grad), expected, rtol=1e-4, atol=1e-5)


@onednn
@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 4, 5), (0, 5)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_that_calls_onednn_is_a_linear_layer(shape, bias):
    "To the bit that of a block, and within rounding torch's own; other types and autocast get torch's own"
    layer = onednn_module.OneDNNLinear(5, 3, bias, generator=torch.Generator().manual_seed(0))
    if bias: torch.nn.init.normal_(layer.bias)
    plain = torch.nn.Linear(5, 3, bias)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(shape)
    def grads(layer, x): return (y := layer(x)).detach(), *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])
    ours, torchs = grads(layer, x.clone().requires_grad_()), grads(plain, x.clone().requires_grad_())
    check_close(ours, torchs, rtol=1e-5, atol=1e-6)
    if not bias and x.ndim > 1:
        with onednn_products(True): inside = grads(plain, x.clone().requires_grad_())
        for a, b in zip(ours, inside): assert torch.equal(a, b)
    for other in (layer.double(), plain.double()): assert other(x.double()).dtype == torch.float64
    check_close(grads(layer, x.double().requires_grad_()), grads(plain, x.double().requires_grad_()), 0, 0)
    layer.float()
    with torch.autocast("cpu", torch.bfloat16): assert layer(x).dtype == torch.bfloat16
    with torch.no_grad(): check_close(layer(x), ours[0], 0, 0)


@onednn
@pytest.mark.parametrize("bias", [False, True])
def test_the_compiler_calls_onednn_too(bias):
    "As an operator, without a break in the graph; the values and gradients are those of the layer, to the bit"
    layer = onednn_module.OneDNNLinear(70, 40, bias, generator=torch.Generator().manual_seed(0))
    x = torch.randn(3, 5, 70)
    def grads(f): return (y := f(z := x.clone().requires_grad_())).detach(), *torch.autograd.grad(y.square().sum(), [z, *layer.parameters()])
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    grads(compiled)                                                             # Tracing calls it with shapes alone
    with torch.profiler.profile() as record: found = grads(compiled)
    assert sum("_linear_pointwise" in e.name for e in record.events()) == 3
    check_close(found, grads(layer), 0, 0)


@onednn
@pytest.mark.parametrize("compiled", [False, True])
def test_a_gradient_that_nobody_asks_for_needs_no_product(compiled):
    "Frozen weights, or an input that needs no gradient; nor is the other factor kept"
    layer, x = onednn_module.OneDNNLinear(70, 40), torch.randn(6, 70)
    run: Any = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    for frozen in (False, True):
        layer.weight.requires_grad_(not frozen)
        z, kept = x.clone().requires_grad_(frozen), []
        run(z).sum().backward()                                                 # The compiler traces it
        z.grad = layer.weight.grad = None
        with torch.profiler.profile() as record, torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            (y := run(z)).backward(torch.ones_like(y))
        assert sum("_linear_pointwise" in e.name for e in record.events()) == 2
        if not compiled: assert {tuple(t.shape) for t in kept} == {(40, 70) if frozen else (6, 70)}
        found, expected, given = (z.grad, torch.ones(6, 40)@layer.weight.detach(), layer.weight.grad) if frozen else (
            layer.weight.grad, torch.ones(40, 6)@x, z.grad)
        assert given is None and found is not None
        check_close(found, expected, rtol=1e-4, atol=1e-5)


@onednn
@pytest.mark.parametrize("idle", [False, True])
def test_training_asks_for_onednn_where_vectors_would_be_idle(idle, monkeypatch):
    "All products of a step; in the layer, for this model alone"
    from lmcourse.architecture import fused, fused_attention
    from lmcourse.tools.config import ModelConfig, TrainConfig
    from lmcourse.tools.machine import compiles
    from lmcourse.training.engines import TorchEngine
    if not compiles(): pytest.skip("nothing is compiled here")
    for module in (onednn_module, fused, fused_attention): monkeypatch.setattr(module, "vectors_idle", lambda: idle)
    c, ids = ModelConfig(vocab_size=50, context_length=16, d_model=32, num_layers=2, num_heads=4), torch.randint(50, (2, 17))
    engine = TorchEngine(c, TrainConfig(device="cpu"))
    with torch.profiler.profile() as record: engine.forward_backward((ids[:, :-1], ids[:, 1:]))
    products = sum("_linear_pointwise" in e.name for e in record.events())
    assert products == (2*7*3 + 3)*idle and {type(m) for m in engine.model.modules() if isinstance(m, torch.nn.Linear)} <= (
        {onednn_module.OneDNNLinear} if idle else {onednn_module.FusedLinear})


@onednn
def test_onednn_gets_no_second_factor_with_gaps():
    "It would multiply by its reference loop, a thousand times as slow"
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.mkldnn._linear_pointwise.default: weights.append(args[1])
            return func(*args, **kwargs or {})
    weights: list = []
    layouts = (lambda m, n: torch.randn(m, n), lambda m, n: torch.randn(n, m).T, lambda m, n: torch.randn(m, 2*n)[:, :n], lambda m, n: torch.randn(n, 2*m)[:, :m].T,
               lambda m, n: torch.randn(2*m, n)[::2], lambda m, n: torch.randn(1, n).expand(m, n))
    for left in layouts:
        for right in layouts:
            for m, k, n in ((3, 70, 5), (70, 40, 3)):
                a, b = left(m, k), right(k, n)
                with Seen(): got = onednn_module._mm(a, b)
                check_close(got, a@b, rtol=1e-5, atol=1e-4)
    assert len(weights) == 2*len(layouts)**2 and all(w.is_contiguous() or w.T.is_contiguous() for w in weights)


@onednn
@pytest.mark.parametrize("idle", [False, True])
def test_a_product_is_added_some_rows_at_a_time(idle, monkeypatch):
    monkeypatch.setattr(onednn_module, "vectors_idle", lambda: idle)
    for rows, k, n in ((5, 3, 2), (1024, 4, 3), (2500, 4, 3)):
        before, a, b = torch.randn(rows, n), torch.randn(k, rows).T, torch.randn(k, n)
        total, room = before.clone(), torch.empty(rows, n)
        onednn_module.add_product(total, a, b)
        check_close(total, before + a@b, rtol=1e-5, atol=1e-5)
        check_close(got := onednn_module.product(a, b, room), a@b, rtol=1e-5, atol=1e-5)
        assert (got is room) != idle


@onednn
def test_products_by_onednn_end_with_the_block():
    a, out = torch.randn(64, 64), torch.empty(64, 64)
    def whose(f):
        with torch.profiler.profile() as record: f()
        return any("_linear_pointwise" in e.name for e in record.events())
    ours = lambda: [whose(lambda: a@a), whose(lambda: torch.mm(a, a, out=out)), whose(lambda: a[:0]@a), whose(lambda: a[:, :0]@a[:0])]
    inside, outside = [True, True, False, False], [False]*4
    before = a@a
    assert ours() == outside
    with pytest.raises(KeyError):
        with onednn_products(True):
            with onednn_products(True): assert ours() == inside
            assert ours() == inside
            raise KeyError
    with onednn_products(False): assert ours() == outside
    with onednn_products(True):                                 # Other devices and types never see it
        assert not whose(lambda: torch.empty(3, 4, device="meta")@torch.empty(4, 5, device="meta")) and not whose(lambda: a.double()@a.double())
    first, second = onednn_products(True), onednn_products(True)
    for step in (first.__enter__, second.__enter__): step()
    first.__exit__(None, None, None)                            # Not in reverse order, as two threads may
    assert ours() == inside
    second.__exit__(None, None, None)
    assert ours() == outside
    check_close(a@a, before, 0, 0)


def test_a_loss_is_finite_where_its_logits_are():
    "Logits of 1e26, as of a deep model without norms: their squares are beyond float32, the loss is not"
    x, head = torch.tensor([[1e13, -2e13], [3e13, 1e13]]), torch.tensor([[1e13, 0.], [0., 1e13], [1e12, 1e12]])
    loss = linear_cross_entropy(x, head, torch.tensor([1, 2]))
    assert loss == torch.nn.functional.cross_entropy(x@head.T, torch.tensor([1, 2])) and 2e26 < loss < 3e26

def test_whole_numbers_are_no_logits(): # softmax of [1, 2] would be [0, 0], as whole numbers
    for f in (softmax, lambda x: rmsnorm(x, torch.ones(2)), lambda x: token_losses(x, torch.tensor([1]))):
        with expect_error(TypeError, "torch.int64"): f(torch.tensor([[1, 2]]))

def test_token_losses_need_a_target_for_each_row(): # gather would take the first row's logits for both
    with expect_error(ValueError, "targets (1,) don't fit logits (2, 5), expected (2,)"): token_losses(torch.randn(2, 5), torch.tensor([0]))
