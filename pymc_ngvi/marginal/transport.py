"""Maps from standard normal numbers to standardised local coordinates, given the globals.

About its centre and in units of its conditional standard deviation, the density of a group effect changes little and
smoothly with the globals. So does the map that turns a standard normal number into a draw of it: a polynomial of that
number, whose coefficients are linear in the globals. It is found at a few of these, and serves thousands of draws that
take no evaluation of the model. Whether it is right is measured at other globals.
"""

from dataclasses import dataclass

import numpy as np

from numpy.typing import NDArray
from scipy.special import ndtri

from pymc_ngvi.core.quantiles import quantiles
from pymc_ngvi.core.types import Array
from pymc_ngvi.marginal.centres import Centres
from pymc_ngvi.marginal.forest import Forest
from pymc_ngvi.marginal.parts import TermsOfBlocks
from pymc_ngvi.marginal.regression import Whitening

#: Points at which log densities are evaluated, degree of the polynomials through these, cells of their integrals.
_N_POINTS, _DEGREE, _N_CELLS = 13, 8, 40
#: Degree of the maps; normal numbers are cut off there.
_DEGREE_OF_MAP, _FARTHEST = 8, 4.5
#: Globals at which maps are found, at least, and for each of their coefficients.
_LEAST, _PER_FEATURE = 32, 2
#: Ridge of the regression on the globals, for each draw of these; numbers in a temporary.
_RIDGE, _HELD = 1e-3, 2**18
#: Log densities below their maximum that are told from 0.
_LOWEST = -200.0
_LOG_ROOT_2PI = 0.5 * float(np.log(2.0 * np.pi))


@dataclass(frozen=True, eq=False)
class Transport:
    """A map for each local coordinate: z = sum over i of a_i(g) w^i, w standard normal.

    Parameters
    ----------
    whitening : Whitening
    coefficients : ndarray, shape (n_features, degree + 1, n_local)
        Of each power of w, for each of the features that are linear in the globals.
    """

    whitening: Whitening
    coefficients: Array

    def at(self, g: Array, w: Array) -> Array:
        """Return standardised coordinates, (n, k, n_local), for normal numbers of that shape and globals (n, p)."""
        a, x = self._of(g), np.clip(w, -_FARTHEST, _FARTHEST)
        z: Array = a[:, -1, None] * x
        for power in reversed(range(1, a.shape[1] - 1)):
            z += a[:, power, None]
            z *= x
        z += a[:, 0, None]
        return z

    def log_weights(self, g: Array, w: Array) -> Array:
        """Return minus the log density that the coordinates of `at` have; NaN where the map does not rise."""
        a, x = self._of(g), np.clip(w, -_FARTHEST, _FARTHEST)
        slope = np.zeros_like(x)
        for power in reversed(range(1, a.shape[1])):
            slope = slope * x + power * a[:, power, None]
        with np.errstate(invalid="ignore", divide="ignore"):
            result: Array = np.log(slope) + 0.5 * x**2 + _LOG_ROOT_2PI
        return result

    def _of(self, g: Array) -> Array:
        n_features, n_powers, n_local = self.coefficients.shape
        flat = self.whitening.linear_features(g) @ self.coefficients.reshape(n_features, -1)
        return flat.reshape(len(g), n_powers, n_local)


def mapped_effects(
    transport: Transport, g: Array, centres: Centres, uniform: Array, of_draw: NDArray[np.intp]
) -> Array:
    """Return local coordinates, (n, n_local), of uniform numbers of that shape, for globals ``g[of_draw]``."""
    local = np.empty(uniform.shape)
    size = max(1, _HELD // uniform.shape[1])
    for start in range(0, len(local), size):
        rows = slice(start, start + size)
        at = of_draw[rows]
        z = transport.at(g[at], ndtri(uniform[rows])[:, None])[:, 0]
        local[rows] = centres.mean[at] + centres.factor[at, :, 0] * z
    return local


def n_needed(whitening: Whitening) -> int:
    """Return at how many draws of the globals maps are found."""
    return max(_LEAST, _PER_FEATURE * whitening.n_linear)


def fit_transport(
    terms: TermsOfBlocks, forest: Forest, whitening: Whitening, g: Array, centres: Centres, low: Array, high: Array
) -> Transport | None:
    """Find the maps, for trees of one level.

    Parameters
    ----------
    terms : SplitDensity
    forest : Forest
    whitening : Whitening
    g : ndarray, shape (n, n_globals)
        Draws of the posterior.
    centres : Centres
        Of each of these.
    low, high : ndarray, shape (n_local,)
        Where all but a few draws of standardised coordinates are.

    Returns
    -------
    Transport or None
        None where log p is not finite at all of the points.
    """
    x = np.linspace(-1.0, 1.0, _N_POINTS)
    powers = x[:, None] ** np.arange(_DEGREE + 1)
    # Errors count most where draws are, but in the tails, too.
    root = np.exp(-6.0 * x**2)[:, None]
    to_powers = (np.linalg.pinv(root * powers) * root.T)[1:]
    features = whitening.linear_features(g)
    ridge = _RIDGE * len(g) * np.eye(features.shape[1])
    ridge[0, 0] = 0.0
    to_features = np.linalg.solve(features.T @ features + ridge, features.T)
    middle, half = 0.5 * (low + high), 0.5 * (high - low)
    z = middle + half * x[:, None]
    coefficients = np.zeros((features.shape[1], _DEGREE_OF_MAP + 1, forest.n_local))
    size = max(1, min(terms.chunk(_N_POINTS), _HELD // (_N_CELLS * forest.n_local)))
    for start in range(0, len(g), size):
        rows = slice(start, start + size)
        _, values = terms.terms(g[rows], centres[rows].at_own(np.broadcast_to(z, (len(g[rows]), *z.shape)), forest))
        if not np.isfinite(values).all():
            return None
        values -= values[:, _N_POINTS // 2, None]  # constants cancel, but large ones cost digits
        own = _maps(to_powers @ values)
        own *= half
        own[:, 0] += middle
        coefficients += np.einsum("fn,nkc->fkc", to_features[:, rows], own)
    return Transport(whitening, coefficients)


def _maps(a: Array) -> Array:
    """Return the coefficients of maps, (n, degree + 1, n_local), from log densities sum of a_i x^i, x from -1 to 1."""
    x, step = np.linspace(-1.0, 1.0, _N_CELLS + 1, retstep=True)
    order = np.arange(1, _DEGREE + 1)
    log_density = (x[:, None] ** order) @ a
    density = np.exp(np.maximum(log_density - log_density.max(axis=1, keepdims=True), _LOWEST))
    slope = ((order * x[:, None] ** (order - 1)) @ a) * density
    # Of a cubic through values and slopes at both ends.
    cells = 0.5 * step * (density[:, 1:] + density[:, :-1]) + step**2 / 12.0 * (slope[:, :-1] - slope[:, 1:])
    cells = np.maximum(cells, np.exp(_LOWEST) * step)
    nodes = np.cos((np.arange(_DEGREE_OF_MAP + 1) + 0.5) * np.pi / (_DEGREE_OF_MAP + 1)) * _FARTHEST
    grid_first = (np.moveaxis(of, 1, 0) for of in (density[:, 1:-1], cells))
    at_nodes = np.moveaxis(quantiles(nodes, x[1:-1, None, None], *grid_first, goes_on=True), 0, 1)
    return np.linalg.solve(nodes[:, None] ** np.arange(_DEGREE_OF_MAP + 1), at_nodes)
