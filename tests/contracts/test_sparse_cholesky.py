"""Sparse Cholesky factors of any pattern, against dense algebra."""

import numpy as np
import pytest

from scipy import sparse

from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.families.matrices.sparse import order
from pymc_ngvi.families.matrices.sparse.cholesky import SparseCholesky
from pymc_ngvi.families.matrices.sparse.fronts import Fronts, fronts_of


def chain(n):
    return sparse.diags_array([np.ones(n - 1), np.ones(n - 1)], offsets=[-1, 1], shape=(n, n))


def grid(side):
    one = sparse.eye_array(side)
    return sparse.kron(chain(side), one) + sparse.kron(one, chain(side))


def crossed(n_first, n_second, n_rows):
    rng = np.random.default_rng(3)
    i, j = rng.integers(n_first, size=n_rows), n_first + rng.integers(n_second, size=n_rows)
    n = n_first + n_second
    return sparse.coo_array((np.ones(n_rows), (i, j)), shape=(n, n))


def scattered(n, n_entries, n_global):
    rng = np.random.default_rng(4)
    i, j = rng.integers(n, size=(2, n_entries))
    dense = sparse.coo_array((np.ones(n_entries), (i, j)), shape=(n, n)).toarray()
    dense[:n_global] = 1.0
    return dense


def tree(n):
    """Return a binary tree, beside a coordinate that touches everything."""
    child = np.arange(1, n)
    inner = sparse.coo_array((np.ones(n - 1), (child, (child - 1) // 2)), shape=(n, n)).toarray()
    return np.block([[np.ones((1, 1)), np.ones((1, n))], [np.zeros((n, 1)), inner]])


PATTERNS = {
    "chain": Pattern.of(chain(157)),
    "grid": Pattern.of(grid(13)),
    "crossed": Pattern.of(crossed(90, 35, 400)),
    "scattered, with globals": Pattern.of(scattered(120, 90, 3)),
    "two chains apart": Pattern.of(sparse.block_diag([chain(40), chain(70)])),
    "tree": Pattern.of(tree(150)),
    "diagonal": Pattern.of(np.eye(30)),
    "dense": Pattern.of(np.ones((14, 14))),
    "one": Pattern.of(np.ones((1, 1))),
}
each_pattern = pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)


def all_fronts(pattern):
    return [Fronts(pattern, parts) for parts in order.candidates(pattern.matrix)]


def positive(pattern, seed=0):
    """Return a random positive definite matrix of the pattern, coordinates on scales far apart."""
    rng = np.random.default_rng(seed)
    matrix = pattern.symmetric(rng.standard_normal(pattern.n_entries)).toarray()
    np.fill_diagonal(matrix, np.abs(matrix).sum(axis=1) + 0.1)
    scale = 10.0 ** rng.uniform(-3.0, 3.0, pattern.n_dim)
    return scale[:, None] * matrix * scale


def packed(fronts, matrix):
    """Return the entries of a matrix that a factor has, as panels."""
    pattern = fronts.pattern
    result = np.zeros(fronts.n_panels)
    result[fronts.places(pattern.rows, pattern.cols)] = matrix[pattern.rows, pattern.cols]
    return result


def filled(fronts):
    """Return all pairs of coordinates that a factor has, and where."""
    i, j = np.tril_indices(fronts.n_dim)
    at = fronts.places(i, j)
    return i[at >= 0], j[at >= 0], at[at >= 0]


def symmetric(fronts, panels):
    i, j, at = filled(fronts)
    matrix = np.zeros((fronts.n_dim, fronts.n_dim))
    matrix[i, j] = matrix[j, i] = panels[at]
    return matrix


def gram(factor):
    """Return the matrix of a factor, from its panels alone."""
    return SparseCholesky(factor.fronts, factor.panels).matrix


@each_pattern
def test_the_order_is_complete_and_parts_of_one_depth_never_touch(pattern):
    for part, depth in order.candidates(pattern.matrix):
        assert (np.bincount(part, minlength=len(depth)) > 0).all()
        assert len(part) == pattern.n_dim
        for d in range(depth.max() + 1):
            remaining = np.flatnonzero(depth[part] >= d)  # what is eliminated up to then
            among = pattern.matrix[remaining][:, remaining]
            component = sparse.csgraph.connected_components(among, directed=False)[1]
            here = depth[part[remaining]] == d
            of_component = {(c, p) for c, p in zip(component[here], part[remaining][here], strict=True)}
            # Paths through what went before join those that touch by then.
            assert len({c for c, _ in of_component}) >= len({p for _, p in of_component})


@each_pattern
def test_the_factor_has_the_entries_that_a_dense_one_has(pattern):
    for fronts in all_fronts(pattern):
        perm = fronts.order
        number = pattern.symmetric(np.full(pattern.n_entries, -1e-3)).toarray()  # nothing cancels: all fill-in shows
        np.fill_diagonal(number, 1.0)
        dense = np.linalg.cholesky(number[np.ix_(perm, perm)])
        i, j = np.nonzero(np.abs(np.tril(dense)) > 0.0)
        assert (fronts.places(perm[i], perm[j]) >= 0).all()
        at = filled(fronts)[2]
        assert len(np.unique(at)) == len(at) == fronts.n_entries == fronts.used.sum()
        assert fronts.used[at].all()


@each_pattern
def test_factor_solutions_and_determinant(pattern):
    matrix = positive(pattern)
    vectors = np.random.default_rng(1).standard_normal((pattern.n_dim, 3))
    for fronts in all_fronts(pattern):
        factor = SparseCholesky.of(fronts, packed(fronts, matrix))
        perm = fronts.order
        lower = np.zeros_like(matrix)  # in the order of the coordinates
        dense = np.linalg.cholesky(matrix[np.ix_(perm, perm)])
        lower[np.ix_(perm, perm)] = dense
        np.testing.assert_allclose(factor.log_det(), np.log(np.diag(dense)).sum(), rtol=1e-10)
        for transposed in (False, True):
            turned = lower.T if transposed else lower
            scale = np.abs(turned) @ np.abs(vectors)
            assert np.abs(factor.times(vectors, transposed=transposed) - turned @ vectors).max() < 1e-11 * scale.max()
            solved = factor.solve(turned @ vectors, transposed=transposed)
            np.testing.assert_allclose(solved, vectors, atol=1e-7)  # scales are 1e6 apart
        np.testing.assert_allclose(symmetric(fronts, gram(factor)), matrix, rtol=1e-10, atol=1e-12 * matrix.max())
        assert not gram(factor)[~fronts.used].any()


@each_pattern
def test_the_inverse_on_the_entries_of_the_factor(pattern):
    matrix = positive(pattern, seed=2)
    scale = 1.0 / np.sqrt(np.diag(matrix))
    inverse = scale[:, None] * np.linalg.inv(scale[:, None] * matrix * scale) * scale
    for fronts in all_fronts(pattern):
        found = SparseCholesky.of(fronts, packed(fronts, matrix)).inverse
        i, j, at = filled(fronts)
        sd = np.sqrt(np.diag(inverse))
        np.testing.assert_allclose(found[at] / (sd[i] * sd[j]), inverse[i, j] / (sd[i] * sd[j]), atol=1e-12)
        assert not found[~fronts.used].any()


@each_pattern
def test_the_metric_of_gaussians(pattern):
    rng = np.random.default_rng(5)
    matrix = positive(pattern, seed=3)
    inverse = np.linalg.inv(matrix)
    for fronts in all_fronts(pattern):
        factor = SparseCholesky.of(fronts, packed(fronts, matrix))
        i, j, at = filled(fronts)
        first, second = np.zeros((2, fronts.n_panels))
        # In the units of the matrix, or a few entries would be all there is.
        units = np.sqrt(np.diag(matrix))
        first[at], second[at] = rng.standard_normal((2, len(at))) * units[i] * units[j]
        a, b = inverse @ symmetric(fronts, first), inverse @ symmetric(fronts, second)
        u, v = factor.whitened(first), factor.whitened(second)
        np.testing.assert_allclose(u @ u, np.sum(a * a.T), rtol=1e-8)
        assert abs(u @ v - np.sum(a * b.T)) < 1e-8 * np.sqrt(np.sum(a * a.T) * np.sum(b * b.T))
        np.testing.assert_allclose(
            factor.unwhitened(u)[at] / (units[i] * units[j]), first[at] / (units[i] * units[j]), atol=1e-8
        )
        np.testing.assert_allclose(factor.whitened(gram(factor)) @ u, np.trace(a), rtol=1e-7, atol=1e-7)


@each_pattern
def test_what_is_not_positive_definite_has_no_factor(pattern):
    fronts = fronts_of(pattern)
    matrix = positive(pattern)
    values = np.linalg.eigvalsh(matrix)
    for bad in (matrix - 1.5 * values[0] * np.eye(len(matrix)), np.full_like(matrix, np.nan), -matrix):
        assert SparseCholesky.of(fronts, packed(fronts, bad)) is None


def test_what_is_singular_to_rounding_has_no_factor():
    pattern = PATTERNS["chain"]
    laplacian = -chain(157).toarray()
    np.fill_diagonal(laplacian, -laplacian.sum(axis=1))
    fronts = fronts_of(pattern)
    assert SparseCholesky.of(fronts, packed(fronts, laplacian)) is None
    assert SparseCholesky.of(fronts, packed(fronts, laplacian + 1e-6 * np.eye(157))) is not None


def test_entries_outside_have_no_place():
    fronts = fronts_of(PATTERNS["two chains apart"])
    assert (fronts.places(np.array([0, 45]), np.array([109, 3])) == -1).all()


@pytest.mark.parametrize(
    ("pattern", "most"),
    [
        (Pattern.of(chain(3000)), 6 * 3000),
        (Pattern.of(grid(60)), 24 * 60**2),  # 31 n^2 log n / 4 is nested dissection's bound on a grid of n^2
        (Pattern.of(crossed(2000, 60, 9000)), 9000 + 2060 + 60 * 61 // 2),  # the smaller side fills in, and no more
        (Pattern.of(tree(1023)), 3.2 * 1023),  # hardly anything need be filled in
    ],
    ids=["chain", "grid", "crossed", "tree"],
)
def test_little_is_filled_in(pattern, most):
    fronts = fronts_of(pattern)
    assert fronts.n_entries <= most
    assert fronts.n_panels < 4 * fronts.n_entries
