"""Nested posteriors in files of earlier versions, whose draws took the factor of the nearest of a few fits."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from pymc_ngvi.core.stored import stored
from pymc_ngvi.marginal.sampling import evenly_picked
from pymc_ngvi.nested.pairs import WeightedPairs
from pymc_ngvi.nested.rounds import by_neighbours
from pymc_ngvi.nested.supports import Supports
from pymc_ngvi.nested.verdict import NestedChecks

#: Hyperparameters that are taken from such a posterior, draws at each, and numbers in all draws at most.
_N_VALUES, _N_DRAWS, _MOST_NUMBERS = 512, 8, 2**24
_SEED = 20_261_123


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
    if supports.n_dim != len(parts["locals_"]):
        raise ValueError("the nested posterior is of another dimension")
    n = max(2, min(_N_VALUES, _MOST_NUMBERS // (_N_DRAWS * supports.n_dim)))
    whitening, weights = parts["predicted"].whitening, pool.weights()[0]
    order = by_neighbours(whitening.whitened(pool.g), weights, 0.5 / n)
    rows = order[evenly_picked(weights[order], n, 0.5)]
    rng, whitened = np.random.default_rng(_SEED), whitening.whitened(pool.g[rows])
    base = rng.standard_normal((n * _N_DRAWS, supports.n_dim))
    latents = supports.draw(np.repeat(whitened, _N_DRAWS, axis=0), base).reshape(n, _N_DRAWS, -1)
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
        means=supports.mean(whitened),
        sds=np.array([supports.sd_at(one[None]) for one in whitened]),
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
