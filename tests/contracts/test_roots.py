"""Predictors under Gaussians with a dense factor: covariances and curvatures from the rows of X C."""

import numpy as np
import pytest

from latent_models import process
from scipy import sparse

from pymc_ngvi import LogDensity
from pymc_ngvi.core.hessians import MatrixHessian
from pymc_ngvi.density.hyperparameters import latent_rows
from pymc_ngvi.families import FullState
from pymc_ngvi.rows.linear_map import LinearMap
from pymc_ngvi.rows.mean_hessian import PredictorMeanHessian
from pymc_ngvi.rows.roots import Roots

N = 6


@pytest.fixture
def rng():
    return np.random.default_rng(3)


def some_map(rng, n_rows=9):
    """Rows that are dense, rows of one coordinate, two of these of the same one, and a row of zeros."""
    dense = rng.standard_normal((n_rows, N))
    dense[[1, 4, 5]] = 0.0
    dense[1, 2], dense[4, 2], dense[7] = 1.0, -0.5, 0.0
    dense[7, 0] = 2.0
    return LinearMap(rng.standard_normal(n_rows), dense, np.arange(N), sparse.csr_array((n_rows, N)))


def some_state(rng):
    root = np.tril(rng.standard_normal((N, N)), -1) + np.diag(rng.uniform(0.5, 2.0, N))
    return FullState(rng.standard_normal(N), root)


def test_covariances_are_those_of_the_predictors(rng):
    linear, q = some_map(rng), some_state(rng)
    expected = linear.dense @ q.cov() @ linear.dense.T
    same, others = np.repeat(np.arange(9)[:, None], 2, axis=1), rng.integers(0, 9, (20, 2))
    for pairs, found in zip([same, others], Roots.of(linear, q).covariances([same, others]), strict=True):
        np.testing.assert_allclose(found, expected[tuple(pairs.T)], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", ["negative", "mixed", "pairs"])
def test_curvatures_are_those_of_products(rng, kind):
    """Weights of one sign, of both, and rows of two predictors: one formula for all."""
    linear, q = some_map(rng), some_state(rng)
    weights = -rng.uniform(0.1, 2.0, 9) if kind == "negative" else rng.standard_normal(9)
    matrix = np.diag(weights)
    if kind == "pairs":
        matrix[0, 1] = matrix[1, 0] = 0.7
    hessian = PredictorMeanHessian(linear, sparse.csr_array(matrix), roots=Roots.of(linear, q))
    expected = q.curvature(MatrixHessian(linear.dense.T @ matrix @ linear.dense))
    np.testing.assert_allclose(hessian.whitened(q), expected, rtol=1e-12, atol=1e-13)


def test_another_state_is_whitened_by_its_own_factor(rng):
    """Roots are those of the Gaussian behind the expectation; one of independent coordinates needs none."""
    linear, weights = some_map(rng), rng.standard_normal(9)
    hessian = PredictorMeanHessian(linear, sparse.diags_array(weights).tocsr(), roots=Roots.of(linear, some_state(rng)))
    for other in (some_state(rng), FullState.from_scale(np.zeros(N), rng.uniform(0.5, 2.0, N))):
        expected = other.curvature(MatrixHessian(linear.dense.T @ np.diag(weights) @ linear.dense))
        np.testing.assert_allclose(hessian.whitened(other), expected, rtol=1e-12, atol=1e-13)


def test_weights_that_are_not_finite_stay_so(rng):
    linear, q, weights = some_map(rng), some_state(rng), -np.ones(9)
    weights[3] = np.nan
    assert not np.isfinite(Roots.of(linear, q).curvature(sparse.diags_array(weights).tocsr())).any()


def test_many_rows_have_none(rng):
    """X C of many more rows than columns is large, and saves little."""
    assert Roots.of(some_map(rng, 4 * N), some_state(rng)) is not None
    assert Roots.of(some_map(rng, 4 * N + 1), some_state(rng)) is None


def test_predictors_are_seen_anew_where_the_kernel_has_changed():
    """What is kept with a Gaussian is of one matrix of predictors."""
    density = LogDensity(process())
    given, rng = latent_rows(density), np.random.default_rng(0)
    start = density.initial_point()[given.outside]
    n = given.n_dim
    q = FullState(0.1 * rng.standard_normal(n), np.tril(rng.standard_normal((n, n))) / n + np.eye(n))
    for shift in (0.0, 0.5):
        assert given.give(start + shift)
        theta = q.draws(rng.standard_normal((20_000, n)))
        eta = given.rows.linear_map(theta)
        seen, own = given.rows.seen(q), [i for pair in given.rows._covariances.pairs for i in pair[:, 0]]
        np.testing.assert_allclose(np.concatenate(seen.covariances), eta.var(axis=0)[own], rtol=6 * np.sqrt(2 / 20_000))
