"AdamW and Muon against torch, SGD and schedules against formulas, for groups, dtypes and gradients that come and go"
import itertools
import json
import math

import pytest
from hypothesis import given, settings, strategies as st

torch = pytest.importorskip("torch")
from torch import nn

from lmcourse.tools.checks import check_close
from lmcourse.training.checkpoint import load_checkpoint, save_checkpoint
from lmcourse.training import optim_torch
from lmcourse.training.optim_torch import (NEWTON_SCHULZ, SGD, AdamW, EarlyStop, Muon, Plateau, adamw_algorithm_1, adamw_step, clip_grad_norm,
                                           cosine_lr, learning_rate, muon_groups, on_one_device, orthogonalize, parameter_groups)

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


@pytest.mark.parametrize("dtype, rtol", [(torch.float64, 1e-12), (torch.float32, 2e-5)], ids=str)
def test_the_step_of_a_gpu_is_the_same_in_one_pass(monkeypatch, dtype, rtol):
    "By torch's fused kernel, which a processor has as well. Elsewhere it is never taken"
    one, many = make(dtype), make(dtype)
    kw = dict(lr=.1, betas=(.8, .9), eps=1e-3, weight_decay=.3)
    expected, calls, real = run(AdamW(many, **kw), many, 7), [], optim_torch.fused_step_
    monkeypatch.setattr(optim_torch, "fused_step_", lambda params, *rest, **how: (calls.append(len(params)), real(params, *rest, **how)))
    assert not on_one_device(one) and not on_one_device([])
    monkeypatch.setattr(optim_torch, "on_one_device", lambda params: True)
    check_close(run(AdamW(one, **kw), one, 7), expected, rtol=rtol, atol=rtol/10)
    assert len(calls) == 7 and all(a is not b for a, b in zip(one, many))


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
    for _ in range(2): second.load_state_dict(first.state_dict())
    assert all(type(s["step"]) is int for s in second.state.values())
    assert all(torch.equal(a, b) for a, b in zip(run(second, resumed, 20 - split, split + 1), whole))


def through_a_file(first, params, second, fresh, folder):
    named = lambda params: nn.ParameterDict({f"p{i}": p for i, p in enumerate(params)})
    save_checkpoint(named(params), first, 7, folder/"saved")
    load_checkpoint(folder/"saved", named(fresh), second)


def through_a_dict(first, params, second, fresh, folder):
    for p, q in zip(fresh, params): p.data.copy_(q.detach())
    second.load_state_dict(first.state_dict())


@pytest.mark.parametrize("pass_on", [through_a_file, through_a_dict])
@pytest.mark.parametrize("makes", [(AdamW, torch.optim.AdamW), (torch.optim.AdamW, AdamW)], ids=["to torch", "from torch"])
def test_the_state_of_adamw_goes_to_torch_and_comes_from_there(makes, pass_on, tmp_path):
    "Torch counts steps in tensors"
    whole, half, fresh = make(), make(), make()
    run(AdamW(whole, lr=0.1), whole, 20)
    first, second = makes[0](half, lr=0.1), makes[1](fresh, lr=5.0)
    run(first, half, 7)
    pass_on(first, half, second, fresh, tmp_path)
    check_close(run(second, fresh, 13, 8), [p.detach() for p in whole], rtol=1e-11, atol=1e-12)
    kind = int if makes[1] is AdamW else torch.Tensor
    assert all(isinstance(s["step"], kind) for s in second.state.values())


@pytest.mark.parametrize("pass_on", [through_a_file, through_a_dict])
@pytest.mark.parametrize("other, words", [
    (lambda p: torch.optim.AdamW(p, amsgrad=True), "AdamW: a state with amsgrad = True, which is not computed here"),
    (lambda p: torch.optim.AdamW(p, maximize=True), "AdamW: a state with maximize = True"),
    (lambda p: torch.optim.RAdam(p, weight_decay=.1), "AdamW: a state of an optimizer whose weight decay is part of the gradient|the optimizer is RAdam there"),
    (lambda p: torch.optim.SGD(p, momentum=.9), "AdamW: a state without betas|the optimizer is SGD there, AdamW here")])
def test_a_state_of_another_rule_is_refused(other, words, pass_on, tmp_path):
    params, fresh = make(), make()
    first, second = other(params), AdamW(fresh)
    run(first, params, 2)
    run(second, fresh, 3)
    before = [{k: v.clone() if torch.is_tensor(v) else v for k, v in s.items()} for s in second.state.values()]
    weights = [p.detach().clone() for p in fresh]
    with pytest.raises(ValueError, match=words): pass_on(first, params, second, fresh, tmp_path)
    check_close(list(second.state.values()), before, 0, 0)
    if pass_on is through_a_file: check_close([p.detach() for p in fresh], weights, 0, 0)


def test_muon_and_adamw_take_no_state_of_each_other():
    params, fresh = [[nn.Parameter(torch.ones(3, 2))] for _ in range(2)]
    run(first := AdamW(params), params, 2)
    with pytest.raises(ValueError, match="Muon: a state without orthogonal"): Muon(all_orthogonal(fresh)).load_state_dict(first.state_dict())
    run(second := Muon(all_orthogonal(fresh)), fresh, 2)
    with pytest.raises(ValueError, match="AdamW: a state with orthogonal: another optimizer's"): first.load_state_dict(second.state_dict())


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


def test_clipping_leaves_gradients_alone_if_their_length_is_not_finite():
    for bad in (math.nan, math.inf, -math.inf, 3e38):       # The square of the last one is too large for float32
        params = [nn.Parameter(torch.ones(2)) for _ in range(3)]
        for p, g in zip(params, ([1.0, bad], [5.0, 6.0])):
            p.grad = torch.tensor(g)
        before = [p.grad.clone() for p in params[:2]]
        norm = clip_grad_norm((p for p in params), 1.0)
        if bad == 3e38 and norm.isfinite():
            continue
        assert not norm.isfinite()
        for p, g in zip(params, before):
            assert torch.equal(p.grad.nan_to_num(7.0), g.nan_to_num(7.0))


def test_clipping_takes_dtypes_together_and_measures_without_a_limit():
    params = [nn.Parameter(torch.ones(2, dtype=t)) for t in (torch.float32, torch.bfloat16)]
    for p in params:
        p.grad = torch.tensor([3.0, 4.0], dtype=p.dtype)
    assert math.isclose(float(clip_grad_norm(iter(params), math.inf)), math.sqrt(50), rel_tol=1e-2)
    assert all(torch.equal(p.grad, torch.tensor([3.0, 4.0], dtype=p.dtype)) for p in params)
    clip_grad_norm(iter(params), 1.0)
    assert math.isclose(sum(float(p.grad.float().norm()) ** 2 for p in params), 1, rel_tol=2e-2)


# SGD

@settings(max_examples=40, deadline=None)
@given(lr=st.floats(0, 300), n=st.integers(1, 40), steps=st.integers(0, 30), seed=st.integers(0, 99))
def test_sgd_is_its_closed_form(lr, n, steps, seed):
    weights = nn.Parameter(torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))
    expected, optimizer = weights.detach().clone(), SGD([weights], lr)
    for k in range(1, steps + 1):
        optimizer.zero_grad()
        (weights**2).mean().backward()
        optimizer.step()
        size = abs(expected).max()
        expected = expected * (1 - 2 * lr / (n * math.sqrt(k)))
        assert not size > 0 or (abs(expected).max() > size * (1 + 1e-9)) == (k < (lr / n) ** 2 * (1 - 1e-9)) or math.isclose(k, (lr / n) ** 2, rel_tol=1e-6)
    scale = float(abs(expected).max()) + math.prod(max(1, abs(1 - 2 * lr / (n * math.sqrt(k)))) for k in range(1, steps + 1))
    check_close(weights.detach(), expected, rtol=1e-9, atol=1e-13 * scale)


def test_sgd_counts_a_parameters_own_steps_and_takes_groups():
    one, other = (nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimizer = SGD([dict(params=[one]), dict(params=[other], lr=8.0)], lr=1.0)
    for step in range(1, 5):
        one.grad, other.grad = torch.ones(1), torch.ones(1) if step in (2, 4) else None
        optimizer.step()
    check_close(one.detach(), torch.tensor([-sum(k**-0.5 for k in range(1, 5))]))
    check_close(other.detach(), torch.tensor([-8 * (1 + 2**-0.5)]))
    with pytest.raises(ValueError, match="SGD: lr = -1.0, expected 0 or more"): SGD([dict(params=[one], lr=-1.0)])
    again = SGD([dict(params=[one]), dict(params=[other], lr=8.0)], lr=1.0)
    again.load_state_dict(optimizer.state_dict())
    assert [again.state[p]["step"] for p in (one, other)] == [4, 2]
    with pytest.raises(ValueError, match="lr = nan"):
        SGD([one], lr=math.nan)


# The two forms of AdamW

numbers = dict(t=st.integers(1, 2000), lr=st.floats(1e-5, 0.5), b1=st.sampled_from([0.0, 0.9]), b2=st.sampled_from([0.0, 0.95, 0.999]),
               eps=st.sampled_from([1e-8, 1e-3, 1.0]), decay=st.sampled_from([0.0, 0.1, 1.0]), seed=st.integers(0, 99))

def test_there_is_no_step_before_the_first():
    for step in (lambda: cosine_lr(-1, 1., 0., 3, 10), *(lambda shape=shape: learning_rate(-1, 1., 0., 3, 10, shape=shape) for shape in ("cosine", "constant"))):
        with pytest.raises(ValueError, match="step = -1, expected 0 or more"): step()
    for t in (0, -1):
        with pytest.raises(ValueError, match=f"adamw_step: t = {t}, expected 1 or more"): adamw_step(*torch.ones(4, 2), t=t)


@settings(max_examples=60, deadline=None)
@given(**numbers)
def test_the_two_forms_differ_in_eps_and_in_a_share_of_the_step(t, lr, b1, b2, eps, decay, seed):
    theta, grad, m, v = torch.randn(4, 20, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    hat, kw = eps / math.sqrt(1 - b2**t), dict(t=t, lr=lr, betas=(b1, b2))
    one, *means = adamw_algorithm_1(theta, grad, m, v.abs(), eps=eps, weight_decay=decay, **kw)
    other, *same = adamw_step(theta, grad, m, v.abs(), eps=hat, weight_decay=decay, **kw)
    step = theta - adamw_step(theta, grad, m, v.abs(), eps=hat, weight_decay=0, **kw)[0]
    check_close(means, same, rtol=0, atol=0)
    check_close(one - other, lr * decay * step, rtol=1e-8, atol=1e-13)


def test_a_step_leaves_its_arguments_alone():
    for form in (adamw_step, adamw_algorithm_1):
        arguments = [torch.full((3,), x) for x in (1.0, 2.0, 3.0, 4.0)]
        form(*arguments, 1)
        check_close(arguments, [torch.full((3,), x) for x in (1.0, 2.0, 3.0, 4.0)], rtol=0, atol=0)


# Schedules

@st.composite
def schedules(draw):
    steps = draw(st.integers(1, 60))
    warmup = draw(st.integers(0, steps))
    low = draw(st.sampled_from([0.0, 0.01, 0.3]))
    return dict(lr=draw(st.floats(low, 2)), min_lr=low, warmup_steps=warmup, steps=steps, cooldown_steps=draw(st.integers(0, steps - warmup)),
                scale=draw(st.sampled_from([1.0, 0.5, 0.0])), shape=draw(st.sampled_from(["cosine", "constant"])))

@settings(max_examples=200, deadline=None)
@given(schedules())
def test_learning_rate(s):
    rates = [learning_rate(t, **s) for t in range(s["steps"] + 5)]
    peak, begin = max(s["min_lr"], s["lr"] * s["scale"]), s["steps"] - s["cooldown_steps"]
    assert all(0 <= r <= peak + 1e-12 for r in rates) and all(r >= s["min_lr"] - 1e-12 for r in rates[s["warmup_steps"]:])
    check_close(rates[:s["warmup_steps"]], [peak * t / s["warmup_steps"] for t in range(s["warmup_steps"])], rtol=1e-12, atol=1e-12)
    plain = s | dict(cooldown_steps=0)
    assert rates[:begin + 1] == [learning_rate(t, **plain) for t in range(begin + 1)] or s["cooldown_steps"] == 0
    if s["shape"] == "cosine" and s["scale"] == 1 and s["cooldown_steps"] == 0:
        assert rates == [cosine_lr(t, s["lr"], s["min_lr"], s["warmup_steps"], s["steps"]) for t in range(len(rates))]
    if s["cooldown_steps"]:
        ways = [a - b for a, b in zip(rates[begin:s["steps"]], rates[begin + 1:s["steps"] + 1])]
        check_close(ways, [(rates[begin] - s["min_lr"]) / s["cooldown_steps"]] * len(ways), rtol=1e-9, atol=1e-12)
    if s["shape"] == "cosine" or s["cooldown_steps"]:
        check_close(rates[s["steps"]:], [s["min_lr"]] * 5, rtol=1e-12, atol=1e-12)
    else:
        assert set(rates[s["steps"]:]) == {peak}


@pytest.mark.parametrize("changes, words", [(dict(warmup_steps=8, cooldown_steps=3), "cooldown_steps = 3"), (dict(cooldown_steps=-1), "cooldown_steps = -1"),
                                            (dict(warmup_steps=-1), "warmup_steps = -1"), (dict(scale=math.nan), "scale = nan"),
                                            (dict(scale=-1.0), "scale = -1.0"), (dict(shape="linear"), "shape = 'linear'")], ids=str)
def test_schedules_that_make_no_sense(changes, words):
    with pytest.raises(ValueError, match=words):
        learning_rate(1, **(dict(lr=1.0, min_lr=0.0, warmup_steps=1, steps=10) | changes))


losses = st.lists(st.one_of(st.floats(0, 3), st.sampled_from([1.0, 1.1, 1.2, math.nan, math.inf])), min_size=1, max_size=40)

@settings(max_examples=150, deadline=None)
@given(losses=losses, patience=st.integers(1, 5), factor=st.sampled_from([0.5, 0.1]), min_delta=st.sampled_from([0.0, 0.1]), split=st.integers(0, 40))
def test_plateau_is_torchs_with_one_less(losses, patience, factor, min_delta, split):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    rule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=factor, patience=patience - 1, threshold=min_delta, threshold_mode="abs", eps=0)
    ours, expected, found = Plateau(patience, factor, min_delta), [], []
    for i, loss in enumerate(losses):
        if i == split:
            kept = json.loads(json.dumps(ours.state(), allow_nan=False))
            ours = Plateau(patience, factor, min_delta)
            ours.load(kept)
        rule.step(loss)
        expected.append(optimizer.param_groups[0]["lr"])
        found.append(ours.see(loss))
    check_close(found, expected, rtol=1e-12)


@settings(max_examples=150, deadline=None)
@given(losses=losses, patience=st.one_of(st.none(), st.integers(1, 5)), min_delta=st.sampled_from([0.0, 0.1]),
       target=st.sampled_from([None, 0.5]), split=st.integers(0, 40))
def test_early_stop(losses, patience, min_delta, target, split):
    ours, best, last, expected = EarlyStop(patience, min_delta, target), math.inf, -1, None
    for i, loss in enumerate(losses):
        if i == split:
            kept = json.loads(json.dumps(ours.state(), allow_nan=False))
            ours = EarlyStop(patience, min_delta, target)
            ours.load(kept)
        if loss < best - min_delta:
            best, last = loss, i
        if expected is None and target is not None and loss <= target:
            expected = "target"
        if expected is None and patience is not None and i - last >= patience:
            expected = f"in {patience} evaluation"
        reason = ours.see(loss)
        assert reason == ours.reason and (reason is None) == (expected is None) and (expected or "") in (reason or "")


def test_rules_refuse_what_makes_no_sense():
    for make in (lambda: Plateau(0, 0.5), lambda: Plateau(None, 0.5), lambda: Plateau(1, 1.0), lambda: Plateau(1, 0.0), lambda: Plateau(1, math.nan),
                 lambda: Plateau(1, 0.5, -1.0), lambda: EarlyStop(0), lambda: EarlyStop(1, math.nan)):
        with pytest.raises(ValueError, match="Plateau|EarlyStop"):
            make()
    with pytest.raises(ValueError, match="a state of"):
        EarlyStop(1).load(Plateau(1, 0.5).state())


# Muon

SIZES = ((12, 8), (8, 12), (8, 8), (1, 5), (5, 1))

def muon_steps(make, dtype=torch.float32, steps=6):
    g = torch.Generator().manual_seed(3)
    params = [nn.Parameter(torch.randn(s, generator=g).to(dtype)) for s in SIZES]
    optimizer = make(params)
    for step in range(steps):
        for i, p in enumerate(params):
            p.grad = None if (step + i) % 4 == 3 else torch.randn(p.shape, generator=g).to(dtype) * 10.0**-i
        optimizer.step()
    return [p.detach() for p in params], optimizer


def all_orthogonal(params): return [dict(params=params, orthogonal=True)]


OPTIONS = [dict(nesterov=n, adjust_lr_fn=f, momentum=m, weight_decay=w, lr=0.1)
           for n, f, m, w in itertools.product((True, False), ("original", "match_rms_adamw"), (0.95, 0.0), (0.3, 0.0))]

@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16), ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_muon_in_bfloat16_is_torchs_to_the_bit(options, dtype):
    if dtype == torch.bfloat16 and not options["nesterov"]:
        pytest.skip("torch 2.13 divides the momentum itself by its length here (pytorch pull request 194664)")
    ours, one = muon_steps(lambda p: Muon(all_orthogonal(p), dtype="bfloat16", **options), dtype)
    theirs, other = muon_steps(lambda p: torch.optim.Muon(p, **options), dtype)
    check_close(ours, theirs, rtol=0, atol=0)
    for a, b in zip(one.state.values(), other.state.values()):
        assert a.keys() == b.keys() and torch.equal(a["momentum_buffer"], b["momentum_buffer"])


def test_muon_in_float64_is_its_formula():
    lr, mu, decay = 0.1, 0.9, 0.3
    ours, _ = muon_steps(lambda p: Muon(all_orthogonal(p), lr=lr, momentum=mu, weight_decay=decay, adjust_lr_fn="original"), torch.float64)
    g = torch.Generator().manual_seed(3)
    params = [torch.randn(s, generator=g).double() for s in SIZES]
    sums = [torch.zeros_like(p) for p in params]
    for step in range(6):
        for i, p in enumerate(params):
            if (step + i) % 4 == 3: continue
            grad = torch.randn(p.shape, generator=g).double() * 10.0**-i
            sums[i] = mu * sums[i] + grad
            u, x, vh = torch.linalg.svd(grad + mu * sums[i], full_matrices=False)
            x = x / x.norm()
            for _ in range(5): x = NEWTON_SCHULZ[0] * x + NEWTON_SCHULZ[1] * x**3 + NEWTON_SCHULZ[2] * x**5
            params[i] = (1 - lr * decay) * p - lr * math.sqrt(max(1, p.shape[0] / p.shape[1])) * (u * x @ vh)
    check_close(ours, params, rtol=1e-8, atol=1e-9)


@settings(max_examples=50, deadline=None)
@given(m=st.integers(1, 12), n=st.integers(1, 12), seed=st.integers(0, 99), scale=st.sampled_from([1e-6, 1.0, 1e6]))
def test_orthogonalize_moves_singular_values_alone(m, n, seed, scale):
    matrix = torch.randn(m, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale
    before, after = matrix.clone(), orthogonalize(matrix)
    assert after.shape == matrix.shape and torch.equal(matrix, before)
    u, x, vh = torch.linalg.svd(matrix, full_matrices=False)
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5): x = NEWTON_SCHULZ[0] * x + NEWTON_SCHULZ[1] * x**3 + NEWTON_SCHULZ[2] * x**5
    check_close(after, u * x @ vh, rtol=1e-8, atol=1e-9)
    check_close(orthogonalize(matrix, steps=0), matrix / matrix.norm().clamp(min=1e-7), rtol=1e-12)


def test_orthogonalize_takes_zeros_and_refuses_vectors():
    assert torch.equal(orthogonalize(torch.zeros(3, 4)), torch.zeros(3, 4))
    for shape in ((3,), (2, 3, 4), ()):
        with pytest.raises(ValueError, match="expected two axes"):
            orthogonalize(torch.ones(shape))


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        g = torch.Generator().manual_seed(0)
        make = lambda *shape: nn.Parameter(torch.randn(shape, generator=g))
        self.token_embeddings = nn.ParameterDict(dict(weight=make(5, 4)))
        self.layers = nn.ModuleList([nn.ParameterDict(dict(w=make(4, 4), wide=make(6, 4), gain=make(4))), nn.ParameterDict(dict(w=make(4, 4)))])
        self.lm_head = nn.ParameterDict(dict(weight=make(5, 4)))


def tiny_steps(model, optimizer, steps, first=1):
    for step in range(first, first + steps):
        g = torch.Generator().manual_seed(step)
        for p in model.parameters(): p.grad = torch.randn(p.shape, generator=g)
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_muon_moves_blocks_and_adamw_the_rest():
    model, alone, plain = Tiny(), Tiny(), Tiny()
    groups = muon_groups(model, 0.2)
    assert [[tuple(p.shape) for p in g["params"]] for g in groups] == [[(4, 4), (6, 4), (4, 4)], [(5, 4), (5, 4)], [(4,)]]
    assert [g["weight_decay"] for g in groups] == [0.2, 0.2, 0.0]
    both = tiny_steps(model, Muon(groups, lr=0.1, betas=(0.8, 0.9)), 4)
    muon = tiny_steps(alone, Muon(muon_groups(alone, 0.2)[:1], lr=0.1), 4)
    adamw = tiny_steps(plain, AdamW(parameter_groups(plain, 0.2), lr=0.1, betas=(0.8, 0.9)), 4)
    for name, p in both.items():
        hidden = name in ("layers.0.w", "layers.0.wide", "layers.1.w")
        assert torch.equal(p, (muon if hidden else adamw)[name]) and not torch.equal(p, (adamw if hidden else muon)[name])


def test_muon_without_groups_is_adamw():
    ours, theirs = make(), make()
    check_close(run(Muon(ours, lr=0.1, weight_decay=0.01), ours, 5), run(AdamW(theirs, lr=0.1), theirs, 5), rtol=0, atol=0)


def test_muon_groups_of_wrapped_and_frozen_models():
    wrapped = nn.Module()
    wrapped._orig_mod = Tiny()
    wrapped._orig_mod.layers[1]["w"].requires_grad_(False)
    assert [len(g["params"]) for g in muon_groups(wrapped, 0.1)] == [2, 2, 1]
    with pytest.raises(ValueError, match="no matrix in 'layers'"):
        muon_groups(nn.Linear(2, 2), 0.1)


def test_muon_goes_on_from_a_checkpoint(tmp_path):
    whole = Tiny()
    expected = tiny_steps(whole, Muon(muon_groups(whole, 0.1), lr=0.1), 6)
    model = Tiny()
    optimizer = Muon(muon_groups(model, 0.1), lr=0.1)
    tiny_steps(model, optimizer, 3)
    save_checkpoint(model, optimizer, 3, path := tmp_path/"saved")
    again = Tiny()
    resumed = Muon(muon_groups(again, 0.7), lr=5.0, dtype="bfloat16")
    assert load_checkpoint(path, again, resumed) == 3
    found = tiny_steps(again, resumed, 3, first=4)
    assert all(torch.equal(p, found[name]) for name, p in expected.items())


@pytest.mark.parametrize("changes, words", [(dict(momentum=1.0), "momentum = 1.0"), (dict(adjust_lr_fn="none"), "adjust_lr_fn 'none'"),
                                            (dict(lr=-1.0), "Muon: lr = -1.0"), (dict(dtype="bfloat"), "dtype 'bfloat'")], ids=str)
def test_muon_numbers_out_of_range(changes, words):
    with pytest.raises(ValueError, match=words):
        Muon(all_orthogonal([nn.Parameter(torch.ones(2, 2))]), **changes)


def test_muon_refuses_vectors_and_sparse_gradients():
    with pytest.raises(ValueError, match=r"shape \(3,\), expected two axes"):
        Muon(all_orthogonal([nn.Parameter(torch.ones(3))]))
    optimizer = Muon(all_orthogonal([nn.Parameter(torch.ones(3, 2))]))
    with pytest.raises(ValueError, match=r"shape \(3,\)"): optimizer.add_param_group(dict(params=[nn.Parameter(torch.ones(3))], orthogonal=True))
    assert len(optimizer.param_groups) == 1
    e = nn.Embedding(4, 2, sparse=True)
    e(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="a sparse gradient"):
        Muon(all_orthogonal(e.parameters())).step()


def test_gradients_that_are_shared_out_are_clipped_by_the_length_of_all(monkeypatch):
    "What torch 2.9 leaves of a sharded gradient's length is a part, until `full_tensor` is asked for: here half of it."
    class Part(torch.Tensor):
        def full_tensor(self): return 2*self.as_subclass(torch.Tensor)
    whole = torch.linalg.vector_norm
    monkeypatch.setattr(torch.linalg, "vector_norm", lambda x: (whole(x)/2).as_subclass(Part))
    p = torch.nn.Parameter(torch.zeros(2))
    p.grad = torch.tensor([3., 4.])
    assert float(clip_grad_norm([p], 1.)) == 5 and torch.allclose(p.grad, torch.tensor([.6, .8]))


def test_a_step_only_if_the_norm_is_a_number():
    "By the fused kernel, whatever `one_pass` says; Muon can't"
    from lmcourse.training.optim_torch import AdamW, Muon
    for norm, moves in ((2., True), (float("nan"), False), (float("inf"), False)):
        p, q = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
        p.grad, q.grad = torch.full((3,), norm), torch.full((3,), norm)
        a, b = AdamW([p]), AdamW([q])
        a.step_if_finite(p.grad.norm())
        b.one_pass = True
        b.step()
        assert torch.equal(p, q if moves else torch.ones(3)) and a.found_inf is None and a.state[p]["step"] == 1
        assert bool(a.state[p]["exp_avg"].any()) == moves
        if not moves: a.uncount(1)
        assert a.state[p]["step"] == moves
    with pytest.raises(TypeError, match="step_if_finite: Muon can't"): Muon([p]).step_if_finite(torch.ones(()))
