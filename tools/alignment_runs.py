"""The runs of notebook 14j: supervised fine-tuning on sloppy briefs, then policy gradients and what they are compared with.

    python tools/alignment_runs.py nbs/results/alignment.jsonl [seeds]

A line for each run. If it is stopped, call it again: it makes what is missing."""
import json
import sys
import tempfile
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch

from lmcourse.alignment.briefs import Demonstrators, brief_prompts
from lmcourse.alignment.rl import RlConfig, measure_policy, start_rl
from lmcourse.alignment.sft import SftBatches
from lmcourse.architecture.onednn import onednn_products
from lmcourse.tools.config import TrainConfig
from lmcourse.training.data import TokenDataset, write_tokens
from lmcourse.training.engines import Objective, counted_targets, fill
from lmcourse.training.models import load_model
from lmcourse.training.trainer import Trainer

SLIP, SFT_STEPS, STEPS, EVERY, TESTED = .2, 50, 40, 10, 96
METHODS = {name: RlConfig(prompts=8, group_size=4, **kwargs) for name, kwargs in {
    "rloo": {}, "rloo-kl": dict(kl=.1), "expert": dict(algorithm="expert"), "grpo": dict(algorithm="grpo"), "mentions": dict(reward="mentions")}.items()}
BUDGET = 22. # CPU seconds of more supervised fine-tuning, about those of a run of RL
TESTS = brief_prompts(TESTED, 999)
SFT = dict(lr=2e-3, batch_size=32)
RL = dict(lr=6e-4)


def config(seed, steps, lr, batch_size=1):
    return TrainConfig(steps=steps, lr=lr, min_lr=lr, schedule="constant", warmup_steps=5, batch_size=batch_size, weight_decay=0., seed=seed, windows="documents")


def curve(trainer, steps, tokenizer, reference, row, measure=True):
    "Train, and note what the policy does every few steps; CPU seconds are those of training, rollouts included."
    spent, row["curve"] = 0., []
    with onednn_products():
        for step in range(steps + 1):
            if measure and (step % EVERY == 0 or step == steps):
                found = measure_policy(trainer.model, tokenizer, TESTS, 7, reference)
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


if __name__ == "__main__":
    out, seeds = Path(sys.argv[1]), [int(s) for s in sys.argv[2:]] or [0, 1, 2]
    torch.set_num_threads(1)
    done = {(r["method"], r["seed"]) for r in map(json.loads, out.read_text().splitlines())} if out.exists() else set()
    shipped, tokenizer = load_model()
    folder = Path(tempfile.mkdtemp())
    write_tokens(folder/"valid", ["".join(pair) for pair in islice(Demonstrators(0., 555), 32)], tokenizer, "briefs")
    valid = TokenDataset.open(folder/"valid")

    def run(method, seed, start, row, measure=True):
        if method == "sft": trainer, steps = sft(seed, folder, shipped, SFT_STEPS), SFT_STEPS
        elif method == "more-sft": trainer, steps = sft(seed, folder, start, 200, SFT_STEPS), 200
        else: trainer, steps = start_rl(start, tokenizer, replace(METHODS[method], seed=seed), config(seed, STEPS, **RL), valid), STEPS
        row["spent_s"] = round(curve(trainer, steps, tokenizer, start, row, measure), 2)
        if hasattr(trainer.batches, "make"):
            row["log"] = [{k: round(v, 4) for k, v in line.items()} for line in trainer.batches.make.log]
            trainer.batches.close()
        return trainer.model.eval()

    for seed in seeds:
        policies = dict(shipped=shipped)
        for method in ("sft", "rloo", "rloo-kl", "more-sft", "expert", "grpo", *["mentions"]*(seed == 0)):
            wanted, start = (method, seed) not in done, dict(sft="shipped", mentions="rloo").get(method, "sft")
            if not wanted: continue
            for before in ("sft", "rloo")[:1 + (start == "rloo")]:          # What this run begins with, where it isn't in memory
                if before not in policies and before != method: policies[before] = run(before, seed, policies["sft" if before == "rloo" else "shipped"], {}, False)
            row = dict(method=method, seed=seed, start=start) | dict(sft=dict(SFT, steps=SFT_STEPS, slip=SLIP)).get(method, {})
            if method == "more-sft": row["cpu_s"] = BUDGET
            policies[method] = run(method, seed, policies[start], row)
            with out.open("a") as f: f.write(json.dumps(row) + "\n")
            print(method, seed, row["spent_s"], [c["success"] for c in row["curve"]], flush=True)
