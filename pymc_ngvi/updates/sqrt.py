r"""Square-root update: the factor of the covariance, with a diagonal that stays positive [1]_.

As the update in the Cholesky factor, :math:`C' = C (I + \rho\, \mathrm{tril}_{1/2}(I - A))`, but each diagonal entry
:math:`1 + \rho (1 - A_{jj})/2` of the second factor is retracted to its exponential counterpart
:math:`\exp(\rho (1 - A_{jj})/2)`: equal to first order in the step size, and positive for any curvature.

References
----------
.. [1] N. Kumar, T. Moellenhoff, M. E. Khan and A. Lucchi (2025). Optimization guarantees for square-root
   natural-gradient variational inference. Transactions on Machine Learning Research. https://doi.org/10.48550/arXiv.2507.07853
"""

import numpy as np

from pymc_ngvi.core.types import GaussianState, Moments
from pymc_ngvi.updates.cholesky import natural_direction

#: The logarithm of a diagonal entry changes by no more than this in one step: exp(4) is a factor of 55.
_MOST_CHANGE = 4.0
#: A larger change, before it is clipped, loses the retracted diagonal to rounding.
_MOST_RESOLVED = 1e8


def sqrt[S: GaussianState](state: S, moments: Moments, step_size: float, correct: bool) -> S | None:
    """Take one natural-gradient step in the factor of the covariance, retracted to a positive diagonal."""
    change = 0.5 * step_size * moments.error_diagonal(state)
    if not moments.is_finite() or np.max(np.abs(change), initial=0.0) > _MOST_RESOLVED:
        return None
    direction = natural_direction(state, moments)
    retraction = np.exp(np.clip(change, -_MOST_CHANGE, _MOST_CHANGE)) - 1.0 - change
    factor_step = step_size * direction.factor + state.scaled_columns(retraction)
    return state.plus(step_size * direction.location, factor_step)
