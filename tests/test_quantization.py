"Rounding, products, files and masks over random shapes; decoders and caches with few bits."
import itertools
import json
import math
from functools import partial

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from hypothesis import given, settings, strategies as st

from lmcourse.architecture.pretrained import params_of
from lmcourse.architecture.transformer_torch import TransformerLM
from lmcourse.inference.engine import Engine, Request
from lmcourse.inference.fast_decoder import FastDecoder, Plain
from lmcourse.inference.kv_cache import CachedDecoder
from lmcourse.inference.quantization import (EMBEDDINGS, Int8Cache, QuantizedLinear, QuantizedModel, QuantizedWeight, best_steps, from_grid, grid_steps,
    load_quantized, magnitude_masks, pack_fours, pack_pairs, quantize, quantize_linears, quantize_model, save_quantized, to_grid, two_of_four, unpack_fours,
    unpack_pairs)
from lmcourse.tools.checks import check_close, expect_error
from lmcourse.tools.config import ModelConfig

SMALL = ModelConfig(vocab_size=131, context_length=24, d_model=64, num_layers=2, num_heads=4, d_ff=192)
SEEDS = st.integers(0, 2**31)
few = settings(max_examples=40, deadline=None)


def drawn(seed, *shape, spread=1.):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape)*np.exp(spread*rng.standard_normal((*shape[:-1], 1)))).astype(np.float32)


@few
@given(SEEDS, st.integers(2, 8), st.sampled_from([np.float32, np.float16]), st.floats(0, 3))
def test_no_weight_moves_by_more_than_half_a_step_and_the_largest_is_the_largest_code(seed, bits, dtype, spread):
    w = drawn(seed, 20, 16, spread=spread)
    w[0], w[1, 1:] = 0, 0
    steps = grid_steps(w, bits, dtype)
    codes, top = to_grid(w, steps, bits), 2**(bits - 1) - 1
    wide = steps.astype(np.float64)[:, None]
    assert codes.dtype == np.int8 and steps.dtype == dtype and abs(codes).max() <= top
    assert (abs(codes.astype(np.float64)*wide - w) <= wide*(.5 + 1e-5)).all() and not codes[0].any() and steps[0] == 0
    if dtype == np.float32: assert (abs(codes[1:]).max(-1) == top).all()
    check_close(from_grid(codes, steps), (codes*wide).astype(np.float32), rtol=1e-6)


def test_steps_of_float16_are_rounded_up_even_where_they_are_tiny():
    for size in (1e-30, 1e-7, 3e-5, 1., 1e6):
        w = np.array([[size, -size/3]], np.float32)
        steps = grid_steps(w, 8, np.float16)
        assert 0 < steps.item() and np.float32(steps.item())*127 >= np.float32(size)*(1 - 1e-6)
    with expect_error(ValueError, "float16"): grid_steps(np.array([[1e9]], np.float32), 8, np.float16)


@few
@given(SEEDS, st.integers(2, 8))
def test_the_best_steps_are_never_worse(seed, bits):
    w = drawn(seed, 10, 32)
    error = lambda s: np.square(from_grid(to_grid(w, s, bits), s) - w, dtype=float).sum(-1)
    assert (error(best_steps(w, bits)) <= error(grid_steps(w, bits))*(1 + 1e-5)).all()


@few
@given(SEEDS, st.integers(1, 9), st.integers(1, 5))
def test_two_codes_to_a_byte(seed, rows, inputs):
    codes = np.random.default_rng(seed).integers(-8, 8, (rows, inputs)).astype(np.int8)
    packed = pack_pairs(codes)
    assert packed.dtype == np.uint8 and packed.shape == ((rows + 1)//2, inputs)
    for r,c in itertools.product(range(rows), range(inputs)): assert (int(packed[r//2, c]) >> 4*(r % 2) & 15) - 8 == codes[r, c]
    check_close(unpack_pairs(packed, rows), codes)


@few
@given(SEEDS, st.sampled_from([8, 4]), st.integers(1, 9), st.integers(1, 4), st.sampled_from([64, 128, 24]), st.integers(0, 10),
       st.sampled_from([np.float32, np.float16]), st.booleans())
def test_the_product_is_that_of_the_matrix_written_out(seed, bits, out, groups, group, rows, dtype, search):
    w, x = drawn(seed, out, groups*group), drawn(seed + 1, rows, groups*group)
    q = quantize(w, bits, group, dtype, search)
    full = q.dequantize()
    assert q.shape == w.shape and q.group == group and full.dtype == np.float32
    assert q.num_bytes == q.codes.nbytes + q.steps.nbytes == (out if bits == 8 else (out + 1)//2)*groups*group + out*groups*np.dtype(dtype).itemsize
    y = q(x)
    assert y.dtype == np.float32 and y.shape == (rows, out)
    assert (abs(y - x.astype(float)@full.T.astype(float)) <= 2e-6*abs(x)@abs(full).T + 1e-30).all()
    assert (abs(q(np.asfortranarray(x)) - y) <= 2e-6*abs(x)@abs(full).T + 1e-30).all()
    if rows and not search: assert snr(w, full) > (35 if bits == 8 else 10)


@pytest.mark.parametrize("bits", (8, 4))
@pytest.mark.parametrize("dtype", (np.float16, np.float32))
@pytest.mark.parametrize("size", (1e-4, 1.))
def test_a_product_of_large_or_small_numbers_is_neither_infinite_nor_zero(bits, dtype, size):
    "Kernels that may reorder products once multiplied a sum of 65,536 by 2**112. Steps of a weight of 1e-4 are subnormal in float16."
    w, x = drawn(0, 5, 128), drawn(1, 2, 128)
    q = quantize(w*np.float32(size), bits, 64, dtype)
    full = q.dequantize().T.astype(float)
    for factor in (1e-30, 1., 1e4, 1e9, 1e30):
        big = x*np.float32(factor)
        assert (abs(q(big) - big.astype(float)@full) <= 2e-6*(abs(big.astype(float))@abs(full))).all(), factor


def snr(w, other): return 10*math.log10(np.square(w, dtype=float).sum()/np.square(w - other, dtype=float).sum())


def test_rounding_again_changes_no_code():
    for bits in (8, 4):
        q = quantize(drawn(3, 33, 128), bits)
        check_close(quantize(q.dequantize(), bits).codes, q.codes)


VARIANTS = [dict(), dict(num_kv_heads=2, window=7), dict(position="learned", norm="layernorm", bias=True, ffn="gelu"),
            dict(tie_embeddings=True, scale_embeddings=True, qk_norm=True, vocab_size=130)]


@pytest.mark.parametrize("changes", VARIANTS)
@pytest.mark.parametrize("bits", (8, 4))
def test_the_fast_decoder_with_few_bits_is_that_of_the_rounded_model(changes, bits):
    config = ModelConfig.from_dict(SMALL.to_dict() | changes | dict(tie_embeddings=False))
    model, pack = TransformerLM(config, seed=2), partial(quantize, bits=bits)
    rounded = quantize_model(model, bits).model()
    ids = np.random.default_rng(0).integers(0, config.vocab_size, 24).tolist()
    a, b = FastDecoder(model, pack=pack), CachedDecoder(rounded)
    for part in (ids[:3], ids[3:4], ids[4:5], ids[5:20], ids[20:21]):
        check_close(a.feed(part, all=True), b.feed(part, all=True), rtol=1e-3, atol=1e-3)
    a.rewind(10), b.rewind(10)
    check_close(a.feed(ids[3:5]), b.feed(ids[3:5]), rtol=1e-3, atol=1e-3)
    matrices = [w for n,w in params_of(model).items() if w.ndim == 2 and n not in EMBEDDINGS]
    assert a.num_bytes <= sum(quantize(w, bits).num_bytes for w in matrices) + 3*64*bits//8


@pytest.mark.parametrize("ffn", ("swiglu", "gelu"))
def test_four_bits_where_they_fit_in_a_network_of_odd_width(ffn):
    """The second half of the gated product then begins in the middle of a byte"""
    config = ModelConfig.from_dict(SMALL.to_dict() | dict(d_ff=67, ffn=ffn))
    def fits(w): return w.shape[1] % 64 == 0
    model, rounded = TransformerLM(config, seed=2), TransformerLM(config, seed=2)
    with torch.no_grad():
        for n, w in rounded.named_parameters():
            if w.ndim == 2 and n not in EMBEDDINGS and fits(w): w.copy_(torch.from_numpy(quantize(w.numpy(), 4).dequantize()))
    decoder = FastDecoder(model, pack=lambda w: quantize(w, 4) if fits(w) else Plain(w))
    check_close(decoder.feed(range(9), all=True), CachedDecoder(rounded).feed(range(9), all=True), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("other", (partial(quantize, steps=np.float32), partial(quantize, bits=4), Plain))
def test_one_matrix_of_another_kind_in_one_layer(other):
    """Steps too large for float16 in one layer, for example"""
    model, rounded = TransformerLM(SMALL, seed=2), TransformerLM(SMALL, seed=2)
    large = model.layers[1].ffn.w2.weight
    large.data *= 10
    def pack(w): return (other if abs(w).max() > 1 and w.shape == large.shape else quantize)(w)
    with torch.no_grad():
        for n, w in rounded.named_parameters():
            if w.ndim != 2 or n in EMBEDDINGS: continue
            q = pack(params_of(model)[n])
            w.copy_(torch.from_numpy(q.arrays[0] if isinstance(q, Plain) else q.dequantize()))
    check_close(FastDecoder(model, pack=pack).feed(range(9), all=True), CachedDecoder(rounded).feed(range(9), all=True), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("changes", VARIANTS)
def test_a_model_and_its_file(changes, tmp_path):
    model = TransformerLM(ModelConfig.from_dict(SMALL.to_dict() | changes))
    for bits, group, steps, keep in ((8, 64, np.float16, EMBEDDINGS), (4, 32, np.float32, ()), (4, None, np.float16, ("lm_head.weight",))):
        if model.config.tie_embeddings and keep == ("lm_head.weight",): continue
        q = quantize_model(model, bits, group, steps, keep=keep)
        for name,w in params_of(model).items():
            small = isinstance(q.weights[name], QuantizedWeight)
            assert small == (w.ndim == 2 and name not in keep)
            check_close(q.weights[name].dequantize() if small else q.weights[name], quantize(w, bits, group, steps).dequantize() if small else w, rtol=0, atol=0)
        pieces = [a for w in q.weights.values() for a in ((w.codes, w.steps) if isinstance(w, QuantizedWeight) else (w,))]
        places = {(a.__array_interface__["data"][0], a.nbytes) for a in pieces}
        assert q.num_bytes == sum(n for _,n in places) and len(places) == len(pieces)
        save_quantized(tmp_path/"q.safetensors", q)
        again = load_quantized(tmp_path/"q.safetensors")
        assert again.config == model.config and list(tmp_path.iterdir()) == [tmp_path/"q.safetensors"] and again.weights.keys() == q.weights.keys()
        for name,w in q.weights.items():
            for n in ("codes", "steps") if isinstance(w, QuantizedWeight) else ("real",):
                check_close(getattr(again.weights[name], n), getattr(w, n), rtol=0, atol=0)
        for a,b in zip(q.model().parameters(), again.model().parameters()): check_close(a.detach(), b.detach(), rtol=0, atol=0)


def test_a_broken_file_is_refused(tmp_path):
    q, path = quantize_model(TransformerLM(SMALL), 4), tmp_path/"q.safetensors"
    with expect_error(FileNotFoundError, "q.safetensors"): load_quantized(path)
    save_quantized(path, q)
    whole = path.read_bytes()
    for n in (0, 7, 100, len(whole)//2, len(whole) - 1):
        path.write_bytes(whole[:n])
        with expect_error(ValueError, "no quantized model"): load_quantized(path)
    name = "layers.0.attn.q_proj.weight"
    for codes, steps in ((np.zeros((8, 64), np.int8), np.zeros((7, 1), np.float16)), (np.zeros((8, 64), np.uint8), np.zeros((14, 1), np.float16)),
                         (np.zeros((8, 64), np.int8), np.zeros((8, 3), np.float16)), (np.zeros((8, 64), np.int16), np.zeros((8, 1), np.float16)),
                         (np.zeros((8, 64), np.int8), np.zeros((8, 1), np.int32)), (np.zeros((8, 64), np.int8), None)):
        from safetensors.numpy import save_file
        save_file({f"{name}.codes": codes} | ({} if steps is None else {f"{name}.steps": steps}), path, dict(config=json.dumps(SMALL.to_dict())))
        with expect_error(ValueError, "no quantized model"): load_quantized(path)


def test_a_failed_save_leaves_the_old_file(tmp_path):
    path, q = tmp_path/"q.safetensors", quantize_model(TransformerLM(SMALL))
    save_quantized(path, q)
    before = path.read_bytes()
    with pytest.raises(AttributeError): save_quantized(path, QuantizedModel(SMALL, dict(a=object())))
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


class Rounding:
    "A cache of float32 that rounds as the int8 cache should"
    def __init__(self): self.layers = {}
    def __getitem__(self, i): return Layer(self.layers, i)


class Layer:
    def __init__(self, layers, i): self.layers, self.i = layers, i
    def update(self, k, v):
        new = [torch.from_numpy(from_grid(to_grid(z.numpy(), grid_steps(z.numpy(), 8), 8), grid_steps(z.numpy(), 8))) for z in (k, v)]
        old = self.layers.get(self.i)
        self.layers[self.i] = new if old is None else [torch.cat(pair, -2) for pair in zip(old, new)]
        return self.layers[self.i]


@pytest.mark.parametrize("changes", VARIANTS)
def test_the_cache_in_eight_bits(changes):
    config = ModelConfig.from_dict(SMALL.to_dict() | changes)
    model, ids = TransformerLM(config), torch.randint(0, 130, (2, 24), generator=torch.Generator().manual_seed(0))
    cache, reference = Int8Cache(config, 2), Rounding()
    assert cache.num_bytes == 2*config.num_layers*2*config.kv_heads*24*(config.head_size + 4) and cache.length == 0
    with torch.no_grad():
        exact = model(ids)
        for a,b in ((0, 5), (5, 6), (6, 24)):
            y, expected = (model(ids[:, a:b], torch.arange(a, b), c) for c in (cache, reference))
            check_close(y, expected, rtol=1e-3, atol=1e-3)
            assert cache.length == b and 0 < (y - exact[:, a:b]).abs().max() < 0.3
        cache.rewind(9)
        error = (y - exact[:, 6:]).abs().max().item() # A number on the border between two codes may be rounded to either
        check_close(model(ids[:, 9:], torch.arange(9, 24), cache), y[:, 3:], rtol=0, atol=.25*error)
        with expect_error(ValueError, "it has room for 24"): cache[0].update(*torch.zeros(2, 2, config.kv_heads, 1, config.head_size))
    with expect_error(ValueError, "rewind(25)"): cache.rewind(25)


def test_a_decoder_with_the_small_cache_and_zeros_in_it():
    decoder, plain = CachedDecoder(TransformerLM(SMALL)), CachedDecoder(TransformerLM(SMALL))
    decoder.cache = Int8Cache(SMALL)
    ids = list(range(20))
    for i in ids: assert (decoder.feed([i]) - plain.feed([i])).abs().max() < 0.3
    decoder.rewind(5)
    decoder.feed([1, 2])
    assert decoder.cache.length == 7
    cache = Int8Cache(SMALL, max_tokens=3)
    for z in cache[0].update(*torch.zeros(2, 1, 4, 3, 16)): assert z.shape == (1, 4, 3, 16) and not z.any()


@few
@given(SEEDS, st.integers(1, 6), st.integers(1, 5))
def test_two_of_four_are_the_largest_two(seed, rows, eights):
    w = np.random.default_rng(seed).integers(-3, 4, (rows, 8*eights)).astype(np.float32)
    mask = two_of_four(w).reshape(-1, 4)
    assert (mask.sum(1) == 2).all()
    for four,kept in zip(abs(w).reshape(-1, 4), mask): assert min(four[kept]) >= max(four[~kept])
    values, places = pack_fours(w)
    assert values.shape == (rows, 4*eights) and places.shape == (rows, eights) and places.dtype == np.uint8
    check_close(unpack_fours(values, places), w*two_of_four(w), rtol=0, atol=0)


def test_masks_of_whole_numbers():
    assert two_of_four(np.array([[0, 1, 2, 3]], np.uint8)).tolist() == [[False, False, True, True]]
    assert magnitude_masks(dict(a=np.array([-128, 1], np.int8)), .5)["a"].tolist() == [True, False]


@few
@given(SEEDS, st.floats(0, 1), st.booleans())
def test_masks_leave_out_the_smallest(seed, share, together):
    weights = dict(a=drawn(seed, 5, 7), b=10*drawn(seed + 1, 3, 4))
    masks = magnitude_masks(weights, share, together)
    sizes = {n: w.size for n,w in weights.items()}
    for names in ([["a", "b"]] if together else [["a"], ["b"]]):
        size, kept = (np.concatenate([f[n].ravel() for n in names]) for f in ({n: abs(w) for n,w in weights.items()}, masks))
        assert (~kept).sum() == round(share*sum(sizes[n] for n in names))
        if 0 < kept.sum() < len(kept): assert size[kept].min() >= size[~kept].max()


def test_bad_input_is_refused():
    w = np.ones((4, 64), np.float32)
    for bits in (3, 16, 0, "8", True):
        with expect_error(ValueError, "expected 4 to 8"): quantize(w, bits)
    for group in (0, -64, 48, 128):
        with expect_error(ValueError, f"group = {group}"): quantize(w, group=group)
    for bad in (math.nan, math.inf, -math.inf):
        with expect_error(ValueError, "1 values that are nan or infinite"): quantize(np.where(np.arange(256).reshape(4, 64) == 9, bad, w).astype(np.float32))
    for shape in ((64,), (0, 64), (4, 0), (2, 4, 64)):
        with expect_error(ValueError, "expected (out, in)"): quantize(np.ones(shape, np.float32))
    for odd in (w.astype(np.float64), torch.ones(4, 64), [[1.]]):
        with expect_error(TypeError, "expected an array of float32"): quantize(odd)
    with expect_error(TypeError, "integer"): quantize(w, group=64.)
    with expect_error(ValueError, "steps = "): quantize(w, steps=np.float64)
    for x in (np.ones((2, 63), np.float32), np.ones((2, 64)), np.ones(64, np.float32)):
        with expect_error(ValueError, "expected float32 (rows, 64)"): quantize(w)(x)
    for bits in (1, 9):
        with expect_error(ValueError, "expected 2 to 8"): grid_steps(w, bits)
    for share in (-.1, 1.1, math.nan):
        with expect_error(ValueError, "share = "): magnitude_masks(dict(w=w), share)
    for f,inputs in ((two_of_four, 6), (pack_fours, 12)):
        with expect_error(ValueError, "multiple of"): f(np.ones((2, inputs), np.float32))
    with expect_error(ValueError, "did you mean 'lm_head.weight'"): quantize_model(TransformerLM(SMALL), keep=("lm_head.weigt",))
    with expect_error(ValueError, "layers.0.attn.q_proj.weight: group = 48"): quantize_model(TransformerLM(SMALL), group=48)
    for room in (0, 25):
        with expect_error(ValueError, "expected 1 to 24"): Int8Cache(SMALL, max_tokens=room)


def test_zeros_stay_zeros():
    for bits, group in itertools.product((8, 4), (64, 32)):
        q = quantize(np.zeros((3, 128), np.float32), bits, group)
        assert not q.dequantize().any() and not q(np.ones((2, 128), np.float32)).any()


def test_a_failed_save_leaves_nothing(tmp_path):
    q = quantize_model(TransformerLM(ModelConfig(vocab_size=64, context_length=8, d_model=64, num_layers=1, num_heads=2)))
    (tmp_path/"there").mkdir()
    (tmp_path/"there"/"file").touch()
    with pytest.raises(OSError): save_quantized(tmp_path/"there", q)       # renaming fails, after the file was written
    assert [p.name for p in tmp_path.iterdir()] == ["there"]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("changes", [dict(), dict(tie_embeddings=True), dict(bias=True, ffn="gelu", norm="layernorm")], ids=str)
def test_a_model_with_quantized_linears_is_the_one_that_the_codes_stand_for(bits, changes):
    config = ModelConfig(vocab_size=70, context_length=32, d_model=64, num_layers=2, num_heads=2, d_ff=128, **changes)
    model, ids = TransformerLM(config, 3).eval(), torch.arange(20)[None]
    plain = TransformerLM(config, 3).eval()
    for m in plain.modules():
        if isinstance(m, torch.nn.Linear): m.weight = torch.nn.Parameter(torch.from_numpy(quantize(m.weight.detach().numpy(), bits).dequantize()))
    assert quantize_linears(model, bits) is model and not any(isinstance(m, torch.nn.Linear) for m in model.modules())
    with torch.no_grad():
        for some in (ids, ids[:, :3]): check_close(model(some), plain(some), 1e-4, 1e-4)
        greedy = lambda m: Engine(m, block_size=4).run([Request(tuple(range(10)), 8, temperature=0.)])[0].tokens
        assert greedy(model) == greedy(plain)


def test_a_model_that_is_rejected_stays_as_it_was():
    model = TransformerLM(ModelConfig(vocab_size=131, context_length=24, d_model=32, num_layers=1, num_heads=4, d_ff=36))
    with expect_error(ValueError, "layers.0.ffn.w2: 36 inputs"): quantize_linears(model, 4)
    assert not any(isinstance(m, QuantizedLinear) for m in model.modules())


def test_a_quantized_linear_takes_any_number_of_axes():
    layer, x = QuantizedLinear(torch.nn.Linear(64, 6)), torch.randn(2, 64)
    assert layer(x[0]).shape == (6,) and layer(x[:0, None]).shape == (0, 1, 6)
    check_close(layer(x[0]), layer(x)[0], 1e-5, 1e-6)


def test_linears_that_cant_be_quantized_are_named():
    model = TransformerLM(ModelConfig(vocab_size=70, context_length=32, d_model=36, num_layers=1, num_heads=2))
    with expect_error(ValueError, "attn.q_proj: 36 inputs, expected a multiple of 8"): quantize_linears(model)
    with expect_error(ValueError, "expected float32 on the CPU"): quantize_linears(model.double())


@pytest.mark.parametrize("group", [64, None])
def test_a_model_is_loaded_from_codes(tmp_path, group):
    from lmcourse.tokenization.tokenizer import Tokenizer
    from lmcourse.tools.config import TrainConfig
    from lmcourse.training.models import load_model, save_model
    model, tokenizer = TransformerLM(SMALL, seed=0), Tokenizer.train(["a rose is a rose"], 270)
    save_model(tmp_path/"m", model, tokenizer, TrainConfig(), {})
    for bits in (8, 4):
        q = quantize_model(model, bits, group, keep=())
        save_quantized(tmp_path/"m/model.safetensors", q)
        if bits == 4:
            with pytest.raises(ValueError, match="no model that can be read"): load_model(tmp_path/"m")
            continue
        for (name, p), r in zip(load_model(tmp_path/"m")[0].named_parameters(), q.model().parameters(), strict=True): assert torch.equal(p, r), name
