"The NumPy engine beside torch's on the same weights, for every field of the config, and its fast form beside the readable one."
import os
import signal
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import strict_array
from lmcourse.architecture import fast_np
from lmcourse.architecture.attention_np import causal_attention_backward, causal_attention_forward, rope_tables_np
from lmcourse.architecture.fast_np import (FAST, blas_threads, fast_add_norm_backward, fast_add_norm_forward, fast_attention_backward, fast_attention_forward,
                                           fast_ffn_forward, fast_head_loss, fast_loss_and_grads, fast_multihead_forward)
from lmcourse.architecture.layers_np import RowGradient, ffn_forward
from lmcourse.architecture.transformer_np import (Ops, check_params, embed_backward, embed_forward, head_loss, init_params, loss_and_grads, parameter_shapes,
                                                  sinusoidal_table, stream_forward, transformer_backward, transformer_forward)
from lmcourse.tools.checks import check_close, expect_error
from lmcourse.tools.config import FFN_KINDS, ModelConfig

torch = pytest.importorskip("torch")
from lmcourse.architecture.layers_torch import cross_entropy
from lmcourse.architecture.transformer_torch import TransformerLM

SMALL = ModelConfig(vocab_size=23, context_length=8, d_model=16, num_layers=2, num_heads=4, d_ff=12)
CHANGES = [dict(), dict(num_layers=1), dict(num_kv_heads=2), dict(num_kv_heads=1), dict(head_dim=6), dict(norm="layernorm"),
           dict(norm="layernorm", bias=True), dict(norm="none", num_layers=1), dict(norm_position="post"), dict(norm_position="sublayer"),
           dict(norm_eps=.1), dict(position="learned"), dict(position="sinusoidal"), dict(position="none"), dict(rope_theta=50.), dict(rope_theta=9., head_dim=8, rope_scaling=dict(rope_type="yarn", factor=4., original_max_position_embeddings=8, attention_factor=1.5)), dict(window=3),
           dict(window=1), dict(qk_norm=True), dict(bias=True), dict(tie_embeddings=True), dict(tie_embeddings=True, scale_embeddings=True),
           dict(scale_embeddings=True), dict(z_loss=.02), *(dict(ffn=kind) for kind in FFN_KINDS)]
name_of = lambda change: ",".join(f"{k}={v}" for k, v in change.items()) or "default"


def dense(grads): return {name: g.dense() if isinstance(g, RowGradient) else g for name, g in grads.items()}

def batch(config, B=2, T=None, seed=0):
    rng = np.random.default_rng(seed)
    ids, targets = rng.integers(0, config.vocab_size, (2, B, T or config.context_length))
    if targets.size > 1: targets[0, -1] = -100
    return ids, targets

def shaken(config, dtype=np.float64, seed=0): # Gains and biases that are not all alike
    rng = np.random.default_rng(seed)
    return {name: (w + .1*rng.standard_normal(w.shape)).astype(dtype) for name, w in init_params(config, seed, np.float64).items()}

def torchs(config, params, ids, targets): # Logits, loss and gradients by autograd
    model = TransformerLM(config, dtype=torch.float64)
    assert dict(model.named_parameters()).keys() == params.keys()
    model.load_state_dict({name: torch.from_numpy(w) for name, w in params.items()}, strict=not config.tie_embeddings)
    logits = model(torch.from_numpy(ids))
    loss = cross_entropy(logits, torch.from_numpy(targets), z_loss=config.z_loss)
    loss.backward()
    return logits.detach().numpy(), loss.item(), {name: p.grad.numpy() for name, p in model.named_parameters()}

def check_against_torch(config, ids, targets):
    params = shaken(config)
    logits, loss, grads = torchs(config, params, ids, targets)
    ours, _ = transformer_forward(params, ids, config)
    check_close(ours, logits, rtol=1e-9, atol=1e-10)
    our_loss, our_grads = loss_and_grads(params, ids, targets, config)
    check_close(our_loss.item(), loss, rtol=1e-10)
    check_close(dense(our_grads), grads, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("change", CHANGES, ids=name_of)
def test_equals_torch(change):
    config = replace(SMALL, **change)
    check_against_torch(config, *batch(config))

configs = st.builds(
    lambda G, R, K, D, **more: replace(SMALL, num_heads=G*R, num_kv_heads=G, head_dim=2*K, d_model=2*D, **more),
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 6),
    norm=st.sampled_from(["rmsnorm", "layernorm"]), norm_position=st.sampled_from(["pre", "post", "sublayer"]),
    position=st.sampled_from(["rope", "learned", "sinusoidal", "none"]), ffn=st.sampled_from(list(FFN_KINDS)),
    window=st.sampled_from([None, 1, 3]), d_ff=st.integers(1, 9), num_layers=st.integers(1, 2), **{name: st.booleans() for name in
    ("qk_norm", "bias", "tie_embeddings", "scale_embeddings")}, z_loss=st.sampled_from([0., .02]))

@settings(max_examples=60, deadline=None)
@given(config=configs, B=st.integers(1, 3), T=st.integers(1, 8), seed=st.integers(0, 5))
def test_equals_torch_in_any_mixture(config, B, T, seed):
    check_against_torch(config, *batch(config, B, T, seed))

def test_a_wrong_gradient_is_noticed(): # The comparison itself can fail
    ids, targets = batch(SMALL)
    params = shaken(SMALL)
    grads = torchs(SMALL, params, ids, targets)[2]
    ours = dense(loss_and_grads(params, ids, targets, SMALL)[1])
    ours["layers.0.attn.k_proj.weight"] = ours["layers.0.attn.k_proj.weight"]*1.001
    with expect_error(AssertionError, "k_proj"): check_close(ours, grads, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("change", CHANGES, ids=name_of)
def test_names_and_shapes_are_torchs(change):
    config = replace(SMALL, **change)
    model = TransformerLM(config, device="meta")
    assert parameter_shapes(config) == {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert {name: w.shape for name, w in init_params(config).items()} == parameter_shapes(config)

def test_weights_begin_as_in_torch():
    config = replace(SMALL, d_model=128, vocab_size=300, position="learned", tie_embeddings=True, scale_embeddings=True)
    ours, model = init_params(config), TransformerLM(config)
    for name, p in model.named_parameters():
        if p.ndim > 1: check_close(ours[name].std().item(), p.std().item(), rtol=.1, name=name)
        else: check_close(ours[name], p.detach(), 0, 0, name)


@pytest.mark.parametrize("change", CHANGES, ids=name_of)
def test_runs_on_another_array_module(change): # As CuPy would: nothing of NumPy's is called on its arrays
    config = replace(SMALL, **change)
    params, (ids, targets) = shaken(config), batch(config)
    run = lambda params, ids, targets: [(loss, dense(grads)) for loss, grads in [loss_and_grads(params, ids, targets, config)]][0]
    check_close(strict_array.on_strict(run)(params, ids, targets), run(params, ids, targets), rtol=1e-10, atol=1e-12)

@pytest.mark.parametrize("change", CHANGES, ids=name_of)
def test_runs_on_cupy(change):
    cupy = pytest.importorskip("cupy")
    config = replace(SMALL, **change)
    params, (ids, targets) = shaken(config), batch(config)
    loss, grads = loss_and_grads({name: cupy.asarray(w) for name, w in params.items()}, cupy.asarray(ids), cupy.asarray(targets), config)
    expected, by_numpy = loss_and_grads(params, ids, targets, config)
    check_close(float(loss), float(expected), rtol=1e-10)
    check_close({name: g.get() for name, g in dense(grads).items()}, dense(by_numpy), rtol=1e-8, atol=1e-11)

@pytest.mark.parametrize("recompute", (False, True))
def test_the_fast_engine_leaves_other_arrays_to_the_readable_one(recompute):
    params, (ids, targets) = shaken(SMALL), batch(SMALL)
    run = lambda params, ids, targets: dense(loss_and_grads(params, ids, targets, SMALL, FAST, recompute)[1])
    check_close(strict_array.on_strict(run)(params, ids, targets), dense(loss_and_grads(params, ids, targets, SMALL)[1]), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("change", CHANGES, ids=name_of)
def test_recomputing_gives_the_same_bits(change):
    config = replace(SMALL, **change)
    params, (ids, targets) = shaken(config, np.float32), batch(config)
    kept, again = (loss_and_grads(params, ids, targets, config, recompute=r) for r in (False, True))
    check_close((again[0], dense(again[1])), (kept[0], dense(kept[1])), 0, 0)

@pytest.mark.parametrize("ops", (Ops(), FAST))
@pytest.mark.parametrize("change", CHANGES, ids=name_of)
def test_arguments_stay_as_they_are_and_float32_stays_float32(change, ops):
    config = replace(SMALL, **change)
    params, (ids, targets) = shaken(config, np.float32), batch(config)
    before = {name: w.copy() for name, w in params.items()}, ids.copy(), targets.copy()
    first = loss_and_grads(params, ids, targets, config, ops)
    assert first[0].dtype == np.float32 and {g.dtype for g in dense(first[1]).values()} == {np.dtype(np.float32)}
    check_close((params, ids, targets), before, 0, 0)
    second = loss_and_grads(params, ids, targets, config, ops)       # Nothing is left over from the first call
    check_close((second[0], dense(second[1])), (first[0], dense(first[1])), 0, 0)

def test_the_cache_can_be_used_twice():
    params, (ids, _) = shaken(SMALL, np.float32), batch(SMALL)
    for ops in (Ops(), FAST):
        logits, cache = transformer_forward(params, ids, SMALL, ops)
        first, second = (dense(transformer_backward(np.ones_like(logits), cache)) for _ in range(2))
        check_close(second, first, 0, 0)


def check_fast(run, config, ids, targets):
    params = shaken(config, np.float32)
    (loss, grads), (expected, readable) = run(params, ids, targets, config), loss_and_grads(params, ids, targets, config)
    check_close(loss, expected, rtol=1e-5)
    grads, readable = dense(grads), dense(readable)
    assert grads.keys() == readable.keys()
    for name, g in readable.items(): check_close(grads[name], g, rtol=1e-3, atol=1e-5 + 1e-4*abs(g).max().item(), name=name)

@pytest.mark.parametrize("threads", (1, 2, 3, 8))
@pytest.mark.parametrize("change", CHANGES, ids=name_of)
def test_fast_equals_readable(change, threads):
    config = replace(SMALL, **change)
    check_fast(partial(fast_loss_and_grads, threads=threads), config, *batch(config, 3))

@settings(max_examples=40, deadline=None)
@given(config=configs, B=st.integers(1, 3), T=st.integers(1, 8), recompute=st.booleans(), seed=st.integers(0, 5))
def test_fast_equals_readable_in_any_mixture(config, B, T, recompute, seed):
    config = replace(config, d_model=config.d_model + 8) # LayerNorm of two numbers is all rounding
    check_fast(partial(fast_loss_and_grads, recompute=recompute), config, *batch(config, B, T, seed))

def test_fast_with_long_texts(): # Several blocks of queries and of keys, and a window over their edges
    for window in (None, 1, 63, 64, 65, 100):
        config = replace(SMALL, context_length=150, num_kv_heads=2, window=window)
        check_fast(fast_loss_and_grads, config, *batch(config, 2, 150))

@pytest.mark.filterwarnings("error")
def test_fast_with_large_numbers(): # Scores and gates beyond what an exponential holds
    rng = np.random.default_rng(0)
    q, k, v, dout = (s*rng.standard_normal((2, 70, 2, 8), np.float32) for s in (8, 8, 1, 1))
    turned = lambda *arrays: [np.ascontiguousarray(a.swapaxes(1, 2)) for a in arrays]
    for window in (None, 3):
        out, cache = fast_attention_forward(q, k, v, window)
        expected, readable = causal_attention_forward(*turned(q, k, v), window)
        grads, expected_grads = fast_attention_backward(dout, cache), causal_attention_backward(*turned(dout), readable)
        check_close(turned(out, *grads), [expected, *expected_grads], rtol=1e-3, atol=1e-3)
    params = {n: 100*rng.standard_normal(shape, np.float32) for n, shape in {"w1.weight": (6, 4), "w2.weight": (4, 6)}.items()}
    for kind in ("silu", "gelu"): check_close(fast_ffn_forward(10*q[0, 0, :, :4], params, kind)[0], ffn_forward(10*q[0, 0, :, :4], params, kind)[0], rtol=1e-4)
    h, weight, targets = q[0, :, 0].copy(), 10*rng.standard_normal((30, 8), np.float32), rng.integers(0, 30, 70)
    check_close(fast_head_loss(h, weight, targets), head_loss(h, weight, targets), rtol=1e-4, atol=1e-4)

@pytest.mark.parametrize("z_loss", (0., .02))
def test_the_head_in_several_parts(z_loss):
    rng = np.random.default_rng(0)
    h, weight, targets = rng.standard_normal((1100, 4), np.float32), rng.standard_normal((4200, 4), np.float32), rng.integers(0, 4200, 1100)
    targets[rng.random(1100) < .3] = -100                       # 499 rows in a part, so there are three
    check_close(fast_head_loss(h, weight, targets, -100, z_loss), head_loss(h, weight, targets, -100, z_loss), rtol=1e-4, atol=1e-6)

def test_what_the_window_hides_from_a_piece_is_not_touched(): # Else a window would save no time, and 0 times NaN be NaN
    q, k, v, dout = np.random.default_rng(0).standard_normal((4, 1, 200, 2, 8), np.float32)
    v[:, 0], dout[:, -1] = np.nan, np.nan
    out, cache = fast_attention_forward(q, k, v, 3)
    assert np.isnan(out[:, 0]).all() and np.isfinite(out[:, 66:]).all()
    dq, dk, dv = fast_attention_backward(dout, fast_attention_forward(q, k, np.nan_to_num(v), 3)[1])
    for d in (dk, dv): assert np.isnan(d[:, -1]).all() and np.isfinite(d[:, :120]).all()

def test_other_leading_dimensions():
    config, (ids, targets) = replace(SMALL, position="learned"), batch(SMALL, 4)
    params = shaken(config, np.float32)
    for ops in (Ops(), FAST):
        flat, folded, single = (loss_and_grads(params, *(a.reshape(shape + (8,)) for a in (ids[:n], targets[:n])), config, ops)
                                for n, shape in ((4, (4,)), (4, (2, 2)), (1, ())))
        check_close(folded[0], flat[0], rtol=1e-6)
        check_close(dense(folded[1]), dense(flat[1]), rtol=1e-4, atol=1e-6)
        assert single[0].ndim == 0

def test_a_long_batch_of_float16_is_added_up_in_float32():
    "A sum in float16 stops at 2048, where 1 is no longer a step."
    config = replace(SMALL, position="learned")
    cache = embed_forward(np.zeros((5000, 1), int), init_params(config, dtype=np.float16), config)[1]
    grads = embed_backward(np.ones((5000, 1, 16), np.float16), cache)
    for grad in grads.values(): check_close(grad.values, np.full((1, 16), 5000, np.float16), 1e-3)


@pytest.mark.parametrize("dtype", (np.float64, np.float16))
def test_fast_equals_readable_in_other_types(dtype): # A part that divides by its own targets would double the loss
    params, (ids, targets) = shaken(SMALL, dtype), batch(SMALL, 4)
    targets[:2] = -100
    (loss, grads), (expected, readable) = fast_loss_and_grads(params, ids, targets, SMALL, 2), loss_and_grads(params, ids, targets, SMALL)
    check_close((loss, dense(grads)), (expected, dense(readable)), 1e-3 if dtype == np.float16 else 1e-10, 1e-12)

def test_fast_takes_ids_and_weights_as_they_come():
    params, (ids, targets) = shaken(SMALL, np.float32), batch(SMALL, 5)
    same = lambda *batch, params=params: check_close(fast_loss_and_grads(params, *batch, SMALL, 2)[0], loss_and_grads(params, *batch, SMALL)[0], rtol=1e-6)
    for dtype in (np.int32, np.int8, np.int64): same(ids.astype(dtype), targets.astype(dtype))
    file = np.arange(42, dtype=np.uint16)%23                    # As from a memmap of tokens
    file.flags.writeable = False
    same(file[:40].reshape(5, 8), file[1:41].reshape(5, 8))
    same(np.asfortranarray(ids), targets[:, ::-1])
    for x, y in ((ids[0], targets[0]), (ids[:4].reshape(2, 2, 8), targets[:4].reshape(2, 2, 8))): same(x, y)
    for change in (np.asfortranarray, lambda w: np.repeat(w, 2, -1)[..., ::2]): same(*batch(SMALL, 5), params={n: change(w) for n, w in params.items()})

def test_fast_refuses_what_the_readable_one_refuses():
    params, (ids, targets) = init_params(SMALL), batch(SMALL, 4)
    for threads in (1, 2):
        run = lambda ids=ids, targets=targets, params=params: fast_loss_and_grads(params, ids, targets, SMALL, threads)
        for bad in (-1, -5, 23):
            with expect_error(IndexError, f"target {bad} is out of range, expected 0 to 22"): run(targets=np.full_like(targets, bad))
        with expect_error(TypeError, "targets are float64"): run(targets=targets.astype(float))
        with expect_error(TypeError, "got builtins.list"): run(ids.tolist())
        with expect_error(ValueError, "(8, 4)"): run(targets=targets.reshape(8, 4))
        with expect_error(ValueError, "there are none"): run(ids[:0], targets[:0])
        with expect_error(IndexError, "id 23 is out of range"): run(np.where(np.arange(4)[:, None] == 3, 23, ids))
        with expect_error(TypeError, "float32, float64"): run(params=params | {"lm_head.weight": params["lm_head.weight"].astype(float)})
        with expect_error(ValueError, "ln_final.weight is missing"): run(params={n: w for n, w in params.items() if n != "ln_final.weight"})
    for threads in (0, -1):
        with expect_error(ValueError, f"threads = {threads}, expected 1 or more"): fast_loss_and_grads(params, ids, targets, SMALL, threads)

def test_no_kernel_reads_beyond_an_array():
    x, params, c = np.ones((2, 8, 16), np.float32), shaken(SMALL, np.float32), SMALL
    attn, ffn = ({n.removeprefix(p): w for n, w in params.items() if n.startswith(p)} for p in ("layers.0.attn.", "layers.0.ffn."))
    gain, cos = np.ones(16, np.float32), np.ones((9, 2), np.float32)
    for bad in (lambda: fast_add_norm_forward(x, None, dict(weight=gain[:8]), c), lambda: fast_add_norm_forward(x, x[:1], dict(weight=gain), c),
                lambda: fast_ffn_forward(x, ffn, "swigul"), lambda: fast_ffn_forward(x, ffn | {"w3.weight": ffn["w3.weight"][:5]}, "swiglu"),
                lambda: fast_multihead_forward(x, attn, c), lambda: fast_multihead_forward(x, attn, c, (cos[:7], cos[:7])),
                lambda: fast_multihead_forward(x, attn, c, (cos[:, :1],)*2), lambda: fast_multihead_forward(x, attn | {"k_proj.weight": x[0]}, c, (cos, cos)),
                lambda: fast_attention_forward(*[x[..., None]]*3, 0), lambda: fast_attention_forward(*[x[..., None]]*3, block=0),
                lambda: fast_attention_forward(x[:, :5, :, None], *[x[..., None]]*2), lambda: fast_attention_forward(x[..., None], *[x[..., :3, None]]*2),
                lambda: fast_head_loss(x, x[0], np.zeros((8, 2), int))):
        with pytest.raises(ValueError): bad()
    with expect_error(TypeError, "float64"): fast_head_loss(x.astype(float), x[0].astype(float), np.zeros((2, 8), int), count=3)
    cache = fast_add_norm_forward(x, None, dict(weight=gain), c)[2]
    for bad in ((x, x[:1]), (x[:1], x), (None, x[..., :8])):
        with pytest.raises(ValueError): fast_add_norm_backward(*bad, cache)
    with pytest.raises(ValueError): fast_attention_backward(x[:1, ..., None], fast_attention_forward(*[x[..., None]]*3)[1])
    none = replace(c, position="none")                          # Tables are not for it
    check_close(fast_multihead_forward(x, attn, none, rope_tables_np(8, 4))[0], fast_multihead_forward(x, attn, none)[0], 0, 0)

@pytest.fixture
def blas_at_two(): # A function that tells BLAS's number of threads, which is two whatever the environment says
    threadpoolctl = pytest.importorskip("threadpoolctl")
    libraries = threadpoolctl.ThreadpoolController().select(user_api="blas").lib_controllers
    def set_all(n):
        for library in libraries:
            library.set_num_threads(n)
            getattr(library, "clear_controlling_thread", lambda: None)()    # Else other threads could not set it
    before = libraries[0].num_threads
    set_all(2)
    yield lambda: {library.num_threads for library in libraries}
    set_all(before)

def test_calls_from_several_threads(blas_at_two, monkeypatch):
    params, batches = shaken(SMALL, np.float32), [batch(SMALL, 4, seed=i) for i in range(12)]
    run = lambda batch: (lambda loss, grads: (loss, dense(grads)))(*fast_loss_and_grads(params, *batch, SMALL, 2))
    expected = [run(b) for b in batches]
    with ThreadPoolExecutor(4) as mine: check_close(list(mine.map(run, batches*3)), expected*3, 0, 0)
    with pytest.raises(IndexError): run((batches[0][0] + 23, batches[0][1]))
    assert blas_at_two() == {2}
    def slow(*args, **more):
        assert blas_at_two() == {1}
        time.sleep(.05)
        return loss_and_grads(*args, **more)
    monkeypatch.setattr(fast_np, "loss_and_grads", slow)
    with ThreadPoolExecutor(2) as mine: list(mine.map(lambda wait: (time.sleep(wait), run(batches[0])), (0, .02))) # One begins within the other
    assert blas_at_two() == {2}

@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_forked_process_has_threads_of_its_own():
    params, some = shaken(SMALL, np.float32), batch(SMALL, 4)
    expected = fast_loss_and_grads(params, *some, SMALL, 2)[0]
    if not (child := os.fork()):
        signal.alarm(120)
        try: os._exit(int(fast_loss_and_grads(params, *some, SMALL, 2)[0] != expected))
        finally: os._exit(1)
    assert os.waitpid(child, 0)[1] == 0

def test_blas_threads_come_back():
    threadpoolctl = pytest.importorskip("threadpoolctl")
    count = lambda: {lib["num_threads"] for lib in threadpoolctl.threadpool_info() if lib["user_api"] == "blas"}
    before = count()
    with pytest.raises(RuntimeError):
        with blas_threads(1):
            assert count() == {1}
            raise RuntimeError
    assert count() == before


class Watched(np.ndarray):
    "Notes every reshape that copies."
    copies = []
    def reshape(self, *shape, **options):
        result = super().reshape(*shape, **options)
        if not np.may_share_memory(result, self): Watched.copies.append((self.shape, self.strides, result.shape))
        return result

@pytest.mark.parametrize("change", CHANGES, ids=name_of)
def test_no_reshape_copies(change):
    config = replace(SMALL, **change)
    Watched.copies.clear()
    params, (ids, targets) = {name: w.view(Watched) for name, w in shaken(config).items()}, batch(config, 3)
    grads = loss_and_grads(params, ids, targets, config)[1]
    assert all(isinstance(g, (Watched, RowGradient)) for g in grads.values()) and not Watched.copies
    params["token_embeddings.weight"][:5, :4].T.reshape(-1)
    assert len(Watched.copies) == 1                             # It would notice one

def test_what_a_layer_keeps_is_known_to_the_byte(): # A copy that is kept, or one array too many, would show
    config, held = ModelConfig(vocab_size=50, context_length=64, d_model=64, num_layers=2, num_heads=4), {}
    ids = np.zeros((16, 64), int)
    for layers in (2, 3, 3):                                    # The first call compiles
        c = replace(config, num_layers=layers)
        params = init_params(c)
        tracemalloc.start()
        _result = stream_forward(params, ids, c, FAST)
        held[layers] = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
    N, D, F, H = ids.size, config.d_model, config.ffn_size, config.num_heads
    numbers = 8*D + 4*F + H + 4     # Two sums and their norms, q, k, v, heads' output; a, b, exponential, product; log Z; two numbers for each norm
    check_close((held[3] - held[2])/(4*N*numbers), 1., rtol=.005)


def test_bad_input_is_refused():
    params, (ids, targets) = init_params(SMALL), batch(SMALL)
    run = lambda ids=ids, targets=targets, params=params, config=SMALL: loss_and_grads(params, ids, targets, config)
    with expect_error(TypeError, "ids are float64"): run(ids.astype(float))
    with expect_error(IndexError, "id -1 is out of range"): run(np.where(ids == ids[0, 0], -1, ids))
    with expect_error(IndexError, "expected 0 to 22"): run(ids + 22)
    with expect_error(ValueError, "9 tokens, but the model's context_length is 8"): run(*np.zeros((2, 1, 9), int))
    with expect_error(ValueError, "there are none"): run(*np.zeros((2, 1, 0), int))
    with expect_error(ValueError, "ids of shape (), expected (..., T)"): run(ids[0, 0], targets[0, 0])
    for f in (lambda ids: run(ids), lambda ids: transformer_forward(params, ids, SMALL)):
        with expect_error(TypeError, "got builtins.list"): f(ids.tolist())
    with expect_error(ValueError, "d_model = 5 is odd"): sinusoidal_table(3, 5)
    def never(*args): raise RuntimeError("work has begun")
    with expect_error(ValueError, "targets (2, 7) don't fit ids (2, 8)"):
        loss_and_grads(params, ids, targets[:, 1:], SMALL, Ops(add_norm=(never, never)))
    with expect_error(ValueError, "(8, 2)"): run(targets=targets.T)
    with expect_error(IndexError, "23"): run(targets=np.full_like(targets, 23))

def test_all_wrong_parameters_are_named():
    params = init_params(SMALL)
    del params["ln_final.weight"]
    params |= {"extra": np.ones(1, np.float32), "lm_head.weight": np.ones((2, 3), np.float32)}
    with expect_error(ValueError, "extra is not known; lm_head.weight is (2, 3), expected (23, 16); ln_final.weight is missing"):
        loss_and_grads(params, *batch(SMALL), SMALL)
    with expect_error(ValueError, "lm_head.weight is not known"): check_params(init_params(SMALL), replace(SMALL, tie_embeddings=True))

def test_a_future_token_changes_no_past_logit():
    for change in CHANGES:
        config = replace(SMALL, **change)
        params, (ids, _) = shaken(config, np.float32), batch(config)
        other = ids.copy()
        other[:, 5] = (ids[:, 5] + 1) % config.vocab_size
        for ops in (Ops(), FAST):
            a, b = (transformer_forward(params, z, config, ops)[0] for z in (ids, other))
            check_close(b[:, :5], a[:, :5], 0, 0)
            assert (a[:, 5] != b[:, 5]).any()
