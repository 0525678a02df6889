r"""Natural gradients of a Student-t: a Gaussian problem with another target, and one more coordinate, the shape.

With q the t density, :math:`h = \log p - \log q` and w the mixing variable, the natural gradient of mean and precision
of the Gaussian inside, N(mu, Sigma), is :math:`E_q[\nabla h]` and :math:`-E_q[w \nabla^2 h]` [1]_: that of a Gaussian
whose target is :math:`\log p + \log(N / q)`, under other draws. So every update and every estimator for Gaussians
serves. The expectation with w is a mean over draws of another mixture: w times the density of InvGamma(a, a) is
a/(a - 1) times that of InvGamma(a - 1, a).

References
----------
.. [1] W. Lin, M. E. Khan and M. Schmidt (2019). Fast and simple natural-gradient variational inference with mixture of
   exponential-family approximations. ICML. https://doi.org/10.48550/arXiv.1906.02914
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from scipy.special import betainc, betaincc, betaln, polygamma

from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import (
    Array,
    BaseDraws,
    Density,
    Estimator,
    Evaluation,
    GaussianState,
    MeanHessian,
    Moments,
    Update,
)
from pymc_ngvi.estimators import stein
from pymc_ngvi.estimators.summary import gap_of
from pymc_ngvi.families.student_t import LEAST_SHAPE, MOST_SHAPE, StudentTState, mixing_variable

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

    Parameters
    ----------
    unit : ndarray, shape (n_error,)
        Direction of the identity among curvatures.
    root : float
        Square root of M along the mean and along all changes of Sigma but of its size.
    block : ndarray, shape (2, 2)
        L of the size of Sigma and of 1/a.
    """

    unit: Array
    root: float
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

    def whitened(self, gradients: Array) -> Array:
        """Return L^-1 times each row: of a natural gradient, half of its square is the gap."""
        return self._applied(gradients, 1.0 / self.root, lambda rows: np.linalg.solve(self.block, rows))

    def solve(self, gradients: Array) -> Array:
        """Return M^-1 times each row: of a natural gradient, that in the Fisher information of theta alone."""
        return self._applied(
            gradients,
            1.0 / self.root**2,
            lambda rows: np.linalg.solve(self.block.T, np.linalg.solve(self.block, rows)),
        )

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

    def _applied(self, vectors: Array, factor: float, function: Callable[[Array], Array]) -> Array:
        size, tail = function(np.stack([self.size(vectors), vectors[:, -1]]))
        result = self.with_size(factor * vectors, size)
        result[:, -1] = tail
        return result


# --- natural gradients of a Student-t: a Gaussian problem with another target, and one more coordinate, the shape ---

#: Range of 1/a, the coordinate in which the ELBO is near-quadratic for Gaussian targets, too; and its rounding.
LEAST_TAIL, MOST_TAIL, _ROUNDING = 1.0 / MOST_SHAPE, 1.0 / LEAST_SHAPE, 1e-9
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
    """The Hessians that the Gaussian inside a t sees, those of log p + log(N / q): the part of a target they need.

    Parameters
    ----------
    density : Density
        log p.
    q : StudentTState
    """

    def __init__(self, density: Density, q: StudentTState) -> None:
        self._density, self._q = density, q

    def mean_hessian(self, theta: Array) -> MeanHessian:
        """Return E[w hess h] - Sigma^-1, h = log p - log q.

        ``theta`` are draws of the mixture over InvGamma(a - 1, a), which stand for draws of q with weights w.
        """
        return _PartHessian(self._density.mean_hessian(theta), self._q, theta)


@dataclass(frozen=True)
class _PartHessian(MeanHessian):
    of_density: MeanHessian
    q: StudentTState
    theta: Array

    def products(self, directions: Array) -> Array:
        """Return the matrix times each direction, (n_directions, n_dim)."""
        of_density = self.of_density.products(directions)
        weight, rows = self._of_q()
        precise = self.q.gaussian.precision_product(directions)
        of_q = (directions @ rows.T) @ rows / len(rows) - weight * precise
        return self._inflation * (of_density - of_q) - precise

    def diagonal(self) -> Array:
        """Return the diagonal, (n_dim,), where coordinates are independent."""
        of_density = self.of_density.diagonal()
        weight, rows = self._of_q()
        precise = self.q.gaussian.precision_product(np.ones((1, self.q.n_dim)))[0]
        return self._inflation * (of_density - np.mean(rows**2, axis=0) + weight * precise) - precise

    @property
    def _inflation(self) -> float:
        return self.q.shape / (self.q.shape - 1.0)

    def _of_q(self) -> tuple[float, Array]:
        """Return c and R, (n_draws, n_dim), with hess log q = R^T R / n_draws - c Sigma^-1 on average over draws."""
        a, gaussian = self.q.shape, self.q.gaussian
        rate = a + 0.5 * self.q.squared_distance(self.theta)
        weights = (a + 0.5 * self.q.n_dim) / rate  # E[1/w | theta]
        rows = gaussian.precision_product(self.theta - gaussian.location) * np.sqrt(weights / rate)[:, None]
        return float(np.mean(weights)), rows


# --- moments ----------------------------------------------------------------------------------------------------------


@stored("scale_mixture.moments")
@dataclass(frozen=True)
class ScaleMoments:
    """Natural gradient of a t, with its Monte Carlo error.

    Parameters
    ----------
    gaussian : Moments
        Whitened gradient and curvature A = I - C^T E[w hess h] C of the Gaussian inside; gap and its floor are those of
        mean, Sigma and shape together.
    of_estimator : Moments
        The same with the size of A as the estimator has it.
    vector : ndarray, shape (n_params,)
        Natural gradient, in coordinates in which the Fisher information of theta and w is the identity: of the mean,
        (I - A) / sqrt 2, and of 1/a, which is 0 where it leads out of its range.
    metric : Metric
    tail_step, tail_se : float
        Change of 1/a in a step of size 1, and its standard error.
    """

    gaussian: Moments
    of_estimator: Moments
    vector: Array
    metric: Metric
    tail_step: float
    tail_se: float

    @property
    def gap(self) -> float:
        """Nats to be gained by mean, Sigma and shape."""
        return self.gaussian.gap

    @property
    def floor(self) -> float:
        """What noise alone would make them."""
        return self.gaussian.floor

    @property
    def floor_sd(self) -> float:
        """Standard deviation of the difference at the optimum."""
        return self.gaussian.floor_sd

    def direction(self, trust: float = 1.0) -> Array:
        """Return the natural gradient in the Fisher information of theta alone, (n_params,).

        With a part of the step of the shape, ``trust`` from 0 to 1, and the size of Sigma that goes with it.
        """
        full: Array = self.metric.solve(self.vector[None])[0]
        if trust == 1.0:
            return full
        same_shape: Array = self.metric.holding_shape().solve(np.append(self.vector[:-1], 0.0)[None])[0]
        return trust * full + (1.0 - trust) * same_shape

    @property
    def gap_of_gaussian(self) -> float:
        """Nats to be gained by mean and Sigma, as if w were observed."""
        return 0.5 * float(self.vector[:-1] @ self.vector[:-1])


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

    Parameters
    ----------
    target : Density
    q : StudentTState
    base : BaseDraws
        z is (n_draws, n_dim + 1): standard normals and, in the last column, uniforms; at least two replicates.
    evaluation : Evaluation
        At the draws of ``q``; draws that are not finite are left out.
    estimator : Estimator
        For Gaussians.
    stl : bool, default True
        Sticking the landing: no noise at all at q = p. Of Hessians, the known ones of log q are used in any case.
    """
    inner, within_q = within(q, base, evaluation, stl=stl)
    part: Any = GaussianPart(target, q)
    with np.errstate(over="ignore", invalid="ignore"):  # far out in the tails: noise without bounds
        m = estimator.moments(part, q.gaussian, inner, within_q, stl=stl)
        other = stein.moments(part, q.gaussian, inner, within_q, stl=stl) if estimator.uses_hessians else m
        m = m if m.is_finite() and m.floor <= other.floor else other
    sizes, shapes = _by_replicate(q, inner, within_q, stl=stl)
    tail, least, most = 1.0 / q.shape, LEAST_TAIL * (1.0 + _ROUNDING), MOST_TAIL * (1.0 - _ROUNDING)
    at_bound = bool((tail <= least and shapes.mean() < 0.0) or (tail >= most and shapes.mean() > 0.0))
    shapes = np.zeros_like(shapes) if at_bound else shapes
    unit = q.gaussian.flat(q.gaussian.add_to_diagonal(np.zeros_like(m.curvature), 1.0)) / np.sqrt(q.n_dim)
    metric = Metric.of(q, unit)
    metric = metric.holding_shape() if at_bound else metric
    error = q.gaussian.flat(q.gaussian.curvature_error(m.curvature)) / -np.sqrt(2.0)
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
        gap, floor, floor_sd = gap_of(metric.whitened(u))
        own = replace(m, gap=gap, floor=floor, floor_sd=floor_sd, replicates=None)
        steps = metric.solve(u)[:, -1]
    steps = steps / np.sqrt(shape_information(q.shape))
    se = float(steps.std(ddof=1) / np.sqrt(len(steps))) if len(steps) > 1 else np.inf
    return ScaleMoments(replace(own, curvature=curvature), m, vector[0], metric, float(steps.mean()), se)


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


@stored("scale_mixture.tails")
@dataclass(frozen=True)
class Tails:
    """Whether tails heavier than a Gaussian's would raise the ELBO.

    Parameters
    ----------
    step, se : float
        1/a after a step from a Gaussian, and its standard error.
    """

    step: float
    se: float

    @classmethod
    def beyond(cls, gaussian: GaussianState, base: BaseDraws, evaluation: Evaluation) -> Self:
        """Measure them at draws of a Gaussian, from gradients alone."""
        q = StudentTState(gaussian, float(np.log(MOST_SHAPE)))
        rows = np.column_stack(_by_replicate(q, base, evaluation, stl=True))
        steps = Metric.of(q, np.ones(1)).solve(rows)[:, -1] / np.sqrt(shape_information(q.shape))
        return cls(float(steps.mean()), float(steps.std(ddof=1) / np.sqrt(len(steps))) if len(steps) > 1 else np.inf)

    def gain(self, n_se: float) -> bool:
        """Tell whether heavier tails gain anything, beyond ``n_se`` standard errors."""
        return self.step > max(n_se * self.se, TAIL_ATOL)


# --- steps ------------------------------------------------------------------------------------------------------------


def stepped(
    q: StudentTState, moments: ScaleMoments, direction: Array, update: Update, rho: float, *, correct: bool
) -> StudentTState | None:
    """Return the state after a step; None where it is not valid.

    Parameters
    ----------
    q : StudentTState
    moments : ScaleMoments
        There.
    direction : ndarray, shape (n_params,)
        In the coordinates of the natural gradient.
    update : Update
        Of mean and Sigma.
    rho : float
        Step size.
    correct : bool
        Handed to ``update``.
    """
    error = q.gaussian.unflat(np.sqrt(2.0) * direction[q.n_dim : -1])
    curvature = q.gaussian.add_to_diagonal(-error, 1.0)
    own = replace(moments.of_estimator, grad=direction[: q.n_dim], curvature=curvature, replicates=None)
    gaussian = update(q.gaussian, own, rho, correct)
    if gaussian is None:
        return None
    tail = 1.0 / q.shape + rho * direction[-1] / np.sqrt(shape_information(q.shape))
    return StudentTState(gaussian, float(-np.log(np.clip(tail, LEAST_TAIL, MOST_TAIL))))
