"Masks and rules: planted addresses and nothing else, no mask twice, each rule alone on both sides of its limit, also where texts are odd."
import random

import pytest

from lmcourse.curation.filters import (GOPHER, STOP_WORDS, c4_filter, find_pii, gopher_failures, gopher_measures, gopher_quality_filter, mask_emails, mask_ips,
                                       mask_phone_numbers)
from lmcourse.curation.web import planted_web
from lmcourse.tools.stories import Stories

MASKS = dict(email=mask_emails, phone=mask_phone_numbers, ip=mask_ips)


@pytest.mark.parametrize("seed", range(3))
def test_planted_addresses_and_no_others(seed):
    for p in planted_web(600, seed=20 + seed, shares=dict(story=1, pii=2, foreign=1, spam=1, code=1)):
        assert sorted(find_pii(p.text)) == sorted(p.pii), p.text


@pytest.mark.parametrize("kind", MASKS)
def test_masks_are_idempotent_and_touch_nothing_else(kind):
    for p in planted_web(100, seed=7, shares=dict(pii=1)):
        wanted = [text for k, text in p.pii if k == kind]
        masked, n = MASKS[kind](p.text)
        assert n == len(wanted) and MASKS[kind](masked) == (masked, 0)
        for text in wanted: assert text not in masked
        parts = masked.split({"email": "|||EMAIL_ADDRESS|||", "phone": "|||PHONE_NUMBER|||", "ip": "|||IP_ADDRESS|||"}[kind])
        assert len(parts) == n + 1 and sum(map(len, parts)) == len(p.text) - sum(map(len, wanted))


def test_the_tail_of_a_long_number_is_no_phone_number():
    for text in ("in 12,283 182 3829 ways", "3,2831823829", "12.283 182 3829", "x-283 182 3829", "283 182 38291", "283 182 3829.5"): assert mask_phone_numbers(text) == (text, 0)


def test_masks_in_any_order_give_the_same():
    from itertools import permutations
    for p in planted_web(30, seed=8, shares=dict(pii=1)):
        results = set()
        for order in permutations(MASKS.values()):
            text = p.text
            for mask in order: text, _ = mask(text)
            results.add(text)
        assert len(results) == 1


@pytest.mark.parametrize("ip", ["0.0.0.0", "9.10.99.100", "199.200.249.250", "255.255.255.255", "1.2.3.4"])
def test_every_octet_up_to_255(ip):
    assert find_pii(f"from {ip}, today") == [("ip", ip)] and not find_pii(f"from {ip.replace('.', ',')}, today")
    for i in range(4):
        parts = ip.split(".")
        for bad in ("256", "300", "00", "01", "1000", "-1", ""):
            assert not [x for x in find_pii("from " + ".".join([*parts[:i], bad, *parts[i + 1:]]) + " today") if x[0] == "ip"]


def test_patterns_take_no_more_than_linear_time_on_hostile_texts():
    "A pattern that backtracks would be squared: 40 times as long a text would take 1,600 times as many steps, far beyond the limit of the suite."
    for bad in ("a"*50_000, "a."*50_000 + "@", "1"*50_000, "1."*50_000, "(123"*50_000, "a@"*50_000, "a@" + "b-"*50_000, "..."*50_000):
        assert all(mask(bad)[1] >= 0 for mask in MASKS.values())


@pytest.mark.parametrize("rule", GOPHER)
def test_a_story_breaks_no_rule_and_each_end_of_each_rule_is_allowed(rule, monkeypatch):
    text = next(Stories(5))
    value = gopher_measures(text)[rule]
    assert gopher_failures(text) == []
    for ends, kept in (((value, value), True), ((value + 1e-9, value + 1), False), ((value - 1, value - 1e-9), False)):
        monkeypatch.setitem(GOPHER, rule, ends)
        assert gopher_failures(text) == [] if kept else gopher_failures(text) == [rule]
        assert gopher_quality_filter(text) is kept


def test_measures_by_hand():
    m = gopher_measures("• The cat, and THE dog...\n\n  #12 to be…  \nno")
    assert m == dict(words=10, mean_length=(1 + 3 + 4 + 3 + 3 + 6 + 3 + 2 + 3 + 2)/10, hashes=.1, ellipses=.2, bullets=1/3, broken_lines=2/3, alphabetic=.8, stop_words=4)
    assert STOP_WORDS == {"the", "be", "to", "of", "and", "that", "have", "with"}


@pytest.mark.parametrize("text", ["", " \n ", "…", "•", "\n".join("a" * 20)])
def test_texts_that_are_hardly_any_are_dropped(text): assert not gopher_quality_filter(text) and c4_filter(text) == ("", "sentences")


def test_lines_and_sentences_of_c4_at_their_limits():
    line = lambda words: " ".join(["word"]*words) + "."
    n, s = 5, 3
    assert c4_filter("\n".join([line(n)]*s)) == ("\n".join([line(n)]*s), "") and c4_filter("\n".join([line(n)]*(s - 1)))[1] == "sentences"
    assert c4_filter("\n".join([*[line(n)]*s, line(n - 1)]))[0] == "\n".join([line(n)]*s)
    for end, kept in ((".", 1), ("!", 1), ("?", 1), ('."', 1), (".”", 1), ("...", 0), ("…", 0), (",", 0), ("", 0), (".)", 0)):
        odd = line(9)[:-1] + end
        assert (odd in c4_filter("\n".join([*[line(n)]*s, odd]))[0]) == bool(kept), end
    for words in ("JavaScript", "cookie policy", "Terms of Use", "uses cookies"):
        assert words not in c4_filter("\n".join([*[line(n)]*s, f"Now read this about {words} today."]))[0]


def test_bad_words_are_whole_words_in_any_case():
    text = "The ass-like animal eats grass all day.\n"*3
    assert c4_filter(text, frozenset({"grass"}))[1] == c4_filter(text.replace("grass", '"GRASS!"'), frozenset({"grass"}))[1] == "bad word"
    assert c4_filter(text, frozenset({"ass", "gras"}))[1] == ""


def test_rules_do_not_depend_on_the_order_of_lines():
    rng = random.Random(0)
    for p in planted_web(120, seed=9, shares=dict(story=1, list=1, teaser=1, code=1)):
        lines = p.text.split("\n")
        rng.shuffle(lines)
        assert gopher_failures("\n".join(lines)) == gopher_failures(p.text)
