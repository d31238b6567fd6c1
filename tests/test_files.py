"Files appear whole or not at all; JSON that is damaged is told by name and line."
import errno
import gzip
import os
import subprocess
import sys

import pytest

from lmcourse.tools import files
from lmcourse.tools.files import atomic_write, json_lines, lock_file, read_json, remove, write_json, write_text

NOT_ROOT = pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may read and write everywhere")


def tree(folder): return {p.relative_to(folder).as_posix(): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


@pytest.mark.parametrize("at", ["block", "sync", "replace"])
def test_an_error_leaves_the_old_file_whole_and_nothing_else(tmp_path, monkeypatch, at):
    write_text(tmp_path/"a", "old")
    def refuse(*args): raise OSError(errno.EIO, os.strerror(errno.EIO))
    if at == "sync": monkeypatch.setattr(files, "sync", refuse)
    if at == "replace": monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="Input/output error"), atomic_write(tmp_path/"a", durable=True) as part:
        part.write_text("half of the n")
        if at == "block": refuse()
    assert tree(tmp_path) == {"a": b"old"}


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_a_folder_comes_whole_or_not_at_all(tmp_path, error):
    (tmp_path/"a").mkdir()
    with pytest.raises(error), atomic_write(tmp_path/"a") as part:
        part.mkdir()
        (part/"one").write_text("1")
        raise error
    assert tree(tmp_path) == {"a": None}
    with atomic_write(tmp_path/"a", durable=True) as part:
        part.mkdir()
        (part/"one").write_text("1")
        assert tree(tmp_path/"a") == {}
    assert tree(tmp_path) == {"a": None, "a/one": b"1"}


def test_what_holds_something_is_not_replaced(tmp_path):
    (tmp_path/"a").mkdir()
    write_text(tmp_path/"a/mine", "mine")
    with pytest.raises(OSError, match="a'"): write_text(tmp_path/"a", "other")
    with pytest.raises(OSError, match="a'"), atomic_write(tmp_path/"a") as part: part.mkdir()
    assert tree(tmp_path) == {"a": None, "a/mine": b"mine"}


def test_a_kill_leaves_the_old_file_and_the_next_writer_clears_up(tmp_path):
    write_text(tmp_path/"a", "old")
    script = "import os, sys; from lmcourse.tools.files import atomic_write\nwith atomic_write(sys.argv[1]) as part: part.write_text('half'); os._exit(9)"
    assert subprocess.run([sys.executable, "-c", script, tmp_path/"a"]).returncode == 9
    assert tree(tmp_path) == {"a": b"old", "a.tmp": b"half"}
    write_text(tmp_path/"a", "new")
    assert tree(tmp_path) == {"a": b"new"}


def test_all_is_synced_before_it_gets_its_name(tmp_path, monkeypatch):
    events, replace = [], os.replace
    monkeypatch.setattr(files, "sync", lambda p: events.append(p.name))
    monkeypatch.setattr(os, "replace", lambda a, b: (events.append("replace"), replace(a, b)))
    with atomic_write(tmp_path/"a", durable=True) as part:
        (part/"deep").mkdir(parents=True)
        (part/"deep/one").write_text("1")
    assert set(events[:3]) == {"deep", "one", "a.tmp"} and events[2:] == ["a.tmp", "replace", tmp_path.name]
    events.clear()
    write_text(tmp_path/"b", "text")
    assert events == ["replace"]


@pytest.mark.skipif(os.name != "posix", reason="links and modes")
def test_a_link_stays_a_link_and_a_file_keeps_its_mode(tmp_path):
    file, folder = tmp_path/"far/file", tmp_path/"far/folder"
    folder.mkdir(parents=True)
    for name in ("file", "folder"): (tmp_path/name).symlink_to(f"far/{name}")
    write_text(tmp_path/"file", "old")                                  # The link leads nowhere yet
    file.chmod(0o640)
    write_text(tmp_path/"file", "new", durable=True)
    with atomic_write(tmp_path/"folder") as part: (part/"a").mkdir(parents=True)
    assert (tmp_path/"file").is_symlink() and (tmp_path/"folder").is_symlink()
    assert file.read_text() == "new" and file.stat().st_mode & 0o777 == 0o640 and (folder/"a").is_dir()
    assert sorted(tree(tmp_path)) == ["far", "far/file", "far/folder", "far/folder/a", "file", "folder"]


def test_of_a_link_to_a_folder_only_the_link_is_removed(tmp_path):
    (tmp_path/"far").mkdir()
    (tmp_path/"far"/"kept").write_text("")
    (tmp_path/"link").symlink_to("far")
    remove(tmp_path/"link")
    assert [p.name for p in sorted(tmp_path.rglob("*"))] == ["far", "kept"]


def test_a_mark_that_says_utf8_is_skipped(tmp_path):
    "As editors on Windows may save it"
    (tmp_path/"a.json").write_text("[2]", encoding="utf-8-sig")
    assert read_json(tmp_path/"a.json", list) == [2]


def test_json_comes_back_byte_by_byte(tmp_path):
    write_json(tmp_path/"a.json", values := dict(a=[1, 2.5, None], b="é\n"))
    assert (tmp_path/"a.json").read_bytes() == b'{\n  "a": [\n    1,\n    2.5,\n    null\n  ],\n  "b": "\\u00e9\\n"\n}\n'
    assert read_json(tmp_path/"a.json") == values
    write_json(tmp_path/"a.json", [1], indent=None)
    assert (tmp_path/"a.json").read_bytes() == b"[1]\n" and read_json(tmp_path/"a.json", list) == [1]
    with pytest.raises(TypeError, match="not JSON serializable"): write_json(tmp_path/"a.json", dict(a=tmp_path))
    assert tree(tmp_path) == {"a.json": b"[1]\n"}


@pytest.mark.parametrize("content, words", [
    (b'{\n"a": 1,\n"b" 2\n}', r"a.json: not JSON \(.*line 3"), (b"", r"a.json: not JSON \(.*line 1"), (b"[1]", "a.json: a list, expected an object"),
    (b'{"a": {"b": 0, "b": 1}}', "a.json: 'b' appears twice"), (b'{"\xff', r"a.json: not UTF-8 \(byte 2\)"),
    (b"["*100_000, r"a.json: not JSON \(nested too deeply\)")])
def test_damaged_json_is_told_by_name_and_line(tmp_path, content, words):
    (tmp_path/"a.json").write_bytes(content)
    with pytest.raises(ValueError, match=words): read_json(tmp_path/"a.json")


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="none.json: no such file"): read_json(tmp_path/"none.json")
    with pytest.raises(OSError, match=tmp_path.name): read_json(tmp_path)
    with pytest.raises(FileNotFoundError, match="none/a"): write_text(tmp_path/"none/a", "text")


@NOT_ROOT
def test_a_folder_without_permission_is_named(tmp_path):
    (folder := tmp_path/"closed").mkdir()
    write_json(folder/"a.json", {})
    folder.chmod(0o555)
    try:
        with pytest.raises(PermissionError, match="closed/a.json"): write_json(folder/"a.json", dict(new=1))
        folder.chmod(0o000)
        with pytest.raises(PermissionError, match="closed/a.json"): read_json(folder/"a.json")
    finally: folder.chmod(0o755)
    assert read_json(folder/"a.json") == {}


def test_a_lock_keeps_others_out_until_its_file_is_closed(tmp_path):
    pytest.importorskip("fcntl")
    with open(tmp_path/"lock", "w") as first, open(tmp_path/"lock", "w") as second:
        lock_file(first)
        with pytest.raises(BlockingIOError, match="lock: another process is writing"): lock_file(second)
        first.close()
        lock_file(second)


def test_several_processes_may_write_one_file(tmp_path):
    "Each writes beside it under a name of its own; the last one wins"
    write = f"from lmcourse.tools.files import write_json\nfor i in range(300): write_json({str(tmp_path/'a.json')!r}, [i]*1000, alone=False)"
    done = [subprocess.Popen([sys.executable, "-c", write]) for _ in range(3)]
    assert [p.wait(60) for p in done] == [0, 0, 0]
    assert read_json(tmp_path/"a.json", list) == [299]*1000 and os.listdir(tmp_path) == ["a.json"]


@pytest.mark.parametrize("number, named", [(errno.ENOSPC, True), (errno.EIO, False)])
def test_a_full_disk_is_told_with_the_name_of_the_file(tmp_path, number, named):
    with pytest.raises(OSError) as told, atomic_write(tmp_path/"a"): raise OSError(number, os.strerror(number)) # As `write` does
    assert told.value.filename == (str(tmp_path/"a") if named else None) and not tree(tmp_path)


def test_an_error_names_the_file_that_was_asked_for(tmp_path):
    "And not the temporary one beside it"
    (tmp_path/"folder").mkdir()
    (tmp_path/"folder/x").touch()
    for path in (tmp_path/"folder", tmp_path/"none/a"):
        with pytest.raises(OSError) as told: write_text(path, "x")
        assert told.value.filename == str(path) and ".tmp" not in str(told.value)


@pytest.mark.parametrize("content, found", [
    ('\ufeff{"a": 1}\r\n{"a": "é"}\r\n', [(1, dict(a=1)), (2, dict(a="é"))]), ('{"a": 1}\n\n \n{"a": 2}', [(1, dict(a=1)), (4, dict(a=2))]), ("", []), ("\n \n", []),
    ('{"a": 1}\n{"a": 2},\n', r'line 2 is not JSON \(Extra data at column 9\): \'{"a": 2},\''), ('{"a": 1,}', "line 1 is not JSON"), ("[\n{}\n]", r"line 1 is not JSON .*'\[', expected an object on each line"),
    ('[{"a": 1}]', r"line 1 is '\[{\"a\": 1}\]', expected an object on each line"), ('{}\n"a"', "line 2 is '\"a\"', expected an object"), ('{}\n{"a": "\xe9"}'.encode("latin-1"), r"line 2 is not JSON in UTF-8 \(byte 0xe9 at column 8\)"),
    ('{"a": "b', r"line 1 is not JSON \(Unterminated string starting at column 7\): "),
    ('{"a": "\\ud83d\\ude00"}', [(1, dict(a="\U0001f600"))]), ('{"a": 1}\n{"a": ["x\\uD83D"]}', r"line 2 has half a character \('\\ud83d'\)"),
    ('{"a": 1}\n'.encode("utf-16"), "line 1 is not JSON in UTF-8"), ('{"a": 1' + "0"*5000 + "}", "line 1 is not JSON that can be read")])
def test_json_lines_are_read_or_the_line_is_named(tmp_path, content, found):
    data = content if isinstance(content, bytes) else content.encode()
    (tmp_path/"own file.jsonl").write_bytes(data)
    (tmp_path/"own.jsonl.gz").write_bytes(gzip.compress(data))
    for path in (tmp_path/"own file.jsonl", tmp_path/"own.jsonl.gz"):
        if isinstance(found, list): assert list(json_lines(path)) == found
        else:
            with pytest.raises(ValueError, match=f"{path}: {found}") as e: list(json_lines(path))
            assert "\n" not in str(e.value) and len(str(e.value)) < 200 + len(str(path))


def test_a_damaged_gzip_file_of_json_lines_is_named(tmp_path):
    whole = gzip.compress(b'{"a": 1}\n'*99)
    for damaged in (whole[:-9], b'{"a": 1}\n', whole[:20] + bytes(9) + whole[29:]):
        (tmp_path/"a.jsonl.gz").write_bytes(damaged)
        with pytest.raises(ValueError, match="a.jsonl.gz: not a whole gzip file"): list(json_lines(tmp_path/"a.jsonl.gz"))
    with pytest.raises(FileNotFoundError, match="none.jsonl: no such file"): list(json_lines("none.jsonl"))
