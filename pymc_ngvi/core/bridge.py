"""Ratios of integrals by bridge sampling [1]_: from weighted draws of two densities, and their log ratio at these.

The optimal bridge averages bounded functions, so that its error is known well [2]_, where draws of the one come near
those of the other; where they do not, few draws have all of a mean, which k-hat tells.

References
----------
.. [1] X.-L. Meng and W. H. Wong (1996). Simulating ratios of normalizing constants via a simple identity: a
   theoretical exploration. Statistica Sinica 6. https://www.jstor.org/stable/24306045
.. [2] Q. F. Gronau et al. (2017). A tutorial on bridge sampling. Journal of Mathematical Psychology 81.
   https://doi.org/10.1016/j.jmp.2017.09.005
"""

from typing import NamedTuple

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.linalg import logsumexp
from pymc_ngvi.core.psis import effective_size, smoothed
from pymc_ngvi.core.types import Array

#: Iterations for the optimum, and the change of the log ratio that ends them.
_MOST_ITERATIONS, _SAME = 1_000, 1e-9


class Estimate(NamedTuple):
    """The logarithm of a mean or of an integral, its standard error in nats, and the k-hat of what is averaged."""

    value: float
    se: float
    khat: float = -np.inf


def log_mean(
    log_values: Array, log_weights: Array, worth: float = 1.0, part: NDArray[np.intp] | None = None
) -> Estimate:
    """Return the log of a weighted mean; each draw is worth so many independent ones, or only parts are independent."""
    log_weights = log_weights - logsumexp(log_weights)
    value = logsumexp(log_weights + log_values)
    with np.errstate(over="ignore", invalid="ignore"):
        moved = np.exp(log_weights + log_values - value) - np.exp(log_weights)
        if part is not None:
            moved = np.bincount(np.unique(part, return_inverse=True)[1], moved)
            moved = moved * np.sqrt(len(moved) / (len(moved) - 1.0)) if len(moved) > 1 else np.full(1, np.inf)
    return Estimate(float(value), float(np.sqrt(moved @ moved / worth)), smoothed(log_weights + log_values)[1])


class Side(NamedTuple):
    """Draws of one of two densities."""

    #: Log of the first density over the second, neither of them normalised; shape (n_draws,).
    log_ratio: Array
    log_weights: Array
    #: Independent draws that each is worth.
    worth: float = 1.0

    @property
    def size(self) -> float:
        """How many independent draws of equal weight they are worth."""
        return self.worth * effective_size(self.log_weights)


def bridge(first: Side, second: Side) -> Estimate:
    """Return the logarithm of the integral of the first density over that of the second."""
    log_s, log_t = np.log([first.size, second.size]) - np.log(first.size + second.size)
    value, total = float(np.median(first.log_ratio)), logsumexp(first.log_weights) - logsumexp(second.log_weights)
    for _ in range(_MOST_ITERATIONS):
        at_first = -np.logaddexp(log_s + first.log_ratio, log_t + value)
        at_second = second.log_ratio - np.logaddexp(log_s + second.log_ratio, log_t + value)
        last, value = value, logsumexp(second.log_weights + at_second) - logsumexp(first.log_weights + at_first) + total
        if not abs(value - last) > _SAME:
            break
    ends = log_mean(at_first, *first[1:]), log_mean(at_second, *second[1:])
    return Estimate(float(value), float(np.hypot(ends[0].se, ends[1].se)), max(of.khat for of in ends))
