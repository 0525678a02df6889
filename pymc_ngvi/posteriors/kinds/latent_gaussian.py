"""Nested posteriors: hyperparameters sampled, latent variables from Gaussian fits given these, pairs weighted."""

import math

from pymc_ngvi.core.prices import Work
from pymc_ngvi.density import ModelDensity
from pymc_ngvi.density.rows_given import RowsGiven
from pymc_ngvi.marginal.pooled import PoolState
from pymc_ngvi.nested.posterior import latent_rows_of, nested_posterior
from pymc_ngvi.nested.seconds import LEAST, nested_seconds
from pymc_ngvi.posteriors.kinds.kind import PosteriorKind, PosteriorStart

#: Chances that it turns out to be exact where latent variables are not Gaussian given hyperparameters, and where they
#: are far from that.
_NOT_GAUSSIAN, _UNEVEN = 1.0 / 3.0, 1.0 / 100.0
#: Variance of log weights at the mode from which on it is given up where there is another posterior.
_MOST_VARIANCE = 1.5
#: Latent variables for each hyperparameter, and hyperparameters of quadratic rows, from which on it comes first.
_MANY, _MANY_SCALES = 3, 7


class LatentGaussianKind(PosteriorKind[RowsGiven]):
    """Hyperparameters sampled, latent variables drawn from Gaussians given these, both weighted together."""

    name = "nested"
    least = LEAST
    may_come_first = True
    of_failure = 0.15  # whether latent variables are nearly Gaussian is known early

    def possible(self, density: ModelDensity) -> RowsGiven:
        """Return rows given hyperparameters."""
        return latent_rows_of(density)

    def chance(self, found: RowsGiven) -> float:
        """Return 1 where rows are quadratic: then weights of pairs are even."""
        if found.is_quadratic:
            return 1.0
        return _UNEVEN if found.is_uneven else _NOT_GAUSSIAN

    def seconds(self, found: RowsGiven, density: ModelDensity, *, by_rows: bool) -> float:
        """Return what it takes."""
        return nested_seconds(found)

    def run(self, start: PosteriorStart, found: RowsGiven, work: Work, *, is_only: bool) -> PoolState:
        """Return the posterior."""
        with work.counting():
            most_variance = math.inf if is_only else _MOST_VARIANCE
            return nested_posterior(
                start.density, start.q, start.seed, most_variance, start.others, of_other_data=start.of_other_data
            )

    def comes_first(self, found: RowsGiven, *, by_rows: bool) -> bool:
        """Tell whether there are many latent variables, or scales, and, by rows, whether the first have one mode.

        Other modes are looked for from a Gaussian fit; of rows that are concave given the hyperparameters, there are
        none of the latent variables.
        """
        n_outside = len(found.outside)
        # A Gaussian of all is far off where there are many scales, and takes longer than what is exact given these.
        is_many = found.n_dim >= _MANY * n_outside or (found.is_quadratic and n_outside > _MANY_SCALES)
        return is_many and (not by_rows or found.is_concave)
