"An engine with drafts: the same answers where nothing is drawn, the same distribution where something is, fewer passes, and no block lost."
from functools import partial
from itertools import product

import pytest

torch = pytest.importorskip("torch")

from test_engine import alone, check_pool, load, small

from lmcourse.generation.sampling import next_token_probs
from lmcourse.inference.draft_engine import DraftEngine
from lmcourse.inference.engine import Engine, Request, replay
from lmcourse.inference.kv_cache import CachedDecoder
from lmcourse.inference.speculative import DraftModel, NgramDraft, PromptLookup, exact_distribution
from lmcourse.tools.checks import check_close, expect_error


class Wrong:
    "Always proposes token 5."
    vocab_size = 97
    def propose(self, ids, count, to_probs, draw):
        return [5]*count, torch.nn.functional.one_hot(torch.full((count,), 5), 97).double()


def drafts(model):
    return {"look-up": lambda: PromptLookup(97, shortest=1), "n-grams": lambda: NgramDraft(range(97), 97), "wrong": Wrong,
            "another": partial(DraftModel, small(seed=1, num_layers=1), CachedDecoder), "itself": partial(DraftModel, model, CachedDecoder)}


@pytest.mark.parametrize("name", drafts(None))
@pytest.mark.parametrize("changes", [dict(), dict(window=5), dict(num_kv_heads=1, position="learned")], ids=str)
def test_greedy_answers_are_those_without_a_draft(name, changes):
    model = small(**changes)
    requests = [Request(r.ids, r.max_tokens, temperature=0., stop=r.stop) for r in load(9, 3, shared=20)]
    engine = DraftEngine(model, 24, 4, 5, 24, make_draft=drafts(model)[name])
    found = replay(engine, requests, range(9), look=check_pool)
    assert [s.tokens for s in found] == [alone(model, r) for r in requests]
    assert not engine.drafts and len(engine.pool.free) == 24
    if name == "itself": assert engine.accepted == engine.proposed > 30


def test_a_draft_that_is_always_right_gives_as_many_tokens_a_step_as_it_may():
    model = small()
    for lookahead in (1, 3, 4):
        engine = DraftEngine(model, make_draft=partial(DraftModel, model, CachedDecoder), lookahead=lookahead)
        engine.run([Request((1, 2, 3), 21, temperature=0.)])
        assert engine.steps == 1 + -(-20//(lookahead + 1))         # The prompt gives the first token
    engine = DraftEngine(model, make_draft=Wrong)
    engine.run([Request((1, 2, 3), 21, temperature=0.)])
    assert engine.steps >= 20 and engine.accepted <= 1


@pytest.mark.parametrize("settings", [dict(), dict(temperature=.5), dict(top_k=2), dict(top_p=.6)], ids=str)
def test_the_distribution_is_the_model_s(settings):
    "Of the first two tokens of an answer, over every possible sequence of draws."
    model, other = (small(seed=k, vocab_size=3, context_length=8, num_layers=1) for k in (0, 1))
    def run(draw):
        engine = DraftEngine(model, block_size=2, make_draft=partial(DraftModel, other, CachedDecoder), lookahead=1)
        engine.draw = lambda s, probs: draw(probs)
        return tuple(engine.run([Request((1,), 3, **settings)])[0].tokens[:2])
    law = exact_distribution(run)
    def probs(ids): return next_token_probs(model(torch.tensor([ids]))[0, -1].detach().float(), **settings).double()
    for a, b in product(range(3), repeat=2):
        check_close(law.get((a, b), 0.), (probs([1])[a]*probs([1, a])[b]).item(), 1e-5, 1e-6)


def test_mixed_company_scores_and_stops():
    "Requests of each kind side by side: penalised ones are answered as without a draft, log-probabilities are the model's own."
    model, make = small(), lambda: PromptLookup(97, shortest=1)
    requests = [Request((4, 5, 4, 5), 12, temperature=0., log_probs=2, echo=True), Request((7,)*6, 12, temperature=0., repetition_penalty=1.5),
                Request((3, 4), 9, seed=5), Request((8, 9, 8), 0, log_probs=1, echo=True), Request((1,), 1, seed=2)]
    plain, found = Engine(model).run(requests), DraftEngine(model, make_draft=make).run(requests)
    for k in (0, 1, 3):
        assert found[k].tokens == plain[k].tokens and found[k].reason == plain[k].reason
        check_close([p for p, _ in found[k].log_probs], [p for p, _ in plain[k].log_probs], 1e-9)
        check_close([p for p, _ in found[k].prompt_log_probs], [p for p, _ in plain[k].prompt_log_probs], 1e-9)
    stop = plain[0].tokens[6]
    until = plain[0].tokens.index(stop)
    again = DraftEngine(model, make_draft=partial(DraftModel, model, CachedDecoder), lookahead=8).run([Request((4, 5, 4, 5), 12, temperature=0., stop=(stop,))])[0]
    assert again.tokens == plain[0].tokens[:until] and again.reason == "stop" and again.versions == [0]*until
    assert len(found[2].tokens) == 9 and len(found[4].tokens) == 1 and found[2].times == sorted(found[2].times)


def test_blocks_that_run_out_are_given_back():
    model = small()
    engine = DraftEngine(model, 9, 4, 4, 16, make_draft=partial(DraftModel, model, CachedDecoder))
    requests = [Request(tuple(range(k, k + 8)), 20, temperature=0.) for k in range(6)]
    found = replay(engine, requests, [0]*6, look=check_pool)
    assert [s.tokens for s in found] == [alone(model, r) for r in requests] and any(s.preempted for s in found)
    s = engine.add(requests[0])
    engine.step(); engine.step()
    engine.end(s)
    assert not engine.drafts and len(engine.pool.free) == 9


def test_guesses_of_a_pass_that_fails_are_not_part_of_the_answer():
    model, r = small(), Request((1, 2, 1, 2), 12, temperature=0.)
    engine = DraftEngine(model, make_draft=lambda: NgramDraft(range(97), 97, 2))
    s, failures = engine.add(r), [3]
    def forward(rows, forward=engine.paged.forward):
        if engine.steps in failures: failures.remove(engine.steps); raise MemoryError("once")
        return forward(rows)
    engine.paged.forward = forward
    while engine.busy:
        try: engine.step()
        except MemoryError: pass
    assert s.tokens == alone(model, r) and not failures


def test_what_makes_no_sense_is_refused():
    model = small()
    with expect_error(ValueError, "the draft has 3 ids, the model's vocabulary 97"): DraftEngine(model, make_draft=lambda: PromptLookup(3))
    with expect_error(ValueError, "lookahead = 0, expected 1 or more"): DraftEngine(model, make_draft=Wrong, lookahead=0)
