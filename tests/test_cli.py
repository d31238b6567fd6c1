"The command as a user runs it: tiny runs, mistakes, interruptions, in processes of their own where that matters."
import errno
import gc
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import weakref
from dataclasses import replace
from functools import partial
from importlib.resources import files
from types import SimpleNamespace

import pytest
from processes import here, lmcourse, wait_for

from lmcourse.accounting.hardware import Device
from lmcourse.app import alignment_commands, cli, commands, data_commands, generation_commands, quickstart, training_commands
from lmcourse.tokenization.tokenizer import Tokenizer
from lmcourse.tools.config import ModelConfig, TrainConfig
from lmcourse.tools.files import lock_file
from lmcourse.training.data import TokenDataset, unfinished

TINY = ("--context-length 64 --d-model 32 --num-layers 1 --windows random --eval-documents 5 "
        "--eval-every 40 --checkpoint-every 20 --log-every 5").split()


def start(*words, cwd):
    return subprocess.Popen([sys.executable, "-m", "lmcourse", *map(str, words)], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def without_compiler(*words, cwd):
    "The command, which fails if it has imported torch's compiler: that takes seconds."
    code = "import sys; from lmcourse.app import cli; cli.main(sys.argv[1:]); sys.exit(3*('torch._dynamo' in sys.modules))"
    return subprocess.run([sys.executable, "-c", code, *words], cwd=cwd, capture_output=True, text=True)


def write_days(path):
    "A small text of our own"
    path.write_text("".join(f"On day {i} the {w} went to the {p} and came back late.\n"
                            for i in range(300) for w, p in (("fox", "wood"), ("hen", "yard"), ("owl", "barn"))))


def metrics(run):
    lines = [json.loads(line) for line in (run/"metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in m.items() if k != "elapsed_s"} for m in lines]


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    "A folder with a tokenizer and prepared data."
    folder = tmp_path_factory.mktemp("work")
    for words in ("tokenizer stories tok --vocab-size 600 --max-mb 0.2", "prepare stories data --tokenizer tok --max-mb 0.3 --valid-documents 20"):
        done = here(*words.split(), cwd=folder)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def whole(work):
    "A run of 40 steps that nothing interrupted."
    done = here("train", "data", "whole", "--steps", 40, *TINY, cwd=work)
    assert done.returncode == 0, done.stderr
    return work/"whole"


def test_a_run_leaves_what_it_says(whole):
    assert {p.name for p in whole.iterdir()} == {"config.json", "metrics.jsonl", "loss.png", "samples.txt", "checkpoints"}
    assert (whole/"loss.png").read_bytes()[:4] == b"\x89PNG"
    final = metrics(whole)[-1]
    assert final["final"] and final["step"] == 40 and final["excess"] > 0


@pytest.mark.parametrize("rank", ["0", "1"])
def test_no_process_of_torchrun_touches_a_run_that_is_there(work, whole, monkeypatch, rank):
    "What fails after a run's folder was made takes the folder away. So each process asks for itself whether it is new."
    shutil.copytree(whole, work/f"kept-{rank}")
    for name, value in dict(RANK=rank, WORLD_SIZE="2").items(): monkeypatch.setenv(name, value)      # There is nobody to meet: no MASTER_ADDR
    assert here("train", "data", f"kept-{rank}", "--steps", 40, *TINY, cwd=work).returncode == 2
    assert metrics(work/f"kept-{rank}") == metrics(whole)


def test_the_same_command_gives_the_same_run(work, whole):
    done = without_compiler("train", "data", "same", "--steps", "40", *TINY, cwd=work)
    assert done.returncode == 0 and metrics(work/"same") == metrics(whole)
    other = here("train", "data", "other", "--steps", 40, *TINY, "--seed", 2, cwd=work)
    assert other.returncode == 0 and metrics(work/"other") != metrics(whole)


DYING = """
import os, sys
from lmcourse.app import cli
from lmcourse.training.trainer import Trainer
real = Trainer.train_step
def train_step(trainer, *batches):
    if trainer.step == 30: os.kill(os.getpid(), int(sys.argv.pop()))
    return real(trainer, *batches)
Trainer.train_step = train_step
cli.main(sys.argv[1:-1])
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, *(pytest.param(s, marks=pytest.mark.slow) for s in (signal.SIGINT, signal.SIGTERM))])
def test_an_interrupted_run_goes_on_bit_for_bit(work, whole, how):
    run = work/f"cut-{how.name}"
    died = subprocess.run([sys.executable, "-c", DYING, "train", "data", run.name, "--steps", "40", *TINY, str(int(how))], cwd=work, capture_output=True, text=True)
    if how == signal.SIGKILL: assert died.returncode == -how
    else: assert died.returncode == 130 and "lmcourse train --resume" in died.stderr and died.stderr.count("\n") == 1
    assert not any(m.get("final") for m in metrics(run))
    done = here("train", "--resume", run.name, cwd=work)
    assert done.returncode == 0, done.stderr
    assert metrics(run) == metrics(whole)
    weights = [sorted(r.glob("checkpoints/step_*"))[-1]/"model.safetensors" for r in (run, whole)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_generate_and_plot(work, whole):
    one, two = (command("generate", "whole", "--prompt", "Once", "--max-tokens", 20, "--seed", 3, cwd=work) for command in (here, lmcourse))
    assert one.returncode == 0 and one.stdout == two.stdout and one.stdout.startswith("Once")
    done = here("plot", "whole", "--out", "both.png", cwd=work)
    assert done.returncode == 0 and "nats per token" in done.stdout and (work/"both.png").exists()


def told(capsys, *words):
    cli.main(["generate", "--prompt", "Once", "--max-tokens", "16", *map(str, words)])
    return capsys.readouterr().out


def test_a_draft_changes_no_greedy_story(whole, capsys):
    "Not even one that knows little; without --temperature 0 it changes the draws, not their distribution."
    greedy = told(capsys, "--temperature", 0)
    assert greedy.startswith("Once") and told(capsys, "--temperature", 0, "--draft", files("lmcourse").joinpath("data/quickstart")) == greedy
    assert told(capsys, "--draft", files("lmcourse").joinpath("data/quickstart")).startswith("Once")
    with pytest.raises(SystemExit) as end: told(capsys, "--draft", whole)
    assert end.value.code == 2 and "its tokenizer is" in capsys.readouterr().err


def test_a_draft_guesses_and_the_large_model_checks(capsys, monkeypatch):
    speculate, seen = pytest.importorskip("lmcourse.inference.speculative").speculate, []
    def watched(model, draft, *args, **settings):
        seen.append((type(draft).__name__, settings["temperature"]))
        return speculate(model, draft, *args, **settings)
    monkeypatch.setattr("lmcourse.inference.speculative.speculate", watched)
    told(capsys)
    assert not seen
    told(capsys, "--temperature", 0.5, "--draft", files("lmcourse").joinpath("data/quickstart"))
    assert seen == [("DraftModel", 0.5)]


@pytest.mark.parametrize("kind", ["none", "int8"])
def test_a_server_has_a_draft_too(kind):
    "For quantized weights as well. Greedy answers are those without one, in fewer passes."
    from lmcourse.inference.draft_engine import DraftEngine
    from lmcourse.inference.engine import Request
    kept, answers, steps = files("lmcourse").joinpath("data/quickstart"), [], []
    for draft in (None, kept):
        service = generation_commands.ServeCommand(quantize=kind, draft=draft).service()
        try: engine = service.worker.make_engine()
        finally: service.worker.close()
        assert isinstance(engine, DraftEngine) == (draft is not None)
        request = Request(tuple(service.tokenizer.encode("Once")), 20, temperature=0.)
        answers.append(engine.run([request])[0].tokens)
        steps.append(engine.steps)
    assert answers[0] == answers[1] and steps[1] < steps[0]/2


def test_models_are_loaded_where_the_device_says(capsys, monkeypatch):
    torch, models = pytest.importorskip("torch"), pytest.importorskip("lmcourse.training.models")
    load, places, draft = models.load_model, [], files("lmcourse").joinpath("data/quickstart")
    monkeypatch.setattr("lmcourse.training.engines.pick_device", lambda name: torch.device(name))
    monkeypatch.setattr(models, "load_model", lambda folder=None, device="cpu", *more: (places.append(device), load(folder))[1])
    assert told(capsys, "--device", "cuda", "--draft", draft).startswith("Once") and places == ["cuda", "cuda"]
    generation_commands.ServeCommand(device="mps").service().worker.close()
    assert places[2:] == ["mps"]


def test_the_server_takes_the_model_that_fits_the_device(monkeypatch):
    pytest.importorskip("torch")
    from lmcourse.inference.draft_engine import DraftEngine
    from lmcourse.inference.engine import Engine, PagedModel
    from lmcourse.kernels import serving
    class Graphs(PagedModel): pass
    for kind in (PagedModel, Graphs):
        for draft, engine in ((None, Engine), (files("lmcourse").joinpath("data/quickstart"), DraftEngine)):
            service = generation_commands.ServeCommand(draft=draft).service()
            assert type(service.worker.engine) is engine and type(service.worker.engine.paged) is kind
            assert service.worker.engine.steps == 1            # its kernels are compiled before the first client comes
            assert service.worker.make_engine().steps == 1     # and those of an engine that replaces it after an error
            service.worker.close()
        monkeypatch.setattr(serving, "gpu_paged", lambda model: Graphs)


@pytest.mark.parametrize("kind, bits", [("int8", 8), ("int4", 4)])
def test_quantized_weights_write_what_they_stand_for(capsys, kind, bits):
    torch = pytest.importorskip("torch")
    from lmcourse.generation.generate import complete, prompt_ids
    from lmcourse.inference.engine import Engine, PackedLinear, Request
    from lmcourse.inference.fast_decoder import FastDecoder
    from lmcourse.inference.quantization import QuantizedLinear, quantize_fitting
    from lmcourse.training.models import load_model
    model, tokenizer = load_model()
    pack = partial(quantize_fitting, bits=bits)
    want = complete(model, tokenizer, "Once", 16, temperature=0, decoder=partial(FastDecoder, pack=pack))
    service = generation_commands.ServeCommand(quantize=kind).service()
    try:
        linears = [m for m in service.worker.engine.paged.model.modules() if isinstance(m, (torch.nn.Linear, PackedLinear, QuantizedLinear))]
        assert linears and all(isinstance(m, QuantizedLinear) and m.codes.bits == bits for m in linears)
        r = Request(tuple(prompt_ids(tokenizer, "Once")), 16, temperature=0., stop=(tokenizer.end_of_text,))
        assert tokenizer.decode(Engine(service.model).run([r])[0].tokens) == want
    finally: service.worker.close()
    assert told(capsys, "--temperature", 0, "--quantize", kind) == f"Once{want}\n\n"


def test_quantized_weights_have_a_product_on_the_cpu_only(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr("lmcourse.training.engines.pick_device", lambda name: torch.device(name))
    assert generation_commands.checked_device("cuda", "none") == "cuda" and generation_commands.checked_device("cpu", "int8") == "cpu"
    with pytest.raises(ValueError, match="quantize = int8 with device = cuda, expected cpu"): generation_commands.checked_device("cuda", "int8")
    monkeypatch.setattr(generation_commands, "compiles", lambda: False)
    assert generation_commands.checked_device("cpu", "none") == "cpu"
    with pytest.raises(ValueError, match="quantize = int4 with NUMBA_DISABLE_JIT = 1"): generation_commands.checked_device("cpu", "int4")


def test_serve_reads_the_run_s_chat_template(whole, tmp_path):
    for name in ("data", "whole"): subprocess.run(["cp", "-r", whole.parent/name, tmp_path], check=True)
    (tmp_path/"whole/chat_template.json").write_text('{"roles": {"user": {"prefix": "Q: "}}, "assistant_start": "A:"}')
    for folder, own in ((whole, False), (tmp_path/"whole", True), (None, False)):
        service = generation_commands.ServeCommand(folder=folder).service()
        assert service.chat_template.is_default != own and service.name == ("whole" if folder else "lmcourse")
        service.worker.close()


def test_the_model_that_comes_with_the_course_tells_a_story(tmp_path):
    done = lmcourse("generate", "--prompt", "Once there was", "--max-tokens", 30, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("Once there was a"), done.stderr
    folder = files("lmcourse").joinpath("data/quickstart")
    assert folder.joinpath("model.safetensors").stat().st_size < 2e6
    made = json.loads(folder.joinpath("config.json").read_text())["made"]
    assert made["command"].startswith("python tools/distillation_runs.py") and 0 < made["result"]["excess"] < 0.002


@pytest.fixture(scope="module")
def broken(work, whole):
    "Files and folders with something wrong."
    (work/"empty.txt").write_text("")
    (work/"binary.txt").write_bytes(bytes(range(256))*20)
    (work/"latin.txt").write_text("café\n"*100, encoding="latin-1")
    (work/"utf16.txt").write_text("café\n"*100, encoding="utf-16"), (work/"blank.txt").write_text(" \n\n")
    (work/"short.txt").write_text("a few words\nand a few more\n")
    (work/"letter.txt").write_text("a")
    (work/"same.txt").write_text("a line\n"*2)
    for name, text in (("begun", '{"corpus": "stories", "max_bytes": 1000000}\n'), ("foreign", "[3]")):
        (work/name).mkdir()
        (work/name/"prepare.part").write_text(text)
    write_days(work/"days.txt")
    assert here("prepare", "text:days.txt", "days-data", "--tokenizer", "tok", "--valid-documents", 3, cwd=work).returncode == 0
    (work/"answer.py").write_text("def split(text, special_tokens=()): return [text]\n")
    (work/"small.txt").write_text("".join(f"line {i} of a text that is too small for a window\n" for i in range(30)))
    for name in ("cut", "swapped", "other-tokenizer", "no-ngrams"): subprocess.run(["cp", "-r", "data", name], cwd=work, check=True)
    (work/"cut/train.bin").write_bytes((work/"data/train.bin").read_bytes()[:-100])
    assert here("tokenizer", "stories", "tok2", "--vocab-size", 500, "--max-mb", 0.1, cwd=work).returncode == 0
    subprocess.run("rm -r other-tokenizer/tokenizer no-ngrams/ngram.json; cp -r tok2 other-tokenizer/tokenizer", shell=True, cwd=work, check=True)
    subprocess.run(["cp", "-r", "whole", "chatty"], cwd=work, check=True)
    (work/"chatty/chat_template.json").write_text('{"roles": {"user": {}}, "assistant_start": "", "stop": "x"}')
    (work/"not-weights").mkdir()
    (work/"not-weights/model.safetensors").write_bytes(b"weights")
    (work/"not-weights/config.json").write_text((work/"whole/config.json").read_text())
    (work/"swapped/train.bin").write_bytes((work/"data/train.bin").read_bytes()[::-1])
    subprocess.run(["cp", "-r", "whole", "another"], cwd=work, check=True)
    config = json.loads((work/"another/config.json").read_text())
    config["model"]["d_model"], config["train"]["steps"] = 64, 80
    (work/"another/config.json").write_text(json.dumps(config))
    subprocess.run(["cp", "-r", "whole", "unknown"], cwd=work, check=True)
    subprocess.run(["cp", "-r", "another", "misfit"], cwd=work, check=True)
    config["model"]["layers"] = 3
    (work/"unknown/config.json").write_text(json.dumps(config))
    subprocess.run(["cp", "-r", "whole", "number"], cwd=work, check=True)
    (work/"number/metrics.jsonl").write_text('{"step": 5, "loss": 6.0}\n7\n')
    (work/"damaged.jsonl").write_text('{"key": \n')
    (work/"future.jsonl").write_text(json.dumps(dict(key="a", format=9, status="done", model={}, train={}, data={})) + "\n")
    return work


@pytest.mark.parametrize("words, answer", [
    ("quickstart --data text:nowhere.txt", "nowhere.txt: no such file"),
    ("quickstart --data text:empty.txt", "empty.txt: the file is empty"),
    ("quickstart --data empty.txt", "unknown corpus 'empty.txt': to read this file, say 'text:empty.txt'"),
    ("tokenizer text:data new", "data/train.bin: a binary file"),
    ("quickstart --data text:binary.txt", "binary.txt: a binary file (a zero byte at 0)"),
    ("quickstart --data text:short.txt", "one window needs 256: take a longer text"),
    ("quickstart --data text:letter.txt", "nothing is left for training"),
    ("prepare text:letter.txt new --tokenizer tok", "nothing is left for training"),
    ("prepare stories new --tokenizer tok --max-mb nan", "max_mb = nan, expected more than 0"),
    ("tokenizer stories new --max-mb 1e10", "max_mb = 1e+10, expected more than 0 and at most 1e9"),
    ("quickstart --minutes 1e7", "minutes = 1e+07, expected more than 0 and at most 1e6"),
    ("scale nowhere", "nowhere: no such file"),
    ("scale tok", "tok: is a directory"),
    ("prepare stories new --tokenizer tok --valid-documents 0", "valid_documents = 0, expected 1 or more"),
    ("prepare stories new --tokenizer tok --threads 0", "threads = 0, expected 1 or more"),
    ("prepare stories data --tokenizer tok", "data exists"),
    ("prepare text:same.txt new --tokenizer tok", "nothing is left for training"),
    ("prepare stories begun --tokenizer tok --max-mb 2", "begun: begun with max_bytes = 1000000, here 2000000"),
    ("prepare stories foreign --tokenizer tok", "not written by `lmcourse prepare`"),
    ("tokenizer stories new --vocab-size 100", "vocab_size = 100, expected at least 257: 256 bytes and 1 special token\n"),
    ("tokenizer stories new --vocab-size 1000000000", "vocab_size = 1,000,000,000, expected at most 4,000,257: 4,000,000 bytes of text (max_mb = 4)"),
    ("check", "check needs EXERCISE (say 03.rope; or a chapter, say 03, for all exercises that FILE answers) and FILE (a Python file or a notebook; or a folder with a file for each exercise): lmcourse check EXERCISE FILE\n"),
    ("check 01", "check needs FILE (a"), ("prepare stories new", "prepare needs --tokenizer PATH (folder that `lmcourse tokenizer` wrote): lmcourse prepare CORPUS OUT --tokenizer PATH\n"), ("prepare stories tok new", "prepare needs --tokenizer PATH (folder that `lmcourse tokenizer` wrote): lmcourse prepare CORPUS OUT --tokenizer PATH\n"),
    ("scale", "scale needs RUNS (JSON lines"), ("completion", "completion needs SHELL (bash, zsh or fish): lmcourse completion SHELL\n"),
    ("train data new --steps", "--steps needs a value\n"), ("train data new --steps 1e3", "--steps = 1e3, expected a whole number\n"), ("generate --temperature hot", "--temperature = hot, expected a number\n"),
    ("tokenizer --vocabsize 500 stories new", "unknown option '--vocabsize': did you mean '--vocab-size'?\n"), ("doctor --x", "doctor: unknown --x; see lmcourse doctor --help\n"),
    ("prepare stories new --tokeniser tok", "unknown option '--tokeniser': did you mean '--tokenizer'?\n"), ("curate -x a", "unknown option '-x': there are --dask, --recipe, --workers\n"),
    ("bench loop --nope", "bench loop: unknown --nope; see lmcourse bench loop --help\n"),
    ("serve --host nowhere.invalid", "lmcourse: port 8000 of nowhere.invalid can't be used (no such name); name another with --host\n"),
    ("serve --host=", "host is empty; 127.0.0.1 is this machine, 0.0.0.0 all networks\n"),
    ("generate whole /data/of/mine/Documents/texts/2024/a-collection-of-short-stories.txt", "generate: unknown /data/of/mine/Documents/texts/2024/a-collection-of-short-stories.txt; see lmcourse generate --help\n"),
    ("generate whole another", "generate: unknown another; see lmcourse generate --help\n"),
    ("quickstart stories", "quickstart: did you mean --data stories?"), ("quickstart days.txt", "quickstart: did you mean --data text:days.txt?"),
    ("train days-data new --windows documents", "windows at the starts of documents reach 1.3% of"),
    ("tokenizer storys new", "did you mean 'stories'"),
    ("tokenizer stories tok", "tok exists"),
    ("prepare text:small.txt new --tokenizer nowhere", "nowhere: no tokenizer"),
    ("train data new --preset quickstrat", "did you mean 'quickstart'"),
    ("train data new --num-layer 2", "--num-layers"),
    ("train data new --num-heads 7", "d_model = 128 is not a multiple of num_heads = 7"),
    ("train data new --norm batch", "('rmsnorm', 'layernorm', 'none')"),
    ("train data new --context-length 200000 --batch-size 1 --num-layers 1 --d-model 16 --windows random", "one window needs 200,001"),
    ("train data new --device tpu", "device = 'tpu', expected auto, cpu, cuda or mps"),
    ("train data whole", "whole exists"),
    ("train nowhere new", "nowhere is no folder that `lmcourse prepare` has finished"),
    ("train data new --vocab-size 5000", "leave the option out, the tokenizer decides"),
    ("train data new --batch-size 100000", "of memory, and this machine has"),
    ("train data new --learning-rate 1", "train: did you mean --lr?"),
    ("train data new --max-steps 100", "train: did you mean --steps?"),
    ("curate small.txt new", "curate needs --recipe PATH (steps and their options, .toml or .json; an example: nbs/results/recipe.toml)"),
    ("plot number", "number/metrics.jsonl: line 2 is 7, expected an object"),
    ("train --resume number", "number/metrics.jsonl: line 2 is 7, expected an object"),
    ("tokenizer stories /proc/new", "/proc"),                        # Where even root can't make a folder
    ("account gpt2-xl", "did you mean --preset gpt2-xl?"),
    ("plan --gpus 8", "doesn't fit on 8 h100: the smallest plan needs"),
    ("plan --model llama4", "unknown model 'llama4'"),
    ("plan --gpu h10", "did you mean 'h100'?"),
    ("plan --gpu a100", "did you mean 'a100-80gb' or 'a100-40gb'?"),
    ("exercises 55", "there are 01, 02, 03, 04, 05, 06, 07, 08, "),
    ("plot whole --out nowhere/loss.png", "nowhere: no such folder"),
    ("train other-tokenizer new", "made by another tokenizer"),
    ("train no-ngrams new", "no-ngrams/ngram.json"),
    ("train data new --d-model 10000000000 --num-heads 1", "even one window does not fit"),
    ("train data new --d-model 10000000000 --num-heads 1 --engine numpy", "not enough memory"),
    ("train data --resume whole", "takes no DATA and no OUT"),
    ("train --resume whole --steps 40", "train --resume whole takes no --steps"),
    ("sft --resume whole --slip 0.1", "sft --resume whole takes no --slip"),
    ("rl --resume whole --micro-batch 2", "rl --resume whole takes no --micro-batch"),
    *((f"{kind} new --init-from whole --{name} {value}", f"{kind} takes no --{name}") for kind in ("sft", "dpo", "rl")
      for name, value in (("windows", "documents"), ("stride", 3), ("tokens-per-step", 512))),
    ("rl new --init-from whole --batch-size 8", "rl takes no --batch-size"),
    ("sft --resume whole", "whole: a run of `lmcourse train`; go on with lmcourse train --resume whole"),
    ("generate --stop . whole", "--stop takes all words after it, and whole is a run"),
    ("generate whole --prompt \udcff", "half of a surrogate pair"),
    ("quickstart --out new --keep new", "keep = new would hold the run new"),
    ("train cut new", "bytes, but train.json says"),
    ("train swapped new", "another file, or damaged"),
    ("train --resume data", "data: no run folder"),
    ("train --resume another", "d_model is 32 there, 64 here"),
    ("train --resume unknown", "unknown field of ModelConfig 'layers'"),
    ("train", "train needs DATA and OUT, or --resume RUN"),
    ("train . new", "did you mean data?"), ("-v", "name a command before -v; `lmcourse --help` lists them"),
    ("generate data", "data: no run folder"),
    ("generate whole --number 0", "number = 0, expected 1 or more"),
    ("generate not-weights", "not-weights: no model that can be read"),
    ("generate whole --temperature -1", "temperature = -1.0"),
    ("generate whole --device banana", "device = 'banana', expected auto, cpu, cuda or mps"),
    ("generate whole --quantize int3", "'int8', 'int4'"),
    ("generate whole --draft nowhere", "nowhere: no such file or folder"),
    ("generate whole --draft whole --repetition-penalty 1.1", "draft and repetition_penalty can't go together"),
    ("plot nowhere", "nowhere: no such file or folder"),
    ("plot whole --width 1", "width = 1, expected 2 to 1000"),
    ("plot whole --height 0", "height = 0, expected 2 to 1000"),
    ("smoke --seed -1", "seed = -1, expected 0 or more"),
    ("doctor data", "data: no run folder"),
    ("doctor not-weights", "not-weights"),
    ("ablate learning-rat", "did you mean 'learning-rate'?"),
    ("ablate head --scale tiny", "('small', 'full')"),
    ("ablate head --tokens 500", "a budget of 500 tokens is smaller than one step, which takes 512"),
    ("ablate head --corpus storys", "did you mean 'stories'?"),
    ("ablate head --seeds -1", "seed = -1, expected 0 or more"),
    ("ablate head --processes 0", "processes = 0, expected 1 or more"),
    ("ablate head --device tpu", "device = 'tpu', expected auto, cpu, cuda or mps"),
    ("speedrun rase", "('race', 'changes', 'grid', 'quickstart', 'longer', 'whole', 'bfloat16')"),
    ("speedrun --seeds 0", "seeds = 0, expected 1 or more"),
    ("speedrun --minutes 0", "minutes = 0.0, expected a finite number above 0"),
    ("speedrun --mark nan", "mark = nan, expected a finite number above 0"),
    ("speedrun grid --out damaged.jsonl", "damaged.jsonl, line 1: not JSON"),
    ("speedrun --out short.txt/new.jsonl", "short.txt"),
    ("speedrun --work short.txt/work", "short.txt"),
    ("speedrun --work short.txt", "short.txt is a file, expected a folder"),
    ("ablate head --out damaged.jsonl", "damaged.jsonl, line 1: not JSON"),
    ("ablate head --out future.jsonl", "future.jsonl, line 1: format 9, but this version reads 1"),
    ("plot whole --out loss.xyz", "loss.xyz is no name of a picture"), ("scale tok --out .", ". is no name of a picture"),
    ("tokenizer stories short.txt/tok", "short.txt"),
    ("prepare stories short.txt/new --tokenizer tok --max-mb 0.05", "short.txt"),
    ("train data short.txt/new", "short.txt"),
    ("quickstart --out short.txt/new", "short.txt"),
    ("ablate head --work short.txt", "short.txt is a file, expected a folder"),
    ("ablate head --out short.txt/new.jsonl --work new", "short.txt"),
    ("check 01.split answer.py --progress short.txt/new.json", "short.txt"),
    ("train data new --lr inf", "lr = inf, expected a finite number"),
    ("train data new --device banana", "device = 'banana', expected auto, cpu, cuda or mps"),
    ("train data new --micro-batch 3 --batch-size 8", "8 is not a multiple of 3"),
    ("doctor misfit", "misfit: the weights don't fit the config"),
    ("serve whole --max-tokens 0", "max_tokens = 0, expected 1 or more"),
    ("serve whole --max-running 1000", "max_running = 1000 and token_budget = 256"),
    ("serve whole --port 0", "port = 0, expected 1 to 65535"),
    ("serve whole --device banana", "device = 'banana', expected auto, cpu, cuda or mps"),
    ("serve whole --quantize int3", "'int8', 'int4'"), ("serve whole --draft nowhere", "nowhere"),
    ("serve whole --drafts whole", "--drafts"), ("serve --draft whole", "its tokenizer is"),
    ("serve chatty", "chat_template.json: stop = 'x', expected a list of texts"),
    ("bench training --rounds 0", "rounds = 0, expected 1 or more"),
    ("bench loop --only faster", "no variant 'faster'"),
    ("bench generation --models 1T", "unknown model '1T'"),
    ("check 01.split nowhere.py", "nowhere.py: no such file"),
    ("check 01.split small.txt", "expected a file that ends in .py or .ipynb"),
    ("exercises 01 --progress damaged.jsonl", "damaged.jsonl: no progress file"),
    ("prepare text:latin.txt new --tokenizer tok", "latin.txt: not UTF-8 text (byte 0xe9 at 3), expected UTF-8: save it so in your editor, or for LATIN1 iconv -f LATIN1 -t UTF-8 latin.txt > new.txt\n"),
    ("tokenizer text:empty.txt new", "empty.txt: the file is empty\n"), ("tokenizer text:blank.txt new", "blank.txt: the file has only blank lines\n"),
    ("tokenizer text:utf16.txt new", "utf16.txt: UTF-16 text, expected UTF-8: save it so"),
    ("no-such-command", "unknown command 'no-such-command': there are ablate, account, bench, chat, check, completion, curate, doctor, "),
    ("trian", "did you mean 'train'?"),
    ("", "name a command, say `lmcourse quickstart`; `lmcourse --help` lists them"),
])
def test_a_mistake_is_one_line_and_leaves_nothing(broken, monkeypatch, capsys, words, answer):
    before = sorted(broken.rglob("*"))
    monkeypatch.chdir(broken)
    with pytest.raises(SystemExit) as end: cli.main(words.split())
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.startswith("lmcourse: ") and said.count("\n") == 1 and answer in said, said
    assert sorted(broken.rglob("*")) == before


def raises(error):
    def planted(*args, **more): raise error
    return planted


def test_a_model_that_does_not_fit_is_never_made(work, monkeypatch):
    monkeypatch.setattr("lmcourse.training.trainer.Trainer", raises(AssertionError("made")))
    monkeypatch.setattr(training_commands, "memory_bytes", lambda: 8*2**30)
    done = here("train", "data", "new", "--preset", "quickstart", "--batch-size", 100_000, "--micro-batch", 50_000, cwd=work)
    assert done.returncode == 2 and "of memory, and this machine has" in done.stderr
    with pytest.raises(AssertionError, match="made"): here("train", "data", "new", "--batch-size", 100_000, "--micro-batch", 1, cwd=work)
    assert not (work/"new").exists()


def test_a_run_that_does_not_fit_on_this_machine_is_not_resumed(broken, monkeypatch):
    monkeypatch.setattr(training_commands, "memory_bytes", lambda: 2**20)
    done = here("train", "--resume", "another", cwd=broken)
    assert done.returncode == 2 and "this machine has 1.05 MB; even one window does not fit" in done.stderr, done.stderr


@pytest.mark.parametrize("words, place", [
    ("plot whole --out new.png", "training.plots.plot_runs"), ("scale damaged.jsonl --out new.png", "scaling.fit_runs.read_scaling_runs"),
    ("eval --tasks recall --stories 2 --out new.md", "training.models.load_model"), ("bench training --out new.json", "app.bench_training._all_lines"),
    ("bench kernels --out new.json", "kernels.use._bench_lines"), ("train data new", "training.trainer.Trainer")])
def test_a_result_that_can_not_be_saved_is_told_before_any_work(broken, monkeypatch, words, place):
    "On a read-only disk, say, where the rights of the folder look well."
    monkeypatch.setattr("tempfile.TemporaryFile", raises(OSError(30, "Read-only file system")))
    monkeypatch.setattr(f"lmcourse.{place}", raises(AssertionError("begun")))
    done = here(*words.split(), cwd=broken)
    assert done.returncode == 2 and not done.stdout and "can't be written" in done.stderr and done.stderr.count("\n") == 1


def test_a_command_to_copy_is_quoted(tmp_path):
    (tmp_path/"my book.jsonl").write_text('{"text": "one two"}\n')
    (tmp_path/"r.toml").write_text('[[steps]]\nstep = "exact"\n')
    assert "did you mean --data 'hf:my book.jsonl'?" in here("quickstart", "my book.jsonl", cwd=tmp_path).stderr
    said = here("curate", "my book.jsonl", "my out", "--recipe", "r.toml", cwd=tmp_path).stdout
    assert "lmcourse prepare 'curated:my out' DATA --tokenizer FOLDER\n" in said


def test_a_folder_that_is_gone_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "getcwd", raises(FileNotFoundError(2, "No such file or directory")))
    with pytest.raises(SystemExit) as end: cli.main(["plot", "run"])
    assert end.value.code == 2 and capsys.readouterr().err == "lmcourse: the current folder has been removed\n"


def test_an_error_of_the_system_has_no_number():
    assert commands.plain_words(OSError(28, "No space left on device")) == "no space left on device"
    assert commands.plain_words(OSError(21, "Is a directory", "x")) == "x: is a directory" and commands.plain_words(OSError("x: no such file")) == "x: no such file"


def test_who_begins_with_the_course_s_model_is_not_told_of_new_weights():
    assert "--init-from" in (said := here("sft", "--help", cwd=".").stdout) and "new weights" not in " ".join(said.split())


def test_the_address_of_ipv6_has_brackets(monkeypatch, capsys):
    pytest.importorskip("uvicorn")
    def served(service, host, port, greet, *more): greet(); service.worker.close()
    monkeypatch.setattr("lmcourse.app.serve.run_server", served)
    monkeypatch.setattr(generation_commands, "_check_address", lambda host, port: None)
    cli.main(["serve", "--host", "::1"])
    assert "http://[::1]:8000/v1" in capsys.readouterr().out


def test_ctrl_c_is_quiet_from_the_first_moment():
    code = ("import sys\nclass Finder:\n    def find_spec(self, name, *more):\n        if name == 'lmcourse.app.cli': raise KeyboardInterrupt\n"
            "sys.meta_path.insert(0, Finder())\nfrom lmcourse.__main__ import main\nsys.exit(main())")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("words, own, foreign", [
    ("generate --promt x", "generate: unknown --promt x; did you mean --prompt STR, Beginning of each text", "--prompts"), ("chat --quantise int8", "--quantize {none,int8,int4}", "lmcourse"),
    ("sft a --promt x", "sft: unknown --promt x; see lmcourse sft --help", "meant"), ("bench loop --round 3", "--rounds INT", "(default: 3)"),
    ("train --num-layer 3 --promptt 4", "unknown --num-layer 3 --promptt 4; did you mean --num-layers INT", "--prompt ")])
def test_a_mistyped_option_is_compared_with_those_of_its_command(words, own, foreign):
    said = here(*words.split(), cwd=".").stderr.removeprefix("lmcourse: ")
    assert own in said and foreign not in said


def test_help_without_dashes_is_help_too():
    for words, same in (("help", "--help"), ("help plot", "plot --help")):
        done = here(*words.split(), cwd=".")
        assert done.returncode == 0 and done.stdout == here(*same.split(), cwd=".").stdout


@pytest.mark.parametrize("words", ["no-such-command", "generate not-weights"])   # Before torch is loaded, and after
def test_a_mistake_ends_the_process_with_2(broken, words):
    before = sorted(broken.rglob("*"))
    done = lmcourse(*words.split(), cwd=broken)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith("lmcourse: ") and done.stderr.count("\n") == 1, done.stderr
    assert sorted(broken.rglob("*")) == before


# A command, and what it calls when all that a user gives has been looked at
WORK = {
    "tokenizer stories new-tok --vocab-size 300 --max-mb 0.05": "lmcourse.tokenization.tokenizer.train_bpe",
    "prepare stories new-data --tokenizer tok --max-mb 0.05 --valid-documents 2": "lmcourse.training.data.write_tokens",
    "prepare stories newer-data --tokenizer tok --max-mb 0.05 --valid-documents 2": "lmcourse.training.data.count_ngrams",
    "train data new-run --steps 2 " + " ".join(TINY): "lmcourse.training.trainer.Trainer.train_step",
    "train data newer-run --steps 2 " + " ".join(TINY): "lmcourse.app.training_commands.cost_lines",
    "train --resume cut-here": "lmcourse.training.trainer.Trainer.train_step",
    "quickstart --minutes 0.01 --out new-quick": "lmcourse.training.trainer.measure_step",
    "generate whole": "lmcourse.inference.fast_decoder.NumpyDecoder.compute",
    "plot whole --out new.png": "lmcourse.training.plots.plot_runs",
    "doctor whole": "lmcourse.ablations.doctor.check_forward",
    "account": "lmcourse.accounting.account.training_flops",
    "plan --model llama-3-8b --gpus 64": "lmcourse.parallelism.planner.plan_tables",
    "ablate biases --corpus text:days.txt --tokens 3072 --seeds 0 --out new.jsonl --work new-work": "lmcourse.ablations.sweep._run_all",
    "speedrun changes --seeds 1 --out new.jsonl --work new-work": "lmcourse.ablations.speedrun.prepare_corpus",
    "serve --port 0": "lmcourse.app.serve.make_server",
    "smoke": "lmcourse.architecture.fast_np.fast_loss_and_grads",
    "bench tokenizer": "lmcourse.app.bench.write_corpus",
    "bench training": "lmcourse.app.bench_training.open_contenders",
    "bench loop": "lmcourse.app.throughput._process",
    "bench generation": "lmcourse.app.bench_generation.measure_writing",
    "exercises": "lmcourse.app.grade.chapter_lines",
    "check 01.split answer.py --progress new.json": "lmcourse.app.grade.note_verdict",
}


@pytest.fixture
def runs(broken, whole, monkeypatch):
    "The folder of the runs, with one that can go on and a file with an answer; what a test adds to it is taken away."
    if not (broken/"cut-here").exists():
        shutil.copytree(whole, broken/"cut-here")
        config = json.loads((whole/"config.json").read_text())
        config["train"]["steps"] = 80
        (broken/"cut-here/config.json").write_text(json.dumps(config))
    before = set(broken.iterdir())
    monkeypatch.chdir(broken)
    monkeypatch.setattr(generation_commands, "_check_address", lambda host, port: None)
    yield broken
    for new in set(broken.iterdir()) - before: shutil.rmtree(new) if new.is_dir() else new.unlink()


@pytest.mark.parametrize("words, place", WORK.items(), ids=[f"{w.split(' -')[0]}: {p.split('.')[-1]}" for w, p in WORK.items()])
@pytest.mark.parametrize("error", [ValueError("operands could not be broadcast"), FileNotFoundError("no shard 3")], ids=["ValueError", "OSError"])
def test_a_bug_shows_where_it_is(runs, monkeypatch, words, place, error):
    "What is raised in the midst of the work is no mistake of the user's, whatever its type."
    monkeypatch.setattr(place, raises(error))
    words = words.replace("--port 0", "--port 8000").split()
    with pytest.raises(type(error)) as found: cli.main(words)
    assert found.value is error


@pytest.mark.parametrize("words, module", [
    ("check 01.split answer.py", "grade"), ("grade 01 . new.csv", "grade"), ("exercises", "grade"), ("exercises 03", "grade"), ("bench tokenizer", "bench"),
    ("bench training", "bench_training"), ("bench loop", "throughput"), ("bench generation", "bench_generation")])
def test_a_release_says_how_to_get_the_graders_and_benches(monkeypatch, tmp_path, words, module):
    monkeypatch.setitem(sys.modules, f"lmcourse.app.{module}", None)
    done = here(*words.split(), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"lmcourse: lmcourse.app.{module} is not in a release") and "pip install 'lmcourse @ git+https://" in done.stderr


def test_a_bug_ends_the_command_with_a_traceback(runs):
    code = ("from lmcourse.ablations import doctor; from lmcourse.app import cli\n"
            "def planted(case): return int('no number')\n"
            "doctor.CHECKS = (planted,); cli.main(['doctor', 'whole'])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback (most recent call last)" in done.stderr and ", in planted" in done.stderr
    assert done.stderr.endswith("ValueError: invalid literal for int() with base 10: 'no number'\n")


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
def test_an_output_of_few_characters_is_no_mistake(tmp_path, encoding):
    "Windows encodes an output that goes into a file as cp1252, which has no lines for tables."
    done = subprocess.run([sys.executable, "-m", "lmcourse", "account"], cwd=tmp_path, capture_output=True, env=os.environ | dict(PYTHONIOENCODING=encoding))
    assert done.returncode == 0 and b"?" in done.stdout and not done.stderr


def test_a_closed_output_is_no_mistake(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    cli.main(["exercises", "01"])


def test_one_process_at_a_time_trains_a_run(runs, capsys, monkeypatch):
    "The second one changes nothing before it asks."
    monkeypatch.setattr("lmcourse.training.trainer.Trainer.resume", lambda *_: pytest.fail("files were touched"))
    with open("cut-here/config.json", "rb+") as file:
        lock_file(file)                                       # As another process would
        with pytest.raises(SystemExit) as end: cli.main(["train", "--resume", "cut-here"])
    assert end.value.code == 2 and "another process is writing these files" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["train data whole --steps 2", "sft whole --steps 2", "quickstart --data text:days.txt --out whole --minutes 0.02", "tokenizer text:days.txt whole --vocab-size 300"])
def test_who_comes_second_leaves_the_folder_of_the_first(broken, monkeypatch, capsys, words):
    "Another process has made the folder after this one found it free."
    content = lambda: {p: p.read_bytes() for p in (broken/"whole").rglob("*") if p.is_file()}
    before = content()
    monkeypatch.chdir(broken)
    for module in (data_commands, training_commands, alignment_commands): monkeypatch.setattr(module, "refuse_existing", lambda folder: None)
    with pytest.raises(SystemExit) as end: cli.main(words.split())
    said = capsys.readouterr().err
    assert end.value.code == 2 and "exists" in said and said.count("\n") == 1 and content() == before, said


def test_a_failure_removes_its_own_folder_and_no_neighbour(tmp_path):
    for neighbour in (False, True):
        with pytest.raises(KeyboardInterrupt), commands.all_or_nothing(tmp_path/"runs/deep/one"):
            (tmp_path/"runs/deep/one").mkdir(parents=True)
            if neighbour: (tmp_path/"runs/two").mkdir()
            raise KeyboardInterrupt
        assert [str(p.relative_to(tmp_path)) for p in sorted(tmp_path.rglob("*"))] == ["runs", "runs/two"]*neighbour


def test_ctrl_c_too_often_shows_no_traceback():
    code = ("import atexit, os, signal, sys, lmcourse.app.cli as cli\nfrom lmcourse.__main__ import main\ndef stop(*_): os.kill(os.getpid(), signal.SIGINT)\n"
            "atexit.register(stop)\ncli.main = {}\nsys.exit(main())")
    for command, status in (("lambda: 2", 2), ("stop", 130)):
        done = subprocess.run([sys.executable, "-c", code.format(command)], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (status, ""), done.stderr


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), PermissionError(13, "Permission denied"), TimeoutError("the hub is slow"), ConnectionResetError("the hub is gone")], ids=repr)
def test_trouble_outside_is_one_line_whenever_it_comes(runs, monkeypatch, capsys, error):
    monkeypatch.setattr("lmcourse.training.trainer.Trainer.train_step", raises(error))
    with pytest.raises(SystemExit) as end: cli.main(["train", "--resume", "cut-here"])
    said = error.strerror[0].lower() + error.strerror[1:] if error.strerror else str(error)
    assert end.value.code == 2 and capsys.readouterr().err == f"lmcourse: {said}\n"


def test_a_run_that_diverges_is_told_in_one_line(work, tmp_path):
    done = here("train", "data", tmp_path/"run", "--steps", 60, *TINY, "--lr", 1e30, "--warmup-steps", 0, "--grad-clip", 0, cwd=work)
    assert done.returncode == 2 and done.stderr.startswith("lmcourse: step ") and "the loss is" in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_what_the_command_tells_is_a_value_error_for_others():
    from lmcourse.tools.config import UserError
    assert issubclass(UserError, ValueError)
    for error in (OSError("no file"), ValueError("no number"), FileExistsError("there")):
        with pytest.raises(UserError, match=str(error)) as found, commands.checking_input(): raise error
        assert found.value.__cause__ is error
    for error in (KeyError("a bug"), KeyboardInterrupt(), ConnectionError("gone"), UserError("already")):
        with pytest.raises(type(error)) as found, commands.checking_input(): raise error
        assert found.value is error


def test_a_text_with_few_pairs_gives_a_smaller_vocabulary(broken, tmp_path):
    done = here("tokenizer", f"text:{broken/'small.txt'}", "few", cwd=tmp_path)
    assert done.returncode == 0 and not done.stderr and "merges, not 1,791, so the vocabulary has" in done.stdout
    assert (tmp_path/"few/tokenizer.json").exists()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_quickstart_that_is_stopped_before_the_training_leaves_nothing(work, how):
    before, top = sorted(work.rglob("*")), set(work.iterdir())
    process = start(*"quickstart --minutes 1".split(), cwd=work)
    wait_for(lambda: set(work.iterdir()) != top or process.poll() is not None)
    process.send_signal(how)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130 and err == "lmcourse: interrupted\n"
    assert sorted(work.rglob("*")) == before


PREPARE = "prepare text:corpus.txt {} --tokenizer long-words --max-mb 100 --valid-documents 20 --threads 1"


def contents(folder):
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


@pytest.fixture(scope="module")
def corpus(work):
    "Documents of 10 MB in all, tokenized in three batches, and what one uninterrupted call makes of them."
    words = "uncharacteristically incomprehensibilities counterrevolutionaries "   # a token each, so that there are few to count
    (work/"corpus.txt").write_text("<|endoftext|>".join(f"Day {i}: " + words*20 for i in range(8000)))
    for line in ("tokenizer text:corpus.txt long-words --vocab-size 320 --max-mb 0.1", PREPARE.format("uncut")):
        done = here(*line.split(), cwd=work)
        assert done.returncode == 0, done.stderr
    return contents(work/"uncut")


@pytest.mark.parametrize("how, when", [(signal.SIGTERM, "train.json.part"), (signal.SIGKILL, "prepare.part"), (signal.SIGKILL, "train.json.part"),
                                       (signal.SIGKILL, "train.json")])
def test_an_interrupted_prepare_goes_on(work, corpus, how, when):
    words = PREPARE.format(f"{how.name}-{when}").split()
    out = work/words[2]
    process = start(*words, cwd=work)
    there = lambda: (out/when).exists() and (out/"prepare.part").stat().st_size   # an empty note is one that nothing was begun for
    wait_for(lambda: there() or process.poll() is not None)
    process.send_signal(how)
    _, err = process.communicate(timeout=300)
    if how == signal.SIGKILL: assert process.returncode == -how
    else: assert process.returncode == 130 and err == "lmcourse: interrupted; go on with the same command\n"
    assert (out/"prepare.part").exists()
    cut = unfinished(out/"train")
    done = here(*words, cwd=work)
    assert done.returncode == 0 and not done.stderr and f"{out.name}: going on" in done.stdout, done.stderr
    assert not cut or f"going on after {cut['documents']:,} training documents" in done.stdout
    assert contents(out) == corpus
    assert here(*words, cwd=work).stderr.count("exists; name a folder that does not") == 1


@pytest.mark.parametrize("when", ["train.json.part", "valid.json"])
def test_two_prepares_of_one_folder_do_not_meet(work, corpus, when):
    both = work/f"both-{when}"
    words = PREPARE.format(both.name).split()
    first = start(*words, cwd=work)
    wait_for(lambda: (both/when).exists() or first.poll() is not None)
    first.send_signal(signal.SIGSTOP)
    second = here(*words, cwd=work)
    first.send_signal(signal.SIGCONT)
    assert second.returncode == 2 and "another process is writing these files" in second.stderr
    first.communicate(timeout=300)
    assert first.returncode == 0 and contents(both) == corpus


def failing(error, after):
    "Documents of which one cannot be had."
    def documents(name, split="train", max_bytes=None):
        for i in range(210):
            if split == "train" and i == after: raise error
            yield f"{split} {i}: " + "a bird sat on the wall "*2000
    return documents


@pytest.mark.parametrize("error, left", [(ConnectionResetError("the hub can't be reached"), True), (TimeoutError("too slow"), True), (KeyboardInterrupt(), True),
                                         (OSError(28, "No space left on device"), False), (ValueError("no such column"), False)])
def test_what_fails_leaves_nothing_and_what_is_cut_off_goes_on(work, tmp_path, monkeypatch, capsys, error, left):
    words = ["prepare", "hf:a/b", str(tmp_path/"new/out"), "--tokenizer", str(work/"tok"), "--max-mb", "100", "--valid-documents", "9"]
    monkeypatch.setattr("lmcourse.training.data.count_ngrams", lambda *args: None)          # they take the longest
    monkeypatch.setattr(commands, "documents", failing(error, 200))
    with pytest.raises(SystemExit): cli.main(words)
    err = capsys.readouterr().err
    assert (tmp_path/"new").exists() == left and err.endswith("; go on with the same command\n") == left and err.count("\n") == 1
    assert (getattr(error, "strerror", None) or str(error) or "interrupted").lower() in err.lower()
    monkeypatch.setattr(commands, "documents", failing(error, None))
    cli.main(words)
    assert ("going on after" in capsys.readouterr().out) == left
    words[2] = str(tmp_path/"uncut")
    cli.main(words)
    assert contents(tmp_path/"new/out") == contents(tmp_path/"uncut")


def test_prepare_holds_few_documents_and_leaves_out_those_for_validation(work, tmp_path, monkeypatch):
    class Document(str):
        alive = most = 0
        def __new__(cls, text):
            cls.alive += 1
            cls.most = max(cls.most, cls.alive)
            return super().__new__(cls, text)
        def __del__(self): type(self).alive -= 1

    text = "a bird sat on the wall "*2000
    def documents(name, split="train", max_bytes=None):
        return (f"{i} {text}" for i in range(5, 8)) if split == "valid" else (Document(f"{i} {text}") for i in range(700))

    monkeypatch.setattr("lmcourse.training.data.count_ngrams", lambda *args: None)
    monkeypatch.setattr(commands, "documents", documents)
    data_commands.prepare("hf:a/b", tmp_path/"out", tokenizer := Tokenizer.from_folder(work/"tok"), 10**9, 400, 1)
    train, valid = (TokenDataset.open(tmp_path/"out"/name) for name in ("train", "valid"))
    assert (train.num_documents, valid.num_documents) == (697, 3) and Document.most < 500
    assert [tokenizer.decode(train.document(i)[:20].tolist()).split()[0] for i in (4, 5)] == ["4", "8"]


def test_a_plan_says_which_model_it_is_for(capsys):
    cli.main(["plan", "--model", "gpt2-xl", "--gpus", "1", "--batch-tokens", "8192"])
    assert capsys.readouterr().out.startswith("gpt2-xl, sequences of 1,024 tokens\n")


def test_help_names_every_corpus():
    for command in ("tokenizer", "prepare"):
        out = " ".join(here(command, "--help", cwd=".").stdout.replace("│", " ").split())
        assert "stories, python, text:PATH, curated:OUT, tinystories, openwebtext or hf:REPO" in out


def test_a_model_begins_where_its_windows_did():
    assert [generation_commands.beginning(w) for w in ("documents", "within", "random", "sequential")] == ["", "", "\n", "\n"]


def test_the_doctor_looks_at_a_run(work, whole):
    done = here("doctor", "whole", cwd=work)
    assert done.returncode == 0 and done.stdout.startswith("whole: ") and "validation loss, logged and computed again" in done.stdout, done.stderr


def test_a_study_is_listed_made_once_and_shown(tmp_path):
    done = here("ablate", cwd=tmp_path)
    assert done.returncode == 0 and "weight-decay" in done.stdout and not list(tmp_path.iterdir())
    write_days(tmp_path/"days.txt")
    words = "ablate biases --corpus text:days.txt --tokens 3072 --seeds 0 --out runs.jsonl --work work".split()
    done = here(*words, cwd=tmp_path)
    assert done.returncode == 0 and "2 variants x 1 seeds = 2 runs, 2 to be made" in done.stdout and done.stdout.count(" done, loss ") == 2, done.stdout + done.stderr
    before = (tmp_path/"runs.jsonl").read_text()
    again = here(*words, cwd=tmp_path)
    assert again.returncode == 0 and "0 to be made" in again.stdout and (tmp_path/"runs.jsonl").read_text() == before
    assert again.stdout.splitlines()[2:] == done.stdout.splitlines()[4:]


def test_smoke_falls_as_the_published_run_without_torch():
    code = "import sys; from lmcourse.app.cli import main; main(['smoke']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    _, _, theirs, ours = (line.split() for line in done.stdout.splitlines()[:4])
    assert theirs == ["published", "5.5629", "2.3235", "3.2394"] and float(ours[3]) > 3.2394 and abs(float(ours[1]) - 5.5452) < 1
    again = here("smoke", cwd=".")
    assert again.returncode == 0 and again.stdout == done.stdout and here("smoke", "--seed", 1, cwd=".").stdout != done.stdout


def test_smoke_that_does_not_learn_is_told(monkeypatch, capsys):
    monkeypatch.setattr(training_commands, "smoke", lambda seed: [5.5, 5.4])
    with pytest.raises(SystemExit) as end: cli.main(["smoke"])
    assert end.value.code == 2 and "fell from 5.5000 to 5.4000, which is less than the published fall" in capsys.readouterr().err


def test_the_size_of_the_plot_in_the_terminal(work, whole):
    for width, height, words in ((64, 12, []), (120, 20, ["--width", 120, "--height", 20])):
        lines = here("plot", "whole", "--out", "sized.png", *words, cwd=work).stdout.splitlines()
        assert sum("┤" in line or "│" in line for line in lines) == height
        assert next(line for line in lines if "└" in line).count("─") == width


def test_the_command_answers_before_torch_is_loaded():
    done = subprocess.run([sys.executable, "-c", "import sys, lmcourse.app.cli; sys.exit('torch' in sys.modules)"])
    assert done.returncode == 0


def test_quickstart_from_end_to_end(tmp_path):
    done = without_compiler("quickstart", "--minutes", "0.005", "--keep", "kept", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = tmp_path/"runs/quickstart-1"
    assert {p.name for p in run.iterdir()} == {"config.json", "metrics.jsonl", "loss.png", "samples.txt", "checkpoints", "data"}
    for words in ("1. Corpus", "2. Tokenizer", "3. Tokens on disk", "4. Model", "5. Cost", "6. Training", "floor", "n-grams", "everything is in", "more stories: lmcourse generate"):
        assert words in done.stdout
    assert {p.name for p in (tmp_path/"kept").iterdir()} >= {"config.json", "model.safetensors", "vocab.json", "merges.txt"}
    made = json.loads((tmp_path/"kept/config.json").read_text())["made"]
    assert made["command"] == "lmcourse quickstart --data stories --minutes 0.005"
    story = here("generate", "kept", "--prompt", "Once", "--max-tokens", 5, cwd=tmp_path)
    assert story.returncode == 0 and story.stdout.startswith("Once")


def test_two_quickstarts_at_once_take_two_folders(work, monkeypatch):
    "Another process takes a name while this one looks at the machine."
    monkeypatch.chdir(work)
    def others(): os.makedirs("runs/quickstart-1")
    def ready(data, minutes, out, card):
        assert out.is_dir()
        raise KeyError(out.name)
    monkeypatch.setattr(quickstart, "card_here", others)
    monkeypatch.setattr(quickstart, "get_ready", ready)
    with pytest.raises(KeyError, match="quickstart-2"): cli.main(["quickstart"])
    assert [p.name for p in (work/"runs").iterdir()] == ["quickstart-1"]
    shutil.rmtree("runs")


@pytest.mark.skipif(sys.platform in ("darwin", "win32"), reason="names there are Unicode")
def test_a_run_whose_name_is_not_utf_8_is_drawn(whole, work):
    shutil.copytree(whole, work/os.fsdecode(b"caf\xe9"))
    done = here("plot", os.fsdecode(b"caf\xe9"), "--out", "name.png", cwd=work)
    assert done.returncode == 0 and (work/"name.png").exists(), done.stderr


def test_a_file_that_is_too_large_for_the_disk_is_one_line(work, monkeypatch, capsys):
    "FAT32 takes 4 GiB, and `ulimit -f` says less."
    def full(*_): raise OSError(errno.EFBIG, "File too large", "step_1")
    monkeypatch.setattr(cli.PlotCommand, "run", full)
    with pytest.raises(SystemExit): cli.main(["plot", str(work)])
    assert capsys.readouterr().err == "lmcourse: step_1: file too large\n"


def test_quickstart_on_a_text(tmp_path):
    write_days(tmp_path/"days.txt")
    done = here("quickstart", "--data", "text:days.txt", "--minutes", 0.005, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "no floor is known for this text" in done.stdout and "more text: lmcourse generate runs/quickstart-1" in done.stdout
    assert "windows: random, because those at the starts of documents would reach only" in done.stdout


def test_a_text_of_one_document_is_trained_from_anywhere(broken, tmp_path):
    "By default, and only where windows at the starts of documents would miss most of the text"
    words = [w for w in TINY if w not in ("--windows", "random")]
    for data, windows in (("days-data", "random"), ("data", "documents")):
        done = here("train", data, tmp_path/data, *words, "--context-length", 256, "--steps", 2, cwd=broken)
        assert done.returncode == 0, done.stderr
        assert ("windows: random, because" in done.stdout) == (windows == "random") and json.loads((tmp_path/data/"config.json").read_text())["train"]["windows"] == windows


def test_of_a_long_text_little_is_for_validation(broken):
    "Documents may be as long as they like, so bytes are counted too; those of a corpus are as short as they are"
    info = json.loads((broken/"days-data/valid.json").read_text())
    assert info["documents"] == 1 and 2900 < info["bytes"] <= 3000
    assert len(data_commands.validation_documents("stories", 400)) == 400


def test_the_limit_of_a_text_for_validation_is_told(broken, capsys, monkeypatch):
    monkeypatch.chdir(broken)
    (whole,), said = data_commands.validation_documents("text:days.txt", 100), capsys.readouterr().out
    (short,), told = data_commands.validation_documents("text:days.txt", 2), capsys.readouterr().out
    assert not said and whole.startswith(short) and len(short) <= 2000 < len(whole) and "only the first 2,000 bytes" in told


@pytest.mark.parametrize("data, minutes, most", [("stories", .5, 400), ("text:days.txt", .05, 10), ("text:days.txt", .5, 50), ("text:days.txt", 3, 100)])
def test_a_quickstart_evaluates_as_much_as_its_minutes_allow(broken, monkeypatch, data, minutes, most):
    def prepare(data, out, tokenizer, size, valid_documents): raise KeyError(valid_documents)
    monkeypatch.chdir(broken)
    monkeypatch.setattr(quickstart, "prepare", prepare)
    monkeypatch.setattr(quickstart, "learn_tokenizer", lambda *_: Tokenizer.from_folder("tok"))
    with pytest.raises(KeyError, match=f"^{most}$"): quickstart.get_ready(data, minutes, broken/"new")


def test_no_share_is_more_than_all(work, monkeypatch):
    "A busy machine measures a rate that its own step exceeds."
    monkeypatch.setattr(training_commands, "device_here", lambda kind: Device("this", {"float32": 1e6}, 1e9, 10**9, "measured: a busy machine"))
    config = TrainConfig(steps=2, batch_size=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lmcourse.training.runs.write_run", lambda *_: None)
        trainer = training_commands.new_trainer(work/"data", work, ModelConfig(context_length=16, d_model=32, num_layers=1, num_heads=2), config)
    *_, last = training_commands.cost_lines(trainer)
    assert last.endswith("; faster than that rate, because the machine was busy when it was measured") and "%" not in last
    monkeypatch.setattr(training_commands, "device_here", lambda kind: Device("this", {"float32": 1e15}, 1e9, 10**9, "measured: a machine"))
    assert training_commands.cost_lines(trainer)[-1].endswith("; 0 % of that rate")


def test_a_finished_run_is_told_with_its_result_and_how_to_train_on(work, whole, monkeypatch):
    before = contents(whole)
    monkeypatch.setattr("lmcourse.training.trainer.Trainer.resume", lambda *_: pytest.fail("the run was read"))
    done = here("train", "--resume", "whole", cwd=work)
    assert done.returncode == 0 and contents(whole) == before
    first, *_, last = done.stdout.splitlines()
    assert first.startswith("whole is finished: validation loss ") and f"{metrics(whole)[-1]['valid_loss']:.4f}" in first
    assert last == "train on from its weights: lmcourse train data NEW --context-length 64 --d-model 32 --num-layers 1 --init-from whole --steps 40"
    more = last.partition("lmcourse ")[2].replace("NEW", "more").replace("--steps 40", "--steps 1").split()
    done = here(*more, cwd=work)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(work/"more")


@pytest.mark.parametrize("name, changes", [("quickstart", dict(copy_init=True, qk_norm=False)), ("ts-17m", {}), ("gpt2-small", dict(num_layers=3, window=7)), ("qwen3-0.6b", dict(head_dim=None, num_kv_heads=None))])
def test_a_model_is_made_again_by_its_options(name, changes):
    model = ModelConfig.preset(name, **changes)
    again = cli.parse(shlex.split("train data new" + training_commands.new_run_words(model))).model
    assert replace(again, copy_init=False, vocab_size=9) == replace(model, copy_init=False, vocab_size=9)


# A GPU that is not there

CARD = Device("this", {"float32": 60e12, "bfloat16": 700e12}, 3e12, 80*10**9, "measured: a card")


def test_a_gpu_gets_other_defaults_unless_the_words_say_otherwise(monkeypatch):
    import torch
    def training(words): return cli.parse(f"train data out {words}".split()).train
    before = training("--preset ts-17m")
    assert (before.dtype, before.compile) == ("float32", False)
    monkeypatch.setattr(cli, "gpu_name", lambda: "a card")
    assert training("--preset ts-17m") == before                       # torch can't use it
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert training("--preset ts-17m") == replace(before, dtype="auto", compile=True)
    assert training("--preset ts-17m --no-compile --dtype float32") == before
    for elsewhere in ("--device cpu", "--device=mps", "--engine numpy"):
        assert (training(elsewhere).dtype, training(elsewhere).compile) == ("float32", False)
    assert not training("--preset numpy-report").compile


@pytest.mark.parametrize("gb, wanted, micro", [(80, {}, None), (8, {}, 64), (8, dict(micro_batch=128), 128), (8, dict(shard=True), None),
                                               (8, dict(tokens_per_step=64*256, batch_size=1), None), (1, {}, None)])
def test_a_batch_is_cut_to_the_card(monkeypatch, gb, wanted, micro):
    import torch
    from lmcourse.training import engines
    model, train = ModelConfig.preset("leaderboard-42m"), TrainConfig.preset("leaderboard-42m", **wanted)
    assert training_commands.cut_to_card(model, train) == train                      # On the processor
    monkeypatch.setattr(engines, "pick_device", lambda name: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=gb*10**9))
    assert training_commands.cut_to_card(model, train) == replace(train, micro_batch=micro)
    if not wanted and gb == 8:                                         # Two cards share the batch, so that each half fits
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert training_commands.cut_to_card(model, train) == train


@pytest.mark.parametrize("minutes, preset", [(3, "ts-17m"), (10, "ts-36m")])
def test_a_gpu_gets_a_larger_model(work, monkeypatch, minutes, preset):
    "And is told beforehand. Nothing is trained here: the trainer is made up"
    from lmcourse.training import trainer
    class Trainer:
        def __init__(self, model, config, *data): pass
    monkeypatch.setattr(trainer, "Trainer", Trainer)
    monkeypatch.setattr(trainer, "measure_step", lambda trainer, steps: .5)
    model, config = quickstart.plan_run(work/"data", minutes, CARD)
    assert model == ModelConfig.preset(preset, vocab_size=600)
    assert (config.device, config.dtype, config.compile, config.micro_batch, config.batch_size) == ("cuda", "auto", True, None, 128)
    tokens = json.loads((work/"data/train.json").read_text())["tokens"]
    assert config.steps == max(1, min(120*minutes, 12*tokens//(128*256)))
    line, = quickstart.card_lines(CARD, minutes)
    assert line.startswith(f"a card, 80.0 GB: {preset}, ") and f"about {minutes + 2} min" in line and not quickstart.card_lines(None, minutes)
    model, config = quickstart.plan_run(work/"data", minutes)
    assert model == ModelConfig.preset("quickstart", vocab_size=600, copy_init=True) and config.lr == 2*TrainConfig.preset("quickstart").lr


def test_the_minutes_are_shared_by_steps_and_evaluations(work, monkeypatch):
    "A forward pass is a third of a step's work; nothing is trained or timed here"
    from lmcourse.training import trainer
    monkeypatch.setattr(trainer, "Trainer", lambda *_: None)
    monkeypatch.setattr(trainer, "measure_step", lambda trainer, steps: .1)
    valid = TokenDataset.open(work/"data/valid")
    for minutes, looked_at in ((1, 40), (.25, 10)):
        _, config = quickstart.plan_run(work/"data", minutes)
        first = min(looked_at, valid.num_documents)
        read = 8*int((valid.ends - valid.starts)[:first].sum()) + valid.num_tokens
        spent = config.steps*.1 + read/3/512*.1
        assert config.eval_documents == looked_at and 60*minutes - .1 < spent <= 60*minutes
        assert config.steps//config.eval_every <= 8


def test_half_of_the_minutes_are_steps_at_least_and_a_text_is_read_twelve_times_at_most():
    assert quickstart.fitting_steps(.5, .1, 512, 10**8, 10**9) == 150 and quickstart.fitting_steps(60, .1, 512, 51_200, 0) == 1200
    assert quickstart.fitting_steps(.001, 9., 512, 10**8, 0) == 1


def test_the_trainer_that_is_measured_is_gone_before_the_next_one_is_made(work, monkeypatch):
    "With its weights and moments, at once: a card has no room for two of them"
    from lmcourse.training import trainer
    parts, measure = [], trainer.measure_step
    def look(t, steps): parts.extend(map(weakref.ref, (t, t.engine, t.model, t.engine.optimizer))); return measure(t, 5)
    monkeypatch.setattr(trainer, "measure_step", look)
    gc.disable()
    try: quickstart.plan_run(work/"data", .1)
    finally: gc.enable()
    assert len(parts) == 4 and not any(part() for part in parts)


def test_each_device_has_its_decoder():
    import torch
    from lmcourse.architecture.transformer_torch import Parts
    from lmcourse.inference.fast_decoder import FastDecoder
    from lmcourse.inference.kv_cache import CachedDecoder, GraphDecoder
    from lmcourse.tools.config import ModelConfig
    class On:
        config, parts = ModelConfig(norm_position="post"), Parts()      # which the kernels of chapter 09 don't compute
        dtype = torch.float32
        def __init__(self, kind): self.device = torch.device(kind); self.token_embeddings = self; self.weight = self
        def parameters(self): return iter([self])
    assert [generation_commands.decoder_for(On(kind)) for kind in ("cpu", "cuda", "mps")] == [FastDecoder, GraphDecoder, CachedDecoder]
    own = On("cpu")
    own.parts = Parts(attention=print)
    assert generation_commands.decoder_for(own) is CachedDecoder
