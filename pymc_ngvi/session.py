"""One fit, under way or at its end: runs the loop, keeps the approximation up to date, says how it went."""

import dataclasses
import logging
import time
import warnings

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rich.theme import Theme

from pymc_ngvi import loop
from pymc_ngvi.approximation import NGVIApproximation
from pymc_ngvi.defaults import OURS
from pymc_ngvi.model import PatternWidened
from pymc_ngvi.options import FitOptions, check_n
from pymc_ngvi.persistence.memory import memory_of, remember
from pymc_ngvi.persistence.thinning import filled, thinned
from pymc_ngvi.problem import Problem, problem_of
from pymc_ngvi.progress import FitProgress
from pymc_ngvi.registry import AXES
from pymc_ngvi.result import Elbo, FitRecord
from pymc_ngvi.second_start import SecondStart, is_better
from pymc_ngvi.status import ConvergenceWarning, Status
from pymc_ngvi.stored import stored
from pymc_ngvi.threads import few_threads
from pymc_ngvi.types import Array, Assessment, GaussianState, TargetDensity, VariationalState
from pymc_ngvi.updates import DIRECTIONS

# A child of PyMC's logger, which has the handler.
logger = logging.getLogger("pymc.ngvi")

#: Times that the structure of a Hessian may turn out to be too narrow, at most.
_MAX_WIDENED = 5
_NO_STRUCTURE = (
    "The Hessian of this model's log density turned out to have many more entries than its graph shows: take "
    "family='full', 'block' or 'diagonal'."
)
#: Ends of a fit that the user should know of.
_WARNED = (
    Status.LEVELLED,
    Status.NOISE_LIMITED,
    Status.STALLED,
    Status.NO_FINITE_TRIAL,
    Status.OUTSIDE_SUPPORT,
    Status.NOT_SMOOTH,
    Status.DIVERGED,
    Status.UNBOUNDED,
    Status.COLLAPSED,
    Status.MAX_ITERATIONS,
)


@stored("fit.snapshot")
@dataclass(frozen=True)
class Snapshot:
    """All that a fit needs to go on in another process, beside the model.

    Parameters
    ----------
    options : FitOptions
    seed : int
    scored : bool
    state : LoopState
        Without what follows from the rest of it.
    seconds, compile_seconds : float
    n_gradients, n_hessians : int
        Evaluations so far.
    memory : dict
        What a reparametrised density has learned.
    """

    options: FitOptions
    seed: int
    scored: bool
    state: loop.LoopState
    seconds: float
    compile_seconds: float
    n_gradients: int
    n_hessians: int
    memory: dict[str, Any]


class FitSession:
    """A fit that can be gone on with from where it ended.

    Parameters
    ----------
    approx : NGVIApproximation
        Follows the fit.
    problem : Problem
        What is fitted.
    q : GaussianState
        The start, in the coordinates of the problem.
    options : FitOptions
    seed : int
        Of the base draws.
    callbacks : sequence of callable
    score : bool
        Whether to keep the history of the loss.
    clock : float
        ``time.perf_counter()`` when the fit began.
    snapshot : Snapshot, optional
        Of the fit to go on with; ``options``, ``seed`` and ``score`` are its own then, and ``q`` has no part.
    second_start : SecondStart, optional
        Where to begin once more, after the fit.
    """

    def __init__(
        self,
        approx: NGVIApproximation,
        problem: Problem,
        q: GaussianState,
        options: FitOptions,
        seed: int,
        callbacks: Sequence[Callable[..., Any]],
        score: bool,
        clock: float,
        snapshot: Snapshot | None = None,
        second_start: SecondStart | None = None,
    ) -> None:
        self.approx = approx
        self._second_start, self._restarted = second_start, ""
        self._problem = problem
        self._options = options
        self._seed = seed
        self._callbacks = callbacks
        self._score = score
        self._rule = make_rule(problem.target, options, seed)
        if snapshot is not None:
            self._state = self._restored(snapshot)
            self._seconds, self._compile_seconds = snapshot.seconds, snapshot.compile_seconds
            return
        try:
            self._state = loop.start(self._rule, q)
        except PatternWidened:
            self._state = self._restructured(q)
        self._seconds = time.perf_counter() - clock
        self._compile_seconds = approx.density.compile_seconds

    @classmethod
    def resumed(cls, approx: NGVIApproximation, snapshot: Snapshot) -> "FitSession":
        """Return the fit that a snapshot was taken of, on the model of an approximation.

        Raises
        ------
        ValueError
            If the snapshot is not one of such a fit.
        """
        clock, options = time.perf_counter(), snapshot.options
        problem = problem_of(approx.density, options)
        q = snapshot.state.rule.q
        return cls(approx, problem, q, options, snapshot.seed, (), snapshot.scored, clock, snapshot)

    def snapshot(self) -> Snapshot:
        """Return what the fit needs to go on in another process."""
        target = self._problem.target
        return Snapshot(
            options=self._options,
            seed=self._seed,
            scored=self._score,
            state=dataclasses.replace(self._state, rule=thinned(self._rule, self._state.rule)),
            seconds=self._seconds,
            compile_seconds=self._compile_seconds,
            n_gradients=target.n_gradients,
            n_hessians=target.n_hessians,
            memory=memory_of(target),
        )

    def _restored(self, snapshot: Snapshot) -> loop.LoopState:
        """Return the state of the loop, with the target as it was."""
        target = self._problem.target
        remember(target, snapshot.memory)
        state = dataclasses.replace(snapshot.state, rule=filled(self._rule, snapshot.state.rule))
        state = loop.settled(self._rule, state)
        # Not what it took to get here.
        target.n_gradients, target.n_hessians = snapshot.n_gradients, snapshot.n_hessians
        return state

    def refine(
        self,
        n: int,
        progressbar: bool = True,
        progressbar_theme: Theme | None = None,
        *,
        tol: float | None = None,
        max_draws: int | None = None,
    ) -> NGVIApproximation:
        """Go on for up to ``n`` more iterations; see `NGVIApproximation.refine`."""
        n = check_n(n)
        self.approx.refuse_changed_data("The fit can't go on with other data")
        options = self._options.changed(tol=tol, max_draws=max_draws)
        if options != self._options:
            self._rule = make_rule(self._problem.target, options, self._seed)
            self._options = options
        if n:
            try:
                self._state = loop.reopen(self._rule, self._state)
            except PatternWidened:
                self._state = self._restructured(self._state.rule.q)
        if n and self._state.status is Status.CONVERGED:
            logger.info(f"The fit has converged already: pass a smaller tol than {self._options.tol} to refine it.")
        with FitProgress(progressbar, progressbar_theme) as progress, few_threads(self.approx.density):
            self.run(n, progress)
        return self.finish()

    def run(self, n: int, progress: FitProgress) -> None:
        """Run up to ``n`` more iterations and assess where they led."""
        clock, compiled = time.perf_counter(), self.approx.density.compile_seconds

        def observe(state: loop.LoopState) -> None:
            self._state = state
            progress.update(state)
            if self._callbacks:
                self.approx.set_state(self._problem.on_model_scale(state.rule.q))
                losses = state.losses if self._score else None
                for callback in self._callbacks:
                    callback(self.approx, losses, state.n_iterations)

        last = self._state.n_iterations + n
        try:
            for _ in range(_MAX_WIDENED):
                try:
                    self._state = loop.run(self._rule, self._state, last - self._state.n_iterations, observe)
                    self._assess()
                    break
                except PatternWidened:
                    history = self._state.history
                    self._state = dataclasses.replace(self._restructured(self._state.rule.q), history=history)
            else:
                raise ValueError(_NO_STRUCTURE)
            self._begin_again(last, observe)
        except KeyboardInterrupt:  # nothing is lost but the fresh draws: the loop has figures of its own
            self._elbo, self._gap = Elbo(self._state.rule.elbo, np.inf), self._state.rule.gap
        progress.update(self._state, last=True)
        self._seconds += time.perf_counter() - clock
        # Not what sampling in between compiled.
        self._compile_seconds += self.approx.density.compile_seconds - compiled

    def _begin_again(self, last: int, observe: loop.Observer) -> None:
        """Fit once more from another start, where that promises more; keep the better of both."""
        first, elbo, gap = self._state, self._elbo, self._gap
        begin, self._second_start = self._second_start, None
        if begin is None or not first.status.ended_by_itself or first.n_iterations >= last:
            return
        place = begin.after(first.rule.q, elbo.value)
        if place is None:
            return
        try:
            self._state = dataclasses.replace(loop.start(self._rule, place.state), history=first.history)
            self._state = loop.run(self._rule, self._state, last - first.n_iterations, observe)
            self._assess()
        except PatternWidened:
            self._state = first
        if self._state is not first and is_better(self._elbo, elbo):
            self._restarted = place.sentence(self._elbo.value - elbo.value)
        else:
            self._state, self._elbo, self._gap = first, elbo, gap

    def _assess(self) -> None:
        """Measure the state on draws that had no part in reaching it."""
        assessment = self._rule.assess(self._state.rule)
        self._elbo, self._gap = _elbo(self._state.rule.q, assessment), assessment.gap
        status = self._rule.conclude(self._state.status, assessment)
        self._state = dataclasses.replace(self._state, status=status)

    def _restructured(self, q: GaussianState) -> loop.LoopState:
        """Begin again from where a state is, for a Hessian that has turned out to have more entries than it seemed."""
        for _ in range(_MAX_WIDENED):
            logger.info("The Hessian of log p has entries that its structure left out: q gets them, too.")
            if self._options.family_reason and self.approx.density.pattern is None:
                raise ValueError(_NO_STRUCTURE)
            self._problem = problem_of(self.approx.density, self._options)
            self._rule = make_rule(self._problem.target, self._options, self._seed)
            try:
                return loop.start(self._rule, self._problem.family.from_scale(q.mean(), q.sd()))
            except PatternWidened:
                continue
        raise ValueError(_NO_STRUCTURE)

    @property
    def seed(self) -> int:
        """Of the base draws."""
        return self._seed

    @property
    def options(self) -> FitOptions:
        """Of the fit."""
        return self._options

    def finish(self) -> NGVIApproximation:
        """Bring the approximation up to date, and return it."""
        state, approx = self._state, self.approx
        approx.set_state(self._problem.on_model_scale(state.rule.q))
        approx.record = self._record()
        approx.hist = state.losses.copy() if self._score else np.empty(0)
        approx.gap_hist = state.gaps.copy()
        return approx

    def tell(self, approx: NGVIApproximation) -> None:
        """Say how the fit went, and what posterior came of it."""
        state, record = self._state, approx.record
        assert record is not None
        logger.info(" ".join(filter(None, [record.closing_line(), record.posterior, record.next_step])))
        if remark := getattr(self.approx.q, "remark", ""):
            logger.info(remark)
        if record.restarted:
            logger.info(record.restarted)
        if record.n_dropped:
            logger.info(f"{record.n_dropped} draws were left out because log p or its gradient was not finite there.")
        if record.is_exact:
            return
        if state.status in _WARNED:
            unknown = state.status is Status.LEVELLED and np.isnan(record.gap)
            verdict = "Whether the fit has converged is not known" if unknown else "The fit did not converge"
            warnings.warn(
                f"{verdict} ({state.status}). {record.sentence} {state.status.cure}",
                ConvergenceWarning,
                skip_file_prefixes=OURS,
            )
        elif state.status is not Status.CONVERGED:
            logger.info(f"{state.status.sentence} {state.status.cure}")

    def _growing(self) -> tuple[str, ...]:
        """Return the coordinates whose standard deviations keep growing, where that ended the fit."""
        if self._state.status is not Status.UNBOUNDED:
            return ()
        return tuple(self.approx.layout.label(int(i)) for i in self._state.rule.growth.coordinates())

    def _record(self) -> FitRecord:
        density, target = self.approx.density, self._problem.target
        return FitRecord(
            status=self._state.status,
            elbo=self._elbo,
            gap=self._gap,
            n_iterations=self._state.n_iterations,
            n_gradients=target.n_gradients,
            n_hessians=target.n_hessians,
            n_dropped=self._state.rule.n_dropped,
            compile_seconds=self._compile_seconds,
            run_seconds=max(self._seconds - self._compile_seconds, 0.0),
            backend=density.backend,
            family_reason=self._options.family_reason,
            reparam=self._options.reparam,
            gaussian=getattr(self._state.rule, "gaussian", None),
            growing=self._growing(),
            restarted=self._restarted,
            seed=self._seed,
            **vars(self._options.choice),
        )


def make_rule(target: TargetDensity, options: FitOptions, seed: int) -> Any:
    """Return the step rule that the options name."""
    choice = options.choice
    return AXES["step"][choice.step](
        target,
        AXES["update"][choice.update],
        AXES["estimator"][choice.estimator],
        direction=DIRECTIONS.get(choice.update),
        seed=seed,
        tol=options.tol,
        stl=options.stl,
        **options.of_rule(),
    )


def _elbo(q: VariationalState, assessment: Assessment) -> Elbo:
    """Return the ELBO on draws that had no part in reaching the state."""
    h: Array = assessment.logp - q.log_density(assessment.theta)
    keep, units = np.isfinite(h), assessment.units
    if not keep.any():
        return Elbo(-np.inf, np.inf)
    # Draws of an antithetic pair, or on one minibatch, are dependent: the error is that of the mean over such units.
    means = h[units[keep[units].all(axis=1)]].mean(axis=1)
    se = float(means.std(ddof=1) / np.sqrt(len(means))) if len(means) > 1 else np.inf
    return Elbo(float(h[keep].mean()), se)
