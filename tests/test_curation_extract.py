"Answers of servers, character sets and the main text of a page, judged by the grammar; and what is damaged, hostile or no text at all."
import gzip
import random
import zlib
from collections import Counter

import pytest

from lmcourse.curation.extract import decode_html, extract_text, extract_text_from_html_bytes, http_response, read_documents
from lmcourse.curation.warc import write_warc
from lmcourse.curation.web import planted_web
from lmcourse.tools.checks import expect_error
from lmcourse.tools.stories import Stories

PLAIN = str.maketrans("“”’", "\"\"'")


@pytest.fixture(scope="module")
def web(): return planted_web(500, seed=11)


def answer(body, status="200 OK", **headers):
    return f"HTTP/1.1 {status}\r\n".encode() + "".join(f"{k.replace('_', '-')}: {v}\r\n" for k, v in headers.items()).encode() + b"\r\n" + body


def warc(*payloads):
    return b"".join(b"WARC/1.0\r\nWARC-Type: response\r\nWARC-Record-ID: <urn:x:%d>\r\nContent-Length: %d\r\n\r\n%s\r\n\r\n" % (i, len(p), p) for i, p in enumerate(payloads))


def test_pages_parse_unless_their_trap_is_a_sentence(web):
    "On a web that the notebook did not look at: each layout, each character set."
    grammar, right, pages = Stories(), Counter(), Counter()
    for p in web:
        if p.kind not in ("story", "exact", "test"): continue
        text = extract_text_from_html_bytes(p.body, f"text/html; charset={p.declared}").translate(PLAIN)
        hard = p.trap in ("quote", "signup")
        pages[hard] += 1
        right[hard] += bool(grammar.log_probs(" ".join(text.split())))
    assert right[False]/pages[False] > .99 and right[True] == 0 and .8 < sum(right.values())/sum(pages.values()) < .99


def test_all_kinds_come_out_as_planted(web):
    "The words of foreign pages, spam and random words too, where no trap stands between them."
    whole = {kind: [" ".join(extract_text(decode_html(p.body)).translate(PLAIN).split()) == " ".join(p.text.split()) for p in web if p.kind == kind and not p.trap]
             for kind in ("foreign", "spam", "nsfw", "toxic", "pii", "near", "teaser")}
    assert all(sum(v) >= .9*len(v) for v in whole.values()), {k: sum(v)/len(v) for k, v in whole.items()}


@pytest.mark.parametrize("sizes", [[1], [5, 3], [1]*20])
@pytest.mark.parametrize("coding", ["", "gzip", "deflate", "gzip, gzip"])
def test_bodies_are_unpacked(sizes, coding):
    body = random.Random(1).randbytes(100)
    packed = body
    for c in filter(None, coding.split(", ")): packed = gzip.compress(packed) if c == "gzip" else zlib.compress(packed)
    assert http_response(answer(packed, Content_Encoding=coding)).body == body
    parts, at = [], 0
    for s in [*sizes, len(packed)]:
        parts.append(packed[at:at + s])
        at += s
    chunked = b"".join(b"%X;x=y\r\n%s\r\n" % (len(p), p) for p in parts if p) + b"0\r\n\r\n"
    assert http_response(answer(chunked, Content_Encoding=coding, Transfer_Encoding="Chunked")).body == body


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_body_that_was_cut_is_damaged(cut):
    body = gzip.compress(random.Random(2).randbytes(80), mtime=0)
    with expect_error(ValueError, "gzip"): http_response(answer(body[:-cut], Content_Encoding="gzip"))
    chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    with expect_error(ValueError, "chunk"): http_response(answer(chunked[:-cut - 5], Transfer_Encoding="chunked"))


def test_a_body_that_unpacks_to_too_much_is_named_so():
    bomb = answer(gzip.compress(bytes(10_000)), Content_Encoding="gzip")
    assert len(http_response(bomb, 10_000).body) == 10_000
    with expect_error(ValueError, "unpacks to more than 9999 bytes"): http_response(bomb, 9_999)


@pytest.mark.parametrize("charset", ["utf-8", "utf-8-sig", "utf-16", "windows-1252", "koi8-r", "shift_jis", "windows-1251"])
def test_what_is_said_is_believed_where_the_bytes_allow_it(charset):
    text = {"koi8-r": "привет", "windows-1251": "привет", "shift_jis": "こんにちは"}.get(charset, "“Größe” é")
    page = f"<p>{text}</p>"
    assert decode_html(page.encode(charset), f"text/html; charset={charset}") == page
    assert decode_html(page.encode(charset), f'text/html; charset="{charset.upper()}"') == page
    meta = f"<meta charset='{charset.removesuffix('-sig')}'>{page}"
    assert decode_html(meta.encode(charset)) == meta


def test_lies_about_the_character_set():
    for said in ("utf-8", "iso-8859-1", "ascii", "utf-16", "nonsense", "undefined", ""):
        assert decode_html("“é”".encode("cp1252"), f"text/html; charset={said}") == "“é”"
        assert decode_html("“é”".encode(), f"text/html; charset={said}") == "“é”"


@pytest.mark.parametrize("label,codec,text", [
    ("windows-874", "cp874", "ภาษาไทย"), ("iso-8859-8-i", "iso-8859-8", "עברית"), ("big5", "big5hkscs", "裏"), ("gb2312", "gb18030", "㐂"),
    ("windows-31j", "cp932", "①"), ("windows-949", "cp949", "똠"), ("x-euc-jp", "euc-jp", "日本"), ("iso_8859-1", "cp1252", "“é”")])
def test_names_that_python_does_not_know_are_read_as_in_browsers(label, codec, text):
    "The codecs are those of the encoding standard, https://encoding.spec.whatwg.org; webencodings 0.6.1 reads the same."
    assert decode_html(text.encode(codec), f"text/html; charset={label}") == decode_html(text.encode(codec), f"text/html; charset={label.upper()}") == text


@pytest.mark.parametrize("charset,text", [("utf-8", "“Größe” – naïve…"), ("shift_jis", "日本語のテスト"), ("gb2312", "中文测试页面"), ("euc-kr", "한국어 시험")])
def test_a_letter_that_was_cut_does_not_spoil_the_page(charset, text):
    "resiliparse 2.0.1 and browsers read these pages in the same charset."
    page = f"<p>{text*3}</p>"
    for said in (charset, f"{charset}; lang=x"):
        assert decode_html(page.encode(charset) + text[0].encode(charset)[:1], f"text/html; charset={said}") == page + "\ufffd"
    assert (decode_html(page.encode(charset) + text[0].encode(charset)[:1]) == page + "\ufffd") == (charset == "utf-8")


@pytest.mark.parametrize("codec,text", [
    ("cp1252", "Où est l’été “déjà” passé ? Æther, Größe"), ("cp1251", "Съешь ещё этих булок"), ("koi8-r", "Съешь ещё этих булок"), ("gbk", "中文测试页面你好世界"),
    ("cp932", "日本語のテストｶﾀｶﾅ"), ("euc-jp", "日本語のテスト"), ("cp949", "한국어 시험 화면"), ("big5hkscs", "中文測試頁面"), ("cp1255", "דג סקרן שט בים"), ("cp874", "ภาษาไทย")])
def test_no_other_charset_is_taken_for_damaged_utf_8(codec, text):
    assert decode_html(text.encode(codec), f"text/html; charset={codec}") == text


def test_chapters_in_chapters_keep_half_of_the_page():
    "On 255 pages of documentation the rule of half of the parent's words lost up to 89 % of what trafilatura 2.3 extracts; this one never steps into less than half of the text."
    def chapter(depth): return "<div>" + ("<p>One two three four five.</p>"*12 if not depth else chapter(depth - 1) + "<p>One two three four five.</p>"*9) + "</div>"
    for depth in range(6):
        page = f"<body>{chapter(depth)}</body>"
        assert 2*len(extract_text(page).split()) > page.count("five")*5


def test_every_page_of_odd_bytes_ends_in_text_or_nothing():
    rng = random.Random(5)
    pieces = ["<p>", "</p>", "<div", ">", "<!--", "-->", "<script>", "&#x", "&amp", "<td>", "<table>", "</b>", "text. ", "\0", "<pre>\n\n", "<![CDATA[", "<?x", "</", "<a href='"]
    for _ in range(300):
        text = extract_text("".join(rng.choice(pieces) for _ in range(rng.randrange(40))))
        assert text == "\n".join(" ".join(line.split()) for line in text.split("\n"))


@pytest.mark.parametrize("body", [b"", bytes(5000), bytes(range(256))*20, b"\x89PNG\r\n\x1a\n" + bytes(500), random.Random(3).randbytes(5000)], ids=["empty", "zeros", "all bytes", "png", "random"])
def test_what_is_no_text_gives_none(body): assert extract_text_from_html_bytes(body) == ""


def test_nothing_is_dropped_without_a_reason(tmp_path):
    page = b"<p>A text of a page.</p>"
    (tmp_path/"w").write_bytes(warc(
        answer(page), answer(page, "404 Not Found"), answer(page, Content_Type="image/png"), answer(b"9\r\nabc", Transfer_Encoding="chunked"), b"no answer",
        answer(bytes(100)), answer(b"<nav>Home</nav>"), answer(b"<p>" + b"long "*1000), answer(gzip.compress(bytes(100_000)), Content_Encoding="gzip")))
    found = list(read_documents(tmp_path/"w", max_bytes=3000))
    assert [why for _, why in found] == ["", "status", "not HTML", "damaged", "damaged", "no text", "no text", "truncated", "damaged"]
    assert [d.text for d, _ in found] == ["A text of a page."] + [""]*8 and [d.id for d, _ in found] == list("012345678")


def test_what_a_name_server_said_is_no_damaged_page(tmp_path):
    said = b"20260101000000\nexample.org. 300 IN A 192.0.2.1\n"
    head = f"WARC/1.0\r\nWARC-Type: response\r\nWARC-Target-URI: dns:example.org\r\nContent-Type: text/dns\r\nContent-Length: {len(said)}\r\n\r\n"
    (tmp_path/"w").write_bytes(head.encode() + said + b"\r\n\r\n")
    assert [(d.url, why) for d, why in read_documents(tmp_path/"w")] == [("dns:example.org", "not HTML")]


def test_texts_that_others_extracted(web, tmp_path):
    write_warc(tmp_path/"w.wet.gz", web[:30], wet=True)
    found = list(read_documents(tmp_path/"w.wet.gz"))
    assert [d.text for d, _ in found] == [f"{p.title}\n{p.text}\n" for p in web[:30]] and not any(why for _, why in found)
    cut = list(read_documents(tmp_path/"w.wet.gz", max_bytes=400))                      # Like a page that is too long
    assert [why for _, why in cut] == ["truncated"*(len(d.text.encode()) > 400) for d, _ in found] and {d.text for d, why in cut if why} == {""}


def test_a_damaged_archive_gives_what_was_whole_first(web, tmp_path):
    starts = write_warc(tmp_path/"w", web[:8])
    (tmp_path/"w").write_bytes((tmp_path/"w").read_bytes()[:starts[6] + 60])
    got = []
    with expect_error(ValueError, "record 8, near byte"):
        for d, _ in read_documents(tmp_path/"w"): got.append(d.id)
    assert got == [p.id for p in web[:6]]


def test_an_archive_of_warcio_gives_the_same_documents(web, tmp_path):
    pytest.importorskip("warcio")
    from io import BytesIO

    from warcio.statusandheaders import StatusAndHeaders
    from warcio.warcwriter import WARCWriter
    write_warc(tmp_path/"ours", web[:60])
    with open(tmp_path/"theirs", "wb") as f:
        writer = WARCWriter(f, gzip=True)
        for p in web[:60]:
            http = StatusAndHeaders("200 OK", [("Content-Type", f"text/html; charset={p.declared}")], protocol="HTTP/1.1")
            writer.write_record(writer.create_warc_record(p.url, "response", payload=BytesIO(p.body), http_headers=http))
    assert [(d.url, d.text, why) for d, why in read_documents(tmp_path/"theirs")] == [(d.url, d.text, why) for d, why in read_documents(tmp_path/"ours")]
