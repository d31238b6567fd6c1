"Kernels chosen by name: in the config, in `train`, `generate` and in runs that go on; the same numbers, and one sentence where they can't."
import json
import shutil
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="kernels need triton: pip install 'lmcourse[kernels]'")

from lmcourse.app import cli
from lmcourse.architecture.transformer_torch import Parts, TransformerLM, named_parts
from lmcourse.kernels import traffic
from lmcourse.kernels.traffic import interpreted
from lmcourse.tools.checks import check_close, expect_error
from lmcourse.tools.config import ModelConfig, TrainConfig
from lmcourse.tools.files import read_json
from lmcourse.tools.machine import compiles
from lmcourse.training.engines import NumpyEngine, TorchEngine
from lmcourse.training.models import load_model

if not interpreted: pytest.skip("on a machine with a GPU, TRITON_INTERPRET=1 runs these", allow_module_level=True)
TINY = ModelConfig(vocab_size=60, context_length=16, d_model=32, num_layers=1, num_heads=2, num_kv_heads=1, d_ff=48)
BOTH = dict(attention="triton", kernels="triton")


def command(capsys, *words):
    "Status, output and errors of the command."
    try: cli.main([str(w) for w in words]); status = 0
    except SystemExit as e: status = e.code
    out, err = capsys.readouterr()
    return status, out, err


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    "Lines of a few words: each is a document, so that evaluation is short, too"
    folder = tmp_path_factory.mktemp("kernels")
    (folder/"lines.txt").write_text("".join(f"{who} saw {what} and {then}.\n" for who in ("Ann", "Ben", "Cleo") for what in ("a hen", "two owls", "no fox") for then in ("ran", "sang", "slept")))
    for words in (["tokenizer", f"text:{folder}/lines.txt", folder/"tok", "--vocab-size", 270], ["prepare", f"text:{folder}/lines.txt", folder/"data", "--tokenizer", folder/"tok", "--valid-documents", 2]):
        cli.main([str(w) for w in words])
    return folder


SIZES = ["--context-length", 12, "--d-model", 32, "--num-layers", 1, "--num-heads", 1, "--d-ff", 32, "--batch-size", 1, "--steps", 3, "--eval-every", 9, "--eval-documents", 1, "--log-every", 1, "--checkpoint-every", 2, "--device", "cpu", "--windows", "random"]


def losses(run): return [r["loss"] for r in map(json.loads, (run/"metrics.jsonl").read_text().splitlines()) if "loss" in r]


@pytest.fixture(scope="module")
def runs(data):
    made = {}
    for name, words in dict(torch=[], triton=["--attention", "triton"]).items():
        made[name] = data/name
        cli.main([str(w) for w in ("train", data/"data", made[name], *SIZES, *words)])
    return made


def test_train_with_kernels_has_the_same_losses_and_says_so_in_its_config(runs):
    assert len(losses(runs["torch"])) == 3
    check_close(losses(runs["triton"]), losses(runs["torch"]), 1e-5)
    saved = read_json(runs["triton"]/"config.json")
    assert {k: saved["train"][k] for k in BOTH} == dict(attention="triton", kernels="auto")


def test_a_run_is_a_model_with_whatever_kernels(runs):
    ids = torch.arange(5)[None]
    logits = [load_model(runs["triton"], "cpu", "latest", **names)[0](ids).detach() for names in ({}, BOTH)]
    check_close(logits[1], logits[0], 1e-5, 1e-5)
    assert load_model(runs["triton"])[0].parts == Parts()


def test_a_run_goes_on_with_other_kernels(runs, data, capsys, monkeypatch):
    other = data/"other"
    shutil.copytree(runs["triton"], other)
    shutil.rmtree(other/"checkpoints/step_000003")
    seen, make = [], TransformerLM.__init__
    monkeypatch.setattr(TransformerLM, "__init__", lambda self, *a, **k: (seen.append(k.get("parts", Parts())), make(self, *a, **k))[1])
    assert command(capsys, "train", "--resume", other, "--attention", "torch", "--kernels", "torch")[0] == 0
    assert seen and all(parts == Parts() for parts in seen)
    assert len(losses(other)) == 3
    check_close(losses(other), losses(runs["torch"]), 1e-5)


def test_generate_writes_the_same_text(runs, capsys):
    texts = [command(capsys, "generate", runs["torch"], "--prompt", "Ann saw", "--max-tokens", 3, "--temperature", 0, *words) for words in ([], ["--attention", "triton"])]
    assert texts[0][0] == 0 and texts[0][1].startswith("Ann saw") and texts[1] == texts[0]
    status, _, err = command(capsys, "generate", runs["torch"], "--quantize", "int8", "--attention", "triton")
    why = "kernels of Triton: they take floating-point weights, quantize = none would do" if compiles() else "NUMBA_DISABLE_JIT = 1"
    assert status == 2 and err.startswith(f"lmcourse: quantize = int8 with {why}") and err.count("\n") == 1


@pytest.mark.parametrize("words, what", [
    (["--kernels", "triton", "--norm", "layernorm"], "kernels = triton with norm = layernorm, expected rmsnorm; kernels = torch would do"),
    (["--kernels", "triton", "--z-loss", "0.1"], "kernels = triton with z_loss = 0.1, expected 0.0; kernels = torch would do"),
    (["--kernels", "triton", "--ffn", "gelu"], "kernels = triton with ffn = gelu, expected swiglu; kernels = torch would do"),
    (["--attention", "triton", "--head-dim", "512"], "attention = triton with heads of 512 numbers, expected at most 256; attention = torch would do"),
    (["--attention", "triton", "--compile"], "compile = True with Triton kernels on a CPU, where they are interpreted: compile = False would do"),
    (["--attention", "triton", "--engine", "numpy"], "engine = numpy with attention = triton: it computes in float32 on the CPU, in one process, with AdamW"),
    (["--attention", "trito"], None),
])
def test_what_kernels_cannot_is_rejected_before_anything_is_written(data, tmp_path, capsys, words, what):
    status, out, err = command(capsys, "train", data/"data", tmp_path/"run", *SIZES, *words)
    assert status == 2 and err.count("\n") == 1 and not (tmp_path/"run").exists() and not out
    assert err == f"lmcourse: {what}\n" if what else "torch" in err and "triton" in err


def test_without_triton_one_sentence_says_what_to_install(data, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(traffic, "triton", None)
    for field in BOTH:
        status, _, err = command(capsys, "train", data/"data", tmp_path/"run", *SIZES, f"--{field}", "triton")
        assert status == 2 and not (tmp_path/"run").exists()
        assert err == f"lmcourse: {field} = triton needs Triton: pip install 'lmcourse[kernels]', on Linux; {field} = torch would do\n"


def test_on_a_processor_beside_a_gpu(monkeypatch):
    monkeypatch.setattr(traffic, "interpreted", False)
    with expect_error(ValueError, "attention = triton on the CPU of a machine with a GPU: TRITON_INTERPRET=1 interprets the kernels; attention = torch would do"):
        TorchEngine(TINY, TrainConfig(device="cpu", attention="triton"))
    named_parts(TINY, "triton", "triton", "cuda")


def test_on_a_mesh_and_in_numpy():
    from lmcourse.parallelism.mesh import check_mesh
    from lmcourse.training.engines import World
    for field in BOTH:
        with expect_error(ValueError, f"{field} = triton on a mesh: {field} = torch would do"):
            check_mesh(TINY, TrainConfig(device="cpu", tensor_parallel_degree=2, **{field: "triton"}), World())
        with expect_error(ValueError, f"engine = numpy with {field} = triton"): NumpyEngine(TINY, TrainConfig(engine="numpy", **{field: "triton"}))


def test_configs_of_before_load():
    values = TrainConfig().to_dict()
    for field in BOTH: del values[field]
    old = TrainConfig.from_dict(values)
    assert (old.attention, old.kernels) == ("torch", "auto")


@pytest.mark.parametrize("names, fields", [
    (dict(attention="triton"), dict(window=5, qk_norm=True, tie_embeddings=True)), (dict(kernels="triton"), dict()),
    (BOTH, dict(num_experts=4, moe_d_ff=20, num_shared_experts=1, router_aux_loss=.01)), (BOTH, dict(num_experts=4, capacity_factor=1.))])
def test_steps_of_the_engine_equal_torchs(names, fields):
    config = replace(TINY, **fields)
    ids = torch.randint(60, (1, 10), generator=torch.Generator().manual_seed(0))
    found = []
    for chosen in ({}, names):
        engine = TorchEngine(config, TrainConfig(device="cpu", **chosen))
        steps = []
        for _ in range(2):
            steps.append(engine.forward_backward((ids[:, :-1], ids[:, 1:])).item())
            engine.optimizer_step(1e-3)
        found.append(steps)
    check_close(found[1], found[0], 1e-5)
