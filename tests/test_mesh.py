"A model on a mesh is the model of one process: its losses, its gradient's length, its weights, its checkpoints, on any mesh; every byte equals its formula."
import json
import os
import re
import signal
import socket
import subprocess
import sys
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from processes import here, lmcourse
from test_sharding import script

from lmcourse.parallelism.mesh import MeshEngine, check_mesh, dry_run, pretended_mesh, step_bytes
from lmcourse.tokenization.tokenizer import Tokenizer
from lmcourse.tools.config import ModelConfig, TrainConfig
from lmcourse.training.data import write_tokens
from lmcourse.training.engines import mesh_sizes

pytestmark = [pytest.mark.skipif(not hasattr(os, "fork") or not torch.distributed.is_available(), reason="needs fork and torch.distributed"),
              pytest.mark.skipif(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13), reason="the mesh is tried with torch 2.13 only")]

CP = dict(context_parallel_degree=2)
TP, PP, SP, COPIES = dict(tensor_parallel_degree=2), dict(pipeline_parallel_degree=2), dict(tensor_parallel_degree=2, sequence_parallel=True), dict(data_parallel_replicate_degree=2)
GPT2 = dict(norm="layernorm", position="learned", ffn="gelu", bias=True, tie_embeddings=True)
TIED = dict(tie_embeddings=True, scale_embeddings=True, qk_norm=True)

# Every script begins with this, after that of test_sharding: float64, a batch whose rows have different numbers of targets, and what one process makes of it.
BEGIN = """
import math, torch.distributed.pipelining
from lmcourse.parallelism.mesh import MeshEngine
torch.set_default_dtype(torch.float64)
MODEL = ModelConfig(vocab_size=48, context_length=16, d_model=16, num_layers=4, num_heads=4, d_ff=32)
SHORT = TrainConfig(device="cpu", batch_size=8, micro_batch=1, timeout_seconds=30)
def rows(step, tokens=16): # One row has no target at all
    ids = torch.randint(48, (8, tokens + 1), generator=torch.Generator().manual_seed(step))
    targets = ids[:, 1:].clone()
    targets[5:, 4:] = targets[2] = -100
    return ids[:, :-1], targets
def train(e, steps): # Loss and length of the gradient of each step
    seen = []
    for step in steps:
        batch = rows(step, e.model.config.context_length)
        x, y = (e.world.shard_batch(t).split(1) for t in batch)
        total, loss = int((batch[1] != -100).sum()), 0.
        for i,part in enumerate(zip(x, y)): loss += float(e.forward_backward(part, int((part[1] != -100).sum())/total, i == len(x) - 1))
        seen.append((*e.world.all_reduce_sum(loss), e.optimizer_step(1e-2)))
    return seen
def alone(model, config=SHORT): return TorchEngine(model, config)
def on_mesh(model, config): return MeshEngine(model, config, join_world(CPU, config), CPU)
def near(a, b, limit=1e-12): assert all(abs(x - y) < limit for u,v in zip(a, b, strict=True) for x,y in zip(u, v, strict=True)), (a, b)
def same_weights(a, b, limit=1e-12):
    for (name, p),(other, q) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        most = 100*limit if name.endswith("k_proj.bias") else limit # Its gradient is 0 but for rounding (without RoPE), which AdamW divides by 1e-8
        assert name == other and float((p - q).detach().abs().max()) < most, name
def equal(model, config): # One process and the mesh
    one, many = alone(model), on_mesh(model, config)
    same_weights(many.whole_model(), one.model, 1e-300)         # The same bits at the start
    near(train(many, range(3)), train(one, range(3)))
    same_weights(many.whole_model(), one.model)
    mine = set(map(id, many.model.parameters()))
    for tokens in (7, model.context_length):                    # 7: no process divides it
        with torch.inference_mode():
            ids = rows(0, model.context_length)[0][:3, :tokens]
            assert float((many.model(ids) - one.model(ids)).abs().max()) < 1e-12
    many.model.reshard()                                        # As before a checkpoint
    assert set(map(id, many.model.parameters())) == mine
    near(train(many, range(3, 4)), train(one, range(3, 4)))
def case(change, variant={}): equal(replace(MODEL, **variant), replace(SHORT, **change))
"""


def on(tmp_path, processes, cases, **how):
    "Each case in that many processes against one"
    (folder := tmp_path/str(processes)).mkdir()
    script(folder, f"{BEGIN}\nCASES = {cases!r}\ndef work(rank):\n    for c in CASES: case(*c)\nworld({processes}, work)", seconds=300, **how)


def test_two_and_four_processes_take_the_steps_of_one(tmp_path):
    on(tmp_path, 2, [(SP, TIED), (PP, TIED), (CP, TIED | dict(num_kv_heads=2, window=5)), (TP, dict(context_length=15))])
    on(tmp_path, 4, [(PP | SP, dict(tie_embeddings=True)), (PP, {})])


@pytest.mark.slow
@pytest.mark.parametrize("processes, cases", [
    (2, [(dict(data_parallel_shard_degree=2), {}), (dict(data_parallel_replicate_degree=2), {}), (TP, {}), (SP, {}), (PP | dict(pipeline_parallel_schedule="GPipe"), {}), (PP | dict(pipeline_parallel_schedule="Interleaved1F1B"), TIED)]),
    (2, [(TP, GPT2), (SP, GPT2), (PP, GPT2), (TP, dict(norm_position="post", num_kv_heads=2)), (SP, dict(window=5, embedding_std=.02)), (PP, dict(norm_position="sublayer", z_loss=.01, scaled_init=True)), (PP | dict(recompute=True), {}), (TP, dict(copy_init=True)), (PP, dict(copy_init=True)), (SP | dict(recompute=True), {})]),
    (3, [(dict(pipeline_parallel_degree=3), TIED), (dict(data_parallel_shard_degree=-1, tensor_parallel_degree=3), dict(num_heads=6, head_dim=4, d_ff=33))]),
    (4, [(TP, TIED), (PP, TIED), (COPIES, {}), (COPIES | TP, {}), (dict(tensor_parallel_degree=4), {}), (dict(pipeline_parallel_degree=4), TIED), (COPIES | PP, GPT2)]),
    (4, [(CP, {}), (CP | SP, GPT2), (CP | PP, TIED), (CP | COPIES, {}), (dict(context_parallel_degree=4), dict(num_kv_heads=1)), (CP | TP | dict(recompute=True), dict(context_length=12))]),
    (8, [(PP | SP, TIED)]), (8, [(COPIES | SP, TIED)]), (8, [(CP | PP | TP, TIED)])], ids=str)
def test_every_mesh_takes_the_steps_of_one_process(tmp_path, processes, cases): on(tmp_path, processes, cases)


def test_a_pipeline_evaluates_again_in_bfloat16(tmp_path):
    "Its layers are whole, and in 16 bits, after the first time; what stages send is still float32"
    script(tmp_path, BEGIN + """
torch.set_default_dtype(torch.float32)
def work(rank):
    e = on_mesh(MODEL, replace(SHORT, pipeline_parallel_degree=2, dtype="bfloat16"))
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16): a, b = (e.model(rows(0)[0][:3]) for _ in range(2))
    assert torch.equal(a, b)
world(4, work)
""")


def test_a_sharded_model_may_be_evaluated_before_its_first_step(tmp_path):
    "FSDP makes tensors in the first forward pass that it needs again, also for training."
    tokenizer = Tokenizer.train(["the cat sat"], 262)
    write_tokens(tmp_path/"valid", [f"the cat sat {i}" for i in range(4)], tokenizer, "cats")
    script(tmp_path, BEGIN + f"""
from lmcourse.training.data import TokenDataset
from lmcourse.training.evaluation import evaluate
def work(rank):
    e = on_mesh(replace(MODEL, vocab_size=262), replace(SHORT, data_parallel_replicate_degree=2))
    found = [evaluate(e.model, TokenDataset.open({str(tmp_path/'valid')!r}), 16, world=e.world).loss for _ in range(2)]
    assert found[0] == found[1]
    train(e, range(1))
world(2, work)
""")


def test_ring_attention_in_bfloat16_is_as_exact_as_on_one_process(tmp_path):
    "Torch's attention is .004 from float64"
    script(tmp_path, """
from lmcourse.parallelism.mesh import RingAttention, own_places
def work(rank):
    here, g = own_places(64, dist.group.WORLD), torch.Generator().manual_seed(0)
    *given, dout = torch.randn(4, 1, 4, 128, 32, generator=g)
    exact = [t.double().requires_grad_() for t in given]
    right = torch.nn.functional.scaled_dot_product_attention(*exact, is_causal=True)
    right.backward(dout.double())
    inputs = [t[:, :, here].bfloat16().requires_grad_() for t in given]
    with torch.autocast("cpu", torch.bfloat16):
        out = RingAttention.apply(*inputs, None, dist.group.WORLD)
        out.backward(dout[:, :, here].bfloat16())
    for got, want in zip((out, *(t.grad for t in inputs)), (right, *(t.grad for t in exact))):
        want = want[:, :, here]
        assert got.dtype == torch.bfloat16 and float((got - want).norm()/want.norm()) < .006
world(2, work)
""")


# Checkpoints

MOVES = """
TIED = replace(MODEL, tie_embeddings=True)
one = alone(TIED)
EXPECTED = train(one, range(6))
def started(**degrees):
    def work(rank):
        e = on_mesh(TIED, replace(SHORT, **degrees))
        near(train(e, range(2)), EXPECTED[:2])
        save(e, 2)
    return work
def goes_on(first, last, **degrees): # Other weights, until those of the checkpoint come
    def work(rank):
        e = on_mesh(TIED, replace(SHORT, seed=9, **degrees))
        assert e.load(Checkpoints(folder/"run").latest(), TIED.to_dict()) == first
        near(train(e, range(first, last)), EXPECTED[first:last])
        save(e, last)
        if last == 6: same_weights(e.whole_model(), one.model)
    return work
def by_one(first, last, write=False): # Of a checkpoint in parts
    e = alone(TIED, replace(SHORT, seed=9))
    assert e.load(Checkpoints(folder/"run").latest(), TIED.to_dict()) == first
    near(train(e, range(first, last)), EXPECTED[first:last])
    if write: save(e, last)
"""


def test_four_processes_begin_two_go_on_and_one_ends(tmp_path):
    script(tmp_path, BEGIN + MOVES + """
world(4, started(pipeline_parallel_degree=2, tensor_parallel_degree=2))
world(2, goes_on(2, 4, tensor_parallel_degree=2, sequence_parallel=True))
by_one(4, 6)
path = Checkpoints(folder/"run").latest()
gone = path/"model-00002-of-00002.safetensors"
gone.unlink()
def misses(rank): # A part is not there: all say so, and nothing has moved
    e = on_mesh(TIED, replace(SHORT, pipeline_parallel_degree=2))
    before = [p.clone() for p in e.model.parameters()]
    try: e.load(path, TIED.to_dict())
    except (ValueError, OSError) as error: assert str(error) in (f"{gone}: no such file", f"{path}: damaged or changed; another process says where"), error
    else: raise AssertionError("it was loaded")
    assert all(torch.equal(p, q) for p,q in zip(e.model.parameters(), before)) and not e.optimizer.state
    other = replace(TIED, num_layers=3)
    try: on_mesh(other, replace(SHORT, pipeline_parallel_degree=2)).load(path, other.to_dict())
    except ValueError as error: assert "num_layers is 4 there, 3 here" in str(error), error
    else: raise AssertionError("it was loaded")
world(2, misses)
""", seconds=300)


@pytest.mark.slow
def test_a_run_moves_from_mesh_to_mesh(tmp_path):
    "What one process wrote, too"
    script(tmp_path, BEGIN + MOVES + """
world(2, started(pipeline_parallel_degree=2, pipeline_parallel_schedule="Interleaved1F1B"))
world(4, goes_on(2, 3, tensor_parallel_degree=2, data_parallel_shard_degree=2))
by_one(3, 4, write=True)
world(3, goes_on(4, 5, pipeline_parallel_degree=3))
world(8, goes_on(5, 6, pipeline_parallel_degree=2, tensor_parallel_degree=2, data_parallel_replicate_degree=2))
""", seconds=300)


# Who dies, and what is infinite

FAULTS = """
import signal
def dies(rank): # In the middle of a run: the others end within the time that they wait
    e = on_mesh(MODEL, replace(SHORT, pipeline_parallel_degree=2))
    train(e, range(1))
    if rank == 1: os.kill(os.getpid(), signal.SIGKILL)
    try: train(e, range(1, 9))
    except RuntimeError as error: os._exit(3 if "closed by peer" in str(error) or "reset by peer" in str(error) else 4)
world(2, dies, (3, -9))
def infinite(rank): # On one process: all know it, nothing moves
    e = on_mesh(MODEL, replace(SHORT, pipeline_parallel_degree=2))
    with torch.no_grad():
        if rank == 1: dict(e.model.named_parameters())["layers.3.ffn.w2.weight"][0, 0] = math.inf
    before = [p.clone() for p in e.model.parameters()]
    (_, norm), = train(e, range(1))
    assert not math.isfinite(norm) and e.find_nonfinite([], None) == "the weights of layers.3.ffn.w2.weight: not finite"
    assert all(torch.equal(p, q) for p,q in zip(e.model.parameters(), before))
world(2, infinite)
"""


def test_a_process_that_dies_and_a_weight_that_is_infinite_are_noticed_by_all(tmp_path): script(tmp_path, BEGIN + FAULTS)


def test_a_port_that_is_in_use_is_said_in_one_sentence(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code = "import torch; from lmcourse.tools.config import TrainConfig; from lmcourse.training.engines import join_world; join_world(torch.device('cpu'), TrainConfig(tensor_parallel_degree=2, timeout_seconds=2))"
        places = dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        done = [subprocess.run([sys.executable, "-c", code], env=os.environ | places | dict(RANK=str(rank)), capture_output=True, text=True, timeout=120) for rank in (0,)]
    assert f"ValueError: port {port} is in use by another program: another MASTER_PORT would do, or torchrun --standalone" in done[0].stderr


# The mesh, without processes

def test_processes_of_a_part_of_the_batch_are_those_that_differ_in_other_axes():
    config = TrainConfig(pipeline_parallel_degree=2, tensor_parallel_degree=3, data_parallel_replicate_degree=2)
    assert mesh_sizes(config, 24) == dict(pp=2, dp_replicate=2, dp_shard=2, tp=3)
    seen = []
    for rank in range(24):
        with pretended_mesh(config, 24, rank) as world: seen.append((world.rank, world.copy, world.writes))
        assert (world.size, world.copies, world.processes) == (4, 6, 24)
    assert len(set(seen)) == 24 and [s[2] for s in seen] == [True] + [False]*23
    assert sorted({s[0] for s in seen}) == [0, 1, 2, 3] and sorted({s[1] for s in seen}) == list(range(6))


TOY = ModelConfig(vocab_size=48, context_length=16, d_model=24, num_layers=4, num_heads=4, d_ff=36)


slow = lambda case: pytest.param(case, marks=pytest.mark.slow)


@pytest.mark.parametrize("change", [slow(dict(data_parallel_shard_degree=8)), slow(TP), PP | SP, slow(COPIES | TP), slow(COPIES | PP), slow(dict(tensor_parallel_degree=4, sequence_parallel=True)), CP | PP, slow(CP | SP), slow(CP | COPIES)], ids=str)
def test_a_step_sends_what_the_formula_says(change):
    "Also where rows of a weight don't divide by the processes"
    config = replace(TrainConfig(device="cpu", batch_size=16, micro_batch=2), **change)
    for model, ranks in ((TOY, (5,)), (replace(TOY, tie_embeddings=True, vocab_size=52), (0, 5))):
        for rank in ranks:
            counted = dry_run(model, config, 8, rank)
            formula = step_bytes(model, config, 8, counted["stage"])
            assert {axis: counted[f"{axis} sent"] for axis in formula} == formula and sum(formula.values()) > 0


def test_with_context_as_the_only_axis_pages_and_weights_are_told_apart():
    "Then the processes that share weights are the very group of the ring."
    config, model = TrainConfig(device="cpu", batch_size=2, **CP), replace(TOY, num_layers=1)
    counted = dry_run(model, config, 2)
    formula = step_bytes(model, config, 2)
    assert {axis: counted[f"{axis} sent"] for axis in formula} == formula and formula["cp"] and formula["dp_shard"]


def test_of_a_tied_table_a_process_sends_its_rows_and_the_formula_the_most():
    "51 rows shared out as 26 and 25; its two ends send their own share of the gradient."
    config, model = TrainConfig(device="cpu", batch_size=8, micro_batch=2, **PP), replace(TOY, num_layers=2, tie_embeddings=True, vocab_size=51)
    for rank in range(4):
        counted = dry_run(model, config, 4, rank)
        formula = step_bytes(model, config, 4, counted["stage"])
        assert formula["pp"] - counted["pp sent"] == rank % 2*4*TOY.d_model and counted["dp_shard sent"] == formula["dp_shard"]


LLAMA = ModelConfig(vocab_size=128_256, context_length=8192, d_model=16_384, num_layers=126, num_heads=128, num_kv_heads=8, d_ff=53_248, rope_theta=5e5)


@pytest.mark.slow
def test_4096_processes_are_rehearsed_by_one():
    "Llama 3 405B: the first, an inner and the last stage of eight"
    config = TrainConfig(device="cpu", batch_size=512, micro_batch=1, pipeline_parallel_degree=8, **SP | dict(tensor_parallel_degree=8))
    for rank in (0, 600, 4095):
        counted = dry_run(LLAMA, config, 4096, rank)
        formula = step_bytes(LLAMA, config, 4096, counted["stage"])
        assert {axis: counted[f"{axis} sent"] for axis in formula} == formula
        assert counted["state_bytes"] < 2e9


@pytest.mark.parametrize("processes, change, words", [
    (8, dict(tensor_parallel_degree=3), "a mesh of pp 1 x dp_replicate 1 x tp 3 x dp_shard is for a multiple of 3 processes, but there are 8: 6 or 9 would do"),
    (1, dict(tensor_parallel_degree=2), "is for a multiple of 2 processes, but there are 1: 2 would do"),
    (8, dict(tensor_parallel_degree=2, data_parallel_shard_degree=3), "is 6 processes, but there are 8: torchrun --nproc-per-node 6 would do"),
    (8, dict(tensor_parallel_degree=8), "4 query and 4 key/value heads over 8 processes: a tensor_parallel_degree of 1, 2, 4 would do"),
    (2, TP | dict(model=dict(vocab_size=49)), "vocab_size = 49 over 2 processes: 48 or 50 would do"),
    (2, TP | dict(model=dict(d_ff=35)), "d_ff = 35 over 2 processes: 34 or 36 would do"),
    (2, SP | dict(model=dict(context_length=15)), "context_length = 15 over 2 processes: 14 or 16 would do"),
    (2, TP | dict(model=dict(position="sinusoidal")), "rope, learned or none would do"),
    (2, TP | dict(model=dict(z_loss=.1)), "z_loss = 0.1 with tensor_parallel_degree above 1: 0 would do"),
    (2, CP | dict(model=dict(context_length=18)), "context_length = 18 in 4 pieces: 16 or 20 would do"),
    (4, CP | SP | dict(model=dict(context_length=12)), "context_length = 12 in 8 pieces: 8 or 16 would do"),
    (2, CP | dict(model=dict(num_experts=4)), "A mesh does not compute num_experts = 4: shard = True does"),
    (3, CP, "a mesh of pp 1 x dp_replicate 1 x cp 2 x tp 1 x dp_shard is for a multiple of 2 processes, but there are 3: 2 or 4 would do"),
    (2, dict(sequence_parallel=True, data_parallel_shard_degree=2), "sequence_parallel = True with tensor_parallel_degree = 1"),
    (5, dict(pipeline_parallel_degree=5), "4 layers for 5 stages, expected a layer for each: 1 to 4 stages would do"),
    (4, dict(pipeline_parallel_degree=4, micro_batch=8), "2 micro-batches for 4 pipeline stages, expected at least 4: a smaller micro_batch"),
    (2, PP | dict(model=dict(num_experts=4)), "A mesh does not compute num_experts = 4: shard = True does"),
    (2, PP | dict(model=dict(mup_base_width=8)), "A mesh does not compute mup_base_width = 8"),
    (2, PP | dict(optimizer="muon"), "optimizer = muon on a mesh: optimizer = adamw would do"),
    (2, PP | dict(dtype="float16"), "dtype = float16 on a mesh: dtype = bfloat16 or float32 would do"),
    (2, PP | dict(compile=True), "compile = True on a mesh: compile = False would do")], ids=str)
def test_what_can_not_be_cut_is_refused_with_what_would_do(processes, change, words):
    model = replace(TOY, **change.get("model", {}))
    with pytest.raises(ValueError, match=re.escape(words)):
        config = TrainConfig(device="cpu", batch_size=16, **dict(micro_batch=1) | {k: v for k, v in change.items() if k != "model"})
        with pretended_mesh(config, processes) as world: check_mesh(model, config, world)


@pytest.mark.parametrize("call", [dry_run, step_bytes])
def test_a_rehearsal_needs_a_degree_of_parallelism(call):
    with pytest.raises(ValueError, match="no degree of parallelism"): call(TOY, TrainConfig(device="cpu"), 2)


def test_an_older_torch_refuses_a_pipeline(monkeypatch):
    from torch.distributed.tensor import debug
    monkeypatch.delattr(debug, "_clear_sharding_prop_cache", raising=False)
    config = TrainConfig(device="cpu", batch_size=8, micro_batch=1, **PP)
    with pytest.raises(ValueError, match="2 pipeline stages with torch .*: pipelines are tested only with torch 2.13"), pretended_mesh(config, 2) as world:
        check_mesh(ModelConfig(vocab_size=48, context_length=16, d_model=16, num_layers=4, num_heads=4, d_ff=32), config, world)


def test_a_config_with_both_or_with_impossible_degrees_is_refused():
    for change, words in [(dict(shard=True, tensor_parallel_degree=2), "shard = True with degrees of parallelism"), (dict(data_parallel_shard_degree=0), "1 or more, or -1 for the rest"),
                          (dict(tensor_parallel_degree=0), "tensor_parallel_degree = 0, expected more than 0"), (dict(pipeline_parallel_schedule="2F2B"), "expected one of GPipe, 1F1B, Interleaved1F1B")]:
        with pytest.raises(ValueError, match=re.escape(words)): TrainConfig(**change)
    with pytest.raises(ValueError, match="another loss|for others use shard = True"):
        with pretended_mesh(TrainConfig(device="cpu", tensor_parallel_degree=2), 2) as world: check_mesh(TOY, TrainConfig(tensor_parallel_degree=2), world, len)


# The command

DOUBLE = """import sys, torch
torch.set_default_dtype(torch.float64)
from lmcourse.app.cli import main
if __name__ == "__main__": main(sys.argv[1:])
"""


def torchrun(processes, folder, *words, **how):
    "The command in float64 on so many processes; the port is whatever is free"
    (folder/"double.py").write_text(DOUBLE)
    return subprocess.Popen([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "double.py", *map(str, words)],
                            cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | dict(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo"), **how)


def lines(run): return [json.loads(line) for line in (run/"metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_run_of_the_command_is_killed_and_goes_on_with_another_number_of_processes(tmp_path):
    "Four processes, one of which is killed; two go on, on another mesh; losses are those of one process"
    for words in ("tokenizer stories tok --vocab-size 500 --max-mb .1", "prepare stories data --tokenizer tok --max-mb .2 --valid-documents 10"):
        assert here(*words.split(), cwd=tmp_path).returncode == 0
    words = ("--steps 12 --context-length 16 --d-model 16 --num-layers 2 --num-heads 4 --num-kv-heads 2 --d-ff 32 --windows within --eval-documents 2 --eval-every 20 --checkpoint-every 1 "
             "--log-every 1 --batch-size 8 --micro-batch 1 --device cpu --timeout-seconds 60").split()
    one = torchrun(1, tmp_path, "train", "data", "one", *words)
    assert one.communicate(timeout=300)[1] is None and one.returncode == 0
    four = torchrun(4, tmp_path, "train", "data", "many", *words, "--tensor-parallel-degree", 2, "--pipeline-parallel-degree", 2)
    said = []
    while not (tmp_path/"many/checkpoints/step_000004").exists():
        if four.poll() is not None: raise AssertionError(four.communicate()[0][-3000:])
    workers = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(four.pid)], capture_output=True, text=True).stdout.splitlines()
    os.kill(int(next(w for w in reversed(workers) if "double.py" in w).split()[0]), signal.SIGKILL)
    said = four.communicate(timeout=300)[0]
    assert four.returncode == 1 and len(lines(tmp_path/"many")) < 12, said[-3000:]
    two = torchrun(2, tmp_path, "train", "--resume", "many", "--pipeline-parallel-degree", 1, "--sequence-parallel")
    said = two.communicate(timeout=500)[0]
    assert two.returncode == 0 and "many: going on after step" in said, said[-3000:]
    for a, b in zip(lines(tmp_path/"many"), lines(tmp_path/"one"), strict=True):
        assert a.keys() == b.keys() and all(abs(a[k] - b[k]) < 1e-10 for k in a if k in ("loss", "grad_norm", "lr", "step", "tokens")), (a, b)
        if "valid_loss" in a: assert abs(a["valid_loss"] - b["valid_loss"]) < 1e-6      # Evaluation sums in float32


@pytest.mark.slow
def test_the_command_refuses_a_mesh_that_does_not_fit_in_one_line(tmp_path):
    for words in ("tokenizer stories tok --vocab-size 500 --max-mb .1", "prepare stories data --tokenizer tok --max-mb .2 --valid-documents 10"):
        assert here(*words.split(), cwd=tmp_path).returncode == 0
    one = lmcourse("train", "data", "run", "--tensor-parallel-degree", 2, "--device", "cpu", cwd=tmp_path)
    assert one.returncode == 2 and one.stderr.count("\n") == 1 and not (tmp_path/"run").exists()
    assert one.stderr.startswith("lmcourse: a mesh of pp 1 x dp_replicate 1 x tp 2 x dp_shard is for a multiple of 2 processes, but there are 1: 2 would do")


# A process that is lost, as the user sees it

LOST = """
from lmcourse.app import cli, training_commands
from lmcourse.training.trainer import Trainer
torch.set_default_dtype(torch.float32)
for words in ("tokenizer stories tok --vocab-size 300 --max-mb .05", "prepare stories data --tokenizer tok --max-mb .05 --valid-documents 2"): cli.main(words.split())
def loses(rank): # One is killed in its third step; the other says so, begins no fourth and leaves a checkpoint
    began, step = [], Trainer.train_step
    def train_step(self, *args):
        if (folder/"run/checkpoints").exists(): began.append(self.step)     # Not while steps are measured beforehand
        if rank == 1 and began[-1:] == [2]: os.kill(os.getpid(), 9)
        return step(self, *args)
    Trainer.train_step = train_step
    refuse = training_commands.refuse_existing                              # These processes have met before, and one could find what the other has just made
    training_commands.refuse_existing = lambda out: (refuse(out), torch.distributed.barrier())
    sys.stderr = open(folder/"said", "w", buffering=1) if rank == 0 else sys.stderr
    try: cli.main("train data run --steps 50 --context-length 16 --d-model 16 --num-layers 2 --num-heads 2 --d-ff 32 --batch-size 4 --micro-batch 1 --windows random --eval-documents 1 --checkpoint-every 1 --device cpu --timeout-seconds 60".split() + ["--pipeline-parallel-degree", "2"])
    except SystemExit as e:
        sys.stderr = sys.__stderr__
        assert e.code == 2 and began == [1, 2], (e.code, began)
        os._exit(5)
world(2, loses, (5, -9))
said = (folder/"said").read_text().splitlines()
assert said == ["lmcourse: another process of this run has died, or does not answer; go on with: lmcourse train --resume run"], said
assert [p.name for p in sorted((folder/"run/checkpoints").iterdir()) if p.name.startswith("step")][-1] == "step_000002"
"""


def test_a_lost_process_is_told_in_one_sentence_by_the_others(tmp_path):
    "Nobody waits: the wires close with the process, and no step is begun after that"
    script(tmp_path, BEGIN + f"os.chdir({str(tmp_path)!r})\n" + LOST, seconds=300)


def test_a_failed_step_leaves_no_micro_batch_waiting():
    config = TrainConfig(device="cpu", tensor_parallel_degree=2)
    with pretended_mesh(config, 2) as world:
        engine = MeshEngine(TOY, config, world, torch.device("cpu"))
        engine.waiting.append("of a step that failed")
        engine.forget_gradients()
        assert not engine.waiting


def test_positions_are_on_the_device_of_the_ids():
    "A stage that shares its texts asked a GPU's position embeddings for positions on the CPU."
    from types import SimpleNamespace

    from lmcourse.parallelism.mesh import Stage
    stage, seen = Stage(replace(TOY, position="learned"), 0, 1), []
    stage.context = SimpleNamespace(size=lambda: 2, rank=lambda: 1)
    stage.position_embeddings.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].device.type))
    stage(torch.zeros(2, 8, dtype=torch.int64, device="meta"))  # As far from the CPU as a GPU
    assert seen == ["meta"]
