"Reward models: planted rewards come back, the head reads the last token, and best of n is what counting says."
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from lmcourse.alignment.reward import RewardModel, draw_pairs, fit_rewards, preference_loss
from lmcourse.architecture.transformer_torch import TransformerLM
from lmcourse.tools.config import ModelConfig

CONFIG = ModelConfig(vocab_size=50, context_length=16, d_model=16, num_layers=1, num_heads=2, d_ff=32)


@pytest.mark.parametrize("seed", range(3))
def test_planted_rewards_are_found_up_to_a_constant(seed):
    rng = np.random.default_rng(seed)
    rewards = torch.from_numpy(rng.standard_normal(8))
    found = fit_rewards(torch.eye(8), *draw_pairs(rewards + 5, torch.full((8,), 1/8), 30_000, rng), 1e-9)
    assert (found - (rewards - rewards.mean())).abs().max() < .12 and abs(found.mean()) < 1e-9


def test_features_are_weighted():
    rng, x = np.random.default_rng(0), torch.randn(30, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rewards = x @ torch.tensor([1., -2., .5], dtype=torch.float64)
    found = fit_rewards(x, *draw_pairs(rewards, torch.ones(30), 20_000, rng), 1e-9)
    assert (found - (rewards - rewards.mean())).abs().max() < .3


def test_the_fit_has_no_gradient_left():
    rng = np.random.default_rng(1)
    won, lost = draw_pairs(torch.arange(5.), torch.tensor([.4, .3, .1, .1, .1]), 500, rng)
    for ridge in (1e-9, .1):
        scores = fit_rewards(torch.eye(5), won, lost, ridge).requires_grad_()
        loss = preference_loss(scores[won], scores[lost]) + ridge*(scores**2).sum()/2
        assert torch.autograd.grad(loss, scores)[0].abs().max() < 1e-6


def test_loss_by_hand_and_its_gradient():
    won = torch.tensor([2., 0.], requires_grad=True)
    loss = preference_loss(won, torch.tensor([0., 0.]))
    assert loss.item() == pytest.approx((np.log1p(np.exp(-2)) + np.log(2))/2)
    assert torch.autograd.grad(loss, won)[0].tolist() == pytest.approx([-.5*(1 - 1/(1 + np.exp(-2))), -.25])


def test_score_is_read_at_the_last_token_and_padding_changes_nothing():
    model = RewardModel(TransformerLM(CONFIG, 1))
    ids = torch.randint(1, 50, (4, 8), generator=torch.Generator().manual_seed(0))
    assert model(ids, torch.tensor([8, 3, 5, 1])).tolist() == [0]*4, "a new head knows nothing"
    torch.nn.init.normal_(model.head.weight)
    n = torch.tensor([8, 3, 5, 1])
    more = torch.cat([ids, torch.full((4, 3), 7)], 1)
    assert torch.allclose(model(ids, n), model(more, n), atol=1e-6)
    for i in range(4): assert torch.allclose(model(ids[i:i + 1, :n[i]], n[i:i + 1]), model(ids, n)[i], atol=1e-6)


@pytest.mark.parametrize("lengths", [[0, 1], [3, 9]])
def test_lengths_outside_the_row_are_rejected(lengths):
    with pytest.raises(ValueError, match=f"lengths {lengths[0]} to {lengths[1]}, expected 1 to 8"):
        RewardModel(TransformerLM(CONFIG))(torch.ones(2, 8, dtype=torch.int64), torch.tensor(lengths))


def test_pairs_that_make_no_sense_are_rejected():
    for a, b in ((torch.zeros(2), torch.zeros(3)), (torch.zeros(0), torch.zeros(0))):
        with pytest.raises(ValueError, match="expected equal numbers, at least one"): preference_loss(a, b)
    some, few = torch.tensor([0, 1]), torch.tensor([1])
    for call, words in ((lambda: fit_rewards(torch.eye(2), *torch.zeros(2, 0).long()), "0 winners and 0 losers"), (lambda: fit_rewards(torch.eye(2), some, few), "2 winners and 1 losers"),
                        (lambda: fit_rewards(torch.eye(2), few, few - 1, 0.), "ridge = 0.0"), (lambda: RewardModel(TransformerLM(CONFIG))(torch.ones(3, 8).long(), few), "1 lengths for 3 rows")):
        with pytest.raises(ValueError, match=words): call()


def test_rewards_may_be_short_numbers_with_a_gradient():
    rewards, even = torch.tensor([1., 0., 2.]), torch.ones(3)
    short = rewards.bfloat16().requires_grad_(), even.bfloat16().requires_grad_()
    a, b = (draw_pairs(*given, 20, np.random.default_rng(0)) for given in ((rewards, even), short))
    assert all(map(torch.equal, a, b))
