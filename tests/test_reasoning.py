"The cup game, chains written with a cache, and the exact distribution of a majority vote."
import itertools
from collections import Counter
from fractions import Fraction

import pytest

torch = pytest.importorskip("torch")

from lmcourse.alignment import reasoning
from lmcourse.alignment.reasoning import CUPS, DOTS, IGNORED, MOVES, SWAPS, chain_probs, check_chain, cup_games, follow_ball, game_rows, majority_probs, sample_chains, vote_shares
from lmcourse.architecture.transformer_torch import TransformerLM
from lmcourse.tools.checks import check_close
from lmcourse.tools.config import ModelConfig

MODEL = TransformerLM(ModelConfig(vocab_size=DOTS + 1, context_length=13, d_model=16, num_layers=2, num_heads=2, d_ff=32, qk_norm=True), seed=3)
with torch.no_grad(): [w.mul_(3) for w in MODEL.parameters() if w.ndim == 2] # So that the distributions aren't flat, and positions matter
GAMES = cup_games(7, 6, torch.Generator().manual_seed(1))


def test_a_swap_takes_each_ball_where_a_hand_would():
    for (a, b), row in zip(SWAPS, MOVES.tolist()):
        cups = list(range(CUPS))
        cups[a], cups[b] = cups[b], cups[a]
        assert row == cups
    assert len(SWAPS) == 10 and torch.equal(MOVES.gather(1, MOVES), torch.arange(CUPS).expand(10, -1))


def test_the_ball_is_where_lists_say():
    for first, swaps, path in zip(*GAMES, follow_ball(*GAMES)):
        cups = ["ball" if c == first else "" for c in range(CUPS)]
        for s, at in zip(swaps.tolist(), path.tolist()):
            a, b = SWAPS[s]
            cups[a], cups[b] = cups[b], cups[a]
            assert cups.index("ball") == at


def test_games_come_from_the_generator_and_use_all_cups_and_swaps():
    one, two = (cup_games(2000, 3, torch.Generator().manual_seed(5)) for _ in range(2))
    assert all(map(torch.equal, one, two)) and set(one[0].tolist()) == set(range(5)) and set(one[1].flatten().tolist()) == set(range(10))


@pytest.mark.parametrize("kind", ["direct", "chain", "filler"])
def test_rows_ask_for_the_same_and_differ_in_what_is_read(kind):
    inputs, labels = game_rows(kind, *GAMES)
    right = follow_ball(*GAMES)
    assert inputs.shape == labels.shape == (7, 7 if kind == "direct" else 13)
    assert torch.equal(labels[:, -6:], right) and (labels[:, :-6] == IGNORED).all()
    assert torch.equal(inputs[:, 0], GAMES[0]) and torch.equal(inputs[:, 1:7], GAMES[1] + CUPS) and inputs.max() <= DOTS
    if kind == "chain": assert torch.equal(inputs[:, 7], GAMES[0]) and torch.equal(inputs[:, 8:], right[:, :-1])
    if kind == "filler": assert (inputs[:, 7:] == DOTS).all()


def test_a_chain_is_checked_step_by_step():
    right = follow_ball(*GAMES)
    assert check_chain(*GAMES, right).all()
    wrong = right.clone()
    wrong[:, 2] = (wrong[:, 2] + 1) % CUPS
    checked = check_chain(*GAMES, wrong)
    assert not checked[:, 2:4].any() and checked[:, :2].all() and checked[:, 4:].all()   # The step to the wrong cup, and the step back


def chosen(start, swaps): # The likeliest chain, written without a cache
    chain = start[:, None]
    for _ in range(swaps.shape[1]):
        with torch.no_grad(): logits = MODEL(torch.cat((start[:, None], swaps + CUPS, chain), 1))[:, -1, :CUPS]
        chain = torch.cat((chain, logits.argmax(-1, keepdim=True)), 1)
    return chain[:, 1:]


def test_the_likeliest_chain_is_that_of_a_model_without_a_cache():
    whole = sample_chains(MODEL, *GAMES, 0)
    assert torch.equal(whole, chosen(*GAMES)) and torch.equal(sample_chains(MODEL, *GAMES, 0, 2), whole[:, :2])
    assert torch.equal(check_chain(*GAMES, whole[:, :2]), check_chain(*GAMES, whole)[:, :2])


def test_all_chains_and_their_probabilities():
    start, swaps = (t[:2] for t in GAMES)
    chains, probs = chain_probs(MODEL, start, swaps, 3)
    assert chains.tolist() == [list(c) for c in itertools.product(range(CUPS), repeat=3)] and probs.dtype == torch.float64
    check_close(probs.sum(1), torch.ones(2, dtype=torch.float64), 1e-9)
    ids = torch.cat((start[1:], swaps[1] + CUPS, start[1:], torch.tensor([4, 0])))
    with torch.no_grad(): p = MODEL(ids[None])[0, -3:, :CUPS].double().softmax(-1)
    check_close(probs[1, chains.tolist().index([4, 0, 2])], p[0, 4]*p[1, 0]*p[2, 2], 1e-6)
    alone, single = chain_probs(MODEL, start, swaps, 1)
    assert alone.shape == (5, 1)
    check_close(single[0], probs[0].view(5, 25).sum(1), 1e-6)


@pytest.mark.parametrize("temperature", [1., .4])
def test_sampled_chains_follow_their_distribution(temperature):
    start, swaps = (t[:1].repeat_interleave(20_000, 0) for t in GAMES)
    drawn = sample_chains(MODEL, start, swaps, temperature, generator=torch.Generator().manual_seed(0))
    again = sample_chains(MODEL, start, swaps, temperature, generator=torch.Generator().manual_seed(0))
    assert torch.equal(drawn, again) and drawn.shape == (20_000, 6)
    ids = torch.cat((start[:1], swaps[0] + CUPS, start[:1]))
    with torch.no_grad(): expected = (MODEL(ids[None])[0, -1, :CUPS]/temperature).softmax(-1)
    assert (torch.bincount(drawn[:, 0], minlength=CUPS)/20_000 - expected).abs().max() < .015
    if temperature == 1:
        chains, probs = chain_probs(MODEL, start[:1], swaps[:1], 2)
        seen = torch.bincount(drawn[:, 0]*CUPS + drawn[:, 1], minlength=25)/20_000
        assert (seen - probs[0]).abs().max() < .015


def counted_by_hand(probs, k): # Every way in which k voters can vote
    won = [Fraction(0)]*len(probs)
    for ballot in itertools.product(range(len(probs)), repeat=k):
        chance, votes = Fraction(1), Counter(ballot)
        for a in ballot: chance *= probs[a]
        best = [a for a, n in votes.items() if n == max(votes.values())]
        for a in best: won[a] += chance/len(best)
    return [float(w) for w in won]


@pytest.mark.parametrize("k", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("probs", [["1/2", "1/3", "1/6"], ["3/5", "2/5"], ["1", "0", "0"], ["0", "1/2", "0", "1/2"], ["1"]], ids=str)
def test_a_vote_counts_as_enumeration_does(probs, k):
    exact = [Fraction(p) for p in probs]
    p = torch.tensor([[float(x) for x in exact]]*2, dtype=torch.float64)
    check_close(majority_probs(p, k), torch.tensor([counted_by_hand(exact, k)]*2, dtype=torch.float64), 1e-10, 1e-12)


def test_many_votes_find_the_likeliest_answer():
    p = torch.tensor([[.35, .25, .2, .1, .1]], dtype=torch.float64)
    shares = [majority_probs(p, k)[0, 0].item() for k in (1, 4, 9, 16, 25)]
    assert shares == sorted(shares) and shares[0] == pytest.approx(.35) and shares[-1] > .6
    check_close(majority_probs(p, 25).sum(), torch.tensor(1., dtype=torch.float64), 1e-10)


def test_ties_are_shared():
    votes = torch.tensor([[[0, 0, 1, 1], [2, 2, 2, 0]], [[0, 1, 2, 3], [4, 4, 4, 4]]])
    check_close(vote_shares(votes), torch.tensor([[[.5, .5, 0, 0, 0], [0, 0, 1, 0, 0]], [[.25]*4 + [0], [0, 0, 0, 0, 1]]], dtype=torch.float64))
    check_close(vote_shares(torch.tensor([1]), 2), torch.tensor([0., 1.], dtype=torch.float64))


def test_no_votes_are_refused():
    with pytest.raises(ValueError, match="k = 0, expected at least one vote"): majority_probs(torch.tensor([[.5, .5]]), 0)


def test_what_is_public():
    assert reasoning.__all__ == ["CUPS", "SWAPS", "MOVES", "DOTS", "IGNORED", "cup_games", "follow_ball", "game_rows", "sample_chains", "check_chain", "vote_shares", "majority_probs", "chain_probs"]
