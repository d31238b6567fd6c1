"Experts on other ranks give what experts at home give, for any tokens and any choice."
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcourse.parallelism.collectives import check_sent
from lmcourse.parallelism.expert_parallel import count_pairs, expert_bytes, experts_backward, experts_forward
from lmcourse.parallelism.ranks import Network
from lmcourse.training.parallel_np import chunk_slices


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=4), st.integers(1, 9), st.integers(1, 3), st.randoms())
def test_any_number_of_ranks_is_one(tokens, experts, choices, random):
    rng, size = np.random.default_rng(random.getrandbits(32)), len(tokens)
    xs, gates, douts = ([rng.standard_normal((t, n)) for t in tokens] for n in (4, choices, 4))
    chosen = [rng.integers(0, experts, (t, choices)) for t in tokens]       # Also twice the same
    w1, w2 = rng.standard_normal((experts, 3, 4)), rng.standard_normal((experts, 4, 3))
    def work(port, xs, chosen, gates, douts):
        r, mine = port.rank, chunk_slices(experts, port.size)[port.rank]
        out, cache = experts_forward(xs[r], chosen[r], gates[r], w1[mine], w2[mine], experts, port)
        return out, *experts_backward(douts[r], cache)
    net = Network(size)
    found = net.run(work, xs, chosen, gates, douts)
    right = Network(1).run(work, *[[np.concatenate(a)] for a in (xs, chosen, gates, douts)])[0]
    for got, whole in zip(zip(*found), right, strict=True): np.testing.assert_allclose(np.concatenate(got), whole, rtol=1e-11, atol=1e-12)
    pairs = count_pairs(chosen, experts)
    check_sent(net, [expert_bytes(pairs, 4, r, backward=True) for r in range(size)])
