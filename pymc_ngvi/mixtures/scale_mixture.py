r"""Natural gradients of a Student-t: a Gaussian problem with another target, and one more coordinate, the shape.

With q the t density, :math:`h = \log p - \log q` and w the mixing variable, the natural gradient of mean and precision
of the Gaussian inside, N(mu, Sigma), is :math:`E_q[\nabla h]` and :math:`-E_q[w \nabla^2 h]` [1]_: that of a Gaussian
whose target is :math:`\log p + \log(N / q)`, under other draws. So every update and every estimator for Gaussians
serves. The expectation with w is a mean over draws of another mixture: w times the density of InvGamma(a, a) is
a/(a - 1) times that of InvGamma(a - 1, a).

Their metric is the Fisher information of theta *and* w. That of theta alone, which is the curvature of the ELBO where
the posterior is a t, is smaller: by a factor of 43 along the shape of ten degrees of freedom in one dimension, where
steps of size 1 creep. It has a closed form, too [2]_, and differs from the other in one factor and a 2 x 2 matrix.

References
----------
.. [1] W. Lin, M. E. Khan and M. Schmidt (2019). Fast and simple natural-gradient variational inference with mixture of
   exponential-family approximations. ICML. https://doi.org/10.48550/arXiv.1906.02914
.. [2] K. L. Lange, R. J. A. Little and J. M. G. Taylor (1989). Robust statistical modeling using the t distribution.
   JASA 84. https://doi.org/10.1080/01621459.1989.10478852
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from scipy.special import betainc, betaincc, betaln, polygamma

from pymc_ngvi.estimators.summary import gap_of
from pymc_ngvi.families.student_t import LEAST_SHAPE, MOST_SHAPE, StudentTState, mixing_variable
from pymc_ngvi.types import Array, BaseDraws, Estimator, Evaluation, Moments, TargetDensity, Update

#: Range of 1/a, the coordinate in which the ELBO is near-quadratic for Gaussian targets, too; and its rounding.
LEAST_TAIL, MOST_TAIL, _ROUNDING = 1.0 / MOST_SHAPE, 1.0 / LEAST_SHAPE, 1e-9
#: Relative step of the differences that give the derivative of a quantile.
_STEP = 1e-4


# --- draws and evaluations --------------------------------------------------------------------------------------------


def evaluate(target: TargetDensity, q: StudentTState, base: BaseDraws) -> Evaluation:
    """Evaluate log p and its gradient at the draws of ``q``; the ELBO is the mean of log p - log q."""
    theta = q.draws(base.z)
    logp, grad = target.logp_grad(theta)
    finite = np.isfinite(logp) & np.isfinite(grad).all(axis=1)
    elbo = float(np.mean(logp[finite] - q.log_density(theta[finite]))) if finite.any() else -np.inf
    return Evaluation(theta, logp, grad, finite, elbo)


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
    density : TargetDensity
        log p.
    q : StudentTState
    """

    def __init__(self, density: TargetDensity, q: StudentTState) -> None:
        self._density, self._q = density, q

    def mean_hessian_products(self, theta: Array, directions: Array) -> Array:
        """Return E[w hess h] - Sigma^-1 times each direction, (n_directions, n_dim), h = log p - log q.

        ``theta`` are draws of the mixture over InvGamma(a - 1, a), which stand for draws of q with weights w.
        """
        of_density = self._density.mean_hessian_products(theta, directions)
        weight, rows = self._of_q(theta)
        precise = self._q.gaussian.precision_product(directions)
        of_q = (directions @ rows.T) @ rows / len(theta) - weight * precise
        result: Array = self._inflation * (of_density - of_q) - precise
        return result

    def mean_hessian_diagonal(self, theta: Array) -> Array:
        """Return the diagonal of the same matrix, (n_dim,), where coordinates are independent."""
        of_density = self._density.mean_hessian_diagonal(theta)
        weight, rows = self._of_q(theta)
        precise = self._q.gaussian.precision_product(np.ones((1, self._q.n_dim)))[0]
        result: Array = self._inflation * (of_density - np.mean(rows**2, axis=0) + weight * precise) - precise
        return result

    @property
    def _inflation(self) -> float:
        return self._q.shape / (self._q.shape - 1.0)

    def _of_q(self, theta: Array) -> tuple[float, Array]:
        """Return c and R, (n_draws, n_dim), with hess log q = R^T R / n_draws - c Sigma^-1 on average over draws."""
        a, gaussian = self._q.shape, self._q.gaussian
        rate = a + 0.5 * self._q.squared_distance(theta)
        weights = (a + 0.5 * self._q.n_dim) / rate  # E[1/w | theta]
        rows = gaussian.precision_product(theta - gaussian.location) * np.sqrt(weights / rate)[:, None]
        return float(np.mean(weights)), rows


# --- the shape --------------------------------------------------------------------------------------------------------


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
    result: Array = np.divide(change, density, out=np.zeros_like(density), where=density > 0.0)
    return result


# --- the metric -------------------------------------------------------------------------------------------------------


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
    def of(cls, q: StudentTState, unit: Array, *, held: bool) -> Self:
        """Return the metric at a state; ``held``: where the shape stays as it is."""
        a, half = q.shape, 0.5 * q.n_dim
        total = a + half + 1.0
        shape = polygamma(1, a) - polygamma(1, a + half) + half / (a * total) - 2.0 * half / (a * (a + half))
        scale = a**2 / np.sqrt(shape_information(a))
        cross = scale * np.sqrt(half) / ((a + half) * total)
        size = np.sqrt(a / total)
        low = [0.0, 1.0] if held else [cross / size, np.sqrt(scale**2 * shape - (cross / size) ** 2)]
        return cls(unit, float(np.sqrt((a + half) / total)), np.array([[size, 0.0], low]))

    def whitened(self, gradients: Array) -> Array:
        """Return L^-1 times each row: of a natural gradient, half of its square is the gap."""
        return self._applied(gradients, 1.0 / self.root, lambda rows: np.linalg.solve(self.block, rows))

    def unwhitened(self, steps: Array) -> Array:
        """Return L^-T times each row: a step in the coordinates of theta and w."""
        return self._applied(steps, 1.0 / self.root, lambda rows: np.linalg.solve(self.block.T, rows))

    def rewhitened(self, steps: Array) -> Array:
        """Return L^T times each row: the inverse of `unwhitened`."""
        return self._applied(steps, self.root, lambda rows: self.block.T @ rows)

    def size(self, vectors: Array) -> Array:
        """Return the coordinate of the size of Sigma, (n,)."""
        result: Array = vectors[:, -1 - len(self.unit) : -1] @ self.unit
        return result

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


# --- moments ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScaleMoments:
    """Natural gradient of a t, with its Monte Carlo error.

    Parameters
    ----------
    gaussian : Moments
        Whitened gradient and curvature A = I - C^T E[w hess h] C of the Gaussian inside; gap, its floor and replicates
        are those of mean, Sigma and shape together, replicates as `Metric.whitened` has them.
    of_estimator : Moments
        The same as the estimator has them.
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
    def natural(self) -> Array:
        """The natural gradient in coordinates in which the Fisher information of theta alone is the identity."""
        result: Array = self.metric.whitened(self.vector[None])[0]
        return result

    @property
    def gap_of_gaussian(self) -> float:
        """Nats to be gained by mean and Sigma, as if w were observed."""
        return 0.5 * float(self.vector[:-1] @ self.vector[:-1])


def measured(
    target: TargetDensity,
    q: StudentTState,
    base: BaseDraws,
    evaluation: Evaluation,
    estimator: Estimator,
    *,
    stl: bool = True,
) -> ScaleMoments:
    """Estimate the natural gradient of a t from an evaluation at its draws.

    The shape takes gradients; so does the size of Sigma, whatever the estimator: their errors nearly cancel where
    both change.

    Parameters
    ----------
    target : TargetDensity
    q : StudentTState
    base : BaseDraws
        z is (n_draws, n_dim + 1): standard normals and, in the last column, uniforms; at least two replicates.
    evaluation : Evaluation
        At the draws of ``q``; draws that are not finite are left out.
    estimator : Estimator
        For Gaussians.
    stl : bool, default True
        Sticking the landing: no noise at all at q = p. Of Hessians, the known ones of log q are used in any case.

    Returns
    -------
    ScaleMoments
    """
    inner, within_q = within(q, base, evaluation, stl=stl)
    m = estimator(GaussianPart(target, q), q.gaussian, inner, within_q, stl=stl)  # type: ignore[arg-type]
    sizes, shapes = _by_replicate(q, inner, within_q, stl=stl)
    tail, least, most = 1.0 / q.shape, LEAST_TAIL * (1.0 + _ROUNDING), MOST_TAIL * (1.0 - _ROUNDING)
    # A Gaussian stays one until heavier tails are seen to gain something.
    noise = shapes.std(ddof=1) / np.sqrt(len(shapes)) if len(shapes) > 1 else np.inf
    held = bool((tail <= least and shapes.mean() < noise) or (tail >= most and shapes.mean() > 0.0))
    shapes = np.zeros_like(shapes) if held else shapes
    unit = q.gaussian.flat(q.gaussian.add_to_diagonal(np.zeros_like(m.curvature), 1.0)) / np.sqrt(q.n_dim)
    metric = Metric.of(q, unit, held=held)
    error = q.gaussian.flat(q.gaussian.curvature_error(m.curvature)) / -np.sqrt(2.0)
    row = np.concatenate([m.grad, error, [shapes.mean()]])[None]
    by_gradients = tail > least
    vector = metric.with_size(row, sizes.mean(keepdims=True)) if by_gradients else row
    excess = float(metric.size(row - vector)[0]) * np.sqrt(2.0 / q.n_dim)
    curvature = q.gaussian.add_to_diagonal(m.curvature, excess)
    if m.replicates is None:  # too large to be kept: only their summaries are known, in the metric of theta and w
        metric = replace(metric, root=1.0, block=np.eye(2))
        gap, floor, floor_sd = gap_of(shapes[:, None])
        own = replace(m, gap=m.gap + gap, floor=m.floor + floor, floor_sd=float(np.hypot(m.floor_sd, floor_sd)))
        steps = shapes
    else:
        u = np.column_stack([m.replicates, shapes])
        u[:, q.n_dim : -1] *= -1.0
        u = metric.whitened(metric.with_size(u, sizes) if by_gradients else u)
        gap, floor, floor_sd = gap_of(u)
        own = replace(m, gap=gap, floor=floor, floor_sd=floor_sd, replicates=u)
        steps = metric.unwhitened(u)[:, -1]
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


# --- steps ------------------------------------------------------------------------------------------------------------


def cautious(moments: ScaleMoments, trust: float) -> Array:
    """Return a natural gradient as `Metric.whitened` has it, with a part of the step of the shape, from 0 to 1."""
    full = moments.natural
    if trust == 1.0:
        return full
    metric = moments.metric
    held = replace(metric, block=np.diag([metric.block[0, 0], 1.0]))
    alone = metric.rewhitened(held.unwhitened(held.whitened(np.append(moments.vector[:-1], 0.0)[None])))[0]
    result: Array = trust * full + (1.0 - trust) * alone
    return result


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
        As `Metric.whitened` has it.
    update : Update
        Of mean and Sigma.
    rho : float
        Step size.
    correct : bool
        Handed to ``update``.
    """
    direction = moments.metric.unwhitened(direction[None])[0]
    error = q.gaussian.unflat(np.sqrt(2.0) * direction[q.n_dim : -1])
    curvature = q.gaussian.add_to_diagonal(-error, 1.0)
    own = replace(moments.of_estimator, grad=direction[: q.n_dim], curvature=curvature, replicates=None)
    gaussian = update(q.gaussian, own, rho, correct)
    if gaussian is None:
        return None
    tail = 1.0 / q.shape + rho * direction[-1] / np.sqrt(shape_information(q.shape))
    return StudentTState(gaussian, float(-np.log(np.clip(tail, LEAST_TAIL, MOST_TAIL))))
