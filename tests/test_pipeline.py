"Any list of jobs that doesn't deadlock gives the gradients of one process, at the times of the simulator."
import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from lmcourse.architecture.transformer_torch import TransformerLM
from lmcourse.parallelism.pipeline import Pipeline, stage_layers
from lmcourse.parallelism.ranks import Network
from lmcourse.parallelism.schedules import Job, bubble, bubble_formula, gpipe, in_flight, interleaved, one_forward_one_backward, simulate, zero_bubble
from lmcourse.tools.config import ModelConfig


@given(st.integers(1, 9), st.integers(1, 20))
def test_zero_bubble_keeps_its_two_promises(p, m):
    plan = zero_bubble(p, m)
    assert sorted(job for jobs in plan for job in jobs) == sorted(Job(k, i, s) for k in "FBW" for i in range(m) for s in range(p))
    assert in_flight(plan, "W") == [min(p, m)]*p and in_flight(plan) == [min(p - r, m) for r in range(p)]
    if m >= p: assert bubble(simulate(plan, dict(F=1., B=1., W=1.))) == pytest.approx(bubble_formula("zero-bubble", p, m), abs=1e-12)
    else:
        with pytest.raises(ValueError, match=f"{m} microbatches for {p} ranks, expected at least {p}"): bubble_formula("zero-bubble", p, m)


def test_layers_are_dealt_out_in_order():
    assert [list(l) for l in stage_layers(5, 3)] == [[0, 1], [2, 3], [4]]
    for stages in (-1, 0, 3):
        with pytest.raises(ValueError, match=f"2 layers for {stages} stages"): stage_layers(2, stages)


@pytest.mark.parametrize("arguments, words", [(("interleaved", 4, 6, 2), "6 microbatches for 4 ranks: interleaving needs a multiple, 4 or 8"), (("1f1b", 0, 4), "0 ranks"), (("gpipe", 4, 0), "0 microbatches"), (("1f1b", 4, 8, 0), "0 chunks")])
def test_no_bubble_of_schedules_that_do_not_exist(arguments, words):
    with pytest.raises(ValueError, match=words): bubble_formula(*arguments)


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_any_valid_order_of_jobs_gives_the_same_gradients(data):
    p, m = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    plan = data.draw(st.sampled_from([gpipe(p, m), one_forward_one_backward(p, m), zero_bubble(p, m), interleaved(p, p, 2)]))
    model = TransformerLM(ModelConfig(vocab_size=20, context_length=6, d_model=8, num_layers=6, num_heads=2, d_ff=9, tie_embeddings=data.draw(st.booleans())), dtype=torch.float64)
    batch = torch.randint(20, (5, 7), generator=torch.Generator().manual_seed(p*m))
    ids, targets = batch[:, :-1], batch[:, 1:].clone()
    targets[-1] = -100                                  # A microbatch without targets
    def work(port):
        pipeline = Pipeline(copy.deepcopy(model), port, plan, dict(F=2., B=3., W=1.))
        return pipeline.step(ids, targets), pipeline.ran, {n: q.grad for n, q in pipeline.model.named_parameters() if q.grad is not None}
    found = Network(p).run(work)
    loss = model.loss(ids, targets)
    loss.backward()
    assert sum(share for share, *_ in found) == pytest.approx(loss.item(), rel=1e-12)
    assert [ran for _, ran, _ in found] == simulate(plan, dict(F=2., B=3., W=1.))
    right = {n: q.grad for n, q in model.named_parameters()}
    assert {n for *_, grads in found for n in grads} == right.keys()
    for *_, grads in found:
        for n, g in grads.items(): assert torch.allclose(g, right[n], rtol=1e-11, atol=1e-14), n


def test_a_plan_in_which_ranks_wait_for_each_other_is_named_by_simulator_and_network():
    plan = [[Job("F", 0, 0), Job("B", 0, 0), Job("F", 1, 0), Job("B", 1, 0)], [Job("F", 0, 1), Job("F", 1, 1), Job("B", 0, 1), Job("B", 1, 1)]]
    with pytest.raises(ValueError, match="the ranks wait for each other: rank 0 can't run B0@0 before B0@1"): simulate(plan)
    model = TransformerLM(ModelConfig(vocab_size=9, context_length=4, d_model=4, num_layers=2, num_heads=1))
    ids = torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(RuntimeError, match="deadlock: rank 0 waits for rank 1, rank 1 waits for rank 0"):
        Network(2).run(lambda port: Pipeline(copy.deepcopy(model), port, plan).step(ids, ids))
    with pytest.raises(ValueError, match="none of the 6 targets counts: all are -100"):
        Network(2).run(lambda port: Pipeline(copy.deepcopy(model), port, gpipe(2, 2)).step(ids, ids - 100))


@pytest.mark.parametrize("zeroed", [True, False])
def test_each_step_returns_its_own_loss_and_gradients_add_up(zeroed):
    "Also those of the tied table, which the first and the last rank exchange after each step."
    config = ModelConfig(vocab_size=20, context_length=6, d_model=8, num_layers=3, num_heads=2, d_ff=9, tie_embeddings=True)
    model = TransformerLM(config, dtype=torch.float64)
    batch = torch.randint(20, (3, 4, 7), generator=torch.Generator().manual_seed(1))
    def work(port):
        pipeline, found = Pipeline(copy.deepcopy(model), port, one_forward_one_backward(3, 4)), []
        for rows in batch:
            if zeroed: pipeline.model.zero_grad()
            found.append((pipeline.step(rows[:, :-1], rows[:, 1:]), len(pipeline.ran), pipeline.most))
        return found, {n: q.grad for n, q in pipeline.model.named_parameters() if q.grad is not None}
    found = Network(3).run(work)
    for k, rows in enumerate(batch):
        if zeroed: model.zero_grad()
        loss = model.loss(rows[:, :-1], rows[:, 1:])
        loss.backward()
        assert sum(steps[k][0] for steps, _ in found) == pytest.approx(loss.item(), rel=1e-12)
        assert [steps[k][1:] for steps, _ in found] == [(8, 3), (8, 2), (8, 1)]
    for _, grads in found:
        for n, g in grads.items(): assert torch.allclose(g, model.get_parameter(n).grad, rtol=1e-11, atol=1e-14), n


def test_a_loss_with_more_than_cross_entropy_is_rejected():
    for more in (dict(z_loss=.1), dict(num_experts=4)):
        model = TransformerLM(ModelConfig(vocab_size=9, context_length=4, d_model=4, num_layers=2, num_heads=1, **more))
        with pytest.raises(ValueError, match=f"Pipeline does not compute {[*more][0]}"):
            Network(2).run(lambda port: Pipeline(model, port, gpipe(2, 2)))
