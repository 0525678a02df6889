"""What speaks against a fit that seems to have converged: lost draws, and kinks that Hessians do not see."""

from typing import Any

import numpy as np

from pymc_ngvi.status import Status
from pymc_ngvi.steps.adaptive_state import AdaptiveState
from pymc_ngvi.types import BaseDraws, Evaluation, Moments

#: Draws below which nothing is certified, and a solved set is followed by a larger one.
FEW_DRAWS = 32
#: Whitened error of the diagonal curvature that a converged coordinate may have.
MAX_CURVATURE_ERROR = 0.2
#: Standard errors by which the curvature that gradients show must differ from the Hessians' to be no noise, in one
#: dimension; in more, what the largest of so many normals adds.
_N_SE_KINK = 2.5
#: Part of the draws at which log p may be not finite in a converged fit: what q has there costs nothing in the means.
MAX_LOST = 0.02


def loses_draws(evaluation: Evaluation) -> bool:
    """Tell whether more draws than a few lie where log p is not finite."""
    return bool(np.mean(~evaluation.finite) > MAX_LOST)


def why_given_up(state: AdaptiveState) -> Status:
    """Return the likeliest reason why the largest sets of draws did not certify the state."""
    if loses_draws(state.evaluation):
        return Status.OUTSIDE_SUPPORT
    if is_kinked(state.q, state.base, state.evaluation, state.moments):
        return Status.NOT_SMOOTH
    return Status.STALLED if state.stalled else Status.NOISE_LIMITED


def is_kinked(q: Any, base: BaseDraws, evaluation: Evaluation, moments: Moments) -> bool:
    """Tell whether gradients show a curvature that Hessians miss: that of kinks, where log p has no Hessian.

    By Stein's identity the diagonal of A is 1 - E[w z] with w = C^T grad log p + z, kinks included.

    Parameters
    ----------
    q : GaussianState
    base : BaseDraws
    evaluation : Evaluation
        At the draws of ``q``.
    moments : Moments
        There, with Hessians.
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
