"""How many nats, and how much of an error in a global parameter, a converged fit may have left."""

from typing import Any

import numpy as np

from pymc_ngvi.core.types import Array, Moments
from pymc_ngvi.steps.adaptive.certificate import MAX_CURVATURE_ERROR
from pymc_ngvi.steps.adaptive.drift import MAX_ERROR
from pymc_ngvi.steps.adaptive.state import AdaptiveState

#: At the default tolerance: nats per dimension that a converged fit may lack (a root-mean-square error of .03 sd in
#: the mean), and the nats below which nothing is asked.
_PER_DIM, _LEAST = 1e-2, 1e-1
#: Part of the nats that no q of the family can gain, which a converged fit may lack.
_UNREACHABLE = 0.03
#: Part of the tolerance that counts where the metric is not exact: gaps are underestimated there.
_INEXACT = 0.3


class Tolerance:
    """Nats that may be left to gain.

    Parameters
    ----------
    tol : float
        Of a fit in 100 dimensions.
    """

    def __init__(self, tol: float) -> None:
        self._tol = tol

    def most(self, q: Any) -> float:
        """Return the tolerance however far the posterior is from Gaussian."""
        # Among group effects, errors that are small in each add up; elsewhere nothing tells them from global ones.
        return self._tol * (1.0 if q.globals_ is None else max(1.0, _PER_DIM * float(q.n_dim)))

    def least(self, q: Any) -> float:
        """Return the tolerance where the posterior is near-Gaussian."""
        return min(self._tol * max(_PER_DIM * float(q.n_dim), _LEAST), self.most(q))

    def at(self, state: AdaptiveState) -> float:
        """Return the tolerance for a state.

        Where the posterior is far from Gaussian, half the variance of log p - log q under q tells how many nats the
        best q of the family lacks; to find that q to within a small part of them is enough.
        """
        q, base, keep = state.q, state.base, state.evaluation.finite
        # log q up to a constant: the draws are whitened normals.
        h = state.evaluation.logp[keep] + 0.5 * np.sum(base.z[keep] ** 2, axis=1)
        unreachable = 0.5 * float(np.var(h)) if len(h) else 0.0
        nats = float(np.clip(_UNREACHABLE * unreachable, self.least(q), self.most(q)))
        return nats if q.exact_metric else _INEXACT * nats


def judged(q: Any, moments: Moments) -> tuple[Array, Array]:
    """Return whitened gradient and diagonal curvature of the coordinates that are looked at one by one.

    Of a q that tells them from group effects, these are the global parameters: of thousands of effects, one is always
    far out by chance, and what they lack together is in the gap.
    """
    curvature = q.curvature_diagonal(moments.curvature)
    if q.globals_ is None:
        return moments.grad, curvature
    return moments.grad[q.globals_], curvature[q.globals_]


def no_coordinate_is_off(state: AdaptiveState) -> bool:
    """Tell whether no coordinate has an error of mean or scale that is large by itself, beyond its noise.

    Global parameters must have come to rest, too, as far as all draws tell since the last large step.
    """
    m, index = state.moments, state.q.globals_
    grad, curvature = judged(state.q, m)
    grad_se, curvature_se = (m.grad_se, m.curvature_se) if index is None else (m.grad_se[index], m.curvature_se[index])
    error, curvature_error = np.abs(grad) - 2.0 * grad_se, np.abs(curvature - 1.0) - 2.0 * curvature_se
    if index is not None and (state.drift is None or not state.drift.is_settled()):
        return False
    mean_met = np.max(error, initial=0.0) <= MAX_ERROR
    return bool(mean_met and np.max(curvature_error, initial=0.0) <= MAX_CURVATURE_ERROR)
