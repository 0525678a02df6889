"""The one list of combinations that the suites iterate over, and what they need to do so for any row of it.

A new row in the registry takes part in every test that is parametrised here.
"""

import numpy as np
import pytest

from pymc_ngvi import loop, starting
from pymc_ngvi.registry import ALLOWED, AXES, Choice

COMBINATIONS = tuple(Choice(*row) for row in ALLOWED)
GAUSSIAN_FAMILIES = tuple(dict.fromkeys(choice.family for choice in COMBINATIONS))

each_combination = pytest.mark.parametrize("choice", COMBINATIONS, ids=["-".join(row) for row in ALLOWED])
each_family = pytest.mark.parametrize("family", GAUSSIAN_FAMILIES)
two_seeds = pytest.mark.parametrize("seed", [1, 2], ids=["seed1", "seed2"])


def state_of(family, mean, cov):
    """Return the state of a family with a given mean and covariance; what it can't represent is left out."""
    params = {
        "full": lambda: {"mean": mean, "cholesky_factor": np.linalg.cholesky(cov)},
        "diagonal": lambda: {"mean": mean, "sd": np.sqrt(np.diag(cov))},
    }[family]()
    return AXES["family"][family].from_params(params)


def random_state(family, n_dim, rng):
    """Return a state with random mean, and random lower triangle or standard deviations."""
    factor = np.tril(rng.standard_normal((n_dim, n_dim)))
    factor[np.diag_indices(n_dim)] = np.exp(0.7 * rng.standard_normal(n_dim))
    return state_of(family, 2.0 * rng.standard_normal(n_dim), factor @ factor.T)


def whitener(state):
    """Return C, covariance C C^T, as the family's own draws show it."""
    return (state.draws(np.eye(state.n_dim)) - state.draws(np.zeros((state.n_dim, state.n_dim)))).T


def make_rule(target, choice, *, seed, tol=0.05, n_draws=8, max_draws=1024):
    """Return the step rule of a combination on a target."""
    return AXES["step"][choice.step](
        target,
        AXES["update"][choice.update],
        AXES["estimator"][choice.estimator],
        seed=seed,
        tol=tol,
        n_draws=n_draws,
        max_draws=max_draws,
    )


def first_state(rule, target, choice, location=None):
    """Return the loop's state before the first iteration, with the scale chosen as a fit does."""
    location = np.zeros(target.n_dim) if location is None else location
    scales = [np.full(target.n_dim, scale) for scale in starting.START_SCALES]
    return loop.start(rule, starting.choose_start(rule, AXES["family"][choice.family], location, scales, target))


def ignore(state):
    """Observe an iteration and do nothing."""


def fit(target, choice, *, n=200, location=None, observe=ignore, **options):
    """Fit a target, any `TargetDensity`, through the loop; return the rule and the loop's last state."""
    rule = make_rule(target, choice, **options)
    return rule, loop.run(rule, first_state(rule, target, choice, location), n, observe)
