"""Quadrature rules for expectations under normal distributions of few dimensions.

Gauss-Hermite rules are exact for polynomials and all but exact where a normal is narrow beside what is integrated.
Elsewhere the trapezoidal rule converges faster than any power of its spacing [1]_; each further level has half of it,
and reaches farther. In two dimensions each has a level of its own. In three and more, grids are sparse [2]_, with one
level for all of them.

References
----------
.. [1] L. N. Trefethen and J. A. C. Weideman (2014). The exponentially convergent trapezoidal rule. SIAM Review 56(3).
   https://doi.org/10.1137/130932132
.. [2] F. Heiss and V. Winschel (2008). Likelihood approximation by numerical integration on sparse grids. Journal of
   Econometrics 144(1). https://doi.org/10.1016/j.jeconom.2007.12.004
"""

import functools
import math

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pymc_ngvi.core.types import Array

#: Nodes of the Gauss-Hermite rules of one dimension, by level; and of the trapezoidal rules that follow, spacing and
#: reach.
_GAUSS = (3, 5, 8, 12, 18)
_TRAPEZOIDAL = tuple((0.5**k, min(4.0 * (k + 1), 24.0)) for k in range(1, 7))
#: Dimensions up to which each has a level of its own.
_FEW = 2
#: Levels of sparse grids in more dimensions, and the nodes of the rules of one dimension that they are made of.
_SPARSE, _NODES = range(2, 6), range(1, 12, 2)


#: Nodes from which on a rule of one dimension tells of third and fourth derivatives.
_BENDS = 5
#: Nodes nearer to 0 are 0; decimals in which nodes are told apart.
_ZERO, _DECIMALS = 1e-12, 12


class NormalRule(NamedTuple):
    """Nodes, and the weights of expectations with them."""

    #: shape (n_nodes, k).
    nodes: Array
    #: Those of f, of z f, and of (z z^T - I) f, lower triangle by rows, for a standard normal z; shape (1 + k + k (k
    #: + 1) / 2, n_nodes).
    weights: Array


def blocks(k: int) -> tuple[int, ...]:
    """Return how many of ``k`` dimensions each level of a rule is for."""
    return (1,) * k if k <= _FEW else (k,)


def n_levels(size: int) -> int:
    """Return the number of levels for a block of dimensions; each is finer than the one before."""
    return len(_GAUSS) + len(_TRAPEZOIDAL) if size == 1 else len(_SPARSE)


@functools.cache
def rule(k: int, levels: tuple[int, ...]) -> NormalRule:
    """Return the rule in ``k`` dimensions that has a level for each of its `blocks`."""
    if len(levels) != len(blocks(k)):
        raise ValueError(f"{k} dimensions have {len(blocks(k))} levels, not {len(levels)}")
    nodes, weights = _sparse_grid(k, _SPARSE[levels[0]]) if k > _FEW else _product([_line(level) for level in levels])
    i, j = np.tril_indices(k)
    second = nodes[:, i] * nodes[:, j] - (i == j)
    parts = np.concatenate([np.ones((len(nodes), 1)), nodes, second], axis=1)
    return NormalRule(nodes, np.ascontiguousarray((weights[:, None] * parts).T))


@functools.cache
def bend_weights(level: int) -> Array:
    """Return the weights of (z^3 - 3 z) f and (z^4 - 6 z^2 + 3) f in one dimension, (2, n_nodes); 0 of coarse rules.

    With three nodes they would tell of second derivatives.
    """
    z, w = _line(level)
    third_and_fourth = np.asarray(w * np.polynomial.hermite_e.hermevander(z, 4).T[3:])
    return third_and_fourth if len(z) >= _BENDS else np.zeros_like(third_and_fourth)


@functools.cache
def n_nodes(size: int, level: int) -> int:
    """Return the number of nodes for a block of dimensions; a product of rules has as many as the product of theirs."""
    return len(rule(size, (level,)).nodes)


def _line(level: int) -> tuple[Array, Array]:
    """Return nodes and weights of a rule of one dimension."""
    return _gauss(_GAUSS[level]) if level < len(_GAUSS) else _trapezoidal(*_TRAPEZOIDAL[level - len(_GAUSS)])


def _gauss(n: int) -> tuple[Array, Array]:
    z, w = np.polynomial.hermite_e.hermegauss(n)
    return np.where(np.abs(z) < _ZERO, 0.0, z), w / w.sum()


def _trapezoidal(spacing: float, reach: float) -> tuple[Array, Array]:
    n = round(reach / spacing)
    z = spacing * np.arange(-n, n + 1, dtype=np.float64)
    w = np.exp(-0.5 * z * z)
    return z, np.asarray(w / w.sum(), dtype=np.float64)


def _product(axes: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
    """Return nodes, (n_nodes, k), and weights of a product of rules of one dimension; of none, one node."""
    if not axes:
        return np.zeros((1, 0)), np.ones(1)
    nodes = np.stack([z.ravel() for z in np.meshgrid(*[z for z, _ in axes], indexing="ij")], axis=1)
    weights: Array = functools.reduce(np.multiply.outer, [w for _, w in axes]).ravel()
    return nodes, weights


def _sparse_grid(k: int, level: int) -> tuple[Array, Array]:
    """Return a sparse grid: a sum of products of rules that are fine in few dimensions at a time [2]_."""
    nodes, weights = [], []
    for total in range(max(0, level - k + 1), level + 1):
        sign = (-1) ** (level - total) * math.comb(k - 1, level - total)
        for sizes in _compositions(total, k):
            z, w = _product([_gauss(_NODES[i]) for i in sizes])
            nodes.append(z)
            weights.append(sign * w)
    distinct, place = np.unique(np.round(np.concatenate(nodes), _DECIMALS), axis=0, return_inverse=True)
    return distinct, np.bincount(place.ravel(), np.concatenate(weights))


def _compositions(total: int, k: int) -> Iterator[tuple[int, ...]]:
    if k == 1:
        yield (total,)
        return
    for first in range(total + 1):
        yield from ((first, *others) for others in _compositions(total - first, k - 1))
