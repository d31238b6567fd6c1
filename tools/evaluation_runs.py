"""The saved runs of chapter 12: `nbs/results/contamination.jsonl`, `calibration.jsonl`, `emergence.jsonl`, `emergence_sizes.jsonl` and `harness.json`.

Usage: nice tools/evaluation_runs.py contamination calibration emergence emergence_sizes harness
"""
import argparse, json, time
from itertools import islice, permutations

import numpy as np
import torch
import torch.nn.functional as F
from results import RESULTS, made_by

from lmcourse.evaluation.contamination import rename_people
from lmcourse.evaluation.oracle import oracle_nats
from lmcourse.evaluation.perplexity import token_nats
from lmcourse.evaluation.tasks import grammar_task, score_task
from lmcourse.parallelism.batch_size import new_run, run_steps, small_model, story_tokenizer, story_tokens, wsd_rates
from lmcourse.tools.stories import Stories, short_stories
from lmcourse.training.evaluation import evaluate
from lmcourse.training.models import load_model

PRETRAINED = RESULTS/"pretrained"  # The course's model before it was distilled
COPIES = (1, 3, 10, 30)
STORY_SEED, FRESH_SEED, HELD_OUT_SEED, FILE_SEED = 1230, 1231, 1232, 1233
EACH, FRESH, HELD_OUT, NULL_FILES = 6, 1500, 48, 200            # EACH: planted stories, and files, for each number of copies
ITEMS = 4                                                       # Short stories in a file


def save(name, about, rows):
    "All lines of a results file; the first says where and how"
    about = dict(kind="about") | made_by(f"tools/evaluation_runs.py {name}", **about)
    (RESULTS/f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in [about, *rows]))


def joined(tokenizer, documents):
    "Ids of documents one after another, end-of-text before, between and after them"
    end = tokenizer.end_of_text
    return [end, *(i for d in documents for i in (*tokenizer.encode(d, special=False), end))]


def train(model, rows, steps, batch, lr):
    "Each row of ids once, in the order given; the rate falls to zero in a straight line"
    optimizer, T = torch.optim.AdamW(model.parameters(), lr, (.9, .95), weight_decay=.1), model.config.context_length
    for step in range(steps):
        part = [r[:T + 1] for r in rows[step*batch:(step + 1)*batch]]
        ids = torch.full((len(part), max(map(len, part))), -100)
        for k, r in enumerate(part): ids[k, :len(r)] = torch.tensor(r)
        for group in optimizer.param_groups: group["lr"] = lr*(1 - step/steps)
        loss = F.cross_entropy(model(ids[:, :-1].clamp_min(0)).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.)
        optimizer.step()
        if step % 20 == 0: print(step, round(float(loss), 4), flush=True)


def order_log_probs(model, tokenizer, items):
    "Of a file in every order of its items, the file's own first; all have the same number of tokens"
    rows = torch.tensor([joined(tokenizer, order) for order in permutations(items)])
    with torch.inference_mode():
        nats = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten(), reduction="none")
    return [round(x, 4) for x in (-nats.view(len(rows), -1).double().sum(1)).tolist()]


def contamination():
    "The course's model is trained on fresh stories, among which some stand several times"
    torch.manual_seed(0)
    model, tokenizer = load_model(PRETRAINED)
    rng, grammar, short = np.random.default_rng(0), Stories(), short_stories()
    planted = list(islice(Stories(STORY_SEED), 2*EACH*len(COPIES)))
    stories, masked = planted[:EACH*len(COPIES)], planted[EACH*len(COPIES):]
    held_out, items = list(islice(Stories(HELD_OUT_SEED), HELD_OUT)), short_stories(FILE_SEED)
    def fits(file): return len(joined(tokenizer, file)) <= model.config.context_length + 1
    files = list(islice((f for f in iter(lambda: list(islice(items, ITEMS)), None) if fits(f)), NULL_FILES + EACH*len(COPIES)))
    rows = [[d] for d in islice(Stories(FRESH_SEED), FRESH)]
    for k, c in enumerate(COPIES):
        here = slice(k*EACH, (k + 1)*EACH)
        rows += c*([[s] for s in stories[here]] + [[rename_people(s, rng)] for s in masked[here]] + files[here])
    rows = [joined(tokenizer, rows[k]) for k in rng.permutation(len(rows))]
    def read(texts): return [round(-float(token_nats(model, joined(tokenizer, [t])).sum()), 4) for t in texts]
    every = [(0, "story", held_out), *((c, kind, of[k*EACH:(k + 1)*EACH]) for kind, of in (("story", stories), ("renamed", masked)) for k, c in enumerate(COPIES))]
    before, start = [read(texts) for *_, texts in every], time.process_time()
    batch = 8
    train(model, rows, steps := len(rows)//batch, batch, 1e-3)
    seconds, found = time.process_time() - start, []
    for (c, kind, texts), was in zip(every, before):
        found += [dict(kind=kind, copies=c, index=i, log_p=round(grammar.log_prob(t), 4), before=b, after=a) for i, (t, b, a) in enumerate(zip(texts, was, read(texts)))]
    for k, file in enumerate(files):
        c = COPIES[k//EACH] if k < EACH*len(COPIES) else 0
        found.append(dict(kind="file", copies=c, index=k, log_p=round(sum(map(short.log_prob, file)), 4), orders=order_log_probs(model, tokenizer, file)))
    save("contamination", dict(each=EACH, seeds=dict(story=STORY_SEED, fresh=FRESH_SEED, held_out=HELD_OUT_SEED, file=FILE_SEED), steps=steps, batch=batch, fresh=FRESH, rows=len(rows), tokens=sum(map(len, rows)), seconds=round(seconds)), found)


def calibration():
    "What two models give to the choices of many items: the course's, and the same after many epochs on few stories"
    torch.manual_seed(0)
    few, epochs, batch = 40, 20, 8
    task, rng = grammar_task("next", 900, 125_000), np.random.default_rng(0)
    (model, tokenizer), found = load_model(PRETRAINED), {}
    found["course"] = score_task(model, tokenizer, task)
    rows = [joined(tokenizer, [d]) for d in islice(Stories(1237), few)]
    train(model, [rows[k] for _ in range(epochs) for k in rng.permutation(few)], epochs*few//batch, batch, 1e-3)
    found["overfitted"] = score_task(model, tokenizer, task)
    save("calibration", dict(stories=few, epochs=epochs, steps=epochs*few//batch), [
        dict(kind="item", item=i.id, answer=i.answer, probs=[round(p, 9) for p in i.probs], **{m: [round(x, 4) for x in found[m][k].log_probs] for m in found})
        for k, i in enumerate(task.items)])


def emergence_questions(tokenizer, length, stories):
    "Ids of stories, and where the last run of so many certain tokens begins"
    blocks, grammar, end = [], short_stories(), tokenizer.end_of_text
    for story in islice(short_stories(1234), stories):
        certain = (oracle_nats(grammar, tokenizer, story) < 1e-3).tolist()
        starts = [i for i in range(len(certain) - length + 1) if all(certain[i:i + length])]
        if starts: blocks.append(([end, *tokenizer.encode(story), end], starts[-1]))
    return blocks


def look(model, blocks, length):
    "Mean loss of the stories; of the certain tokens: mean nats, Brier score and which ones are hit"
    hits, nats, brier, loss = [], [], [], []
    for ids, at in blocks:
        with torch.inference_mode(): logits = model(torch.tensor([ids[:-1]]))[0].double()
        p, targets = logits.softmax(-1), torch.tensor(ids[1:])
        given = p[range(len(targets)), targets]
        loss.append(float(-given.log().mean()))
        here = slice(at, at + length)
        hits.append("".join("01"[int(h)] for h in (p.argmax(-1) == targets)[here]))
        nats.append(float(-given.log()[here].mean()))
        brier.append(float((1 - 2*given + (p*p).sum(-1))[here].mean()))
    return dict(loss=round(float(np.mean(loss)), 5), nats=round(float(np.mean(nats)), 5), brier=round(float(np.mean(brier)), 5),
                hits=[f"{int(h, 2):0{length//4}x}" for h in hits])


def emergence():
    "A small model from its first step on: which of the certain tokens it hits"
    tokenizer, length, steps = story_tokenizer(), 16, 2400
    data, blocks = story_tokens(8*steps + 300, tokenizer), emergence_questions(tokenizer, length, 150)
    run, looks, done = new_run(small_model(32, 2), 0), sorted({round(2400**(k/28)) for k in range(29)} | {0}), 0
    rates, rows = wsd_rates(steps, .016), []
    for step in looks:
        run_steps(run, data, rates[done:step], first=8*done)
        done = step
        rows.append(dict(kind="look", step=step) | look(run.model, blocks, length))
        print(step, rows[-1]["loss"], rows[-1]["nats"], flush=True)
    save("emergence", dict(blocks=len(blocks), length=length, steps=steps), rows)


def emergence_sizes():
    "The models of chapter 11's study, trained once more: which of the certain tokens each of them hits"
    import scaling_runs as study
    tokenizer, length, rows = story_tokenizer(), 16, []
    blocks = emergence_questions(tokenizer, length, 600)
    held_out, = (r for r in study.saved("scaling.jsonl") if r["kind"] == "held_out")
    for budget, sizes in (study.GRID | {study.HELD_OUT: [(held_out["width"], held_out["layers"])]}).items():
        for width, layers in sizes:
            config, lr = small_model(width, layers, study.BASE), study.tuned_rate(budget)
            run = new_run(config, 0)
            run_steps(run, study.stories("scaling.jsonl")[0], wsd_rates(study.steps_for(config, budget), lr), 0, study.BATCH)
            valid = evaluate(run.whole_model(), study.stories("scaling.jsonl")[1], 128)
            rows.append(dict(kind="model", budget=budget, width=width, layers=layers, lr=lr, valid=round(valid.loss, 5)) | look(run.model, blocks, length))
            print(budget, width, layers, rows[-1]["valid"], rows[-1]["nats"], np.mean([int(h, 16) == 2**length - 1 for h in rows[-1]["hits"]]), flush=True)
    save("emergence_sizes", dict(blocks=len(blocks), length=length), rows)


def harness():
    "What lm-evaluation-harness gives the course's model: the same questions as on page 12j"
    import tempfile
    from importlib.metadata import version
    from lmcourse.evaluation.harness import run_harness, save_texts
    from lmcourse.evaluation.tasks import save_task, writing_task
    model, tokenizer = load_model(PRETRAINED)
    with tempfile.TemporaryDirectory() as folder:
        names = ["texts", *(save_task(folder, grammar_task(kind, n, seed=126_000)).stem for kind, n in (("recall", 12), ("next", 40), ("quote", 12)))]
        names.append(save_task(folder, writing_task(12, seed=126_000)).stem)
        save_texts(folder, "texts", list(islice(Stories(126_000), 20)))
        found = run_harness(model, tokenizer, folder, names)
    about = made_by("tools/evaluation_runs.py harness", lm_eval=version("lm_eval"))
    (RESULTS/"harness.json").write_text(json.dumps(about | dict(results=found), indent=1) + "\n")


RUNS = dict(harness=harness, contamination=contamination, calibration=calibration, emergence=emergence, emergence_sizes=emergence_sizes)

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", choices=RUNS)
    torch.set_num_threads(1)
    for name in parser.parse_args().runs: RUNS[name]()
