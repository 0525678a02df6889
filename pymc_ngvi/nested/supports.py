"""Latent variables given hyperparameters, as files of earlier versions have them: from fits at a few values."""

import functools

from typing import Any

import numpy as np

from numpy.typing import NDArray
from scipy.spatial import cKDTree

from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array
from pymc_ngvi.families.full import FullState
from pymc_ngvi.families.gaussian import of_tag, with_tag_of

#: Fits for each number of a polynomial, at least, for which that has squares and products; ridge of these.
_PER_TERM, _RIDGE = 2.0, 1e-3
#: Part of the squared differences between neighbours that a polynomial may leave of their factors.
_BETTER = 0.5
#: Factor up to which standard deviations are moved, a logarithm.
_MOST_MOVED = 1.5


@stored("nested.supports", content=("points", "means", "factors", "first"), make="of_content")
class Supports:
    """Gaussians of the latent variables at some values of the hyperparameters.

    In between, mean and factor of the covariance are those of the nearest, moved as polynomials that are fitted to all
    of them do; or in place of the factor, the logarithms of the standard deviations.

    Parameters
    ----------
    points : ndarray, shape (n, p)
        The hyperparameters, standardised.
    states : list of GaussianState
        Of one structure.
    """

    def __init__(self, points: Array, states: list[Any]) -> None:
        self.points, self.states = points, states
        means = self.means
        terms = self._terms(self.points)
        apart = means - means.mean(axis=0)
        gram = terms.T @ terms + _RIDGE * len(terms) * np.eye(terms.shape[1])
        self._slopes: Array = np.linalg.solve(gram, (terms - terms.mean(axis=0)).T @ apart)
        self._offsets: Array = means - terms @ self._slopes
        self._tree = cKDTree(points)
        self._factor_slopes = self._of_factors()
        self._sd_slopes = np.empty((0, self.n_dim)) if len(self._factor_slopes) else self._of_sds()

    # --- files ---

    @property
    def means(self) -> Array:
        """Means, (n, n_dim)."""
        return np.array([q.location for q in self.states])

    @property
    def factors(self) -> Array:
        """Factors, one after the other."""
        return np.array([q.factor for q in self.states])

    @property
    def first(self) -> dict[str, Any]:
        """The arrays of the first state, with its tag: those of the structure are the same for all."""
        return with_tag_of(self.states[0])

    @classmethod
    def of_content(cls, points: Array, means: Array, factors: Array, first: dict[str, Any]) -> "Supports":
        """Return what a file holds."""
        made = of_tag(first)
        name = made.factor_name
        states = [made.from_params({"mean": m, name: f}) for m, f in zip(means, factors, strict=True)]
        return cls(points, states)

    # --- what is there ---

    @property
    def n_dim(self) -> int:
        """Number of latent variables."""
        return len(self.states[0].location)

    def nearest(self, points: Array) -> NDArray[np.intp]:
        """Return the number of the nearest support, (n,), of standardised hyperparameters, (n, p)."""
        result: NDArray[np.intp] = self._tree.query(points)[1]
        return result

    def mean(self, points: Array) -> Array:
        """Return conditional means of the latent variables, (n, n_dim)."""
        result: Array = self._offsets[self.nearest(points)] + self._terms(points) @ self._slopes
        return result

    def draw(self, points: Array, base: Array) -> Array:
        """Return draws, (n, n_dim), one for each of some standardised hyperparameters, from standard normals."""
        near, result = self.nearest(points), np.empty_like(base)
        for k in np.unique(near):
            rows = np.flatnonzero(near == k)
            result[rows] = self._unwhitened(int(k), points[rows], base[rows])
        result += self.mean(points)
        return result

    def _of_factors(self) -> Array:
        """Return how entries of the factor of a covariance change with terms, (n_terms, n_entries).

        None of a precision, whose entries change by orders of magnitude where a scale does, and none where that is no
        better than the factor of a neighbour.
        """
        first, terms = self.states[0], self._terms(self.points)
        none: Array = np.empty((0, first.factor.size))
        if not isinstance(first, FullState) or len(terms) < _PER_TERM * terms.shape[1]:
            return none
        apart = terms - terms.mean(axis=0)
        gram = apart.T @ apart + _RIDGE * len(apart) * np.eye(apart.shape[1])
        total = np.zeros((apart.shape[1], first.factor.size))
        for row, q in zip(apart, self.states, strict=True):  # all factors at once may take much memory
            total += row[:, None] * q.factor.ravel()
        slopes: Array = np.linalg.solve(gram, total)
        near = self._tree.query(self.points, k=2)[1][:, 1]
        before, after = np.zeros(len(near)), np.zeros(len(near))
        for k, other in enumerate(near):
            change = (self.states[k].factor - self.states[other].factor).ravel()
            size = np.linalg.norm(self.states[k].factor)
            before[k] = np.linalg.norm(change) / size
            after[k] = np.linalg.norm(change - (terms[k] - terms[other]) @ slopes) / size
        return slopes if (after**2).sum() < _BETTER * (before**2).sum() and after.max() < before.max() else none

    @functools.cached_property
    def _sds(self) -> Array:
        """Standard deviations, (n, n_dim)."""
        return np.array([q.sd() for q in self.states])

    def _of_sds(self) -> Array:
        """Return how logarithms of standard deviations change with terms, (n_terms, n_dim).

        None where that is no better than those of a neighbour.
        """
        none, terms = np.empty((0, self.n_dim)), self._terms(self.points)
        if len(terms) < _PER_TERM * terms.shape[1]:
            return none
        apart, log_sd = terms - terms.mean(axis=0), np.log(self._sds)
        gram = apart.T @ apart + _RIDGE * len(apart) * np.eye(apart.shape[1])
        slopes: Array = np.linalg.solve(gram, apart.T @ (log_sd - log_sd.mean(axis=0)))
        near = self._tree.query(self.points, k=2)[1][:, 1]
        before = log_sd - log_sd[near]
        after = before - (terms - terms[near]) @ slopes
        return slopes if (after**2).sum() < _BETTER * (before**2).sum() else none

    def _widths(self, k: int, points: Array) -> Array:
        """Return by how much standard deviations differ from those at a support, (n, n_dim)."""
        moved = (self._terms(points) - self._terms(self.points[k : k + 1])) @ self._sd_slopes
        result: Array = np.exp(np.clip(moved, -_MOST_MOVED, _MOST_MOVED))
        return result

    def sd_at(self, points: Array) -> Array:
        """Return standard deviations, (n_dim,), at standardised hyperparameters, (1, p)."""
        k = int(self.nearest(points)[0])
        result: Array = self._sds[k] * self._widths(k, points)[0] if len(self._sd_slopes) else self._sds[k]
        return result

    def _unwhitened(self, k: int, points: Array, base: Array) -> Array:
        """Return C times standard normals, (n, n_dim), with the factor as it is at points near to a support."""
        q = self.states[k]
        result: Array = q.unwhiten(base)
        if len(self._sd_slopes):
            result *= self._widths(k, points)
        if len(self._factor_slopes):
            apart = self._terms(points) - self._terms(self.points[k : k + 1])
            for distance, slope in zip(apart.T, self._factor_slopes, strict=True):
                result += distance[:, None] * q.structure.times(slope.reshape(q.factor.shape), base)
        return result

    def _terms(self, points: Array) -> Array:
        """Return the numbers that the mean is a polynomial in, (n, n_terms)."""
        p = points.shape[1]
        if len(self.points) < _PER_TERM * (1 + p + p * (p + 1) // 2):
            return points
        i, j = np.triu_indices(p)
        return np.concatenate([points, points[:, i] * points[:, j]], axis=1)
