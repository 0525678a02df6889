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
from pymc_ngvi.marginal.parts import SomeBlocks, TermsOfBlocks
from pymc_ngvi.marginal.quadrature import upwards

#: Candidates in each coordinate, by levels of the trees.
N_CANDIDATES = {1: 5, 2: 4, 3: 3, 4: 2, 5: 2}
#: Width of the proposal over that of the conditional distribution.
_WIDTH = 1.05
#: Skewness of a split normal with scales 1 -+ d/2, over d, about 0; largest d.
_SKEWNESS, _MOST_APART = 0.8, 1.2
_ROOT = float(np.sqrt(2.0 / np.pi))
_LOG_2PI = float(np.log(2.0 * np.pi))


class Effects(NamedTuple):
    """Draws of local coordinates."""

    #: shape (n, n_local).
    local: Array
    #: Effective number of candidates over their number, a mean over draws; shape (n_local,).
    efficiency: Array


class SplitNormal(NamedTuple):
    """Two halves of normal densities with one mode; mean 0 and about unit variance before it is widened."""

    #: The last two are standard deviations; shape (n_local,).
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
        return self.mode + np.where(below, self.left, self.right) * ndtri(inner)

    @property
    def moments(self) -> tuple[Array, Array]:
        """Mean and standard deviation, (n_local,) each."""
        apart = self.right - self.left
        sd: Array = np.sqrt((1.0 - _ROOT**2) * apart**2 + self.left * self.right)
        return self.mode + _ROOT * apart, sd

    def standard_quantile(self, u: Array) -> Array:
        """Return quantiles of the one that is moved and scaled to mean 0 and variance 1, for u (..., n_local)."""
        mean, sd = self.moments
        return (self.quantile(u) - mean) / sd

    def standard_log_density(self, z: Array) -> Array:
        """Return the log density of the one that is moved and scaled to mean 0 and variance 1, (..., n_local)."""
        mean, sd = self.moments
        return self.log_density(mean + sd * z) + np.log(sd)

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
) -> Effects:
    """Draw local coordinates."""
    k = N_CANDIDATES[forest.n_levels]
    plan = terms.plan(forest, len(g), k**forest.n_levels)
    efficiency = np.zeros(forest.n_local)
    local = np.empty((len(of_draw), forest.n_local))
    for start in range(0, len(g), plan.size):
        rows = slice(start, min(start + plan.size, len(g)))
        first, last = np.searchsorted(of_draw, [rows.start, rows.stop])
        number = of_draw[first:last] - start
        for part in plan.parts:
            own, near = part.forest, centres[rows].of(part.places, part.forest.n_levels)
            proposal = SplitNormal.of_skewness(skewness[part.places])
            z = proposal.quantile(spaced(k, shifts[rows, part.places]))
            tables = weights_of(part, g[rows], near, z, -proposal.log_density(z))
            chosen, of_candidates = _chosen(own, tables, z, choices[first:last, part.places], number)
            local[first:last, part.places] = near[number].at_own(chosen[:, None], own)[:, 0]
            efficiency[part.places] += of_candidates
    return Effects(local, efficiency / len(g))


def spaced(k: int, shifts: Array) -> Array:
    """Return ``k`` evenly spaced probabilities for each of some shifts, (n, k, n_local) from (n, n_local)."""
    edge = 1e-15
    return np.clip((np.arange(k)[:, None] + shifts[:, None]) / k, edge, 1.0 - edge)


def weights_of(part: SomeBlocks, g: Array, centres: Centres, z: Array, log_weight: Array) -> list[Array]:
    """Return, for each level, the weights of candidates given those above, (n, k^level, k, n_places)."""
    _, values = part.terms(g, centres.at_own(_products(z, part.forest), part.forest))
    values = np.where(np.isfinite(values), values, -np.inf)
    with np.errstate(all="ignore"):
        tables, messages = upwards(part.forest, k := z.shape[1], values, log_weight)
        weights = [np.exp(table - message[:, :, None]) for table, message in zip(tables, messages, strict=True)]
    # Below candidates that are impossible all are as good as each other: none of them is chosen.
    return [np.where(np.isfinite(w), w, 1.0 / k) for w in weights]


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
