"The engine: answers that don't depend on company, blocks that are never lost, and what is refused."
import inspect
import math
import random
from dataclasses import replace
from functools import partial

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode

from lmcourse.architecture import layers_torch
from lmcourse.architecture.transformer_torch import TransformerLM
from lmcourse.generation.generate import generate, log_probs
from lmcourse.generation.sampling import next_token_probs, sample
from lmcourse.inference import engine as engine_module
from lmcourse.inference.draft_engine import DraftEngine
from lmcourse.inference.engine import (Engine, PackedLinear, PagedModel, Request, Sequence, Waste, default_blocks, draw_tokens, replay, sample_rows,
                                       timing)
from lmcourse.inference.paged_cache import BlockPool, batched_attention, gathered_attention, paged_attention, rows_of
from lmcourse.inference.speculative import PromptLookup
from lmcourse.tools.checks import check_close, expect_error
from lmcourse.tools.config import ModelConfig

SMALL = ModelConfig(vocab_size=97, context_length=64, d_model=32, num_layers=2, num_heads=4, d_ff=64)
VARIANTS = [dict(), dict(num_kv_heads=1), dict(num_kv_heads=2, head_dim=6), dict(window=5), dict(position="learned"), dict(position="sinusoidal"),
            dict(position="none"), dict(norm="layernorm", bias=True, ffn="gelu"), dict(norm="none", ffn="relu"), dict(norm_position="post"),
            dict(norm_position="sublayer"), dict(qk_norm=True, rope_theta=1e6), dict(rope_scaling=dict(rope_type="yarn", factor=4., original_max_position_embeddings=8, attention_factor=1.5)), dict(tie_embeddings=True, scale_embeddings=True), dict(ffn="geglu"),
            dict(ffn="reglu", bias=True), dict(ffn="silu", window=1), dict(bias=True, norm="layernorm", position="learned", tie_embeddings=True)]
SETTINGS = [dict(temperature=0.), dict(), dict(temperature=.7, top_p=.9), dict(top_k=5), dict(min_p=.1), dict(repetition_penalty=1.3, temperature=.8)]
packed = pytest.mark.skipif(not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"), reason="no packed weights in this torch")


def small(dtype=torch.float64, seed=0, **changes): return TransformerLM(replace(SMALL, **changes), seed, dtype=dtype).eval()


def load(count, seed, V=97, prompts=(1, 20), answers=(1, 20), shared=0):
    rng = random.Random(seed)
    beginning = tuple(rng.randrange(V) for _ in range(20))
    def ids(): return tuple(rng.randrange(V) for _ in range(rng.randint(*prompts)))
    return [Request((beginning[:rng.randint(1, shared)] + ids() if shared and rng.random() < .7 else ids())[:30], rng.randint(*answers), seed=rng.randrange(10**6),
                    stop=(rng.randrange(V),), **SETTINGS[k % len(SETTINGS)]) for k in range(count)]


def alone(model, r): return list(generate(model, r.ids, r.max_tokens, stop=r.stop, seed=r.seed, **r.settings))


def check_pool(engine):
    "Free and used are all; a block has as many users as tables that name it; names and blocks are each other's reverse."
    pool = engine.pool
    users = [0] * len(pool.users)
    for s in engine.running:
        assert len(set(s.blocks)) == len(s.blocks) and (len(s.blocks) + s.dropped) * pool.block_size >= s.computed
        assert not s.dropped or s.dropped * pool.block_size <= s.computed - engine.window + 1      # What the window still sees is there
        for b in s.blocks: users[b] += 1
    assert users == pool.users
    assert {b for b, n in enumerate(users) if not n} == set(pool.free)
    assert {name: b for b, names in enumerate(pool.names) for name in names} == pool.blocks
    assert all(not s.blocks and not s.computed and not s.dropped for s in engine.waiting)
    assert not set(map(id, engine.waiting)) & set(map(id, engine.running)) and len(engine.running) <= engine.max_running


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_answers_are_those_of_generate_for_every_variant(changes):
    model, requests = small(**changes), load(6, 1, shared=12)
    engine = Engine(model, num_blocks=16, block_size=4, max_running=4, token_budget=9)
    answers = replay(engine, requests, [0, 0, 2, 3, 9, 9], check_pool)
    assert [s.tokens for s in answers] == [alone(model, r) for r in requests]


@pytest.mark.parametrize("seed", range(12))
def test_any_order_of_arrival_any_blocks_any_budget(seed):
    rng, model = random.Random(seed), small(num_kv_heads=2, num_layers=1)
    requests = load(14, seed, shared=20)
    truth = [alone(model, r) for r in requests]
    size = rng.choice([1, 2, 3, 4, 8, 16])
    running = rng.randint(1, 6)
    engine = Engine(model, -(-50 // size) + rng.randint(0, 20), size, running, rng.randint(running, 60), rng.random() < .8, rng.random() < .8)
    answers = replay(engine, requests, [rng.randrange(40) for _ in requests], check_pool)
    assert [s.tokens for s in answers] == truth
    assert all(s.reason == ("length" if len(s.tokens) == s.request.max_tokens else "stop") for s in answers)
    assert len(engine.pool.free) == len(engine.pool.users)


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_answers_in_one_call_of_attention_are_those_of_generate_too(changes):
    "The path of a GPU, on the CPU"
    model, requests = small(**changes), load(8, 2, shared=12)
    engine = Engine(model, num_blocks=16, block_size=4, max_running=4, token_budget=9)
    engine.paged.attend = batched_attention
    answers = replay(engine, requests, [0, 0, 2, 3, 9, 9, 9, 12], check_pool)
    assert [s.tokens for s in answers] == [alone(model, r) for r in requests]


class Asked(TorchDispatchMode):
    "Counts what makes a CPU wait for its GPU: a number that is asked for, rows that are counted, a copy to the CPU."
    def __init__(self, monkeypatch):
        super().__init__()
        self.count, self.monkeypatch = 0, monkeypatch

    def __enter__(self):
        self.monkeypatch.setattr(layers_torch, "_can_look", lambda x: False)    # Ids in range: looked at on the CPU only
        for name in ("tolist", "numpy", "cpu", "__array__"):
            self.monkeypatch.setattr(torch.Tensor, name, self.counting(getattr(torch.Tensor, name)))
        return super().__enter__()

    def counting(self, f):
        def counted(*args, **kwargs): self.count += 1; return f(*args, **kwargs)
        return counted

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        name = f.__name__.split(".")[0]
        by_mask = name in ("index", "index_put_") and any(i is not None and i.dtype == torch.bool for i in args[1])
        self.count += by_mask or name in ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "repeat_interleave", "equal")
        return f(*args, **(kwargs or {}))


def a_full_step(model, attend=batched_attention):
    "An engine with prompts and answers in the same step, and the rows of this step."
    engine = Engine(model, block_size=4, token_budget=16)
    engine.paged.attend = attend
    for n in (1, 3, 9): engine.add(Request(tuple(range(n)), 30, temperature=0.))
    for _ in range(3): engine.step()
    engine.add(Request(tuple(range(20, 29)), 5))
    engine.add(Request(tuple(range(30, 33)), 5))
    work = engine.schedule()
    assert sorted(work.values()) == [1, 1, 1, 3, 9]
    return engine, rows_of(work, 4)


@pytest.mark.parametrize("window", [None, 5])
def test_a_pass_asks_the_device_for_nothing_and_has_two_calls_of_attention_a_layer(window, monkeypatch):
    "On a GPU a number that is asked for makes the CPU wait for all work before it"
    model, calls = small(torch.float32, window=window, num_kv_heads=2), []
    F, attend = torch.nn.functional, torch.nn.functional.scaled_dot_product_attention
    engine, rows = a_full_step(model)
    want = engine.paged.forward(rows)
    watched = lambda *a, **k: (calls.append(a[0].shape), attend(*a, **k))[1]
    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    with Asked(monkeypatch) as asked: got = engine.paged.forward(rows)
    assert asked.count == 0 and torch.equal(got, want) and len(calls) == 2*model.config.num_layers
    assert calls[0][0] == 3 and calls[1][0] == 2                    # Those with one new token, and the prompts


@pytest.mark.parametrize("window", [None, 5])
def test_a_pass_runs_on_a_device_without_numbers(window):
    "Tensors of the device meta have shapes and no data, so any question for a number fails, however it is put"
    model = small(torch.float32, window=window, num_kv_heads=2)
    rows = a_full_step(model)[1]
    paged = PagedModel(model.to("meta"), 64, 4)
    assert paged.attend is batched_attention and paged.forward(rows).shape == (len(rows.wanted), 97)


def test_a_step_asks_as_often_with_six_layers_as_with_one(monkeypatch):
    found = []
    for layers in (1, 6):
        engine = a_full_step(small(torch.float32, num_layers=layers))[0]
        for s in list(engine.running): engine.end(s)
        for n in (1, 3, 9): engine.add(Request(tuple(range(n)), 3, seed=n))
        with monkeypatch.context() as m, Asked(m) as asked: engine.step()
        found.append(asked.count)
    assert found[0] == found[1] and 0 < found[0] < 6                # The tokens drawn have to come to the CPU


@pytest.mark.parametrize("window", [1, 4, 5, 9])
@pytest.mark.parametrize("attend", [paged_attention, gathered_attention, batched_attention])
def test_blocks_that_the_window_left_behind_are_free(window, attend):
    model = small(window=window)
    requests = [replace(r, max_tokens=30, stop=(), temperature=0.) for r in load(4, 7, prompts=(1, 20), shared=6)]
    most = -(-(window + 3)//4)                                      # Blocks that `window` tokens in a row can lie in
    engine, held = Engine(model, num_blocks=4*most + 16, block_size=4), []
    engine.paged.attend = attend
    def look(engine):
        check_pool(engine)
        held.extend(len(s.blocks) for s in engine.running if s.computed > len(s.request.ids))
    answers = replay(engine, requests, [0, 0, 9, 14], look)
    assert [s.tokens for s in answers] == [alone(model, r) for r in requests]
    assert held and max(held) <= most and not any(s.preempted for s in answers)
    assert len(engine.pool.free) == len(engine.pool.users)


@pytest.mark.parametrize("window", [3, 11])
@pytest.mark.parametrize("attend", [paged_attention, gathered_attention, batched_attention])
def test_a_window_with_shared_beginnings_prompts_in_pieces_and_blocks_taken_away(window, attend):
    model, rng = small(window=window, num_kv_heads=2), random.Random(window)
    beginning = tuple(rng.randrange(97) for _ in range(18))
    ends = [tuple(rng.randrange(97) for _ in range(rng.randint(1, 9))) for _ in range(8)]
    requests = [Request(beginning + e, 25, seed=k, temperature=k % 2) for k, e in enumerate(ends)]
    engine, pieces, released = Engine(model, 13, 4, max_running=5, token_budget=7), 0, 0
    engine.paged.attend, plain, forget_unseen = attend, engine.paged.forward, engine.forget_unseen
    def forward(rows):
        nonlocal pieces
        pieces += any(before and count > 1 for before, count in zip(rows.computed, rows.counts))
        return plain(rows)
    def counted(s):
        nonlocal released
        had = len(s.blocks)
        forget_unseen(s)
        released += had - len(s.blocks)
        assert s.dropped == max(0, s.computed - window + 1)//4       # All that no later token sees
    def look(engine):
        check_pool(engine)
        if engine.steps % 6 == 5 and engine.running and engine.running[-1].preempted < 2:
            engine.preempt(engine.running[-1])
    engine.paged.forward, engine.forget_unseen = forward, counted
    answers = replay(engine, requests, [0, 0, 5, 9, 9, 20, 21, 30], look)
    assert [s.tokens for s in answers] == [alone(model, r) for r in requests]
    assert engine.reused > 18 and pieces > 5 and sum(s.preempted for s in answers) > 5 and released > 50
    assert len(engine.pool.free) == len(engine.pool.users)


def test_blocks_that_run_out_are_taken_away_and_nothing_is_lost():
    model, requests = small(), load(10, 5, prompts=(5, 20), answers=(15, 20))
    engine = Engine(model, num_blocks=12, block_size=4, max_running=8)
    answers = replay(engine, requests, [0] * 10, check_pool)
    assert sum(s.preempted for s in answers) > 3 and not answers[0].preempted       # The oldest keeps what it has
    assert [s.tokens for s in answers] == [alone(model, r) for r in requests]


@packed
@pytest.mark.skipif(torch.__version__ < "2.10", reason="the last digits differ with torch 2.9")
@pytest.mark.parametrize("changes", [dict(), dict(d_model=64, num_kv_heads=2, d_ff=96, window=9), dict(norm="layernorm", bias=True, ffn="gelu", position="learned"),
                                     dict(ffn="relu", norm_position="post", qk_norm=True)], ids=str)
def test_bits_don_t_depend_on_company_pieces_or_a_second_time(changes):
    model = small(torch.float32, **changes)
    watched, others = Request(tuple(range(30)), 30, temperature=.8, seed=3, log_probs=3), load(20, 8)
    # In blocks of another size, values may be added up in other groups: without AVX-512, and in plain Python, they are
    singles = {size: Engine(model, block_size=size).run([watched])[0] for size in (2, 4, 8)}
    for seed in range(6):
        rng, order = random.Random(seed), [watched] + others
        rng.shuffle(order)
        size = rng.choice([2, 4, 8])
        single = singles[size]
        engine = Engine(model, 80//size, size, 6, rng.choice([6, 10, 64]), share=seed % 2 == 0)
        s = replay(engine, order, [rng.randrange(20) for _ in order])[order.index(watched)]
        assert s.tokens == single.tokens and s.log_probs == single.log_probs


@packed
def test_packed_rows_are_equal_in_bits_and_right():
    model = small(torch.float32, d_model=64, d_ff=160, bias=True)
    for linears in ([model.layers[0].attn.q_proj, model.layers[0].attn.k_proj], [model.layers[1].ffn.w2], [model.lm_head]):
        for l in linears:
            if l.bias is not None: l.bias.data.normal_(generator=torch.Generator().manual_seed(1))
        product, x = PackedLinear(*linears), torch.randn(40, linears[0].weight.shape[1], generator=torch.Generator().manual_seed(0))
        check_close(product(x), torch.cat([l(x) for l in linears], -1).detach(), 1e-4, 1e-5)
        assert all(torch.equal(product(x[i:i+n]), product(x)[i:i+n]) for i in range(0, 40, 7) for n in range(1, 40 - i))
        assert torch.equal(product(x[:, None]), product(x)[:, None])


def test_logits_equal_the_model_and_both_attentions_agree():
    for changes in VARIANTS:
        model = small(**changes)
        ids = [[(7*k + 3*j) % 97 for j in range(n)] for k, n in enumerate((1, 5, 11))]
        for attend in (None, gathered_attention, batched_attention):
            paged, sequences = PagedModel(model, 12, 4), [Sequence(Request(tuple(i))) for i in ids]
            paged.attend = attend or paged.attend
            free = list(range(12))
            random.Random(1).shuffle(free)
            for s in sequences: s.blocks = [free.pop() for _ in range(-(-len(s.ids) // 4))]
            sequences[2].computed = 0
            paged.forward(rows_of({sequences[2]: 6}, 4))
            sequences[2].computed = 6
            logits = paged.forward(rows_of({s: s.missing for s in sequences}, 4))
            check_close(logits.double(), torch.stack([model(torch.tensor(i))[-1] for i in ids]).detach(), 1e-5, 1e-5)


def test_what_a_request_does_not_say_is_as_in_generate():
    settings = {name: p.default for name, p in inspect.signature(next_token_probs).parameters.items() if name in Request((1,)).settings}
    assert Request((1,)).settings == settings and len(settings) == 5


def test_bfloat16_runs_and_is_near():
    model, exact = small(torch.bfloat16), small(torch.float32)
    s = Engine(model).run([Request((1, 2, 3), 5, temperature=0., log_probs=0)])[0]
    want = log_probs(exact.to(torch.bfloat16).float(), s.ids)[2:]
    check_close(torch.tensor([p for p, _ in s.log_probs]), want, 0, .1)


@pytest.mark.parametrize("temperature", [0., 1.])
@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_rejected(temperature, odd):
    logits = torch.tensor([[1., 2., 0.], [0., odd, 1.]])
    with expect_error(ValueError, "logits"): draw_tokens(logits, [Sequence(Request((1,), temperature=temperature)) for _ in range(2)])


def test_greedy_answers_with_a_penalty_are_those_of_generate():
    "The likeliest id is another one with the penalty; without it, of equal logits the lowest"
    model, ids = small(torch.float64), (5, 6, 7)
    settings = dict(temperature=0., repetition_penalty=1.8)
    plain, punished = Engine(model).run([Request(ids, 12, temperature=0.), Request(ids, 12, **settings)])
    assert punished.tokens == list(generate(model, ids, 12, **settings)) != plain.tokens
    assert draw_tokens(torch.tensor([[0., 2., 2.]]), [Sequence(Request((1,), temperature=0.))]) == [1]


@pytest.mark.cuda
def test_answers_on_a_gpu():
    model, requests = small(torch.float64), load(8, 3)
    truth = [alone(model, r) for r in requests]
    assert [s.tokens for s in Engine(model.cuda(), 40, 4).run(requests)] == truth


# Sharing

def test_one_prompt_many_answers_are_computed_once_and_copied_when_written():
    model = small()
    for length in (8, 10):
        requests = [Request(tuple(range(length)), 6, seed=k) for k in range(4)]
        engine = Engine(model, block_size=4)
        copies = []
        engine.copy = lambda old, new, copy=engine.copy: (copies.append((old, new)), copy(old, new))
        answers = replay(engine, requests, [0] * 4, check_pool)
        assert [s.tokens for s in answers] == [alone(model, r) for r in requests]
        assert engine.computed == length + 3 + 4*5 and copies


def test_a_prompt_shorter_than_a_block_is_computed_once_too():
    engine = Engine(small(), block_size=16)
    answers = replay(engine, [Request((1, 2, 3), 4, seed=k) for k in range(4)], [0]*4, check_pool)
    assert all(len(s.tokens) == 4 for s in answers) and engine.computed == 3 + 3 + 4*3      # The others compute its last token again, for its logits


def test_a_copy_needs_a_free_block_and_waits_for_it():
    model, request = small(), Request((1, 2, 3, 4, 5, 6), 3)
    answers = replay(Engine(model, num_blocks=2, block_size=4), [request]*3, [0, 1, 1], check_pool)
    assert [s.tokens for s in answers] == [alone(model, request)]*3


def test_a_beginning_is_found_again_after_its_owner_left_until_it_is_overwritten():
    model, prompt = small(), tuple(range(16))
    engine = Engine(model, num_blocks=8, block_size=4)
    engine.run([Request(prompt, 4)])
    before = engine.computed
    engine.run([Request(prompt + (50,), 1)])
    assert engine.computed == before + 1
    engine.run([Request(tuple(range(60, 90)), 3)])                  # takes all blocks
    before = engine.computed
    engine.run([Request(prompt + (50,), 1)])
    assert engine.computed == before + 17


MAKERS = dict(argvalues=[Engine, partial(DraftEngine, make_draft=partial(PromptLookup, 97, shortest=1))], ids=["alone", "with a draft"])


@pytest.mark.parametrize("make", **MAKERS)
def test_a_second_answer_to_a_prompt_does_not_pass_for_the_first(make):
    "It is written over the first one in the block where the prompt ends, so that block isn't the first answer's any longer"
    model, prompt = small(), tuple(range(10))
    engine = make(model, block_size=4)
    first, second = (engine.run([Request(prompt, 6, seed=k)])[0] for k in (1, 2))
    assert first.tokens[:2] != second.tokens[:2]
    for s in (first, second):
        again = Request(prompt + tuple(s.tokens[:4]), 6, temperature=0., log_probs=0)
        assert engine.run([again])[0].log_probs == make(model, block_size=4, share=False).run([again])[0].log_probs
        check_pool(engine)


def test_a_prompt_is_shared_while_its_answer_is_written_behind_it():
    engine, prompt = Engine(small(), block_size=4), tuple(range(10))
    replay(engine, [Request(prompt, 6, seed=k) for k in range(2)], [0, 2], check_pool)
    assert engine.computed == 10 + 1 + 2*5


@pytest.mark.parametrize("make", **MAKERS)
def test_an_error_while_tokens_are_drawn_leaves_nothing_that_can_t_go_on(make):
    model = small()
    with torch.no_grad(): model.token_embeddings.weight[7] = math.nan
    engine, good = make(model, block_size=4), Request((1, 2, 3), 5)
    s = engine.add(good)
    engine.add(Request((1, 7, 3), 5))
    with expect_error(ValueError, "logits"): engine.step()
    assert s.reason == "error" and not engine.busy and len(engine.pool.free) == len(engine.pool.users)
    assert engine.run([good])[0].reason == "length"


@pytest.mark.parametrize("make", **MAKERS)
def test_run_takes_all_requests_or_none(make):
    engine = make(small())
    with expect_error(ValueError, "id 97"): engine.run([Request((1,), 3), Request((97,), 3)])
    def fails(rows): raise MemoryError("once")
    forward, engine.paged.forward = engine.paged.forward, fails
    with expect_error(MemoryError, "once"): engine.run([Request((1,), 3)]*20)
    engine.paged.forward = forward
    assert not engine.busy and len(engine.pool.free) == len(engine.pool.users)
    with expect_error(ValueError, "zip"): replay(engine, [Request((1,), 3)]*3, [0])
    assert not engine.busy


@packed
@pytest.mark.parametrize("make", **MAKERS)
def test_a_text_that_was_computed_again_in_pieces_is_found_with_its_own_keys(make):
    model, told = small(torch.float32), 0
    for seed in range(4):
        rng = random.Random(seed)
        requests = [Request(tuple(rng.randrange(97) for _ in range(11)), 25, seed=k) for k in range(3)]
        for k in range(3):
            engine = make(model, num_blocks=9, block_size=8, max_running=3, token_budget=12)
            s = engine.run(requests)[k]
            again = Request(tuple(s.ids), 4, temperature=0., log_probs=0)
            (found,), (fresh,) = engine.run([again]), Engine(model, block_size=8).run([again])
            assert found.log_probs == fresh.log_probs
            told += s.preempted
    assert told


@pytest.mark.parametrize("make", **MAKERS)
def test_each_turn_of_a_chat_finds_all_that_the_turn_before_computed(make):
    engine, ids = make(small(), block_size=4), tuple(range(10))
    for turn in range(4):
        before = engine.reused
        s, = engine.run([Request(ids, 7)])
        assert engine.reused - before == (turn > 0) * (len(ids) - 3) // 4 * 4   # The last token drawn has no keys, two more are new
        ids = tuple(s.ids) + (50, 51)


def test_names_depend_on_everything_before():
    model = small()
    a, b = Request((1,)*4 + (9,)*4, 3), Request((2,)*4 + (9,)*4, 3)
    engine = Engine(model, block_size=4)
    assert [s.tokens for s in engine.run([a])] + [s.tokens for s in engine.run([b])] == [alone(model, a), alone(model, b)]


def test_without_sharing_everything_is_computed():
    engine = Engine(small(), block_size=4, share=False)
    engine.run([Request(tuple(range(8)), 1)] * 3)
    assert engine.computed == 24 and not engine.pool.blocks


# A machine of random steps

@pytest.mark.parametrize("seed", range(8))
def test_no_block_is_lost_whatever_is_done(seed):
    rng, model = random.Random(seed), small(num_layers=1, d_model=16, d_ff=32)
    engine, alive, done = Engine(model, rng.randint(16, 24), 4, rng.randint(1, 5), rng.randint(5, 20)), [], []
    prompts = [tuple(rng.randrange(97) for _ in range(rng.randint(1, 40))) for _ in range(6)]
    for _ in range(150):
        what = rng.random()
        if what < .35: alive.append(engine.add(Request(rng.choice(prompts)[:rng.randint(1, 40)] + tuple(rng.choices(range(97), k=rng.randint(0, 3))), rng.randint(0, 18), seed=rng.randrange(99))))
        elif what < .45 and alive: engine.end(rng.choice(alive))
        else: engine.step()
        check_pool(engine)
        done += [s for s in alive if s.reason]
        alive = [s for s in alive if not s.reason]
    while engine.busy: engine.step(); check_pool(engine)
    done += alive
    assert len(engine.pool.free) == len(engine.pool.users)
    for s in done:
        truth = alone(model, s.request)
        assert s.tokens == (truth if s.reason == "length" else truth[:len(s.tokens)])


def test_abort_frees_the_blocks_of_waiting_and_running_and_others_go_on():
    model, requests = small(), load(6, 2, prompts=(5, 9), answers=(20, 20))
    requests = [replace(r, stop=()) for r in requests]
    engine = Engine(model, block_size=4, max_running=3)
    sequences = [engine.add(r) for r in requests]
    for _ in range(4): engine.step()
    for k in (0, 5): engine.end(sequences[k]); check_pool(engine)
    engine.end(sequences[0])                                        # a second time: nothing
    while engine.busy: engine.step()
    assert [s.reason for s in sequences] == ["abort"] + ["length"]*4 + ["abort"]
    assert [s.tokens for s in sequences[1:5]] == [alone(model, r) for r in requests[1:5]] and len(sequences[0].tokens) == 4


# Log-probabilities, draws, times, waste

@pytest.mark.parametrize("budget", [3, 100])
def test_log_probs_of_prompt_and_answer(budget):
    model = small()
    r = Request((5, 6, 7, 8, 9, 10), 6, temperature=.9, log_probs=2, echo=True)
    engine = Engine(model, block_size=4, max_running=2, token_budget=budget)
    engine.run([replace(r, echo=False)])                            # its blocks may not hide the prompt's logits
    s = engine.run([r, replace(r, seed=4)])[0]
    told = s.prompt_log_probs + s.log_probs
    check_close(torch.tensor([p for p, _ in told]), log_probs(model, s.ids).float(), 1e-4, 1e-5)
    for t, (_, best) in enumerate(told):
        want = model(torch.tensor(s.ids[:t + 1]))[-1].log_softmax(-1).topk(2)
        assert list(best) == want.indices.tolist()
        check_close(torch.tensor(list(best.values())), want.values.float().detach(), 1e-4, 1e-5)


def test_a_prompt_that_was_preempted_in_its_middle_is_scored_as_alone():
    model, scored = small(), Request(tuple(range(20)), 1, log_probs=0, echo=True)
    engine = Engine(model, num_blocks=7, block_size=4, max_running=3, token_budget=4)
    s = engine.run([Request((0, 1, 2), 7), Request((5,), 2, seed=3), scored])[-1]
    assert s.preempted == 1
    want = Engine(model, max_running=1).run([scored])[0].prompt_log_probs
    check_close(torch.tensor([p for p, _ in s.prompt_log_probs]), torch.tensor([p for p, _ in want]), 1e-6)


def test_rows_are_drawn_as_sample_draws_one():
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(0))*3
    make = lambda: [torch.Generator().manual_seed(k) for k in range(7)]
    probs = next_token_probs(logits, .9, top_p=.8)
    for _ in range(3): assert sample_rows(probs, make()).tolist() == [sample(p, g).item() for p, g in zip(probs, make())]
    sequences = [Sequence(Request((1, 2), seed=k, **SETTINGS[k % 6])) for k in range(7)]
    for s in sequences: s.ids += [3, 3]
    want = [sample(next_token_probs(l, **s.request.settings, seen=[3, 3]), torch.Generator().manual_seed(s.request.seed)).item() for l, s in zip(logits, sequences)]
    assert draw_tokens(logits, sequences) == want


def test_static_batches_wait_and_continuous_ones_don_t():
    model, requests = small(), [Request((k + 1,), 20 if k % 4 == 0 else 2) for k in range(8)]
    steps = {}
    for continuous in (False, True):
        engine = Engine(model, max_running=4, continuous=continuous)
        steps[continuous] = (engine.run(requests), engine.steps)[1]
    assert steps == {False: 40, True: 22}


def test_a_long_prompt_does_not_hold_up_the_others():
    engine = Engine(small(), block_size=4, max_running=4, token_budget=8)
    short = engine.add(Request((1, 2), 30))
    engine.step()
    long = engine.add(Request(tuple(range(50)), 2))
    for _ in range(7): engine.step()
    assert len(short.tokens) == 8 and not long.tokens and long.computed == 49
    engine.step()
    assert len(short.tokens) == 9 and len(long.tokens) == 1


def test_waste_by_hand():
    engine, waste = Engine(small(), block_size=4), Waste()
    replay(engine, [Request((1, 2, 3, 4, 5), 3)], [0], waste)       # after two steps 5 and 6 tokens in 2 blocks; then it is gone
    assert (waste.held, waste.owned, waste.asked, waste.longest) == (11, 16, 14, 128)
    assert waste.shares()["owned"] == 5/16


def test_a_time_for_each_token_the_one_that_ends_the_answer_too():
    model, ids = small(), (1, 2, 3)
    first = list(generate(model, ids, 9, seed=1))
    requests = [Request(ids, 9, seed=1), Request(ids, 9, seed=1, stop=(first[4],)), *load(3, 3)]
    answers = replay(Engine(model, num_blocks=40, block_size=4), requests, [0]*5)
    for s in answers: assert len(s.times) == len(s.tokens) + (s.reason == "stop") and s.times == sorted(s.times) and s.times[0] >= s.arrival
    assert {s.reason for s in answers} == {"stop", "length"}


def test_timing_needs_tokens():
    with expect_error(ValueError, "none of 1 sequences has a token"): timing([Sequence(Request((1,)))])


# What is refused

@pytest.mark.parametrize("changes, words", [
    (dict(ids=()), "ids are empty"), (dict(ids=(97,)), "id 97"), (dict(ids=(-1,)), "id -1"), (dict(stop=(97,)), "stop: id 97"), (dict(max_tokens=-1), "max_tokens = -1"),
    (dict(max_tokens=64), "need room for 66, but the model's context_length is 64"), (dict(max_tokens=40), "need room for 42, but the room in all blocks is 40"),
    (dict(temperature=-.1), "temperature = -0.1"), (dict(temperature=float("nan")), "temperature = nan"), (dict(top_p=0.), "top_p = 0"), (dict(top_p=1.5), "top_p = 1.5"),
    (dict(top_k=0), "top_k = 0"), (dict(min_p=2.), "min_p = 2"), (dict(repetition_penalty=0.), "repetition_penalty = 0"), (dict(log_probs=-1), "log_probs = -1"), (dict(log_probs=98), "log_probs = 98"),
    (dict(seed=2**64), "seed = 18446744073709551616")])
def test_what_can_t_be_answered_is_refused_and_nothing_changes(changes, words):
    engine = Engine(small(), num_blocks=10, block_size=4)
    with expect_error(ValueError, words): engine.add(Request(**dict(ids=(1, 2, 3)) | changes))
    assert not engine.busy and len(engine.pool.free) == 10


def test_a_yes_is_no_number_of_log_probs():
    "It would fail in a step that other requests share"
    for yes in (True, False):
        with expect_error(TypeError, f"log_probs = {yes}, expected a number of tokens or None"): Engine(small()).add(Request((1,), log_probs=yes))


def test_what_just_fits_is_answered():
    model = small()
    assert len(Engine(model, num_blocks=16, block_size=4).run([Request((1, 2, 3), 62)])[0].tokens) == 62
    assert Engine(model).run([Request((1,), 0)])[0].reason == "length"
    for wrong in (dict(max_running=0), dict(max_running=5, token_budget=4), dict(block_size=0)):
        with expect_error(ValueError, "expected 1 or more"): Engine(model, **wrong)


def test_blocks_are_those_of_whole_contexts_but_fill_half_of_the_memory_at_most(monkeypatch):
    "A context of 131,072 tokens, sixteen times, is more than a machine has"
    model = small(torch.float32)
    for size, running, blocks in ((16, 16, 64), (48, 2, 4), (64, 1, 1)): assert default_blocks(model, size, running) == blocks
    block = PagedModel(model, 1, 16).cache.nbytes
    for free, blocks in ((None, 64), (200*block, 64), (21*block, 10), (0, 1)):
        monkeypatch.setattr(engine_module, "available_bytes", lambda: free)
        assert default_blocks(model, 16, 16) == blocks == len(Engine(model).pool.users)
    with expect_error(ValueError, "need room for 20, but the room in all blocks is 16"): Engine(model).add(Request((1, 2), 19))


# New weights

@torch.no_grad()
def moved(model, seed):
    g = torch.Generator().manual_seed(seed)
    for p in model.parameters(): p.mul_(1 + .2*torch.randn(p.shape, generator=g, dtype=torch.float64).to(p.dtype))


def told_as_by(model, answers): return max(abs(t[0] - w) for s in answers for t, w in zip(s.log_probs, log_probs(model, s.ids)[-len(s.tokens):].tolist()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("changes", [dict(), dict(window=5), dict(tie_embeddings=True, scale_embeddings=True), dict(norm="layernorm", bias=True, position="learned")], ids=str)
def test_after_every_load_the_engine_answers_as_the_new_model(changes, dtype):
    model = small(dtype, **changes)
    requests = [Request(tuple(range(40 + k, 64)), 10, seed=k, log_probs=0) for k in range(4)]
    engine = Engine(model, num_blocks=24, block_size=4)
    for k in range(4):
        answers = engine.run(requests)
        assert told_as_by(model, answers) < 1e-5 and [s.tokens for s in answers] == [alone(model, r) for r in requests]
        assert {v for s in answers for v in s.versions} == {k} and all(len(s.versions) == len(s.tokens) for s in answers)
        check_pool(engine)
        moved(model, k)
        assert told_as_by(model, engine.run(requests)) > .01, "without load the answers are of no model"
        engine.load(model)


def test_a_loaded_engine_has_weights_of_its_own():
    model, requests = small(torch.float32), [Request((1, 2, 3), 8, seed=3, log_probs=0)]
    engine = Engine(model)
    engine.load(model)
    before = engine.run(requests)[0]
    moved(model, 1)
    engine.pool = BlockPool(len(engine.pool.users), engine.pool.block_size)
    after = engine.run(requests)[0]
    assert after.tokens == before.tokens and after.log_probs == before.log_probs


def test_load_is_rejected_while_busy_and_for_another_kind_of_model():
    model = small()
    engine = Engine(model)
    s = engine.add(Request((1, 2), 5))
    for words in ("0 requests are running and 1 waiting", "1 requests are running and 0 waiting"):
        with pytest.raises(ValueError, match=words): engine.load(model)
        engine.step()
    engine.end(s)
    for other, words in ((small(num_layers=1), "num_layers = 1"), (small(torch.float32), "dtype = torch.float32"), (small(window=3), "window = 3")):
        with pytest.raises(ValueError, match=words): engine.load(other)
    assert engine.version == 0
    engine.load(model)
    assert engine.version == 1
