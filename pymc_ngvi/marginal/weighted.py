"""A posterior that is weighted draws of all coordinates: of another one, given other priors, rows or densities."""

import math

from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.bridge import Estimate
from pymc_ngvi.core.psis import MIN_KHAT_DRAWS, khat_limit, weigh
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array
from pymc_ngvi.core.verdict import Condition, PoolVerdict, few_draws
from pymc_ngvi.density import ModelDensity
from pymc_ngvi.marginal.draws import Draws
from pymc_ngvi.marginal.pooled import GivenGlobals, PoolState
from pymc_ngvi.marginal.sampling import Pool, picked

#: Effective draws below which the error of a mean, 1 / sqrt(n) of its standard deviation, is above 0.05.
FEWEST = 400
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
        said = f"Pareto k-hat is {self.khat:.2f}, above {limit:.2g}, so that few draws decide"
        return [
            Condition("k-hat", self.khat, limit, said, is_excused=self.weights_help),
            *few_draws("effective size", self.effective_size, FEWEST, "the effective sample size"),
            *(Condition("doubts", math.inf, 0.0, clause) for clause in self.doubts),
        ]

    @property
    def made(self) -> str:
        """What the posterior is, with its figures where they do not follow."""
        return self.what if self.claims_exact else f"{self.what[:-1]}{self.details}."

    @property
    def details(self) -> str:
        """How good the weights are."""
        return f" (Pareto k-hat of the weights {self.khat:.2f}, effective sample size {self.effective_size:,.0f})"


class AllDrawn(GivenGlobals):
    """Weighted draws of all coordinates: nothing is left given the globals."""

    def with_pool(self, pool: Pool, gaussian: Any, others: tuple[Any, ...] = ()) -> PoolState:
        """Return the posterior."""
        return PoolState(pool, self, np.arange(pool.g.shape[1]), np.empty(0, np.intp), gaussian, others=others)

    def draw(
        self, state: PoolState, pool: Pool, order: NDArray[np.intp], uniform: list[Array]
    ) -> tuple[NDArray[np.intp], Array]:
        """Return rows of the pool; there are no other coordinates."""
        return order[picked(state.weights[order], uniform[0])], np.empty((len(uniform[0]), 0))

    def joint(self, state: PoolState, pool: Pool, rng: np.random.Generator) -> tuple[NDArray[np.intp], Array, Array]:
        """Return all draws."""
        return np.arange(len(pool.g)), np.empty((len(pool.g), 0)), state.log_weights

    def moments(self, state: PoolState, mean: Array) -> tuple[Array, Array]:
        """Return those of no coordinates."""
        return np.empty(0), np.empty(0)

    def cov_block(self, state: PoolState, index: NDArray[np.intp]) -> Array:
        """Return the covariance of some coordinates."""
        apart = state.pool.g[:, index] - state.mean()[index]
        return apart.T @ (state.weights[:, None] * apart)


@stored("weighted.state")
@dataclass(frozen=True, eq=False)
class WeightedDraws(AllDrawn):
    """Weighted draws of all coordinates."""

    checks: WeightChecks
    #: Log marginal likelihood over that of the posterior whose draws they are, or of themselves where there is none.
    mass: Estimate
    #: Whose draws they are, where it has a marginal likelihood.
    before: PoolState | None = field(default=None, repr=False)

    kind = WEIGHTED

    @staticmethod
    def pool_of(draws: Draws) -> Pool:
        """Return weighted draws as a pool; those that do not count are left out."""
        counts = draws.counts
        log_weights = draws.log_weights[counts]
        return Pool(draws.theta[counts], log_weights, np.zeros(len(log_weights)), draws.part[counts])

    # --- files ---

    def content(self, state: PoolState) -> dict[str, Any]:
        """Return what a file keeps."""
        return {
            "pool": state.pool,
            "checks": self.checks,
            "mass": tuple(self.mass if self.before is None else _UNKNOWN),
        }

    @classmethod
    def of_content(cls, content: dict[str, Any], density: ModelDensity) -> PoolState:
        """Return the posterior on a model."""
        pool, checks, gaussian = (content[name] for name in ("pool", "checks", "gaussian"))
        if not isinstance(pool, Pool) or not isinstance(checks, WeightChecks) or gaussian.n_dim != density.n_dim:
            raise ValueError("the weighted draws do not go together")
        pool.check(density.n_dim)
        return cls(checks, Estimate(*content["mass"])).with_pool(pool, gaussian, tuple(content["others"]))

    # --- what a posterior has ---

    def size_of(self, weights: Array) -> float:
        """Return what all draws are worth."""
        return self.checks.effective_size

    def log_normaliser(self, state: PoolState) -> tuple[float, float]:
        """Return the log marginal likelihood, and its error; NaN where it is not known."""
        value, se = (0.0, 0.0) if self.before is None else self.before.log_normaliser()
        return value + self.mass.value, math.hypot(se, self.mass.se)

    def verdict(self, state: PoolState) -> WeightChecks:
        """Return what was measured."""
        return self.checks


_UNKNOWN = Estimate(math.nan, math.nan)
