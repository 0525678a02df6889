"""Draws of the local coordinates for globals of a pool."""

from dataclasses import dataclass

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.types import Array
from pymc_ngvi.marginal.effects import draw_effects
from pymc_ngvi.marginal.log_marginal import LogMarginal
from pymc_ngvi.marginal.sampling import evenly_picked

#: Numbers held at once.
HELD = 2**22
#: Draws on which candidates are judged.
_N_JUDGED = 64


@dataclass(frozen=True, eq=False)
class Conditionals:
    """The local coordinates given the globals of a pool.

    Parameters
    ----------
    quadrature : LogMarginal
        With centres that it has learned.
    g : ndarray, shape (n, n_globals)
        The pool, on which candidates are judged.
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
            common = (quadrature.terms, forest, g[part], quadrature.centres(g[part]), self._skew)
            number = of_draw[low:high] - start
            result[of_part] = draw_effects(*common, shifts[of_points], choices[of_part], number).local
        return result

    def efficiency(self) -> float:
        """Return the least effective part of the candidates of a local coordinate."""
        rng = np.random.default_rng(self.seed)
        g = self.g[np.unique(evenly_picked(self.weights, _N_JUDGED, rng.random()))]
        n_local = self.quadrature.forest.n_local
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
