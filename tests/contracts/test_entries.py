"""Entries of covariances and precisions of dense predictors, beside the matrices written out."""

import numpy as np
import pytest

from scipy import sparse

from pymc_ngvi.rows.entries import Entries
from pymc_ngvi.rows.many_maps import ManyMaps, Sparsity


@pytest.mark.parametrize("is_same", [False, True], ids=["maps of their own", "one map"])
@pytest.mark.parametrize("has_negative", [False, True], ids=["positive", "of both signs"])
def test_rows_of_dense_columns(is_same, has_negative, rng):
    """Rows of many entries, of one and of none; a predictor that two kinds of rows read."""
    n, d = 3, 4
    dense = rng.standard_normal((1 if is_same else n, 7, d))
    dense[:, 2:5] = 0.0
    dense[:, 2, 1], dense[:, 3, 3] = rng.standard_normal((2, len(dense)))
    pairs = [np.column_stack([i, i]) for i in (np.array([0, 2, 3, 4, 5]), np.array([5, 6, 1, 2]))]
    nothing = Sparsity(np.zeros(8, dtype=np.int64), np.empty(0, dtype=np.int64), d)
    entries = Entries(nothing, np.arange(d), pairs)
    maps = ManyMaps(np.zeros((n, 7)), dense, np.arange(d), np.empty((n, 0)), nothing)
    at, x = entries.of(maps), np.broadcast_to(dense, (n, 7, d))

    root = rng.standard_normal((n, d, d))
    covariance = root @ np.swapaxes(root, 1, 2)
    found = at.covariances(covariance[:, entries.rows, entries.cols])
    variances = np.einsum("nrp,npq,nrq->nr", x, covariance, x)
    for one, pair in zip(found, pairs, strict=True):
        np.testing.assert_allclose(one, variances[:, pair[:, 0]], rtol=1e-12, atol=1e-12)

    weights = rng.uniform(-1.0 if has_negative else 0.1, 1.0, (n, 7))
    of_pairs = [weights[:, pair[:, 0]] for pair in pairs]
    quadratic = at.quadratic(of_pairs, sparse.diags_array(weights.ravel()).tocsr())
    expected = np.einsum("nrp,nr,nrq->npq", x, weights, x)[:, entries.rows, entries.cols]
    np.testing.assert_allclose(quadratic, expected, rtol=1e-12, atol=1e-12)
