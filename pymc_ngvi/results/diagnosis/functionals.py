"""By how much what people look at beside coordinates changes as draws are moved."""

from dataclasses import dataclass

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.types import Array
from pymc_ngvi.density.functionals import Functionals
from pymc_ngvi.results.diagnosis.moment_drift import Estimates
from pymc_ngvi.results.diagnosis.ranks import limit_drift, rank_drift

#: Standard errors from which on a drift that counts is worth moving other draws for.
_SUSPICIOUS = 1.5
#: Draws on each side below which nothing is compared.
_LEAST_DRAWS = 32
#: Probability below the lower limit, and above the upper one, of 89 % intervals; what is measured of each quantity.
TAIL = 0.055
_MEASURES = ("mean", "sd", "lower", "upper")


@dataclass(frozen=True)
class FunctionalDrift:
    """By how much such quantities change as draws are moved, by ranks."""

    functionals: Functionals
    #: Of each column, as `rank_drift` has them.
    mean: Estimates
    sd: Estimates
    #: Of the limits of 89 % intervals, as `limit_drift` has them.
    lower: Estimates
    upper: Estimates
    #: On each side.
    n_draws: int

    def beyond(self, of: Estimates, size: float, certain: float) -> NDArray[np.intp]:
        """Return the columns of which one of the estimates drifts by more than a size."""
        return beyond_by_kind(self.functionals.is_whole, of, size, certain)

    def is_suspicious(self, mean: float, sd: float, limit: float) -> bool:
        """Tell whether more draws may show that something whole is off, which these are too few to be certain of."""
        whole = self.functionals.is_whole
        pairs = ((self.mean, mean), (self.sd, sd), (self.lower, limit), (self.upper, limit))
        return any(
            np.any(whole & (np.abs(of.value) > size) & (np.abs(of.value) > _SUSPICIOUS * of.se)) for of, size in pairs
        )

    def with_others(self, other: "FunctionalDrift") -> "FunctionalDrift":
        """Return what two sets of moved draws show together."""
        part = self.n_draws / (self.n_draws + other.n_draws)
        mean, sd, lower, upper = (_joined(getattr(self, name), getattr(other, name), part) for name in _MEASURES)
        return FunctionalDrift(self.functionals, mean, sd, lower, upper, self.n_draws + other.n_draws)

    def seen_again(self, other: "FunctionalDrift") -> "FunctionalDrift":
        """Return what two sets of moved draws have in common."""
        mean, sd, lower, upper = (getattr(self, name).seen_again(getattr(other, name)) for name in _MEASURES)
        return FunctionalDrift(self.functionals, mean, sd, lower, upper, other.n_draws)


def _joined(one: Estimates, other: Estimates, part: float) -> Estimates:
    """Return the mean of two estimates, of which the first has a part of the weight."""
    value = part * one.value + (1.0 - part) * other.value
    return Estimates(value, np.hypot(part * one.se, (1.0 - part) * other.se))


def beyond_by_kind(whole: NDArray[np.bool_], of: Estimates, size: float, certain: float) -> NDArray[np.intp]:
    """Return the columns that stand out, the most certain first: among what is whole, and among single elements.

    There are few of the first, so that less has to be allowed for chance.
    """
    found: list[NDArray[np.intp]] = []
    for kind in (whole, ~whole):
        columns = np.flatnonzero(kind)
        found.append(columns[Estimates(of.value[columns], of.se[columns]).beyond(size, certain)])
    return np.concatenate(found)


def functional_drift_of(
    functionals: Functionals, before: Array, after: Array, seconds: float
) -> FunctionalDrift | None:
    """Return the drift of functionals from draws of q to moved ones."""
    n = min(len(before), functionals.affordable(seconds) // 2)
    if n < _LEAST_DRAWS:
        return None
    try:
        values = functionals.at(before[:n]), functionals.at(after[:n])
    except Exception:  # as above: it may fail at some draws alone
        return None
    lower, upper = (limit_drift(*values, level) for level in (TAIL, 1.0 - TAIL))
    return FunctionalDrift(functionals, *rank_drift(*values), lower, upper, n)


def first_order_of(functionals: Functionals, theta: Array, log_ratio: Array) -> Estimates:
    """Return estimates of E_p[f] - E_q[f], in standard deviations under q, of each column, for a nested posterior.

    Given hyperparameters, the mean of a function f under p differs from that under q by Cov_q(f, h), with h = log p -
    log q, and terms of higher order: what its Gaussians miss. At the optimum of q it vanishes where f is linear or
    quadratic; for totals of exponentials and the like it does not.
    """
    n, m, n_dim = theta.shape
    values = functionals.at(theta.reshape(n * m, n_dim))
    sd = values.std(axis=0)
    values = values.reshape(n, m, -1)
    apart, h = values - values.mean(axis=1, keepdims=True), log_ratio - log_ratio.mean(axis=1, keepdims=True)
    covariances = np.einsum("nmk,nm->nk", apart, h) / (m - 1)
    with np.errstate(all="ignore"):
        value, se = covariances.mean(axis=0) / sd, covariances.std(axis=0, ddof=1) / np.sqrt(n) / sd
    known = np.isfinite(value) & np.isfinite(se)
    return Estimates(np.where(known, value, 0.0), np.where(known, se, 1.0))
