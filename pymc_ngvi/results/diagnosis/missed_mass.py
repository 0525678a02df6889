"""Posterior mass far from where q is, at other modes of log p."""

from dataclasses import dataclass

import numpy as np

from scipy.special import expit

from pymc_ngvi.core.linalg import logsumexp
from pymc_ngvi.core.seeds import seed_of
from pymc_ngvi.core.types import Array, GaussianState, VariationalState
from pymc_ngvi.density import ModelDensity
from pymc_ngvi.families import FullState
from pymc_ngvi.fitting.modes.search import ModeSearch
from pymc_ngvi.results.distributions import Distribution

#: Largest dimension of dense curvatures.
_MOST_DENSE = 500
#: Draws of each candidate, and log of the ratio to q from which on a draw counts as outside.
_N_DRAWS, _LOG_OUTSIDE = 512, 3.0
#: Part of the draws of a candidate that has to be outside.
_MOSTLY = 0.5


@dataclass(frozen=True)
class MissedMass:
    """A mode outside q."""

    #: Mass there as a part of that and the one that q stands for.
    share: float
    #: shape (n_dim,).
    location: Array


def other_modes(density: ModelDensity, q: Distribution, elbo: float, rng: np.random.Generator) -> list[MissedMass]:
    """Look for modes once more, from other points, and return those outside q."""
    search = ModeSearch(density, seed_of(rng), "", "hessians")
    found = search.after(_around(q), elbo, 0, 0, is_sound=True)
    if found is None:
        return []
    density.n_gradients += found.n_gradients
    result = [outside(density, q, elbo, mode.gaussian, rng) for mode in found.modes]
    return sorted((place for place in result if place is not None), key=lambda place: -place.share)


def _around(distribution: Distribution) -> GaussianState:
    """Return a Gaussian with the moments of q, of a form whose curvatures can be had."""
    mean, sd = distribution.mean(), distribution.sd()
    sd = np.where(np.isfinite(sd), sd, 1.0)
    if distribution.n_dim <= _MOST_DENSE:
        return FullState.from_scale(mean, sd)
    return distribution.gaussian.with_scale(mean, sd)


def outside(
    density: ModelDensity,
    q: Distribution,
    elbo: float,
    candidate: VariationalState,
    rng: np.random.Generator,
) -> MissedMass | None:
    """Return the mass that a candidate covers and q does not; None where q is there, too, or that is not known."""
    base = rng.standard_normal((_N_DRAWS, q.n_dim))
    if candidate.n_uniform:
        base = np.concatenate([base, rng.random((_N_DRAWS, candidate.n_uniform))], axis=1)
    theta = candidate.draws(base)
    theta = theta[np.isfinite(theta).all(axis=1)]
    if not len(theta):
        return None
    log_p, log_q = density.logp(theta), q.rough_log_density(theta)
    if log_q is None:
        return None
    with np.errstate(invalid="ignore"):
        log_q = np.where(np.isfinite(log_q), log_q, -np.inf)
        outside = np.isfinite(log_p) & (log_q < log_p - elbo - _LOG_OUTSIDE)
    if outside.mean() < _MOSTLY:
        return None
    ratio = log_p[outside] - candidate.log_density(theta[outside])
    share = float(expit(logsumexp(ratio) - np.log(len(theta)) - elbo))
    return MissedMass(share, np.asarray(candidate.mean()))
