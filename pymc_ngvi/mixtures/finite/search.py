"""Where components may begin: at modes of log p found from dispersed points, and where q has too little mass."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.climbs import ascend
from pymc_ngvi.core.linalg import logsumexp
from pymc_ngvi.core.types import Array, Density, GaussianState
from pymc_ngvi.families.mixture import MixtureState

#: Points that ascend log p together.
_N_POINTS = 128
#: Scales of the starting points, in those of the start, which count as this at least.
_SCALES, _LEAST_SCALE = (1.0, 0.5), 1.0
#: A component starts no wider than so many scales of the start, and no narrower than a part of them.
_WIDEST, _NARROWEST = 10.0, 1e-6
#: Mahalanobis distance per root dimension below which two ends of an ascent count as one mode.
_SAME = 0.5
#: Log of the part of all mass that a mode needs to be worth a component.
_LEAST_LOG_MASS = -12.0
#: Draws among which the place of a new component is looked for, and how much wider than q they are.
_N_CANDIDATES, _INFLATIONS = 512, (1.0, 1.5, 3.0)
#: Smallest and largest relative precision of a new component, in the coordinates of the one it begins beside.
_LEAST_TIGHT, _MOST_TIGHT = 1.0, 1e4
#: Multiples of the least precision to add, one after the other, until a curvature is positive definite.
_RAISED = 0.1 * 10.0 ** np.arange(6)
#: Weight at which a new component starts.
_FEW, _MANY = 0.02, 0.5


def modes(
    density: Density, around: GaussianState, extra: Array, rng: np.random.Generator, n_most: int
) -> tuple[list[GaussianState], Array]:
    """Look for modes of log p from dispersed points, and make a component of each."""
    # A start that was shrunk, so that a single Gaussian has a good one, is no place to look around from.
    around = around.with_scale(around.location, np.maximum(around.sd(), _LEAST_SCALE))
    normals = rng.standard_normal((len(_SCALES), _N_POINTS, density.n_dim))
    points = [around.draws(scale * z) for scale, z in zip(_SCALES, normals, strict=True)]
    ends, logp = ascend(density, np.concatenate([points[0], extra, *points[1:]]))
    found, _ = distinct(ends, logp, lambda i: local_component(density, around, ends[i]), 4 * n_most + 8)
    log_mass = np.array([float(logp[i] - about.log_density(ends[i][None])[0]) for i, about in found])
    order = np.argsort(-log_mass)[:n_most]
    order = order[log_mass[order] > log_mass.max(initial=-np.inf) + _LEAST_LOG_MASS]
    return [found[i][1] for i in order], log_mass[order]


def distinct(
    ends: Array, logp: Array, make: Callable[[int], GaussianState | None], most: int
) -> tuple[list[tuple[int, GaussianState]], NDArray[np.intp]]:
    """Return the ends that no higher one is near, with Gaussians about them, and which of them each end is."""
    found, which = list[tuple[int, GaussianState]](), np.full(len(ends), -1)
    for i in np.argsort(-logp)[: np.isfinite(logp).sum()]:
        known = next((k for k, (_, about) in enumerate(found) if is_at(about, ends[i])), -1)
        if known < 0 and len(found) < most and (about := make(int(i))) is not None:
            known = len(found)
            found.append((int(i), about))
        which[i] = known
    return found, which


def is_at(component: GaussianState, point: Array) -> bool:
    """Tell whether a point is near the mean of a component, in its own units."""
    apart = (point - component.location)[None]
    square = float(apart[0] @ component.precision_product(apart)[0])
    return bool(square < _SAME**2 * component.n_dim)


def local_component(
    density: Density, like: GaussianState, point: Array, tightness: tuple[float, float] | None = None
) -> GaussianState | None:
    """Return a Gaussian about a point with the curvature of log p there, kept within limits."""
    least, most = tightness or (_WIDEST**-2, _NARROWEST**-2)
    here = _moved_to(like, point)
    if not density.has_hessian:
        return here
    curvature = density.mean_hessian(point[None]).whitened(here)
    nowhere = np.zeros(len(point))
    scaled = here.precision_scaled_by_function(curvature, lambda a: np.clip(a, least, most), nowhere)
    if scaled is None:  # a form that eigenvalues do not keep: as much of the identity as it takes
        raised = (here.add_to_diagonal(curvature, by) for by in least * _RAISED)
        scaled = next(filter(None, (here.precision_scaled_by(matrix, nowhere) for matrix in raised)), None)
    return None if scaled is None else scaled[0]


def _moved_to(state: GaussianState, point: Array) -> GaussianState:
    return replace(state, location=np.array(point, dtype=np.float64))


def addition(
    density: Density, q: MixtureState, rng: np.random.Generator, tried: list[Array], log_evidence: float
) -> MixtureState | None:
    """Return q with one more component, where p has most mass that q lacks."""
    thetas, parents = _candidates(q, rng)
    logp = density.logp_grad(thetas)[0]
    log_ratio = logp - q.log_density(thetas) - log_evidence
    # log (p - q), in units of the mass that a component like the parent has: what it could gain.
    size = np.array([-float(c.log_density(c.location[None])[0]) for c in q.components])[parents]
    with np.errstate(all="ignore"):
        excess = np.where(log_ratio > 0.0, logp + np.log1p(-np.exp(-log_ratio)) + size, -np.inf)
    excess[~np.isfinite(excess)] = -np.inf
    for row in np.argsort(-excess)[:64]:
        if excess[row] == -np.inf:
            return None
        parent = q.components[parents[row]]
        if any(is_at(_moved_to(parent, place), thetas[row]) for place in tried):
            continue
        tried.append(thetas[row])
        component = local_component(density, parent, thetas[row], (_LEAST_TIGHT, _MOST_TIGHT))
        if component is not None:
            log_mass = float(logp[row]) - float(component.log_density(thetas[row][None])[0]) - log_evidence
            share = np.clip(np.exp(min(log_mass, 0.0)), _FEW, _MANY)
            return q.joined(component, float(np.log(share)))
    return None


def _candidates(q: MixtureState, rng: np.random.Generator) -> tuple[Array, NDArray[np.intp]]:
    """Return draws of q and of wider versions of it, with the component of each."""
    thetas, parents = [], []
    for inflation in _INFLATIONS:
        chosen = rng.choice(q.n_components, size=_N_CANDIDATES, p=np.exp(q.log_weights - logsumexp(q.log_weights)))
        z = inflation * rng.standard_normal((_N_CANDIDATES, q.n_dim))
        for c in np.unique(chosen):
            rows = chosen == c
            thetas.append(q.components[c].draws(z[rows]))
            parents.append(np.full(rows.sum(), c))
    return np.concatenate(thetas), np.concatenate(parents)
