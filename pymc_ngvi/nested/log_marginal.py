r"""log m(g), the log density of hyperparameters with the latent variables integrated out.

The ELBO of the conditional fit is below it, by little: what is missing, log E_q[p / q], is estimated with the same
draws at all g. To second order it is half of the variance of log p / q [1]_, which takes over where weights vary much.

References
----------
.. [1] M. Opper, U. Paquet and O. Winther (2013). Perturbative corrections for approximate inference in Gaussian latent
   variable models. JMLR 14. https://jmlr.org/papers/v14/opper13a.html
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pymc_ngvi.core.linalg import logsumexp
from pymc_ngvi.core.types import Array, RowRules
from pymc_ngvi.density.expectations import Seen
from pymc_ngvi.density.rows_given import RowsGiven
from pymc_ngvi.nested.conditional import ConditionalFits, LatentGaussian
from pymc_ngvi.nested.defence import Defence

#: Draws behind a correction; numbers in these, and values of rows, at most; fewest.
_N_DRAWS, _MOST_NUMBERS, _MOST_VALUES, _FEWEST = 512, 2**22, 2**19, 64
#: Variance of log weights up to which their mean is estimated well, and from which on it is not.
_TAME, _WILD = 3.0, 6.0
#: Variance beyond which nothing is added to an ELBO.
_HOPELESS = 100.0
#: Part of the draws that may be outside the support.
_MOST_LOST = 0.1
#: Nats below the top up to which hyperparameters count.
_NEAR = 4.0
#: Nats that a fit may lack whose draws are weighted: weights see to them.
_LEFT = 0.01


class EvaluatedMarginal(NamedTuple):
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
    rules : RowRules
        By which these were integrated.
    """

    g: Array
    value: float
    correction: float
    doubt: float
    seen: Seen
    rules: RowRules


class Drawn(NamedTuple):
    """The Gaussian of the latent variables at one value of the hyperparameters, and draws of it.

    Parameters
    ----------
    elbo : float
        Nats, of log p at these hyperparameters.
    mean, sd : ndarray, shape (n_dim,)
    latents : ndarray, shape (n_draws, n_dim)
    log_ratio : ndarray, shape (n_draws,)
        log p(y, x, theta) - log q'(x | theta), -inf where p is 0: q' is what they are drawn from, a part of them from
        farther out than q.
    log_mixed : ndarray, shape (n_draws,)
        log q' - log q.
    """

    elbo: float
    mean: Array
    sd: Array
    latents: Array
    log_ratio: Array
    log_mixed: Array


class LatentMarginal:
    """Evaluates log m, each time from the nearest conditional fit.

    Parameters
    ----------
    given : RowsGiven
    seed : int
        Of the draws behind corrections.

    Attributes
    ----------
    known : list of EvaluatedMarginal
    scale : ndarray, shape (p,)
        Units of distances between hyperparameters.
    """

    def __init__(self, given: RowsGiven, seed: int) -> None:
        self._given, self.fits = given, ConditionalFits(given)
        most = min(_MOST_NUMBERS // max(given.n_dim, 1), _MOST_VALUES // max(given.rows.n_evaluations, 1))
        n = max(_FEWEST, min(_N_DRAWS, most))
        half = np.random.default_rng(seed).standard_normal((n // 2, given.n_dim))
        self._base = np.concatenate([half, -half])
        self.known: list[EvaluatedMarginal] = []
        self.scale = np.ones(len(given.outside))

    @property
    def n_dim(self) -> int:
        """Number of latent variables."""
        return self._given.n_dim

    @property
    def kinds(self) -> list[int]:
        """Predictors that rows have, kind by kind."""
        return [rows.k for rows in self._given.rows.functions]

    def __call__(self, g: Array) -> float:
        """Return log m at one value, -inf where there is no fit."""
        found = self.at(g)
        return -np.inf if found is None else found.value

    def at(self, g: Array) -> EvaluatedMarginal | None:
        """Return what is found at one value of the hyperparameters, (p,); None where there is no fit."""
        conditional = self.fits.fit(g, self._nearest(g))
        if conditional is None:
            return None
        correction, doubt = self._missing(conditional)
        found = EvaluatedMarginal(
            np.array(g), conditional.elbo + correction, correction, doubt, conditional.seen, conditional.rules
        )
        self.known.append(found)
        return found

    def doubt(self) -> float:
        """Return how far two estimates of what ELBOs lack are apart, an sd over the hyperparameters in nats."""
        values, doubts = np.array([k.value for k in self.known]), np.array([k.doubt for k in self.known])
        near = values > values.max() - _NEAR
        return float(np.std(doubts[near]))

    def defence(self) -> Defence:
        """Return in which directions draws are to come from farther out, by the highest of the fits so far."""
        top = max(self.known, key=lambda one: one.value)
        fit = self.fits.fit(top.g, (top.seen,), top.rules)
        assert fit is not None  # where there was one before
        return Defence.of(self._given, fit)

    def drawn(
        self,
        g: Array,
        starts: Sequence[Seen],
        rules: RowRules,
        base: Array,
        defence: Defence,
        rng: np.random.Generator,
        *,
        thorough: bool,
    ) -> Drawn | None:
        """Return the Gaussian at one value of the hyperparameters, and draws; None where there is none.

        Parameters
        ----------
        g : ndarray, shape (p,)
        starts : sequence of Seen
            To begin from.
        rules : RowRules
            By which rows are integrated.
        base : ndarray, shape (n_draws, n_dim)
            Standard normals.
        defence : Defence
            By which the last of them are moved out.
        rng : numpy.random.Generator
        thorough : bool
            Whether to take the long way where these lead nowhere.
        """
        conditional = self.fits.fit(g, starts, rules, left=_LEFT, thorough=thorough)
        if conditional is None:
            return None
        q = conditional.q
        base, log_mixed = defence.moved(self._given, conditional, base, rng)
        latents, log_ratio = self._weighed(conditional, base)
        mean, sd = self._given.moments_inside(q)
        drawn = self._given.drawn_inside(latents, rng)
        return Drawn(conditional.elbo, mean, sd, drawn, log_ratio - log_mixed, log_mixed)

    def _weighed(self, conditional: LatentGaussian, base: Array) -> tuple[Array, Array]:
        """Return draws of a fit, and log p - log q there; -inf where that is no number."""
        q = conditional.q
        theta = q.draws(base)
        log_q = 0.5 * (q.n_dim - np.sum(base**2, axis=1)) - q.entropy()
        rows = self._given.rows
        with np.errstate(all="ignore"):
            log_p = self._given.logp(theta) if rows.leaves_out_conditions else rows.at(theta)
            log_ratio = log_p - log_q
        return theta, np.where(np.isfinite(log_ratio), log_ratio, -np.inf)

    def _nearest(self, g: Array) -> tuple[Seen, ...]:
        if not self.known:
            return ()
        apart = (np.array([k.g for k in self.known]) - g) / self.scale
        return (self.known[int(np.argmin((apart**2).sum(axis=1)))].seen,)

    def _missing(self, conditional: LatentGaussian) -> tuple[float, float]:
        """Return log E_q[p / q] less the ELBO, and how far that is from half of the variance."""
        log_ratio = self._weighed(conditional, self._base)[1] - conditional.elbo
        keep = np.isfinite(log_ratio)
        if keep.mean() < 1.0 - _MOST_LOST:
            return 0.0, np.inf
        variance = float(np.var(log_ratio[keep]))
        if variance > _HOPELESS:
            return 0.0, np.inf
        missing, half = float(logsumexp(log_ratio[keep]) - np.log(len(keep))), 0.5 * variance
        by_half = min(max((variance - _TAME) / (_WILD - _TAME), 0.0), 1.0)  # without a jump
        return missing + by_half * (half - missing), half - missing
