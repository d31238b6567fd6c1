"The loop, its window and its seeds; batches; streams that never break a character or show a stop string; what is refused; right stories and wrong ones."
import itertools
import math
import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
from hypothesis import given, settings, strategies as st

from lmcourse.architecture.transformer_torch import TransformerLM
from lmcourse.generation.generate import (PLAIN_CHAT, ChatTemplate, RecomputingDecoder, check_story, complete, complete_stream, generate, generate_batch, generate_scored, log_probs,
                                          measure_stories, measure_story, prompt_ids, read_chat_template, story_slips, stream_text)
from lmcourse.generation.sampling import next_token_probs, sample
from lmcourse.tokenization.tokenizer import Tokenizer
from lmcourse.tools.checks import check_close
from lmcourse.tools.config import ModelConfig
from lmcourse.tools.stories import Stories

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
    assert prompt_ids(BYTES, "") == [END] and prompt_ids(BYTES, "a") == [END, 97]


@pytest.mark.parametrize("prompt", ["<|endoftext|>", "a<|endoftext|>b", "<|endoftext|><|endoftext|>"])
@pytest.mark.parametrize("tokenizer", [BYTES, MERGED])
def test_special_strings_in_a_prompt_are_plain_text(tokenizer, prompt):
    first, *rest = prompt_ids(tokenizer, prompt)
    assert first == tokenizer.end_of_text and tokenizer.end_of_text not in rest and tokenizer.decode(rest) == prompt
    seen = []
    def watched(ids):
        seen.append(ids[0].tolist())
        return torch.zeros(1, ids.shape[1], tokenizer.vocab_size)
    complete(watched, tokenizer, prompt, 1)
    assert seen == [[first, *rest]]


@pytest.mark.parametrize("change,words", [
    (dict(ids=[]), "ids are empty"), (dict(ids=[257]), "id 257"), (dict(ids=[0, -1]), "id -1"), (dict(max_tokens=-1), "max_tokens = -1"),
    (dict(temperature=-0.5), "temperature = -0.5"), (dict(temperature=math.nan), "temperature = nan"), (dict(top_k=0), "top_k = 0"),
    (dict(top_p=0.0), "top_p = 0.0"), (dict(top_p=1.5), "top_p = 1.5"), (dict(min_p=2), "min_p = 2"), (dict(repetition_penalty=0), "repetition_penalty = 0"),
    (dict(repetition_penalty=math.nan), "repetition_penalty = nan"), (dict(stop=[300]), "stop: id 300"),
    (dict(context_length=0), "context_length = 0"), (dict(context_length=CONTEXT + 1), f"expected 1 to {CONTEXT}")])
def test_refused_at_once(model, change, words):
    given = dict(model=model, ids=[0], max_tokens=5) | change
    for f in (generate, generate_scored):
        with pytest.raises(ValueError, match=words): f(**given)
    with pytest.raises(ValueError, match=words): generate_batch(model, [[0], given.pop("ids")], **{k: v for k,v in given.items() if k != "model"})


@pytest.mark.parametrize("change", [dict(ids=[0.5]), dict(ids=["a"]), dict(ids="ab"), dict(ids=3), dict(max_tokens=2.5), dict(top_k=1.5), dict(stop=5),
                                    dict(ids=torch.zeros(2, 3, dtype=torch.int64))])
def test_wrong_types(model, change):
    with pytest.raises(TypeError): generate(**dict(model=model, ids=[0], max_tokens=5) | change)


def test_other_errors(model):
    assert list(generate(lambda ids: torch.zeros_like(table(ids)), [0], 3, temperature=0.)) == [0]*3      # of equal ones the lowest id
    for temperature in (0., 1.):
        with pytest.raises(ValueError, match="logits"): next(generate(lambda ids: table(ids)*math.nan, [0], 5, temperature=temperature))
    with pytest.raises(ValueError, match="at least two"): log_probs(model, [0])
    with pytest.raises(ValueError, match="300 ids, the model's vocabulary 257"): complete(model, MERGED, "a")
    with pytest.raises(ValueError, match="id 257"): list(stream_text(BYTES, [257]))


def test_decoder(model):
    decoder, ids = RecomputingDecoder(model), [256, 65, 66, 67, 68]
    with torch.no_grad(): want = model(torch.tensor([ids]))[0]
    assert decoder.room == CONTEXT and decoder.length == 0
    check_close(decoder.feed(ids[:2]), want[1], rtol=1e-4, atol=1e-5)
    check_close(decoder.feed(ids[2:], all=True), want[2:], rtol=1e-4, atol=1e-5)
    assert decoder.length == 5 and decoder.feed(iter([1])).shape == (257,) and decoder.length == 6
    decoder.rewind(1)
    check_close(decoder.feed([65]), want[1], rtol=1e-4, atol=1e-5)
    decoder.rewind(2)
    assert decoder.length == 2
    half = RecomputingDecoder(TransformerLM(model.config).bfloat16())
    assert half.feed([1]).dtype == torch.float32 and not half.feed([2]).requires_grad


@pytest.mark.parametrize("ids,words", [([], "ids are empty"), ([257], "id 257"), ([-1], "id -1"), ([1]*5, f"5 ids after 2, but the decoder has room for {CONTEXT}")])
def test_decoder_refuses_and_nothing_changes(model, ids, words):
    decoder = RecomputingDecoder(model)
    decoder.feed([7, 8])
    with pytest.raises(ValueError, match=words): decoder.feed(ids)
    for n in (-1, 3):
        with pytest.raises(ValueError, match=f"rewind to {n}, expected 0 to 2"): decoder.rewind(n)
    assert decoder.ids == [7, 8]
    def broken(rows): raise RuntimeError("broken")
    decoder.model = broken
    with pytest.raises(RuntimeError): decoder.feed([9])
    assert decoder.ids == [7, 8]


class Careful(RecomputingDecoder):
    "What the loop may ask of a decoder: only what is new, and the whole window when it slides"
    made, calls = [], []
    def __init__(self, model):
        super().__init__(model)
        Careful.made.append(self)
    def feed(self, ids, all=False):
        Careful.calls.append((self.length, len(ids)))
        return super().feed(ids, all)


@pytest.mark.parametrize("prompt", [1, CONTEXT - 1, CONTEXT, CONTEXT + 3])
def test_loop_and_decoder(model, prompt):
    ids = [256, *range(prompt - 1)]
    Careful.calls.clear()
    got = list(generate(model, ids, 9, seed=2, decoder=Careful))
    assert got == list(generate(model, ids, 9, seed=2))
    lengths = [min(prompt + k, CONTEXT) for k in range(9)]
    want = [(0, lengths[0])] + [(0, CONTEXT) if prompt + k > CONTEXT else (prompt + k - 1, 1) for k in range(1, 9)]
    assert Careful.calls == want
    def small(model):
        decoder = RecomputingDecoder(model)
        decoder.room = 4
        return decoder
    assert list(generate(model, [256], 4, seed=2, decoder=small)) == list(generate(model, [256], 4, seed=2))
    assert list(generate(model, [256], 9, seed=2, decoder=small, context_length=4)) == list(generate(model, [256], 9, seed=2, context_length=4))
    with pytest.raises(ValueError, match="room for 4 tokens, but 5 must be held"): generate(model, [256], 5, decoder=small)


@pytest.mark.parametrize("settings", [dict(), dict(temperature=0), dict(temperature=0.5, top_p=0.8, repetition_penalty=1.2)])
def test_scored(model, settings):
    whole = list(generate_scored(model, [END], 20, seed=3, **settings))
    assert [d.id for d in whole] == list(generate(model, [END], 20, seed=3, **settings))
    check_close(torch.tensor([d.log_prob for d in whole]), log_probs(model, [END, *[d.id for d in whole]]), rtol=1e-4, atol=1e-5)
    stop = whole[8].id
    cut = list(generate_scored(model, [END], 20, seed=3, stop=[stop], **settings))
    assert cut == whole[:[d.id for d in whole].index(stop) + 1]


def test_penalty_in_the_loop():
    ids = [0]
    for t in range(8):
        logits, seen = torch.tensor([1.0, 3.0, 2.0, 0.5]), set(ids[1:])
        ids.append(max(range(4), key=lambda i: (logits[i]/(1.7 if i in seen else 1)).item()))
    flat = lambda rows: torch.tensor([1.0, 3.0, 2.0, 0.5]).expand(*rows.shape, 4)
    assert list(generate(flat, [0], 8, temperature=0, repetition_penalty=1.7)) == ids[1:]
    assert generate_batch(flat, [[0], [0, 0]], 8, temperature=0, repetition_penalty=1.7) == [ids[1:]]*2


@settings(deadline=None, max_examples=40)
@given(st.lists(st.lists(st.integers(0, 256), min_size=1, max_size=9), max_size=5), st.integers(0, 9), st.sets(st.integers(0, 256), max_size=60),
       st.integers(0, 99), st.sampled_from([None, 1, 3]), st.sampled_from([dict(), dict(temperature=0.8, top_k=30), dict(top_p=0.9, repetition_penalty=1.3)]))
def test_batch_equals_each_alone(model, prompts, max_tokens, stop, seed, context, chosen):
    before = [list(p) for p in prompts]
    got = generate_batch(model, prompts, max_tokens, stop=stop, seed=seed, context_length=context, **chosen)
    assert got == [list(generate(model, p, max_tokens, stop=stop, seed=seed + k, context_length=context, **chosen)) for k,p in enumerate(prompts)]
    assert prompts == before


def test_batch_computes_only_what_is_alive():
    sizes = []
    def count(ids): sizes.append(tuple(ids.shape)); return table(ids)
    got = generate_batch(count, [[1], [2, 1], [0]], 6, stop=[0], seed=1)
    steps = [min(6, len(ids) + 1) for ids in got]
    assert [n for n,_ in sizes] == [sum(s > t for s in steps) for t in range(max(steps))]
    assert sorted(steps) != [6, 6, 6]


OTHER = """from lmcourse.generation.generate import complete
from test_generate import BYTES, ModelConfig, TransformerLM
model = TransformerLM(ModelConfig(vocab_size=257, context_length=6, d_model=16, num_layers=2, num_heads=2))
print(ascii(complete(model, BYTES, 'a', 40, seed=11)))"""


def test_a_seed_is_the_same_text_in_another_process(model):
    environment = os.environ | dict(PYTHONPATH=os.pathsep.join([os.path.dirname(__file__), *filter(None, [os.environ.get("PYTHONPATH")])]), PYTHONHASHSEED="5")
    told = subprocess.run([sys.executable, "-c", OTHER], capture_output=True, text=True, check=True, env=environment).stdout.strip()
    assert told == ascii(complete(model, BYTES, "a", 40, seed=11))


def until(text, stops):
    "The text up to the first stop string, a character at a time"
    for n in range(len(text) + 1):
        ends = [s for s in stops if text[:n].endswith(s)]
        if ends: return text[:n - max(map(len, ends))], n
    return text, None


@settings(deadline=None, max_examples=300)
@given(st.text("ab🙂#", max_size=20), st.lists(st.text("ab🙂#", min_size=1, max_size=4), max_size=3), st.lists(st.integers(0, 60), max_size=12))
def test_stop_strings(text, stops, cuts):
    "However the bytes are cut into tokens: nothing of a stop string is shown, what can be shown is shown, and no more is asked for"
    data = text.encode()
    cuts = sorted({c % (len(data) + 1) for c in cuts} | {0, len(data)})
    tokens = [data[a:b] for a,b in itertools.pairwise(cuts)]
    class Cut:
        def token_bytes(self, i): return tokens[i]
    asked, shown = 0, ""
    def watched():
        nonlocal asked
        for i in range(len(tokens)): asked += 1; yield i
    want, end = until(text, stops)
    for piece in stream_text(Cut(), watched(), stops):
        shown += piece
        assert piece and want.startswith(shown)
        if end is None and asked < len(tokens):           # held back is only what may still become a stop string
            known = b"".join(tokens[:asked]).decode(errors="ignore")
            rest = known[len(shown):]
            assert not rest or any(s.startswith(rest) and s != rest for s in stops)
    assert shown == want
    if end is not None: assert len(b"".join(tokens[:asked - 1]).decode(errors="ignore")) < end


@pytest.mark.parametrize("pieces", [["abc"], ["a", "bc"], ["ab", "c"], ["a", "b", "c"]])
def test_of_two_stop_strings_the_one_that_is_complete_first(pieces):
    class Cut:
        def token_bytes(self, i): return pieces[i].encode()
    assert "".join(stream_text(Cut(), range(len(pieces)), ["abc", "b"])) == "a"
    assert "".join(stream_text(Cut(), range(len(pieces)), ["c", "bc", "abcd"])) == "a"


def test_complete_stream(model):
    pieces = complete_stream(model, BYTES, "ab", 40, temperature=0.9, seed=4)
    text = complete(model, BYTES, "ab", 40, temperature=0.9, seed=4)
    assert "".join(pieces) == text and len(text) > 6
    stop = text[3:5]
    assert complete(model, BYTES, "ab", 40, temperature=0.9, seed=4, stop_strings=[stop]) == text[:text.index(stop)]


@pytest.mark.parametrize("bad,error,words", [([""], ValueError, "at least one character"), (["a", ""], ValueError, "at least one character"),
                                             ([5], ValueError, "expected strings"), ("ab", TypeError, "a list of strings")])
def test_stop_strings_refused_at_once(model, bad, error, words):
    for f in (lambda: stream_text(BYTES, [], bad), lambda: complete_stream(model, BYTES, stop_strings=bad), lambda: complete(model, BYTES, stop_strings=bad)):
        with pytest.raises(error, match=words): f()


def test_another_tokenizer(model):
    other = Tokenizer({**{i: bytes([i]) for i in range(256)}, 0: b"\x01", 1: b"\x00"}, [], ["<|endoftext|>"])
    assert other.vocab_size == BYTES.vocab_size and other.digest != BYTES.digest
    told = TransformerLM(model.config)
    told.tokenizer_digest = BYTES.digest
    assert complete(told, BYTES, "a", 3) == complete(model, BYTES, "a", 3)
    for f in (complete, complete_stream):
        with pytest.raises(ValueError, match=f"{other.digest[:12]}.*expected {BYTES.digest[:12]}"): f(told, other, "a", 3)
        with pytest.raises(ValueError, match="300 ids, the model's vocabulary 257"): f(told, MERGED, "a")
    complete(model, other, "a", 3)          # a model that knows no digest


STORIES = list(itertools.islice(Stories(seed=21), 60))
RIGHT = dict.fromkeys(("form", "people", "things", "consistent"), True)


def test_true_stories_are_right():
    for d in STORIES: assert check_story(d) == RIGHT
    for d in STORIES[:10]: assert story_slips(d) == []


def swapped(story, old, new):
    "The last `old` as `new`; the story itself if it stands there only once"
    head, found, tail = story.rpartition(old)
    return head + new + tail if old in head else story


def test_a_wrong_name_a_wrong_tree():
    "A hero's name that changes is people's, a tree that changes is a thing's, and the form stays right"
    count = 0
    for d in STORIES:
        rules = Stories().rules
        hero = next(n for n in rules["girl"].entries + rules["boy"].entries if n in d.replace(",", " ").replace(".", " ").split())
        kind = rules["girl"] if hero in rules["girl"].entries else rules["boy"]
        new = next(n for n in kind.entries if n not in d)
        wrong = swapped(d, hero + " ", new + " ")
        if wrong != d:
            count += 1
            assert check_story(wrong) == RIGHT | dict(people=False, consistent=False) and "name" in story_slips(wrong)
        tree = next((t for t in rules["tree"].entries if f"{t} tree" in d), None)
        wrong = swapped(d, f"{tree} tree", f"{'oak' if tree != 'oak' else 'elm'} tree")
        if wrong != d:
            assert check_story(wrong) == RIGHT | dict(things=False, consistent=False) and story_slips(wrong) == ["tree"]
        for broken in (d[:-1], d + " ", d.replace(" the ", " a the ", 1), d.replace(". ", ".  ", 1), ""):
            assert broken == d or not any(check_story(broken).values())
    assert count > 40


def test_no_form_no_slips():
    with pytest.raises(ValueError, match="no sentences of the grammar: 'Once upon'"): story_slips("Once upon")


def test_measure_story():
    "A model that recites a true story gets its exact numbers; one that never ends gets none"
    story = STORIES[0]
    ids = [END, *BYTES.encode(story), END]
    def recite(rows): return 30*torch.nn.functional.one_hot(torch.tensor([ids[1:rows.shape[1] + 1]]), 257).float()
    got = measure_story(recite, BYTES, max_tokens=len(ids))
    assert {k: got[k] for k in RIGHT} == RIGHT and got["text"] == story and got["tokens"] == len(ids) - 1
    check_close(got["source"], -Stories().log_prob(story), rtol=1e-12)
    assert got["forgetful"] > got["source"] and 0 <= got["model"] < 1e-3
    got = measure_story(recite, BYTES, max_tokens=len(ids) - 2)         # the end is missing
    assert not any(got[k] for k in RIGHT) and got["source"] is None and got["forgetful"] is None and got["text"] == story


def test_measure_stories():
    def noise(rows): return torch.zeros(*rows.shape, 257)
    got, told = measure_stories(noise, BYTES, 3, max_tokens=9), [measure_story(noise, BYTES, seed, max_tokens=9) for seed in range(3)]
    assert got["settings"] == dict(max_tokens=9) and got["slips"] == {} and got["form"] == [False]*3 and got["source"] == [None]*3
    assert got["tokens"] == [t["tokens"] for t in told] and got["model"] == [round(t["model"], 3) for t in told]
    with pytest.raises(ValueError, match="count = 0, expected 1 or more"): measure_stories(noise, BYTES, 0)


# Conversations

CHATML = Tokenizer({i: bytes([i]) for i in range(256)}, [], ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
TURNS = ChatTemplate({r: (f"<|im_start|>{r}\n", "<|im_end|>\n") for r in ("system", "user", "assistant")}, "<|im_start|>assistant\n", ("<|im_end|>",))
MARKS = st.sampled_from(["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im_", "start|>", "<|", "end|>", "system", "\n", "a", "🙂"])


@given(st.lists(st.tuples(st.sampled_from([*TURNS.roles]), st.lists(MARKS, max_size=6).map("".join)), max_size=4))
def test_no_message_can_write_a_special_token(messages):
    ids = TURNS.encode(messages, CHATML)
    assert [i for i in ids if i > 255] == [256] + [257, 258]*len(messages) + [257]
    text = "".join(f"<|im_start|>{r}\n{c}<|im_end|>\n" for r, c in messages) + "<|im_start|>assistant\n"
    assert CHATML.decode(ids[1:]) == text
    assert 256 not in PLAIN_CHAT.encode(messages, MERGED)[1:]


def test_plain_chat_is_encoded_as_one_text():
    "Tokens may reach over the ends of a message"
    assert PLAIN_CHAT.encode([("user", " Zoë")], MERGED) == prompt_ids(MERGED, "User:  Zoë\nAssistant:")


@pytest.mark.parametrize("given, words", [
    ("[", "not JSON"), ("[]", "a list, expected an object"), ('{"roles": {}}', "expected an object with"),
    ('{"roles": {}, "assistant_start": "", "x": 1}', "expected an object with"), ('{"roles": {}, "assistant_start": ""}', "roles = {}"),
    ('{"roles": {"user": "x"}, "assistant_start": ""}', "roles.user = 'x'"), ('{"roles": {"user": {"prefix": 1}}, "assistant_start": ""}', "roles.user = {'prefix': 1}"),
    ('{"roles": {"user": {"before": ""}}, "assistant_start": ""}', "roles.user = {'before': ''}"), ('{"roles": {"user": {}}, "assistant_start": 1}', "assistant_start = 1"),
    ('{"roles": {"user": {}}, "assistant_start": "", "stop": "x"}', "stop = 'x'"), ('{"roles": {"user": {}}, "assistant_start": "", "stop": [""]}', "stop = ['']")])
def test_a_template_that_makes_no_sense_is_named(tmp_path, given, words):
    (tmp_path / "chat_template.json").write_text(given)
    with pytest.raises(ValueError) as e: read_chat_template(tmp_path)
    assert words in str(e.value) and "chat_template.json" in str(e.value) and "\n" not in str(e.value)


def test_a_run_s_own_template_is_read_and_without_one_there_is_a_plain_one(tmp_path):
    assert read_chat_template(tmp_path) is PLAIN_CHAT and PLAIN_CHAT.is_default
    (tmp_path / "chat_template.json").write_text('{"roles": {"user": {"prefix": "Q: "}}, "assistant_start": "A:"}')
    assert read_chat_template(tmp_path) == ChatTemplate({"user": ("Q: ", "")}, "A:")
