"""Mixtures against the inverse Fisher information times the gradient of the ELBO, by finite differences of quadrature.

The coordinates are the natural parameters of each component and the log weights relative to that of the last one; the
Fisher information is that of draw and component together, the covariance of the scores of log(w_c q_c). Nothing of it
comes from the package.
"""

import functools

from dataclasses import dataclass, replace

import numpy as np
import pytest

from matrix import as_curvature, state_of, whitener
from targets import NumpyTarget, logistic, poisson, random_covariance
from test_natural_gradients import Coordinates, gradient_of
from test_updates import whitened_moments

from pymc_ngvi.core.draws import sobol_draws
from pymc_ngvi.estimators import gauss_newton, price
from pymc_ngvi.families import MixtureState
from pymc_ngvi.families.matrices.arrow import ArrowStructure
from pymc_ngvi.families.mixture import COMPONENTS
from pymc_ngvi.mixtures import ComponentTarget
from pymc_ngvi.mixtures.finite.steps import stepped_weights
from pymc_ngvi.updates import natural

#: Nodes of an expectation in each of so many coordinates: with twice as many, no result changes by more than 2e-6 (in
#: three coordinates, 2e-4).
N_NODES = {1: 64, 2: 44, 3: 30}

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


@functools.cache
def hermite(n_dim):
    """Return nodes and weights of an expectation under N(0, I), those that count."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(N_NODES[n_dim])
    z = np.stack([axis.ravel() for axis in np.meshgrid(*[nodes] * n_dim, indexing="ij")], axis=1)
    product = functools.reduce(np.multiply.outer, [weights / weights.sum()] * n_dim).ravel()
    counts = product > 1e-14
    return z[counts], product[counts]


@dataclass(frozen=True)
class Exact:
    """ELBO and Fisher information of mixtures of Gaussians.

    Parameters
    ----------
    logp : callable
        Points, (n, n_dim), to (n,).
    family : str
    n_dim, n_components : int
    """

    logp: object
    family: str
    n_dim: int
    n_components: int

    @property
    def coordinates(self):
        """Those of a component."""
        return Coordinates("natural", self.family, self.n_dim)

    def of(self, mixture):
        """Return the coordinates of a mixture."""
        each = [self.coordinates.of(c.mean(), c.cov()) for c in mixture.components]
        return np.concatenate([*each, mixture.log_weights[:-1] - mixture.log_weights[-1]])

    def gaussians(self, x):
        """Return log weights, and mean and covariance of each component."""
        parts = np.split(x[: -(self.n_components - 1)], self.n_components)
        log_odds = np.append(x[-(self.n_components - 1) :], 0.0)
        return log_odds - np.log(np.sum(np.exp(log_odds))), [self.coordinates.gaussian(part) for part in parts]

    def log_terms(self, x, theta):
        """Return log(w_c q_c) at points, (n_components, n)."""
        log_weights, gaussians = self.gaussians(x)
        terms = []
        for log_weight, (mean, cov) in zip(log_weights, gaussians, strict=True):
            square = np.einsum("ni,ni->n", theta - mean, np.linalg.solve(cov, (theta - mean).T).T)
            terms.append(log_weight - 0.5 * (square + np.linalg.slogdet(2 * np.pi * cov)[1]))
        return np.array(terms)

    def points(self, x):
        """Return the nodes of each component with their weights under it."""
        z, weights = hermite(self.n_dim)
        return [(mean + z @ np.linalg.cholesky(cov).T, weights) for mean, cov in self.gaussians(x)[1]]

    def log_ratio(self, x, theta):
        """Return log p - log q."""
        return self.logp(theta) - np.logaddexp.reduce(self.log_terms(x, theta))

    def rewards(self, x):
        """Return E_{q_c}[log p - log q]."""
        return np.array([weights @ self.log_ratio(x, theta) for theta, weights in self.points(x)])

    def elbo(self, x):
        """Return the ELBO of the mixture."""
        return np.exp(self.gaussians(x)[0]) @ self.rewards(x)

    def fisher_information(self, x, *, joint=True):
        """Return that of draw and component, or (``joint`` False) that of the draw alone."""
        total = np.zeros((len(x), len(x)))
        shares = np.exp(self.gaussians(x)[0])
        for c, (theta, weights) in enumerate(self.points(x)):

            def log_density(y, c=c, theta=theta):
                terms = self.log_terms(y, theta)
                return terms[c] if joint else np.logaddexp.reduce(terms)

            scores = derivatives(log_density, x)
            total += shares[c] * (scores * weights) @ scores.T
        return total

    def natural_gradient(self, x, *, joint=True):
        """Return F^-1 times the gradient of the ELBO."""
        return np.linalg.solve(self.fisher_information(x, joint=joint), gradient_of(self.elbo, x))


def derivatives(function, x, h=1e-4):
    """Return those of a function with many values, (n_coordinates, n_values)."""
    steps = h * np.diag(np.maximum(np.abs(x), 0.1))
    return np.array([function(x + s) - function(x - s) for s in steps]) / (2 * np.diag(steps)[:, None])


def mixture(family, n_dim, n_components, seed):
    """Return a mixture whose components differ and overlap, and are not near the best one."""
    rng = np.random.default_rng(seed)
    components = []
    for c in range(n_components):
        mean = 0.8 * (c - (n_components - 1) / 2) + 0.3 * rng.standard_normal(n_dim)
        cov = (0.3 + 0.2 * c) * random_covariance(rng, n_dim, 2.0)
        components.append(state_of(family, mean, cov))
    return MixtureState.of(components, 0.5 * rng.standard_normal(n_components))


@dataclass(frozen=True)
class Case:
    """A target and a mixture, with what is exact of them, and what the package makes of exact expectations."""

    target: NumpyTarget
    q: MixtureState
    family: object

    @functools.cached_property
    def truth(self):
        return Exact(lambda theta: self.target.logp_grad(theta)[0], self.family, self.q.n_dim, self.q.n_components)

    @functools.cached_property
    def x(self):
        """The coordinates of q."""
        return self.truth.of(self.q)

    @functools.cached_property
    def direction(self):
        """F^-1 grad."""
        return self.truth.natural_gradient(self.x)

    @functools.cached_property
    def moments(self):
        """Rewards, and whitened moments of each component."""
        rewards, moments = zip(
            *(component_moments(self.target, self.q, c) for c in range(self.q.n_components)), strict=True
        )
        return np.array(rewards), moments

    @property
    def weight_step(self):
        """What a step of size 1 adds to the log weights, relative to that of the last component."""
        step = self.moments[0]
        return step[:-1] - step[-1]

    @functools.cached_property
    def shifted(self):
        """The same in coordinates that are larger by 10."""
        components = [replace(c, location=c.location + 10.0) for c in self.q.components]
        return Case(Shifted(self.target, 10.0), replace(self.q, components=tuple(components)), self.family)


@functools.cache
def case(make, family, n_dim, n_components, seed=1):
    target = make(n=20, n_dim=n_dim, seed=seed)
    if isinstance(family, tuple):  # no row has predictors of two blocks
        rows, labels = np.arange(20) % 2, np.asarray(family)
        target.design = np.where((labels >= 0) & (labels != rows[:, None]), 0.0, target.design)
        target.pattern = ArrowStructure.of(labels).pattern
    return Case(target, mixture(family, n_dim, n_components, seed), family)


class Shifted(NumpyTarget):
    """Another target in coordinates whose origin lies elsewhere."""

    def __init__(self, inside, shift):
        super().__init__(inside.n_dim)
        self.inside, self.shift = inside, shift

    def logp_grad(self, theta):
        return self.inside.logp_grad(theta - self.shift)

    def _hessians(self, theta):
        return self.inside._hessians(theta - self.shift)


def component_moments(target, q, index):
    """Return reward and whitened moments of a component by quadrature, through the package's own target."""
    component, part = q.components[index], ComponentTarget(target, q, index)
    z, weights = hermite(q.n_dim)
    theta = component.draws(z)
    logp, grad = part.logp_grad(theta)
    # Curvatures are means over draws: those of nodes that are mirror images, and so have one weight.
    labels = np.unique(np.round(np.log(weights), 6), return_inverse=True)[1]
    groups = [labels == label for label in range(labels.max() + 1)]
    curvature = sum(weights[group].sum() * part.mean_hessian(theta[group]).whitened(component) for group in groups)
    return weights @ logp + component.entropy(), whitened_moments(component.whiten(weights @ grad), curvature)


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


@each_form
def test_fisher_information_of_draw_and_component_has_a_block_for_each_component_and_one_for_the_weights(
    family, n_dim, n_components
):
    this = case(logistic, family, n_dim, n_components)
    information, n_weights = this.truth.fisher_information(this.x), n_components - 1
    of_each = (len(information) - n_weights) // n_components
    blocks = np.append(np.repeat(np.arange(n_components), of_each), np.full(n_weights, n_components))
    np.testing.assert_allclose(information[blocks[:, None] != blocks], 0.0, atol=1e-7)
    w = this.q.weights[:-1]
    np.testing.assert_allclose(information[-n_weights:, -n_weights:], np.diag(w) - np.outer(w, w), rtol=1e-7)


def test_metric_is_not_that_of_the_draw_alone():
    """Which is smaller, since to know the component as well tells more, and has another natural gradient."""
    this = case(logistic, "full", 2, 2)
    difference = this.truth.fisher_information(this.x) - this.truth.fisher_information(this.x, joint=False)
    values = np.linalg.eigvalsh(difference)
    assert values.min() > -1e-6
    assert values.max() > 0.1
    of_draw = this.truth.natural_gradient(this.x, joint=False)[-1]
    assert abs(of_draw / this.direction[-1] - 1.0) > 0.01


@each_target
@each_kind
def test_natural_steps_do_not_depend_on_the_origin_of_the_coordinates(make, family, n_dim, n_components):
    here = case(make, family, n_dim, n_components)
    there = here.shifted
    np.testing.assert_allclose(there.weight_step, here.weight_step, rtol=1e-9, atol=1e-9)
    for c in range(n_components):
        step, other = (natural(this.q.components[c], this.moments[1][c], 0.1, True) for this in (here, there))
        np.testing.assert_allclose(other.location - 10.0, step.location, atol=1e-9)
        np.testing.assert_allclose(other.cov(), step.cov(), rtol=1e-8, atol=1e-10)


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
    for found, expected in (
        (part.mean_hessian(theta).products(steps), 1e-4 * hessians.mean(axis=1)),
        (part.mean_hessian(theta).diagonal(), np.diag(hessians.mean(axis=1))),
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())
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


def test_target_of_a_component_has_no_single_observations(rng):
    this = case(logistic, "diagonal", 2, 2)
    target, q = this.target, this.q
    part, base = ComponentTarget(target, q, 0), sobol_draws(4, 2, rng)
    evaluation = price.evaluate(part, q.components[0], base)
    with pytest.raises(ValueError, match="gradients of single observations"):
        gauss_newton.moments(part, q.components[0], base, evaluation)
