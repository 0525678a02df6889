"""Targets whose best Gaussian approximation is known: log densities in NumPy, and PyMC models with their answers.

The answers come from formulas or quadrature of their own, never from the package: densities are written out by hand
with their Jacobians, expectations under a Gaussian are Gauss-Hermite sums.
"""

import functools

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pymc as pm

from scipy import optimize, stats
from scipy.special import digamma, expit, gammaln, polygamma

from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.core.types import MatrixHessian, MeanHessian

LOG_2PI = np.log(2 * np.pi)


def gaussian_entropy(cov):
    """Return the entropy of N(., cov)."""
    return 0.5 * (len(cov) * (LOG_2PI + 1.0) + np.linalg.slogdet(cov)[1])


def random_covariance(rng, n_dim, condition=30.0):
    """Return a covariance with random eigenvectors, eigenvalues from 1/condition to 1."""
    vectors = np.linalg.qr(rng.standard_normal((n_dim, n_dim)))[0]
    return (vectors * np.geomspace(1.0 / condition, 1.0, n_dim)) @ vectors.T


def block_labels(n_dim):
    """Return the block of each coordinate, as everywhere in the tests: pairs that interleave, and single ones."""
    order = np.arange(n_dim)
    return np.where(order % 3 == 2, n_dim + order, 2 * (order // 6) + order % 3 % 2)


def restrict(family, matrix):
    """Return the entries of a matrix that a family of Gaussians stores, the others 0.

    ``family`` is a name, or a tuple with the block of each coordinate, negative where it may touch all blocks.
    """
    if family in ("full", "full precision", "sparse"):  # as it is in the tests, none leaves anything out
        return matrix
    if family == "diagonal":
        return np.diag(np.diag(matrix))
    labels = block_labels(len(matrix)) if family == "block" else np.asarray(family)
    return np.where((labels[:, None] == labels) | (labels[:, None] < 0) | (labels < 0), matrix, 0.0)


# --- log densities in NumPy -------------------------------------------------------------------------------------------


class NumpyHessian(MeanHessian):
    """Asks the target for what it is asked, and counts as one evaluation at each draw."""

    def __init__(self, target, theta):
        self.target, self.theta, self.counted = target, theta, False

    @property
    def pattern(self):
        return self.target.pattern

    def products(self, directions):
        return self._counting(self.target._products, directions)

    def values(self):
        return self._counting(self.target._values)

    def diagonal(self):
        return self._counting(self.target._diagonal)

    def _counting(self, evaluate, *args):
        if not self.counted:
            self.target.n_hessians += len(self.theta)
            self.counted = True
        return evaluate(self.theta, *args)


class NumpyTarget:
    """A `Target`; the subclass gives ``_logp``, ``_grad``, ``_hessians``, all over rows of ``theta``."""

    has_hessian, has_minibatch = True, False

    def __init__(self, n_dim):
        self.n_dim = n_dim
        self.n_gradients = self.n_hessians = 0

    def logp_grad(self, theta):
        self.n_gradients += len(theta)
        with np.errstate(all="ignore"):  # as a LogDensity: far out, a density may overflow
            return self._logp(theta), self._grad(theta)

    def mean_hessian(self, theta):
        return NumpyHessian(self, theta)

    def _products(self, theta, directions):
        return directions @ self._hessians(theta).mean(axis=0)

    @functools.cached_property
    def pattern(self):
        return Pattern.of(np.ones((self.n_dim, self.n_dim)))

    def _values(self, theta):
        return self._hessians(theta).mean(axis=0)[self.pattern.rows, self.pattern.cols]

    def _diagonal(self, theta):
        return np.diagonal(self._hessians(theta).mean(axis=0))

    def next_batch(self, rng):
        """Do nothing: the data are always all there."""

    n_batches = 1

    def take_batch(self, seed, number):
        self.next_batch(np.random.default_rng([seed, number, 1]))  # not the stream of the draws

    def fresh(self):
        """Return the same density with its counters at 0."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__, n_gradients=0, n_hessians=0)
        return new


class Quadratic(NumpyTarget):
    """log p = log N(theta | mean, precision^-1) + log_evidence: every answer in closed form."""

    def __init__(self, mean, precision, log_evidence=0.0):
        super().__init__(len(mean))
        self.mean, self.precision, self.log_evidence = np.asarray(mean), np.asarray(precision), log_evidence
        self._peak = 0.5 * (np.linalg.slogdet(self.precision)[1] - self.n_dim * LOG_2PI) + log_evidence

    def _logp(self, theta):
        centred = theta - self.mean
        return self._peak - 0.5 * np.einsum("ni,ij,nj->n", centred, self.precision, centred)

    def _grad(self, theta):
        return (self.mean - theta) @ self.precision

    def _hessians(self, theta):
        return np.broadcast_to(-self.precision, (len(theta), self.n_dim, self.n_dim))

    def elbo(self, mean, cov):
        """Return the ELBO of N(mean, cov)."""
        return self._logp(mean[None])[0] - 0.5 * np.trace(self.precision @ cov) + gaussian_entropy(cov)

    def optimum(self, family):
        """Return mean and covariance of the best approximation."""
        return self.mean, np.linalg.inv(restrict(family, self.precision))


class Glm(NumpyTarget):
    """Regression with a canonical link and prior N(0, prior_sd^2): expectations are one-dimensional integrals."""

    def __init__(self, design, y, cumulant, prior_sd):
        super().__init__(design.shape[1])
        self.design, self.y, self.prior_sd = design, y, prior_sd
        self._cumulant, self._slope, self._curvature = cumulant

    def _logp(self, theta):
        eta = theta @ self.design.T
        prior = -0.5 * np.sum((theta / self.prior_sd) ** 2, axis=-1)
        return np.sum(self.y * eta - self._cumulant(eta), axis=-1) + prior - self._prior_constant

    def _grad(self, theta):
        return (self.y - self._slope(theta @ self.design.T)) @ self.design - theta / self.prior_sd**2

    def _hessians(self, theta):
        weights = self._curvature(theta @ self.design.T)
        return -np.einsum("ki,nk,kj->nij", self.design, weights, self.design) - np.eye(self.n_dim) / self.prior_sd**2

    def gauss_newton(self, theta):
        self.n_hessians += len(theta)
        squares = np.mean((self.y - self._slope(theta @ self.design.T)) ** 2, axis=0)
        return MatrixHessian(-(self.design.T * squares) @ self.design - np.eye(self.n_dim) / self.prior_sd**2)

    @property
    def _prior_constant(self):
        return self.n_dim * (np.log(self.prior_sd) + 0.5 * LOG_2PI)

    def _over_predictor(self, function, mean, cov):
        """Return E[function(eta_i)], (n,), for eta_i = x_i^T theta."""
        nodes, weights = _hermite(100)
        centre = self.design @ mean
        spread = np.sqrt(np.einsum("ki,ij,kj->k", self.design, cov, self.design))
        return function(centre[:, None] + spread[:, None] * nodes) @ weights

    def elbo(self, mean, cov):
        """Return the ELBO of N(mean, cov)."""
        likelihood = self.y @ (self.design @ mean) - np.sum(self._over_predictor(self._cumulant, mean, cov))
        prior = -0.5 * (mean @ mean + np.trace(cov)) / self.prior_sd**2 - self._prior_constant
        return likelihood + prior + gaussian_entropy(cov)

    def moments(self, mean, cov):
        """Return E[grad log p] and -E[hess log p] under N(mean, cov)."""
        grad = self.design.T @ (self.y - self._over_predictor(self._slope, mean, cov)) - mean / self.prior_sd**2
        weights = self._over_predictor(self._curvature, mean, cov)
        return grad, self.design.T @ (weights[:, None] * self.design) + np.eye(self.n_dim) / self.prior_sd**2

    @functools.cache  # noqa: B019 (targets live as long as the tests)
    def optimum(self, family):
        """Return mean and covariance of the best approximation: the ELBO is concave, its stationary point is it."""
        mean, cov = np.zeros(self.n_dim), np.eye(self.n_dim) * 0.01
        for _ in range(2000):
            grad, curvature = self.moments(mean, cov)
            target = restrict(family, curvature)
            error = max(np.abs(grad @ cov @ grad), np.abs(target @ cov - np.eye(self.n_dim)).max())
            if error < 1e-11:
                return mean, cov
            mean = mean + 0.5 * np.linalg.solve(curvature, grad)
            cov = np.linalg.inv(0.5 * np.linalg.inv(cov) + 0.5 * target)
        raise AssertionError("the optimum was not found")


LOGISTIC = (lambda eta: np.logaddexp(0.0, eta), expit, lambda eta: expit(eta) * expit(-eta))
POISSON = (np.exp, np.exp, np.exp)


@functools.cache
def logistic(n=60, n_dim=5, seed=1, prior_sd=3.0):
    """Return a logistic regression on correlated predictors."""
    rng = np.random.default_rng(seed)
    design = rng.standard_normal((n, n_dim)) @ np.linalg.cholesky(random_covariance(rng, n_dim)).T * 2.0
    y = rng.random(n) < expit(design @ rng.standard_normal(n_dim))
    return Glm(design, y.astype(float), LOGISTIC, prior_sd)


@functools.cache
def poisson(n=30, n_dim=4, seed=2, prior_sd=2.0):
    """Return a Poisson regression (without the constant log y!)."""
    rng = np.random.default_rng(seed)
    design = np.column_stack([np.ones(n), rng.standard_normal((n, n_dim - 1)) * 0.7])
    y = rng.poisson(np.exp(design @ (0.5 * rng.standard_normal(n_dim))))
    return Glm(design, y.astype(float), POISSON, prior_sd)


class Separable(NumpyTarget):
    """A sum of functions of one coordinate each, given with two derivatives."""

    def __init__(self, n_dim, logp, grad, hessian):
        super().__init__(n_dim)
        self._functions = logp, grad, hessian

    def _logp(self, theta):
        return self._functions[0](theta).sum(axis=-1)

    def _grad(self, theta):
        return self._functions[1](theta)

    def _hessians(self, theta):
        return self._functions[2](theta)[:, :, None] * np.eye(self.n_dim)


def cauchy(n_dim=3):
    """Return independent standard Cauchy variables: tails in which the Hessian has the wrong sign."""
    return Separable(
        n_dim,
        lambda t: -np.log1p(t**2),
        lambda t: -2 * t / (1 + t**2),
        lambda t: -2 * (1 - t**2) / (1 + t**2) ** 2,
    )


def kinked(n_dim=3):
    """Return independent Laplace variables: the Hessian is 0 wherever it exists, and misses the kink."""
    return Separable(n_dim, lambda t: -np.abs(t), lambda t: -np.sign(t), np.zeros_like)


def flat(n_dim=3):
    """Return a density with no curvature and no slope: there is no best Gaussian."""
    return Separable(n_dim, np.zeros_like, np.zeros_like, np.zeros_like)


class Walled(NumpyTarget):
    """Another target with a log density of NaN, and a gradient of inf, where the first coordinate exceeds a wall."""

    def __init__(self, inside, wall):
        super().__init__(inside.n_dim)
        self.inside, self.wall = inside, wall

    def _outside(self, theta):
        return theta[:, 0] > self.wall

    def _logp(self, theta):
        return np.where(self._outside(theta), np.nan, self.inside._logp(theta))

    def _grad(self, theta):
        return np.where(self._outside(theta)[:, None], np.inf, self.inside._grad(theta))

    def _hessians(self, theta):
        return np.where(self._outside(theta)[:, None, None], np.nan, self.inside._hessians(theta))


# --- quadrature in one and two dimensions -----------------------------------------------------------------------------


@functools.cache
def _hermite(n_nodes):
    """Return nodes and weights of an expectation under N(0, 1)."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(n_nodes)
    return nodes, weights / weights.sum()


class Quadrature:
    """ELBOs and best Gaussians of a log density on one or two unconstrained coordinates.

    ``logp`` maps points, (n, n_dim), to (n,).
    """

    def __init__(self, n_dim, logp, n_nodes=60):
        self.n_dim, self._logp = n_dim, logp
        nodes, weights = _hermite(n_nodes)
        self._z = np.stack([axis.ravel() for axis in np.meshgrid(*[nodes] * n_dim, indexing="ij")], axis=1)
        self._weights = functools.reduce(np.multiply.outer, [weights] * n_dim).ravel()

    def elbo(self, mean, cov):
        """Return the ELBO of N(mean, cov)."""
        theta = mean + self._z @ np.linalg.cholesky(cov).T
        return self._weights @ self._logp(theta) + gaussian_entropy(cov)

    @functools.cache  # noqa: B019 (targets live as long as the tests)
    def optimum(self, family):
        """Return mean and covariance of the best approximation, by numerical maximisation of the ELBO."""
        below = np.nonzero(np.tril(restrict(family, np.ones((self.n_dim,) * 2)), -1))

        def unpack(x):
            factor = np.diag(np.exp(x[self.n_dim : 2 * self.n_dim]))
            factor[below] = x[2 * self.n_dim :]
            return x[: self.n_dim], factor @ factor.T

        n_parameters = 2 * self.n_dim + len(below[0])
        # Bounds keep the line search where exp does not overflow.
        bounds = [(-5, 5)] * self.n_dim + [(-4, 1)] * self.n_dim + [(-5, 5)] * (n_parameters - 2 * self.n_dim)
        start = np.repeat([0.5, -1.0, 0.0], [self.n_dim, self.n_dim, n_parameters - 2 * self.n_dim])
        found = optimize.minimize(lambda x: -self.elbo(*unpack(x)), start, bounds=bounds, tol=1e-13)
        assert np.abs(found.jac).max() < 1e-5
        return unpack(found.x)


# --- PyMC models ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Posterior:
    """A PyMC model with the answer.

    Parameters
    ----------
    name : str
    build : callable
        Returns the model, the same each time: it is compiled once where `_compiled_once` is in use.
    value_names : tuple of str
        Names of the value variables, in the order of the coordinates of ``exact``.
    exact : Quadratic or Quadrature
        Knows the ELBO of any Gaussian, and the best one of each family.
    gaussian : bool
        log p is quadratic on the unconstrained scale.
    """

    name: str
    build: Callable[[], pm.Model]
    value_names: tuple[str, ...]
    exact: Quadratic | Quadrature
    gaussian: bool

    def __post_init__(self) -> None:
        object.__setattr__(self, "build", functools.cache(self.build))


def _correlated_normal(n_dim, condition, name):
    rng = np.random.default_rng(n_dim)
    mu, cov = rng.standard_normal(n_dim), random_covariance(rng, n_dim, condition)

    def build():
        with pm.Model() as model:
            pm.MvNormal("x", mu, cov=cov)
        return model

    return Posterior(name, build, ("x",), Quadratic(mu, np.linalg.inv(cov)), True)


def _several_variables():
    """Declared in an order that is not alphabetical, with three shapes and a transform that makes one Gaussian."""
    mu = {"z": np.array([5.0, -5.0]), "a_log__": np.array(0.7), "m": np.arange(6.0).reshape(2, 3) / 3}
    sd = {"z": np.array([0.5, 2.0]), "a_log__": np.array(0.3), "m": np.array([[0.1, 1, 10], [0.2, 2, 20]])}

    def build():
        with pm.Model() as model:
            pm.Normal("z", mu["z"], sd["z"])
            pm.LogNormal("a", mu["a_log__"], sd["a_log__"])
            pm.Normal("m", mu["m"], sd["m"])
        return model

    flat_mu, flat_sd = (np.concatenate([np.ravel(part[name]) for name in mu]) for part in (mu, sd))
    return Posterior("several variables", build, tuple(mu), Quadratic(flat_mu, np.diag(flat_sd**-2.0)), True)


def _linear_regression():
    """Linear regression with known noise; slopes are declared before the intercept."""
    rng = np.random.default_rng(4)
    x = rng.standard_normal((40, 3)) @ np.array([[1, 0.9, 0], [0, 0.4, 0], [0, 0, 3.0]]) + 2.0
    y = x @ np.array([1.0, -2.0, 0.3]) + 4.0 + 0.5 * rng.standard_normal(40)
    design = np.column_stack([x, np.ones(40)])
    prior_variance = np.array([1.0, 1.0, 1.0, 100.0])
    precision = design.T @ design / 0.5**2 + np.diag(1 / prior_variance)
    mean = np.linalg.solve(precision, design.T @ y / 0.5**2)
    marginal = stats.multivariate_normal(np.zeros(40), design * prior_variance @ design.T + 0.5**2 * np.eye(40))

    def build():
        with pm.Model() as model:
            slopes = pm.Normal("slopes", 0, 1, shape=3)
            intercept = pm.Normal("intercept", 0, 10)
            pm.Normal("y", intercept + x @ slopes, 0.5, observed=y)
        return model

    exact = Quadratic(mean, precision, marginal.logpdf(y))
    return Posterior("linear regression", build, ("slopes", "intercept"), exact, True)


def _half_normal():
    def build():
        with pm.Model() as model:
            pm.HalfNormal("scale", 2.0)
        return model

    def logp(theta):
        log_scale = theta[:, 0]
        return stats.halfnorm(scale=2.0).logpdf(np.exp(log_scale)) + log_scale

    return Posterior("half-normal", build, ("scale_log__",), Quadrature(1, logp), False)


def _interval():
    def build():
        with pm.Model() as model:
            p = pm.Uniform("p", -1.0, 3.0)
            pm.Normal("y", p, 1.0, observed=2.5)
        return model

    def logp(theta):
        share = expit(theta[:, 0])
        likelihood = stats.norm.logpdf(2.5, -1.0 + 4.0 * share, 1.0)
        return likelihood - np.log(4.0) + np.log(4.0 * share * (1 - share))

    return Posterior("interval", build, ("p_interval__",), Quadrature(1, logp), False)


def _simplex():
    """A Dirichlet: with v = (u, -sum u), x = softmax(v), and |dx/du| is 3 times the product of x."""
    alpha = np.array([6.0, 3.0, 8.0])

    def build():
        with pm.Model() as model:
            pm.Dirichlet("w", alpha)
        return model

    def logp(u):
        v = np.column_stack([u, -u.sum(axis=1)])
        log_x = v - np.logaddexp.reduce(v, axis=1)[:, None]
        return log_x @ alpha + np.log(3.0) + gammaln(alpha.sum()) - gammaln(alpha).sum()

    return Posterior("simplex", build, ("w_simplex__",), Quadrature(2, logp), False)


def _ordered():
    """Two ordered normals, a < b: u = (a, log(b - a))."""
    mu, sd = np.array([-1.0, 1.5]), np.array([1.0, 0.7])

    def build():
        ordered = pm.distributions.transforms.ordered
        with pm.Model() as model:
            pm.Normal("x", mu, sd, transform=ordered, initval=[-1.0, 1.0])
        return model

    def logp(u):
        a, b = u[:, 0], u[:, 0] + np.exp(u[:, 1])
        return stats.norm.logpdf(a, mu[0], sd[0]) + stats.norm.logpdf(b, mu[1], sd[1]) + u[:, 1]

    return Posterior("ordered", build, ("x_ordered__",), Quadrature(2, logp), False)


POSTERIORS = (
    _correlated_normal(3, 50.0, "correlated normal"),
    _correlated_normal(50, 1e4, "50 dimensions, condition 1e4"),
    _several_variables(),
    _linear_regression(),
    _half_normal(),
    _interval(),
    _simplex(),
    _ordered(),
)


@dataclass(frozen=True)
class RawRegression:
    """Linear regression on raw predictors, unknown noise variance, conjugate prior: moments in closed form.

    The predictors lie around 100 with standard deviations from .01 to 100, so that the posterior standard deviations
    of the coefficients span four orders of magnitude. beta | s2 ~ N(0, s2 10^6 I), s2 ~ InverseGamma(2, 1).
    """

    n: int = 120
    seed: int = 6

    @functools.cached_property
    def _data(self):
        rng = np.random.default_rng(self.seed)
        spread = np.array([0.01, 1.0, 100.0])
        x = 100.0 + spread * rng.standard_normal((self.n, 3))
        return x, (x - 100.0) @ (np.array([2.0, -1.0, 1.5]) / spread) + 3.0 * rng.standard_normal(self.n) + 20.0

    @functools.cache  # noqa: B019 (targets live as long as the tests)
    def build(self):
        """Return the model; the intercept is the last variable."""
        x, y = self._data
        with pm.Model() as model:
            variance = pm.InverseGamma("variance", 2.0, 1.0)
            slopes = pm.Normal("slopes", 0, 1e3 * pm.math.sqrt(variance), shape=3)
            intercept = pm.Normal("intercept", 0, 1e3 * pm.math.sqrt(variance))
            pm.Normal("y", intercept + x @ slopes, pm.math.sqrt(variance), observed=y)
        return model

    def moments(self):
        """Return means and standard deviations of log variance, slopes, intercept."""
        x, y = self._data
        design = np.column_stack([x, np.ones(self.n)])
        # QR of the augmented system: the normal equations would lose half the digits.
        stacked = np.vstack([design, 1e-3 * np.eye(4)])
        beta, _, _, _ = np.linalg.lstsq(stacked, np.append(y, np.zeros(4)))
        a = 2.0 + self.n / 2
        b = 1.0 + 0.5 * np.sum((np.append(y, np.zeros(4)) - stacked @ beta) ** 2)
        r = np.linalg.qr(stacked, mode="r")
        unscaled = np.sqrt(np.sum(np.linalg.inv(r) ** 2, axis=1))
        mean = np.append(np.log(b) - digamma(a), beta)
        return mean, np.append(np.sqrt(polygamma(1, a)), unscaled * np.sqrt(b / (a - 1)))


def random_intercepts():
    """Return a logistic GLMM with 20 groups on made-up data: hierarchical, moderately far from Gaussian."""
    rng = np.random.default_rng(7)
    group = np.repeat(np.arange(20), 6)
    x = rng.standard_normal(120)
    y = rng.random(120) < expit(-0.5 + 0.8 * x + 1.2 * rng.standard_normal(20)[group])
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 10, shape=2)
        sd = pm.HalfNormal("sd", 2)
        z = pm.Normal("z", 0, 1, shape=20)
        pm.Bernoulli("y", logit_p=beta[0] + beta[1] * x + sd * z[group], observed=y.astype(int))
    return model
