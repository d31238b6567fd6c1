"`lmcourse eval`: a card for the course's model and for a run, files that are whole or not there, and mistakes that are one line before any work."
import json
import re
import shutil

import pytest

torch = pytest.importorskip("torch")

from processes import here
from test_cli import TINY, write_days

from lmcourse.app import analysis_commands, cli
from lmcourse.evaluation.report import report_card, training_texts
from lmcourse.evaluation.tasks import Item, Task, grammar_task, save_task, writing_task, written_words
from lmcourse.training.models import load_model


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    "A folder with data, a run of 20 steps on it, and tasks in files."
    folder = tmp_path_factory.mktemp("eval")
    write_days(folder/"days.txt")
    for words in ("tokenizer text:days.txt tok --vocab-size 300", "prepare text:days.txt data --tokenizer tok --valid-documents 5"):
        done = here(*words.split(), cwd=folder)
        assert done.returncode == 0, done.stderr
    done = here("train", "data", "run", "--steps", 20, *TINY, cwd=folder)
    assert done.returncode == 0, done.stderr
    context, choices = "On day 5000 the fox went to the", (" wood and came", " seven and came")
    save_task(folder, Task("days", tuple(Item(f"q{i}", context.replace("5000", str(5000 + i)), choices, 0, f"q{i}") for i in range(4))))
    save_task(folder, Task("leaked", (Item("q0", "On day 7 the fox went to the", choices, 0, "q0"),)))
    save_task(folder, Task("long", (Item("q0", "Say:", (" fox"*200, " hen"), 0, "q0"),)))
    (folder/"broken.yaml").write_text("task: broken\n")
    return folder


def rows(card):
    "Of a card in Markdown: task and unit to the row as a dict, from both of its tables."
    found = {}
    for table in re.findall(r"(?:^\|.*\n)+", card, flags=re.M):
        head, _, *lines = [[w.strip() for w in line.strip("|").split("|")] for line in table.splitlines()]
        for r in lines: found.setdefault((r[0], r[1]), {}).update(zip(head, r))
    return found


def test_a_card_of_the_courses_model_is_what_the_library_says(tmp_path):
    done = here("eval", "quickstart", "--tasks", "recall,stories", "--stories", 3, "--norm", "byte", "--seed", 77, "--out", "card.md", "card.html", cwd=tmp_path)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert {p.name for p in tmp_path.iterdir()} == {"card.md", "card.html"}
    model, tokenizer = load_model()
    card = report_card(model, tokenizer, ("recall", "stories"), 3, 77, "byte", training=training_texts(None, tokenizer))
    assert (tmp_path/"card.md").read_text() == card.markdown() and (tmp_path/"card.html").read_text() == card.html()
    assert repr(card) in done.stdout and "in card.md\nin card.html" in done.stdout
    found = rows(card.markdown())
    assert [*found] == [("recall", "right"), ("stories", "bits/byte"), ("stories", "perplexity")]
    for row in found.values():
        assert float(row["low"]) <= float(row["value"]) <= float(row["high"]) and row["seed"] == "77" and row["n"] == row["stories"] == "3"
    assert found["recall", "right"]["norm"] == "byte" and "overlap with the training text: none" in card.markdown()


def test_what_is_written_counts_and_a_file_gives_the_same(tmp_path):
    save_task(tmp_path, task := writing_task(4, 77))
    for tasks, card in (("write", "a.md"), ("write.yaml", "b.md")):
        done = here("eval", "--tasks", tasks, "--stories", 4, "--seed", 77, "--out", card, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    found = rows((tmp_path/"a.md").read_text())
    assert (tmp_path/"a.md").read_text() == (tmp_path/"b.md").read_text() and [*found] == [("write", "right"), ("write", "pass@5")]
    model, tokenizer = load_model()
    right = [w == i.right for w, i in zip(written_words(model, tokenizer, task), task.items)]
    assert float(found["write", "right"]["value"]) == sum(right)/4 and found["write", "right"]["n"] == "4" and found["write", "pass@5"]["norm"] == "T = 1"
    chance = [1/44, 1/44, 1/7, 1/7]
    assert [i.chance for i in task.items] == chance and float(found["write", "pass@5"]["chance"]) == pytest.approx(sum(1 - (1 - c)**5 for c in chance)/4, abs=1e-4)
    (tmp_path/"write.jsonl").write_text('{"id": "a", "context": "b", "right": "two words", "cluster": "a", "chance": 0.5}\n')
    done = here("eval", "--tasks", "write.yaml", cwd=tmp_path)
    assert done.returncode == 2 and "write.jsonl, line 1: prompt a: right = 'two words'" in done.stderr and done.stderr.count("\n") == 1


def test_no_run_is_the_courses_model_and_a_copy_of_it_has_no_training_text(tmp_path):
    from importlib.resources import files
    shutil.copytree(str(files("lmcourse").joinpath("data/quickstart")), tmp_path/"mine")
    words = ("--tasks", "pairs", "--stories", 2)
    ours, copy = here("eval", *words, cwd=tmp_path), here("eval", "mine", *words, cwd=tmp_path)
    assert ours.returncode == copy.returncode == 0, ours.stderr + copy.stderr
    assert "Report card of the course's model" in ours.stdout and "overlap with the training text: none" in ours.stdout
    assert "Report card of mine" in copy.stdout and "overlap with the training text: not searched" in copy.stdout
    one, two = (re.findall(r"^pairs.*", done.stdout, re.M) for done in (ours, copy))
    assert one == two and one


def test_a_run_answers_questions_in_files(work):
    done = here("eval", "run", "--tasks", "days.yaml,recall", "--stories", 2, "--out", "run.md", cwd=work)
    assert done.returncode == 0, done.stderr
    found = rows((work/"run.md").read_text())
    (work/"run.md").unlink()
    days = found["days", "right"]
    assert days["n"] == "4" and days["ceiling"] == days["score"] == days["seed"] == "–" and float(days["chance"]) == .5
    assert json.loads((work/"data"/"tokenizer"/"tokenizer.json").read_text()) and ("recall", "right") in found


def test_a_model_of_another_text_is_told_what_the_tasks_are_about(work):
    done = here("eval", "run", cwd=work)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    for words in ("run learnt from text:days.txt, and the usual tasks are about the course's stories", "--tasks", "Its own text: validation loss ", "(perplexity "): assert words in done.stderr
    shutil.copytree(work/"run", work/"stories")                # The same model, said to be one of stories
    shutil.copytree(work/"data", work/"stories-data")
    for path, change in ((work/"stories/config.json", dict(data="../stories-data")), (work/"stories-data/train.json", dict(source="stories"))):
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    try: analysis_commands.refuse_other_text(work/"stories")
    finally:
        for name in ("stories", "stories-data"): shutil.rmtree(work/name)


def test_a_folder_named_quickstart_is_a_run(work):
    shutil.copytree(work/"run", work/"quickstart")
    done = here("eval", "quickstart", "--tasks", "days.yaml", cwd=work)
    shutil.rmtree(work/"quickstart")
    assert done.returncode == 0 and "Report card of quickstart" in done.stdout, done.stderr


MISTAKES = [("eval none", "none: no such file or folder"), ("eval --tasks recal", "unknown task 'recal'"), ("eval --tasks ,", "no tasks"), ("eval --tasks next,next", "appears twice"),
            ("eval --seed 0", "train stories"), ("eval --seed 1 --tasks stories", "valid stories"), ("eval --stories 1", "stories = 1"), ("eval --norm char", "'char'"),
            ("eval --out card.txt", "ends in .md or .html"), ("eval --out no/card.md", "no such folder"), ("eval --out days.txt.md taken.md", "taken.md exists"),
            ("eval --out a.md ./a.md", "the same file"), ("eval --tasks none.yaml", "no such task"), ("eval --tasks broken.yaml", "no data_files"), ("eval run --tasks long.yaml", "a choice of"),
            ("eval run --tasks days.yaml,leaked.yaml", "occurs in the training text"), ("eval --device abacus", "abacus"), ("eval cut --tasks days.yaml", "tokenizer")]


@pytest.mark.parametrize("words, said", MISTAKES, ids=[w for w, _ in MISTAKES])
def test_a_mistake_is_one_line_and_leaves_nothing(work, words, said, monkeypatch):
    import lmcourse.evaluation.report as report
    def never(*args): raise RuntimeError("the model was asked")
    monkeypatch.setattr(report, "score_task", never)
    monkeypatch.setattr(report, "perplexity", never)
    (work/"taken.md").write_text("mine")
    if "cut" in words and not (work/"cut").exists():            # A run whose tokenizer was trained anew
        for name in ("run", "data"): shutil.copytree(work/name, work/f"other_{name}")
        (work/"other_run").rename(work/"cut")
        config = json.loads((work/"cut/config.json").read_text())
        (work/"cut/config.json").write_text(json.dumps(config | {"data": "../other_data"}))
        done = here("tokenizer", "text:days.txt", "other", "--vocab-size", 290, cwd=work)
        assert done.returncode == 0, done.stderr
        shutil.rmtree(work/"other_data/tokenizer")
        (work/"other").rename(work/"other_data/tokenizer")
    before = sorted(p.relative_to(work) for p in work.rglob("*"))
    done = here(*words.split(), cwd=work)
    assert done.returncode == 2 and not done.stdout, done.stdout
    assert done.stderr.startswith("lmcourse: ") and done.stderr.count("\n") == 1 and said in done.stderr, done.stderr
    assert sorted(p.relative_to(work) for p in work.rglob("*")) == before and (work/"taken.md").read_text() == "mine"


def test_a_task_of_the_training_stories_is_caught_for_the_courses_model(tmp_path):
    from itertools import islice
    from lmcourse.tools.documents import documents
    story = list(islice(documents("stories", "train"), 40))[-1]
    save_task(tmp_path, Task("seen", (Item("q0", story[:150], (story[150:170], " plum"), 0, "q0"),)))
    done = here("eval", "--tasks", "seen.yaml", cwd=tmp_path)
    assert done.returncode == 2 and "occurs in the training text" in done.stderr, done.stderr


def test_questions_of_other_seeds_differ():
    assert grammar_task("next", 4, 5) != grammar_task("next", 4, 6)


def test_a_card_that_another_process_has_written_meanwhile_is_kept(tmp_path, monkeypatch, capsys):
    from lmcourse.evaluation import report
    fill, card = report.fill_card, tmp_path/"card.md"
    def meanwhile(*args): card.write_text("theirs"); return fill(*args)
    monkeypatch.setattr(report, "fill_card", meanwhile)
    with pytest.raises(SystemExit) as end: cli.main(["eval", "--tasks", "recall", "--stories", "2", "--out", str(card)])
    told = capsys.readouterr()
    assert end.value.code == 2 and told.err == f"lmcourse: {card} exists; name a file that does not\n" and "recall" in told.out
    assert card.read_text() == "theirs"
