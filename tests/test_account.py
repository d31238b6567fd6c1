"The account of a model, and the command that prints it."
import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from processes import here

from lmcourse.accounting.account import account, account_tables, on_device
from lmcourse.accounting.model_flops import training_flops
from lmcourse.accounting.hardware import device
from lmcourse.accounting.activations import activation_bytes
from lmcourse.accounting.memory import kv_cache_bytes, largest_batch, peak_phase, training_bytes
from lmcourse.accounting.parameters import count_parameters
from lmcourse.tools.config import ModelConfig
from lmcourse.tools.show import si


def lmcourse(*words): return here("account", *words, cwd=".")


@pytest.mark.parametrize("preset", ModelConfig.presets())
def test_the_parts_add_up_and_are_those_of_the_chapter(preset):
    c = ModelConfig.preset(preset)
    T = min(1024, c.context_length)
    a = account(c, 3, T, dtype="bfloat16", recompute=True)
    assert sum(a["parameters"]["parts"].values()) == a["parameters"]["unique"] == count_parameters(c).unique
    parts = a["memory"]["parts"]
    assert sum(parts.values()) == activation_bytes(c, 3, T, dtype="bfloat16", recompute=True)
    need = training_bytes(c, 3, T, dtype="bfloat16", recompute=True)
    assert a["memory"]["training"] == sum(need.values()) and {k: a["memory"][k] for k in need} == need
    assert a["memory"]["peak"] == peak_phase(c, 3, T, dtype="bfloat16", recompute=True)["phase"]
    assert a["memory"]["cache"] == kv_cache_bytes(c, 3, T, "bfloat16")
    assert a["flops"]["training"] == sum(training_flops(c, 3, T, recompute=True, fused=True).values()) and a["tokens"] == 3*T
    for table in account_tables(a, on_device(a, "h100")): assert str(table)


def test_a_step_takes_as_long_as_its_useful_flops():
    a = account(ModelConfig.preset("gpt2-small"), 8, recompute=True, dtype="bfloat16")
    placed, d = on_device(a, "a100", mfu=.4), device("a100")
    assert placed["step_seconds"] == pytest.approx(3*sum(a["flops"]["forward"].values())/(.4*d.peak("bfloat16")))
    assert placed["fits"] and placed["largest_batch"] >= 8 and placed["memory_bytes"] == 80*10**9
    read = 2*a["parameters"]["matmul"] + a["memory"]["cache"]
    assert placed["token_seconds"] == read/d.bytes_per_s
    assert not on_device(account(ModelConfig.preset("llama-3-8b"), 8), "a100")["fits"]


def test_what_depends_on_what():
    c = ModelConfig.preset("gpt2-small")
    explicit, short = account(c, 2, attention="explicit"), account(c, 2, 128)
    assert json.dumps(account(c, np.int64(2), np.int64(128))) == json.dumps(short)
    assert explicit["flops"]["training"] == sum(training_flops(c, 2).values()) < account(c, 2)["flops"]["training"]
    assert short["flops"]["causal"] < sum(short["flops"]["forward"].values()) and short["flops"]["adamw"] == 14*124_439_808
    assert on_device(short, device("l4"))["largest_batch"] > on_device(account(c, 2), "l4")["largest_batch"]
    rows = {r["part"]: r for table in account_tables(short) for r in table.rows}
    assert rows["6 N D, for comparison"]["FLOPs"] == 6*124_439_808*256
    assert rows["AdamW"]["FLOPs"] == short["flops"]["adamw"]
    again = account(c, 2, recompute=True)
    assert on_device(again, "l4")["largest_batch"] == largest_batch(c, device("l4").memory_bytes, recompute=True, device="cuda") > on_device(account(c, 2), "l4")["largest_batch"]
    for batch, words in ((2, ": the step fits"), (2000, ": the step does not fit")):
        a = account(c, batch)
        assert next(r["value"] for r in account_tables(a, on_device(a, "l4"))[-1].rows if r["what"] == "memory").endswith(words)
    forward = short["flops"]["forward"]
    assert rows["ffn"]["share"] == pytest.approx(100*forward["ffn"]/sum(forward.values()))


def test_the_memory_is_that_of_the_device():
    "A GPU has no copy of the roots that AdamW takes: with 14 layers the step fits"
    c = replace(ModelConfig.preset("llama-3-8b"), num_layers=14)
    for a in (account(c, 1, 512), account(c, 1, 512, device="cuda")):
        placed = on_device(a, "h100")
        assert placed["fits"] and placed["largest_batch"] == largest_batch(c, 80*10**9, 512, device="cuda") == 10
        assert not on_device(a, replace(device("h100"), kind="cpu"))["fits"]
    assert account(c, 1, 512)["memory"]["training"] > 80*10**9 > a["memory"]["training"] == sum(training_bytes(c, 1, 512, device="cuda").values())


def test_the_command_prints_what_the_function_counts():
    words = ("--preset", "cs336-gpt2-xl", "--batch", 1, "--context", 1024, "--device", "a100", "--logits", "--attention", "explicit")
    out = lmcourse(*words, "--json")
    counted = json.loads(out.stdout)
    assert out.returncode == 0 and not out.stderr
    c = ModelConfig.preset("cs336-gpt2-xl")
    assert counted["parameters"]["unique"] == 2_127_057_600 and sum(counted["flops"]["forward"].values()) == 4_513_336_524_800
    assert sum(counted["memory"]["parts"].values()) == activation_bytes(c, 1, 1024, attention="explicit", logits=True, device="cuda")
    a = account(c, 1, 1024, attention="explicit", logits=True, device="cuda")
    assert counted == json.loads(json.dumps(a | dict(device=on_device(a, "a100"))))
    shown = lmcourse(*words).stdout
    for number in (2_127_057_600, 4_513_336_524_800, counted["memory"]["training"]): assert f"{number:,}" in shown
    assert "NVIDIA A100" in shown


def test_fields_of_the_model_are_options():
    out = json.loads(lmcourse("--preset", "llama-3-8b", "--num-kv-heads", 1, "--context", 100, "--json").stdout)
    assert out["model"]["num_kv_heads"] == 1 and out["memory"]["cache"] == 2*32*128*100*4
    longer = json.loads(lmcourse("--preset", "gpt2-small", "--context", 2048, "--json").stdout)
    assert longer["parameters"]["unique"] == 124_439_808 + 1024*768 and longer["model"]["context_length"] == 2048


def test_one_number_is_at_the_top():
    words = "--preset llama-3-8b --num-layers 16 --d-model 2048 --d-ff 8192 --tie-embeddings --batch 4 --context 2048 --dtype bfloat16".split()
    a = account(replace(ModelConfig.preset("llama-3-8b"), num_layers=16, d_model=2048, d_ff=8192, tie_embeddings=True), 4, 2048, dtype="bfloat16",
                device="cuda")
    shown = lmcourse(*words, "--device", "h100", "--train-tokens", "20e9", "--usd-per-hour", 2).stdout
    top = " ".join(shown.partition("parameters:\n")[0].split())
    assert "llama-3-8b with d_model = 2048, num_layers = 16, d_ff = 8192, tie_embeddings = True: 4 x 2,048 tokens" in top
    assert f"activations {si(sum(a['memory']['parts'].values()), 'B')}" in top and "KV cache of 4 x 2,048 tokens: 268 MB in bfloat16" in top
    step = a["flops"]["step"]
    assert f"{si((step['forward'] + step['backward'])/a['tokens'], 'FLOPs')} per token" in top
    run = on_device(a, "h100", tokens=20e9, usd_per_hour=2)["run"]
    assert run["seconds"] == pytest.approx((step["forward"] + step["backward"])/a["tokens"]*20e9/(.5*device("h100").peak("bfloat16")))
    assert "a run of 20.0 G tokens" in shown and f"${run['usd']:,.2f}" in shown
    assert not lmcourse().stdout.startswith("quickstart with")


def test_a_price_in_float32_tells_of_a_faster_format():
    price = lambda *words: lmcourse("--train-tokens", "1e9", "--device", *words).stdout
    assert "in tfloat32; products in bfloat16 are 2 times as fast there: --dtype bfloat16\n" in (shown := price("h100"))
    assert "494 TFLOP/s in tfloat32, dense" in shown or "495 TFLOP/s in tfloat32, dense" in shown
    assert "times as fast" not in price("h100", "--dtype", "bfloat16") + price("m2")


@pytest.mark.parametrize("words, answer", [
    ("--batch-size 4", "account: did you mean --batch?"),
    ("--usd-per-hour 2", "account: --train-tokens and --usd-per-hour need a --device"),
    ("--device h100 --usd-per-hour 2", "account: --usd-per-hour needs --train-tokens"),
    ("--device h100 --train-tokens 0", "train_tokens = 0.0, expected a number above 0"),
    ("--batch 0", "lmcourse: batch = 0, expected 1 or more"),
    ("--context -3", "lmcourse: context = -3, expected 1 or more"),
    ("--device a10", "unknown device 'a10': did you mean 'a100'?"),
    ("--device m2 --dtype bfloat16", "m2 has no peak rate for bfloat16"),
    ("--device a100 --mfu 0", "lmcourse: mfu = 0.0, expected a share above 0 and at most 1"),
    ("--dtype fp8", "invalid choice 'fp8' for argument '--dtype'"),
    ("--preset gpt2-smal", "did you mean 'gpt2-small'?"),
    ("--num-heads 7", "d_model = 128 is not a multiple of num_heads = 7"),
    ("--batch many", "--batch"),
])
def test_a_mistake_is_one_line(words, answer):
    out = lmcourse(*words.split())
    assert out.returncode == 2 and not out.stdout and answer in out.stderr and len(out.stderr.splitlines()) == 1


def test_the_command_answers_without_torch():
    code = "import sys; from lmcourse.app.cli import main; main(['account', '--preset', 'gpt2-xl', '--device', 'h100']); assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).returncode == 0
