"Reinforcement learning on whole stories: where a story goes wrong, who is blamed, batches, and what is rejected."
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from itertools import islice

import pytest

torch = pytest.importorskip("torch")
from torch._subclasses.fake_tensor import FakeTensorMode

from lmcourse.alignment.briefs import template_distance
from lmcourse.alignment.rl import resume_rl
from lmcourse.alignment.rollouts import Rollout
from lmcourse.alignment.sft import get_response_log_probs
from lmcourse.alignment.stories import (STORY_OPENINGS, STORY_PLOTS, StoryBatches, StoryRlConfig, credit_loss, credit_weights, first_mistake, measure_writer,
                                         start_story_rl, story_grammar, story_opening, story_plot, story_sampler, used_columns, write_stories, wrong_choices)
from lmcourse.architecture.transformer_torch import TransformerLM
from lmcourse.tools.config import ModelConfig, TrainConfig
from lmcourse.tools.stories import Stories
from lmcourse.training.data import TokenDataset, write_tokens
from lmcourse.training.models import load_model

PRETRAINED, TOKENIZER = load_model(Path(__file__).parent.parent/"nbs/results/pretrained")    # It makes mistakes; the distilled one hardly does
END = TOKENIZER.end_of_text
CONFIG = ModelConfig(vocab_size=TOKENIZER.vocab_size, context_length=24, d_model=32, num_layers=1, num_heads=2, d_ff=64)
FEW = StoryRlConfig("token", stories=6, anchors=2)
TRAIN = TrainConfig(steps=4, lr=1e-2, min_lr=1e-2, schedule="constant", warmup_steps=1, micro_batch=4, weight_decay=0.)
TRUE = list(islice(Stories(31), 40))


def rollout(text, finished=True):
    ids = (END, *TOKENIZER.encode(text), *[END]*finished)
    return Rollout("", text, ids, 1, (0.,)*(len(ids) - 1), 0, finished)


def by_hand(r):
    "The same as `first_mistake`, token by token from the left."
    ids = r.ids[1:len(r.ids) - r.finished]
    for k in range(len(ids)):
        if story_grammar().prefix_log_prob(TOKENIZER.decode(list(ids[:k + 1]))) == -math.inf: return k
    return len(ids) if r.finished and not story_grammar().log_probs(r.response) else None


@pytest.fixture(scope="module")
def valid(tmp_path_factory):
    folder = tmp_path_factory.mktemp("valid")
    write_tokens(folder/"valid", TRUE[:4], TOKENIZER, "stories")
    return TokenDataset.open(folder/"valid")


def test_a_true_story_has_no_mistake():
    assert all(first_mistake(rollout(text), TOKENIZER) is None for text in TRUE)


def test_the_first_mistake_is_the_token_after_which_no_story_goes_on():
    for text in TRUE[:6]:
        ids = TOKENIZER.encode(text)
        for k in (0, len(ids)//3, len(ids) - 2):
            wrong = TOKENIZER.decode([*ids[:k], ids[k - 7], *ids[k + 1:]])
            r = rollout(wrong)
            assert first_mistake(r, TOKENIZER) == by_hand(r) is not None


def test_a_story_that_ends_too_early_errs_at_its_end_and_a_cut_one_not_at_all():
    ids = TOKENIZER.encode(TRUE[0])[:50]
    text = TOKENIZER.decode(ids)
    assert first_mistake(rollout(text), TOKENIZER) == len(TOKENIZER.encode(text))
    assert first_mistake(rollout(text, finished=False), TOKENIZER) is None
    assert first_mistake(rollout(TRUE[0] + " And"), TOKENIZER) == len(TOKENIZER.encode(TRUE[0]))


def test_bytes_that_are_no_text_are_a_mistake():
    byte = next(i for i in range(TOKENIZER.vocab_size) if "\ufffd" in TOKENIZER.decode([i]))
    r = Rollout("", "", (END, byte, END), 1, (0., 0.), 0, True)
    assert first_mistake(r, TOKENIZER) == 0


def test_credit_by_hand():
    stories = [Rollout("", "", (END, 5, 6, 7, END), 1, (0.,)*4, 0, True), Rollout("", "", (END, 5, 6, END), 1, (0.,)*3, 0, True), Rollout("", "", (END, 5), 1, (0.,), 0, False)]
    found = {c: credit_weights(stories, [None, 1, None], c).round(decimals=5).tolist() for c in ("story", "prefix", "token")}
    assert found["story"] == [[1]*4, [-.5]*3 + [0], [-.5, 0, 0, 0]]
    assert found["prefix"] == [[1]*4, [-.5, -.5, 0, 0], [-.5, 0, 0, 0]]
    assert found["token"] == [[0]*4, [0, -1, 0, 0], [0]*4]


def test_a_mistake_at_the_end_token_is_blamed_there():
    stories = [rollout(TRUE[0]), rollout(TRUE[1] + " And")]
    mistakes = [first_mistake(r, TOKENIZER) for r in stories]
    ids = torch.tensor(stories[1].ids[1:])
    weights = credit_weights(stories, mistakes, "token")
    assert weights.sum() == -1 and weights[1].argmin() == mistakes[1] == len(TOKENIZER.encode(TRUE[1]))
    assert TOKENIZER.decode([int(ids[mistakes[1]])]) == " And"
    early = [rollout(TRUE[0]), rollout(TOKENIZER.decode(TOKENIZER.encode(TRUE[1])[:30]))]
    where = first_mistake(early[1], TOKENIZER)
    assert credit_weights(early, [None, where], "token")[1].argmin() == where == len(early[1].ids) - 2 and early[1].ids[where + 1] == END


@pytest.mark.parametrize("credit", ["story", "prefix", "token", "choices"])
def test_a_step_is_the_same_twice_and_holds_what_it_says(credit):
    model = TransformerLM(CONFIG, 1)
    make = StoryBatches(model, TOKENIZER, replace(FEW, credit=credit))
    ids, labels, weights, wrong = batch = make(model, 3)
    assert all(torch.equal(a, b) for a, b in zip(batch, make(model, 3))) and make.log[0] == make.log[1]
    stories = write_stories(make.sampler, 6, 1., 10_003)
    mistakes = [first_mistake(r, TOKENIZER) for r in stories]
    assert all(m is not None for m in mistakes) and make.log[0]["mistakes"] == mistakes    # A model without training is never right
    anchors = (weights > 0).any(1)
    assert len(ids) == len(labels) == len(weights) == len(wrong) == 8 and anchors.sum() == 2
    assert torch.allclose(weights[anchors].max(1).values, torch.tensor(.1*6/2))
    assert weights[~anchors].sum() == (-6 if credit == "token" else 0)   # All are equally wrong: no advantage
    assert wrong.shape[2] == (8 if credit == "choices" else 0)


def test_wrong_choices_are_those_that_the_grammar_rules_out():
    seen = 0
    for story in write_stories(story_sampler(PRETRAINED, TOKENIZER, 4), 4, 1., 12):
        m = first_mistake(story, TOKENIZER)
        wrong = wrong_choices(PRETRAINED, TOKENIZER, story, m, most=4)
        probs = PRETRAINED(torch.tensor([story.ids[:-1]]))[0].softmax(-1).detach()
        stop = len(wrong) if m is None else m + 1
        assert (wrong[stop:] == -1).all()
        for t in range(stop):
            if t % 40 and not (wrong[t] >= 0).any(): continue
            text = TOKENIZER.decode(list(story.ids[1:t + 1]))
            for token in probs[t].topk(4).indices.tolist():
                choice = None if token == END else TOKENIZER.decode([token])
                lost = probs[t, token] >= .003 and story_grammar().next_probs(text, [choice])[choice] == 0
                assert lost == (token in wrong[t].tolist())
                seen += lost
    assert seen > 1


def test_wrong_choices_and_columns_are_found_wherever_the_model_is():
    "Only where tensors are is looked at: the meta device stands in for a GPU, and fake tensors for its own."
    asked, model = [], torch.nn.Linear(1, 1, device="meta")
    def answer(ids):
        asked.append(ids.device.type)
        return torch.zeros(*ids.shape, TOKENIZER.vocab_size)
    model.forward = answer
    assert wrong_choices(model, TOKENIZER, rollout("Once"), None).device.type == "cpu" and asked == ["meta"]
    with FakeTensorMode():
        weights, wrong = torch.ones(2, 5, device="cuda"), torch.ones(2, 5, 3, device="cuda")
        assert used_columns(weights, wrong).device.type == "cuda"


def test_right_stories_are_praised_beside_wrong_ones():
    make = StoryBatches(PRETRAINED, TOKENIZER, StoryRlConfig("prefix", stories=10, anchors=0))
    ids, _, weights, _ = make(PRETRAINED, 0)
    right = round(make.log[0]["right"]*10)
    assert 0 < right < 10 and len(ids) == 10
    assert int((weights.sum(1) > 0).sum()) == right
    assert weights.max() == pytest.approx(10/9*(1 - right/10)) and weights.min() == pytest.approx(-right/9)


@pytest.mark.parametrize("credit", ["token", "choices"])
def test_the_loss_is_the_sum_over_all_tokens(credit):
    model = TransformerLM(CONFIG, 2)
    batch = StoryBatches(model, TOKENIZER, replace(FEW, credit=credit))(model, 0)
    ids, labels, weights, wrong = batch
    plain = -(weights*get_response_log_probs(model, ids, labels)["log_probs"]).sum(1).mean()
    probs = model(ids).softmax(-1)
    plain = plain + sum(probs[i, t, wrong[i, t, k]] for i, t, k in (wrong >= 0).nonzero().tolist())/len(ids)
    assert torch.allclose(credit_loss(model, *batch), plain, rtol=1e-5)
    longer = [torch.cat([t, torch.full_like(t[:, :3], fill)], 1) for t, fill in zip(batch, (0, 0, 0, -1))]
    assert torch.allclose(credit_loss(model, *longer), plain, rtol=1e-5)


def test_the_loss_of_16_bit_logits_is_computed_in_32():
    labels, weights = torch.arange(0, 1000, 50)[None], torch.ones(1, 20)
    wrong = labels[..., None] + torch.arange(1, 4)
    logits = torch.randn(1, 20, 2048, generator=torch.Generator().manual_seed(0))/2
    logits = logits.scatter(-1, labels[..., None], 12.).bfloat16().requires_grad_()
    exact = logits.detach().double().requires_grad_()
    for x in (logits, exact): credit_loss(lambda ids, x=x: x, labels, labels, weights, wrong).backward()
    assert (logits.grad.double() - exact.grad).norm() < .01*exact.grad.norm()


def test_blame_makes_the_wrong_token_rarer():
    model = TransformerLM(CONFIG, 3)
    batch = ids, labels, weights, _ = StoryBatches(model, TOKENIZER, replace(FEW, anchors=0))(model, 0)
    before = get_response_log_probs(model, ids, labels)["log_probs"].detach()
    credit_loss(model, *batch).backward()
    with torch.no_grad():
        for p in model.parameters(): p -= .01*p.grad
    after = get_response_log_probs(model, ids, labels)["log_probs"]
    assert ((after - before)*(weights < 0)).sum() < 0


def test_a_run_that_is_stopped_goes_on_bit_by_bit(valid, tmp_path):
    def weights(trainer): return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    model = TransformerLM(CONFIG, 3)
    whole, stopped, resumed = (start_story_rl(model, TOKENIZER, FEW, TRAIN, valid) for _ in range(3))
    for _ in range(3): whole.train_step()
    for _ in range(2): stopped.train_step()
    stopped.save(tmp_path)
    resume_rl(resumed, tmp_path)
    resumed.train_step()
    assert torch.equal(weights(whole), weights(resumed)) and not torch.equal(weights(whole), weights(stopped))
    for t in (whole, stopped, resumed): t.batches.close()


def test_only_true_stories_is_next_token_training():
    model = TransformerLM(CONFIG, 4)
    batch = ids, labels, weights, _ = StoryBatches(model, TOKENIZER, StoryRlConfig(stories=0, anchors=3))(model, 0)
    kept = labels.masked_fill(weights == 0, -100)
    plain = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), kept.flatten(), reduction="sum", ignore_index=-100)/3
    assert torch.allclose(credit_loss(model, *batch), plain, rtol=1e-5)


def test_openings_and_plots_are_those_of_the_grammar():
    rules = story_grammar().rules
    assert tuple(STORY_OPENINGS.values()) == pytest.approx(rules["opening"].shares) and tuple(STORY_PLOTS.values()) == pytest.approx(rules["plot"].shares)
    for k, name in enumerate(STORY_OPENINGS):                            # Of stories that begin in a single way
        some = Stories(8)
        some.rules = some.writer.rules = rules | dict(opening=rules["opening"]._replace(options=(rules["opening"].options[k],), shares=(1.,)))
        assert {story_opening(text) for text in islice(some, 40)} == {name}
    assert story_opening("The end.") == "other"
    plots = Counter(map(story_plot, TRUE))
    assert set(plots) <= set(STORY_PLOTS) and sum(plots.values()) == len(TRUE)
    with pytest.raises(ValueError, match="'The end.'"): list(map(story_plot, ["The end."]))


def test_shares_of_openings_are_compared_like_those_of_templates():
    assert template_distance(dict(a=3/4, b=1/4), dict(a=.5, b=.5)) == pytest.approx(.25)
    assert template_distance(dict(other=1.), STORY_OPENINGS) == pytest.approx(1)


def test_a_writer_is_measured():
    found = measure_writer(PRETRAINED, TOKENIZER, 6, .8, 3)
    assert found["n"] == 6 and found["right"] + len(found["mistakes"]) + found["cut"] >= 6
    assert sum(found["openings"].values()) == 6 and sum(found["plots"].values()) == found["right"]
    assert 180 < found["tokens"] < 257 and .2 < found["entropy"] < .6
    stories = write_stories(story_sampler(PRETRAINED, TOKENIZER, 3), 6, .8, 3)    # Others computed together, the same stories
    assert [m for r in stories if (m := first_mistake(r, TOKENIZER)) is not None] == found["mistakes"]
    with pytest.raises(ValueError, match="no stories"): measure_writer(PRETRAINED, TOKENIZER, 0)


@pytest.mark.parametrize("fields, words", [
    (dict(credit="all"), "credit = 'all'"), (dict(stories=1), "stories = 1"), (dict(stories=-1), "stories = -1"), (dict(anchors=-1), "anchors = -1"),
    (dict(anchor=-.1), "anchor = -0.1"), (dict(seed=-1), "seed = -1"), (dict(anchor=math.nan), "anchor = nan"), (dict(stories=0, anchors=0), "stories = 0 and anchors = 0")])
def test_rejected(fields, words):
    with pytest.raises(ValueError, match=words): StoryRlConfig(**fields)
