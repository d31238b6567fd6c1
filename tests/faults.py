"""Faults of training runs, as small patches of the trainer. The doctor of chapter 06 must not
import this file.

`FAULTS` are what others met and told: in issues of public repositories, in postmortems, in the notes
of a framework. Each says where (`told`), how it could be seen in a run's log, config, checkpoints or
data (`seen`), and which names of findings are right (`says`, written before the doctor was asked).
`FIRST` are the twelve that the doctor's author planted when he wrote it. A patch is there while a run
lasts. A fault's healthy twin has the same config and the same seed, and no patch.
"""
import hashlib
import json
import re
import shutil
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F

from lmcourse.architecture import transformer_torch
from lmcourse.architecture.attention_torch import CausalSelfAttention, RoPE, causal_mask, rope_tables
from lmcourse.architecture.transformer_torch import TransformerBlock, TransformerLM
from lmcourse.tokenization.tokenizer import Tokenizer
from lmcourse.tools.documents import documents
from lmcourse.tools.stories import Stories
from lmcourse.training import optim_torch
from lmcourse.training import evaluation as evaluating_loop
from lmcourse.training import trainer as training_loop
from lmcourse.training.data import (Batches, TokenDataset, count_ngrams, evaluation_batches,
                                    to_tensors, write_tokens)
from lmcourse.training.engines import TorchEngine
from lmcourse.training.optim_torch import AdamW, clip_grad_norm
from lmcourse.training.runs import write_run
from lmcourse.training.trainer import Diverged, Trainer


@dataclass(frozen=True)
class Fault:
    "What went wrong in a run."
    says:str        # Regular expression for the name of a finding that names it
    told:str        # Who met it
    seen:str        # How it could be seen from what the doctor is given
    changes:object  # Without arguments: triples of an object, a name, and what is there in the run
    model:dict = field(default_factory=dict) # Fields of the configs, of the healthy twin too
    train:dict = field(default_factory=dict)
    wrong:dict = field(default_factory=dict) # Fields of the training's that are the fault itself
    data:str = "whole"
    twin:str = ""   # The twin's data, if they are others

    def right(self, finding): return bool(re.search(self.says, finding, re.I))


FAULTS, FIRST = {}, {} # Name to `Fault`

def fault(name, says, told="", seen="", into=FAULTS, **more):
    "Put a function of changes on a list."
    def add(changes):
        into[name] = Fault(says, told, seen, changes, **more)
        return changes
    return add


def patched(changes):
    "A context in which they are made."
    stack = ExitStack()
    for change in changes: stack.enter_context(patch.object(*change))
    return stack


def train(fault, model, config, data, run):
    "A run with a fault, or without one if `fault` is none, as far as it comes."
    f = (FAULTS | FIRST)[fault] if fault else Fault("", "", "", list)
    config = replace(config, **f.wrong)
    Path(run).mkdir(parents=True)
    write_run(Path(run), model, config, Path(data))
    torch.manual_seed(config.seed)
    with patched(f.changes()):
        sets = (TokenDataset.open(Path(data)/name) for name in ("train", "valid"))
        try: Trainer(model, config, *sets).fit(run)
        except Diverged: pass


# Data

def write_data(folder, vocab_size=512, max_bytes=12_000_000, valid_documents=400, few=40):
    """Stories as tokens: `whole`, as `lmcourse prepare stories` makes them, and others for faults.

    `few` is a small training set, `other` has validation documents of another tokenizer, `topic` is
    sorted, `fewer` has 400 documents, `leaky` has validation documents among them, `moved` has other
    ids for validation.
    """
    held_out = list(islice(documents("stories", "valid"), valid_documents))
    texts = [t for t in documents("stories", "train", max_bytes) if t not in set(held_out)]
    own = Tokenizer.train(documents("stories", "train", min(max_bytes, 4_000_000)), vocab_size)
    other = Tokenizer.train(texts[:max(20, few)], vocab_size)
    def nats(text): return -Stories().log_prob(text)
    for name, docs, tokenizer in (("whole", texts, own), ("few", texts[:few], own),
                                  ("other", texts, other)):
        write_tokens(folder/name/"train", docs, own, "stories", threads=1)
        write_tokens(folder/name/"valid", held_out, tokenizer, "stories", nats=nats, threads=1)
        own.save(folder/name/"tokenizer")
        count_ngrams(folder/name)
    write_variants(folder)


def write_variants(folder):
    "The data of `write_data` that are made of `whole`."
    sets = (TokenDataset.open(folder/"whole"/name) for name in ("train", "valid"))
    train, valid = ([s.document(i) for i in range(s.num_documents)] for s in sets)
    ordinary = TokenDataset.open(folder/"whole/valid").info["vocab_size"] - 1
    moved = [np.where(d == 0, 0, 1 + d % ordinary) for d in valid]     # the end of a text is id 0
    held = valid[:60]
    for name, docs, valid_docs in (("topic", sorted(train, key=lambda d: d[:20].tolist()), None),
                                   ("fewer", train[:400], None), ("moved", None, moved),
                                   ("leaky", held + train[:400 - len(held)], None)):
        shutil.copytree(folder/"whole", folder/name)
        if docs: rewrite(folder/name/"train", docs)
        if valid_docs: rewrite(folder/name/"valid", valid_docs)


def rewrite(prefix, docs):
    "Other documents in the files of `write_tokens`; their notes are kept, but for counts and "
    "digests."
    info = json.loads(Path(f"{prefix}.json").read_text())
    lengths = np.array([len(d) for d in docs])
    starts = np.cumsum(lengths) - lengths
    parts = np.concatenate(docs).astype(info["dtype"]).tobytes(), starts.astype("<i8").tobytes()
    for suffix, part in zip((".bin", ".idx"), parts): Path(f"{prefix}{suffix}").write_bytes(part)
    if len(docs) != info["documents"]:
        info = {k: v for k, v in info.items() if k not in ("nats", "document_nats")}
    digests = [hashlib.sha256(p).hexdigest() for p in parts]
    info |= dict(tokens=int(lengths.sum()), documents=len(docs), sha256=digests)
    Path(f"{prefix}.json").write_text(json.dumps(info))


# Where patches go

def batches(change, rows=None):
    "Inputs and targets of training, and by `rows` those of evaluation, are changed."
    def item(self, step, right=Batches.__getitem__): return change(*right(self, step))
    def evaluation(*args):
        for x, y, numbers in evaluation_batches(*args): yield *rows(x, y), numbers
    changed = [(Batches, "__getitem__", item)]
    return changed + ([(evaluating_loop, "evaluation_batches", evaluation)] if rows else [])


def steps_of(choose): # Another batch than that of the step
    right = Batches.__getitem__
    def item(self, step): return choose(self, step, partial(right, self))
    return [(Batches, "__getitem__", item)]


def attend(f): # Also in a model that is there already
    right = CausalSelfAttention.forward
    def forward(self, *args, **more):
        with patch.object(self, "attention", lambda q, k, v, window=None: f(q, k, v)): return right(self, *args, **more)
    return [(CausalSelfAttention, "forward", forward)]


def made_with(change):
    "Something is done to a model when it is made."
    right = TransformerLM.__init__
    def made(self, *args, **kwargs):
        right(self, *args, **kwargs)
        with torch.no_grad(): change(self)
    return [(TransformerLM, "__init__", made)]


def evaluating(*changes):
    "Changes that are there while the model is evaluated, and not before or after."
    def evaluate(*args, right=training_loop.evaluate, **kwargs):
        with patched(changes): return right(*args, **kwargs)
    return [(training_loop, "evaluate", evaluate)]


def adding(f): # `f(engine, right, inputs, targets, share, last)` adds gradients
    def right(engine, x, y, share=1., last=True, forward_backward=TorchEngine.forward_backward):
        return forward_backward(engine, (x, y), share, last)
    def add(self, batch, share=1., last=True):
        return f(self, partial(right, self), *batch, share, last)
    return [(TorchEngine, "forward_backward", add)]


def updating(before=None, after=None, lr=lambda engine, lr: lr):
    "Something is done to each parameter before or after a step of the optimizer, or to the "
    "step's rate."
    def update(self, rate, right=TorchEngine.optimizer_step):
        with torch.no_grad():
            for p in self.model.parameters():
                if before and p.grad is not None: before(p)
        norm = right(self, lr(self, rate))
        with torch.no_grad():
            for p in self.model.parameters():
                if after: after(p)
        return norm
    return [(TorchEngine, "optimizer_step", update)]


def at_resume(change):
    "What a resume in the middle of the run gets wrong."
    def step(self, *batches, right=Trainer.train_step):
        if self.step == self.config.steps//2: change(self)
        return right(self, *batches)
    return [(Trainer, "train_step", step)]


# Targets and loss

def shifted(x, y, by): # Targets `by` places after their inputs, where 1 is right
    if by == 0: return x, np.where(y == -100, -100, x)
    return x, np.concatenate([y[:, 1:], np.full_like(y[:, :1], -100)], 1)


@fault("targets two ahead", r"shift",
       "huggingface/transformers#47394: the labels are shifted by the loader, and again by the "
       "loss",
       "the right forward pass gives another loss than the logged one, that with shifted targets "
       "gives it")
def _(): return batches(partial(shifted, by=2), partial(shifted, by=2))


@fault("last target of the next row", r"target|label",
       "huggingface/transformers#47394: rows are flattened before the shift, so the last target "
       "of each is the "
       "next row's first token",
       "losses of steps made again are a little lower than the logged ones; the validation loss "
       "agrees")
def _():
    return batches(lambda x, y: (x, np.concatenate([y[:, :-1], np.roll(x[:, :1], -1, 0)], 1)))


@fault("padding counted", r"padding",
       "EleutherAI/gpt-neo#45, huggingface/transformers#32832: targets that only fill a row are "
       "in the mean",
       "logged training losses are lower than those computed again; with padding counted they "
       "agree",
       model=dict(context_length=512), train=dict(batch_size=2, windows="within"))
def _(): return batches(lambda x, y: (x, np.where(y == -100, 0, y)))


def with_loss(loss): # `loss(logits, targets)` in training
    return (TransformerLM, "loss", lambda self, x, y: loss(self(x).flatten(0, 1), y.flatten()))


@fault("softmax before the loss", r"softmax",
       "Lightning-Universe/lightning-bolts#654, and Karpathy's list of common mistakes: "
       "probabilities are given "
       "to a loss that takes logits",
       "no loss gets below ln V - 1; one with a second softmax gives the logged one")
def _():
    right = TransformerLM.forward
    def forward(self, *args, **kwargs): return right(self, *args, **kwargs).softmax(-1)
    return [(TransformerLM, "forward", forward), with_loss(F.cross_entropy)]


@fault("label smoothing in evaluation", r"smooth",
       "pytorch/pytorch#129050: one loss function with label smoothing serves training and "
       "validation",
       "the logged validation loss is a mixture of the right one and of the mean over all tokens")
def _():
    smoothed = partial(F.cross_entropy, label_smoothing=.1)
    return [with_loss(smoothed), *evaluating((F, "cross_entropy", smoothed))]


@fault("mean of batch means", r"averag|mean of",
       "pytorch/torchtitan#4167: each batch's mean counts the same, whatever the number of its "
       "targets",
       "the validation loss differs by a little; a mean of the batches' means gives the logged "
       "number")
def _():
    def evaluate(model, dataset, T, count=None, dtype="float32", right=training_loop.evaluate, **world):
        with torch.inference_mode():
            rows = (to_tensors(row[:2]) for row in evaluation_batches(dataset, T, count))
            means = [F.cross_entropy(model(x).flatten(0, 1), y.flatten()).item() for x, y in rows]
        return replace(right(model, dataset, T, count, dtype), loss=float(np.mean(means)))
    return [(training_loop, "evaluate", evaluate)]


@fault("logged loss of the last part", r"logged|report|log of",
       "allenai/allennlp#4706: the reported loss is that of a batch's last part, divided by "
       "their number",
       "logged training losses are a quarter of those computed again", train=dict(micro_batch=2))
def _(): return adding(lambda engine, right, x, y, share, last: right(x, y, share, last)*last)


# The model

@fault("mask one too wide", r"mask|leak|future",
       "a kind of huggingface/transformers#31673: `diagonal=1` where the mask is built, so each "
       "query sees the "
       "next token",
       "the logged loss is below the floor; the right forward pass gives a far worse one")
def _():
    def wide(q, k, v):
        mask = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril(1)
        return F.scaled_dot_product_attention(q, k, v, mask)
    return attend(wide)


@fault("softmax over the queries", r"softmax|leak|future",
       "labmlai/annotated_deep_learning_paper_implementations#146, "
       "nerdai/llms-from-scratch-rs#30: attention "
       "weights add up to 1 along the wrong axis",
       "the right forward pass gives another loss than the logged one; with the other axis it "
       "agrees")
def _():
    def wrong(q, k, v):
        scores = (q@k.mT)*q.shape[-1]**-.5
        return scores.masked_fill(~causal_mask(q.shape[-2]), -torch.inf).softmax(-2)@v
    return attend(wrong)


@fault("heads merged without transposing", r"transpos|heads|leak|future",
       "jsbaan/transformer-from-scratch#6, reczoo/FuxiCTR#30, and Karpathy's list: `view` where "
       "a `transpose` "
       "is needed",
       "the right forward pass gives another loss than the logged one; with heads merged so it "
       "agrees")
def _():
    def wrong(q, k, v):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)   # B H T K
        B, H, T, K = out.shape
        return out.reshape(B, T, H, K).transpose(1, 2)                  # what `view` makes of it
    return attend(wrong)


@fault("dropout left on", r"dropout|random",
       "ipolharvard/ethos-ares#20: no `model.eval()` before the validation, so a tenth of all "
       "activations is "
       "zero there, too",
       "the logged validation loss is higher than the one computed again; only something random "
       "explains it")
def _():
    def change(model):
        for layer in model.layers:
            for part in (layer.attn, layer.ffn):
                part.register_forward_hook(lambda module, inputs, out: F.dropout(out, .1, True))
    return made_with(change)


@fault("RoPE base changed", r"rope|base|theta",
       "marin-community/levanter#649: evaluated with another base of RoPE than the model was "
       "trained with",
       "the right forward pass gives a better loss than the logged one; with another base it "
       "agrees")
def _():
    def at(self, T, positions=None):
        return torch.stack(rope_tables(T, self.sizes[1], 500_000.), -1)
    return evaluating((RoPE, "at", at))


@fault("embedding scaled twice", r"embedding",
       "TensorAuto/OpenTau#179: the embedding multiplies by sqrt(D), and so does its caller",
       "the right forward pass gives another loss; with the scale applied twice it agrees",
       model=dict(tie_embeddings=True, scale_embeddings=True))
def _(): return made_with(lambda model: setattr(model, "scale", model.scale**2))


@fault("initial weights × 10", r"init|start",
       "a common thread: a standard deviation of 0.2 where 0.02 was meant",
       "the first logged losses are far above those of the initial weights of config and seed")
def _():
    def change(model):
        for name, p in model.named_parameters():
            if name.startswith("layers.") and p.ndim == 2: p.mul_(10)
    return made_with(change)


@fault("residual lost", r"residual", "kyegomez/BitNet#32: `x = attn(x); x = x + x`",
       "the right forward pass gives another loss; without the residual it agrees")
def _():
    def forward(self, x, positions=None, cache=None):
        x = self.attn(self.ln1(x), positions=positions, cache=cache)
        return self.add(x + x, self.ffn, self.ln2)
    return [(TransformerBlock, "forward", forward)]


@fault("frozen block", r"frozen|freez|never mov|not mov|not train|stand still",
       "a common thread: a flag of fine-tuning stays set, and a block gets no gradient",
       "a block's weights are the initial ones of config and seed; the optimizer has no moments "
       "of it")
def _(): return made_with(lambda model: model.layers[1].requires_grad_(False))


@fault("stale tie", r"\btie",
       "NVIDIA-NeMo/Automodel#2511: after a resume the head is a copy of the embedding, no "
       "longer the matrix itself",
       "the checkpoint has two matrices where the config has one", model=dict(tie_embeddings=True))
def _():
    def change(trainer):
        model = trainer.engine.model
        copy = model.token_embeddings.weight.detach().clone()
        model.lm_head.weight = torch.nn.Parameter(copy, requires_grad=False)
    return at_resume(change)


# The optimizer

@fault("gradients left scaled", r"gradient.*(scal|×|times|factor)|unscal",
       "pytorch/examples#1196, milesial/Pytorch-UNet#468: gradients are clipped before the loss "
       "scale is taken off",
       "logged gradient norms are 1,024 times those computed again; every line is clipped")
def _(): return updating(before=lambda p: p.grad.mul_(1024))


@fault("gradients never zeroed", r"zero|accumulat",
       "tenstorrent/tt-blacksmith#711, pytorch/pytorch#47175, and Karpathy's list: `zero_grad` "
       "is not called",
       "the gradient norm grows from line to line; a gradient computed again is far shorter")
def _(): return [(AdamW, "zero_grad", lambda self, set_to_none=True: None)]


@fault("accumulated without dividing", r"gradient.*(scal|×|times|factor)|accumul|divid",
       "karpathy/nanoGPT#168: the loss of each part is not divided by their number",
       "logged gradient norms are four times those computed again", train=dict(micro_batch=2))
def _(): return adding(lambda engine, right, x, y, share, last: right(x, y, 1., last)*share)


@fault("clipped part by part", r"clip",
       "Deci-AI/super-gradients#653: gradients are clipped after each part of a batch, not once "
       "before the step",
       "the logged norm never passes the limit, while norms computed again do",
       train=dict(micro_batch=2, grad_clip=.25))
def _():
    def add(engine, right, x, y, share, last):
        loss = right(x, y, share, last)
        clip_grad_norm(engine.model.parameters(), engine.config.grad_clip)
        return loss
    return adding(add)


@fault("optimizer state lost", r"optimizer.*(state|lost|steps)|moments|resum",
       "EvolvingLMMs-Lab/OneVision-Encoder#65: a checkpoint without the optimizer, so Adam "
       "begins anew at a resume",
       "the optimizer's own count of steps is half of the run's")
def _(): return at_resume(lambda trainer: trainer.engine.optimizer.state.clear())


@fault("betas of the default", r"beta",
       "a kind of torch-points3d/torch-points3d#630: what the optimizer is built with at a "
       "resume is not what the "
       "run had",
       "the betas in the checkpoint are not the config's")
def _():
    def change(trainer):
        for group in trainer.engine.optimizer.param_groups: group["betas"] = .9, .999
    return at_resume(change)


@fault("schedule anew at a resume", r"schedule",
       "torch-points3d/torch-points3d#630: the scheduler is not restored, and begins with a "
       "warm-up again",
       "the logged learning rate is not the schedule's from the middle on")
def _():
    right = Trainer.learning_rate
    def rate(self, step): return right(self, (step - 1) % (self.config.steps//2) + 1)
    return [(Trainer, "learning_rate", rate)]


@fault("schedule per part", r"schedule",
       "h2oai/h2o-llmstudio#663, huggingface/accelerate#963: the scheduler moves on with every "
       "part of a batch",
       "the logged learning rate is that of four times the step", train=dict(micro_batch=2))
def _():
    right = Trainer.learning_rate
    return [(Trainer, "learning_rate", lambda self, step: right(self, min(4*step, self.config.steps)))]


@fault("schedule not applied", r"schedule|learning rate",
       "a common thread: the scheduler belongs to another optimizer object; what is logged is "
       "its rate",
       "the rate in the checkpoint's optimizer is not that of the log; steps are too large for "
       "the logged rate")
def _(): return updating(lr=lambda engine, lr: engine.config.lr)


@fault("bfloat16 master weights", r"bfloat16|bf16|round",
       "pytorch/ao#1124, vllm-project/speculators#765: the weights themselves are kept in "
       "bfloat16, and small steps "
       "are rounded away",
       "every number in the checkpoint fits into 16 bits, though the config says float32")
def _(): return updating(after=lambda p: p.copy_(p.bfloat16()))


@fault("decay of everything × 100", r"decay",
       "ServiceNow/Fast-LLM#542: norms and embeddings get weight decay, too; here in percent "
       "instead of as a share",
       "the decay in the checkpoint's optimizer is not the config's; the gains of norms are small")
def _():
    right = optim_torch.parameter_groups
    def groups(model, weight_decay):
        params = [p for g in right(model, 0.) for p in g["params"]]
        return [dict(params=params, weight_decay=100*weight_decay)]
    return [(optim_torch, "parameter_groups", groups)]


@fault("L2 instead of decay", r"decay|\bL2\b",
       "pytorch/pytorch#48793: Adam's `weight_decay` goes into the gradient, where AdamW's goes "
       "into the weight",
       "losses and norms of steps made again from a checkpoint are not the logged ones")
def _():
    right = optim_torch._step_all_
    def step(params, states, lr, betas, eps, weight_decay):
        for p in params: p.grad.add_(p, alpha=weight_decay)
        right(params, states, lr, betas, eps, 0.)
    return [(optim_torch, "_step_all_", step), (optim_torch, "fused_step_", step)]


@fault("learning rate × 3", r"learning rate|step.*large|large.*step",
       "any thread on tuning: a rate that trains, and trains worse",
       "a run with a smaller rate gets a lower loss in the same steps", wrong=dict(lr=.03))
def _(): return []


@fault("gradient ascent", r"sign|ascent|uphill",
       "a common thread on policy losses: the sign of the loss is lost on the way to the "
       "optimizer",
       "the loss climbs; a step against the gradient computed again would lower it")
def _(): return updating(before=lambda p: p.grad.neg_())


# Data

@fault("sorted by topic", r"shuffl|sorted|order",
       "a common thread on streaming sources: shards are read one after the other, and each is "
       "of one kind",
       "neighbouring documents are alike; the training loss is low where the validation loss is "
       "high",
       train=dict(windows="sequential"), data="topic", twin="whole")
def _(): return []


@fault("validation text in training", r"leak|duplicat|overlap|contamin|train(ing)? text",
       "openai/parameter-golf#2127, ciprian-chelba/1-billion-word-language-modeling-benchmark#5: "
       "validation "
       "documents stand in the training files",
       "documents of both files are equal", data="leaky", twin="fewer")
def _(): return []


@fault("one epoch for ever", r"repeat|same batch|shuffl|order|epoch|again and again",
       "pytorch/pytorch#31771, #5059: no `set_epoch`, so the sampler draws the same batches "
       "again and again",
       "losses of steps made again are those of earlier batches; logged losses go up and down "
       "with a period")
def _(): return steps_of(lambda self, step, right: right(step % 30))


@fault("workers with one seed", r"repeat|duplicat|twice|same (window|row|seed)|worker",
       "pytorch/pytorch#5059, facebookresearch/fairseq#1383: all workers draw the same random "
       "numbers, so a batch "
       "has each window twice",
       "the logged loss of a batch is that of half of its windows")
def _(): return batches(lambda x, y: tuple(np.concatenate([a[:len(a)//2]]*2) for a in (x, y)))


@fault("a batch from one place", r"shuffl|one place|same document|neighbo|correlat|order",
       "a common thread on sharded loaders without a shuffle buffer: the windows of a batch "
       "follow each other in "
       "one document",
       "logged losses vary more from batch to batch than those of random windows")
def _():
    def item(self, step, right):
        T, size = self.context_length, self.config.batch_size*self.context_length
        rng = np.random.default_rng([self.config.seed, step])
        start = int(rng.integers(self.dataset.num_tokens - size - 1))
        ids = np.asarray(self.dataset.tokens[start:start + size + 1]).astype(np.int64)
        return ids[:-1].reshape(-1, T), ids[1:].reshape(-1, T)
    return steps_of(item)


@fault("token ids wrap", r"wrap|overflow|\bids?\b|tokenizer",
       "huggingface/transformers#2825, urvashik/knnlm#6: ids are kept in a type that is too "
       "small for them; here in "
       "8 bits",
       "embeddings of ids from 256 on have never moved; the right ids give another loss than the "
       "logged one")
def _():
    def wrapped(x, y): return x % 256, np.where(y < 0, y, y % 256)
    return batches(wrapped, wrapped)


@fault("ids moved by one", r"tokenizer|\bids?\b",
       "a common thread on added special tokens: the tokenizer of the validation text counts "
       "from another start",
       "validation documents decode to no text", data="moved", twin="whole")
def _(): return []


# Two thirds may be looked at while the doctor is improved; the others are kept for the second exam.
SET_B = frozenset(sorted((n for n in FAULTS if n != "learning rate × 3"),
                         key=lambda n: hashlib.sha256(n.encode()).digest())[:len(FAULTS)//3])


# The twelve of the doctor's author

first = partial(fault, into=FIRST)

@first("no mask", r"^no causal mask")
def _(): return attend(lambda q, k, v: F.scaled_dot_product_attention(q, k, v))

@first("shifted labels", r"^labels shifted")
def _(): return batches(partial(shifted, by=0), partial(shifted, by=0))

@first("learning rate × 10", r"^learning rate", wrong=dict(lr=.1))
def _(): return []

@first("no warm-up", r"^no warm-up", wrong=dict(warmup_steps=0))
def _(): return []

@first("lost tie", r"^lost tie", model=dict(tie_embeddings=True))
def _():
    def untie(model):
        copy = model.token_embeddings.weight.detach().clone()
        model.lm_head.weight = torch.nn.Parameter(copy)
    return [*made_with(untie), (transformer_torch, "_tie", lambda model: model)]

@first("positions reset", r"^position ids")
def _():
    right = RoPE.at
    def at(self, T, positions=None): return right(self, T, torch.arange(T) % (self.sizes[0]//2))
    return [(RoPE, "at", at)]

@first("attention scale", r"^attention scale")
def _():
    same = partial(F.scaled_dot_product_attention, is_causal=True, scale=1.)
    return attend(lambda q, k, v: same(q, k, v))

@first("no final norm", r"^no final norm")
def _(): return made_with(lambda model: setattr(model, "ln_final", torch.nn.Identity()))

@first("not shuffled", r"^batches are not shuffled")
def _():
    def in_order(data, config, T): return Batches(data, replace(config, windows="sequential"), T)
    return [(training_loop, "Batches", in_order)]

@first("other tokenizer", r"^validation in another tokenizer", data="other")
def _(): return []

@first("overfitting", r"^overfitting", data="few")
def _(): return []

@first("N(0, 1) tied head", r"^too large a head",
       model=dict(tie_embeddings=True, embedding_std=1.))
def _(): return []
