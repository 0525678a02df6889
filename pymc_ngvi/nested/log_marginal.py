r"""log m(g), the log density of hyperparameters with the latent variables integrated out.

The ELBO of the conditional fit is below it, by little: what is missing, log E_q[p / q], is estimated with the same
draws at all g. To second order it is half of the variance of log p / q [1]_, which takes over where weights vary much.

References
----------
.. [1] M. Opper, U. Paquet and O. Winther (2013). Perturbative corrections for approximate inference in Gaussian latent
   variable models. JMLR 14. https://jmlr.org/papers/v14/opper13a.html
"""

from typing import NamedTuple

import numpy as np

from scipy.special import logsumexp

from pymc_ngvi.core.types import Array, GaussianState
from pymc_ngvi.model.predictors.expectations import Seen
from pymc_ngvi.model.rows_given import RowsGiven
from pymc_ngvi.nested.conditional import Conditional, ConditionalFits

#: Draws behind a correction; numbers in these at most; fewest.
_N_DRAWS, _MOST_NUMBERS, _FEWEST = 512, 2**22, 64
#: Variance of log weights up to which their mean is estimated well, and from which on it is not.
_TAME, _WILD = 3.0, 6.0
#: Variance beyond which nothing is added to an ELBO.
_HOPELESS = 100.0
#: Part of the draws that may be outside the support.
_MOST_LOST = 0.1


class Evaluated(NamedTuple):
    """log m at one value of the hyperparameters.

    Parameters
    ----------
    g : ndarray, shape (p,)
    value : float
        Nats.
    correction : float
        What was added to the ELBO.
    doubt : float
        By how much half of the variance is more than the mean weight says.
    seen : Seen
        What rows see of the conditional fit.
    """

    g: Array
    value: float
    correction: float
    doubt: float
    seen: Seen


class LatentMarginal:
    """Evaluates log m, each time from the nearest conditional fit.

    Parameters
    ----------
    given : RowsGiven
    seed : int
        Of the draws behind corrections.

    Attributes
    ----------
    known : list of Evaluated
    scale : ndarray, shape (p,)
        Units of distances between hyperparameters.
    """

    def __init__(self, given: RowsGiven, seed: int) -> None:
        self._given, self.fits = given, ConditionalFits(given)
        n = max(_FEWEST, min(_N_DRAWS, _MOST_NUMBERS // max(given.n_dim, 1)))
        half = np.random.default_rng(seed).standard_normal((n // 2, given.n_dim))
        self._base = np.concatenate([half, -half])
        #: log q at draws is this, less the entropy.
        self._log_standard = 0.5 * (given.n_dim - np.sum(self._base**2, axis=1))
        self.known: list[Evaluated] = []
        self.scale = np.ones(len(given.outside))

    def __call__(self, g: Array) -> float:
        """Return log m at one value, -inf where there is no fit."""
        found = self.at(g)
        return -np.inf if found is None else found[0].value

    def at(self, g: Array) -> tuple[Evaluated, GaussianState] | None:
        """Return what is found at one value of the hyperparameters, (p,), and the fit; None where there is none."""
        conditional = self.fits.fit(g, self._nearest(g))
        if conditional is None:
            return None
        correction, doubt = self._missing(conditional)
        found = Evaluated(np.array(g), conditional.elbo + correction, correction, doubt, conditional.seen)
        self.known.append(found)
        return found, conditional.q

    def _nearest(self, g: Array) -> Seen | None:
        if not self.known:
            return None
        apart = (np.array([k.g for k in self.known]) - g) / self.scale
        return self.known[int(np.argmin((apart**2).sum(axis=1)))].seen

    def _missing(self, conditional: Conditional) -> tuple[float, float]:
        """Return log E_q[p / q] less the ELBO, and how far that is from half of the variance."""
        q = conditional.q
        theta, log_q = q.draws(self._base), self._log_standard - q.entropy()
        with np.errstate(all="ignore"):
            log_ratio = self._given.rows.at(theta) - log_q - conditional.elbo
        keep = np.isfinite(log_ratio)
        if keep.mean() < 1.0 - _MOST_LOST:
            return 0.0, np.inf
        variance = float(np.var(log_ratio[keep]))
        if variance > _HOPELESS:
            return 0.0, np.inf
        missing, half = float(logsumexp(log_ratio[keep]) - np.log(len(keep))), 0.5 * variance
        by_half = min(max((variance - _TAME) / (_WILD - _TAME), 0.0), 1.0)  # without a jump
        return missing + by_half * (half - missing), half - missing
