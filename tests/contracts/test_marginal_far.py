"""log m where the cheap rule extrapolates: far from the bulk its values can be too low by tens of nats."""

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

import pymc_ngvi

from pymc_ngvi.marginal.quadrature import integrate, references


def growth_curves():
    """Growth curves whose asymptotes differ by plant: the effects are strongly skewed where their scale is large."""
    rng = np.random.default_rng([32, 13])
    time, plant = np.tile(np.linspace(0.0, 10.0, 8), 12), np.repeat(np.arange(12), 8)
    asymptote = 20.0 * np.exp(rng.normal(0.0, 0.2, 12))
    y = asymptote[plant] / (1.0 + np.exp((4.0 - time) / 1.5)) + rng.normal(0.0, 0.8, 96)
    with pm.Model() as model:
        top, sd = pm.Normal("top", 3.0, 1.0), pm.HalfNormal("sd", 0.5)
        z = pm.Normal("z", shape=12)
        middle, rate = pm.Normal("middle", 5.0, 3.0), pm.LogNormal("rate", 0.0, 0.5)
        mean = pt.exp(top + sd * z)[plant] * pm.math.sigmoid((time - middle) / rate)
        pm.Normal("y", mean, pm.HalfNormal("sigma", 3.0), observed=y)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_draws_far_out_keep_their_weight(seed):
    """Weights by the reference rule at all draws; draws that the rule in use lost had 2 to 4 % of them."""
    approx = pymc_ngvi.fit_ngvi(model=growth_curves(), random_seed=seed, progressbar=False)
    assert approx.record.is_exact
    pool, rest = approx._state.pool, approx._state
    rule = references(rest.forest.n_levels)[-1]
    of_terms = rest.quadrature.terms, rest.forest, rule, pool.g, rest.pairs.centres
    truth = integrate(*of_terms, moments=False).log_marginal
    weights = np.exp(truth - pool.log_density - (truth - pool.log_density).max())
    weights /= weights.sum()
    assert weights[pool.log_marginal < truth - 1.0].sum() < 0.006
