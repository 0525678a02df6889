"""A posterior as a distribution of flat vectors: a weighted pool of globals, and what is left given these."""

import abc
import functools

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.psis import effective_size
from pymc_ngvi.core.sizes import HELD
from pymc_ngvi.core.stored import entry_of, stored, with_tag
from pymc_ngvi.core.types import Array
from pymc_ngvi.core.verdict import PoolVerdict
from pymc_ngvi.density import ModelDensity
from pymc_ngvi.marginal.draws import Draws
from pymc_ngvi.marginal.sampling import Pool, relative_sd_errors


class GivenGlobals(abc.ABC):
    """The other coordinates given the globals: drawn from their conditional density, or weighted draws that are kept.

    What is not written here of a kind is that of exact draws from the conditional density.
    """

    #: The value of the option ``posterior`` that asks for it.
    kind: ClassVar[str]
    #: Whether it is Gaussian given the globals, but for weights.
    is_nested: ClassVar[bool] = False
    #: Uniform numbers that a draw of each other coordinate takes.
    n_parts: ClassVar[int] = 0

    def weights(self, pool: Pool) -> tuple[Array, float]:
        """Return weights of the pool that add up to 1, and k-hat."""
        return pool.weights()

    def enlarged(self, pool: Pool, wanted: float) -> Pool:
        """Return a pool of the effective size ``wanted``, as far as there is one."""
        return pool

    def size_of(self, weights: Array) -> float:
        """Return the effective number of draws of the globals."""
        return effective_size_of(weights)

    def effective_size(self, of_globals: float) -> float:
        """Return that of draws of all coordinates, from a pool with this one."""
        return of_globals

    @abc.abstractmethod
    def draw(
        self, state: "PoolState", pool: Pool, order: NDArray[np.intp], uniform: list[Array]
    ) -> tuple[NDArray[np.intp], Array]:
        """Return rows of the pool, picked in some order of it, and the other coordinates at each."""

    @abc.abstractmethod
    def joint(self, state: "PoolState", pool: Pool, rng: np.random.Generator) -> tuple[NDArray[np.intp], Array, Array]:
        """Return all draws that there are: rows of the pool, the other coordinates at each, and their log weights."""

    @abc.abstractmethod
    def moments(self, state: "PoolState", mean: Array) -> tuple[Array, Array]:
        """Return means and standard deviations of the others; ``mean`` is that of the globals."""

    @abc.abstractmethod
    def cov_block(self, state: "PoolState", index: NDArray[np.intp]) -> Array:
        """Return the covariance of some coordinates."""

    def log_normaliser(self, state: "PoolState") -> tuple[float, float]:
        """Return the logarithm of the integral of exp(log p), and its standard error."""
        value, se = state.pool.log_normaliser()
        left, of_left = self.correction(state)
        return value + left, float(np.hypot(se, of_left))

    def correction(self, state: "PoolState") -> tuple[float, float]:
        """Return what log m of the pool lacks everywhere, and its standard error."""
        return 0.0, 0.0

    @abc.abstractmethod
    def verdict(self, state: "PoolState") -> PoolVerdict:
        """Return what was measured of the posterior."""

    @abc.abstractmethod
    def content(self, state: "PoolState") -> dict[str, Any]:
        """Return what a file keeps beside the fits that it began from."""

    @classmethod
    @abc.abstractmethod
    def of_content(cls, content: dict[str, Any], density: ModelDensity) -> "PoolState":
        """Return the posterior on a model; raise ValueError where the parts do not go together."""

    def in_modes(self, state: "PoolState") -> "list[PoolState]":
        """Return what there is of each mode alone; empty where that is not known."""
        return []

    def weight_of(self, state: "PoolState", theta: Array) -> Array | None:
        """Return the log weights by which draws were picked, (n_draws,); None where only globals have some."""
        return None


@stored("pool.state")
@dataclass(frozen=True, eq=False)
class PoolState:
    """A posterior whose globals are a weighted pool."""

    #: Globals as weighted draws.
    pool: Pool
    #: The others given these.
    rest: GivenGlobals
    #: Coordinates that are in the pool, and the others.
    globals_: NDArray[np.intp]
    locals_: NDArray[np.intp]
    #: The fit that it began from.
    gaussian: Any
    #: Fits at other modes, where it began as well.
    others: tuple[Any, ...] = field(default=(), kw_only=True)

    def __copy__(self) -> "PoolState":
        """Return itself: nothing of it changes."""
        return self

    def params(self) -> dict[str, Array]:
        """Return what stands for the state among the shared variables of a graph: its weighted draws of the globals."""
        return {"globals": self.pool.g, "log_weights": self.log_weights}

    def from_params(self, params: dict[str, Array]) -> "PoolState":
        """Return itself: arrays alone don't tell the rest."""
        return self

    def content(self) -> dict[str, Any]:
        """Return what a file keeps: the tag of the class of what is left, and all else."""
        entry = entry_of(type(self.rest))
        assert entry is not None
        return {"of": entry.tag, "gaussian": self.gaussian, "others": self.others, **self.rest.content(self)}

    @classmethod
    def of_content(cls, content: dict[str, Any], density: ModelDensity) -> "PoolState":
        """Return the posterior on a model: the inverse of `content`."""
        entry = with_tag(content["of"])
        if entry is None or not issubclass(entry.cls, GivenGlobals):
            raise ValueError(f"it is a {content['of']!r}, which is none")
        return entry.cls.of_content(content, density)

    # --- weights ---

    @property
    def kind(self) -> str:
        """The value of the option ``posterior`` that asks for it."""
        return self.rest.kind

    @property
    def n_dim(self) -> int:
        """Number of coordinates."""
        return len(self.globals_) + len(self.locals_)

    @functools.cached_property
    def _smoothed(self) -> tuple[Array, float]:
        return self.rest.weights(self.pool)

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
        return self.rest.size_of(self.weights)

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
            self._last.update(n=n, pool=self.rest.enlarged(self.pool, n))
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
        return self.rest.effective_size(self.effective_size_for_globals(n))

    def effective_for(self, n: int) -> float:
        """Return how many independent draws ``n`` of its draws are worth."""
        if self.rest.n_parts and effective_size(self.for_draws(n).log_ratio) >= n:
            return float(n)
        return min(float(n), self.effective_size_for(n))

    def log_normaliser(self) -> tuple[float, float]:
        """Return the logarithm of the integral of exp(log p), and its standard error."""
        return self._log_normaliser

    @functools.cached_property
    def _log_normaliser(self) -> tuple[float, float]:
        return self.rest.log_normaliser(self)

    def elbo(self) -> tuple[float, float]:
        """Return the ELBO of the joint distribution of globals and the others, and its error, nats."""
        value, se = self.log_normaliser()
        return value - self.checks.lacking, se

    @functools.cached_property
    def checks(self) -> PoolVerdict:
        """What was measured of it."""
        return self.rest.verdict(self)

    @functools.cached_property
    def in_modes(self) -> "list[PoolState]":
        """What there is of each mode alone; empty where that is not known."""
        return self.rest.in_modes(self)

    # --- draws ---

    @property
    def n_uniform(self) -> int:
        """Uniform numbers behind a draw: one for the globals, and those of the others."""
        return 1 + self.rest.n_parts * len(self.locals_)

    def draws(self, base: Array) -> Array:
        """Map base draws to draws: normals, which have no part, and behind them the uniforms."""
        first, others = base[:, self.n_dim], base[:, self.n_dim + 1 :]
        uniform = [first, *(np.split(others, self.rest.n_parts, axis=1) if self.rest.n_parts else [])]
        return self._joined(self.pool, np.arange(len(self.pool.g)), uniform)

    def draw(self, n: int, rng: np.random.Generator, *, enlarges: bool = True) -> Array:
        """Return ``n`` draws of equal weight; the pool they are taken from is made larger for many."""
        pool = self.for_draws(n) if enlarges else self.pool
        # Evenly by weight: as few repetitions as can be. In the order of the coordinate whose standard deviation is
        # known least well, also evenly over its tail.
        order = np.argsort(pool.g[:, self.sd_errors.argmax()], kind="stable")
        first = rng.permutation((np.arange(n) + rng.random()) / n)
        others = [rng.random((n, len(self.locals_))) for _ in range(self.rest.n_parts)]
        return self._joined(pool, order, [first, *others])

    def joint(self, n: int, rng: np.random.Generator) -> Draws:
        """Return all weighted draws of a pool whose effective size is ``n``, as far as that can be had.

        Where these are too many numbers, they are draws of equal weight, and as many as can be held.
        """
        pool = self.for_draws(n)
        if len(pool.g) * self.n_dim > HELD:
            fewer = min(n, max(HELD // self.n_dim, 1))
            return Draws.of_equal_weight(self.draw(fewer, rng), self.effective_for(fewer) / fewer)
        rows, others, log_weights = self.rest.joint(self, pool, rng)
        worth = self.effective_size_for(n) / effective_size(log_weights)
        return Draws(self._with(pool.g[rows], others), log_weights, rows, pool.part[rows], worth)

    def _joined(self, pool: Pool, order: NDArray[np.intp], uniform: list[Array]) -> Array:
        rows, others = self.rest.draw(self, pool, order, uniform)
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
        mean[self.locals_], sd[self.locals_] = self.rest.moments(self, mean[at])
        return mean, sd

    def cov(self) -> Array:
        """Return the covariance, (n_dim, n_dim)."""
        return self.cov_block(np.arange(self.n_dim))

    def cov_block(self, index: NDArray[np.intp]) -> Array:
        """Return the covariance of some coordinates, (len(index), len(index))."""
        return self.rest.cov_block(self, np.asarray(index))


def effective_size_of(weights: Array) -> float:
    """Return the effective number of draws of some weights that add up to 1."""
    return float(1.0 / np.sum(weights**2))
