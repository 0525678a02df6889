"""Draws of the local coordinates for globals of a pool, by maps of normal numbers where these do as well."""

import functools

from dataclasses import dataclass

import numpy as np

from numpy.typing import NDArray
from scipy.special import ndtri

from pymc_ngvi.core.types import Array
from pymc_ngvi.marginal.effects import N_CANDIDATES, SplitNormal, draw_effects, spaced, weights_of
from pymc_ngvi.marginal.log_marginal import LogMarginal
from pymc_ngvi.marginal.sampling import evenly_picked
from pymc_ngvi.marginal.transport import Transport, fit_transport, mapped_effects, n_needed

#: Numbers held at once.
HELD = 2**22
#: Draws on which candidates and maps are judged.
_N_JUDGED = 64
#: Total variation distance between draws by maps and by the model, at most: of a coordinate, beyond
#: which the model gives its draws; and in the mean of the others.
_MOST_APART, _MOST_APART_IN_MEAN = 0.02, 0.005


@dataclass(frozen=True, eq=False)
class Conditionals:
    """The local coordinates given the globals of a pool.

    Parameters
    ----------
    quadrature : LogMarginal
        With centres that it has learned.
    g : ndarray, shape (n, n_globals)
        The pool, on which maps are made and judged.
    weights : ndarray, shape (n,)
        Of the pool; they add up to 1.
    seed : int
    """

    quadrature: LogMarginal
    g: Array
    weights: Array
    seed: int

    @property
    def _skew(self) -> Array:
        assert self.quadrature.skew is not None
        return self.quadrature.skew

    def draw(self, g: Array, rows: NDArray[np.intp], shifts: Array, choices: Array) -> Array:
        """Return local coordinates for some rows of ``g``, (n, n_local), from uniform numbers of that shape."""
        quadrature, forest = self.quadrature, self.quadrature.forest
        order = np.argsort(rows, kind="stable")
        points, first, of_draw = np.unique(rows[order], return_index=True, return_inverse=True)
        result = np.empty((len(rows), forest.n_local))
        # Few points at a time: their centres take as much memory as the draws.
        size = max(1, HELD // (forest.n_local * (1 + forest.n_levels)))
        for start in range(0, len(points), size):
            part = points[start : start + size]
            low, high = np.searchsorted(of_draw, [start, start + len(part)])
            of_part, of_points = order[low:high], order[first[start : start + len(part)]]
            centres, number, mapped = quadrature.centres(g[part]), of_draw[low:high] - start, None
            if self._maps is not None:
                transport, rough = self._maps
                local = mapped_effects(transport, g[part], centres, choices[of_part], number)
                mapped = local, rough
            common = (quadrature.terms, forest, g[part], centres, self._skew)
            result[of_part] = draw_effects(*common, shifts[of_points], choices[of_part], number, mapped).local
        return result

    def efficiency(self) -> float:
        """Return the least effective part of the candidates of a local coordinate."""
        rng = np.random.default_rng(self.seed)
        g, n_local = self._evenly(_N_JUDGED, rng.random()), self.quadrature.forest.n_local
        drawn = draw_effects(
            self.quadrature.terms,
            self.quadrature.forest,
            g,
            self.quadrature.centres(g),
            self._skew,
            rng.random((len(g), n_local)),
            rng.random((len(g), n_local)),
            np.arange(len(g)),
        )
        return float(drawn.efficiency.min())

    @functools.cached_property
    def _maps(self) -> tuple[Transport, NDArray[np.bool_]] | None:
        """Maps that give the conditional densities, and of which coordinates they do not; None where they are no use.

        Trees of several levels have none: a map of an effect would depend on the effects above it.
        """
        quadrature, forest = self.quadrature, self.quadrature.forest
        whitening = quadrature.whitening
        if quadrature.base is None or whitening is None or forest.n_levels > 1:
            return None
        g = self._evenly(n_needed(whitening), 0.5)
        of_proposals = SplitNormal.of_skewness(self._skew).range
        transport = fit_transport(quadrature.terms, forest, whitening, g, quadrature.centres(g), *of_proposals)
        if transport is None:
            return None
        apart = self._distance(transport)
        rough = ~(apart < _MOST_APART)
        return None if rough.all() or apart[~rough].mean() > _MOST_APART_IN_MEAN else (transport, rough)

    def _distance(self, transport: Transport) -> Array:
        """Return the total variation distance between draws by maps and by the model, (n_local,), at other globals."""
        quadrature, forest = self.quadrature, self.quadrature.forest
        g, k = self._evenly(_N_JUDGED, 0.25), N_CANDIDATES[1]
        shifts = np.random.default_rng(self.seed).random((len(g), forest.n_local))
        centres, w = quadrature.centres(g), ndtri(spaced(k, shifts))
        z, log_weight = transport.at(g, w), transport.log_weights(g, w)
        plan, total = quadrature.terms.plan(forest, len(g), k), np.zeros(forest.n_local)
        for start in range(0, len(g), plan.size):
            rows = slice(start, start + plan.size)
            for part in plan.parts:
                near, at = centres[rows].of(part.places, 1), (rows, slice(None), part.places)
                [weights] = weights_of(part, g[rows], near, z[at], log_weight[at])
                total[part.places] += np.abs(k * weights[:, 0] - 1.0).mean(axis=1).sum(axis=0)
        return 0.5 * total / len(g)

    def _evenly(self, n: int, at: float) -> Array:
        """Return globals of the pool, as evenly by weight as can be, (at most n, n_globals)."""
        return self.g[np.unique(evenly_picked(self.weights, n, at))]
