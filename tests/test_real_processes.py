"Every form of chapter 10 that was built by hand, between real processes: the bits of the network in memory, and the same bytes."
import copy
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available(): pytest.skip("needs torch.distributed", allow_module_level=True)

from lmcourse.architecture.transformer_torch import TransformerLM
from lmcourse.parallelism import collectives as co
from lmcourse.parallelism.collectives_torch import ProcessPool, ProcessPort
from lmcourse.parallelism.context_parallel import contiguous, ring_attention, ring_attention_backward, zigzag
from lmcourse.parallelism.data_parallel import BucketedGradients, loss_share, my_rows, reduce_flat, reduce_naive
from lmcourse.parallelism.expert_parallel import experts_backward, experts_forward
from lmcourse.parallelism.pipeline import Pipeline
from lmcourse.parallelism.ranks import Network
from lmcourse.parallelism.schedules import gpipe, interleaved, one_forward_one_backward, zero_bubble, zero_bubble_v
from lmcourse.parallelism.tensor_parallel import TensorParallelLM
from lmcourse.parallelism.zero import FullySharded, ShardedDataParallel
from lmcourse.tools.config import ModelConfig
from lmcourse.training.parallel_np import chunk_slices

RANKS = 3
CONFIG = ModelConfig(vocab_size=31, context_length=8, d_model=12, num_layers=6, num_heads=3, head_dim=4, d_ff=13)


def model(): return TransformerLM(CONFIG, seed=1, dtype=torch.float64)


def batch():
    rows = torch.randint(31, (4, 9), generator=torch.Generator().manual_seed(2))        # Three ranks share neither 4 rows nor 31 words evenly
    targets = rows[:, 1:].clone()
    targets[1:, 5:] = -100
    return rows[:, :-1], targets


def grads_of(m): return [p.grad.numpy() for p in m.parameters() if p.grad is not None]


def data_parallel(port, how):
    m, (ids, targets) = model(), batch()
    buckets = BucketedGradients(m.parameters(), port, how) if isinstance(how, int) else None
    loss_share(m, my_rows(ids, port), my_rows(targets, port), port).backward()
    if buckets: buckets.finish()
    else: dict(naive=reduce_naive, flat=reduce_flat)[how]([*m.parameters()], port)
    return grads_of(m)


def zero(port, stage):
    m, found = model(), []
    engine = FullySharded(m, port, .5) if stage == 3 else ShardedDataParallel(m, port, stage, .5)
    for _ in range(2): found.append(np.array(engine.step(*batch())))
    return found + [w.detach().numpy() for w in (engine.weights() if stage == 3 else m.parameters())]


def tensor_parallel(port, sequence):
    lm = TensorParallelLM(model(), port, sequence)
    (loss := lm.loss(*batch())).backward()
    lm.finish()
    return [loss.detach().numpy(), *grads_of(lm.slice)]


def pipeline(port, name):
    plan = dict(gpipe=gpipe(RANKS, 4), one=one_forward_one_backward(RANKS, 4), interleaved=interleaved(RANKS, 3, 2), zero=zero_bubble(RANKS, 4),
                v=zero_bubble_v(RANKS, 4))[name]
    line = Pipeline(copy.deepcopy(model()), port, plan)
    return [np.array(line.step(*batch())), *grads_of(line.model)]


def context_parallel(port, deal):
    q, k, v, dout = np.random.default_rng(0).standard_normal((4, 11, 2, 4))
    places = dict(contiguous=contiguous, zigzag=zigzag)[deal](11, port.size)
    mine = places[port.rank]
    out, cache = ring_attention(q[mine], k[mine], v[mine], places, port)
    return [out, *ring_attention_backward(dout[mine], cache, port)]


def expert_parallel(port, experts):
    rng, mine = np.random.default_rng(0), chunk_slices(experts, port.size)[port.rank]
    w1, w2 = rng.standard_normal((experts, 3, 4)), rng.standard_normal((experts, 4, 3))
    rng = np.random.default_rng(1 + port.rank)
    x, gates, dout, chosen = rng.standard_normal((5, 4)), rng.standard_normal((5, 2)), rng.standard_normal((5, 4)), rng.integers(0, experts, (5, 2))
    out, cache = experts_forward(x, chosen, gates, w1[mine], w2[mine], experts, port)
    return [out, *experts_backward(dout, cache)]


def without_sums(port, length):
    x = np.arange(length)*(port.rank == 0)
    whole = co.gather(co.scatter(x, port), port)
    co.tree_broadcast(x, port)
    return [x, *([] if whole is None else [whole]), *co.all_to_all([np.full((2, r), port.rank, np.float32) for r in range(port.size)], port)]


FORMS = [(data_parallel, h) for h in ("naive", "flat", 1, 3000, 10**7)] + [(zero, s) for s in (1, 2, 3)] + [(tensor_parallel, s) for s in (False, True)]
FORMS += [(pipeline, n) for n in ("gpipe", "one", "interleaved", "zero", "v")] + [(context_parallel, d) for d in ("contiguous", "zigzag")]
FORMS += [(expert_parallel, e) for e in (3, 4)] + [(without_sums, n) for n in (0, 2, 10)]


def in_process(name, how): # In a rank of the pool
    port = ProcessPort()
    port.network, port.me = SimpleNamespace(clock=[0.]), 0                                # Which the pipeline's notes ask for
    found = globals()[name](port, how)
    port.finish()
    return found, port.sent_bytes[0]


@pytest.fixture(scope="module")
def pool():
    with ProcessPool(RANKS, __name__, timeout_s=60) as pool: yield pool


@pytest.mark.parametrize("form, how", FORMS, ids=[f"{f.__name__}-{h}" for f, h in FORMS])
def test_processes_get_the_bits_and_send_the_bytes_of_the_network(pool, form, how):
    net = Network(RANKS)
    threads = net.run(form, how)
    for rank, (found, sent) in enumerate(pool.run(in_process, form.__name__, how)):
        assert sent == net.sent_bytes[rank].sum()
        for a, b in zip(found, threads[rank], strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape and (a == b).all()
