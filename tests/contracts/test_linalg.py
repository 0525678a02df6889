"""Guarded factorisations and solves."""

import numpy as np
import pytest

from matrix import two_seeds
from targets import random_covariance

from pymc_ngvi.core.linalg import check_memory, cholesky, reverse_cholesky


@pytest.fixture
def matrix(seed):
    return random_covariance(np.random.default_rng(seed), 6)


@two_seeds
def test_cholesky_factors(matrix):
    lower, upper = cholesky(matrix), reverse_cholesky(matrix)
    np.testing.assert_allclose(lower @ lower.T, matrix, rtol=1e-12)
    np.testing.assert_allclose(upper @ upper.T, matrix, rtol=1e-12)
    np.testing.assert_array_equal(lower, np.tril(lower))
    np.testing.assert_array_equal(upper, np.triu(upper))
    assert (np.diag(lower) > 0).all()
    assert (np.diag(upper) > 0).all()


BAD = {
    "indefinite": np.diag([1.0, -1.0]),
    "negative": -np.eye(2),
    "zero": np.zeros((2, 2)),
    "singular": np.ones((2, 2)),
    "rounding": np.array([[1.0, 1.0], [1.0, 1.0 + 2e-16]]),
    "nan": np.array([[1.0, np.nan], [np.nan, 1.0]]),
    "inf": np.diag([1.0, np.inf]),
    "upper triangle": np.array([[1.0, np.nan], [0.0, 1.0]]),  # LAPACK reads one triangle only
}


@pytest.mark.parametrize("factor", [cholesky, reverse_cholesky])
@pytest.mark.parametrize("matrix", BAD.values(), ids=BAD)
def test_no_factor_where_not_positive_definite(factor, matrix):
    assert factor(matrix) is None


@pytest.mark.parametrize("factor", [cholesky, reverse_cholesky])
def test_nearly_singular_but_factorable(factor):
    """Condition 1e10: pivots differ by 1e-5, far from rounding."""
    matrix = random_covariance(np.random.default_rng(1), 5, condition=1e10)
    c = factor(matrix)
    np.testing.assert_allclose(c @ c.T, matrix, rtol=1e-10, atol=1e-15)


def test_memory_is_refused_before_it_is_taken_and_other_families_are_named():
    with pytest.raises(MemoryError, match=r"'full'.*1,000,000 dimensions.*'diagonal'") as caught:
        check_memory(2**60, "full", 1_000_000, ["full", "diagonal", "sparse"])
    assert "'sparse'" in str(caught.value)
    assert "GiB" in str(caught.value)


def test_memory_that_is_there_is_allowed():
    assert check_memory(2**20, "full", 100, ["full"]) is None
