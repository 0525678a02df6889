"""What is found at values of the hyperparameters, and what the ELBO there lacks of log m.

The ELBO of the conditional fit is below log m by little: what is missing, log E_q[p / q], is estimated with the same
draws everywhere. To second order it is half of the variance of log p / q [1]_, which takes over where weights vary
much.

References
----------
.. [1] M. Opper, U. Paquet and O. Winther (2013). Perturbative corrections for approximate inference in Gaussian latent
   variable models. JMLR 14. https://jmlr.org/papers/v14/opper13a.html
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.batch import Batch
from pymc_ngvi.core.linalg import logsumexp
from pymc_ngvi.core.types import Array
from pymc_ngvi.marginal.sampler import variances_of

#: Variance of log weights up to which their mean is estimated well, and from which on it is not.
_TAME, _WILD = 3.0, 6.0
#: Variance beyond which nothing is added to an ELBO.
HOPELESS = 100.0
#: Part of the draws that may be outside the support.
_MOST_LOST = 0.1


@dataclass(frozen=True, eq=False)
class Drawn(Batch):
    """Gaussians of the latent variables at values of the hyperparameters, and draws of them."""

    #: Nats, of log p at these hyperparameters; shape (n,).
    elbo: Array
    #: shape (n, n_inside, n_draws).
    latents: Array
    #: log p(y, x, theta) - log q'(x | theta), -inf where p is 0: q' is what they are drawn from, a part of them from
    #: farther out than q; shape (n, n_draws).
    log_ratio: Array
    #: log q' - log q; shape (n, n_draws).
    log_mixed: Array


class Marginal(Protocol):
    """Evaluates log m, and draws latent variables given hyperparameters."""

    #: Number of latent variables, those that are integrated out within rows among them, and of the others.
    n_inside: int
    n_dim: int
    #: Conditional fits so far.
    n_fits: int

    def __call__(self, g: Array, /) -> Array:
        """Return log m at some values, (n,) from (n, p), -inf where there is no fit."""

    def variance(self) -> float:
        """Return the variance of log weights, given the hyperparameters, at the highest of the fits so far."""
        return 0.0

    def doubt(self) -> float:
        """Return how far two estimates of what ELBOs lack are apart, an sd over the hyperparameters in nats."""
        return 0.0

    def begin_draws(self, top: Array, scale: Array) -> None:
        """Prepare for draws about the highest value so far, (p,), with units of distances between values, (p,)."""

    def drawn(self, g: Array, base: Array, rng: np.random.Generator) -> Iterator[tuple[NDArray[np.intp], Drawn]]:
        """Yield draws made of standard normals, (n, n_dim, n_draws), at those values where there is a Gaussian."""


def missing(log_ratio: Array) -> tuple[Array, Array]:
    """Return log E_q[p / q] less the ELBO, (n,) from (n, n_draws), and how far that is from half of the variance."""
    n_found = np.isfinite(log_ratio).sum(axis=1)
    is_lost = n_found < (1.0 - _MOST_LOST) * log_ratio.shape[1]
    variance = np.where(is_lost, np.inf, variances_of(log_ratio))
    is_known, half = variance <= HOPELESS, 0.5 * np.minimum(variance, HOPELESS)
    found = np.where(is_known, logsumexp(log_ratio, axis=1) - np.log(np.maximum(n_found, 1)), 0.0)
    by_half = np.clip((variance - _TAME) / (_WILD - _TAME), 0.0, 1.0)  # without a jump
    return np.where(is_known, found + by_half * (half - found), 0.0), np.where(is_known, half - found, np.inf)
