"""A Gaussian seen through a transform of its coordinates: q of theta where the Gaussian is that of phi."""

import functools

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core import linalg
from pymc_ngvi.core.draws import MAX_SOBOL_DIM, normals_at, sobol_points
from pymc_ngvi.core.types import Array, GaussianState

#: Draws behind the moments, set by set, and their seed: fixed, so that moments do not change by themselves.
_N_SETS, _SET_SIZE, _SEED = 8, 512, 20_210_401


@dataclass(frozen=True, eq=False)
class PushforwardState:
    """The distribution of ``theta = transform(phi)`` for a Gaussian phi.

    The density is exact. Moments are those of 4,096 quasi-random draws with a fixed seed, adjusted by regression to
    the exact ones of the coordinates that the transform leaves as they are.
    """

    #: Of phi.
    gaussian: GaussianState
    #: An invertible map that leaves the border of its ``structure`` as it is: `forward` and `inverse` return vectors,
    #: and log determinants of the derivative of `forward`.
    transform: Any = field(repr=False)

    @property
    def n_dim(self) -> int:
        """Number of unconstrained coordinates."""
        return self.gaussian.n_dim

    @property
    def n_uniform(self) -> int:
        """Columns of uniforms that a draw needs."""
        return self.gaussian.n_uniform

    def params(self) -> dict[str, Array]:
        """Return the arrays of the Gaussian."""
        return self.gaussian.params()

    def from_params(self, params: dict[str, Array]) -> Self:
        """Return the image of another Gaussian under the same transform."""
        return type(self)(self.gaussian.from_params(params), self.transform)

    # --- the distribution ---

    def draws(self, base: Array) -> Array:
        """Map standard normals, (n_draws, n_dim), to draws; NaN where the transform fails."""
        return self.transform.forward(self.gaussian.draws(base))[0]

    def log_density(self, theta: Array) -> Array:
        """Return log q at the rows of ``theta``; NaN where the transform fails."""
        phi, log_det = self.transform.inverse(theta)
        return self.gaussian.log_density(phi) - log_det

    def entropy(self) -> float:
        """Return -E_q[log q]: that of the Gaussian plus the mean log determinant over the draws behind moments."""
        return self.gaussian.entropy() + self._moments[2]

    def mean(self) -> Array:
        """Return the mean."""
        return self._moments[0].copy()

    def sd(self) -> Array:
        """Return the standard deviations."""
        return self._moments[1].copy()

    def cov(self) -> Array:
        """Return the covariance, dense."""
        return self.cov_block(np.arange(self.n_dim))

    def cov_block(self, index: NDArray[np.intp]) -> Array:
        """Return the covariance of some coordinates, (len(index), len(index)); exact if the transform keeps them."""
        index = np.asarray(index)
        border = self._border
        if np.isin(index, border).all():
            return self.gaussian.cov_block(index)
        columns = [theta[:, np.concatenate([index, border])] for theta, _ in self._sets()]
        draws = np.concatenate(columns)
        draws = draws[np.isfinite(draws).all(axis=1)]
        draws -= draws.mean(axis=0)
        covariance = draws.T @ draws / len(draws)
        n = len(index)
        weights = _regression(covariance[:, n:], covariance[n:, n:])[:n]
        change = self.gaussian.cov_block(border) - covariance[n:, n:]
        return covariance[:n, :n] + linalg.symmetrise(weights @ change @ weights.T)

    # --- pieces ---

    @property
    def _border(self) -> NDArray[np.intp]:
        border: NDArray[np.intp] = self.transform.structure.border
        # More coordinates than draws tell apart: their sample moments are left as they are.
        return border if len(border) <= _SET_SIZE else border[:0]

    def _sets(self) -> Iterator[tuple[Array, Array]]:
        """Yield draws and log determinants, set by set: of one Sobol sequence and its negative."""
        rng = np.random.default_rng(_SEED)
        n_quasi = min(self.n_dim, MAX_SOBOL_DIM)
        for points in np.split(sobol_points(_N_SETS * _SET_SIZE // 2, n_quasi, rng), _N_SETS):
            z = rng.standard_normal((_SET_SIZE // 2, self.n_dim))
            z[:, :n_quasi] = normals_at(points)
            yield self.transform.forward(self.gaussian.draws(np.concatenate([z, -z])))

    @functools.cached_property
    def _moments(self) -> tuple[Array, Array, float]:
        """Mean, standard deviations, and mean log determinant."""
        border = self._border
        at, total, n_draws = self.gaussian.mean(), 0.0, 0
        at = self.transform.forward(at[None])[0][0]
        at = np.where(np.isfinite(at), at, 0.0)
        first, second, mixed = np.zeros(self.n_dim), np.zeros(self.n_dim), np.zeros((self.n_dim, len(border)))
        for theta, log_det in self._sets():
            keep = np.isfinite(theta).all(axis=1)
            away = theta[keep] - at
            first += away.sum(axis=0)
            second += np.sum(away**2, axis=0)
            mixed += away.T @ away[:, border]
            total, n_draws = total + log_det[keep].sum(), n_draws + len(away)
        shift = first / n_draws
        with_border = mixed / n_draws - np.outer(shift, shift[border])
        weights = _regression(with_border, with_border[border])
        change = self.gaussian.cov_block(border) - with_border[border]
        mean = at + shift
        mean += weights @ (self.gaussian.mean() - mean)[border]
        variance = second / n_draws - shift**2 + np.einsum("ij,jk,ik->i", weights, change, weights)
        return mean, np.sqrt(variance), total / n_draws


def _regression(covariances: Array, border: Array) -> Array:
    """Return the weights of a regression on the border, (n, n_border), from covariances with it."""
    factor = linalg.cholesky(linalg.symmetrise(border)) if len(border) else None
    if factor is None:
        return np.zeros_like(covariances)
    half = linalg.solve_lower(factor, np.ascontiguousarray(covariances.T))
    return linalg.solve_lower(factor, half, transpose=True).T
