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

from typing import Any, NamedTuple

import numpy as np

from scipy.special import logsumexp

from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.core.types import Array, Outer, TargetDensity
from pymc_ngvi.families.mixture import MixtureState

#: What the others add is dense; whitened by the component, its entries can be had apart.
_NO_HESSIAN = "The Hessian that a component sees is had whitened by that component only: take `curvature`."


class Share(NamedTuple):
    """What a component sees of q at some points.

    Parameters
    ----------
    log_q : ndarray, shape (n_draws,)
    log_share : ndarray, shape (n_draws,)
        log(q_c / q).
    score : ndarray, shape (n_draws, n_dim)
        Its gradient.
    """

    log_q: Array
    log_share: Array
    score: Array


class ComponentTarget:
    """The log density that one component of a mixture approximates: a `TargetDensity`.

    Parameters
    ----------
    density : TargetDensity
        log p.
    mixture : MixtureState
    index : int
        Of the component.
    """

    def __init__(self, density: TargetDensity, mixture: MixtureState, index: int) -> None:
        self._density, self._mixture, self._index = density, mixture, index

    @property
    def n_dim(self) -> int:
        """Number of unconstrained coordinates."""
        return self._density.n_dim

    @property
    def n_gradients(self) -> int:
        """Draws at which the gradient of log p was evaluated so far."""
        return self._density.n_gradients

    @n_gradients.setter
    def n_gradients(self, value: int) -> None:
        self._density.n_gradients = value

    @property
    def n_hessians(self) -> int:
        """Draws at which the Hessian of log p was evaluated so far."""
        return self._density.n_hessians

    @n_hessians.setter
    def n_hessians(self, value: int) -> None:
        self._density.n_hessians = value

    @property
    def has_hessian(self) -> bool:
        """Whether log p has second derivatives that can be evaluated."""
        return self._density.has_hessian

    @property
    def has_minibatch(self) -> bool:
        """Whether log p is that of a random part of the data."""
        return self._density.has_minibatch

    @property
    def pattern(self) -> Pattern | None:
        """None: what the other components add to the Hessian is dense; see `curvature`."""
        return None

    def logp_grad(self, theta: Array) -> tuple[Array, Array]:
        """Return log p + log(q_c / q), (n_draws,), and its gradient, (n_draws, n_dim)."""
        logp, grad = self._density.logp_grad(theta)
        share = self.share(theta)
        return logp + share.log_share, grad + share.score

    def share(self, theta: Array) -> "Share":
        """Return log q, log(q_c / q) and the gradient of the latter at the rows of ``theta``."""
        terms = self._mixture.log_densities(theta)
        log_q = logsumexp(terms, axis=1)
        log_share = terms[:, self._index] - self._mixture.log_weights[self._index] - log_q
        scores, mean_score = self._scores(theta, np.exp(terms - log_q[:, None]))
        return Share(log_q, log_share, scores[self._index] - mean_score)

    def curvature(self, state: Any, theta: Array) -> Array:
        """Return A = -C^T H C at draws of the component, as it stores it.

        What the others add to the Hessian has no sparsity of its own: it is projected onto the form of the component in
        the metric of the Fisher information, in which whitened entries are orthogonal.
        """
        responsibilities = self._mixture.responsibilities(theta)
        scores, mean_score = self._scores(theta, responsibilities)
        result = state.add_to_diagonal(state.curvature(self._density, theta), 1.0)
        for score, share, precision in zip(scores, responsibilities.T, self._precisions, strict=True):
            whitened = state.whiten(score)
            result = result + state.outer_mean(Outer(whitened * share[:, None], whitened, 0.0))
            result -= share.mean() * precision
        whitened = state.whiten(mean_score)
        mean: Array = result - state.outer_mean(Outer(whitened, whitened, 0.0))
        return mean

    def mean_hessian_products(self, theta: Array, directions: Array) -> Array:
        """Raise: see `curvature`."""
        raise ValueError(_NO_HESSIAN)

    def mean_hessian_diagonal(self, theta: Array) -> Array:
        """Raise: see `curvature`."""
        raise ValueError(_NO_HESSIAN)

    def mean_hessian_values(self, theta: Array) -> Array:
        """Raise: see `curvature`."""
        raise ValueError(_NO_HESSIAN)

    def mean_gauss_newton_diagonal(self, theta: Array) -> Array:
        """Raise: squares of gradients of single observations say nothing of the other components."""
        raise ValueError("gauss_newton knows of the data only, and components repel each other: take 'price'.")

    def next_batch(self, rng: np.random.Generator) -> None:
        """Go to the next minibatch of the data."""
        self._density.next_batch(rng)

    def take_batch(self, seed: int, number: int) -> None:
        """Go to a minibatch of passes through the data."""
        self._density.take_batch(seed, number)

    @property
    def n_batches(self) -> int:
        """Minibatches in one pass."""
        return self._density.n_batches

    # --- pieces ---

    @functools.cached_property
    def _precisions(self) -> list[Array]:
        """The precision of each component, whitened by this one."""
        components = self._mixture.components
        return [components[self._index].whitened_precision(c) for c in components]

    def _scores(self, theta: Array, responsibilities: Array) -> tuple[Array, Array]:
        """Return the gradients of log q_k, (n_components, n_draws, n_dim), and those of log q, (n_draws, n_dim)."""
        components = self._mixture.components
        scores = np.stack([-c.precision_product(theta - c.location) for c in components])
        return scores, np.einsum("nk,knd->nd", responsibilities, scores)
