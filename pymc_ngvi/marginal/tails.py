"""Coordinates in which the globals have tails that a Student t covers.

The log density of the logarithm of a scale that may be 0 falls linearly on its left: no Gaussian or Student t is near
to it. Where log m(g) is found to fall so in a coordinate, y = softplus(rate (g - corner)) / rate takes its place. It is
g itself in the bulk, and squeezes the tail into the neighbourhood of y = 0, where the density is regular when it is
continued symmetrically: a proposal for y is *folded* at 0.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import NamedTuple

import numpy as np

from pymc_ngvi.core.linalg import logsumexp
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array

#: Distances from the mean, in standard deviations, at which slopes are measured.
_DISTANCES = np.array([8.0, 16.0, 32.0])
#: A tail is straight if its slope is this, at most, over the one nearer to the mean; steepest slope of one, over the
#: standard deviation; nats below the top, at most, of the straight line 3 standard deviations from the mean.
_CURVED, _STEEPEST, _LOWEST = 1.25, 1.5, 8.0
#: Most coordinates with such a tail: there are 2^n ways to fold.
_MOST = 5


@stored("exact.tail")
class Tail(NamedTuple):
    """A straight tail.

    Parameters
    ----------
    at : int
        Which of the globals.
    side : {-1, 1}
        Towards which end it falls.
    rate : float
        Slope of the log density, at most 1.
    corner : float
        Where it begins.
    """

    at: int
    side: int
    rate: float
    corner: float


@stored("exact.bend")
@dataclass(frozen=True)
class Bend:
    """The map between globals g and coordinates y without straight tails."""

    tails: tuple[Tail, ...] = ()

    def forward(self, g: Array) -> Array:
        """Return y, (n, p)."""
        if not self.tails:
            return g
        y = np.array(g)
        for at, side, rate, corner in self.tails:
            y[:, at] = np.logaddexp(0.0, -side * rate * (g[:, at] - corner)) / rate
        return y

    def inverse(self, y: Array) -> Array:
        """Return g for y of either sign, (n, p)."""
        if not self.tails:
            return y
        g = np.array(y)
        for at, side, rate, corner in self.tails:
            v = np.maximum(rate * np.abs(y[:, at]), 1e-100)
            g[:, at] = corner - side * (v + np.log(-np.expm1(-v))) / rate
        return g

    def log_density(self, of_y: Callable[[Array], Array], g: Array) -> Array:
        """Return the log density of g whose y has the log density ``of_y``, folded."""
        if not self.tails:
            return of_y(g)
        y = self.forward(g)
        at = [t.at for t in self.tails]
        parts = []
        for signs in self._signs:
            mirrored = y.copy()
            mirrored[:, at] *= signs
            parts.append(of_y(mirrored))
        folded: Array = logsumexp(parts, axis=0) + self.log_slope(g)
        return folded

    def log_slope(self, g: Array) -> Array:
        """Return log dy/dg, (n,)."""
        if not self.tails:
            return np.zeros(len(g))
        # dy/dg is a logistic function.
        slopes = [-np.logaddexp(0.0, t.side * t.rate * (g[:, t.at] - t.corner)) for t in self.tails]
        result: Array = np.sum(slopes, axis=0)
        return result

    @cached_property
    def _signs(self) -> list[Array]:
        return [np.array(s) for s in product((1.0, -1.0), repeat=len(self.tails))]


def find_tails(log_marginal: Callable[[Array], Array], mean: Array, sd: Array) -> Bend:
    """Look for straight tails far from the mean, one coordinate at a time.

    Parameters
    ----------
    log_marginal : callable
        From globals, (n, p), to log m, (n,).
    mean, sd : ndarray, shape (p,)
    """
    p = len(mean)
    points = np.tile(mean, (1 + 6 * p, 1))
    for at in range(p):
        for i, side in enumerate((-1, 1)):
            first = 1 + 6 * at + 3 * i
            points[first : first + 3, at] += side * _DISTANCES * sd[at]
    values = log_marginal(points)
    found: dict[int, tuple[float, Tail]] = {}
    for at in range(p):
        for i, side in enumerate((-1, 1)):
            first = 1 + 6 * at + 3 * i
            measured = _measured(values[0], values[first : first + 3], sd[at])
            if measured is None:
                continue
            slope, height = measured
            if at not in found or found[at][1].rate > slope:
                corner = float(mean[at] + side * sd[at])
                found[at] = height, Tail(at, side, min(slope, 1.0), corner)
    highest = sorted(found.values(), key=lambda f: (-f[0], f[1].at))[:_MOST]
    return Bend(tuple(tail for _, tail in highest))


def _measured(top: float, values: Array, sd: float) -> tuple[float, float] | None:
    """Return the slope of a straight tail and its height near the mean; None where there is none that matters."""
    if not (np.isfinite(values).all() and np.isfinite(top)):
        return None
    near, far = (values[0] - values[1]) / (8.0 * sd), (values[1] - values[2]) / (16.0 * sd)
    height = values[1] + far * 13.0 * sd - top
    straight = 0.0 < far < _STEEPEST / sd and far < _CURVED * max(near, 1e-9)
    return (float(far), float(height)) if straight and height > -_LOWEST else None
