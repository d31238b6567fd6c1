"Frequencies of a longer context are those of transformers, and a stretched model keeps its weights."
import math
from copy import deepcopy
import pytest

torch = pytest.importorskip("torch")
from lmcourse.architecture.transformer_torch import TransformerLM
from lmcourse.architecture.attention_torch import RoPE
from lmcourse.inference.long_context import METHODS, attention_scale, extend_context, stretched_frequencies
from lmcourse.tools.config import ModelConfig

def tiny(context_length=32, **more):
    return TransformerLM(ModelConfig(vocab_size=16, context_length=context_length, d_model=32, num_layers=2, num_heads=2, **more))

@pytest.mark.parametrize("K,factor,trained,theta", [(16, 2, 64, 1e4), (64, 3, 2048, 1e4), (128, 8, 8192, 5e5), (128, 4, 32_768, 1e6), (8, 4, 7, 1e4)])
@pytest.mark.parametrize("method", METHODS[1:])
def test_the_frequencies_are_those_of_transformers(method, K, factor, trained, theta):
    transformers = pytest.importorskip("transformers")
    rope = pytest.importorskip("transformers.modeling_rope_utils")
    kind = "dynamic" if method == "ntk" else method
    settings = dict(rope_type=kind, rope_theta=theta, factor=1. if method == "ntk" else float(factor), original_max_position_embeddings=trained)
    if method == "llama3": settings |= dict(low_freq_factor=1., high_freq_factor=4.)
    c = transformers.LlamaConfig(hidden_size=2*K, num_attention_heads=2, head_dim=K, rope_parameters=settings, max_position_embeddings=trained)
    speeds, scale = rope.ROPE_INIT_FUNCTIONS[kind](c, torch.device("cpu"), **(dict(seq_len=trained*factor) if method == "ntk" else {}))
    torch.testing.assert_close(stretched_frequencies(method, K, factor, trained, theta).float(), speeds, rtol=2e-6, atol=0)
    assert attention_scale(method, factor) == pytest.approx(scale)

@pytest.mark.parametrize("method", METHODS[1:])
def test_every_hand_slows_down_by_1_to_the_factor(method):
    slower = stretched_frequencies("none", 128, 8, 4096)/stretched_frequencies(method, 128, 8, 4096)
    assert (slower >= 1 - 1e-9).all() and (slower <= 8 + 1e-9).all() and (slower.diff() >= -1e-9).all()
    assert slower[-1].item() == pytest.approx(8) and slower[0].item() == pytest.approx(8 if method == "linear" else 1)

def test_the_scale_multiplies_scores_by_its_square():
    x, yarn = torch.randn(9, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), dict(rope_type="yarn", factor=4., original_max_position_embeddings=64)
    plain, scaled = (RoPE(9, 16, dtype=torch.float64, scaling=yarn | dict(attention_factor=s))(x) for s in (1., 1.25))
    torch.testing.assert_close(scaled@scaled.mT, 1.25**2*(plain@plain.mT))

def test_a_stretched_model_has_the_same_weights_and_survives_a_move():
    m = tiny()
    longer = extend_context(deepcopy(m), "yarn", 4)
    assert list(longer.state_dict()) == list(m.state_dict()) and longer.config.context_length == 128 and m.config.context_length == 32
    assert len({id(layer.attn.rope) for layer in longer.layers}) == 1
    ids = torch.arange(128)[None] % 16
    torch.testing.assert_close(deepcopy(longer).double()(ids).float(), longer(ids), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="128"): longer(torch.zeros(1, 129, dtype=torch.int64))

@pytest.mark.parametrize("method", METHODS)
def test_a_stretched_model_is_saved_and_exported_as_such(method, tmp_path):
    pytest.importorskip("transformers")
    from lmcourse.architecture.pretrained import from_hf, save_hf, to_hf
    longer, ids = extend_context(tiny(), method, 4), torch.arange(128)[None] % 16
    again = TransformerLM(ModelConfig.from_dict(longer.config.to_dict()))
    again.load_state_dict(longer.state_dict())
    with torch.no_grad():
        assert torch.equal(again(ids), longer(ids))
        for other in (to_hf(longer), from_hf(save_hf(longer, tmp_path/"folder"))):
            y = other(ids)
            torch.testing.assert_close(getattr(y, "logits", y), longer(ids), rtol=1e-5, atol=1e-5)
    if method != "none": assert (again(ids) - TransformerLM(ModelConfig(**tiny().config.to_dict() | dict(context_length=128)))(ids)).abs().max() > 1e-3

@pytest.mark.parametrize("bad", [dict(method="pi"), dict(factor=.5), dict(factor=math.nan), dict(factor=math.inf), dict(head_dim=7), dict(method="ntk", head_dim=2),
                                 dict(trained=6), dict(theta=1.), dict(fast=1.), dict(slow=0.)])
def test_bad_input_is_rejected(bad):
    with pytest.raises(ValueError): stretched_frequencies(**dict(method="yarn", head_dim=16, factor=2, trained=64) | bad)

def test_the_new_context_is_the_product_and_no_token_less():
    m = extend_context(tiny(context_length=100), "yarn", 1.15)    # 100*1.15 is 114.99999999999999 in float64
    assert m.config.context_length == 115 == m(torch.arange(115)[None] % 16).shape[1]


def test_models_that_cannot_be_stretched():
    for position in ("none", "learned"):
        with pytest.raises(ValueError, match="has no RoPE"): extend_context(tiny(position=position), "yarn", 2)
    m = extend_context(tiny(), "yarn", 2)
    with pytest.raises(ValueError, match="already"): extend_context(m, "ntk", 2)
    m = tiny()
    with pytest.raises(ValueError): extend_context(m, "yarn", .5)
    for method in ("none", "ntk", "linear", "llama3"):
        with pytest.raises(ValueError, match=f"scale = 1.1 with method = '{method}', expected yarn"): extend_context(m, method, 2, scale=1.1)
    assert m.config == tiny().config and len(m.layers[0].attn.rope.table) == 32 # Unchanged after an error


def test_who_sees_only_config_and_weights_computes_with_the_new_speeds(tmp_path):
    "The config holds them: FastDecoder, quantize_model and others once computed with the speeds of training, without a word."
    from lmcourse.architecture.pretrained import from_hf, save_hf, untie
    from lmcourse.inference.fast_decoder import FastDecoder
    from lmcourse.inference.kv_cache import CachedDecoder
    from lmcourse.inference.quantization import quantize_linears
    m = extend_context(tiny(), "yarn", 2)
    save_hf(m, tmp_path/"hf")
    ids = torch.arange(60) % 16
    with torch.no_grad():
        for same in (m, untie(m), from_hf(tmp_path/"hf")): torch.testing.assert_close(same(ids[None]), m(ids[None]), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(FastDecoder(m).feed(ids.tolist(), all=True), m(ids[None])[0], rtol=1e-4, atol=1e-4)
        for same in (m, quantize_linears(m)): torch.testing.assert_close(CachedDecoder(same).feed(ids.tolist(), all=True), same(ids[None])[0], rtol=1e-4, atol=1e-4)

def test_settings_of_another_method_are_refused():
    for method in ("none", "linear", "ntk"):
        for name in ("fast", "slow"):
            with pytest.raises(ValueError, match=f"{name} = 2.0 with method = '{method}', expected yarn or llama3"):
                extend_context(tiny(), method, 2, **{name: 2.})
    with pytest.raises(ValueError): extend_context(tiny(), "yarn", 2, fast=0.) # And not its default
    with pytest.raises(ValueError, match="yarm"): attention_scale("yarm", 4)
