"""A posterior that is the draws of chains: all coordinates are in the pool, and weigh the same."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array
from pymc_ngvi.density import ModelDensity
from pymc_ngvi.marginal.pooled import GivenGlobals, PoolState
from pymc_ngvi.marginal.sampling import Pool
from pymc_ngvi.moves.verdict import MovedChecks


@stored("moved.state")
@dataclass(frozen=True, eq=False)
class MovedDraws(GivenGlobals):
    """Draws of chains.

    Parameters
    ----------
    x : ndarray, shape (n_draws, n_chains, n_dim)
    logp : ndarray, shape (n_draws, n_chains)
    checks : MovedChecks
    """

    x: Array
    logp: Array
    checks: MovedChecks

    kind = "moved"

    def with_pool(self, gaussian: Any, others: tuple[Any, ...] = ()) -> PoolState:
        """Return the posterior."""
        n, n_chains, d = self.x.shape
        of_start = np.arange(n_chains) // (n_chains // self.checks.n_starts)
        logp = self.logp.ravel()
        pool = Pool(self.x.reshape(-1, d), logp, logp, np.tile(of_start, n), np.zeros(n * n_chains, dtype=bool))
        return PoolState(pool, self, np.arange(d), np.empty(0, dtype=np.intp), gaussian, others=others)

    # --- files ---

    def content(self, state: PoolState) -> dict[str, Any]:
        """Return what a file keeps."""
        return {"x": self.x, "log_p": self.logp, "checks": self.checks}

    @classmethod
    def of_content(cls, content: dict[str, Any], density: ModelDensity) -> PoolState:
        """Return the posterior on a model.

        Raises
        ------
        ValueError
            If the parts do not go together.
        """
        x, logp, checks, gaussian = (content[name] for name in ("x", "log_p", "checks", "gaussian"))
        if not isinstance(checks, MovedChecks):
            raise ValueError("what the moved posterior has as 'checks' is something else")
        if x.ndim != 3 or x.shape[2] != density.n_dim or gaussian.n_dim != density.n_dim:
            raise ValueError("the moved posterior is of another dimension")
        if logp.shape != x.shape[:2] or x.shape[1] % checks.n_starts or not np.isfinite(x).all():
            raise ValueError("the draws of the moved posterior do not go together")
        return cls(x, logp, checks).with_pool(gaussian, tuple(content.get("others", ())))

    # --- weights ---

    def weights(self, pool: Pool) -> tuple[Array, float]:
        """Return equal weights; there is no k-hat."""
        n = len(pool.g)
        return np.full(n, 1.0 / n), self.checks.khat

    def size_of(self, weights: Array) -> float:
        """Return that of the chains, which are autocorrelated."""
        return self.checks.effective_size

    def correction(self, state: PoolState) -> tuple[float, float]:
        """Return NaN: chains do not tell the normalising constant."""
        return float("nan"), float("nan")

    def verdict(self, state: PoolState) -> MovedChecks:
        """Return what was measured."""
        return self.checks

    # --- draws and moments ---

    def draw(
        self, state: PoolState, pool: Pool, order: NDArray[np.intp], uniform: list[Array]
    ) -> tuple[NDArray[np.intp], Array]:
        """Return rows of the pool; there are no other coordinates."""
        n = len(order)
        return order[np.minimum((uniform[0] * n).astype(np.intp), n - 1)], np.empty((len(uniform[0]), 0))

    def moments(self, state: PoolState, mean: Array) -> tuple[Array, Array]:
        """Return those of no coordinates."""
        return np.empty(0), np.empty(0)

    def cov_block(self, state: PoolState, index: NDArray[np.intp]) -> Array:
        """Return the covariance of some coordinates."""
        apart = state.pool.g[:, index] - state.mean()[index]
        result: Array = apart.T @ apart / len(apart)
        return result
