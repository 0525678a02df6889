"""Conditional densities of standardised local coordinates as polynomials, whose coefficients follow the globals.

About its centre and in units of its conditional standard deviation, the log density of a group effect changes little
and smoothly with the globals. Where polynomials reproduce it, thousands of draws take no more evaluations of the model
than hundreds do. Whether they do is measured at other globals.
"""

from dataclasses import dataclass

import numpy as np

from pymc_ngvi.core.types import Array
from pymc_ngvi.marginal.centres import Centres
from pymc_ngvi.marginal.forest import Forest
from pymc_ngvi.marginal.parts import TermsOfBlocks
from pymc_ngvi.marginal.regression import Whitening

#: Points that a polynomial is fitted to, and its degree.
_N_POINTS, _DEGREE = 13, 8
#: Globals at which it is fitted, at least and for each feature of them; and at most.
_LEAST, _PER_FEATURE, _MOST = 96, 3, 240
#: Ridge of the regression on the globals, for each draw of these.
_RIDGE = 1e-3


@dataclass(frozen=True, eq=False)
class Surrogate:
    """The logarithm of the conditional density of each local coordinate, but for a constant.

    Parameters
    ----------
    whitening : Whitening
    coefficients : ndarray, shape (n_features, degree, n_local)
        Of x, x^2, ... for each feature of the globals, with z = middle + half x.
    middle, half : ndarray, shape (n_local,)
        Of the range of the standardised coordinates z.
    """

    whitening: Whitening
    coefficients: Array
    middle: Array
    half: Array

    def log_density(self, g: Array, z: Array) -> Array:
        """Return the values at standardised coordinates z, (n, k, n_local), in range, for globals g, (n, n_globals)."""
        n_features, degree, n_local = self.coefficients.shape
        features = self.whitening.features(g)
        a = (features @ self.coefficients.reshape(n_features, -1)).reshape(len(g), degree, n_local)
        x = (z - self.middle) / self.half
        result: Array = a[:, -1, None] * x
        for power in reversed(range(degree - 1)):
            result += a[:, power, None]
            result *= x
        return result


def n_needed(whitening: Whitening) -> int | None:
    """Return at how many draws of the globals a surrogate is fitted; None where these would be too many."""
    n = max(_LEAST, _PER_FEATURE * whitening.n_features)
    return n if n <= _MOST else None


def fit_surrogate(
    terms: TermsOfBlocks, forest: Forest, whitening: Whitening, g: Array, centres: Centres, low: Array, high: Array
) -> Surrogate | None:
    """Fit the polynomials, for trees of one level.

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
        Range of the standardised coordinates.

    Returns
    -------
    Surrogate or None
        None where log p is not finite at all of the points.
    """
    x = np.linspace(-1.0, 1.0, _N_POINTS)
    powers = x[:, None] ** np.arange(_DEGREE + 1)
    # Errors count most where draws are, but in the tails, too.
    root = np.exp(-6.0 * x**2)[:, None]
    to_powers = (np.linalg.pinv(root * powers) * root.T)[1:]
    features = whitening.features(g)
    ridge = _RIDGE * len(g) * np.eye(features.shape[1])
    ridge[0, 0] = 0.0
    to_features = np.linalg.solve(features.T @ features + ridge, features.T)
    middle, half = 0.5 * (low + high), 0.5 * (high - low)
    z = middle + half * x[:, None]
    size = terms.chunk(_N_POINTS)
    coefficients = np.zeros((features.shape[1], _DEGREE, forest.n_local))
    for start in range(0, len(g), size):
        rows = slice(start, start + size)
        _, values = terms.terms(g[rows], centres[rows].at_own(np.broadcast_to(z, (len(g[rows]), *z.shape)), forest))
        if not np.isfinite(values).all():
            return None
        values -= values[:, _N_POINTS // 2, None]  # constants cancel, but large ones cost digits
        own = np.einsum("kj,njc->nkc", to_powers, values)
        coefficients += np.einsum("fn,nkc->fkc", to_features[:, rows], own)
    return Surrogate(whitening, coefficients, middle, half)
