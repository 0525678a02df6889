"""The values that travel between the parts; `types` has their conventions."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from numpy.typing import NDArray
from scipy import sparse

from pymc_ngvi.core.elbo import Elbo
from pymc_ngvi.core.status import Status
from pymc_ngvi.core.stored import stored

Array = NDArray[np.float64]
#: Of any type.
AnyArray = NDArray[Any]
#: Of two axes.
Matrix = AnyArray | sparse.sparray


@stored("moments.outer")
class Outer(NamedTuple):
    """A curvature error as a mean of outer products: cheaper than a matrix where they are few.

    In the lower triangle, I - A is ``diagonal`` times the identity plus the mean of ``left_b right_b^T``.
    """

    #: shape (n_outer, n_dim).
    left: Array
    right: Array
    diagonal: float


@stored("draws.base")
@dataclass(frozen=True)
class BaseDraws:
    """Standard normals in independent randomised replicates, each closed under z -> -z where antithetic."""

    #: Replicate after replicate; shape (n_draws, n_dim).
    z: Array
    #: Divides n_draws.
    n_replicates: int
    #: Each replicate is a half and its negative; otherwise all draws are independent.
    antithetic: bool = True

    @property
    def n_draws(self) -> int:
        """Number of draws, all replicates together."""
        return len(self.z)

    def replicates(self) -> list[slice]:
        """Return the rows of each replicate."""
        size = self.n_draws // self.n_replicates
        return [slice(r * size, (r + 1) * size) for r in range(self.n_replicates)]

    def pairs(self) -> NDArray[np.intp]:
        """Return the rows of each pair z, -z: (n_draws / 2, 2); of each draw alone, (n_draws, 1), if not antithetic."""
        if not self.antithetic:
            return np.arange(self.n_draws)[:, None]
        half = self.n_draws // self.n_replicates // 2
        first = np.concatenate([np.arange(rows.start, rows.start + half) for rows in self.replicates()])
        return np.stack([first, first + half], axis=1)


@stored("draws.evaluation")
@dataclass(frozen=True)
class Evaluation:
    """log p and its gradient at the draws of one state."""

    #: shape (n_draws, n_dim).
    theta: Array
    #: shape (n_draws,).
    logp: Array
    #: shape (n_draws, n_dim).
    grad: Array
    #: Draws at which both are finite; the others take no part in any mean; shape (n_draws,).
    finite: NDArray[np.bool_]
    #: Mean of log p over the finite draws plus the entropy; -inf where no draw is finite.
    elbo: float

    @property
    def n_dropped(self) -> int:
        """Draws at which log p or its gradient is not finite."""
        return int((~self.finite).sum())

    @property
    def lost(self) -> float:
        """Part of the draws that they are."""
        return float(np.mean(~self.finite))


@stored("draws.assessment")
class Assessment(NamedTuple):
    """A state on draws that had no part in reaching it."""

    #: shape (n_draws, n_dim).
    theta: Array
    #: shape (n_draws,).
    logp: Array
    #: Rows that depend on each other: those of an antithetic pair, or those evaluated on one minibatch; shape
    #: (n_units, ...).
    units: NDArray[np.intp]
    #: Nats of ELBO still to be gained, at least 0; NaN where unknown.
    gap: float
    #: Standard deviation of its error.
    gap_sd: float
    #: What a fit that seems to have converged is in truth.
    against: Status | None = None
    #: The gap is known to be within the tolerance: a fit that has not converged by its own account has.
    certified: bool = False
    #: Where it is known without draws.
    elbo: Elbo | None = None


@stored("moments.parameters")
class Parameters(NamedTuple):
    """A direction, or any other quantity, in the coordinates of mean and factor."""

    #: shape (n_dim,).
    location: Array
    #: In the form of the family's factor.
    factor: Array
