"""The model that comes with the course: trained on stories, then distilled, packed into 6 bits, its stories judged.

Usage:
  python tools/shipped_model.py train FOLDER    # data and run; the same call goes on where it was stopped
  python tools/shipped_model.py pack FOLDER     # the end of the run, as nbs/results/pretrained
  python tools/shipped_model.py distill FOLDER  # from there with a teacher; the end becomes lmcourse/data/quickstart
  python tools/shipped_model.py measure FOLDER  # the stories of each checkpoint: nbs/results/shipped_model.json
"""
import argparse, json, shutil, subprocess, sys
from datetime import date
from pathlib import Path

from lmcourse.app.cli import open_data
from lmcourse.architecture.transformer_torch import TransformerLM
from lmcourse.generation.generate import measure_stories
from lmcourse.inference.kv_cache import FastDecoder
from lmcourse.inference.quantization import quantize_model, save_quantized
from lmcourse.tokenization.tokenizer import Tokenizer
from lmcourse.tools.files import atomic_write, write_json
from lmcourse.tools.machine import processor_name
from lmcourse.training.checkpoint import load_checkpoint
from lmcourse.training.evaluation import evaluate
from lmcourse.training.models import load_model
from lmcourse.training.runs import read_run

ROOT = Path(__file__).resolve().parent.parent
SHIPPED, RESULT = ROOT/"lmcourse/data/quickstart", ROOT/"nbs/results/shipped_model.json"
PREPARE = f"prepare stories data --tokenizer {SHIPPED} --max-mb 160"
TRAIN = ("train data run --preset quickstart --engine numpy --d-model 160 --num-layers 4 "
         "--num-heads 5 --d-ff 448 --batch-size 4 --lr 0.0025 --min-lr 0.00002 --warmup-steps 200 "
         "--schedule constant --steps 26000 --cooldown-steps 14000 --eval-every 2000 "
         "--checkpoint-every 2000 --keep-checkpoints 20 --log-every 100")
SHOWN = {2000, 4000, 6000, 8000, 12000, 16000, 18000, 20000, 22000, 24000, 26000}
BITS = 6   # A package is compressed, and a code of 6 bits takes about 5 there


def command(folder, words):
    "Run a command of the course in the folder."
    subprocess.run([sys.executable, "-m", "lmcourse", *words.split()], cwd=folder, check=True)


def train(folder):
    "Data and run, each only if it is not there yet."
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder/"data").exists(): command(folder, PREPARE)
    command(folder, "train --resume run" if (folder/"run").exists() else TRAIN)


def checkpoints(folder):
    "Step to checkpoint, in order."
    found = {int(p.name.removeprefix("step_")): p for p in (folder/"run/checkpoints").glob("step_*")}
    return dict(sorted(found.items()))


def read(folder, step):
    "The model of a step, its tokenizer and its config of training."
    model_config, train_config, data = read_run(folder/"run")
    model = TransformerLM(model_config)
    load_checkpoint(checkpoints(folder)[step], model)
    return model.eval(), Tokenizer.from_folder(data/"tokenizer"), train_config


def judged(model, tokenizer, valid, stories):
    "Its loss, and how many of its stories at temperature 0.8 are right, and in what."
    loss = evaluate(model, valid, model.config.context_length)
    told = measure_stories(model, tokenizer, stories, decoder=FastDecoder, temperature=0.8)
    counts = {name: sum(told[name]) for name in ("form", "people", "things", "consistent")}
    return dict(loss=round(loss.loss, 4), excess=round(loss.excess, 4), error=round(loss.error, 4),
                stories=stories, **counts, slips=told["slips"])


def measure(folder, stories):
    "A line for each checkpoint that is there, and one for the packed model, which must be of this run."
    made = json.loads((SHIPPED/"config.json").read_text())["made"]
    if (made["step"], made["command"]) != (max(checkpoints(folder)), f"lmcourse {TRAIN}"):
        sys.exit(f"{SHIPPED} is another run's model: call `pack {folder}` first")
    valid = open_data(folder/"data")[1]
    lines = []
    for step in [s for s in checkpoints(folder) if s in SHOWN]:
        model, tokenizer, _ = read(folder, step)
        lines.append(dict(step=step) | judged(model, tokenizer, valid, stories))
        print(json.dumps(lines[-1]), flush=True)
    packed = judged(*load_model(SHIPPED), valid, stories)
    write_json(RESULT, dict(machine=processor_name(), date=f"{date.today()}", temperature=0.8,
                            commands=[PREPARE.replace(str(SHIPPED), "MODEL"), TRAIN],
                            training=lines, packed=packed))


def pack(folder):
    "The last checkpoint in 8 bits, with its configs and tokenizer, in place of the model that was there."
    step = max(checkpoints(folder))
    model, tokenizer, train_config = read(folder, step)
    found = evaluate(model, open_data(folder/"data")[1], model.config.context_length)
    made = dict(command=f"lmcourse {TRAIN}", date=f"{date.today()}", step=step,
                weights=f"{BITS} bits, and a step in float16 for each row",
                machine=processor_name(), result=vars(found))
    with atomic_write(SHIPPED.with_name("quickstart.new"), durable=True) as part:
        tokenizer.save(part)
        save_quantized(part/"model.safetensors", quantize_model(model, BITS, None, keep=()))
        write_json(part/"config.json", dict(model=model.config.to_dict(), train=train_config.to_dict(),
                                            tokenizer=tokenizer.digest, made=made))
    shutil.rmtree(SHIPPED)
    SHIPPED.with_name("quickstart.new").rename(SHIPPED)
    print(f"{sum(p.stat().st_size for p in SHIPPED.iterdir()):,} bytes in {SHIPPED}")


if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=("train", "pack", "measure"))
    p.add_argument("folder", type=lambda text: Path(text).resolve())
    p.add_argument("--stories", type=int, default=200, help="written by each checkpoint")
    a = p.parse_args()
    if a.what == "train": train(a.folder)
    elif a.what == "pack": pack(a.folder)
    else: measure(a.folder, a.stories)
