"""What a graph is estimated to cost: by its nodes and the sizes of the data, and by nothing else."""

import models
import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt

from pymc_ngvi import LogDensity
from pymc_ngvi.ops import cost


def test_unknown_shapes_count_as_the_largest_data():
    x, data = pt.vector("x"), pytensor.shared(np.zeros(500))
    assert cost.estimate([pt.exp(x) + data]).widest == 500
    assert cost.estimate([pt.exp(x)]).widest == 1


def test_steps_of_a_scan_count():
    def seconds(n_steps):
        density = LogDensity(models.scan_ar1(n_steps), "quick")
        return density.graphs.cost.quick_seconds

    assert seconds(60) > 4 * seconds(6)


def test_estimates_repeat_and_grow_with_the_data():
    def estimate(n):
        with pm.Model() as model:
            pm.Normal("y", pm.Normal("mu") * pm.Data("x", np.ones(n)), 1.1, observed=np.zeros(n))
        return LogDensity(model, "quick").graphs.cost

    small, large = estimate(50_000), estimate(500_000)
    assert estimate(50_000) == small
    assert 8 < large.quick_seconds / small.quick_seconds < 11
    assert large.widest == 500_000
