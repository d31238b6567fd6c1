"Every stage of ZeRO is one process, for every kind of model; gathered weights don't outlive their call."
import copy
import weakref

import pytest

torch = pytest.importorskip("torch")

from lmcourse.architecture.transformer_torch import TransformerLM
from lmcourse.parallelism import zero
from lmcourse.parallelism.ranks import Network
from lmcourse.tools.config import ModelConfig

SIZES = dict(vocab_size=31, context_length=8, d_model=10, num_layers=2, num_heads=2, head_dim=4, d_ff=13)
CHANGES = [dict(), dict(norm="layernorm", bias=True, position="learned", ffn="gelu"), dict(norm_position="post", qk_norm=True, position="sinusoidal"), dict(tie_embeddings=True)]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_is_that_of_one_process(change, stage):
    model = TransformerLM(ModelConfig(**SIZES | change), seed=1, dtype=torch.float64)
    if stage == 3 and change.get("tie_embeddings"): return
    batch = torch.randint(31, (5, 9), generator=torch.Generator().manual_seed(2))
    ids, targets = batch[:, :-1], batch[:, 1:].clone()
    targets[2:, 4:] = -100
    settings = dict(lr=.01, weight_decay=.1, betas=(.8, .9), eps=1e-4)
    def work(port):
        replica = copy.deepcopy(model)
        engine = zero.FullySharded(replica, port, .5, **settings) if stage == 3 else zero.ShardedDataParallel(replica, port, stage, .5, **settings)
        return [engine.step(ids, targets) for _ in range(2)], engine.weights() if stage == 3 else [p.detach() for p in replica.parameters()]
    found = Network(3).run(work)
    optimizer, losses = torch.optim.AdamW(model.parameters(), **settings), []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model.loss(ids, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), .5)
        optimizer.step()
        losses.append(loss.item())
    for got, weights in found:
        assert got == pytest.approx(losses, rel=1e-12, abs=0)
        for w, p in zip(weights, model.parameters(), strict=True): assert torch.allclose(w, p, rtol=1e-12, atol=1e-14)


def test_gathered_weights_live_no_longer_than_their_call(monkeypatch):
    rows, gather = [], zero.gather_row
    def watched(*args):
        row = gather(*args)
        rows.append(weakref.ref(row.untyped_storage()))
        return row
    monkeypatch.setattr(zero, "gather_row", watched)
    def work(port):
        engine = zero.FullySharded(TransformerLM(ModelConfig(**SIZES)), port)
        out = engine.logits(torch.zeros(2, 5, dtype=torch.long))
        alive = [sum(r() is not None for r in rows)]
        out.sum().backward()
        return [*alive, sum(r() is not None for r in rows), len(rows)]
    assert Network(1).run(work) == [[0, 1, 4 + 3]]              # The last one until the end of the step


@pytest.mark.parametrize("more", [dict(z_loss=.1), dict(num_experts=4)])
def test_a_loss_with_more_than_cross_entropy_is_rejected(more):
    model = TransformerLM(ModelConfig(**SIZES | more))
    for make in (zero.FullySharded, lambda model, port: zero.ShardedDataParallel(model, port, 1)):
        with pytest.raises(ValueError, match=f"ZeRO does not compute {[*more][0]}"): Network(1).run(lambda port: make(model, port))
