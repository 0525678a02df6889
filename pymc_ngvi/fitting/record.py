"""What a fit reports of itself."""

import contextlib
import logging
import math
import os

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self, cast

import numpy as np

from pymc_ngvi.core.draws import draws_of
from pymc_ngvi.core.linalg import logsumexp
from pymc_ngvi.core.messages import N_NAMED, Failed, Reason, Refused, listed, logger, percent, warn
from pymc_ngvi.core.sizes import N_SHOWN
from pymc_ngvi.core.status import ConvergenceWarning, DivergedError, Elbo, StartError, Status
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array, Assessment, VariationalState
from pymc_ngvi.core.verdict import NOT_TESTED, Against, Condition, Verdict, Word
from pymc_ngvi.density import Layout, LogDensity, ModelDensity
from pymc_ngvi.density.shards import BrokenExecutorError, ShardError
from pymc_ngvi.density.streams import BatchError, StreamReport
from pymc_ngvi.families import DENSE, INDEPENDENT, FullState
from pymc_ngvi.marginal.pooled import PoolState
from pymc_ngvi.posteriors.plan import GAUSSIAN, Decision, Plan

# --- what there is to say of modes beside that of the fit: where they are, and their share of the posterior ---

#: Draws of each approximation by which masses are compared.
N_DRAWS = 512
#: Log of the ratio to q from which on a draw is outside of it, and the part of the draws that has to be.
LOG_OUTSIDE, MOSTLY = 3.0, 0.5
#: Part of the mass that is expected at a mode, from which on draws have found it, but for two standard errors.
_FOUND = 0.5


@stored("fit.other_mode")
@dataclass(frozen=True)
class OtherMode:
    """A mode of the posterior that a fit is not at."""

    #: An approximation there, on the unconstrained scale.
    q: VariationalState
    #: Of the mass about all modes that were found.
    share: float
    #: Whether log p is as high there, and as wide: an image of the fit under a symmetry, where there is one.
    is_equal: bool = False


def is_outside(density: ModelDensity, q: VariationalState, elbo: float, other: VariationalState, seed: int) -> bool:
    """Tell whether most of another approximation is where q lacks mass."""
    theta = draws_of(other, N_DRAWS // 8, np.random.default_rng(seed))
    with np.errstate(all="ignore"):
        log_p, log_q = density.logp(theta), np.asarray(q.log_density(theta))
        outside = np.isfinite(log_p) & ~(log_q >= log_p - elbo - LOG_OUTSIDE)
    return bool(outside.mean() >= MOSTLY)


def shares(density: ModelDensity, states: Sequence[VariationalState], seed: int) -> Array:
    """Return the mass of the posterior at each of some approximations, as parts of that at all of them.

    By importance sampling: draws of their mixture, each counted for the components that it may be of.
    """
    rng = np.random.default_rng(seed)
    theta = np.concatenate([draws_of(state, N_DRAWS, rng) for state in states])
    with np.errstate(all="ignore"):
        log_p = density.logp(theta)
        parts = np.array([state.log_density(theta) for state in states])
    log_p = np.where(np.isfinite(log_p), log_p, -np.inf)
    log_mixture = logsumexp(parts, axis=0)
    masses = logsumexp(log_p - log_mixture + parts - log_mixture, axis=1)
    return np.exp(masses - logsumexp(masses))


def not_covered(
    modes: Sequence[OtherMode], posterior: PoolState, seed: int, *, equal: bool = False
) -> tuple[OtherMode, ...]:
    """Return the modes that draws of another posterior do not have their share at; images of its own on demand."""
    modes = [mode for mode in modes if equal or not mode.is_equal]
    if not modes:
        return ()
    draw = posterior.draw(N_SHOWN, np.random.default_rng(seed))
    parts = np.array([posterior.gaussian.log_density(draw), *(mode.q.log_density(draw) for mode in modes)])
    found = np.bincount(parts.argmax(axis=0), minlength=len(parts))[1:]
    expected = len(draw) * np.array([mode.share for mode in modes])
    missed = found < _FOUND * expected - 2.0 * np.sqrt(expected)
    return tuple(mode for mode, is_missed in zip(modes, missed, strict=True) if is_missed)


def left_out(modes: Sequence[OtherMode]) -> str:
    """Say, without a subject, what a posterior leaves out."""
    what = "a mode" if len(modes) == 1 else f"{len(modes)} modes"
    return f"leaves out {what} with {percent(sum(mode.share for mode in modes), '.2g')} of the mass"


#: Part of the mass elsewhere, or of draws that are lost, from which on it counts; square of a standard deviation,
#: relative, that other modes may add.
MUCH, _WIDER = 0.02, 0.2
#: Coordinates that a sentence names are farther apart than this part of the farthest.
_NEAR_FARTHEST = 0.3


def of_modes(modes: Sequence[OtherMode], q: Any, layout: Layout, cure: str = "") -> list[Condition]:
    """Return what stands against a posterior that leaves out modes: little of the mass, only against its exactness."""
    if not modes:
        return []
    mean, sd, share = q.mean(), q.sd(), sum(mode.share for mode in modes)
    added = np.array([mode.share for mode in modes]) @ np.array([((mode.q.mean() - mean) / sd) ** 2 for mode in modes])
    against = Against.EXACT if share < MUCH and added.max() < _WIDER else Against.RELIABLE
    apart = np.abs(modes[0].q.mean() - mean) / sd
    far = np.argsort(-apart)[:N_NAMED]
    far = far[apart[far] > _NEAR_FARTHEST * apart[far[0]]]
    place = ", ".join(f"`{layout.label(int(i))}` = {modes[0].q.mean()[i]:.3g} (here {mean[i]:.3g})" for i in far)
    what, at = ("another mode", "at") if len(modes) == 1 else (f"{len(modes)} other modes", "the largest at")
    mass = percent(share, ".0f" if share >= 0.01 else ".1f")
    said = f"the posterior has {what}, with {mass} of the mass, {at} {place}, which the approximation leaves out"
    return [Condition("modes", share, 0.0, said, against, cure=cure)]


# --- what a fit reports of itself ---

#: How the names of variables are shown.
_NAME = "`{}`"
#: Ends that the user has chosen: no warning.
_OF_USER = (Status.NOT_STARTED, Status.INTERRUPTED, Status.STOPPED)


@stored("fit.record")
@dataclass(frozen=True)
class FitRecord:
    """Outcome of a fit.

    Parameters
    ----------
    status : Status
    elbo : Elbo
    gap : float
        Nats of ELBO that are still to be gained in this family, estimated on fresh draws or by quadrature, at least 0;
        NaN where unknown, as in short fits on minibatches.
    n_iterations : int
    n_gradients, n_hessians : int
        Draws at which the gradient, and the Hessian, of the density that was fitted were evaluated: log p, or its
        reparametrisation. Each expectation by quadrature counts as one of both.
    n_dropped : int
        Draws left out because log p or its gradient was not finite there.
    compile_seconds, run_seconds : float
        Wall-clock time for building and compiling graphs, and for the rest of the fit.
    family, update, estimator, step, backend : str
        What was used.
    family_reason : str
        Why this family, where the user named none.
    reparam : str or None
        Reparametrisation of group effects.
    gaussian : VariationalState or None
        The single Gaussian that a mixture began from, on the unconstrained scale.
    growing : tuple of str
        Unconstrained coordinates whose standard deviations kept growing, where the status is UNBOUNDED.
    improper : tuple of str
        Variables in which the posterior was found to be improper.
    constant : tuple of str
        Observed variables whose values are all equal, with these, where the fit did not converge.
    restarted : str
        Why the fit is one from a second start, in a sentence; empty where it is from the first.
    modes : tuple of OtherMode
        Modes of the posterior that were found beside this one, the largest first.
    stream : StreamReport or None
        What is known of data in batches; None where these are all in memory.
    searched : bool
        Whether other modes were looked for.
    n_searched : int
        Points at which the gradient of log p was evaluated for that, which are not among ``n_gradients``: those have
        the evaluations of all fits.
    seed : int
        Of the fit; that of its verdict follows from it.
    kind : str
        Of the posterior that came of it: "gaussian", or a value of the option ``posterior``.
    of_posterior : str
        Why it is the Gaussian, or what was tried before it, in sentences.
    reason : str
        Why it is the Gaussian, as a `Reason`; empty where it is not, and where a Gaussian was asked for.
    on_request : str
        The value of the option ``posterior`` that would have given another one all the same; empty where none would.
    judged : Verdict
        What was found of the posterior by now: ``verdict`` says it together with how the fit ended.
    elsewhere : tuple of str
        What importance sampling has found to stand against the Gaussian, in clauses.
    plan : Plan or None
        Which posteriors there were to choose from, at which prices; None where one was named.
    summed_out : tuple of str
        Discrete variables that were summed out of the model.
    is_prior : bool
        Whether the model has neither observed variables nor Potentials.
    status_before : Status or None
        How the iterations had ended, or were under way, when the call was interrupted.
    undone : tuple of str
        What of the call was not done, in noun phrases: it was interrupted, or an exception came in between.
    """

    status: Status
    elbo: Elbo
    gap: float
    n_iterations: int
    n_gradients: int
    n_hessians: int
    n_dropped: int
    compile_seconds: float
    run_seconds: float
    family: str
    update: str
    estimator: str
    step: str
    backend: str
    family_reason: str = ""
    reparam: str | None = None
    gaussian: VariationalState | None = field(default=None, compare=False, repr=False)  # arrays have no truth value
    growing: tuple[str, ...] = ()
    restarted: str = ""
    modes: tuple[OtherMode, ...] = field(default=(), compare=False, repr=False)
    stream: StreamReport | None = None
    seed: int = 0
    kind: str = GAUSSIAN
    of_posterior: str = ""
    judged: Verdict = field(default=NOT_TESTED, compare=False)
    elsewhere: tuple[str, ...] = ()
    improper: tuple[str, ...] = ()
    constant: tuple[str, ...] = ()
    searched: bool = False
    n_searched: int = 0
    reason: str = ""
    on_request: str = ""
    plan: Plan | None = field(default=None, compare=False, repr=False)
    summed_out: tuple[str, ...] = ()
    is_prior: bool = False
    status_before: Status | None = None
    undone: tuple[str, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """Whether the posterior can be relied on, as far as that was judged."""
        is_known = self.judged.is_tested or self.is_pool
        return self.judged if is_known else replace(self.judged, found=tuple(self.of_fit))

    @property
    def of_fit(self) -> list[Condition]:
        """What stands against the fit for how it ended."""
        sentence, found = self.sentence.rstrip("."), []
        said = f"the fit did not converge: {sentence[0].lower()}{sentence[1:]}"
        if not (self.converged or self.is_pool):
            found.append(Condition("convergence", math.inf, 0.0, said, cure=self.status.cure))
        return [*found, *(Condition("elsewhere", math.inf, 0.0, clause) for clause in self.elsewhere)]

    @property
    def posterior(self) -> str:
        """Which posterior came of it, in a sentence: an exact one, or the Gaussian, and why."""
        return f"{self.verdict.sentence if self.is_pool else ''} {self.of_posterior}".strip()

    @property
    def is_exact(self) -> bool:
        """Whether the posterior is exact up to Monte Carlo error."""
        return self.verdict.is_exact

    @property
    def is_nested(self) -> bool:
        """Whether it is a nested one: elbo, gap and evaluations are then those of the Gaussian fit before it."""
        return self.kind == "nested"

    @property
    def doubts(self) -> tuple[str, ...]:
        """What stands against relying on the posterior, in clauses."""
        return self.verdict.failures

    @property
    def sentence(self) -> str:
        """What happened: of the status, or of some coordinates; what was not done; what is odd about the data."""
        said = self.status.sentence
        if self.improper:
            said = f"The posterior is improper: its density does not fall off with {listed(self.improper, _NAME)}."
        elif self.growing:
            which, verb = ("deviation", "keeps") if len(self.growing) == 1 else ("deviations", "keep")
            said = (
                f"The standard {which} of {listed(self.growing, _NAME)} {verb} growing: the posterior may be improper."
            )
        if self.constant:
            said = (
                f"Observed values do not vary: {', '.join(self.constant)}. If their standard deviation is a parameter, "
                "log p rises without limit as it goes to 0: check the data."
            )
        return said + f" Not done: {', '.join(self.undone)}." * bool(self.undone)

    @property
    def remark(self) -> str:
        """What happened, and what to do about it; empty where the fit converged, or is followed, and all was done."""
        if (self.converged or self.is_pool) and self.status is not Status.INTERRUPTED and not self.undone:
            return ""
        return f"{self.sentence} {self.status.cure}"

    @property
    def of_discrete(self) -> str:
        """Which discrete variables were summed out, in a sentence; empty where there are none."""
        if not self.summed_out:
            return ""
        verb, them = ("was", "it") if len(self.summed_out) == 1 else ("were", "them")
        return f"{listed(self.summed_out, _NAME)} {verb} summed out of the model; approx.sample() draws {them}."

    @property
    def is_pool(self) -> bool:
        """Whether the posterior is a weighted pool of draws, which came after the fit."""
        return self.kind != GAUSSIAN

    @property
    def comes_first(self) -> bool:
        """Whether no Gaussian fit came before the posterior."""
        return self.plan is not None and any(c.outcome is Decision.ON_REQUEST for c in self.plan.candidates)

    @property
    def converged(self) -> bool:
        """Whether iterations stopped because they had converged."""
        return Status.CONVERGED in (self.status, self.status_before)

    def attrs(self) -> dict[str, str | float]:
        """Return the outcome as attributes of a file or tree; numbers that are not finite are left out."""
        numbers = {"elbo": self.elbo.value, "elbo_se": self.elbo.se, "gap": self.gap}
        finite = {name: float(value) for name, value in numbers.items() if math.isfinite(value)}
        said = {"posterior": self.posterior} if self.posterior else {}
        return {"status": str(self.status), "family": self.family, "verdict": self.verdict.word.value, **said, **finite}

    def refuse_diverged(self) -> None:
        """Raise DivergedError if the fit diverged."""
        if self.status is Status.DIVERGED:
            raise DivergedError(
                f"The fit diverged: there is no posterior to draw from. {self.status.sentence} {self.status.cure} "
                "mean_flat, sd_flat and q show where it ended."
            )

    def refuse_interrupted(self) -> None:
        """Raise KeyboardInterrupt if the call was interrupted: for who needs a whole one."""
        if self.status is Status.INTERRUPTED:
            raise KeyboardInterrupt

    def closing_line(self) -> str:
        """Return what came of the fit, in one line."""
        if self.remark and (self.status in _OF_USER or self.converged):
            return self.remark
        verdict = self.verdict
        name = {"mixture": "Mixture", "student_t": "Student t"}.get(self.family, "Gaussian")
        what = f"{self.kind.capitalize()} posterior" if self.is_pool else f"{name} approximation"
        if verdict.is_exact:
            what = "Exact posterior"
        if self.is_prior:
            what = "Prior of the model, which has no observed variables,"
        said = f"{what} in {self.compile_seconds + self.run_seconds:,.1f} s"
        if verdict.word is Word.NOT_RELIABLE:
            return f"{said}: {verdict.brief}."
        # Tests of draws, by which `approx.checks` goes, take as long as a small fit: they are made on demand.
        is_open = (verdict.word is Word.NOT_JUDGED or self.is_pool) and not (verdict.is_tested or self.is_prior)
        also = verdict.brief if verdict.word is Word.FEW_DRAWS or not (is_open or self.is_prior) else ""
        return f"{said}{': ' * bool(also)}{also}; approx.summary() {'checks and ' * is_open}shows it."


def is_prior(density: ModelDensity) -> bool:
    """Tell whether a model has neither observed variables nor Potentials."""
    is_given = isinstance(density, LogDensity)  # others have data
    return is_given and not (density.given.observed_RVs or density.given.potentials)


def record_of_pool(density: ModelDensity, state: PoolState, elbo: Elbo, seed: int, seconds: float) -> FitRecord:
    """Return the record of a posterior that no fit came before."""
    return FitRecord(
        status=Status.CONVERGED,
        elbo=elbo,
        gap=math.nan,
        n_iterations=state.checks.n_fits,
        n_gradients=density.n_gradients,
        n_hessians=density.n_hessians,
        n_dropped=0,
        compile_seconds=density.compile_seconds,
        run_seconds=max(seconds, 0.0),
        family=DENSE if isinstance(state.gaussian, FullState) else INDEPENDENT,
        update="natural",
        estimator="quadrature",
        step=state.kind,
        backend=density.backend,
        family_reason=f"it has the moments of the {state.kind} posterior",
        seed=seed,
        summed_out=density.summed_out.names,
        is_prior=is_prior(density),
    )


# --- what a fit has come to, and what the user is told of it ---


def report_outcome(q: VariationalState, record: FitRecord) -> None:
    """Say in a line what came of a fit, and the rest at DEBUG; warn where it did not converge."""
    stream, status = "" if record.stream is None else str(record.stream), record.status
    logger.info(record.closing_line())
    logger.debug(f"{record} {stream} {getattr(q, 'remark', '')}")
    if record.is_pool:
        return
    if record.stream is not None and record.stream.warning:
        warn(record.stream.warning)
    if not (status in _OF_USER or record.converged):
        unknown = status is Status.LEVELLED and math.isnan(record.gap)
        verdict = "Whether the fit has converged is not known" if unknown else "The fit did not converge"
        warn(f"{verdict} ({status}). {record.sentence} {stream}{' ' * bool(stream)}{status.cure}", ConvergenceWarning)


def elbo_of(q: VariationalState, assessment: Assessment) -> Elbo:
    """Return the ELBO on draws that had no part in reaching the state, or without draws where it is known so."""
    if assessment.elbo is not None:
        return assessment.elbo
    h: Array = assessment.logp - q.log_density(assessment.theta)
    keep, units = np.isfinite(h), assessment.units
    if not keep.any():
        return Elbo(-np.inf, np.inf)
    # Draws of an antithetic pair, or on one minibatch, are dependent: the error is that of the mean over such units.
    means = h[units[keep[units].all(axis=1)]].mean(axis=1)
    se = float(means.std(ddof=1) / np.sqrt(len(means))) if len(means) > 1 else np.inf
    return Elbo(float(h[keep].mean()), se)


# --- what ends a call before its time, and what it keeps ---

#: Data that can't be had any more: a fit may go on after these.
LOST = (ShardError, BrokenExecutorError, BatchError)
#: What is raised wherever it comes from: it says what the user has to do, or that there is no going on.
_RAISED = (Refused, StartError, MemoryError, *LOST)
#: Environment variable; where it is set, as in tests, an exception in one of several posteriors is raised.
RAISE = "PYMC_NGVI_RAISE"


class SoFar[A: Any]:
    """The context of a call: Ctrl-C ends it with what there is by then, or is raised where there is nothing yet.

    After lost data, the error is raised with what there is as its ``approx``.
    """

    #: What the call returns.
    result: A

    def __init__(self) -> None:
        self._now: Callable[[], tuple[A, tuple[str, ...]]] | None = None
        self._will_do = False

    def is_now(self, now: Callable[[], tuple[A, tuple[str, ...]]], *, will_do: bool = False) -> None:
        """Say how to get what there is from here on, and what is not done yet, in noun phrases.

        Whether it will do: an exception in what is to make it better is no reason to lose it.
        """
        self._now, self._will_do = now, will_do

    def __enter__(self) -> Self:
        """Begin the call."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """End the call."""
        if error is None or self._now is None:
            return False
        if isinstance(error, LOST):
            error.approx = self._now()[0]
            return False
        if isinstance(error, KeyboardInterrupt):
            approx, undone = self._now()
            record = cast(FitRecord, approx.record)
            if record.status is Status.NOT_STARTED:
                return False
            record = replace(record, status=Status.INTERRUPTED, status_before=record.status)
        elif self._will_do and isinstance(error, Exception) and not isinstance(error, MemoryError):
            said = _told("A later step", "It is kept.", error, logging.WARNING)
            approx, undone = self._now()
            record, undone = cast(FitRecord, approx.record), (f"{', '.join(undone)} ({said})",)
        else:
            return False
        approx.record = replace(record, undone=(*record.undone, *undone))
        self.result = approx
        return True


def _told(what: str, then: str, error: Exception, level: int) -> str:
    """Log an exception that does not end a call, and return its type and message; raise it in tests."""
    if os.environ.get(RAISE) and not isinstance(error, _RAISED):
        raise error
    said = f"{type(error).__name__}: {next(iter(str(error).splitlines()), 'no message')}"
    logger.log(level, f"{what} failed ({said}). {then} Please report this; the log has the traceback at level DEBUG.")
    logger.debug(f"{what} failed.", exc_info=error)
    return said


@contextlib.contextmanager
def spared(what: str, then: str, level: int = logging.WARNING) -> Iterator[None]:
    """Turn an exception in a part of a fit into `Failed`, and warn of it, so that the fit goes on without that part.

    It is raised where the environment variable `RAISE` is set, which tests do.
    """
    try:
        yield
    except _RAISED:
        raise
    except Exception as error:  # whatever it is
        raise Failed(Reason.EXCEPTION, _told(what, then, error, level)) from error


@contextlib.contextmanager
def or_the_first(before: Sequence[BaseException]) -> Iterator[None]:
    """Raise the first of some exceptions in the place of the last one, with the others as notes."""
    try:
        yield
    except Exception as last:
        if not before or isinstance(last, _RAISED):
            raise
        first, *others = [*before, last]
        for error in others:
            first.add_note(f"Then {type(error).__name__}: {error}")
        raise first from None
