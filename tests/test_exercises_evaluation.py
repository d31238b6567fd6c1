"Graders of chapter 12's exercises: what each refuses, in which words, and that other right answers pass."
import math
from fractions import Fraction
from functools import partial
from itertools import combinations

import numpy as np
from graders import Graders, fails

from lmcourse.exercises import evaluation as ex

inf = math.inf


def spoiled(right):
    "What no task takes: (answer, words)."
    return [(fails, "your code raised"), (lambda *a: None if right(*a) is not None else 0, "expected"), (lambda *a: str(right(*a)), "expected"),
            (lambda *a: [right(*a)], "expected"), (7, "expected a function"), (lambda: 0, "your code raised")]


# 1. Bits per byte

def bits(nats, text): return nats/math.log(2)/len(text.encode())


def bits_by_log2(nats, text): return nats*math.log2(math.e)/len(bytes(text, "utf-8"))


BITS = [(lambda n, t: n/math.log(2)/len(t), "characters are not bytes"), (lambda n, t: n/len(t.encode()), "these are nats"), (lambda n, t: n*math.log(2)/len(t.encode()), "more than a bit"),
        (lambda n, t: n/math.log(2), "not bits per byte"), (lambda n, t: n/math.log(2)/len(t.split()), "per word"), (lambda n, t: bits(n, t)/8, "not 8"), (lambda n, t: -bits(n, t), "expected")]


# 2. Windows

def windows(tokens, context, stride):
    ends = [min(context, tokens)]
    while ends[-1] < tokens: ends.append(min(ends[-1] + stride, tokens))
    return [(max(0, first + stride - context) if first else 0, first, end) for first, end in zip([0, *ends], ends)]


def windows_by_recursion(t, c, s, first=0):
    if not first: return [(0, 0, min(c, t)), *windows_by_recursion(t, c, s, c)] if t > c else [(0, 0, t)]
    return [(first + s - c, first, min(t, first + s)), *(windows_by_recursion(t, c, s, first + s) if first + s < t else [])]


WINDOWS = [(lambda t, c, s: [(f, f, e) for _, f, e in windows(t, c, s)], "context of a window"), (lambda t, c, s: [(0, f, e) for _, f, e in windows(t, c, s)], "from the start"),
           (lambda t, c, s: [(b, b, e) for b, _, e in windows(t, c, s)], "not in every window"), (lambda t, c, s: windows(t, c, s)[:-1], "expected"),
           (lambda t, c, s: [(b, f, f + (s if f else c)) for b, f, _ in windows(t, c, s)], "must end with the text"), (lambda t, c, s: windows(t, c, 1), "expected"),
           (lambda t, c, s: [(max(0, e - c), f, e) for _, f, e in windows(t, c, s)], "where a full one would")]


# 3. Ceiling

def ceiling(p): return sum(map(max, p))/len(p)


def ceiling_in_numpy(p): return float(np.mean([np.max(r) for r in p]))


CEILING = [(lambda p: sum(sum(x*x for x in r) for r in p)/len(p), "takes the likeliest"), (lambda p: sum(1/len(r) for r in p)/len(p), "chance"), (lambda p: sum(map(max, p)), "mean over questions"),
           (lambda p: max(map(max, p)), "easiest"), (lambda p: sum(map(min, p))/len(p), "least likely"), (lambda p: min(map(max, p)), "hardest"), (lambda p: 1., "expected")]


# 4. Score

def score(a, c, t): return (a - c)/(t - c)


def score_in_fractions(a, c, t): return float((Fraction(a) - Fraction(c))/(Fraction(t) - Fraction(c)))


SCORE = [(lambda a, c, t: a/t, "chance was left out"), (lambda a, c, t: (a - c)/(1 - c), "ceiling was left out"), (lambda a, c, t: (a - c)/t, "range"), (lambda a, c, t: (t - a)/(t - c), "swapped"),
         (lambda a, c, t: max(0., score(a, c, t)), "negative"), (lambda a, c, t: a, "accuracy itself"), (lambda a, c, t: 100*score(a, c, t), "expected")]


# 5. Pick

def best(scores): return scores.index(max(scores))


def pick(p, t): return best([x/len(s.encode()) for x, s in zip(p, t)])


def pick_by_sorting(p, t): return sorted(range(len(p)), key=lambda i: -p[i]/len(t[i].encode()))[0]


PICK = [(lambda p, t: best(p), "without the length"), (lambda p, t: best([x/len(s) for x, s in zip(p, t)]), "per character"), (lambda p, t: best([-x/len(s.encode()) for x, s in zip(p, t)]), "worst"),
        (lambda p, t: max(range(len(p)), key=lambda i: (p[i]/len(t[i].encode()), i)), "first among equals"), (lambda p, t: best([len(s) for s in t]), "expected"), (lambda p, t: 0, "expected"),
        (lambda p, t: t[pick(p, t)], "expected")]


# 6. Wilson

def wilson(h, n, z, shift=1, scale=1, inner=1, root=math.sqrt):
    p, s = h/n, z*z/n
    half = z*root(p*(1 - p)/n + inner*s/(4*n))
    return (p + shift*s/2 - half)/(1 + scale*s), (p + shift*s/2 + half)/(1 + scale*s)


def wilson_by_roots(h, n, z):
    "Where the score test's statistic is z: n(p - x)² = z²x(1 - x)"
    p = h/n
    return tuple(sorted(float(r.real) for r in np.roots([n + z*z, -2*n*p - z*z, n*p*p])))


WILSON = [(partial(wilson, shift=0, scale=0, inner=0), "Wald"), (partial(wilson, shift=0), "towards a half"), (partial(wilson, scale=0), "1 + z²/n"), (partial(wilson, inner=0), "under the root"),
          (partial(wilson, root=lambda v: v), "root is missing"), (lambda *a: wilson(*a)[::-1], "lower end"), (lambda *a: wilson(*a)[0], "expected")]


# 7. Clusters

def clustered(x, c, root=math.sqrt):
    mean = sum(x)/len(x)
    return root(sum(sum(a - mean for a, k in zip(x, c) if k == g)**2 for g in set(c)))/len(x)


def clustered_in_pairs(x, c):
    d = np.array(x) - np.mean(x)
    return float(np.sqrt(max(0., (np.outer(d, d)*np.equal.outer(c, c)).sum())))/len(x)


def plain(x, less): return math.sqrt(sum((a - sum(x)/len(x))**2 for a in x)/(len(x) - less)/len(x))


CLUSTERS = [(lambda x, c: plain(x, 1), "ignored"), (lambda x, c: plain(x, 0), "n - 1"), (partial(clustered, root=lambda v: v), "root is missing"), (lambda x, c: clustered(x, c)*len(x)/len(set(c)), "not of clusters"),
            (lambda x, c: clustered(x, c)*len(x), "of a sum"), (lambda x, c: clustered(x, c)*1.96, "expected"), (lambda x, c: 0., "expected")]


# 8. Pairs

def paired(a, b, root=math.sqrt, less=1):
    d = [x - y for x, y in zip(a, b)]
    return root(sum((v - sum(d)/len(d))**2 for v in d)/(len(d) - less)/len(d))


def paired_in_numpy(a, b): return float(np.std(np.subtract(a, b), ddof=1)/len(a)**.5)


def spread(x): return np.var(x, ddof=1)


PAIRED = [(lambda a, b: float(math.sqrt((spread(a) + spread(b))/len(a))), "unpaired"), (partial(paired, less=0), "n - 1"), (lambda a, b: paired(a, b)*len(a)**.5, "standard deviation"),
          (partial(paired, root=lambda v: v), "root is missing"), (lambda a, b: sum(x - y for x, y in zip(a, b))/len(a), "difference itself"),
          (lambda a, b: float(math.sqrt(abs(spread(a) - spread(b))/len(a))), "don't subtract"), (lambda a, b: 0., "expected")]


# 9. pass@k

def pass_at_k(n, c, k): return 1 - math.comb(n - c, k)/math.comb(n, k)


def pass_by_product(n, c, k): return 1 - math.prod(max(0, n - c - i)/(n - i) for i in range(k))


def pass_by_counting(n, c, k):
    if n > 20: return pass_by_product(n, c, k)
    draws = list(combinations(range(n), k))
    return sum(min(d) < c for d in draws)/len(draws)


PASS = [(lambda n, c, k: 1 - (1 - c/n)**k, "biased"), (lambda n, c, k: 1 - pass_at_k(n, c, k), "none is right"), (lambda n, c, k: math.comb(c, k)/math.comb(n, k), "one right"), (lambda n, c, k: c/n, "pass@1"),
        (lambda n, c, k: min(1, k*c/n), "add up"), (lambda n, c, k: 1 - (1 - c/n)**n, "n draws"), (lambda n, c, k: pass_at_k(n, c, k) + .01, "expected")]


# 10. Calibration

def calibration(c, r, n, gap=abs, weigh=True, last=True):
    groups = {}
    for x, y in zip(c, r): groups.setdefault(min(int(x*n), n - 1) if last else int(x*n), []).append(x - y)
    return sum(gap(sum(g)/len(g))*(len(g)/len(c) if weigh else 1/len(groups)) for g in groups.values())


def calibration_in_numpy(c, r, n):
    bins = np.minimum((np.array(c)*n).astype(int), n - 1)
    return float(np.abs(np.bincount(bins, np.subtract(c, r), n)).sum()/len(c))


CALIBRATION = [(partial(calibration, weigh=False), "weights"), (partial(calibration, gap=lambda v: v), "no sign"), (partial(calibration, gap=lambda v: v*v), "not squared"), (partial(calibration, last=False), "last bin"),
               (lambda c, r, n: calibration(c, r, 1), "one bin"), (lambda c, r, n: sum(abs(x - y) for x, y in zip(c, r))/len(c), "without bins"), (lambda c, r, n: sum((x - y)**2 for x, y in zip(c, r))/len(c), "Brier")]


# 11. Contamination

def certificate(q, p): return min(1., math.exp(sum(p) - sum(q)))


def certificate_by_product(q, p): return min(1., math.prod(math.exp(b - a) for a, b in zip(q, p)))


CERTIFICATE = [(lambda q, p: math.exp(sum(p) - sum(q)), "at most 1"), (lambda q, p: min(1., math.exp(sum(q) - sum(p))), "other way"), (lambda q, p: min(1., *(math.exp(b - a) for a, b in zip(q, p))), "picked"),
               (lambda q, p: min(1., math.exp((sum(p) - sum(q))/len(p))), "averaged"), (lambda q, p: min(0., sum(p) - sum(q)), "log of it"), (lambda q, p: 1 - certificate(q, p), "one minus"), (lambda q, p: 0., "expected")]


# 12. Elo

def elo(a, b, won, k, base=10, scale=400, other=-1):
    surprise = won - 1/(1 + base**((b - a)/scale))
    return a + k*surprise, b + other*k*surprise


def elo_by_strength(a, b, won, k):
    x, y = 10**(a/400), 10**(b/400)
    return a + k*(won - x/(x + y)), b + k*(1 - won - y/(x + y))


ELO = [(lambda a, b, w, k: elo(a, b, w, k, 1/10), "not B's"), (partial(elo, base=math.e), "base is 10"), (partial(elo, scale=1000), "scale is 400"), (partial(elo, other=1), "other loses"), (partial(elo, other=0), "changes too"),
       (lambda a, b, w, k: (a + k*w, b - k*w), "left out"), (lambda *a: elo(*a)[::-1], "expected")]


TASKS = {"bits_per_byte": (BITS, bits, bits_by_log2), "windows": (WINDOWS, windows, windows_by_recursion), "ceiling": (CEILING, ceiling, ceiling_in_numpy), "score": (SCORE, score, score_in_fractions),
         "pick": (PICK, pick, pick_by_sorting), "wilson": (WILSON, wilson, wilson_by_roots), "clustered_error": (CLUSTERS, clustered, clustered_in_pairs), "paired_error": (PAIRED, paired, paired_in_numpy),
         "pass_at_k": (PASS, pass_by_counting, pass_by_product), "calibration_error": (CALIBRATION, calibration, calibration_in_numpy), "contamination_p": (CERTIFICATE, certificate, certificate_by_product),
         "elo": (ELO, elo, elo_by_strength)}
graders = Graders(ex, [(task, *pair) for task, (wrong, right, _) in TASKS.items() for pair in wrong + spoiled(right)],
                  [(task, f) for task, (_, *right) in TASKS.items() for f in right])
test_wrong_answers, test_right_answers, test_each_grader, test_same_words = graders.tests(least_wrong=10)


def test_what_the_code_raises_is_kept_and_a_stop_passes():
    for task in graders.tasks: graders.stops(task)
