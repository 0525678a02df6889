"""What the stochastic step rules share: fresh draws in every iteration, and when to stop.

A rule is a subclass that says where one set of moments leads. Each iteration takes new base draws and, where the model
reads minibatches, one new batch for all that it evaluates. The ELBO is averaged over windows of iterations; the fit
ends when its slope over the last three is below .01 nats per window, which is noisy: whether it has converged is then
measured on draws of its own. Where Hessians are used, an average of measured gaps below the tolerance ends it sooner.
"""

import abc

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Self, cast

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.draws import BASE_DRAWS, N_REPLICATES, sobol_draws
from pymc_ngvi.core.sizes import seed_of
from pymc_ngvi.core.status import Status
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import (
    Array,
    Assessment,
    BaseDraws,
    Density,
    Direction,
    Evaluation,
    GaussianState,
    MeanHessian,
    Moments,
    Outer,
    Parameters,
    StepRule,
    Target,
    Update,
    WhitenedHessian,
    Whitener,
)
from pymc_ngvi.methods.adaptive import Adaptive
from pymc_ngvi.methods.estimators import Estimator, evaluation_of, gauss_newton, price, stein
from pymc_ngvi.methods.schedule import (
    N_GRADIENTS,
    N_HESSIANS,
    ROUNDING,
    TOL,
    UNKNOWN_GAP,
    Failure,
    Measured,
    Tolerance,
    has_diverged,
    loses_draws,
    measured_at,
    measured_gap,
    search,
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
_WINDOW, _WINDOW_LEAST = 1_000, 50
#: Iterations over which measured gaps are averaged for a certificate.
_GAP_WINDOW = 10
#: Draws at which the ELBO of the result is estimated.
_N_ASSESSED = 256
#: Iterations in a row without a finite draw or a valid step, after which there is no hope.
_MAX_FAILED = 50
#: Times that a step is halved to keep the factor's diagonal positive.
MAX_HALVINGS = 40
#: Part of the momentum that is kept in a step.
_MOMENTUM = 0.9
#: Random streams from here on serve only to assess states, never to move them.
_ASSESSMENT = 1_000_000_000


@stored("stochastic.state")
@dataclass(frozen=True)
class StochasticState[M]:
    """What one iteration hands to the next."""

    #: The result if the fit ended here.
    q: GaussianState
    #: What moves: q itself, unless the rule averages.
    iterate: GaussianState
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


@stored("stochastic.advance")
class Advance[M](NamedTuple):
    """Where one step leads; parts of `StochasticState`."""

    q: GaussianState
    iterate: GaussianState
    step_size: float
    memory: M | None = None


class Stochastic[M](StepRule[GaussianState, StochasticState[M]]):
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
    def _advance(self, state: StochasticState[M], moments: Moments) -> Advance[M] | None:
        """Return where one step leads; None where no step is valid. ``state.t`` counts the iteration, from 1."""

    def _guarded(
        self, state: StochasticState[M], advance: Advance[M], moments: Moments, base: BaseDraws, evaluation: Evaluation
    ) -> Advance[M] | None:
        """Return a step, or another in its place, after a look at where it leads."""
        return advance

    # --- verbs of the loop ----------------------------------------------------------------------------------------

    def init(self, q: GaussianState) -> StochasticState[M]:
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
        if not self._measures_gap:  # nothing is to be spent on errors that serve no purpose
            base = replace(base, n_replicates=1)
        evaluation = self._estimator.evaluate(self._target, state.iterate, base)
        n_dropped = state.n_dropped + int((~evaluation.finite).sum())
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
            state,
            **advance._asdict(),
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

    def _is_within(self, q: GaussianState, measured: Measured) -> bool:
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

    def first_evaluation(self, q: GaussianState) -> Evaluation:
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
        against = Status.OUTSIDE_SUPPORT if loses_draws(evaluation) else measured.against
        if has_diverged(state.q, evaluation, units, state.first_elbo, on_batches=self._target.has_minibatch):
            against = Status.DIVERGED
        if passes is not None and against is None:  # all of the data tell the ELBO with less noise
            _, evaluation, units = passes
        certified = self._is_within(state.q, measured)
        return Assessment(evaluation.theta, evaluation.logp, units, measured.gap, measured.sd, against, certified)

    def _measure(self, q: GaussianState, rng: np.random.Generator) -> Measured:
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

    def _updated(
        self, iterate: GaussianState, moments: Moments, step_size: float
    ) -> tuple[GaussianState, float] | None:
        """Apply the update, with a halved step where it is not valid."""
        for _ in range(MAX_HALVINGS):
            q = self._update(iterate, moments, step_size, True)
            if q is not None:
                return q, step_size
            step_size *= 0.5
        return None

    def _default_window(self) -> int:
        """Return as many iterations as make 1,000 draws; on minibatches, whole passes through the data."""
        least = max(-(-_WINDOW // self._n_draws), _WINDOW_LEAST)
        if not self._target.has_minibatch:
            return least
        # Over a pass each row has its say once: the mean has none of the noise of single batches.
        n_batches = self._target.n_batches
        return min(n_batches * -(-least // n_batches), max(least, _WINDOW))

    def _default_draws(self, n_dim: int) -> int:
        if self._second_order:
            return N_REPLICATES
        if self.default_path_draws is not None:
            return self.default_path_draws
        # With fewer draws than dimensions, a curvature from gradients alone is mostly noise.
        least, most = self.path_draws_within
        return int(np.clip(least / 16 * 2 ** np.ceil(np.log2(max(n_dim, 1))), least, most))


# --- how many nats a state lacks on all of the data, where log p reads minibatches ---
# Each replicate of the draws is evaluated on a pass through the data of its own, in a random order. What noise a pass
# has, as where its last batch begins another one, then is in the scatter of replicates, like that of the draws.

#: Part of the gradients of a fit that a measurement may take.
_PART = 0.25


def on_passes(
    target: Target, q: GaussianState, rng: np.random.Generator
) -> tuple[Measured, Evaluation, NDArray[np.intp]] | None:
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
    evaluation = _by_replicate(q, base, lambda theta: _on_pass(target, theta, seed_of(rng)))
    # The Hessian that the target knows is that of one batch.
    return measured_at(target, q, base, evaluation, stein, full_metric=False), evaluation, replicates(base)


def on_batches(target: Target, q: GaussianState, base: BaseDraws, rng: np.random.Generator) -> Evaluation:
    """Evaluate each replicate of the draws on a minibatch of its own."""

    def evaluate(theta: Array) -> tuple[Array, Array]:
        target.next_batch(rng)
        return target.logp_grad(theta)

    return _by_replicate(q, base, evaluate)


def replicates(base: BaseDraws) -> NDArray[np.intp]:
    """Return the rows of each replicate, (n_replicates, n_draws / n_replicates)."""
    return np.arange(base.n_draws).reshape(base.n_replicates, -1)


def _by_replicate(q: GaussianState, base: BaseDraws, evaluate: Callable[[Array], tuple[Array, Array]]) -> Evaluation:
    theta = q.draws(base.z)
    parts = [evaluate(theta[rows]) for rows in base.replicates()]
    logp, grad = (np.concatenate(part) for part in zip(*parts, strict=True))
    return evaluation_of(q, theta, logp, grad)


def _on_pass(target: Target, theta: Array, seed: int) -> tuple[Array, Array]:
    n_batches = target.n_batches
    logp, grad = np.zeros(len(theta)), np.zeros_like(theta)
    for number in range(n_batches):
        target.take_batch(seed, number)
        values, slopes = target.logp_grad(theta)
        logp += values / n_batches
        grad += slopes / n_batches
    return logp, grad


# --- step rule `proximal`: proximal-gradient steps, the Kullback-Leibler divergence as the proximity term [1]_ ---
# Each step maximises the linearised ELBO less :math:`\mathrm{KL}(q\,\|\,q_k)/\beta_k`, where the prior's share is kept
# exact; in natural parameters that is the natural-gradient step of size :math:`\rho_k = \beta_k / (1 + \beta_k)`.
#
# References
# ----------
# .. [1] M. E. Khan, R. Babanezhad, W. Lin, M. Schmidt and M. Sugiyama (2016). Faster stochastic variational inference
#    using proximal-gradient methods with general divergence functions. UAI. https://doi.org/10.48550/arXiv.1511.00146

# --- step rule `constant`: the same step size in every iteration ---
#
# With the natural-parameter update, exact Hessians and one antithetic pair, a step of size 1 on the full data is exact
# for a Gaussian posterior.


class Constant(Stochastic[None]):
    """Apply the update with a constant step size, .1 by default; options as for `Stochastic`."""

    def _advance(self, state: StochasticState[None], moments: Moments) -> Advance[None] | None:
        found = self._updated(state.iterate, moments, self._rate(state.t - 1))
        return None if found is None else Advance(found[0], *found)


class Proximal(Constant):
    """Proximal steps; options as for `Stochastic`.

    ``step_size`` is beta, .25 by default; with ``step_decay`` kappa, beta_k = beta / (1 + k)^kappa.
    """

    takes: ClassVar[frozenset[str]] = Stochastic.takes | {"step_decay"}
    default_step_size: ClassVar[float] = 0.25

    def _rate(self, t: int) -> float:
        beta = super()._rate(t)
        return beta / (1.0 + beta)


# --- what the step rules share that add to the coordinates of mean and Cholesky factor, along a direction ---


class Coordinates[M](Stochastic[M]):
    """Small steps along the direction of the update; options as for `Stochastic`."""

    default_window: ClassVar[int | None] = _WINDOW
    default_path_draws: ClassVar[int | None] = N_REPLICATES

    def _advance(self, state: StochasticState[M], moments: Moments) -> Advance[M] | None:
        if not moments.is_finite():
            return None
        return self._follow(state, cast(Direction, self._direction)(state.iterate, moments), moments)

    @abc.abstractmethod
    def _follow(self, state: StochasticState[M], direction: Parameters, moments: Moments) -> Advance[M] | None:
        """Return where one step along (a memory of) a direction leads; None where no step is valid."""

    def _moved(
        self, iterate: GaussianState, location_step: Array, factor_step: Array, *, step_size: float, memory: M
    ) -> Advance[M] | None:
        """Move mean and factor; a diagonal entry of the factor may change its sign, but not be 0."""
        for _ in range(MAX_HALVINGS):
            q = iterate.plus(location_step, factor_step, signed=True)
            if q is not None:
                return Advance(q.unsigned(), q, step_size, memory)
            location_step, factor_step = 0.5 * location_step, 0.5 * factor_step
        return None


def zeros_like(q: GaussianState) -> Parameters:
    """Return zeros in the coordinates of a state: a memory before the first iteration."""
    return Parameters(np.zeros_like(q.location), np.zeros_like(q.factor))


# --- step rule `sgd`: stochastic gradient ascent in the coordinates of mean and Cholesky factor, for comparison ---


#: Standard deviations by which a coordinate moves at most at first, where no step size says it.
_FIRST_LENGTH = 0.1


class SGD(Coordinates[float]):
    """Plain gradient steps; options as for `Stochastic`.

    ``step_size`` is in the units of the coordinates; by default the first step is as long as a tenth of the
    smallest standard deviation, or less where the gradient is small.
    With ``step_decay`` kappa it is divided by (1 + t)^kappa.
    """

    takes: ClassVar[frozenset[str]] = Stochastic.takes | {"step_decay"}

    def _follow(self, state: StochasticState[float], direction: Parameters, moments: Moments) -> Advance[float] | None:
        iterate = state.iterate
        first = state.memory or self._step_size
        if not first:
            sd = iterate.sd()
            # Near an optimum with these standard deviations, the ELBO bends by 1/sd^2 along the mean and a factor of
            # the covariance, by sd^2 along a factor of the precision: a longer step would overshoot.
            stable = sd.min() ** 2 if iterate.factor_sign > 0 else min(sd.min() ** 2, 1.0 / sd.max() ** 2)
            longest = max(float(np.sqrt(np.vdot(part, part))) for part in direction)
            first = float(min(0.5 * stable, _FIRST_LENGTH * sd.min() / max(longest, np.finfo(float).tiny)))
        rate = self._decayed(first, state.t - 1)
        return self._moved(iterate, rate * direction.location, rate * direction.factor, step_size=rate, memory=first)


# --- step rule `adam`: Adam [1]_ in the coordinates of mean and Cholesky factor ---
#
# References
# ----------
# .. [1] D. P. Kingma and J. Ba (2015). Adam: a method for stochastic optimization. ICLR.
#    https://doi.org/10.48550/arXiv.1412.6980


_RATE, _RATE_PRECISION = 0.001, 0.01
_BETA_2, _EPSILON = 0.999, 1e-8


@stored("adam.memory")
class _Memory(NamedTuple):
    """Exponential averages of the direction and of its square, for the mean and for the factor."""

    first: Parameters
    second: Parameters


class Adam(Coordinates[_Memory]):
    """Adam along the direction of the update; options as for `Stochastic`.

    ``step_size`` is .001 by default, but .01 for a factor of the precision, with entries like 1 / standard deviation.
    """

    takes: ClassVar[frozenset[str]] = Stochastic.takes | {"step_decay"}

    def _follow(
        self, state: StochasticState[_Memory], direction: Parameters, moments: Moments
    ) -> Advance[_Memory] | None:
        first, second = state.memory or [zeros_like(state.iterate)] * 2
        memory = _Memory(
            Parameters(*(_averaged(m, d, _MOMENTUM) for m, d in zip(first, direction, strict=True))),
            Parameters(*(_averaged(m, d * d, _BETA_2) for m, d in zip(second, direction, strict=True))),
        )
        first_rate = self._step_size or (_RATE if state.iterate.factor_sign > 0 else _RATE_PRECISION)
        rate = self._decayed(first_rate, state.t - 1)
        root = np.sqrt(1.0 - _BETA_2**state.t)
        scale = rate * root / (1.0 - _MOMENTUM**state.t)
        steps = [scale * m / (np.sqrt(s) + root * _EPSILON) for m, s in zip(*memory, strict=True)]
        return self._moved(state.iterate, *steps, step_size=rate, memory=memory)


def _averaged(old: Array, new: Array, beta: float) -> Array:
    """Return beta old + (1 - beta) new, with one array made."""
    result: Array = old - new
    result *= beta
    result += new
    return result


# --- step rule `snngm`: stochastic normalised natural gradient ascent with momentum [1]_ ---
#
# The natural gradient in the coordinates of mean and Cholesky factor, divided by its norm, enters an exponential
# average (:math:`\beta = .9`, corrected for its start at 0), and the step has the fixed length :math:`\alpha = .001
# \sqrt{p}` for p parameters. The norm is Euclidean for factors of the covariance, and that of the Fisher metric for
# factors of the precision. The paper's theorem 3 does not hold for stochastic gradients: its proof needs that no noisy
# direction goes against the gradient.
#
# References
# ----------
# .. [1] L. S. L. Tan (2025). Analytic natural gradient updates for Cholesky factor in Gaussian variational
# approximation.
#    https://doi.org/10.48550/arXiv.2109.00375


#: Step length for each square root of a parameter.
_LENGTH = 0.001


class SNNGM(Coordinates[Parameters]):
    """Normalised natural gradients with momentum; options as for `Stochastic`.

    ``step_size`` is the length alpha of a step, by default .001 times the square root of the number of parameters.
    """

    default_path_draws: ClassVar[int | None] = 1

    def _follow(
        self, state: StochasticState[Parameters], direction: Parameters, moments: Moments
    ) -> Advance[Parameters] | None:
        iterate = state.iterate
        norm = float(np.sqrt(sum(np.vdot(part, part) for part in direction)))
        norm = _riemannian_norm(iterate, moments) if iterate.factor_sign < 0 else norm
        if not np.isfinite(norm):
            return None
        part = (1.0 - _MOMENTUM) / norm if norm > 0.0 else 0.0  # at the very optimum, path gradients are 0
        before = state.memory or zeros_like(iterate)
        momentum = Parameters(*(part * d + _MOMENTUM * m for m, d in zip(before, direction, strict=True)))
        length = self._step_size or _LENGTH * np.sqrt(iterate.n_params)
        scale = length / (1.0 - _MOMENTUM**state.t)
        return self._moved(
            iterate, scale * momentum.location, scale * momentum.factor, step_size=length, memory=momentum
        )


def _riemannian_norm(state: GaussianState, moments: Moments) -> float:
    """Return the length of the natural gradient in the Fisher metric: its square is twice the gap it predicts."""
    error = moments.error(state)
    whole = state.factor.ndim == 2  # a packed one leaves entries out
    if whole and isinstance(error, Outer) and len(error.left) == 1 and not error.diagonal:
        right = error.right[0] ** 2
        before = np.cumsum(right) - 0.5 * right
        squares = float((error.left[0] ** 2) @ before)
    else:
        flat = state.flat(state.curvature_error(moments.curvature))
        squares = 0.5 * float(np.vdot(flat, flat))
    return float(np.sqrt(np.vdot(moments.grad, moments.grad) + squares))


# --- step rule `decay`: step sizes 2/(2 + t), and the weighted average of the expectation parameters [1]_ ---
# The first step has size 1 and forgets the start. The average :math:`\bar\omega_{t+1} = (1 - \gamma_t) \bar\omega_t +
# \gamma_t \omega_{t+1}` of the expectation parameters :math:`\omega = (\mu, \Sigma + \mu \mu^T)` is the result; on
# conjugate models its KL divergence from the posterior falls as O(1/t) when data are sub-sampled. The paper's bound
# V/(t + 2) is too small by up to a factor of 4: what its proof gives is at most 4V/(t + 2).
#
# Where a posterior is not conjugate, a step of size near 1 from a poor start can lead anywhere. A large step is
# therefore looked at on the data and the draws that led to it: where the ELBO falls on these, the step is too long.
# Then the fit begins again from a better start, the solution for some of the data, or, where it has one already, the
# step is halved. As long as this does not happen, and on conjugate models it does not, steps are those of the paper.
#
# With ``gauss_newton`` the curvature far from the optimum is not that of log p, and a first step of size 1 does not
# forget the start. Steps are .1 until the ELBO has levelled off; only then they fall, and the average begins. A step
# that is too long is always halved.
#
# References
# ----------
# .. [1] K. Wu and J. R. Gardner (2024). Understanding stochastic natural gradient variational inference. ICML.
#    https://doi.org/10.48550/arXiv.2406.01870

#: Nats, to second order, by which a step may move q without a look at where it leads.
_SMALL = 1.0
#: Nats per dimension by which the ELBO on the draws of a step may fall: so few draws say no more of the scale.
_SLACK = 1.0
#: Valid steps after which the fit does not begin again.
_MAX_BEGUN = 30
#: Steps that the start is worth where steps are held until the ELBO has levelled off: their size is .1.
_HELD = 18


@stored("decay.steps")
@dataclass(frozen=True)
class Steps:
    """What the rule remembers."""

    #: Valid steps behind the average, or what the start is worth in such steps.
    n_steps: int = 0
    #: Where the fit began; None when it is needed no more.
    start: GaussianState | None = None


class Decay(Stochastic[Steps]):
    """Steps 2/(2 + t) with averaging; options as for `Stochastic`, without step sizes."""

    path_draws_within: ClassVar[tuple[int, int]] = (128, 1_024)  # a first step of size 1 takes their noise as it is
    takes: ClassVar[frozenset[str]] = Stochastic.takes - {"step_size"}

    def _rate(self, t: int) -> float:
        return 2.0 / (2.0 + t)

    def _advance(self, state: StochasticState[Steps], moments: Moments) -> Advance[Steps] | None:
        n_steps = self._memory(state).n_steps  # valid ones: the first of them forgets the start
        size = self._rate(n_steps)
        if self._is_held(state):  # steps that had to be halved grow again
            size = min(size, 2.0 * state.step_size)
        found = self._updated(state.iterate, moments, size)
        if found is None:
            return None
        return self._averaged(state, *found)

    def _averaged(
        self, state: StochasticState[Steps], iterate: GaussianState, step_size: float
    ) -> Advance[Steps] | None:
        memory = self._memory(state)
        if self._is_held(state) and not state.levels.has_levelled:
            return Advance(iterate, iterate, step_size, memory)
        weight = self._rate(memory.n_steps)
        try:
            average = iterate if weight == 1.0 else state.q.merged(iterate, weight)
        except np.linalg.LinAlgError:  # both singular to rounding, or all but
            return None
        start = memory.start if memory.n_steps < _MAX_BEGUN else None
        return Advance(average, iterate, step_size, Steps(memory.n_steps + 1, start))

    def terminate(self, state: StochasticState[Steps]) -> Status | None:
        """Return why to stop, or None to go on: once the ELBO has levelled off, steps that were held begin to fall."""
        status = super().terminate(state)
        return None if status is Status.LEVELLED and self._is_held(state) else status

    def _memory(self, state: StochasticState[Steps]) -> Steps:
        # Steps of size 1 with Hessians forget the start; those with Gauss-Newton may lead to another one as far away.
        return state.memory or Steps(_HELD if self._takes_gauss_newton else 0, state.q)

    def _is_held(self, state: StochasticState[Steps]) -> bool:
        """Tell whether steps do not count yet."""
        return self._takes_gauss_newton and self._memory(state).n_steps == _HELD

    def _guarded(
        self,
        state: StochasticState[Steps],
        advance: Advance[Steps],
        moments: Moments,
        base: BaseDraws,
        evaluation: Evaluation,
    ) -> Advance[Steps] | None:
        if advance.step_size**2 * moments.gap < _SMALL:
            return advance
        slack = 0.0 if self._takes_gauss_newton else _SLACK
        least = evaluation.elbo - slack * self._target.n_dim - ROUNDING * abs(evaluation.elbo)

        def accepts(new: Evaluation) -> bool:
            return bool(new.elbo >= least and new.finite.sum() >= evaluation.finite.sum())

        if accepts(self._estimator.evaluate(self._target, advance.iterate, base)):
            return advance
        start = self._memory(state).start
        if start is not None and not self._takes_gauss_newton:  # which is taken where Hessians take too long
            pilot = pilot_fit(self._target, self._update, start, self._seed)
            if pilot is not None:
                q, n_batches = pilot
                return Advance(q, q, advance.step_size, Steps(n_batches))
        found = search(
            lambda rho: self._update(state.iterate, moments, rho, True),
            lambda q: self._estimator.evaluate(self._target, q, base),
            accepts,
            elbo=evaluation.elbo,
            slope=2.0 * moments.gap,
            first=0.5 * advance.step_size,
        )
        return None if isinstance(found, Failure) else self._averaged(state, found.q, found.size)


# --- a better start for steps on minibatches: the solution for some of the data, held fixed ---
# On fixed data and fixed draws the problem is deterministic, and a step that overshoots is seen and shortened. The
# solution for n rows is within about sqrt(N / n) posterior standard deviations of that for all N of them.

#: Minibatches that make up the data of a pilot fit, at most, and iterations on them.
_N_BATCHES, _MAX_ITERATIONS = 8, 100
#: Nats that the pilot fit may leave to gain in 100 dimensions.
_TOL = 0.5


class Pooled:
    """The log density on several minibatches: the mean over them, each scaled to all of the data."""

    has_hessian = True

    def __init__(self, target: Target, seed: int, n_batches: int) -> None:
        self._target, self._seed, self._n_batches = target, seed, n_batches
        self.n_dim = target.n_dim

    def on_each[T](self, evaluate: Callable[[], T]) -> list[T]:
        """Return what a function returns with each of the minibatches."""
        parts = []
        for number in range(self._n_batches):
            self._target.take_batch(self._seed, number)
            parts.append(evaluate())
        return parts

    def logp_grad(self, theta: Array) -> tuple[Array, Array]:
        """Return log p, (n_draws,), and its gradient, (n_draws, n_dim)."""
        logp, grad = zip(*self.on_each(lambda: self._target.logp_grad(theta)), strict=True)
        return np.mean(logp, axis=0), np.mean(grad, axis=0)

    def mean_hessian(self, theta: Array) -> MeanHessian:
        """Return the mean of hess log p over draws and minibatches: a batch has a pattern, where their mean may not."""

        def whitened(state: Whitener) -> Array:
            return np.mean(self.on_each(lambda: self._target.mean_hessian(theta).whitened(state)), axis=0)

        return WhitenedHessian(whitened)


def pilot_fit(target: Target, update: Update, q: GaussianState, seed: int) -> tuple[GaussianState, int] | None:
    """Solve the problem on the first minibatches; return the state, and how many these are."""
    if not target.has_hessian:
        return None
    n_batches = min(target.n_batches, _N_BATCHES) if target.has_minibatch else 1
    pooled: Density = Pooled(target, seed, n_batches) if target.has_minibatch else target
    rule = Adaptive(pooled, update, price, seed=seed, tol=_TOL)
    if not rule.first_evaluation(q).finite.any():
        return None
    state = rule.init(q)
    for _ in range(_MAX_ITERATIONS):
        state = rule.step(state)
        if rule.terminate(state) is not None:
            break
    return state.q, n_batches


# --- step rule `ivon`: improved variational online Newton, for networks with thousands of weights [1]_ ---
# With mean :math:`\mu` and precision S of each coordinate, mean gradients :math:`g_t` and curvatures :math:`H_t` over a
# few draws, from gradients alone, and rates :math:`\alpha_t` of the mean and :math:`\rho_t` of the precision
# (:math:`1 - \beta_2` in the paper):
#
# .. math::
#     m_t = .9\, m_{t-1} + .1\, g_t, \quad
#     S_{t+1} = S_t + \rho_t (H_t - S_t) + \tfrac12 \rho_t^2 (H_t - S_t)^2 / S_t, \quad
#     \mu_{t+1} = \mu_t + \alpha_t S_{t+1}^{-1} m_t / (1 - .9^t).
#
# The second step is the update ``natural_pd``. In the paper both rates are set by hand, and that of the mean falls as a
# cosine to 0 over a number of iterations that is known. Here both fall with t, the result is an average of the iterates
# that forgets early ones, and steps are limited in every coordinate.
#
# References
# ----------
# .. [1] Y. Shen, N. Daheim, B. Cong, P. Nickl, G. M. Marconi, C. Bazan, R. Yokota, I. Gurevych, D. Cremers, M. E. Khan
#    and T. Moellenhoff (2024). Variational learning is effective for large deep networks. ICML.
#    https://doi.org/10.48550/arXiv.2402.17641

#: Iterations after which the rate of the mean begins to fall, and the exponent.
_LEVEL, _DECAY = 100, 0.7
#: The rate of the precision is the first number divided by t plus the second: a mean that forgets the start.
_WEIGHT, _FIRST = 3.0, 30
#: What becomes of the longest move of a coordinate where the ELBO still rises along the last step, at this part of its
#: slope before it, and where it does not.
_GROWTH, _STILL, _SHRINKAGE = 1.1, 0.5, 0.5
#: The weight of iterate t in the result is proportional to t to this power, less 1.
_LATE = 5.0


@stored("ivon.memory")
@dataclass(frozen=True)
class Memory:
    """What the rule remembers."""

    #: Exponential average of the gradients, which starts at 0; shape (n_dim,).
    momentum: Array
    #: Valid steps so far.
    n_steps: int
    #: The last one of the mean; shape (n_dim,).
    step: Array
    #: Of the ELBO along it, before it was taken.
    slope: float
    #: Standard deviations by which a coordinate may move.
    longest: float
    #: Whether that was less than some coordinate would have moved.
    is_limited: bool = False

    def next_longest(self, gradient: Array) -> float:
        """Return how far coordinates may move next, by the gradient after the last step."""
        if float(gradient @ self.step) < _STILL * self.slope:
            return max(_SHRINKAGE * self.longest, _FIRST_LENGTH)
        return _GROWTH * self.longest if self.is_limited else self.longest


class IVON(Stochastic[Memory]):
    """Momentum for the mean, slow averages of noisy curvatures; options as for `Stochastic`.

    ``step_size`` is the rate of the mean, 1 being a Newton step, .1 by default; with ``step_decay`` kappa, .7 by
    default, it is divided by (1 + t/100)^kappa.
    """

    takes: ClassVar[frozenset[str]] = Stochastic.takes | {"step_decay"}
    default_step_decay: ClassVar[float] = _DECAY
    default_path_draws: ClassVar[int | None] = N_REPLICATES

    def _advance(self, state: StochasticState[Memory], moments: Moments) -> Advance[Memory] | None:
        if not moments.is_finite():
            return None
        old = state.iterate
        before = state.memory or Memory(np.zeros(old.n_dim), 0, np.zeros(old.n_dim), 0.0, _FIRST_LENGTH)
        t = before.n_steps
        # Single draws have wild curvatures, whose squares would make precisions much too large.
        of_precision = _WEIGHT / (_FIRST + t)
        error = np.clip(old.curvature_error(moments.curvature), -1.0 / of_precision, 1.0 / of_precision)
        unknown, none = np.full(old.n_dim, np.inf), np.zeros(old.n_dim)
        limited = Moments(none, old.add_to_diagonal(error, 1.0), unknown, unknown, np.nan, np.inf, np.inf)
        found = self._updated(old, limited, of_precision)
        if found is None:
            return None
        narrowed = found[0]  # the mean is left where it is
        gradient, rate = old.dewhiten(moments.grad), self._rate(t)
        momentum = _MOMENTUM * before.momentum + (1.0 - _MOMENTUM) * gradient
        # In standard deviations, S^-1 m is the whitened momentum.
        wanted = rate / (1.0 - _MOMENTUM ** (t + 1)) * narrowed.whiten(momentum)
        longest = before.next_longest(gradient)
        step = narrowed.unwhiten(np.clip(wanted, -longest, longest))
        memory = Memory(momentum, t + 1, step, float(gradient @ step), longest, bool(np.abs(wanted).max() > longest))
        iterate = replace(narrowed, location=old.location + step)
        weight = _LATE / (_LATE + t)
        precision = (1.0 - weight) * state.q.sd() ** -2 + weight * iterate.sd() ** -2
        location = (1.0 - weight) * state.q.mean() + weight * iterate.mean()
        return Advance(iterate.with_scale(location, precision**-0.5), iterate, rate, memory)

    def _decayed(self, first: float, t: int) -> float:
        return float(first / (1.0 + t / _LEVEL) ** self._step_decay)
