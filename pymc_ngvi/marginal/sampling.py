"""Adaptive importance sampling of the globals: proposals are fitted to what came before, then a pool is drawn [1]_.

The pool comes from the last proposal alone, in independent scramblings of one quasi-random sequence: their spread is
the error of the normalising constant, and more of them make the pool larger without changing what it estimates.

References
----------
.. [1] J.-M. Cornuet, J.-M. Marin, A. Mira, C. P. Robert (2012). Adaptive multiple importance sampling. Scandinavian
   Journal of Statistics 39(4). https://doi.org/10.1111/j.1467-9469.2011.00756.x
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from numpy.typing import NDArray
from scipy.spatial import cKDTree

from pymc_ngvi.core.linalg import logsumexp
from pymc_ngvi.core.psis import khat_error, smoothed
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array
from pymc_ngvi.marginal.proposals import Proposal, effective_size
from pymc_ngvi.marginal.regression import Whitening
from pymc_ngvi.marginal.tails import Bend

#: Sequences that a pool is made of at least, and draws of each; draws of the pool at most.
N_SCRAMBLINGS, _OF_SEQUENCE, _MOST_DRAWS = 8, 250, 16_000
#: Number of the random stream behind the pool.
_STREAM = 7_000_000
#: From globals to log m, and which draws are lost.
LogMarginalFunction = Callable[[Array], tuple[Array, NDArray[np.bool_]]]


#: Draws whose weights stand for that of a lost one.
_N_NEAREST = 8
#: k-hat of the weights of a pool at most, but for its standard error.
MOST_KHAT = 0.5
#: Effective size at least of the draws in a tail with 5 % of the mass: 100 of 2,000 equal weights, 5 to 33 in six fits
#: of a walk whose scale has a limit 0.3 sd off; 41 or more in most exact models of the battery, but 15 to 35 in three.
#: And with trees and more globals than plain models have: 43 to 54 in three fits of a walk with 23, 0.15 sds off.
LEAST_TAIL, LEAST_TAIL_OF_MANY, _OF_TAIL = 40.0, 60.0, 0.05


@dataclass(frozen=True, eq=False)
class Round:
    """Draws of one proposal."""

    proposal: Proposal
    #: shape (n, p).
    g: Array
    #: shape (n,).
    log_marginal: Array

    @property
    def log_weights(self) -> Array:
        """Log weights, (n,)."""
        return self.log_marginal - self.proposal.log_density(self.g)

    @property
    def efficiency(self) -> float:
        """Effective size of the weights over the number of draws."""
        return effective_size(self.log_weights) / len(self.g)


class Weighted(NamedTuple):
    """Draws with log weights."""

    g: Array
    log_marginal: Array
    log_weights: Array


def has_light_tail(khat: float, n_draws: int) -> bool:
    """Tell whether k-hat of the weights of so many draws is as low as that of a good pool, but for its error."""
    error = khat_error(khat, n_draws)
    return khat < MOST_KHAT + (error if np.isfinite(error) else 0.0)


def picked(weights: Array, uniform: Array) -> NDArray[np.intp]:
    """Return the rows that uniform numbers pick by weight."""
    total = np.cumsum(weights)
    return np.minimum(np.searchsorted(total / total[-1], uniform, side="right"), len(weights) - 1)


def evenly_picked(weights: Array, n: int, at: float) -> NDArray[np.intp]:
    """Return ``n`` rows by weight, as evenly as can be: at this part, from 0 to 1, of each of ``n`` equal steps."""
    return picked(weights, (np.arange(n) + at) / n)


def relative_sd_errors(g: Array, weights: Array) -> Array:
    """Return relative standard errors of standard deviations over weighted draws, (p,), by the delta method [1]_.

    The influence of a draw on a variance v is w ((x - m)^2 - v). Of n equal weights of a Gaussian, this is
    1 / sqrt(2 n); of a thin tail that few draws are in, it is many times as large.

    References
    ----------
    .. [1] A. B. Owen (2013). Monte Carlo theory, methods and examples, chapter 9. https://artowen.su.domains/mc/
    """
    square = (g - weights @ g) ** 2
    variance = weights @ square
    influence = weights[:, None] * (square - variance)
    return 0.5 * np.sqrt(np.sum(influence**2, axis=0)) / np.where(variance > 0.0, variance, 1.0)


def tail_size(g: Array, weights: Array) -> float:
    """Return the effective size of the draws in a tail of a coordinate, the least of all: what limits rest on."""
    of_draws = weights[np.argsort(g, axis=0)]
    sizes = []
    for w in (of_draws, of_draws[::-1]):
        beyond = np.where(np.cumsum(w, axis=0) - w < _OF_TAIL, w, 0.0)
        sizes.append(beyond.sum(axis=0) ** 2 / (beyond**2).sum(axis=0))
    return float(np.min(sizes))


@stored("exact.pool")
@dataclass(frozen=True, eq=False)
class Pool:
    """Weighted draws of the globals."""

    #: shape (n, p).
    g: Array
    #: log m, and the log density of the proposal; shape (n,).
    log_marginal: Array
    log_density: Array
    #: Which of the independent sequences a draw is of; shape (n,).
    scrambling: NDArray[np.intp]
    #: Whose log m is not to be trusted; shape (n,).
    lost: NDArray[np.bool_]

    @property
    def log_ratio(self) -> Array:
        """Log weights before they are smoothed, (n,)."""
        return self.log_marginal - self.log_density

    def weights(self) -> tuple[Array, float]:
        """Return the smoothed weights, (n,), that add up to 1, and k-hat."""
        log_weights, khat = smoothed(self.log_ratio)
        w = np.exp(log_weights - log_weights.max())
        return w / w.sum(), khat

    def log_normaliser(self) -> tuple[float, float]:
        """Return the logarithm of the integral of m, and its standard error, from the spread of the scramblings."""
        numbers = np.unique(self.scrambling)
        means = np.array([_log_mean(self.log_ratio[self.scrambling == i]) for i in numbers])
        value = _log_mean(means)
        if len(means) < 2:
            return value, float("inf")
        return value, float(np.std(np.exp(means - value), ddof=1) / np.sqrt(len(means)))

    def check(self, n_globals: int) -> None:
        """Raise ValueError where the arrays do not go together."""
        n = len(self.g)
        shapes = {np.shape(a) for a in (self.log_marginal, self.log_density, self.scrambling, self.lost)}
        if shapes != {(n,)} or self.g.shape != (n, n_globals) or not np.isfinite(self.log_density).all():
            raise ValueError("the arrays of the pool do not go together")

    def part_lost(self, weights: Array) -> float:
        """Return the part of the weight that is on lost draws, if each counts as the nearest ones that are not lost.

        Their own weights say nothing: about the wrong centres, log m is too low by any amount.
        """
        if not self.lost.any() or self.lost.all():
            return float(self.lost.any())
        apart = self.g - weights @ self.g
        sd = np.sqrt(weights @ apart**2)
        z = apart / np.where(sd > 0.0, sd, 1.0)
        found = np.flatnonzero(~self.lost)
        _, nearest = cKDTree(z[found]).query(z[self.lost], k=min(_N_NEAREST, len(found)))
        estimated = float(weights[found[nearest.reshape(int(self.lost.sum()), -1)]].mean(axis=1).sum())
        own = float(weights[self.lost].sum())
        return max(own, estimated / (1.0 - own + estimated))

    def with_more(self, other: "Pool") -> "Pool":
        """Return both together: draws of the same proposal."""
        return Pool(
            np.concatenate([self.g, other.g]),
            np.concatenate([self.log_marginal, other.log_marginal]),
            np.concatenate([self.log_density, other.log_density]),
            np.concatenate([self.scrambling, other.scrambling]),
            np.concatenate([self.lost, other.lost]),
        )


class Plain:
    """log p itself as a function of all coordinates: nothing is integrated."""

    base = None

    def __init__(self, log_p: Callable[[Array], Array]) -> None:
        self._log_p = log_p

    def standardise(self, whitening: Whitening, bend: Bend) -> None:
        """Do nothing: nothing is predicted."""

    def __call__(self, g: Array) -> tuple[Array, NDArray[np.bool_]]:
        """Return log p, -inf where it is not finite, and that no draw is lost."""
        with np.errstate(all="ignore"):
            values = self._log_p(g)
        return np.where(np.isfinite(values), values, -np.inf), np.zeros(len(g), dtype=bool)


@stored("exact.sampled")
@dataclass
class Sampled:
    """Globals of the posterior, as weighted draws, and what was measured on the way."""

    pool: Pool
    proposal: Proposal
    bend: Bend
    #: Between log m by the base rule and by the reference, on draws held out, an sd in nats; 0 without a base rule.
    difference: float
    #: Draws that went into proposals.
    n_adapted: int
    #: By how much draws far out move the moments of the pool, in what they may.
    missed: float = 0.0


class Sequences:
    """Makes pools of scrambled sequences.

    Each sequence has a seed of its own: which call asks for it does not matter.
    """

    def __init__(self, function: LogMarginalFunction, seed: int) -> None:
        self._function = function
        self.seed = seed

    def first(self, proposal: Proposal) -> Pool:
        """Return the smallest pool."""
        return self._drawn(proposal, 0, N_SCRAMBLINGS)

    def beside(self, pool: Pool, proposal: Proposal, other: Proposal) -> tuple[Pool, Proposal, Pool]:
        """Return a pool with draws of another proposal beside its own, as draws of both [1]_, both, and the new draws.

        Of a pool that has been enlarged, nothing is kept: sequences of both count as one, since only together are their
        weights those of draws of both.

        References
        ----------
        .. [1] E. Veach, L. J. Guibas (1995). Optimally combining sampling techniques for Monte Carlo rendering.
           SIGGRAPH 95. https://doi.org/10.1145/218380.218498
        """
        if pool.scrambling.max() >= N_SCRAMBLINGS:
            new = self.first(other)
            return new, other, new
        n = len(pool.g) // _OF_SEQUENCE
        more = self._drawn(other, n, N_SCRAMBLINGS)
        both = proposal.beside(other, N_SCRAMBLINGS / (n + N_SCRAMBLINGS))
        together = pool.with_more(replace(more, scrambling=more.scrambling - n))
        return replace(together, log_density=both.log_density(together.g)), both, more

    def again(self, pool: Pool, proposal: Proposal | None = None) -> Pool:
        """Return a pool with log m evaluated anew; its proposal tells which draws are far out."""
        log_marginal, lost = self._evaluated(pool.g, proposal)
        return replace(pool, log_marginal=log_marginal, lost=lost)

    def enlarged(self, pool: Pool, proposal: Proposal, wanted: float) -> Pool:
        """Return a pool of the effective size ``wanted``, as far as the budget goes: the one there is, and more."""
        while (size := effective_size(pool.log_ratio)) < wanted and len(pool.g) < _MOST_DRAWS:
            n = len(pool.g) // _OF_SEQUENCE
            rate = max(size / len(pool.g), 0.02)
            more = int(np.ceil(min((wanted - size) / rate, _MOST_DRAWS - len(pool.g)) / _OF_SEQUENCE))
            pool = pool.with_more(self._drawn(proposal, n, more))
        return pool

    def _drawn(self, proposal: Proposal, first: int, n: int) -> Pool:
        """Draw ``n`` sequences, numbered from ``first`` on."""
        generators = [np.random.default_rng([self.seed, _STREAM, first + i]) for i in range(n)]
        g = np.concatenate([proposal.draws(_OF_SEQUENCE, rng) for rng in generators])
        log_marginal, lost = self._evaluated(g, proposal)
        scrambling = first + np.repeat(np.arange(n), _OF_SEQUENCE)
        return Pool(g, log_marginal, proposal.log_density(g), scrambling, lost)

    def _evaluated(self, g: Array, proposal: Proposal | None) -> tuple[Array, NDArray[np.bool_]]:
        """Evaluate log m: far out, where no cheap rule was fitted, by the reference if there is one."""
        careful = getattr(self._function, "with_care", None)
        if careful is None or proposal is None:
            log_marginal, lost = self._function(g)
        else:
            log_marginal, lost = careful(g, proposal.is_far(g))
        return np.where(np.isfinite(log_marginal), log_marginal, -np.inf), lost


def _log_mean(values: Array) -> float:
    return float(logsumexp(values) - np.log(len(values)))
