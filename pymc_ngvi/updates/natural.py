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

import numpy as np

from pymc_ngvi.families.diagonal import DiagonalState
from pymc_ngvi.families.full import FullState
from pymc_ngvi.linalg import ROUNDING, reverse_cholesky, reverse_cholesky_of_product, solve_upper
from pymc_ngvi.types import Array, Moments

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


def _full_step(state: FullState, moments: Moments, rho: float, correct: bool) -> FullState | None:
    matrix = rho * moments.curvature
    matrix[np.diag_indices_from(matrix)] += 1.0 - rho
    upper = reverse_cholesky(matrix)
    if upper is None:
        if not correct or not np.isfinite(moments.curvature).all():
            return None
        eigenvalues, vectors = np.linalg.eigh(moments.curvature)
        upper = reverse_cholesky_of_product(vectors * np.sqrt(_corrected_eigenvalues(eigenvalues, rho)))
    # C' = C U^-T stays lower triangular; C' C'^T = C M^-1 C^T.
    factor = np.tril(solve_upper(upper, state.factor.T).T)
    shift = solve_upper(upper, moments.grad)
    return FullState(state.location + rho * (factor @ shift), factor)


def _diagonal_step(state: DiagonalState, moments: Moments, rho: float, correct: bool) -> DiagonalState | None:
    excess = rho * (moments.curvature - 1.0)
    relative = 1.0 + excess
    if not np.isfinite(relative).all():
        return None
    if np.any(relative <= ROUNDING * np.maximum(1.0, np.abs(excess))):
        if not correct:
            return None
        relative = _corrected_eigenvalues(moments.curvature, rho)
    scale = state.scale / np.sqrt(relative)
    return DiagonalState(state.location + rho * state.scale * moments.grad / relative, scale)


def natural(
    state: FullState | DiagonalState, moments: Moments, step_size: float, correct: bool
) -> FullState | DiagonalState | None:
    """Take one natural-gradient step in the precision parametrisation.

    Parameters
    ----------
    state : FullState or DiagonalState
        Not modified.
    moments : Moments
        Whitened by ``state``.
    step_size : float
        In (0, 1].
    correct : bool
        Where the new precision would not be positive definite: keep it so by the correction of Lin, Schmidt and
        Khan in the directions that are lost (True), or return None (False).

    Returns
    -------
    FullState or DiagonalState or None
        None where no valid precision results.
    """
    if isinstance(state, FullState):
        return _full_step(state, moments, step_size, correct)
    return _diagonal_step(state, moments, step_size, correct)
