"""How many nats a converged fit may have left: the one meaning of ``tol``."""

from dataclasses import dataclass

import numpy as np

from pymc_ngvi.core.types import FittedState

#: At the default tolerance: nats per dimension that a converged fit may lack (a root-mean-square error of .03 sd in
#: the mean), and the nats below which nothing is asked.
_PER_DIM, _LEAST = 1e-2, 1e-1
#: Part of the nats that no q of the family can gain, which a converged fit may lack.
_UNREACHABLE = 0.03
#: Part of the tolerance that counts where the metric is not exact: gaps are underestimated there.
_INEXACT = 0.3


@dataclass(frozen=True)
class Tolerance:
    """Nats of ELBO that a converged fit may still lack, with every step rule.

    In fewer than 100 dimensions they are less, in proportion to the dimension down to a tenth, unless the posterior is
    far from every q of the family; for a q that tells group effects from global parameters, which are judged one by
    one, the proportion goes on above 100.
    """

    #: Of a fit in 100 dimensions.
    tol: float

    def most(self, q: FittedState) -> float:
        """Return the tolerance however far the posterior is from Gaussian."""
        # Among group effects, errors that are small in each add up; elsewhere nothing tells them from global ones.
        return self.tol * (1.0 if q.globals_ is None else max(1.0, _PER_DIM * float(q.n_dim)))

    def least(self, q: FittedState) -> float:
        """Return the tolerance where the posterior is near-Gaussian."""
        return min(self.tol * max(_PER_DIM * float(q.n_dim), _LEAST), self.most(q))

    def at(self, q: FittedState, spread: float, *, exact: bool = True) -> float:
        """Return the tolerance for a state.

        Where the posterior is far from it, half the variance of log p - log q under q tells how many nats the best q of
        the family lacks; to find that q to within a small part of them is enough.
        """
        nats = float(np.clip(_UNREACHABLE * (0.5 * spread), self.least(q), self.most(q)))
        return nats if exact else _INEXACT * nats
