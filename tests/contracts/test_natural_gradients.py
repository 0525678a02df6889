"""Updates against the inverse Fisher information times the gradient of the ELBO, both by finite differences.

Each in its own coordinates: (S mu, -S/2) with a precision S, or the mean with a Cholesky factor of covariance or
precision. The Fisher information is the Hessian of the Kullback-Leibler divergence between Gaussians.
"""

import numpy as np
import pytest

from fisher import Coordinates, divergence, fisher_information, gradient_of, hessian_of
from matrix import (
    NATURAL_FAMILIES,
    PAIRS,
    each_family,
    factor_matrix,
    half_triangle,
    moments_of,
    state_of,
    two_seeds,
)
from targets import logistic, poisson, random_covariance

from pymc_ngvi.fitting.options import AXES
from pymc_ngvi.methods import DIRECTIONS, natural

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
natural_families = pytest.mark.parametrize("family", NATURAL_FAMILIES)
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


@each_family
@two_seeds
def test_fisher_information_of_a_factor_in_closed_form(family, seed):
    """I(C)^-1 vech(G) = vech(C thalf(C^T tril(G))) for C, the same for T: what the finite differences are to find."""
    _, state = off_optimum(logistic, family, seed)
    n_dim, rng = state.n_dim, np.random.default_rng(seed)
    coordinates = Coordinates("factor", family, n_dim)
    x = coordinates.of(state.mean(), state.cov())
    gradient, factor = np.zeros((n_dim, n_dim)), np.zeros((n_dim, n_dim))
    gradient[coordinates.entries] = rng.standard_normal(len(x) - n_dim)
    factor[coordinates.entries] = x[n_dim:]
    in_mean = rng.standard_normal(n_dim)
    solved = np.linalg.solve(fisher_information(coordinates, x), np.append(in_mean, gradient[coordinates.entries]))
    expected = np.append(state.cov() @ in_mean, (factor @ half_triangle(factor.T @ gradient))[coordinates.entries])
    np.testing.assert_allclose(solved, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


# --- mirror descent ---------------------------------------------------------------------------------------------------


@natural_families
@each_target
@two_seeds
def test_natural_parameters_move_by_the_gradient_in_expectation_parameters(family, make, seed):
    target, state = off_optimum(make, family, seed)
    expectation = Coordinates("expectation", family, target.n_dim)
    x = expectation.of(state.mean(), state.cov())
    gradient = gradient_of(lambda x: target.elbo(*expectation.gaussian(x)), x)
    for rho in (0.1, 0.7):
        step = taken("natural", state, exact_moments(target, state), Coordinates("natural", family, target.n_dim), rho)
        np.testing.assert_allclose(step, gradient, rtol=1e-5, atol=1e-6 * np.abs(gradient).max())


@natural_families
@two_seeds
@pytest.mark.parametrize("rho", [0.1, 0.7])
def test_natural_step_maximises_the_linearised_elbo_less_the_divergence(family, seed, rho):
    """<grad L, omega> - KL(q_omega || q) / rho in expectation parameters omega: stationary there, and concave."""
    target, state = off_optimum(logistic, family, seed)
    expectation = Coordinates("expectation", family, target.n_dim)
    here = state.mean(), state.cov()
    x = expectation.of(*here)
    gradient = gradient_of(lambda x: target.elbo(*expectation.gaussian(x)), x)

    def objective(omega):
        return gradient @ omega - divergence(*expectation.gaussian(omega), *here) / rho

    new = natural(state, exact_moments(target, state), rho, False)
    found = expectation.of(new.mean(), new.cov())
    slope = gradient_of(objective, found)
    # To be 0, each part of it has to cancel the gradient of the ELBO.
    assert np.abs(slope).max() < 1e-5 * np.abs(gradient).max()
    assert np.linalg.eigvalsh(hessian_of(objective, found)).max() < 0.0
    assert objective(found) > max(objective(x), *(objective(found + 0.1 * (x - found) * s) for s in (1, -1)))


# --- all natural gradients are one to first order ---------------------------------------------------------------------


def change_of_precision_and_mean(update, family, state, target, rho):
    new = AXES["update"][update](state, exact_moments(target, state), rho, False)
    return np.linalg.inv(new.cov()) - np.linalg.inv(state.cov()), new.mean() - state.mean()


@pytest.mark.parametrize(("family", "update"), [pair for pair in PAIRS if pair[1] != "natural"])
@each_target
@two_seeds
def test_natural_gradients_agree_to_first_order_in_the_step_size(family, update, make, seed):
    """The difference from the natural-parameter step falls by a factor of 4 when the step is halved; Euclidean: 2."""
    target, state = off_optimum(make, family, seed)
    of_natural = "full" if family == "full precision" else family
    same = state_of(of_natural, state.mean(), state.cov())
    differences = []
    for rho in (0.002, 0.001):
        found = change_of_precision_and_mean(update, family, state, target, rho)
        reference = change_of_precision_and_mean("natural", of_natural, same, target, rho)
        differences.append([np.linalg.norm(a - b) for a, b in zip(found, reference, strict=True)])
    for longer, shorter in zip(*differences, strict=True):
        if update == "euclidean":
            assert 1.8 < longer / shorter < 2.2
        else:
            assert 3.5 < longer / shorter < 4.5
