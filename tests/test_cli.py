"The command as a user runs it: whole processes, tiny runs, mistakes, interruptions."
import json
import os
import signal
import subprocess
import sys
import time
from importlib.resources import files

import pytest

TINY = ("--context-length 64 --d-model 32 --num-layers 1 --windows random --eval-documents 5 "
        "--eval-every 40 --checkpoint-every 20 --log-every 5").split()


def lmcourse(*words, cwd, **more):
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-m", "lmcourse", *map(str, words)], cwd=cwd, env=env, capture_output=True, text=True, **more)


def start(*words, cwd):
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-m", "lmcourse", *map(str, words)], cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def metrics(run):
    lines = [json.loads(line) for line in (run/"metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in m.items() if k != "elapsed_s"} for m in lines]


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    "A folder with a tokenizer and prepared data."
    folder = tmp_path_factory.mktemp("work")
    for words in ("tokenizer stories tok --vocab-size 600 --max-mb 0.2", "prepare stories data --tokenizer tok --max-mb 0.3 --valid-documents 20"):
        done = lmcourse(*words.split(), cwd=folder)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def whole(work):
    "A run of 40 steps that nothing interrupted."
    done = lmcourse("train", "data", "whole", "--steps", 40, *TINY, cwd=work)
    assert done.returncode == 0, done.stderr
    return work/"whole"


def test_a_run_leaves_what_it_says(whole):
    assert {p.name for p in whole.iterdir()} == {"config.json", "metrics.jsonl", "loss.png", "samples.txt", "checkpoints"}
    assert (whole/"loss.png").read_bytes()[:4] == b"\x89PNG"
    final = metrics(whole)[-1]
    assert final["final"] and final["step"] == 40 and final["excess"] > 0


def test_the_same_command_gives_the_same_run(work, whole):
    done = lmcourse("train", "data", "same", "--steps", 40, *TINY, cwd=work)
    assert done.returncode == 0 and metrics(work/"same") == metrics(whole)
    other = lmcourse("train", "data", "other", "--steps", 40, *TINY, "--seed", 2, cwd=work)
    assert other.returncode == 0 and metrics(work/"other") != metrics(whole)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_run_goes_on_bit_for_bit(work, how):
    options = ["--steps", 300, *TINY]
    reference = work/"long"
    if not reference.exists(): assert lmcourse("train", "data", "long", *options, cwd=work).returncode == 0
    run = work/f"cut-{how.name}"
    process = start("train", "data", run.name, *options, cwd=work)
    deadline = time.time() + 60
    while not list(run.glob("checkpoints/step_*[0-9]")) and time.time() < deadline: time.sleep(0.02)
    process.send_signal(how)
    _, err = process.communicate(timeout=60)
    if how == signal.SIGKILL: assert process.returncode == -how
    else: assert process.returncode == 130 and "lmcourse train --resume" in err and err.count("\n") == 1
    assert not any(m.get("final") for m in metrics(run)) or how == signal.SIGKILL
    done = lmcourse("train", "--resume", run.name, cwd=work)
    assert done.returncode == 0, done.stderr
    assert metrics(run) == metrics(reference)
    weights = [sorted(r.glob("checkpoints/step_*"))[-1]/"model.safetensors" for r in (run, reference)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_generate_and_plot(work, whole):
    one, two = (lmcourse("generate", "whole", "--prompt", "Once", "--max-tokens", 20, "--seed", s, cwd=work) for s in (3, 3))
    assert one.returncode == 0 and one.stdout == two.stdout and one.stdout.startswith("Once")
    done = lmcourse("plot", "whole", "--out", "both.png", cwd=work)
    assert done.returncode == 0 and "nats per token" in done.stdout and (work/"both.png").exists()


def test_the_model_that_comes_with_the_course_tells_a_story(tmp_path):
    done = lmcourse("generate", "--prompt", "Once there was", "--max-tokens", 30, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("Once there was a"), done.stderr
    folder = files("lmcourse").joinpath("data/quickstart")
    assert folder.joinpath("model.safetensors").stat().st_size < 2e6
    made = json.loads(folder.joinpath("config.json").read_text())["made"]
    assert made["command"].startswith("lmcourse quickstart") and 0 < made["result"]["excess"] < 0.25


@pytest.fixture(scope="module")
def broken(work, whole):
    "Files and folders with something wrong."
    (work/"empty.txt").write_text("")
    (work/"binary.txt").write_bytes(bytes(range(256))*20)
    (work/"short.txt").write_text("a few words\nand a few more\n")
    (work/"letter.txt").write_text("a")
    (work/"small.txt").write_text("".join(f"line {i} of a text that is too small for a window\n" for i in range(30)))
    for name in ("cut", "swapped", "other-tokenizer", "no-ngrams"): subprocess.run(["cp", "-r", "data", name], cwd=work, check=True)
    (work/"cut/train.bin").write_bytes((work/"data/train.bin").read_bytes()[:-100])
    assert lmcourse("tokenizer", "stories", "tok2", "--vocab-size", 500, "--max-mb", 0.1, cwd=work).returncode == 0
    subprocess.run("rm -r other-tokenizer/tokenizer no-ngrams/ngram.json; cp -r tok2 other-tokenizer/tokenizer", shell=True, cwd=work, check=True)
    (work/"not-weights").mkdir()
    (work/"not-weights/model.safetensors").write_bytes(b"weights")
    (work/"not-weights/config.json").write_text((work/"whole/config.json").read_text())
    (work/"swapped/train.bin").write_bytes((work/"data/train.bin").read_bytes()[::-1])
    subprocess.run(["cp", "-r", "whole", "another"], cwd=work, check=True)
    config = json.loads((work/"another/config.json").read_text())
    config["model"]["d_model"] = 64
    (work/"another/config.json").write_text(json.dumps(config))
    subprocess.run(["cp", "-r", "whole", "unknown"], cwd=work, check=True)
    config["model"]["layers"] = 3
    (work/"unknown/config.json").write_text(json.dumps(config))
    return work


@pytest.mark.parametrize("words, answer", [
    ("quickstart --data text:nowhere.txt", "nowhere.txt: no such file"),
    ("quickstart --data text:empty.txt", "empty.txt: the file is empty"),
    ("quickstart --data text:binary.txt", "binary.txt: not UTF-8 text (byte 0x80 at 128)"),
    ("quickstart --data text:short.txt", "one window needs 256"),
    ("quickstart --data text:letter.txt", "nothing is left for training"),
    ("prepare text:letter.txt new --tokenizer tok", "nothing is left for training"),
    ("prepare stories new --tokenizer tok --max-mb nan", "max_mb = nan, expected more than 0"),
    ("prepare stories new --tokenizer tok --valid-documents 0", "valid_documents = 0, expected 1 or more"),
    ("tokenizer stories new --vocab-size 100", "vocab_size = 100, expected at least 257"),
    ("tokenizer storys new", "did you mean 'stories'"),
    ("tokenizer stories tok", "tok exists"),
    ("prepare text:small.txt new --tokenizer nowhere", "nowhere: no tokenizer"),
    ("train data new --preset quickstrat", "did you mean 'quickstart'"),
    ("train data new --num-layer 2", "--num-layers"),
    ("train data new --num-heads 7", "d_model = 128 is not a multiple of num_heads = 7"),
    ("train data new --norm batch", "('rmsnorm', 'layernorm', 'none')"),
    ("train data new --context-length 1000000 --windows random", "one window needs 1,000,001"),
    ("train data new --device tpu", "device = 'tpu', expected auto, cpu, cuda or mps"),
    ("train data whole", "whole exists"),
    ("train nowhere new", "nowhere/train.json: no such file"),
    ("train other-tokenizer new", "made by another tokenizer"),
    ("train no-ngrams new", "no-ngrams/ngram.json"),
    ("train data new --d-model 10000000000 --num-heads 1", "not enough memory"),
    ("train data --resume whole", "takes no DATA and no OUT"),
    ("train cut new", "bytes, but train.json says"),
    ("train swapped new", "another file, or damaged"),
    ("train --resume data", "data: no run folder"),
    ("train --resume another", "d_model is 32 there, 64 here"),
    ("train --resume unknown", "unknown field of ModelConfig 'layers'"),
    ("train", "train needs DATA and OUT, or --resume RUN"),
    ("generate data", "data: no run folder"),
    ("generate whole --number 0", "number = 0, expected 1 or more"),
    ("generate not-weights", "not-weights: no model that can be read"),
    ("generate whole --temperature -1", "temperature = -1.0"),
    ("plot nowhere", "nowhere: no run folder"),
    ("no-such-command", "quickstart, tokenizer, prepare, train, generate, plot, account, bench"),
])
def test_a_mistake_is_one_line_and_leaves_nothing(broken, words, answer):
    before = sorted(broken.rglob("*"))
    done = lmcourse(*words.split(), cwd=broken)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith("lmcourse: ") and done.stderr.count("\n") == 1 and answer in done.stderr, done.stderr
    assert sorted(broken.rglob("*")) == before


def test_a_text_with_few_pairs_gives_a_smaller_vocabulary(broken, tmp_path):
    done = lmcourse("tokenizer", f"text:{broken/'small.txt'}", "few", cwd=tmp_path)
    assert done.returncode == 0 and not done.stderr and "merges and not for 1,791: the vocabulary has" in done.stdout
    assert (tmp_path/"few/tokenizer.json").exists()


@pytest.mark.parametrize("words", ["quickstart --minutes 1", "prepare stories new --tokenizer tok --max-mb 50"])
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_what_is_stopped_before_the_training_leaves_nothing(work, words, how):
    before = sorted(work.rglob("*"))
    process = start(*words.split(), cwd=work)
    deadline = time.time() + 60
    while sorted(work.rglob("*")) == before and time.time() < deadline: time.sleep(0.02)
    process.send_signal(how)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and err == "lmcourse: interrupted\n"
    assert sorted(work.rglob("*")) == before


def test_the_command_answers_before_torch_is_loaded():
    done = subprocess.run([sys.executable, "-c", "import sys, lmcourse.app.cli; sys.exit('torch' in sys.modules)"])
    assert done.returncode == 0


def test_quickstart_from_end_to_end(tmp_path):
    done = lmcourse("quickstart", "--minutes", 0.02, "--keep", "kept", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = tmp_path/"runs/quickstart-1"
    assert {p.name for p in run.iterdir()} == {"config.json", "metrics.jsonl", "loss.png", "samples.txt", "checkpoints", "data"}
    for words in ("1. Corpus", "2. Tokenizer", "3. Tokens on disk", "4. Model", "5. Cost", "6. Training", "floor", "n-grams", "everything is in"):
        assert words in done.stdout
    assert {p.name for p in (tmp_path/"kept").iterdir()} >= {"config.json", "model.safetensors", "vocab.json", "merges.txt"}
    made = json.loads((tmp_path/"kept/config.json").read_text())["made"]
    assert made["command"] == "lmcourse quickstart --data stories --minutes 0.02"
    story = lmcourse("generate", "kept", "--prompt", "Once", "--max-tokens", 5, cwd=tmp_path)
    assert story.returncode == 0 and story.stdout.startswith("Once")


def test_quickstart_on_a_text(tmp_path):
    (tmp_path/"book.txt").write_text("".join(f"On day {i} the {w} went to the {p} and came back late.\n"
                                             for i in range(300) for w, p in (("fox", "wood"), ("hen", "yard"), ("owl", "barn"))))
    done = lmcourse("quickstart", "--data", "text:book.txt", "--minutes", 0.02, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "no floor is known for this text" in done.stdout
