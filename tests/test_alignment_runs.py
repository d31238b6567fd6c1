"`lmcourse sft`, `dpo` and `rl`: a run that was killed ends with the same bits, two processes do what one does, and mistakes are one line before any work."
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from importlib.resources import files
from itertools import count, islice
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from lmcourse.ablations.case import open_case
from lmcourse.alignment.briefs import Demonstrators
from lmcourse.alignment import runs
from lmcourse.alignment.preference import PreferenceBatches, read_pairs
from lmcourse.alignment.rollouts import Rollout
from lmcourse.alignment.runs import align_to_the_end, hold_out, new_alignment, note_steps, open_alignment, own_pairs
from lmcourse.alignment.sft import SftBatches, read_conversations
from lmcourse.alignment.tasks import verifiable_task
from lmcourse.app import cli
from lmcourse.architecture.transformer_torch import TransformerLM
from lmcourse.generation.generate import PLAIN_CHAT, prompt_ids, read_chat_template
from lmcourse.parallelism.collectives_torch import ProcessPool
from lmcourse.tokenization.tokenizer import Tokenizer
from lmcourse.tools.config import ModelConfig, TrainConfig
from lmcourse.training.data import TokenDataset
from lmcourse.training.engines import World
from lmcourse.training.evaluation import evaluate
from lmcourse.training.models import load_model, save_model
from lmcourse.training.runs import read_metrics

ROOT = Path(__file__).parents[1]
ENV = os.environ | dict(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
RL = "--prompts 1 --group-size 2 --reward mentions --steps 4 --checkpoint-every 1 --log-every 1 --eval-every 10 --eval-documents 2".split()


def command(*words, cwd): return [sys.executable, "-m", "lmcourse", *map(str, words)], dict(cwd=cwd, env=ENV)


def write_pairs(path, n=24): # Made by demonstrators: a right response, and one that is about something else
    clean, other = Demonstrators(0., 1), Demonstrators(0., 2)
    pairs = [dict(prompt=p, chosen=c, rejected=r) for (p, c), (_, r) in (((next(clean)), next(other)) for _ in range(n))]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
    return pairs


def settings_of(kind, folder):
    return dict(sft=dict(slip=.2, demonstrations=16), dpo=dict(pairs=str(folder/"pairs.jsonl")), rl=dict(prompts=2, group_size=2, reward="mentions", max_tokens=12, kl=.1))[kind]


def final_weights(run): return torch.cat([p.flatten() for p in load_model(run, checkpoint="latest")[0].parameters()])


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_and_ends_with_the_same_bits(tmp_path):
    words, kwargs = command("rl", "whole", *RL, cwd=tmp_path)
    assert subprocess.run(words, **kwargs, capture_output=True).returncode == 0
    words, kwargs = command("rl", "cut", *RL, cwd=tmp_path)
    process = subprocess.Popen(words, **kwargs, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not list((tmp_path/"cut"/"checkpoints").glob("*")): time.sleep(.05)
    process.kill()
    process.wait()
    words, kwargs = command("rl", "--resume", "cut", cwd=tmp_path)
    done = subprocess.run(words, **kwargs, capture_output=True, text=True)
    assert done.returncode == 0 and "going on after step" in done.stdout, done.stderr
    assert torch.equal(final_weights(tmp_path/"whole"), final_weights(tmp_path/"cut"))
    steps = [json.loads(line)["step"] for line in (tmp_path/"cut"/"success.jsonl").read_text().splitlines()]
    assert steps == [4]


@pytest.fixture(scope="module")
def little(tmp_path_factory): # A model that computes in no time, with the tokenizer of the course's
    folder = tmp_path_factory.mktemp("little")/"model"
    tokenizer = load_model()[1]
    config = ModelConfig(vocab_size=tokenizer.vocab_size, context_length=96, d_model=16, d_ff=32, num_layers=2, num_heads=2, norm="layernorm", bias=True)
    save_model(folder, TransformerLM(config, seed=3), tokenizer, TrainConfig(), {})
    return replace(TRAIN, init_from=str(folder), eps=1e-4)                   # With a small eps, Adam makes a step of full length of what rounding leaves of a gradient


TRAIN = TrainConfig(steps=3, batch_size=4, lr=1e-3, min_lr=1e-3, schedule="constant", warmup_steps=1, eval_every=10, eval_documents=2, checkpoint_every=10)


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_stopped_between_two_steps_it_goes_on_with_the_same_bits(kind, little, tmp_path):
    write_pairs(tmp_path/"pairs.jsonl")
    whole, cut = (new_alignment(tmp_path/name, kind, settings_of(kind, tmp_path), little) for name in ("whole", "cut"))
    for _ in range(3): whole.train_step()
    cut.train_step()
    cut.save(tmp_path/"cut")
    (tmp_path/"pairs.jsonl").unlink()                                       # The run has a copy of its own
    again = open_alignment(tmp_path/"cut")
    assert again.step == 1
    for _ in range(2): again.train_step()
    assert all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), again.model.parameters()))


def test_each_step_of_a_run_that_was_killed_has_a_line(little, tmp_path):
    "However seldom it measures, and where batches are made ahead."
    for name, more in (("plain", {}), ("ahead", dict(staleness=1))):
        run, train = tmp_path/name, replace(little, steps=5, checkpoint_every=2)
        killed = new_alignment(run, "rl", settings_of("rl", tmp_path) | more, train)
        for _ in range(3):
            killed.train_step()
            if killed.step == 2: killed.save(run)
        killed.batches.close()
        align_to_the_end(open_alignment(run), run, tests=2)
        lines = [json.loads(line) for line in (run/"rollouts.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == [0, 1, 2, 3, 4] and lines[0].keys() >= {"reward", "gold", "kl"}


@pytest.mark.parametrize("kind", ["sft", "dpo", "rl"])
def test_a_run_that_was_killed_before_its_first_checkpoint_begins_anew(kind, little, tmp_path):
    write_pairs(tmp_path/"pairs.jsonl")
    run = tmp_path/"run"
    align_to_the_end(new_alignment(run, kind, settings_of(kind, tmp_path), little), run, tests=2)
    once = [line["step"] for line in read_metrics(run)]
    with pytest.raises(ValueError, match="the doctor examines those of"): open_case(run)
    shutil.rmtree(run/"checkpoints")
    align_to_the_end(open_alignment(run), run, tests=2)
    assert [line["step"] for line in read_metrics(run)] == once


def test_a_finished_run_is_told_and_not_measured_again(little, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    align_to_the_end(new_alignment(Path("run"), "sft", settings_of("sft", tmp_path), little), Path("run"), tests=2)
    before = {p: p.read_bytes() for p in Path("run").rglob("*") if p.is_file()}
    monkeypatch.setattr("lmcourse.alignment.runs.open_alignment", None)
    cli.main(["sft", "--resume", "run"])
    said = capsys.readouterr().out
    assert "run is finished: success 0.000 after 3 steps\n" in said and "lmcourse sft NEW --init-from run" in said
    assert {p: p.read_bytes() for p in Path("run").rglob("*") if p.is_file()} == before
    Path("run/success.jsonl").unlink()                                      # Killed before its last measurement
    with pytest.raises(TypeError): cli.main(["sft", "--resume", "run"])


@pytest.mark.parametrize("kind", ["dpo", "rl"])
def test_a_run_goes_on_from_another_working_directory(kind, little, tmp_path, monkeypatch):
    monkeypatch.chdir(Path(little.init_from).parent)
    write_pairs(tmp_path/"pairs.jsonl")
    more = dict(reference="model") if kind == "dpo" else {}
    new_alignment(tmp_path/"run", kind, settings_of(kind, tmp_path) | more, replace(little, init_from="model"))
    monkeypatch.chdir(tmp_path)
    assert open_alignment(tmp_path/"run").step == 0


def test_what_the_reference_of_dpo_has_no_room_for_is_rejected_before_there_is_a_folder(little, tmp_path, monkeypatch):
    tokenizer = load_model()[1]
    save_model(tmp_path/"small", TransformerLM(ModelConfig(vocab_size=tokenizer.vocab_size, context_length=32, d_model=16, d_ff=32, num_layers=1, num_heads=2)), tokenizer, TrainConfig(), {})
    write_pairs(tmp_path/"pairs.jsonl")
    monkeypatch.setattr(runs, "own_pairs", None)                            # Nothing is written by the model
    for given, words in ((settings_of("dpo", tmp_path), "tokens to read, the model takes 32"), ({}, "prompts with their responses need 58 tokens, the model takes 32")):
        with pytest.raises(ValueError, match=words): new_alignment(tmp_path/"run", "dpo", given | dict(reference=str(tmp_path/"small")), little)
    assert not (tmp_path/"run").exists()


def test_the_prompts_of_all_steps_have_room(little, tmp_path):
    "In the second step of this seed comes a prompt that is longer than the first 100."
    task, tokenizer = verifiable_task("easy-problems"), load_model()[1]
    def longest(n, seed): return max(len(tokenizer.encode(p)) for p in task.prompts(n, seed))
    seed = next(s for s in range(999) if longest(8, 1_000_000*(s + 1) + 1) > longest(100, 1_000_000*(s + 1)))
    settings = dict(task=task.name, prompts=8, group_size=2, max_tokens=95 - longest(100, 1_000_000*(seed + 1)))
    with pytest.raises(ValueError, match="prompts with max_tokens = .* need 9[7-9] tokens, the model takes 96"): new_alignment(tmp_path/"run", "rl", settings, replace(little, seed=seed))
    assert not (tmp_path/"run").exists()


def test_dpo_measures_pairs_and_writes_them_down(little, tmp_path, monkeypatch):
    pairs = write_pairs(tmp_path/"pairs.jsonl")
    monkeypatch.setattr(runs, "own_pairs", lambda *args: pairs)
    trainer = new_alignment(tmp_path/"dpo", "dpo", {}, little)
    assert read_pairs(tmp_path/"dpo"/"data"/"pairs.jsonl") == pairs
    begun = trainer.batches.measure(trainer.model)
    assert begun["chosen"] == pytest.approx(0, abs=1e-4) and begun["rejected"] == pytest.approx(0, abs=1e-4)
    align_to_the_end(trainer, tmp_path/"dpo", tests=4)
    line = json.loads((tmp_path/"dpo"/"success.jsonl").read_text().splitlines()[-1])
    assert line["step"] == 3 and line["chosen"] > line["rejected"] and line["ordered"] > .5 and 0 <= line["success"] <= 1


def test_a_line_of_pairs_ends_only_where_json_lines_end(tmp_path):
    pairs = [dict(prompt="a\u2028b\u2029", chosen="c\x85d", rejected=""), dict(prompt="e", chosen="f", rejected="g")]
    for line_end in ("\n", "\r\n"):
        (tmp_path/"pairs.jsonl").write_bytes("".join(json.dumps(p, ensure_ascii=False) + line_end for p in pairs).encode("utf-8-sig")) # With the mark that Windows likes to put first
        assert read_pairs(tmp_path/"pairs.jsonl") == pairs


@pytest.mark.parametrize("seed, measured", [(998, 999), (554, 555), (999_998, 999_999)])
def test_no_seed_trains_on_the_prompts_of_a_measurement(seed, measured):
    task = verifiable_task("problems")
    trained = {p for p, _ in runs.SftRun(dict(task=task.name, slip=.2, demonstrations=200), seed).pairs()}
    assert len(trained) > 190 and not trained & {*task.prompts(96, measured), *(p for p, _ in islice(task.demonstrations(0., measured), 64))}


def test_a_model_with_no_room_for_the_test_prompts_is_rejected(tmp_path):
    tokenizer = load_model()[1]                                             # Demonstrations of briefs need 49 tokens, test prompts and their responses 58
    save_model(tmp_path/"model", TransformerLM(ModelConfig(vocab_size=tokenizer.vocab_size, context_length=52, d_model=16, d_ff=32, num_layers=1, num_heads=2)), tokenizer, TrainConfig(), {})
    with pytest.raises(ValueError, match="test prompts need 58 tokens, the model takes 52"):
        new_alignment(tmp_path/"run", "sft", settings_of("sft", tmp_path), replace(TRAIN, init_from=str(tmp_path/"model")))
    assert not (tmp_path/"run").exists()


@pytest.mark.parametrize("kind, change, words", [("rl", dict(prompts=3), "prompts = 3 for 2 processes"), ("rl", dict(staleness=1), "staleness = 1 for 2 processes"), ("sft", {}, "5 is not a multiple of 2"), ("dpo", {}, "5 is not a multiple of 2")])
def test_what_processes_cannot_share_is_rejected_before_there_is_a_folder(kind, change, words, little, tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "join_world", lambda *args: World(0, 2))
    write_pairs(tmp_path/"pairs.jsonl")
    with pytest.raises(ValueError, match=words): new_alignment(tmp_path/"run", kind, settings_of(kind, tmp_path) | change, replace(little, batch_size=5))
    assert not (tmp_path/"run").exists()


def test_the_folder_is_made_after_all_processes_have_looked_for_it(little, tmp_path, monkeypatch):
    waits, reduce = [], World.all_reduce_sum
    monkeypatch.setattr(World, "all_reduce_sum", lambda *args: waits.append((tmp_path/"run").exists()) or reduce(*args))
    new_alignment(tmp_path/"run", "sft", settings_of("sft", tmp_path), little)
    assert waits[:2] == [False, True]                                       # A slow process would find the folder that another one has just made


def test_own_pairs_are_a_right_and_a_wrong_response_of_the_model(tmp_path):
    shipped, tokenizer = load_model()
    with pytest.raises(ValueError, match="4 responses to 2 prompts, and to no prompt a right and a wrong one"): own_pairs(shipped, tokenizer, 2, 2)


def run_in_process(kind, folder, train): # In a rank of the pool
    os.environ["WORLD_SIZE"] = "2"
    folder = Path(folder)
    trainer = new_alignment(folder/f"{kind}-two", kind, settings_of(kind, folder), TrainConfig.from_dict(train))
    found = align_to_the_end(trainer, folder/f"{kind}-two", tests=2)
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()]).numpy(), len(found), trainer.plan.processes


def test_two_processes_do_what_one_does(little, tmp_path):
    write_pairs(tmp_path/"pairs.jsonl")
    with ProcessPool(2, __name__, timeout_s=60) as pool:
        for kind in ("sft", "dpo", "rl"):
            (a, told, processes), (b, silent, _) = pool.run(run_in_process, kind, str(tmp_path), little.to_dict())
            one = new_alignment(tmp_path/f"{kind}-one", kind, settings_of(kind, tmp_path), little)
            align_to_the_end(one, tmp_path/f"{kind}-one", tests=2)
            w = torch.cat([p.detach().flatten() for p in one.model.parameters()]).numpy()
            start = torch.cat([p.detach().flatten() for p in load_model(little.init_from)[0].parameters()]).numpy()
            assert processes == 2 and told and not silent and (a == b).all()
            assert abs(a - w).max() < 1e-5 < abs(w - start).max()
            logs = [[json.loads(line) for line in (tmp_path/f"{kind}-{n}"/"success.jsonl").read_text().splitlines()] for n in ("one", "two")]
            assert [line["step"] for line in logs[0]] == [line["step"] for line in logs[1]] == [3]
            if kind == "rl": assert (tmp_path/"rl-one"/"rollouts.jsonl").read_text().count("\n") == (tmp_path/"rl-two"/"rollouts.jsonl").read_text().count("\n") == 3


@pytest.mark.parametrize("kind", ["sft", "dpo", "rl"])
def test_another_task_has_its_own_prompts_judge_and_measures(kind, little, tmp_path, monkeypatch):
    task = verifiable_task("easy-problems")
    pairs = [dict(prompt=p, chosen=r, rejected=" The answer is 0.") for p, r in islice(task.demonstrations(0., 1), 8)]
    settings = dict(task=task.name) | (settings_of(kind, tmp_path) if kind == "sft" else {})
    if kind == "rl": settings = dict(task=task.name, prompts=2, group_size=2)
    run = tmp_path/"run"
    if kind == "dpo": monkeypatch.setattr(runs, "own_pairs", lambda *args: pairs)
    trainer = new_alignment(run, kind, settings, little)
    assert TokenDataset.open(run/"data"/"valid").info["source"] == task.name
    found = align_to_the_end(trainer, run, tests=3)
    assert found.keys() >= {"success", "form", "entropy"} and not found.keys() & {"mentions", "openings", "endings"}
    if kind == "rl":
        assert trainer.batches.make.config.max_tokens == task.max_tokens and len(trainer.batches.make.log) == 3
        prompts = task.prompts(2, 1_000_000)
        ids = trainer.batches.make(trainer.model, 0)[0]
        assert all(prompts[i//2] in Tokenizer.from_folder(run/"data"/"tokenizer").decode(row.tolist()) for i, row in enumerate(ids))
    assert open_alignment(run).step == 3


def test_own_pairs_are_judged_by_the_task(monkeypatch):
    task, (shipped, tokenizer) = verifiable_task("easy-problems"), load_model()
    right = dict(islice(task.demonstrations(0., 1_000_000), 4))
    class Writer:
        def __init__(self, *args): assert args[2] == task.max_tokens
        def __call__(self, prompts, n, seed): return [Rollout(p, right[p] if i else " The answer is 0.", (), 0, (), 0, True) for p in prompts for i in range(n)]
    monkeypatch.setattr(runs, "Sampler", Writer)
    assert own_pairs(shipped, tokenizer, 3, 2, 0, task) == [dict(prompt=p, chosen=right[p], rejected=" The answer is 0.") for p in task.prompts(3, 1_000_000)]


@pytest.mark.parametrize("kind", ["sft", "dpo", "rl"])
def test_a_model_that_cannot_be_sampled_is_rejected_before_there_is_a_folder(kind, little, tmp_path):
    write_pairs(tmp_path/"pairs.jsonl")
    before, tokenizer = load_model(little.init_from)
    save_model(tmp_path/"model", TransformerLM(replace(before.config, kv_lora_rank=8, bias=False)), tokenizer, TrainConfig(), {})
    with pytest.raises(ValueError, match="Engine does not compute kv_lora_rank = 8"):
        new_alignment(tmp_path/"run", kind, {} if kind == "dpo" else settings_of(kind, tmp_path), replace(little, init_from=str(tmp_path/"model")))
    assert not (tmp_path/"run").exists()


@pytest.mark.parametrize("kind", ["sft", "dpo", "rl"])
def test_what_reads_a_run_takes_its_last_weights_whatever_their_loss(kind, little, tmp_path, monkeypatch):
    "A policy that learns from a judge gets worse at predicting the texts of others."
    losses = count(1.)
    def worse(*args, **more): return replace(evaluate(*args, **more), loss=next(losses))
    monkeypatch.setattr("lmcourse.training.trainer.evaluate", worse)
    write_pairs(tmp_path/"pairs.jsonl")
    trainer = new_alignment(tmp_path/"run", kind, settings_of(kind, tmp_path), replace(little, eval_every=1))
    align_to_the_end(trainer, tmp_path/"run", tests=2)
    assert trainer.best_step == 1 < trainer.step
    for how in ({}, dict(checkpoint="best"), dict(checkpoint="latest")):
        assert all(torch.equal(a, b) for a, b in zip(load_model(tmp_path/"run", **how)[0].parameters(), trainer.model.parameters()))


def test_lines_replace_those_of_the_same_step_and_later_ones(tmp_path):
    note_steps(tmp_path/"a", [dict(step=k) for k in range(6)])
    note_steps(tmp_path/"a", [dict(step=2, new=1), dict(step=3, new=1)])
    assert [json.loads(line) for line in (tmp_path/"a").read_text().splitlines()] == [dict(step=0), dict(step=1), dict(step=2, new=1), dict(step=3, new=1)]


# Own data

def write_own(path, n=40): # Capitals, for a model that knows none
    rows = [dict(prompt=f"The {i}th city?", response=f" City {i}.", number=i) for i in range(n)]
    path.write_text("".join(json.dumps(row) + "\n\n" for row in rows), encoding="utf-8-sig")
    return rows


def test_own_conversations_are_taught_as_generate_asks_and_measured_on_others(little, tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "measure_policy", None)                       # No judge knows them
    rows, run = write_own(tmp_path/"own.jsonl"), tmp_path/"run"
    trainer = new_alignment(run, "sft", dict(pairs=str(tmp_path/"own.jsonl")), replace(little, eval_every=2))
    learnt, held = (read_conversations(run/"data"/f"{name}.jsonl") for name in ("pairs", "held_out"))
    assert len(held) == 4 and len(learnt) == 36 and learnt != sorted(learnt, key=str)
    assert sorted(r["prompt"] for r in learnt + held) == sorted(r["prompt"] for r in rows)
    tokenizer = Tokenizer.from_folder(run/"data"/"tokenizer")
    ids, targets = trainer.batches[0]
    for row, target, pair in zip(ids.tolist(), targets.tolist(), learnt):
        asked, answer = prompt_ids(tokenizer, pair["prompt"]), [*tokenizer.encode(pair["response"]), tokenizer.end_of_text]
        n = len(asked) + len(answer) - 1
        assert row[:n] == [*asked, *answer][:-1] and target[:n] == [-100]*(len(asked) - 1) + answer and {*target[n:]} <= {-100}
    assert read_chat_template(run).encode([("user", pair["prompt"])], tokenizer) == asked # And as chat asks
    found = align_to_the_end(trainer, run, (lines := []).append)
    assert lines == [f"step 2 of 3: held-out loss {json.loads((run/'success.jsonl').read_text().splitlines()[0])['loss']:.3f}", f"step 3 of 3: held-out loss {found['loss']:.3f}"]
    inputs, targets = SftBatches([tuple(pair.values()) for pair in held], tokenizer, 4)[0]
    with torch.no_grad(): expected = torch.nn.functional.cross_entropy(trainer.model(inputs).flatten(0, 1), targets.flatten()).item()
    assert found.keys() == {"loss"} and found["loss"] == pytest.approx(expected, rel=1e-5)
    assert TokenDataset.open(run/"data"/"valid").num_documents == 4


def test_own_conversations_go_on_with_the_same_bits(little, tmp_path):
    write_own(tmp_path/"own.jsonl")
    whole, cut = (new_alignment(tmp_path/name, "sft", dict(pairs=str(tmp_path/"own.jsonl")), little) for name in ("whole", "cut"))
    for _ in range(3): whole.train_step()
    cut.train_step()
    cut.save(tmp_path/"cut")
    (tmp_path/"own.jsonl").unlink()
    again = open_alignment(tmp_path/"cut")
    for _ in range(2): again.train_step()
    assert again.step == 3 and all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), again.model.parameters()))


def test_own_pairs_are_measured_on_pairs_that_are_held_out(little, tmp_path):
    write_pairs(tmp_path/"pairs.jsonl")
    trainer = new_alignment(tmp_path/"run", "dpo", settings_of("dpo", tmp_path) | dict(sft_weight=0.), little)
    learnt, held = (read_pairs(tmp_path/"run"/"data"/f"{name}.jsonl") for name in ("pairs", "held_out"))
    assert len(held) == 2 and not any(pair in learnt for pair in held)
    assert runs.held_out_loss(trainer) == pytest.approx(math.log(2), abs=1e-4)  # The policy is the reference
    found = align_to_the_end(trainer, tmp_path/"run")
    assert found.keys() == {"loss", "chosen", "rejected", "ordered"}
    alone = PreferenceBatches(held, load_model()[1], 1, load_model(little.init_from)[0]).measure(trainer.model)
    assert {k: found[k] for k in alone} == pytest.approx(alone)


def grouped(records):
    groups = {}
    for r in records: groups.setdefault(r["prompt"], []).append(r)
    return groups


def test_records_of_one_prompt_are_on_the_same_side_and_a_seed_only_orders():
    records = [dict(prompt=str(i//2), response=str(i)) for i in range(60)]
    parts = [hold_out(grouped(records), "own.jsonl", seed) for seed in (0, 1)]
    for learnt, held in parts: assert len(held) == 6 and len(learnt) == 54 and not {r["prompt"] for r in learnt} & {r["prompt"] for r in held}
    assert parts[0][1] == parts[1][1] and parts[0][0] != parts[1][0] and sorted(map(str, parts[0][0])) == sorted(map(str, parts[1][0]))
    assert len(hold_out(grouped([dict(prompt=str(i)) for i in range(3000)]), "own.jsonl")[1]) == 100
    few = [dict(prompt=str(i//3), response=str(i)) for i in range(12)]
    assert len({r["prompt"] for r in hold_out(grouped(few), "own.jsonl")[1]}) == 1 and len(hold_out(grouped(few), "own.jsonl")[1]) == 3


@pytest.mark.parametrize("prompts, n, held", [(1, 40, 4), (2, 400, 40)])
def test_many_records_of_few_prompts_are_divided_themselves(prompts, n, held):
    records = [dict(prompt=str(i % prompts), response=str(i//(2*prompts))) for i in range(n)] # Each twice
    learnt, measured = hold_out(grouped(records), "own.jsonl")
    assert len(measured) == held and len(learnt) == n - held and not any(r in learnt for r in measured)


def asked(path): return {re.search(r"Where is \d+", r["prompt"])[0] for r in map(json.loads, path.read_text().splitlines())}


def chat(*texts): return [dict(role=role, content=text) for role, text in zip(("system", "user", "assistant", "user", "assistant"), texts)]


@pytest.mark.parametrize("kind, row, each", [
    ("sft", lambda i: dict(prompt=f"Where is {i//3}?", response=f" {i}."), 1), ("sft", lambda i: dict(messages=chat(f"{i}.", f"Where is {i//3}?", "Here.", f"And {i}?", "There.")), 2), ("sft", lambda i: dict(prompt=chat("", f"Where is {i//3}?"), completion=chat("", "", f"{i}")[2:]), 1),
    ("dpo", lambda i: dict(prompt=f"Where is {i//3}?", chosen=f" {i}.", rejected=""), 1), ("dpo", lambda i: dict(prompt=chat("", f"Where is {i//3}?"), chosen=chat("", "", f"{i}")[2:], rejected=chat("", "", "No")[2:]), 1),
    ("dpo", lambda i: dict(prompt=f"{i}", chosen=chat("", f"Where is {i//3}?", "Here.", f"And {i}?", "There."), rejected=chat("", f"Where is {i//3}?", "Here.", f"And {i}?", "No.")), 1)])
def test_what_is_measured_is_asked_nowhere_else(kind, row, each, little, tmp_path):
    (tmp_path/"own.jsonl").write_text("".join(json.dumps(row(i)) + "\n" for i in range(30)))
    new_alignment(tmp_path/"run", kind, dict(pairs=str(tmp_path/"own.jsonl")), little)
    learnt, held = (tmp_path/"run"/"data"/f"{name}.jsonl" for name in ("pairs", "held_out"))
    assert len(asked(learnt)) == 9 and len(asked(held)) == 1 and not asked(learnt) & asked(held)
    assert len(held.read_text().splitlines()) == 3*each and len(learnt.read_text().splitlines()) == 27*each


def test_a_run_on_chats_is_tried_by_chat_and_on_prompts_by_generate(little, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_own(Path("own file.jsonl"))
    chats = [dict(messages=[dict(role="user", content=f"Hi {i}"), dict(role="assistant", content="Ho")]) for i in range(8)]
    Path("chats.jsonl").write_text("".join(json.dumps(c) + "\n" for c in chats))
    short = ["--batch-size", "4", "--steps", "2", "--init-from", little.init_from]
    cli.main(["sft", "own run", "--pairs", "own file.jsonl", *short])
    said = capsys.readouterr().out
    assert said.startswith("own file.jsonl: 36 to learn, 4 held out; 2 steps of 4 read each 0.2 times\nstep 2 of 2: held-out loss ") and "; try it: lmcourse generate 'own run' --prompt 'The " in said
    cli.main(["sft", "chats", "--pairs", "chats.jsonl", *short])
    assert "; try it: lmcourse chat chats\n" in capsys.readouterr().out and read_chat_template("chats") is PLAIN_CHAT
    cli.main(["sft", "--resume", "chats"])
    said = capsys.readouterr().out
    assert "chats is finished: held-out loss " in said and "lmcourse sft NEW --init-from chats --pairs FILE\n" in said
    Path("chats/success.jsonl").write_text('{"step": 2, "loss"')
    with pytest.raises(SystemExit): cli.main(["sft", "--resume", "chats"])
    assert capsys.readouterr().err.startswith("lmcourse: chats/success.jsonl: line 1 is not JSON (")


def test_a_run_on_a_task_is_asked_as_it_was_taught(little, tmp_path):
    for kind in ("sft", "rl"):
        new_alignment(tmp_path/kind, kind, settings_of(kind, tmp_path), little)
        assert read_chat_template(tmp_path/kind).encode([("user", "Ella the mule:")], tokenizer := load_model()[1]) == prompt_ids(tokenizer, "Ella the mule:")


OWN_MISTAKES = {"no.jsonl": [], "one.jsonl": [dict(prompt="a", response="b")], "missing.jsonl": [dict(prompt="a", response="b"), dict(prompt="a", answer="b")], "empty.jsonl": [dict(prompt="a", response=" ")],
                "number.jsonl": [dict(prompt="2+2", response=4)], "long.jsonl": [dict(prompt="a", response="b"), dict(prompt="Ella", response=" Ella"*200)], "few.jsonl": [dict(prompt=p, response="b") for p in "abc"], "two.jsonl": [dict(prompt=p, response="b") for p in "ab"]}


@pytest.mark.parametrize("words, message", [
    ("sft a --pairs nowhere.jsonl", "nowhere.jsonl: no such file"), ("sft a --pairs no.jsonl", "no.jsonl: 0 different records, expected at least two"), ("sft a --pairs one.jsonl", "one.jsonl: 1 different record, expected"),
    ("sft a --pairs missing.jsonl", "missing.jsonl: line 2 has no text 'response', expected prompt and response, or messages: {'prompt': 'a', 'answer': 'b'}"), ("sft a --pairs empty.jsonl", "empty.jsonl: line 1 has an empty response"),
    ("sft a --pairs number.jsonl", "number.jsonl: line 1 has no text 'response'"), ("sft a --pairs long.jsonl", "long.jsonl: line 2 has 203 tokens to read, the model takes 96: shorten it or leave it out"),
    ("sft a --pairs few.jsonl", "few.jsonl: 2 records to learn, expected a batch of 32; a smaller batch_size would do"), ("sft a --pairs two.jsonl", "two.jsonl: 1 record to learn, expected a batch of 32"), ("sft a --pairs comma.jsonl", "comma.jsonl: line 1 is not JSON"), ("sft a --pairs latin.jsonl", "latin.jsonl: line 1 is not JSON in UTF-8"),
    ("sft a --pairs few.jsonl --slip 0.1", "sft takes no --slip beside --pairs"), ("sft a --pairs few.jsonl --task problems", "sft takes no --task beside --pairs"), ("dpo a --pairs few.jsonl --group-size 4", "dpo takes no --group-size beside --pairs"),
    ("dpo a --pairs few.jsonl", "few.jsonl: line 1 has no text 'chosen', expected prompt, chosen and rejected: {'prompt': 'a'")])
def test_a_mistake_in_own_data_is_one_line_before_any_work(words, message, little, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, rows in OWN_MISTAKES.items(): Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("comma.jsonl").write_text('{"prompt": "a", "response": "b"},\n')
    Path("latin.jsonl").write_bytes('{"prompt": "\xe9", "response": "b"}'.encode("latin-1"))
    before = sorted(p.name for p in Path().iterdir())
    with pytest.raises(SystemExit) as e: cli.main([*words.split(), "--init-from", little.init_from])
    error = capsys.readouterr().err
    assert e.value.code == 2 and error.startswith(f"lmcourse: {message}") and error.count("\n") == 1 and sorted(p.name for p in Path().iterdir()) == before


def test_new_alignment_refuses_before_any_sampling(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "load_model", None)                               # Nothing is loaded
    for kind, settings, words in (("sft", {}, "sft needs the settings demonstrations, slip"),
                                  ("sft", dict(slip=.2), "sft needs the settings demonstrations$"), ("dpo", {}, "exists, expected a new folder")):
        with pytest.raises(FileExistsError if "exists" in words else ValueError, match=words): new_alignment(tmp_path, kind, settings, TrainConfig())


@pytest.mark.parametrize("words, message", [
    ("rl a", "rl needs --init-from RUN: the course's model never succeeds"),
    ("dpo a", "dpo needs init_from or pairs: the course's model makes no pair"),
    ("rl", "rl needs either OUT or --resume RUN"), ("sft a --resume b", "sft needs either"), ("sft --resume nowhere", "nowhere: no such file or folder"), ("rl a --group-size 1", "group_size = 1"),
    ("rl a --kl -1", "kl = -1"), ("rl a --algorithm ppo", "ppo"), ("rl a --init-from nowhere", "nowhere: no such file or folder"), ("sft a --slip 1", "slip = 1"),
    ("dpo a --resume b", "dpo needs either"), ("dpo a --beta 0", "beta = 0"), ("dpo a --sft-weight -1", "sft_weight = -1"), ("dpo a --pairs nowhere", "nowhere: no such file"), ("dpo a --group-size 1", "group_size = 1"),
    ("dpo a --pairs equal.jsonl", "equal.jsonl: line 2: chosen and rejected are equal, ' b'"), ("dpo a --pairs part.jsonl", "part.jsonl: line 1 has no text 'rejected'"), ("dpo a --pairs empty.jsonl", "empty.jsonl: 0 different records"),
    ("dpo a --pairs text.jsonl", "text.jsonl: line 1 is not JSON"), ("dpo a --pairs latin.jsonl", "latin.jsonl: line 2 is not JSON"), ("dpo a --pairs few.jsonl", "few.jsonl: 1 different record, expected at least two"), ("dpo a --pairs long.jsonl", "long.jsonl: line 1 has 1,001 tokens to read, the model takes 256"), ("dpo a --pairs few.jsonl --reference other", "reference = other: its tokenizer is"),
    ("dpo a --pairs few.jsonl --reference nowhere", "nowhere"), ("dpo a --pairs few.jsonl --shard", "model in parts"), ("rl a --init-from other", "the model takes 32"),
    ("sft a --init-from other", "the model takes 32"),
    ("sft a --task poems", "poems"), ("rl a --task problems --reward mentions", "reward = 'mentions' with task = 'problems'"),
    ("sft a --demonstrations 3", "demonstrations = 3"), ("sft taken", "taken exists"), ("rl a --staleness -1", "staleness = -1"),
    ("sft a --batch-size 8 --micro-batch 3", "8 is not a multiple of 3"), ("dpo a --batch-size 8 --micro-batch 3", "8 is not a multiple of 3"), ("rl a --prompts 3 --group-size 2 --micro-batch 4", "6 is not a multiple of 4"),
    ("rl a --algorithm expert --kl .1", "kl = 0.1 with algorithm = 'expert'"),
    ("dpo a --task easy-problems --prompts 6000", "n = 6,000 questions, but there are only 5,888")])
def test_a_mistake_is_one_line_before_any_work(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("taken").mkdir()
    pair = dict(prompt="a", chosen=" b", rejected=" c")
    for name, pairs in dict(equal=[pair, pair | dict(rejected=" b")], part=[dict(prompt="a", chosen=" b")], empty=[], few=[pair], long=[pair | dict(chosen=" Ella"*999)]).items():
        Path(f"{name}.jsonl").write_text("".join(json.dumps(p) + "\n" for p in pairs))
    Path("text.jsonl").write_text("a\n")
    Path("latin.jsonl").write_bytes(Path("few.jsonl").read_bytes() + '{"prompt": "\xe9"}'.encode("latin-1"))
    if "other" in words:                                                    # A small model with another tokenizer
        tokenizer = Tokenizer.train(["Ella the mule, an orange cap: "*20], 270)
        save_model("other", TransformerLM(ModelConfig(vocab_size=tokenizer.vocab_size, context_length=32, d_model=16, d_ff=32, num_layers=1, num_heads=2)), tokenizer, TrainConfig(), {})
    before = sorted(p.name for p in Path().iterdir())
    course = ["--init-from", str(files("lmcourse")/"data/quickstart")]*(words.startswith("rl a --") and "--init-from" not in words)
    with pytest.raises(SystemExit) as e: cli.main(words.split() + course)
    error = capsys.readouterr().err
    assert e.value.code == 2 and message in error and len(error.splitlines()) == 1 and sorted(p.name for p in Path().iterdir()) == before
