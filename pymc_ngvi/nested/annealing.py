"""Many hyperparameters: draws on their way from a wide density to the posterior, of which a proposal is learned.

In dozens of dimensions draws of a first guess say next to nothing of where the posterior is. Sequential Monte Carlo
[1]_ goes there by intermediate densities: at each, draws are weighted, repeated by weight, and moved by steps that
leave it as it is. Steps are those of an autoregression of order one in the normals of a map that is fitted on the way;
a density near to that of the map accepts them in any dimension [2]_. They take no gradient.

What comes of it is a proposal, not the posterior: that is left to weights.

References
----------
.. [1] P. Del Moral, A. Doucet, A. Jasra (2006). Sequential Monte Carlo samplers. Journal of the Royal Statistical
   Society: Series B 68(3). https://doi.org/10.1111/j.1467-9868.2006.00553.x
.. [2] S. L. Cotter, G. O. Roberts, A. M. Stuart, D. White (2013). MCMC methods for functions: modifying old algorithms
   to make them faster. Statistical Science 28(3). https://doi.org/10.1214/13-STS421
"""

from collections.abc import Callable

import numpy as np

from pymc_ngvi.core.linalg import logsumexp
from pymc_ngvi.core.refusal import Reason
from pymc_ngvi.core.types import Array
from pymc_ngvi.marginal.fitting import Hopeless
from pymc_ngvi.marginal.proposals import effective_size
from pymc_ngvi.marginal.sampling import evenly_picked
from pymc_ngvi.nested.margins import Margins
from pymc_ngvi.nested.mode import LatentMode

#: Draws, and by how much wider than the curvature at a mode they begin.
_N_DRAWS, _WIDER = 400, 2.0
#: Part of the draws that weights of one step leave effective; steps at most.
_LEFT, _MOST = 0.5, 40
#: Sizes of moves, in turn, as parts of the one that is adapted; acceptance that it is adapted to.
_SIZES, _ACCEPTED = (1.0, 0.35), 0.3
#: Moves at the posterior after which a map is fitted, and of how many of the last ones' draws.
_AFTER, _KEPT = 6, 8
#: Smallest and largest size; halvings that find a step.
_LIMITS, _HALVINGS = (0.02, 1.0), 40

type Function = Callable[[Array], Array]


class Annealing:
    """Draws on their way.

    Parameters
    ----------
    function : callable
        The log density: from points, (n, p), to values, (n,), -inf where there is none.
    mode : LatentMode
        Where to begin.
    rng : numpy.random.Generator
    """

    def __init__(self, function: Function, mode: LatentMode, rng: np.random.Generator) -> None:
        self._function, self._rng = function, rng
        self._begin = self._map = Margins.of_gaussian(mode.at, _WIDER**2 * mode.cov)
        self._g = self._begin.draws(_N_DRAWS, rng)
        self._value, self._first = self._values(self._g), self._begin.log_density(self._g)
        self._at, self._size = 0.0, 1.0
        self._seen: list[Array] = []

    def go(self) -> None:
        """Go to the posterior.

        Raises
        ------
        Hopeless
        """
        for _ in range(_MOST):
            self._step()
            self._move()
            if self._at == 1.0:
                return
        said = f"a way of {_MOST} steps to the posterior of {self._g.shape[1]} hyperparameters does not end there"
        raise Hopeless(Reason.HOPELESS, said)

    def learned(self) -> Margins:
        """Move at the posterior, and return what is fitted to the draws seen there."""
        for _ in range(_AFTER):
            self._move()
            self._seen.append(self._g.copy())
        some = np.concatenate(self._seen[-_KEPT:])
        self._map = Margins.fitted(some, np.full(len(some), 1.0 / len(some)))
        return self._map

    def _values(self, g: Array) -> Array:
        values = self._function(g)
        return np.where(np.isfinite(values), values, -np.inf)

    def _step(self) -> None:
        """Go on to a density at which weights leave a part of the draws effective, fit the map, and draw by weight."""
        ratio, n = self._value - self._first, len(self._g)
        if not np.isfinite(ratio).any():
            raise Hopeless(Reason.HOPELESS, "log m is not finite at draws about its mode")
        low, high = 0.0, 1.0 - self._at
        if effective_size(high * ratio) < _LEFT * n:
            for _ in range(_HALVINGS):
                middle = 0.5 * (low + high)
                low, high = (middle, high) if effective_size(middle * ratio) > _LEFT * n else (low, middle)
        self._at = 1.0 if high == 1.0 - self._at else self._at + high
        weights = np.exp(high * ratio - logsumexp(high * ratio))
        self._map = Margins.fitted(self._g, weights)
        rows = evenly_picked(weights, n, float(self._rng.random()))
        self._g, self._value, self._first = self._g[rows], self._value[rows], self._first[rows]

    def _move(self) -> None:
        """Move all draws, far and near."""
        log_target = self._log_target(self._g, self._value, self._first)
        z = self._map.forward(self._g)
        for part in _SIZES:
            size = part * self._size
            to = np.sqrt(1.0 - size**2) * z + size * self._rng.standard_normal(z.shape)
            g = self._map.inverse(to)
            value, first = self._values(g), self._begin.log_density(g)
            new = self._log_target(g, value, first)
            accepted = np.log(self._rng.random(len(g))) < new - log_target
            z[accepted], log_target[accepted] = to[accepted], new[accepted]
            self._g[accepted], self._value[accepted] = g[accepted], value[accepted]
            self._first[accepted] = first[accepted]
            if part == 1.0:
                self._size = float(np.clip(self._size * np.exp(accepted.mean() - _ACCEPTED), *_LIMITS))

    def _log_target(self, g: Array, value: Array, first: Array) -> Array:
        """Return the log density of where draws are, over that of the normals of the map."""
        z = self._map.forward(g)
        log_map = self._map.log_slope(g) - 0.5 * (z**2).sum(axis=1)
        with np.errstate(invalid="ignore"):
            result: Array = (1.0 - self._at) * first + self._at * value - log_map
        return np.where(np.isfinite(result), result, -np.inf)
