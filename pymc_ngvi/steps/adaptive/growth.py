"""Standard deviations that grow without end: a sign of an improper posterior.

Where log p has no curvature in some direction, natural steps double the variance there, for ever: the ELBO gains the
logarithm of the scale each time. A proper posterior that is wide is reached in a few steps, because its curvature,
however small, is seen; then the standard deviation stays.
"""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array, VariationalState

#: Iterations between two looks, and looks that are kept.
SPAN, _N_LOOKS = 20, 3
#: Growth that tells: from each look to the next, over those that are kept, and since the start; the latter also for a
#: fit that found no optimum.
_PER_SPAN, _LATELY, _IN_ALL, _IN_ALL_ENDED = 2.0, 100.0, 1e6, 1e3
#: The first three where the ELBO is exact: what grows there does not grow by chance, but may grow slowly.
_EXACT = 1.1, 1.3, 1e4


@stored("adaptive.growth")
@dataclass(frozen=True)
class Growth:
    """Standard deviations of q at the start and at the last looks."""

    #: Iterations so far.
    n: int = 0
    #: At the start; shape (n_dim,), or None.
    first: Array | None = None
    #: After every twentieth iteration, the last three of them; shape (n_dim,).
    looks: tuple[Array, ...] = ()
    #: Whether the fit is one without noise.
    exact: bool = False

    def after(self, q: VariationalState) -> Self:
        """Return what is known after one more iteration, which led to ``q``."""
        n = self.n + 1
        if self.first is not None and n % SPAN:
            return replace(self, n=n)
        sd = q.sd()
        first = sd if self.first is None else self.first
        return replace(self, n=n, first=first, looks=(*self.looks, sd)[-_N_LOOKS:])

    def coordinates(self) -> NDArray[np.intp]:
        """Return the coordinates whose standard deviations keep growing, those that grew most first."""
        grown = self._grown()
        return np.argsort(-grown)[: np.count_nonzero(grown)]

    @property
    def is_unbounded(self) -> bool:
        """Whether some standard deviation has grown by orders of magnitude, and goes on."""
        return bool(np.any(self._grown() >= self._least[2]))

    @property
    def seems_unbounded(self) -> bool:
        """As `is_unbounded`, of a fit that found no optimum."""
        return bool(np.any(self._grown() >= _IN_ALL_ENDED))

    def _grown(self) -> Array:
        """Return the growth of each standard deviation since the start; 0 where it does not go on."""
        if self.first is None or len(self.looks) < _N_LOOKS:
            return np.zeros(0)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            looks = np.array(self.looks)
            goes_on = (looks[1:] / looks[:-1]).min(axis=0) >= self._least[0]
            goes_on &= looks[-1] / looks[0] >= self._least[1]
            return np.where(goes_on, looks[-1] / self.first, 0.0)

    @property
    def _least(self) -> tuple[float, float, float]:
        """Growth from each look to the next, over those that are kept, and in all, that tells."""
        return _EXACT if self.exact else (_PER_SPAN, _LATELY, _IN_ALL)
