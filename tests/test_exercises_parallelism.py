"Graders of chapter 10's exercises: what each refuses, in which words, and that other right answers pass."
import math
from fractions import Fraction

import numpy as np
from graders import Graders, fails

from lmcourse.exercises import parallelism as ex
from lmcourse.parallelism.schedules import bubble, in_flight, interleaved, one_forward_one_backward, simulate
from lmcourse.training.parallel_np import ring_bytes


def zero(P, n, s, weights=2, grad=2, state=12): # Each stage splits one more
    return sum(b*P//(n if s >= first else 1) for first, b in ((3, weights), (2, grad), (1, state)))


def softmax_loss(slices, target):
    p = np.exp(np.concatenate(slices) - max(s.max() for s in slices))
    return -math.log(p[target]/p.sum()) if p[target] else (max(s.max() for s in slices) + math.log(p.sum()) - np.concatenate(slices)[target])


def log_of_softmax(slices, target):
    z = np.concatenate(slices)
    with np.errstate(divide="ignore"): return -np.log(np.exp(z - z.max())[target]/np.exp(z - z.max()).sum())


def by_the_first_maximum(slices, target):
    with np.errstate(over="ignore"): return slices[0].max() + np.log(sum(np.exp(s - slices[0].max()).sum() for s in slices)) - np.concatenate(slices)[target]


def filled(sizes, limit, over=0):
    out, room = [], -1
    for s in sizes:
        if s > room: out.append([]); room = limit + over
        out[-1].append(s); room -= s
    return out


def pair(t, n, i, j): return [*range(i*t//(2*n), (i + 1)*t//(2*n)), *range(j*t//(2*n), (j + 1)*t//(2*n))]


def merged(a, la, b, lb):
    share = 1/(1 + math.exp(min(lb - la, 700)))
    return share*a + (1 - share)*b if -math.inf < la else b


def load(chosen, E, n):
    rows = [0]*n
    for e in chosen.ravel().tolist(): rows[e//(E//n)] += 1
    return max(rows)*n/sum(rows)


def share(forward=3, run=4, head=1): return lambda h, f, o: h*forward*f/(run*f - head*o)


def scale(g, ddof=1, taken=1.):
    trace = sum(float(np.var(c, ddof=ddof)) for c in g.T)
    return trace/(float(np.sum(g.mean(0)**2)) - taken*trace/len(g))


def met(s, ends, v, lr, mu, look=True):
    g = s - sum(ends)/len(ends)
    v = mu*v + g
    return s - lr*(g + mu*v if look else v), v


def silent(P, n, steps, budget, vector=4): return next(h for h in range(1, steps + 1) if math.ceil(steps/h)*2*(n - 1)*P*vector <= budget*n)


def changes(a, *args): a[0] = a[0]*0; return a


WRONG = [
    ("ring_bytes", lambda b, n: (n - 1)*b//n, "reduce-scatter alone"), ("ring_bytes", lambda b, n: 2*b, "needn't send the piece that is its own"),
    ("ring_bytes", lambda b, n: 2*(n - 1)*b, "not the vector"), ("ring_bytes", lambda b, n: (n - 1)*b, "expected 144, got 288"),
    ("ring_bytes", lambda b, n: b, "got 96"), ("ring_bytes", lambda b, n: 2*n*b//max(1, n - 1), "got 256"), ("ring_bytes", lambda b, n: 0, "got 0"),
    ("ring_bytes", lambda b, n: 2*(n - 1)*(b//n + 1), "got 150"),
    ("tree_rounds", lambda n: n.bit_length() - 1, "rounded down"), ("tree_rounds", lambda n: n - 1, "a ring"), ("tree_rounds", lambda n: 2*(n - 1).bit_length(), "a reduction and a broadcast"),
    ("tree_rounds", lambda n: n.bit_length(), "knows at the start"), ("tree_rounds", lambda n: math.log2(n), "expected 2, got 1.58"), ("tree_rounds", lambda n: n, "got 8"),
    ("tree_rounds", lambda n: math.isqrt(n), "got 2"), ("tree_rounds", lambda n: round(math.log2(n)), "expected 3, got 2"),
    ("whole_loss", lambda a, c: sum(a)/len(a), "mean of the means"), ("whole_loss", lambda a, c: sum(x*k for x, k in zip(a, c))/sum(c), "0*nan"),
    ("whole_loss", lambda a, c: sum(x*k for x, k in zip(a, c) if k), "the sum over"), ("whole_loss", lambda a, c: sum(x*k for x, k in zip(a, c) if k)/len(a), "by the ranks"),
    ("whole_loss", lambda a, c: max(a), "got 4"), ("whole_loss", lambda a, c: a[0], "got 2"), ("whole_loss", lambda a, c: np.nanmean(a), "expected 3.5"),
    ("whole_loss", lambda a, c: sum(a), "got 6"),
    ("buckets", lambda s, n: [[x] for x in s], "each travels alone"), ("buckets", lambda s, n: [list(s)] if s else [], "one bucket"),
    ("buckets", lambda s, n: filled(sorted(s), n), "in the order"), ("buckets", lambda s, n: filled(s, n, -1), "exactly full"),
    ("buckets", lambda s, n: filled(s[::-1], n), "ready last"), ("buckets", lambda s, n: [*filled(s, n), []], "got [[2, 2, 2], [2], []]"),
    ("buckets", lambda s, n: [s[i:i + 2] for i in range(0, len(s), 2)], "expected [[2, 2, 2], [2]]"), ("buckets", lambda s, n: [sum(b) for b in filled(s, n)], "got [6, 2]"),
    ("zero_bytes", lambda P, n, s: zero(P, n, s + 1), "stage 0 splits nothing"), ("zero_bytes", lambda P, n, s: zero(P, n, s, state=8), "master copy"),
    ("zero_bytes", lambda P, n, s: zero(P, n, s, grad=4), "bfloat16 here"), ("zero_bytes", lambda P, n, s: n*zero(P, n, s), "all ranks hold"),
    ("zero_bytes", lambda P, n, s: 16*P//n, "everything was split"), ("zero_bytes", lambda P, n, s: 16*P, "expected 8,400"[:8]),
    ("zero_bytes", lambda P, n, s: P*(2*(s < 3) + 2*(s < 2) + 12*(s < 1)), "is missing"), ("zero_bytes", lambda P, n, s: zero(P, n, s - 1), "the moments first"),
    ("sliced_loss", lambda s, t: sum(softmax_loss([a], 0) for a in s), "expected"),
    ("sliced_loss", lambda s, t: -softmax_loss(s, t), "the sign"), ("sliced_loss", lambda s, t: math.exp(-softmax_loss(s, t)), "the probability"),
    ("sliced_loss", lambda s, t: softmax_loss(s, t) + np.concatenate(s)[t], "logit is missing"), ("sliced_loss", lambda s, t: softmax_loss(s[:1], min(t, len(s[0]) - 1)), "expected"),
    ("sliced_loss", lambda s, t: softmax_loss(s, t)/math.log(2), "expected"), ("sliced_loss", lambda s, t: 0., "got 0.0"), ("sliced_loss", lambda s, t: softmax_loss(s, 0), "expected"),
    ("sliced_loss", log_of_softmax, "subtract logarithms"), ("sliced_loss", by_the_first_maximum, "the maximum of all"),
    ("bubble", lambda p, m, v: p/m/v, "does not wait for itself"), ("bubble", lambda p, m, v: (p - 1)/m*v, "make it smaller"), ("bubble", lambda p, m, v: (p - 1)/m, "without chunks"),
    ("bubble", lambda p, m, v: (p - 1)/(m*v + p - 1), "over all time"), ("bubble", lambda p, m, v: m*v/max(1, p - 1), "work over idle"), ("bubble", lambda p, m, v: 1 + (p - 1)/(m*v), "of a step over"),
    ("bubble", lambda p, m, v: 0, "got 0"), ("bubble", lambda p, m, v: (m - 1)/(p*v), "got 1.75"),
    ("in_flight", lambda p, m, r: m, "that is GPipe"), ("in_flight", lambda p, m, r: p - r, "only m"), ("in_flight", lambda p, m, r: min(p, m), "the first rank"),
    ("in_flight", lambda p, m, r: min(p - r - 1, m), "count from 0"), ("in_flight", lambda p, m, r: min(r + 1, m), "holds most"), ("in_flight", lambda p, m, r: 1, "got 1"),
    ("in_flight", lambda p, m, r: min(2*(p - r) - 1, m), "interleaving"), ("in_flight", lambda p, m, r: p, "for p = 4, m = 8, r = 1: expected 3, got 4"),
    ("zigzag", lambda t, n, r: list(range(r*t//n, (r + 1)*t//n)), "contiguous"), ("zigzag", lambda t, n, r: pair(t, n, r, r + n), "mirror image"),
    ("zigzag", lambda t, n, r: list(range(r, t, n)), "every N-th"), ("zigzag", lambda t, n, r: pair(t, n, 2*n - 1 - r, r), "in order"), ("zigzag", lambda t, n, r: pair(t, n, r, 2*n - 1 - r)[:-1], "expected"),
    ("zigzag", lambda t, n, r: list(range(r*t//2//n, (r + 1)*t//2//n)), "front piece"), ("zigzag", lambda t, n, r: [], "got []"), ("zigzag", lambda t, n, r: pair(t, n, 2*r, 2*r + 1), "expected"),
    ("merge", lambda a, la, b, lb: (a + b)/2, "don't count the same"), ("merge", lambda a, la, b, lb: merged(a, lb, b, la), "expected"), ("merge", lambda a, la, b, lb: a, "first alone"),
    ("merge", lambda a, la, b, lb: b, "second alone"), ("merge", lambda a, la, b, lb: merged(a, la, b, lb).tolist(), "], got list ["), ("merge", lambda a, la, b, lb: a + b, "expected"), ("merge", lambda a, la, b, lb: merged(a, la, b, lb)[None], "expected"),
    ("merge", lambda a, la, b, lb: merged(a, la, b, lb).sum(), "expected"), ("merge", lambda a, la, b, lb: a*0, "0.0]"),
    ("busiest", lambda c, E, n: float(np.bincount(c.ravel(), minlength=E).max()*E/c.size), "counts experts"), ("busiest", lambda c, E, n: load(c, E, n)*c.size/n, "number of rows"),
    ("busiest", lambda c, E, n: load(c, E, n)/n, "share of all rows"), ("busiest", lambda c, E, n: load(c % n*(E//n), E, n), "expected"), ("busiest", lambda c, E, n: 1., "got 1.0"),
    ("busiest", lambda c, E, n: load(c[:, :1], E, n), "got 2.0"), ("busiest", lambda c, E, n: 1/load(c, E, n), "expected"), ("busiest", lambda c, E, n: np.bincount((c*n//E).ravel(), minlength=n), "expected"),
    ("save_every", lambda s, n, h: math.sqrt(2*s*h/n), "hours are not"), ("save_every", lambda s, n, h: math.sqrt(7200*s*h), "for one GPU"), ("save_every", lambda s, n, h: math.sqrt(3600*s*h/n), "the 2 is"),
    ("save_every", lambda s, n, h: math.sqrt(7200*s*h*n), "fail more often"), ("save_every", lambda s, n, h: 7200*s*h/n, "the root"), ("save_every", lambda s, n, h: 3600*h/n, "between failures"),
    ("save_every", lambda s, n, h: s, "got 60"), ("save_every", lambda s, n, h: math.sqrt(7200*s*h/n)/60, "expected"),
    ("model_share", lambda h, f, o: h, "nothing was taken"), ("model_share", share(head=-1), "was added"), ("model_share", lambda h, f, o: h*(4*f - o)/3/f, "the other way"),
    ("model_share", share(2, 3), "twice a forward"), ("model_share", share(head=0), "run twice"), ("model_share", share(4, 3), "expected"), ("model_share", share(1), "expected"),
    ("model_share", lambda h, f, o: h*3*(f - o)/(4*f - o), "runs once"),
    ("noise", lambda g: scale(g, taken=0.), "subtract its noise"), ("noise", lambda g: scale(g, 0), "divides by n - 1"), ("noise", lambda g: scale(g)/len(g), "batches of n"),
    ("noise", lambda g: 1/scale(g), "signal over noise"), ("noise", lambda g: g.var(0, ddof=1).sum(), "trace alone"), ("noise", lambda g: scale(g, taken=-1), "not subtracted"),
    ("noise", lambda g: scale(g)**.5, "lengths are squared"), ("noise", lambda g: g.var(ddof=1)/(g.mean()**2), "expected"), ("noise", lambda g: 0., "got 0.0"),
    ("meeting", lambda s, e, v, lr, mu: (s + lr*(s - np.mean(e, 0))*(1 + mu), v), "expected"), ("meeting", lambda s, e, v, lr, mu: met(2*s - s, [2*s - np.mean(e, 0)], v, lr, mu), "the start minus the mean"),
    ("meeting", lambda s, e, v, lr, mu: met(s, [sum(e)], v, lr, mu), "not their sum"), ("meeting", lambda s, e, v, lr, mu: met(s, e, v, lr, mu, False), "heavy-ball"),
    ("meeting", lambda s, e, v, lr, mu: (np.mean(e, 0), mu*v + s - np.mean(e, 0)), "without the outer optimizer"), ("meeting", lambda s, e, v, lr, mu: met(s, e, v, 1., mu), "outer rate"),
    ("meeting", lambda s, e, v, lr, mu: (met(s, e, v, lr, mu)[0], v), "velocity was not updated"), ("meeting", lambda s, e, v, lr, mu: met(s, e[:1], v, lr, mu), "first replica"),
    ("meeting", lambda s, e, v, lr, mu: met(s, e, v, lr, mu)[0], "expected"), ("meeting", lambda s, e, v, lr, mu: met(s, [np.full_like(s, np.mean(e))], v, lr, mu), "not over all numbers"),
    ("meeting", lambda s, e, v, lr, mu: (s, v), "expected ([0.8, 1.8], [0.2, 0.2]), got ([1.0, 2.0], [0.0, 0.0])"),
    ("pause", lambda P, n, s, b: -(-s//max(1, round(b*n/(8*(n - 1)*P)))), "expected 143, got 125"),
    ("pause", lambda P, n, s, b: max(1, s//max(1, b*n//(8*(n - 1)*P))), "one meeting too many"), ("pause", lambda P, n, s, b: b*n//(8*(n - 1)*P), "how many meetings"),
    ("pause", lambda P, n, s, b: -(-s//max(1, b//(8*(n - 1)*P))), "of the vector"), ("pause", lambda P, n, s, b: silent(P, n, s, 2*b), "reduce-scatter alone"),
    ("pause", lambda P, n, s, b: silent(P, n, s, b, 1), "four bytes"), ("pause", lambda P, n, s, b: silent(P, n, s, b, 2), "expected"), ("pause", lambda P, n, s, b: -(-s//max(1, b//(8*P))), "expected"),
    ("pause", lambda P, n, s, b: 10, "got 10"), ("pause", lambda P, n, s, b: math.ceil(s*8*P*(n - 1)/(n*b)), "whole meetings"), ("pause", lambda P, n, s, b: silent(P, n, s, b) + 1, "expected 10, got 11"),
]
RIGHT = [
    ("ring_bytes", lambda b, n: ring_bytes(b, n, 0, 1)), ("ring_bytes", lambda b, n: sum(b//n for _ in range(2*(n - 1)))),
    ("tree_rounds", lambda n: (n - 1).bit_length()), ("tree_rounds", lambda n: next(k for k in range(99) if 2**k >= n)),
    ("whole_loss", lambda a, c: float(np.dot(np.nan_to_num(a), c)/np.sum(c))), ("whole_loss", lambda a, c: math.fsum(x*k/sum(c) for x, k in zip(a, c) if k)),
    ("buckets", filled), ("buckets", lambda s, n: tuple(tuple(b) for b in filled(s, n))),
    ("zero_bytes", zero), ("zero_bytes", lambda P, n, s: float(zero(P, n, s))),
    ("sliced_loss", softmax_loss), ("sliced_loss", lambda s, t: np.logaddexp.reduce(np.concatenate(s)) - np.concatenate(s)[t]),
    ("bubble", lambda p, m, v: float(Fraction(p - 1, m*v))), ("bubble", lambda p, m, v: bubble(simulate(interleaved(p, m, v), dict(F=1., B=2.)))),
    ("in_flight", lambda p, m, r: in_flight(one_forward_one_backward(p, m))[r]), ("in_flight", lambda p, m, r: m if m < p - r else p - r),
    ("zigzag", lambda t, n, r: pair(t, n, r, 2*n - 1 - r)), ("zigzag", lambda t, n, r: tuple(i for i in range(t) if r in (i*2*n//t, 2*n - 1 - i*2*n//t))),
    ("merge", merged), ("merge", lambda a, la, b, lb: a*math.exp(la - np.logaddexp(la, lb)) + b*math.exp(lb - np.logaddexp(la, lb))),
    ("busiest", load), ("busiest", lambda c, E, n: max(np.sum(c//(E//n) == r) for r in range(n))*n/c.size),
    ("save_every", lambda s, n, h: (7200*s*h/n)**.5), ("save_every", lambda s, n, h: 60*math.sqrt(2*s*h/n)),
    ("model_share", share()), ("model_share", lambda h, f, o: h/(1 + (f - o)/(3*f))),
    ("noise", scale), ("noise", lambda g: np.trace(np.atleast_2d(np.cov(g.T)))/((g @ g.T).sum() - (g*g).sum())*len(g)*(len(g) - 1)),
    ("meeting", met), ("meeting", lambda s, e, v, lr, mu: [s - lr*((1 + mu)*(s - np.mean(e, 0)) + mu*mu*v), mu*v + s - np.mean(e, 0)]),
    ("pause", silent), ("pause", lambda P, n, s, b: math.ceil(s/min(s, b*n//(2*(n - 1)*4*P)))),
]
for task in dict.fromkeys(task for task, *_ in WRONG): # What every grader refuses
    WRONG += [(task, fails, "your code raised"), (task, lambda *args: None, "got None"), (task, 3, "expected a function"), (task, lambda *args: "x", "got 'x'"), (task, lambda: 1, "your code raised")]
WRONG += [("whole_loss", changes, "changed its arguments"), ("meeting", lambda s, e, v, lr, mu: (v.__iadd__(1), v), "changed its argument in place"), ("buckets", lambda s, n: s.clear() or [], "changed its arguments")]
# Types that differ without harm
RIGHT += [("zigzag", lambda t, n, r: np.r_[r*(c := t//n//2):(r + 1)*c, t - (r + 1)*c:t - r*c]), ("whole_loss", lambda a, c: np.float32(np.dot(np.nan_to_num(a), c)/np.sum(c)))]
graders = Graders(ex, WRONG, RIGHT)
test_wrong_answers, test_right_answers, test_each_grader, test_same_words = graders.tests(least_wrong=10, least_right=2)


def test_code_that_stops():
    for task in graders.tasks: graders.stops(task)
