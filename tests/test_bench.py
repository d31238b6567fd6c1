"Speeds on this machine: `make bench` prints them."
import statistics
import time
from itertools import islice

import pytest

from lmcourse.tokenization.tokenizer import Tokenizer
from lmcourse.tools.stories import Stories

pytestmark = pytest.mark.bench


def seconds(f, *args, repeat=5):
    "Median over a few calls."
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        f(*args)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def test_stories_are_written_at_two_megabytes_a_second():
    documents = list(islice(Stories(0), 2000))
    rate = sum(map(len, documents))/seconds(lambda: list(islice(Stories(0), 2000)))/1e6
    print(f"\nstories written: {rate:.1f} MB/s")
    assert rate > 2


def test_tokenizer():
    documents = list(islice(Stories(0), 4000))
    size = sum(map(len, documents))/1e6
    train = seconds(Tokenizer.train, documents, 2048, repeat=1)
    tokenizer = Tokenizer.train(documents, 2048)
    encode = seconds(lambda: [tokenizer.encode(d) for d in documents])
    print(f"\ntokenizer: {size:.1f} MB learnt in {train:.2f} s, encoded at {size/encode:.1f} MB/s")


def test_training_step(tmp_path):
    from lmcourse.tools.config import ModelConfig, TrainConfig
    from lmcourse.training.data import TokenDataset, write_tokens
    from lmcourse.training.trainer import Trainer, measure_step
    documents = list(islice(Stories(0), 300))
    tokenizer = Tokenizer.train(documents, 2048)
    for name in ("train", "valid"): write_tokens(tmp_path/name, documents, tokenizer, "stories")
    config = ModelConfig.preset("quickstart", vocab_size=2048)
    trainer = Trainer(config, TrainConfig.preset("quickstart"), *(TokenDataset.open(tmp_path/n) for n in ("train", "valid")))
    step = measure_step(trainer, 30)
    print(f"\nquickstart: {1e3*step:.1f} ms a step, {2*config.context_length/step:,.0f} tokens/s")
