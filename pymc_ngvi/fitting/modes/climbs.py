"""Climbs of log p from many points at once, and the Gaussians about the modes that they end at."""

import math

from typing import Any, Literal, NamedTuple, cast

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core import linalg
from pymc_ngvi.core.climbs import ascend, tops
from pymc_ngvi.core.target import MeanHessian, Spread
from pymc_ngvi.core.types import Array, GaussianState
from pymc_ngvi.density import ModelDensity
from pymc_ngvi.families import FullState
from pymc_ngvi.mixtures.finite.trust_region import distinct, local_component
from pymc_ngvi.moves.basins import Climbs
from pymc_ngvi.moves.coordinates import ChainCoordinates

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
    for _ in range(N_STEPS):
        turning = active & turn
        direction[turning] = _newton_steps(density, x[turning], grad[turning], scale[turning])
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


def _newton_steps(density: ModelDensity, points: Array, grad: Array, scale: Array) -> Array:
    """Return a step for each point, (n_points, n_dim): along the gradient where there are no curvatures."""
    curvatures, _ = _curvatures(density, points, grad, scale)
    values, vectors = np.linalg.eigh(curvatures)
    slopes = np.einsum("nji,nj->ni", vectors, scale * grad)
    steps = np.einsum("nij,nj->ni", vectors, slopes / np.maximum(np.abs(values), _LEAST_CURVATURE))
    longest = _MOST_LENGTH * np.sqrt(points.shape[1])
    length = np.maximum(np.linalg.norm(steps, axis=1, keepdims=True), 1e-300)
    return scale * steps * np.minimum(1.0, longest / length)


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


def _curvatures(density: ModelDensity, points: Array, grad: Array, scales: Array) -> tuple[Array, NDArray[np.bool_]]:
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
#: A Gaussian about a mode is no wider than so many times a fit, and no narrower than a part of it.
_WIDEST, _NARROWEST = 100.0, 1e-6
#: Modes that are looked at, at most, the best ones.
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


def cost(n_dim: int) -> int:
    """Return the gradients that a climb takes, about."""
    return N_STEPS * (n_dim + 1) if n_dim <= MOST_NEWTON else _N_ASCENT


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
    is_small, by_rows = density.n_dim <= MOST_NEWTON, _CurvedByRows(density, q)
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
            curved: Any = by_rows if curvature == "rows" else density
            return local_component(curved, q, ends[i], (_WIDEST**-2, _NARROWEST**-2))

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


class _CurvedByRows:
    """A log density whose Hessians come from its rows, as expectations over these do, at one point at a time."""

    has_hessian = True

    def __init__(self, density: ModelDensity, q: GaussianState) -> None:
        self._density, self._q = density, q

    def mean_hessian(self, theta: Array) -> MeanHessian:
        """Return the Hessian at the only point."""
        [point] = theta
        found = self._density.by_rows.about(point, cast(Spread, self._q))
        return self._density.mean_hessian(theta) if found is None else found
