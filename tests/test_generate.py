"The loop, its window and its seeds; streams that never break a character; what is refused."
import itertools
import math

import pytest

torch = pytest.importorskip("torch")
from hypothesis import given, settings, strategies as st

from lmcourse.architecture.transformer_torch import TransformerLM
from lmcourse.generation.generate import complete, generate, log_probs, prompt_ids, stream_text
from lmcourse.generation.sampling import next_token_probs, sample
from lmcourse.tokenization.tokenizer import Tokenizer
from lmcourse.tools.checks import check_close
from lmcourse.tools.config import ModelConfig

CONTEXT, END = 6, 256
BYTES = Tokenizer({i: bytes([i]) for i in range(256)}, [], ["<|endoftext|>"])
TEXTS = ["Zoë had a 🙂 and a 🙂🙂, naïve café, 東京 東京, Ωμέγα Ωμέγα " * 5]
MERGED = Tokenizer.train(TEXTS, 300, ["<|endoftext|>"])


def table(ids):
    "A bigram model of 4 tokens: 3 is never drawn"
    return torch.tensor([[.1, .5, .4, 0], [.3, .2, .5, 0], [.4, .4, .2, 0], [1, 0, 0, 0]]).log()[ids]


@pytest.fixture(scope="module")
def model():
    return TransformerLM(ModelConfig(vocab_size=257, context_length=CONTEXT, d_model=16, num_layers=2, num_heads=2))


def by_hand(model, ids, max_tokens, context, seed=0, **settings):
    ids, g = list(ids), torch.Generator().manual_seed(seed)
    for _ in range(max_tokens):
        with torch.no_grad(): logits = model(torch.tensor([ids[max(0, len(ids) - context):]]))[0, -1]
        ids.append(sample(next_token_probs(logits, **settings), g).item())
    return ids


@pytest.mark.parametrize("settings", [dict(temperature=0), dict(), dict(temperature=0.7, top_k=20), dict(top_p=0.9, min_p=0.01)])
@pytest.mark.parametrize("prompt", [[END], list(range(40, 40 + CONTEXT)), list(range(40, 60))])
@pytest.mark.parametrize("context", [None, 1, 4, CONTEXT])
def test_window(model, settings, prompt, context):
    got = list(generate(model, prompt, 15, seed=5, context_length=context, **settings))
    assert prompt + got == by_hand(model, prompt, 15, context or CONTEXT, seed=5, **settings)


def test_seed(model):
    runs = [list(generate(model, [END], 30, seed=s)) for s in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    one, two = generate(model, [END], 30, seed=1), generate(model, [END], 30, seed=2)     # side by side they do not touch
    pairs = list(zip(one, two))
    assert [p[0] for p in pairs] == runs[0] and [p[1] for p in pairs] == runs[2]
    assert list(generate(model, [END], 30, seed=2, generator=torch.Generator().manual_seed(1))) == runs[0]


def test_nothing_global_is_left_changed(model):
    state, ids = torch.get_rng_state(), [END, 65]
    model.train()
    model.layers[0].eval()
    for _ in generate(model, ids, 3): assert torch.is_grad_enabled() and model.training and not model.layers[0].training
    complete(model, BYTES, "a", 3)
    log_probs(model, ids)
    assert ids == [END, 65] and torch.equal(state, torch.get_rng_state()) and model.training and not model.layers[0].training


def test_what_a_model_keeps_can_be_trained_with():
    class Lazy(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.table = torch.nn.Parameter(torch.eye(3)), None
        def forward(self, ids):
            if self.table is None: self.table = torch.ones(3)       # computed at the first call, that is while generating
            return self.weight[ids]*self.table
    lazy = Lazy()
    list(generate(lazy, [0], 2))
    lazy(torch.tensor([[0, 1]])).sum().backward()
    assert lazy.weight.grad is not None


def test_mode_comes_back_after_an_error():
    class Broken(torch.nn.Module):
        def forward(self, ids): raise RuntimeError("broken" if self.training else "broken in evaluation mode")
    broken = Broken()
    with pytest.raises(RuntimeError, match="in evaluation mode"): next(generate(broken, [0], 1))
    assert broken.training and torch.is_grad_enabled()


def test_stop():
    whole = list(generate(table, [0], 40, seed=3))
    for stop in ([0], [0, 2], [2], [3], []):
        want = list(itertools.takewhile(lambda i: i not in stop, whole))
        assert list(generate(table, [0], 40, seed=3, stop=stop)) == want
    assert 0 in whole and 3 not in whole


def test_one_token_at_a_time():
    calls = []
    def model(ids): calls.append(ids.tolist()[0]); return table(ids)
    stream = generate(model, iter([0]), 3)
    assert calls == []
    first = next(stream)
    assert calls == [[0]]
    second = next(stream)
    assert calls == [[0], [0, first]] and len([second, *stream]) == 2


def test_ids_of_other_kinds(model):
    import numpy as np
    want = list(generate(model, [1, 2], 4))
    for ids in ((1, 2), torch.tensor([1, 2]), np.array([1, 2], np.uint16), iter([1, 2])): assert list(generate(model, ids, 4)) == want
    assert all(type(i) is int for i in want)


@pytest.mark.parametrize("length", [2, CONTEXT, CONTEXT + 1, CONTEXT + 2, 15])
def test_log_probs(model, length):
    ids = by_hand(model, [END], length - 1, CONTEXT)
    with torch.no_grad():
        want = [model(torch.tensor([ids[max(0, t - CONTEXT):t]]))[0, -1].double().log_softmax(-1)[ids[t]].item() for t in range(1, length)]
    got = log_probs(model, ids)
    assert not got.requires_grad
    check_close(got.double(), torch.tensor(want, dtype=torch.float64), rtol=1e-4, atol=1e-5)


def test_log_probs_of_all_continuations_sum_to_1(model):
    total = sum(log_probs(table, (0, *text)).sum().exp().item() for text in itertools.product(range(4), repeat=3))
    assert abs(total - 1) < 1e-5
    assert log_probs(table, [0, 3])[0] == -math.inf


IDS = {t: st.lists(st.integers(0, t.vocab_size - 1), max_size=40) for t in (BYTES, MERGED)}


@pytest.mark.parametrize("tokenizer", [BYTES, MERGED], ids=["bytes", "merges"])
@settings(deadline=None)
@given(st.data())
def test_any_ids_stream_as_they_decode(tokenizer, data):
    ids = data.draw(IDS[tokenizer])
    pieces = list(stream_text(tokenizer, ids))
    assert "".join(pieces) == tokenizer.decode(ids) and all(pieces)


@pytest.mark.parametrize("tokenizer", [BYTES, MERGED], ids=["bytes", "merges"])
@settings(deadline=None)
@given(st.text(st.one_of(st.sampled_from("Zoë🙂東京é"), st.characters(exclude_categories=["Cs"]))))
def test_text_streams_whole_characters(tokenizer, text):
    "Each prefix that was shown is a prefix of the text: nothing is replaced, nothing taken back, and nothing held that is complete"
    ids, shown, count = tokenizer.encode(text), "", 0
    def watched():
        nonlocal count
        for i in ids: count += 1; yield i
    for piece in stream_text(tokenizer, watched()):
        shown += piece
        assert text.startswith(shown)
        raw = b"".join(map(tokenizer.token_bytes, ids[:count]))
        assert shown == raw.decode("utf-8", errors="ignore")
    assert shown == text


def test_half_a_character_at_the_end():
    ids = BYTES.encode("a🙂")
    assert list(stream_text(BYTES, ids[:-1])) == ["a", "\ufffd"]
    assert list(stream_text(BYTES, [*ids[:-1], ord("b")])) == ["a", "\ufffdb"]
    assert list(stream_text(BYTES, [])) == []


def test_complete(model):
    ids = list(generate(model, [END, *b"ab"], 12, temperature=0.9, seed=4, stop=[END]))
    assert complete(model, BYTES, "ab", 12, temperature=0.9, seed=4) == BYTES.decode(ids)
    endless = complete(model, BYTES, "ab", 12, seed=4, stop=[])
    assert endless == BYTES.decode(generate(model, [END, *b"ab"], 12, seed=4))
    assert prompt_ids(BYTES, "") == [END] == prompt_ids(BYTES, "<|endoftext|>") and prompt_ids(BYTES, "a") == [END, 97]


@pytest.mark.parametrize("change,words", [
    (dict(ids=[]), "ids are empty"), (dict(ids=[257]), "id 257"), (dict(ids=[0, -1]), "id -1"), (dict(max_tokens=-1), "max_tokens = -1"),
    (dict(temperature=-0.5), "temperature = -0.5"), (dict(temperature=math.nan), "temperature = nan"), (dict(top_k=0), "top_k = 0"),
    (dict(top_p=0.0), "top_p = 0.0"), (dict(top_p=1.5), "top_p = 1.5"), (dict(min_p=2), "min_p = 2"), (dict(stop=[300]), "stop: id 300"),
    (dict(context_length=0), "context_length = 0"), (dict(context_length=CONTEXT + 1), f"expected 1 to {CONTEXT}")])
def test_refused_at_once(model, change, words):
    with pytest.raises(ValueError, match=words): generate(**dict(model=model, ids=[0], max_tokens=5) | change)


@pytest.mark.parametrize("change", [dict(ids=[0.5]), dict(ids=["a"]), dict(ids="ab"), dict(ids=3), dict(max_tokens=2.5), dict(top_k=1.5), dict(stop=5),
                                    dict(ids=torch.zeros(2, 3, dtype=torch.int64))])
def test_wrong_types(model, change):
    with pytest.raises(TypeError): generate(**dict(model=model, ids=[0], max_tokens=5) | change)


def test_other_errors(model):
    with pytest.raises(ValueError, match="logits"): next(generate(lambda ids: table(ids)*math.nan, [0], 5))
    with pytest.raises(ValueError, match="at least two"): log_probs(model, [0])
    with pytest.raises(ValueError, match="300 ids, the model's vocabulary 257"): complete(model, MERGED, "a")
    with pytest.raises(ValueError, match="id 257"): list(stream_text(BYTES, [257]))
