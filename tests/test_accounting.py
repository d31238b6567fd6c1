"""Chapter 02 on the course's own models: parameters, bytes and FLOPs by formula equal what is counted, over mixtures of all fields.

The peak of a training step is measured by live storages, after each operation that torch dispatches. That is the same on every machine, whatever the
BLAS and the number of threads. Attention is the CPU's flash kernel or torch's own operations, as a case says; scratch memory inside a kernel is not seen.
"""
import random
import typing
from collections import Counter
from dataclasses import fields, replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch.nn.attention import SDPBackend, sdpa_kernel

from lmcourse.accounting import activations, flops, memory, model_flops, parameters, tensors
from lmcourse.accounting.flops import adamw_flops, Counted, count_operations, flop_counter
from lmcourse.accounting.model_flops import attention_pairs, forward_flops, training_flops
from lmcourse.accounting.activations import step_operations, activation_bytes, activation_parts, saved_tensors
from lmcourse.accounting.memory import kv_cache_bytes, largest_batch, MemoryTimeline, peak_phase
from lmcourse.accounting.memory import training_bytes, training_phases
from lmcourse.accounting.parameters import count_parameters, parameter_table, parameter_tree
from lmcourse.architecture.attention_torch import causal_mask
from lmcourse.architecture import layers_torch
from lmcourse.architecture.layers_torch import cross_entropy, linear_cross_entropy
from lmcourse.architecture.onednn import OneDNNLinear, onednn_products, vectors_idle
from lmcourse.architecture.transformer_np import init_params
from lmcourse.architecture.transformer_torch import TransformerLM
from lmcourse.inference.kv_cache import KVCache
from lmcourse.tools.config import ModelConfig, TrainConfig
from lmcourse.tools.machine import compiles
from lmcourse.training import optim_torch
from lmcourse.training.engines import TorchEngine
from lmcourse.training.optim_np import AdamWNp
from lmcourse.training.optim_torch import AdamW, adamw_step, clip_grad_norm

HINTS = typing.get_type_hints(ModelConfig)
WORDS = {f.name: typing.get_args(HINTS[f.name]) for f in fields(ModelConfig) if typing.get_origin(HINTS[f.name]) is typing.Literal}
HOW = dict(dtype=("float32", "bfloat16"), attention=("fused", "explicit"), recompute=(False, True), logits=(False, True))


def draw(seed):
    "A config, a batch, a length and a way of training: anything goes with anything"
    pick = random.Random(seed).choice
    heads = pick((1, 2, 4, 6))
    c = ModelConfig(vocab_size=pick((7, 33)), context_length=pick((1, 2, 5, 9)), d_model=pick((12, 24)), num_layers=pick((1, 2, 3)), num_heads=heads,
                    num_kv_heads=pick([None] + [g for g in (1, 2, 3, 4, 6) if heads % g == 0]), head_dim=pick((2, 4, 6)), d_ff=pick((None, 20)),
                    window=pick((None, None, 1, 3, 20)), qk_norm=pick((False, True)), bias=pick((False, True)), tie_embeddings=pick((False, True)),
                    scale_embeddings=pick((False, True)), z_loss=pick((0., .001)), **{n: pick(words) for n, words in WORDS.items()})
    return c, pick((1, 2, 3)), max(1, c.context_length - pick((0, 1))), {n: pick(ways) for n, ways in HOW.items()}


CASES = [draw(seed) for seed in range(220)]


def kernel(how): return sdpa_kernel(SDPBackend.MATH if how["attention"] == "explicit" else SDPBackend.FLASH_ATTENTION)


def run(c, B, T, how):
    "A loss and its gradients: the model, the bytes that autograd kept, the FLOPs"
    model = TransformerLM(c)
    model.recompute = how["recompute"]
    ids, targets = (torch.randint(c.vocab_size, (B, T), generator=torch.Generator().manual_seed(i)) for i in range(2))
    with kernel(how), saved_tensors(model) as kept, flop_counter() as counter:
        with torch.autocast("cpu", torch.bfloat16, enabled=how["dtype"] == "bfloat16"):
            loss = cross_entropy(model(ids), targets) if how["logits"] else model.loss(ids, targets)
        loss.backward()
    return model, sum(t["bytes"] for t in kept), counter.get_total_flops()


@pytest.fixture(scope="module")
def counted():
    return [run(*case) for case in CASES]


def wrong_parameters(counted): return sum(count_parameters(c) != count_parameters(model) for (c, *_), (model, *_) in zip(CASES, counted))
def wrong_bytes(counted): return sum(activation_bytes(c, B, T, **how) != kept for (c, B, T, how), (_, kept, _) in zip(CASES, counted))


def wrong_flops(counted):
    ways = [dict(recompute=how["recompute"], fused=how["attention"] == "fused") for *_, how in CASES]
    return sum(sum(training_flops(c, B, T, **way).values()) != n for (c, B, T, _), way, (*_, n) in zip(CASES, ways, counted))


def test_the_grid_has_every_choice():
    assert len({case[0] for case in CASES}) >= 200
    for name, words in WORDS.items(): assert {getattr(c, name) for c, *_ in CASES} == set(words)
    for name, ways in HOW.items(): assert {how[name] for *_, how in CASES} == set(ways)
    pairs = {(c.norm, c.norm_position, how["dtype"], how["recompute"]) for c, *_, how in CASES}
    assert len(pairs) == 3*3*2*2 and {(c.position, c.ffn) for c, *_ in CASES} == {(p, f) for p in WORDS["position"] for f in WORDS["ffn"]}


def test_formulas_equal_the_counts(counted):
    assert wrong_parameters(counted) == wrong_bytes(counted) == wrong_flops(counted) == 0


# A mistake in any formula is found

def without(function, name, n=0): return lambda *args, **more: {k: n if k == name else v for k, v in function(*args, **more).items()}


def changed(function, change):
    "A function with other operations: one, a list, or a tuple with some"
    def deep(x): return change(x) if isinstance(x, activations.OperationMemory) else type(x)(map(deep, x)) if isinstance(x, (list, tuple)) else x
    return lambda *args: deep(function(*args))

def every(x): # All operations in it
    if isinstance(x, activations.OperationMemory): yield x
    elif isinstance(x, (list, tuple)): yield from (op for part in x for op in every(part))


@pytest.mark.parametrize("part", sorted({part for c, B, T, how in CASES for part in activation_parts(c, B, T, **how | dict(recompute=False))}))
def test_a_part_that_is_left_out_is_found(counted, monkeypatch, part):
    drop = lambda op: op._replace(keeps={k: n for k, n in op.keeps.items() if k != part})
    monkeypatch.setattr(activations, "step_operations", changed(activations.step_operations, drop))
    assert wrong_bytes(counted) > 3


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_a_parameter_counted_as_an_activation_is_found(counted, monkeypatch, norm):
    right = activations._norm
    def wrong(c, *args):
        op = right(c, *args)
        return op._replace(keeps={k: n + 4*c.d_model*(c.norm == norm) for k, n in op.keeps.items()})
    monkeypatch.setattr(activations, "_norm", wrong)
    assert wrong_bytes(counted) > 3


@pytest.mark.parametrize("name", ["projections", "scores", "values", "ffn", "head"])
def test_a_product_that_is_left_out_is_found(counted, monkeypatch, name):
    monkeypatch.setattr(model_flops, "forward_flops", without(model_flops.forward_flops, name))
    assert wrong_flops(counted) == len(CASES)


def test_a_tied_head_that_is_forgotten_or_counted_twice_is_found(counted, monkeypatch):
    tied, right = sum(c.tie_embeddings for c, *_ in CASES), model_flops.forward_flops
    with monkeypatch.context() as m:
        m.setattr(model_flops, "forward_flops", lambda c, *args, **more: right(c, *args, **more) | ({"head": 0} if c.tie_embeddings else {}))
        assert wrong_flops(counted) == tied > 80
    parts = parameters.parameter_parts
    monkeypatch.setattr(parameters, "parameter_parts", lambda c: parts(c) | {"head": c.vocab_size*c.d_model})
    assert wrong_parameters(counted) == tied


@pytest.mark.parametrize("name", ["token embedding", "position embedding", "attention", "q/k norms", "feed-forward", "norms", "head"])
def test_parameters_that_are_left_out_are_found(counted, monkeypatch, name):
    monkeypatch.setattr(parameters, "parameter_parts", without(parameters.parameter_parts, name))
    assert wrong_parameters(counted) > 3


# The other engine, other people's models, generation

def test_the_numpy_engine_has_the_same_parameters():
    for c, *_ in CASES[::5]:
        params = init_params(c)
        if c.tie_embeddings: params = params | {"lm_head.weight": params["token_embeddings.weight"]}
        assert count_parameters(params) == count_parameters(c)
        assert parameter_table(params).rows[-1]["parameters"] == parameter_tree(params).rows[0]["parameters"] == count_parameters(c).unique


@pytest.mark.parametrize("kind, preset", [("GPT2", "gpt2-small"), ("Llama", "llama-2-7b")])
def test_models_of_transformers_have_the_formulas_counts(kind, preset):
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"): model = getattr(transformers, kind + ("LMHeadModel" if kind == "GPT2" else "ForCausalLM"))(getattr(transformers, kind + "Config")())
    assert count_parameters(model) == count_parameters(ModelConfig.preset(preset))


@torch.no_grad()
def test_generation_with_a_cache():
    "A window's cache forgets keys, and nothing is computed with them"
    for c, B, *_ in CASES[:50]:
        if c.context_length < 5: continue
        for dtype in (torch.float32, torch.bfloat16):
            model, cache, ids = TransformerLM(c, dtype=dtype), KVCache(c, B, 5, dtype), torch.zeros(B, 5, dtype=torch.int64)
            past = 0
            for T in (2, 1, 2):
                with sdpa_kernel(SDPBackend.MATH), flop_counter() as counter: model(ids[:, past:past + T], torch.arange(past, past + T), cache)
                assert counter.get_total_flops() == sum(forward_flops(c, B, T, past=past).values())
                past += T
            entry = 2*c.kv_heads*c.head_size*c.num_layers*B*dtype.itemsize
            assert kv_cache_bytes(c, B, 5, str(dtype)[6:]) == entry*min(5, c.window or 5)


def test_pairs_are_the_entries_of_the_mask():
    for T in range(1, 7):
        for past in range(5):
            for window in (None, 1, 2, 4, 30): assert attention_pairs(T, past, window) == causal_mask(T, T + past, window).sum()
    for c, B, T, _ in CASES[:50]:
        used = forward_flops(c, B, T, causal=True)["scores"]
        assert used == 2*c.num_layers*B*c.num_heads*c.head_size*causal_mask(T, T, c.window).sum() <= forward_flops(c, B, T)["scores"]


# The optimizer

def moments_of(optimizer): return [t for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t) and t.numel() and t.ndim]


@pytest.mark.parametrize("make", [AdamW, torch.optim.AdamW])
def test_what_the_optimizer_holds(counted, make):
    for (c, B, T, how), (model, *_) in zip(CASES[:20], counted):
        optimizer = make(model.parameters())
        assert not optimizer.state
        optimizer.step()
        last, P = training_phases(c, B, T, **how)[-1], count_parameters(c).unique
        assert sum(t.nbytes for t in moments_of(optimizer)) == last["optimizer"] == 8*P
        assert sum(p.grad.nbytes for p in model.parameters()) == last["gradients"] and sum(p.nbytes for p in model.parameters()) == last["parameters"]


def test_what_muon_holds():
    for c, *_ in CASES[:20]:
        engine = TorchEngine(c, TrainConfig(optimizer="muon", device="cpu"))
        for p in engine.model.parameters(): p.grad = torch.zeros_like(p)
        engine.optimizer.step()
        assert sum(t.nbytes for t in moments_of(engine.optimizer)) == training_bytes(c, 1, optimizer="muon")["optimizer"] < 8*count_parameters(c).unique


def test_what_the_numpy_optimizer_holds():
    c = CASES[0][0]
    params = init_params(c)
    optimizer = AdamWNp(params)
    optimizer.step({n: np.ones_like(p) for n, p in params.items()}, 1e-3)
    moments = {id(a): a.nbytes for value in vars(optimizer).values() if isinstance(value, dict) and value is not params
               for a in value.values() if isinstance(a, np.ndarray) and id(a) not in {id(p) for p in params.values()}}
    assert sum(moments.values()) == training_bytes(c, 1)["optimizer"]


def test_operations_of_our_adamw():
    tally = count_operations(lambda *numbers: adamw_step(*(x.item() for x in numbers), t=3), (1,), (1,), (1,), (1,))
    assert tally.total() == adamw_flops(1, corrected=True) == 16
    assert isinstance(adamw_step(*(Counted(1., tally) for _ in range(4)), t=1)[0], Counted)


# Memory over a step

def test_the_timeline_meets_the_formulas():
    for c, B, T, how in CASES[:60]:
        if how["dtype"] == "bfloat16": continue             # Autocast's own copies of the weights live until it ends
        how = how | dict(attention="fused")
        model = TransformerLM(c)
        model.recompute = how["recompute"]
        ids, targets = torch.zeros(2, B, T, dtype=torch.int64).unbind()
        ids, targets = ids.clone(), targets.clone()
        given = ids.nbytes + (targets.nbytes if how["logits"] else 0)
        with MemoryTimeline(*model.parameters(), *model.buffers(), ids, targets) as line:
            steady = line.live
            loss = cross_entropy(model(ids), targets) if how["logits"] else model.loss(ids, targets)
            kept = line.live - steady - loss.nbytes
            loss.backward()
            assert line.live - steady - loss.nbytes == 4*count_parameters(c).unique
        assert kept == activation_bytes(c, B, T, **how) - given, (c, B, T, how)


def test_the_timeline_forgets_what_dies_after_the_block():
    with MemoryTimeline() as line: a = torch.ones(100)
    assert line.live == 400
    del a
    assert line.live == 0


@pytest.mark.parametrize("recompute", [False, True])
def test_the_largest_batch(recompute):
    c = CASES[0][0]
    for budget in (10_000, 100_000, 123_457, 10_000_000):
        n = largest_batch(c, budget, recompute=recompute)
        need = lambda batch: sum(training_bytes(c, batch, recompute=recompute).values())
        assert (n == 0 or need(n) <= budget) and need(n + 1) > budget


@pytest.mark.parametrize("recompute", [False, True])
def test_on_a_gpu_larger_batches_may_fit_than_one_that_does_not(recompute):
    c, how = ModelConfig.preset("gpt2-small"), dict(dtype="bfloat16", recompute=recompute, device="cuda")
    needs = [sum(training_bytes(c, batch, **how).values()) for batch in range(1, 80)]
    drops = [(low, high) for high, low in zip(needs, needs[1:]) if low < high]
    assert drops
    for low, high in drops:
        for budget in (low - 1, low, (low + high)//2, high - 1, high):
            assert largest_batch(c, budget, **how) == max(n for n, need in enumerate(needs, 1) if need <= budget)


# The peak of a step

def draw_step(seed):
    "A config, a batch and a way of training, from few tokens for a parameter to many"
    pick = random.Random(seed).choice
    heads, D, T = pick((1, 2, 4, 6)), pick((24, 48, 96)), pick((1, 4, 16, 64, 128))
    c = ModelConfig(vocab_size=pick((20, 64, 257, 1000, 4096)), context_length=T, d_model=D, num_layers=pick((1, 2, 3, 5)), num_heads=heads,
                    num_kv_heads=pick([None] + [g for g in (1, 2, 3) if heads % g == 0]), head_dim=pick((4, 8, 16, None)), window=pick((None, None, 5, 40)),
                    d_ff=pick((None, None, D, 6*D, D//2)), qk_norm=pick((False, True)), bias=pick((False, True)), tie_embeddings=pick((False, True)),
                    scale_embeddings=pick((False, True)), z_loss=pick((0., .001)), **{n: pick(words) for n, words in WORDS.items()})
    how = {n: pick(ways) for n, ways in HOW.items()} | dict(optimizer=pick(("adamw", "muon")), grad_accum_steps=pick((1, 1, 2)))
    return c, max(1, pick((10, 100, 300, 1000, 2500))//T), T - pick((0, 0, T//3)), how


def live_bytes(c, B, T, how, kernels="torch"):
    "Bytes alive after each operation of a step of the course's engine, the second one"
    parts = how["grad_accum_steps"]
    engine = TorchEngine(c, TrainConfig(dtype=how["dtype"], recompute=how["recompute"], optimizer=how["optimizer"], device="cpu", kernels=kernels))
    if how["logits"]: engine.loss = lambda ids, targets: cross_entropy(engine.model(ids), targets)
    batches = [tuple(torch.zeros(B, T, dtype=torch.int64) for _ in range(2)) for _ in range(parts)]
    def step():
        with kernel(how):
            for i, batch in enumerate(batches): engine.forward_backward(batch, 1/parts, i == parts - 1)
        clip_grad_norm(engine.model.parameters(), 1.)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    step()
    state = [t for s in engine.optimizer.state.values() for t in s.values() if torch.is_tensor(t)]
    with MemoryTimeline(*engine.model.parameters(), *engine.model.buffers(), *state, *(t for batch in batches for t in batch)) as line: step()
    return line.history


def bytes_in(phase): return sum(n for part, n in phase.items() if part != "phase")

def too_low_or_high(steps, peaks):
    "Those whose need is below the measured peak, or more than 3 % above"
    return [(case, sum(training_bytes(*case[:3], **case[3]).values()), peak) for case, peak in zip(steps, peaks)
            if not peak <= sum(training_bytes(*case[:3], **case[3]).values()) <= 1.03*peak]


STEPS = [draw_step(seed) for seed in range(200)]
FEW = 40
PLAIN = dict(dtype="float32", attention="fused", recompute=False, logits=False, optimizer="adamw", grad_accum_steps=1)
CROWDED = [(ModelConfig(vocab_size=512, context_length=128, d_model=64, num_layers=2, num_heads=4), 256, 128, PLAIN),
           (ModelConfig(vocab_size=512, context_length=256, d_model=128, num_layers=3, num_heads=4, ffn="gelu"), 32, 256, PLAIN | dict(dtype="bfloat16", attention="explicit"))]


@pytest.fixture(scope="module")
def histories(): return [live_bytes(*case) for case in STEPS[:FEW]]


def test_a_need_is_the_measured_peak(histories):
    assert not too_low_or_high(STEPS[:FEW], list(map(max, histories)))


def test_matrices_with_a_rate_of_their_own_are_updated_alone():
    case = ModelConfig(vocab_size=1000, context_length=16, d_model=96, num_layers=3, num_heads=2, mup_base_width=24), 1, 8, PLAIN
    assert peak_phase(*case[:3], **PLAIN)["phase"] == "optimizer"
    assert not too_low_or_high([case], [max(live_bytes(*case))])


def test_the_fused_kernels_save_no_more():
    """A rotation saves nothing of its input, and a norm no scale: so the need of the readable layers serves, but for half a per cent.
    oneDNN copies a factor that lies transposed, and a weight's gradient before it is added; of the head's, 1024 rows at a time."""
    cases = [case for case in STEPS[:FEW] if case[3]["dtype"] == "float32"]
    def copies(c, tokens):
        rows = min(c.vocab_size, 1024)
        return 4*(2*c.d_model*max(rows, c.ffn_size, c.num_heads*c.head_size) + tokens*max(rows, c.d_model)) if vectors_idle() else 0
    over = [(case, max(live_bytes(*case, kernels="fused")) - copies(case[0], min(case[1]*case[2], 2**21//case[0].vocab_size)) - 1.005*sum(training_bytes(*case[:3], **case[3]).values())) for case in cases]
    assert len(cases) > 10 and not [(case, n) for case, n in over if n > 0]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("B, optimizer_decides", [(1, True), (200, False)])
def test_the_need_on_a_gpu(monkeypatch, B, optimizer_decides, optimizer):
    "There the loss takes more tokens at a time and AdamW no room: done so on the processor, it is counted so"
    c, how = ModelConfig(vocab_size=4096, context_length=16, d_model=32, num_layers=1, num_heads=2, norm="layernorm"), PLAIN | dict(optimizer=optimizer)
    on_cpu = sum(training_bytes(c, B, **how).values())
    monkeypatch.setattr(optim_torch, "on_one_device", lambda params: True)
    monkeypatch.setattr(TransformerLM, "loss", lambda self, ids, targets: linear_cross_entropy(self.hidden_states(ids), self.lm_head.weight, targets,
                                                                                              tokens=layers_torch._tokens_at_a_time("cuda", targets.numel(), c.vocab_size)))
    assert not too_low_or_high([(c, B, 16, how | dict(device="cuda"))], [max(live_bytes(c, B, 16, how))])
    assert (sum(training_bytes(c, B, **how, device="cuda").values()) < on_cpu) == optimizer_decides
    half = [sum(training_bytes(c, B, dtype=d, device="cuda").values()) for d in ("bfloat16", "float16")]
    assert half[0] == half[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gpu_keeps_of_a_norm_what_layernorm_keeps(dtype):
    "Its kernel for RMSNorm saves the rows and one number a row, that for LayerNorm two: nothing else differs, and no bias is there"
    rms = ModelConfig(vocab_size=97, context_length=24, d_model=32, num_layers=3, num_heads=2)
    def kept(c, device):
        r, first, blocks, after = step_operations(c, 4, None, dtype, "fused", False, device)
        return sum(op.kept for block in blocks for op in block) + after[0].kept
    layer, norms = replace(rms, norm="layernorm"), 2*3 + 1
    assert kept(layer, "cuda") - kept(rms, "cuda") == norms*4*4*24
    assert kept(rms, "cpu") - kept(rms, "cuda") == norms*4*4*24*32 and kept(layer, "cpu") == kept(layer, "cuda")
    heads = [kept(replace(rms, qk_norm=True), d) - kept(rms, d) for d in ("cpu", "cuda")]
    assert heads[0] - heads[1] == 3*2*4*4*24*32


@pytest.mark.slow
def test_a_need_is_the_measured_peak_for_all_cases():
    for name, words in WORDS.items(): assert {getattr(c, name) for c, *_ in STEPS} == set(words)
    rest = STEPS[FEW:] + CROWDED
    assert not too_low_or_high(rest, [max(live_bytes(*case)) for case in rest])


def test_peaks_lie_in_many_places():
    places = Counter(peak_phase(*case[:3], **case[3])["phase"].split(": ")[-1] for case in STEPS)
    assert len(places) > 12 and max(places.values()) < .4*len(STEPS), places


EXACT = [(c, max(1, 60//T), T, PLAIN | {n: how[n] for n in ("attention", "logits")}) for c, _, T, how in STEPS[:FEW] if c.norm != "none"]


@pytest.fixture(scope="module")
def exact(): return [live_bytes(*case) for case in EXACT]


def unmet(exact):
    "Phases that don't turn up in the history of a step in float32, in order and to the single numbers"
    for (c, B, T, how), history in zip(EXACT, exact):
        at = 0
        for phase in training_phases(c, B, T, **how)[:-1]:
            most = bytes_in(phase)
            found = next((i for i in range(at, len(history)) if most - 64 <= history[i] <= most), None)
            if found is None: yield phase["phase"], c
            else: at = found


def test_each_phase_turns_up(exact): assert not list(unmet(exact))


@pytest.mark.parametrize("field", ["backward", "forward", "weights", "copies"])
def test_a_wrong_number_of_an_operation_is_found(histories, exact, monkeypatch, field):
    "A tenth more or less, in each operation by itself. Gains weigh too little to be seen"
    right, peaks = activations.step_operations, list(map(max, histories))
    names = {op.name for c, B, T, how in STEPS for x in right(c, B, T, how["dtype"], how["attention"], how["logits"])[1:]
             for op in every(x) if getattr(op, field)}
    if field == "weights": names -= {name for name in names if "norm" in name} | {"embeddings"}     # The table's come last
    for name in sorted(names):
        for factor in (.9, 1.1)[:1 if field == "copies" else 2]:
            wrong = lambda op: op._replace(**{field: int(factor*getattr(op, field))}) if op.name == name else op
            monkeypatch.setattr(memory, "step_operations", changed(right, wrong))
            assert any(unmet(exact)) or too_low_or_high(STEPS[:FEW], peaks), (name, factor)


def test_more_than_one_way_to_be_counted():
    shared = torch.nn.Linear(4, 4, bias=False)
    model = torch.nn.ModuleDict(dict(a=shared, b=shared, c=torch.nn.Linear(4, 4, bias=False), table=torch.nn.Embedding(3, 4)))
    assert vars(count_parameters(model)) == dict(stored=16*3 + 12, unique=16*2 + 12, non_embedding=32, matmul=32, active=16*2 + 12)
    rows = parameter_table(model).rows
    assert [r["parameters"] for r in rows] == [16, 0, 16, 12, 44] and rows[-1]["tensors"] == 3 and "shared" in rows[1]["shape"]
    assert [r["parameters"] for r in parameter_tree(model).rows] == [44, 16, 0, 16, 12]
    *rows, total = parameter_table(torch.nn.ModuleDict(dict(a=torch.nn.ModuleList([shared]*3)))).rows                # one row of equal names
    assert rows[0]["shape"] == "4 × 4, shared" and sum(r["tensors"] for r in rows) == total["tensors"] == 1


def test_a_head_is_a_head_whatever_its_name():
    table = torch.nn.Embedding(10, 4)
    model = torch.nn.ModuleDict(dict(embed_in=table, again=table, embed_out=torch.nn.Linear(4, 10, bias=False)))
    for counted in (model, {f"{name}.weight": m.weight for name, m in model.items() if name != "again"}):
        assert (count_parameters(counted).non_embedding, count_parameters(counted).matmul) == (40, 40)


def test_numbers_that_stand_on_their_own():
    c = ModelConfig(context_length=9, d_model=32, num_heads=4)
    assert [tensors.dtype_bytes(n) for n in ("float64", "float32", "bfloat16", "float16", "float8", "float8_e5m2", "int8")] == [8, 4, 2, 2, 1, 1, 1]
    assert training_flops(c, causal=True)["forward"] == sum(forward_flops(c, causal=True).values()) < training_flops(c)["forward"]
    assert forward_flops(c, past=6) == forward_flops(c, 1, 3, past=6)
    assert largest_batch(c, 10**8, 3) > largest_batch(c, 10**8) > 0
    for value, right in ((lambda t: 2 - t, -2), (lambda t: 2/t, .5), (lambda t: 3*t, 12), (lambda t: t - 1, 3), (lambda t: t**2, 16), (lambda t: -t, -4)):
        assert value(Counted(4., Counter())).value == right
    assert activation_bytes(c, np.int32(2)) == activation_bytes(c, 2) and attention_pairs(np.int64(5)) == 15


def test_memory_of_dead_tensors_is_not_counted_twice():
    "Storages that come and go while autograd keeps others"
    w = torch.nn.Parameter(torch.ones(4, 4))
    with saved_tensors() as kept:
        for _ in range(50): (torch.ones(4, 4)*1.)@w
    assert len(kept) == 50


def test_instruments_leave_nothing_behind():
    model = TransformerLM(CASES[0][0])
    with pytest.raises(ValueError), saved_tensors(model): model(torch.tensor(3))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    with pytest.raises(ValueError), MemoryTimeline(): raise ValueError
    with pytest.raises(ValueError), flop_counter(): raise ValueError
    assert torch.utils._python_dispatch._len_torch_dispatch_stack() == 0


# What can't be counted, or makes no sense, is refused

def test_an_attention_that_cannot_be_counted_is_refused():
    library = torch.library.Library("lmcourse_test", "DEF")
    library.define("my_attention(Tensor x) -> Tensor")
    library.impl("my_attention", lambda x: x.clone(), "CPU")
    with pytest.raises(NotImplementedError, match="my_attention can't be counted"), flop_counter(): torch.ops.lmcourse_test.my_attention(torch.ones(2))
    library._destroy()
    with pytest.raises(NotImplementedError, match="aten.dot can't be counted"), flop_counter(): torch.ones(3)@torch.ones(3)
    with flop_counter() as counter, onednn_products(True if torch.backends.mkldnn.is_available() else None): torch.ones(3, 4)@torch.ones(4, 5)
    assert counter.get_total_flops() == 120


def test_products_of_onednn_count_as_torchs():
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"): pytest.skip("this torch has no oneDNN")
    counts = []
    for layer in (torch.nn.Linear(5, 3, bias=False), OneDNNLinear(5, 3)):
        with flop_counter() as counter: layer(torch.randn(2, 4, 5, requires_grad=True)).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts == [3*2*8*5*3]*2


@pytest.mark.parametrize("idle", [False, True])
def test_a_step_with_the_fused_kernels_counts_the_same_by_either_library(idle, monkeypatch):
    "Torch's own products are added to a matrix in place"
    from lmcourse.architecture import fused, fused_attention, onednn
    from lmcourse.architecture.transformer_torch import TransformerLM, named_parts
    if not (compiles() and (onednn._can_replace_products() or not idle)): pytest.skip("nothing is compiled here, or this torch has no oneDNN")
    for module in (onednn, fused, fused_attention): monkeypatch.setattr(module, "vectors_idle", lambda: idle)
    c, ids = ModelConfig(vocab_size=31, context_length=32, d_model=32, num_layers=1, num_heads=1), torch.zeros(1, 32, dtype=torch.int64)
    with flop_counter() as counter: TransformerLM(c, parts=named_parts(c, kernels="fused")).loss(ids, ids).backward()
    assert counter.get_total_flops() == sum(training_flops(c, 1, fused=True).values())


@pytest.mark.parametrize("f", [torch.linalg.inv, torch.linalg.qr, torch.linalg.lu_factor, torch.linalg.ldl_factor, torch.linalg.det, torch.linalg.slogdet,
    torch.matrix_exp, torch.pdist, torch.linalg.pinv, torch.linalg.eigh, lambda x: torch.cdist(x.repeat(10, 1), x.repeat(10, 1)), lambda x: torch.linalg.lstsq(x, x), lambda x: torch.ormqr(x, torch.ones(3), x)])
def test_solvers_and_distances_are_refused(f):
    with pytest.raises(NotImplementedError, match="can't be counted"), flop_counter(): f(torch.eye(3))


def scaled(): # A product in 8 bits
    a, scale = torch.ones(16, 32).to(torch.float8_e4m3fn), (torch.ones(()), torch.nn.functional.ScalingType.TensorWise)
    return torch.nn.functional.scaled_mm(a, a.T, *scale, *scale, output_dtype=torch.bfloat16)


@pytest.mark.parametrize("name, f", [("_scaled_mm_v2", scaled), ("_addmm_activation", lambda: torch._addmm_activation(torch.ones(2), torch.ones(3, 4), torch.ones(4, 2)))])
def test_a_product_whose_name_goes_on_is_refused(name, f):
    with pytest.raises(NotImplementedError, match=f"{name} can't be counted"), flop_counter(): f()


def test_what_only_sounds_like_a_product_counts_as_zero():
    normed = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, 5))
    with flop_counter() as counter:
        normed(torch.ones(2, 4)).sum().backward()
        for mode, axes in (("linear", 1), ("bilinear", 2), ("trilinear", 3)):
            torch.nn.functional.interpolate(torch.ones(1, 1, *[3]*axes, requires_grad=True), scale_factor=2, mode=mode).sum().backward()
    assert counter.get_total_flops() == 2*2*4*5*2


@pytest.mark.parametrize("call, words", [
    (lambda c: forward_flops(c, 0), "batch_size = 0, expected 1 or more"),
    (lambda c: forward_flops(c, 1, past=-1), "past = -1, expected 0 or more"),
    (lambda c: forward_flops(c, 1, 0), "context_length = 0, expected 1 or more"),
    (lambda c: forward_flops(c, 1, 3, past=7), "context_length = 10, but the model's is 9"),
    (lambda c: training_flops(c, 1, 10), "context_length = 10, but the model's is 9"),
    (lambda c: activation_bytes(c, -2), "batch_size = -2, expected 1 or more"),
    (lambda c: activation_bytes(c, 1, dtype="float8"), "unknown dtype of the products 'float8'"),
    (lambda c: training_bytes(c, 1, device="tpu"), "unknown device 'tpu'"),
    (lambda c: activation_bytes(c, 1, attention="flash"), "unknown attention 'flash'"),
    (lambda c: training_bytes(c, 1, optimizer="adam"), "unknown optimizer 'adam': did you mean 'adamw'"),
    (lambda c: training_phases(c, 1, grad_accum_steps=0), "grad_accum_steps = 0, expected 1 or more"),
    (lambda c: kv_cache_bytes(c, 1, dtype="float"), "unknown dtype 'float'"),
    (lambda c: largest_batch(c, 0), "memory_bytes = 0, expected more than 0"),
    (lambda c: largest_batch(c, -1.), "memory_bytes = -1.0, expected more than 0"),
    (lambda c: largest_batch(c, float("inf")), "memory_bytes = inf, expected more than 0"),
    (lambda c: forward_flops(c, past=9), "past = 9, but the model's context_length is 9"),
    (lambda c: attention_pairs(-3), "num_queries = -3, expected 1 or more"),
    (lambda c: attention_pairs(5, 0, -2), "window = -2, expected 1 or more"),
    (lambda c: flops.matmul_flops(-1, 2, 3), "m = -1, expected 1 or more"),
    (lambda c: adamw_flops(-1), "parameters = -1, expected 0 or more"),
    (lambda c: ModelConfig(num_heads=7), "d_model = 512 is not a multiple of num_heads = 7"),
])
def test_nonsense_is_refused(call, words):
    with pytest.raises(ValueError, match=words): call(ModelConfig(context_length=9, d_model=32, num_heads=4))


@pytest.mark.parametrize("call, words", [
    (lambda c: activation_bytes(c, 1.), "batch_size = 1.0, expected a whole number"),
    (lambda c: forward_flops(c, True), "batch_size = True, expected a whole number"),
    (lambda c: kv_cache_bytes(c, 1, "9"), "context_length = '9', expected a whole number"),
    (lambda c: adamw_flops(1.5), "parameters = 1.5, expected a whole number"),
    (lambda c: forward_flops(c, past=True), "past = True, expected a whole number"),
    (lambda c: forward_flops("gpt2-xl"), "a str"),
    (lambda c: count_parameters("gpt2-small"), "parameters of a str: expected a ModelConfig, a torch module or a dict"),
])
def test_other_types_are_refused(call, words):
    with pytest.raises(TypeError, match=words): call(ModelConfig(context_length=9, d_model=32, num_heads=4))
