"""Proposals for the globals: mixtures of Student t, fitted to weighted draws, of several candidates the best one."""

import itertools

from dataclasses import dataclass

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.linalg import TINY, logsumexp, solve_lower
from pymc_ngvi.core.psis import effective_size
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array
from pymc_ngvi.marginal.margins import Margins
from pymc_ngvi.marginal.student_mixture import StudentMixture, squares

#: Weighted EM: iterations, least share of a component.
_N_EM, _LEAST_SHARE = 12, 0.05
#: Nats below the largest weight from which on draws are left out.
_NO_WEIGHT = 16.0
#: Draws that proposals are fitted to at most.
_MOST_FITTED = 1_500
#: Seed of the folds that proposals are compared by.
_FOLDS = 20_260_303
#: Weighted draws that a component needs, for each coordinate.
_DRAWS_PER_COORDINATE = 6.0
#: The kind that is fitted from given components; the least share of one of these.
_FROM_START, _LEAST_OF_START = (0.0, 0), 0.005
#: Degrees of freedom at least; numbers of components.
LEAST_DF, _COMPONENTS = 7.0, (1, 2, 4)


@stored("exact.proposal")
@dataclass(frozen=True, eq=False)
class Proposal:
    """A density of the globals."""

    #: Of the normals that margins make of the globals.
    mixture: StudentMixture
    margins: Margins

    def log_density(self, g: Array) -> Array:
        """Return the log density at the rows of ``g``."""
        return self.mixture.log_density(self.margins.forward(g)) + self.margins.log_slope(g)

    def draws(self, n: int, rng: np.random.Generator) -> Array:
        """Return ``n`` quasi-random draws."""
        return self.margins.inverse(self.mixture.draws(n, rng))


def _few(weights: Array, n: int) -> tuple[NDArray[np.intp], Array]:
    """Return the rows that have weight, and weights that add up to 1; of more than ``n``, some, evenly by weight."""
    rows = np.flatnonzero(weights > np.exp(-_NO_WEIGHT) * weights.max())
    w = weights[rows] / weights[rows].sum()
    if len(rows) <= n:
        return rows, w
    picked = np.minimum(np.searchsorted(np.cumsum(w), (np.arange(n) + 0.5) / n), len(w) - 1)
    which, counts = np.unique(picked, return_counts=True)
    return rows[which], counts / n


def mixture_of(means: Array, factors: Array, df: float) -> StudentMixture:
    """Return components of the same shares."""
    return StudentMixture(np.full(len(means), 1.0 / len(means)), means, factors, df)


def tempered(log_weights: Array, least: float) -> Array:
    """Return weights to a power, at most 1, with which the effective size is ``least``, as far as that can be had."""
    power = 1.0
    while effective_size(power * log_weights) < least and power > 0.05:
        power *= 0.8
    return power * log_weights


def best_proposal(
    g: Array,
    log_weights: Array,
    log_marginal: Array,
    margins: Margins,
    df: float,
    start: StudentMixture | None = None,
) -> Proposal:
    """Return the proposal of several kinds that does best on draws it was not fitted to.

    Notes
    -----
    Kinds differ in tails and in the number of components. The score is an estimate, from held-out draws in two folds,
    of the logarithm of E_p[p / q], whose inverse is the efficiency.
    """
    rows, w = _few(np.exp(log_weights - log_weights.max()), _MOST_FITTED)
    g, log_marginal = g[rows], log_marginal[rows]
    y = margins.forward(g)
    # At random: every second point of a Sobol sequence is in one half of the space.
    fold = np.random.default_rng(_FOLDS).permutation(len(g)) % 2
    size = 1.0 / (w**2).sum()
    enough = [k for k in _COMPONENTS if k == 1 or size > _DRAWS_PER_COORDINATE * k * y.shape[1]]

    def make(kind: tuple[float, int], rows: Array) -> Proposal:
        part = w[rows] / w[rows].sum()
        if kind == _FROM_START and start is not None:
            return Proposal(_by_em(y[rows], part, start, None, _LEAST_OF_START), margins)
        return Proposal(_fitted(y[rows], part, *kind), margins)

    def score(kind: tuple[float, int]) -> float:
        total = 0.0
        for f in (0, 1):
            fitted, held = fold != f, (fold == f) & (w > 0.0) & np.isfinite(log_marginal)
            if (w[fitted] > 0.0).sum() < 5 or not held.any():
                return -np.inf
            log_q = make(kind, fitted).log_density(g[held])
            part = w[held] / w[held].sum()
            total -= float(logsumexp(np.log(part) + log_marginal[held] - log_q))
        return total

    kinds = [*itertools.product(sorted({df, LEAST_DF}), enough), *([] if start is None else [_FROM_START])]
    return make(max(kinds, key=score), np.ones(len(g), dtype=bool))


def _fitted(y: Array, w: Array, df: float, k: int) -> StudentMixture:
    mean, cov = _shrunk_moments(y, w)
    root = np.linalg.cholesky(cov)
    if k == 1:
        return mixture_of(mean[None], np.sqrt((df - 2.0) / df) * root[None], df)
    # Components begin along the direction of most skewness.
    skewness = w @ solve_lower(root, np.ascontiguousarray((y - mean).T)).T ** 3
    direction = root @ (skewness / (np.linalg.norm(skewness) + TINY))
    means = mean + np.linspace(-1.0, 1.0, k)[:, None] * direction
    start = mixture_of(means, np.broadcast_to(np.sqrt(0.7) * root, (k, *root.shape)), df)
    return _by_em(y, w, start, (mean, cov), _LEAST_SHARE)


def _shrunk_moments(y: Array, w: Array) -> tuple[Array, Array]:
    """Return weighted moments, but 1 for variances within the noise of so few draws [1]_: margins have made them so.

    References
    ----------
    .. [1] J. Baik, G. Ben Arous, S. Peche (2005). Phase transition of the largest eigenvalue for nonnull complex sample
       covariance matrices. Annals of Probability 33(5). https://doi.org/10.1214/009117905000000233
    """
    p, size, mean = y.shape[1], 1.0 / (w**2).sum(), w @ y
    apart = y - mean
    cov = (w[:, None] * apart).T @ apart
    values, vectors = np.linalg.eigh(cov)
    edge = np.sqrt(p / size)
    outside = (values > (1.0 + edge) ** 2) | (values < max(0.0, 1.0 - edge) ** 2)
    cov = (vectors * np.where(outside, np.maximum(values, 1e-6), 1.0)) @ vectors.T
    return mean * (mean @ mean) / (mean @ mean + p / size), cov


def _by_em(
    y: Array, w: Array, start: StudentMixture, towards: tuple[Array, Array] | None, least: float
) -> StudentMixture:
    """Fit the components of a mixture by weighted EM; they shrink towards these moments, or what they were."""
    shares, means, factors, p = start.shares, start.means, start.factors, y.shape[1]
    df = np.broadcast_to(start.df, len(shares))[:, None]
    for _ in range(_N_EM):
        # The part of the weight of each draw that each component has, and the weights of a t of each, (k, n).
        square = squares(factors, means, y)
        log_dets = np.log(np.diagonal(factors, axis1=1, axis2=2)).sum(axis=1)
        log_parts = (np.log(shares) - log_dets)[:, None] - 0.5 * (df + p) * np.log1p(square / df)
        parts = np.exp(log_parts - log_parts.max(axis=0))
        responsibilities = parts * (w / parts.sum(axis=0))
        weight, total = responsibilities * ((df + p) / (df + square)), responsibilities.sum(axis=1)
        shares = np.maximum(total, least)
        shares /= shares.sum()
        # Locations and scales from their draws, shrunk by as much as these are few.
        to_mean, to_cov = (means, factors @ factors.transpose(0, 2, 1)) if towards is None else towards
        locations = (weight @ y) / np.maximum(weight.sum(axis=1), TINY)[:, None]
        apart = y - locations[:, None]
        sizes = total**2 / np.maximum((responsibilities**2).sum(axis=1), TINY)
        of_cov, of_mean = (2.0 * p / (2.0 * p + sizes))[:, None, None], (1.0 / (1.0 + 0.2 * sizes))[:, None]
        scatters = (weight[:, :, None] * apart).transpose(0, 2, 1) @ apart / np.maximum(total, TINY)[:, None, None]
        means = (1.0 - of_mean) * locations + of_mean * to_mean
        factors = np.linalg.cholesky((1.0 - of_cov) * scatters + of_cov * to_cov)
    return StudentMixture(shares, means, factors, start.df)
