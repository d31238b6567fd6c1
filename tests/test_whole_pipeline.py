"`lmcourse pipeline`: killed anywhere it goes on to the same files, a change reruns what depends on it, damage is noticed, mistakes are one line."
import errno
import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import weakref
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import lmcourse.alignment.pipeline as whole
from lmcourse.alignment import gpu_plan, runs
from lmcourse.alignment.briefs import Demonstrators
from lmcourse.alignment.pipeline import pipeline_stages, run_pipeline
from lmcourse.alignment.stages import PipelineConfig, Stage, run_stages
from lmcourse.alignment.tasks import NAMES as NAMES_OF_PEOPLE
from lmcourse.app import cli
from lmcourse.generation.generate import read_chat_template
from lmcourse.tools.config import UserError
from lmcourse.tools.documents import END_OF_TEXT, documents
from lmcourse.training.data import TokenDataset
from lmcourse.training.models import load_model
from lmcourse.training.runs import read_run
from lmcourse.training.trainer import frozen_objects

TOY = PipelineConfig(pages=100, vocab_size=1000, d_model=32, num_layers=1, base_steps=4, sft_steps=2, dpo_steps=2, rl_steps=1, tests=4, stories=8)
WORDS = [w for k, v in vars(TOY).items() if v != getattr(PipelineConfig(), k) for w in (f"--{k.replace('_', '-')}", str(v))]
NAMES = "web clean tokenizer tokens base sft dpo rl exam report".split()
ROOT = Path(__file__).parents[1]


def quiet(line): pass


def worked(out, config=TOY, until=None):
    "The stages that had to work."
    said = []
    run_pipeline(out, config, said.append, until)
    return [m[1] for line in said if (m := re.match(r"\d+/10 (\w+): .* about ", line))]


def digests(out, names=NAMES[:-1]): return {n: json.loads((out/n/"done.json").read_text())["digest"] for n in names}


@pytest.fixture(scope="module")
def compiled():
    "Compiled kernels are on disk before this process loads them: machine code that was just compiled may round in another way than the same code from the cache, which is all that a resumed run has."
    script = "from lmcourse.training.models import load_model; from lmcourse.alignment.rollouts import Sampler; Sampler(*load_model(), 4)(['Ella'], 2)"
    subprocess.run([sys.executable, "-c", script], env=os.environ | dict(PYTHONPATH=str(ROOT)), check=True)


@pytest.fixture(scope="module")
def toy(tmp_path_factory, compiled):
    out = tmp_path_factory.mktemp("pipeline")/"toy"
    records = run_pipeline(out, TOY, quiet)
    assert list(records) == NAMES
    return out


@pytest.fixture
def copy(toy, tmp_path): return shutil.copytree(toy, tmp_path/"copy")


def test_the_second_time_nothing_works_and_nothing_changes(toy):
    before = {p: p.stat().st_mtime_ns for p in toy.rglob("*") if p.is_file()}
    assert worked(toy) == [] and {p: p.stat().st_mtime_ns for p in toy.rglob("*") if p.is_file()} == before


def test_the_report_is_whole_in_itself(toy):
    page, text = ((toy/"report"/f"report.{e}").read_text() for e in ("html", "md"))
    result = json.loads((toy/"report"/"result.json").read_text())
    assert page.count("data:image/png;base64,") == 3 and not re.search(r"https?://|<script|<link", page) and 'lang="en"' in page
    assert "![" in text and all(f"({n}.png)" in text for n in ("funnel", "loss", "success"))
    assert [s["stage"] for s in result["stages"]] == NAMES[:-1] and set(result["models"]) == {"base", "sft", "dpo", "rl"}
    kept = result["clean"]["kinds"]
    assert sum(a for a, _ in kept.values()) == TOY.pages and sum(b for _, b in kept.values()) == result["clean"]["documents"] and kept["spam"][1] < kept["spam"][0]
    assert result["base"]["validation"][-1][0] == 4*512 and result["base"]["floor"] < result["base"]["loss"]
    for m in result["models"].values(): assert m["low"] <= m["success"] <= m["high"] and len(m["samples"]) == 3


def test_models_can_be_used_by_every_command(toy):
    model, tokenizer = load_model(toy/"rl"/"model")
    assert model.config.vocab_size == tokenizer.vocab_size and load_model(toy/"base"/"model")[1].digest == tokenizer.digest
    template = read_chat_template(toy/"rl"/"model")
    assert not template.is_default and template.encode([("user", "Ella the mule, an orange cap:")], tokenizer) == [tokenizer.end_of_text, *tokenizer.encode("Ella the mule, an orange cap:")]
    assert str(toy) not in (toy/"rl"/"model"/"config.json").read_text()


@pytest.mark.parametrize("change, expected", [(dict(tests=5), ["exam", "report"]), (dict(kl=.2), ["rl", "exam", "report"])])
def test_a_change_reruns_what_depends_on_it(copy, change, expected):
    before = digests(copy)
    assert worked(copy, replace(TOY, **change)) == expected
    assert {n for n in NAMES[:-1] if digests(copy)[n] != before[n]} == set(expected) - {"report"}


def test_pages_are_at_the_bottom_of_everything():
    first, other = ({s.name: s.settings for s in pipeline_stages(c)} for c in (TOY, replace(TOY, seed=1)))
    assert first["web"] != other["web"] and all(s.needs for s in pipeline_stages(TOY)[1:])
    needed = {n for s in pipeline_stages(TOY) for n in s.needs}
    assert needed == set(NAMES[:-1]), "every stage but the last is read by another one"
    fields = {f for s in pipeline_stages(TOY) for f in s.settings}
    assert fields >= set(vars(TOY)), "every option is a setting of a stage, else a change would be overlooked"


@pytest.mark.parametrize("name, ran", [("base/model/model.safetensors", ["base"]), ("clean/result.json", ["clean"]), ("rl/done.json", ["rl"]), ("tokens/data/train.bin", ["tokens"])])
def test_a_torn_file_is_noticed_and_made_again(copy, name, ran):
    before, file = digests(copy), copy/name
    file.write_bytes(file.read_bytes()[:-1])
    if name.endswith("json"): file.write_text(file.read_text()[:40])
    assert worked(copy) == ran and digests(copy) == before


def test_a_lost_file_of_the_report_is_made_again(copy):
    (copy/"report"/"loss.png").unlink()
    assert worked(copy) == ["report"] and (copy/"report"/"loss.png").exists()
    (copy/"report"/"done.json").unlink()
    (copy/"report"/"done.json").mkdir()
    assert worked(copy) == ["report"]


def test_a_file_from_elsewhere_is_no_page_of_the_web(copy):
    shutil.rmtree(copy/"clean")
    for name in ("notes.txt", "._0.warc.gz"): (copy/"web"/"pages"/name).write_text("Two words.")
    with pytest.raises(UserError, match="notes.txt: not written by the stage web; move it away"): worked(copy)
    (copy/"web"/"pages"/"notes.txt").unlink()
    assert worked(copy) == ["clean"]


def test_an_interrupted_stage_that_has_lost_its_vocabulary_writes_it_anew(copy):
    before, stage = digests(copy), copy/"tokens"
    order = json.loads((stage/"done.json").read_text())["order"]
    (stage/"begun.json").write_text(json.dumps(dict(order=order)))
    for name in ("done.json", "data/tokenizer/vocab.json"): (stage/name).unlink()
    assert worked(copy) == ["tokens"] and digests(copy) == before


DYING = """
import os, signal, sys
import lmcourse.tools.files as files, lmcourse.alignment.pipeline as whole
from lmcourse.alignment.stages import PipelineConfig
real, left = os.replace, [int(sys.argv[3])]
def replace(a, b):
    if sys.argv[2] in str(b):
        if not left[0]: os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
    real(a, b)
os.replace = replace
whole.run_pipeline(sys.argv[1], PipelineConfig(**eval(sys.argv[4])), lambda line: None)
"""


@pytest.mark.parametrize("file, times", [
    ("base/run/checkpoints/step", 2), *(pytest.param(f, n, marks=pytest.mark.slow) for f, n in (
        ("web/pages/2", 0), ("curated/documents", 0), ("clean/done.json", 0), ("tokenizer/tokenizer", 0), ("data/train.json", 0), ("base/model", 0),
        ("sft/run/config.json", 0), ("sft/run/success.jsonl", 1), ("rl/run/align.json", 0), ("rl/model", 0), ("exam/dpo.json", 0), ("report/loss.png", 0), ("report/done.json", 0)))])
def test_killed_anywhere_it_goes_on_to_the_same_files(toy, tmp_path, file, times):
    "What was done before is copied, to save time; the kill comes as a file is about to be put in its place. What comes after depends on the digest alone."
    out, stage = tmp_path/"out", file.partition("/")[0] if file.partition("/")[0] in NAMES else "clean" if "curated" in file else "tokens"
    out.mkdir()
    shutil.copy(toy/"pipeline.json", out)
    before = NAMES[:NAMES.index(stage)]
    for n in before: shutil.copytree(toy/n, out/n)
    died = subprocess.run([sys.executable, "-c", DYING, out, file, str(times), repr(vars(TOY))], env=os.environ | dict(PYTHONPATH=str(ROOT)))
    assert died.returncode == -signal.SIGKILL and not (out/stage/"done.json").exists()
    assert worked(out, until=stage) == [stage]
    if stage != "report": assert digests(out, [*before, stage]) == digests(toy, [*before, stage])
    assert not list(out.rglob("*.tmp")), "nothing of the killed process is left"


RANDOMLY = """
import os, random, signal, sys, threading, time
import lmcourse.alignment.pipeline as whole
from lmcourse.alignment.gpu_plan import GpuConfig, run_gpu_pipeline
from lmcourse.alignment.stages import PipelineConfig
out, run, config, seed = sys.argv[1], *eval(sys.argv[2]), int(sys.argv[3])
rng = random.Random(seed)
left, late = [rng.randint(1, 30)], rng.random()*.02                            # Files that it writes, then seconds: in the midst of writing or computing
def opened(event, args):
    if event != "open" or not str(args[0]).startswith(out) or not {*"wax+"} & {*(args[1] or "")} or left[0] < 0: return
    left[0] -= 1
    if left[0] == -1: threading.Thread(target=lambda: (time.sleep(late), os.kill(os.getpid(), signal.SIGKILL)), daemon=True).start()
if seed: sys.addaudithook(opened)
run(out, config, lambda line: None)
"""


@pytest.mark.slow
@pytest.mark.parametrize("run", ["small", "gpu"])
def test_killed_at_ten_random_moments_it_ends_with_the_same_files(run, compiled, book, tmp_path):
    "Each process is killed at a random time after it has begun a random number of files; the next one goes on."
    what = f"(whole.run_pipeline, PipelineConfig(**{vars(TOY)}))" if run == "small" else f"(run_gpu_pipeline, GpuConfig(**{GPU | dict(data=f'text:{book}')}))"
    def go(out, seed): return subprocess.run([sys.executable, "-c", RANDOMLY, out, what, str(seed)], env=os.environ | dict(PYTHONPATH=str(ROOT))).returncode
    assert go(tmp_path/"calm", 0) == 0
    killed, done = 0, []
    for seed in range(1, 11):
        code = go(tmp_path/"cut", seed)
        assert code in (0, -signal.SIGKILL)
        killed += code != 0
        done.append(sum((tmp_path/"cut"/n/"done.json").exists() for n in NAMES))
    assert go(tmp_path/"cut", 0) == 0 and killed >= 5 and len({*done}) >= 3, (killed, done)
    assert digests(tmp_path/"cut") == digests(tmp_path/"calm"), done
    assert not list((tmp_path/"cut").rglob("*.tmp")), "nothing of a killed process is left"


def test_an_exam_that_is_interrupted_asks_only_the_models_that_are_left(copy, monkeypatch):
    before, asked, real = digests(copy), [], whole.measure_policy
    def measured(*args, **kwargs):
        asked.append(args)
        if len(asked) == 3: raise KeyboardInterrupt
        return real(*args, **kwargs)
    monkeypatch.setattr(whole, "measure_policy", measured)
    shutil.rmtree(copy/"exam")
    with pytest.raises(KeyboardInterrupt): worked(copy)
    assert worked(copy) == ["exam"] and len(asked) == 5 and digests(copy) == before


def test_preferences_change_the_model_if_there_are_any(copy, monkeypatch):
    pairs = [dict(prompt=p, chosen=r, rejected=" The end.") for p, r in islice(Demonstrators(0.), 16)]
    monkeypatch.setattr(runs, "own_pairs", lambda *args: pairs)
    weights = lambda name: torch.cat([w.flatten() for w in load_model(copy/name/"model")[0].parameters()])
    assert torch.equal(weights("sft"), weights("dpo")), "a toy writes nothing right, so the model stayed as it was"
    run_pipeline(copy, replace(TOY, dpo_steps=3), quiet, until="dpo")
    assert not torch.equal(weights("sft"), weights("dpo"))
    assert [c["step"] for c in json.loads((copy/"dpo"/"result.json").read_text())["curve"]] == [1, 2, 3]


def test_the_command_in_the_report_works_where_it_says(toy):
    text = (toy/"report"/"report.md").read_text()
    assert "In the folder that contains toy:" in text and "lmcourse chat toy/rl/model\n" in text


def test_what_a_killed_process_left_of_the_mark_is_no_other_folder(tmp_path):
    (tmp_path/"new").mkdir()
    (tmp_path/"new"/"pipeline.json.tmp").write_text("{")
    assert worked(tmp_path/"new", until="web") == ["web"]


def test_a_stage_that_cannot_go_on_says_how_to_begin_anew(toy, tmp_path):
    shutil.copytree(toy, new := tmp_path/"new")
    (new/"base"/"done.json").unlink()
    (new/"base"/"begun.json").write_text(json.dumps(dict(order=json.loads((toy/"base"/"done.json").read_text())["order"])))
    next((new/"base"/"run"/"checkpoints").glob("*/model.safetensors")).unlink()
    with pytest.raises(UserError, match=f"to begin this stage anew, remove {new/'base'}"): worked(new)


def test_a_pipeline_that_was_stopped_within_a_stage_goes_on_in_another_place(toy, tmp_path, monkeypatch):
    def killed(*args): raise KeyboardInterrupt
    shutil.copytree(toy, tmp_path/"old")
    shutil.rmtree(tmp_path/"old"/"sft")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(whole, "align_to_the_end", killed)
        worked(tmp_path/"old")
    (tmp_path/"old").rename(tmp_path/"new")
    assert "sft" in worked(tmp_path/"new") and digests(tmp_path/"new", ["sft"]) == digests(toy, ["sft"])


GPU = dict(task="easy-problems", device="cpu", pages=150, stories=8, vocab_size=1000, d_model=64, num_layers=1, context_length=128, base_steps=2, step_tokens=512, micro_batch=2, sft_steps=2,
           dpo_steps=1, rl_steps=2, rl_prompts=2, tests=4)                      # Everything else is that of the GPU


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    file = tmp_path_factory.mktemp("text")/"book.txt"
    file.write_text(END_OF_TEXT.join(islice(documents("stories"), 170)), encoding="utf-8")
    return file


def gpu_words(out, book): return ["pipeline", str(out), "--scale", "gpu", "--data", f"text:{book}", *(w for k, v in GPU.items() for w in (f"--{k.replace('_', '-')}", str(v)))]


def test_the_path_of_the_gpu_takes_real_text_and_word_problems(book, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_plan, "SHARD", 60)
    monkeypatch.setattr(gpu_plan, "cores", lambda: 1)                           # Processes take seconds to start
    cli.main(gpu_words(tmp_path/"gpu", book))
    said, out = capsys.readouterr().out, tmp_path/"gpu"
    assert [n for n in NAMES if (out/n/"done.json").exists()] == NAMES and "None" not in said and ", about" not in said
    texts = [json.loads(line)["text"] for f in sorted((out/"web"/"pages").glob("*.jsonl")) for line in f.read_text().splitlines()]
    held_out = [json.loads(line)["text"] for line in (out/"web"/"valid.jsonl").read_text().splitlines()]
    assert len(texts) == 150 and len([*(out/"web"/"pages").glob("*.jsonl")]) == 3 and set(texts) <= set(book.read_text().split(END_OF_TEXT)) and len(held_out) == 8 and not {*texts} & {*held_out}
    assert json.loads((out/"tokens"/"data"/"train.json").read_text())["source"] == json.loads((out/"clean"/"result.json").read_text())["source"] == f"text:{book}"
    assert json.loads((out/"rl"/"run"/"align.json").read_text())["task"] == "easy-problems"
    practised = TokenDataset.open(out/"rl"/"run"/"data"/"train")
    assert "How many" in load_model(out/"rl"/"model")[1].decode(practised.document(0).tolist())
    steps = [json.loads(line)["step"] for line in (out/"rl"/"run"/"rollouts.jsonl").read_text().splitlines()]
    result = json.loads((out/"report"/"result.json").read_text())
    assert steps == [0, 1] and result["task"] == "easy-problems" and result["data"] == f"text:{book}" and result["base"]["floor"] is None and result["ceiling"] == .8
    for m in result["models"].values(): assert "openings" not in m and all(s[0].startswith(tuple(NAMES_OF_PEOPLE)) for s in m["samples"])
    page = (out/"report"/"report.md").read_text()
    assert "the same easy-problems that may also occur in training, once each" in page
    assert "held-out text" in page and f"150 pages of text:{book}" in page and "floor" not in page
    settings = read_run(out/"base"/"run")[1]
    assert settings.tokens_per_step == 512 and settings.device == "cpu"
    before = digests(out)
    cli.main(gpu_words(out, book))
    assert capsys.readouterr().out.count(": done (") == 10 and digests(out) == before


def test_another_text_under_the_same_name_is_another_web(tmp_path):
    (book := tmp_path/"book.txt").write_text("One text.")
    web = lambda data: gpu_plan.text_sources(gpu_plan.GpuConfig(data=data))[0].settings
    before = web(f"text:{book}")
    book.write_text("Two texts.")
    assert web(f"text:{book}") != before and "text" not in web("tinystories")


def test_every_option_of_the_gpu_is_a_setting_of_a_stage():
    stages = gpu_plan.pipeline_stages(gpu_plan.GpuConfig(), gpu_plan.text_sources)
    one = {f for s in stages for f in s.settings}
    assert [s.name for s in stages] == NAMES and one >= {*vars(gpu_plan.GpuConfig())} - {"rl_prompts"}
    change = lambda **kw: [a.name for a, b in zip(stages, gpu_plan.pipeline_stages(replace(gpu_plan.GpuConfig(), **kw), gpu_plan.text_sources)) if a.settings != b.settings]
    assert change(rl_prompts=32) == ["dpo", "rl"] and change(device="cpu") == ["base"] and change(task="briefs") == ["sft", "dpo", "rl"]
    assert gpu_plan.GpuConfig().pretraining().dtype == "auto", "bfloat16 where the GPU has it"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_its_scale_is_refused_before_any_work(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert "--dry-run" in refused(["pipeline", "new", "--scale", "gpu"], capsys) and not Path("new").exists()


@pytest.mark.parametrize("words, said", [
    ("--data books", "unknown corpus 'books'"), ("--data text:nowhere", "nowhere: no such file"), ("--task poems", "unknown task 'poems'"), ("--step-tokens 500", "tokens_per_step by context_length"),
    ("--micro-batch 3 --step-tokens 384", "micro_batch = 3"), ("--d-model 200", "d_model = 200 is not a multiple of num_heads = 3"), ("--context-length 64", "context_length = 64, expected 97"),
    ("--task problems", "context_length = 128, expected 149"), ("--sft-steps 1", "sft_steps = 1, expected 2"),
    ("--rl-prompts 64 --dpo-steps 93", "rl_prompts*dpo_steps = 5,952, expected at most 5,888"), ("--tests 5889", "tests = 5,889")])
def test_mistakes_at_the_scale_of_a_gpu(words, said, book, tmp_path, capsys):
    assert said in refused([*gpu_words(tmp_path/"new", book), *words.split()], capsys) and not (tmp_path/"new").exists()


def test_a_download_that_fails_says_in_one_line_what_to_do(book, tmp_path, monkeypatch, capsys):
    broken = [True]
    def cut(name, split="train"):
        for i, text in enumerate(documents(f"text:{book}", split)):
            if broken[0] and split == "train" and i == 100:
                broken[0] = False
                raise ConnectionError(f"{name}: the Hugging Face hub can't be reached")
            yield text
    monkeypatch.setattr(gpu_plan, "SHARD", 60)
    words = [*gpu_words(tmp_path/"gpu", book), "--data", "tinystories", "--until", "web"]
    with monkeypatch.context() as m:
        m.setattr(gpu_plan, "documents", cut)
        error = refused(words, capsys)
        assert "can't be reached" in error and "go on with the same command" in error
        assert [f.name for f in (tmp_path/"gpu"/"web"/"pages").iterdir()] == ["00000.jsonl"]
        cli.main(words)
    cli.main([*gpu_words(tmp_path/"whole", book), "--until", "web"])
    files = lambda out: {f.name: f.read_bytes() for f in (tmp_path/out/"web"/"pages").iterdir()}
    assert files("gpu") == files("whole") and len(files("gpu")) == 3


def refused(words, capsys):
    with pytest.raises(SystemExit) as e: cli.main(words)
    error = capsys.readouterr().err
    assert e.value.code == 2 and error.count("\n") == 1, error
    return error


@pytest.mark.parametrize("words, said", [
    ("new --until nope", "unknown stage 'nope'"), ("letters", "no folder of a pipeline"), ("other", "a folder of the bakery"), ("letters/a.txt", "a.txt is a file"), ("letters/a.txt/new", "a.txt is a file"),
    ("new --pages 10", "pages = 10"), ("new --slip 1", "slip = 1"), ("new --kl -1", "kl = -1"), ("new --d-model 12", "d_model = 12"), ("new --rl-steps 0", "rl_steps = 0"), ("new --pages many", "pages")])
def test_mistakes_are_one_line_before_any_work(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    Path("letters").mkdir()
    Path("letters/a.txt").write_text("dear")
    run_stages([], "other", "bakery")
    assert said in refused(["pipeline", *words.split()], capsys) and not Path("new").exists()


def test_a_full_disk_is_one_line_and_the_command_goes_on_later(tmp_path, monkeypatch, capsys):
    def full(*args): raise OSError(errno.ENOSPC, "No space left on device", "a file")
    with monkeypatch.context() as m:
        m.setattr(whole, "write_warc", full)
        assert "no space left" in refused(["pipeline", str(tmp_path/"out"), *WORDS, "--until", "web"], capsys)
    cli.main(["pipeline", str(tmp_path/"out"), *WORDS, "--until", "web"])
    assert "100 pages" in capsys.readouterr().out and (tmp_path/"out"/"web"/"done.json").exists()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="who may do anything can write anywhere")
def test_a_folder_that_cannot_be_written_is_one_line(tmp_path, capsys):
    tmp_path.chmod(0o500)
    try: assert "can't be written" in refused(["pipeline", str(tmp_path/"out")], capsys)
    finally: tmp_path.chmod(0o700)


def test_a_stage_leaves_no_garbage_and_searches_nothing_old(tmp_path):
    "A cycle that a stage leaves is freed before the next; what existed before the pipeline isn't searched for garbage."
    class Node: pass
    left, frozen = [], gc.get_freeze_count()
    def work(folder, inputs, say):
        node = Node()
        node.me = node
        left.append(weakref.ref(node))
        assert [r() for r in left[:-1]] == [None]*(len(left) - 1) and gc.get_freeze_count() > frozen
        with frozen_objects(): pass                                         # As a training does, which thaws all at its end
        (folder/"a").write_text("x")
    run_stages([Stage(n, work, (), {}, ("a",)) for n in "abc"], tmp_path/"p", say=lambda line: None)
    assert left[-1]() is None and gc.get_freeze_count() == 0
