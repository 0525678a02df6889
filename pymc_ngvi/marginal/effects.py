"""Draws of the local coordinates given the globals, exact up to the number of candidates.

In each coordinate there are a few candidates, at evenly spaced quantiles of a proposal, all moved by one random shift.
The conditional density at all of them gives weights, from the roots of the trees down; one is chosen by weight. The
candidates with their weights are a quadrature rule, whatever the shift, and over shifts their positions have the
density that is asked for: what is left of the proposal is the error of that rule, which falls fast with their number.
"""

from typing import NamedTuple

import numpy as np

from numpy.typing import NDArray
from scipy.special import ndtri

from pymc_ngvi.core.types import Array
from pymc_ngvi.marginal.centres import Centres
from pymc_ngvi.marginal.forest import Forest
from pymc_ngvi.marginal.parts import TermsOfBlocks
from pymc_ngvi.marginal.quadrature import upwards
from pymc_ngvi.marginal.surrogate import Surrogate

#: Candidates in each coordinate, by levels of the trees.
N_CANDIDATES = {1: 5, 2: 4, 3: 3, 4: 2, 5: 2}
#: Width of the proposal over that of the conditional distribution.
_WIDTH = 1.05
#: Skewness of a split normal with scales 1 -+ d/2, over d, about 0; largest d.
_SKEWNESS, _MOST_APART = 0.8, 1.2
#: Standard deviations that candidates of a surrogate reach to either side; numbers in a temporary beside one.
_REACH, _CACHED = 4.5, 2**17
_ROOT = float(np.sqrt(2.0 / np.pi))
_LOG_2PI = float(np.log(2.0 * np.pi))


class Effects(NamedTuple):
    """Draws of local coordinates.

    Parameters
    ----------
    local : ndarray, shape (n, n_local)
    efficiency : ndarray, shape (n_local,)
        Effective number of candidates over their number, a mean over draws.
    """

    local: Array
    efficiency: Array


class SplitNormal(NamedTuple):
    """Two halves of normal densities with one mode; mean 0 and about unit variance before it is widened.

    Parameters
    ----------
    mode, left, right : ndarray, shape (n_local,)
        The last two are standard deviations.
    """

    mode: Array
    left: Array
    right: Array

    @classmethod
    def of_skewness(cls, skewness: Array) -> "SplitNormal":
        """Return the one with about this skewness, (n_local,)."""
        apart = np.clip(skewness / _SKEWNESS, -_MOST_APART, _MOST_APART)
        product = np.maximum(1.0 - (1.0 - _ROOT**2) * apart**2, 0.05)
        middle = np.sqrt(0.25 * apart**2 + product)
        return cls(-_ROOT * apart, _WIDTH * (middle - 0.5 * apart), _WIDTH * (middle + 0.5 * apart))

    def quantile(self, u: Array) -> Array:
        """Return quantiles, for u (..., n_local)."""
        total = self.left + self.right
        share = self.left / total
        below = u < share
        # Each half is half a normal density; its quantiles are those of that normal, from the mode outwards.
        inner = np.where(below, 0.5 * u * total / self.left, 1.0 - 0.5 * (1.0 - u) * total / self.right)
        result: Array = self.mode + np.where(below, self.left, self.right) * ndtri(inner)
        return result

    @property
    def range(self) -> tuple[Array, Array]:
        """Where all but a few draws in a hundred thousand are, (n_local,) each."""
        return self.mode - _REACH * self.left, self.mode + _REACH * self.right

    def log_density(self, z: Array) -> Array:
        """Return the log density, (..., n_local)."""
        apart = z - self.mode
        scale = np.where(apart < 0.0, self.left, self.right)
        return -0.5 * (apart / scale) ** 2 - np.log(0.5 * (self.left + self.right)) - 0.5 * _LOG_2PI


def draw_effects(
    terms: TermsOfBlocks,
    forest: Forest,
    g: Array,
    centres: Centres,
    skewness: Array,
    shifts: Array,
    choices: Array,
    of_draw: NDArray[np.intp],
    surrogate: Surrogate | None = None,
) -> Effects:
    """Draw local coordinates.

    Parameters
    ----------
    terms : SplitDensity
    forest : Forest
    g : ndarray, shape (n_points, n_globals)
    centres : Centres
        Of each of these.
    skewness : ndarray, shape (n_local,)
        Of proposals.
    shifts : ndarray, shape (n_points, n_local)
        Uniform numbers that move the candidates.
    choices : ndarray, shape (n, n_local)
        Uniform numbers that choose.
    of_draw : ndarray of int, shape (n,)
        Which of the points a draw has for its globals, ascending.
    surrogate : Surrogate, optional
        Gives the conditional density, in place of the terms.
    """
    k = N_CANDIDATES[forest.n_levels]
    proposal = SplitNormal.of_skewness(skewness)
    size = terms.chunk(k**forest.n_levels) if surrogate is None else max(1, _CACHED // (k * forest.n_local))
    local, efficiency = np.empty((len(of_draw), forest.n_local)), np.zeros(forest.n_local)
    for start in range(0, len(g), size):
        rows = slice(start, min(start + size, len(g)))
        first, last = np.searchsorted(of_draw, [rows.start, rows.stop])
        z = candidate_points(proposal, k, shifts[rows], surrogate)
        tables = weights_of(terms, forest, g[rows], centres[rows], z, proposal, surrogate)
        chosen, of_candidates = _chosen(forest, tables, z, choices[first:last], of_draw[first:last] - start)
        local[first:last] = centres[rows][of_draw[first:last] - start].at_own(chosen[:, None], forest)[:, 0]
        efficiency += of_candidates
    return Effects(local, efficiency / len(g))


def candidate_points(proposal: SplitNormal, k: int, shifts: Array, surrogate: Surrogate | None = None) -> Array:
    """Return ``k`` candidates of each standardised coordinate, (n, k, n_local)."""
    uniform = (np.arange(k)[:, None] + shifts[:, None]) / k
    z = proposal.quantile(np.clip(uniform, 1e-15, 1.0 - 1e-15))
    return z if surrogate is None else np.clip(z, *proposal.range)


def weights_of(
    terms: TermsOfBlocks,
    forest: Forest,
    g: Array,
    centres: Centres,
    z: Array,
    proposal: SplitNormal,
    surrogate: Surrogate | None = None,
) -> list[Array]:
    """Return, for each level, the weights of candidates given those above, (n, k^level, k, n_places)."""
    log_weight = -proposal.log_density(z)
    if surrogate is not None:
        return [_normalised(surrogate.log_density(g, z) + log_weight)[:, None]]
    _, values = terms.terms(g, centres.at_own(_products(z, forest), forest))
    values = np.where(np.isfinite(values), values, -np.inf)
    with np.errstate(all="ignore"):
        tables, messages = upwards(forest, k := z.shape[1], values, log_weight)
        weights = [np.exp(table - message[:, :, None]) for table, message in zip(tables, messages, strict=True)]
    # Below candidates that are impossible all are as good as each other: none of them is chosen.
    return [np.where(np.isfinite(w), w, 1.0 / k) for w in weights]


def _normalised(log_weights: Array) -> Array:
    weights = np.exp(log_weights - log_weights.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    return weights


def _chosen(
    forest: Forest, tables: list[Array], z: Array, choices: Array, of_draw: NDArray[np.intp]
) -> tuple[Array, Array]:
    """Choose standardised coordinates, (n_draws, n_local); also return efficiencies, summed over points."""
    n, k, n_local = z.shape
    one_each = np.array_equal(of_draw, np.arange(n))
    chosen = np.empty((len(of_draw), n_local))
    picked = np.zeros((len(of_draw), n_local), dtype=np.intp)  # the product of digits from the root down
    efficiency = np.zeros(n_local)
    for level, at in enumerate(forest.at_level):
        table = tables[level]  # (n, k^level, k, n_places), weights that add up to 1 over candidates
        efficiency[at] = (1.0 / (table**2).sum(axis=2) / k).mean(axis=1).sum(axis=0)
        table, candidates = (a if one_each else a[of_draw] for a in (table, z[:, :, at]))
        if level:
            above = picked[:, forest.parent[at]]
            weights = np.take_along_axis(table, above[:, None, None], axis=1)[:, 0]
        else:
            above, weights = picked[:, at], table[:, 0]
        # The first candidate whose cumulative weight exceeds the uniform number.
        digit, total = np.zeros((len(of_draw), len(at)), dtype=np.intp), np.zeros((len(of_draw), len(at)))
        for i in range(k - 1):
            total += weights[:, i]
            digit += choices[:, at] > total
        chosen[:, at] = np.take_along_axis(candidates, digit[:, None], axis=1)[:, 0]
        picked[:, at] = above * k + digit
    return chosen, efficiency


def _products(z: Array, forest: Forest) -> Array:
    """Return the candidates of each coordinate in all products over the levels, (n, k ** n_levels, n_local)."""
    if forest.n_levels == 1:
        return z
    digits = _digits(z.shape[1], forest.n_levels)
    result = np.empty((len(z), len(digits), z.shape[2]))
    for level, at in enumerate(forest.at_level):
        result[:, :, at] = z[:, digits[:, level]][:, :, at]
    return result


def _digits(k: int, n_levels: int) -> NDArray[np.intp]:
    """Return the candidate of each level in each product of them, (k ** n_levels, n_levels)."""
    mesh = np.meshgrid(*[np.arange(k)] * n_levels, indexing="ij")
    return np.stack(mesh, axis=-1).reshape(-1, n_levels)
