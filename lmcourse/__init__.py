"Build a language model from scratch, one notebook at a time."
__version__ = "0.1.0"

from importlib import import_module
from typing import Any

# What most people want, by where it is made. A name is imported when it is first asked for: torch alone takes a second.
_HOMES = {
    "tools.config": "ModelConfig TrainConfig",
    "tools.stories": "Stories",
    "tools.documents": "documents",
    "tools.checks": "gradcheck",
    "tokenization.tokenizer": "Tokenizer train_bpe",
    "tokenization.token_files": "TokenDataset write_tokens",
    "accounting.parameters": "count_parameters",
    "accounting.memory": "training_bytes kv_cache_bytes",
    "accounting.model_flops": "training_flops",
    "architecture.transformer_np": "transformer_forward",
    "architecture.transformer_torch": "TransformerLM",
    "architecture.pretrained": "from_hf save_hf",
    "training.optim_torch": "AdamW Muon",
    "training.evaluation": "evaluate",
    "training.runs": "read_metrics",
    "training.models": "load_model save_model",
    "training.trainer": "Trainer",
    "training.plots": "plot_runs",
    "generation.generate": "generate complete",
    "inference.kv_cache": "CachedDecoder",
    "inference.engine": "Engine",
    "inference.quantization": "quantize_model",
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names.split()}
__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES: raise AttributeError(f"module 'lmcourse' has no attribute {name!r}")
    globals()[name] = found = getattr(import_module(f"lmcourse.{_MODULES[name]}"), name)
    return found


def __dir__() -> list[str]: return [*globals(), *__all__]
