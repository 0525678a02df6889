"""log m(g), the log density of hyperparameters with the latent variables integrated out, and draws of these.

All values that are asked for at once are evaluated together, as far as that goes; others one after the other.
"""

import itertools

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pymc_ngvi.core.sizes import AT_ONCE
from pymc_ngvi.core.types import Array, GaussianState, RowRules
from pymc_ngvi.density.rows_given import RowsGiven
from pymc_ngvi.marginal.sampler import N_DRAWS, variances_of
from pymc_ngvi.nested.defence import Defence
from pymc_ngvi.nested.found import HOPELESS, Drawn, missing
from pymc_ngvi.nested.many import LEFT, SOLVED, ManyFitter, ManyGaussians, Which
from pymc_ngvi.rows.expectation import row_slices
from pymc_ngvi.rows.linear_map import Seen

#: Numbers of rows, of what predictors are found from, and of fronts, in a batch: of dense precisions, fewer, as these
#: take their time anyway, and are to stay in the cache; hyperparameters in a batch at most.
_OF_ROWS, _OF_PREDICTORS, _OF_FRONTS, _OF_DENSE, _MOST = 2**21, 2**23, 2**23, 2**19, 256
#: Nodes of a row, about.
_NODES = 16
#: Draws behind a correction at most, and values of rows in it; standard error of it for which more are taken.
_MOST_DRAWS, _MOST_VALUES, _ERROR = 512, 2**19, 0.1
#: Nats below the top up to which hyperparameters count.
_NEAR = 4.0
#: How often fits are begun from others, those found before among them; standard deviations to begin with where nothing
#: is known.
_TURNS, _FIRST_SCALES = 2, (1.0, 0.1, 0.01)


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


class LatentMarginal:
    """Evaluates log m, each time from the nearest conditional fit."""

    def __init__(self, given: RowsGiven, seed: int, home: GaussianState | None = None) -> None:
        self._given, self._fitter, fronts = given, ManyFitter(given.precisions), given.precisions.fronts
        sizes = _OF_ROWS // (_NODES * given.n_rows), _OF_PREDICTORS // given.n_values
        of_fronts = _OF_DENSE if len(fronts.parts.depth) == 1 else _OF_FRONTS
        self._size = max(1, min(*sizes, of_fronts // max(fronts.n_fronts, 1), _MOST))
        self.n_dim, self.n_inside, self.n_fits = given.n_dim, len(given.inside), 0
        self._far = [(given.start, np.full(given.n_dim, scale)) for scale in _FIRST_SCALES]
        if home is not None:
            inside = given.inside[given.kept]
            self._far.insert(0, (home.mean()[inside], home.sd()[inside]))
        most = min(AT_ONCE // max(given.n_dim, 1), _MOST_VALUES // max(given.n_evaluations, 1), _MOST_DRAWS)
        #: Draws that corrections are found from; where weights vary much, twice as many, and so on.
        self._ends = [0, *(n for k in range(most.bit_length()) if (n := N_DRAWS * 2**k) <= max(most, N_DRAWS))]
        rng = np.random.default_rng(seed)
        halves = [rng.standard_normal((given.n_dim, (b - a) // 2)) for a, b in itertools.pairwise(self._ends)]
        self._base = np.concatenate([sign * half for half in halves for sign in (1.0, -1.0)], axis=1)
        self.known: list[EvaluatedMarginal] = []
        self._scale = np.ones(len(given.outside))

    def __call__(self, g: Array) -> Array:
        """Return log m at some values, (n,) from (n, p), -inf where there is no fit."""
        return np.array([-np.inf if found is None else found.value for found in self.at(g)])

    def at(self, g: Array) -> list[EvaluatedMarginal | None]:
        """Return what is found at values of the hyperparameters, (n, p); None where there is no fit."""
        result: list[EvaluatedMarginal | None] = [None] * len(g)
        for _ in range(_TURNS):
            left = np.array([k for k, found in enumerate(result) if found is None], dtype=np.intp)
            starts = [self.nearest(g[left])] if self.known else self._far
            for which, fits in self.fits(g[left], starts, SOLVED):
                lacks, doubts = self._missing(g[left[which]], fits)
                for i, k in enumerate(left[which].tolist()):
                    value = fits.elbo[i] + lacks[i]
                    result[k] = EvaluatedMarginal(g[k], value, lacks[i], doubts[i], fits.seen[i], fits.rules[i])
            self.known += [found for k in left if (found := result[k]) is not None]
        return result

    @property
    def _top(self) -> int:
        return int(np.argmax([one.value for one in self.known]))

    def nearest(self, g: Array) -> Which:
        """Return which of the fits that are known are nearest; where all is Gaussian, one is as good as another."""
        if self._given.is_quadratic:
            return np.zeros(len(g), dtype=np.intp)
        apart = (g[:, None] - np.array([one.g for one in self.known])) / self._scale
        return np.einsum("nkp,nkp->nk", apart, apart).argmin(axis=1)

    def fits(
        self, g: Array, starts: Sequence[Which | tuple[Array, Array]], left: float
    ) -> Iterator[tuple[Which, ManyGaussians]]:
        """Yield fits at hyperparameters, (n, p), and where they are.

        They begin from known ones, or from means and standard deviations; where that fails, from the next of these.
        """
        top = max((one.value for one in self.known), default=-np.inf)
        for part in row_slices(len(g), self._size):
            rows, agrees = self._given.at(g[part])
            at = np.flatnonzero(agrees)
            self.n_fits += len(at)
            for start in starts:
                if not len(at):
                    break
                if isinstance(start, tuple):
                    found = self._fitter.fit_from_far(rows[at], *start, left)
                else:
                    known = [self.known[k] for k in start[part][at]]
                    seen, rules = Seen.stacked([k.seen for k in known]), RowRules.stacked([k.rules for k in known])
                    found = self._fitter.fit(rows[at], seen, rules, left, top)
                without = np.ones(len(at), dtype=bool)
                for fits in found:
                    without[fits.which] = False
                    yield part.start + at[fits.which], fits
                at = at[without]

    def _missing(self, g: Array, fits: ManyGaussians) -> tuple[Array, Array]:
        """Return what ELBOs lack, and how sure that is; with more draws where their weights vary."""
        lacks, doubts = np.zeros((2, len(g)))
        left, log_ratio = np.arange(0 if self._given.is_quadratic else len(g)), np.empty((len(g), 0))
        for start, end in itertools.pairwise(self._ends):
            new = list[Array]()
            for part in row_slices(len(left), max(1, self._size * N_DRAWS // (end - start))):
                some = fits[left[part]]
                base = np.broadcast_to(self._base[:, start:end], (len(some.elbo), self.n_dim, end - start))
                new.append(self._weighed(g[left[part]], some, base)[1] - some.elbo[:, None])
            if not new:
                break
            log_ratio = np.concatenate([log_ratio, np.concatenate(new)], axis=1)
            lacks[left], doubts[left] = missing(log_ratio)
            variance = variances_of(log_ratio)
            is_rough = (variance < HOPELESS) & (np.expm1(np.minimum(variance, HOPELESS)) > end * _ERROR**2)
            left, log_ratio = left[is_rough], log_ratio[is_rough]
        return lacks, doubts

    def _weighed(self, g: Array, fits: ManyGaussians, base: Array) -> tuple[Array, Array]:
        """Return draws of fits, (n, n_dim, m), and log p - log q there, (n, m); -inf where that is no number."""
        x = fits.draws(base)
        with np.errstate(all="ignore"):
            log_ratio = self._given.logp(fits.rows, g, x) - fits.log_density(base)
        return x, np.where(np.isfinite(log_ratio), log_ratio, -np.inf)

    def variance(self) -> float:
        """Return the variance of log weights, given the hyperparameters, at the highest of the fits so far."""
        top = self.known[self._top]
        return 2.0 * (top.correction + top.doubt)  # half of it is what the ELBO lacks, to second order

    def doubt(self) -> float:
        """Return how far two estimates of what ELBOs lack are apart, an sd over the hyperparameters in nats."""
        values, doubts = np.array([(one.value, one.doubt) for one in self.known]).T
        return float(np.std(doubts[values > values.max() - _NEAR]))

    def begin_draws(self, top: Array, scale: Array) -> None:
        """Find in which directions draws come from farther out; see `Marginal`."""
        self._scale, highest = scale, np.array([self._top])
        [(_, fit)] = self.fits(self.known[self._top].g[None], [highest], LEFT)
        self._defence = Defence.of(self._given, fit)

    def drawn(self, g: Array, base: Array, rng: np.random.Generator) -> Iterator[tuple[Which, Drawn]]:
        """Yield draws, the last of them moved out; see `Marginal`."""
        picked = self._defence.picked(len(g), base.shape[2], rng)
        for which, fits in self.fits(g, [self.nearest(g), np.full(len(g), self._top)], LEFT):
            normals, log_mixed = base[which], np.zeros((len(which), base.shape[2]))
            if self._given.is_quadratic:
                latents, log_ratio = fits.draws(normals), np.repeat(fits.elbo[:, None], base.shape[2], axis=1)
            else:
                normals, log_mixed = self._defence.moved(fits, normals, picked[which])
                latents, log_ratio = self._weighed(g[which], fits, normals)
            latents = fits.rows.drawn_inside(latents, rng)
            yield which, Drawn(fits.elbo, latents, log_ratio - log_mixed, log_mixed)
