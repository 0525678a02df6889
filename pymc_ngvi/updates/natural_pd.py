r"""Natural-parameter update that keeps the precision positive definite at any step size [1]_.

With precision S, :math:`G = -(E_q[\nabla^2 \log p] + S)` and step size :math:`\rho`:
:math:`S' = S + \rho G + \rho^2/2\; G S^{-1} G` and :math:`\mu' = \mu + \rho S^{-1} E_q[\nabla \log p]` (the *old*
precision). In whitened form :math:`M = \frac12 (I + R^2)` with :math:`R = (1-\rho) I + \rho A`, positive definite for
any symmetric A. Agrees with the natural-parameter update to first order in the step size; on a Gaussian target it
converges quadratically instead of in one step.

References
----------
.. [1] W. Lin, M. Schmidt and M. E. Khan (2020). Handling the positive-definite constraint in the Bayesian learning
   rule. ICML. https://doi.org/10.48550/arXiv.2002.10060
"""

from dataclasses import replace

import numpy as np

from pymc_ngvi.core.types import GaussianState, Moments


def natural_pd[S: GaussianState](state: S, moments: Moments, step_size: float, correct: bool) -> S | None:
    """Take one step of the improved Bayesian learning rule."""
    if not moments.is_finite():
        return None
    rho, identity_part = step_size, 1.0 - step_size
    relative = state.add_to_diagonal(rho * moments.curvature, identity_part)
    with np.errstate(over="ignore", invalid="ignore"):  # squares may overflow: no precision then
        matrix = state.add_to_diagonal(0.5 * state.squared(relative), 0.5)
    scaled = state.precision_scaled_by(matrix, moments.grad)
    if scaled is None:  # so far from the identity that its square is singular to rounding
        scaled = state.precision_scaled_by_function(
            moments.curvature, lambda a: 0.5 + 0.5 * (identity_part + rho * a) ** 2, moments.grad
        )
    if scaled is None:
        return None
    return replace(scaled[0], location=state.location + rho * state.unwhiten(moments.grad))
