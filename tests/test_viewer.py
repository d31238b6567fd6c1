"Surprisals and attention weights are the model's, floors the grammar's; shown text can't act."
import math
import re
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from bs4 import BeautifulSoup
from hypothesis import given, settings, strategies as st

from lmcourse.architecture.attention_torch import scaled_dot_product_attention, causal_mask
from lmcourse.architecture.transformer_torch import TransformerLM
from lmcourse.generation.generate import log_probs
from lmcourse.generation.viewer import (AttentionViewer, SurprisalStrip, attention_viewer,
                                        attention_weights, floor_nats, surprisal_strip)
from lmcourse.tokenization.tokenizer import Tokenizer
from lmcourse.tools.config import ModelConfig
from lmcourse.tools.stories import Stories

END = "<|endoftext|>"
TOKENIZER = Tokenizer.train(list(islice(Stories(0), 60)), 500, [END])
CONFIG = ModelConfig(vocab_size=500, context_length=64, d_model=16, num_layers=2, num_heads=4,
                     num_kv_heads=2)
MODEL = TransformerLM(CONFIG)
VIEWERS = pytest.mark.parametrize("make", [surprisal_strip, attention_viewer])
PIECES = [END, "</script>", "<b>", '"', "'", "&lt;", "\n", " the", "🙂"]
NASTY = st.lists(st.text(max_size=3) | st.sampled_from(PIECES), max_size=6).map("".join).filter(bool)
TAGS = set("div style script button span i fieldset legend label input svg".split())


def page(viewer): return BeautifulSoup(viewer._repr_html_(), "html.parser")


def test_surprisals_are_minus_the_log_probabilities():
    text = "Once there was a tidy cat."
    ids = [TOKENIZER.end_of_text, *TOKENIZER.encode(text), TOKENIZER.end_of_text]
    strip = surprisal_strip(MODEL, TOKENIZER, text, dict(twice=-2*log_probs(MODEL, ids).numpy()))
    np.testing.assert_array_equal(strip.nats["model"], -log_probs(MODEL, ids).double())
    assert "".join(strip.words) == text and len(strip) == len(ids) - 1
    assert math.isclose(strip.totals()["twice"], 2*strip.totals()["model"], rel_tol=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_the_floor_of_a_story_adds_up_to_its_probability(seed):
    story = next(Stories(seed))
    floor = floor_nats(TOKENIZER, story)
    assert math.isclose(floor.sum(), -Stories().log_prob(story)) and (floor >= 0).all()


def test_the_floor_is_infinite_where_a_story_becomes_impossible():
    story = next(Stories(3))
    at = story.index(".") + 1
    floor = floor_nats(TOKENIZER, wrong := story[:at] + " Oops" + story[at:])
    first = int(np.isinf(floor).argmax())
    text = TOKENIZER.decode(TOKENIZER.encode(wrong)[:first + 1])
    assert np.isinf(floor).sum() == 1 and np.isnan(floor[first + 1:]).all()
    assert story[:at] == text[:at] and not story.startswith(text)
    assert np.isinf(floor_nats(TOKENIZER, story[:at])[-1])           # it does not end there
    short = wrong[:at + 5]
    strip = surprisal_strip(MODEL, TOKENIZER, short, dict(floor=floor_nats(TOKENIZER, short)))
    assert "impossible" in strip.describe(first) and strip.most_surprising() == first


@pytest.mark.parametrize("window", [None, 3])
def test_attention_weights_are_the_softmax_of_the_scores(window, monkeypatch):
    model, seen = TransformerLM(replace(CONFIG, window=window)), []
    def attention(q, k, v, window):
        k, v = k.repeat_interleave(2, -3), v.repeat_interleave(2, -3)
        eye = torch.eye(q.shape[-2]).expand(*q.shape[:-1], -1)
        mask = causal_mask(q.shape[-2], window=window)
        seen.append(scaled_dot_product_attention(q, k, eye, mask)[0]) # The mixture is the weights
        return scaled_dot_product_attention(q, k, v, mask)
    ids, usual = list(range(7)), [block.attn.attention for block in model.layers]
    weights = attention_weights(model, ids)
    assert [block.attn.attention for block in model.layers] == usual
    for block in model.layers: monkeypatch.setattr(block.attn, "attention", attention)
    model(torch.tensor([ids]))
    torch.testing.assert_close(weights, torch.stack(seen))
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 7))


def test_the_usual_attention_comes_back_after_an_error():
    usual = [block.attn.attention for block in MODEL.layers]
    with pytest.raises(IndexError): attention_weights(MODEL, [10**6])
    assert [block.attn.attention for block in MODEL.layers] == usual


def test_the_page_of_a_viewer_has_its_weights():
    viewer = attention_viewer(MODEL, TOKENIZER, "Once there was a cat.")
    L, H, T, _ = viewer.weights.shape
    soup = page(viewer)
    packed = bytes.fromhex(soup.select_one(".lm-map")["data-weights"])
    packed = np.frombuffer(packed, np.uint8).reshape(L, H, -1)/255
    np.testing.assert_allclose(packed, viewer.weights.numpy()[..., *np.tril_indices(T)], atol=1/500)
    layer, head, word, _ = viewer.longest_look()
    assert ".lm-map').dataset" in str(soup)           # The script that draws the lines
    assert [int(r["value"]) for r in soup.select("input[checked]")] == [layer, head]
    assert [b["aria-pressed"] for b in soup.select("button")].index("true") == word
    assert viewer.describe(layer, head, word) in str(viewer)
    assert math.isclose(sum(w for _, w in viewer.looks_at(layer, head, word, T)), 1, rel_tol=1e-5)


def test_surprises_and_weights_too_small_for_a_percentage():
    strip = SurprisalStrip(["a", ""], dict(model=np.array([800., 1.])))
    assert "1 in 10^347 (800.0 nats)" in strip.describe(0) and "10^347" in page(strip).text
    even = AttentionViewer(["", *"a"*299], torch.full((1, 1, 300, 300), 1/300).tril())
    assert even.describe(0, 0, 299).endswith("puts under 1% of its attention on the start.")


@VIEWERS
@settings(max_examples=60, deadline=None)
@given(text=NASTY)
def test_text_is_shown_and_never_acts(make, text):
    soup = page(make(MODEL, TOKENIZER, text))
    assert {t.name for t in soup.find_all()} <= TAGS and not soup.find_all(src=True)
    assert len(soup.find_all("script")) == 1 and END not in soup.script.text
    known = {"type", "class", "tabindex", "aria-pressed", "title", "style"}
    assert all(set(b.attrs) == known for b in soup.find_all("button"))


@VIEWERS
def test_it_can_be_reached_by_keyboard_and_read_aloud(make):
    soup, other = (page(make(MODEL, TOKENIZER, "A cat.")) for _ in range(2))
    assert [b["tabindex"] for b in soup.find_all("button")].count("0") == 1
    assert soup.select_one("[role=group]")["aria-label"]
    assert soup.select_one(".lm-says")["aria-live"] == "polite"
    assert soup.select_one(".lm-view")["id"] != other.select_one(".lm-view")["id"]
    assert all(f.legend for f in soup.find_all("fieldset"))
    assert all(r.parent.name == "label" for r in soup.find_all("input"))
    assert not re.search(r"https?://|url\(|@import", str(soup))


@VIEWERS
def test_one_token_and_what_is_rejected(make):
    assert page(make(MODEL, TOKENIZER, "a")) and "1" in str(make(MODEL, TOKENIZER, "a"))
    with pytest.raises(ValueError, match="the text is empty"): make(MODEL, TOKENIZER, "")
    with pytest.raises(ValueError, match=r"has \d+ tokens, but the model sees 63 after the start"):
        make(MODEL, TOKENIZER, "cat "*200)
    with pytest.raises(ValueError, match="the model's vocabulary"):
        make(TransformerLM(replace(CONFIG, vocab_size=400)), TOKENIZER, "a")


def test_a_row_needs_a_number_for_each_token():
    with pytest.raises(ValueError, match=r"floor has the shape \(2,\)"):
        surprisal_strip(MODEL, TOKENIZER, "a cat sat.", dict(floor=[1, 2]))


def test_no_file_that_pages_show_is_empty():
    "A script that is lost leaves a page that looks right and does nothing"
    from importlib.resources import files
    assert not [p.name for p in files("lmcourse").joinpath("data").iterdir() if p.is_file() and not p.read_bytes().strip()]
