"Any list of jobs that doesn't deadlock gives the gradients of one process, at the times of the simulator."
import copy
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from lmcourse.architecture.transformer_torch import TransformerLM
from lmcourse.parallelism.pipeline import Pipeline, stage_layers
from lmcourse.parallelism.ranks import Network
from lmcourse.parallelism.schedules import (Job, bubble, bubble_formula, gpipe, in_flight, interleaved, one_forward_one_backward, simulate, stage_ranks, zero_bubble,
                                            zero_bubble_v)
from lmcourse.tools.config import ModelConfig


@given(st.integers(1, 9), st.integers(1, 20))
def test_zero_bubble_keeps_its_two_promises(p, m):
    plan = zero_bubble(p, m)
    assert sorted(job for jobs in plan for job in jobs) == sorted(Job(k, i, s) for k in "FBW" for i in range(m) for s in range(p))
    assert in_flight(plan, "W") == [min(p, m)]*p and in_flight(plan) == [min(p - r, m) for r in range(p)]
    if m >= p: assert bubble(simulate(plan, dict(F=1., B=1., W=1.))) == pytest.approx(bubble_formula("zero-bubble", p, m), abs=1e-12)
    else:
        with pytest.raises(ValueError, match=f"{m} microbatches for {p} ranks, expected at least {p}"): bubble_formula("zero-bubble", p, m)


@given(st.integers(1, 9), st.integers(1, 24))
def test_on_a_v_no_rank_pauses_and_all_hold_as_much_as_the_first_of_1f1b(p, m):
    plan, even = zero_bubble_v(p, m), dict(F=.5, B=.5, W=.5)
    assert sorted(job for jobs in plan for job in jobs) == sorted(Job(k, i, s) for k in "FBW" for i in range(m) for s in range(2*p))
    assert stage_ranks(plan) == {s: min(s, 2*p - 1 - s) for s in range(2*p)} and max(in_flight(plan, "W")) <= 2*p
    done = simulate(plan, even)
    if m < 2*p - 1:
        with pytest.raises(ValueError, match=f"{m} microbatches for {p} ranks, expected at least {2*p - 1} for zero-bubble-v"): bubble_formula("zero-bubble-v", p, m)
        return
    assert bubble(done) == pytest.approx(bubble_formula("zero-bubble-v", p, m), abs=1e-12) and in_flight(plan, "W") == [2*p]*p
    assert all(a[2] == b[1] for jobs in done for a, b in zip(jobs, jobs[1:]))


@pytest.mark.parametrize("p", [1, 2, 3, 4, 7])
def test_the_v_is_the_one_of_torch(p):
    "In the order of every action, also with fewer microbatches than a warm-up takes."
    torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    ends = [SimpleNamespace(stage_index=s, num_stages=2*p, group_rank=0, group_size=p, is_first=not s, is_last=s > 0, has_backward=True, group=None, device="cpu",
                            submod=torch.nn.Identity()) for s in (0, 2*p - 1)]
    for m in (1, 2, p, 2*p - 1, 2*p, 17):
        order = torch_schedules.ScheduleZBVZeroBubble(ends, m, loss_fn=torch.sum).pipeline_order
        theirs = [[(a.computation_type.value, a.microbatch_index, a.stage_index) for a in order[rank] if a] for rank in range(p)]
        assert [[("I" if kind == "B" else kind, i, s) for kind, i, s in jobs] for jobs in zero_bubble_v(p, m)] == theirs


def test_sending_takes_time_only_between_ranks_and_a_stage_has_one_rank():
    plan = [[Job("F", 0, 0), Job("F", 0, 3)], [Job("F", 0, 1), Job("F", 0, 2)]]
    assert [end for jobs in simulate(plan, send_s=10.) for *_, end in jobs] == [1., 24., 12., 13.]
    with pytest.raises(ValueError, match=r"stage 1 on ranks 0 and 1, expected one rank for each stage"):
        simulate([[Job("F", 0, 0), Job("B", 0, 1), Job("B", 0, 0)], [Job("F", 0, 1)]])


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
    plan = data.draw(st.sampled_from([gpipe(p, m), one_forward_one_backward(p, m), zero_bubble(p, m), zero_bubble_v(p, m), interleaved(p, p, 2)]))
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
