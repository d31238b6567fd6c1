"Losses of preferences: formulas, fixed points on other worlds, a response's probability on a model, and TRL where it is installed."
import json
import math
import re
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from little_hub import parquet
from lmcourse.alignment.preference import (DpoConfig, PreferenceBatches, check_pair, compute_per_instance_dpo_loss, dpo_loss, ipo_loss, kto_loss, preference_objective, read_pairs,
                                           response_log_prob, simpo_loss)
from lmcourse.alignment.sft import conversations
from lmcourse.alignment.toy import parrot
from lmcourse.architecture.transformer_torch import ModelConfig, TransformerLM
from lmcourse.generation.generate import PLAIN_CHAT
from lmcourse.tokenization.tokenizer import Tokenizer


def numbers(seed, B=9):
    g = torch.Generator().manual_seed(seed)
    chosen, rejected, ref_chosen, ref_rejected = (-5*torch.rand(B, generator=g, dtype=torch.float64) for _ in range(4))
    return chosen.requires_grad_(), rejected.requires_grad_(), ref_chosen, ref_rejected


def test_formulas():
    c, r, rc, rr = numbers(0)
    for k in range(9):
        m = (c[k] - rc[k] - r[k] + rr[k]).item()
        assert dpo_loss(c, r, rc, rr, .3)[k].item() == pytest.approx(math.log1p(math.exp(-.3*m))) and ipo_loss(c, r, rc, rr, .3)[k].item() == pytest.approx((m - 1/.6)**2)
        s = 2*(c[k]/(k + 1) - r[k]/4).item() - .5
        assert simpo_loss(c, r, torch.arange(1., 10), torch.full((9,), 4.), 2., .5)[k].item() == pytest.approx(math.log1p(math.exp(-s)))
        for good in (True, False):
            gain = (c[k] - rc[k]).item() - .7
            got = kto_loss(c, rc, torch.full((9,), good), torch.tensor(.7), .3)[k].item()
            assert got == pytest.approx(1/(1 + math.exp(.3*gain*(1 if good else -1))))
    assert torch.equal(kto_loss(c, rc, c < 0, torch.tensor(-3.), .3), kto_loss(c, rc, c < 0, torch.tensor(0.), .3))            # a KL is not negative


@pytest.mark.parametrize("seed, beta", [(0, .25), (4, 1.)])
def test_gradients_vanish_at_the_fixed_points(seed, beta):
    toy = parrot(seed, beta)
    ref, log_ref = toy.probs(toy.ref), toy.log_probs(toy.ref).sum(1)
    wins = torch.sigmoid(toy.rewards[:, None] - toy.rewards[None])
    i, j = torch.cartesian_prod(torch.arange(121), torch.arange(121)).T
    weights = (ref[:, None]*ref*wins)[i, j]
    targets = {dpo_loss: toy.optimum(), ipo_loss: (log_ref + wins @ ref/beta).softmax(0)}
    for at, target in targets.items():
        for loss in targets:
            x = toy.table(target).requires_grad_()
            lp = toy.log_probs(x).sum(1)
            g, = torch.autograd.grad((weights*loss(lp[i], lp[j], log_ref[i], log_ref[j], beta)).sum(), x)
            assert (g.abs().max() < 1e-8) == (at is loss)


@pytest.fixture(scope="module")
def world():
    tokenizer = Tokenizer.train(["Ella has a red cap. Otto has a blue kite. "*20], 270)
    config = ModelConfig(vocab_size=tokenizer.vocab_size, context_length=24, d_model=16, d_ff=32, num_layers=1, num_heads=2)
    return TransformerLM(config, seed=1), TransformerLM(config, seed=2), tokenizer


def test_probabilities_of_all_responses_of_a_model_add_up(world):
    lm, _, tokenizer = world
    prompt = tokenizer.encode("Ella")
    logits = lm(torch.tensor([prompt]))[0, -1].log_softmax(-1)
    assert response_log_prob(lm, tokenizer, "Ella", "").item() == pytest.approx(logits[tokenizer.end_of_text].item(), abs=1e-5)
    ids = tokenizer.encode("Ella") + tokenizer.encode(" has")
    by_hand = sum(lm(torch.tensor([ids[:t]]))[0, -1].log_softmax(-1)[(ids + [tokenizer.end_of_text])[t]].item() for t in range(len(prompt), len(ids) + 1))
    assert response_log_prob(lm, tokenizer, "Ella", " has").item() == pytest.approx(by_hand, abs=1e-4)


def test_a_probability_from_16_bit_logits_is_added_up_in_32(world):
    class Sure(torch.nn.Linear): # Every token gets the same probabilities, in bfloat16
        config = SimpleNamespace(context_length=24)
        def forward(self, ids): return self.weight[0].expand(1, ids.shape[1], -1)
    tokenizer = world[2]
    lm = Sure(tokenizer.vocab_size, 1, dtype=torch.bfloat16)
    with torch.no_grad(): lm.weight.copy_(torch.linspace(-3, 3, tokenizer.vocab_size))
    answer = [*tokenizer.encode(" a red cap."), tokenizer.end_of_text]
    exact = lm.weight[0].double().log_softmax(-1)[answer].sum().item()
    assert response_log_prob(lm, tokenizer, "Ella has", " a red cap.").item() == pytest.approx(exact, abs=1e-4)


def test_per_instance_loss(world):
    lm, ref, tokenizer = world
    pair = ("Ella has", " a red cap.", " a kite.")
    loss = compute_per_instance_dpo_loss(lm, ref, tokenizer, .5, *pair)
    values = [response_log_prob(m, tokenizer, pair[0], text) for m in (lm, ref) for text in pair[1:]]
    torch.testing.assert_close(loss, dpo_loss(values[0], values[1], values[2], values[3], .5))
    loss.backward()
    assert any(w.grad is not None and w.grad.any() for w in lm.parameters()) and all(w.grad is None for w in ref.parameters())
    swapped = compute_per_instance_dpo_loss(lm, ref, tokenizer, .5, pair[0], *pair[:0:-1])
    assert math.exp(-loss.item()) + math.exp(-swapped.item()) == pytest.approx(1, abs=1e-5)                                   # sigmoid(x) + sigmoid(-x)
    assert compute_per_instance_dpo_loss(ref, ref, tokenizer, .5, *pair).item() == pytest.approx(math.log(2), abs=1e-6)
    small = TransformerLM(ModelConfig(vocab_size=9, context_length=24, d_model=16, d_ff=32, num_layers=1, num_heads=2))
    for f, words in ((lambda: compute_per_instance_dpo_loss(lm, small, tokenizer, .5, *pair), "expected one tokenizer"), (lambda: response_log_prob(lm, tokenizer, "", "a"), "no tokens"),
                     (lambda: response_log_prob(lm, tokenizer, "Ella", " zebra"*9), "the model takes 24"), (lambda: compute_per_instance_dpo_loss(lm, ref, tokenizer, -1., *pair), "beta = -1.0"),
                     (lambda: ipo_loss(torch.ones(2), torch.ones(3), torch.ones(2), torch.ones(2), 1.), "(2,), (3,), (2,), (2,)"),
                     (lambda: dpo_loss(*values, math.inf), "beta = inf"), (lambda: kto_loss(torch.ones(2), torch.ones(2), torch.ones(2), torch.ones(2, 1), 1.), "kl (2, 1)"),
                     (lambda: preference_objective(-1.), "beta = -1.0"), (lambda: PreferenceBatches([dict(prompt="a", chosen="b", rejected="c")], tokenizer, 0, ref), "a batch of 0 from 1 pairs"),
                     *((lambda k=k, v=v: DpoConfig(**{k: v}), f"{k} = {v}") for k, v in (("beta", math.inf), ("sft_weight", math.inf), ("group_size", 2.5), ("prompts", 0)))):
        with pytest.raises(ValueError, match=re.escape(words)): f()


def test_pairs_nested_too_deeply(tmp_path):
    (tmp_path/"pairs.jsonl").write_text("["*100_000)
    with pytest.raises(ValueError, match="line 1 is not JSON"): read_pairs(tmp_path/"pairs.jsonl")


@pytest.mark.parametrize("end", ["\n\n", "\n \t\r\n\n", "", "\r\n\r\n"])
def test_blank_lines_of_a_file_of_pairs_are_skipped_and_counted(tmp_path, end):
    file, pair = tmp_path/"pairs.jsonl", dict(prompt="a", chosen="b", rejected="c")
    def written(*lines): file.write_bytes(("\n".join(json.dumps(p) if p else "" for p in lines) + end).encode())
    written(pair, pair)
    assert read_pairs(file) == [pair]*2
    written(pair, None, pair)
    assert read_pairs(file) == [pair]*2
    for lines, words in (((pair, None, pair | dict(chosen="c")), "line 3: chosen and rejected are equal"), ((pair, pair, pair | dict(chosen="c")), "line 3: chosen and rejected are equal"), ((), "no pairs")):
        written(*lines)
        with pytest.raises(ValueError, match=words): read_pairs(file)


def said(role, content): return dict(role=role, content=content)


TALK = [said("system", "Be brief."), said("user", "Hi."), said("assistant", "Ho."), said("user", "Why?")]
YES, NO = said("assistant", " So.\n"), said("assistant", "")


@pytest.mark.parametrize("row", [dict(prompt=TALK, chosen=[YES], rejected=[NO]), dict(chosen=[*TALK, YES], rejected=[*TALK, NO]), dict(prompt="Why?", chosen=[*TALK, YES], rejected=[*TALK, NO], score=3),
                                 dict(chosen=[*TALK, dict(YES, name="a")], rejected=[*TALK, NO], messages=None)])
def test_a_pair_of_chats_is_what_chat_sends_with_two_answers(row, tmp_path):
    prompt = "".join(text for text, _ in PLAIN_CHAT.render([(m["role"], m["content"]) for m in TALK]))
    pair = dict(prompt=prompt, chosen=" So.\n", rejected="")
    assert check_pair(row, "it") == pair and conversations(dict(messages=[*TALK, YES]), "it")[-1] == dict(prompt=prompt, response=" So.\n")
    (tmp_path/"own.jsonl").write_text(json.dumps(row))
    (tmp_path/"own.parquet").write_bytes(parquet(**{k: [v] for k, v in row.items()}))
    assert read_pairs(tmp_path/"own.jsonl") == read_pairs(tmp_path/"own.parquet") == [pair]


def test_chats_may_differ_in_an_earlier_answer_only_if_they_end_with_it():
    with pytest.raises(ValueError, match=re.escape("it: rejected has the roles ['assistant', 'user', 'assistant'] after the prompt, expected ['assistant']")):
        check_pair(dict(chosen=TALK[:3], rejected=[*TALK[:2], NO, TALK[3], NO]), "it")
    assert check_pair(dict(chosen=TALK[:3], rejected=[*TALK[:2], NO]), "it")["chosen"] == "Ho."


@pytest.mark.parametrize("row, words", [
    (dict(chosen=[*TALK, YES], rejected=[*TALK, YES]), "it: chosen and rejected are equal, ' So.\\n'"), (dict(prompt=TALK, chosen=[YES], rejected=[YES]), "it: chosen and rejected are equal"),
    (dict(prompt="Why?", chosen=[YES], rejected=[NO]), "it has an empty prompt, expected messages in prompt, or with which both chosen and rejected begin"), (dict(prompt=[], chosen=[YES], rejected=[NO]), "it has an empty prompt"),
    (dict(prompt=TALK, chosen=[*TALK, YES], rejected=[NO]), "it: chosen has the roles ['system', 'user', 'assistant', 'user', 'assistant'] after the prompt, expected ['assistant']"),
    (dict(prompt=TALK, chosen=[YES], rejected=[]), "it: rejected has the roles [] after the prompt"), (dict(prompt=TALK[:3], chosen=[TALK[3]], rejected=[NO]), "it: chosen has the roles ['user'] after the prompt"),
    (dict(prompt=TALK, chosen=[YES], rejected="No."), "it: rejected, expected a list of objects with role and content: No."), (dict(prompt=TALK, chosen=[YES]), "it: rejected, expected a list of objects with role and content: None"),
    (dict(prompt=["Why?"], chosen=[YES], rejected=[NO]), "it: prompt, expected a list of objects with role and content: ['Why?']"), (dict(prompt=TALK, chosen="Yes.", rejected="No."), "it has no text 'prompt', expected prompt, chosen and rejected"),
    (dict(prompt=TALK, chosen=[said("assistant", None)], rejected=[NO]), "it has no text 'content', expected role and content"), (dict(prompt=TALK, chosen=[said("assistant", "a<|endoftext|>")], rejected=[NO]), "it: content with <|endoftext|>"),
    (dict(prompt=[said("tool", "a")], chosen=[YES], rejected=[NO]), "it: messages with role = 'tool', expected one of system, user, assistant"), (dict(chosen="a", rejected="b"), "it has no text 'prompt'")])
def test_a_bad_pair_of_chats_is_told(row, words):
    with pytest.raises(ValueError) as e: check_pair(row, "it")
    assert str(e.value).startswith(words) and "\n" not in str(e.value)


# TRL

def trl_loss(loss_type, token_log_probs, ref_log_probs, mask, beta):
    "Of TRL's trainer on a stand-in; chosen rows first, then the rejected ones"
    trl = pytest.importorskip("trl", "1.16")
    same = SimpleNamespace(device=torch.device("cpu"), gather=lambda x: x, gather_for_metrics=lambda x: x, unwrap_model=lambda m: m)
    blank = torch.zeros_like(mask)
    def model_of(log_probs): return lambda **_: SimpleNamespace(log_probs=log_probs, entropy=blank, mean_logits=blank, is_top1=blank.bool())
    model = model_of(token_log_probs)
    trainer = SimpleNamespace(model=SimpleNamespace(training=True), accelerator=same, aux_loss_enabled=False, ld_alpha=None, precompute_ref_logps=True, f_divergence_type="reverse_kl", beta=beta, loss_types=[loss_type], loss_weights=[1.],
                              use_weighting=False, _metrics=dict(train=defaultdict(list)), _total_train_tokens=0, _tp_size=1, label_smoothing=0.)
    B = len(mask)//2
    sums = ref_log_probs.sum(1)
    inputs = dict(input_ids=torch.zeros(2*B, mask.shape[1] + 1).long(), attention_mask=torch.ones(2*B, mask.shape[1] + 1), completion_mask=torch.cat([torch.zeros(2*B, 1), mask], 1), ref_chosen_logps=sums[:B], ref_rejected_logps=sums[B:])
    return trl.DPOTrainer._compute_loss(trainer, model, inputs, False)


def ragged(seed, B=6, T=7):
    g = torch.Generator().manual_seed(seed)
    mask = (torch.arange(T) < torch.randint(1, T + 1, (2*B, 1), generator=g)).double()
    now, ref = (-2*torch.rand(2*B, T, generator=g, dtype=torch.float64)*mask for _ in range(2))
    return now, ref, mask


@pytest.mark.parametrize("seed", range(10))
def test_dpo_equals_trl_and_ipo_differs_by_the_lengths(seed):
    now, ref, mask = ragged(seed)
    now.requires_grad_()
    for loss_type, ours in (("sigmoid", lambda a, b: dpo_loss(*a.chunk(2), *b.chunk(2), .2).mean()), ("ipo", lambda a, b: ipo_loss(*a.chunk(2), *b.chunk(2), .2).mean())):
        theirs = trl_loss(loss_type, now, ref, mask, .2)
        grad, = torch.autograd.grad(theirs, now)
        scale = mask.sum(1) if loss_type == "ipo" else torch.ones(len(mask))
        mine = ours(now.sum(1)/scale, ref.sum(1)/scale)                     # TRL's IPO is the paper's, of means instead of sums
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)
        torch.testing.assert_close(torch.autograd.grad(mine, now)[0], grad, rtol=0, atol=1e-6)
        wrong = ours(now.sum(1), ref.sum(1)) if loss_type == "ipo" else ours(now.sum(1), 0*ref.sum(1))
        assert abs((wrong - theirs).item()) > 1e-3


def test_simpo_equals_trls_experimental_trainer():
    pytest.importorskip("trl", "1.16")
    cpo = pytest.importorskip("trl.experimental.cpo").CPOTrainer
    now, _, mask = ragged(3)
    lengths = mask.sum(1)
    stub = SimpleNamespace(alpha=0., loss_type="simpo", simpo_gamma=.7, beta=2., label_smoothing=0., accelerator=SimpleNamespace(device="cpu"))
    theirs, *_ = cpo.cpo_loss(stub, *(now.sum(1)/lengths).chunk(2))
    torch.testing.assert_close(simpo_loss(*now.sum(1).chunk(2), *lengths.chunk(2), 2., .7), theirs, rtol=0, atol=1e-6)
