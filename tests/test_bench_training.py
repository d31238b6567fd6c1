"`lmcourse bench training`: that all do the same step, that its tables say what was measured, and what it refuses."
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import processes
import pytest

from lmcourse.app import bench_training as bench, cli, commands
from lmcourse.app.bench import present
from lmcourse.tools.checks import expect_error
from lmcourse.tools.config import ModelConfig

TINY = bench.Setting(ModelConfig(vocab_size=61, context_length=16, d_model=32, num_layers=2, num_heads=4), batch_size=4, gemm=64, steps=2, products=3)


def two_steps(name, setting=TINY):
    step = bench.CONTENDERS[name].start(setting)
    losses, norms = zip(step(), step())
    return dict(loss=losses, norm=norms)


# The work

def test_a_setting_goes_to_another_process_and_back():
    for setting in (TINY, bench.SETTING, bench.LARGE): assert bench.Setting.from_json(setting.to_json()) == setting
    c = bench.SETTING.config
    assert (c.d_model, c.num_layers, c.num_heads, c.context_length, c.vocab_size, bench.SETTING.batch_size) == (256, 4, 8, 256, 4096, 8)
    c = bench.LARGE.config
    assert (c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.ffn_size, c.tie_embeddings, bench.LARGE.tokens) == (151_669, 512, 4, 4, 2048, True, 16*512)


@pytest.fixture(scope="module")
def reference():
    pytest.importorskip("torch")
    return two_steps("torch")


@pytest.mark.parametrize("name", ["torch, own products", "torch, bf16 products", "transformers", "NumPy", "NumPy, readable"])
def test_everybody_does_the_same_step(reference, name):
    if name == "transformers": pytest.importorskip("transformers")
    bench.require_same_steps(dict(torch=reference) | {name: two_steps(name)})


# A model with the names of nanoGPT's, whose own file is another project's

STAND_IN = """
import math, torch
from dataclasses import dataclass
from torch import nn
from torch.nn import functional as F

@dataclass
class GPTConfig:
    block_size: int; vocab_size: int; n_layer: int; n_head: int; n_embd: int; dropout: float; bias: bool

class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads, self.c_attn, self.c_proj = c.n_head, nn.Linear(c.n_embd, 3*c.n_embd, c.bias), nn.Linear(c.n_embd, c.n_embd, c.bias)
    def forward(self, x):
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.c_attn(x).chunk(3, -1))
        return self.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.ln_1, self.ln_2 = (nn.LayerNorm(c.n_embd, bias=c.bias) for _ in "12")
        self.attn, self.mlp = Attention(c), nn.ModuleDict(dict(c_fc=nn.Linear(c.n_embd, 4*c.n_embd, c.bias), c_proj=nn.Linear(4*c.n_embd, c.n_embd, c.bias)))
    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp.c_proj(F.gelu(self.mlp.c_fc(self.ln_2(x))))

class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        print("number of parameters")                                           # On the pipe of answers, this would be an answer
        self.transformer = nn.ModuleDict(dict(wte=nn.Embedding(c.vocab_size, c.n_embd), wpe=nn.Embedding(c.block_size, c.n_embd),
                                              h=nn.ModuleList([Block(c) for _ in range(c.n_layer)]), ln_f=nn.LayerNorm(c.n_embd, bias=c.bias)))
        self.lm_head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        self.lm_head.weight = self.transformer.wte.weight
    def forward(self, ids, targets):
        x = self.transformer.wte(ids) + self.transformer.wpe(torch.arange(ids.shape[1]))
        for block in self.transformer.h: x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())
"""


def test_nanogpt_has_a_comparison_of_its_own(tmp_path, monkeypatch):
    "With a model of its shape, whose losses and gradient norms agree; and what its tables say is read"
    pytest.importorskip("torch")
    from lmcourse.app.benchmarks import training_rows
    monkeypatch.delenv("NANOGPT", raising=False)
    names, setting = ("torch", bench.NANOGPT), replace(TINY, steps=1, products=1)
    lines = list(bench.bench_training(1, 1, file=tmp_path/"without.json", setting=setting, names=names))
    assert "not measured: nanoGPT, compiled (NANOGPT in the environment doesn't name the folder of its model.py)" in lines
    monkeypatch.setenv("NANOGPT", str(tmp_path))
    with expect_error(ValueError, f"NANOGPT = {tmp_path}: no model.py there, expected a copy of nanoGPT"): bench.bench_training(1, 1)
    (tmp_path/"model.py").write_text(STAND_IN, encoding="utf-8")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")                              # The compiler takes long, and isn't what is tested here
    lines = list(bench.bench_training(2, 1, file=tmp_path/"with.json", setting=setting, names=names))
    saved = json.loads((tmp_path/"with.json").read_text(encoding="utf-8"))
    assert not saved["left_out"] and [m["name"] for m in saved["measured"] if m["task"] == "step"] == ["torch"]
    assert {m["name"] for m in saved["nanogpt"] if m["task"] == "step"} == {*names, "torch, own kernels"}
    text = "\n".join(str(line) + "\n"*isinstance(line, bench.Table) for line in lines)
    (row, other) = training_rows(text)
    assert row["what"] == "a training step of GPT-2's shape on 1 thread: torch, against nanoGPT, compiled" and row["least"] == 1.1 and other["least"] is None
    table = [line for line in lines if isinstance(line, bench.Table)][-1]
    assert [float(r["times as fast"].split()[0].replace(",", "")) for r in table.rows] == [row["ratio"], other["ratio"]]


def test_other_weights_of_nanogpt_are_noticed(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    (tmp_path/"model.py").write_text(STAND_IN.replace("F.gelu(", "F.relu("), encoding="utf-8")
    monkeypatch.setenv("NANOGPT", str(tmp_path))
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    with expect_error(ValueError, "by nanoGPT, compiled"):
        list(bench.bench_training(1, 1, setting=replace(TINY, steps=1, products=1), names=("torch", bench.NANOGPT)))


@pytest.mark.parametrize("change, message", [
    (dict(lr=1e-3), "loss of step 2"),
    (dict(lr=-1e-4), "loss of step 2"),
    (dict(weight_decay=50.), "gradient norm of step 2"),
    (None, "loss of step 1"),
])
def test_who_does_something_else_is_noticed(reference, monkeypatch, change, message):
    if change: monkeypatch.setattr(bench, "OPTIMIZER", bench.OPTIMIZER | change)
    else: monkeypatch.setattr(bench, "first_batch", lambda setting: (setting.config.vocab_size - 1 - bench.np.ones((2, 4, 16), int)))
    with expect_error(ValueError, "by NumPy"):
        try: bench.require_same_steps(dict(torch=reference, NumPy=two_steps("NumPy")))
        except ValueError as e:
            assert message in str(e) or change and "step 2" in str(e)
            raise


# Processes

def test_without_a_compiler_the_others_go_on(monkeypatch):
    def start(setting):
        def step(): raise RuntimeError("no compiler\nand a long story")
        return step
    for name, compiler in (("compiled", True), ("plain", False)):
        monkeypatch.setitem(bench.CONTENDERS, name, bench.Contender(start, compiler=compiler))
    assert bench.run_first("compiled", TINY.to_json()) == dict(left_out="RuntimeError: no compiler")
    with expect_error(RuntimeError, "long story"): bench.run_first("plain", TINY.to_json())


def test_a_burst_has_one_call_before_the_clock(monkeypatch):
    now, calls, rests = [100.], [], []
    def call():
        now[0] += 1. if calls else 50.
        calls.append(1)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: rests.append((seconds, now[0])))
    assert bench.burst(call, 3)["wall_s"] == 3 and len(calls) == 4 and rests == [(bench.REST_S, 153.)]


def test_contenders_take_turns_each_with_its_product():
    class Fake:
        def __init__(self, name): self.name = name
        def ask(self, action, name, setting):
            assert name == self.name and bench.Setting.from_json(setting) == TINY
            order.append(f"{name}:{action[4:]}")
            return dict(made_up)
    made_up = dict(wall_s=1., cpu_s=1., count=2)
    order, names = [], ["NumPy", "transformers"]
    measured = bench.measure_training_steps({n: Fake(n) for n in names}, TINY, 2)
    assert order == ["NumPy:steps", "NumPy:products", "transformers:steps"]*2
    assert [(m["task"], m["name"], m["count"], m["wall_s"]) for m in measured] == [
        ("step", "NumPy", 2, [1, 1]), ("product", "NumPy", 2, [1, 1]), ("step", "transformers", 2, [1, 1])]
    assert [m["flops"] for m in measured[:2]] == [TINY.flops, 2*64**3] and measured[0]["tokens"] == 64


def test_every_process_has_the_same_number_of_threads(monkeypatch):
    seen = []
    monkeypatch.setattr(bench, "Worker", lambda *words, **environment: seen.append((words, environment)))
    for name in bench.CONTENDERS: bench.contender_process(name, 3)
    assert all(words == (3, "lmcourse.app.bench_training") for words, _ in seen)
    assert all({v for k, v in e.items() if k.endswith("_NUM_THREADS")} == {"3"} for _, e in seen)
    assert [name for name, (_, e) in zip(bench.CONTENDERS, seen) if "OPENBLAS_CORETYPE" in e] == ["NumPy, AVX-512"]


def test_who_is_not_there_is_told(monkeypatch):
    monkeypatch.setattr(bench, "present", lambda names: [])
    found = bench.left_out(dict(bf16=False, idle=False), dict(blas="mkl", kernels=None))
    assert set(found) == {"transformers", "torch, bf16 products", "torch, bf16, compiled", "NumPy, AVX-512"} and "lmcourse[interop]" in found["transformers"]


def test_one_difference_ends_the_bench_and_leaves_nothing(tmp_path, monkeypatch):
    workers = []
    process = bench.contender_process
    monkeypatch.setattr(bench, "contender_process", lambda *a: workers.append(process(*a)) or workers[-1])
    monkeypatch.setitem(bench.TOLERANCE, "float32", -1.)
    with expect_error(ValueError, "loss of step 1"):
        list(bench.bench_training(1, 1, file=tmp_path/"results.json", setting=TINY, names=("torch", "NumPy")))
    assert len(workers) == 2 and all(w.process.poll() is not None for w in workers) and not list(tmp_path.iterdir())


def test_the_whole_bench(tmp_path):
    pytest.importorskip("torch")
    names = ("torch", "torch, bf16 products", "transformers", "NumPy")
    lines = list(bench.bench_training(2, 1, file=tmp_path/"results.json", setting=TINY, names=names))
    tables = [line for line in lines if isinstance(line, bench.Table)]
    saved = json.loads((tmp_path/"results.json").read_text())
    here = [name for name in names if name not in saved["left_out"]]
    assert saved["left_out"].keys() <= {"transformers", "torch, bf16 products"} and ("transformers" in here) == bool(present(["transformers"]))
    assert all(f"not measured: {name} ({why})" in lines for name, why in saved["left_out"].items())
    steps = [m for m in saved["measured"] if m["task"] == "step"]
    assert [m["name"] for m in steps] == here == [row["step"] for row in tables[1].rows]
    assert [m["name"] for m in saved["measured"] if m["task"] == "product"] == [n for n in here if bench.CONTENDERS[n].product]
    assert {len(m["wall_s"]) for m in saved["measured"]} == {2} and {m["count"] for m in steps} == {2}
    assert [(r["step"], r["beside"]) for r in tables[2].rows] == [(a, b) for a, b in bench.COMPARED if a in here and b in here]
    assert {"torch", "numpy"} <= saved["machine"]["versions"].keys() and [p.name for p in tmp_path.iterdir()] == ["results.json"]


# Tables

def measurement(task, name, seconds, dtype="float32", **more):
    return dict(task=task, name=name, dtype=dtype, flops=10**10, tokens=100, count=2, wall_s=seconds, cpu_s=seconds) | more


def test_ratios_and_shares_are_taken_within_a_round():
    measured = [measurement("step", "torch", [1., 10., 2.]), measurement("step", "transformers", [2., 20., 4.]),
                measurement("product", "torch", [.5, 5., 1.]), measurement("product", "NumPy", [.6, 6., 1.2])]
    assert bench.step_ratios_table(measured).rows == [{"step": "torch", "beside": "transformers", "times as fast": "2.00 [2.00..2.00]"}]
    row = bench.steps_table(measured).rows[0]
    assert row["of the peak"] == "50.0 [50.0..50.0]" and row["tokens"] == 100 and row["rate"] == 10. and row["time"] == "1,000 [500..5,000]"
    assert bench.products_table(measured).rows[0] == {"product": "torch", "type": "float32", "rate": "20.0 [4.0..40.0]"}


def test_a_share_is_of_the_best_product_of_the_same_type():
    measured = [measurement("step", "torch", [1.]), measurement("step", "torch, bf16 products", [.5], "bfloat16"), measurement("product", "torch", [.8]),
                measurement("product", "torch, own products", [.9]), measurement("product", "NumPy", [.5]),
                measurement("product", "torch, bf16 products", [.1], "bfloat16")]
    first, second = bench.steps_table(measured).rows
    assert first["of the peak"].startswith("50.0") and round(first["of torch's own"], 9) == 90 and second["of the peak"].startswith("20.0")
    assert "of torch's own" not in second


# The large vocabulary

def test_the_large_step_is_measured_between_two_products():
    table = bench.large_table(bench.measure_large(1, ["NumPy"], TINY))
    assert table.rows[0]["step"] == "NumPy" and 0.03 < table.rows[0]["memory"] < 2 and table.rows[0]["time"] > 0


def test_memory_is_looked_at_first(monkeypatch, tmp_path):
    free = bench.available_bytes()
    assert free is None or 0 < free < 1e14
    monkeypatch.setattr(bench, "available_bytes", lambda: 4_900_000_000)
    with expect_error(ValueError, "needs 5 GB of memory, and 4.9 GB are free"): next(bench.bench_training(threads=2, large_vocabulary=True))
    bench.check_bench_training(1, 1, True, None)
    bench.check_bench_training(1, 1, False, None)
    monkeypatch.setattr(bench, "available_bytes", lambda: None)
    bench.check_bench_training(1, 1, True, None)


# The command

def lmcourse(*words, cwd):
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-m", "lmcourse", *map(str, words)], cwd=cwd, env=env, capture_output=True, text=True)


@pytest.mark.parametrize("words, answer", [
    ("bench", "bench needs a PART: tokenizer, training"),
    ("bench trainin", "did you mean 'training'"),
    ("bench --rounds 3", "unknown part '--rounds'"),
    ("bench training --data web", "--data web"),
    ("bench training --max-mb 1", "--max-mb"),
    ("bench tokenizer --large-vocabulary", "--large-vocabulary"),
    ("bench training --rounds 0", "rounds = 0, expected 1 or more"),
    ("bench training --rounds few", "--rounds"),
    ("bench training --threads 0", "threads = 0, expected 1 or more"),
    ("bench training --out letter.txt", "letter.txt exists"),
    ("bench training --out none/results.json", "none: no such folder"),
])
def test_a_mistake_is_one_line_and_leaves_nothing(tmp_path, words, answer):
    (tmp_path/"letter.txt").write_text("a")
    with contextlib.chdir(tmp_path), pytest.MonkeyPatch.context() as patch:
        said = []
        for module in (cli, commands): patch.setattr(module, "print", lambda *line, **more: said.append(" ".join(map(str, line))), raising=False)
        with pytest.raises(SystemExit) as ended: cli.main(words.split())
    assert ended.value.code == 2 and len(said) == 1 and said[0].startswith("lmcourse: ") and "\n" not in said[0] and answer in said[0], said
    assert [p.name for p in tmp_path.iterdir()] == ["letter.txt"]


def test_options_reach_the_bench(monkeypatch, capsys):
    from lmcourse.app import bench as tokenizer
    asked = []
    monkeypatch.setattr(bench, "bench_training", lambda *a: asked.append(a) or ["a line"])
    monkeypatch.setattr(tokenizer, "bench_tokenizer", lambda *a: asked.append(a) or [bench.Table([dict(a=1)])])
    cli.main("bench training --rounds 2 --threads 3 --large-vocabulary --out x.json".split())
    cli.main("bench training".split())
    cli.main("bench tokenizer --data web stories --max-mb 2 --threads 1 --rounds 4 --out y.json".split())
    assert asked == [(2, 3, True, Path("x.json")), (5, None, False, None), (("web", "stories"), 2., 1, 4, Path("y.json"))]
    assert capsys.readouterr().out.startswith("a line\na line\n")


def test_help_is_of_the_part(tmp_path):
    done = lmcourse("bench", "training", "--help", cwd=tmp_path)
    assert done.returncode == 0 and "--large-vocabulary" in done.stdout and "--max-mb" not in done.stdout


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_what_is_stopped_leaves_nothing(tmp_path, how):
    pytest.importorskip("torch")
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-m", "lmcourse", "bench", "training", "--out", "results.json"], cwd=tmp_path, env=env,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while "GFLOP" not in process.stdout.readline(): assert process.poll() is None
    if processes.TOLD: processes.wait_for(lambda: processes.children(process.pid))    # they are importing now
    workers = processes.children(process.pid)
    os.killpg(process.pid, how)                                 # as a terminal does
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130 and err == "lmcourse: interrupted\n"
    assert not list(tmp_path.iterdir()) and processes.gone(*workers)
