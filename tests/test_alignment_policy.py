"Policy gradients, PPO and GRPO: formulas beside the functions, on ragged random batches; and TRL's trainer where it is installed."
import math
import re
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from lmcourse.alignment.grpo import (compute_group_normalized_rewards, compute_grpo_clip_loss, compute_policy_gradient_loss, group_advantages, grpo_loss,
                                     grpo_microbatch_train_step, masked_mean, mixed_groups)
from lmcourse.alignment.policy_gradient import clipped_loss, compute_naive_policy_gradient_loss, rloo_advantages
from lmcourse.alignment.ppo import ValueHead, gae, token_rewards, value_loss


def batch(seed, B=8, T=6, dtype=torch.float64):
    "Log-probabilities now, then, and of a reference, a ragged mask and advantages of groups of 4"
    g = torch.Generator().manual_seed(seed)
    now, old, ref = (torch.randn(B, T, generator=g, dtype=dtype)*.3 - 2 for _ in range(3))
    mask = (torch.arange(T) < torch.randint(1, T + 1, (B, 1), generator=g)).to(dtype)
    return now.requires_grad_(), old, ref, mask, group_advantages(torch.randint(4, (B,), generator=g).to(dtype), 4)[:, None]


@pytest.mark.parametrize("size", [2, 3, 8])
def test_rloo_leaves_one_out(size):
    r = torch.randn(3*size, dtype=torch.float64, generator=torch.Generator().manual_seed(size))
    expected = [r[i] - (r[k*size:(k + 1)*size].sum() - r[i])/(size - 1) for k in range(3) for i in range(k*size, (k + 1)*size)]
    torch.testing.assert_close(rloo_advantages(r, size), torch.stack(expected), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(group_advantages(r, size, False)*size/(size - 1), rloo_advantages(r, size), rtol=1e-12, atol=1e-14)


def test_group_advantages_have_mean_0_and_spread_1():
    a = group_advantages(torch.arange(12.).double()**2, 4, eps=0.).view(3, 4)
    torch.testing.assert_close(a.mean(1), torch.zeros(3).double(), rtol=0, atol=1e-12)
    torch.testing.assert_close(a.std(1), torch.ones(3).double())
    assert not group_advantages(torch.full((4,), .1), 4).abs().gt(1e-6).any()


@pytest.mark.parametrize("reward, size", [(.7, 7), (100.1, 7), (1000.1, 6)])
def test_equal_rewards_have_no_advantage_even_where_their_mean_is_rounded(reward, size):
    for by in (True, False): assert not group_advantages(torch.full((size,), reward), size, by).any()


def test_scored_by_a_function():
    seen = []
    def score(response, truth): return seen.append((response, truth)) or dict(reward=len(response) - len(truth), format=1.)
    a, r, log = compute_group_normalized_rewards(score, ["aa", "a", "aaa", "a"], ["", "", "b", "b"], 2, 0., False)
    assert r.tolist() == [2, 1, 2, 0] and a.tolist() == [.5, -.5, 1, -1] and seen == [("aa", ""), ("a", ""), ("aaa", "b"), ("a", "b")]
    assert (log["reward_mean"], log["reward_max"], log["equal_groups"]) == (1.25, 2, 0)


@pytest.mark.parametrize("seed", range(5))
def test_clip_by_cases(seed):
    now, old, _, _, a = batch(seed)
    loss, held = clipped_loss(a, now, old, .1, .3)
    for b in range(8):
        for t in range(6):
            ratio, x = torch.exp(now[b, t] - old[b, t]).item(), a[b, 0].item()
            stopped = ratio > 1.3 if x > 0 else ratio < .9 if x < 0 else False
            bound = 1.3 if x > 0 else .9
            assert held[b, t].item() == stopped and loss[b, t].item() == pytest.approx(-x*(bound if stopped else ratio), rel=1e-12)
    same, log = compute_grpo_clip_loss(a, now, old, .2)
    assert torch.equal(same, clipped_loss(a, now, old, .2)[0]) and torch.equal(log["clipped"], clipped_loss(a, now, old, .2, .2)[1])


def test_on_policy_gradients_are_equal():
    now, _, _, mask, a = batch(3)
    grads = []
    for loss_type, more in (("reinforce_with_baseline", {}), ("grpo_clip", dict(old_log_probs=now.detach(), cliprange=.2))):
        now.grad = None
        grpo_microbatch_train_step(now, mask, 3, loss_type, advantages=a, **more)
        grads.append(now.grad)
    assert torch.equal(*grads) and grads[0].abs().sum() > 0
    loss, _ = compute_policy_gradient_loss(now, "no_baseline", raw_rewards=a)
    assert torch.equal(loss, compute_naive_policy_gradient_loss(a, now))


def test_micro_batches_add_up():
    now, old, _, mask, a = batch(4)
    logs = [grpo_microbatch_train_step(now[k:k + 2], mask[k:k + 2], 4, "grpo_clip", advantages=a[k:k + 2], old_log_probs=old[k:k + 2], cliprange=.1) for k in range(0, 8, 2)]
    in_parts, now.grad = now.grad, None
    whole, log = grpo_microbatch_train_step(now, mask, 1, "grpo_clip", advantages=a, old_log_probs=old, cliprange=.1)
    torch.testing.assert_close(in_parts, now.grad)
    torch.testing.assert_close(sum(l for l, _ in logs), whole)
    assert 0 < log["clip_fraction"] < 1 and not in_parts[mask == 0].any()


def test_masked_mean():
    x, mask = torch.arange(6.).view(2, 3), torch.tensor([[1, 0, 1], [0, 0, 1]])
    assert masked_mean(x, mask).item() == pytest.approx(7/3) and masked_mean(x, mask, 1).tolist() == [1, 5] and masked_mean(x, mask, 0)[0] == 0
    assert masked_mean(x, mask, 0).isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("level, average", [("token", "response"), ("token", "token"), ("token", "constant"), ("sequence", "response")])
@pytest.mark.parametrize("now, old, ref", [(-100., -100., -1.), (-1., -200., -1.), (-math.inf, -math.inf, -math.inf), (math.nan, math.nan, math.nan)])
def test_masked_tokens_change_nothing_whatever_their_log_probs_are(level, average, now, old, ref):
    mask, a = torch.tensor([[1, 1, 0]]), torch.ones(1, 1)
    def found(*last):
        x, y, z = (torch.tensor([[-1., -2., e]]) for e in last)
        x.requires_grad_()
        loss = grpo_loss(a, x, y, mask, level=level, average=average, max_length=4, ref_log_probs=z, beta=.1)
        loss.backward()
        steps = [x.detach().clone().requires_grad_() for _ in range(2)]
        for s, kind in zip(steps, ("grpo_clip", "reinforce_with_baseline")): grpo_microbatch_train_step(s, mask, 1, kind, advantages=a, old_log_probs=y, cliprange=.2)
        return loss.item(), x.grad.tolist(), [s.grad.tolist() for s in steps], token_rewards(torch.ones(1), x, z, mask, .1).tolist(), gae(torch.zeros(1, 3), x, mask)[0].tolist()
    assert found(now, old, ref) == found(0., 0., 0.)


@pytest.mark.parametrize("hidden", [math.nan, math.inf])
def test_masked_values_change_no_loss(hidden):
    def found(last):
        v, old, goal = (torch.tensor([[x, last]]) for x in (.5, .1, 1.))
        loss = value_loss(v.requires_grad_(), old, goal, torch.tensor([[1, 0]]))
        return loss.item(), torch.autograd.grad(loss, v)[0].tolist()
    assert found(hidden) == found(0.)


def test_whole_numbers_are_rewards_too():
    for f in (rloo_advantages, group_advantages): assert torch.equal(f(torch.tensor([1, 0, 0]), 3), f(torch.tensor([1., 0., 0.]), 3))


@pytest.mark.parametrize("lam", [0., .3, 1.])
def test_gae_row_by_row(lam):
    g = torch.Generator().manual_seed(0)
    r, v = torch.randn(5, 6, generator=g, dtype=torch.float64), torch.randn(5, 6, generator=g, dtype=torch.float64)
    lengths = [1, 6, 3, 4, 2]
    mask = torch.arange(6) < torch.tensor(lengths)[:, None]
    got, returns = gae(r, v, mask, .9, lam)
    for b, n in enumerate(lengths):
        delta = [r[b, t] + (.9*v[b, t + 1] if t + 1 < n else 0) - v[b, t] for t in range(n)]
        for t in range(n):
            assert got[b, t].item() == pytest.approx(sum((.9*lam)**(k - t)*delta[k].item() for k in range(t, n)), abs=1e-12)
            assert returns[b, t].item() == pytest.approx(got[b, t].item() + v[b, t].item())
        assert not got[b, n:].any() and not returns[b, n:].any()


def test_rewards_come_with_the_last_token():
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]]).bool()
    now, ref = torch.tensor([[-1., -1, 7], [-2, -2, -2]]), torch.tensor([[-1.5, -1, 3], [-1, -2, -2]])
    assert token_rewards(torch.tensor([1., 2]), now, ref, mask, .5).tolist() == [[-.25, 1, 0], [.5, 0, 2]]


def test_value_head_learns_and_its_loss_is_held():
    head, hidden, goal = ValueHead(4), torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0)), torch.ones(3, 5)
    assert not head(hidden).any()
    mask = torch.ones(3, 5)
    loss = value_loss(head(hidden), torch.zeros(3, 5), goal, mask)
    loss.backward()
    assert loss.item() == .5 and head.linear.bias.grad.item() == pytest.approx(-1)
    far = torch.full((3, 5), .5, requires_grad=True)                                 # has moved further than 0.2: no gradient
    value_loss(far, torch.zeros(3, 5), goal, mask).backward()
    assert not far.grad.any()


def test_a_fraction_in_a_mask_counts_as_a_whole_token():
    mask, one = torch.tensor([[.5, 1.]]), torch.ones(1, 2)
    assert masked_mean(one, mask).item() == masked_mean(one, mask, 1).item() == 1 and value_loss(one, one, 0*one, mask).item() == .5


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("old, a", [(-90., 0.), (-90., 1.), (-math.inf, 1.)])
def test_ratios_too_large_for_their_type_are_clipped(dtype, old, a):
    now = torch.zeros(1, 2, dtype=dtype, requires_grad=True)
    loss = grpo_loss(torch.tensor([[a]], dtype=dtype), now, torch.tensor([[old, 0.]], dtype=dtype), torch.ones(1, 2))
    loss.backward()
    assert loss.item() == pytest.approx(-1.1*a, abs=1e-3) and now.grad.tolist() == [[0, -a/2]]


L, M = torch.zeros(4, 3), torch.ones(4, 3)
BAD = [(lambda: rloo_advantages(torch.ones(4), 1), "a group of one"), (lambda: group_advantages(torch.ones(5), 2), "a multiple of 2"), (lambda: group_advantages(torch.tensor([1., float("nan")]), 2), "a reward is nan"),
       (lambda: mixed_groups(torch.ones(0), 2), "(0,) rewards"), (lambda: compute_naive_policy_gradient_loss(torch.ones(4), L), "advantages (4,)"), (lambda: clipped_loss(M, L, L[:2]), "(2, 3)"), (lambda: clipped_loss(M, L, L, -.1), "clip by -0.1"),
       (lambda: compute_policy_gradient_loss(L, "grpo-clip"), "'grpo-clip'"), (lambda: compute_policy_gradient_loss(L, "reinforce_with_baseline", raw_rewards=M), "needs advantages"), (lambda: grpo_loss(M, L, L, 0*M), "a response has no tokens"),
       (lambda: grpo_loss(M, L, L, M, average="constant", max_length=0), "max_length = 0"), (lambda: grpo_loss(M, L, L, M, average="constant", max_length=-5), "max_length = -5"), (lambda: grpo_microbatch_train_step(L, M, 0, "no_baseline", M), "steps = 0"), (lambda: gae(L, L, M, 1.1), "gamma = 1.1"),
       (lambda: token_rewards(L[:, 0], L, L, 0*M.bool(), 1.), "no tokens"), (lambda: value_loss(L, L, L, 0*M), "no token"),
       (lambda: value_loss(L, L, L, M, -.2), "clip = -0.2"), (lambda: value_loss(L, L, L, M, math.nan), "clip = nan"), (lambda: token_rewards(torch.ones(8), L, L, M, 1.), "rewards (8,)"),
       (lambda: token_rewards(L[:, 0], L, L[:1], M, 1.), "reference (1, 3)"), (lambda: token_rewards(L[:, :1], L, L, M, 1.), "rewards (4, 1)")]


@pytest.mark.parametrize("f, words", BAD, ids=[w for _, w in BAD])
def test_bad_input_is_rejected(f, words):
    with pytest.raises(ValueError, match=re.escape(words)): f()


@pytest.mark.parametrize("size", range(2, 12))
def test_equal_rewards_give_no_advantage_at_all(size):
    rewards = torch.tensor([.1, 1/3, 1e6 + .1]).repeat_interleave(size) # The mean of seven times 0.1 is rounded; Adam would make a whole step of the rest
    for f in (rloo_advantages, group_advantages): assert not f(rewards, size).any()


def test_a_reference_without_weight_changes_nothing():
    now, old = torch.tensor([[-200., -1.]], requires_grad=True), torch.tensor([[-200.1, -1.1]]) # Where k3 overflows, 0 times infinity would be NaN
    with_ref, without = (grpo_loss(torch.ones(1, 1), now, old, torch.ones(1, 2), ref_log_probs=ref) for ref in (torch.tensor([[-1., -1.]]), None))
    assert with_ref == without and torch.equal(*(torch.autograd.grad(x, now)[0] for x in (with_ref, without)))


# TRL

def trl_loss(now, old, ref, mask, a, loss_type, level, beta, max_length=9):
    "Of the trainer's own method, on a stand-in that has only what it reads"
    trl = pytest.importorskip("trl", "1.16")
    same = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, gather_for_metrics=lambda x: x)
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (now, torch.zeros_like(now), None), aux_loss_enabled=False, top_entropy_quantile=1., off_policy_mask_threshold=None, importance_sampling_level=level, beta=beta,
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1), loss_type=loss_type, epsilon_low=.2, epsilon_high=.28, use_vllm=False, model=SimpleNamespace(training=True), current_gradient_accumulation_steps=1,
        max_completion_length=max_length, accelerator=same, _entropy_bonus_enabled=False, _metrics=dict(train=defaultdict(list)))
    B, T = now.shape
    inputs = dict(prompt_ids=torch.zeros(B, 2).long(), prompt_mask=torch.ones(B, 2).long(), completion_ids=torch.zeros(B, T).long(), completion_mask=mask, advantages=a[:, 0], old_per_token_logps=old, ref_per_token_logps=ref,
                  num_items_in_batch=mask.sum())
    return trl.GRPOTrainer._compute_loss(trainer, None, inputs)


AVERAGES = dict(grpo="response", bnpo="token", dapo="token", dr_grpo="constant")


@pytest.mark.parametrize("loss_type", AVERAGES)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("beta", [0., .1])
def test_equal_to_trl(loss_type, level, beta):
    for seed in range(20):
        now, old, ref, mask, a = batch(seed)
        theirs = trl_loss(now, old, ref, mask, a, loss_type, level, beta)
        their_grad, = torch.autograd.grad(theirs, now)
        def ours(**other):
            how = dict(low=.2, high=.28, level=level, average=AVERAGES[loss_type], max_length=9, ref_log_probs=ref, beta=beta) | other
            return grpo_loss(a, now, old, mask, **how)
        torch.testing.assert_close(ours(), theirs, rtol=0, atol=1e-6)
        torch.testing.assert_close(torch.autograd.grad(ours(), now)[0], their_grad, rtol=0, atol=1e-6)
    wrong = [ours(beta=beta + .1), ours(average="response" if loss_type != "grpo" else "token"), ours(level="token" if level == "sequence" else "sequence")]
    for w in wrong: assert abs((w - theirs).item()) > 1e-4 or (torch.autograd.grad(w, now)[0] - their_grad).abs().max() > 5e-3
