"""Scales of latent effects that a fit has lost: found, and looked for where they may be.

Effects b ~ N(0, s) in their centred form have a second place to go to: b near 0, s near 0, where the ELBO has a plateau
along log s whose slope (1 nat a unit, that of the Jacobian) natural gradients all but miss. There they measure a gap of
.02 nats where 50 are missing: each step fits s to the spread of b in q, and that spread to s.

The curvature tells. In log s it is -2 E[sum b^2] / s^2; at the mean of q alone, -2 sum E[b]^2 / s^2. Where most of it
is owed to the spread of b, s follows q, not the data. Then log s is moved, up or down, with the others fitted to it,
for as long as the ELBO rises.
"""

import functools

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.pattern import Pattern, SummedPattern
from pymc_ngvi.core.types import (
    Array,
    BaseDraws,
    Density,
    Evaluation,
    Expectation,
    GaussianState,
    MeanHessian,
    Moments,
    RowRules,
    RowsTarget,
    Spread,
    Update,
    mean_hessians,
)
from pymc_ngvi.estimators import Estimator
from pymc_ngvi.steps.schedule import Failure, search

# --- a log density given some of its coordinates, which get a narrow Gaussian of their own ---


class Conditioned:
    """The density of the other coordinates given some, times a Gaussian of these.

    A fit of it is one of the conditional posterior, by any family, in the coordinates of the whole.
    """

    def __init__(self, target: Density, index: NDArray[np.intp], point: Array, sd: Array) -> None:
        self._target, self._index, self._point, self._sd = target, index, point, sd
        self.n_dim = target.n_dim

    @property
    def has_hessian(self) -> bool:
        """Whether every operation of the model has a second derivative."""
        return self._target.has_hessian

    def logp_grad(self, theta: Array) -> tuple[Array, Array]:
        """Return log p, (n_draws,), and its gradient, (n_draws, n_dim)."""
        logp, grad = self._target.logp_grad(self._given(theta))
        standard = (theta[:, self._index] - self._point) / self._sd
        grad = grad.copy()
        grad[:, self._index] = -standard / self._sd
        return logp - 0.5 * np.sum(standard**2, axis=1), grad

    def mean_hessian(self, theta: Array) -> MeanHessian:
        """Return the mean of hess log p over draws."""
        return self.mean_hessians([theta])[0]

    def mean_hessians(self, draws: list[Array]) -> list[MeanHessian]:
        """Return the mean of hess log p over each of several sets of draws, together where the whole has them so."""
        found = mean_hessians(self._target, [self._given(theta) for theta in draws])
        return [_GivenHessian(hessian, self._index, self._sd**2, self.n_dim) for hessian in found]

    def expected(
        self, q: Spread, rules: RowRules | None = None, *, adapt: bool = False, least: float = -np.inf
    ) -> Expectation:
        """Return the expectation under a Gaussian, where that of the whole is known without draws."""
        given = _Given(q, self._index, self._point)
        apart = q.location[self._index] - self._point
        square = (apart**2 + q.covariances(self._index, self._index)) / self._sd**2
        own = -0.5 * float(square.sum())
        whole = cast(RowsTarget, self._target).expected(given, rules, adapt=adapt, least=least - own)
        grad = whole.grad.copy()
        grad[self._index] = -apart / self._sd**2
        hessian = _GivenHessian(whole.hessian, self._index, self._sd**2, self.n_dim)
        return whole._replace(value=whole.value + own, grad=grad, hessian=hessian)

    def rows_cover(self, draw: Callable[[], Array]) -> bool:
        """Tell whether rows are all of log p at draws; see `RowsTarget`."""
        return cast(RowsTarget, self._target).rows_cover(lambda: self._given(draw()))

    def _given(self, theta: Array) -> Array:
        given = theta.copy()
        given[:, self._index] = self._point
        return given


class _Given:
    """A Gaussian with some coordinates at a point."""

    def __init__(self, q: Spread, index: NDArray[np.intp], point: Array) -> None:
        self._q, self._is_given = q, np.zeros(len(q.location), dtype=bool)
        self._is_given[index] = True
        self.location = q.location.copy()
        self.location[index] = point

    def covariances(self, rows: NDArray[np.intp], cols: NDArray[np.intp]) -> Array:
        """Return entries of the covariance, (n,)."""
        return np.where(self._is_given[rows] | self._is_given[cols], 0.0, self._q.covariances(rows, cols))

    def covariance_times(self, vectors: Array) -> Array:
        """Return the covariance times each vector, (n_vectors, n_dim)."""
        result = self._q.covariance_times(np.where(self._is_given, 0.0, vectors))
        result[:, self._is_given] = 0.0
        return result


@dataclass(frozen=True)
class _GivenHessian(MeanHessian):
    """Some rows and columns are 0 but for the diagonal: minus the inverse of ``variance``, (n_given,)."""

    whole: MeanHessian
    index: NDArray[np.intp]
    variance: Array
    n_dim: int

    @property
    def pattern(self) -> Pattern | None:
        """That of the whole."""
        return self.whole.pattern

    def products(self, directions: Array) -> Array:
        """Return the matrix times each direction, (n_directions, n_dim)."""
        free = directions.copy()
        free[:, self.index] = 0.0
        products = self.whole.products(free)
        products[:, self.index] = -directions[:, self.index] / self.variance
        return products

    def diagonal(self) -> Array:
        """Return the diagonal, (n_dim,)."""
        diagonal = self.whole.diagonal().copy()
        diagonal[self.index] = -1.0 / self.variance
        return diagonal

    def values(self) -> Array:
        """Return the entries of ``pattern``, (n_entries,)."""
        pattern = self.pattern
        assert pattern is not None
        return self._given(pattern, self.whole.values())

    @property
    def summed(self) -> SummedPattern | None:
        """That of the whole; None where a sum has one of the given coordinates."""
        summed = self.whole.summed
        return None if summed is None or summed.weights[:, self.index].any() else summed

    def summed_values(self) -> Array:
        """Return the entries of ``summed``, (n_entries,)."""
        summed = self.summed
        return super().summed_values() if summed is None else self._given(summed.pattern, self.whole.summed_values())

    def _given(self, pattern: Pattern, of_whole: Array) -> Array:
        values, own = of_whole.copy(), np.zeros(pattern.n_dim)
        own[self.index] = -1.0 / self.variance
        is_given = own != 0.0
        values[is_given[pattern.rows] | is_given[pattern.cols]] = 0.0
        diagonal = is_given[pattern.rows] & (pattern.rows == pattern.cols)
        values[diagonal] = own[pattern.rows[diagonal]]
        return values


# --- scales of latent effects that a fit has lost: found, and looked for where they may be ---

#: Times that lost scales are looked for in one fit, and draws to move on and to judge by.
MAX_RECOVERIES, N_RECOVERY = 4, (16, 32)
#: Part of the curvature in log s that the mean of q has to account for.
_LEAST_OWN = 0.12
#: Steps in log s, the first tried: far, and near; and most of them in a row.
_STRIDES, _MOST_STRIDES = (1.0, 0.5), 10
#: Natural steps of the others after each, at most, and the gap per dimension below which they are fitted.
_MOST_STEPS, _FITTED = 3, 0.02
#: Nats, and standard errors, by which the ELBO must rise.
_LEAST_GAIN, _N_SE = 0.05, 2.0
#: Elements of one variable that are moved one by one; more are moved together.
_FEW = 3
#: Elements beyond which a variable is not looked at: scales of single observations, not of effects.
_MANY = 200


class Tools(NamedTuple):
    """What a fit moves with: its target, update and estimator, and draws to move on and to judge by."""

    target: Density
    update: Update
    estimator: Estimator
    base: BaseDraws
    fresh: BaseDraws


def lost_scales(target: Density, estimator: Estimator, q: GaussianState) -> list[NDArray[np.intp]]:
    """Return the coordinates of scales that follow q instead of the data, those in one array to be moved together.

    It takes one Hessian, and none for a target that does not tell which coordinates are logarithms of positive
    variables.
    """
    positive: Sequence[NDArray[np.intp]] = getattr(target, "positive", ())
    if not positive or not hasattr(q, "precision_product") or not estimator.has_hessian(target):
        return []
    hessian = estimator.hessian_at_mean(target, q)
    own, groups = -hessian.diagonal(), list[NDArray[np.intp]]()
    summed = None if hessian.summed is None else hessian.summed.weights.any(axis=0)
    for index in (i for i in positive if len(i) <= _MANY):
        if summed is not None and summed[index].any():  # what is given of a sum leaves another sum
            continue
        unit = np.zeros((len(index), q.n_dim))
        unit[np.arange(len(index)), index] = 1.0
        curvature = q.precision_product(unit)[np.arange(len(index)), index]
        with np.errstate(invalid="ignore"):
            lost = index[own[index] < _LEAST_OWN * curvature]
        groups += [lost] if len(lost) > _FEW else list(lost[:, None])
    return groups


def recovered(tools: Tools, q: GaussianState) -> GaussianState | None:
    """Return a state of higher ELBO in which scales were moved; None where there is none."""
    groups = lost_scales(tools.target, tools.estimator, q)
    if not groups:
        return None
    start, best = q, tools.estimator.evaluate(tools.target, q, tools.fresh)
    for index in groups:
        for stride in (s * sign for s in _STRIDES for sign in (1.0, -1.0)):
            moved, evaluation = _climb(tools, q, best, index, stride)
            if moved is not q:
                q, best = moved, evaluation
                break
    return None if q is start else q


def _climb(
    tools: Tools, q: GaussianState, best: Evaluation, index: NDArray[np.intp], stride: float
) -> tuple[GaussianState, Evaluation]:
    """Move some scales by strides for as long as the ELBO rises on draws that the others were not fitted to."""
    origin, sd = q.mean()[index], q.sd()[index]
    trial = q
    for k in range(_MOST_STRIDES):
        given = Conditioned(tools.target, index, origin + (k + 1) * stride, sd)
        trial = _fitted(tools, given, trial)
        evaluation = tools.estimator.evaluate(tools.target, trial, tools.fresh)
        if not _is_better(evaluation, best):
            break
        q, best = trial, evaluation
    return q, best


def _is_better(new: Evaluation, old: Evaluation) -> bool:
    if not (new.finite.all() and old.finite.all()):
        return bool(np.isfinite(new.elbo) and new.finite.sum() > old.finite.sum())
    gain = new.elbo - old.elbo
    if not len(new.logp):  # known without draws
        return bool(gain > _LEAST_GAIN)
    difference = new.logp - old.logp
    se = float(np.std(difference, ddof=1)) / np.sqrt(len(difference))
    return bool(gain > max(_LEAST_GAIN, _N_SE * se))


def _fitted(tools: Tools, given: Conditioned, q: GaussianState) -> GaussianState:
    """Return the state after a few natural steps given some coordinates."""
    evaluation = tools.estimator.evaluate(given, q, tools.base)
    for _ in range(_MOST_STEPS):
        if not evaluation.finite.any():
            break
        moments = tools.estimator.moments(given, q, tools.base, evaluation)
        found = search(
            functools.partial(_stepped, tools.update, q, moments),
            lambda state: tools.estimator.evaluate(given, state, tools.base),
            functools.partial(_is_not_below, evaluation),
            elbo=evaluation.elbo,
            slope=2.0 * moments.gap,
            first=1.0,
        )
        if isinstance(found, Failure):
            break
        q, evaluation = found.q, found.evaluation
        if found.size == 1.0 and moments.gap < _FITTED * q.n_dim:
            break
    return q


def _stepped(update: Update, q: GaussianState, moments: Moments, rho: float) -> GaussianState | None:
    return update(q, moments, rho, True)


def _is_not_below(old: Evaluation, new: Evaluation) -> bool:
    loses = not np.isfinite(new.elbo) or new.finite.sum() < old.finite.sum()
    return bool(not loses and new.elbo >= old.elbo - 1e-9 * abs(old.elbo))
