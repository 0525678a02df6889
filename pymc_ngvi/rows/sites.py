"""Sites: Gaussian stand-ins of rows, what is left of q without one, and the predictive density of that row then.

About the mean m of its predictors under q, the site of a row f is the Gaussian factor with the natural parameters

    E[grad f] - E[hess f] m   and   -E[hess f],

where natural-gradient steps leave a Gaussian q that fits: q is the prior times all sites [1]_. Without its site, q is a
cavity.

References
----------
.. [1] M. E. Khan and W. Lin (2017). Conjugate-computation variational inference: converting variational inference in
   non-conjugate models to inferences in conjugate models. AISTATS. https://doi.org/10.48550/arXiv.1703.04265
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.types import Array
from pymc_ngvi.rows.expectation import RowFunction, Taken

#: Error that each expectation may have, in nats of a row or relative.
_TOLERANCE = 1e-9
#: Rows whose rules are chosen at a time: of fewer, finer ones may be tried.
_AT_A_TIME = 2**12
#: Part of the precision of q, in any direction, that has to be left for a cavity.
_LEAST_LEFT = 1e-9


@dataclass(frozen=True, eq=False)
class RowSites:
    """Sites of rows of one kind, and their cavities."""

    #: Of the predictors under q; shape (n_rows, k), (n_rows, k, k).
    mean: Array
    cov: Array
    #: E[grad f], E[hess f]; shape (n_rows, k), (n_rows, k, k).
    grad: Array
    hessian: Array
    #: Whether q lets all predictors vary by themselves: else derivatives in them may be many things; shape (n_rows,).
    are_free: NDArray[np.bool_]
    #: The part of the precision of q that is the site's, in the direction in which it is largest; shape (n_rows,).
    influence: Array
    #: NaN where the site is more precise than q; shape (n_rows, k), (n_rows, k, k).
    cavity_mean: Array
    cavity_cov: Array
    #: log E[exp(f)] under the cavity; NaN where there is none; shape (n_rows,).
    log_predictive: Array
    #: By which this may be wrong, as far as finer rules of quadrature tell; shape (n_rows,).
    error: Array


# Densities overflow far from the mode; what is not finite is NaN in the end.
@np.errstate(all="ignore")
def row_sites(rows: RowFunction, mean: Array, cov: Array) -> RowSites:
    """Return sites and cavities of rows of one kind."""
    own = _expected(rows, mean, cov)
    (grad, hessian), root, value = own.derivatives(), own.root, own.values
    across = root.swapaxes(1, 2)
    are_free = (root.diagonal(axis1=1, axis2=2) > 0.0) | (cov.diagonal(axis1=1, axis2=2) == 0.0)
    left = np.eye(rows.k) + across @ hessian @ root
    usable = np.isfinite(left).all(axis=(1, 2)) & np.isfinite(grad).all(axis=1)
    left[~usable] = np.eye(rows.k)
    influence = np.where(usable, 1.0 - np.linalg.eigvalsh(left)[:, 0], np.nan)
    usable &= influence < 1.0 - _LEAST_LEFT
    left[~usable] = np.eye(rows.k)
    whitened = (across @ grad[..., None])[..., 0]
    moved = np.linalg.solve(left, whitened[..., None])[..., 0]
    cavity_cov = root @ np.linalg.solve(left, across)
    cavity_mean = mean - (root @ moved[..., None])[..., 0]
    normaliser = 0.5 * np.linalg.slogdet(left)[1] - 0.5 * np.einsum("ra,ra->r", whitened, moved)
    k, n = rows.k, len(mean)
    numbers = np.concatenate([mean, grad, hessian.reshape(n, k * k), value[:, None]], axis=1)

    def over_site(*inputs: Array) -> Sequence[Array]:
        """Return exp(f - shift) / site, (n_points, n_rows), from predictors, data, and the numbers of the sites."""
        own = inputs[len(inputs) - len(numbers.T) :]
        mean, grad, hessian, shift = own[:k], own[k : 2 * k], own[2 * k : -1], own[-1]
        [value] = rows.function(*inputs[: len(inputs) - len(own)])
        apart = [x - m for x, m in zip(inputs[:k], mean, strict=True)]
        exponent = value - shift
        for a in range(k):
            exponent = exponent - apart[a] * (grad[a] + 0.5 * sum(hessian[a * k + b] * apart[b] for b in range(k)))
        return [np.exp(exponent)]

    tilted = RowFunction(
        over_site,
        rows.index,
        [*rows.data, *numbers.T[:, None]],
        np.ones((k, k), dtype=np.bool_),
        n_shared=rows.n_shared,
    )
    ratio = _expected(tilted, mean, cov)
    log_predictive = np.log(ratio.values) + value + normaliser
    for result in (cavity_mean, cavity_cov, log_predictive):
        result[~usable] = np.nan
    return RowSites(
        mean,
        cov,
        grad,
        hessian,
        are_free.all(axis=1),
        influence,
        cavity_mean,
        cavity_cov,
        log_predictive,
        own.errors + ratio.errors / ratio.values,
    )


def _expected(rows: RowFunction, mean: Array, cov: Array) -> Taken:
    result = Taken(rows, mean, cov, None)
    result.choose(_TOLERANCE, _AT_A_TIME)
    return result


def site_moments(rows: RowFunction, mean: Array, cov: Array) -> tuple[Array, Array]:
    """Return mean and variance, (n_rows,) each, of a function of predictors; NaN where these are."""
    first, second = np.full(len(mean), np.nan), np.full(len(mean), np.nan)
    at = np.flatnonzero(np.isfinite(mean).all(axis=1))
    if not len(at):
        return first, second
    some = rows.some(at, rows.index[at])
    first[at] = _expected(some, mean[at], cov[at]).values

    def square(*inputs: Array) -> Sequence[Array]:
        """Return the square of the function's distance from its mean, which comes last among the data."""
        [value] = some.function(*inputs[:-1])
        return [(value - inputs[-1]) ** 2]

    squared = replace(some, function=square, data=[*some.data, first[at][None]])
    second[at] = _expected(squared, mean[at], cov[at]).values
    return first, second
