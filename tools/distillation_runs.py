"""The runs of notebook 14r: the pretrained model learns on, from words or from the teacher's probabilities.

    python tools/distillation_runs.py FOLDER    # nbs/results/distillation.json

FOLDER gets the data and the runs. If it is stopped, call it again: it makes what is missing. The last run is the model
that comes with the course: `python tools/shipped_model.py pack FOLDER`."""
import json
import subprocess
import sys
from datetime import date
from pathlib import Path

import torch

from lmcourse.alignment.distillation import start_distillation
from lmcourse.alignment.stories import measure_stories, story_sampler, write_stories
from lmcourse.app.commands import half_prepared
from lmcourse.app.training_commands import open_data
from lmcourse.generation.generate import check_story, story_slips
from lmcourse.tools.config import TrainConfig
from lmcourse.tools.files import write_json
from lmcourse.tools.machine import processor_name
from lmcourse.training.checkpoint import Checkpoints, load_checkpoint
from lmcourse.training.evaluation import evaluate
from lmcourse.training.models import load_model

RESULTS = Path(__file__).resolve().parent.parent/"nbs/results"
PRETRAINED = RESULTS/"pretrained"
PRACTICE = r"From that(?= \w+ on,)|\. Every(?= \w+ \w+ and \w+ met\.)"      # Where a story returns to its hour
RUNS = {                       # labels, steps, learning rate, seed, run to begin with, practice
    "hard": ("hard", 4000, 1e-3, 0, None, ""),
    "hard-slow": ("hard", 4000, 3e-4, 0, None, ""),
    "soft": ("soft", 4000, 1e-3, 0, None, ""),
    "long": ("soft", 12000, 1e-3, 1, None, ""),
    "practice": ("soft", 4000, 2e-3, 2, "long", PRACTICE)}
WRITTEN = 200                  # Stories that each model writes at each temperature


def settings(steps, lr, seed):
    return TrainConfig.preset("quickstart", steps=steps, engine="torch", device="cpu", batch_size=4, lr=lr, min_lr=2e-5, schedule="constant", warmup_steps=100,
                              cooldown_steps=steps - 100, eval_every=1000, checkpoint_every=2000, keep_checkpoints=20, log_every=100, seed=seed)


def last(run): return Checkpoints(run/"checkpoints").latest()


def distill(folder, name, valid):
    "Train, or go on; the trained model."
    labels, steps, lr, seed, start, practice = RUNS[name]
    run, (model, tokenizer) = folder/name, load_model(PRETRAINED)
    if not last(run) or last(run).name != f"step_{steps:06}":
        if start: load_checkpoint(last(folder/start), model)
        config = settings(steps, lr, seed)
        trainer = start_distillation(model, tokenizer, config, valid, labels == "soft", practice)
        run.mkdir(parents=True, exist_ok=True)
        write_json(run/"config.json", dict(model=model.config.to_dict(), train=config.to_dict()))
        trainer.resume(run)
        trainer.fit(run)
        trainer.batches.close()
    load_checkpoint(last(run), model)
    return model.eval()


def judged(model, tokenizer, valid):
    "Loss; right stories at two temperatures; and which lists the wrong ones at 0.8 forget a word of."
    loss = evaluate(model, valid, model.config.context_length)
    stories = {t: write_stories(story_sampler(model, tokenizer, 128), WRITTEN, t) for t in (1., .8)}
    written = [dict(temperature=t) | measure_stories(model, tokenizer, some) for t, some in stories.items()]
    slips = [name for r in stories[.8] if check_story(r.response)["form"] for name in story_slips(r.response)]
    return dict(excess=round(loss.excess, 5), error=round(loss.error, 5), slips={n: slips.count(n) for n in sorted(set(slips), key=slips.count, reverse=True)},
                written=[{k: w[k] for k in ("temperature", "n", "right", "mistakes", "openings", "plots")} for w in written])


def main(folder):
    torch.set_num_threads(1)
    model, tokenizer = load_model(PRETRAINED)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder/"data"/"train.json").exists() or half_prepared(folder/"data"):
        subprocess.run([sys.executable, "-m", "lmcourse", "prepare", "stories", "data", "--tokenizer", PRETRAINED, "--max-mb", "1"], cwd=folder, check=True)
    valid, rows = open_data(folder/"data")[1], []
    for name, (labels, steps, lr, seed, start, practice) in RUNS.items():
        student = distill(folder, name, valid)
        log = [json.loads(line) for line in (folder/name/"metrics.jsonl").read_text().splitlines()]
        curve = [dict(step=line["step"], excess=round(line["excess"], 5)) for line in log if "valid_loss" in line and not line.get("final")]
        rows.append(dict(run=name, labels=labels, steps=steps, lr=lr, seed=seed, start=start, practice=practice, curve=curve) | judged(student, tokenizer, valid))
        print(json.dumps(rows[-1])[:300], flush=True)
    write_json(RESULTS/"distillation.json", dict(machine=processor_name(), date=f"{date.today()}", stories=valid.info["documents"], start=judged(model, tokenizer, valid), runs=rows,
                                                shipped=judged(*load_model(), valid)))


if __name__ == "__main__": main(Path(sys.argv[1]))
