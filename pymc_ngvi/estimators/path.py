"""What the estimators from gradients alone share: whitened path gradients times base draws."""

from collections.abc import Callable

import numpy as np

from pymc_ngvi.core.types import Array, BaseDraws, Evaluation, GaussianState, Moments, Outer, PathMoments
from pymc_ngvi.estimators.summary import moments_at_draws


def from_gradients(
    order: Callable[[Array, Array], Outer],
    state: GaussianState,
    base: BaseDraws,
    evaluation: Evaluation,
    *,
    stl: bool,
) -> Moments:
    """Estimate the curvature from products of whitened gradients and base draws.

    Without sticking the landing, the gradient is that of log p alone, and the identity is added exactly.
    """
    keep = evaluation.finite
    grad, z = (evaluation.grad, base.z) if keep.all() else (evaluation.grad[keep], base.z[keep])
    whitened = state.whiten(grad)
    if stl:
        whitened = whitened + z
    outer = order(whitened, z)._replace(diagonal=0.0 if stl else 1.0)
    if base.n_replicates == 1:
        return PathMoments(state, whitened.mean(axis=0), outer)
    label = np.repeat(np.arange(base.n_replicates), base.n_draws // base.n_replicates)[keep]
    parts = [label == r for r in range(base.n_replicates) if np.any(label == r)]
    grads = np.array([whitened[part].mean(axis=0) for part in parts])
    outers = [order(whitened[part], z[part])._replace(diagonal=outer.diagonal) for part in parts]
    curvatures = np.array([state.add_to_diagonal(-state.outer_mean(o), 1.0) for o in outers])
    return moments_at_draws(state, grads, curvatures)
