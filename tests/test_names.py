"""`from lmcourse import ...` offers what most people want, and imports nothing before it is asked for."""
import importlib, re, subprocess, sys
from operator import attrgetter
from pathlib import Path

import pytest

import lmcourse


def test_each_name_is_there_and_is_documented():
    assert len(lmcourse.__all__) == 30 and set(lmcourse.__all__) <= set(dir(lmcourse))
    for name in lmcourse.__all__:
        found = getattr(lmcourse, name)
        assert found.__name__ == name and found.__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'Transfomer'"): lmcourse.Transfomer


def test_the_package_alone_imports_no_torch():
    code = "import sys, lmcourse; assert not {'torch', 'numpy', 'numba'} & set(sys.modules); from lmcourse import ModelConfig; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("module, name", [
    ("training.engines", "TorchEngine.forward_backward"), ("training.engines", "TorchEngine.optimizer_step"), ("training.engines", "find_nonfinite"),
    ("training.engines", "BatchPlan.grad_accum_steps"), ("training.engines", "World.shard_batch"), ("training.engines", "World.all_reduce_sum"),
    ("training.engines", "World.destroy"), ("training.sharding", "apply_fsdp"), ("architecture.transformer_torch", "TransformerLM.hidden_states"),
    ("inference.engine", "top_logprobs"), ("inference.fast_decoder", "add_and_norm"), ("inference.fast_decoder", "activate"), ("tokenization.bpe", "train_bpe_naive")])
def test_names_are_those_that_a_practitioner_would_type(module, name):
    pytest.importorskip("torch")
    assert callable(attrgetter(name)(importlib.import_module(f"lmcourse.{module}"))) or name == "BatchPlan.grad_accum_steps"


def test_names_that_only_their_author_understood_are_gone():
    gone = "add_gradients|first_fault|share_out|settle|bend|told|less_top|sums"
    for path in Path(lmcourse.__file__).parent.rglob("*.py"):
        if found := re.search(rf"^ *def ({gone})\(", path.read_text(encoding="utf-8"), flags=re.M): raise AssertionError(f"{path}: {found[1]}")
