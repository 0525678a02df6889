"""Gauss-Hermite nodes of a path, and the limits within which few of them can be trusted."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from pymc_ngvi.core.linalg import logsumexp
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array

_LOG_2PI = float(np.log(2.0 * np.pi))
#: Numbers of nodes in each coordinate that are tried: of a path of several, as large a part, up to a few hundred nodes
#: in all. Two say nothing of a variance.
_LADDER = (3, 4, 5, 7, 9, 13, 19, 27, 41, 61, 121, 241)
#: Nodes of a line from which on they are evenly spaced on the scale of asinh, and how far they reach, in standard
#: deviations: to other modes, and into tails. About one of two modes, they find the other one up to 13 of its standard
#: deviations away: log m of pairs of a t with 2 df, 13 of their scales apart, is 0.01 nats off; it was 3.
WIDE, _REACH = 61, 50.0


@stored("exact.rule")
@dataclass(frozen=True)
class PathRule:
    """A product rule on the standardised coordinates of a path: the integral of h is the sum of exp(log_weight) h."""

    #: In each coordinate.
    n_nodes: int
    #: Coordinates of the longest path.
    n_levels: int

    @property
    def line(self) -> Array:
        """Nodes of one coordinate, (n_nodes,)."""
        return _line(self.n_nodes)[0]

    @property
    def log_weight(self) -> Array:
        """Log weights of one coordinate, (n_nodes,): of few, those of Gauss and Hermite over the standard normal."""
        return _line(self.n_nodes)[1]

    @property
    def nodes(self) -> Array:
        """All nodes, (n_nodes ** n_levels, n_levels); the coordinate of the root changes slowest."""
        return _products(self.n_nodes, self.n_levels)

    @property
    def powers(self) -> Array:
        """Of all nodes: coordinates, products of two, and the cube of the last, (n_levels (n_levels + 1) + 1, n)."""
        return _powers(self.n_nodes, self.n_levels)

    @property
    def limits(self) -> tuple[float, float, float]:
        """How far the mean of z may be from 0, and in which interval its variance has to lie."""
        far = min(self.n_nodes - 1, 6) / 8.0
        return far, 1.0 / (1.0 + 1.4 * far), 1.0 + 1.4 * far

    @property
    def sure(self) -> "PathRule":
        """The same, or the middle one of those that are tried if that has more nodes: one whose centres are good."""
        rules = references(self.n_levels)
        return max(self, rules[len(rules) // 2], key=lambda one: one.n_nodes)


@lru_cache(maxsize=64)
def _products(n_nodes: int, n_levels: int) -> Array:
    mesh = np.meshgrid(*[_line(n_nodes)[0]] * n_levels, indexing="ij")
    return np.stack(mesh, axis=-1).reshape(-1, n_levels)


@lru_cache(maxsize=64)
def _powers(n_nodes: int, n_levels: int) -> Array:
    z = _products(n_nodes, n_levels)
    return np.concatenate([z.T, (z[:, :, None] * z[:, None]).reshape(len(z), -1).T, z[None, :, -1] ** 3])


@lru_cache(maxsize=64)
def _line(n_nodes: int) -> tuple[Array, Array]:
    if n_nodes >= WIDE:
        t, step = np.linspace(-np.arcsinh(_REACH), np.arcsinh(_REACH), n_nodes, retstep=True)
        return np.sinh(t), np.log(step * np.cosh(t))
    x, w = np.polynomial.hermite_e.hermegauss(n_nodes)
    log_weight = np.log(w)
    return x, log_weight - logsumexp(log_weight) + 0.5 * x**2 + 0.5 * _LOG_2PI


def references(n_levels: int) -> list[PathRule]:
    """Return the rules that are tried, the smallest first."""
    return [PathRule(n, n_levels) for n in _LADDER[: len(_LADDER) // n_levels]]
