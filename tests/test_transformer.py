"The whole model: every field of its config builds, learns, keeps the future out, and changes something."
import copy
import dataclasses
import itertools
import math
import typing
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
from hypothesis import given, settings, strategies as st

from lmcourse.architecture.layers_torch import cross_entropy
from lmcourse.architecture.transformer_np import init_params
from lmcourse.architecture.transformer_torch import (InputEmbeddings, Parts, SinusoidalPositions, TransformerBlock, TransformerLM)
from lmcourse.accounting.parameters import count_parameters, parameter_table
from lmcourse.tools.checks import check_close, expect_error
from lmcourse.tools.config import FFN_KINDS, ModelConfig
from lmcourse.training.checkpoint import load_checkpoint, save_checkpoint

base = ModelConfig(vocab_size=20, context_length=12, d_model=16, num_layers=2, num_heads=4)
CHANGES = dict(vocab_size=[7], context_length=[20], d_model=[24], num_layers=[1, 3], num_heads=[2], num_kv_heads=[1, 2], head_dim=[2, 8], d_ff=[8, 40],
               norm=["layernorm", "none"], norm_position=["post", "sublayer"], norm_eps=[.1], position=["learned", "sinusoidal", "none"], rope_theta=[10.],
               rope_scaling=[dict(rope_type="linear", factor=2.), dict(rope_type="yarn", factor=4., original_max_position_embeddings=8, attention_factor=1.5)],
               ffn=[kind for kind in FFN_KINDS if kind != base.ffn], window=[1, 3], qk_norm=[True], bias=[True], tie_embeddings=[True],
               scale_embeddings=[True], z_loss=[.1], embedding_std=[.02], scaled_init=[True], copy_init=[True])
ONE = [{k: v} for k, vs in CHANGES.items() for v in vs]
BOTH = [dict(tie_embeddings=True, scale_embeddings=True), dict(tie_embeddings=True, scale_embeddings=True, position="learned"),
        dict(norm="layernorm", bias=True, norm_position="post"), dict(norm="none", norm_position="sublayer"), dict(norm="layernorm", norm_position="sublayer"),
        dict(num_kv_heads=2, window=4, qk_norm=True, head_dim=6, bias=True, tie_embeddings=True),
        dict(norm="layernorm", position="learned", ffn="gelu", bias=True, tie_embeddings=True)]


def ids_of(c, B=2, seed=0): return torch.randint(c.vocab_size, (B, c.context_length), generator=torch.Generator().manual_seed(seed))


def keys(c):
    "The names of DESIGN.md, written down a second time"
    norm = ["weight"] + ["bias"]*(c.norm == "layernorm" and c.bias)
    norm, line = norm*(c.norm != "none"), ["weight"] + ["bias"]*c.bias
    names = ["token_embeddings.weight", "lm_head.weight"] + ["position_embeddings.weight"]*(c.position == "learned")
    if c.norm_position != "post": names += [f"ln_final.{n}" for n in norm]
    for i in range(c.num_layers):
        names += [f"layers.{i}.{ln}.{n}" for ln in ("ln1", "ln2") for n in norm]
        names += [f"layers.{i}.attn.{p}_proj.{n}" for p in ("q", "k", "v", "output") for n in line]
        names += [f"layers.{i}.attn.{p}_norm.weight" for p in "qk" if c.qk_norm]
        names += [f"layers.{i}.ffn.{w}.{n}" for w in ("w1", "w2", "w3") if w != "w3" or c.gated for n in line]
    return set(names)


def formula(c):
    "Parameters, counted on paper"
    D, F, V = c.d_model, c.ffn_size, c.vocab_size
    norm = 0 if c.norm == "none" else D*(2 if c.norm == "layernorm" and c.bias else 1)
    attn = D*c.head_size*(2*c.num_heads + 2*c.kv_heads) + c.bias*(c.head_size*(c.num_heads + 2*c.kv_heads) + D) + 2*c.head_size*c.qk_norm
    ffn = D*F*(3 if c.gated else 2) + c.bias*(F*(2 if c.gated else 1) + D)
    return V*D*(1 if c.tie_embeddings else 2) + c.context_length*D*(c.position == "learned") + c.num_layers*(attn + ffn + 2*norm) + norm*(c.norm_position != "post")


def test_all_fields_are_tried():
    "Those behind z_loss are chapter 08's: tests/test_moe.py tries them."
    fields = [field.name for field in dataclasses.fields(ModelConfig)]
    assert CHANGES.keys() == {*fields[:fields.index("z_loss") + 1]}


@pytest.mark.parametrize("changes", [{}] + ONE + BOTH, ids=str)
def test_variant(changes):
    c = replace(base, **changes)
    model, ids = TransformerLM(c), ids_of(c)
    for p in model.parameters(): p.data += .05*torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
    logits = model(ids)
    assert logits.shape == (*ids.shape, c.vocab_size) and logits.dtype == torch.float32 and logits.isfinite().all()
    assert set(model.state_dict()) == keys(c) and count_parameters(model).unique == formula(c)
    cross_entropy(logits[:, :-1], ids[:, 1:], z_loss=c.z_loss).backward()
    dead = {n for n, p in model.named_parameters() if not p.grad.any()}
    if c.window == 1: dead = {n for n in dead if not any(w in n for w in ("q_proj", "k_proj"))}     # A softmax over one key
    assert not dead
    for t in (0, 7, 11):
        other = ids.clone(); other[:, t] = (ids[:, t] + 1) % c.vocab_size
        changed = (model(other) != logits).any(-1)
        assert not changed[:, :t].any() and changed[:, t].all()
        reach = c.context_length if c.window is None else t + 1 + c.num_layers*(c.window - 1)
        assert not changed[:, reach:].any()
    check_close(model(ids[0]), logits[0], 1e-4, 1e-5)
    check_close(model(ids[:, :5]), logits[:, :5], 1e-4, 1e-5)
    check_close(model(ids, torch.arange(c.context_length).expand(2, -1)), logits, 1e-4, 1e-5)


WORDS = {n: typing.get_args(h) for n, h in typing.get_type_hints(ModelConfig).items() if typing.get_origin(h) is typing.Literal}
WORDS |= dict(window=(None, 3), num_kv_heads=(None, 1))


def shaken(c):
    "A model in float64 whose biases and gains are no longer 0 and 1"
    model = TransformerLM(c, dtype=torch.float64)
    for i, p in enumerate(model.parameters()): p.data += .05*torch.randn(p.shape, generator=torch.Generator().manual_seed(i))
    return model


@pytest.mark.parametrize("position", WORDS["position"])
@pytest.mark.parametrize("norm", WORDS["norm"])
def test_the_future_never_changes_the_past(position, norm):
    "Bit for bit, for every combination of the words of a config; and in the gradients"
    for values in itertools.product(*(WORDS[n] for n in WORDS if n not in ("position", "norm"))):
        c = replace(base, position=position, norm=norm, **dict(zip([n for n in WORDS if n not in ("position", "norm")], values)))
        model, ids = shaken(c), ids_of(c, B=1)
        with torch.no_grad(): logits = model(ids)
        for t in (4, 11):
            other = ids.clone(); other[:, t:] = (ids[:, t:] + 1 + torch.arange(12 - t)) % c.vocab_size
            with torch.no_grad(): assert torch.equal(model(other)[:, :t], logits[:, :t]), (c, t)
        model.zero_grad()
        rows = model.embed(ids).detach().requires_grad_()
        model.embed = lambda *_: rows
        grad, = torch.autograd.grad(model(ids)[:, 4].sum(), rows)
        assert not grad[:, 5:].any() and grad[:, 4].any(), c


SHIFTED = [{}, dict(norm="layernorm"), dict(norm="none"), dict(norm_position="post"), dict(norm_position="sublayer"), dict(window=3), dict(num_kv_heads=2),
           dict(qk_norm=True), dict(rope_theta=10.), dict(position="none"), dict(ffn="gelu", bias=True)]


@pytest.mark.parametrize("changes", SHIFTED, ids=str)
def test_shifted_positions_leave_the_logits(changes):
    c = replace(base, **changes)
    model, ids, at = shaken(c), ids_of(c)[:, :7], torch.arange(7)
    logits = model(ids)
    for positions in (at + 5, torch.stack((at, at + 2))): check_close(model(ids, positions), logits, 1e-6, 1e-8)
    for absolute in ("learned", "sinusoidal"):
        other = shaken(replace(c, position=absolute))
        assert not torch.allclose(other(ids, at + 5), other(ids, at), atol=1e-3)
    if c.position == "rope": assert not torch.allclose(model(ids, at*11//7), logits, atol=1e-4)


@pytest.mark.parametrize("changes", [{}, dict(num_kv_heads=2), dict(num_kv_heads=1), dict(position="learned", bias=True), dict(qk_norm=True, window=3)],
                         ids=str)
def test_order_of_heads_does_not_matter(changes):
    "Key/value heads in another order, each with its query heads, and these in another order among themselves"
    c = replace(base, **changes)
    model, ids, rng = shaken(c), ids_of(c), torch.Generator().manual_seed(0)
    logits = model(ids)
    for layer in model.layers:
        groups = torch.randperm(c.kv_heads, generator=rng).roll(1)
        heads = torch.cat([g*(c.num_heads//c.kv_heads) + torch.randperm(c.num_heads//c.kv_heads, generator=rng) for g in groups])
        for name, order in (("q", heads), ("k", groups), ("v", groups)):
            for p in getattr(layer.attn, f"{name}_proj").parameters(): p.data = p.data.unflatten(0, (-1, c.head_size))[order].flatten(0, 1)
        w = layer.attn.output_proj.weight
        w.data = w.data.unflatten(1, (-1, c.head_size))[:, heads].flatten(1, 2)
    check_close(model(ids), logits)
    w.data = w.data.roll(c.head_size, 1)                                        # With the heads out of step it is another model
    assert not torch.allclose(model(ids), logits, atol=1e-3)


@pytest.mark.parametrize("changes", [{}] + ONE + BOTH, ids=str)
def test_bfloat16(changes):
    c = replace(base, **changes)
    ids, exact = ids_of(c), TransformerLM(c)
    logits = exact(ids)
    for half in (TransformerLM(c, dtype=torch.bfloat16)(ids), copy.deepcopy(exact).bfloat16()(ids)):
        assert half.dtype == torch.bfloat16
        assert (half.float() - logits).square().mean() < .001*logits.square().mean()
    with torch.autocast("cpu", torch.bfloat16): mixed = exact(ids)
    assert mixed.dtype == torch.bfloat16 and (mixed.float() - logits).square().mean() < .001*logits.square().mean()


@pytest.mark.parametrize("changes", ONE, ids=str)
def test_no_field_is_dead(changes):
    "With the old weights wherever they fit, the new model differs in its parameters, its logits, its loss or its reach"
    (field, value), = changes.items()
    c, ids = replace(base, **changes), ids_of(base) % 7
    new, old = TransformerLM(c), TransformerLM(base)
    own = new.state_dict()
    if field in ("embedding_std", "scaled_init", "copy_init"):                       # Only of the initial weights
        assert any(not torch.equal(w, old.state_dict()[n]) for n, w in own.items())
        return
    new.load_state_dict({n: w for n, w in old.state_dict().items() if n in own and own[n].shape == w.shape}, strict=False)
    if field == "context_length":
        with expect_error(ValueError, "20 tokens, but the model's context_length is 12"): old(ids_of(c))
        assert new(ids_of(c)).shape == (2, 20, 20)
        check_close(new(ids), old(ids))
    elif field == "z_loss":
        check_close(new(ids), old(ids), 0, 0)
        assert cross_entropy(new(ids), ids, z_loss=c.z_loss) > cross_entropy(old(ids), ids, z_loss=base.z_loss) + .1
    elif field == "bias":
        check_close(new(ids), old(ids), 0, 0)                           # They start at 0
        for n, p in new.named_parameters():
            if n.endswith("bias"): p.data += 1
        assert not torch.allclose(new(ids), old(ids), atol=1e-3)
    elif field != "vocab_size": assert not torch.allclose(new(ids), old(ids), atol=1e-4), "the logits are the same"


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_config_has_the_parameters_that_paper_gives(data):
    draw = lambda s: data.draw(s)
    G, group, K = draw(st.integers(1, 4)), draw(st.integers(1, 3)), 2*draw(st.integers(1, 20))
    words = {n: draw(st.sampled_from(typing.get_args(h))) for n, h in typing.get_type_hints(ModelConfig).items() if typing.get_origin(h) is typing.Literal}
    flags = {n: draw(st.booleans()) for n in ("qk_norm", "bias", "tie_embeddings", "scale_embeddings")}
    c = ModelConfig(vocab_size=draw(st.integers(1, 300)), context_length=draw(st.integers(1, 50)), d_model=2*draw(st.integers(1, 100)), head_dim=K,
                    num_layers=draw(st.integers(1, 3)), num_heads=G*group, num_kv_heads=G, d_ff=draw(st.none() | st.integers(1, 300)), **words, **flags)
    model = TransformerLM(c, device="meta")
    assert count_parameters(model) == count_parameters(c)
    if c.num_experts: return                    # Written down a second time in tests/test_moe.py
    assert count_parameters(model).unique == formula(c) and set(model.state_dict()) == keys(c)
    ids = torch.zeros(2, c.context_length, dtype=torch.long, device="meta")
    assert model(ids).shape == (2, c.context_length, c.vocab_size)


@pytest.mark.parametrize("preset, count", [("gpt2-small", 124_439_808), ("gpt2-medium", 354_823_168), ("gpt2-large", 774_030_080), ("gpt2-xl", 1_557_611_200),
    ("cs336-gpt2-small", 190_460_160), ("cs336-gpt2-medium", 505_629_696), ("cs336-gpt2-large", 1_072_469_760), ("cs336-gpt2-xl", 2_127_057_600),
    ("ts-17m", 22_696_448), ("ts-17m-cpu", 22_696_448), ("ts-36m", 35_938_816), ("owt-58m", 58_466_816), ("leaderboard-42m", 42_082_816)])
def test_published_counts(preset, count):
    assert count_parameters(TransformerLM(ModelConfig.preset(preset), device="meta")).unique == count


@pytest.mark.parametrize("preset", ModelConfig.presets())
def test_presets_build(preset):
    c = ModelConfig.preset(preset)
    model = TransformerLM(c, device="meta")
    assert count_parameters(model) == count_parameters(c)
    if c.num_experts: return                    # Written down a second time in tests/test_moe.py
    assert count_parameters(model).unique == formula(c) and set(model.state_dict()) == keys(c)


def test_norm_positions_are_their_formulas():
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
    for where, step in dict(pre=lambda x, f, n: x + f(n(x)), post=lambda x, f, n: n(x + f(x)), sublayer=lambda x, f, n: x + n(f(x))).items():
        b = TransformerBlock(replace(base, norm_position=where))
        for p in (b.ln1.weight, b.ln2.weight): p.data.normal_()
        check_close(b(x), step(step(x, b.attn, b.ln1), b.ffn, b.ln2))


@pytest.mark.parametrize("changes", [{}] + BOTH + [dict(position=p) for p in ("learned", "sinusoidal", "none")], ids=str)
def test_a_model_made_on_meta_can_be_filled(changes, tmp_path):
    c = replace(base, **changes)
    made, filled = TransformerLM(c, seed=3), TransformerLM(c, device="meta")
    assert {n: p.shape for n, p in filled.state_dict().items()} == {n: p.shape for n, p in made.state_dict().items()}
    assert all(t.is_meta for t in itertools.chain(filled.parameters(), filled.buffers()))
    filled.to_empty(device="cpu").load_state_dict(made.state_dict())
    check_close(filled(ids_of(c)), made(ids_of(c)), 0, 0)
    save_checkpoint(made, None, 1, tmp_path/"saved")
    load_checkpoint(tmp_path/"saved", again := TransformerLM(c, device="meta").to_empty(device="cpu"))
    check_close(again.loss(ids_of(c), ids_of(c)), made.loss(ids_of(c), ids_of(c)), 0, 0)


@pytest.mark.skipif(not hasattr(torch.ao.quantization, "quantize_dynamic") or torch.backends.quantized.engine == "none", reason="this torch has no dynamic quantization")
@pytest.mark.filterwarnings("ignore")
def test_torch_finds_the_linear_layers_and_quantizes_them():
    c = replace(base, bias=True)
    model = TransformerLM(c)
    small = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    quantized = [n for n, m in small.named_modules() if isinstance(m, torch.ao.nn.quantized.dynamic.Linear)]
    assert len(quantized) == 7*c.num_layers + 1 and not any(type(m) is torch.nn.Linear for m in small.modules())
    exact, found = model(ids_of(c)), small(ids_of(c))
    assert 0 < (found - exact).norm() < .1*exact.norm()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no processes")
def test_torch_shares_out_the_layers_by_columns_and_rows():
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    c, model = base, TransformerLM(base)
    expected = model(ids_of(c)), torch.autograd.grad(model.loss(ids_of(c), ids_of(c)), list(model.parameters()))
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        across, along = ColwiseParallel(), RowwiseParallel()
        plan = {f"layers.*.attn.{p}_proj": across for p in "qkv"} | {"layers.*.attn.output_proj": along}
        plan |= {"layers.*.ffn.w1": across, "layers.*.ffn.w3": across, "layers.*.ffn.w2": along}
        plan |= {"token_embeddings": ColwiseParallel(output_layouts=Replicate())}
        parallelize_module(model, mesh, plan)
        assert sum(isinstance(p, DTensor) for p in model.parameters()) == 7*c.num_layers + 1
        check_close(model(ids_of(c)), expected[0], 1e-6)
        grads = torch.autograd.grad(model.loss(ids_of(c), ids_of(c)), list(model.parameters()))
        check_close([g.full_tensor() if isinstance(g, DTensor) else g for g in grads], list(expected[1]), 1e-5, 1e-7)
    finally: torch.distributed.destroy_process_group()


def test_tied_weights_stay_tied():
    c = replace(base, tie_embeddings=True)
    for move in (lambda m: m, lambda m: m.double().float(), copy.deepcopy, lambda m: m.to("meta").to_empty(device="cpu")):
        model = move(TransformerLM(c))
        assert model.lm_head.weight is model.token_embeddings.weight
        assert len(list(model.parameters())) == len(model.state_dict()) - 1
    filled = TransformerLM(c, device="meta").to_empty(device="cpu")
    filled.load_state_dict(TransformerLM(c, seed=3).state_dict())
    check_close(filled(ids_of(c)), TransformerLM(c, seed=3)(ids_of(c)))
    assert TransformerLM(base).lm_head.weight is not TransformerLM(base).token_embeddings.weight


@pytest.mark.parametrize("changes", [{}, dict(position="learned"), dict(tie_embeddings=True), dict(bias=True)], ids=str)
def test_seeds(changes):
    c, before = replace(base, **changes), torch.get_rng_state()
    one, same, other = TransformerLM(c), TransformerLM(c, seed=0), TransformerLM(c, seed=1)
    check_close(one.state_dict(), same.state_dict(), 0, 0)
    assert torch.equal(before, torch.get_rng_state())
    for (n, p), q in zip(one.named_parameters(), other.parameters()): assert torch.equal(p, q) == (p.ndim == 1), n


def test_heads_can_start_as_copiers():
    "A row alone is doubled; later rows get a mixture of those up to them; all other weights start as without the field."
    for changes in ({}, dict(scaled_init=True), dict(tie_embeddings=True, bias=True)):
        c = replace(base, norm="none", **changes)
        plain, model, params = TransformerLM(c), TransformerLM(replace(c, copy_init=True)), init_params(replace(c, copy_init=True))
        x, share = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(0)), .5 if c.scaled_init else 1.
        for layer in model.layers:
            y = layer(x)
            check_close(y[:, 0], (1 + share)*x[:, 0])
            low, high = (torch.stack([f(x[:, :t + 1], 1).values for t in range(5)], 1) for f in (torch.min, torch.max))
            assert (y <= x + share*high + 1e-5).all() and (y >= x + share*low - 1e-5).all()
        for (name, p), (same, q) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
            copier = name.endswith(("v_proj.weight", "output_proj.weight", "w2.weight"))
            assert name == same and torch.equal(p, q) != copier, name
            if copier: check_close(params[name], p.detach(), 0, 0, name)
    for changes, words in ((dict(num_kv_heads=2), "copy_init = True with 4 query heads and 2 key heads of size 4"), (dict(head_dim=6), "4 key heads of size 6"),
                           (dict(num_experts=4), "num_experts = 4 with copy_init = True, expected num_experts = none"),
                           (dict(kv_lora_rank=8), "kv_lora_rank = 8 with copy_init = True")):
        with expect_error(ValueError, words): replace(base, copy_init=True, **changes)
    class Odd(torch.nn.Module):
        def __init__(self, config, **_): super().__init__()
    with expect_error(ValueError, "copy_init = True with Odd, expected a feed-forward network whose last matrix is w2"):
        TransformerBlock(replace(base, copy_init=True), parts=Parts(ffn=Odd))


def test_learned_positions_start_as_large_as_tokens():
    for tied, scaled in ((False, False), (False, True), (True, False), (True, True)):
        m = InputEmbeddings(replace(base, vocab_size=999, context_length=999, position="learned", tie_embeddings=tied, scale_embeddings=scaled))
        size = (16**-.5 if tied else 1)*(4 if scaled else 1)
        check_close([(m.token_embeddings.weight*m.scale).std().item(), m.position_embeddings.weight.std().item()], [size*.9866]*2, rtol=.03)


def test_sinusoids():
    places, t = SinusoidalPositions(300, 6, dtype=torch.float64), 217
    expected = [f(t*10_000**(-2*i/6)) for i in range(3) for f in (math.sin, math.cos)]
    check_close(places(torch.tensor([t])), torch.tensor([expected], dtype=torch.float64))
    model = TransformerLM(replace(base, position="sinusoidal"))
    check_close(model.bfloat16().position_embeddings.table, SinusoidalPositions(12, 16).table, 0, 0)


@pytest.mark.parametrize("changes", [dict(vocab_size=1000), dict(vocab_size=1000, norm="layernorm"), dict(vocab_size=1000, d_model=64, norm_position="post"),
                                     dict(vocab_size=1000, position="learned", ffn="gelu")], ids=str)
def test_loss_at_the_start(changes):
    c = replace(base, context_length=64, **changes)
    ids = ids_of(c, B=17)
    with torch.no_grad(): logits = TransformerLM(c)(ids[:-1])
    check_close(cross_entropy(logits, ids[1:]).item(), math.log(1000) + logits.var().item()/2, rtol=.005)


def test_a_few_steps_learn():
    c = replace(base, tie_embeddings=True, scale_embeddings=True)
    model, ids = TransformerLM(c), ids_of(c)
    opt, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(60):
        losses.append(cross_entropy(model(ids[:, :-1]), ids[:, 1:]))
        opt.zero_grad(); losses[-1].backward(); opt.step()
    assert losses[-1] < .1 < 2 < losses[0]


class Kept:
    def __init__(self): self.kv = None
    def update(self, *kv):
        self.kv = kv if self.kv is None else tuple(torch.cat(pair, -2) for pair in zip(self.kv, kv))
        return self.kv


@pytest.mark.parametrize("changes", [{}, dict(position="learned"), dict(position="sinusoidal"), dict(num_kv_heads=2, window=3, qk_norm=True)], ids=str)
def test_parts_with_a_cache_are_the_whole(changes):
    c = replace(base, **changes)
    model, ids, cache = TransformerLM(c), ids_of(c), [Kept() for _ in range(c.num_layers)]
    parts = [model(ids[:, a:b], torch.arange(a, b), cache) for a, b in ((0, 4), (4, 5), (5, 6), (6, 12))]
    check_close(torch.cat(parts, 1), model(ids), 1e-4, 1e-5)


def test_bad_input():
    model = TransformerLM(base)
    with expect_error(ValueError, "13 tokens, but the model's context_length is 12"): model(torch.zeros(1, 13, dtype=torch.long))
    with expect_error(IndexError, "id 20 is not in a table of 20: expected 0 to 19"): model(torch.tensor([[0, 20]]))
    with expect_error(IndexError, "id -1 is not in a table of 20"): model(torch.tensor([[3, -1]]))
    with expect_error(IndexError, "id -7 is not in a table of 20"): model(torch.tensor([[22, -7]]))
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.uint8):
        with expect_error(TypeError, f"ids are {dtype}, expected torch.int64"): model(torch.zeros(1, 3, dtype=dtype))
    with expect_error(ValueError, "ids have no dimension"): model(torch.tensor(3))
    with expect_error(ValueError, "a cache needs positions"): model(torch.zeros(1, 3, dtype=torch.long), cache=[Kept(), Kept()])
    assert model(torch.zeros(2, 0, dtype=torch.long)).shape == (2, 0, 20)
    assert model(torch.zeros(2, 3, dtype=torch.int32)).shape == (2, 3, 20)


@pytest.mark.parametrize("position", ["rope", "learned", "sinusoidal"])
def test_positions_beyond_the_context(position):
    model, ids = TransformerLM(replace(base, position=position)), torch.zeros(1, 4, dtype=torch.long)
    assert model(ids, torch.arange(8, 12)).shape == (1, 4, 20)
    for positions, worst in ((torch.arange(9, 13), 12), (torch.arange(-1, 3), -1)):
        with pytest.raises((IndexError, ValueError), match=str(worst)): model(ids, positions)
    with pytest.raises(TypeError, match="torch.float32"): model(ids, torch.arange(4.))


def test_the_checks_leave_compiler_and_exporter_alone():
    model, ids, at = TransformerLM(base), ids_of(base)[:, :7], torch.arange(2, 9)
    compiled = torch.compile(model, backend="eager", fullgraph=True)    # `fullgraph`: an error where Python has to look at a number
    check_close(compiled(ids), model(ids), 1e-4, 1e-5)
    check_close(compiled(ids, at), model(ids, at), 1e-4, 1e-5)
    torch._dynamo.reset()
    check_close(torch.export.export(model, (ids,)).module()(ids), model(ids), 1e-4, 1e-5)


def test_parameter_table_adds_up():
    for c in (base, replace(base, tie_embeddings=True, bias=True, norm="layernorm", qk_norm=True)):
        model = TransformerLM(c)
        *rows, total = parameter_table(model).rows
        assert sum(r["parameters"] for r in rows) == total["parameters"] == count_parameters(model).unique
        assert sum(r["tensors"] for r in rows) == total["tensors"] == len([*model.parameters()])
        shared = [r["parameter"] for r in rows if "shared" in r["shape"]]
        assert shared == (["lm_head.weight"] if c.tie_embeddings else [])
