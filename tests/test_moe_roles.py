"Roles of tokens, and routers that are drawn by chance or noisy."
import copy
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from lmcourse.architecture.transformer_torch import TransformerLM
from lmcourse.moe.balance import watch_routes
from lmcourse.moe.lab import HashRouter, NoisyRouter, information, with_routers
from lmcourse.moe.roles import STUDY, role_information, role_sample, story_pieces
from lmcourse.tools.checks import check_close
from lmcourse.tools.config import ModelConfig
from lmcourse.tools.stories import Stories, short_stories

CONFIG = ModelConfig(vocab_size=40, context_length=16, d_model=16, num_layers=2, num_heads=1, num_experts=8, num_experts_per_tok=2, moe_d_ff=8)
IDS = torch.randint(40, (3, 16), generator=torch.Generator().manual_seed(0))


def routes_of(model, ids=IDS):
    with watch_routes(model) as routes, torch.no_grad(): model(ids)
    return [calls[0] for calls in routes]


@pytest.mark.parametrize("make", [Stories, short_stories, lambda seed: Stories(seed, zipf=1.)])
def test_pieces_are_the_stories(make):
    written = ("".join(words for words, _ in pieces) for pieces in story_pieces(4, make(0)))
    assert list(islice(written, 20)) == list(islice(make(4), 20))


def test_roles_name_the_rule_that_wrote():
    rules = Stories().rules
    known = {name.partition(":")[0] for name in rules}
    for pieces in islice(story_pieces(0), 40):
        for words, role in pieces:
            if role.startswith("words of "): assert role.removeprefix("words of ") in rules and rules[role.removeprefix("words of ")].options
            elif role.endswith(" again"): assert role.removesuffix(" again") in known
            else: assert role == "pronoun or attribute" or role in known
        seen = {}
        for words, role in pieces:                              # What is said again was said before
            if role in ("girl", "boy"): seen[words] = role
            if role in ("girl again", "boy again"): assert words in seen
        drawn = [words for words, role in pieces if role in ("girl", "boy")]
        assert len(drawn) == len(set(drawn)) > 1 and any(role in ("girl again", "boy again") for _, role in pieces)


def test_a_sample_has_a_role_for_each_token():
    class Letters:
        end_of_text, vocab_size = 0, 128
        def encode(self, text): return [ord(c) for c in text]
        def decode(self, ids): return "".join(map(chr, ids))
    ids, roles, names = role_sample(Letters(), 50, 6, seed=2)
    for row, own, pieces in zip(ids.tolist(), roles, story_pieces(2)):
        letters = [(c, role) for words, role in pieces for c in words][:49]
        assert [0, *(ord(c) for c, _ in letters)] == row and ["none", *(r for _, r in letters)] == [names[k] for k in own]
    with pytest.raises(ValueError, match="expected 5000 or more"): role_sample(Letters(), 5000, 1)


def test_a_dropped_visit_is_no_expert():
    experts, tokens = np.array([0, 1, -1, 1, 2, -1]), np.array([0, 1, 2, 1, 3, 2])
    assert information(experts, tokens) == information(experts % 4, tokens) == information(tokens, experts) > information(abs(experts), tokens)


def test_information_of_a_router_that_knows_nothing_is_that_of_chance():
    rng, model = np.random.default_rng(0), with_routers(TransformerLM(CONFIG), HashRouter)
    ids = torch.randint(40, (30, 16), generator=torch.Generator().manual_seed(1))
    roles = rng.integers(5, size=(30, 16))
    for layer in role_information(model.eval(), (ids, roles, list("abcde")), rng):
        assert layer["about_the_role"] == layer["shuffled"] == 0 and layer["about_the_token"] > 1
    roles = ids.numpy()[:, [0, *range(15)]]                    # The token before
    found = role_information(TransformerLM(CONFIG).eval(), (ids, roles, list(range(40))), rng)
    assert all(f["about_the_role"] >= 0 for f in found)


def test_a_hash_knows_the_token_alone():
    model = with_routers(TransformerLM(CONFIG), HashRouter, seed=3)
    tables = []
    for chosen, weights in routes_of(model):
        assert (weights == .5).all() and all(len(set(row)) == 2 for row in chosen.tolist())
        table = {}
        for token, row in zip(IDS.flatten().tolist(), chosen.tolist()): assert table.setdefault(token, sorted(row)) == sorted(row)
        tables.append(table)
    assert tables[0] != tables[1]                              # Each layer has its own
    again = with_routers(TransformerLM(CONFIG, seed=5), HashRouter, seed=3)
    assert [c.tolist() for c, _ in routes_of(again)] == [c.tolist() for c, _ in routes_of(model)]
    model.loss(IDS[:, :-1], IDS[:, 1:]).backward()
    assert all(p.grad is not None for p in model.parameters())
    with pytest.raises(ValueError, match="another number of ids"): model.layers[0].ffn.router(torch.zeros(2, 16))
    with pytest.raises(ValueError, match="has no experts"): with_routers(TransformerLM(replace(CONFIG, num_experts=None, moe_d_ff=None)), NoisyRouter)


def test_a_copy_of_a_hashed_model_has_ids_of_its_own():
    model, other = with_routers(TransformerLM(CONFIG), HashRouter), (IDS + 1) % 40
    routes_of(model)
    check_close([c for c, _ in routes_of(copy.deepcopy(model), other)], [c for c, _ in routes_of(model, other)])


def test_a_noisy_router_has_the_model_s_type_and_leaves_torch_s_generator_alone():
    model, before = TransformerLM(CONFIG, dtype=torch.float64), torch.get_rng_state()
    plain = model(IDS)
    with_routers(model, NoisyRouter)
    assert torch.equal(before, torch.get_rng_state()) and model(IDS).dtype == torch.float64
    check_close(model.eval()(IDS), plain)
    with pytest.raises(ValueError, match="a hash router has no weights"): with_routers(with_routers(model, HashRouter), NoisyRouter)


def test_noise_is_for_training_alone_and_its_size_is_learnt():
    plain, noisy = TransformerLM(CONFIG, seed=1), with_routers(TransformerLM(CONFIG, seed=1), NoisyRouter, seed=2)
    with torch.no_grad():
        assert torch.equal(noisy.eval()(IDS), plain.eval()(IDS))
        first, second = noisy.train()(IDS), noisy(IDS)
    assert not torch.equal(first, second)
    router = noisy.layers[0].ffn.router
    x = torch.randn(4000, 16, generator=torch.Generator().manual_seed(0))
    off = (router(x) - torch.nn.functional.linear(x, router.weight)).detach()
    assert off.std().item() == pytest.approx(np.log(2), rel=.03) and abs(off.mean().item()) < .02   # softplus(0)
    with torch.no_grad(): router.spread[0] -= 10*x[0]
    quiet = (router(x[:1]) - torch.nn.functional.linear(x[:1], router.weight)).detach()[0, 0]
    assert abs(quiet.item()) < 1e-6
    noisy.loss(IDS[:, :-1], IDS[:, 1:]).backward()
    assert router.spread.grad.abs().max() > 0


@pytest.mark.parametrize("kind", [HashRouter, NoisyRouter])
def test_a_block_that_runs_again_would_meet_other_noise_or_ids(kind):
    "The gradients were wrong without an error: noise was drawn again, and a hash took the ids of the latest pass."
    model = with_routers(TransformerLM(CONFIG), kind).train()
    model.recompute = True
    for m in (model, copy.deepcopy(model)):
        with pytest.raises(ValueError, match="recompute = True .* expected False"): m.loss(IDS[:, :-1], IDS[:, 1:])
    with torch.no_grad(): model(IDS)                           # Nothing runs again


def test_the_study_is_of_equal_arithmetic():
    from lmcourse.accounting.parameters import count_parameters
    runs = STUDY.runs()
    active = {name: count_parameters(runs[name, 0].model).active for name in ("dense", "8 experts", "16 experts", "32 narrow experts, k = 4")}
    assert all(0 <= n - active["dense"] < .03*n for n in active.values()) and len(runs) == 21
