r"""Gradients in mean and Cholesky factor: natural ones, Euclidean ones, and the step rules that go along them [1]_.

With :math:`\Sigma = C C^T` or :math:`\Sigma^{-1} = T T^T`, the natural gradient in (mean, factor) takes O(d^2) for a
draw: from gradients alone the lower triangle of I - A is that of :math:`E[w z^T]`, or of :math:`E[z v^T]`.

References
----------
.. [1] L. S. L. Tan (2025). Analytic natural gradient updates for Cholesky factor in Gaussian variational
   approximation. https://doi.org/10.48550/arXiv.2109.00375
"""

import abc

from dataclasses import replace
from typing import ClassVar, cast

import numpy as np

from pymc_ngvi.core import linalg
from pymc_ngvi.core.draws import N_REPLICATES
from pymc_ngvi.core.types import Array, Outer
from pymc_ngvi.families.gaussian import AnyGaussian
from pymc_ngvi.methods.estimators import Direction, Moments, Parameters
from pymc_ngvi.methods.schedule import longest_step
from pymc_ngvi.methods.stochastic import (
    FIRST_LENGTH,
    MOMENTUM,
    WINDOW,
    Stochastic,
    StochasticState,
)

# --- directions in the coordinates of mean and factor, and steps along them ---

#: Columns for each outer product, beyond which adding these one by one is quicker than a matrix product.
SUFFIX_SUMS = 40


def times_lower_half(q: AnyGaussian, error: Array | Outer) -> Array:
    """Return the factor times the lower triangle of I - A with a halved diagonal.

    Few outer products take O(n_dim^2): sums over the columns from j on are suffix sums.
    """
    if not (isinstance(error, Outer) and q.factor.ndim == 2 and q.n_dim > SUFFIX_SUMS * len(error.left)):
        matrix = q.outer_mean(error) if isinstance(error, Outer) else error
        return np.asarray(q.structure.product(q.factor, q.structure.half(matrix)))
    total = 0.5 * error.diagonal * q.factor
    for left, right in zip(error.left, error.right / len(error.right), strict=True):
        terms = q.factor * left
        total += (np.cumsum(terms[:, ::-1], axis=1)[:, ::-1] - 0.5 * terms) * right
    return total


def inverse_transpose_times(q: AnyGaussian, error: Array | Outer) -> Array:
    """Return the entries that the factor has of its inverse transpose times I - A."""
    if not isinstance(error, Outer):
        return np.asarray(q.structure.lower_solve(q.factor, error))
    solved = q.structure.solve(q.factor, error.left, transposed=True)
    lower = q.structure.outer(solved, error.right)
    return q.plus_diagonal(lower, error.diagonal / q.curvature_diagonal(q.factor))


def times_diagonal(q: AnyGaussian, scale: Array) -> Array:
    """Return the factor with each column multiplied."""
    return q.factor * scale[q.structure.columns]


def natural_direction(q: AnyGaussian, moments: Moments) -> Parameters:
    """Return the natural gradient of the ELBO in the coordinates of mean and Cholesky factor."""
    # A precision factor shrinks where the covariance grows.
    return Parameters(q.unwhiten(moments.grad), q.factor_sign * times_lower_half(q, moments.error(q)))


def euclidean_direction(q: AnyGaussian, moments: Moments) -> Parameters:
    """Return the gradient of the ELBO in the coordinates of mean and Cholesky factor."""
    return Parameters(q.dewhiten(moments.grad), q.factor_sign * inverse_transpose_times(q, moments.error(q)))


def plus[S: AnyGaussian](q: S, location_step: Array, factor_step: Array, *, signed: bool = False) -> S | None:
    """Add to mean and factor; None where a diagonal entry of it would not stay positive (if signed: not 0)."""
    location, factor = q.location + location_step, q.factor + factor_step
    before, step = q.curvature_diagonal(q.factor), q.curvature_diagonal(factor_step)
    after = np.abs(before + step) if signed else before + step
    is_resolved = (after > linalg.ROUNDING * np.maximum(np.abs(before), np.abs(step))).all()
    return replace(q, location=location, factor=factor) if is_resolved and linalg.all_finite(location, factor) else None


def with_positive_diagonal[S: AnyGaussian](q: S) -> S:
    """Return the same Gaussian with a factor of positive diagonal."""
    entries = q.curvature_diagonal(q.factor)
    return q if (entries > 0.0).all() else replace(q, factor=times_diagonal(q, np.sign(entries)))


def _step_along[S: AnyGaussian](direction: Direction, q: S, moments: Moments, step_size: float) -> S | None:
    """Return the state a step further; None where a moment is not finite, or the factor's diagonal not positive."""
    return plus(q, *(step_size * part for part in direction(q, moments))) if moments.is_finite() else None


# --- updates ---


def cholesky[S: AnyGaussian](state: S, moments: Moments, step_size: float, correct: bool) -> S | None:
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
    return _step_along(natural_direction, state, moments, step_size)


def cholesky_precision[S: AnyGaussian](state: S, moments: Moments, step_size: float, correct: bool) -> S | None:
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


def euclidean[S: AnyGaussian](state: S, moments: Moments, step_size: float, correct: bool) -> S | None:
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
    return _step_along(euclidean_direction, state, moments, step_size)


#: The logarithm of a diagonal entry changes by no more than this in one step: exp(4) is a factor of 55.
_MOST_CHANGE = 4.0
#: A larger change, before it is clipped, loses the retracted diagonal to rounding.
_MOST_RESOLVED = 1e8


def sqrt[S: AnyGaussian](state: S, moments: Moments, step_size: float, correct: bool) -> S | None:
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
    factor_step = step_size * direction.factor + times_diagonal(state, retraction)
    return plus(state, step_size * direction.location, factor_step)


#: Of the updates that move mean and factor in a straight line: the line's direction.
DIRECTIONS: dict[str, Direction] = {
    "cholesky": natural_direction,
    "cholesky_precision": natural_direction,
    "euclidean": euclidean_direction,
}


# --- what the step rules share that add to the coordinates of mean and Cholesky factor, along a direction ---


class Coordinates[M](Stochastic[M]):
    """Small steps along the direction of the update; options as for `Stochastic`."""

    default_window: ClassVar[int | None] = WINDOW
    default_path_draws: ClassVar[int | None] = N_REPLICATES

    def _advance(self, state: StochasticState[M], moments: Moments) -> StochasticState[M] | None:
        if not moments.is_finite():
            return None
        return self._follow(state, cast(Direction, self._direction)(state.iterate, moments), moments)

    @abc.abstractmethod
    def _follow(self, state: StochasticState[M], direction: Parameters, moments: Moments) -> StochasticState[M] | None:
        """Return where one step along (a memory of) a direction leads; None where no step is valid."""

    def _moved(
        self, state: StochasticState[M], location_step: Array, factor_step: Array, *, step_size: float, memory: M
    ) -> StochasticState[M] | None:
        """Move mean and factor; a diagonal entry of the factor may change its sign, but not be 0."""
        found = longest_step(lambda part: plus(state.iterate, part * location_step, part * factor_step, signed=True))
        if found is None:
            return None
        q = with_positive_diagonal(found[0])
        return replace(state, q=q, iterate=found[0], step_size=step_size, memory=memory)


# --- step rule `sgd`: stochastic gradient ascent in the coordinates of mean and Cholesky factor, for comparison ---


class SGD(Coordinates[float]):
    """Plain gradient steps; options as for `Stochastic`.

    ``step_size`` is in the units of the coordinates; by default the first step is as long as a tenth of the
    smallest standard deviation, or less where the gradient is small.
    With ``step_decay`` kappa it is divided by (1 + t)^kappa.
    """

    takes: ClassVar[frozenset[str]] = Stochastic.takes | {"step_decay"}

    def _follow(
        self, state: StochasticState[float], direction: Parameters, moments: Moments
    ) -> StochasticState[float] | None:
        iterate = state.iterate
        first = state.memory or self._step_size
        if not first:
            sd = iterate.sd()
            # Near an optimum with these standard deviations, the ELBO bends by 1/sd^2 along the mean and a factor of
            # the covariance, by sd^2 along a factor of the precision: a longer step would overshoot.
            stable = sd.min() ** 2 if iterate.factor_sign > 0 else min(sd.min() ** 2, 1.0 / sd.max() ** 2)
            longest = max(float(np.sqrt(np.vdot(part, part))) for part in direction)
            first = float(min(0.5 * stable, FIRST_LENGTH * sd.min() / max(longest, np.finfo(float).tiny)))
        rate = self._decayed(first, state.t - 1)
        return self._moved(state, rate * direction.location, rate * direction.factor, step_size=rate, memory=first)


# --- step rule `adam`: Adam [1]_ in the coordinates of mean and Cholesky factor ---
#
# References
# ----------
# .. [1] D. P. Kingma and J. Ba (2015). Adam: a method for stochastic optimization. ICLR.
#    https://doi.org/10.48550/arXiv.1412.6980


_RATE, _RATE_PRECISION = 0.001, 0.01
_BETA_2, _EPSILON = 0.999, 1e-8


class Adam(Coordinates[tuple[Parameters, Parameters]]):
    """Adam along the direction of the update; options as for `Stochastic`.

    It remembers exponential averages of the direction and of its square.

    ``step_size`` is 0.001 by default, but 0.01 for a factor of the precision, with entries like 1 / standard deviation.
    """

    takes: ClassVar[frozenset[str]] = Stochastic.takes | {"step_decay"}

    def _follow(
        self, state: StochasticState[tuple[Parameters, Parameters]], direction: Parameters, moments: Moments
    ) -> StochasticState[tuple[Parameters, Parameters]] | None:
        first, second = state.memory or [Parameters(*map(np.zeros_like, direction))] * 2
        memory = (
            Parameters(*(MOMENTUM * m + (1.0 - MOMENTUM) * d for m, d in zip(first, direction, strict=True))),
            Parameters(*(_BETA_2 * m + (1.0 - _BETA_2) * d * d for m, d in zip(second, direction, strict=True))),
        )
        first_rate = self._step_size or (_RATE if state.iterate.factor_sign > 0 else _RATE_PRECISION)
        rate = self._decayed(first_rate, state.t - 1)
        root = np.sqrt(1.0 - _BETA_2**state.t)
        scale = rate * root / (1.0 - MOMENTUM**state.t)
        steps = [scale * m / (np.sqrt(s) + root * _EPSILON) for m, s in zip(*memory, strict=True)]
        return self._moved(state, *steps, step_size=rate, memory=memory)


# --- step rule `snngm`: stochastic normalised natural gradient ascent with momentum [1]_ ---
#
# The natural gradient in the coordinates of mean and Cholesky factor, divided by its norm, enters an exponential
# average (:math:`\beta = 0.9`, corrected for its start at 0), and the step has the fixed length :math:`\alpha = 0.001
# \sqrt{p}` for p parameters. The norm is Euclidean for factors of the covariance, and that of the Fisher metric for
# factors of the precision. The paper's theorem 3 does not hold for stochastic gradients: its proof needs that no noisy
# direction goes against the gradient.
#
# References
# ----------
# .. [1] L. S. L. Tan (2025). Analytic natural gradient updates for Cholesky factor in Gaussian variational
#    approximation. https://doi.org/10.48550/arXiv.2109.00375


#: Step length for each square root of a parameter.
_LENGTH = 0.001


class SNNGM(Coordinates[Parameters]):
    """Normalised natural gradients with momentum; options as for `Stochastic`.

    ``step_size`` is the length alpha of a step, by default 0.001 times the square root of the number of parameters.
    """

    default_path_draws: ClassVar[int | None] = 1

    def _follow(
        self, state: StochasticState[Parameters], direction: Parameters, moments: Moments
    ) -> StochasticState[Parameters] | None:
        iterate = state.iterate
        norm = float(np.sqrt(sum(np.vdot(part, part) for part in direction)))
        norm = _riemannian_norm(iterate, moments) if iterate.factor_sign < 0 else norm
        if not np.isfinite(norm):
            return None
        part = (1.0 - MOMENTUM) / norm if norm > 0.0 else 0.0  # at the very optimum, path gradients are 0
        before = state.memory or Parameters(*map(np.zeros_like, direction))
        momentum = Parameters(*(part * d + MOMENTUM * m for m, d in zip(before, direction, strict=True)))
        length = self._step_size or _LENGTH * np.sqrt(iterate.n_params)
        scale = length / (1.0 - MOMENTUM**state.t)
        return self._moved(state, scale * momentum.location, scale * momentum.factor, step_size=length, memory=momentum)


def _riemannian_norm(state: AnyGaussian, moments: Moments) -> float:
    """Return the length of the natural gradient in the Fisher metric: its square is twice the gap it predicts."""
    error = moments.error(state)
    whole = state.factor.ndim == 2  # a packed one leaves entries out
    if whole and isinstance(error, Outer) and len(error.left) == 1 and not error.diagonal:
        right = error.right[0] ** 2
        before = np.cumsum(right) - 0.5 * right
        squares = float((error.left[0] ** 2) @ before)
    else:
        flat = state.add_to_diagonal(moments.curvature, -1.0)
        squares = 0.5 * float(np.vdot(flat, flat))
    return float(np.sqrt(np.vdot(moments.grad, moments.grad) + squares))
