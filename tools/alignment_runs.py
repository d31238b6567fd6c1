"""The runs of notebooks 14h and 14j: supervised fine-tuning on sloppy briefs, DPO on pairs of its own responses, policy gradients, and what they are compared with.

    python tools/alignment_runs.py nbs/results/alignment.jsonl [seeds]
    python tools/alignment_runs.py nbs/results/stories_rl.jsonl stories [seeds]   # Whole stories, of 14q

A line for each run. If it is stopped, call it again: it makes what is missing. A policy that a missing run begins with is trained again."""
import json
import sys
import tempfile
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import get_args

import torch

from lmcourse.alignment.briefs import OPENINGS, Demonstrators, brief_prompts, parse_reward, template_shares
from lmcourse.alignment.preference import DpoConfig, PreferenceBatches, preference_objective
from lmcourse.alignment.rl import RlConfig, measure_policy, slot_confidence, start_rl
from lmcourse.alignment.rollouts import Sampler
from lmcourse.alignment.runs import own_pairs
from lmcourse.alignment.sft import SftBatches, padded_rows
from lmcourse.alignment.stories import (Credit, StoryRlConfig, credit_loss, credit_weights, first_mistake, measure_writer, start_story_rl, story_sampler,
                                         write_stories, wrong_choices)
from lmcourse.evaluation.calibration import expected_calibration_error, reliability
from lmcourse.tools.config import TrainConfig
from lmcourse.tools.stories import Stories
from lmcourse.training.data import TokenDataset, write_tokens
from lmcourse.training.engines import Objective, counted_targets, fill
from lmcourse.training.evaluation import evaluate
from lmcourse.training.models import load_model
from lmcourse.training.trainer import Trainer

SLIP, SFT_STEPS, STEPS, EVERY, TESTED = .2, 50, 40, 10, 96
PRETRAINED = Path(__file__).resolve().parent.parent/"nbs/results/pretrained"  # The course's model before it was distilled

METHODS = {name: RlConfig(**dict(prompts=8, group_size=4) | kwargs) for name, kwargs in {
    "rloo": {}, "rloo-kl": dict(kl=.1), "expert": dict(algorithm="expert"), "grpo": dict(algorithm="grpo"), "mentions": dict(reward="mentions"), "rloo-kl-long": dict(kl=.1, group_size=8),
    "rloo-kl-settled": dict(kl=.2, group_size=8)}.items()}
LONG = {"rloo-kl-long": {}, "rloo-kl-settled": dict(cooldown_steps=40, min_lr=3e-5)} # 75 steps, and how their rate ends
DPO = {"dpo": DpoConfig(), "dpo-bare": DpoConfig(sft_weight=0.)}
DPO_STEPS, DPO_TRAIN = 60, dict(lr=3e-4, batch_size=16)
BUDGET = 22. # CPU seconds of more supervised fine-tuning, about those of a run of RL
TESTS = brief_prompts(TESTED, 999)
SFT = dict(lr=2e-3, batch_size=32)
RL = dict(lr=6e-4)


def config(seed, steps, lr, batch_size=1, **more):
    return TrainConfig(**dict(steps=steps, lr=lr, min_lr=lr, schedule="constant", warmup_steps=5, batch_size=batch_size, weight_decay=0., seed=seed, windows="documents") | more)


def curve(trainer, steps, tokenizer, reference, row, measure=True):
    "Train, and note what the policy does every few steps; CPU seconds are those of training, rollouts included."
    spent, row["curve"] = row.get("pairs_s", 0.), []
    for step in range(steps + 1):
        done = step == steps or (row.get("cpu_s") and spent > row["cpu_s"])
        if measure and (step % EVERY == 0 or done):
            found = measure_policy(trainer.model, tokenizer, TESTS, 7, reference)
            if hasattr(trainer.batches, "measure"): found |= trainer.batches.measure(trainer.model)
            row["curve"].append(dict(step=step, cpu_s=round(spent, 2)) | {k: round(v, 4) if isinstance(v, float) else v for k, v in found.items()})
        if done: return spent
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
    return dict(n=len(mentions), confidence=round(mean(sure), 4), right=round(mean(right), 4), nats=round(mean(m["nats"] for m in mentions), 4), error=round(expected_calibration_error(sure, right), 4), bins=bins)


def calibration(model):
    "Of each slot: mentions in right responses, mean confidence, share that is right, -log p of the right word, binned error, and its bins."
    found = slot_confidence(model, tokenizer, list(islice(Demonstrators(0., 777), TESTED)))
    return {slot: summary(mentions) for slot, mentions in found.items()}


def given_success(model, n=1024):
    "Openings of a policy's right responses, and how many those are: where a policy goes that pays for divergence."
    some = Sampler(model, tokenizer, running=TESTED)(brief_prompts(n, 4242), 1, 99)
    right = [r.response for r in some if r.finished and parse_reward(r.prompt, r.response)]
    return dict(n=len(right), openings=template_shares(right, OPENINGS))


def many(model, n=480):
    "Success and openings of one response to each of many prompts."
    found = measure_policy(model, tokenizer, brief_prompts(n, 31), 8)
    return dict(n=n, success=found["success"], openings=found["openings"])


def run(method, seed, folder, start, row, measure=True):
    "The policy that a method makes of `start`; its numbers go into `row`."
    if method == "sft": trainer, steps = sft(seed, folder, start, SFT_STEPS), SFT_STEPS
    elif method == "more-sft": trainer, steps = sft(seed, folder, start, 200, SFT_STEPS), 200
    elif method in DPO: trainer, steps = dpo(seed, folder, start, DPO[method], row), DPO_STEPS
    else:
        steps = 75 if method in LONG else STEPS
        trainer = start_rl(start, tokenizer, replace(METHODS[method], seed=seed), config(seed, steps, **RL, **LONG.get(method, {})), TokenDataset.open(folder/"valid"))
    row["spent_s"] = round(curve(trainer, steps, tokenizer, start, row, measure), 2)
    if hasattr(trainer.batches, "make"):
        if method != "rloo-kl-settled": row["log"] = [{k: round(v, 4) for k, v in line.items()} for line in trainer.batches.make.log]
        trainer.batches.close()
    policy = trainer.model.eval()
    if measure: row["slots"] = calibration(policy)
    if measure and method == "sft": row["given_success"] = given_success(policy)
    if measure and method == "rloo-kl-settled": row["at_the_end"] = many(policy)
    return policy


# What a step holds, steps, highest rate, steps of the cool-down
STORY_RUNS = {"pretrained": (None, 0, 0., 0), "gradients": (None, 0, 0., 0), "step": (None, 0, 0., 0), "token": (StoryRlConfig("token", 64, 16, .3), 13, 1.5e-4, 0),
              "choices": (StoryRlConfig("choices", 32, 16, .1), 13, 3e-4, 0), "bare": (StoryRlConfig("choices", 32, 0), 13, 3e-4, 0),
              "pretraining": (StoryRlConfig("choices", 0, 64), 40, 1.5e-4, 20)}
LOOK = 5                 # Steps between two looks at the loss


def story_train(seed, steps, lr, cooldown):
    return TrainConfig(steps=steps, lr=lr, min_lr=lr/30, schedule="constant", warmup_steps=3, cooldown_steps=cooldown, micro_batch=8, weight_decay=0., seed=seed)


def judge(model, valid, n=200):
    "Loss above the floor, and stories at two temperatures."
    loss = evaluate(model, valid, model.config.context_length)
    return dict(excess=loss.excess, error=loss.error, loss=loss.loss, floor=loss.floor, tokens=loss.tokens,
                written=[measure_writer(model, tokenizer, n, t, 77) for t in (1., .8)])


def story_run(name, seed, valid, row, keep=None):
    config_of, steps, lr, cooldown = STORY_RUNS[name]
    if not steps: return row | (judge(pretrained, valid, 300) if name == "pretrained" else agreement() if name == "gradients" else one_step(valid))
    trainer = start_story_rl(pretrained, tokenizer, replace(config_of, seed=seed), story_train(seed, steps, lr, cooldown), valid)
    spent, row["curve"] = 0., []
    for step in range(1, steps + 1):
        start = time.process_time()
        trainer.train_step()
        spent += time.process_time() - start
        if step % LOOK == 0:
            look = evaluate(trainer.model, valid, trainer.model.config.context_length)
            row["curve"].append(dict(step=step, cpu_s=round(spent, 1), excess=round(look.excess, 5), error=round(look.error, 5)))
            if keep: torch.save(trainer.model.state_dict(), keep)
        print(name, seed, step, trainer.batches.make.log[-1:], row["curve"][-1:], flush=True)
    row |= dict(spent_s=round(spent, 1), log=trainer.batches.make.log)
    trainer.batches.close()
    return row | judge(trainer.model.eval(), valid)


def gradient(stories, mistakes, wrong, credit):
    "Of the pretrained model, from some of its stories, one long row; and the loss."
    weights = credit_weights(stories, mistakes, credit)
    pretrained.zero_grad()
    total = 0.
    for k in range(0, len(stories), 16):
        rows = padded_rows([(list(r.ids), 1) for r in stories[k:k + 16]], tokenizer.end_of_text)
        choices = torch.full((*rows["labels"].shape, 8), -1)
        if credit == "choices":
            for row, found in zip(choices, wrong[k:k + 16]): row[:len(found)] = found
        loss = credit_loss(pretrained, rows["input_ids"], rows["labels"], weights[k:k + 16, :rows["labels"].shape[1]], choices)
        (loss*len(choices)/len(stories)).backward()
        total += loss.item()*len(choices)/len(stories)
    return torch.cat([p.grad.flatten() for p in pretrained.parameters()]), total


def agreement(n=256):
    "For each kind of credit, the cosines between the gradients of four batches of stories."
    stories = write_stories(story_sampler(pretrained, tokenizer, 128), n, 1., 5_000)
    mistakes = [first_mistake(r, tokenizer) for r in stories]
    wrong = [wrong_choices(pretrained, tokenizer, r, m) for r, m in zip(stories, mistakes)]
    found = dict(right=sum(r.finished and m is None for r, m in zip(stories, mistakes)), stories=n//4, wrong=sum(int((w >= 0).sum()) for w in wrong))
    for credit in get_args(Credit):
        parts, losses = zip(*[gradient(stories[k::4], mistakes[k::4], wrong[k::4], credit) for k in range(4)])
        if credit == "choices": found["hazard"] = round(mean(losses), 4)
        found[credit] = [round(torch.cosine_similarity(a, b, 0).item(), 4) for i, a in enumerate(parts) for b in parts[:i]]
    return found


def one_step(valid, n=96, held=32, sizes=(0., .03, .1, .2, .4)):
    "One step of steepest descent on the wrong choices of some stories: what it does to those of other stories, and to the loss."
    stories = write_stories(story_sampler(pretrained, tokenizer, n), n, 1., 5_000)
    mistakes = [first_mistake(r, tokenizer) for r in stories]
    wrong = [wrong_choices(pretrained, tokenizer, r, m) for r, m in zip(stories, mistakes)]
    start, rows = {k: v.clone() for k, v in pretrained.state_dict().items()}, []
    downhill, _ = gradient(stories[held:], mistakes[held:], wrong[held:], "choices")
    for size in sizes:
        with torch.no_grad():
            for p, g in zip(pretrained.parameters(), downhill.split([p.numel() for p in pretrained.parameters()])): p -= size*g.view_as(p)
        other = gradient(stories[:held], mistakes[:held], wrong[:held], "choices")[1]
        look = evaluate(pretrained, valid, pretrained.config.context_length)
        rows.append(dict(size=size, other=round(other, 4), excess=round(look.excess, 5)))
        print(rows[-1], flush=True)
        pretrained.load_state_dict(start)
    return dict(stories=n - held, held=held, rows=rows)


def story_runs(out, seeds, done, keep=None):
    "Whole stories: a line for the pretrained model, and one for each kind of credit and seed."
    write_tokens(folder/"stories", islice(Stories(555), 100), tokenizer, "stories", nats=lambda text: -grammar.log_prob(text))
    valid = TokenDataset.open(folder/"stories")
    for seed in seeds:
        for name, (config_of, steps, lr, cooldown) in STORY_RUNS.items():
            if (name, seed) in done or (seed and not steps): continue
            row = dict(method=name, seed=seed)
            if steps: row |= dict(steps=steps, lr=lr, cooldown=cooldown, stories=config_of.stories, anchors=config_of.anchors, anchor=config_of.anchor)
            row = story_run(name, seed, valid, row, keep)
            with out.open("a") as f: f.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    out, whole = Path(sys.argv[1]), "stories" in sys.argv[2:]
    seeds = [int(s) for s in sys.argv[2:] if s != "stories"] or [0, 1, 2]
    torch.set_num_threads(1)
    done = {(r["method"], r["seed"]) for r in map(json.loads, out.read_text().splitlines())} if out.exists() else set()
    pretrained, tokenizer = load_model(PRETRAINED)
    folder = Path(tempfile.mkdtemp())
    grammar = Stories()
    if whole:
        story_runs(out, seeds, done)
        sys.exit()
    write_tokens(folder/"valid", ["".join(pair) for pair in islice(Demonstrators(0., 555), 32)], tokenizer, "briefs")

    for seed in seeds:
        policies = dict(pretrained=pretrained)
        for method in ("sft", "dpo", *["dpo-bare"]*(seed == 0), "rloo", "rloo-kl", "rloo-kl-long", "rloo-kl-settled", "more-sft", "expert", "grpo", *["mentions"]*(seed == 0)):
            wanted, start = (method, seed) not in done, dict(sft="pretrained", mentions="rloo").get(method, "sft")
            if not wanted: continue
            for before in ("sft", "rloo")[:1 + (start == "rloo")]:          # What this run begins with, where it isn't in memory
                if before not in policies and before != method: policies[before] = run(before, seed, folder, policies["sft" if before == "rloo" else "pretrained"], {}, False)
            row = dict(method=method, seed=seed, start=start) | dict(sft=dict(SFT, steps=SFT_STEPS, slip=SLIP)).get(method, {})
            if method == "more-sft": row["cpu_s"] = BUDGET
            policies[method] = run(method, seed, folder, policies[start], row)
            with out.open("a") as f: f.write(json.dumps(row) + "\n")
            print(method, seed, row["spent_s"], [c["success"] for c in row["curve"]], flush=True)
