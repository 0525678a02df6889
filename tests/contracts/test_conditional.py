"""Natural gradients of conditional exponential families, against F^-1 grad by finite differences and closed forms."""

from dataclasses import dataclass

import numpy as np
import pytest

from conditional_family import (
    GaussianMixture,
    NaturalParameters,
    Points,
    StudentT,
    natural_gradient,
    stepped,
)
from fisher import Coordinates, case, derivatives, gradient_of
from scipy import stats
from scipy.special import gammaln
from targets import logistic, poisson, random_covariance
from texts import DOCS, blocks, run

from pymc_ngvi.families import FullState, MixtureState

PAGE = DOCS / "extending.md"

pytestmark = pytest.mark.usefixtures("_one_blas_thread")
each_target = pytest.mark.parametrize("make", [logistic, poisson])
each_size = pytest.mark.parametrize(("n_dim", "n_components"), [(d, k) for d in (1, 2) for k in (2, 3)])


def together(parameters):
    """Return natural parameters, or a direction in them, as one vector."""
    return np.concatenate([parameters.conditional, parameters.mixing])


def density_of(target):
    return lambda theta: target.logp_grad(theta)[0]


# --- mixtures of Gaussians --------------------------------------------------------------------------------------------


def of_mixture(make, n_dim, n_components):
    """Return exact expectations of a mixture, the family, and the natural gradient by quadrature."""
    this, family = case(make, "full", n_dim, n_components), GaussianMixture(n_dim, n_components)
    x = family.parameters(this.q)
    return this, x, natural_gradient(family, x, density_of(this.target), family.quadrature(x, 60))


@each_target
@each_size
def test_mixture_is_the_inverse_fisher_information_times_the_gradient(make, n_dim, n_components):
    this, x, found = of_mixture(make, n_dim, n_components)
    np.testing.assert_allclose(together(x), this.x, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(together(found), this.direction, atol=2e-5 * np.abs(this.direction).max())
    assert found.elbo == pytest.approx(this.truth.elbo(this.x), abs=1e-6)


@pytest.mark.parametrize("unit", [1e-9, 1e9])
def test_natural_parameters_have_no_scale_of_their_own(unit):
    """Prices in the local currency: a precision of 1e-18 is positive definite all the same."""
    q = MixtureState.of([FullState(unit * np.array([1.0, 2.0]), unit * np.array([[1.0, 0.0], [0.9, 0.5]]))], [0.0])
    family = GaussianMixture(2, 1)
    again = family.state(family.parameters(q)).components[0]
    np.testing.assert_allclose(again.mean(), q.components[0].mean(), rtol=1e-10)
    np.testing.assert_allclose(again.factor, q.components[0].factor, rtol=1e-10)


# --- continuous mixtures ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Continuous:
    """F^-1 grad of a continuous mixture by brute force: log densities as functions of all natural parameters.

    Parameters
    ----------
    log_marginal : callable
        Parameters and points to log q(theta).
    log_joint : callable
        Parameters, points and w to log q(w, theta), but for terms without parameters.
    """

    log_marginal: object
    log_joint: object

    def elbo(self, x, logp, theta, volumes):
        """Return the ELBO by summation over a grid of theta, with the volumes of its cells."""
        log_q = self.log_marginal(x, theta)
        return np.sum(volumes * np.exp(log_q) * (logp(theta) - log_q))

    def direction(self, x, logp, grid, points):
        """Return F^-1 grad; expectations over w and theta together are sums over weighted points."""
        scores = derivatives(lambda y: self.log_joint(y, points.theta, points.w), x)
        return np.linalg.solve(
            (scores * points.weights) @ scores.T, gradient_of(lambda y: self.elbo(y, logp, *grid), x)
        )


def grid_around(centre, scale):
    """Return points along every coordinate, dense in the middle and wide in the tails, and the volumes of cells."""
    n_dim = len(centre)
    u = np.linspace(-9.0, 9.0, 901 if n_dim == 1 else 301)
    axes = np.meshgrid(*[np.sinh(u)] * n_dim, indexing="ij")
    volumes = np.prod(np.meshgrid(*[np.cosh(u) * (u[1] - u[0])] * n_dim, indexing="ij"), axis=0)
    return centre + scale * np.stack([a.ravel() for a in axes], axis=1), volumes.ravel() * scale**n_dim


def points_of(w, weights, mean, root, shift=0.0, n_nodes=24):
    """Return weighted points, theta = mean + shift w + root z, or (``shift`` None) mean + sqrt(w) root z."""
    nodes, of_z = np.polynomial.hermite_e.hermegauss(n_nodes)
    z = np.stack([a.ravel() for a in np.meshgrid(*[nodes] * len(mean), indexing="ij")], axis=1)
    of_z = np.prod(np.meshgrid(*[of_z / of_z.sum()] * len(mean), indexing="ij"), axis=0).ravel()
    w, z = np.repeat(w, len(z)), np.tile(z, (len(w), 1))
    spread = np.sqrt(w)[:, None] if shift is None else 1.0
    moved = 0.0 if shift is None else shift * w[:, None]
    return Points(mean + moved + spread * (z @ root.T), w, np.outer(weights / weights.sum(), of_z).ravel())


def student_by_brute_force(n_dim):
    coordinates = Coordinates("natural", "full", n_dim)

    def log_marginal(x, theta):
        mean, scale = coordinates.gaussian(x[:-1])
        return stats.multivariate_t(mean, scale, df=2 * x[-1]).logpdf(theta)

    def log_joint(x, theta, w):
        (mean, scale), a = coordinates.gaussian(x[:-1]), x[-1]
        apart = theta - mean
        square = np.einsum("ni,ni->n", apart, np.linalg.solve(scale, apart.T).T) / w
        of_w = a * np.log(a) - gammaln(a) - a * (np.log(w) + 1.0 / w)
        return of_w - 0.5 * square - 0.5 * np.linalg.slogdet(scale)[1]

    return Continuous(log_marginal, log_joint)


def student(n_dim, shape=3.2):
    """Return location, scale, family and natural parameters of a Student t."""
    rng = np.random.default_rng(n_dim)
    mean, scale = 0.4 * rng.standard_normal(n_dim), 0.4 * random_covariance(rng, n_dim, 2.0)
    family = StudentT(n_dim)
    return mean, scale, family, family.parameters(FullState(mean, np.linalg.cholesky(scale)), shape)


@pytest.mark.parametrize("n_dim", [1, 2])
@pytest.mark.parametrize("seed", [1, 2])
def test_student_t_is_the_inverse_fisher_information_times_the_gradient(n_dim, seed):
    target, (mean, scale, family, x) = logistic(n=20, n_dim=n_dim, seed=seed), student(n_dim)
    log_w = np.linspace(-4.5, 9.0, 120)
    weights = stats.invgamma(3.2, scale=3.2).pdf(np.exp(log_w)) * np.exp(log_w)
    points = points_of(np.exp(log_w), weights, mean, np.linalg.cholesky(scale), None)
    truth = student_by_brute_force(n_dim)
    direction = truth.direction(together(x), density_of(target), grid_around(mean, 0.5), points)
    found = natural_gradient(family, x, density_of(target), family.quadrature(x, 60))
    np.testing.assert_allclose(together(found), direction, atol=1e-4 * np.abs(direction).max())
    np.testing.assert_allclose(found.coupling, 0.0, atol=1e-6)  # E[1/w] = 1 whatever a
    np.testing.assert_allclose(
        family.log_density(x, points.theta[:50]), truth.log_marginal(together(x), points.theta[:50]), rtol=1e-10
    )


# --- draws ------------------------------------------------------------------------------------------------------------


def families():
    """Return families with parameters and a target each."""
    yield GaussianMixture(2, 2), GaussianMixture(2, 2).parameters(case(logistic, "full", 2, 2).q)
    yield student(2)[2:]


def test_a_few_draws_are_exact_for_one_gaussian_and_a_gaussian_posterior(rng):
    mean, cov = np.array([3.0, -1.0]), random_covariance(rng, 2)
    family = GaussianMixture(2, 1)
    x = family.parameters(MixtureState.of([FullState(np.zeros(2), np.eye(2))]))
    log_density = stats.multivariate_normal(mean, cov).logpdf
    gradient = natural_gradient(family, x, log_density, family.draws(x, 12, rng))
    assert gradient.elbo == pytest.approx(
        log_density(np.zeros(2)) - 0.5 * np.trace(np.linalg.inv(cov)) + 1.0 + np.log(2 * np.pi)
    )
    q = family.state(stepped(x, gradient, 1.0))
    np.testing.assert_allclose(q.mean(), mean, rtol=1e-8)
    np.testing.assert_allclose(q.cov(), cov, rtol=1e-8, atol=1e-10)


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_example_of_the_page_runs():
    run(PAGE.read_text(encoding="utf-8"))


def test_the_family_of_the_page_is_right():
    """F^-1 grad of the skew normal, whose mixing distribution has no parameters, and the ELBOs that the page names."""
    scope = {}
    exec(blocks(PAGE.read_text(encoding="utf-8"))[0], scope)
    family = scope["SkewNormal"]()
    x = family.parameters(0.9, -1.1, 0.5)

    def log_density(theta):
        return np.log(0.5) + 2.0 * theta[:, 0] - 1.5 * np.exp(theta[:, 0])

    def log_joint(y, theta, w):
        location, skew, scale = family.state(NaturalParameters(y, np.empty(0)))
        return -0.5 * ((theta[:, 0] - location - skew * w) / scale) ** 2 - np.log(scale)

    truth = Continuous(lambda y, theta: family.log_density(NaturalParameters(y, np.empty(0)), theta), log_joint)
    grid = np.linspace(-14.0, 6.0, 4001)[:, None], np.full(4001, 20.0 / 4000)
    nodes, weights = np.polynomial.legendre.leggauss(120)
    w = 4.5 * (nodes + 1.0)
    points = points_of(w, weights * np.exp(-0.5 * w**2), np.array([0.9]), np.array([[0.5]]), -1.1, n_nodes=60)
    direction = truth.direction(x.conditional, log_density, grid, points)
    found = natural_gradient(family, x, log_density, points)
    np.testing.assert_allclose(found.conditional, direction, atol=1e-4 * np.abs(direction).max())
    assert found.mixing.shape == found.coupling.shape == (0,)
    best = family.parameters(0.9246, -1.1357, 0.4009).conditional
    assert truth.elbo(best, log_density, *grid) == pytest.approx(-1.5055, abs=5e-4)
    # At the optimum the gradient is 0.
    assert np.abs(gradient_of(lambda y: truth.elbo(y, log_density, *grid), best)).max() < 1e-3
