"The enumerable world: its optimum, expected gradients, estimators of KL and best of n, on other seeds and prices than the page's."
import math
import re
from itertools import product

import numpy as np
import pytest
import torch

from lmcourse.alignment.toy import backward_induction, best_of_n, descend, expected_gradient, kl_estimators, kl_optimum, parrot, reverse_kl_optimum, total_variation

WORLDS = [(0, .25), (1, .05), (2, 2.)]


def table(toy, seed=0): return toy.ref + torch.randn(toy.ref.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def kl(a, b): return (a*(a.log() - b.log())).sum()


@pytest.mark.parametrize("seed, beta", WORLDS)
def test_the_optimum_is_the_best_of_all_policies(seed, beta):
    toy = parrot(seed, beta)
    best = toy.optimum()
    top = toy.objective(toy.table(best))
    for k in range(5):
        p = toy.probs(table(toy, k))
        torch.testing.assert_close(top - toy.objective(toy.table(p)), beta*kl(p, best), rtol=1e-8, atol=1e-12)
        torch.testing.assert_close(p, toy.probs(toy.table(p)), rtol=1e-10, atol=1e-15)
    assert abs(best.sum().item() - 1) < 1e-12 and len(set(toy.texts)) == 121


@pytest.mark.parametrize("seed, beta", WORLDS)
def test_each_loss_has_no_gradient_at_its_own_target(seed, beta):
    toy = parrot(seed, beta)
    ref = toy.log_probs(toy.ref)
    def loss(name, tokens):
        def f(x):
            k = kl_estimators(x, ref)[name].sum(1) if tokens else kl_estimators(x.sum(1), ref.sum(1))[name]
            return -toy.rewards*x.sum(1) + beta*k
        return f
    targets = {("k2", False): toy.optimum(), ("k2", True): backward_induction(toy, kl_optimum), ("k3", True): backward_induction(toy, reverse_kl_optimum), ("k3", False): reverse_kl_optimum(ref.sum(1), toy.rewards, beta)}
    for (name, tokens), target in targets.items():
        for other_name, other_tokens in targets:
            size = expected_gradient(toy, toy.table(target), loss(other_name, other_tokens)).abs().max()
            assert (size < 1e-9) == ((name, tokens) == (other_name, other_tokens)), (name, tokens, other_name, other_tokens, size)


def test_gradients_of_the_estimators():
    toy = parrot(3)
    ref = toy.probs(toy.ref)
    x = table(toy).requires_grad_()
    forward, = torch.autograd.grad(kl(toy.probs(x), ref), x)
    x = table(toy).requires_grad_()
    reverse, = torch.autograd.grad(kl(ref, toy.probs(x)), x)
    got = {k: expected_gradient(toy, x, lambda l: kl_estimators(l.sum(1), ref.log())[k]) for k in ("k1", "k2", "k3")}
    for k, right in dict(k1=0*forward, k2=forward, k3=reverse).items(): torch.testing.assert_close(got[k], right, rtol=0, atol=1e-14)


def test_descent_reaches_the_optimum():
    toy = parrot(5)
    def loss(x): return -(toy.rewards - toy.beta*(x.sum(1) - toy.log_probs(toy.ref).sum(1)).detach())*x.sum(1)
    trail = descend(toy, loss, 600)
    assert total_variation(toy.probs(trail[-1]), toy.optimum()) < 1e-4 < .1 < total_variation(toy.probs(trail[0]), toy.optimum()) and len(trail) == 61
    assert torch.equal(trail[0], toy.ref)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_best_of_n_counts_as_enumeration_does(n):
    p, r = torch.tensor([.1, .2, .3, .4], dtype=torch.float64), torch.tensor([1., 0., 1., 2.], dtype=torch.float64)
    counted = torch.zeros(4, dtype=torch.float64)
    for drawn in product(range(4), repeat=n):
        weight, best = math.prod(p[i].item() for i in drawn), max(r[i].item() for i in drawn)
        winners = [i for i in drawn if r[i] == best]
        for i in winners: counted[i] += weight/len(winners)
    torch.testing.assert_close(best_of_n(p, r, n), counted, rtol=1e-12, atol=0)


def test_best_of_n_without_ties_keeps_to_the_formula_in_the_limit():
    "Many responses of equal probability and no ties: the exact KL comes near log n - (n - 1)/n from below"
    p, r = torch.full((20_000,), 1/20_000, dtype=torch.float64), torch.arange(20_000.)
    for n in (2, 8):
        bound = math.log(n) - (n - 1)/n
        exact = kl(best_of_n(p, r, n), p).item()
        assert bound - 1e-3 < exact <= bound


def test_estimators_keep_their_digits_where_the_policies_are_close():
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(0))*1e-4
    k3 = kl_estimators(torch.zeros_like(x), x)["k3"]
    assert (k3 >= 0).all() and k3.mean().item() == pytest.approx((x.double().expm1() - x.double()).mean().item(), rel=1e-2)


def test_a_policy_may_be_certain():
    toy = parrot()
    for one, reward, log_ref in zip(torch.eye(121, dtype=torch.float64), toy.rewards, toy.log_probs(toy.ref).sum(1)):
        assert torch.equal(toy.probs(toy.table(one)), one)
        assert toy.objective(toy.table(one)).item() == pytest.approx((reward + toy.beta*log_ref).item())


@pytest.mark.parametrize("f, words", [(lambda t: parrot(beta=-1.), "beta = -1.0"), (lambda t: parrot(beta=float("nan")), "beta = nan"), (lambda t: best_of_n(t.rewards, t.rewards, 0), "n = 0"),
                                      (lambda t: total_variation(t.rewards, t.rewards[:3]), "(121,) and (3,)"), (lambda t: descend(t, lambda x: x.sum(1), 0), "steps = 0"),
                                      (lambda t: kl_estimators(t.rewards, t.rewards[:3]), "(121,) of the policy, (3,) of the reference")])
def test_bad_input_is_rejected(f, words):
    with pytest.raises(ValueError, match=re.escape(words)): f(parrot())


@pytest.mark.parametrize("q, best", [([0., .1, .5], [.25, .3125, .4375]), ([0., .1, 5.], [.025, .125/4.9, 1 - .025 - .125/4.9]), ([.2, .2, .1], [.5, .5, 0.])])
def test_the_reverse_kl_lets_a_policy_say_what_the_reference_never_says(q, best):
    "There it costs nothing, so the rest of the probability goes to the best choice."
    ref, q = torch.tensor([.5, .5, 0.], dtype=torch.float64).log(), torch.tensor(q, dtype=torch.float64)
    p = reverse_kl_optimum(ref, q, .25)
    torch.testing.assert_close(p, torch.tensor(best, dtype=torch.float64))
    def value(p): return (p @ q + .25*(ref.exp()[:2]*p[:2].log()).sum()).item()
    others = torch.from_numpy(np.random.default_rng(0).dirichlet([1, 1, 1], 2000))
    assert value(p) >= max(map(value, others)) - 1e-12
