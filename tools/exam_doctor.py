"""Examine the doctor of chapter 06: train runs with faults and without, ask him about each, note a line of JSON.

What is there already is not made again: runs lie in WORK, lines in OUT. A line holds the examination's number, so that a doctor
who has been improved can be asked about the same runs. `--sets A` leaves out the faults that are kept for the second examination.
Usage: tools/exam_doctor.py EXAM [--work runs/doctor_exam] [--out nbs/results/doctor_exam.jsonl] [--sets AB] [--seeds 200 201 202]
"""
import argparse, datetime, json, sys, time
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).parent.parent/"tests"))
import faults

from lmcourse.ablations.doctor import envelopes, examine, make_envelope, practice_data
from lmcourse.tools.config import ModelConfig, TrainConfig
from lmcourse.tools.machine import machine_name
from lmcourse.training.trainer import Trainer, read_metrics

MODEL = ModelConfig.preset("small")
TRAIN = TrainConfig.preset("small", steps=300, warmup_steps=30, eval_every=75, eval_documents=20, checkpoint_every=150)
ENVELOPE = range(5) # Seeds

VARIANTS = { # Healthy runs that are not like the envelope's: fields of the model's config, of the training's, and data
    "gelu": (dict(ffn="gelu"), {}), "relu, LayerNorm, biases": (dict(ffn="relu", norm="layernorm", bias=True), {}),
    "post-norm": (dict(norm_position="post"), dict(lr=5e-3)), "sublayer norm": (dict(norm_position="sublayer"), {}),
    "learned positions": (dict(position="learned"), {}), "no positions": (dict(position="none"), {}), "sinusoids": (dict(position="sinusoidal"), {}),
    "one key head, QK norm, window": (dict(num_kv_heads=1, qk_norm=True, z_loss=1e-3, window=32), {}), "tied, GPT-2's init": (dict(tie_embeddings=True, scaled_init=True), {}),
    "wider, shallower": (dict(d_model=96, num_layers=2), {}), "Muon": ({}, dict(optimizer="muon")), "batch of 4": ({}, dict(batch_size=4)),
    "batch of 16": ({}, dict(batch_size=16)), "windows of documents": ({}, dict(windows="documents")), "windows within": ({}, dict(windows="within")),
    "a third of the rate": ({}, dict(lr=10**-2/3)), "constant, cooled down": ({}, dict(schedule="constant", cooldown_steps=60)),
    "decay 0.1": ({}, dict(weight_decay=.1)), "betas 0.9, 0.999": ({}, dict(beta2=.999)), "bfloat16 products": ({}, dict(dtype="bfloat16")),
    "NumPy": ({}, dict(engine="numpy")), "interrupted": ({}, {}), "no clipping": ({}, dict(grad_clip=0.)), "warm-up of 90": ({}, dict(warmup_steps=90)),
}


def job(kind, fault, model, train, data, seed):
    "A run: what it is called, and what `train_run` needs."
    name = f"{fault or kind} {seed}"
    return dict(name=name, kind=kind, fault=fault, model=replace(MODEL, **model), train=replace(TRAIN, **train | dict(seed=seed)), data=data, seed=seed)


def twin_of(f, seed):
    "The healthy run with a fault's config, seed and data; many faults share one."
    data = f.twin or f.data
    label = ", ".join([*(f"{k} = {v}" for k, v in (f.model | f.train).items()), *([data] if data != "whole" else [])])
    return job(f"twin of {label or 'no field'}", None, f.model, f.train, data, seed)


def all_jobs(sets, seeds, variant_seed):
    chosen = {n: f for n, f in faults.FAULTS.items() if ("B" if n in faults.SET_B else "A") in sets}
    for seed in seeds:
        twins = {(t := twin_of(f, seed))["name"]: t for f in chosen.values()}
        yield from twins.values()
    yield from (job("more seeds", None, {}, {}, "whole", variant_seed + 50 + i) for i in range(3))
    for i, (label, (model, train)) in enumerate(VARIANTS.items()): yield job(label, None, model, train, "whole", variant_seed + i)
    for seed in seeds:
        for n, f in chosen.items(): yield job("fault", n, f.model, f.train, f.data, seed)


def train_run(j, work):
    "Train, unless the run is there and whole."
    run = work/j["name"].replace("/", "-")
    if any(m.get("final") for m in read_metrics(run)) or (run/"broken").exists(): return run
    if run.exists(): raise SystemExit(f"{run} is half a run: remove it")
    if j["kind"] == "interrupted":
        def step(self, batch=None, right=Trainer.train_step):
            if self.step == 170: raise KeyboardInterrupt
            return right(self, batch)
        try:
            with patch.object(Trainer, "train_step", step): faults.train(None, j["model"], j["train"], work/"data"/j["data"], run)
        except KeyboardInterrupt: pass
        trainer = Trainer(j["model"], j["train"], *(faults.TokenDataset.open(work/"data"/j["data"]/name) for name in ("train", "valid")))
        trainer.resume(run)
        trainer.fit(run)
    else: faults.train(j["fault"], j["model"], j["train"], work/"data"/j["data"], run)
    if not any(m.get("final") for m in read_metrics(run)): (run/"broken").touch()       # it diverged
    return run


def difference(a, b):
    "By how much the logged numbers of two runs differ at most, none where one of them lacks a line."
    keys = "loss", "valid_loss", "grad_norm", "lr"
    pairs = list(zip(read_metrics(a), read_metrics(b)))
    return max(abs(x[k] - y[k]) for x, y in pairs for k in keys if k in x and k in y)


def judged(j, findings):
    "Whether the doctor named it."
    names = [f.name for f in findings.causes]
    if j["fault"] is None: return "accused" if names else "left alone"
    right = [faults.FAULTS[j["fault"]].right(n) for n in names]
    return "named first" if right[:1] == [True] else "named" if any(right) else "unhealthy" if names else "missed"


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("exam", type=int)
    p.add_argument("--work", type=Path, default=Path("runs/doctor_exam"))
    p.add_argument("--out", type=Path, default=Path("nbs/results/doctor_exam.jsonl"))
    p.add_argument("--sets", default="AB")
    p.add_argument("--seeds", type=int, nargs="*", default=[200, 201, 202])
    p.add_argument("--variant-seed", type=int, default=220)
    a = p.parse_args()
    torch.set_num_threads(1)
    if not (a.work/"data").exists():
        practice_data(a.work/"data", MODEL.vocab_size, 4_000_000, 60)
        faults.write_variants(a.work/"data")
    runs = [train_run(job("envelope", None, {}, {}, "whole", s), a.work) for s in ENVELOPE]
    known = envelopes() | dict(short=make_envelope(runs, dict(machine=machine_name())))
    done = {(r["exam"], r["kind"], r["fault"], r["seed"]) for r in map(json.loads, a.out.read_text().splitlines())} if a.out.exists() else set()
    for j in all_jobs(a.sets, a.seeds, a.variant_seed):
        if (a.exam, j["kind"], j["fault"], j["seed"]) in done: continue
        run = train_run(j, a.work)
        start = time.process_time()
        findings = examine(run, known)
        row = dict(exam=a.exam, set=j["fault"] and ("B" if j["fault"] in faults.SET_B else "A"), kind=j["kind"], fault=j["fault"], seed=j["seed"], judged=judged(j, findings),
                   findings=[[f.name, f.weight] for f in findings.causes], valid_loss=read_metrics(run)[-1].get("valid_loss"))
        if j["fault"]:
            twin = train_run(twin_of(faults.FAULTS[j["fault"]], j["seed"]), a.work)
            row |= dict(twin_loss=read_metrics(twin)[-1]["valid_loss"], differs=difference(run, twin))
            if not row["differs"] > 0: raise SystemExit(f"{j['name']}: the fault changes nothing")
        row |= dict(cpu_s=round(time.process_time() - start, 1), machine=machine_name(), date=datetime.date.today().isoformat())
        with open(a.out, "a") as f: f.write(json.dumps(row, ensure_ascii=False) + "\n")


if __name__ == "__main__": main()
