"A sharded model is the same model: its bits at the start, its losses, its checkpoints; and it may be larger than what a process can hold."
import json
import os
import sys
import threading

import processes
import pytest

torch = pytest.importorskip("torch")

from lmcourse.tools.config import ModelConfig, TrainConfig
from lmcourse.training.engines import TorchEngine, precision_for, tf32_products

pytestmark = pytest.mark.skipif(not hasattr(os, "fork") or not torch.distributed.is_available(), reason="needs fork and torch.distributed")

# Every script begins with this: `world(n, work)` runs `work(rank)` in n processes, which know each other.
BEGIN = """
import gc, json, os, shutil, sys
import torch, torch._dynamo, torch.distributed as dist # Else each process imports dynamo for itself, as optimizers do
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from lmcourse.architecture.transformer_torch import TransformerLM
from lmcourse.tools.config import ModelConfig, TrainConfig
from lmcourse.training import sharding
from lmcourse.training.checkpoint import Checkpoints, load_checkpoint, read_state
from lmcourse.training.engines import TorchEngine, World, fill, find_nonfinite_sharded, join_world
from lmcourse.training.sharding import build_sharded, save_whole
folder, CPU = Path(sys.argv[1]), torch.device("cpu")
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
MODEL = ModelConfig(vocab_size=50, context_length=16, d_model=10, num_layers=2, num_heads=5, qk_norm=True, tie_embeddings=True)
SHORT = TrainConfig(device="cpu", shard=True)
stores = iter(range(1000))
def world(size, work, deaths=()): # With the end of each process, where some are meant to die
    store, pids = folder/f"store{next(stores)}", []
    for r in range(size):
        if not (pid := os.fork()):
            try:
                os.environ |= dict(WORLD_SIZE=str(size), RANK=str(r))
                dist.init_process_group("gloo", init_method=f"file://{store}", rank=r, world_size=size, timeout=timedelta(seconds=60))
                work(r)
                if not deaths: dist.barrier()
            except BaseException: import traceback; traceback.print_exc(); sys.stderr.flush(); os._exit(1)
            sys.stdout.flush()
            os._exit(0)
        pids.append(pid)
    ends = tuple(os.waitstatus_to_exitcode(os.waitpid(p, 0)[1]) for p in pids)
    assert ends == (deaths or (0,)*size), ends
def engine(model=MODEL, config=SHORT): return TorchEngine(model, config, join_world(CPU))
def batch(step, rank, size, rows=6, c=MODEL): # The rows of a process
    ids = torch.randint(c.vocab_size, (rows, c.context_length + 1), generator=torch.Generator().manual_seed(step))
    mine = World(rank, size).shard_batch(ids)
    return mine[:, :-1], mine[:, 1:]
def steps(e, first, last, **how): # The losses of these steps, over all processes
    losses = []
    for step in range(first, last + 1):
        loss = e.forward_backward(batch(step, e.world.rank, e.world.size, c=e.model.config, **how), 1/e.world.size)
        losses += e.world.all_reduce_sum(float(loss))
        e.optimizer_step(1e-2)
    return losses
def save(e, step, keep=2): e.save(Checkpoints(folder/"run", keep), step, None, dict(at=step), e.model.config.to_dict())
def tell(name, value): (folder/f"{name}.json").write_text(json.dumps(value))
def told(name): return json.loads((folder/f"{name}.json").read_text())
"""


def script(tmp_path, text, seconds=120, **environment):
    out = processes.script(BEGIN + text, tmp_path, seconds=seconds, **environment)
    return out.splitlines()[-1].split() if out else []          # Gloo may speak before


# How a model is made

BITS = """
CHANGES = [{}, dict(tie_embeddings=False, scaled_init=True, norm="layernorm", bias=True, position="learned", ffn="gelu", embedding_std=.02),
           dict(copy_init=True, scaled_init=True),
           dict(position="sinusoidal", num_kv_heads=1, norm_position="post"), dict(norm="none", num_heads=1)]
def work(rank):
    mesh = join_world(CPU).mesh
    for change in CHANGES:
        config = replace(MODEL, **change)
        alone = TransformerLM(config, seed=3)
        model = build_sharded(config, 3, mesh)
        for (name, part),(same, whole) in zip(model.named_parameters(), alone.named_parameters(), strict=True):
            assert name == same and torch.equal(part.full_tensor(), whole), name
            assert part.to_local().numel() <= -(-whole.shape[0]//mesh.size())*whole[0].numel()
        for (name, b),(same, whole) in zip(model.named_buffers(), alone.named_buffers(), strict=True): assert name == same and torch.equal(b, whole), name
        if config.tie_embeddings: assert model.lm_head.weight is model.token_embeddings.weight
        inputs, targets = batch(1, 0, 1)
        assert torch.equal(model.loss(inputs, targets), alone.loss(inputs, targets))
        other = TransformerLM(config, seed=4)
        fill(model, dict(other.named_parameters()))
        assert all(torch.equal(p.full_tensor(), q) for p,q in zip(model.parameters(), other.parameters()))
for size in (2, 3): world(size, work)
"""


def test_a_sharded_model_begins_with_the_bits_of_a_whole_one(tmp_path): script(tmp_path, BITS)


# Larger than a process

LARGE = """
import resource
LARGE = ModelConfig(vocab_size=256, context_length=16, d_model=256, num_layers=16, num_heads=4, d_ff=1024)
P = sum(p.numel() for p in TransformerLM(LARGE, device="meta").parameters())
ADAM = 3*4*P                                    # Bytes of weights and both moments, of float32
def held(): return int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmData")))*1024
def limited(): # As much more than after a small run as the whole would need, without its gradients
    resource.setrlimit(resource.RLIMIT_DATA, (held() + ADAM, resource.RLIM_INFINITY))
def small_run(): # What is loaded, started and kept for a first step
    e = engine()
    steps(e, 1, 2)
    save(e, 2)
    e.load(folder/"run/step_000002", MODEL.to_dict())
def first(rank):
    small_run()
    limited()
    e = engine(LARGE)
    losses = steps(e, 1, 2)
    save(e, 3)
    tell(f"losses{rank}", losses + steps(e, 3, 4))
    tell(f"most{rank}", max(p.to_local().numel() for p in e.model.parameters()))
def second(rank):
    small_run()
    limited()
    e = engine(LARGE, replace(SHORT, seed=9))   # Other weights, until those of the checkpoint come
    assert e.load(folder/"run/step_000003", LARGE.to_dict()) == 3
    assert steps(e, 3, 4) == told(f"losses{rank}")[2:]
def alone(rank):
    e = engine(config=replace(SHORT, shard=False))
    steps(e, 1, 2)
    limited()
    try: steps(engine(LARGE, replace(SHORT, shard=False)), 1, 1)
    except RuntimeError as e: assert "can't allocate memory" in str(e), e
    else: raise AssertionError("it had room")
world(2, first)
world(2, second)
world(1, alone)
print(P, ADAM, *told("losses0"))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_a_model_that_one_process_can_not_hold_is_trained_and_resumed_by_two(tmp_path):
    "Each may take as many bytes as weights and moments have; they get half of those, half of the gradients, and a few blocks"
    parameters, adam, *losses = map(float, script(tmp_path, LARGE, MALLOC_MMAP_THRESHOLD_="65536"))
    assert parameters > 16e6 and adam == 12*parameters and len(set(losses)) == 4
    assert json.loads((tmp_path/"losses0.json").read_text()) == json.loads((tmp_path/"losses1.json").read_text())


# Checkpoints

MANY = """
import safetensors.torch
SIZES = dict(two=2, three=3)
def first(rank):
    e = engine()
    losses = steps(e, 1, 3)
    save(e, 3)
    assert steps(e, 4, 6) == resumed(rank, 3)           # Bit for bit by as many
    save_whole(folder/"whole.safetensors", e.model)
    tell("two", losses)
def resumed(rank, step, name=None):
    e = engine(config=replace(SHORT, seed=9))
    assert e.load(Checkpoints(folder/"run").latest(), MODEL.to_dict()) == step
    losses = steps(e, step + 1, step + 3)
    if name: tell(name, losses)
    return losses
def third(rank): # Of three, one writes what all go on with
    resumed(rank, 3, "three")
    e = engine()
    e.load(Checkpoints(folder/"run").latest(), MODEL.to_dict())
    steps(e, 4, 6)
    save(e, 6)
def same(a, b): assert len(a) == len(b) and all(abs(x - y) < 1e-5 for x,y in zip(a, b)), (a, b)
world(2, first)
alone = engine(config=replace(SHORT, shard=False, seed=9))          # One process, not sharded
assert alone.load(Checkpoints(folder/"run").latest(), MODEL.to_dict()) == 3 and read_state(folder/"run/step_000003") == dict(at=3)
losses = steps(alone, 4, 6)
again = engine(config=replace(SHORT, shard=False))
same(steps(again, 1, 6), told("two") + losses)
whole = safetensors.torch.load_file(folder/"whole.safetensors")
assert whole.keys() == dict(alone.model.named_parameters()).keys()
assert all(torch.allclose(whole[n], p, atol=1e-5) for n,p in alone.model.named_parameters())
world(3, third)
same(told("three"), losses)
world(2, lambda rank: resumed(rank, 6, "after"))                    # What three wrote, two read
same(told("after"), steps(alone, 7, 9))
alone.save(Checkpoints(folder/"run"), 9, None, {}, MODEL.to_dict()) # What one wrote whole, two read in parts
world(2, lambda rank: resumed(rank, 9, "whole"))
same(told("whole"), steps(alone, 10, 12))
print(*sorted(p.name for p in (folder/"run/step_000006").iterdir()))
"""


def test_what_two_processes_wrote_one_and_three_read(tmp_path):
    files = script(tmp_path, MANY)
    assert files == ["config.json", *(f"{kind}-0000{i}-of-00003.safetensors" for kind in ("model", "optimizer") for i in (1, 2, 3)), "state.json"]
    assert not [p for p in tmp_path.rglob("run/*/*") if p.suffix not in (".json", ".safetensors")]


FAULTS = """
full, real = OSError(28, "No space left on device"), sharding.write_digested
def fails(rank): # One process has no room
    e = engine()
    steps(e, 1, 1)
    save(e, 1)
    def write(path, chunks):
        if rank == 1 and path.name.startswith("optimizer"): raise full
        return real(path, chunks)
    sharding.write_digested = write
    try: save(e, 2)
    except OSError as error: assert "checkpoint not saved: No space left on device" in str(error), error
    else: raise AssertionError("it was saved")
    sharding.write_digested = real
    dist.barrier()
    assert sorted(p.name for p in (folder/"run").iterdir()) == ["step_000001"]
def dies(rank): # In the middle of a file
    e = engine()
    e.load(Checkpoints(folder/"run").latest(), MODEL.to_dict())
    def write(path, chunks):
        info = real(path, chunks)
        if rank == 1 and path.name.startswith("optimizer"):
            os.truncate(path, info["bytes"]//2)
            os._exit(9)
        return info
    sharding.write_digested = write
    try: save(e, 2)
    except RuntimeError: os._exit(3)                                # The other one is gone
def goes_on(rank):
    e = engine(config=replace(SHORT, seed=9))
    assert e.load(Checkpoints(folder/"run").latest(), MODEL.to_dict()) == 1
    steps(e, 2, 2)
    save(e, 2, keep=1)
    save(e, 2, keep=1)                                              # The same step once more
    dist.barrier()
    assert sorted(p.name for p in (folder/"run").iterdir()) == ["step_000002"]
def damaged(rank): # One process sees it, both refuse, and nothing moved
    e = engine()
    before = [p.to_local().clone() for p in e.model.parameters()]
    path = folder/"run/step_000002"
    for name,change in (("model-00002-of-00002", lambda b: b[:-1] + bytes([b[-1] ^ 1])), ("optimizer-00001-of-00002", lambda b: b[:-8])):
        file = path/f"{name}.safetensors"
        data = file.read_bytes()
        dist.barrier()
        if rank == 0: file.write_bytes(change(data))
        dist.barrier()
        try: e.load(path, MODEL.to_dict())
        except ValueError as error: assert "damaged or changed" in str(error) or "were written" in str(error), error
        else: raise AssertionError("it was loaded")
        dist.barrier()
        if rank == 0: file.write_bytes(data)
        dist.barrier()
    assert all(torch.equal(p.to_local(), b) for p,b in zip(e.model.parameters(), before)) and not e.optimizer.state
    other = replace(MODEL, num_layers=1)
    try: engine(other).load(path, other.to_dict())
    except ValueError as error: assert "num_layers is 2 there, 1 here" in str(error), error
    else: raise AssertionError("it was loaded")
world(2, fails)
world(2, dies, (3, 9))
assert Checkpoints(folder/"run").latest().name == "step_000001"
(folder/"run/step_000002.tmp").mkdir()                              # As if the first one had died, too
world(2, goes_on)
world(2, damaged)
file = folder/"run/step_000002/model-00002-of-00002.safetensors"
file.unlink()
try: load_checkpoint(folder/"run/step_000002", TransformerLM(MODEL))
except FileNotFoundError as error: assert str(error) == f"{file}: no such file", error
else: raise AssertionError("it was loaded")
"""


def test_a_save_that_fails_or_dies_leaves_the_checkpoint_before_and_damage_is_seen_by_all(tmp_path): script(tmp_path, FAULTS)


# What is sent

SENT = """
from torch.utils._python_dispatch import TorchDispatchMode
class Calls(TorchDispatchMode): # Name and bytes of each collective
    def __init__(self): super().__init__(); self.seen = []
    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        tensors = [t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
        if "c10d" in f.namespace: self.seen.append([f.name().partition("::")[2], sum(t.nbytes for t in tensors)])
        return f(*args, **(kwargs or {}))
def work(rank):
    e = engine(config=replace(SHORT, shard=False))
    assert [b.shape for b in e.model.buffers()] and "rope" in dict(e.model.named_modules())["layers.0.attn"]._modules
    steps(e, 1, 2)                                      # In the first two, buckets are made
    with Calls() as calls:
        for last in (False, True): e.forward_backward(batch(3, rank, 2), .25, last)
    tell(f"sent{rank}", [calls.seen, sum(p.nbytes for p in e.model.parameters())])
world(2, work)
"""


def test_data_parallel_processes_send_gradients_and_no_table_of_rope(tmp_path):
    script(tmp_path, SENT)
    for rank in range(2):
        calls, size = json.loads((tmp_path/f"sent{rank}.json").read_text())
        assert {name for name, _ in calls} == {"allreduce_"} and sum(n for _, n in calls) == size


# Number formats

def on(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    return torch.device("cuda", 0)


@pytest.mark.parametrize("capability, expected", [((7, 0), "float16"), ((7, 5), "float16"), ((8, 0), "bfloat16"), ((8, 9), "bfloat16"), ((9, 0), "bfloat16")])
def test_the_number_format_is_what_the_device_computes(monkeypatch, capability, expected): assert precision_for(on(monkeypatch, capability)) == expected


def test_on_a_processor_auto_is_float32_bit_for_bit():
    assert precision_for(torch.device("cpu")) == precision_for(torch.device("mps")) == "float32"
    model, ids = ModelConfig(vocab_size=50, context_length=16, d_model=8, num_layers=1, num_heads=2), torch.arange(34).view(2, 17)
    def losses(dtype):
        e = TorchEngine(model, TrainConfig(device="cpu", dtype=dtype))
        return [float(e.forward_backward((ids[:, :-1], ids[:, 1:]))) + 0*e.optimizer_step(1e-2) for _ in range(3)]
    assert losses("auto") == losses("float32") != losses("bfloat16")


def test_tf32_is_on_within_a_step_on_a_gpu_alone(monkeypatch):
    before = torch.get_float32_matmul_precision()
    with tf32_products(torch.device("cpu")): assert torch.get_float32_matmul_precision() == before == "highest"
    with tf32_products(torch.device("cuda")): assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == before


def test_tf32_lasts_as_long_as_any_thread_is_in_its_block():
    "As with rollouts ahead: the writer leaves its block while the trainer is in one."
    entered, left, device = threading.Event(), threading.Event(), torch.device("cuda")
    def write():
        with tf32_products(device):
            entered.set()
            left.wait()
    writer = threading.Thread(target=write)
    writer.start()
    entered.wait()
    with tf32_products(device):
        left.set()
        writer.join()
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == "highest"


def test_float16_has_a_scaler_that_skips_a_step_and_is_saved(tmp_path):
    from lmcourse.training.checkpoint import Checkpoints
    model, ids = ModelConfig(vocab_size=50, context_length=16, d_model=8, num_layers=1, num_heads=2), torch.arange(34).view(2, 17)
    made = lambda dtype="float16": TorchEngine(model, TrainConfig(device="cpu", dtype=dtype))
    def step(e): return float(e.forward_backward((ids[:, :-1], ids[:, 1:]))), e.optimizer_step(1e-2)
    half, full = made(), made("float32")
    for _ in range(5):
        (a, norm), (b, expected) = step(half), step(full)
        assert a == pytest.approx(b, rel=5e-3) and norm == pytest.approx(expected, rel=5e-2)
    half.scaler.update(2.**100)
    before = [p.clone() for p in half.model.parameters()]
    assert step(half)[1] == 0 and half.scaler.get_scale() == 2.**99
    assert all(torch.equal(p, b) for p, b in zip(half.model.parameters(), before)) and all(p.grad is None for p in half.model.parameters())
    half.save(Checkpoints(tmp_path), 6, None, {}, model.to_dict())
    again = made()
    assert again.load(tmp_path/"step_000006", model.to_dict()) == 6 and again.scaler.get_scale() == 2.**99
    half.scaler.update(2.**10)
    with torch.no_grad(): half.model.lm_head.weight[0] = float("inf")       # No smaller scale helps here
    norms = [step(half)[1] for _ in range(11)]
    assert norms[:10] == [0]*10 and not norms[10] < float("inf")


HALF = """
def work(rank):
    for dtype,near in (("bfloat16", 3e-2), ("float16", 5e-3)):
        e, alone = engine(config=replace(SHORT, dtype=dtype)), TorchEngine(MODEL, replace(SHORT, dtype=dtype, shard=False))
        for step in range(1, 5):
            loss, = steps(e, step, step)
            expected = alone.forward_backward(batch(step, 0, 1))
            alone.optimizer_step(1e-2)
            assert abs(loss/float(expected) - 1) < near, (dtype, loss, expected)
        assert all(p.dtype == torch.float32 for p in e.model.parameters())
    e.scaler.update(2.**100)                            # An overflow anywhere is one everywhere
    before = [p.to_local().clone() for p in e.model.parameters()]
    steps(e, 5, 5)
    assert e.scaler.get_scale() == 2.**99 and all(torch.equal(p.to_local(), b) for p,b in zip(e.model.parameters(), before))
    e = engine()
    with torch.no_grad(): e.model.layers[1].ffn.w3.weight.to_local().fill_(3e38)
    e.forward_backward(batch(1, rank, 2))
    assert not e.optimizer_step(1e-2) < float("inf")
    assert find_nonfinite_sharded(e.model, [batch(1, rank, 2)]) == "the output of layers.1.ffn.w3 is not finite"
world(2, work)
"""


def test_sharded_in_sixteen_bits(tmp_path): script(tmp_path, HALF)
