"""Latent variables given hyperparameters: draws that are kept, each with a weight."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array
from pymc_ngvi.density import ModelDensity
from pymc_ngvi.marginal.pooled import GivenGlobals, PoolState
from pymc_ngvi.marginal.sampling import Pool, evenly_picked
from pymc_ngvi.nested.pairs import WeightedPairs
from pymc_ngvi.nested.verdict import NestedChecks

#: Interleaved parts of the values of the hyperparameters, whose spread is the error of the normalising constant.
_N_PARTS = 8


@stored("nested.state")
@dataclass(frozen=True, eq=False)
class Latents(GivenGlobals):
    """What is left given hyperparameters: the latent variables of weighted pairs.

    Parameters
    ----------
    pairs : WeightedPairs
    checks : NestedChecks
    """

    pairs: WeightedPairs
    checks: NestedChecks

    kind = "nested"
    is_nested = True

    def with_pool(self, globals_: NDArray[np.intp], locals_: NDArray[np.intp], gaussian: Any) -> PoolState:
        """Return the posterior, of these coordinates."""
        pairs, n = self.pairs, len(self.pairs.g)
        # Neighbours are in different parts.
        pool = Pool(pairs.g, pairs.log_marginal, pairs.log_density, np.arange(n) % _N_PARTS, np.zeros(n, dtype=bool))
        return PoolState(pool, self, globals_, locals_, gaussian)

    # --- files ---

    def content(self, state: PoolState) -> dict[str, Any]:
        """Return what a file keeps."""
        return {"globals_": state.globals_, "locals_": state.locals_, "pairs": self.pairs, "checks": self.checks}

    @classmethod
    def of_content(cls, content: dict[str, Any], density: ModelDensity) -> PoolState:
        """Return the posterior on a model.

        Raises
        ------
        ValueError
            If the parts do not go together.
        """
        for name, kind in {"pairs": WeightedPairs, "checks": NestedChecks}.items():
            if not isinstance(content[name], kind):
                raise ValueError(f"what the nested posterior has as {name!r} is something else")
        globals_, locals_, gaussian = content["globals_"], content["locals_"], content["gaussian"]
        fits = np.array_equal(np.sort(np.concatenate([globals_, locals_])), np.arange(density.n_dim))
        if not fits or gaussian.n_dim != density.n_dim:
            raise ValueError("the nested posterior is of another dimension")
        content["pairs"].check(len(globals_), len(locals_))
        return cls(content["pairs"], content["checks"]).with_pool(globals_, locals_, gaussian)

    # --- weights ---

    def weights(self, pool: Pool) -> tuple[Array, float]:
        """Return weights of the hyperparameters, and k-hat."""
        return self.pairs.weights, self.pairs.khat

    def effective_size(self, of_globals: float) -> float:
        """Return that of the pairs."""
        return self.pairs.effective_size

    def correction(self, state: PoolState) -> tuple[float, float]:
        """Return the error of log m."""
        return 0.0, self.checks.error

    def verdict(self, state: PoolState) -> NestedChecks:
        """Return what was measured."""
        return self.checks

    def draws_with_ratio(self, state: PoolState, n: int) -> tuple[Array, Array] | None:
        """Return all draws at ``n`` values of the hyperparameters, picked by weight, and log p - log q.

        None where pairs are weighted together.
        """
        if self.pairs.is_joint:
            return None
        rows = evenly_picked(self.pairs.weights, n, 0.5)
        latents = self.pairs.latents[rows, : self.pairs.n_own]
        theta = np.empty((*latents.shape[:2], state.n_dim))
        theta[:, :, state.globals_] = self.pairs.g[rows][:, None]
        theta[:, :, state.locals_] = latents
        return theta, self.pairs.own_log_ratio[rows]

    def weight_of(self, state: PoolState, theta: Array) -> Array:
        """Return the log weights of pairs, (n_draws,); NaN for what is none of these draws."""
        return self.pairs.log_weights_of(theta[:, state.globals_], theta[:, state.locals_])

    # --- draws and moments ---

    def draw(
        self, state: PoolState, pool: Pool, order: NDArray[np.intp], uniform: list[Array]
    ) -> tuple[NDArray[np.intp], Array]:
        """Return values of the hyperparameters, and draws there; they are in order as they are, by neighbours."""
        first, second = self.pairs.pick(uniform[0])
        return first, self.pairs.latents[first, second]

    def joint(self, state: PoolState, pool: Pool, rng: np.random.Generator) -> tuple[NDArray[np.intp], Array, Array]:
        """Return the pairs."""
        weights = self.pairs.of_pairs
        first, second = np.nonzero(weights)
        return first, self.pairs.latents[first, second], np.log(weights[first, second])

    def moments(self, state: PoolState, mean: Array) -> tuple[Array, Array]:
        """Return means and standard deviations of the latent variables."""
        return self.pairs.moments()

    def cov_block(self, state: PoolState, index: NDArray[np.intp]) -> Array:
        """Return the covariance of some coordinates: correlations are those of the pairs."""
        place = np.empty(state.n_dim, dtype=np.intp)
        place[state.globals_] = np.arange(len(state.globals_))
        place[state.locals_] = np.arange(len(state.locals_))
        is_local = np.isin(index, state.locals_)
        g, x = self.pairs.correlations(place[index[is_local]])
        columns = np.empty((len(g), len(index)))
        columns[:, ~is_local] = g[:, place[index[~is_local]]]
        columns[:, is_local] = x
        sd = state.sd()[index]
        result: Array = (columns.T @ columns) * np.outer(sd, sd)
        result[np.arange(len(index)), np.arange(len(index))] = sd**2
        return result
