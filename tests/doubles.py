"""Stand-ins for parts of the package, small enough to be seen to be right."""

from dataclasses import dataclass
from typing import Self

import numpy as np

from scipy.stats import multivariate_normal

from pymc_ngvi.core.types import Array


@dataclass(frozen=True)
class GaussianMixtureState:
    """A mixture of Gaussians as a VariationalState: weights (k,), means (k, d), lower Cholesky factors (k, d, d)."""

    weights: Array
    means: Array
    factors: Array

    n_uniform = 1

    @property
    def n_dim(self) -> int:
        return self.means.shape[1]

    def params(self) -> dict[str, Array]:
        return {"weights": self.weights, "means": self.means, "factors": self.factors}

    @classmethod
    def from_params(cls, params: dict[str, Array]) -> Self:
        return cls(params["weights"], params["means"], params["factors"])

    def draws(self, base: Array) -> Array:
        z, u = base[:, : self.n_dim], base[:, self.n_dim]
        component = np.minimum(np.searchsorted(np.cumsum(self.weights), u, side="right"), len(self.weights) - 1)
        return self.means[component] + np.einsum("nij,nj->ni", self.factors[component], z)

    def log_density(self, theta: Array) -> Array:
        terms = [
            np.log(w) + np.atleast_1d(multivariate_normal(m, c @ c.T).logpdf(theta))
            for w, m, c in zip(self.weights, self.means, self.factors, strict=True)
        ]
        return np.logaddexp.reduce(terms)

    def mean(self) -> Array:
        return self.weights @ self.means

    def cov(self) -> Array:
        centred = self.means - self.mean()
        within = np.einsum("k,kij,klj->il", self.weights, self.factors, self.factors)
        return within + np.einsum("k,ki,kj->ij", self.weights, centred, centred)

    def sd(self) -> Array:
        return np.sqrt(np.diag(self.cov()))
