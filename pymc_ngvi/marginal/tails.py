"""Coordinates in which the globals have tails that a Student t covers.

The log density of the logarithm of a scale that may be 0 falls linearly on its left: no Gaussian or Student t is near
to it. Where log m(g) is found to fall so in a coordinate, y = softplus(rate (g - corner)) / rate takes its place. It is
g itself in the bulk, and squeezes the tail into the neighbourhood of y = 0, where the density is regular when it is
continued symmetrically: a proposal for y is *folded* at 0.

A coordinate whose scale another one is the logarithm of, as the entries of a Cholesky factor are beside its diagonal,
has a funnel: it is divided by that scale first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import NamedTuple

import numpy as np

from pymc_ngvi.core.linalg import logsumexp
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array

#: Distances from the mean, in standard deviations, at which log m is measured; a Gaussian's is 8 nats below its top at
#: the first of these, and what is that far down there has no tail that matters.
_DISTANCES, _LOWEST = (4.0, 8.0, 16.0, 32.0), 8.0
#: A tail is straight if its slope is this, at most, over the one nearer to the mean: Gaussians fall ever more steeply.
_CURVED = 1.25
#: Steepest slope of a tail, over the standard deviation: a Gaussian is as steep where next to nothing is beyond.
_STEEPEST = 2.0
#: Largest logarithm of a scale that coordinates are divided by.
_FARTHEST = 200.0
#: Most coordinates with such a tail: there are 2^n ways to fold.
_MOST = 5


@stored("exact.tail")
class Tail(NamedTuple):
    """A straight tail."""

    #: Which of the globals.
    at: int
    #: Towards which end it falls.
    side: int
    #: Slope of the log density, at most 1.
    rate: float
    #: Where it begins.
    corner: float


@stored("exact.ratio")
class Ratio(NamedTuple):
    """A coordinate that is divided by the exponential of another one."""

    #: Which of the globals.
    at: int
    by: int
    #: Value of the other one where nothing changes.
    centre: float


@stored("exact.bend")
@dataclass(frozen=True)
class Bend:
    """The map between globals g and coordinates y without straight tails; ratios are taken first."""

    tails: tuple[Tail, ...] = ()
    ratios: tuple[Ratio, ...] = ()

    def forward(self, g: Array) -> Array:
        """Return y, (n, p)."""
        if not self.tails:
            return self.divided(g)
        y = np.array(self.divided(g))
        for at, side, rate, corner in self.tails:
            y[:, at] = np.logaddexp(0.0, -side * rate * (y[:, at] - corner)) / rate
        return y

    def inverse(self, y: Array) -> Array:
        """Return g for y of either sign, (n, p)."""
        if not (self.tails or self.ratios):
            return y
        g = np.array(y)
        for at, side, rate, corner in self.tails:
            v = np.maximum(rate * np.abs(y[:, at]), 1e-100)
            g[:, at] = corner - side * (v + np.log(-np.expm1(-v))) / rate
        for ratio in self.ratios:
            g[:, ratio.at] *= np.exp(_exponent(g, ratio))
        return g

    def divided(self, g: Array) -> Array:
        """Return globals after ratios are taken, (n, p)."""
        if not self.ratios:
            return g
        divided = np.array(g)
        for ratio in self.ratios:
            divided[:, ratio.at] *= np.exp(-_exponent(g, ratio))
        return divided

    def normal(self, mean: Array, cov: Array) -> tuple[Array, Array]:
        """Return mean and covariance of globals, to first order, after ratios are taken."""
        slope = np.eye(len(mean))
        for ratio in self.ratios:
            scale = np.exp(-float(_exponent(mean[None], ratio)[0]))
            slope[ratio.at, ratio.at], slope[ratio.at, ratio.by] = scale, -mean[ratio.at] * scale
        return self.divided(mean[None])[0], slope @ cov @ slope.T

    def log_density(self, of_y: Callable[[Array], Array], g: Array) -> Array:
        """Return the log density of g whose y has the log density ``of_y``, folded."""
        y = self.forward(g)
        if not self.tails:
            return of_y(y) + self.log_slope(g)
        at = [t.at for t in self.tails]
        parts = []
        for signs in self._signs:
            mirrored = y.copy()
            mirrored[:, at] *= signs
            parts.append(of_y(mirrored))
        return logsumexp(parts, axis=0) + self.log_slope(g)

    def log_slope(self, g: Array) -> Array:
        """Return log dy/dg, (n,)."""
        result = np.zeros(len(g))
        for ratio in self.ratios:
            result -= _exponent(g, ratio)
        divided = self.divided(g) if self.tails else g
        for at, side, rate, corner in self.tails:  # dy/dg is a logistic function
            result -= np.logaddexp(0.0, side * rate * (divided[:, at] - corner))
        return result

    @cached_property
    def _signs(self) -> list[Array]:
        return [np.array(s) for s in product((1.0, -1.0), repeat=len(self.tails))]


def _exponent(g: Array, ratio: Ratio) -> Array:
    return np.clip(g[:, ratio.by] - ratio.centre, -_FARTHEST, _FARTHEST)


def find_bend(
    log_marginal: Callable[[Array], Array], mean: Array, cov: Array, ratios: Sequence[tuple[int, int]]
) -> Bend:
    """Return coordinates in which a density is regular, given a Gaussian near it and which ratios are to be taken."""
    taken = tuple(Ratio(at, by, float(mean[by])) for at, by in ratios)
    mean, cov = Bend((), taken).normal(mean, cov)
    return find_tails(log_marginal, mean, np.sqrt(np.diag(cov)), taken)


def find_tails(log_marginal: Callable[[Array], Array], mean: Array, sd: Array, ratios: tuple[Ratio, ...] = ()) -> Bend:
    """Look for straight tails, one coordinate at a time, going farther out where they may be."""
    p, bend = len(mean), Bend((), ratios)

    def value(y: Array) -> Array:
        g = bend.inverse(y)
        return log_marginal(g) - bend.log_slope(g)

    at, side = np.repeat(np.arange(p), 2), np.tile([-1, 1], p)
    falls = np.empty((0, 2 * p))
    top = 0.0
    for distance in _DISTANCES:
        points = np.tile(mean, (len(at), 1))
        points[np.arange(len(at)), at] += side * distance * sd[at]
        if len(falls):
            values = value(points)
        else:
            top, *rest = value(np.concatenate([mean[None], points])).tolist()
            values = np.array(rest)
        falls = np.concatenate([falls, (top - values)[None]])
        keep = np.isfinite(falls[-1]) & (falls[0] < _LOWEST) & (falls[-1] > 0.0)
        at, side, falls = at[keep], side[keep], falls[:, keep]
        if not len(at):
            return bend
    _, near, far = (np.diff(falls, axis=0) / np.diff(_DISTANCES)[:, None]) / sd[at]
    height = falls[2] - far * 13.0 * sd[at]  # of the straight line 3 standard deviations from the mean
    is_straight = (far > 0.0) & (far < _CURVED * near)
    is_tail = is_straight & (far * sd[at] < _STEEPEST) & (height < _LOWEST)
    found: dict[int, tuple[float, Tail]] = {}
    for k in np.flatnonzero(is_tail).tolist():
        # Of two, the higher one has more of the mass.
        corner = mean[at[k]] + side[k] * sd[at[k]]
        tail = Tail(int(at[k]), int(side[k]), min(float(far[k]), 1.0), float(corner))
        if tail.at not in found or found[tail.at][0] > height[k]:
            found[tail.at] = float(height[k]), tail
    highest = sorted(found.values(), key=lambda f: (f[0], f[1].at))[:_MOST]
    return Bend(tuple(tail for _, tail in highest), ratios)
