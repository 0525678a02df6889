"""A second start, from draws of the prior, for a fit that has left some of the parameters at their prior.

A component that no data belong to, an amplitude of 0: fits can end where the model explains the data without some of
its parameters. Their part of q is then the prior. In few dimensions, other places are found from draws of the prior:
the best of them climb log p for some steps, and the mode with most mass, by Laplace's method, is where another fit
begins. The better of both is kept.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.model import LogDensity
from pymc_ngvi.result import Elbo
from pymc_ngvi.starting import choose_start
from pymc_ngvi.status import StartError
from pymc_ngvi.types import Array

#: Dimensions beyond which draws of the prior are too far from everything.
_MOST_DIMENSIONS = 12
#: Draws of the prior: at most, at least, and seconds of estimated work beyond which there are fewer.
_MOST_PRIOR, _LEAST_PRIOR, _SECONDS = 1_024, 64, 1.0
#: Draws that climb, and their steps.
_N_CLIMBING, _N_STEPS = 24, 20
#: Number of the random stream behind the draws.
_STREAM = 7_000_000
#: Standard deviation on the unconstrained scale below which a parameter has learned from the data.
_LEAST_SD = 0.4
#: Differences of mean, in standard deviations of the prior, and ratios of sd, within which q is about the prior.
_SHIFT, _RATIOS = 1.5, (0.4, 2.5)
#: Least curvature of a climb, in the scales of the prior; length of its steps; nats below which a step is the last.
_LEAST_CURVATURE, _MOST_LENGTH, _LAST_GAIN = 0.1, 3.0, 0.05
#: Nats by which a mode has to promise more than q; nats, and standard errors, that a second fit has to gain.
_PROMISE, _GAIN, _N_SE = 1.0, 0.1, 3.0
#: Parameters named in a sentence, at most.
_MOST_NAMED = 3
#: Quartiles of a standard normal.
_QUARTILE = 0.6745


class Place(NamedTuple):
    """Where a second fit begins.

    Parameters
    ----------
    state : GaussianState
    unused : tuple of str
        Labels of the parameters that the first fit left at their prior.
    n_prior : int
        Draws of the prior that were looked at.
    """

    state: Any
    unused: tuple[str, ...]
    n_prior: int

    def sentence(self, gain: float) -> str:
        """Return what became of it, where the second fit is the better one."""
        named = ", ".join(f"`{name}`" for name in self.unused[:_MOST_NAMED])
        more = f" and {len(self.unused) - _MOST_NAMED} more" if len(self.unused) > _MOST_NAMED else ""
        return (
            f"A first fit left {named}{more} near the prior. This one begins where the best of {self.n_prior:,} draws "
            f"of the prior led, and its ELBO is {gain:,.1f} nats higher."
        )


@dataclass(frozen=True)
class SecondStart:
    """Where a fit begins that follows another.

    Parameters
    ----------
    density : LogDensity
    rule, family : object
        Of the first fit.
    scales : list of ndarray, shape (n_dim,)
        Standard deviations to choose among.
    seed : int
        Of the first fit.
    """

    density: LogDensity
    rule: Any
    family: Any
    scales: list[Array]
    seed: int

    def after(self, q: Any, elbo: float) -> Place | None:
        """Return where to begin once more; None if there is no need.

        Parameters
        ----------
        q : GaussianState
            Of the first fit.
        elbo : float
        """
        density = self.density
        if q.n_dim > _MOST_DIMENSIONS or not q.sd().max() > _LEAST_SD or not density.has_hessian:
            return None
        seconds = max(density.gradient_seconds, _SECONDS / _MOST_PRIOR)  # 0 where log p is constant
        n = max(int(_SECONDS / seconds), _LEAST_PRIOR)
        prior = density.prior_draws(n, int(np.random.default_rng([_STREAM, self.seed]).integers(2**31)))
        unused = at_prior(q, prior)
        if not len(unused):
            return None
        point, mass = best_mode(density, prior)
        if not mass > elbo + _PROMISE:
            return None
        try:
            state = choose_start(self.rule, self.family, point, self.scales, density)
        except StartError:
            return None
        return Place(state, tuple(density.layout.label(int(i)) for i in unused), len(prior))


def is_better(new: Elbo, old: Elbo) -> bool:
    """Tell whether a second fit has gained more than its error."""
    return bool(np.isfinite(new.value) and new.value - old.value > max(_GAIN, _N_SE * float(np.hypot(new.se, old.se))))


def at_prior(q: Any, prior: Array) -> NDArray[np.intp]:
    """Return the coordinates whose distribution in q is about that of draws of the prior, (n_draws, n_dim)."""
    if len(prior) < _LEAST_PRIOR:
        return np.empty(0, dtype=np.intp)
    centre, scale = _centre_and_scale(prior)
    sd = q.sd()
    near = np.abs(q.mean() - centre) < _SHIFT * scale
    as_wide = (_RATIOS[0] * scale < sd) & (sd < _RATIOS[1] * scale) & (sd > _LEAST_SD)
    return np.flatnonzero(near & as_wide)


def _centre_and_scale(prior: Array) -> tuple[Array, Array]:
    lower, centre, upper = np.quantile(prior, [0.25, 0.5, 0.75], axis=0)
    return centre, np.maximum((upper - lower) / (2.0 * _QUARTILE), 1e-12)


def best_mode(density: Any, prior: Array) -> tuple[Array, float]:
    """Return the mode with most mass that the best draws of the prior climb to, and the log of that mass.

    Parameters
    ----------
    density : LogDensity
    prior : ndarray, shape (n_draws, n_dim)

    Returns
    -------
    point : ndarray, shape (n_dim,)
    log_mass : float
        By Laplace's method; -inf if no end of a climb has the curvature of a mode.
    """
    logp, _ = density.logp_grad(prior)
    logp = np.where(np.isfinite(logp), logp, -np.inf)
    # The best of each part of the draws: the best of all may lie about one poor mode.
    parts = np.array_split(np.arange(len(prior)), _N_CLIMBING)
    best = [part[np.argmax(logp[part])] for part in parts]
    points, logp = climbed(density, prior[best], _centre_and_scale(prior)[1])
    masses = [_log_mass(density, point, height) for point, height in zip(points, logp, strict=True)]
    most = int(np.argmax(masses))
    return points[most], masses[most]


def climbed(density: Any, points: Array, scale: Array) -> tuple[Array, Array]:
    """Climb log p from several points at once, by Newton steps with the absolute values of the curvatures.

    Parameters
    ----------
    density : LogDensity
    points : ndarray, shape (n_points, n_dim)
    scale : ndarray, shape (n_dim,)
        In which least curvatures and lengths of steps are measured.

    Returns
    -------
    points : ndarray, shape (n_points, n_dim)
    logp : ndarray, shape (n_points,)
        -inf where it is not finite.
    """
    x = points.copy()
    logp, grad = density.logp_grad(x)
    active = np.isfinite(logp) & np.isfinite(grad).all(axis=1)
    logp = np.where(active, logp, -np.inf)
    direction, size, turn = np.zeros_like(x), np.ones(len(x)), active.copy()
    for _ in range(_N_STEPS):
        for row in np.flatnonzero(active & turn):
            direction[row] = _newton_step(density, x[row], grad[row], scale)
        rows = np.flatnonzero(active)
        if not len(rows):
            break
        new = x[rows] + size[rows, None] * direction[rows]
        new_logp, new_grad = density.logp_grad(new)
        with np.errstate(invalid="ignore"):
            better = (new_logp >= logp[rows]) & np.isfinite(new_logp) & np.isfinite(new_grad).all(axis=1)
        up, down = rows[better], rows[~better]
        gain = new_logp[better] - logp[up]
        full = size[up] == 1.0
        x[up], logp[up], grad[up] = new[better], new_logp[better], new_grad[better]
        size[up], size[down] = np.minimum(2.0 * size[up], 1.0), 0.25 * size[down]
        turn[:] = False
        turn[up] = True
        active[up[full & (gain < _LAST_GAIN)]] = False
    return x, logp


def _newton_step(density: Any, point: Array, grad: Array, scale: Array) -> Array:
    values, vectors = _curvatures(density, point, scale)
    if values is None:
        step = scale * grad
    else:
        step = vectors @ ((vectors.T @ (scale * grad)) / np.maximum(np.abs(values), _LEAST_CURVATURE))
    step = step * min(1.0, _MOST_LENGTH * np.sqrt(len(step)) / max(float(np.linalg.norm(step)), 1e-300))
    result: Array = scale * step
    return result


def _log_mass(density: Any, point: Array, logp: float) -> float:
    """Return the log of the mass about a mode by Laplace's method; -inf where there is none."""
    if not np.isfinite(logp):
        return -np.inf
    values, _ = _curvatures(density, point, np.ones(len(point)))
    if values is None or not values.min() > 0.0:
        return -np.inf
    return float(logp + 0.5 * len(point) * np.log(2.0 * np.pi) - 0.5 * np.log(values).sum())


def _curvatures(density: Any, point: Array, scale: Array) -> tuple[Array | None, Array]:
    """Return eigenvalues and vectors of minus the Hessian in some scales; None where it is not finite."""
    curvature = -scale[:, None] * density.mean_hessian_products(point[None], np.eye(len(point))) * scale
    if not np.isfinite(curvature).all():
        return None, curvature
    values, vectors = np.linalg.eigh(0.5 * (curvature + curvature.T))
    return values, vectors
