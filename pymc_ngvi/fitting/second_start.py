"""A second start, from draws of the prior, for a fit that has left some of the parameters at their prior.

A component that no data belong to, an amplitude of 0: fits can end where the model explains the data without some of
its parameters. Their part of q is then the prior. In few dimensions, other places are found from draws of the prior:
the best of them climb log p for some steps, and the mode with most mass, by Laplace's method, is where another fit
begins. The better of both is kept.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from numpy.typing import ArrayLike, NDArray

from pymc_ngvi.core.elbo import Elbo
from pymc_ngvi.core.status import StartError
from pymc_ngvi.core.types import Array, FittedState, Rule, VariationalState
from pymc_ngvi.families import Maker
from pymc_ngvi.fitting.options import FitOptions
from pymc_ngvi.fitting.problem import Problem
from pymc_ngvi.fitting.starting import choose_start, start_scales
from pymc_ngvi.model import LogDensity

#: Dimensions beyond which draws of the prior are too far from everything.
_MOST_DIMENSIONS = 12
#: Draws of the prior: at most, at least, and those of a first look; seconds of estimated work beyond which there are
#: fewer.
_MOST_PRIOR, _LEAST_PRIOR, _FIRST_PRIOR, _SECONDS = 1_024, 64, 192, 1.0
#: Draws that climb, at most and at least, and their steps.
_MOST_CLIMBING, _LEAST_CLIMBING, _N_STEPS = 64, 16, 20
#: Number of the random stream behind the draws.
_STREAM = 7_000_000
#: Standard deviation on the unconstrained scale below which a parameter has learned from the data.
_LEAST_SD = 0.4
#: Differences of mean, in standard deviations of the prior, and ratios of sd, within which q is about the prior.
_SHIFT, _RATIOS = 1.5, (0.4, 2.5)
#: Least curvature of a climb, in the scales of the prior; length of its steps; nats below which a step is the last.
_LEAST_CURVATURE, _MOST_LENGTH, _LAST_GAIN = 0.1, 3.0, 0.05
#: Length of differences of gradients, in the same scales.
_DIFFERENCE = 1e-6
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
    state : VariationalState
    unused : tuple of str
        Labels of the parameters that the first fit left at their prior.
    n_prior : int
        Draws of the prior that were looked at.
    """

    state: VariationalState
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
    scales : list of ndarray, shape (n_dim,)
        Standard deviations to choose among.
    seed : int
        Of the first fit.
    """

    density: LogDensity
    scales: list[Array]
    seed: int

    @classmethod
    def of(
        cls,
        problem: Problem,
        options: FitOptions,
        start: object,
        start_sigma: Mapping[str, ArrayLike] | float | None,
        seed: int,
    ) -> "SecondStart | None":
        """Return where a fit may begin once more; None where the user has said where it begins."""
        density = problem.density
        served = options.choice.step in ("adaptive", "linesearch") and problem.has_own_coordinates
        if not served or density.has_minibatch or density.is_streamed or start is not None:
            return None
        return cls(density, start_scales(density, start_sigma), seed)

    def after(self, rule: Rule, family: Maker[FittedState], q: VariationalState, elbo: float) -> Place | None:
        """Return where to begin once more; None if there is no need.

        Parameters
        ----------
        rule : StepRule
        family : Family
            Of the first fit, as it ended.
        q : VariationalState
            Of the first fit.
        elbo : float
        """
        density = self.density
        if q.n_dim > _MOST_DIMENSIONS or not q.sd().max() > _LEAST_SD:
            return None
        n = _affordable(density.gradient_seconds, _LEAST_PRIOR, _MOST_PRIOR)
        seed = int(np.random.default_rng([_STREAM, self.seed]).integers(2**31))
        prior = density.info.prior_draws(min(n, _FIRST_PRIOR), seed)
        if not 0 < len(prior) < _LEAST_PRIOR and not len(at_prior(q, prior)):
            return None
        prior = density.info.prior_draws(n, seed)
        unused = at_prior(q, prior)
        if not len(unused) or not density.has_hessian:  # asked last, as a graph may have to be made for it
            return None
        point, mass, sd = best_mode(density, prior)
        if not mass > elbo + _PROMISE:
            return None
        try:
            state = choose_start(rule, family, point, [sd, *self.scales], density)
        except StartError:
            return None
        return Place(state, tuple(density.layout.label(int(i)) for i in unused), len(prior))


def is_better(new: Elbo, old: Elbo) -> bool:
    """Tell whether a second fit has gained more than its error."""
    return bool(np.isfinite(new.value) and new.value - old.value > max(_GAIN, _N_SE * float(np.hypot(new.se, old.se))))


def _affordable(seconds: float, least: int, most: int) -> int:
    """Return how often something that takes some seconds may be done; they are 0 where log p is constant."""
    return max(int(_SECONDS / max(seconds, _SECONDS / most)), least)


def at_prior(q: VariationalState, prior: Array) -> NDArray[np.intp]:
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


def best_mode(density: LogDensity, prior: Array) -> tuple[Array, float, Array]:
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
    sd : ndarray, shape (n_dim,)
        Standard deviations given all other coordinates.
    """
    logp, _ = density.logp_grad(prior)
    logp = np.where(np.isfinite(logp), logp, -np.inf)
    # The best of each part of the draws: the best of all may lie about one poor mode.
    work = density.gradient_seconds * _N_STEPS * prior.shape[1]
    n_climbing = _affordable(work, _LEAST_CLIMBING, _MOST_CLIMBING)
    parts = np.array_split(np.arange(len(prior)), n_climbing)
    best = [part[np.argmax(logp[part])] for part in parts]
    scale = _centre_and_scale(prior)[1]
    points, logp, grad = climbed(density, prior[best], scale)
    masses, sds = _log_masses(density, points, logp, grad, scale)
    most = int(np.argmax(masses))
    return points[most], float(masses[most]), sds[most]


def climbed(density: LogDensity, points: Array, scale: Array) -> tuple[Array, Array, Array]:
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
    grad : ndarray, shape (n_points, n_dim)
    """
    x = points.copy()
    logp, grad = density.logp_grad(x)
    active = np.isfinite(logp) & np.isfinite(grad).all(axis=1)
    logp = np.where(active, logp, -np.inf)
    direction, size, turn = np.zeros_like(x), np.ones(len(x)), active.copy()
    for _ in range(_N_STEPS):
        turning = active & turn
        direction[turning] = _newton_steps(density, x[turning], grad[turning], scale)
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
    return x, logp, grad


def _newton_steps(density: LogDensity, points: Array, grad: Array, scale: Array) -> Array:
    """Return a step for each point, (n_points, n_dim): along the gradient where there are no curvatures."""
    curvatures, _ = _curvatures(density, points, grad, np.broadcast_to(scale, points.shape))
    values, vectors = np.linalg.eigh(curvatures)
    slopes = np.einsum("nji,nj->ni", vectors, scale * grad)
    steps = np.einsum("nij,nj->ni", vectors, slopes / np.maximum(np.abs(values), _LEAST_CURVATURE))
    longest = _MOST_LENGTH * np.sqrt(points.shape[1])
    length = np.maximum(np.linalg.norm(steps, axis=1, keepdims=True), 1e-300)
    result: Array = scale * steps * np.minimum(1.0, longest / length)
    return result


def _log_masses(density: LogDensity, points: Array, logp: Array, grad: Array, scale: Array) -> tuple[Array, Array]:
    """Return the log of the mass about each mode by Laplace's method, and standard deviations given all others.

    The mass is -inf where there is no mode.
    """
    masses, sds = np.full(len(points), -np.inf), np.broadcast_to(scale, points.shape).copy()
    ends = np.flatnonzero(np.isfinite(logp))
    for _ in range(2):  # the second time over differences of the right length
        curvatures, _ = _curvatures(density, points[ends], grad[ends], sds[ends])
        sds[ends] /= np.sqrt(np.maximum(np.einsum("nii->ni", curvatures), _LEAST_CURVATURE))
    curvatures, finite = _curvatures(density, points[ends], grad[ends], sds[ends])
    values = np.linalg.eigvalsh(curvatures)
    modes = finite & (values.min(axis=1, initial=np.inf) > 0.0)
    ends, values = ends[modes], values[modes]
    root = 0.5 * np.log(2.0 * np.pi) + np.log(sds[ends]) - 0.5 * np.log(values)
    masses[ends] = logp[ends] + root.sum(axis=1)
    return masses, sds


def _curvatures(density: LogDensity, points: Array, grad: Array, scales: Array) -> tuple[Array, NDArray[np.bool_]]:
    """Return minus the Hessian at each point, in its scales, from differences of gradients; 1 where not finite."""
    n_points, n_dim = points.shape
    if not n_points:
        return np.empty((0, n_dim, n_dim)), np.empty(0, dtype=np.bool_)
    moved = points[:, None, :] + _DIFFERENCE * scales[:, :, None] * np.eye(n_dim)
    _, beside = density.logp_grad(moved.reshape(-1, n_dim))
    with np.errstate(invalid="ignore", over="ignore"):
        change = grad[:, None, :] - beside.reshape(n_points, n_dim, n_dim)
        curvatures = scales[:, None, :] * change / _DIFFERENCE
        curvatures = 0.5 * (curvatures + curvatures.transpose(0, 2, 1))
    finite = np.isfinite(curvatures).all(axis=(1, 2))
    return np.where(finite[:, None, None], curvatures, np.eye(n_dim)), finite
