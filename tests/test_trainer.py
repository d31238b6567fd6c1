"The loop and its engines: parts, processes, engines and interruptions change nothing but rounding."
import importlib.machinery
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import types
import warnings
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from processes import here, lmcourse

torch = pytest.importorskip("torch")

from lmcourse.ablations.case import open_case
from lmcourse.architecture.transformer_torch import TransformerLM
from lmcourse.tokenization.tokenizer import Tokenizer
from lmcourse.tools.checks import check_close
from lmcourse.tools.config import ModelConfig, TrainConfig
from lmcourse.tools.stories import Stories
from lmcourse.training.data import TokenDataset, write_tokens
from lmcourse.training.engines import NumpyEngine, Objective, TorchEngine, World, noise_scale, plan_batch
from lmcourse.training.checkpoint import Checkpoints, read_state
from lmcourse.training import engines, evaluation, trainer as trainer_module
from lmcourse.training.evaluation import evaluate, summarize
from lmcourse.training.models import load_model, save_model, training_of
from lmcourse.training.plots import live_plot, plot_runs
from lmcourse.training.runs import read_metrics, read_run, write_run
from lmcourse.training.signals import Interrupted
from lmcourse.training.trainer import Diverged, Trainer, measure_step

MODEL = ModelConfig(vocab_size=400, context_length=32, d_model=32, num_layers=2, num_heads=2)
SHORT = TrainConfig(steps=12, batch_size=6, lr=5e-3, warmup_steps=3, eval_every=4, eval_documents=4, checkpoint_every=5, log_every=1, device="cpu")

headers = Path(sysconfig.get_path("include"))/"Python.h"
compiler = headers.exists() and any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++")))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    texts = list(islice(Stories(seed=3), 40))
    tokenizer = Tokenizer.train(texts, 400)
    tokenizer.save(folder/"tokenizer")
    short = [t.split(".")[0] for t in islice(Stories(seed=4), 200)]      # of which no document fills a window
    for name, part in (("train", texts[:20] + short), ("valid", texts[30:])): write_tokens(folder/name, part, tokenizer, "stories")
    return folder


def sets(data): return [TokenDataset.open(data/name) for name in ("train", "valid")]


def run(data, folder, model=MODEL, config=SHORT, **changes):
    "A whole run: the trainer, and its lines without the times"
    config = replace(config, **changes)
    folder.mkdir(parents=True)
    write_run(folder, model, config, data)
    trainer = Trainer(model, config, *sets(data))
    trainer.fit(folder, sample=sum_of_weights)
    return trainer, lines(folder)


def sum_of_weights(model): return f"{math.fsum(p.sum().item() for p in model.parameters())}\r\n" # A text may have such ends of lines


def cut_off(data, folder, model, config):
    "A run that ends in its eighth step, with a checkpoint of the fifth."
    folder.mkdir()
    write_run(folder, model, config, data)
    victim = Trainer(model, config, *sets(data))
    real = victim.train_step
    def dies(batch):
        if victim.step == 7: raise MemoryError
        return real(batch)
    victim.train_step = dies
    with pytest.raises(MemoryError): victim.fit(folder, sample=sum_of_weights)
    return folder


def lines(folder): return [{k: v for k, v in m.items() if k != "elapsed_s"} for m in read_metrics(folder)]
def weights(trainer): return {n: p.detach() for n, p in trainer.model.named_parameters()}


# One step

@pytest.mark.parametrize("engine", [TorchEngine, NumpyEngine])
@pytest.mark.parametrize("tied", [False, True])
def test_a_batch_may_be_cut_in_any_way(engine, tied):
    c = replace(MODEL, tie_embeddings=tied)
    ids = torch.randint(400, (8, 33), generator=torch.Generator().manual_seed(0))
    def moved(times):
        e = engine(c, replace(SHORT, grad_clip=.1))
        loss = sum(e.forward_backward((part[:, :-1], part[:, 1:]), 1/times) for part in ids.chunk(times))
        norm = e.optimizer_step(1e-2)
        return float(loss), norm, {n: p.detach().clone() for n, p in e.model.named_parameters()}
    whole = moved(1)
    for times in (2, 4, 8): check_close(moved(times), whole, rtol=2e-3, atol=2e-5)


def test_the_loss_begins_at_ln_v_and_a_batch_can_be_learnt_by_heart(data):
    trainer = Trainer(MODEL, replace(SHORT, steps=200, lr=1e-2, min_lr=1e-2, weight_decay=0., batch_size=2), *sets(data))
    one = trainer.batches[0]
    trainer.batches = [one]*200
    losses = [trainer.train_step() for _ in range(150)]
    assert losses[0] == pytest.approx(math.log(400), rel=.05) and losses[-1] < .1


@pytest.mark.parametrize("change", [{}, dict(tie_embeddings=True, scale_embeddings=True), dict(norm="layernorm", position="learned", ffn="gelu", bias=True),
                                    dict(num_kv_heads=1, qk_norm=True, window=7, z_loss=1e-3)])
def test_both_engines_follow_the_same_curve(data, change):
    c = replace(MODEL, **change)
    a, b = (Trainer(c, replace(SHORT, engine=name), *sets(data)) for name in ("torch", "numpy"))
    a.model.load_state_dict({n: torch.from_numpy(w.copy()) for n, w in b.engine.params.items()}, strict=False)
    for _ in range(SHORT.steps):
        check_close(a.train_step(), b.train_step(), rtol=1e-3)
        check_close(float(a.norm), float(b.norm), rtol=2e-2)


# What a trainer is given

def first_half(model, inputs, targets):
    "The loss on the first half of each window"
    keep = inputs.shape[1]//2
    return torch.nn.functional.cross_entropy(model(inputs)[:, :keep].flatten(0, 1), targets[:, :keep].flatten())


def test_a_loss_that_is_given_is_minimised_and_cut_like_any_other(data):
    made = lambda **more: Trainer(MODEL, replace(SHORT, **more), *sets(data), objective=Objective(first_half))
    whole, parts = made(), made(micro_batch=2)
    inputs, targets = (torch.from_numpy(a) for a in whole.batches[0])
    assert whole.train_step() == pytest.approx(first_half(TransformerLM(MODEL, seed=SHORT.seed), inputs, targets).item(), rel=1e-6)
    parts.train_step()
    check_close(parts.norm, whole.norm, rtol=1e-4)
    check_close(weights(parts), weights(whole), rtol=2e-3, atol=2e-5)
    with torch.no_grad(): whole.model.layers[0].ffn.w3.weight[0, 0] = 3e38
    with pytest.raises(Diverged, match="the output of layers.0.ffn.w3 is not finite"): whole.train_step()


def test_a_batch_of_three_tensors_and_a_weight_of_its_own(data):
    "Answers only: a mask goes with each batch, and each part counts by how much of it is left"
    def masked(model, inputs, targets, mask):
        nats = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="none")
        return (nats*mask.flatten()).sum()/mask.sum()
    inputs, targets = sets(data)[0].tokens[:96].reshape(3, 32).astype(np.int64), sets(data)[0].tokens[1:97].reshape(3, 32).astype(np.int64)
    mask = np.zeros((3, 32), np.float32)
    mask[0, :3] = mask[1, :17] = mask[2, :1] = 1
    batches = [(inputs, targets, mask)]*4
    made = lambda m: Trainer(MODEL, replace(SHORT, batch_size=3, micro_batch=m), None, sets(data)[1], batches, Objective(masked, lambda m: m.sum().item()))
    whole, parts = made(3), made(1)
    for _ in range(3): check_close(parts.train_step(), whole.train_step(), rtol=1e-5)
    equal = Trainer(MODEL, replace(SHORT, batch_size=3, micro_batch=1), None, sets(data)[1], batches, Objective(masked))
    assert abs(equal.train_step() - whole.recent[0]) > 1e-3          # a mean of the parts' means is another number


@pytest.mark.parametrize("prefetch", [0, 2])
def test_batches_from_an_iterator_train_as_those_by_step(data, tmp_path, prefetch):
    trainer, found = run(data, tmp_path/"a", prefetch=prefetch)
    (tmp_path/"b").mkdir()
    write_run(tmp_path/"b", MODEL, SHORT, data)
    given = (tuple(map(torch.from_numpy, trainer.batches[step])) for step in range(SHORT.steps))
    other = Trainer(MODEL, replace(SHORT, prefetch=prefetch), None, sets(data)[1], batches=given)
    other.fit(tmp_path/"b")
    check_close(weights(other), weights(trainer), 0, 0)


@pytest.mark.parametrize("engine", ["torch", "numpy"])
def test_a_run_begins_with_the_weights_that_it_is_told(data, tmp_path, engine):
    trainer, _ = run(data, tmp_path/"a", engine=engine)
    there = load_model(tmp_path/"a")[0]
    begun = Trainer(MODEL, replace(SHORT, engine=engine, init_from=str(tmp_path/"a")), *sets(data))
    assert begun.step == 0 and all(torch.equal(a, b) for a, b in zip(begun.model.parameters(), there.parameters()))
    assert begun.train_step() == pytest.approx(there.loss(*map(torch.from_numpy, begun.batches[0])).item(), rel=1e-4)
    stretched = replace(MODEL, context_length=48, rope_scaling=dict(rope_type="linear", factor=2))
    longer = Trainer(stretched, replace(SHORT, engine=engine, init_from=str(tmp_path/"a")), *sets(data))
    assert torch.equal(longer.model.lm_head.weight, there.lm_head.weight)        # RoPE has no weights that depend on it


def test_other_weights_are_refused(data, tmp_path):
    run(data, tmp_path/"a")
    other = replace(SHORT, init_from=str(tmp_path/"a"))
    with pytest.raises(ValueError, match="init_from = .*: num_layers is 2 there, 1 here" if MODEL.num_layers == 2 else "num_layers"):
        Trainer(replace(MODEL, num_layers=1), other, *sets(data))
    train, valid = sets(data)
    for s in (train, valid): s.info["tokenizer"] = "f"*64
    with pytest.raises(ValueError, match="but the tokens were made by ffffffffffff"): Trainer(MODEL, other, train, valid)
    with pytest.raises(FileNotFoundError, match="no such file or folder"): Trainer(MODEL, replace(SHORT, init_from=str(tmp_path/"b")), *sets(data))
    run(data, tmp_path/"stretched", model=replace(MODEL, rope_scaling=dict(rope_type="linear", factor=2)))
    with pytest.raises(ValueError, match="rope_scaling is {.*} there, None here"): Trainer(MODEL, replace(SHORT, init_from=str(tmp_path/"stretched")), *sets(data))


def test_measured_steps_leave_no_trace(data, tmp_path):
    "Also in the middle of a run, and with both engines: what follows is the same, bit for bit"
    for engine in ("torch", "numpy"):
        for before in (0, 3):
            a, b = (Trainer(MODEL, replace(SHORT, engine=engine), *sets(data)) for _ in range(2))
            for t in (a, b): [t.train_step() for _ in range(before)]
            measure_step(a, 3)
            assert (a.step, a.recent) == (b.step, b.recent)
            assert [a.train_step() for _ in range(3)] == [b.train_step() for _ in range(3)]
            check_close(weights(a), weights(b), 0, 0)


def test_a_measurement_takes_no_batches_away_from_an_iterator(data):
    "They would be missing from the run"
    source = Trainer(MODEL, SHORT, *sets(data)).batches
    waiting = iter([source[i] for i in range(30)])
    t = Trainer(MODEL, SHORT, None, sets(data)[1], waiting)
    with pytest.raises(TypeError, match="batches from an iterator, expected batches by step"): measure_step(t)
    assert len(list(waiting)) == 30


def test_an_error_leaves_a_trainer_and_a_mode_as_they_were(data, monkeypatch):
    t = Trainer(MODEL, SHORT, *sets(data))
    for _ in range(3): t.train_step()
    t.batches = [t.batches[0]]
    with pytest.raises(IndexError): measure_step(t, 3)
    assert (t.step, len(t.recent)) == (3, 3)
    monkeypatch.setattr(evaluation, "_row_losses", lambda *a: 1/0)
    with pytest.raises(ZeroDivisionError): evaluate(t.model, t.valid, 32)
    assert t.model.training


def test_measured_steps_leave_the_scale_of_float16(data):
    t = Trainer(MODEL, replace(SHORT, dtype="float16"), *sets(data))
    t.train_step()
    t.engine.scaler.update(2.**100)                                     # So large that every step overflows and halves it
    measure_step(t, 3)
    assert t.engine.scaler.get_scale() == 2.**100


def test_windows_that_count_differently_are_weighed(data):
    "Parts of `within` batches have different numbers of targets"
    a, b = (Trainer(MODEL, replace(SHORT, windows="within", micro_batch=m, steps=4), *sets(data)) for m in (None, 1))
    counts = (a.batches[0][1] != -100).sum(1)
    assert counts.min() < counts.max() == 32
    for _ in range(4): check_close(a.train_step(), b.train_step(), rtol=1e-4)
    check_close(weights(a), weights(b), rtol=1e-2, atol=1e-4)


def own_mean(model, inputs, targets):
    "0/0 where no target counts"
    keep = targets != -100
    nats = torch.nn.functional.cross_entropy(model(inputs).mT, targets.clamp(min=0), reduction="none")
    return (nats*keep).sum()/keep.sum()


@pytest.mark.parametrize("engine, loss", [("torch", engines.next_token_loss), ("torch", own_mean), ("numpy", engines.next_token_loss)])
def test_a_part_in_which_nothing_counts_adds_nothing(data, engine, loss):
    "And is not blamed for a fault; a batch in which nothing counts is rejected"
    inputs, targets = (torch.from_numpy(a).clone() for a in Trainer(MODEL, SHORT, *sets(data)).batches[0])
    targets[:2] = -100
    made = lambda m: Trainer(MODEL, replace(SHORT, engine=engine, micro_batch=m), None, sets(data)[1], [(inputs, targets)]*9, Objective(loss, engines.counted_targets))
    whole, parts = made(6), made(2)
    for _ in range(2): check_close(parts.train_step(), whole.train_step(), rtol=1e-5)
    check_close(parts.norm, whole.norm, rtol=1e-4)
    assert trainer_module._diverged(parts, math.nan, list(zip(inputs.split(2), targets.split(2)))).endswith("computed again, all is finite")
    with pytest.raises(ValueError, match="step 3: nothing in this batch counts: its weight is 0"): parts.train_step((inputs, targets.fill_(-100)))


def test_a_gradient_that_is_not_finite_is_found_beside_weights_that_the_loss_does_not_use(data):
    "The head has no gradient"
    def square_root(model, inputs, targets): return model.token_embeddings(inputs).mul(0).abs().pow(.5).sum()
    trainer = Trainer(MODEL, SHORT, *sets(data), objective=Objective(square_root))
    with pytest.raises(Diverged, match="the gradient of token_embeddings.weight is not finite"): trainer.train_step()


def test_a_step_that_float16_skips_leaves_no_trace():
    "Neither in the visits of a router, nor in the number of good steps after which the scale grows"
    ids = torch.randint(400, (2, 16), generator=torch.Generator().manual_seed(0))
    e = TorchEngine(replace(MODEL, num_experts=4, num_experts_per_tok=2, router_bias_rate=.01), replace(SHORT, dtype="float16"))
    e.forward_backward((ids, ids))
    e.optimizer_step(1e-4)
    e.forward_backward((ids, ids))
    next(e.model.parameters()).grad.fill_(math.inf)
    before = e.scaler.state_dict()
    assert before["_growth_tracker"] == 1 and e.optimizer_step(1e-4) == 0
    assert e.scaler.state_dict() == before | dict(scale=before["scale"]/2, _growth_tracker=0)
    assert e.balanced and all(layer.load is None for layer in e.balanced)


def test_float16_goes_on_after_a_gradient_that_no_scale_makes_finite():
    ids = torch.randint(400, (2, 16), generator=torch.Generator().manual_seed(0))
    e = TorchEngine(MODEL, replace(SHORT, dtype="float16"))
    e.forward_backward((ids, ids))
    e.scaler.update(1.)
    next(e.model.parameters()).grad.fill_(math.inf)
    assert e.optimizer_step(1e-4) == math.inf and e.scaler.get_scale() == 1
    e.forget_gradients()
    e.forward_backward((ids, ids))
    assert 0 < e.optimizer_step(1e-4) < math.inf


@pytest.mark.parametrize("config, processes, words", [
    (TrainConfig(tokens_per_step=1000), 1, "tokens_per_step by context_length: 1000 is not a multiple of 32; 992 or 1024 would do"),
    (TrainConfig(tokens_per_step=10), 1, "10 is not a multiple of 32; 32 would do"),
    (TrainConfig(batch_size=4), 3, "windows of a step by processes: 4 is not a multiple of 3; 3 or 6 would do"),
    (TrainConfig(batch_size=2), 3, "2 is not a multiple of 3; 3 would do"),
    (TrainConfig(batch_size=8, micro_batch=3), 2, "windows of a process by micro_batch: 4 is not a multiple of 3; 3 or 6 would do")])
def test_numbers_that_do_not_divide(config, processes, words):
    with pytest.raises(ValueError, match=words): plan_batch(config, 32, processes)


def test_a_plan_in_words():
    assert str(plan_batch(TrainConfig(tokens_per_step=1024, micro_batch=4), 32, 4)) == "1,024 tokens a step = 4 processes x 2 times x 4 windows of 32"
    assert plan_batch(TrainConfig(batch_size=6), 32).tokens == 192
    assert [World(r, 2).shard_batch(torch.arange(6)).tolist() for r in range(2)] == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(ValueError, match="a batch of 7 rows for 2 processes, expected a multiple"): World(0, 2).shard_batch(torch.arange(7))


def test_the_noise_scale_is_exact_where_both_lengths_are():
    for clear, noise, b, B in ((1., 10., 1, 64), (5., .5, 2, 8)):
        assert noise_scale(clear + noise/b, clear + noise/B, b, B) == pytest.approx(noise/clear)
    assert math.isnan(noise_scale(10., .1, 1, 2))


# Runs

@pytest.mark.parametrize("changes", [dict(engine="numpy"), dict(plateau_patience=1, early_stop_min_delta=10., schedule="constant"),
                                     dict(windows="within", micro_batch=2, log_every=3), dict(windows="sequential", stride=5), dict(recompute=True, cooldown_steps=4)])
def test_a_run_that_is_cut_goes_on_bit_for_bit(data, tmp_path, changes):
    whole, expected = run(data, tmp_path/"whole", **changes)
    config = replace(SHORT, **changes)
    cut = cut_off(data, tmp_path/"cut", MODEL, config)
    again = Trainer(MODEL, config, *sets(data))
    again.resume(cut)
    assert again.step == 5
    again.fit(cut, sample=sum_of_weights)
    assert lines(cut) == expected and (cut/"samples.txt").read_bytes() == (tmp_path/"whole/samples.txt").read_bytes()
    check_close(weights(again), weights(whole), 0, 0)


@pytest.mark.parametrize("engine", ["torch", "numpy"])
def test_a_trainer_whose_step_failed_goes_on_after_a_resume(data, tmp_path, engine):
    "Nothing is left of the parts before the error, nor of a gradient that was not finite"
    whole, t = (Trainer(MODEL, replace(SHORT, engine=engine, micro_batch=2), *sets(data)) for _ in range(2))
    for _ in range(2): t.train_step()
    t.save(tmp_path)
    for _ in range(3): whole.train_step()
    real, calls = t.engine.forward_backward, []
    def dies(*args):
        calls.append(1)
        if len(calls) == 2: raise MemoryError
        return real(*args)
    t.engine.forward_backward = dies
    for error in (MemoryError, Diverged):
        if error is Diverged:
            with torch.no_grad(): next(t.model.parameters()).fill_(math.inf)
        with pytest.raises(error): t.train_step()
        t.resume(tmp_path)
        t.train_step()
        assert (t.norm, t.recent[-1]) == (whole.norm, whole.recent[-1])
        check_close(weights(t), weights(whole), 0, 0)


def test_without_a_checkpoint_a_trainer_that_has_moved_cannot_go_back(data, tmp_path):
    t = Trainer(MODEL, SHORT, *sets(data))
    write_run(tmp_path, MODEL, SHORT, data)
    t.resume(tmp_path)
    t.train_step()
    with pytest.raises(ValueError, match="no checkpoint to go back to, .*: make a new Trainer"): t.resume(tmp_path)


@pytest.mark.parametrize("name, value", [("lr", 1e-2), ("seed", 1), ("batch_size", 8), ("windows", "sequential"), ("steps", 20)])
def test_a_run_goes_on_with_its_own_settings(data, tmp_path, name, value):
    "With others it would be neither the run that was begun nor the one that its config.json describes"
    cut = cut_off(data, tmp_path/"cut", MODEL, SHORT)
    other = replace(SHORT, **{name: value})
    trainer = Trainer(MODEL, other, *sets(data))
    with pytest.raises(ValueError, match=f"{name} is {getattr(SHORT, name)!r} in its config.json, {value!r} here.*write_run"): trainer.resume(cut)
    assert trainer.step == 0 and max(m["step"] for m in read_metrics(cut)) == 7
    write_run(cut, MODEL, other, data)                                      # Whoever means it says so
    trainer.resume(cut)
    assert trainer.step == 5


def test_what_only_says_how_a_run_is_computed_may_change(data, tmp_path):
    cut = cut_off(data, tmp_path/"cut", MODEL, SHORT)
    for changes in (dict(micro_batch=2), dict(recompute=True, prefetch=0), dict(log_every=3, keep_checkpoints=1), dict(engine="numpy"), dict(dtype="auto")):
        again = Trainer(MODEL, replace(SHORT, **changes), *sets(data))
        again.resume(cut)
        assert again.step == 5


def test_all_that_decides_the_weights_is_compared():
    from lmcourse.training.trainer import _DECIDES
    how = """engine prefetch eval_every eval_documents checkpoint_every keep_checkpoints log_every log_to init_from device dtype compile attention kernels recompute
             shard data_parallel_replicate_degree data_parallel_shard_degree tensor_parallel_degree sequence_parallel context_parallel_degree
             pipeline_parallel_degree pipeline_parallel_schedule timeout_seconds micro_batch""".split()
    assert _DECIDES | set(how) == SHORT.to_dict().keys() and not _DECIDES & set(how)


def test_samples_that_are_no_text_are_named(data, tmp_path):
    "Before anything of the run changes"
    cut = cut_off(data, tmp_path/"cut", MODEL, SHORT)
    (cut/"samples.txt").write_bytes(b"--- step 4\n\xff\n\n")
    before = (cut/"metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match=r"samples.txt: not UTF-8 \(byte 11\)"): Trainer(MODEL, SHORT, *sets(data)).resume(cut)
    assert (cut/"metrics.jsonl").read_bytes() == before


def test_a_file_in_place_of_the_checkpoints_stops_a_run_at_its_start(data, tmp_path):
    write_run(tmp_path, MODEL, SHORT, data)
    (tmp_path/"checkpoints").write_text("a file")
    trainer = Trainer(MODEL, SHORT, *sets(data))
    for start in (trainer.fit, trainer.resume, load_model):
        with pytest.raises(NotADirectoryError, match="checkpoints: a file, expected a folder of checkpoints"): start(tmp_path)
    assert trainer.step == 0 and not (tmp_path/"metrics.jsonl").exists()


def test_a_new_trainer_does_not_write_into_the_run_of_another(data, tmp_path):
    "Its lines would mix with those that are there, and `resume` would load the other run's checkpoint."
    _, before = run(data, tmp_path/"run")
    with pytest.raises(ValueError, match=r"run: it has step 12, and this trainer is at step 0; call resume\(\) first, or take a new folder"):
        Trainer(MODEL, SHORT, *sets(data)).fit(tmp_path/"run")
    assert lines(tmp_path/"run") == before
    (tmp_path/"run/metrics.jsonl").unlink()
    with pytest.raises(ValueError, match="it has step 12"): Trainer(MODEL, SHORT, *sets(data)).fit(tmp_path/"run")


def test_a_run_needs_its_folder_before_the_first_step(data, tmp_path):
    for begin in ("fit", "resume"):
        trainer = Trainer(MODEL, SHORT, *sets(data))
        with pytest.raises(FileNotFoundError, match="nowhere: no such folder"): getattr(trainer, begin)(tmp_path/"nowhere")
        assert not trainer.step and not (tmp_path/"nowhere").exists()


@pytest.mark.parametrize("name, content, words", [
    ("config.json", '{"model": 5, "train": {}, "data": "d"}', "model is a int, expected an object"), ("config.json", '{"model": {}, "train": null, "data": "d"}', "train is a NoneType, expected an object"),
    ("config.json", '{"model": {}, "train": {}, "data": 5}', "data is a int, expected a path"), ("metrics.jsonl", b"\xff\n", "not UTF-8"), ("metrics.jsonl", '{"loss": 1}\n', "line 1 is {'loss': 1}, expected an object with a step")])
def test_files_of_a_run_that_something_else_wrote(tmp_path, name, content, words):
    (tmp_path/name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=f"{name}: {words}"): (read_run if name == "config.json" else read_metrics)(tmp_path)


def test_a_run_in_a_linked_folder_finds_its_tokens(tmp_path, monkeypatch):
    (home := tmp_path/"home").mkdir()
    (run := tmp_path/"disk"/"much"/"deeper"/"run").mkdir(parents=True)
    (home/"runs").symlink_to(run.parent)
    (tmp_path/"tokens").mkdir()
    (home/"tokens").symlink_to(tmp_path/"tokens")
    monkeypatch.chdir(home)
    for name in ("runs/run", home/"runs"/"run", run):
        write_run(Path(name), MODEL, SHORT, Path("tokens"))
        assert read_run(name)[2].samefile(home/"tokens") and read_run(run)[2].name == "tokens"
    (home/"tokens").unlink()                                # the link is kept, not where it leads
    shutil.move(tmp_path/"tokens", home/"tokens")
    assert read_run(run)[2].samefile(home/"tokens")

def test_a_run_on_another_drive_than_its_tokens_has_their_whole_path(tmp_path, monkeypatch):
    def another_drive(*paths): raise ValueError("path is on mount 'D:', start on mount 'C:'")
    with monkeypatch.context() as m:
        m.setattr(os.path, "relpath", another_drive)
        write_run(tmp_path, MODEL, SHORT, tmp_path/"tokens")
    assert read_run(tmp_path)[2] == tmp_path/"tokens"

def test_a_run_that_stops_early_writes_each_sample_once(data, tmp_path):
    changes = dict(early_stop_patience=1, early_stop_min_delta=10., schedule="constant", eval_every=2)
    t, _ = run(data, tmp_path/"a", **changes)
    assert t.step == 4 and t.stop.reason
    for _ in range(2):
        assert re.findall(r"--- step (\d+)", (tmp_path/"a/samples.txt").read_text()) == ["2", "4"]
        again = Trainer(MODEL, replace(SHORT, **changes), *sets(data))
        again.resume(tmp_path/"a")
        again.fit(tmp_path/"a", sample=sum_of_weights)


def test_recomputation_and_prefetching_change_no_bit(data, tmp_path):
    expected = run(data, tmp_path/"a")[1]
    assert run(data, tmp_path/"b", recompute=True)[1] == run(data, tmp_path/"c", prefetch=0)[1] == run(data, tmp_path/"d", prefetch=7)[1] == expected


def test_the_rates_of_a_run_are_those_of_its_schedule(data, tmp_path):
    from lmcourse.training.optim_torch import learning_rate
    found = run(data, tmp_path/"a", cooldown_steps=4)[1]
    assert [m["lr"] for m in found if "lr" in m] == [learning_rate(t, SHORT.lr, SHORT.min_lr, 3, 12, 4) for t in range(1, 13)]


def test_an_optimizer_from_outside_trains_a_run(data, tmp_path):
    from lmcourse.training.optim_torch import SGD, register_optimizer
    register_optimizer("plain", lambda model, config: SGD(model.parameters(), config.lr))
    try:
        config = TrainConfig.from_dict(replace(SHORT, optimizer="plain").to_dict())
        trainer = Trainer(MODEL, config, *sets(data))
        trainer.train_step()
        assert type(trainer.engine.optimizer) is SGD and trainer.engine.optimizer.param_groups[0]["lr"] == trainer.lr > 0
    finally: register_optimizer("plain", None)
    with pytest.raises(ValueError, match="optimizer = 'plain', expected one of adamw, muon"): replace(SHORT, optimizer="plain")


def test_a_group_of_parameters_may_have_a_rate_of_its_own(data, tmp_path):
    "The schedule multiplies it; it is kept in checkpoints, and those of before have none"
    config = replace(SHORT, optimizer="muon", lr=3e-4)
    rates = lambda trainer: [g["lr"] for g in trainer.engine.optimizer.param_groups]
    trainer = Trainer(MODEL, config, *sets(data))
    trainer.engine.optimizer.param_groups[0]["lr_scale"] = .02/3e-4
    for _ in range(3):
        trainer.train_step()
        check_close(rates(trainer), [trainer.lr*.02/3e-4, trainer.lr, trainer.lr], 1e-12)
    check_close(rates(trainer), [.02, 3e-4, 3e-4], 1e-12)                   # The end of the warm-up
    for folder in (tmp_path/"new", tmp_path/"old"):
        if folder.name == "old":
            for group in trainer.engine.optimizer.param_groups: group.pop("lr_scale", None)
        write_run((folder.mkdir(), folder)[1], MODEL, config, data)
        trainer.save(folder)
        again = Trainer(MODEL, config, *sets(data))
        again.resume(folder)
        again.train_step()
        check_close(rates(again), [again.lr*(.02/3e-4 if folder.name == "new" else 1), again.lr, again.lr], 1e-12)


def test_a_line_is_the_mean_since_the_last_one(data, tmp_path):
    each, some = ([m["loss"] for m in run(data, tmp_path/str(n), log_every=n)[1] if "loss" in m] for n in (1, 4))
    check_close(some, [sum(each[i:i + 4])/4 for i in range(0, 12, 4)], rtol=1e-6)


def test_the_plateau_does_not_disturb_the_way_down(data, tmp_path):
    scales = [run(data, tmp_path/str(n), plateau_patience=1, early_stop_min_delta=10., cooldown_steps=n)[0].plateau.scale for n in (0, 4, 5)]
    assert scales == [.5, .5, 1]


def test_a_picture_is_drawn_once_and_then_again(data, tmp_path, monkeypatch):
    display, drawn = pytest.importorskip("IPython.display"), []
    class Place:
        def update(self, figure): drawn.append(("again", len(figure.axes[0].lines)))
    def show(figure, display_id):
        drawn.append(("new", len(figure.axes[0].lines)))
        return Place()
    monkeypatch.setattr(display, "display", show)
    (folder := tmp_path/"a").mkdir()
    write_run(folder, MODEL, SHORT, data)
    from matplotlib import pyplot as plt
    before = plt.get_fignums()
    Trainer(MODEL, SHORT, *sets(data)).fit(folder, report=live_plot(folder))
    assert [kind for kind, _ in drawn] == ["new", "again"] and plt.get_fignums() == before
    names = ["_a", "$x$", "caf\udce9"] # As folders may be called; Matplotlib would leave the first one out
    train, valid, *_ = (axes := plot_runs({name: folder for name in names})).lines
    texts = axes.get_legend().get_texts()
    assert [t.get_text() for t in texts[:3]] == [f"validation, {name}" for name in ("_a", "$x$", "caf?")] and not any(t.get_parse_math() for t in texts)
    assert texts[3].get_text() == "training (pale)" and axes.xaxis.get_major_formatter()(2.5e6) == "2.5M" # The pale lines are named, and no 1e6 stands at the axis
    assert list(train.get_xdata()) == [32*6*step for step in range(1, 13)] and list(valid.get_xdata()) == [32*6*step for step in (4, 8, 12)]


def test_no_thread_is_left(data, tmp_path):
    import threading
    before = threading.active_count()
    run(data, tmp_path/"a")
    (tmp_path/"b").mkdir()
    write_run(tmp_path/"b", MODEL, SHORT, data)
    trainer = Trainer(MODEL, SHORT, *sets(data))
    with torch.no_grad(): trainer.model.layers[0].attn.v_proj.weight[0] = 3e38
    with pytest.raises(Diverged, match=r"step 1: the loss is .*; the output of layers.0.attn.* is not finite"): trainer.fit(tmp_path/"b")
    assert threading.active_count() == before


def test_what_a_killed_process_left_is_gone_after_a_resume(data, tmp_path):
    "Also where no checkpoint is written any more."
    trainer = Trainer(MODEL, SHORT, *sets(data))
    trainer.fit(tmp_path)
    (tmp_path/"checkpoints"/"step_000001.tmp").mkdir()
    again = Trainer(MODEL, SHORT, *sets(data))
    again.resume(tmp_path)
    assert again.step == trainer.step and not list(tmp_path.rglob("*.tmp"))


def test_nothing_moves_when_the_loss_is_no_number(data):
    "Not even where the gradient is one; and the part of the batch is found that brought it"
    trainer = Trainer(MODEL, replace(SHORT, micro_batch=2, kernels="torch"), *sets(data))    # The fused norm has a finite gradient there
    real, before = trainer.model.loss, {n: w.clone() for n, w in weights(trainer).items()}
    calls = []
    def loss(*batch):
        calls.append(1)
        return real(*batch) + (math.inf if len(calls) == 3 else 0.)
    trainer.engine.loss = loss
    with pytest.raises(Diverged, match="step 1: the loss is inf, .*computed again, all is finite"): trainer.train_step()
    check_close(weights(trainer), before, 0, 0)
    with torch.no_grad(): trainer.model.token_embeddings.weight[399] = 3e38
    ids = torch.zeros(6, 32, dtype=torch.int64)
    ids[5] = 399
    trainer.engine.loss = real
    with pytest.raises(Diverged, match="gradient nan long; the gradient of .* is not finite"): trainer.train_step((ids, ids))


# A GPU begins with the next step before this one's loss is known here; the same code runs on a processor if it is told to

@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def ahead(request, monkeypatch):
    "Settings of a run, and a function that says whether steps are queued from here on"
    def queue(wanted): monkeypatch.setattr(TorchEngine, "runs_ahead", wanted)
    monkeypatch.setattr("lmcourse.training.optim_torch.on_one_device", lambda params: True)
    return replace(SHORT, device=request.param), queue


@pytest.fixture
def queued(monkeypatch):
    "For each step of a run that ends, whether the next one has begun"
    seen, real = [], trainer_module._finish_step
    def finish(t, now): seen.append((t.step + 1, t.queued is not None)); real(t, now)
    monkeypatch.setattr(trainer_module, "_finish_step", finish)
    return seen


def test_a_step_that_is_queued_changes_no_bit(data, tmp_path, ahead, queued):
    config, queue = ahead
    found = []
    for wanted in (False, True):
        queue(wanted)
        found.append(run(data, tmp_path/str(wanted), config=config))
    (waits, a), (goes_on, b) = found
    assert a == b and (tmp_path/"False/samples.txt").read_text() == (tmp_path/"True/samples.txt").read_text()
    check_close(weights(goes_on), weights(waits), 0, 0)
    for x, y in zip(*(t.engine.optimizer.state.values() for t in (waits, goes_on))): assert x["step"] == y["step"] == 12
    assert [n for n, began in queued[12:] if not began] == [4, 5, 8, 10, 12] and not any(began for _, began in queued[:12])


@pytest.mark.parametrize("bad", [(3,), (3, 4), (4,)])
def test_nothing_moves_from_the_step_on_whose_loss_is_no_number(data, ahead, bad):
    "Not in the step after it either, which has begun by then; and the trainer can go on"
    config, queue = ahead
    queue(True)
    trainer = Trainer(MODEL, config, *sets(data))
    real, batches = trainer.engine.loss, [tuple(torch.as_tensor(a).to(trainer.device) for a in trainer.batches[i]) for i in range(6)]
    calls, before = [], None
    def loss(*batch):
        calls.append(1)
        return real(*batch)*(math.nan if len(calls) in bad else 1.)
    trainer.engine.loss = loss
    for step in range(bad[0] - 1):
        trainer.train_step(batches[step], *[batches[step + 1]]*(step + 2 < bad[0]))
        before = {n: w.clone() for n, w in weights(trainer).items()}
    with pytest.raises(Diverged, match=f"^step {bad[0]}: the loss is nan"): trainer.train_step(batches[bad[0] - 1], batches[bad[0]])
    check_close(weights(trainer), before, 0, 0)
    assert {s["step"] for s in trainer.engine.optimizer.state.values()} == {trainer.step} == {bad[0] - 1} and trainer.queued is None
    trainer.engine.loss = real
    assert math.isfinite(trainer.train_step(batches[0])) and trainer.step == bad[0]


def test_a_signal_lets_the_step_that_is_queued_end(data, tmp_path, ahead, queued, monkeypatch):
    config, queue = ahead
    queue(True)
    (folder := tmp_path/"a").mkdir()
    write_run(folder, MODEL, config, data)
    trainer = Trainer(MODEL, config, *sets(data))
    real = trainer_module._begin_step
    def begin(t, step, *more):
        if t is trainer and step == 6: os.kill(os.getpid(), signal.SIGINT)               # While step 6 waits for its numbers
        return real(t, step, *more)
    monkeypatch.setattr(trainer_module, "_begin_step", begin)
    with pytest.raises(Interrupted, match="after step 7 of 12$"): trainer.fit(folder)
    assert queued[-2:] == [(6, True), (7, False)] and Checkpoints(folder/"checkpoints").latest().name == "step_000007"
    again = Trainer(MODEL, config, *sets(data))
    again.resume(folder)
    again.fit(folder)
    whole, _ = run(data, tmp_path/"whole", config=config)
    check_close(weights(again), weights(whole), 0, 0)


def test_a_measurement_asks_for_no_batch_that_isnt_there(data, ahead):
    "Nor for any twice, where nothing is queued"
    config, queue = ahead
    for wanted in (False, True):
        queue(wanted)
        trainer, asked = Trainer(MODEL, config, *sets(data)), []
        real = [trainer.batches[i] for i in range(config.steps)]
        class Listed:
            def __getitem__(self, step): asked.append(step); return real[step]
        trainer.batches = Listed()
        assert measure_step(trainer) > 0 and sorted(asked) == list(range(config.steps))


def test_a_trainer_that_was_interrupted_resumes_from_its_checkpoint(data, tmp_path, ahead, monkeypatch):
    "A step that was queued then is forgotten; before that, nothing can be saved"
    config, queue = ahead
    queue(True)
    (folder := tmp_path/"a").mkdir()
    write_run(folder, MODEL, config, data)
    trainer, real = Trainer(MODEL, config, *sets(data)), trainer_module._finish_step
    def finish(t, now):
        if t.step == 6: raise KeyboardInterrupt
        real(t, now)
    monkeypatch.setattr(trainer_module, "_finish_step", finish)
    with pytest.raises(KeyboardInterrupt): trainer.fit(folder)
    assert trainer.queued is not None
    with pytest.raises(ValueError, match="save after step 6, but step 7 has begun"): trainer.save(folder)
    monkeypatch.setattr(trainer_module, "_finish_step", real)
    trainer.resume(folder)
    trainer.fit(folder)
    whole, _ = run(data, tmp_path/"whole", config=config)
    check_close(weights(trainer), weights(whole), 0, 0)
    assert {s["step"] for s in trainer.engine.optimizer.state.values()} == {12}


def test_a_measurement_with_queued_steps_leaves_no_trace(data, ahead):
    config, queue = ahead
    queue(True)
    trainer = Trainer(MODEL, config, *sets(data))
    for _ in range(2): trainer.train_step()
    before = {n: w.clone() for n, w in weights(trainer).items()}
    assert measure_step(trainer) > 0 and trainer.queued is None and trainer.step == 2
    check_close(weights(trainer), before, 0, 0)
    assert {s["step"] for s in trainer.engine.optimizer.state.values()} == {2}


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_after_a_whole_step_and_is_named(data, tmp_path, how):
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    (folder := tmp_path/"a").mkdir()
    write_run(folder, MODEL, SHORT, data)
    stop = lambda trainer, evaluation: trainer.step == 8 and os.kill(os.getpid(), how)
    with pytest.raises(Interrupted, match=f"^stopped by {'Ctrl-C' if how == signal.SIGINT else 'kill'}, saved after step 8 of 12$"):
        Trainer(MODEL, SHORT, *sets(data)).fit(folder, report=stop, sample=sum_of_weights)
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before
    assert Checkpoints(folder/"checkpoints").latest().name == "step_000008"
    again = Trainer(MODEL, SHORT, *sets(data))
    again.resume(folder)
    again.fit(folder, sample=sum_of_weights)
    assert lines(folder) == run(data, tmp_path/"whole")[1]
    assert (folder/"samples.txt").read_text() == (tmp_path/"whole/samples.txt").read_text()


def test_the_seconds_of_a_step_are_the_median_of_the_last_ones(data, monkeypatch):
    "Of ten after four that are not counted; as many as the config has, where it has fewer"
    counts, clock = [], [0.]
    def step(self):
        counts.append(len(counts))
        clock[0] += [100, 100, 100, 100, 9, 1, 8, 2, 7, 3, 6, 4, 5, 0][counts[-1]]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])          # The times are those of `step`
    monkeypatch.setattr(Trainer, "train_step", step)
    assert measure_step(Trainer(MODEL, replace(SHORT, steps=50), *sets(data))) == 4.5 and len(counts) == 14
    counts.clear()
    assert measure_step(Trainer(MODEL, replace(SHORT, steps=6), *sets(data))) == 100 and len(counts) == 6


def test_documents_without_a_byte_have_no_loss_per_byte(data, tmp_path):
    "Said before the model runs"
    write_tokens(tmp_path/"valid", ["", ""], Tokenizer.from_folder(data/"tokenizer"), "nothing")
    valid = TokenDataset.open(tmp_path/"valid")
    class Unused(torch.nn.Module):
        w = torch.nn.Parameter(torch.zeros(1))
        def forward(self, ids): raise AssertionError("ran")
    with pytest.raises(ValueError, match="all 2 documents are empty"): evaluate(Unused(), valid, 8)


def test_the_error_of_a_loss_by_hand():
    "Two documents of 2 and 6 tokens that cost 1 and 5 nats more than they must: on average 6/8 a token, off by -1/2 and 1/2"
    dataset, floor = types.SimpleNamespace(info=dict(document_nats=[3., 7., 2.], bytes=60), num_tokens=24), np.array([3., 7.])
    found = summarize(floor + [1., 5.], np.array([2, 6]), dataset, 2)
    assert found.excess == pytest.approx(6/8) and found.error == pytest.approx(math.sqrt(2/1*(.5**2 + .5**2))/8)
    assert found.loss == pytest.approx(16/8) and found.floor == pytest.approx(10/8) and found.bits_per_byte == pytest.approx(16/math.log(2)/20)
    assert summarize(floor[:1], np.array([2]), dataset, 1).error is None


def test_as_many_rows_at_a_time_as_128_megabytes_of_logits_allow(data, monkeypatch):
    asked, real, dataset = [], evaluation.evaluation_batches, sets(data)[1]
    monkeypatch.setattr(evaluation, "evaluation_batches", lambda d, T, count, rows: asked.append(rows) or real(d, T, count, rows))
    for vocab_size in (400, 2**18, 2**30):
        monkeypatch.setitem(dataset.info, "vocab_size", vocab_size)
        evaluate(Trainer(MODEL, SHORT, *sets(data)).model, dataset, 32, 1)
    assert asked == [16, 4, 1]


def test_a_model_that_is_kept_comes_back_rounded_to_nine_bits_with_its_tokenizer(data, tmp_path):
    trainer, tokenizer = Trainer(MODEL, SHORT, *sets(data)), Tokenizer.from_folder(data/"tokenizer")
    save_model(tmp_path/"kept", trainer.model, tokenizer, SHORT, dict(command="none"))
    model, known = load_model(tmp_path/"kept")
    assert known.digest == tokenizer.digest and training_of(tmp_path/"kept") == SHORT
    for (name, p), q in zip(trainer.model.named_parameters(), model.parameters()):
        p, q = p.detach().numpy().astype(np.float64), q.detach().numpy()
        spacing = 2.**(np.floor(np.log2(np.abs(p))) - 9)
        normal = np.abs(p) >= 2.**-14                                   # float16 has fewer bits below
        assert (q[normal] == (np.rint(p/spacing)*spacing)[normal]).all(), name
        assert (np.abs(q - p) <= 2.**-23)[~normal].all(), name


def test_a_model_that_can_not_be_kept_leaves_nothing(data, tmp_path, monkeypatch):
    def full(*args, **more): raise OSError(28, "No space left on device")
    monkeypatch.setattr("lmcourse.training.models.write_safetensors", full)
    with pytest.raises(OSError, match="No space"): save_model(tmp_path/"kept", TransformerLM(MODEL), Tokenizer.from_folder(data/"tokenizer"), SHORT, {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", [1e6, math.nan])
def test_a_model_whose_weights_float16_can_not_hold_is_not_kept(data, tmp_path, value):
    model = TransformerLM(MODEL)
    with torch.no_grad(): model.ln_final.weight[3] = value
    with pytest.raises(ValueError, match="ln_final.weight has a value that float16 can't hold"):
        save_model(tmp_path/"kept", model, Tokenizer.from_folder(data/"tokenizer"), SHORT, {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("values", [dict(model={}), dict(train=None), dict(train=3)])
def test_a_config_without_a_training_is_named(tmp_path, values):
    (tmp_path/"config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match="config.json: train is (None|3), expected an object"): training_of(tmp_path)


def test_the_plateau_lowers_the_rate_and_stops(data, tmp_path):
    trainer, found = run(data, tmp_path/"a", steps=100, warmup_steps=0, schedule="constant", plateau_patience=1, plateau_factor=.1, early_stop_patience=3,
                         early_stop_min_delta=10.)
    rates = [m["lr"] for m in found if "lr" in m]
    assert trainer.step == 16 and rates[:8] == [5e-3]*8 and rates[8:12] == pytest.approx([5e-4]*4) and rates[12:] == pytest.approx([5e-5]*4)
    assert found[-1].get("final") and (tmp_path/"a/checkpoints/step_000016").exists()
    again = Trainer(*[MODEL, replace(SHORT, steps=100, warmup_steps=0, schedule="constant", plateau_patience=1, plateau_factor=.1, early_stop_patience=3,
                                     early_stop_min_delta=10.)], *sets(data))
    again.resume(tmp_path/"a")
    again.fit(tmp_path/"a")
    assert again.step == 16 and lines(tmp_path/"a") == found


# The best weights

OVERFIT = dict(steps=400, batch_size=2, lr=2e-2, weight_decay=0., schedule="constant", warmup_steps=0, checkpoint_every=1000, early_stop_patience=3)


def by_heart(data, folder, **changes):
    "A run that sees the same two windows again and again, on its way to stop early"
    config = replace(SHORT, **OVERFIT | changes)
    if not folder.exists():
        folder.mkdir()
        write_run(folder, MODEL, config, data)
    trainer = Trainer(MODEL, config, *sets(data))
    trainer.batches = [trainer.batches[0]]*config.steps
    return trainer


def first_documents(model, data): return evaluate(model, sets(data)[1], 32, SHORT.eval_documents).loss


def test_a_run_that_stopped_early_gives_its_best_weights(data, tmp_path):
    trainer = by_heart(data, tmp_path/"a")
    trainer.fit(tmp_path/"a")
    losses = {m["step"]: m["valid_loss"] for m in lines(tmp_path/"a") if "valid_loss" in m and not m.get("final")}
    best = min(losses, key=losses.get)
    assert trainer.stop.reason and best == trainer.step - 3*SHORT.eval_every and losses[trainer.step] > losses[best] + .05
    kept = Checkpoints(tmp_path/"a/checkpoints")
    assert kept.best().name == f"step_{best:06d}" and read_state(kept.best())["valid_loss"] == losses[best]
    check_close(first_documents(load_model(tmp_path/"a")[0], data), losses[best], rtol=1e-6)
    check_close(weights(trainer), dict(load_model(tmp_path/"a", checkpoint="latest")[0].named_parameters()), 0, 0)
    with pytest.raises(ValueError, match="unknown checkpoint 'last': did you mean 'latest'"): load_model(tmp_path/"a", checkpoint="last")


def test_a_run_goes_on_from_its_latest_checkpoint_and_keeps_its_best(data, tmp_path):
    (whole := by_heart(data, tmp_path/"a")).fit(tmp_path/"a")
    best = Checkpoints(tmp_path/"a/checkpoints").best().name
    cut = by_heart(data, tmp_path/"b", checkpoint_every=1)
    real, last = cut.train_step, whole.step - 5                     # One evaluation after the best
    def dies(batch):
        if cut.step == last: raise MemoryError
        return real(batch)
    cut.train_step = dies
    with pytest.raises(MemoryError): cut.fit(tmp_path/"b")
    again = by_heart(data, tmp_path/"b", checkpoint_every=1)
    again.resume(tmp_path/"b")
    assert again.step == last and Checkpoints(tmp_path/"b/checkpoints").best().name == best
    again.fit(tmp_path/"b")
    assert lines(tmp_path/"b") == lines(tmp_path/"a") and Checkpoints(tmp_path/"b/checkpoints").best().name == best
    check_close(weights(again), weights(whole), 0, 0)


def test_where_the_last_weights_are_the_best_they_are_loaded(data, tmp_path):
    "The last step is measured on the same documents as those before, so it can be compared with them"
    trainer, found = run(data, tmp_path/"a", checkpoint_every=1000)
    path = Checkpoints(tmp_path/"a/checkpoints").best()
    assert path.name == "step_000012" and read_state(path)["valid_loss"] < found[-2]["loss"]
    check_close(read_state(path)["valid_loss"], first_documents(trainer.model, data), rtol=1e-6)
    check_close(weights(trainer), dict(load_model(tmp_path/"a")[0].named_parameters()), 0, 0)


def test_a_damaged_best_checkpoint_is_named_and_no_other_one_is_loaded(data, tmp_path):
    by_heart(data, tmp_path/"a").fit(tmp_path/"a")
    path = Checkpoints(tmp_path/"a/checkpoints").best()
    for file in ("state.json", "config.json", "model.safetensors"):
        (path/file).write_bytes(b"{}" + (good := (path/file).read_bytes()))
        with pytest.raises(ValueError, match=re.escape(f"{path/file}: ")): load_model(tmp_path/"a")
        load_model(tmp_path/"a", checkpoint="latest")
        (path/file).write_bytes(good)
    load_model(tmp_path/"a")


def test_a_run_does_not_go_on_with_other_tokens(data, tmp_path):
    "As after preparing another text into the folder that it reads"
    run(data, tmp_path/"a")
    train, valid = sets(data)
    Trainer(MODEL, SHORT, train, valid).resume(tmp_path/"a")
    for others, name in (((valid, valid), "train"), ((train, train), "valid")):
        with pytest.raises(ValueError, match=f"a: began with other tokens: {name}.bin had the SHA-256 [0-9a-f]{{12}}…, here [0-9a-f]{{12}}…"): Trainer(MODEL, SHORT, *others).resume(tmp_path/"a")
    values = json.loads((tmp_path/"a/config.json").read_text())
    del values["tokens"]                                            # A run of before
    (tmp_path/"a/config.json").write_text(json.dumps(values))
    Trainer(MODEL, SHORT, valid, valid).resume(tmp_path/"a")


def test_a_checkpoint_is_not_the_folder_of_its_run(data, tmp_path):
    run(data, tmp_path/"a")
    path = Checkpoints(tmp_path/"a/checkpoints").latest()
    with pytest.raises(ValueError, match=re.escape(f"{path}: a checkpoint, expected the folder of its run")): load_model(path)


def test_a_run_of_before_gives_its_last_weights_and_goes_on(data, tmp_path):
    "Its last checkpoint was not measured, so an earlier one can't be called better"
    (tmp_path/"a").mkdir()
    write_run(tmp_path/"a", MODEL, SHORT, data)
    old, kept = Trainer(MODEL, SHORT, *sets(data)), Checkpoints(tmp_path/"a/checkpoints")
    state = dict(elapsed=1., waited=0., recent=[], stop=old.stop.state(), plateau=None)
    for step, loss in ((4, 1.), (5, None)):
        while old.step < step: old.train_step()
        kept.save(old.model, old.engine.optimizer, step, loss, state=state, config=MODEL.to_dict())
    check_close(weights(old), dict(load_model(tmp_path/"a")[0].named_parameters()), 0, 0)
    new = Trainer(MODEL, SHORT, *sets(data))
    new.resume(tmp_path/"a")
    new.fit(tmp_path/"a")
    check_close(weights(new), weights(run(data, tmp_path/"b")[0]), 0, 0)


@pytest.mark.parametrize("name", ["wandb", "trackio", "tensorboard"])
def test_lines_also_go_elsewhere(data, tmp_path, monkeypatch, name):
    seen = []
    fake = types.ModuleType(name)
    fake.__spec__ = importlib.machinery.ModuleSpec(name, None)
    class Log:
        def log(self, values, step): seen.append((step, values))
        def add_scalar(self, key, value, step): seen.append((step, {key: value}))
    setattr(Log, "close" if name == "tensorboard" else "finish", lambda self: seen.append("end"))
    fake.init = lambda **settings: seen.append(settings) or Log()
    monkeypatch.setitem(sys.modules, name, fake)
    if name == "tensorboard":
        writer = types.ModuleType("torch.utils.tensorboard")
        writer.SummaryWriter = lambda folder: seen.append(dict(project="lmcourse", name=folder.parent.name, config=dict(lr=5e-3))) or Log()
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", writer)
    _, found = run(data, tmp_path/"a", log_to=name)
    assert seen[0]["project"] == "lmcourse" and seen[0]["name"] == "a" and seen[0]["config"]["lr"] == 5e-3 and seen[-1] == "end"
    losses = [(step, values["loss"]) for step, values in seen[1:-1] if "loss" in values]
    assert losses == [(m["step"], m["loss"]) for m in found if "loss" in m] and not any("step" in values for _, values in seen[1:-1])


def test_a_log_that_is_not_installed_is_refused(data, monkeypatch):
    monkeypatch.setattr("lmcourse.training.runs.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="log_to = wandb: the package wandb is not installed"): Trainer(MODEL, replace(SHORT, log_to="wandb"), *sets(data))


@pytest.mark.skipif(not compiler, reason="torch.compile needs a C++ compiler and Python's headers")
def test_compiled_steps_are_those_of_the_model_itself(data):
    "One graph for all steps, and plain names in what is saved"
    model = replace(MODEL, num_layers=1, d_model=16, context_length=16)
    trainers = [Trainer(model, replace(SHORT, steps=4, warmup_steps=0, compile=c), *sets(data)) for c in (False, True)]
    losses = [[t.train_step() for _ in range(4)] for t in trainers]
    check_close(losses[1], losses[0], rtol=1e-4)
    assert losses[0][-1] < losses[0][0]
    check_close(weights(trainers[1]), weights(trainers[0]), rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("changes, words", [
    (dict(engine="numpy", dtype="bfloat16"), "engine = numpy with dtype = bfloat16"), (dict(engine="numpy", compile=True), "engine = numpy with compile = True"),
    (dict(engine="numpy", device="cuda"), "cuda"), (dict(micro_batch=4), "6 is not a multiple of 4; 4 or 8 would do"), (dict(tokens_per_step=31), "31 is not a multiple of 32")])
def test_what_does_not_go_together_is_refused(data, changes, words):
    with pytest.raises(ValueError, match=words): Trainer(MODEL, replace(SHORT, **changes), *sets(data))


# Processes

SCRIPT = """
import json, os, sys, torch
from pathlib import Path
from lmcourse.training.data import TokenDataset
from lmcourse.training.runs import read_run
from lmcourse.training.trainer import Trainer
for run in sys.argv[1:]:
    model, config, data = read_run(Path(run))
    trainer = Trainer(model, config, *(TokenDataset.open(data/n) for n in ("train", "valid")))
    trainer.resume(Path(run))
    trainer.fit(Path(run))
    digest = [float(p.double().sum()) for p in trainer.engine.whole_model().parameters()]
    Path(f"{run}/digest{trainer.world.rank}.json").write_text(json.dumps(digest))
if trainer.world.size > 1: torch.distributed.destroy_process_group()
sys.stdout.flush(); sys.stderr.flush()
os._exit(0)                        # A thread of gloo may abort an interpreter that is ending: "terminate called"
"""


def torchrun(processes, port): return ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-port", str(port + os.getpid() % 2000)]


CASES = [(2, dict(micro_batch=1)), (3, dict(windows="within")), (2, dict(shard=True, micro_batch=1, recompute=True)), (3, dict(shard=True, dtype="bfloat16"))]


def for_one(processes, changes):
    "The model and the config of a case, as one process trains it"
    return replace(MODEL, tie_embeddings=processes == 3), replace(SHORT, **{k: v for k, v in changes.items() if k != "shard"})


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    "A run of each case: from the start, or, where the model is shared out, from what one process left. Two starts of torchrun for all, as each takes long."
    top = tmp_path_factory.mktemp("many")
    (top/"script.py").write_text(SCRIPT)
    for i, (processes, changes) in enumerate(CASES):
        model, config = for_one(processes, changes)
        if "shard" in changes: cut_off(data, top/str(i), model, config)
        else: (top/str(i)).mkdir()
        write_run(top/str(i), model, replace(SHORT, **changes), data)
    for processes in (2, 3):
        runs = [str(top/str(i)) for i, case in enumerate(CASES) if case[0] == processes]
        done = subprocess.run([sys.executable, *torchrun(processes, 29500 + processes), str(top/"script.py"), *runs],
                              env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
    return top


@pytest.mark.parametrize("case", range(len(CASES)), ids=str)
def test_processes_train_the_model_that_one_trains(data, tmp_path, trained, case):
    "And what several wrote, one goes on with"
    (processes, changes), many = CASES[case], trained/str(case)
    model, config = for_one(processes, changes)
    _, expected = run(data, tmp_path/"one", model, config)
    digests = [json.loads((many/f"digest{r}.json").read_text()) for r in range(processes)]
    assert all(d == digests[0] for d in digests)
    found = lines(many)
    assert [sorted(m) for m in found] == [sorted(m) for m in expected]
    for a, b in zip(found, expected): check_close(a, b, rtol=2e-2 if "dtype" in changes else 2e-3, atol=1e-6)
    if "shard" in changes: assert found[:5] == expected[:5] and found[9:] != expected[9:]
    again = Trainer(model, config, *sets(data))
    again.resume(many)
    assert again.step == 12
    assert open_case(many).weights.keys() == dict(again.model.named_parameters()).keys()         # The doctor reads them, too
    check_close([float(p.detach().double().sum()) for p in again.model.parameters()], digests[0], rtol=1e-9)


def test_no_buffers_are_sent_in_a_forward_pass_and_no_torch_warns():
    "RoPE's tables are the same in every process."
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    engine = types.SimpleNamespace(world=types.SimpleNamespace(size=2, mesh=None), config=SHORT)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            shared = engines._make_loss(TransformerLM(MODEL), first_half, engine)
        assert [*shared.buffers()] and not shared.will_sync_module_buffers()
    finally: torch.distributed.destroy_process_group()


def test_the_command_with_two_processes(tmp_path):
    "torchrun -m lmcourse train: one speaks and writes, and a single process can go on"
    for words in ("tokenizer stories tok --vocab-size 500 --max-mb .1", "prepare stories data --tokenizer tok --max-mb .2 --valid-documents 10"):
        assert here(*words.split(), cwd=tmp_path).returncode == 0
    words = "--steps 20 --context-length 32 --d-model 16 --num-layers 1 --windows random --eval-documents 2 --eval-every 10 --checkpoint-every 20 --tokens-per-step 256".split()
    two = lmcourse("train", "data", "two", *words, "--micro-batch", 2, cwd=tmp_path, processes=torchrun(2, 31500))
    assert two.returncode == 0, two.stderr[-2000:]
    assert two.stdout.count("256 tokens = 2 processes x 2 times x 2 windows of 32") == 1 and two.stdout.count("validation loss") == 2
    one = here("train", "data", "one", *words, cwd=tmp_path)
    assert one.returncode == 0 and "256 tokens = 1 process x 1 time x 8 windows of 32" in one.stdout
    for a, b in zip(lines(tmp_path/"two"), lines(tmp_path/"one"), strict=True): check_close(a, b, rtol=5e-3, atol=1e-5)
    assert here("generate", "two", "--max-tokens", 5, cwd=tmp_path).returncode == 0
    again = lmcourse("train", "data", "two", *words, cwd=tmp_path, processes=torchrun(2, 31500))
    assert again.returncode != 0 and "two exists" in again.stderr
