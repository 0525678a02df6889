"""log m(g), the log density of hyperparameters with the latent variables integrated out, and draws of these.

All values that are asked for at once are evaluated together, as far as that goes; others one after the other.
"""

import itertools

from collections.abc import Iterator, Sequence

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.sizes import AT_ONCE
from pymc_ngvi.core.types import Array, GaussianState, RowRules
from pymc_ngvi.density.rows_given import RowsGiven
from pymc_ngvi.nested.defence import Defence
from pymc_ngvi.nested.found import FEWEST, LEFT, SOLVED, Drawn, EvaluatedMarginal, missing, n_wanted
from pymc_ngvi.nested.many import ManyFitter, ManyGaussians, Which
from pymc_ngvi.rows.expectation import row_slices
from pymc_ngvi.rows.linear_map import Seen
from pymc_ngvi.rows.many import ManyRows


class NearestFits:
    """Where conditional fits begin: from the nearest of those that are known, and from the highest one."""

    def __init__(self, known: Sequence[EvaluatedMarginal], scale: Array) -> None:
        self._scale = scale
        self._points = np.array([one.g for one in known]) / scale
        self._seen = Seen.stacked([one.seen for one in known])
        self._rules = RowRules.stacked([one.rules for one in known])
        self._top = int(np.argmax([one.value for one in known]))

    def of(self, g: Array) -> tuple[Seen, Seen, RowRules]:
        """Return what rows may see at hyperparameters, (n, p), by either, and rules."""
        apart = ((g / self._scale)[:, None] - self._points) ** 2
        nearest = apart.sum(axis=2).argmin(axis=1)
        return self._seen[nearest], self._seen[np.full(len(g), self._top)], self._rules[nearest]


# --- conditional fits of many hyperparameters in batches, with log m there, and draws of the latent variables ---

#: Numbers of rows, of what predictors are found from, and of fronts, in a batch: of dense precisions, fewer, as these
#: take their time anyway, and are to stay in the cache; hyperparameters in a batch at most.
_OF_ROWS, _OF_PREDICTORS, _OF_FRONTS, _OF_DENSE, _MOST = 2**21, 2**23, 2**23, 2**19, 256
#: Nodes of a row, about.
_NODES = 16


class ManyConditionals:
    """Fits the latent variables at many hyperparameters."""

    def __init__(self, given: RowsGiven) -> None:
        self._given, fronts = given, given.precisions.fronts
        self._fitter = ManyFitter(given.precisions)
        sizes = _OF_ROWS // (_NODES * given.n_rows), _OF_PREDICTORS // given.n_values
        of_fronts = _OF_DENSE if len(fronts.parts.depth) == 1 else _OF_FRONTS
        self._size = max(1, min(*sizes, of_fronts // max(fronts.n_fronts, 1), _MOST))
        self.n_fits = 0

    def at(
        self, g: Array, seen: Sequence[Seen], rules: Sequence[RowRules], base: Array
    ) -> Iterator[tuple[int, EvaluatedMarginal]]:
        """Yield log m at hyperparameters, (n, p), where there are fits."""
        for part, rows in self._parts(g):
            start, by = Seen.stacked([seen[k] for k in part]), RowRules.stacked([rules[k] for k in part])
            if (fits := self._fitter.fit(rows, start, by, SOLVED)) is not None:
                yield from self._evaluated(g, part, fits, base)

    def from_far(
        self, g: Array, starts: Sequence[tuple[Array, Array]], base: Array
    ) -> Iterator[tuple[int, EvaluatedMarginal]]:
        """Yield the same, begun from means and standard deviations that know nothing of each other, one by one."""
        for part, rows in self._parts(g):
            left = np.arange(len(part))
            for mean, sd in starts:
                shape = len(left), len(mean)
                fits = self._fitter.fit_from_far(
                    rows[left], np.broadcast_to(mean, shape), np.broadcast_to(sd, shape), SOLVED
                )
                if fits is not None:
                    yield from self._evaluated(g, part[left], fits, base)
                    left = np.setdiff1d(left, left[fits.which])
                if not len(left):
                    break

    def _evaluated(
        self, g: Array, part: Which, fits: ManyGaussians, base: Array
    ) -> Iterator[tuple[int, EvaluatedMarginal]]:
        lacking = self._missing(g[part], fits, base)
        for i, k in enumerate(fits.which):
            there = g[part[k]], fits.elbo[i] + lacking[i][0]
            yield int(part[k]), EvaluatedMarginal(*there, *lacking[i], fits.seen[i], fits.rules[i])

    def fit(self, at: EvaluatedMarginal) -> ManyGaussians:
        """Return a fit that there was."""
        start, rules = Seen.stacked([at.seen]), RowRules.stacked([at.rules])
        [(_, rows)] = self._parts(at.g[None])
        fits = self._fitter.fit(rows, start, rules, SOLVED)
        assert fits is not None
        return fits

    def drawn(
        self,
        g: Array,
        starts: NearestFits,
        base: Array,
        defence: Defence,
        picked: NDArray[np.intp],
        rng: np.random.Generator,
    ) -> Iterator[tuple[int, Drawn]]:
        """Yield draws at hyperparameters, (n, p), where there are fits; see `LatentMarginal.drawn`."""
        for part, rows in self._parts(g):
            nearest, top, rules = starts.of(g[part])
            left = np.arange(len(part))
            for start in (nearest, top):
                fits = self._fitter.fit(rows[left], start[left], rules[left], LEFT)
                if fits is not None:
                    at = left[fits.which]
                    there = part[at]
                    draws = self._draws(g[there], fits, base[there], defence, picked[there], rng)
                    yield from zip(there.tolist(), draws, strict=True)
                    left = np.setdiff1d(left, at)
                if not len(left):
                    break

    def _parts(self, g: Array) -> Iterator[tuple[Which, ManyRows]]:
        """Yield batches of hyperparameters at which rows add up to log p, with these."""
        for start in range(0, len(g), self._size):
            part = np.arange(start, min(start + self._size, len(g)))
            rows, agrees = self._given.at(g[part])
            if agrees.any():
                self.n_fits += int(agrees.sum())
                yield part[agrees], rows[np.flatnonzero(agrees)]

    def _missing(self, g: Array, fits: ManyGaussians, base: Array) -> list[tuple[float, float]]:
        """Return what ELBOs lack, and how sure that is; with more draws where their weights vary."""
        if self._given.is_quadratic:
            return [(0.0, 0.0)] * len(fits.which)
        few = np.broadcast_to(base[:FEWEST].T, (len(fits.which), *base[:FEWEST].T.shape))
        log_ratio = self._weighed(g[fits.which], fits, few)[1] - fits.elbo[:, None]
        found = [missing(one) for one in log_ratio]
        wanted = np.array([n_wanted(one, len(base)) for one in log_ratio])
        for n in np.unique(wanted[wanted > log_ratio.shape[1]]).tolist():
            those = np.flatnonzero(wanted == n)
            for part in row_slices(len(those), max(1, self._size * FEWEST // n)):
                at = those[part]
                some = fits[at]
                more = np.broadcast_to(base[FEWEST:n].T, (len(at), base.shape[1], n - FEWEST))
                ratio = self._weighed(g[some.which], some, more)[1] - some.elbo[:, None]
                for k, one in zip(at.tolist(), ratio, strict=True):
                    found[k] = missing(np.concatenate([log_ratio[k], one]))
        return found

    def _weighed(self, g: Array, fits: ManyGaussians, base: Array) -> tuple[Array, Array]:
        """Return draws of fits, (n, n_dim, m), and log p - log q there, (n, m); -inf where that is no number."""
        x = fits.draws(base)
        with np.errstate(all="ignore"):
            log_ratio = self._given.logp(fits.rows, g, x) - fits.log_density(base)
        return x, np.where(np.isfinite(log_ratio), log_ratio, -np.inf)

    def _draws(
        self,
        g: Array,
        fits: ManyGaussians,
        base: Array,
        defence: Defence,
        picked: NDArray[np.intp],
        rng: np.random.Generator,
    ) -> Iterator[Drawn]:
        base = np.ascontiguousarray(np.swapaxes(base, 1, 2))
        n, _, m = base.shape
        if self._given.is_quadratic:
            latents, log_mixed = fits.draws(base), np.zeros((n, m))
            log_ratio = np.repeat(fits.elbo[:, None], m, axis=1)
        else:
            base, log_mixed = defence.moved(fits, base, picked)
            latents, log_ratio = self._weighed(g, fits, base)
        factors = fits.factors
        mean, sd = fits.rows.moments_inside(fits.mean, factors.sd, fits.seen, fits.rules, factors.covariance)
        latents = fits.rows.drawn_inside(latents, rng)
        for i in range(n):
            yield Drawn(fits.elbo[i], mean[i], sd[i], latents[i].T, log_ratio[i] - log_mixed[i], log_mixed[i])


# --- log m(g), the log density of hyperparameters with the latent variables integrated out, and draws of these ---

#: Draws behind a correction; values of rows in it at most.
_N_DRAWS, _MOST_VALUES = 512, 2**19
#: Nats below the top up to which hyperparameters count.
_NEAR = 4.0
#: How often fits are begun from others, those found before among them; distance, in scales, from which on a fit that is
#: not found so is not looked for; standard deviations to begin with where nothing is known.
_TURNS, _FAR, _FIRST_SCALES = 2, 6.0, (1.0, 0.1, 0.01)


class LatentMarginal:
    """Evaluates log m, each time from the nearest conditional fit."""

    #: What ELBOs lack is estimated, or found to be nothing.
    is_exact = False

    def __init__(self, given: RowsGiven, seed: int, home: GaussianState | None = None) -> None:
        self._given, self._many = given, ManyConditionals(given)
        self._far = [(given.start, np.full(given.n_dim, scale)) for scale in _FIRST_SCALES]
        if home is not None:
            inside = given.inside[given.kept]
            self._far.insert(0, (home.mean()[inside], home.sd()[inside]))
        most = min(AT_ONCE // max(given.n_dim, 1), _MOST_VALUES // max(given.n_evaluations, 1))
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
    def n_fits(self) -> int:
        """Conditional fits so far."""
        return self._many.n_fits

    @property
    def is_cheap(self) -> bool:
        """Whether log m takes one step, from anywhere."""
        return self._given.is_quadratic

    def __call__(self, g: Array) -> Array:
        """Return log m at some values, (n,) from (n, p), -inf where there is no fit."""
        return np.array([-np.inf if found is None else found.value for found in self.at(g)])

    def at(self, g: Array) -> list[EvaluatedMarginal | None]:
        """Return what is found at values of the hyperparameters, (n, p); None where there is no fit."""
        result: list[EvaluatedMarginal | None] = [None] * len(g)
        for turn in range(_TURNS + 1):
            left = np.array([k for k, found in enumerate(result) if found is None], dtype=np.intp)
            if turn < _TURNS and self.known:
                starts = [self.known[0] if self.is_cheap else self._nearest(point) for point in g[left]]
                found = list(self._many.at(g[left], [s.seen for s in starts], [s.rules for s in starts], self._base))
            else:
                left = left[self._are_near(g[left])]
                found = list(self._many.from_far(g[left], self._far, self._base))
            for number, one in found:
                result[left[number]] = one
            self.known += [one for _, one in found] if self.records or not self.known else []
        return result

    def _are_near(self, g: Array) -> NDArray[np.bool_]:
        """Tell which values are not far out, where log m is next to nothing and fits take long."""
        if not self.known:
            return np.ones(len(g), dtype=bool)
        return np.asarray(np.abs((g - self._top.g) / self.scale).max(axis=1) < _FAR)

    @property
    def _top(self) -> EvaluatedMarginal:
        return max(self.known, key=lambda one: one.value)

    def variance(self) -> float:
        """Return the variance of log weights, given the hyperparameters, at the highest of the fits so far."""
        return 2.0 * (self._top.correction + self._top.doubt)  # half of it is what the ELBO lacks, to second order

    def doubt(self) -> float:
        """Return how far two estimates of what ELBOs lack are apart, an sd over the hyperparameters in nats."""
        values, doubts = np.array([k.value for k in self.known]), np.array([k.doubt for k in self.known])
        near = values > values.max() - _NEAR
        return float(np.std(doubts[near]))

    def begin_round(self) -> None:
        """Find what fits begin from, and in which directions draws come from farther out, by what is known by now."""
        self._starts = NearestFits(self.known, self.scale)
        self._defence = Defence.of(self._given, self._many.fit(self._top))

    def drawn(self, g: Array, base: Array, rng: np.random.Generator) -> list[Drawn | None]:
        """Return the Gaussians at hyperparameters, and draws, the last of them moved out; see `Marginal`."""
        result: list[Drawn | None] = [None] * len(g)
        picked = self._defence.picked(len(g), base.shape[1], rng)
        for number, found in self._many.drawn(g, self._starts, base, self._defence, picked, rng):
            result[number] = found
        return result

    def _nearest(self, g: Array) -> EvaluatedMarginal:
        apart = (np.array([k.g for k in self.known]) - g) / self.scale
        return self.known[int(np.argmin((apart**2).sum(axis=1)))]
