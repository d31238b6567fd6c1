"""Speeds on this machine: `make bench` prints them beside those of the last time, and keeps them in bench/PROCESSOR.jsonl, a line a call.

The folder is no part of the repository: a speed says something beside others of the same machine, and its load is seldom the same.
What the text cites is measured by `lmcourse bench`, in turns, and lies in nbs/results.
"""
import json
import re
import statistics
import subprocess
import time
from datetime import datetime
from itertools import islice
from pathlib import Path

import pytest

from lmcourse.app.bench import machine
from lmcourse.tokenization.tokenizer import Tokenizer
from lmcourse.tools.stories import Stories

pytestmark = pytest.mark.bench
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def speeds():
    "Name to number and unit: what is put in is printed and kept when all is measured."
    found, here = {}, machine(("numba", "numpy", "torch"))
    yield found
    file = ROOT/"bench"/(re.sub(r"[^a-z0-9]+", "-", here["processor"].lower()).strip("-") + ".jsonl")
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
    last = lines[-1] if lines else {"speeds": {}}
    for name, (value, unit) in found.items():
        before = last["speeds"].get(name)
        print(f"{name:32} {value:10,.1f} {unit}" + (f"   {value/before[0]:.2f} of {last['date'][:10]}" if before else ""))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip() or None
    file.parent.mkdir(exist_ok=True)
    with open(file, "a", encoding="utf-8") as f:
        f.write(json.dumps(dict(date=datetime.now().isoformat(timespec="seconds"), commit=commit, machine=here, speeds=found)) + "\n")
    print(f"kept in {file.relative_to(ROOT)}, line {len(lines) + 1}")


def seconds(f, *args, repeat=5):
    "Median over a few calls."
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        f(*args)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def test_stories_are_written(speeds):
    documents = list(islice(Stories(0), 2000))
    rate = sum(map(len, documents))/seconds(lambda: list(islice(Stories(0), 2000)))/1e6
    speeds["stories written"] = rate, "MB/s"


def test_tokenizer(speeds):
    documents = list(islice(Stories(0), 4000))
    size = sum(map(len, documents))/1e6
    train = seconds(Tokenizer.train, documents, 2048, repeat=1)
    tokenizer = Tokenizer.train(documents, 2048)
    encode = seconds(lambda: [tokenizer.encode(d) for d in documents])
    speeds["tokenizer, learning"] = size/train, "MB/s"
    speeds["tokenizer, encoding"] = size/encode, "MB/s"


def test_training_step(tmp_path, speeds):
    from lmcourse.tools.config import ModelConfig, TrainConfig
    from lmcourse.training.data import TokenDataset, write_tokens
    from lmcourse.training.trainer import Trainer, measure_step
    documents = list(islice(Stories(0), 300))
    tokenizer = Tokenizer.train(documents, 2048)
    for name in ("train", "valid"): write_tokens(tmp_path/name, documents, tokenizer, "stories")
    config = ModelConfig.preset("quickstart", vocab_size=2048)
    trainer = Trainer(config, TrainConfig.preset("quickstart"), *(TokenDataset.open(tmp_path/n) for n in ("train", "valid")))
    step = measure_step(trainer, 30)
    speeds["quickstart, a step"] = 1e3*step, "ms"
    speeds["quickstart, training"] = 2*config.context_length/step, "tokens/s"
