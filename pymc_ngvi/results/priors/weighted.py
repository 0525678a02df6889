"""Weighted draws of a posterior, by all that is known of its errors, and such draws as a distribution."""

import functools

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.psis import weigh
from pymc_ngvi.core.types import Array, GaussianState
from pymc_ngvi.density import ModelDensity
from pymc_ngvi.fitting.record import FitRecord
from pymc_ngvi.marginal.joint import JointDraws
from pymc_ngvi.marginal.sampling import picked
from pymc_ngvi.results.costs import Costs
from pymc_ngvi.results.posterior import Distribution, MovePlan, Posterior


def joint_draws(posterior: Posterior, n: int, rng: np.random.Generator) -> tuple[JointDraws, tuple[str, ...]]:
    """Return draws with their weights, and what stands against relying on them, in clauses.

    An exact, nested or moved posterior has weights. Draws of another q get their importance weights where these help;
    where they can't, the draws are those of q.
    """
    q, density, record = posterior.distribution, posterior.density, posterior.record
    made = q.joint(n, rng)
    if q.kept_log_weights() is not None:
        return made, () if record is None else record.doubts
    if density.why_in_part:
        return made, (
            f"the draws are those of {posterior.kind}, which is not compared with log p: {density.why_in_part}",
        )
    log_weights, found = weigh(q.log_weights(made.theta, density), np.zeros(len(made.theta)))
    if found.verdict().helps:
        return made._replace(log_weights=log_weights), ()
    return made, (
        f"the draws are those of {posterior.kind} as it is: Pareto k-hat {found.khat_text()} says that importance "
        "weights can't correct it",
    )


@dataclass(frozen=True, eq=False)
class WeightedDistribution(Distribution):
    """Weighted draws as a distribution that can be drawn from."""

    #: Whose draws they are.
    of: Distribution
    #: shape (n, n_dim).
    theta: Array
    #: Log weights, not smoothed; shape (n,).
    log_ratio: Array
    #: The coordinate by which draws are picked evenly.
    in_order_of: int
    #: Attributes of trees of draws.
    said: Mapping[str, float]

    @functools.cached_property
    def _weights(self) -> Array:
        log_weights = weigh(self.log_ratio, np.zeros(len(self.log_ratio)))[0]
        return np.exp(log_weights)

    @property
    def n_dim(self) -> int:
        """Number of coordinates."""
        return self.of.n_dim

    @property
    def name(self) -> str:
        """Its name, for titles and errors."""
        return f"reweighted {self.of.name}"

    @property
    def family(self) -> str:
        """The name of its family."""
        return self.of.family

    def base(self, n: int, rng: np.random.Generator) -> Array:
        """Return draws: they are made of nothing else."""
        return self.draw(n, rng)

    def draw(self, n: int, rng: np.random.Generator) -> Array:
        """Return draws of equal weight, evenly by weight: as few repetitions as can be."""
        order = np.argsort(self.theta[:, self.in_order_of], kind="stable")
        rows = order[picked(self._weights[order], rng.permutation((np.arange(n) + rng.random()) / n))]
        return self.theta[rows]

    def effective(self, n: int) -> float:
        """Return how many independent draws ``n`` of its draws are worth."""
        return min(float(n), self.said["effective_sample_size"])

    def mean(self) -> Array:
        """Return the mean."""
        return self._weights @ self.theta

    def sd(self) -> Array:
        """Return the standard deviations."""
        return np.sqrt(self._weights @ (self.theta - self.mean()) ** 2)

    def cov(self) -> Array:
        """Return the covariance."""
        return self.cov_block(np.arange(self.n_dim))

    def cov_block(self, index: NDArray[np.intp]) -> Array:
        """Return the covariance of some coordinates."""
        apart = self.theta[:, index] - self.mean()[index]
        return apart.T @ (self._weights[:, None] * apart)

    @property
    def gaussian(self) -> GaussianState:
        """That of what the draws are of."""
        return self.of.gaussian

    def kept_log_weights(self) -> Array:
        """Return the log weights."""
        return self.log_ratio

    def log_weights(self, theta: Array, density: ModelDensity) -> Array:
        """Raise: weights are kept."""
        raise NotImplementedError(f"The {self.name} keeps the weights of its draws.")

    def attrs(self, theta: Array) -> dict[str, float]:
        """Return what there is to say of draws, and how many of them are different."""
        return {**self.said, "distinct_global_draws": len(np.unique(theta[:, self.in_order_of]))}

    def plan(self, density: ModelDensity) -> MovePlan:
        """Return how draws are moved: as those of what they are of."""
        return self.of.plan(density)

    def costs(self, density: ModelDensity, record: FitRecord | None) -> Costs:
        """Return what evaluations cost."""
        return self.of.costs(density, record)
