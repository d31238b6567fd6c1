"""The model that comes with the course: trained on stories, distilled, packed into 6 bits, its stories judged.

Usage:
  python tools/shipped_model.py train FOLDER    # data and run; the same call goes on where it was stopped
  python tools/shipped_model.py pack FOLDER     # the end of the run, as nbs/results/pretrained
  python tools/distillation_runs.py FOLDER      # with a teacher, from there
  python tools/shipped_model.py pack FOLDER     # the end of the distillation, as lmcourse/data/quickstart
  python tools/shipped_model.py measure FOLDER  # the stories of each checkpoint: nbs/results/shipped_model.json
"""
import argparse, json, shutil, subprocess, sys
from datetime import date
from pathlib import Path

from lmcourse.app.training_commands import open_data
from lmcourse.architecture.transformer_torch import TransformerLM
from lmcourse.generation.generate import measure_stories
from lmcourse.inference.fast_decoder import FastDecoder
from lmcourse.inference.quantization import quantize_model, save_quantized
from lmcourse.tokenization.tokenizer import Tokenizer
from lmcourse.tools.config import ModelConfig
from lmcourse.tools.files import atomic_write, read_json, write_json
from lmcourse.tools.machine import processor_name
from lmcourse.training.checkpoint import load_checkpoint
from lmcourse.training.evaluation import evaluate
from lmcourse.training.models import load_model

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT/"nbs/results/shipped_model.json"
PLACES = dict(run=ROOT/"nbs/results/pretrained", practice=ROOT/"lmcourse/data/quickstart")   # Name of a run to where its model goes
PREPARE = "prepare stories data --tokenizer {} --max-mb 160"
TRAIN = ("train data run --preset quickstart --engine numpy --d-model 160 --num-layers 4 "
         "--num-heads 5 --d-ff 448 --batch-size 4 --lr 0.0025 --min-lr 0.00002 --warmup-steps 200 "
         "--schedule constant --steps 26000 --cooldown-steps 14000 --eval-every 2000 "
         "--checkpoint-every 2000 --keep-checkpoints 20 --log-every 100")
COMMANDS = dict(run=f"lmcourse {TRAIN}", practice="python tools/distillation_runs.py FOLDER")
SHOWN = {2000, 4000, 6000, 8000, 12000, 16000, 18000, 20000, 22000, 24000, 26000}
BITS = 6   # A package is compressed, and a code of 6 bits takes about 5 there


def command(folder, words):
    "Run a command of the course in the folder."
    subprocess.run([sys.executable, "-m", "lmcourse", *words.split()], cwd=folder, check=True)


def train(folder):
    "Data and run, each only if it is not there yet."
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder/"data").exists(): command(folder, PREPARE.format(PLACES["run"]))
    command(folder, "train --resume run" if (folder/"run").exists() else TRAIN)


def checkpoints(run):
    "Step to checkpoint, in order."
    return dict(sorted((int(p.name.removeprefix("step_")), p) for p in (run/"checkpoints").glob("step_*")))


def read(run, step):
    "The model of a step."
    model = TransformerLM(ModelConfig.from_dict(read_json(run/"config.json")["model"]))
    load_checkpoint(checkpoints(run)[step], model)
    return model.eval()


def judged(model, tokenizer, valid, stories):
    "Its loss, and how many of its stories at temperature 0.8 are right, and in what."
    loss = evaluate(model, valid, model.config.context_length)
    told = measure_stories(model, tokenizer, stories, decoder=FastDecoder, temperature=0.8)
    counts = {name: sum(told[name]) for name in ("form", "people", "things", "consistent")}
    return dict(loss=round(loss.loss, 4), excess=round(loss.excess, 4), error=round(loss.error, 4),
                stories=stories, **counts, slips=told["slips"])


def measure(folder, stories):
    "A line for each checkpoint that is there (kept, for those that aren't), and one for the packed model, which must be of this distillation."
    found, tokenizer = json.loads(RESULT.read_text()), Tokenizer.from_folder(PLACES["run"])
    made, last = read_json(PLACES["practice"]/"config.json")["made"], max(checkpoints(folder/"practice"))
    if (made["step"], made["command"]) != (last, COMMANDS["practice"]): sys.exit(f"{PLACES['practice']} is another run's model: call `pack {folder}` first")
    valid = open_data(folder/"data")[1]
    for name, key in (("run", "training"), ("long", "distillation"), ("practice", "practice")):
        run = folder/name
        lines = [dict(step=s) | judged(read(run, s), tokenizer, valid, stories) for s in checkpoints(run) if s in SHOWN]
        found[key] = lines or found.get(key, [])
    found |= dict(machine=processor_name(), date=f"{date.today()}", commands=[PREPARE.format("MODEL"), TRAIN, COMMANDS["practice"]],
                  packed=judged(*load_model(PLACES["practice"]), valid, stories))
    write_json(RESULT, found)


def pack(folder):
    "The last checkpoint of each run that is there, in few bits, with its configs and tokenizer, in place of the model that was there."
    tokenizer, valid = Tokenizer.from_folder(PLACES["run"]), open_data(folder/"data")[1]
    for name, place in PLACES.items():
        if not (steps := checkpoints(folder/name)): continue
        model = read(folder/name, step := max(steps))
        found = evaluate(model, valid, model.config.context_length)
        made = dict(command=COMMANDS[name], date=f"{date.today()}", step=step, weights=f"{BITS} bits, and a step in float16 for each row",
                    machine=processor_name(), result=vars(found))
        new = place.with_name(f"{place.name}.new")
        with atomic_write(new, durable=True) as part:
            tokenizer.save(part)
            save_quantized(part/"model.safetensors", quantize_model(model, BITS, None, keep=()))
            config = read_json(folder/name/"config.json")
            write_json(part/"config.json", dict(model=config["model"], train=config["train"], tokenizer=tokenizer.digest, made=made))
        shutil.rmtree(place)
        new.rename(place)
        print(f"{sum(p.stat().st_size for p in place.iterdir()):,} bytes in {place}")


if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=("train", "pack", "measure"))
    p.add_argument("folder", type=lambda text: Path(text).resolve())
    p.add_argument("--stories", type=int, default=200, help="written by each checkpoint")
    a = p.parse_args()
    if a.what == "measure": measure(a.folder, a.stories)
    else: dict(train=train, pack=pack)[a.what](a.folder)
