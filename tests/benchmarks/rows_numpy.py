"""A logistic regression written out in NumPy: what the general machinery of rows is measured against.

Natural steps of the best Gaussian with exact expectations of one dimension each, and a line search on the ELBO.
"""

from typing import NamedTuple

import numpy as np

from measure import Array
from numpy.polynomial.hermite_e import hermegauss
from rows_models import Design
from scipy.linalg import cho_solve, solve_triangular
from scipy.linalg.blas import dsyrk

#: Nodes, where predictors have standard deviations below this; a trapezoidal rule beyond it.
_N_NODES, _NARROW = 12, 0.5
#: Rows at a time: what is made of them stays in the cache.
_AT_A_TIME = 8_192
#: Times that a step is halved.
_MOST_HALVED = 30


class Solution(NamedTuple):
    """The best Gaussian, its ELBO, and the evaluations that it took."""

    mean: Array
    root: Array
    elbo: float
    n_evaluations: int


class _At(NamedTuple):
    """An evaluation: ELBO, mean and factor of the precision, gradient and weights of all rows."""

    elbo: float
    mean: Array
    root: Array
    grad: Array
    precision: Array


def fit(design: Design, tol: float = 1e-3) -> Solution:
    """Return the best Gaussian posterior of a logistic regression.

    Parameters
    ----------
    design : Design
    tol : float
        Nats that a step may gain at the end.
    """
    d, prior = design.x.shape[1], design.prior_sd**-2
    quarter = 0.25 * dsyrk(1.0, design.x.T, lower=1)  # the bound of the Hessian
    quarter[np.diag_indices(d)] += prior
    now = _evaluate(design, np.zeros(d), np.linalg.cholesky(np.tril(quarter) + np.tril(quarter, -1).T))
    n_evaluations, size = 1, 1.0
    precision = now.root @ now.root.T
    while True:
        for _ in range(_MOST_HALVED):
            new_precision = (1.0 - size) * precision + size * now.precision
            root = np.linalg.cholesky(new_precision)
            new = _evaluate(design, now.mean + size * cho_solve((root, True), now.grad), root)
            n_evaluations += 1
            if new.elbo >= now.elbo - 1e-9:
                break
            size *= 0.5
        gain, now, precision, size = new.elbo - now.elbo, new, new_precision, min(1.0, 2.0 * size)
        if gain < tol:
            return Solution(now.mean, now.root, now.elbo, n_evaluations)


def _evaluate(design: Design, mean: Array, root: Array) -> _At:
    """Return ELBO, gradient and expected precision of N(mean, (root root^T)^-1)."""
    x, y, prior = design.x, design.y, design.prior_sd**-2
    d = len(mean)
    inverse = solve_triangular(root, np.eye(d), lower=True)
    value, grad, precision = 0.0, np.zeros(d), np.zeros((d, d))
    for start in range(0, len(x), _AT_A_TIME):
        part = x[start : start + _AT_A_TIME]
        whitened = part @ inverse.T
        sd = np.sqrt(np.einsum("ij,ij->i", whitened, whitened))
        f, slope, bend = _expected(part @ mean, sd, y[start : start + _AT_A_TIME])
        value += f
        grad += slope @ part
        np.multiply(part, np.sqrt(bend)[:, None], out=whitened)
        precision += dsyrk(1.0, whitened.T, lower=1)
    precision += np.tril(precision, -1).T
    precision[np.diag_indices(d)] += prior
    divergence = prior * (mean @ mean + np.sum(inverse**2)) - d - d * np.log(prior)
    value -= 0.5 * divergence + np.log(np.diag(root)).sum()
    return _At(value, mean, root, grad - prior * mean, precision)


def _expected(mean: Array, sd: Array, y: Array) -> tuple[float, Array, Array]:
    """Return the sum of E log p, and E of its derivative and of minus the second one, of each row."""
    nodes, weights = _rule(float(sd.max()))
    value, slope, bend = 0.0, y.copy(), np.zeros_like(mean)
    value += float(y @ mean)
    for z, w in zip(nodes, weights, strict=True):
        eta = mean + z * sd
        near = np.exp(-np.abs(eta))
        value -= w * float(np.sum(np.maximum(eta, 0.0) + np.log1p(near)))
        near_1 = 1.0 / (1.0 + near)
        slope -= w * np.where(eta > 0.0, near_1, near * near_1)
        near *= near_1
        near *= near_1
        bend += w * near
    return value, slope, bend


def _rule(widest: float) -> tuple[Array, Array]:
    if widest <= _NARROW:
        nodes, weights = hermegauss(_N_NODES)
        return nodes, weights / weights.sum()
    spacing = min(0.5, 1.0 / widest)
    nodes = np.arange(-8.5, 8.5 + spacing, spacing)
    weights = np.exp(-0.5 * nodes**2)
    return nodes, weights / weights.sum()
