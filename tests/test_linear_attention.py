"Linear attention: chunks equal the recurrence in values and gradients, and the layer writes a text token by token as it reads it whole."
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings, strategies as st
from torch.nn import functional as F

from lmcourse.architecture.linear_attention import GatedDeltaNet, linear_attention, linear_attention_recurrent
from lmcourse.architecture.transformer_torch import TransformerLM
from lmcourse.tools.checks import check_close
from lmcourse.tools.config import ModelConfig

CONFIG = ModelConfig(vocab_size=30, context_length=40, d_model=16, num_layers=2, num_heads=2, d_ff=32, position="none")


def drawn(seed, T, K=5, V=7):
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, 3, T, n, generator=g, dtype=torch.float64) for n in (K, K, V))
    return q, F.normalize(k, dim=-1), v, torch.rand(2, 3, T, generator=g, dtype=torch.float64), -torch.randn(2, 3, T, generator=g, dtype=torch.float64).exp()


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 50), st.integers(1, 60), st.booleans(), st.booleans(), st.booleans(), st.integers(0, 99))
def test_chunks_are_the_recurrence(T, chunk, delta, decay, begun, seed):
    q, k, v, beta, log_decay = drawn(seed, T)
    how = dict(beta=beta if delta else None, log_decay=log_decay if decay else None, state=torch.ones(2, 3, 5, 7, dtype=torch.float64) if begun else None)
    inputs = [a.requires_grad_() for a in (q, k, v, beta, log_decay)]
    found = []
    for f in (linear_attention_recurrent, lambda *a, **how: linear_attention(*a, **how, chunk=chunk)):
        out, last = f(q, k, v, **how)
        found.append([out, last, *(g for g in torch.autograd.grad(out.sin().sum() + last.cos().sum(), inputs, allow_unused=True) if g is not None)])
    assert len(found[0]) == len(found[1]) == 5 + delta + decay
    for a, b in zip(*found): check_close(a, b, rtol=1e-8, atol=1e-9)


def test_a_state_that_is_wiped_stays_finite():
    q, k, v, beta, _ = drawn(0, 20)
    wiped = torch.full((2, 3, 20), -1e4, dtype=torch.float64, requires_grad=True)
    out, _ = linear_attention(q, k, v, beta, wiped, chunk=8)
    alone = beta[..., None]*(q*k).sum(-1, keepdim=True)*v                 # Each token finds what it has written itself
    check_close(out, alone, rtol=1e-9, atol=1e-12)
    assert torch.autograd.grad(out.sum(), wiped)[0].isfinite().all()


@pytest.mark.parametrize("reset", [-1e4, -1e6, -float("inf")])
@pytest.mark.parametrize("delta", [False, True])
def test_a_reset_leaves_the_decays_beside_it_exact(reset, delta):
    "In a cumulative sum in float32, a very large logarithm would round the small ones away, and two infinite ones would give NaN."
    q, k, v, beta, _ = (a.float() for a in drawn(1, 40))
    log_decay = torch.full((2, 3, 40), -.01)
    log_decay[..., [12, 25]] = reset
    how = dict(beta=beta if delta else None, log_decay=log_decay)
    check_close(linear_attention(q, k, v, **how), linear_attention_recurrent(q, k, v, **how), rtol=1e-4, atol=1e-4)


def model(dtype=torch.float64, **how):
    found = TransformerLM(CONFIG, seed=0, dtype=dtype)
    for i, layer in enumerate(found.layers): layer.attn = GatedDeltaNet(CONFIG, **how, dtype=dtype, generator=torch.Generator().manual_seed(i))
    with torch.no_grad():
        for layer in found.layers: layer.attn.conv.uniform_(-1, 1, generator=torch.Generator().manual_seed(9))
    return found


@pytest.mark.parametrize("how", [{}, dict(delta=False), dict(decay=False), dict(delta=False, decay=False)], ids=str)
def test_pieces_of_a_text_are_the_whole(how):
    lm, ids = model(**how), torch.randint(30, (3, 33), generator=torch.Generator().manual_seed(1))
    whole = lm(ids)
    for cuts in ([1]*33, [5, 1, 2, 25], [32, 1]):
        caches, out, at = [{}, {}], [], 0
        for n in cuts:
            out.append(lm(ids[:, at:at + n], torch.arange(at, at + n), caches))
            at += n
        check_close(torch.cat(out, 1), whole, rtol=1e-9, atol=1e-10)
        assert {name: t.numel() for name, t in caches[0].items()} == dict(inputs=3*3*48, state=3*2*8*8)


def test_the_future_is_not_seen_and_every_weight_learns():
    lm, ids = model(), torch.randint(30, (2, 20), generator=torch.Generator().manual_seed(2))
    other = ids.clone()
    other[:, 12:] = (ids[:, 12:] + 1) % 30
    assert torch.equal(lm(ids)[:, :12], lm(other)[:, :12])
    lm(ids).sin().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in lm.parameters())


def test_narrow_formats_are_computed_in_float32():
    ids = torch.randint(30, (2, 20), generator=torch.Generator().manual_seed(3))
    exact = model()(ids)
    half = model().to(torch.bfloat16)(ids)
    assert half.dtype == torch.bfloat16 and (half - exact).abs().max() < .1*exact.abs().max()
    with torch.autocast("cpu", torch.bfloat16): mixed = model().float()(ids)
    assert (mixed - exact).abs().max() < .1*exact.abs().max()
