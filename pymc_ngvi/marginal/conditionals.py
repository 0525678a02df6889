"""Draws of the local coordinates for globals of a pool, by a surrogate where that does as well as the model."""

import functools

from dataclasses import dataclass

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.types import Array
from pymc_ngvi.marginal.effects import N_CANDIDATES, SplitNormal, candidate_points, draw_effects, weights_of
from pymc_ngvi.marginal.log_marginal import LogMarginal
from pymc_ngvi.marginal.regression import Whitening
from pymc_ngvi.marginal.sampling import evenly_picked
from pymc_ngvi.marginal.surrogate import Surrogate, fit_surrogate, n_needed

#: Numbers held at once.
HELD = 2**22
#: Draws on which the candidates are judged.
_N_JUDGED = 64
#: Total variation distance between weights of candidates by a surrogate and by the model: of a coordinate, in the mean.
_MOST_APART, _MOST_APART_IN_MEAN = 0.02, 0.005


@dataclass(frozen=True, eq=False)
class Conditionals:
    """The local coordinates given the globals of a pool.

    Parameters
    ----------
    quadrature : LogMarginal
        With centres that it has learned.
    g : ndarray, shape (n, n_globals)
        The pool, on which a surrogate is made and judged.
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

    @property
    def _whitening(self) -> Whitening:
        assert self.quadrature.whitening is not None
        return self.quadrature.whitening

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
            of_part = order[low:high]
            result[of_part] = draw_effects(
                quadrature.terms,
                forest,
                g[part],
                quadrature.centres(g[part]),
                self._skew,
                shifts[order[first[start : start + len(part)]]],
                choices[of_part],
                of_draw[low:high] - start,
                self._surrogate,
            ).local
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
    def _surrogate(self) -> Surrogate | None:
        """Stands for conditional densities where it gives candidates the weights that the model does."""
        quadrature, forest = self.quadrature, self.quadrature.forest
        n = n_needed(self._whitening)
        if quadrature.base is None or forest.n_levels > 1 or n is None:
            return None
        proposal = SplitNormal.of_skewness(self._skew)
        g = self._evenly(n, 0.5)
        surrogate = fit_surrogate(quadrature.terms, forest, self._whitening, g, quadrature.centres(g), *proposal.range)
        if surrogate is None:
            return None
        apart = self._distance(surrogate, proposal)
        return surrogate if apart.max() < _MOST_APART and apart.mean() < _MOST_APART_IN_MEAN else None

    def _distance(self, surrogate: Surrogate, proposal: SplitNormal) -> Array:
        """Return how far weights of candidates are from those of the model, (n_local,), at other globals."""
        quadrature, forest = self.quadrature, self.quadrature.forest
        g = self._evenly(_N_JUDGED, 0.25)
        shifts = np.random.default_rng(self.seed).random((len(g), forest.n_local))
        z, total = candidate_points(proposal, N_CANDIDATES[1], shifts, surrogate), np.zeros(forest.n_local)
        size = quadrature.terms.chunk(z.shape[1])
        for start in range(0, len(g), size):
            at, near = g[start : start + size], z[start : start + size]
            common = (quadrature.terms, forest, at, quadrature.centres(at), near, proposal)
            [exact], [approximate] = weights_of(*common), weights_of(*common, surrogate)
            total += np.abs(exact - approximate).sum(axis=(0, 1, 2))
        return 0.5 * total / len(g)

    def _evenly(self, n: int, at: float) -> Array:
        """Return globals of the pool, as evenly by weight as can be, (at most n, n_globals)."""
        return self.g[np.unique(evenly_picked(self.weights, n, at))]
