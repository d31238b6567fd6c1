"Rows of one tape, batches of one epoch, and parsers of replies."
import json
import re

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings
from hypothesis import strategies as st

from lmcourse.alignment.instructions import PackedSftDataset, iterate_batches, parse_gsm8k_response, parse_mmlu_response, read_conversations


class Bytes: # Ids of characters; 0 ends a text
    end_of_text = 0
    def encode(self, text): return list(text.encode())


def write(path, pairs):
    path.write_text("".join(json.dumps(dict(prompt=p, response=r)) + "\n" for p, r in pairs), encoding="utf-8")
    return path


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.text("abc", min_size=1, max_size=9), st.text("xyz", min_size=1, max_size=9)), min_size=4, max_size=9), st.integers(1, 7))
def test_pieces_join_up_to_the_tape(tmp_path_factory, pairs, length):
    path = write(tmp_path_factory.mktemp("tape")/"data.jsonl", pairs)
    tape = [t for p, r in pairs for t in [*(f"Q{p}A{r}").encode(), 0]]
    data = PackedSftDataset(Bytes(), path, length, False, template="Q{prompt}A{response}")
    assert len(data) == (len(tape) - 1)//length
    assert [t for i in range(len(data)) for t in data[i]["input_ids"].tolist()] == tape[:len(data)*length]
    assert [t for i in range(len(data)) for t in data[i]["labels"].tolist()] == tape[1:len(data)*length + 1]
    assert all(v.shape == (length,) and v.dtype == torch.int64 for v in data[0].values())


def test_shuffled_conversations_stay_whole(tmp_path):
    path = write(tmp_path/"data.jsonl", [(c*3, c.upper()*2) for c in "abcdefgh"])
    straight, mixed, again, other = (PackedSftDataset(Bytes(), path, 6, s, seed=k) for s, k in ((False, 0), (True, 0), (True, 0), (True, 1)))
    assert torch.equal(mixed.input_ids, again.input_ids) and not torch.equal(mixed.input_ids, straight.input_ids) and not torch.equal(mixed.input_ids, other.input_ids)
    assert {tuple(r) for r in mixed.input_ids.tolist()} <= {(*(c*3 + c.upper()*2).encode(), 0) for c in "abcdefgh"}


@pytest.mark.parametrize("n, size", [(10, 3), (10, 10), (10, 99), (1, 1)])
def test_an_epoch_has_every_element_once(n, size):
    data = [dict(input_ids=torch.tensor([i]), labels=torch.tensor([-i])) for i in range(n)]
    for shuffle in (False, True):
        batches = list(iterate_batches(data, size, shuffle, seed=3))
        ids = torch.cat([b["input_ids"] for b in batches]).flatten().tolist()
        assert sorted(ids) == list(range(n)) and torch.equal(torch.cat([b["labels"] for b in batches]), -torch.cat([b["input_ids"] for b in batches]))
        assert [len(b["labels"]) for b in batches] == [min(size, n - i) for i in range(0, n, size)]
        if n > 1: assert (ids == list(range(n))) == (not shuffle)
    with pytest.raises(ValueError, match="batch_size = 0"): iterate_batches(data, 0, False)


EXAMPLE = dict(options=["Paris", "a national holiday", "42", "all of them"])


@pytest.mark.parametrize("text, letter", [
    ("The correct answer is B. There are many of them.", "B"), ("Answer: C", "C"), ("the answer is (D).", "D"), ("answer is: A", "A"), ("A", "A"), (" b", None), ("**C**", "C"), ("(A) because", "A"), ("D) all", "D"),
    ("A good question.", None), ("A national day? No: the answer is D", "D"), ("The answer is A. No, the answer is C.", "C"), ("It must be Paris!", "A"), ("Parisian", None), ("Paris, or all of them", None), ("", None), ("Clearly 42.", "C"), ("142", None),
    ("The answer is Alabama", None), ("The answer is B's", None), ("Because", None),
    ("The answer is B and not 42.", "B"), ("The answer is B and it is not Paris.", "B"), ("The answer is A or B.", None), ("The answer is (A) or (B).", None), ("The answer is **C** and **D**", None),
    ("The answer is A, B or C.", None), ("The answer is A & B", None), ("The answer is (B)/(C).", None), ("The answer is A, or B.", None), ("The answer is B, not A.", "B"), ("The answer is B, since it has to.", "B"),
    ("(A) or (B)", None), ("A), B)", None), ("**A** and **B**", None), ("A.", "A"), ("(A), since B is wrong", "A")])
def test_letters(text, letter): assert parse_mmlu_response(EXAMPLE, text) == letter


@pytest.mark.parametrize("text, number", [
    ("She sold 15 clips.", "15"), ("Natalia sold 48/2 = 24 clips, 48+24 = 72.", "72"), ("1,234,567", "1234567"), ("$3.50!", "3.50"), ("-7", "-7"), ("−7 degrees", "-7"), ("x-7", "7"), ("no number", None), ("", None), ("12, 13", "13"),
    ("1,2", "2"), ("10,00", "00"), (".5", ".5"), ("5.", "5"), ("5 .", "5"), ("He has 1,000.", "1000"), ("2024-11-05", "05"),
    ("a loss of -$1,234.50", "-1234.50"), ("−$5", "-5"), ("3-$5", "5"), ("US$7", "7"), ("(12,3456)", "3456"), ("1,234,5678", "5678"), ("1,234,567.", "1234567"), ("-.5", "-.5"), ("$.50", ".50")])
def test_numbers(text, number): assert parse_gsm8k_response(text) == number


@pytest.mark.parametrize("text, words", [("{", "line 1 is not JSON"), ("["*100_000, "line 1 is not JSON"), ('{"prompt": "a", "response": "b"}\n{"prompt": "\xe9", "response": "b"}', "line 2 is not JSON"), ('{"prompt": "a"}', "line 1 has no text 'response'"), ('{"prompt": "a", "response": "b"}\n[]', "line 2 is '[]', expected an object"), ('{"prompt": 1, "response": "b"}', "no text 'prompt'")])
def test_what_is_no_conversation(tmp_path, text, words):
    (tmp_path/"data.jsonl").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=re.escape(words)): read_conversations(tmp_path/"data.jsonl")


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_a_line_ends_only_where_json_lines_end(tmp_path, line_end):
    pairs = [dict(prompt="a\u2028b\u2029", response="c\x85d"), dict(prompt="e", response="f")]
    (tmp_path/"data.jsonl").write_bytes(line_end.join(json.dumps(p, ensure_ascii=False) for p in pairs).encode("utf-8-sig") + line_end.encode())
    assert read_conversations(tmp_path/"data.jsonl") == pairs


@pytest.mark.parametrize("end", ["\n\n", "\n \t\r\n\n", "", "\r\n\r\n"])
def test_blank_lines_are_skipped_and_counted(tmp_path, end):
    file, pair = tmp_path/"data.jsonl", json.dumps(dict(prompt="a", response="b"))
    for between in ("\n", "\n\n", "\r\n \r\n"):
        file.write_bytes(f"{pair}{between}{pair}{end}".encode())
        assert read_conversations(file) == [dict(prompt="a", response="b")]*2
    file.write_bytes(f"{pair}\n\n{{}}{end}".encode())
    with pytest.raises(ValueError, match="line 3 has no text 'prompt'"): read_conversations(file)


def test_too_little_for_a_piece(tmp_path):
    path = write(tmp_path/"data.jsonl", [("a", "b")])
    assert len(PackedSftDataset(Bytes(), path, 2, False)) == 1
    for length, words in ((3, "3 tokens, expected more than seq_length = 3"), (0, "seq_length = 0")):
        with pytest.raises(ValueError, match=words): PackedSftDataset(Bytes(), path, length, False)
    for template in ("{prompt}", "{prompt}{instruction}{response}", "{} {}", '{"q": {prompt}{response}}'):
        with pytest.raises(ValueError, match="expected prompt and response"): PackedSftDataset(Bytes(), path, 2, False, template)
    with pytest.raises(ValueError, match="0 tokens"): PackedSftDataset(Bytes(), write(tmp_path/"none.jsonl", []), 2, False)
    with pytest.raises(FileNotFoundError, match="no such file"): PackedSftDataset(Bytes(), tmp_path/"nowhere", 2, False)
