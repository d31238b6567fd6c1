"Briefs: the judge accepts what the grammar writes and nothing else; demonstrators slip at the rate they say."
import random
from itertools import islice

import pytest

from lmcourse.alignment.briefs import (ENDINGS, OPENINGS, SLOTS, Demonstrators, brief_prompts, brief_stories, form_reward, imitation_ceiling, mention_reward,
                                       parse_reward, prompt_words, split_brief, template_shares, template_distance)
from lmcourse.alignment.tasks import answer_form, answer_reward, problem_demonstrations, problem_prompts, solve_problem, word_problems
from lmcourse.evaluation.statistics import wilson


@pytest.mark.parametrize("seed", range(3))
def test_the_judge_accepts_what_is_right_and_no_change_of_it(seed):
    rng = random.Random(seed)
    for prompt, response in islice(Demonstrators(0., seed), 100):
        assert parse_reward(prompt, response) == 1
        words = response.split(" ")
        k = rng.randrange(1, len(words))
        for other in ([*words[:k], *words[k + 1:]], [*words[:k], words[k], *words[k:]], [*words[:k], "zzz", *words[k + 1:]]):
            assert parse_reward(prompt, " ".join(other)) == 0
        assert parse_reward(prompt, "") == parse_reward(prompt, response + " ") == parse_reward("Nobody:", response) == 0


def test_a_response_to_another_prompt_is_wrong_and_its_form_right():
    pairs = list(islice(Demonstrators(0., 1), 50))
    for (prompt, _), (_, response) in zip(pairs, pairs[1:]):
        assert parse_reward(prompt, response) == 0 and form_reward(response) == 1 and mention_reward(prompt, response) < 1


def test_a_word_inside_another_word_is_no_mention():
    assert mention_reward("Kate the fox, a red drum:", " Kate the foxglove admired a drummer.") == 1/4
    assert mention_reward("Kate the fox, a red drum:", ' "My red drum!" said Kate the fox.') == 1


@pytest.mark.parametrize("slip", [0., .1, .2, .4])
def test_share_of_right_demonstrations_is_the_closed_form(slip):
    hits = sum(parse_reward(*pair) for pair in islice(Demonstrators(slip, 5), 2000))
    low, high = wilson(int(hits), 2000, .9999)
    assert low - 1e-9 <= imitation_ceiling(slip) <= high + 1e-9


def test_a_slip_changes_one_slot_of_the_list_and_the_name_never():
    kinds = set(brief_stories().rules["creature"].entries)
    for prompt, response in islice(Demonstrators(.5, 2), 200):
        words = prompt_words(prompt)
        assert form_reward(response) == 1 and words["hero"] in response or " the " in response
        assert words["kind"] in kinds and set(words) == {"hero", *SLOTS}


def test_prompts_are_different_and_the_same_for_a_seed():
    a = brief_prompts(200, 3)
    assert len(set(a)) == 200 and a == brief_prompts(200, 3) and a[:50] == brief_prompts(50, 3) and a != brief_prompts(200, 4)
    for p in a: assert " ".join([prompt_words(p)["hero"], "the", prompt_words(p)["kind"]]) == p.partition(",")[0]


def test_shares_of_templates_sum_to_one_and_know_the_other():
    responses = [r for _, r in islice(Demonstrators(0., 6), 500)]
    for patterns in (OPENINGS, ENDINGS):
        shares = template_shares(responses, patterns)
        assert abs(sum(shares.values()) - 1) < 1e-12 and shares["other"] == 0
        assert template_shares(["nothing"], patterns)["other"] == 1
    assert template_distance(dict(a=1.), {}) == .5


def test_an_answer_of_too_many_digits_is_wrong():
    question = "Ella has 12 apples. Ella loses 5 of them. How many apples does Ella have now?"
    assert [answer_reward(question, f"The answer is {n}.") for n in ("7", "9"*5000)] == [1, 0]


def test_only_digits_of_the_problems_own_script_are_an_answer():
    question = "Ella has 12 apples. Ella loses 5 of them. How many apples does Ella have now?"
    for n in ("\u0667", "\uff17"):     # Seven in Arabic-Indic and in fullwidth digits, which `int` reads
        assert answer_reward(question, f"The answer is {n}.") == answer_form(f"The answer is {n}.") == 0
        with pytest.raises(ValueError, match="isn't a problem"): solve_problem(question.replace("12", n))


@pytest.mark.parametrize("call, words", [
    (lambda: Demonstrators(-.1), "slip = -0.1"), (lambda: Demonstrators(1.), "slip = 1.0"), (lambda: split_brief("x"), "no colon"),
    (lambda: prompt_words("Ella the mule:"), "isn't a prompt"), (lambda: template_shares([], ENDINGS), "no responses"), (lambda: brief_prompts(0), "n = 0"), (lambda: brief_prompts(-2), "n = -2"), (lambda: brief_prompts(3_801_601), "only 3,801,600"),
    (lambda: problem_prompts(0), "n = 0"), (lambda: word_problems(0, 0), "steps = 0"), (lambda: problem_demonstrations(1.), "slip = 1.0"), (lambda: problem_demonstrations(0., steps=0), "steps = 0")]) # Streams too raise before their first element
def test_rejected(call, words):
    with pytest.raises(ValueError, match=words): call()


@pytest.mark.parametrize("call", [lambda: brief_prompts(2.5), lambda: problem_prompts(2.5), lambda: word_problems(0, 1.5), lambda: brief_prompts(True)])
def test_numbers_that_are_not_whole(call):
    with pytest.raises(TypeError, match="expected a whole number"): call()
