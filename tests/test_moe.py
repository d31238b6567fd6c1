"Layers of experts: every dispatch, every kind of router and every number format; training, saving and decoding with experts; what is refused."
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings, strategies as st

from test_accounting import PLAIN, live_bytes, moments_of, run as run_counted
from lmcourse.accounting.account import account, on_device
from lmcourse.accounting.flops import flop_counter
from lmcourse.accounting.model_flops import training_flops
from lmcourse.accounting.activations import activation_bytes
from lmcourse.accounting.hardware import device
from lmcourse.accounting.memory import decode_bytes, peak_phase, training_bytes
from lmcourse.accounting.parameters import count_parameters, parameter_parts
from lmcourse.architecture.transformer_torch import TransformerLM
from lmcourse.moe.account import all_to_all_bytes
from lmcourse.moe.balance import expert_loads, watch_routes
from lmcourse.moe.experts_np import capacity, moe_backward, moe_forward, within_capacity
from lmcourse.moe.experts_torch import DISPATCHES, MoE, balance_loss_of, choose_experts, drop_late
from lmcourse.moe.router_np import best_experts, router_forward
from lmcourse.tools.checks import check_close
from lmcourse.tools.config import ModelConfig, TrainConfig
from lmcourse.training.engines import TorchEngine

SMALL = ModelConfig(vocab_size=50, context_length=24, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, num_experts=8, moe_d_ff=16)
IDS = torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(0))


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 9), st.booleans(), st.sampled_from(["softmax", "sigmoid"]), st.sampled_from([None, .5, 1., 2.]), st.integers(0, 2),
       st.integers(0, 99))
def test_every_dispatch_is_the_numpy_layer(E, k, N, norm, score, factor, shared, seed):
    k = min(k, E)
    c = ModelConfig(d_model=4, num_heads=1, num_experts=E, num_experts_per_tok=k, moe_d_ff=3, norm_topk_prob=norm and k > 1, router_score=score,
                    capacity_factor=factor, num_shared_experts=shared)
    g = torch.Generator().manual_seed(seed)
    layer, x = MoE(c, dtype=torch.float64, generator=g), torch.randn(N, 4, dtype=torch.float64, generator=g, requires_grad=True)
    params = {n: p.detach().numpy() for n, p in layer.named_parameters()}
    y, cache = moe_forward(x.detach().numpy(), params, c)
    dx, grads = moe_backward(np.cos(y), cache)
    for dispatch in DISPATCHES.values():
        layer.dispatch = dispatch
        found = torch.autograd.grad(out := layer(x), [x, *layer.parameters()], out.detach().cos())
        check_close((out, found[0]), (y, dx), 1e-9, 1e-12)
        check_close(dict(zip(params, found[1:])), grads, 1e-9, 1e-12)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 8), st.integers(1, 30), st.floats(.1, 3), st.integers(0, 99))
def test_who_is_dropped_is_what_a_loop_says(E, N, factor, seed):
    k = min(2, E)
    chosen = np.argsort(np.random.default_rng(seed).random((N, E)), -1)[:, :k]
    room, seen, slow = capacity(N, E, k, factor), np.zeros(E, int), np.zeros((N, k), bool)
    for j in range(k):
        for n in range(N): slow[n, j], seen[chosen[n, j]] = seen[chosen[n, j]] < room, seen[chosen[n, j]] + 1
    assert (within_capacity(chosen, E, room) == slow).all()
    assert ((drop_late(torch.from_numpy(chosen), E, room) >= 0).numpy() == slow).all()


def test_ties_go_to_the_lowest_expert():
    assert choose_experts(torch.zeros(3, 8), SMALL)[0].tolist() == [[0, 1]]*3 == best_experts(np.zeros((3, 8)), 2).tolist()


BAD = {"num_experts_per_tok = 9, but num_experts = 8": dict(num_experts_per_tok=9), "capacity_factor = 0.0, expected more than 0": dict(capacity_factor=0.),
       "num_experts = 0, expected more than 0": dict(num_experts=0), "the router could not learn": dict(num_experts_per_tok=1), "bias = True": dict(bias=True),
       "3 router_groups": dict(router_groups=3), "can't give 2 of 8": dict(router_groups=4, router_group_limit=5), "groups of 2 experts or more": dict(router_groups=8, router_group_limit=8),
       "expected one of softmax, sigmoid": dict(router_score="relu"), "router_aux_loss = -1.0, expected 0 or more": dict(router_aux_loss=-1.)}


def test_sigmoid_scores_that_underflow_give_weights_of_zero():
    "Without DeepSeek-V3's 1e-20 the weights would be 0/0."
    logits = torch.full((1, 3), -200.)
    config = ModelConfig(num_experts=3, num_experts_per_tok=2, router_score="sigmoid", norm_topk_prob=True)
    assert choose_experts(logits, config)[1].tolist() == [[0, 0]]
    with np.errstate(over="ignore"): chosen, weights, _ = router_forward(np.ones((1, 1), "f4"), np.full((3, 1), -200, "f4"), 2, "sigmoid")
    assert chosen.tolist() == [[0, 1]] and weights.tolist() == [[0, 0]]


@pytest.mark.parametrize("words", BAD)
def test_bad_fields_are_refused_by_name(words):
    with pytest.raises(ValueError, match=words): replace(SMALL, **BAD[words])


def test_dense_fields_change_nothing():
    "Defaults mean a dense model: old files load, and its weights are drawn as they were."
    old = {k: v for k, v in replace(SMALL, num_experts=None).to_dict().items() if "expert" not in k and "router" not in k}
    assert type(TransformerLM(ModelConfig.from_dict(old)).layers[0].ffn).__name__ == "FeedForward"
    assert [type(layer.ffn).__name__ for layer in TransformerLM(replace(SMALL, first_dense_layers=1)).layers] == ["FeedForward", "MoE"]


def test_scaled_init_reaches_the_experts():
    plain, scaled = (TransformerLM(replace(SMALL, scaled_init=s)).layers[0].ffn.experts for s in (False, True))
    check_close(scaled.w2, plain.w2/2, 1e-6)
    assert torch.equal(scaled.w1, plain.w1)


def test_an_expert_without_tokens_has_a_gradient_of_zeros():
    layer = MoE(SMALL)
    with torch.no_grad(): layer.router.weight[0] = 0
    layer.router.weight.data[1:] = torch.rand(7, 32) + 1
    layer(torch.rand(10, 32)).sum().backward()
    assert torch.equal(layer.experts.w1.grad[0], torch.zeros(16, 32)) and layer.experts.w1.grad.abs().sum() > 0


def test_loads_are_counted_and_the_watcher_leaves():
    model = TransformerLM(SMALL)
    loads = expert_loads(model, IDS)
    check_close(loads.sum(-1), torch.ones(2))
    with pytest.raises(RuntimeError), watch_routes(model) as routes: model(IDS); raise RuntimeError
    assert [routes[0][0][0].shape, "route" in vars(model.layers[0].ffn)] == [(32, 2), False]
    with watch_routes(model) as routes:                         # A watcher within a watcher
        expert_loads(model, IDS)
        model(IDS)
    assert [len(calls) for calls in routes] == [2, 2] and "route" not in vars(model.layers[0].ffn)
    with pytest.raises(ValueError, match="the model has no experts"): expert_loads(TransformerLM(replace(SMALL, num_experts=None)), IDS)


LATENT = dict(kv_lora_rank=12, num_kv_heads=None, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6)
EVERY_FIELD = dict(num_experts=4, num_experts_per_tok=3, moe_d_ff=8, num_shared_experts=1, first_dense_layers=1, router_score="sigmoid", norm_topk_prob=False, routed_scaling=2.,
                   capacity_factor=.5)


@pytest.mark.parametrize("field", EVERY_FIELD)
def test_every_field_of_experts_does_something(field):
    "The parameters are others, or the logits of the same weights."
    plain, other = TransformerLM(SMALL), TransformerLM(replace(SMALL, **{field: EVERY_FIELD[field]}))
    if [p.shape for p in plain.parameters()] != [p.shape for p in other.parameters()]: return
    other.load_state_dict(plain.state_dict())
    assert not torch.allclose(plain(IDS), other(IDS), atol=1e-4)


def test_groups_limit_where_a_token_may_go():
    layer = MoE(replace(SMALL, router_groups=4, router_group_limit=1))
    chosen, _ = layer.route(torch.randn(50, 8, generator=torch.Generator().manual_seed(0)))
    assert (chosen//2 == chosen[:, :1]//2).all()


@pytest.mark.parametrize("changes", [dict(router_aux_loss=.1), dict(router_z_loss=.1), dict(router_bias_rate=.1)], ids=str)
def test_what_balances_changes_the_gradient_or_the_bias_but_not_the_loss(changes):
    one, two = TransformerLM(SMALL), TransformerLM(replace(SMALL, **changes))
    losses = [m.loss(IDS[:, :-1], IDS[:, 1:]) for m in (one, two)]
    for loss in losses: loss.backward()
    assert losses[0] == losses[1]
    for layer in two.layers: layer.ffn.after_step()
    moved = two.layers[0].ffn.expert_bias is not None and two.layers[0].ffn.expert_bias.abs().max() > 0
    assert moved or not torch.allclose(one.layers[0].ffn.router.weight.grad, two.layers[0].ffn.router.weight.grad, atol=1e-7)


@torch.no_grad()
def crowded(factor): # A layer whose router sends nearly every token to expert 0 first
    layer = MoE(replace(SMALL, capacity_factor=factor, router_aux_loss=1., router_bias_rate=.1), generator=torch.Generator().manual_seed(0))
    layer.router.weight[0] += 1
    return layer


def test_a_capacity_does_not_hide_the_imbalance_from_what_balances():
    "Load and loss come from the router's choice, as without a capacity."
    x, found = torch.rand(64, 32, generator=torch.Generator().manual_seed(1)), []
    for factor in (None, 1.):
        layer = crowded(factor)
        (0*layer(x).sum()).backward()                                       # So only the losses have a gradient
        found.append((layer.load, layer.router.weight.grad))
    assert found[0][0][0] > 60 and (layer.route(layer.logits(x))[0] == 0).sum() == 16
    check_close(found[0], found[1])


@pytest.mark.parametrize("made", [lambda c: MoE(c, dtype=torch.bfloat16), lambda c: MoE(c).bfloat16(), lambda c: MoE(c).to(torch.bfloat16)], ids=["built", "bfloat16", "to"])
def test_the_bias_of_bfloat16_weights_moves_on(made):
    layer = made(replace(SMALL, router_bias_rate=.001))
    layer.expert_bias.fill_(.75)
    layer.load = torch.tensor([0] + [1]*7)
    layer.after_step()
    assert layer.router.weight.dtype == torch.bfloat16 and layer.expert_bias[0] > .75 > layer.expert_bias[1]
    from lmcourse.architecture.pretrained import _dtype_name
    assert _dtype_name(TransformerLM(replace(SMALL, router_bias_rate=.001), dtype=torch.bfloat16)) == "bfloat16"


def test_a_conversion_does_not_round_the_bias():
    layer = MoE(replace(SMALL, router_bias_rate=.001))
    layer.expert_bias.fill_(.123456)
    check_close(layer.half().expert_bias, torch.full((8,), .123456), 0, 0)
    assert layer.experts.w1.dtype == torch.float16


def test_the_balance_loss_of_a_sigmoid_router_is_of_its_scores():
    "DeepSeek-V3, equations 17 to 20: sigmoids, divided by their sum."
    layer, x = MoE(replace(SMALL, router_score="sigmoid", router_aux_loss=.5), generator=torch.Generator().manual_seed(0)), torch.randn(40, 32, generator=torch.Generator().manual_seed(1))
    (0*layer(x).sum()).backward()                               # So only the loss has a gradient
    logits = layer.logits(x)
    s, f = logits.sigmoid(), torch.bincount(layer.route(logits)[0].flatten(), minlength=8)/80
    expected, = torch.autograd.grad(.5*8*(f*(s/s.sum(-1, keepdim=True)).mean(0)).sum(), layer.router.weight)
    check_close(layer.router.weight.grad, expected, 1e-4, 1e-7)


def test_the_balance_loss_of_sigmoids_that_underflow_has_a_gradient_of_zero():
    logits = torch.full((3, 4), -200., requires_grad=True)
    loss = balance_loss_of(logits, torch.tensor([1, 1, 1, 0]), "sigmoid")
    assert loss.item() == 0 and torch.autograd.grad(loss, logits)[0].tolist() == [[0]*4]*3


def test_no_tokens_are_routed_to_groups():
    config = replace(SMALL, router_groups=4, router_group_limit=2)
    params = {name: p.detach().numpy() for name, p in MoE(config).named_parameters()}
    y, cache = moe_forward(np.zeros((0, 32), "f4"), params, config)
    assert y.shape == moe_backward(y, cache)[0].shape == (0, 32)


# Accounts

TOTALS = {"mixtral-8x7b": (46_702_792_704, 12_879_925_248), "qwen3-30b-a3b": (30_532_122_624, 3_353_032_704), "olmoe-1b-7b": (6_919_161_856, 1_282_017_280),
          "deepseek-v3": (671_026_404_352 + 58*256, 37_552_282_624 + 58*256)}           # And the bias of each router
VARIANTS = {"plain": {}, "shared": dict(num_shared_experts=2, first_dense_layers=1), "sigmoid": dict(router_score="sigmoid", router_bias_rate=.01, norm_topk_prob=False),
            "losses": dict(router_aux_loss=.01, router_z_loss=.01), "gelu": dict(ffn="gelu"), "reglu": dict(ffn="reglu"), "relu": dict(ffn="relu"), "latent": LATENT,
            "shared and losses": dict(num_shared_experts=2, router_aux_loss=.01), "shared and z-loss": dict(num_shared_experts=1, router_z_loss=.01),
            "latent and shared": LATENT | dict(q_lora_rank=20, num_shared_experts=1), "latent, values as long as keys": LATENT | dict(q_lora_rank=20, v_head_dim=12),
            "whole norm": dict(qk_norm=True, qk_norm_whole=True), "sigmoid and losses": dict(router_score="sigmoid", router_aux_loss=.01)}


@pytest.mark.parametrize("preset", TOTALS)
def test_totals_and_active(preset):
    found = count_parameters(ModelConfig.preset(preset))
    assert (found.unique, found.active) == TOTALS[preset]
    assert count_parameters(TransformerLM(ModelConfig.preset(preset), device="meta")) == found


@pytest.mark.parametrize("name", VARIANTS)
def test_formulas_equal_the_counts(name):
    c = replace(SMALL, **VARIANTS[name])
    model = TransformerLM(c)
    assert count_parameters(model) == count_parameters(c) and sum(parameter_parts(c).values()) == count_parameters(c).unique
    for recompute in (False, True):
        model.recompute = recompute
        for batch in (1, 2):
            ids = torch.randint(50, (batch, 17), generator=torch.Generator().manual_seed(0))
            with flop_counter() as counter: model.loss(ids[:, :-1], ids[:, 1:]).backward()
            assert counter.get_total_flops() == sum(training_flops(c, batch, 16, recompute=recompute, fused=True).values())


def attentions(c):
    "No fused kernel on a CPU takes values shorter than keys"
    return ("explicit",) if c.kv_lora_rank and c.v_head_dim < c.qk_nope_head_dim + c.qk_rope_head_dim else ("fused",)*(not c.kv_lora_rank) or ("fused", "explicit")


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_that_wait_for_the_backward_pass(name, dtype):
    c = replace(SMALL, **VARIANTS[name])
    for batch in (1, 2):
        for attention in attentions(c):
            how = dict(dtype=dtype, attention=attention, recompute=False, logits=False)
            assert run_counted(c, batch, 16, how)[1] == activation_bytes(c, batch, 16, **how)


@pytest.mark.parametrize("heads, T", [(1, 16), (4, 1)])
@pytest.mark.parametrize("attention", ["fused", "explicit"])
def test_one_head_or_one_token_is_not_copied_to_be_turned(heads, T, attention):
    c = replace(SMALL, num_experts=None, num_heads=heads, **LATENT | dict(v_head_dim=12))
    how = dict(dtype="float32", attention=attention, recompute=False, logits=False)
    assert run_counted(c, 2, T, how)[1] == activation_bytes(c, 2, T, **how)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("changes", [{}, dict(dtype="bfloat16"), dict(recompute=True)], ids=str)
def test_the_peak_of_a_step_with_experts_is_estimated_well(name, changes):
    c = replace(SMALL, **VARIANTS[name])
    how = PLAIN | changes | dict(attention=attentions(c)[0])
    need, peak = sum(training_bytes(c, 8, 24, **how).values()), max(live_bytes(c, 8, 24, how))
    assert .95*peak <= need <= 1.15*peak, (need/peak, peak_phase(c, 8, 24, **how))


@pytest.mark.parametrize("name", VARIANTS)
def test_what_optimizers_hold_for_experts(name):
    c = replace(SMALL, **VARIANTS[name])
    for optimizer in ("adamw", "muon"):
        engine = TorchEngine(c, TrainConfig(optimizer=optimizer, device="cpu"))
        for p in engine.model.parameters(): p.grad = torch.zeros_like(p)
        engine.optimizer.step()
        assert sum(t.nbytes for t in moments_of(engine.optimizer)) == training_bytes(c, 1, optimizer=optimizer)["optimizer"]


def test_experts_of_other_libraries():
    "Names and numbers as in transformers; a dict of arrays does not say how many experts a token uses"
    class Layer(torch.nn.Module):
        def __init__(self, **config):
            super().__init__()
            stacked = lambda *shape: torch.nn.Parameter(torch.zeros(shape))
            self.experts = torch.nn.ParameterDict(dict(gate_up_proj=stacked(4, 3, 16), down_proj=stacked(4, 8, 3), down_proj_bias=stacked(4, 3)))
            self.gate, self.config = torch.nn.Linear(3, 4, bias=False), SimpleNamespace(**config)
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        found = count_parameters(Layer(**{name: 4}, num_experts_per_tok=1))
        assert (found.unique, found.active, found.matmul) == (12 + 4*75, 12 + 75, 12 + 72)
    with pytest.raises(ValueError, match="a Layer with experts, but without a config that says how many"): count_parameters(Layer())
    with pytest.raises(ValueError, match="a dict with experts"): count_parameters(dict(TransformerLM(SMALL).named_parameters()))


def test_experts_that_gpus_cannot_share_equally():
    for gpus in (3, 16):
        with pytest.raises(ValueError, match=f"8 experts on {gpus} GPUs"): all_to_all_bytes(SMALL, 100, gpus)


def test_a_step_of_many_sequences_reads_more_experts():
    c = ModelConfig.preset("deepseek-v3")
    one, many = (account(c, n, 128, dtype="bfloat16") for n in (1, 64))
    read = [on_device(a, "h100")["token_seconds"]*device("h100").bytes_per_s - a["memory"]["cache"] for a in (one, many)]
    assert read == pytest.approx([2*one["parameters"]["matmul"], decode_bytes(c, 64)]) and read[1] > 15*read[0]


# Growing, drafting, deciding who can

def test_a_dense_model_grows_into_experts_with_the_same_logits():
    from lmcourse.moe.lab import upcycle
    dense = TransformerLM(replace(SMALL, num_experts=None, ffn="gelu", tie_embeddings=True))
    with torch.no_grad(): check_close(upcycle(dense, 4, 3)(IDS), dense(IDS), 1e-4, 1e-5)
    idle = dict(norm_topk_prob=False, routed_scaling=2.5, capacity_factor=.5, num_shared_experts=1, router_groups=3, router_bias_rate=.01) # Without effect in a dense model
    for fields, dtype in ((idle, torch.float64), (dict(copy_init=True, num_kv_heads=None), torch.float32)):
        dense = TransformerLM(replace(SMALL, num_experts=None, **fields), dtype=dtype)
        with torch.no_grad(): check_close(upcycle(dense, 4)(IDS), dense(IDS), 1e-4, 1e-5)


def test_two_tokens_are_no_text_for_two_losses():
    from lmcourse.moe.multi_token import NextTokenHead, two_token_loss
    model = TransformerLM(SMALL)
    for n in (1, 2):
        with pytest.raises(ValueError, match=f"ids of {n} tokens, expected 3 or more"): two_token_loss(model, NextTokenHead(model), IDS[:, :n])


def test_numpy_s_routers_name_what_does_not_fit():
    from lmcourse.moe.experts_np import expert_choice
    from lmcourse.moe.router_np import mask_groups, router_forward
    for words, f, inputs in (("room = 9, expected 1 to 6, the number of tokens", expert_choice, (np.full((6, 4), .25), 9)),
                             ("limit = 5, expected 1 to 4, the number of groups", mask_groups, (np.zeros((2, 8)), 4, 5)),
                             ("8 experts can't form 3 equal groups", mask_groups, (np.zeros((2, 8)), 3, 1))):
        with pytest.raises(ValueError, match=words): f(*inputs)
    with np.errstate(over="raise"):                             # Nothing overflows on the way to 0
        assert router_forward(np.array([[1000.]]), np.array([[-1.], [1.]]), 1, "sigmoid", False)[1] == 1
        moe_forward(np.full((1, 4), 1e3), {n: p.detach().double().numpy() for n, p in MoE(replace(SMALL, d_model=4, num_heads=1, num_kv_heads=None, router_score="sigmoid")).named_parameters()},
                    replace(SMALL, d_model=4, num_heads=1, num_kv_heads=None, router_score="sigmoid", router_groups=4, router_group_limit=2))


def test_a_second_head_drafts_and_changes_no_token():
    from lmcourse.generation.generate import generate
    from lmcourse.inference.speculative import speculate
    from lmcourse.moe.multi_token import HeadDraft, NextTokenHead
    model = TransformerLM(SMALL).eval()
    text = list(generate(model, [1, 2, 3], 12, temperature=0))
    assert list(speculate(model, HeadDraft(NextTokenHead(model)), [1, 2, 3], 12, temperature=0)) == text


@pytest.mark.parametrize("change", ["quantized", "adapters"])
def test_latent_attention_reads_a_cache_without_a_plain_matrix(change):
    from lmcourse.alignment.lora import add_lora
    from lmcourse.inference.kv_cache import CachedDecoder
    from lmcourse.inference.quantization import quantize_linears
    model = TransformerLM(replace(SMALL, num_experts=None, **LATENT | dict(kv_lora_rank=16, v_head_dim=8))).eval()
    if change == "quantized": quantize_linears(model)
    else:
        for name, p in add_lora(model, 2).named_parameters():
            if name.endswith("lora_B"): torch.nn.init.normal_(p, generator=torch.Generator().manual_seed(1))
    decoder = CachedDecoder(model)
    with torch.no_grad(): check_close(torch.cat([decoder.feed(part, all=True) for part in IDS[:1].tolist()[0:1] for part in (part[:5], part[5:6], part[6:])]), model(IDS[:1])[0], 1e-4, 1e-5)


def test_a_noisy_router_is_quiet_while_a_model_writes_and_goes_on_training():
    "A cache and the engine once wrote with the noise of training, as `generate` without a cache doesn't."
    from lmcourse.generation.generate import generate
    from lmcourse.inference.engine import Engine, Request
    from lmcourse.inference.kv_cache import CachedDecoder
    from lmcourse.moe.lab import NoisyRouter, with_routers
    model = with_routers(TransformerLM(SMALL), NoisyRouter).train()
    alone = list(generate(model, [1, 2], 16, temperature=0))
    assert alone == list(generate(model, [1, 2], 16, temperature=0, decoder=CachedDecoder)) == Engine(model).run([Request((1, 2), 16, temperature=0)])[0].tokens
    assert all(m.training for m in model.modules())


def test_who_does_not_know_experts_says_so_by_name():
    from lmcourse.architecture.pretrained import params_of
    from lmcourse.architecture.transformer_np import init_params
    from lmcourse.inference.engine import Engine
    from lmcourse.inference.fast_decoder import FastDecoder, NumpyDecoder
    from lmcourse.inference.quantization import Int8Cache, quantize_model
    experts, latent = TransformerLM(SMALL), TransformerLM(replace(SMALL, num_experts=None, **LATENT))
    for who, words in ((lambda: FastDecoder(experts), "FastDecoder does not compute num_experts = 8: CachedDecoder does"), (lambda: init_params(SMALL), "the NumPy engine does not compute"),
                       (lambda: NumpyDecoder(params_of(experts), SMALL), "NumpyDecoder does not compute num_experts = 8"), (lambda: quantize_model(experts), "quantize_linears does"),
                       (lambda: Engine(latent), "Engine does not compute kv_lora_rank = 12"), (lambda: Int8Cache(latent.config), "Int8Cache does not compute kv_lora_rank = 12"),
                       (lambda: Engine(TransformerLM(replace(SMALL, capacity_factor=1.))), "Engine does not compute capacity_factor = 1.0")):
        with pytest.raises(ValueError, match=words): who()


@pytest.mark.parametrize("kind", ["Linear", "FusedLinear", "OneDNNLinear"])
def test_a_router_in_bfloat16_multiplies_in_float32(kind):
    "Whatever class of layer a CPU gets: rounded logits would choose other experts"
    from lmcourse.architecture import onednn
    moe, x = MoE(SMALL, linear=getattr(onednn, kind)).bfloat16(), torch.randn(9, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    logits = moe.logits(x)
    assert logits.dtype == torch.float32 and not torch.equal(logits, logits.bfloat16().float())
    check_close(logits, x.float()@moe.router.weight.float().T, 1e-5, 1e-5)
