"""Draws of the local coordinates given the globals, exact up to the number of candidates.

In each coordinate there are a few candidates, at evenly spaced quantiles of a proposal, all moved by one random shift.
The conditional density at all of them gives weights, from the roots of the trees down; one is chosen by weight. The
candidates with their weights are a quadrature rule, whatever the shift, and over shifts their positions have the
density that is asked for: what is left of the proposal is the error of that rule, which falls fast with their number.
"""

from typing import NamedTuple

import numpy as np

from numpy.typing import NDArray
from scipy.special import ndtri, stdtrit

from pymc_ngvi.core.types import Array
from pymc_ngvi.marginal.centres import Centres
from pymc_ngvi.marginal.forest import Forest
from pymc_ngvi.marginal.parts import SomeBlocks, TermsOfBlocks
from pymc_ngvi.marginal.quadrature import upwards

#: Candidates in each coordinate at least, of trees of many levels and of one; products of them over the levels at most.
_FEWEST, _OF_ONE, _MOST_PRODUCTS = 3, 5, 400
#: Degrees of freedom of proposals. Of normals, a part q of whose draws is far out, k candidates draw k q there at most:
#: sds of a t with 3 degrees of freedom come out 17 % short with 5 candidates, here 3 %; of a normal 0.1 and 0.5 %.
_DF = 4.0
#: Skewness of a split normal with scales 1 -+ d/2, over d, about 0; largest d.
_SKEWNESS, _MOST_APART = 0.8, 1.2
_ROOT = float(np.sqrt(2.0 / np.pi))
_LOG_2PI = float(np.log(2.0 * np.pi))


class SplitNormal(NamedTuple):
    """Two halves of normal densities, or of t densities for proposals, with one mode; mean 0, about unit variance."""

    #: The last two are standard deviations of the normals; shape (n_local,).
    mode: Array
    left: Array
    right: Array

    @classmethod
    def of_skewness(cls, skewness: Array) -> "SplitNormal":
        """Return the one with about this skewness, (n_local,)."""
        apart = np.clip(skewness / _SKEWNESS, -_MOST_APART, _MOST_APART)
        product = np.maximum(1.0 - (1.0 - _ROOT**2) * apart**2, 0.05)
        middle = np.sqrt(0.25 * apart**2 + product)
        return cls(-_ROOT * apart, middle - 0.5 * apart, middle + 0.5 * apart)

    def quantile(self, u: Array, df: float = np.inf) -> Array:
        """Return quantiles, for u (..., n_local), of halves with so many degrees of freedom."""
        total = self.left + self.right
        share = self.left / total
        below = u < share
        # Each half is half a density about the mode; its quantiles are those of that one, from the mode outwards.
        inner = np.where(below, 0.5 * u * total / self.left, 1.0 - 0.5 * (1.0 - u) * total / self.right)
        far = ndtri(inner) if np.isinf(df) else stdtrit(df, inner)
        return self.mode + np.where(below, self.left, self.right) * far

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
        squares = (apart / np.where(apart < 0.0, self.left, self.right)) ** 2
        return -0.5 * squares - np.log(0.5 * (self.left + self.right)) - 0.5 * _LOG_2PI

    def candidates(self, u: Array) -> tuple[Array, Array]:
        """Return quantiles of halves with heavier tails, for u (..., n_local), and log densities but for a constant."""
        z = self.quantile(u, _DF)
        apart = z - self.mode
        squares = (apart / np.where(apart < 0.0, self.left, self.right)) ** 2
        return z, -0.5 * (_DF + 1.0) * np.log1p(squares / _DF)


def draw_effects(
    terms: TermsOfBlocks,
    forest: Forest,
    g: Array,
    centres: Centres,
    skewness: Array,
    shifts: Array,
    choices: Array,
    of_draw: NDArray[np.intp],
    k: int,
) -> Array:
    """Draw local coordinates, (n, n_local), from ``k`` candidates."""
    plan = terms.plan(forest, len(g), k**forest.n_levels)
    local = np.empty((len(of_draw), forest.n_local))
    for start in range(0, len(g), plan.size):
        rows = slice(start, min(start + plan.size, len(g)))
        first, last = np.searchsorted(of_draw, [rows.start, rows.stop])
        number = of_draw[first:last] - start
        for part in plan.parts:
            near = centres[rows].of(part.places, part.forest.n_levels)
            z, _, tables = weights_of(part, g[rows], near, skewness[part.places], shifts[rows, part.places], k)
            chosen = _chosen(part.forest, tables, z, choices[first:last, part.places], number)
            local[first:last, part.places] = near[number].at_own(chosen[:, None], part.forest)[:, 0]
    return local


def numbers_of_candidates(n_levels: int) -> list[int]:
    """Return how many candidates are tried, the fewest first: the last number checks the one before."""
    numbers = [max(_OF_ONE + 1 - n_levels, _FEWEST)]
    while len(numbers) < 2 or numbers[-1] ** n_levels <= _MOST_PRODUCTS:
        numbers.append(2 * numbers[-1] - 1)
    return numbers


def moments_of_draws(
    terms: TermsOfBlocks, forest: Forest, g: Array, centres: Centres, skewness: Array, shifts: Array, k: int
) -> tuple[Array, Array]:
    """Return means and standard deviations, (n_local,), that draws from ``k`` candidates have, over some globals."""
    plan = terms.plan(forest, len(g), k**forest.n_levels)
    first, second = np.zeros((2, forest.n_local))
    origin = centres.mean.mean(axis=0)
    for start in range(0, len(g), plan.size):
        rows = slice(start, start + plan.size)
        for part in plan.parts:
            own, near = part.forest, centres[rows].of(part.places, part.forest.n_levels)
            _, local, tables = weights_of(part, g[rows], near, skewness[part.places], shifts[rows, part.places], k)
            places = np.arange(forest.n_local)[part.places]
            above: Array = np.ones((len(local), 1, own.n_local))  # weights of products, those of parents for children
            for level, at in enumerate(own.at_level):
                if level:
                    above = above[:, :, own.parent[at]]
                joint = (tables[level] * above[:, :, None, : len(at)]).reshape(len(local), -1, len(at))
                apart = local[:, :: k ** (own.n_levels - 1 - level), at] - origin[places[at]]
                first[places[at]] += (joint * apart).sum(axis=(0, 1))
                second[places[at]] += (joint * apart**2).sum(axis=(0, 1))
                above = np.zeros((len(local), joint.shape[1], own.n_local))
                above[:, :, at] = joint
    mean = first / len(g)
    return origin + mean, np.sqrt(np.maximum(second / len(g) - mean**2, 0.0))


def spaced(k: int, shifts: Array) -> Array:
    """Return ``k`` evenly spaced probabilities for each of some shifts, (n, k, n_local) from (n, n_local)."""
    edge = 1e-15
    return np.clip((np.arange(k)[:, None] + shifts[:, None]) / k, edge, 1.0 - edge)


def weights_of(
    part: SomeBlocks, g: Array, centres: Centres, skewness: Array, shifts: Array, k: int
) -> tuple[Array, Array, list[Array]]:
    """Return candidates, (n, k, n_local), their products, and weights given those above, (n, k^level, k, n_places)."""
    z, log_density = SplitNormal.of_skewness(skewness).candidates(spaced(k, shifts))
    local = centres.at_own(_products(z, part.forest), part.forest)
    _, values = part.terms(g, local)
    values = np.where(np.isfinite(values), values, -np.inf)
    with np.errstate(all="ignore"):
        tables, messages = upwards(part.forest, k, values, -log_density)
        weights = [np.exp(table - message[:, :, None]) for table, message in zip(tables, messages, strict=True)]
    # Below candidates that are impossible all are as good as each other: none of them is chosen.
    return z, local, [np.where(np.isfinite(w), w, 1.0 / k) for w in weights]


def _chosen(forest: Forest, tables: list[Array], z: Array, choices: Array, of_draw: NDArray[np.intp]) -> Array:
    """Choose standardised coordinates, (n_draws, n_local)."""
    n, k, n_local = z.shape
    one_each = np.array_equal(of_draw, np.arange(n))
    chosen = np.empty((len(of_draw), n_local))
    picked = np.zeros((len(of_draw), n_local), dtype=np.intp)  # the product of digits from the root down
    for level, at in enumerate(forest.at_level):
        table = tables[level]  # (n, k^level, k, n_places), weights that add up to 1 over candidates
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
    return chosen


def _products(z: Array, forest: Forest) -> Array:
    """Return the candidates of each coordinate in all products over the levels, (n, k ** n_levels, n_local)."""
    if forest.n_levels == 1:
        return z
    # The candidate of each level in each product of them.
    digits = np.indices([z.shape[1]] * forest.n_levels).reshape(forest.n_levels, -1)
    result = np.empty((len(z), digits.shape[1], z.shape[2]))
    for digit, at in zip(digits, forest.at_level, strict=True):
        result[:, :, at] = z[:, digit][:, :, at]
    return result
