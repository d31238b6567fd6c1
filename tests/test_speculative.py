"Any draft leaves the text's distribution as it is: by enumeration, by many draws, and greedily token for token."
import itertools
import math
from collections import Counter
from functools import partial

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from hypothesis import given, settings, strategies as st

from lmcourse.architecture.transformer_torch import TransformerLM
from lmcourse.generation.generate import RecomputingDecoder, generate
from lmcourse.generation.sampling import chi_squared, next_token_probs
from lmcourse.inference import speculative
from lmcourse.inference.fast_decoder import FastDecoder
from lmcourse.inference.kv_cache import CachedDecoder
from lmcourse.inference.speculative import (DraftModel, NgramDraft, PromptLookup, acceptance_rate, exact_distribution, expected_speedup,
                                            expected_tokens, find_repeat, residual, speculate, verify)
from lmcourse.tools.config import ModelConfig

SIZE, CONTEXT = 20, 12


def table_model(seed, size, width=1.5):
    "Ids (1, T) to logits (1, T, V): what follows depends on the latest two tokens"
    table = torch.from_numpy(np.random.default_rng(seed).normal(0, width, (size, size, size))).float()
    return lambda ids: table[torch.nn.functional.pad(ids, (1, 0))[:, :-1], ids]


def only(allowed, size=3):
    return lambda ids: torch.full((*ids.shape, size), -math.inf).index_fill(-1, torch.tensor(allowed), 0.)


little = table_model(0, 3)
SETTINGS = [{}, dict(temperature=0.5), dict(temperature=2., top_k=2), dict(top_p=0.8), dict(min_p=0.3), dict(temperature=0)]


def drafts():
    return dict(bad=DraftModel(lambda ids: -2*little(ids)), equal=DraftModel(little), other=DraftModel(table_model(1, 3)),
                counted=NgramDraft([0, 1, 1, 2, 0, 2, 1, 0], 3, order=2), lookup=PromptLookup(3, shortest=1))


def true_distribution(model, size, prompt, length, context=99, stop=(), **kw):
    "Each text that `generate` can give, with its probability"
    law = Counter()
    for text in itertools.product(range(size), repeat=length):
        ids, weight = list(prompt), 1.
        for token in text:
            p = next_token_probs(model(torch.tensor([ids[-context:]]))[0, -1], **kw).double()
            weight *= (p[token]/p.sum()).item()
            ids.append(token)
        law[tuple(itertools.takewhile(lambda i: i not in stop, text))] += weight
    return {t: w for t, w in law.items() if w > 0}


def law_error(model, draft, prompt=(0,), length=3, context=99, stop=(), lookahead=2, decoder=None, **kw):
    "How far the probability of a text is off at most; infinite if one comes that can't, or none where one can"
    run = lambda draw: tuple(speculate(model, draft, prompt, length, lookahead, draw=draw, context_length=context, stop=stop, decoder=decoder, **kw))
    law, truth = exact_distribution(run), true_distribution(model, 3, prompt, length, context, stop, **kw)
    return max(abs(law[t] - truth[t]) for t in truth) if law.keys() == truth.keys() else math.inf


def check_law(*args, **kw): assert law_error(*args, **kw) < 1e-12


# The law, over all outcomes of all draws

@pytest.mark.parametrize("kw", SETTINGS, ids=str)
@pytest.mark.parametrize("name", drafts())
def test_law_of_every_draft(name, kw): check_law(little, drafts()[name], **kw)


@pytest.mark.parametrize("lookahead", [1, 2, 3, 7])
def test_law_at_every_lookahead(lookahead):
    for name in ("bad", "lookup"): check_law(little, drafts()[name], lookahead=lookahead, length=4 if name == "lookup" else 3)


@pytest.mark.parametrize("stop", [[1], [0, 2]])
def test_law_with_stop_ids(stop):
    for draft in drafts().values(): check_law(little, draft, stop=stop)


@pytest.mark.parametrize("prompt", [[0], [2], [2, 1], [1, 0, 2, 1]])
@pytest.mark.parametrize("context", [1, 2, 3, 4])
def test_law_where_the_window_slides(prompt, context):
    for draft in drafts().values(): check_law(little, draft, prompt, context=context)


def test_law_with_disjoint_and_partial_supports():
    for ours, theirs in (([0, 1], [2]), ([2], [0, 1]), ([0, 1], [1, 2]), ([0, 1, 2], [1]), ([1], [0, 1, 2])):
        check_law(only(ours), DraftModel(only(theirs)))
    check_law(lambda ids: little(ids) + only([0, 1])(ids), DraftModel(little))
    check_law(little, DraftModel(lambda ids: little(ids) + only([0, 1])(ids)), top_k=2)


distributions = st.lists(st.integers(0, 9), min_size=2, max_size=5).filter(any)


@given(distributions, st.data())
@settings(max_examples=60, deadline=None)
def test_one_round_of_one_proposal_is_the_model(p, data):
    q = data.draw(st.lists(st.integers(0, 9), min_size=len(p), max_size=len(p)).filter(any))
    p, q = (torch.tensor(x, dtype=torch.float64)/sum(x) for x in (p, q))
    def run(draw):
        x = draw(q)
        accepted, token = verify([x], q[None], torch.stack([p, p]), draw)
        return (x, token) if accepted else (token,)
    first, alpha = Counter(), 0
    for tokens, weight in exact_distribution(run).items():
        first[tokens[0]] += weight
        if len(tokens) == 2: alpha += weight
    for i, w in enumerate(p.tolist()): assert abs(first[i] - w) < 1e-12
    assert abs(alpha - torch.minimum(p, q).sum().item()) < 1e-12           # Leviathan et al., corollary 3.6
    rest = residual(p, q)
    assert abs(rest.sum().item() - 1) < 1e-12 and (rest >= 0).all()
    if alpha < 1 - 1e-9: assert not rest[p <= q].any()


def test_float32_rows_that_do_not_quite_sum_to_one():
    p, q = torch.tensor([[0.1]*10]*2), torch.tensor([[0.1]*10])*(1 - 1e-6)
    assert exact_distribution(lambda draw: verify([3], q, p, draw)[0]).keys() == {1}


# The same checks must fail for rules that are wrong

def accept_with(rule):
    def verify(proposal, q, p, draw):
        p, q = (x.double()/x.double().sum(-1, keepdim=True) for x in (p, q))
        for i, x in enumerate(proposal):
            keep = rule(p[i], q[i], x)
            if keep < 1 and draw([keep, 1 - keep]): return i, draw(residual(p[i], q[i]))
        return len(proposal), draw(p[-1])
    return verify


WRONG = dict(
    replaced_from_p=("residual", lambda p, q: p),
    replaced_by_difference=("residual", lambda p, q: (p - q).abs()/(p - q).abs().sum() if (p != q).any() else p),
    replaced_from_q_less_p=("residual", lambda p, q: residual(q, p)),
    always_accepted=("verify", accept_with(lambda p, q, x: 1.)),
    accepted_by_p_alone=("verify", accept_with(lambda p, q, x: p[x].item())),
    upside_down=("verify", accept_with(lambda p, q, x: min(1., (q[x]/p[x]).item()))),
    accepted_if_likeliest=("verify", accept_with(lambda p, q, x: float(p.argmax() == x))),
    last_from_the_row_before=("verify", lambda proposal, q, p, draw: verify(proposal, q, torch.cat([p[:-1], p[-2:-1]]), draw)),
)


def test_the_right_rule_passes_in_the_same_form(monkeypatch):
    monkeypatch.setattr(speculative, "verify", accept_with(lambda p, q, x: min(1., (p[x]/q[x]).item())))
    check_law(little, drafts()["other"])


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_seen(monkeypatch, name):
    monkeypatch.setattr(speculative, *WRONG[name])
    assert law_error(little, drafts()["other"]) > 1e-3


def test_a_decoder_that_forgets_the_wrong_end_is_seen():
    class Wrong(RecomputingDecoder):
        def rewind(self, length): del self.ids[:self.length - length]
    assert law_error(little, drafts()["bad"], decoder=Wrong) > 1e-3


# Many draws, which also see the source of chance

@pytest.fixture(scope="module")
def tiny():
    "A transformer of four tokens that remembers its answers"
    model, memory = TransformerLM(ModelConfig(vocab_size=4, context_length=8, d_model=8, num_layers=1, num_heads=2, d_ff=16), seed=3), {}
    @torch.no_grad()
    def remembered(ids):
        key = tuple(ids[0].tolist())
        if key not in memory: memory[key] = model(ids)*0.7
        return memory[key]
    return remembered


def p_value(model, draft, length=4, times=700, **kw):
    truth, generator = true_distribution(model, 4, [0], length, **kw), torch.Generator().manual_seed(0)
    counts = Counter(tuple(speculate(model, draft, [0], length, 3, generator=generator, **kw)) for _ in range(times))
    if counts.keys() - truth.keys(): return 0.
    often = [t for t in truth if times*truth[t] >= 5]
    seen, probs = [counts[t] for t in often], [truth[t] for t in often]
    if times*(1 - sum(probs)) >= 5: seen, probs = seen + [times - sum(seen)], probs + [1 - sum(probs)]
    return chi_squared(torch.tensor(seen), torch.tensor(probs)/sum(probs))


@pytest.mark.parametrize("name, kw", [("bad", {}), ("equal", dict(temperature=0.7)), ("counted", dict(top_k=3)), ("lookup", dict(top_p=0.8)),
                                      ("disjoint", dict(top_k=3))])
def test_many_draws(tiny, name, kw):
    made = dict(bad=DraftModel(lambda ids: -tiny(ids)), equal=DraftModel(tiny), counted=NgramDraft([0, 1, 2, 3, 1, 1, 0, 2, 3, 3], 4, order=2),
                lookup=PromptLookup(4, shortest=1), disjoint=DraftModel(only([3], 4)))
    model = (lambda ids: tiny(ids).index_fill(-1, torch.tensor([3]), -math.inf)) if name == "disjoint" else tiny
    assert p_value(model, made[name], **kw) > 0.001


def test_a_wrong_replacement_is_seen_in_many_draws(tiny, monkeypatch):
    monkeypatch.setattr(speculative, "residual", lambda p, q: p)
    assert p_value(tiny, DraftModel(lambda ids: -tiny(ids))) < 1e-6


# Greedy

@pytest.fixture(scope="module")
def model(): return TransformerLM(ModelConfig(vocab_size=SIZE, context_length=CONTEXT, d_model=16, num_layers=2, num_heads=2, d_ff=32), seed=1)


def greedy_drafts(model):
    small = TransformerLM(ModelConfig(vocab_size=SIZE, context_length=5, d_model=8, num_layers=1, num_heads=2, d_ff=16), seed=2)
    return [DraftModel(model, CachedDecoder), DraftModel(small), DraftModel(small, FastDecoder), PromptLookup(SIZE, 1),
            NgramDraft(range(SIZE), SIZE, order=3)]


@pytest.mark.parametrize("prompt", [[0], [1, 2, 3, 4, 5], list(range(CONTEXT)), list(range(SIZE))], ids=len)
@pytest.mark.parametrize("decoder", [None, CachedDecoder, FastDecoder])
def test_greedy_equals_generate(model, prompt, decoder):
    for kw in ({}, dict(context_length=7), dict(stop=[3, 5])):
        plain = list(generate(model, prompt, 25, temperature=0, decoder=decoder, **kw))
        for draft in greedy_drafts(model):
            for lookahead in (3, 20):
                assert list(speculate(model, draft, prompt, 25, lookahead, temperature=0, decoder=decoder, **kw)) == plain


@pytest.mark.parametrize("max_tokens", [0, 1, 2, 3, 11])
def test_never_more_than_asked_for_and_never_beyond_the_decoder(model, max_tokens):
    for draft in greedy_drafts(model):
        class Small(CachedDecoder):
            def __init__(self, model): super().__init__(model, max_tokens=max_tokens or 1)
        rounds = []
        assert len(list(speculate(model, draft, [0], max_tokens, 8, decoder=Small, rounds=rounds))) == max_tokens
        assert sum(a + 1 for _, a in rounds) == max_tokens


# What is fed, proposed and counted

def test_the_model_is_called_once_a_round(model):
    fed = []
    class Counting(CachedDecoder):
        def feed(self, ids, all=False):
            fed.append((self.length, len(ids), all))
            return super().feed(ids, all)
    rounds, prompt = [], [1, 2, 3]
    assert len(list(speculate(model, DraftModel(model), prompt, 9, 3, temperature=0, decoder=Counting, rounds=rounds))) == 9
    assert rounds == [(3, 3), (3, 3), (0, 0)]                       # 4 + 4 + 1
    assert fed == [(0, 2, False), (2, 4, True), (6, 4, True), (10, 1, False)]
    rounds.clear(), fed.clear()
    wrong = lambda ids: -model(ids)
    assert len(list(speculate(model, DraftModel(wrong), prompt, 5, 3, temperature=0, decoder=Counting, rounds=rounds))) == 5
    assert rounds == [(3, 0), (3, 0), (2, 0), (1, 0), (0, 0)]
    assert fed == [(0, 2, False), (2, 4, True), (3, 4, True), (4, 3, True), (5, 2, True), (6, 1, False)]


@pytest.mark.parametrize("room, count", [(1, 3), (2, 3), (3, 2), (5, 2), (6, 9), (50, 4)])
def test_draft_model_feeds_what_a_fresh_one_would(room, count):
    config = ModelConfig(vocab_size=SIZE, context_length=room, d_model=8, num_layers=1, num_heads=2, d_ff=16)
    small, rng = TransformerLM(config, seed=4), np.random.default_rng(0)
    draft, ids = DraftModel(small, CachedDecoder), [0]
    for _ in range(30):
        draw = lambda probs: int(rng.integers(SIZE))
        proposal, q = draft.propose(ids, count, next_token_probs, draw)
        assert len(proposal) == len(q) == min(count, room - max(1, room//2)) and q.shape[1] == SIZE
        half, n = max(1, room//2), len(proposal)
        start = next(s for s in range(0, 999, half) if len(ids) - s + n <= room) if n else 0
        for i in range(n):
            with torch.no_grad(): fresh = small(torch.tensor([(ids + proposal[:i])[start:]]))[0, -1].softmax(-1)
            assert torch.allclose(q[i], fresh, rtol=1e-4, atol=1e-6)
        keep = int(rng.integers(len(proposal) + 1))
        ids = ids + proposal[:keep] + [int(rng.integers(SIZE))] if rng.random() < 0.9 else [int(rng.integers(SIZE))]


def test_a_draft_serves_several_texts_in_turn(model):
    draft = DraftModel(table_model(5, SIZE))
    alone = [list(speculate(model, draft, [0], 15, seed=s)) for s in (1, 2)]
    both = zip(speculate(model, draft, [0], 15, seed=1), speculate(model, draft, [0], 15, seed=2))
    assert [list(t) for t in zip(*both)] == alone


def test_seeds_and_nothing_global(model):
    state, ids = torch.get_rng_state(), [0, 1]
    model.train()
    runs = [list(speculate(model, PromptLookup(SIZE, 1), ids, 20, seed=s)) for s in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2] and ids == [0, 1]
    assert torch.equal(state, torch.get_rng_state()) and model.training
    g = torch.Generator().manual_seed(1)
    assert list(speculate(model, PromptLookup(SIZE, 1), ids, 20, seed=5, generator=g)) == runs[0]


ids_lists = st.lists(st.integers(0, 3), min_size=1, max_size=25)


@given(ids_lists, st.integers(1, 30))
@settings(max_examples=150, deadline=None)
def test_find_repeat(ids, longest):
    n, found = len(ids), (0, 0)
    for length in range(1, min(longest, n - 1) + 1):
        stops = [s for s in range(length, n) if ids[s - length:s] == ids[n - length:]]
        if stops: found = length, stops[-1]
    assert find_repeat(ids, longest) == found


@given(ids_lists, st.integers(1, 4), st.integers(1, 6))
@settings(max_examples=100, deadline=None)
def test_prompt_lookup(ids, shortest, count):
    proposal, q = PromptLookup(4, shortest).propose(ids, count, None, None)
    length, stop = find_repeat(ids)
    if length < shortest: assert proposal == [] and q.shape == (0, 4)
    else:
        assert len(proposal) == count and torch.equal(q.argmax(-1), torch.tensor(proposal)) and torch.equal(q.sum(-1), torch.ones(count).double())
        text = ids + proposal
        assert all(text[len(ids) + i] == text[stop + i] for i in range(count))


@given(ids_lists, ids_lists, st.integers(1, 5))
@settings(max_examples=150, deadline=None)
def test_ngram_counts(sample_ids, ids, order):
    counts = NgramDraft(sample_ids, 4, order).counts(ids)
    for n in reversed(range(min(order, len(ids) + 1))):
        context = ids[len(ids) - n:]
        after = Counter(sample_ids[i + n] for i in range(len(sample_ids) - n) if sample_ids[i:i + n] == context)
        if after: break
    assert counts.tolist() == [after[i] for i in range(4)]


def test_ngrams_fit_the_largest_vocabulary_said_to_fit():
    size = 2**31
    draft = NgramDraft([size - 1, size - 1, 5], size, order=2)
    assert [len(keys) for keys, _ in draft.grams] == [2, 2] and draft.grams[1][0].tolist() == [(size - 1)*size + 5, size*size - 1]
    with pytest.raises(ValueError, match="order = 3, expected 1 to 2 for 2147483648 ids"): NgramDraft([0], size, order=3)
    with pytest.raises(ValueError, match="order = 3, expected 1 to 2 for 2097152 ids"): NgramDraft([0], 2**21, order=3)  # 63 bits: one too many


# Formulas

@pytest.mark.parametrize("alpha", [0.2, 0.75])
@pytest.mark.parametrize("lookahead", [1, 2, 4])
def test_expected_tokens_is_the_mean_over_all_outcomes(alpha, lookahead):
    p, q = torch.tensor([alpha, 1 - alpha, 0]).double(), torch.tensor([alpha, 0, 1 - alpha]).double()
    run = lambda draw: verify([draw(q) for _ in range(lookahead)], q.expand(lookahead, 3), p.expand(lookahead + 1, 3), draw)[0]
    mean = sum((n + 1)*w for n, w in exact_distribution(run).items())
    assert abs(mean - expected_tokens(alpha, lookahead)) < 1e-12
    assert abs(mean - (1 - alpha**(lookahead + 1))/(1 - alpha)) < 1e-12
    assert abs(expected_speedup(alpha, lookahead, 0.1, 1.5) - mean/(0.1*lookahead + 1.5)) < 1e-12


def test_acceptance_rate():
    assert acceptance_rate([]) == acceptance_rate([(0, 0)]) == acceptance_rate([(4, 0)]) == 0
    assert acceptance_rate([(4, 4), (4, 4)]) == 1 and acceptance_rate([(4, 1), (0, 0), (2, 2)]) == 3/4
    rng = np.random.default_rng(0)
    rounds = [(5, int(np.argmin([*(rng.random(5) < 0.6), False]))) for _ in range(4000)]
    assert abs(acceptance_rate(rounds) - 0.6) < 0.02


def test_exact_distribution():
    assert exact_distribution(lambda draw: "sure") == {"sure": 1}
    law = exact_distribution(lambda draw: tuple(draw([0.5, 0, 0.5]) for _ in range(draw([0.25, 0.75]) + 1)))
    assert exact_distribution(lambda draw: draw([0.7, 0.3])) == {0: 0.7, 1: 0.3}          # not through float32
    assert law == {(0,): 0.125, (2,): 0.125, (0, 0): 0.1875, (0, 2): 0.1875, (2, 0): 0.1875, (2, 2): 0.1875}


# Bad input

def test_refused(model):
    lookup = PromptLookup(SIZE)
    for words, kw in {"lookahead = 0, expected 1 or more": dict(lookahead=0), "lookahead = -2": dict(lookahead=-2), "ids are empty": dict(ids=[]),
                      "max_tokens = -1": dict(max_tokens=-1), "temperature = nan": dict(temperature=math.nan), "top_p = 2": dict(top_p=2),
                      "stop: id 20": dict(stop=[20]), "context_length = 13": dict(context_length=13), "id 20 is not": dict(ids=[20]),
                      "the draft has 21 ids, the model's vocabulary 20": dict(draft=PromptLookup(21)),
                      "the draft has 3 ids, the model's vocabulary 20": dict(draft=DraftModel(little))}.items():
        with pytest.raises(ValueError, match=words): speculate(**dict(model=model, draft=lookup, ids=[0], max_tokens=5) | kw)
    with pytest.raises(ValueError, match="the draft has 20 ids, the model's vocabulary 3"): speculate(little, lookup, [0], 5)
    with pytest.raises(TypeError): speculate(model, lookup, [0], 5, lookahead=1.5)
    with pytest.raises(ValueError, match="room for 4"): speculate(model, lookup, [0], 5, decoder=lambda m: CachedDecoder(m, max_tokens=4))
    with pytest.raises(ValueError, match="shortest = 0"): PromptLookup(4, 0)
    for words, args in {"order = 0": ([1], 4, 0), "tokens are empty": ([], 4), "from -1 to 2, expected 0 to 3": ([-1, 2], 4), "from 2 to 4": ([2, 4], 4)}.items():
        with pytest.raises(ValueError, match=words): NgramDraft(*args)
    for rate in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="rate = "): expected_tokens(rate, 3)


def test_a_draft_that_lies_is_refused():
    class Liar(PromptLookup):
        def propose(self, ids, count, to_probs, draw): return [1], torch.tensor([[1., 0, 0]])
    with pytest.raises(ValueError, match="proposed token 1, to which it gives the probability 0"): list(speculate(little, Liar(3), [0], 5))


def test_a_draft_that_failed_once_goes_on():
    "It failed while it fed a text again whose keys had left the window."
    model = TransformerLM(ModelConfig(vocab_size=97, context_length=64, d_model=32, num_layers=2, num_heads=4, d_ff=64, window=5))
    draft, ids = DraftModel(model, CachedDecoder), list(range(20))
    greedy = dict(to_probs=partial(next_token_probs, temperature=0), draw=lambda p: int(p.argmax()))
    draft.propose(ids, 4, **greedy)
    feed = draft.decoder.feed
    def broken(*args, **more): raise MemoryError
    draft.decoder.feed = broken
    with pytest.raises(MemoryError): draft.propose(ids[:15], 4, **greedy)
    draft.decoder.feed = feed
    assert draft.propose(ids[:15], 4, **greedy)[0] == DraftModel(model, CachedDecoder).propose(ids[:15], 4, **greedy)[0]
