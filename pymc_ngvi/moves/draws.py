"""A posterior that is the draws of chains: all coordinates are in the pool, and draws in one mode weigh the same."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array
from pymc_ngvi.density import ModelDensity
from pymc_ngvi.marginal.pooled import GivenGlobals, PoolState
from pymc_ngvi.marginal.sampling import Pool, picked
from pymc_ngvi.moves.chains import MOST_ERROR, UNKNOWN, ChainCoordinates, LogMass, log_mass
from pymc_ngvi.moves.verdict import MovedChecks

#: Number of the random stream behind the log marginal likelihood.
_STREAM = 8_000_000


@stored("moved.state")
@dataclass(frozen=True, eq=False)
class MovedDraws(GivenGlobals):
    """Draws of chains."""

    #: Those in the same mode are together, as many in each; shape (n_draws, n_chains, n_dim).
    x: Array
    #: shape (n_draws, n_chains).
    logp: Array
    #: Which has the weights of the modes.
    checks: MovedChecks
    #: Log marginal likelihood; NaN where it is not known yet.
    mass: LogMass = UNKNOWN
    #: Which tells it, when it is asked for.
    density: ModelDensity | None = None

    kind = "moved"

    def with_pool(self, gaussian: Any, others: tuple[Any, ...] = ()) -> PoolState:
        """Return the posterior."""
        n, n_chains, d = self.x.shape
        of_start = np.arange(n_chains) // (n_chains // self.checks.n_starts)
        logp = self.logp.ravel()
        pool = Pool(self.x.reshape(-1, d), logp, logp, np.tile(of_start, n), np.zeros(n * n_chains, dtype=bool))
        return PoolState(pool, self, np.arange(d), np.empty(0, dtype=np.intp), gaussian, others=others)

    @property
    def of_chains(self) -> Array:
        """Weights of the chains, which add up to 1, (n_chains,)."""
        n_chains, modes = self.x.shape[1], self.checks.mode_weights or (1.0,)
        return np.repeat(modes, n_chains // len(modes)) * len(modes) / n_chains

    @property
    def modes(self) -> NDArray[np.intp]:
        """Which mode each chain is in, (n_chains,)."""
        return np.repeat(np.arange(self.checks.n_modes), self.x.shape[1] // self.checks.n_modes)

    # --- files ---

    def content(self, state: PoolState) -> dict[str, Any]:
        """Return what a file keeps."""
        return {"x": self.x, "log_p": self.logp, "checks": self.checks, "log_mass": tuple(self.mass)}

    @classmethod
    def of_content(cls, content: dict[str, Any], density: ModelDensity) -> PoolState:
        """Return the posterior on a model."""
        x, logp, checks, gaussian = (content[name] for name in ("x", "log_p", "checks", "gaussian"))
        if not isinstance(checks, MovedChecks):
            raise ValueError("what the moved posterior has as 'checks' is something else")
        if x.ndim != 3 or x.shape[2] != density.n_dim or gaussian.n_dim != density.n_dim:
            raise ValueError("the moved posterior is of another dimension")
        if logp.shape != x.shape[:2] or x.shape[1] % checks.n_starts or not np.isfinite(x).all():
            raise ValueError("the draws of the moved posterior do not go together")
        if checks.n_modes > 1 and (len(checks.mode_weights) != checks.n_modes or checks.n_starts % checks.n_modes):
            raise ValueError("the modes of the moved posterior do not go together")
        mass = LogMass(*content["log_mass"])
        return cls(x, logp, checks, mass, density).with_pool(gaussian, tuple(content["others"]))

    # --- weights ---

    def weights(self, pool: Pool) -> tuple[Array, float]:
        """Return the weights of the modes, shared by all draws in each; there is no k-hat."""
        return np.tile(self.of_chains, len(self.x)) / len(self.x), self.checks.khat

    def size_of(self, weights: Array) -> float:
        """Return that of the chains, which are autocorrelated."""
        return self.checks.effective_size

    def correction(self, state: PoolState) -> tuple[float, float]:
        """Return the log mass, which the pool does not tell, and its error; NaN where no Gaussian is near enough."""
        mass = self.mass
        if np.isnan(mass.value) and self.density is not None:
            coordinates, rng = ChainCoordinates.of(state.gaussian), np.random.default_rng(_STREAM)
            mass = log_mass(
                self.density.logp, coordinates, self.x, self.logp, self.checks.n_starts, self.checks.effective_size, rng
            )
        return mass if mass.se <= MOST_ERROR else UNKNOWN

    def verdict(self, state: PoolState) -> MovedChecks:
        """Return what was measured."""
        return self.checks

    def in_modes(self, state: PoolState) -> list[PoolState]:
        """Return the posterior of each mode, with the Gaussian of its draws; empty where there is one mode."""
        n_modes, coordinates = self.checks.n_modes, ChainCoordinates.of(state.gaussian)
        if n_modes == 1:
            return []
        alone = replace(
            self.checks,
            n_chains=self.checks.n_chains // n_modes,
            n_starts=self.checks.n_starts // n_modes,
            n_modes=1,
            mode_weights=(),
            weight_errors=(),
            weights_size=np.inf,
        )
        return [
            type(self)(x, logp, alone).with_pool(coordinates.refitted(x.reshape(-1, x.shape[2]), alone.effective_size))
            for x, logp in zip(*(np.split(array, n_modes, axis=1) for array in (self.x, self.logp)), strict=True)
        ]

    # --- draws and moments ---

    def draw(
        self, state: PoolState, pool: Pool, order: NDArray[np.intp], uniform: list[Array]
    ) -> tuple[NDArray[np.intp], Array]:
        """Return rows of the pool; there are no other coordinates."""
        n = len(order)
        if self.checks.n_modes > 1:
            rows = picked(state.weights[order], uniform[0])
        else:
            rows = np.minimum((uniform[0] * n).astype(np.intp), n - 1)
        return order[rows], np.empty((len(uniform[0]), 0))

    def joint(self, state: PoolState, pool: Pool, rng: np.random.Generator) -> tuple[NDArray[np.intp], Array, Array]:
        """Return the draws of all chains."""
        rows = np.arange(len(pool.g))
        return rows, np.empty((len(rows), 0)), np.log(state.weights)

    def moments(self, state: PoolState, mean: Array) -> tuple[Array, Array]:
        """Return those of no coordinates."""
        return np.empty(0), np.empty(0)

    def cov_block(self, state: PoolState, index: NDArray[np.intp]) -> Array:
        """Return the covariance of some coordinates."""
        apart = state.pool.g[:, index] - state.mean()[index]
        return apart.T @ (state.weights[:, None] * apart)
