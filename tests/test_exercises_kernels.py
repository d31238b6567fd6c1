"Graders of chapter 09's exercises: what each refuses, in which words, and that other right answers pass."
import math
from collections import Counter, defaultdict
from functools import partial
from itertools import product

import numpy as np
from graders import Graders, spoiled

from lmcourse.exercises import kernels as ex

up = lambda a, b: -(-a//b)
inf = math.inf


# 1. Sectors

def sectors(a, s, first=lambda x: x//32, last=lambda x, s: (x + s - 1)//32, distinct=set): return len(distinct(k for x in a for k in range(first(x), last(x, s) + 1)))


def sectors_by_bytes(a, s): return len({(x + b)//32 for x in a for b in range(s)})


SECTORS = [(partial(sectors, distinct=list), "counts once"), (lambda a, s: len({x//32 for x in a}), "last byte"), (lambda a, s: up(len(a)*s, 32), "bytes asked for"),
           (lambda a, s: (max(a) + s - 1)//32 - min(a)//32 + 1 if a else 0, "not all between"), (partial(sectors, last=lambda x, s: (x + s)//32), "expected"),
           (lambda a, s: len({x//128 for x in a}), "expected"), (lambda a, s: sectors(a, 4), "expected"), (lambda a, s: sectors(a, s) or 1, "for a = [], s = 4: expected 0, got 1"),
           (lambda a, s: a.clear() or 0, "changed its")]


# 2. Banks

def rounds(w, bank=lambda x: x % 32, of=set): return max(Counter(map(bank, of(w))).values(), default=0)


def rounds_step_by_step(w):
    n, left = 0, set(w)
    while left:
        taken, n = set(), n + 1
        for x in sorted(left):
            if x % 32 not in taken: taken.add(x % 32); left.discard(x)
    return n


BANKS = [(partial(rounds, of=list), "served together"), (lambda w: len(set(w)), "don't queue"), (partial(rounds, bank=lambda x: x//32), "neighbouring"),
         (lambda w: len({x % 32 for x in w}), "number of banks"), (partial(rounds, bank=lambda x: x % 16), "expected"), (partial(rounds, bank=lambda x: x % 33), "expected"),
         (lambda w: rounds(w) or 1, "got 1"), (lambda w: rounds(w) - 1, "expected"), (lambda w: w.sort() or w.append(0) or 1, "changed its")]


# 3. Blocks

def blocks(t, r, s, grain=256, most=32, system=1024, use=min, warps=64, registers=65_536, size=164*1024, near=128, warp=up, parts=4):
    n, each = warp(t, 32) or 1, up(r*32, grain)*grain
    return use((warps//n, most, registers//parts//each*parts//n, size//(max(1, up(s + system, near)*near))))


def blocks_of_threads(t, r, s): return min(blocks(t, r, s, warps=10**6), 2048//t)


def blocks_by_trying(t, r, s):
    n, warps, each = 0, up(t, 32), up(r*32, 256)*256
    while n < 32 and (n + 1)*warps <= min(64, 4*(16_384//each)) and (n + 1)*up(s + 1024, 128)*128 <= 164*1024: n += 1
    return n


BLOCKS = [(blocks_of_threads, "whole warps"), (partial(blocks, system=0), "1 KiB"), (partial(blocks, most=99), "32 blocks"), (partial(blocks, grain=1), "multiples of 256"), (partial(blocks, parts=1), "four partitions"),
          (partial(blocks, near=1), "multiples of 128"), (partial(blocks, use=max), "scarcest"),
          (lambda *a: blocks(*a)*up(a[0], 32), "number of warps"), (lambda *a: blocks(*a)*up(a[0], 32)/64, "occupancy"), (partial(blocks, warps=48), "expected"),
          (partial(blocks, size=100*1024), "expected"), (partial(blocks, warp=lambda a, b: a//b), "expected"), (lambda *a: max(1, blocks(*a)), "expected 0, got 1"),
          (partial(blocks, system=1000), "1,024 bytes"), (partial(blocks, size=164_000), "expected 32, got 31"),
          (partial(blocks, system=1000, size=164_000), "expected 32, got 31"), (lambda t, r, s: min(blocks(t, r, 0), 164*1024//(up(s, 128)*128 + 1000)), "for t = 32, r = 16, s = 4872: expected 27, got 28: a KiB has 1,024 bytes")]


# 4. Idle multiprocessors

def idle(m, n, r, c, s):
    tiles = up(m, r)*up(n, c)
    return (up(tiles, s)*s*r*c - m*n)/(up(tiles, s)*s*r*c)


def idle_in_floats(m, n, r, c, s): return 1. - m*n/(math.ceil(math.ceil(m/r)*math.ceil(n/c)/s)*s*r*c)


def tiles_idle(m, n, r, c, s): return 1 - up(m, r)*up(n, c)/(up(up(m, r)*up(n, c), s)*s)


IDLE = [(lambda *a: 1 - idle(*a), "useful share"), (lambda *a: 100*idle(*a), "per cent"), (lambda m, n, r, c, s: 1 - m*n/(up(m, r)*up(n, c)*r*c), "last wave"),
        (lambda m, n, r, c, s: 1 - m*n/(up(m*n/(r*c), s)*s*r*c), "computed whole"), (tiles_idle, "expected"), (lambda m, n, r, c, s: idle(m, n, c, r, s), "expected"),
        (lambda *a: round(idle(*a), 2), "expected"), (lambda *a: 0., "expected"), (lambda m, n, r, c, s: idle(m, n, r, c, 108), "expected")]


# 5. Bytes of a product

def moved(m, n, k, bm, bn, s, a=None, b=None, out=1): return s*(m*k*(up(n, bn) if a is None else a(m, bm)) + k*n*(up(m, bm) if b is None else b(n, bn)) + out*m*n)


def moved_tile_by_tile(m, n, k, bm, bn, s):
    return sum(s*(min(bm, m - i)*k + min(bn, n - j)*k + min(bm, m - i)*min(bn, n - j)) for i, j in product(range(0, m, bm), range(0, n, bn)))


MOVED = [(partial(moved, out=0), "stored too"), (lambda m, n, k, bm, bn, s: moved(m, n, k, bm, bn, 1), "not bytes"), (partial(moved, a=up, b=up), "once for each column"),
         (lambda m, n, k, bm, bn, s: s*(up(m, bm)*up(n, bn)*(bm + bn)*k + m*n), "masked"), (lambda m, n, k, bm, bn, s: s*(m*k + k*n + m*n), "strips again"),
         (lambda m, n, k, bm, bn, s: s*(2*m*n*k + m*n), "shares"), (lambda m, n, k, bm, bn, s: s*(m*k*(n//bn) + k*n*(m//bm) + m*n), "expected"), (partial(moved, out=2), "expected"),
         (lambda m, n, k, bm, bn, s: moved(m, n, k, bn, bm, s), "expected")]


# 6. Order

def order(r, c, g): return [(i, j) for f in range(0, r, g) for j in range(c) for i in range(f, min(r, f + g))]


def order_by_sorting(r, c, g): return sorted(product(range(r), range(c)), key=lambda t: (t[0]//g, t[1], t[0]))


ORDER = [(lambda r, c, g: list(product(range(r), range(c))), "row after row"), (lambda r, c, g: [(i, j) for j in range(c) for i in range(r)], "column after column"),
         (lambda r, c, g: [(i, j) for f in range(0, r, g) for i in range(f, min(r, f + g)) for j in range(c)], "row after row"),
         (lambda r, c, g: [(i, j) for f in range(0, r, g) for j in range(c) for i in range(f, f + g)], "may be lower"),
         (lambda r, c, g: [(p//(g*c)*g + p % g, p % (g*c)//g) for p in range(r*c)], "may have fewer rows"),
         (lambda r, c, g: [(i, j) for f in range(0, c, g) for i in range(r) for j in range(f, min(c, f + g))], "not columns"),
         (lambda r, c, g: [(j, i) for i, j in order(r, c, g)], "(row, column)"), (lambda r, c, g: order(r, c, g)[::-1], "expected"), (lambda r, c, g: set(order(r, c, g)), "expected"),
         (lambda r, c, g: order(r, c, g)[:-1], "expected")]


# 7. Running softmax

def update(m, s, z, convert=lambda m, h: math.exp(m - h), high=lambda m, z: max(m, *z), empty=True):
    h = high(m, z)
    if h == -inf and empty: return m, s
    return h, s*convert(m, h) + sum(math.exp(x - h) for x in z)


def update_one_by_one(m, s, z):
    for x in z:
        if x == -inf: continue
        m, s = (x, s*math.exp(m - x) + 1) if x > m else (m, s + math.exp(x - m))
    return float(m), float(s)


def update_where_it_is(m, s, z): return (update(m, s, z)[0], s)


UPDATE = [(partial(update, convert=lambda m, h: 1.), "convert the old sum"), (partial(update, high=lambda m, z: max(z)), "expected"), (partial(update, convert=lambda m, h: 0.), "expected"),
          (partial(update, empty=False), "expected"), (partial(update, convert=lambda m, h: math.exp(h - m) if m > -inf else 0.), "by exp(old - new)"), (update_where_it_is, "expected"),
          (lambda m, s, z: update(m, s, z)[::-1], "expected"), (lambda m, s, z: update(m, s, z)[0], "expected"),
          (lambda m, s, z: (0., s + sum(map(math.exp, z))), "expected"), (lambda m, s, z: (m, s + sum(math.exp(min(700, x - m)) if m > -inf else 1. for x in z)), "may rise"),
          (lambda m, s, z: update(m, s, [x for x in z if x > -inf] or [0.]), "expected"),
          (lambda m, s, z: update(m, s, z) if max(m, *z) > -inf else (-1e9, 0.), "expected (-inf, 0.0), got (-1000000000.0, 0.0)")]


# 8. Tiles

def tile(shared, depth, size, stages, strips=2, most=256, least=16):
    return max((t for t in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024) if least <= t <= most and strips*t*depth*size*stages <= shared), default=None)


def tile_by_halving(shared, depth, size, stages):
    t = 256
    while t >= 16:
        if 2*t*depth*size*stages <= shared: return t
        t //= 2


TILE = [(partial(tile, strips=1), "two strips"), (lambda s, *a: tile(s - 1, *a), "exactly"), (partial(tile, most=1024), "256 is the most"), (lambda s, d, z, n: tile(s, d, z, 1), "stage"),
        (lambda s, d, z, n: tile(s, d, 1, n), "size bytes"), (partial(tile, least=1), "below 16"), (lambda s, d, z, n: tile(s, 1, z, n), "depth"), (lambda *a: tile(*a) or 0, "expected None, got 0"),
        (lambda s, d, z, n: min(256, s//(2*d*z*n)) if tile(s, d, z, n) else None, "expected"), (partial(tile, most=128), "expected"), (lambda *a: 16 if tile(*a) else None, "expected")]


# 9. Races

def races(a): return sorted({x for p, k, x in a if k == "store" and any(q != p and y == x for q, _, y in a)})


def races_by_address(a):
    users, stored = defaultdict(set), set()
    for p, k, x in a:
        users[x].add(p)
        if k == "store": stored.add(x)
    return sorted(x for x in stored if len(users[x]) > 1)


def races_in_pairs(a):
    found = []
    for p, k, x in a:
        for q, j, y in a:
            if p != q and x == y and "store" in (k, j) and x not in found: found.append(x)
    return sorted(found)


RACES = [(lambda a: sorted({x for p, k, x in a if k == "store" and any(q != p and y == x and j == "store" for q, j, y in a)}), "load are a race"),
         (lambda a: sorted({x for p, _, x in a if any(q != p and y == x for q, _, y in a)}), "are no race"),
         (lambda a: sorted({x for n, (p, k, x) in enumerate(a) if k == "store" and any(y == x for m, (*_, y) in enumerate(a) if m != n)}), "its own numbers"),
         (lambda a: sorted({x for n, (p, k, x) in enumerate(a) if k == "store" and any(q != p and y == x for q, _, y in a[n + 1:])}), "any order"),
         (lambda a: sorted(x for p, k, x in a if k == "store" and any(q != p and y == x for q, _, y in a)), "once"), (lambda a: set(races(a)), "expected"), (lambda a: races(a)[::-1], "expected"),
         (lambda a: sorted({x for _, k, x in a if k == "store"}), "expected"), (lambda a: bool(races(a)), "expected"), (lambda a: [], "expected")]


# 10. Bytes of flash attention

def flash(T, K, bq, bk, s, q=1, kv=2, causal=True, cut=True):
    keys = sum(min(bk, T - f) if cut else bk for b in range(up(T, bq)) for f in range(0, min(T, (b + 1)*bq) if causal else T, bk))
    return s*K*(q*T + kv*keys)


def flash_by_formula(T, K, bq, bk, s): return s*K*(T + 2*sum(min(T, up(min(T, end), bk)*bk) for end in range(bq, T + bq, bq)))


FLASH = [(partial(flash, q=0), "queries are loaded"), (partial(flash, kv=1), "both loaded"), (partial(flash, causal=False), "not loaded"), (partial(flash, cut=False), "masked"),
         (lambda T, K, q, k, s: flash(T, K, q, k, 1), "not bytes"), (lambda T, K, q, k, s: 3*T*K*s, "each number once"), (lambda T, K, q, k, s: flash(T, 1, q, k, s), "not their K numbers"),
         (partial(flash, q=2), "expected"), (lambda T, K, q, k, s: flash(T, K, k, q, s), "expected"), (lambda T, K, q, k, s: s*K*(T + T*(T + 1)), "expected")]


# 11. Tiles of experts

def experts(counts, rows):
    starts = [sum(counts[:e]) for e in range(len(counts))]
    return [(e, a + f, a + min(f + rows, n)) for e, (a, n) in enumerate(zip(starts, counts)) for f in range(0, n, rows)]


def experts_token_by_token(counts, rows):
    tiles = []
    owners = [e for e, n in enumerate(counts) for _ in range(n)]
    for t, e in enumerate(owners):
        if tiles and tiles[-1][0] == e and tiles[-1][2] - tiles[-1][1] < rows: tiles[-1] = (e, tiles[-1][1], t + 1)
        else: tiles.append((e, t, t + 1))
    return tiles


EXPERTS = [(lambda c, r: [(e, f, f + r) for e, f, _ in experts(c, r)], "ends where"), (lambda c, r: [(e, f - sum(c[:e]), t - sum(c[:e])) for e, f, t in experts(c, r)], "among all"),
           (lambda c, r: [(e, sum(c[:e]), sum(c[:e + 1])) for e, n in enumerate(c) if n], "several tiles"), (lambda c, r: [(e, f, sum(c[:e + 1])) for e, f, _ in experts(c, r)], "end of the tile"),
           (lambda c, r: [t[:2] for t in experts(c, r)], "lacks the end"), (lambda c, r: sorted(experts(c, r) + [(e, sum(c[:e]), sum(c[:e])) for e, n in enumerate(c) if not n]), "has no tile"),
           (lambda c, r: [(0, f, min(f + r, sum(c))) for f in range(0, sum(c), r)], "expected"), (lambda c, r: experts(c, r)[::-1], "expected"), (lambda c, r: len(experts(c, r)), "expected"),
           (lambda c, r: [(e, f, t - 1) for e, f, t in experts(c, r)], "expected")]


# 12. Parts of an attention

def join(parts, shift=lambda m, high: math.exp(m - high), sums=True, mixtures=True):
    high = max(m for m, *_ in parts)
    shares = [shift(m, high) if m > -inf else 0. for m, *_ in parts]
    return (sum((w if mixtures else 1)*y for w, (*_, y) in zip(shares, parts)))/sum((w if sums else 1)*s for w, (_, s, _) in zip(shares, parts))


def join_two_by_two(parts):
    (m, s, y), *more = [p for p in parts if p[1]]
    for n, t, z in more:
        if n > m: (m, s, y), (n, t, z) = (n, t, z), (m, s, y)
        s, y = s + t*math.exp(n - m), y + z*math.exp(n - m)
    return y/s


JOIN = [(partial(join, sums=False, mixtures=False), "to one maximum"), (partial(join, sums=False), "the totals too"), (partial(join, mixtures=False), "the mixtures too"),
        (lambda p: join(p)*sum(s*math.exp(m - max(n for n, *_ in p)) for m, s, _ in p), "divide by the total"), (lambda p: sum(y/s for _, s, y in p if s)/sum(1 for _, s, _ in p if s), "by its share"),
        (partial(join, shift=lambda m, high: math.exp(min(700, high - m))), "exp(maximum - highest)"), (lambda p: sum(y/s for _, s, y in p if s)/len(p), "expected"),
        (lambda p: sum(math.exp(m)*y for m, _, y in p)/sum(math.exp(m)*s for m, s, _ in p), "OverflowError"), (lambda p: 1/join(p), "expected"), (lambda p: p[0][2]/p[0][1], "expected"),
        (lambda p: max(p)[2]/max(p)[1], "expected")]


TASKS = {"count_sectors": (SECTORS, sectors, sectors_by_bytes), "rounds": (BANKS, rounds, rounds_step_by_step), "blocks_per_sm": (BLOCKS, blocks, blocks_by_trying),
         "idle_share": (IDLE, idle, idle_in_floats), "product_bytes": (MOVED, moved, moved_tile_by_tile), "tile_order": (ORDER, order, order_by_sorting),
         "update": (UPDATE, update, update_one_by_one), "best_tile": (TILE, tile, tile_by_halving), "races": (RACES, races_by_address, races_in_pairs),
         "flash_loads": (FLASH, flash, flash_by_formula), "expert_tiles": (EXPERTS, experts, experts_token_by_token),
         "join": (JOIN, join, join_two_by_two)}
graders = Graders(ex, [(task, *pair) for task, (wrong, right, _) in TASKS.items() for pair in wrong + spoiled(right)],
                  [(task, f) for task, (_, *right) in TASKS.items() for f in right]
                  # Types that differ without harm
                  + [("product_bytes", lambda *a: np.float64(moved(*a))), ("tile_order", lambda *a: np.array(order(*a))), ("update", lambda *a: list(update(*a))),
                     ("races", lambda a: tuple(races(a))), ("flash_loads", lambda *a: float(flash(*a))), ("expert_tiles", lambda *a: [list(t) for t in experts(*a)])])
test_wrong_answers, test_right_answers, test_each_grader, test_same_words = graders.tests(least_wrong=10)


def test_what_the_code_raises_is_kept_and_a_stop_passes():
    for task in graders.tasks: graders.stops(task)
