"""Integrals over trees of local coordinates: messages from the leaves to the roots, weights back."""

from typing import NamedTuple

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.types import Array
from pymc_ngvi.marginal.centres import LEAST, Centres, Shape, far_off
from pymc_ngvi.marginal.forest import Forest
from pymc_ngvi.marginal.nodes import WIDE, PathRule
from pymc_ngvi.marginal.parts import BatchPlan, SomeBlocks, TermsOfBlocks

#: Standardised variances are at least this where they divide.
_LEAST_VARIANCE = 1e-6
#: Width of a parabola at most, its step where it is not bent, and the farthest step, in standardised units.
_WIDEST, _STEP, _FARTHEST = 5.0, 3.0, 1e6


class Integral(NamedTuple):
    """What one pass of quadrature gives, of all blocks or some."""

    #: The term of the globals; 0 in all parts but one; shape (n,).
    of_globals: Array
    #: The logarithm of the integral of each block; shape (n, n_blocks).
    of_blocks: Array
    #: Moments of the standardised local coordinates; of no draws, where they were not asked for.
    shape: Shape

    @property
    def log_marginal(self) -> Array:
        """Log m(g), the logarithm of the integral of exp(log p) over all local coordinates, (n,)."""
        return np.nan_to_num(self.of_globals + self.of_blocks.sum(axis=1), nan=-np.inf, posinf=np.inf, neginf=-np.inf)


def integrate(
    terms: TermsOfBlocks,
    forest: Forest,
    rule: PathRule,
    g: Array,
    centres: Centres,
    *,
    moments: bool = True,
) -> Integral:
    """Integrate the local coordinates out, about given centres."""
    return by_plan(terms.plan(forest, len(g), len(rule.nodes)), forest, rule, g, centres, moments=moments)


def by_plan(
    plan: BatchPlan, forest: Forest, rule: PathRule, g: Array, centres: Centres, *, moments: bool = True
) -> Integral:
    """Integrate the blocks of a plan."""
    n = len(g)
    of_globals, of_blocks = np.zeros(n), np.empty((forest.n_blocks, n)).T
    shape = Shape.empty(n if moments else 0, forest)
    for start in range(0, n, plan.size):
        rows = slice(start, start + plan.size)
        near = centres[rows]
        for part in plan.parts:
            one = integral_of(part, rule, g[rows], near.of(part.places, part.forest.n_levels), moments=moments)
            of_globals[rows] += one.of_globals
            if moments:
                shape.put(rows, part.places, one.shape)
            of_blocks[rows, part.blocks] = one.of_blocks
    return Integral(of_globals, of_blocks, shape)


def integral_of(part: SomeBlocks, rule: PathRule, g: Array, near: Centres, *, moments: bool = True) -> Integral:
    """Integrate the local coordinates of one part out, about centres that are its own."""
    forest = part.forest
    rule = PathRule(rule.n_nodes, forest.n_levels)
    of_globals, of_locals = part.terms(g, near.at(rule.nodes))
    with np.errstate(all="ignore"):
        values = np.where(np.isfinite(of_locals), of_locals, -np.inf)
        tables, messages = upwards(forest, rule.n_nodes, values, rule.log_weight[None, :, None])
        of_blocks = messages[0][:, 0] + by_root(forest, np.log(near.own(forest)))
        shape = _moments(forest, rule, tables, messages) if moments else Shape.empty(0, forest)
    return Integral(of_globals, of_blocks, shape)


def by_root(forest: Forest, values: Array) -> Array:
    """Return sums over trees, (n, n_blocks), of values of their coordinates, (n, n_local)."""
    if forest.n_levels == 1:
        return values
    order = np.argsort(forest.block, kind="stable")
    starts = np.searchsorted(forest.block[order], np.arange(forest.n_blocks))
    return np.add.reduceat(values[:, order], starts, axis=1)


def upwards(forest: Forest, k: int, values: Array, log_weight: Array) -> tuple[list[Array], list[Array]]:
    """Sum the nodes of each coordinate out, the deepest first."""
    n_levels = forest.n_levels
    tables: list[Array] = []
    messages: list[Array] = []
    from_below: Array | None = None  # (n, k^(level + 1), n_local) from children, 0 where there are none
    for level in reversed(range(n_levels)):
        at = forest.at_level[level]
        stride = k ** (n_levels - 1 - level)
        table = values[:, ::stride] if n_levels == 1 else values[:, ::stride, at]
        if from_below is not None:
            table = table + from_below[:, :, at]
        own = log_weight if n_levels == 1 or log_weight.shape[2] == 1 else log_weight[:, :, at]
        table = table.reshape(len(values), k**level, k, -1) + own[:, None]
        top = table.max(axis=2, keepdims=True)
        top = np.where(np.isfinite(top), top, 0.0)
        message = np.log(np.exp(table - top).sum(axis=2)) + top[:, :, 0]
        tables.insert(0, table)
        messages.insert(0, message)
        if level:
            from_below = np.zeros((len(values), k**level, forest.n_local))
            order, parents, starts = forest.children[level]
            from_below[:, :, parents] = np.add.reduceat(np.take(message, order, axis=2), starts, axis=2)
    return tables, messages


def _moments(forest: Forest, rule: PathRule, tables: list[Array], messages: list[Array]) -> Shape:
    """Return the moments of the standardised coordinates, from the roots down."""
    n, n_local = len(messages[0]), forest.n_local
    shape = Shape.empty(n, forest)
    mean, cov, skew = shape.mean, shape.cov, shape.skew
    weights_above: Array | None = None
    place_in_level = np.empty(n_local, dtype=np.intp)
    for level, at in enumerate(forest.at_level):
        place_in_level[at] = np.arange(len(at))
        weights = np.exp(tables[level] - messages[level][:, :, None])  # of the own nodes given those above
        weights = np.where(np.isfinite(weights), weights, 0.0)
        if weights_above is not None:
            above = weights_above[:, :, place_in_level[forest.parent[at]]]
            weights = weights * above[:, :, None]
        weights = weights.reshape(n, rule.n_nodes ** (level + 1), len(at))
        powers = PathRule(rule.n_nodes, level + 1).powers
        moments = (powers @ weights.T).transpose(1, 2, 0)  # (n_powers, n, n_places)
        first = moments[: level + 1]
        second = moments[level + 1 : -1].reshape(level + 1, level + 1, n, len(at)) - first[:, None] * first
        to = slice(None) if forest.n_levels == 1 else at  # quicker than by number
        cov[:, to, : level + 1, : level + 1] = second.transpose(2, 3, 0, 1)
        m, v = first[level], np.maximum(second[level, level], _LEAST_VARIANCE)
        third = moments[-1] - m * (3.0 * v + m**2)
        mean[:, to], skew[:, to] = m, third / (v * np.sqrt(v))
        draws, places = np.nonzero(far_off(m, second[level, level]))
        if len(draws):
            table = tables[level][draws, :, :, places]
            peak, width = _parabola(rule, table, weights.reshape(n, -1, rule.n_nodes, len(at))[draws, :, :, places])
            if rule.n_nodes >= WIDE:  # which are near to any mass: a parabola would be about one mode
                is_known = v[draws, places] >= LEAST
                peak, width = (np.where(is_known, x[draws, places], y) for x, y in ((m, peak), (np.sqrt(v), width)))
            shape.peak[draws, at[places]], shape.width[draws, at[places]] = peak, width
        weights_above = weights
    return shape


def _parabola(rule: PathRule, table: Array, weights: Array) -> tuple[Array, Array]:
    """Return top and width of a parabola through the largest value and its neighbours, (m,) each, from (m, n_above, k).

    At the most likely nodes of the coordinates above. For a Gaussian it is exact, however far off the nodes are.
    """
    m, _, k = table.shape
    if k < 3:
        return np.zeros(m), np.ones(m)
    each = np.arange(m)
    values = table[each, weights.sum(axis=2).argmax(axis=1)] - rule.log_weight
    values = np.where(np.isfinite(values), values, -1e300)
    middle = np.clip(values.argmax(axis=1), 1, k - 2)
    y0, y1, y2 = (values[each, middle + i] for i in (-1, 0, 1))
    x0, x1, x2 = (rule.line[middle + i] for i in (-1, 0, 1))
    left, right = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)
    curvature = -2.0 * (right - left) / (x2 - x0)
    slope = (left * (x2 - x1) + right * (x1 - x0)) / (x2 - x0)
    bent = curvature > 1.0 / _WIDEST**2
    step = np.where(bent, slope / np.where(bent, curvature, 1.0), np.sign(slope) * _STEP)
    width = np.where(bent, 1.0 / np.sqrt(np.where(bent, curvature, 1.0)), _WIDEST)
    return x1 + np.clip(step, -_FARTHEST, _FARTHEST), np.maximum(width, 1e-150)


def blocks_off_centre(forest: Forest, shape: Shape, rule: PathRule, of_blocks: Array) -> NDArray[np.bool_]:
    """Tell which blocks of which draws have nodes about the wrong centres, (n, n_blocks)."""
    far, least, most = rule.limits
    low, high = shape.variances()
    off = (np.abs(shape.mean) > far) | (low < least) | (high > most)
    if forest.n_levels > 1:
        off = by_root(forest, off.astype(np.float64)) > 0.0
    return off | ~np.isfinite(of_blocks)
