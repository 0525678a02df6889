"""Many matrices of one sparse pattern, factored as one, against each alone."""

import numpy as np
import pytest

from scipy import linalg, sparse

from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.families.matrices.sparse.cholesky import SparseCholesky
from pymc_ngvi.families.matrices.sparse.fronts import Fronts, fronts_of
from pymc_ngvi.families.matrices.sparse.order import Supernodes
from pymc_ngvi.families.matrices.sparse.precisions import RepeatedFronts


def chain(n):
    return sparse.diags_array([np.ones(n - 1), np.ones(n - 1)], offsets=[-1, 1], shape=(n, n)).toarray()


def arrow(sizes, n_border):
    """Return blocks that all touch one border."""
    inner = linalg.block_diag(*[np.ones((k, k)) for k in sizes])
    across = np.ones((n_border, len(inner)))
    return np.block([[inner, across.T], [across, np.ones((n_border, n_border))]])


def nested():
    """Return groups within groups, beside a coordinate that touches everything."""
    one = arrow([2, 2, 3], 2)
    inner = linalg.block_diag(*[one, one, arrow([1, 4], 3)])
    return np.block([[inner, np.ones((len(inner), 1))], [np.ones((1, len(inner) + 1))]])


PATTERNS = {
    "chain": chain(31),
    "arrow": arrow([2] * 9, 3),
    "arrow of several sizes": arrow([1, 4] + [9, 10] * 4, 2),
    "nested groups": nested(),
    "dense": np.ones((8, 8)),
    "diagonal": np.eye(5),
}
each = pytest.mark.parametrize(
    ("pattern", "n"), [(Pattern.of(p), n) for p in PATTERNS.values() for n in (1, 3)],
    ids=[f"{name}, {n}" for name in PATTERNS for n in (1, 3)],
)  # fmt: skip


def fronts_for(pattern):
    if pattern.n_entries < pattern.n_dim * (pattern.n_dim + 1) // 2:
        return fronts_of(pattern)
    return Fronts(pattern, Supernodes(np.zeros(pattern.n_dim, dtype=np.int64), np.zeros(1, dtype=np.int64)))


def positive(pattern, n, seed=0):
    """Return random positive definite matrices of the pattern, (n, d, d)."""
    rng = np.random.default_rng(seed)
    matrices = np.array([pattern.symmetric(rng.standard_normal(pattern.n_entries)).toarray() for _ in range(n)])
    every = np.arange(pattern.n_dim)
    matrices[:, every, every] = np.abs(matrices).sum(axis=2) + rng.uniform(0.1, 2.0, (n, pattern.n_dim))
    return matrices


def factored(pattern, matrices):
    one = fronts_for(pattern)
    fronts, at = RepeatedFronts(one, len(matrices)), one.places(pattern.rows, pattern.cols)
    factor = SparseCholesky.of(fronts, fronts.panels(at, matrices[:, pattern.rows, pattern.cols]))
    return factor, fronts.of_panels(at)


@each
def test_factors_solutions_and_inverses_are_those_of_each(pattern, n):
    matrices, d = positive(pattern, n), pattern.n_dim
    factor, at = factored(pattern, matrices)
    of_each = np.log(factor.panels[factor.fronts.diagonal]).reshape(n, -1).sum(axis=1)
    np.testing.assert_allclose(of_each, 0.5 * np.linalg.slogdet(matrices)[1], rtol=1e-10, atol=1e-12)
    assert factor.log_det() == pytest.approx(of_each.sum())
    inverse = np.linalg.inv(matrices)[:, pattern.rows, pattern.cols]
    np.testing.assert_allclose(factor.inverse[at], inverse, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(factor.matrix[at], matrices[:, pattern.rows, pattern.cols], rtol=1e-10, atol=1e-12)
    vectors = np.random.default_rng(1).standard_normal((n, d, 2))
    solved = factor.solve(factor.solve(vectors.reshape(n * d, 2)), transposed=True).reshape(n, d, 2)
    np.testing.assert_allclose(solved, np.linalg.solve(matrices, vectors), rtol=1e-9, atol=1e-11)
    times = factor.times(factor.times(vectors.reshape(n * d, 2), transposed=True)).reshape(n, d, 2)
    np.testing.assert_allclose(times, matrices @ vectors, rtol=1e-9, atol=1e-11)
    assert factor.solve(np.empty((n * d, 0))).shape == (n * d, 0)
    assert factor.solve(np.empty((n * d, 0)), transposed=True).shape == (n * d, 0)


@each
def test_whitened_matrices_have_the_metric_of_gaussians(pattern, n):
    matrices, rng = positive(pattern, n), np.random.default_rng(2)
    factor, at = factored(pattern, matrices)
    first, second = (
        np.array([pattern.symmetric(rng.standard_normal(pattern.n_entries)).toarray() for _ in range(n)])
        for _ in range(2)
    )
    packed = []
    for some in (first, second):
        panels = np.zeros(factor.fronts.n_panels)
        panels[at] = some[:, pattern.rows, pattern.cols]
        packed.append(panels)
    expected = np.trace(np.linalg.solve(matrices, first) @ np.linalg.solve(matrices, second), axis1=1, axis2=2).sum()
    white = [factor.whitened(panels) for panels in packed]
    assert white[0] @ white[1] == pytest.approx(expected, rel=1e-8, abs=1e-10)
    np.testing.assert_allclose(factor.unwhitened(white[0])[at], packed[0][at], rtol=1e-8, atol=1e-9)


def test_fronts_that_are_alike_are_added_up():
    assert any(stack.n_alike > 1 for stack in fronts_for(Pattern.of(PATTERNS["arrow"])).stacks)


def test_some_fronts_are_filled_up():
    fronts = fronts_for(Pattern.of(PATTERNS["arrow of several sizes"]))
    assert any(len(stack.filled) for stack in fronts.stacks)


def test_one_matrix_that_is_not_positive_definite_has_no_factor():
    pattern = Pattern.of(PATTERNS["chain"])
    matrices = positive(pattern, 3)
    matrices[1, 4, 4] = -1.0
    assert factored(pattern, matrices)[0] is None
