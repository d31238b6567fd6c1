"What later chapters add to a model comes from outside: a feed-forward network, a kernel, split matrices, an adapter, each without an edit of chapter 03."
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F
from torch import nn

import lmcourse
from test_accounting import PLAIN, live_bytes, run as run_counted
from lmcourse.accounting.model_flops import training_flops
from lmcourse.accounting.activations import activation_bytes
from lmcourse.accounting.memory import peak_phase, training_bytes
from lmcourse.accounting.parameters import count_parameters
from lmcourse.app.cli import parse
from lmcourse.architecture.attention_torch import CausalSelfAttention, causal_attention, scaled_dot_product_attention, causal_mask
from lmcourse.architecture.fast_np import fast_loss_and_grads
from lmcourse.architecture.layers_np import ACTIVATIONS_NP, RowGradient, ffn_forward
from lmcourse.architecture.layers_torch import ACTIVATIONS, Embedding, FeedForward, Linear, linear_cross_entropy
from lmcourse.architecture.pretrained import params_of
from lmcourse.architecture.transformer_np import loss_and_grads
from lmcourse.architecture.transformer_torch import FFN_MODULES, Parts, TransformerLM
from lmcourse.generation.generate import generate
from lmcourse.inference.engine import Engine, Request, replay
from lmcourse.inference.fast_decoder import FastDecoder, NumpyDecoder
from lmcourse.inference.kv_cache import CachedDecoder
from lmcourse.inference.quantization import quantize, quantize_model
from lmcourse.tools.checks import check_close, expect_error
from lmcourse.tools.config import FFN_KINDS, FFNKind, ModelConfig, register_ffn

CONFIG = ModelConfig(vocab_size=50, context_length=24, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, d_ff=48)
IDS = torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(0))


class ReluSquared(nn.Module):
    "So et al. 2021: the square of what is above 0."
    def __init__(self, config, linear=Linear, **more):
        super().__init__()
        self.up, self.down = linear(config.d_model, config.ffn_size, **more), linear(config.ffn_size, config.d_model, **more)

    def forward(self, x): return self.down(F.relu(self.up(x)).square())


class Experts(nn.Module):
    "Each token goes to one of three networks."
    def __init__(self, config, linear=Linear, **more):
        super().__init__()
        self.router = linear(config.d_model, 3, **more)
        self.experts = nn.ModuleList(FeedForward(config.d_model, config.ffn_size, "swiglu", linear=linear, **more) for _ in range(3))

    def forward(self, x):
        shares = self.router(x).softmax(-1)
        first = shares.argmax(-1, keepdim=True)
        every = torch.stack([expert(x) for expert in self.experts], -2)                # (..., E, D)
        return every.gather(-2, first[..., None].expand(*first.shape, x.shape[-1]))[..., 0, :]*shares.gather(-1, first)


def kernel(q, k, v, window=None):
    "Attention by the formula, in the place of a kernel."
    k, v = (t.repeat_interleave(q.shape[-3]//t.shape[-3], -3) for t in (k, v))
    return scaled_dot_product_attention(q, k, v, causal_mask(q.shape[-2], k.shape[-2], window))


class SplitLinear(nn.Module):
    "The rows of the weight in two halves, as two GPUs would hold them."
    def __init__(self, d_in, d_out, **more):
        super().__init__()
        whole = Linear(d_in, d_out, **more)
        self.halves = nn.ParameterList(whole.weight.detach().chunk(2))

    @property
    def weight(self): return torch.cat(list(self.halves))

    def forward(self, x): return torch.cat([F.linear(x, w) for w in self.halves], -1)


class LoRA(nn.Module):
    "Hu et al. 2021: a matrix that stays, and two small ones that learn."
    def __init__(self, linear, rank=2):
        super().__init__()
        self.linear, self.a, self.b = linear, nn.Parameter(torch.randn(rank, linear.in_features)), nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x): return self.linear(x) + x@self.a.T@self.b.T


def with_lora(model):
    model.requires_grad_(False)
    for layer in model.layers:
        for name in ("q_proj", "v_proj"): setattr(layer.attn, name, LoRA(getattr(layer.attn, name)))
    return model


TOYS = {"relu squared": lambda: TransformerLM(CONFIG, parts=Parts(ffn=ReluSquared)), "experts": lambda: TransformerLM(CONFIG, parts=Parts(ffn=Experts)),
        "kernel": lambda: TransformerLM(CONFIG, parts=Parts(attention=kernel)), "split": lambda: TransformerLM(CONFIG, parts=Parts(linear=SplitLinear)),
        "LoRA": lambda: with_lora(TransformerLM(CONFIG))}


@pytest.mark.parametrize("name", ["kernel", "split", "LoRA"])
def test_what_computes_the_same_gives_the_same(name):
    plain, other = TransformerLM(CONFIG), TOYS[name]()
    check_close(other(IDS), plain(IDS), 1e-4, 1e-5)
    check_close(other.loss(IDS[:, :-1], IDS[:, 1:]), plain.loss(IDS[:, :-1], IDS[:, 1:]), 1e-5)


@pytest.mark.parametrize("name", TOYS)
def test_it_learns(name):
    model = TOYS[name]()
    some = [p for p in model.parameters() if p.requires_grad]
    assert name != "LoRA" or len(some) == 2*2*2
    before, optimizer = [p.detach().clone() for p in model.parameters()], torch.optim.AdamW(some, lr=1e-2)
    losses = []
    for _ in range(12):
        losses.append(model.loss(IDS[:, :-1], IDS[:, 1:]))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0] - .1
    for p, w in zip(model.parameters(), before): assert p.requires_grad or torch.equal(p, w)


@pytest.mark.parametrize("name", TOYS)
def test_it_writes_with_every_cache_and_in_company(name):
    model = TOYS[name]().eval()
    requests = [Request(tuple(IDS[k, :5 + k].tolist()), 8, temperature=0.) for k in range(2)]
    texts = [list(generate(model, r.ids, 8, temperature=0.)) for r in requests]
    assert [list(generate(model, r.ids, 8, temperature=0., decoder=CachedDecoder)) for r in requests] == texts
    assert [s.tokens for s in replay(Engine(model, block_size=4), requests, [0, 1])] == texts


def test_a_smaller_start_is_for_every_matrix_that_writes_to_the_stream():
    parts = Parts(ffn=Experts)
    plain, scaled = (dict(TransformerLM(replace(CONFIG, scaled_init=s), parts=parts).named_parameters()) for s in (False, True))
    smaller = {name for name in plain if not torch.equal(plain[name], scaled[name])}
    assert smaller == {name for name in plain if name.endswith(("w2.weight", "output_proj.weight"))} and len(smaller) == 2*(3 + 1)
    check_close(scaled["layers.0.ffn.experts.1.w2.weight"], plain["layers.0.ffn.experts.1.w2.weight"]/2, 1e-6)


def test_a_loss_comes_from_outside_too():
    def doubled(*args): return 2*linear_cross_entropy(*args)
    check_close(TransformerLM(CONFIG, parts=Parts(loss=doubled)).loss(IDS, IDS), 2*TransformerLM(CONFIG).loss(IDS, IDS))


def test_a_norm_comes_from_outside_too():
    made = []
    def norm(config, **place): made.append(nn.RMSNorm(config.d_model, eps=config.norm_eps, **place)); return made[-1]
    check_close(TransformerLM(CONFIG, parts=Parts(norm=norm))(IDS), TransformerLM(CONFIG)(IDS), 1e-4, 1e-5)
    assert len(made) == 2*CONFIG.num_layers + 1


def test_matrices_are_those_that_torch_knows():
    model = TransformerLM(replace(CONFIG, bias=True))
    assert {type(m).__mro__[1] for m in model.modules() if isinstance(m, (Linear, Embedding))} <= {nn.Linear, nn.Embedding, nn.Module}
    assert all(isinstance(m, nn.Linear) for layer in model.layers for m in (*layer.ffn.children(), layer.attn.q_proj))
    assert isinstance(model.token_embeddings, nn.Embedding) and CausalSelfAttention(CONFIG).attention is causal_attention


# A kind of feed-forward network is a name, and whoever computes or counts knows it

def check_engines(config):
    "The loss and every gradient, by autograd, by hand and by the fast NumPy engine."
    model, ids, targets = TransformerLM(config, dtype=torch.float64), IDS[:, :-1], IDS[:, 1:]
    loss = model.loss(ids, targets)
    loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    wide = {name: p.detach().numpy() for name, p in model.named_parameters()}
    for engine, dtype, tol in ((loss_and_grads, "float64", 1e-9), (fast_loss_and_grads, "float32", 1e-4)):
        found, grads = engine({name: w.astype(dtype) for name, w in wide.items()}, ids.numpy(), targets.numpy(), config)
        grads = {name: g.dense() if isinstance(g, RowGradient) else g for name, g in grads.items()}
        check_close(float(found), loss.item(), tol)
        check_close({name: g.astype("float64") for name, g in grads.items()}, expected, tol, tol)


def check_account(config):
    "Parameters, bytes, FLOPs and the peak of a step, as they are counted. The feed-forward network is so wide that the peak lies in it."
    wide = replace(config, num_layers=1, d_ff=16*config.d_model)
    for how in (PLAIN, PLAIN | dict(dtype="bfloat16"), PLAIN | dict(recompute=True)):
        counted = {name: how[name] for name in ("dtype", "attention", "recompute", "logits")}
        model, kept, flops = run_counted(wide, 8, 24, counted)
        assert count_parameters(model) == count_parameters(wide)
        formula, one = activation_bytes(wide, 8, 24, **counted), 8*24*wide.d_ff*(2 if how["dtype"] == "bfloat16" else 4)
        assert kept == formula, f"{(kept - formula)/one:+.2f} tensors of width F: an activation may save one, and FFNKind.saves_output says which"
        assert flops == sum(training_flops(wide, 8, 24, recompute=how["recompute"], fused=True).values())
        need, peak = sum(training_bytes(wide, 8, 24, **how).values()), max(live_bytes(wide, 8, 24, how))
        phase = peak_phase(wide, 8, 24, **how)["phase"]
        assert peak <= need <= 1.01*peak, f"{phase}: {(peak - need)/one:+.2f} tensors of width F: FFNKind.backward says how many are alive"


def check_decoders(config):
    "The logits of a text, from every cache, packed and with few bits; and its text from the engine."
    model = TransformerLM(config).eval()
    ids, rounded = IDS[0].tolist(), quantize_model(model, group=16).model()
    with torch.no_grad(): logits, few = model(IDS[0]), rounded(IDS[0])
    for decoder in (CachedDecoder(model), FastDecoder(model), NumpyDecoder(params_of(model), config), FastDecoder(model, pack=lambda w: lambda x: x@w.T)):
        check_close(torch.cat([torch.as_tensor(decoder.feed(part, all=True)) for part in (ids[:7], ids[7:8], ids[8:])]), logits, 1e-4, 2e-5)
    check_close(FastDecoder(model, pack=partial(quantize, group=16)).feed(ids, all=True), few, 1e-3, 1e-3)
    text = list(generate(model, ids[:5], 8, temperature=0.))
    assert [s.tokens for s in replay(Engine(model, block_size=4), [Request(tuple(ids[:5]), 8, temperature=0.)], [0])] == [text]


@pytest.mark.parametrize("check", [check_engines, check_account, check_decoders])
@pytest.mark.parametrize("kind", FFN_KINDS)
def test_every_kind_of_feed_forward_goes_everywhere(kind, check): check(replace(CONFIG, ffn=kind, bias=True))


def test_a_newcomer_s_feed_forward_needs_three_files():
    "ReLU² is a line of the config, its activation in torch, and the same in NumPy; the tests above ask account, decoders and engines for it."
    home = Path(lmcourse.__file__).parent
    named = {p.relative_to(home).as_posix() for p in home.rglob("*.py") if "relu2" in p.read_text(encoding="utf-8") and p.name != "_modidx.py"}
    assert named - {"ablations/speedrun.py"} == {   # Which takes it for a contestant
        "tools/config.py", "architecture/layers_np.py", "architecture/layers_torch.py"}
    assert FFN_KINDS["relu2"].activation == "relu2" and ACTIVATIONS["relu2"] and ACTIVATIONS_NP["relu2"]


@contextmanager
def registered(name, kind):
    register_ffn(name, kind)
    try: yield name
    finally: register_ffn(name, None)


@pytest.fixture
def newcomers(monkeypatch):
    "A kind that somebody adds at run time: tanh, with a gate."
    def forward(x): return np.tanh(x), np.tanh(x)
    def backward(dy, y): return dy*(1 - y*y)
    monkeypatch.setitem(ACTIVATIONS, "tanh", torch.tanh)
    monkeypatch.setitem(ACTIVATIONS_NP, "tanh", (forward, backward))
    with registered("tanhglu", FFNKind("tanh", gated=True, saves_output=True)) as name: yield name


def test_a_kind_that_is_added_at_run_time_goes_everywhere(newcomers, capsys):
    config = replace(CONFIG, ffn=newcomers)
    for check in (check_engines, check_account, check_decoders): check(config)
    assert parse(["account", "--ffn", newcomers]).model.ffn == newcomers
    with pytest.raises(SystemExit): parse(["account", "--help"])
    assert newcomers in capsys.readouterr().out


def test_a_kind_that_nobody_knows_is_refused():
    with expect_error(ValueError, f"ffn = 'tanhglu', expected one of {', '.join(FFN_KINDS)}"): ModelConfig(ffn="tanhglu")
    with expect_error(ValueError, "invalid choice 'tanhglu'"): parse(["account", "--ffn", "tanhglu"])
    with expect_error(ValueError, "'swiglu' is there already"): register_ffn("swiglu", FFNKind("silu"))
    assert register_ffn("swiglu", FFN_KINDS["swiglu"]) is None


def test_an_activation_that_an_engine_lacks_is_named():
    with registered("half", FFNKind("half")):
        with expect_error(ValueError, "unknown activation in torch 'half'"): FeedForward(4, 8, "half")
        with expect_error(ValueError, "unknown activation in NumPy 'half'"): ffn_forward(np.ones(4), {}, "half")


def test_a_network_of_another_make_has_a_name_too(monkeypatch):
    monkeypatch.setitem(FFN_MODULES, "experts", Experts)
    with registered("experts", FFNKind("experts")):
        model = TransformerLM(replace(CONFIG, ffn="experts"))
        check_close(model(IDS), TOYS["experts"]()(IDS), 0, 0)
        with expect_error(ValueError, "layers.0.ffn.experts.0.w1.weight is not known"): NumpyDecoder(params_of(model), model.config)
