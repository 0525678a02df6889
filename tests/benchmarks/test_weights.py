"""The direction of the weights as printed: its terms, that it is no natural gradient, and the numbers of the page."""

import numpy as np
import pytest

from fisher import case, coupling
from matrix import whitened_moments
from targets import logistic, poisson
from texts import DOCS, rows, section
from weights import printed_direction

from pymc_ngvi.families import FullState, MixtureState

PAGE = DOCS / "families.md"

pytestmark = pytest.mark.usefixtures("_one_blas_thread")
each_target = pytest.mark.parametrize("make", [logistic, poisson])
each_size = pytest.mark.parametrize(("n_dim", "n_components"), [(d, k) for d in (1, 2) for k in (2, 3)])


def relative(direction):
    """Return a direction of the log weights relative to that of the last component."""
    return direction[:-1] - direction[-1]


def test_by_hand():
    """log p - log q with gradient g and Hessian H at every point: b = mu.g + tr((Sigma - mu mu^T) H) / 2."""
    mean, cov, g = np.array([2.0, -1.0]), np.diag([4.0, 0.25]), np.array([0.3, 0.5])
    h, scale = np.array([[-0.5, 0.2], [0.2, 0.1]]), np.sqrt(np.diag(cov))
    q = MixtureState.of([FullState(mean, np.diag(scale))])
    moments = whitened_moments(scale * g, np.eye(2) - h * np.outer(scale, scale))
    expected = 0.6 - 0.5 + 0.5 * np.sum((cov - np.outer(mean, mean)) * h)
    found = printed_direction(q, np.array([1.5]), [moments])
    np.testing.assert_allclose(found, 1.5 + expected, rtol=1e-12)


@each_target
@each_size
def test_it_has_the_printed_terms(make, n_dim, n_components):
    this = case(make, "full", n_dim, n_components)
    expected = this.truth.rewards(this.x) + coupling(this.truth, this.x)
    np.testing.assert_allclose(printed_direction(this.q, *this.moments), expected, rtol=1e-4, atol=1e-4)


@each_target
@each_size
def test_it_is_no_natural_gradient_and_depends_on_the_origin(make, n_dim, n_components):
    this = case(make, "full", n_dim, n_components)
    direction, here = this.direction[-n_components + 1 :], relative(printed_direction(this.q, *this.moments))
    np.testing.assert_allclose(this.weight_step, direction, atol=2e-5 * np.abs(this.direction).max())
    assert np.abs(here - direction).max() > 1e-3 * np.abs(this.direction).max()
    there = relative(printed_direction(this.shifted.q, *this.shifted.moments))
    assert np.abs(there - here).max() > np.abs(here).max()


def test_the_numbers_of_the_page():
    columns = [
        [
            each.direction[-1],
            each.weight_step[0],
            relative(printed_direction(each.q, *each.moments))[0],
            each.truth.natural_gradient(each.x, joint=False)[-1],
        ]
        for this in (case(logistic, "full", 2, 2), case(poisson, "full", 2, 2))
        for each in (this, this.shifted)
    ]
    table = [[float(cell) for cell in row[1:]] for row in rows(section(PAGE, "`mixture`").split("### Weights")[1])]
    np.testing.assert_allclose(table, np.transpose(columns), atol=0.0051)  # two decimals
