"""log m(g), the log density of hyperparameters with the latent variables integrated out, and draws of these.

All values that are asked for at once are evaluated together, as far as that goes; others one after the other.
"""

import itertools

from collections.abc import Sequence

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.types import Array, RowRules
from pymc_ngvi.density.rows_given import RowsGiven
from pymc_ngvi.marginal.regression import Whitening
from pymc_ngvi.nested.batches import ManyConditionals
from pymc_ngvi.nested.conditional import ConditionalFits, LatentGaussian
from pymc_ngvi.nested.defence import Defence
from pymc_ngvi.nested.found import FEWEST, LEFT, Drawn, EvaluatedMarginal, lacking
from pymc_ngvi.nested.starts import Starts
from pymc_ngvi.rows.seen import Seen

#: Draws behind a correction; numbers in these, and values of rows, at most.
_N_DRAWS, _MOST_NUMBERS, _MOST_VALUES = 512, 2**22, 2**19
#: Nats below the top up to which hyperparameters count.
_NEAR = 4.0
#: How often fits are begun from others, those found before among them; distance, in scales, from which on a fit that is
#: not found so is not looked for.
_TURNS, _FAR = 2, 6.0


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
    records : bool
        Whether fits are kept, for others to begin from.
    """

    def __init__(self, given: RowsGiven, seed: int) -> None:
        self._given, self.fits = given, ConditionalFits(given)
        self._many = ManyConditionals.of(given)
        most = min(_MOST_NUMBERS // max(given.n_dim, 1), _MOST_VALUES // max(given.rows.n_evaluations, 1))
        n = max(FEWEST, min(_N_DRAWS, most))
        half = np.random.default_rng(seed).standard_normal((n // 2, given.n_dim))
        # In pairs, and so are the first of them, where fewer are taken.
        ends = [0, *(FEWEST // 2 * 2**k for k in range(n.bit_length())), len(half)]
        parts = [half[start:end] for start, end in itertools.pairwise(ends) if start < min(end, len(half))]
        self._base = np.concatenate([sign * part for part in parts for sign in (1.0, -1.0)])
        self.known: list[EvaluatedMarginal] = []
        self.scale = np.ones(len(given.outside))
        self.records = True

    @property
    def n_dim(self) -> int:
        """Number of latent variables."""
        return self._given.n_dim

    @property
    def is_exact(self) -> bool:
        """Return False: what ELBOs lack is estimated, or found to be nothing."""
        return False

    @property
    def n_fits(self) -> int:
        """Conditional fits so far."""
        return self.fits.n_fits + (0 if self._many is None else self._many.n_fits)

    @property
    def is_cheap(self) -> bool:
        """Whether log m takes one step, from anywhere."""
        return self._many is not None and self._given.is_quadratic

    @property
    def kinds(self) -> list[int]:
        """Predictors that rows have, kind by kind."""
        return [rows.k for rows in self._given.rows.functions]

    def __call__(self, g: Array) -> Array:
        """Return log m at some values, (n,) from (n, p), -inf where there is no fit."""
        return np.array([-np.inf if found is None else found.value for found in self.at(g)])

    def at(self, g: Array) -> list[EvaluatedMarginal | None]:
        """Return what is found at values of the hyperparameters, (n, p); None where there is no fit."""
        result: list[EvaluatedMarginal | None] = [None] * len(g)
        left = np.arange(len(g))
        for _ in range(_TURNS if self._many is not None and self.known else 0):
            assert self._many is not None
            starts = [self.known[0] if self.is_cheap else self._nearest(point) for point in g[left]]
            found = list(self._many.at(g[left], [s.seen for s in starts], [s.rules for s in starts], self._base))
            for number, one in found:
                result[left[number]] = one
            self.known += [one for _, one in found] if self.records else []
            left = np.array([k for k in left if result[k] is None], dtype=np.intp)
            if not len(left):
                break
        for number in left.tolist():
            if self._is_near(g[number]) and (alone := self._alone(g[number])) is not None:
                result[number] = alone
                self.known.append(alone)
        return result

    def _is_near(self, g: Array) -> bool:
        """Tell whether a value is not far out, where log m is next to nothing and fits take long."""
        if not self.known or self._many is None:
            return True
        top = max(self.known, key=lambda one: one.value)
        return bool(np.abs((g - top.g) / self.scale).max() < _FAR)

    def _alone(self, g: Array) -> EvaluatedMarginal | None:
        conditional = self.fits.fit(g, (self._nearest(g).seen,) if self.known else ())
        if conditional is None:
            return None
        correction, doubt = lacking(lambda z: self._weighed(conditional, z)[1] - conditional.elbo, self._base)
        value = conditional.elbo + correction
        found = EvaluatedMarginal(np.array(g), value, correction, doubt, conditional.seen, conditional.rules)
        if self._many is not None:  # so that what is lacking comes of the same draws as that of others
            return next((one for _, one in self._many.at(g[None], [found.seen], [found.rules], self._base)), found)
        return found

    def variance(self) -> float:
        """Return the variance of log weights, given the hyperparameters, at the highest of the fits so far."""
        top = max(self.known, key=lambda one: one.value)
        return 2.0 * (top.correction + top.doubt)  # half of it is what the ELBO lacks, to second order

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

    def begin_round(self, whitening: Whitening) -> None:
        """Find what fits begin from, and in which directions draws come from farther out, by what is known by now."""
        self._starts = Starts(self.known, whitening, self.kinds)
        self._defence = self.defence()

    def drawn(self, g: Array, base: Array, rng: np.random.Generator, is_deep: NDArray[np.bool_]) -> list[Drawn | None]:
        """Return the Gaussians at hyperparameters, and draws, the last of them moved out; see `Marginal`."""
        starts, defence = self._starts, self._defence
        result: list[Drawn | None] = [None] * len(g)
        picked = defence.picked(len(g), base.shape[1], rng)
        if self._many is not None:
            for number, found in self._many.drawn(g, starts, base, defence, picked, rng):
                result[number] = found
        for number, point in enumerate(g):
            if result[number] is None and not (is_deep[number] and self._many is not None):
                begin = starts.at(point)
                result[number] = self._drawn(
                    point, *begin, base[number], defence, picked[number], rng, not is_deep[number]
                )
        return result

    def _drawn(
        self,
        g: Array,
        starts: Sequence[Seen],
        rules: RowRules,
        base: Array,
        defence: Defence,
        picked: NDArray[np.intp],
        rng: np.random.Generator,
        thorough: bool,
    ) -> Drawn | None:
        conditional = self.fits.fit(g, starts, rules, left=LEFT, thorough=thorough)
        if conditional is None:
            return None
        q = conditional.q
        base, log_mixed = defence.moved(self._given, conditional, base, picked)
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

    def _nearest(self, g: Array) -> EvaluatedMarginal:
        apart = (np.array([k.g for k in self.known]) - g) / self.scale
        return self.known[int(np.argmin((apart**2).sum(axis=1)))]
