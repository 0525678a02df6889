r"""Gradients of log p at draws: means of their products with draws are known where these are of the posterior.

With s the gradient of log p at draws theta of the posterior, :math:`E[s] = 0` and :math:`E[(\theta - m) s^T] = -I`,
whatever its shape [1]_. So :math:`u = \Sigma s`, with the covariance of a Gaussian near to it, has the mean 0, and
:math:`E[w^T (\theta - m) \, w^T u] = -w^T \Sigma w` for coordinates, linear predictors and their sums. If both were
Gaussian, the mean of u would be the distance from the mean of q to that of the posterior, and the other one would tell
the ratio of their variances. That takes one gradient a draw, where moved draws take dozens.

References
----------
.. [1] J. Gorham and L. Mackey (2015). Measuring sample quality with Stein's method. NeurIPS.
   https://doi.org/10.48550/arXiv.1506.03039
"""

from dataclasses import dataclass

import numpy as np

from pymc_ngvi.core.elbo import Elbo
from pymc_ngvi.core.types import Array
from pymc_ngvi.density.functionals import Functionals
from pymc_ngvi.results.diagnosis.functionals import FunctionalDrift
from pymc_ngvi.results.diagnosis.moment_drift import Estimates, MomentDrift
from pymc_ngvi.results.posterior import Posterior

#: Draws below which nothing is said.
_LEAST = 32
#: Smallest and largest ratio of variances that is told.
_RATIOS = 1e-2, 1e2


@dataclass(frozen=True)
class ScoreDrift:
    """By how much gradients say that draws are off.

    Parameters
    ----------
    mean, sd : Estimates
        Of coordinates: of means, in standard deviations of q, and of standard deviations, relative to these.
    n_draws : int
    predictors : FunctionalDrift or None
        The same of linear predictors and their sum, of limits nothing; None where there are none.
    """

    mean: Estimates
    sd: Estimates
    n_draws: int
    predictors: FunctionalDrift | None = None

    @property
    def moments(self) -> MomentDrift:
        """The same, as moved draws tell it."""
        nothing = _nothing(len(self.mean.value))
        return MomentDrift(self.mean, self.sd, nothing, Elbo(np.nan, np.nan))

    def in_words(self) -> str:
        """Return what was looked at."""
        predictors = "" if self.predictors is None else f", and with {self.predictors.functionals.of_elements()}"
        return f"at {self.n_draws:,} draws: their means, and products with all coordinates{predictors}"

    def seen_again(self, other: "ScoreDrift") -> "ScoreDrift":
        """Return what this and an independent one have in common."""
        one, two = self.predictors, other.predictors
        predictors = None if one is None or two is None else one.seen_again(two)
        return ScoreDrift(self.mean.seen_again(other.mean), self.sd.seen_again(other.sd), other.n_draws, predictors)


def score_drift_of(
    posterior: Posterior, rng: np.random.Generator, n: int, functionals: Functionals | None
) -> ScoreDrift | None:
    """Return what gradients at ``n`` draws say; None where they are finite at too few of them.

    Parameters
    ----------
    posterior : Posterior
    rng : numpy.random.Generator
        For the draws.
    n : int
    functionals : Functionals or None
        Whose linear predictors are looked at.
    """
    q = posterior.distribution
    plan = q.plan(posterior.density)
    theta = plan.draw(q.base(n, rng))
    with np.errstate(all="ignore"):
        grad = plan.target.logp_grad(theta)[1]
        whitened = plan.gaussian.whiten(grad)
        step = plan.gaussian.draws(whitened) - plan.gaussian.mean()
    finite = np.isfinite(theta).all(axis=1) & np.isfinite(step).all(axis=1)
    if finite.sum() < _LEAST:
        return None
    apart, step, sd = theta[finite] - q.mean(), step[finite], q.sd()
    mean, spread = _estimates(apart, step, sd, plan.gaussian.sd() ** 2)
    n_draws = int(finite.sum())
    if functionals is None or functionals.of_predictors is None:
        return ScoreDrift(mean, spread, n_draws)
    matrix = functionals.of_predictors.matrix
    along, variances = apart @ matrix.T, np.sum(plan.gaussian.whiten(matrix) ** 2, axis=1)
    of_columns = _estimates(along, step @ matrix.T, along.std(axis=0), variances)
    nothing = _nothing(len(matrix))
    predictors = FunctionalDrift(functionals.only_predictors(), *of_columns, nothing, nothing, n_draws)
    return ScoreDrift(mean, spread, n_draws, predictors)


def _estimates(apart: Array, step: Array, sd: Array, variance: Array) -> tuple[Estimates, Estimates]:
    """Return drifts of means and of standard deviations, by column.

    Moments of q would take chance from both, as controls, and hide draws that have not these moments.
    """
    ratio = _mean_of(-apart * step / variance)
    # The posterior is narrower than q where products are larger. Tails of these are heavy where a scale may be near 0:
    # a drift is as many of its errors away from 0 as the mean of products is from 1, and no more.
    value = np.clip(ratio.value, *_RATIOS) ** -0.5 - 1.0
    beyond = np.abs(ratio.value - 1.0)
    se = ratio.se * np.where(beyond > 0.0, np.abs(value) / np.where(beyond > 0.0, beyond, 1.0), 0.5)
    return _mean_of(step / sd), Estimates(value, se)


def _mean_of(values: Array) -> Estimates:
    return Estimates(values.mean(axis=0), values.std(axis=0, ddof=1) / np.sqrt(len(values)))


def _nothing(n: int) -> Estimates:
    return Estimates(np.full(n, np.nan), np.full(n, np.nan))
