"""One fit, under way or at its end: where it begins, the loop, whether its posterior is proper, and how it went."""

import contextlib
import functools
import math
import time

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from numpy.typing import ArrayLike
from scipy.linalg import cho_solve

from pymc_ngvi.core import linalg
from pymc_ngvi.core.messages import Failed, OtherForm, RowsGivenUp, logger
from pymc_ngvi.core.prices import fit_seconds
from pymc_ngvi.core.progress import show_numbers, task
from pymc_ngvi.core.sizes import MAX_COV_DIM
from pymc_ngvi.core.status import Elbo, StartError, Status
from pymc_ngvi.core.stored import BY_CLASS, stored
from pymc_ngvi.core.types import Array, Indices, MatrixHessian, Rule, Target, VariationalState
from pymc_ngvi.density import LogDensity, ModelDensity
from pymc_ngvi.density.info import constant_data
from pymc_ngvi.density.new_priors import flat_coordinates, has_proper_priors
from pymc_ngvi.density.streams import StreamDensity
from pymc_ngvi.families import MixtureState, SparseState, StudentTState, SummedState
from pymc_ngvi.families.gaussian import AnyGaussian, Gaussian
from pymc_ngvi.fitting import loop
from pymc_ngvi.fitting.modes import Ended, ModeSearch, explored
from pymc_ngvi.fitting.options import AXES, RULES, FitOptions, check_n
from pymc_ngvi.fitting.problem import (
    START_SCALES,
    Problem,
    choose_start,
    large_scales,
    problem_by_draws,
    problem_of,
    start_point,
    start_scales,
    units_apart,
)
from pymc_ngvi.fitting.record import FitRecord, elbo_of, is_prior, spared
from pymc_ngvi.fitting.threads import few_threads
from pymc_ngvi.methods import DIRECTIONS
from pymc_ngvi.methods.adaptive import Adaptive, AdaptiveState
from pymc_ngvi.methods.reparam import RowSpaceDensity
from pymc_ngvi.methods.sites import Incremental, IncrementalState

# --- whether a posterior is improper, and in which variable: a look at its tails, far beyond q ---
# The other coordinates are integrated out by Laplace's method at values of one with a flat prior, farther and farther
# out. A tail from r to 2 r has less mass than the one before it only where the log density falls by more than log 2;
# where it does not fall so much over orders of magnitude, the integral diverges.

#: Coordinates in all, and of those with flat priors, up to which tails are looked at.
_MOST_DIM, _MOST_FLAT = 100, 20
#: Distances at which they are: in standard deviations of q, and on the scale of a logarithm.
_DISTANCES: Array = 8.0 * 16.0 ** np.arange(10.0)
_LOG_DISTANCES: Array = 2.5 * 2.0 ** (0.5 * np.arange(8.0))
#: Spans between these, the farthest ones, over all of which a tail does not fall; nats by which one has fallen for
#: good.
_SPANS, _DEEP = 3, 100.0
#: Iterations after which a fit that is still under way is looked at.
_LOOK = 100
#: Farthest starting point on the scale of a logarithm.
_FARTHEST_LOG = 100.0
#: Steps of Newton at most, and halvings of one; nats that it may still promise at the end; pivot, of 1, below which a
#: determinant is rounding error.
_MOST_STEPS, _SOLVED, _LEAST_PIVOT = 30, 1e-4, 1e-12
#: Multiples of the identity that are added to a precision, one after the other, until it has a factor.
_DAMPINGS = (0.0, *10.0 ** np.arange(-6.0, 2.0))


class Watched:
    """Iterates until a fit ends, or its posterior is found to be improper."""

    def __init__(self, problem: Problem) -> None:
        density = problem.density
        self._problem = problem
        #: None where not all of log p can be evaluated at single points, far out.
        self._density = density if isinstance(density, LogDensity) and not density.has_minibatch else None
        #: Whether the posterior may be improper at all.
        self._is_open = self._density is None or not has_proper_priors(density.model)
        #: The variables in which it is.
        self.improper: tuple[str, ...] = ()

    def run(self, rule: Rule, state: loop.LoopState, last: int, observe: loop.Observer) -> loop.LoopState:
        """Return where the loop ends, at iteration ``last`` at the latest; see `loop.run`."""

        def until(state: loop.LoopState, end: int) -> loop.LoopState:
            return loop.run(rule, state, end - state.n_iterations, observe)

        if self._is_open and self._density is not None and state.n_iterations < _LOOK < last:
            state = until(state, _LOOK)
            if state.status is Status.MAX_ITERATIONS and self._is_improper(state, ended=False):
                return replace(state, status=Status.UNBOUNDED)
        state = until(state, last)
        while state.status is Status.UNBOUNDED and state.n_iterations < last:
            if self._is_open and (self._is_improper(state, ended=False) or self._is_open):
                break
            # What is proper is only wide: the fit goes on, and standard deviations are compared with those of now.
            state = until(replace(state, rule=rule.reopen(state.rule), status=Status.RUNNING), last)
        is_open = state.status.can_be_followed and state.status not in (Status.CONVERGED, Status.PAUSED)
        is_far = is_open and not np.all(state.history.gaps[-1:] < 1.0)  # nats
        if is_far and self._density is not None and constant_data(self._density.model):
            return replace(state, status=Status.COLLAPSED)  # a scale goes to 0, from wherever a fit begins
        return state

    def ended(self, state: loop.LoopState) -> loop.LoopState:
        """Return the end of a fit, which is none near a posterior that is improper."""
        if state.status.can_be_followed and self._is_improper(state, ended=True):
            return replace(state, status=Status.UNBOUNDED)
        return state

    def _is_improper(self, state: loop.LoopState, *, ended: bool) -> bool:
        """Tell whether the posterior is found to be improper, looking out from a Gaussian, or from the start."""
        density = self._density
        if not self._is_open or density is None or self.improper:
            return bool(self.improper)
        improper, is_known = tails_of(density, *self._problem.mean_and_sd(state.rule.q), level=not ended)
        if not (improper or is_known):
            start = density.initial_point()
            improper, _ = tails_of(density, start, np.ones_like(start), level=True)
        self._is_open = bool(improper) or not is_known
        # Labels of coordinates, with the names that their variables have in the model.
        owners = [next(v for v in density.layout.variables if v.where.start <= i < v.where.stop) for i in improper]
        self.improper = tuple(
            v.name + density.layout.label(i).removeprefix(v.value_name) for v, i in zip(owners, improper, strict=True)
        )
        return bool(self.improper)


def tails_of(density: LogDensity, mean: Array, sd: Array, *, level: bool = False) -> tuple[tuple[int, ...], bool]:
    """Return the coordinates with flat priors in which log p is improper; and whether all tails could be followed."""
    if density.second.error() is not None or density.n_dim > _MOST_DIM:
        return (), False
    flat = flat_coordinates(density.model, density.layout)
    if not len(flat):
        return (), False
    before = density.n_gradients, density.n_hessians
    flat = flat[np.argsort(-sd[flat])]
    try:
        with np.errstate(all="ignore"):
            falls = {int(i): _falls(density, int(i), mean, sd, level) for i in flat[:_MOST_FLAT]}
    except OtherForm:
        logger.debug("The Hessian has entries that its pattern lacks.", exc_info=True)
        return (), False
    finally:
        density.n_gradients, density.n_hessians = before  # those of the fit
    known = len(flat) <= _MOST_FLAT and None not in falls.values()
    return tuple(i for i, does in falls.items() if does is False), known


def _falls(density: LogDensity, at: int, mean: Array, sd: Array, level: bool) -> bool | None:
    """Tell whether both tails of a coordinate fall; None where that is not known."""
    variable = next(v for v in density.layout.variables if v.where.start <= at < v.where.stop)
    is_log, centre = variable.value_name != variable.name, mean.copy()
    if is_log:
        centre[at] = np.clip(centre[at], -_FARTHEST_LOG, _FARTHEST_LOG)
    distances: Array = _LOG_DISTANCES if is_log else _DISTANCES * sd[at]
    most = 1.0 if level and not is_log else np.inf
    least: Array = np.log(distances[1:] / distances[:-1])
    found = [_side_falls(_profile(density, centre, at, side * distances, least), least, most) for side in (-1.0, 1.0)]
    return False if False in found else None if None in found else True


def _side_falls(values: Array, least: Array, most: float) -> bool | None:
    """Tell whether a tail falls by more than the least in each span; None where that is not known or it rises."""
    falls = -np.diff(values)
    if np.isneginf(values).any() or falls.sum() > _DEEP:
        return True
    if len(falls) < _SPANS:
        return None
    if (falls >= least[: len(falls)])[-_SPANS:].any():
        return True
    return None if (falls[-_SPANS:] < -most).any() else False


def _profile(density: LogDensity, centre: Array, at: int, shifts: Array, least: Array) -> Array:
    """Return the log density of a coordinate at some values, as far as Laplace's method goes or there is doubt."""
    free = np.flatnonzero(np.arange(len(centre)) != at)
    theta = centre.copy()
    values: list[float] = []
    for k, shift in enumerate(shifts):
        theta[at] = centre[at] + shift
        found = _laplace(density, theta, free)
        if found is None:
            break
        theta = found[0]
        values.append(found[1])
        falls = -np.diff(values[-_SPANS - 1 :])
        steadily = len(falls) == _SPANS and (falls > 1.5 * least[k - _SPANS : k]).all()
        if steadily or np.isneginf(found[1]) or values[0] - found[1] > _DEEP:
            break
    return np.array(values)


def _laplace(density: LogDensity, theta: Array, free: Indices) -> tuple[Array, float] | None:
    """Return the mode in some coordinates, and the log integral over these; None where there is none."""
    value, gradient = (part[0] for part in density.logp_grad(theta[None]))
    if np.isneginf(value):
        return theta, -np.inf
    for _ in range(_MOST_STEPS):
        if not (np.isfinite(value) and np.isfinite(gradient[free]).all()):
            return None
        if not len(free):
            return theta, float(value)
        precision = -density.second.mean_products(theta[None], np.eye(len(theta))[free])[:, free]
        size = np.sqrt(np.abs(np.diagonal(precision)))
        if not (np.isfinite(precision).all() and size.all()):
            return None
        scaled, slope = precision / size / size[:, None], gradient[free] / size
        damped = ((by, linalg.cholesky(scaled + by * np.eye(len(free)))) for by in _DAMPINGS)
        damping, factor = next((found for found in damped if found[1] is not None), (0.0, None))
        if factor is None:
            return None
        step = cho_solve((factor, True), slope)
        if 0.5 * step @ slope < _SOLVED:
            if damping or np.diagonal(factor).min() ** 2 < _LEAST_PIVOT:
                return None
            log_det = 2.0 * np.sum(np.log(np.diagonal(factor) * size))
            return theta, float(value + 0.5 * len(free) * np.log(2.0 * np.pi) - 0.5 * log_det)
        for halving in range(_MOST_STEPS):
            trial = theta.copy()
            trial[free] += 0.5**halving * step / size
            new, its_gradient = (part[0] for part in density.logp_grad(trial[None]))
            if new > value:
                break
        else:
            return None
        theta, value, gradient = trial, new, its_gradient
    return None


# --- a fit that starts from another one: from its mean and covariance, as far as the new family can hold them ---


@dataclass(frozen=True)
class Earlier:
    """Mean and covariance of an earlier fit, for the variables that a model shares with it."""

    #: Of the earlier fit, unconstrained.
    q: VariationalState
    #: By name of the value variable.
    mean: dict[str, Array]
    #: Flat coordinates of the shared variables in the model, and in q; shape (n_shared,).
    ours: Indices
    theirs: Indices

    @classmethod
    def of(cls, approx: Any, density: ModelDensity) -> "Earlier":
        """Find the variables of an `NGVIApproximation` in a model, by the names of their unconstrained values."""
        old, new = ({v.value_name: v for v in layout.variables} for layout in (approx.layout, density.layout))
        shared = [name for name in new if name in old]
        if not shared:
            raise ValueError(
                f"start is a fit of other variables, {', '.join(map(repr, old))}; those of the model are "
                f"{', '.join(map(repr, new))}. Variables are matched by the names of their unconstrained values."
            )
        for name in shared:
            if old[name].shape != new[name].shape:
                raise ValueError(
                    f"start is a fit in which {name!r} has shape {old[name].shape}; in the model it has shape "
                    f"{new[name].shape}. Give start as a dict of the values that fit."
                )
        q = approx._begins_with
        mean = q.mean()
        index = [[np.arange(of[n].where.start, of[n].where.stop) for n in shared] for of in (new, old)]
        ours, theirs = (np.concatenate(part) for part in index)
        return cls(q, {n: mean[old[n].where].reshape(old[n].shape) for n in shared}, ours, theirs)

    def state(self, rule: Rule, problem: Problem, point: Array, scales: Sequence[Array]) -> VariationalState | None:
        """Return the start with the best ELBO on the first draws; None where log p is not finite at all of them."""
        tried = [(rule.first_evaluation(state), state) for state in self._states(problem, point, scales)]
        inside = [(of.elbo, state) for of, state in tried if of.finite.all() and of.elbo > -np.inf]
        return max(inside, key=itemgetter(0), default=(-np.inf, None))[1]

    def _states(self, problem: Problem, point: Array, scales: Sequence[Array]) -> Iterator[VariationalState]:
        if isinstance(problem.target, RowSpaceDensity):
            yield from (problem.family.from_scale(point, scale) for scale in scales)
            return
        taken = np.arange(len(self.ours))
        if problem.transform is not None:  # relative to the global parameters, others are not what they were
            taken = np.flatnonzero(np.isin(self.ours, problem.transform.structure.border))
        ours, theirs = self.ours[taken], self.theirs[taken]
        sd = self.q.sd()[theirs]
        for scale in scales if len(ours) < len(point) else scales[:1]:
            scale = scale.copy()
            scale[ours] = sd
            template = problem.family.from_scale(point, scale)
            if problem.transform is None and self._is_of_kind(template):
                yield self.q
            else:
                precision = self._precision(scale, ours, theirs)
                yield template if precision is None else _with_precision(template, precision)

    def _is_of_kind(self, template: VariationalState) -> bool:
        """Whether q is a state of the new family as it is: one of the same class, form and coordinates."""
        if type(template) is not type(self.q) or not np.array_equal(self.ours, self.theirs):
            return False
        new, old = map(_form_of, (template, self.q))
        return new.keys() == old.keys() and all(np.array_equal(value, old[name]) for name, value in new.items())

    def _precision(self, scale: Array, ours: Indices, theirs: Indices) -> Array | None:
        """Return the precision of all coordinates, of which the others are independent; None where it is too large."""
        if max(len(scale), self.q.n_dim) > MAX_COV_DIM:  # then standard deviations alone are taken over
            return None
        block = getattr(self.q, "cov_block", None)
        covariance = np.diag(scale**2)
        covariance[np.ix_(ours, ours)] = self.q.cov()[np.ix_(theirs, theirs)] if block is None else block(theirs)
        factor = linalg.cholesky(covariance)
        if factor is None:
            return None
        half = linalg.solve_lower(factor, np.eye(len(scale)))
        return half.T @ half  # families keep some of its entries


def _form_of(q: Any) -> dict[str, Any]:
    """Return what states of one form have in common: shapes of parameters, and what makes the structure."""
    gaussian = q.components[0] if isinstance(q, MixtureState) else getattr(q, "gaussian", q)
    entry = BY_CLASS.get(type(gaussian.structure))
    structure = {} if entry is None else entry.fields(gaussian.structure)
    return {"class": type(gaussian), **{name: a.shape for name, a in q.params().items()}, **structure}


def _with_precision(state: VariationalState, precision: Array) -> VariationalState:
    """Return the state with a precision, or what its family holds of that; the state itself where that is no state."""
    if isinstance(state, MixtureState):
        return MixtureState.of([_gaussian_with(state.components[0], precision)])
    if isinstance(state, StudentTState):
        return replace(state, gaussian=_gaussian_with(state.gaussian, precision))
    return _gaussian_with(state, precision) if isinstance(state, Gaussian) else state


def _gaussian_with(state: AnyGaussian, precision: Array) -> AnyGaussian:
    if isinstance(state, SummedState):  # which sums a dense matrix has is not known
        return state
    hessian = MatrixHessian(-precision, state.structure.pattern if isinstance(state, SparseState) else None)
    found = state.precision_scaled_by(state.curvature(hessian), np.zeros(state.n_dim))
    return state if found is None else found[0]


# --- where a fit begins: the best of some states, and again where the structure of the Hessian was too narrow ---

#: Times that the structure of a Hessian may turn out to be too narrow, at most.
MAX_WIDENED = 5
#: Points at which entries of the Hessian are looked for that exact expectations have and its structure has not.
_N_LOOKED_AT = 4
#: Said where a fit by quadrature becomes one with draws.
BY_DRAWS = "Expectations by quadrature do not serve this model: the fit goes on with draws."
#: Said where the structure of a Hessian is no structure.
NO_STRUCTURE = (
    "The Hessian of this model's log density turned out to have many more entries than its graph shows: take "
    "family='full', 'block' or 'diagonal'."
)


class Begun(NamedTuple):
    """A problem, what takes its steps, where these have led, and the options, which may have become others."""

    problem: Problem
    rule: Rule
    state: loop.LoopState
    options: FitOptions

    @classmethod
    def at(cls, problem: Problem, rule: Rule, options: FitOptions, seed: int, q: VariationalState) -> "Begun":
        """Begin from a state, or from its mean and standard deviations where the Hessian turns out to be wider."""
        try:
            return cls(problem, rule, loop.start(rule, q), options)
        except OtherForm:
            return cls.wider(problem.density, options, seed, *problem.mean_and_sd(q))

    @classmethod
    def by_draws(cls, density: ModelDensity, options: FitOptions, seed: int, mean: Array, sd: Array) -> "Begun":
        """Begin with draws where rows have led, from narrower states where those would be outside the support."""
        logger.debug(BY_DRAWS)
        problem, options = problem_by_draws(density, options)
        rule = make_rule(problem.target, options, seed)
        narrower = [part * sd for part in START_SCALES[::2]]
        try:
            start = choose_start(rule, problem.family, mean, narrower, density)
        except StartError:  # nor is the mean inside
            start = choose_start(rule, problem.family, density.initial_point(), narrower, density)
        return cls.at(problem, rule, options, seed, start)

    @classmethod
    def wider(cls, density: ModelDensity, options: FitOptions, seed: int, mean: Array, sd: Array) -> "Begun":
        """Begin again from where a state is, for a Hessian that has turned out to have more entries than it seemed."""
        for _ in range(MAX_WIDENED):
            _look_for_entries(density, options, seed, mean, sd)
            problem = problem_of(density, options)
            rule = make_rule(problem.target, options, seed)
            try:
                return cls(problem, rule, loop.start(rule, problem.state_about(mean, sd)), options)
            except OtherForm:
                continue
        if options.choice.estimator != "quadrature":
            raise ValueError(NO_STRUCTURE)
        density.by_rows.give_up("rows go on having entries that the pattern of the Hessian lacks")
        return cls.by_draws(density, options, seed, mean, sd)


def _look_for_entries(density: ModelDensity, options: FitOptions, seed: int, mean: Array, sd: Array) -> None:
    """Add entries of the Hessian that its structure left out, about a mean; some may have been added already."""
    logger.debug("The Hessian of log p has entries that its structure left out: q gets them, too.")
    if options.choice.estimator == "quadrature":  # draws have been looked at already
        density.widen(mean + sd * np.random.default_rng(seed).standard_normal((_N_LOOKED_AT, density.n_dim)))
    if options.family_reason and density.pattern is None:
        raise ValueError(NO_STRUCTURE)


@task("Looking for a start")
def first_state(
    problem: Problem,
    options: FitOptions,
    seed: int,
    start: Mapping[str, ArrayLike] | Earlier | None,
    start_sigma: Mapping[str, ArrayLike] | float | None,
) -> tuple[Problem, Rule, VariationalState, FitOptions]:
    """Return the best state to start from, and what it is a state of; the options may have become others.

    The fit is one with draws where no Gaussian stays in the support, or where rows turn out not to be all of log p; and
    q gets the entries of the Hessian that its structure left out.
    """
    density = problem.density
    earlier, means = (start, start.mean) if isinstance(start, Earlier) else (None, start)
    for _ in range(MAX_WIDENED):
        try:
            point, scales = problem.start(means, start_sigma)
            if options.choice.estimator == "gauss_newton" or options.choice.step == "ivon":  # of networks, whose units
                # may be exchangeable, and should not all start alike
                point = units_apart(density, point, means, seed)
            rule, state = make_rule(problem.target, options, seed), None
            if earlier is not None and start_sigma is None:
                state = earlier.state(rule, problem, point, scales)
            if state is None:
                large = large_scales(density, point, means) if problem.target is density else []
                state = choose_start(rule, problem.family, point, scales, density, large)
            return problem, rule, state, options
        except (StartError, OtherForm) as reason:
            has_draws = options == options.with_draws()
            if isinstance(reason, StartError) and (has_draws or density.is_streamed):
                raise
            if isinstance(reason, StartError) or (isinstance(reason, RowsGivenUp) and not has_draws):
                logger.debug(BY_DRAWS)
                problem, options = problem_by_draws(density, options)
            else:
                mean = start_point(density, means)
                _look_for_entries(density, options, seed, mean, start_scales(density, start_sigma)[-1])
                problem = problem_of(density, options)
    raise ValueError(NO_STRUCTURE)


def make_rule(target: Target, options: FitOptions, seed: int) -> Rule:
    """Return the step rule that the options name."""
    choice = options.choice
    rule: Callable[..., Rule] = Incremental if isinstance(target, StreamDensity) else RULES[choice.step]
    return rule(
        target,
        AXES["update"][choice.update],
        AXES["estimator"][choice.estimator],
        direction=DIRECTIONS.get(choice.update),
        seed=seed,
        tol=options.tol,
        stl=options.stl,
        **options.of_rule(),
    )


# --- what a fit needs to go on in another process ---

#: Relative change of log p at the mean of q that is no rounding error.
_LOGP_RTOL = 1e-6


@stored("fit.snapshot")
@dataclass(frozen=True)
class Snapshot:
    """All that a fit needs to go on in another process, beside the model."""

    options: FitOptions
    seed: int
    scored: bool
    #: Without what follows from the rest of it.
    state: loop.LoopState
    seconds: float
    compile_seconds: float
    #: Evaluations so far.
    n_gradients: int
    n_hessians: int
    #: What came of a search for other modes, as a record has it, if there was one.
    searched: dict[str, Any] | None = None
    #: Whether other modes are yet to be looked for.
    is_to_search: bool = False
    #: At the mean of q, which tells models apart that differ in a prior; None where that would take a pass.
    log_p: float | None = None

    def session(self, density: ModelDensity, q: VariationalState) -> "FitSession":
        """Return the fit on a model; raise ValueError where that has another log p."""
        if self.log_p is not None:
            now = float(density.logp(np.asarray(q.mean())[None])[0])
            if not np.isclose(now, self.log_p, rtol=_LOGP_RTOL, atol=_LOGP_RTOL, equal_nan=True):
                raise ValueError(
                    f"The fit can't go on: at the mean of q, log p of this model is {now:.8g}, and that of the model "
                    f"which was fitted {self.log_p:.8g}. The priors, or data that are no pm.Data, differ: fit again."
                )
        return FitSession.resumed(density, self)


# --- one fit, under way or at its end: runs the loop, and says how it went ---

#: Is told, after each iteration, of q on the model's scale, the losses (None where they are not kept) and the number of
#: iterations; StopIteration ends the fit.
type Observer = Callable[[VariationalState, Array | None, int], None]


class FitSession:
    """A fit that can be gone on with from where it ended; `begin` and `resumed` make one."""

    def __init__(
        self,
        begun: Begun,
        seed: int,
        *,
        score: bool,
        seconds: float,
        compile_seconds: float,
        observer: Observer | None = None,
        search: ModeSearch | None = None,
    ) -> None:
        self._problem, self._rule, self._state, self.options = begun
        self.seed, self._score = seed, score
        self._seconds, self._compile_seconds = seconds, compile_seconds
        self._observer, self._search = observer, search
        self._searched: dict[str, Any] | None = None
        self._pause_after = math.inf
        self._assessed: tuple[Elbo, float] | None = None
        self._failed: tuple[str, ...] = ()

    @classmethod
    def begin(
        cls,
        problem: Problem,
        rule: Rule,
        q: VariationalState,
        options: FitOptions,
        seed: int,
        *,
        score: bool = True,
        observer: Observer | None = None,
        clock: float | None = None,
        search: ModeSearch | None = None,
    ) -> "FitSession":
        """Return a fit at its start."""
        clock = time.perf_counter() if clock is None else clock
        begun = Begun.at(problem, rule, options, seed, q)
        return cls(
            begun, seed, score=score, seconds=time.perf_counter() - clock,
            compile_seconds=problem.density.compile_seconds, observer=observer, search=search,
        )  # fmt: skip

    @classmethod
    def resumed(cls, density: ModelDensity, snapshot: Snapshot) -> "FitSession":
        """Return the fit that a snapshot was taken of, on a model."""
        if isinstance(snapshot.state.rule, IncrementalState):
            raise ValueError(
                "This fit was one to data in batches, which files do not keep: fit again with batches=, and with this "
                "approximation as start=."
            )
        problem = problem_of(density, snapshot.options)
        target, rule = problem.target, make_rule(problem.target, snapshot.options, snapshot.seed)
        state = snapshot.state
        if isinstance(rule, Adaptive) and isinstance(of_rule := state.rule, AdaptiveState):
            base = rule.base_draws(of_rule.level, len(of_rule.evaluation.logp))
            evaluation = replace(of_rule.evaluation, theta=of_rule.q.draws(base.z))
            state = replace(state, rule=replace(of_rule, base=base, evaluation=evaluation))
        # One that was kept while the fit was under way has the status that the loop would have seen next.
        if state.status is Status.RUNNING and (status := rule.terminate(state.rule)) is not None:
            state = replace(state, status=status)
        begun = Begun(problem, rule, state, snapshot.options)
        # Not what it took to get here.
        target.n_gradients, target.n_hessians = snapshot.n_gradients, snapshot.n_hessians
        search = ModeSearch.of(problem, snapshot.options, snapshot.seed) if snapshot.is_to_search else None
        session = cls(
            begun, snapshot.seed, score=snapshot.scored, seconds=snapshot.seconds,
            compile_seconds=snapshot.compile_seconds, search=search,
        )  # fmt: skip
        session._searched = snapshot.searched
        return session

    def snapshot(self, log_p: float | None) -> Snapshot:
        """Return what the fit needs to go on in another process, with log p at the mean of q where it is known."""
        target, state = self._problem.target, self._state
        if isinstance(of_rule := state.rule, AdaptiveState):  # the rule makes its draws again
            none = of_rule.base.z[:0]
            base, evaluation = replace(of_rule.base, z=none), replace(of_rule.evaluation, theta=none)
            state = replace(state, rule=replace(of_rule, base=base, evaluation=evaluation))
        return Snapshot(
            options=self.options,
            seed=self.seed,
            scored=self._score,
            state=state,
            seconds=self._seconds,
            compile_seconds=self._compile_seconds,
            n_gradients=target.n_gradients,
            n_hessians=target.n_hessians,
            searched=self._searched,
            is_to_search=self._search is not None,
            log_p=log_p,
        )

    def refine(
        self,
        n: int,
        *,
        tol: float | None = None,
        max_draws: int | None = None,
    ) -> None:
        """Go on for up to ``n`` more iterations; see `NGVIApproximation.refine`."""
        n = check_n(n)
        options = self.options.changed(tol=tol, max_draws=max_draws)
        if options != self.options:
            self._rule = make_rule(self._problem.target, options, self.seed)
            self.options = options
        if n:
            try:
                self._state = loop.reopen(self._rule, self._state)
            except OtherForm:
                self._widen(self._state.rule.q)
        if n and self._state.status is Status.CONVERGED:
            logger.info(f"The fit has converged already: pass a smaller tol than {self.options.tol} to refine it.")
        with few_threads(self._problem.density):
            self.run(n)

    @np.errstate(over="ignore")  # what overflows is seen in the ELBO
    @task("Gaussian fit")
    def run(self, n: int, *, pause_after: float = math.inf, most: float = math.inf) -> None:
        """Run up to ``n`` more iterations, for some seconds at most, and assess where they led if it does not pause."""
        clock, compiled = time.perf_counter(), self._problem.density.compile_seconds
        # What the start took counts with the first iterations.
        before, asked = self._estimated_seconds() if self._state.n_iterations else 0.0, self.options.max_seconds

        def observe(state: loop.LoopState) -> None:
            self._state = state
            show_numbers(state.numbers)
            if self._observer is not None:
                losses = state.history.losses if self._score else None
                self._observer(self._problem.on_model_scale(state.rule.q), losses, state.n_iterations)
            seconds = self._estimated_seconds() - before
            if seconds >= min(most, math.inf if asked is None else asked):
                raise StopIteration(Status.OUT_OF_SECONDS)
            if seconds >= self._pause_after:
                raise StopIteration(Status.PAUSED)  # another posterior is to be tried from where it is

        last, stalled, self._pause_after = self._state.n_iterations + n, None, pause_after
        self._assessed, self._failed = None, ()
        try:
            for _ in range(MAX_WIDENED):
                with contextlib.suppress(OtherForm):
                    self._state = self._watched.run(self._rule, self._state, last, observe)
                    if self.is_paused:
                        return
                    self._assess()
                    if not self._rows_fail():
                        break
                if self._state.status is Status.STALLED:
                    stalled = Begun(self._problem, self._rule, self._state, self.options), self._figures
                history = self._state.history
                self._widen(self._state.rule.q)
                status = Status.MAX_ITERATIONS if history.n else Status.NOT_STARTED  # unless there are more to come
                self._state = replace(self._state, history=history, status=status)
            else:
                raise ValueError(NO_STRUCTURE)
            self._pause_after = math.inf
            self._choose_between(stalled)
            self._look_elsewhere(last, observe)
            self._state = self._watched.ended(self._state)
        finally:
            show_numbers(self._state.numbers)
            self._seconds += time.perf_counter() - clock
            # Not what sampling in between compiled.
            self._compile_seconds += self._problem.density.compile_seconds - compiled

    @functools.cached_property
    def _watched(self) -> Watched:
        return Watched(self._problem)

    def _estimated_seconds(self) -> float:
        """Return what the evaluations so far take, by estimate."""
        density, target = self._problem.density, self._problem.target
        return fit_seconds(density, target.n_gradients, target.n_hessians, self.options.choice.estimator)

    @property
    def _figures(self) -> tuple[Elbo, float]:
        """The ELBO and the gap: of the assessment, or, where there is none, those that the loop has of its own."""
        return self._assessed or (Elbo(self._state.rule.elbo, np.inf), self._state.rule.gap)

    @property
    def undone(self) -> tuple[str, ...]:
        """What a fit that was interrupted has left out."""
        is_under_way = self._state.status in (Status.NOT_STARTED, Status.RUNNING, Status.PAUSED)
        parts = {
            "iterations until convergence": is_under_way,
            "the assessment of the result": self._assessed is None,
            "the search for other modes": self._search is not None,
        }
        return tuple(part for part, is_left in parts.items() if is_left)

    def _choose_between(self, earlier: tuple[Begun, tuple[Elbo, float]] | None) -> None:
        """Take an earlier end, with its ELBO and gap, as the result, where later iterations led to nothing better."""
        if earlier is None or self._state.status is Status.CONVERGED or self._figures[0].value >= earlier[1][0].value:
            return
        history = self._state.history
        (self._problem, self._rule, state, self.options), self._assessed = earlier
        self._state = replace(state, history=history)

    def _look_elsewhere(self, last: int, observe: loop.Observer) -> None:
        """Look for other modes, fit from these, and keep the best of all."""
        first = best = Ended(self._state, *self._figures)
        ended = first.state.status
        is_at_end = ended.ended_by_itself and first.state.n_iterations < last and ended is not Status.COLLAPSED
        if self._search is None or self._assessed is None or not is_at_end:
            return
        target, what, searched = self._problem.target, "the search for other modes", None
        try:
            with spared(what.capitalize(), "The fit that was found first is kept."):
                found = self._search.after(
                    first.q, first.elbo.value, target.n_gradients, target.n_hessians,
                    is_sound=first.state.status.can_be_followed,
                )  # fmt: skip
                if found is not None:
                    fit = functools.partial(self._fit_from, first=first, last=last, observe=observe)
                    best, why, modes = explored(self._search, found, self._rule, self._problem.family, first, fit)
                    searched = {"restarted": why, "modes": modes, "n_searched": found.n_gradients}
        except Failed as reason:
            self._failed = (*self._failed, f"{what} ({reason})")
        finally:
            self._state, self._assessed = best.state, (best.elbo, best.gap)
        self._search, self._searched = None, searched

    def _fit_from(self, state: VariationalState, *, first: Ended, last: int, observe: loop.Observer) -> Ended | None:
        """Fit from another state; return None where nothing came of it."""
        try:
            self._state = replace(loop.start(self._rule, state), history=first.state.history)
            self._state = self._watched.run(self._rule, self._state, last, observe)
            self._assess()
        except OtherForm:
            return None
        return Ended(self._state, *self._figures)

    def _assess(self) -> None:
        """Measure the state on draws that had no part in reaching it."""
        self._assessed, what = None, "the assessment of the result"
        try:
            with spared(what.capitalize(), "The fit is kept, with the ELBO on its own draws."):
                assessment = self._rule.assess(self._state.rule)
                elbo = elbo_of(self._state.rule.q, assessment)
                status = self._rule.conclude(self._state.status, assessment)
        except Failed as reason:
            self._failed = (*self._failed, f"{what} ({reason})")
            return
        self._state, self._assessed = replace(self._state, status=status), (elbo, assessment.gap)

    def _widen(self, q: VariationalState) -> None:
        """Begin again from where a state is, with what was left out of the Hessian, or of the rows."""
        density, (mean, sd) = self._problem.density, self._problem.mean_and_sd(q)
        if self.options.choice.estimator == "quadrature" and (density.n_directions is None or self._rows_fail()):
            begin = Begun.by_draws
        else:
            begin = Begun.wider
        self._assessed = None
        begun = begin(density, self.options, self.seed, mean, sd)
        self._problem, self._rule, self._state, self.options = begun

    def _rows_fail(self) -> bool:
        """Tell whether a fit by quadrature ended because a Gaussian leaves the support of rows, or they are too wild.

        Far out, some rows weigh more the farther one looks, as an exponential of a product does: what finer rules say
        of the gradient is not what the ELBO by others does.
        """
        by_rows = self.options.choice.estimator == "quadrature" and not self._problem.density.is_streamed
        return by_rows and self._state.status in (Status.NO_FINITE_TRIAL, Status.STALLED)

    @property
    def is_paused(self) -> bool:
        """Whether it has been left for another posterior, and goes on where it was if there is none."""
        return self._state.status is Status.PAUSED

    def outcome(self) -> tuple[VariationalState, FitRecord, Array, Array]:
        """Return what the fit has come to: q on the model's scale, the record, and losses and gaps by iteration."""
        state = self._state
        hist = state.history.losses.copy() if self._score else np.empty(0)
        return self._problem.on_model_scale(state.rule.q), self._record(), hist, state.history.gaps.copy()

    def _record(self) -> FitRecord:
        density, target, state = self._problem.density, self._problem.target, self._state.rule
        of_batches = {"step": "incremental", "stream": state.report} if isinstance(state, IncrementalState) else {}
        of_gaussian = getattr(state, "of_gaussian", state)  # of a mixture, or a Student-t, that which it began as
        growth = getattr(of_gaussian, "growth", None) if self._state.status is Status.UNBOUNDED else None
        growing = () if growth is None else growth.coordinates()
        is_whole = not (density.is_sharded or density.is_streamed)
        ended = self._state.status.ended_by_itself and self._state.status is not Status.CONVERGED
        return FitRecord(
            status=self._state.status,
            elbo=self._figures[0],
            gap=self._figures[1],
            n_iterations=self._state.n_iterations,
            n_gradients=target.n_gradients,
            n_hessians=target.n_hessians,
            n_dropped=state.n_dropped,
            compile_seconds=self._compile_seconds,
            run_seconds=max(self._seconds - self._compile_seconds, 0.0),
            backend=density.backend,
            family_reason=self.options.family_reason,
            reparam=self.options.reparam,
            gaussian=getattr(state, "gaussian", None),
            growing=self._problem.labels(growing),
            improper=self._watched.improper,
            constant=tuple(constant_data(density.model)) if is_whole and ended else (),
            searched=self._searched is not None,
            seed=self.seed,
            summed_out=density.summed_out.names,
            is_prior=is_prior(density),
            undone=self._failed,
            **(vars(self.options.choice) | (self._searched or {}) | of_batches),
        )
