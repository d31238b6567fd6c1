"AdamW against torch, for groups, dtypes and gradients that come and go"
import math

import pytest

torch = pytest.importorskip("torch")
from torch import nn

from lmcourse.tools.checks import check_close
from lmcourse.training.optim_torch import AdamW, adamw_step, clip_grad_norm, cosine_lr, parameter_groups

SHAPES = [(3, 4), (4,), (2, 3, 2), ()]


def make(dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=g, dtype=dtype)) for s in SHAPES]


def run(optimizer, params, steps, first=1):
    for step in range(first, first + steps):
        g = torch.Generator().manual_seed(step)
        for i, p in enumerate(params):
            p.grad = torch.randn(p.shape, generator=g, dtype=p.dtype) * 10.0 ** (-3 * i)
            if (step + i) % 3 == 0:
                p.grad = None
        optimizer.step()
    return [p.detach() for p in params]


@pytest.mark.parametrize("changes", [{}, dict(lr=0.1), dict(betas=(0.5, 0.9)), dict(betas=(0.0, 0.0)), dict(eps=1e-3), dict(weight_decay=0.5),
                                     dict(weight_decay=0.0), dict(lr=0.0)], ids=str)
@pytest.mark.parametrize("dtype, rtol", [(torch.float64, 1e-12), (torch.float32, 2e-5)], ids=str)
def test_equals_torch(changes, dtype, rtol):
    ours, theirs = make(dtype), make(dtype)
    check_close(run(AdamW(ours, **changes), ours, 20), run(torch.optim.AdamW(theirs, **changes), theirs, 20), rtol=rtol, atol=rtol / 10)


def test_equals_adamw_step_with_groups():
    kw = [dict(lr=0.1, weight_decay=0.3), dict(lr=0.01, eps=1e-2, betas=(0.3, 0.7))]
    params, loop = make(), [[p.detach(), torch.zeros_like(p), torch.zeros_like(p)] for p in make()]
    optimizer = AdamW([dict(params=params[:2], **kw[0]), dict(params=params[2:], **kw[1])])
    for step in range(1, 8):
        g = torch.Generator().manual_seed(step)
        for i, (p, s) in enumerate(zip(params, loop)):
            p.grad = torch.randn(p.shape, generator=g, dtype=p.dtype)
            s[:] = adamw_step(s[0], p.grad, s[1], s[2], step, **kw[i // 2])
        optimizer.step()
    check_close([p.detach() for p in params], [s[0].detach() for s in loop], rtol=1e-12)


def test_no_gradient_no_change():
    params = make()
    before = [p.detach().clone() for p in params]
    optimizer = AdamW(params, weight_decay=10.0)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(params, before)) and not optimizer.state


@pytest.mark.parametrize("split", [1, 7, 19])
def test_state_dict_round_trip_is_bit_equal(split):
    whole, half, resumed = make(), make(), make()
    run(AdamW(whole, lr=0.1), whole, 20)
    first = AdamW(half, lr=0.1)
    run(first, half, split)
    for p, q in zip(resumed, half):
        p.data.copy_(q)
    second = AdamW(resumed, lr=5.0, betas=(0.1, 0.1))
    second.load_state_dict(first.state_dict())
    assert all(type(s["step"]) is int for s in second.state.values())
    assert all(torch.equal(a, b) for a, b in zip(run(second, resumed, 20 - split, split + 1), whole))


def test_works_with_schedulers_and_closures():
    p = nn.Parameter(torch.tensor([3.0]))
    optimizer = AdamW([p], lr=0.5, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.5**t)

    def closure():
        optimizer.zero_grad()
        loss = (p**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 9
    scheduler.step()
    check_close(p.detach(), torch.tensor([2.5]), rtol=1e-6)
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_sparse_gradients_are_refused():
    e = nn.Embedding(4, 2, sparse=True)
    e(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="a sparse gradient"):
        AdamW(e.parameters()).step()


@pytest.mark.parametrize("changes, words", [(dict(lr=-1.0), "lr = -1.0"), (dict(eps=float("nan")), "eps = nan"), (dict(weight_decay=-0.1), "weight_decay = -0.1"),
                                            (dict(betas=(1.0, 0.9)), "betas"), (dict(betas=(0.9, -0.1)), "betas")], ids=str)
def test_numbers_out_of_range(changes, words):
    with pytest.raises(ValueError, match=words):
        AdamW(make(), **changes)
    with pytest.raises(ValueError, match=words):
        AdamW([dict(params=make(), **changes)])


def test_every_parameter_is_in_one_group():
    model = nn.Sequential(nn.Embedding(5, 3), nn.LayerNorm(3), nn.Linear(3, 5))
    model[2].weight = model[0].weight
    model[2].bias.requires_grad_(False)
    decayed, kept = parameter_groups(model, 0.2)
    assert [p is q for p, q in zip(decayed["params"] + kept["params"], [model[0].weight, model[1].weight, model[1].bias])] == [True] * 3
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.2, 0.0)


def test_schedule():
    torch_like = [cosine_lr(t, 2.0, 0.5, 10, 110) for t in range(200)]
    assert torch_like[0] == 0 and torch_like[10] == 2 and math.isclose(torch_like[60], 1.25) and set(torch_like[110:]) == {0.5}
    assert max(torch_like) == 2
    rise = [b - a for a, b in zip(torch_like[:10], torch_like[1:11])]
    assert max(rise) - min(rise) < 1e-12
    p = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([p], lr=2.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100, eta_min=0.5)
    for t in range(10, 111):
        assert math.isclose(optimizer.param_groups[0]["lr"], torch_like[t], rel_tol=1e-9)
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("limit", [1e-3, 1.0, 1e6, math.inf])
def test_clipping_equals_torch(limit):
    ours, theirs = make(torch.float32), make(torch.float32)
    for params in (ours, theirs):
        run(torch.optim.SGD(params, lr=0.0), params, 1)
    norm = clip_grad_norm((p for p in ours), limit)
    assert torch.equal(norm, nn.utils.clip_grad_norm_(theirs, limit))
    for p, q in zip(ours, theirs):
        assert (p.grad is None) == (q.grad is None)
        assert p.grad is None or torch.equal(p.grad, q.grad)
    after = math.sqrt(sum(float(p.grad.norm()) ** 2 for p in ours if p.grad is not None))
    assert after <= limit * (1 + 1e-5) and math.isclose(after, min(limit, float(norm)), rel_tol=1e-3)


def test_clipping_shows_a_gradient_that_is_not_finite():
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.tensor([1.0, float("nan")])
    assert clip_grad_norm([p], 1.0).isnan()
    with pytest.raises(ValueError, match="max_norm = nan"):
        clip_grad_norm([p], float("nan"))
