"Graders of chapter 04's exercises: what each refuses, in which words, and that other right answers pass."
import io
import math
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from graders import Graders, fails
from torch import nn

from lmcourse.exercises import training as ex
from lmcourse.training import checkpoint, data, optim_torch

P, BLOCKS = 22_696_448, 12_451_840
TOY = dict(ten=.64, hundred=4, thousand=361, turn=99, largest=100, bowl=.002)
STEPS = dict(first=1, tenth=1, turned=-.0526, plain=3.16, half=31.6, spike=3.287)
DECAYS = dict(sgd=.1, adam=.01, adamw=.1, steps=347, cosine=.368)
BYTES = dict(momentum=4*P, adamw=8*P, muon=8*P - 4*BLOCKS, mixed=16*P, shared=P, ring=7*P, root=28*P, rounds=14)


# AdamW

def adamw(move, first=0, each=True, per_group=True, zeros=False):
    "`move(p, g, s, t, lr, b1, b2, eps, decay)`; `s` holds m and v"
    class Own(torch.optim.Optimizer):
        def __init__(self, params, lr=1e-3, betas=(.9, .999), eps=1e-8, weight_decay=.01):
            self.count = first
            super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

        @torch.no_grad()
        def step(self, closure=None):
            self.count += 1
            for group in self.param_groups:
                g = group if per_group else self.defaults
                for p in group["params"]:
                    if p.grad is None and not zeros: continue
                    s, grad = self.state[p], torch.zeros_like(p) if p.grad is None else p.grad
                    if not s: s.update(t=first, m=torch.zeros_like(p), v=torch.zeros_like(p))
                    s["t"] += 1
                    move(p, grad, s, s["t"] if each else self.count, g["lr"], *g["betas"], g["eps"], g["weight_decay"])
    return Own


def means(g, s, b1, b2):
    s["m"] = b1*s["m"] + (1 - b1)*g
    s["v"] = b2*s["v"] + (1 - b2)*g**2
    return s["m"], s["v"]


def by_formula(below=lambda v, eps: v.sqrt() + eps, shrink=lambda p, lr, decay: p.mul_(1 - lr*decay), c=(1, 1)):
    def move(p, g, s, t, lr, b1, b2, eps, decay):
        m, v = means(g, s, b1, b2)
        shrink(p, lr, decay)
        p -= lr*(m/(1 - b1**t if c[0] else 1))/below(v/(1 - b2**t if c[1] else 1), eps)
    return move


def algorithm_1(p, g, s, t, lr, b1, b2, eps, decay, rate=lambda lr, lr_t: lr):
    m, v = means(g, s, b1, b2)
    lr_t = lr*math.sqrt(1 - b2**t)/(1 - b1**t)
    p -= lr_t*m/(v.sqrt() + eps)
    p -= rate(lr, lr_t)*decay*p


def with_float32_state(p, g, s, t, lr, b1, b2, eps, decay): # As torch keeps its own step counts
    if not torch.is_tensor(s["t"]): s.update(t=torch.tensor(1.), m=s["m"].float(), v=s["v"].float())
    s["m"].mul_(b1).add_(g, alpha=1 - b1)
    s["v"].mul_(b2).addcmul_(g, g, value=1 - b2)
    p.mul_(1 - lr*decay)
    p -= lr*(s["m"]/(1 - b1**s["t"]))/((s["v"]/(1 - b2**s["t"])).sqrt() + eps)


def with_l2(p, g, s, t, lr, b1, b2, eps, decay): by_formula()(p, g + decay*p, s, t, lr, b1, b2, eps, 0)


def swapped(p, g, s, t, lr, b1, b2, eps, decay): by_formula()(p, g, s, t, lr, b2, b1, eps, decay)


def spoils_gradient(p, g, s, t, lr, b1, b2, eps, decay): by_formula()(p, g.mul_(1), s, t, lr, b1, b2, eps, decay); g.zero_()


class Forgetful(adamw(by_formula())): # Keeps its means where state_dict doesn't look
    def __init__(self, params, **kw):
        super().__init__(params, **kw)
        self.own = {}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None: continue
                s = self.own.setdefault(p, dict(t=0, m=torch.zeros_like(p), v=torch.zeros_like(p)))
                s["t"] += 1
                by_formula()(p, p.grad, s, s["t"], group["lr"], *group["betas"], group["eps"], group["weight_decay"])


class NoOptimizer:
    def __init__(self, params, **kw): pass


class WithoutNoGrad(adamw(by_formula())):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]: p -= group["lr"]*p.grad


class OtherBetas(adamw(by_formula())):
    def __init__(self, params, lr=1e-3, betas=(.9, .95), eps=1e-8, weight_decay=.01): super().__init__(params, lr, betas, eps, weight_decay)


def with_eps(default):
    class OtherEps(adamw(by_formula())):
        def __init__(self, params, lr=1e-3, betas=(.9, .999), eps=default, weight_decay=.01): super().__init__(params, lr, betas, eps, weight_decay)
    return OtherEps


class NoDecay(adamw(by_formula())):
    def __init__(self, params, lr=1e-3, betas=(.9, .999), eps=1e-8, weight_decay=0.): super().__init__(params, lr, betas, eps, weight_decay)


class NoDefaults(adamw(by_formula())):
    def __init__(self, params, lr, betas, eps, weight_decay): super().__init__(params, lr, betas, eps, weight_decay)


# Schedule and clipping

def schedule(up=lambda it, warm: it/warm, x=lambda it, warm, end: (it - warm)/(end - warm), after=True, low=True, curve=lambda x: (1 + math.cos(math.pi*x))/2):
    def f(it, top, bottom, warm, end):
        if it < warm: return top*up(it, warm)
        if after and it > end: return bottom
        return (bottom if low else 0) + curve(x(it, warm, end))*(top - (bottom if low else 0))
    return f


def one_expression(it, top, low, warm, end):
    return top*it/warm if it < warm else low + .5*(1 + math.cos(math.pi*min(1, (it - warm)/(end - warm))))*(top - low)


def clip(norm=lambda gs: torch.stack([g.norm() for g in gs]).norm(), factor=lambda n, M: min(1., M/(n + 1e-6)), change=lambda p, f: p.grad.mul_(f)):
    def gradient_clipping(parameters, max_l2_norm):
        params = [p for p in parameters if p.grad is not None]
        if not params: return
        f = factor(norm([p.grad for p in params]), max_l2_norm)
        for p in params: change(p, f)
    return gradient_clipping


def new_tensor(p, f): p.grad = p.grad*f


def by_value(parameters, M):
    for p in parameters:
        if p.grad is not None: p.grad.clamp_(-M, M)


def twice_through(parameters, M):
    n = math.sqrt(sum(p.grad.square().sum().item() for p in parameters if p.grad is not None))
    for p in parameters:
        if p.grad is not None and n > M: p.grad.mul_(M/(n + 1e-6))


def no_none(parameters, M): return clip()(parameters, M*(1 + 0*sum(p.grad.sum() for p in parameters)))


def empty_gets_zero(parameters, M):
    params = list(parameters)
    clip()(params, M)
    for p in params: p.grad = torch.zeros_like(p) if p.grad is None else p.grad


def clip_weights(parameters, M):
    for p in parameters: p.data.mul_(.5)


def in_float32(parameters, M):
    params, total = [p for p in parameters if p.grad is not None], torch.tensor(0.)
    for p in params: total += (p.grad.detach().norm(2)**2).float()
    if total.sqrt() > M:
        for p in params: p.grad.detach().mul_(M/(total.sqrt() + 1e-6))


def torchs_clip(parameters, M): nn.utils.clip_grad_norm_(parameters, M)


# Batches

def batch(starts=lambda n, B, T: np.random.randint(0, n - T, B), rows=lambda d, s, T: np.stack([d[i:i + T + 1] for i in s]), x=lambda r: r[:, :-1], y=lambda r: r[:, 1:],
          kind=np.int64, move=True):
    def get_batch(dataset, batch_size, context_length, device):
        r = rows(dataset, starts(len(dataset), batch_size, context_length), context_length).astype(kind)
        return tuple(torch.from_numpy(np.ascontiguousarray(f(r))).to(device if move else "cpu") for f in (x, y))
    return get_batch


def drawn_on_device(dataset, B, T, device):
    starts = torch.randint(len(dataset) - T, (B,), device=device)
    return batch(starts=lambda n, B, T: starts.tolist())(dataset, B, T, device)


def seeded_starts(n, B, T): return np.random.default_rng(0).integers(0, n - T, B)


def by_torch(dataset, batch_size, context_length, device):
    starts = torch.randint(len(dataset) - context_length, (batch_size,)).tolist()
    row = lambda i: torch.tensor(dataset[i:i + context_length].tolist(), dtype=torch.long)
    return torch.stack([row(i) for i in starts]).to(device), torch.stack([row(i + 1) for i in starts]).to(device)


def by_random(dataset, batch_size, context_length, device):
    starts = [random.randrange(len(dataset) - context_length) for _ in range(batch_size)]
    take = lambda shift: torch.as_tensor(np.array([dataset[i + shift:i + shift + context_length] for i in starts]).astype("int64"), device=device)
    return take(0), take(1)


def view_of_torch(dataset, batch_size, context_length, device):
    tokens = torch.from_numpy(np.asarray(dataset).view(np.int16)) if dataset.dtype == np.uint16 else torch.from_numpy(np.asarray(dataset))
    starts = torch.randint(len(tokens) - context_length, (batch_size, 1))
    rows = (tokens.unfold(0, context_length + 1, 1)[starts[:, 0]].long() & 0xffff).to(device)
    return rows[:, :-1], rows[:, 1:]


def whole_in_torch(dataset, batch_size, context_length, device):
    tokens = torch.from_numpy(np.asarray(dataset)).long()
    starts = torch.randint(len(dataset) - context_length, (batch_size, 1)) + torch.arange(context_length + 1)
    return tokens[starts][:, :-1].to(device), tokens[starts][:, 1:].to(device)


# Passes

def passes(order=lambda n, seed, k: np.random.default_rng([seed, k]).permutation(n), place=lambda p, n: divmod(p, n)):
    def windows_of_step(step, num_windows, batch_size, seed):
        where = [place(step*batch_size + i, num_windows) for i in range(batch_size)]
        return [int(order(num_windows, seed, k)[at]) for k, at in where]
    return windows_of_step


def drawn(step, n, B, seed): return np.random.default_rng([seed, step]).integers(n, size=B)


def dropped(step, n, B, seed):
    k, at = divmod(step, n//B)
    return np.random.default_rng([seed, k]).permutation(n)[at*B:at*B + B]


def cut(step, n, B, seed):
    k, at = divmod(step, -(-n//B))
    return np.random.default_rng([seed, k]).permutation(n)[at*B:at*B + B]


def by_shared(n, seed, k):
    np.random.seed(1000*seed + k)
    return np.random.permutation(n)


def by_named_generator(n, seed, k):
    "For five windows, two passes have the same order by chance"
    random.Random(f"{seed}_{k}").shuffle(order := list(range(n)))
    return order


def without_seed(n, seed, k): return np.random.default_rng(k).permutation(n)


class Counting:
    "Goes on from call to call, whatever step is asked for"
    def __init__(self): self.at = -1

    def __call__(self, step, n, B, seed):
        self.at = 0 if step == 0 else self.at + 1
        return passes()(self.at, n, B, seed)


def by_torchs_generator(n, seed, k):
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed*1_000_003 + k)).numpy()


# Checkpoints

def save_all(model, optimizer, iteration, out): torch.save((model.state_dict(), optimizer.state_dict(), iteration), out)


def load_all(src, model, optimizer):
    weights, state, iteration = torch.load(src)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    return iteration


def save_with(f): return lambda m, o, k, out: torch.save(f(m, o, k), out)


def without_optimizer(src, model, optimizer):
    weights, _, iteration = torch.load(src)
    model.load_state_dict(weights)
    return iteration


def without_number(src, model, optimizer): load_all(src, model, optimizer)


def parameters_only(src, model, optimizer):
    weights, state, iteration = torch.load(src)
    for name, p in model.named_parameters(): p.data.copy_(weights[name])
    optimizer.load_state_dict(state)
    return iteration


def means_only(src, model, optimizer):
    weights, state, iteration = torch.load(src)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state | dict(param_groups=optimizer.state_dict()["param_groups"]))
    return iteration


def new_parameters(src, model, optimizer):
    k = load_all(src, model, optimizer)
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())
    return k


def one_less(src, model, optimizer): return load_all(src, model, optimizer) - 1


def save_and_close(model, optimizer, iteration, out):
    save_all(model, optimizer, iteration, out)
    if hasattr(out, "close"): out.close()


def save_open_only(model, optimizer, iteration, out):
    with open(out, "wb") as f: save_all(model, optimizer, iteration, f)


def load_and_close(src, model, optimizer):
    k = load_all(src, model, optimizer)
    if hasattr(src, "close"): src.close()
    return k


def save_in_half(model, optimizer, iteration, out): save_all(model.half(), optimizer, iteration, out)


MEMORY = {}


def keep(model, optimizer, iteration, out): MEMORY["last"] = model, optimizer, iteration


def by_hand(model, optimizer, iteration, out):
    "Another style: one flat dict, written through a file of its own"
    flat = {f"model/{k}": v for k, v in model.state_dict().items()} | dict(optimizer=optimizer.state_dict(), iteration=torch.tensor(iteration))
    if hasattr(out, "write"): torch.save(flat, out)
    else:
        with open(out, "wb") as f: torch.save(flat, f)


def load_by_hand(src, model, optimizer):
    flat = torch.load(src, map_location="cpu", weights_only=True)
    optimizer.load_state_dict(flat.pop("optimizer"))
    k = int(flat.pop("iteration"))
    model.load_state_dict({name.removeprefix("model/"): v for name, v in flat.items()}, strict=True)
    return k


# Accumulation

def accumulation(weight=lambda x, y, inputs, targets, sizes: 1/(targets != -100).sum(), how="sum", give=lambda total: total, before=None):
    def accumulate_gradients(model, inputs, targets, sizes):
        total = 0.
        for x, y in zip(inputs.split(sizes), targets.split(sizes)):
            if before: before(model)
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction=how)*weight(x, y, inputs, targets, sizes)
            loss.backward()
            total += loss.item()
        return give(total)
    return accumulate_gradients


def changing(f, at):
    "The same, but one of the arguments is another afterwards"
    def changed(*args):
        result = f(*args)
        args[at][-1:] = type(args[at])([0]) if isinstance(args[at], list) else 0
        return result
    return changed


def without_empty_parts(model, inputs, targets, sizes):
    total = 0.
    for x, y in zip(inputs.split(sizes), targets.split(sizes)):
        if (count := (y != -100).sum()) == 0: continue
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())*count/(targets != -100).sum()
        loss.backward()
        total += loss.item()
    return total


def at_once(model, inputs, targets, sizes):
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    loss.backward()
    return loss.item()


def one_backward(model, inputs, targets, sizes):
    n = (targets != -100).sum()
    loss = sum(F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")/n for x, y in zip(inputs.split(sizes), targets.split(sizes)))
    loss.backward()
    return loss.item()


def by_autograd(model, inputs, targets, sizes):
    "Another style: gradients asked for, added up, and put there at the end"
    total, sums, start, n = 0., None, 0, int((targets != -100).sum())
    for size in sizes:
        logits = model(inputs[start:start + size]).transpose(1, 2)
        loss = F.cross_entropy(logits, targets[start:start + size], reduction="none").sum()/n
        grads = torch.autograd.grad(loss, list(model.parameters()))
        sums = grads if sums is None else [a + b for a, b in zip(sums, grads)]
        total, start = total + loss.item(), start + size
    for p, g in zip(model.parameters(), sums): p.grad = g
    return total


# The loop

def windows(tokens, starts, T, shift=1):
    row = lambda i: torch.from_numpy(tokens[np.asarray(starts).reshape(-1, 1) + np.arange(T) + i].astype(np.int64))
    return row(0), row(shift)


def loss_on(model, x, y): return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


@torch.no_grad()
def look(model, tokens, T, rng):
    model.eval()
    loss = loss_on(model, *windows(tokens, np.arange(0, len(tokens) - T, T), T)).item()
    model.train()
    return loss


def loop(make=lambda model: torch.optim.AdamW(model.parameters(), lr=.02), look=look, shift=1, zero=True, own_seed=True, note=lambda k, l: (k, l), first=1, tokens=None, steps=lambda n: n, size=None, rng_of=np.random.default_rng, end=lambda h: h):
    def train(model, train_tokens, valid_tokens, steps_, B, T, every, seed):
        rng, optimizer, history = rng_of(seed if own_seed else 0), make(model), []
        source = valid_tokens if tokens == "valid" else train_tokens
        for k in range(first, steps(steps_) + first):
            if zero: optimizer.zero_grad()
            loss_on(model, *windows(source, rng.integers(len(source) - T - shift + 1, size=size or B), T, shift)).backward()
            optimizer.step()
            if k % every == 0: history.append(note(k, look(model, valid_tokens, T, rng)))
        return end(history)
    return train


class OfNumPy:
    "Draws from NumPy's generator, but its seed is torch's."
    def __init__(self, seed): torch.manual_seed(seed)
    def integers(self, n, size): return np.random.randint(n, size=size)


class AlwaysZero(OfNumPy):
    def __init__(self, seed):
        super().__init__(seed)
        self.integers = np.random.default_rng(0).integers


class Anew:
    "Starts again from its seed for each batch."
    def __init__(self, seed): self.seed = seed
    def integers(self, n, size): return np.random.default_rng(self.seed).integers(n, size=size)


def twice_as_many(model, train_tokens, valid_tokens, steps, B, T, every, seed):
    return [(k//2, loss) for k, loss in loop()(model, train_tokens, valid_tokens, 2*steps, B, T, 2*every, seed)]


def changed(before=lambda m: m.eval(), after=lambda m: m.train(), grad=False, random_windows=False, share=1, short=0):
    def f(model, tokens, T, rng):
        before(model)
        with torch.set_grad_enabled(grad):
            starts = rng.integers(len(tokens) - T, size=250) if random_windows else np.arange(0, (len(tokens) - T)//share - short, T)
            loss = loss_on(model, *windows(tokens, starts, T)).item()
        after(model)
        return loss
    return f


def no_look(model, tokens, T, rng): return 1.2


def by_name(model, *args):
    "Calls the model by its argument's name."
    class Named(type(model)):
        def __call__(self, ids): return super().__call__(ids=ids)
    model.__class__ = Named
    return loop()(model, *args)


class Loop:
    "Another style: torch's scheduler and clipping, batches made before, and validation in pieces"
    def __call__(self, model, train_tokens, valid_tokens, steps, batch_size, context_length, eval_every, seed):
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(train_tokens) - context_length, (steps, batch_size), generator=generator).numpy()
        optimizer = torch.optim.SGD(model.parameters(), lr=2., momentum=.9)
        rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        history = []
        for k, some in enumerate(starts, 1):
            loss = loss_on(model, *windows(train_tokens, some, context_length))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.)
            optimizer.step()
            rates.step()
            optimizer.zero_grad()
            if not k % eval_every: history.append([k, self.valid(model, valid_tokens, context_length)])
        return history

    def valid(self, model, tokens, T):
        was, total, n = model.training, 0., (len(tokens) - 1)//T
        model.eval()
        with torch.inference_mode():
            for i in range(n): total += loss_on(model, *windows(tokens, [i*T], T)).item()
        model.train(was)
        return total/n


# Muon

ABC = 3.4445, -4.7750, 2.0315


def muon(start=lambda x: x/x.norm(), abc=ABC, rounds=5, end=lambda y, x: y, turn=True):
    def orthogonalize(matrix):
        (a, b, c), x = abc, start(matrix)
        tall = turn and len(x) > len(x.T)
        x = x.T if tall else x
        for _ in range(rounds): x = a*x + b*(x@x.T)@x + c*(x@x.T)@(x@x.T)@x
        return end(x.T if tall else x, matrix)
    return orthogonalize


def not_turned_back(matrix): return muon(turn=False)(matrix.T if len(matrix) > len(matrix.T) else matrix)


def by_singular_values(matrix):
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    s = s/s.norm()
    for _ in range(5): s = ABC[0]*s + ABC[1]*s**3 + ABC[2]*s**5
    return u*s@vh


def jordan(matrix, eps=1e-7): return muon(start=lambda x: x/(x.norm() + eps))(matrix)


def in_bfloat16(matrix): return muon()(matrix.bfloat16()).to(matrix.dtype)


def in_place(matrix): matrix /= matrix.norm(); return muon()(matrix)


WRONG_ANSWERS = dict(
    toy_rates=[
        (TOY | dict(ten=.8), "ten: 0.8 is the factor of the weights"), (TOY | dict(ten=.81), "takes θ/n for the gradient"),
        (TOY | dict(hundred=1), "the same height on the other side"), (TOY | dict(thousand=19), "changes by its square"),
        (TOY | dict(thousand=-19), "changes by its square"), (TOY | dict(turn=100), "the factor -1: the loss stays as it is"),
        (TOY | dict(turn=400), "is the step that reaches the minimum"), (TOY | dict(largest=50), "reaches the minimum in one step"),
        (TOY | dict(largest=200), "it is 2θ/n"), (TOY | dict(largest=1), "forgets that the loss is a mean"),
        (TOY | dict(bowl=2), "the steepest direction decides"), (TOY | dict(bowl=.001), "reaches the minimum in one step"),
        (TOY | dict(bowl=.0021), "is too large"), (None, "expected a dict"), (dict(ten=.64), "hundred is missing")],
    adamw=[
        (lambda p, **options: None, "expected a class, got the function <lambda>"),
        (adamw(by_formula(below=lambda v, eps: (v + eps).sqrt())), "ε is inside the root"),
        (adamw(by_formula(below=lambda v, eps: v.sqrt())), "ε is not used"), (adamw(by_formula(below=lambda v, eps: v + eps)), "the root is missing"),
        (adamw(by_formula(shrink=lambda p, lr, d: None)), "there is no weight decay"),
        (adamw(by_formula(shrink=lambda p, lr, d: p.mul_(1 - d))), "the decay is λθ, expected αλθ"),
        (adamw(with_l2), "that is L2, expected a decay apart from the gradient"),
        (adamw(lambda *a: algorithm_1(*a, rate=lambda lr, lr_t: lr_t)), "the decay has the corrected rate α_t, expected α"),
        (adamw(by_formula(c=(0, 0))), "neither mean is corrected"), (adamw(by_formula(c=(1, 0))), "the mean of the squares is not corrected"),
        (adamw(by_formula(c=(0, 1))), "the mean of the gradients is not corrected"), (adamw(by_formula(), first=1), "t is 2 at the first step"),
        (adamw(by_formula(), first=-1), "t starts at 0, expected 1"), (adamw(algorithm_1, first=-1), "t is 1 at a parameter's first step, not 0"),
        (adamw(swapped), "β₁ and β₂ are swapped"), (adamw(by_formula(), each=False), "all parameters share one t"),
        (adamw(by_formula(), per_group=False), "the numbers of the group are not used"), (adamw(by_formula(), zeros=True), "a parameter without a gradient moves"), (adamw(spoils_gradient), "changed a gradient"),
        (adamw(lambda p, g, s, t, lr, *rest: p.sub_(lr*g)), "all weights after step 1: element"), (Forgetful, "keep m, v and t in self.state[p]".capitalize()),
        (OtherBetas, "OtherBetas(groups): steps as with lr=0.001, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.01 were expected: are these its defaults?"), (NoDecay, "are these its defaults?"), *((with_eps(eps), "OtherEps(groups): steps as with") for eps in (1e-6, 1e-10, 0)),
        (NoDefaults, "NoDefaults(groups): your code raised TypeError"),
        (NoOptimizer, "expected a torch.optim.Optimizer"), (torch.optim.AdamW, "torch.optim.AdamW is torch's own"),
        (WithoutNoGrad, "a leaf Variable that requires grad"), (torch.optim.SGD([nn.Parameter(torch.ones(1))]), "expected the class SGD itself"), (type("Answer", (), {"__init__": fails}), "raised RuntimeError"), (fails, "expected a class, got the function fails"), (3, "expected a class, got 3")],
    first_steps=[
        (STEPS | dict(first=1000), "is the gradient's own length"), (STEPS | dict(first=3.16), "is the step without corrections"), (STEPS | dict(tenth=10), "is the way of all ten steps"),
        (STEPS | dict(turned=.0526), "has the sign wrong"), (STEPS | dict(turned=0), "lets the two cancel"), (STEPS | dict(turned=-.01), "is not corrected"),
        (STEPS | dict(turned=-1), "takes the last gradient alone"), (STEPS | dict(turned=-.05/.19), "is the corrected mean of the gradients"), (STEPS | dict(plain=.1), "forgets that v is too small as well"),
        (STEPS | dict(plain=100), "forgets the root"), (STEPS | dict(half=3.162), "is the step if neither is corrected"), (STEPS | dict(half=1000), "forgets the root"),
        (STEPS | dict(spike=100), "enters v as well"), (STEPS | dict(spike=10.9), "is m alone"), (STEPS | dict(spike=3.5), "is too large"), ([], "expected a dict")],
    two_decays=[
        (DECAYS | dict(sgd=10), "is λθ: it is multiplied by the rate"), (DECAYS | dict(sgd=.01), "plain descent doesn't divide"),
        (DECAYS | dict(adam=.1), "is that of plain descent"), (DECAYS | dict(adam=.002), "multiplies by λ: it divides out"), (DECAYS | dict(adamw=.01), "is Adam's with L2"),
        (DECAYS | dict(steps=346), "is one too few"), (DECAYS | dict(steps=math.log(.5)/math.log(.998)), "is not a whole number"), (DECAYS | dict(steps=250), "not of what is left"), (DECAYS | dict(cosine=.135), "is that of a constant rate"),
        (DECAYS | dict(cosine=.5), "is the share of the rates' sum"), (DECAYS | dict(cosine=math.nan), "is not a number"), ({}, "sgd is missing")],
    schedule=[
        (schedule(up=lambda it, warm: (it + 1)/warm), "the warm-up is one iteration early"), (schedule(up=lambda it, warm: it/max(warm - 1, 1)), "reaches the highest rate one iteration early"),
        (schedule(after=False), "after cosine_cycle_iters the rate rises again"), (schedule(x=lambda it, w, e: it/e), "expected from the end of the warm-up"),
        (schedule(x=lambda it, w, e: (it - w)/e), "the cosine is as long as cosine_cycle_iters, expected"), (lambda it, top, low, w, e: low if it >= e else schedule(x=lambda it, w, e: (it - w)/e)(it, top, low, w, e), "and cut off there"), (schedule(low=False), "the cosine goes down to 0"),
        (schedule(curve=lambda x: 1 - x), "that is a straight line"), (schedule(curve=lambda x: (1 + math.cos(math.radians(math.pi*x)))/2), "math.cos takes radians"),
        (schedule(curve=lambda x: (1 + math.cos(2*math.pi*x))/2), "its angle ends at π, not 2π"), (schedule(x=lambda it, w, e: min(1, (it - w)/(e - w - 1))), "the cosine ends one iteration early"),
        (schedule(x=lambda it, w, e: (it - w)/(e - w + 1), after=False), "the cosine ends one iteration late"), (lambda it, top, low, w, e: low + (top - low)*it/w if it < w else one_expression(it, top, low, w, e), "the warm-up starts at the lowest rate"),
        (lambda it, top, low, w, e: one_expression(it, top, low, w, e) if it*top/w >= 0 else 0, "raised ZeroDivisionError"),
        (lambda it, *rest: torch.ones(1), "expected a float"), (lambda it, *rest: None, "expected a float, got None"), (fails, "raised RuntimeError")],
    clipping=[
        (clip(factor=lambda n, M: M/(n + 1e-6)), "gradients that are short enough are scaled up"), (clip(factor=lambda n, M: min(1., M/n)), "10⁻⁶ is not added to the length"),
        (clip(norm=lambda gs: sum(g.square().sum() for g in gs)), "the root is missing"), (clip(norm=lambda gs: sum(g.norm() for g in gs)), "the length is a sum of lengths"),
        (clip(norm=lambda gs: max(g.norm() for g in gs)), "the largest gradient alone"), (clip(norm=lambda gs: max(g.abs().max() for g in gs)), "the length is the largest entry"),
        (clip(norm=lambda gs: torch.cat([g.flatten() for g in gs]).square().mean().sqrt()), "a root of a mean"), (clip(norm=lambda gs: sum(g.abs().sum() for g in gs)), "the sum of sizes"),
        (by_value, "each entry is clipped"), (lambda ps, M: [clip()([p], M) for p in ps], "each gradient is clipped by itself"),
        (clip(change=new_tensor), "p.grad is another tensor now"), (twice_through, "a generator can be gone through once"), (no_none, "raised AttributeError"),
        (empty_gets_zero, "a parameter that had no gradient has one now"), (clip_weights, "your code changed the weights"), (lambda ps, M: None, "nothing was clipped"),
        (clip(factor=lambda n, M: M if n > M else 1.), "multiplied by M, but not divided"), (clip(factor=lambda n, M: 1/(n + 1e-6) if n > M else 1.), "not multiplied by M"), (fails, "raised RuntimeError")],
    get_batch=[
        (type("Batches", (), {}), "expected a function, got the class Batches"),
        (batch(starts=lambda n, B, T: np.random.randint(0, n - T - 1, B)), "no window starts at 4"), (batch(starts=lambda n, B, T: np.random.randint(0, max(n - T - 1, 1), B)), "no window starts at 4, the last possible start"),
        (batch(starts=lambda n, B, T: np.random.randint(0, n - T + 1, B)), "raised ValueError"), (batch(starts=lambda n, B, T: np.random.randint(min(1, n - T - 1), n - T, B)), "no window starts at 0"),
        (batch(y=lambda r: r[:, :-1]), "they are the inputs themselves"), (batch(x=lambda r: r[:, 1:], y=lambda r: r[:, :-1]), "they are the tokens before"),
        (batch(y=lambda r: np.roll(r[:, :-1], -1, 1)), "the inputs turned round"), (batch(starts=seeded_starts), "is there a seed inside?"),
        (batch(starts=lambda n, B, T: np.random.randint(0, n - T, 1).repeat(B)), "all windows are the same"),
        (batch(starts=lambda n, B, T: np.random.randint(0, n - T - B) + np.arange(B)), "one token after the one before"),
        (batch(starts=lambda n, B, T: np.minimum(np.random.randint(0, n - T, B), np.random.randint(0, n - T, B))), "all starts are equally likely"),
        (batch(kind=np.int32), "inputs are int32, expected int64"), (batch(move=False), "lie on 'cpu'"), (batch(rows=lambda d, s, T: d.astype(np.int64)[s[:, None] + np.arange(T + 1)]), "all tokens were copied"),
        (batch(rows=lambda d, s, T: np.array(d.tolist())[s[:, None] + np.arange(T + 1)]), "all tokens were copied"), (whole_in_torch, "all tokens were copied"),
        (lambda d, B, T, device: batch()(d, B, T - 1, device), "have the shape (16, 5), expected (16, 6)"),
        (lambda d, B, T, device: batch()(d, B, T, device)[0], "expected (inputs, targets)"), (lambda d, B, T, device: (d[:T], d[1:T + 1]), "expected inputs as a tensor, got ndarray"), (drawn_on_device, "draw the starts on the CPU"), (fails, "raised RuntimeError")],
    passes=[
        (drawn, "is each drawn anew?"), (passes(order=lambda n, s, k: np.arange(n)), "pass 0 is not shuffled"), (passes(order=lambda n, s, k: np.random.default_rng(s).permutation(n)), "pass 1 has the order of pass 0"),
        (passes(order=lambda n, s, k: np.random.default_rng(s + k).permutation(n)), "pass 0 of seed 1 has the order of pass 1 of seed 0"), (passes(order=without_seed), "seed 1 gives the order of seed 0"),
        (passes(order=by_shared), "sets or uses a random generator that all share"), (passes(order=lambda n, s, k: np.random.permutation(n)), "occurs more than once"),
        (dropped, "the last 5 of a pass must not be left out"), (cut, "expected 7 numbers, got 5"), (lambda step, n, B, seed: passes()(step, n, B, seed)[:2*n], "a batch may contain several whole passes"),
        (lambda step, n, B, seed: np.arange(step*B, step*B + B), "are not all from 0 to 39"), (lambda step, n, B, seed: None, "expected 8 numbers, got None"),
        (lambda step, n, B, seed: np.ones(B)/2, "whole numbers"), (Counting(), "asked for again: another batch"),
        (lambda step, n, B, seed: passes()(step, n, B, seed) if step else passes()(0, n, B, seed)[::-1], "gives another order than 8"), (fails, "raised RuntimeError")],
    checkpointing=[
        ((save_all, without_optimizer), "the optimizer has no state"), ((save_all, without_number), "expected the iteration 5, got None"), ((save_all, one_less), "expected the iteration 5, got 4"), ((save_all, lambda *args: torch.tensor(load_all(*args))), "expected the iteration 5, got a tensor with int64 5"),
        ((save_all, parameters_only), "a buffer is no parameter"), ((save_all, means_only), "is in the groups of the optimizer's state_dict"), ((save_all, new_parameters), "other parameters than the optimizer now"),
        ((save_and_close, load_all), "closed a file that it did not open"), ((save_all, load_and_close), "load_checkpoint from a BytesIO, saved after step 5: your code closed a file that it did not open"), ((save_open_only, load_all), "raised TypeError"), ((save_in_half, load_all), "changed the run it saves"),
        ((keep, lambda src, m, o: 5), "there is nothing at this path afterwards"), ((save_all, lambda src, m, o: torch.load(src)[2]), "the optimizer has no state"),
        ((save_all, lambda src, m, o: [o.load_state_dict(torch.load(src)[1]), 5][1]), "not what it was when it was saved"),
        ((save_with(lambda m, o, k: (m.state_dict(), o.state_dict(), 5)), load_all), "expected the iteration 2, got 5"),
        (save_all, "expected two functions"), ((3, load_all), "expected a function, got 3"), ((fails, load_all), "raised RuntimeError")],
    accumulation=[
        (changing(accumulation(), 2), "your code changed its argument in place"), (changing(accumulation(), 3), "your code changed its arguments to"),
        (accumulation(weight=lambda x, y, i, t, s: 1, how="mean"), "the parts' means are added up"), (accumulation(weight=lambda x, y, i, t, s: 1/len(s), how="mean"), "each part weighs the same"),
        (accumulation(weight=lambda x, y, i, t, s: len(x)/len(i), how="mean"), "parts weigh by their rows"), (accumulation(weight=lambda *a: 1, how="sum"), "that is the sum over all targets"),
        (accumulation(weight=lambda x, y, i, t, s: 1/t.numel(), how="sum"), "also by those that don't count"), (accumulation(weight=lambda x, y, i, t, s: 1/len(i), how="sum"), "the sum is divided by the rows"),
        (accumulation(before=lambda m: m.zero_grad()), "those of the last part alone"), (at_once, "the model saw 8 rows, then backward"), (one_backward, "expected a backward after each part"),
        (accumulation(weight=lambda x, y, i, t, s: (y != -100).sum()/(t != -100).sum(), how="mean"), "a part has no targets, and a mean over none is NaN"),
        (accumulation(give=lambda total: None), "expected the loss"), (accumulation(give=lambda total: total/2), "expected the loss"), (lambda m, x, y, s: 0., "there is no gradient afterwards"), (fails, "raised RuntimeError")],
    training=[
        (changing(loop(), 1), "your code changed its argument in place"),
        (loop(look=lambda *a: print(look(*a), end="", file=io.StringIO())), "the loss after step 50 should be a number, got None: is a return or yield missing?"), (loop(end=lambda h: [*((k, None) for k, _ in h[:-1]), h[-1]]), "the loss after step 50 should be a number, got None"),
        (loop(shift=0), "its own input: are the targets shifted?"), (loop(shift=2), "the token after the next"), (loop(zero=False), "gradients are never set back"),
        (loop(look=changed(after=lambda m: None)), "a step was made without dropout"), (loop(look=changed(before=lambda m: None)), "an evaluation with dropout"), (loop(look=changed(grad=True)), "torch.no_grad()"),
        (loop(look=changed(random_windows=True)), "but the model at the end has"), (loop(look=lambda m, t, T, rng: [rng.random(), look(m, t, T, rng)][1]), "others than with eval_every = 50"), (loop(look=changed(share=2)), "but the model at the end has"), (loop(look=changed(short=1)), "one window is missing, into 4001 tokens fit 250"),
        (loop(look=lambda *a: look(*a)/math.log(2)), "that is in bits"), (loop(look=no_look), "valid_tokens are not looked at"), (loop(make=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-4)), "the weights hardly moved"),
        (loop(make=lambda m: torch.optim.SGD(m.parameters(), lr=.03)), "try another rate"), (loop(make=lambda m: torch.optim.SGD(m.parameters(), lr=1e4)), "the rate is far too high, or the windows or their targets are wrong"),
        (loop(own_seed=False), "are those of seed = 0"), (loop(rng_of=AlwaysZero), "the windows are those of seed = 0"), (loop(rng_of=OfNumPy), "a second run saw other windows"), (loop(rng_of=lambda seed: np.random.default_rng()), "a second run saw other windows"),
        (loop(end=lambda h: [(k, h[-1][1]) for k, _ in h]), "the loss after step 50 is "), (loop(end=lambda h: [*((k, math.nan) for k, _ in h[:-1]), h[-1]]), "the loss after step 50 is nan, but the model had"), (loop(tokens="valid"), "no window of train_tokens"), (loop(note=lambda k, l: l), "expected a list of (step, loss)"),
        (loop(size=64), "the steps saw 12,800 windows together, expected 3,200: batch_size is 16, and there are 200 steps"), (loop(size=8), "the steps saw 1,600 windows together"), (twice_as_many, "the steps saw 6,400 windows together"),
        (loop(make=lambda m: torch.optim.AdamW(m.head.parameters(), lr=.03)), "table.weight is what it was at the start: does the optimizer hold all of model.parameters()?"), (loop(rng_of=Anew), "each step sees the same windows: make the generator once, before the loop"),
        (loop(first=0), "the history has the steps [0, 50, 100, 150], expected [50, 100, 150, 200]"), (loop(steps=lambda n: n//2), "backward was called 100 times"), (lambda *a: [], "backward was called 0 times"), (fails, "raised RuntimeError")],
    orthogonalize=[
        (muon(start=lambda x: x), "the numbers grow beyond all bounds"), (muon(start=lambda x: x/torch.linalg.svdvals(x)[0]), "by its largest singular value"),
        (muon(start=lambda x: x/x.norm(dim=1, keepdim=True)), "is the whole matrix divided by its Frobenius norm"), (muon(start=lambda x: x/x.abs().max()), "divided by its Frobenius norm"), (muon(rounds=1), "that is one iteration, expected five"),
        (muon(rounds=6), "that is six iterations"), (muon(abc=(ABC[0], ABC[2], ABC[1])), "a, b and c in the right places?"), (muon(abc=(ABC[0], -ABC[1], ABC[2])), "a, b and c in the right places"), (muon(abc=(1.5, -.5, 0)), "the classical iteration"),
        (muon(end=lambda y, x: y*x.norm()), "multiplied by the norm again"), (not_turned_back, "a tall matrix was turned and not turned back"), (in_place, "changed its argument in place"),
        (lambda m: torch.linalg.svd(m, full_matrices=False).U@torch.linalg.svd(m, full_matrices=False).Vh, "that is the exact U Vᵀ"), (lambda m: m/m.norm(), "divided by its norm, and no more"),
        (muon(start=lambda x: x.float()/x.norm()), "dtype float32, expected float64"), (in_bfloat16, "are the iterations in a shorter number format?"), (lambda m: None, "expected a tensor, got None"), (fails, "raised RuntimeError")],
    worker_bytes=[
        (BYTES | dict(momentum=8*P), "is AdamW's"), (BYTES | dict(momentum=P), "is a count of numbers"), (BYTES | dict(adamw=4*P), "AdamW keeps two"), (BYTES | dict(adamw=16*P), "counts weights and gradients as well"),
        (BYTES | dict(muon=8*P), "Muon keeps one number a parameter"), (BYTES | dict(muon=4*P), "is Muon's for all"), (BYTES | dict(muon=4*P + 4*BLOCKS), "is the other way round"),
        (BYTES | dict(mixed=12*P), "forgets the float32 copy"), (BYTES | dict(mixed=18*P), "float32 for the gradients"), (BYTES | dict(shared=8*P), "one worker alone"), (BYTES | dict(ring=7*P//2), "N - 1 of N pieces, once"),
        (BYTES | dict(ring=8*P), "two whole vectors"), (BYTES | dict(ring=28*P), "without a ring"), (BYTES | dict(root=32*P), "worker 0 has its own"), (BYTES | dict(rounds=7), "is one half"), (BYTES | dict(rounds=16), "is 2 N"),
        (BYTES | dict(mixed=16*P + 1), "is too large"), (BYTES | dict(rounds=14.5), "is not a whole number"), (None, "expected a dict")])

RIGHT_ANSWERS = dict(
    toy_rates=[TOY, {k: np.float64(v) for k, v in reversed(TOY.items())}],
    adamw=[adamw(by_formula()), adamw(algorithm_1), optim_torch.AdamW, adamw(with_float32_state), adamw(by_formula(shrink=lambda p, lr, d: p.sub_(lr*d*p)))],
    first_steps=[STEPS, dict(first=1., tenth=1., turned=-1/19, plain=math.sqrt(10), half=math.sqrt(1000), spike=10.9/math.sqrt(10.999))],
    two_decays=[DECAYS, dict(sgd=.1, adam=.01, adamw=.1, steps=347., cosine=math.prod(1 - .002*(1 + math.cos(math.pi*t/1000))/2 for t in range(1000)))],
    schedule=[optim_torch.cosine_lr, one_expression, schedule(), lambda *a: torch.tensor(one_expression(*a), dtype=torch.float64), lambda *a: np.float64(one_expression(*a)), lambda *a: np.float32(one_expression(*a))],
    clipping=[optim_torch.clip_grad_norm, torchs_clip, in_float32, clip(), clip(factor=lambda n, M: M/(n + 1e-6) if n > M else 1.)],
    get_batch=[data.get_batch, batch(), by_torch, by_random, view_of_torch],
    passes=[passes(), passes(order=by_torchs_generator), passes(order=by_named_generator), lambda *a: tuple(passes()(*a))],
    checkpointing=[(save_all, load_all), (checkpoint.save_checkpoint, checkpoint.load_checkpoint), [by_hand, load_by_hand]],
    accumulation=[accumulation(), by_autograd, accumulation(give=torch.tensor), accumulation(give=np.float32), without_empty_parts],
    training=[loop(), by_name, Loop(), loop(make=lambda m: optim_torch.AdamW(m.parameters(), lr=.05))],
    orthogonalize=[optim_torch.orthogonalize, muon(), muon(turn=False), jordan, by_singular_values],
    worker_bytes=[BYTES, {k: float(v) for k, v in reversed(BYTES.items())}])

graders = Graders(ex, [(name, *entry) for name, entries in WRONG_ANSWERS.items() for entry in entries],
                  [(name, answer) for name, answers in RIGHT_ANSWERS.items() for answer in answers])
test_wrong_answers, test_right_answers, test_each_grader, test_same_words = graders.tests()


@pytest.mark.parametrize("task", ["schedule", "clipping", "get_batch", "passes", "accumulation", "training", "orthogonalize"])
def test_what_the_students_code_raises_is_kept(task): graders.stops(task)


def test_a_pair_that_raises_is_kept_too():
    assert type(graders.refused("checkpointing", (fails, load_all)).__cause__) is RuntimeError
    assert type(graders.refused("checkpointing", (save_all, fails)).__cause__) is RuntimeError
