"The corpus: exact probabilities, the same text everywhere, speed."
import hashlib
import math
import re
from collections import Counter
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcourse.tools.documents import documents
from lmcourse.tools.grammar import read_grammar, zipf_rules
from lmcourse.tools.stories import STORY_CORPORA, Stories, short_stories

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


WEIGHED = """
story:
    2* {one=name} met {a two=food}, and {three=name} saw {one.him}
    1* {x=food}, {y=food}: {A y} {z:y.kind}

name:
    3* {girl}
    {boy}
girl (him=her) = 5* Ada, Eve
boy (him=him) = Al, 2* Bo
food (kind=b) = 3* apple, fig, 2* egg roll
z:b:
    4* red
    1* green
"""


def test_weights_of_lists_are_probabilities_of_all_texts():
    s = Stories(0, WEIGHED)
    ps = {t: math.exp(s.log_prob(t)) for t in all_texts(s, 8000)}
    assert len(ps) == 4*3*3 + 3*2*2 and math.isclose(sum(ps.values()), 1)
    assert math.isclose(ps["Ada met an apple, and Bo saw her"], 2/3 * 3/4*5/6 * 3/6 * 1/4*2/3)
    assert math.isclose(ps["fig, apple: An apple green"], 1/3 * 1/6 * 3/5 * 1/5)
    exact = s.entropy()
    assert math.isclose(exact.document, -sum(p*math.log(p) for p in ps.values()))
    assert math.isclose(exact.bytes, sum(p*len(t) for t, p in ps.items()))


def test_a_weighed_list_is_drawn_as_often_as_it_says():
    s = Stories(3, "story:\n    {x=a} {y=a} {z=a}\na = 5* b, 2* cc, ddd, eeee")
    drawn = Counter(islice(s, 20_000))
    ps = {t: math.exp(s.log_prob(t)) for t in drawn}
    assert len(drawn) == 24 and math.isclose(sum(ps.values()), 1)
    assert all(abs(drawn[t] - 20_000*p) < 5*math.sqrt(20_000*p) for t, p in ps.items())
    assert math.isclose(ps["b cc eeee"], 5/9*2/4*1/2) and math.isclose(ps["eeee b cc"], 1/9*5/8*2/3)
    assert math.isclose(s.entropy().document, -sum(p*math.log(p) for p in ps.values()))
    for begin in ("", "b", "b c", "ddd ", "eeee cc d"):
        total = sum(p for t, p in ps.items() if t.startswith(begin))
        assert math.isclose(math.exp(s.prefix_log_prob(begin)), total)
    same = Stories(3, "story:\n    {x=a} {y=a} {z=a}\na = 4* b, 4* cc, 4* ddd, 4* eeee")
    plain = Stories(3, "story:\n    {x=a} {y=a} {z=a}\na = b, cc, ddd, eeee")
    assert list(islice(same, 50)) == list(islice(plain, 50)) and same.entropy() == plain.entropy()


def test_zipf_weighs_by_rank_and_changes_nothing_else():
    plain, zipf = Stories(5), Stories(5, zipf=1.)
    for name, rule in zipf.rules.items():
        assert rule._replace(shares=()) == plain.rules[name]._replace(shares=())
        if not rule.entries: assert rule.shares == plain.rules[name].shares
        elif len(rule.entries) > 1:
            assert plain.rules[name].shares == () and math.isclose(sum(rule.shares), 1)
            assert all(math.isclose(s*(r + 1), rule.shares[0]) for r, s in enumerate(rule.shares))
    story = next(zipf)
    assert len(plain.log_probs(story)) == len(zipf.log_probs(story)) == 1
    assert next(Stories(5, zipf=1.)) == story == next(Stories(5, zipf=1.0))
    for grammar in (lambda z: Stories(7, zipf=z), lambda z: short_stories(7, z)):
        exact, source = grammar(1.).entropy(), grammar(1.)
        nats = [-source.log_prob(d) for d in islice(source, 400)]
        mean = sum(nats)/len(nats)
        error = math.sqrt(sum((n - mean)**2 for n in nats))/len(nats)
        assert abs(mean - exact.document) < 4*error and exact.document < grammar(0.).entropy().document
    with pytest.raises(ValueError, match="zipf = -0.5, expected 0 to 8"): Stories(zipf=-.5)
    with pytest.raises(ValueError, match="zipf = nan"): zipf_rules(plain.rules, math.nan)
    with pytest.raises(ValueError, match="zipf = inf, expected 0 to 8"): Stories(zipf=math.inf) # It would look for a second name for ever


def test_one_text_is_no_list_of_choices():
    with pytest.raises(ValueError, match="choices = 'In', expected a list"): Stories().next_probs("", "In")
    assert Stories().next_probs("", ["In"])["In"] > 0


def test_both_kinds_of_stories_are_corpora():
    assert STORY_CORPORA == {"stories": 0., "stories-zipf": 1.}
    assert list(documents("stories-zipf", "valid", 3000)) == list(islice(Stories(1, zipf=1.), 4))
    assert next(documents("stories-zipf")) != next(documents("stories"))
    with pytest.raises(ValueError, match="did you mean 'stories-zipf'"): documents("stories-zipff")
    with pytest.raises(ValueError, match="stories-zipf takes nothing after its name"): documents("stories-zipf:2")


def test_two_derivations_of_one_text_add_up():
    s = Stories(0, AMBIGUOUS)
    assert len(s.log_probs("x z")) == 2
    assert math.isclose(math.exp(s.log_prob("x z")), 3/4*1/2 + 1/4*1/2)
    assert math.isclose(sum(math.exp(s.log_prob(t)) for t in all_texts(s)), 1)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.data())
def test_a_story_with_a_wrong_letter_is_refused(seed, data):
    s = Stories(seed)
    story = next(s)
    at = data.draw(st.integers(0, len(story) - 1))
    letter = data.draw(st.sampled_from("aeiou .,").filter(lambda c: c != story[at]))
    with pytest.raises(ValueError, match="no story of this grammar"): s.log_prob(story[:at] + letter + story[at+1:])


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32))
def test_another_name_is_as_probable_in_all_places_and_impossible_in_one(seed):
    s = Stories(seed)
    story = next(s)
    boys = s.rules["boy"].entries
    names = [n for n in boys + s.rules["girl"].entries if re.search(rf"\b{n}\b", story)]
    old = next(n for n in names if len(re.findall(rf"\b{n}\b", story)) > 1)
    new = next(n for n in (boys if old in boys else s.rules["girl"].entries) if n not in names)
    assert math.isclose(s.log_prob(re.sub(rf"\b{old}\b", new, story)), s.log_prob(story))
    with pytest.raises(ValueError, match="no story of this grammar"): s.log_prob(re.sub(rf"\b{old}\b", new, story, count=1))


def test_a_seed_gives_the_same_stories_on_every_platform():
    text = "\n".join(islice(Stories(seed=0), 100))
    assert hashlib.sha256(text.encode()).hexdigest().startswith("370d338aa6d0")
    assert next(Stories(1)) != next(Stories(0)) == text.split("\n")[0]


def test_words_of_the_grammar_are_plain_and_no_rule_is_unused():
    rules = Stories().rules
    used = {p.name for r in rules.values() for o in r.options for p in o if not isinstance(p, str)}
    assert {name for name in rules if name.split(":")[0] not in used} == {"story"}
    assert all(e.isascii() and e == e.strip() for r in rules.values() for e in r.entries)


@pytest.mark.parametrize("grammar, words", [
    ("story:\n    {x}", "uses 'x', which does not exist"),
    ("story:\n    {x=y} {z:x.kind}\ny = a", "uses 'z', which does not exist"),
    ("story:\n    {a y}\ny:\n    {z} {z}\nz = a", "isn.t a list"),
    ("a = x\na = y", "appears twice"),
    ("a = x, x", "an entry of .a. appears twice"),
    ("story:\n    {", "can't be read"),
    ("just words", "can't read"),
    ("a = x, 0* y", "a weight of 0 in 'a'"),
    ("a:\n    {b}\n    0* {c}\nb = x\nc = y", "a weight of 0 in 'a'"),
    ("a:\n    {b}\n    w\nb:\n    {c} x\nc:\n    {a} y", "a → b → c → a|b → c → a → b|c → a → b → c"),
])
def test_a_broken_grammar_is_refused(grammar, words):
    with pytest.raises(ValueError, match=words): read_grammar(grammar)


@pytest.mark.parametrize("grammar, words", [
    ("story:\n    {x=a} {y=a} {z=a}\na = p, q", "all 2 entries of 'a' are remembered"),
    ("story:\n    {x=a} {y:x.kind}\na = p, q\ny:c = r", "the list 'a' has no 'kind'"),
    ("story:\n    {x=a} {y:x.kind}\na (kind=d) = p, q\ny:c = r", "the rule 'y:d' does not exist"),
    ("story:\n    {one}{two}\none:\n    {x=a} b\n    {b} b\ntwo:\n    {x} c\na = p, q\nb = r, s", "'?{x}'? is used where nothing"),
])
def test_a_grammar_that_leads_nowhere_is_refused_when_it_gets_there(grammar, words):
    source = Stories(0, grammar)
    with pytest.raises(ValueError, match=words): source.entropy()
    with pytest.raises(ValueError, match=words): list(islice(source, 30))


def test_probabilities_of_beginnings_are_sums_over_texts():
    stories = Stories(0, AMBIGUOUS)
    texts = all_texts(stories)
    known = {t: math.exp(stories.log_prob(t)) for t in texts}
    for begin in {t[:k] for t in texts for k in range(len(t) + 1)}:
        total = sum(p for t, p in known.items() if t.startswith(begin))
        assert math.isclose(math.exp(stories.prefix_log_prob(begin)), total), begin
    assert stories.prefix_log_prob("x zz") == stories.prefix_log_prob("q") == -math.inf


@pytest.mark.parametrize("seed", range(3))
def test_a_story_can_begin_as_it_does_and_with_no_other_animal(seed):
    story = next(Stories(seed))
    known = [Stories().prefix_log_prob(story[:k]) for k in range(len(story) + 1)]
    assert known[0] == 0 and all(a >= b - 1e-12 for a, b in zip(known, known[1:]))
    assert math.isclose(known[-1], Stories().log_prob(story))
    assert Stories().prefix_log_prob(story + " Then") == -math.inf


def test_what_may_follow_adds_up_to_one_and_ends_in_the_whole_text():
    for grammar, texts in ((AMBIGUOUS, ["x z", "y z", "w"]), (None, list(islice(Stories(seed=5), 3)))):
        stories = Stories(grammar=grammar)
        signs = sorted({c for d in [*texts, *islice(Stories(grammar=grammar), 300)] for c in d})
        for text in texts:
            assert stories.prefix_log_prob(text) == pytest.approx(stories.log_prob(text), rel=1e-13)
            for k in {*range(0, len(text), 61), len(text)}:
                follows = stories.next_probs(text[:k], [*signs, None])
                assert sum(follows.values()) == pytest.approx(1, abs=1e-12)
                assert (follows[None] > 0) == (k == len(text))
    with pytest.raises(ValueError, match="begins with 'zz'"): stories.next_probs("zz", ["a"])


def test_the_floor_of_unequal_stories_is_written_with_their_tokens(tmp_path):
    from lmcourse.tokenization.tokenizer import Tokenizer
    from lmcourse.training.data import TokenDataset, floor, write_dataset
    tokenizer = Tokenizer.train(documents("stories-zipf", max_bytes=20_000), 300)
    held_out = list(islice(documents("stories-zipf", "valid"), 3))
    write_dataset(tmp_path, "stories-zipf", tokenizer, documents("stories-zipf", max_bytes=20_000), held_out, 20_000)
    valid, exact = TokenDataset.open(tmp_path/"valid"), -sum(Stories(zipf=1.).log_prob(d) for d in held_out)
    assert floor(valid) == pytest.approx(exact/int(valid.ends[-1]), rel=1e-9)
