"""What somebody's typed program sees of the library. mypy reads it, nothing runs it: see `types` in tools/check.py."""
from collections.abc import Iterator
from pathlib import Path
from typing import assert_type

import torch

from lmcourse.accounting.account import account, account_tables
from lmcourse.accounting.run_cost import Price, price
from lmcourse.architecture.transformer_torch import TransformerLM
from lmcourse.generation.generate import complete, generate
from lmcourse.inference.kv_cache import CachedDecoder
from lmcourse.tokenization.tokenizer import Tokenizer
from lmcourse.tools.config import ModelConfig, TrainConfig, describe
from lmcourse.tools.documents import documents
from lmcourse.tools.show import Table
from lmcourse.training.data import TokenDataset, write_tokens
from lmcourse.training.evaluation import Evaluation
from lmcourse.training.models import load_model
from lmcourse.training.runs import write_run
from lmcourse.training.trainer import Trainer


def configs(folder: Path) -> tuple[ModelConfig, TrainConfig]:
    model = ModelConfig.preset("quickstart", num_layers=2)
    assert_type(model, ModelConfig)
    assert_type(ModelConfig.load(folder/"model.toml"), ModelConfig)
    assert_type(TrainConfig.from_dict({"steps": 10}), TrainConfig)
    assert_type(model.num_kv_heads, int | None)
    assert_type(model.kv_heads, int)
    assert_type(describe(model), Table)
    model.save(folder/"model.json")
    return model, TrainConfig.preset("quickstart", steps=10)


def tokens(folder: Path) -> tuple[Tokenizer, TokenDataset]:
    tokenizer = Tokenizer.train(["one text", "another"], 300)
    assert_type(tokenizer, Tokenizer)
    assert_type(Tokenizer.from_folder(folder), Tokenizer)
    assert_type(tokenizer.decode(tokenizer.encode("a text")), str)
    assert_type(tokenizer.vocab_size, int)
    write_tokens(folder/"train", documents("stories"), tokenizer, "stories", meta=None, threads=2)
    data = TokenDataset.open(folder/"train")
    assert_type(data, TokenDataset)
    return tokenizer, data


def counted(config: ModelConfig, training: TrainConfig) -> list[str]:
    assert_type(price(config, training, "H100"), Price)
    return [str(table) for table in account_tables(account(config, batch_size=8, dtype="bfloat16"))]


def model_use(config: ModelConfig, ids: torch.Tensor) -> torch.Tensor:
    model = TransformerLM(config, seed=1)
    loss = model.loss(ids[:, :-1], ids[:, 1:])
    assert_type(loss, torch.Tensor)
    loss.backward()
    assert_type(model.forward(ids), torch.Tensor)
    return loss


def written(folder: Path) -> str:
    model, tokenizer = load_model(folder)
    assert_type(model, TransformerLM)
    assert_type(tokenizer, Tokenizer)
    new = generate(model, [1, 2, 3], 10, temperature=0.8, top_p=None, decoder=CachedDecoder)
    assert_type(new, Iterator[int])
    return complete(model, tokenizer, "Once", max_tokens=20, seed=1)


def trained(folder: Path) -> float:
    (model, training), (_, data) = configs(folder), tokens(folder)
    run = folder/"run"
    write_run(run, model, training, folder/"tokenizer")
    trainer = Trainer(model, training, data, data)
    assert_type(trainer.step, int)
    result = trainer.fit(run, report=lambda trainer, evaluation: print(evaluation.loss), sample=None)
    assert_type(result, Evaluation)
    assert_type(result.floor, float | None)
    return result.loss
