r"""Natural steps by a line search on an ELBO that is exact.

Nothing is random: a step of size 1 is taken where the ELBO rises by it, a shorter one where it would fall, and the fit
ends where neither the gradient nor the last step promises more than a small part of the tolerance. Secants correct the
natural gradient near the optimum, where it creeps along scales of group effects.
"""

import functools

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, cast

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.draws import draws_of
from pymc_ngvi.core.elbo import Elbo
from pymc_ngvi.core.status import Status
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import (
    Array,
    Assessment,
    BaseDraws,
    Bends,
    BentRowsTarget,
    Density,
    Evaluation,
    GaussianState,
    Moments,
    RowRules,
    RowsTarget,
    Target,
    VariationalState,
)
from pymc_ngvi.estimators.quadrature import ExactEvaluation, Quadrature
from pymc_ngvi.steps.adaptive.growth import Growth
from pymc_ngvi.steps.adaptive.scales import MAX_RECOVERIES, Tools, recovered
from pymc_ngvi.steps.adaptive.secant import Pair, correct, moments_of, natural_gradient, trusted
from pymc_ngvi.steps.exact import ExactRule
from pymc_ngvi.steps.newton import Newton, newton
from pymc_ngvi.steps.schedule.linesearch import Failure, search
from pymc_ngvi.steps.schedule.state import Step

#: Steps kept for the secant correction: where the metric is exact, and where it is not; the gap in nats, and for each
#: coordinate, below which steps are learned from; part of what its slope promises that a corrected step must gain.
_N_PAIRS, _N_PAIRS_INEXACT, _NEAR, _NEAR_PER_DIM, _LEAST_RATIO = 8, 12, 0.5, 5e-3, 0.1
#: Part of what the slope promises, from which on a step could have been longer, and the longest.
_FLAT, _LONGEST = 0.75, 64.0
#: Part of the tolerance that a converged fit may have left: what is exact may as well be found exactly.
_PART = 0.002
#: Steps in a row that gain nothing, after which there is nothing to gain.
_MOST_IDLE = 3
#: Nats to which an ELBO is known at best, as the tolerance of quadrature has it: a smaller gap means nothing.
_KNOWN = 1e-4
#: Step size below which a fit gets nowhere that is held back by where finer rules are not finite.
_CREEPING = 1e-3
#: Standard deviations that a mean may move without another look at how fine rules have to be; steps of Newton that are
#: tried along one direction, and times that none may be found.
_FAR, _FEW_TRIALS, _MOST_FAILURES = 0.5, 3, 3
#: Draws of a converged q at which conditions that rows leave out are looked for.
_N_CHECKED = 32
_NO_DRAWS = BaseDraws(np.empty((0, 0)), 1)


@stored("linesearch.state")
@dataclass(frozen=True)
class LineSearchState:
    """What one iteration hands to the next.

    Parameters
    ----------
    q : GaussianState
    elbo : float
    moments : Moments
    rules : RowRules or None
        By which the ELBO was taken; None where it is not finite.
    error : float
        Nats by which it may be wrong; NaN where the rules were chosen for another state.
    step_size : float
        The last one accepted.
    next_step_size : float
        To be tried next.
    pairs : tuple of Pair
        Recent steps.
    left : float
        Nats still to be gained, as the gradient and the curvature that the steps have met tell.
    gain : float
        Nats gained by the last step.
    idle : int
        Steps in a row that gained nothing.
    stalled, blind : bool
        The last search found no step; none of those that it tried has a finite ELBO.
    growth : Growth
        Of standard deviations.
    n_recoveries : int
        Times that may follow in which lost scales are looked for.
    bends : Bends or None
        How expected derivatives of rows change.
    sites : ndarray, shape (n_rows,), or None
        The part of the precision that is of each row; None where it is not known.
    bent : bool
        Whether the ELBO fell by a natural step of full size: steps of Newton are tried from then on.
    n_newton : int
        Times that these may fail, or leave the support.
    """

    q: GaussianState
    elbo: float
    moments: Moments
    rules: RowRules | None = None
    error: float = np.nan
    step_size: float = 1.0
    next_step_size: float = 1.0
    pairs: tuple[Pair, ...] = ()
    left: float = np.inf
    gain: float = np.inf
    idle: int = 0
    stalled: bool = False
    blind: bool = False
    growth: Growth = field(default_factory=Growth)
    n_recoveries: int = MAX_RECOVERIES
    bends: Bends | None = None
    sites: Array | None = None
    bent: bool = False
    n_newton: int = _MOST_FAILURES

    n_draws = 0
    n_dropped = 0

    @property
    def gap(self) -> float:
        """Nats still to be gained, estimated."""
        return max(self.moments.gap, self.left) if np.isfinite(self.left) else self.moments.gap

    @property
    def growing(self) -> NDArray[np.intp]:
        """Coordinates whose standard deviations grow without end, those that grew most first."""
        return self.growth.coordinates()


class _Start(NamedTuple):
    """A state that was tried as a start."""

    q: GaussianState
    evaluation: ExactEvaluation


class _Found(NamedTuple):
    """A step that was accepted, the nats gained, and whether log p is finite at what was tried before."""

    step: Step[GaussianState, ExactEvaluation]
    gain: float
    all_finite: bool


class LineSearch(ExactRule[Target, LineSearchState]):
    """Natural steps that never lower an exact ELBO; see `StepRule` for the parameters."""

    _best_start: _Start | None = None

    def first_evaluation(self, q: GaussianState) -> Evaluation:
        """Evaluate a starting state; what is found of the best one serves `init`."""
        evaluation = self._estimator.by_rules(self._target, q)
        if self._best_start is None or evaluation.elbo > self._best_start.evaluation.elbo:
            self._best_start = _Start(q, evaluation)
        return evaluation

    def init(self, q: GaussianState) -> LineSearchState:
        """Return the state before the first iteration."""
        none = np.zeros(q.n_dim)
        nothing = Moments(none, none, none, none, np.inf, floor=0.0, floor_sd=0.0)
        start, self._best_start = self._best_start, None
        known = start.evaluation if start is not None and start.q is q else None
        return self._anew(LineSearchState(q, -np.inf, nothing, growth=Growth(first=q.sd(), exact=True)), known)

    def _anew(self, state: LineSearchState, known: ExactEvaluation | None = None) -> LineSearchState:
        """Measure a state by the rules that it needs, unless that is known."""
        evaluation = self._estimator.by_rules(self._target, state.q) if known is None else known
        if not evaluation.finite.all():
            return replace(state, stalled=True, blind=True)
        found, moments = evaluation.expectation, self._measured(state.q, evaluation)
        return replace(
            state, elbo=evaluation.elbo, moments=moments, rules=found.rules, error=found.error, bends=found.bends
        )

    def step(self, state: LineSearchState) -> LineSearchState:
        """Take one step."""
        return self._looked_at(self._stepped(state), state.moments.gap)

    def _looked_at(self, new: LineSearchState, gap_before: float) -> LineSearchState:
        """Return the state after a step, measured anew at the end, and with lost scales looked for."""
        if (self._is_solved(new) or new.idle >= _MOST_IDLE) and np.isnan(new.error):
            new = self._anew(new)
        # Where the gradient promises little, scales may be lost.
        is_near = new.moments.gap < near(new.q) <= gap_before
        return self._with_scales(new) if new.n_recoveries and (is_near or self._is_solved(new)) else new

    def _with_scales(self, state: LineSearchState) -> LineSearchState:
        """Look for lost scales elsewhere; return the state as it is where none are."""
        tools = Tools(self._target, self._update, Following(state.rules), _NO_DRAWS, _NO_DRAWS)
        q = recovered(tools, state.q)
        if q is None:
            return replace(state, n_recoveries=0 if self._is_solved(state) else state.n_recoveries)
        return replace(self.init(q), growth=state.growth, n_recoveries=state.n_recoveries - 1)

    def _stepped(self, state: LineSearchState) -> LineSearchState:
        known = self._newton(state)
        if known is not None:
            new = self._by_newton(state, known)
            if new is not None:
                return new
            state = replace(state, n_newton=state.n_newton - 1)
        gradient = natural_gradient(state.q, state.moments)
        if state.pairs and state.moments.gap < near(state.q):
            direction = correct(state.pairs, gradient, state.q.inner)
            slope = state.q.inner(direction, gradient)
            found = self._search(state, direction, slope) if slope > 0.0 else Failure.NOT_ACCEPTED
            if not isinstance(found, Failure) and found.gain >= _LEAST_RATIO * found.step.size * slope:
                return self._moved(state, found, gradient, slope)
        state = replace(state, pairs=())
        slope = 2.0 * state.moments.gap
        found = self._search(state, gradient, slope)
        if not isinstance(found, Failure):
            moved = self._moved(state, found, gradient, slope)
            rho = found.step.size
            bent = state.bent or (found.all_finite and rho < min(1.0, state.next_step_size))
            return replace(moved, sites=_mixed(state, rho), bent=bent)
        if np.isnan(state.error):
            anew = self._anew(state)
            return anew if anew.blind else self._stepped(anew)
        return replace(state, stalled=True, blind=found is Failure.NOT_FINITE, next_step_size=1.0)

    def _newton(self, state: LineSearchState) -> Newton | None:
        if not (state.bent and state.n_newton):
            return None
        return newton(cast(BentRowsTarget, self._target), state.q, state.moments, state.bends, state.sites)

    def _by_newton(self, state: LineSearchState, known: Newton) -> LineSearchState | None:
        """Take a step of Newton; None where the ELBO falls by it."""
        least = _PART * self._tolerance.least(state.q)
        if max(known.slope, state.gap) < least:
            return replace(state, gain=known.slope)
        # Rules of quadrature are those of widths: where means go far, they are chosen anew.
        start = replace(state, rules=None) if known.farthest > _FAR else state
        found = self._along(start, known.propose, known.slope, known.first, _FEW_TRIALS)
        if isinstance(found, Failure):
            anew = self._anew(state) if np.isnan(state.error) else state
            again = None if anew is state or np.isnan(anew.error) else self._newton(anew)
            return None if again is None else self._by_newton(anew, again)
        n_newton = state.n_newton - (not found.all_finite)
        return replace(self._arrived(state, found), sites=known.sites_after(found.step.size), n_newton=n_newton)

    def terminate(self, state: LineSearchState) -> Status | None:
        """Return why to stop, or None to go on."""
        if state.growth.is_unbounded:
            return Status.UNBOUNDED
        if self._is_solved(state):
            return Status.CONVERGED
        if state.stalled or state.idle >= _MOST_IDLE:
            return Status.NO_FINITE_TRIAL if state.blind else Status.STALLED
        return None

    def assess(self, state: LineSearchState) -> Assessment:
        """Compare the quadrature with finer rules, and the rows with log p at draws."""
        checked = self._anew(state) if np.isnan(state.error) else state
        none = np.empty((0, state.q.n_dim))
        rng = np.random.default_rng(self._seed)
        draw = functools.partial(draws_of, state.q, _N_CHECKED, rng)
        outside = checked.blind or not cast(RowsTarget, self._target).rows_cover(draw)
        elbo = Elbo(-np.inf if outside else checked.elbo, checked.error)
        return Assessment(none, np.empty(0), np.empty((0, 1), dtype=np.intp), state.gap, 0.0, elbo=elbo)

    def conclude(self, status: Status, assessment: Assessment) -> Status:
        """Return how the fit ended, given whether finer rules, or draws, find points where log p is not finite."""
        elbo = assessment.elbo
        return status if elbo is None or np.isfinite(elbo.value) else Status.NO_FINITE_TRIAL

    def reopen(self, state: LineSearchState) -> LineSearchState:
        """Return a state in which a fit that ended may try again."""
        return replace(state, stalled=False, idle=0, pairs=(), growth=Growth(first=state.q.sd(), exact=True))

    def _measured(self, q: GaussianState, evaluation: Evaluation) -> Moments:
        return self._estimator.moments(self._target, q, _NO_DRAWS, evaluation)

    def _is_solved(self, state: LineSearchState) -> bool:
        if state.idle >= _MOST_IDLE or state.stalled:
            known = min(state.error, _KNOWN) if np.isfinite(state.error) else 0.0
            return state.gap < max(self._tolerance.least(state.q), known)
        return max(state.gap, state.gain) < _PART * self._tolerance.least(state.q)

    def _search(self, state: LineSearchState, direction: Array, slope: float) -> _Found | Failure:
        """Go along a direction as far as the ELBO does not fall."""

        def propose(rho: float) -> GaussianState | None:
            # Beyond a full step, the direction is longer, not the part of the old precision that is left negative.
            moments = moments_of(state.q, state.moments, max(rho, 1.0) * direction)
            return self._update(state.q, moments, min(rho, 1.0), rho <= 1.0)

        found = self._along(state, propose, slope, state.next_step_size)
        if isinstance(found, Failure):
            return found
        return found._replace(step=found.step._replace(direction=found.step.size * direction))

    def _along(
        self,
        state: LineSearchState,
        propose: Callable[[float], GaussianState | None],
        slope: float,
        first: float,
        most_trials: int = 8,
    ) -> _Found | Failure:
        by_rules = functools.partial(self._estimator.by_rules, self._target)
        trials = Trials(by_rules, state)
        found = search(
            propose, trials.evaluate, trials.accept, elbo=state.elbo, slope=slope, first=first, most_trials=most_trials
        )
        if isinstance(found, Failure):
            return found
        if trials.left_support and found.size < _CREEPING:
            return Failure.NOT_FINITE
        return _Found(found, found.evaluation.elbo - trials.elbo, trials.all_finite)

    def _moved(self, state: LineSearchState, found: _Found, gradient: Array, slope: float) -> LineSearchState:
        step, gain = found.step, found.gain
        new = self._arrived(state, found)
        after = natural_gradient(step.q, new.moments)
        pairs, most = state.pairs, _N_PAIRS if state.q.exact_metric else _N_PAIRS_INEXACT
        if step.direction is not None and (not state.q.exact_metric or state.moments.gap < near(state.q)):
            pair = Pair(step.direction, gradient - after)
            pairs = (*pairs, pair)[-most:] if trusted(pair, state.q) else pairs
        # A quadratic whose curvature is the metric's gains half of what its slope promises; more tells of a plateau.
        is_flat = gain > _FLAT * step.size * slope
        longest = _LONGEST if is_flat and step.size >= 1.0 else 1.0
        left = 0.5 * step.q.inner(after, correct(pairs, after, step.q.inner))
        return replace(new, next_step_size=min(longest, 2.0 * step.size), pairs=pairs, left=left)

    def _arrived(self, state: LineSearchState, found: _Found) -> LineSearchState:
        """Return the state after a step, with nothing learned from it."""
        step, gain = found.step, found.gain
        expectation, moments = step.evaluation.expectation, self._measured(step.q, step.evaluation)
        return replace(
            state,
            q=step.q,
            elbo=step.evaluation.elbo,
            moments=moments,
            rules=expectation.rules,
            error=expectation.error,
            step_size=step.size,
            pairs=(),
            left=moments.gap,
            gain=gain,
            idle=0 if gain > ROUNDING * (1.0 + abs(state.elbo)) else state.idle + 1,
            stalled=False,
            growth=state.growth.after(step.q),
            bends=expectation.bends,
            sites=None,
        )


def _mixed(state: LineSearchState, rho: float) -> Array | None:
    """Return the sites after a natural step of a size; None where they are not known."""
    if state.bends is None or (state.sites is None and rho != 1.0):
        return None
    curvature = -state.bends.second
    return curvature if state.sites is None else state.sites + rho * (curvature - state.sites)


def near(q: GaussianState) -> float:
    """Return the gap below which steps are learned from."""
    return _NEAR + _NEAR_PER_DIM * q.n_dim


# --- trials of a line search: expectations by rules of quadrature that follow a state ---

#: Nats between two ELBOs beyond which it does not matter that they are by different rules of quadrature.
_CLOSE = 0.05
#: Relative rounding of an ELBO.
ROUNDING = 1e-12


class Start(Protocol):
    """Where a search starts."""

    @property
    def q(self) -> GaussianState:
        """The state."""

    @property
    def elbo(self) -> float:
        """Its ELBO, nats."""

    @property
    def rules(self) -> RowRules | None:
        """By which that was taken; None for those that each trial needs."""


class Trials:
    """Trials of one search, compared with the state where it starts by the same rules of quadrature, if it is close.

    Attributes
    ----------
    left_support : bool
        Whether rules that a trial needs found points where log p is not finite, and those of the start none.
    all_finite : bool
        Whether no trial had such points.
    """

    def __init__(self, by_rules: Callable[..., ExactEvaluation], start: Start) -> None:
        self._by_rules, self._q = by_rules, start.q
        self.rules, self.elbo = start.rules, start.elbo
        self.left_support, self.all_finite = False, True

    def evaluate(self, q: GaussianState) -> ExactEvaluation:
        """Evaluate a trial, and the start once more where that took other rules."""
        evaluation = self._by_rules(q, self.rules, adapt=True, least=self._least)
        self.all_finite &= bool(evaluation.finite.all())
        found, before = evaluation.expectation.rules, self.rules
        same = before is None or np.array_equal(found.level, before.level)
        if not self.accept(evaluation):  # whatever other rules say
            self.left_support |= not same and not evaluation.finite.all()
            return evaluation
        if not same and abs(evaluation.elbo - self.elbo) < _CLOSE:
            self.elbo = self._by_rules(self._q, found).elbo
        self.rules = found
        return evaluation

    def accept(self, evaluation: ExactEvaluation) -> bool:
        """Tell whether the ELBO does not fall."""
        return bool(np.isfinite(evaluation.elbo) and evaluation.elbo >= self._least)

    @property
    def _least(self) -> float:
        return self.elbo - ROUNDING * (1.0 + abs(self.elbo))


class Following(Quadrature):
    """Expectations by the rules of the one before, and by others where its rows are wider or narrower."""

    def __init__(self, rules: RowRules | None) -> None:
        self._rules = rules

    def evaluate(self, target: Density, state: VariationalState, base: BaseDraws) -> ExactEvaluation:
        """Take the expectation of log p under a Gaussian."""
        evaluation = self.by_rules(target, cast(GaussianState, state), self._rules, adapt=True)
        self._rules = evaluation.expectation.rules
        return evaluation
