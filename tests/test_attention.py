"Attention: against torch's own, against the formula, and what must not change."
import copy
from dataclasses import replace
from functools import partial

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

from lmcourse.architecture import attention_torch
from lmcourse.architecture.attention_torch import (CausalSelfAttention, RoPE, apply_rope, apply_rope_half, causal_attention, causal_mask,
    rope_tables, scaled_dot_product_attention)
from lmcourse.architecture.layers_torch import check_same, rmsnorm, check_index
from lmcourse.tools.checks import check_close, expect_error
from lmcourse.tools.config import ModelConfig

few = settings(max_examples=25, deadline=None)
leads = st.lists(st.integers(1, 3), max_size=3).map(tuple)
sizes, seeds = st.integers(1, 7), st.integers(0, 1000)


def randn(*shape, seed=0, dtype=torch.float64): return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@few
@given(leads, sizes, sizes, sizes, st.booleans(), seeds)
def test_formula_is_torchs(lead, T, S, K, masked, seed):
    q, k, v = (randn(*lead, n, K, seed=seed + i) for i, n in enumerate((T, S, S)))
    mask = torch.rand(T, S, generator=torch.Generator().manual_seed(seed)) < .6 if masked else None
    check_same(partial(scaled_dot_product_attention, mask=mask), partial(F.scaled_dot_product_attention, attn_mask=mask), q, k, v)


@few
@given(leads, st.sampled_from([(1, 1), (4, 1), (4, 2), (6, 3), (3, 3)]), sizes, sizes, st.one_of(st.none(), sizes), seeds)
def test_fast_form_is_the_formula(lead, heads, T, more, window, seed):
    (H, G), S, K = heads, T + more - 1, 4
    q, k, v = randn(*lead, H, T, K, seed=seed), randn(*lead, G, S, K, seed=seed + 1), randn(*lead, G, S, K, seed=seed + 2)
    mask = torch.tensor([[j <= i + S - T and (window is None or j > i + S - T - window) for j in range(S)] for i in range(T)])
    assert torch.equal(mask, causal_mask(T, S, window))
    def formula(q, k, v): return scaled_dot_product_attention(q, k.repeat_interleave(H//G, -3), v.repeat_interleave(H//G, -3), mask)
    check_same(formula, partial(causal_attention, window=window), q, k, v)


def test_a_query_that_sees_nothing_gets_nothing():
    q, k, v = (randn(2, 3, 4, seed=i).requires_grad_() for i in range(3))
    mask = torch.tensor([[True, True, False], [False, False, False], [False, True, True]])
    y = scaled_dot_product_attention(q, k, v, mask)
    y.sum().backward()
    assert not y[:, 1].any() and y[:, 0].all() and not q.grad[:, 1].any() and all(z.grad.isfinite().all() for z in (q, k, v))


def test_masks_broadcast_and_are_checked():
    q, k, v = randn(2, 3, 4, 8), randn(2, 3, 5, 8), randn(2, 3, 5, 8)
    for shape in ((5,), (4, 5), (4, 1), (2, 1, 1, 5), (2, 3, 4, 5)):
        mask = torch.ones(shape, dtype=torch.bool)
        check_close(scaled_dot_product_attention(q, k, v, mask), scaled_dot_product_attention(q, k, v))
    for shape in ((5, 4), (3, 4, 4), (7, 2, 3, 4, 5)):
        with expect_error(ValueError, str(shape)): scaled_dot_product_attention(q, k, v, torch.ones(shape, dtype=torch.bool))
    with expect_error(TypeError, "torch.int64"): scaled_dot_product_attention(q, k, v, torch.ones(4, 5, dtype=torch.long))
    with expect_error(TypeError, "torch.float64"): scaled_dot_product_attention(q, k, v, randn(4, 5))
    with expect_error(ValueError, "5 queries at the end of 4 keys"): causal_mask(5, 4)


@pytest.mark.parametrize("H, G", [(6, 4), (4, 6), (1, 2)])
def test_heads_that_do_not_divide_are_refused(H, G):
    q, k = randn(2, H, 3, 4), randn(2, G, 3, 4)
    with expect_error(ValueError, f"{H} query heads can't be shared out among {G} key/value heads"): causal_attention(q, k, k)
    with expect_error(ValueError, f"num_heads = {H} is not a multiple of num_kv_heads = {G}"): ModelConfig(d_model=24, num_heads=H, num_kv_heads=G)


@pytest.mark.parametrize("window", [0, -1])
def test_windows_that_see_nothing_are_refused(window):
    q = randn(2, 3, 5, 4)
    with expect_error(ValueError, f"window = {window}, expected 1 or more"): causal_mask(5, window=window)
    with expect_error(ValueError, f"window = {window}, expected 1 or more"): causal_attention(q, q, q, window)


@few
@given(leads, st.integers(1, 9), st.integers(1, 5), st.sampled_from([10., 10_000., 1e6]), seeds)
def test_rope_is_a_complex_multiplication(lead, T, pairs, theta, seed):
    x = randn(*lead, T, 2*pairs, seed=seed)
    angle = torch.outer(torch.arange(T).double(), theta**(-torch.arange(pairs).double()/pairs))
    z = torch.view_as_complex(x.unflatten(-1, (-1, 2)))*torch.polar(torch.ones_like(angle), angle)
    cos, sin = rope_tables(T, 2*pairs, theta, torch.float64)
    with pytest.raises(ValueError, match="theta = 0, expected more than 0"): rope_tables(T, 2*pairs, 0)
    check_close(apply_rope(x, cos, sin), torch.view_as_real(z).flatten(-2))
    check_same(lambda x: apply_rope(x, cos, sin), RoPE(T + 2, 2*pairs, theta, dtype=torch.float64), x)
    check_close(apply_rope(x, cos, sin).norm(dim=-1), x.norm(dim=-1))


@few
@given(leads, st.integers(1, 9), st.integers(1, 5), st.sampled_from(["float64", "float32", "bfloat16"]), seeds)
def test_rope_as_a_gpu_compiles_it_is_the_same(lead, T, pairs, dtype, seed):
    dtype = getattr(torch, dtype)
    x, table = randn(*lead, T, 2*pairs, seed=seed).to(dtype), RoPE(T, 2*pairs, dtype=dtype).at(T)
    near = dict(rtol=1e-9 if dtype == torch.float64 else 1e-5, atol=1e-9 if dtype == torch.float64 else 1e-5)
    check_close(attention_torch._rotate_swapped(x, table).double(), attention_torch._rotate(x, table).double(), **near if dtype != torch.bfloat16 else dict(rtol=1e-2))
    if dtype == torch.float64: check_same(lambda x: attention_torch._rotate(x, table), lambda x: attention_torch._rotate_swapped(x, table), x)


@few
@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 50), seeds)
def test_rope_scores_know_distances_only(t, s, shift, seed):
    rope = RoPE(100, 8, dtype=torch.float64)
    q, k = randn(1, 8, seed=seed), randn(1, 8, seed=seed + 1)
    at = lambda x, position: rope(x, torch.tensor([position]))
    check_close(at(q, t)@at(k, s).T, at(q, t + shift)@at(k, s + shift).T, atol=1e-12)


def half_order(K): return torch.tensor([*range(0, K, 2), *range(1, K, 2)])


@few
@given(leads, st.integers(1, 9), st.integers(1, 5), st.sampled_from([10., 10_000., 1e6]), seeds)
def test_both_layouts_are_one_function(lead, T, pairs, theta, seed):
    x, order, tables = randn(*lead, T, 2*pairs, seed=seed), half_order(2*pairs), rope_tables(T, 2*pairs, theta, torch.float64)
    check_close(apply_rope_half(x[..., order], *tables), apply_rope(x, *tables)[..., order])
    check_same(lambda x: apply_rope(x, *tables), lambda x: apply_rope_half(x[..., order], *tables)[..., order.argsort()], x)
    for half in (torch.bfloat16, torch.float16):
        y = apply_rope_half(x.to(half), *(t.float() for t in tables))
        assert y.dtype == half
        check_close(y.double(), apply_rope_half(x, *tables), rtol=.02, atol=.02)


@pytest.mark.parametrize("changes", [dict(), dict(num_kv_heads=2), dict(num_kv_heads=1, qk_norm=True, bias=True, head_dim=8)], ids=str)
def test_a_layer_in_the_other_layout(changes):
    "The rows of query and key weights in the other order, head by head, gains and biases too; then the half-split rotation gives the same layer"
    layer, x = layer_of(**changes), randn(2, 12, 24)
    c = replace(config, **changes)
    y, order = layer(x), half_order(c.head_size)
    moved = copy.deepcopy(layer)
    for name, w in moved.named_parameters():
        if name[:6] in ("q_proj", "k_proj"): w.data = w.data.unflatten(0, (-1, c.head_size))[:, order].flatten(0, 1)
        if name[:6] in ("q_norm", "k_norm"): w.data = w.data[order]
    q, k, v = (getattr(moved, f"{n}_proj")(x).unflatten(-1, (-1, c.head_size)).transpose(1, 2) for n in "qkv")
    if c.qk_norm: q, k = moved.q_norm(q), moved.k_norm(k)
    tables = rope_tables(12, c.head_size, dtype=torch.float64)
    out = causal_attention(apply_rope_half(q, *tables), apply_rope_half(k, *tables), v)
    check_close(moved.output_proj(out.transpose(1, 2).flatten(2)), y)
    assert not torch.allclose(moved(x), y, atol=1e-3), "the order of the rows did not matter"


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), lambda x: x.mT.contiguous().mT,
                                  lambda x: F.pad(x, (1, 0))[..., 1:], lambda x: F.pad(x, (0, 1))[..., :-1],
                                  lambda x: F.pad(x, (1, 1))[..., 1:-1], lambda x: x.repeat_interleave(2, -1)[..., ::2]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_rope_takes_any_memory_layout(view, dtype):
    x, rope = randn(2, 3, 5, 8).to(dtype), RoPE(9, 8)
    y = rope(view(x))
    assert y.dtype == dtype
    check_close(y, apply_rope(x, *rope_tables(5, 8)), rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)


def test_rope_positions():
    rope, x = RoPE(20, 8), randn(2, 3, 4, 8)
    whole = rope(x)
    check_close(rope(x, torch.arange(4)), whole)
    check_close(rope(x, torch.arange(4).expand(2, 1, 4)), whole)
    own = torch.tensor([[0, 1, 2, 3], [9, 3, 11, 19]])
    for b in range(2): check_close(rope(x, own[:, None])[b], rope(x[b], own[b]))
    with expect_error(ValueError, "21 positions, but RoPE was made for 20"): rope(randn(21, 8))
    check_close(rope(x, torch.tensor([3])), rope(x, torch.tensor([3]*4)))           # Broadcasts
    check_close(rope(x, torch.arange(4, dtype=torch.int32)), whole)
    for T in (3, 5):
        with expect_error(ValueError, f"positions ({T},) don't fit 4 tokens"): rope(x, torch.arange(T))
    with expect_error(IndexError, "position 20 is not in a table of 20: expected 0 to 19"): rope(x, torch.arange(17, 21))
    with expect_error(IndexError, "position -2 is not in a table of 20"): rope(x, torch.arange(-2, 2))
    with expect_error(TypeError, "positions are torch.float32"): rope(x, torch.arange(4.))
    with expect_error(ValueError, "head_dim = 7 is odd"): RoPE(20, 7)


@pytest.mark.parametrize("index, size, worst", [([0, 7], 8, None), ([], 8, None), ([8], 8, 8), ([-1], 8, -1), ([-1, 9], 8, 9), ([-3, 9], 8, -3),
                                                ([-2, 9], 8, 9), ([0], 0, 0)], ids=str)
def test_check_index_names_the_worst(index, size, worst):
    for dtype in (torch.int64, torch.int32):
        bad = torch.tensor(index, dtype=dtype)
        if worst is None: check_index(bad, size, "token id", "a vocabulary")
        else:
            with expect_error(IndexError, f"token id {worst} is not in a vocabulary of {size}: expected 0 to {size - 1}"):
                check_index(bad, size, "token id", "a vocabulary")
    for dtype in (torch.float32, torch.bool, torch.uint8, torch.int16):
        with expect_error(TypeError, f"token ids are {dtype}, expected torch.int64"): check_index(torch.zeros(2, dtype=dtype), size, "token id", "a vocabulary")


class OnGpu:
    "As much of a GPU tensor as the check may touch without waiting for it"
    dtype, device = torch.int64, torch.device("cuda")
    def numel(self): return 1


def test_check_index_does_not_look_where_it_should_not(monkeypatch):
    for index in (torch.tensor([9], device="meta"), OnGpu()): check_index(index, 8, "position", "a table")
    with monkeypatch.context() as m:
        m.setattr(torch.jit, "is_tracing", lambda: True)
        check_index(torch.tensor([9]), 8, "position", "a table")
    seen = torch.vmap(lambda i: (check_index(i, 8, "position", "a table"), i + 1)[1])(torch.tensor([[1], [9]]))
    check_close(seen, torch.tensor([[2], [10]]))


def test_tables_follow_their_module_unrounded():
    exact = torch.stack(rope_tables(500, 8, dtype=torch.float64), -1)
    for move in (lambda m: m, lambda m: m.bfloat16(), lambda m: m.half().float(), lambda m: m.to(torch.bfloat16), copy.deepcopy,
                 copy.deepcopy, lambda m: m.to("meta").to_empty(device="cpu")):
        check_close(move(RoPE(500, 8)).table, exact.float(), 0, 0)
    check_close(RoPE(500, 8).float().double().table, exact, 0, 0)
    assert RoPE(500, 8, device="meta").table.is_meta and not RoPE(500, 8).state_dict()


config = ModelConfig(vocab_size=10, context_length=12, d_model=24, num_heads=6, head_dim=4)
VARIANTS = [dict(), dict(num_kv_heads=1), dict(num_kv_heads=2), dict(window=1), dict(window=3), dict(qk_norm=True), dict(bias=True), dict(position="none"),
            dict(num_kv_heads=3, window=5, qk_norm=True, bias=True, head_dim=8)]


def layer_of(**changes):
    layer = CausalSelfAttention(replace(config, **changes), dtype=torch.float64)
    for i, p in enumerate(layer.parameters()): p.data += .3*randn(*p.shape, seed=i)
    return layer


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_layer(changes):
    layer, x = layer_of(**changes), randn(2, 12, 24)
    c = replace(config, **changes)
    shapes = {"q_proj": (c.num_heads*c.head_size, 24), "k_proj": (c.kv_heads*c.head_size, 24), "v_proj": (c.kv_heads*c.head_size, 24), "output_proj": (24, c.num_heads*c.head_size)}
    expected = {f"{n}.weight": s for n, s in shapes.items()}
    if c.bias: expected |= {f"{n}.bias": s[:1] for n, s in shapes.items()}
    if c.qk_norm: expected |= {"q_norm.weight": (c.head_size,), "k_norm.weight": (c.head_size,)}
    check_close({n: tuple(w.shape) for n, w in layer.state_dict().items()}, expected)
    y = layer(x)
    check_close(layer(x[1]), y[1])                                      # Without a batch
    check_close(layer(x, torch.arange(12).expand(2, 12)), y)
    check_close(layer(x, torch.arange(12))[:, :7], layer(x[:, :7]))     # A shorter text
    for t in (0, 5, 11):
        other = x.clone(); other[:, t] += 1
        changed = (layer(other) != y).any(-1).any(0).tolist()
        assert changed == [t <= s and (c.window is None or s < t + c.window) for s in range(12)]


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_gradients_reach_all(changes):
    layer, x = layer_of(**changes), randn(2, 12, 24).requires_grad_()
    layer(x).square().sum().backward()
    assert x.grad.abs().sum(-1).min() > 0
    for name, p in layer.named_parameters():
        assert p.grad.abs().max() > 0, name
    assert torch.autograd.gradcheck(layer, randn(1, 3, 24).requires_grad_())


def test_layer_is_its_formula():
    layer, x = layer_of(rope_theta=10., norm_eps=.1, qk_norm=True, num_kv_heads=2, window=5, bias=True), randn(2, 12, 24)
    line = lambda name, x: x@getattr(layer, name).weight.T + getattr(layer, name).bias
    q, k, v = (line(f"{n}_proj", x).unflatten(-1, (-1, 4)).transpose(1, 2) for n in "qkv")
    cos, sin = rope_tables(12, 4, 10., torch.float64)
    q, k = (apply_rope(rmsnorm(z, norm.weight, .1), cos, sin) for z, norm in ((q, layer.q_norm), (k, layer.k_norm)))
    y = scaled_dot_product_attention(q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1), causal_mask(12, window=5))
    check_close(layer(x), line("output_proj", y.transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_shifted_positions_give_the_same(changes):
    layer, x, at = layer_of(**changes), randn(2, 7, 24), torch.arange(7)
    for shift in (1, 5): check_close(layer(x, at + shift), layer(x, at), 1e-6, 1e-9)
    own = torch.stack((at, at + 3))                                     # Each sequence by its own
    check_close(layer(x, own), layer(x, at), 1e-6, 1e-9)
    if layer.rope is not None and layer.window != 1:                    # A window of 1 sees no distances
        assert not torch.allclose(layer(x, at*11//7), layer(x, at), atol=1e-3)
        with expect_error(IndexError, "position 12 is not in a table of 12"): layer(x, at + 6)


@pytest.mark.parametrize("G", [1, 2, 6])
def test_the_cache_holds_what_the_formula_says(G):
    layer, kept = CausalSelfAttention(replace(config, num_kv_heads=G), device="meta", dtype=torch.bfloat16), Kept()
    assert layer(torch.empty(3, 12, 24, device="meta", dtype=torch.bfloat16), None, kept).shape == (3, 12, 24)
    assert sum(z.nbytes for z in kept.kv) == 3*12*2*G*4*2              # B T · keys and values · G K · bytes


def test_order_of_heads_does_not_matter():
    layer, x = layer_of(num_kv_heads=3), randn(2, 12, 24)
    y, w = layer(x), layer.state_dict()
    order = torch.tensor([2, 0, 1])                                     # Of key/value heads; each brings its two query heads
    rows = lambda m, n: m.unflatten(0, (3, n))[order].flatten(0, 1)
    layer.load_state_dict({"q_proj.weight": rows(w["q_proj.weight"], 8), "k_proj.weight": rows(w["k_proj.weight"], 4),
                           "v_proj.weight": rows(w["v_proj.weight"], 4), "output_proj.weight": rows(w["output_proj.weight"].T, 8).T})
    check_close(layer(x), y)


def test_rope_is_shared_when_given():
    rope = RoPE(12, 4)
    assert CausalSelfAttention(config, rope).rope is rope and CausalSelfAttention(config).rope is not rope
    assert CausalSelfAttention(replace(config, position="learned"), rope).rope is None


class Kept:
    def __init__(self): self.kv = None
    def update(self, *kv):
        self.kv = kv if self.kv is None else tuple(torch.cat(pair, -2) for pair in zip(self.kv, kv))
        return self.kv


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
@pytest.mark.parametrize("cuts", [(0, 12), (0, 1, 2, 3, 12), (0, 6, 7, 8, 10, 12)], ids=str)
def test_parts_with_a_cache_are_the_whole(changes, cuts):
    layer, x, kept = layer_of(**changes), randn(2, 12, 24), Kept()
    parts = [layer(x[:, a:b], torch.arange(a, b), kept) for a, b in zip(cuts, cuts[1:])]
    check_close(torch.cat(parts, 1), layer(x))


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_bfloat16(changes):
    layer, x = layer_of(**changes).float(), randn(2, 12, 24).float()
    y = layer(x)
    half = layer.bfloat16()(x.bfloat16())
    assert half.dtype == torch.bfloat16
    check_close(half.float(), y, rtol=.05, atol=.05*y.abs().max().item())


@pytest.mark.parametrize("dtype, window, repeated", [(torch.float32, None, True), (torch.float32, 3, True), (torch.bfloat16, 3, True), (torch.bfloat16, None, False),
                                                     (torch.float16, None, True)])
def test_on_a_gpu_shared_heads_never_fall_back_to_a_table_of_all_pairs(monkeypatch, dtype, window, repeated):
    "There only the flash kernel takes them, which knows 16 bits and no mask and needs a card that knows bfloat16; the others get each key once a query head"
    from torch._subclasses import FakeTensorMode
    asked, real = [], F.scaled_dot_product_attention
    def look(q, k, v, mask, **how): asked.append((k.shape[-3], how["enable_gqa"])); return real(q, k, v, mask, **how)
    monkeypatch.setattr(F, "scaled_dot_product_attention", look)
    monkeypatch.setattr(attention_torch, "causal_mask", lambda T, S, window, device: torch.empty(T, S, dtype=torch.bool, device=device))
    with FakeTensorMode():
        for device in ("cuda", "cpu"):
            q, kv = (torch.empty(2, heads, 16, 8, device=device, dtype=dtype) for heads in (6, 2))
            assert causal_attention(q, kv, kv, window).shape == q.shape
    assert asked == [(6, False) if repeated else (2, True), (2, True)]

def test_every_key_needs_a_value(): # torch's kernel would leave out the last key
    q, k = torch.randn(2, 4, 7, 8), torch.randn(2, 2, 7, 8)
    with pytest.raises(ValueError, match=r"keys \(2, 2, 7, 8\) and values \(2, 2, 6, 8\)"): causal_attention(q, k, k[:, :, :6])
