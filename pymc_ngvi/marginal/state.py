"""The exact posterior as a distribution of flat vectors: a weighted pool of globals, local coordinates given them."""

import functools

from dataclasses import dataclass

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array
from pymc_ngvi.marginal.conditionals import Conditionals
from pymc_ngvi.marginal.files import InFiles
from pymc_ngvi.marginal.forest import Forest
from pymc_ngvi.marginal.joint_moments import joint_covariance, mean_and_sd
from pymc_ngvi.marginal.log_marginal import LogMarginal
from pymc_ngvi.marginal.nodes import ladder
from pymc_ngvi.marginal.on_model import FittedDensity
from pymc_ngvi.marginal.pooled import PoolState
from pymc_ngvi.marginal.quadrature import integrate
from pymc_ngvi.marginal.sampling import Pool, evenly_picked, picked
from pymc_ngvi.marginal.verdict import Checks

#: Draws at which the reference is compared with the rule in use, and with more nodes.
_N_REFERENCE, _N_COMPARED = 256, 16


@stored("exact.state")
@dataclass(frozen=True, eq=False)
class ExactState(InFiles, PoolState):
    """The posterior of a model whose local coordinates can be integrated.

    Parameters
    ----------
    forest : Forest
    quadrature : LogMarginal or None
        Gives local coordinates; None where there are none.
    density : FittedDensity
        What all of these evaluate.
    sampled, sequences, gaussian, number
        See `PoolState`.
    """

    forest: Forest
    quadrature: LogMarginal | None
    density: FittedDensity

    kind = "exact"
    computed = ("_last", "sd_errors", "_conditionals")

    @property
    def n_dim(self) -> int:
        """Number of coordinates."""
        return self.forest.n_dim

    @property
    def globals_(self) -> NDArray[np.intp]:
        """Coordinates that are in the pool."""
        return self.forest.globals_

    @property
    def n_uniform(self) -> int:
        """Uniform numbers behind a draw: one for the globals, two for each local coordinate."""
        return 1 + 2 * self.forest.n_local

    def log_normaliser(self) -> tuple[float, float]:
        """Return the logarithm of the integral of exp(log p), and its standard error."""
        value, se = self.pool.log_normaliser()
        left, of_left = self._left_by_nodes
        return value + left, float(np.hypot(se, of_left))

    @functools.cached_property
    def _left_by_nodes(self) -> tuple[float, float]:
        """What the nodes in use miss of log m everywhere, and its standard error.

        Rules are chosen for what changes with the globals: of a constant, neither the reference nor the base rule
        knows.
        """
        quadrature = self.quadrature
        if quadrature is None:
            return 0.0, 0.0
        n = _N_COMPARED if quadrature.base is None else _N_REFERENCE
        rows = evenly_picked(self.weights, n, 0.5)
        points = quadrature.reference(self.pool.g[rows])
        apart = np.exp(points.log_marginal - self.pool.log_marginal[rows])[~points.lost]
        some = points[np.arange(0, n, n // _N_COMPARED)]
        few, many = (
            integrate(quadrature.terms, self.forest, rule, some.g, some.centres, moments=False).log_marginal
            for rule in (quadrature.rule, ladder(self.forest.n_levels)[-1])
        )
        value = float(np.log(apart.mean()) + np.mean(many - few))
        return value, float(np.hypot(_error(apart) / apart.mean(), _error(many - few)))

    # --- draws ---

    def draws(self, base: Array) -> Array:
        """Map base draws to draws: normals, which have no part, and behind them the uniforms."""
        uniform = base[:, self.n_dim :]
        rows = picked(self.weights, uniform[:, 0])
        n_local = self.forest.n_local
        return self._joined(self.pool, rows, uniform[:, 1 : 1 + n_local], uniform[:, 1 + n_local :])

    def draw(self, n: int, rng: np.random.Generator) -> Array:
        """Return ``n`` draws of equal weight; the pool they are taken from is made larger for many."""
        pool = self.for_draws(n)
        weights = self.weights if pool is self.pool else pool.weights()[0]
        # Evenly by weight: as few repetitions as can be. In the order of the coordinate whose standard deviation is
        # known least well, also evenly over its tail.
        order = np.argsort(pool.g[:, self.sd_errors.argmax()], kind="stable")
        rows = order[picked(weights[order], rng.permutation((np.arange(n) + rng.random()) / n))]
        shifts, choices = rng.random((n, self.forest.n_local)), rng.random((n, self.forest.n_local))
        return self._joined(pool, rows, shifts, choices)

    def _joined(self, pool: Pool, rows: NDArray[np.intp], shifts: Array, choices: Array) -> Array:
        """Return flat vectors: the globals of some rows of the pool, with local coordinates drawn."""
        theta = np.empty((len(rows), self.n_dim))
        theta[:, self.forest.globals_] = pool.g[rows]
        if self.quadrature is not None:
            theta[:, self.forest.locals_] = self._conditionals.draw(pool.g, rows, shifts, choices)
        return theta

    @functools.cached_property
    def _conditionals(self) -> Conditionals:
        assert self.quadrature is not None
        return Conditionals(self.quadrature, self.pool.g, self.weights, self.sequences.seed)

    # --- moments ---

    def mean(self) -> Array:
        """Return the mean, (n_dim,)."""
        return self._moments[0].copy()

    def sd(self) -> Array:
        """Return the standard deviations, (n_dim,)."""
        return self._moments[1].copy()

    @functools.cached_property
    def _moments(self) -> tuple[Array, Array]:
        return mean_and_sd(self.forest, self.pool.g, self.weights, self.quadrature)

    def cov(self) -> Array:
        """Return the covariance, (n_dim, n_dim)."""
        return self.cov_block(np.arange(self.n_dim))

    def cov_block(self, index: NDArray[np.intp]) -> Array:
        """Return the covariance of some coordinates, (len(index), len(index))."""
        of_pool = self.forest, self.pool.g, self.weights, self.quadrature
        return joint_covariance(*of_pool, self._moments[0], np.asarray(index))

    # --- what is known of it ---

    @functools.cached_property
    def checks(self) -> Checks:
        """What was measured of it."""
        quadrature = self.quadrature
        common = (self.khat, self.effective_size, len(self.weights), self.forest.n_globals, self.forest.n_local)
        sd_error, missed = float(self.sd_errors.max(initial=0.0)), self.sampled.missed
        n_modes = 1 + len(self.others)
        if quadrature is None:
            return Checks(*common, sd_error=sd_error, missed=missed, n_modes=n_modes)
        return Checks(
            *common,
            n_nodes=quadrature.rule.n_nodes,
            rule_error=quadrature.rule_error,
            difference=self.sampled.difference,
            lost=self.pool.part_lost(self.weights),
            candidates=self._conditionals.efficiency(),
            sd_error=sd_error,
            missed=missed,
            n_modes=n_modes,
        )


def _error(values: Array) -> float:
    """Return the standard error of a mean of independent values."""
    return float(np.std(values, ddof=1) / np.sqrt(len(values)))
