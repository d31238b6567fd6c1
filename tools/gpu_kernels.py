"""The steps of tools/gpu.py that time the kernels of chapter 09: as they are called, and alone with other tiles and numbers of warps."""
from itertools import product

import torch
from triton import OutOfResources
from triton.testing import do_bench_cudagraph
from lmcourse.accounting.hardware import best_seconds
from lmcourse.kernels import flash, grouped, matmul, rows
from lmcourse.kernels.use import SIZES, SMALL, check_agreement, event_seconds, kernel_costs, kernel_tasks


def kernels(toy):
    "Our kernels and torch's functions on the same arrays: seconds of each call, least bytes and operations of the task"
    sizes, found, faults = SMALL if toy else SIZES, {}, []
    costs = kernel_costs(sizes)
    for task, calls in kernel_tasks(sizes, "cpu" if toy else "cuda", torch.float32 if toy else torch.bfloat16).items():
        with torch.no_grad():
            try: check_agreement(task, calls)
            except AssertionError as e: faults.append(str(e)[:500])
            seconds = best_seconds(calls, .02) if toy else {who: event_seconds(f, .1) for who, f in calls.items()}
            found[task] = dict(seconds=seconds, bytes=costs[task].bytes, flops=costs[task].flops)
    return dict(found=found) | (dict(fault="\n".join(faults)) if faults else {})


def alone(call, toy):
    "Median in a CUDA graph of many calls, where nothing waits for the processor; `None` for a kernel that doesn't fit"
    if toy: return best_seconds(dict(call=call), .02)["call"]
    try: return do_bench_cudagraph(call, rep=60, return_mode="median")/1e3
    except OutOfResources: return None


def launches(toy):
    "Each kernel alone, by block and number of warps; seconds"
    R, N, V, T, H, K, n, _, E = (SMALL if toy else SIZES).values()
    device, dtype = ("cpu", torch.float32) if toy else ("cuda", torch.bfloat16)
    def draw(*shape): return torch.randn(*shape, device=device).to(dtype)
    def by(blocks, warps, launch): # Launches take the block and the number of warps
        return {f"{block}, {w} warps": alone(lambda: launch(block, num_warps=w), toy) for block, w in product(blocks[:1] if toy else blocks, warps)}
    return dict(rows=row_launches(by, draw, R, N, V, toy), attention=flash_launches(by, draw, T, H, K, toy), products=product_launches(by, draw, n, T, E, N, toy))


def row_launches(by, draw, R, N, V, toy):
    x, dy, gain, z, block = draw(R, N), draw(R, N), draw(N), draw(R, V), 1 << (N - 1).bit_length()
    out, wide, grads = torch.empty_like(x), x.new_empty(R, dtype=torch.float32), torch.empty_like(z)
    targets, scale = torch.randint(V, (R,), device=x.device), wide.clone()
    shares = {P: x.new_empty(P, N, dtype=torch.float32) for P in (264, 528, 1056)}
    return {"softmax": by([block], (4, 8), lambda b, **w: rows.softmax_kernel[(R,)](x, out, N, BLOCK=b, **w)) |
                       dict(torch=alone(lambda: x.softmax(-1), toy)),
            "rmsnorm": by([block], (4, 8), lambda b, **w: rows.rmsnorm_kernel[(R,)](x, gain, out, wide, N, 1e-5, BLOCK=b, **w)) |
                       dict(torch=alone(lambda: torch.nn.functional.rms_norm(x, (N,), gain, 1e-5), toy)),
            "rmsnorm backward, by programs": by(list(shares), (4, 8), lambda P, **w: rows.rmsnorm_backward_kernel[(P,)](
                dy, x, gain, wide, out, shares[P], R, N, BLOCK=block, **w)),
            "cross-entropy": by((4096, 1024, 8192, 32768), (4, 8), lambda b, **w: rows.cross_entropy_kernel[(R,)](
                z, targets, wide, scale, V, -100, BLOCK=b, **w)),
            "cross-entropy backward": by((4096, 1024, 2048), (4,), lambda b, **w: rows.cross_entropy_backward_kernel[(R, -(-V//b))](
                z, targets, scale, wide, grads, V, -100, BLOCK=b, **w)),
            "swiglu": by((1024, 2048), (4,), lambda b, **w: rows.swiglu_kernel[(-(-x.numel()//b),)](x, dy, out, x.numel(), BLOCK=b, **w))}


def flash_launches(by, draw, T, H, K, toy):
    q, k, v, dout = (draw(1, H, T, K) for _ in range(4))
    out, dq, dk, dv = (torch.empty_like(q) for _ in range(4))
    logsums, deltas = (q.new_zeros(1, H, T, dtype=torch.float32) for _ in range(2))
    def how(b): return T, T, H, H, K**-.5, 0, K, True, *b, max(16, K), toy
    tiles = [(16, 16)] if toy else [(64, 64), (128, 64), (64, 128), (128, 128)]
    return {"forward": by(tiles, (4, 8), lambda b, **w: flash.flash_kernel[(-(-T//b[0]), H)](q, k, v, out, logsums, *how(b), **w)) |
                       dict(torch=alone(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), toy)),
            "backward, queries": by(tiles[:2], (4, 8), lambda b, **w: flash.flash_dq_kernel[(-(-T//b[0]), H)](
                q, k, v, dout, logsums, deltas, dq, *how(b), **w)),
            "backward, keys and values": by(tiles[:2], (4, 8), lambda b, **w: flash.flash_dkv_kernel[(-(-T//b[1]), H)](
                q, k, v, dout, logsums, deltas, dk, dv, *how(b), **w))}


def product_launches(by, draw, n, T, E, N, toy):
    a, b, x, w = draw(n, n), draw(n, n), draw(T, N), draw(E, N, N)
    out, y, wide = torch.empty_like(a), torch.empty_like(x), toy
    tiles = [(16, 16, 16)] if toy else [(128, 256, 64), (256, 128, 64), (128, 128, 64), (128, 128, 32)]
    lists = {t: torch.tensor(grouped.expert_tiles([T*e//E for e in range(E + 1)], t[0]), dtype=torch.int32, device=x.device).T.contiguous() for t in tiles}
    return {"matmul": by(tiles, (4, 8), lambda t, **w_: matmul.matmul_kernel[(-(-n//t[0])*-(-n//t[1]),)](
                a, b, out, n, n, n, BM=t[0], BN=t[1], BK=t[2], GROUP=8, WIDE=wide, **w_)) | dict(torch=alone(lambda: a@b, toy)),
            "experts": by(tiles, (4, 8), lambda t, **w_: grouped.grouped_kernel[(lists[t].shape[1], -(-N//t[1]))](
                x, w, y, *lists[t], N, N, BM=t[0], BN=t[1], BK=t[2], WIDE=wide, **w_))}
