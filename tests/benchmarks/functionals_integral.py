"""The local level of ``functionals.py`` exactly: Gaussian given both scales, which are summed over a lattice."""

import numpy as np

from functionals_references import LIMITS, Summary
from functionals_series import FIRST_SD
from measure import Array
from scipy.linalg import cho_factor, cho_solve
from scipy.special import ndtr

#: Ends of the lattice of log scales, and its points in each direction.
_ENDS, _N = (-12.0, 1.7), 138
#: What has less of the largest weight is left out.
_LEAST = 1e-9


def local_level(y: Array) -> Summary:
    """Return what is known of the model's functionals and coordinates, in their order."""
    log_scales, spacing = np.linspace(*_ENDS, _N, retstep=True)
    pairs = np.array([(s, e) for s in log_scales for e in log_scales])
    log_joint = np.array([_given(y, *np.exp(pair))[0] for pair in pairs])
    log_joint += (pairs - 0.5 * np.exp(2.0 * pairs)).sum(axis=1)  # half-normal priors, on the log scale
    weights = np.exp(log_joint - log_joint.max())
    pairs, weights = pairs[weights > _LEAST], weights[weights > _LEAST]
    found = [_moments(y, *np.exp(pair)) for pair in pairs]
    mean, var = (np.array([part[i] for part in found]) for i in range(2))
    n = len(y)
    start = 2 * n  # coordinates come after eta, average and steps
    mean = np.insert(mean, [start, start], pairs, axis=1)
    # Between points the density is taken as constant.
    var = np.insert(var, [start, start], spacing**2 / 12.0, axis=1)
    names = [*(f"eta[{i}]" for i in range(n)), "average", *(f"steps[{i}]" for i in range(n - 1))]
    coordinates = ["s_log__", "e_log__", "first", *(f"z[{i}]" for i in range(n))]
    return mixture(weights / weights.sum(), mean, var, [*names, *coordinates], start)


def mixture(weights: Array, mean: Array, var: Array, names: list[str], n_functionals: int) -> Summary:
    """Summarise mixtures of normals: weights (m,), means and variances (m, k)."""
    middle = weights @ mean
    apart = mean - middle
    second = weights @ (apart**2 + var)
    fourth = weights @ (apart**4 + 6.0 * apart**2 * var + 3.0 * var**2)
    sd, exact = np.sqrt(second), np.full(len(names), np.inf)
    ends = [_quantiles(level, weights, mean, np.sqrt(var), middle, sd) for level in LIMITS]
    is_functional = np.arange(len(names)) < n_functionals
    return Summary(names, is_functional, middle, sd, *ends, fourth / second**2, exact, exact)


def _quantiles(level: float, weights: Array, mean: Array, sd: Array, centre: Array, reach: Array) -> Array:
    """Return a quantile of each mixture, by bisection: it is within five standard deviations of the mean."""
    low, high = centre - 5.0 * reach, centre + 5.0 * reach
    for _ in range(40):
        middle = 0.5 * (low + high)
        is_below = weights @ ndtr((middle - mean) / sd) < level
        low, high = np.where(is_below, middle, low), np.where(is_below, high, middle)
    return 0.5 * (low + high)


def _given(y: Array, s: float, e: float) -> tuple[float, Array, Array, tuple[Array, bool]]:
    """Return log p(y) given the scales, the design, the prior variances, and the factor of the covariance of y."""
    n = len(y)
    design = np.column_stack([np.ones(n), s * np.tril(np.ones((n, n)))])
    variances = np.concatenate([[FIRST_SD**2], np.ones(n)])
    factor = cho_factor((design * variances) @ design.T + e**2 * np.eye(n), lower=True)
    log_det = 2.0 * np.log(np.diag(factor[0])).sum()
    return -0.5 * (y @ cho_solve(factor, y) + log_det), design, variances, factor


def _moments(y: Array, s: float, e: float) -> tuple[Array, Array]:
    """Return means and variances of functionals, and of the first value and steps, given the scales."""
    _, design, variances, factor = _given(y, s, e)
    gain = cho_solve(factor, design * variances).T
    x, covariance = gain @ y, np.diag(variances) - gain @ (design * variances)
    parts = np.vstack([design, design.mean(axis=0), np.diff(design, axis=0), np.eye(len(x))])
    return parts @ x, np.maximum(np.einsum("ij,jk,ik->i", parts, covariance, parts), 1e-14)
