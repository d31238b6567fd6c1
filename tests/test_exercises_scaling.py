"Graders of chapter 11's exercises: what each refuses, in which words, and that other right answers pass."
import math
from functools import partial

import numpy as np
from graders import Graders, spoiled

from lmcourse.exercises import scaling as ex
from lmcourse.scaling.loss_law import fit_loss_law

log, inf = math.log, math.inf


# 1. A slope from two points

def exponent(a, b, c, d): return log(d/b)/log(c/a)


def exponent_by_tens(a, b, c, d): return (math.log10(d) - math.log10(b))/(math.log10(c) - math.log10(a))


EXPONENT = [(lambda a, b, c, d: (d - b)/(c - a), "both axes"), (lambda a, b, c, d: log(d/b)/(c - a), "of x too"), (lambda a, b, c, d: (d - b)/log(c/a), "of y too"),
            (lambda a, b, c, d: log(c/a)/log(d/b) if b != d else 0., "slope of x over y"), (lambda *v: -exponent(*v), "the sign"), (lambda a, b, c, d: math.log10(d/b)/log(c/a), "expected")]


# 2. Extrapolation

def fit(x, y, at=log, back=math.exp, point=None):
    s, k = np.polyfit([at(v) for v in x], [at(v) for v in y], 1)
    return back(k + s*at(point))


def extrapolate(x, y, at): return fit(x, y, point=at)


def extrapolate_by_hand(x, y, at):
    u, v = [math.log10(a) for a in x], [math.log10(b) for b in y]
    mu, mv = sum(u)/len(u), sum(v)/len(v)
    s = sum((a - mu)*(b - mv) for a, b in zip(u, v))/sum((a - mu)**2 for a in u)
    return 10**(mv + s*(math.log10(at) - mu))


EXTRAPOLATE = [(lambda x, y, at: fit(x, y, float, float, at), "fit the line to logarithms"), (lambda x, y, at: fit(x, y, log, float, at), "this is the logarithm"),
               (lambda x, y, at: y[0]*(at/x[0])**exponent(x[0], y[0], x[-1], y[-1]), "all points"), (lambda x, y, at: y[-1]*(at/x[-1])**np.polyfit(np.log(x), np.log(y), 1)[0], "at the fitted line"),
               (lambda x, y, at: np.polyfit(np.log(x), np.log(y), 1)[0], "this is the exponent"), (lambda x, y, at: math.exp(np.polyval(np.polyfit(x, np.log(y), 1), at)), "of x too"),
               (lambda x, y, at: np.polyval(np.polyfit(np.log(x), y, 1), log(at)), "of y too")]


# 3. The slope that one would see

def seen(E, k, p, x): return p*k*x**p/(E + k*x**p)


def seen_by_steps(E, k, p, x, h=1e-5): return (log(E + k*(x*math.exp(h))**p) - log(E + k*(x*math.exp(-h))**p))/(2*h)


SEEN = [(lambda E, k, p, x: p, "floor bends"), (lambda E, k, p, x: p*k*x**(p - 1), "linear axes"), (lambda E, k, p, x: seen(E, k, p, x)/x, "of y only"), (lambda E, k, p, x: p*k*x**p, "of x only"),
        (lambda E, k, p, x: p - seen(E, k, p, x), "share of the other term"), (lambda *v: -seen(*v), "the curve falls"), (lambda E, k, p, x: k*x**p/(E + k*x**p), "lacks the exponent")]


# 4. The best split

def split(A, B, a, b, C, six=6, factor=None, power=None):
    N = ((a*A/(b*B)) if factor is None else factor)**(1/(a + b))*(C/six)**(b/(a + b) if power is None else power)
    return N, C/(six*N)


def split_by_search(A, B, a, b, C):
    low, high = 0., log(C/6)
    slope = lambda u: -a*A*math.exp(-a*u) + b*B*math.exp(-b*(log(C/6) - u))
    for _ in range(200): low, high = (((low + high)/2, high) if slope((low + high)/2) < 0 else (low, (low + high)/2))
    return [math.exp(low), C/6/math.exp(low)]


SPLIT = [(partial(split, six=1), "not ND"), (lambda A, B, a, b, C: split(A, B, a, b, C, power=a/(a + b)), "exponent of N"), (lambda A, B, a, b, C: split(A, B, a, b, C, factor=b*B/(a*A)), "in the numerator"),
         (lambda A, B, a, b, C: split(A, B, a, b, C, factor=A/B), "derivative brings"), (lambda *v: split(*v)[::-1], "(N, D)"), (lambda A, B, a, b, C: ((C/120)**.5, 20*(C/120)**.5), "one law"),
         (lambda *v: (split(*v)[0], v[4]/split(*v)[0]), "6ND must equal"),
         (lambda A, B, a, b, C: split(A, B, a, b, C, factor=1.), "factor that depends on A, B, alpha and beta is missing")]


# 5. A larger budget

def growth(a, b, f): return f**(b/(a + b)), f**(a/(a + b))


def growth_by_laws(a, b, f): return tuple(q/p for p, q in zip(split(1, 1, a, b, 1e9), split(1, 1, a, b, f*1e9)))


GROWTH = [(lambda *v: growth(*v)[::-1], "size, then tokens"), (lambda a, b, f: (f**.5, f**.5), "equal shares"), (lambda a, b, f: (f*b/(a + b), f*a/(a + b)), "not multiplied"),
          (lambda a, b, f: (f**a, f**b), "expected"), (lambda a, b, f: (f**b, f**a), "add up"), (lambda a, b, f: (b/(a + b), a/(a + b)), "these are the exponents"), (lambda a, b, f: growth(a, b, f/6), "the product of both"),
          (lambda a, b, f: (f, f), "expected")]


# 6. Tokens for a loss

def tokens(E, A, B, a, b, L, N, power=None, left=None, never=inf):
    rest = L - E - A*N**-a if left is None else left
    return (B/rest)**(1/b if power is None else power) if rest > 0 else never


def tokens_by_halving(E, A, B, a, b, L, N):
    low, high = -60., 400.
    for _ in range(300): low, high = ((low, (low + high)/2) if E + A*N**-a + B*math.exp(-b*(low + high)/2) < L else ((low + high)/2, high))
    return math.exp(low) if low < 399 else inf


TOKENS = [(lambda E, A, B, a, b, L, N: tokens(E, A, B, a, b, L, N, left=L - A*N**-a), "floor off"), (lambda E, A, B, a, b, L, N: tokens(E, A, B, a, b, L, N, left=L - E), "what the size costs"),
          (lambda E, A, B, a, b, L, N: (B/max(abs(L - E - A*N**-a), 1e-9))**(1/b), "never gets there"), (lambda E, A, B, a, b, L, N: tokens(E, A, B, a, b, L, N, power=1/a), "beta for the data"),
          (lambda E, A, B, a, b, L, N: tokens(E, A, B, a, b, L, N, power=b), "1/beta"), (lambda E, A, B, a, b, L, N: L - E - A*N**-a, "share of the data"), (partial(tokens, never=0.), "expected inf, got 0"),
          (partial(tokens, never=math.nan), "expected inf, got nan")]


# 7. Break-even

def even(a, b, c, d, train=6, serve=2): return max(0, train*(a*b - c*d)/(serve*(c - a)))


def even_by_sums(a, b, c, d):
    at = lambda s: 6*a*b + 2*a*s - 6*c*d - 2*c*s
    return 0 if at(0) <= 0 else at(0)/(at(0) - at(1e12))*1e12


EVEN = [(partial(even, train=2), "6N in training"), (partial(even, serve=6), "6N in training"), (partial(even, serve=1), "backward pass"), (lambda a, b, c, d: 3*(a*b - c*d)/(c - a), "negative number"),
        (lambda a, b, c, d: max(0., 3*(a*b - c*d)/c), "difference of the sizes"), (lambda a, b, c, d: 3*(b - d), "not tokens"), (lambda a, b, c, d: max(0., 6*(a*b - c*d)), "extra FLOPs of training"),
        (lambda a, b, c, d: even(c, d, a, b) if a*b > c*d else 1., "expected")]


# 8. The vertex

def parabola(n, l, at=np.log, back=math.exp, factor=-.5):
    c = np.polyfit(at(np.array(n)), l, 2)
    return back(factor*c[1]/c[0])


def vertex_by_solving(n, l):
    u = np.log10(n)
    c = np.linalg.lstsq(np.stack([np.ones_like(u), u, u*u], 1), np.array(l), rcond=None)[0]
    return 10**(-c[1]/(2*c[2]))


VERTEX = [(lambda n, l: n[int(np.argmin(l))], "lowest run"), (partial(parabola, at=lambda v: v, back=float), "parabola to the logarithm"), (partial(parabola, back=float), "logarithm of the size"),
          (partial(parabola, at=np.log10), "with its own base"), (partial(parabola, factor=-1), "lies at -b/(2a)"), (partial(parabola, factor=.5), "the sign"),
          (lambda n, l: float(np.polyval(np.polyfit(np.log(n), l, 2), log(parabola(n, l)))), "the loss there"), (lambda n, l: n.sort() or n.append(1.) or 1., "changed its")]


# 9. Huber's loss

def huber(e, d, near=lambda x, d: x*x/2, far=lambda x, d: d*(x - d/2)): return sum(near(abs(x), d) if abs(x) <= d else far(abs(x), d) for x in e)


def huber_by_pull(e, d, steps=20_000): # The integral of min(x, d)
    return sum(min(abs(x), d)**2/2 + d*max(abs(x) - d, 0.) for x in e)


HUBER = [(lambda e, d: huber(e, d)/len(e), "don't average"), (partial(huber, near=lambda x, d: x*x), "half the square"), (lambda e, d: sum(x*x for x in e)/2, "it is straight"),
         (partial(huber, far=lambda x, d: d*x), "where the square ends"), (partial(huber, far=lambda x, d: x - d/2), "expected"), (lambda e, d: sum(x*x/2 if x <= d else d*(x - d/2) for x in e), "may be negative"),
         (partial(huber, far=lambda x, d: d*d/2), "counts more"), (lambda e, d: sum(map(abs, e)), "expected")]


# 10. Three constants

def three(N, D, l, a, b, floor=True):
    columns = [np.array(N)**-a, np.array(D)**-b]
    return tuple(np.linalg.lstsq(np.stack(([np.ones(len(N))] if floor else []) + columns, 1), np.array(l), rcond=None)[0])


def three_by_normal_equations(N, D, l, a, b):
    X = np.stack([np.ones(len(N)), np.array(N)**-a, np.array(D)**-b], 1)
    return list(np.linalg.solve(X.T@X, X.T@np.array(l)))


def three_by_relative_errors(N, D, l, a, b):
    columns = np.stack([np.ones(len(N)), np.array(N)**-a, np.array(D)**-b], 1)
    return tuple(np.linalg.lstsq(columns/np.array(l)[:, None], np.ones(len(N)), rcond=None)[0])


THREE = [(lambda *v: (0., *three(*v, floor=False)), "column of ones"), (lambda N, D, l, a, b: three(N, D, l, -a, -b), "are negative"), (lambda N, D, l, a, b: three(N, D, l, b, a), "alpha belongs"),
         (lambda *v: (*three(*v)[1:], three(*v)[0]), "order is E, A, B"), (lambda *v: (three(*v)[0], three(*v)[2], three(*v)[1]), "A belongs"), (lambda N, D, l, a, b: three(N, D, np.log(l), a, b), "not of logarithms"),
         (lambda *v: three(*v)[:2], "expected"), (lambda N, D, l, a, b: three(N[:3], D[:3], l[:3], a, b), "all runs count"), (three_by_relative_errors, "expected"), (lambda *v: dict(zip("EAB", three(*v))), "expected")]


# 11. Bootstrap error

def slopes(x, y, picks, keep=lambda p: p, at=np.log): return [np.polyfit(at(np.array(x)[keep(p)]), at(np.array(y)[keep(p)]), 1)[0] for p in picks]


def error(*v): return np.std(slopes(*v))


def error_by_hand(x, y, picks):
    found = []
    for p in picks:
        u, v = [math.log10(x[i]) for i in p], [math.log10(y[i]) for i in p]
        mu, mv = sum(u)/len(u), sum(v)/len(v)
        found.append(sum((a - mu)*(b - mv) for a, b in zip(u, v))/sum((a - mu)**2 for a in u))
    mean = sum(found)/len(found)
    return math.sqrt(sum((s - mean)**2 for s in found)/len(found))


ERROR = [(lambda *v: error(*v)**2, "variance"), (lambda x, y, p: error(x, y, p)/len(p)**.5, "divide by a root"), (lambda *v: np.std(slopes(*v), ddof=1), "number of samples"),
         (lambda x, y, p: np.std(slopes(x, y, p, keep=lambda q: sorted(set(q)))), "counts twice"), (lambda *v: np.mean(slopes(*v)), "mean slope"), (lambda *v: np.ptp(slopes(*v))/2, "half the range"),
         (lambda x, y, p: np.std(slopes(x, y, p, at=lambda v: v)), "on logarithms"), (lambda *v: slopes(*v), "expected")]


# 12. A budget and a hidden law

def predict(train, budget, target, shares=(.002, .008, .03, .12, .84), sizes=8, reach=8, at=None):
    runs = []
    for flops in (share*budget/sizes for share in shares):
        for N in math.sqrt(flops/120)*np.geomspace(1/reach, reach, sizes): runs.append((N, flops/(6*N), train(N, flops)))
    law = fit_loss_law(*np.array(runs).T)
    N, D = law.optimum(at or target)
    return N, float(law.loss(N, D))


def until_refused(train, budget, target): # A run that is refused costs nothing
    try: train(1e8, 2*budget)
    except ValueError: return predict(train, budget, target)


def lowest_run(train, budget, target):
    sizes = math.sqrt(budget/8/120)*np.geomspace(1/8, 8, 8)
    loss, N = min((train(N, budget/8), N) for N in sizes)
    return N, loss


def hides(train, budget, target):
    try: train(1e8, 2*budget)
    except ValueError: pass
    return 1e8, 2.


def with_tokens(train, budget, target):
    N, loss = predict(train, budget, target)
    return target/(6*N), loss


PREDICT = [(lambda *v: predict(*v)[::-1], "size first"), (lambda t, b, c: predict(t, b, c, at=b), "not for the target"), (with_tokens, "number of tokens"), (lambda t, b, c: (predict(t, b, c)[0], predict(t, b, c, at=b)[1]), "asked for"),
           (lambda t, b, c: (3*predict(t, b, c)[0], 2.), "within a factor of 1.6"), (lambda t, b, c: (predict(t, b, c)[0], 1.), "within 2 %"), (lowest_run, "within a factor"), (hides, "at least one run within the budget"), (lambda *v: (predict(*v)[0], math.nan), "within 2 %"), (lambda *v: (predict(*v)[0], math.inf), "within 2 %"),
           (lambda t, b, c: t(1e8, 2*b), "the budget is 1e+20"), (lambda t, b, c: (1e9, 2.), "at least one run"), (lambda t, b, c: t(-1, b), "parameters = -1"), (lambda t, b, c: t(1e8, b/9), "a pair of numbers"),
           (lambda t, b, c: predict(t, 1.5*b, c), "asked for")]


TASKS = {"power_exponent": (EXPONENT, exponent, exponent_by_tens), "extrapolate": (EXTRAPOLATE, extrapolate, extrapolate_by_hand), "seen_slope": (SEEN, seen, seen_by_steps),
         "best_split": (SPLIT, split, split_by_search), "growth": (GROWTH, growth, growth_by_laws), "tokens_needed": (TOKENS, tokens, tokens_by_halving), "break_even": (EVEN, even, even_by_sums),
         "vertex": (VERTEX, parabola, vertex_by_solving), "huber_sum": (HUBER, huber, huber_by_pull), "three_constants": (THREE, three, three_by_normal_equations),
         "slope_error": (ERROR, error, error_by_hand), "predict_best": (PREDICT, predict, partial(predict, sizes=10, reach=6), until_refused)}
graders = Graders(ex, [(task, *pair) for task, (wrong, right, *_) in TASKS.items() for pair in wrong + spoiled(right)],
                  [(task, f) for task, (_, *right) in TASKS.items() for f in right]
                  + [(task, partial(lambda f, *a: np.array(f(*a)), f)) for task, f in (("best_split", split), ("growth", growth), ("three_constants", three))])
test_wrong_answers, test_right_answers, test_each_grader, test_same_words = graders.tests(least_wrong=10)


def test_what_the_code_raises_is_kept_and_a_stop_passes():
    for task in graders.tasks: graders.stops(task)
