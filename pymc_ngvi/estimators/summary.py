"""Moments from independent replicates, with the Monte Carlo error that their scatter shows."""

from collections.abc import Callable

import numpy as np

from pymc_ngvi.core.types import Array, BaseDraws, Evaluation, GaussianState, Moments

#: Numbers in the replicates of the natural gradient, beyond which only their summaries are kept.
_MAX_KEPT = 16_000_000


def by_replicate(
    curvatures: Callable[[list[Array]], list[Array]],
    state: GaussianState,
    base: BaseDraws,
    evaluation: Evaluation,
    *,
    stl: bool,
) -> Moments:
    """Estimate the gradient by its mean over draws, the curvature by a function of the draws of each replicate."""
    grads, draws = [], []
    for rows in base.replicates():
        keep = evaluation.finite[rows]
        if not keep.any():
            continue
        whitened = state.whiten(evaluation.grad[rows][keep])
        if stl:
            whitened = whitened + base.z[rows][keep]
        grads.append(whitened.mean(axis=0))
        draws.append(evaluation.theta[rows][keep])
    return moments_at_draws(state, np.array(grads), np.array(curvatures(draws)))


def moments_at_draws(state: GaussianState, grads: Array, curvatures: Array) -> Moments:
    """Combine independent replicates of whitened gradient and curvature."""
    n_replicates = len(grads)
    grad, curvature = grads.mean(axis=0), curvatures.mean(axis=0)
    errors = np.array([state.flat(state.curvature_error(c)) for c in curvatures])
    u = np.concatenate([grads, errors / np.sqrt(2.0)], axis=1)
    gap, floor, floor_sd = gap_of(u)
    grad_se = curvature_se = np.full(len(grad), np.inf)
    if n_replicates > 1:
        diagonals = np.array([state.curvature_diagonal(c) for c in curvatures])
        grad_se = grads.std(axis=0, ddof=1) / np.sqrt(n_replicates)
        curvature_se = diagonals.std(axis=0, ddof=1) / np.sqrt(n_replicates)
    return Moments(
        grad=grad,
        curvature=curvature,
        grad_se=grad_se,
        curvature_se=curvature_se,
        gap=gap,
        floor=floor,
        floor_sd=floor_sd,
        replicates=u if u.size <= _MAX_KEPT else None,
    )


def gap_of(u: Array) -> tuple[float, float, float]:
    """Return gap, floor and the standard deviation of their difference from replicates of the natural gradient."""
    n_replicates, mean_u = len(u), u.mean(axis=0)
    gap = 0.5 * float(mean_u @ mean_u)
    if n_replicates == 1:
        return gap, np.inf, np.inf
    return gap, 0.5 * float(np.sum((u - mean_u) ** 2)) / (n_replicates * (n_replicates - 1)), _corrected_gap_sd(u)


def _corrected_gap_sd(u: Array) -> float:
    """Return the standard deviation of the corrected gap at the optimum, where the mean of u is 0.

    The corrected gap is sum_{r != s} u_r.u_s / (2 R (R-1)), with variance tr(Cov(u)^2) / (2 R (R-1)), and
    (u_r.u_s)^2 has mean tr(Cov(u)^2). Not centred: centring would add (tr Cov(u) / R)^2.
    """
    n = len(u)
    products = u @ u.T
    np.fill_diagonal(products, 0.0)
    trace_square = float(np.sum(products * products)) / (n * (n - 1))
    return float(np.sqrt(trace_square / (2.0 * n * (n - 1))))
