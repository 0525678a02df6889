"""Squared distances of draws from their conditional Gaussian: of exact draws, chi-squares."""

from dataclasses import dataclass

import numpy as np

from scipy.stats import chi2

from pymc_ngvi.core.types import Array
from pymc_ngvi.results.diagnosis.moves import Moved
from pymc_ngvi.results.posterior import Distribution

#: How far mean and median may be off, in standard deviations of a chi-square: half of one, which moves E[log p] by half
#: of its own; and in standard errors.
_MUCH, _CERTAIN = 0.5, 5.0
#: Standard error of a median beside that of a mean.
_OF_MEDIAN = 1.2533


@dataclass(frozen=True)
class Distances:
    """Squared Mahalanobis distances of draws, each from the conditional Gaussian given its own hyperparameters.

    Parameters
    ----------
    what : str
        Which draws: ``draws``, or ``draws that are moved towards the posterior``.
    squares : ndarray, shape (n_draws,)
    n_local : int
        Coordinates that are conditioned: the mean of the squares.
    """

    what: str
    squares: Array
    n_local: int

    @property
    def mean(self) -> float:
        """Their mean."""
        return float(np.mean(self.squares))

    @property
    def median(self) -> float:
        """Their median."""
        return float(np.median(self.squares))

    @property
    def expected_median(self) -> float:
        """The median that is right."""
        return float(chi2.median(self.n_local))

    @property
    def are_off(self) -> bool:
        """Whether mean or median is off by more than counts, and more than by chance."""
        sd, error = np.sqrt(2.0 * self.n_local), _CERTAIN / np.sqrt(len(self.squares))
        return bool(
            abs(self.mean - self.n_local) > sd * max(_MUCH, error)
            or abs(self.median - self.expected_median) > sd * max(_MUCH, _OF_MEDIAN * error)
        )


def distances_of(q: Distribution, moved: Moved) -> list[Distances]:
    """Return those of draws before and after they are moved; empty where there is no conditional Gaussian."""
    result = []
    for what, theta in (("draws", moved.start), ("draws that are moved towards the posterior", moved.end)):
        found = q.conditional_distance(theta)
        if found is not None and len(found.squares):
            result.append(Distances(what, found.squares, found.n_local))
    return result
