"""What the stochastic step rules share: fresh draws in every iteration, and when to stop.

A rule is a subclass that says where one set of moments leads. Each iteration takes new base draws and, where the model
reads minibatches, one new batch for all that it evaluates. The ELBO is averaged over windows of iterations; the fit
ends when its slope over the last three is below 0.01 nats per window, which is noisy: whether it has converged is then
measured on draws of its own. Where Hessians are used, an average of measured gaps below the tolerance ends it sooner.
"""

import abc

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np

from pymc_ngvi.core.draws import BASE_DRAWS, N_REPLICATES, sobol_draws
from pymc_ngvi.core.sizes import seed_of
from pymc_ngvi.core.status import Status
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import (
    Array,
    Assessment,
    BaseDraws,
    Evaluation,
    GaussianState,
    Indices,
    MeanHessian,
    StepRule,
    Target,
    WhitenedHessian,
)
from pymc_ngvi.families.gaussian import AnyGaussian
from pymc_ngvi.methods.estimators import (
    Direction,
    Estimator,
    Moments,
    Update,
    evaluation_of,
    gauss_newton,
    price,
    score,
    stein,
)
from pymc_ngvi.methods.schedule import (
    MAX_LOST,
    N_GRADIENTS,
    N_HESSIANS,
    TOL,
    UNKNOWN_GAP,
    Measured,
    Tolerance,
    has_diverged,
    longest_step,
    measured_at,
    measured_gap,
)

# --- when a noisy ELBO has stopped rising: means over windows of iterations, and the slope through the last three ---
# References
# ----------
# .. [1] L. S. L. Tan (2025). Analytic natural gradient updates for Cholesky factor in Gaussian variational
#    approximation. https://doi.org/10.48550/arXiv.2109.00375

#: Nats per window below which the slope of the ELBO counts as none.
_LEAST_SLOPE = 0.01
#: Window means that the line goes through.
_N_MEANS = 3


@stored("stochastic.windows")
@dataclass(frozen=True)
class Windows:
    """Means of a noisy figure over windows of iterations; of the past, only the last three means are kept."""

    #: Iterations in a window.
    size: int
    #: Iterations in the current one.
    n: int = 0
    #: Of the figure over the current window: the mean, and the sum of squared deviations from it.
    mean: float = 0.0
    squares: float = 0.0
    #: Of the last complete windows, at most three.
    means: tuple[float, ...] = ()
    #: Standard error of the last of them, from the scatter within the window.
    se: float = np.inf

    def with_value(self, value: float) -> Self:
        """Return these windows with one more value; one that is not finite is left out."""
        if not np.isfinite(value):
            return self
        n = self.n + 1
        apart = value - self.mean
        mean = self.mean + apart / n
        squares = self.squares + apart * (value - mean)
        if n < self.size:
            return type(self)(self.size, n, mean, squares, self.means, self.se)
        se = float(np.sqrt(squares / (n - 1) / n)) if n > 1 else np.inf
        return type(self)(self.size, means=(*self.means, mean)[-_N_MEANS:], se=se)

    @property
    def just_completed(self) -> bool:
        """Whether the last value completed a window."""
        return self.n == 0 and bool(self.means)

    @property
    def slope(self) -> float:
        """Slope per window of the least-squares line through the last three means; inf before there are three."""
        # Through three equidistant points, the middle one has no say.
        return 0.5 * (self.means[-1] - self.means[0]) if len(self.means) == _N_MEANS else np.inf

    @property
    def has_levelled(self) -> bool:
        """Whether the figure has stopped rising, as the last complete windows tell."""
        return self.just_completed and bool(self.slope < _LEAST_SLOPE)


# --- what the stochastic step rules share: fresh draws in every iteration, and when to stop ---

#: Draws in one window of the stop rule, and, of whole passes through the data, iterations at most; iterations at least.
WINDOW, _WINDOW_LEAST = 1_000, 50
#: Iterations over which measured gaps are averaged for a certificate.
_GAP_WINDOW = 10
#: Draws at which the ELBO of the result is estimated.
_N_ASSESSED = 256
#: Iterations in a row without a finite draw or a valid step, after which there is no hope.
_MAX_FAILED = 50
#: Part of the momentum that is kept in a step.
MOMENTUM = 0.9
#: Standard deviations by which a coordinate moves at most at first, where no step size says it.
FIRST_LENGTH = 0.1
#: Random streams from here on serve only to assess states, never to move them.
_ASSESSMENT = 1_000_000_000


@stored("stochastic.state")
@dataclass(frozen=True)
class StochasticState[M]:
    """What one iteration hands to the next."""

    #: The result if the fit ended here.
    q: AnyGaussian
    #: What moves: q itself, unless the rule averages.
    iterate: AnyGaussian
    #: Iterations done.
    t: int
    #: log p - log q averaged over the draws of the last iteration, before its step.
    elbo: float
    #: Nats still to be gained then, less the noise floor; NaN where the estimator does not tell.
    gap: float
    n_draws: int
    #: The last one.
    step_size: float
    #: Of the ELBO, and of the gap.
    levels: Windows
    gaps: Windows
    #: What the rule remembers, like momentum; None before its first step.
    memory: M | None = None
    #: Draws left out so far because log p or its gradient was not finite.
    n_dropped: int = 0
    #: Iterations in a row without a step.
    n_failed: int = 0
    #: ELBO of the start on a few draws.
    first_elbo: float = -np.inf


class Stochastic[M](StepRule[AnyGaussian, StochasticState[M]]):
    """Steps on fresh draws; the subclass says how far and along what.

    Parameters
    ----------
    target : Target
    update, estimator : callable
        Rows of the registries.
    direction : callable, optional
        Of the update, for rules that move the coordinates of mean and factor.
    seed : int
        Of the base draws and the minibatches.
    tol : float, default 0.05
        Nats of ELBO that a converged fit may lack; see `Tolerance`.
    n_draws : int, optional
        In each iteration.
    base_draws : {"sobol", "antithetic", "plain"}, optional
    stl : bool, default True
        Sticking the landing.
    step_size : float, optional
    step_decay : float, optional
        Exponent kappa: the step size is divided by (1 + t)^kappa.
    window : int, optional
        Iterations in one window of the stop rule; default: 1,000 for rules of small steps, as many as make 1,000 draws
        for those of large ones.
    """

    #: Options that the rule takes, for the messages that refuse others.
    takes: ClassVar[frozenset[str]] = frozenset({"n_draws", "base_draws", "step_size", "window"})
    #: Step size if none is given.
    default_step_size: ClassVar[float] = 0.1
    #: Its exponent kappa, likewise.
    default_step_decay: ClassVar[float] = 0.0
    #: Iterations in a window if none are given; None: as many as make 1,000 draws.
    default_window: ClassVar[int | None] = None
    #: Draws if none are given, with gradients alone; None: as many as the dimension, within limits.
    default_path_draws: ClassVar[int | None] = None
    #: The limits; a rule whose first step is large needs more.
    path_draws_within: ClassVar[tuple[int, int]] = (64, 512)

    def __init__(
        self,
        target: Target,
        update: Update,
        estimator: Estimator,
        *,
        seed: int,
        direction: Direction | None = None,
        tol: float = TOL,
        n_draws: int | None = None,
        base_draws: str | None = None,
        stl: bool = True,
        step_size: float | None = None,
        step_decay: float | None = None,
        window: int | None = None,
    ) -> None:
        self._target = target
        self._update = update
        self._direction = direction
        self._estimator = estimator
        self._seed = seed
        self._tolerance = Tolerance(tol)
        self._stl = stl
        # Of the estimators, only exact Hessians say in each iteration how much is left to gain; on minibatches, the
        # noise of the batch would count as a gap.
        self._measures_gap = estimator is price and not target.has_minibatch
        self._second_order = estimator.uses_hessians
        self._takes_gauss_newton = estimator is gauss_newton
        pairs = base_draws in ("sobol", "antithetic")
        self._n_draws = n_draws or max(self._default_draws(target.n_dim), 2 if pairs else 1)
        self._draw = BASE_DRAWS[base_draws or ("plain" if self._n_draws % 2 else "antithetic")]
        self._step_size = step_size
        self._step_decay = self.default_step_decay if step_decay is None else step_decay
        self._window = window or self.default_window or self._default_window()

    # --- what a subclass says -------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _advance(self, state: StochasticState[M], moments: Moments) -> StochasticState[M] | None:
        """Return where one step leads; None where no step is valid. ``state.t`` counts the iteration, from 1."""

    def _guarded(
        self,
        state: StochasticState[M],
        advance: StochasticState[M],
        moments: Moments,
        base: BaseDraws,
        evaluation: Evaluation,
    ) -> StochasticState[M] | None:
        """Return a step, or another in its place, after a look at where it leads."""
        return advance

    # --- verbs of the loop ----------------------------------------------------------------------------------------

    def init(self, q: AnyGaussian) -> StochasticState[M]:
        """Return the state before the first iteration."""
        first = self.first_evaluation(q).elbo
        return StochasticState(
            q=q,
            iterate=q,
            t=0,
            elbo=first,
            first_elbo=first,
            gap=np.nan,
            n_draws=self._n_draws,
            step_size=self._rate(0),
            levels=Windows(self._window),
            gaps=Windows(_GAP_WINDOW),
        )

    @np.errstate(all="ignore")  # what overflows is seen in what comes out, and not stepped to
    def step(self, state: StochasticState[M]) -> StochasticState[M]:
        """Take one step."""
        rng = np.random.default_rng([self._seed, state.t])
        if self._target.has_minibatch:
            self._target.take_batch(self._seed, state.t)
        base = self._draw(self._n_draws, self._target.n_dim, rng)
        # Nothing is to be spent on errors that serve no purpose; but values alone are seen beside other replicates'.
        if not self._measures_gap and self._estimator is not score:
            base = replace(base, n_replicates=1)
        evaluation = self._estimator.evaluate(self._target, state.iterate, base)
        n_dropped = state.n_dropped + evaluation.n_dropped
        state = replace(state, t=state.t + 1, n_dropped=n_dropped, n_failed=state.n_failed + 1)
        if not evaluation.finite.any():
            return state
        moments = self._estimator.moments(self._target, state.iterate, base, evaluation, stl=self._stl)
        advance = self._advance(state, moments)
        if advance is not None:
            advance = self._guarded(state, advance, moments, base, evaluation)
        if advance is None:
            return state
        z = base.z if evaluation.finite.all() else base.z[evaluation.finite]
        # No BLAS: on more than 10,000 numbers it wakes its threads, for longer than the rest of an iteration takes.
        elbo = float(evaluation.elbo + 0.5 * (np.square(z).sum() / len(z) - z.shape[1]))
        gap = moments.gap - moments.floor if np.isfinite(moments.floor) else np.nan
        return replace(
            advance,
            elbo=elbo,
            gap=max(gap, 0.0) if np.isfinite(gap) else gap,
            levels=state.levels.with_value(elbo),
            gaps=state.gaps.with_value(gap),
            n_failed=0,
        )

    def terminate(self, state: StochasticState[M]) -> Status | None:
        """Return why to stop, or None to go on."""
        if state.n_failed >= _MAX_FAILED:
            return Status.STALLED
        if self._seems_converged(state):
            # The result may be an average that lags behind: its gap is measured on draws of its own.
            measured = self._measure(state.q, np.random.default_rng([self._seed, state.t, 1]))
            if measured.against is None and self._is_within(state.q, measured):
                return Status.CONVERGED
        return Status.LEVELLED if state.levels.has_levelled else None

    def _seems_converged(self, state: StochasticState[M]) -> bool:
        """Tell whether the gaps measured on the way, each on draws of its own, are below the tolerance."""
        if np.isnan(state.gap):  # one pair of draws knows nothing of its noise: look now and then, at powers of 2
            return self._measures_gap and state.t > 0 and state.t & (state.t - 1) == 0
        return state.gaps.just_completed and state.gaps.means[-1] + 2.0 * state.gaps.se < self._tolerance.most(state.q)

    def _is_within(self, q: AnyGaussian, measured: Measured) -> bool:
        return measured.gap + 2.0 * measured.sd < self._tolerance.at(q, measured.spread)

    def conclude(self, status: Status, assessment: Assessment) -> Status:
        """Return the status in the light of what was measured at the end."""
        if assessment.against is Status.DIVERGED:
            return Status.DIVERGED
        if status not in (Status.CONVERGED, Status.LEVELLED, Status.MAX_ITERATIONS):
            return status
        if assessment.against is not None:
            return assessment.against
        return Status.CONVERGED if assessment.certified else status

    def reopen(self, state: StochasticState[M]) -> StochasticState[M]:
        """Return a state in which a fit that ended may go on for three windows at least."""
        return replace(state, n_failed=0, levels=Windows(self._window), gaps=Windows(_GAP_WINDOW))

    # --- evaluations ----------------------------------------------------------------------------------------------

    def first_evaluation(self, q: AnyGaussian) -> Evaluation:
        """Evaluate a starting state on the draws that serve to compare such states."""
        rng = np.random.default_rng([self._seed, _ASSESSMENT - 1])
        return self._estimator.evaluate(self._target, q, sobol_draws(N_REPLICATES, self._target.n_dim, rng))

    @np.errstate(all="ignore")
    def assess(self, state: StochasticState[M]) -> Assessment:
        """Evaluate a state on draws, and minibatches, that had no part in reaching it."""
        rng = np.random.default_rng([self._seed, _ASSESSMENT + state.t])
        passes = on_passes(self._target, state.q, rng) if self._target.has_minibatch else None
        measured = self._measure(state.q, rng) if passes is None else passes[0]
        base = sobol_draws(_N_ASSESSED, self._target.n_dim, rng)
        if self._target.has_minibatch:
            units, evaluation = replicates(base), on_batches(self._target, state.q, base, rng)
        else:
            units, evaluation = base.pairs(), self._estimator.evaluate(self._target, state.q, base)
        against = Status.OUTSIDE_SUPPORT if evaluation.lost > MAX_LOST else measured.against
        if has_diverged(state.q, evaluation, units, state.first_elbo, on_batches=self._target.has_minibatch):
            against = Status.DIVERGED
        if passes is not None and against is None:  # all of the data tell the ELBO with less noise
            _, evaluation, units = passes
        certified = self._is_within(state.q, measured)
        return Assessment(evaluation.theta, evaluation.logp, units, measured.gap, measured.sd, against, certified)

    def _measure(self, q: AnyGaussian, rng: np.random.Generator) -> Measured:
        if self._target.has_minibatch:
            return UNKNOWN_GAP
        # Gauss-Newton is taken where Hessians take too long, or where kinks have none.
        second_order = self._second_order and not self._takes_gauss_newton
        return measured_gap(self._target, q, rng, second_order=second_order)

    # --- for subclasses -------------------------------------------------------------------------------------------

    def _rate(self, t: int) -> float:
        """Return the step size of iteration ``t``, counted from 0."""
        return self._decayed(self._step_size or self.default_step_size, t)

    def _decayed(self, first: float, t: int) -> float:
        return float(first / (1.0 + t) ** self._step_decay)

    def _updated(self, state: StochasticState[M], moments: Moments, step_size: float) -> StochasticState[M] | None:
        """Apply the update, with a halved step where it is not valid."""
        found = longest_step(lambda part: self._update(state.iterate, moments, part * step_size, True))
        return None if found is None else replace(state, q=found[0], iterate=found[0], step_size=found[1] * step_size)

    def _default_window(self) -> int:
        """Return as many iterations as make 1,000 draws; on minibatches, whole passes through the data."""
        least = max(-(-WINDOW // self._n_draws), _WINDOW_LEAST)
        if not self._target.has_minibatch:
            return least
        # Over a pass each row has its say once: the mean has none of the noise of single batches.
        n_batches = self._target.n_batches
        return min(n_batches * -(-least // n_batches), max(least, WINDOW))

    def _default_draws(self, n_dim: int) -> int:
        if self._second_order:
            return N_REPLICATES
        if self.default_path_draws is not None:
            return self.default_path_draws
        # With fewer draws than dimensions, a curvature from gradients alone is mostly noise.
        least, most = self.path_draws_within
        return int(np.clip(least / 16 * 2 ** np.ceil(np.log2(max(n_dim, 1))), least, most))


class Pooled:
    """The log density on several minibatches: the mean over them, each scaled to all of the data."""

    has_hessian = True

    def __init__(self, target: Target, seed: int, n_batches: int) -> None:
        self._target, self._seed, self._n_batches = target, seed, n_batches
        self.n_dim = target.n_dim

    def _on_each[T](self, evaluate: Callable[[], T]) -> Iterator[T]:
        for number in range(self._n_batches):
            self._target.take_batch(self._seed, number)
            yield evaluate()

    def logp_grad(self, theta: Array) -> tuple[Array, Array]:
        """Return log p, (n_draws,), and its gradient, (n_draws, n_dim)."""
        logp, grad = np.zeros(len(theta)), np.zeros_like(theta)
        for values, slopes in self._on_each(lambda: self._target.logp_grad(theta)):
            logp += values / self._n_batches
            grad += slopes / self._n_batches
        return logp, grad

    def mean_hessian(self, theta: Array) -> MeanHessian:
        """Return the mean of hess log p over draws and minibatches: a batch has a pattern, where their mean may not."""

        def whitened(state: GaussianState) -> Array:
            return np.mean(list(self._on_each(lambda: self._target.mean_hessian(theta).whitened(state))), axis=0)

        return WhitenedHessian(whitened)


# --- how many nats a state lacks on all of the data, where log p reads minibatches ---
# Each replicate of the draws is evaluated on a pass through the data of its own, in a random order. What noise a pass
# has, as where its last batch begins another one, then is in the scatter of replicates, like that of the draws.

#: Part of the gradients of a fit that a measurement may take.
_PART = 0.25


def on_passes(target: Target, q: AnyGaussian, rng: np.random.Generator) -> tuple[Measured, Evaluation, Indices] | None:
    """Evaluate a state on all of the data, where that is affordable.

    Returns
    -------
    tuple or None
        What is left to gain, as gradients tell; log p and gradients; and the draws on each pass, (n_replicates, n_draws
        / n_replicates).
    """
    affordable = _PART * target.n_gradients / target.n_batches
    if affordable < N_HESSIANS:  # as few as tell anything
        return None
    base = sobol_draws(min(2 ** int(np.log2(affordable)), N_GRADIENTS), target.n_dim, rng)
    evaluation = _by_replicate(q, base, lambda theta: Pooled(target, seed_of(rng), target.n_batches).logp_grad(theta))
    # The Hessian that the target knows is that of one batch.
    return measured_at(target, q, base, evaluation, stein, full_metric=False), evaluation, replicates(base)


def on_batches(target: Target, q: AnyGaussian, base: BaseDraws, rng: np.random.Generator) -> Evaluation:
    """Evaluate each replicate of the draws on a minibatch of its own."""

    def evaluate(theta: Array) -> tuple[Array, Array]:
        target.next_batch(rng)
        return target.logp_grad(theta)

    return _by_replicate(q, base, evaluate)


def replicates(base: BaseDraws) -> Indices:
    """Return the rows of each replicate, (n_replicates, n_draws / n_replicates)."""
    return np.arange(base.n_draws).reshape(base.n_replicates, -1)


def _by_replicate(q: AnyGaussian, base: BaseDraws, evaluate: Callable[[Array], tuple[Array, Array]]) -> Evaluation:
    theta = q.draws(base.z)
    parts = [evaluate(theta[rows]) for rows in base.replicates()]
    logp, grad = (np.concatenate(part) for part in zip(*parts, strict=True))
    return evaluation_of(q, theta, logp, grad)
