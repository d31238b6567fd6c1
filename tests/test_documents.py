"Corpora by name, and the n-grams beside them."
import gzip
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from little_hub import LittleHub, parquet
from lmcourse.tools import documents as module
from lmcourse.tools.documents import HUB, _blocks, _in_documents, corpus_digest, documents, file_rows, held_out, hub_documents, text_column, text_documents
from lmcourse.tools.machine import peak_bytes
from lmcourse.tools.ngram import ngram_losses


TEXT = st.lists(st.sampled_from(["<|endoftext|>", "<|endof", "text|>", "\n", " ", "a", "é", "bc", "好"]), max_size=40).map("".join)


@given(TEXT, st.integers(1, 30))
def test_the_two_parts_of_a_text_are_the_text(tmp_path_factory, text, block):
    file = tmp_path_factory.getbasetemp()/"parts.txt"
    file.write_bytes(text.encode() + b".")
    whole = [list(text_documents(file, split)) for split in ("train", "valid")]
    parts = whole[0] + whole[1]
    assert all(d.strip() and "<|endoftext|>" not in d for d in parts)
    assert "".join("".join(parts).split()) == "".join((text + ".").replace("<|endoftext|>", "").split())
    with pytest.MonkeyPatch.context() as patch:                          # marks and characters that lie across blocks
        patch.setattr(module, "_BLOCK", block)
        pieces = [list(_in_documents(_blocks(file, 0, file.stat().st_size), size)) for size in (None, 20)]
    assert pieces[0] == [d for d in (text + ".").split("<|endoftext|>") if d.strip()]
    limited = "".join(pieces[1])
    assert len(limited.encode()) <= 20 and "".join(pieces[0]).startswith(limited)


@pytest.mark.parametrize("bad, words", [(b"\xff", "not UTF-8 text (byte 0xff at 19900000)"), (b"\0", "a binary file (a zero byte at 19900000)"),
                                        (b"\xe5\xa5", "not UTF-8 text (byte 0xe5 at 19900000)")])
def test_what_is_no_text_is_told_when_it_is_read(tmp_path, bad, words):
    (tmp_path/"book.txt").write_bytes(b"the end\n"*2_487_500 + bad + b"the end\n"*12_500)
    whole, part = (documents(f"text:{tmp_path}/book.txt", "valid", most) for most in (None, 1000))
    assert len("".join(part)) > 900
    with pytest.raises(ValueError, match=re.escape(words)): list(whole)
    (tmp_path/"book.txt").write_bytes(bad)
    with pytest.raises(ValueError, match=re.escape(words.replace("19900000", "0"))): documents(f"text:{tmp_path}/book.txt")


@pytest.mark.parametrize("most", [1, 5, 6, 7, 50, 99, 10_000])
def test_a_text_is_not_longer_than_asked_for(tmp_path, most):
    (tmp_path/"book.txt").write_text("\u00e9t\u00e9 un\n"*30 + "<|endoftext|>" + "\u00e9t\u00e9 deux\n"*30, encoding="utf-8")
    name = f"text:{tmp_path}/book.txt"
    whole, part = ("".join(documents(name, max_bytes=m)) for m in (None, most))
    assert whole.startswith(part) and len(part.encode()) <= most
    if most > 9: assert part == whole or part.endswith("\n") and len(part.encode()) > most - 12


def test_a_path_may_begin_at_home(tmp_path, monkeypatch):
    (tmp_path/"book.txt").write_text("one\ntwo\n"*10)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))                   # Windows
    assert list(documents("text:~/book.txt")) == list(documents(f"text:{tmp_path}/book.txt"))


def test_a_line_is_never_cut(tmp_path):
    (tmp_path/"book.txt").write_text("".join(f"line {i}\n" for i in range(100)))
    train, valid = ("".join(documents(f"text:{tmp_path}/book.txt", s)) for s in ("train", "valid"))
    assert train.endswith("\n") and valid.startswith("line ") and len(valid) < len(train)/5


GROWN = """
import sys
from lmcourse.tools.documents import documents
from lmcourse.tools.machine import peak_bytes
before = peak_bytes()
for split in ("train", "valid"): print(sum(len(text) for text in documents(f"text:{sys.argv[1]}", split, int(sys.argv[2]))))
print(peak_bytes() - before)
"""


@pytest.mark.skipif(peak_bytes() is None, reason="this system does not tell how much memory a process has held")
@pytest.mark.parametrize("line", ["The end of the line.\n", "The end<|endoftext|>"])
def test_a_part_of_a_large_file_is_read_and_not_all_of_it(tmp_path, line):
    (tmp_path/"book.txt").write_text(line*(50_000_000//len(line)), encoding="utf-8")
    done = subprocess.run([sys.executable, "-c", GROWN, tmp_path/"book.txt", "1000000"], capture_output=True, text=True, check=True)
    train, valid, grown = map(int, done.stdout.split())
    assert 999_950 < train <= 1_000_000 and 999_950 < valid <= 1_000_000 and grown < 20e6
    if "<" in line:                                                      # documents come one by one, so all of them need no more than a few
        done = subprocess.run([sys.executable, "-c", GROWN, tmp_path/"book.txt", "1000000000"], capture_output=True, text=True, check=True)
        train, valid, grown = map(int, done.stdout.split())
        assert train + valid == 7*(50_000_000//len(line)) and grown < 20e6


def test_training_and_validation_stories_differ():
    train, valid = (set(documents("stories", s, 500_000)) for s in ("train", "valid"))
    assert len(train) > 500 and not train & valid


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.lists(st.integers(0, 3), max_size=6), st.integers(1, 4))
def test_ngram_probabilities_add_up_to_one(train, prefix, order):
    ends = np.concatenate([[0, *prefix, w] for w in range(4)])
    losses = ngram_losses(np.array([*train, 0]), ends, 4, 0, order)
    assert np.allclose(np.exp(-losses).reshape(order, 4, -1)[:, :, -1].sum(1), 1)


def test_an_ngram_knows_what_always_follows():
    losses = ngram_losses(np.tile([1, 2, 3, 0], 500), np.array([1, 2, 3, 0]), 4, 0, 3)
    assert (losses[1:] < 0.02).all() and (losses[0] > 1).all()


def test_a_corpus_shorter_than_the_ngram_has_a_loss():
    "Each id was seen once, so the discount is 1, and all probability goes to the four ids alike"
    assert np.allclose(ngram_losses(np.array([1, 0]), np.array([1]), 4, 0), np.log(4))


def test_bad_ids_are_refused():
    with pytest.raises(ValueError, match="ids from -1 to 1, expected 0 to 3"): ngram_losses(np.array([1, -1]), np.array([0]), 4, 0)
    with pytest.raises(TypeError, match="ids of float64, expected integers"): ngram_losses(np.array([1, 0]), np.array([1.7]), 4, 0)
    with pytest.raises(ValueError, match="order = 0, expected 1 or more"): ngram_losses(np.array([1, 2]), np.array([0]), 4, 0, 0)


# Repositories of the hub: a server on this machine stands for it

STORIES = [f"Story {i}." for i in range(3000)]
CONFIGS = b"---\nconfigs:\n- config_name: a\n  data_files: a.parquet\n- config_name: b\n  data_files: b.parquet\n---\n"
REPOSITORIES = {
    "roneneldan/TinyStories": {"data/train-00000-of-00002.parquet": parquet(text=STORIES[:2000]), "data/train-00001-of-00002.parquet": parquet(text=STORIES[2000:]),
                               "data/validation-00000-of-00001.parquet": parquet(text=["One.", "Two."]), "TinyStories-train.txt": b"not this"},
    "Skylion007/openwebtext": {"plain_text/train-00000-of-00001.parquet": parquet(text=[*STORIES, *STORIES[:500]]), "README.md":
                               b"---\nconfigs:\n- config_name: plain_text\n  data_files:\n  - split: train\n    path: plain_text/train-*\n  default: true\n---\n"},
    "own/configs": {"README.md": CONFIGS, "a.parquet": parquet(text=["of a"]), "b.parquet": parquet(text=["of b"])},
    "own/texts": {"data/train.parquet": parquet(id=[1, 2, 3, 4], story=["a<|endoftext|>b", None, " \n", "<|endoftext|>c"])},
    "own/jsonl": {"train.jsonl": b'{"text": "one"}\n{"text": "two"}\n', "test.jsonl": b'{"text": "three"}\n'},
    "own/closed": LittleHub.GATED,
    "own/nothing": {"image.bin": b"a"},
    "own/script": {"script.py": b"a"},
    "own/columns": {"data/train.parquet": parquet(question=["a"], answer=["b"])},
    "own/numbers": {"data/train.parquet": parquet(id=[1])},
    "own/empty": {"train.csv": b"text\n"},
    "own/test-only": {"data/test.parquet": parquet(text=["a"])},
    "own/damaged": {"data/train.parquet": b"PAR1" + b"x"*100},
}
ASK = """
import json, os, sys
from lmcourse.tools.documents import documents
def ask(*question):
    texts = []
    try:
        for text in documents(*question): texts.append(text)
    except Exception as e: return [type(e).__name__, str(e), len(texts)]
    return texts
for line in sys.stdin: print("ANSWER", json.dumps(ask(*json.loads(line))), flush=True)
sys.stderr.flush(); os._exit(0)  # A thread of Arrow's that is still there at the end would abort the process
"""


def ask(folder, endpoint, *questions, before="", **environment):
    "What another process gets for calls of `documents`: its texts, or the name and the words of its error and how many texts came before."
    environment = os.environ | dict(HF_HOME=str(folder), HF_ENDPOINT=endpoint, PYTHONPATH=os.pathsep.join(sys.path), OMP_NUM_THREADS="1") | environment
    done = subprocess.run([sys.executable, "-c", before + ASK], input="".join(json.dumps(q) + "\n" for q in questions), env=environment,
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("ANSWER")]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    "One process asks everything, since it needs some seconds to load `datasets`."
    names = ["tinystories", "openwebtext", *(f"hf:{r}" for r in REPOSITORIES), "hf:own/configs:b", "hf:own/configs:c", "hf:own/none", "hf:stories", "hf:a/b/c"]
    questions = [(name, split) for name in names for split in ("train", "valid")] + [("tinystories", "train", 100)]
    with LittleHub(REPOSITORIES, HUB.values()) as hub:         # their branch main is not to be asked for
        found = ask(tmp_path_factory.mktemp("home"), hub.url, *questions)
    return dict(zip(questions, found, strict=True)), hub.requests


def test_named_repositories_are_read_at_their_commits(answers):
    answers, requests = answers
    assert answers["tinystories", "train"] == STORIES and answers["tinystories", "valid"] == ["One.", "Two."]
    assert answers["tinystories", "train", 100] == STORIES[:13]          # 12 are 10*8 + 2*9 bytes, too few
    assert f"GET /datasets/roneneldan/TinyStories/resolve/{HUB['tinystories'][1]}/data/train-00000-of-00002.parquet" in requests
    assert f"GET /datasets/Skylion007/openwebtext/resolve/{HUB['openwebtext'][1]}/plain_text/train-00000-of-00001.parquet" in requests


def test_documents_that_stand_twice_are_held_out_twice_or_not_at_all(answers):
    train, valid = (answers[0]["openwebtext", split] for split in ("train", "valid"))
    assert sorted(train + valid) == sorted(STORIES + STORIES[:500]) and not set(train) & set(valid)
    assert valid == [s for s in STORIES + STORIES[:500] if held_out(s)] and 5 <= len(valid) <= 35


def test_documents_of_rows(answers):
    assert answers[0]["hf:own/texts", "train"] == ["a", "b", "c"]
    assert answers[0]["hf:own/jsonl", "train"] == ["one", "two"]
    assert answers[0]["hf:own/configs:b", "train"] == ["of b"]


@pytest.mark.parametrize("name, error, words", [
    ("hf:own/closed", "PermissionError", "ask for access on https://huggingface.co/datasets/own/closed, then log in with `hf auth login`"),
    ("hf:own/none", "FileNotFoundError", "expected a dataset repository OWNER/NAME of the hub that you may read, a file or a folder (Dataset 'own/none' doesn't exist"),
    ("hf:stories", "FileNotFoundError", "expected a dataset repository OWNER/NAME"),
    ("hf:a/b/c", "FileNotFoundError", "expected a dataset repository OWNER/NAME"),
    ("hf:own/nothing", "FileNotFoundError", "No (supported) data files found in own/nothing"),
    ("hf:own/script", "ValueError", "Dataset scripts are no longer supported"),
    ("hf:own/columns", "ValueError", "no column called text among question, answer, and 2 with strings"),
    ("hf:own/numbers", "ValueError", "no column called text among id, and 0 with strings"),
    ("hf:own/empty", "ValueError", "it has no rows"),
    ("hf:own/test-only", "ValueError", "no split called train, but test"),
    ("hf:own/damaged", "ValueError", "can't be read (Parquet magic bytes not found"),
    ("hf:own/configs", "ValueError", "Please pick one among the available configs: ['a', 'b']"),
    ("hf:own/configs:c", "ValueError", "BuilderConfig 'c' not found. Available: ['a', 'b']"),
])
def test_what_is_no_corpus_is_told_in_one_line(answers, name, error, words):
    for split in ("train", "valid"):
        kind, message, texts = answers[0][name, split]
        assert kind == error and not texts and message.startswith(f"{name}: ") and words in message and "\n" not in message


def test_without_the_network_the_error_comes_at_once(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))                                     # a port where nobody answers
        found = ask(tmp_path, f"http://127.0.0.1:{free.getsockname()[1]}", ["tinystories"], ["hf:own/repo"])
    found += ask(tmp_path, "http://127.0.0.1:9", ["openwebtext"], HF_HUB_OFFLINE="1")
    for kind, message, texts in found:
        assert not texts and kind == "ConnectionError" and "the Hugging Face hub can't be reached" in message and "stories and text:PATH need no network" in message
        assert "\n" not in message


def test_a_connection_that_is_lost_on_the_way(tmp_path):
    two = {"own/two": {f"data/train-0000{i}-of-00002.parquet": parquet(text=STORIES[i::2]) for i in range(2)}}
    at_once = "import time\ntime.sleep = lambda seconds: None\n"       # no waiting between attempts
    with LittleHub(two, most_reads=2) as hub: (kind, message, texts), = ask(tmp_path, hub.url, ["hf:own/two"], before=at_once)
    assert 1000 < texts < 1500
    assert kind == "ConnectionError" and "can't be reached, or not any more" in message


def test_other_corpora_ask_nothing_of_the_network(tmp_path):
    (tmp_path/"book.txt").write_text("one\ntwo\n"*10)
    code = f"""
import socket, sys
def refuse(*args, **kw): raise AssertionError("a socket")
socket.socket = socket.create_connection = socket.getaddrinfo = refuse
from lmcourse.tools.documents import documents
assert list(documents("stories", max_bytes=100)) and list(documents("text:{tmp_path}/book.txt"))
for name in ("storys", "hf:", "tinystories:1"):
    try: documents(name)
    except ValueError: pass
assert not {{"datasets", "huggingface_hub", "pyarrow", "httpx"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | dict(PYTHONPATH=os.pathsep.join(sys.path)))


def test_a_folder_is_a_repository(tmp_path):
    (tmp_path/"train.parquet").write_bytes(parquet(text=STORIES))
    train, valid = (list(hub_documents(f"hf:{tmp_path}", split)) for split in ("train", "valid"))
    assert sorted(train + valid) == sorted(STORIES) and valid == [s for s in STORIES if held_out(s)]
    assert list(documents(f"hf:{tmp_path}", max_bytes=30)) == [s for s in STORIES if not held_out(s)][:4]


def test_a_file_of_json_lines_is_read_by_its_column_and_never_as_a_text(tmp_path):
    (path := tmp_path / "own.jsonl").write_text("\n".join(json.dumps(dict(id=i, text=f"This is document {i}.")) for i in range(1000)))
    (tmp_path / "other.jsonl").write_text('{"text": "of another file"}')
    train, valid = (list(documents(f"hf:{path}", s)) for s in ("train", "valid"))
    assert sorted(train + valid) == sorted(f"This is document {i}." for i in range(1000)) and valid
    before = corpus_digest(f"hf:{path}")
    path.write_text('{"text": "changed"}')
    assert before and corpus_digest(f"hf:{path}") not in (None, before) and corpus_digest("hf:own/texts") is None
    with pytest.raises(ValueError, match=f"a file with columns, expected a text; say hf:{path}"): documents(f"text:{path}")
    with pytest.raises(ValueError, match=f"to read this file, say 'hf:{path}'"): documents(str(path))


def write_lines(path, rows): path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.mark.parametrize("name", ["own file.jsonl", "own.jsonl.gz", "own.parquet", "own.csv", "folder"])
def test_a_file_next_to_you_with_few_documents_has_both_parts(tmp_path, monkeypatch, name):
    "By its bare name, as the command suggests it; the one document in 200 that is held out isn't among so few."
    monkeypatch.chdir(tmp_path)
    rows = [dict(id=i, text=f"Page {i}.") for i in range(30) if not held_out(f"Page {i}.")]
    (tmp_path/"folder").mkdir()
    write_lines(tmp_path/"own file.jsonl", rows)
    (tmp_path/"own.jsonl.gz").write_bytes(gzip.compress((tmp_path/"own file.jsonl").read_bytes()))
    for path in ("own.parquet", "folder/train.parquet"): (tmp_path/path).write_bytes(parquet(id=[r["id"] for r in rows], text=[r["text"] for r in rows]))
    (tmp_path/"own.csv").write_text("id,text\n" + "".join(f"{r['id']},{r['text']}\n" for r in rows))
    train, valid = (list(documents(f"hf:{name}", split)) for split in ("train", "valid"))
    assert len(valid) == 1 and sorted(train + valid) == sorted(r["text"] for r in rows)


@pytest.mark.parametrize("row, words", [(dict(txt="b"), "line 3 has no text 'text': {'txt': 'b'}"), (dict(text=3), "line 3 has no text 'text': {'text': 3}"), (None, "line 3 is not JSON (")])
def test_a_bad_line_of_a_file_is_named_and_nothing_else_is_said(tmp_path, row, words, capfd):
    path = tmp_path/"own.jsonl"
    write_lines(path, [dict(text="a"), dict(text=None), row or {}, dict(text="c")])
    if row is None: path.write_text(path.read_text().replace("{}", '{"text": "b",}'))
    texts = documents(f"hf:{path}")
    with pytest.raises(ValueError, match=re.escape(f"{path}: {words}")): list(texts)
    assert capfd.readouterr() == ("", "")


def test_what_can_be_told_of_a_file_is_told_at_once(tmp_path):
    for name, content, words in (("a.jsonl", b"", "no rows, expected at least one"), ("a.jsonl", b'{"a": {"text": "b"}}', "no column called text among a, and 0 with strings"),
                                 ("a.parquet", b"PAR1" + b"x"*99, "can't be read as Parquet"), ("a.jsonl.gz", b"{}", "not a whole gzip file"),
                                 ("a.json", b"", "not JSON (Expecting value"), ("a.csv", b"", "no columns, expected a first line with their names")):
        (tmp_path/name).write_bytes(content)
        with pytest.raises(ValueError, match=re.escape(f"{tmp_path/name}: {words}")): documents(f"hf:{tmp_path/name}")


@pytest.mark.parametrize("name, content", [("train.jsonl", b'{"text": "a"}\n{"text": "b",}\n'), ("train.parquet", b"PAR1" + b"x"*99)])
def test_datasets_logs_no_error_that_it_raises(tmp_path, name, content):
    (tmp_path/name).write_bytes(content)
    code = f"from lmcourse.tools.documents import documents\ntry: list(documents('hf:{tmp_path}'))\nexcept ValueError as e: print(e)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | dict(PYTHONPATH=os.pathsep.join(sys.path)))
    assert done.stdout.startswith(f"{tmp_path/name}: ") and done.stdout.count("\n") == 1 and "Failed to" not in done.stderr, done.stderr


@pytest.mark.parametrize("content, texts", [('[{"text": "a"},\n {"text": "b"}]', ["a", "b"]), ('{"text": "a"}\n{"text": "b"}\n', ["a", "b"]), ('\ufeff["a", "b"]', ["a", "b"]), ('{\n "text": "a"\n}', ["a"])])
def test_a_json_file_is_a_list_or_lines(tmp_path, content, texts):
    (tmp_path/"own.json").write_text(content, encoding="utf-8")
    assert sorted(t for split in ("train", "valid") for t in documents(f"hf:{tmp_path/'own.json'}", split)) == texts


@pytest.mark.parametrize("content, words", [('[{"text": "a"}, {"text": 3}]', "item 2 has no text 'text': {'text': 3}"), ('[{"text": "a"}, {"txt": "b"}]', "item 2 has no text 'text'"), ('{"text": "a"}\n{"text": 3}\n', "line 2 has no text 'text'"),
                                            ("[3]", "item 1 is '3', expected an object"), ("[]", "no rows, expected at least one"), ('[{"a": "b", "c": "d"}]', "no column called text among a, c, and 2 with strings")])
def test_a_json_file_with_something_else(tmp_path, content, words):
    "A number among the texts: datasets would put quotes around all of them"
    (tmp_path/"own.json").write_text(content)
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path/'own.json'}: {words}")): list(documents(f"hf:{tmp_path/'own.json'}"))


@pytest.mark.parametrize("kind, bad, words", [("json", '[{"text": "b c"}, {"text": 3}]', "item 2 has no text 'text': {'text': 3}"), ("json", '[{"text": "b c"}, {"text": 0}]', "item 2 has no text 'text': {'text': 0}"),
                                              ("jsonl", '{"text": "b c"}\n{"text": true}\n', "line 2 has no text 'text': {'text': True}"), ("jsonl", '{"text": 3}\n', "text is 3, expected a string")])
@pytest.mark.parametrize("good", ["a", "z"])
def test_a_number_among_the_texts_of_a_folder(tmp_path, kind, bad, words, good):
    "datasets would put quotes around the other texts of that file"
    (tmp_path/f"{good}.{kind}").write_text('{"text": "a b"}\n')
    (file := tmp_path/f"m.{kind}").write_text(bad)
    with pytest.raises(ValueError) as e: list(documents(f"hf:{tmp_path}"))
    if words.startswith("text is") and good == "a": words = "line 1 has no text 'text': {'text': 3}"
    assert str(e.value) == f"{file}: {words}"


def test_json_files_of_a_folder_have_the_splits_that_their_names_say(tmp_path):
    files = {"data/train-1.jsonl": '{"text": "a", "id": 1}\n{"text": "b<|endoftext|>c", "id": "x"}\n{"id": 2, "text": null}\n', "data/train-2.json": '[{"text": "d"}, {"text": null}]', "data/validation.jsonl": '{"text": "e"}\n', "README.md": "# Not a text"}
    for name, text in files.items():
        (tmp_path/name).parent.mkdir(exist_ok=True)
        (tmp_path/name).write_text(text)
    for name in (tmp_path, tmp_path/"data"): assert [list(documents(f"hf:{name}", split)) for split in ("train", "valid")] == [["a", "b", "c", "d"], ["e"]]


def test_a_json_file_is_read_once_and_its_lines_as_they_are_asked_for(tmp_path, monkeypatch):
    (one := tmp_path/"list.json").write_text('["a", "b"]')
    (lines := tmp_path/"lines.json").write_bytes(b'{"text": "a"}\n{"text": "caf\xe9"}\n')
    read, reads = Path.read_text, []
    monkeypatch.setattr(Path, "read_text", lambda path, **k: reads.append(path.name) or read(path, **k))
    assert [row for _, row in file_rows(one)] == [dict(text="a"), dict(text="b")] and reads == ["list.json"]
    rows = file_rows(lines)
    assert next(rows) == ("line 1", dict(text="a")) and reads == ["list.json"]
    with pytest.raises(ValueError, match="lines.json: line 2 is not JSON in UTF-8"): next(rows)


@pytest.mark.parametrize("name", ["dataset_infos.json", ".cache/state.json"])
def test_what_describes_a_folder_is_not_blamed_for_its_data(tmp_path, name):
    (tmp_path/name).parent.mkdir(exist_ok=True)
    (tmp_path/name).write_text('{"default": {"splits": {}}}')
    (bad := tmp_path/"train.jsonl").write_text('{"text": "a"}\n{"text": "b",}\n')
    with pytest.raises(ValueError, match=re.escape(f"{bad}: line 2 is not JSON (")): list(documents(f"hf:{tmp_path}"))


BROKEN = [("csv", "id,text\n1,a\n", b"id,text\n1,a\n2,b,c\n", ": line 3 has 3 fields, expected 2"),
          ("csv", "id,text\n1,a\n", b'id,text\n1,a\n2,"b\n', ": line 3 can't be read as CSV (unexpected end of data)"),
          ("csv", "id,text\n1,a\n", b"id,text\n1,caf\xe9\n", ": not UTF-8 (byte 13)"), ("csv", "id,text\n1,a\n", b"\nid,text\n1,b\n2,c,d\n", ": line 4 has 3 fields, expected 2"),
          ("json", '[{"text": "a"}]', b'[{"text": "a"},\n {"text": "b"', ": not JSON (Expecting ',' delimiter: line 2 column 14 (char 29))"),
          ("json", '{"text": "a"}', b'{"text": "a"}\n{"text": "b",}\n', ": line 2 is not JSON ("), ("json", '[{"text": "a"}]', b'[{"text": "caf\xe9"}]', ": not UTF-8 (byte 14)"),
          ("jsonl", '{"text": "a"}\n', b'{"text": "a"}\n{"text": "b",}\n', ": line 2 is not JSON ("), ("parquet", None, b"PAR1" + b"x"*99, ": can't be read as Parquet (")]


@pytest.mark.parametrize("kind, good, content, words", BROKEN, ids=[f"{b[0]}-{i}" for i, b in enumerate(BROKEN)])
def test_a_broken_file_is_named_with_its_line_by_itself_and_in_a_folder(tmp_path, kind, good, content, words):
    (folder := tmp_path/"own").mkdir()
    (folder/f"train-1.{kind}").write_bytes(good.encode() if good else parquet(text=["a"]))
    (bad := folder/f"train-2.{kind}").write_bytes(content)
    for name in (bad, folder):
        with pytest.raises(ValueError) as e: list(documents(f"hf:{name}"))
        assert str(e.value).startswith(f"{bad}{words}") and "\n" not in str(e.value), str(e.value)


CSV = [("text\nhello\nnull\nNA\n007\n1.0\n", ["hello", "null", "NA", "007", "1.0"]), ("\ufefftext,id\r\n\"one, a\r\nx\",1\r\n\r\n,2\r\ntwo,3\r\n", ["one, a\r\nx", "two"]), (",text\n0,a\n1,b\n", ["a", "b"]),
       ("text\n" + "x"*200_000 + "\n", ["x"*200_000]), ("id,story,views\n1,a b,\n2,7,3\n", ["a b", "7"]), ("text\n12\n", ["12"]),
       ("label,body\nTrue,abc\nFalse,de\n", ["abc", "de"]), ("story\n1984\nabc\n", ["1984", "abc"]), ("id,story\n1,1984\n2,abc\n", ["1984", "abc"]), ("id,text\n1,a\n   \n2,b\n\x1a", ["a", "b"]), ("text\na\n \nb\n\x1a", ["a", "b"]),
       ("text,,\na,,\nb,,\n", ["a", "b"])]


@pytest.mark.parametrize("content, texts", CSV, ids=range(len(CSV)))
@pytest.mark.parametrize("folder", [False, True])
def test_each_cell_of_a_csv_file_is_a_text(tmp_path, content, texts, folder):
    "pandas takes the words null and NA for missing values, and 007 for 7.0; to_csv writes an index without a name."
    (path := tmp_path/"own.csv").write_text(content, encoding="utf-8", newline="")
    assert sorted(t for split in ("train", "valid") for t in documents(f"hf:{tmp_path if folder else path}", split)) == sorted(texts)


@pytest.mark.parametrize("content, words", [('""\na\n', "no columns, expected a first line with their names"), ("text;id\na;1\n", "the first line is 'text;id', expected commas between the names"), ("id,text\n1,a\n2\n", "line 3 has 1 field, expected 2"),
                                            ("id,text\n", "no rows, expected at least one"), ("a,b\nx,y\n", "no column called text among a, b, and 2 with strings"), ("text\na\n".encode("utf-16"), "not UTF-8 (byte 0)"),
                                            ("id,text,text\n1,x,y\n", "two columns are called 'text'"), ("id,body\n1,2\n3,\n", "no column called text among id, body, and 0 with strings"),
                                            ('id,text\n0,a\n1,"x" y\n', "line 3 can't be read as CSV (',' expected after '\"'): each quote inside a quoted text must be doubled"),
                                            ('id,text\n0,a\n1,"x\n\n2,"y"\n3,z\n', "line 3 can't be read as CSV (',' expected after '\"')"), ('id,text\n0,a\n1,"x\n\n2,y\n', "line 3 can't be read as CSV (unexpected end of data)")])
def test_a_csv_file_with_something_else(tmp_path, content, words):
    (path := tmp_path/"own.csv").write_bytes(content if isinstance(content, bytes) else content.encode())
    for name in (path, tmp_path):
        with pytest.raises(ValueError, match=re.escape(f"{path}: {words}")): list(documents(f"hf:{name}"))


@pytest.mark.parametrize("other", ["c.parquet", "b.jsonl", "sub/a.txt", "c.csv", "b.tsv", "b.ndjson", "b.arrow", "sub/b.csv.bz2", "b.csv.xz", "b.jsonl.zst", "b.zip", "B.PARQUET", "B.JSON"])
@pytest.mark.parametrize("own", ["m.jsonl", "train.csv"])
def test_a_folder_is_read_whole_or_not_at_all(tmp_path, other, own):
    "datasets takes the files of one kind, or those whose names say train, and no others"
    for name in (own, other, "README.md", ".cache/x.json"):
        (tmp_path/name).parent.mkdir(exist_ok=True)
        if name.endswith("parquet"): (tmp_path/name).write_bytes(parquet(text=["a", "b"]))
        else: (tmp_path/name).write_text('{"text": "a"}\n{"text": "b"}\n' if "json" in name else "text\na\nb\n")
    if own == "m.jsonl" and other in ("b.jsonl", "b.ndjson"): # Of one kind
        assert set(documents(f"hf:{tmp_path}")) | set(documents(f"hf:{tmp_path}", "valid")) == {"a", "b"}
        return
    tried = own == "m.jsonl" and other in ("b.jsonl.zst", "b.zip") # Neither is what its name says
    with pytest.raises(ValueError, match="can't be read" if tried else "would be read, but not .*: put those into another folder") as e: documents(f"hf:{tmp_path}")
    assert tried or own in str(e.value) and other in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize("name", ["b*", "b?", "b[1]"])
def test_a_folder_is_no_pattern(tmp_path, name):
    "datasets would read the first two's neighbour as well, and find nothing in the last."
    for folder in (name, "bc"):
        (tmp_path/folder).mkdir()
        (tmp_path/folder/"train.csv").write_text("text\na\nb\n")
    with pytest.raises(ValueError, match=re.escape(f"{str(tmp_path/name)!r}: `datasets` takes *, ? and [ for patterns: rename the folder")): documents(f"hf:{tmp_path/name}")


def test_a_folder_with_columns_has_a_digest(tmp_path):
    (tmp_path/"data").mkdir()
    (tmp_path/"data/a.csv").write_text("text\na\n")
    before = corpus_digest(f"hf:{tmp_path}")
    (tmp_path/".DS_Store").write_text("x")
    assert before and corpus_digest(f"hf:{tmp_path}") == before
    (tmp_path/"data/b.csv").write_text("text\nb\n")
    assert corpus_digest(f"hf:{tmp_path}") not in (None, before)


@pytest.mark.parametrize("files", [["data/train.csv", "data/de/b.jsonl"], ["data/train.csv", "B.CSV"]])
def test_files_of_a_folder_are_named_by_their_paths(tmp_path, files):
    for name in files:
        (tmp_path/name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path/name).write_text("text\na\n")
    with pytest.raises(ValueError, match=f"{files[0]} would be read, but not {files[1]}: put"): documents(f"hf:{tmp_path}")


@pytest.mark.parametrize("word, split", [("test", "test"), ("valid", "validation"), ("dev", "validation")])
@pytest.mark.parametrize("kind", ["csv", "txt"])
def test_a_folder_without_a_training_split_says_why(tmp_path, word, split, kind):
    for name in ("stories", f"stories-{word}"): (tmp_path/f"{name}.{kind}").write_text("text\na\nb\n")
    with pytest.raises(ValueError, match=re.escape(f"no split called train, but {split}, as names of files say: put train into the name of the others")): documents(f"hf:{tmp_path}")
    (tmp_path/f"stories.{kind}").rename(tmp_path/f"stories-train.{kind}")
    assert {"a", "b"} & set(documents(f"hf:{tmp_path}"))


@pytest.mark.parametrize("card, reads", [("---\nconfigs: [{config_name: default, data_dir: en}]\n---\n", True), ("---\nconfigs:\n- config_name: default\n  data_files: en/*\n---\n", True),
                                         ("Put the names into data_files.\n", False), ("---\nlicense: mit\n---\ndata_files: none\n", False)])
def test_a_card_may_choose_files_of_a_folder(tmp_path, card, reads):
    (tmp_path/"README.md").write_text(card)
    for name in ("en/a.jsonl", "en/b.jsonl", "de.parquet"):
        (tmp_path/name).parent.mkdir(exist_ok=True)
        (tmp_path/name).write_bytes(parquet(text=["x"]) if "parquet" in name else b'{"text": "a"}\n{"text": "b"}\n')
    if reads: assert list(documents(f"hf:{tmp_path}"))
    else:
        with pytest.raises(ValueError, match="en/a.jsonl would be read, but not de.parquet: put"): documents(f"hf:{tmp_path}")


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_a_file_of_a_folder_without_the_column_is_named(tmp_path, kind):
    for name, column in (("a", "text"), ("b", "content")):
        content = {"jsonl": f'{{"{column}": "x y"}}\n', "csv": f"{column}\nx y\n"}
        (tmp_path/f"{name}.{kind}").write_bytes(content[kind].encode() if kind in content else parquet(**{column: ["x y"]}))
    with pytest.raises(ValueError, match=r"b\.\w+: \w+ \d has no text 'text': {'content': 'x y'}"): list(documents(f"hf:{tmp_path}"))


def test_rows_of_a_csv_file_have_their_lines_and_a_folder_is_no_file(tmp_path):
    (path := tmp_path/"own.csv").write_text('prompt,response\n"a\nb",c\n\nd,\n')
    assert [*file_rows(path)] == [("line 3", dict(prompt="a\nb", response="c")), ("line 5", dict(prompt="d", response=""))]
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path}: a folder, expected a file")): next(file_rows(tmp_path))
    with pytest.raises(FileNotFoundError, match="none.csv: no such file"): next(file_rows(tmp_path/"none.csv"))


# Folders of text files

def test_each_file_of_a_folder_is_a_document_and_none_is_cut(tmp_path):
    (tmp_path/"b").mkdir()
    (tmp_path/".git").mkdir()
    for name, text in {"c.txt": "\ufeffThree.", "a 1.txt": "One.", "b/x.md": "Two.", "empty.txt": "", ".hidden": "\0", ".git/config": "no text"}.items(): (tmp_path/name).write_text(text, encoding="utf-8")
    for i in range(17): (tmp_path/f"z{i:02}.txt").write_text(f"Number {i}.")
    train, valid = (list(documents(f"text:{tmp_path}", split)) for split in ("train", "valid"))
    assert train + valid == ["One.", "Two.", "Three.", *(f"Number {i}." for i in range(17))] and 2 <= len(valid) <= 3
    assert list(documents(f"text:{tmp_path}", max_bytes=8)) == ["One.", "Two."]
    before = corpus_digest(f"text:{tmp_path}")
    (tmp_path/"c.txt").write_text("Four.")
    assert before and before != corpus_digest(f"text:{tmp_path}")


@pytest.mark.parametrize("sizes", [[1000], [1000, 10], [10, 1000], [300, 300, 300], [1]*40, [5, 900, 5]])
def test_a_tenth_of_a_folder_is_for_validation(tmp_path, sizes):
    for i, size in enumerate(sizes): (tmp_path/f"{i:03}.txt").write_text("line\n"*size)
    train, valid = (sum(map(len, documents(f"text:{tmp_path}", split))) for split in ("train", "valid"))
    assert train + valid == 5*sum(sizes) and .1 <= valid/(train + valid) <= .21


@pytest.mark.parametrize("name, content, words", [("a.png", b"PNG\0", "a.png: a binary file (a zero byte at 3)"), ("a.txt", b"\xff", "a.txt: not UTF-8 text"), ("a.jsonl", b"{}", "a.jsonl: a file with columns, expected a text; say hf:"),
                                                 ("a.txt.gz", b"\x1f\x8b", "a.txt.gz: a compressed file, expected a text; unpack it: gunzip "), (None, None, ": the folder is empty"), ("a.txt", b"\n", ": the folder has only blank lines")])
def test_a_folder_with_something_else_is_rejected_at_once(tmp_path, name, content, words):
    (folder := tmp_path/"texts").mkdir()
    if name: (folder/name).write_bytes(content)
    if name and "blank" not in words: (folder/"b.txt").write_text("A text.")
    with pytest.raises(ValueError, match=re.escape(words)): documents(f"text:{folder}")


@pytest.mark.parametrize("name, kind", [("a.jsonl", "hf"), ("a.jsonl.gz", "hf"), ("a.parquet", "hf"), ("a.json", "hf"), ("a.csv", "hf"), ("a.txt", "text"), ("a", "text"), ("dir/a.txt", "text"), ("dir/a.parquet", "hf"), ("dir/funnel.json", "curated")])
def test_a_path_without_a_kind_gets_the_right_one(tmp_path, monkeypatch, name, kind):
    monkeypatch.chdir(tmp_path)
    (tmp_path/"dir").mkdir()
    (tmp_path/name).write_text("a")
    typed = name.split("/")[0]
    with pytest.raises(ValueError, match=f"to read this {'folder' if '/' in name else 'file'}, say '{kind}:{typed}'$"): documents(typed)


@given(st.dictionaries(st.one_of(st.just("text"), st.text(max_size=5)), st.one_of(st.text(), st.integers(), st.none()), max_size=5))
def test_a_column_is_text_or_the_only_one(row):
    "The first row's text may be missing; another column isn't taken instead."
    strings = {k for k, v in row.items() if isinstance(v, str)}
    if "text" in row and isinstance(row["text"], int):
        with pytest.raises(ValueError, match="text is .*, expected a string"): text_column(row)
    elif "text" in row: assert text_column(row) == "text"
    elif len(strings) == 1: assert {text_column(row)} == strings
    else:
        with pytest.raises(ValueError, match="no column called text"): text_column(row)


def test_a_curated_folder_is_split_at_marks_and_hidden_files_are_not_read(tmp_path):
    (folder := tmp_path / "documents").mkdir()
    (tmp_path / "funnel.json").write_text("{}")
    (folder / "00000.jsonl").write_text(json.dumps(dict(text="A page about <|endoftext|>.")) + "\n" + json.dumps(dict(text="Another.")) + "\n")
    (folder / "._00000.jsonl").write_bytes(b"\xff\0")
    found = [d for split in ("train", "valid") for d in documents(f"curated:{tmp_path}", split)]
    assert sorted(found) == [".", "A page about ", "Another."]
    before = module.corpus_digest(f"curated:{tmp_path}")
    (folder / "._00000.jsonl").unlink()
    assert module.corpus_digest(f"curated:{tmp_path}") == before
