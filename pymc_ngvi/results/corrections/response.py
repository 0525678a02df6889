r"""Linear response: covariances of the posterior from a q that leaves correlations out [1]_.

For q = N(m, C C^T) with independent blocks, the ELBO on fixed draws z_b is a function of m and C,

    L(m, C) = mean_b log p(m + C z_b) + sum_i log C_ii.

Tilt the target by t^T theta: at the optimum the mean moves by dm/dt, and were q exact this would be the posterior
covariance. With H the Hessian of L, dm/dt is the block of (-H)^-1 that belongs to m. The whole posterior curvature is
in H, whatever q leaves out, so that dm/dt has the correlations, too.

Coordinates are whitened, m + C u and C (I + E) with E lower triangular in each block. With r_b = u + E z_b and
y_b = -C^T (hess log p)(C r_b) at draw b, -H maps (u, E) to (mean y_b, tril(mean y_b z_b^T) + diag(E)). For a
log-concave p this is positive definite.

References
----------
.. [1] Giordano, Broderick, Jordan (2018). Covariances, robustness, and variational Bayes. JMLR 19(51).
   https://doi.org/10.48550/arXiv.1709.02536
"""

from collections.abc import Callable

import numpy as np

from numpy.typing import NDArray
from scipy.sparse.linalg import LinearOperator, cg

from pymc_ngvi.core.linalg import all_finite, symmetrise
from pymc_ngvi.core.types import Array
from pymc_ngvi.density import ModelDensity
from pymc_ngvi.families import BlockState, DiagonalState
from pymc_ngvi.families.matrices.structure import Structure

#: Numbers in the Hessians at all draws that are held, at most: 128 MiB.
_HELD = 2**24
#: Products that one solve takes, about.
_USUAL_PRODUCTS = 15
#: Step of differences of gradients, in standard deviations of q.
_STEP = 1e-3
_MOST_ITERATIONS = 1_000

_WHY = "The linear response does not exist here"
_CURE = (
    "Fit with a smaller tol or more n_draws, pass more draws to linear_response, or take a family with correlations "
    "(family='full', 'sparse')."
)

#: Hessian of log p at each draw times a direction of its own, (n_draws, n_dim).
Products = Callable[[Array], Array]


class ElboHessian:
    """Minus the Hessian of the ELBO on fixed draws, in whitened coordinates of mean and factor.

    Parameters
    ----------
    q : DiagonalState or BlockState
    z : ndarray, shape (n_draws, n_dim)
        Base draws, closed under z -> -z: mean and factor are then apart wherever the third derivatives vanish.
    products : callable
        Of the Hessians at the draws of ``z``, with one direction each.
    """

    def __init__(self, q: DiagonalState | BlockState, z: Array, products: Products) -> None:
        self._q = q
        self._structure: Structure = q.structure
        self._products = products
        self._z = z
        self._diagonal = self._structure.on_diagonal(q.factor)
        self.n_products = 0

    @property
    def size(self) -> int:
        """Length of the vectors (u, E): the blocks of E are packed with their upper triangles, which stay 0."""
        return self._q.n_dim + self._q.factor.size

    def __call__(self, vector: Array) -> Array:
        """Multiply with a vector (u, E); raise ValueError where the curvature along it is not positive."""
        n_dim, structure = self._q.n_dim, self._structure
        vector = vector.ravel()
        moved = structure.times(vector[n_dim:], self._z)
        turned = -self._q.whiten(self._products(self._q.unwhiten(vector[:n_dim] + moved)))
        self.n_products += len(self._z)
        of_factor = structure.lower(structure.outer(turned, self._z))
        of_factor[self._diagonal] += vector[n_dim:][self._diagonal]  # of the entropy
        result = np.concatenate([turned.mean(axis=0), of_factor])
        curvature = vector @ result
        if not curvature > 0.0 and vector.any():
            what = "is not finite" if not np.isfinite(curvature) else "is not negative definite"
            raise ValueError(f"{_WHY}: the Hessian of the ELBO {what}, so that q is not at an optimum. {_CURE}")
        return result

    def preconditioner(self) -> LinearOperator:
        """Return the inverse of what this is at the optimum for a target whose coordinates are independent."""
        scale = np.ones(self.size)
        scale[self._q.n_dim :][self._diagonal] = 0.5
        return LinearOperator((self.size, self.size), matvec=lambda v: scale * v.ravel(), dtype=np.float64)

    def responses(self, tilts: Array, tol: float) -> Array:
        """Return how the mean moves when log p is tilted by ``t^T theta``.

        Parameters
        ----------
        tilts : ndarray, shape (n_tilts, n_dim)
        tol : float
            Relative residual of each solve.

        Returns
        -------
        ndarray, shape (n_tilts, n_dim)
            The covariance of linear response times each tilt.

        Raises
        ------
        ValueError
            Where the Hessian is not negative definite, or nearly singular.
        """
        operator = LinearOperator((self.size, self.size), matvec=self, dtype=np.float64)
        rows = np.zeros((len(tilts), self.size))
        rows[:, : self._q.n_dim] = self._q.whiten(tilts)
        found = np.empty_like(tilts)
        for i, row in enumerate(rows):
            solution, left = cg(operator, row, rtol=tol, maxiter=_MOST_ITERATIONS, M=self.preconditioner())
            if left:
                raise ValueError(
                    f"{_WHY}: the Hessian of the ELBO is nearly singular ({_MOST_ITERATIONS:,} steps of conjugate "
                    f"gradients did not reach a relative residual of {tol:g}). {_CURE}"
                )
            found[i] = solution[: self._q.n_dim]
        return self._q.unwhiten(found)


def products_at(target: ModelDensity, theta: Array, sd: Array, n_tilts: int) -> Products:
    """Return what multiplies the Hessian at each draw with a direction of its own.

    The Hessians themselves are evaluated where they fit in memory and take less than the solves would. Otherwise each
    product is a central difference of gradients, for all draws at once; its relative error is about 1e-7.

    Parameters
    ----------
    target : ModelDensity
    theta : ndarray, shape (n_draws, n_dim)
        Draws of q.
    sd : ndarray, shape (n_dim,)
        Of q: the scale of the steps.
    n_tilts : int
        Systems that will be solved.

    Raises
    ------
    ValueError
        Where gradients are not finite at a draw.
    """
    n_draws, n_dim = theta.shape
    held = n_draws * n_dim**2 <= _HELD and n_dim <= 2 * _USUAL_PRODUCTS * n_tilts and target.has_hessian
    log_p, grad = target.logp_grad(theta)
    found: Array = target.hessian(theta) if held else grad
    if not all_finite(log_p, grad, found):
        raise ValueError(
            f"{_WHY}: log p or its derivatives are not finite at some of {n_draws:,} draws of q. Give the variables "
            "their support by a prior or a transform."
        )
    return (lambda directions: (found @ directions[:, :, None])[:, :, 0]) if held else _differences(target, theta, sd)


def _differences(target: ModelDensity, theta: Array, sd: Array) -> Products:
    def products(directions: Array) -> Array:
        # Each draw goes a step of the same length, in standard deviations of q, whatever its direction.
        length = np.max(np.abs(directions) / sd, axis=1, keepdims=True)
        step = _STEP * directions / np.where(length > 0.0, length, 1.0)
        _, grad = target.logp_grad(np.concatenate([theta + step, theta - step]))
        difference: Array = (grad[: len(theta)] - grad[len(theta) :]) * (length / (2.0 * _STEP))
        return difference

    return products


def covariance(hessian: ElboHessian, jacobian: Array, tol: float) -> Array:
    """Return the covariance of linear functions of theta.

    Parameters
    ----------
    hessian : ElboHessian
    jacobian : ndarray, shape (n_functions, n_dim)
    tol : float

    Returns
    -------
    ndarray, shape (n_functions, n_functions)
    """
    used = needed_coordinates(jacobian)
    if len(used) < len(jacobian):  # many functions of few coordinates
        axes = np.zeros((len(used), jacobian.shape[1]))
        axes[np.arange(len(used)), used] = 1.0
        part = jacobian[:, used]
        result = part @ symmetrise(hessian.responses(axes, tol)[:, used]) @ part.T
    else:
        result = hessian.responses(jacobian, tol) @ jacobian.T
    return symmetrise(result)


def n_solves(jacobian: Array) -> int:
    """Return how many systems `covariance` solves."""
    return min(len(needed_coordinates(jacobian)), len(jacobian))


def needed_coordinates(jacobian: Array) -> NDArray[np.intp]:
    """Return the coordinates that any of the functions depends on."""
    return np.flatnonzero(jacobian.any(axis=0))
