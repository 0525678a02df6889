"""What a graph is estimated to cost: by its nodes and the sizes of the data, and by nothing else."""

import models
import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest

from operations import wobble

from pymc_ngvi import LogDensity
from pymc_ngvi.ops import cost


def test_cost_of_hand_counted_graph():
    x = pt.vector("x", shape=(1000,))
    estimate = cost.estimate([pt.exp(x) + pt.sin(x)], batch=10)  # three nodes of 1,000 elements
    arithmetic = 3 * 1000 * cost._SECONDS_PER_ELEMENT
    assert np.isclose(estimate.quick_seconds, arithmetic + 0.3 * cost._SECONDS_PER_NODE)
    assert np.isclose(estimate.numba_seconds, arithmetic / cost._NUMBA_SPEEDUP + cost._NUMBA_SECONDS_PER_CALL)
    assert estimate.numba_compile_seconds > cost._NUMBA_SECONDS_TO_COMPILE
    assert estimate.widest == 1000


def test_python_loops_are_dear():
    x = pt.vector("x", shape=(1000,))
    plain, looping = cost.estimate([pt.sin(x)]), cost.estimate([wobble(x)])
    assert np.isclose(looping.quick_seconds - plain.quick_seconds, 1000 * cost._SECONDS_PER_PYTHON_ELEMENT)


def test_softplus_and_powers_are_no_python_loops():
    x = pt.vector("x", shape=(1000,))
    assert cost.estimate([pt.softplus(x)]).quick_seconds == cost.estimate([pt.sin(x)]).quick_seconds


def test_unknown_shapes_count_as_the_largest_data():
    x, data = pt.vector("x"), pytensor.shared(np.zeros(500))
    assert cost.estimate([pt.exp(x) + data]).widest == 500
    assert cost.estimate([pt.exp(x)]).widest == 1


def test_what_evaluations_share_does_not_limit_their_number():
    """Rows of a minibatch are the same for all draws: ten outputs for each draw, not 5,000 elements."""
    x, data = pt.vector("x", shape=(10,)), pt.matrix("data", shape=(500, 10))
    outputs = [pt.dot(pt.exp(data).T, pt.dot(pt.exp(data), x))]
    assert cost.estimate(outputs).widest == 5_000
    assert cost.estimate(outputs, along=x).widest == 500
    shared = 2 * 5_000 * 2e-9  # exp of the data, and its transpose
    one = cost.estimate(outputs).quick_seconds
    assert cost.estimate(outputs, along=x).quick_seconds <= one - shared


def test_more_points_in_a_call_share_the_time_of_its_nodes_and_no_more():
    x = pt.vector("x", shape=(1000,))
    one, many, most = (cost.evaluation_seconds([pt.sin(pt.tanh(x))], batch=n) for n in (1, 128, 10**9))
    assert one > many > most
    assert cost.evaluation_seconds([pt.sin(pt.tanh(x))], batch=10**9, passes=2) == pytest.approx(
        most + 2 * 1_000 * 2e-9, rel=0.01
    )


def test_steps_of_a_scan_count():
    def seconds(n_steps):
        density = LogDensity(models.scan_ar1(n_steps), "quick")
        return density.graphs.cost.quick_seconds

    assert seconds(60) > 4 * seconds(6)


def test_prefers_numba_when_the_work_outweighs_compiling():
    estimate = cost.Cost(quick_seconds=0.011, numba_seconds=0.001, numba_compile_seconds=30.0, widest=1)
    assert not estimate.prefers_numba(2999)
    assert estimate.prefers_numba(3001)
    slower = cost.Cost(quick_seconds=0.001, numba_seconds=0.002, numba_compile_seconds=1.0, widest=1)
    assert not slower.prefers_numba(10**9)


def test_estimates_repeat_and_grow_with_the_data():
    def estimate(n):
        with pm.Model() as model:
            pm.Normal("y", pm.Normal("mu") * pm.Data("x", np.ones(n)), 1.1, observed=np.zeros(n))
        return LogDensity(model, "quick").graphs.cost

    small, large = estimate(50_000), estimate(500_000)
    assert estimate(50_000) == small
    assert 8 < large.quick_seconds / small.quick_seconds < 11
    assert large.widest == 500_000
