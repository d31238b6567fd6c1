"""The runs of notebooks 14h and 14j: supervised fine-tuning on sloppy briefs, DPO on pairs of its own responses, policy gradients, and what they are compared with.

    python tools/alignment_runs.py nbs/results/alignment.jsonl [seeds]

A line for each run. If it is stopped, call it again: it makes what is missing. A policy that a missing run begins with is trained again."""
import json
import sys
import tempfile
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import mean

import torch

from lmcourse.alignment.briefs import OPENINGS, Demonstrators, brief_prompts, parse_reward, template_shares
from lmcourse.alignment.preference import DpoConfig, PreferenceBatches, preference_objective
from lmcourse.alignment.rl import RlConfig, measure_policy, slot_confidence, start_rl
from lmcourse.alignment.rollouts import Sampler
from lmcourse.alignment.runs import own_pairs
from lmcourse.alignment.sft import SftBatches
from lmcourse.architecture.onednn import onednn_products
from lmcourse.evaluation.calibration import binned_error, reliability
from lmcourse.tools.config import TrainConfig
from lmcourse.training.data import TokenDataset, write_tokens
from lmcourse.training.engines import Objective, counted_targets, fill
from lmcourse.training.models import load_model
from lmcourse.training.trainer import Trainer

SLIP, SFT_STEPS, STEPS, EVERY, TESTED = .2, 50, 40, 10, 96
METHODS = {name: RlConfig(**dict(prompts=8, group_size=4) | kwargs) for name, kwargs in {
    "rloo": {}, "rloo-kl": dict(kl=.1), "expert": dict(algorithm="expert"), "grpo": dict(algorithm="grpo"), "mentions": dict(reward="mentions"), "rloo-kl-long": dict(kl=.1, group_size=8)}.items()}
LONG = 75                # Steps of `rloo-kl-long`
DPO = {"dpo": DpoConfig(), "dpo-bare": DpoConfig(sft_weight=0.)}
DPO_STEPS, DPO_TRAIN = 60, dict(lr=3e-4, batch_size=16)
BUDGET = 22. # CPU seconds of more supervised fine-tuning, about those of a run of RL
TESTS = brief_prompts(TESTED, 999)
SFT = dict(lr=2e-3, batch_size=32)
RL = dict(lr=6e-4)


def config(seed, steps, lr, batch_size=1):
    return TrainConfig(steps=steps, lr=lr, min_lr=lr, schedule="constant", warmup_steps=5, batch_size=batch_size, weight_decay=0., seed=seed, windows="documents")


def curve(trainer, steps, tokenizer, reference, row, measure=True):
    "Train, and note what the policy does every few steps; CPU seconds are those of training, rollouts included."
    spent, row["curve"] = row.get("pairs_s", 0.), []
    with onednn_products():
        for step in range(steps + 1):
            if measure and (step % EVERY == 0 or step == steps):
                found = measure_policy(trainer.model, tokenizer, TESTS, 7, reference)
                if hasattr(trainer.batches, "measure"): found |= trainer.batches.measure(trainer.model)
                row["curve"].append(dict(step=step, cpu_s=round(spent, 2)) | {k: round(v, 4) if isinstance(v, float) else v for k, v in found.items()})
            if step == steps or (row.get("cpu_s") and spent > row["cpu_s"]): return spent
            start = time.process_time()
            trainer.train_step()
            spent += time.process_time() - start


def sft(seed, folder, model, steps, skip=0):
    pairs = list(islice(Demonstrators(SLIP, seed + 1), skip*SFT["batch_size"], (skip + steps)*SFT["batch_size"]))
    trainer = Trainer(model.config, config(seed, steps, **SFT), None, TokenDataset.open(folder/"valid"), SftBatches(pairs, tokenizer, SFT["batch_size"]),
                      Objective(weight=counted_targets))
    fill(trainer.model, dict(model.named_parameters()))
    return trainer


def dpo(seed, folder, model, config_of, row):
    start = time.process_time()
    pairs = own_pairs(model, tokenizer, config_of.prompts, config_of.group_size, seed)
    batches = PreferenceBatches(pairs, tokenizer, DPO_TRAIN["batch_size"], model)
    row |= dict(pairs=len(pairs), pairs_s=round(time.process_time() - start, 2), sft_weight=config_of.sft_weight, beta=config_of.beta)
    trainer = Trainer(model.config, config(seed, DPO_STEPS, **DPO_TRAIN), None, TokenDataset.open(folder/"valid"), batches, preference_objective(config_of.beta, config_of.sft_weight))
    fill(trainer.model, dict(model.named_parameters()))
    return trainer


def summary(mentions):
    "Of a slot's mentions, as of `slot_confidence`."
    sure, right = [m["confidence"] for m in mentions], [m["right"] for m in mentions]
    bins = [[r["n"], round(r["confidence"], 4), round(r["right"], 4)] for r in reliability(sure, right)]
    return dict(n=len(mentions), confidence=round(mean(sure), 4), right=round(mean(right), 4), nats=round(mean(m["nats"] for m in mentions), 4), error=round(binned_error(sure, right), 4), bins=bins)


def calibration(model):
    "Of each slot: mentions in right responses, mean confidence, share that is right, -log p of the right word, binned error, and its bins."
    found = slot_confidence(model, tokenizer, list(islice(Demonstrators(0., 777), TESTED)))
    return {slot: summary(mentions) for slot, mentions in found.items()}


def given_success(model, n=1024):
    "Openings of a policy's right responses, and how many those are: where a policy goes that pays for divergence."
    some = Sampler(model, tokenizer, running=TESTED)(brief_prompts(n, 4242), 1, 99)
    right = [r.response for r in some if r.finished and parse_reward(r.prompt, r.response)]
    return dict(n=len(right), openings=template_shares(right, OPENINGS))


def run(method, seed, folder, start, row, measure=True):
    "The policy that a method makes of `start`; its numbers go into `row`."
    if method == "sft": trainer, steps = sft(seed, folder, start, SFT_STEPS), SFT_STEPS
    elif method == "more-sft": trainer, steps = sft(seed, folder, start, 200, SFT_STEPS), 200
    elif method in DPO: trainer, steps = dpo(seed, folder, start, DPO[method], row), DPO_STEPS
    else:
        steps = LONG if method == "rloo-kl-long" else STEPS
        trainer = start_rl(start, tokenizer, replace(METHODS[method], seed=seed), config(seed, steps, **RL), TokenDataset.open(folder/"valid"))
    row["spent_s"] = round(curve(trainer, steps, tokenizer, start, row, measure), 2)
    if hasattr(trainer.batches, "make"):
        row["log"] = [{k: round(v, 4) for k, v in line.items()} for line in trainer.batches.make.log]
        trainer.batches.close()
    policy = trainer.model.eval()
    if measure: row["slots"] = calibration(policy)
    if measure and method == "sft": row["given_success"] = given_success(policy)
    return policy


if __name__ == "__main__":
    out, seeds = Path(sys.argv[1]), [int(s) for s in sys.argv[2:]] or [0, 1, 2]
    torch.set_num_threads(1)
    done = {(r["method"], r["seed"]) for r in map(json.loads, out.read_text().splitlines())} if out.exists() else set()
    shipped, tokenizer = load_model()
    folder = Path(tempfile.mkdtemp())
    write_tokens(folder/"valid", ["".join(pair) for pair in islice(Demonstrators(0., 555), 32)], tokenizer, "briefs")

    for seed in seeds:
        policies = dict(shipped=shipped)
        for method in ("sft", "dpo", *["dpo-bare"]*(seed == 0), "rloo", "rloo-kl", "rloo-kl-long", "more-sft", "expert", "grpo", *["mentions"]*(seed == 0)):
            wanted, start = (method, seed) not in done, dict(sft="shipped", mentions="rloo").get(method, "sft")
            if not wanted: continue
            for before in ("sft", "rloo")[:1 + (start == "rloo")]:          # What this run begins with, where it isn't in memory
                if before not in policies and before != method: policies[before] = run(before, seed, folder, policies["sft" if before == "rloo" else "shipped"], {}, False)
            row = dict(method=method, seed=seed, start=start) | dict(sft=dict(SFT, steps=SFT_STEPS, slip=SLIP)).get(method, {})
            if method == "more-sft": row["cpu_s"] = BUDGET
            policies[method] = run(method, seed, folder, policies[start], row)
            with out.open("a") as f: f.write(json.dumps(row) + "\n")
            print(method, seed, row["spent_s"], [c["success"] for c in row["curve"]], flush=True)
