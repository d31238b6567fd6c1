"What later chapters add to a model comes from outside: a feed-forward network, a kernel, split matrices, an adapter, each without an edit of chapter 03."
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F
from torch import nn

from lmcourse.architecture.attention_torch import CausalSelfAttention, causal_attention, scaled_dot_product_attention, causal_mask
from lmcourse.architecture.layers_torch import Embedding, FeedForward, Linear, linear_cross_entropy
from lmcourse.architecture.transformer_torch import Parts, TransformerLM
from lmcourse.generation.generate import generate
from lmcourse.inference.engine import Engine, Request, replay
from lmcourse.inference.kv_cache import CachedDecoder
from lmcourse.tools.checks import check_close
from lmcourse.tools.config import ModelConfig

CONFIG = ModelConfig(vocab_size=50, context_length=24, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, d_ff=48)
IDS = torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(0))


class ReluSquared(nn.Module):
    "So et al. 2021: the square of what is above 0."
    def __init__(self, config, linear=Linear, **more):
        super().__init__()
        self.up, self.down = linear(config.d_model, config.F, **more), linear(config.F, config.d_model, **more)

    def forward(self, x): return self.down(F.relu(self.up(x)).square())


class Experts(nn.Module):
    "Each token goes to one of three networks."
    def __init__(self, config, linear=Linear, **more):
        super().__init__()
        self.router = linear(config.d_model, 3, **more)
        self.experts = nn.ModuleList(FeedForward(config.d_model, config.F, config.ffn, linear=linear, **more) for _ in range(3))

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
