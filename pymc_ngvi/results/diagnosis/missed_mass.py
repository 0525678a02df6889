"""Posterior mass far from where q is, at other modes of log p."""

import numpy as np

from scipy.special import expit

from pymc_ngvi.core.draws import draws_of
from pymc_ngvi.core.linalg import logsumexp
from pymc_ngvi.core.seeds import seed_of
from pymc_ngvi.density import ModelDensity
from pymc_ngvi.families import FullState
from pymc_ngvi.fitting.modes.found import OtherMode
from pymc_ngvi.fitting.modes.search import ModeSearch
from pymc_ngvi.results.distributions import Distribution

#: Largest dimension of dense curvatures.
_MOST_DENSE = 500
#: Draws of each candidate, and log of the ratio to q from which on a draw counts as outside.
_N_DRAWS, _LOG_OUTSIDE = 512, 3.0
#: Part of the draws of a candidate that has to be outside.
_MOSTLY = 0.5


def other_modes(density: ModelDensity, q: Distribution, elbo: float, rng: np.random.Generator) -> list[OtherMode]:
    """Look for modes once more, from other points; return those outside q, each with its part of the mass of both."""
    search, mean, sd = ModeSearch(density, seed_of(rng), "", "hessians"), q.mean(), q.sd()
    sd = np.where(np.isfinite(sd), sd, 1.0)
    # A Gaussian of a form whose curvatures can be had.
    around = FullState.from_scale(mean, sd) if q.n_dim <= _MOST_DENSE else q.gaussian.with_scale(mean, sd)
    found = search.after(around, elbo, 0, 0, is_sound=True)
    if found is None:
        return []
    density.n_gradients += found.n_gradients
    result = []
    for candidate in (mode.gaussian for mode in found.modes):
        theta = draws_of(candidate, _N_DRAWS, rng)
        theta = theta[np.isfinite(theta).all(axis=1)]
        log_q = q.rough_log_density(theta) if len(theta) else None
        if log_q is None:  # it is not known
            continue
        log_p = density.logp(theta)
        with np.errstate(invalid="ignore"):
            log_q = np.where(np.isfinite(log_q), log_q, -np.inf)
            outside = np.isfinite(log_p) & (log_q < log_p - elbo - _LOG_OUTSIDE)
        if outside.mean() >= _MOSTLY:
            ratio = log_p[outside] - candidate.log_density(theta[outside])
            result.append(OtherMode(candidate, float(expit(logsumexp(ratio) - np.log(len(theta)) - elbo))))
    return sorted(result, key=lambda mode: -mode.share)
