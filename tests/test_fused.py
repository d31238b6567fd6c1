"The fused CPU kernels: equal to the readable layers in values and gradients, compiled or not, and out of the way where they don't fit."
import copy
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from lmcourse.accounting.activations import activation_bytes
from lmcourse.accounting.run_cost import memory_format
from lmcourse.architecture.attention_torch import RoPE, prepare_heads
from lmcourse.architecture import fused, onednn, transpose
from lmcourse.architecture.fused import FusedFeedForward, FusedRMSNorm, MixedPrecisionLinear, exp2_below, fused_ffn, fused_gelu, fused_heads, fused_loss, head_loss, largest, rms_norm, swiglu, rotate_heads
from lmcourse.architecture.fused_attention import FUSED_PARTS
from lmcourse.architecture.layers_torch import FeedForward, Linear, RMSNorm, check_same, gelu, linear_cross_entropy, rmsnorm, silu
from lmcourse.architecture.onednn import FusedLinear, OneDNNLinear, vectors_idle
from lmcourse.architecture.transformer_torch import Parts, TransformerLM, named_parts
from lmcourse.tools.checks import check_close, expect_error
from lmcourse.tools.config import ModelConfig, TrainConfig
from lmcourse.tools.machine import compiles
from lmcourse.training.engines import NumpyEngine, TorchEngine, autocast
from lmcourse.training.optim_torch import AdamW

SMALL = ModelConfig(vocab_size=61, context_length=40, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, d_ff=48)


def drawn(*shape, seed=0): return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_exponentials():
    x = np.linspace(-126, 0, 100_001, dtype=np.float32)
    found = np.array([exp2_below(v) for v in x[::50]], np.float32)
    check_close(found, np.exp2(x[::50].astype(np.float64)).astype(np.float32), rtol=3e-7, atol=0)
    assert exp2_below(np.float32(-1e30)) == np.float32(2.)**-126 and np.isnan(exp2_below(np.float32("nan")))
    for row in ([-3, -2.5, -9], [0., -1], [-0., 5, np.inf], [-np.inf, -np.inf]):
        row = np.array(row, np.float32)
        check_close(np.array(largest(row.view(np.int32)), np.float32), np.array(row.max()), 0, 0)
    assert np.isnan(largest(np.array([1, np.nan], np.float32).view(np.int32)))


@pytest.mark.parametrize("shape", [(3, 5, 32), (1, 1), (7, 33)])
def test_norm_and_gate(shape):
    x, w = drawn(*shape), drawn(shape[-1], seed=1)
    check_same(lambda x, w: rms_norm(x, w, 1e-5)[0], lambda x, w: rmsnorm(x, w, 1e-5), x, w)
    check_same(lambda x, w: rms_norm(x.T, w, 1e-5)[0], lambda x, w: rmsnorm(x.T, w, 1e-5), drawn(shape[-1], 4), w)
    check_same(swiglu, lambda a, b: silu(a)*b, 9*x, drawn(*shape, seed=2))
    check_same(fused_gelu, gelu, 3*x, atol=3e-6)
    check_same(lambda x: fused_gelu(x.T), lambda x: gelu(x.T), drawn(5, 4))


def test_gelu_far_from_zero():
    x = torch.tensor([-1e10, -40., -9., -1e-30, -0., 0., 1e-30, 9., 40., 1e10], requires_grad=True)
    y = fused_gelu(x)
    y.sum().backward()
    check_close(y.detach(), torch.tensor([0., 0, 0, -5e-31, 0, 0, 5e-31, 9, 40, 1e10]), 1e-6, 1e-27)
    check_close(x.grad, torch.tensor([0., 0, 0, .5, .5, .5, .5, 1, 1, 1]), 1e-6, 1e-6)
    assert fused_gelu(torch.tensor([np.nan, np.inf, 1.])).isnan().tolist() == [True, False, False]


def test_networks_with_a_kernel():
    made = {f: type(fused_ffn(replace(SMALL, ffn=f))) for f in ("swiglu", "gelu", "relu", "silu")}
    assert made == dict(swiglu=FusedFeedForward, gelu=FusedFeedForward, relu=FeedForward, silu=FeedForward)
    ffn = FusedFeedForward(32, 48, "gelu")
    with torch.profiler.profile() as record: ffn(drawn(3, 32))
    assert not any(e.name == "aten::gelu" for e in record.events())


@pytest.mark.parametrize("norm", [False, True])
def test_heads(norm):
    rope, (q, k) = RoPE(40, 8), (drawn(2, 9, 4, 8).transpose(1, 2), drawn(2, 9, 2, 8, seed=1).transpose(1, 2))
    a, b = RMSNorm(8), RMSNorm(8)
    with torch.no_grad(): a.weight.copy_(drawn(8, seed=2)); b.weight.copy_(drawn(8, seed=3))
    norms = (a, b) if norm else (None, None)
    for i in range(2): check_same(lambda q, k: fused_heads(q, k, *norms, rope, rope.at(9))[i] + 0*(q.sum() + k.sum()),
                                  lambda q, k: prepare_heads(q, k, *norms, rope, rope.at(9))[i] + 0*(q.sum() + k.sum()), q, k)
    if not norm: return
    found = []
    for f in (fused_heads, prepare_heads):
        a.zero_grad(); b.zero_grad()
        sum((y*y.detach().cos()).sum() for y in f(q, k, a, b, rope, rope.at(9))).backward()
        found.append([a.weight.grad.clone(), b.weight.grad.clone()])
    check_close(found[0], found[1], 1e-5, 1e-5)


def test_what_the_kernels_would_read_beyond_is_refused():
    x, table, h, head, targets = drawn(1, 3, 2, 8), RoPE(4, 8).at(3), drawn(6, 16), drawn(40, 16), torch.arange(6)
    for error, words, f, inputs in (
            (ValueError, "weight has shape (2,), expected (8,)", rotate_heads, (x, torch.ones(2), table, 1e-5)),
            (ValueError, "table has shape (2, 4, 2), expected (3, 4, 2)", rotate_heads, (x, torch.ones(8), table[:2], 1e-5)),
            (ValueError, "targets has shape (3,), expected (6,)", head_loss, (h, head, targets[:3], -100, 0.)),
            (ValueError, "weight has shape (40, 8), expected (40, 16)", head_loss, (h, head[:, :8], targets, -100, 0.)),
            (TypeError, "head_loss: torch.float64", head_loss, (h.double(), head.double(), targets, -100, 0.))):
        with expect_error(error, words): f(*inputs)
    q, rope = drawn(1, 2, 3, 8), RoPE(4, 8)
    with expect_error(RuntimeError, "normalized_shape=[4]"): fused_heads(q, q, RMSNorm(8), RMSNorm(4), rope, rope.at(3))


@pytest.mark.parametrize("z_loss", [0., .1])
@pytest.mark.parametrize("n, vocabulary", [(11, 61), (600, 5000)])
def test_loss(z_loss, n, vocabulary):
    x, w = drawn(2, n, 16), drawn(vocabulary, 16, seed=1)
    targets = torch.randint(vocabulary, (2, n), generator=torch.Generator().manual_seed(0))
    targets[0, :3] = -100
    check_same(lambda x, w: fused_loss(x, w, targets, z_loss=z_loss), lambda x, w: linear_cross_entropy(x, w, targets, z_loss=z_loss), x, w, rtol=2e-5)
    none = torch.full_like(targets, -100)
    x.requires_grad_()
    loss = fused_loss(x, w, none)
    loss.backward()
    assert loss.isnan() and not x.grad.any()
    with expect_error(ValueError, "targets (3,) don't fit"): fused_loss(x, w, targets[0, :3])


@pytest.mark.parametrize("fields", [dict(), dict(qk_norm=True, tie_embeddings=True, z_loss=.01), dict(qk_norm=True, qk_norm_whole=True), dict(norm="layernorm", ffn="gelu"),
                                    dict(qk_norm=True, rope_scaling=dict(rope_type="yarn", factor=4., original_max_position_embeddings=8, attention_factor=1.5)),
                                    dict(position="none"), dict(window=5, bias=True, norm_position="post"), dict(num_experts=4, moe_d_ff=20)], ids=str)
def test_a_step_is_the_readable_model_s(fields):
    config, found = replace(SMALL, **fields), []
    ids = torch.randint(61, (3, 30), generator=torch.Generator().manual_seed(1))
    for kernels in ("torch", "fused", "auto"):
        engine, steps = TorchEngine(config, TrainConfig(device="cpu", kernels=kernels)), []
        for _ in range(3):
            loss = engine.forward_backward((ids[:, :-1], ids[:, 1:])).item()
            steps.append((loss, engine.optimizer_step(1e-3)))
        found.append(steps)
    check_close(found[1], found[0], 2e-5)
    if compiles(): assert found[2] == found[1]
    else: check_close(found[2], found[0], 1e-6)                 # `auto` takes no kernels that would run as plain Python


def test_recomputed_and_in_parts():
    ids, found = torch.randint(61, (4, 30), generator=torch.Generator().manual_seed(1)), []
    for how in (dict(), dict(recompute=True)):
        engine = TorchEngine(SMALL, TrainConfig(device="cpu", **how))
        for part in ids.split(2): engine.forward_backward((part[:, :-1], part[:, 1:]), .5)
        found.append([p.grad for p in engine.model.parameters()])
    check_close(found[1], found[0], 0, 0)


def test_what_auto_chooses():
    def parts(**how): return TorchEngine(SMALL, TrainConfig(device="cpu", **how)).model.parts
    idle, linear = vectors_idle(), OneDNNLinear if vectors_idle() else Linear
    assert parts() == (replace(FUSED_PARTS, linear=OneDNNLinear if idle else FusedLinear) if compiles() else Parts()) and TrainConfig().kernels == "auto"
    assert parts(kernels="torch") == parts(kernels="torch", compile=True) == parts(dtype="bfloat16", compile=True) == Parts()
    assert parts(dtype="bfloat16") == (replace(FUSED_PARTS, linear=MixedPrecisionLinear) if compiles() else Parts())
    assert parts(dtype="float16") == parts(dtype="bfloat16", kernels="torch") == Parts()
    assert parts(compile=True) == Parts(linear=linear)
    assert TransformerLM(SMALL).parts == Parts()
    with expect_error(ValueError, "kernels = fused on cuda, expected cpu; kernels = torch would do"): named_parts(SMALL, "torch", "fused", "cuda")
    NumpyEngine(SMALL, TrainConfig(engine="numpy"))
    with expect_error(ValueError, "engine = numpy with kernels = fused"): NumpyEngine(SMALL, TrainConfig(engine="numpy", kernels="fused"))


def in_bf16(): return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("shape", [(70,), (3, 5, 70)])
def test_a_layer_in_bfloat16(shape, compiled):
    "The factors of all three products are rounded; what goes in and comes out is in float32"
    layer = MixedPrecisionLinear(70, 40, generator=torch.Generator().manual_seed(0))
    run: Any = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    x = torch.randn(shape, requires_grad=True)
    with in_bf16(): y = run(x)
    dy = torch.randn(y.shape)
    found = y.detach(), *torch.autograd.grad(y, (x, layer.weight), dy)
    def low(t): return t.detach().bfloat16().float()
    rows, out = low(x).reshape(-1, 70), low(dy).reshape(-1, 40)
    expected = (rows@low(layer.weight).T).reshape(y.shape), (out@low(layer.weight)).reshape(x.shape), out.T@rows
    for a, b in zip(found, expected):
        assert a.dtype == torch.float32
        check_close(a, b, rtol=2**-8, atol=1e-4)                                # The result is rounded once
    if not compiled:
        layer.weight.requires_grad_(False)
        kept: list = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t), in_bf16(): layer(x)
        assert [(tuple(t.shape), t.dtype) for t in kept] == [((40, 70), torch.bfloat16)]


@pytest.mark.parametrize("z_loss", [0., .1])
def test_the_products_of_the_loss_in_bfloat16(z_loss):
    "Factors are rounded, sums aren't; the loss itself is in float32"
    x, head, targets = drawn(50, 16), drawn(40, 16), torch.arange(50) % 40
    targets[7] = -100
    low_x, low_head = (t.bfloat16().float().requires_grad_() for t in (x, head))
    expected = linear_cross_entropy(low_x, low_head, targets, z_loss=z_loss)
    wanted = torch.autograd.grad(expected, (low_x, low_head))
    leaves = x.clone().requires_grad_(), head.clone().requires_grad_()
    with in_bf16(): loss = fused_loss(*leaves, targets, z_loss=z_loss)
    found = torch.autograd.grad(loss, leaves)
    assert loss.dtype == found[0].dtype == found[1].dtype == torch.float32
    check_close(loss.detach(), expected.detach(), 5e-3)
    for a, b in zip(found, wanted): assert (a - b).norm() < .01*b.norm()


@pytest.mark.skipif(not compiles(), reason="nothing is compiled here")
@pytest.mark.parametrize("recompute", [False, True])
def test_a_step_in_bfloat16(recompute):
    "All products are in bfloat16, also those of the backward pass; what they yield isn't"
    ids = torch.randint(61, (4, 30), generator=torch.Generator().manual_seed(1))
    found = {}
    for dtype in ("float32", "bfloat16"):
        engine = TorchEngine(SMALL, TrainConfig(device="cpu", dtype=dtype, recompute=recompute))
        with torch.profiler.profile() as record: engine.forward_backward((ids[:, :-1], ids[:, 1:]))
        found[dtype] = torch.cat([p.grad.flatten() for p in engine.model.parameters()])
        rounded = sum(e.name == "aten::mm" for e in record.events())
        assert dtype == "float32" or rounded >= 3*sum(type(m) is MixedPrecisionLinear for m in engine.model.modules()) > 30
    a, b = found.values()
    assert b.dtype == torch.float32 and 1e-4 < (a - b).norm()/a.norm() < .02 and torch.isfinite(b).all()


@pytest.mark.skipif(not compiles(), reason="nothing is compiled here")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_keeps_no_more_than_is_counted(dtype):
    "Before a run, `price` and the command say what it needs"
    config = ModelConfig(vocab_size=61, context_length=128, d_model=128, num_layers=3, num_heads=4)
    engine, kept = TorchEngine(config, TrainConfig(device="cpu", dtype=dtype)), {}
    weights, ids = {p.data_ptr() for p in engine.model.parameters()}, torch.randint(61, (4, 129))
    def keep(t):
        if t.data_ptr() not in weights: kept[t.untyped_storage().data_ptr()] = t
        return t
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), autocast(engine.device, dtype):
        loss = engine.loss(ids[:, :-1], ids[:, 1:])
    found = sum(t.untyped_storage().nbytes() for t in kept.values())
    assert loss.requires_grad and found <= (counted := activation_bytes(config, 4, dtype=memory_format(dtype, "cpu")))
    if dtype == "bfloat16":
        assert found > .7*counted
        return
    # Stream and norm twice, queries, keys, values, attention; what goes into the gate; roots of norms, and sums of attention
    N, D, F, H = 4*128, 128, config.ffn_size, 4
    layer = 8*N*D + 2*N*F + 2*N + N*H
    exact = 4*(3*layer + 2*N*D + N + 61*D)                      # and of the end: stream, root, and both gradients of the head
    assert 0 <= found - exact < .002*exact                      # the ids, the table of RoPE, and ones


def test_other_types_and_no_gradients_take_the_readable_way():
    x, norm, ffn = drawn(2, 5, 32), FusedRMSNorm(32), FusedFeedForward(32, 48)
    check_close(norm.double()(x.double()), RMSNorm(32, dtype=torch.float64)(x.double()), 0, 0)
    assert norm.float()(x[:0]).shape == (0, 5, 32)
    with torch.autocast("cpu", torch.float16): assert ffn(x).dtype == torch.float16
    ids = torch.randint(61, (2, 12))
    model = TransformerLM(SMALL, parts=FUSED_PARTS)
    with torch.no_grad(): check_close(model.loss(ids[:, :-1], ids[:, 1:]), TransformerLM(SMALL).loss(ids[:, :-1], ids[:, 1:]), 1e-5)
    copied = copy.deepcopy(model)
    check_close(copied(ids).detach(), TransformerLM(SMALL)(ids).detach(), 1e-5, 1e-5)


def test_the_compiler_sees_operators():
    model, ids = TransformerLM(replace(SMALL, qk_norm=True), parts=FUSED_PARTS), torch.randint(61, (2, 12))
    plain = model.loss(ids[:, :-1], ids[:, 1:])
    plain.backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    loss = torch.compile(model.loss, backend="aot_eager", fullgraph=True)(ids[:, :-1], ids[:, 1:])
    loss.backward()
    check_close(loss.detach(), plain.detach(), 1e-6)
    check_close([p.grad for p in model.parameters()], expected, 1e-5, 1e-6)
    ops = torch.ops.lmcourse
    ask = lambda *shape: drawn(*shape).requires_grad_()
    for op, inputs in ((ops.rms_norm, (ask(3, 8), ask(8), 1e-5)), (ops.swiglu, (ask(3, 8), ask(3, 8))), (ops.fused_gelu, (ask(3, 8),)), (ops.rotate_heads, (ask(2, 5, 3, 8), ask(8), drawn(5, 4, 2), 1e-5)),
                       (ops.head_loss, (ask(7, 8), ask(9, 8), torch.arange(7), -100, 0.))):
        torch.library.opcheck(op.default, inputs)


@pytest.mark.parametrize("shape", [(3,), (5, 7, 48), (2, 1, 1)])
@pytest.mark.parametrize("ways", ["both", "norm", "past"])
def test_both_ways_of_a_block(shape, ways):
    norm = FusedRMSNorm(shape[-1], 1e-5)
    used = [ways != "past", ways != "norm"]
    def ours(x): return sum(y*y*u for y, u in zip(norm.branch(x), used) if u)
    def readable(x): return sum(y*y*u for y, u in zip((rmsnorm(x, norm.weight, 1e-5), x), used) if u)
    check_same(ours, readable, drawn(*shape))
    x, found = drawn(*shape).requires_grad_(), []
    for f in (ours, readable):
        norm.zero_grad()
        f(x).sum().backward()
        found.append(norm.weight.grad)
    if ways == "past": assert found == [None, None]
    else: check_close(found[0], found[1], 1e-4, 1e-5)


def test_a_branch_is_the_norm_where_somebody_watches_it(monkeypatch):
    norm, seen, x = FusedRMSNorm(8), [], torch.randn(2, 8, requires_grad=True)
    y, same = norm.branch(x)
    assert same is not x and torch.equal(same, x)
    hook = norm.register_forward_hook(lambda module, inputs, output: seen.append(output))
    y, same = norm.branch(x)
    assert same is x and seen == [y]
    hook.remove()
    for register in (norm.register_full_backward_hook, norm.register_full_backward_pre_hook):
        hook = register(lambda module, *grads: seen.append(grads))
        sum(norm.branch(x)).sum().backward()
        hook.remove()
    assert len(seen) == 3
    assert norm.double().branch(x.double())[1].dtype == torch.float64
    model, ids = TransformerLM(SMALL, parts=FUSED_PARTS), torch.zeros(1, 8, dtype=int)
    calls, back = [], fused._norm_gradients
    monkeypatch.setattr(fused, "_norm_gradients", lambda dy, past, *rest: (calls.append(past is not None), back(dy, past, *rest))[1])
    model.loss(ids, ids).backward()
    assert calls == [False] + [True]*2*SMALL.num_layers


def test_not_twice_differentiable():
    x = drawn(3, 8).requires_grad_()
    g, = torch.autograd.grad(rms_norm(x, torch.ones(8), 1e-5)[0].square().sum(), x, create_graph=True)
    with expect_error(RuntimeError, "once_differentiable"): g.sum().backward()


@pytest.mark.parametrize("ffn", ["swiglu", "gelu"])
def test_one_thread_or_two(monkeypatch, threads, ffn):
    monkeypatch.setattr(transpose, "SHARED", 1)
    ids, found = torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(0)), []
    for n in (1, 2, 3):
        threads(n)
        model = TransformerLM(replace(SMALL, qk_norm=True, ffn=ffn), parts=FUSED_PARTS)
        loss = model.loss(ids[:, :-1], ids[:, 1:])
        found.append([loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))])
    for other in found[1:]: check_close(other, found[0], 1e-5, 1e-7)


@pytest.mark.parametrize("kind", [FusedLinear, OneDNNLinear])
@pytest.mark.parametrize("ffn", ["swiglu", "gelu"])
@pytest.mark.parametrize("halves", [False, True])
def test_a_network_that_is_one_operator(kind, ffn, halves, monkeypatch):
    "The values and gradients of the readable network, and one array less to keep; whoever counts FLOPs sees the layers"
    from lmcourse.accounting.flops import flop_counter
    if kind is OneDNNLinear and not hasattr(torch.ops.mkldnn, "_linear_pointwise"): pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(onednn, "_HALVES", halves)              # Whether small products stay with torch
    x, made, found, kept, counts = drawn(3, 40, 16), [], [], [], []
    apply = fused._Network.apply
    monkeypatch.setattr(fused._Network, "apply", lambda *a: (made.append(a[1]), apply(*a))[1])
    plain, ours = FeedForward(16, 48, ffn), FusedFeedForward(16, 48, ffn, linear=kind)
    ours.load_state_dict(plain.state_dict())
    for network in (plain, ours):
        with flop_counter() as counter: network(x.clone().requires_grad_()).sum().backward()   # It watches all layers
        counts.append(counter.get_total_flops())
        network.zero_grad()
        leaf, sizes = x.clone().requires_grad_(), {}
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (sizes.update({t.data_ptr(): t.numel()}), t)[1], lambda t: t):
            (y := network(leaf)).square().sum().backward()
        found.append([y.detach(), leaf.grad, *(p.grad.clone() for p in network.parameters())])
        kept.append(list(sizes.values()).count(3*40*48))
    check_close(found[1], found[0], 1e-4, 1e-4)
    assert made == [kind] and kept[1] == (2 if ffn == "swiglu" else 1) < kept[0] and counts[0] == counts[1]
    seen = []
    for layer in (ours.w1, ours.w2):                            # Whoever watches a layer sees it called
        hook = layer.register_forward_hook(lambda *_: seen.append(1))
        check_close(torch.autograd.grad(ours(leaf).square().sum(), list(ours.parameters())), found[0][2:], 1e-4, 1e-4)
        hook.remove()
    assert seen == [1, 1] and made == [kind]
    with torch.no_grad(): check_close(ours(x), found[0][0], 1e-5, 1e-5)
    ours.w1.weight.requires_grad_(False)
    check_close(torch.autograd.grad(ours(leaf).square().sum(), ours.w2.weight)[0], found[0][-2 if ffn == "swiglu" else -1], 1e-4, 1e-4)
    biased = FusedFeedForward(16, 48, ffn, True, linear=kind)
    biased(leaf).sum().backward()
    assert biased.w2.bias.grad.eq(120).all() and made == [kind]


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_a_copy_of_the_optimizer_takes_the_same_step():
    "Branches of a trunk are copies: they must round as a run of their own does."
    w = torch.nn.Parameter(torch.randn(64, generator=torch.Generator().manual_seed(0)))
    optimizer = AdamW([w], lr=.1)
    optimizer.one_pass = True
    assert copy.deepcopy(optimizer).one_pass and not copy.deepcopy(AdamW([w])).one_pass


STEP = """
import hashlib, torch
from lmcourse.architecture import fused, fused_attention
generator = torch.Generator().manual_seed(0)
def drawn(*shape): return torch.randn(*shape, generator=generator, requires_grad=True)
def bits(*tensors): print(hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest())
def with_gradients(y, *xs): bits(y, *torch.autograd.grad(y.square().sum(), xs))
x, gain, a, b = drawn(4, 64, 32), drawn(32), drawn(4, 64, 96), drawn(4, 64, 96)
with_gradients(fused.rms_norm(x, gain, 1e-5)[0], x, gain)
with_gradients(fused.swiglu(a, b), a, b)
with_gradients(fused.fused_gelu(a), a)
rows, head = drawn(256, 32), drawn(100, 32)
with_gradients(fused.fused_loss(rows, head, torch.arange(256) % 100), rows, head)
q, k, v = (drawn(4, 2, 64, 32) for _ in "qkv")
with_gradients(fused_attention.attend_heads(q, k, v, 64)[0], q, k, v)
"""


@pytest.mark.skipif(not compiles(), reason="nothing is compiled here")
def test_the_first_process_on_a_machine_rounds_like_the_next(tmp_path):
    "A process that compiles a kernel has two copies of it, for itself and within its launcher: it must not run the one that is not saved."
    env = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    first, next_ = (subprocess.run([sys.executable, "-c", STEP], env=env, capture_output=True, text=True, check=True).stdout for _ in range(2))
    assert first == next_ and len(first.split()) == 5
