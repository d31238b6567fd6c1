"Graders of chapter 14's exercises: what each refuses, in which words, and that other right answers pass."
import math

import torch
import torch.nn.functional as F
from graders import Graders, spoiled

from lmcourse.exercises import alignment as ex


# 1. The best policy

def optimum(p, r, b):
    w = p*(r/b).exp()
    return w/w.sum()


def optimum_one_by_one(p, r, b):
    w = [x*math.exp(y/b) for x, y in zip(p.tolist(), r.tolist())]
    return torch.tensor([x/sum(w) for x in w], dtype=torch.float64)


OPTIMUM = [(lambda p, r, b: (r/b).softmax(0), "reference is missing"), (lambda p, r, b: p*(r/b).exp(), "sum must be 1"), (lambda p, r, b: (p + r/b).softmax(0), "logarithm of a probability"), (lambda p, r, b: optimum(p, r, 1/b), "high price"),
           (lambda p, r, b: F.one_hot(r.argmax(), len(r)).double(), "only the best"), (lambda p, r, b: p*r/(p*r).sum(), "exponential"), (lambda p, r, b: p, "expected")]


# 2. k3

def k3(a, b): return (b - a).exp() - 1 - (b - a)


K3 = [(lambda a, b: k3(b, a), "reverse KL"), (lambda a, b: a - b, "k1"), (lambda a, b: b - a, "wrong sign"), (lambda a, b: (a - b)**2/2, "k2"), (lambda a, b: (b - a).exp() - 1, "x is missing"), (lambda a, b: k3(a, b).mean(), "not their mean"), (lambda a, b: -k3(a, b), "expected")]


# 3. Naive policy gradient

def naive(a, x): return -a*x


NAIVE = [(lambda a, x: a*x, "needs a minus"), (lambda a, x: -a*x.exp(), "not probability"), (lambda a, x: -a*x.sum(1, keepdim=True), "not their sum"), (lambda a, x: (-a*x).mean(), "not their mean"), (lambda a, x: naive(a, x)/x.shape[1], "length"),
         (lambda a, x: -x, "advantage is missing"), (lambda a, x: -a + x, "expected")]


# 4. RLOO

def rloo(r, g):
    x = r.view(-1, g)
    return (g/(g - 1)*(x - x.mean(1, keepdim=True))).view(-1)


def rloo_in_loops(r, g):
    rows = [r[k:k + g].tolist() for k in range(0, len(r), g)]
    return torch.tensor([x - (sum(row) - x)/(g - 1) for row in rows for x in row]).to(r.dtype)


RLOO = [(lambda r, g: rloo(r, g)*(g - 1)/g, "out of the mean"), (lambda r, g: r - r.mean(), "within the group"), (lambda r, g: rloo(r, g)*(g - 1)/g/r.view(-1, g).std(1).repeat_interleave(g), "spread"), (lambda r, g: r - rloo(r, g), "subtract the mean"),
        (lambda r, g: -rloo(r, g), "flipped"), (lambda r, g: rloo(r, g).view(-1, g), "expected"), (lambda r, g: r.sub_(r.mean()), "changed its argument")]


# 5. Group-normalized rewards

def normalized(fn, responses, truths, size, eps, std):
    r = torch.tensor([fn(a, b)["reward"] for a, b in zip(responses, truths)])
    x = r.view(-1, size)
    x = x - x.mean(1, keepdim=True)
    return ((x/(x.std(1, keepdim=True) + eps)) if std else x).view(-1), r, {}


def normalized_in_loops(fn, responses, truths, size, eps, std):
    r, out = [float(fn(a, b)["reward"]) for a, b in zip(responses, truths)], []
    for k in range(0, len(r), size):
        row = r[k:k + size]
        mean = sum(row)/size
        spread = math.sqrt(sum((x - mean)**2 for x in row)/(size - 1)) + eps if std else 1.
        out += [(x - mean)/spread for x in row]
    return torch.tensor(out), torch.tensor(r), dict(best=max(r))


def other(f): return lambda fn, a, b, size, eps, std: (f(torch.tensor([fn(x, y)["reward"] for x, y in zip(a, b)]).view(-1, size), eps, std).reshape(-1), normalized(fn, a, b, size, eps, std)[1], {})


def mean(x): return x.mean(1, keepdim=True)


def spread(x, **how): return x.std(1, keepdim=True, **how)


NORMALIZED = [(other(lambda x, e, s: (x - mean(x))/(spread(x, correction=0) + e if s else 1)), "G - 1"), (other(lambda x, e, s: (x - x.mean())/(x.std() + e if s else 1)), "not the batch"), (other(lambda x, e, s: (x - mean(x))/(spread(x) + e)), "only where asked"),
              (other(lambda x, e, s: x - mean(x)), "standard deviation was left out"), (other(lambda x, e, s: x/(spread(x) + e if s else 1)), "mean was left out"), (other(lambda x, e, s: (x - mean(x))/(spread(x) if s else 1)), "advantage_eps was left out"),
              (other(lambda x, e, s: (x - mean(x))/(spread(x)**2 + e if s else 1)), "variance"), (lambda *a: normalized(*a)[:2], "expected advantages, rewards and a dict"), (lambda *a: (normalized(*a)[0], -normalized(*a)[1], {}), "expected")]


# 6. The clipped loss

def clip(a, n, o, c):
    ratio = (n - o).exp()
    return -torch.minimum(ratio*a, ratio.clamp(1 - c, 1 + c)*a), {}


def clip_by_cases(a, n, o, c):
    ratio = (n - o).exp()
    return -a*torch.where(a > 0, ratio.clamp(max=1 + c), ratio.clamp(min=1 - c)), {}


CLIP = [(lambda a, n, o, c: clip(a, (n/o).log(), 0*o, c), "not of their logarithms"), (lambda a, n, o, c: clip(a, o, n, c), "upside down"), (lambda a, n, o, c: (-torch.maximum((n - o).exp()*a, (n - o).exp().clamp(1 - c, 1 + c)*a), {}), "smaller gain"),
        (lambda a, n, o, c: (-clip(a, n, o, c)[0], {}), "needs a minus"), (lambda a, n, o, c: (-(n - o).exp()*a, {}), "clip is missing"), (lambda a, n, o, c: (-(n - o).exp().clamp(1 - c, 1 + c)*a, {}), "wrong way"),
        (lambda a, n, o, c: (-a*torch.minimum((n - o).exp(), (n - o).exp().clamp(1 - c, 1 + c)), {}), "multiply by the advantage before"), (lambda *a: clip(*a)[0], "a loss and a dict"), (lambda *a: (clip(*a)[0].mean(), {}), "expected"), (lambda *a: (clip(*a)[0].detach(), {}), "no gradient"), (lambda a, n, o, c: (clip(a, n, o, c)[0].detach() + n - n.detach(), {}), "gradient")]


# 7. A masked mean

def masked(x, m, d=None): return (x*m).sum()/m.sum() if d is None else (x*m).sum(d)/m.sum(d)


def masked_by_nan(x, m, d=None):
    x = x.masked_fill(~m, math.nan)
    return x.nanmean() if d is None else x.nanmean(d)


def along(f): return lambda x, m, d: f(x, m, d) if d is not None else f(x.flatten(), m.flatten(), 0)


MASKED = [(along(lambda x, m, d: (x*m).mean(d)), "number of elements"), (along(lambda x, m, d: x.mean(d)), "mask is missing"), (along(lambda x, m, d: (x*m).sum(d)), "that is the sum"), (lambda x, m, d: masked(x, m), "dim is ignored"),
          (along(lambda x, m, d: masked(x, m, d).nan_to_num()), "NaN, not 0"), (along(lambda x, m, d: masked(x, ~m, d)), "masked out"), (along(lambda x, m, d: x.sum(d)/m.sum(d)), "before you sum")]


# 8. A micro-batch

def step(x, mask, n, kind, raw=None, a=None, old=None, c=None, average=lambda l, m: masked(l, m, 1).mean(), scale=True, back=True, clip=clip):
    loss = clip(a, x, old, c)[0] if kind == "grpo_clip" else naive(raw if kind == "no_baseline" else a, x)
    total = average(loss, mask)/(n if scale else 1)
    if back: total.backward()
    return total, {}


def step_row_by_row(x, mask, n, kind, raw, a, old, c):
    rows = []
    for b in range(len(x)):
        keep = mask[b]
        now, w = x[b][keep], (raw if kind == "no_baseline" else a)[b]
        rows.append((clip_by_cases(w[None], now[None], old[b][keep][None], c)[0] if kind == "grpo_clip" else -w*now).mean())
    total = torch.stack(rows).mean()/n
    total.backward()
    return total.item(), dict(kind=kind)


STEP = [(lambda *a: step(*a, scale=False), "gradient_accumulation_steps"), (lambda *a: step(*a, back=False), "backward pass"), (lambda *a: step(*a, average=masked), "each response first"), (lambda *a: step(*a, average=lambda l, m: (l*m).mean()), "tokens that count"),
        (lambda *a: step(*a, average=lambda l, m: l.mean()), "mask is missing"), (lambda *a: step(*a, average=lambda l, m: masked(l, m, 1).sum()), "over responses, not the sum"), (lambda *a: step(*a, average=lambda l, m: (l*m).sum(1).mean()), "over tokens, not the sum"),
        (lambda *a: step(*a)[0], "a loss and a dict"), (lambda *a: step(*a, clip=between(0, math.inf)), "clip is missing"), (lambda *a: step(*a, clip=between(0, 1.2)), "clip below, too"),
        (lambda *a: step(*a, clip=between(.8, math.inf)), "clip above, too"), (lambda *a: step(*a, clip=lambda *b: (-b[0]*(b[1] - b[2]).exp().clamp(.8, 1.2), {})), "expected")]


def between(low, high): # The clipped loss with bounds of its own
    def f(a, n, o, c):
        ratio = (n - o).exp()
        return -torch.minimum(ratio*a, ratio.clamp(low, high)*a), {}
    return f


# 9. GAE

def gae(r, v, g, l):
    delta = r + g*torch.cat([v[1:], v[:1]*0]) - v
    return torch.stack([sum((g*l)**(k - t)*delta[k] for k in range(t, len(r))) for t in range(len(r))])


def gae_backwards(r, v, g, l):
    out, ahead = [], 0.
    for t in range(len(r) - 1, -1, -1):
        ahead = r[t] + (g*v[t + 1] if t + 1 < len(r) else 0.) - v[t] + g*l*ahead
        out.insert(0, ahead)
    return torch.stack(out)


GAE = [(lambda r, v, g, l: torch.cat([gae(r[:-1] + g*torch.cat([v[1:-1]*0, v[-1:]])[:len(r) - 1], v[:-1], g, l), torch.zeros(1)]) if len(r) > 1 else r*0, "the last token is missing, after which the value is 0"), (lambda r, v, g, l: gae(torch.cat([r[:-1], r[-1:] + g*v[-1:]]), v, g, l), "after the end"), (lambda r, v, g, l: gae(r, v, g, 1.), "lam is missing"), (lambda r, v, g, l: gae(r, v, g, l) + v, "returns"), (lambda r, v, g, l: gae(r, v, g, 0.), "later differences"),
       (lambda r, v, g, l: gae(r, 0*v, g, l), "values are missing"), (lambda r, v, g, l: gae(r, v, g, l).flip(0), "reversed"), (lambda r, v, g, l: -gae(r, v, g, l), "expected")]


def gae_forwards(r, v, g, l):
    out, ahead = [], 0.
    for x in r + g*torch.cat([v[1:], v[:1]*0]) - v: out.append(ahead := x + g*l*ahead)
    return torch.stack(out)


GAE += [(gae_forwards, "not earlier ones")]


# 10. DPO on a model

def log_prob(lm, tokenizer, prompt, response, end=True, shift=1, mean=False, skip=0):
    first = tokenizer.encode(prompt)
    ids = torch.tensor([first + tokenizer.encode(response) + ([tokenizer.end_of_text] if end else [])])
    table = lm(ids)[0].log_softmax(-1)
    each = torch.stack([table[t - shift, ids[0, t]] for t in range(len(first) + skip, ids.shape[1])])
    return each.mean() if mean else each.sum()


def dpo(lm, ref, tokenizer, beta, prompt, good, bad, **how):
    a, b = (log_prob(lm, tokenizer, prompt, x, **how) - log_prob(ref, tokenizer, prompt, x, **how) for x in (good, bad))
    return -F.logsigmoid(beta*(a - b))


def dpo_of_whole_texts(lm, ref, tokenizer, beta, prompt, good, bad):
    "The prompt's tokens cancel"
    def whole(m, text):
        ids = torch.tensor([tokenizer.encode(prompt + text) + [tokenizer.end_of_text]])
        return -F.cross_entropy(m(ids)[0, :-1], ids[0, 1:], reduction="sum")
    margin = beta*(whole(lm, good) - whole(lm, bad) - whole(ref, good) + whole(ref, bad))
    return torch.log1p(torch.exp(-margin))


DPO = [(lambda *a: dpo(*a, skip=1), "first token of the response"), (lambda *a: dpo(*a, end=False), "end token"), (lambda *a: dpo(*a, shift=0), "token after it"), (lambda lm, ref, *a: dpo(lm, lambda ids: torch.zeros(1, ids.shape[1], 6).double(), *a[:2], a[2], *a[3:]), "expected"), (lambda *a: dpo(*a[:5], a[6], a[5]), "swapped"),
       (lambda *a: dpo(*a, mean=True), "don't average"), (lambda lm, ref, t, b, *a: dpo(lm, ref, t, 1., *a), "beta is missing"), (lambda *a: -dpo(*a), "needs a minus"), (lambda *a: 1 - (-dpo(*a)).exp(), "logarithm is missing"),
       (torch.no_grad()(dpo), "no gradient"), (lambda *a: dpo(*a).item(), "expected a tensor")]


# 11. Best of n

def best(p, r, n):
    most, below = (torch.stack([p[f(r, x)].sum() for x in r]) for f in (torch.le, torch.lt))
    return p*(most**n - below**n)/(most - below)


def best_by_levels(p, r, n):
    out = torch.zeros_like(p)
    for x in r.unique():
        at = r == x
        out[at] = p[at]/p[at].sum()*((p[r <= x].sum())**n - (p[r < x].sum())**n)
    return out


def best_of_ranks(p, r, n):
    out, order = torch.zeros_like(p), r.argsort()
    most = p[order].cumsum(0)
    out[order] = most**n - torch.cat([most[:1]*0, most[:-1]])**n
    return out


BEST = [(best_of_ranks, "have no order"), (lambda p, r, n: best(p, r, n)*torch.stack([p[r == x].sum() for x in r])/p, "share their level"), (lambda p, r, n: 1 - (1 - p)**n, "drawn at all"), (lambda p, r, n: p**n, "all n are this one"), (lambda p, r, n: best(p, -r, n), "worst of n"),
        (lambda p, r, n: p, "policy itself"), (lambda p, r, n: p*(r == r.max())/p[r == r.max()].sum(), "finite n"), (lambda p, r, n: best(p, r, n + 1), "expected")]


# Masks, entropy, preferences, the divergence in the reward

def mask_of(starts, lengths, T, first=-1, end=-1): return torch.tensor([[s + first <= t < n + end for t in range(T)] for s, n in zip(starts, lengths)])


def mask_by_slices(starts, lengths, T):
    out = torch.zeros(len(starts), T, dtype=torch.bool)
    for row, s, n in zip(out, starts, lengths): row[max(s, 1) - 1:n - 1] = True
    return out


MASK = [(lambda s, n, T: mask_of(s, n, T, 0), "predicts the first"), (lambda s, n, T: mask_of(s, n, T, -2), "too early"), (lambda s, n, T: mask_of(s, n, T, end=99), "padding doesn't count"),
        (lambda s, n, T: mask_of(s, n, T, end=-2), "last token of the response"), (lambda s, n, T: mask_of(s, n, T, 0, 0), "shift by one"), (lambda s, n, T: mask_of(s, n, T, end=0), "too many"),
        (lambda s, n, T: ~mask_of(s, n, T), "that is the prompt"), (lambda s, n, T: mask_of(s, n, T, -99), "prompt doesn't count"), (lambda s, n, T: mask_of(s, n, T).float(), "tensor of bool"),
        (lambda s, n, T: mask_of(s, n, T)[:, 1:], "expected"), (lambda s, n, T: torch.ones(len(s), T, dtype=torch.bool), "expected")]


def kept(x, m): return torch.where(m, x, 0.)
def total(x, d): return x.sum() if d is None else x.sum(d)
def norm(x, m, c, d): return total(kept(x, m), d)/c


def norm_in_loops(x, m, c, d):
    if d is None: return sum(v/c for v, k in zip(x.flatten(), m.flatten()) if k)
    return torch.stack([sum((v[j]/c for j in range(len(v)) if k[j]), torch.zeros((), dtype=x.dtype)) for v, k in ((x[i], m[i]) if d else (x[:, i], m[:, i]) for i in range(x.shape[1 - d]))])


NORM = [(lambda x, m, c, d: total(kept(x, m), d), "constant is missing"), (lambda x, m, c, d: total(kept(x, m), d)*c, "divide by the constant"), (lambda x, m, c, d: total(x, d)/c, "mask is missing"),
        (lambda x, m, c, d: total(kept(x, m), d)/total(m, d), "not a mean"), (lambda x, m, c, d: total(kept(x, m), d)/total(m, d)/c, "as well"), (lambda x, m, c, d: kept(x, m).sum()/c, "dim is ignored"),
        (lambda x, m, c, d: total(kept(x, ~m), d)/c, "masked out"), (lambda x, m, c, d: total(x*m, d)/c, "infinity times 0"), (lambda x, m, c, d: -norm(x, m, c, d), "expected"),
        (lambda x, m, c, d: norm(x.abs(), m, c, d), "expected")]


def entropy(z): return -(z.softmax(-1)*z.log_softmax(-1)).sum(-1)
def entropy_by_difference(z): return z.logsumexp(-1) - (z.softmax(-1)*z).sum(-1)


ENTROPY = [(lambda z: -entropy(z), "minus is missing"), (lambda z: entropy(z)/math.log(2), "not bits"), (lambda z: entropy(z)/z.shape[-1], "not a mean"), (lambda z: -z.log_softmax(-1).mean(-1), "weight by"),
           (lambda z: -(z.softmax(-1)*z.log_softmax(-1)), "sum over the vocabulary"), (lambda z: entropy(z).exp(), "perplexity"), (lambda z: -(z.softmax(-1)*z).sum(-1), "aren't log-probabilities"),
           (lambda z: entropy(z).mean(), "for each position"), (lambda z: -(z.exp()/z.exp().sum(-1, keepdim=True)*(z - z.exp().sum(-1, keepdim=True).log())).sum(-1), "overflows"),
           (lambda z: -z.log_softmax(-1).max(-1).values, "expected"), (lambda z: z.logsumexp(-1), "expected")]


def preferred(a, b): return torch.nn.functional.softplus(b - a).mean()
def preferred_by_logaddexp(a, b): return (torch.logaddexp(a, b) - a).mean()


PREFERRED = [(lambda a, b: preferred(b, a), "swapped"), (lambda a, b: preferred(a, b)*len(a), "not a sum"), (lambda a, b: -(a - b).sigmoid().mean(), "logarithm is missing"), (lambda a, b: -preferred(a, b), "needs a minus"),
             (lambda a, b: -(a - b).sigmoid().log().mean(), "use logsigmoid"), (lambda a, b: (b - a).exp().log1p().mean(), "use logsigmoid"), (lambda a, b: torch.nn.functional.softplus(b - a), "not for each"), (lambda a, b: preferred(a, b)/math.log(2), "not bits"),
             (lambda a, b: (1 - a + b).clamp(min=0).mean(), "hinge"), (lambda a, b: torch.nn.functional.softplus(b.mean() - a.mean()), "in pairs"), (lambda a, b: torch.nn.functional.softplus(-a/b).mean(), "not a ratio"),
             (lambda a, b: (b - a).mean(), "expected")]


def penalized(r, x, y, m, b): return r - b*((x - y)*m).sum(1)
def penalized_by_where(r, x, y, m, b): return r + b*torch.where(m, y - x, 0.).sum(1)


PENALIZED = [(lambda r, x, y, m, b: penalized(r, y, x, m, b), "price is subtracted"), (lambda r, x, y, m, b: r - b*((x - y)*m).sum(1)/m.sum(1), "not the mean"), (lambda r, x, y, m, b: r - b*(x - y).sum(1), "mask is missing"),
             (lambda r, x, y, m, b: r - ((x - y)*m).sum(1), "beta is missing"), (lambda r, x, y, m, b: r - b*((x - y)**2/2*m).sum(1), "k2"), (lambda r, x, y, m, b: r - b*(((y - x).exp() - 1 + x - y)*m).sum(1), "k3"),
             (lambda r, x, y, m, b: r - b*((x - y).exp()*m).sum(1), "no exponential"), (lambda r, x, y, m, b: r - b*((x - y).abs()*m).sum(1), "absolute value"), (lambda r, x, y, m, b: r - ((x - y)*m).sum(1)/b, "multiply by beta"),
             (lambda r, x, y, m, b: r - b*((x - y)*~m).sum(1), "only the tokens of the response"), (lambda r, x, y, m, b: r - b*((x - y)*m).sum(1).mean(), "not their mean"), (lambda r, x, y, m, b: r, "expected")]


def majority(p, k): return sum(math.comb(k, c)*p**c*(1 - p)**(k - c) for c in range((k + 1)//2, k + 1))


def majority_vote_by_vote(p, k):
    chances = [1.]                                                  # Of each number of right votes
    for _ in range(k): chances = [a*(1 - p) + b*p for a, b in zip([*chances, 0], [0, *chances])]
    return sum(chances[k//2 + 1:])


MAJORITY = [(lambda p, k: sum(math.comb(k, c)*p**c*(1 - p)**(k - c) for c in range(k//2, k + 1)), "is no majority"), (lambda p, k: sum(p**c*(1 - p)**(k - c) for c in range(k//2 + 1, k + 1)), "in any order"),
            (lambda p, k: 1 - (1 - p)**k, "pass@k"), (lambda p, k: p**k, "needn't all"), (lambda p, k: math.comb(k, k//2 + 1)*p**(k//2 + 1)*(1 - p)**(k//2), "larger majority"),
            (lambda p, k: 1 - majority(p, k), "wrong majority"), (lambda p, k: p, "single vote"), (lambda p, k: float(p > .5), "limit"), (lambda p, k: round(k*p) > k/2, "expected"), (lambda p, k: p > .5, "expected")]


TASKS = {"optimum": (OPTIMUM, optimum, optimum_one_by_one), "k3": (K3, k3, lambda a, b: torch.expm1(b - a) + a - b), "compute_naive_policy_gradient_loss": (NAIVE, naive, lambda a, x: torch.einsum("bo,bt->bt", a, -x)),
         "rloo": (RLOO, rloo, rloo_in_loops), "compute_group_normalized_rewards": (NORMALIZED, normalized, normalized_in_loops), "compute_grpo_clip_loss": (CLIP, clip, clip_by_cases), "masked_mean": (MASKED, masked, masked_by_nan),
         "grpo_microbatch_train_step": (STEP, step, step_row_by_row), "gae": (GAE, gae, gae_backwards), "compute_per_instance_dpo_loss": (DPO, dpo, dpo_of_whole_texts), "best_of_n": (BEST, best, best_by_levels),
         "response_mask": (MASK, mask_of, mask_by_slices), "masked_normalize": (NORM, norm, norm_in_loops), "compute_entropy": (ENTROPY, entropy, entropy_by_difference),
         "preference_loss": (PREFERRED, preferred, preferred_by_logaddexp), "penalized_rewards": (PENALIZED, penalized, penalized_by_where), "majority_right": (MAJORITY, majority, majority_vote_by_vote)}
CLIP += [(lambda *a: (clip(*a)[0], None), "expected a loss and a dict, got (float64 (3, 4), None)")]
ENTROPY += [(lambda z: -((p := z.softmax(-1))*p.log()).sum(-1), "0*log(0) is nan"),
            (lambda z: (e := (z - z.max()).exp()).sum(-1).log() - (e*(z - z.max())).sum(-1)/e.sum(-1), "not one for all")]
MASK += [(lambda *a: mask_of(*a).numpy(), "expected a tensor of bool, got ndarray bool")]
OPTIMUM += [(lambda *a: optimum(*a).numpy(), "1.0): expected Tensor float64 (2,), got ndarray float64 (2,)")]


def step_that_returns_the_whole_loss(x, mask, steps, *rest):
    loss, info = step(x, mask, steps, *rest)
    return loss*steps, info


def step_that_divides_late(x, mask, steps, *rest):
    loss, info = step(x, mask, 1, *rest)
    return loss/steps, info


STEP += [(step_that_returns_the_whole_loss, "the loss that was divided"), (step_that_divides_late, "before the backward pass"),
         (lambda x, m, n, kind, raw, a, *rest: step(x, m, n, kind, a, a, *rest), "takes the raw rewards")]
graders = Graders(ex, [(task, *pair) for task, (wrong, right, _) in TASKS.items() for pair in wrong + spoiled(right)],
                  [(task, f) for task, (_, *right) in TASKS.items() for f in right] + [("compute_grpo_clip_loss", lambda *a: [*clip(*a)])])
test_wrong_answers, test_right_answers, test_each_grader, test_same_words = graders.tests(least_wrong=10)


def test_what_the_code_raises_is_kept_and_a_stop_passes():
    for task in graders.tasks: graders.stops(task)
