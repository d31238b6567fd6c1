"`lmcourse curate`: the same documents from any engine, interrupted or not; every input is kept or dropped for a reason; mistakes are one line."
import contextlib
import gzip
import json
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import CancelledError
from functools import partial
from importlib.machinery import ModuleSpec
from itertools import islice
from pathlib import Path
from types import ModuleType

import pytest
from little_hub import parquet
from processes import here

from lmcourse.curation import pipeline
from lmcourse.curation.pipeline import (
    STEPS, CorpusStep, Funnel, Recipe, Stage, curate, dask_map, digest, each, kept_documents, read_funnel, read_shard, register_step, shard_files, kept_digest)
from lmcourse.curation.warc import write_warc
from lmcourse.curation.web import Document, held_out_stories, planted_web
from lmcourse.tokenization.tokenizer import Tokenizer
from lmcourse.tools.config import UserError
from lmcourse.tools.documents import documents
from lmcourse.tools.stories import Stories
from lmcourse.training.data import TokenDataset

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
    (folder / "tests.txt").write_text("<|endoftext|>".join(held_out_stories(stories=20)), encoding="utf-8")
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
    assert "near copy" in done and kept_digest(out) in (out / "card.md").read_text() and str(len(kept)) in done
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


def test_from_a_crawl_to_a_model(crawl, done, tmp_path):
    corpus = f"curated:{crawl / 'out'}"
    for words in (("tokenizer", corpus, "tok", "--vocab-size", 300), ("prepare", corpus, "data", "--tokenizer", "tok", "--valid-documents", 4, "--threads", 1),
                  ("train", "data", "run", "--steps", 3, *"--context-length 64 --d-model 16 --num-layers 1 --windows random --eval-documents 4 --device cpu".split())):
        result = here(*words, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
    texts, seen = {d.text for d in kept_documents(crawl / "out")}, []
    for split in ("train", "valid"):
        data = TokenDataset.open(tmp_path / "data" / split)
        tokenizer = Tokenizer.from_folder(tmp_path / "data" / "tokenizer")
        seen.append([tokenizer.decode(data.tokens[a:b]).removesuffix("<|endoftext|>") for a, b in zip(data.starts, data.ends)])
    assert set(seen[0] + seen[1]) == texts and len(seen[1]) == 1 and not set(seen[0]) & set(seen[1])
    story = here("generate", "run", "--prompt", "Once", "--max-tokens", 8, "--seed", 1, cwd=tmp_path)
    assert story.returncode == 0 and "Once" in story.stdout, story.stderr
    bad = here("prepare", f"curated:{tmp_path / 'run'}", "more", "--tokenizer", "tok", cwd=tmp_path)
    assert bad.returncode == 2 and "expected a folder that `lmcourse curate` has finished" in bad.stderr and bad.stderr.count("\n") == 1


def test_two_processes_and_a_single_file_give_the_same(crawl, done):
    two = here("curate", "in", "two", "--recipe", "recipe.toml", "--workers", 2, cwd=crawl)
    assert two.returncode == 0 and two.stdout.replace("two", "out") == done and kept_digest(crawl / "two") == kept_digest(crawl / "out")
    distributed = pytest.importorskip("distributed")
    with contextlib.chdir(crawl), distributed.Client(processes=False, dashboard_address=None) as client: curate("in", "dask", Recipe.load("recipe.toml"), dask_map(client))
    assert kept_digest(crawl / "dask") == kept_digest(crawl / "out")


@pytest.mark.parametrize("lost, error, words", [
    ("wait_for_workers", TimeoutError("Only 0/1 workers arrived after 30s"), "Only 0/1 workers arrived after 30s"), ("run", ModuleNotFoundError("No module named 'lmcourse'"), "on a worker: No module"), ("late", ModuleNotFoundError("No module named 'lmcourse'"), "on a worker: No module"),
    ("gather", CancelledError("_numbered-3 cancelled for reason: scheduler-connection-lost.\nClient lost it"), "connection-lost; go on with the same command"), ("gather", None, "died; go on with the same command")])
def test_a_dask_cluster_that_is_lost_or_of_no_use_is_one_line(monkeypatch, lost, error, words):
    "With a cluster of no machines."
    class Killed(Exception): pass
    def fails(*args): raise error or Killed("Workers died. See the manual.")
    client = type("Client", (), dict.fromkeys(("__init__", "wait_for_workers", "run", "gather"), lambda *args: None) | dict(map=lambda *args, **kw: []) | {lost: fails})
    for name, fields in dict(distributed=dict(Client=client, KilledWorker=Killed, __spec__=ModuleSpec("distributed", None)), comm=dict(CommClosedError=ConnectionError)).items():
        module = ModuleType(name)
        vars(module).update(fields)
        monkeypatch.setitem(sys.modules, name if name == "distributed" else f"distributed.{name}", module)
    with pytest.raises(UserError, match=re.escape("dask 'tcp://here:1': ") + ".*" + re.escape(words)):
        apply = dask_map("tcp://here:1")
        if lost == "late": client.run = fails                       # A worker that came between two rounds
        apply(print, [])


def test_parquet_is_read_like_json_lines(tmp_path):
    (source := tmp_path/"in").mkdir()
    rows = dict(id=[7, None, 9, 10], url=["u", None, "v", "w"], text=["One text.", "Two texts.", None, "x"*99], vector=[[0.]]*4)
    (source/"a.parquet").write_bytes(parquet(**rows))
    assert [(*d, why) for d, why in read_shard(source/"a.parquet", max_bytes=50)] == [
        ("7", "u", "One text.", ""), ("a.parquet:00000001", "", "Two texts.", ""), ("9", "v", "", "no text"), ("10", "w", "", "too long")]
    (source/"b.jsonl").write_text('\ufeff{"text": "One text."}\r\n\r\n{"text": "Three."}\r\n', encoding="utf-8")
    assert shard_files(tmp_path) == [source/"a.parquet", source/"b.jsonl"]
    curate(source, tmp_path/"out", Recipe.from_dict(dict(steps=[dict(step="exact")])))
    assert sorted(d.text for d in kept_documents(tmp_path/"out")) == ["One text.", "Three.", "Two texts.", "x"*99]


def test_parquet_without_texts_is_named(tmp_path):
    for content, words in ((parquet(body=["a"]), "a.parquet: row 1, expected a column called text with strings: {'body': 'a'}"), (b"PAR1", "a.parquet: can't be read as Parquet")):
        (tmp_path/"a.parquet").write_bytes(content)
        with pytest.raises(ValueError, match=re.escape(words)): list(read_shard(tmp_path/"a.parquet"))


def test_a_blank_line_keeps_the_numbers_of_lines(tmp_path):
    (tmp_path/"a.jsonl").write_text('{"text": "a"}\n\n{"text": "b"}\n{}\n')
    with pytest.raises(ValueError, match="a.jsonl: line 4, expected an object with a text"): list(read_shard(tmp_path/"a.jsonl"))


@pytest.mark.parametrize("name", ["b.csv", "sub/page.html", "b.jsonl.zst", "B.CSV", "B.JSONL.GZ", "b.ndjson", "b.jsonl.lz4", "b.arrow", "b.tar.gz", "b.tgz"])
def test_a_text_in_another_format_is_not_left_out_without_a_word(tmp_path, name):
    for file in ("a.jsonl", "SHA256SUMS", "recipe.json", "dataset_infos.json", name): # None of the others is a text
        (tmp_path/file).parent.mkdir(exist_ok=True)
        (tmp_path/file).write_text("")
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path/name}: expected files that end in .warc, ")): shard_files(tmp_path)
    (tmp_path/name).unlink()
    assert shard_files(tmp_path) == [tmp_path/"a.jsonl"]


def test_hidden_files_are_no_shards(tmp_path):
    (tmp_path/".ipynb_checkpoints").mkdir()
    for name in ("a.jsonl", "._a.jsonl", ".ipynb_checkpoints/a.jsonl"): (tmp_path/name).write_text("")
    assert shard_files(tmp_path) == [tmp_path/"a.jsonl"]


@pytest.mark.parametrize("jobs", [0, 1, 4, 6, 11])
def test_killed_anywhere_it_goes_on(crawl, done, jobs, tmp_path):
    code = ("import os, signal, sys; from lmcourse.curation.pipeline import *; n = [0]\n"
            "def dying(f, items):\n for x in items:\n  if n[0] == int(sys.argv[2]): os.kill(os.getpid(), signal.SIGKILL)\n  n[0] += 1; yield f(x)\n"
            "curate('in', sys.argv[1], Recipe.load('recipe.toml'), dying)")
    died = subprocess.run([sys.executable, "-c", code, tmp_path / "out", str(jobs)], cwd=crawl)
    assert died.returncode == -signal.SIGKILL
    again = here("curate", "in", tmp_path / "out", "--recipe", "recipe.toml", cwd=crawl)
    assert again.returncode == 0, again.stderr
    assert kept_digest(tmp_path / "out") == kept_digest(crawl / "out") and read_funnel(tmp_path / "out").rows() == read_funnel(crawl / "out").rows()


def test_a_mended_file_is_read_again_and_the_others_are_not(crawl, done, tmp_path):
    "The rounds that follow count all files, so they are done again, too"
    (tmp_path / "in").mkdir()
    for path in (crawl / "in").iterdir(): (tmp_path / "in" / path.name).write_bytes(path.read_bytes())
    more, right = tmp_path / "in" / "more.jsonl", (crawl / "in" / "more.jsonl").read_text()
    run = partial(here, "curate", tmp_path / "in", tmp_path / "out", "--recipe", "recipe.toml", cwd=crawl)
    more.write_text('{"text": 5}\n' + right)
    assert (bad := run()).returncode == 2 and "more.jsonl: line 1" in bad.stderr
    first = tmp_path / "out" / "work" / "0" / "00000.jsonl"
    made = first.stat().st_mtime_ns
    more.write_text(right.partition("\n")[0] + "\n")                # Mended once, and killed in the second round
    with contextlib.chdir(crawl), pytest.raises(KeyboardInterrupt):
        def stopping(f, items):
            if f.keywords["k"] == 1: f(items[0]); raise KeyboardInterrupt
            return map(f, items)
        curate(tmp_path / "in", tmp_path / "out", Recipe.load("recipe.toml"), stopping)
    assert first.stat().st_mtime_ns == made and (tmp_path / "out" / "work" / "1" / "00000.json").exists()
    more.write_text(right)
    assert (good := run()).returncode == 0, good.stderr
    assert kept_digest(tmp_path / "out") == kept_digest(crawl / "out") and read_funnel(tmp_path / "out").rows() == read_funnel(crawl / "out").rows()
    more.write_text(right + right)
    assert (finished := run()).returncode == 2 and "begun with other input files" in finished.stderr


def test_a_run_that_was_stopped_goes_on_in_another_place_and_from_another_folder(tmp_path):
    (old := tmp_path / "old" / "in").mkdir(parents=True)
    for i in range(3): (old / f"{i}.jsonl").write_text(json.dumps(dict(text=f"text {i}")) + "\n")
    recipe, seen = Recipe.from_dict(dict(steps=[dict(step="exact")])), []
    def stopping(f, items):
        f(items[0])
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt): curate(old, tmp_path / "old" / "out", recipe, stopping)
    (tmp_path / "old").rename(tmp_path / "new")
    def watched(f, items):
        seen.extend(items)
        return map(f, items)
    with contextlib.chdir(tmp_path / "new"): assert curate("in", "out", recipe, watched).stages[-1].kept[0] == 3
    job = json.loads((mark := tmp_path / "new" / "out" / "job.json").read_text())
    mark.write_text(json.dumps(job | dict(inputs={f"/whole/path/{l}": n for l, n in job["inputs"].items()})))
    assert curate(tmp_path / "new" / "in", tmp_path / "new" / "out", recipe).stages[-1].kept[0] == 3
    assert all(Path(path).is_absolute() for _, path, _ in seen), "a worker may have been started elsewhere"


def test_one_process_at_a_time_and_what_a_killed_one_left_of_the_mark(tmp_path):
    (tmp_path / "in.jsonl").write_text(json.dumps(dict(text="a")) + "\n")
    call = partial(curate, tmp_path / "in.jsonl", out := tmp_path / "out", Recipe.from_dict(dict(steps=[dict(step="exact")])))
    out.mkdir()
    (out / "job.json.tmp").write_text("{")
    def second(f, items):
        made = (out / "job.json").read_bytes()
        for text in (["a"], ["a", "b"]):                    # Nor is a file read again that was mended meanwhile
            (tmp_path / "in.jsonl").write_text("".join(json.dumps(dict(text=t)) + "\n" for t in text))
            with pytest.raises(BlockingIOError, match="another process is writing these files"): call()
        assert (out / "job.json").read_bytes() == made
        return map(f, items)
    assert call(apply=second).stages[-1].kept[0] == 2


@pytest.mark.parametrize("name", ["write_text", "write_json", "remove"])
def test_stopped_at_the_end_it_goes_on(name, tmp_path, monkeypatch):
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(dict(text=t)) + "\n" for t in "abca"))
    call = partial(curate, tmp_path / "in.jsonl", tmp_path / "out", Recipe.from_dict(dict(steps=[dict(step="exact")])))
    whole = getattr(pipeline, name)
    def stop(path, *args, **more):
        if path.name in ("dropped.jsonl", "funnel.json", "work"): raise KeyboardInterrupt
        return whole(path, *args, **more)
    monkeypatch.setattr(pipeline, name, stop)
    with pytest.raises(KeyboardInterrupt): call()
    monkeypatch.undo()
    assert call().stages[-1].kept == (3, 3) and {p.name for p in (tmp_path / "out").iterdir()} == {"job.json", "documents", "dropped.jsonl", "funnel.json", "card.md"}


@pytest.mark.parametrize("words, recipe, said", [
    ("in new", '[[steps]]\nstep = "gohper"\n', "unknown step 'gohper'"), ("in new", '[[steps]]\nstep = "minhash"\nbands = 40\n', "bands x rows = 40 x 6 = 240"),
    ("in out", '[[steps]]\nstep = "exact"\n', "out: made with another recipe"), ("more.jsonl out", None, "begun with other input files"), ("no.warc new", None, "no.warc: b'<html', expected"),
    ("in new", "steps = 3\n", "a list called steps"), ("in new", "[[steps\n", "not TOML"), ("in new", b"steps = '\xff'", "not UTF-8 (byte 9)"), ("nowhere new", None, "nowhere: no such file"), ("empty new", None, "expected files that end in"),
    ("in mine", None, "not empty, and not a folder of"), ("in in", None, "expected a folder outside of in"), ("in in/new/out", None, "expected a folder outside of in"), ("in new --workers 0", None, "workers = 0"), ("in new --workers 2 --dask here", None, "can't go together"),
    ("in out", STEPS_TOML.replace("tests.txt", "tests2.txt"), "out: made with another recipe"), ("bad.jsonl new", None, "bad.jsonl: line 2"), ("latin.txt new", None, "latin.txt: document 2, expected UTF-8"),
    ("in new", '[[steps]]\nstep = "quality"\nmost = 2\n', "quality: most = 2, expected 0 to 1"), ("in new", '[[steps]]\nstep = "nsfw"\nleast = 0.5\n', "step 'nsfw':"),
    ("in new", '[[steps]]\nstep = "toxic"\nmost = nan\n', "toxic: most = nan"), ("in new", '[[steps]]\nstep = "perplexity"\n', "step 'perplexity':"),
    ("in new", '[[steps]]\nstep = "perplexity"\nmost = 1\n', "perplexity: most = 1, expected more than 1"), ("in new", '[[steps]]\nstep = "perplexity"\nmost = 50\norder = 0\n', "order = 0"),
    ("in new", '[[steps]]\nstep = "perplexity"\nmost = 50\nlike = "none.txt"\n', "none.txt"), ("in new", '[[steps]]\nstep = "dsir"\nshare = 0\n', "dsir: share = 0, expected 0 to 1"),
    ("in new", '[[steps]]\nstep = "dsir"\nshare = 0.5\nseed = -1\n', "dsir: seed = -1"),
    ("in new", '[[steps]]\nstep = "dsir"\nshare = 0.5\nseed = 1.5\n', "dsir: seed = 1.5"), ("in new", '[[steps]]\nstep = ["exact"]\n', "with the key step"),
    ("in new", '[[steps]]\nstep = "language"\nleast = 5\n', "language: least = 5, expected 0 to 1"), ("in new", '[[steps]]\nstep = "decontaminate"\ntests = [1, 2]\n', "expected a list of texts"),
    ("in new", '[[steps]]\nstep = "decontaminate"\ntests = "tests.txt"\nngram = 0\n', "ngram = 0"), ("in new", '[[steps]]\nstep = "decontaminate"\ntests = "tests.txt"\nngram = 2.5\n', "ngram = 2.5"), ("in new", '[[steps]]\nstep = "quality"\nmost = "high"\n', "step 'quality':"),
    ("in new", '[[steps]]\nstep = "decontaminate"\ntests = "none.txt"\n', "none.txt")])
def test_mistakes_are_one_line(crawl, done, words, recipe, said):
    (crawl / "empty").mkdir(exist_ok=True)
    (crawl / "more.jsonl").write_text('{"text": "one"}\n')
    (crawl / "bad.jsonl").write_text('{"text": "one"}\n{"txt": "two"}\n')
    (crawl / "latin.txt").write_bytes("one<|endoftext|>é".encode("latin-1"))
    (crawl / "no.warc").write_text("<html>")
    (crawl / "tests2.txt").write_text("one two three")
    (crawl / "mine").mkdir(exist_ok=True)
    (crawl / "mine" / "notes").write_text("")
    if recipe: (crawl / "other.toml").write_bytes(recipe if isinstance(recipe, bytes) else recipe.encode())
    out = here("curate", *words.split(), "--recipe", "other.toml" if recipe else "recipe.toml", cwd=crawl)
    assert out.returncode == 2 and said in out.stderr and out.stderr.count("\n") == 1, (out.returncode, out.stderr, out.stdout)
    subprocess.run(["rm", "-rf", crawl / "new"])


QUALITY_TOML = """
[[steps]]
step = "quality"

[[steps]]
step = "nsfw"
most = 0.2

[[steps]]
step = "toxic"
most = 0.4

[[steps]]
step = "perplexity"
most = 3000
like = "good.txt"
order = 3

[[steps]]
step = "minhash"

[[steps]]
step = "dsir"
share = 0.8
seed = 4
like = "good.txt"
"""


def test_filters_of_the_quality_page_by_name_on_every_engine(crawl, tmp_path):
    datasets = pytest.importorskip("datasets")
    (crawl / "good.txt").write_text("<|endoftext|>".join(islice(Stories(seed=96), 300)), encoding="utf-8")
    (crawl / "quality.toml").write_text(QUALITY_TOML)
    out = here("curate", "in", tmp_path / "plain", "--recipe", "quality.toml", cwd=crawl)
    assert out.returncode == 0 and not out.stderr, out.stderr
    funnel, kept = read_funnel(tmp_path / "plain"), kept_digest(tmp_path / "plain")
    assert [set(s.dropped) for s in funnel.stages[1:]] == [{r} for r in ("low quality", "nsfw", "toxic", "surprising", "near copy", "not drawn")]
    assert funnel.stages[-1].kept[0] == round(.8*funnel.stages[-1].documents)
    truth = {p.id: p.kind for p in planted_web(240, seed=9)}
    gone = {r: [truth[g["id"]] for g in map(json.loads, (tmp_path / "plain" / "dropped.jsonl").read_text().splitlines()) if g["reason"] == r and g["id"] in truth]
            for r in ("low quality", "nsfw", "toxic", "surprising")}
    good = ("story", "exact", "near", "pii", "test")
    assert gone["low quality"].count("spam") == 14 and "nsfw" in gone["nsfw"] and set(gone["nsfw"]) <= {"nsfw", "foreign"} and set(gone["toxic"]) <= {"toxic", "noise", "foreign"} and len(gone["toxic"]) >= 4
    assert not set(gone["low quality"]) & set(good) and not set(gone["surprising"]) & {"story", "exact", "test"} and "noise" in gone["surprising"]
    with contextlib.chdir(crawl):
        recipe = Recipe.load("quality.toml")
        documents = sorted(d for p in sorted((crawl / "in").iterdir()) for d, why in read_shard(p) if not why)
        for name, step in recipe.make():                            # The same steps on a table of `datasets`
            table = datasets.Dataset.from_list([d._asdict() for d in documents])
            documents = [Document(*row) for row in zip(*(table[k] for k in Document._fields))]
            if isinstance(step, CorpusStep):
                keep = step.decide(step.sketch(documents), lambda at: [table[int(i)]["text"] for i in at])
                documents = [d for d, stays in zip(documents, keep) if stays]
            else: documents = [d for d, why in step(documents) if not why]
        assert digest(documents) == kept
        code = ("import os, signal, sys; from lmcourse.curation.pipeline import *; n = [0]\n"
                "def dying(f, items):\n for x in items:\n  if n[0] == 8: os.kill(os.getpid(), signal.SIGKILL)\n  n[0] += 1; yield f(x)\n"
                "curate('in', sys.argv[1], Recipe.load('quality.toml'), dying)")
        assert subprocess.run([sys.executable, "-c", code, tmp_path / "killed"]).returncode == -signal.SIGKILL
        assert {p.name for p in (tmp_path / "killed" / "work").iterdir()} == {"0", "1"}
        curate("in", tmp_path / "killed", recipe)
        assert kept_digest(tmp_path / "killed") == kept
        distributed = pytest.importorskip("distributed")
        with distributed.Client(processes=False, dashboard_address=None) as client: curate("in", tmp_path / "dask", recipe, dask_map(client))
        assert kept_digest(tmp_path / "dask") == kept and read_funnel(tmp_path / "dask").rows() == funnel.rows()


def pages_of(web, path, bad):
    "Members of an archive, in which some are damaged: bytes, and where the members begin"
    starts = write_warc(path, web)
    data = bytearray(path.read_bytes())
    ends = [*starts[1:], len(data)]
    for k, how in bad.items():
        if how == "flip": data[(starts[k] + ends[k])//2] ^= 4
        if how == "head": data[starts[k]] ^= 1
        if how == "sum": data[ends[k] - 6] ^= 1
    if "cut" in bad.values(): del data[starts[-1] + 100:]
    path.write_bytes(data)
    return starts, ends


@pytest.mark.parametrize("bad", [{4: "flip"}, {4: "sum"}, {4: "head"}, {0: "flip"}, {29: "cut"}, {4: "flip", 9: "sum", 10: "flip", 29: "cut"}], ids=str)
def test_damaged_archives_lose_their_damaged_members_and_say_which(bad, tmp_path):
    web = planted_web(30, seed=12)
    starts, ends = pages_of(web, path := tmp_path / "web.warc.gz", bad)
    found = list(read_shard(path))
    lost = [d.id for d, why in found if why == "unreadable"]
    runs = [k for k in bad if k - 1 not in bad]                     # Neighbours are one place
    assert len(lost) == len(runs) and [int(i.partition("@")[2].split("-")[0]) for i in lost] == [starts[k] for k in runs]
    assert all(int(i.rsplit("-")[1]) in ends or "cut" in bad.values() for i in lost) and lost[0].startswith("web.warc.gz@")
    assert [d.id for d, why in found if why != "unreadable"] == [p.id for k, p in enumerate(web) if k not in bad]
    write_warc(tmp_path / "whole.warc.gz", web)
    whole = {d.id: (d, why) for d, why in read_shard(tmp_path / "whole.warc.gz")}
    assert all(whole[d.id] == (d, why) for d, why in found if why != "unreadable")
    funnel = curate(path, tmp_path / "out", Recipe.from_dict(dict(steps=[dict(step="length")])))
    assert funnel.stages[0].documents == len(found) and funnel.stages[0].dropped["unreadable"] == [len(runs), 0]
    gone = [json.loads(line) for line in (tmp_path / "out" / "dropped.jsonl").read_text().splitlines()]
    assert [g["id"] for g in gone if g["reason"] == "unreadable"] == lost and "unreadable" in (tmp_path / "out" / "card.md").read_text()


def test_a_plain_archive_that_is_damaged(tmp_path):
    web = planted_web(12, seed=13)
    write_warc(tmp_path / "web.warc.gz", web)
    data = gzip.decompress((tmp_path / "web.warc.gz").read_bytes())
    at = data.index(b"WARC/", data.index(b"urn:lmcourse:00005") - 200)
    (tmp_path / "a.warc").write_bytes(data[:at] + b"#" + data[at:])
    (tmp_path / "b.warc").write_bytes(data[:-300])
    a, b = (list(read_shard(tmp_path / f"{n}.warc")) for n in "ab")
    assert [d.id for d, _ in b] == [*(f"{i:05}" for i in range(11)), b[-1][0].id] and b[-1][1] == "unreadable" and b[-1][0].id.startswith("b.warc@")
    assert [d.id for d, why in a if why != "unreadable"] == [f"{i:05}" for i in range(12) if i != 5] and f"a.warc@{at}-" in "".join(d.id for d, _ in a)


def test_damaged_lines_and_texts(tmp_path):
    rows = [json.dumps(dict(text=f"text number {i}")).encode() + b"\n" for i in range(9)]
    members = [gzip.compress(b"".join(rows[i:i + 3])) for i in (0, 3, 6)]
    flipped = bytearray(members[1])
    flipped[20] ^= 8
    (tmp_path / "a.jsonl.gz").write_bytes(members[0] + flipped + members[2])
    found = [(d.id, d.text, why) for d, why in read_shard(tmp_path / "a.jsonl.gz")]
    assert [t for _, t, why in found if not why] == [f"text number {i}" for i in (0, 1, 2, 6, 7, 8)]
    assert [(i, why) for i, _, why in found if why] == [(f"a.jsonl.gz@{len(members[0])}-{len(members[0]) + len(flipped)}", "unreadable")]
    (tmp_path / "cut.jsonl.gz").write_bytes(members[0] + members[1][:-5])
    assert [why for _, why in read_shard(tmp_path / "cut.jsonl.gz")] == ["", "", "", "unreadable"]
    (tmp_path / "zeros.jsonl.gz").write_bytes(members[0] + bytes(700) + members[1] + bytes(9))
    assert [why for _, why in read_shard(tmp_path / "zeros.jsonl.gz")] == [""]*6
    (tmp_path / "tail.jsonl.gz").write_bytes(members[0] + b"no gzip")
    assert [why for _, why in read_shard(tmp_path / "tail.jsonl.gz")] == ["", "", "", "unreadable"]
    (tmp_path / "no.jsonl.gz").write_bytes(b"no gzip")
    assert [(d.id, why) for d, why in read_shard(tmp_path / "no.jsonl.gz")] == [("no.jsonl.gz@0-7", "unreadable")]
    texts = [gzip.compress(t.encode()) for t in ("one<|endoftext|>tw", "o<|endo", "ftext|>three<|endoftext|>", "four<|endoftext|>five")]
    damaged = texts[1][:15] + b"?" + texts[1][16:]
    (tmp_path / "b.txt.gz").write_bytes(b"".join(texts))
    assert [d.text for d, _ in read_shard(tmp_path / "b.txt.gz")] == ["one", "two", "three", "four", "five"]
    (tmp_path / "b.txt.gz").write_bytes(b"".join((texts[0], damaged, *texts[2:])))
    assert [(d.text, why) for d, why in read_shard(tmp_path / "b.txt.gz")] == [
        ("one", ""), ("tw", "fragment"), ("", "unreadable"), ("ftext|>three", "fragment"), ("four", ""), ("five", "")]


def test_records_longer_than_memory_and_null_bytes_are_counted(tmp_path):
    long = json.dumps(dict(text="x"*5000))
    (tmp_path / "a.jsonl").write_text(f'{{"text": "one"}}\n{long}\n{{"text": "\\u0000"}}\n{{"text": "two \\ud800"}}')
    assert [(d.text, why) for d, why in read_shard(tmp_path / "a.jsonl", 1000)] == [("one", ""), ("", "too long"), ("\0", "no text"), ("two ?", "")]
    (tmp_path / "b.txt").write_text("<|endoftext|>".join(("one", "y"*2_000_000, "\0"*9, "two", "z"*2000)))
    assert [(d.id, why) for d, why in read_shard(tmp_path / "b.txt", 1000)] == [
        (f"b.txt:{i:08}", why) for i, why in enumerate(("", "too long", "no text", "", "too long"))]
    write_warc(tmp_path / "c.warc.gz", web := planted_web(20, seed=1))
    assert {why for _, why in read_shard(tmp_path / "c.warc.gz", 1500)} >= {"", "truncated"} and len(list(read_shard(tmp_path / "c.warc.gz", 1500))) == len(web)


def test_a_step_may_be_a_partial_function():
    try:
        for _ in range(2): register_step("mine")(partial(STEPS["length"], min_words=3))      # A cell that is run twice
        with pytest.raises(ValueError, match="'mine' is there already"): register_step("mine")(partial(STEPS["gopher"]))
    finally: STEPS.pop("mine", None)


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


def test_the_words_beside_a_bar_name_its_parts_from_left_to_right():
    pytest.importorskip("matplotlib").use("Agg")
    axes = Funnel([Stage("a", 50, 500, {"few": [2, 20], "many": [30, 300], "$x$": [10, 9]})]).plot()
    assert [t.get_text() for t in axes.texts] == ["8 kept, 30 many, 10 $x$, 2 few"] and not axes.texts[0].get_parse_math()
    assert [(b.get_x(), b.get_width()) for b in axes.patches] == [(0, 8), (8, 30), (38, 10), (48, 2)]
    assert all(a.get_facecolor() != b.get_facecolor() for a, b in zip(axes.patches, axes.patches[1:]))
    assert len({b.get_facecolor()[:3] for b in axes.patches}) == 2 # Kept and dropped


def test_a_digest_forgets_the_order():
    docs = [Document("a", "", "x"), Document("b", "", "y")]
    assert digest(docs) == digest(docs[::-1]) != digest([docs[0], docs[1]._replace(text="x")])


def test_files_of_each_kind(tmp_path):
    for name in ("a.jsonl", "a.jsonl.gz", "b.txt", "b.txt.gz"):
        data = b'{"text": "one", "id": 7}\n' if "jsonl" in name else "é<|endoftext|>two".encode()
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
        found = [(d.id, d.text, why) for d, why in read_shard(tmp_path / name)]
        assert found == ([("7", "one", "")] if "jsonl" in name else [(f"{name}:00000000", "é", ""), (f"{name}:00000001", "two", "")])
    assert isinstance(STEPS["exact"](), CorpusStep)
    (tmp_path / "c.jsonl").write_text('{"text": "one", "id": null, "url": null}\n{"text": "two", "id": 0}\n')
    assert [d for d, _ in read_shard(tmp_path / "c.jsonl")] == [("c.jsonl:00000000", "", "one"), ("0", "", "two")]


def test_files_of_one_name_in_two_folders_have_different_documents(tmp_path):
    for folder in "ab":
        (tmp_path / "in" / folder).mkdir(parents=True)
        (tmp_path / "in" / folder / "p.txt").write_text(f"text {folder}<|endoftext|>the same in both")
    curate(tmp_path / "in", tmp_path / "out", Recipe.from_dict(dict(steps=[dict(step="exact")])))
    assert [d.id for d in kept_documents(tmp_path / "out")] == ["a/p.txt:00000000", "a/p.txt:00000001", "b/p.txt:00000000"]
    assert json.loads((tmp_path / "out" / "dropped.jsonl").read_text())["id"] == "b/p.txt:00000001"


def test_a_second_run_reads_its_files_and_finds_its_steps_again(tmp_path):
    "In one process, into a new folder, with the same recipe"
    (tmp_path / "in.txt").write_text("one two three four<|endoftext|>five six seven eight")
    recipe = dict(steps=[dict(step="decontaminate", tests=str(tmp_path / "tests.txt"), ngram=3), dict(step="mine")])
    try:
        for k, (text, left) in enumerate((("one two three four", "FIVE six"), ("five six seven eight", "one TWO"))):
            (tmp_path / "tests.txt").write_text(text)
            register_step("mine")(lambda left=left: each(lambda d: (d._replace(text=left), "")))
            curate(tmp_path / "in.txt", tmp_path / f"out{k}", Recipe.from_dict(recipe))
            kept, = kept_documents(tmp_path / f"out{k}")
            assert kept.text == left and kept.id == f"in.txt:0000000{1 - k}"
    finally: del STEPS["mine"]


def test_a_file_of_the_recipe_that_was_edited_is_read_again(tmp_path):
    "In the same process and the same folder."
    texts, tests, out = ["one two three four five six seven eight nine ten", "red green blue white black brown pink gold grey teal"], tmp_path / "tests.jsonl", tmp_path / "out"
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text("".join(json.dumps(dict(id=str(i), text=t)) + "\n" for i, t in enumerate(texts)))
    for test, kept in (texts, texts[::-1]):
        tests.write_text(json.dumps(dict(text=test)) + "\n")
        shutil.rmtree(out, ignore_errors=True)
        curate(tmp_path / "in", out, Recipe.from_dict(dict(steps=[dict(step="decontaminate", tests=str(tests))])))
        assert [d.text for d in kept_documents(out)] == [kept]


def test_a_step_that_was_registered_anew_is_used_in_the_same_folder(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    try:
        for bad, kept in (("one", "two"), ("two", "one")):
            register_step("mine")(lambda bad=bad: each(lambda d: (d, "bad" if d.text == bad else "")))
            shutil.rmtree(tmp_path / "out", ignore_errors=True)
            curate(tmp_path / "in.jsonl", tmp_path / "out", Recipe.from_dict(dict(steps=[dict(step="mine")])))
            assert [d.text for d in kept_documents(tmp_path / "out")] == [kept]
    finally: del STEPS["mine"]


def test_workers_elsewhere_find_the_files_of_a_recipe(tmp_path):
    (here := tmp_path / "here").mkdir()
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (here / "in.jsonl").write_text('{"text": "one two three"}\n{"text": "four five six"}\n')
    (here / "tests.txt").write_text("four five six")
    def away(f, items):
        pipeline._rounds.cache_clear()                          # A worker has its own
        with contextlib.chdir(elsewhere): return [f(item) for item in items]
    with contextlib.chdir(here):
        curate("in.jsonl", "out", Recipe.from_dict(dict(steps=[dict(step="decontaminate", tests="tests.txt", ngram=3)])), away)
        assert [d.text for d in kept_documents("out")] == ["one two three"]
        assert json.loads(Path("out/job.json").read_text())["recipe"]["steps"][0]["tests"] == "tests.txt"


def test_a_disk_without_links_and_an_id_that_is_no_text(tmp_path, monkeypatch):
    (tmp_path / "in.jsonl").write_text('{"id": "\\ud800", "text": "one"}\n')
    def refuse(old, new): raise PermissionError(1, "Operation not permitted", str(old))
    monkeypatch.setattr(pipeline.os, "link", refuse)
    curate(tmp_path / "in.jsonl", tmp_path / "out", Recipe.from_dict(dict(steps=[dict(step="exact")])))
    assert [*kept_documents(tmp_path / "out")] == [Document("?", "", "one")]
