"`lmcourse bench`: that what it compares can be compared, and what it leaves behind."
import gc
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import processes
from hypothesis import given, strategies as st

from lmcourse.app import bench
from lmcourse.tokenization.tokenizer import Tokenizer
from lmcourse.tools.checks import expect_error
from lmcourse.tools.documents import END_OF_TEXT


def lmcourse(*words, **more):
    return subprocess.run([sys.executable, "-m", "lmcourse", *map(str, words)], capture_output=True, text=True, **more)


def python(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def web(tmp_path_factory):
    "A small corpus and a tokenizer learnt from it."
    folder = tmp_path_factory.mktemp("web")
    corpus = bench.write_corpus("web", folder, 300_000)
    Tokenizer.train(bench.file_documents(corpus.path), 1000).save(folder/"tokenizer")
    return corpus, folder/"tokenizer"


# Text as the web has it

def test_kinds_take_turns_and_what_is_no_good_is_left_out(tmp_path, monkeypatch):
    def file(name, data):
        (tmp_path/name).write_bytes(data)
        return tmp_path/name
    texts = {n: f"{n} is a text of its own. ".encode()*20 for n in ("a1", "a2", "a3", "b1", "b2", "c1")}
    files = {"a": [file(n, texts[n]) for n in ("a1", "a2", "a3")],
             "b": [file("b1", texts["b1"]), file("copy", texts["a1"]), file("latin", "é".encode("latin-1")*300), file("b2", texts["b2"])],
             "c": [file("short", b"short"), file("long", b"long"*100_000), file("mark", f"a{END_OF_TEXT}b".encode()*50), file("c1", texts["c1"])]}
    monkeypatch.setattr(bench, "installed_files", lambda: files)
    monkeypatch.setattr(bench, "_locales", lambda: iter(()))
    assert [d[:2] for d in bench.web_text(10**9)] == ["a1", "b1", "a2", "c1", "a3", "b2"]
    assert [d[:2] for d in bench.web_text(1200)] == ["a1", "b1", "a2"]


def test_many_scripts_come_with_babel():
    pytest.importorskip("babel")
    everything = "".join(bench._locales())
    for letter in "яαक中の한ت": assert letter in everything
    text = "".join(bench.web_text(3_000_000))
    share = np.mean(np.frombuffer(text.encode(), np.uint8) > 127)
    assert 0.05 < share < 0.4


@given(st.text(alphabet="ab é好\n", max_size=60), st.integers(1, 9))
def test_lines_put_together_are_the_text(text, size):
    lines = bench.cut_lines(text, size)
    assert "".join(lines) == text and all(1 <= len(line) <= size for line in lines)


def test_a_sample_is_the_beginning(web):
    corpus, _ = web
    texts = bench.file_documents(corpus.path)
    one = bench.Sample(corpus.path, 1)
    some = bench.Sample(corpus.path, 100_000)
    assert one.documents == texts[:1] and some.documents == texts[:len(some.documents)]
    assert sum(len(d.encode()) for d in some.documents[:-1]) < 100_000 <= sum(len(d.encode()) for d in some.documents)
    assert bench.Sample(corpus.path, None).documents == texts and some.utf8 == "\n".join(some.documents).encode()


# Clocks

def test_a_ratio_does_not_notice_a_slow_machine_and_counts_bytes():
    ours, theirs = (dict(bytes=size, cpu_s=[1], wall_s=[s*slow for slow in (1, 3, 50)]) for size, s in ((1000, 0.1), (500, 0.2)))
    assert bench.ratios(ours, theirs) == pytest.approx([4, 4, 4])
    assert bench.spread([4.0, 2.0, 3.0]) == "3.00 [2.00..4.00]"


def test_jobs_take_turns():
    order = []
    jobs = {k: lambda k=k: order.append(k) or dict(wall_s=len(order)) for k in "AB"}
    found = bench.interleaved(jobs, 3)
    assert "".join(order) == "ABABAB" and found == dict(A=dict(wall_s=[1, 3, 5]), B=dict(wall_s=[2, 4, 6]))


def test_nothing_is_compiled_or_loaded_on_the_clock(web):
    "After the warm-up no function of ours gets another compiled version, whatever the number of threads."
    corpus, _ = web
    larger = bench.write_corpus("web", Path(corpus.path).parent, 2_000_000)
    code = f"""
import sys, tempfile, warnings
from pathlib import Path
from lmcourse.app import bench
from lmcourse.tokenization import fast_bpe
warnings.simplefilter("ignore")
def versions(): return {{n: len(f.overloads) for n, f in vars(fast_bpe).items() if hasattr(f, "overloads")}}
file = Path(tempfile.mkdtemp())/"warm-up.txt"
file.write_text(bench.warm_up_text(), encoding="utf-8")
for threads in (1, 2):
    bench.warm_learner("lmcourse", str(file), threads)
    before = versions()
    bench.LEARNERS["lmcourse"].learn({larger.path!r}, 32_000, threads)
    assert versions() == before, (threads, before, versions())
assert before["add_kernel"] and sum(before.values()) >= 5
"""
    python(code)


def test_fresh_means_a_new_encoder_each_time(web, monkeypatch):
    corpus, folder = web
    built = []
    monkeypatch.setitem(bench.ENCODERS, "lmcourse", lambda folder: built.append(1) or Tokenizer.from_folder(folder))
    bench._encoder.cache_clear()
    def encode(task): bench.run_encoding(task, "lmcourse", 1, corpus.path, 20_000, str(folder))
    for _ in range(3): encode("text to array")
    assert len(built) == 1
    for _ in range(3): encode("text to array, fresh cache")
    assert len(built) == 4
    bench._encoder.cache_clear()


def test_the_collector_rests_while_an_encoder_is_timed(web, monkeypatch):
    corpus, folder = web
    seen = []
    calls = dict(lmcourse=lambda t, x, n: seen.append(gc.isenabled()) or t.encode(x))
    monkeypatch.setitem(bench.TASKS, "looks", bench.Task("text", calls))
    bench.run_encoding("looks", "lmcourse", 1, corpus.path, 20_000, str(folder))
    assert seen == [False] and gc.isenabled()
    gc.disable()
    try:
        with bench.resting_collector(): pass
        assert not gc.isenabled()                             # Who had switched it off finds it so
    finally: gc.enable()
    with pytest.raises(KeyError), bench.resting_collector(): raise KeyError
    assert gc.isenabled()
    bench._encoder.cache_clear()


def test_both_clocks_are_read_around_the_call(monkeypatch):
    clock = dict(perf_counter=10., process_time=3.)
    for name in clock: monkeypatch.setattr(time, name, lambda name=name: clock[name])
    def call():
        clock.update(perf_counter=12.5, process_time=3.25)
        return "done"
    assert bench.timed(call) == (dict(wall_s=2.5, cpu_s=.25), "done")


# Processes

def test_what_a_library_prints_does_not_get_into_the_answers():
    code = ("from lmcourse.app import bench; import os; bench.ACTIONS['shout'] = lambda: print('noise') or os.system('echo noise') or dict(heard=1);"
            "bench.ACTIONS['threads'] = lambda: dict(n=os.environ['RAYON_NUM_THREADS']); bench.serve()")
    asked = "".join(json.dumps(dict(action=a)) + "\n" for a in ("shout", "threads", "nonsense"))
    env = os.environ | {"RAYON_NUM_THREADS": "3"}
    done = subprocess.run([sys.executable, "-c", code], input=asked, capture_output=True, text=True, env=env)
    assert [json.loads(line) for line in done.stdout.splitlines()] == [dict(heard=1), dict(n="3"), dict(error="KeyError: 'nonsense'")]
    assert done.stderr.count("noise") == 2


def test_a_worker_gets_its_threads_and_ends_with_its_block(monkeypatch):
    seen = []
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: seen.append(k["env"]) or popen(*a, **k))
    with bench.Worker(3, NUMBA_CACHE_DIR="here") as worker: process = worker.process
    assert seen[0]["RAYON_NUM_THREADS"] == "3" and seen[0]["NUMBA_CACHE_DIR"] == "here" and process.poll() is not None


# The same work

@given(st.lists(st.integers(97, 122), max_size=30), st.lists(st.integers(97, 122), max_size=30))
def test_the_first_difference_is_named(a, b):
    x, y = (np.array(ids, np.uint32) for ids in (a, b))
    if a == b: return bench.require_equal_ids("text", x, y, "them", lambda i: bytes([i]))
    at = next((i for i, (p, q) in enumerate(zip(a, b)) if p != q), min(len(a), len(b)))
    with expect_error(ValueError, f"text: id {at}, at byte {at} after {bytes(a[:at])[-20:]!r}, differs between lmcourse and them"):
        bench.require_equal_ids("text", x, y, "them", lambda i: bytes([i]))


@pytest.mark.parametrize("who", ["tiktoken", "tokenizers"])
def test_all_tasks_of_others_give_our_ids(web, who):
    pytest.importorskip(who)
    corpus, folder = web
    sample, encoders = bench.Sample(corpus.path, None), {n: bench.ENCODERS[n](folder) for n in ("lmcourse", who)}
    for name, task in bench.TASKS.items():
        if who not in task.calls: continue
        ids = [bench.flat_ids(task.calls[n](t, getattr(sample, task.form), 2)) for n, t in encoders.items()]
        bench.require_equal_ids(name, *ids, who, encoders["lmcourse"].token_bytes)


def test_other_ids_are_noticed(web, tmp_path):
    pytest.importorskip("tokenizers")
    corpus, folder = web
    (wrong := tmp_path/"wrong").mkdir()
    for file in folder.iterdir(): (wrong/file.name).write_bytes(file.read_bytes())
    data = json.loads((wrong/"tokenizer.json").read_text(encoding="utf-8"))
    data["truncation"] = dict(max_length=5, direction="Right", strategy="LongestFirst", stride=0)  # Ours cuts nothing off
    (wrong/"tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    with expect_error(ValueError, "differs between lmcourse and tokenizers"): bench.measure_encoding(corpus, wrong, [1], 1)


@pytest.mark.parametrize("who", ["tokenizers", "rustbpe"])
def test_others_learn_as_many_tokens_and_nearly_the_same(web, who):
    pytest.importorskip(who)
    ours, theirs = (set(bench.LEARNERS[n].tokens(bench.LEARNERS[n].learn(web[0].path, 2000, 1))) for n in ("lmcourse", who))
    assert len(ours) == len(theirs) == 1999 and len(ours & theirs) > 1800


def test_the_quarter_is_the_beginning(web, tmp_path):
    part = bench.quarter(web[0], tmp_path)
    texts = bench.file_documents(web[0].path)
    assert bench.file_documents(part.path) == texts[:part.documents] and part.documents == -(-len(texts)//4)
    assert bench.quarter(replace(part, documents=1), tmp_path).documents == 1


# The command

@pytest.mark.parametrize("words, answer", [
    ("bench", "PART"),
    ("bench tokenizr", "did you mean 'tokenizer'"),
    ("bench tokenizer --data storys", "did you mean 'stories'"),
    ("bench tokenizer --data web web", "each once"),
    ("bench tokenizer --data text:nowhere.txt", "nowhere.txt: no such file"),
    ("bench tokenizer --data text:letter.txt", "nothing is left for training"),
    ("bench tokenizer --max-mb 0", "max_mb = 0.0, expected 0.01 or more"),
    ("bench tokenizer --threads 0", "threads = 0, expected 1 or more"),
    ("bench tokenizer --rounds 0", "rounds = 0, expected 1 or more"),
    ("bench tokenizer --out letter.txt", "letter.txt exists"),
    ("bench tokenizer --out none/results.json", "none: no such folder"),
])
def test_a_mistake_is_one_line_and_leaves_nothing(tmp_path, words, answer):
    (tmp_path/"letter.txt").write_text("a")
    done = processes.here(*words.split(), cwd=tmp_path)
    assert done.returncode == 2 and not done.stdout and done.stderr.startswith("lmcourse: ") and done.stderr.count("\n") == 1 and answer in done.stderr, done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["letter.txt"]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_what_is_stopped_leaves_nothing(tmp_path, how):
    env = os.environ | {"TMPDIR": str(tmp_path)}
    words = "bench tokenizer --data stories --max-mb 0.1 --out results.json".split()
    process = subprocess.Popen([sys.executable, "-m", "lmcourse", *words], cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True, start_new_session=True)
    while "distinct words" not in process.stdout.readline(): assert process.poll() is None
    if processes.TOLD: processes.wait_for(lambda: processes.children(process.pid))    # it is learning
    workers = processes.children(process.pid)
    os.killpg(process.pid, how)                                 # as a terminal does
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130 and err == "lmcourse: interrupted\n"
    assert list(tmp_path.iterdir()) == [] and processes.gone(*workers)


@pytest.mark.slow
def test_the_whole_bench(tmp_path):
    done = lmcourse("bench", "tokenizer", "--max-mb", 0.1, "--rounds", 2, "--out", "results.json", cwd=tmp_path, env=os.environ | {"LMCOURSE_DATA": ""})
    assert done.returncode == 0 and not done.stderr, done.stderr
    here = ["lmcourse", *bench.present(bench.PEERS)]
    for words in ("stories: learning 10,000 tokens", "web: encoding with a vocabulary of", "What more threads gain", "Memory at its peak", "made", "loaded"):
        assert words in done.stdout
    assert ("not installed, so not measured" in done.stdout) == (len(here) < 4)
    results = json.loads((tmp_path/"results.json").read_text())
    training = [m for m in results["measured"] if m["task"] == "training"]
    assert {m["name"] for m in training} == set(here) - {"tiktoken"} and {len(m["wall_s"]) for m in training} == {2}
    encoding = {(m["task"], m["name"], m["threads"]) for m in results["measured"] if m["task"] in bench.TASKS}
    assert encoding == set(bench.encoding_jobs([1, 2]))
    first = [m for m in results["measured"] if m["task"] == "first use"]
    assert [m["cache"] for m in first] == ["empty", "filled"]
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]
