"""Updates: parametrisation and step map. One function and one row each."""

from dataclasses import replace

import numpy as np

from pymc_ngvi.core.types import Array, Direction, GaussianState, Moments, Parameters, Update


def step_along[S: GaussianState](direction: Direction, state: S, moments: Moments, step_size: float) -> S | None:
    """Return the state a step further; None where a moment is not finite, or the factor's diagonal not positive."""
    if not moments.is_finite():
        return None
    location, factor = direction(state, moments)
    return state.plus(step_size * location, step_size * factor)


def natural_direction(state: GaussianState, moments: Moments) -> Parameters:
    """Return the natural gradient of the ELBO in the coordinates of mean and Cholesky factor."""
    # A precision factor shrinks where the covariance grows.
    return Parameters(state.unwhiten(moments.grad), state.factor_sign * state.times_lower_half(moments.error(state)))


def cholesky[S: GaussianState](state: S, moments: Moments, step_size: float, correct: bool) -> S | None:
    r"""Natural gradient in the mean and the Cholesky factor of the covariance [1]_ (its algorithms 1b and 1c).

    With :math:`\Sigma = C C^T` and whitened moments :math:`\tilde g = C^T E_q[\nabla \log p]`, A: :math:`\mu' = \mu +
    \rho C \tilde g` and :math:`C' = C + \rho C \,\mathrm{tril}_{1/2}(I - A)`, the lower triangle with a halved
    diagonal. With gradients only, the lower triangle of I - A is that of :math:`E[w z^T]`, :math:`w = C^T \nabla(\log p
    - \log q)`, which costs O(d^2) a draw: algorithm 1b. Algorithm 1c is the same for a block-diagonal C.

    References
    ----------
    .. [1] L. S. L. Tan (2025). Analytic natural gradient updates for Cholesky factor in Gaussian variational
       approximation. https://doi.org/10.48550/arXiv.2109.00375
    """
    return step_along(natural_direction, state, moments, step_size)


def cholesky_precision[S: GaussianState](state: S, moments: Moments, step_size: float, correct: bool) -> S | None:
    r"""Natural gradient in the mean and the Cholesky factor of the precision [1]_ (its algorithm 2b).

    With :math:`\Sigma^{-1} = T T^T` and moments whitened by :math:`T^{-T}`: :math:`\mu' = \mu + \rho T^{-T} \tilde g`
    and :math:`T' = T + \rho T \,\mathrm{tril}_{1/2}(A - I)`. With gradients only, the lower triangle of I - A is that
    of :math:`E[z v^T]`, :math:`v = T^{-1} \nabla(\log p - \log q)`.

    References
    ----------
    .. [1] L. S. L. Tan (2025). Analytic natural gradient updates for Cholesky factor in Gaussian variational
       approximation. https://doi.org/10.48550/arXiv.2109.00375
    """
    return cholesky(state, moments, step_size, correct)


def euclidean_direction(state: GaussianState, moments: Moments) -> Parameters:
    """Return the gradient of the ELBO in the coordinates of mean and Cholesky factor."""
    return Parameters(
        state.dewhiten(moments.grad), state.factor_sign * state.inverse_transpose_times(moments.error(state))
    )


def euclidean[S: GaussianState](state: S, moments: Moments, step_size: float, correct: bool) -> S | None:
    r"""Euclidean gradient in the mean and a Cholesky factor [1]_ [2]_ (algorithms 1a and 2a of [2]_): for comparison.

    For a factor of the covariance the gradient of the ELBO is :math:`E_q[\nabla h]` in the mean and
    :math:`\mathrm{tril}(E[\nabla h\, z^T])` in C, :math:`h = \log p - \log q`; for a factor T of the precision it is
    :math:`-\mathrm{tril}(T^{-T} E[z v^T])` in T, :math:`v = T^{-1} \nabla h`. Both are the lower triangle of the
    factor's inverse transpose times I - A, but for the sign.

    References
    ----------
    .. [1] M. Titsias and M. Lazaro-Gredilla (2014). Doubly stochastic variational Bayes for non-conjugate inference.
       ICML. https://proceedings.mlr.press/v32/titsias14.html
    .. [2] L. S. L. Tan (2025). Analytic natural gradient updates for Cholesky factor in Gaussian variational
       approximation. https://doi.org/10.48550/arXiv.2109.00375
    """
    return step_along(euclidean_direction, state, moments, step_size)


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


def natural_pd[S: GaussianState](state: S, moments: Moments, step_size: float, correct: bool) -> S | None:
    r"""Natural-parameter update that keeps the precision positive definite at any step size [1]_.

    With precision S, :math:`G = -(E_q[\nabla^2 \log p] + S)` and step size :math:`\rho`: :math:`S' = S + \rho G +
    \rho^2/2\; G S^{-1} G` and :math:`\mu' = \mu + \rho S^{-1} E_q[\nabla \log p]` (the *old* precision). In whitened
    form :math:`M = \frac12 (I + R^2)` with :math:`R = (1-\rho) I + \rho A`, positive definite for any symmetric A.
    Agrees with the natural-parameter update to first order in the step size; on a Gaussian target it converges
    quadratically instead of in one step.

    References
    ----------
    .. [1] W. Lin, M. Schmidt and M. E. Khan (2020). Handling the positive-definite constraint in the Bayesian learning
       rule. ICML. https://doi.org/10.48550/arXiv.2002.10060
    """
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


#: The logarithm of a diagonal entry changes by no more than this in one step: exp(4) is a factor of 55.
_MOST_CHANGE = 4.0
#: A larger change, before it is clipped, loses the retracted diagonal to rounding.
_MOST_RESOLVED = 1e8


def sqrt[S: GaussianState](state: S, moments: Moments, step_size: float, correct: bool) -> S | None:
    r"""Square-root update: the factor of the covariance, with a diagonal that stays positive [1]_.

    As the update in the Cholesky factor, :math:`C' = C (I + \rho\, \mathrm{tril}_{1/2}(I - A))`, but each diagonal
    entry :math:`1 + \rho (1 - A_{jj})/2` of the second factor is retracted to its exponential counterpart
    :math:`\exp(\rho (1 - A_{jj})/2)`: equal to first order in the step size, and positive for any curvature.

    References
    ----------
    .. [1] N. Kumar, T. Moellenhoff, M. E. Khan and A. Lucchi (2025). Optimization guarantees for square-root
       natural-gradient variational inference. Transactions on Machine Learning Research.
       https://doi.org/10.48550/arXiv.2507.07853
    """
    change = 0.5 * step_size * moments.error_diagonal(state)
    if not moments.is_finite() or np.max(np.abs(change), initial=0.0) > _MOST_RESOLVED:
        return None
    direction = natural_direction(state, moments)
    retraction = np.exp(np.clip(change, -_MOST_CHANGE, _MOST_CHANGE)) - 1.0 - change
    factor_step = step_size * direction.factor + state.scaled_columns(retraction)
    return state.plus(step_size * direction.location, factor_step)


UPDATES: dict[str, Update] = {
    "natural": natural,
    "natural_pd": natural_pd,
    "cholesky": cholesky,
    "cholesky_precision": cholesky_precision,
    "sqrt": sqrt,
    "euclidean": euclidean,
}

#: Of the updates that move mean and factor in a straight line: the line's direction.
DIRECTIONS: dict[str, Direction] = {
    "cholesky": natural_direction,
    "cholesky_precision": natural_direction,
    "euclidean": euclidean_direction,
}

__all__ = [
    "DIRECTIONS",
    "UPDATES",
    "cholesky",
    "cholesky_precision",
    "euclidean",
    "natural",
    "natural_pd",
    "sqrt",
]
