"""tools/gpu.py: what is measured on a GPU, step by step."""
import json, subprocess, sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT/"tools"))
import gpu

from lmcourse.accounting.hardware import device_of
from lmcourse.accounting.your_gpu import measured_peers, measured_recipes


def run(monkeypatch, out, *words, results):
    "The tool's main with made up results; the steps that were run"
    seen = []
    def result_of(name, toy, limit): seen.append(name); return dict(results.get(name, dict(value=1)))
    monkeypatch.setattr(gpu, "result_of", result_of)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--dry-run", "--out", str(out), *words])
    try: gpu.main()
    except SystemExit as e: return seen, str(e)
    return seen, ""


def test_a_run_goes_on_with_what_is_missing_or_failed(tmp_path, monkeypatch):
    seen, said = run(monkeypatch, tmp_path, results={"step: transformers": dict(fault="no memory")})
    assert seen == list(gpu.STEPS) and said == "failed: step: transformers"
    found = json.loads((tmp_path/"gpu-dry-run.json").read_text())
    assert found["machine"] and found["date"] and found["steps"]["loop"] == dict(value=1) and not list(tmp_path.glob("*.part"))
    assert run(monkeypatch, tmp_path, results={}) == (["step: transformers"], "")
    assert run(monkeypatch, tmp_path, results={}) == ([], "")
    assert run(monkeypatch, tmp_path, "--again", "loop", results={}) == (["loop"], "")


def test_mistakes_are_refused(tmp_path, monkeypatch, capsys):
    assert run(monkeypatch, tmp_path, "wrting", results={})[1] == "2" and "no step called wrting" in capsys.readouterr().err
    done = subprocess.run([sys.executable, "tools/gpu.py", "--out", tmp_path], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "torch finds no GPU here" in done.stderr and not list(tmp_path.iterdir())


def test_a_step_that_takes_too_long_says_so():
    assert gpu.result_of("products", True, .01) == dict(fault="took more than 0.01 s")


@pytest.mark.slow
def test_all_steps_run_at_toy_size(tmp_path):
    subprocess.run([sys.executable, "tools/gpu.py", "--dry-run", "--out", tmp_path], cwd=ROOT, check=True)
    steps = json.loads((tmp_path/"gpu-dry-run.json").read_text())["steps"]
    assert list(steps) == list(gpu.STEPS) and steps["42M, batch 128"]["tokens_per_s"] > 0 and steps["GPT-2 small"]["excess"] > 0
    # What is not installed is told, and nothing else is left out
    assert all("is not installed" in r["left_out"] or "NANOGPT" in r["left_out"] for r in steps.values() if isinstance(r.get("left_out"), str))
    assert all(isinstance(r, dict) and "fault" not in r for r in steps.values()) and len(steps["writing, 42M"]["tokens_per_s"]) >= 4
    rows = measured_recipes(tmp_path).rows
    assert [r["recipe"] for r in rows] == list(gpu.RECIPES) and {r["card"] for r in rows} == {"dry run"}
    assert {r["who"] for r in measured_peers(tmp_path).rows} >= {"ours", "ours, eager", "CUDA graph", "growing cache"}


def test_every_step_has_a_line_in_the_tables_of_the_page(tmp_path):
    "From a file as a card would write it; steps that failed or were left out have none"
    recipe = dict(tokens_per_s=1.2e6, published_tokens_per_s=556e3, mfu=.45, memory_bytes=13*10**9, counted_bytes=14*10**9, dtype="bfloat16",
                  product_flop_per_s=device_of("h200").peak("bfloat16")/2)
    steps = {"tests": dict(passed=3), "42M, batch 128": recipe, "36M, batch 128": dict(fault="out of memory"), "loop": dict(step_s={}),
             "step: ours": dict(tokens_per_s=1e6, memory_bytes=10**10), "step: nanoGPT, GPT-2 small": dict(left_out="not there"),
             "writing, 42M": dict(tokens_per_s={"CUDA graph": 3000., "engine, 16 texts": 20_000.}, share_of_bandwidth={"CUDA graph": .6})}
    assert measured_recipes(tmp_path) is None and measured_peers(tmp_path) is None
    (tmp_path/"gpu-nvidia-x.json").write_text(json.dumps(dict(gpu="NVIDIA X", steps=steps)))
    row, = measured_recipes(tmp_path).rows
    assert row["card"] == "NVIDIA X" and row["tokens/s"] == 1_200_000 and row["expected"] == 400_000 and row["MFU"] == 45 and row["counted"] == 14
    for name, peak in (("H200", "h200"), ("A100-SXM4-80GB", "a100-80gb"), ("GeForce RTX 4090", "rtx-4090"), ("L40S", None), ("H100 PCIe", None),
                       ("GeForce RTX 4090 Laptop GPU", None), ("GeForce RTX 3070 Ti", None), ("Tesla T4", None)):    # The T4's sheet has no bfloat16
        (tmp_path/"gpu-nvidia-x.json").write_text(json.dumps(dict(gpu=f"NVIDIA {name}", steps=steps)))
        expected = 400_000*(device_of(peak).peak("bfloat16")/recipe["product_flop_per_s"] if peak else 1)    # Of the data sheet's peak where the ledger has one
        assert [r["expected"] for r in measured_recipes(tmp_path).rows] == [round(expected)], name
    one, two, three = measured_peers(tmp_path).rows
    assert (one["what"], one["who"], one["tokens/s"], one["memory"]) == ("a step of training", "ours", 1_000_000, 10.)
    assert (two["what"], two["who"], two["of the bandwidth"]) == ("writing, 42M", "CUDA graph", 60) and three["of the bandwidth"] is None
