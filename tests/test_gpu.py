"""What differs on a GPU. Each test runs on the processor too, so that it is known to be right before it meets a card; `make gpu` runs those of the card.

The card's own: pinned batches in test_data, random numbers in test_checkpoint, answers of the engine in test_engine.
"""
import math
from dataclasses import replace
from functools import partial

import pytest
from processes import script

torch = pytest.importorskip("torch")
from torch.nn.attention import SDPBackend, sdpa_kernel

from lmcourse.accounting import hardware
from lmcourse.accounting.run_cost import price
from lmcourse.architecture.attention_torch import causal_attention, causal_mask, scaled_dot_product_attention
from lmcourse.architecture.transformer_torch import TransformerLM
from lmcourse.generation.generate import generate
from lmcourse.inference.engine import Engine, Request
from lmcourse.inference.kv_cache import CachedDecoder, GraphDecoder
from lmcourse.inference.quantization import Int8Cache, quantize_model
from lmcourse.inference.speculative import DraftModel, speculate
from lmcourse.tools.checks import check_close
from lmcourse.tools.config import ModelConfig, TrainConfig
from lmcourse.training.engines import TorchEngine, precision_for, tf32_products
from lmcourse.training.optim_torch import AdamW, Muon, muon_groups, on_one_device

on_both = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
MODEL = ModelConfig(vocab_size=97, context_length=64, d_model=64, num_layers=2, num_heads=4, num_kv_heads=2)


def batch(device, rows=8, step=0, c=MODEL):
    ids = torch.randint(c.vocab_size, (rows, c.context_length + 1), generator=torch.Generator().manual_seed(step)).to(device)
    return ids[:, :-1], ids[:, 1:]


def losses(device, steps=5, model=MODEL, **changes):
    engine = TorchEngine(model, TrainConfig(**dict(device=device) | changes))
    found = []
    for step in range(steps):
        found.append(float(engine.forward_backward(batch(device, step=step, c=model))))
        engine.optimizer_step(1e-3)
    return engine, found


# Attention

@on_both
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=["heads", "shared heads"])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("dtype, atol", [("float32", 2e-5), ("bfloat16", 2e-2), ("float16", 2e-3)])
def test_attention_is_its_formula_and_never_holds_all_pairs(device, dtype, atol, window, heads):
    "On a card the kernel that holds them is forbidden here, forward and backward"
    T, K, rng = 70, 16, torch.Generator().manual_seed(0)
    draw = lambda n: torch.randn(2, n, T, K, generator=rng).to(getattr(torch, dtype))
    q, k, v = draw(heads[0]), draw(heads[1]), draw(heads[1])
    mine = [a.detach().to(device).requires_grad_() for a in (q, k, v)]
    fast = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    with sdpa_kernel(fast if device == "cuda" else [SDPBackend.MATH, *fast]):
        out = causal_attention(*mine, window)
        out.square().sum().backward()
    theirs = [a.detach().double().requires_grad_() for a in (q, k, v)]
    repeated = [a.repeat_interleave(heads[0]//heads[1], 1) for a in theirs[1:]]
    expected = scaled_dot_product_attention(theirs[0], *repeated, causal_mask(T, T, window))
    expected.square().sum().backward()
    check_close(out.detach().cpu().double(), expected.detach(), rtol=0, atol=atol)
    for a, b in zip(mine, theirs): check_close(a.grad.cpu().double(), b.grad, rtol=0, atol=20*atol)


@pytest.mark.cuda
@pytest.mark.parametrize("changes", [dict(), dict(dtype=torch.bfloat16), dict(window=512), dict(dtype=torch.bfloat16, window=512)], ids=str)
def test_long_attention_is_linear_in_memory(changes):
    "A table of all pairs of 8,192 tokens and 8 heads would take 1 GB in 16 bits, a mask for all heads 64 MB to 256 MB"
    changes = dict(changes)
    window = changes.pop("window", None)
    q, kv = (torch.randn(1, n, 8192, 64, device="cuda", **changes) for n in (8, 2))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    causal_attention(q, kv, kv, window)
    assert torch.cuda.max_memory_allocated() - before < 900e6


# A step

@on_both
@pytest.mark.parametrize("dtype, near", [("float32", 2e-3), ("bfloat16", 2e-2), ("float16", 4e-3), ("auto", 2e-2)])
def test_a_step_in_every_precision(device, dtype, near):
    engine, found = losses(device, dtype=dtype)
    _, expected = losses("cpu", dtype="float32")
    check_close(found, expected, rtol=near)
    assert all(p.dtype == torch.float32 and p.device.type == device for p in engine.model.parameters())
    assert engine.dtype == (precision_for(engine.device) if dtype == "auto" else dtype)
    assert engine.scaler.is_enabled() == (engine.dtype == "float16")
    assert torch.get_float32_matmul_precision() == "highest"


@on_both
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_optimizer_moves_as_on_the_processor(device, optimizer):
    def moved(where):
        model = TransformerLM(MODEL).to(where)
        rule = AdamW(model.parameters(), 1e-2) if optimizer == "adamw" else Muon(muon_groups(model, .1), 1e-2)
        for step in range(3):
            g = torch.Generator().manual_seed(step)
            for p in model.parameters(): p.grad = torch.randn(p.shape, generator=g).to(where)
            rule.step()
        assert on_one_device(list(model.parameters())) == (where == "cuda")
        return [p.detach().cpu() for p in model.parameters()]
    check_close(moved(device), moved("cpu"), rtol=1e-3, atol=2e-4)


@pytest.mark.cuda
def test_a_compiled_step_is_the_plain_one_with_one_graph():
    from torch._dynamo.utils import counters
    counters.clear()
    _, found = losses("cuda", dtype="bfloat16", compile=True)
    check_close(found, losses("cuda", dtype="bfloat16")[1], rtol=1e-2)
    assert counters["stats"]["unique_graphs"] <= 2 and not counters["graph_break"], counters


@on_both
@pytest.mark.parametrize("bad", [[math.nan, 1.], [math.inf, 1.], [-math.inf, -math.inf]])
@pytest.mark.parametrize("how", [dict(), dict(temperature=0.), dict(top_k=1), dict(top_p=.5), dict(min_p=.1), dict(repetition_penalty=1.2)])
def test_no_token_is_drawn_from_logits_that_are_no_numbers(device, how, bad, monkeypatch):
    "On a card nobody looks at the logits before the draw, which says so then"
    from lmcourse.generation import sampling
    monkeypatch.setattr(sampling, "read_at_once", lambda x: False)     # Done so on the processor
    with pytest.raises(ValueError): sampling.sample(sampling.next_token_probs(torch.tensor([*bad, 0.]*(bad[0] != -math.inf) or bad, device=device), **how), torch.Generator())


@on_both
@pytest.mark.parametrize("temperature", [0., 1.])
def test_the_engine_draws_nothing_from_logits_that_are_no_numbers(device, temperature, monkeypatch):
    "An id past the vocabulary would end the card's context at the next lookup"
    from lmcourse.generation import sampling
    from lmcourse.inference import engine
    for module in (sampling, engine): monkeypatch.setattr(module, "read_at_once", lambda x: False)
    model = TransformerLM(MODEL, seed=0).to(device).eval()
    with torch.no_grad(): model.ln_final.weight[0] = math.nan
    with pytest.raises(ValueError, match="expected none below 0 and sums of 1"): Engine(model, 8, 16, 2, 32).run([Request((1, 2, 3), 4, temperature=temperature)])


@on_both
def test_stories_are_judged_wherever_the_policy_is(device, tmp_path):
    from itertools import islice

    from lmcourse.alignment.briefs import Demonstrators
    from lmcourse.alignment.rl import slot_confidence
    from lmcourse.alignment.stories import StoryRlConfig, start_story_rl
    from lmcourse.tools.stories import Stories
    from lmcourse.training.data import TokenDataset, write_tokens
    from lmcourse.training.models import load_model
    tokenizer, pairs = load_model()[1], list(islice(Demonstrators(0., 9), 2))
    write_tokens(tmp_path/"valid", islice(Stories(1), 2), tokenizer, "stories")
    model = TransformerLM(replace(MODEL, vocab_size=tokenizer.vocab_size))
    trainer = start_story_rl(model, tokenizer, StoryRlConfig("choices", 4, 2), TrainConfig(steps=1, device=device), TokenDataset.open(tmp_path/"valid"))
    loss = trainer.train_step()
    trainer.batches.close()
    found = slot_confidence(trainer.model, tokenizer, pairs)
    assert math.isfinite(loss) and trainer.device.type == device and all(0 < m["confidence"] < 1 for m in found["kind"]) and found["kind"]


@pytest.mark.cuda
def test_products_in_tf32_are_rounded_and_only_within_the_block():
    a = torch.randn(512, 512, device="cuda")
    exact = (a.double()@a.double())
    with tf32_products(a.device): rough = ((a@a).double() - exact).abs().max()
    fine = ((a@a).double() - exact).abs().max()
    assert fine < 1e-3 and (rough > 3*fine or torch.cuda.get_device_capability() < (8, 0))


@pytest.mark.cuda
def test_a_step_needs_what_the_account_says():
    "In the caching allocator's view, without what is set aside for cuBLAS"
    model, train = ModelConfig.preset("ts-17m"), TrainConfig(batch_size=32, device="cuda", dtype="bfloat16")
    engine = TorchEngine(model, train)
    for step in range(3):
        torch.cuda.reset_peak_memory_stats()
        engine.forward_backward(batch("cuda", 32, step, model))
        engine.optimizer_step(1e-3)
    counted = price(model, train, "h100").memory_bytes
    assert .9*counted < torch.cuda.max_memory_allocated() < 1.05*counted + 64e6


@on_both
def test_a_run_goes_on_where_it_was(device, tmp_path):
    from itertools import islice
    from lmcourse import Stories, TokenDataset, Tokenizer, Trainer, evaluate, write_tokens
    from lmcourse.training.runs import write_run
    texts = list(islice(Stories(seed=0), 60))
    tokenizer = Tokenizer.train(texts, 300)
    for name, part in (("train", texts[:50]), ("valid", texts[50:])): write_tokens(tmp_path/name, part, tokenizer, "stories")
    train, valid = (TokenDataset.open(tmp_path/name) for name in ("train", "valid"))
    model = replace(MODEL, vocab_size=tokenizer.vocab_size)
    config = TrainConfig(steps=6, batch_size=4, eval_every=3, checkpoint_every=3, eval_documents=5, device=device, dtype="auto", prefetch=2)
    write_run(tmp_path, model, config, tmp_path)
    first = Trainer(model, replace(config, steps=3), train, valid)
    first.fit(tmp_path)
    other = Trainer(model, config, train, valid)
    other.resume(tmp_path)
    assert other.step == 3
    for a, b in zip(first.model.parameters(), other.model.parameters()): assert torch.equal(a, b)
    result = other.fit(tmp_path)
    assert math.isfinite(result.loss) and other.device.type == device
    there = evaluate(TransformerLM(model).to(device), valid, 64, dtype="float32").loss
    check_close(there, evaluate(TransformerLM(model), valid, 64).loss, rtol=1e-4)


# Sharded, with one process: what a single card can show of FSDP2

SHARDED = """
import sys, os, torch, torch.distributed as dist
from pathlib import Path
from lmcourse.tools.config import ModelConfig, TrainConfig
from lmcourse.training import optim_torch
from lmcourse.training.checkpoint import Checkpoints
from lmcourse.training.engines import TorchEngine, World
from torch.distributed.device_mesh import init_device_mesh
kind, folder = sys.argv[1], Path(sys.argv[2])
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
if kind == "cuda": torch.cuda.set_device(0)
else: optim_torch.on_one_device = lambda params: True     # The card's step, on the processor
dist.init_process_group("nccl" if kind == "cuda" else "gloo", init_method=f"file://{folder/'store'}", rank=0, world_size=1)
world = World(0, 1, init_device_mesh(kind, (1,), mesh_dim_names=("data",)))
model = ModelConfig(vocab_size=97, context_length=64, d_model=64, num_layers=2, num_heads=4, num_kv_heads=2)
def made(shard, dtype): return TorchEngine(model, TrainConfig(device=kind, shard=shard, dtype=dtype), world if shard else World(), torch.device(kind))
def step(e, n):
    ids = torch.randint(97, (8, 65), generator=torch.Generator().manual_seed(n)).to(kind)
    loss = float(e.forward_backward((ids[:, :-1], ids[:, 1:])))
    return loss, e.optimizer_step(1e-2)
for dtype, near in (("float32", 1e-4 if kind == "cpu" else 5e-3), ("bfloat16", 3e-2)):
    parts, whole = made(True, dtype), made(False, dtype)
    for n in range(4):
        (a, norm), (b, expected) = step(parts, n), step(whole, n)
        assert abs(a/b - 1) < near and abs(norm/expected - 1) < 10*near, (dtype, n, a, b, norm, expected)
    parts.save(Checkpoints(folder/dtype), 4, None, {}, model.to_dict())
    again = made(True, dtype)
    assert again.load(folder/dtype/"step_000004", model.to_dict()) == 4
    for p, q in zip(parts.model.parameters(), again.model.parameters()): assert torch.equal(p.to_local(), q.to_local())
    assert step(again, 4) == step(parts, 4) or kind == "cuda"
dist.destroy_process_group()
"""


@on_both
def test_a_sharded_model_alone_is_the_whole_one(device, tmp_path):
    script(SHARDED, device, tmp_path)


# Writing

@on_both
@pytest.mark.parametrize("changes", [dict(), dict(window=9), dict(position="learned", norm="layernorm", bias=True), dict(qk_norm=True, tie_embeddings=True)], ids=str)
def test_a_graph_of_the_step_writes_the_same(device, changes):
    "Beyond the context too, after going back, and for two texts at once"
    model = TransformerLM(replace(MODEL, **changes), seed=1, dtype=torch.float64).eval()
    write = partial(generate, ids=[1, 2, 3], max_tokens=90, temperature=.8, seed=3)
    expected = list(write(model, decoder=CachedDecoder))
    model.to(device)
    decoders = []
    def made(m): decoders.append(GraphDecoder(m)); return decoders[-1]
    one, two = write(model, decoder=made), write(model, decoder=made)
    assert [*zip(one, two)] == [(i, i) for i in expected]
    assert all((d.graph is not None) == (device == "cuda") for d in decoders)
    decoder = GraphDecoder(model)
    first = [decoder.feed([i]) for i in (5, 6, 7)]
    decoder.rewind(1)
    check_close([decoder.feed([i]) for i in (6, 7)], first[1:], 1e-9, 1e-9)


@on_both
def test_a_draft_guesses_ahead_by_graphs_too(device):
    model = TransformerLM(MODEL, seed=1, dtype=torch.float64).to(device).eval()
    draft = TransformerLM(replace(MODEL, num_layers=1), seed=1, dtype=torch.float64).to(device).eval()
    guessed = speculate(model, DraftModel(draft, GraphDecoder), [1, 2, 3], 40, temperature=0., decoder=GraphDecoder)
    assert list(guessed) == list(generate(model, [1, 2, 3], 40, temperature=0.))


@on_both
def test_many_requests_at_once(device):
    model = TransformerLM(MODEL, seed=1).to(device).eval()
    asked = [Request(tuple(range(1, 4 + k)), 20, temperature=0.) for k in range(5)]
    for dtype in (torch.float32, torch.bfloat16):
        found = Engine(model.to(dtype), 60, 8).run(asked)
        assert all(len(s.tokens) == 20 for s in found)
    exact = model.to(torch.float64)
    for temperature in (0., .8):
        asked = [replace(r, temperature=temperature, seed=k) for k, r in enumerate(asked)]
        found = Engine(exact, 60, 8).run(asked)
        assert [s.tokens for s in found] == [list(generate(exact, r.ids, 20, temperature=temperature, seed=r.seed)) for r in asked]


@on_both
@pytest.mark.parametrize("bits", [8, 4])
def test_decoding_with_few_bits(device, bits):
    "The weights that the codes stand for, and a cache of bytes"
    model = TransformerLM(MODEL, seed=1).eval()
    rounded = quantize_model(model.to(device), bits).model()
    plain = quantize_model(model.to("cpu"), bits).model()
    for a, b in zip(rounded.parameters(), plain.parameters()): assert torch.equal(a, b)
    ids = torch.arange(1, 40)[None]
    def logits(m, where):
        cache = Int8Cache(m.config, device=where)
        with torch.no_grad():
            parts = [m(ids[:, a:b].to(where), torch.arange(a, b, device=where), cache) for a, b in ((0, 30), (30, 31), (31, 39))]
        return torch.cat(parts, 1).cpu()
    check_close(logits(rounded.to(device), device), logits(plain, "cpu"), rtol=1e-2, atol=5e-2)


@on_both
def test_the_command_writes_on_the_device(device, capsys):
    from lmcourse.app import cli
    cli.main(["generate", "--device", device, "--max-tokens", "20", "--temperature", "0"])
    assert len(capsys.readouterr().out.split()) > 5


@on_both
def test_the_products_of_the_device_are_there_to_be_measured(device):
    "An older card is fast in float16 alone"
    calls = hardware._products(device, 1e-3)
    for call in calls.values(): call()
    tf32 = device == "cuda" and torch.cuda.get_device_capability() >= (8, 0)
    assert {dtype for dtype, *_ in calls} == {"float32", "bfloat16"} | ({"float16"} if device == "cuda" else set()) | ({"tfloat32"} if tf32 else set())
    assert torch.get_float32_matmul_precision() == "highest"
