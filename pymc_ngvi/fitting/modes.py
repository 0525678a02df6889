"""A search for other modes of log p after a fit, where it is not known to have one alone.

Draws of the prior, and of t distributions 3, 10 and 30 times as wide as the fit, climb log p for some steps. Modes that
are far from the fit, and may have much of the mass by Laplace's method, are where it begins once more. So are humps of
log p beyond a valley on lines through the fit: moved all at once, coordinates seldom hit a mode of which most are as
they are at the fit. Where log p is concave given three coordinates or fewer, lines along these are enough.
"""

import functools
import math

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, cast

import numpy as np

from scipy.special import ndtr

from pymc_ngvi.core import linalg
from pymc_ngvi.core.climbs import VALLEY, ascend, tops
from pymc_ngvi.core.prices import fit_seconds
from pymc_ngvi.core.progress import task
from pymc_ngvi.core.sizes import MODES, STREAMED, seed_of
from pymc_ngvi.core.status import Elbo, StartError
from pymc_ngvi.core.types import (
    Array,
    Bools,
    GaussianState,
    Indices,
    MeanHessian,
    Rule,
    Spread,
    VariationalState,
)
from pymc_ngvi.density import ModelDensity
from pymc_ngvi.density.one_mode import concave_given, has_one_mode, rows_not_concave
from pymc_ngvi.families import FullState, Maker
from pymc_ngvi.families.gaussian import AnyGaussian, Gaussian
from pymc_ngvi.fitting.loop import LoopState
from pymc_ngvi.fitting.options import FitOptions
from pymc_ngvi.fitting.problem import START_SCALES, Problem, choose_start
from pymc_ngvi.fitting.record import OtherMode, is_outside, shares
from pymc_ngvi.methods.mixtures import distinct, local_component
from pymc_ngvi.moves.chains import ChainCoordinates, Climbs

# --- climbs of log p in few dimensions, by Newton's method with curvatures from differences of gradients ---

#: Steps of a climb.
N_STEPS = 20
#: Least curvature of a climb, in its scales; length of its steps; nats below which a step is the last.
_LEAST_CURVATURE, _MOST_LENGTH, _LAST_GAIN = 0.1, 3.0, 0.05
#: Length of differences of gradients, in the same scales.
_DIFFERENCE = 1e-5


def climbed(density: ModelDensity, points: Array, scale: Array) -> tuple[Array, Array, Array]:
    """Climb log p from several points at once, by Newton steps with the absolute values of the curvatures."""
    x = points.copy()
    logp, grad = density.logp_grad(x)
    active = np.isfinite(logp) & np.isfinite(grad).all(axis=1)
    logp = np.where(active, logp, -np.inf)
    direction, size, turn = np.zeros_like(x), np.ones(len(x)), active.copy()
    longest = _MOST_LENGTH * np.sqrt(x.shape[1])
    for _ in range(N_STEPS):
        turning = active & turn
        curvatures, _ = _curvatures(density, x[turning], grad[turning], scale[turning])
        values, vectors = np.linalg.eigh(curvatures)
        slopes = np.einsum("nji,nj->ni", vectors, scale[turning] * grad[turning])
        steps = np.einsum("nij,nj->ni", vectors, slopes / np.maximum(np.abs(values), _LEAST_CURVATURE))
        length = np.maximum(np.linalg.norm(steps, axis=1, keepdims=True), linalg.TINY)
        direction[turning] = scale[turning] * steps * np.minimum(1.0, longest / length)
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


def abouts(density: ModelDensity, points: Array, grad: Array, scales: Array) -> list[GaussianState | None]:
    """Return Gaussians with the curvature of log p at points; None where it bends upwards, or is not finite."""
    sd = scales.copy()
    for _ in range(2):  # the second time over differences of the right length
        curvatures, _ = _curvatures(density, points, grad, sd)
        sd = sd / np.sqrt(np.maximum(np.diagonal(curvatures, axis1=1, axis2=2), _LEAST_CURVATURE))
    return [
        _gaussian(point, curvature, scale) if is_finite else None
        for point, curvature, is_finite, scale in zip(points, *_curvatures(density, points, grad, sd), sd, strict=True)
    ]


def _gaussian(point: Array, curvature: Array, sd: Array) -> GaussianState | None:
    """Return the Gaussian about a point with a curvature in scales of its own; None where it bends upwards."""
    upper = linalg.reverse_cholesky(curvature)
    if upper is None:
        return None
    factor = linalg.solve_lower(np.ascontiguousarray(upper.T), np.eye(len(point)))
    return cast(GaussianState, FullState(point.copy(), sd[:, None] * factor))


def _curvatures(density: ModelDensity, points: Array, grad: Array, scales: Array) -> tuple[Array, Bools]:
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


# --- climbs of log p from many points at once, and the Gaussians about the modes that they end at ---

#: Dimensions up to which curvatures come from differences of gradients, and climbs take steps of Newton's method.
MOST_NEWTON = 12
#: Steps of another climb, after which it is seen where it leads.
_N_ASCENT = 60
#: Slope of log p per root dimension, in units of a mode, below which a climb has ended at one: others end on ridges.
_FLAT = 0.3
#: Distance from a fit, in standard deviations and per root dimension, from which on a mode is another one.
_FAR, _FAR_PER_ROOT = 4.0, 0.5
#: Nats below a mode, and per dimension, at which another one has next to no mass.
_BELOW, _BELOW_PER_DIM = 10.0, 0.25
#: Modes, and humps, that are looked at, at most, the best ones.
_MOST_MODES = 16


#: What curvatures come from.
type Curvature = Literal["hessians", "rows", "differences"]


class Mode(NamedTuple):
    """A mode of log p."""

    #: About it, with the curvature of log p there.
    gaussian: GaussianState
    #: At the mode; of the mass about it, by Laplace's method.
    logp: float
    log_mass: float
    #: Whether it is none, but a place beyond a valley from which a fit may come to one.
    is_start: bool = False

    @property
    def point(self) -> Array:
        """Where it is."""
        return np.asarray(self.gaussian.mean())


def modes_from(
    density: ModelDensity,
    q: GaussianState,
    points: Array,
    scales: Array,
    *,
    has_home: bool = False,
    curvature: Curvature = "hessians",
) -> tuple[list[Mode], Mode | None]:
    """Return the modes that climbs end at, and that of the first point, which is to be where a fit is, if so told."""
    # By rows, Hessians are as expectations over these have them.
    by_rows = functools.partial(_hessian_by_rows, density, q) if curvature == "rows" else None
    is_small = density.n_dim <= MOST_NEWTON
    with np.errstate(all="ignore"):
        if is_small:
            ends, logp, grad = climbed(density, points, scales)
            about_ends = abouts(density, ends, grad, scales)
        else:
            whitened = Climbs(density, ChainCoordinates.of(q), math.inf)
            z, logp = ascend(whitened, whitened.coordinates.w(points), _N_ASCENT)
            z, logp = _away(whitened, z, logp) if has_home else ascend(whitened, z)
            ends = whitened.coordinates.draws(z)

        def make(i: int) -> GaussianState | None:
            if is_small:
                return about_ends[i]
            if curvature == "differences":
                return abouts(density, ends[[i]], density.logp_grad(ends[[i]])[1], q.sd()[None])[0]
            return local_component(density, cast(AnyGaussian, q), ends[i], mean_hessian=by_rows)

        found, which = distinct(ends, logp, make, _MOST_MODES)
        modes = [
            Mode(about, float(logp[i]), float(logp[i] - about.log_density(ends[i][None])[0]))
            if is_flat(density, about)
            else None
            for i, about in found
        ]
        home = modes[which[0]] if has_home and which[0] >= 0 else None
        return [mode for mode in modes if mode is not None], home


def _away(whitened: Climbs, ends: Array, logp: Array) -> tuple[Array, Array]:
    """Return the ends of climbs beyond a valley from the first one, which comes first, and log p there.

    log p is -inf at what turns out to be no other mode, and everywhere where there is none.
    """
    n_dim = ends.shape[1]
    logp[1:][~(logp[1:] >= logp.max() - _BELOW - _BELOW_PER_DIM * n_dim)] = -np.inf
    z, logp = ascend(whitened, ends[tops(lambda z: whitened.logp_grad(z)[0], ends, logp, _MOST_MODES, 0)])
    is_away = np.linalg.norm(z - z[0], axis=1) >= far_from(n_dim)
    is_away[0] = is_away.any()
    return z, np.where(is_away, logp, -np.inf)


def far_from(n_dim: int) -> float:
    """Return the distance, in standard deviations, from which on a mode is another one."""
    return float(max(_FAR, _FAR_PER_ROOT * np.sqrt(n_dim)))


def is_flat(density: ModelDensity, about: GaussianState) -> bool:
    """Tell whether log p is flat where a climb ended."""
    grad = density.logp_grad(about.mean()[None])[1]
    return float(np.sum(about.whiten(grad) ** 2)) < _FLAT**2 * about.n_dim


def _hessian_by_rows(density: ModelDensity, q: GaussianState, theta: Array) -> MeanHessian:
    """Return the Hessian of the rows at the only point; that of log p where they have none."""
    found = density.by_rows.about(theta[0], cast(Spread, q))
    return density.mean_hessian(theta) if found is None else found


# --- where climbs begin: draws of the prior, of wide t distributions about a fit, and draws of the fit itself ---

#: How much wider than the fit t distributions are, and their degrees of freedom.
WIDER, _DF = (3.0, 10.0, 30.0), 3.0
#: Draws of the fit: those whose climbs say which mode is its own, and those among which large weights are looked for.
_N_OWN, _N_WEIGHED = 3, 128
#: Draws of the prior below which nothing follows from their spread.
_LEAST_PRIOR = 16
#: Coordinates along which log p is looked at, at most: those that most rows share that are not concave in them; seconds
#: that this may take, by estimate, and as many those climbs that say where humps lead.
_MOST_LINES, _SECONDS = 32, 1.0
#: Where: at steps of the fit's standard deviation, and at quantiles of the prior, within its outermost ones.
_NEAR, _N_AMONG, _OUTERMOST = np.geomspace(2.0, 200.0, 17), 33, 0.005
#: Dimensions up to which log p is climbed from humps, by steps of Newton's method; looks at log p for each point of a
#: line, about: three lines for each coordinate, and ways between their humps.
_MOST_CLIMBED, _PER_LINE = 100, 5
#: Correlation in draws of the prior, times their root, below which it is none.
_CORRELATED = 4.0
#: Coordinates at most given which log p is concave in all others, where profiles are enough; one of so many steps along
#: a line, there.
_FEW, _EACH = 3, 3


def points_for(
    density: ModelDensity, q: GaussianState, rng: np.random.Generator, n_climbs: int, n_looked: int, *, is_sound: bool
) -> tuple[list[Array], list[Array], Array, int]:
    """Return where to climb from, first from the fit, if it is sound.

    Points, with the standard deviations of what each was drawn from; draws of the prior among those that were looked
    at; and how many these were.

    Notes
    -----
    Of each set of draws the best of each part are taken, as the best of all may lie about one poor mode: those where
    log p is highest, and those where it is highest over what the fit explains. Of draws of the fit, those with the
    largest weights: where they are not in the tails of its own mode, they have hit another one.
    """
    theta, scales, n_seen = list[Array](), list[Array](), 0
    if is_sound:
        z = rng.standard_normal((_N_WEIGHED, q.n_dim))
        own = np.asarray(q.draws(z))
        with np.errstate(all="ignore"):
            ratio = _finite(density.logp(own) - q.log_density(own))
        n_heavy = max(n_climbs // 12, 1)
        theta += [q.mean()[None], own[: _N_OWN - 1], own[np.argsort(-ratio)[:n_heavy]]]
        n_seen = _N_WEIGHED
        scales += [np.broadcast_to(q.sd(), (_N_OWN + n_heavy, q.n_dim))]
    prior = _prior(density, n_looked // 2, seed_of(rng))
    sets = []
    if len(prior) >= _LEAST_PRIOR:
        between = np.ptp(np.quantile(prior, ndtr([-1.0, 1.0]), axis=0), axis=0)  # two standard deviations of a normal
        sets.append((prior, np.maximum(0.5 * between, linalg.TINY)))
    if is_sound:
        n = (n_looked - len(prior)) // len(WIDER)
        for width in WIDER:  # of t distributions about the fit
            z = rng.standard_normal((n, q.n_dim)) / np.sqrt(rng.chisquare(_DF, (n, 1)) / _DF)
            sets.append((np.asarray(q.draws(width * z)), width * q.sd()))
    for draws, sd in sets:
        n = max(n_climbs // 2 if draws is prior else (n_climbs - n_climbs // 2 * bool(len(prior))) // len(WIDER), 1)
        with np.errstate(all="ignore"):
            logp = _finite(density.logp(draws))
            unexplained = _finite(logp - q.log_density(draws)) if is_sound else logp
        parts = [part for part in np.array_split(np.arange(len(draws)), n) if len(part)]
        best = draws[[part[np.argmax((unexplained if i % 2 else logp)[part])] for i, part in enumerate(parts)]]
        theta.append(best)
        scales.append(np.broadcast_to(sd, best.shape))
        n_seen += len(draws)
    return theta, scales, prior, n_seen


def _prior(density: ModelDensity, n: int, seed: int) -> Array:
    draws = density.prior_draws(n, seed)
    return draws[np.isfinite(draws).all(axis=1)]


def humps(density: ModelDensity, q: GaussianState, prior: Array) -> Array:
    """Return the humps of log p on lines along what the prior has of one coordinate, the highest first.

    The others are as they are at the fit, or follow from there by the prior's regression on that coordinate, or those
    that do are where the regression has them: of a walk as a whole, the first moves another way where steps are
    coordinates than where values are, and the last leaves a fit that jumps to and fro.
    """
    n_rows = rows_not_concave(density)
    affordable = int(_SECONDS / (_PER_LINE * (2 * len(_NEAR) + _N_AMONG) * max(density.gradient_seconds, linalg.TINY)))
    which = np.argsort(-n_rows, kind="stable")[: min(affordable, _MOST_LINES)]
    which = which[n_rows[which] > 0.0]
    mean, steps, prior = q.mean(), *_steps_over(prior, q, which)
    middle, spread = prior.mean(axis=0), np.maximum(prior.std(axis=0), linalg.TINY)
    z = (prior - middle) / spread
    correlation = z[:, which].T @ z / len(z)
    correlation[np.abs(correlation) < _CORRELATED / np.sqrt(len(z))] = 0.0
    staying = np.zeros_like(correlation)
    staying[np.arange(len(which)), which] = 1.0
    following, has_followers = correlation * spread / spread[which, None], (correlation != 0.0).sum(axis=1) > 1
    through = np.where(correlation != 0.0, middle + (mean - middle)[which, None] * following, mean)
    origins = np.concatenate(
        [np.broadcast_to(mean, (len(which) + has_followers.sum(), q.n_dim)), through[has_followers]]
    )
    directions = np.concatenate([staying, following[has_followers], following[has_followers]])
    steps = np.concatenate([steps, steps[has_followers], steps[has_followers]])
    found, heights = [np.empty((0, q.n_dim))], [np.empty(0)]
    size = max(STREAMED // (steps.shape[1] * q.n_dim), 1)
    for i in range(0, len(steps), size):
        part = slice(i, i + size)
        theta = origins[part, None, :] + steps[part, :, None] * directions[part, None, :]
        with np.errstate(all="ignore"):
            logp = _finite(density.logp(theta.reshape(-1, q.n_dim))).reshape(theta.shape[:2])
        is_hump = _are_humps(logp)
        found.append(theta[is_hump])
        heights.append(logp[is_hump])
    return np.concatenate(found)[np.argsort(-np.concatenate(heights))]


def _steps_over(prior: Array, q: GaussianState, which: Indices, every: int = 1) -> tuple[Array, Array]:
    """Return distances from the mean of a fit, 0 among them, along some coordinates; and the prior, without its ends.

    Shape (n_coordinates, n_steps), ascending.
    """
    limits = np.quantile(prior, [_OUTERMOST, 1.0 - _OUTERMOST], axis=0)
    prior, ends = np.clip(prior, *limits), (limits - q.mean())[:, which, None]
    near = np.clip(q.sd()[which, None] * np.append(-_NEAR[::-every], _NEAR[::every]), *ends)
    among = np.quantile(prior[:, which], np.linspace(0.0, 1.0, _N_AMONG)[::every], axis=0).T - q.mean()[which, None]
    return np.sort(np.concatenate([near, among, np.zeros((len(which), 1))], axis=1), axis=1), prior


class _Given:
    """log p in coordinates whitened by a Gaussian, but for one coordinate, which comes last and has no slope.

    Where that moves and the others do not, these follow by the Gaussian's regression on it.
    """

    def __init__(self, density: ModelDensity, q: GaussianState, coordinate: int) -> None:
        self._density, self._q, self._at = density, q, coordinate
        unit = np.zeros((1, q.n_dim))
        unit[0, coordinate] = 1.0
        covariance = np.asarray(q.draws(q.whiten(unit)))[0] - q.mean()
        self._follow = covariance / covariance[coordinate]

    def points(self, z: Array) -> Array:
        """Return points of coordinates."""
        theta = np.asarray(self._q.draws(z[:, :-1]))
        return theta + (z[:, -1:] - theta[:, self._at, None]) * self._follow

    def logp_grad(self, z: Array, /) -> tuple[Array, Array]:
        """Evaluate log p and its gradient."""
        logp, grad = self._density.logp_grad(self.points(z))
        grad = grad.copy()
        grad[:, self._at] -= grad @ self._follow
        return logp, np.append(np.asarray(self._q.whiten(grad)), np.zeros((len(z), 1)), axis=1)


def profile_humps(density: ModelDensity, q: GaussianState, prior: Array, outside: Indices) -> Array:
    """Return the humps beyond a valley of log p as a function of each of a few coordinates, at its highest there."""
    steps, _ = _steps_over(prior, q, outside, _EACH)
    found = [np.empty((0, q.n_dim))]
    for coordinate, line in zip(outside.tolist(), steps, strict=True):
        along = _Given(density, q, coordinate)
        z = np.zeros((len(line), q.n_dim + 1))
        z[:, -1] = q.mean()[coordinate] + line
        with np.errstate(all="ignore"):
            z, logp = ascend(along, z, N_STEPS)
        at = int(np.argmin(np.abs(line)))
        lowest = np.append(np.minimum.accumulate(logp[at::-1])[::-1], np.minimum.accumulate(logp[at:])[1:])
        found.append(along.points(z[_are_humps(logp[None])[0] & (logp > lowest + VALLEY)]))
    return np.concatenate(found)


def _are_humps(logp: Array) -> Bools:
    """Tell where log p, along lines, is higher than beside; their ends lead to what the prior does not allow."""
    result = np.zeros(logp.shape, dtype=np.bool_)
    result[:, 1:-1] = (logp[:, 1:-1] > logp[:, :-2]) & (logp[:, 1:-1] >= logp[:, 2:])
    return result


def _finite(values: Array) -> Array:
    return np.where(np.isfinite(values), values, -np.inf)


# --- a search for other modes of log p after a fit, where it is not known to have one alone ---


#: Estimated seconds that all of it may take at least, and the part of the time that climbs get.
_LEAST_SECONDS, _OF_CLIMBS = 10.0, 0.25
#: Climbs, and points to begin from: at most; climbs at least.
_MOST_CLIMBS, _MOST_LOOKED, _FEWEST_CLIMBS = 48, 768, 6
#: Variance that a mode of next to no mass is to add, as a part.
_OF_VARIANCE = 0.02
#: Differences of log p, and of log masses, within which modes are equal; of ELBOs, too.
_SAME_LOGP, _SAME_MASS = 1e-2, 0.1
#: Fits from other places at most.
_MOST_FITS = 4


class FoundModes(NamedTuple):
    """What a search has found."""

    #: The one that the fit is at.
    home: Mode | None
    #: Others, the one with most mass first.
    modes: list[Mode]
    #: Draws of the prior, and points in all, that were looked at.
    n_prior: int
    n_looked: int
    #: That the time allows.
    n_fits: int
    #: That it took.
    n_gradients: int


@dataclass(frozen=True)
class ModeSearch:
    """A search for other modes."""

    density: ModelDensity
    #: Of the fit.
    seed: int
    #: Of the fit.
    estimator: str
    #: What gives curvatures.
    curvature: Curvature
    #: Estimated seconds that the whole call may take.
    max_seconds: float | None = None

    @classmethod
    def of(cls, problem: Problem, options: FitOptions, seed: int) -> "ModeSearch | None":
        """Return the search for a problem; None where log p has one mode, or is not known as a whole."""
        density = problem.density
        served = options.choice.step in ("adaptive", "linesearch") and problem.target is density
        if not served or density.has_minibatch or density.is_streamed or density.is_sharded:
            return None
        estimator = options.choice.estimator
        curvature: Curvature = "rows" if estimator == "quadrature" else "hessians"
        return cls(density, seed, estimator, curvature, options.max_seconds)

    @property
    def stream(self) -> int:
        """Seed of what it draws, apart from those of the fit."""
        return seed_of(np.random.default_rng([MODES, self.seed]))

    def after(
        self,
        q: GaussianState,
        elbo: float,
        n_gradients: int,
        n_hessians: int,
        *,
        is_sound: bool,
    ) -> FoundModes | None:
        """Look for modes away from a fit; what is evaluated counts with nothing else."""
        density = self.density
        if not isinstance(q, Gaussian) or not np.isfinite(elbo) or has_one_mode(density):
            return None
        each, n_dim = max(density.gradient_seconds, linalg.TINY), density.n_dim  # a constant takes nothing
        of_climb = N_STEPS * (n_dim + 1) if n_dim <= MOST_NEWTON else _N_ASCENT  # gradients, about
        of_fit = fit_seconds(density, n_gradients, n_hessians, self.estimator)
        seconds = max(_LEAST_SECONDS, of_fit)
        if self.max_seconds is not None:
            seconds = min(seconds, max(self.max_seconds - of_fit, 0.0))
        n_climbs = int(_OF_CLIMBS * seconds / (each * of_climb))
        if n_climbs < _FEWEST_CLIMBS:
            return None
        n_climbs = min(n_climbs, _MOST_CLIMBS)
        n_looked = min(int(0.5 * _OF_CLIMBS * seconds / each), _MOST_LOOKED)
        n_fits = int(np.clip((1.0 - _OF_CLIMBS) * seconds / max(of_fit, linalg.TINY), 1, _MOST_FITS))
        takes = (n_climbs * of_climb + n_looked) * each
        counted = density.n_gradients, density.n_hessians
        try:
            with task("Looking for other modes", seconds=takes):
                return self._found(q, elbo, n_climbs, n_looked, n_fits, is_sound=is_sound)
        finally:
            density.n_gradients, density.n_hessians = counted

    def _found(
        self, q: Gaussian, elbo: float, n_climbs: int, n_looked: int, n_fits: int, *, is_sound: bool
    ) -> FoundModes | None:
        """Return what climbs lead to; see `after`."""
        density, before = self.density, self.density.n_gradients
        # In few dimensions climbs cost little, and find peaks that are narrower than lines are fine.
        is_large = is_sound and density.n_dim > MOST_NEWTON
        if is_large and (outside := concave_given(density, _FEW)) is not None:
            prior = _prior(density, _N_WEIGHED, self.stream)
            if len(prior) >= _LEAST_PRIOR:
                places = profile_humps(density, q, prior, outside)
                modes = self._that_count(self._starts(q, elbo, places), q, elbo)
                return FoundModes(None, modes, len(prior), len(prior), n_fits, density.n_gradients - before)
        rng = np.random.default_rng(self.stream)
        points, scales, prior, n_seen = points_for(density, q, rng, n_climbs, n_looked, is_sound=is_sound)
        if not points:
            return None
        modes, home = modes_from(
            density, q, np.concatenate(points), np.concatenate(scales), has_home=is_sound, curvature=self.curvature
        )
        others = self._that_count([mode for mode in modes if mode is not home], q, elbo)
        if is_sound and len(prior) >= _LEAST_PRIOR:
            starts = self._starts(q, elbo, humps(density, q, prior))
            others = self._that_count([*others, *(at for at in starts if self._is_new(at, others))], q, elbo)
        return FoundModes(home, others, len(prior), n_seen, n_fits, density.n_gradients - before)

    def _starts(self, q: Gaussian, elbo: float, places: Array) -> list[Mode]:
        """Return humps on lines through a fit from which log p leads elsewhere than from the fit.

        A mode of log p, where it leads, may have next to no mass in a funnel: the fit moved to the hump says more.
        """
        density, points = self.density, np.concatenate([q.mean()[None], places])
        with np.errstate(all="ignore"):
            heights = _finite(density.logp(points))
            which = tops(density.logp, points, heights, _MOST_MODES, 0)
            points, ends, heights = points[which], points[which], heights[which]
            masses = elbo + np.minimum(heights - heights[0], 0.0)
            seconds = density.gradient_seconds * len(points) * N_STEPS * q.n_dim
            if len(points) > 1 and q.n_dim <= _MOST_CLIMBED and seconds < _SECONDS:
                ends, heights, _ = climbed(density, points, np.broadcast_to(q.sd(), points.shape))
                masses = elbo + np.minimum(heights - heights[0], 0.0)
        others = tops(density.logp, ends, heights, _MOST_MODES, 0)[1:]
        return [
            Mode(replace(q, location=points[i]), float(heights[i]), float(masses[i]), is_start=True) for i in others
        ]

    def _is_new(self, start: Mode, modes: list[Mode]) -> bool:
        """Tell whether none of some modes has its mass where a fit would begin."""
        return all(
            is_outside(self.density, mode.gaussian, mode.log_mass, start.gaussian, self.stream) for mode in modes
        )

    def _that_count(self, modes: list[Mode], q: GaussianState, elbo: float) -> list[Mode]:
        """Return the modes that are not the one that the fit is at, and may have mass enough, the largest first."""
        others = []
        for mode in modes:
            apart = mode.point - q.mean()
            squares = [apart @ of.precision_product(apart[None])[0] for of in (q, mode.gaussian)]
            is_near = max(squares) < far_from(q.n_dim) ** 2
            if not is_near and is_outside(self.density, q, elbo, mode.gaussian, self.stream):
                others.append(mode)
        others.sort(key=lambda mode: -mode.log_mass)
        best = others[0].log_mass if others and others[0].log_mass > elbo else elbo
        return [mode for mode in others if _counts(mode, q if best == elbo else others[0].gaussian, best)]


def _counts(mode: Mode, best: GaussianState, log_mass: float) -> bool:
    """Tell whether a mode may have mass enough beside the best one to matter, by itself or for its variance."""
    square = float(np.max((mode.point - best.mean()) ** 2 / best.sd() ** 2))
    return mode.log_mass > log_mass - _BELOW or mode.log_mass + np.log(max(square, 1.0)) > log_mass + np.log(
        _OF_VARIANCE
    )


def is_equal(mode: Mode, other: Mode) -> bool:
    """Tell whether a mode is as high, and as wide, as another one: its image under a symmetry, where there is one."""
    return abs(mode.logp - other.logp) < _SAME_LOGP and abs(mode.log_mass - other.log_mass) < _SAME_MASS


# --- fits from other modes: the best of all is kept, and it is noted which modes are left besides ---

#: Standard errors that another fit has to gain, at least.
_N_SE = 3.0
#: Part of the mass, times the square of the distance in standard deviations, from which on a mode is told of.
_LEAST_WEIGHT = 0.01
#: Nats within which a mode has so much of the mass that a fit is worth while.
_LARGE = 4.0


class Ended(NamedTuple):
    """Where a fit has ended, and how good that is."""

    state: LoopState
    elbo: Elbo
    gap: float

    @property
    def q(self) -> GaussianState:
        """The approximation."""
        return cast(GaussianState, self.state.rule.q)


def explored(
    search: ModeSearch,
    found: FoundModes,
    rule: Rule,
    family: Maker[VariationalState],
    first: Ended,
    fit_from: Callable[[VariationalState], Ended | None],
) -> tuple[Ended, str, tuple[OtherMode, ...]]:
    """Fit from the modes that were found.

    Returns
    -------
    tuple
        The best of all; why that is not the first fit, empty where it is; and the modes that are left besides.
    """
    ends, n_left = [first], found.n_fits
    images: list[tuple[VariationalState, int]] = []
    known: list[tuple[Mode, int]] = [] if found.home is None else [(found.home, 0)]
    left: list[VariationalState] = []
    largest = max([first.elbo.value, *(mode.log_mass for mode in found.modes)])
    for mode in found.modes:
        i = None if mode.is_start else next((i for other, i in known if is_equal(mode, other)), None)
        if i is not None:
            q: Any = ends[i].q
            about: Any = replace(q, location=mode.point)
            if n_left > 0 and about.n_dim > MOST_NEWTON:  # a mean may be far from the mode there
                n_left -= 1
                new = _fitted(search, rule, family, mode, fit_from)
                about = about if new is None or _among(search, ends, new.q) is not None else new.q
            images.append((about, i))
            continue
        i = _among(search, ends, mode.gaussian)
        # In many dimensions a mode of log p says little of the mass about it.
        is_small = mode.gaussian.n_dim <= MOST_NEWTON and mode.log_mass < largest - _LARGE
        if i is None and (n_left == 0 or is_small):
            left.append(mode.gaussian)
            continue
        if i is None:
            n_left -= 1
            new = _fitted(search, rule, family, mode, fit_from)
            i = None if new is None else _among(search, ends, new.q)
            if new is not None and i is None:
                i = len(ends)
                ends.append(new)
            elif new is not None and i is not None and is_better(new.elbo, ends[i].elbo):
                ends[i] = new
            if i is None or _among(search, ends, mode.gaussian) is None:
                home = mode if found.home is None else found.home
                points, heights = np.array([mode.point, home.point]), np.array([mode.logp, home.logp])
                if not mode.is_start and (home is mode or len(tops(search.density.logp, points, heights, 2)) > 1):
                    left.append(mode.gaussian)  # a fit does not stay there
                continue
        known.append((mode, i))
    best = 0
    for i, end in enumerate(ends):
        best = i if is_better(end.elbo, ends[best].elbo) else best
    of_prior = f"{found.n_prior:,} draws of the prior and " if found.n_prior else ""
    sentence = (
        f"A first fit ended at another mode. This one begins where the best of {of_prior}"
        f"{found.n_looked - found.n_prior:,} points about that fit led, and its ELBO is "
        f"{ends[best].elbo.value - first.elbo.value:,.1f} nats higher."
    )
    return ends[best], sentence * (ends[best] is not first), _shared(search, ends, best, left, images)


def is_better(new: Elbo, old: Elbo) -> bool:
    """Tell whether another fit has gained more than its error."""
    return bool(
        np.isfinite(new.value) and new.value - old.value > max(_SAME_MASS, _N_SE * float(np.hypot(new.se, old.se)))
    )


def _among(search: ModeSearch, ends: Sequence[Ended], other: VariationalState) -> int | None:
    """Return which of some ends has mass where another approximation is; None where none has."""
    covering = (
        i for i, end in enumerate(ends) if not is_outside(search.density, end.q, end.elbo.value, other, search.stream)
    )
    return next(covering, None)


def _fitted(
    search: ModeSearch,
    rule: Rule,
    family: Maker[VariationalState],
    mode: Mode,
    fit_from: Callable[[VariationalState], Ended | None],
) -> Ended | None:
    about = mode.gaussian
    try:
        state = choose_start(
            rule, family, about.mean(), [part * about.sd() for part in START_SCALES[:2]], search.density
        )
    except StartError:
        return None
    return fit_from(state)


def _shared(
    search: ModeSearch,
    ends: Sequence[Ended],
    best: int,
    left: Sequence[VariationalState],
    images: Sequence[tuple[VariationalState, int]],
) -> tuple[OtherMode, ...]:
    """Return all modes but the best with their shares; images of one have its own."""
    if len(ends) == 1 and not (left or images):
        return ()
    masses = shares(search.density, [*(end.q for end in ends), *left], search.stream)
    masses = masses / (1.0 + sum(float(masses[i]) for _, i in images))
    found = [OtherMode(end.q, float(masses[i])) for i, end in enumerate(ends) if i != best]
    found += [OtherMode(q, float(share)) for q, share in zip(left, masses[len(ends) :], strict=True)]
    found += [OtherMode(image, float(masses[i]), is_equal=i == best) for image, i in images]
    mean, sd = ends[best].q.mean(), ends[best].q.sd()
    weight = [mode.share * (1.0 + float(np.max((np.asarray(mode.q.mean()) - mean) ** 2 / sd**2))) for mode in found]
    counting = [mode for mode, w in zip(found, weight, strict=True) if w > _LEAST_WEIGHT]
    return tuple(sorted(counting, key=lambda mode: -mode.share))
