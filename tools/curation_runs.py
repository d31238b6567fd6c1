"""The saved runs of chapter 13: one small model on raw, duplicated, noisy, cleaned and clean text (`nbs/results/curation.jsonl`), and the memory that
`lmcourse curate` needs for 75 MB, 300 MB and 2 GB of planted pages (`nbs/results/curation_memory.jsonl`; 4 GB of disk, half an hour of two cores).

A run that stands in the file already is not repeated, so a run that was stopped goes on.
Usage: nice tools/curation_runs.py clean duplicated noisy raw cleaned
       nice tools/curation_runs.py memory
"""
import argparse, json, resource, subprocess, sys, tempfile, time
from functools import cache
from itertools import islice
from pathlib import Path

from results import RESULTS, done, write

from lmcourse.curation.pipeline import Recipe, curate, kept_documents, read_shard, workers
from lmcourse.curation.warc import write_warc
from lmcourse.curation.web import planted_web
from lmcourse.tools.config import ModelConfig, TrainConfig
from lmcourse.tools.stories import Stories
from lmcourse.tokenization.tokenizer import Tokenizer
from lmcourse.training.data import TokenDataset, write_dataset
from lmcourse.training.trainer import Trainer

RECIPE = RESULTS/"recipe.toml"
PAGES, SEEDS = 1500, (0, 1, 2)
MODEL = ModelConfig(vocab_size=1024, context_length=128, d_model=64, num_layers=2, num_heads=4, qk_norm=True, tie_embeddings=True)
TRAIN = TrainConfig(steps=400, batch_size=8, lr=.006, min_lr=3e-4, warmup_steps=40, windows="random", eval_every=10_000, checkpoint_every=10_000,
                    log_every=1000, device="cpu")


@cache
def tokenizer(): return Tokenizer.train(islice(Stories(seed=101), 600), MODEL.vocab_size)


def web(folder, seed):
    "An archived web, of which nothing but the pages is looked at"
    if not (path := Path(folder)/"web.warc.gz").exists(): write_warc(path, planted_web(PAGES, seed=500 + seed))
    return path


def texts(kind, seed, folder):
    "Training documents; about as many of each kind, but for what the pipeline drops"
    stories = Stories(seed=1000 + seed)
    if kind == "clean": return list(islice(stories, PAGES))
    if kind == "duplicated": return list(islice(stories, PAGES//20))*20
    if kind == "noisy":
        faults = [p.text for p in planted_web(PAGES, seed=500 + seed) if p.kind in ("spam", "noise", "foreign", "nsfw", "toxic", "code", "list")]
        return (faults*20)[:PAGES//2] + list(islice(stories, PAGES//2))
    if kind == "raw": return [d.text for d, why in read_shard(web(folder, seed)) if not why]
    curate(web(folder, seed), Path(folder)/"out", Recipe.load(RECIPE))
    return [d.text for d in kept_documents(Path(folder)/"out")]


def run(kind, seed):
    "One line for the file"
    start = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        documents = texts(kind, seed, folder)
        write_dataset(data := Path(folder)/"data", "stories", tokenizer(), documents, list(islice(Stories(seed=1), 400)), threads=1)
        train, valid = (TokenDataset.open(data/name, verify=False) for name in ("train", "valid"))
        trainer = Trainer(MODEL, TrainConfig.from_dict(TRAIN.to_dict() | dict(seed=seed)), train, valid)
        result = trainer.fit(Path(folder)/"run")
    return dict(kind=kind, seed=seed, documents=len(documents), tokens=len(train.tokens), read=TRAIN.steps*trainer.plan.tokens,
                loss=round(result.loss, 5), excess=round(result.excess, 5), error=round(result.error, 5), seconds=round(time.process_time() - start, 1))


PAGES_OF_A_SHARD = 15_000
CRAWL = Recipe.from_dict(dict(steps=[dict(step=name) for name in ("gopher", "quality", "exact", "minhash")]))


def crawl(folder, megabytes):
    "Shards of planted webs, each with its own seed, until so many megabytes of HTML are archived; bytes of HTML and of the files"
    folder.mkdir()
    html = shard = 0
    while html < 1e6*megabytes:
        web = planted_web(PAGES_OF_A_SHARD, seed=10_000 + shard)
        write_warc(folder/f"{shard:04}.warc.gz", web)
        html, shard = html + sum(len(p.body) for p in web), shard + 1
    return dict(shards=shard, html=html, archived=sum(p.stat().st_size for p in folder.iterdir()))


def curated_alone(source, out):
    "Runs in a process of its own: clean with two workers; print the peaks of memory of this process, before and after, and of the largest worker"
    peak = lambda who: resource.getrusage(who).ru_maxrss*1024
    before = peak(resource.RUSAGE_SELF)
    with workers(2) as apply: funnel = curate(source, out, CRAWL, apply)
    clock = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print(json.dumps(dict(documents=funnel.stages[0].documents, kept=funnel.stages[-1].kept[0], start=before, driver=peak(resource.RUSAGE_SELF),
                          worker=peak(resource.RUSAGE_CHILDREN), seconds=round(sum(c.ru_utime + c.ru_stime for c in clock)),
                          funnel=[[s.step, s.documents, {r: n for r, (n, _) in s.dropped.items()}] for s in funnel.stages])))


def memory():
    "One line for each size"
    for megabytes in (75, 2000, 300):
        if done("curation_memory.jsonl", dict(megabytes=megabytes)): continue
        with tempfile.TemporaryDirectory() as folder:
            row = dict(kind="memory", megabytes=megabytes) | crawl(Path(folder)/"in", megabytes)
            alone = subprocess.run([sys.executable, __file__, "--alone", Path(folder)/"in", Path(folder)/"out"], stdout=subprocess.PIPE, check=True)
        write("curation_memory.jsonl", row | json.loads(alone.stdout), "tools/curation_runs.py memory", lambda: dict(recipe=CRAWL.to_dict()["steps"]))
        print(megabytes, "MB", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--alone"]: sys.exit(curated_alone(*sys.argv[2:]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="+", choices=["clean", "duplicated", "noisy", "raw", "cleaned", "memory"])
    if parser.parse_args().kinds == ["memory"]: sys.exit(memory())
    for seed in SEEDS:
        for kind in parser.parse_args().kinds:
            if done("curation.jsonl", dict(kind=kind, seed=seed)): continue
            row = run(kind, seed)
            write("curation.jsonl", row, "tools/curation_runs.py clean duplicated noisy raw cleaned")
            print(row, flush=True)
