"Gradients of any number of ranks are those of one process, however the model is cut into buckets."
import copy

import pytest

torch = pytest.importorskip("torch")

from lmcourse.architecture.transformer_torch import TransformerLM
from lmcourse.parallelism.data_parallel import BucketedGradients, loss_share, make_buckets, my_rows, reduce_flat, reduce_naive
from lmcourse.parallelism.ranks import Network
from lmcourse.tools.config import ModelConfig

CONFIGS = [dict(), dict(tie_embeddings=True, num_kv_heads=1), dict(norm="layernorm", bias=True, position="learned", ffn="gelu"), dict(norm_position="post", qk_norm=True)]


@pytest.mark.parametrize("change", CONFIGS)
@pytest.mark.parametrize("size", [2, 3])
def test_gradients_are_those_of_one_process(change, size):
    config = ModelConfig(**dict(vocab_size=31, context_length=8, d_model=12, num_layers=2, num_heads=2, d_ff=20) | change)
    model = TransformerLM(config, seed=1, dtype=torch.float64)
    batch = torch.randint(31, (4, 9), generator=torch.Generator().manual_seed(2))
    ids, targets = batch[:, :-1], batch[:, 1:].clone()
    targets[0, 1:] = -100
    targets[-1] = -100                                  # With one row for a rank, none of its targets counts
    model.loss(ids, targets).backward()
    def work(port, how):
        replica = copy.deepcopy(model)
        replica.zero_grad()
        buckets = BucketedGradients(replica.parameters(), port, how) if isinstance(how, int) else None
        loss_share(replica, my_rows(ids, port), my_rows(targets, port), port).backward()
        buckets.finish() if buckets else how([*replica.parameters()], port)
        return [p.grad for p in replica.parameters()]
    for how in (reduce_naive, reduce_flat, 1, 3000, 10**6):
        for grads in Network(size).run(work, how):
            for p, g in zip(model.parameters(), grads): assert float((p.grad - g).abs().max()) < 1e-14      # The largest entry is near 1


def test_buckets_hold_every_parameter_once_last_first():
    parameters = [torch.zeros(n) for n in (5, 1, 3, 2, 9)]
    for limit, sizes in ((1, [[9], [2], [3], [1], [5]]), (12, [[9], [2, 3], [1, 5]]), (999, [[9, 2, 3, 1, 5]])):
        assert [[p.numel() for p in b] for b in make_buckets(parameters, limit)] == sizes


def test_hooks_work_step_after_step():
    def work(port):
        w = torch.ones(3, requires_grad=True)
        buckets = BucketedGradients([w], port, 1)
        for step in (1, 2):
            w.grad = None
            (w*step*(port.rank + 1)).sum().backward()
            buckets.finish()
        return w.grad.tolist()
    assert Network(3).run(work) == [[12.]*3]*3


@pytest.mark.parametrize("finish", [True, False])
def test_a_second_backward_pass_without_finish_is_rejected(finish):
    def work(port):
        w = torch.ones(3, requires_grad=True)
        buckets = BucketedGradients([w], port, 1)
        for _ in range(2):
            w.grad = None
            w.sum().backward()
            if finish: buckets.finish()
        return w.grad.tolist()
    if finish: assert Network(2).run(work) == [[2.]*3]*2
    else:
        with pytest.raises(RuntimeError, match="bucket 0 was already sent, expected one backward pass"): Network(2).run(work)


@pytest.mark.parametrize("more", [dict(z_loss=.1), dict(num_experts=4)])
def test_a_loss_with_more_than_cross_entropy_is_rejected(more):
    model = TransformerLM(ModelConfig(vocab_size=9, context_length=4, d_model=4, num_layers=2, num_heads=1, **more))
    ids = torch.zeros(1, 3, dtype=torch.long)
    with pytest.raises(ValueError, match=f"loss_share does not compute {[*more][0]}"): Network(1).run(lambda port: loss_share(model, ids, ids, port))
