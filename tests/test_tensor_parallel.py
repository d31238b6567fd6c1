"A model cut over ranks is the model: its loss and gradients, at sizes that don't divide, for what it sends by the formula."
import pytest

torch = pytest.importorskip("torch")

from lmcourse.architecture.transformer_torch import TransformerLM
from lmcourse.parallelism.collectives import check_sent
from lmcourse.parallelism.ranks import Network
from lmcourse.parallelism.tensor_parallel import TensorParallelLM, VocabularyParallelLoss, slice_config, slice_of, tensor_parallel_bytes
from lmcourse.tools.config import ModelConfig


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("change", [dict(), dict(window=3, norm="none"), dict(norm_position="post", ffn="relu2"), dict(rope_scaling=dict(rope_type="linear", factor=4.))])
def test_four_ranks_are_one(change, sequence_parallel):
    config = ModelConfig(**dict(vocab_size=30, context_length=7, d_model=10, num_layers=2, num_heads=4, head_dim=2, d_ff=9) | change)
    model = TransformerLM(config, seed=1, dtype=torch.float64)
    batch = torch.randint(30, (3, 8), generator=torch.Generator().manual_seed(2))
    ids, targets = batch[:, :-1], batch[:, 1:].clone()
    targets[1:, 2:] = -100
    def work(port):
        lm = TensorParallelLM(model, port, sequence_parallel)
        loss = lm.loss(ids, targets)
        loss.backward()
        lm.finish()
        return loss.item(), [(n, p.grad) for n, p in lm.slice.named_parameters()]
    net = Network(4)
    found = net.run(work)
    loss = model.loss(ids, targets)
    loss.backward()
    for rank, (got, grads) in enumerate(found):
        assert got == pytest.approx(loss.item(), rel=1e-13)
        for (name, g), p in zip(grads, model.parameters(), strict=True):
            assert float((g - slice_of(name, p.grad, 4, rank)).abs().max()) <= 1e-12*float(p.grad.abs().max()), name
    check_sent(net, [tensor_parallel_bytes(config, 3, 7, 4, r, sequence_parallel) for r in range(4)])


def test_the_loss_survives_large_logits_and_more_ranks_than_it_has_use_for():
    logits = torch.tensor([[1000., 0, -1000, 3], [0, 0, 900, 900]], dtype=torch.float64)
    targets, pieces = torch.tensor([1, 3]), [(0, 1), (1, 2), (2, 3), (3, 4)]
    def work(port):
        a, b = pieces[port.rank]
        own = logits[:, a:b].clone().requires_grad_()
        loss = VocabularyParallelLoss.apply(own, targets, a, port)
        loss.backward()
        return loss.item(), own.grad
    whole = logits.clone().requires_grad_()
    right = torch.nn.functional.cross_entropy(whole, targets)
    right.backward()
    found = Network(4).run(work)
    assert all(loss == right.item() for loss, _ in found) and torch.allclose(torch.cat([g for _, g in found], 1), whole.grad, rtol=1e-13, atol=0)


@pytest.mark.parametrize("change, words", [
    (dict(num_heads=8), "8 query and 8 key/value heads over 3 ranks: a tensor parallel degree of 1, 2, 4, 8 would do"),
    (dict(num_heads=6, d_model=12, bias=True), "c.bias = True"), (dict(num_heads=6, d_model=12, qk_norm=True), "c.qk_norm = True"),
    (dict(num_heads=6, d_model=12, z_loss=.1), "does not compute z_loss = 0.1"),
    (dict(num_heads=6, d_model=12, num_experts=4), "does not compute num_experts = 4"),
    (dict(num_heads=6, d_model=12, kv_lora_rank=4), "does not compute kv_lora_rank = 4")])
def test_what_cannot_be_cut_is_rejected_with_what_would_do(change, words):
    with pytest.raises(ValueError, match=words): slice_config(ModelConfig(**dict(d_model=16) | change), 3, 0)


@pytest.mark.parametrize("ids, targets, words", [
    ([77, 1], [2, 3], "ids from 1 to 77, expected 0 to 49"), ([-1, 1], [2, 3], "ids from -1 to 1"),
    ([0, 49], [50, 3], "targets from 3 to 50, expected 0 to 49"), ([0, 49], [-1, -100], "targets from -1 to -1"), ([0, 49], [-100, -100], "none of the 2 targets counts: all are -100")])
def test_words_that_no_rank_has_are_rejected(ids, targets, words):
    model = TransformerLM(ModelConfig(vocab_size=50, context_length=4, d_model=6, num_layers=1, num_heads=3))
    with pytest.raises(ValueError, match=words):
        Network(3).run(lambda port: TensorParallelLM(model, port).loss(torch.tensor([ids]), torch.tensor([targets])))
