"The step of a token by a few kernels: equal to torch for every model that it takes, and a reason for every other."
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="kernels need triton: pip install 'lmcourse[kernels]'")

from kernel_models import odd_model, on_both
from lmcourse.architecture.layers_torch import FeedForward, LayerNorm, Linear, RMSNorm
from lmcourse.architecture.attention_torch import causal_attention
from lmcourse.architecture.transformer_torch import Parts, TransformerLM
from lmcourse.generation.generate import generate
from lmcourse.inference.kv_cache import CachedDecoder, GraphDecoder
from lmcourse.kernels import decode, traffic
from lmcourse.kernels.decode import KernelDecoder, gpu_decoder, project, project_cost, tile_of
from lmcourse.kernels.traffic import counting, interpreted
from lmcourse.tools.checks import check_close, expect_error
from lmcourse.tools.config import ModelConfig

TINY = ModelConfig(vocab_size=60, context_length=24, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, d_ff=48)


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    "Interpreted, a program costs milliseconds"
    if interpreted: monkeypatch.setattr(decode, "SPLITS", 4); monkeypatch.setattr(decode, "SLOTS", 8)


class OnCard:
    "What the check asks of a model on a GPU"
    device, dtype = torch.device("cuda"), torch.float32
    def __init__(self, config): self.config = config; self.token_embeddings = self.weight = self


def model_of(changes, device="cpu", **how): return odd_model(replace(TINY, **changes), device, **how)


def step_by_step(decoder, prompt, more):
    decoder.feed(prompt)
    return torch.stack([decoder.feed([i]) for i in more])


@on_both
@pytest.mark.parametrize("changes", [
    dict(), dict(num_kv_heads=None, bias=True), dict(num_kv_heads=1, window=5), dict(norm="layernorm", position="learned", ffn="gelu", bias=True, tie_embeddings=True),
    dict(norm="layernorm", ffn="geglu", position="sinusoidal", scale_embeddings=True), dict(norm="none", ffn="relu", position="none"), dict(ffn="geglu", head_dim=6),
    dict(rope_scaling=dict(rope_type="yarn", factor=4., original_max_position_embeddings=8, attention_factor=1.5)),
    dict(ffn="silu", bias=True), dict(d_model=35, num_heads=5, num_kv_heads=1, position="learned", ffn="reglu", d_ff=70)], ids=str)
def test_each_step_is_torchs(device, changes):
    "Also where the window's slots are used again"
    model = model_of(changes, device)
    found, expected = (step_by_step(kind(model), [1, 2, 3], range(4, 14)) for kind in (KernelDecoder, CachedDecoder))
    check_close(found.cpu(), expected.cpu(), 1e-4, 1e-4*float(expected.abs().max()))


@on_both
def test_a_long_cache_is_shared_out_more_than_once(device):
    "More slots than all programs of a head take at a time; the counter is ready for the next step"
    model = model_of(dict(num_layers=1, context_length=700), device)
    prompt = [i % 60 for i in range(decode.SPLITS*decode.SLOTS + 40)]
    found, expected = (step_by_step(kind(model), prompt, [5, 6]) for kind in (KernelDecoder, CachedDecoder))
    check_close(found.cpu(), expected.cpu(), 1e-4, 1e-4)


@on_both
def test_going_back_and_a_second_decoder(device):
    model = model_of({}, device)
    one, two = KernelDecoder(model), KernelDecoder(model)
    first = step_by_step(one, [1, 2], [7, 8, 9])
    step_by_step(two, [3], [4])
    one.rewind(3)
    check_close(torch.stack([one.feed([8]), one.feed([9])]).cpu(), first[1:].cpu(), 1e-6, 1e-6)
    assert all((d.graph is not None) == (device == "cuda") for d in (one, two))


@on_both
def test_it_writes_the_same_text(device):
    "Beyond the context too, where the cache is filled again"
    model = model_of(dict(context_length=12), device)
    texts = [list(generate(model, [1, 2], 16, temperature=0., decoder=kind)) for kind in (KernelDecoder, CachedDecoder)]
    assert texts[0] == texts[1]


@on_both
def test_weights_of_16_bits(device):
    "Its stream stays in float32: as close to the float32 model with the same weights as torch is, or closer"
    model = model_of({}, device).to(torch.bfloat16)
    exact = model_of({}, device)
    exact.load_state_dict({k: v.float() for k, v in model.state_dict().items()})
    mine, theirs, right = (step_by_step(kind(m), [1, 2, 3], range(4, 10)) for kind, m in ((KernelDecoder, model), (CachedDecoder, model), (CachedDecoder, exact)))
    assert mine.dtype == torch.float32
    assert (mine - right).norm() < (theirs - right).norm() < .05*right.norm()


@pytest.mark.skipif(not interpreted, reason="it is interpreted")
@pytest.mark.parametrize("R, D", [(100, 256), (7, 5000), (3, 40)])
def test_the_bytes_of_a_product(R, D):
    matrix, norm, x, out = Linear(D, R), RMSNorm(D), torch.randn(D), torch.empty(R)
    with counting(matrix=matrix.weight, gain=norm.weight, x=x, out=out) as seen, torch.no_grad(): project(x, norm, matrix, out)
    assert seen.cost == project_cost(R, D) and seen.loaded["matrix"] == matrix.weight.nbytes
    check_close(out, matrix(norm(x)).detach(), 1e-4, 1e-4)


@pytest.mark.skipif(not interpreted, reason="it is interpreted")
def test_a_gated_network_with_biases_is_added():
    net, norm, x, inner = FeedForward(40, 72, "geglu", bias=True), LayerNorm(40), torch.randn(40), torch.empty(72)
    with torch.no_grad():
        for p in (*net.parameters(), *norm.parameters()): p.normal_(0, .2)
        expected = x + net(norm(x))
        project(x, norm, net.w1, inner, net.w3, "gelu")
        project(inner, None, net.w2, x, add=True)
    check_close(x, expected, 1e-4, 1e-5)


@pytest.mark.parametrize("change, words", [
    (dict(x=torch.zeros(31)), "x is torch.float32 (31,), expected 32 float32 in a row"), (dict(x=torch.zeros(32, dtype=torch.float64)), "x is torch.float64"),
    (dict(x=torch.zeros(64)[::2]), "in a row"), (dict(out=torch.zeros(9)), "out is torch.float32 (9,), expected 8"), (dict(gate=Linear(32, 9)), "matrices (8, 32) and (9, 32)"),
    (dict(gate=Linear(32, 8, bias=True)), "expected both or none"), (dict(activation="swish"), "unknown activation of project 'swish'"),
    (dict(norm=RMSNorm(16, 1e-5)), "RMSNorm() does not fit x (32,)"), (dict(norm=torch.nn.LayerNorm(32, elementwise_affine=False)), "does not fit x (32,)"),
    (dict(linear=torch.nn.utils.skip_init(torch.nn.Linear, 32, 8, bias=False)), "has gaps")], ids=str)
def test_what_a_product_cannot_take(change, words):
    if words == "has gaps": change["linear"].weight = torch.nn.Parameter(torch.randn(32, 8).T)
    given = dict(x=torch.zeros(32), norm=None, linear=Linear(32, 8), out=torch.zeros(8)) | change
    with expect_error(ValueError, words): project(**given)


def test_tiles_fit():
    for width in (1, 40, 768, 1024, 3072, 5000, 11_008, 28_672):
        rows, padded, warps = tile_of(width)
        assert padded >= width and rows >= 1 and rows*padded <= max(decode.TILE, padded) and 4 <= warps <= 16 and not warps & (warps - 1)


@pytest.mark.parametrize("changes, words", [(dict(norm_position="post"), "norm_position = post: GraphDecoder does"), (dict(qk_norm=True), "qk_norm = True"),
    (dict(mup_base_width=16), "mup_base_width = 16"), (dict(ffn="relu2"), "does not compute relu2: GraphDecoder does"), (dict(num_experts=2), "num_experts = 2")])
@pytest.mark.skipif(not interpreted, reason="on the processor")
def test_what_it_does_not_compute(changes, words):
    model = TransformerLM(replace(TINY, **changes))
    with expect_error(ValueError, words): KernelDecoder(model)
    assert gpu_decoder(model) is GraphDecoder


@pytest.mark.skipif(not interpreted, reason="on the processor")
def test_unknown_parts_and_places(monkeypatch):
    class Lora(Linear): pass
    model = TransformerLM(TINY)
    assert gpu_decoder(model) is KernelDecoder
    model.layers[1].ffn.w2 = Lora(48, 32)
    with expect_error(ValueError, "does not compute Lora: GraphDecoder does"): KernelDecoder(model)
    own = TransformerLM(TINY, parts=Parts(attention=lambda *a: causal_attention(*a)))
    with expect_error(ValueError, "does not compute parts of your own"): KernelDecoder(own)
    gaps = TransformerLM(TINY)
    gaps.layers[0].ffn.w1.weight = torch.nn.Parameter(torch.randn(32, 48).T)
    with expect_error(ValueError, "does not compute weights with gaps"): KernelDecoder(gaps)
    with expect_error(TypeError, "norm is BatchNorm1d"): project(torch.randn(32), torch.nn.BatchNorm1d(32), Linear(32, 8), torch.empty(8))
    with expect_error(ValueError, "does not compute torch.float64"): KernelDecoder(TransformerLM(TINY, dtype=torch.float64))
    with expect_error(ValueError, "can't record interpreted kernels"): decode.check_model(OnCard(TINY))
    monkeypatch.setattr(traffic, "interpreted", False)
    with expect_error(ValueError, "TRITON_INTERPRET=1 interprets"): KernelDecoder(TransformerLM(TINY))
    monkeypatch.setattr(traffic, "triton", None)
    with expect_error(ValueError, "needs Triton"): KernelDecoder(TransformerLM(TINY))
