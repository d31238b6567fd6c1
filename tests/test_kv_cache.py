"Cached equals uncached, in every decoder and for every kind of model; and what threads, interrupts and full caches may not change."
import itertools
import os
import threading
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from numba import types
from numba.extending import overload

from lmcourse.accounting.memory import kv_cache_bytes
from lmcourse.architecture.pretrained import params_of
from lmcourse.architecture.transformer_np import transformer_forward
from lmcourse.architecture.transformer_torch import TransformerLM
from lmcourse.generation.generate import RecomputingDecoder, generate
from lmcourse.inference import fast_decoder
from lmcourse.inference.fast_decoder import FastDecoder, NumpyDecoder, Plain, dot_rows, join_turn, open_turn
from lmcourse.inference.kv_cache import CachedDecoder, GraphDecoder, KVCache
from lmcourse.tools.checks import check_close
from lmcourse.tools.config import FFN_KINDS, ModelConfig

RTOL, ATOL = 1e-4, 2e-5
BASE = ModelConfig(vocab_size=47, context_length=100, d_model=24, num_layers=2, num_heads=4, d_ff=40)
HEADS = (dict(), dict(num_kv_heads=2), dict(num_kv_heads=1, head_dim=10))
WINDOWS = (dict(), dict(window=1), dict(window=5), dict(window=70))
POSITIONS = tuple(dict(position=p) for p in ("rope", "learned", "sinusoidal", "none"))
OTHERS = ([dict(norm=n, norm_position=p, bias=b) for n in ("rmsnorm", "layernorm", "none") for p in ("pre", "post", "sublayer") for b in (False, True)]
          + [dict(ffn=f, bias=b) for f in FFN_KINDS for b in (False, True)]
          + [dict(qk_norm=True, tie_embeddings=t, scale_embeddings=s) for t in (False, True) for s in (False, True)]
          + [dict(norm_eps=0.5), dict(rope_theta=77.0), dict(rope_scaling=dict(rope_type="yarn", factor=4., original_max_position_embeddings=8, attention_factor=1.5)), dict(qk_norm=True, rope_scaling=dict(rope_type="llama3", factor=8., low_freq_factor=1., high_freq_factor=4., original_max_position_embeddings=8)), dict(num_layers=1), dict(vocab_size=46, d_ff=37, d_model=20, position="learned")])
GRID = [h | w | p for h, w, p in itertools.product(HEADS, WINDOWS, POSITIONS)] + [o | HEADS[i % 3] | WINDOWS[i % 4] for i, o in enumerate(OTHERS)]


class Opaque:
    "A weight that shows no arrays."
    def __init__(self, weight): self.weight, self.num_bytes = weight.astype(np.float64), 7
    def __call__(self, x): return x @ self.weight.T


MAKERS = dict(cached=CachedDecoder, graph=GraphDecoder, fast=lambda m: FastDecoder(m, threads=2), numpy=lambda m: NumpyDecoder(params_of(m), m.config, threads=1),
              layered=lambda m: FastDecoder(m, pack=Opaque))


def build(changes, seed=0, **more):
    "A model whose gains and biases are no longer 1 and 0."
    model = TransformerLM(replace(BASE, **changes), seed=seed, **more)
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1: p += 0.3*torch.randn(p.shape, generator=rng).to(p)
    return model


def tokens(model, n=None, seed=0):
    return np.random.default_rng(seed).integers(0, model.config.vocab_size, n or model.config.context_length).tolist()


def as_array(x): return x.numpy() if isinstance(x, torch.Tensor) else x


@pytest.mark.parametrize("changes", GRID, ids=lambda c: "-".join(map(str, c.values())) or "plain")
def test_cached_equals_uncached(changes):
    "Every position, one token at a time and in pieces, in all decoders; then back, and on with other tokens."
    model = build(changes)
    ids, other = tokens(model), tokens(model, seed=1)
    with torch.no_grad():
        expected = model(torch.tensor(ids)).numpy()
        mixed = model(torch.tensor(ids[:40] + other[:7])).numpy()
    for name, make in MAKERS.items():
        one, pieces = make(model), make(model)
        assert one.room == 100 and one.length == 0
        if name != "layered": check_close(np.stack([as_array(one.feed([i])) for i in ids]), expected, RTOL, ATOL, f"{name}, one by one")
        parts = [ids[a:b] for a, b in itertools.pairwise((0, 3, 4, 75, 86, 100))]
        check_close(np.concatenate([as_array(pieces.feed(part, all=True)) for part in parts]), expected, RTOL, ATOL, f"{name}, pieces")
        pieces.rewind(97)
        check_close(as_array(pieces.feed(ids[97:98])), expected[97], RTOL, ATOL, f"{name}, back to 97")
        pieces.rewind(40)
        check_close(as_array(pieces.feed(other[:7], all=True)), mixed[40:], RTOL, ATOL, f"{name}, back to 40")
        assert pieces.length == 47


@pytest.mark.parametrize("changes", [dict(), dict(norm="layernorm", position="learned", ffn="gelu", bias=True, tie_embeddings=True, window=9)], ids=["llama", "gpt2"])
def test_numpy_decoder_equals_the_numpy_engine(changes):
    model = build(changes)
    params, ids = params_of(model), np.array(tokens(model))
    expected = transformer_forward(params, ids, model.config)[0]
    found = NumpyDecoder(params, model.config).feed(ids, all=True)
    assert type(found) is np.ndarray
    check_close(found, expected, RTOL, ATOL)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("window", [None, 3, 30])
def test_random_walk(name, window):
    "Feeds and rewinds in any order."
    model, rng = build(dict(window=window, num_kv_heads=2)), np.random.default_rng(5)
    decoder, held = MAKERS[name](model), []
    for _ in range(30):
        if held and rng.random() < .4:
            held = held[:rng.integers(0, len(held) + 1)]
            decoder.rewind(len(held))
        if len(held) == 100: continue
        new = rng.integers(0, 47, rng.integers(1, 1 + min(40, 100 - len(held)))).tolist()
        held += new
        with torch.no_grad(): expected = model(torch.tensor(held))[-1].numpy()
        check_close(as_array(decoder.feed(new)), expected, RTOL, ATOL)
        assert decoder.length == len(held)


@pytest.mark.parametrize("name", MAKERS)
def test_refused_and_nothing_changed(name):
    model = build(dict(window=6))
    decoder, ids = MAKERS[name](model), tokens(model)
    decoder.feed(ids[:95])
    cache = decoder.cache.data if name in ("cached", "graph") else decoder.cache
    before, bytes_before = decoder.length, bytes(as_array(cache).tobytes())
    for wrong, words in (([], "empty"), ([47], "id 47"), ([-1], "id -1"), (ids[:6], "6 ids after 95, but the decoder has room for 100"), ([3, 99], "id 99")):
        with pytest.raises(ValueError, match=words): decoder.feed(wrong)
    with pytest.raises(TypeError): decoder.feed([1.5])
    for length in (-1, 96):
        with pytest.raises(ValueError, match=f"rewind to {length}, expected 0 to 95"): decoder.rewind(length)
    assert decoder.length == before and bytes(as_array(cache).tobytes()) == bytes_before
    with torch.no_grad(): expected = model(torch.tensor(ids))[-1].numpy()
    check_close(as_array(decoder.feed(ids[95:])), expected, RTOL, ATOL)
    with pytest.raises(ValueError, match="1 ids after 100"): decoder.feed([0])


@pytest.mark.parametrize("make", [CachedDecoder, FastDecoder, lambda m, n: NumpyDecoder(params_of(m), m.config, n)])
def test_less_room_than_the_context(make):
    model = build(dict(position="sinusoidal"))
    decoder = make(model, 12)
    assert decoder.room == 12
    check_close(as_array(decoder.feed(tokens(model, 12))), as_array(RecomputingDecoder(model).feed(tokens(model, 12))), RTOL, ATOL)
    with pytest.raises(ValueError): decoder.feed([0])
    for wrong in (0, 101, -3):
        with pytest.raises(ValueError, match=f"max_tokens = {wrong}, expected 1 to 100"): make(model, wrong)


def test_bytes_are_those_of_the_formula():
    for changes in (h | w for h in HEADS for w in WINDOWS):
        config = replace(BASE, **changes)
        for batch, length, dtype in ((1, None, "float32"), (3, 50, "bfloat16"), (2, 3, "float64")):
            cache = KVCache(config, batch, length, getattr(torch, dtype))
            assert cache.num_bytes == kv_cache_bytes(config, batch, length, dtype)
            assert cache.num_bytes == sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values))
        decoder = FastDecoder(build(changes))
        extra = 0 if config.window is None else min(63, 100 - config.window)*kv_cache_bytes(replace(config, window=None), 1, 1)
        assert decoder.cache.nbytes == kv_cache_bytes(config, 1) + extra


@pytest.mark.parametrize("window", [2, 5, 20])
@pytest.mark.parametrize("make", [CachedDecoder, FastDecoder])
def test_going_back_computes_again_only_where_the_ring_has_lost_a_key_that_is_seen(make, window):
    model = build(dict(window=window))
    ids, decoder, computed = tokens(model), make(model), []
    with torch.no_grad(): expected = model(torch.tensor(ids)).numpy()
    compute = decoder.compute
    decoder.compute = lambda new, all: computed.append(len(new)) or compute(new, all)
    slots = decoder.cache.data.shape[-2] if make is CachedDecoder else decoder.cache.shape[3]
    assert slots == (window if make is CachedDecoder else window + 63)
    for reach in (1, window, window + 1, window + 40, 99):
        ring, edge = set(range(reach)[-slots:]), max(0, reach - slots) + window - 1
        for length in sorted({0, 1, reach, *range(edge - 2, edge + 3)} & set(range(reach + 1))):
            decoder.rewind(0)
            decoder.feed(ids[:reach])
            computed.clear()
            decoder.rewind(length)
            seen = set(range(max(0, length - window + 1), length))
            assert sum(computed) == (0 if seen <= ring else length), (reach, length)
            check_close(as_array(decoder.feed([ids[length]])), expected[length], RTOL, ATOL)


@pytest.mark.parametrize("window", [None, 7])
def test_batches(window):
    model = build(dict(window=window))
    ids = torch.tensor([tokens(model, 40, seed) for seed in range(3)])
    cache, out = KVCache(model.config, 3), []
    with torch.no_grad():
        for a, b in itertools.pairwise((0, 5, 6, 7, 30, 40)): out.append(model(ids[:, a:b], torch.arange(a, b), cache))
        check_close(torch.cat(out, 1).numpy(), model(ids).numpy(), RTOL, ATOL)


@pytest.mark.parametrize("dtype, atol", [(torch.float64, 1e-6), (torch.bfloat16, 0.1)])
def test_other_types(dtype, atol):
    model = build({}, dtype=dtype)
    ids = tokens(model, 20)
    expected = RecomputingDecoder(model).feed(ids)
    for make in (CachedDecoder, FastDecoder):
        decoder = make(model)
        for i in ids[:-1]: decoder.feed([i])
        found = decoder.feed(ids[-1:])
        assert found.dtype == torch.float32
        check_close(found, expected, 1e-4 if dtype == torch.float64 else 0.05, atol)


@pytest.mark.parametrize("decoder", [CachedDecoder, FastDecoder, lambda m: FastDecoder(m, 30)])
def test_generates_the_same_ids(decoder):
    model = build(dict(context_length=20))
    if decoder not in (CachedDecoder, FastDecoder): decoder = lambda m: FastDecoder(m, 20)
    for settings in (dict(temperature=0), dict(temperature=0.8, top_p=0.9, seed=4)):
        assert list(generate(model, [1, 2, 3], 40, decoder=decoder, **settings)) == list(generate(model, [1, 2, 3], 40, **settings))


@pytest.mark.parametrize("changes", [dict(num_kv_heads=2), dict(window=5, position="learned"), dict(position="sinusoidal", qk_norm=True)], ids=str)
def test_a_step_of_fixed_shape_asks_the_device_for_nothing(changes):
    "Tensors of the device meta have shapes and no data: what can be computed there can be recorded as a graph"
    decoder = GraphDecoder(build(changes).to("meta"))
    with torch.no_grad(): assert [decoder.token().shape for _ in range(2)] == [(1, 47)]*2
    assert decoder.logits is None and decoder.length == 0


def test_weights_are_packed_once_and_counted():
    model, seen = build(dict(bias=True)), []
    def pack(weight):
        assert weight.dtype == np.float32 and weight.ndim == 2
        seen.append(weight.shape)
        return Opaque(weight)
    assert FastDecoder(model, pack=pack).num_bytes == 7*len(seen)
    assert seen == [(72, 24)]*2 + [(24, 24)]*2 + [(80, 24)]*2 + [(24, 40)]*2 + [(47, 24)]
    assert FastDecoder(model).num_bytes == 4*sum(r*c for r, c in seen)


def test_what_pack_makes_is_what_multiplies():
    "Rounded weights give the logits of a model with rounded weights, in each of the two ways."
    model, rounded = build({}), build({})
    def coarse(weight): return np.round(weight*8)/8
    with torch.no_grad():
        for name, p in rounded.named_parameters():
            if p.ndim == 2 and "embeddings" not in name: p.copy_(torch.from_numpy(coarse(p.numpy())))
    ids = tokens(model, 30)
    expected = RecomputingDecoder(rounded).feed(ids)
    for kind in (Plain, Opaque): check_close(FastDecoder(model, pack=lambda w: kind(coarse(w))).feed(ids), expected, RTOL, ATOL)


class Halves:
    "Float32 weights as twice their halves: arrays of another kind."
    def __init__(self, weight): self.arrays = weight/2, np.full((len(weight), 1), 2, np.float32)
    def __call__(self, x): raise AssertionError("not needed")
    num_bytes = 1


@overload(dot_rows)
def _dot_halves(arrays, layer, x, out, start, stop):
    if len(arrays) != 2 or arrays[1].dtype != types.float32 or arrays[0].dtype != types.float32: return
    def product(arrays, layer, x, out, start, stop):
        for t in range(len(x)):
            for r in range(start, stop):
                total = np.float32(0)
                for j in range(x.shape[1]): total += arrays[0][layer, r, j]*x[t, j]
                out[t, r] = total*arrays[1][layer, r, 0]
    return product


def test_another_kind_of_weight_gets_a_kernel_of_its_own():
    model = build(dict(head_dim=8))
    ids = tokens(model, 30)
    decoder = FastDecoder(model, pack=Halves, threads=2)
    assert decoder.packed[0][1].arrays[0].base is decoder.arrays[0][0]      # Held once
    check_close(decoder.feed(ids, all=True), RecomputingDecoder(model).feed(ids, all=True), RTOL, ATOL)


# Threads

def test_bit_equal_for_any_number_of_threads():
    model = build({})
    ids = tokens(model, 40)
    found = [[FastDecoder(model, threads=n).feed(ids, all=True)] for n in (1, 2, 3, 5)]
    assert all(torch.equal(f[0], found[0][0]) for f in found)
    with pytest.raises(ValueError, match="threads = 0, expected 1 or more"): FastDecoder(model, threads=0)


def test_a_thread_that_never_comes_is_not_missed(monkeypatch):
    model = build({})
    class Nobody:
        def submit(self, *args): pass
    monkeypatch.setattr(fast_decoder, "pool", lambda n: Nobody())
    decoder, ids = FastDecoder(model, threads=2), tokens(model, 30)
    check_close(torch.stack([decoder.feed([i]) for i in ids]), RecomputingDecoder(model).feed(ids, all=True), RTOL, ATOL)


def test_a_thread_that_comes_too_late_touches_nothing(monkeypatch):
    model, calls = build({}), []
    class Later:
        def submit(self, f, *args): calls.append(args)
    monkeypatch.setattr(fast_decoder, "pool", lambda n: Later())
    decoder, ids = FastDecoder(model, threads=2), tokens(model, 3)
    decoder.feed(ids[:1])
    x = calls[0][4][0]
    open_turn(decoder.board)                                            # The next turn has begun
    before = x.copy(), decoder.cache.copy(), decoder.board.copy()
    join_turn(*calls[0])
    after = x, decoder.cache, decoder.board
    before[2][[8, 16]] += 1                                             # It came and went
    for a, b in zip(after, before): assert np.array_equal(a, b)


def test_a_turn_that_was_broken_off_does_no_harm(monkeypatch):
    "The call is interrupted after the helper was called and before the work began: the helper does it alone, and nobody waits for ever."
    model = build({})
    decoder, ids = FastDecoder(model, threads=2), tokens(model, 20)
    decoder.feed(ids[:9])
    def interrupted(*args): raise KeyboardInterrupt
    with monkeypatch.context() as m:
        class Started:
            def submit(self, f, *args): threading.Thread(target=join_turn, args=args).start()
        m.setattr(fast_decoder, "pool", lambda n: Started())
        m.setattr(fast_decoder, "join_turn", interrupted)
        with pytest.raises(KeyboardInterrupt): decoder.feed(ids[9:12])
    assert decoder.length == 9
    check_close(decoder.feed(ids[9:]), RecomputingDecoder(model).feed(ids), RTOL, ATOL)


class Broken(torch.nn.Module):
    def forward(self, *args, **more): raise KeyboardInterrupt


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("kind", [CachedDecoder, GraphDecoder])
def test_a_model_that_breaks_off_does_no_harm(kind, window):
    "Not even twice in a row, nor if a token is taken back afterwards."
    model = build(dict(window=window))
    decoder, ids = kind(model), tokens(model, 20)
    hosts = {model, getattr(decoder, "twin", model)}
    def break_off(new):
        whole = {m: m.layers[1].ffn for m in hosts}
        for m in hosts: m.layers[1].ffn = Broken()
        with pytest.raises(KeyboardInterrupt): decoder.feed(new)
        for m in hosts: m.layers[1].ffn = whole[m]
    want = RecomputingDecoder(model).feed(ids, all=True)
    decoder.feed(ids[:9])
    break_off([0])
    decoder.rewind(8)
    check_close(decoder.feed(ids[8:9], all=True), want[8:9], RTOL, ATOL)
    for _ in range(2): break_off(ids[9:14])
    assert decoder.length == 9
    check_close(decoder.feed(ids[9:], all=True), want[9:], RTOL, ATOL)


@pytest.mark.parametrize("failures", [1, 2])
def test_a_long_feed_that_breaks_off_leaves_the_keys_of_a_window(failures):
    "The first pieces of the feed have overwritten keys that are still needed; feeding those again may fail, too."
    model = build(dict(window=5, context_length=300, position="rope"))
    decoder, ids = FastDecoder(model), tokens(model)
    decoder.feed(ids[:50])
    share, calls = decoder._share, []
    def stumbles(*args):
        calls.append(args)
        if len(calls) in (3, 4)[:failures]: raise KeyboardInterrupt
        return share(*args)
    decoder._share = stumbles
    for n in range(failures):
        with pytest.raises(KeyboardInterrupt): decoder.feed(ids[:200])
        assert decoder.length == 50
    check_close(decoder.feed(ids[50:52], all=True), RecomputingDecoder(model).feed(ids[:52], all=True)[50:], RTOL, ATOL)


def test_decoders_side_by_side():
    "Four threads with a decoder each, all of which call for helpers."
    model = build({})
    ids, found = tokens(model, 60), {}
    expected = RecomputingDecoder(model).feed(ids, all=True)
    def run(k):
        decoder = FastDecoder(model, threads=2)
        found[k] = torch.stack([decoder.feed([i]) for i in ids])
    threads = [threading.Thread(target=run, args=(k,)) for k in range(4)]
    for t in threads: t.start()
    for t in threads: t.join()
    for k in range(4): check_close(found[k], expected, RTOL, ATOL)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_after_a_fork():
    model = build({})
    decoder, ids = FastDecoder(model, threads=2), tokens(model, 9)
    first = decoder.feed(ids).numpy()
    if not (child := os.fork()):
        decoder.rewind(0)
        os._exit(0 if np.array_equal(decoder.feed(ids).numpy(), first) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_weights_are_copied():
    model = build({})
    ids, decoder = tokens(model, 9), FastDecoder(model)
    expected = decoder.feed(ids).clone()
    with torch.no_grad():
        for p in model.parameters(): p.zero_()
    decoder.rewind(0)
    assert torch.equal(decoder.feed(ids), expected)


def test_weights_that_do_not_fit_are_refused():
    model = build({})
    params = params_of(model)
    del params["ln_final.weight"]
    with pytest.raises(ValueError, match="ln_final.weight is missing"): NumpyDecoder(params, model.config)
