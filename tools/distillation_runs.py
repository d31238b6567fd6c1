"""The runs of notebook 14r: the pretrained model learns on, from words or from the teacher's probabilities.

    python tools/distillation_runs.py FOLDER    # nbs/results/distillation.json

FOLDER holds the data and the runs. If it is stopped, call it again: it makes what is missing."""
import json
import sys
from datetime import date
from itertools import islice
from pathlib import Path

import torch

from lmcourse.alignment.distillation import start_distillation
from lmcourse.alignment.stories import measure_writer
from lmcourse.tools.config import TrainConfig
from lmcourse.tools.files import write_json
from lmcourse.tools.machine import processor_name
from lmcourse.training.checkpoint import Checkpoints, load_checkpoint
from lmcourse.training.data import TokenDataset
from lmcourse.training.models import load_model
from lmcourse.tools.documents import documents
from lmcourse.training.data import write_tokens
from lmcourse.training.evaluation import evaluate

RESULTS = Path(__file__).resolve().parent.parent/"nbs/results"
PRETRAINED = RESULTS/"pretrained"
RUNS = [("hard", 4000, 1e-3, 0), ("hard", 4000, 3e-4, 0), ("soft", 4000, 1e-3, 0)]
WRITTEN = 200                    # Stories that each model writes at each temperature


def settings(steps, lr, seed):
    return TrainConfig.preset("quickstart", steps=steps, engine="torch", device="cpu", batch_size=4, lr=lr, min_lr=2e-5, schedule="constant", warmup_steps=100,
                              cooldown_steps=steps - 100, eval_every=1000, checkpoint_every=steps, keep_checkpoints=3, log_every=100, seed=seed)


def distill(folder, valid, kind, steps, lr, seed):
    "Train, if it isn't done; the trained model and the log's evaluations."
    model, tokenizer = load_model(PRETRAINED)
    last = Checkpoints(folder/"checkpoints").latest()
    if not last or last.name != f"step_{steps:06}":
        config = settings(steps, lr, seed)
        trainer = start_distillation(model, tokenizer, config, valid, kind == "soft")
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder/"config.json", dict(model=model.config.to_dict(), train=config.to_dict()))
        trainer.resume(folder)
        trainer.fit(folder)
        trainer.batches.close()
        last = Checkpoints(folder/"checkpoints").latest()
    load_checkpoint(last, model)
    log = [json.loads(line) for line in (folder/"metrics.jsonl").read_text().splitlines()]
    return model.eval(), [line for line in log if "valid_loss" in line]


def judged(model, tokenizer, valid):
    loss = evaluate(model, valid, model.config.context_length)
    written = [measure_writer(model, tokenizer, WRITTEN, t) for t in (1., .8)]
    return dict(excess=round(loss.excess, 5), error=round(loss.error, 5),
                written=[{k: w[k] for k in ("temperature", "n", "right", "mistakes", "openings", "plots")} for w in written])


def main(folder):
    torch.set_num_threads(1)
    model, tokenizer = load_model(PRETRAINED)
    if not (folder/"valid").exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_tokens(folder/"valid", islice(documents("stories", "valid"), 400), tokenizer, "stories")
    valid = TokenDataset.open(folder/"valid")
    rows = []
    for kind, steps, lr, seed in RUNS:
        student, log = distill(folder/f"{kind}-{steps}-{lr}-{seed}", valid, kind, steps, lr, seed)
        curve = [dict(step=line["step"], excess=round(line["excess"], 5)) for line in log if not line.get("final")]
        rows.append(dict(labels=kind, steps=steps, lr=lr, seed=seed, curve=curve) | judged(student, tokenizer, valid))
        print(json.dumps(rows[-1])[:300], flush=True)
    write_json(RESULTS/"distillation.json", dict(machine=processor_name(), date=f"{date.today()}", start=judged(model, tokenizer, valid), runs=rows,
                                                shipped=judged(*load_model(), valid)))


if __name__ == "__main__": main(Path(sys.argv[1]))
