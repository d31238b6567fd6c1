"Weights to transformers and back: the same logits for each family, every misfit named, files whole or not there."
import json
import math
import random
import sys
import typing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
import huggingface_hub
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

import lmcourse.architecture.pretrained as pretrained
from lmcourse.architecture.pretrained import (config_from_hf, config_to_hf, family_of, from_hf, halves_to_pairs, links, load_weights, pack,
    pairs_to_halves, params_of, save_hf, to_hf, unpack, untie)
from lmcourse.architecture.transformer_np import init_params, transformer_forward
from lmcourse.accounting.parameters import count_parameters
from lmcourse.architecture.transformer_torch import TransformerLM
from lmcourse.tokenization.tokenizer import Tokenizer
from lmcourse.tools.checks import check_close, expect_error
from lmcourse.tools.config import ModelConfig
from lmcourse.training.models import load_model

transformers.utils.logging.disable_progress_bar()
llama = ModelConfig(vocab_size=40, context_length=24, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, d_ff=48)
qwen3 = replace(llama, qk_norm=True, head_dim=12)
gpt2 = replace(llama, num_kv_heads=None, d_ff=None, norm="layernorm", position="learned", ffn="gelu", bias=True, tie_embeddings=True)
mistral = replace(llama, head_dim=12, window=5)
olmo2 = replace(llama, norm_position="sublayer", qk_norm=True, qk_norm_whole=True)
YARN = dict(rope_type="yarn", factor=4., original_max_position_embeddings=8)
LLAMA3 = dict(rope_type="llama3", factor=8., low_freq_factor=1., high_freq_factor=4., original_max_position_embeddings=8)
CONFIGS = {
    "llama": llama, "llama-mha": replace(llama, num_kv_heads=None), "llama-mqa": replace(llama, num_kv_heads=1), "llama-tied": replace(llama, tie_embeddings=True),
    "llama-bias": replace(llama, bias=True), "llama-head": replace(llama, head_dim=20), "llama-pair": replace(llama, head_dim=2, num_layers=3),
    "llama-eps": replace(llama, norm_eps=.3, rope_theta=50.), "llama-wide": replace(llama, d_model=96, num_heads=6, d_ff=33, vocab_size=301, num_layers=1),
    "qwen3": qwen3, "qwen3-tied": replace(qwen3, tie_embeddings=True), "qwen3-mqa": replace(qwen3, num_kv_heads=1, rope_theta=1e6),
    "qwen3-odd": replace(qwen3, d_model=30, num_heads=4), "qwen3-eps": replace(qwen3, norm_eps=.3, head_dim=None),
    "llama-rope-linear": replace(llama, rope_scaling=dict(rope_type="linear", factor=3.)), "llama-rope-yarn": replace(llama, rope_theta=500., rope_scaling=YARN),
    "llama-rope-llama3": replace(llama, head_dim=16, rope_theta=500., rope_scaling=LLAMA3), "qwen3-rope-yarn": replace(qwen3, rope_scaling=YARN | dict(attention_factor=1.5, beta_fast=2.)),
    "mistral": mistral, "mistral-all": replace(mistral, window=24, rope_scaling=YARN), "olmo2": olmo2, "olmo2-rope": replace(olmo2, num_kv_heads=None, rope_scaling=LLAMA3),
    "gpt2": gpt2, "gpt2-untied": replace(gpt2, tie_embeddings=False), "gpt2-inner": replace(gpt2, d_ff=40, num_heads=1), "gpt2-eps": replace(gpt2, norm_eps=.3),
    "gpt2-wide": replace(gpt2, d_model=96, num_heads=6, vocab_size=301, num_layers=3)}
each = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
families = pytest.mark.parametrize("config", [llama, qwen3, gpt2], ids=["llama", "qwen3", "gpt2"])


def shake(module, seed=0):
    "Numbers that hide nothing: no gain of 1, no bias of 0, queries and keys large enough for attention to be uneven"
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in sorted(module.named_parameters()):
            noise = torch.randn(p.shape, generator=rng, dtype=torch.float64)
            p.copy_(noise*.3 + (1. if "norm" in name or "ln" in name else 0.) if p.ndim == 1 else noise*1.3*p.shape[-1]**-.5)
    return module.requires_grad_(False).eval()


def ours(config, seed=0, **place): return shake(TransformerLM(config, **place), seed)


def theirs(config, seed=0):
    with torch.random.fork_rng():
        return shake(transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config_to_hf(config))), seed)


def ids_of(config, B=2): return torch.randint(config.vocab_size, (B, config.context_length), generator=torch.Generator().manual_seed(1))


def same_logits(a, b, config, tolerance=1e-5):
    ids = ids_of(config)
    a, b = (getattr(y, "logits", y) for y in (a(ids), b(ids)))
    assert a.std() > .3
    check_close(a, b, tolerance, tolerance)


def sizes(config):
    "All sizes spelled out, as a file has them"
    plain = dict(num_kv_heads=None, head_dim=None) if config.norm == "layernorm" else dict(num_kv_heads=config.kv_heads, head_dim=None if config.qk_norm_whole else config.head_size)
    return replace(config, d_ff=config.ffn_size, **plain)


# Both directions

@each
def test_theirs_to_ours(config, tmp_path):
    there = theirs(config)
    model = from_hf(there)
    assert model.config == sizes(config)
    same_logits(model, there, config)
    there.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    check_close(from_hf(tmp_path).state_dict(), model.state_dict(), 0, 0)


@each
def test_ours_to_theirs(config, tmp_path):
    model, before = ours(config), torch.get_rng_state()
    there = to_hf(model)
    assert type(there).__name__ == dict(llama="LlamaForCausalLM", qwen3="Qwen3ForCausalLM", gpt2="GPT2LMHeadModel", mistral="MistralForCausalLM", olmo2="Olmo2ForCausalLM")[family_of(config)]
    assert not there.training and torch.equal(before, torch.get_rng_state())
    same_logits(there, model, config)
    folder = save_hf(model, tmp_path/"model", max_shard_bytes=20_000)
    again, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    same_logits(again, model, config)
    for back in (from_hf(there), from_hf(folder), from_hf(again)):
        assert back.config == sizes(config)
        check_close(back.state_dict(), model.state_dict(), 0, 0)


def test_a_folder_without_a_tokenizer_is_told_what_is_missing(tmp_path):
    folder = save_hf(TransformerLM(llama), tmp_path/"model", max_shard_bytes=20_000)
    with pytest.raises(FileNotFoundError, match=r"model: no tokenizer.json, expected a byte-level BPE tokenizer in such a file"): load_model(folder)


@each
def test_every_tensor_is_linked_once_under_the_names_of_transformers(config):
    model, there = TransformerLM(config, device="meta"), theirs(config)
    chain = links(model, family_of(config))
    assert sorted(n for link in chain for n in link.ours) == sorted(dict(model.named_parameters()))
    assert sorted(link.theirs for link in chain) == sorted(dict(there.named_parameters()))
    for link in chain:
        parts = [model.get_parameter(n) for n in link.ours]
        packed = pack(link, parts, config.head_size)
        assert packed.shape == there.get_parameter(link.theirs).shape
        assert [p.shape for p in unpack(link, packed, config.head_size)] == [p.shape for p in parts]


def test_float64(tmp_path):
    "GPT-2 is the one that transformers computes in float64 throughout"
    for config in (gpt2, replace(gpt2, tie_embeddings=False)):
        model = ours(config, dtype=torch.float64)
        same_logits(to_hf(model), model, config, 1e-10)
        same_logits(from_hf(to_hf(model), dtype=torch.float64), to_hf(model), config, 1e-10)
        folder = save_hf(model, tmp_path/str(config.tie_embeddings))
        same_logits(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64), model, config, 1e-10)
        check_close(from_hf(folder, dtype=torch.float64).state_dict(), model.state_dict(), 0, 0)


def llama_in_float64(w, c, ids):
    "Llama and Qwen3 by their papers, halves and all, from the tensors of a file: nothing of it is ours"
    norm = lambda x, gain: x/np.sqrt((x*x).mean(-1, keepdims=True) + c["rms_norm_eps"])*gain
    line = lambda x, name: x@w[name + ".weight"].T + w.get(name + ".bias", 0)
    T, K, H, G = len(ids), c["head_dim"], c["num_attention_heads"], c["num_key_value_heads"]
    angle = np.outer(np.arange(T), c["rope_parameters"]["rope_theta"]**(-np.arange(0, K, 2)/K))
    def turn(x): a, b = x[..., :K//2], x[..., K//2:]; return np.concatenate((a*np.cos(angle) - b*np.sin(angle), b*np.cos(angle) + a*np.sin(angle)), -1)
    x = w["model.embed_tokens.weight"][ids]
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}."
        h = norm(x, w[at + "input_layernorm.weight"])
        q, k, v = (line(h, at + f"self_attn.{n}_proj").reshape(T, -1, K).swapaxes(0, 1) for n in "qkv")
        if c["model_type"] == "qwen3": q, k = (norm(z, w[at + f"self_attn.{n}_norm.weight"]) for z, n in ((q, "q"), (k, "k")))
        q, k, v = turn(q), turn(k).repeat(H//G, 0), v.repeat(H//G, 0)
        s = np.where(np.tri(T, dtype=bool), q@k.swapaxes(1, 2)/math.sqrt(K), -np.inf)
        p = np.exp(s - s.max(-1, keepdims=True)); p /= p.sum(-1, keepdims=True)
        x = x + line((p@v).swapaxes(0, 1).reshape(T, H*K), at + "self_attn.o_proj")
        h = norm(x, w[at + "post_attention_layernorm.weight"])
        gate = line(h, at + "mlp.gate_proj")
        x = x + line(gate/(1 + np.exp(-gate))*line(h, at + "mlp.up_proj"), at + "mlp.down_proj")
    return line(norm(x, w["model.norm.weight"]), "lm_head" if not c["tie_word_embeddings"] else "model.embed_tokens")


@pytest.mark.parametrize("name", [n for n in CONFIGS if n.startswith(("llama", "qwen3")) and "rope" not in n])
def test_files_in_float64_are_what_the_papers_say(name, tmp_path):
    config = CONFIGS[name]
    model, ids = ours(config, dtype=torch.float64), ids_of(config, 1)
    folder = save_hf(model, tmp_path/"model")
    w = {n: t.numpy() for n, t in load_file(folder/"model.safetensors").items()}
    expected = llama_in_float64(w, json.loads((folder/"config.json").read_text()), ids[0].numpy())
    check_close(model(ids)[0], torch.from_numpy(expected), 1e-10, 1e-10)
    check_close(from_hf(folder, dtype=torch.float64)(ids)[0], torch.from_numpy(expected), 1e-10, 1e-10)


@pytest.mark.parametrize("config", [llama, qwen3, gpt2, mistral, olmo2], ids=["llama", "qwen3", "gpt2", "mistral", "olmo2"])
def test_a_tokenizer_in_the_folder_gives_the_same_ids_there(config, tmp_path):
    tokenizer = Tokenizer.train(["the café, the cafe\u0301 and the cafés in 2024. " * 3], 270)
    with expect_error(ValueError, "a tokenizer of 270 ids, and a model of 40"): save_hf(ours(config), tmp_path/"no", tokenizer=tokenizer)
    assert not (tmp_path/"no").exists()
    model = ours(replace(config, vocab_size=300))       # Padded, as vocabularies often are
    folder = save_hf(model, tmp_path/"model", tokenizer=tokenizer)
    there, net = transformers.AutoTokenizer.from_pretrained(folder), transformers.AutoModelForCausalLM.from_pretrained(folder)
    rng = random.Random(0)
    parts = ["the", " café", "cafe\u0301", "  ", "\r\n", "12345", "'LL", "<|endoftext|>", "<|", "\u3000", "\x85", "\x1c", "ﬀ", "١٢", "👩\u200d👧", "\0", "日本"]
    for text in ["", *parts, *("".join(rng.choices(parts, k=20)) for _ in range(200))]:
        ids = tokenizer.encode(text)
        assert there(text)["input_ids"] == [tokenizer.end_of_text, *ids] and there.decode(ids) == text, text
        assert there(text, add_special_tokens=False)["input_ids"] == ids
    assert there("the", "cafe")["input_ids"] == [i for t in ("the", "cafe") for i in (tokenizer.end_of_text, *tokenizer.encode(t))]
    assert there.eos_token_id == there.bos_token_id == net.generation_config.eos_token_id == tokenizer.end_of_text
    assert there.model_max_length == config.context_length
    check_close(from_hf(folder).state_dict(), model.state_dict(), 0, 0)
    assert Tokenizer.from_folder(folder).digest == tokenizer.digest


@families
def test_generation_there_is_generation_here(config):
    model, ids = ours(config), ids_of(config, 1)[:, :4]
    out = to_hf(model).generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
    for _ in range(12): ids = torch.cat((ids, model(ids)[:, -1:].argmax(-1)), 1)
    check_close(out, ids)


@families
def test_copies_share_nothing(config):
    model = ours(config)
    there, params = to_hf(model), params_of(model)
    back, kept = from_hf(there), {n: t.clone() for n, t in model.state_dict().items()}
    for p in (*there.parameters(), *back.parameters()): p.data.zero_()
    for a in params.values(): a[:] = 0
    check_close(model.state_dict(), kept, 0, 0)


@pytest.mark.parametrize("config", [qwen3, replace(gpt2, tie_embeddings=False)], ids=["qwen3", "gpt2"])
def test_other_types(config, tmp_path):
    for dtype in (torch.bfloat16, torch.float16):
        model = ours(config).to(dtype)
        there, folder = to_hf(model), save_hf(model, tmp_path/str(dtype))
        assert there.dtype == dtype and transformers.AutoModelForCausalLM.from_pretrained(folder).dtype == dtype
        wide = {n: t.float() for n, t in model.state_dict().items()}
        for source in (there, folder):
            check_close(from_hf(source).state_dict(), wide, 0, 0)
            check_close(from_hf(source, dtype=dtype).state_dict(), model.state_dict(), 0, 0)
        same_logits(from_hf(folder), there.float(), config)
        check_close({n: torch.from_numpy(a).float() for n, a in params_of(model).items()}, wide, 0, 0)


def test_a_model_of_two_types_loses_no_digit(tmp_path):
    model = ours(llama).bfloat16()
    model.ln_final.weight.data = model.ln_final.weight.data.float() + 1e-5
    for source in (to_hf(model), save_hf(model, tmp_path/"model")):
        check_close(from_hf(source).state_dict(), {n: t.float() for n, t in model.state_dict().items()}, 0, 0)
    assert json.loads((tmp_path/"model/config.json").read_text())["dtype"] == "float32"


def test_models_of_theirs_as_they_come():
    there = theirs(qwen3)
    check_close(from_hf(torch.compile(there)).state_dict(), from_hf(there).state_dict(), 0, 0)
    broken = ours(gpt2)
    broken.token_embeddings.weight.data[3, 2] = math.nan        # A run that diverged can be looked at
    assert from_hf(to_hf(broken)).token_embeddings.weight.isnan().sum() == 1
    with expect_error(TypeError, "Linear"): from_hf(nn.Linear(2, 2))
    with expect_error(TypeError, "TransformerLM"): from_hf(ours(gpt2))


# The order of rows

@given(st.integers(1, 5), st.integers(1, 8), st.integers(0, 3))
def test_pairs_and_halves(heads, pairs, width):
    K = 2*pairs
    rows = torch.arange(heads*K*max(width, 1)).reshape((heads*K, width) if width else (-1,))
    order = [h*K + j for h in range(heads) for j in (*range(0, K, 2), *range(1, K, 2))]
    check_close(pairs_to_halves(rows, K), rows[order])
    check_close(halves_to_pairs(pairs_to_halves(rows, K), K), rows)


@pytest.mark.parametrize("name", ["q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias"])
def test_rows_in_the_wrong_order_are_seen(name):
    config = replace(llama, bias=True, head_dim=8)
    model, there, ids = ours(config), to_hf(ours(config)), ids_of(config)
    there.model.layers[1].self_attn.get_parameter(name).data.copy_(model.layers[1].attn.get_parameter(name))
    assert (there(ids).logits - model(ids)).abs().max() > .01


@pytest.mark.parametrize("name", ["q_norm", "k_norm"])
def test_gains_in_the_wrong_order_are_seen(name):
    model, there, ids = ours(qwen3), to_hf(ours(qwen3)), ids_of(qwen3)
    there.model.layers[1].self_attn.get_submodule(name).weight.data.copy_(model.layers[1].attn.get_submodule(name).weight)
    assert (there(ids).logits - model(ids)).abs().max() > .01


# What a family can be

REFUSED = [
    (llama, dict(norm="layernorm"), "llama: norm = 'layernorm', expected 'rmsnorm'"), (llama, dict(norm="none"), "norm = 'none', expected 'rmsnorm'"),
    (llama, dict(norm_position="post"), "llama: norm_position = 'post', expected 'pre'"), (gpt2, dict(norm_position="sublayer"), "gpt2: norm_position = 'sublayer'"),
    (llama, dict(position="none"), "position = 'none', expected 'rope'"), (gpt2, dict(position="sinusoidal"), "gpt2: position = 'sinusoidal', expected 'learned'"),
    (llama, dict(ffn="geglu"), "ffn = 'geglu', expected 'swiglu'"), (gpt2, dict(ffn="relu"), "ffn = 'relu', expected 'gelu'"),
    (qwen3, dict(window=3), "qwen3: window = 3"), (gpt2, dict(qk_norm=True), "gpt2: qk_norm = True, expected False"),
    (gpt2, dict(bias=False), "bias = False, expected True"), (qwen3, dict(bias=True), "expected False"),
    (gpt2, dict(num_kv_heads=2), "num_kv_heads = 2, expected 4"), (gpt2, dict(head_dim=4), "head_dim = 4, expected d_model/num_heads = 8"),
    (olmo2, dict(head_dim=4), "the nearest is olmo2: head_dim = 4, expected d_model/num_heads = 8"), (olmo2, dict(window=3), "olmo2: window = 3, expected None"),
    (qwen3, dict(num_experts=4, qk_norm_whole=True), "olmoe: head_dim = 12, expected d_model/num_heads = 8"),
    (mistral, dict(norm="layernorm"), "the nearest is mistral: norm = 'layernorm', expected 'rmsnorm'"),
    (llama, dict(d_model=30, head_dim=8), "d_model = 30, expected a multiple of num_heads = 4"),
    (gpt2, dict(scale_embeddings=True), "gpt2: scale_embeddings = True with a tied head, expected False"),
    (qwen3, dict(tie_embeddings=True, scale_embeddings=True), "qwen3: scale_embeddings = True with a tied head, expected False"),
    (llama, dict(ffn="relu", window=2, norm="none"), "mistral: norm = 'none', expected 'rmsnorm'; ffn = 'relu', expected 'swiglu'")]


@pytest.mark.parametrize("config, changes, words", REFUSED, ids=lambda v: str(v) if isinstance(v, dict) else "")
def test_what_no_family_can_be(config, changes, words, tmp_path):
    config = replace(config, **changes)
    for f in (lambda: family_of(config), lambda: config_to_hf(config), lambda: to_hf(TransformerLM(config)), lambda: save_hf(TransformerLM(config), tmp_path/"no")):
        with expect_error(ValueError, words): f()
    assert not list(tmp_path.iterdir())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_config_goes_out_with_its_logits_or_is_refused(data):
    draw = lambda s: data.draw(s)
    hints = typing.get_type_hints(ModelConfig)
    base = draw(st.sampled_from([llama, qwen3, gpt2]))
    words = draw(st.lists(st.sampled_from([n for n, h in hints.items() if typing.get_origin(h) is typing.Literal]), max_size=1))
    changes = {n: draw(st.sampled_from(typing.get_args(hints[n]))) for n in words}
    changes |= {n: draw(st.booleans()) for n in draw(st.lists(st.sampled_from("qk_norm bias tie_embeddings scale_embeddings".split()), max_size=2))}
    changes |= dict(head_dim=draw(st.sampled_from([None, 2, 10])), num_kv_heads=draw(st.sampled_from([None, 1])), window=draw(st.sampled_from([None, None, None, 2])),
                    norm_eps=draw(st.sampled_from([1e-6, .2])), z_loss=draw(st.sampled_from([0., .1])))
    config = replace(base, **changes)
    model = ours(config)
    try: family_of(config)
    except ValueError: return
    there = to_hf(model)
    same_logits(there, model, config)
    same_logits(from_hf(there), model, config)


def test_experts_of_whom_none_is_shared_come_back(tmp_path):
    "Transformers' class then holds empty tensors."
    config = replace(llama, num_kv_heads=None, kv_lora_rank=12, num_experts=4, router_score="sigmoid", router_bias_rate=.001)
    model, there = ours(config), to_hf(ours(config))
    there.save_pretrained(tmp_path)
    for source in (there, tmp_path): same_logits(from_hf(source), model, config)


def test_latent_attention_has_a_key_for_every_head_there_too():
    "transformers' own default is 128 heads, and its plain attention counts on it"
    config = replace(llama, num_kv_heads=None, num_experts=4, num_shared_experts=1, router_score="sigmoid", router_bias_rate=.001, kv_lora_rank=8, q_lora_rank=12,
                     qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=6, router_aux_loss=0.)
    model = ours(config)
    there = to_hf(model)
    there.set_attn_implementation("eager")
    same_logits(there, model, config)


def test_scaled_embeddings_go_into_the_numbers():
    for config in (replace(llama, scale_embeddings=True), replace(gpt2, tie_embeddings=False, scale_embeddings=True)):
        model = ours(config)
        same_logits(to_hf(model), model, config)
        back = from_hf(to_hf(model))
        assert not back.config.scale_embeddings
        check_close(back.token_embeddings.weight, model.token_embeddings.weight*math.sqrt(32), 1e-6)
        check_close(back(ids_of(config)), model(ids_of(config)), 1e-5, 1e-5)


def test_untie():
    quickstart = replace(ModelConfig.preset("quickstart"), vocab_size=50, context_length=24, num_layers=1)
    model = ours(quickstart)
    free = untie(model)
    check_close(free(ids_of(quickstart)), model(ids_of(quickstart)), 0, 0)
    assert count_parameters(free).unique == count_parameters(model).unique + 50*128 and free.lm_head.weight.data_ptr() != model.token_embeddings.weight.data_ptr()
    same_logits(to_hf(free), model, quickstart)
    check_close(untie(ours(llama)).state_dict(), ours(llama).state_dict(), 0, 0)
    assert untie(ours(gpt2, dtype=torch.float64)).lm_head.weight.dtype == torch.float64


# config.json

PLAIN = {family: config_to_hf(c) for family, c in dict(llama=llama, qwen3=qwen3, gpt2=gpt2, mistral=mistral, olmo2=olmo2).items()}


@each
def test_config_round_trip(config):
    assert config_from_hf(json.loads(json.dumps(config_to_hf(config)))) == sizes(config)
    assert config_from_hf(transformers.AutoConfig.for_model(**config_to_hf(config)).to_dict()) == sizes(config)


@pytest.mark.parametrize("family, changes, words", [
    ("llama", dict(model_type="gemma3_text"), "config.json: model_type = 'gemma3_text', with norms before and after each part, and two kinds of layers, expected one of deepseek_v3, gpt2"), ("llama", dict(model_type=None), "model_type = None, expected one of deepseek_v3, gpt2, llama, mistral, mixtral, olmo2, olmoe, qwen2, qwen3, qwen3_moe"),
    ("llama", dict(hidden_act="gelu"), "hidden_act = 'gelu', expected 'silu'"), ("qwen3", dict(hidden_act="relu"), "a qwen3 that this model can't represent: hidden_act = 'relu'"),
    ("llama", dict(mlp_bias=True), "attention_bias = False, mlp_bias = True, expected the same"), ("llama", dict(attention_bias=True), "attention_bias = True, mlp_bias = False"),
    ("qwen3", dict(attention_bias=True), "attention_bias = True, expected False"), ("qwen3", dict(use_sliding_window=True), "use_sliding_window = True, expected False"),
    ("qwen3", dict(layer_types=["full_attention", "sliding_attention"]), "layer_types has sliding_attention"),
    ("llama", dict(rope_scaling=dict(rope_type="dynamic", factor=8.)), "RoPE of type 'dynamic', expected one of default, linear, llama3, yarn"),
    ("llama", dict(rope_scaling=dict(type="longrope", factor=2.)), "RoPE of type 'longrope', expected one of default"), ("llama", dict(rope_scaling="linear"), "rope_scaling = 'linear', expected an object"),
    ("qwen3", dict(rope_parameters=dict(rope_type="yarn", rope_theta=1e4)), "config.json: ModelConfig: rope_scaling of type yarn has no factor"),
    ("llama", dict(rope_scaling=YARN | dict(mscale=1., mscale_all_dim=1.)), "rope_scaling of type yarn has mscale, expected only factor"),
    ("llama", dict(rope_scaling=dict(rope_type="llama3", factor=8.)), "rope_scaling of type llama3 has no low_freq_factor"), ("mistral", dict(hidden_act="gelu"), "a mistral that this model can't represent: hidden_act = 'gelu'"),
    ("olmo2", dict(attention_bias=True), "a olmo2 that this model can't represent: attention_bias = True, expected False"),
    ("qwen3", dict(rope_parameters=dict(full_attention=dict(rope_theta=1e4))), "RoPE with full_attention"),
    ("llama", dict(partial_rotary_factor=.5), "partial_rotary_factor = 0.5, expected 1"),
    ("llama", dict(rope_parameters=dict(rope_type="default", partial_rotary_factor=.5)), "partial_rotary_factor = 0.5, expected 1"),
    ("gpt2", dict(activation_function="gelu"), "activation_function = 'gelu', expected 'gelu_new'"), ("gpt2", dict(scale_attn_weights=False), "scale_attn_weights = False"),
    ("gpt2", dict(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx = True"), ("gpt2", dict(add_cross_attention=True), "add_cross_attention"),
    ("llama", dict(quantization_config=dict(bits=4)), "quantization_config is there"), ("llama", dict(hidden_size="32"), "config.json: ModelConfig: d_model = '32', expected int"),
    ("gpt2", dict(n_head=5), "config.json: ModelConfig: d_model = 32 is not a multiple of num_heads = 5"), ("llama", dict(rope_theta=0, rope_parameters=None), "rope_theta = 0")], ids=str)
def test_configs_of_theirs_that_are_refused(family, changes, words):
    with expect_error(ValueError, words): config_from_hf(PLAIN[family] | changes)


@pytest.mark.parametrize("scaling", [dict(rope_type="linear", factor=3.), YARN, LLAMA3], ids=lambda s: s["rope_type"])
def test_a_stretched_rope_is_written_for_old_and_new_readers(scaling):
    config = sizes(replace(llama, rope_theta=77., rope_scaling=scaling))
    file = config_to_hf(config)
    assert file["rope_scaling"] == scaling and file["rope_theta"] == 77. and file["rope_parameters"] == dict(rope_theta=77.) | scaling
    old, new = ({k: v for k, v in file.items() if k not in left} for left in (["rope_parameters"], ["rope_scaling", "rope_theta"]))
    ancient = old | dict(rope_scaling={{"rope_type": "type"}.get(k, k): v for k, v in scaling.items()})
    for part in (old, new, ancient):
        assert config_from_hf(part) == config
        assert transformers.AutoConfig.for_model(**json.loads(json.dumps(part))).rope_parameters.items() >= file["rope_parameters"].items()
    transformers.AutoConfig.for_model(**file)
    assert config.rope_scaling == scaling       # Reading there doesn't write here
    assert "rope_scaling" not in config_to_hf(llama)


@pytest.mark.parametrize("more", [{}, dict(tie_word_embeddings=True, num_key_value_heads=4), dict(rope_parameters=YARN | dict(rope_theta=500.))], ids=["plain", "tied", "yarn"])
def test_qwen2_comes_in_with_its_few_biases_and_goes_out_as_a_llama(more, tmp_path):
    there = shake(transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**dict(vocab_size=40, max_position_embeddings=24, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                                                                                num_key_value_heads=2, intermediate_size=48) | more)))
    there.save_pretrained(tmp_path/"a")
    torch.use_deterministic_algorithms(True)                    # Memory that nobody fills is NaN
    try:
        for source in (there, tmp_path/"a"):
            model = from_hf(source)
            same_logits(there, model, model.config)
    finally: torch.use_deterministic_algorithms(False)
    absent = {name for name, p in model.named_parameters() if not p.any()}
    assert absent == {f"layers.{i}.{part}.bias" for i in range(2) for part in ("attn.output_proj", "ffn.w1", "ffn.w2", "ffn.w3")}
    assert type(to_hf(model)).__name__ == "LlamaForCausalLM"
    same_logits(to_hf(model), there, model.config)
    for key, value in dict(use_sliding_window=True, hidden_act="gelu").items():
        with expect_error(ValueError, f"a qwen2 that this model can't represent: {key} = {value!r}"): config_from_hf(there.config.to_dict() | {key: value})
    file = tmp_path/"a"/"model.safetensors"
    tensors = load_file(file)
    save_file({n: t for n, t in tensors.items() if n != "model.layers.1.self_attn.k_proj.bias"}, file)
    with expect_error(ValueError, "missing: model.layers.1.self_attn.k_proj.bias"): from_hf(tmp_path/"a")


@pytest.mark.parametrize("family, named, words", [
    ("phi3", "self_attn.qkv_proj.weight", "with one matrix for queries, keys and values"),
    ("gemma2", "post_feedforward_layernorm.weight", "with norms before and after each part, and capped logits"),
    ("gemma3_text", "post_feedforward_layernorm.weight", "with norms before and after each part, and two kinds of layers")])
def test_popular_families_that_do_not_load_say_why(family, named, words):
    small = dict(vocab_size=40, hidden_size=32, num_hidden_layers=7, num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=48, pad_token_id=0)
    with torch.device("meta"): there = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(family, **small))
    assert f"model.layers.1.{named}" in there.state_dict() and "model.layers.1.self_attn.o_proj.bias" not in there.state_dict()
    if "capped" in words: assert there.config.attn_logit_softcapping and there.config.final_logit_softcapping
    if "kinds of layers" in words: assert len({*there.config.layer_types}) == 2
    with expect_error(ValueError, f"model_type = {family!r}, {words}"): from_hf(there)


def test_all_that_is_wrong_is_named_at_once():
    bad = {k: v for k, v in PLAIN["llama"].items() if k not in ("vocab_size", "hidden_size")} | dict(hidden_act="relu", mlp_bias=True)
    with expect_error(ValueError, "vocab_size is missing; hidden_size is missing; hidden_act = 'relu', expected 'silu'; attention_bias = False, mlp_bias = True"):
        config_from_hf(bad)


def test_rope_theta_is_read_where_it_stands():
    bare = {k: v for k, v in PLAIN["llama"].items() if not k.startswith("rope")}
    theta = lambda **keys: config_from_hf(bare | keys).rope_theta
    assert theta() == 10_000 and theta(rope_theta=5) == 5 and theta(rope_parameters=dict(rope_theta=6)) == 6
    assert theta(rope_theta=5, rope_parameters=dict(rope_theta=6, rope_type="default")) == 6     # As transformers 5 has it
    assert theta(rope_theta=5, rope_scaling=None) == theta(rope_theta=5, rope_scaling=dict(rope_type="default")) == 5
    for keys in (dict(), dict(rope_theta=5.), dict(rope_parameters=dict(rope_theta=6., rope_type="default"), rope_theta=5.)):
        assert transformers.AutoConfig.for_model(**bare | keys).rope_parameters["rope_theta"] == theta(**keys)


@pytest.mark.parametrize("family, keys", [("llama", "num_key_value_heads head_dim rms_norm_eps tie_word_embeddings attention_bias mlp_bias hidden_act"),
    ("qwen3", "num_key_value_heads head_dim rms_norm_eps tie_word_embeddings attention_bias use_sliding_window"),
    ("gpt2", "n_inner layer_norm_epsilon tie_word_embeddings activation_function scale_attn_weights"),
    ("mistral", "num_key_value_heads head_dim rms_norm_eps tie_word_embeddings sliding_window"), ("olmo2", "num_key_value_heads rms_norm_eps tie_word_embeddings attention_bias")])
def test_what_a_file_leaves_out_is_what_transformers_takes(family, keys):
    for key in keys.split():
        short = {k: v for k, v in (PLAIN[family] | ({"num_attention_heads": 32, "hidden_size": 128} if key == "num_key_value_heads" else {})).items() if k != key}
        full = transformers.AutoConfig.for_model(**short).to_dict()
        a, b = config_from_hf(short), config_from_hf(full)
        assert (a.kv_heads, a.head_size, a.ffn_size, a.norm_eps, a.tie_embeddings, a.bias, a.window) == (b.kv_heads, b.head_size, b.ffn_size, b.norm_eps, b.tie_embeddings, b.bias, b.window), key
    if "attention_bias" in keys: assert config_from_hf(PLAIN[family] | dict(attention_bias=None)).bias is False


def test_files_of_well_known_models():
    "As they stand on the hub, in the keys that matter"
    common = dict(hidden_act="silu", rope_scaling=None, attention_bias=False)
    known = {
        124_439_808: dict(model_type="gpt2", activation_function="gelu_new", n_ctx=1024, n_embd=768, n_head=12, n_layer=12, n_positions=1024, vocab_size=50257,
                          layer_norm_epsilon=1e-5, resid_pdrop=.1, task_specific_params={"text-generation": {"do_sample": True}}),
        596_049_920: common | dict(model_type="qwen3", head_dim=128, hidden_size=1024, intermediate_size=3072, max_position_embeddings=40960, max_window_layers=28,
                          num_attention_heads=16, num_hidden_layers=28, num_key_value_heads=8, rms_norm_eps=1e-6, rope_theta=1000000, sliding_window=None,
                          tie_word_embeddings=True, use_sliding_window=False, vocab_size=151936),
        1_100_048_384: common | dict(model_type="llama", hidden_size=2048, intermediate_size=5632, max_position_embeddings=2048, num_attention_heads=32,
                          num_hidden_layers=22, num_key_value_heads=4, pretraining_tp=1, rms_norm_eps=1e-5, tie_word_embeddings=False, vocab_size=32000),
        134_515_008: common | dict(model_type="llama", hidden_size=576, intermediate_size=1536, max_position_embeddings=8192, num_attention_heads=9,
                          num_hidden_layers=30, num_key_value_heads=3, rms_norm_eps=1e-5, rope_interleaved=False, rope_theta=100000, tie_word_embeddings=True, vocab_size=49152)}
    for count, file in known.items(): assert count_parameters(TransformerLM(config_from_hf(file), device="meta")).unique == count


# Files

def edited(folder, change, name="model.safetensors"):
    tensors = load_file(folder/name)
    change(tensors)
    save_file(tensors, folder/name, metadata=dict(format="pt"))
    return folder


@families
def test_all_names_that_do_not_fit_are_listed(config, tmp_path):
    folder, lost = save_hf(ours(config), tmp_path/"model"), []
    def change(t):
        lost.extend(sorted(t)[1:4])
        for name in lost: del t[name]
        name = sorted(t)[-1]
        t |= {"extra.one": torch.zeros(2), "extra.two": torch.zeros(3), name: torch.zeros(7, 7)}
        lost.append(f"{name} [7, 7], expected [")
    with expect_error(ValueError, "does not fit the model; missing: ") as e: from_hf(edited(folder, change))
    try: from_hf(folder)
    except ValueError as e: assert all(words in str(e) for words in [*lost, "not in the model: extra.one, extra.two; of another shape: "]) and "\n" not in str(e)


def test_nothing_is_built_before_all_fits(tmp_path, monkeypatch):
    folder = edited(save_hf(ours(llama), tmp_path/"model"), lambda t: t.pop("model.norm.weight"))
    monkeypatch.setattr(pretrained, "_values", lambda *_: pytest.fail("a tensor was read"))
    monkeypatch.setattr(TransformerLM, "to_empty", lambda *_, **__: pytest.fail("memory was taken"))
    with expect_error(ValueError, "missing: model.norm.weight"): from_hf(folder)


def test_whole_numbers_are_refused(tmp_path):
    folder = edited(save_hf(ours(llama), tmp_path/"model"), lambda t: t.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)}))
    with expect_error(ValueError, "not of a floating-point type: model.norm.weight I8"): from_hf(folder)


def test_damaged_folders(tmp_path):
    new = lambda name, **kw: save_hf(ours(llama), tmp_path/name, **kw)
    whole = (folder := new("cut")/"model.safetensors").read_bytes()
    for data in (b"", b"abc", whole[:7], whole[:100], whole[:-1], whole + b"x", (10**15).to_bytes(8, "little") + whole[8:], b"\xff"*len(whole)):
        folder.write_bytes(data)
        with expect_error(ValueError, "model.safetensors: not a whole safetensors file"): from_hf(folder.parent)
    shard = sorted((folder := new("lost", max_shard_bytes=20_000)).glob("*.safetensors"))[1]
    shard.unlink()
    with expect_error(FileNotFoundError, f"{shard}: no such file"): from_hf(folder)
    (folder := new("none")/"model.safetensors").rename(folder.with_name("pytorch_model.bin"))
    with expect_error(FileNotFoundError, "neither model.safetensors nor model.safetensors.index.json"): from_hf(folder.parent)
    for text, words in (("{", "not JSON"), ("[]", "a list, expected an object")):
        (new(str(len(text) + len(words)))/"config.json").write_text(text)
        with expect_error(ValueError, f"config.json: {words}"): from_hf(tmp_path/str(len(text) + len(words)))
    ((folder := new("bare"))/"config.json").unlink()
    with expect_error(FileNotFoundError, "config.json: no such file"): from_hf(folder)
    with expect_error(FileNotFoundError, "no such folder, and no name like openai-community/gpt2"): from_hf(tmp_path/"nowhere")


def test_an_index_names_files_beside_it_alone(tmp_path):
    folder = save_hf(ours(llama), tmp_path/"model", max_shard_bytes=20_000)
    index = folder/"model.safetensors.index.json"
    for text, words in (("nonsense", "not JSON"), (index.read_text().replace("model-00001", "../model-00001"), "weight_map must give"), ("{}", "weight_map must give"),
                        ('{"weight_map": 3}', "weight_map must give"), ('{"weight_map": {"a": 3}}', "weight_map must give"), ('{"weight_map": {}}', "missing: model.embed")):
        index.write_text(text)
        with expect_error(ValueError, words): from_hf(folder)


def test_what_does_no_harm(tmp_path):
    def old_gpt2(t):
        for name in list(t): t[name.removeprefix("transformer.")] = t.pop(name)
        for i in range(2): t |= {f"h.{i}.attn.bias": torch.ones(1, 1, 24, 24).tril().bool(), f"h.{i}.attn.masked_bias": torch.tensor(-1e4)}
    folder = edited(save_hf(ours(gpt2), tmp_path/"gpt2"), old_gpt2)
    check_close(from_hf(folder).state_dict(), ours(gpt2).state_dict(), 0, 0)
    folder = edited(save_hf(ours(llama), tmp_path/"llama"), lambda t: t.update({f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(2)}))
    check_close(from_hf(folder).state_dict(), ours(llama).state_dict(), 0, 0)
    folder = edited(save_hf(ours(gpt2), tmp_path/"no"), lambda t: t.pop("transformer.h.0.attn.c_attn.bias"))
    with expect_error(ValueError, "missing: transformer.h.0.attn.c_attn.bias"): from_hf(folder)


@pytest.mark.parametrize("config", [replace(llama, tie_embeddings=True), replace(qwen3, tie_embeddings=True), gpt2], ids=["llama", "qwen3", "gpt2"])
def test_a_tied_head_may_stand_in_the_file_as_what_it_is(config, tmp_path):
    embedding = dict(gpt2="transformer.wte.weight").get(family_of(config), "model.embed_tokens.weight")
    folder = save_hf(ours(config), tmp_path/"model")
    assert "lm_head.weight" not in load_file(folder/"model.safetensors")
    edited(folder, lambda t: t.update({"lm_head.weight": t[embedding].clone()}))
    check_close(from_hf(folder).state_dict(), ours(config).state_dict(), 0, 0)
    edited(folder, lambda t: t["lm_head.weight"][3].add_(.1))
    with expect_error(ValueError, f"lm_head.weight differs from {embedding}, but the head is tied"): from_hf(folder)
    edited(folder, lambda t: t.update({"lm_head.weight": torch.zeros(3, 3)}))
    with expect_error(ValueError, "lm_head.weight differs from"): from_hf(folder)


def test_a_model_without_a_head_that_transformers_saved(tmp_path):
    config = replace(llama, tie_embeddings=True)
    there = theirs(config)
    there.model.save_pretrained(tmp_path/"tied")
    assert not any(n.startswith("model.") for n in load_file(tmp_path/"tied/model.safetensors"))
    same_logits(from_hf(tmp_path/"tied"), there, config)
    theirs(llama).model.save_pretrained(tmp_path/"untied")
    with expect_error(ValueError, "does not fit the model; missing: lm_head.weight"): from_hf(tmp_path/"untied")


def test_shards(tmp_path):
    model = ours(gpt2)
    for most in (1, 5_000, 20_000, 10**9):
        folder = save_hf(model, tmp_path/str(most), max_shard_bytes=most)
        files = sorted(folder.glob("*.safetensors"))
        read = {f.name: load_file(f) for f in files}
        total = sum(t.nbytes for tensors in read.values() for t in tensors.values())
        assert total == 4*count_parameters(model).unique
        for tensors in read.values(): assert sum(t.nbytes for t in tensors.values()) <= most or len(tensors) == 1
        if most == 10**9: assert [f.name for f in folder.iterdir() if f.suffix != ".json"] == ["model.safetensors"] and not (folder/"model.safetensors.index.json").exists()
        else:
            index = json.loads((folder/"model.safetensors.index.json").read_text())
            assert index["metadata"]["total_size"] == total and len(files) > 2
            assert index["weight_map"] == {n: f for f, tensors in read.items() for n in tensors}
            assert [f.name for f in files] == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
        check_close(from_hf(folder).state_dict(), model.state_dict(), 0, 0)
    with expect_error(ValueError, "max_shard_bytes = 0, expected more than 0"): save_hf(model, tmp_path/"zero", max_shard_bytes=0)
    assert not (tmp_path/"zero").exists()


def test_a_folder_is_whole_or_not_there(tmp_path, monkeypatch):
    calls = []
    def fails(*args, **kw):
        calls.append(args)
        if len(calls) == 3: raise OSError("disk full")
        return save_file(*args, **kw)
    monkeypatch.setattr(pretrained, "save_file", fails)
    (tmp_path/"empty").mkdir()
    for name in ("new", "empty"):
        calls.clear()
        with expect_error(OSError, "disk full"): save_hf(ours(llama), tmp_path/name, max_shard_bytes=20_000)
    assert [p.name for p in tmp_path.iterdir()] == ["empty"] and not list((tmp_path/"empty").iterdir())
    monkeypatch.undo()
    save_hf(ours(llama), tmp_path/"empty")
    assert sorted(p.name for p in (tmp_path/"empty").iterdir()) == ["config.json", "model.safetensors"] and [p.name for p in tmp_path.iterdir()] == ["empty"]
    with expect_error(FileExistsError, "not empty, expected a new folder"): save_hf(ours(gpt2), tmp_path/"empty")
    check_close(from_hf(tmp_path/"empty").state_dict(), ours(llama).state_dict(), 0, 0)
    with expect_error(FileNotFoundError): save_hf(ours(llama), tmp_path/"no/parent")


def test_files_need_no_transformers(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for config in (llama, qwen3, gpt2):
        folder = save_hf(ours(config), tmp_path/family_of(config))
        check_close(from_hf(folder).state_dict(), ours(config).state_dict(), 0, 0)
    with expect_error(ImportError, "to_hf needs transformers: pip install lmcourse[interop]"): to_hf(ours(llama))
    with expect_error(ImportError, "needs huggingface_hub: pip install lmcourse[interop]"): from_hf("some/model")


# The hub, without a network

def test_a_name_is_looked_up_on_the_hub(tmp_path, monkeypatch):
    folder, asked = save_hf(ours(gpt2), tmp_path/"snapshot", max_shard_bytes=20_000), []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **kw: asked.append((args, kw)) or str(folder))
    check_close(from_hf("openai-community/gpt2", revision="607a30d").state_dict(), ours(gpt2).state_dict(), 0, 0)
    (args, kw), = asked
    assert args == ("openai-community/gpt2",) and kw["revision"] == "607a30d"
    wanted = [n for n in ("config.json", "model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "onnx/model.safetensors",
                          "tokenizer.json", "original/model-1.safetensors") if any(Path(n).match(p) and "/" not in n for p in kw["allow_patterns"])]
    assert wanted == ["config.json", "model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    assert list(huggingface_hub.utils.filter_repo_objects(["onnx/model.safetensors", *wanted], allow_patterns=kw["allow_patterns"])) == wanted


@pytest.mark.parametrize("error, words", [(ConnectionError("no route\nto the host"), "hub: no route"), (huggingface_hub.errors.HFValidationError("a bad name"), "hub: a bad name"),
    (huggingface_hub.errors.LocalEntryNotFoundError("cannot find the files in the cache"), "hub: cannot find the files"), (RuntimeError(), "hub: RuntimeError")], ids=str)
def test_the_hub_fails_in_one_line(monkeypatch, error, words):
    def fails(*_, **__): raise error
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fails)
    with pytest.raises(OSError) as e: from_hf("some/model")
    assert words in str(e.value) and "some/model: no such folder here" in str(e.value) and "\n" not in str(e.value) and e.value.__suppress_context__


# Memory

def test_loading_takes_little_more_than_one_copy(tmp_path):
    from torch.profiler import ProfilerActivity, profile
    model = ours(ModelConfig(vocab_size=3000, context_length=8, d_model=128, num_layers=4, num_heads=4))
    size = 4*count_parameters(model).unique
    folder = save_hf(model, tmp_path/"model", max_shard_bytes=size//8)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as p: back = from_hf(folder)
    changes = sorted((e for e in p.profiler.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns())
    assert size < np.cumsum([e.nbytes() for e in changes]).max() < 1.4*size
    check_close(back.state_dict(), model.state_dict(), 0, 0)


def test_the_file_is_not_needed_afterwards(tmp_path):
    folder = save_hf(ours(llama), tmp_path/"model")
    model = from_hf(folder)
    (folder/"model.safetensors").write_bytes(b"")
    check_close(model.state_dict(), ours(llama).state_dict(), 0, 0)


# The course's names

class Rotary(nn.Module):
    def __init__(self, theta, d_k, max_seq_len):
        super().__init__()
        angles = torch.arange(max_seq_len)[:, None]*theta**(-torch.arange(0, d_k, 2)/d_k)
        self.register_buffer("rotation", torch.polar(torch.ones_like(angles), angles), persistent=False)
    def forward(self, x): return torch.view_as_real(torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())*self.rotation[:x.shape[-2]]).flatten(-2)


class Lin(nn.Module):
    def __init__(self, d_in, d_out): super().__init__(); self.weight = nn.Parameter(torch.randn(d_out, d_in)*d_in**-.5)
    def forward(self, x): return torch.einsum("oi,...i->...o", self.weight, x)


class Norm(nn.Module):
    def __init__(self, d): super().__init__(); self.weight = nn.Parameter(torch.rand(d) + .5)
    def forward(self, x): return x*torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)*self.weight


class Attention(nn.Module):
    def __init__(self, d, heads, rope):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.output_proj, self.heads, self.rope = *(Lin(d, d) for _ in range(4)), heads, rope
    def forward(self, x):
        q, k, v = (p(x).view(*x.shape[:2], self.heads, -1).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        scores = self.rope(q)@self.rope(k).transpose(-1, -2)/q.shape[-1]**.5
        scores = scores + torch.full(scores.shape[-2:], -torch.inf).triu(1)
        return self.output_proj((scores.softmax(-1)@v).transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self, d, f): super().__init__(); self.w1, self.w2, self.w3 = Lin(d, f), Lin(f, d), Lin(d, f)
    def forward(self, x): h = self.w1(x); return self.w2(h*torch.sigmoid(h)*self.w3(x))


class Block(nn.Module):
    def __init__(self, d, heads, f, rope):
        super().__init__()
        self.attn, self.ln1, self.ffn, self.ln2 = Attention(d, heads, rope), Norm(d), SwiGLU(d, f), Norm(d)
    def forward(self, x): x = x + self.attn(self.ln1(x)); return x + self.ffn(self.ln2(x))


class Solution(nn.Module):
    "A model that knows only the course's handout"
    def __init__(self, vocab_size, context_length, d_model, num_layers, num_heads, d_ff, rope_theta):
        super().__init__()
        rope = Rotary(rope_theta, d_model//num_heads, context_length)
        self.token_embeddings = nn.Embedding(vocab_size, d_model)
        self.layers = nn.ModuleList(Block(d_model, num_heads, d_ff, rope) for _ in range(num_layers))
        self.ln_final, self.lm_head = Norm(d_model), Lin(d_model, vocab_size)
    def forward(self, ids):
        x = self.token_embeddings(ids)
        for layer in self.layers: x = layer(x)
        return self.lm_head(self.ln_final(x))


handout = dict(vocab_size=70, context_length=20, d_model=48, num_layers=3, num_heads=4, d_ff=128, rope_theta=10_000.)
course = ModelConfig(**handout)


def solution():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Solution(**handout).requires_grad_(False)


def test_the_state_dict_of_another_solution_needs_no_renaming(tmp_path):
    other, ids = solution(), ids_of(course)
    model = TransformerLM(course)
    model.load_state_dict(other.state_dict())
    check_close(model(ids), other(ids), 1e-5, 1e-5)
    save_file(other.state_dict(), tmp_path/"other.safetensors")
    numpy = {n: t.numpy() for n, t in other.state_dict().items()}
    wrapped = {f"_orig_mod.{n}": t for n, t in other.state_dict().items()}
    ddp = {f"module._orig_mod.{n}": t for n, t in other.state_dict().items()}
    save_file(wrapped, tmp_path/"compiled.safetensors")
    torch.save(other.state_dict(), tmp_path/"other.pt")
    for weights in (other.state_dict(), numpy, wrapped, ddp, str(tmp_path/"other.safetensors"), tmp_path/"compiled.safetensors", torch.load(tmp_path/"other.pt", weights_only=True)):
        model = TransformerLM(course, seed=1)
        load_weights(model, weights)
        check_close(model(ids), other(ids), 1e-5, 1e-5)
    with expect_error(ValueError, "other.pt: expected a safetensors file; for a file made by torch.save, pass the dictionary"): load_weights(model, tmp_path/"other.pt")
    same_logits(to_hf(model), other, course)


def test_weights_that_do_not_fit_are_all_named_and_none_is_taken():
    model, weights = TransformerLM(course), solution().state_dict()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    for name in ("ln_final.weight", "layers.1.ffn.w3.weight"): del weights[name]
    weights |= {"rope.cos": torch.zeros(3), "norm.weight": torch.zeros(48), "lm_head.weight": torch.zeros(71, 48), "layers.0.attn.q_proj.weight": torch.zeros(48, 47),
                "layers.0.ln1.weight": torch.zeros(48, dtype=torch.long)}
    words = ("the dictionary does not fit the model; missing: layers.1.ffn.w3.weight, ln_final.weight; not in the model: rope.cos, norm.weight; "
             "of another shape: layers.0.attn.q_proj.weight [48, 47], expected [48, 48], lm_head.weight [71, 48], expected [70, 48]; "
             "not of a floating-point type: layers.0.ln1.weight int64")
    with expect_error(ValueError, words): load_weights(model, weights)
    check_close(model.state_dict(), before, 0, 0)


@each
def test_numpy_and_back(config, tmp_path):
    model = ours(config)
    params = params_of(model)
    assert all(isinstance(a, np.ndarray) and a.dtype == np.float32 and a.flags.owndata for a in params.values())
    assert set(params) == set(dict(model.named_parameters())) and sum(a.size for a in params.values()) == count_parameters(model).unique
    again = TransformerLM(config, seed=1)
    for a in params.values(): a.flags.writeable = False
    load_weights(again, params)
    check_close(again.state_dict(), model.state_dict(), 0, 0)
    same_logits(to_hf(again), model, config)


def test_load_weights_and_a_tied_head(tmp_path):
    model, full = ours(gpt2), ours(gpt2, 1).state_dict()
    load_weights(model, full)
    check_close(model.state_dict(), full, 0, 0)
    load_weights(model, ours(gpt2).half().state_dict())
    check_close(model.state_dict(), {n: t.half().float() for n, t in ours(gpt2).state_dict().items()}, 0, 0)
    assert model.lm_head.weight is model.token_embeddings.weight
    before = {n: t.clone() for n, t in model.state_dict().items()}
    with expect_error(ValueError, "lm_head.weight differs from token_embeddings.weight, but the head is tied"): load_weights(model, full | {"lm_head.weight": torch.zeros(40, 32)})
    check_close(model.state_dict(), before, 0, 0)
    with expect_error(ValueError, "missing: lm_head.weight"): load_weights(TransformerLM(replace(gpt2, tie_embeddings=False)), params_of(model))
    nan = full | {n: torch.where(torch.arange(32) == 3, math.nan, full[n]) for n in ("lm_head.weight", "token_embeddings.weight")}
    load_weights(model, nan)
    with expect_error(ValueError, "lm_head.weight differs"): load_weights(model, nan | {"lm_head.weight": full["lm_head.weight"]})


def test_names_that_are_one_without_their_prefix():
    model, weights = TransformerLM(course), solution().state_dict()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    with expect_error(ValueError, "has some names twice, with and without a prefix: ln_final.weight"):
        load_weights(model, weights | {"module.ln_final.weight": torch.zeros(48)})
    check_close(model.state_dict(), before, 0, 0)


def test_a_checkpoint_of_the_course_is_a_file_of_weights(tmp_path):
    from lmcourse.training.checkpoint import save_checkpoint
    model = TransformerLM(gpt2)
    save_checkpoint(model, torch.optim.AdamW(model.parameters()), 3, tmp_path/"step_000003", dict(model=gpt2.to_dict()))
    again = TransformerLM(gpt2, seed=1)
    load_weights(again, tmp_path/"step_000003/model.safetensors")
    check_close(again.state_dict(), model.state_dict(), 0, 0)


@pytest.mark.parametrize("config", [c for c in CONFIGS.values() if not c.qk_norm_whole], ids=[n for n in CONFIGS if "olmo2" not in n])
def test_numpy_engine_has_the_same_logits(config):
    ids, there = ids_of(config), theirs(config)
    logits, _ = transformer_forward(params_of(from_hf(there)), ids.numpy(), config)
    check_close(logits, there(ids).logits, 1e-5, 1e-5)
    params = init_params(config, 3, np.float32)
    load_weights(model := TransformerLM(config), params)
    check_close(to_hf(model)(ids).logits, transformer_forward(params, ids.numpy(), config)[0], 1e-5, 1e-5)
