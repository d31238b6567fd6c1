"Workers that train together: what they exchange, what it costs, and that nothing of them is left behind."
import gc
import multiprocessing.connection
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import Pipe, active_children
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from lmcourse.architecture.fast_np import fast_loss_and_grads
from lmcourse.architecture.layers_np import RowGradient
from lmcourse.architecture.transformer_np import init_params, loss_and_grads
from lmcourse.tools.checks import check_close, expect_error
from lmcourse.tools.config import ModelConfig
from lmcourse.training import parallel_np
from lmcourse.training.optim_np import AdamWNp, clip_scale, grad_norm_np
from lmcourse.training.parallel_np import (DataParallelNp, SharedPort, broadcast, chunk_slices, lockstep, naive_all_reduce, naive_bytes, pack_grads,
    parameter_views, queue_ports, reduce_to_root, ring_all_gather, ring_all_reduce, ring_bytes, ring_reduce_scatter, split_batch)

SMALL = dict(vocab_size=31, context_length=8, d_model=16, num_layers=1, num_heads=2, d_ff=32)
CONFIGS = dict(rope=ModelConfig(**SMALL), tied=ModelConfig(**SMALL, tie_embeddings=True, scale_embeddings=True), z_loss=ModelConfig(**SMALL, z_loss=.1, window=3),
    gpt2=ModelConfig(**SMALL, norm="layernorm", position="learned", ffn="gelu", bias=True, tie_embeddings=True))
SHM = Path("/dev/shm")


def segments(): return {p.name for p in SHM.glob("psm_*")} if SHM.is_dir() else set()

@pytest.fixture(autouse=True)
def nothing_is_left():
    before = segments()
    yield
    gc.collect()
    assert not active_children() and segments() <= before


# Batches

@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 9), workers=st.integers(1, 9), T=st.integers(1, 4), seed=st.integers(0, 999))
def test_a_batch_is_dealt_out_whole(rows, workers, T, seed):
    rng = np.random.default_rng(seed)
    ids, targets = rng.integers(0, 9, (rows, T)), np.where(rng.random((rows, T)) < .6, 3, -1)
    if workers > rows:
        with expect_error(ValueError, f"a batch of {rows} rows for {workers} workers"): split_batch(ids, targets, workers, -1)
    elif (targets == -1).all():
        with expect_error(ValueError, f"none of the {rows*T} targets counts: all are -1"): split_batch(ids, targets, workers, -1)
    else:
        parts = split_batch(ids, targets, workers, -1)
        check_close([np.concatenate([p[i] for p in parts]) for i in (0, 1)], [ids, targets])
        sizes = [len(x) for x, *_ in parts]
        assert len(parts) == workers and max(sizes) - min(sizes) <= 1
        check_close([p[2] for p in parts], [float((y == 3).sum()/(targets == 3).sum()) for _, y, _ in parts], 1e-15, 0)


# Collectives

def run(collective, vectors, ports=None): # Ends, number of steps, ports
    vectors, ports = [v.copy() for v in vectors], ports or queue_ports(len(vectors))
    *_, steps = lockstep(collective(x, port) for x, port in zip(vectors, ports))
    assert not any(queue for port in ports for queue in port.queues.values())   # All that was sent was received
    return vectors, steps, ports

@settings(max_examples=80, deadline=None)
@given(size=st.integers(1, 8), length=st.integers(0, 40), seed=st.integers(0, 999))
def test_every_collective_does_what_its_name_says(size, length, seed):
    vectors = list(np.random.default_rng(seed).integers(-99, 99, (size, length)))
    total, pieces = sum(vectors), chunk_slices(length, size)
    check_close(np.concatenate([np.arange(length)[p] for p in pieces]), np.arange(length))
    assert max(lengths := [p.stop - p.start for p in pieces]) - min(lengths) <= 1
    for collective, steps in (ring_all_reduce, 2*(size - 1)), (naive_all_reduce, 2):
        ends, taken, _ = run(collective, vectors)
        check_close(ends, [total]*size)
        assert taken == steps
    ends, taken, _ = run(ring_reduce_scatter, vectors)
    check_close([x[p] for x, p in zip(ends, pieces)], [total[p] for p in pieces])
    assert taken == size - 1
    ends, taken, _ = run(ring_all_gather, vectors)
    check_close(ends, [np.concatenate([x[p] for x, p in zip(vectors, pieces)])]*size)
    assert taken == size - 1
    check_close(run(broadcast, vectors)[0], [vectors[0]]*size)
    check_close(run(reduce_to_root, vectors)[0], [total, *vectors[1:]])

@settings(max_examples=80, deadline=None)
@given(size=st.integers(1, 9), length=st.integers(0, 60), dtype=st.sampled_from([np.float16, np.float32, np.float64]))
def test_bytes_that_are_sent_are_those_of_the_formula(size, length, dtype):
    x = np.zeros(length, dtype)
    for collective, formula, steps in (ring_all_reduce, ring_bytes, 2*(size - 1)), (naive_all_reduce, naive_bytes, 2):
        ports = run(collective, [x]*size)[2]
        sent = [port.sent_bytes for port in ports]
        assert sent == [formula(length, size, r, x.itemsize) for r in range(size)]
        assert sum(sent) == 2*(size - 1)*x.nbytes == sum(port.received_bytes for port in ports)
        if formula is ring_bytes: assert all(abs(size*s - 2*(size - 1)*x.nbytes) < 2*size*x.itemsize for s in sent)

def test_all_workers_have_the_same_bits_and_so_has_another_run():
    vectors = list(np.random.default_rng(0).standard_normal((7, 1001), dtype=np.float32))
    (first, *others), again = run(ring_all_reduce, vectors)[0], run(ring_all_reduce, vectors)[0]
    assert all(x.tobytes() == first.tobytes() for x in others + again)

def test_a_message_is_a_copy():
    a, b = queue_ports(2)
    x = np.ones(3)
    a.send(1, x)
    x[:] = 7
    check_close(b.recv(0), np.ones(3))
    with expect_error(RuntimeError, "worker 1 waits for worker 0, which has sent nothing"): b.recv(0)

@settings(max_examples=60, deadline=None)
@given(size=st.integers(2, 6), length=st.integers(0, 20), seed=st.integers(0, 9999))
def test_a_ring_over_lent_memory_is_right_whoever_is_quick(size, length, seed): # No numbers are copied, so order is all
    random_, memory = random.Random(seed), np.random.default_rng(seed).integers(-99, 99, (size, length))
    total, pipes = memory.sum(0), [Pipe(duplex=False) for _ in range(size)]
    ports = [SharedPort(r, memory, pipes[r][1], pipes[r - 1][0]) for r in range(size)]
    works = {r: ring_all_reduce(memory[r], ports[r]) for r in range(size)}
    for r in works: next(works[r])
    favourite = random_.randrange(size)
    while works:
        able = [r for r in works if ports[r].left.poll()]       # Those that would not have to wait
        r = favourite if favourite in able and random_.random() < .9 else random_.choice(able)
        if next(works[r], "ended"): del works[r]
    check_close(memory, np.stack([total]*size))
    assert [port.sent_bytes for port in ports] == [ring_bytes(length, size, r, 8) for r in range(size)]
    for pipe in pipes:
        for end in pipe: end.close()

def test_a_shared_port_lends_only_its_own_vector_and_only_to_the_right():
    memory, (left, right) = np.zeros((3, 4)), Pipe(duplex=False)
    port = SharedPort(1, memory, right, left)
    for bad in (memory[0], memory[2], np.zeros(2)):
        with expect_error(ValueError, "outside of the vector of worker 1"): port.send(2, bad)
    with expect_error(ValueError, "worker 1 sends to worker 2, not to 0"): port.send(0, memory[1])
    right.close()
    with expect_error(ConnectionError, "worker 0 is gone"): port.recv(0)
    left.close()


# One vector

@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_lie_in_one_vector(name):
    config, rng = CONFIGS[name], np.random.default_rng(0)
    params = init_params(config, dtype=np.float64)
    grads = loss_and_grads(params, *rng.integers(0, 31, (2, 2, 5)), config)[1]
    vector = np.full(sum(p.size for p in params.values()), 7.)  # What lay there before must not stay
    views = parameter_views(vector, config)
    pack_grads(grads, .25, views)
    check_close(views, {name: .25*(grads[name].dense() if isinstance(grads[name], RowGradient) else grads[name]) for name in params})
    check_close(vector, np.concatenate([views[name].ravel() for name in params]))
    for bad in (vector[1:], vector[None]):
        with expect_error(ValueError, f"expected ({len(vector)},)"): parameter_views(bad, config)


# Training

def batch_of(rows, config, steps, empty=0): # The last `empty` rows have no target
    rng = np.random.default_rng(3)
    for _ in range(steps):
        ids, targets = rng.integers(0, config.vocab_size, (2, rows, config.context_length))
        targets[rng.random(targets.shape) < .3] = -100
        targets[rows - empty:] = -100
        yield ids, targets

def alone(params, config, batches, threads=1, grad_clip=0., **numbers):
    params, losses = {name: p.copy() for name, p in params.items()}, []
    optimizer = AdamWNp(params, **numbers)
    for i, (ids, targets) in enumerate(batches):
        loss, grads = fast_loss_and_grads(params, ids, targets, config, threads)
        optimizer.step(grads, .01/(1 + i), clip_scale(grad_norm_np(grads), grad_clip) if grad_clip else 1.)
        losses.append(float(loss))
    return losses, params

def together(params, config, batches, workers, **numbers):
    with DataParallelNp(params, config, workers, **numbers) as engine:
        losses = [engine.step(ids, targets, .01/(1 + i)) for i, (ids, targets) in enumerate(batches)]
        digests = engine.digests()
        assert len(digests) == workers and len(set(digests)) == 1
        P, itemsize = sum(p.size for p in params.values()), next(iter(params.values())).itemsize
        assert [r["sent_bytes"] for r in engine.reports] == [ring_bytes(P, workers, r, itemsize) for r in range(workers)]
        assert all(r[part] >= 0 for r in engine.reports for part in ("gradient_s", "exchange_s", "update_s"))
        return losses, engine.params(), digests[0]

@pytest.mark.parametrize("workers, rows, empty, name", ((1, 2, 0, "gpt2"), (2, 3, 0, "tied"), (3, 4, 1, "z_loss"))) # The third worker's row may have no target
def test_equals_one_process(workers, rows, empty, name):
    config, numbers = CONFIGS[name], dict(grad_clip=.3, betas=(.8, .95), eps=1e-6, weight_decay=.2)
    params = init_params(config, dtype=np.float64)
    before = {name: p.copy() for name, p in params.items()}
    losses, found, _ = together(params, config, batch_of(rows, config, 4, empty), workers, **numbers)
    expected, ends = alone(params, config, batch_of(rows, config, 4, empty), **numbers)
    check_close(losses, expected, rtol=1e-12)
    check_close(found, ends, rtol=1e-10, atol=1e-12)
    check_close(params, before, 0, 0)                           # What came in stays as it was

def test_equals_one_process_in_float32_and_a_second_run_to_the_bit():
    config = CONFIGS["rope"]
    params = init_params(config)
    one, two = (together(params, config, batch_of(5, config, 4), 3, grad_clip=.3) for _ in range(2))
    assert one[0] == two[0] and one[2] == two[2]
    check_close(one[1], two[1], 0, 0)
    losses, ends = alone(params, config, batch_of(5, config, 4), grad_clip=.3)
    check_close(one[0], losses, rtol=1e-6)
    check_close(one[1], ends, rtol=1e-3, atol=1e-4)             # Adam's first steps magnify the rounding of small gradients

@pytest.mark.parametrize("workers, name, grad_clip", ((1, "rope", 0.), (2, "gpt2", .3)))
def test_same_bits_where_the_order_of_sums_is_the_same(workers, name, grad_clip):
    config, rng = CONFIGS[name], np.random.default_rng(0)
    params, full = init_params(config), [rng.integers(0, 31, (2, 4, 8)) for _ in range(4)]      # All targets count: shares are 1 or 1/2
    found = together(params, config, full, workers, grad_clip=grad_clip)[1]
    check_close(found, alone(params, config, full, workers, grad_clip)[1], 0, 0)


@pytest.mark.parametrize("grad_clip", [0., 1.])
def test_a_gradient_that_is_not_finite_moves_nothing(grad_clip):
    config, params = CONFIGS["rope"], init_params(CONFIGS["rope"])
    params["lm_head.weight"][0, 0] = np.nan
    ids = np.ones((2, 4), int)
    with DataParallelNp(params, config, 2, grad_clip=grad_clip) as engine:
        before = engine.digests()
        assert np.isnan(engine.step(ids, ids, 1e-2)) and engine.digests() == before


# Bad input

def test_bad_settings_start_nothing():
    config = CONFIGS["rope"]
    params = init_params(config)
    mixed = params | {"ln_final.weight": params["ln_final.weight"].astype(np.float64)}
    halves = {name: p.astype(np.float16) for name, p in params.items()}
    for kind, words, arguments in (
            (ValueError, "workers = 0, expected 1 or more", dict(workers=0)), (ValueError, "grad_clip = -1", dict(grad_clip=-1)),
            (ValueError, "betas = (1.0, 0.9)", dict(betas=(1., .9))), (ValueError, "ln_final.weight is missing", dict(params={})),
            (TypeError, "parameters of float32, float64", dict(params=mixed)), (TypeError, "parameters of float16", dict(params=halves))):
        with expect_error(kind, words): DataParallelNp(**dict(params=params, config=config, workers=2) | arguments)
        assert not active_children()

def test_too_little_shared_memory_is_said_before_it_is_used(monkeypatch):
    if not SHM.is_dir(): pytest.skip("no /dev/shm")
    config, usage = CONFIGS["rope"], shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=20_000))
    P = sum(p.size for p in init_params(config).values())
    assert 2*2*4*P > 20_000
    with expect_error(OSError, "of shared memory are needed, but /dev/shm has only 20.0 kB free"): DataParallelNp(init_params(config), config)

def test_a_bad_batch_is_refused_and_the_workers_go_on():
    config = CONFIGS["rope"]
    with DataParallelNp(init_params(config), config, 2) as engine:
        (ids, targets), digests = next(batch_of(4, config, 1)), engine.digests()
        for kind, words, x, y in (
                (ValueError, "a batch of 1 rows for 2 workers, expected at least 2", ids[:1], targets[:1]),
                (ValueError, "expected (B, T) for both", ids, targets[:, 1:]), (ValueError, "expected (B, T) for both", ids[0], targets[0]),
                (ValueError, "none of the 32 targets counts", ids, 0*targets - 100),
                (ValueError, "16 tokens, but the model's context_length is 8", np.tile(ids, 2), np.tile(targets, 2)),
                (IndexError, "id 31 is out of range", ids*0 + 31, targets), (IndexError, "target -3 is out of range", ids, targets*0 - 3),
                (TypeError, "ids are float64", ids*1., targets), (TypeError, "list", ids.tolist(), targets.tolist())):
            with expect_error(kind, words): engine.step(x, y, .01)
        with expect_error(ValueError, "fast"): engine.step(ids, targets, "fast")
        assert engine.digests() == digests                      # Nothing has moved
        assert engine.step(ids, targets, .01) > 0 and engine.digests() != digests
        if hasattr(os, "fork"):                                 # A copy of this process that closes its copy of the engine stops nobody
            if not (child := os.fork()):
                engine.close()
                os._exit(0)
            os.waitpid(child, 0)
            assert engine.step(ids, targets, .01) > 0
    with expect_error(RuntimeError, "the workers have stopped"): engine.step(ids, targets, .01)
    with expect_error(RuntimeError, "the workers have stopped"): engine.params()
    engine.close()                                              # Twice is no error


def test_a_failing_start_leaves_nothing(monkeypatch):
    monkeypatch.setattr(parallel_np, "_work", _broken)
    with expect_error(RuntimeError, "worker 0 of 1 ended with exit code 3; all have been stopped"): DataParallelNp(init_params(CONFIGS["rope"]), CONFIGS["rope"], 1)

def _broken(*_): os._exit(3)


# Ends

def alive(pid): # Not a zombie
    try: return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError): return False

def gone_within(pids, seconds=120): # Only against waiting for ever
    end = time.time() + seconds
    while any(map(alive, pids)) and time.time() < end: time.sleep(.05)
    return not any(map(alive, pids))

def stopped(engine, pids): # All of the engine has ended
    assert not engine.close.alive and gone_within(pids, 0) and not active_children()

needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc")

@needs_proc
def test_the_worker_that_fails_is_named_and_those_who_wait_for_it_stop(monkeypatch):
    config = CONFIGS["rope"]
    engine = DataParallelNp(init_params(config), config, 3)
    pids, (ids, targets) = [p.pid for p in engine.processes], next(batch_of(3, config, 1))
    requests = [("step", *part, .01, -100) for part in split_batch(ids, targets, 3)]
    engine.step(ids, targets, .01)                              # From now on a step is quick
    requests[1] = ("step", ids[1:2] + 31, *requests[1][2:])     # Past the parent's check; workers 0 and 2 wait for it in the ring
    def late(pipes):                                            # All have something to say, and worker 1 is heard last
        time.sleep(1)
        return sorted(multiprocessing.connection.wait(pipes), key=lambda pipe: pipe is engine._pipes[1])
    monkeypatch.setattr(parallel_np, "wait", late)
    with pytest.raises(RuntimeError) as caught: engine._ask(*requests)
    assert str(caught.value).startswith("worker 1 of 3 failed with IndexError: id ") and "\n" not in str(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    stopped(engine, pids)

@needs_proc
@pytest.mark.parametrize("cause", ("killed while others wait in the ring", "interrupted"))
def test_a_step_that_ends_in_the_middle(cause):
    config = CONFIGS["rope"]
    engine = DataParallelNp(init_params(config), config, 3)
    pids, batch = [p.pid for p in engine.processes], next(batch_of(3, config, 1))
    if cause == "interrupted": os.kill(pids[0], signal.SIGINT)  # A terminal's Ctrl-C goes to the workers too, and they leave it to the parent
    engine.step(*batch, .01)
    os.kill(pids[2], signal.SIGSTOP)                            # So the step can't end by itself
    act = (lambda: os.kill(pids[2], signal.SIGKILL)) if cause != "interrupted" else (lambda: os.kill(os.getpid(), signal.SIGINT))
    timer = threading.Timer(.5, act)
    timer.start()
    kind, words = (KeyboardInterrupt, "") if cause == "interrupted" else (RuntimeError, "worker 2 of 3 was killed by SIGKILL")
    with expect_error(kind, words): engine.step(*batch, .01)
    timer.join()
    stopped(engine, pids)

@needs_proc
def test_an_engine_that_is_dropped_stops_its_workers():
    config = CONFIGS["rope"]
    engine = DataParallelNp(init_params(config), config, 2)
    pids = [p.pid for p in engine.processes]
    assert all(map(alive, pids)) and not any(engine._memory.name.lstrip("/") in name for name in segments())    # The name is gone at once
    del engine
    gc.collect()
    assert gone_within(pids, 0)

SCRIPT = """
import numpy as np
from lmcourse.architecture.transformer_np import init_params
from lmcourse.tools.config import ModelConfig
from lmcourse.training.parallel_np import DataParallelNp
if __name__ == "__main__":
    config = ModelConfig(**{small})
    engine, ids = DataParallelNp(init_params(config), config, 2), np.zeros((2, 8), int)
    print(*(p.pid for p in engine.processes), flush=True)
    while {go}: engine.step(ids, ids, .01)
"""

@needs_proc
@pytest.mark.parametrize("end", ("killed", "by itself"))
def test_workers_of_a_parent_that_ends_end_too(end, tmp_path):
    script, before = tmp_path/"train.py", segments()
    script.write_text(SCRIPT.format(small=SMALL, go=end == "killed"))
    parent = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    if end == "killed":
        time.sleep(.3)
        assert all(map(alive, pids))
        parent.kill()
    _, errors = parent.communicate(timeout=120)
    assert gone_within(pids) and segments() <= before and errors == ""
