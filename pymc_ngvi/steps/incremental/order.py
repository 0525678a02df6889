"""Whether data are ordered: what batches say, in the order of the source, is more than sampling error."""

from collections.abc import Sequence

import numpy as np

from pymc_ngvi.core.types import GaussianState
from pymc_ngvi.steps.incremental.sites import Quadratic, SeenByQuadratics

#: Batches from which on an order can be seen; errors of the serial correlation, and its least size, that count as one;
#: sampling variances that batches may differ by.
_FEWEST, _ERRORS, _LEAST, _MOST_SPREAD = 4, 3.5, 0.1, 4.0


def sign_of_order(q: GaussianState, sites: Sequence[Quadratic]) -> str:
    """Return what speaks for an order of the data, in a clause; empty where nothing does.

    Parameters
    ----------
    q : GaussianState
        After a pass.
    sites : sequence of Quadratic
        Of batches in the order of the source.
    """
    if len(sites) < _FEWEST:
        return ""
    seen, sizes = SeenByQuadratics.of(q), np.array([site.n_rows for site in sites], dtype=float)
    slopes = q.whiten(np.array([site.grad(seen) for site in sites]))
    parts = sizes / sizes.sum()
    # Where rows come in any order, each is an independent draw with the covariance of the information of a batch.
    z = (slopes - parts[:, None] * slopes.sum(axis=0)) / np.sqrt(parts)[:, None]
    n, variance = len(z), (z**2).mean(axis=0)
    if not variance.sum() > 0.0:
        return ""
    correlation = 1.0 - 0.5 * n / (n - 1) * float((np.diff(z, axis=0) ** 2).sum() / (z**2).sum())
    n_effective = n * variance.sum() ** 2 / (variance**2).sum()
    if correlation > max(_LEAST, _ERRORS / np.sqrt(n_effective)):
        return f"neighbouring batches are alike (serial correlation {correlation:.2f})"
    spread = float(variance.mean()) * n / (n - 1)
    if spread > _MOST_SPREAD:
        return (
            f"batches differ {np.sqrt(spread):.1f} times as much as the model lets random samples of rows do (they are "
            "in some order, or the likelihood is too narrow)"
        )
    return ""
