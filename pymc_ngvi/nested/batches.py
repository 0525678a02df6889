"""Conditional fits of many hyperparameters in batches, with log m there, and draws of the latent variables."""

from collections.abc import Iterator, Sequence

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.types import Array, RowRules
from pymc_ngvi.density.rows_given import RowsGiven
from pymc_ngvi.density.rows_left_over import RowsLeftOver
from pymc_ngvi.density.rows_over import RowsOver
from pymc_ngvi.families.matrices.sparse.precisions import Precisions
from pymc_ngvi.nested.defence import Defence
from pymc_ngvi.nested.found import FEWEST, LEFT, SOLVED, Drawn, EvaluatedMarginal, missing, n_wanted
from pymc_ngvi.nested.many import ManyFitter, ManyGaussians, Which
from pymc_ngvi.nested.starts import Starts
from pymc_ngvi.rows.expectation import row_slices
from pymc_ngvi.rows.many import ManyRows
from pymc_ngvi.rows.seen import ManyRules, ManySeen, Seen

#: Numbers of rows, of what predictors are found from, and of fronts, in a batch: of dense precisions, fewer, as these
#: take their time anyway, and are to stay in the cache; hyperparameters in a batch at most.
_OF_ROWS, _OF_PREDICTORS, _OF_FRONTS, _OF_DENSE, _MOST = 2**21, 2**23, 2**23, 2**19, 256
#: Nodes of a row, about.
_NODES = 16


class ManyConditionals:
    """Fits the latent variables at many hyperparameters.

    Parameters
    ----------
    given : RowsGiven
    over : RowsOver or RowsLeftOver
        Its rows at many values.

    Attributes
    ----------
    n_fits : int
        Taken so far.
    """

    def __init__(self, given: RowsGiven, over: RowsOver | RowsLeftOver) -> None:
        self._given, self._over = given, over
        precisions = Precisions(over.entries.pattern)
        self._fitter = ManyFitter(precisions)
        sizes = _OF_ROWS // (_NODES * given.rows.n_rows), _OF_PREDICTORS // over.n_values
        of_fronts = _OF_DENSE if len(precisions.fronts.stacks) == 1 else _OF_FRONTS
        self._size = max(1, min(*sizes, of_fronts // max(precisions.fronts.n_fronts, 1), _MOST))
        self.n_fits = 0

    @classmethod
    def of(cls, given: RowsGiven) -> "ManyConditionals | None":
        """Return what fits rows; None where hyperparameters are to be taken one after the other."""
        return None if given.over is None else cls(given, given.over)

    def at(
        self, g: Array, seen: Sequence[Seen], rules: Sequence[RowRules], base: Array
    ) -> Iterator[tuple[int, EvaluatedMarginal]]:
        """Yield log m at hyperparameters, (n, p), where there are fits.

        Parameters
        ----------
        g : ndarray, shape (n, p)
        seen : sequence of Seen
            From which to begin.
        rules : sequence of RowRules
        base : ndarray, shape (n_draws, n_dim)
            Standard normals behind corrections; the first are used where they will do.
        """
        for part, rows in self._parts(g):
            start, by = ManySeen.of([seen[k] for k in part]), ManyRules.of([rules[k] for k in part])
            fits = self._fitter.fit(rows, start, by, SOLVED)
            if fits is None:
                continue
            lacking = self._missing(g[part], fits, base)
            for i, k in enumerate(fits.which):
                there = g[part[k]], fits.elbo[i] + lacking[i][0]
                yield int(part[k]), EvaluatedMarginal(*there, *lacking[i], fits.seen.one(i), fits.rules.one(i))

    def drawn(
        self,
        g: Array,
        starts: Starts,
        base: Array,
        defence: Defence,
        picked: NDArray[np.intp],
        rng: np.random.Generator,
    ) -> Iterator[tuple[int, Drawn]]:
        """Yield draws at hyperparameters, (n, p), where there are fits; see `LatentMarginal.drawn`."""
        for part, rows in self._parts(g):
            predicted, nearest, rules = starts.of(g[part])
            left = np.arange(len(part))
            for start in (predicted, nearest):
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
            rows, agrees = self._over.at(g[part])
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
                some = fits.some(at)
                more = np.broadcast_to(base[FEWEST:n].T, (len(at), base.shape[1], n - FEWEST))
                ratio = self._weighed(g[some.which], some, more)[1] - some.elbo[:, None]
                for k, one in zip(at.tolist(), ratio, strict=True):
                    found[k] = missing(np.concatenate([log_ratio[k], one]))
        return found

    def _weighed(self, g: Array, fits: ManyGaussians, base: Array) -> tuple[Array, Array]:
        """Return draws of fits, (n, n_dim, m), and log p - log q there, (n, m); -inf where that is no number."""
        x = fits.draws(base)
        with np.errstate(all="ignore"):
            if self._given.rows.leaves_out_conditions:
                log_p = self._over.logp(g, np.swapaxes(x, 1, 2))
            else:
                log_p = fits.rows.values(x)
            log_ratio = log_p - fits.log_density(base)
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
            base, log_mixed = defence.moved_many(fits, base, picked)
            latents, log_ratio = self._weighed(g, fits, base)
        factors = fits.factors
        mean, sd = fits.rows.moments_inside(fits.mean, factors.sd, fits.seen, fits.rules, factors.covariance)
        latents = fits.rows.drawn_inside(latents, rng)
        for i in range(n):
            yield Drawn(fits.elbo[i], mean[i], sd[i], latents[i].T, log_ratio[i] - log_mixed[i], log_mixed[i])
