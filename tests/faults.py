"""Faults of training runs that were reported in public, as small patches of the trainer; the doctor must not import this file.

`FAULTS` has what others met and told: in issues of public repositories, in postmortems, in the notes of a framework. Each says where
(`told`), how it could be seen in a run's log, config, checkpoints or data (`seen`), and which name of a finding counts as right (`says`).
A patch changes the trainer while a run lasts. Its healthy twin has the same config and the same seed, and no patch.
"""
import hashlib
import json
import re
import shutil
import unittest.mock
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from lmcourse.architecture import attention_torch
from lmcourse.architecture.attention_torch import RoPE, rope_tables
from lmcourse.architecture.transformer_torch import TransformerBlock, TransformerLM
from lmcourse.training import engines, optim_torch
from lmcourse.training import trainer as training_loop
from lmcourse.training.data import Batches, TokenDataset, evaluation_batches
from lmcourse.training.engines import TorchEngine
from lmcourse.training.optim_torch import AdamW, clip_grad_norm
from lmcourse.training.trainer import Diverged, Trainer, write_run


@dataclass(frozen=True)
class Fault:
    "What went wrong in somebody's run."
    says:str        # Regular expression, for the name of a finding that names it
    told:str        # Who met it
    seen:str        # How it could be seen from what the doctor is given
    changes:object  # Function without arguments: triples of an object, a name in it, and what stands there during the run
    model:dict = field(default_factory=dict) # Fields of the configs, of the healthy twin too
    train:dict = field(default_factory=dict)
    wrong:dict = field(default_factory=dict) # Fields that are the fault itself
    data:str = "whole"
    twin:str = ""   # The twin's data, if they are others

    def right(self, finding): return bool(re.search(self.says, finding, re.I))


FAULTS = {} # Name to `Fault`

def fault(name, says, told, seen, **more):
    "Put a function of changes on the list."
    def add(changes):
        FAULTS[name] = Fault(says, told, seen, changes, **more)
        return changes
    return add


def train(fault, model, config, data, run):
    "A run with a fault, or without one if `fault` is none, as far as it comes."
    f = FAULTS[fault] if fault else Fault("", "", "", list)
    config = replace(config, **f.wrong)
    Path(run).mkdir(parents=True)
    write_run(Path(run), model, config, Path(data))
    torch.manual_seed(config.seed)
    with ExitStack() as stack:
        for owner, name, value in f.changes(): stack.enter_context(unittest.mock.patch.object(owner, name, value))
        try: Trainer(model, config, *(TokenDataset.open(Path(data)/name) for name in ("train", "valid"))).fit(run)
        except Diverged: pass


# Data

def write_variants(folder):
    "Beside `whole`, which `practice_data` wrote: `topic` (sorted), `fewer` (400 documents), `leaky` (60 of them validation), `moved` (other ids)."
    whole = folder/"whole"
    train, valid = (TokenDataset.open(whole/name) for name in ("train", "valid"))
    texts = [train.document(i) for i in range(train.num_documents)]
    held = [valid.document(i) for i in range(min(60, valid.num_documents))]
    moved = [np.where(d == valid.end_of_text, d, 1 + d % (valid.info["vocab_size"] - 1)) for d in (valid.document(i) for i in range(valid.num_documents))]
    for name, train_docs, valid_docs in (("topic", sorted(texts, key=lambda d: d[:20].tolist()), None), ("fewer", texts[:400], None),
                                         ("leaky", held + texts[:400 - len(held)], None), ("moved", None, moved)):
        shutil.copytree(whole, folder/name)
        if train_docs: rewrite(folder/name/"train", train_docs)
        if valid_docs: rewrite(folder/name/"valid", valid_docs)


def rewrite(prefix, documents):
    "Other documents in the files of `write_tokens`; their notes are kept, but for counts and digests."
    info = json.loads(Path(f"{prefix}.json").read_text())
    lengths = np.array([len(d) for d in documents])
    parts = np.concatenate(documents).astype(info["dtype"]).tobytes(), (np.cumsum(lengths) - lengths).astype("<i8").tobytes()
    for suffix, part in zip((".bin", ".idx"), parts): Path(f"{prefix}{suffix}").write_bytes(part)
    if len(documents) != info["documents"]: info = {k: v for k, v in info.items() if k not in ("nats", "document_nats")}
    info |= dict(tokens=int(lengths.sum()), documents=len(documents), sha256=[hashlib.sha256(p).hexdigest() for p in parts])
    Path(f"{prefix}.json").write_text(json.dumps(info))


# Where patches go

def batches(change, rows=None):
    "Inputs and targets of training, and `rows` those of evaluation, are changed."
    def item(self, step, right=Batches.__getitem__): return change(*right(self, step))
    def evaluation(*args):
        for x, y, numbers in evaluation_batches(*args): yield *rows(x, y), numbers
    return [(Batches, "__getitem__", item)] + ([(training_loop, "evaluation_batches", evaluation)] if rows else [])


def steps_of(choose): # Another batch than that of the step
    def item(self, step, right=Batches.__getitem__): return choose(self, step, partial(right, self))
    return [(Batches, "__getitem__", item)]


def attend(f): return [(attention_torch, "causal_attention", lambda q, k, v, window=None: f(q, k, v))]


def made_with(change):
    right = TransformerLM.__init__
    def made(self, *args, **kwargs):
        right(self, *args, **kwargs)
        with torch.no_grad(): change(self)
    return [(TransformerLM, "__init__", made)]


def evaluating(*changes):
    "Patches that are there while the model is evaluated, and not before or after."
    def evaluate(*args, right=training_loop.evaluate, **kwargs):
        with ExitStack() as stack:
            for c in changes: stack.enter_context(unittest.mock.patch.object(*c))
            return right(*args, **kwargs)
    return [(training_loop, "evaluate", evaluate)]


def adding(f): # `f(engine, right, inputs, targets, share, last)` adds gradients
    right = TorchEngine.add_gradients
    return [(TorchEngine, "add_gradients", lambda self, x, y, share=1., last=True: f(self, partial(right, self), x, y, share, last))]


def updating(before=None, after=None, lr=lambda engine, lr: lr):
    def update(self, rate, right=TorchEngine.update):
        with torch.no_grad():
            for p in self.model.parameters():
                if before and p.grad is not None: before(p)
        norm = right(self, lr(self, rate))
        with torch.no_grad():
            for p in self.model.parameters():
                if after: after(p)
        return norm
    return [(TorchEngine, "update", update)]


def at_resume(change):
    "What a resume in the middle of the run gets wrong."
    def step(self, batch=None, right=Trainer.train_step):
        if self.step == self.config.steps//2: change(self)
        return right(self, batch)
    return [(Trainer, "train_step", step)]


# Targets and loss

def later(y): return np.concatenate([y[:, 1:], np.full_like(y[:, :1], -100)], 1)

@fault("targets two ahead", r"shift", "huggingface/transformers#47394: the labels are shifted by the loader, and again by the loss",
       "the right forward pass gives another loss than the logged one, that with shifted targets gives it")
def _(): return batches(lambda x, y: (x, later(y)), lambda x, y: (x, later(y)))


@fault("last target of the next row", r"target|label", "huggingface/transformers#47394: rows are flattened before the shift, so the last target of each is the next row's first token",
       "training losses computed again are a little lower than the logged ones; the validation loss agrees")
def _(): return batches(lambda x, y: (x, np.concatenate([y[:, :-1], np.roll(x[:, :1], -1, 0)], 1)))


@fault("padding counted", r"padding", "EleutherAI/gpt-neo#45, huggingface/transformers#32832: targets that only fill a row are in the mean of the loss",
       "logged training losses are lower than those computed again; with padding counted they agree", model=dict(context_length=512), train=dict(batch_size=2, windows="within"))
def _(): return batches(lambda x, y: (x, np.where(y == -100, 0, y)))


@fault("softmax before the loss", r"softmax", "Lightning-Universe/lightning-bolts#654, and Karpathy's list of common mistakes: probabilities are given to a loss that takes logits",
       "no loss gets below ln V - 1; the right forward pass gives another loss, one with a second softmax the logged one")
def _():
    right = TransformerLM.forward
    forward = lambda self, *args, **kwargs: right(self, *args, **kwargs).softmax(-1)
    return [(TransformerLM, "forward", forward),
            (TransformerLM, "loss", lambda self, ids, targets: F.cross_entropy(self(ids).flatten(0, 1), targets.flatten()))]


@fault("label smoothing in evaluation", r"smooth", "pytorch/pytorch#129050: one loss function with label smoothing serves training and validation",
       "the logged validation loss is a mixture of the right one and of the mean over all tokens")
def _():
    smoothed = partial(F.cross_entropy, label_smoothing=.1)
    return [(TransformerLM, "loss", lambda self, ids, targets: smoothed(self(ids).flatten(0, 1), targets.flatten())),
            *evaluating((F, "cross_entropy", smoothed))]


@fault("mean of batch means", r"averag|mean of", "pytorch/torchtitan#4167: each batch's mean counts the same, whatever the number of its targets",
       "the validation loss computed again differs by a little; a mean of the batches' means gives the logged number")
def _():
    def evaluate(model, dataset, context_length, documents=None, dtype="float32", right=training_loop.evaluate):
        with torch.inference_mode():
            means = [F.cross_entropy(model(torch.from_numpy(x)).flatten(0, 1), torch.from_numpy(y).flatten()).item()
                     for x, y, _ in evaluation_batches(dataset, context_length, documents)]
        return replace(right(model, dataset, context_length, documents, dtype), loss=float(np.mean(means)))
    return [(training_loop, "evaluate", evaluate)]


@fault("logged loss of the last part", r"logged|report|log of", "allenai/allennlp#4706: the loss that is reported is that of the last part of a batch, divided by their number",
       "logged training losses are a quarter of those computed again", train=dict(micro_batch=2))
def _(): return adding(lambda engine, right, x, y, share, last: right(x, y, share, last)*last)


# The model

@fault("mask one too wide", r"mask|leak|future", "a kind of huggingface/transformers#31673: `diagonal=1` where the mask is built, so each query sees the next token",
       "the logged loss is below the floor; the right forward pass gives a far worse one")
def _(): return attend(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril(1)))


@fault("softmax over the queries", r"softmax|leak|future", "labmlai/annotated_deep_learning_paper_implementations#146, nerdai/llms-from-scratch-rs#30: attention weights add up to 1 along the wrong axis",
       "the right forward pass gives another loss than the logged one; with the other axis it agrees")
def _():
    def wrong(q, k, v):
        scores = (q@k.mT)*q.shape[-1]**-.5
        return scores.masked_fill(~attention_torch.causal_mask(q.shape[-2]), -torch.inf).softmax(-2)@v
    return attend(wrong)


@fault("heads merged without transposing", r"transpos|heads|leak|future", "jsbaan/transformer-from-scratch#6, reczoo/FuxiCTR#30, and Karpathy's list: `view` where a `transpose` is needed",
       "the right forward pass gives another loss than the logged one; with heads merged so it agrees")
def _():
    def wrong(q, k, v):
        out = attention_torch.F.scaled_dot_product_attention(q, k, v, is_causal=True)              # B H T K
        return out.reshape(out.shape[0], out.shape[2], out.shape[1], out.shape[3]).transpose(1, 2) # what `view` makes of it
    return attend(wrong)


@fault("dropout left on", r"dropout|random", "ipolharvard/ethos-ares#20: no `model.eval()` before the validation, so a tenth of all activations is zero there, too",
       "the logged validation loss is higher than the one computed again, and not explained by anything that is not random")
def _():
    def change(model):
        for layer in model.layers:
            for part in (layer.attn, layer.ffn): part.register_forward_hook(lambda m, a, out: F.dropout(out, .1, True))
    return made_with(change)


@fault("RoPE base changed", r"rope|base|theta", "marin-community/levanter#649: evaluated with another base of RoPE than the model was trained with",
       "the right forward pass gives a better loss than the logged one; with another base it agrees")
def _():
    def at(self, T, positions=None): return torch.stack(rope_tables(T, self.sizes[1], 500_000.), -1)
    return evaluating((RoPE, "at", at))


@fault("embedding scaled twice", r"embedding", "TensorAuto/OpenTau#179: the embedding multiplies by sqrt(D), and so does its caller",
       "the right forward pass gives another loss; with the scale applied twice it agrees", model=dict(tie_embeddings=True, scale_embeddings=True))
def _(): return made_with(lambda model: setattr(model, "scale", model.scale**2))


@fault("initial weights × 10", r"init|start", "a common thread: a standard deviation of 0.2 where 0.02 was meant",
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


@fault("frozen block", r"frozen|freez|never mov|not mov|not train|stand still", "a common thread: a flag of fine-tuning stays set, and a block gets no gradient",
       "a block's weights are the initial ones of config and seed; the optimizer has no moments of it")
def _(): return made_with(lambda model: model.layers[1].requires_grad_(False))


@fault("stale tie", r"\btie", "NVIDIA-NeMo/Automodel#2511: after a resume the head is a copy of the embedding, and no longer the same matrix",
       "the checkpoint has two matrices where the config has one", model=dict(tie_embeddings=True))
def _():
    def change(trainer):
        model = trainer.engine.model
        model.lm_head.weight = torch.nn.Parameter(model.token_embeddings.weight.detach().clone(), requires_grad=False)
    return at_resume(change)


# The optimizer

@fault("gradients left scaled", r"gradient.*(scal|×|times|factor)|unscal", "pytorch/examples#1196, milesial/Pytorch-UNet#468: gradients are clipped before the loss scale is taken off",
       "logged gradient norms are 1,024 times those computed again; every line is clipped")
def _(): return updating(before=lambda p: p.grad.mul_(1024))


@fault("gradients never zeroed", r"zero|accumulat", "tenstorrent/tt-blacksmith#711, pytorch/pytorch#47175, and Karpathy's list: `zero_grad` is not called",
       "the gradient norm grows from line to line; a gradient computed again is far shorter")
def _(): return [(AdamW, "zero_grad", lambda self, set_to_none=True: None)]


@fault("accumulated without dividing", r"gradient.*(scal|×|times|factor)|accumul|divid", "karpathy/nanoGPT#168: the loss of each part is not divided by their number",
       "logged gradient norms are four times those computed again", train=dict(micro_batch=2))
def _(): return adding(lambda engine, right, x, y, share, last: right(x, y, 1., last)*share)


@fault("clipped part by part", r"clip", "Deci-AI/super-gradients#653: gradients are clipped after each part of a batch, not once before the step",
       "the logged norm never passes the limit, while norms computed again do", train=dict(micro_batch=2, grad_clip=.25))
def _():
    def add(engine, right, x, y, share, last):
        loss = right(x, y, share, last)
        clip_grad_norm(engine.model.parameters(), engine.config.grad_clip)
        return loss
    return adding(add)


@fault("optimizer state lost", r"optimizer.*(state|lost|steps)|moments|resum", "EvolvingLMMs-Lab/OneVision-Encoder#65: a checkpoint without the optimizer, so Adam begins anew at a resume",
       "the optimizer's own count of steps is half of the run's")
def _(): return at_resume(lambda trainer: trainer.engine.optimizer.state.clear())


@fault("betas of the default", r"beta", "a kind of torch-points3d/torch-points3d#630: what the optimizer is built with at a resume is not what the run had",
       "the betas in the checkpoint are not the config's")
def _():
    def change(trainer):
        for group in trainer.engine.optimizer.param_groups: group["betas"] = .9, .999
    return at_resume(change)


@fault("schedule anew at a resume", r"schedule", "torch-points3d/torch-points3d#630: the scheduler is not restored, and begins with a warm-up again",
       "the logged learning rate is not the schedule's from the middle on")
def _():
    right = Trainer.rate
    return [(Trainer, "rate", lambda self, step: right(self, (step - 1) % (self.config.steps//2) + 1))]


@fault("schedule per part", r"schedule", "h2oai/h2o-llmstudio#663, huggingface/accelerate#963: the scheduler moves on with every part of a batch",
       "the logged learning rate is that of four times the step", train=dict(micro_batch=2))
def _():
    right = Trainer.rate
    return [(Trainer, "rate", lambda self, step: right(self, min(4*step, self.config.steps)))]


@fault("schedule not applied", r"schedule|learning rate", "a common thread: the scheduler belongs to another optimizer object; what is logged is its rate",
       "the rate in the checkpoint's optimizer is not that of the log; the steps of the weights are too large for the logged rate")
def _(): return updating(lr=lambda engine, lr: engine.config.lr)


@fault("bfloat16 master weights", r"bfloat16|bf16|round", "pytorch/ao#1124, vllm-project/speculators#765: the weights themselves are kept in bfloat16, and small steps are rounded away",
       "every number in the checkpoint fits into 16 bits, though the config says float32")
def _(): return updating(after=lambda p: p.copy_(p.bfloat16()))


@fault("decay of everything × 100", r"decay", "ServiceNow/Fast-LLM#542: norms and embeddings get weight decay, too; here in percent instead of as a share",
       "the decay in the checkpoint's optimizer is not the config's; the gains of norms are small")
def _():
    right = optim_torch.parameter_groups
    def groups(model, weight_decay): return [dict(params=[p for g in right(model, 0.) for p in g["params"]], weight_decay=100*weight_decay)]
    return [(engines, "parameter_groups", groups)]


@fault("L2 instead of decay", r"decay|\bL2\b", "pytorch/pytorch#48793: Adam's `weight_decay` goes into the gradient, where AdamW's goes into the weight",
       "losses and moments computed again from a checkpoint drift away from the logged ones")
def _():
    right = optim_torch._step_all_
    def step(params, states, lr, betas, eps, weight_decay):
        for p in params: p.grad.add_(p, alpha=weight_decay)
        right(params, states, lr, betas, eps, 0.)
    return [(optim_torch, "_step_all_", step)]


@fault("learning rate × 3", r"learning rate|step.*large|large.*step", "the review of this course, and any thread on tuning: a rate that trains, and trains worse",
       "a run with a smaller rate gets a lower loss in the same steps", wrong=dict(lr=.03))
def _(): return []


@fault("gradient ascent", r"sign|ascent|uphill", "a common thread on policy losses: the sign of the loss is lost on the way to the optimizer",
       "the loss climbs; a step against the gradient computed again would lower it")
def _(): return updating(before=lambda p: p.grad.neg_())


# Data

@fault("sorted by topic", r"shuffl|sorted|order", "a common thread on streaming sources: shards are read one after the other, and each is of one kind",
       "documents near each other are alike, those far apart are not; the training loss is low where the validation loss is high", train=dict(windows="sequential"), data="topic", twin="whole")
def _(): return []


@fault("validation text in training", r"leak|duplicat|overlap|contamin|train(ing)? text", "openai/parameter-golf#2127, ciprian-chelba/1-billion-word-language-modeling-benchmark#5: validation documents stand in the training files",
       "documents of both files are equal", data="leaky", twin="fewer")
def _(): return []


@fault("one epoch for ever", r"repeat|same batch|shuffl|order|epoch|again and again", "pytorch/pytorch#31771, #5059: no `set_epoch`, so the sampler draws the same batches again and again",
       "logged losses go up and down with a period; they fall below those of other batches")
def _(): return steps_of(lambda self, step, right: right(step % 30))


@fault("workers with one seed", r"repeat|duplicat|twice|same (window|row|seed)|worker", "pytorch/pytorch#5059, facebookresearch/fairseq#1383: all workers draw the same random numbers, so a batch has each window twice",
       "the logged loss of a batch is that of half of its windows")
def _(): return batches(lambda x, y: (np.concatenate([x[:len(x)//2]]*2), np.concatenate([y[:len(y)//2]]*2)))


@fault("a batch from one place", r"shuffl|one place|same document|neighbo|correlat|order", "a common thread on sharded loaders without a shuffle buffer: the windows of a batch follow each other in one document",
       "logged losses vary more from batch to batch than those of random windows")
def _():
    def item(self, step, right):
        start = int(np.random.default_rng([self.config.seed, step]).integers(self.dataset.num_tokens - self.config.batch_size*self.context_length - 1))
        ids = np.asarray(self.dataset.tokens[start:start + self.config.batch_size*self.context_length + 1]).astype(np.int64)
        return ids[:-1].reshape(-1, self.context_length), ids[1:].reshape(-1, self.context_length)
    return steps_of(item)


@fault("token ids wrap", r"wrap|overflow|\bids?\b|tokenizer", "huggingface/transformers#2825, urvashik/knnlm#6: ids are kept in a type that is too small for them; here in 8 bits",
       "rows of the embedding for ids from 256 on have never moved; the right ids give another loss than the logged one")
def _():
    wrapped = lambda x, y: (x % 256, np.where(y < 0, y, y % 256))
    return batches(wrapped, wrapped)


@fault("ids moved by one", r"tokenizer|\bids?\b", "a common thread on added special tokens: the tokenizer that encodes the validation text numbers its tokens from another start",
       "validation documents decode to no text", data="moved", twin="whole")
def _(): return []


# Two thirds may be looked at while the doctor is improved; the others are kept for the second examination.
SET_B = frozenset(sorted((n for n in FAULTS if n != "learning rate × 3"), key=lambda n: hashlib.sha256(n.encode()).digest())[:len(FAULTS)//3])
