"""Estimators of the whitened gradient and curvature. One function and one row each."""

import functools

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self, cast

import numpy as np

from pymc_ngvi.core.linalg import all_finite, cholesky, solve_lower, symmetrise
from pymc_ngvi.core.sizes import HELD
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import (
    Array,
    BaseDraws,
    Density,
    Evaluation,
    Expectation,
    Indices,
    MeanHessian,
    Outer,
    RowRules,
    RowsTarget,
    VariationalState,
    mean_hessians,
)
from pymc_ngvi.families.gaussian import AnyGaussian

# --- whitened expectations under a state, and what is made of them ---


@dataclass(frozen=True, kw_only=True)
class Nats:
    """What is left to gain, as one set of draws has it."""

    #: Half the squared length of the natural gradient: nats of ELBO still to be gained, uncorrected for noise.
    gap: float
    #: What it would be on average, by Monte Carlo noise alone, at the optimum; and the standard deviation of the
    #: difference there.
    floor: float
    floor_sd: float


@stored("moments")
@dataclass(frozen=True)
class Moments(Nats):
    """Whitened expectations under one state, with their Monte Carlo error.

    Parameters
    ----------
    grad : ndarray, shape (n_dim,)
        C^T E_q[grad log p].
    curvature : ndarray
        A, in the form of the family: (n_dim, n_dim) dense, (n_dim,) diagonal.
    grad_se, curvature_se : ndarray, shape (n_dim,)
        Monte Carlo standard errors of the gradient and of the diagonal of A.
    replicates : ndarray, shape (n_replicates, n_params), or None
        Natural gradient of each replicate, kept by families for which it is a few vectors.
    """

    grad: Array
    curvature: Array
    grad_se: Array
    curvature_se: Array
    replicates: Array | None = None

    def is_finite(self) -> bool:
        """Tell whether gradient and curvature are."""
        return all_finite(self.grad, self.curvature)

    def error(self, state: AnyGaussian) -> Array | Outer:
        """Return I - A, as outer products where it is a mean of few."""
        return -state.add_to_diagonal(self.curvature, -1.0)

    def error_diagonal(self, state: AnyGaussian) -> Array:
        """Return the diagonal of I - A, (n_dim,)."""
        return 1.0 - state.curvature_diagonal(self.curvature)


class PathMoments(Moments):
    """Whitened expectations from gradients alone, without errors: the curvature is formed only where it is asked for.

    Parameters
    ----------
    state : AnyGaussian
    grad : ndarray, shape (n_dim,)
    outer : Outer
        I - A.
    """

    def __init__(self, state: AnyGaussian, grad: Array, outer: Outer) -> None:
        unknown = np.full(len(grad), np.inf)
        values = {"grad": grad, "grad_se": unknown, "curvature_se": unknown, "replicates": None}
        self.__dict__.update(values, gap=np.nan, floor=np.inf, floor_sd=np.inf, outer=outer, _state=state)

    outer: Outer
    _state: AnyGaussian

    @functools.cached_property
    def curvature(self) -> Array:
        """A, in the form of the family."""
        return self._state.add_to_diagonal(-self._state.outer_mean(self.outer), 1.0)

    def is_finite(self) -> bool:
        """Tell whether gradient and outer products are."""
        return all_finite(self.grad, self.outer.left, self.outer.right)

    def error(self, state: AnyGaussian) -> Array | Outer:
        """Return I - A as outer products."""
        return self.outer

    def error_diagonal(self, state: AnyGaussian) -> Array:
        """Return the diagonal of I - A, (n_dim,)."""
        left, right, diagonal = self.outer
        return np.einsum("bi,bi->i", left, right) / len(left) + diagonal


@stored("moments.parameters")
class Parameters(NamedTuple):
    """A direction, or any other quantity, in the coordinates of mean and factor."""

    #: shape (n_dim,).
    location: Array
    #: In the form of the family's factor.
    factor: Array


#: A parametrisation, and the map from a state to the next one: from a state, moments that are whitened by it, the step
#: size, and whether a correction is to be applied where the step would lose positive definiteness, and the update knows
#: of one. None where no valid state results.
type Update = Callable[[AnyGaussian, Moments, float, bool], AnyGaussian | None]
#: Gradient, or natural gradient, of the ELBO in the coordinates of mean and factor: for rules that move these.
type Direction = Callable[[AnyGaussian, Moments], Parameters]


# --- estimators ---


def slopes_of(state: AnyGaussian, base: BaseDraws, evaluation: Evaluation, *, stl: bool) -> Array:
    """Return C^T grad log p at the draws, 0 where it is not finite; and z beside with sticking the landing."""
    grad = evaluation.grad if evaluation.finite.all() else np.where(evaluation.finite[:, None], evaluation.grad, 0.0)
    whitened = state.whiten(grad)
    return whitened + base.z if stl else whitened


def by_replicate(
    curvatures: Callable[[list[Indices]], list[Array]],
    state: AnyGaussian,
    base: BaseDraws,
    evaluation: Evaluation,
    slopes: Array,
) -> Moments:
    """Estimate the gradient by means of slopes, (n_draws, n_dim), the curvature at the draws of each replicate."""
    rows = [own.start + np.flatnonzero(evaluation.finite[own]) for own in base.replicates()]
    rows = [own for own in rows if len(own)]
    return moments_at_draws(state, np.array([slopes[own].mean(axis=0) for own in rows]), np.array(curvatures(rows)))


def moments_at_draws(state: AnyGaussian, grads: Array, curvatures: Array) -> Moments:
    """Combine independent replicates of whitened gradient and curvature."""
    n_replicates = len(grads)
    grad, curvature = grads.mean(axis=0), curvatures.mean(axis=0)
    errors = np.array([state.add_to_diagonal(c, -1.0).ravel() for c in curvatures])
    u = np.concatenate([grads, errors / np.sqrt(2.0)], axis=1)
    gap, floor, floor_sd = gap_of(u)
    grad_se = curvature_se = np.full(len(grad), np.inf)
    if n_replicates > 1:
        diagonals = np.array([state.curvature_diagonal(c) for c in curvatures])
        grad_se = grads.std(axis=0, ddof=1) / np.sqrt(n_replicates)
        curvature_se = diagonals.std(axis=0, ddof=1) / np.sqrt(n_replicates)
    return Moments(
        grad=grad,
        curvature=curvature,
        grad_se=grad_se,
        curvature_se=curvature_se,
        gap=gap,
        floor=floor,
        floor_sd=floor_sd,
        replicates=u if u.size <= HELD else None,  # else only summaries are kept,
    )


def gap_of(u: Array, v: Array | None = None) -> tuple[float, float, float]:
    """Return gap, floor and the standard deviation of their difference from replicates of the natural gradient.

    These may be given times the inverse curvature of the ELBO as well, where that is not the metric.
    """
    v = u if v is None else v
    n, mean_u, mean_v = len(u), u.mean(axis=0), v.mean(axis=0)
    gap = 0.5 * float(mean_u @ mean_v)
    if n == 1:
        return gap, np.inf, np.inf
    # The gap less its floor is sum_{r != s} u_r.u_s / (2 R ), with variance tr(Cov(u)^2) / (2 R) where the
    # mean of u is 0, and (u_r.u_s)^2 has mean tr(Cov(u)^2). Not centred: centring would add (tr Cov(u) / R)^2.
    products = u @ v.T
    np.fill_diagonal(products, 0.0)
    trace_square = float(np.sum(products * products)) / (n * (n - 1))
    floor = 0.5 * float(np.sum((u - mean_u) * (v - mean_v))) / (n * (n - 1))
    return gap, floor, float(np.sqrt(trace_square / (2.0 * n * (n - 1))))


@dataclass(eq=False)
class Estimator:
    """Evaluates states, and estimates their moments: by means over draws of all coordinates."""

    #: Returns the whitened moments of a Gaussian from a target, the state, base draws, and the evaluation of the state
    #: at these. Draws that are not finite are left out; the scatter between replicates gives the Monte Carlo errors.
    #: With ``stl`` (sticking the landing, the path derivative) gradients are those of log p - log q, which have no
    #: noise at q = p; of log p alone otherwise.
    moments: Callable[..., Moments]
    #: Whether moments take second derivatives of log p.
    uses_hessians: bool = False

    def __post_init__(self) -> None:
        # The reference has each by its name, and so has pickle: rules compare them by identity.
        self.__doc__, self.__module__ = self.moments.__doc__, self.moments.__module__

    def __reduce__(self) -> str:
        """Return the name."""
        return self.moments.__name__

    def evaluate(self, target: Density, state: VariationalState, base: BaseDraws) -> Evaluation:
        """Evaluate log p and its gradient at the draws of a state."""
        theta = state.draws(base.z)
        logp, grad = target.logp_grad(theta)
        return evaluation_of(state, theta, logp, grad)

    def evaluate_each(self, target: Density, states: Sequence[VariationalState], base: BaseDraws) -> list[Evaluation]:
        """Evaluate log p and its gradient at the draws of several states, in one batch."""
        thetas = [state.draws(base.z) for state in states]
        logp, grad = target.logp_grad(np.concatenate(thetas))
        rows = [slice(k * base.n_draws, (k + 1) * base.n_draws) for k in range(len(thetas))]
        return [evaluation_of(q, theta, logp[at], grad[at]) for q, theta, at in zip(states, thetas, rows, strict=True)]


def evaluation_of(state: VariationalState, theta: Array, logp: Array, grad: Array) -> Evaluation:
    """Return what log p and its gradient at draws of a state, (n_draws, n_dim), make of it."""
    finite = np.isfinite(logp) & np.isfinite(grad).all(axis=1)
    elbo = -np.inf
    if finite.any() and state.n_uniform:  # log q at the draws: log p - log q has no noise where q is the posterior
        elbo = float(np.mean(logp[finite] - state.log_density(theta[finite])))
    elif finite.any():  # the mean of log q over draws would only add noise
        elbo = float(logp[finite].mean()) + cast(AnyGaussian, state).entropy()
    return Evaluation(theta, logp, grad, finite, elbo)


def from_outer(
    outer: Callable[[Any], Outer], state: AnyGaussian, base: BaseDraws, evaluation: Evaluation, slopes: Array
) -> Moments:
    """Estimate gradient and curvature from slopes, and from I - A at some of the draws, as outer products."""
    if base.n_replicates == 1:
        keep = slice(None) if evaluation.finite.all() else evaluation.finite
        return PathMoments(state, slopes[keep].mean(axis=0), outer(keep))

    def curvatures(rows: list[Indices]) -> list[Array]:
        return [state.add_to_diagonal(-state.outer_mean(outer(own)), 1.0) for own in rows]

    return by_replicate(curvatures, state, base, evaluation, slopes)


@functools.partial(Estimator, uses_hessians=True)
def price(target: Density, state: AnyGaussian, base: BaseDraws, evaluation: Evaluation, *, stl: bool = True) -> Moments:
    r"""Price's estimator: exact Hessians of log p at the draws [1]_.

    E_q[grad log p] and E_q[hess log p] by their means over draws (the theorems of Bonnet and of Price turn them into
    gradients with respect to the mean and half the covariance). No Monte Carlo error at all in the curvature of a
    quadratic log p; none in its gradient with antithetic draws.

    References
    ----------
    .. [1] M. Opper and C. Archambeau (2009). The variational Gaussian approximation revisited. Neural Computation
       21(3). https://doi.org/10.1162/neco.2008.08-07-592
    """

    def curvatures(rows: list[Indices]) -> list[Array]:
        hessians = mean_hessians(target, [evaluation.theta[own] for own in rows])
        return [hessian.whitened(state) for hessian in hessians]

    return by_replicate(curvatures, state, base, evaluation, slopes_of(state, base, evaluation, stl=stl))


@Estimator
def stein(target: Density, state: AnyGaussian, base: BaseDraws, evaluation: Evaluation, *, stl: bool = True) -> Moments:
    r"""Stein's estimator: the Hessian from gradients alone, symmetrised [1]_.

    By Stein's identity :math:`E_q[\nabla^2 \log p] = E_q[\Sigma^{-1} (\theta - \mu) \nabla \log p^T]`, whitened
    :math:`I - A = E[\mathrm{sym}(w z^T)]` with :math:`w = C^T \nabla(\log p - \log q)`. Unbiased with and without
    symmetrising, which halves the variance of off-diagonal entries and keeps the precision symmetric.

    References
    ----------
    .. [1] W. Lin, M. E. Khan and M. Schmidt (2019). Stein's lemma for the reparameterization trick with exponential
       family mixtures. https://doi.org/10.48550/arXiv.1910.13398
    """
    w, z = slopes_of(state, base, evaluation, stl=stl), base.z

    def outer(own: Any) -> Outer:
        return Outer(np.concatenate([w[own], z[own]]), np.concatenate([z[own], w[own]]), 0.0 if stl else 1.0)

    return from_outer(outer, state, base, evaluation, w)


@Estimator
def pathwise(
    target: Density, state: AnyGaussian, base: BaseDraws, evaluation: Evaluation, *, stl: bool = True
) -> Moments:
    r"""Reparametrisation through the Cholesky factor: what automatic differentiation of one draw gives [1]_ [2]_.

    The gradient in the factor is the *lower triangle* of :math:`E[w z^T]`, :math:`w = C^T \nabla(\log p - \log q)` (for
    a factor of the precision: of :math:`E[z v^T]`); mirrored at the diagonal it is an unbiased estimate of I - A. It
    differs from Stein's estimator in that each off-diagonal entry rests on one of its two products instead of their
    mean.

    References
    ----------
    .. [1] K. Wu and J. R. Gardner (2024). Understanding stochastic natural gradient variational inference. ICML.
       https://doi.org/10.48550/arXiv.2406.01870
    .. [2] M. Titsias and M. Lazaro-Gredilla (2014). Doubly stochastic variational Bayes for non-conjugate inference.
       ICML. https://proceedings.mlr.press/v32/titsias14.html
    """
    w = slopes_of(state, base, evaluation, stl=stl)
    left, right = (w, base.z) if state.factor_sign > 0 else (base.z, w)
    return from_outer(lambda own: Outer(left[own], right[own], 0.0 if stl else 1.0), state, base, evaluation, w)


@Estimator
def score(target: Density, state: AnyGaussian, base: BaseDraws, evaluation: Evaluation, *, stl: bool = True) -> Moments:
    r"""Score-function estimator (REINFORCE): from values of log p alone [1]_ [2]_.

    With :math:`h = \log p - \log q` (without sticking the landing: :math:`\log p`), whitened:
    :math:`C^T E_q[\nabla h] = E[h z]` and :math:`I - A = E[h (z z^T - I)]`. From h is taken its mean over the draws of
    the other replicates, which are independent (of a single one, over the other pairs): that leaves the estimate
    unbiased, and without noise at q = p.

    References
    ----------
    .. [1] R. J. Williams (1992). Simple statistical gradient-following algorithms for connectionist reinforcement
       learning. Machine Learning 8. https://doi.org/10.1007/BF00992696
    .. [2] M. E. Khan, R. Babanezhad, W. Lin, M. Schmidt and M. Sugiyama (2016). Faster stochastic variational inference
       using proximal-gradient methods with general divergence functions. UAI. https://doi.org/10.48550/arXiv.1511.00146
    """
    z, finite = base.z, evaluation.finite
    h = np.where(finite, evaluation.logp + (0.5 * np.sum(z * z, axis=1) if stl else 0.0), 0.0)
    parts = base.pairs() if base.n_replicates == 1 else np.arange(len(h)).reshape(base.n_replicates, -1)
    sums, counts = h[parts].sum(axis=1), finite[parts].sum(axis=1)
    h[parts] -= ((sums.sum() - sums) / np.maximum(counts.sum() - counts, 1))[:, None]

    def outer(own: Any) -> Outer:
        return Outer(h[own, None] * z[own], z[own], (0.0 if stl else 1.0) - float(h[own].mean()))

    return from_outer(outer, state, base, evaluation, h[:, None] * z)


@functools.partial(Estimator, uses_hessians=True)
def gauss_newton(
    target: Density, state: AnyGaussian, base: BaseDraws, evaluation: Evaluation, *, stl: bool = True
) -> Moments:
    r"""Gauss-Newton estimator: squares of per-observation gradients in place of the likelihood's Hessian [1]_.

    With the natural-parameter update this is variational online Gauss-Newton (VON, and VOGN for a diagonal):
    :math:`-E_q[\nabla^2 \log p]` is replaced by :math:`E_q[\sum_i g_i g_i^T]`, with :math:`g_i = \nabla \log p(y_i |
    \theta)`, plus the exact curvature of the prior. For a diagonal these are sums of squares, not the square of the
    sum. Never negative for the likelihood; biased where the model is misspecified: the fixed point is not the best q,
    but near it for many observations.

    References
    ----------
    .. [1] M. E. Khan and D. Nielsen (2018). Fast yet simple natural-gradient descent for variational inference in
       complex models. ISITA. https://doi.org/10.23919/ISITA.2018.8664326
    """
    matrix: Callable[[Array], MeanHessian] | None = getattr(target, "gauss_newton", None)
    if matrix is None:
        raise ValueError("gauss_newton takes the gradients of single observations: this target has none.")

    def curvatures(rows: list[Indices]) -> list[Array]:
        return [matrix(evaluation.theta[own]).whitened(state) for own in rows]

    return by_replicate(curvatures, state, base, evaluation, slopes_of(state, base, evaluation, stl=stl))


@dataclass(frozen=True)
class ExactEvaluation(Evaluation):
    """An expectation in place of draws, of which there are none; ``finite`` has one element, for the expectation."""

    expectation: Expectation

    @classmethod
    def of(cls, expectation: Expectation, elbo: float) -> Self:
        """Return what an expectation makes of a state, whose ELBO is -inf where there is none."""
        none = np.empty((0, len(expectation.grad)))
        return cls(none, np.empty(0), none, np.array([np.isfinite(elbo)]), elbo, expectation)


@dataclass(eq=False)
class Quadrature(Estimator):
    """Evaluates states by expectations in the place of draws."""

    uses_hessians: bool = True

    def evaluate(self, target: Density, state: VariationalState, base: BaseDraws) -> ExactEvaluation:
        """Take the expectation of log p under a Gaussian; there are no base draws.

        Raises
        ------
        ValueError
            If the target is no `RowsTarget`.
        """
        return self.by_rules(target, cast(AnyGaussian, state))

    def by_rules(
        self,
        target: Density,
        state: AnyGaussian,
        rules: RowRules | None = None,
        *,
        adapt: bool = False,
        least: float = -np.inf,
    ) -> ExactEvaluation:
        """As `evaluate`, by rules that are given; see `RowsTarget.expected`, where ``least`` is without the entropy."""
        if not hasattr(target, "expected"):
            raise ValueError("quadrature goes through the rows of log p: this target has none.")
        entropy = state.entropy()
        expectation = cast(RowsTarget, target).expected(state, rules, adapt=adapt, least=least - entropy)
        finite = bool(np.isfinite(expectation.value) and np.isfinite(expectation.grad).all())
        return ExactEvaluation.of(expectation, expectation.value + entropy if finite else -np.inf)


@Quadrature
def quadrature(
    target: Density, state: AnyGaussian, base: BaseDraws, evaluation: Evaluation, *, stl: bool = True
) -> Moments:
    r"""Exact expectations of rows, by quadrature in the space of their predictors.

    Under a Gaussian q a row of log p sees no more than the Gaussian of the few predictors that it is a function of. Its
    expectation, and those of its first and second derivatives, are integrals of few dimensions: no Monte Carlo
    error, no draws, and an ELBO that says of itself whether a step has gained anything [1]_.

    References
    ----------
    .. [1] M. Opper and C. Archambeau (2009). The variational Gaussian approximation revisited. Neural Computation
       21(3). https://doi.org/10.1162/neco.2008.08-07-592
    """
    expectation = cast(ExactEvaluation, evaluation).expectation
    grad: Array = state.whiten(expectation.grad[None])[0]
    curvature = expectation.hessian.whitened(state)
    error = state.add_to_diagonal(curvature, -1.0).ravel()
    gap = 0.5 * float(grad @ grad) + 0.25 * state.inner(error, error)
    none = np.zeros(len(grad))
    return Moments(grad, curvature, none, none, gap=gap, floor=0.0, floor_sd=0.0)


#: Draws that the curvature is averaged over, and dimensions beyond which it is left alone.
_N_DRAWS, _MAX_DIM = 16, 2_000
#: Part of a gap that is seen in the family's own metric, at the least that was met.
SEEN = 0.1


def in_full_metric(target: Density, q: AnyGaussian, theta: Array, moments: Moments) -> Moments | None:
    """Return moments whose gap, floor and floor_sd count errors of the mean by the full curvature of log p.

    In such a family the Fisher information is not the curvature of the ELBO: an error of the mean along a direction in
    which the posterior is correlated counts for too little in 1/2 |natural gradient|^2, by a factor of ten or more.
    """
    u, n = moments.replicates, len(moments.grad)
    if u is None or not target.has_hessian or q.n_dim > _MAX_DIM:
        return None
    directions = q.draws(np.eye(q.n_dim)) - q.location  # the rows of C^T
    products = target.mean_hessian(theta[:_N_DRAWS]).products(directions)
    factor = cholesky(symmetrise(-q.whiten(products)))
    if factor is None:
        return None
    errors = solve_lower(factor, u[:, :n].T).T
    gap, floor, floor_sd = gap_of(np.concatenate([errors, u[:, n:]], axis=1))
    return replace(moments, gap=gap, floor=floor, floor_sd=floor_sd)


ESTIMATORS: dict[str, Estimator] = {
    "price": price,
    "stein": stein,
    "pathwise": pathwise,
    "score": score,
    "gauss_newton": gauss_newton,
    "quadrature": quadrature,
}

__all__ = [
    "ESTIMATORS",
    "Estimator",
    "Quadrature",
    "gauss_newton",
    "pathwise",
    "price",
    "quadrature",
    "score",
    "stein",
]
