"`lmcourse curate`: the same documents from any engine, interrupted or not; every input is kept or dropped for a reason; mistakes are one line."
import contextlib
import gzip
import json
import signal
import subprocess
import sys
from itertools import islice

import pytest
from processes import here

from lmcourse.curation.pipeline import (
    STEPS, Funnel, Recipe, Stage, Whole, curate, dask_map, digest, each, kept_documents, read_funnel, read_shard, register_step, survivors)
from lmcourse.curation.web import Document, planted_web, write_warc
from lmcourse.curation.web import test_set as leaked
from lmcourse.tools.documents import documents
from lmcourse.tools.stories import Stories

STEPS_TOML = """
[[steps]]
step = "length"
min_words = 10

[[steps]]
step = "exact"

[[steps]]
step = "minhash"
threshold = 0.8

[[steps]]
step = "decontaminate"
tests = "tests.txt"
"""


@pytest.fixture(scope="module")
def crawl(tmp_path_factory):
    folder = tmp_path_factory.mktemp("curate")
    (folder / "in").mkdir()
    web = planted_web(240, seed=9)
    for i in range(3): write_warc(folder / "in" / f"{i}.warc.gz", web[i::3])
    stories = list(islice(Stories(seed=97), 6))
    (folder / "in" / "more.jsonl").write_text("".join(json.dumps(dict(text=t)) + "\n" for t in [*stories, stories[2], "\0\0\0"]), encoding="utf-8")
    (folder / "in" / "text.txt.gz").write_bytes(gzip.compress("<|endoftext|>".join([stories[1], "Too short.", stories[5] + " The end."]).encode()))
    (folder / "tests.txt").write_text("<|endoftext|>".join(leaked(stories=20)), encoding="utf-8")
    (folder / "recipe.toml").write_text(STEPS_TOML)
    return folder


@pytest.fixture(scope="module")
def done(crawl):
    out = here("curate", "in", "out", "--recipe", "recipe.toml", cwd=crawl)
    assert out.returncode == 0 and not out.stderr, out.stderr
    return out.stdout


def test_documents_funnel_and_card(crawl, done):
    out = crawl / "out"
    assert {p.name for p in out.iterdir()} == {"job.json", "documents", "dropped.jsonl", "funnel.json", "card.md"}
    funnel, kept = read_funnel(out), list(kept_documents(out))
    gone = [json.loads(line) for line in (out / "dropped.jsonl").read_text().splitlines()]
    assert funnel.stages[0].documents == 240 + 8 + 3 == len(kept) + len(gone)
    assert funnel.stages[-1].kept == (len(kept), sum(len(d.text.split()) for d in kept))
    assert "near copy" in done and survivors(out) in (out / "card.md").read_text() and str(len(kept)) in done
    ids = {g["id"] for g in gone} | {d.id for d in kept}
    assert {"more.jsonl:00000007", "text.txt.gz:00000001"} <= ids and len(ids) == 251
    reasons = {g["id"]: g["reason"] for g in gone}
    assert reasons["more.jsonl:00000007"] == "no text" and reasons["text.txt.gz:00000000"] == "copy" and reasons["text.txt.gz:00000002"] == "near copy"


def test_finished_is_not_done_again_and_its_documents_are_a_corpus(crawl, done):
    before = {p: p.stat().st_mtime_ns for p in (crawl / "out").rglob("*")}
    again = here("curate", "in", "out", "--recipe", "recipe.toml", cwd=crawl)
    assert again.returncode == 0 and again.stdout == done and {p: p.stat().st_mtime_ns for p in (crawl / "out").rglob("*")} == before
    texts = [*documents(f"curated:{crawl / 'out'}", "train"), *documents(f"curated:{crawl / 'out'}", "valid")]
    assert sorted(texts) == sorted(d.text for d in kept_documents(crawl / "out"))


def test_two_processes_and_a_single_file_give_the_same(crawl, done):
    two = here("curate", "in", "two", "--recipe", "recipe.toml", "--workers", 2, cwd=crawl)
    assert two.returncode == 0 and two.stdout.replace("two", "out") == done and survivors(crawl / "two") == survivors(crawl / "out")
    pytest.importorskip("dask")
    with contextlib.chdir(crawl): curate("in", "dask", Recipe.load("recipe.toml"), dask_map())
    assert survivors(crawl / "dask") == survivors(crawl / "out")


@pytest.mark.parametrize("jobs", [0, 1, 4, 6, 11])
def test_killed_anywhere_it_goes_on(crawl, done, jobs, tmp_path):
    code = ("import os, signal, sys; from lmcourse.curation.pipeline import *; n = [0]\n"
            "def dying(f, items):\n for x in items:\n  if n[0] == int(sys.argv[2]): os.kill(os.getpid(), signal.SIGKILL)\n  n[0] += 1; yield f(x)\n"
            "curate('in', sys.argv[1], Recipe.load('recipe.toml'), dying)")
    died = subprocess.run([sys.executable, "-c", code, tmp_path / "out", str(jobs)], cwd=crawl)
    assert died.returncode == -signal.SIGKILL
    again = here("curate", "in", tmp_path / "out", "--recipe", "recipe.toml", cwd=crawl)
    assert again.returncode == 0, again.stderr
    assert survivors(tmp_path / "out") == survivors(crawl / "out") and read_funnel(tmp_path / "out").rows() == read_funnel(crawl / "out").rows()


@pytest.mark.parametrize("words, recipe, said", [
    ("in new", '[[steps]]\nstep = "gohper"\n', "unknown step 'gohper'"), ("in new", '[[steps]]\nstep = "minhash"\nbands = 40\n', "bands x rows = 40 x 6 = 240"),
    ("in out", '[[steps]]\nstep = "exact"\n', "out: made with another recipe"), ("more.jsonl out", None, "begun with other input files"), ("broken.warc.gz new", None, "broken.warc.gz: record"),
    ("in new", "steps = 3\n", "a list called steps"), ("in new", "[[steps\n", "not TOML"), ("nowhere new", None, "nowhere: no such file"), ("empty new", None, "expected files that end in"),
    ("in in", None, "not empty, and not a folder of"), ("in new --workers 0", None, "workers = 0"), ("in new --workers 2 --dask here", None, "can't go together"),
    ("in out", STEPS_TOML.replace("tests.txt", "tests2.txt"), "out: made with another recipe"), ("bad.jsonl new", None, "bad.jsonl: line 2"), ("cut.txt.gz new", None, "cut.txt.gz"), ("in new", '[[steps]]\nstep = "decontaminate"\ntests = "none.txt"\n', "none.txt")])
def test_mistakes_are_one_line(crawl, done, words, recipe, said):
    (crawl / "empty").mkdir(exist_ok=True)
    (crawl / "more.jsonl").write_text('{"text": "one"}\n')
    (crawl / "bad.jsonl").write_text('{"text": "one"}\n{"txt": "two"}\n')
    (crawl / "cut.txt.gz").write_bytes(gzip.compress(b"one two three"*99)[:-9])
    (crawl / "broken.warc.gz").write_bytes((crawl / "in" / "0.warc.gz").read_bytes()[:5000])
    (crawl / "tests2.txt").write_text("one two three")
    if recipe: (crawl / "other.toml").write_text(recipe)
    out = here("curate", *words.split(), "--recipe", "other.toml" if recipe else "recipe.toml", cwd=crawl)
    assert out.returncode == 2 and said in out.stderr and out.stderr.count("\n") == 1, (out.returncode, out.stderr, out.stdout)
    subprocess.run(["rm", "-rf", crawl / "new"])


def test_steps_of_ones_own(tmp_path):
    @register_step("shout")
    def shout(mark="!"): return each(lambda d: (d._replace(text=d.text.upper() + f" {mark} {mark}"), "quiet" if "hush" in d.text else ""))
    try:
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(dict(id=f"d{i}", text=t)) + "\n" for i, t in enumerate(("one", "hush", "two"))))
        funnel = curate(tmp_path / "a.jsonl", tmp_path / "out", Recipe.from_dict(dict(steps=[dict(step="shout", mark="?")])))
        assert [d.text for d in kept_documents(tmp_path / "out")] == ["ONE ? ?", "TWO ? ?"]
        assert vars(funnel.stages[1]) == dict(step="shout", documents=3, words=3, dropped=dict(quiet=[1, 1]), edited=-4) and funnel.stages[1].kept == (2, 6)
    finally: del STEPS["shout"]


def test_funnels_add_up():
    one, two = Funnel([Stage("a", 5, 50, dict(x=[1, 9]), 1), Stage("b", 4, 40, dict(y=[4, 40]))]), Funnel([Stage("a", 2, 7, dict(z=[1, 3])), Stage("b", 1, 4)])
    both = one + two
    assert both.stages[0] == Stage("a", 7, 57, dict(x=[1, 9], z=[1, 3]), 1) and both.stages[-1].kept == (1, 4)


def test_a_digest_forgets_the_order():
    docs = [Document("a", "", "x"), Document("b", "", "y")]
    assert digest(docs) == digest(docs[::-1]) != digest([docs[0], docs[1]._replace(text="x")])


def test_files_of_each_kind(tmp_path):
    for name in ("a.jsonl", "a.jsonl.gz", "b.txt", "b.txt.gz"):
        data = b'{"text": "one", "id": 7}\n' if "jsonl" in name else "é<|endoftext|>two".encode()
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
        found = [(d.id, d.text, why) for d, why in read_shard(tmp_path / name)]
        assert found == ([("7", "one", "")] if "jsonl" in name else [(f"{name}:00000000", "é", ""), (f"{name}:00000001", "two", "")])
    assert isinstance(STEPS["exact"](), Whole)
