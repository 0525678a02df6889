"""Natural gradients of conditional exponential families, against F^-1 grad by finite differences and closed forms."""

import numpy as np
import pytest

from conditional_family import GaussianMixture, NaturalParameters, Points, natural_gradient, stepped
from fisher import case, derivatives, gradient_of
from scipy import stats
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


# --- draws ------------------------------------------------------------------------------------------------------------


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
    family, none = scope["SkewNormal"](), np.empty(0)
    x = family.parameters(0.9, -1.1, 0.5)
    grid, volume = np.linspace(-14.0, 6.0, 4001)[:, None], 20.0 / 4000

    def log_density(theta):
        return np.log(0.5) + 2.0 * theta[:, 0] - 1.5 * np.exp(theta[:, 0])

    def elbo(y):
        log_q = family.log_density(NaturalParameters(y, none), grid)
        return volume * np.sum(np.exp(log_q) * (log_density(grid) - log_q))

    def log_joint(y):
        """But for terms without parameters."""
        location, skew, scale = family.state(NaturalParameters(y, none))
        return -0.5 * ((points.theta[:, 0] - location - skew * points.w) / scale) ** 2 - np.log(scale)

    nodes, of_w = np.polynomial.legendre.leggauss(120)
    z, of_z = np.polynomial.hermite_e.hermegauss(60)
    w = 4.5 * (nodes + 1.0)
    of_w *= np.exp(-0.5 * w**2)
    theta = 0.9 - 1.1 * w[:, None] + 0.5 * z
    points = Points(theta.reshape(-1, 1), np.repeat(w, 60), np.outer(of_w / of_w.sum(), of_z / of_z.sum()).ravel())
    scores = derivatives(log_joint, x.conditional)
    direction = np.linalg.solve((scores * points.weights) @ scores.T, gradient_of(elbo, x.conditional))
    found = natural_gradient(family, x, log_density, points)
    np.testing.assert_allclose(found.conditional, direction, atol=1e-4 * np.abs(direction).max())
    assert found.mixing.shape == found.coupling.shape == (0,)
    best = family.parameters(0.9246, -1.1357, 0.4009).conditional
    assert elbo(best) == pytest.approx(-1.5055, abs=5e-4)
    # At the optimum the gradient is 0.
    assert np.abs(gradient_of(elbo, best)).max() < 1e-3
