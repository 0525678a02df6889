"""Integrals along lines through draws see variances that these do not reach."""

import numpy as np
import pytest

from pymc_ngvi.core.reach import beyond_reach
from pymc_ngvi.core.verdict import MOST_BEYOND


@pytest.mark.parametrize("is_spherical", [True, False])
@pytest.mark.parametrize(("df", "is_heavy"), [(1.2, True), (4.0, False), (1e6, False)])
def test_student_t(is_spherical, df, is_heavy):
    """Draws are cut off at 30 sds of a normal, as those of chains are that have not been in the tails."""
    rng = np.random.default_rng(1)
    root = rng.chisquare(df, (4_000, 1 if is_spherical else 4)) / df
    x = rng.standard_normal((4_000, 4)) / np.sqrt(root)
    x = 7.0 + 1e-3 * x[np.abs(x).max(axis=1) < 30.0]

    def log_p(x):
        square = ((x - 7.0) / 1e-3) ** 2
        if is_spherical:
            return -0.5 * (df + 4.0) * np.log1p(square.sum(axis=1) / df)
        return -0.5 * (df + 1.0) * np.log1p(square / df).sum(axis=1)

    assert (beyond_reach(log_p, x) > MOST_BEYOND) == is_heavy
