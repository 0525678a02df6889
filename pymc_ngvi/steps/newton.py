r"""Steps of Newton in the mean and the standard deviations of predictors, where each row has one.

A natural step assumes that expected derivatives of rows stay what they are. Where priors are so wide that the rows
alone say what q is, they do not: the wider q is, and the farther from where rows bend, the smaller is their curvature,
and natural steps of size 1 go round in circles. How they change is known: with l a row, m and v mean and variance of
its predictor,

    d E[l'] = E[l''] dm + 1/2 E[l'''] dv,    d E[l''] = E[l'''] dm + 1/2 E[l''''] dv.

Where rows are log-concave, the ELBO is concave in the mean and in a root of the covariance [1]_, not in the precision:
second derivatives are taken in m and the standard deviation, where these differ from those in v by the gradient.

The precision of q is that of what is quadratic, and x x^T times its *site* for each row. A step moves the mean and the
sites; those that fall do so exponentially, so that they stay positive.

References
----------
.. [1] E. Challis and D. Barber (2013). Gaussian Kullback-Leibler approximate inference. JMLR 14.
   https://jmlr.org/papers/v14/challis13a.html
"""

from dataclasses import dataclass, replace

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core import linalg
from pymc_ngvi.core.types import Array, Bends, BentRowsTarget, GaussianState, Moments

#: Rows with bends, at most, and for each coordinate.
_MOST_ROWS, _PER_DIM = 4_000, 8
#: Relative residual at which the equations count as solved, and iterations, at most.
_RESIDUAL, _MOST_ITERATIONS = 1e-4, 60
#: Standard deviations of a predictor that its mean may move at first.
_FARTHEST = 8.0
#: Exponents of a site that falls, at least.
_LOWEST = -50.0


@dataclass(frozen=True, eq=False)
class Newton:
    """A step of Newton from a Gaussian.

    Parameters
    ----------
    q : GaussianState
        With a dense covariance.
    moments : Moments
        Whitened by it.
    rows : ndarray of int, shape (n,)
        That are not quadratic.
    whitened : ndarray, shape (n, n_dim)
        Directions of their predictors.
    sites : ndarray, shape (n_rows,)
        Of all rows.
    excess : ndarray, shape (n_rows,)
        Expected curvature of rows less their sites.
    grad : ndarray, shape (n_dim,)
        Whitened step of the mean.
    change : ndarray, shape (n,)
        Of sites.
    slope : float
        Rise of the ELBO with the step size, nats.
    farthest : float
        Standard deviations by which the mean of a predictor moves.
    """

    q: GaussianState
    moments: Moments
    rows: NDArray[np.intp]
    whitened: Array
    sites: Array
    excess: Array
    grad: Array
    change: Array
    slope: float
    farthest: float

    @property
    def first(self) -> float:
        """Step size to try first."""
        return _FARTHEST / max(self.farthest, _FARTHEST)

    def sites_after(self, rho: float) -> Array:
        """Return the sites after a step of a size."""
        result = self.sites + rho * self.excess
        result[self.rows] = self._moved(rho)
        return result

    def propose(self, rho: float) -> GaussianState | None:
        """Return the state after a step of a size, or None where that is none."""
        beyond = self._moved(rho) - self.sites[self.rows] - rho * self.excess[self.rows]
        matrix = self.q.add_to_diagonal(rho * self.moments.curvature, 1.0 - rho)
        matrix += self.whitened.T @ (beyond[:, None] * self.whitened)
        scaled = self.q.precision_scaled_by(linalg.symmetrise(matrix), self.grad)
        if scaled is None:
            return None
        return replace(scaled[0], location=self.q.location + rho * self.q.unwhiten(self.grad))

    def _moved(self, rho: float) -> Array:
        """Return the sites of rows that are not quadratic: of those that are log-concave, none falls below 0."""
        sites, change = self.sites[self.rows], rho * self.change
        falls = (change < 0.0) & (sites > 0.0) & (sites + self.excess[self.rows] > 0.0)
        part = np.divide(change, sites, out=np.zeros_like(sites), where=falls)
        return np.where(falls, sites * np.exp(np.maximum(part, _LOWEST)), sites + change)


def newton(
    target: BentRowsTarget, q: GaussianState, moments: Moments, bends: Bends | None, sites: Array | None
) -> Newton | None:
    """Return the step of Newton from a Gaussian.

    Parameters
    ----------
    target : BentRowsTarget
    q : GaussianState
    moments : Moments
        Whitened by it.
    bends : Bends or None
    sites : ndarray, shape (n_rows,), or None
        None where they are not known.

    Returns
    -------
    Newton or None
        None where rows have several predictors or are too many, where the covariance is not dense, and where no rise
        of the ELBO is in sight.
    """
    if bends is None or not _may_serve(q, bends) or moments.curvature.shape != (q.n_dim, q.n_dim):
        return None
    rows = np.flatnonzero(bends.is_bent)
    root = linalg.cholesky(moments.curvature)
    if root is None:
        return None
    sites = -bends.second if sites is None else sites
    excess = -bends.second - sites
    equations = _Equations(q.whiten(target.directions(rows)), moments, root, bends, rows, excess[rows])
    solved = equations.solved()
    if solved is None:
        return None
    grad, beyond, slope = solved
    change = excess[rows] + beyond
    if not (slope > 0.0 and linalg.all_finite(grad, change)):
        return None
    farthest = float(np.max(np.abs(equations.whitened @ grad) / np.sqrt(equations.variance)))
    return Newton(q, moments, rows, equations.whitened, sites, excess, grad, change, slope, farthest)


def _may_serve(q: GaussianState, bends: Bends) -> bool:
    """Tell whether rows have one predictor each, and those that are not quadratic are few enough."""
    if not q.exact_metric:
        return False
    return 0 < int(np.count_nonzero(bends.is_bent)) <= min(_MOST_ROWS, _PER_DIM * q.n_dim)


class _Equations:
    """Linear equations for the changes z of the expected curvatures of rows, all else eliminated.

    With b the whitened directions and W the squares of the entries of b b^T, variances change by dv = -(W z + what the
    natural step takes), and z = -(third dm + 1/2 fourth dv), where dm is that of the gradient after dv. In the inner
    product of W these equations are symmetric, and positive definite where rows are log-concave.
    """

    def __init__(
        self, whitened: Array, moments: Moments, root: Array, bends: Bends, rows: NDArray[np.intp], excess: Array
    ) -> None:
        self.whitened, self._root, self._moments = whitened, root, moments
        products = whitened @ whitened.T
        self._squares, self.variance = products * products, np.diagonal(products)
        error = moments.curvature - np.eye(len(root))
        self._error_square = float(np.sum(error * error))
        self._natural = np.einsum("ij,ij->i", whitened @ error, whitened)
        self._third, self._fourth = bends.third[rows], bends.fourth[rows] - excess / self.variance

    def solved(self) -> tuple[Array, Array, float] | None:
        """Return the whitened step of the mean, z, and the slope of the ELBO; None where there is no top."""
        plain = self._mean_step(self._moments.grad)
        right = self._quadratic(self._natural) - self._third * (self.whitened @ plain)
        z = self._conjugate_gradients(right)
        if z is None:
            return None
        dv = -(self._natural + self._squares @ z)
        grad = plain + 0.5 * self._mean_step((self._third * dv) @ self.whitened)
        slope = float(self._moments.grad @ grad) + 0.5 * (self._error_square + float(z @ self._natural))
        return grad, z, slope

    def _mean_step(self, grad: Array) -> Array:
        """Return the inverse of the whitened curvature times a vector."""
        return linalg.solve_lower(self._root, linalg.solve_lower(self._root, grad), transpose=True)

    def _quadratic(self, x: Array) -> Array:
        """Return what z changes by where variances fall by x, the mean following."""
        mean = self._mean_step((self._third * x) @ self.whitened)
        return 0.5 * (self._third * (self.whitened @ mean) + self._fourth * x)

    def _conjugate_gradients(self, right: Array) -> Array | None:
        """Solve for z; None where the equations are not positive definite."""
        z, left, left_w = np.zeros_like(right), right, self._squares @ right
        along, along_w = left, left_w
        square = first = float(left @ left_w)
        for _ in range(_MOST_ITERATIONS):
            if not square > _RESIDUAL**2 * first:
                break
            image = along - self._quadratic(along_w)
            curvature = float(along_w @ image)
            if not curvature > 0.0:
                return None
            size = square / curvature
            z = z + size * along
            left = left - size * image
            left_w = self._squares @ left
            before, square = square, float(left @ left_w)
            along, along_w = left + square / before * along, left_w + square / before * along_w
        return z
