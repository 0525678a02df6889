r"""Natural steps by a line search on an ELBO that is exact.

Nothing is random: a step of size 1 is taken where the ELBO rises by it, a shorter one where it would fall, and the fit
ends where neither the gradient nor the last step promises more than a small part of the tolerance. Secants correct the
natural gradient near the optimum, where it creeps along scales of group effects.
"""

import functools

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple, cast

import numpy as np

from pymc_ngvi.core import linalg
from pymc_ngvi.core.draws import draws_of
from pymc_ngvi.core.status import Elbo, Status
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import (
    Array,
    Assessment,
    Bends,
    Evaluation,
    RowRules,
    RowsTarget,
    Target,
)
from pymc_ngvi.families.gaussian import AnyGaussian
from pymc_ngvi.methods.adaptive import (
    N_PAIRS,
    Growth,
    Pair,
    correct,
    moments_of,
    natural_gradient,
    near,
    trusted,
)
from pymc_ngvi.methods.estimators import ExactEvaluation, Moments
from pymc_ngvi.methods.schedule import MAX_TRIALS, NO_DRAWS, ExactRule, Step, search

# --- steps of Newton in the mean and the standard deviations of predictors, where each row has one ---
# A natural step assumes that expected derivatives of rows stay what they are. Where priors are so wide that the rows
# alone say what q is, they do not: the wider q is, and the farther from where rows bend, the smaller is their
# curvature, and natural steps of size 1 go round in circles. How they change is known: with l a row, m and v mean and
# variance of its predictor,
#
#     d E[l'] = E[l''] dm + 1/2 E[l'''] dv,    d E[l''] = E[l'''] dm + 1/2 E[l''''] dv.
#
# Where rows are log-concave, the ELBO is concave in the mean and in a root of the covariance [1]_, not in the
# precision: second derivatives are taken in m and the standard deviation, where these differ from those in v by the
# gradient.
#
# The precision of q is that of what is quadratic, and x x^T times its *site* for each row. A step moves the mean and
# the sites; those that fall do so exponentially, so that they stay positive.
#
# References
# ----------
# .. [1] E. Challis and D. Barber (2013). Gaussian Kullback-Leibler approximate inference. JMLR 14.
#    https://jmlr.org/papers/v14/challis13a.html

#: Rows with bends, at most, and for each coordinate.
_MOST_ROWS, _PER_DIM = 4_000, 8
#: Relative residual at which the equations count as solved, and iterations, at most.
_RESIDUAL, _MOST_ITERATIONS = 1e-4, 60
#: Standard deviations of a predictor that its mean may move at first.
_FARTHEST = 8.0
#: Exponents of a site that falls, at least.
_LOWEST = -50.0


class Newton(NamedTuple):
    """A step of Newton from a Gaussian."""

    #: The state after a step of a size, or None where that is none; and the sites, (n_rows,).
    propose: Callable[[float], AnyGaussian | None]
    sites_after: Callable[[float], Array]
    #: Rise of the ELBO with the step size, nats.
    slope: float
    #: Standard deviations by which the mean of a predictor moves.
    farthest: float


def newton(
    target: RowsTarget, q: AnyGaussian, moments: Moments, bends: Bends | None, known: Array | None
) -> Newton | None:
    """Return the step of Newton from a Gaussian, with a dense covariance, of known sites."""
    if bends is None or not q.exact_metric or moments.curvature.shape != (q.n_dim, q.n_dim):
        return None
    rows = np.flatnonzero(bends.is_bent)
    if not 0 < len(rows) <= min(_MOST_ROWS, _PER_DIM * q.n_dim):
        return None
    root = linalg.cholesky(moments.curvature)
    if root is None:
        return None
    sites = -bends.second if known is None else known
    excess = -bends.second - sites
    # Linear equations for the changes z of the expected curvatures of rows, all else eliminated: with b the whitened
    # directions and W the squares of the entries of b b^T, variances change by dv = -(W z + what the natural step
    # takes), and z = -(third dm + 1/2 fourth dv), where dm is that of the gradient after dv.
    whitened = q.whiten(target.directions(rows))
    products, error = whitened @ whitened.T, moments.curvature - np.eye(q.n_dim)
    squares, variance = products * products, np.diagonal(products)
    natural = np.einsum("ij,ij->i", whitened @ error, whitened)
    third, fourth = bends.third[rows], bends.fourth[rows] - excess[rows] / variance

    def mean_step(grad: Array) -> Array:
        """Return the inverse of the whitened curvature times a vector."""
        return linalg.solve_lower(root, linalg.solve_lower(root, grad), transpose=True)

    def quadratic(x: Array) -> Array:
        """Return what z changes by where variances fall by x, the mean following."""
        mean = mean_step((third * x) @ whitened)
        return 0.5 * (third * (whitened @ mean) + fourth * x)

    plain = mean_step(moments.grad)
    z = _conjugate_gradients(squares, quadratic, quadratic(natural) - third * (whitened @ plain))
    if z is None:
        return None
    grad = plain - 0.5 * mean_step((third * (natural + squares @ z)) @ whitened)
    slope = float(moments.grad @ grad) + 0.5 * (float(np.sum(error * error)) + float(z @ natural))
    change = excess[rows] + z
    if not (slope > 0.0 and linalg.all_finite(grad, change)):
        return None
    farthest = float(np.max(np.abs(whitened @ grad) / np.sqrt(variance)))

    def sites_after(rho: float) -> Array:
        own, step = sites[rows], rho * change
        falls = (step < 0.0) & (own > 0.0) & (own + excess[rows] > 0.0)
        part = np.divide(step, own, out=np.zeros_like(own), where=falls)
        result = sites + rho * excess
        # Of rows that are log-concave, no site falls below 0.
        result[rows] = np.where(falls, own * np.exp(np.maximum(part, _LOWEST)), own + step)
        return result

    def propose(rho: float) -> AnyGaussian | None:
        beyond = (sites_after(rho) - sites - rho * excess)[rows]
        matrix = q.add_to_diagonal(rho * moments.curvature, 1.0 - rho)
        matrix += whitened.T @ (beyond[:, None] * whitened)
        scaled = q.precision_scaled_by(linalg.symmetrise(matrix), grad)
        return None if scaled is None else replace(scaled[0], location=q.location + rho * q.unwhiten(grad))

    return Newton(propose, sites_after, slope, farthest)


def _conjugate_gradients(squares: Array, quadratic: Callable[[Array], Array], right: Array) -> Array | None:
    """Solve for z; None where the equations are not positive definite, as they are where rows are log-concave.

    They are symmetric in the inner product of the squares.
    """
    z, left, left_w = np.zeros_like(right), right, squares @ right
    along, along_w = left, left_w
    square = first = float(left @ left_w)
    for _ in range(_MOST_ITERATIONS):
        if not square > _RESIDUAL**2 * first:
            break
        image = along - quadratic(along_w)
        curvature = float(along_w @ image)
        if not curvature > 0.0:
            return None
        size = square / curvature
        z = z + size * along
        left = left - size * image
        left_w = squares @ left
        before, square = square, float(left @ left_w)
        along, along_w = left + square / before * along, left_w + square / before * along_w
    return z


# --- natural steps by a line search on an ELBO that is exact ---

#: Part of what its slope promises that a corrected step must gain.
_LEAST_RATIO = 0.1
#: Part of what the slope promises, from which on a step could have been longer, and the longest.
_FLAT, _LONGEST = 0.75, 64.0
#: Part of the tolerance that a converged fit may have left: what is exact may as well be found exactly.
_PART = 0.001
#: Steps in a row that gain nothing, after which there is nothing to gain.
_MOST_IDLE = 3
#: Nats to which an ELBO is known at best, as the tolerance of quadrature has it: a smaller gap means nothing.
_KNOWN = 1e-4
#: Standard deviations that a mean may move without another look at how fine rules have to be; steps of Newton that are
#: tried along one direction, and times that none may be found.
_FAR, _FEW_TRIALS, _MOST_FAILURES = 0.5, 3, 3
#: Draws of a converged q at which conditions that rows leave out are looked for.
_N_CHECKED = 32
#: Relative rounding of an ELBO.
ROUNDING = 1e-12


@stored("linesearch.state")
@dataclass(frozen=True)
class LineSearchState:
    """What one iteration hands to the next."""

    q: AnyGaussian
    elbo: float
    moments: Moments
    #: By which the ELBO was taken; None where it is not finite.
    rules: RowRules | None = None
    #: Nats by which it may be wrong; NaN where the rules were chosen for another state.
    error: float = np.nan
    #: The last one accepted.
    step_size: float = 1.0
    #: To be tried next.
    next_step_size: float = 1.0
    #: Recent steps.
    pairs: tuple[Pair, ...] = ()
    #: Nats still to be gained, as the gradient and the curvature that the steps have met tell.
    left: float = np.inf
    #: Nats gained by the last step.
    gain: float = np.inf
    #: Steps in a row that gained nothing.
    idle: int = 0
    #: Why the last search found no step, where it found none.
    stalled: Status | None = None
    #: Of standard deviations.
    growth: Growth = field(default_factory=Growth)
    #: How expected derivatives of rows change.
    bends: Bends | None = None
    #: The part of the precision that is of each row; None where it is not known; shape (n_rows,), or None.
    sites: Array | None = None
    #: Whether the ELBO fell by a natural step of full size: steps of Newton are tried from then on.
    bent: bool = False
    #: Times that these may fail, or leave the support.
    n_newton: int = _MOST_FAILURES

    n_draws = 0
    n_dropped = 0

    @property
    def gap(self) -> float:
        """Nats still to be gained, estimated."""
        return max(self.moments.gap, self.left) if np.isfinite(self.left) else self.moments.gap


#: A step of a line search.
type _Step = Step[AnyGaussian, ExactEvaluation]


class LineSearch(ExactRule[Target, LineSearchState]):
    """Natural steps that never lower an exact ELBO; see `StepRule` for the parameters."""

    #: A state that was tried as a start, and what is known of it.
    _best_start: tuple[AnyGaussian, ExactEvaluation] | None = None

    def first_evaluation(self, q: AnyGaussian) -> Evaluation:
        """Evaluate a starting state; what is found of the best one serves `init`."""
        evaluation = self._estimator.by_rules(self._target, q)
        if self._best_start is None or evaluation.elbo > self._best_start[1].elbo:
            self._best_start = q, evaluation
        return evaluation

    def init(self, q: AnyGaussian) -> LineSearchState:
        """Return the state before the first iteration."""
        none = np.zeros(q.n_dim)
        nothing = Moments(none, none, none, none, gap=np.inf, floor=0.0, floor_sd=0.0)
        start, self._best_start = self._best_start, None
        known = start[1] if start is not None and start[0] is q else None
        return self._anew(LineSearchState(q, -np.inf, nothing, growth=Growth(first=q.sd(), exact=True)), known)

    def _anew(self, state: LineSearchState, known: ExactEvaluation | None = None) -> LineSearchState:
        """Measure a state by the rules that it needs, unless that is known."""
        evaluation = self._estimator.by_rules(self._target, state.q) if known is None else known
        if not evaluation.finite.all():
            return replace(state, stalled=Status.NO_FINITE_TRIAL)
        found = evaluation.expectation
        moments = self._estimator.moments(self._target, state.q, NO_DRAWS, evaluation)
        return replace(
            state, elbo=evaluation.elbo, moments=moments, rules=found.rules, error=found.error, bends=found.bends
        )

    def step(self, state: LineSearchState) -> LineSearchState:
        """Take one step."""
        new = self._stepped(state)
        done = self._is_converged(new) or new.idle >= _MOST_IDLE
        return self._anew(new) if done and np.isnan(new.error) else new

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
            found = self._search(state, direction, slope) if slope > 0.0 else Status.STALLED
            if not isinstance(found, Status) and found.gain >= _LEAST_RATIO * found.size * slope:
                return self._moved(state, found, gradient, slope)
        state = replace(state, pairs=())
        slope = 2.0 * state.moments.gap
        found = self._search(state, gradient, slope)
        if not isinstance(found, Status):
            moved = self._moved(state, found, gradient, slope)
            rho = found.size
            bent = state.bent or (found.all_finite and rho < min(1.0, state.next_step_size))
            return replace(moved, sites=_mixed(state, rho), bent=bent)
        if np.isnan(state.error):
            anew = self._anew(state)
            return anew if anew.stalled else self._stepped(anew)
        return replace(state, stalled=found, next_step_size=1.0)

    def _newton(self, state: LineSearchState) -> Newton | None:
        if not (state.bent and state.n_newton):
            return None
        return newton(cast(RowsTarget, self._target), state.q, state.moments, state.bends, state.sites)

    def _by_newton(self, state: LineSearchState, known: Newton) -> LineSearchState | None:
        """Take a step of Newton; None where the ELBO falls by it."""
        least = _PART * self._tolerance.least(state.q)
        if max(known.slope, state.gap) < least:
            return replace(state, gain=known.slope)
        # Rules of quadrature are those of widths: where means go far, they are chosen anew.
        start = replace(state, rules=None) if known.farthest > _FAR else state
        first = _FARTHEST / max(known.farthest, _FARTHEST)
        found = self._along(start, known.propose, known.slope, first, _FEW_TRIALS)
        if isinstance(found, Status):
            anew = self._anew(state) if np.isnan(state.error) else state
            again = None if anew is state or np.isnan(anew.error) else self._newton(anew)
            return None if again is None else self._by_newton(anew, again)
        n_newton = state.n_newton - (not found.all_finite)
        return replace(self._arrived(state, found), sites=known.sites_after(found.size), n_newton=n_newton)

    def terminate(self, state: LineSearchState) -> Status | None:
        """Return why to stop, or None to go on."""
        if state.growth.is_unbounded:
            return Status.UNBOUNDED
        if self._is_converged(state):
            return Status.CONVERGED
        if state.stalled or state.idle >= _MOST_IDLE:
            return state.stalled or Status.STALLED
        return None

    def assess(self, state: LineSearchState) -> Assessment:
        """Compare the quadrature with finer rules, and the rows with log p at draws."""
        checked = self._anew(state) if np.isnan(state.error) else state
        none = np.empty((0, state.q.n_dim))
        draw = functools.partial(draws_of, state.q, _N_CHECKED, np.random.default_rng(self._seed))
        outside = checked.stalled is Status.NO_FINITE_TRIAL or not cast(RowsTarget, self._target).rows_cover(draw)
        elbo = Elbo(-np.inf if outside else checked.elbo, checked.error)
        return Assessment(none, np.empty(0), np.empty((0, 1), dtype=np.intp), state.gap, 0.0, elbo=elbo)

    def conclude(self, status: Status, assessment: Assessment) -> Status:
        """Return how the fit ended, given whether finer rules, or draws, find points where log p is not finite."""
        elbo = assessment.elbo
        return status if elbo is None or np.isfinite(elbo.value) else Status.NO_FINITE_TRIAL

    def reopen(self, state: LineSearchState) -> LineSearchState:
        """Return a state in which a fit that ended may try again."""
        return replace(state, stalled=None, idle=0, pairs=(), growth=Growth(first=state.q.sd(), exact=True))

    def _is_converged(self, state: LineSearchState) -> bool:
        if state.idle >= _MOST_IDLE or state.stalled:
            known = min(state.error, _KNOWN) if np.isfinite(state.error) else 0.0
            return state.gap < max(self._tolerance.least(state.q), known)
        return max(state.gap, state.gain) < _PART * self._tolerance.least(state.q)

    def _search(self, state: LineSearchState, direction: Array, slope: float) -> _Step | Status:
        """Go along a direction as far as the ELBO does not fall."""

        def propose(rho: float) -> AnyGaussian | None:
            # Beyond a full step, the direction is longer, not the part of the old precision that is left negative.
            moments = moments_of(state.q, state.moments, max(rho, 1.0) * direction)
            return self._update(state.q, moments, min(rho, 1.0), rho <= 1.0)

        found = self._along(state, propose, slope, state.next_step_size)
        if isinstance(found, Status):
            return found
        return found._replace(direction=found.size * direction)

    def _along(
        self,
        state: LineSearchState,
        propose: Callable[[float], AnyGaussian | None],
        slope: float,
        first: float,
        most_trials: int = MAX_TRIALS,
    ) -> _Step | Status:
        least, are_finite = state.elbo - ROUNDING * (1.0 + abs(state.elbo)), list[bool]()

        def evaluate(q: AnyGaussian) -> ExactEvaluation:
            evaluation = self._estimator.by_rules(self._target, q, state.rules, adapt=True, least=least)
            are_finite.append(bool(evaluation.finite.all()))
            return evaluation

        found = search(
            propose,
            evaluate,
            lambda evaluation: evaluation.elbo >= least,
            elbo=state.elbo,
            slope=slope,
            first=first,
            most_trials=most_trials,
        )
        if isinstance(found, Status):
            return found
        return found._replace(gain=found.evaluation.elbo - state.elbo, all_finite=all(are_finite))

    def _moved(self, state: LineSearchState, step: _Step, gradient: Array, slope: float) -> LineSearchState:
        new = self._arrived(state, step)
        after = natural_gradient(step.q, new.moments)
        pairs = state.pairs
        if step.direction is not None and (not state.q.exact_metric or state.moments.gap < near(state.q)):
            pair = Pair(step.direction, gradient - after)
            pairs = (*pairs, pair)[-N_PAIRS:] if trusted(pair, state.q) else pairs
        # A quadratic whose curvature is the metric's gains half of what its slope promises; more tells of a plateau.
        is_flat = step.gain > _FLAT * step.size * slope
        longest = _LONGEST if is_flat and step.size >= 1.0 else 1.0
        left = 0.5 * step.q.inner(after, correct(pairs, after, step.q.inner))
        return replace(new, next_step_size=min(longest, 2.0 * step.size), pairs=pairs, left=left)

    def _arrived(self, state: LineSearchState, step: _Step) -> LineSearchState:
        """Return the state after a step, with nothing learned from it."""
        expectation = step.evaluation.expectation
        moments = self._estimator.moments(self._target, step.q, NO_DRAWS, step.evaluation)
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
            gain=step.gain,
            idle=0 if step.gain > ROUNDING * (1.0 + abs(state.elbo)) else state.idle + 1,
            stalled=None,
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
