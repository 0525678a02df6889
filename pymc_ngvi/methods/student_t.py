r"""The step rule of the Student-t: no learning rate, a shape that is fitted, a stop rule in nats.

A fit begins as that of a Gaussian, by the rule `adaptive`, and stays one until the gradients on fresh draws show that
heavier tails would raise the ELBO. Then it goes on likewise with the t: many steps on one set of draws, where the
problem is deterministic, and near the optimum one step of size S / (N + S) on each fresh set. Steps are natural
gradients in the Fisher information of the t itself. Where one lowers the ELBO on the draws at hand, the natural
gradient of draw and mixing variable together, which is more cautious, takes its place, shortened until it does not.
"""

import functools

from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, ClassVar, Self

import numpy as np

from scipy.special import betainc, betaincc, betaln, erf, polygamma

from pymc_ngvi.core.status import Status
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import (
    Array,
    Assessment,
    BaseDraws,
    Density,
    Evaluation,
    GaussianState,
    MeanHessian,
    Outer,
    StepRule,
    WhitenedHessian,
)
from pymc_ngvi.families.gaussian import AnyGaussian
from pymc_ngvi.families.mixture import LEAST_SHAPE, MOST_SHAPE, StudentTState, mixing_variable
from pymc_ngvi.methods.adaptive import MAX_RECOVERIES, Adaptive, AdaptiveState, Growth, is_at_rest, is_near
from pymc_ngvi.methods.estimators import Estimator, Moments, Nats, Update, gap_of, stein
from pymc_ngvi.methods.schedule import (
    FEW_DRAWS,
    MAX_LOST,
    NEAR_NATS,
    ROUNDING,
    Schedule,
    ScheduleState,
    Step,
    is_kinked,
    search,
)

# --- the Fisher information of a Student-t in closed form, and how draws move with the shape ---
# The metric of natural gradients of scale mixtures [1]_ is the Fisher information of theta *and* the mixing variable w.
# That of theta alone, which is the curvature of the ELBO where the posterior is a t, is smaller: by a factor of 43 for
# the shape at ten degrees of freedom in one dimension, with Sigma to follow it. There, steps of size 1 creep. It has a
# closed form, too [2]_, and differs from the other in one factor and a 2 x 2 matrix.
#
# References
# ----------
# .. [1] W. Lin, M. E. Khan and M. Schmidt (2019). Fast and simple natural-gradient variational inference with mixture
#    of exponential-family approximations. ICML. https://doi.org/10.48550/arXiv.1906.02914
# .. [2] K. L. Lange, R. J. A. Little and J. M. G. Taylor (1989). Robust statistical modeling using the t
#    distribution. JASA 84. https://doi.org/10.1080/01621459.1989.10478852

#: Relative step of the differences that give the derivative of a quantile.
_STEP = 1e-4


def shape_information(shape: float) -> float:
    """Return the Fisher information of theta and w about 1/a: a^4 (trigamma(a) - 1/a)."""
    return float(shape**4 * (polygamma(1, shape) - 1.0 / shape))


def tail_velocity(squared_distance: Array, shape: float, n_dim: int) -> Array:
    """Return d log D / d(1/a) at fixed quantiles of D = (theta - mu)^T Sigma^-1 (theta - mu), (n_draws,).

    Draws of q that keep their direction and move at this rate are draws of q with the new shape: the derivative of a
    draw with respect to 1/a, averaged over w given theta.
    """
    half = 0.5 * n_dim
    part = 0.5 * squared_distance / (shape + 0.5 * squared_distance)  # Beta(n_dim / 2, a)
    differences = []
    for function in (betainc, betaincc):
        heavier, lighter = (
            function(half, a, 0.5 * squared_distance / (a + 0.5 * squared_distance))
            for a in (shape / (1.0 + _STEP), shape / (1.0 - _STEP))
        )
        differences.append(heavier - lighter)
    # Of the two tails, the smaller one has the digits.
    change = np.where(betainc(half, shape, part) < 0.5, -differences[0], differences[1]) * shape / (2.0 * _STEP)
    with np.errstate(divide="ignore"):
        density = np.exp(half * np.log(part) + shape * np.log1p(-part) - betaln(half, shape))
    return np.divide(change, density, out=np.zeros_like(density), where=density > 0.0)


@stored("scale_mixture.metric")
@dataclass(frozen=True)
class Metric:
    """The Fisher information M = L L^T of theta alone, where that of theta and w is the identity.

    Vectors, (n, n_params), have those coordinates of mean, Sigma and 1/a in which the natural gradient is the vector of
    `ScaleMoments`.
    """

    #: Direction of the identity among curvatures; shape (n_error,).
    unit: Array
    #: Square root of M along the mean and along all changes of Sigma but of its size.
    root: float
    #: L of the size of Sigma and of 1/a; shape (2, 2).
    block: Array

    @classmethod
    def of(cls, q: StudentTState, unit: Array) -> Self:
        """Return the metric at a state."""
        a, half = q.shape, 0.5 * q.n_dim
        total = a + half + 1.0
        shape = polygamma(1, a) - polygamma(1, a + half) + half / (a * total) - 2.0 * half / (a * (a + half))
        scale = a**2 / np.sqrt(shape_information(a))
        cross = scale * np.sqrt(half) / ((a + half) * total)
        size = np.sqrt(a / total)
        tail = np.sqrt(scale**2 * shape - (cross / size) ** 2)
        return cls(unit, float(np.sqrt((a + half) / total)), np.array([[size, 0.0], [cross / size, tail]]))

    def solve(self, gradients: Array) -> Array:
        """Return M^-1 times each row: of a natural gradient, that in the Fisher information of theta alone."""
        rows = np.stack([self.size(gradients), gradients[:, -1]])
        size, tail = np.linalg.solve(self.block.T, np.linalg.solve(self.block, rows))
        result = self.with_size(gradients / self.root**2, size)
        result[:, -1] = tail
        return result

    def holding_shape(self) -> Self:
        """Return the metric where 1/a stays as it is."""
        return replace(self, block=np.diag([self.block[0, 0], 1.0]))

    def size(self, vectors: Array) -> Array:
        """Return the coordinate of the size of Sigma, (n,)."""
        return vectors[:, -1 - len(self.unit) : -1] @ self.unit

    def with_size(self, vectors: Array, size: Array) -> Array:
        """Return vectors with other coordinates of the size."""
        result = vectors.copy()
        result[:, -1 - len(self.unit) : -1] += np.outer(size - self.size(vectors), self.unit)
        return result


# --- natural gradients of a Student-t: a Gaussian problem with another target, and one more coordinate, the shape ---
# With q the t density, :math:`h = \log p - \log q` and w the mixing variable, the natural gradient of mean and
# precision of the Gaussian inside, N(mu, Sigma), is :math:`E_q[\nabla h]` and :math:`-E_q[w \nabla^2 h]` [1]_: that of
# a Gaussian whose target is :math:`\log p + \log(N / q)`, under other draws. So every update and every estimator for
# Gaussians serves. The expectation with w is a mean over draws of another mixture: w times the density of
# InvGamma(a, a) is a/(a - 1) times that of InvGamma(a - 1, a).
#
# References
# ----------
# .. [1] W. Lin, M. E. Khan and M. Schmidt (2019). Fast and simple natural-gradient variational inference with mixture
#    of exponential-family approximations. ICML. https://doi.org/10.48550/arXiv.1906.02914

#: Range of 1/a, the coordinate in which the ELBO is near-quadratic for Gaussian targets, too.
LEAST_TAIL, MOST_TAIL = 1.0 / MOST_SHAPE, 1.0 / LEAST_SHAPE
#: Error of 1/a that a converged fit may have: relative, and in any case.
TAIL_RTOL, TAIL_ATOL = 0.02, 0.0075


# --- draws and evaluations --------------------------------------------------------------------------------------------


def within(q: StudentTState, base: BaseDraws, evaluation: Evaluation, *, stl: bool) -> tuple[BaseDraws, Evaluation]:
    """Return base draws and evaluation as the Gaussian inside has them, of the target log p + log(N / q).

    Base draws are sqrt(w) z, gradients those of that target (without sticking the landing: of log p), and the points,
    where only Hessians are still to be evaluated, draws of the mixture over InvGamma(a - 1, a).
    """
    a, z, uniforms = q.shape, base.z[:, :-1], base.z[:, -1]
    whitened = np.sqrt(mixing_variable(a, a, uniforms))[:, None] * z
    grad = evaluation.grad
    if stl:
        excess = (a + 0.5 * q.n_dim) / (a + 0.5 * np.sum(whitened**2, axis=1)) - 1.0
        grad = grad + excess[:, None] * q.gaussian.precision_product(evaluation.theta - q.gaussian.location)
    tilted = q.scaled(z, mixing_variable(a - 1.0, a, uniforms))
    return replace(base, z=whitened), replace(evaluation, theta=tilted, grad=grad)


class GaussianPart:
    """The Hessians that the Gaussian inside a t sees, those of log p + log(N / q): the part of a target they need."""

    def __init__(self, density: Density, q: StudentTState) -> None:
        self._density, self._q = density, q

    def mean_hessian(self, theta: Array) -> MeanHessian:
        """Return E[w hess h] - Sigma^-1, h = log p - log q.

        ``theta`` are draws of the mixture over InvGamma(a - 1, a), which stand for draws of q with weights w.
        """
        return WhitenedHessian(functools.partial(self._whitened, self._density.mean_hessian(theta), theta))

    def _whitened(self, of_density: MeanHessian, theta: Array, state: GaussianState) -> Array:
        """Return the whitened curvature: hess log q is R^T R / n_draws - c Sigma^-1 on average over draws."""
        a, gaussian = self._q.shape, self._q.gaussian
        rate = a + 0.5 * self._q.squared_distance(theta)
        weights = (a + 0.5 * self._q.n_dim) / rate  # E[1/w | theta]
        rows = gaussian.precision_product(theta - gaussian.location) * np.sqrt(weights / rate)[:, None]
        whitened, inflation = state.whiten(rows), a / (a - 1.0)
        relative = of_density.whitened(state) + state.outer_mean(Outer(whitened, whitened, 0.0))
        return state.add_to_diagonal(inflation * relative, 1.0 - inflation * float(np.mean(weights)))


# --- moments ----------------------------------------------------------------------------------------------------------


@stored("scale_mixture.moments")
@dataclass(frozen=True)
class ScaleMoments(Nats):
    """Natural gradient of a t, with its Monte Carlo error."""

    #: Whitened gradient and curvature A = I - C^T E[w hess h] C of the Gaussian inside; gap and its floor are those
    #: of mean, Sigma and shape together.
    gaussian: Moments
    #: The same with the size of A as the estimator has it.
    of_estimator: Moments
    #: Natural gradient, in coordinates in which the Fisher information of theta and w is the identity: of the mean,
    #: (I - A) / sqrt 2, and of 1/a, which is 0 where it leads out of its range; shape (n_params,).
    vector: Array
    metric: Metric
    #: Change of 1/a in a step of size 1, and its standard error.
    tail_step: float
    tail_se: float

    def direction(self, trust: float = 1.0) -> Array:
        """Return the natural gradient in the Fisher information of theta alone, (n_params,).

        With a part of the step of the shape, ``trust`` from 0 to 1, and the size of Sigma that goes with it.
        """
        full: Array = self.metric.solve(self.vector[None])[0]
        if trust == 1.0:
            return full
        same_shape: Array = self.metric.holding_shape().solve(np.append(self.vector[:-1], 0.0)[None])[0]
        return trust * full + (1.0 - trust) * same_shape


def measured(
    target: Density,
    q: StudentTState,
    base: BaseDraws,
    evaluation: Evaluation,
    estimator: Estimator,
    *,
    stl: bool = True,
) -> ScaleMoments:
    """Estimate the natural gradient of a t from an evaluation at its draws.

    The shape takes gradients; so does the size of Sigma, whatever the estimator: their errors nearly cancel where
    both change. Of the rest of the curvature from Hessians and that from gradients, the one with less noise counts:
    under the heaviest tails, Hessians are dominated by few draws, some of them perhaps outside the support.
    """
    inner, within_q = within(q, base, evaluation, stl=stl)
    part: Any = GaussianPart(target, q)
    with np.errstate(over="ignore", invalid="ignore"):  # far out in the tails: noise without bounds
        m = estimator.moments(part, q.gaussian, inner, within_q, stl=stl)
        other = stein.moments(part, q.gaussian, inner, within_q, stl=stl) if estimator.uses_hessians else m
        m = m if m.is_finite() and m.floor <= other.floor else other
    sizes, shapes = _by_replicate(q, inner, within_q, stl=stl)
    tail, least, most = 1.0 / q.shape, LEAST_TAIL * (1.0 + ROUNDING), MOST_TAIL * (1.0 - ROUNDING)
    at_bound = bool((tail <= least and shapes.mean() < 0.0) or (tail >= most and shapes.mean() > 0.0))
    shapes = np.zeros_like(shapes) if at_bound else shapes
    unit = q.gaussian.add_to_diagonal(np.zeros_like(m.curvature), 1.0).ravel() / np.sqrt(q.n_dim)
    metric = Metric.of(q, unit)
    metric = metric.holding_shape() if at_bound else metric
    error = q.gaussian.add_to_diagonal(m.curvature, -1.0).ravel() / -np.sqrt(2.0)
    row = np.concatenate([m.grad, error, [shapes.mean()]])[None]
    vector = metric.with_size(row, sizes.mean(keepdims=True))
    excess = float(metric.size(row - vector)[0]) * np.sqrt(2.0 / q.n_dim)
    curvature = q.gaussian.add_to_diagonal(m.curvature, excess)
    if m.replicates is None:  # too large to be kept: only their summaries are known, in the metric of theta and w
        metric = replace(metric, root=1.0, block=np.eye(2))
        gap, floor, floor_sd = gap_of(shapes[:, None])
        own = replace(m, gap=m.gap + gap, floor=m.floor + floor, floor_sd=float(np.hypot(m.floor_sd, floor_sd)))
        steps = shapes
    else:
        # The sign of A - I is the other one, which makes no difference but to the size.
        u = metric.with_size(np.column_stack([m.replicates, shapes]), sizes)
        solved = metric.solve(u)
        gap, floor, floor_sd = gap_of(u, solved)
        own = replace(m, gap=gap, floor=floor, floor_sd=floor_sd, replicates=None)
        steps = solved[:, -1]
    step = _mean_of(steps / np.sqrt(shape_information(q.shape)))
    gaussian = replace(own, curvature=curvature)
    return ScaleMoments(gaussian, m, vector[0], metric, *step, gap=own.gap, floor=own.floor, floor_sd=own.floor_sd)


def _by_replicate(q: StudentTState, inner: BaseDraws, evaluation: Evaluation, *, stl: bool) -> tuple[Array, Array]:
    """Return the natural gradients of the size of Sigma and of 1/a in each replicate, (n_replicates,)."""
    a, half = q.shape, 0.5 * q.n_dim
    keep = evaluation.finite
    z, path = inner.z[keep], q.gaussian.whiten(evaluation.grad[keep])
    along = np.full((2, inner.n_draws), np.nan)
    along[0, keep] = np.einsum("nd,nd->n", z, path + z if stl else path)
    along[1, keep] = 0.5 * tail_velocity(np.sum(z * z, axis=1), a, q.n_dim) * along[0, keep]
    if not stl:  # the entropy's part is exact
        along[0] += q.n_dim
        along[1] -= a**2 * (half / a + (a + half) * (polygamma(1, a + half) - polygamma(1, a)))
    means = [along[:, rows][:, keep[rows]].mean(axis=1) for rows in inner.replicates() if keep[rows].any()]
    sizes, shapes = np.array(means).T
    return sizes / np.sqrt(2.0 * q.n_dim), shapes / np.sqrt(shape_information(a))


def tails_gain(gaussian: AnyGaussian, base: BaseDraws, evaluation: Evaluation, n_se: float) -> bool:
    """Tell from gradients at draws of a Gaussian whether heavier tails gain more than so many standard errors."""
    q = StudentTState(gaussian, float(np.log(MOST_SHAPE)))
    rows = np.column_stack(_by_replicate(q, base, evaluation, stl=True))
    step, se = _mean_of(Metric.of(q, np.ones(1)).solve(rows)[:, -1] / np.sqrt(shape_information(q.shape)))  # of 1/a
    return step > max(n_se * se, TAIL_ATOL)


def _mean_of(steps: Array) -> tuple[float, float]:
    """Return a mean over replicates, and its standard error."""
    return float(steps.mean()), float(steps.std(ddof=1) / np.sqrt(len(steps))) if len(steps) > 1 else np.inf


# --- steps ------------------------------------------------------------------------------------------------------------


def stepped(
    q: StudentTState, moments: ScaleMoments, direction: Array, update: Update, rho: float, *, correct: bool
) -> StudentTState | None:
    """Return the state after a step; None where it is not valid."""
    before = moments.of_estimator
    error = np.sqrt(2.0) * direction[q.n_dim : -1].reshape(before.curvature.shape)
    curvature = q.gaussian.add_to_diagonal(-error, 1.0)
    own = replace(before, grad=direction[: q.n_dim], curvature=curvature, replicates=None)
    gaussian = update(q.gaussian, own, rho, correct)
    if gaussian is None:
        return None
    tail = 1.0 / q.shape + rho * direction[-1] / np.sqrt(shape_information(q.shape))
    return StudentTState(gaussian, float(-np.log(np.clip(tail, LEAST_TAIL, MOST_TAIL))))


# --- the part of the step rule `scale_mixture` in which q is a Student-t with tails of its own ---

#: Random streams of all sets but those of the Gaussian before.
_LEVEL = 100_000


@stored("student_t.steps")
@dataclass(frozen=True)
class AsStudentT(ScheduleState):
    """What one iteration hands to the next: what every schedule does, and what follows."""

    q: StudentTState
    evaluation: Evaluation
    moments: ScaleMoments
    #: Times that the fit has gone back to a Gaussian.
    n_returns: int = 0
    #: The Gaussian that was given tails, where there was one.
    origin: StudentTState | None = None
    #: Its ELBO.
    origin_elbo: float = -np.inf


class StudentTSteps(Schedule[AsStudentT, StudentTState, Evaluation]):
    """Steps of a Student-t."""

    state = AsStudentT

    def base_draws(self, level: int, n_draws: int) -> BaseDraws:
        """Return the base draws of one level, a function of the seed: standard normals and a column of uniforms.

        The uniform is an even function of a normal, so that a pair z, -z shares its mixing variable: odd parts cancel.
        """
        base = self._draw(n_draws, self._target.n_dim + 1, np.random.default_rng([self.seed, _LEVEL + level]))
        return replace(base, z=np.column_stack([base.z[:, 1:], erf(np.abs(base.z[:, 0]) / np.sqrt(2.0))]))

    # --- how a t is measured --------------------------------------------------------------------------------------

    def moments(self, q: StudentTState, base: BaseDraws, evaluation: Evaluation) -> ScaleMoments:
        """Return the natural gradient."""
        return measured(self._target, q, base, evaluation, self._estimator, stl=self._stl)

    def _is_exact(self, state: AsStudentT) -> bool:
        return bool(state.q.gaussian.exact_metric)

    def _is_near(self, state: AsStudentT, gap: float) -> bool:
        return is_near(state.q.gaussian, state.moments.gaussian, gap)

    def _spread(self, state: AsStudentT) -> float:
        keep = state.evaluation.finite
        h = state.evaluation.logp[keep] - state.q.log_density(state.evaluation.theta[keep])
        return float(np.var(h)) if len(h) else 0.0

    def _is_at_rest(self, state: AsStudentT) -> bool:
        x, most = state.moments, _most_tail_error(state.q)
        if not is_at_rest(state.q.gaussian, x.gaussian):
            return False
        # Where the largest set can't tell the shape any better, it makes no difference to the ELBO.
        return bool(state.rounds > 0 or max(abs(x.tail_step) - x.tail_se, x.tail_se) <= most)

    def _is_kinked(self, state: AsStudentT) -> bool:
        base, evaluation = within(state.q, state.base, state.evaluation, stl=True)
        return is_kinked(state.q.gaussian, base, evaluation, state.moments.of_estimator)

    # --- steps ----------------------------------------------------------------------------------------------------

    def _averaged(self, state: AsStudentT, rho: float) -> AsStudentT | None:
        x = state.moments
        q = stepped(state.q, x, x.direction(), self._update, rho, correct=False)
        return None if q is None else self._pooled(state, q, rho)

    def _draws_needed(self, state: AsStudentT) -> float:
        """Return as many draws as tell where the shape is."""
        return max(self.few_draws, state.n_draws * (state.moments.tail_se / _most_tail_error(state.q)) ** 2)

    def _draws_to_average(self, state: AsStudentT, n_pooled: int) -> int:
        n_draws = super()._draws_to_average(state, n_pooled)
        # If it seems to be done, the next set is to certify it.
        return max(n_draws, self.few_draws) if state.belief.bound < self._tol_at(state) else n_draws

    def _found(self, state: AsStudentT) -> tuple[AsStudentT, Step[StudentTState, Evaluation] | Status]:
        x = state.moments
        near = is_near(state.q.gaussian, x.gaussian, 0.5 * float(x.vector[:-1] @ x.vector[:-1]))
        # On few draws, most of the shape's step may be noise, and far from the optimum all of it tells of other errors.
        trust = x.tail_step**2 / (x.tail_step**2 + x.tail_se**2) if near and x.tail_step else 0.0
        full = stepped(state.q, x, x.direction(trust), self._update, 1.0, correct=True)
        if full is not None:
            evaluation = self._estimator.evaluate(self._target, full, state.base)
            if self._accepts(state, evaluation):
                return state, Step(full, evaluation, 1.0)
        return state, search(
            lambda rho: stepped(state.q, x, x.vector, self._update, rho, correct=True),
            lambda q: self._estimator.evaluate(self._target, q, state.base),
            lambda evaluation: self._accepts(state, evaluation),
            elbo=state.elbo,
            slope=float(x.vector @ x.vector),
            first=1.0,
        )


def _most_tail_error(q: StudentTState) -> float:
    """Return the error of 1/a that a converged fit may have."""
    return TAIL_ATOL + TAIL_RTOL / q.shape


# --- the step rule of the Student-t: no learning rate, a shape that is fitted, a stop rule in nats ---

#: Draws in the first and in the largest set from gradients alone, and, for each dimension, in the first: fewer are
#: overfitted.
_N_GRADIENTS, _MAX_GRADIENTS, _GRADIENTS_PER_DIM = 64, 16_384, 4
#: Draws below which nothing is said of tails, and times the dimension: in few dimensions, few draws tell of them. Fewer
#: than the least, which max_draws does not change, have no replicates to judge by.
_FEW_DRAWS, _FEW_TIMES_DIM, _LEAST_DRAWS = 128, 512, 16
#: Standard errors by which heavier tails must gain something: along the way, and on the larger set at the end.
_N_SE, _N_SE_AT_END = 3.0, 2.0
#: Nats for each dimension below which tails are looked at: far from the optimum they would make up for other errors.
_NEAR_PER_DIM = 0.1
#: Times that a fit may find that the tails are no heavier than a Gaussian's after all.
_MAX_RETURNS = 2
#: Nats below the ELBO of the Gaussian that it began from, at which a t is given up.
_WORSE = 1.0
#: Random streams of the larger set at the end.
_CHECK_LEVEL = 500_000


@stored("scale_mixture.as_gaussian")
@dataclass(frozen=True)
class AsGaussian:
    """A fit that is still that of a Gaussian."""

    of_gaussian: AdaptiveState
    #: Whether a larger set of draws at the end has shown that heavier tails gain nothing.
    checked: bool = False
    #: Times that the fit came back to here.
    n_returns: int = 0
    #: Draws left out in earlier parts of the fit.
    n_lost: int = 0

    @property
    def q(self) -> StudentTState:
        """The Gaussian, as a t with many degrees of freedom."""
        return StudentTState(self.of_gaussian.q, float(np.log(MOST_SHAPE)))

    elbo, gap, n_draws, step_size = (
        property(attrgetter(f"of_gaussian.{name}")) for name in ("elbo", "gap", "n_draws", "step_size")
    )

    @property
    def n_dropped(self) -> int:
        """Draws left out so far because log p or its gradient was not finite."""
        return self.n_lost + self.of_gaussian.n_dropped


class ScaleMixture(StepRule[StudentTState, AsGaussian | AsStudentT]):
    """Natural-gradient steps of a Student-t that need no learning rate.

    Parameters
    ----------
    target : Density
    update, estimator : callable
        Rows of the registries, of the Gaussian inside.
    seed : int
        Of the base draws.
    n_draws, max_draws : int, optional
        Sizes of the first and of the largest set of draws, powers of 2 where quasi-random. With Hessians 8 and 1,024;
        from gradients alone four times the dimension, 64 at least, and 16,384.
    **options
        Others of `Schedule`.
    """

    #: Options that the rule takes, for the messages that refuse others.
    takes: ClassVar[frozenset[str]] = Schedule.takes

    def __init__(
        self,
        target: Density,
        update: Update,
        estimator: Estimator,
        *,
        seed: int,
        n_draws: int | None = None,
        max_draws: int | None = None,
        **options: Any,
    ) -> None:
        first, most = Schedule.default_draws
        if not estimator.uses_hessians:
            first = max(_N_GRADIENTS, _power_of_2(_GRADIENTS_PER_DIM * target.n_dim))
            most = max(_MAX_GRADIENTS, first)
        n_draws = n_draws or min(first, max_draws or first)
        most = max(max_draws or most, n_draws)
        few = max(_FEW_DRAWS, _power_of_2(_FEW_TIMES_DIM / max(target.n_dim, 1)))
        few = max(min(few, most), _LEAST_DRAWS)
        parts, options = (target, update, estimator), {**options, "max_draws": most}
        self._target, self._estimator = target, estimator
        self._gaussian = Adaptive(*parts, seed=seed, n_draws=n_draws, **options)
        self._t = StudentTSteps(*parts, seed=seed, n_draws=few, **options)
        self._t.few_draws = few

    def first_evaluation(self, q: StudentTState) -> Evaluation:
        """Evaluate a starting state on the first base draws."""
        return self._gaussian.first_evaluation(q.gaussian) if _is_gaussian(q) else self._t.first_evaluation(q)

    def init(self, q: StudentTState) -> AsGaussian | AsStudentT:
        """Return the state before the first iteration."""
        return (None if _is_gaussian(q) else self._t.begin(q)) or AsGaussian(self._gaussian.init(q.gaussian))

    def step(self, state: AsGaussian | AsStudentT) -> AsGaussian | AsStudentT:
        """Take one step."""
        if isinstance(state, AsGaussian):
            return self._step_of_gaussian(state)
        new = self._t.step(state)
        if new.fresh and _is_gaussian(new.q) and new.moments.tail_step <= 0.0:
            return self._back(new, new.q)
        # Few draws may have promised what none can hold: where log p falls off exponentially, no t has a finite ELBO.
        origin = new.origin if new.elbo < new.origin_elbo - _WORSE else None
        return new if origin is None else self._back(new, origin)

    def terminate(self, state: AsGaussian | AsStudentT) -> Status | None:
        """Return why to stop, or None to go on."""
        if isinstance(state, AsGaussian):
            return self._gaussian.terminate(state.of_gaussian) if state.checked else None
        return self._t.terminate(state)

    def assess(self, state: AsGaussian | AsStudentT) -> Assessment:
        """Evaluate a state on draws that had no part in reaching it."""
        return self._gaussian.assess(state.of_gaussian) if isinstance(state, AsGaussian) else self._t.assess(state)

    def reopen(self, state: AsGaussian | AsStudentT) -> AsGaussian | AsStudentT:
        """Return a state in which a fit that gave up may try again."""
        if isinstance(state, AsGaussian):
            return replace(state, of_gaussian=self._gaussian.reopen(state.of_gaussian), checked=False)
        return self._t.reopen(state)

    def _step_of_gaussian(self, state: AsGaussian) -> AsGaussian | AsStudentT:
        """Take one step of the Gaussian; give it tails where they gain something."""
        inner = self._gaussian.step(state.of_gaussian)
        moved = replace(state, of_gaussian=inner, checked=False)
        if state.n_returns >= _MAX_RETURNS:
            return replace(moved, checked=True)
        q = inner.q
        if self._gaussian.terminate(inner) is not None:
            base = self._gaussian.base_draws(_CHECK_LEVEL + inner.level, self._t.few_draws)
            evaluation = self._estimator.evaluate(self._target, q, base)
            n_se = _N_SE_AT_END
        else:
            near = inner.gap < NEAR_NATS + _NEAR_PER_DIM * q.n_dim
            if not (inner.fresh and near) or inner.n_draws < FEW_DRAWS or inner.evaluation.lost > MAX_LOST:
                return moved
            base, evaluation, n_se = inner.base, inner.evaluation, _N_SE
        begun = None
        if evaluation.finite.any() and tails_gain(q, base, evaluation, n_se):
            begun = self._t.begin(moved.q, inner.level)
        if begun is None:
            return replace(moved, checked=n_se == _N_SE_AT_END)
        n_dropped = moved.n_dropped + begun.n_dropped
        return replace(begun, n_dropped=n_dropped, n_returns=state.n_returns, origin=begun.q, origin_elbo=begun.elbo)

    def _back(self, state: AsStudentT, q: StudentTState) -> AsGaussian:
        """Return to a Gaussian, on draws that had no part in this."""
        growth, n_draws = Growth(first=q.gaussian.sd()), self._t.few_draws
        inner = self._gaussian.begin(q.gaussian, state.level + 1, n_draws, growth=growth, n_recoveries=MAX_RECOVERIES)
        return AsGaussian(
            inner or self._gaussian.init(q.gaussian), n_returns=state.n_returns + 1, n_lost=state.n_dropped
        )


def _is_gaussian(q: StudentTState) -> bool:
    return 1.0 / q.shape <= LEAST_TAIL * (1.0 + ROUNDING)


def _power_of_2(value: float) -> int:
    """Return the least power of 2 that is not below a number."""
    return 1 << int(np.ceil(np.log2(max(value, 1.0))))
