"Experiments: what is refused, what a kill leaves, and that a run is never made twice nor lost"
import hashlib, json, math, multiprocessing, os, re, statistics, subprocess, sys, threading
from dataclasses import replace
from pathlib import Path
import processes
import pytest
pytest.importorskip("torch")
from lmcourse.ablations import sweep
from lmcourse.ablations.studies import SCALES, STUDIES, experiment_of, study_table
from lmcourse.ablations.sweep import RunData, Experiment, Run, add_line, compare_pairs, compare_variants, holm, paired_difference, paired_p, prepare_corpus, read_lines
from lmcourse.ablations.sweep import run_experiment, student_t
from lmcourse.tools.checks import expect_error
from lmcourse.tools.config import ModelConfig, TrainConfig
from lmcourse.tools.files import read_json
from lmcourse.tools.ledger import published
from lmcourse.training import data
from lmcourse.training.runs import read_metrics

ROOT = Path(__file__).parents[1]
TINY = RunData(max_mb=.1, valid_documents=4)
SLOW = dict(d_model=16, num_layers=1, checkpoint_every=15, eval_every=1000, log_every=1)
RUN = """if __name__ == "__main__":
    from lmcourse.ablations.sweep import RunData, Experiment, run_experiment
    run_experiment(Experiment("small", dict(base=SLOW), (0,), TOKENS, data=RunData(max_mb=.1, valid_documents=4)), "OUT/runs.jsonl", "OUT/work", 1)
"""

def experiment(tokens=30*1024, seeds=(0,), **variants): return Experiment("small", variants or dict(base=SLOW), seeds, tokens, data=TINY)

@pytest.mark.skipif(not processes.TOLD, reason="looks for processes in /proc")
def test_killed_sweep_goes_on_from_a_checkpoint(tmp_path):
    "SIGKILL leaves no process behind, and the next call ends with the numbers of a sweep that was not killed"
    script, job = tmp_path/"sweep.py", experiment(60*1024).runs()["base", 0]
    script.write_text(RUN.replace("SLOW", repr(SLOW)).replace("TOKENS", str(60*1024)).replace("OUT", str(tmp_path)))
    process = subprocess.Popen([sys.executable, script], env=os.environ | dict(PYTHONPATH=os.pathsep.join(sys.path)))
    run = tmp_path/"work"/"runs"/job.key
    try: processes.wait_for(lambda: list(run.glob("checkpoints/step_0*")))
    finally:
        runs = processes.descendants(process.pid)
        process.kill(); process.wait()
    assert len(runs) > 2 and processes.gone(*runs)       # The run, the process that it is a copy of, and Python's tracker
    assert not (tmp_path/"runs.jsonl").exists() and run.exists()
    here = run_experiment(experiment(60*1024), tmp_path/"runs.jsonl", tmp_path/"work", 2)
    other = run_experiment(experiment(60*1024), tmp_path/"other.jsonl", tmp_path/"other", 2)
    assert here[job.key]["result"] == other[job.key]["result"] and here[job.key]["curve"] == other[job.key]["curve"]
    assert not run.exists()

@pytest.mark.slow
def test_killed_run_is_shown_and_tried_again(tmp_path):
    "A run whose process dies is in the file and in the table as crashed; the others go on; the next call makes it"
    e, killed = experiment(120*1024, a=SLOW, b=SLOW | dict(d_ff=16)), []
    def kill_the_first():
        processes.wait_for(lambda: (tmp_path/"runs"/e.runs()["a", 0].key/"metrics.jsonl").exists())
        oldest = min(multiprocessing.active_children(), key=lambda p: p.pid)
        killed.append(oldest.pid); oldest.kill()
    thread = threading.Thread(target=kill_the_first); thread.start()
    lines = run_experiment(e, tmp_path/"runs.jsonl", tmp_path, 1)
    thread.join()
    assert [lines[e.runs()[v, 0].key]["status"] for v in "ab"] == ["crashed", "done"]
    assert lines[e.runs()["a", 0].key]["fault"] == "its process ended with code -9"
    assert [row["runs"] for row in compare_variants(e, lines).rows] == ["1 crashed", "1"]
    again = run_experiment(e, tmp_path/"runs.jsonl", tmp_path, 1)
    assert [row["runs"] for row in compare_variants(e, again).rows] == ["1", "1"]

def test_an_error_is_a_crashed_run(tmp_path):
    e = experiment(20*1024, bad=SLOW | dict(micro_batch=3), good=SLOW)
    said = []
    lines = run_experiment(e, tmp_path/"runs.jsonl", tmp_path, 2, report=said.append)
    line = lines[e.runs()["bad", 0].key]
    assert line["status"] == "crashed" and line["fault"].startswith("ValueError: windows of a process by micro_batch: 8 is not a multiple of 3")
    assert any("crashed: ValueError" in s for s in said) and lines[e.runs()["good", 0].key]["status"] == "done"

def test_a_validation_loss_that_is_not_finite_is_a_result(tmp_path):
    "The run's last update ruins the weights, after the last training loss; the other run goes on"
    common = SLOW | dict(warmup_steps=0, schedule="constant")
    e = experiment(1024, base=common, wild=common | dict(lr=1e12, norm="none", grad_clip=0.))
    lines = run_experiment(e, tmp_path/"runs.jsonl", tmp_path, 2)
    base, wild = (lines[e.runs()[v, 0].key] for v in e.variants)
    assert (base["status"], wild["status"]) == ("done", "diverged") and re.match("the validation loss is (nan|inf)", wild["fault"])

def test_two_sweeps_in_one_folder(tmp_path):
    "The second one is refused; a folder for each would do"
    from lmcourse.tools.files import lock_file
    with open(tmp_path/"lock", "w") as file:
        lock_file(file)
        with expect_error(BlockingIOError, "another process"): run_experiment(experiment(), tmp_path/"runs.jsonl", tmp_path)

def test_a_new_field_changes_no_key():
    "Only what differs from the defaults is in the digest"
    job = experiment().runs()["base", 0]
    spoken = {k: v for k, v in job.model.to_dict().items() if v != ModelConfig().to_dict()[k]}
    assert Run(ModelConfig.from_dict(spoken), job.train, job.data).key == job.key
    for change in (dict(model=replace(job.model, bias=True)), dict(train=replace(job.train, lr=1e-3)), dict(train=replace(job.train, seed=9)), dict(data=RunData())):
        assert replace(job, **change).key != job.key
    for change in (dict(device="cuda"), dict(checkpoint_every=1), dict(prefetch=0), dict(compile=True)): assert replace(job, train=replace(job.train, **change)).key == job.key

@pytest.mark.parametrize("change, message", [(dict(tokens=1023), "a budget of 1,023 tokens is smaller than one step, which takes 1,024"),
    (dict(tokens=None, flops=1e6), "FLOPs is smaller than one step"), (dict(tokens=None, flops=math.inf), "flops = inf, expected a finite number"),
    (dict(tokens=None, flops=math.nan), "flops = nan, expected a finite number"), (dict(tokens=None), "expected one of them"), (dict(flops=1e15), "expected one of them"),
    (dict(variants={}), "no variants"), (dict(seeds=()), "no seeds"), (dict(seeds=(0, 0)), "each one once"), (dict(variants=dict(a=dict(seed=5))), "unknown field to vary 'seed'"), (dict(seeds=(-1,)), "seed = -1"), (dict(base="smal"), "did you mean 'small'"),
    (dict(variants=dict(a=dict(learning_rate=1))), "unknown field to vary 'learning_rate'"), (dict(variants=dict(a=dict(norm="batch"))), "norm = 'batch'"),
    (dict(variants=dict(a=dict(vocab_size=12))), "vocab_size = 12")])
def test_refused_before_any_run(change, message):
    with expect_error(ValueError, message): replace(experiment(), **change)

def test_seeds_may_come_from_a_generator():
    assert [*replace(experiment(), seeds=(s for s in (3, 4))).runs()] == [*replace(experiment(), seeds=(3, 4)).runs()]

@pytest.mark.parametrize("name", STUDIES)
@pytest.mark.parametrize("scale", SCALES)
def test_every_study_can_be_planned(name, scale):
    "Its variants are runs of their own, the first is the base, and what was published is in the ledger and names a variant"
    e, study = experiment_of(name, scale), STUDIES[name]
    jobs = e.runs()
    assert len({job.key for job in jobs.values()}) == len(jobs) and len(e.seeds) >= 3 and study.question.endswith("?")
    first = jobs[next(iter(e.variants)), 0]
    preset = ModelConfig.preset(e.base)
    assert {k: v for k, v in first.model.to_dict().items() if k != "vocab_size"} == {k: v for k, v in preset.to_dict().items() if k != "vocab_size"}
    assert first.train == replace(TrainConfig.preset(e.base), **SCALES[scale][1], seed=0, steps=first.train.steps, warmup_steps=first.train.warmup_steps)
    assert all(a in study.small and b in study.small for a, b in study.pairs)
    for variant, key in study.published: assert variant in study.full and published(f"cs336-report.{key}").unit == "nats per token"
    assert all(row["runs"] == "not run" for row in study_table(name, {}, scale).rows)

def test_the_full_set_up_is_the_published_one():
    "5000 steps of 128 windows of 256 tokens, 35,938,816 parameters, 200 steps of warm-up"
    from lmcourse.accounting.parameters import count_parameters
    job = experiment_of("learning-rate", "full").runs()["0.002", 0]
    assert (job.train.steps, job.train.batch_size, job.model.context_length, job.train.warmup_steps) == (5000, 128, 256, 200)
    assert count_parameters(job.model).unique == published("cs336-report.tinystories.parameters").value and job.data.corpus == "tinystories"
    job = experiment_of("corpus", "full").runs()["OpenWebText", 0]
    assert (job.train.steps, job.model.vocab_size, job.data.corpus) == (10_000, 32_000, "openwebtext")
    assert count_parameters(job.model).unique == published("cs336-report.openwebtext.parameters").value

def test_runs_of_the_full_scale_keep_their_keys():
    "Somebody may have made them, with hours of a GPU: a changed constant would make each of them again"
    keys = sorted({run.key for name in STUDIES for run in experiment_of(name, "full").runs().values()})
    assert (len(keys), hashlib.sha256(" ".join(keys).encode()).hexdigest()[:16]) == (263, "c027d21d9595696c")

def test_published_losses_stand_in_the_rows_of_their_variants():
    "At the full scale, and at the small one where a variant is the same change"
    base, other = (published(f"cs336-report.ablation.{key}").value for key in ("base", "post-norm"))
    for scale in SCALES:
        rows = {row["variant"]: (row.get("published"), row.get("published difference")) for row in study_table("norm-position", {}, scale).rows}
        assert (rows["pre"], rows["post"], rows["sublayer"]) == ((base, None), (None, None), (other, round(other - base, 4)))
    assert not any(row.get("published") for row in study_table("learning-rate", {}, "small").rows)

def test_the_saved_runs_are_those_of_the_studies():
    "Every line is the run that its key says, ended well or diverged, and no study of the small scale lacks one"
    lines = read_lines(ROOT/"nbs/results/ablations.jsonl")
    for key, line in lines.items():
        run = Run(ModelConfig.from_dict(line["model"]), TrainConfig.from_dict(line["train"]), RunData(**line["data"]))
        assert run.key == key and run.train.seed == line["seed"] and line["status"] in ("done", "diverged") and (line["result"] is None) == (line["status"] == "diverged")
        assert line["machine"] and line["date"] and line["commit"] and line["command"].startswith("lmcourse ablate") and line["ngram"] > 0
        assert line["steps"] == run.train.steps and line["tokens"] == line["steps"]*run.train.batch_size*run.model.context_length
    for name in STUDIES: assert {run.key for run in experiment_of(name).runs().values()} <= set(lines), name
    assert sum(line["seconds"] for line in lines.values())/2 < 4*3600

def test_a_file_that_is_not_utf_8_is_named(tmp_path):
    (tmp_path/"metrics.jsonl").write_bytes(b'{"step": 1}\n\xff\n')
    for read in (lambda: read_lines(tmp_path/"metrics.jsonl"), lambda: read_metrics(tmp_path)):
        with pytest.raises(ValueError, match=r"metrics.jsonl: not UTF-8 \(byte 12\)"): read()


def test_torn_and_damaged_lines(tmp_path):
    path, run = tmp_path/"runs.jsonl", dict(key="a", format=1, status="done", model={}, train={}, data={})
    for cut in range(1, len(json.dumps(run)), 7):
        path.write_text(json.dumps(run) + "\n" + json.dumps(run | dict(key="b"))[:cut])
        assert list(read_lines(path)) == ["a"]
        add_line(path, run | dict(key="c"))
        assert list(read_lines(path)) == ["a", "c"]
    path.write_text(json.dumps(run) + "\n" + "{\n" + json.dumps(run) + "\n")
    with expect_error(ValueError, "line 2: not JSON"): read_lines(path)
    with expect_error(ValueError, "not JSON compliant"): add_line(tmp_path/"new.jsonl", run | dict(loss=float("nan")))
    assert not (tmp_path/"new.jsonl").exists()

def test_pairs_need_the_same_seeds():
    with expect_error(ValueError, "zip"): paired_difference([1., 2.], [1.])
    assert paired_difference([2.], [1.]) == (1., None)

# The corpus

def contents(folder): return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}

def cut_off(owner, name, call):
    "`NAME` is interrupted before its call number `call`"
    real, calls = getattr(owner, name), []
    def f(*args, **more):
        calls.append(1)
        if len(calls) == call: raise KeyboardInterrupt
        return real(*args, **more)
    return f

@pytest.mark.parametrize("name, call", [("write_tokens", 1), ("write_tokens", 2), ("count_ngrams", 1), ("documents", 2), ("documents", 3)])
def test_an_interrupted_corpus_is_prepared_to_its_end_by_the_next_call(tmp_path, name, call):
    owner = sweep if name == "documents" else data
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, name, cut_off(owner, name, call))
        prepare_corpus(TINY, tmp_path/"cut")
    cut, whole = prepare_corpus(TINY, tmp_path/"cut"), prepare_corpus(TINY, tmp_path/"whole")
    assert contents(tmp_path/"cut") == contents(tmp_path/"whole") and (cut/"ngram.json").exists() and cut.name == whole.name

def test_two_texts_of_like_names_are_two_corpora(tmp_path):
    (tmp_path/"a").mkdir()
    texts = tmp_path/"a"/"b.txt", tmp_path/"a-b.txt"
    for text,word in zip(texts, ("cat", "dog")): text.write_text("<|endoftext|>".join(f"the {word} {i} ran" for i in range(99)))
    made = [prepare_corpus(RunData(corpus=f"text:{text}", vocab_size=300, max_mb=.01, valid_documents=5), tmp_path/"work") for text in texts]
    assert made[0] != made[1]

def test_of_a_long_text_little_is_for_validation(tmp_path):
    (tmp_path/"book.txt").write_text("".join(f"line {i} of a book\n" for i in range(9999)))
    data = RunData(corpus=f"text:{tmp_path/'book.txt'}", vocab_size=300, max_mb=.01, valid_documents=5)
    info = read_json(prepare_corpus(data, tmp_path/"work")/"valid.json")
    assert info["documents"] == 1 and 4900 < info["bytes"] <= 5000


def test_another_text_under_the_same_name_is_another_run_of_another_corpus(tmp_path):
    text, made = tmp_path/"book.txt", []
    data = RunData(corpus=f"text:{text}", vocab_size=300, max_mb=.01, valid_documents=5)
    for word in ("cat", "dog", "cat"):
        text.write_text("<|endoftext|>".join(f"the {word} {i} ran" for i in range(99)))
        made.append((Run(ModelConfig(), TrainConfig(), data).key, prepare_corpus(data, tmp_path/"work")))
    assert made[0] == made[2] and made[0][0] != made[1][0] and made[0][1] != made[1][1]

@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a forked process")
@pytest.mark.parametrize("name", ["tokenizer", "train.json", "valid.json"])
def test_a_corpus_whose_process_was_killed_is_prepared_by_the_next_call(tmp_path, name):
    data = RunData(max_mb=1., valid_documents=4)
    code = f"from lmcourse.ablations.sweep import RunData, prepare_corpus; prepare_corpus({data!r}, {str(tmp_path/'cut')!r})"
    process = subprocess.Popen([sys.executable, "-c", code], env=os.environ | dict(PYTHONPATH=os.pathsep.join(sys.path)))
    processes.wait_for(lambda: list((tmp_path/"cut").glob(f"*/{name}")) or process.poll() is not None)
    process.kill()
    assert process.wait() in (0, -9)
    prepare_corpus(data, tmp_path/"cut"), prepare_corpus(data, tmp_path/"whole")
    assert contents(tmp_path/"cut") == contents(tmp_path/"whole")

# The machine and the statistics

def test_as_many_runs_at_a_time_as_cores_that_may_be_used(tmp_path, monkeypatch):
    "Of a large machine a container may use two cores"
    asked = []
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5}, raising=False)
    monkeypatch.setattr(sweep, "prepare_corpus", lambda data, folder: folder)
    monkeypatch.setattr(sweep, "_start", lambda job, data, run, device, threads: asked.append(threads) or exit_at_once)
    monkeypatch.setattr(sweep, "_ended", lambda job, code, run: dict(status="done", result=dict(loss=1.), key=job.key, format=1, model={}, train={}, data={}))
    monkeypatch.setattr(sweep.shutil, "rmtree", lambda path: None)
    most = []
    exit_at_once = type("Ended", (), dict(exitcode=0, is_alive=lambda self: most.append(len(asked)) and False, terminate=lambda self: 0, join=lambda self: 0))()
    run_experiment(experiment(seeds=tuple(range(5))), tmp_path/"runs.jsonl", tmp_path/"new/work", report=lambda line: None)
    assert asked == [1]*5 and most[0] == 2
    assert json.loads((tmp_path/"runs.jsonl").read_text().splitlines()[0])["machine"].startswith("2 cores of ")

@pytest.mark.parametrize("freedom, level, t", [(1, .95, 12.7062047362), (2, .95, 4.30265272975), (9, .95, 2.26215716280), (2, .99, 9.92484320092), (1, .9995, 1273.2393), (1, .99999, 63661.9772),
                                               (10**6, .95, 1.95996635682), (3, .0001, .000136034952)])
def test_quantiles_of_student(freedom, level, t):
    "Tables, and tan(level pi/2) for one degree of freedom"
    assert student_t(freedom, level) == pytest.approx(t, rel=1e-6)
    if freedom == 1: assert student_t(1, level) == pytest.approx(math.tan(level*math.pi/2), rel=1e-6)

@pytest.mark.parametrize("freedom, level", [(0, .95), (-1, .95), (math.nan, .95), (2, 0), (2, 1), (2, 1.5), (2, math.nan)])
def test_no_quantile(freedom, level):
    with expect_error(ValueError, "student_t: "): student_t(freedom, level)

def test_the_interval_covers_the_difference_as_often_as_it_says():
    "2,000 experiments with three seeds: within three standard errors of 95 %"
    import numpy as np
    rng = np.random.default_rng(0)
    pairs = [paired_difference(rng.normal(1., 1., 3).tolist(), [0.]*3) for _ in range(2000)]
    assert abs(statistics.fmean(abs(mean - 1) < half for mean, half in pairs) - .95) < 3*math.sqrt(.95*.05/2000)


def test_p_values_are_those_of_the_paired_test():
    from scipy.stats import ttest_rel
    a, b = [1.3, 1.1, 1.9, 1.4], [1.0, 1.2, 1.5, 1.1]
    assert paired_p(a, b) == pytest.approx(ttest_rel(a, b).pvalue, rel=1e-9) == paired_p(b, a)
    assert paired_p([1.], [2.]) is None and paired_p([1., 2.], [1., 2.]) == 1 and paired_p([2., 3.], [1., 2.]) == 0


@pytest.mark.parametrize("p, corrected", [
    ([], []), ([.04], [.04]), ([.01, .02], [.02, .02]), ([.02, .01], [.02, .02]), ([.02, .02, .02], [.06]*3),
    ([.001, .02, .04, .5], [.004, .06, .08, .5]), ([.4, .6], [.8, .8]), ([.9, .8, .7], [1, 1, 1])])
def test_holm(p, corrected):
    "The smallest times their number, the next times one less; none below the one before, none above 1"
    assert holm(dict(enumerate(p))) == pytest.approx(dict(enumerate(corrected)))


def test_a_planned_pair_counts_in_the_family():
    e, values = experiment(seeds=(0, 1, 2), base={}, a=dict(lr=3e-3), b=dict(lr=2e-3)), dict(base=(1., 1.1, 1.2), a=(.8, .92, 1.), b=(.7, .8, .95))
    lines = {run.key: dict(status="done", result=dict(loss=values[name][seed])) for (name, seed), run in e.runs().items()}
    alone, more = compare_pairs(e, lines), compare_pairs(e, lines, pairs=(("b", "a"), ("a", "base")))
    assert set(alone) == {("a", "base"), ("b", "base")} and set(more) == {*alone, ("b", "a")}
    p = {pair: paired_p(*(values[name] for name in pair)) for pair in more}
    assert {pair: c for pair, (*_, c) in more.items()} == pytest.approx(holm(p))
    assert all(more[pair][2] >= alone[pair][2] and more[pair][:2] == alone[pair][:2] for pair in alone)
    del lines[e.runs()["a", 2].key], lines[e.runs()["a", 1].key]
    assert compare_pairs(e, lines)["a", "base"][1:] == (None, None)

# What is read off a model, a run and a machine

def test_losses_at_other_lengths_are_those_of_each_window():
    "Also beyond the context, and where the windows are no multiple of what is computed at a time; a model with learned positions has no rows for those"
    import numpy as np
    import torch
    from lmcourse.architecture.transformer_torch import TransformerLM
    config, tokens = ModelConfig(vocab_size=40, context_length=8, d_model=16, num_layers=1, num_heads=2), np.random.default_rng(0).integers(0, 40, 8*17 + 5).astype(np.uint16)
    def by_hand(length):
        model = TransformerLM(replace(config, context_length=max(8, length)), seed=1)
        windows = [torch.tensor(tokens[i:i + length + 1].astype(int)) for i in range(0, len(tokens) - length, length)]
        with torch.no_grad(): return statistics.fmean(model.loss(w[None, :-1], w[None, 1:]).item() for w in windows)
    found = sweep.losses_by_length(TransformerLM(config, seed=1), tokens, (4, 8, 16, 512))
    assert found == pytest.approx({str(n): by_hand(n) for n in (4, 8, 16)}, rel=1e-5)
    few = sweep.losses_by_length(TransformerLM(config, seed=1), tokens, (8,), most=8*3)
    assert few == sweep.losses_by_length(TransformerLM(config, seed=1), tokens[:8*3 + 1], (8,))
    assert sweep.losses_by_length(TransformerLM(replace(config, position="learned"), seed=1), tokens, (8, 16)).keys() == {"8"}
    assert sweep.losses_by_length(TransformerLM(replace(config, z_loss=.1), seed=1), tokens, (4, 8, 16)) == {k: v for k, v in found.items() if k != "512"}
    broken = TransformerLM(config, seed=1)
    with torch.no_grad(): broken.lm_head.weight.fill_(math.nan)
    assert sweep.losses_by_length(broken, tokens, (4, 8)) == {} and sweep.LENGTHS == (64, 128, 256, 512)

def test_a_step_costs_the_same_however_its_batch_is_given():
    model = ModelConfig(vocab_size=40, context_length=8, d_model=16, num_layers=1, num_heads=2)
    assert sweep.step_cost(model, TrainConfig(batch_size=5)) == sweep.step_cost(model, TrainConfig(tokens_per_step=40)) and sweep.step_cost(model, TrainConfig(batch_size=5))[0] == 40

@pytest.mark.parametrize("corpus, words", [("storys", "did you mean 'stories'"), ("text:nowhere.txt", "nowhere.txt: no such file")])
def test_a_corpus_that_is_not_there_is_refused_before_anything_is_made(tmp_path, corpus, words):
    with pytest.raises((ValueError, OSError), match=words): run_experiment(replace(experiment(), data=RunData(corpus)), tmp_path/"runs.jsonl", tmp_path/"work")
    assert not list(tmp_path.iterdir())

def test_the_commit_is_that_of_the_clone(tmp_path, monkeypatch):
    git = lambda *words: subprocess.run(["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a", *words], capture_output=True, text=True)
    monkeypatch.setattr(sweep, "files", lambda name: tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert sweep._commit() is None
    (tmp_path/"__init__.py").write_text("a")
    for words in (["init"], ["add", "__init__.py"], ["commit", "-m", "a"]): assert git(*words).returncode == 0
    known = git("rev-parse", "--short=12", "HEAD").stdout.strip()
    assert len(known) == 12 and sweep._commit() == known
    (tmp_path/"__init__.py").write_text("b")
    assert sweep._commit() == known + "+"
    (tmp_path/"venv").mkdir()                                # installed within another project
    with monkeypatch.context() as m:
        m.setattr(sweep, "files", lambda name: tmp_path/"venv")
        assert sweep._commit() is None
    monkeypatch.setenv("PATH", str(tmp_path))                # a machine without git
    assert sweep._commit() is None

def test_the_table_has_the_mean_and_the_picture_a_cross_where_a_run_diverged():
    e = experiment(seeds=(0, 1), base={}, a=dict(lr=3e-3))
    curve, values = dict(step=[1, 2], loss=[3., 2.]), {("base", 0): 1.01, ("base", 1): 1.02, ("a", 0): 1.2}
    lines = {run.key: dict(status="done", result=dict(loss=values[name], excess=.1), curve=curve) if name in values else dict(status="diverged", fault="", result=None, curve=curve)
             for name, run in e.runs().items()}
    assert [(row["runs"], row["loss"]) for row in compare_variants(e, lines).rows] == [("2", 1.015), ("1, 1 diverged", 1.2)]
    assert [line.get_marker() for line in sweep.plot_curves(e, lines).lines].count("x") == 1

def test_what_stands_in_the_table_for_a_p_value(): assert [sweep._p_text(p) for p in (None, .0009, .001, .0432, 1.)] == [None, "< 0.001", "0.001", "0.043", "1"]

def test_the_defaults_of_the_data_are_those_of_the_saved_runs():
    "Another default would be another key: every saved run would be made again"
    assert RunData() == RunData("stories", 512, 8., 200)

def test_holm_takes_probabilities_only(): # NaN would come out as 0, a finding
    for value in (math.nan, -.1, 1.5):
        with pytest.raises(ValueError, match=f"p\\['a'\\] = {value}, expected 0 to 1"): holm({"a": value, "b": .01})
