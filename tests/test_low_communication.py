"Replicas in one process, in threads with counted wires and in processes with gloo take the same steps; bytes are those of the formula."
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.nn.utils import parameters_to_vector

from lmcourse.parallelism import low_communication as lc
from lmcourse.parallelism.batch_size import new_run, run_steps, small_model
from lmcourse.parallelism.collectives import check_sent, ring_all_reduce
from lmcourse.parallelism.collectives_torch import ProcessPool
from lmcourse.parallelism.low_communication import OuterOptimizer, local_steps, low_communication_bytes, simulate_ranks
from lmcourse.parallelism.ranks import Network
from lmcourse.tools.checks import check_close
from lmcourse.training.data import TokenDataset

MODEL, RATES = small_model(16, 1, vocab_size=40, context_length=12), [.01]*7
RESULTS = Path(__file__).parent.parent/"nbs/results/low_communication.jsonl"


def data():
    rng = np.random.default_rng(0)
    return TokenDataset(rng.integers(40, size=1200).astype(np.uint16), np.arange(60)*20, dict(end_of_text=0, vocab_size=40))


def double(seed=0):
    run = new_run(MODEL, seed)
    run.model.double()
    return run


def weights(run): return parameters_to_vector(run.model.parameters()).detach()


def simulated(size, every, lr, momentum):
    runs = [double() for _ in range(size)]
    simulate_ranks([local_steps(run, data(), RATES, every, OuterOptimizer(lr, momentum), r, size, batch_size=2) for r, run in enumerate(runs)])
    assert all(torch.equal(weights(runs[0]), weights(run)) for run in runs)
    return weights(runs[0]).numpy()


CASES = [(1, 3, 1., 0.), (2, 1, 1., 0.), (2, 3, .7, .9), (3, 2, 1., .5), (4, 7, .5, 0.), (3, 100, 1., 0.)]


@pytest.mark.parametrize("size, every, lr, momentum", CASES)
def test_ranks_with_counted_wires(size, every, lr, momentum):
    "Threads of the network, whose ring adds in an order of its own"
    def rank(port):
        run = double()
        for change in local_steps(run, data(), RATES, every, OuterOptimizer(lr, momentum), port.rank, size, batch_size=2):
            ring_all_reduce(change.numpy(), port)
        return weights(run).numpy()
    net = Network(size)
    for found in net.run(rank): check_close(found, simulated(size, every, lr, momentum), 1e-12, 1e-12)
    check_sent(net, [low_communication_bytes(len(weights(double())), 7, every, size, r, 8) for r in range(size)])


def test_processes_with_gloo():
    with ProcessPool(3, lc.__name__, timeout_s=60) as pool:
        for every, lr, momentum in ((2, 1., .5), (3, .7, .9)):
            found = pool.run(lc.train_rank, MODEL, data(), RATES, every, lr, momentum, 2)
            for x in found: check_close(x, simulated(3, every, lr, momentum), 1e-12, 1e-12)


def test_alone_it_is_ordinary_training():
    run, plain = double(), double()
    simulate_ranks([local_steps(run, data(), RATES, 2, OuterOptimizer(), batch_size=3)])
    run_steps(plain, data(), RATES, batch_size=3)
    check_close(weights(run), weights(plain), 1e-12, 1e-13)


def test_with_gradient_descent_a_meeting_at_each_step_is_data_parallelism():
    "The mean of two small steps is the step of the mean gradient. With Adam it isn't."
    def sgd():
        run = double()
        run.optimizer = torch.optim.SGD(run.model.parameters(), lr=1.)
        run.config = replace(run.config, grad_clip=0.)
        return run
    for make, same in ((sgd, True), (double, False)):
        runs, whole = [make(), make()], make()
        simulate_ranks([local_steps(run, data(), RATES, 1, OuterOptimizer(), r, 2, batch_size=2) for r, run in enumerate(runs)])
        run_steps(whole, data(), RATES, batch_size=4)
        assert np.allclose(weights(runs[0]), weights(whole), rtol=1e-10, atol=1e-12) == same


def test_ranks_may_share_the_outer_optimizer_that_they_are_given():
    found = []
    for outers in ([OuterOptimizer(.7, .9)]*2, [OuterOptimizer(.7, .9), OuterOptimizer(.7, .9)]):
        runs = [double(), double()]
        simulate_ranks([local_steps(run, data(), RATES, 2, outer, r, 2, batch_size=2) for r, (run, outer) in enumerate(zip(runs, outers))])
        found.append(weights(runs[0]))
        assert np.array_equal(weights(runs[0]), weights(runs[1]))
    assert np.array_equal(*found)


def test_outer_steps_by_hand():
    outer, start = OuterOptimizer(.5, .8), torch.tensor([1.])
    one = outer.step(start, torch.tensor([.1]))                                 # Velocity .1, and .1 + .8*.1 = .18
    two = outer.step(one, torch.tensor([.2]))                                   # Velocity .28, and .2 + .8*.28 = .424
    check_close([one.item(), two.item()], [1 - .09, 1 - .09 - .212], 1e-6)
    sgd = torch.optim.SGD([p := torch.nn.Parameter(torch.tensor([1.]))], lr=.5, momentum=.8, nesterov=True)
    for g in (.1, .2):
        p.grad = torch.tensor([g])
        sgd.step()
    check_close(p.item(), two.item(), 1e-6)
    assert OuterOptimizer().step(start, torch.tensor([.25])).item() == .75      # The mean of the replicas


def test_bytes():
    assert low_communication_bytes(1001, 1000, 10, 2, 0) == 100*4*1001
    assert [low_communication_bytes(1002, 1000, every, 3, 0) for every in (1, 10, 300, 1000, 5000)] == [4*4*334*n for n in (1000, 100, 4, 1, 1)]


def test_what_is_rejected():
    for lr, momentum in ((0, 0), (-1, 0), (1, 1), (1, -.1)):
        with pytest.raises(ValueError, match="OuterOptimizer"): OuterOptimizer(lr, momentum)
    with pytest.raises(ValueError, match="every = 0, expected 1 or more"): next(local_steps(double(), data(), RATES, 0, OuterOptimizer()))
    with pytest.raises(ValueError, match="zip"): simulate_ranks([iter([torch.ones(1)]), iter([])])
    for bad in (dict(every=0), dict(steps=0)):
        with pytest.raises(ValueError, match="expected 1 or more"): low_communication_bytes(**dict(parameters=10, steps=1, every=1, size=2, rank=0) | bad)


def test_saved_runs_are_whole():
    about, *rows = map(json.loads, RESULTS.read_text().splitlines())
    assert {"machine", "date", "command", "floor"} <= about.keys() and RESULTS.stat().st_size < 200_000
    def excess(**job): return {r["seed"]: r["excess"] for r in rows if r.items() >= job.items()}
    together, apart = excess(kind="together", lr=.032), excess(kind="apart", every=10, momentum=0., ranks=2, lr=.016)
    assert together.keys() == apart.keys() == {0, 1, 2} and max(together.values()) < .2
    assert all(apart[s] - together[s] < .05 for s in range(3))
