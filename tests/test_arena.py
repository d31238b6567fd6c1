"Ratings from pairwise wins: exact cases, symmetries, and games that decide nothing."
import math

import numpy as np
import pytest

from lmcourse.evaluation.arena import bradley_terry, elo_ratings, simulate_games
from lmcourse.tools.checks import check_close, expect_error


@pytest.mark.parametrize("wins,losses", [(3, 1), (1, 1), (7, 2), (1, 30)])
def test_two_players_have_the_log_odds_of_their_games(wins, losses):
    r = bradley_terry([(0, 1, 1)]*wins + [(1, 0, 1)]*losses, 2)
    check_close(float(r.strengths[0] - r.strengths[1]), math.log(wins/losses), 1e-9, 1e-9)
    check_close(float(r.errors.sum()), math.sqrt(1/wins + 1/losses), 1e-6)
    assert r.slope == r.slope_error == 0 and abs(r.strengths.sum()) < 1e-12


def test_a_long_chain_of_nearly_sure_winners_has_an_answer():
    games = [(i, i + 1, 1) for i in range(24) for _ in range(1000)] + [(i + 1, i, 1) for i in range(24)]
    check_close(-np.diff(bradley_terry(games, 25).strengths), np.full(24, math.log(1000)), 1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_neither_order_nor_names_nor_sides_matter(seed):
    rng = np.random.default_rng(seed)
    games = simulate_games(rng.normal(0, .7, 5), 300, rng)
    found, name = bradley_terry(games, 5), rng.permutation(5)
    turned = [(int(name[j]), int(name[i]), 1 - w) for i, j, w in games]
    again = bradley_terry([turned[t] for t in rng.permutation(300)], 5)
    check_close(again.strengths[name], found.strengths, 1e-9, 1e-9)
    check_close(again.errors[name], found.errors, 1e-8)
    check_close(again.log_likelihood, found.log_likelihood, 1e-9)


def test_at_the_answer_expected_wins_are_the_wins():
    games = simulate_games([0, 1, 2, .5], 500, np.random.default_rng(9))
    s = bradley_terry(games, 4).strengths
    for k in range(4):
        of = [(i, j, w) for i, j, w in games if k in (i, j)]
        won = sum(w if i == k else 1 - w for i, j, w in of)
        expected = sum(1/(1 + math.exp(s[j if i == k else i] - s[k])) for i, j, w in of)
        check_close(float(expected), float(won), 1e-9)


def test_what_sways_the_judge_is_found():
    rng, games, longer = np.random.default_rng(3), [], []
    for i, j, _ in simulate_games([0, 0, 0], 6000, rng):
        longer.append(rng.standard_normal())
        games.append((i, j, int(rng.random() < 1/(1 + math.exp(-.8*longer[-1])))))
    r = bradley_terry(games, 3, longer)
    assert abs(r.slope - .8) < 3*r.slope_error < .15 and abs(r.strengths).max() < 3.5*r.errors.max()


def test_strengths_and_errors_of_another_library():
    "A logistic regression of statsmodels 0.15 on the players' differences: GLM(y, X, Binomial()).fit(), turned to strengths that add up to zero."
    games = [(0, 1, 1), (0, 1, 1), (1, 0, 1), (1, 2, 1), (1, 2, 0), (2, 1, .5), (0, 2, 1), (2, 0, 1), (2, 3, 1), (3, 0, 1), (3, 2, .5), (0, 3, 1)]
    r = bradley_terry(games, 4)
    check_close(r.strengths, np.array([0.21182447, -0.12464777, 0.21182447, -0.29900116]), 1e-7, 1e-7)
    check_close(r.errors, np.array([0.58052731, 0.67259271, 0.58052731, 0.80178372]), 1e-6)


def test_ties_make_the_errors_too_large():
    "30 wins, 30 losses and 40 ties: statsmodels 0.15 has a standard error of 0.2 as well, and 0.15491933 from how the results scatter (cov_type='HC0')."
    r = bradley_terry([(0, 1, 1)]*30 + [(0, 1, 0)]*30 + [(0, 1, .5)]*40, 2)
    check_close(float(r.errors.sum())/.15491933, 1.291, 1e-3)


def test_elo_needs_a_finite_stake():
    for k in (0, -1, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"k = {k}"): elo_ratings([(0, 1, 1)], 2, k)


def test_elo_gives_what_it_takes():
    games = simulate_games([0, 1, 2], 200, np.random.default_rng(0))
    points = elo_ratings(games, 3)
    assert abs(points.sum()) < 1e-9 and points[0] < points[2]
    check_close(elo_ratings([(0, 1, .5), (1, 0, .5)], 2), np.zeros(2), 0, 1e-12)


@pytest.mark.parametrize("games,players,words", [
    ([(0, 1, 1), (1, 2, 1), (0, 2, 1)], 3, "players [0] never lost to, or never beat"),
    ([(0, 1, .5), (2, 3, .5)], 4, "players [0, 1]"), ([(0, 1, .5)], 3, "players [0, 1]")])
def test_games_that_decide_nothing_are_rejected(games, players, words):
    with expect_error(ValueError, words): bradley_terry(games, players)
    assert abs(elo_ratings(games, players).sum()) < 1e-9        # Elo needs no likeliest answer


@pytest.mark.parametrize("games,words", [([(0, -1, 1)], "players -1 to 0"), ([(.7, 1, 1), (1, 0, 1)], "players 0 to 1"), ([(0, 1, float("nan"))], "won = nan"), ([], "0 games")])
def test_games_that_cant_be_are_rejected(games, words):
    for rate in (bradley_terry, elo_ratings):
        with expect_error(ValueError, words): rate(games, 2)
