"""The saved runs of page 08j: `nbs/results/story_experts.jsonl`, dense models and experts that read the stories.

A run that is already in the file is not repeated, so a study that was stopped goes on where it was.
Usage: nice tools/expert_runs.py WORK [VARIANT ...]
"""
import argparse, time
from dataclasses import replace
from pathlib import Path

import numpy as np
from results import done, write

from lmcourse.ablations.sweep import prepare_corpus
from lmcourse.architecture.transformer_torch import TransformerLM
from lmcourse.moe.balance import expert_loads
from lmcourse.moe.roles import STUDY, role_information, role_sample
from lmcourse.tokenization.tokenizer import Tokenizer
from lmcourse.training.data import TokenDataset
from lmcourse.training.evaluation import evaluate
from lmcourse.training.trainer import Trainer

NAME = "story_experts.jsonl"
EVERY, FEW = 100, 16                     # Steps between two looks, and documents of a look


def what_experts_know(model, sample):
    "How visits are spread over the experts, and what the first choice tells about roles"
    if not model.config.num_experts: return {}
    loads = expert_loads(model, sample[0])
    rows = role_information(model, sample, np.random.default_rng(0))
    return dict(busiest=round(loads.max().item()*model.config.num_experts, 3),
                idlest=round(loads.min().item()*model.config.num_experts, 3), layers=rows)


def run(variant, seed, work):
    "Train, evaluate, write"
    if done(NAME, dict(variant=variant, seed=seed)): return
    job = STUDY.runs()[variant, seed]
    folder = prepare_corpus(job.data, work)
    train, valid = (TokenDataset.open(folder/name, verify=False) for name in ("train", "valid"))
    start = time.process_time()
    trainer = Trainer(job.model, replace(job.train, device="cpu"), train, valid)
    curve = []
    while trainer.step < job.train.steps:
        trainer.train_step()
        if trainer.step % EVERY == 0:
            e = evaluate(trainer.engine.whole_model(), valid, job.model.context_length, FEW)
            curve.append([trainer.step, round(e.excess, 4)])
    seconds, model = time.process_time() - start, trainer.engine.whole_model()
    e = evaluate(model, valid, job.model.context_length)
    sample = role_sample(Tokenizer.from_folder(folder/"tokenizer"), job.model.context_length)
    row = dict(kind="run", variant=variant, seed=seed, steps=job.train.steps, loss=round(e.loss, 5),
               excess=round(e.excess, 5), error=round(e.error, 5), seconds=round(seconds, 1), curve=curve)
    fresh = what_experts_know(TransformerLM(job.model, seed=seed).eval(), sample)
    row |= what_experts_know(model.eval(), sample) | (dict(untrained=fresh["layers"]) if fresh else {})
    write(NAME, row, "tools/expert_runs.py WORK")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", type=Path, help="a folder for the tokens")
    parser.add_argument("variants", nargs="*", default=["dense", "16 experts"])
    args = parser.parse_args()
    for seed in STUDY.seeds:
        for variant in args.variants: run(variant, seed, args.work)
