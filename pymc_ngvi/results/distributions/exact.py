"""Exact and nested posteriors as reports read them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.linalg import logsumexp
from pymc_ngvi.core.sizes import check_cov_size
from pymc_ngvi.core.types import Array, GaussianState
from pymc_ngvi.density import ModelDensity
from pymc_ngvi.fitting.record import FitRecord
from pymc_ngvi.marginal.joint import JointDraws
from pymc_ngvi.marginal.pooled import PoolState
from pymc_ngvi.results.costs import Costs, direct_costs
from pymc_ngvi.results.distributions.variational import distribution_of
from pymc_ngvi.results.posterior import Distribution, MovePlan


@dataclass(frozen=True, eq=False)
class PoolDistribution(Distribution):
    """An exact or nested posterior: draws and moments, and weights of its pool; no density."""

    q: PoolState

    @property
    def n_dim(self) -> int:
        """Number of coordinates."""
        return self.q.n_dim

    @property
    def name(self) -> str:
        """Its name, for titles and errors."""
        return f"{self.q.kind} posterior"

    @property
    def detail(self) -> str:
        """The effective size of its draws."""
        return f"with an effective sample size of {self.q.effective_size:,.0f}"

    @property
    def family(self) -> str:
        """The name of its family: ``exact`` or ``nested``."""
        return self.q.kind

    def base(self, n: int, rng: np.random.Generator) -> Array:
        """Return draws: they are made of nothing else."""
        return self.draw(n, rng)

    def draw(self, n: int, rng: np.random.Generator) -> Array:
        """Return draws of equal weight."""
        return self.q.draw(n, rng)

    def joint(self, n: int, rng: np.random.Generator) -> JointDraws:
        """Return the pool, with the other coordinates at each, and its weights."""
        return self.q.joint(n, rng)

    def effective(self, n: int) -> float:
        """Return the effective size of the pool that they are taken from, where that can't be made as large."""
        return self.q.effective_for(n)

    def effective_globals(self, n: int) -> float:
        """Return the same for means of the global parameters alone."""
        return min(self.effective(n), self.q.effective_size_for_globals(n))

    def mean(self) -> Array:
        """Return the mean."""
        return self.q.mean()

    def sd(self) -> Array:
        """Return the standard deviations."""
        return self.q.sd()

    def cov(self) -> Array:
        """Return the covariance."""
        check_cov_size(self.n_dim)
        return self.q.cov()

    def cov_block(self, index: NDArray[np.intp]) -> Array:
        """Return the covariance of some coordinates."""
        check_cov_size(len(index))
        return self.q.cov_block(index)

    @property
    def gaussian(self) -> GaussianState:
        """The Gaussian fit."""
        return self.q.gaussian

    def rough_log_density(self, theta: Array) -> Array | None:
        """Return that of the Gaussian fit, or of the Gaussians at all modes."""
        theta = np.asarray(theta, dtype=np.float64)
        fits = [mode.gaussian for mode in self.q.in_modes] or [self.q.gaussian, *self.q.others]
        return logsumexp([fit.log_density(theta) for fit in fits], axis=0) - np.log(len(fits))

    def in_modes(self) -> "Sequence[Distribution]":
        """Return what it is at each of its modes; empty where it does not tell them apart."""
        return [PoolDistribution(mode) for mode in self.q.in_modes]

    @property
    def is_checked(self) -> bool:
        """Whether nothing stands against calling it exact."""
        return self.q.checks.is_exact

    def kept_log_weights(self) -> Array | None:
        """Return the log weights of the pool."""
        return self.q.pool.log_ratio

    def sd_errors(self) -> Array:
        """Return the relative errors of the standard deviations of the globals; NaN for the others."""
        errors = np.full(self.n_dim, np.nan)
        errors[self.q.globals_] = self.q.sd_errors
        return errors

    def log_weights(self, theta: Array, density: ModelDensity) -> Array:
        """Raise: weights are kept."""
        raise NotImplementedError(f"The {self.name} keeps the weights of its draws.")

    def draws_with_ratio(self, n: int) -> tuple[Array, Array] | None:
        """Return draws of an approximate nested posterior; None of any other."""
        return self.q.rest.draws_with_ratio(self.q, n)

    def stats(self, theta: Array, rng: np.random.Generator, log_q: bool) -> dict[str, NDArray[np.generic]]:
        """Return a number for each draw that is the same where the global parameters are, and log weights of pairs."""
        log_weight = self.q.rest.weight_of(self.q, theta)
        of_pairs = {} if log_weight is None else {"log_weight": log_weight}
        return {"global_draw": self._distinct(theta)[1], **of_pairs}

    def attrs(self, theta: Array) -> dict[str, float]:
        """Return effective sizes of the pool and of its globals, and how many draws have different globals."""
        return {
            "effective_sample_size": self.q.effective_size_for(len(theta)),
            "effective_global_draws": self.q.effective_size_for_globals(len(theta)),
            "distinct_global_draws": len(self._distinct(theta)[0]),
        }

    def _distinct(self, theta: Array) -> tuple[Array, NDArray[np.intp]]:
        """Return the different values of the globals, and which of them each draw has."""
        g = np.ascontiguousarray(theta[:, self.q.globals_])
        rows = g.view(np.dtype((np.void, g.itemsize * g.shape[1])))[:, 0]
        _, first, number = np.unique(rows, return_index=True, return_inverse=True)
        return g[first], number

    def plan(self, density: ModelDensity) -> MovePlan:
        """Move draws in coordinates whitened by the Gaussian fit."""
        return MovePlan(density, self.gaussian, _as_they_are)

    def costs(self, density: ModelDensity, record: FitRecord | None) -> Costs:
        """Return the costs of evaluating log p."""
        return direct_costs(density, record, self.n_dim, 0)


def _as_they_are(draws: Array) -> Array:
    return draws


@distribution_of.register
def _(q: PoolState) -> Distribution:  # type: ignore[misc]  # it has no density
    return PoolDistribution(q)
