"""The scaling study: counts, fits on planted laws, and what stands in the results file."""
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from lmcourse.architecture.transformer_torch import TransformerLM
from lmcourse.scaling.loss_law import LossLaw
from lmcourse.parallelism.batch_size import small_model
from lmcourse.scaling.study import best_excess, best_size, local_exponents, other_seeds, parameter_counts, predict_excess, predict_loss, read_study, size_law
from lmcourse.scaling.zipf import floor_profile
from lmcourse.tools.checks import check_close
from lmcourse.tools.stories import Stories, short_stories

RESULTS = Path(__file__).parent.parent/"nbs/results/scaling.jsonl"


@pytest.mark.parametrize("width, layers", [(8, 1), (32, 2), (64, 3)])
def test_counts_are_those_of_the_model(width, layers):
    model, counts = TransformerLM(small_model(width, layers)), parameter_counts(width, layers)
    sizes = {n: p.numel() for n, p in model.named_parameters() if p.ndim > 1}
    assert counts["all"] == sum(sizes.values())
    assert counts["matmul"] == counts["all"] - sizes["token_embeddings.weight"]
    assert counts["blocks"] == sum(s for n, s in sizes.items() if n.startswith("layers."))


def test_short_stories_are_the_beginnings_of_stories():
    short, whole = short_stories(), Stories()
    assert short.entropy().document == pytest.approx(44.5015, abs=1e-3) and short.entropy().document < whole.entropy().document/1.9
    texts = [next(short) for _ in range(200)]
    assert short_stories().log_prob(texts[0]) == short.log_prob(texts[0])
    assert np.mean([-short.log_prob(t) for t in texts]) == pytest.approx(short.entropy().document, rel=.02)
    assert np.mean([len(t.encode()) for t in texts]) == pytest.approx(short.entropy().bytes, rel=.02)
    for t in texts[:5]: assert np.isfinite(whole.prefix_log_prob(t + " ")) or np.isfinite(whole.prefix_log_prob(t))
    with pytest.raises(ValueError): whole.log_prob(texts[0])


def planted(law, budgets=(1e10, 1e11, 1e12), around=(.25, .5, 1, 2, 4)):
    return [dict(budget=C, matmul=n, tokens=C/6/n, loss=float(law.loss(n, C/6/n)))
            for C in budgets for n in law.optimum(C)[0]*np.array(around)]


@pytest.mark.parametrize("law", [LossLaw(.5, 30., 60., .5, .5), LossLaw(.45, 40., 200., .4, .4)])
def test_a_planted_law_is_found(law):
    runs = planted(law)
    assert size_law(runs).exponent == pytest.approx(law.exponent, abs=.01)
    n, d = law.optimum(3e12)
    found = predict_loss(runs, n, d, np.random.default_rng(0), draws=40)
    assert found["loss"] == pytest.approx(float(law.loss(n, d)), rel=1e-3) and found["E"] == pytest.approx(law.E, abs=.01)
    assert found["low"] <= found["loss"]*1.001 and found["loss"] <= found["high"]*1.001


def test_seeds_are_averaged():
    runs = [dict(matmul=n, loss=abs(np.log(n/8))**2 + e) for n in (2, 4, 8, 16, 32) for e in (-.1, .1)]
    size, loss = best_size(runs)
    assert size == pytest.approx(8) and loss == pytest.approx(0, abs=1e-9)
    for losses, words in (([1, 2, 3], "try more sizes"), ([3, 2, 1], "try more sizes"), ([2.6, 2.15, 2.26, 2.08, 2.16], "opens downwards"), ([3, 2, np.nan], "without a finite loss")):
        with pytest.raises(ValueError, match=words): best_size([dict(matmul=2**n, loss=v) for n, v in enumerate(losses)])


def test_excess_over_a_known_floor():
    runs = [dict(budget=C, loss=.5 + C**-.5) for C in (10., 100., 1000.)]
    assert predict_excess(runs, 1e4, .5) == pytest.approx(.51)
    with pytest.raises(ValueError, match="floor = 2"): predict_excess(runs, 1e4, 2.)


def test_a_loss_that_rises_is_not_extrapolated():
    with pytest.raises(ValueError, match="the best loss rises from 2.0 to 2.5"): predict_excess([dict(budget=1e9, loss=2.), dict(budget=1e10, loss=2.5)], 1e11, 1.)


def test_the_prediction_was_written_before_the_run():
    lines = RESULTS.read_text().splitlines()
    assert sum(map(len, lines)) < 200_000
    place = {kind: next(i for i, line in enumerate(lines) if f'"kind": "{kind}"' in line) for kind in ("prediction", "held_out")}
    about, grid, others = read_study(RESULTS)
    said, came = others["prediction"][0], others["held_out"][0]
    assert place["prediction"] < place["held_out"] and said["budget"] >= 3*max(r["budget"] for r in grid)
    assert (said["width"], said["layers"], said["steps"]) == (came["width"], came["layers"], came["steps"])
    first = [r for r in grid if r["seed"] == 0]
    again = predict_loss(first, said["matmul"], said["tokens"], np.random.default_rng(0), draws=20)
    assert again["loss"] == pytest.approx(said["loss"], abs=2e-4) and len(first) == said["runs"]      # Other seeds came after it
    assert [i for i, line in enumerate(lines) if '"seed": 1' in line or '"seed": 2' in line] == [*range(place["held_out"] + 1, len(lines))]
    seeds = [sum((r["budget"], r["width"], r["layers"]) == (f["budget"], f["width"], f["layers"]) for r in grid) for f in first]
    assert seeds == [3 if f["budget"] < 1e12 else 1 for f in first]
    assert all(r["excess"] > 0 for r in grid)


def test_the_floor_is_found_by_every_count():
    runs = [r | dict(all=2*r["matmul"], blocks=r["matmul"] - 1e3) for r in planted(LossLaw(.5, 30., 60., .5, .45))]
    for count, scale in (("matmul", 1), ("all", 2)):
        found = predict_loss(runs, scale*1e6, 1e8, np.random.default_rng(0), draws=20, count=count)
        assert found["E"] == pytest.approx(.5, abs=.01), count
    bent = predict_loss(runs, 1e6, 1e8, np.random.default_rng(0), draws=20, count="blocks")
    assert bent["rms"] > 10*found["rms"]                     # Another count is another law


def test_profile_of_the_floor_is_lowest_where_it_was_planted():
    runs, floors = planted(LossLaw(.5, 30., 60., .5, .5)), np.linspace(.3, .7, 9)
    misfit = floor_profile(runs, floors)
    assert floors[misfit.argmin()] == pytest.approx(.5) and misfit.min() < misfit[0]/5
    more = [dict(r, loss=r["loss"] + .1) for r in runs]
    assert floors[floor_profile(more, floors).argmin()] == pytest.approx(.6)


def test_profile_where_only_one_term_can_be_told():
    "Tokens in proportion to parameters, then a loss that rises with them: brute force over the terms."
    from scipy.optimize import nnls
    for tokens, loss in ((20, lambda N: 2 + 50*N**-.5), (20, lambda N: 2 + N/1e6), (None, lambda N: 2 + 50*N**-.5)):
        N = np.array([1e4, 1e5, 1e6, 1e7])
        runs = [dict(matmul=n, tokens=tokens*n if tokens else 1e6/n, loss=loss(n)) for n in N]
        L, D, floors = np.array([r["loss"] for r in runs]), np.array([r["tokens"] for r in runs]), (1.5, 2., 2.5)
        powers = np.linspace(.05, 3, 90)
        slow = [min(nnls(np.stack([(N/N.mean())**-a/L, (D/D.mean())**-b/L], 1), (L - E)/L)[1] for a in powers for b in powers)/2 for E in floors]
        check_close(floor_profile(runs, floors), np.array(slow), 1e-6, 2e-8)


def test_local_exponents_are_slopes_of_the_best_means():
    runs = [dict(budget=C, width=w, layers=1, excess=C**-.5*f + s) for C in (1., 4., 100.) for w, f in ((8, 1), (16, 3)) for s in (-.001, .001)]
    assert local_exponents(best_excess(runs)) == pytest.approx([-.5, -.5])
    assert local_exponents({1.: 8., 2.: 4., 4.: 1.}) == pytest.approx([-1, -2])
    for best, words in (({1.: 1.}, "1 budgets"), ({1.: 1., 2.: 0.}, "an excess of 0")):
        with pytest.raises(ValueError, match=words): local_exponents(best)


def test_the_saved_study_of_unequal_words_is_whole():
    about, grid, others = read_study(RESULTS.with_name("zipf.jsonl"))
    assert {r["budget"] for r in grid} == {3e10, 1e11, 3e11, 1e12} and others["held_out"][0]["budget"] == 3e12
    seeds = {(r["budget"], r["width"], r["layers"]): 0 for r in grid}
    for r in grid: seeds[r["budget"], r["width"], r["layers"]] += 1
    assert all(n == (2 if C <= 1e11 else 1) for (C, *_), n in seeds.items())
    floor = grid[0]["loss"] - grid[0]["excess"]
    said, late = others["prediction"][0], others["late prediction"][0]
    again = predict_loss(grid, parameter_counts(48, 2)["matmul"], said["steps"]*1024, np.random.default_rng(0), draws=20)
    assert again["loss"] == pytest.approx(said["loss"], abs=1e-3) and len(grid) == said["runs"]
    assert predict_excess(grid, 3e12, floor) == pytest.approx(said["excess_law"], abs=1e-4)
    later = [r for r in grid if r["budget"] >= late["lowest"]]
    assert predict_loss(later, parameter_counts(48, 2)["matmul"], said["steps"]*1024, np.random.default_rng(0),
                        draws=20)["loss"] == pytest.approx(late["loss"], abs=1e-3)


def test_other_seeds_move_each_run_by_a_deviation_that_was_seen():
    runs = [dict(budget=1., width=w, layers=1, excess=e, loss=.5 + e) for w, e in ((8, 1.), (8, 4.), (16, 9.))]
    seen = {w: set() for w in (8, 16)}
    rng = np.random.default_rng(0)
    for _ in range(50):
        other = other_seeds(runs, rng)
        assert [r["width"] for r in other] == [8, 8, 16] and all(r["loss"] == pytest.approx(.5 + r["excess"]) for r in other)
        for r in other: seen[r["width"]].add(round(r["excess"], 9))
    up = 2**2**.5                                           # Deviations of two seeds are too small by the root of two
    assert seen == {8: {round(2*up, 9), round(2/up, 9)}, 16: {round(9*up, 9), round(9/up, 9)}}
    with pytest.raises(ValueError, match="no point of the study has two seeds"): other_seeds(runs[1:], rng)
