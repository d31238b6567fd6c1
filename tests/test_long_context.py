"Frequencies of a longer context are those of transformers, and a stretched model keeps its weights."
import math
from copy import deepcopy
import pytest

torch = pytest.importorskip("torch")
from lmcourse.architecture.transformer_torch import TransformerLM
from lmcourse.inference.long_context import METHODS, StretchedRoPE, attention_scale, extend_context, stretched_frequencies
from lmcourse.tools.config import ModelConfig

def tiny(**more): return TransformerLM(ModelConfig(vocab_size=16, context_length=32, d_model=32, num_layers=2, num_heads=2, **more))

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
    x, f = torch.randn(9, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), stretched_frequencies("yarn", 16, 4, 64)
    plain, scaled = (StretchedRoPE(9, f, s, dtype=torch.float64)(x) for s in (1., 1.25))
    torch.testing.assert_close(scaled@scaled.mT, 1.25**2*(plain@plain.mT))

def test_a_stretched_model_has_the_same_weights_and_survives_a_move():
    m = tiny()
    longer = extend_context(deepcopy(m), "yarn", 4)
    assert list(longer.state_dict()) == list(m.state_dict()) and longer.config.context_length == 128 and m.config.context_length == 32
    assert len({id(layer.attn.rope) for layer in longer.layers}) == 1
    ids = torch.arange(128)[None] % 16
    torch.testing.assert_close(deepcopy(longer).double()(ids).float(), longer(ids), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="128"): longer(torch.zeros(1, 129, dtype=torch.int64))

@pytest.mark.parametrize("bad", [dict(method="pi"), dict(factor=.5), dict(factor=math.nan), dict(factor=math.inf), dict(head_dim=7), dict(head_dim=2),
                                 dict(trained=6), dict(theta=1.), dict(fast=1.), dict(slow=0.)])
def test_bad_input_is_rejected(bad):
    with pytest.raises(ValueError): stretched_frequencies(**dict(method="yarn", head_dim=16, factor=2, trained=64) | bad)

def test_models_that_cannot_be_stretched():
    for position in ("none", "learned"):
        with pytest.raises(ValueError, match="has no RoPE"): extend_context(tiny(position=position), "yarn", 2)
    m = extend_context(tiny(), "ntk", 2)
    with pytest.raises(ValueError, match="already"): extend_context(m, "ntk", 2)
    m = tiny()
    with pytest.raises(ValueError): extend_context(m, "yarn", .5)
    assert m.config.context_length == 32 and not isinstance(m.layers[0].attn.rope, StretchedRoPE) # Unchanged after an error


def test_who_sees_only_config_and_weights_refuses_a_stretched_model(tmp_path):
    "FastDecoder, quantize_model and others once computed with the speeds of training, without a word."
    from lmcourse.architecture.pretrained import save_hf, to_hf, untie
    from lmcourse.inference.fast_decoder import FastDecoder
    from lmcourse.inference.kv_cache import CachedDecoder
    from lmcourse.inference.quantization import quantize_linears, quantize_model
    from lmcourse.moe.lab import upcycle
    from lmcourse.training.models import save_model
    m = extend_context(tiny(), "yarn", 2)
    for who, call in dict(FastDecoder=FastDecoder, quantize_model=lambda m: quantize_model(m, group=None), untie=untie, to_hf=to_hf, save_hf=lambda m: save_hf(m, tmp_path/"hf"),
                          upcycle=lambda m: upcycle(m, 2), save_model=lambda m: save_model(tmp_path/"m", m, None, None, {})).items():
        with pytest.raises(ValueError, match=f"{who} takes RoPE's speeds from the config"): call(m)
    assert not list(tmp_path.iterdir())
    ids = torch.arange(60) % 16
    for same in (m, quantize_linears(m)):
        with torch.no_grad(): torch.testing.assert_close(CachedDecoder(same).feed(ids.tolist(), all=True), same(ids[None])[0], rtol=1e-4, atol=1e-4)
