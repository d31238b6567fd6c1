"Chapter 12: calibration, the certificate of contamination, order and overlap, exact match and its product, questions that the pretrained model fails, the harness."
import json
import math
import re
from dataclasses import replace
from itertools import islice, permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from lmcourse.evaluation.calibration import calibrated_error, choice_probs, exact_error, expected_calibration_error, fit_temperature, reliability, token_divergence
from lmcourse.evaluation.contamination import contamination_p, log_prob_in_order, ngram_overlap, permutation_p, rename_people, ngram_set
from lmcourse.evaluation.emergence import doublings, exact_match, match_from_hits
from lmcourse.evaluation.harness import HarnessAnswers, continuation_log_prob, harness_model, run_harness, save_texts
from lmcourse.evaluation.oracle import ceiling, excess_by_certainty
from lmcourse.evaluation.perplexity import Perplexity, perplexity, token_nats
from lmcourse.evaluation.report import _interval, refuse_overlap
from lmcourse.curation.quality import auc
from lmcourse.evaluation.statistics import bootstrap_interval, difference_interval, pass_at_k, sample_size, standard_error, wilson
from lmcourse.evaluation.tasks import KINDS, grammar_task, load_task, save_task, score_task, writing_task, written_words
from lmcourse.tokenization.tokenizer import Tokenizer
from lmcourse.tools.stories import Stories, short_stories
from lmcourse.training.models import load_model

RESULTS = Path(__file__).parents[1]/"nbs/results"


def saved(name): return [json.loads(line) for line in (RESULTS/f"{name}.jsonl").read_text().splitlines()]


# Calibration

@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=40), st.integers(1, 12))
def test_expected_calibration_error_is_the_sum_over_bins(answers, bins):
    c, y = (np.array(x, float) for x in zip(*answers))
    where = np.minimum((c*bins).astype(int), bins - 1)
    assert expected_calibration_error(c, y, bins) == pytest.approx(abs(np.bincount(where, c - y, bins)).sum()/len(c))
    assert expected_calibration_error([1., .95], [0, 1]) == pytest.approx(.475)       # Certainty belongs to the last bin
    rows = reliability(c, y, bins)
    assert sum(r["n"] for r in rows) == len(c) and all(r["low"] - 1e-12 <= r["right"] <= r["high"] + 1e-12 for r in rows)


@given(st.lists(st.floats(-30, 0), min_size=2, max_size=5, unique=True), st.floats(.1, 10))
def test_a_temperature_keeps_the_order_and_one_is_the_plain_softmax(log_probs, T):
    p, q = choice_probs(log_probs), choice_probs(log_probs, T)
    assert p.sum() == pytest.approx(1) == q.sum() and p == pytest.approx(np.exp(log_probs)/np.exp(log_probs).sum())
    assert (np.diff(q[np.argsort(log_probs)]) >= 0).all() and q.argmax() == pytest.approx(p.argmax()) or max(q) - q[p.argmax()] < 1e-12


@pytest.mark.parametrize("bins, kind", [(2.5, TypeError), (0, ValueError), (True, TypeError)])
def test_bins_are_counted_in_whole_numbers(bins, kind):
    with pytest.raises(kind, match=f"bins = {bins}"): reliability([.2, .7], [0, 1], bins)


@given(st.integers(2, 9), st.integers(1, 4), st.integers(0, 10**6))
def test_divergence_from_the_truth_is_that_of_torch_and_none_of_the_truth_itself(n, T, seed):
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet([.3]*n, T), rng.dirichlet([1.]*n, T)
    p[:, 0] = 0                                                  # What can't come costs nothing
    p /= p.sum(-1, keepdims=True)
    exact, log_q = [dict(enumerate(row)) for row in p], np.log(q)
    wanted = torch.nn.functional.kl_div(torch.tensor(log_q), torch.tensor(p), reduction="none").sum(-1).numpy()
    found = token_divergence(iter(exact), log_q)
    assert found == pytest.approx(wanted, abs=1e-12) and found.min() > -1e-12
    with np.errstate(divide="ignore"): assert token_divergence(exact, np.log(p)) == pytest.approx(np.zeros(T), abs=1e-12)
    with pytest.raises(ValueError, match=f"{T} places of the oracle and {T - 1} of the model"): token_divergence(exact, log_q[1:])


def test_a_score_that_is_no_number_has_no_error():
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match=f"score 1 is {bad}, expected numbers"): standard_error([0, bad, 1])


@pytest.mark.parametrize("clusters", [["a", "a", None, "b"], [0., 0., math.nan, 1.], ["a", "a", math.nan, math.nan]])
def test_a_question_without_a_story_has_no_cluster(clusters):
    "As a table read from a file gives it: NaN was one more story for the formula, and an empty one for the bootstrap."
    for of in (standard_error, lambda x, c: difference_interval(x, [0]*4, c), lambda x, c: bootstrap_interval(np.mean, x, c)):
        with pytest.raises(ValueError, match=f"score 2 has the cluster {clusters[2]}, expected the name of a story"): of([1, 0, 1, 0], clusters)


@pytest.mark.parametrize("hits,n,level,ends", [(0, 7, .95, (0, .354330435)), (7, 7, .95, (.645669565, 1)), (72, 100, .95, (.625119713, .798603148)),
                                               (3, 11, .8, (.139037577, .465467097)), (999, 1000, .99, (.991539434, .999882584))])
def test_intervals_for_shares_of_another_library(hits, n, level, ends):
    "statsmodels 0.15: proportion_confint(hits, n, 1 - level, 'wilson'); scipy 1.17's binomtest(hits, n).proportion_ci(level, 'wilson') is the same."
    assert wilson(hits, n, level) == pytest.approx(ends, abs=1e-8)


def test_clusters_and_pairs_of_another_library():
    "statsmodels 0.15: OLS(x, ones).fit(cov_type='cluster', cov_kwds=dict(groups=g)), its bse and conf_int(.1)."
    x, y, g = [.1, .9, .4, 1, 0, .7, .3, .8, .6], [.2, .5, .4, .9, .3, .7, .1, .2, .6], [0, 0, 0, 1, 1, 2, 2, 2, 3]
    assert standard_error(x, g) == pytest.approx(.03825169, abs=1e-8)
    assert difference_interval(x, y, g, .9) == pytest.approx((.1, -.03676619, .23676619), abs=1e-8)


@pytest.mark.parametrize("asked,n", [((.02, .21, .5, .8, .95), 4120.6518), ((.05, .25, 0, .9, .99), 2975.8774), ((.1, .16, .3, .95, .9), 242.4161)])
def test_sample_sizes_of_another_library(asked, n):
    "statsmodels 0.15: NormalIndPower(ddof=0).solve_power(d/sqrt(v(1 - rho)), alpha=1 - level, power=power), not rounded up."
    assert sample_size(*asked) == math.ceil(n)


def test_scores_of_other_libraries():
    "scikit-learn 1.9: roc_auc_score; netcal 1.4: ECE(bins).measure; scipy 1.17: brentq on the slope of the loss; Chen et al. 2021, figure 3: 1 - prod(1 - k/arange(n - c + 1, n + 1))."
    assert auc([.1, .4, .4, .8, .8, .3, .9, .4], [0, 0, 1, 1, 0, 1, 1, 0]) == .65625
    confidence, right = [.05, .31, .47, .62, .62, .78, .81, .93, .99, .55], [0, 1, 0, 1, 0, 1, 1, 1, 1, 0]
    assert [expected_calibration_error(confidence, right, bins) for bins in (5, 10)] == pytest.approx([.205, .249])
    log_probs = [[0, -1, -3], [-.5, -.2, -2], [-2, 0, -1], [-1.5, -1, -.1], [0, -3, -2], [-.4, -.9, -1]]
    assert fit_temperature(log_probs, [0, 0, 1, 1, 0, 2]) == pytest.approx(.85354461, rel=1e-5)
    for n, c, k in ((200, 3, 100), (10, 1, 10), (20, 19, 2), (5, 0, 3)):
        assert pass_at_k(n, c, k) == pytest.approx(1. if n - c < k else 1 - np.prod(1 - k/np.arange(n - c + 1, n + 1)), abs=1e-14)


def test_the_oracle_has_an_error_in_bins_that_shrinks_and_none_that_is_exact():
    rng = np.random.default_rng(0)
    exact = rng.dirichlet(np.ones(4), 400)
    assert exact_error(exact, exact) == 0 < exact_error(exact**2/(exact**2).sum(1, keepdims=True), exact)
    assert exact_error([[.9, .1]], [[.3, .7]]) == pytest.approx(.6)     # Of the answer that the model picks
    with pytest.raises(ValueError, match="item 0: 2 and 3 choices"): exact_error([[.9, .1]], [[.3, .7, 0]])
    for choices in ([-math.inf]*3, [0., math.nan], []):
        with pytest.raises(ValueError, match="log-probabilities .*, expected a finite largest"): choice_probs(choices)
    with pytest.raises(ValueError, match="variance = inf"): sample_size(.1, math.inf)
    assert Perplexity(1e6, 1, 1).perplexity == math.inf
    with pytest.raises(ValueError, match="item 1: log-probabilities"): fit_temperature([[0., 1.], [np.nan, 1.]], [0, 0])
    small, large = (calibrated_error(np.tile(exact.max(1), k), rng, draws=60)[0] for k in (1, 16))
    assert small/large == pytest.approx(4, rel=.25)


@pytest.mark.parametrize("T", [.6, 1, 4])
def test_a_planted_temperature_is_found(T):
    rng = np.random.default_rng(1)
    exact = rng.dirichlet(np.ones(3), 3000)
    answers = [int(rng.choice(3, p=p)) for p in exact]
    assert fit_temperature(list(T*np.log(exact)), answers) == pytest.approx(T, rel=.12)


# Contamination

@given(st.integers(2, 9).flatmap(lambda n: st.tuples(*(st.lists(st.floats(.01, 1), min_size=n, max_size=n) for _ in "pq"))), st.floats(.001, .999))
def test_false_alarms_are_as_rare_as_the_level_whatever_the_model(pq, level):
    p, q = (np.array(x)/sum(x) for x in pq)
    alarms = [contamination_p([math.log(b)], [math.log(a)]) <= level for a, b in zip(p, q)]
    assert p[alarms].sum() <= level + 1e-9
    both = [(p[i]*p[j], contamination_p(np.log(q[[i, j]]), np.log(p[[i, j]]))) for i in range(len(p)) for j in range(len(p))]
    assert sum(w for w, value in both if value <= level) <= level + 1e-9


def test_a_p_value_is_one_where_the_model_gives_less_and_zero_where_the_source_gives_nothing():
    assert contamination_p([-90.], [-80.]) == 1 and contamination_p([-2000.], [-1.]) == 1
    assert contamination_p([-1.], [-2000.]) == 0 and contamination_p([-1.], [-math.inf]) == 0
    assert contamination_p([-80., -80.], [-82., -81.]) == pytest.approx(math.exp(-3))


def test_the_course_has_no_alarm_for_new_stories_and_documents_in_a_row_are_no_worse_than_their_tokens():
    model, tokenizer = load_model()
    new = list(islice(Stories(seed=4711), 3))
    one_by_one = [log_prob_in_order(model, tokenizer, [d]) for d in new]
    assert sum(one_by_one) == pytest.approx(-perplexity(model, tokenizer, new).nats)
    assert contamination_p(one_by_one, [Stories().log_prob(d) for d in new]) == 1
    beginning = "Once there was a"                              # The end of the text counts, and is no place to end here
    begun = -float(token_nats(model, [tokenizer.end_of_text, *tokenizer.encode(beginning)]).sum())
    assert log_prob_in_order(model, tokenizer, [beginning]) < begun - 3
    file = list(islice(short_stories(seed=4712), 3))
    orders = [log_prob_in_order(model, tokenizer, list(o)) for o in permutations(file)]
    assert len(set(orders)) == 6 and 1/6 <= permutation_p(orders) <= 1


@given(st.lists(st.integers(-3, 0), min_size=2, max_size=8))
def test_a_p_value_by_order_counts_the_file_itself_and_ties(scores):
    assert permutation_p(scores) == sum(s >= scores[0] for s in scores)/len(scores) >= 1/len(scores)


def test_overlap_counts_runs_of_words():
    seen = ngram_set("a b c d", 2)
    assert seen == {("a", "b"), ("b", "c"), ("c", "d")} and ngram_set("a", 2) == set()
    assert [ngram_overlap(t, seen, 2) for t in ("a b c", "b a", "x a b y")] == [1, 0, pytest.approx(1/3)]


def test_renamed_stories_are_as_probable_and_have_nobody_in_common():
    grammar, rng = Stories(), np.random.default_rng(0)
    names = grammar.rules["girl"].entries + grammar.rules["boy"].entries
    for story in islice(Stories(seed=4713), 20):
        other = rename_people(story, rng)
        who, others = ({n for n in names if re.search(rf"\b{n}\b", s)} for s in (story, other))
        assert not who & others and len(who) == len(others)
        assert grammar.log_prob(other) == pytest.approx(grammar.log_prob(story), abs=1e-9)


def test_saved_runs_of_contamination_are_whole():
    about, *rows = saved("contamination")
    counts = {(kind, c): sum((r["kind"], r["copies"]) == (kind, c) for r in rows) for kind in ("story", "renamed", "file") for c in (0, 1, 3, 10, 30)}
    each = about["each"]
    assert counts == {("story", 0): 48, ("renamed", 0): 0, ("file", 0): 200} | {(k, c): each for k in ("story", "renamed", "file") for c in (1, 3, 10, 30)}
    assert about["rows"] == about["fresh"] + 3*each*(1 + 3 + 10 + 30)
    grammar, told = Stories(), list(islice(Stories(about["seeds"]["story"]), 8*each))
    shown = [r for r in rows if r["kind"] != "file" and r["copies"]]
    assert [r["log_p"] for r in shown] == pytest.approx([grammar.log_prob(s) for s in told], abs=1e-3)


# Emergence

@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 10**6))
def test_exact_match_falls_with_the_length_and_is_the_product_of_one_question(n, length, seed):
    hits = np.random.default_rng(seed).random((n, length)) < .7
    matches = [exact_match(hits, k) for k in range(1, length + 1)]
    assert matches == sorted(matches, reverse=True) and matches[0] == match_from_hits(hits, 1)
    one = hits[:1]
    assert [exact_match(one, k) for k in range(1, length + 1)] == [match_from_hits(one, k) for k in range(1, length + 1)]


def test_doublings_of_a_straight_line_and_of_a_jump():
    steps = 2.**np.arange(11)
    assert doublings(steps, np.arange(11)) == pytest.approx(8) == doublings(3*steps, 5 - np.arange(11))
    assert doublings(steps, np.arange(11) >= 5) == pytest.approx(.8)


def test_models_that_were_asked_are_those_of_the_scaling_study():
    about, *models = saved("emergence_sizes")
    study = {(r["budget"], r["width"], r["layers"], r["lr"]): r["loss"] for r in saved("scaling") if r["kind"] in ("grid", "tune", "held_out") and r["seed"] == 0}
    sizes = {key[:3] for key in study}                            # At two budgets other rates were tried with one of the sizes
    assert len(models) == len(sizes) == 20 and {(r["budget"], r["width"], r["layers"]) for r in models} == sizes
    for r in models:
        assert r["valid"] == pytest.approx(study[r["budget"], r["width"], r["layers"], r["lr"]], abs=.003)
        assert len(r["hits"]) == about["blocks"] and {len(h) for h in r["hits"]} == {about["length"]//4}


# Questions that the pretrained model fails

@pytest.mark.parametrize("kind", ["hour", "quote"])
def test_what_was_said_once_is_certain_and_not_in_sight(kind, tmp_path):
    task, grammar = grammar_task(kind, 6, seed=4714), Stories()
    assert task == load_task(save_task(tmp_path, task)) and len(task.items) == 6 and task.ceiling == 1 and task.chance == .25
    for item in task.items:
        right = item.choices[item.answer]
        assert item.probs[item.answer] == 1 and grammar.prefix_log_prob(item.context + right) == pytest.approx(grammar.prefix_log_prob(item.context))
        said = right.strip(" '")
        assert item.context.count(said) >= 1 and len(item.context) - item.context.index(said) > 150
        for k, wrong in enumerate(item.choices):
            if k != item.answer: assert grammar.prefix_log_prob(item.context + wrong) == -math.inf


def test_choices_of_the_next_word_are_whole_words():
    grammar = Stories()
    task = grammar_task("next", 25, seed=4715)
    assert task.version == 2 and len(task.items) > 5
    for item in task.items:
        for choice, p in zip(item.choices, item.probs):
            after = grammar.next_probs(item.context + choice, list("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ-"))
            assert p > 0 and sum(after.values()) < 1e-9, choice


def test_kinds_of_questions_are_those_of_the_command():
    from lmcourse.app.analysis_commands import EvalCommand
    from lmcourse.evaluation.report import TASKS
    assert EvalCommand.tasks == ",".join(TASKS) and {*KINDS} < {*TASKS}


@pytest.mark.parametrize("call, words", [
    (lambda: choice_probs([[-1., -2.], [-2., -1.]]), r"\(2, 2\), expected one item's"),
    (lambda: exact_error([[-1., -2.]], [[.5, .5]]), "item 0: .*expected 0 to 1"), (lambda: exact_error([[1., 0.]], [[math.nan, .5]]), "expected 0 to 1"),
    (lambda: fit_temperature([[0., 1.]]*2, [True, False]), "item 0: answer True, expected the index"),
    (lambda: sample_size(.1, .25, power=.02), "power = 0.02, expected more than 0.025"), (lambda: sample_size(math.inf, .25), "difference = inf"),
    (lambda: excess_by_certainty(np.zeros(0), np.zeros(0)), "one or more"), (lambda: excess_by_certainty(np.ones(2), np.array([1., math.inf])), "finite"),
    (lambda: ceiling(iter([])), "no questions")])
def test_what_only_looks_like_an_argument_is_rejected(call, words):
    with pytest.raises(ValueError, match=words): call()


def test_a_number_is_the_same_whatever_holds_it():
    assert wilson(np.int8(100), np.int8(120)) == wilson(100, 120)
    assert ceiling(p for p in [[.5, .5], [1., 0.]]) == ceiling(np.array([[.5, .5], [1., 0.]])) == .75


def test_a_model_of_nan_has_no_score():
    model, tokenizer = load_model()
    with torch.no_grad(): model.lm_head.weight.fill_(math.nan)
    with pytest.raises(ValueError, match="log-probability of .* is nan"): score_task(model, tokenizer, grammar_task("recall", 2))


def test_one_text_is_no_list_of_texts(tmp_path):
    model, tokenizer = load_model()
    for call in (perplexity, log_prob_in_order, lambda m, t, text: save_texts(tmp_path, "texts", text), lambda m, t, text: refuse_overlap([], text)):
        with pytest.raises(ValueError, match="one text, expected a list"): call(model, tokenizer, "Mia lived in a den.")


def test_a_file_that_is_no_task_is_named(tmp_path):
    task = grammar_task("recall", 2, seed=4719)
    for name in ("", " a", "x/y", "a\n"):
        with pytest.raises(ValueError, match="task .*expected letters"): save_task(tmp_path, replace(task, name=name))
    about = save_task(tmp_path, task)
    for path, text in ((about, about.read_bytes().replace(b"version: 1", b"version: one")), (tmp_path/"recall.jsonl", b"\xff"), (about, b"\xff")):
        path.write_bytes(text)
        with pytest.raises(ValueError, match=re.escape(str(path))): load_task(about)


@pytest.mark.parametrize("name", ["1.0", "true", "null", "1e3", "0x10", "2026-01-02", "-1", "Ä", "recall"])
def test_a_name_is_a_text_to_every_reader_of_yaml(tmp_path, name):
    yaml, task = pytest.importorskip("yaml"), replace(grammar_task("recall", 2, seed=4719), name=name)
    about = save_task(tmp_path, task)
    read = yaml.safe_load(about.read_text(encoding="utf-8"))
    assert (read["task"], read["dataset_kwargs"]["data_files"]) == (name, f"{name}.jsonl") and load_task(about) == task
    for quote in ("'", ""): # As other people write them
        about.write_text(about.read_text(encoding="utf-8").replace('"', quote).replace(f"{name}.jsonl{quote}", f"{name}.jsonl{quote}  # here"), encoding="utf-8")
        assert load_task(about) == task


def test_a_task_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    def full(path, data):
        if ".yaml" in path.name: raise OSError(28, "No space left on device")
        return write(path, data)
    write, task = Path.write_bytes, grammar_task("recall", 2, seed=4719)
    with monkeypatch.context() as m, pytest.raises(OSError, match="recall.yaml"):
        m.setattr(Path, "write_bytes", full)
        save_task(tmp_path, task)
    assert not list(tmp_path.iterdir()) and load_task(save_task(tmp_path, task)) == task


# The harness

@pytest.fixture
def asked(tmp_path):
    "A model, two tasks and texts in files, and what our own functions say of them."
    model, tokenizer = load_model()
    tasks, texts = [grammar_task("recall", 3, seed=4716), grammar_task("next", 8, seed=4716)], list(islice(Stories(4716), 3))
    for task in tasks: save_task(tmp_path, task)
    save_texts(tmp_path, "texts", texts)
    nats = sum(token_nats(model, [tokenizer.end_of_text, *tokenizer.encode(t)]).sum() for t in texts)
    ours = {"texts": dict(bits_per_byte=nats/math.log(2)/sum(len(t.encode()) for t in texts))}
    for task in tasks:
        records = score_task(model, tokenizer, task)
        ours[task.name] = {metric: np.mean([r.hit(norm) for r in records]) for metric, norm in (("acc", "raw"), ("acc_norm", "character"))}
    return model, tokenizer, tmp_path, ours


def test_the_harness_gives_the_same_numbers_without_a_network(asked, monkeypatch):
    pytest.importorskip("lm_eval")
    import socket
    def refused(*args): raise OSError("no network")
    monkeypatch.setattr(socket.socket, "connect", refused)
    model, tokenizer, folder, ours = asked
    theirs = run_harness(model, tokenizer, folder, list(ours))
    assert theirs == {name: pytest.approx(row, rel=1e-6) for name, row in ours.items()}


def test_without_the_harness_one_line_says_what_to_install(monkeypatch):
    import sys
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ModuleNotFoundError, match="pip install lm_eval"): harness_model(*load_model())


def test_long_texts_are_cut_as_the_harness_cuts_them_for_its_own_models(asked):
    "make_disjoint_window(w) for w in get_rolling_token_windows(tokens, prefix, 4, context_len=1) of lm_eval 0.4.13: the tokens that are shown, and the ones to score."
    windows = {3: [([0], [1, 2, 3])], 8: [([0], [1, 2, 3, 4]), ([4], [5, 6, 7, 8])], 9: [([0], [1, 2, 3, 4]), ([4], [5, 6, 7, 8]), ([5, 6, 7, 8], [9])],
               10: [([0], [1, 2, 3, 4]), ([4], [5, 6, 7, 8]), ([6, 7, 8], [9, 10])]}
    class Model:
        class config: context_length = 4
    class Letters:
        end_of_text = 0
        def encode(self, text, special): return [ord(c) - 96 for c in text]
    answers = HarnessAnswers.__new__(HarnessAnswers)
    answers.model, answers.tokenizer = Model, Letters()
    for n, wanted in windows.items():
        found = answers._windows("abcdefghij"[:n])
        assert [(ids[:-k], ids[-k:]) for ids, k in found] == wanted
    model, tokenizer, *_ = asked
    class Request: args = " ".join(islice(Stories(4716), 3)),
    ids, T = [tokenizer.end_of_text, *tokenizer.encode(Request.args[0])], model.config.context_length
    nats, n = 0, len(ids) - 1
    assert n % T and n > 2*T
    for k in range(0, n - n % T, T): nats += token_nats(model, ids[k:k + T + 1]).sum()
    nats += token_nats(model, ids[-T - 1:])[-(n % T):].sum()
    assert HarnessAnswers(model, tokenizer).loglikelihood_rolling([Request]) == [pytest.approx(-nats, rel=1e-6)]


def page_cell(page, name):
    "What a cell that isn't exported defines."
    cells = json.loads((RESULTS.parent/page).read_text(encoding="utf-8"))["cells"]
    source, = ("".join(c["source"]) for c in cells if c["cell_type"] == "code" and "".join(c["source"]).startswith(name))
    exec(source, found := {})
    return found


@pytest.fixture
def public():
    "The tasks of page 12j for readers with a network, made-up rows with the columns of their datasets, and solved examples."
    yaml, cell = pytest.importorskip("yaml"), page_cell("12_evaluation/12j_harness.ipynb", "HELLASWAG")
    scenes = [dict(ind=k, activity_label="Walking", ctx_a="", ctx_b="", ctx=f"Once there was a bold {who} named Mia. Mia lived", endings=["a fig.", "in a den.", "in", "with a fox."], label=str(k))
              for k, who in enumerate(("bear", "fox", "hen", "rook"))]
    exams = [dict(question=f"What does a {who} eat?", subject="astronomy", choices=["a fig", "the sun", "a den", "rain"], answer=k % 4) for k, who in enumerate(("bear", "fox", "hen", "rook", "llama", "mule", "goat"))]
    return [(yaml.safe_load(cell[name]), rows) for name, rows in (("HELLASWAG", scenes), ("MMLU", exams))]


def test_every_line_of_a_public_task_is_one_that_the_harness_knows(public, tmp_path):
    from jinja2 import Environment, StrictUndefined
    yaml = pytest.importorskip("yaml")
    known = set("""task task_alias tag custom_dataset dataset_path dataset_name dataset_kwargs training_split validation_split test_split fewshot_split process_docs doc_to_text
        doc_to_target doc_to_image doc_to_audio unsafe_code doc_to_choice process_results use_prompt description target_delimiter fewshot_delimiter fewshot_config num_fewshot metric_list
        output_type generation_kwargs repeats filter_list should_decontaminate doc_to_decontamination_query gen_prefix metadata""".split())   # TaskConfig of lm_eval 0.4.13
    ours = yaml.safe_load(save_task(tmp_path, grammar_task("recall", 2)).read_text())
    assert {*ours} < known and [t["dataset_path"] for t, _ in public] == ["Rowan/hellaswag", "cais/mmlu"]
    for task, rows in public:
        assert {*task} <= known and {"task", "output_type", *(k for k in ours if k.startswith("doc_to"))} <= {*task} and task["output_type"] == ours["output_type"]
        assert [m["metric"] for m in task["metric_list"]] == ["acc", "acc_norm"][:len(task["metric_list"])]
        assert all({*m} == {"metric", "aggregation", "higher_is_better"} and (m["aggregation"], m["higher_is_better"]) == ("mean", True) for m in task["metric_list"])
        fill = Environment(undefined=StrictUndefined, keep_trailing_newline=True).from_string         # A column that isn't there is an error
        assert fill(task["doc_to_text"]).render(rows[0]) == ("Walking: Once there was a bold bear named Mia. Mia lived" if "hellaswag" in task["task"] else
                                                             "What does a bear eat?\nA. a fig\nB. the sun\nC. a den\nD. rain\nAnswer:")


def test_public_tasks_score_made_up_rows_as_their_lines_say(public, tmp_path):
    pytest.importorskip("lm_eval")
    yaml, (model, tokenizer) = pytest.importorskip("yaml"), load_model()
    for task, rows in public:
        few = task.get("num_fewshot", 0)
        parts = {task.get("validation_split", "test"): rows[few:], **({task["fewshot_split"]: rows[:few]} if few else {})}
        for part, some in parts.items(): (tmp_path/f"{task['task']}-{part}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in some))
        task.pop("dataset_name", None)
        task |= dict(dataset_path="json", dataset_kwargs=dict(data_files={part: f"{task['task']}-{part}.jsonl" for part in parts}))
        (tmp_path/f"{task['task']}.yaml").write_text(yaml.safe_dump(task))
    (hella, scenes), (mmlu, exams) = public
    (tmp_path/"plain.yaml").write_text(yaml.safe_dump(hella | dict(task="plain", doc_to_target="label")))   # As the page warns
    found = run_harness(model, tokenizer, tmp_path, [hella["task"], mmlu["task"], "plain"])
    def best(context, choices, size=lambda c: 1): return int(np.argmax([continuation_log_prob(model, tokenizer, context, " " + c)[0]/size(c) for c in choices]))
    acc, norm = (np.mean([best(f"Walking: {r['ctx']}", r["endings"], size) == int(r["label"]) for r in scenes]) for size in (lambda c: 1, len))
    def asked(r): return r["question"] + "\n" + "".join(f"{letter}. {c}\n" for letter, c in zip("ABCD", r["choices"])) + "Answer:"
    solved = "".join(f"{asked(r)} {'ABCD'[r['answer']]}\n\n" for r in exams[:5])
    letters = np.mean([best(solved + asked(r), "ABCD") == r["answer"] for r in exams[5:]])
    assert found == {hella["task"]: dict(acc=acc, acc_norm=norm), mmlu["task"]: dict(acc=letters), "plain": dict(acc=0, acc_norm=0)} and acc + norm > 0


def test_saved_numbers_of_the_harness_are_those_of_the_page():
    found = json.loads((RESULTS/"harness.json").read_text())
    assert found["lm_eval"] == "0.4.13" and {k: sorted(row) for k, row in found["results"].items()} == {
        "texts": ["bits_per_byte"], "write": ["exact_match"], **{k: ["acc", "acc_norm"] for k in ("recall", "next", "quote")}}


def test_answers_to_requests_are_those_of_the_scorer(asked):
    model, tokenizer, *_ = asked
    class Request:
        def __init__(self, *args): self.args = args
    task, answers = grammar_task("quote", 2, seed=4717), HarnessAnswers(model, tokenizer)
    for item, record in zip(task.items, score_task(model, tokenizer, task)):
        found = answers.loglikelihood([Request(item.context, c) for c in item.choices])
        assert [x for x, _ in found] == pytest.approx(record.log_probs, abs=1e-4)
    for context, after in (("Once there was a bold bear", " named Mia"), ("", "Once there was"), ("Mia", " lived in a den")):
        ids, before = tokenizer.encode(context + after), len(tokenizer.encode(context))
        assert continuation_log_prob(model, tokenizer, context, after)[0] == pytest.approx(-token_nats(model, [tokenizer.end_of_text, *ids])[before:].sum(), abs=1e-4)
    assert not continuation_log_prob(model, tokenizer, "Once there was a bold bear", " named mustard")[1]  # The first token alone is its choice
    texts = ["Mia lived in a den.", "Once there was a bold bear named Mia."]
    rolled = [-token_nats(model, [tokenizer.end_of_text, *tokenizer.encode(t)]).sum() for t in texts]
    assert answers.loglikelihood_rolling([Request("")]) == [0]
    assert answers.loglikelihood_rolling([Request(t) for t in texts]) == pytest.approx(rolled) and rolled[0] != pytest.approx(rolled[1])
    text, = answers.generate_until([Request("Once there was a", dict(until=[" named"], max_gen_toks=8))])
    assert " named" not in text and continuation_log_prob(model, tokenizer, "Once there was a", text)[1]
    assert answers.generate_until([Request("Once there was a", dict(until=" named", max_gen_toks=8))]) == [text]
    long, = answers.generate_until([Request("Once there was a", dict(until=None))])     # Without a limit the harness's own, 256
    assert 64 < len(tokenizer.encode(long)) <= 256
    for how in (dict(do_sample=True), dict(temperature=.7)):
        with pytest.raises(ValueError, match="greedy"): answers.generate_until([Request("Once", how)])


def test_a_model_that_knows_every_answer_has_the_tokens_to_write_it(tmp_path):
    import torch
    task, tokenizer = writing_task(8), Tokenizer.train(list(islice(Stories(4718), 5)), 257)
    known = [[tokenizer.end_of_text, *tokenizer.encode(f"{i.context} {i.right}, and so on")] for i in task.items]
    class Knows(torch.nn.Linear):
        def forward(self, ids):
            row = ids[0].tolist()
            following = next(k[len(row)] for k in known if k[:len(row)] == row)
            return torch.eye(tokenizer.vocab_size)[torch.full((1, len(row)), following)]
    assert written_words(Knows(1, 1), tokenizer, task) == [i.right for i in task.items]
    longest = max(len(tokenizer.encode(" " + i.right)) for i in task.items)
    assert f"max_gen_toks: {longest + 1}\n" in save_task(tmp_path, task).read_text()   # Here a token is a byte


def test_prompts_have_one_answer_and_the_harness_request_gives_what_we_read():
    from collections import namedtuple

    from lmcourse.evaluation.harness import HarnessAnswers
    from lmcourse.evaluation.tasks import first_word, word_probs, writing_task, written_words
    task, grammar = writing_task(7, 555), Stories()
    assert [i.id.partition("-")[0] for i in task.items] == ["recall"]*4 + ["hour"]*3 and task == writing_task(7, 555) != writing_task(7, 556)
    for i in task.items: assert grammar.next_probs(i.context, [f" {i.right}"])[f" {i.right}"] == pytest.approx(1, abs=1e-9) and not i.context.endswith(" ")
    model, tokenizer = load_model()
    Request = namedtuple("Request", "args")
    texts = HarnessAnswers(model, tokenizer).generate_until([Request((i.context, dict(until=["."], max_gen_toks=task.max_tokens, do_sample=False))) for i in task.items])
    assert [first_word(t) for t in texts] == written_words(model, tokenizer, task)
    cold, warm = (word_probs(model, tokenizer, task, t) for t in (.01, 1.))
    assert all(0 <= p <= 1 for p in cold + warm)
    for p, i, w in zip(cold, task.items, written_words(model, tokenizer, task)):    # Near temperature 0 it is the greedy answer
        assert (p > .5) == (w == i.right) or .01 < p < .99
    for temperature in (0, -1, math.nan):
        with pytest.raises(ValueError, match="temperature"): word_probs(model, tokenizer, task, temperature)


def test_an_interval_from_few_stories_holds_the_truth_as_often_as_a_card_says():
    "Five stories of twenty questions: with 1.96 it held in 88 of 100 tests."
    rng, held, stories = np.random.default_rng(0), 0, np.repeat(range(5), 20).tolist()
    for _ in range(2000):
        hits = rng.random((5, 20)) < rng.beta(2, 2, 5)[:, None]
        low, high = _interval(hits.ravel().astype(float).tolist(), stories)
        held += low <= .5 <= high
    assert .93 < held/2000 < .97


def test_stories_that_are_all_alike_leave_an_interval():
    "Two questions on each story, one of them always right: the card of a model that knows the name but not the hour said 0.5 to 0.5."
    assert _interval([1., 0.]*4, [0, 0, 1, 1, 2, 2, 3, 3]) == wilson(2, 4)
    assert _interval([1., 0., 0.]*6, np.repeat(range(6), 3).tolist()) == wilson(2, 6)
    assert _interval([1.]*4, [0, 0, 1, 1]) == wilson(2, 2) and _interval([0.]*4, [0]*4) == (0., 1.)
