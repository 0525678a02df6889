"""Latent variables that are Gaussian given the hyperparameters: log m in closed form, and exact draws.

Each value of the hyperparameters takes a Cholesky factor and a solution, and nothing is iterated.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.types import Array
from pymc_ngvi.density.gaussian_over import GaussianOver
from pymc_ngvi.families.matrices.sparse.precisions import Factors
from pymc_ngvi.marginal.regression import Whitening, quadratic_terms
from pymc_ngvi.nested.found import Drawn, KnownMarginal

#: Numbers of fronts, and of the predictors of all rows, in a batch; hyperparameters in it at most.
_OF_FRONTS, _OF_ROWS, _MOST = 2**22, 2**21, 256
#: Standard deviations that are computed for each term of a polynomial, by which others are predicted; the golden ratio.
_PER_TERM, _GOLDEN = 3, 0.6180339887498949


class _Fits(NamedTuple):
    """Gaussians at some of the hyperparameters that were asked for.

    Parameters
    ----------
    which : ndarray of int, shape (n,)
    mean : ndarray, shape (n, n_dim)
    factors : Factors
    log_marginal : ndarray, shape (n,)
    """

    which: NDArray[np.intp]
    mean: Array
    factors: Factors
    log_marginal: Array


class _StandardDeviations:
    """Standard deviations of latent variables: of some hyperparameters, and predicted for others.

    They are wanted for moments alone, and take longer than a factor: where that is large, and there is one at a time,
    most are predicted.

    Parameters
    ----------
    whitening : Whitening
    """

    def __init__(self, whitening: Whitening) -> None:
        self._whitening = whitening
        self._points, self._log_sds = list[Array](), list[Array]()
        self._slopes: Array | None = None
        self._lowest = self._highest = np.empty(0)

    def of(self, g: Array, factors: Factors) -> Array:
        """Return those of Gaussians, (n, n_dim), at hyperparameters (n, p)."""
        u = self._whitening.whitened(g)
        if self._slopes is not None and len(g) == 1:
            inside = np.clip(u, self._lowest, self._highest)
            return np.exp(quadratic_terms(inside) @ self._slopes)
        sd = factors.sd
        self._points += list(u)
        self._log_sds += list(np.log(sd))
        terms = quadratic_terms(np.array(self._points))
        if len(terms) >= _PER_TERM * terms.shape[1]:
            self._slopes = np.linalg.lstsq(terms, np.array(self._log_sds), rcond=None)[0]
            self._lowest, self._highest = np.min(self._points, axis=0), np.max(self._points, axis=0)
        return sd


class GaussianMarginal:
    """Evaluates log m, and draws; see `Marginal`.

    Parameters
    ----------
    over : GaussianOver
    """

    is_exact = True

    def __init__(self, over: GaussianOver) -> None:
        self.known: list[KnownMarginal] = []
        self.scale, self.records = np.ones(over.n_given), True
        self._over, self._precisions = over, over.precisions
        self._size = max(1, min(_OF_FRONTS // self._precisions.fronts.n_fronts, _OF_ROWS // over.n_rows, _MOST))
        self.n_fits = 0

    @property
    def n_dim(self) -> int:
        """Number of latent variables."""
        return len(self._over.x)

    def __call__(self, g: Array) -> Array:
        """Return log m at some values, (n,) from (n, p), -inf where there is no fit."""
        result = np.full(len(g), -np.inf)
        for fits in self._fits(g):
            result[fits.which] = fits.log_marginal
        if self.records:
            self.known += [KnownMarginal(g[k], float(result[k])) for k in np.flatnonzero(np.isfinite(result))]
        return result

    def variance(self) -> float:
        """Return 0: weights are those of the hyperparameters."""
        return 0.0

    def doubt(self) -> float:
        """Return 0: ELBOs lack nothing."""
        return 0.0

    def begin_round(self, whitening: Whitening) -> None:
        """Take the coordinates in which standard deviations are predicted."""
        self._sds = _StandardDeviations(whitening)

    def drawn(self, g: Array, base: Array, rng: np.random.Generator, is_deep: NDArray[np.bool_]) -> list[Drawn | None]:
        """Return the Gaussians at values of the hyperparameters, and draws; see `Marginal`."""
        result: list[Drawn | None] = [None] * len(g)
        spread = np.argsort((np.arange(len(g)) * _GOLDEN) % 1.0)  # neighbours, which follow each other, far apart
        nothing = np.zeros(base.shape[1])
        for fits in self._fits(g[spread]):
            which = spread[fits.which]
            normals = np.ascontiguousarray(np.swapaxes(base[which], 1, 2))
            x = np.swapaxes(fits.mean[:, :, None] + fits.factors.solve(normals, transposed=True), 1, 2)
            sd = self._sds.of(g[which], fits.factors)
            for i, k in enumerate(which.tolist()):
                value = float(fits.log_marginal[i])
                if not np.isfinite(value):
                    continue
                result[k] = Drawn(value, fits.mean[i], sd[i], x[i], np.full(base.shape[1], value), nothing)
        return result

    def _fits(self, g: Array) -> Iterator[_Fits]:
        for start in range(0, len(g), self._size):
            part = g[start : start + self._size]
            self.n_fits += len(part)
            found = self._over.at(part)
            there = np.isfinite(found.grad).all(axis=1) & np.isfinite(found.precision).all(axis=1)
            if not there.any():
                continue
            factors, ok = self._precisions.factored(found.precision[there])
            if factors is None:
                continue
            which = np.flatnonzero(there)[ok]
            mean = self._over.x + factors.times_covariance(found.grad[which])
            # The ELBO of the Gaussian: its entropy, and the mean of log p, which falls from the mode by d / 2.
            value = self._over.logp(part[which], mean[:, None])[:, 0] + factors.entropy - 0.5 * self.n_dim
            yield _Fits(start + which, mean, factors, np.where(np.isfinite(value), value, -np.inf))
