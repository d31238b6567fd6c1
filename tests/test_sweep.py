"Experiments: what is refused, what a kill leaves, and that a run is never made twice nor lost"
import json, multiprocessing, os, subprocess, sys, threading, time
from dataclasses import replace
from pathlib import Path
import pytest
pytest.importorskip("torch")
from lmcourse.ablations.studies import SCALES, STUDIES, experiment_of, study_table
from lmcourse.ablations.sweep import RunData, Experiment, Run, add_line, compare_variants, paired_difference, read_lines, run_experiment
from lmcourse.tools.checks import expect_error
from lmcourse.tools.config import ModelConfig, TrainConfig
from lmcourse.tools.ledger import published

ROOT = Path(__file__).parents[1]
TINY = RunData(max_mb=.1, valid_documents=4)
SLOW = dict(d_model=16, num_layers=1, checkpoint_every=15, eval_every=1000, log_every=1)
RUN = """if __name__ == "__main__":
    from lmcourse.ablations.sweep import RunData, Experiment, run_experiment
    run_experiment(Experiment("small", dict(base=SLOW), (0,), TOKENS, data=RunData(max_mb=.1, valid_documents=4)), "OUT/runs.jsonl", "OUT/work", 1)
"""

def experiment(tokens=30*1024, seeds=(0,), **variants): return Experiment("small", variants or dict(base=SLOW), seeds, tokens, data=TINY)

def wait_for(true, seconds=90):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(.02)

def alive(pid):
    try: return open(f"/proc/{pid}/stat").read().split()[2] != "Z"
    except OSError: return False

@pytest.mark.skipif(not os.path.exists("/proc"), reason="looks for processes in /proc")
def test_killed_sweep_goes_on_from_a_checkpoint(tmp_path):
    "SIGKILL leaves no process behind, and the next call ends with the numbers of a sweep that was not killed"
    script, job = tmp_path/"sweep.py", experiment(300*1024).runs()["base", 0]
    script.write_text(RUN.replace("SLOW", repr(SLOW)).replace("TOKENS", str(300*1024)).replace("OUT", str(tmp_path)))
    process = subprocess.Popen([sys.executable, script], env=os.environ | dict(PYTHONPATH=os.pathsep.join(sys.path)))
    run = tmp_path/"work"/"runs"/job.key
    try: wait_for(lambda: list(run.glob("checkpoints/step_0*")))
    finally:
        children = [int(p) for p in open(f"/proc/{process.pid}/task/{process.pid}/children").read().split()]
        process.kill(); process.wait()
    assert children
    wait_for(lambda: not any(map(alive, children)), 20)
    assert not (tmp_path/"runs.jsonl").exists() and run.exists()
    here = run_experiment(experiment(300*1024), tmp_path/"runs.jsonl", tmp_path/"work", 2)
    other = run_experiment(experiment(300*1024), tmp_path/"other.jsonl", tmp_path/"other", 2)
    assert here[job.key]["result"] == other[job.key]["result"] and here[job.key]["curve"] == other[job.key]["curve"]
    assert not run.exists()

def test_killed_run_is_shown_and_tried_again(tmp_path):
    "A run whose process dies is in the file and in the table as crashed; the others go on; the next call makes it"
    e, killed = experiment(300*1024, a=SLOW, b=SLOW | dict(d_ff=16)), []
    def kill_the_first():
        wait_for(lambda: (tmp_path/"runs"/e.runs()["a", 0].key/"metrics.jsonl").exists())
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
    assert line["status"] == "crashed" and line["fault"].startswith("ValueError: windows of a process by micro_batch: 8 is no multiple of 3")
    assert any("crashed: ValueError" in s for s in said) and lines[e.runs()["good", 0].key]["status"] == "done"

def test_two_sweeps_in_one_folder(tmp_path):
    "The second one is refused; a folder for each would do"
    from lmcourse.training.data import lock_file
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
    (dict(tokens=None, flops=1e6), "FLOPs is smaller than one step"), (dict(tokens=None), "expected one of them"), (dict(flops=1e15), "expected one of them"),
    (dict(variants={}), "no variants"), (dict(seeds=()), "no seeds"), (dict(seeds=(-1,)), "seed = -1"), (dict(base="smal"), "did you mean 'small'"),
    (dict(variants=dict(a=dict(learning_rate=1))), "unknown field to vary 'learning_rate'"), (dict(variants=dict(a=dict(norm="batch"))), "norm = 'batch'"),
    (dict(variants=dict(a=dict(vocab_size=12))), "vocab_size = 12")])
def test_refused_before_any_run(change, message):
    with expect_error(ValueError, message): replace(experiment(), **change)

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
    assert first.train == replace(TrainConfig.preset(e.base), seed=0, steps=first.train.steps, warmup_steps=first.train.warmup_steps)
    for variant, key in study.published: assert variant in study.full and published(f"cs336-report.{key}").unit == "nats per token"
    assert all(row["runs"] == "not run" for row in study_table(name, {}, scale).rows)

def test_the_full_set_up_is_the_published_one():
    "5000 steps of 128 windows of 256 tokens, 35,938,816 parameters, 200 steps of warm-up"
    from lmcourse.accounting.memory import count_parameters
    job = experiment_of("learning-rate", "full").runs()["0.002", 0]
    assert (job.train.steps, job.train.batch_size, job.model.context_length, job.train.warmup_steps) == (5000, 128, 256, 200)
    assert count_parameters(job.model).unique == published("cs336-report.tinystories.parameters").value and job.data.corpus == "tinystories"
    job = experiment_of("corpus", "full").runs()["OpenWebText", 0]
    assert (job.train.steps, job.model.vocab_size, job.data.corpus) == (10_000, 32_000, "openwebtext")
    assert count_parameters(job.model).unique == published("cs336-report.openwebtext.parameters").value

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
