"""Nested posteriors in files of earlier versions, whose draws took the factor of the nearest of a few fits."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array
from pymc_ngvi.families.gaussian import of_tag
from pymc_ngvi.marginal.sampling import evenly_picked
from pymc_ngvi.nested.pairs import WeightedPairs
from pymc_ngvi.nested.rounds import by_neighbours
from pymc_ngvi.nested.verdict import NestedChecks

#: Hyperparameters that are taken from such a posterior, draws at each, and numbers in all draws at most.
_N_VALUES, _N_DRAWS, _MOST_NUMBERS = 512, 8, 2**24
_SEED = 20_261_123
#: Ridge of the regression of means on hyperparameters.
_RIDGE = 1e-3


@stored("nested.supports")
@dataclass(frozen=True)
class Supports:
    """Gaussians of the latent variables at some values of the hyperparameters.

    Parameters
    ----------
    points : ndarray, shape (n, p)
        The hyperparameters, whitened.
    means, factors : ndarray
        One after the other.
    first : dict
        The arrays of the first one, with its tag.
    """

    points: Array
    means: Array
    factors: Array
    first: dict[str, Any]

    def at(self, points: Array) -> tuple[Array, list[Any]]:
        """Return means, which change with the hyperparameters, and the nearest Gaussian at each."""
        made, apart = of_tag(self.first), self.points - self.points.mean(axis=0)
        gram = apart.T @ apart + _RIDGE * len(apart) * np.eye(apart.shape[1])
        slopes = np.linalg.solve(gram, apart.T @ (self.means - self.means.mean(axis=0)))
        near = ((self.points - points[:, None]) ** 2).sum(axis=2).argmin(axis=1)
        states = [made.from_params({"mean": self.means[k], made.factor_name: self.factors[k]}) for k in near]
        return self.means[near] + (points - self.points[near]) @ slopes, states


@stored("nested.checks")
@dataclass(frozen=True)
class EarlierChecks:
    """What was measured of such a posterior; see `NestedChecks`, and the changelog."""

    khat: float
    effective_size: float
    n_draws: int
    n_globals: int
    n_local: int
    n_fits: int
    difference: float
    doubt: float
    correction: float
    lacking: float = 0.0


def pairs_of_earlier(content: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a file with pairs in place of supports, and checks that say so.

    Raises
    ------
    ValueError
        If the parts do not go together.
    """
    parts = dict(content)
    supports, checks, pool = parts.pop("supports"), parts["checks"], parts["sampled"].pool
    if not isinstance(supports, Supports) or not isinstance(checks, EarlierChecks):
        raise ValueError("what the nested posterior has as 'supports' or 'checks' is something else")
    pool.check(len(parts["globals_"]))
    if supports.means.shape[1] != (n_local := len(parts["locals_"])):
        raise ValueError("the nested posterior is of another dimension")
    n = max(2, min(_N_VALUES, _MOST_NUMBERS // (_N_DRAWS * n_local)))
    whitening, weights = parts["predicted"].whitening, pool.weights()[0]
    order = by_neighbours(whitening.whitened(pool.g), weights, 0.5 / n)
    rows = order[evenly_picked(weights[order], n, 0.5)]
    means, states = supports.at(whitening.whitened(pool.g[rows]))
    rng = np.random.default_rng(_SEED)
    base = rng.standard_normal((n, _N_DRAWS, n_local))
    latents = np.array([mean + q.unwhiten(z) for mean, q, z in zip(means, states, base, strict=True)])
    level = pool.log_normaliser()[0]
    even = np.full(n, level)
    # Each value stands for as much of the posterior as any other: its log m is that of its proposal, and constant.
    parts["pairs"] = WeightedPairs(
        g=pool.g[rows],
        log_density=np.zeros(n),
        log_ratio=np.repeat(even[:, None], _N_DRAWS, axis=1),
        elbo=even - checks.lacking,
        log_by_elbo=even,
        latents=latents,
        means=means,
        sds=np.array([q.sd() for q in states]),
        features=np.zeros((n, 1)),
        target=np.zeros(1),
        predicted=np.zeros(n),
        is_wide=np.zeros(n, dtype=bool),
    )
    parts["checks"] = NestedChecks(
        khat=checks.khat,
        effective_size=float(n),
        n_values=n,
        n_draws=_N_DRAWS,
        pair_size=float(n * _N_DRAWS),
        variance=float("nan"),
        n_globals=checks.n_globals,
        n_local=checks.n_local,
        n_fits=checks.n_fits,
        error=float(np.hypot(checks.difference, checks.doubt)),
        lacking=checks.lacking,
        of_earlier=True,
    )
    return parts
