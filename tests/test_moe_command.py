"The command with experts: trained, gone on with bit for bit, told from, counted, examined, studied; mistakes are one line before any work."
import json
import shutil

import pytest

torch = pytest.importorskip("torch")

from processes import here
from safetensors.torch import load_file
from test_cli import TINY, metrics, write_days

from lmcourse.ablations.sweep import Experiment, RunData, read_lines, run_experiment
from lmcourse.accounting.parameters import count_parameters
from lmcourse.tools.config import ModelConfig

EXPERTS = "--num-experts 4 --moe-d-ff 16 --num-shared-experts 1 --router-score sigmoid --router-bias-rate 0.01 --router-z-loss 0.01".split()


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    "A folder with data and a run of 20 steps with experts, saved at 10 and 20."
    folder = tmp_path_factory.mktemp("experts")
    write_days(folder/"days.txt")
    for words in ("tokenizer text:days.txt tok --vocab-size 300", "prepare text:days.txt data --tokenizer tok --valid-documents 5"):
        done = here(*words.split(), cwd=folder)
        assert done.returncode == 0, done.stderr
    done = here("train", "data", "run", "--steps", 20, *TINY, "--checkpoint-every", 10, *EXPERTS, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_a_run_with_experts_goes_on_bit_for_bit(work):
    shutil.copytree(work/"run", work/"cut")
    first, last = sorted((work/"cut"/"checkpoints").glob("step_*"))
    shutil.rmtree(last)
    done = here("train", "--resume", "cut", cwd=work)
    assert done.returncode == 0 and metrics(work/"cut") == metrics(work/"run"), done.stderr
    one, two = ((work/run/"checkpoints"/last.name/"model.safetensors").read_bytes() for run in ("run", "cut"))
    assert one == two
    bias = load_file(work/"run"/"checkpoints"/last.name/"model.safetensors")["layers.0.ffn.expert_bias"]
    assert bias.abs().max() > .01 and not torch.equal(bias, load_file(work/"cut"/"checkpoints"/first.name/"model.safetensors")["layers.0.ffn.expert_bias"])


def test_a_run_with_experts_tells_and_is_examined(work):
    one, two = (here("generate", "run", "--prompt", "On day", "--max-tokens", 12, "--seed", 3, cwd=work) for _ in "ab")
    assert one.returncode == 0 and one.stdout == two.stdout and one.stdout.startswith("On day"), one.stderr
    done = here("doctor", "run", cwd=work)
    assert done.returncode == 0 and "validation loss, logged and computed again" in done.stdout, done.stderr


def test_an_account_counts_experts(work):
    done = here("account", "--preset", "small", *EXPERTS[:4], "--json", cwd=work)
    config = ModelConfig.preset("small", num_experts=4, moe_d_ff=16)
    assert done.returncode == 0 and json.loads(done.stdout)["parameters"]["active"] == count_parameters(config).active < count_parameters(config).unique, done.stderr


def test_a_study_of_experts_is_saved_as_lines(tmp_path):
    write_days(tmp_path/"days.txt")
    study = Experiment("small", {"dense": dict(context_length=32, d_ff=32, batch_size=2), "experts": dict(context_length=32, num_experts=4, moe_d_ff=16, batch_size=2)},
                       seeds=(0, 1), tokens=192, data=RunData(f"text:{tmp_path/'days.txt'}", 300, 1., 5))
    run_experiment(study, tmp_path/"runs.jsonl", tmp_path/"work", command="test")
    lines = read_lines(tmp_path/"runs.jsonl")
    assert len(lines) == 4 and all(line["result"]["loss"] > 0 for line in lines.values())


MISTAKES = {"--num-experts 4 --num-experts-per-tok 5": "num_experts_per_tok = 5, but num_experts = 4", "--num-experts 4 --capacity-factor 0": "capacity_factor = 0.0, expected more than 0",
            "--num-experts 4 --num-experts-per-tok 1": "the router could not learn", "--num-experts 0": "num_experts = 0, expected more than 0"}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_about_experts_is_one_line_before_any_work(work, words):
    done = here("train", "data", "never", *words.split(), cwd=work)
    assert done.returncode == 2 and MISTAKES[words] in done.stderr and done.stderr.strip().count("\n") == 0 and not (work/"never").exists(), done.stderr
