"The corpus: exact probabilities, the same text everywhere, speed."
import hashlib
import math
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcourse.tools.stories import Stories, read_grammar

AMBIGUOUS = """
story:
    3* {a} {b}
    1* {c}

a = x, y
b = z
c = x z, w
"""


def all_texts(stories, n=4000):
    return sorted(set(islice(stories, n)))


def test_probabilities_of_all_texts_add_up_to_one():
    grammar = """
story:
    2* {hero=name} and {friend=name} ate {a meal=food}{more}
    1* {thing=treasure} {broke:thing.stuff} {hero=name}

more:
    {nothing} .
    , and {lack=food}: no {lack}!

nothing = .
name (he=she) = Ada, Eve, Ida
food = fig, apple
treasure:
    {cloth}
    3* {clay}
cloth (stuff=cloth) = flag
clay (stuff=clay) = cup, urn
broke:cloth = tore
broke:clay = cracked, split
"""
    texts = all_texts(Stories(0, grammar))
    probabilities = [math.exp(Stories(0, grammar).log_prob(t)) for t in texts]
    assert math.isclose(sum(probabilities), 1)
    entropy = -sum(p*math.log(p) for p in probabilities)
    exact = Stories(0, grammar).entropy()
    assert math.isclose(exact.document, entropy) and math.isclose(exact.bytes, sum(p*len(t) for p, t in zip(probabilities, texts)))


def test_two_derivations_of_one_text_add_up():
    s = Stories(0, AMBIGUOUS)
    assert len(s.log_probs("x z")) == 2
    assert math.isclose(math.exp(s.log_prob("x z")), 3/4*1/2 + 1/4*1/2)
    assert math.isclose(sum(math.exp(s.log_prob(t)) for t in all_texts(s)), 1)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.data())
def test_a_changed_story_is_less_probable_or_refused(seed, data):
    s = Stories(seed)
    story = next(s)
    at = data.draw(st.integers(0, len(story) - 1))
    letter = data.draw(st.sampled_from("aeiou .,"))
    changed = story[:at] + letter + story[at+1:]
    assert len(s.log_probs(story)) == 1
    if changed == story: return
    try: assert s.log_prob(changed) < -20
    except ValueError as e: assert "no story of this grammar" in str(e)


def test_a_seed_gives_the_same_stories_on_every_platform():
    text = "\n".join(islice(Stories(seed=0), 100))
    assert hashlib.sha256(text.encode()).hexdigest().startswith("cfcb226e30b6")
    assert next(Stories(1)) != next(Stories(0)) == text.split("\n")[0]


def test_words_of_the_grammar_are_plain_and_no_rule_is_unused():
    rules = Stories().rules
    used = {p.name for r in rules.values() for o in r.options for p in o if not isinstance(p, str)}
    assert {name for name in rules if name.split(":")[0] not in used} == {"story"}
    assert all(e.isascii() and e == e.strip() for r in rules.values() for e in r.entries)


@pytest.mark.parametrize("grammar, words", [
    ("story:\n    {x}", "uses 'x', which does not exist"),
    ("story:\n    {x=y} {z:x.kind}\ny = a", "uses 'z', which does not exist"),
    ("story:\n    {a y}\ny:\n    {z} {z}\nz = a", "no list"),
    ("a = x\na = y", "stands twice"),
    ("a = x, x", "something stands twice"),
    ("story:\n    {", "can't be read"),
    ("just words", "can't read"),
])
def test_a_broken_grammar_is_refused(grammar, words):
    with pytest.raises(ValueError, match=words): read_grammar(grammar)
