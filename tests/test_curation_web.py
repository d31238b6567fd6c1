"The planted web: shares, copies, layouts and bytes; and archives that come back as they were, whatever their form."
import gzip
import json
import random
import zlib
from collections import Counter

import pytest

from lmcourse.curation.warc import WarcRecord, read_warc, write_warc
from lmcourse.curation.web import (KINDS, LAYOUTS, class_sentences, edit_words, fill, language_sentences, planted_web, read_truth, held_out_stories,
                                   write_truth)
from lmcourse.tools.checks import expect_error


@pytest.fixture(scope="module")
def web(): return planted_web(400, seed=3)


def record(payload, kind="response", **headers):
    lines = {"WARC-Type": kind, "Content-Length": len(payload), **headers}
    return b"WARC/1.0\r\n" + "".join(f"{k}: {v}\r\n" for k, v in lines.items()).encode() + b"\r\n" + payload + b"\r\n\r\n"


@pytest.mark.parametrize("pages", [1, 7, 100, 333])
def test_as_many_pages_as_were_asked_for(pages):
    made = planted_web(pages, seed=5)
    assert len(made) == pages == len({p.url for p in made}) and [p.id for p in made] == sorted({p.id for p in made})
    counts = Counter(p.kind for p in made)
    assert all(abs(counts[k] - pages*share) < 1 for k, (share, _) in KINDS.items())


def test_shares_are_ratios():
    assert Counter(p.kind for p in planted_web(30, shares=dict(story=2, near=1))) == {"story": 20, "near": 10}


def test_seeds_share_no_story_and_no_address(web):
    texts = lambda pages: {p.text for p in pages if p.kind in ("story", "pii", "near")}
    assert not texts(web) & texts(planted_web(400, seed=4))
    assert all(p.url.partition("//")[2].partition("/")[0].endswith(".example") for p in web)


def test_every_layout_shows_all_of_the_text(web):
    "Up to quotes, entities and tags, each word of a story stands in the body, in order."
    import html
    import re
    for p in web:
        if p.kind != "story" or p.layout == "hidden" or p.trap: continue
        shown = html.unescape(re.sub(r"<[^>]*>", "" if p.layout == "spans" else " ", p.body.decode(p.charset)))
        flat = lambda s: "".join(re.sub("[“”\"'’]", "", s).split())
        assert flat(p.text) in flat(shown), p.layout
    assert {p.layout for p in web if p.layout} == set(LAYOUTS)


@pytest.mark.parametrize("edits", [0, 1, 5, 30])
def test_edits_are_as_many_as_said(edits):
    words, rng = [f"w{i}" for i in range(30)], random.Random(edits)
    for _ in range(20):
        changed = edit_words(" ".join(words), edits, words, rng).split(" ")
        assert len(changed) == 30 and sum(a != b for a, b in zip(words, changed)) == edits


def test_choices():
    assert fill("no (choice) here", random.Random(0)) == "no (choice) here"
    assert {fill("(a|b)(c|)", random.Random(i)) for i in range(50)} == {"ac", "a", "bc", "b"}
    assert {len(v) for v in language_sentences().values()} == {29}
    for kind in ("spam", "nsfw", "toxic"): assert len(class_sentences(kind)) == len(set(class_sentences(kind))) == 20


def test_the_held_out_stories_begin_with_what_has_leaked(web):
    leaked = {p.text for p in web if p.kind == "test"}
    assert leaked == set(held_out_stories(stories=len(leaked))) and leaked < set(held_out_stories())


def test_archive_and_truth_round_trip(web, tmp_path):
    starts = write_warc(tmp_path/"w.warc.gz", web)
    write_truth(tmp_path/"t.jsonl", web)
    raw, found = (tmp_path/"w.warc.gz").read_bytes(), list(read_warc(tmp_path/"w.warc.gz"))
    assert [(r.id, r.url) for r in found[1:]] == [(p.id, p.url) for p in web] and found[0].kind == "warcinfo"
    assert starts == sorted(starts) and all(raw[s:s + 2] == b"\x1f\x8b" for s in starts)
    assert zlib.decompressobj(31).decompress(raw[starts[9]:]).count(b"WARC-Type") == 1
    truth = read_truth(tmp_path/"t.jsonl")
    for p in web:
        q = truth[p.id]
        assert q.body == b"" and all(getattr(p, k) == getattr(q, k) for k in p.__dataclass_fields__ if k != "body")


@pytest.mark.parametrize("form", ["plain", "one member", "two members", "zeros behind"])
def test_forms_of_a_file(form, tmp_path):
    one, two = record(b"a\r\nb", **{"WARC-Target-URI": "<http://a>"}), record(b"", "conversion", **{"warc-record-id": "<urn:uuid:1-2>"})
    data = {"plain": one + two, "one member": gzip.compress(one + two), "two members": gzip.compress(one) + gzip.compress(two),
            "zeros behind": gzip.compress(one + two) + bytes(512)}[form]
    (tmp_path/"f").write_bytes(data)
    a, b = read_warc(tmp_path/"f")
    assert (a.kind, a.payload, a.url, a.id) == ("response", b"a\r\nb", "http://a", "") and (b.kind, b.payload, b.id) == ("conversion", b"", "1-2")


@pytest.mark.parametrize("strict", [True, False])
def test_zeros_behind_a_member_are_padding_however_many(strict, tmp_path):
    member = gzip.compress(b"WARC/1.0\r\nWARC-Type: warcinfo\r\nContent-Length: 3\r\n\r\nabc\r\n\r\n")
    (tmp_path/"f.gz").write_bytes(member + bytes(200_000) + member + bytes(200_000))
    assert [r.payload for r in read_warc(tmp_path/"f.gz", strict=strict)] == [b"abc", b"abc"]


def test_an_empty_file_has_no_records(tmp_path):
    (tmp_path/"f").write_bytes(b"")
    assert list(read_warc(tmp_path/"f")) == []


def test_what_is_longer_than_allowed_is_cut_in_bounded_memory(tmp_path):
    "A member of some kilobytes that unpacks to 100 MB: at most 30 MB more are held at a time."
    import tracemalloc
    with gzip.open(tmp_path/"bomb.gz", "wb", compresslevel=9) as f:
        f.write(b"WARC/1.0\r\nWARC-Type: response\r\nContent-Length: 100000000\r\n\r\n")
        for _ in range(100): f.write(bytes(1_000_000))
        f.write(b"\r\n\r\n" + record(b"after"))
    tracemalloc.start()
    bomb, after = read_warc(tmp_path/"bomb.gz", max_bytes=1 << 20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (tmp_path/"bomb.gz").stat().st_size < 400_000 and peak < 30e6
    assert len(bomb.payload) == 1 << 20 and bomb.headers["warc-truncated"] == "length" and after.payload == b"after" and "warc-truncated" not in after.headers


def test_a_header_may_go_on_in_an_indented_line(tmp_path):
    "As in section 4 of the WARC standard, 1.0 and 1.1; warcio 1.8 joins such lines, too."
    (tmp_path/"w").write_bytes(b"WARC/1.1\r\nWARC-Type: response\r\nX-Long: one\r\n\ttwo\r\n three: 4\r\nContent-Length: 3\r\n\r\nabc\r\n\r\n")
    assert [(r.headers, r.payload) for r in read_warc(tmp_path/"w")] == [({"warc-type": "response", "x-long": "one two three: 4", "content-length": "3"}, b"abc")]


@pytest.mark.parametrize("cut", [1, 5, 40, 100])
def test_damage_is_found_after_what_was_whole(cut, web, tmp_path):
    starts = write_warc(tmp_path/"w", web[:5])
    (tmp_path/"w").write_bytes((tmp_path/"w").read_bytes()[:starts[4] + cut])
    got = []
    with expect_error(ValueError, "record 6, near byte"):
        for r in read_warc(tmp_path/"w"): got.append(r.id)
    assert got == ["info", *(p.id for p in web[:4])]


@pytest.mark.parametrize("data, words", [(b"PK\3\4 a zip", "expected a record that begins"), (b"WARC/1.0\r\nWARC-Type: x\r\n\r\n", "content-length = ''"),
                                         (b"WARC/1.0\r\nContent-Length: 9e9\r\n\r\n", "'9e9', expected a number"), (b"WARC/1.0\r\n" + b"a"*200_000, "header line of over 64 KiB"),
                                         (record(b"abc")[:-5], "ends inside a record"), (bytes(4000), "expected a record that begins"), (b"\x1f\x8b\x08" + bytes(30), "record 1")],
                         ids=["zip", "no length", "odd length", "long line", "cut", "zeros", "bad gzip"])
def test_what_is_no_archive_is_rejected(data, words, tmp_path):
    (tmp_path/"f").write_bytes(data)
    with expect_error(ValueError, words): list(read_warc(tmp_path/"f"))


def test_what_is_no_truth_is_rejected(web, tmp_path):
    write_truth(tmp_path/"t", web[:3])
    lines = (tmp_path/"t").read_text(encoding="utf-8").splitlines()
    for bad in ("", "[]", "{", json.dumps(json.loads(lines[1]) | {"more": 1})):
        (tmp_path/"t").write_text("\n".join([lines[0], bad]) + "\n", encoding="utf-8")
        with expect_error(ValueError, "line 2 is not a page"): read_truth(tmp_path/"t")


def test_warcio_reads_the_same(web, tmp_path):
    "Its reader on our file, ours on its; headers, addresses and the bytes of a body after chunks and compression."
    warcio = pytest.importorskip("warcio")
    from io import BytesIO

    from warcio.archiveiterator import ArchiveIterator
    from warcio.statusandheaders import StatusAndHeaders
    from warcio.warcwriter import WARCWriter
    write_warc(tmp_path/"ours", web)
    with open(tmp_path/"ours", "rb") as f:
        theirs = [(r.rec_headers.get_header("WARC-Target-URI"), r.content_stream().read()) for r in ArchiveIterator(f) if r.rec_type == "response"]
    assert theirs == [(p.url, p.body) for p in web], warcio
    with open(tmp_path/"theirs", "wb") as f:
        writer = WARCWriter(f, gzip=True)
        for p in web[:50]:
            http = StatusAndHeaders("200 OK", [("Content-Type", "text/html")], protocol="HTTP/1.1")
            writer.write_record(writer.create_warc_record(p.url, "response", payload=BytesIO(p.body), http_headers=http))
    read = [r for r in read_warc(tmp_path/"theirs") if r.kind == "response"]
    assert isinstance(read[0], WarcRecord) and [(r.url, r.payload.partition(b"\r\n\r\n")[2]) for r in read] == [(p.url, p.body) for p in web[:50]]
