"""The saved runs of chapter 10: `nbs/results/batch_size.jsonl` and `low_communication.jsonl`.

A run that stands in its file already is not repeated, so a run that was stopped goes on.
Usage: nice tools/parallel_runs.py batches noise replicas
"""
import argparse, time
from functools import cache

import numpy as np
import results
from results import done, saved

from lmcourse.parallelism.batch_size import (
    batch_gradients,
    gradient_noise,
    new_run,
    run_steps,
    small_model,
    steps_to_loss,
    story_tokenizer,
    story_tokens,
    wsd_rates,
)
from lmcourse.parallelism.low_communication import OuterOptimizer, local_steps, simulate_ranks
from lmcourse.training.evaluation import evaluate

MODEL, SEEDS = small_model(32), 3
TARGETS = (3., 2., 1.5)                                         # Nats per token
RATES = {2: (.006, .011), 4: (.011, .023), 8: (.016, .032), 16: (.023, .045), 32: (.032, .064)}
STEPS, BATCH = 1000, 16                                         # Of a run; windows of a step, on all ranks


@cache
def stories():
    "Training and validation tokens; no training story comes twice in a run"
    tokenizer = story_tokenizer()
    return story_tokens(30_000, tokenizer), story_tokens(400, tokenizer, seed=1, exact=True)


def write(name, row):
    "One more line; the first has the floor of the loss"
    floor = lambda: dict(floor=round(evaluate(new_run(MODEL).whole_model(), stories()[1], 128).floor, 5))
    results.write(name, row, f"tools/parallel_runs.py {' '.join(KINDS[name])}", floor)


def first(seed): return 8000*seed                               # Each seed begins with other stories


def descent(batch, lr, seed):
    "Steps to each target, at a constant rate"
    name, job = "batch_size.jsonl", dict(kind="batch", batch=batch, lr=lr, seed=seed)
    if row := done(name, job): return row
    stories()
    start, run, losses, most = time.process_time(), new_run(MODEL, seed), [], 6000//batch + 150
    while len(losses) < most and np.isnan(steps_to_loss(losses, TARGETS[-1])):
        for _ in range(max(1, len(losses)//20)):
            losses += run_steps(run, stories()[0], [lr*min(1, (len(losses) + 1)/10)], first(seed) + len(losses)*batch, batch)
    found = [steps_to_loss(losses, t) for t in TARGETS]
    row = job | dict(targets=TARGETS, steps=[None if np.isnan(s) else s for s in found], ran=len(losses),
                     seconds=round(time.process_time() - start, 1))
    write(name, row)
    return row


def batches():
    "Every batch size with two rates; then the one that is faster to the lowest loss with the other seeds"
    for batch, rates in RATES.items():
        rows = [descent(batch, lr, 0) for lr in rates]
        best = min(rows, key=lambda r: r["steps"][len(TARGETS) - 1] or np.inf)["lr"]
        for seed in range(1, SEEDS): descent(batch, best, seed)


def noise(batch=16, gradients=512, longest=400):
    "The noise scale at the start of a run, whenever it passes a target, and well below"
    name = "batch_size.jsonl"
    for seed in range(SEEDS):
        lr = next(r["lr"] for r in saved(name) if r["kind"] == "batch" and (r["batch"], r["seed"]) == (batch, 1))
        steps = (0, *map(int, descent(batch, lr, seed)["steps"]), longest)
        run, losses = new_run(MODEL, seed), []
        for step in steps:
            rates = [lr*min(1, (k + 1)/10) for k in range(len(losses), step)]
            losses += run_steps(run, stories()[0], rates, first(seed) + len(losses)*batch, batch)
            job = dict(kind="noise", seed=seed, step=step, gradients=gradients)
            if done(name, job): continue
            value, error = gradient_noise(batch_gradients(run, stories()[0], gradients, 29_000), 1)
            now = float(np.mean(losses[-max(3, step//10):])) if step else None
            write(name, job | dict(loss=now and round(now, 3), noise=round(value, 3), error=round(error, 3)))


def looked(run, start):
    "What is kept of a run: excess over the floor with its error, loss, and CPU seconds"
    e = evaluate(run.whole_model(), stories()[1], 128)
    return dict(loss=round(e.loss, 5), excess=round(e.excess, 5), error=round(e.error, 5),
                seconds=round(time.process_time() - start, 1))


def together(steps, batch, lr, seed, kind):
    "Data parallelism: one batch, one step"
    name, job = "low_communication.jsonl", dict(kind=kind, steps=steps, batch=batch, lr=lr, seed=seed)
    if done(name, job): return
    stories()
    start, run = time.process_time(), new_run(MODEL, seed)
    run_steps(run, stories()[0], wsd_rates(steps, lr), first(seed), batch)
    write(name, job | looked(run, start))


def apart(every, outer_lr, momentum, lr, seed, ranks=2):
    "Replicas that meet after every so many steps"
    name = "low_communication.jsonl"
    job = dict(kind="apart", ranks=ranks, every=every, outer_lr=outer_lr, momentum=momentum, steps=STEPS, lr=lr, seed=seed)
    if done(name, job): return
    stories()
    start, runs = time.process_time(), [new_run(MODEL, seed) for _ in range(ranks)]
    simulate_ranks([local_steps(run, stories()[0], wsd_rates(STEPS, lr), every, OuterOptimizer(outer_lr, momentum), r,
                                ranks, first(seed), BATCH//ranks) for r, run in enumerate(runs)])
    write(name, job | looked(runs[0], start))


def replicas():
    "Data parallelism, local SGD and DiLoCo; and what else the same few bytes could buy"
    for seed in range(SEEDS):                                   # Two rates are tried with the first seed
        for lr in (.032, .016)[:2 - (seed > 0)]: together(STEPS, BATCH, lr, seed, "together")
        for lr in (.032, .016)[seed > 0:]: apart(10, 1., 0., lr, seed)
    for seed in range(SEEDS): apart(50, 1., 0., .016, seed)
    apart(10, 1., 0., .016, 0, ranks=4)
    for lr, momentum in ((.016, .9), (.032, .5)): apart(10, .7, momentum, lr, 0)
    for seed in range(2): together(STEPS//10, 10*BATCH, .064, seed, "large batch")
    apart(STEPS, 1., 0., .016, 0)


KINDS = {"batch_size.jsonl": ["batches", "noise"], "low_communication.jsonl": ["replicas"]}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="+", choices=[p for parts in KINDS.values() for p in parts])
    for part in parser.parse_args().parts: globals()[part]()
