"""The saved runs of chapter 11: `nbs/results/mup.jsonl`, `schedules.jsonl`, `scaling.jsonl` and `zipf.jsonl`.

A run that stands in its file already is not repeated, so a run that was stopped goes on.
Usage: nice tools/scaling_runs.py mup schedules study predict held_out seeds zipf
"""
import argparse, copy, time
from functools import cache

import numpy as np
import results
from results import RESULTS, done, saved

from lmcourse.accounting.model_flops import training_flops
from lmcourse.parallelism.batch_size import new_run, run_steps, small_model, story_tokenizer, story_tokens, wsd_rates
from lmcourse.scaling.loss_law import fit_loss_law
from lmcourse.scaling.study import parameter_counts, predict_excess, predict_loss, read_study, size_law
from lmcourse.training.evaluation import evaluate
from lmcourse.training.optim_torch import cosine_lr

BATCH, BASE = 8, 32
GRID = {3e10: [(8, 1), (16, 1), (16, 2), (24, 2), (32, 2)],
        1e11: [(16, 1), (16, 2), (24, 2), (32, 2), (48, 2)],
        3e11: [(16, 2), (24, 2), (32, 2), (48, 2), (64, 3)],
        1e12: [(24, 2), (32, 2), (48, 2), (64, 3)]}
HELD_OUT = 3e12
ZIPF = {"zipf.jsonl": 1.}                                        # Exponent of the stories' lists; else 0
RATES = {1e11: (.016, .032, .064), 1e12: (.008, .016)}          # Tried at width 32


@cache
def stories(name):
    "Training and validation tokens of a results file; no training story comes twice in a run"
    zipf = ZIPF.get(name, 0.)
    tokenizer = story_tokenizer(zipf=zipf)
    return (story_tokens(80_000, tokenizer, zipf=zipf),
            story_tokens(400, tokenizer, seed=1, exact=True, zipf=zipf))


def write(name, row): results.write(name, row, f"tools/scaling_runs.py {' '.join(KINDS[name])}")


def looked(name, engine, start):
    "What is kept of a run: excess over the floor with its error, loss, and CPU seconds"
    e = evaluate(engine.whole_model(), stories(name)[1], 128)
    return dict(loss=round(e.loss, 5), excess=round(e.excess, 5), error=round(e.error, 5),
                seconds=round(time.process_time() - start, 1))


def train(name, model, rates, job, batch=BATCH, decay=0.):
    "Train, evaluate, write"
    if row := done(name, job): return row
    stories(name)
    start = time.process_time()
    engine = new_run(model, job["seed"], decay)
    run_steps(engine, stories(name)[0], rates, 20_000*job["seed"], batch)
    row = job | looked(name, engine, start)
    write(name, row)
    return row


def mup():
    "Loss against learning rate for four widths, both parametrisations; then with weight decay"
    rates = [.002*2**k for k in range(7)]
    tried = {(32, None): rates[1:], (64, None): rates[1:6], (64, BASE): rates[3:], (128, None): rates[1:5],
             (128, BASE): rates[3:], (256, None): [.001, *rates[:3]], (256, BASE): rates[3:6]} # At the base both are one
    for (width, base), some in tried.items():
        for lr in some:
            train("mup.jsonl", small_model(width, 2, base), wsd_rates(200, lr),
                  dict(kind="rate", width=width, base=base, lr=lr, seed=0, steps=200))
    for width, decay in ((32, .5), (128, .5), (128, 2.)):
        for lr in (.016, .032, .064):
            train("mup.jsonl", small_model(width, 2, BASE), wsd_rates(200, lr),
                  dict(kind="decay", width=width, base=BASE, lr=lr, decay=decay, seed=0, steps=200), decay=decay)


def schedules():
    "A constant trunk with a cooldown for each of three budgets, and runs of their own with a cosine"
    budgets, name, lr, model = (150, 300, 600), "schedules.jsonl", .032, small_model(32, 2)
    for seed in range(3):
        if all(done(name, dict(kind="branch", steps=n, seed=seed)) for n in budgets): continue
        trunk, at = new_run(model, seed), 0
        for n in budgets:
            rates, start = wsd_rates(n, lr), time.process_time()
            leave = n - round(.2*n)
            run_steps(trunk, stories(name)[0], rates[at:leave], 20_000*seed + BATCH*at)
            branch, at = copy.deepcopy(trunk), leave
            run_steps(branch, stories(name)[0], rates[leave:], 20_000*seed + BATCH*leave)
            job = dict(kind="branch", steps=n, seed=seed, lr=lr)
            if not done(name, job): write(name, job | looked(name, branch, start))
    better = {}                                  # Rate of each budget: three are tried with the first seed
    for seed in range(3):
        for n in budgets:
            for rate in (lr/2, lr, 2*lr) if seed == 0 else [better[n]]:
                cosine = [cosine_lr(k, rate, 0., 10, n) for k in range(1, n + 1)]
                train(name, model, cosine, dict(kind="cosine", steps=n, seed=seed, lr=rate))
            better = better | {n: min((r for r in saved(name) if r["kind"] == "cosine" and r["steps"] == n),
                                      key=lambda r: r["excess"])["lr"]} if seed == 0 else better
    train(name, model, wsd_rates(300, lr), dict(kind="alone", steps=300, seed=0, lr=lr))


def steps_for(model, budget): return max(20, round(budget/sum(training_flops(model, BATCH).values())))


def study_run(kind, budget, width, layers, lr, seed=0, name="scaling.jsonl"):
    "A run of the study: as many steps as the budget pays for"
    model = small_model(width, layers, BASE)
    steps = steps_for(model, budget)
    job = dict(kind="tune", budget=budget, width=width, layers=layers, lr=lr, seed=seed, steps=steps)
    if row := done(name, job): return row                                # It is a run of the grid, too
    return train(name, model, wsd_rates(steps, lr), job | dict(kind=kind))


def tuned_rate(budget, name="scaling.jsonl"):
    "On a straight line in the logarithms between the budgets at which it was tuned; flat beyond"
    best = {C: min((r for r in saved(name) if r["kind"] == "tune" and r["budget"] == C),
                   key=lambda r: r["excess"])["lr"] for C in RATES}
    return round(float(np.exp(np.interp(np.log(budget), np.log(list(best)), np.log(list(best.values()))))), 4)


def study(name="scaling.jsonl", seeds=None):
    "Tune at two budgets, then train all sizes, with so many seeds for a budget"
    for budget, rates in RATES.items():
        for lr in rates: study_run("tune", budget, 32, 2, lr, name=name)
    for budget, sizes in GRID.items():
        for seed in range((seeds or {}).get(budget, 1)):
            for width, layers in sizes: study_run("grid", budget, width, layers, tuned_rate(budget, name), seed, name)


def predict(name="scaling.jsonl"):
    "Say what a run of three times the largest budget will give, and write it down"
    if any(r["kind"] == "prediction" for r in saved(name)): return
    grid = read_study(RESULTS/name)[1]
    want = float(size_law(grid)(HELD_OUT))
    sizes = {(w, l): parameter_counts(w, l)["matmul"] for sizes in GRID.values() for w, l in sizes}
    width, layers = min(sizes, key=lambda s: abs(np.log(sizes[s]/want)))
    tokens = steps_for(small_model(width, layers, BASE), HELD_OUT)*BATCH*128
    entropy = looked_floor(name)
    found = predict_loss(grid, sizes[width, layers], tokens, np.random.default_rng(0))
    write(name, dict(kind="prediction", budget=HELD_OUT, width=width, layers=layers, best_size=round(want),
                     steps=tokens//BATCH//128, runs=len(grid), excess_law=round(predict_excess(
                         grid, HELD_OUT, entropy), 5), **{k: round(v, 5) for k, v in found.items()}))


def predict_late(name, lowest=1e11):
    "Two more: the law without the smallest budget, and a law of the excess over the known floor"
    if any(r["kind"] == "late prediction" for r in saved(name)): return
    grid, others = read_study(RESULTS/name)[1:]
    said, entropy = others["prediction"][0], looked_floor(name)
    N, D, L = (np.array([r[k] for r in grid], float) for k in ("matmul", "tokens", "loss"))
    later = [r for r in grid if r["budget"] >= lowest]
    found = predict_loss(later, said["matmul"], said["tokens"], np.random.default_rng(0))
    known = entropy + float(fit_loss_law(N, D, L - entropy).loss(said["matmul"], said["tokens"]))
    write(name, dict(kind="late prediction", **{k: said[k] for k in ("budget", "width", "layers", "steps")},
                     lowest=lowest, runs=len(later), **{k: round(v, 5) for k, v in found.items()},
                     known_floor_law=round(known, 5)))


def looked_floor(name):
    "The entropy of the validation stories, nats per token"
    run = saved(name)[1]
    return run["loss"] - run["excess"]


def held_out(name="scaling.jsonl"):
    "The run that was predicted"
    job, = [r for r in saved(name) if r["kind"] == "prediction"]
    study_run("held_out", HELD_OUT, job["width"], job["layers"], tuned_rate(HELD_OUT, name), name=name)


def seeds():
    "Two more runs of every point below the largest budget, after the prediction and its run"
    study(seeds={budget: 3 for budget in sorted(GRID)[:-1]})


def zipf():
    "The same study with stories whose words are as unequal as those of text"
    study("zipf.jsonl", {3e10: 2, 1e11: 2})
    predict("zipf.jsonl")
    predict_late("zipf.jsonl")
    held_out("zipf.jsonl")


KINDS = {"mup.jsonl": ["mup"], "schedules.jsonl": ["schedules"], "scaling.jsonl": ["study", "predict", "held_out", "seeds"],
         "zipf.jsonl": ["zipf"]}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="+", choices=[p for parts in KINDS.values() for p in parts])
    for part in parser.parse_args().parts: globals()[part]()
