"The engine's step as a graph of our kernels: equal to the engine's own step, and on a GPU the same to the bit in any company."
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="kernels need triton: pip install 'lmcourse[kernels]'")

from kernel_models import odd_model, on_both
from lmcourse.architecture.transformer_torch import TransformerLM
from lmcourse.inference.draft_engine import DraftEngine
from lmcourse.inference.engine import Engine, PagedModel, Request, Sequence
from lmcourse.inference.paged_cache import gathered_attention, rows_of
from lmcourse.inference.kv_cache import CachedDecoder
from lmcourse.inference.speculative import DraftModel
from lmcourse.kernels import serving
from lmcourse.kernels.serving import GraphModel, SplitKLinear, paged_attention_triton, gpu_paged, splits_of, token_tables
from lmcourse.kernels.traffic import interpreted
from lmcourse.tools.checks import check_close, expect_error
from lmcourse.tools.config import ModelConfig

TINY = ModelConfig(vocab_size=60, context_length=40, d_model=32, num_layers=1, num_heads=2, d_ff=48)


@pytest.fixture(autouse=True)
def small_graphs(request, monkeypatch):
    "Interpreted, a row costs milliseconds"
    if interpreted and "product" not in request.node.name: monkeypatch.setattr(serving, "SIZES", (3, 8))


def model_of(changes, device="cpu", **how): return odd_model(replace(TINY, **changes), device, **how)


def sequences(*lengths):
    "Texts in blocks of 4 that lie anywhere, all of their tokens to be computed"
    order, made = torch.randperm(20, generator=torch.Generator().manual_seed(0)).tolist(), []
    for k, n in enumerate(lengths):
        s = Sequence(Request(tuple((7*k + 3*i) % 60 for i in range(n))))
        s.blocks = [order.pop() for _ in range(-(-n//4))]
        made.append(s)
    return made


@on_both
@pytest.mark.parametrize("changes", [
    dict(num_heads=4, num_kv_heads=2), dict(num_kv_heads=1, bias=True), dict(window=3), dict(norm="layernorm", position="learned", ffn="gelu", bias=True, tie_embeddings=True),
    dict(qk_norm=True, norm_position="post"), dict(head_dim=6, position="none", norm="none"), dict(num_layers=2, ffn="geglu", mup_base_width=16),
    dict(rope_scaling=dict(rope_type="yarn", factor=4., original_max_position_embeddings=8))], ids=str)
def test_logits_are_the_engines(device, changes):
    "Of prompts, in one piece and in two, and of a token after them, in a table that needs more than one graph"
    model = model_of(changes, device)
    own, ours = PagedModel(model, 20, 4), GraphModel(model, 20, 4)
    one, two, three, four = sequences(10, 3, 9, 2)
    for work in ({one: 6}, {one: 3, two: 3}, {one: 1}, {three: 9, four: 2}):
        rows = rows_of(work, 4)
        want = own.forward(rows)
        check_close(ours.forward(rows), want, 1e-4, 1e-4*max(1., float(want.abs().max())) if len(want) else 1.)
        for s, n in work.items(): s.computed += n
    check_close(ours.cache[:, :, :20], own.cache, 1e-4, 1e-4)
    assert not ours.done.any() and not ours.model.lm_head.done.any()


@on_both
def test_keys_that_lie_anyhow_are_written_into_their_blocks(device):
    k, v = torch.randn(2, 2, 8, 1, 3, device=device).transpose(2, 4)    # (R, G, 1, K): neighbours are of other heads
    assert k.shape == (2, 3, 1, 8) and not k[..., 0, :].is_contiguous()
    blocks, table = torch.zeros(2, 5, 3, 4, 8, device=device), torch.tensor([[0, 6, 2, 4], [0, 1, 3, 0]], device=device)
    serving.TableLayer(blocks, table).update(k, v)
    for new, written in zip((k, v), blocks):
        assert torch.equal(written[4, :, 2], new[0, :, 0]) and torch.equal(written[3, :, 1], new[1, :, 0])
    assert blocks.count_nonzero() == 2*2*3*8


@on_both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_weights_of_16_bits(device, dtype):
    "Nearly as close to the float32 model with the same weights as torch is"
    model, exact = model_of({}, device).to(dtype), model_of({}, device)
    exact.load_state_dict({k: v.float() for k, v in model.state_dict().items()})
    rows = rows_of(dict.fromkeys(sequences(5), 5), 4)
    mine, theirs, right = (kind(m, 20, 4).forward(rows) for kind, m in ((GraphModel, model), (PagedModel, model), (PagedModel, exact)))
    assert mine.dtype == torch.float32 and (mine - right).norm() < 1.5*(theirs - right).norm() < .1*right.norm()


@on_both
def test_the_engine_answers_alike(device):
    "Also when a sequence is preempted, with a draft, and after other weights were loaded"
    model, other = model_of({}, device), model_of(dict(), device)
    with torch.no_grad(): other.layers[0].ffn.w1.weight.mul_(-1)
    requests = [Request((5, 6, 5, 6), 5, temperature=0.), Request((8,), 4, seed=1), Request((9, 9, 9), 3, seed=2, log_probs=1)]
    answers = {}
    for kind in (PagedModel, GraphModel):
        engine = Engine(model, 4, 4, max_running=3, token_budget=6, paged=kind)
        found = engine.run(requests)
        assert sum(s.preempted for s in found)
        engine.load(other)
        draft = DraftEngine(model, 12, 4, make_draft=lambda: DraftModel(other, CachedDecoder), paged=kind)
        answers[kind] = [s.tokens for s in (*found, *engine.run(requests[:1]), *draft.run(requests[:1]))]
        assert draft.proposed
    assert answers[GraphModel] == answers[PagedModel] and answers[PagedModel][0] != answers[PagedModel][3]


@on_both
def test_shared_beginnings_windows_and_scored_prompts(device):
    "Blocks that are shared, copied before they are written, and dropped when the window has passed; more rows than the largest graph has"
    model = model_of(dict(window=5, num_heads=2, num_kv_heads=1), device)
    same = tuple(range(20, 31))
    requests = [Request(same, 4, seed=0), Request(same, 4, seed=1), Request((*same, 7), 3, temperature=0., log_probs=0, echo=True)]
    found = [Engine(model, 12, 3, max_running=3, token_budget=20, paged=kind).run(requests) for kind in (PagedModel, GraphModel)]
    assert [s.tokens for s in found[0]] == [s.tokens for s in found[1]]
    scores = [torch.tensor([p for p, _ in s[2].prompt_log_probs + s[2].log_probs]) for s in found]
    assert len(scores[0]) == 11 + 3
    check_close(scores[1], scores[0], 1e-4, 1e-4)


@on_both
@pytest.mark.parametrize("window", [None, 1, 70])
def test_attention_in_more_places_than_its_programs_take_at_once(device, window):
    n, g = serving.PARTS*serving.SLOTS + 9, torch.Generator().manual_seed(0)
    [s] = sequences(1)
    s.ids, s.computed, s.blocks = [1]*n, n - 2, list(range(-(-n//16)))[::-1]
    rows = rows_of({s: 2}, 16)
    keys, values = torch.randn(2, len(s.blocks), 1, 16, 8, generator=g).to(device)
    q, done = torch.randn(2, 3, 8, generator=g).to(device), torch.zeros(6, dtype=torch.int32, device=device)
    table = torch.cat((rows.ids[:, None], rows.positions[:, None], rows.tables[rows.owners]), 1).to(device)
    for _ in range(2):
        check_close(paged_attention_triton(q, keys, values, table, done, window), gathered_attention(q, keys, values, rows.to(device), window), 1e-5, 1e-5)
    assert not done.any()


@on_both
@pytest.mark.parametrize("R, D, N, bias", [(1, 40, 7, True), (16, 64, 64, False), (33, 200, 70, True), (3, 3000, 130, True)], ids=str)
def test_a_product(device, R, D, N, bias):
    linear, x = torch.nn.Linear(D, N, bias=bias).to(device), torch.randn(R, 1, D, device=device)
    ours = SplitKLinear(linear)
    with torch.no_grad():
        for _ in range(2): check_close(ours(x), linear(x), 1e-4, 1e-5*D**.5)
        both = SplitKLinear(linear, torch.nn.Linear(D, 3, bias=False).to(device))
        for gaps in (torch.randn(R, 2*D, device=device)[:, :D], torch.randn(D, R, device=device).T):
            check_close(both(gaps)[:, :N], linear(gaps), 1e-4, 1e-5*D**.5)
            check_close(both(gaps)[:, N:], gaps@both.weight[N:].T, 1e-4, 1e-5*D**.5)
    assert not ours.done.any()


@pytest.mark.parametrize("x", [torch.zeros(257, 4), torch.zeros(2, 3), torch.zeros(2, 5), torch.zeros(2, 4, dtype=torch.float64)], ids=str)
def test_what_a_product_cannot_take(x):
    with expect_error(ValueError, "expected at most 256 rows of 4, torch.float32"): SplitKLinear(torch.nn.Linear(4, 4))(x)


def test_sums_of_a_product_do_not_follow_the_default_type():
    linear = torch.nn.Linear(300, 8)
    ours, x = SplitKLinear(linear), torch.randn(3, 300)
    torch.set_default_dtype(torch.bfloat16)
    try: found = ours(x)
    finally: torch.set_default_dtype(torch.float32)
    check_close(found, linear(x).detach(), 1e-4, 1e-5)


@on_both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_product_of_16_bits_adds_up_in_float32(device, dtype):
    linear, x = torch.nn.Linear(3000, 40, bias=False, device=device, dtype=dtype), torch.randn(3, 3000, device=device).to(dtype)
    assert splits_of(40, 3000) > 1
    check_close(SplitKLinear(linear)(x).float(), torch.nn.functional.linear(x.float(), linear.weight.float()).detach(), torch.finfo(dtype).eps, 1e-4)


def test_what_attention_cannot_take():
    q, keys, table, done = torch.zeros(2, 2, 8), torch.zeros(3, 2, 4, 8), torch.zeros(2, 3, dtype=torch.int64), torch.zeros(4, dtype=torch.int32)
    for words, change in (("keys has gaps", dict(keys=torch.zeros(3, 2, 8, 4).mT)), ("tokens has gaps", dict(tokens=torch.zeros(2, 4, dtype=torch.int64)[:, :3])),
                          ("and 3 counters don't fit", dict(done=done[:3])), ("1 rows in the table", dict(tokens=table[:1])), ("3 key heads", dict.fromkeys(("keys", "values"), torch.zeros(3, 3, 4, 8))), ("keys and values differ", dict(keys=torch.zeros(4, 2, 4, 8))),
                          ("queries of 5 numbers, keys of 8", dict(q=torch.zeros(2, 2, 5))), ("position 4 of 4", dict(tokens=table + torch.tensor([0, 4, 0]))), ("block 3 of 3", dict(tokens=table + 3)), ("window = 0, expected 1 or more", dict(window=0))):
        with expect_error(ValueError, words): paged_attention_triton(**dict(q=q, keys=keys, values=keys, tokens=table, done=done) | change)


def test_programs_share_the_depth_until_there_are_enough():
    assert [splits_of(*s) for s in ((768, 768), (768, 3072), (2304, 768), (50257, 768), (1, 1), (64, 10**6))] == [12, 16, 6, 1, 1, 261]


def test_tables_are_filled_and_split():
    one, two = sequences(9, 2)
    rows = rows_of({one: 9, two: 2}, 4)
    tables = token_tables(rows, 77)
    assert [(len(t), n) for t, n in tables] == ([(8, 8), (3, 3)] if serving.SIZES == (3, 8) else [(16, 11)])
    joined = torch.cat([t[:n] for t, n in tables])
    assert joined[:, 0].tolist() == one.ids + two.ids and joined[:, 1].tolist() == [*range(9), 0, 1]
    assert joined[8].tolist() == [one.ids[8], 8, *one.blocks] and joined[10, 2:].tolist() == [*two.blocks, 0, 0]
    small, _ = token_tables(rows_of({two: 1, one: 1}, 4), 77)[0]
    assert all(row.tolist() == [0, 0, 77, 0, 0] for row in small[2:])


@pytest.mark.skipif(not interpreted, reason="on the processor")
def test_what_it_does_not_compute():
    for model, words in ((model_of(dict(num_experts=2)), "GraphModel does not compute num_experts = 2: PagedModel does"),
                         (model_of({}, dtype=torch.float64), "torch.float64: PagedModel does"), (TransformerLM(TINY, device="meta"), "on meta, expected cuda or cpu")):
        with expect_error(ValueError, words): GraphModel(model, 8, 4)
        assert gpu_paged(model) is PagedModel
    assert gpu_paged(model_of({})) is PagedModel            # Graphs are for a GPU


@pytest.mark.cuda
def test_graphs_are_chosen_on_a_gpu():
    assert gpu_paged(model_of({}, "cuda")) is GraphModel and gpu_paged(model_of(dict(num_experts=2), "cuda")) is PagedModel


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("changes", [dict(), dict(norm="layernorm", position="learned", ffn="gelu", bias=True, d_model=96, num_heads=3, d_ff=384, vocab_size=5001)], ids=str)
def test_an_answer_has_the_same_bits_in_any_company(dtype, changes):
    "Alone, among others with prompts in pieces, and computed again after it was preempted"
    model = model_of(dict(context_length=300, num_layers=3) | changes, "cuda").to(dtype)
    requests = [Request(tuple((7*i + 5*j) % 60 for j in range(1 + 11*i)), 40, temperature=0., log_probs=0) for i in range(20)]
    one = Engine(model, max_running=1, paged=GraphModel)
    alone = [one.run([r])[0] for r in requests]
    crowd = Engine(model, 400, 16, max_running=20, token_budget=100, paged=GraphModel).run(requests)
    tight = Engine(model, 30, 16, max_running=20, token_budget=37, share=False, paged=GraphModel).run(requests)
    assert sum(s.preempted for s in tight)
    for s, t, u in zip(alone, crowd, tight): assert s.log_probs == t.log_probs == u.log_probs and s.tokens == t.tokens == u.tokens
