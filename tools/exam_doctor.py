"""Examine the doctor of chapter 06: train runs with faults and without, ask him about each, note a line.

What is there already is not made again: runs are kept in WORK, lines in OUT. Each line has the number of
its examination, so that a doctor who was improved can be asked about the same runs once more.
Usage: tools/exam_doctor.py EXAM [--work runs/doctor_exam] [--out nbs/results/doctor_exam.jsonl]
       [--sets ABF] [--seeds 200 201 202] [--variant-seed 220]
"""
import argparse
import datetime
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).parent.parent/"tests"))
import faults

from lmcourse.ablations.doctor import envelopes, examine, make_envelope
from lmcourse.tools.config import ModelConfig, TrainConfig
from lmcourse.tools.machine import machine_name
from lmcourse.training.runs import read_metrics
from lmcourse.training.trainer import Trainer

MODEL = ModelConfig.preset("small")
TRAIN = TrainConfig.preset("small", steps=300, warmup_steps=30, eval_every=75, eval_documents=20,
                           checkpoint_every=150)
ENVELOPE = range(5) # Seeds

VARIANTS = { # Healthy runs: fields of the model's config, and of the training's
    "gelu": (dict(ffn="gelu"), {}),
    "relu, LayerNorm, biases": (dict(ffn="relu", norm="layernorm", bias=True), {}),
    "post-norm": (dict(norm_position="post"), dict(lr=5e-3)),
    "sublayer norm": (dict(norm_position="sublayer"), {}),
    "learned positions": (dict(position="learned"), {}),
    "no positions": (dict(position="none"), {}),
    "sinusoids": (dict(position="sinusoidal"), {}),
    "one key head, QK norm, window": (dict(num_kv_heads=1, qk_norm=True, z_loss=1e-3, window=32), {}),
    "tied, GPT-2's init": (dict(tie_embeddings=True, scaled_init=True), {}),
    "wider, shallower": (dict(d_model=96, num_layers=2), {}),
    "Muon": ({}, dict(optimizer="muon")),
    "batch of 4": ({}, dict(batch_size=4)),
    "batch of 16": ({}, dict(batch_size=16)),
    "windows of documents": (dict(context_length=512), dict(batch_size=2, windows="documents")),
    "windows within": ({}, dict(windows="within")),
    "half of the rate": ({}, dict(lr=5e-3)),
    "constant, cooled down": ({}, dict(schedule="constant", cooldown_steps=60)),
    "decay 0.1": ({}, dict(weight_decay=.1)),
    "betas 0.9, 0.999": ({}, dict(beta2=.999)),
    "bfloat16 products": ({}, dict(dtype="bfloat16")),
    "NumPy": ({}, dict(engine="numpy")),
    "interrupted": ({}, {}),
    "no clipping": ({}, dict(grad_clip=0.)),
    "warm-up of 90": ({}, dict(warmup_steps=90)),
}


def job(kind, fault, model, train, data, seed):
    "A run: what it is called, and what `train_run` needs."
    return dict(name=f"{fault or kind} {seed}", kind=kind, fault=fault, model=replace(MODEL, **model),
                train=replace(TRAIN, **train | dict(seed=seed)), data=data, seed=seed)


def twin_of(f, seed):
    "The healthy run with a fault's config, seed and data; many faults share one."
    data = f.twin or f.data
    label = [f"{k} = {v}" for k, v in (f.model | f.train).items()] + [data]*(data != "whole")
    return job(f"twin of {', '.join(label) or 'no field'}", None, f.model, f.train, data, seed)


def set_of(name): return "F" if name in faults.FIRST else "B" if name in faults.SET_B else "A"


def all_jobs(sets, seeds, variant_seed):
    chosen = {n: f for n, f in faults.FAULTS.items() if set_of(n) in sets}
    for seed in seeds:
        yield from {(t := twin_of(f, seed))["name"]: t for f in chosen.values()}.values()
    for i in range(3): yield job("more seeds", None, {}, {}, "whole", variant_seed + 50 + i)
    for i, (label, (model, train)) in enumerate(VARIANTS.items()):
        yield job(label, None, model, train, "whole", variant_seed + i)
    for seed in seeds:
        first = faults.FIRST if "F" in sets and seed == seeds[0] else {}
        for n, f in (chosen | first).items(): yield job("fault", n, f.model, f.train, f.data, seed)


def train_run(j, work):
    "Train, unless the run is there and whole."
    run, data = work/j["name"].replace("/", "-"), work/"data"/j["data"]
    if any(m.get("final") for m in read_metrics(run)) or (run/"broken").exists(): return run
    if run.exists(): raise SystemExit(f"{run} is half a run: remove it")
    if j["kind"] == "interrupted": train_in_two(j, data, run)
    else: faults.train(j["fault"], j["model"], j["train"], data, run)
    if not any(m.get("final") for m in read_metrics(run)): (run/"broken").touch()       # it diverged
    return run


def train_in_two(j, data, run):
    "Cut off in the middle, and resumed from the last checkpoint."
    def step(self, *batches, right=Trainer.train_step):
        if self.step == 170: raise KeyboardInterrupt
        return right(self, *batches)
    try:
        with patch.object(Trainer, "train_step", step): faults.train(None, j["model"], j["train"], data, run)
    except KeyboardInterrupt: pass
    sets = (faults.TokenDataset.open(data/name) for name in ("train", "valid"))
    trainer = Trainer(j["model"], j["train"], *sets)
    trainer.resume(run)
    trainer.fit(run)


def difference(a, b):
    "By how much the logged numbers of two runs differ at most."
    keys = "loss", "valid_loss", "grad_norm", "lr"
    pairs = list(zip(read_metrics(a), read_metrics(b)))
    return max(abs(x[k] - y[k]) for x, y in pairs for k in keys if k in x and k in y)


def judged(j, findings):
    "Whether the doctor named it; `findings` may be the words in which he refused to look."
    if isinstance(findings, str): return "refused"
    names = [f.name for f in findings.causes]
    if j["fault"] is None: return "accused" if names else "left alone"
    right = [(faults.FAULTS | faults.FIRST)[j["fault"]].right(n) for n in names]
    if right[:1] == [True]: return "named first"
    return "named" if any(right) else "unhealthy" if names else "missed"


def line_of(exam, j, work, known):
    "Ask the doctor about a run."
    run, start = train_run(j, work), time.process_time()
    try: findings = examine(run, known)
    except (FileNotFoundError, ValueError) as e: findings = str(e)
    told = findings if isinstance(findings, str) else [[f.name, f.weight] for f in findings.causes]
    row = dict(exam=exam, set=j["fault"] and set_of(j["fault"]), kind=j["kind"], fault=j["fault"],
               seed=j["seed"], judged=judged(j, findings), findings=told,
               valid_loss=read_metrics(run)[-1].get("valid_loss"))
    cpu_s = round(time.process_time() - start, 1)
    if j["fault"] in faults.FAULTS:
        fault = faults.FAULTS[j["fault"]]
        twin = train_run(twin_of(fault, j["seed"]), work)
        row |= dict(twin_loss=read_metrics(twin)[-1]["valid_loss"], differs=difference(run, twin),
                    told=fault.told)
        if not row["differs"] > 0: raise SystemExit(f"{j['name']}: the fault changes nothing")
    return row | dict(cpu_s=cpu_s, machine=machine_name(), date=datetime.date.today().isoformat())


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("exam", type=int)
    p.add_argument("--work", type=Path, default=Path("runs/doctor_exam"))
    p.add_argument("--out", type=Path, default=Path("nbs/results/doctor_exam.jsonl"))
    p.add_argument("--sets", default="ABF")
    p.add_argument("--seeds", type=int, nargs="*", default=[200, 201, 202])
    p.add_argument("--variant-seed", type=int, default=220)
    a = p.parse_args()
    torch.set_num_threads(1)
    if not (a.work/"data").exists(): faults.write_data(a.work/"data", MODEL.vocab_size, 4_000_000, 60)
    runs = [train_run(job("envelope", None, {}, {}, "whole", s), a.work) for s in ENVELOPE]
    known = envelopes() | dict(short=make_envelope(runs, dict(machine=machine_name())))
    lines = a.out.read_text(encoding="utf-8").splitlines() if a.out.exists() else []
    done = {(r["exam"], r["kind"], r["fault"], r["seed"]) for r in map(json.loads, lines)}
    for j in all_jobs(a.sets, a.seeds, a.variant_seed):
        if (a.exam, j["kind"], j["fault"], j["seed"]) in done: continue
        row = json.dumps(line_of(a.exam, j, a.work, known), ensure_ascii=False)
        with open(a.out, "a", encoding="utf-8") as f: f.write(row + "\n")


if __name__ == "__main__": main()
