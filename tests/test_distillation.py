"Chapter 14, distillation: the oracle of tokens, soft and hard batches, practice, batches made by another process."
import math
import re
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from lmcourse.alignment.distillation import (DistillationBatches, counted_probs, distillation_batch, distillation_loss, emphasize, prepare_job,
                                             start_distillation)
from lmcourse.evaluation.oracle import TokenOracle, oracle_nats
from lmcourse.tools.checks import check_close
from lmcourse.tools.config import TrainConfig
from lmcourse.tools.grammar import expand_part, start_at
from lmcourse.tools.stories import Stories
from lmcourse.training.data import TokenDataset, write_tokens
from lmcourse.training.models import load_model

MODEL, TOKENIZER = load_model()
ORACLE, END = TokenOracle(Stories(), TOKENIZER), TOKENIZER.end_of_text
SOME = list(islice(Stories(41), 4))


def encoded(story): return [*TOKENIZER.encode(story), END]


def test_expand_gives_every_way_once():
    "Probabilities sum to 1, and an entry that is remembered from the same list is left out."
    rules = Stories().rules
    for name in ("story", "opening", "hour", "creature", "plot"):
        assert abs(sum(p for p, *_ in expand_part(rules, start_at(name)[0], {})) - 1) < 1e-12, name
    toy = Stories(grammar="story:\n    {x=food} and {y=food}\n\nfood = fig, plum, pear\n")
    [(_, _, parts, env)] = expand_part(toy.rules, toy.start[0], {})
    first = list(expand_part(toy.rules, parts[0], env))
    assert [w for _, w, *_ in first] == ["fig", "plum", "pear"]
    for _, word, _, then in first:
        rest = {w: p for p, w, *_ in expand_part(toy.rules, parts[2], then)}
        assert rest.keys() == {"fig", "plum", "pear"} - {word} and {*rest.values()} == {1/2}


def test_surprises_sum_to_the_story_s():
    for story in SOME:
        probs = list(ORACLE.next_probs(encoded(story)))
        check_close(-sum(math.log(q[i]) for q, i in zip(probs, encoded(story))), -Stories().log_prob(story), 1e-12)
        check_close([sum(q.values()) for q in probs], [1.]*len(probs), 1e-12)
        whole = oracle_nats(Stories(), TOKENIZER, story)       # By letters: equal where a word is a single token either way
        check_close(sum(whole), -Stories().log_prob(story), 1e-9)


def test_words_that_begin_alike_share_their_first_token():
    "A shorter word may end where a longer one goes on: both continuations are listed."
    grammar = "story:\n    3* a {thing}.\n\nthing = 2* house, houseboat, mill\n"
    ids = {c: i for i, c in enumerate(["<|endoftext|>", *map(chr, range(97, 123)), " ", "."])}
    class Letters:
        end_of_text, rules = 0, type("Rules", (), dict(pattern=r" ?[a-z]+|[.]"))
        def encode(self, text, special): return [ids[" house"] if w == " house" else ids[w] for w in re.findall(r" house|[a-z ]|[.]", text)]
    ids[" house"] = len(ids)
    probs = list(TokenOracle(Stories(grammar=grammar), Letters()).next_probs([ids["a"], ids[" house"], ids["b"]]))
    assert probs[1] == {ids[" house"]: 3/4, ids[" "]: 1/4}
    check_close(probs[2][ids["."]], 2/3, 1e-12)
    check_close(probs[2][ids["b"]], 1/3, 1e-12)


def test_nothing_is_told_after_an_impossible_token():
    begun = TOKENIZER.encode(SOME[0])[:9]
    assert len(list(ORACLE.next_probs([*begun, END, *begun]))) == 10
    assert len(list(ORACLE.next_probs([*encoded(SOME[0]), *begun]))) == len(encoded(SOME[0]))


def test_hard_labels_are_the_next_tokens_and_soft_ones_the_oracle_s():
    inputs, tokens, probs = distillation_batch(SOME, ORACLE, TOKENIZER, 256, False)
    assert tokens.shape == (*inputs.shape, 1) and {*np.unique(probs)} == {0., 1.}
    _, many, shares = distillation_batch(SOME, ORACLE, TOKENIZER, 256)
    for b, story in enumerate(SOME):
        ids = encoded(story)
        assert tokens[b, :len(ids), 0].tolist() == ids and inputs[b, :len(ids)].tolist() == [END, *ids[:-1]]
        for t, q in enumerate(ORACLE.next_probs(ids)):
            found = {int(i): float(p) for i, p in zip(many[b, t], shares[b, t]) if p}
            assert found.keys() == q.keys() and all(abs(found[i] - q[i]) < 1e-6 for i in q)
    assert counted_probs(torch.from_numpy(probs)) == sum(len(encoded(s)) for s in SOME)
    assert distillation_batch(SOME, ORACLE, TOKENIZER, 16)[0].shape == (4, 16)


def test_the_loss_weighs_places():
    batch = [torch.from_numpy(a) for a in distillation_batch(SOME[:1], ORACLE, TOKENIZER, 256)]
    with torch.no_grad():
        logits = MODEL(batch[0]).double()
        each = (logits.logsumexp(-1) - (batch[2]*logits.gather(-1, batch[1])).sum(-1))[0]
        weights = torch.ones(len(each)).double()
        weights[7] = 30
        batch[2][0, 7] *= 30
        check_close(distillation_loss(MODEL, *batch).double(), (each*weights).sum()/weights.sum(), 1e-5)


def test_the_loss_of_16_bit_logits_is_computed_in_32():
    tokens, probs = torch.arange(0, 1000, 50).view(1, 20, 1), torch.ones(1, 20, 1)
    logits = torch.randn(1, 20, 2048, generator=torch.Generator().manual_seed(0))/2
    logits = logits.scatter(-1, tokens, 12.).bfloat16().requires_grad_() # A student that is sure
    exact = logits.detach().double().requires_grad_()
    for x in (logits, exact): distillation_loss(lambda _, x=x: x, tokens[..., 0], tokens, probs).backward()
    assert (logits.grad.double() - exact.grad).norm() < .01*exact.grad.norm()


def test_practice_chooses_stories_and_marks_the_word_after_a_match():
    pattern = r"From that(?= \w+ on,)"
    batches = prepare_job(2, TOKENIZER, 4, 256, 5, True, pattern)
    marked = [(b[2].sum(-1) > 1.5).sum(1) for b in batches]
    assert np.mean([m[1:].all() for m in marked]) > .95 and np.mean([m[0] for m in marked]) < .5     # One of four is any story; a long one may be cut
    story = next(s for s in Stories(6) if re.search(pattern, s))
    probs = distillation_batch([story], ORACLE, TOKENIZER, 256)[2]
    before = probs.copy()
    emphasize(probs, [story], TOKENIZER, pattern)
    [at] = np.flatnonzero((probs != before).any(-1)[0])
    check_close(probs[0, at], 30*before[0, at])
    assert TOKENIZER.decode(encoded(story)[:at]).endswith("From that")


def test_another_process_makes_the_same_batches():
    how = TOKENIZER, 2, 32, 3, True, ""
    batches = DistillationBatches(*how, ahead=1)
    try:
        for step in (51, 0, 99):                               # A run may go on anywhere
            for a, b in zip(batches[step], prepare_job(step//50, *how)[step % 50]): assert (a == b).all()
    finally: batches.close()
    first, second = (prepare_job(job, *how)[0][0] for job in (0, 1))
    assert first.shape != second.shape or (first != second).any()


def test_data_that_were_half_prepared_are_prepared_to_the_end(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1]/"tools")
    import distillation_runs
    def prepare(words, **how): raise InterruptedError(words[3])
    monkeypatch.setattr(distillation_runs.subprocess, "run", prepare)
    (tmp_path/"data").mkdir()
    for name in ("prepare.part", "train.json"):                             # Both are there at the end of `prepare`
        (tmp_path/"data"/name).touch()
        with pytest.raises(InterruptedError, match="prepare"): distillation_runs.main(tmp_path)


def test_a_number_of_tokens_per_step_is_rejected():
    with pytest.raises(ValueError, match="tokens_per_step = 512, expected none"): start_distillation(MODEL, TOKENIZER, TrainConfig(tokens_per_step=512), None)


def test_a_stopped_run_goes_on_alike(tmp_path):
    write_tokens(tmp_path/"valid", SOME, TOKENIZER, "stories")
    valid, weights = TokenDataset.open(tmp_path/"valid"), []
    config = TrainConfig(steps=4, batch_size=2, lr=1e-4, min_lr=1e-5, warmup_steps=1, eval_every=2, checkpoint_every=2, prefetch=0)
    for stops in ((4,), (2, 4)):
        run = tmp_path/f"run{len(stops)}"
        run.mkdir()
        for stop in stops:
            trainer = start_distillation(MODEL, TOKENIZER, config, valid)
            trainer.resume(run)
            while trainer.step < stop: trainer.train_step()
            trainer.save(run)
            trainer.batches.close()
        weights.append([p.detach().clone() for p in trainer.model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights))
    assert not any(torch.equal(a, b) for a, b in zip(weights[0][:1], MODEL.parameters()))


@pytest.mark.parametrize("stories, length, words", [([SOME[0], "Not a story."], 64, "story 1 isn't one of the grammar"), ([], 64, "0 stories"), (SOME, 0, "context_length = 0")])
def test_rejected(stories, length, words):
    with pytest.raises(ValueError, match=words): distillation_batch(stories, ORACLE, TOKENIZER, length)
