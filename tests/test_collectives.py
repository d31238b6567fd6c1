"The network of the pages and real processes run the same collectives and get the same bits; traffic is what the formulas say."
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import script

from lmcourse.parallelism import collectives as co
from lmcourse.parallelism.ranks import Link, Network

torch = pytest.importorskip("torch")
from lmcourse.parallelism.context_parallel import ring_attention_bytes
from lmcourse.parallelism.data_parallel import data_parallel_bytes
from lmcourse.parallelism.expert_parallel import expert_bytes
from lmcourse.parallelism.low_communication import low_communication_bytes
from lmcourse.parallelism.pipeline import pipeline_bytes
from lmcourse.parallelism.schedules import interleaved
from lmcourse.parallelism.tensor_parallel import slice_config, slice_of, tensor_parallel_bytes
from lmcourse.parallelism.zero import zero_step_bytes
from lmcourse.tools.config import ModelConfig
from lmcourse.training.parallel_np import naive_bytes, ring_bytes

WAYS = {co.ring_all_reduce: co.ring_bytes, co.tree_all_reduce: co.tree_bytes, co.halving_doubling_all_reduce: co.halving_doubling_bytes}


def reduced(port, way, vectors):
    x = vectors[port.rank].copy()
    way(x, port)
    return x


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(WAYS, key=str)), st.integers(1, 13), st.integers(0, 40), st.randoms())
def test_all_reduce_adds_and_sends_what_its_formula_says(way, size, length, random):
    vectors, net = np.random.default_rng(random.getrandbits(32)).standard_normal((size, length)), Network(size)
    found = net.run(reduced, way, vectors)
    assert all((x == found[0]).all() for x in found) and np.allclose(found[0], vectors.sum(0), rtol=1e-12, atol=1e-13)
    co.check_sent(net, [WAYS[way](length, size, r, 8) for r in range(size)])


PAIRS, PLACES = np.ones((4, 8), int), [[0, 1], [2, 3], [4, 5], [6, 7]]
BYTES = [*(lambda r, f=f: f(40, 4, r) for f in (ring_bytes, naive_bytes, co.tree_bytes, co.halving_doubling_bytes, co.reduce_scatter_bytes, co.all_gather_bytes)),
         lambda r: co.hierarchical_bytes(40, 4, r, 2), lambda r: ring_attention_bytes(PLACES, r, 8), lambda r: expert_bytes(PAIRS, 4, r), lambda r: pipeline_bytes(8, 4, interleaved(4, 4, 2), r),
         lambda r: zero_step_bytes(3, [40, 40], 4, r), lambda r: data_parallel_bytes([torch.ones(40)], 4, r), lambda r: low_communication_bytes(40, 4, 2, 4, r),
         lambda r: tensor_parallel_bytes(ModelConfig.preset("small"), 3, 7, 4, r), lambda r: slice_config(ModelConfig.preset("small"), 4, r),
         lambda r: slice_of("w1.weight", torch.ones(40, 2), 4, r)]

@pytest.mark.parametrize("f", BYTES)
def test_there_is_no_rank_before_the_first_or_after_the_last(f):
    f(0), f(3)
    for rank in (-1, 4):
        with pytest.raises(IndexError, match=f"rank {rank} of 4, expected 0 to 3"): f(rank)


def test_pieces_of_reduce_scatter_and_all_gather_by_their_formulas():
    for size, length in ((1, 4), (3, 7), (4, 2)):
        net = Network(size)
        pieces = net.run(lambda port, n: co.ring_reduce_scatter(np.ones(n), port).copy(), length)
        assert (np.concatenate(pieces) == size).all() and len(np.concatenate(pieces)) == length
        co.check_sent(net, [co.reduce_scatter_bytes(length, size, r, 8) for r in range(size)])
        net = Network(size)
        net.run(lambda port, n: co.ring_all_gather(np.ones(n), port), length)
        co.check_sent(net, [co.all_gather_bytes(length, size, r, 8) for r in range(size)])


def test_a_plan_that_sends_too_much_is_named():
    net = Network(2)
    net.run(reduced, co.ring_all_reduce, np.ones((2, 10)))
    with pytest.raises(AssertionError, match="rank 0 sent 80 bytes, and the plan needs 40: 2.00 times as many"): co.check_sent(net, [40, 40])
    with pytest.raises(AssertionError, match="rank 1 sent 80 bytes, and the plan needs 0$"): co.check_sent(net, [80, 0])


# Ranks

def test_the_clock_of_a_rank_moves_by_its_own_work_and_by_waiting():
    def work(port):
        if port.rank == 0:
            port.compute(5.)
            port.send(1, np.ones(10))
            port.send(1, np.ones(10))
        elif port.rank == 1:
            for _ in range(2): port.recv(0)
        port.compute(1.)
    net = Network(3, Link(1., 80.))
    net.run(work)
    assert net.clock.tolist() == [6., 5 + 1 + 1 + 1 + 1, 1.]        # The second message goes behind the first


def test_a_network_can_be_used_again_after_a_failure():
    net = Network(3)
    def fail(port): port.recv((port.rank + 1) % 3) if port.rank != 1 else [0][port.size]
    with pytest.raises(IndexError): net.run(fail)
    assert net.run(reduced, co.ring_all_reduce, np.ones((3, 4)))[2].tolist() == [3.]*4


def test_three_of_four_in_a_circle_and_one_that_ended_are_a_deadlock():
    def work(port):
        if port.rank < 3: port.recv((port.rank + 1) % 3)
    with pytest.raises(RuntimeError, match="deadlock: rank 0 waits for rank 1, rank 1 waits for rank 2, rank 2 waits for rank 0"): Network(4).run(work)


@pytest.mark.parametrize("work, error, words", [
    (lambda port: port.send(-1, np.ones(1)), IndexError, "rank -1 of a group of 3"), (lambda port: port.recv(3), IndexError, "rank 3 of a group of 3"), (lambda port: port.group([0, 1, 2, 0]), ValueError, "names a rank twice"),
    (lambda port: co.hierarchical_all_reduce(np.ones(4), port, 0), ValueError, "3 ranks don't fill nodes of 0"), (lambda port: Network(3, ranks_per_node=-3), ValueError, "3 ranks don't fill nodes of -3"),
    (lambda port: Network(3, ranks_per_node=0), ValueError, "3 ranks don't fill nodes of 0"), (lambda port: co.all_reduce_seconds("ring", 8, 0, Link()), ValueError, "0 ranks, expected 1 or more"),
    (lambda port: co.all_reduce_seconds("star", 8, 6, Link()), ValueError, "'star', expected 'ring'")])
def test_ranks_that_do_not_exist(work, error, words):
    with pytest.raises(error, match=words): Network(3).run(work)


def test_a_group_of_a_group_counts_anew():
    def work(port):
        if port.rank < 2: return None
        inner = port.group([2, 3, 4]).group([2, 0]) if port.rank in (2, 4) else None
        return inner and (inner.rank, inner.members)
    assert Network(5).run(work) == [None, None, (1, (4, 2)), None, (0, (4, 2))]


# Real processes

REAL = """
import os, sys
import numpy as np, torch, torch.distributed as dist
from pathlib import Path
from datetime import timedelta
from lmcourse.parallelism import collectives as co
from lmcourse.parallelism.ranks import Network
SENT = []      # What is under way must be kept
class ProcessPort: # As `Port`, by messages of torch.distributed: the length first
    def __init__(self, members=None):
        self.members = members or list(range(dist.get_world_size()))
        self.rank, self.size = self.members.index(dist.get_rank()), len(self.members)
    def send(self, to, x):
        for t in (torch.tensor([x.size]), torch.from_numpy(x.copy())):
            if t.numel(): SENT.append((dist.isend(t, self.members[to]), t))
    def recv(self, source):
        dist.recv(n := torch.zeros(1, dtype=torch.int64), self.members[source])
        x = torch.empty(int(n), dtype=torch.float64)
        if n: dist.recv(x, self.members[source])
        return x.numpy()
    def group(self, members): return ProcessPort([self.members[m] for m in members])
WAYS = [co.ring_all_reduce, co.tree_all_reduce, co.halving_doubling_all_reduce, lambda x, port: co.hierarchical_all_reduce(x, port, port.size//2 or 1)]
def reduced(port, way, vectors):
    x = vectors[port.rank].copy()
    way(x, port)
    return x
def work(rank, size):
    for length in (1, 7, 64):
        vectors = np.random.default_rng(length).standard_normal((size, length))
        for way in WAYS:
            if size == 3 and way is WAYS[-1]: continue
            assert (reduced(ProcessPort(), way, vectors) == Network(size).run(reduced, way, vectors)[rank]).all()
        torchs = torch.from_numpy(vectors[rank].copy())
        dist.all_reduce(torchs)
        assert np.allclose(torchs.numpy(), reduced(ProcessPort(), co.ring_all_reduce, vectors), rtol=1e-13, atol=1e-13)
        def blocks(r): return [np.full(r + to + 1, 10.*r + to) for to in range(size)]
        assert all((got == blocks(s)[rank]).all() for s, got in enumerate(co.all_to_all(blocks(rank), ProcessPort())))
def world(size):
    pids = []
    for r in range(size):
        if not (pid := os.fork()):
            try:
                dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store{size}", rank=r, world_size=size, timeout=timedelta(seconds=60))
                work(r, size)
                dist.barrier()
            except BaseException: import traceback; traceback.print_exc(); sys.stderr.flush(); os._exit(1)
            os._exit(0)
        pids.append(pid)
    assert not any([os.waitpid(p, 0)[1] for p in pids])
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
for size in (2, 3, 4): world(size)
"""


@pytest.mark.skipif(not hasattr(os, "fork") or not torch.distributed.is_available(), reason="needs fork and torch.distributed")
def test_real_processes_get_the_bits_of_the_page(tmp_path):
    script(REAL, tmp_path, seconds=120)
