"""The nested posterior of a latent Gaussian model [1]_, with variational fits in the place of Laplace's method.

References
----------
.. [1] H. Rue, S. Martino and N. Chopin (2009). Approximate Bayesian inference for latent Gaussian models by using
   integrated nested Laplace approximations. Journal of the Royal Statistical Society: Series B 71(2).
   https://doi.org/10.1111/j.1467-9868.2008.00700.x
"""

import numpy as np

from pymc_ngvi.core.refusal import Reason, Unavailable
from pymc_ngvi.core.types import Array, GaussianState
from pymc_ngvi.density import LogDensity, ModelDensity
from pymc_ngvi.density.gaussian_over import gaussian_over
from pymc_ngvi.density.hyperparameters import latent_rows, ratios
from pymc_ngvi.density.rows_given import NotRows, RowsGiven
from pymc_ngvi.marginal.fitting import Hopeless
from pymc_ngvi.marginal.pooled import PoolState, effective_size_of
from pymc_ngvi.nested.exploring import Exploration, Uneven, explore
from pymc_ngvi.nested.found import Marginal
from pymc_ngvi.nested.gaussians import GaussianMarginal
from pymc_ngvi.nested.latents import Latents
from pymc_ngvi.nested.log_marginal import LatentMarginal
from pymc_ngvi.nested.seconds import may_anneal, n_values_of
from pymc_ngvi.nested.verdict import NestedChecks

#: Standard deviations of hyperparameters to begin with; those of a Gaussian fit times this, within limits.
_SCALE, _OF_FIT, _LEAST, _MOST = 0.5, 2.0, 0.05, 1.0
#: Hyperparameters, about, at which a closed form is compared with log p after all.
_N_LOOKS = 8


def latent_rows_of(density: ModelDensity) -> RowsGiven:
    """Return log p as rows, hyperparameters given; raise Unavailable where that is no latent Gaussian model."""
    if not isinstance(density, LogDensity):
        raise Unavailable(Reason.IN_PART, f"the data are in {'shards' if density.is_sharded else 'batches'}")
    try:
        return latent_rows(density)
    except NotRows as reason:
        raise Unavailable(reason.code, f"no latent Gaussian model: {reason}") from None


def nested_posterior(
    density: ModelDensity, gaussian: GaussianState | None, seed: int, most_variance: float = np.inf
) -> PoolState:
    """Return the nested posterior.

    Parameters
    ----------
    density : ModelDensity
    gaussian : GaussianState or None
        A fit of all coordinates to begin from.
    seed : int
    most_variance : float
        Of log weights of draws given the hyperparameters, at the mode of these, beyond which there is to be none.

    Raises
    ------
    Unavailable
    """
    given = latent_rows_of(density)
    start = (density.initial_point() if gaussian is None else gaussian.mean())[given.outside]
    scale = np.full(len(start), _SCALE)
    if gaussian is not None:
        scale = np.clip(_OF_FIT * gaussian.sd()[given.outside], _LEAST, _MOST)
    between = ratios(density, given.outside) if isinstance(density, LogDensity) else []
    try:
        marginal, explored = _explored(given, start, scale, seed, most_variance, between)
    except Uneven as reason:
        given.is_uneven = True
        raise Unavailable(reason.code, reason.sentence) from None
    except Hopeless as reason:
        raise Unavailable(reason.code, reason.sentence) from None
    except np.linalg.LinAlgError:
        raise Unavailable(Reason.SINGULAR, "a covariance of the hyperparameters is singular") from None
    return _state(given, marginal, explored, gaussian)


def _explored(
    given: RowsGiven,
    start: Array,
    scale: Array,
    seed: int,
    most_variance: float,
    between: list[tuple[int, int]],
) -> tuple[Marginal, Exploration]:
    """Sample the hyperparameters, in closed form where that holds, as far as is seen, where the posterior is."""
    n_values, anneals = n_values_of(given), may_anneal(given)
    if (over := gaussian_over(given)) is not None:
        exact = GaussianMarginal(over)
        explored = explore(exact, start, scale, n_values, seed, most_variance, between, anneals=anneals)
        if over.agrees(explored.pairs.g[:: max(1, len(explored.pairs.g) // _N_LOOKS)]):
            return exact, explored
    marginal = LatentMarginal(given, seed)
    return marginal, explore(marginal, start, scale, n_values, seed, most_variance, between, anneals=anneals)


def _state(given: RowsGiven, marginal: Marginal, explored: Exploration, gaussian: GaussianState | None) -> PoolState:
    pairs = explored.pairs
    n_values, n_draws = pairs.log_ratio.shape
    checks = NestedChecks(
        khat=pairs.khat,
        effective_size=effective_size_of(pairs.weights),
        n_values=n_values,
        n_draws=n_draws,
        pair_size=pairs.effective_size,
        variance=pairs.variance,
        n_globals=len(given.outside),
        n_local=len(given.inside),
        n_fits=marginal.n_fits,
        moved=explored.moved,
        lost=explored.lost,
        error=0.0 if pairs.is_joint else marginal.doubt(),
        lacking=pairs.lacking,
    )
    return Latents(pairs, checks).with_pool(given.outside, given.inside, gaussian)
