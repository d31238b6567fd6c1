"Graders of chapter 12's exercises: what each refuses, in which words, and that other right answers pass."
import math
from fractions import Fraction
from functools import partial
from itertools import combinations, groupby

import numpy as np
from graders import Graders, spoiled

from lmcourse.exercises import evaluation as ex

inf = math.inf


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
         (lambda a, c, t: max(0., score(a, c, t)), "negative"), (lambda a, c, t: a, "accuracy itself"), (lambda a, c, t: 100*score(a, c, t), "expected"), (lambda a, c, t: min(1., score(a, c, t)), "above the ceiling")]


# 5. Pick

def best(scores): return scores.index(max(scores))


def pick(p, t): return best([x/len(s.encode()) for x, s in zip(p, t)])


def pick_in_numpy(p, t): return np.argmax(np.array(p)/[len(s.encode()) for s in t])


def pick_by_sorting(p, t): return sorted(range(len(p)), key=lambda i: -p[i]/len(t[i].encode()))[0]


PICK = [(lambda p, t: best(p), "without the length"), (lambda p, t: best([x/len(s) for x, s in zip(p, t)]), "per character"), (lambda p, t: best([-x/len(s.encode()) for x, s in zip(p, t)]), "worst"),
        (lambda p, t: max(range(len(p)), key=lambda i: (p[i]/len(t[i].encode()), i)), "first among equals"), (lambda p, t: best([len(s) for s in t]), "expected"), (lambda p, t: 0, "expected"),
        (lambda p, t: t[pick(p, t)], "expected"), (lambda p, t: pick(p, [s.strip() for s in t]), "space is a byte"), (lambda p, t: best([x + len(s.encode()) for x, s in zip(p, t)]), "don't add it")]


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


def neighbours(x, c):
    "Ends a cluster where the next question belongs to another"
    return clustered(x, [k for k, (_, group) in enumerate(groupby(c)) for _ in group])


def plain(x, less): return math.sqrt(sum((a - sum(x)/len(x))**2 for a in x)/(len(x) - less)/len(x))


CLUSTERS = [(lambda x, c: plain(x, 1), "ignored"), (lambda x, c: plain(x, 0), "before you square"), (partial(clustered, root=lambda v: v), "root is missing"), (lambda x, c: clustered(x, c)*len(x)/len(set(c)), "not of clusters"),
            (lambda x, c: clustered(x, c)*len(x), "of a sum"), (neighbours, "scattered"), (lambda x, c: clustered(x, c)*1.96, "expected"), (lambda x, c: 0., "expected")]


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

def calibration(c, r, n, gap=abs, weigh=True, bin=lambda x, n: min(int(x*n), n - 1)):
    groups = {}
    for x, y in zip(c, r): groups.setdefault(bin(x, n), []).append(x - y)
    return sum(gap(sum(g)/len(g))*(len(g)/len(c) if weigh else 1/len(groups)) for g in groups.values())


def calibration_in_numpy(c, r, n):
    bins = np.minimum((np.array(c)*n).astype(int), n - 1)
    return float(np.abs(np.bincount(bins, np.subtract(c, r), n)).sum()/len(c))


CALIBRATION = [(partial(calibration, weigh=False), "weights"), (partial(calibration, gap=lambda v: v), "no sign"), (partial(calibration, gap=lambda v: v*v), "not squared"), (partial(calibration, bin=lambda x, n: int(x*n)), "last bin"),
               (lambda c, r, n: calibration(c, r, 1), "one bin"), (lambda c, r, n: sum(abs(x - y) for x, y in zip(c, r))/len(c), "without bins"), (lambda c, r, n: sum((x - y)**2 for x, y in zip(c, r))/len(c), "Brier"),
               (partial(calibration, bin=lambda x, n: min(round(x*n), n - 1)), "don't round"), (partial(calibration, bin=lambda x, n: max(0, math.ceil(x*n) - 1)), "lower end")]


def calibration_with_empty_bins(c, r, n):
    return math.nan if len({min(int(x*n), n - 1) for x in c}) < n else calibration(c, r, n)


CALIBRATION += [(calibration_with_empty_bins, "an empty bin has no mean")]


# 11. Contamination

def certificate(q, p): return math.exp(min(0., sum(p) - sum(q)))


def certificate_in_numpy(q, p): return np.minimum(1, np.exp(np.subtract(p, q).sum()))


CERTIFICATE = [(lambda q, p: math.exp(sum(p) - sum(q)), "at most 1"), (lambda q, p: min(1., math.exp(sum(q) - sum(p))), "other way"), (lambda q, p: min(1., *(math.exp(b - a) for a, b in zip(q, p))), "picked"),
               (lambda q, p: min(1., math.exp((sum(p) - sum(q))/len(p))), "averaged"), (lambda q, p: min(0., sum(p) - sum(q)), "log of it"), (lambda q, p: 1 - certificate(q, p), "one minus"), (lambda q, p: math.prod(min(1., math.exp(b - a)) for a, b in zip(q, p)), "not for each document"), (lambda q, p: 0., "expected"),
               (lambda q, p: min(1., math.exp(sum(p) - sum(q))), "q = [-2500.0], p = [-1200.0]: your code raised OverflowError"),    # A model that is far worse than the source
               (lambda q, p: min(1., math.prod(math.exp(b)/math.exp(a) for a, b in zip(q, p))), "your code raised ZeroDivisionError")]


# 12. Elo

def elo(a, b, won, k, base=10, scale=400, other=-1):
    surprise = won - 1/(1 + base**((b - a)/scale))
    return a + k*surprise, b + other*k*surprise


def elo_by_strength(a, b, won, k):
    x, y = 10**(a/400), 10**(b/400)
    return a + k*(won - x/(x + y)), b + k*(1 - won - y/(x + y))


ELO = [(lambda a, b, w, k: elo(a, b, w, k, 1/10), "not B's"), (partial(elo, base=math.e), "base is 10"), (partial(elo, scale=1000), "scale is 400"), (partial(elo, other=1), "other loses"), (partial(elo, other=0), "changes too"),
       (lambda a, b, w, k: (a + k*w, b - k*w), "left out"), (lambda *a: elo(*a)[::-1], "expected")]


# 13. Softening

def soften(x, T, move=True):
    w = [math.exp((v - max(x)*move)/T) for v in x]
    return [v/sum(w) for v in w]


def soften_in_numpy(x, T):
    z = np.array(x)/T
    return (np.exp(z - np.logaddexp.reduce(z))).tolist()


SOFTEN = [(lambda x, T: soften(x, 1/T), "don't multiply"), (lambda x, T: soften(x, 1), "left out"), (lambda x, T: [math.exp(v/T) for v in x], "sum to 1"), (lambda x, T: [v/T for v in soften(x, 1)], "logarithms are"),
          (lambda x, T: [math.log(v) for v in soften(x, T)], "those are logarithms"), (lambda x, T: [v**(1/T) for v in soften(x, 1)], "sum of their own"), (lambda x, T: soften(x, T)[::-1], "expected"),
          (lambda x, T: soften(x, T, False), "your code raised"), (lambda x, T: [v/sum(x) for v in x], "not probabilities"), (lambda x, T: soften([v - min(x) for v in x], T, False), "for x = [-2.0, -3000.0, -1.0], T = 1.0: your code raised"),
          (lambda x, T: (lambda w: [v/sum(w) if sum(w) else math.nan for v in w])([math.exp(v/T) for v in x]), "subtract the largest")]


# 14. Brier

def brier(p, a): return sum((x - (k == a))**2 for k, x in enumerate(p))


def brier_in_squares(p, a): return 1 - 2*p[a] + float(np.dot(p, p))


BRIER = [(lambda p, a: (1 - p[a])**2, "not only the right one"), (lambda p, a: brier(p, a)/len(p), "not their mean"), (lambda p, a: sum(abs(x - (k == a)) for k, x in enumerate(p)), "squares"), (lambda p, a: math.sqrt(brier(p, a)), "no root"),
         (lambda p, a: 1 - brier(p, a), "0 is perfect"), (lambda p, a: sum((1 - x)**2 for x in p), "0 for the others"), (lambda p, a: brier(p, p.index(max(p))), "not the likeliest"), (lambda p, a: -math.log(p[a]), "the loss")]


# 15. Overlap

def grams(t, n):
    w = t.split()
    return [tuple(w[i:i + n]) for i in range(len(w) - n + 1)]


def overlap(t, s, n): return len(set(grams(t, n)) & set(grams(s, n)))/len(set(grams(t, n)))


def overlap_in_strings(t, s, n):
    words, there = t.split(), f" {' '.join(s.split())} "
    runs = {" ".join(words[i:i + n]) for i in range(len(words) - n + 1)}
    return sum(f" {r} " in there for r in runs)/len(runs)


def starts(t, n): return {tuple(t.split()[i:i + n]) for i in range(len(t.split()))}


OVERLAP = [(lambda t, s, n: len(starts(t, n) & starts(s, n))/len(starts(t, n)), "every run has n words"), (lambda t, s, n: len(set(grams(t, n)[:-1]) & set(grams(s, n)[:-1]))/len(set(grams(t, n)[:-1])), "the last run is missing"),
           (lambda t, s, n: len({t[i:i+n] for i in range(len(t)-n+1)} & {s[i:i+n] for i in range(len(s)-n+1)})/len({t[i:i+n] for i in range(len(t)-n+1)}), "not of letters"),
           (lambda t, s, n: np.mean([g in grams(s, n) for g in grams(t, n)]).item(), "counts once"), (lambda t, s, n: len(set(grams(t, n)) & set(grams(s, n)))/len(set(grams(s, n))), "not of the training text's"),
           (lambda t, s, n: len(set(grams(t, n)) & set(grams(s, n)))/len(set(grams(t, n)) | set(grams(s, n))), "not of all"), (lambda t, s, n: overlap(t, s, 1), "not single words"),
           (lambda t, s, n: len(set(grams(t, n)) & set(grams(s, n))), "not a number"), (lambda t, s, n: 1 - overlap(t, s, n), "that is new"), (lambda t, s, n: float(t in s), "expected"),
           (lambda t, s, n: sum(" ".join(g) in s for g in set(grams(t, n)))/len(set(grams(t, n))), "whole words"), (lambda t, s, n: overlap(t.lower(), s.lower(), n), "capital")]


# 16. Order

def order_p(x): return sum(v >= x[0] for v in x)/len(x)


def order_by_sorting(x): return (sorted(x, reverse=True).index(x[0]) + x.count(x[0]))/len(x)


ORDER = [(lambda x: sum(v >= x[0] for v in x[1:])/(len(x) - 1), "counts too"), (lambda x: sum(v >= x[0] for v in x[1:])/len(x), "one of them"), (lambda x: (1 + sum(v > x[0] for v in x))/len(x), "is enough"), (lambda x: sum(v <= x[0] for v in x)/len(x), "not less"),
         (lambda x: sum(v >= x[0] for v in x), "not a rank"), (lambda x: 1 - order_p(x), "one minus"), (lambda x: float(x[0] == max(x)), "the best"), (lambda x: 1/len(x), "expected")]


# 17. Match

def match(h): return math.prod(sum(c)/len(c) for c in zip(*h))


def match_in_numpy(h): return float(np.exp(np.log(np.maximum(np.mean(h, axis=0), 1e-300)).sum()))


MATCH = [(lambda h: float(np.mean(h))**len(h[0]), "its own share"), (lambda h: sum(map(all, h))/len(h), "exact match itself"), (lambda h: float(np.mean(h)), "don't average"), (lambda h: float(np.sum(np.mean(h, 0))), "don't add"),
         (lambda h: float(np.prod(np.mean(h, 1))), "not over places"), (lambda h: float(np.min(np.mean(h, 0))), "worst place"), (lambda h: float(np.prod(1 - np.mean(h, 0))), "all fail")]


# 18. Split

def split(e, c, d): return e(c + d)[:len(e(c))], e(c + d)[len(e(c)):]


def split_by_popping(e, c, d):
    rest, first = list(e(c + d)), []
    for _ in e(c): first.append(rest.pop(0))
    return [first, rest]


SPLIT = [(lambda e, c, d: (e(c), e(d)), "together"), (lambda e, c, d: (e(c + d)[:len(e(c + d)) - len(e(d))], e(c + d)[len(e(c + d)) - len(e(d)):]), "not by the continuation's"), (lambda e, c, d: (e(c + d)[:len(c)], e(c + d)[len(c):]), "not characters"),
         (lambda e, c, d: split(e, c, d)[::-1], "comes first"), (lambda e, c, d: split(e, c, d.strip()), "part of it"), (lambda e, c, d: split(e, c, " " + d), "no space"), (lambda e, c, d: e(c + d), "two lists"), (lambda e, c, d: (c, d), "expected"),
         (lambda e, c, d: split(e, c.rstrip(), c[len(c.rstrip()):] + d), "last blank")]


TASKS = {"bits_per_byte": (BITS, bits, bits_by_log2), "windows": (WINDOWS, windows, windows_by_recursion), "ceiling": (CEILING, ceiling, ceiling_in_numpy), "score": (SCORE, score, score_in_fractions),
         "pick": (PICK, pick, pick_by_sorting), "wilson": (WILSON, wilson, wilson_by_roots), "clustered_error": (CLUSTERS, clustered, clustered_in_pairs), "paired_error": (PAIRED, paired, paired_in_numpy),
         "pass_at_k": (PASS, pass_by_counting, pass_by_product), "calibration_error": (CALIBRATION, calibration, calibration_in_numpy), "contamination_p": (CERTIFICATE, certificate, certificate_in_numpy),
         "elo": (ELO, elo, elo_by_strength), "soften": (SOFTEN, soften, soften_in_numpy), "brier": (BRIER, brier, brier_in_squares), "overlap": (OVERLAP, overlap, overlap_in_strings),
         "order_p": (ORDER, order_p, order_by_sorting), "match": (MATCH, match, match_in_numpy), "split_tokens": (SPLIT, split, split_by_popping)}
graders = Graders(ex, [(task, *pair) for task, (wrong, right, _) in TASKS.items() for pair in wrong + spoiled(right)],
                  [(task, f) for task, (_, *right) in TASKS.items() for f in right] + [("pick", pick_in_numpy)]
                  # Types and roundings that make no difference
                  + [("wilson", lambda *a: np.array(wilson(*a))), ("elo", lambda *a: np.array(elo(*a))), ("soften", lambda *a: np.array(soften(*a), np.float32)),
                     ("paired_error", lambda a, b: math.sqrt(max(0, np.var(a, ddof=1) + np.var(b, ddof=1) - 2*np.cov(a, b)[0, 1])/len(a)))])
test_wrong_answers, test_right_answers, test_each_grader, test_same_words = graders.tests(least_wrong=10)


def test_what_the_code_raises_is_kept_and_a_stop_passes():
    for task in graders.tasks: graders.stops(task)
