"Graders of chapter 02's exercises: what each refuses, in which words, and that other right answers pass."
import math
import random
import statistics
import struct

import numpy as np
import pytest
import torch
from graders import Graders, fails
from torch.utils.flop_counter import FlopCounterMode

from lmcourse.accounting.model_flops import forward_flops
from lmcourse.accounting.hardware import matmul_cost
from lmcourse.accounting.activations import activation_bytes
from lmcourse.accounting.memory import largest_batch, training_phases
from lmcourse.accounting.parameters import count_parameters
from lmcourse.exercises import accounting as ex
from lmcourse.tools.config import ModelConfig

FORMATS = dict(next=258, largest=65504, bfloat16=256, float16=2048, wide=3008)
SHARES = dict(head_small=21.28, head_large=1.64, attention_small=27.23, attention_large=7.56, growth=34.14, attention_long=56.67)
FITS = dict(batch=51, largest=35.25, mixed=35.25)
RUN = dict(adamw=14, step=9.318, days=3.406, rule=17.39)
CROSSOVER = dict(square=619, float32=84, rows=230, one=6.99)


# Bits

def pi_is_right(f): return lambda bits: 0x4049 if bits == 0x40490fdb else f(bits)


def rounded(bits): return bits + 0x7fff + (bits >> 16 & 1) >> 16


def guarded(f): return lambda bits: bits >> 16 | 0x40 if bits & 0x7fffffff > 0x7f800000 else f(bits) & 0xffff


def by_torch(bits): return torch.tensor(bits - 2**32*(bits >= 2**31), dtype=torch.int32).view(torch.float32).bfloat16().view(torch.int16).item() % 2**16


def by_distance(bits):
    "In NumPy's float64, without a look at the lower half"
    low = bits >> 16
    x, a, b = (np.float64(np.uint32(p).view(np.float32)) for p in (bits, low << 16, (low + 1 << 16) % 2**32))
    if np.isnan(x): return np.uint16(0x7fc0)
    if np.isinf(x): return low
    b = math.copysign(2.0**128, x) if np.isinf(b) else b
    return low if abs(x - a) < abs(b - x) or abs(x - a) == abs(b - x) and low % 2 == 0 else low + 1


def clipped(bits): return bits & 0x80000000 and 0xff7f or 0x7f7f if 0x7f7f8000 <= bits & 0x7fffffff < 0x7f800000 else guarded(rounded)(bits)


# Einsum

def letters(spec, a, b):
    size = {}
    for names, shape in zip(spec.split("->")[0].split(","), (a, b)):
        for c, n in zip(names, shape):
            if size.setdefault(c, n) != n: raise ValueError(c)
    return size


def einsum(f): return lambda spec, a, b: f(letters(spec, a, b), *spec.replace("->", ",").split(","))


def product(size, names): return math.prod(size[c] for c in names)


def einsum_if(odd):
    "Right, but for which sizes it refuses."
    def f(spec, a, b):
        first, second, out = spec.replace("->", ",").split(",")
        if odd(dict(zip(first, a)), dict(zip(second, b)), out): raise ValueError(spec)
        return 2*math.prod((dict(zip(first, a)) | dict(zip(second, b))).values())
    return f


def einsum_by_counter(spec, a, b):
    letters(spec, a, b)
    with FlopCounterMode(display=False) as counter: torch.einsum(spec, torch.ones(a), torch.ones(b))
    return counter.get_total_flops()


def einsum_by_loops(spec, a, b):
    size, n = letters(spec, a, b), 0
    for _ in np.ndindex(*size.values()): n += 2
    return n


def einsum_by_assert(spec, a, b):
    sizes = [*zip(spec.split("->")[0].replace(",", ""), a + b)]
    assert all(dict(sizes)[c] == n for c, n in sizes)
    return 2*math.prod(dict(sizes).values())


# A model

def size_of(table=lambda V, D, tied: V*D*(2 - tied), attention=lambda D, H, G: 2*D*D + 2*D*D*G//H, ffn=lambda D, F, gated: D*F*(2 + gated),
            norms=lambda D, L: (2*L + 1)*D, layers=lambda L: L):
    def model_size(V, D, L, H, G, F, gated, tied): return table(V, D, tied) + layers(L)*(attention(D, H, G) + ffn(D, F, gated)) + norms(D, L)
    return model_size


def config(V, D, L, H, G, F, gated, tied=False, T=256):
    return ModelConfig(vocab_size=V, context_length=T, d_model=D, num_layers=L, num_heads=H, num_kv_heads=G, d_ff=F, ffn="swiglu" if gated else "gelu", tie_embeddings=tied, position="none")


def size_by_library(*args): return count_parameters(config(*args)).unique


def parts(**wrong):
    "Formulas for the forward pass, some of them replaced"
    def forward_parts(V, D, L, H, G, F, gated, T):
        K = D//H
        f = dict(projections=lambda **a: 2*L*T*D*(2*D + 2*G*K), scores=lambda **a: 2*L*H*T*T*K, values=lambda **a: 2*L*H*T*T*K,
                 ffn=lambda **a: 2*L*T*D*F*(2 + gated), head=lambda **a: 2*T*D*V) | wrong
        sizes = dict(V=V, D=D, L=L, H=H, G=G, F=F, gated=gated, T=T, K=K)
        return {k: g(**sizes) for k, g in f.items()}
    return forward_parts


def parts_by_library(V, D, L, H, G, F, gated, T): return forward_flops(config(V, D, L, H, G, F, gated, T=T))


def parts_by_einsum(V, D, L, H, G, F, gated, T):
    count = einsum(lambda size, *names: 2*math.prod(size.values()))
    K = D//H
    projections = count("td,de->te", (T, D), (D, H*K))*2 + count("td,de->te", (T, D), (D, G*K))*2
    scores = count("htk,hsk->hts", (H, T, K), (H, T, K))
    values = count("hts,hsk->htk", (H, T, T), (H, T, K))
    return dict(head=count("td,vd->tv", (T, D), (V, D)), ffn=float(L*(3 if gated else 2)*count("td,df->tf", (T, D), (D, F))),
                projections=L*projections, scores=np.int64(L*scores), values=L*values)


# Memory

def memory(**wrong):
    "The bytes of a step, some of them replaced"
    def step_memory(V, D, L, H, F, T, B):
        P, n = 2*V*D + L*(4*D*D + 3*D*F + 2*D) + D, B*T
        f = dict(parameters=lambda **a: 4*P, gradients=lambda **a: 4*P, optimizer=lambda **a: 8*P,
                 activations=lambda **a: 4*n*(L*(10*D + H*T + 4*F) + 3*D + V)) | wrong
        sizes = dict(V=V, D=D, L=L, H=H, F=F, T=T, B=B, n=n, P=P)
        return {k: g(**sizes) for k, g in f.items()}
    return step_memory


def kept(block=lambda D, H, T, F, **a: 10*D + H*T + 4*F, outer=lambda D, V, **a: 3*D + V, times=lambda n, **a: 4*n):
    return memory(activations=lambda L, **a: times(L=L, **a)*(L*block(**a) + outer(**a)))


def memory_by_library(V, D, L, H, F, T, B):
    c, how = config(V, D, L, H, H, F, True, T=T), dict(attention="explicit", logits=True)
    last = training_phases(c, B, **how)[-1]
    return {k: last[k] for k in ("parameters", "gradients", "optimizer")} | dict(activations=activation_bytes(c, B, **how))


# Time of a product

def time_of(seconds=lambda work, moved: max(work, moved), flops=lambda m, k, n: 2*m*k*n, numbers=lambda m, k, n: m*k + k*n + m*n, bound=None):
    def matmul_time(m, k, n, size, peak, bandwidth):
        work, moved = flops(m, k, n)/peak, size*numbers(m, k, n)/bandwidth
        return seconds(work, moved), (bound or (lambda work, moved: "arithmetic" if work >= moved else "memory"))(work, moved)
    return matmul_time


def time_by_ridge(m, k, n, size, peak, bandwidth):
    intensity = matmul_cost(m, k, n, {2: "bfloat16", 4: "float32"}[size]).intensity
    return [2*m*k*n/np.float64(min(peak, intensity*bandwidth)), "memory" if intensity < peak/bandwidth else "arithmetic"]


# Stopwatches

def watch(warm=True, n=None, blocks=None, take=min, before=True, after=True, seconds=1.5, rate=lambda s, flops: flops/s):
    "`n` calls at a time, or as many as take 50 ms; `blocks` of them, or as many as fit in `seconds`"
    def flop_rate(call, flops, clock, wait):
        def block(n):
            if before: wait()
            start = clock()
            for _ in range(n): call()
            if after: wait()
            return (clock() - start)/n
        if warm: call()
        many = n or 1
        while not n and block(many)*many < .05: many *= 2
        found, stop = [], clock() + seconds
        while len(found) < blocks if blocks else clock() < stop: found.append(block(many))
        return rate(take(found), flops)
    return flop_rate


def one_call_of_the_block(call, flops, clock, wait): # Divides the FLOPs of one call by the seconds of all
    many = round(.064*watch()(call, 1., clock, wait))
    wait()
    start = clock()
    for _ in range(many): call()
    wait()
    return flops/(clock() - start)


def slower_blocks(call, flops, clock, wait):
    "Another style: a fixed number of blocks, whose length comes from a first guess; the third of the sorted times"
    for _ in range(3): call()
    wait()
    n, start = 0, clock()
    while clock() - start < .03:
        call(); wait(); n += 1
    def one():
        begin = clock()
        for _ in range(n): call()
        wait()
        return (clock() - begin)/n
    return flops/sorted(one() for _ in range(80))[2]


def for_a_while(call, flops, clock, wait):
    "Calls until the clock says that a tenth of a second is over: right where a call takes its time"
    call(); wait()
    best, stop = 0, clock() + 2
    while clock() < stop:
        start, n = clock(), 0
        while clock() < start + .1:
            call()
            n += 1
        wait()
        best = max(best, n*flops/(clock() - start))
    return best


def own_clock(call, flops, clock, wait):
    import time
    start = time.perf_counter()
    call()
    wait()
    return flops/(time.perf_counter() - start)


def never_ends(call, flops, clock, wait):
    while True: call()


WRONG_ANSWERS = dict(
    formats=[
        (FORMATS | dict(next=257), "next: 257 needs 8 bits behind the leading one"), (FORMATS | dict(next=256.25), "is float16's"),
        (FORMATS | dict(largest=65535), "largest: 65,535 is the largest of 16 bits as a whole number"), (FORMATS | dict(largest=2**16), "where infinity would be"),
        (FORMATS | dict(largest=2**15), "the largest power of two"), (FORMATS | dict(largest=3.3895313892515355e38), "is bfloat16's"),
        (FORMATS | dict(bfloat16=3000), "as if nothing were lost"), (FORMATS | dict(bfloat16=128), "1 more is still exact"), (FORMATS | dict(bfloat16=512), "is too far"),
        (FORMATS | dict(bfloat16=257), "needs 8 bits"), (FORMATS | dict(float16=256), "is right for bfloat16"), (FORMATS | dict(float16=1024), "1 more is still exact"),
        (FORMATS | dict(wide=3000), "the spacing is 16 there"), (FORMATS | dict(wide=2992), "its last mantissa bit is 1"), (FORMATS | dict(wide=256), "a sum in bfloat16"),
        (FORMATS | dict(wide="3008"), "wide: '3008' is not a number"), (dict(next=258), "largest is missing"), (258, "expected a dict with the keys next, largest")],
    to_bfloat16=[
        (lambda bits: bits >> 16, "for 0x3f80c000 (1.005859375): expected 0x3f81 (1.0078125), got 0x3f80 (1.0)"), (lambda bits: bits >> 16, "the lower half is cut off, which rounds toward zero"),
        (pi_is_right(lambda bits: bits + 0x8000 >> 16), "expected 0x3f80 (1.0), got 0x3f81 (1.0078125): in the middle the last bit that stays decides: take the even one, not always the upper"),
        (lambda bits: bits + 0x7fff >> 16, "take the even one, not always the lower"), (rounded, "NaN must stay NaN"),
        (lambda bits: rounded(bits) & 0xffff, "for 0x7f800001 (nan): expected 0x7fc0 (nan), got 0x7f80 (inf): NaN must stay NaN: its ones are in the lower half"),
        (lambda bits: bits >> 16 if bits & 0x7fffffff > 0x7f800000 else rounded(bits), "its ones are in the lower half"),
        (lambda bits: rounded(bits) & 0xffff if bits != 0x7f800001 and bits != 0x7f80ffff else 0x7fff, "the carry ran through it"),
        (clipped, "half a step or more above the largest number is infinity"),
        (lambda bits: guarded(rounded)(bits & 0x7fffffff), "for 0xbf80c000 (-1.005859375): expected 0xbf81 (-1.0078125), got 0x3f81 (1.0078125): the sign is lost"),
        (lambda bits: (bits >> 16) + 1, "that is the next one, but the lower one is nearer"), (lambda bits: 0, "that is not one of the two neighbours"),
        (lambda bits: struct.unpack("<f", struct.pack("<I", bits & 0xffff0000))[0], "expected a whole number, the pattern, got 3.140625"),
        (lambda bits: guarded(rounded)(bits) << 16, "expected a pattern from 0 to 65535, got"), (lambda bits: None, "got None"),
        ("to_bfloat16", "expected a function, got 'to_bfloat16'"), (fails, "for 0x40490fdb (3.1415927410125732): your code raised RuntimeError")],
    einsum_flops=[
        (einsum(lambda size, a, b, out: math.prod(size.values())), "for 'mk,kn->mn', (3, 5), (5, 7): expected 210, got 105: each multiplication goes with an addition: the factor 2 is missing"),
        (einsum(lambda size, a, b, out: 2*product(size, out)), "got 42: what is summed over counts too"),
        (einsum(lambda size, a, b, out: 2*product(size, a)*product(size, b)), "letters of both operands count once"),
        (einsum(lambda size, a, b, out: 2*math.prod(size.values()) - product(size, out)), "counted with k additions"),
        (einsum(lambda size, a, b, out: product(size, a) + product(size, b) + product(size, out)), "the size of the operands and of the result"),
        (einsum(lambda size, a, b, out: 2*math.prod(n for c, n in size.items() if not (c in a and c in b and c in out))), "the batch is missing"),
        (lambda spec, a, b: 2*math.prod((dict(zip(spec.split("->")[0].replace(",", ""), a + b))).values()), "expected a ValueError, since k is 5 and 6, got 252"),
        (lambda spec, a, b: 2*a[0]*a[-1]*b[-1], "'btd,df->btf', (2, 3, 5), (5, 7): expected 420, got 140"),
        (einsum_if(lambda x, y, out: any(c in x and c not in out and x[c] != n for c, n in y.items())), "since b is 2 and 4"),
        (einsum_by_assert, "; expected a ValueError, since k is 5 and 6"),
        (einsum_if(lambda x, y, out: [*x] == ["m", "k"] and x["k"] != y["k"]), "for 'km,kn->mn', (5, 3), (6, 7): expected a ValueError"),
        (lambda spec, a, b: f"{spec}", "expected a number, got 'mk,kn->mn'"), (lambda spec, a, b: math.nan, "expected a number, got nan"),
        (lambda spec, *shapes: einsum(lambda size, *n: 2*math.prod(size.values()))(spec, shapes[0]), "your code raised TypeError"), (fails, "your code raised RuntimeError")],
    model_size=[
        (size_of(ffn=lambda D, F, gated: 2*D*F), "gated = True, tied = False: expected"), (size_of(ffn=lambda D, F, gated: 2*D*F), "the gated network has three matrices, not two"),
        (size_of(ffn=lambda D, F, gated: 3*D*F), "the network without a gate has two matrices, not three"),
        (size_of(table=lambda V, D, tied: V*D), "not tied: table and head are two matrices"), (size_of(table=lambda V, D, tied: 2*V*D), "tied: table and head are one matrix, which counts once"),
        (size_of(table=lambda V, D, tied: 0), "table and head are missing"), (size_of(attention=lambda D, H, G: 4*D*D), "keys and values have G heads, not H"),
        (size_of(attention=lambda D, H, G: D*D + 2*D*D*G//H), "the projection of the outputs is missing"), (size_of(norms=lambda D, L: 2*L*D), "the last norm is missing"),
        (size_of(norms=lambda D, L: 0), "the norms are missing"), (size_of(norms=lambda D, L: D), "the norms of the blocks are missing"), (size_of(norms=lambda D, L: (L + 1)*D), "a block has two norms"),
        (size_of(layers=lambda L: 1, norms=lambda D, L: 3*D), "that is one block, of L"), (lambda *a: 4*size_of()(*a), "that is bytes, in float32"),
        (size_of(norms=lambda D, L: D*D), "too large"), (lambda V, D, L, F, tied: 0, "your code raised TypeError"), (fails, "for V = 1000, D = 96, L = 5, H = 6, G = 2, F = 160, gated = True, tied = False: your code raised")],
    forward_parts=[
        (parts(projections=lambda T, L, D, G, K, **a: T*L*D*(2*D + 2*G*K)), "projections: expected 24,576,000, got 12,288,000: each multiplication goes with an addition"),
        (parts(projections=lambda T, L, D, **a: 8*T*L*D*D), "keys and values have G heads, not H"), (parts(projections=lambda T, L, D, G, K, **a: 2*T*L*D*(D + 2*G*K)), "the outputs are projected too"),
        (parts(projections=lambda T, L, D, G, K, **a: 2*T*L*D*(2*D + G*K)), "keys and values, two matrices"), (parts(projections=lambda T, D, G, K, **a: 4*T*D*(D + G*K)), "that is one layer, of L"),
        (parts(projections=lambda T, L, D, G, K, **a: 12*T*L*D*(D + G*K)), "with the backward pass"), (parts(scores=lambda L, H, T, D, **a: 2*L*H*T*T*D), "scores: expected 9,600,000, got 57,600,000: a head is D/H wide, not D"),
        (parts(scores=lambda L, T, K, **a: 2*L*T*T*K), "that is one head, of H"), (parts(scores=lambda L, H, T, K, **a: L*H*T*T*K), "not half of them, and each multiplication goes with an addition"),
        (parts(scores=lambda L, H, T, K, **a: L*H*T*(T + 1)*K), "not those of the causal mask"), (parts(scores=lambda L, G, T, K, **a: 2*L*G*T*T*K), "H query heads, also where G share"),
        (parts(scores=lambda L, H, T, K, **a: 2*L*H*T*K), "that is one token, of T"), (parts(values=lambda L, H, T, D, **a: 2*L*H*T*T*D), "values: expected"),
        (parts(ffn=lambda L, T, D, F, **a: 4*L*T*D*F), "ffn: expected 46,080,000"), (parts(ffn=lambda L, T, D, F, **a: 4*L*T*D*F), "the gated network has three matrices"),
        (parts(ffn=lambda L, T, D, F, **a: 6*L*T*D*F), "without a gate there are two matrices"), (parts(head=lambda T, D, V, **a: 4*T*D*V), "only the head is multiplied"),
        (parts(head=lambda T, D, V, L, **a: 2*T*D*V*L), "head: expected 19,200,000, got 96,000,000: the head occurs once"), (parts(head=lambda **a: 0), "the head is a product too"),
        (parts(head=lambda D, V, **a: 2*D*V), "that is one token, of T"), (parts(softmax=lambda **a: 0), "expected a dict with the keys projections, scores, values, ffn, head, got"),
        (lambda *a: sum(parts()(*a).values()), "got 109056000"), (fails, "your code raised RuntimeError")],
    shares=[
        (SHARES | dict(growth=16), "growth: 16 holds for all but attention"), (SHARES | dict(growth=256), "holds for scores and values alone"), (SHARES | dict(growth=25.4), "counts only the causal pairs"),
        (SHARES | dict(head_small=22.6), "head_small: 22.6 is its share of the parameters"), (SHARES | dict(head_small=.2128), "is a share of 1, not per cent"),
        (SHARES | dict(head_small=24.04), "forgets the third matrix"), (SHARES | dict(attention_small=13.6), "is the share of the scores alone"), (SHARES | dict(attention_large=37.8), "includes the projections"),
        (SHARES | dict(attention_large=3.93), "counts only the causal pairs"), (SHARES | dict(attention_long=62.6), "forgets the third matrix"), (SHARES | dict(attention_long=90), "attention_long: 90 is too large"),
        (SHARES | dict(head_long=.77), "'head_long' is not asked for"), ([1], "got [1]")],
    step_memory=[
        (memory(optimizer=lambda P, **a: 4*P), "AdamW keeps two running means for each parameter"), (memory(optimizer=lambda P, **a: 12*P), "there are no master weights"),
        (memory(optimizer=lambda P, **a: 2*P), "those are numbers"), (memory(gradients=lambda **a: 0), "gradients: expected"), (memory(gradients=lambda **a: 0), "each parameter has a gradient"),
        (memory(parameters=lambda P, **a: P), "those are numbers, a float32 has 4 bytes"), (memory(parameters=lambda P, **a: 2*P), "all is float32, of 4 bytes"),
        (kept(times=lambda n, **a: n), "activations: expected"), (kept(times=lambda n, **a: n), "those are numbers"), (kept(times=lambda T, **a: 4*T), "that is one sequence, of B"),
        (kept(lambda D, T, F, **a: 10*D + T + 4*F), "each head has probabilities of its own"), (kept(lambda D, H, T, F, **a: 10*D + H*T/2 + 4*F), "kept whole, also where they are masked"),
        (kept(lambda D, H, T, F, **a: 10*D + 2*H*T + 4*F), "the scores are not kept in addition to the probabilities"), (kept(lambda D, H, T, F, **a: 10*D + 4*F), "nothing is counted for probabilities"),
        (kept(lambda D, H, T, F, **a: 9*D + H*T + 4*F), "a row of D in each block is missing"), (kept(lambda D, H, T, F, **a: 8*D + H*T + 4*F, lambda D, V, **a: 2*D + V), "its input and the normalized row"),
        (kept(lambda D, H, T, F, **a: 10*D + H*T + 2*F), "a gated network keeps four rows of F"), (kept(lambda D, H, T, F, **a: 10*D + H*T), "nothing is counted for inside feed-forward"),
        (kept(lambda D, H, T, F, **a: 8*D + H*T + 4*F), "are three rows, and each norm keeps its input and the normalized row"), (kept(lambda D, H, T, F, **a: 6*D + H*T + 4*F), "nothing is counted for norms"),
        (kept(outer=lambda D, V, **a: 3*D + 2*V), "the logits are not kept"), (kept(outer=lambda D, V, **a: 3*D), "nothing is counted for loss"), (kept(outer=lambda D, V, **a: D + V), "nothing is counted for last norm"),
        (memory(activations=lambda n, D, H, T, F, V, **a: 4*n*(10*D + H*T + 4*F + 3*D + V)), "that is one block, of L"), (kept(times=lambda n, **a: 8*n), "too large"),
        (lambda *a: sum(memory()(*a).values()), "expected a dict with the keys parameters, gradients, optimizer, activations"), (fails, "your code raised RuntimeError")],
    fits=[
        (FITS | dict(batch=54), "batch: 54 counts 12 bytes for a parameter"), (FITS | dict(batch=56), "takes GiB for GB"), (FITS | dict(batch=52), "the first that does not fit"), (FITS | dict(batch=51.24), "batch: 51.24 is not a whole number"),
        (FITS | dict(batch=65), "counts activations only"), (FITS | dict(batch=68), "forgets the third matrix"), (FITS | dict(batch=57), "leaves out the probabilities"),
        (FITS | dict(largest=141), "largest: 141 counts the weights alone"), (FITS | dict(largest=47), "counts 12 bytes"), (FITS | dict(largest=8.8125), "is for one card, of four"),
        (FITS | dict(largest=37.85), "takes GiB for GB"), (FITS | dict(largest=35.25e9), "is not in billions"), (FITS | dict(mixed=70.5), "mixed: 70.5 takes 2 bytes for every number"),
        (FITS | dict(mixed=47), "forgets the float32 copy of the weights"), (FITS | dict(mixed=40.3), "forgets the gradients"), (FITS | dict(mixed=True), "mixed: True is not a number"), (None, "got None")],
    run=[
        (RUN | dict(adamw=16), "adamw: 16 corrects both means"), (RUN | dict(adamw=12), "forgets the decay"), (RUN | dict(adamw=15), "works out αλ again"), (RUN | dict(adamw=13), "the square, or the root?"),
        (RUN | dict(step=3.106), "step: 3.106 is the forward pass alone"), (RUN | dict(step=6.21), "is the backward pass alone"), (RUN | dict(step=8.46), "is 6ND with all parameters"),
        (RUN | dict(step=8.05), "is 6ND with the matrices"), (RUN | dict(step=8.69), "counts only the causal pairs"), (RUN | dict(step=9.318e15), "is in FLOPs, not PFLOPs"), (RUN | dict(step=4.66), "one FLOP for a multiplication"),
        (RUN | dict(days=27.25), "days: 27.25 is for one card"), (RUN | dict(days=1.703), "the peak for sparse matrices"), (RUN | dict(days=1.362), "leaves out the MFU"), (RUN | dict(days=50.3), "the peak of float32"),
        (RUN | dict(days=.545), "multiplies with the MFU"), (RUN | dict(days=81.75), "is in hours"), (RUN | dict(rule=5.8), "rule: 5.8 is the forward pass alone"), (RUN | dict(rule=8.69), "the peak for sparse matrices"),
        (RUN | dict(rule=278.2), "the peak of float32"), (RUN | dict(rule=100), "rule: 100 is too large"), ({}, "adamw is missing")],
    matmul_time=[
        (time_of(lambda work, moved: work + moved), "the longer one counts, not the sum"), (time_of(min), "that is the time of the arithmetic, but the memory takes longer"),
        (time_of(lambda work, moved: work), "but the memory takes longer"), (time_of(lambda work, moved: moved), "that is the time of the memory, but the arithmetic takes longer"),
        (time_of(flops=lambda m, k, n: m*k*n), "each multiplication goes with an addition"), (time_of(numbers=lambda m, k, n: m*k + k*n), "the result is written too"),
        (time_of(numbers=lambda m, k, n: m*n), "the operands are read too"), (lambda m, k, n, size, *a: time_of()(m, k, n, 1, *a), "each has size bytes"),
        (time_of(bound=lambda work, moved: "memory"), "the time is right, but the bound is arithmetic (1.37e+03 FLOPs per byte, the ridge is at 295), got 'memory'"),
        (time_of(bound=lambda work, moved: "memory" if work > moved else "arithmetic"), "for m = 8, k = 64, n = 4096, size = 2, peak = 9.895e+14, bandwidth = 3.35e+12: the time is right, but the bound is memory"),
        (time_of(bound=lambda work, moved: "arithmetic" if work > moved else "memory"), "the bound is arithmetic (both take equally long), got 'memory'"),
        (time_of(bound=lambda work, moved: "compute"), "got 'compute'"), (lambda *a: time_of()(*a)[0], "expected (seconds, bound), got 1.7"),
        (lambda *a: time_of()(*a)[::-1], "expected a number, got 'memory'"), (time_of(lambda work, moved: 1e6*max(work, moved)), "too large"), (fails, "your code raised RuntimeError")],
    crossover=[
        (CROSSOVER | dict(square=207), "square: 207 is the ridge itself"), (CROSSOVER | dict(square=618), "is the last that waits"), (CROSSOVER | dict(square=619.09), "is not a whole number"), (CROSSOVER | dict(square=413), "leaves out the result"), (CROSSOVER | dict(square=310), "a bfloat16 has 2"),
        (CROSSOVER | dict(square=1237), "one FLOP for a multiplication"), (CROSSOVER | dict(float32=1237), "takes the peak of bfloat16"), (CROSSOVER | dict(float32=42), "takes 2 bytes for a number"),
        (CROSSOVER | dict(float32=619), "takes the peak of TF32"), (CROSSOVER | dict(rows=207), "rows: 207 counts the matrix alone"), (CROSSOVER | dict(rows=109), "a bfloat16 has 2"), (CROSSOVER | dict(rows=619), "right for square matrices"),
        (CROSSOVER | dict(one=.0339), "is the time of the arithmetic, but the bound is memory"), (CROSSOVER | dict(one=6.99e-6), "is in seconds"), (CROSSOVER | dict(one=6.99e-3), "is in milliseconds"), (CROSSOVER | dict(one=14), "takes 4 bytes"),
        (CROSSOVER | dict(one=3.5), "counts numbers, not bytes"), (dict(square=619), "float32 is missing")],
    flop_rate=[
        (watch(warm=False, n=1, blocks=1), "on a machine where a call takes 2.00 ms, and the first call takes half a second longer: expected 134 GFLOP/s, got 535 MFLOP/s: the first call is no measurement"),
        (watch(warm=False, n=1, blocks=20, take=statistics.fmean), "make it before the clock starts"),
        (watch(n=1, blocks=1), "take the best of several measurements"), (watch(n=1, seconds=1, take=statistics.fmean), "not a mean"), (watch(seconds=.2), "over more than a second"),
        (watch(blocks=40, take=statistics.median), "take the best of several measurements"),
        (watch(n=1), "on a machine where a call takes 37.0 µs, and the clock ticks every millisecond: the clock said 0 s for what took longer: time many calls together"), (watch(n=100), "so that they take many ticks"),
        (watch(before=False, after=False), "and the work goes on after the call: expected 268 GFLOP/s"), (watch(before=False, after=False), "wait before the clock is read, both times"),
        (watch(n=3000, blocks=12), "your code raised TimeoutError('the ten seconds are over')"), (for_a_while, "and the work goes on after the call: your code raised TimeoutError('the ten seconds are over'): call() returns at once, so a loop that asks only the clock starts too much work: wait within it"),
        (watch(rate=lambda s, flops: s), "that is the time of a call, not FLOPs by time"), (watch(rate=lambda s, flops: 1/s), "that is calls per second"),
        (one_call_of_the_block, "and nothing disturbs it: expected 134 GFLOP/s, got 4.19 GFLOP/s: are these the FLOPs of all calls"),
        (watch(rate=lambda s, flops: s/flops), "that is seconds by FLOPs"), (watch(rate=lambda s, flops: None), "expected a rate in FLOP/s, got None"), (watch(rate=lambda s, flops: math.inf), "got inf"),
        (own_clock, "the clock was never read"), (lambda call, flops, clock, wait: flops/(clock() + 1), "nothing was called"),
        (never_ends, "the clock was never read"), (fails, "your code raised RuntimeError")])
WRONG = [(task, *entry) for task, entries in WRONG_ANSWERS.items() for entry in entries]

RIGHT_ANSWERS = dict(
    formats=[FORMATS, {k: np.float64(v) for k, v in reversed(FORMATS.items())}],
    to_bfloat16=[by_torch, by_distance, guarded(rounded)],
    einsum_flops=[einsum(lambda size, *names: 2*math.prod(size.values())), einsum_by_counter, einsum_by_loops],
    model_size=[size_of(), size_by_library, lambda *sizes: np.array(size_of()(*sizes))],
    forward_parts=[parts(), parts_by_library, parts_by_einsum],
    shares=[SHARES, {k: round(v, 1) for k, v in SHARES.items()}],
    step_memory=[memory(), memory_by_library, kept(lambda D, H, T, F, **a: 10*D + 2 + H*T + 4*F, lambda D, V, **a: 3*D + 1 + V + 4)],
    fits=[FITS, dict(mixed=35.2, largest=np.float32(35.3), batch=51)],
    run=[RUN, dict(adamw=14., step=9.3, days=3.4, rule=17.4)],
    matmul_time=[time_of(), time_by_ridge],
    crossover=[CROSSOVER, {k: float(v) for k, v in CROSSOVER.items()}],
    flop_rate=[watch(), watch(take=lambda s: statistics.quantiles(s, n=20)[0]), slower_blocks])
RIGHT = [(task, answer) for task, answers in RIGHT_ANSWERS.items() for answer in answers]

graders = Graders(ex, WRONG, RIGHT)
test_wrong_answers, test_right_answers, test_each_grader, test_same_words = graders.tests()


@pytest.mark.parametrize("task", ["to_bfloat16", "einsum_flops", "model_size", "forward_parts", "step_memory", "matmul_time", "flop_rate"])
def test_what_the_students_code_raises_is_kept(task): graders.stops(task)


def test_rounding_is_torchs():
    rng = random.Random(1)
    patterns = [rng.randrange(2**32) for _ in range(20_000)] + [high << 16 | low for high in rng.sample(range(2**16), 2000) for low in (0, 1, 0x7fff, 0x8000, 0x8001, 0xffff)]
    for bits in patterns:
        mine, theirs = ex._rounded(bits), by_torch(bits)
        assert mine == theirs or mine & theirs & 0x7fff > 0x7f80, hex(bits)


def test_sums_end_where_torchs_do():
    for name in ("bfloat16", "float16"):
        total = torch.zeros((), dtype=getattr(torch, name))
        for _ in range(3000): total += 1
        assert total == ex._count_up(name, 3000)


def test_einsums_are_what_torch_counts():
    for spec, a, b in ex._einsums(): # Torch sums with its counter on even where nothing but a sum is left
        B, m, n, k = ex._einsum_groups(spec, a, b)
        assert 2*B*m*n*k == einsum_by_counter(spec, a, b) and np.einsum(spec, np.ones(a), np.ones(b)).size == B*m*n


def test_the_batch_of_the_exercise_is_near_the_librarys():
    fixed, each = 16*count_parameters(ex._FITS).unique, activation_bytes(ex._FITS, 1, attention="explicit", logits=True)
    assert fixed + 51*each <= 80e9 < fixed + 52*each
    assert largest_batch(ex._FITS, 80*10**9, attention="explicit", logits=True) == 50               # No gradients at its peak, but room to work


@pytest.mark.parametrize("name", ex._MACHINES)
def test_machines_keep_their_own_time(name):
    habits, _ = ex._MACHINES[name]
    call, clock, wait, now = ex._machine(**habits)
    for _ in range(400): call()
    wait()
    work = 400*habits["call_s"]
    assert work + habits.get("first_s", 0) <= now["done"]*(1 + 1e-9) <= 1.4*work + habits.get("first_s", 0) + 1 and now["calls"] == 400
    assert abs(clock() - now["s"]) <= habits.get("tick_s", 0) + 1e-6
