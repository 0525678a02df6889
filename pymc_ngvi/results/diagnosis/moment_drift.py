"""How far moments drift when draws of q are moved towards the posterior, and what of it counts."""

from dataclasses import dataclass

import numpy as np

from numpy.typing import NDArray
from scipy.special import ndtri

from pymc_ngvi.core.elbo import Elbo
from pymc_ngvi.core.types import Array
from pymc_ngvi.results.diagnosis.moves import Moved

#: Probability of a false alarm among all moments of a kind together.
FAMILY_WISE = 0.01


@dataclass(frozen=True)
class Estimates:
    """Estimates of one quantity for each coordinate."""

    #: With Monte Carlo standard errors; shape (n_dim,).
    value: Array
    se: Array

    def beyond(self, size: float, certain: float = 0.0) -> NDArray[np.intp]:
        """Return the coordinates whose value stands out, the largest first."""
        value = np.abs(self.value)
        found = np.flatnonzero((value - certain * self.se > size) & (value > critical(len(value)) * self.se))
        return found[np.argsort(-np.abs(self.value[found]))]

    def seen_again(self, other: "Estimates") -> "Estimates":
        """Return, of each coordinate, the estimate that stands out less; 0 where the two differ in sign."""
        less = np.abs(self.value) * other.se <= np.abs(other.value) * self.se
        value, se = np.where(less, self.value, other.value), np.where(less, self.se, other.se)
        return Estimates(np.where(self.value * other.value <= 0.0, 0.0, value), se)


def critical(n: int) -> float:
    """Return the standard errors that none of ``n`` estimates of 0 exceeds, but for a probability of `FAMILY_WISE`."""
    return float(-ndtri(0.5 * FAMILY_WISE / max(n, 1)))


@dataclass(frozen=True)
class MomentDrift:
    """By how much moved draws differ from q."""

    #: Of the mean, in standard deviations of q.
    mean: Estimates
    #: Of the standard deviation, relative to that of q.
    sd: Estimates
    #: Of the skewness, beside that of q.
    skewness: Estimates
    #: Of E[log p], in nats, with its standard error.
    log_p: Elbo

    def seen_again(self, other: "MomentDrift") -> "MomentDrift":
        """Return what this drift and an independent one have in common."""
        of = {name: getattr(self, name).seen_again(getattr(other, name)) for name in ("mean", "sd", "skewness")}
        return MomentDrift(**of, log_p=other.log_p)


def drift_of(moved: Moved, mean: Array, sd: Array, log_q: tuple[Array, Array] | None = None) -> MomentDrift:
    """Return the drift of moved draws."""
    x, control = (moved.end - mean) / sd, (moved.control - mean) / sd
    location = _controlled(x, control)
    square = _controlled((x - location.value) ** 2, control**2 - 1.0)
    scale = np.sqrt(np.maximum(square.value, 1e-12))
    change = moved.log_p_end - moved.log_p_start
    if log_q is not None:
        change = change - _slope(change, log_q[1] - log_q[0]) * (log_q[1] - log_q[0])
    n_draws = len(change)
    se = float(change.std(ddof=1) / np.sqrt(n_draws)) if n_draws > 1 else np.inf
    return MomentDrift(
        mean=location,
        sd=Estimates(scale - 1.0, square.se / (2.0 * scale)),
        skewness=_skewness(x, control),
        log_p=Elbo(float(change.mean()), se),
    )


def _controlled(values: Array, control: Array) -> Estimates:
    """Return means over draws, less what draws of a control, whose mean is 0, say of their error.

    Where the control is further from 0 than its standard errors tell, it has missed what is rare but counts, such as a
    far mode with little mass; so may the others have, and the error is at least as large.
    """
    rest = values - _slope(values, control) * control
    se, own, own_se = _standard_error(rest), np.abs(control.mean(axis=0)), _standard_error(control)
    se = np.where(own > critical(len(own)) * own_se, np.maximum(se, own), se)
    return Estimates(rest.mean(axis=0), se)


def _standard_error(values: Array) -> Array:
    return values.std(axis=0, ddof=1) / np.sqrt(len(values))


def _slope(values: Array, control: Array) -> Array:
    """Return the coefficients of a regression on a control, between 0 and 1, by column."""
    apart = control - control.mean(axis=0)
    variance = np.sum(apart**2, axis=0)
    result: Array = np.sum(apart * (values - values.mean(axis=0)), axis=0) / np.where(variance > 0.0, variance, 1.0)
    return np.clip(result, 0.0, 1.0)


def _skewness(x: Array, control: Array) -> Estimates:
    """Return the skewness less that of the control, with the error that its influence function gives."""
    (of_x, by_x), (of_control, by_control) = _influence(x), _influence(control)
    se = (by_x - by_control).std(axis=0, ddof=1) / np.sqrt(len(x))
    return Estimates(of_x - of_control, se)


def _influence(x: Array) -> tuple[Array, Array]:
    """Return the skewness of each column and what each draw adds to it."""
    sd = x.std(axis=0)
    u = (x - x.mean(axis=0)) / np.where(sd > 0.0, sd, 1.0)
    square = u * u
    cube = square * u
    skewness = np.mean(cube, axis=0)
    return skewness, cube - skewness - 3.0 * u - 1.5 * skewness * (square - 1.0)
