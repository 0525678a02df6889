"""Updates against the inverse Fisher information times the gradient of the ELBO, both by finite differences.

Each in its own coordinates: (S mu, -S/2) with a precision S, or the mean with a Cholesky factor of covariance or
precision. The Fisher information is the Hessian of the Kullback-Leibler divergence between Gaussians.
"""

import numpy as np
import pytest

from fisher import Coordinates, fisher_information, gradient_of
from matrix import (
    PAIRS,
    factor_matrix,
    moments_of,
    state_of,
    two_seeds,
)
from targets import logistic, poisson, random_covariance

from pymc_ngvi.fitting.options import AXES
from pymc_ngvi.methods import DIRECTIONS

#: Coordinates in which an update moves; two of them, in a straight line to first order in the step size only.
COORDINATES = {
    "natural": "natural",
    "natural_pd": "natural",
    "cholesky": "factor",
    "cholesky_precision": "factor",
    "sqrt": "factor",
    "euclidean": "factor",
}
STRAIGHT = ("natural", "cholesky", "cholesky_precision", "euclidean")

each_pair = pytest.mark.parametrize(("family", "update"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
each_target = pytest.mark.parametrize("make", [logistic, poisson])


def off_optimum(make, family, seed):
    """Return a target and a state of a family; four dimensions where blocks need them, else three."""
    n_dim = 4 if family == "block" else 3
    target, rng = make(n=20, n_dim=n_dim, seed=seed), np.random.default_rng(seed)
    return target, state_of(family, 0.3 * rng.standard_normal(n_dim), 0.3 * random_covariance(rng, n_dim, 3.0))


def exact_moments(target, state):
    return moments_of(state, *target.moments(state.mean(), state.cov()))


def taken(update, state, moments, coordinates, rho):
    """Return the change of the coordinates for each unit of step size."""
    new = AXES["update"][update](state, moments, rho, False)
    return (coordinates.of(new.mean(), new.cov()) - coordinates.of(state.mean(), state.cov())) / rho


@each_pair
@each_target
@two_seeds
def test_step_is_the_inverse_fisher_information_times_the_gradient_of_the_elbo(family, update, make, seed):
    target, state = off_optimum(make, family, seed)
    coordinates = Coordinates(COORDINATES[update], family, target.n_dim)
    x = coordinates.of(state.mean(), state.cov())
    direction = gradient_of(lambda x: target.elbo(*coordinates.gaussian(x)), x)
    if update != "euclidean":  # for which the metric is the identity
        direction = np.linalg.solve(fisher_information(coordinates, x), direction)
    moments = exact_moments(target, state)
    if update in STRAIGHT:
        step = taken(update, state, moments, coordinates, 0.003)
    else:  # extrapolated to steps of size 0
        step = 2.0 * taken(update, state, moments, coordinates, 1e-4) - taken(update, state, moments, coordinates, 2e-4)
    np.testing.assert_allclose(step, direction, rtol=1e-5, atol=2e-5 * np.abs(direction).max())


@pytest.mark.parametrize(("family", "update"), [pair for pair in PAIRS if pair[1] in DIRECTIONS])
@two_seeds
def test_directions_are_those_that_the_updates_take(family, update, seed):
    """Rules that move coordinates work with the direction itself."""
    target, state = off_optimum(logistic, family, seed)
    moments = exact_moments(target, state)
    location, factor = DIRECTIONS[update](state, moments)
    coordinates = Coordinates("factor", family, target.n_dim)
    expected = np.append(location, factor_matrix(state, factor)[coordinates.entries])
    np.testing.assert_allclose(taken(update, state, moments, coordinates, 0.003), expected, rtol=1e-9, atol=1e-10)


# --- mirror descent ---------------------------------------------------------------------------------------------------


# --- all natural gradients are one to first order ---------------------------------------------------------------------
