"Two levels take what the counted network takes; failures cost what the simulation finds."
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcourse.parallelism.collectives import all_reduce_seconds, hierarchical_all_reduce
from lmcourse.parallelism.ranks import Link, Network
from lmcourse.parallelism.topology import (
    NETWORK,
    daly_interval,
    goodput,
    seconds_between_failures,
    simulate_goodput,
    two_level_seconds,
    young_interval,
)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.floats(1e-6, 1e-2), st.floats(1e3, 1e9))
def test_two_levels_take_what_the_network_takes(nodes, k, latency, speed):
    node, network = Link(latency/7, 3*speed), Link(latency, speed)
    net = Network(nodes*k, node, ranks_per_node=k, across=network)
    net.run(lambda port: hierarchical_all_reduce(np.ones(12*k*nodes), port, k))
    assert net.seconds == pytest.approx(two_level_seconds(96*k*nodes, nodes*k, k, node, network), rel=1e-9)


def test_numbers_of_131072_devices():
    n = 131_072
    assert all_reduce_seconds("ring", 16e9, n, NETWORK) == pytest.approx(1.95, rel=.01)
    assert all_reduce_seconds("halving-doubling", 16e9, n, NETWORK) == pytest.approx(.64, rel=.01)
    assert two_level_seconds(16e9, n) == pytest.approx(.306, rel=.02)
    assert two_level_seconds(16e9, n, across="halving-doubling") < two_level_seconds(16e9, n)
    assert seconds_between_failures(16_384) == pytest.approx(54*86_400/419)


@pytest.mark.parametrize("between", [500., 1400., 11_135., 1e5])
@pytest.mark.parametrize("restart", [0., 600.])
def test_simulation_agrees_within_three_errors(between, restart):
    rng = np.random.default_rng(1)
    for interval in (young_interval(between), daly_interval(between), 2*daly_interval(between)):
        found, error = simulate_goodput(interval, between, 60., restart, rng=rng)
        assert 0 < error < .05 and abs(found - goodput(interval, between, 60., restart)) <= 3*error


@settings(max_examples=60, deadline=None)
@given(st.floats(200, 1e7), st.floats(1, 90))
def test_daly_is_nearly_the_best_and_young_nearly_daly(between, save):
    "Also where failures are frequent."
    top = max(goodput(t, between, save) for t in np.geomspace(save/9, 9*between, 3000))
    assert goodput(daly_interval(between, save), between, save) >= top - 2e-3
    assert abs(young_interval(between, save) - daly_interval(between, save) - save) <= .5*save + 1e-9
    assert goodput(daly_interval(between, save), between, save) < 1


def test_without_failures_only_saving_costs():
    assert goodput(600., 1e12, 60., 600.) == pytest.approx(600/660)
    assert simulate_goodput(600., 1e15, 60., rng=np.random.default_rng(0)) == pytest.approx((600/660, 0))


@pytest.mark.parametrize("call, words", [
    (lambda: two_level_seconds(1., 12), "12 ranks don't fill nodes of 8"), (lambda: two_level_seconds(1., 8, 0), "ranks_per_node = 0"),
    (lambda: goodput(0, 1.), "interval_s = 0"), (lambda: goodput(1., math.inf), "between_s = inf"), (lambda: goodput(1., 1., restart_s=-1), "restart_s = -1"),
    (lambda: young_interval(0.), "between_s = 0"), (lambda: daly_interval(1., 0.), "save_s = 0"), (lambda: seconds_between_failures(0), "gpus = 0"),
    (lambda: seconds_between_failures(8, -1.), "gpu_hours = -1"), (lambda: simulate_goodput(1., 1., runs=0, rng=np.random.default_rng(0)), "runs = 0")])
def test_what_makes_no_sense(call, words):
    with pytest.raises(ValueError, match=words): call()


def test_a_hopeless_machine():
    assert goodput(1e6, 1.) == 0. and daly_interval(10., 60.) == 10.
