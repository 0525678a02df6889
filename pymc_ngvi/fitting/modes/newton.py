"""Climbs of log p in few dimensions, by Newton's method with curvatures from differences of gradients."""

from typing import cast

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core import linalg
from pymc_ngvi.core.types import Array, GaussianState
from pymc_ngvi.density import ModelDensity
from pymc_ngvi.families import FullState

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
