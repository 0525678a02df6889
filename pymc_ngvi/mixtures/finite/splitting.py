"""Components in two halves, where one misses the shape of log p, and two in one, where they overlap."""

from dataclasses import replace

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.types import Array, GaussianState, Outer
from pymc_ngvi.families.mixture import MixtureState
from pymc_ngvi.mixtures.finite.evaluation import MixtureEvaluation

#: Distance of the halves from where the whole was, in its own standard deviations: mean and covariance of the two
#: together are those of the whole.
_APART = 0.6
#: Mean responsibility of one component for the draws of another, from which the two may be one.
_OVERLAP = 0.1


def split(q: MixtureState, evaluation: MixtureEvaluation, rank: int = 0) -> MixtureState | None:
    """Return a mixture with one component in two halves, along the direction in which it errs most.

    Parameters
    ----------
    q : MixtureState
    evaluation : MixtureEvaluation
        At its draws.
    rank : int, default 0
        0 for the component that errs most: by its weight times the variance of log p - log q; 1 for the next, ...

    Returns
    -------
    MixtureState or None
        None where there is no such component.
    """
    spread = q.weights * np.array(
        [np.var(r[np.isfinite(r)]) if np.isfinite(r).any() else 0.0 for r in evaluation.ratios]
    )
    if rank >= q.n_components or not spread.any():
        return None
    c = int(np.argsort(-spread)[rank])
    whole, ratios = q.components[c], evaluation.ratios[c]
    direction = _direction(evaluation.base.z, ratios, _together(whole))
    tighter = 1.0 / (1.0 - _APART**2) - 1.0
    matrix = tighter * whole.outer_mean(Outer(direction[None], direction[None], 0.0))
    scaled = whole.precision_scaled_by(whole.add_to_diagonal(matrix, 1.0), np.zeros(q.n_dim))
    if scaled is None:
        return None
    step = whole.unwhiten(_APART * direction)
    halves = [replace(scaled[0], location=whole.location + sign * step) for sign in (1.0, -1.0)]
    log_half = q.log_weights[c] - np.log(2.0)
    log_weights = np.append(q.log_weights, log_half)
    log_weights[c] = log_half
    return MixtureState.of([*q.with_component(c, halves[0]).components, halves[1]], log_weights)


def join_overlapping(q: MixtureState, evaluation: MixtureEvaluation) -> MixtureState | None:
    """Return a mixture in which the two components that overlap most are one, of the same mean and covariance.

    None where no component has part in the draws of another, or where the two would make a singular one.
    """
    shares = np.array([q.responsibilities(part.theta).mean(axis=0) for part in evaluation.parts])
    np.fill_diagonal(shares, 0.0)
    c, k = np.unravel_index(np.argmax(shares), shares.shape)
    if shares[c, k] < _OVERLAP:
        return None
    both = np.logaddexp(q.log_weights[c], q.log_weights[k])
    try:
        one = q.components[k].merged(q.components[c], float(np.exp(q.log_weights[c] - both)))
    except np.linalg.LinAlgError:
        return None
    log_weights = q.log_weights.copy()
    log_weights[k] = both
    joined = MixtureState(log_weights, q.with_component(int(k), one).components)
    return joined.without(np.arange(q.n_components) == c)


def _together(state: GaussianState) -> NDArray[np.intp]:
    """Return the coordinates whose whitened curvature a state stores whole: in these a direction may be any."""
    if not state.exact_metric:
        return np.empty(0, dtype=np.intp)
    return np.arange(state.n_dim) if state.globals_ is None else state.globals_


def _direction(z: Array, ratios: Array, together: NDArray[np.intp]) -> Array:
    """Return the whitened direction in which log p - log q is farthest from its mean, (n_dim,): an axis, or of some."""
    keep = np.isfinite(ratios)
    error = (ratios[keep] - ratios[keep].mean()) ** 2
    weighted = z[keep] * (error / max(error.sum(), 1e-300))[:, None]
    direction = np.zeros(z.shape[1])
    if len(together):
        direction[together] = np.linalg.eigh(weighted[:, together].T @ z[np.ix_(keep, together)])[1][:, -1]
    else:
        direction[np.argmax(np.sum(weighted * z[keep], axis=0))] = 1.0
    return direction
