r"""Natural-parameter update: natural-gradient ascent in :math:`(S\mu, -S/2)` [1]_ [2]_.

With precision S and step size :math:`\rho`: :math:`S' = (1-\rho) S - \rho E_q[\nabla^2 \log p]` and
:math:`\mu' = \mu + \rho S'^{-1} E_q[\nabla \log p]` (the *new* precision). In whitened form nothing but
:math:`M = (1-\rho) I + \rho A` is needed. Exact in one step of size 1 for a Gaussian target.

References
----------
.. [1] K. Wu and J. R. Gardner (2024). Understanding stochastic natural gradient variational inference. ICML.
   https://doi.org/10.48550/arXiv.2406.01870
.. [2] M. E. Khan and D. Nielsen (2018). Fast yet simple natural-gradient descent for variational inference in
   complex models. ISITA. https://doi.org/10.23919/ISITA.2018.8664326
.. [3] W. Lin, M. Schmidt and M. E. Khan (2020). Handling the positive-definite constraint in the Bayesian learning
   rule. ICML. https://doi.org/10.48550/arXiv.2002.10060
"""

from dataclasses import replace

import numpy as np

from pymc_ngvi.core.types import Array, GaussianState, Moments

#: Relative precision below which a direction counts as lost, and the correction of [3]_ takes over there.
_LOST = 0.1


def _corrected_eigenvalues(eigenvalues: Array, rho: float) -> Array:
    """Return 1 + rho b, b = a - 1, with the second-order term of [3]_ where it would be (nearly) negative.

    Everywhere else the term is left out: where the whitened curvature is huge, its square overshoots the precision,
    which could then only halve in each iteration.
    """
    excess = rho * (eigenvalues - 1.0)
    plain = 1.0 + excess
    # Cap: far outside its range, the quadratic term would make a lost direction needlessly tight.
    corrected = 1.0 + np.maximum(excess, -2.0) + 0.5 * np.maximum(excess, -2.0) ** 2
    return np.where(plain < _LOST, corrected, plain)


def natural[S: GaussianState](state: S, moments: Moments, step_size: float, correct: bool) -> S | None:
    """Take one natural-gradient step in the precision parametrisation."""
    if not moments.is_finite():
        return None
    rho, curvature = step_size, moments.curvature
    scaled = state.precision_scaled_by(state.add_to_diagonal(rho * curvature, 1.0 - rho), moments.grad)
    if scaled is None and correct:
        scaled = state.precision_scaled_by_function(curvature, lambda a: _corrected_eigenvalues(a, rho), moments.grad)
    if scaled is None:
        return None
    new, displacement = scaled
    return replace(new, location=state.location + rho * displacement)
