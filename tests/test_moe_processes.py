"A model with experts is trained by several processes as by one: sharded (FSDP2) and with whole copies (DDP), with the same visits and the same biases."
import os

import pytest

torch = pytest.importorskip("torch")

from test_sharding import script

pytestmark = pytest.mark.skipif(not hasattr(os, "fork") or not torch.distributed.is_available(), reason="needs fork and torch.distributed")

EXPERTS = """
EXPERTS = replace(MODEL, d_model=16, num_heads=4, num_experts=5, num_experts_per_tok=2, moe_d_ff=8, num_shared_experts=1, first_dense_layers=1, router_bias_rate=.01,
                  router_score="sigmoid", router_z_loss=.01)
def work(rank):
    for shard in (False, True):
        e = engine(EXPERTS, replace(SHORT, shard=shard, lr=1e-2))
        losses = steps(e, 1, 3)
        weights = {n: (p.full_tensor() if shard else p).flatten().tolist() for n,p in e.whole_model().named_parameters()} if not shard else {
            n: p.full_tensor().flatten().tolist() for n,p in e.model.named_parameters()}
        if rank == 0: tell(f"{shard}", [losses, weights])
world(2, work)
e = engine(EXPERTS, replace(SHORT, shard=False, lr=1e-2))
losses, weights = steps(e, 1, 3), {n: p.flatten().tolist() for n,p in e.model.named_parameters()}
assert max(map(abs, weights["layers.1.ffn.expert_bias"])) > 0
for shard in (False, True):
    theirs = told(f"{shard}")
    assert torch.allclose(torch.tensor(theirs[0]), torch.tensor(losses), atol=1e-5), (theirs[0], losses)
    assert theirs[1].keys() == weights.keys()
    for n,w in weights.items(): assert torch.allclose(torch.tensor(theirs[1][n]), torch.tensor(w), atol=2e-4), (shard, n)
    assert theirs[1]["layers.1.ffn.expert_bias"] == weights["layers.1.ffn.expert_bias"]
"""


def test_experts_in_two_processes_are_those_in_one(tmp_path): script(tmp_path, EXPERTS)
