"Every byte of a text is shown and none can act; trees of merges fit the merges; counts for smaller vocabularies are exact."
import html
import json
import re
import subprocess
import sys
from itertools import islice

import pytest
from bs4 import BeautifulSoup
from hypothesis import given, settings, strategies as st

from lmcourse.tokenization.explorer import MergeTree, explore, explore_live, merge_history, tokens_by_merges
from lmcourse.tokenization.tokenizer import Tokenizer
from lmcourse.tools.stories import Stories

END = "<|endoftext|>"
# Scripts of two, three and four bytes a letter, often enough that tokens end inside a character
OTHERS = ["привет приветы " * 5, "你好 你们好 " * 5, "🙂🙃🙂🤔 " * 9, "<script>alert(1)</script> &amp; " * 5, "    if x:\n        y\n\n" * 5]
TOKENIZER = Tokenizer.train(list(islice(Stories(0), 40)) + OTHERS, 700, [END, "<b>", "<|ünï cöde|>"])
TEXT = st.lists(st.text(st.characters(codec="utf-8"), max_size=12) | st.sampled_from(
    [END, END[:5], "<b>", "<i>", "&lt;", '"', "'", " the", "  \n", "\r\n", "\t", "привет", "你们", "🙂", "🤔", "שלום", "e\u0301", "\u200d", "\u202e", "\ufe0f", "\\x41",
     "$x$"])).map("".join)
HIDDEN = re.compile("[\0-\x09\x0b-\x1f\x7f-\xa0\u00ad\u061c\u200b-\u200f\u2028-\u202f\u2060-\u206f\u3000\u3164\ufe00-\ufe0f\ufeff\ue000\U000e0000-\U000e0fff]")


def page(text):
    "What a browser makes of the picture of `text`."
    return BeautifulSoup(explore(TOKENIZER, text, limit=10**6)._repr_html_(), "html.parser")


def unsign(text):
    "The bytes that a shown token stands for, where the text itself holds none of the signs."
    text = text.replace("◌", "").replace("␣", " ").replace("↵", "\n").replace("⇥", "\t")
    parts = re.split(r"(\\x[0-9a-f]{2}|\\u[0-9a-f]{4}|\\U[0-9a-f]{8})", text)
    return b"".join((bytes([int(p[2:], 16)]) if p[1] == "x" else chr(int(p[2:], 16)).encode()) if i % 2 else p.encode() for i, p in enumerate(parts))


@settings(max_examples=200, deadline=None)
@given(TEXT)
def test_every_byte_is_shown_once_and_in_order(text):
    shown = explore(TOKENIZER, text)
    assert [view.id for view in shown.tokens] == TOKENIZER.encode(text) and len(shown) == len(shown.tokens)
    assert b"".join(view.token for view in shown.tokens) == text.encode()
    groups = shown.groups()
    assert [view for group in groups for view in group] == shown.tokens
    assert "".join(b"".join(view.token for view in group).decode() for group in groups) == text
    for group in groups:  # No group could be cut in two
        for i in range(1, len(group)):
            with pytest.raises(UnicodeDecodeError): b"".join(view.token for view in group[:i]).decode()


@settings(max_examples=100, deadline=None)
@given(TEXT)
def test_picture_holds_the_text_and_nothing_of_it_acts(text):
    soup, encoded = page(text), TOKENIZER.encode(text)
    tokens = soup.select(".lm-text .lm-token")
    assert [int(t.find("span", class_="lm-id", recursive=False).text) for t in tokens] == encoded
    assert bytes.fromhex(" ".join(t.select_one(".lm-info code").text for t in tokens)) == text.encode()
    if not set(text) & set("◌␣↵⇥\\"): assert b"".join(unsign(t.bdi.text) for t in tokens) == text.encode()
    assert {tag.name for tag in soup.find_all(True)} <= {"div", "span", "style", "i", "b", "br", "bdi", "code"}
    assert {name for tag in soup.find_all(True) for name in tag.attrs} <= {"class", "dir", "tabindex", "hidden"}
    style = soup.style.extract()
    assert "<" not in style.text and not HIDDEN.search(soup.text)


@settings(max_examples=100, deadline=None)
@given(TEXT)
def test_terminal_gets_no_control_characters(text):
    printed = str(explore(TOKENIZER, text))
    assert not HIDDEN.search(printed)
    assert f"{len(TOKENIZER.encode(text)):,} token" in printed


def test_markup_does_not_come_through():
    for text in ["<script>alert(1)</script>", "<b>bold</b>", "</style><script>", '" onclick="x', "&lt;i&gt;", "<|ünï cöde|><b>"]:
        assert not re.search(r"<script|<b>bold|onclick=\"x|<b><b>", explore(TOKENIZER, text)._repr_html_())
        assert "".join(t.bdi.text for t in page(text).select(".lm-text .lm-token")) == text.replace(" ", "␣")
    script = max((t for t in TOKENIZER.ids if b"script" in t), key=len)
    assert len(script) >= 6
    tag = Tokenizer(TOKENIZER.vocab, TOKENIZER.merges, TOKENIZER.special_tokens + ["<script>"])
    for picture in (explore(tag, "<script>"), merge_history(tag, b"<script>")):
        assert "<script" not in picture._repr_html_() and html.escape("<script>") in picture._repr_html_()


def test_empty_text_direction_and_limit():
    assert str(explore(TOKENIZER, "")) == "0 characters, 0 bytes, 0 tokens" and "lm-info\"" not in explore(TOKENIZER, "")._repr_html_()
    for text, direction in (("שלום abc", "rtl"), ("12 سلام", "rtl"), ("abc שלום", "ltr"), ("12 !", "ltr"), ("", "ltr")):
        assert page(text).select_one(".lm-text")["dir"] == direction
    shown = explore(TOKENIZER, "one two three. " * 50, limit=7)
    soup = BeautifulSoup(shown._repr_html_(), "html.parser")
    assert len(soup.select(".lm-text .lm-token")) == 7 and len(shown.table()) == 7
    for said in (soup.text, str(shown)): assert f"… and {len(shown) - 7:,} more tokens" in said
    inside = explore(TOKENIZER, "\U000e0001"*2, limit=3)                                          # the limit is inside a character
    assert len(BeautifulSoup(inside._repr_html_(), "html.parser").select(".lm-text .lm-token")) == 3 and f"{len(inside) - 3} more tokens" in str(inside)
    for bad in (0, -1, True, 1.5, "9"):
        with pytest.raises(ValueError, match="expected an int of at least 1"): explore(TOKENIZER, "a", limit=bad)
    with pytest.raises(ValueError, match="half of a surrogate pair"): explore(TOKENIZER, "a\ud800")
    with pytest.raises(TypeError): explore(TOKENIZER, b"bytes")


def test_special_tokens_are_marked_and_no_merge_made_them():
    shown = explore(TOKENIZER, f"the{END}<b>the")
    assert "".join("S" if view.special else "." for view in shown.tokens).strip(".") == "SS"
    for view in shown.tokens:
        if view.special: assert view.tree == MergeTree(view.token) and view.token.decode() in TOKENIZER.special_tokens
    assert [len(g) for g in explore(TOKENIZER, "<|ünï cöde|>").groups()] == [1]


def test_special_token_that_merges_make_too():
    tokenizer = Tokenizer(TOKENIZER.vocab, TOKENIZER.merges, [" the"])
    view, = explore(tokenizer, " the").tokens
    assert view.special and view.tree == MergeTree(b" the")
    assert merge_history(tokenizer, b" the").leaves() == [b" ", b"t", b"h", b"e"]


def test_of_two_merges_for_a_token_the_first_counts():
    vocab = dict(enumerate([bytes([b]) for b in range(256)] + [b"ab", b"bc", b"abc"]))
    tokenizer = Tokenizer(vocab, [(b"a", b"b"), (b"b", b"c"), (b"ab", b"c"), (b"a", b"bc")])
    assert merge_history(tokenizer, b"abc").merges() == [(0, b"a", b"b"), (2, b"ab", b"c")]
    assert explore(tokenizer, "abc").tokens[0].tree.rank == 2


def test_every_token_of_the_vocabulary_has_its_tree():
    ranks = {pair: rank for rank, pair in enumerate(TOKENIZER.merges)}
    for token in TOKENIZER.ids:
        tree = merge_history(TOKENIZER, token)
        if token.decode(errors="replace") in TOKENIZER.special_tokens: assert tree == MergeTree(token); continue
        leaves = tree.leaves()
        assert b"".join(leaves) == token and all(len(leaf) == 1 for leaf in leaves)
        for _, node in tree.walk():
            if node.rank is None: assert node.left is None is node.right; continue
            assert ranks[node.left.token, node.right.token] == node.rank and node.left.token + node.right.token == node.token
            for part in (node.left, node.right): assert part.rank is None or part.rank < node.rank
        assert [rank for rank, _, _ in tree.merges()] == sorted({node.rank for _, node in tree.walk() if node.rank is not None})


def test_the_tree_is_what_encoding_does():
    "A tokenizer that stops just before a token's last merge has the two parts instead."
    for rank in range(0, len(TOKENIZER.merges), 37):
        a, b = TOKENIZER.merges[rank]
        before = Tokenizer(TOKENIZER.vocab, TOKENIZER.merges[:rank], TOKENIZER.special_tokens)
        try: text = (a + b).decode()
        except UnicodeDecodeError: continue
        tree = merge_history(TOKENIZER, a + b)
        assert [tree.left.token, tree.right.token] == [a, b] == [before.token_bytes(i) for i in before.encode(text)]


def test_history_as_text_and_as_a_drawing():
    tree = merge_history(TOKENIZER, b" the")
    assert tree.token == b" the" and str(tree).splitlines()[0].split() == ["␣the", "merge", str(tree.rank)]
    assert len(str(tree).splitlines()) == len(list(tree.walk())) == 2*4 - 1
    for token in TOKENIZER.ids:
        cells = BeautifulSoup(merge_history(TOKENIZER, token)._repr_html_(), "html.parser").select(".lm-token")
        areas = [tuple(map(int, re.search(r"grid-area:(\d+)/(\d+)/(\d+)/(\d+)", c["style"]).groups())) for c in cells]
        covered = [(row, column) for top, left, bottom, right in areas for row in range(top, bottom) for column in range(left, right)]
        rows, columns = max(bottom for _, _, bottom, _ in areas), max(right for _, _, _, right in areas)
        assert areas[0][1:] == (1, rows if len(areas) == 1 else 2, columns)
        assert sorted(covered) == [(r, c) for r in range(1, rows) for c in range(1, columns)]  # No gap and no overlap


def test_history_of_what_is_no_token():
    with pytest.raises(ValueError, match="b'zzzz' is not a token"): merge_history(TOKENIZER, b"zzzz")
    with pytest.raises(TypeError, match="token_bytes is a str"): merge_history(TOKENIZER, "the")


def test_very_deep_and_very_wide_trees():
    n = 3000
    chain = [(b"a"*k, b"a") for k in range(1, n)]
    vocab = dict(enumerate([bytes([b]) for b in range(256)] + [a + b for a, b in chain]))
    tree = merge_history(Tokenizer(vocab, chain), b"a"*n)
    assert tree.leaves() == [b"a"]*n and len(tree.merges()) == n - 1 and len(str(tree).splitlines()) == 2*n - 1
    assert tree._repr_html_().count("lm-token lm-c") == 2*n - 1


def test_merges_out_of_order_make_nothing():
    vocab = dict(enumerate([bytes([b]) for b in range(256)] + [b"abc", b"ab", b"abcd"]))
    tokenizer = Tokenizer(vocab, [(b"ab", b"c"), (b"a", b"b"), (b"abc", b"d")])
    assert merge_history(tokenizer, b"ab").rank == 1
    for token in (b"abc", b"abcd"): assert merge_history(tokenizer, token) == MergeTree(token)


@settings(max_examples=60, deadline=None)
@given(st.lists(TEXT, max_size=4), st.integers(0, 10**6))
def test_counts_for_smaller_vocabularies_are_exact(texts, n):
    counts, n = tokens_by_merges(TOKENIZER, texts), n % (len(TOKENIZER.merges) + 1)
    smaller = Tokenizer(TOKENIZER.vocab, TOKENIZER.merges[:n], TOKENIZER.special_tokens)
    assert counts.shape == (len(TOKENIZER.merges) + 1,)
    assert counts[n] == sum(len(smaller.encode(text)) for text in texts)
    assert counts[-1] == sum(len(TOKENIZER.encode(text)) for text in texts)


def test_counts_need_one_merge_for_each_token():
    vocab = dict(enumerate([bytes([b]) for b in range(256)] + [b"ab", b"bc", b"abc"]))
    with pytest.raises(ValueError, match="two merges make the same token"):
        tokens_by_merges(Tokenizer(vocab, [(b"a", b"b"), (b"b", b"c"), (b"ab", b"c"), (b"a", b"bc")]), ["abc"])


def test_live_picture_follows_the_text():
    pytest.importorskip("ipywidgets")
    box, view = explore_live(TOKENIZER, "the <b>").children
    assert view.value == explore(TOKENIZER, "the <b>")._repr_html_()
    box.value = "another"
    assert view.value == explore(TOKENIZER, "another")._repr_html_()
    box.value = ""
    assert view.value == explore(TOKENIZER, "")._repr_html_()


@pytest.mark.parametrize("typed, shown", [("a \ud800", "a \ufffd"), ("\udc00b", "\ufffdb"), ("\ud83d\ude42", "🙂"), ("\ufeffé🙂", "\ufeffé🙂")])
def test_a_live_picture_can_be_sent_to_the_browser_whatever_is_typed(typed, shown):
    "Half of a surrogate pair has no UTF-8, and a message to the browser is UTF-8."
    pytest.importorskip("ipywidgets")
    whole = explore_live(TOKENIZER, "the ")
    for widget in (whole, explore_live(TOKENIZER, typed)):
        box, view = widget.children
        for say in (lambda text: setattr(box, "value", text), lambda text: box.set_state(dict(value=text))): # a program, and a browser
            say("")
            say(typed)
            assert box.value == shown and view.value == explore(TOKENIZER, shown)._repr_html_()
        for part in (widget, box, view): json.dumps(part.get_state(), default=str, ensure_ascii=False).encode()
        json.dumps(widget._repr_mimebundle_(), default=str, ensure_ascii=False).encode()


@pytest.mark.slow
def test_live_pictures_in_a_kernel_of_jupyter():
    "A cell that types a lone surrogate runs through, where messages go to a client."
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    code = ("from lmcourse.tokenization.explorer import explore_live\nfrom lmcourse.tokenization.tokenizer import Tokenizer\n"
            "widget = explore_live(Tokenizer.train(['the dragon said hello']*3, 270), 'a dragon')\n"
            "widget.children[0].value = chr(0xd800)\nwidget")
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    nbclient.NotebookClient(nb, timeout=60, kernel_name="python3").execute()
    assert "application/vnd.jupyter.widget-view+json" in nb.cells[0].outputs[-1].data


def test_ipywidgets_is_loaded_for_the_live_picture_only():
    code = ("import sys, json; sys.modules['ipywidgets'] = None\n"
            "from lmcourse.tokenization.explorer import explore, explore_live\n"
            "from lmcourse.tokenization.tokenizer import Tokenizer\n"
            "t = Tokenizer(dict(enumerate(bytes([b]) for b in range(256))), [])\n"
            "print(json.dumps(explore(t, 'a').summary()))\n"
            "try: explore_live(t)\nexcept ImportError as e: print(json.dumps(str(e)))")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert json.loads(out[0]).startswith("1 character, 1 byte, 1 token") and "pip install ipywidgets" in json.loads(out[1])

def test_one_text_is_not_a_list_of_its_characters():
    with pytest.raises(TypeError, match="one str"): tokens_by_merges(Tokenizer.train(["the cat the cat"], 260), "the cat")
