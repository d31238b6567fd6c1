"Triton kernels equal torch's formulas for any sizes; interpreted without a GPU, compiled on one (mark `cuda`)."
import re
import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="kernels need triton: pip install 'lmcourse[kernels]'")
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

from lmcourse.architecture.attention_torch import causal_attention
from lmcourse.architecture.transformer_torch import Parts, TransformerLM
from lmcourse.kernels import flash, grouped, matmul as mm, rows
from lmcourse.kernels.machine_code import Job, compile_kernels
from lmcourse.kernels.traffic import FLOATS, MissingTriton, add_kernel, counting, interpreted, jit, tl, vector_add
from lmcourse.kernels.use import KERNEL_PARTS, SMALL, bench_kernels, check_agreement, kernel_tasks, use_kernels
from lmcourse.tools.checks import check_close, expect_error
from lmcourse.tools.config import ModelConfig

few = settings(max_examples=12)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request):
    if request.param == "cpu" and not interpreted: pytest.skip("compiled kernels take arrays on the GPU")
    return request.param


def drawn(*shape, device="cpu", seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def both(ours, plain, inputs, rtol=1e-4, atol=1e-5):
    "Values and every gradient."
    inputs = [x.clone().requires_grad_() for x in inputs]
    a, b = ours(*inputs), plain(*inputs)
    check_close(a, b, rtol, atol)
    dy = torch.randn(a.shape, generator=torch.Generator().manual_seed(9)).to(a)
    check_close(torch.autograd.grad(a, inputs, dy), torch.autograd.grad(b, inputs, dy), rtol, atol)


@pytest.mark.parametrize("dtype", FLOATS)
def test_sum(device, dtype):
    a, b = drawn(3, 500, device=device, dtype=dtype), drawn(3, 500, device=device, dtype=dtype, seed=1)
    check_close(vector_add(a, b, 128), a + b, 2**-7 if dtype == torch.bfloat16 else 0, 0)


@pytest.mark.parametrize("shape", [(16, 16, 16), (1, 5, 3), (70, 33, 50)])
def test_product(device, shape):
    M, N, K = shape
    a, b = drawn(M, K, device=device), drawn(K, N, device=device, seed=1)
    for group in (1, 3): check_close(mm.matmul(a, b, (16, 32, 16), group), a@b, 1e-4, 1e-4)


@pytest.mark.parametrize("shape", [(1, 1), (4, 33), (2, 3, 64)])
def test_rows(device, shape):
    x, gain = drawn(*shape, device=device), drawn(shape[-1], device=device, seed=1)
    check_close(rows.softmax(x), x.softmax(-1), 1e-5, 1e-7)
    both(lambda x, g: rows.rmsnorm(x, g, 1e-5, 2), lambda x, g: F.rms_norm(x, x.shape[-1:], g, 1e-5), (x, gain))
    both(lambda a, b: rows.swiglu(a, b, 16), lambda a, b: F.silu(a)*b, (x, drawn(*shape, device=device, seed=2)))
    t = torch.arange(int(np.prod(shape[:-1])), device=device).reshape(shape[:-1]) % shape[-1]
    both(lambda x: rows.cross_entropy(x, t, block=16), lambda x: F.cross_entropy(x.flatten(0, -2), t.flatten()), (x,))


def test_a_target_that_is_no_token_makes_the_loss_nan(device):
    "On a card nobody looks at the targets in advance; nothing outside the row is read"
    x, losses, logsums = drawn(4, 33, device=device), *torch.zeros(2, 4, device=device)
    targets = torch.tensor([5, 33, -1, -100], device=device)
    rows.cross_entropy_kernel[(4,)](x, targets, losses, logsums, 33, -100, BLOCK=16)
    assert losses.isnan().tolist() == [False, True, True, False]
    check_close(losses[0], F.cross_entropy(x[:1], targets[:1]), 1e-5)
    if device == "cuda": assert rows.cross_entropy(x, targets).isnan()


@pytest.mark.parametrize("heads, T, S, K, window", [((2, 2), 32, 32, 16, None), ((4, 2), 20, 33, 16, None), ((2, 1), 40, 40, 12, 7), ((1, 1), 1, 1, 2, 1)])
def test_attention(device, heads, T, S, K, window):
    (H, G), block = heads, (16, 16) if device == "cpu" else (64, 64)
    inputs = [drawn(2, h, t, K, device=device, seed=n) for n, (h, t) in enumerate(((H, T), (G, S), (G, S)))]
    both(lambda *a: flash.flash_attention(*a, window, blocks=block), lambda *a: causal_attention(*a, window), inputs)


@pytest.mark.parametrize("sizes", [(5, 0, 3), (0, 0, 1), (40, 17, 1)])
def test_experts(device, sizes):
    offsets, w = np.cumsum([0, *sizes]).tolist(), drawn(3, 20, 33, device=device, seed=1)
    x = drawn(offsets[-1], 33, device=device)
    expected = torch.cat([x[a:b]@e.T for a, b, e in zip(offsets, offsets[1:], w)])
    check_close(grouped.grouped_matmul(x, w, torch.tensor(offsets), (16, 16, 32)), expected, 1e-4, 1e-4)
    def looped(x, w): return torch.cat([x[a:b]@e.T for a, b, e in zip(offsets, offsets[1:], w)])
    both(lambda x, w: grouped.grouped_matmul(x, w, torch.tensor(offsets), (16, 16, 32)), looped, (x, w), 1e-4, 1e-4)


def test_an_optimizer_step(device):
    p, m, v = drawn(300, device=device), torch.zeros(300, device=device), torch.zeros(300, device=device)
    theirs = torch.nn.Parameter(p.clone())
    optimizer = torch.optim.AdamW([theirs], lr=.01, betas=(.9, .98), weight_decay=.1)
    for step in range(1, 4):
        theirs.grad = drawn(300, device=device, seed=step)
        optimizer.step()
        grouped.fused_adamw_(p, theirs.grad, m, v, step, lr=.01, block=64)
    check_close(p, theirs.detach(), 1e-5, 1e-6)


@pytest.mark.parametrize("fields", [dict(), dict(num_kv_heads=1, window=5, tie_embeddings=True), dict(norm="layernorm", z_loss=.1), dict(qk_norm=True, norm_position="post")])
def test_a_model_on_kernels_has_the_same_loss_and_gradients(device, fields):
    config = ModelConfig(**dict(vocab_size=40, context_length=20, d_model=32, num_layers=1, num_heads=2, d_ff=32) | fields)
    ids = torch.randint(40, (2, 17), generator=torch.Generator().manual_seed(0)).to(device)
    found = []
    for model in (TransformerLM(config), TransformerLM(config, parts=KERNEL_PARTS), use_kernels(TransformerLM(config))):
        loss = model.to(device).loss(ids[:, :-1], ids[:, 1:])
        loss.backward()
        found.append({"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()})
    for other in found[1:]: check_close(other, found[0], 1e-3, 1e-5)
    assert TransformerLM(config).parts == Parts()


@pytest.mark.parametrize("changes, dtype, words", [(dict(kv_lora_rank=6, num_kv_heads=None, head_dim=None), torch.float32, "use_kernels with kv_lora_rank = 6"), ({}, torch.float64, "float64")])
def test_a_model_for_which_there_are_no_kernels_stays_as_it_is(changes, dtype, words):
    model = TransformerLM(ModelConfig(vocab_size=50, context_length=16, d_model=32, num_layers=1, num_heads=4, **changes)).to(dtype)
    with expect_error(ValueError, words): use_kernels(model)
    model(torch.zeros(1, 4, dtype=torch.long))


def test_who_is_compared_agrees(device):
    with torch.no_grad():
        for task, calls in kernel_tasks(SMALL, device, torch.float32).items(): check_agreement(task, calls)
        for task, calls in kernel_tasks(SMALL | dict(width=1024), device, torch.float32).items():
            def zeros(call=calls["torch"]):
                result = call()
                result = result() if callable(result) else result
                return tuple(torch.zeros_like(x) for x in result) if isinstance(result, tuple) else torch.zeros_like(result)
            with expect_error(AssertionError, f"{task} by zeros"): check_agreement(task, dict(torch=calls["torch"], zeros=zeros))
    x = drawn(2, 4)
    with expect_error(AssertionError, "by half"): check_agreement("rows", dict(torch=lambda: (1e3*x, x), half=lambda: (1e3*x, 0*x)))


def test_the_bench_says_that_there_is_no_gpu(tmp_path):
    if torch.cuda.is_available(): pytest.skip("there is one")
    first, table, *_ = bench_kernels(file=tmp_path/"times.json")
    assert first.startswith("no GPU here, so nothing is timed") and len(table) == 10 and not list(tmp_path.iterdir())


@few
@given(st.integers(1, 40), st.integers(0, 20), st.sampled_from((4, 12, 16)), st.sampled_from(((1, 1), (2, 1), (4, 2))), st.sampled_from((0, 1, 9, 50)))
def test_traffic_of_attention_is_its_formula(T, more, K, heads, window):
    if not interpreted: pytest.skip("counting needs the interpreter")
    (H, G), S, D = heads, T + more, 16     # As `flash_attention` launches it: no product is narrower
    q, k, v = drawn(1, H, T, K), drawn(1, G, S, K), drawn(1, G, S, K)
    out, logsums = torch.empty_like(q), torch.empty(1, H, T)
    how = (T, S, H, G, K**-.5, window, K, True, 16, 16, D, True)
    with counting(q=q, k=k, v=v, out=out, logsums=logsums) as traffic: flash.flash_kernel[(-(-T//16), H)](q, k, v, out, logsums, *how)
    assert traffic.cost == flash.flash_cost(T, S, K, H, True, window, (16, 16))
    deltas, dk, dv = torch.ones_like(logsums), torch.empty_like(k), torch.empty_like(v)
    with counting(q=q, k=k, v=v, out=out, logsums=logsums, deltas=deltas, dk=dk, dv=dv) as back:
        flash.flash_dkv_kernel[(-(-S//16), G)](q, k, v, out, logsums, deltas, dk, dv, *how)
    assert back.cost == flash.flash_backward_costs(T, S, K, H, G, True, window, (16, 16))["dkv"]


@few
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40), st.integers(1, 4))
def test_traffic_of_a_product_is_its_formula(M, N, K, group):
    if not interpreted: pytest.skip("counting needs the interpreter")
    a, b, out = drawn(M, K), drawn(K, N), torch.empty(M, N)
    tile = (16, 16, 16)
    with counting(a=a, b=b, out=out) as traffic:
        mm.matmul_kernel[(-(-M//16)*-(-N//16),)](a, b, out, M, N, K, *tile, group, True)
    assert traffic.cost == mm.tiled_matmul_cost(M, N, K, tile)
    assert traffic.missed(10**6) <= traffic.sectors*32


@few
@given(st.integers(1, 6), st.integers(1, 40), st.integers(1, 6))
def test_traffic_of_rows_is_its_formula(R, N, P):
    if not interpreted: pytest.skip("counting needs the interpreter")
    x, dy, gain, out, inverse, parts = drawn(R, N), drawn(R, N), drawn(N), torch.empty(R, N), torch.ones(R), torch.empty(P, N)
    with counting(x=x, gain=gain, out=out, inverse=inverse) as forward: rows.rmsnorm_kernel[(R,)](x, gain, out, inverse, N, 1e-5, BLOCK=64)
    with counting(x=x, dy=dy, gain=gain, dx=out, inverse=inverse, parts=parts) as back:
        rows.rmsnorm_backward_kernel[(P,)](dy, x, gain, inverse, out, parts, R, N, BLOCK=64)
    assert forward.cost == rows.rmsnorm_cost(R, N) and back.cost == rows.rmsnorm_backward_cost(R, N, P)


def test_launches_follow_each_other_and_what_was_loaded_and_changed_moves_twice():
    if not interpreted: pytest.skip("counting needs the interpreter")
    a, b, c, d = (torch.ones(64) for _ in range(4))
    with counting(a=a, b=b, c=c, d=d):                          # The second launch has other blocks, and reads what the first one stored
        add_kernel[(4,)](a, b, c, 64, BLOCK=16)
        add_kernel[(2,)](c, b, d, 64, BLOCK=32)
    with counting(a=a) as t: add_kernel[(1,)](a, a, a, 64, BLOCK=64)
    assert t.missed(10**6) == t.missed(256) == 2*256 and t.missed(32) == 3*256
    p, g, m, v = (torch.ones(64) for _ in range(4))
    with counting(p=p, g=g, m=m, v=v) as t: grouped.fused_adamw_(p, g, m, v, 1)
    assert t.missed(10**6) == t.cost.bytes == 28*64


def test_a_request_is_made_of_neighbours_also_where_some_are_masked():
    if not interpreted: pytest.skip("counting needs the interpreter")
    @jit
    def every_other(x, out, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        tl.store(out + at, tl.load(x + at, mask=at % 2 == 0, other=0.))
    x, out = torch.ones(64), torch.empty(64)
    with counting(x=x, out=out) as t: every_other[(1,)](x, out, BLOCK=64)
    assert (t.requests, t.sectors) == (4, 16)


def test_bad_input_is_named(device):
    q, x = torch.ones(1, 2, 4, 8, device=device), torch.ones(4, 8, device=device)
    with expect_error(ValueError, "4 queries, but only 0 keys"): flash.flash_attention(q, q[..., :0, :], q[..., :0, :], causal=False)
    check_close(flash.flash_attention(q, q, q, window=2**40), flash.flash_attention(q, q, q), 0, 0)
    with expect_error(TypeError, "integer"): mm.matmul(x, x.T, group=1.5)
    with expect_error(TypeError, "integer"): rows.rmsnorm(x, x[0], programs=2.5)
    with expect_error(ValueError, "offsets = [0.0, 2.7"): grouped.grouped_matmul(x, torch.ones(2, 3, 8, device=device), torch.tensor([0, 2.7, 4.]))


@pytest.mark.parametrize("call", [
    lambda x: rows.rmsnorm(x, x[0]), lambda x: rows.swiglu(x, x), lambda x: rows.cross_entropy(x, torch.arange(4, device=x.device)),
    lambda x: flash.flash_attention(x[None, None], x[None, None], x[None, None]), lambda x: grouped.grouped_matmul(x, x[None], torch.tensor([0, 4]))])
def test_second_derivatives_are_refused(device, call):
    x = drawn(4, 8, device=device).requires_grad_()
    dx, = torch.autograd.grad(call(x).square().sum(), x, create_graph=True)
    with expect_error(RuntimeError, "differentiate twice"): (dx.square().sum() + call(x).sum()).backward()


def test_a_negative_size_has_no_cost():
    for cost in (lambda: rows.softmax_cost(-1, 5), lambda: flash.flash_cost(8, 8, -2), lambda: grouped.fused_adamw_cost(-3), lambda: mm.tiled_matmul_cost(4, 4, -4)):
        with expect_error(ValueError, "a size is negative"): cost()


def test_counting_leaves_nothing_behind():
    if not interpreted: pytest.skip("counting needs the interpreter")
    from triton.runtime.interpreter import InterpreterBuilder
    before = InterpreterBuilder.create_masked_load
    with expect_error(IndexError, "outside of all named arrays"):
        with counting(): vector_add(torch.ones(3), torch.ones(3))
    assert InterpreterBuilder.create_masked_load is before


def test_whoever_imports_triton_first():
    "Its own functions are interpreted all the same."
    if not interpreted: pytest.skip("on a GPU kernels are compiled")
    code = ("import triton.language, torch; from lmcourse.kernels.rows import softmax; x = torch.ones(2, 3); "
            "assert (softmax(x) - x.softmax(-1)).abs().max() < 1e-6")
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_triton_everything_imports_and_a_call_says_what_is_missing():
    code = ("import sys; sys.modules['triton'] = None\nimport torch\nfrom lmcourse.kernels.rows import softmax\nfrom lmcourse.kernels.matmul import matmul\n"
            "try: softmax(torch.ones(2, 3))\nexcept ImportError as e: print(e)")
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said == "softmax_kernel needs triton: pip install 'lmcourse[kernels]' (for Linux)\n"
    with expect_error(ImportError, "test_sum needs triton"): MissingTriton(test_sum)[(1,)]


F16, F32, I64, I32 = "*fp16", "*fp32", "*i64", "*i32"
HEAD, ROW = dict(CAUSAL=True, BQ=64, BK=64, BD=64, WIDE=False), dict(BLOCK=1024)
KERNELS = [
    ("traffic.add_kernel", (F32, F32, F32, "i32"), ROW), ("matmul.naive_matmul_kernel", (F32, F32, F32, "i32", "i32", "i32"), {}),
    ("matmul.matmul_kernel", (F16, F16, F16, "i32", "i32", "i32"), dict(BM=64, BN=64, BK=32, GROUP=8, WIDE=False)),
    ("rows.softmax_kernel", (F16, F16, "i32"), ROW), ("rows.rmsnorm_kernel", (F16, F16, F16, F32, "i32", "fp32"), ROW),
    ("rows.rmsnorm_backward_kernel", (F16, F16, F16, F32, F16, F32, "i32", "i32"), ROW),
    ("rows.cross_entropy_kernel", (F16, I64, F32, F32, "i32", "i32"), ROW),
    ("rows.swiglu_kernel", (F16, F16, F16, "i32"), ROW), ("rows.swiglu_backward_kernel", (F16, F16, F16, F16, F16, "i32"), ROW),
    ("rows.cross_entropy_backward_kernel", (F16, I64, F32, F32, F16, "i32", "i32"), ROW),
    ("flash.row_dot_kernel", (F16, F16, F32, "i32", "i32"), dict(BLOCK=64, BD=64)),
    ("grouped.adamw_kernel", (F16, F16, F32, F32, "i32") + ("fp32",)*7, ROW),
    ("grouped.grouped_kernel", (F16, F16, F16, I32, I32, I32, "i32", "i32"), dict(BM=64, BN=64, BK=32, WIDE=False))]
STEP = dict(NORM=1, SHIFT=False, BIAS=True, WIDTH=1024, ROWS=4)
def step_kernels(AHEAD):
    "The kernels of a token's step"
    return [("decode.embed_kernel", (I64, I64) + (F32,)*3 + ("i32", "fp32"), dict(PLACES=True, BLOCK=1024, AHEAD=AHEAD)),
            ("decode.project_kernel", (F32,)*8 + ("i32", "i32", "fp32"), STEP | dict(KIND="silu", GATED=True, ADD=True, AHEAD=AHEAD)),
            ("decode.heads_kernel", (F32,)*10 + (I64,) + (F32,)*3 + ("i32",)*5 + ("fp32",), STEP | dict(ROPE=True, AHEAD=AHEAD)),
            ("decode.attend_kernel", (F32,)*3 + (I64,) + (F32,)*3 + (I32, F32) + ("i32",)*4 + ("fp32",), dict(SPLITS=16, SLOTS=32, WIDE=64, AHEAD=AHEAD))]
KERNELS += step_kernels(False)
KERNELS += [("serving.paged_kernel", (F16,)*3 + (I64, F32, F32, F32, I32, F16) + ("i32",)*6 + ("fp32",), dict(SIZE=16, PARTS=4, SLOTS=64, WIDE=64)),
            ("serving.write_kernel", (F16, F16, I64, F16, F16) + ("i32",)*5, dict(SIZE=16, WIDE=64)),
            ("serving.split_k_kernel", (F16, F16, F16, F32, I32, F16) + ("i32",)*3, dict(BIAS=True, ROWS=16, BLOCK_N=64, BLOCK_K=64, PRECISION="ieee", WIDE=False))]
for window in (0, 100):
    for name, arrays in (("flash_kernel", (F16,)*4 + (F32,)), ("flash_dq_kernel", (F16,)*4 + (F32, F32, F16)), ("flash_dkv_kernel", (F16,)*4 + (F32, F32, F16, F16))):
        KERNELS.append((f"flash.{name}", arrays + ("i32",)*4 + ("fp32", "i32"), HEAD | dict(WINDOW=window)))


@pytest.mark.slow
@pytest.mark.parametrize("cc", [80, 90])
def test_all_kernels_compile_for_a_gpu_that_is_not_there(cc):
    "Products use tensor cores, and at least one program fits."
    for code in compile_kernels(Job(*k, capability=cc) for k in KERNELS):
        name = code.job.kernel
        products = any(w in name for w in (".matmul_k", ".flash_", "grouped_k", "split_k"))
        assert bool(code.count("w?g?mma")) == products and code.occupancy.blocks, name


@pytest.mark.slow
@pytest.mark.parametrize("cc,room,K,kind", [(80, 99, 64, "fp32"), (80, 99, 128, "bf16"), (80, 163, 256, "bf16"), (90, 227, 128, "fp32"), (90, 227, 256, "bf16")])
def test_tiles_of_attention_fit_into_shared_memory(cc, room, K, kind):
    "With tiles of 64 Triton refused to start heads of 256 numbers on an H100, and on a graphics card float32 and heads of 128 numbers."
    side, array = flash.tile_side(K, 2 if kind == "bf16" else 4, 1024*room), f"*{kind}"
    how = dict(WINDOW=0, CAUSAL=True, BQ=side, BK=side, BD=K, WIDE=False)
    types = dict(dq=(array,)*4 + (F32, F32, array), dkv=(array,)*4 + (F32, F32, array, array))
    for code in compile_kernels(Job(f"flash.flash_{name}_kernel", t + ("i32",)*4 + ("fp32", "i32"), how, dict(T=16, S=16, K=16), cc) for name, t in types.items()):
        assert code.shared_bytes <= 1024*room, (side, code.shared_bytes)


def test_wide_heads_get_smaller_tiles():
    for room, size, sides in ((99, 2, [64, 32, 16]), (99, 4, [32, 16, 16]), (163, 2, [64, 64, 32]), (227, 2, [64, 64, 32]), (227, 4, [64, 32, 16])):
        assert [flash.tile_side(K, size, 1024*room) for K in (64, 128, 256)] == sides


@pytest.mark.slow
def test_a_step_asks_for_its_weights_before_it_waits():
    "Most loads of a product stand before the wait in the code of an H100, no store does, and nothing is spilled"
    for code in compile_kernels(Job(*k, capability=90) for k in step_kernels(True)):
        before, wait, after = code.ptx.partition("griddepcontrol.wait")
        assert wait and not code.stack_bytes
        loads = [len(re.findall(r"ld\.global", part)) for part in (before, after)]
        assert (loads[0] > loads[1]) == ("attend" not in code.job.kernel), (code.job.kernel, loads)
        assert "st.global" not in before and "launch_dependents" in before
