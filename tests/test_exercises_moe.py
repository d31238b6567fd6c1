"Graders of chapter 08's exercises: what each refuses, in which words, and that other right answers pass."
import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch
from graders import Graders, fails

from lmcourse.exercises import moe as ex
from lmcourse.moe.router_np import router_forward


# 1. Parameters

def parameters(router=1, three=3, wide=4, shared_=1, dense_=None, per=None, order=1):
    def f(D, F, E, k, shared, layers, dense_layers):
        dense_layers = dense_layers if dense_ is None else dense_
        moe, expert, dense = (layers if per is None else per) - dense_layers, three*D*F, dense_layers*three*D*wide*F
        return tuple(dense + moe*(router*D*E + (n + shared*shared_)*expert) for n in (E, k))[::order]
    return f


def active_router(part):
    "The active parameters hold only this part of the router's rows"
    def f(D, F, E, k, shared, layers, dense_layers):
        total, active = parameters()(D, F, E, k, shared, layers, dense_layers)
        return total, active - (layers - dense_layers)*D*(E - part(k))
    return f


def only_routed(*a): return parameters()(*a)[0], parameters(shared_=0)(*a)[1]


def by_counting(D, F, E, k, shared, layers, dense_layers):
    total = active = 0
    for layer in range(layers):
        sizes = [(4*F, D), (D, 4*F), (4*F, D)] if layer < dense_layers else []
        active += sum(a*b for a, b in sizes)
        total += sum(a*b for a, b in sizes)
        if layer >= dense_layers: total, active = total + D*E + 3*D*F*(E + shared), active + D*E + 3*D*F*(k + shared)
    return [total, active]


# 2. Routing

def softmax(z, axis=-1):
    e = np.exp(z - z.max(axis, keepdims=True))
    return e/e.sum(axis, keepdims=True)


def routed(order=lambda z: np.argsort(-z, -1, kind="stable"), norm=True, soft=softmax, after=lambda c, w: (c, w)):
    def f(logits, k):
        chosen, p = order(logits)[:, :k], soft(logits)
        kept = np.take_along_axis(p, chosen, -1)
        return after(chosen, kept/kept.sum(-1, keepdims=True) if norm else kept)
    return f


def by_torch(logits, k):
    z = torch.from_numpy(logits)
    chosen = z.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return chosen.numpy(), z.gather(-1, chosen).softmax(-1).numpy()


def heaped(z): # Sorts short rows as a stable sort would
    return np.argsort(-z, -1, kind="stable" if z.shape[1] <= 16 else "heapsort")


def exponentials(z):
    with np.errstate(all="ignore"): return np.exp(z)/np.exp(z).sum(-1, keepdims=True)


def after_choosing(soft):
    "Takes the softmax of the chosen logits"
    def f(logits, k):
        chosen = np.argsort(-logits, -1, kind="stable")[:, :k]
        return chosen, soft(np.take_along_axis(logits, chosen, -1))
    return f


# 3. Dispatch

def dispatched(act=lambda h: np.maximum(h, 0), weigh=lambda w: w, choose=lambda c: c, add=0, mean=False):
    def f(x, w1, w2, chosen, weights):
        y, chosen, weights = add*x, choose(chosen), weigh(weights)
        for n, (row, w) in enumerate(zip(chosen, weights)):
            for e, share in zip(row, w): y[n] = y[n] + share*(w2[e % len(w2)]@act(w1[e % len(w1)]@x[n]))
        return y/chosen.shape[1] if mean else y
    return f


def overwritten(x, w1, w2, chosen, weights):
    y = np.zeros_like(x)
    for e in range(len(w1)):
        rows, j = np.nonzero(chosen == e)
        y[rows] = np.maximum(x[rows]@w1[e].T, 0)@w2[e].T*weights[rows, j, None]
    return y


def dense_mask(x, w1, w2, chosen, weights):
    sent = np.zeros((len(x), len(w1)))
    np.put_along_axis(sent, chosen, weights, -1)
    return np.einsum("edf,enf,ne->nd", w2, np.maximum(np.einsum("efd,nd->enf", w1, x), 0), sent)


# 4. Drops

def drops(room=lambda N, k, E, f: math.ceil(f*N*k/E), of=lambda over, load, chosen: int(over.sum())):
    def f(chosen, num_experts, factor):
        load = np.bincount(chosen.ravel(), minlength=num_experts)
        N, k = chosen.shape
        return of(np.maximum(load - room(N, k, num_experts, factor), 0), load, chosen)
    return f


def one_by_one(chosen, num_experts, factor):
    room, seen, lost = min(len(chosen), math.ceil(factor*chosen.size/num_experts)), Counter(), 0
    for e in chosen.T.ravel().tolist():
        lost += seen[e] >= room
        seen[e] += 1
    return lost


# 5 and 6. The balance loss

def balanced(join=lambda x: x, per="visits", factor=1, of=np.mean, p_of=softmax, off=0):
    def f(logits, chosen):
        losses = []
        for z, c in zip(join(logits), join(chosen)):
            f = np.bincount(c.ravel(), minlength=z.shape[1])/(c.size if per == "visits" else len(c))
            losses.append((z.shape[1] if factor else 1)*(f*p_of(z).mean(0)).sum() - off)
        return of(losses)
    return f


def pooled(x): return [np.concatenate(x)]


def by_loops(logits, chosen):
    total = 0.
    for z, c in zip(logits, chosen):
        for e in range(z.shape[1]): total += z.shape[1]*(c == e).mean()*softmax(z)[:, e].mean()/len(logits)
    return float(total)


def gradient(scale=1, mean=True, tokens=True, per="visits", soft=True, factor=True, extra=0):
    def f(logits, chosen):
        (N, E), p = logits.shape, softmax(logits)
        f = np.bincount(chosen.ravel(), minlength=E)/(chosen.size if per == "visits" else N)
        g = (p if soft else 1)*(f - (mean*(p*f).sum(-1, keepdims=True) if soft else 0))
        return scale*(E if factor else 1)/(N if tokens else 1)*(g + np.zeros_like(p)) + extra
    return f


def by_autograd(logits, chosen):
    z = torch.tensor(logits, requires_grad=True)
    f = torch.bincount(torch.from_numpy(chosen).flatten(), minlength=z.shape[1]).double()/chosen.size
    return torch.autograd.grad(z.shape[1]*(f*z.softmax(-1).mean(0)).sum(), z)[0].numpy()


# 7. The bias

def biased(step=np.sign, sign=1, keep=True, even=lambda load, chosen: load.mean(), size=1.):
    def f(bias, chosen, rate):
        load = np.bincount(chosen.ravel(), minlength=len(bias))
        return bias*keep + size*rate*sign*step(even(load, chosen) - load)
    return f


def in_place(bias, chosen, rate):
    bias += rate*np.sign(chosen.size/len(bias) - np.bincount(chosen.ravel(), minlength=len(bias)))
    return bias


def by_hand(bias, chosen, rate):
    load, even = Counter(chosen.ravel().tolist()), chosen.size/len(bias)
    return np.array([b - rate if load[e] > even else b + rate if load[e] < even else b for e, b in enumerate(bias)])


# 9. Scores

def scores(q, q_rope, latents, k_rope, up, root=lambda K, Q, R: (K + Q)**.5, parts=(1, 1)):
    K, Q, R = len(q), len(q_rope), latents.shape[1]
    return (parts[0]*(latents@(q@up)) + parts[1]*(k_rope@q_rope))/root(K, Q, R)


def scored(**how): return lambda *a: scores(*a, **how)


def unpacked(q, q_rope, latents, k_rope, up): return (latents@up.T@q + k_rope@q_rope)/(len(q) + len(q_rope))**.5


def by_method(q, q_rope, latents, k_rope, up): return (latents.dot(up.T).dot(q) + k_rope.dot(q_rope))/(len(q) + len(q_rope))**.5


def by_numpy(q, q_rope, latents, k_rope, up): return (np.dot(latents, np.dot(q, up)) + np.sum(k_rope*q_rope, -1))/np.sqrt(len(q) + len(q_rope))


def side_by_side(q, q_rope, latents, k_rope, up): return np.hstack([latents, k_rope])@np.concatenate([q@up, q_rope])/(len(q) + len(q_rope))**.5


def unpacked_side_by_side(q, q_rope, latents, k_rope, up): return np.hstack([np.dot(latents, up.T), k_rope])@np.concatenate([q, q_rope])/(len(q) + len(q_rope))**.5


def unpacked_copies(q, q_rope, latents, k_rope, up): # `np.array` of a tallied array is a plain one
    return unpacked(*map(np.array, (q, q_rope, latents, k_rope, up)))


def partly_copied(q, q_rope, latents, k_rope, up): return unpacked(np.array(q), q_rope, np.array(latents), k_rope, np.array(up))


def transposed(q, q_rope, latents, k_rope, up): return (up.T@q@latents.T + q_rope@k_rope.T)*(len(q) + len(q_rope))**-.5


# 10. REINFORCE

def rewarded(base=lambda l: (l.sum() - l)/(len(l) - 1), sign=1, off=lambda p, one: p, over=len, weigh=lambda p, one: 1):
    def f(logits, chosen, losses):
        p, one = softmax(logits), np.eye(logits.shape[1])[chosen]
        return sign*(losses - base(losses))[:, None]*(one - off(p, one))*weigh(p, one)/over(losses)
    return f


def token_by_token(logits, chosen, losses):
    z = torch.tensor(logits, requires_grad=True)
    above = torch.stack([torch.tensor(losses[n] - np.delete(losses, n).mean()) for n in range(len(losses))])
    (above*z.log_softmax(-1)[range(len(losses)), chosen]).mean().backward()
    return z.grad.numpy()


ANY = [(fails, "your code raised"), (None, "expected a function"), (lambda *a: None, "for "), (lambda *a: "text", "for ")]
def row_by_row(q, t, c, r, u):
    scores, query, long = np.zeros_like(c[:, 0]), np.squeeze(q@u), np.shape(q)[0] + t.size
    for s in range(np.size(scores)): scores[s] = np.append(query, t)@np.append(c[s], r[s])
    return np.divide(scores, long**.5, out=scores)


TASKS = {
    "expert_parameters": ([(parameters(router=0), "the router is missing"), (parameters(three=2), "three matrices"), (parameters(wide=1), "4 F wide"),
                           (parameters(shared_=0), "shared experts are missing"), (parameters(dense_=0), "the dense layers have no experts"), (parameters(order=-1), "the wrong way round"),
                           (parameters(shared_=2), "for D = "), (parameters(router=2), "for D = "), (lambda *a: parameters()(*a)[0], "for D = "),
                           (lambda *a: [1, (2, 3)], "for D = "), (active_router(lambda k: 0), "uses the router, too"), (active_router(lambda k: k), "not k rows"),
                           (only_routed, "uses the shared experts, too")], [parameters(), by_counting]),
    "route": ([(routed(norm=False), "do not sum to 1"), (routed(order=lambda z: z.shape[1] - 1 - np.argsort(-z[:, ::-1], -1, kind="stable")), "the lowest expert comes first"),
               (routed(order=lambda z: np.argsort(z, -1, kind="stable")), "for logits"), (routed(after=lambda c, w: (c[:, ::-1], w[:, ::-1])), "the best must come first"),
               (routed(after=lambda c, w: (w, c)), "the wrong way round"), (routed(after=lambda c, w: c), "expected experts and weights"), (routed(soft=exponentials), "exp overflows"),
               (routed(soft=lambda z: 1/(1 + np.exp(-z.clip(-500, 500)))), "for logits"), (routed(after=lambda c, w: (c + 1, w)), "for logits"),
               (routed(order=heaped), "for logits"), (after_choosing(exponentials), "exp overflows")], [routed(), by_torch]),
    "dispatch": ([(dispatched(weigh=np.ones_like), "the weights are left out"), (dispatched(weigh=np.ones_like, mean=True), "the mean is taken"),
                  (dispatched(choose=lambda c: c[:, :1]), "only the first choice"), (dispatched(act=lambda h: h), "the ReLU is missing"), (dispatched(add=1), "the block's work"),
                  (dispatched(weigh=lambda w: w[:, ::-1]), "in the order of `chosen`"), (dispatched(act=np.tanh), "for N = "), (dispatched(choose=lambda c: c + 1), "for N = "),
                  (dispatched(act=abs), "for N = "), (dispatched(weigh=lambda w: w/w.sum(-1, keepdims=True)), "not divided by their sum"), (overwritten, "the last one replaces the others")], [dispatched(), dense_mask]),
    "dropped": ([(drops(room=lambda N, k, E, f: math.floor(f*N*k/E)), "rounded up"), (drops(room=lambda N, k, E, f: math.ceil(f*N/E)), "k visits"),
                 (drops(room=lambda N, k, E, f: math.ceil(N*k/E)), "the factor is left out"), (drops(of=lambda o, load, c: int(c.size - o.sum())), "visits that are served"),
                 (drops(of=lambda o, load, c: int(o.max())), "of one expert"), (drops(of=lambda o, load, c: o.sum()/c.size), "a share, not a number"),
                 (drops(of=lambda o, load, c: int(o.sum()) + 1), "for "), (drops(room=lambda N, k, E, f: math.ceil(f*N*k)), "for "), (lambda *a: -drops()(*a) - 1, "for ")],
                [drops(), one_by_one, drops(of=lambda o, load, c: o.sum(), room=lambda N, k, E, f: np.ceil(f*N*k/E))]),
    "balance": ([(balanced(join=pooled), "one hides the other"), (balanced(join=pooled, per="tokens"), "pooled, and f is not divided"), (balanced(per="tokens"), "shares of the visits"),
                 (balanced(of=np.sum), "not the sum"), (balanced(factor=0), "the factor E is missing"), (balanced(off=1), "1 was subtracted"),
                 (balanced(of=max), "for "), (balanced(p_of=lambda z: z), "for "), (balanced(of=list), "for ")], [balanced(), by_loops]),
    "balance_gradient": ([(gradient(soft=False), "at the probabilities"), (gradient(mean=False), "also subtracts the mean"), (gradient(tokens=False), "mean over the tokens"),
                          (gradient(per="tokens"), "shares of the visits"), (gradient(factor=False), "the factor E is missing"), (gradient(scale=-1), "uphill"),
                          (gradient(scale=2), "for N"), (gradient(extra=1), "for N"), (lambda z, c: gradient()(z, c).T, "for N")], [gradient(), by_autograd]),
    "next_bias": ([(biased(sign=-1), "busy experts must fall"), (biased(step=lambda d: d), "not one in proportion"), (biased(keep=False), "added to the old bias"),
                   (biased(step=lambda d: np.where(d > 0, 1, -1)), "exactly an even share stays"), (biased(even=lambda load, c: len(c)), "not N"),
                   (biased(even=lambda load, c: np.median(load)), "not the median"), (biased(even=lambda load, c: c.size//len(load)), "need not be a whole number"), (biased(size=2.), "for "), (in_place, "your code changed its"), (biased(size=0.), "for ")],
                  [biased(), by_hand]),
    "distinct": ([(lambda E, k, n: min(E, n*k), "several tokens"), (lambda E, k, n: n*k, "the visits"), (lambda E, k, n: E*(1 - k/E)**n, "nobody visits"),
                  (lambda E, k, n: 1 - (1 - k/E)**n, "for one expert"), (lambda E, k, n: E*(1 - (1 - 1/E)**(n*k)), "all different"),
                  (lambda E, k, n: E*(1 - (1 - 1/E)**n), "not 1"), (lambda E, k, n: k*(1 - (1 - k/E)**n), "for E"), (lambda E, k, n: round(E*(1 - (1 - k/E)**n)), "for E"),
                  (lambda E, k, n: E, "for E")], [lambda E, k, n: E*(1 - (1 - k/E)**n), lambda E, k, n: np.float64(E - E*math.exp(n*math.log1p(-k/E))) if k < E else E,
                 lambda E, k, n: E*(1 - (1 - Fraction(k, E))**n)]),
    "latent_scores": ([(scored(root=lambda K, Q, R: 1), "the root of K + Q is missing"), (scored(root=lambda K, Q, R: K**.5), "both parts count"),
                       (scored(root=lambda K, Q, R: (R + Q)**.5), "the root stays"), (scored(parts=(1, 0)), "the rotated part is missing"), (scored(parts=(0, 1)), "the content is missing"),
                       (scored(root=lambda K, Q, R: K + Q), "divide by the root"), (unpacked, "the keys were unpacked"),
                       (by_method, "the keys were unpacked"), (unpacked_side_by_side, "the keys were unpacked"),
                       (unpacked_copies, "could be counted"), (partly_copied, "could be counted"), (scored(parts=(1, -1)), "for S"),
                       (lambda q, t, c, r, u: np.einsum("sr,kr,k->s", c, u, q), "can't be counted"),
                       (lambda q, t, c, r, u: (np.vecdot(np.matvec(u, c), q) + r@t)/(len(q) + len(t))**.5, "can't be counted")], [scored(), transposed, by_numpy, side_by_side]),
    "reinforce": ([(lambda z, c, l: (rewarded()(z, c, l), l.mean()), "expected an array of shape (3, 4)"), (lambda z, c, l: rewarded()(z, c, l).tolist(), "expected an array of shape (3, 4)"), (rewarded(sign=-1), "that raises the loss"), (rewarded(base=lambda l: 0), "the baseline is missing"), (rewarded(base=np.mean), "a token's own loss"),
                   (rewarded(over=lambda l: 1), "mean over the tokens"), (rewarded(off=lambda p, one: 0), "p was not subtracted"), (rewarded(base=np.median), "the baseline is the median"),
                   (rewarded(off=lambda p, one: 0, weigh=lambda p, one: 1/p), "at the probabilities"), (rewarded(off=lambda p, one: p*one), "the other experts' logits"),
                   (rewarded(weigh=lambda p, one: (p*one).sum(-1, keepdims=True)), "is not a factor"), (rewarded(over=lambda l: len(l)*l.std()), "the spread of the losses"),
                   (lambda z, c, l: rewarded()(z, z.argmax(-1), l), "not the drawn one"), (rewarded(over=lambda l: len(l) - 1), "for N = ")], [rewarded(), token_by_token]),
}
WRONG = [(task, answer, words) for task, (wrong, _) in TASKS.items() for answer, words in [*wrong, *ANY]]
RIGHT = [(task, answer) for task, (_, right) in TASKS.items() for answer in right]
# Types and NumPy functions that make no difference
RIGHT += [("expert_parameters", lambda *a: np.array(parameters()(*a))), ("expert_parameters", lambda *a: tuple(map(float, parameters()(*a)))), ("route", after_choosing(softmax)), ("route", routed(after=lambda c, w: (c.astype(np.int32), w))), ("latent_scores", row_by_row)]

graders = Graders(ex, WRONG, RIGHT)
test_wrong_answers, test_right_answers, test_each_grader, test_same_words = graders.tests(least_wrong=10)


@pytest.mark.parametrize("task", graders.tasks)
def test_what_the_answer_raises_is_kept(task): graders.stops(task)


def test_the_answers_are_those_of_the_chapter():
    x, w = np.random.default_rng(0).normal(size=(7, 5)), np.eye(5)
    for got, right in zip(routed()(x, 2), router_forward(x, w, 2)): assert np.allclose(got, right)
