"""What speaks against a fit that seems to have converged: lost draws, and kinks that Hessians do not see."""

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.types import BaseDraws, Evaluation, GaussianState, Moments
from pymc_ngvi.steps.schedule.base import FEW_DRAWS, MAX_LOST

#: Whitened error of the diagonal curvature that a converged coordinate may have.
MAX_CURVATURE_ERROR = 0.2
#: Standard errors by which the curvature that gradients show must differ from the Hessians' to be no noise, in one
#: dimension; in more, what the largest of so many normals adds.
_N_SE_KINK = 2.5
#: Parts of the draws on which the ELBO is compared with that of the start; the quantile to which lower values of
#: log p - log q are raised.
_N_PARTS, _UPPER = 8, 0.75
#: Nats below which nothing is told apart: sums of lower ones overflow.
_LEAST = -1e200


def loses_draws(evaluation: Evaluation) -> bool:
    """Tell whether more draws than a few lie where log p is not finite."""
    return evaluation.lost > MAX_LOST


def has_diverged(
    q: GaussianState, evaluation: Evaluation, units: NDArray[np.intp], first_elbo: float, *, on_batches: bool = False
) -> bool:
    """Tell whether a fit ended far below its start.

    Steps on noise may lose a little, and a minibatch says little of all the data. The ELBO of the result is therefore
    taken on eight parts of the draws, on a minibatch each; the start has to be above the best of them by more than they
    range over: of nine equals, one stands out so far by chance once in many thousands. Draws below the upper quartile
    count as if they were there: that raises the ELBO, and where log p falls exponentially, few draws are all of it.
    """
    if not (np.isfinite(q.mean()).all() and np.isfinite(q.sd()).all()):
        return True
    if not np.isfinite(first_elbo):
        return False
    h = np.where(evaluation.finite, evaluation.logp - q.log_density(evaluation.theta), np.nan)
    h = np.maximum(h, _LEAST)
    for own in units if on_batches else [units.ravel()]:
        if np.isfinite(h[own]).any():
            h[own] = np.maximum(h[own], np.nanquantile(h[own], _UPPER))
    parts = [h[part.ravel()] for part in np.array_split(units, _N_PARTS)]
    elbos = [float(np.mean(part[np.isfinite(part)])) for part in parts if np.isfinite(part).any()]
    if not elbos:
        return True
    return bool(2.0 * max(elbos) - min(elbos) < first_elbo - q.n_dim)


def is_kinked(q: GaussianState, base: BaseDraws, evaluation: Evaluation, moments: Moments) -> bool:
    """Tell whether gradients show a curvature that Hessians miss: that of kinks, where log p has no Hessian.

    By Stein's identity the diagonal of A is 1 - E[w z] with w = C^T grad log p + z, kinks included.
    """
    pairs = base.pairs()
    pairs = pairs[evaluation.finite[pairs].all(axis=1)]
    if len(pairs) < FEW_DRAWS // 2:
        return False
    rows = pairs.ravel()  # gradients of the others may be infinite
    z = base.z[rows]
    products = (q.whiten(evaluation.grad[rows]) + z) * z
    products = products.reshape(*pairs.shape, -1).mean(axis=1)
    missed = np.abs(q.curvature_diagonal(moments.curvature) - 1.0 + products.mean(axis=0))
    se = products.std(axis=0, ddof=1) / np.sqrt(len(pairs))
    n_se = _N_SE_KINK + np.sqrt(2.0 * np.log(max(len(se), 1)))
    return bool(np.any(missed > MAX_CURVATURE_ERROR + n_se * se))
