"A pool of processes: right sums, counted bytes, and nobody is left waiting or left behind."
import math
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available(): pytest.skip("needs torch.distributed", allow_module_level=True)

from processes import TOLD, gone

from lmcourse.parallelism import collectives_torch as ct
from lmcourse.parallelism.collectives import halving_doubling_bytes, ring_bytes, tree_bytes
from lmcourse.tools.checks import check_close

FORMULAS = dict(ring_all_reduce=ring_bytes, tree_all_reduce=tree_bytes, halving_doubling_all_reduce=halving_doubling_bytes)


@pytest.fixture(scope="module")
def pool():
    with ct.ProcessPool(3, timeout_s=30) as pool: yield pool


def vectors(length, size=3): return np.stack([ct.own_vector(length, r) for r in range(size)])


@pytest.mark.parametrize("length", [0, 1, 2, 3, 10, 64])
def test_sums_and_bytes(pool, length):
    right = vectors(length).sum(0)
    for way, formula in FORMULAS.items():
        for r, (x, sent) in enumerate(pool.run(ct.reduce_by_hand, way, length)):
            check_close(x, right, 1e-12, 1e-14)
            assert sent == formula(length, 3, r, 8)
    for x in pool.run(ct.torch_collective, "all_reduce", length): check_close(x, right, 1e-12, 1e-14)
    pieces = np.concatenate(pool.run(ct.torch_collective, "reduce_scatter", length))
    check_close(pieces[:length], right, 1e-12, 1e-14)
    assert not pieces[length:].any() and len(pieces) == math.ceil(length/3)*3
    for x in pool.run(ct.torch_collective, "broadcast", length): assert (x == vectors(length)[0]).all()


def test_what_is_asked_for_is_counted(pool):
    for length in (9, 10):
        whole = 8*math.ceil(length/3)*3
        for hasty, kind, times in ((False, "reduce_scatter", 1), (True, "all_reduce", 2)):
            for piece, calls, sent in pool.run(ct.counted_scatter, hasty, length):
                assert calls == {kind: 1} and sent == times*whole*2/3 and len(piece) == math.ceil(length/3)


@pytest.mark.filterwarnings("ignore::FutureWarning")                            # Names that torch is about to change
def test_counting_knows_every_collective(tmp_path):
    "Both ways to call them, and only them"
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path/"ranks"), 1), rank=0, world_size=1)
    try:
        x = torch.ones(6)
        with ct.CollectiveBytes() as count:
            dist.all_reduce(x)
            dist.all_gather([torch.empty(6)], x)
            dist.reduce_scatter(torch.empty(6), [x])
            dist.broadcast(x, 0)
            dist.reduce(x, 0)
            dist.all_to_all_single(torch.empty(6), x)
            (x + 1).sum()
        assert count.num_bytes == dict.fromkeys(("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all"), 24)
        assert set(count.calls.values()) == {1} and count.ring_bytes(1) == 0
        assert count.ring_bytes(4) == 24*.75*(2 + 5)
        fun = torch.distributed._functional_collectives
        with ct.CollectiveBytes() as count:
            for y in (fun.all_reduce(x, "sum", [0]), fun.all_gather_tensor(x, 0, [0]), fun.reduce_scatter_tensor(x, "sum", 0, [0])): y.wait()
        assert count.num_bytes == dict(all_reduce=24, all_gather=24, reduce_scatter=24)
    finally: dist.destroy_process_group()


def test_two_pools_do_not_meet(pool):
    with ct.ProcessPool(1, timeout_s=30) as other:
        assert [r["of"] for r in pool.run(ct.who_am_i)] == [3]*3 and other.run(ct.who_am_i)[0]["of"] == 1
        pids = [p.pid for p in other.ranks]
        with pytest.raises(RuntimeError, match="rank [01] failed with ValueError: 'gossip' isn't a collective"): other.run(ct.torch_collective, "gossip", 3)
        assert not TOLD or gone(*pids)
        with pytest.raises(RuntimeError, match="the pool is closed"): other.run(ct.who_am_i)


def test_a_dead_rank_ends_the_others_out_of_their_collective():
    with ct.ProcessPool(2, timeout_s=300) as pool:
        pids = [p.pid for p in pool.ranks]
        with pytest.raises(RuntimeError, match="rank 1 died of SIGKILL"): pool.run(ct.all_reduce_without, 1)
        assert not TOLD or gone(*pids)


def test_an_interrupted_call_leaves_nobody():
    with ct.ProcessPool(2, timeout_s=300) as pool:
        pids = [p.pid for p in pool.ranks]
        os.kill(pids[0], signal.SIGSTOP)                                                    # Stopped: it will never answer
        threading.Timer(.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt): pool.run(ct.torch_collective, "all_reduce", 3)
        assert not TOLD or gone(*pids)


@pytest.mark.skipif(not TOLD, reason="needs /proc")
def test_ranks_end_with_a_killed_notebook():
    code = """
import sys; sys.path[:0] = {path!r}
from lmcourse.parallelism import collectives_torch as ct
if __name__ == "__main__":
    pool = ct.ProcessPool(2, timeout_s=300)
    import os
    os.kill(pool.ranks[1].pid, 19)
    print(*[p.pid for p in pool.ranks], flush=True)
    pool.run(ct.torch_collective, "all_reduce", 3)
"""
    notebook = subprocess.Popen([sys.executable, "-c", code.format(path=sys.path)], stdout=subprocess.PIPE, text=True)
    pids = list(map(int, notebook.stdout.readline().split()))
    notebook.kill()
    notebook.wait()
    assert len(pids) == 2 and gone(pids[0])
    os.kill(pids[1], signal.SIGCONT)                                                        # Continued, it ends too
    assert gone(pids[1])


def test_functions_of_cells(monkeypatch):
    def who_am_i(): return 3
    def elsewhere(): return 3
    assert ct.exported(who_am_i, ct.HERE) is who_am_i                          # Of a module that can be imported
    for f, words in ((who_am_i, "differs from the one in lmcourse.parallelism.collectives_torch: run nbdev_export"), (elsewhere, "can't find it")):
        f.__module__ = "__main__"
        with pytest.raises(ValueError, match=words): ct.exported(f, ct.HERE)
    monkeypatch.setattr(ct.fit_link, "__module__", "__main__")
    assert ct.exported(ct.fit_link, ct.HERE) is ct.fit_link


def test_fit_of_a_link():
    for size in (2, 4, 7):
        b = np.array([1e2, 1e4, 1e6, 1e8])
        link = ct.fit_link(b, 2*(size - 1)*4e-5 + 2*(size - 1)/size*b/3e9, size)
        check_close([link.latency_s, link.bytes_per_s], [4e-5, 3e9], 1e-9)
    assert ct.fit_link([1, 2], [2., 1.], 2).bytes_per_s == math.inf            # Longer vectors were no slower
    for bad in (([1], [1.], 2), ([5, 5], [1., 1.], 2), ([1, 2], [1.], 2), ([1, 2], [0., 1.], 2), ([1, 2], [1., 2.], 1), ([1, math.nan], [1., 2.], 2)):
        with pytest.raises(ValueError, match="fit_link"): ct.fit_link(*bad)
    with pytest.raises(ValueError, match="0 ranks, expected 1 or more"): ct.ProcessPool(0)
