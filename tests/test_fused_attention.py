"Attention on a CPU: equal to torch's in values and gradients, and out of the way where it doesn't fit."
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from lmcourse.architecture import fused_attention as page, transpose
from lmcourse.architecture.attention_torch import causal_attention
from lmcourse.architecture.fused_attention import BLOCK, COLUMNS, ROWS, attend_heads, fused_attention
from lmcourse.architecture.layers_torch import check_same
from lmcourse.architecture.transformer_torch import TransformerLM, named_parts
from lmcourse.tools.checks import check_close
from lmcourse.tools.config import ModelConfig
from lmcourse.tools.machine import compiles

pytestmark = pytest.mark.skipif(not compiles(), reason="torch's attention is used where Numba doesn't compile")


def drawn(*shape, seed=0): return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def heads(B, H, G, T, K): return drawn(B, H, T, K), drawn(B, G, T, K, seed=1), drawn(B, T, G, K, seed=2).transpose(1, 2)


@pytest.fixture
def counted(monkeypatch):
    "Lists the calls that the kernel took, not torch."
    calls, real = [], page._attend_all
    monkeypatch.setattr(page, "_attend_all", lambda *a: (calls.append(a[0].shape), real(*a)))
    return calls


@pytest.mark.parametrize("window", [None, 1, 31, 32, 33, 70, 1000])
@pytest.mark.parametrize("shape", [(2, 4, 2, 96, 32), (1, 2, 1, 128, 64), (1, 1, 1, 32, 96), (3, 2, 2, 64, 128)], ids=str)
def test_values_and_gradients(shape, window, counted):
    check_same(lambda *x: fused_attention(*x, window), lambda *x: causal_attention(*x, window), *heads(*shape), rtol=1e-4, atol=2e-5)
    assert counted


def test_heads_of_a_token_may_lie_side_by_side(monkeypatch):
    "As without RoPE: nothing is copied, and the gradients lie as the queries and keys do"
    apart, given, found = heads(2, 4, 2, 96, 32), [], []
    side_by_side = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in apart]
    upright = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in apart]       # The numbers of a key are far apart
    run = page._attend_all
    monkeypatch.setattr(page, "_attend_all", lambda *a: (given.append([x.__array_interface__["data"][0] for x in a[:3]]), run(*a)))
    for inputs in (apart, side_by_side):
        leaves = [x.detach().requires_grad_() for x in inputs]
        y = fused_attention(*leaves)
        found.append([y.detach(), *torch.autograd.grad((y*y.detach().cos()).sum(), leaves)])
        assert given[-1] == [x.data_ptr() for x in inputs]
    check_close(found[1], found[0], 1e-5, 1e-5)
    assert [g.stride() for g in found[1][1:]] == [x.stride() for x in side_by_side] and found[0][1].is_contiguous()
    for odd in (upright, [x.contiguous(memory_format=torch.channels_last) for x in apart], [upright[0], *apart[1:]], [apart[0], upright[1], apart[2]]):
        check_same(fused_attention, causal_attention, *odd, rtol=1e-4, atol=2e-5)
        leaves = [x.detach().requires_grad_() for x in odd]
        check_close(torch.autograd.grad(fused_attention(*leaves).square().sum(), leaves), torch.autograd.grad(causal_attention(*leaves).square().sum(), leaves), 1e-4, 2e-5)
    for inputs in (apart, side_by_side, upright):               # The compiler is told the same shapes and strides
        out, log_sums = page._attend(*inputs, 96)
        torch.library.opcheck(torch.ops.lmcourse.attend, (*inputs, 96), test_utils="test_faketensor")
        torch.library.opcheck(torch.ops.lmcourse.attend_backward, (drawn(*out.shape, seed=4), *inputs, out, log_sums, torch.tensor(96)), test_utils="test_faketensor")


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads(threads, monkeypatch):
    monkeypatch.setattr(transpose, "SHARED", 1)
    asked, choose = [], page.threads_for
    monkeypatch.setattr(page, "threads_for", lambda *a: (asked.append(choose(*a)), asked[-1])[1])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try: check_same(fused_attention, causal_attention, *heads(2, 4, 2, 64, 32), rtol=1e-4, atol=2e-5)
    finally: torch.set_num_threads(before)
    assert {parts for _, parts in asked} == {threads if transpose.torch_threads() else 1}


def test_large_scores_and_hidden_nan():
    q, k, v = heads(1, 2, 2, 64, 32)
    check_close(fused_attention(100*q, 100*k, v), causal_attention(100*q, 100*k, v), 1e-4, 1e-5)
    v[:, :, 40] = float("nan")                                  # a later token's numbers don't reach earlier tokens in other blocks
    y = fused_attention(q, k, v)
    assert y[:, :, :32].isfinite().all() and y[:, :, 40:].isnan().all()
    assert fused_attention(q*float("inf"), k, v)[:, :, :32].isnan().any()


def test_torch_takes_what_does_not_fit(counted):
    q, k, v = heads(1, 4, 2, 64, 32)
    fits = [(q, k, v)]
    others = [heads(1, 4, 2, 63, 32), heads(1, 4, 2, 64, 24), [x.double() for x in (q, k, v)], (q[:, :, -32:], k, v), (q[:, :, -1:], k, v),
              [x[0] for x in (q, k, v)], heads(1, 1, 1, 4128, 32)]
    for x in others: check_close(fused_attention(*x), causal_attention(*x), 0, 0)
    assert not counted
    for x in fits: fused_attention(*x)
    assert counted == [(1, 4, 64, 32)]
    with pytest.raises(ValueError, match="3 query heads can't be shared out among 2"): fused_attention(q[:, :3], k, v)


def test_the_kernel_refuses_what_it_would_read_beyond():
    q, k, v = heads(1, 4, 2, 64, 32)
    for inputs in (heads(1, 4, 2, 50, 32), heads(1, 4, 2, 64, 24), heads(1, 3, 2, 64, 32), (q, k[:, :, :32], v[:, :, :32]), (q, k, v[..., :16]), (q[0], k[0], v[0]),
                   (q.double(), k.double(), v.double())):
        with pytest.raises(ValueError, match="expected float32"): attend_heads(*inputs, 64)
    with pytest.raises(ValueError, match="window = 0"): attend_heads(q, k, v, 0)


def test_strides():
    "Queries and keys as a model without RoPE makes them, and a gradient that is no whole array."
    q, k, v = (drawn(2, 64, 4, 32, seed=i).transpose(1, 2).requires_grad_() for i in range(3))
    found = [torch.autograd.grad(f(q, k, v).sum(), (q, k, v)) for f in (fused_attention, causal_attention)]
    check_close(found[0], found[1], 1e-4, 1e-5)


def test_the_compiler_sees_an_operator():
    q, k, v = (x.requires_grad_() for x in heads(1, 4, 2, 64, 32))
    torch.library.opcheck(torch.ops.lmcourse.attend.default, (q, k, v, 40))
    y = torch.compile(fused_attention, backend="aot_eager", fullgraph=True)(q, k, v, 40)
    found = torch.autograd.grad(y.sum(), (q, k, v)), torch.autograd.grad(fused_attention(q, k, v, 40).sum(), (q, k, v))
    check_close(found[0], found[1], 0, 0)


def test_what_is_saved_for_the_backward_pass():
    "As much as torch's fused attention saves: three inputs, the output and a number per row."
    q, k, v = (x.requires_grad_() for x in heads(1, 4, 2, 64, 32))
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (sizes.append(x.numel()), x)[1], lambda x: x): attend_heads(q, k, v, 64)
    assert sum(sizes) == q.numel() + k.numel() + v.numel() + q.numel() + 4*64 + 1


@pytest.mark.parametrize("fields", [dict(), dict(window=40, qk_norm=True), dict(position="none", num_kv_heads=1), dict(copy_init=True, num_kv_heads=None)], ids=str)
def test_a_model(fields, counted):
    config = ModelConfig(**dict(vocab_size=61, context_length=96, d_model=64, num_layers=2, num_heads=2) | fields)
    ids, found = torch.randint(61, (2, 97), generator=torch.Generator().manual_seed(0)), []
    for kernels in ("torch", "fused"):
        model = TransformerLM(config, parts=named_parts(config, kernels=kernels))
        loss = model.loss(ids[:, :-1], ids[:, 1:])
        found.append([loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))])
    assert counted == [(2, 2, 96, 32)]*2
    check_close(found[1], found[0], 1e-4, 1e-5)


def test_tiles():
    from numba import njit
    a, b, c = (drawn(*shape, seed=i).numpy() for i, shape in enumerate(((ROWS + 5, 24), (24, COLUMNS + 7), (ROWS + 5, COLUMNS + 7))))
    run = njit(lambda *inputs: page.multiply_tile(*inputs))
    for first in (a, np.asfortranarray(a)):
        for add in (False, True):
            found, expected = c.copy(), c.copy()
            run(first, b, found, 5, 7, 3, 20, add)
            page.multiply_tile_naive(first, b, expected, 5, 7, 3, 20, add)
            check_close(found, expected, 1e-4, 1e-5)
            assert (found[:5] == c[:5]).all() and (found[:, :7] == c[:, :7]).all()
    assert BLOCK % ROWS == BLOCK % COLUMNS == 0
