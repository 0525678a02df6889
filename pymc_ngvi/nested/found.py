"""What is found at one value of the hyperparameters, and what the ELBO there lacks of log m.

The ELBO of the conditional fit is below log m by little: what is missing, log E_q[p / q], is estimated with the same
draws everywhere. To second order it is half of the variance of log p / q [1]_, which takes over where weights vary
much.

References
----------
.. [1] M. Opper, U. Paquet and O. Winther (2013). Perturbative corrections for approximate inference in Gaussian latent
   variable models. JMLR 14. https://jmlr.org/papers/v14/opper13a.html
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from pymc_ngvi.core.linalg import logsumexp
from pymc_ngvi.core.types import Array, RowRules
from pymc_ngvi.rows.linear_map import Seen

#: Variance of log weights up to which their mean is estimated well, and from which on it is not.
_TAME, _WILD = 3.0, 6.0
#: Variance beyond which nothing is added to an ELBO.
_HOPELESS = 100.0
#: Part of the draws that may be outside the support.
_MOST_LOST = 0.1
#: Draws behind a correction at first; standard error of it for which more are taken.
FEWEST, _ERROR = 64, 0.1
#: Nats that a fit may lack whose log m is wanted; and one whose draws are weighted: weights see to them.
SOLVED, LEFT = 1e-4, 0.01


class KnownMarginal(NamedTuple):
    """log m at one value of the hyperparameters, in closed form."""

    #: shape (p,).
    g: Array
    #: Nats.
    value: float
    #: As of `EvaluatedMarginal`.
    correction: float = 0.0
    doubt: float = 0.0


class EvaluatedMarginal(NamedTuple):
    """log m at one value of the hyperparameters."""

    #: shape (p,).
    g: Array
    #: Nats.
    value: float
    #: What was added to the ELBO.
    correction: float
    #: By how much half of the variance is more than the mean weight says.
    doubt: float
    #: What rows see of the conditional fit.
    seen: Seen
    #: By which these were integrated.
    rules: RowRules


class Marginal(Protocol):
    """Evaluates log m, and draws latent variables given hyperparameters."""

    #: Units of distances between hyperparameters, (p,).
    scale: Array
    #: Whether what is evaluated is kept among what is known.
    records: bool

    @property
    def known(self) -> "Sequence[KnownMarginal | EvaluatedMarginal]":
        """What has been evaluated."""

    @property
    def n_dim(self) -> int:
        """Number of latent variables."""

    @property
    def n_fits(self) -> int:
        """Conditional fits so far."""

    @property
    def is_exact(self) -> bool:
        """Whether values are those of log m up to rounding."""

    def __call__(self, g: Array, /) -> Array:
        """Return log m at some values, (n,) from (n, p), -inf where there is no fit."""

    def variance(self) -> float:
        """Return the variance of log weights, given the hyperparameters, at the highest of the fits so far."""

    def doubt(self) -> float:
        """Return how far two estimates of what ELBOs lack are apart, an sd over the hyperparameters in nats."""

    def begin_round(self) -> None:
        """Prepare for draws by what is known by now."""

    def drawn(self, g: Array, base: Array, rng: np.random.Generator) -> list["Drawn | None"]:
        """Return the Gaussians at values of the hyperparameters, and draws; None where there is none."""


class Drawn(NamedTuple):
    """The Gaussian of the latent variables at one value of the hyperparameters, and draws of it."""

    #: Nats, of log p at these hyperparameters.
    elbo: float
    #: shape (n_dim,).
    mean: Array
    sd: Array
    #: shape (n_draws, n_dim).
    latents: Array
    #: log p(y, x, theta) - log q'(x | theta), -inf where p is 0: q' is what they are drawn from, a part of them from
    #: farther out than q; shape (n_draws,).
    log_ratio: Array
    #: log q' - log q; shape (n_draws,).
    log_mixed: Array


def n_wanted(log_ratio: Array, most: int) -> int:
    """Return how many draws say what an ELBO lacks, by the weights of a few: these, or twice as many, and so on."""
    n = len(log_ratio)
    variance = float(np.var(log_ratio)) if np.isfinite(log_ratio).all() else np.inf
    while n < most and np.expm1(min(variance, _HOPELESS)) > n * _ERROR**2:
        n *= 2
    return min(n, most)


def missing(log_ratio: Array) -> tuple[float, float]:
    """Return log E_q[p / q] less the ELBO, and how far that is from half of the variance."""
    keep = np.isfinite(log_ratio)
    if keep.mean() < 1.0 - _MOST_LOST:
        return 0.0, np.inf
    variance = float(np.var(log_ratio[keep]))
    if variance > _HOPELESS:
        return 0.0, np.inf
    found, half = float(logsumexp(log_ratio[keep]) - np.log(len(keep))), 0.5 * variance
    by_half = min(max((variance - _TAME) / (_WILD - _TAME), 0.0), 1.0)  # without a jump
    return found + by_half * (half - found), half - found
