"Properties of the sampling functions over random logits, ties and masked tokens."
import math

import pytest

torch = pytest.importorskip("torch")
from hypothesis import given, settings, strategies as st

from lmcourse.generation.sampling import chi_squared, min_p, next_token_probs, sample, temperature, top_k, top_p
from lmcourse.tools.checks import check_close

# Few distinct values, so that ties are common; -inf is a token that can't come
VALUES = st.one_of(st.integers(-4, 4).map(float), st.floats(-30, 30, width=32), st.just(-math.inf))
LOGITS = st.lists(VALUES, min_size=1, max_size=12).filter(lambda z: max(z) > -math.inf).map(lambda z: torch.tensor(z, dtype=torch.float64))
SHARE = st.floats(0.01, 1)
CUTS = dict(top_k=st.integers(1, 14), top_p=SHARE, min_p=SHARE)


def ranked(logits):
    "Ids by falling logit, equal ones by rising id. Two that differ by less than float64 can tell beside the largest are equal"
    below = (logits.max() - logits).tolist()
    return sorted(range(len(logits)), key=lambda i: (below[i], i))


def is_distribution(probs):
    return bool((probs >= 0).all()) and abs(probs.sum().item() - 1) < 1e-6


@given(LOGITS, st.floats(0.05, 20))
def test_temperature_is_the_power_of_the_ratios(logits, t):
    p, q = logits.softmax(-1), temperature(logits, t)
    power = (p/p.max())**(1/t)
    check_close(q, power/power.sum(), rtol=1e-6, atol=1e-12)


@given(LOGITS)
def test_greedy_is_the_first_of_the_largest(logits):
    want = torch.zeros_like(logits)
    want[ranked(logits)[0]] = 1
    check_close(temperature(logits, 0), want, rtol=0, atol=0)
    check_close(temperature(logits, 1e-320), want, rtol=0, atol=0)
    check_close(next_token_probs(logits, 0, top_k=3, top_p=0.5, min_p=0.1), want, rtol=0, atol=0)


@given(LOGITS, CUTS["top_k"])
def test_top_k_keeps_the_first_k(logits, k):
    kept = [i for i in ranked(logits)[:k] if logits[i] > -math.inf]
    assert sorted(kept) == top_k(logits, k).nonzero().flatten().tolist()


@given(LOGITS, SHARE)
def test_top_p_keeps_the_shortest_start_that_reaches_p(logits, p):
    probs, order = logits.softmax(-1), ranked(logits)
    kept = (top_p(logits, p) > 0).nonzero().flatten().tolist()
    assert sorted(order[:len(kept)]) == kept
    assert probs[kept].sum() >= p - 1e-12
    assert probs[order[:len(kept) - 1]].sum() < p + 1e-12       # without its last token it falls short


@given(LOGITS, SHARE)
def test_min_p_keeps_a_share_of_the_largest(logits, p):
    share = (logits - logits.max()).exp()
    kept = min_p(logits, p) > 0
    assert (share[kept] >= p - 1e-12).all() and (share[~kept] < p + 1e-12).all()


@pytest.mark.parametrize("rule,value", [(top_k, CUTS["top_k"]), (top_p, SHARE), (min_p, SHARE), (temperature, st.floats(0, 20))])
@given(data=st.data())
def test_every_rule(rule, value, data):
    "A distribution; the odds of kept tokens do not change; the argument is not changed; rows of a batch do not touch"
    logits, v = data.draw(LOGITS), data.draw(value)
    before, probs = logits.clone(), rule(logits, v)
    assert is_distribution(probs) and torch.equal(before, logits)
    assert (probs[logits == -math.inf] == 0).all()
    if rule is not temperature: check_close(probs[probs > 0], logits[probs > 0].softmax(-1))
    check_close(rule(torch.stack([logits, logits.flip(0)])[None], v)[0, 0], probs)


def test_ties():
    "The lower ids stay, however many are equal; a sum that is p exactly is enough"
    logits = torch.zeros(2**13).index_fill(0, torch.arange(0, 2**13, 3), 1.0)
    for k in (100, 2000, 5000): assert top_k(logits, k).nonzero().flatten().tolist() == sorted(ranked(logits)[:k])
    kept = top_p(torch.zeros(2**13), 0.25).nonzero().flatten()
    assert kept.tolist() == list(range(2**11))
    assert top_p(torch.zeros(4), 0.5).nonzero().flatten().tolist() == [0, 1]


def test_top_p_of_1_keeps_a_tail_below_rounding():
    logits = torch.tensor([0.0] + [-25.0]*1000)
    assert (top_p(logits, 1.0) > 0).all() and (top_p(logits, 1e-300) > 0).sum() == 1


@pytest.mark.parametrize("dtype,out", [(torch.bfloat16, torch.float32), (torch.float16, torch.float32),
                                       (torch.float32, torch.float32), (torch.float64, torch.float64)])
def test_dtypes(dtype, out):
    logits = torch.tensor([2.0, 1.0, 0.0]).to(dtype)
    for s in ({}, dict(temperature=0), dict(top_k=2), dict(top_p=0.5), dict(min_p=0.1)):
        probs = next_token_probs(logits, **s)
        assert probs.dtype == out and is_distribution(probs)


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=8).filter(any), st.integers(0, 2**32))
def test_sample_is_the_inverse_of_the_cumulative_sum(weights, seed):
    total = sum(weights)
    probs = torch.tensor([w/total for w in weights], dtype=torch.float64)
    u = torch.rand(1, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).item()
    want = next(i for i in range(len(weights)) if sum(weights[:i + 1])/total > u)
    got = sample(probs, torch.Generator().manual_seed(seed))
    assert got.shape == () and got.dtype == torch.int64 and got.item() == want and weights[want] > 0


def test_sample_never_draws_the_impossible(monkeypatch):
    "At both ends of the uniform numbers: 0, and the last number below 1"
    probs = torch.tensor([0.0, 0.3, 0.0, 0.7, 0.0])
    for u, want in ((0.0, 1), (1 - 2**-53, 3)):
        monkeypatch.setattr(torch, "rand", lambda *size, **_: torch.full(size, u, dtype=torch.float64))
        assert sample(probs, torch.Generator()).item() == want
        for scale in (0.999, 1.001): assert sample(probs*scale, torch.Generator()).item() == want


def test_sample_uses_one_uniform_a_row_and_a_seed_fixes_it():
    probs, g = torch.full((2, 3, 5), 0.2), torch.Generator().manual_seed(1)
    first, second = sample(probs, g), sample(probs, g)
    assert first.shape == (2, 3) and not torch.equal(first, second)
    g = torch.Generator().manual_seed(1)
    assert torch.equal(sample(probs, g), first) and torch.equal(sample(probs, g), second)
    one, other = torch.Generator().manual_seed(2), torch.Generator().manual_seed(2)
    sample(probs, one)
    torch.rand(6, dtype=torch.float64, generator=other)
    assert torch.equal(one.get_state(), other.get_state())


def test_global_random_state_is_left_alone():
    before = torch.get_rng_state()
    sample(torch.full((5,), 0.2), torch.Generator().manual_seed(0))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("change", [dict(temperature=-0.1), dict(temperature=math.nan), dict(temperature=math.inf), dict(top_k=0), dict(top_k=-3),
                                    dict(top_p=0), dict(top_p=-0.5), dict(top_p=1.0001), dict(top_p=math.nan), dict(min_p=1.1), dict(min_p=math.nan)])
def test_settings_out_of_range(change):
    (name, value), = change.items()
    with pytest.raises(ValueError, match=f"{name} = {value}"): next_token_probs(torch.zeros(4), **change)


@pytest.mark.parametrize("logits", [[1.0, math.nan], [1.0, math.inf], [-math.inf, -math.inf], []])
def test_logits_that_are_no_numbers(logits):
    for f in (next_token_probs, lambda z: top_k(z, 1), lambda z: top_p(z, 0.5), lambda z: min_p(z, 0.5)):
        with pytest.raises(ValueError, match="logits"): f(torch.tensor(logits, dtype=torch.float32))


def test_wrong_types():
    with pytest.raises(TypeError): next_token_probs([1.0, 2.0])
    with pytest.raises(TypeError): top_k(torch.zeros(3), 1.5)


@pytest.mark.parametrize("probs", [[0.5, 0.6], [1.5, -0.5], [math.nan, 1.0], [0.0, 0.0]])
def test_sample_refuses_what_is_no_distribution(probs):
    with pytest.raises(ValueError, match="probs"): sample(torch.tensor(probs), torch.Generator())


def test_chi_squared():
    assert chi_squared(torch.tensor([10]), torch.tensor([1.0])) == 1
    assert chi_squared(torch.tensor([50, 50]), torch.tensor([0.5, 0.5])) == 1
    # One degree of freedom: 60 of 100 is two standard deviations off, 2*(1 - Phi(2)) = erfc(sqrt 2)
    check_close(chi_squared(torch.tensor([60, 40]), torch.tensor([0.5, 0.5])), math.erfc(2**0.5), rtol=1e-9)
    with pytest.raises(ValueError, match="5 is the least"): chi_squared(torch.tensor([4, 4]), torch.tensor([0.5, 0.5]))
