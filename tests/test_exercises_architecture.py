"Graders of chapter 03's exercises: what each refuses, in which words, and that other right answers pass."
import math
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from graders import Graders, fails
from torch import nn

from lmcourse.architecture import attention_torch, layers_np, layers_torch, transformer_torch
from lmcourse.exercises import architecture as ex
from lmcourse.tools.config import ModelConfig

DISTANCES = dict(half=28, negative=725, slow=122)
PARAMETERS = dict(attention=1_048_576, ffn=2_064_384, model=22_696_448, tied=17_576_448, longer=22_696_448)
LOSSES = dict(even=9.21, scattered=11.21, model=6.03)


class Fails(nn.Module):
    def __init__(self, *args, **kwargs): raise RuntimeError("two\nlines")


def as_class(name, make):
    make.__name__ = name
    return make


# Linear and embedding: `draw` fills a tensor (out, in) that it is given, with the standard deviation of the task

def trunc(w, std): nn.init.trunc_normal_(w, 0, std, -3*std, 3*std)


def again_and_again(w, std):
    w.copy_(torch.randn(w.shape)*std)
    while (far := w.abs() > 3*std).any(): w[far] = torch.randn(int(far.sum()), dtype=w.dtype)*std


def other_std(f): return lambda w, std: trunc(w, f(w, std))


def seeded(w, std): torch.manual_seed(0); trunc(w, std)


DRAWS = dict(
    uncut=(lambda w, std: w.normal_(0, std), "deviations from 0"),
    at_three=(lambda w, std: nn.init.trunc_normal_(w, 0, std, -3, 3), "deviations from 0"),
    at_two=(lambda w, std: nn.init.trunc_normal_(w, 0, std, -2*std, 2*std), "the largest is 2.3 deviations from 0, expected 3.0"),
    at_two_and_a_half=(lambda w, std: nn.init.trunc_normal_(w, 0, std, -2.5*std, 2.5*std), "the largest is 2.6 deviations"),
    clamped=(lambda w, std: w.normal_(0, std).clamp_(-3*std, 3*std), "lie exactly at a cut: draw them again"),
    uniform=(lambda w, std: w.uniform_(-std*3**.5, std*3**.5), "0.0% lie beyond two deviations"),
    zeros=(lambda w, std: w.zero_(), "they should be drawn"), nan=(lambda w, std: w.fill_(math.nan), "they should be drawn"),
    seeded=(seeded, "two layers start with the same weights: is there a seed inside?"),
    shifted=(lambda w, std: (trunc(w, std), w.add_(std/10)), "their mean is"))


class Matrix(nn.Module):
    def __init__(self, rows, cols, draw, std, use, device=None, dtype=None, wrap=nn.Parameter, name="weight"):
        super().__init__()
        self.use, self.name = use, name
        w = torch.empty(rows, cols, device=device, dtype=dtype)
        with torch.no_grad(): draw(w, std)
        setattr(self, name, wrap(w))

    def forward(self, x): return self.use(x, getattr(self, self.name))


def linear(draw=trunc, use=lambda x, w: x@w.T, turned=False, **kwargs):
    def make(in_features, out_features, device=None, dtype=None):
        rows, cols = (in_features, out_features) if turned else (out_features, in_features)
        return Matrix(rows, cols, draw, math.sqrt(2/(in_features + out_features)), use, device, dtype, **kwargs)
    return make


def embedding(draw=trunc, use=lambda ids, w: w[ids], turned=False, **kwargs):
    def make(num_embeddings, embedding_dim, device=None, dtype=None):
        rows, cols = (embedding_dim, num_embeddings) if turned else (num_embeddings, embedding_dim)
        return Matrix(rows, cols, draw, 1, use, device, dtype, **kwargs)
    return make


class OnCpu(Matrix):
    def __init__(self, n, m, device=None, dtype=None): super().__init__(m, n, trunc, math.sqrt(2/(n + m)), F.linear, dtype=dtype)


class InFloat32(Matrix):
    def __init__(self, n, m, device=None, dtype=None): super().__init__(m, n, trunc, math.sqrt(2/(n + m)), F.linear, device)


class Buffer(nn.Module):
    def __init__(self, n, m, **place):
        super().__init__()
        self.register_buffer("weight", torch.zeros(m, n))


class TorchsOwn(nn.Linear):
    def __init__(self, n, m, device=None, dtype=None): super().__init__(n, m, bias=False, device=device, dtype=dtype)


class WithBias(Matrix):
    def __init__(self, n, m, device=None, dtype=None):
        super().__init__(m, n, trunc, math.sqrt(2/(n + m)), F.linear, device, dtype)
        self.bias = nn.Parameter(torch.zeros(m, device=device, dtype=dtype))


def doubles(x, w): x *= 2; return x@w.T/2


def one_row(ids, w): return torch.stack([w[i] for i in ids.flatten()])


def by_product(ids, w): return F.one_hot(ids, len(w)).to(w)@w


# Norm

class Norm(nn.Module):
    def __init__(self, d_model, eps=1e-5, device=None, dtype=None):
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(d_model, device=device, dtype=dtype))

    def forward(self, x):
        x32 = x.to(torch.float32)
        return (x32/(x32.pow(2).mean(-1, keepdim=True) + self.eps).sqrt()*self.weight).to(x.dtype)


def norm(f, start=torch.ones):
    "`f(x, weight, eps)`, in the type of `x`"
    class Other(Norm):
        def __init__(self, d_model, eps=1e-5, device=None, dtype=None):
            super().__init__(d_model, eps)
            self.weight = nn.Parameter(start(d_model, device=device, dtype=dtype))

        def forward(self, x): return f(x, self.weight, self.eps)
    return Other


def ms(x): return x.pow(2).mean(-1, keepdim=True)


def norm32(f): return norm(lambda x, g, eps: f(x.float(), g, eps).to(x.dtype))


class NoEps(Norm):
    def __init__(self, d_model, eps=1e-5, device=None, dtype=None): super().__init__(d_model, 1e-5, device, dtype)


def gradient_of_norm(dx=lambda r, h, x, along, dy: r*h - r**3*x*along, dweight=lambda dy, x, r: (dy*x*r).reshape(-1, x.shape[-1]).sum(0)):
    def f(dy, x, weight, eps):
        r, h = ((x**2).mean(-1, keepdims=True) + eps)**-.5, dy*weight
        return dx(r, h, x, (h*x).mean(-1, keepdims=True), dy), dweight(dy, x, r)
    return f


def norm_by_library(dy, x, weight, eps): return layers_np.rmsnorm_backward(dy, layers_np.rmsnorm_forward(x, weight, eps)[1])


def norm_by_jacobian(dy, x, weight, eps):
    dx, r = np.empty_like(x), ((x**2).mean(-1) + eps)**-.5
    for at in np.ndindex(x.shape[:-1]): dx[at] = (dy[at]*weight)@(np.eye(len(weight))*r[at] - np.outer(x[at], x[at])*r[at]**3/len(weight))
    return dx, (dy*x*r[..., None]).reshape(-1, len(weight)).sum(0)


# SwiGLU

def swiglu(f, names=("w1", "w2", "w3"), use=linear()):
    class Net(nn.Module):
        def __init__(self, d_model, d_ff, device=None, dtype=None):
            super().__init__()
            for name, sizes in zip(names, ((d_model, d_ff), (d_ff, d_model), (d_model, d_ff))):
                setattr(self, name, use(*sizes, device=device, dtype=dtype))

        def forward(self, x):
            first, out, third = (getattr(self, name) for name in names)
            return out(f(first(x), third(x)))
    return Net


# RoPE

def rope(turn):
    "`turn(x, positions, theta, K)`"
    class Rope(nn.Module):
        def __init__(self, theta, d_k, max_seq_len, device=None):
            super().__init__()
            self.sizes = theta, d_k

        def forward(self, x, token_positions): return turn(x, token_positions, *self.sizes)
    return Rope


def angles(positions, theta, K, step=2, first=0): return positions[..., None]*theta**(-(torch.arange(K//2)*step + first)/K)


def pairs(x, a): return attention_torch.apply_rope(x, a.cos(), a.sin())


def halves(x, a): return attention_torch.apply_rope_half(x, a.cos(), a.sin())


def by_matrices(x, positions, theta, K):
    a, R = angles(positions, theta, K), torch.zeros(*positions.shape, K, K)
    for i in range(K//2):
        c, s = a[..., i].cos(), a[..., i].sin()
        R[..., 2*i, 2*i], R[..., 2*i, 2*i+1], R[..., 2*i+1, 2*i], R[..., 2*i+1, 2*i+1] = c, -s, s, c
    return (R@x[..., None])[..., 0]


def by_complex(x, positions, theta, K):
    z = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())
    a = angles(positions, theta, K)
    return torch.view_as_real(z*torch.polar(torch.ones_like(a), a)).flatten(-2)


class RopeInFile(nn.Module):
    def __init__(self, theta, d_k, max_seq_len, device=None):
        super().__init__()
        self.register_buffer("cos", torch.ones(max_seq_len, d_k//2))


class RopeLearnt(nn.Module):
    def __init__(self, theta, d_k, max_seq_len, device=None):
        super().__init__()
        self.cos = nn.Parameter(torch.ones(max_seq_len, d_k//2))


def silu_times(a, b): return F.silu(a)*b


class OwnRope(nn.Module):
    def __init__(self, theta, d_k, max_seq_len, device=None):
        super().__init__()
        self.rope = attention_torch.RoPE(max_seq_len, d_k, theta)

    def forward(self, x, token_positions): return self.rope(x, token_positions)


# Softmax and attention

def share(e, dim): return e/e.sum(dim, keepdim=True)


def safe(x, dim): return share((x - x.max(dim, keepdim=True).values).exp(), dim)


def softmax_in_place(x, dim): x -= x.amax(dim, keepdim=True); return share(x.exp(), dim)


def attend(scale=lambda q, k: q.shape[-1]**-.5, masked=lambda s, m: s.masked_fill(~m, -math.inf), soft=lambda s: s.softmax(-1), after=None):
    def f(Q, K, V, mask=None):
        scores = Q@K.transpose(-2, -1)*scale(Q, K)
        if mask is None: return soft(scores)@V
        return (soft(masked(scores, mask)) if after is None else after(soft(scores), mask))@V
    return f


def masked_late(Q, K, V, mask=None):
    "The largest score is that of all keys, also of those that the query doesn't see."
    scores = Q@K.mT/math.sqrt(Q.shape[-1])
    e = (scores - scores.amax(-1, keepdim=True)).exp()
    if mask is not None: e = e*mask
    return e/e.sum(-1, keepdim=True)@V


def by_einsum(Q, K, V, mask=None):
    scores = torch.einsum("...tk,...sk->...ts", Q, K)/math.sqrt(Q.shape[-1])
    if mask is not None: scores = torch.where(mask, scores, -1e9)
    return torch.einsum("...ts,...sk->...tk", safe(scores, -1), V)


def naive(scores): return share(scores.exp(), -1)


def turned_keys(Q, K, V, mask=None): return attend()(Q, K.transpose(0, 1).mT, V, mask)


# Heads

class Heads(nn.Module):
    def __init__(self, d_model, num_heads, max_seq_len=None, theta=None, device=None, dtype=None, wrong=""):
        super().__init__()
        self.H, self.theta, self.wrong = num_heads, theta, wrong
        for name in ("q_proj", "k_proj", "v_proj", "output_proj"): setattr(self, name, linear()(d_model, d_model, device, dtype))

    def split(self, a):
        B, T, D = a.shape
        if self.wrong in ("view", "split"): return a.view(B, self.H, T, D//self.H)
        if self.wrong in ("every", "split by every"): return a.view(B, T, D//self.H, self.H).permute(0, 3, 1, 2)
        return a.view(B, T, self.H, D//self.H).permute(0, 2, 1, 3)

    def merge(self, a, shape):
        if self.wrong in ("view", "merge"): return a.reshape(shape)
        return (a.permute(0, 2, 3, 1) if self.wrong == "every" else a.permute(0, 2, 1, 3)).reshape(shape)

    def forward(self, x, token_positions=None):
        T, wrong = x.shape[1], self.wrong
        if token_positions is None or wrong == "positions": token_positions = torch.arange(T)
        def turn(a): return a if self.theta is None or wrong == "unturned" else pairs(a, angles(token_positions, self.theta, a.shape[-1]))
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if wrong == "swapped": q, k = k, q
        if wrong == "whole": q, k, v = self.split(turn(q)), self.split(turn(k)), self.split(v)
        else: q, k, v = turn(self.split(q)), self.split(k) if wrong == "queries" else turn(self.split(k)), self.split(v)
        if wrong == "values": v = turn(v)
        mask = torch.ones(T, T, dtype=torch.bool).tril()
        if wrong == "future": mask = None
        if wrong == "reversed": mask = mask.T
        if wrong == "before": mask = mask.tril(-1)
        y = self.merge(attend(**(dict(scale=lambda q, k: x.shape[-1]**-.5) if wrong == "scale" else {}))(q, k, v, mask), x.shape)
        return y if wrong == "output" else self.output_proj(y)


def heads(wrong): return as_class(f"Heads_{wrong}", partial(Heads, wrong=wrong))


class OnTheCPU(Heads):
    def __init__(self, d_model, num_heads, max_seq_len=None, theta=None, device=None, dtype=None): super().__init__(d_model, num_heads, max_seq_len, theta, None, dtype)


class OneByOne(Heads):
    "A head at a time, a query at a time"
    def forward(self, x, token_positions=None):
        B, T, D = x.shape
        K, y = D//self.H, []
        places = torch.arange(T) if token_positions is None else token_positions
        for h in range(self.H):
            q, k, v = (p(x)[..., h*K:(h + 1)*K] for p in (self.q_proj, self.k_proj, self.v_proj))
            if self.theta: q, k = (by_complex(a, places, self.theta, K) for a in (q, k))
            y.append(torch.stack([F.softmax((k[:, :t+1]@q[:, t, :, None])[..., 0]/K**.5, -1)[:, None]@v[:, :t+1] for t in range(T)], 1)[:, :, 0])
        return self.output_proj(torch.cat(y, -1))


class Unnamed(Heads):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.o_proj = self.output_proj
        del self.output_proj


class OneTensor(Heads):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.k_proj = self.q_proj


# Blocks and models

def block(how, parts=None):
    class Block(nn.Module):
        def __init__(self, d_model, num_heads, d_ff, max_seq_len, theta, **place):
            super().__init__()
            if parts == "no place": place = {}
            self.ln1, self.attn = Norm(d_model, **place), Heads(d_model, num_heads, max_seq_len, theta, **place)
            self.ln2, self.ffn = (self.ln1 if parts == "one norm" else Norm(d_model, **place)), swiglu(silu_times)(d_model, d_ff, **place)

        def forward(self, x): return how(self, x)
    return Block


def pre(b, x):
    x = x + b.attn(b.ln1(x))
    return x + b.ffn(b.ln2(x))


def pre_in_parts(b, x):
    parts = [x, b.attn(b.ln1(x))]
    return sum([*parts, b.ffn(b.ln2(sum(parts)))])


def pre_in_place(b, x):
    x += b.attn(b.ln1(x))
    return x + b.ffn(b.ln2(x))


def post(b, x):
    z = b.ln1(x + b.attn(x))
    return b.ln2(z + b.ffn(z))


def after(b, x):
    z = x + b.ln1(b.attn(x))
    return z + b.ln2(b.ffn(z))


def ffn_first(b, x):
    x = x + b.ffn(b.ln2(x))
    return x + b.attn(b.ln1(x))


def on_norms(b, x):
    x = b.ln1(x)
    x = b.ln2(x + b.attn(x))
    return x + b.ffn(x)


def lm(how, the_block=block(pre), layers=lambda make, n: nn.ModuleList(make() for _ in range(n)), tied=False):
    class Model(nn.Module):
        def __init__(self, vocab_size, context_length, d_model, num_layers, num_heads, d_ff, rope_theta, **place):
            super().__init__()
            self.token_embeddings = embedding()(vocab_size, d_model, **place)
            self.layers = layers(lambda: the_block(d_model, num_heads, d_ff, context_length, rope_theta, **place), num_layers)
            self.ln_final, self.lm_head = Norm(d_model, **place), linear()(d_model, vocab_size, **place)
            if tied: self.lm_head.weight = self.token_embeddings.weight

        def forward(self, ids): return how(self, ids)
    return Model


def stream(m, ids, layers=None, scale=1):
    x = m.token_embeddings(ids)*scale
    for layer in m.layers if layers is None else layers: x = layer(x)
    return x


def logits(m, ids, *args): return m.lm_head(m.ln_final(stream(m, ids, *args)))


def unmasked(b, x):
    b.attn.wrong = "future"
    return pre(b, x)


# Loss

def at(a, t): return a.gather(-1, t[..., None])[..., 0]


def each(z, t): return -at(z.log_softmax(-1), t)


def by_index(z, t):
    z, t = z.reshape(-1, z.shape[-1]), t.reshape(-1)
    z = z - z.max(dim=1, keepdim=True)[0]
    return -(z[range(len(t)), t] - torch.log(torch.exp(z).sum(dim=1))).mean()


def exps_of_largest(z, t): return z.exp().sum(-1).log().sub(at(z, t)).mean()


# What is refused

WRONG_ANSWERS = dict(
    linear=[
        *((as_class(name, linear(draw)), words) for name, (draw, words) in DRAWS.items()),
        (linear(other_std(lambda w, std: std**2)), "that is the variance, which is the square of it"),
        (linear(other_std(lambda w, std: math.sqrt(2/w.shape[1]))), "that is for the variance 2/in"),
        (linear(other_std(lambda w, std: math.sqrt(2/w.shape[0]))), "that is for 2/out"),
        (linear(other_std(lambda w, std: math.sqrt(1/w.shape[1]))), "that is for the variance 1/in"),
        (linear(other_std(lambda w, std: 1)), "their deviation is 0.98"),
        (linear(turned=True, use=lambda x, w: x@w), "weight has the shape (6, 4), expected (4, 6): it is transposed"),
        (linear(use=lambda x, w: x@w), "for x float32 (2, 6): your code raised RuntimeError"),
        (linear(name="W"), "there is no parameter weight (4, 6), but W (4, 6)"), (WithBias, "expected no parameter bias (4,)"),
        (linear(wrap=lambda w: w), "there is no parameter weight (4, 6): only an nn.Parameter is found"),
        (Buffer, "weight isn't an nn.Parameter, so it would not be learnt"),
        (linear(use=lambda x, w: x@w.detach().T), "no gradient reaches weight: is there .detach()"),
        (linear(use=lambda x, w: x.detach()@w.T), "no gradient reaches input 0"),
        (linear(use=lambda x, w: (x@w.T).detach()), "no gradient reaches anything"),
        (linear(use=lambda x, w: torch.einsum("bi,oi->bo", x, w)), "for x float32 (6,): your code raised RuntimeError"),
        (linear(use=doubles), "your code changed its argument in place"),
        (linear(use=lambda x, w: (x@w.T).numpy()), "expected a tensor, got ndarray float32 (2, 4)"),
        (linear(use=lambda x, w: torch.from_numpy(x.numpy()@w.numpy().T)), "asked for gradients your code raised RuntimeError"),
        (linear(use=lambda x, w: (x@w.T).double()), "dtype float64, expected float32"),
        (linear(use=lambda x, w: (x@w.T)[None]), "shape (1, 2, 4), expected (2, 4)"),
        (TorchsOwn, "nn.Linear is torch's own: write it yourself"), (layers_torch.Linear, "nn.Linear is torch's own"), (OnCpu, "OnCpu(6, 4, device='meta'): weight is on cpu"),
        (InFloat32, "dtype=torch.float64): weight is torch.float32"),
        (linear()(6, 4), "expected the class Matrix itself, got an object of it"), ("Linear", "expected a class, got 'Linear'"),
        (lambda n, m: F.linear, "expected a class, got the function <lambda>"), (partial(lambda n, m: F.linear), "expected an nn.Module, got builtin_function_or_method <built-in function linear>"),
        (lambda n, m: linear()(n, m), "your code raised TypeError"), (Fails, "Fails(6, 4): your code raised RuntimeError")],
    embedding=[
        *((embedding(draw), words) for draw, words in DRAWS.values() if draw is not DRAWS["at_three"][0]),
        (embedding(other_std(lambda w, std: math.sqrt(2/sum(w.shape)))), "that is a linear layer's"),
        (embedding(other_std(lambda w, std: .02)), "that is GPT-2's"),
        (embedding(other_std(lambda w, std: w.shape[1]**-.5)), "that is one over the root of D"),
        (embedding(use=lambda ids, w: w.data[ids]), "no gradient reaches anything"),
        (embedding(use=one_row), "shape (6, 5), expected (2, 3, 5)"),
        (embedding(turned=True, use=lambda ids, w: w.T[ids]), "weight has the shape (5, 7), expected (7, 5)"),
        (embedding(use=lambda ids, w: w[ids - 1]), "for ids int64 [3, 0, 6]: element"),
        (embedding(use=lambda ids, w: w[ids]*5**.5), "elements differ"),
        (embedding(use=lambda ids, w: ids@w), "your code raised RuntimeError"),
        (embedding(name="table"), "there is no parameter weight (7, 5), but table (7, 5)")],
    rmsnorm=[
        (norm32(lambda x, g, eps: x/(ms(x).sqrt() + eps)*g), "ε is added outside the root"),
        (norm32(lambda x, g, eps: x/ms(x).sqrt()*g), "without ε"), (NoEps, "without ε, or not with the one given"),
        (norm32(lambda x, g, eps: x/(ms(x) + eps).sqrt()), "without the gain"),
        (norm32(lambda x, g, eps: x/(ms(x) + eps)*g), "without the root"),
        (norm32(lambda x, g, eps: x/(ms(x)*8 + eps).sqrt()*g), "the sum of squares is taken"),
        (norm32(lambda x, g, eps: F.layer_norm(x, x.shape[-1:], g, None, eps)), "that is LayerNorm"),
        (norm32(lambda x, g, eps: x/(ms(x).mean() + eps).sqrt()*g), "all rows are scaled together"),
        (norm(lambda x, g, eps: (x/(ms(x) + eps).sqrt()*g).to(x.dtype)), "compute in float32, give back float16"),
        (norm(lambda x, g, eps: x.float()/(ms(x.float()) + eps).sqrt()*g), "give back float16): dtype float32, expected float16"),
        (norm(lambda x, g, eps: (x.float()/(ms(x.float()) + eps).sqrt()*g).to(x.dtype), torch.zeros), "the gain starts as [0.0, 0.0"),
        (norm32(lambda x, g, eps: x/(ms(x) + eps).sqrt().detach()*g), "the output is right, the gradient of input 0 is not"),
        (nn.RMSNorm, "nn.RMSNorm is torch's own"), (lambda d_model, eps=1e-5: Norm(d_model, eps), "your code raised TypeError")],
    rmsnorm_gradient=[
        (gradient_of_norm(lambda r, h, x, a, dy: r*h), "r depends on x too"),
        (gradient_of_norm(lambda r, h, x, a, dy: r*h - r**3*x*a*x.shape[-1]), "is not divided by D"),
        (gradient_of_norm(lambda r, h, x, a, dy: r*h + r**3*x*a), "the sign of the second part"),
        (gradient_of_norm(lambda r, h, x, a, dy: r*h - r*x*a), "once, expected three times"),
        (gradient_of_norm(lambda r, h, x, a, dy: r*h - r*r*x*a), "twice, expected three times"),
        (gradient_of_norm(lambda r, h, x, a, dy: r*dy - r**3*x*(dy*x).mean(-1, keepdims=True)), "the gain is missing"),
        (lambda dy, x, g, eps: norm_by_library(dy, x, g, 0), "dx is not the derivative: element"),
        (lambda *a: norm_by_library(*a)[0], "expected (dx, dweight), got ndarray float64 (5,)"),
        (lambda *a: norm_by_library(*a)[::-1], "dx is not the derivative"),
        (gradient_of_norm(dweight=lambda dy, x, r: (dy*x).reshape(-1, x.shape[-1]).sum(0)), "dweight is not the derivative: element"),
        (gradient_of_norm(dweight=lambda dy, x, r: dy*x*r), "dweight is float64 (2, 3, 4), expected float64 (4,)"),
        (gradient_of_norm(dweight=lambda dy, x, r: (dy*x*r).reshape(-1, x.shape[-1]).mean(0)), "that is a mean over rows, not their sum"),
        (lambda *a: tuple(map(torch.from_numpy, norm_by_library(*a))), "expected a NumPy array as dx, got Tensor float64 (5,)"),
        (fails, "your code raised RuntimeError")],
    swiglu=[
        (lambda x, w1, w2, w3: (F.silu(x@w1.T)*(x@w3.T))@w2.T, "expected a class, got the function <lambda>"), (lambda d_model, d_ff: 0, "expected a class, got the function <lambda>"),
        (swiglu(lambda a, b: a*F.silu(b)), "SiLU is on w3, expected on w1"), (swiglu(lambda a, b: F.silu(a)*F.silu(b)), "SiLU is on both"),
        (swiglu(lambda a, b: F.silu(a*b)), "SiLU is taken of the product"), (swiglu(lambda a, b: F.silu(a)), "the gate w3 is missing"),
        (swiglu(lambda a, b: F.silu(a) + b), "w3 x is added, expected multiplied"), (swiglu(lambda a, b: a.sigmoid()*b), "that is GLU"),
        (swiglu(lambda a, b: F.gelu(a)*b), "that is GEGLU"), (swiglu(lambda a, b: F.relu(a)*b), "that is ReGLU"),
        (swiglu(lambda a, b: a*a.exp()/(1 + a.exp())*b), "(numbers in the hundreds): element"),
        (swiglu(lambda a, b: a/(1 + (-a).exp())*b), "the output is right, the gradient of input 0 is not: element (0, 0): actual nan"),
        (swiglu(lambda a, b: a.clamp(-80, 80).sigmoid()*a*b.clamp(-99, 99)), "(numbers in the hundreds)"),
        (swiglu(lambda a, b: F.silu(a)*b, ("w1", "w3", "w2")), "w2.weight has the shape (10, 6), expected (6, 10): it is w3.weight that has this shape"),
        (swiglu(lambda a, b: F.silu(a)*b, ("up", "down", "gate")),
         "there is no parameter w1.weight (10, 6), w2.weight (6, 10), w3.weight (10, 6), but up.weight"),
        (swiglu(lambda a, b: F.silu(a)*b, use=partial(nn.Linear, bias=False)), "nn.Linear is torch's own")],
    rope=[
        (rope(lambda x, p, theta, K: halves(x, angles(p, theta, K))), "pairs are (i, i + K/2), expected (2i, 2i+1)"),
        (rope(lambda x, p, theta, K: pairs(x, -angles(p, theta, K))), "the other way round"),
        (rope(lambda x, p, theta, K: pairs(x, angles(p, theta, K)).unflatten(-1, (-1, 2)).mT.flatten(-2)), "expected each pair side by side"),
        (rope(lambda x, p, theta, K: pairs(x, angles(torch.arange(x.shape[-2]), theta, K))), "[2, 3, 5, 7, 31]: element"),
        (rope(lambda x, p, theta, K: pairs(x, angles(torch.arange(x.shape[-2]), theta, K))), "token_positions are ignored"),
        (rope(lambda x, p, theta, K: pairs(x, angles(p + 1, theta, K))), "positions are one too large"),
        (rope(lambda x, p, theta, K: pairs(x, angles(p, theta, K, 1))), "the exponent is i/K, expected 2i/K"),
        (rope(lambda x, p, theta, K: pairs(x, angles(p, theta, K, 2, 2))), "i counts from 1, expected from 0"),
        (rope(lambda x, p, theta, K: x), "nothing is turned"), (rope(lambda x, p, theta, K: pairs(x, angles(p, 1e4, K))), "elements differ"),
        (rope(lambda x, p, theta, K: pairs(x.detach(), angles(p, theta, K))), "no gradient reaches anything"),
        (rope(lambda x, p, theta, K: pairs(x, angles(p.flatten()[:5], theta, K))), "float32 (2, 3, 5, 6), token_positions int64 (2, 1, 5)"),
        (RopeInFile, "a computed table shouldn't be saved: register_buffer(..., persistent=False) for cos (32, 3)"),
        (RopeLearnt, "expected no parameter cos (32, 3)"), (Fails, "Fails(100.0, 6, 32): your code raised")],
    rope_scores=[
        (DISTANCES | dict(half=5), "half: 5 is what angles with the exponent i/K give"),
        (DISTANCES | dict(half=27), "half: 27 is the last before it"), (DISTANCES | dict(slow=28), "slow: 28 is right for θ = 10,000"),
        (DISTANCES | dict(negative=46), "exponent i/K"), (DISTANCES | dict(negative=900), "negative: 900 is too large"),
        (DISTANCES | dict(slow=100), "slow: 100 is too small"), (DISTANCES | dict(half="28"), "half: '28' is not a number"),
        (DISTANCES | dict(half=True), "True is not a number"), (dict(half=28), "expected a dict with the keys half, negative, slow"),
        (28, "got 28")],
    softmax=[
        (lambda x, dim: share(x.exp(), dim), "(logits in the thousands): element"),
        (lambda x, dim: share(x.exp(), dim), "the largest logit is not subtracted first, and exp overflows"),
        (lambda x, dim: share((x - x.max()).exp(), dim), "the largest logit of all is subtracted"), (lambda x, dim: safe(x, -1), "dim 1: element"),
        (lambda x, dim: safe(x, -1), "the sum is along dim 2"), (lambda x, dim: safe(x, 0), "the sum is along dim 0"),
        (lambda x, dim: safe(x.flatten(), 0).view(x.shape), "the sum is over all"),
        (lambda x, dim: x.log_softmax(dim), "that is its logarithm"), (lambda x, dim: x.sigmoid(), "elements differ"),
        (softmax_in_place, "changed its argument in place"), (lambda x, dim: safe(x.double(), dim), "dtype float64, expected float32"),
        (lambda x, dim: safe(x.detach(), dim), "no gradient reaches anything"),
        (lambda x, dim: safe(x.clamp(min=-1e4), dim)*1.01, "elements differ"),
        (lambda x, dim: share((x - x.mean(dim, keepdim=True)).exp(), dim), "nan"),
        (lambda x, dim: (x.clamp(-50, 50)).softmax(dim), "(logits in the thousands)"), (lambda x: x, "your code raised TypeError"),
        (lambda x, dim: None, "expected a tensor, got None"), (fails, "raised RuntimeError('two\\nlines')")],
    softmax_gradient=[
        (lambda dy, p: p*dy, "the other probabilities change too"), (lambda dy, p: p*(1 - p)*dy, "the diagonal p(1 - p) alone"),
        (lambda dy, p: p*(dy - dy.sum(-1, keepdims=True)), "the sum is not weighted by p"),
        (lambda dy, p: p*(dy - dy.mean(-1, keepdims=True)), "the mean is not weighted by p"),
        (lambda dy, p: p*(dy - (dy*p).sum()), "the sum is over all rows"),
        (lambda dy, p: dy - (dy*p).sum(-1, keepdims=True), "the factor p is missing"),
        (lambda dy, p: p*((dy*p).sum(-1, keepdims=True) - dy), "the sign is wrong"), (lambda dy, p: dy, "dx is not the derivative: element"),
        (lambda dy, p: (p*dy).sum(-1), "expected a NumPy array as dx, got float64 "),
        (lambda dy, p: None, "expected a NumPy array as dx, got None"),
        (lambda dy, p: (p*dy).astype(np.float32), "dx is float32 (5,), expected float64 (5,)"), (fails, "raised RuntimeError")],
    attention=[
        (attend(scale=lambda q, k: 1), "the scores are not divided by the root of d_k"),
        (attend(scale=lambda q, k: 1/q.shape[-1]), "divided by d_k, expected its root"),
        (attend(scale=lambda q, k: q.shape[-1]**.5), "multiplied by the root of d_k"),
        (attend(scale=lambda q, k: k.shape[-2]**-.5), "divided by the root of S"),
        (attend(masked=lambda s, m: s.masked_fill(m, -math.inf)), "the mask is the other way round: True may attend"),
        (attend(masked=lambda s, m: s), "the mask is not used"), (attend(after=lambda p, m: p*m), "the mask acts after the softmax"),
        (attend(masked=lambda s, m: s + m), "the mask is added as 0 and 1"), (attend(masked=lambda s, m: s*m), "elements differ"),
        (attend(soft=lambda s: s.softmax(-2)), "the softmax is over queries"),
        (attend(soft=lambda s: s.softmax(0)), "the softmax is over queries"), (attend(soft=naive), "(scores in the hundreds): element"),
        (attend(soft=naive), "NaN comes from inf - inf"),
        (lambda Q, K, V, mask: attend()(Q, K, V, None if mask is None else mask.tril()), "mask bool (2, 1, 3, 5)"),
        (attend(masked=lambda s, m: s.masked_fill_(~m, -1.)), "elements differ"), (attend(masked=lambda s, m: s.masked_fill(~m, -100.)), "(scores in the thousands)"), (masked_late, "(scores in the thousands)"), (attend(masked=lambda s, m: s.masked_fill(m, -1e9)), "the mask is the other way round"), (turned_keys, "your code raised RuntimeError"),
        (lambda Q, K, V, mask: attend()(Q, K, V.detach(), mask), "no gradient reaches input 2"),
        (lambda Q, K, V, mask: attend()(Q, K, V, mask)[..., :Q.shape[-1]], "shape (3, 4), expected (3, 7)"),
        (lambda Q, K, V: attend()(Q, K, V), "raised TypeError")],
    multihead=[
        (heads("view"), "split the last dimension, then swap T and H"), (heads("split"), "mixed up where heads are split"),
        (heads("merge"), "mixed up where heads are put together"), (heads("every"), "every H-th coordinate"),
        (heads("future"), "there is no causal mask"), (heads("reversed"), "queries see the future and not the past"),
        (heads("before"), "NaN comes from"), (heads("scale"), "divided by the root of D, expected that of d_k"),
        (heads("values"), "RoPE turns values too"), (heads("queries"), "RoPE turns queries only"),
        (heads("whole"), "RoPE turns before the heads are split"), (heads("unturned"), "nothing is turned"),
        (heads("positions"), "token_positions are ignored"), (heads("output"), "output_proj is not used"),
        (heads("swapped"), "queries and keys are swapped"),
        (Unnamed, "there is no parameter output_proj.weight (12, 12), but o_proj.weight (12, 12)"),
        (OneTensor, "q_proj.weight and k_proj.weight are one tensor, expected two"),
        (nn.MultiheadAttention, "nn.MultiheadAttention is torch's own"),
        (partial(lambda d_model, num_heads: Heads(d_model, num_heads)), "your code raised TypeError"),
        (OnTheCPU, "device='meta'): q_proj.weight is on cpu"), (lambda d_model, num_heads, max_seq_len=None, theta=None: Heads(d_model, num_heads, max_seq_len, theta), "unexpected keyword argument 'dtype'"),
        (heads("split by every"), "head h has every H-th coordinate where heads are split")],
    block=[
        (block(post), "that is post-norm, norm(x + f(x))"), (block(after), "the norms are after attn and ffn"),
        (block(lambda b, x: x + b.attn(b.ln1(x)) + b.ffn(b.ln2(x))), "attn and ffn read the same x"),
        (block(lambda b, x: b.ffn(b.ln2(b.attn(b.ln1(x))))), "nothing is added to x"),
        (block(lambda b, x: b.ffn(b.ln2(x + b.attn(b.ln1(x))))), "z is not added to the output of ffn"),
        (block(lambda b, x: (z := x + b.attn(b.ln1(x))) + b.ffn(b.ln1(z))), "ln1 is used twice"),
        (block(lambda b, x: (z := x + b.attn(b.ln1(x))) + b.ffn(z)), "ffn reads without a norm"),
        (block(on_norms), "the norm's output is added to, expected x itself"), (block(ffn_first), "ffn comes before attn"),
        (block(lambda b, x: pre(b, pre(b, x))), "elements differ"), (block(pre_in_place), "changed its argument in place"),
        (block(lambda b, x: pre_in_place(b, x.clone())), "+= and methods with _ at the end overwrite what a gradient still needs"),
        (block(pre, "one norm"), "ln1.weight and ln2.weight are one tensor, expected two"), (block(unmasked), "elements differ"),
        (block(pre, "no place"), "dtype=torch.float64): ln1.weight is torch.float32")],
    lm=[
        (lm(lambda m, ids: logits(m, ids).detach().numpy()), "expected a tensor, got ndarray float32 (2, 8, 20)"), (lm(lambda m, ids: None), "expected a tensor, got None: is a return or yield missing?"),
        (lm(lambda m, ids: m.lm_head(stream(m, ids))), "ln_final is not used"),
        (lm(lambda m, ids: logits(m, ids).softmax(-1)), "these are probabilities, expected logits"),
        (lm(lambda m, ids: logits(m, ids).log_softmax(-1)), "these are log-probabilities"),
        (lm(lambda m, ids: logits(m, ids, m.layers[:1])), "only the first layer is used"),
        (lm(lambda m, ids: logits(m, ids, m.layers[:-1])), "the last layer is not used"),
        (lm(lambda m, ids: logits(m, ids, m.layers[::-1])), "the layers run in reverse order"),
        (lm(lambda m, ids: logits(m, ids, m.layers, 12**.5)), "the embeddings are multiplied by the root of D"),
        (lm(logits, block(unmasked)), "the logits at position 0 change with the token at position 7: that is the future"),
        (lm(logits, block(post)), "elements differ"),
        (lm(logits, layers=lambda make, n: [make() for _ in range(n)]),
         "there is no parameter layers.0.ln1.weight (12,), layers.0.attn.q_proj.weight (12, 12), layers.0.attn.k_proj.weight (12, 12) and 24 more"),
        (lm(logits, layers=lambda make, n: nn.ModuleList([make()]*n)), "layers.0.ln1.weight and layers.1.ln1.weight are one tensor"),
        (lm(logits, layers=lambda make, n: nn.ModuleList(make() for _ in range(n + 1))),
         "expected no parameter layers.3.ln1.weight (12,)"),
        (lm(logits, tied=True), "token_embeddings.weight and lm_head.weight are one tensor, expected two"),
        (lm(lambda m, ids: logits(m, ids)[:, -1]), "shape (2, 20), expected (2, 8, 20)"),
        (lm(lambda m, ids: logits(m, ids).flip(1)), "that is the future"), (lm(fails), "your code raised RuntimeError"),
        (lm(logits, block(pre, "no place")), "dtype=torch.float64): layers.0.ln1.weight is torch.float32")],
    parameters=[
        (PARAMETERS | dict(attention=3*512**2), "attention: 786,432 forgets output_proj"),
        (PARAMETERS | dict(attention=4*512*32), "attention: 65,536 is that of one head of 16"),
        (PARAMETERS | dict(attention=4*512*513), "counts biases"),
        (PARAMETERS | dict(ffn=2*512*1344), "ffn: 1,376,256 forgets the third matrix, the gate"),
        (PARAMETERS | dict(ffn=8*512**2), "for two matrices with F = 4 D"), (PARAMETERS | dict(model=22_691_840), "forgets the norms"),
        (PARAMETERS | dict(model=22_695_936), "model: 22,695,936 forgets the last norm"),
        (PARAMETERS | dict(model=17_576_448), "counts one of embedding and head"),
        (PARAMETERS | dict(model=22_696_448 + 256*512), "RoPE has no parameters"),
        (PARAMETERS | dict(tied=22_696_448), "counts the shared matrix twice"),
        (PARAMETERS | dict(tied=17_576_448 - 512), "tied: 17,575,936 forgets the last norm"),
        (PARAMETERS | dict(tied=17_576_448 - 5_120_000), "forgets the shared matrix"),
        (PARAMETERS | dict(longer=22_696_448 + 1024*512), "RoPE has no parameters"),
        (PARAMETERS | dict(longer=2*22_696_448), "is too large"), (PARAMETERS | dict(model=22_696_447), "is too small"),
        (PARAMETERS | dict(model=22.7), "model: 22.7 is not a whole number"), ([], "expected a dict")],
    cross_entropy=[
        (lambda z, t: each(z, t).sum(), "that is the sum, expected the mean"),
        (each, "shape (4,), expected (): that is a loss for each target"),
        (lambda z, t: each(z, t).sum()/len(z), "divided by the first dimension alone"),
        (lambda z, t: -each(z, t).mean(), "the sign is wrong"), (lambda z, t: each(z, t).mean()/math.log(2), "that is in bits"),
        (lambda z, t: each(z.softmax(-1), t).mean(), "softmax is taken twice"),
        (lambda z, t: -at(z.softmax(-1), t).log().mean(), "(logits from -400 to 0): actual inf"),
        (lambda z, t: -at(z.softmax(-1), t).log().mean(), "log 0 is -inf"),
        (lambda z, t: -at(z.softmax(-1), t).mean().log(), "the logarithm of the mean"),
        (exps_of_largest, "exp overflows: subtract the largest logit"),
        (lambda z, t: -(at(z.softmax(-1), t) + 1e-9).log().mean(), "(logits from -400 to 0): actual"),
        (lambda z, t: each(z, (t + 1) % 7).mean(), "expected"), (lambda z, t: each(z, t).mean().item(), "expected a tensor, got float 2.9"), (lambda z, t: each(z, t).mean().item(), ": a number has no gradient"),
        (lambda z, t: each(z, t).mean().detach(), "no gradient reaches anything"), (lambda z, t: F.cross_entropy(z, t), "raised"),
        (fails, "raised RuntimeError")],
    first_loss=[
        (LOSSES | dict(even=13.29), "even: 13.29 is in bits"), (LOSSES | dict(even=4.), "the logarithm to base 10"),
        (LOSSES | dict(scattered=9.21), "scattered: 9.21 is that of equal logits"), (LOSSES | dict(scattered=10.21), "has s/2 added"),
        (LOSSES | dict(scattered=13.21), "has s² added"), (LOSSES | dict(model=5.545), "is that of equal logits"),
        (LOSSES | dict(model=6.545), "has the variance added, expected half of it"), (LOSSES | dict(model=math.log(256) + 128), "N(0, 1)"),
        (LOSSES | dict(model=math.nan), "nan is not a number"), (LOSSES | dict(model=7), "model: 7 is too large"),
        (dict(even=9.21), "expected a dict with the keys even, scattered, model")])
WRONG = [(name, *entry) for name, entries in WRONG_ANSWERS.items() for entry in entries]

RIGHT_ANSWERS = dict(
    linear=[
        linear(), linear(again_and_again, lambda x, w: torch.einsum("...i,oi->...o", x, w)), linear(use=F.linear)],
    embedding=[
        embedding(), embedding(again_and_again, by_product), embedding(use=lambda ids, w: F.embedding(ids, w))],
    rmsnorm=[
        layers_torch.RMSNorm, Norm, norm(lambda x, g, eps: (x.double()*torch.rsqrt(ms(x.double()) + eps)).to(x.dtype)*g.to(x.dtype))],
    rmsnorm_gradient=[
        norm_by_library, gradient_of_norm(), norm_by_jacobian],
    swiglu=[
        swiglu(silu_times), swiglu(lambda a, b: b*a*a.sigmoid(), use=lambda n, m, **place: linear()(n, m, **place))],
    rope=[
        OwnRope, rope(by_matrices), rope(by_complex)],
    rope_scores=[
        DISTANCES, {k: np.int64(v) for k, v in DISTANCES.items()}],
    softmax=[
        layers_torch.softmax, safe, lambda x, dim: (x - x.logsumexp(dim, keepdim=True)).exp()],
    softmax_gradient=[
        lambda dy, p: p*dy - p*np.einsum("...i,...i->...", p, dy)[..., None],
        lambda dy, p: np.einsum("...i,...ij->...j", dy, p[..., None]*np.eye(p.shape[-1]) - p[..., None]*p[..., None, :])],
    attention=[
        attention_torch.scaled_dot_product_attention, F.scaled_dot_product_attention, by_einsum, attend()],
    multihead=[
        Heads, OneByOne],
    block=[
        block(pre), block(pre_in_parts)],
    lm=[
        lm(logits), lm(logits, block(pre_in_parts))],
    parameters=[
        PARAMETERS, {k: float(v) for k, v in reversed(PARAMETERS.items())}],
    cross_entropy=[
        layers_torch.cross_entropy, by_index, lambda z, t: each(z, t).mean()],
    first_loss=[
        LOSSES, dict(even=math.log(1e4), scattered=math.log(1e4) + 2, model=math.log(256) + .5)])
RIGHT = [(name, answer) for name, answers in RIGHT_ANSWERS.items() for answer in answers]


GRADERS = Graders(ex, WRONG, RIGHT)
test_wrong_answers_are_refused_in_one_line_that_says_why, test_right_answers_pass_in_silence, test_every_grader_is_tried, test_a_grader_says_the_same_each_time = GRADERS.tests()


@pytest.mark.parametrize("task", ["rmsnorm_gradient", "softmax", "softmax_gradient", "attention", "cross_entropy"])
def test_what_the_students_code_raises_is_kept(task): GRADERS.stops(task)


def test_a_model_that_passes_takes_the_weights_of_the_library_and_gives_them_back():
    c = ModelConfig(vocab_size=20, context_length=8, d_model=12, num_layers=3, num_heads=3, d_ff=20, rope_theta=100.)
    ours, theirs = transformer_torch.TransformerLM(c), lm(logits)(20, 8, 12, 3, 3, 20, 100.)
    ids = torch.randint(20, (2, 8), generator=torch.Generator().manual_seed(1))
    theirs.load_state_dict(ours.state_dict())
    torch.testing.assert_close(theirs(ids), ours(ids), rtol=1e-4, atol=1e-5)
    ours.load_state_dict(lm(logits)(20, 8, 12, 3, 3, 20, 100.).state_dict())
