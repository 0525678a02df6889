"""Gaussian fits of the latent variables, hyperparameters being given."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from pymc_ngvi.core import prices
from pymc_ngvi.core.refusal import OtherForm
from pymc_ngvi.core.status import Status
from pymc_ngvi.core.target import Target
from pymc_ngvi.core.types import Array, BaseDraws, GaussianState, RowRules
from pymc_ngvi.density.rows_given import RowsGiven
from pymc_ngvi.estimators import Quadrature
from pymc_ngvi.families.dissection import cheapest_form, structure_of
from pymc_ngvi.families.family import Maker
from pymc_ngvi.families.gaussian import FullState
from pymc_ngvi.families.sparse import SparseFamily
from pymc_ngvi.nested.seconds import PER_FIT, of_algebra
from pymc_ngvi.rows.row_hessian import PredictorMeanHessian
from pymc_ngvi.rows.seen import Seen
from pymc_ngvi.steps.linesearch import LineSearch
from pymc_ngvi.updates import natural

#: Nats that a conditional fit may lack, before what a line search makes of it; steps at most.
_TOL, _MOST_STEPS = 0.01, 60
#: Steps that are tried first, at most, their sizes, and nats that these may leave.
_MOST_FULL, _SIZES, _SOLVED = 12, (1.0, 0.4, 0.15), 1e-4
_NO_DRAWS = BaseDraws(np.empty((0, 0)), 1)
#: Nats that a fit may lack that has not converged.
_USABLE = 0.1
#: Standard deviations to begin with where nothing is known.
_FIRST_SCALES = (1.0, 0.1, 0.01)


@dataclass(frozen=True, eq=False)
class LatentGaussian:
    """The Gaussian of the latent variables at one value of the hyperparameters."""

    q: GaussianState
    #: Nats, of log p at these hyperparameters.
    elbo: float
    #: What rows see of q: from which a fit at other hyperparameters begins.
    seen: Seen
    #: By which rows were integrated.
    rules: RowRules


class ConditionalFits:
    """Fits the latent variables at one value of the hyperparameters after another."""

    def __init__(self, given: RowsGiven, home: GaussianState | None = None) -> None:
        self._given, self._before, self._home = given, given.n_hessians, home
        self._target = cast(Target, given)  # expectations are all that is taken
        self._family = _family(given)
        self.n_fits = 0

    @property
    def n_expectations(self) -> int:
        """Expectations taken so far, but for those that fits begin with."""
        return self._given.n_hessians - self._before

    def fit(
        self,
        values: Array,
        near: Sequence[Seen],
        rules: RowRules | None = None,
        *,
        left: float = _SOLVED,
        thorough: bool = True,
    ) -> LatentGaussian | None:
        """Return the fit at some values, (n_outside,); None where there is none."""
        self.n_fits += 1
        before = self._given.n_hessians
        if not self._given.give(values):
            return None
        try:
            for start in self._starts(near, rules):
                if (found := self._by_steps(start, rules, left)) is not None:
                    return found
                if thorough and (found := self._by_search(start)) is not None:
                    return found
        except (OtherForm, np.linalg.LinAlgError):
            pass
        finally:
            prices.count(PER_FIT + (self._given.n_hessians - before) * of_algebra(self._given))
        return None

    def _by_steps(self, start: GaussianState, rules: RowRules | None, left: float) -> LatentGaussian | None:
        """Take natural steps of size 1, or a part of it, each of which has to raise the ELBO; None where none does."""
        quadrature, q, adapt = Quadrature(), start, rules is None
        now = quadrature.by_rules(self._target, q, rules)
        for _ in range(_MOST_FULL):
            if not now.finite.all():
                return None
            moments = quadrature.moments(self._target, q, _NO_DRAWS, now)
            if moments.gap < left:
                return LatentGaussian(q, now.elbo, self._given.rows.seen(q), now.expectation.rules)
            for size in _SIZES:
                new = natural(q, moments, size, False)
                if new is None:
                    continue
                then = quadrature.by_rules(self._target, new, now.expectation.rules, adapt=adapt)
                if then.elbo > now.elbo:
                    break
            else:
                return None
            q, now = new, then
        return None

    def _by_search(self, start: GaussianState) -> LatentGaussian | None:
        """Fit by a line search."""
        rule = LineSearch(self._target, natural, Quadrature(), seed=0, tol=_TOL)
        state, status = rule.init(start), None
        for _ in range(_MOST_STEPS):
            if (status := rule.terminate(state)) is not None:
                break
            state = rule.step(state)
        if not np.isfinite(state.elbo) or (status is not Status.CONVERGED and not state.gap < _USABLE):
            return None
        rules = Quadrature().by_rules(self._target, state.q).expectation.rules
        return LatentGaussian(state.q, state.elbo, self._given.rows.seen(state.q), rules)

    def _starts(self, near: Sequence[Seen], rules: RowRules | None) -> Iterator[GaussianState]:
        """Yield states to begin from, the most promising one first."""
        for seen in near:
            with np.errstate(all="ignore"):
                start = self._by_sites(seen, rules)
            if start is not None:
                yield start
        if self._home is not None:
            inside = self._given.inside[self._given.kept]
            yield self._family.from_scale(self._home.mean()[inside], self._home.sd()[inside])
        for scale in _FIRST_SCALES:
            yield self._family.from_scale(self._given.start(), np.full(self._given.n_dim, scale))

    def _by_sites(self, seen: Seen, rules: RowRules | None) -> GaussianState | None:
        """Return the natural step of size 1 from where predictors are as they were at other hyperparameters.

        What rows say of their predictors changes little, and what the prior says is exact after a step: coordinates of
        their own scale, as those of a Gaussian process that is written with a Cholesky factor, do not matter.
        """
        expectation = self._given.rows.under_seen(seen, self._given, rules)
        hessian = expectation.hessian
        assert isinstance(hessian, PredictorMeanHessian)
        linear = hessian.linear
        back = hessian.matrix @ (linear.offset - seen.mean)
        slope = expectation.grad + linear.transposed_times(back[None])[0]
        if not (np.isfinite(slope).all() and np.isfinite(hessian.matrix.data).all()):
            return None
        base = self._family.from_scale(np.zeros(self._given.n_dim), np.ones(self._given.n_dim))
        found = base.precision_scaled_by(hessian.whitened(base), slope)
        if found is None:
            return None
        state, location = found
        return replace(state, location=location)


def _family(given: RowsGiven) -> Maker[Any]:
    """Return the Gaussians that cost least."""
    form = cheapest_form(given.summed, lambda: given.pattern)
    return FullState if form is None else SparseFamily(structure_of(form))
