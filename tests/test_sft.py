"Supervised fine-tuning: masks, constants, micro-batches, packing."
import json
import math
from dataclasses import replace
from itertools import islice

import pytest

torch = pytest.importorskip("torch")

from little_hub import parquet
from recorder import recorder

from lmcourse.alignment import sft
from lmcourse.alignment.briefs import Demonstrators
from lmcourse.alignment.sft import (SftBatches, block_attention, compute_entropy, conversations, read_conversations, get_response_log_probs, masked_normalize, measure_log_probs, pack_rows, padded_rows,
                                    sft_microbatch_train_step, tokenize_prompt_and_output)
from lmcourse.architecture.transformer_torch import TransformerLM
from lmcourse.generation.generate import PLAIN_CHAT
from lmcourse.tools.config import ModelConfig
from lmcourse.training.models import load_model

CONFIG = ModelConfig(vocab_size=97, context_length=64, d_model=32, num_layers=2, num_heads=4, d_ff=64)


class Letters:
    "A tokenizer of bytes, 0 for the end."
    end_of_text = 0
    def encode(self, text): return [1 + b % 96 for b in text.encode()]


def some_rows(n, seed=0, most=12):
    g = torch.Generator().manual_seed(seed)
    draw = lambda low, high: int(torch.randint(low, high, (), generator=g))
    return [([draw(1, 97) for _ in range(p + r)], p) for p, r in ((draw(1, most), draw(1, most)) for _ in range(n))]


def test_tokens_labels_and_mask_by_hand():
    found = tokenize_prompt_and_output(["ab", "a"], ["c", "bcd"], Letters())
    a, b, c, d = Letters().encode("abcd")
    assert found["input_ids"].tolist() == [[a, b, c], [a, b, c]] and found["labels"].tolist() == [[b, c, 0], [b, c, d]]
    assert found["response_mask"].tolist() == [[False, True, False], [True, True, True]]


def test_a_row_without_a_prompt_is_all_response():
    rows = [([1, 2, 3], 0)]
    assert padded_rows(rows, 9)["response_mask"].tolist() == pack_rows(rows, 2, 9)["response_mask"].tolist() == [[True, True]]


def test_log_probs_are_measured_with_the_products_of_training(monkeypatch):
    within, model = [], TransformerLM(CONFIG)
    monkeypatch.setattr(sft, "tf32_products", recorder(within))
    model.register_forward_pre_hook(lambda *args: within.append("model"))
    measure_log_probs(model, torch.ones(3, 4).long(), torch.ones(3, 4).long(), rows=2)
    assert within == [torch.device("cpu"), "model", "model", "left"]


@pytest.mark.parametrize("kwargs", [dict(num_kv_heads=2), dict(position="learned"), dict(qk_norm=True, tie_embeddings=True), dict(position="none")], ids=str)
@pytest.mark.parametrize("length", [24, 40, 64])
def test_packed_rows_equal_separate_ones(kwargs, length):
    model, rows = TransformerLM(replace(CONFIG, **kwargs), 1, dtype=torch.float64), some_rows(9, length)
    apart, packed = padded_rows(rows, 0), pack_rows(rows, length, 0)
    alone = get_response_log_probs(model, apart["input_ids"], apart["labels"])["log_probs"]
    attention = [layer.attn.attention for layer in model.layers]
    with block_attention(model, packed["segments"]): logits = model(packed["input_ids"], packed["positions"])
    assert [layer.attn.attention for layer in model.layers] == attention
    inside = logits.log_softmax(-1).gather(-1, packed["labels"][..., None])[..., 0]
    loss = lambda log_probs, mask: log_probs[mask].sum()
    assert torch.allclose(loss(alone, apart["response_mask"]), loss(inside, packed["response_mask"]), atol=1e-10)
    a, b = (torch.autograd.grad(loss(*pair), model.layers[0].attn.q_proj.weight) for pair in ((alone, apart["response_mask"]), (inside, packed["response_mask"])))
    assert torch.allclose(a[0], b[0], atol=1e-10)
    assert len(packed["labels"]) <= len(rows) and packed["response_mask"].sum() == apart["response_mask"].sum()


@pytest.mark.parametrize("pieces", [2, 3, 6])
def test_micro_batches_give_the_gradient_of_the_batch(pieces):
    model, rows = TransformerLM(CONFIG, 2, dtype=torch.float64), padded_rows(some_rows(6, 5), 0)
    def gradient(n):
        model.zero_grad()
        total = 0
        for part in range(n):
            ids, labels, mask = (t.chunk(n)[part] for t in rows.values())
            loss, about = sft_microbatch_train_step(get_response_log_probs(model, ids, labels)["log_probs"], mask, n, 7.)
            total += loss
            assert about["tokens"] == mask.sum()
        return total, torch.cat([p.grad.flatten() for p in model.parameters()])
    (a, x), (b, y) = gradient(1), gradient(pieces)
    assert torch.allclose(a, b, atol=1e-12) and torch.allclose(x, y, atol=1e-12)


def test_entropy_and_normalize():
    logits = torch.tensor([[0., 0., 0.], [1e4, 0., 0.], [-1e4, 0., 0.]], dtype=torch.float64)
    assert torch.allclose(compute_entropy(logits), torch.tensor([3., 1., 2.], dtype=torch.float64).log())
    barred = torch.tensor([0., 0., -torch.inf], requires_grad=True)         # An impossible token
    assert compute_entropy(barred).item() == pytest.approx(torch.tensor(2.).log().item())
    assert torch.autograd.grad(compute_entropy(barred), barred)[0].abs().max() < 1e-6
    assert compute_entropy(torch.zeros(50257, dtype=torch.bfloat16)).item() == pytest.approx(math.log(50257), rel=1e-5)
    x, mask = torch.tensor([[1., float("inf")], [2., 3.]]), torch.tensor([[1, 0], [1, 1]])
    assert masked_normalize(x, mask, 3.) == 2 and masked_normalize(x, mask, 1., 0).tolist() == [3, 3]


def test_batches_learn_the_response_and_its_end_and_are_the_same_for_a_step():
    from lmcourse.training.models import load_model
    tokenizer = load_model()[1]
    pairs = list(islice(Demonstrators(.2, 1), 10))
    batches = SftBatches(pairs, tokenizer, 4)
    for step in range(4):
        inputs, targets = batches[step]
        for row in range(4):
            prompt, response = pairs[(4*step + row) % 10]
            assert targets[row][targets[row] != -100].tolist() == [*tokenizer.encode(response), tokenizer.end_of_text]
            assert inputs[row][0] == tokenizer.end_of_text and inputs[row, 1:1 + len(tokenizer.encode(prompt))].tolist() == tokenizer.encode(prompt)
        assert all(torch.equal(a, b) for a, b in zip((inputs, targets), batches[step]))


@pytest.mark.parametrize("call, words", [
    (lambda: tokenize_prompt_and_output([], [], Letters()), "0 prompts"), (lambda: tokenize_prompt_and_output(["a"], [""], Letters()), "no tokens"),
    (lambda: masked_normalize(torch.ones(1), torch.ones(1), 0), "normalize_constant"), (lambda: pack_rows([([1]*8, 1)], 6, 0), "needs a row of 7, not of 6"),
    (lambda: masked_normalize(torch.ones(3, 1), torch.ones(3), 1.), r"tensor \(3, 1\), mask \(3,\)"), (lambda: sft_microbatch_train_step(torch.ones(2, 3), torch.ones(1, 3), 1), r"mask \(1, 3\)"),
    (lambda: pack_rows([([1, 2], 1), ([], 0)], 8, 0), "a conversation of 0 tokens"), (lambda: padded_rows([([], 0), ([1, 2], 1)], 0), "a conversation of 0 tokens"),
    (lambda: pack_rows([([1, 2], 3)], 8, 0), "2 tokens with a prompt of 3"), (lambda: padded_rows([], 0), "no conversations"),
    (lambda: block_attention(TransformerLM(replace(CONFIG, window=4)), torch.zeros(1, 3)).__enter__(), "window = 4"), (lambda: SftBatches([("a", "b")], Letters(), 0), "a batch of 0"),
    (lambda: SftBatches([("a", "b")], Letters(), 2), "a batch of 2 from 1 demo")])
def test_rejected(call, words):
    with pytest.raises(ValueError, match=words): call()


def test_log_probs_are_measured_on_the_device_of_the_model(monkeypatch):
    "The meta device stands in for a GPU: only where the rows are is looked at."
    asked = []
    def log_probs(model, ids, labels, entropy):
        asked.append((ids.device.type, labels.device.type, len(ids)))
        return dict(log_probs=torch.zeros(labels.shape))
    monkeypatch.setattr(sft, "get_response_log_probs", log_probs)
    ids = torch.zeros(5, 7, dtype=torch.int64)
    found = measure_log_probs(torch.nn.Linear(1, 1, device="meta"), ids, ids, rows=2)
    assert asked == [("meta", "meta", 2), ("meta", "meta", 2), ("meta", "meta", 1)] and found["log_probs"].shape == (5, 7) and found["log_probs"].device.type == "cpu"


def test_segments_may_be_on_another_device():
    "The meta device stands in for a GPU."
    with block_attention(TransformerLM(CONFIG), torch.zeros(1, 3, device="meta")): pass


# Own conversations

def said(role, content): return dict(role=role, content=content)


def test_each_answer_of_a_conversation_is_a_pair_and_its_prompt_is_what_chat_sends():
    turns = [said("system", "Be brief."), said("user", "Hi."), said("assistant", "Ho."), said("user", "Why?"), said("assistant", " So.\n")]
    first, second = conversations(dict(messages=turns, source="x"), "it")
    assert first == dict(prompt="Be brief.\n\nUser: Hi.\nAssistant:", response="Ho.")
    assert second == dict(prompt="Be brief.\n\nUser: Hi.\nAssistant:Ho.\nUser: Why?\nAssistant:", response=" So.\n")
    sent = PLAIN_CHAT.encode([(m["role"], m["content"]) for m in turns[:4]], tokenizer := load_model()[1])
    ids, targets = SftBatches([tuple(second.values())], tokenizer, 1)[0]
    begins = int((targets[0] != -100).int().argmax()) + 1
    assert ids[0, :begins].tolist() == sent and [*ids[0, begins:].tolist(), tokenizer.end_of_text] == [*tokenizer.encode(" So.\n"), tokenizer.end_of_text]


def test_prompt_and_completion_may_be_messages_and_only_the_completion_is_learnt():
    before = [said("system", "Be brief."), said("user", "Hi."), said("assistant", "Ho."), said("user", "Why?")]
    after = [said("assistant", "So."), said("user", "What?"), said("assistant", "That.")]
    whole = conversations(dict(messages=before + after), "it")
    for name in ("completion", "response"): assert conversations({"prompt": before, name: after}, "it") == whole[1:]


@pytest.mark.parametrize("row, words", [
    (dict(prompt=[said("user", "a")], completion="b"), "it has no text 'prompt'"), (dict(prompt="a", completion=[said("assistant", "b")]), "it has no text 'response'"), (dict(prompt=[], completion=[said("assistant", "b")]), "it has no text 'prompt'"),
    (dict(prompt=[said("user", "a"), said("assistant", "b")], completion=[said("user", "c")]), "it: messages without an answer of the assistant"), (dict(prompt=["a"], completion=["b"]), "it: messages, expected a list of objects with role and content"),
    (dict(prompt="a"), "it has no text 'response', expected prompt and response, or messages: {'prompt': 'a'}"), (dict(instruction="a", output="b"), "it has no text 'prompt', expected prompt and response, or messages"),
    (dict(prompt="a", response=4), "it has no text 'response'"), (dict(prompt=None, response="a"), "it has no text 'prompt'"), (dict(prompt="a", response=" \n"), "it has an empty response"),
    (dict(prompt="a<|endoftext|>", response="b"), "it: prompt with <|endoftext|>, which is added at its end; leave it out"), (dict(prompt="a", response="b<|endoftext|>"), "it: response with <|endoftext|>"),
    (dict(messages="a"), "it: messages, expected a list of objects with role and content: a"), (dict(messages=["a"]), "it: messages, expected a list"), (dict(messages=[]), "it: messages without an answer of the assistant"),
    (dict(messages=[said("user", "a")]), "it: messages without an answer"), (dict(messages=[said("user", "a"), said("tool", "b"), said("assistant", "c")]), "it: messages with role = 'tool', expected one of system, user, assistant"),
    (dict(messages=[said("user", "a"), said("assistant", None)]), "it has no text 'content', expected role and content"), (dict(messages=[said("user", [dict(type="text", text="a")]), said("assistant", "b")]), "it has no text 'content'"),
    (dict(messages=[said("user", "a"), said("assistant", "")]), "it has an empty response"), (dict(messages=[said("user", "a<|endoftext|>"), said("assistant", "b")]), "it: content with <|endoftext|>")])
def test_a_bad_record_is_told(row, words):
    with pytest.raises(ValueError) as e: conversations(row, "it")
    assert str(e.value).startswith(words) and "\n" not in str(e.value)


def test_a_completion_is_a_response():
    "TRL's name"
    assert conversations(dict(prompt="a", completion="b"), "it") == [dict(prompt="a", response="b")]
    with pytest.raises(ValueError, match="it has an empty response"): conversations(dict(prompt="a", completion=" "), "it")


def test_conversations_are_read_from_parquet_and_a_json_list_too(tmp_path):
    (tmp_path/"own.parquet").write_bytes(parquet(prompt=["a", "b"], response=["c", "d"]))
    assert read_conversations(tmp_path/"own.parquet") == [dict(prompt="a", response="c"), dict(prompt="b", response="d")]
    (tmp_path/"chats.parquet").write_bytes(parquet(messages=[[said("user", "a"), said("assistant", "b")]]))
    assert read_conversations(tmp_path/"chats.parquet") == [dict(prompt="User: a\nAssistant:", response="b")]
    (tmp_path/"own.json").write_text(json.dumps([dict(prompt="a", response="c"), dict(prompt="b", response="d")], indent=1))
    assert read_conversations(tmp_path/"own.json") == read_conversations(tmp_path/"own.parquet")
    (tmp_path/"bad.parquet").write_bytes(parquet(prompt=["a", "b"], response=["c", None]))
    with pytest.raises(ValueError, match="bad.parquet: row 2 has no text 'response'"): read_conversations(tmp_path/"bad.parquet")
