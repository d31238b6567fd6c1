"LoRA: no effect at first, frozen weights that stay, merged weights that give the same, files that fit or are refused."
import json
from copy import deepcopy
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from lmcourse.alignment.lora import LoRALinear, add_lora, load_lora, load_peft, merge_lora, save_lora, save_peft
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


# The PEFT library

LLAMA = ModelConfig(vocab_size=40, context_length=16, d_model=16, num_layers=2, num_heads=2, head_dim=6, num_kv_heads=1, d_ff=24)
PEFT = {"llama": dict(), "bias": dict(bias=True), "qwen3": dict(qk_norm=True, tie_embeddings=True), "mistral": dict(window=4),
        "olmo2": dict(norm_position="sublayer", qk_norm=True, qk_norm_whole=True, head_dim=8)}
peft_families = pytest.mark.parametrize("change", PEFT.values(), ids=PEFT)


def with_adapters(config, **how): # B isn't 0
    model = add_lora(TransformerLM(config, seed=1), **dict(rank=3, alpha=6., seed=2) | how)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("lora_B"): p.normal_(generator=torch.Generator().manual_seed(3))
    return model


def settings_of(folder): return json.loads((folder/"adapter_config.json").read_text())


@peft_families
def test_a_peft_folder_has_their_names_and_their_order_of_rows(change, tmp_path):
    load_file = pytest.importorskip("safetensors.torch").load_file
    model = with_adapters(replace(LLAMA, **change))
    tensors = load_file(save_peft(tmp_path/"a", model, "somewhere/base")/"adapter_model.safetensors")
    found = settings_of(tmp_path/"a")
    assert sorted(p.name for p in (tmp_path/"a").iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert (found["peft_type"], found["task_type"], found["r"], found["lora_alpha"], found["bias"], found["base_model_name_or_path"]) == ("LORA", "CAUSAL_LM", 3, 6, "none", "somewhere/base")
    names = {"attn.q_proj": "self_attn.q_proj", "attn.k_proj": "self_attn.k_proj", "attn.v_proj": "self_attn.v_proj", "attn.output_proj": "self_attn.o_proj",
             "ffn.w1": "mlp.gate_proj", "ffn.w2": "mlp.down_proj", "ffn.w3": "mlp.up_proj"}
    assert found["target_modules"] == sorted(n.rpartition(".")[2] for n in names.values())
    K = model.config.head_size
    for i in range(2):
        for ours, theirs in names.items():
            layer, at = model.get_submodule(f"layers.{i}.{ours}"), f"base_model.model.model.layers.{i}.{theirs}.lora_"
            assert torch.equal(tensors.pop(at + "A.weight"), layer.lora_A)
            order = [h*K + j for h in range(len(layer.lora_B)//K) for j in (*range(0, K, 2), *range(1, K, 2))] if ours[5:] in ("q_proj", "k_proj") else slice(None)
            assert torch.equal(tensors.pop(at + "B.weight"), layer.lora_B[order])
    assert not tensors
    again = load_peft(tmp_path/"a", TransformerLM(replace(LLAMA, **change), seed=1))
    assert torch.equal(again(IDS), model(IDS)) and {n for n, p in again.named_parameters() if p.requires_grad} == {n for n, p in model.named_parameters() if p.requires_grad}


def test_a_few_matrices_are_named_in_full(tmp_path):
    save_peft(tmp_path/"v", with_adapters(LLAMA, parts=("v_proj",)))
    assert settings_of(tmp_path/"v")["target_modules"] == ["v_proj"]
    save_peft(tmp_path/"one", with_adapters(LLAMA, parts=("layers.1.attn.v",)))
    assert settings_of(tmp_path/"one")["target_modules"] == ["model.layers.1.self_attn.v_proj"]


def test_peft_folders_that_do_not_fit(tmp_path):
    model, base = with_adapters(LLAMA), TransformerLM(LLAMA)
    mixed = with_adapters(LLAMA, parts=("q_proj",))
    mixed.layers[1].attn.q_proj.scale = 5.
    gpt2 = with_adapters(ModelConfig(vocab_size=40, context_length=16, d_model=16, num_layers=1, num_heads=2, norm="layernorm", position="learned", ffn="gelu", bias=True))
    for bad, words in ((base, "without adapters"), (mixed, "several ranks or scales"), (gpt2, "layers.0.attn.q_proj: transformers stores it in another form")):
        with pytest.raises(ValueError, match=words): save_peft(tmp_path/"no", bad)
    folder = save_peft(tmp_path/"a", model)
    with pytest.raises(FileExistsError, match="not empty"): save_peft(folder, model)
    with pytest.raises(ValueError, match="merge them first"): load_peft(folder, model)
    for change, words in (dict(use_dora=True), "use_dora = True, expected False"), (dict(alpha_pattern={"q_proj": 3}), "alpha_pattern = "), (dict(peft_type="IA3"), "peft_type = 'IA3', expected 'LORA'"), \
            (dict(alora_invocation_tokens=[3, 4]), "alora_invocation_tokens = "), *((dict(init_lora_weights=init), f"init_lora_weights = {init!r} changed the base") for init in ("pissa", "pissa_niter_4", "OLoRA", "corda", "loftq", "lora_ga")):
        (tmp_path/"b").mkdir(exist_ok=True)
        (tmp_path/"b/adapter_config.json").write_text(json.dumps(settings_of(folder) | change))
        (tmp_path/"b/adapter_model.safetensors").write_bytes((folder/"adapter_model.safetensors").read_bytes())
        with pytest.raises(ValueError, match=words): load_peft(tmp_path/"b", base)
    (tmp_path/"b/adapter_config.json").write_text(json.dumps(settings_of(folder)))
    for other in (replace(LLAMA, num_layers=1), replace(LLAMA, d_ff=40), replace(LLAMA, num_heads=3, num_kv_heads=3, d_model=18)):
        with pytest.raises(ValueError, match="no adapters for this model"): load_peft(tmp_path/"b", wrong := TransformerLM(other))
        assert not any(isinstance(m, LoRALinear) for m in wrong.modules()) and all(p.requires_grad for p in wrong.parameters())
    (tmp_path/"b/adapter_model.safetensors").unlink()
    for place in (tmp_path/"b", tmp_path/"c"):
        with pytest.raises(FileNotFoundError): load_peft(place, base)


@peft_families
def test_peft_computes_the_same_from_our_folder_and_we_from_theirs(change, tmp_path):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    from lmcourse.architecture.pretrained import from_hf, save_hf
    config = replace(LLAMA, **change)
    base, model = TransformerLM(config, seed=1), with_adapters(config)
    save_hf(base, tmp_path/"base"), save_peft(tmp_path/"ours", model, str(tmp_path/"base"))
    def there(): return transformers.AutoModelForCausalLM.from_pretrained(tmp_path/"base")
    loaded = peft.PeftModel.from_pretrained(there(), tmp_path/"ours")
    with torch.no_grad():
        assert (loaded.get_base_model()(IDS).logits - base(IDS)).abs().max() > .1
        check_close(loaded(IDS).logits, model(IDS), rtol=1e-4, atol=1e-4)
        check_close(peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path/"ours")(IDS).logits, model(IDS), rtol=1e-4, atol=1e-4)
        check_close(loaded.merge_and_unload()(IDS).logits, merge_lora(deepcopy(model))(IDS), rtol=1e-4, atol=1e-4)
    for k, init in enumerate(("gaussian", "orthogonal", "pissa", "olora")): # PEFT gives the last two another base, each time it loads them
        made = peft.get_peft_model(there(), peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=init, task_type="CAUSAL_LM"))
        made.save_pretrained(tmp_path/init)
        if k < 2: load_peft(tmp_path/init, from_hf(tmp_path/"base"))
        else:
            with pytest.raises(ValueError, match="changed the base"): load_peft(tmp_path/init, from_hf(tmp_path/"base"))
    for targets in (["q_proj", "v_proj"], "all-linear"): # And back, trained there
        made = peft.get_peft_model(there(), peft.LoraConfig(r=4, lora_alpha=9, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM"))
        optimizer = torch.optim.AdamW([p for p in made.parameters() if p.requires_grad], lr=.01)
        made(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        made.eval().save_pretrained(tmp_path/str(targets))
        again = load_peft(tmp_path/str(targets), from_hf(tmp_path/"base"))
        with torch.no_grad(): check_close(again(IDS), made(IDS).logits, rtol=1e-4, atol=1e-4)
        again = load_peft(save_peft(tmp_path/f"{targets} again", again), from_hf(tmp_path/"base"))
        with torch.no_grad(): check_close(again(IDS), made(IDS).logits, rtol=1e-4, atol=1e-4)


def test_adapters_of_16_bits_are_saved_too(tmp_path):
    base = TransformerLM(CONFIG, seed=1).to(torch.bfloat16)
    model = trained(add_lora(deepcopy(base), 2))
    save_lora(tmp_path / "a", model)
    again = load_lora(tmp_path / "a", deepcopy(base))
    assert torch.equal(again(IDS), model(IDS)) and {p.dtype for p in again.parameters()} == {torch.bfloat16}


def test_a_merged_mixture_of_experts_has_the_weights_to_train_that_it_had():
    "The bias that balances experts never has a gradient."
    model = TransformerLM(ModelConfig(vocab_size=16, context_length=8, d_model=16, num_layers=1, num_heads=2, num_experts=4, router_bias_rate=.01))
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    adapted = {name.rpartition(".")[0] for name, p in add_lora(model, 2).named_parameters() if p.requires_grad}
    assert adapted == {*(f"layers.0.attn.{kind}_proj" for kind in ("q", "k", "v", "output")), "layers.0.ffn.router"}, "the experts are one tensor"
    merge_lora(model)
    assert {name: p.requires_grad for name, p in model.named_parameters()} == before and not all(before.values())


def test_a_model_with_adapters_is_not_saved_as_one_without(tmp_path):
    "Its folder could not be loaded: the config knows no adapters."
    from lmcourse.training.models import save_model
    with pytest.raises(ValueError, match=r"describe layers\.0\.attn\.q_proj\.lora_A; adapters can be merged"): save_model(tmp_path/"m", add_lora(TransformerLM(CONFIG)), None, None, {})
    assert not list(tmp_path.iterdir())
