"""Weighted means and standard deviations with their Monte Carlo errors, from sums that draws are added to."""

from dataclasses import dataclass

import numpy as np

from pymc_ngvi.core.types import Array

#: Powers of the values that are summed: those of a squared variance.
_N_POWERS = 5


@dataclass(frozen=True, eq=False)
class Moment:
    """A mean, or a standard deviation, with and without weights; all arrays have the shape of one draw.

    Parameters
    ----------
    corrected, se : ndarray
        With weights, and its Monte Carlo standard error.
    uncorrected : ndarray
        Of the same draws, equally weighted.
    change_se : ndarray
        Standard error of the difference: the two have most of their noise in common.
    """

    corrected: Array
    se: Array
    uncorrected: Array
    change_se: Array

    @property
    def change(self) -> Array:
        """What the weights change."""
        return self.corrected - self.uncorrected


@dataclass(frozen=True, eq=False)
class WeightedMoments:
    """Mean and standard deviation."""

    mean: Moment
    sd: Moment


class MomentSums:
    """Sums over draws of ``weight^j (value - centre)^k``, from which moments and their errors follow.

    Errors are those of the delta method: a weighted mean of f moves with each draw by w (f - mean), since the weights
    are normalised by their sum.

    Parameters
    ----------
    n_draws : int
        That will have been added at the end.

    Examples
    --------
    >>> import numpy as np
    >>> from pymc_ngvi.results.corrections.weighted_moments import MomentSums
    >>> sums = MomentSums(4)
    >>> sums.add(np.array([0.0, 1.0]), np.array([0.1, 0.2]))
    >>> sums.add(np.array([2.0, 3.0]), np.array([0.3, 0.4]))
    >>> mean = sums.result().mean
    >>> float(mean.corrected.round(6)), float(mean.uncorrected), float(mean.se.round(6))
    (2.0, 1.5, 0.489898)
    """

    def __init__(self, n_draws: int) -> None:
        self._n_draws = n_draws
        self._centre: Array | None = None
        self._sums: Array = np.zeros(0)

    def add(self, values: Array, weights: Array) -> None:
        """Add draws, (n, ...), with their weights, (n,), which sum to 1 over all draws."""
        values = np.asarray(values, dtype=np.float64)
        known = ~np.isnan(values.reshape(len(values), -1)).any(axis=1)  # draws that q could not make
        values, weights = values[known], weights[known]
        if self._centre is None:
            if not len(values):
                return
            self._centre = values.mean(axis=0)
            self._sums = np.zeros((3, _N_POWERS, *values.shape[1:]))
        with np.errstate(all="ignore"):  # values may overflow on the constrained scale
            powers = np.ones_like(values)
            by_power = np.stack([np.ones(len(weights)), weights, weights**2])
            for k in range(_N_POWERS):
                self._sums[:, k] += np.tensordot(by_power, powers, axes=1)
                powers = powers * (values - self._centre)

    def result(self) -> WeightedMoments:
        """Return the moments of all that was added."""
        assert self._centre is not None
        with np.errstate(all="ignore"):
            plain = self._sums[0] / self._sums[0, 0]
            mean, plain_mean = self._sums[1, 1], plain[1]
            var = np.maximum(self._sums[1, 2] - mean**2, 0.0)
            plain_var = np.maximum(plain[2] - plain_mean**2, 0.0)
            sd, plain_sd = np.sqrt(var), np.sqrt(plain_var)
            one = np.ones_like(mean)
            # What one draw moves, as polynomials in its value: f - mean, and (f - mean)^2 - var over 2 sd.
            of_mean = [np.stack([-m, one]) for m in (mean, plain_mean)]
            of_sd = [
                np.stack([m**2 - v, -2.0 * m, one]) / (2.0 * s)
                for m, v, s in ((mean, var, sd), (plain_mean, plain_var, plain_sd))
            ]
            return WeightedMoments(
                Moment(mean + self._centre, *self._errors(of_mean[0], of_mean[1], plain_mean + self._centre)),
                Moment(sd, *self._errors(of_sd[0], of_sd[1], plain_sd)),
            )

    def _errors(self, moved: Array, plain_moved: Array, plain: Array) -> tuple[Array, Array, Array]:
        """Return the standard error with weights, the moment without them, and the error of the difference."""
        n = self._n_draws
        square = self._product(2, moved, moved)
        of_change = (
            square - 2.0 / n * self._product(1, moved, plain_moved) + self._product(0, plain_moved, plain_moved) / n**2
        )
        return np.sqrt(np.maximum(square, 0.0)), plain, np.sqrt(np.maximum(of_change, 0.0))

    def _product(self, power: int, left: Array, right: Array) -> Array:
        """Return the sum over draws of weight^power times two polynomials in the centred value."""
        total: Array = np.zeros_like(left[0])
        for i, a in enumerate(left):
            for j, b in enumerate(right):
                total = total + a * b * self._sums[power, i + j]
        return total
