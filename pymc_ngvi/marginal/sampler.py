"""Samples the outside of a model by rounds of Student t mixtures, whatever is inside [1]_.

An inside gives log m, the log density of the outside with all else integrated out, and at each value of the outside
draws of what it has integrated, with weights: their mean is an estimate of m without bias, so that values and draws
are weighted together. Rounds are pooled as draws of the mixture of their proposals, and each proposal is fitted to
all rounds before it.

References
----------
.. [1] J.-M. Cornuet, J.-M. Marin, A. Mira, C. P. Robert (2012). Adaptive multiple importance sampling. Scandinavian
   Journal of Statistics 39(4). https://doi.org/10.1111/j.1467-9469.2011.00756.x
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Protocol, Self, cast

import numpy as np

from pymc_ngvi.core.batch import Batch
from pymc_ngvi.core.importance import MOST_KHAT as HEAVIEST
from pymc_ngvi.core.importance import effective_size
from pymc_ngvi.core.linalg import ROUNDING, logsumexp
from pymc_ngvi.core.messages import Reason, Unavailable
from pymc_ngvi.core.sizes import ENOUGH, N_PREDICTED, SLIGHT
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array, Bools, Indices
from pymc_ngvi.marginal.pooled import (
    LEAST_TAIL,
    MOST_KHAT,
    effective_size_of,
    relative_sd_errors,
    smoothed_weights,
    tail_size,
)
from pymc_ngvi.marginal.pooled import normalised_weights as normalised_weights
from pymc_ngvi.marginal.proposals import (
    FEW,
    LEAST_DF,
    PROFILE,
    Margins,
    Proposal,
    StudentMixture,
    best_proposal,
    mixture_of,
    profile_lines,
    tempered,
)
from pymc_ngvi.marginal.quadrature import MOST_PLAIN

# --- coordinates without funnels: those whose scale another one is the logarithm of are divided by it ---
#
# So it is of the entries of a Cholesky factor beside its diagonal.

#: Largest logarithm of a scale that coordinates are divided by.
_LARGEST_LOG = 200.0


@stored("exact.ratios")
@dataclass(frozen=True, eq=False)
class Ratios:
    """The map between globals and what is divided."""

    #: Which of the globals are divided, by the exponentials of which, over their values where nothing changes; (k,).
    at: Indices
    by: Indices
    centre: Array

    @classmethod
    def about(cls, pairs: Sequence[tuple[int, int]], g: Array) -> "Ratios":
        """Return the map that changes nothing at one value of the globals."""
        at, by = np.array(pairs, dtype=np.intp).reshape(-1, 2).T
        return cls(at, by, g[by])

    def forward(self, g: Array) -> Array:
        """Return what is divided, (n, p)."""
        return self._times(g, -1.0)

    def inverse(self, y: Array) -> Array:
        """Return the globals, (n, p)."""
        return self._times(y, 1.0)

    def _times(self, g: Array, power: float) -> Array:
        result = np.array(g)
        np.multiply.at(result.T, self.at, np.exp(power * self._exponents(g)).T)
        return result

    def log_slope(self, g: Array) -> Array:
        """Return the log determinants of the derivatives of `forward`, (n,)."""
        return -self._exponents(g).sum(axis=1)

    def _exponents(self, g: Array) -> Array:
        return np.clip(g[:, self.by] - self.centre, -_LARGEST_LOG, _LARGEST_LOG)

    def normal(self, mean: Array, cov: Array) -> tuple[Array, Array]:
        """Return mean and covariance of what is divided, to first order."""
        slope, scale = np.eye(len(mean)), np.exp(-self._exponents(mean[None])[0])
        slope[self.at, self.at] = scale
        slope[self.at, self.by] = -mean[self.at] * scale
        return self.forward(mean[None])[0], slope @ cov @ slope.T


# --- modes of a smooth function of few numbers, and its curvature: many values cost little more than one ---
#
# A quasi-Newton method [1]_ from several points at once, whose gradients are differences of values that are evaluated
# together, and which looks at steps of several lengths at a time.
#
# References
# ----------
# .. [1] J. Nocedal and S. J. Wright (2006). Numerical optimization, chapter 6. https://doi.org/10.1007/978-0-387-40065-5

#: Steps at most, and for each coordinate; nats that a step must promise, and the first one of a point of a line.
_MOST, _MOST_OF_EACH, _LEFT, _HIGHER = 25, 3, 0.02, 0.5
#: Lengths of steps that are looked at together, in that of Newton's; farthest move of a coordinate, in its scale,
#: and the square root of how far all of them may lead.
_LENGTHS, _FARTHEST = np.array([2.0, 1.0, 0.5, 0.2, 0.05]), 5.0
#: Differences for gradients, in scales; least and largest scale; curvature over a scale that is flat.
_SPACING, _LEAST, _LARGEST, _FLAT = 0.25, 1e-3, 2.0, 0.1

type Function = Callable[[Array], Array]


class LatentMode(NamedTuple):
    """A mode."""

    #: shape (p,).
    at: Array
    #: Inverse of minus the second derivatives, by differences; shape (p, p).
    cov: Array


def find_modes(function: Function, starts: Array, scale: Array, cov: Array | None = None) -> list[LatentMode]:
    """Go up from some points, (k, p), without those where the function is not finite.

    A covariance may be given, as it is at the modes, about.
    """
    known = np.isfinite(values := function(starts))
    if not known.any():
        return []
    climbs, every = (
        Climbs(function, starts[known], values[known], np.clip(scale, _LEAST, _LARGEST)),
        np.arange(known.sum()),
    )
    climbs.inverse = climbs.inverse if cov is None else np.tile(cov, (len(every), 1, 1))
    climbs.go_up(_MOST + _MOST_OF_EACH * starts.shape[1], every)
    modes = [LatentMode(at, cov) for at, cov in zip(climbs.at, climbs.curvatures(every), strict=True)]
    # Far out, an integral may be of nothing any more, and go up without an end.
    is_near = (np.abs(climbs.at - starts[known]) < _FARTHEST**2 * np.clip(scale, _LEAST, _LARGEST)).all(axis=1)
    return [mode for mode, near in zip(modes, is_near, strict=True) if near] or modes


class Climbs:
    """Where searches have come to: each array has an axis of these, (k, ...)."""

    def __init__(self, function: Function, at: Array, value: Array, scale: Array) -> None:
        self._function, self.at, self.value = function, at.copy(), value.copy()
        self.scale = np.tile(scale, (len(at), 1))
        self._slope, self._bend = np.zeros_like(at), np.zeros_like(at)
        self.inverse, self.is_free = np.zeros((*at.shape, at.shape[1])), np.ones_like(at)
        every = np.arange(len(at))
        self._look(every)
        self._rescale(every)
        self._forget(every)

    def _look(self, rows: Indices) -> None:
        """Take gradients, and minus the second derivatives by single coordinates, by differences."""
        apart = _SPACING * self.scale[rows]
        below, above = self._ends(rows, apart)
        self._slope[rows] = (above - below) / (2.0 * apart)
        self._bend[rows] = (2.0 * self.value[rows, None] - below - above) / apart**2

    def _ends(self, rows: Indices, apart: Array) -> tuple[Array, Array]:
        """Return values so far below and above, coordinate by coordinate, (n, p) each."""
        moves = np.concatenate([sign * apart[:, :, None] * np.eye(apart.shape[1]) for sign in (-1.0, 1.0)], axis=1)
        below, above = np.split(self._values(rows, moves), 2, axis=1)
        return below, above

    def _values(self, rows: Indices, moves: Array) -> Array:
        """Return values at moves from where some are, (n, m), with numbers far below another one for what is none."""
        n, m, p = moves.shape
        values = self._function((self.at[rows, None] + moves).reshape(-1, p)).reshape(n, m)
        values = np.where(np.isfinite(values), values, np.inf)
        lowest = np.minimum(values.min(axis=1), self.value[rows])[:, None]
        return np.where(np.isfinite(values), values, lowest - 10.0)

    def _rescale(self, rows: Indices) -> None:
        self.scale[rows] = np.maximum(1.0 / np.sqrt(np.maximum(self._bend[rows], 1.0 / _LARGEST**2)), _LEAST)

    def _forget(self, rows: Indices) -> None:
        variances = self.is_free / np.maximum(self._bend, (_FLAT / self.scale) ** 2)
        self.inverse[rows] = np.eye(self.at.shape[1]) * variances[rows, :, None]

    def newton_steps(self, rows: Indices) -> tuple[Array, Array]:
        """Return steps to where the function would be highest if it were quadratic, and the nats that they promise."""
        steps = np.einsum("kij,kj->ki", self.inverse[rows], self._slope[rows])
        return steps, 0.5 * np.einsum("ki,ki->k", self._slope[rows], steps)

    def go_up(self, most: int, left: Indices) -> None:
        """Take steps from where some are until they promise little."""
        for _ in range(most):
            direction, rise = self.newton_steps(left)
            left, direction = left[rise >= _LEFT], direction[rise >= _LEFT]
            if not len(left):
                return
            sd = np.sqrt(np.maximum(np.diagonal(self.inverse[left], axis1=1, axis2=2), 0.0))
            limit = (np.abs(direction) / (_FARTHEST * np.maximum(sd, self.scale[left]))).max(axis=1)
            steps = _LENGTHS[:, None] * (direction / np.maximum(1.0, limit)[:, None])[:, None]
            values = self._values(left, steps)
            each, best = np.arange(len(left)), values.argmax(axis=1)
            rises = values[each, best] > self.value[left]
            # Where nothing rises, differences may have been too wide.
            can_narrow = ~rises & (self.scale[left].max(axis=1) > _LEAST)
            up, narrow, step = left[rises], left[can_narrow], steps[each, best][rises]
            before = self._slope[up]
            self.at[up] += step
            self.value[up] = values[each, best][rises]
            self.scale[narrow] = np.maximum(0.3 * self.scale[narrow], _LEAST)
            left = left[rises | can_narrow]
            if not len(left):
                return
            self._look(left)
            self.inverse[up] = _updated(self.inverse[up], step, before - self._slope[up])
            self._rescale(up)
            self._forget(narrow)

    def curvatures(self, rows: Indices) -> Array:
        """Return the inverses of minus the second derivatives, by single coordinates and pairs, (n, p, p)."""
        k, p = len(rows), self.at.shape[1]
        scale, value = self.scale[rows], self.value[rows, None]
        (i, j), of_each = np.tril_indices(p, -1), scale[:, :, None] * np.eye(p)
        below, above = self._ends(rows, scale)
        mixed = self._values(rows, of_each[:, i] + of_each[:, j]) if p > 1 else np.empty((k, 0))
        fall = np.maximum(2.0 * value - below - above, _FLAT)
        across = np.tile(np.eye(p), (k, 1, 1))  # 0 where the function is a sum of functions of one coordinate each
        apart = above[:, i] + above[:, j] - value - mixed
        across[:, i, j] = across[:, j, i] = apart / np.sqrt(fall[:, i] * fall[:, j])
        values, vectors = np.linalg.eigh(across)
        roots = (scale / np.sqrt(fall))[:, :, None] * vectors / np.sqrt(np.maximum(values, 0.01))[:, None]
        return roots @ np.swapaxes(roots, 1, 2)


def profiles(function: Function, points: Array, values: Array, cov: Array, least: Array) -> Climbs:
    """Go up from points of lines along each coordinate, (n p, p), in the other coordinates.

    Along straight lines, the others follow as in a Gaussian, and fall off where the effect of a coordinate has a limit.
    Points that do not come above ``least`` stay where they are, and those that have little to rise.
    """
    n = len(points) // len(cov)
    given = cov - cov.T[:, :, None] * cov.T[:, None] / np.diag(cov)[:, None, None]  # the others, given each coordinate
    with np.errstate(all="ignore"):
        climbs = Climbs(function, points, values, np.sqrt(np.diag(cov)))
        climbs.is_free, climbs.inverse = np.tile(1.0 - np.eye(len(cov)), (n, 1)), np.tile(given, (n, 1, 1))
        rise = climbs.newton_steps(np.arange(len(points)))[1]
        climbs.go_up(_MOST, np.flatnonzero((rise > _HIGHER) & (climbs.value + rise > least)))
    return climbs


def _updated(inverse: Array, step: Array, change: Array) -> Array:
    """Return inverses of minus the second derivatives after steps on which gradients fell by ``change``."""
    along = np.einsum("ki,ki->k", step, change)
    is_bent = along > ROUNDING * np.linalg.norm(step, axis=1) * np.linalg.norm(change, axis=1)
    safe = np.where(is_bent, along, 1.0)[:, None, None]
    left = np.eye(step.shape[1]) - step[:, :, None] * change[:, None] / safe
    new = left @ inverse @ np.swapaxes(left, 1, 2) + step[:, :, None] * step[:, None] / safe
    return np.where(is_bent[:, None, None], new, inverse)


# --- rounds of a sampler ---

#: Effective size that is asked of values with one coordinate, twice as much with each more, up to `ENOUGH`; by how much
#: more is looked for, and how many values there are at most. Of Gaussians in 200 runs each, errors of means and sds are
#: 0.002 and 0.007 with one coordinate, 0.01 with two and three, 0.01 to 0.014 with four to six; of limits of 5.5 %,
#: 0.05, 0.08 and 0.07 sd. Independent draws have two to five times as much.
_OF_ONE, _MORE_SIZE, MOST = 75.0, 20.0, 16_000
#: Seconds that values beyond these may take, up to the size of a sample; seconds of a value that are next to none; part
#: of the values that is effective, about.
_SECONDS, _CHEAP, EFFECTIVE = 0.2, 6e-4, 0.6
#: Values of the first round, and for each coordinate; of a round at most; rounds at most, and how often many
#: coordinates are drawn afresh, or profiles looked at.
FIRST, _FIRST_OF_EACH, _MOST_IN_ROUND, _MOST_ROUNDS, _MOST_AGAIN = 64, 14, 2_048, 12, 3
#: By how much the first proposal is wider than the curvature at a mode.
_FIRST_SCALE = 1.15
#: Part of a round that is drawn from farther out, and with what degrees of freedom: by how much farther at most, and
#: nats that draws of a Gaussian so wide are farther down, in the mean. The farther one only where values cost next to
#: nothing: fits take long there.
_OF_WIDE, _DF_OF_WIDE, _WIDER = 0.12, 5.0, ((2.0, 10.0), (7.0, 40.0))
#: Relative error of a standard deviation from which on more is drawn in its tail, of many coordinates: of few,
#: `SLIGHT`; at least, in that of a Gaussian, and for a tail that counts as thin.
_OF_MANY, _THICKER = 0.08, 1.25
#: Coordinates up to which an integral is right: of more, a proposal is nearer to the draws that have taught it than it
#: should be, so that the integral is 0.08 (of 24) to 0.2 (of 40) too small.
MOST_SURE = MOST_PLAIN
#: Effective part of a round from which on its proposal is kept while fewer values are effective, for each coordinate;
#: from `EFFECTIVE` on it is kept in any case, and the next round may have more times as many values as there are.
#: Below the first, all rounds together are not exact: a walk of which half is sampled, between two sensors, had 0.08,
#: and 6 % of the mass at a mode with 33 %; fits that are right have 0.15 and more, where there are trees 0.5.
GOOD, _ENOUGH, _FASTER = 0.1, 20.0, 16
#: Effective part of a round at least, as far as the size of the next one follows from it; by how much that is larger:
#: draws from farther out count for little; part of all that it has at least, as a tail that is not known yet may want.
_LEAST_PART, _MORE, _OF_TAIL = 0.02, 1.15, 0.1
#: Nats above the mean weight from which on draws are made there; by how much these are wider.
_HEAVY, _FAR_SCALE = 2.0, 1.4
#: Logarithms of squares at the points of a profile: what a point is worth to a variance.
_OF_SQUARES = 2.0 * np.log(np.maximum(np.abs(PROFILE), 1.0))
#: Power of m that values count by before their weights are known.
FLATTENED = 0.25
#: Draws at each value at first, and variance of an estimate of log m from which on there are more of them.
N_DRAWS, _NOISE = 16, 0.12
#: Variance of log weights given the outside up to which values and draws are weighted together; of one value, from
#: which on it does not matter how large it is, as a single draw has all the weight.
MOST_VARIANCE, NO_ESTIMATE = 1.5, 100.0
#: Where values cost little: pairs of points about the start, as far as modes are apart, how many of the highest are
#: climbed from, and in how many coordinates at most.
_STARTS, _CLIMBS, _MOST_CLIMBED = 16, 2, 10
#: Points of a scan, from the start.
_SCAN = np.arange(-8.0, 8.5, 0.5)
#: Values whose weights stand for that of one without a fit, and points about a start without one.
_FEW = 8
#: Standard deviations between modes; nats below the highest one from which on a mode counts as nothing.
_APART, _LOWEST = 3.0, 12.0
#: Standard deviations from the mode between which a proper density falls faster than 1 / distance.
_NEAR_END, _FAR_END = 30.0, 1_000.0
#: Effective values, for each coordinate, that a proposal is fitted to: of a walk with counts, one in five fits was not
#: exact where the weights of a first round were taken as they are.
_PER_DIM = 3.0
#: By how much values from farther out may move a mean, in its errors; those that move by less than `SLIGHT` sds do not
#: count.
MOST_MOVED = 2.0


def size_asked(n_outside: int) -> float:
    """Return the effective size that is asked of values of so many coordinates."""
    return min(_OF_ONE * 2.0 ** (n_outside - 1), ENOUGH)


def size_wanted(n_outside: int, seconds_of_value: float = np.inf) -> float:
    """Return the effective size that is looked for: more where values cost little."""
    return max(size_asked(n_outside) + _MORE_SIZE, min(_SECONDS / seconds_of_value, N_PREDICTED))


def climbs_profiles(n_outside: int, seconds_of_value: float) -> bool:
    """Tell whether profiles are climbed from: two gradients at all points, by differences, take next to no time."""
    n_differences = 2 * len(PROFILE) * n_outside**2
    is_quick = seconds_of_value < min(_CHEAP, 0.5 * _SECONDS / n_differences)
    return 1 < n_outside <= _MOST_CLIMBED and is_quick


class Hopeless(Unavailable):
    """Proposals do not come near to the posterior of the outside; the sentence says so."""


@dataclass(frozen=True, eq=False)
class Pairs(Batch):
    """Draws of what is inside at one value of the outside; an inside may have more to say of them."""

    #: log p - log q', q' being what they are drawn from; -inf where p is 0, or where there is no fit; shape (n_draws,).
    log_ratio: Array
    #: log p - log q, q being the part of q' that is no defence; shape (n_own,).
    own_log_ratio: Array
    #: log m where weights vary too much for their mean.
    log_estimate: Array

    def moved(self, by: Array) -> Self:
        """Return those of another density of the outside: weights and log m are moved, by (n,)."""
        own, log_ratio = self.own_log_ratio + by[:, None], self.log_ratio + by[:, None]
        return replace(self, log_ratio=log_ratio, own_log_ratio=own, log_estimate=self.log_estimate + by)


class Inside(Protocol):
    """What is integrated given the outside."""

    def log_m(self, g: Array, /) -> Array:
        """Return log m at values of the outside, (n,) from (n, p), -inf where there is no fit."""

    def pairs(self, g: Array, n_draws: int, rng: np.random.Generator, /) -> Pairs:
        """Return draws at values of the outside, (n, p), with weights; of these values, none depends on the others."""


@dataclass(frozen=True, eq=False)
class WeightedValues:
    """Weighted values of the outside, each with draws of the inside."""

    #: shape (n, p).
    g: Array
    #: Of all proposals together; shape (n,).
    log_density: Array

    def _of_pairs(self, name: str) -> Array:
        """Return a field of the draws of the inside."""
        return getattr(self, name)

    @cached_property
    def _log_mean(self) -> Array:
        log_ratio = self._of_pairs("log_ratio")
        return logsumexp(log_ratio, axis=1) - np.log(log_ratio.shape[1])

    @cached_property
    def log_marginal(self) -> Array:
        """Estimates of log m, (n,)."""
        return self._of_pairs("log_estimate") if self.variance > MOST_VARIANCE else self._log_mean

    @cached_property
    def _smoothed(self) -> tuple[Array, float]:
        return smoothed_weights(self.log_marginal - self.log_density)

    @property
    def weights(self) -> Array:
        """Smoothed weights of the values, (n,); they add up to 1."""
        return self._smoothed[0]

    @property
    def khat(self) -> float:
        """Pareto k-hat of the weights."""
        return self._smoothed[1]

    @property
    def effective_size(self) -> float:
        """Effective number of values."""
        return effective_size_of(self.weights)

    @cached_property
    def variance(self) -> float:
        """Variance of the log weights of the inside at a value, in the mean over these.

        Far out, where values have no weight, log p may overflow, and the variance with it.
        """
        return float(
            normalised_weights(self._log_mean - self.log_density)
            @ np.minimum(variances_of(self._of_pairs("own_log_ratio")), NO_ESTIMATE)
        )


@dataclass(frozen=True, eq=False)
class OutsideDraws(WeightedValues):
    """What a sampler gives: values of which some are from farther out, and some have no fit."""

    #: Of the proposals that are not from farther out; shape (n,).
    log_near: Array
    #: Which values are from farther out; shape (n,).
    is_wide: Bools
    #: Of all values, those that are left out among them, and which are not.
    parts: Sequence[Pairs]
    has_fit: Bools
    #: Values without a fit, (n_lost, p).
    without_fit: Array

    @cached_property
    def pairs(self) -> Pairs:
        """Draws of the inside, of all n."""
        return type(self.parts[0]).joined(self.parts)[self.has_fit]

    def _of_pairs(self, name: str) -> Array:
        """Return a field of these, without the others, which may be large."""
        return np.concatenate([getattr(part, name) for part in self.parts])[self.has_fit]

    @cached_property
    def moved(self) -> float:
        """By how much values from farther out move a mean or an sd, in its errors; 0 where it is by little."""
        before = normalised_weights(np.where(self.is_wide, -np.inf, self.log_marginal - self.log_near))
        (mean, sd, error), (new_mean, new_sd, new_error) = (_moments(self.g, w) for w in (before, self.weights))
        change = np.abs(np.concatenate([(new_mean - mean) / new_sd, np.log(new_sd / sd)]))
        large = change > SLIGHT
        return float((change[large] / np.hypot(error, new_error)[large]).max(initial=0.0))

    @cached_property
    def lost(self) -> float:
        """Part of the weight that is where there is no fit, if a value there counts as the nearest ones with a fit."""
        if not len(self.without_fit):
            return 0.0
        from scipy.spatial import cKDTree

        sd = _moments(self.g, self.weights)[1]
        nearest = cKDTree(self.g / sd).query(self.without_fit / sd, k=min(_FEW, len(self.g)))[1]
        missing = float(self.weights[nearest].mean(axis=-1).sum())
        return missing / (1.0 + missing)

    @property
    def is_settled(self) -> bool:
        """Tell whether weights show nothing that is missed."""
        return self.khat < HEAVIEST and self.moved < MOST_MOVED

    @property
    def has_light_tails(self) -> bool:
        """Tell whether no tail of a coordinate rests on few values."""
        return self.khat < MOST_KHAT and tail_size(self.g, self.weights) > LEAST_TAIL * self.effective_size


@dataclass
class _Round:
    """Values of one proposal, and what is inside there."""

    proposal: Proposal | StudentMixture
    g: Array
    pairs: Pairs
    is_wide: bool


class Sampler:
    """Samples the outside, knowing nothing of what is inside."""

    def __init__(
        self,
        inside: Inside,
        start: Array,
        scale: Array,
        seed: int,
        *,
        wanted: float = 0.0,
        most: int = MOST,
        n_draws: int = N_DRAWS,
        seconds: float = np.inf,
        cov: Array | None = None,
        is_at_mode: bool = True,
        others: Sequence[Array] = (),
        look: tuple[StudentMixture, Array] | None = None,
    ) -> None:
        if cov is not None and not is_at_mode:  # they are of the posterior given other data, whose mode is near
            modes = find_modes(inside.log_m, start[None], np.sqrt(np.diag(cov)), cov)
            start, cov = modes[0] if modes else (start, None)
        self._inside, self._start, self._scale = inside, start, scale
        #: Covariance about the start, if that is as good as a mode; other points to climb from.
        self._cov, self._others = cov, others
        #: Components at several modes.
        self._of_modes: StudentMixture | None = None
        self._rng, self._wanted = np.random.default_rng(seed), wanted or size_wanted(len(start))
        self._most, self._n_draws, self._seconds, self._is_cheap = most, n_draws, seconds, seconds < _CHEAP
        self._df, self._least_size = max(LEAST_DF, float(len(start))), max(_PER_DIM * len(start), 25.0)
        least = SLIGHT if len(start) <= MOST_SURE else _OF_MANY
        self._most_sd_error = max(least, _THICKER / np.sqrt(2.0 * self._wanted))
        self._rounds: list[_Round] = []
        self._n_first = min(FIRST + _FIRST_OF_EACH * len(start), most)
        #: Whether a proposal was fitted to draws.
        self.has_learned = False
        if look is not None:
            self._rounds.append(_Round(*look, inside.pairs(look[1], n_draws, self._rng), is_wide=True))

    def run(self) -> OutsideDraws:
        """Find the modes, then draw rounds until there is enough."""
        p = len(self._start)
        proposal, margins = self._first()
        best, n, total = (0.0, proposal), self._n_first, 0
        n_looks = _MOST_AGAIN if climbs_profiles(p, self._seconds) else 0
        for _ in range(_MOST_ROUNDS):
            self._draw(proposal, n)
            draws, part = self._pooled(), self.efficiency()
            total, size = sum(len(one.g) for one in self._rounds), draws.effective_size
            n_draws = self._n_draws_for(draws.variance)
            if n_draws > self._n_draws:  # a round with fewer draws has shown the way, and is left out
                self._n_draws, self._rounds, total, size = n_draws, [], 0, 0.0
            may_learn = p > MOST_SURE and self.has_learned  # draws are taken afresh then
            is_light = draws.is_settled and (draws.khat < MOST_KHAT if may_learn else draws.has_light_tails)
            is_settled = is_light and relative_sd_errors(draws.g, draws.weights).max() < self._most_sd_error
            is_taught = p <= MOST_SURE or part > GOOD  # of many, draws are taken afresh from the last proposal
            if n_looks and (size >= self._wanted or 2 * total >= self._most):
                n_looks -= 1
                if self._draw_along(draws):
                    draws, best, n = self._pooled(), (0.0, proposal), self._n_first
                    proposal, margins = self._fitted(draws, margins)
                    continue
                n_looks = 0
            if total >= self._most or (size >= self._wanted and is_settled and is_taught):
                break
            is_near = self._cov is not None and is_light and part > EFFECTIVE
            most = max(total, FIRST) * (_FASTER if is_near else 1)
            n = int(
                np.clip(self._missing(size, part, total), FIRST // 2, min(most, self._most - total, _MOST_IN_ROUND))
            )
            if proposal is best[1] or part > best[0]:  # more draws of the same one know better how good it is
                best = part, proposal
            is_enough = size >= (_ENOUGH if is_settled else 0.5 * _ENOUGH) * p
            if (is_near and size < self._wanted) or (best[0] > GOOD and not is_enough):
                proposal = best[1]
                continue
            proposal, margins = self._fitted(draws, margins)
        if draws.effective_size < 1.0 + 0.5 * p or not np.ptp(draws.g, axis=0).all():
            raise Hopeless(Reason.HOPELESS, "one draw of the hyperparameters has nearly all the weight")
        return draws

    def again(self) -> OutsideDraws:
        """Return the same draws where the inside has changed a little."""
        for one in self._rounds:
            one.pairs = self._inside.pairs(one.g, self._n_draws, self._rng)
        return self._pooled()

    def afresh(self, draws: OutsideDraws) -> OutsideDraws:
        """Return draws of a proposal that all of those before have taught, and no others; again where that was bad."""
        for _ in range(_MOST_AGAIN):
            proposal, n = self._fitted(draws, self.proposal.margins)[0], self._n_first
            self._rounds, total, size = [], 0, 0.0
            while size < self._wanted and total < self._most:
                self._draw(proposal, n)
                draws = self._pooled()
                total, size = len(draws.has_fit), draws.effective_size
                n = int(np.clip(self._missing(size, self.efficiency(), total), FIRST // 2, self._most))
            if draws.has_light_tails:
                break
        return draws

    def _missing(self, size: float, part: float, total: int) -> float:
        """Return how many more values make up for what an effective size lacks; some in any case, for the tails."""
        return max(_MORE * (self._wanted - size) / max(part, _LEAST_PART), _OF_TAIL * total)

    @property
    def proposal(self) -> Proposal:
        """The last one, of which a part is farther out."""
        near, wide = (cast(Proposal, one.proposal) for one in self._rounds[-2:])
        return replace(near, mixture=near.mixture.joined(wide.mixture, _OF_WIDE / (1.0 + _OF_WIDE)))

    # --- the first proposal ---

    def _first(self) -> tuple[Proposal, Margins]:
        """Return a Student t at each mode: in the coordinates of the margins at a single one, or in straight ones."""
        p, log_m, modes = len(self._start), self._inside.log_m, self._begun()
        while True:  # until the highest mode is the one whose profile is known
            first = modes[0]
            lines = profile_lines(first.at, first.cov, PROFILE)
            values = log_m(lines.reshape(-1, p)).reshape(lines.shape[:2])
            modes = self._with_peaks(modes, np.swapaxes(lines, 0, 1), values.T)
            if modes[0] is first:
                break
        self._refuse_improper(first, values)
        margins, scale = Margins.of_profiles(first.at, first.cov, values), _FIRST_SCALE ** min(1.0, FEW / p)
        if len(modes) == 1:
            self._draw_far(first, margins, lines, values)
            return Proposal(mixture_of(np.zeros((1, p)), scale * np.eye(p)[None], self._df), margins), margins
        # Margins of all together would have two tops.
        at, covs = np.array([mode.at for mode in modes]), np.array([mode.cov for mode in modes])
        mean = at.mean(axis=0)
        margins = Margins.of_moments(mean, covs.mean(axis=0) + (at - mean).T @ (at - mean) / len(at))
        roots = np.array([margins.forward(mean + root.T).T for root in np.linalg.cholesky(scale**2 * covs)])
        self._of_modes = mixture_of(margins.forward(at), roots, self._df)
        return Proposal(self._of_modes, margins), margins

    def _draw_far(self, mode: LatentMode, margins: Margins, lines: Array, values: Array) -> None:
        """Draw about points of profiles that are e^2 times as high as the margins have them, and matter to variances.

        Of a tail with a thousandth of the mass, which has a tenth of a variance all the same, no other draws tell.
        """
        points, p = lines.reshape(-1, len(mode.at)), len(mode.at)
        log_q = (margins.log_slope(points) - 0.5 * (margins.forward(points) ** 2).sum(axis=1)).reshape(values.shape)
        least = values.max() - 0.5 * _LOWEST - _OF_SQUARES[:, None]
        is_far = (values - log_q > values.max() - log_q.max() + _HEAVY) & (values > least)
        if is_far.any():
            at = lines[is_far]
            roots = np.broadcast_to(2.0 * np.linalg.cholesky(mode.cov), (len(at), p, p))
            self._add((mixture_of(at, roots, _DF_OF_WIDE), FIRST))

    def _begun(self) -> list[LatentMode]:
        """Return the mode above the start; of one coordinate, those that a scan about it shows, too."""
        p, log_m, start = len(self._start), self._inside.log_m, self._start
        if not np.isfinite(log_m(start[None])[0]):  # there may be a fit nearby
            near = start + self._scale * (np.random.default_rng(p).random((_FEW, p)) - 0.5)
            start = near[np.argmax(np.isfinite(log_m(near)))]
        known = [] if self._cov is None else [LatentMode(start, self._cov)]
        points = [*self._others] if known else [start, *self._others]
        if not known and 1 < p <= _MOST_CLIMBED and self._is_cheap:
            # With their images on the other side: a start may be where signs don't matter, and as far from both modes.
            apart = _APART * self._rng.standard_normal((_STARTS, p))
            values = np.nan_to_num(log_m(np.concatenate([start + apart, start - apart])), nan=-np.inf)
            highest = np.argsort(-values.reshape(2, -1).max(axis=0))[:_CLIMBS]
            points += [*(start + apart[highest]), *(start - apart[highest])]
        modes = self._above(points, known)
        if not modes:
            raise Hopeless(Reason.HOPELESS, "the latent variables can't be fitted where the hyperparameters start")
        if p == 1:
            line = self._start + _SCAN[:, None]
            return self._with_peaks(modes, line[None], log_m(line)[None])
        return modes

    def _with_peaks(self, modes: Sequence[LatentMode], lines: Array, values: Array) -> list[LatentMode]:
        """Return modes and those above peaks along lines, (n_lines, n, p), the highest one first."""
        values = np.where(np.isfinite(values), values, -np.inf)
        inner = values[:, 1:-1]
        is_peak = (inner > values[:, :-2]) & (inner > values[:, 2:]) & (inner > values.max() - 2.0 * _LOWEST)
        return self._above([point for point in lines[:, 1:-1][is_peak] if _is_apart(point, modes)], modes)

    def _above(self, points: Sequence[Array], modes: Sequence[LatentMode]) -> list[LatentMode]:
        """Return modes and those above some points, the highest one first, without those that are far below it."""
        found = find_modes(self._inside.log_m, np.array(points), self._scale) if len(points) else []
        if not found:
            return [*modes]
        kept = [*(modes or found[:1])]
        for mode in found:  # those that are apart from these and each other
            again = [mode]
            if _is_apart(mode.at, kept):  # along a ridge, a climb may end too early; or where there is no fit from here
                again = find_modes(self._inside.log_m, mode.at[None], np.sqrt(np.diag(mode.cov)), mode.cov)
            kept += [new for new in again if all(_is_apart(new.at, [k]) or _is_apart(k.at, [new]) for k in kept)]
        masses = self._inside.log_m(np.array([mode.at for mode in kept]))
        masses = masses + [0.5 * np.linalg.slogdet(mode.cov)[1] for mode in kept]
        return [kept[k] for k in np.argsort(-masses, kind="stable") if masses[k] > masses.max() - _LOWEST]

    def _refuse_improper(self, mode: LatentMode, values: Array) -> None:
        """Refuse a density that falls more slowly than 1 / distance along a line on which it is high at an end."""
        ends = [(side, k) for side in (0, -1) for k in np.flatnonzero(values[side] > values.max() - _LOWEST)]
        if not ends:
            return
        at = np.array([[np.sign(PROFILE[side]) * distance for side, _ in ends] for distance in (_NEAR_END, _FAR_END)])
        points = np.array(
            [profile_lines(mode.at, mode.cov, each)[np.arange(len(ends)), [k for _, k in ends]] for each in at]
        )
        near, far = self._inside.log_m(points.reshape(-1, len(mode.at))).reshape(2, -1)
        known = np.isfinite(near) & np.isfinite(far)
        if (near[known] - far[known] < np.log(_FAR_END / _NEAR_END)).any():
            raise Hopeless(Reason.HOPELESS, "the posterior of the hyperparameters may be improper")

    # --- rounds ---

    def _draw(self, proposal: Proposal, n: int) -> None:
        """Draw a round, a part of it from farther out."""
        n_wide = max(1, round(_OF_WIDE * n))
        one, p = proposal.mixture.as_one(), len(self._start)
        near, far = (one.scaled(min(most, float(np.sqrt(1.0 + 2.0 * nats / p)))) for most, nats in _WIDER)
        mixture = near.joined(far, 0.5) if self._is_cheap else near
        self._add(
            (proposal, max(1, n - n_wide)), (Proposal(replace(mixture, df=_DF_OF_WIDE), proposal.margins), n_wide)
        )

    def _add(self, *parts: tuple[Proposal | StudentMixture, int]) -> None:
        """Draw from one or two proposals, of which the second is from farther out, all together."""
        g = [proposal.draws(n, self._rng) for proposal, n in parts]
        pairs = self._inside.pairs(np.concatenate(g), self._n_draws, self._rng)
        ends = np.cumsum([0, *map(len, g)])
        self._rounds += [
            _Round(proposal, g[k], pairs[ends[k] : ends[k + 1]], k > 0) for k, (proposal, _) in enumerate(parts)
        ]

    def _draw_along(self, draws: OutsideDraws) -> bool:
        """Draw about points of profiles whose weights would be high and matter to variances; return if there are any.

        No other draws tell of a tail that bends away from them, as where the effect of a coordinate has a limit.
        """
        p, log_m = len(self._start), self._inside.log_m
        cov = np.cov(draws.g.T, aweights=draws.weights, ddof=0)
        lines = profile_lines(draws.weights @ draws.g, cov, PROFILE).reshape(-1, p)
        values = log_m(lines)
        least = values.max() - 0.5 * _LOWEST - np.repeat(_OF_SQUARES, p)
        found = profiles(log_m, lines, values, cov, least)
        mean_weight = logsumexp(draws.log_marginal - draws.log_density) - np.log(draws.has_fit.sum())
        log_weights = found.value - self._log_densities(found.at)[0] + np.log(len(draws.has_fit)) - mean_weight
        far = np.flatnonzero((log_weights > _HEAVY) & (found.value > least))
        if len(far):
            roots = _FAR_SCALE * np.linalg.cholesky(found.curvatures(far))
            self._add((mixture_of(found.at[far], roots, _DF_OF_WIDE), FIRST))
            self._rounds.insert(0, self._rounds.pop())  # the last ones are those of a proposal
        return len(far) > 0

    def _log_densities(self, g: Array) -> tuple[Array, Array]:
        """Return log densities of all rounds, times the draws that they have, and of those that are not farther out."""
        log_parts = np.array([np.log(len(one.g)) + one.proposal.log_density(g) for one in self._rounds])
        is_wide = np.array([one.is_wide for one in self._rounds])
        return logsumexp(log_parts, axis=0), logsumexp(log_parts[~is_wide], axis=0)

    def _pooled(self) -> OutsideDraws:
        """Return all rounds as draws of the mixture of their proposals, without those where there is no fit."""
        g = np.concatenate([one.g for one in self._rounds])
        parts = [one.pairs for one in self._rounds]
        log_all, log_near = self._log_densities(g)
        has_fit = np.concatenate([np.isfinite(part.log_ratio).any(axis=1) for part in parts])
        if not has_fit.any():
            raise Hopeless(Reason.HOPELESS, "the latent variables can't be fitted at any value of the hyperparameters")
        is_wide = np.repeat([one.is_wide for one in self._rounds], [len(one.g) for one in self._rounds])
        return OutsideDraws(
            g[has_fit],
            log_all[has_fit] - np.log(len(g)) - np.log(has_fit.mean()),
            log_near[has_fit] - np.log((~is_wide).sum()),
            is_wide[has_fit],
            parts,
            has_fit,
            g[~has_fit],
        )

    def efficiency(self) -> float:
        """Return the effective part of the values of the last round by itself, but for those from farther out."""
        last = self._rounds[-2]
        return effective_size(logsumexp(last.pairs.log_ratio, axis=1) - last.proposal.log_density(last.g)) / len(last.g)

    def _n_draws_for(self, variance: float) -> int:
        """Return how many draws make an estimate of log m precise enough."""
        n = self._n_draws
        if variance > MOST_VARIANCE:
            return n
        while np.expm1(variance) > _NOISE * n:
            n *= 2
        return n

    def _fitted(self, draws: OutsideDraws, before: Margins) -> tuple[Proposal, Margins]:
        """Return a proposal fitted to what is known: margins, and a mixture of Student t of their normals."""
        log_weights, self.has_learned = draws.log_marginal - draws.log_density, True
        margins = before
        if self._of_modes is None:
            margins = Margins.fitted(draws.g, normalised_weights(tempered(log_weights, self._least_size)), before)
        of_tails = np.log1p(_thin_squares(draws.g, normalised_weights(log_weights)))
        log_weights = tempered(log_weights + of_tails, self._least_size)
        return best_proposal(
            draws.g, log_weights, draws.log_marginal + of_tails, margins, self._df, self._of_modes
        ), margins


def _thin_squares(g: Array, weights: Array) -> Array:
    """Return the largest square of coordinates with thin tails, standardised, (n,); 0 where there are none.

    The variance of an estimated mean of f is least for draws in proportion to p |f| [1]_: of p itself, and of squares
    of coordinates whose standard deviations are known less well than that of a Gaussian.

    References
    ----------
    .. [1] A. B. Owen (2013). Monte Carlo theory, methods and examples, section 9.1. https://artowen.su.domains/mc/
    """
    thin = relative_sd_errors(g, weights) > _THICKER * np.sqrt(0.5 * np.sum(weights**2))
    mean, sd, _ = _moments(g[:, thin], weights)
    z = (g[:, thin] - mean) / sd
    return np.max(z**2, axis=1, initial=0.0)


def _is_apart(at: Array, modes: Sequence[LatentMode]) -> bool:
    """Tell whether a point is far from all modes, in their standard deviations."""
    apart = [(at - mode.at, mode.cov) for mode in modes]
    return all(d @ np.linalg.solve(cov, d) > _APART**2 for d, cov in apart)


def _moments(g: Array, weights: Array) -> tuple[Array, Array, Array]:
    """Return means and sds, (p,), and their errors, in sds and relative, (2 p,)."""
    mean = weights @ g
    apart = g - mean
    sd = np.sqrt(np.maximum(weights @ apart**2, np.finfo(float).tiny))  # one may have all the weight
    return mean, sd, np.concatenate([np.sqrt(weights**2 @ apart**2) / sd, relative_sd_errors(g, weights)])


def variances_of(log_ratio: Array) -> Array:
    """Return variances of log weights along the last axis, of those that are finite; inf where fewer than half are."""
    finite = np.isfinite(log_ratio)
    n = finite.sum(axis=-1)
    filled = np.where(finite, log_ratio, 0.0)
    mean = filled.sum(axis=-1) / np.maximum(n, 1)
    with np.errstate(all="ignore"):  # far out, where q is nowhere near p
        squares = np.where(finite, (filled - mean[..., None]) ** 2, 0.0).sum(axis=-1)
    return np.where(2 * n >= log_ratio.shape[-1], squares / np.maximum(n - 1, 1), np.inf)
