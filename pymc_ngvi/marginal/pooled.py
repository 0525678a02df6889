"""Posteriors as weighted draws: how these are picked, how well they tell moments, what is left given each."""

import abc
import functools
import math

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from pymc_ngvi.core.draws import N_REPLICATES
from pymc_ngvi.core.importance import (
    MIN_KHAT_DRAWS,
    UNKNOWN,
    Estimate,
    effective_size,
    khat_error,
    khat_limit,
    smoothed,
    weigh,
)
from pymc_ngvi.core.linalg import logsumexp
from pymc_ngvi.core.sizes import ENOUGH, HELD, TAIL
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array, Bools, Indices
from pymc_ngvi.core.verdict import Condition, PoolVerdict, few_draws
from pymc_ngvi.density import ModelDensity

# --- weighted draws: how they are picked, and how well they tell moments and limits ---

#: k-hat of the weights of a pool at most, but for its standard error.
MOST_KHAT = 0.5
#: Effective size at least of the draws in a tail, as a part of all: equal weights have 0.05, six fits
#: of a walk whose scale had a limit 0.3 sd off 0.0025 to 0.0165.
LEAST_TAIL = 0.02
#: The largest of weights that are nearly even, over their mean.
_MOST_EVEN = 3.0
#: Neighbours that are not ordered any more.
_FEW = 2


def has_light_tail(khat: float, n_draws: int) -> bool:
    """Tell whether k-hat of the weights of so many draws is as low as that of a good pool, but for its error."""
    error = khat_error(khat, n_draws)
    return khat < MOST_KHAT + (error if np.isfinite(error) else 0.0)


def picked(weights: Array, uniform: Array) -> Indices:
    """Return the rows that uniform numbers pick by weight."""
    total = np.cumsum(weights)
    return np.minimum(np.searchsorted(total / total[-1], uniform, side="right"), len(weights) - 1)


def evenly_picked(weights: Array, n: int, at: float) -> Indices:
    """Return ``n`` rows by weight, as evenly as can be: at this part, from 0 to 1, of each of ``n`` equal steps."""
    return picked(weights, (np.arange(n) + at) / n)


def normalised_weights(log_weights: Array) -> Array:
    """Return weights that add up to 1."""
    return np.exp(log_weights - logsumexp(log_weights))


def smoothed_weights(log_ratio: Array) -> tuple[Array, float]:
    """Return weights with a smoothed tail, (n,), that add up to 1, and k-hat.

    No tail is heavy where weights are nearly even: of 1,000 with k = 0.5, the largest one is some 30 times their mean.
    """
    log_weights, khat = smoothed(log_ratio)
    is_even = np.exp(log_ratio.max() - logsumexp(log_ratio)) * len(log_ratio) < _MOST_EVEN
    return normalised_weights(log_weights), min(khat, 0.0) if is_even else khat


def relative_sd_errors(g: Array, weights: Array) -> Array:
    """Return relative standard errors of standard deviations over weighted draws, (p,), by the delta method [1]_.

    The influence of a draw on a variance v is w ((x - m)^2 - v). Of n equal weights of a Gaussian, this is
    1 / sqrt(2 n); of a thin tail that few draws are in, it is many times as large.

    References
    ----------
    .. [1] A. B. Owen (2013). Monte Carlo theory, methods and examples, chapter 9. https://artowen.su.domains/mc/
    """
    square = (g - weights @ g) ** 2
    variance = weights @ square
    influence = weights[:, None] * (square - variance)
    return 0.5 * np.sqrt(np.sum(influence**2, axis=0)) / np.where(variance > 0.0, variance, 1.0)


def tail_size(g: Array, weights: Array) -> float:
    """Return the effective size of the draws in a tail of a coordinate, the least of all: what limits rest on."""
    of_draws = weights[np.argsort(g, axis=0)]
    sizes = []
    for w in (of_draws, of_draws[::-1]):
        beyond = np.where(np.cumsum(w, axis=0) - w < TAIL, w, 0.0)
        sizes.append(beyond.sum(axis=0) ** 2 / (beyond**2).sum(axis=0))
    return float(np.min(sizes))


#: Interleaved parts of the draws of the globals, whose spread is the error of the normalising constant; and of draws of
#: equal weight.
N_PARTS = N_REPLICATES


@stored("exact.pool")
@dataclass(frozen=True, eq=False)
class Pool:
    """Weighted draws of the globals."""

    #: shape (n, p).
    g: Array
    #: log m, and the log density of the proposal; shape (n,).
    log_marginal: Array
    log_density: Array
    #: Number of an interleaved part; shape (n,).
    part: Indices

    @property
    def log_ratio(self) -> Array:
        """Log weights before they are smoothed, (n,)."""
        return self.log_marginal - self.log_density

    def weights(self) -> tuple[Array, float]:
        """Return the smoothed weights, (n,), that add up to 1, and k-hat."""
        return smoothed_weights(self.log_ratio)

    def log_normaliser(self) -> tuple[float, float]:
        """Return the logarithm of the integral of m, and its standard error, from the spread of interleaved parts."""
        numbers = np.unique(self.part)
        means = np.array([_log_mean(self.log_ratio[self.part == i]) for i in numbers])
        value = _log_mean(means)
        if len(means) < 2:
            return value, float("inf")
        # Of few coordinates, parts are nearly the same: half of what independent draws have, at least.
        return value, max(
            float(np.std(np.exp(means - value), ddof=1) / np.sqrt(len(means))),
            0.5 * float(np.sqrt(1.0 / effective_size(self.log_ratio) - 1.0 / len(self.g))),
        )

    def check(self, n_globals: int) -> None:
        """Raise ValueError where the arrays do not go together."""
        n = len(self.g)
        shapes = {np.shape(a) for a in (self.log_marginal, self.log_density, self.part)}
        if shapes != {(n,)} or self.g.shape != (n, n_globals) or not np.isfinite(self.log_density).all():
            raise ValueError("the arrays of the pool do not go together")


def _log_mean(values: Array) -> float:
    return float(logsumexp(values) - np.log(len(values)))


def by_neighbours(points: Array) -> Indices:
    """Return an order in which neighbours are near each other: halves, halved again along what is longest."""
    order, first = np.arange(len(points)), np.zeros(1, dtype=np.intp)
    w = np.full(len(points), 1.0 / len(points))
    while True:  # all parts at once
        size = np.diff(np.append(first, len(order)))
        part = np.repeat(np.arange(len(first)), size)
        x, goes_on = points[order], size > _FEW
        if not goes_on.any():
            return order
        mean = np.add.reduceat(w[:, None] * x, first) * (1.0 / np.add.reduceat(w, first))[:, None]
        longest = np.add.reduceat(w[:, None] * (x - mean[part]) ** 2, first).argmax(axis=1)
        along = np.where(goes_on[part], x[np.arange(len(x)), longest[part]], 0.0)
        order = order[np.lexsort((along, part))]
        reached = np.cumsum(w)
        reached -= (reached[first] - w[first])[part]
        half = 0.5 * reached[first + size - 1]
        below = np.add.reduceat((reached < half[part]).astype(np.intp), first)
        first = np.union1d(first, (first + np.clip(below, 1, np.maximum(size - 1, 1)))[goes_on])


# --- weighted draws of all coordinates of a posterior ---


class Draws(NamedTuple):
    """Weighted draws of all coordinates."""

    #: shape (n, n_dim).
    theta: Array
    #: Up to a constant; -inf for a draw that does not count; shape (n,).
    log_weights: Array
    #: Equal where the globals are; shape (n,).
    of_globals: Indices
    #: Which of some independent parts a draw is of; shape (n,).
    part: Indices
    #: Independent draws that one of them is worth, in the mean, where all weigh the same.
    worth: float = 1.0

    @classmethod
    def of_equal_weight(cls, theta: Array, worth: float = 1.0) -> Self:
        """Return draws that all weigh the same."""
        number = np.arange(len(theta))
        return cls(theta, np.zeros(len(theta)), number, number % N_PARTS, worth)

    def reweighted(self, log_ratio: Array) -> Self:
        """Return the same draws, their weights times a ratio of densities; where it is NaN, a draw does not count."""
        return self._replace(log_weights=self.log_weights + np.where(np.isnan(log_ratio), -np.inf, log_ratio))

    @property
    def counts(self) -> Bools:
        """Which draws have any weight."""
        return np.isfinite(self.log_weights)

    @property
    def effective_size(self) -> float:
        """How many independent draws they are worth; where globals repeat, how many of these."""
        return min(self.worth * effective_size(self.log_weights), effective_size(self.by_globals()))

    def by_globals(self) -> Array:
        """Return the logarithms of weights of different globals, up to a constant: each that of all of its draws."""
        _, number = np.unique(self.of_globals, return_inverse=True)
        with np.errstate(divide="ignore"):
            sums: Array = np.log(np.bincount(number, np.exp(self.log_weights - self.log_weights.max())))
        return sums


# --- a posterior as a distribution of flat vectors: a weighted pool of globals, and what is left given these ---


class PoolState(abc.ABC):
    """A posterior whose globals are a weighted pool: each kind says what the other coordinates are, given these.

    They are drawn from their conditional density, or weighted draws that are kept. What is not written here of a kind
    is that of exact draws from the conditional density.
    """

    #: The value of the option ``posterior`` that asks for it.
    kind: ClassVar[str]
    #: Whether it is Gaussian given the globals, but for weights.
    is_nested: ClassVar[bool] = False
    #: Uniform numbers that a draw of each other coordinate takes.
    n_parts: ClassVar[int] = 0
    #: Globals as weighted draws.
    pool: Pool
    #: Coordinates that are in the pool, and the others.
    globals_: Indices
    locals_: Indices
    #: The fit that it began from; fits at other modes, where it began as well.
    gaussian: Any
    others: tuple[Any, ...] = ()
    #: What was measured of it.
    checks: PoolVerdict

    def __copy__(self) -> Self:
        """Return itself: nothing of it changes."""
        return self

    def params(self) -> dict[str, Array]:
        """Return what stands for the state among the shared variables of a graph: its weighted draws of the globals."""
        return {"globals": self.pool.g, "log_weights": self.log_weights}

    def from_params(self, params: dict[str, Array]) -> Self:
        """Return itself: arrays alone don't tell the rest."""
        return self

    # --- what a kind says ---

    @abc.abstractmethod
    def content(self) -> dict[str, Any]:
        """Return what a file keeps."""

    @classmethod
    @abc.abstractmethod
    def of_content(cls, content: dict[str, Any], density: ModelDensity) -> Self:
        """Return the posterior on a model; raise ValueError where the parts do not go together."""

    def enlarged(self, wanted: float) -> Pool:
        """Return a pool of the effective size ``wanted``, as far as there is one."""
        return self.pool

    def size_of_all(self, of_globals: float) -> float:
        """Return the effective size of draws of all coordinates, from a pool with this one."""
        return of_globals

    @abc.abstractmethod
    def pick(self, pool: Pool, order: Indices, uniform: list[Array]) -> tuple[Indices, Array]:
        """Return rows of the pool, picked in some order of it, and the other coordinates at each."""

    @abc.abstractmethod
    def all_of(self, pool: Pool, rng: np.random.Generator) -> tuple[Indices, Array, Array]:
        """Return all draws that there are: rows of the pool, the other coordinates at each, and their log weights."""

    @abc.abstractmethod
    def moments_of_others(self, mean: Array) -> tuple[Array, Array]:
        """Return means and standard deviations of the others; ``mean`` is that of the globals."""

    @abc.abstractmethod
    def cov_block(self, index: Indices) -> Array:
        """Return the covariance of some coordinates, (len(index), len(index))."""

    def correction(self) -> tuple[float, float]:
        """Return what log m of the pool lacks everywhere, and its standard error."""
        return 0.0, 0.0

    @functools.cached_property
    def in_modes(self) -> "Sequence[PoolState]":
        """What there is of each mode alone; empty where that is not known."""
        return ()

    # --- weights ---

    @property
    def n_dim(self) -> int:
        """Number of coordinates."""
        return len(self.globals_) + len(self.locals_)

    @functools.cached_property
    def _smoothed(self) -> tuple[Array, float]:
        return self.pool.weights()

    @property
    def weights(self) -> Array:
        """Smoothed weights of the pool, (n,); they add up to 1."""
        return self._smoothed[0]

    @property
    def log_weights(self) -> Array:
        """Their logarithms."""
        with np.errstate(divide="ignore"):
            return np.log(self.weights)

    @property
    def khat(self) -> float:
        """Pareto k-hat of the weights."""
        return self._smoothed[1]

    @property
    def effective_size(self) -> float:
        """Effective number of draws of the globals."""
        return effective_size_of(self.weights)

    @functools.cached_property
    def sd_errors(self) -> Array:
        """Relative standard errors of the standard deviations of the globals, (n_globals,), from their weights."""
        of_weights, size = effective_size_of(self.weights), self.effective_size
        return relative_sd_errors(self.pool.g, self.weights) * np.sqrt(of_weights / size)

    def for_draws(self, n: int) -> Pool:
        """Return a pool whose effective size is ``n``, as far as the budget goes; the last one is kept."""
        if n <= self.effective_size:
            return self.pool
        if self._last.get("n") != n:
            self._last.update(n=n, pool=self.enlarged(n))
        return self._last["pool"]

    @functools.cached_property
    def _last(self) -> dict[str, Any]:
        return {}

    def effective_size_for_globals(self, n: int) -> float:
        """Return the effective size of the globals that ``n`` draws are taken from."""
        pool = self.for_draws(n)
        return self.effective_size if pool is self.pool else effective_size_of(pool.weights()[0])

    def effective_size_for(self, n: int) -> float:
        """Return the effective size of what ``n`` draws are taken from."""
        return self.size_of_all(self.effective_size_for_globals(n))

    def effective_for(self, n: int) -> float:
        """Return how many independent draws ``n`` of its draws are worth."""
        if self.n_parts and effective_size(self.for_draws(n).log_ratio) >= n:
            return float(n)
        return min(float(n), self.effective_size_for(n))

    @functools.cached_property
    def log_normaliser(self) -> tuple[float, float]:
        """The logarithm of the integral of exp(log p), and its standard error."""
        value, se = self.pool.log_normaliser()
        left, of_left = self.correction()
        return value + left, float(np.hypot(se, of_left))

    def elbo(self) -> tuple[float, float]:
        """Return the ELBO of the joint distribution of globals and the others, and its error, nats."""
        value, se = self.log_normaliser
        return value - self.checks.lacking, se

    # --- draws ---

    @property
    def n_uniform(self) -> int:
        """Uniform numbers behind a draw: one for the globals, and those of the others."""
        return 1 + self.n_parts * len(self.locals_)

    def draws(self, base: Array) -> Array:
        """Map base draws to draws: normals, which have no part, and behind them the uniforms."""
        first, others = base[:, self.n_dim], base[:, self.n_dim + 1 :]
        uniform = [first, *(np.split(others, self.n_parts, axis=1) if self.n_parts else [])]
        return self._joined(self.pool, np.arange(len(self.pool.g)), uniform)

    def draw(self, n: int, rng: np.random.Generator, *, in_chains: bool = True, read: Indices | None = None) -> Array:
        """Return ``n`` draws of equal weight, in random order or as they follow each other in chains.

        Where only globals are among the coordinates that are ``read``, the others need not be drawn.
        For chains the pool is made larger if many draws are asked for. Draws with the same globals follow each other:
        this is the autocorrelation by which effective sample sizes are estimated.
        """
        pool = self.for_draws(n) if in_chains else self.pool
        # Evenly by weight: as few repetitions as can be. In the order of the coordinate whose standard deviation is
        # known least well, also evenly over its tail.
        start = np.searchsorted(run := _runs(pool.g), run)
        order = np.argsort(pool.g[start, self.sd_errors.argmax()], kind="stable")
        first, shuffled = (np.arange(n) + rng.random()) / n, rng.permutation(n)
        n_parts = self.n_parts if read is None or np.isin(read, self.locals_).any() else 0
        others = [rng.random((n, len(self.locals_))) for _ in range(n_parts)]
        if not in_chains:
            return self._joined(pool, order, [first[shuffled], *others])
        theta = self._joined(pool, order, [first, *others])
        # Neighbours are in different parts of the draws, so that chains differ little.
        run = _runs(theta[:, self.globals_])
        place = np.arange(len(run)) % N_PARTS + rng.random(len(run))
        return theta[np.argsort(place[run], kind="stable")]

    def joint(self, n: int, rng: np.random.Generator) -> Draws:
        """Return all weighted draws of a pool whose effective size is ``n``, as far as that can be had.

        Where these are too many numbers, they are draws of equal weight, and as many as can be held.
        """
        pool = self.for_draws(n)
        if len(pool.g) * self.n_dim > HELD:
            fewer = min(n, max(HELD // self.n_dim, 1))
            return Draws.of_equal_weight(self.draw(fewer, rng), self.effective_for(fewer) / fewer)
        rows, others, log_weights = self.all_of(pool, rng)
        worth = self.effective_size_for(n) / effective_size(log_weights)
        return Draws(self._with(pool.g[rows], others), log_weights, rows, pool.part[rows], worth)

    def _joined(self, pool: Pool, order: Indices, uniform: list[Array]) -> Array:
        rows, others = self.pick(pool, order, uniform)
        return self._with(pool.g[rows], others)

    def _with(self, g: Array, others: Array) -> Array:
        theta = np.empty((len(g), self.n_dim))
        theta[:, self.globals_], theta[:, self.locals_] = g, others
        return theta

    # --- moments ---

    def mean(self) -> Array:
        """Return the mean, (n_dim,)."""
        return self._moments[0].copy()

    def sd(self) -> Array:
        """Return the standard deviations, (n_dim,)."""
        return self._moments[1].copy()

    @functools.cached_property
    def _moments(self) -> tuple[Array, Array]:
        mean, sd, at = np.empty(self.n_dim), np.empty(self.n_dim), self.globals_
        mean[at] = self.weights @ self.pool.g
        sd[at] = np.sqrt(self.weights @ (self.pool.g - mean[at]) ** 2)
        mean[self.locals_], sd[self.locals_] = self.moments_of_others(mean[at])
        return mean, sd

    def cov(self) -> Array:
        """Return the covariance, (n_dim, n_dim)."""
        return self.cov_block(np.arange(self.n_dim))


def _runs(points: Array) -> Indices:
    """Return the number of the run that each row is in: of successive rows that have a coordinate in common."""
    return np.cumsum(np.append(False, (points[1:] != points[:-1]).all(axis=1)))


def effective_size_of(weights: Array) -> float:
    """Return the effective number of draws of some weights that add up to 1."""
    return float(1.0 / np.sum(weights**2))


# --- weighted draws of all coordinates ---

#: The value of `FitRecord.kind`.
WEIGHTED = "weighted"


@stored("weighted.checks")
@dataclass(frozen=True)
class WeightChecks(PoolVerdict):
    """How good the weights of draws are."""

    #: What the posterior is, a sentence; whether it is exact where its weights are good.
    what: str
    is_of_exact: bool
    khat: float
    #: Independent draws that the weighted ones are worth; where globals repeat, those of these.
    effective_size: float
    #: Draws, or different globals: those whose weights are worse.
    n_draws: int
    #: Whether k-hat speaks for the weights, or they are nearly equal.
    weights_help: bool
    #: What stands against the draws that were weighted, or against weighting them, in clauses.
    doubts: tuple[str, ...] = ()

    @classmethod
    def of(cls, draws: Draws, what: str, doubts: tuple[str, ...], cure: str, *, is_of_exact: bool) -> Self:
        """Judge weighted draws: weights of equal globals stand or fall together."""
        found = [weigh(of)[1] for of in (draws.log_weights, draws.by_globals())]
        worst = max((w for w in found if w.n_draws >= MIN_KHAT_DRAWS), key=lambda w: (not w.verdict().helps, w.khat))
        return cls(
            what, is_of_exact, worst.khat, draws.effective_size, worst.n_draws, worst.verdict().helps, doubts, cure=cure
        )

    @property
    def claims_exact(self) -> bool:
        """Whether the draws that were weighted are those of an exact posterior."""
        return self.is_of_exact

    @property
    def own(self) -> list[Condition]:
        """All that is asked of it."""
        limit = khat_limit(self.n_draws)
        said = f"Pareto k-hat is {self.khat:.2f}, above {limit:.2g}: a few draws have most of the weight"
        return [
            Condition("k-hat", self.khat, limit, said, is_excused=self.weights_help),
            *few_draws("effective size", self.effective_size, ENOUGH, "the effective sample size"),
            *(Condition("doubts", math.inf, 0.0, clause) for clause in self.doubts),
        ]

    @property
    def sentence(self) -> str:
        """What the posterior is, with its figures where they do not follow, and the verdict."""
        what = self.what if self.claims_exact else f"{self.what[:-1]}{self.details}."
        return f"{what} {super().sentence}"

    @property
    def details(self) -> str:
        """How good the weights are."""
        return f" (effective sample size {self.effective_size:,.0f}, Pareto k-hat {self.khat:.2f})"


class AllDrawn(PoolState):
    """Weighted draws of all coordinates: nothing is left given the globals."""

    locals_ = np.empty(0, dtype=np.intp)

    @functools.cached_property
    def globals_(self) -> Indices:  # type: ignore[override]
        """All coordinates."""
        return np.arange(self.pool.g.shape[1])

    @property
    def effective_size(self) -> float:
        """What all draws are worth."""
        return self.checks.effective_size

    def pick(self, pool: Pool, order: Indices, uniform: list[Array]) -> tuple[Indices, Array]:
        """Return rows of the pool; there are no other coordinates."""
        return order[picked(self.weights[order], uniform[0])], np.empty((len(uniform[0]), 0))

    def all_of(self, pool: Pool, rng: np.random.Generator) -> tuple[Indices, Array, Array]:
        """Return all draws."""
        return np.arange(len(pool.g)), np.empty((len(pool.g), 0)), self.log_weights

    def moments_of_others(self, mean: Array) -> tuple[Array, Array]:
        """Return those of no coordinates."""
        return np.empty(0), np.empty(0)

    def cov_block(self, index: Indices) -> Array:
        """Return the covariance of some coordinates."""
        apart = self.pool.g[:, index] - self.mean()[index]
        return apart.T @ (self.weights[:, None] * apart)


@stored("weighted.state")
@dataclass(frozen=True, eq=False)
class WeightedDraws(AllDrawn):
    """Weighted draws of all coordinates."""

    pool: Pool
    checks: WeightChecks
    #: Log marginal likelihood over that of the posterior whose draws they are, or of themselves where there is none.
    mass: Estimate
    gaussian: Any
    others: tuple[Any, ...] = ()
    #: Whose draws they are, where it has a marginal likelihood.
    before: PoolState | None = field(default=None, repr=False)

    kind = WEIGHTED

    def content(self) -> dict[str, Any]:
        """Return what a file keeps."""
        mass = self.mass if self.before is None else UNKNOWN
        kept = {name: getattr(self, name) for name in ("gaussian", "others", "pool", "checks")}
        return {**kept, "mass": tuple(mass)}

    @classmethod
    def of_content(cls, content: dict[str, Any], density: ModelDensity) -> Self:
        """Return the posterior on a model."""
        pool, checks, gaussian = (content[name] for name in ("pool", "checks", "gaussian"))
        if not isinstance(pool, Pool) or not isinstance(checks, WeightChecks) or gaussian.n_dim != density.n_dim:
            raise ValueError("the weighted draws do not go together")
        pool.check(density.n_dim)
        return cls(pool, checks, Estimate(*content["mass"]), gaussian, tuple(content["others"]))

    @functools.cached_property
    def log_normaliser(self) -> tuple[float, float]:
        """The log marginal likelihood, and its error; NaN where it is not known."""
        value, se = (0.0, 0.0) if self.before is None else self.before.log_normaliser
        return value + self.mass.value, math.hypot(se, self.mass.se)
