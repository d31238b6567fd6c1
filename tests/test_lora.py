"LoRA: no effect at first, frozen weights that stay, merged weights that give the same, files that fit or are refused."
from copy import deepcopy

import pytest

torch = pytest.importorskip("torch")

from lmcourse.alignment.lora import LoRALinear, add_lora, load_lora, merge_lora, save_lora
from lmcourse.architecture.transformer_torch import TransformerLM, named_parts
from lmcourse.tools.checks import check_close
from lmcourse.tools.config import ModelConfig
from lmcourse.training.optim_torch import AdamW, parameter_groups

CONFIG = ModelConfig(vocab_size=40, context_length=16, d_model=16, num_layers=2, num_heads=2, d_ff=24, tie_embeddings=True)
IDS = torch.randint(40, (3, 12), generator=torch.Generator().manual_seed(0))


def trained(model, steps=3):
    optimizer = AdamW(parameter_groups(model, .1), lr=.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model.loss(IDS[:, :-1], IDS[:, 1:]).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("change", [{}, dict(bias=True, ffn="gelu", norm="layernorm", position="learned"), dict(num_kv_heads=1, qk_norm=True)], ids=str)
def test_training_changes_adapters_alone_and_merging_changes_nothing(change):
    base = TransformerLM(ModelConfig(**CONFIG.to_dict() | change), seed=1)
    model = add_lora(deepcopy(base), 4)
    assert torch.equal(model(IDS), base(IDS))
    trained(model)
    frozen = {n.replace(".base", ""): p for n, p in model.named_parameters() if not n.endswith(("lora_A", "lora_B"))}
    assert frozen.keys() == dict(base.named_parameters()).keys()
    assert all(torch.equal(frozen[n], p) and frozen[n].grad is None for n, p in base.named_parameters())
    out = model(IDS)
    assert (out - base(IDS)).abs().max() > 1e-3
    merged = merge_lora(model)
    check_close(merged(IDS), out, rtol=1e-4, atol=1e-5)
    assert merged.state_dict().keys() == base.state_dict().keys() and all(p.requires_grad for p in merged.parameters())
    assert merged.lm_head.weight is merged.token_embeddings.weight


def test_the_fast_parts_take_adapters_too():
    base = TransformerLM(CONFIG, seed=1)
    fast = TransformerLM(CONFIG, seed=1, parts=named_parts(CONFIG, "fused", "fused", torch.device("cpu")))
    check_close(trained(add_lora(fast, 2))(IDS), trained(add_lora(base, 2))(IDS), rtol=1e-3, atol=1e-4)


def test_the_scale_is_alpha_over_rank_and_the_seed_decides():
    base = TransformerLM(CONFIG, seed=1)
    one, two, three = (add_lora(deepcopy(base), r, 6., seed=s) for r, s in ((2, 0), (3, 0), (2, 1)))
    assert one.layers[0].ffn.w1.scale == 3 and two.layers[0].ffn.w1.scale == 2
    assert not torch.equal(one.layers[0].ffn.w1.lora_A, three.layers[0].ffn.w1.lora_A)
    only = add_lora(deepcopy(base), parts=("w1", "q_proj"), rank=2)
    assert {n.rsplit(".", 1)[1] for n, m in only.named_modules() if isinstance(m, LoRALinear)} == {"w1", "q_proj"}


def test_a_file_brings_back_the_adapters_and_nothing_else(tmp_path):
    base = TransformerLM(CONFIG, seed=1)
    model = trained(add_lora(deepcopy(base), 3, 5., parts=("ffn",)))
    save_lora(tmp_path/"a.safetensors", model)
    again = load_lora(tmp_path/"a.safetensors", deepcopy(base))
    assert torch.equal(again(IDS), model(IDS))
    assert [n for n, p in again.named_parameters() if p.requires_grad] == [n for n, p in model.named_parameters() if p.requires_grad]
    assert (tmp_path/"a.safetensors").stat().st_size < 6000


def test_what_does_not_fit_changes_nothing(tmp_path):
    base = TransformerLM(CONFIG, seed=1)
    save_lora(tmp_path/"a", add_lora(deepcopy(base), 2))
    wide = TransformerLM(ModelConfig(**CONFIG.to_dict() | dict(d_ff=32)), seed=1)
    for broken, words in ((lambda: load_lora(tmp_path/"a", wide), "no adapters for this model"), (lambda: add_lora(wide, 17), "rank = 17, expected at most 16"),
                          (lambda: add_lora(wide, 0), "rank = 0"), (lambda: add_lora(wide, parts=("wq",)), "contains one of wq"), (lambda: save_lora(tmp_path/"b", wide), "without adapters")):
        with pytest.raises(ValueError, match=words): broken()
        assert not any(isinstance(m, LoRALinear) for m in wide.modules()) and all(p.requires_grad for p in wide.parameters())
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_merged_mixture_of_experts_has_the_weights_to_train_that_it_had():
    "The bias that balances experts never has a gradient."
    model = TransformerLM(ModelConfig(vocab_size=16, context_length=8, d_model=16, num_layers=1, num_heads=2, num_experts=4, router_bias_rate=.01))
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    merge_lora(add_lora(model, 2))
    assert {name: p.requires_grad for name, p in model.named_parameters()} == before and not all(before.values())
