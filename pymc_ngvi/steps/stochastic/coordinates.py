"""What the step rules share that add to the coordinates of mean and Cholesky factor, along a direction."""

import abc

from typing import ClassVar, NamedTuple

import numpy as np

from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array, GaussianState, Moments, Outer, Parameters
from pymc_ngvi.steps.stochastic.base import MAX_HALVINGS, Advance, Stochastic, StochasticState


class Coordinates[M](Stochastic[M]):
    """Small steps along the direction of the update; options as for `Stochastic`."""

    default_window: ClassVar[int | None] = 1_000
    default_path_draws: ClassVar[int | None] = 8

    def _advance(self, state: StochasticState[M], moments: Moments) -> Advance[M] | None:
        if not moments.is_finite():
            return None
        assert self._direction is not None
        return self._follow(state, self._direction(state.iterate, moments), moments)

    @abc.abstractmethod
    def _follow(self, state: StochasticState[M], direction: Parameters, moments: Moments) -> Advance[M] | None:
        """Return where one step along (a memory of) a direction leads; None where no step is valid."""

    def _moved(
        self, iterate: GaussianState, location_step: Array, factor_step: Array, *, step_size: float, memory: M
    ) -> Advance[M] | None:
        """Move mean and factor; a diagonal entry of the factor may change its sign, but not be 0."""
        for _ in range(MAX_HALVINGS):
            q = iterate.plus(location_step, factor_step, signed=True)
            if q is not None:
                return Advance(q.unsigned(), q, step_size, memory)
            location_step, factor_step = 0.5 * location_step, 0.5 * factor_step
        return None


def zeros_like(q: GaussianState) -> Parameters:
    """Return zeros in the coordinates of a state: a memory before the first iteration."""
    return Parameters(np.zeros_like(q.location), np.zeros_like(q.factor))


# --- step rule `sgd`: stochastic gradient ascent in the coordinates of mean and Cholesky factor, for comparison ---


#: Length of the first step, in the smallest standard deviation, where no step size is given.
_FIRST_LENGTH = 0.1


class SGD(Coordinates[float]):
    """Plain gradient steps; options as for `Stochastic`.

    ``step_size`` is in the units of the coordinates; by default the first step is as long as a tenth of the
    smallest standard deviation, or less where the gradient is small.
    With ``step_decay`` kappa it is divided by (1 + t)^kappa.
    """

    takes: ClassVar[frozenset[str]] = Stochastic.takes | {"step_decay"}

    def _follow(self, state: StochasticState[float], direction: Parameters, moments: Moments) -> Advance[float] | None:
        iterate = state.iterate
        first = state.memory or self._step_size or self._first_rate(iterate, direction)
        rate = self._decayed(first, state.t - 1)
        return self._moved(iterate, rate * direction.location, rate * direction.factor, step_size=rate, memory=first)

    def _first_rate(self, iterate: GaussianState, direction: Parameters) -> float:
        sd = iterate.sd()
        # Near an optimum with these standard deviations, the ELBO bends by 1/sd^2 along the mean and a factor of the
        # covariance, by sd^2 along a factor of the precision: a longer step would overshoot.
        stable = sd.min() ** 2 if iterate.factor_sign > 0 else min(sd.min() ** 2, 1.0 / sd.max() ** 2)
        longest = max(float(np.sqrt(np.vdot(part, part))) for part in direction)
        return float(min(0.5 * stable, _FIRST_LENGTH * sd.min() / max(longest, np.finfo(float).tiny)))


# --- step rule `adam`: Adam [1]_ in the coordinates of mean and Cholesky factor ---
#
# References
# ----------
# .. [1] D. P. Kingma and J. Ba (2015). Adam: a method for stochastic optimization. ICLR.
#    https://doi.org/10.48550/arXiv.1412.6980


_RATE, _RATE_PRECISION = 0.001, 0.01
_BETA_1, _BETA_2, _EPSILON = 0.9, 0.999, 1e-8


@stored("adam.memory")
class _Memory(NamedTuple):
    """Exponential averages of the direction and of its square, for the mean and for the factor."""

    first: Parameters
    second: Parameters


class Adam(Coordinates[_Memory]):
    """Adam along the direction of the update; options as for `Stochastic`.

    ``step_size`` is .001 by default, but .01 for a factor of the precision, with entries like 1 / standard deviation.
    """

    takes: ClassVar[frozenset[str]] = Stochastic.takes | {"step_decay"}

    def _follow(
        self, state: StochasticState[_Memory], direction: Parameters, moments: Moments
    ) -> Advance[_Memory] | None:
        first, second = state.memory or [zeros_like(state.iterate)] * 2
        memory = _Memory(
            Parameters(*(_averaged(*pair, _BETA_1) for pair in zip(first, direction, strict=True))),
            Parameters(*(_averaged(m, d * d, _BETA_2) for m, d in zip(second, direction, strict=True))),
        )
        first_rate = self._step_size or (_RATE if state.iterate.factor_sign > 0 else _RATE_PRECISION)
        rate = self._decayed(first_rate, state.t - 1)
        root = np.sqrt(1.0 - _BETA_2**state.t)
        scale = rate * root / (1.0 - _BETA_1**state.t)
        steps = [_ratio(*pair, root * _EPSILON, scale) for pair in zip(*memory, strict=True)]
        return self._moved(state.iterate, *steps, step_size=rate, memory=memory)


def _averaged(old: Array, new: Array, beta: float) -> Array:
    """Return beta old + (1 - beta) new, with one array made."""
    result: Array = old - new
    result *= beta
    result += new
    return result


def _ratio(first: Array, second: Array, epsilon: float, scale: float) -> Array:
    """Return scale first / (sqrt(second) + epsilon), with one array made."""
    result: Array = np.sqrt(second)
    result += epsilon
    np.divide(first, result, out=result)
    result *= scale
    return result


# --- step rule `snngm`: stochastic normalised natural gradient ascent with momentum [1]_ ---
#
# The natural gradient in the coordinates of mean and Cholesky factor, divided by its norm, enters an exponential
# average (:math:`\beta = .9`, corrected for its start at 0), and the step has the fixed length :math:`\alpha = .001
# \sqrt{p}` for p parameters. The norm is Euclidean for factors of the covariance, and that of the Fisher metric for
# factors of the precision. The paper's theorem 3 does not hold for stochastic gradients: its proof needs that no noisy
# direction goes against the gradient.
#
# References
# ----------
# .. [1] L. S. L. Tan (2025). Analytic natural gradient updates for Cholesky factor in Gaussian variational
# approximation.
#    https://doi.org/10.48550/arXiv.2109.00375


_SNNGM_MOMENTUM = 0.9
#: Step length for each square root of a parameter.
_LENGTH = 0.001


class SNNGM(Coordinates[Parameters]):
    """Normalised natural gradients with momentum; options as for `Stochastic`.

    ``step_size`` is the length alpha of a step, by default .001 times the square root of the number of parameters.
    """

    default_path_draws: ClassVar[int | None] = 1

    def _follow(
        self, state: StochasticState[Parameters], direction: Parameters, moments: Moments
    ) -> Advance[Parameters] | None:
        iterate = state.iterate
        if iterate.factor_sign < 0:
            norm = _riemannian_norm(iterate, moments)
        else:
            norm = float(np.sqrt(sum(np.vdot(part, part) for part in direction)))
        if not np.isfinite(norm):
            return None
        part = (1.0 - _SNNGM_MOMENTUM) / norm if norm > 0.0 else 0.0  # at the very optimum, path gradients are 0
        before = state.memory or zeros_like(iterate)
        momentum = Parameters(*(_momentum_of(m, d, part) for m, d in zip(before, direction, strict=True)))
        length = self._step_size or _LENGTH * np.sqrt(iterate.n_params)
        scale = length / (1.0 - _SNNGM_MOMENTUM**state.t)
        return self._moved(
            iterate, scale * momentum.location, scale * momentum.factor, step_size=length, memory=momentum
        )


def _momentum_of(momentum: Array, direction: Array, part: float) -> Array:
    result: Array = direction * part
    result += _SNNGM_MOMENTUM * momentum
    return result


def _riemannian_norm(state: GaussianState, moments: Moments) -> float:
    """Return the length of the natural gradient in the Fisher metric: its square is twice the gap it predicts."""
    error = moments.error(state)
    whole = state.factor.ndim == 2  # a packed one leaves entries out
    if whole and isinstance(error, Outer) and len(error.left) == 1 and not error.diagonal:
        right = error.right[0] ** 2
        before = np.cumsum(right) - 0.5 * right
        squares = float((error.left[0] ** 2) @ before)
    else:
        flat = state.flat(state.curvature_error(moments.curvature))
        squares = 0.5 * float(np.vdot(flat, flat))
    return float(np.sqrt(np.vdot(moments.grad, moments.grad) + squares))
