"Properties of the sampling functions over random logits, ties and masked tokens; the NumPy twins; beam search by enumeration."
import itertools
import math
import re

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from hypothesis import assume, given, settings, strategies as st

from lmcourse.generation.sampling import (beam_search, chi_squared, min_p, next_token_probs, next_token_probs_np, repetition_penalty, sample, sample_np,
                                          temperature, top_k, top_p, uniforms)
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
                                    dict(top_p=0), dict(top_p=-0.5), dict(top_p=1.0001), dict(top_p=math.nan), dict(min_p=1.1), dict(min_p=math.nan),
                                    dict(repetition_penalty=0), dict(repetition_penalty=-1.2), dict(repetition_penalty=math.nan), dict(repetition_penalty=math.inf)])
@pytest.mark.parametrize("rule,logits", [(next_token_probs, torch.zeros(4)), (next_token_probs_np, np.zeros(4))], ids=["torch", "numpy"])
def test_settings_out_of_range(rule, logits, change):
    (name, value), = change.items()
    with pytest.raises(ValueError, match=f"{name} = {value}"): rule(logits, **change)


@pytest.mark.parametrize("logits", [[1.0, math.nan], [1.0, math.inf], [-math.inf, -math.inf], []])
def test_logits_that_are_no_numbers(logits):
    for f in (next_token_probs, lambda z: top_k(z, 1), lambda z: top_p(z, 0.5), lambda z: min_p(z, 0.5), lambda z: repetition_penalty(z, 1.5)):
        with pytest.raises(ValueError, match="logits"): f(torch.tensor(logits, dtype=torch.float32))
    with pytest.raises(ValueError, match="logits"): next_token_probs_np(np.array(logits, np.float32))


def test_wrong_types():
    with pytest.raises(TypeError): next_token_probs([1.0, 2.0])
    with pytest.raises(TypeError): top_k(torch.zeros(3), 1.5)
    for logits in ([1.0, 2.0], np.array([1, 2]), torch.zeros(2)):
        with pytest.raises(TypeError, match="array of floats"): next_token_probs_np(logits)


@pytest.mark.parametrize("probs", [[0.5, 0.6], [1.5, -0.5], [math.nan, 1.0], [0.0, 0.0]])
def test_sample_refuses_what_is_no_distribution(probs):
    with pytest.raises(ValueError, match="probs"): sample(torch.tensor(probs), torch.Generator())
    with pytest.raises(ValueError, match="probs"): sample_np(np.array(probs), uniforms(0))


def test_chi_squared():
    assert chi_squared(torch.tensor([10]), torch.tensor([1.0])) == 1
    assert chi_squared(torch.tensor([50, 50]), torch.tensor([0.5, 0.5])) == 1
    # One degree of freedom: 60 of 100 is two standard deviations off, 2*(1 - Phi(2)) = erfc(sqrt 2)
    check_close(chi_squared(torch.tensor([60, 40]), torch.tensor([0.5, 0.5])), math.erfc(2**0.5), rtol=1e-9)
    with pytest.raises(ValueError, match="expected at least 5"): chi_squared(torch.tensor([4, 4]), torch.tensor([0.5, 0.5]))
    with pytest.raises(ValueError, match="expected none below 0 and sums of 1"): chi_squared(torch.tensor([60, 40]), torch.tensor([0.5, 0.4]))


@settings(deadline=None)
@given(LOGITS, st.floats(0.1, 10), st.lists(st.integers(0, 11), max_size=5))
def test_repetition_penalty_by_its_definition(logits, value, seen):
    seen = [i % len(logits) for i in seen]
    want = [z if i not in seen else z/value if z > 0 else z*value for i,z in enumerate(logits.tolist())]
    before = logits.clone()
    check_close(repetition_penalty(logits, value, seen), torch.tensor(want, dtype=torch.float64).softmax(-1), rtol=1e-9, atol=1e-12)
    assert torch.equal(before, logits)
    for other in (tuple(seen), iter(seen), torch.tensor(seen, dtype=torch.int64), set(seen)):
        check_close(repetition_penalty(logits, value, other), repetition_penalty(logits, value, seen), rtol=0, atol=0)


def test_a_penalty_never_makes_a_repetition_likelier():
    logits = torch.tensor([3.0, 0.0, -2.0, -torch.inf])
    for i in range(3): assert repetition_penalty(logits, 1.3, [i])[i] <= logits.softmax(-1)[i] + 1e-7
    assert repetition_penalty(logits, 1.3, [3])[3] == 0


@pytest.mark.parametrize("seen", [[1, 2], [[1, 2]], [[[1]], [[2]]]])
def test_seen_without_a_row_for_each_row_of_logits(seen):
    for rule, logits, ids in ((next_token_probs, torch.zeros(2, 4), torch.tensor(seen)), (next_token_probs_np, np.zeros((2, 4)), np.array(seen))):
        with pytest.raises(ValueError, match=re.escape(f"seen has shape {np.shape(seen)}, logits (2, 4)")): rule(logits, repetition_penalty=1.5, seen=ids)
        check_close(rule(logits, repetition_penalty=1.5), rule(logits))         # None are seen


@pytest.mark.parametrize("seen", [[4], [-1], [0, 9]])
def test_seen_out_of_range(seen):
    for rule, logits in ((next_token_probs, torch.zeros(4)), (next_token_probs_np, np.zeros(4))):
        with pytest.raises(ValueError, match=f"id {seen[-1]} is not in the vocabulary, expected 0 to 3"): rule(logits, repetition_penalty=1.5, seen=seen)


SETTINGS = st.fixed_dictionaries({}, optional=dict(CUTS, temperature=st.one_of(st.just(0), st.floats(0.1, 5)), repetition_penalty=st.floats(0.5, 2)))


def clear(logits, settings, seen):
    "Whether no token stands at the edge of a cut, where the last digit decides"
    steps = [(k, settings[k]) for k in ("top_k", "top_p", "min_p") if k in settings]
    for n in range(len(steps)):
        first = {k: v for k,v in settings.items() if k not in dict(steps[n:])}
        p = next_token_probs(logits, **first, seen=seen).sort(descending=True).values
        edges = {"top_k": torch.tensor([1.0]), "top_p": p.cumsum(-1) - p - steps[n][1], "min_p": p/p[0] - steps[n][1]}[steps[n][0]]
        if edges.abs().min() < 1e-6: return False
    gaps = (logits.sort().values.diff()/max(1, settings.get("temperature", 1)))
    return bool(((gaps > 1e-6) | (gaps == 0) | gaps.isnan()).all())


@settings(deadline=None)
@given(LOGITS, SETTINGS, st.lists(st.integers(0, 11), max_size=4), st.integers(0, 2**32))
def test_numpy_twin(logits, chosen, seen, seed):
    seen = [i % len(logits) for i in seen]
    if "repetition_penalty" in chosen: logits = logits.round(decimals=3)
    assume(clear(logits, chosen, seen))
    before, p, q = logits.clone(), next_token_probs(logits, **chosen, seen=seen), next_token_probs_np(logits.numpy(), **chosen, seen=seen)
    check_close(q, p.numpy(), rtol=1e-6, atol=1e-9)
    assert torch.equal(before, logits)
    assert sample(p.expand(20, -1), torch.Generator().manual_seed(seed)).tolist() == sample_np(np.broadcast_to(q, (20, len(q))), uniforms(seed)).tolist()


def test_rounding_in_the_middle_decides_nothing():
    few = np.array([11, 10, 9], np.float16)                                                 # the penalty is computed in float32
    check_close(next_token_probs(torch.tensor(few), repetition_penalty=1.07, seen=[0]).numpy(), next_token_probs_np(few, repetition_penalty=1.07, seen=[0]), rtol=1e-6)
    for close, t in (([0.1, 0.10000001], 1), ([1., 1.001], 1e5), ([1., 1.001], 0)):         # their float32 probabilities are equal
        for cut in (dict(top_k=1), dict(top_p=1e-9), dict(min_p=1), dict(top_k=2, top_p=1e-9)):
            p = next_token_probs(torch.tensor(close), t, **cut)
            assert (p[1] == 1 or "min_p" in cut) and torch.equal(p, torch.tensor(next_token_probs_np(np.array(close, np.float32), t, **cut))), (close, t, cut)


def test_a_large_vocabulary_is_cut_where_its_exact_sums_say():
    """Added up one after another in float32, 150,000 probabilities stop short of 0.9999, and the cut would keep all of them;
    and torch's float32 softmax of them sums to 1.000005, so that unscaled sums reach 0.99999 thousands of tokens too early"""
    many = np.random.default_rng(0).normal(scale=3, size=150_000).astype(np.float32)
    for logits, p in ((np.zeros(50_000, np.float32), .9), (many, .99), (many, .9999), (many, .99999)):
        exact = np.sort(torch.tensor(logits).double().softmax(-1).numpy())[::-1].cumsum()
        for probs in (next_token_probs_np(logits, top_p=p), next_token_probs(torch.from_numpy(logits), top_p=p).numpy()):
            kept = (probs > 0).sum()
            assert abs(kept/(np.searchsorted(exact, p) + 1) - 1) < .001, (p, kept)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_numpy_dtypes_and_rows(dtype):
    logits = np.random.default_rng(0).normal(size=(2, 3, 7)).astype(dtype)
    for s in ({}, dict(temperature=0), dict(top_k=2), dict(top_p=0.5), dict(min_p=0.1)):
        probs = next_token_probs_np(logits, **s)
        assert probs.dtype == np.promote_types(dtype, np.float32) and probs.shape == logits.shape
        check_close(probs[1, 2], next_token_probs_np(logits[1, 2], **s), rtol=1e-6)
    ids = sample_np(probs, uniforms(0))
    assert ids.shape == (2, 3) and ids.dtype == np.int64


@settings(deadline=None)
@given(st.integers(-2**63, 2**63 - 1))
def test_uniforms_are_those_of_torch(seed):
    generator = torch.Generator().manual_seed(seed)
    one, many = torch.rand(1, dtype=torch.float64, generator=generator), torch.rand(30, dtype=torch.float64, generator=generator)
    assert list(itertools.islice(uniforms(seed), 31)) == [*one.tolist(), *many.tolist()]


def test_sample_np_never_draws_the_impossible():
    probs = np.array([0.0, 0.3, 0.0, 0.7, 0.0])
    for u, want in ((0.0, 1), (1 - 2**-53, 3)):
        for scale in (0.999, 1, 1.001): assert sample_np(probs*scale, iter([u])) == want


@pytest.mark.parametrize("chosen", [dict(), dict(temperature=0.6), dict(temperature=1.7), dict(top_k=4), dict(top_p=0.7), dict(min_p=0.2),
                                    dict(repetition_penalty=1.6), dict(repetition_penalty=1.3, temperature=0.8, top_k=6, top_p=0.9, min_p=0.05)])
def test_many_draws_follow_the_distribution(chosen):
    "The truth is computed here, in plain Python"
    logits, seen, n = [2.0, 1.5, 1.0, 0.5, 0.2, -0.3, -0.8], [0, 5], 100_000
    z = [v if i not in seen else v/chosen.get("repetition_penalty", 1) if v > 0 else v*chosen.get("repetition_penalty", 1) for i,v in enumerate(logits)]
    p = [math.exp(v/chosen.get("temperature", 1)) for v in z]
    order = sorted(range(7), key=lambda i: -p[i])
    kept = order[:chosen.get("top_k", 7)]
    total, sums = sum(p[i] for i in kept), list(itertools.accumulate(p[i] for i in kept))
    kept = [i for i,before in zip(kept, [0, *sums]) if before < chosen.get("top_p", 2)*total]
    kept = [i for i in kept if p[i] >= chosen.get("min_p", 0)*p[order[0]]]
    want = torch.tensor([p[i]/sum(p[j] for j in kept) if i in kept else 0 for i in range(7)])
    ids = sample(next_token_probs(torch.tensor(logits), **chosen, seen=seen).expand(n, -1), torch.Generator().manual_seed(1))
    assert chi_squared(torch.bincount(ids, minlength=7), want) > 0.001
    probs = next_token_probs_np(np.array(logits), **chosen, seen=seen)
    ids_np = sample_np(np.broadcast_to(probs, (20_000, 7)), uniforms(2))
    assert chi_squared(torch.from_numpy(np.bincount(ids_np, minlength=7)), want) > 0.001
    assert chi_squared(torch.bincount(ids, minlength=7), next_token_probs(torch.tensor(logits), 1.2, top_p=0.999)) < 0.001


def enumerate_all(logits, max_tokens, stop):
    "Each text and its log-probability, the likeliest first"
    done, live = [], [(0.0, [])]
    for _ in range(max_tokens):
        grown = [(s + p, [*t, i]) for s,t in live for i,p in enumerate(logits([0, *t]).double().log_softmax(-1).tolist()) if p > -math.inf]
        done, live = done + [g for g in grown if g[1][-1] in stop], [g for g in grown if g[1][-1] not in stop]
    return sorted(done + live, key=lambda t: -t[0])


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**31), st.integers(2, 4), st.integers(1, 4), st.booleans())
def test_beam_search(seed, vocab_size, max_tokens, stops):
    table, stop = 2*torch.randn(vocab_size, vocab_size, vocab_size, generator=torch.Generator().manual_seed(seed)), [1]*stops
    def logits(ids): return table[ids[-1], ids[-2] if len(ids) > 1 else 0]
    every = enumerate_all(logits, max_tokens, stop)
    for width in (1, 2, 3, len(every)):
        found = beam_search(logits, [0], max_tokens, width, stop=stop)
        scores = {tuple(t): s for s,t in every}
        assert 1 <= len(found) <= width and len({tuple(t) for _,t in found}) == len(found)
        assert [s for s,_ in found] == sorted((s for s,_ in found), reverse=True)
        for s,t in found: assert abs(scores[tuple(t)] - s) < 1e-9           # complete texts with their own probability
    assert len(found) == len(every) and abs(found[0][0] - every[0][0]) < 1e-9
    greedy = [0]
    while len(greedy) <= max_tokens and not (len(greedy) > 1 and greedy[-1] in stop): greedy.append(logits(greedy).argmax().item())
    assert beam_search(logits, [0], max_tokens, 1, stop=stop)[0][1] == greedy[1:]


def test_beam_search_stops_and_refuses():
    calls = []
    def logits(ids): calls.append(ids); return torch.tensor([0.0, 5.0])
    assert [t for _,t in beam_search(logits, [0], 50, 1, stop=[1])] == [[1]] and len(calls) == 1
    assert beam_search(logits, [0], 0, 3) == [(0.0, [])]
    for bad in (dict(width=0), dict(max_tokens=-1)):
        with pytest.raises(ValueError, match=f"{[*bad][0]} = {[*bad.values()][0]}"): beam_search(**dict(next_logits=logits, ids=[0], max_tokens=2, width=2) | bad)
    assert [t for _,t in beam_search(lambda ids: torch.tensor([0.0, -math.inf]), [0], 3, 5)] == [[0, 0, 0]]     # the impossible is left out
