"""Mixtures of multivariate Student t distributions."""

from dataclasses import dataclass

import numpy as np

from scipy.special import gammaln, stdtrit

from pymc_ngvi.core.draws import sobol_points
from pymc_ngvi.core.linalg import logsumexp, solve_lower
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array

#: Largest and least uniform number: the ends of a Student t.
_END = 1e-12


@stored("exact.student_mixture")
@dataclass(frozen=True, eq=False)
class StudentMixture:
    """A mixture of multivariate Student t distributions."""

    #: shape (k,).
    shares: Array
    #: shape (k, p).
    means: Array
    #: Lower Cholesky factors of the scale matrices; shape (k, p, p).
    factors: Array
    #: shape (k,).
    df: float | Array

    def log_density(self, x: Array) -> Array:
        """Return the log density at the rows of ``x``."""
        p, df = x.shape[1], self._each_df
        constants = gammaln((df + p) / 2.0) - gammaln(df / 2.0) - 0.5 * p * np.log(df * np.pi)
        constants += np.log(self.shares) - np.log(np.diagonal(self.factors, axis1=1, axis2=2)).sum(axis=1)
        falls = 0.5 * (df + p)[:, None] * np.log1p(squares(self.factors, self.means, x) / df[:, None])
        return logsumexp(constants[:, None] - falls, axis=0)

    def draws(self, n: int, rng: np.random.Generator) -> Array:
        """Return ``n`` draws, by component.

        The first uniform number of each is one of a randomly shifted grid, which also tells its component; others are
        of a scrambled Sobol sequence. A coordinate given those before is a Student t again [1]_, so that a draw takes
        as many numbers as it has coordinates: of a single one, draws are quantiles.

        References
        ----------
        .. [1] P. Ding (2016). On the conditional distribution of the multivariate t distribution. The American
           Statistician 70(3). https://doi.org/10.1080/00031305.2016.1164756
        """
        p = self.means.shape[1]
        uniform, total = ((np.arange(n) + rng.random()) / n)[:, None], np.cumsum(self.shares)
        which = np.minimum(np.searchsorted(total, uniform[:, 0], side="right"), len(total) - 1)
        uniform = (uniform - (total - self.shares)[which, None]) / self.shares[which, None]
        if p > 1:
            uniform = np.concatenate([uniform, sobol_points(n, p - 1, rng)], axis=1)
        uniform = np.clip(uniform, _END, 1.0 - _END)
        df, z, square = self._each_df[which], np.empty((n, p)), np.zeros(n)
        for k in range(p):
            z[:, k] = stdtrit(df + k, uniform[:, k]) * np.sqrt((df + square) / (df + k))
            square += z[:, k] ** 2
        return self.means[which] + np.einsum("nij,nj->ni", self.factors[which], z)

    def joined(self, other: "StudentMixture", part: float) -> "StudentMixture":
        """Return a mixture of which a part is another one."""
        shares = np.concatenate([(1.0 - part) * self.shares, part * other.shares])
        means, factors = np.concatenate([self.means, other.means]), np.concatenate([self.factors, other.factors])
        df = np.concatenate([self._each_df, other._each_df])
        return StudentMixture(shares, means, factors, float(df[0]) if (df == df[0]).all() else df)

    @property
    def _each_df(self) -> Array:
        return np.broadcast_to(self.df, len(self.shares))

    def as_one(self) -> "StudentMixture":
        """Return one component with the moments of the mixture."""
        mean = self.shares @ self.means
        apart = self.means - mean
        within = np.einsum("k,kij,klj->il", self.shares, self.factors, self.factors)
        cov = within + (self.shares[:, None] * apart).T @ apart
        return StudentMixture(np.ones(1), mean[None], np.linalg.cholesky(cov)[None], float(self._each_df.min()))

    def scaled(self, scale: float) -> "StudentMixture":
        """Return the mixture with wider components."""
        return StudentMixture(self.shares, self.means, scale * self.factors, self.df)


def squares(factors: Array, means: Array, x: Array) -> Array:
    """Return the squared Mahalanobis lengths of the rows of ``x`` under each of several Gaussians, (k, n)."""
    result = np.empty((len(means), len(x)))
    for k, (factor, mean) in enumerate(zip(factors, means, strict=True)):
        solved = solve_lower(factor, (x - mean).T)
        np.einsum("in,in->n", solved, solved, out=result[k])
    return result
