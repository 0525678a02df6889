"""Whitened expectations under a state; `types` has the conventions."""

import functools

from dataclasses import dataclass

import numpy as np

from pymc_ngvi.core.linalg import all_finite
from pymc_ngvi.core.states import GaussianState
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.values import Array, Outer


@stored("moments")
@dataclass(frozen=True)
class Moments:
    """Whitened expectations under one state, with their Monte Carlo error.

    Parameters
    ----------
    grad : ndarray, shape (n_dim,)
        C^T E_q[grad log p].
    curvature : ndarray
        A, in the form of the family: (n_dim, n_dim) dense, (n_dim,) diagonal.
    grad_se, curvature_se : ndarray, shape (n_dim,)
        Monte Carlo standard errors of the gradient and of the diagonal of A.
    gap : float
        Nats of ELBO still to be gained, uncorrected: 1/2 |grad|^2 + 1/4 |A - I|^2.
    floor : float
        What ``gap`` would be on average, by Monte Carlo noise alone, at the optimum.
    floor_sd : float
        Standard deviation of ``gap - floor`` there.
    replicates : ndarray, shape (n_replicates, n_params), or None
        Natural gradient of each replicate, kept by families for which it is a few vectors.
    """

    grad: Array
    curvature: Array
    grad_se: Array
    curvature_se: Array
    gap: float
    floor: float
    floor_sd: float
    replicates: Array | None = None

    def is_finite(self) -> bool:
        """Tell whether gradient and curvature are."""
        return all_finite(self.grad, self.curvature)

    def error(self, state: GaussianState) -> Array | Outer:
        """Return I - A, as outer products where it is a mean of few."""
        return -state.curvature_error(self.curvature)

    def error_diagonal(self, state: GaussianState) -> Array:
        """Return the diagonal of I - A, (n_dim,)."""
        return 1.0 - state.curvature_diagonal(self.curvature)


class PathMoments(Moments):
    """Whitened expectations from gradients alone, without errors: the curvature is formed only where it is asked for.

    Parameters
    ----------
    state : GaussianState
    grad : ndarray, shape (n_dim,)
    outer : Outer
        I - A.
    """

    def __init__(self, state: GaussianState, grad: Array, outer: Outer) -> None:
        unknown = np.full(len(grad), np.inf)
        values = {"grad": grad, "grad_se": unknown, "curvature_se": unknown, "replicates": None}
        self.__dict__.update(values, gap=np.nan, floor=np.inf, floor_sd=np.inf, outer=outer, _state=state)

    outer: Outer
    _state: GaussianState

    @functools.cached_property
    def curvature(self) -> Array:
        """A, in the form of the family."""
        return self._state.add_to_diagonal(-self._state.outer_mean(self.outer), 1.0)

    def is_finite(self) -> bool:
        """Tell whether gradient and outer products are."""
        return all_finite(self.grad, self.outer.left, self.outer.right)

    def error(self, state: GaussianState) -> Array | Outer:
        """Return I - A as outer products."""
        return self.outer

    def error_diagonal(self, state: GaussianState) -> Array:
        """Return the diagonal of I - A, (n_dim,)."""
        return state.outer_diagonal(self.outer)
