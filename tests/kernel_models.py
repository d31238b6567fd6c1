"Models for the tests of kernels, and the places where these run."
import pytest
import torch

from lmcourse.architecture.transformer_torch import TransformerLM
from lmcourse.kernels.traffic import interpreted

on_both = pytest.mark.parametrize("device", [
    pytest.param("cpu", marks=pytest.mark.skipif(not interpreted, reason="on a machine with a GPU, TRITON_INTERPRET=1 runs these")),
    pytest.param("cuda", marks=pytest.mark.cuda)])


def odd_model(config, device="cpu", **how):
    "A model whose biases and gains are not what they were at the start"
    model, rng = TransformerLM(config, seed=1, **how).eval(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1: p.add_(torch.randn(p.shape, generator=rng)*.3)
    return model.to(device)
