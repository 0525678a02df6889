"""Local coordinates relative to their conditional modes: the transform, its target, and q on the model's scale."""

import functools

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

from numpy.testing import assert_allclose, assert_array_equal

from pymc_ngvi import LogDensity, NGVIApproximation, fit_ngvi
from pymc_ngvi.families import DiagonalState, SparseFamily
from pymc_ngvi.families.gaussian import Partition
from pymc_ngvi.families.sparse import SparseStructure
from pymc_ngvi.methods.reparam import PushforwardState, reparametrised

# Groups of 1, 3, 6, 2 and 4 observations.
GROUP = np.repeat(np.arange(5), [1, 3, 6, 2, 4])
X = np.random.default_rng(3).normal(size=len(GROUP))
Z = np.column_stack([np.ones(len(GROUP)), X])
COUNTS = np.array([3, 0, 1, 2, 7, 5, 9, 4, 6, 2, 0, 0, 1, 1, 2, 4])
BINARY = (COUNTS > 1).astype(int)


def poisson_slopes():
    """Blocks of 2 with correlated effects."""
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.1, 2.1, shape=2)
        chol, _, _ = pm.LKJCholeskyCov("chol", n=2, eta=2.1, sd_dist=pm.Exponential.dist(1.1), compute_corr=True)
        b = pm.MvNormal("b", 0.0, chol=chol, shape=(5, 2))
        pm.Poisson("y", mu=pt.exp(Z @ beta + pt.sum(Z * b[GROUP], axis=1)), observed=COUNTS)
    return model, {"b": np.repeat(np.arange(5), 2)}


def logistic_intercepts():
    """Blocks of 1."""
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.1, 2.1, shape=2)
        s = pm.HalfNormal("s", 1.1)
        b = pm.Normal("b", 0.0, s, shape=5)
        pm.Bernoulli("y", logit_p=Z @ beta + b[GROUP], observed=BINARY)
    return model, {"b": np.arange(5)}


def robust_counts():
    """No GLMM: blocks of 1 and 2, Student-t effects, one of them scaled, overdispersed counts."""
    with pm.Model() as model:
        a = pm.StudentT("a", nu=4.1, sigma=0.6, shape=3)
        alpha = pm.Gamma("alpha", 3.1, 1.1)
        mu = pm.Normal("mu", 0.6, 1.1)
        s = pm.LogNormal("s", -0.6, 0.4)
        c = pm.Normal("c", mu, 0.7, shape=(2, 2))
        effect = pt.concatenate([s * a, c[:, 0]])[GROUP] + pt.concatenate([pt.zeros(3), c[:, 1]])[GROUP] * X
        pm.NegativeBinomial("y", mu=pt.exp(mu + effect), alpha=alpha, observed=COUNTS)
    return model, {"a": np.arange(3), "c": np.repeat([3, 4], 2)}


def gaussian_slopes():
    """Known variances given the global coordinates: all conditionals are Gaussian."""
    y = np.random.default_rng(4).normal(size=len(GROUP))
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.1, 2.1, shape=2)
        s = pm.HalfNormal("s", 1.1)
        b = pm.Normal("b", beta, s, shape=(5, 2))
        pm.Normal("y", pt.sum(Z * b[GROUP], axis=1), pt.exp(-s), observed=y)
    return model, {"b": np.repeat(np.arange(5), 2)}


MODELS = {f.__name__: f for f in (poisson_slopes, logistic_intercepts, robust_counts, gaussian_slopes)}
each_model = pytest.mark.parametrize("name", MODELS)


def structure_of(density, blocks):
    labels = np.full(density.n_dim, -1)
    for v in density.layout.variables:
        if v.name in blocks:
            labels[v.where] = blocks[v.name]
    return Partition(labels)


@functools.cache
def made(name, reparam="rvb2"):
    """Return a target and its structure; tests share the functions that it compiles."""
    model, blocks = MODELS[name]()
    density = LogDensity(model, backend="quick")
    structure = structure_of(density, blocks)
    return reparametrised(density, structure, reparam), structure


def draws(target, n=3, seed=0, spread=0.5):
    return spread * np.random.default_rng(seed).standard_normal((n, target.n_dim))


def slopes_by_differences(function, points, length=1e-5):
    """Return derivatives by each coordinate, (n_points, n_dim, ...)."""
    n_points, n_dim = points.shape
    steps = length * np.stack([np.eye(n_dim), -np.eye(n_dim)])
    values = function((points[:, None, None, :] + steps).reshape(-1, n_dim))
    values = values.reshape(n_points, 2, n_dim, *values.shape[1:])
    return (values[:, 0] - values[:, 1]) / (2.0 * length)


# --- transform --------------------------------------------------------------------------------------------------------


@each_model
def test_inverse_undoes_forward(name):
    target, structure = made(name)
    phi = draws(target)
    theta, log_det = target.transform.forward(phi)
    again, same = target.transform.inverse(theta)
    assert_allclose(again, phi, atol=1e-10)
    assert_allclose(same, log_det, atol=1e-10)
    assert_array_equal(theta[:, structure.border], phi[:, structure.border])
    assert np.abs(theta - phi).max() > 0.1


@each_model
def test_log_det_is_that_of_the_derivative(name):
    target, _ = made(name)
    phi = draws(target, 1)
    jacobian = slopes_by_differences(lambda p: target.transform.forward(p)[0], phi)[0]
    assert_allclose(np.linalg.slogdet(jacobian)[1], target.transform.forward(phi)[1], atol=1e-7)


@each_model
def test_zero_is_the_conditional_mode_with_unit_curvature(name):
    target, structure = made(name)
    phi = draws(target)
    phi[:, structure.locals_] = 0.0
    theta, _ = target.transform.forward(phi)
    local = structure.order[: len(structure.locals_)]
    assert_allclose(target.density.grad(theta)[:, local], 0.0, atol=1e-9)
    hessian = target.density.hessian(theta[:1])[0][np.ix_(local, local)]
    jacobian = slopes_by_differences(lambda p: target.transform.forward(p)[0], phi[:1])[0].T
    factor = jacobian[np.ix_(local, local)]
    assert_allclose(factor, np.tril(factor), atol=1e-9)
    assert_allclose(factor.T @ -hessian @ factor, np.eye(len(local)), atol=1e-6)


def test_blocks_in_any_order_of_coordinates():
    """Effects stored effect by effect: the coordinates of a block are far apart."""
    with pm.Model() as model:
        s = pm.HalfNormal("s", 1.1)
        b = pm.Normal("b", 0.0, s, shape=(2, 5))
        pm.Poisson("y", mu=pt.exp(pt.sum(Z.T * b[:, GROUP], axis=0)), observed=COUNTS)
    density = LogDensity(model, backend="quick")
    target = reparametrised(density, structure_of(density, {"b": np.tile(np.arange(5), 2)}), "rvb2")
    phi = draws(target)
    assert_allclose(target.transform.inverse(target.transform.forward(phi)[0])[0], phi, atol=1e-10)
    assert_allclose(
        target.logp_grad(phi)[1], slopes_by_differences(lambda phi: target.logp_grad(phi)[0], phi), rtol=1e-6, atol=1e-6
    )


# --- modes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("away", [-8.0, 12.0])
@pytest.mark.parametrize("name", ["poisson_slopes", "logistic_intercepts", "robust_counts"])
def test_modes_are_found_from_far_away(name, away):
    """Steps overshoot for counts, curvatures are negative in the tails of Student-t effects."""
    target, _ = made(name)
    phi = draws(target, 2)
    near = target.transform.modes(phi)
    start = np.full((2, len(target.transform.structure.locals_)), away)
    far = target.transform.modes(phi, start)
    assert near.found.all()
    assert far.found.all()
    assert far.n_rounds > near.n_rounds
    assert_allclose(far.theta, near.theta, atol=1e-8)


def test_draws_without_a_mode_are_lost_and_no_others():
    with pm.Model() as model:
        mu = pm.Normal("mu")
        b = pm.Flat("b", shape=2)
        pm.Potential("rises", pt.exp(mu) * pt.sum(b))
    density = LogDensity(model, backend="quick")
    target = reparametrised(density, structure_of(density, {"b": np.arange(2)}), "rvb2")
    logp, grad = target.logp_grad(np.zeros((2, 3)))
    assert_array_equal(logp, [-np.inf, -np.inf])
    assert np.isnan(grad).all()
    assert np.isnan(target.transform.forward(np.zeros((1, 3)))[0]).any()

    target, _ = made("poisson_slopes")
    phi = draws(target)
    expected = target.logp_grad(phi)
    broken = phi.copy()
    broken[1, 0] = np.nan
    logp, grad = target.logp_grad(broken)
    assert_array_equal(np.isfinite(logp), [True, False, True])
    assert np.isnan(grad[1]).all()
    assert_allclose(grad[[0, 2]], expected[1][[0, 2]], atol=1e-8)


# --- target -----------------------------------------------------------------------------------------------------------


@each_model
def test_log_density_is_that_of_theta_plus_log_det(name):
    target, _ = made(name)
    phi = draws(target)
    theta, log_det = target.transform.forward(phi)
    assert_allclose(target.logp_grad(phi)[0], target.density.logp(theta) + log_det, rtol=1e-12)


@pytest.mark.parametrize(("name", "reparam"), [*((name, "rvb2") for name in MODELS), ("poisson_slopes", "rvb1")])
def test_gradient(name, reparam):
    target, _ = made(name, reparam)
    phi = draws(target)
    assert_allclose(
        target.logp_grad(phi)[1], slopes_by_differences(lambda phi: target.logp_grad(phi)[0], phi), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("name", ["poisson_slopes", "robust_counts"])
def test_hessian(name):
    target, structure = made(name)
    phi = draws(target)
    pattern = target.pattern
    matrix = pattern.symmetric(target.mean_hessian(phi).values()).toarray()
    k, g = structure.sizes, len(structure.border)
    assert pattern.n_entries == np.sum(k * (k + 1)) // 2 + len(structure.locals_) * g + g * (g + 1) // 2
    by_gradients = slopes_by_differences(lambda phi: target.logp_grad(phi)[1], phi).mean(axis=0)
    assert_allclose(matrix, by_gradients, atol=1e-6)
    assert_allclose(target.mean_hessian(phi).diagonal(), np.diag(by_gradients), atol=1e-6)


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_hessian_of_global_coordinates_on_another_scale(scale):
    """A unit of the predictor changes the scale of a global coordinate: differences follow."""
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, 10.0 * scale)
        b = pm.Normal("b", 0.0, 1.0, shape=5)
        pm.Poisson("y", mu=pt.exp(beta / scale + b[GROUP]), observed=COUNTS)
    density = LogDensity(model, backend="quick")
    target = reparametrised(density, structure_of(density, {"b": np.arange(5)}), "rvb2")
    phi = draws(target)
    phi[:, 0] *= scale
    values = target.pattern.symmetric(target.mean_hessian(phi).values()).toarray()
    by_gradients = slopes_by_differences(lambda phi: target.logp_grad(phi)[1], phi, 1e-5 * scale).mean(axis=0)
    units = np.where(np.arange(6) == 0, scale, 1.0)
    assert_allclose(values[0] * scale * units, by_gradients[0] * scale * units, atol=1e-6)


def test_groups_alone():
    """Without global coordinates, the transform is the same everywhere."""
    with pm.Model() as model:
        b = pm.Normal("b", 0.1, 1.1, shape=5)
        pm.Poisson("y", mu=pt.exp(b[GROUP]), observed=COUNTS)
    target = reparametrised(LogDensity(model, backend="quick"), Partition(np.arange(5)), "rvb2")
    phi = draws(target)
    assert_allclose(target.transform.inverse(target.transform.forward(phi)[0])[0], phi, atol=1e-10)
    assert_allclose(
        target.logp_grad(phi)[1], slopes_by_differences(lambda phi: target.logp_grad(phi)[0], phi), rtol=1e-6, atol=1e-6
    )
    diagonal = np.stack([np.diag(h) for h in slopes_by_differences(lambda phi: target.logp_grad(phi)[1], phi)]).mean(
        axis=0
    )
    assert_allclose(target.mean_hessian(phi).values(), diagonal, atol=1e-6)
    assert target.transform.forward(phi[:0])[0].shape == (0, 5)


def test_what_it_refuses():
    with pm.Model() as model:
        x = pm.Normal("x", 0.0, 1.0, shape=2)
        batch = pm.Minibatch(np.arange(6.0), batch_size=3)
        pm.Normal("y", x[0] + x[1], 1.0, observed=batch, total_size=6)
    with pytest.raises(ValueError, match=r"pm\.Minibatch"):
        reparametrised(LogDensity(model), Partition([-1, 0]), "rvb2")
    target, _ = made("logistic_intercepts")
    with pytest.raises(ValueError, match="standardises local coordinates"):
        reparametrised(target.density, Partition([-1] * target.n_dim), "rvb2")
    assert not hasattr(target, "gauss_newton")


# --- q on the model's scale -------------------------------------------------------------------------------------------


def sparse_state(structure, seed=0):
    rng = np.random.default_rng(seed)
    form, pattern = SparseStructure.of_blocks(structure), structure.pattern
    state = SparseFamily(form).from_scale(0.3 * rng.standard_normal(form.n_dim), np.full(form.n_dim, 0.5))
    factor = state.factor + form.panels_of(pattern, 0.2 * rng.standard_normal(pattern.n_entries))
    return type(state)(state.location, factor, form)


@functools.cache
def pushed():
    target, structure = made("logistic_intercepts")
    gaussian = sparse_state(structure)
    return PushforwardState(gaussian, target.transform)


def test_log_density_of_draws():
    q = pushed()
    base = np.random.default_rng(1).standard_normal((5, q.n_dim))
    phi = q.gaussian.draws(base)
    theta, log_det = q.transform.forward(phi)
    assert_array_equal(q.draws(base), theta)
    assert_allclose(q.log_density(theta), q.gaussian.log_density(phi) - log_det, rtol=1e-9)


def test_moments():
    q = pushed()
    theta = q.draws(np.random.default_rng(3).standard_normal((4_000, q.n_dim)))
    se = theta.std(axis=0) / np.sqrt(len(theta))
    assert np.all(np.abs(q.mean() - theta.mean(axis=0)) < 5.0 * se)
    assert_allclose(q.sd(), theta.std(axis=0), rtol=0.06)
    covariance = q.cov()
    assert_allclose(np.sqrt(np.diag(covariance)), q.sd(), rtol=1e-10)
    assert_allclose(covariance, np.cov(theta.T), atol=0.08 * np.outer(q.sd(), q.sd()).max())
    assert np.linalg.eigvalsh(covariance).min() > 0.0
    index = np.array([6, 0, 3])
    assert_allclose(q.cov_block(index), covariance[np.ix_(index, index)], rtol=1e-9)


def test_moments_of_global_coordinates_are_exact():
    q = pushed()
    border = q.transform.structure.border
    assert_allclose(q.mean()[border], q.gaussian.mean()[border], rtol=1e-9)
    assert_allclose(q.sd()[border], q.gaussian.sd()[border], rtol=1e-9)
    exact = q.gaussian.cov_block(border)
    assert_allclose(q.cov_block(border), exact, rtol=1e-12)
    assert_allclose(q.cov()[np.ix_(border, border)], exact, atol=1e-12)


def approximation():
    with pm.Model() as model:
        x = pm.Data("x", X)
        beta = pm.Normal("beta", 0.1, 2.1)
        b = pm.Normal("b", 0.0, 0.6, shape=5)
        pm.Poisson("y", mu=pt.exp(beta * x + b[GROUP]), observed=COUNTS)
    density = LogDensity(model, backend="quick")
    target = reparametrised(density, structure_of(density, {"b": np.arange(5)}), "rvb2")
    gaussian = DiagonalState.from_scale(np.full(6, 0.1), np.full(6, 0.5))
    return NGVIApproximation(density, PushforwardState(gaussian, target.transform))


def test_q_stays_when_the_data_change():
    approx = approximation()
    base = np.random.default_rng(1).standard_normal((3, 6))
    before = approx.q.draws(base)
    with approx.model:
        pm.set_data({"x": np.zeros_like(X)})
    assert_array_equal(approx.q.draws(base), before)


def test_effects_relative_to_the_prior_are_the_non_centred_model():
    rng = np.random.default_rng(3)
    group = np.repeat(np.arange(15), 4)
    y = (rng.random(60) < 0.4).astype(int)

    def model(centred):
        with pm.Model() as made_:
            mu = pm.Normal("mu", 0.0, 2.0)
            sd = pm.HalfNormal("sd", 1.5)
            z = pm.Normal("z", mu, sd, shape=15) if centred else pm.Normal("z", 0.0, 1.0, shape=15)
            pm.Bernoulli("y", logit_p=(z if centred else mu + sd * z)[group], observed=y)
        return made_

    options = {"family": "sparse", "random_seed": 2, "tol": 0.02, "progressbar": False, "start_sigma": 0.3}
    scales = {"mu": 0.3, "sd": 0.3, "z": 1.0}
    by_hand = fit_ngvi(model=model(centred=False), estimator="price", **options | {"start_sigma": scales})
    relative = fit_ngvi(model=model(centred=True), reparam="noncentred", **options)
    np.testing.assert_allclose(relative.elbo.value, by_hand.elbo.value, atol=1e-4)
    gaussian = relative.q.gaussian
    np.testing.assert_allclose(gaussian.mean(), by_hand.mean_flat, atol=1e-4)
    np.testing.assert_allclose(gaussian.sd(), by_hand.sd_flat, rtol=1e-4)


@functools.cache
def eight_schools():
    with pm.Model() as model:
        mu = pm.Normal("mu", 0.0, 5.0)
        tau = pm.HalfNormal("tau", 5.0)
        theta = pm.Normal("theta", mu, tau, shape=7)
        pm.Normal("y", theta, 10.0, observed=[28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0])
    return model


@functools.cache
def relative_schools():
    """Return a fit of the family that is taken by itself."""
    return fit_ngvi(model=eight_schools(), reparam="rvb2", random_seed=1, progressbar=False)


@pytest.mark.parametrize("family", ["full", "block", "diagonal"])
def test_any_family_can_be_fitted_to_a_reparametrised_model(family):
    """Effects are all but independent of the globals there: little is lost by leaving correlations out."""
    options = {"model": eight_schools(), "reparam": "rvb2", "random_seed": 1, "progressbar": False}
    sparse, other = relative_schools(), fit_ngvi(family=family, **options)
    assert type(other.q.gaussian).__name__.lower().startswith(family)
    lost = 0.02 if family == "full" else 0.3
    assert -0.1 < sparse.elbo.value - other.elbo.value < lost + 0.1


def test_a_start_counts_on_the_scale_of_the_model():
    model = eight_schools()
    start = {"mu": 3.0, "theta": np.linspace(-5.0, 10.0, 7)}
    approx = fit_ngvi(0, model=model, reparam="rvb2", start=start, start_sigma=1e-6, random_seed=1, progressbar=False)
    location = approx.q.gaussian.mean()
    theta = approx.q.transform.forward(location[None])[0][0]
    where = {v.name: v.where for v in approx.layout.variables}
    assert_allclose(theta[where["mu"]], 3.0)
    assert_allclose(theta[where["theta"]], start["theta"], atol=1e-6)
