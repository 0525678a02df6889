r"""What one component of a mixture approximates: the posterior, less what the other components cover already.

For :math:`q = \sum_k w_k q_k`, the ELBO as a function of the component :math:`q_c` alone has the natural gradient of a
single Gaussian whose target is :math:`\log p + \log(q_c / q)`: the posterior times the responsibility of the component
[1]_. :math:`S_c' = S_c - \rho E_{q_c}[\nabla^2 (\log p - \log q)]` is its natural-parameter step, and its ELBO is
:math:`E_{q_c}[\log p - \log q]`. So every update and every estimator for Gaussians serves components.

References
----------
.. [1] W. Lin, M. E. Khan and M. Schmidt (2019). Fast and simple natural-gradient variational inference with mixture of
   exponential-family approximations. ICML. https://doi.org/10.48550/arXiv.1906.02914
"""

import functools

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pymc_ngvi.core.types import Array, Density, GaussianState, MeanHessian, Outer, Whitener
from pymc_ngvi.families.mixture import MixtureState


class Share(NamedTuple):
    """What a component sees of q at some points."""

    #: shape (n_draws,).
    log_q: Array
    #: log(q_c / q); shape (n_draws,).
    log_share: Array
    #: Its gradient; shape (n_draws, n_dim).
    score: Array


@dataclass(frozen=True)
class ComponentTarget:
    """The log density that one component of a mixture approximates.

    Parameters
    ----------
    density : Density
        log p.
    mixture : MixtureState
    index : int
        Of the component.
    """

    density: Density
    mixture: MixtureState
    index: int

    @property
    def n_dim(self) -> int:
        """Number of unconstrained coordinates."""
        return self.density.n_dim

    @property
    def has_hessian(self) -> bool:
        """Whether log p has second derivatives that can be evaluated."""
        return self.density.has_hessian

    def logp_grad(self, theta: Array) -> tuple[Array, Array]:
        """Return log p + log(q_c / q), (n_draws,), and its gradient, (n_draws, n_dim)."""
        logp, grad = self.density.logp_grad(theta)
        share = self.share(theta)
        return logp + share.log_share, grad + share.score

    def share(self, theta: Array) -> Share:
        """Return log q, log(q_c / q) and the gradient of the latter at the rows of ``theta``."""
        terms, log_q = self.mixture.log_densities(theta)
        log_share = terms[:, self.index] - self.mixture.log_weights[self.index] - log_q
        scores, mean_score = self.scores(theta, np.exp(terms - log_q[:, None]))
        return Share(log_q, log_share, scores[self.index] - mean_score)

    def mean_hessian(self, theta: Array) -> MeanHessian:
        """Return the mean of hess (log p + log(q_c / q)) over draws of the component."""
        return _ComponentHessian(self, self.density.mean_hessian(theta), theta)

    # --- pieces ---

    @functools.cached_property
    def precisions(self) -> list[Array]:
        """The precision of each component, whitened by this one."""
        return [self.component.whitened_precision(c) for c in self.mixture.components]

    @property
    def component(self) -> GaussianState:
        """The component."""
        return self.mixture.components[self.index]

    def scores(self, theta: Array, responsibilities: Array) -> tuple[Array, Array]:
        """Return the gradients of log q_k, (n_components, n_draws, n_dim), and those of log q, (n_draws, n_dim)."""
        components = self.mixture.components
        scores = np.stack([-c.precision_product(theta - c.location) for c in components])
        return scores, np.einsum("nk,knd->nd", responsibilities, scores)


@dataclass(frozen=True)
class _ComponentHessian(MeanHessian):
    """Dense: the other components add to all entries.

    With s_k and S_k the score and the precision of component k, and s = sum_k r_k s_k, log(q_c / q) adds the mean of
    sum_k r_k (S_k - s_k s_k^T) + s s^T, less S_c.
    """

    target: ComponentTarget
    of_density: MeanHessian
    theta: Array

    def products(self, directions: Array) -> Array:
        """Return the matrix times each direction, (n_directions, n_dim)."""
        responsibilities = self.target.mixture.responsibilities(self.theta)
        scores, mean_score = self.target.scores(self.theta, responsibilities)
        products = self.of_density.products(directions) - self.target.component.precision_product(directions)
        precise = [c.precision_product(directions) for c in self.target.mixture.components]
        for score, share, of_precision in zip(scores, responsibilities.T, precise, strict=True):
            products += share.mean() * of_precision - (directions @ score.T * share) @ score / len(score)
        return products + (directions @ mean_score.T) @ mean_score / len(mean_score)

    def diagonal(self) -> Array:
        """Return the diagonal, (n_dim,)."""
        return np.diagonal(self.products(np.eye(self.theta.shape[1])))

    def whitened(self, state: Whitener) -> Array:
        """Return A = -C^T H C at draws of the component, as it stores it.

        What the others add to the Hessian has no sparsity of its own: it is projected onto the form of the component in
        the metric of the Fisher information, in which whitened entries are orthogonal.
        """
        responsibilities = self.target.mixture.responsibilities(self.theta)
        scores, mean_score = self.target.scores(self.theta, responsibilities)
        result = state.add_to_diagonal(self.of_density.whitened(state), 1.0)
        for score, share, precision in zip(scores, responsibilities.T, self.target.precisions, strict=True):
            whitened = state.whiten(score)
            result = result + state.outer_mean(Outer(whitened * share[:, None], whitened, 0.0))
            result -= share.mean() * precision
        whitened = state.whiten(mean_score)
        return result - state.outer_mean(Outer(whitened, whitened, 0.0))
