"""What the suite compiles once: equal graphs alone, and with the same results."""

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest

from pymc_ngvi import LogDensity


def regression(sd=1.0, x=(0.3, -1.1, 2.2)):
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.1, 2.1)
        pm.Poisson("y", pm.math.exp(beta * np.array(x)), observed=[1, 0, 4])
        pm.Normal("z", 0.1, sd)
    return model


def function_of(model):
    density = LogDensity(model, "quick")
    theta = np.array([[0.2, -0.4], [1.1, 0.7]])
    return density._batch("logp_grad", theta), density.functions.made["logp_grad"]


def test_equal_models_share_a_function():
    assert function_of(regression())[1] is function_of(regression())[1]


@pytest.mark.parametrize("other", [{"sd": 1.1}, {"x": (0.3, -1.1, 2.3)}], ids=["prior", "data"])
def test_others_do_not(other):
    values, function = function_of(regression())
    others, another = function_of(regression(**other))
    assert another is not function
    assert not np.array_equal(values[0], others[0])


def test_simplified_graphs_are_those_of_the_model_and_give_the_same_bits(once):
    density = LogDensity(regression(), "quick")
    kept = LogDensity(regression(), "quick")
    once.is_active = False
    anew = LogDensity(regression(), "quick")
    theta = np.array([[0.2, -0.4], [1.1, 0.7]])
    hessian = anew.hessian(theta)
    once.is_active = True
    assert kept.graphs.theta is not density.graphs.theta
    np.testing.assert_array_equal(kept.hessian(theta), hessian)
    np.testing.assert_array_equal(kept.logp_grad(theta)[1], anew.logp_grad(theta)[1])


@pytest.mark.usefixtures("_anew")
def test_what_asks_for_it_is_compiled_anew():
    assert function_of(regression())[1] is not function_of(regression())[1]


@pytest.mark.parametrize("options", [{"mode": "FAST_COMPILE"}, {"name": "f"}], ids=["mode", "name"])
def test_functions_that_are_asked_for_in_another_way_are_others(options):
    x = pt.vector("x")
    first, same, other = (pytensor.function([x], 2.0 * x, **given) for given in ({}, {}, options))
    assert first is same
    assert first is not other
