"""Mixtures against the inverse Fisher information times the gradient of the ELBO, by finite differences of quadrature.

The coordinates are the natural parameters of each component and the log weights relative to that of the last one; the
Fisher information is that of draw and component together, the covariance of the scores of log(w_c q_c). Nothing of it
comes from the package.
"""

import numpy as np
import pytest

from fisher import case, component_moments
from matrix import as_curvature, whitener
from targets import logistic, poisson

from pymc_ngvi.core.draws import sobol_draws
from pymc_ngvi.families import MixtureState
from pymc_ngvi.families.mixture import COMPONENTS
from pymc_ngvi.methods import ComponentTarget, natural
from pymc_ngvi.methods.estimators import price
from pymc_ngvi.methods.mixtures import stepped_weights

pytestmark = pytest.mark.usefixtures("_one_blas_thread")
each_target = pytest.mark.parametrize("make", [logistic, poisson])
#: In one dimension, the two families are one.
each_kind = pytest.mark.parametrize(
    ("family", "n_dim", "n_components"),
    [(family, d, k) for family, dims in (("full", (1, 2)), ("diagonal", (2,))) for d in dims for k in (2, 3)],
)
#: With components whose precision leaves out an entry: two blocks and a border.
each_form = pytest.mark.parametrize(
    ("family", "n_dim", "n_components"),
    [*each_kind.args[1], ((0, 1, -1), 3, 2)],
)


# --- F^-1 grad --------------------------------------------------------------------------------------------------------


@each_target
@each_form
def test_component_and_weight_steps_are_the_inverse_fisher_information_times_the_gradient(
    make, family, n_dim, n_components
):
    this, rho = case(make, family, n_dim, n_components), 0.003
    rewards, moments = this.moments
    components = [natural(c, m, rho, False) for c, m in zip(this.q.components, moments, strict=True)]
    log_weights = stepped_weights(this.q.log_weights, rewards, rho)
    step = (this.truth.of(MixtureState.of(components, log_weights)) - this.x) / rho
    error = 2e-5 if n_dim < 3 else 2e-4  # fewer nodes
    np.testing.assert_allclose(step, this.direction, rtol=1e-5, atol=error * np.abs(this.direction).max())


# --- the target of one component --------------------------------------------------------------------------------------


@each_target
@pytest.mark.parametrize("family", COMPONENTS)
def test_derivatives_of_the_target_of_a_component(make, family, rng):
    this = case(make, family, 3, 3)
    target, q = this.target, this.q
    part, theta = ComponentTarget(target, q, 1), rng.standard_normal((5, 3))
    value, grad = part.logp_grad(theta)
    steps = 1e-4 * np.eye(3)
    slopes = np.array([part.logp_grad(theta + s)[0] - part.logp_grad(theta - s)[0] for s in steps]).T / 2e-4
    np.testing.assert_allclose(grad, slopes, rtol=1e-6, atol=1e-6)
    hessians = np.array([part.logp_grad(theta + s)[1] - part.logp_grad(theta - s)[1] for s in steps]) / 2e-4
    component = q.components[1]
    c = whitener(component)
    whitened = -c.T @ hessians.mean(axis=1) @ c
    np.testing.assert_allclose(
        part.mean_hessian(theta).whitened(component),
        as_curvature(component, whitened),
        rtol=1e-5,
        atol=1e-6 * np.abs(whitened).max(),
    )
    # log p times the responsibility, over the weight.
    expected = target.logp_grad(theta)[0] + np.log(q.responsibilities(theta)[:, 1]) - q.log_weights[1]
    np.testing.assert_allclose(value, expected, rtol=1e-10)


@pytest.mark.parametrize("family", COMPONENTS)
def test_target_of_the_only_component_is_the_density_itself(family, rng):
    this = case(poisson, family, 3, 1)
    target, q = this.target, this.q
    part, theta = ComponentTarget(target, q, 0), rng.standard_normal((4, 3))
    for found, expected in zip(part.logp_grad(theta), target.logp_grad(theta), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-11)
    component = q.components[0]
    np.testing.assert_allclose(
        part.mean_hessian(theta).whitened(component), component.curvature(target.mean_hessian(theta)), atol=1e-11
    )


@each_target
@each_kind
def test_elbos_of_components_are_their_rewards_and_make_up_that_of_the_mixture(make, family, n_dim, n_components):
    this = case(make, family, n_dim, n_components)
    rewards = this.moments[0]
    np.testing.assert_allclose(rewards, this.truth.rewards(this.x), rtol=1e-10)
    assert this.q.weights @ rewards == pytest.approx(this.truth.elbo(this.x), rel=1e-12)


@each_target
@pytest.mark.parametrize("family", COMPONENTS)
def test_estimates_from_draws_agree_within_their_errors(make, family, rng):
    """Price's estimator, and the ELBO as the loop evaluates it."""
    this = case(make, family, 2, 3)
    target, q = this.target, this.q
    for c, component in enumerate(q.components):
        part, base = ComponentTarget(target, q, c), sobol_draws(512, 2, rng)
        evaluation = price.evaluate(part, component, base)
        found, (reward, expected) = price.moments(part, component, base, evaluation), component_moments(target, q, c)
        diagonals = [component.curvature_diagonal(m.curvature) for m in (found, expected)]
        # Eight replicates: beyond 7 standard errors lies 1 in 5,000.
        assert (np.abs(found.grad - expected.grad) < 7.0 * found.grad_se + 1e-9).all()
        assert (np.abs(diagonals[0] - diagonals[1]) < 7.0 * found.curvature_se).all()
        means = evaluation.logp.reshape(base.n_replicates, -1).mean(axis=1)
        assert abs(evaluation.elbo - reward) < 7.0 * means.std(ddof=1) / np.sqrt(base.n_replicates)


def test_target_of_a_component_counts_what_the_density_is_asked(rng):
    this = case(logistic, "diagonal", 2, 2)
    target, q = this.target, this.q
    density = target.fresh()
    part, theta = ComponentTarget(density, q, 0), rng.standard_normal((6, 2))
    part.logp_grad(theta)
    part.mean_hessian(theta[:4]).whitened(q.components[0])
    assert (density.n_gradients, density.n_hessians) == (6, 4)
    assert part.has_hessian
    assert part.mean_hessian(theta).pattern is None  # though the density has one: others add to every entry
