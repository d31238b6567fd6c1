"Power laws, the loss law, isoFLOP curves and `lmcourse scale`: planted laws are found, published figures come out, bad input is refused in a line."
import csv
import json
import math
import os
from dataclasses import astuple
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import here

from lmcourse.scaling.fit_runs import FAR, ScalingRuns, fit_scaling, read_scaling_runs, scaling_lines, scaling_plot, scaling_tables
from lmcourse.scaling.isoflops import fit_parabola, isoflop_optima, isoflop_points, lower_envelope
from lmcourse.scaling.loss_law import LossLaw, bootstrap_law, chinchilla_points, fit_error, fit_loss_law, fit_loss_law_grid, huber, law_interval
from lmcourse.scaling.power_laws import PowerLaw, bootstrap, fit_power_law, interval
from lmcourse.tools.ledger import find, published

SHARED = os.environ.get("LMCOURSE_DATA")
shared = pytest.mark.skipif(not SHARED or not (Path(SHARED)/"isoflops_curves.json").exists(), reason="LMCOURSE_DATA has no published runs")
PLANTED = LossLaw(1.8, 480., 2100., .35, .37)
laws = st.builds(LossLaw, st.floats(.5, 3), st.floats(50, 2000), st.floats(50, 2000), st.floats(.2, .6), st.floats(.2, .6))


def grid(sizes=6, lengths=8):
    N, D = np.meshgrid(np.geomspace(1e7, 1e10, sizes), np.geomspace(5e8, 3e11, lengths))
    return N.ravel(), D.ravel()


def values(prefix): return {e.key.split(".")[-1]: e.value for e in find(prefix)}


# Power laws

@given(st.floats(.01, 1e3), st.floats(-2, 2), st.floats(0, 5))
def test_a_power_law_without_noise_is_found(scale, exponent, floor):
    x = np.geomspace(1, 1e4, 7)
    law = PowerLaw(scale, exponent, floor)
    if not floor < law(x).min(): return                                                      # The rest is below the precision
    found = fit_power_law(x, law(x), floor)
    if (law(x) - floor).min() > 1e-6: assert found.exponent == pytest.approx(exponent, abs=1e-6)


@pytest.mark.parametrize("floor", [.5, 1.7, 2.5])
def test_a_floor_is_found(floor):
    law = PowerLaw(60., -.3, floor)
    x = np.geomspace(1e4, 1e7, 12)
    found = fit_power_law(x, law(x), None)
    assert (found.scale, found.exponent, found.floor) == pytest.approx((60, -.3, floor), rel=1e-5)


@pytest.mark.parametrize("x, y, floor, words", [
    ([1, 2], [1], 0., "one length"), ([1, 1], [1, 2], 0., "1 different x"), ([1, -2], [1, 2], 0., "x holds -2.0"), ([1, 2], [1, 0], 0., "y holds 0.0"), ([1, math.inf], [1, 2], 0., "x holds inf"),
    ([1, 2], [3, 4], 3., "floor = 3"), ([1, 2], [3, 4], math.nan, "floor = nan"), ([1, 2], [3, 4], -1., "floor = -1"), ([1, 2, 3], [3, 2, 1], None, "at least 4"), ([[1, 2]], [[3, 4]], 0., "two rows")])
def test_what_has_no_power_law_is_refused(x, y, floor, words):
    with pytest.raises(ValueError, match=words): fit_power_law(x, y, floor)


@pytest.mark.parametrize("exponent, floor", [(-76, 0.), (76, 0.), (-76, None)])
def test_a_scale_that_no_float_can_hold_is_refused(exponent, floor):
    x = np.linspace(1e20, 1.2e20, 6)
    with pytest.raises(ValueError, match="exponent -?76.*divide x by 1.1e+20".replace("+", "[+]")): fit_power_law(x, (x/1e20)**exponent, floor)
    law = fit_power_law(x/1e20, (x/1e20)**exponent)
    assert abs(law.exponent - exponent) < 1e-9


def test_bootstrap_resamples_pairs():
    rng = np.random.default_rng(0)
    x = np.arange(1., 11)
    samples = bootstrap(lambda a, b: (a.mean(), (a == b).all()), x, x, rng, 50)
    assert samples.shape == (50, 2) and samples[:, 1].all() and samples[:, 0].std() > 0
    assert interval(np.arange(101.), .9) == pytest.approx((5, 95))
    for y in (x[1:], np.append(x, 1.), x[:, None]):
        with pytest.raises(ValueError, match="expected two rows of one length"): bootstrap(lambda a, b: a.mean(), x, y, rng, 50)
    with pytest.raises(ValueError, match="a resample of 4 points can't be fitted .*1 different x"): bootstrap(lambda a, b: fit_power_law(a, b).exponent, [1, 2, 3, 4], [4, 3, 2, 1], rng)


# The loss law

@given(laws, st.floats(15, 25))
def test_the_optimum_is_the_least_loss(law, power):
    C = 10**power
    N, D = law.optimum(C)
    assert 6*N*D == pytest.approx(C)
    assert all(law.loss(N*f, D/f) >= law.loss(N, D) for f in (.5, .9, 1.1, 2))
    loss = float(law.loss(N, D))
    assert law.size_for_loss(loss) == pytest.approx(N, rel=1e-6) and law.tokens_for_loss(loss, N) == pytest.approx(D, rel=1e-6)


@given(laws, st.floats(18, 24), st.floats(0, 15))
def test_serving_makes_models_smaller_and_cheaper_in_all(law, power, served):
    N, D = law.optimum(10**power)
    loss, S = float(law.loss(N, D)), 10**served
    n, d = law.inference_optimum(loss, S)
    assert n <= N*(1 + 1e-6) and law.loss(n, d) == pytest.approx(loss, rel=1e-6)
    assert n*(6*d + 2*S) <= N*(6*D + 2*S)*(1 + 1e-6)
    assert all(n*(6*d + 2*S) <= n*f*(6*law.tokens_for_loss(loss, n*f) + 2*S)*(1 + 1e-9) for f in (.97, 1.03))


@settings(max_examples=15, deadline=None)
@given(laws)
def test_the_fit_finds_a_planted_law(law):
    N, D = grid()
    assert astuple(fit_loss_law(N, D, law.loss(N, D))) == pytest.approx(astuple(law), rel=1e-3)


def test_both_fits_agree_with_noise_and_wild_points():
    N, D = grid()
    rng = np.random.default_rng(0)
    loss = PLANTED.loss(N, D)*np.exp(.003*rng.standard_normal(len(N)))
    loss[[3, 20]] *= 1.3                                                                      # Huber's loss hardly minds
    fast, slow = fit_loss_law(N, D, loss), fit_loss_law_grid(N, D, loss, zooms=14)
    assert fit_error(fast, N, D, loss) <= fit_error(slow, N, D, loss)*(1 + 1e-6)
    assert fit_error(slow, N, D, loss) == pytest.approx(fit_error(fast, N, D, loss), rel=1e-3)
    assert astuple(slow) == pytest.approx(astuple(fast), rel=.03) and fast.exponent == pytest.approx(PLANTED.exponent, abs=.01)
    squares = fit_loss_law(N, D, loss, delta=10.)
    assert abs(squares.E - 1.8) > abs(fast.E - 1.8)


def test_huber():
    assert huber(np.array([.5, -.5, 3., -3.]), 1.).tolist() == [.125, .125, 2.5, 2.5]
    for delta in (0, -1., np.nan):
        with pytest.raises(ValueError, match="delta = .*, expected more than 0"): huber(np.ones(2), delta)


def test_published_fit_and_standard_errors():
    N, D, loss = chinchilla_points()
    for drop in (-3, 245):
        with pytest.raises(ValueError, match="drop = .*, expected 0 to 244"): chinchilla_points(drop)
    law = fit_loss_law(N, D, loss)
    theirs = values("epoch-2024.point-fit")
    for name, rel in (("E", 1e-3), ("A", 1e-3), ("B", 2e-3), ("alpha", 1e-3), ("beta", 1e-3)): assert getattr(law, name) == pytest.approx(theirs[name.lower()], rel=rel)
    assert fit_error(law, N, D, loss) == pytest.approx(theirs["objective"], rel=1e-4)
    samples = bootstrap_law(N, D, loss, np.random.default_rng(3), 200)
    errors = values("epoch-2024.standard-error")
    for name, what in dict(e=lambda l: l.E, alpha=lambda l: l.alpha, beta=lambda l: l.beta, exponent=lambda l: l.exponent).items():
        assert np.std([what(l) for l in samples]) == pytest.approx(errors[name], abs=.004)


@pytest.mark.slow
def test_intervals_cover_a_planted_law():
    N, D = grid()
    rng, clean, hits = np.random.default_rng(5), PLANTED.loss(*grid()), []
    for _ in range(150):
        samples = bootstrap_law(N, D, clean*np.exp(.005*rng.standard_normal(len(N))), rng, 100)
        low, high = law_interval(samples, lambda l: l.exponent)
        hits.append(low < PLANTED.exponent < high)
    assert .9 <= np.mean(hits) <= 1


@pytest.mark.parametrize("change, words", [
    (lambda N, D, L: (N[:5], D[:5], L[:5]), "5 of them"), (lambda N, D, L: (N, D, -L), "loss holds -"), (lambda N, D, L: (N, D*math.nan, L), "tokens holds nan"), (lambda N, D, L: (N, D, L[1:]), "one length"),
    (lambda N, D, L: (N*0 + 1, D, L), "1 different parameters"), (lambda N, D, L: (N, np.where(D > 1e10, 2., 1.), L), "2 different tokens"),
    (lambda N, D, L: (N, 20*N, PLANTED.loss(N, 20*N)), "tokens grow in step with parameters")])
@pytest.mark.parametrize("fit", [fit_loss_law, fit_loss_law_grid])
def test_runs_that_no_law_can_be_fitted_to(fit, change, words):
    with pytest.raises(ValueError, match=words): fit(*change(*grid(), PLANTED.loss(*grid())))


@pytest.mark.parametrize("loss, words", [
    (lambda N, D, e: 3 + .1*e, "don't fall as a power of the parameters,"), (lambda N, D, e: 1.8 + 400*N**-.34, "power of the tokens,"), (lambda N, D, e: 1.8 + 400*N**-.34 + .01*e[::-1], "power of the tokens,"),
    (lambda N, D, e: 1.8 + 400*D**-.34 + .01*e, "power of the parameters,"), (lambda N, D, e: 2 + N**.05, "power of the parameters,")])
def test_losses_that_determine_no_law(loss, words):
    N, D = (v.ravel() for v in np.meshgrid(np.geomspace(1e6, 1e8, 6), np.geomspace(1e7, 1e9, 5), indexing="ij"))
    with pytest.raises(ValueError, match=words): fit_loss_law(N, D, loss(N, D, np.random.default_rng(3).standard_normal(30)))


@pytest.mark.parametrize("constants", [(-1, 1, 1, .3, .3), (math.nan, 1, 1, .3, .3), (1, 1, math.inf, .3, .3), (1, 0, 1, .3, .3), (1, 1, 1, 0, .3), (1, 1, 1, .3, -.3)])
def test_no_law(constants):
    with pytest.raises(ValueError, match="expected E of 0 or more"): LossLaw(*constants)


# IsoFLOP curves

@given(st.floats(-3, 3), st.floats(.01, 2), st.floats(-5, 5), st.floats(1, 3))
def test_a_parabola_is_found(middle, curve, level, base):
    u = np.linspace(-4, 4, 7)
    x, loss = fit_parabola(np.exp(u)*10**base, level + curve*(u - middle)**2)
    assert x == pytest.approx(math.exp(middle)*10**base, rel=1e-6) and loss == pytest.approx(level, abs=1e-7)


def test_lowest_runs_and_vertices():
    C = np.repeat([1e18, 1e20], 9)
    N = np.concatenate([PLANTED.optimum(c)[0]*np.geomspace(1/3, 3, 9)*1.1 for c in (1e18, 1e20)])
    loss = PLANTED.loss(N, C/(6*N))
    budgets, low, least = isoflop_optima(C, N, loss, "lowest")
    _, vertex, _ = isoflop_optima(C, N, loss)
    best = np.array([PLANTED.optimum(c)[0] for c in budgets])
    assert set(low) <= set(N) and np.all(abs(vertex/best - 1) < .02) and np.all(abs(low/best - 1) > abs(vertex/best - 1)) and least[1] < least[0]
    with pytest.raises(ValueError, match="1e\\+18 FLOPs: parabola: 2 different"): isoflop_optima(C[7:], N[7:], loss[7:])
    for x in (N[:7], N[:0]):
        with pytest.raises(ValueError, match="isoflops: shapes"): isoflop_optima(C[:len(x)], x, loss if len(x) else loss[:0])
    loss[4] = np.nan
    for method in ("parabola", "lowest"):
        with pytest.raises(ValueError, match="1 runs without a finite loss"): isoflop_optima(C, N, loss, method)
    for x, y in (([0, 1, 2], [1, 0, 1]), ([1, 2, 3], [1, np.inf, 2])):
        with pytest.raises(ValueError, match="expected numbers, sizes above 0"): fit_parabola(x, y)


def test_envelope():
    assert lower_envelope([1, 2, 3], [[3, 2, math.nan], [4, 1, 5]]).tolist() == [0, 1, 1]


def test_llama_3_and_what_there_is():
    C, N, D, loss = isoflop_points("llama_3")
    law = fit_power_law(*isoflop_optima(C, D, loss)[:2])
    assert len(C) == 133 and sum(len(isoflop_points(s)[0]) for s in ("comma", "dclm", "nemotron")) == 258
    assert law.exponent == pytest.approx(published("llama3-2024.exponent").value, abs=.01)
    for name in ("llama", "llama_2"):                                                        # Marin's tokenizer is llama_2
        with pytest.raises(ValueError, match="expected llama_3, comma"): isoflop_points(name)


@shared
def test_tables_are_those_of_the_shared_folder():
    for name, points in (("chinchilla_points", len(chinchilla_points(0)[0])), ("isoflop_points", 391)):
        ours = Path(__file__).parents[1]/"lmcourse/data"/f"{name}.csv"
        theirs = list(csv.reader((Path(SHARED)/f"{name}.csv").read_text().splitlines()))
        assert list(csv.reader(ours.read_text().splitlines())) == theirs and len(theirs) == points + 1


@shared
def test_the_assignments_table_follows_the_law_in_the_ledger():
    runs = json.loads((Path(SHARED)/"isoflops_curves.json").read_text())
    N, C, loss = (np.array([r[k] for r in runs], float) for k in ("parameters", "compute_budget", "final_loss"))
    v = values("handout-a3.law")
    law = LossLaw(v["e"], v["a"], v["b"], v["alpha"], v["beta"])
    assert len(runs) == 72 and abs(law.loss(N, C/(6*N)) - loss).max() < 1e-7
    assert astuple(fit_loss_law(N, C/(6*N), loss)) == pytest.approx(astuple(law), rel=1e-4)
    low = fit_power_law(*isoflop_optima(C, N, loss, "lowest")[:2])
    assert low.exponent == pytest.approx(.4687, abs=2e-4) and low(1e23) == pytest.approx(7.01e10, rel=2e-3)


# One's own runs

def lines(seed=0, **more):
    rng = np.random.default_rng(seed)
    return [dict(parameters=int(n), tokens=int(r*n), loss=float(PLANTED.loss(n, r*n))*math.exp(.003*rng.standard_normal()), schedule_tokens=int(r*n), tokenizer="bpe") | more
            for n in np.geomspace(1e6, 1e8, 5).round() for r in (5, 10, 20, 40, 80)]


def write(folder, runs, name="runs.jsonl"):
    (folder/name).write_text("".join(json.dumps(r) + "\n" for r in runs))
    return folder/name


def test_two_of_three_are_enough(tmp_path):
    by = [("parameters", "tokens"), ("parameters", "flops"), ("flops", "tokens")]
    runs = [r | dict(flops=6*r["parameters"]*r["tokens"]) for r in lines()]
    read = [read_scaling_runs(write(tmp_path, [{k: r[k] for k in (*two, "loss")} for r in runs])) for two in by]
    read.append(read_scaling_runs(write(tmp_path, [r | dict(flops=2*r["flops"]) for r in runs])))    # With attention, say
    for r in read: assert r.parameters == pytest.approx(read[0].parameters) and r.tokens == pytest.approx(read[0].tokens) and r.flops == pytest.approx(read[0].flops)


MISTAKES = {
    "stopped": (lambda rs: rs[2].update(schedule_tokens=10**9), "line 3: ended after 20,000,000 of the 1,000,000,000 tokens"), "tokenizers": (lambda rs: rs[4].update(tokenizer="gpt2"), "tokenizer bpe in line 1 and tokenizer gpt2 in line 5"),
    "few": (lambda rs: rs.__delitem__(slice(5, None)), "5 runs for a law with 5 constants"), "no loss": (lambda rs: rs[0].pop("loss"), "line 1: no loss"), "one number": (lambda rs: rs[0].pop("tokens"), "line 1: expected two of"),
    "negative": (lambda rs: rs[1].update(loss=-1), "line 2: loss = -1"), "nan": (lambda rs: rs[1].update(loss=math.nan), "line 2: loss = nan"), "text": (lambda rs: rs[1].update(tokens="many"), "line 2: tokens = 'many'"),
    "truth": (lambda rs: rs[1].update(parameters=True), "line 2: parameters = True"), "one size": (lambda rs: [r.update(parameters=10**6) for r in rs], "1 different parameters"), "none": (lambda rs: rs.clear(), "no runs"),
    "list": (lambda rs: rs.insert(0, [1]), "line 1: expected an object"),
    "no tokenizer": (lambda rs: rs[0].pop("tokenizer"), "no tokenizer in line 1 and tokenizer bpe in line 2"), "digits": (lambda rs: rs[1].update(tokens=10**400), "line 2: tokens = 1000"),
    "contradiction": (lambda rs: rs[0].update(flops=1e20), "line 1: flops = 1e+20 for 1e+06 parameters and 5e+06 tokens, expected about 3e+13")}


@pytest.mark.parametrize("name", MISTAKES)
def test_bad_input_is_one_line_and_status_2(tmp_path, name):
    runs = lines()
    change, words = MISTAKES[name]
    change(runs)
    write(tmp_path, runs)
    done = here("scale", "runs.jsonl", cwd=tmp_path)
    assert done.returncode == 2 and not done.stdout and done.stderr.count("\n") == 1 and words in done.stderr, done.stderr
    assert not (tmp_path/"scale.png").exists()


@pytest.mark.parametrize("words, said", [
    (["none.jsonl"], "none.jsonl"), (["runs.jsonl", "--flops", "0"], "flops = 0.0, expected more than 0"), (["runs.jsonl", "--flops", "inf"], "flops = inf"), (["runs.jsonl", "--out", "no/such.png"], "no such folder"),
    (["runs.jsonl", "--draws", "3"], "draws = 3, expected at least 20"), (["broken.jsonl"], "line 1: not JSON"), ([], "RUNS")])
def test_bad_options(tmp_path, words, said):
    write(tmp_path, lines())
    (tmp_path/"broken.jsonl").write_text("{")
    done = here("scale", *words, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and said in done.stderr, done.stderr


def test_characters_of_a_file_of_runs(tmp_path):
    runs = [r | dict(tokenizer="a\u2028b") for r in lines()]
    text = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in runs)
    for encoding in ("utf-8", "utf-8-sig"):                                                  # A file from Windows may begin with a mark
        (tmp_path/"runs.jsonl").write_text(text, encoding=encoding)
        assert len(read_scaling_runs(tmp_path/"runs.jsonl").loss) == 25
    (tmp_path/"runs.jsonl").write_text(text, encoding="utf-16")
    with pytest.raises(ValueError, match="runs.jsonl: not UTF-8"): read_scaling_runs(tmp_path/"runs.jsonl")


def test_the_command(tmp_path):
    write(tmp_path, lines())
    done = here("scale", "runs.jsonl", "--flops", "1e18", cwd=tmp_path)
    assert done.returncode == 0 and (tmp_path/"scale.png").read_bytes()[:4] == b"\x89PNG", done.stderr
    for words in ("25 runs", "exponent of the best size", "tokens per parameter", "in scale.png"): assert words in done.stdout
    assert "warning" not in done.stdout
    done = here("scale", "runs.jsonl", "--flops", "1e24", "--out", "far.png", cwd=tmp_path)
    assert done.returncode == 0 and "warning: 1e+24 FLOPs are 208,333 times the largest run" in done.stdout
    assert "warning" not in here("scale", "runs.jsonl", cwd=tmp_path).stdout                   # Ten times the largest run


def test_report_and_plot(tmp_path):
    scaling = fit_scaling(read_scaling_runs(write(tmp_path, lines())), draws=100)
    for what in (lambda l: l.E, lambda l: l.alpha, lambda l: l.exponent): assert scaling.interval(what)[0] < what(PLANTED) < scaling.interval(what)[1]
    law, answer = scaling_tables(scaling, 1e20)
    assert [r["what"] for r in law.rows] == ["E", "A", "B", "alpha", "beta", "exponent of the best size"] and len(answer) == 4
    largest = scaling.runs.flops.max()
    assert not scaling.warnings(FAR*largest) and "times the largest run" in scaling.warnings(FAR*largest*1.1)[0]
    assert scaling_plot(scaling, 1e24)[0].get_title(loc="left").startswith("warning: 1e+24 FLOPs are") and not scaling_plot(scaling, 1e18)[0].get_title(loc="left")
    assert "half of them lie within" in next(iter(scaling_lines(scaling, 1e20)))


def test_what_the_runs_cannot_tell_is_said():
    runs = read_scaling_like(LossLaw(1e-9, 20, 20, .1, .1), .01)
    assert any("floor E" in w for w in fit_scaling(runs, 100).warnings(1e16))
    narrow = read_scaling_like(PLANTED, .05, reach=3)
    assert any("vary parameters" in w for w in fit_scaling(narrow, 100).warnings(1e16))
    few = read_scaling_like(LossLaw(1.8, 400, 8, .34, .3), .01)
    assert any("resampled runs determine no law" in w for w in fit_scaling(few, 100).warnings(1e16))
    rng, N = np.random.default_rng(3), np.geomspace(1e7, 1e10, 30)
    D = 20*N*np.exp(.1*rng.standard_normal(30))                     # Nearly 20 tokens per parameter
    near = fit_scaling(ScalingRuns(N, D, PLANTED.loss(N, D)*np.exp(.001*rng.standard_normal(30))), 100)
    assert any("tokens almost follow parameters" in w for w in near.warnings(1e20))


def read_scaling_like(law, noise, reach=100):
    N, D = (v.ravel() for v in np.meshgrid(np.geomspace(1e6, 1e6*reach, 5), np.geomspace(1e7, 1e7*reach, 5)))
    return ScalingRuns(N, D, law.loss(N, D)*np.exp(noise*np.random.default_rng(0).standard_normal(len(N))))
