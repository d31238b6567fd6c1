"The speed run: turns, ladders and tables, on clocks that are set by hand."
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
from lmcourse.ablations import speedrun
from lmcourse.ablations.speedrun import CONTESTANTS, COOLDOWN, DATA, PARTS, Contestant, Part, Racer, changed, changes_table, equal_time, race, race_table, rungs_of
from lmcourse.ablations.sweep import paired_difference, read_lines
from lmcourse.tools.checks import expect_error
from lmcourse.training.optim_torch import learning_rate
from lmcourse.training.trainer import Diverged

RESULTS = Path(__file__).parents[1]/"nbs/results/speedrun.jsonl"
STEP = dict(course=.1, nanogpt=.4)      # Seconds, made up
WORK = dict(course=100., nanogpt=500.)  # Excess times steps, made up


@pytest.fixture
def turns(monkeypatch):
    "Contestants without a model, whose steps take a known time; a list of who took a slice, and what all had spent then."
    taken, spent = [], {}

    class Stub(Racer):
        def __init__(self, contestant, name, folder, seed=0, data=DATA, clock=None):
            self.contestant, self.name, self.seed, self.data, self.curve, self.engine = contestant, name, seed, data, [], None
            self.step, self.seconds, self.wall, self.spent = 0, 0., 0., 0.

        def advance(self, rates):
            took = STEP[self.name]*len(rates)
            self.step, self.seconds, self.wall, self.spent = self.step + len(rates), self.seconds + took, self.wall + 3*took, self.spent + took
            spent[self.name, self.seed] = self.spent
            taken.append((self.name, dict(spent)))

        def look(self, documents): return SimpleNamespace(excess=WORK[self.name]/self.step, error=.001)

    monkeypatch.setattr(speedrun, "Racer", Stub)
    monkeypatch.setattr(speedrun, "unchanged", lambda engine: nullcontext())
    monkeypatch.setattr(speedrun, "prepare_corpus", lambda data, work: work)
    monkeypatch.setattr(speedrun, "step_seconds", lambda racers: dict.fromkeys(racers, 1.))
    return taken


BOTH = {name: replace(c, first=100, ratio=2.) for name, c in CONTESTANTS.items()}
def run(tmp_path, minutes=5., mark=.15, seeds=(0,), **more): return race(seeds, tmp_path/"lines.jsonl", tmp_path, minutes, mark, contestants=BOTH, say=lambda s: None, **more)


def test_the_first_rung_at_the_mark_ends_a_climb_and_the_limit_another(tmp_path, turns):
    rungs = rungs_of(run(tmp_path))
    assert [l["steps"] for l in rungs["course", 0]] == [100, 200, 400, 800]             # 100/800 is the first below 0.15
    assert [l["steps"] for l in rungs["nanogpt", 0]] == [100, 200, 400]                 # 800 steps would take 320 s of 300


def test_a_rung_takes_the_time_of_its_own_run_alone(tmp_path, turns):
    for name, seed in (rungs := rungs_of(run(tmp_path))):
        for l in rungs[name, seed]:
            assert l["seconds"] == pytest.approx(STEP[name]*l["steps"]) and l["wall_seconds"] == pytest.approx(3*l["seconds"])
            assert l["curve"][-1] == (l["seconds"], l["excess"]) or l["curve"][-1] == [l["seconds"], l["excess"]]
            assert [s for s, _ in l["curve"]] == sorted(s for s, _ in l["curve"])


def test_whoever_has_used_fewer_seconds_goes_next(tmp_path, turns):
    run(tmp_path)
    last = max(i for i, (name, _) in enumerate(turns) if name == "course")
    gaps = [abs(spent["course", 0] - spent["nanogpt", 0]) for _, spent in turns[:last] if len(spent) == 2]
    assert len(gaps) > 10 and max(gaps) <= 50*max(STEP.values()) + 1e-9                 # A slice of 50 steps at most


@pytest.mark.parametrize("after", [1, 3, 5])
def test_a_killed_race_goes_on(tmp_path, turns, after):
    (tmp_path/"whole").mkdir()
    whole, made = run(tmp_path/"whole"), []
    def stop(text):
        made.append(text)
        if len(made) == after: raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        race([0], tmp_path/"lines.jsonl", tmp_path, 5., .15, contestants=BOTH, say=stop)
    assert len(read_lines(tmp_path/"lines.jsonl")) == after
    with open(tmp_path/"lines.jsonl", "a") as f: f.write('{"key": "torn')                # What a kill leaves of a line
    said = []
    again = race([0], tmp_path/"lines.jsonl", tmp_path, 5., .15, contestants=BOTH, say=said.append)
    assert len(said) == len(whole) - after and again.keys() == whole.keys()
    assert {k: l["excess"] for k, l in again.items()} == {k: l["excess"] for k, l in whole.items()}
    steps = len(turns)
    run(tmp_path)
    assert len(turns) == steps                                                           # Nothing is missing, so nothing is trained


def test_more_seeds_are_added_to_those_that_are_there(tmp_path, turns):
    run(tmp_path)
    assert {seed for _, seed in rungs_of(run(tmp_path, seeds=(0, 1)))} == {0, 1}


def test_runs_of_another_contestant_of_the_same_name_are_not_taken_for_its_own(tmp_path, turns):
    run(tmp_path)
    other = BOTH | dict(course=replace(BOTH["course"], rows=(), shift=False))
    with pytest.raises(ValueError, match=r"the file has a run of another contestant of this name, with .*'rows': \[8192, 16384\]"):
        race([0], tmp_path/"lines.jsonl", tmp_path, 5., .15, contestants=other, say=lambda s: None)


def test_a_change_of_the_same_name_is_not_taken_for_another(tmp_path, turns, monkeypatch):
    monkeypatch.setitem(STEP, "trial: base", .1)
    monkeypatch.setitem(WORK, "trial: base", 100.)
    def trial(**fields):
        monkeypatch.setitem(PARTS, "trial", Part("course", dict(base=fields), 100))
        return equal_time("trial", [0], tmp_path/"lines.jsonl", tmp_path, say=lambda s: None)
    assert trial() == trial() and len(turns) == 2                           # Two slices of 50 steps
    for fields in (dict(num_layers=3), dict(lr=1e-3)):
        with pytest.raises(ValueError, match="of this name with another model, training or data"): trial(**fields)


@pytest.mark.parametrize("where", ["in a step", "in the last step"])
def test_a_variant_that_diverges_ends_its_own_run_alone(tmp_path, turns, monkeypatch, where):
    said, advance, look = [], speedrun.Racer.advance, speedrun.Racer.look
    def torn(racer, rates):
        if "wild" in racer.name and where == "in a step": raise Diverged(f"{racer.name}: gradient nan")
        advance(racer, rates)
    monkeypatch.setattr(speedrun.Racer, "advance", torn)
    monkeypatch.setattr(speedrun.Racer, "look", lambda racer, n: SimpleNamespace(excess=float("nan"), loss=float("nan"), error=0.) if "wild" in racer.name else look(racer, n))
    for name in ("base", "wild", "later"):
        monkeypatch.setitem(STEP, f"trial: {name}", .1)
        monkeypatch.setitem(WORK, f"trial: {name}", 100.)
    monkeypatch.setitem(PARTS, "trial", Part("course", {name: {} for name in ("base", "wild", "later")}, 40))
    lines = equal_time("trial", [0], tmp_path/"lines.jsonl", tmp_path, say=said.append)
    assert [l["contestant"] for l in lines.values()] == ["trial: base", "trial: later"] and "seed 0 diverged: trial: wild" in said[1]
    monkeypatch.setitem(STEP, "wild", .1)
    lines = race([0], tmp_path/"race.jsonl", tmp_path, 5., .15, ("wild", "course"), BOTH | dict(wild=BOTH["nanogpt"]), say=said.append)
    assert {l["contestant"] for l in lines.values()} == {"course"} and any("left the race: wild" in s for s in said)
    monkeypatch.setitem(PARTS, "trial", Part("course", dict(wild={}), 40))
    with pytest.raises(Diverged): equal_time("trial", [0], tmp_path/"none.jsonl", tmp_path, say=said.append)


def test_a_variant_that_costs_more_gets_fewer_steps_and_is_measured_once(tmp_path, turns, monkeypatch):
    measured = []
    def costs(racers):
        measured.append(list(racers))
        return {name: 1.25 if name == "dear" else 1. for name in racers}
    monkeypatch.setattr(speedrun, "step_seconds", costs)
    monkeypatch.setitem(PARTS, "trial", Part("course", dict(base={}, dear=dict(num_layers=3)), 100))
    for name in ("base", "dear"):
        monkeypatch.setitem(STEP, f"trial: {name}", .1)
        monkeypatch.setitem(WORK, f"trial: {name}", 100.)
    for seeds in ([0], [0, 1]):
        lines = equal_time("trial", seeds, tmp_path/"lines.jsonl", tmp_path, say=lambda s: None)
        assert {(l["contestant"], l["seed"], l["steps"], l["cost"]) for l in lines.values()} == {
            (f"trial: {name}", seed, steps, cost) for name, steps, cost in (("base", 100, 1.), ("dear", 80, 1.25)) for seed in seeds}
    assert measured == [["base", "dear"]]                                   # The first costs 1 by definition


def test_the_table_says_when_or_how_far(tmp_path, turns):
    ours, theirs = race_table(run(tmp_path)).rows
    assert (ours["contestant"], ours["cpu"], ours["wall"], ours["reached"], ours["steps"]) == ("course", 80, 240, "yes", 800)
    assert (theirs["reached"], theirs["excess"], theirs["relative_time"]) == ("no", 1.25, "> 2.0")
    reached = race_table(run(tmp_path, minutes=60.)).rows[1]
    assert reached["reached"] == "yes" and reached["relative_time"] == f"{.4*6400/80:.1f}"


@pytest.mark.parametrize("change, words", [
    (dict(minutes=0), "minutes = 0, expected"), (dict(minutes=float("inf")), "minutes = inf, expected"), (dict(mark=-1), "mark = -1, expected"),
    (dict(mark=float("nan")), "mark = nan, expected"), (dict(seeds=()), "seeds = 0, expected 1 or more"), (dict(names=("nanogtp",)), "did you mean 'nanogpt'?")])
def test_what_makes_no_sense_is_rejected_before_anything_is_made(tmp_path, turns, change, words):
    with expect_error(ValueError, words): run(tmp_path/"new", **change)
    assert not turns and not (tmp_path/"new").exists()


def test_a_rung_is_a_run_with_a_cooldown():
    c = CONTESTANTS["course"]
    short, long = (c.job(3, steps, DATA).train for steps in (1000, 2000))
    rate = lambda t, n: learning_rate(n, t.lr, t.min_lr, t.warmup_steps, t.steps, t.cooldown_steps, shape="constant")
    fork = 1000 - round(COOLDOWN*1000)
    assert short.seed == 3 and [rate(short, n) for n in range(1, fork + 1)] == [rate(long, n) for n in range(1, fork + 1)]
    assert rate(short, fork) == short.lr > rate(short, fork + 1) and rate(short, 1000) == 0 < rate(long, 1000)
    assert [n for n, _ in zip(replace(c, first=100, ratio=1.5).rungs(), range(4))] == [100, 150, 225, 338]


def test_nanogpts_model_has_gpt2s_parameters_and_first_weights():
    from lmcourse.ablations.speedrun import Gpt2Engine
    c = CONTESTANTS["nanogpt"]
    m, model = c.model, Gpt2Engine(c.model, c.train).model
    D, L = m.d_model, m.num_layers
    assert sum(p.numel() for p in model.parameters()) == m.vocab_size*D + m.context_length*D + L*(12*D*D + 2*D) + D
    std = {name: float(p.detach().std()) for name, p in model.named_parameters() if p.ndim == 2}
    for name, found in std.items():
        assert found == pytest.approx(.02/(2*L)**.5 if name.endswith(("output_proj.weight", "w2.weight")) else .02, rel=.03), name


def test_a_sprinters_heads_start_as_copiers():
    import torch
    from lmcourse.ablations.speedrun import NgramLM, SprintEngine, shifted_attention
    c = CONTESTANTS["course"]
    config, D = replace(c.model, vocab_size=300, context_length=16), c.model.d_model
    train = replace(c.train, grad_clip=0.)
    model = SprintEngine(config, train, c).model
    for attn in (layer.attn for layer in model.layers):
        assert torch.equal(attn.v_proj.weight, torch.eye(D)) and torch.equal(attn.output_proj.weight, torch.eye(D))
        q, k = attn.q_proj.weight, attn.k_proj.weight
        assert torch.equal(q[:D//2], k[:D//2]) and not torch.equal(q[D//2:], k[D//2:])
    plain = SprintEngine(config, train, replace(c, copy=False, zero=False, shift=False, rows=())).model
    assert isinstance(plain, NgramLM) and not plain.tables and plain.layers[0].ffn.w2.weight.abs().max() > 0
    q, k, v = (torch.randn(1, 2, 5, 4, generator=torch.Generator().manual_seed(i)) for i in range(3))
    found = shifted_attention(q, k, v)
    ahead = torch.cat((torch.zeros(1, 1, 1, 4), k[:, :1, :-1]), 2)                       # By hand: the key of the position before
    for head, keys in ((0, ahead[:, 0]), (1, k[:, 1])):
        scores = (q[:, head]@keys.mT/2).masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))
        assert torch.allclose(found[:, head], scores.softmax(-1)@v[:, head], atol=1e-6)


def test_rows_of_a_table_see_the_tokens_that_end_there_and_no_later_ones():
    import torch
    from lmcourse.ablations.speedrun import NgramLM
    config = replace(CONTESTANTS["course"].model, vocab_size=300, context_length=16)
    model, ids = NgramLM(config, rows=(64, 128)), torch.arange(12)[None]
    for table in model.tables: torch.nn.init.normal_(table.weight)
    base = model.embed(ids)
    for at in range(12):
        other = ids.clone()
        other[0, at] = 250
        moved = (model.embed(other) != base).any(-1)[0].nonzero().flatten().tolist()
        assert at in moved and set(moved) <= {at, at + 1, at + 2}


def test_rows_of_a_table_need_the_whole_text_so_decoders_with_a_cache_are_rejected():
    from lmcourse.ablations.speedrun import NgramLM
    from lmcourse.generation.generate import RecomputingDecoder, generate
    from lmcourse.inference.engine import Engine, Request
    from lmcourse.inference.kv_cache import CachedDecoder
    from lmcourse.tools.config import ModelConfig
    model = NgramLM(ModelConfig(vocab_size=32, context_length=16, d_model=16, num_layers=1, num_heads=2, d_ff=32), rows=(64,)).eval()
    with expect_error(ValueError, "can't run with a cache; use RecomputingDecoder"): CachedDecoder(model).feed([1, 2, 3])
    with expect_error(ValueError, "can't run with a cache; use RecomputingDecoder"): Engine(model).run([Request((1, 2, 3), 2)])
    assert len(list(generate(model, [1, 2, 3], 4, decoder=RecomputingDecoder))) == 4


def test_every_change_and_every_size_makes_a_contestant():
    for who, table, _ in speedrun.PARTS.values():
        made = [changed(CONTESTANTS[who], fields) for fields in table.values()]
        assert all(isinstance(c, Contestant) for c in made) and len(set(made)) == len(made)
    with expect_error(ValueError, "unknown field to change 'layers'"): changed(CONTESTANTS["course"], dict(layers=3))


def test_differences_are_paired_by_seed(monkeypatch):
    monkeypatch.setitem(PARTS, "changes", Part("course", dict(a={}, b={}, c={}), 10))
    excess = {"a": {0: 1.0, 1: 1.2, 2: 1.1}, "b": {0: 1.1, 2: 1.3}}
    lines = {f"{n}{s}": dict(part="changes", contestant=f"changes: {n}", seed=s, excess=e, cost=1., steps=10) for n, runs in excess.items() for s, e in runs.items()}
    base, other = changes_table(lines).rows
    mean, half = paired_difference([1.1, 1.3], [1.0, 1.1])
    assert base["difference"] == "–" and (other["difference"], other["interval"], other["runs"]) == (f"{mean:+.3f}", f"± {half:.3f}", 2)


def test_saved_lines_are_those_of_the_contestants():
    lines = read_lines(RESULTS)
    for key, l in lines.items():
        if l["part"] in ("steps", "tokens"): continue
        assert json.dumps(l) and l["seconds"] > 0 and l["excess"] > 0 and l["machine"]
        who, table, _ = speedrun.PARTS.get(l["part"], (l["contestant"], {}, 0))
        name = l["contestant"].removeprefix(f"{l['part']}: ")
        c = changed(CONTESTANTS[who], table[name] if table else {})
        assert key == f"{l['contestant']}-{c.job(l['seed'], l['steps'], DATA).key}"
