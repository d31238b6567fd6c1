"`lmcourse sft` and `lmcourse rl`: a run that was killed ends with the same bits, and mistakes are one line before any work."
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from lmcourse.alignment.runs import new_alignment, note_steps, open_alignment
from lmcourse.app import cli
from lmcourse.tools.config import TrainConfig
from lmcourse.training.models import load_model

ROOT = Path(__file__).parents[1]
ENV = os.environ | dict(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
RL = "--prompts 1 --group-size 2 --reward mentions --steps 4 --checkpoint-every 1 --log-every 1 --eval-every 10 --eval-documents 2".split()


def command(*words, cwd): return [sys.executable, "-m", "lmcourse", *map(str, words)], dict(cwd=cwd, env=ENV)


def final_weights(run): return torch.cat([p.flatten() for p in load_model(run, checkpoint="latest")[0].parameters()])


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_and_ends_with_the_same_bits(tmp_path):
    words, kwargs = command("rl", "whole", *RL, cwd=tmp_path)
    assert subprocess.run(words, **kwargs, capture_output=True).returncode == 0
    words, kwargs = command("rl", "cut", *RL, cwd=tmp_path)
    process = subprocess.Popen(words, **kwargs, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not list((tmp_path/"cut"/"checkpoints").glob("*")): time.sleep(.05)
    process.kill()
    process.wait()
    words, kwargs = command("rl", "--resume", "cut", cwd=tmp_path)
    done = subprocess.run(words, **kwargs, capture_output=True, text=True)
    assert done.returncode == 0 and "going on after step" in done.stdout, done.stderr
    assert torch.equal(final_weights(tmp_path/"whole"), final_weights(tmp_path/"cut"))
    steps = [json.loads(line)["step"] for line in (tmp_path/"cut"/"success.jsonl").read_text().splitlines()]
    assert steps == [4]


def test_stopped_between_two_steps_it_goes_on_with_the_same_bits(tmp_path):
    train = TrainConfig(steps=3, batch_size=4, lr=1e-3, min_lr=1e-3, schedule="constant", warmup_steps=1)
    whole, cut = (new_alignment(tmp_path/name, "sft", dict(slip=.2, demonstrations=16), train) for name in ("whole", "cut"))
    for _ in range(3): whole.train_step()
    cut.train_step()
    cut.save(tmp_path/"cut")
    again = open_alignment(tmp_path/"cut")
    assert again.step == 1
    for _ in range(2): again.train_step()
    assert all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), again.model.parameters()))


def test_lines_replace_those_of_the_same_step_and_later_ones(tmp_path):
    note_steps(tmp_path/"a", [dict(step=k) for k in range(6)])
    note_steps(tmp_path/"a", [dict(step=2, new=1), dict(step=3, new=1)])
    assert [json.loads(line) for line in (tmp_path/"a").read_text().splitlines()] == [dict(step=0), dict(step=1), dict(step=2, new=1), dict(step=3, new=1)]


@pytest.mark.parametrize("words, message", [
    ("rl", "rl needs either OUT or --resume RUN"), ("sft a --resume b", "sft needs either"), ("sft --resume nowhere", "nowhere: no run folder"), ("rl a --group-size 1", "group_size = 1"),
    ("rl a --kl -1", "kl = -1"), ("rl a --algorithm ppo", "ppo"), ("rl a --init-from nowhere", "nowhere: no run folder"), ("sft a --slip 1", "slip = 1"),
    ("sft a --demonstrations 3", "demonstrations = 3"), ("sft taken", "taken exists"), ("rl a --staleness -1", "staleness = -1")])
def test_a_mistake_is_one_line_before_any_work(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("taken").mkdir()
    with pytest.raises(SystemExit) as e: cli.main(words.split())
    error = capsys.readouterr().err
    assert e.value.code == 2 and message in error and len(error.splitlines()) == 1 and sorted(p.name for p in Path().iterdir()) == ["taken"]
