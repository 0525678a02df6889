"""Integrals over trees of local coordinates: messages from the leaves to the roots, weights back."""

from typing import NamedTuple, Protocol

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.types import Array
from pymc_ngvi.marginal.centres import Centres, Shape
from pymc_ngvi.marginal.forest import Forest
from pymc_ngvi.marginal.nodes import Rule

#: Standardised variances are at least this where they divide.
_LEAST_VARIANCE = 1e-6
#: Width of a parabola at most, its step where it is not bent, and the farthest step, in standardised units.
_WIDEST, _STEP, _FARTHEST = 5.0, 3.0, 1e6


class Terms(Protocol):
    """The terms of log p; see `pymc_ngvi.model.split.SplitDensity`."""

    def chunk(self, n_nodes: int) -> int:
        """Return how many draws to evaluate at once."""

    def terms(self, g: Array, local: Array) -> tuple[Array, Array]:
        """Return the term of the globals and those of local coordinates."""


class Integral(NamedTuple):
    """What one pass of quadrature gives.

    Parameters
    ----------
    log_marginal : ndarray, shape (n,)
        log m(g), the logarithm of the integral of exp(log p) over all local coordinates.
    shape : Shape or None
        Moments of the standardised local coordinates, where they were asked for.
    of_blocks : ndarray, shape (n, n_blocks) or None
        The integral of each block, where it was asked for.
    """

    log_marginal: Array
    shape: Shape | None
    of_blocks: Array | None = None


def integrate(
    terms: Terms,
    forest: Forest,
    rule: Rule,
    g: Array,
    centres: Centres,
    *,
    moments: bool = True,
    by_block: bool = False,
) -> Integral:
    """Integrate the local coordinates out, about given centres.

    Parameters
    ----------
    terms : SplitDensity
    forest : Forest
    rule : Rule
    g : ndarray, shape (n, n_globals)
    centres : Centres
        Of each draw.
    moments : bool, default True
    by_block : bool, default False
    """
    size = terms.chunk(len(rule.nodes))
    parts = []
    for start in range(0, len(g), size):
        rows = slice(start, start + size)
        near = centres[rows]
        of_globals, of_locals = terms.terms(g[rows], near.at(rule.nodes))
        with np.errstate(all="ignore"):
            parts.append(_integrate(forest, rule, near, of_globals, of_locals, moments, by_block))
    log_marginal = np.concatenate([p.log_marginal for p in parts])
    shape, of_blocks = None, None
    if moments:
        fields = zip(*[vars(s).values() for p in parts if (s := p.shape) is not None], strict=True)
        shape = Shape(*(np.concatenate(f) for f in fields))
    if by_block:
        of_blocks = np.concatenate([p.of_blocks for p in parts if p.of_blocks is not None])
    return Integral(log_marginal, shape, of_blocks)


def _integrate(
    forest: Forest, rule: Rule, centres: Centres, of_globals: Array, of_locals: Array, moments: bool, by_block: bool
) -> Integral:
    values = np.where(np.isfinite(of_locals), of_locals, -np.inf)
    tables, messages = upwards(forest, rule.n_nodes, values, rule.log_weight[None, :, None])
    own = np.log(centres.own(forest))
    roots = messages[0][:, 0]  # (n, n_roots)
    log_marginal = of_globals + roots.sum(axis=1) + own.sum(axis=1)
    log_marginal = np.where(np.isnan(log_marginal), -np.inf, log_marginal)
    of_blocks = None
    if by_block:
        of_blocks = roots + _by_root(forest, own)
    shape = _moments(forest, rule, tables, messages) if moments else None
    return Integral(log_marginal, shape, of_blocks)


def _by_root(forest: Forest, values: Array) -> Array:
    """Return sums over trees, (n, n_blocks), of values of their coordinates, (n, n_local)."""
    order = np.argsort(forest.block, kind="stable")
    starts = np.searchsorted(forest.block[order], np.arange(forest.n_blocks))
    result: Array = np.add.reduceat(values[:, order], starts, axis=1)
    return result


def upwards(forest: Forest, k: int, values: Array, log_weight: Array) -> tuple[list[Array], list[Array]]:
    """Sum the nodes of each coordinate out, the deepest first.

    Parameters
    ----------
    forest : Forest
    k : int
        Nodes of each coordinate.
    values : ndarray, shape (n, k ** n_levels, n_local)
        Terms of log p at all products of nodes; the node of the root changes slowest.
    log_weight : ndarray, shape (n or 1, k, n_local or 1)
        Of the nodes.

    Returns
    -------
    tables : for each level, (n, k^level, k, n_places): log terms of a coordinate and of all below it, with its weights
    messages : for each level, (n, k^level, n_places): their log sums over the coordinate's own nodes
    """
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
            parents, sums = forest.to_parents(message, level, axis=2)
            from_below[:, :, parents] = sums
    return tables, messages


def _moments(forest: Forest, rule: Rule, tables: list[Array], messages: list[Array]) -> Shape:
    """Return the moments of the standardised coordinates, from the roots down."""
    n, n_local, depth = len(messages[0]), forest.n_local, forest.n_levels
    mean, skew, peak, width = (np.zeros((n, n_local)) for _ in range(4))
    cov = np.zeros((n, n_local, depth, depth))
    cov[:] = np.eye(depth)
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
        z = Rule(rule.n_nodes, level + 1).nodes
        first = np.einsum("njc,jd->ncd", weights, z)
        second = np.einsum("njc,jd->ncd", weights, (z[:, :, None] * z[:, None]).reshape(len(z), -1))
        second = second.reshape(*first.shape, level + 1) - first[..., None] * first[..., None, :]
        cov[:, at, : level + 1, : level + 1] = second
        m, v = first[..., level], np.maximum(second[..., level, level], _LEAST_VARIANCE)
        third = np.einsum("njc,j->nc", weights, z[:, level] ** 3) - 3.0 * m * (v + m**2) + 2.0 * m**3
        mean[:, at], skew[:, at] = m, third / v**1.5
        peak[:, at], width[:, at] = _parabola(rule, tables[level], weights)
        weights_above = weights
    return Shape(mean, cov, skew, peak, width)


def _parabola(rule: Rule, table: Array, weights: Array) -> tuple[Array, Array]:
    """Return top and width of a parabola through the largest value and its neighbours, (n, n_places) each.

    At the most likely nodes of the coordinates above. For a Gaussian it is exact, however far off the nodes are.
    """
    n, n_above, k, n_places = table.shape
    most = weights.reshape(n, n_above, k, n_places).sum(axis=2).argmax(axis=1)  # (n, n_places)
    values = np.take_along_axis(table, most[:, None, None], axis=1)[:, 0] - rule.log_weight[:, None]
    values = np.where(np.isfinite(values), values, -1e300)
    if k < 3:
        return np.zeros((n, n_places)), np.ones((n, n_places))
    middle = np.clip(values.argmax(axis=1), 1, k - 2)[:, None]
    y0, y1, y2 = (np.take_along_axis(values, middle + i, axis=1)[:, 0] for i in (-1, 0, 1))
    x0, x1, x2 = (rule.line[middle[:, 0] + i] for i in (-1, 0, 1))
    left, right = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)
    curvature = -2.0 * (right - left) / (x2 - x0)
    slope = (left * (x2 - x1) + right * (x1 - x0)) / (x2 - x0)
    bent = curvature > 1.0 / _WIDEST**2
    step = np.where(bent, slope / np.where(bent, curvature, 1.0), np.sign(slope) * _STEP)
    width = np.where(bent, 1.0 / np.sqrt(np.where(bent, curvature, 1.0)), _WIDEST)
    return x1 + np.clip(step, -_FARTHEST, _FARTHEST), np.maximum(width, 1e-150)


def off_centre(shape: Shape, rule: Rule, log_marginal: Array, slack: float = 1.0) -> NDArray[np.bool_]:
    """Tell which draws have nodes about the wrong centres, (n,)."""
    far, least, most = rule.limits
    distance, low, high = shape.distance()
    bad: NDArray[np.bool_] = (
        (distance > far * slack) | (low < least / slack) | (high > most * slack) | ~np.isfinite(log_marginal)
    )
    return bad
