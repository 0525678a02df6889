"""The protocols that the parts fulfil, and the names of the values that travel between them.

Conventions, stated once. ``theta`` is the flat unconstrained vector, (n_dim,). ``log p`` is the unnormalised log
density of the model there, Jacobian terms included. ELBO = E_q[log p - log q], to be maximised; a loss is -ELBO.
A state is *whitened* by a matrix C with covariance C C^T: the whitened gradient is C^T E_q[grad log p], the whitened
curvature A = -C^T E_q[hess log p] C. At the optimum they are 0 and the identity.
"""

from collections.abc import Sequence
from typing import Protocol

from pymc_ngvi.core.moments import Moments, PathMoments
from pymc_ngvi.core.states import ComponentState, GaussianState, VariationalState
from pymc_ngvi.core.target import GaussNewtonTarget, MatrixHessian, MeanHessian, Target, Whitener
from pymc_ngvi.core.values import Array, Assessment, BaseDraws, Evaluation, Outer, Parameters

__all__ = [
    "Array",
    "Assessment",
    "BaseDraws",
    "ComponentState",
    "Direction",
    "Estimator",
    "Evaluation",
    "GaussNewtonTarget",
    "GaussianState",
    "MatrixHessian",
    "MeanHessian",
    "Moments",
    "Outer",
    "Parameters",
    "PathMoments",
    "Target",
    "Update",
    "VariationalState",
    "Whitener",
]


class Estimator(Protocol):
    """Evaluates states, and estimates their moments. An estimator knows how expectations under q are taken."""

    @property
    def uses_hessians(self) -> bool:
        """Whether moments take second derivatives of log p."""
        ...

    def evaluate(self, target: Target, state: VariationalState, base: BaseDraws) -> Evaluation:
        """Return log p, its gradient and the ELBO of a state."""
        ...

    def evaluate_each(self, target: Target, states: Sequence[VariationalState], base: BaseDraws) -> list[Evaluation]:
        """Return those of several states, all from the same base draws."""
        ...

    def moments(
        self, target: Target, state: GaussianState, base: BaseDraws, evaluation: Evaluation, *, stl: bool = True
    ) -> Moments:
        """Return the whitened moments of a `GaussianState`.

        Parameters
        ----------
        target : Target
        state : GaussianState
        base : BaseDraws
            The draws of ``evaluation``; the scatter between its replicates gives the Monte Carlo errors.
        evaluation : Evaluation
            Of ``state``; draws that are not finite are left out.
        stl : bool, default True
            Sticking the landing, the path derivative: gradients are those of log p - log q, which have no noise at
            q = p. Of log p alone otherwise.
        """
        ...


class Update(Protocol):
    """A parametrisation, and the map from a state to the next one."""

    def __call__(self, state: GaussianState, moments: Moments, step_size: float, correct: bool) -> GaussianState | None:
        """Return the proposed state.

        Parameters
        ----------
        state : GaussianState
            Not modified.
        moments : Moments
            Whitened by ``state``.
        step_size : float
        correct : bool
            Where the step would lose positive definiteness, and the update knows of a correction: apply it.

        Returns
        -------
        GaussianState or None
            None where no valid state results.
        """
        ...


class Direction(Protocol):
    """Gradient, or natural gradient, of the ELBO in the coordinates of mean and factor: for rules that move these."""

    def __call__(self, state: GaussianState, moments: Moments) -> Parameters:
        """Return the direction at a state."""
        ...
