"On the GPU of a Mac nothing asks for float64 before it is on the CPU. These tensors stand in for it, where there is no Mac."
import numpy as np
import pytest

torch = pytest.importorskip("torch")
from lmcourse.architecture.transformer_torch import TransformerLM
from lmcourse.evaluation.harness import continuation_log_prob
from lmcourse.evaluation.tasks import _choice_nats
from lmcourse.generation.generate import generate
from lmcourse.generation.viewer import surprisal_strip
from lmcourse.inference.speculative import DraftModel, NgramDraft, PromptLookup, speculate
from lmcourse.moe.experts_torch import MoE
from lmcourse.tokenization.tokenizer import Tokenizer
from lmcourse.tools.config import ModelConfig


class OnMac(torch.Tensor):
    def double(self): raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64")
    def cpu(self): return self.as_subclass(torch.Tensor)
    def to(self, *args, **kwargs):
        found = super().to(*args, **kwargs)
        return found.as_subclass(torch.Tensor) if isinstance(args[0] if args else None, (str, torch.device)) else found


class MacModel(torch.nn.Module):
    "A model whose logits are on a Mac's GPU"
    def __init__(self, model):
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, ids): return self.model(ids).as_subclass(OnMac)


TOKENIZER = Tokenizer.train(["the cat sat on the mat, the dog sat on the cat. "*3], 272)
MODEL = TransformerLM(ModelConfig(vocab_size=TOKENIZER.vocab_size, context_length=64, d_model=32, num_layers=1, num_heads=2), 1).eval()
MAC, V = MacModel(MODEL), TOKENIZER.vocab_size


@pytest.mark.parametrize("settings", [dict(temperature=0), dict(top_p=.9)])
@pytest.mark.parametrize("draft", [lambda: PromptLookup(V, 1), lambda: NgramDraft(np.arange(V), V, 2), lambda: DraftModel(MAC), lambda: DraftModel(MODEL)])
def test_speculation_verifies_on_the_cpu_wherever_the_draft_is(draft, settings):
    ids = [1, 2, 1, 2, 1]
    text = list(speculate(MAC, draft(), ids, 12, **settings))
    assert text == list(speculate(MODEL, draft(), ids, 12, **settings))
    if "temperature" in settings: assert text == list(generate(MODEL, ids, 12, temperature=0))


def test_visits_of_experts_are_counted():
    layer = MoE(ModelConfig(vocab_size=8, context_length=8, d_model=16, num_layers=1, num_heads=1, num_experts=4, router_bias_rate=.01))
    layer.load = torch.tensor([5, 1, 1, 1]).as_subclass(OnMac)
    layer.after_step()
    assert layer.expert_bias.tolist() == pytest.approx([-.01, .01, .01, .01])


def test_texts_are_scored():
    for score in (lambda m: continuation_log_prob(m, TOKENIZER, "the cat", " sat on"), lambda m: _choice_nats(m, TOKENIZER, "the cat", " sat"),
                  lambda m: surprisal_strip(m, TOKENIZER, "the cat sat.").nats["model"].tolist()):
        assert score(MAC) == score(MODEL)
