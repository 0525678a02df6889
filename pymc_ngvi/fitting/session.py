"""One fit, under way or at its end: runs the loop, and says how it went."""

import contextlib
import functools
import logging
import math
import time

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from rich.theme import Theme

from pymc_ngvi.core.elbo import Elbo
from pymc_ngvi.core.prices import fit_seconds
from pymc_ngvi.core.refusal import Failed, OtherForm
from pymc_ngvi.core.status import Status
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array, Rule, RuleState, VariationalState
from pymc_ngvi.density import ModelDensity
from pymc_ngvi.density.checks import constant_data
from pymc_ngvi.fitting import loop
from pymc_ngvi.fitting.begun import MAX_WIDENED, NO_STRUCTURE, Begun, make_rule
from pymc_ngvi.fitting.errors import spared
from pymc_ngvi.fitting.loop import LoopState
from pymc_ngvi.fitting.modes.found import Searched
from pymc_ngvi.fitting.modes.search import Ended, ModeSearch, explored
from pymc_ngvi.fitting.options import FitOptions, check_n
from pymc_ngvi.fitting.problem import Problem, problem_of
from pymc_ngvi.fitting.progress import FitProgress, watching
from pymc_ngvi.fitting.propriety import Watched
from pymc_ngvi.fitting.record import FitRecord, Outcome, elbo_of
from pymc_ngvi.fitting.threads import few_threads
from pymc_ngvi.steps.adaptive.rule import Adaptive, AdaptiveState
from pymc_ngvi.steps.incremental import IncrementalState

# --- what an object has learned on the way, as numbers: the searches and differences of a reparametrised density ---
# An evaluation begins where the last ones have led, so that the bits of the next one depend on it. A class names the
# attributes that count in ``learned``: numbers, arrays, and objects of such classes.


def memory_of(learner: object) -> dict[str, object]:
    """Return what an object has learned, with that of the objects in it; nothing for classes that do not learn."""
    values = {name: getattr(learner, name) for name in _learned(learner)}
    return {name: memory_of(value) if _learned(value) else value for name, value in values.items()}


def remember(learner: object, memory: dict[str, object]) -> None:
    """Put back what was learned into an object that has evaluated nothing yet."""
    for name in _learned(learner):
        if name not in memory:
            raise ValueError(f"it does not have {name!r} among what the fit had learned, {sorted(memory)}")
        held, value = getattr(learner, name), memory[name]
        if _learned(held) and isinstance(value, dict):
            remember(held, value)
        elif type(value) is not type(held) or np.shape(np.asarray(value)) != np.shape(np.asarray(held)):
            raise ValueError(f"what it remembers as {name!r} has another form")
        else:
            setattr(learner, name, value)


def _learned(learner: object) -> tuple[str, ...]:
    return getattr(type(learner), "learned", ())


# --- what a fit needs to go on in another process ---


@stored("fit.snapshot")
@dataclass(frozen=True)
class Snapshot:
    """All that a fit needs to go on in another process, beside the model."""

    options: FitOptions
    seed: int
    scored: bool
    #: Without what follows from the rest of it.
    state: LoopState
    seconds: float
    compile_seconds: float
    #: Evaluations so far.
    n_gradients: int
    n_hessians: int
    #: What a reparametrised density has learned.
    memory: dict[str, object]
    #: What came of a search for other modes, if there was one.
    searched: Searched | None = None
    #: Whether other modes are yet to be looked for.
    is_to_search: bool = False


def thinned(rule: Rule, state: RuleState) -> RuleState:
    """Return a state without its base draws and the draws of q, if the rule makes the same bits again."""
    if not (isinstance(rule, Adaptive) and isinstance(state, AdaptiveState)):
        return state
    base, theta = state.base, state.evaluation.theta
    again = rule.base_draws(state.level, base.n_draws, state.q)
    if not (_same(again.z, base.z) and _same(state.q.draws(again.z), theta)) or again.n_replicates != base.n_replicates:
        return state
    return replace(state, base=replace(base, z=base.z[:0]), evaluation=replace(state.evaluation, theta=theta[:0]))


def _same(left: Array, right: Array) -> bool:
    return bool(np.array_equal(left, right)) and left.flags.f_contiguous == right.flags.f_contiguous


def filled(rule: Rule, state: RuleState) -> RuleState:
    """Return a state as it was before `thinned`."""
    if not (isinstance(rule, Adaptive) and isinstance(state, AdaptiveState)) or len(state.base.z):
        return state
    base = rule.base_draws(state.level, len(state.evaluation.logp), state.q)
    return replace(state, base=base, evaluation=replace(state.evaluation, theta=state.q.draws(base.z)))


# --- one fit, under way or at its end: runs the loop, and says how it went ---

# A child of PyMC's logger, which has the handler.
logger = logging.getLogger("pymc.ngvi")

#: Is told, after each iteration, of q on the model's scale, the losses (None where they are not kept) and the number of
#: iterations; StopIteration ends the fit.
type Observer = Callable[[VariationalState, Array | None, int], None]

#: Said of fits that were saved.
_NO_BATCHES = (
    "This fit was one to data in batches, which files do not keep: fit again with batches=, and with this "
    "approximation as start=."
)


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
        self._searched: Searched | None = None
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
            raise ValueError(_NO_BATCHES)
        problem = problem_of(density, snapshot.options)
        target, rule = problem.target, make_rule(problem.target, snapshot.options, snapshot.seed)
        remember(target, snapshot.memory)
        state = replace(snapshot.state, rule=filled(rule, snapshot.state.rule))
        begun = Begun(problem, rule, loop.settled(rule, state), snapshot.options)
        # Not what it took to get here.
        target.n_gradients, target.n_hessians = snapshot.n_gradients, snapshot.n_hessians
        search = ModeSearch.of(problem, snapshot.options, snapshot.seed) if snapshot.is_to_search else None
        session = cls(
            begun, snapshot.seed, score=snapshot.scored, seconds=snapshot.seconds,
            compile_seconds=snapshot.compile_seconds, search=search,
        )  # fmt: skip
        session._searched = snapshot.searched
        return session

    def snapshot(self) -> Snapshot:
        """Return what the fit needs to go on in another process."""
        target = self._problem.target
        return Snapshot(
            options=self.options,
            seed=self.seed,
            scored=self._score,
            state=replace(self._state, rule=thinned(self._rule, self._state.rule)),
            seconds=self._seconds,
            compile_seconds=self._compile_seconds,
            n_gradients=target.n_gradients,
            n_hessians=target.n_hessians,
            memory=memory_of(target),
            searched=self._searched,
            is_to_search=self._search is not None,
        )

    def refine(
        self,
        n: int,
        progressbar: bool = True,
        progressbar_theme: Theme | None = None,
        *,
        tol: float | None = None,
        max_draws: int | None = None,
    ) -> Outcome:
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
        density = self._problem.density
        with FitProgress(progressbar, progressbar_theme) as progress, few_threads(density), watching(density, progress):
            self.run(n, progress)
        return self.outcome()

    @np.errstate(over="ignore")  # what overflows is seen in the ELBO
    def run(self, n: int, progress: FitProgress, *, pause_after: float = math.inf, most: float = math.inf) -> None:
        """Run up to ``n`` more iterations, for some seconds at most, and assess where they led if it does not pause."""
        clock, compiled = time.perf_counter(), self._problem.density.compile_seconds
        # What the start took counts with the first iterations.
        before, asked = self._estimated_seconds() if self._state.n_iterations else 0.0, self.options.max_seconds

        def observe(state: loop.LoopState) -> None:
            self._state = state
            progress.update(state)
            if self._observer is not None:
                losses = state.losses if self._score else None
                self._observer(self._problem.on_model_scale(state.rule.q), losses, state.n_iterations)
            seconds = self._estimated_seconds() - before
            if seconds >= min(most, math.inf if asked is None else asked):
                raise loop.OutOfSeconds
            if seconds >= self._pause_after:
                raise loop.Paused

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
            self._look_elsewhere(last, observe, progress)
            self._state = self._watched.ended(self._state)
        finally:
            progress.update(self._state, last=True)
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

    def _look_elsewhere(self, last: int, observe: loop.Observer, progress: FitProgress) -> None:
        """Look for other modes, fit from these, and keep the best of all."""
        first = best = Ended(self._state, *self._figures)
        is_at_end = first.state.status.ended_by_itself and first.state.n_iterations < last  # or else it may go on
        if self._search is None or self._assessed is None or not is_at_end:
            return
        target, what, searched = self._problem.target, "the search for other modes", None
        try:
            with spared(what.capitalize(), "The fit that was found first is kept."):
                found = self._search.after(
                    first.q, first.elbo.value, target.n_gradients, target.n_hessians,
                    is_sound=first.state.status.can_be_followed, show=progress.show,
                )  # fmt: skip
                if found is not None and found.modes:
                    fit = functools.partial(self._fit_from, first=first, last=last, observe=observe)
                    best, why, modes = explored(self._search, found, self._rule, self._problem.family, first, fit)
                    searched = Searched(why, modes, found.n_gradients)
                elif found is not None:
                    searched = Searched(n_searched=found.n_gradients)
        except Failed as reason:
            self._failed = (*self._failed, f"{what} ({reason})")
        finally:
            self._state, self._assessed = best.state, (best.elbo, best.gap)
        self._search, self._searched = None, searched

    def _fit_from(self, state: VariationalState, *, first: Ended, last: int, observe: loop.Observer) -> Ended | None:
        """Fit from another state; return None where nothing came of it."""
        try:
            start = replace(loop.start(self._rule, state), history=first.state.history)
            self._state = start
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
        if self.options.choice.estimator != "quadrature" or self._problem.density.is_streamed:
            return False
        return self._state.status in (Status.NO_FINITE_TRIAL, Status.STALLED)

    @property
    def is_paused(self) -> bool:
        """Whether it has been left for another posterior, and goes on where it was if there is none."""
        return self._state.status is Status.PAUSED

    def outcome(self) -> Outcome:
        """Return what the fit has come to."""
        state = self._state
        hist = state.losses.copy() if self._score else np.empty(0)
        return Outcome(self._problem.on_model_scale(state.rule.q), self._record(), hist, state.gaps.copy())

    def _record(self) -> FitRecord:
        density, target, state = self._problem.density, self._problem.target, self._state.rule
        of_batches = {"step": "incremental", "stream": state.report} if isinstance(state, IncrementalState) else {}
        growing = getattr(state, "growing", ()) if self._state.status is Status.UNBOUNDED else ()
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
            backend=density.backend_in_use,
            family_reason=self.options.family_reason,
            reparam=self.options.reparam,
            gaussian=getattr(state, "gaussian", None),
            growing=self._problem.labels(growing),
            improper=self._watched.improper,
            constant=tuple(constant_data(density.model)) if is_whole and ended else (),
            searched=self._searched is not None,
            seed=self.seed,
            summed_out=density.summed_out_names,
            undone=self._failed,
            **(vars(self.options.choice) | vars(self._searched or Searched()) | of_batches),
        )


# --- a fit that was saved, and goes on when it is asked to ---

#: Relative change of log p at the mean of q that is no rounding error.
_LOGP_RTOL = 1e-6


class SavedFit:
    """A fit that was saved: made again when it is to go on."""

    def __init__(self, density: ModelDensity, q: VariationalState, snapshot: Snapshot, log_p: float | None) -> None:
        self._density, self._q, self._snapshot, self.log_p = density, q, snapshot, log_p
        self._session: FitSession | None = None

    @property
    def is_idle(self) -> bool:
        """Whether the fit has not gone on yet."""
        return self._session is None

    @property
    def options(self) -> FitOptions:
        """Of the fit."""
        return self.snapshot().options

    def outcome(self) -> Outcome | None:
        """Return what the fit has come to since; None where it has not gone on yet."""
        return None if self._session is None else self._session.outcome()

    @property
    def undone(self) -> tuple[str, ...]:
        """What a fit that was interrupted has left out since."""
        return () if self._session is None else self._session.undone

    def snapshot(self) -> Snapshot:
        """Return what the fit needs to go on in another process."""
        return self._snapshot if self._session is None else self._session.snapshot()

    def refine(
        self,
        n: int,
        progressbar: bool = True,
        progressbar_theme: Theme | None = None,
        *,
        tol: float | None = None,
        max_draws: int | None = None,
    ) -> Outcome:
        """Go on; see `NGVIApproximation.refine`."""
        if self._session is None:
            self._check_log_p()
            self._session = FitSession.resumed(self._density, self._snapshot)
        return self._session.refine(n, progressbar, progressbar_theme, tol=tol, max_draws=max_draws)

    def _check_log_p(self) -> None:
        if self.log_p is None:
            return
        now = float(self._density.logp(np.asarray(self._q.mean())[None])[0])
        if not np.isclose(now, self.log_p, rtol=_LOGP_RTOL, atol=_LOGP_RTOL, equal_nan=True):
            raise ValueError(
                f"The fit can't go on: at the mean of q, log p of this model is {now:.8g}, and that of the model which "
                f"was fitted {self.log_p:.8g}. The priors, or data that are no pm.Data, differ: fit again."
            )
