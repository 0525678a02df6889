"""Where climbs begin: draws of the prior, of wide t distributions about a fit, and draws of the fit itself."""

from dataclasses import dataclass

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.types import Array, GaussianState
from pymc_ngvi.density import ModelDensity

#: How much wider than the fit t distributions are, and their degrees of freedom.
WIDER, _DF = (3.0, 10.0, 30.0), 3.0
#: Draws of the fit: those whose climbs say which mode is its own, and those among which large weights are looked for.
_N_OWN, _N_WEIGHED = 3, 128
#: Draws of the prior below which nothing follows from their spread; quartile of a standard normal.
_LEAST_PRIOR, _QUARTILE = 16, 0.6745


@dataclass(frozen=True)
class Points:
    """Points from which log p is climbed.

    Parameters
    ----------
    theta, scales : ndarray, shape (n_points, n_dim)
        With the standard deviations of what each was drawn from.
    n_own : int
        The first ones, that are of the fit.
    n_looked : int
        Points among which these are the best.
    n_prior : int
        Draws of the prior among those.
    """

    theta: Array
    scales: Array
    n_own: int
    n_looked: int
    n_prior: int


def points_for(
    density: ModelDensity, q: GaussianState, rng: np.random.Generator, n_climbs: int, n_looked: int, *, is_sound: bool
) -> Points:
    """Return where to climb from.

    Parameters
    ----------
    density : ModelDensity
    q : GaussianState
        The fit.
    rng : Generator
    n_climbs, n_looked : int
        Points, and points to take these from, about.
    is_sound : bool
        Whether the fit is a place to look around from.

    Notes
    -----
    Of each set of draws the best of each part are taken, as the best of all may lie about one poor mode: those where
    log p is highest, and those where it is highest over what the fit explains. Of draws of the fit, those with the
    largest weights: where they are not in the tails of its own mode, they have hit another one.
    """
    theta, scales, n_seen, n_own = [], [], 0, 0
    if is_sound:
        z = rng.standard_normal((_N_WEIGHED, q.n_dim))
        own = np.asarray(q.draws(z))
        with np.errstate(all="ignore"):
            ratio = _finite(density.logp(own) - q.log_density(own))
        n_heavy = max(n_climbs // 12, 1)
        theta += [q.mean()[None], own[: _N_OWN - 1], own[np.argsort(-ratio)[:n_heavy]]]
        n_own, n_seen = _N_OWN, _N_WEIGHED
        scales += [np.broadcast_to(q.sd(), (_N_OWN + n_heavy, q.n_dim))]
    prior = density.info.prior_draws(n_looked // 2, int(rng.integers(2**31)))
    sets = [(prior, _spread(prior))] if len(prior) >= _LEAST_PRIOR else []
    if is_sound:
        n = (n_looked - len(prior)) // len(WIDER)
        sets += [(_wide(q, width, n, rng), width * q.sd()) for width in WIDER]
    for draws, sd in sets:
        n = max(n_climbs // 2 if draws is prior else (n_climbs - n_climbs // 2 * bool(len(prior))) // len(WIDER), 1)
        best = draws[_best_of_parts(density, q if is_sound else None, draws, n)]
        theta.append(best)
        scales.append(np.broadcast_to(sd, best.shape))
        n_seen += len(draws)
    if not theta:
        return Points(np.empty((0, q.n_dim)), np.empty((0, q.n_dim)), 0, 0, 0)
    return Points(np.concatenate(theta), np.concatenate(scales), n_own, n_seen, len(prior))


def _wide(q: GaussianState, width: float, n: int, rng: np.random.Generator) -> Array:
    """Draw from a t distribution about a fit, wider than that."""
    z = rng.standard_normal((n, q.n_dim)) / np.sqrt(rng.chisquare(_DF, (n, 1)) / _DF)
    return np.asarray(q.draws(width * z))


def _spread(draws: Array) -> Array:
    """Return robust standard deviations."""
    lower, upper = np.quantile(draws, [0.25, 0.75], axis=0)
    return np.maximum((upper - lower) / (2.0 * _QUARTILE), 1e-12)


def _best_of_parts(density: ModelDensity, q: GaussianState | None, draws: Array, n_parts: int) -> NDArray[np.intp]:
    """Return the best draw of each part: by log p, and of every second part by what a fit does not explain of it."""
    with np.errstate(all="ignore"):
        logp = _finite(density.logp(draws))
        unexplained = logp if q is None else _finite(logp - q.log_density(draws))
    parts = [part for part in np.array_split(np.arange(len(draws)), n_parts) if len(part)]
    best = [part[np.argmax((unexplained if i % 2 else logp)[part])] for i, part in enumerate(parts)]
    return np.array(best, dtype=np.intp)


def _finite(values: Array) -> Array:
    return np.where(np.isfinite(values), values, -np.inf)
