"""Whether a mixture was worth it: what it gains over the single Gaussian that it began from."""

from dataclasses import dataclass

import numpy as np

from scipy.special import entr

from pymc_ngvi.core.draws import base_of, chunks
from pymc_ngvi.core.psis import MIN_KHAT_DRAWS, weigh
from pymc_ngvi.core.status import Elbo
from pymc_ngvi.core.types import Array, VariationalState
from pymc_ngvi.density import ModelDensity
from pymc_ngvi.families import MixtureState

#: Standard errors that a gain has to exceed.
_N_SE = 2.0
#: Nats below which a gain, however certain, changes little that is computed from q.
_LEAST_GAIN = 0.05


def effective_components(weights: Array) -> float:
    """Return the effective number of components: the exponential of the entropy of the weights.

    Parameters
    ----------
    weights : ndarray, shape (n_components,)
        Their sum is 1.

    Returns
    -------
    float
        From 1 (one has all the weight) to n_components (all are equal).

    Examples
    --------
    >>> import numpy as np
    >>> effective_components(np.array([0.5, 0.5, 0.0]))
    2.0
    """
    return float(np.exp(entr(weights).sum()))


@dataclass(frozen=True)
class Worth:
    """What a mixture gains over one Gaussian.

    Parameters
    ----------
    gain, se : float
        Nats of ELBO, and the Monte Carlo standard error; NaN where no draw of both has a finite log density.
    n_components : int
    n_effective : float
        Exponential of the entropy of the weights.
    n_draws : int
        Behind each figure.
    khat, khat_gaussian : float or None
        Pareto k-hat of the mixture and of the Gaussian; None for fewer than 100 draws.

    usable, usable_gaussian : bool
        Whether estimates can be weighted by draws of these.

    Examples
    --------
    >>> worth = Worth(1.21, 0.05, 3, 2.91, 10_000, khat=0.41, khat_gaussian=1.02)
    >>> for part in worth.sentence().split("; "):
    ...     print(part)
    With 2.9 effective components, the mixture gains 1.21 +- 0.05 nats over one Gaussian
    k-hat was 1.02 and is 0.41: worth it.
    """

    gain: float
    se: float
    n_components: int
    n_effective: float
    n_draws: int
    khat: float | None = None
    khat_gaussian: float | None = None
    usable: bool = True
    usable_gaussian: bool = False

    def __str__(self) -> str:
        """Return the sentence."""
        return self.sentence()

    @property
    def significant(self) -> bool:
        """Whether the gain is positive beyond its error."""
        return self.gain > _N_SE * self.se

    def sentence(self) -> str:
        """Return in one line what was gained, and whether it was worth it."""
        if np.isnan(self.gain):
            return "What the mixture gains over one Gaussian is not known: log p is not finite at their draws."
        amount = f"{Elbo(abs(self.gain), self.se)} nats"
        if self.gain < -_N_SE * self.se:
            return (
                f"The mixture is {amount} worse than the one Gaussian that it began from: go on with approx.refine(n), "
                "or take the Gaussian."
            )
        if self.n_components == 1:
            gained = f"gains {amount} over" if self.significant else "gains nothing over"
            return (
                f"One component is left of the mixture, which {gained} the Gaussian that it began from: not worth it, "
                "a fit without family='mixture' comes to the same."
            )
        number = f"{self.n_effective:.1f}"
        within = "" if self.significant else ", within the error"
        khats = "" if self.khat is None else f"; k-hat was {self.khat_gaussian:.2f} and is {self.khat:.2f}"
        return (
            f"With {number} effective component{'s'[: number != '1.0']}, the mixture gains "
            f"{Elbo(self.gain, self.se)} nats over one Gaussian{within}{khats}: {self._verdict()}."
        )

    def _verdict(self) -> str:
        if self.significant and self.gain >= _LEAST_GAIN:
            return "worth it" if self.usable else "worth it for the bulk of the posterior, not for its tails"
        if self.khat is not None and self.usable and not self.usable_gaussian:
            return "worth it for importance weights alone"
        return "not worth it, one Gaussian is enough"


def worth_between(
    mixture: MixtureState, gaussian: VariationalState, density: ModelDensity, n_draws: int, rng: np.random.Generator
) -> Worth:
    """Return what a mixture gains over a Gaussian, from draws of both that are made of the same standard normals."""
    found, done = np.empty((2, 2, n_draws)), 0  # of mixture and Gaussian: log p, log q
    for size in chunks(n_draws, mixture.n_dim):
        base, now = base_of(mixture, size, rng), slice(done, done + size)
        for of, state in zip(found, (mixture, gaussian), strict=True):
            theta = state.draws(base[:, : mixture.n_dim + state.n_uniform])
            of[:, now] = density.logp(theta), state.log_density(theta)
        done += size
    return worth_of(mixture.weights, *found)


def worth_of(weights: Array, mixture: Array, gaussian: Array) -> Worth:
    """Return what a mixture gains, from log densities at its draws and at those of a Gaussian.

    Parameters
    ----------
    weights : ndarray, shape (n_components,)
    mixture, gaussian : ndarray, shape (2, n_draws)
        log p, up to a constant, and log q, at draws of each; where equal columns have equal base draws, the noise that
        both share cancels. Columns that are not finite in either are left out of the gain.

    Returns
    -------
    Worth
    """
    with np.errstate(invalid="ignore"):  # -inf less -inf
        difference = (mixture[0] - mixture[1]) - (gaussian[0] - gaussian[1])
    difference = difference[np.isfinite(difference)]
    n_draws, n_kept = mixture.shape[1], len(difference)
    gain = float(difference.mean()) if n_kept else np.nan
    se = float(difference.std(ddof=1) / np.sqrt(n_kept)) if n_kept > 1 else np.inf
    number = len(weights), effective_components(weights), n_draws
    if n_draws < MIN_KHAT_DRAWS:
        return Worth(gain, se, *number)
    both = [weigh(*of)[1] for of in (mixture, gaussian)]
    usable = [of.verdict().helps for of in both]
    return Worth(gain, se, *number, both[0].khat, both[1].khat, *usable)
