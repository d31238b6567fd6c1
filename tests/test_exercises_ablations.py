"Graders of chapter 06's exercises: what each refuses, in which words, and that other right answers pass."
import math
import statistics

import numpy as np
import pytest
from graders import Graders, fails

from lmcourse.ablations.sweep import paired_difference, student_t
from lmcourse.exercises import ablations as ex

SEEDS = dict(correlation=.875, two=.1797, seeds=18, half=64, unpaired=125)
WIDTHS = dict(silu=2016, default=1408, ffn=100*128/4224, model=1.459, unmatched=50)
FAULT_OF = dict(A="overfitting", B="no mask", C="none", D="N(0, 1) tied head", E="other tokenizer", F="no warm-up", G="learning rate × 10", H="shifted labels", I="no final norm")
BITS = dict(excess=.3, perplexity=math.exp(1.4), a=.35/math.log(2), b=.34/math.log(2), floor=1.375, match=1.75)
NORMS = dict(stream=18**.5, pre=3, post=1, last=3, share=2**-8.5)
TUNING = dict(fixed=.18, tuned=-.02, grid=-.01654, lucky=-.02326, seeds=-.01343, again=0)


# Intervals

def interval(half=lambda a, b, s: student_t(len(a) - 1)*s/math.sqrt(len(a)), sign=1, keys=lambda a, b: [k for k in a if k in b], spread=statistics.stdev, middle=statistics.fmean):
    def f(variant, base):
        a, b = ([x[k] for k in keys(variant, base)] for x in (variant, base))
        d = [sign*(x - y) for x, y in zip(a, b)]
        return middle(d), half(a, b, spread(d))
    return f


def unpaired(freedom):
    return interval(lambda a, b, s: student_t(freedom(len(a)))*math.sqrt((statistics.variance(a) + statistics.variance(b))/len(a)))


def interval_np(variant, base):
    d = np.array([variant[s] - base[s] for s in sorted(variant.keys() & base.keys())])
    t = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 9: 2.262}[len(d) - 1]
    return np.array([d.mean(), t*d.std(ddof=1)/np.sqrt(len(d))])


def in_order(variant, base):
    a, b = [*variant.values()], [*base.values()]
    n = min(len(a), len(b))
    return paired_difference(a[:n], b[:n])


def all_seeds(variant, base): return statistics.fmean(variant.values()) - statistics.fmean(base.values()), interval()(variant, base)[1]


def drops(variant, base):
    for s in [s for s in variant if s not in base] or [*variant][:1]: del variant[s]
    return interval()(variant, {s: base[s] for s in variant if s in base}) if len(variant) > 1 else (0, 0)


# Budgets

def steps(how=lambda x: int(x//1), **wrong): return lambda budget, *sizes: how(budget/ex._step_flops(*sizes, **wrong))


def by_products(budget, V, T, D, d_ff, L, windows):
    def product(m, k, n): return 2*m*k*n
    layer = 4*product(T, D, D) + product(T, D, T) + product(T, T, D) + 2*product(T, D, d_ff) + product(T, d_ff, D)
    return budget//(3*windows*(L*layer + product(T, D, V)))


WRONG = [
    ("paired_interval", interval(lambda a, b, s: 1.96*s/math.sqrt(len(a))), "1.96 holds for many seeds; for few take Student's t"), ("paired_interval", interval(lambda a, b, s: student_t(len(a))*s/math.sqrt(len(a))), "t has n - 1 degrees of freedom"),
    ("paired_interval", interval(spread=statistics.pstdev), "divided by n, expected n - 1"), ("paired_interval", interval(lambda a, b, s: student_t(len(a) - 1)*s), "divide by the root of n"),
    ("paired_interval", interval(lambda a, b, s: 2*student_t(len(a) - 1)*s/math.sqrt(len(a))), "that is the whole width"), ("paired_interval", interval(lambda a, b, s: s/math.sqrt(len(a))), "that is one standard error"),
    ("paired_interval", interval(lambda a, b, s: student_t(len(a) - 1, .9)*s/math.sqrt(len(a))), "t is that of 90 %"), ("paired_interval", interval(lambda a, b, s: student_t(len(a) - 1)*s/len(a)), "that is divided by n, expected its root"),
    ("paired_interval", unpaired(lambda n: 2*n - 2), "the two are not paired"), ("paired_interval", unpaired(lambda n: n - 1), "the two are not paired, and t"), ("paired_interval", interval(sign=-1), "the sign is wrong: variant less base"), ("paired_interval", lambda a, b: tuple(map(abs, interval()(a, b))), "below 0 if that is better"),
    ("paired_interval", in_order, "pairs are of the same seed, not of the same place"), ("paired_interval", all_seeds, "some seeds are those of one alone"), ("paired_interval", interval(keys=lambda a, b: a), "raised KeyError"),
    ("paired_interval", interval(middle=statistics.median), "that is the median"), ("paired_interval", drops, "changed its"), ("paired_interval", lambda a, b: interval()(a, b)[0], "expected a pair (mean, half), got 0.0145"),
    ("paired_interval", lambda a, b: None, "expected a pair"), ("paired_interval", {}, "expected a function"), ("paired_interval", fails, "raised RuntimeError"),

    ("seeds_needed", SEEDS | dict(seeds=16), "seeds: 16 takes 1.96 for t"), ("seeds_needed", SEEDS | dict(seeds=17), "is one too few"), ("seeds_needed", SEEDS | dict(seeds=125), "is without pairing"), ("seeds_needed", SEEDS | dict(seeds=4), "leaves t out"),
    ("seeds_needed", SEEDS | dict(half=63.894), "half: 63.894 is not a whole number"), ("seeds_needed", SEEDS | dict(half=72), "is four times the number before"), ("seeds_needed", SEEDS | dict(half=36), "the width falls with the root"), ("seeds_needed", SEEDS | dict(half=62), "takes 1.96 for t"), ("seeds_needed", SEEDS | dict(half=65), "is too large"),
    ("seeds_needed", SEEDS | dict(correlation=.5), "is the ratio of the spreads"), ("seeds_needed", SEEDS | dict(correlation=.75), "forgets the 2"), ("seeds_needed", SEEDS | dict(correlation=.125), "not the correlation"),
    ("seeds_needed", SEEDS | dict(two=.0277), "takes 1.96 for t"), ("seeds_needed", SEEDS | dict(two=.0608), "two seeds leave one"), ("seeds_needed", SEEDS | dict(two=.254), "forgets the root of n"), ("seeds_needed", SEEDS | dict(two=.3594), "is the "),
    ("seeds_needed", SEEDS | dict(unpaired=18), "is with pairing"), ("seeds_needed", SEEDS | dict(unpaired=64), "forgets that both scatter"), ("seeds_needed", SEEDS | dict(unpaired=123), "takes 1.96"), ("seeds_needed", 18, "expected a dict"),

    ("steps_for", steps(passes=1), "got 1800, which is the forward pass alone"), ("steps_for", steps(passes=2), "takes backward to cost as much as forward"), ("steps_for", steps(pairs=0), "leaves scores and values out"),
    ("steps_for", steps(pairs=.5), "counts scores or values, not both"), ("steps_for", steps(looked_up=1), "counts the looked-up embedding"), ("steps_for", steps(looked_up=1, pairs=0), "counts parameters: the embedding is looked up"),
    ("steps_for", steps(matrices=2), "counts two matrices"), ("steps_for", steps(head=0), "leaves the head out"), ("steps_for", steps(projections=3), "counts three of the four projections"),
    ("steps_for", steps(math.ceil), "is rounded up, and the last step goes beyond the budget"), ("steps_for", steps(float), "is no whole number of steps"), ("steps_for", lambda b, V, T, D, F, L, w: steps()(b, V, T, D, F, L, 1), "counts a step as one window"),
    ("steps_for", lambda b, *s: steps()(b, *s)*s[1]*s[5], "is a number of tokens"), ("steps_for", lambda b, *s: 600, "twice as wide"), ("steps_for", lambda b, *s: None, "expected a whole number, got None"), ("steps_for", fails, "raised RuntimeError"),

    ("matched_width", WIDTHS | dict(silu=896), "with fewer matrices they must be wider"), ("matched_width", WIDTHS | dict(silu=1344), "is the same width"), ("matched_width", WIDTHS | dict(silu=2048), "is 4 D"),
    ("matched_width", WIDTHS | dict(default=1344), "is rounded down"), ("matched_width", WIDTHS | dict(default=1402), "is too small"), ("matched_width", WIDTHS | dict(default=1365), "before it is rounded"), ("matched_width", WIDTHS | dict(default=2048), "is 4 D, for two matrices"),
    ("matched_width", WIDTHS | dict(ffn=3.125), "is in per cent of the plain one's"), ("matched_width", WIDTHS | dict(ffn=1.459), "is that of the whole model"), ("matched_width", WIDTHS | dict(ffn=33.3), "is for equal widths"), ("matched_width", WIDTHS | dict(ffn=0), "without rounding"),
    ("matched_width", WIDTHS | dict(model=3.03), "is that of the networks alone"), ("matched_width", WIDTHS | dict(model=.1824), "there are eight"), ("matched_width", WIDTHS | dict(model=1.701), "counts one of embedding and head"), ("matched_width", WIDTHS | dict(model=2.04), "forgets embedding and head"),
    ("matched_width", WIDTHS | dict(unmatched=33.3), "is in per cent of SwiGLU's"), ("matched_width", WIDTHS | dict(unmatched=150), "expected how many more"), ("matched_width", [], "expected a dict"),

    ("diagnosis", FAULT_OF | dict(B="none"), "B: a healthy run does not show a logged loss between the floor and that of bigrams"), ("diagnosis", FAULT_OF | dict(B="shifted labels"), "B: shifted labels would show a logged loss below the floor"),
    ("diagnosis", FAULT_OF | dict(H="no mask"), "H: no mask would show a logged loss between the floor"), ("diagnosis", FAULT_OF | dict(I="none"), "I: a healthy run does not show a logged loss above that of bigrams, and another one computed again; here: valid 3.063, again 3.754, bigrams 2.84"), ("diagnosis", FAULT_OF | dict(I="no mask"), "I: no mask would show"),
    ("diagnosis", FAULT_OF | dict(E="overfitting"), "E: overfitting would show many passes, and a training loss well below the validation loss; here: passes 0.24"), ("diagnosis", FAULT_OF | dict(C="no warm-up"), "C: no warm-up would show the full learning rate in the first line; here: rate 0.1"),
    ("diagnosis", FAULT_OF | dict(A="other tokenizer"), "A: other tokenizer would show bigrams of the training tokens that are worse"), ("diagnosis", FAULT_OF | dict(D="learning rate x 10"), "here: update 0.059"), ("diagnosis", FAULT_OF | dict(G="none"), "a healthy run does not show first steps that replace"),
    ("diagnosis", FAULT_OF | dict(F="N(0, 1) tied head"), "a first loss far above ln V; here: first 5.775"), ("diagnosis", FAULT_OF | dict(C="dropout"), "C: 'dropout' is none of none, shifted labels, no mask"), ("diagnosis", FAULT_OF | dict(A=None), "A: None is none of"),
    ("diagnosis", dict(A="none"), "expected a dict with the keys A, B"), ("diagnosis", "none", "expected a dict"),

    ("bits", BITS | dict(excess=1.2727), "is a ratio"), ("bits", BITS | dict(excess=.6), "compares a loss per token of B with a floor per token of A"), ("bits", BITS | dict(perplexity=2**1.4), "so the base is e"), ("bits", BITS | dict(perplexity=1.35), "is that of the excess"),
    ("bits", BITS | dict(a=.35), "a: 0.35 is in nats per byte"), ("bits", BITS | dict(a=2.02), "is in bits per token"), ("bits", BITS | dict(a=8.08), "tokens and bytes the wrong way"), ("bits", BITS | dict(a=.2426), "is multiplied by ln 2"), ("bits", BITS | dict(b=.6131), "takes the other model's tokens"),
    ("bits", BITS | dict(floor=1.1), "is per token of A"), ("bits", BITS | dict(floor=.88), "is the wrong way: B has fewer tokens"), ("bits", BITS | dict(match=1.12), "is the wrong way: B's tokens are longer"), ("bits", BITS | dict(match=1.4), "is A's"), ("bits", BITS | dict(match=1.7), "is what B has"), ("bits", None, "expected a dict"),

    ("norm_growth", NORMS | dict(stream=18), "is the mean square"), ("norm_growth", NORMS | dict(stream=17**.5), "forgets the row that came in"), ("norm_growth", NORMS | dict(stream=2**8.5), "doubles the mean square in each block"), ("norm_growth", NORMS | dict(pre=1), "would be so with post-norm"),
    ("norm_growth", NORMS | dict(pre=1/3), "is the last over the first"), ("norm_growth", NORMS | dict(pre=18**.5), "takes the gradient before the first block"), ("norm_growth", NORMS | dict(pre=9), "is the square"), ("norm_growth", NORMS | dict(pre=256), "takes each block to add as much as arrives"),
    ("norm_growth", NORMS | dict(post=256), "forgets that each n divides"), ("norm_growth", NORMS | dict(post=1/256), "two ways back"), ("norm_growth", NORMS | dict(last=1/3), "is pre-norm over post-norm"), ("norm_growth", NORMS | dict(last=18**.5), "post-norm's own n"),
    ("norm_growth", NORMS | dict(last=1), "forgets that pre-norm's last n"), ("norm_growth", NORMS | dict(share=2**-17), "divides by 2 in each block"), ("norm_growth", NORMS | dict(share=18**-.5), "is that of pre-norm"), ("norm_growth", NORMS | dict(share=math.inf), "is too large"), ("norm_growth", (), "expected a dict"),

    ("tuning", TUNING | dict(fixed=-.18), "has the wrong sign"), ("tuning", TUNING | dict(fixed=-.02), "is for each at its own best rate"), ("tuning", TUNING | dict(fixed=-.22), "is at the variant's best rate"), ("tuning", TUNING | dict(tuned=.18), "is at the base's rate"),
    ("tuning", TUNING | dict(tuned=0), "different lowest points"), ("tuning", TUNING | dict(grid=-.02), "0.0025 is none of the four rates"), ("tuning", TUNING | dict(grid=.0674), "0.003 is nearer"), ("tuning", TUNING | dict(lucky=0), "was chosen for its noise too"),
    ("tuning", TUNING | dict(lucky=-1.163), "is in standard deviations"), ("tuning", TUNING | dict(lucky=.02326), "has the wrong sign"), ("tuning", TUNING | dict(lucky=-.0104), "nothing was averaged"), ("tuning", TUNING | dict(seeds=-.02326), "is with one run each"),
    ("tuning", TUNING | dict(seeds=-.00775), "expected its root"), ("tuning", TUNING | dict(again=-.02326), "a new seed has its own"), ("tuning", TUNING | dict(again=.02326), "turns the luck round"), ("tuning", TUNING | dict(seeds=0), "is smaller, not gone"), ("tuning", 0, "expected a dict"),
]

RIGHT = [
    ("paired_interval", interval()), ("paired_interval", interval_np), ("seeds_needed", SEEDS), ("seeds_needed", dict(unpaired=125., half=np.int64(64), seeds=18, two=12.706*.02/2**.5, correlation=7/8)),
    ("steps_for", steps()), ("steps_for", by_products), ("steps_for", lambda *sizes: np.array(by_products(*sizes))), ("matched_width", WIDTHS), ("matched_width", dict(silu=2016., default=1408., ffn=3.03, model=1.46, unmatched=50.)),
    ("diagnosis", FAULT_OF), ("diagnosis", FAULT_OF | dict(G="learning rate x 10")), ("diagnosis", FAULT_OF | dict(G="learning rate x10")), ("bits", BITS), ("bits", {k: round(v, 3) for k, v in reversed(BITS.items())}), ("norm_growth", NORMS), ("norm_growth", dict(stream=4.24, pre=3., post=1., last=3., share=.00276)),
    ("tuning", TUNING), ("tuning", dict(fixed=.18, tuned=-.02, grid=-.0165, lucky=-.0233, seeds=-.0134, again=0.))]

GRADERS = Graders(ex, WRONG, RIGHT)
test_wrong_answers_are_refused_in_one_line_that_says_why, test_right_answers_pass_in_silence, test_every_grader_is_tried, test_a_grader_says_the_same_each_time = GRADERS.tests()


@pytest.mark.parametrize("task", ["paired_interval", "steps_for"])
def test_what_the_students_code_raises_is_kept(task): GRADERS.stops(task)


def test_each_run_shows_the_sign_of_one_fault_of_the_doctor_at_most():
    pytest.importorskip("torch")
    import faults
    shown = {letter: [name for name, (shows, *_) in ex._SIGNS.items() if shows(r)] for letter, r in ex.nine_runs().items()}
    assert shown == {letter: [name] if name != "none" else [] for letter, name in FAULT_OF.items()}
    assert set(ex._SIGNS) <= set(faults.FIRST)


def test_runs_are_the_callers_own():
    ex.nine_runs()["A"]["first"] = 0
    assert ex.nine_runs()["A"]["first"] == 5.845


def test_the_smallest_of_some_normal_numbers():
    drawn = np.random.default_rng(0).normal(size=(200_000, 5)).min(1).mean()
    assert abs(ex._smallest(5) - drawn) < .005 and abs(ex._smallest(2) + 1/math.sqrt(math.pi)) < 1e-3 and abs(ex._smallest(1)) < 1e-6
