"Graders of chapter 07's exercises: what each refuses, in which words, and that other right answers pass."
import heapq
import math
from collections import Counter, deque
from functools import partial

import numpy as np
import pytest
import torch
from graders import Graders, fails

from lmcourse.architecture.attention_np import attention_forward, causal_attention_forward, causal_mask_np, rope_forward, rope_tables_np
from lmcourse.architecture.transformer_torch import TransformerLM
from lmcourse.exercises import inference as ex
from lmcourse.inference.engine import Engine, Request
from lmcourse.inference.paged_cache import BlockPool
from lmcourse.inference.kv_cache import CacheLayer, KVCache
from lmcourse.inference.quantization import QuantizedWeight, grid_steps, pack_pairs, quantize, to_grid, two_of_four
from lmcourse.inference.speculative import exact_distribution, expected_tokens, residual, verify
from lmcourse.tools.config import ModelConfig

F32 = np.float32


# 1. Bytes of a cache

def kv(heads=lambda c: c.kv_heads, head_dim=lambda c: c.head_size, seen=lambda c, T: min(T, c.window or T), two=2, layers=lambda c: c.num_layers, size=lambda n: n, batch=lambda B: B):
    return lambda c, B, T, n: two*layers(c)*batch(B)*heads(c)*head_dim(c)*seen(c, T)*size(n)


def kv_of_a_real_cache(config, batch_size, tokens, number_bytes):
    dtype = {1: torch.int8, 2: torch.bfloat16, 4: torch.float32}[number_bytes]
    return KVCache(config, batch_size, tokens, dtype).num_bytes


def kv_changing(c, B, T, n): object.__setattr__(c, "window", None); return kv()(c, B, T, n)


# 2, 7 and 13. Numbers

INTENSITY = dict(decode=1, prefill=512, batch=200, batch_int8=100, attention=4)
EMPTY = dict(paged=7.5, longest=511.5, more=1024/520, blocks=18, copies=3)
OUTLIER = dict(step=64, noise=64, zeros=.252, groups=8.06)


# 3. Tokens a second

def rate(B, weights, cache, flop_per_s, bytes_per_s): return min(bytes_per_s*B/(2*weights + B*cache), flop_per_s/2/weights)


def rated(read=lambda B, w, c: 2*w + B*c, compute=lambda B, w: 2*w*B, join=max, sequences=lambda B: B):
    return lambda B, w, c, flops, bandwidth: sequences(B)/join(read(B, w, c)/bandwidth, compute(B, w)/flops)


# 4. One new token

def attend(scale=lambda K: K**-.5, shared=np.repeat, axis=-1, shift=True, keys_of=lambda k: k):
    def f(q, keys, values):
        (H, K), G = q.shape, len(keys)
        k, v = (shared(keys_of(a), H//G, 0) for a in (keys, values))
        scores = np.einsum("hk,hsk->hs", q, k)*q.dtype.type(scale(K))
        with np.errstate(all="ignore"):
            e = np.exp(scores - scores.max(axis, keepdims=True)*shift)
            return np.einsum("hs,hsk->hk", e/e.sum(axis, keepdims=True), v)
    return f


def neighbours(a, times, axis): return np.tile(a, (times, 1, 1))


def attend_with_torch(q, keys, values):
    q, k, v = (torch.from_numpy(a) for a in (q[:, None], keys, values))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)[:, 0].numpy()


def attend_in_loops(q, keys, values):
    out = np.empty_like(q)
    for h, query in enumerate(q):
        k, v = (a[h*len(keys)//len(q)] for a in (keys, values))
        scores = k@query/np.sqrt(q.shape[1])
        p = np.exp(scores - scores.max())
        out[h] = (p/p.sum())@v
    return out


def attend_as_the_last_row(q, keys, values): return causal_attention_forward(q[:, None], keys, values)[0][:, 0]


# 5. A cache that can go back

def turn(x, first, theta):
    cos, sin = rope_tables_np(first + x.shape[1], x.shape[2], theta, np.float64)
    return rope_forward(x, cos[first:], sin[first:])[0]


def turn_by_complex(x, positions, theta):
    K = x.shape[-1]
    z = (x[..., ::2] + 1j*x[..., 1::2])*np.exp(1j*np.outer(positions, theta**(-np.arange(0, K, 2)/K)))
    return np.stack((z.real, z.imag), -1).reshape(x.shape)


class Rotated:
    "Right, and the place where mistakes are made."
    error, shared, masked = ValueError, staticmethod(np.repeat), True

    def __init__(self, theta=10_000.): self.theta, self.k, self.v, self.at = theta, None, None, 0
    def first(self, T): return self.at
    def stored(self, k, T): return turn(k, self.first(T), self.theta)
    def asked(self, q, T): return turn(q, self.first(T), self.theta)
    def read(self, k): return k
    def value(self, v, T): return v

    def feed(self, q, k, v):
        T = q.shape[1]
        k, v, q = self.stored(k, T), self.value(v, T), self.asked(q, T)
        self.k, self.v = (k, v) if self.k is None else (np.concatenate((self.k, k), 1), np.concatenate((self.v, v), 1))
        self.at += T
        keys, values = (self.shared(a, len(q)//len(a), 0) for a in (self.read(self.k), self.v))
        return attention_forward(q, keys, values, causal_mask_np(T, keys.shape[1]) if self.masked else None)[0]

    def rewind(self, length):
        if length > self.at: raise self.error("too long")
        self.k, self.v, self.at = self.k[:, :length], self.v[:, :length], length


def cache(**methods): return type("Flawed", (Rotated,), methods)


class OfTheText:
    "Right: keeps what came, and computes all anew."
    def __init__(self, theta): self.theta, self.text = theta, []

    def feed(self, q, k, v):
        self.text += [[a[:, t] for a in (q, k, v)] for t in range(q.shape[1])]
        all_q, all_k, all_v = (np.stack(a, 1) for a in zip(*self.text))
        all_q, all_k = (turn_by_complex(a, range(len(self.text)), self.theta) for a in (all_q, all_k))
        return causal_attention_forward(all_q, all_k, all_v)[0][:, -q.shape[1]:]

    def rewind(self, length):
        if length > len(self.text): raise ValueError(f"{length} of {len(self.text)}")
        del self.text[length:]


class WithTheLayerOfTheCourse:
    def __init__(self, theta): self.theta, self.layer = theta, None

    def feed(self, q, k, v):
        if self.layer is None: self.layer = CacheLayer(*torch.zeros(2, 1, len(k), 32, k.shape[2], dtype=torch.float64), 32)
        at = self.layer.length
        keys, values = self.layer.update(*(torch.from_numpy(a)[None] for a in (turn(k, at, self.theta), v)))
        return causal_attention_forward(turn(q, at, self.theta), keys[0].numpy(), values[0].numpy())[0]

    def rewind(self, length):
        if length > self.layer.length: raise ValueError(length)
        self.layer.length = length


class OneForAll(Rotated):
    k = v = None
    at = 0
    def __init__(self, theta): type(self).theta = theta
    def __setattr__(self, name, value): setattr(type(self), name, value)


class KeepsAll(Rotated):
    def rewind(self, length): self.at = length


class RefusesLate(Rotated):
    def rewind(self, length):
        there = self.at
        self.k, self.v, self.at = self.k[:, :length], self.v[:, :length], min(length, 1)
        if length > there: raise ValueError
        self.at = length


class ForgetsToCount(Rotated):
    def rewind(self, length):
        if length > self.k.shape[1]: raise ValueError
        self.k, self.v = self.k[:, :length], self.v[:, :length]


class Longer(Rotated):
    def rewind(self, length): self.k, self.v, self.at = self.k[:, :length], self.v[:, :length], min(length, self.at)


class OneMore(Rotated):
    def rewind(self, length): self.k, self.v, self.at = self.k[:, :length + 1], self.v[:, :length + 1], min(length + 1, self.at)


# 6. Tables of blocks

class Tables:
    "Right, and the place where mistakes are made."
    def __init__(self, num_blocks, block_size):
        self.users, self.size, self.tables, self.tokens = [0]*num_blocks, block_size, {}, Counter()

    def take(self):
        for block, n in enumerate(self.users):
            if not n: self.users[block] = 1; return block
        raise IndexError("none is free")

    def is_new(self, n): return n % self.size == 0
    def copied(self, block): return block

    def append(self, name):
        n, table, copy = self.tokens[name], self.tables.get(name, []), None
        if self.is_new(n): table = [*table, self.take()]
        elif self.users[table[-1]] > 1:
            copy = self.copied(table[-1])
            self.users[table[-1]] -= 1
            try: table = [*table[:-1], self.take()]
            except IndexError: self.users[table[-1]] += 1; raise
        self.tables[name], self.tokens[name] = table, n + 1
        return table[-1], n % self.size, copy

    def fork(self, name, new):
        self.tables[new], self.tokens[new] = list(self.tables[name]), self.tokens[name]
        for block in self.tables[new]: self.users[block] += 1

    def free(self, name):
        for block in self.tables.pop(name): self.users[block] -= 1
        del self.tokens[name]


def blocks(**methods): return type("FlawedTables", (Tables,), methods)


class WithSets:
    "Right: who uses a block is looked up in the tables."
    def __init__(self, num_blocks, block_size): self.all, self.size, self.tables, self.places = set(range(num_blocks)), block_size, {}, {}

    def append(self, name):
        table, place, used = self.tables.get(name, []), self.places.get(name, 0), [b for t in self.tables.values() for b in t]
        alone = place and used.count(table[-1]) == 1
        free = self.all - set(used)
        if not alone and not free: raise IndexError("full")
        copy = None
        if not place: self.tables[name] = table + [max(free)]
        elif not alone: copy, self.tables[name] = table[-1], table[:-1] + [max(free)]
        self.places[name] = (place + 1) % self.size
        return self.tables[name][-1], place, copy

    def fork(self, name, new): self.tables[new], self.places[new] = self.tables[name].copy(), self.places[name]
    def free(self, name): del self.tables[name], self.places[name]


class OnThePool:
    "Right: with the pool of the course."
    def __init__(self, num_blocks, block_size): self.pool, self.tables, self.n = BlockPool(num_blocks, block_size), {}, {}

    def append(self, name):
        n, copy = self.n.get(name, 0), None
        if n % self.pool.block_size == 0:
            new = self.pool.take()
            self.tables.setdefault(name, []).append(new)
        elif self.pool.users[self.tables[name][-1]] > 1:
            new, copy = self.pool.take(), self.tables[name][-1]
            self.pool.release(copy)
            self.tables[name][-1] = new
        self.n[name] = n + 1
        return self.tables[name][-1], n % self.pool.block_size, copy

    def fork(self, name, new):
        self.tables[new], self.n[new] = self.tables[name][:], self.n[name]
        for b in self.tables[new]: self.pool.share(b)

    def free(self, name):
        for b in self.tables.pop(name): self.pool.release(b)
        del self.n[name]


def one_list(self, name, new): Tables.fork(self, name, new); self.tables[new] = self.tables[name]


def deep_fork(self, name, new): self.tables[new], self.tokens[new] = [self.take() for _ in self.tables[name]], self.tokens[name]


def free_for_all(self, name):
    for block in self.tables.pop(name): self.users[block] = 0
    del self.tokens[name]


def free_nothing(self, name): del self.tables[name], self.tokens[name]


def free_without_last(self, name):
    for block in self.tables.pop(name)[:-1]: self.users[block] -= 1
    del self.tokens[name]


def free_but_the_name(self, name):
    for block in self.tables[name]: self.users[block] -= 1


def never_shared(self, name):
    n = self.tokens[name]
    if self.is_new(n): self.tables.setdefault(name, []).append(self.take())
    self.tokens[name] += 1
    return self.tables[name][-1], n % self.size, None


def always_copies(self, name):
    n, table = self.tokens[name], self.tables.get(name, [])
    if n % self.size and self.users[table[-1]] == 1 and name == "b2":
        copy, self.users[table[-1]] = table[-1], 0
        self.tables[name] = [*table[:-1], self.users.index(0, copy + 1)]
        self.users[self.tables[name][-1]] = 1
        self.tokens[name] += 1
        return self.tables[name][-1], n % self.size, copy
    return Tables.append(self, name)


def counts_before(self, name):
    self.tables.setdefault(name, [])
    return Tables.append(self, name)


def from_one(self, name):
    block, place, copy = Tables.append(self, name)
    return block, place + 1, copy


def never_full(self):
    try: return Tables.take(self)
    except IndexError: return 0


class FromOne(WithSets):
    def __init__(self, num_blocks, block_size): super().__init__(num_blocks, block_size); self.all = set(range(1, num_blocks + 1))


def a_memory_error(self):
    try: return Tables.take(self)
    except IndexError as e: raise MemoryError("full") from e


# 8. Who waits for whom

def finish(arrivals, lengths, places, continuous, start=0, order=lambda waiting, lengths: waiting, here=lambda a, t: a <= t, plus=0):
    left, ends, running, waiting, t = list(lengths), [0]*len(lengths), [], deque(range(len(lengths))), start
    while waiting or running:
        if continuous or not running:
            present = order([i for i in waiting if here(arrivals[i], t)], lengths)
            for i in present[:places - len(running)]: running.append(i); waiting.remove(i)
        for i in running: left[i] -= 1; ends[i] = t + plus
        running = [i for i in running if left[i]]
        t += 1
    return ends


def finish_with_a_heap(arrivals, lengths, places, continuous):
    ends, free = [], [0]*places
    if continuous:
        for a, n in zip(arrivals, lengths):
            start = max(a, heapq.heappop(free))
            ends.append(start + n - 1)
            heapq.heappush(free, start + n)
        return ends
    now = i = 0
    while i < len(lengths):
        now = max(now, arrivals[i])
        batch = [k for k in range(i, min(i + places, len(lengths))) if arrivals[k] <= now]
        ends += [now + lengths[k] - 1 for k in batch]
        now, i = max(now + lengths[k] for k in batch), i + len(batch)
    return ends


def finish_late(arrivals, lengths, places, continuous):
    if not continuous: return finish(arrivals, lengths, places, False)
    ends, free = [], [0]*places
    for a, n in zip(arrivals, lengths):
        start = max(a, heapq.heappop(free))
        ends.append(start + n - 1)
        heapq.heappush(free, start + n + 1)
    return ends


def finish_in_full_batches(arrivals, lengths, places, continuous):
    if continuous: return finish(arrivals, lengths, places, True)
    ends, now = [], 0
    for i in range(0, len(lengths), places):
        now = max(now, arrivals[min(i + places, len(lengths)) - 1])
        ends += [now + n - 1 for n in lengths[i:i + places]]
        now = max(ends[i:]) + 1
    return ends


MODEL = TransformerLM(ModelConfig(vocab_size=16, context_length=16, d_model=8, num_layers=1, num_heads=1))


def finish_in_the_engine(arrivals, lengths, places, continuous):
    engine, sequences, ends, step = Engine(MODEL, block_size=4, max_running=places, continuous=continuous, share=False), [], {}, 0
    while len(ends) < len(lengths):
        sequences += [engine.add(Request((1,), n)) for a, n in zip(arrivals, lengths) if a == step]
        engine.step()
        for s in sequences:
            if s.reason: ends.setdefault(s, step)
        step += 1
    return [ends[s] for s in sequences]


# 9. Accept or replace

def rest(p, q): return np.clip(p - q, 0, None)/np.clip(p - q, 0, None).sum()


def step(ratio=lambda x, p, q: min(1, p[x]/q[x]), other=lambda x, p, q: rest(p, q)):
    def f(x, p, q, draw):
        r = ratio(x, p, q)
        return x if draw([r, 1 - r]) == 0 else draw(other(x, p, q))
    return f


class Coin:
    "Keeps x by a coin of its own, instead of `draw`: here at every other call."
    heads = False
    def __call__(self, x, p, q, draw):
        self.heads = not self.heads
        return x if p[x] >= q[x] or self.heads else draw(rest(p, q))


def without(x, p, q): w = np.where(np.arange(len(p)) == x, 0, p); return w/w.sum() if w.sum() else p
def nothing_left(p):
    with np.errstate(all="ignore"): return rest(p, p)


def normal(w): return w/w.sum() if w.sum() > 0 else np.full(len(w), 1/len(w))
def own_chance(x, p, q, draw, rng=np.random.default_rng(0)): return x if rng.random() < p[x]/q[x] else draw(rest(p, q))


def with_verify(x, p, q, draw):
    p, q = torch.from_numpy(p), torch.from_numpy(q)
    kept, token = verify([x], q[None], torch.stack((p, p)), lambda probs: draw(probs.numpy()))
    return x if kept else token


def only_if_needed(x, p, q, draw):
    if p[x] >= q[x] or draw([1 - p[x]/q[x], p[x]/q[x]]): return x
    return draw(residual(torch.from_numpy(p), torch.from_numpy(q)).numpy())


def numpy_ints(x, p, q, draw): return np.int64(step()(x, p, q, draw))


# 10. Tokens a pass

def closed(a, n): return (1 - a**(n + 1))/(1 - a) if a < 1 else n + 1


def by_enumeration(a, n):
    def run(draw):
        count = 0
        while count < n and draw([a, 1 - a]) == 0: count += 1
        return count + 1
    return sum(k*probability for k, probability in exact_distribution(run).items())


# 11 and 12. Few bits

def rows(top=127, axis=1, round=np.rint, of=abs, low=-128):
    def f(w):
        with np.errstate(all="ignore"):
            s = of(w).max(axis, keepdims=True)/F32(top)
            return np.clip(round(w/np.where(s > 0, s, 1)), low, 127).astype(np.int8), np.broadcast_to(s, np.broadcast_shapes(s.shape, (1, 1))).ravel().astype(F32)
    return f


def away(x): return np.trunc(x + np.copysign(F32(.5), x))


def warns(w): s = abs(w).max(1)/F32(127); return np.rint(w/s[:, None]).astype(np.int8), s


def with_axes(w): c, s = rows()(w); return c, s[:, None]


def in_float64(w): c, s = rows()(w); return c, s.astype(float)


def as_int32(w): c, s = rows()(w); return c.astype(np.int32), s


def in_place(w): result = rows()(w); w /= 2; return result


def row_by_row(w):
    codes, steps = np.zeros(w.shape, np.int8), np.zeros(len(w), F32)
    for i, row in enumerate(w):
        steps[i] = max(row.max(), -row.min())/F32(127)
        if steps[i]: codes[i] = np.round(row/steps[i])
    return codes, steps


def rows_of_the_course(w): s = grid_steps(w, 8); return to_grid(w, s, 8), s


def rows_with_torch(w):
    w = torch.from_numpy(w)
    s = w.abs().amax(1)/127
    return (w/s.where(s > 0, torch.ones(()))[:, None]).round().to(torch.int8).numpy(), s.numpy()


def packed(order=lambda r: r[::2] | r[1::2] << 4, add=8, top=7, zero=8, whole=False, round=np.rint):
    def f(w, group):
        groups = w.reshape(len(w), -1, group)
        s = abs(groups).max(-1)/F32(top)
        if whole: s = np.repeat(abs(w).max(1, keepdims=True)/F32(7), s.shape[1], 1)
        raised = ((np.clip(round(groups/s[..., None]), -8, 7).astype(int) + add) & 15).astype(np.uint8).reshape(w.shape)
        if len(w) % 2: raised = np.concatenate((raised, np.full((1, w.shape[1]), zero, np.uint8)))
        return order(raised), s
    return f


def packed_by_the_course(w, group): q = quantize(w, 4, group, F32); return q.codes, q.steps


def packed_in_loops(w, group):
    out, n = w.shape
    steps, raised = np.zeros((out, n//group), F32), np.full((out + out % 2, n), 8, np.uint8)
    for i in range(out):
        for g in range(n//group):
            part = w[i, g*group:(g + 1)*group]
            steps[i, g] = abs(part).max()/F32(7)
            raised[i, g*group:(g + 1)*group] = [8 + round(float(x)) for x in part/steps[i, g]]
    return np.array([[low + 16*high for low, high in zip(*raised[i:i + 2])] for i in range(0, len(raised), 2)], np.uint8), steps


# 14. Two of four

def fours(f): return lambda w: f(w.reshape(-1, 4)).reshape(w.shape)


def first_two(keys):
    mask = np.zeros(keys.shape, bool)
    np.put_along_axis(mask, np.argsort(keys, 1, kind="stable")[:, :2], True, 1)
    return mask


def half_of_all(w):
    mask = np.zeros(w.size, bool)
    mask[np.argsort(-abs(w).ravel(), kind="stable")[:w.size//2]] = True
    return mask.reshape(w.shape)


def by_counting(w): # A weight stays if fewer than two of its four come before it
    a = abs(w).reshape(-1, 4)
    larger = (a[:, None, :] > a[:, :, None]).sum(2)
    earlier = ((a[:, None, :] == a[:, :, None]) & np.tri(4, k=-1, dtype=bool)).sum(2)
    return (larger + earlier < 2).reshape(w.shape)


class FailsAtOnce:
    def __init__(self, *args): fails()


class WithoutTables:
    def __init__(self, num_blocks, block_size): pass


WRONG_ANSWERS = dict(
    kv_bytes=[
        (kv(two=1), "expected 11,520, got 5,760: these are the keys alone"), (kv(heads=lambda c: c.num_heads), "every query head was given its own keys"),
        (kv(size=lambda n: 1), "these are the numbers, not their bytes"), (kv(layers=lambda c: 1), "that is for one layer"),
        (kv(batch=lambda B: 1), "that is for one sequence"), (kv(seen=lambda c, T: T), "no query looks further back than the window"),
        (kv(seen=lambda c, T: c.window or T), "the text is shorter than the window"), (kv(head_dim=lambda c: c.d_model//c.num_heads), "the head size is head_dim, not D/H"),
        (kv(heads=lambda c: 1), "that is for one key/value head"), (kv(seen=lambda c, T: T - 1), "got 9,216"), (kv_changing, "your code changed its argument in place"),
        (lambda *args: "many", "expected a number, got 'many'"), (lambda c, B, T, n: kv()(c, B, T, n)*1.5, "got"), (fails, "your code raised RuntimeError"), (3, "expected a function, got 3")],
    decoding_intensity=[
        (INTENSITY | dict(decode=.5), "decode: 0.5 is that of float32"), (INTENSITY | dict(decode=2), "decode: 2 counts one byte for a weight"),
        (INTENSITY | dict(prefill=1), "prefill: 1 is that of one token"), (INTENSITY | dict(prefill=1024), "counts one byte for a weight"),
        (INTENSITY | dict(batch=400), "batch: 400 is that of float32"), (INTENSITY | dict(batch=1), "is where FLOPs equal bytes"),
        (INTENSITY | dict(batch_int8=200), "is that of bfloat16: half the bytes take half the time"), (INTENSITY | dict(batch_int8=400), "goes the wrong way"),
        (INTENSITY | dict(attention=1), "is that of G = H"), (INTENSITY | dict(attention=800), "each has its own"), (INTENSITY | dict(attention=3), "attention: 3 is too small"),
        (dict(decode=1), "expected a dict with the keys decode, prefill"), (None, "got None")],
    token_rate=[
        (rated(read=lambda B, w, c: B*(2*w + c)), "the weights are read once a step, not once for each sequence"), (rated(read=lambda B, w, c: 2*w + c), "each sequence has a cache of its own"),
        (rated(read=lambda B, w, c: 2*w), "the caches are read too"), (rated(read=lambda B, w, c: w + B*c), "a weight in bfloat16 has two bytes"),
        (rated(read=lambda B, w, c: 4*w + B*c), "that is for float32"), (rated(compute=lambda B, w: w*B), "a product and an addition, two FLOPs"),
        (rated(join=lambda a, b: a + b), "reading and computing go on at the same time"), (rated(join=lambda a, b: a), "the computing takes time too"),
        (rated(join=lambda a, b: b), "the reading takes time too"), (rated(sequences=lambda B: 1), "that is for one of the sequences"),
        (lambda *args: args[0]/rate(*args), "that is the time of a step, not a rate"), (rated(join=min), "the reading takes time too"), (lambda *args: None, "expected a number, got None"), (fails, "raised RuntimeError")],
    attend_new=[
        (attend(scale=lambda K: 1), "the scores are not divided by the root of K"), (attend(scale=lambda K: 1/K), "divided by K, expected its root"),
        (attend(shared=neighbours), "for 6 query heads, 2 key/value heads and 5 keys"), (attend(shared=neighbours), "query head h reads head h modulo G"),
        (attend(axis=0), "the softmax is over heads"), (attend(keys_of=lambda a: a[:, :-1]), "the new token does not see itself"),
        (attend(keys_of=lambda a: a[:, 1:] if a.shape[1] > 1 else a), "the first token is not seen"), (attend(shift=False), "(scores in the thousands)"),
        (attend(shift=False), "exp overflows: subtract the largest score first"), (lambda q, k, v: attend()(q, k, v).astype(np.float64), "dtype float64, expected float32"),
        (lambda q, k, v: attend()(q, k, v).tolist(), "expected a NumPy array, got [["), (lambda q, k, v: attend()(q, k, v)[None], "shape (1, 4, 6), expected (4, 6)"),
        (lambda q, k, v: attend()(q, k, np.add(v, 1, out=v)), "changed its argument in place"), (lambda q, k: q, "your code raised TypeError"), (fails, "raised RuntimeError")],
    rotated_cache=[
        (cache(first=lambda self, T: 0), "the new tokens were put at positions 0, 1"), (cache(first=lambda self, T: self.at + T), "counted after the new tokens were appended"),
        (cache(asked=lambda self, q, T: turn(q, self.at + 1, self.theta)), "queries are placed one position after"), (cache(stored=lambda self, k, T: k), "keys were stored without their rotation"),
        (cache(read=lambda self, k: turn(k, 0, self.theta)), "keys were rotated again when they were read"), (cache(value=lambda self, v, T: turn(v, self.at, self.theta)), "values must not be rotated"),
        (cache(masked=False), "a query sees the later ones"), (cache(shared=staticmethod(neighbours)), "query head h reads head h modulo G"), (KeepsAll, "tokens after the length kept are still seen"),
        (ForgetsToCount, "the next position was not reset"), (Longer, "rewind(4) with 3 tokens: expected a ValueError"), (OneMore, "after feed 5, feed 1, back to 3, feed 1: "),
        (cache(error=KeyError), "expected a ValueError, your code raised KeyError"), (OneForAll, "after feed 4: "), (RefusesLate, "with 3 tokens: a ValueError, which must change nothing"), (cache(rewind=None), "Flawed has no rewind"), (lambda theta: None, "expected a class, got the function <lambda>"), (Rotated(), "expected a class, got <"), (FailsAtOnce, "raised RuntimeError")],
    block_tables=[
        (blocks(append=never_shared), "append b2: block 3 is shared with a, whose text would be written over"), (blocks(copied=lambda self, b: None), "the tokens before would be lost"),
        (blocks(copied=lambda self, b: [self.users.__setitem__(b, 2), b][1]), "fork a c, append b, append c: block 0 is shared with a, whose text would be written over"), # One count for all who share
        (blocks(free=free_for_all), "still uses it"), (blocks(free=free_nothing), "are used by nobody, but your code raised IndexError"), (blocks(free=free_without_last), "used by nobody"),
        (blocks(free=free_but_the_name), "is still in the tables"), (blocks(fork=one_list), "have one list for a table"), (blocks(fork=deep_fork), "blocks are shared"),
        (blocks(append=always_copies), "b2 alone uses block"), (blocks(is_new=lambda self, n: n % self.size == 1 or n == 0), "2 tokens take 1 blocks, but the table of a is [0, 1]"),
        (blocks(append=counts_before), "nothing should change when no block is free"), (blocks(append=from_one), "expected the place 0 for token 0, got 1"), (blocks(take=a_memory_error), "no block is free: expected an IndexError, your code raised MemoryError"),
        (blocks(append=lambda self, name: Tables.append(self, name)[0]), "expected (block, place, copy), got 0"), (blocks(take=lambda self: 0), "block 0 was given out, but a still uses it"),
        (blocks(take=never_full), "no block is free: expected an IndexError, got ("), (FromOne, "block 8 is not one of 0 to 7"),
        (WithoutTables, "expected an attribute tables, a dict"), (FailsAtOnce, "for num_blocks = 8, block_size = 2: your code raised RuntimeError"), (fails, "expected a class, got the function fails")],
    empty_places=[
        (EMPTY | dict(paged=8), "paged: 8 is half a block"), (EMPTY | dict(paged=8.5), "counts 16 empty places for a block that is full"), (EMPTY | dict(longest=512), "is half the room"),
        (EMPTY | dict(longest=512.5), "is the mean length"), (EMPTY | dict(more=1024/512.5), "forgets that blocks have empty places too"), (EMPTY | dict(more=511.5/7.5), "compares what is empty"),
        (EMPTY | dict(blocks=36), "blocks: 36 shares nothing"), (EMPTY | dict(blocks=19), "the last one to write needs none"), (EMPTY | dict(blocks=15), "lets all four write"),
        (EMPTY | dict(copies=4), "is one too many"), (EMPTY | dict(copies=2), "copies: 2 is too small"), ({}, "expected a dict")],
    finish_steps=[
        (lambda a, n, places, continuous: finish(a, n, places, True), "that is with continuous batches"), (lambda a, n, places, continuous: finish(a, n, places, False), "that is with static batches"),
        (partial(finish, plus=1), "expected [2], got [3]: steps are numbered from 0"), (partial(finish, order=lambda w, n: sorted(w, key=lambda i: n[i])), "the shortest request was let in first"),
        (partial(finish, here=lambda a, t: True), "requests were started before they had arrived"), (finish_late, "a place that becomes free in a step can be taken in the next one"),
        (finish_in_full_batches, "the batch need not be full"), (lambda a, *rest: [e - b for e, b in zip(finish(a, *rest), a)], "how long each took from its arrival"),
        (lambda *args: sorted(finish(*args)), "the order in which they end"), (lambda *args: finish(*args)[:-1], "expected a list of 1 steps, got []"), (lambda *args: max(finish(*args)), "expected a list of 1 steps, got 2"),
        (lambda a, n, *rest: n.sort() or finish(a, n, *rest), "changed its arguments"), (fails, "raised RuntimeError")],
    accept=[
        (lambda x, p, q, draw: x, "that is q: every proposal is kept"), (step(other=lambda x, p, q: p), "distributed as [0.35, 0.35, 0.225, 0.075]: the replacement is drawn from p"),
        (step(other=lambda x, p, q: q), "the replacement is drawn from q"), (step(ratio=lambda x, p, q: p[x]/q[x]), "p/q is above 1 where the draft gives too little, take min(1, p/q)"),
        (step(other=lambda x, p, q: np.clip(p - q, 0, None)), "which sum to 0.5: divide by the sum"), (step(other=lambda x, p, q: p - q), "take"),
        (step(other=lambda x, p, q: normal(abs(p - q))), "drawn from |p - q|"), (step(other=lambda x, p, q: normal(np.clip(q - p, 0, None))), "the positive part of q - p"),
        (step(ratio=lambda x, p, q: p[x]), "x is kept with probability p(x)"), (step(ratio=lambda x, p, q: min(1, q[x]/p[x]) if p[x] else 1), "the ratio is upside down"),
        (step(ratio=lambda x, p, q: float(p[x] >= q[x])), "x is kept only if p(x) ≥ q(x)"), (step(other=without), "the replacement is drawn from p without x"), (Coin(), "draw was not called, although x"),
        (lambda x, p, q, draw: draw(p), "but x is kept in 17.5% of all cases, and 50.0% are possible"), (lambda x, p, q, draw: draw(nothing_left(p)), "NaN comes from 0/0"),
        (lambda x, p, q, draw: 4, "expected a token, got 4"), (lambda x, p, q, draw: None, "expected a token, got None"), (lambda x, p, q, draw: draw("p"), "draw takes probabilities, got 'p'"), (fails, "raised RuntimeError")],
    tokens_a_pass=[
        (lambda a, n: closed(a, n) - 1, "the replacement, or the one extra token, counts too"), (lambda a, n: 1 + a*n, "what follows a rejected token is dropped"), (lambda a, n: a*n, "what follows a rejected token is dropped"),
        (lambda a, n: closed(a, n - 1), "if none is rejected, there is one extra token"), (lambda a, n: closed(a, n + 1), "that is one term too many"), (lambda a, n: 1/(1 - a), "that is for proposals without end"),
        (lambda a, n: (1 - a**(n + 1))/(1 - a), "for rate = 1.0, lookahead = 4: your code raised ZeroDivisionError"), (lambda a, n: (n + 1)*a**n, "but else none"), (lambda a, n: None, "expected a number, got None"), (fails, "raised RuntimeError")],
    quantize_rows=[
        (rows(128), "divided by 128, expected 127"), (rows(255), "divided by 255"), (rows(axis=0), "the steps are those of columns"), (rows(round=np.trunc), "cut off towards 0"), (rows(round=away), "a half goes to the even neighbour"),
        (rows(round=lambda x: np.floor(x + F32(.5))), "not always up"), (rows(round=np.floor), "rounded down"), (rows(of=lambda w: w), "without its absolute value"),
        (lambda w: (rows(axis=None)(w)[0], np.full(len(w), abs(w).max()/F32(127))), "there is one step for all rows"), (warns, "for a row of zeros (2, 3): your code raised FloatingPointError"),
        (with_axes, "steps: shape (3, 1), expected (3,)"), (in_float64, "steps: dtype float64, expected float32"), (as_int32, "codes: dtype int32, expected int8"), (in_place, "changed its argument in place"),
        (lambda w: rows()(w)[0], "expected (codes, steps), got"), (lambda w: QuantizedWeight(*quantize(w, 8, None, F32).plain), "expected (codes, steps)"), (fails, "raised RuntimeError")],
    pack_int4=[
        (packed(lambda r: r[1::2] | r[::2] << 4), "row 2i is the low half of the byte"), (packed(lambda r: r[:len(r)//2] | r[len(r)//2:] << 4), "expected rows 2i and 2i + 1"),
        (packed(whole=True), "the step is that of the whole row"), (packed(add=7), "8 is added to a code, not 7"), (packed(add=0, zero=0), "negative codes are two's complement"), (packed(zero=0), "a weight of 0 has the code 8"),
        (packed(top=8), "divided by 8, expected 7"), (packed(top=15), "divided by 15, expected 7"), (packed(round=np.trunc), "cut off towards 0"),
        (lambda w, g: (lambda r: (r[:, ::2] | r[:, 1::2] << 4, packed()(w, g)[1]))(packed(lambda r: r[:len(w)])(w, g)[0]), "two neighbours of a row share a byte"),
        (lambda w, g: (packed()(w, g)[0].astype(int), packed()(w, g)[1]), "expected packed as uint8, got"), (lambda w, g: packed()(w, g)[0], "expected (packed, steps)"), (lambda w, g: (pack_pairs(to_grid(w, abs(w).max(1)/F32(7), 4)), abs(w).max(1)/F32(7)), "steps: shape (2,), expected (2, 1)"), (fails, "raised RuntimeError")],
    outlier=[
        (OUTLIER | dict(step=128), "counts the width from -64 to 64"), (OUTLIER | dict(step=1), "the largest weight sets the step"), (OUTLIER | dict(noise=4096), "is the ratio of mean squares"), (OUTLIER | dict(noise=8), "is its root"),
        (OUTLIER | dict(noise=36.1), "is in decibels"), (OUTLIER | dict(zeros=.504), "takes all weights within a whole step"), (OUTLIER | dict(zeros=.0039), "is that without the large weight"),
        (OUTLIER | dict(groups=1), "forgets the group that contains the large weight"), (OUTLIER | dict(groups=1.98), "is the mean of the ratios"), (OUTLIER | dict(groups=65), "is the ratio of mean squares"), (OUTLIER | dict(groups=math.nan), "is not a number"), (5, "expected a dict")],
    two_largest=[
        (fours(lambda a: first_two(-a)), "signs don't count"), (lambda w: ~two_of_four(w), "that is what is left out"), (fours(lambda a: first_two(abs(a))), "that is what is left out"),
        (fours(lambda a: first_two(-abs(a)[:, ::-1])[:, ::-1]), "of equal weights the first stays"), (fours(lambda a: abs(a) >= np.sort(abs(a), 1)[:, 2:3]), "of equal weights only the first stays: two of four"),
        (fours(lambda a: abs(a) > np.sort(abs(a), 1)[:, 1:2]), "and always two"), (half_of_all, "half of the whole matrix was kept"), (lambda w: w*two_of_four(w), "dtype float32, expected bool"),
        (lambda w: two_of_four(np.ascontiguousarray(w.T)).T if len(w) % 4 == 0 else two_of_four(w), "the fours are neighbours in a column"), (lambda w: two_of_four(w).astype(int), "expected bool"),
        (lambda w: two_of_four(w).tolist(), "expected a NumPy array"), (fails, "raised RuntimeError")])
WRONG = [(name, *entry) for name, entries in WRONG_ANSWERS.items() for entry in entries]

RIGHT_ANSWERS = dict(
    kv_bytes=[kv(), kv_of_a_real_cache],
    decoding_intensity=[INTENSITY, {k: np.float32(v) for k, v in reversed(INTENSITY.items())}],
    token_rate=[rate, rated()],
    attend_new=[attend(), attend_with_torch, attend_in_loops, attend_as_the_last_row],
    rotated_cache=[Rotated, OfTheText, WithTheLayerOfTheCourse],
    block_tables=[Tables, WithSets, OnThePool],
    empty_places=[EMPTY, EMPTY | dict(more=1.97, blocks=18.)],
    finish_steps=[finish, finish_with_a_heap, finish_in_the_engine, lambda *args: np.array(finish(*args)), lambda *args: tuple(map(np.int64, finish(*args)))],
    accept=[step(), with_verify, only_if_needed, numpy_ints, lambda *args: torch.tensor(step()(*args))],
    tokens_a_pass=[closed, expected_tokens, by_enumeration],
    quantize_rows=[rows(), row_by_row, rows_of_the_course, rows_with_torch],
    pack_int4=[packed(), packed_by_the_course, packed_in_loops],
    outlier=[OUTLIER, dict(step=64., noise=64.2, zeros=.25, groups=8.1)],
    two_largest=[two_of_four, by_counting, fours(lambda a: first_two(-abs(a)))])
RIGHT = [(name, answer) for name, answers in RIGHT_ANSWERS.items() for answer in answers]

GRADERS = Graders(ex, WRONG, RIGHT)
refused = GRADERS.refused
test_wrong_answers_are_refused_in_one_line_that_says_why, test_right_answers_pass_in_silence, test_every_grader_is_tried, test_a_grader_says_the_same_each_time = GRADERS.tests()


@pytest.mark.parametrize("task", ["kv_bytes", "token_rate", "attend_new", "rotated_cache", "block_tables", "finish_steps", "accept", "tokens_a_pass", "quantize_rows", "pack_int4", "two_largest"])
def test_what_the_students_code_raises_is_kept(task): GRADERS.stops(task, as_class=task in ("rotated_cache", "block_tables"))


@pytest.mark.parametrize("task", GRADERS.tasks)
def test_nonsense_is_refused_like_any_wrong_answer(task):
    class Empty:
        def __init__(self, *args): self.tables = {}
        feed = append = fork = free = rewind = lambda self, *args: None

    results = None, "x", b"", True, -1, 10**400, math.nan, 1j, [], [None], (), (1, 2), (None, None, None), {}, {"a": 1}, object(), np.zeros(3), np.array(None), torch.zeros(2, 2), (np.zeros(2), "x"), \
        (np.zeros((2, 4), np.int8), np.zeros(2, F32)), (np.array(["a"]), np.array(["b"])), [math.nan, "a", 1], np.full((2, 2), math.nan), np.ma.masked, int
    for result in results:
        said = str(refused(task, lambda *args: result))
        assert "\n" not in said and len(said) < 500
    for answer in (*results, Empty, "kv_bytes"): refused(task, answer)
    keys = refused(task, None).args[0].partition("the keys ")[2].partition(", got")[0].split(", ")
    for value in results[:5] + results[6:]: refused(task, dict.fromkeys(keys, value))


def test_chance_that_does_not_come_from_draw_is_refused(): refused("accept", own_chance)


@pytest.mark.parametrize("seed", range(3))
def test_the_engine_ends_each_request_when_the_counting_scheduler_does(seed):
    rng = np.random.default_rng(seed)
    for _ in range(10):
        n = rng.integers(1, 7)
        args = sorted(rng.integers(0, 9, n).tolist()), rng.integers(1, 8, n).tolist(), int(rng.integers(1, 4))
        for continuous in (True, False): assert ex._scheduled(*args, continuous) == finish_in_the_engine(*args, continuous)


def test_no_mistake_that_a_grader_knows_gives_the_right_result():
    p, q = np.array([.7, .2, .1]), np.array([.3, .3, .4])
    assert not any(np.allclose(law, p) for law in ex._accept_mistakes(p, q).values())
    w = np.random.default_rng(1).standard_normal((5, 6)).astype(F32)
    codes, steps = rows_of_the_course(w)
    for words, (c, s) in ex._row_mistakes(w).items(): assert "even neighbour" in words or c.tolist() != codes.tolist() or s.tolist() != steps.tolist()
    for flaw in ex._PACK_FLAWS.values(): assert ex._packed_with(w, 3, flaw=flaw)[0].tolist() != packed_by_the_course(w, 3)[0].tolist() or flaw == "rows"


@pytest.mark.parametrize("answer", [as_int32, in_float64])
def test_a_wrong_type_is_not_explained_by_another_mistake(answer):
    assert str(GRADERS.refused("quantize_rows", answer)).endswith(("expected int8", "expected float32"))
