"""What is worth measuring on a GPU, in order of value. Usage: tools/gpu.py [--dry-run] [--out FOLDER] [--again] [step ...]

Each step runs in a process of its own, at most eight minutes, and its result is written as soon as it is there, to
FOLDER/gpu-NAME.json, with the machine's name. A step that has a result is left out, unless --again asks for it: so a run
that was cut off goes on. A step that fails says why in its result, and the next one begins. Other libraries are measured
where they are installed; nanoGPT where NANOGPT names the folder of its model.py.
--dry-run does all of it at toy size on the processor, to see that it would work.
"""
import argparse, json, os, re, statistics, subprocess, sys, tempfile, time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import numpy as np

ROOT, LIMIT_S = Path(__file__).resolve().parent.parent, 480
TOY = dict(vocab_size=320, context_length=64, d_model=64, num_layers=2, num_heads=2, d_ff=192)
# Model, windows of a step, format of the products, and where the ledger has the published tokens/s of a GH200.
# float32 is TF32 on a card, as in the published run of 36M
RECIPES = {"42M, batch 128": ("leaderboard-42m", 128, "bfloat16", "cs336-report.leaderboard.v2-1.throughput"),
           "42M, batch 256": ("leaderboard-42m", 256, "bfloat16", "cs336-report.leaderboard-printed.v2-3.throughput"),
           "36M, batch 128": ("ts-36m", 128, "float32", "cs336-report.tinystories.throughput"),
           "36M, batch 128, bfloat16": ("ts-36m", 128, "bfloat16", "cs336-report.tinystories.throughput")}


class LeftOut(Exception):
    "Something that is not installed here."


class RandomBatches:
    "`self[step]`: windows of random ids. How fast a step is does not depend on them."
    def __init__(self, config, windows): self.config, self.windows = config, windows

    def __getitem__(self, step):
        shape = self.windows, self.config.context_length + 1
        ids = np.random.default_rng(step).integers(self.config.vocab_size, size=shape)
        return ids[:, :-1], ids[:, 1:]


def sync(device):
    import torch
    if device.type == "cuda": torch.cuda.synchronize()


def device_for(toy):
    import torch
    return torch.device("cpu" if toy or not torch.cuda.is_available() else "cuda")


def faster(function, toy):
    "Compiled; at toy size without the compiler's last part, which takes a minute"
    import torch
    return torch.compile(function, backend="eager" if toy else "inductor")


def config_of(name, toy):
    from lmcourse import ModelConfig
    return ModelConfig(**TOY, tie_embeddings=ModelConfig.preset(name).tie_embeddings) if toy else ModelConfig.preset(name)


def story_sets(folder, vocab_size, train=200, valid=20):
    "Two data sets of stories in `folder`"
    from lmcourse import Stories, TokenDataset, Tokenizer, write_tokens
    folder.mkdir(parents=True, exist_ok=True)
    texts, held_out = list(islice(Stories(seed=0), train)), list(islice(Stories(seed=1), valid))
    tokenizer = Tokenizer.train(texts[:20_000], vocab_size)
    tokenizer.save(folder/"tokenizer")
    nats = lambda d: -Stories().log_prob(d)
    for name, part in (("train", texts), ("valid", held_out)):
        write_tokens(folder/name, part, tokenizer, "stories", **dict(nats=nats) if name == "valid" else {})
    return tuple(TokenDataset.open(folder/name) for name in ("train", "valid"))


def timed(function, batches, steps, device):
    "Seconds of the first step, which compiles, and the median of the others, with the device waited for"
    from lmcourse.training.data import BatchPrefetcher
    times = []
    with BatchPrefetcher(batches, range(steps + 3), 4, device) as ahead:
        for batch in ahead:
            start = time.perf_counter()
            function(batch)
            sync(device)
            times.append(time.perf_counter() - start)
    return times[0], statistics.median(times[3:])


def timed_run(trainer, steps):
    "The same of a trainer's steps as its loop takes them: each begins before the numbers of the last are known"
    from lmcourse.training.data import BatchPrefetcher
    ends = [time.perf_counter()]
    with BatchPrefetcher(trainer.batches, range(steps + 4), 4, trainer.device) as ahead:
        batch = next(ahead)
        for following in ahead:
            trainer.train_step(batch, following)
            batch = following
            ends.append(time.perf_counter())
    times = np.diff(ends)
    return float(times[0]), float(np.median(times[3:]))


def median_time(call, times, device):
    found = []
    for _ in range(times):
        sync(device)
        start = time.perf_counter()
        call()
        sync(device)
        found.append(time.perf_counter() - start)
    return statistics.median(found)


# Steps: from whether it is a dry run to a dict that JSON can hold

def tests(toy):
    "All tests that need a GPU; four processes, because most of their time goes into compiling"
    files = [str(p) for p in sorted((ROOT/"tests").glob("test_*.py")) if "mark.cuda" in p.read_text()]
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-m", "cuda", "-p", "no:cacheprovider", "-n0" if toy else "-n4", "--durations=8",
                           *(["tests/test_gpu.py"] if toy else files)],
                          cwd=ROOT, capture_output=True, text=True)
    counts = {what: int(n) for n, what in re.findall(r"(\d+) (passed|failed|error|skipped)", done.stdout)}
    nothing = toy and done.returncode == 5              # without a GPU all of them are skipped
    return counts | ({} if done.returncode == 0 or nothing else dict(fault=done.stdout[-3000:]))


def products(toy):
    "Peak rates of products, and the bandwidth, as the course measures them"
    from lmcourse.accounting.hardware import measure_device
    d = measure_device(.2 if toy else 5., device_for(toy).type)
    return dict(flop_per_s=d.peak_flop_per_s, bytes_per_s=d.bytes_per_s, memory_bytes=d.memory_bytes, overhead_s=d.overhead_s)


def by_kernel(name, toy):
    "Chapter 09's kernels: see tools/gpu_kernels.py"
    if not find_spec("triton"): return dict(left_out="triton is not installed")
    if toy: os.environ["TRITON_INTERPRET"] = "1"        # On a machine with a GPU too
    import gpu_kernels
    return getattr(gpu_kernels, name)(toy)


def recipe(name, toy):
    "Tokens/s, MFU of the measured bfloat16 product and memory of a published recipe, as the trainer runs it"
    import torch
    from lmcourse import TrainConfig, Trainer, training_flops
    from lmcourse.accounting.hardware import measure_device
    from lmcourse.accounting.run_cost import price
    from lmcourse.tools.ledger import published
    preset, windows, dtype, key = RECIPES[name]
    model, said, device = config_of(preset, toy), published(key).value, device_for(toy)
    config = TrainConfig(steps=10**6, batch_size=2 if toy else windows, lr=1e-4, dtype=dtype, device=device.type,
                         compile=not toy or name == next(iter(RECIPES)))
    with tempfile.TemporaryDirectory() as folder:
        _, valid = story_sets(Path(folder), 300)
        trainer = Trainer(model, config, None, valid, RandomBatches(model, config.batch_size))
        first, seconds = timed_run(trainer, 5 if toy else 300)
    # Before the products are measured, which take memory themselves
    memory = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    del trainer
    here = measure_device(.2 if toy else 2., device.type)
    rate, flops = here.peak("bfloat16"), sum(training_flops(model, config.batch_size).values())
    return dict(tokens_per_s=config.batch_size*model.context_length/seconds, dtype=dtype,
                published_tokens_per_s=said*(1 if said > 1e4 else 1e3), step_s=seconds, compile_s=first - seconds,
                mfu=flops/seconds/rate, product_flop_per_s=rate, memory_bytes=memory,
                counted_bytes=price(model, config, here).memory_bytes)


# One step of training, by others and by us: a loss of ids and targets, and its parameters

def by_us(toy, preset="leaderboard-42m", compiled=True, attention=None):
    from lmcourse import TransformerLM
    from lmcourse.architecture.transformer_torch import Parts
    parts = Parts() if attention is None else replace(Parts(), attention=attention)
    model = TransformerLM(config_of(preset, toy), parts=parts).to(device_for(toy))
    return faster(model.loss, toy) if compiled else model.loss, model


def by_flash_attn(toy):
    if not find_spec("flash_attn"): raise LeftOut("flash_attn is not installed")
    from flash_attn import flash_attn_func
    def attention(q, k, v, window):
        return flash_attn_func(*(a.transpose(-2, -3) for a in (q, k, v)), causal=True).transpose(-2, -3)
    return by_us(toy, attention=attention)


def by_transformers(toy, liger=False):
    import torch
    from lmcourse import TransformerLM
    from lmcourse.architecture.pretrained import to_hf
    if not find_spec("transformers"): raise LeftOut("transformers is not installed")
    if liger:
        if not find_spec("liger_kernel"): raise LeftOut("liger_kernel is not installed")
        from liger_kernel.transformers import apply_liger_kernel_to_llama
        apply_liger_kernel_to_llama()
    model = to_hf(TransformerLM(config_of("leaderboard-42m", toy))).to(device_for(toy)).train()
    # Liger joins head and loss, and is asked for it by the labels, which transformers moves by one
    def loss(ids, targets):
        if liger: return model(input_ids=ids, labels=ids, use_cache=False).loss
        logits = model(input_ids=ids, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    # torch 2.11 can't compile Liger's joint head and loss
    return loss if liger else faster(loss, toy), model


def by_nanogpt(toy):
    folder = os.environ.get("NANOGPT")
    if not folder: raise LeftOut("NANOGPT does not name the folder of nanoGPT's model.py")
    sys.path.insert(0, folder)
    from model import GPT, GPTConfig
    c = config_of("gpt2-small", toy)
    model = GPT(GPTConfig(block_size=c.context_length, vocab_size=c.vocab_size, n_layer=c.num_layers, n_head=c.num_heads,
                          n_embd=c.d_model, dropout=0., bias=c.bias)).to(device_for(toy))
    return faster(lambda ids, targets: model(ids, targets)[1], toy), model


# Who, and how many windows of which preset
TRAINERS = {"ours, eager": (partial(by_us, compiled=False), 128, "leaderboard-42m"), "ours": (by_us, 128, "leaderboard-42m"),
            "ours with flash-attn": (by_flash_attn, 128, "leaderboard-42m"),
            "transformers": (by_transformers, 128, "leaderboard-42m"),
            "transformers with Liger": (partial(by_transformers, liger=True), 128, "leaderboard-42m"),
            "ours, GPT-2 small": (partial(by_us, preset="gpt2-small"), 16, "gpt2-small"),
            "nanoGPT, GPT-2 small": (by_nanogpt, 16, "gpt2-small")}


def training_step(name, toy):
    "Tokens/s and memory of a bare step in bfloat16 with torch's fused AdamW, the same for everybody"
    import torch
    make, windows, preset = TRAINERS[name]
    config, device = config_of(preset, toy), device_for(toy)
    batches = RandomBatches(config, 2 if toy else windows)
    try: loss, model = make(toy)
    except LeftOut as e: return dict(left_out=str(e))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    def step(batch):
        with torch.autocast(device.type, torch.bfloat16): value = loss(*batch)
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.)
        optimizer.step()
        optimizer.zero_grad()
    first, seconds = timed(step, batches, 3 if toy else 50, device)
    return dict(tokens_per_s=batches.windows*config.context_length/seconds, compile_s=first - seconds,
                memory_bytes=torch.cuda.max_memory_allocated() if device.type == "cuda" else None)


def loop(toy):
    "`bench loop`: what the trainer's loop adds to a step, one setting changed at a time"
    from lmcourse.app.throughput import bench_throughput
    with tempfile.TemporaryDirectory() as folder:
        file, only = Path(folder)/"loop.json", ("bfloat16, compiled", "no thread for batches", "a line every step")
        preset, steps = ("small", 1) if toy else ("ts-17m", 20)
        for _ in bench_throughput(preset, device_for(toy).type, steps, 1 if toy else 3, 1 if toy else None, only[1:2] if toy else only, file): pass
        found = json.loads(file.read_text())
    return dict(peaks=found["peaks"], step_s={m["name"]: statistics.median([s/n for s, n in zip(m["wall_s"], m["count"])])
                                              for m in found["measured"] if m["what"] == "loop"}, left_out=found["left_out"])


# Writing

def write_with(decoder, model, length):
    from lmcourse import generate
    return list(generate(model, [1, 2, 3], length, temperature=0., decoder=lambda m: decoder))


def write_with_transformers(model, many, toy):
    "A function that writes so many tokens of each of `many` texts, in one batch with a static cache"
    if not find_spec("transformers"): raise LeftOut("transformers is not installed")
    import torch
    from lmcourse.architecture.pretrained import to_hf
    theirs = to_hf(model).to(model.token_embeddings.weight.device).eval()
    prompts = torch.tensor([[1, 2, 3 + i % 50] for i in range(many)], device=theirs.device)
    how = dict(attention_mask=torch.ones_like(prompts), do_sample=False, eos_token_id=None, pad_token_id=0, **({} if toy else dict(cache_implementation="static")))
    return lambda length: theirs.generate(prompts, max_new_tokens=length, **how)


def writers(model, toy):
    "Name to a function that makes what writes so many tokens"
    from lmcourse import CachedDecoder
    from lmcourse.inference.kv_cache import GraphDecoder
    from lmcourse.kernels.decode import KernelDecoder
    def with_decoder(kind, compiled=False):
        try: decoder = kind(model)
        except ValueError as e: raise LeftOut(str(e)) from None
        if compiled: decoder.token = faster(decoder.token, toy)
        def write(length): decoder.rewind(0); write_with(decoder, model, length)
        return write
    return {"growing cache": partial(with_decoder, CachedDecoder), "CUDA graph": partial(with_decoder, GraphDecoder),
            "CUDA graph, compiled": partial(with_decoder, GraphDecoder, True),
            "CUDA graph of our kernels": partial(with_decoder, KernelDecoder),
            "transformers, static cache": partial(write_with_transformers, model, 1, toy)}


def step_times(model, toy):
    "Microseconds of a token's step alone, without choosing the token: the graph, replayed many times after 100 tokens"
    import torch
    from lmcourse.inference.kv_cache import GraphDecoder
    from lmcourse.kernels.decode import KernelDecoder
    found, many = {}, 2 if toy else 200
    for name, kind, compiled in (("CUDA graph", GraphDecoder, False), ("CUDA graph, compiled", GraphDecoder, True),
                                 ("CUDA graph of our kernels", KernelDecoder, False)):
        try: decoder = kind(model)
        except ValueError: continue                     # `writing` says why
        if compiled: decoder.token = faster(decoder.token, toy)
        decoder.feed([1]*(20 if toy else 100))
        with torch.no_grad():
            decoder.feed([2])
            step = decoder.token if decoder.graph is None else decoder.graph.replay
            found[name] = 1e6*median_time(lambda: [step() for _ in range(many)], 1 if toy else 7, device_for(toy))/many
    return found


def writing(preset, toy):
    "`bench generation`: tokens/s of one text; share of the bandwidth that reading the weights for each token takes"
    if toy: os.environ["TRITON_INTERPRET"] = "1"        # On a machine with a GPU too
    from lmcourse import TransformerLM
    from lmcourse.accounting.hardware import measure_device
    device, length, found, reasons = device_for(toy), 8 if toy else 200, {}, {}
    model = TransformerLM(config_of(preset, toy), seed=0).to(device).eval()
    for name, make in writers(model, toy).items():
        try: write = make()
        except LeftOut as e: reasons[name] = str(e); continue
        write(4)
        found[name] = length/median_time(partial(write, length), 1 if toy else 5, device)
    size = sum(p.nbytes for p in model.parameters())
    bandwidth = measure_device(.2 if toy else 2., device.type).bytes_per_s
    return dict(tokens_per_s=found, left_out=reasons, weight_bytes=size, bytes_per_s=bandwidth, step_us=step_times(model, toy),
                share_of_bandwidth={n: r*size/bandwidth for n, r in found.items()})


def training(name, steps, windows, seconds, toy):
    "A run on stories of so many steps, or of as many as the seconds allow: its losses beside the floor"
    from lmcourse import TrainConfig, Trainer, read_metrics
    from lmcourse.accounting.hardware import device_of
    from lmcourse.accounting.your_gpu import micro_batch_for
    from lmcourse.training.runs import write_run
    from lmcourse.training.trainer import measure_step
    with tempfile.TemporaryDirectory() as folder:
        data, run = Path(folder)/"data", Path(folder)/"run"
        train, valid = story_sets(data, 320 if toy else 4096, 60 if toy else 100_000, 20 if toy else 500)
        model, device = config_of(name, toy), device_for(toy)
        config = TrainConfig(steps=10**5, batch_size=2 if toy else windows, lr=1e-3, dtype="auto", device=device.type, compile=not toy,
                             eval_documents=20)
        memory = 10**9 if toy else device_of("this").memory_bytes
        config = replace(config, micro_batch=micro_batch_for(model, config, memory) or 1)
        step = measure_step(Trainer(model, config, train, valid))
        steps = 6 if toy else max(100, min(steps, int(seconds/step)))
        config = replace(config, steps=steps, eval_every=max(2, steps//10), warmup_steps=steps//10, checkpoint_every=10**6)
        run.mkdir()
        write_run(run, model, config, data)
        trainer = Trainer(model, config, train, valid)
        result = trainer.fit(run)
        lines = [m for m in read_metrics(run) if "valid_loss" in m]
    return dict(steps=steps, tokens=steps*trainer.plan.tokens, tokens_per_s=trainer.step*trainer.plan.tokens/trainer.elapsed,
                waited=trainer.waited/trainer.elapsed, loss=result.loss, floor=result.floor, excess=result.excess,
                curve=[[m["step"], m["valid_loss"]] for m in lines])

# Serving

def together(model, paged, many, length, prompt=3):
    "A function that answers so many requests at once, and the engine that does it"
    from lmcourse import Engine
    from lmcourse.inference.engine import Request
    engine = Engine(model, many*((prompt + length)//16 + 2), 16, many, max(256, many), share=False, paged=paged)
    return engine, lambda: engine.run([Request((*[1, 2]*(prompt//2), 3 + i % 50), length, temperature=0.) for i in range(many)])


def few_rows(toy):
    "Microseconds of products with 16 rows: torch's, ours, and ours with an idea left out; and errors. Twenty matrices in turns, more than the cache holds"
    import torch
    from unittest.mock import patch
    from lmcourse.inference.kv_cache import record_graph
    from lmcourse.kernels import serving
    device, found, copies = device_for(toy), {}, 2 if toy else 20
    for name, (N, D) in {"q, k, v": (2304, 768), "output": (768, 768), "up": (3072, 768), "down": (768, 3072)}.items():
        if toy: N, D = N//48, D//48
        linears = [torch.nn.Linear(D, N, device=device) for _ in range(copies)]
        x, ours, found[name] = torch.randn(16, D, device=device), [serving.SplitKLinear(m) for m in linears], {}
        exact = linears[0].double()(x.double())
        linears[0].float()
        for who, modules, change in (("torch", linears, {}), ("ours", ours, {}), ("one program", ours, dict(splits_of=lambda N, D: 1)),
                                     ("without TF32", ours, dict(precision_of=lambda x: "ieee"))):
            def all_of_them(): return [m(x) for m in modules]
            with patch.multiple(serving, **change) if change else nullcontext():
                found[name][f"{who}_error"] = (modules[0](x) - exact).abs().max().item()
                call = all_of_them if toy else record_graph(all_of_them, device)[0].replay
            found[name][f"{who}_us"] = 1e6*median_time(call, 1 if toy else 7, device)/copies
    return found


def same_bits(model, paged, toy):
    "Of some requests, how many get the same log-probabilities alone, together, and with prompts in pieces and too few blocks"
    from lmcourse import Engine
    from lmcourse.inference.engine import Request
    many, length = (2, 2) if toy else (20, 40)
    requests = [Request(tuple((7*i + 5*j) % 60 for j in range(1 + 8*i)), length, temperature=0., log_probs=0) for i in range(many)]
    blocks = -(-(8*many + length)//16)
    one, crowd, tight = (Engine(model, n, 16, running, budget, share=False, paged=paged)
                         for n, running, budget in ((blocks, 1, 256), (many*blocks, many, 256), (2*blocks, many, many + 17)))
    alone, crowd, tight = [one.run([r])[0] for r in requests], crowd.run(requests), tight.run(requests)
    return dict(requests=many, together=sum(s.log_probs == t.log_probs for s, t in zip(alone, crowd)), preempted=sum(s.preempted for s in tight),
                tight=sum(s.log_probs == t.log_probs for s, t in zip(alone, tight)))


def serving(preset, toy):
    "Many texts at once: tokens/s of the engine, of the engine with our kernels, and of transformers; the graphs alone; products of few rows; bits"
    import torch
    if toy: os.environ["TRITON_INTERPRET"] = "1"        # On a machine with a GPU too
    from lmcourse import TransformerLM
    from lmcourse.inference.engine import PagedModel
    from lmcourse.kernels.serving import GraphModel
    device, length, rates, graphs, prompts = device_for(toy), 2 if toy else 200, {}, {}, {}
    model = TransformerLM(config_of(preset, toy), seed=0).to(device).eval()
    for name, paged in (("engine", PagedModel), ("our kernels", GraphModel)):
        _, answer = together(model, paged, *((2, 2, 5) if toy else (16, 10, 401 if model.config.context_length > 500 else 201)))
        answer()
        prompts[name] = median_time(answer, 1 if toy else 5, device)
    for many in (2,) if toy else (1, 16, 128):
        for name, paged in (("engine", PagedModel), ("our kernels", GraphModel)):
            engine, answer = together(model, paged, many, length)
            answer()
            rates[f"{name}, {many}"] = many*length/median_time(answer, 1 if toy else 3, device)
            if paged is GraphModel and device.type == "cuda":
                graphs |= {size: 1e6*median_time(lambda g=g: [g.replay() for _ in range(50)], 5, device)/50 for size, (g, _) in engine.paged.graphs.items()}
        try: answer = partial(write_with_transformers(model, many, toy), length)
        except LeftOut: continue
        answer()
        rates[f"transformers, {many}"] = many*length/median_time(answer, 1 if toy else 3, device)
    bits = {name: same_bits(model, paged, toy) for name, paged in (("engine", PagedModel), ("our kernels", GraphModel))}
    with torch.no_grad(): return dict(tokens_per_s=rates, graph_us=graphs, prompts_s=prompts, products=few_rows(toy), same_bits=bits)


STEPS = {"tests": tests, "products": products, "kernels": partial(by_kernel, "kernels"), "launches": partial(by_kernel, "launches")} | {n: partial(recipe, n) for n in RECIPES} | {
    f"step: {n}": partial(training_step, n) for n in TRAINERS} | {
    "writing, 42M": partial(writing, "leaderboard-42m"), "writing, GPT-2 small": partial(writing, "gpt2-small"),
    "serving, 42M": partial(serving, "leaderboard-42m"), "serving, GPT-2 small": partial(serving, "gpt2-small"),
    "36M on stories": partial(training, "ts-36m", 5000, 128, 390), "GPT-2 small": partial(training, "gpt2-small", 10**5, 32, 60),
    "loop": loop}


def machine(toy):
    import torch
    from lmcourse.tools.machine import machine_name
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() and not toy else None
    return dict(machine=machine_name(), gpu=gpu, torch=torch.__version__, python=sys.version.split()[0], date=time.strftime("%Y-%m-%d"))


def result_of(name, toy, limit):
    "The step in a process of its own"
    command = [sys.executable, __file__, "--only", name, *["--dry-run"]*toy]
    path, start = os.pathsep.join([str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]), time.time()
    try: done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit, env=os.environ | {"PYTHONPATH": path})
    except subprocess.TimeoutExpired: return dict(fault=f"took more than {limit} s")
    if done.returncode: return dict(fault=(done.stderr or done.stdout)[-3000:])
    return json.loads(done.stdout.splitlines()[-1]) | dict(took_s=round(time.time() - start, 1))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("steps", nargs="*", help=f"all if none: {', '.join(STEPS)}")
    p.add_argument("--out", type=Path, default=ROOT/"nbs/results", help="folder of the result file")
    p.add_argument("--dry-run", action="store_true")
    p.add_argument("--again", action="store_true")
    p.add_argument("--only", help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.only: print(json.dumps(STEPS[a.only](a.dry_run))); return
    if odd := set(a.steps) - set(STEPS): p.error(f"no step called {', '.join(sorted(odd))}: there are {', '.join(STEPS)}")
    from lmcourse.tools.files import write_json
    about = machine(a.dry_run)
    if not about["gpu"] and not a.dry_run: sys.exit("tools/gpu.py: torch finds no GPU here; --dry-run does all of it at toy size")
    a.out.mkdir(parents=True, exist_ok=True)
    file = a.out/f"gpu-{re.sub(r'[^a-z0-9]+', '-', (about['gpu'] or 'dry-run').lower()).strip('-')}.json"
    found = json.loads(file.read_text()) if file.exists() else dict(about, steps={})
    for name in a.steps or STEPS:
        if "fault" not in found["steps"].get(name, dict(fault="")) and not a.again: continue
        found["steps"][name] = result = result_of(name, a.dry_run, LIMIT_S)
        write_json(file, found, indent=1)
        print(name, json.dumps(result)[:300], flush=True)
    if bad := [n for n, r in found["steps"].items() if "fault" in r]: sys.exit(f"failed: {', '.join(bad)}")


if __name__ == "__main__": main()
