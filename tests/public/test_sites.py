"""Sites of observations: against conjugate posteriors, sums by hand, and fits without an observation."""

import numpy as np
import pymc as pm
import pytest

from scipy.special import expit
from scipy.stats import norm

from pymc_ngvi import fit_ngvi

RNG = np.random.default_rng(7)
N, GROUP = 40, np.repeat(np.arange(8), 5)
X = np.column_stack([np.ones(N), RNG.normal(size=(N, 2))])
BINARY = (RNG.random(N) < expit(X @ [0.3, 1.0, -0.8])).astype(int)
COUNTS = RNG.poisson(np.exp(X @ [0.5, 0.4, -0.3] + 0.4 * RNG.normal(size=8)[GROUP]))
NODES = np.linspace(-12.0, 12.0, 3001)
WEIGHTS = norm.pdf(NODES) / norm.pdf(NODES).sum()


def gaussian(model, **options):
    return fit_ngvi(model=model, posterior="gaussian", random_seed=1, progressbar=False, **options)


def of_rows(q, x):
    """Return mean and variance of linear functions of the coordinates of q."""
    return x @ q.mean(), np.einsum("ij,jk,ik->i", x, q.cov(), x)


def expected(function, mean, variance):
    """Return expectations under normal distributions, by a fine trapezoidal rule."""
    return function(mean[:, None] + np.sqrt(variance)[:, None] * NODES) @ WEIGHTS


def logistic(y=BINARY, weights=None):
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, 2.0, shape=3)
        if weights is None:
            pm.Bernoulli("y", logit_p=X @ beta, observed=y)
        else:
            pm.Potential("y", pm.Data("w", weights) * pm.logp(pm.Bernoulli.dist(logit_p=X @ beta), y))
    return model


def poisson(*, centred, coords=None):
    with pm.Model(coords=coords) as model:
        beta = pm.Normal("beta", 0.0, 2.0, shape=3)
        sd = pm.HalfNormal("sd", 1.0)
        u = pm.Normal("u", 0.0, sd, shape=8) if centred else sd * pm.Normal("z", 0.0, 1.0, shape=8)
        eta = X @ beta + u[GROUP] + 0.7
        pm.Poisson("y", pm.math.exp(eta), observed=COUNTS, dims=None if coords is None else "visit")
    return model


# --- known answers ----------------------------------------------------------------------------------------------------


def test_a_conjugate_posterior_without_an_observation_is_the_cavity():
    y = X @ [0.5, 1.0, -1.0] + 0.7 * RNG.normal(size=N)
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.2, 1.5, shape=3)
        pm.Normal("y", X @ beta, 0.7, observed=y)
    found = gaussian(model).sites()
    np.testing.assert_allclose(found["pseudo_observation"], y, rtol=1e-9)
    np.testing.assert_allclose(found["gamma"], 1 / 0.49, rtol=1e-9)
    for i in (0, 17):
        rest = np.arange(N) != i
        precision = np.eye(3) / 1.5**2 + X[rest].T @ X[rest] / 0.49
        mean = np.linalg.solve(precision, 0.2 / 1.5**2 + X[rest].T @ y[rest] / 0.49) @ X[i]
        variance = X[i] @ np.linalg.solve(precision, X[i])
        assert found["cavity_mean"].values[i] == pytest.approx(mean, rel=1e-7)
        assert found["cavity_variance"].values[i] == pytest.approx(variance, rel=1e-7)
        wanted = norm.logpdf(y[i], mean, np.sqrt(variance + 0.49))
        assert found["log_density"].values[i] == pytest.approx(wanted, abs=1e-7)


def test_logistic_regression_by_hand():
    approx = gaussian(logistic())
    found = approx.sites()
    mean, variance = of_rows(approx.q, X)
    sign = 2 * BINARY - 1
    np.testing.assert_allclose(found["mean"], mean, rtol=1e-9)
    np.testing.assert_allclose(found["variance"], variance, rtol=1e-9)
    alpha = expected(lambda eta: sign[:, None] * expit(-sign[:, None] * eta), mean, variance)
    gamma = expected(lambda eta: expit(eta) * expit(-eta), mean, variance)
    np.testing.assert_allclose(found["alpha"], alpha, atol=1e-7)
    np.testing.assert_allclose(found["gamma"], gamma, atol=1e-7)
    np.testing.assert_allclose(found["natural"], alpha + gamma * mean, atol=1e-6)
    np.testing.assert_allclose(found["influence"], gamma * variance, atol=1e-7)
    left = variance / (1 - variance * gamma)
    np.testing.assert_allclose(found["cavity_variance"], left, rtol=1e-6)
    np.testing.assert_allclose(found["cavity_mean"], mean - left * alpha, rtol=1e-6)
    density = expected(lambda eta: expit(sign[:, None] * eta), mean - left * alpha, left)
    np.testing.assert_allclose(found["log_density"], np.log(density), atol=1e-7)
    assert found.attrs["elpd"] == pytest.approx(np.log(density).sum(), abs=1e-5)
    assert found.attrs["n_missing"] == 0


def test_a_gaussian_fit_is_the_prior_times_its_sites():
    approx = gaussian(logistic(), tol=1e-6)
    found = approx.sites()
    precision = np.eye(3) / 4.0 + X.T @ (found["gamma"].values[:, None] * X)
    np.testing.assert_allclose(precision, np.linalg.inv(approx.q.cov()), rtol=1e-3)
    np.testing.assert_allclose(np.linalg.solve(precision, X.T @ found["natural"].values), approx.q.mean(), atol=1e-3)


@pytest.mark.parametrize("centred", [True, False])
def test_effects_and_offsets_are_part_of_the_linear_predictor(centred):
    approx = gaussian(poisson(centred=centred, coords={"visit": np.arange(N) + 100}))
    found = approx.sites()
    assert found["mean"].dims == ("visit",)
    assert found["visit"].values[0] == 100
    draws = approx.q.draws(np.random.default_rng(3).standard_normal((100_000, 12)))
    effects = draws[:, 4:] if centred else np.exp(draws[:, 3:4]) * draws[:, 4:]
    eta = draws[:, :3] @ X.T + effects[:, GROUP] + 0.7
    error = eta.std(axis=0) / np.sqrt(len(eta))
    np.testing.assert_array_less(np.abs(found["mean"] - eta.mean(axis=0)), 5 * error)
    np.testing.assert_allclose(found["variance"], eta.var(axis=0), rtol=0.03)  # 6 standard errors
    # Of a Poisson likelihood with the canonical link, slope and curvature add up to the count.
    np.testing.assert_allclose(found["alpha"] + found["gamma"], COUNTS, atol=1e-5)


def test_observations_of_a_normal_likelihood_with_unknown_noise():
    """The cavity is that of the mean and the log of the noise together; by a two-dimensional sum."""
    y = 0.3 + RNG.normal(size=12)
    with pm.Model() as model:
        pm.Normal("y", pm.Normal("mu", 0.0, 2.0), pm.HalfNormal("noise", 2.0), observed=y)
    approx = gaussian(model)
    found = approx.sites()
    m, v = approx.q.mean(), approx.q.cov()
    assert found["mean"].values == pytest.approx(np.full(12, m[0]))
    z = np.stack(np.meshgrid(NODES[::10], NODES[::10]), axis=-1).reshape(-1, 2)
    w = np.exp(-0.5 * (z**2).sum(axis=1))
    mu, log_sd = (m + z @ np.linalg.cholesky(v).T).T
    k = np.exp(-2 * log_sd) * w / w.sum()
    for i in (0, 5):
        e = y[i] - mu
        grad = np.array([(k * e).sum(), (k * e**2).sum() - 1])
        hessian = -np.array([[k.sum(), 2 * (k * e).sum()], [2 * (k * e).sum(), 2 * (k * e**2).sum()]])
        assert found["alpha"].values[i] == pytest.approx(grad[0], abs=1e-6)
        assert found["gamma"].values[i] == pytest.approx(-hessian[0, 0], abs=1e-6)
        cov = np.linalg.inv(np.linalg.inv(v) + hessian)
        mean = m - cov @ grad
        assert found["cavity_mean"].values[i] == pytest.approx(mean[0], abs=1e-6)
        assert found["cavity_variance"].values[i] == pytest.approx(cov[0, 0], abs=1e-6)
        points = mean + z @ np.linalg.cholesky(cov).T
        density = w / w.sum() @ norm.pdf(y[i], points[:, 0], np.exp(points[:, 1]))
        assert found["log_density"].values[i] == pytest.approx(np.log(density), abs=1e-5)


# --- likelihoods of other kinds ---------------------------------------------------------------------------------------


def test_a_likelihood_that_is_not_concave_may_have_negative_precisions():
    y = np.append(0.5 * RNG.normal(size=30), 6.0)
    with pm.Model() as model:
        pm.StudentT("y", nu=3.0, mu=pm.Normal("mu", 0.0, 2.0), sigma=1.0, observed=y)
    found = gaussian(model).sites()
    assert found["gamma"].values[-1] < 0.0 < found["gamma"].values[0]
    assert np.isnan(found["pseudo_observation"].values[-1])
    assert found["cavity_variance"].values[-1] < found["variance"].values[-1]
    assert np.isfinite(found["log_density"]).all()


def test_slopes_are_those_in_the_linear_predictor_however_the_density_is_written():
    """PyTensor makes log a - eta of it, too: a, not that, is what stays where it is when eta moves."""
    y = np.exp(0.4 * X[:, 1] + 0.5 * RNG.normal(size=N))
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, 1.0, shape=3)
        weibull = pm.Weibull.dist(pm.HalfNormal("a", 2.0), pm.math.exp(X @ beta))
        pm.Censored("y", weibull, lower=None, upper=100.0, observed=y)
    approx = gaussian(model)
    found, q = approx.sites(), approx.q
    z = np.stack(np.meshgrid(NODES[::10], NODES[::10]), axis=-1).reshape(-1, 2)
    w = np.exp(-0.5 * (z**2).sum(axis=1))
    for i in (0, 23):
        rows = np.array([[*X[i], 0.0], [0.0, 0.0, 0.0, 1.0]])
        root = np.linalg.cholesky(rows @ q.cov() @ rows.T)
        near = (z**2).sum(axis=1) < 40.0  # E exp(c exp(s)) does not exist, but for where q has its mass
        eta, log_a = (rows @ q.mean() + z[near] @ root.T).T
        slope = np.exp(log_a) * ((y[i] * np.exp(-eta)) ** np.exp(log_a) - 1.0)
        assert found["alpha"].values[i] == pytest.approx(w[near] @ slope / w.sum(), abs=1e-4)
        assert found["mean"].values[i] == pytest.approx(X[i] @ q.mean()[:3])


def test_the_linear_predictor_is_on_its_own_scale():
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, 0.5, shape=3)
        pm.Poisson("y", pm.math.exp(3.0 * (X @ beta)), observed=COUNTS)
    approx = gaussian(model)
    found = approx.sites()
    mean, variance = of_rows(approx.q, 3.0 * X)
    np.testing.assert_allclose(found["mean"], mean, rtol=1e-7)
    np.testing.assert_allclose(found["gamma"], np.exp(mean + variance / 2), rtol=1e-5)
    np.testing.assert_allclose(found["alpha"], COUNTS - np.exp(mean + variance / 2), atol=1e-5)


def test_without_one_linear_predictor_there_is_the_density_alone():
    with pm.Model() as model:
        ability, slope = pm.Normal("ability", 0.0, 1.0, shape=8), pm.LogNormal("slope", 0.0, 0.5, shape=5)
        pm.Bernoulli("y", logit_p=ability[:, None] * slope, observed=BINARY.reshape(8, 5))
    found = gaussian(model).sites()
    assert found["log_density"].shape == (8, 5)
    assert np.isfinite(found["log_density"]).all()
    assert np.isnan(found["alpha"]).all()


def test_multivariate_observations_are_one_each():
    with pm.Model() as model:
        mu = pm.Normal("mu", 0.0, 1.0, shape=2)
        pm.Multinomial(
            "y", n=3, p=pm.math.softmax(pm.math.concatenate([mu, [0.0]])), observed=np.tile([1, 2, 0], (9, 1))
        )
    found = gaussian(model).sites()
    assert found["log_density"].shape == (9,)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_one_of_several_observed_variables_is_named():
    with pm.Model() as model:
        mu = pm.Normal("mu", 0.0, 1.0)
        pm.Normal("y", mu, 1.0, observed=[0.0, 1.0])
        pm.Poisson("count", pm.math.exp(mu), observed=[1, 2, 3])
    approx = gaussian(model)
    assert approx.sites("count").sizes == {"count_dim_0": 3}
    assert approx.sites(var_name="y").attrs["var_name"] == "y"
    with pytest.raises(ValueError, match=r"say which, by var_name; there are 'y', 'count'\."):
        approx.sites()
    with pytest.raises(ValueError, match=r"No observed variable is called 'mu'; there are 'y', 'count'\."):
        approx.sites("mu")


def test_no_gaussian_no_sites():
    model = logistic()
    exact = fit_ngvi(model=model, random_seed=1, progressbar=False)
    with pytest.raises(ValueError, match=r"this is an exact posterior\. .* approx\.gaussian\.sites\(\)"):
        exact.sites()
    assert exact.gaussian.sites().attrs["n_missing"] == 0
    with pytest.raises(ValueError, match=r"this is a StudentTState\. Fit with posterior='gaussian'"):
        fit_ngvi(model=model, family="student_t", random_seed=1, progressbar=False).sites()


def test_data_that_are_not_those_of_the_fit():
    with pm.Model() as model:
        x = pm.Data("x", X[:, 1])
        pm.Normal("y", pm.Normal("b") * x, 1.0, observed=X[:, 2])
    approx = gaussian(model)
    with model:
        pm.set_data({"x": X[:, 1] + 1.0})
    with pytest.raises(ValueError, match=r"'x' were changed after the fit"):
        approx.sites()


def test_observations_that_depend_on_each_other():
    with pm.Model() as model:
        length = pm.HalfNormal("length", 1.0)
        cov = pm.math.exp(-((X[:, 1:2] - X[:, 1]) ** 2) / length) + np.eye(N)
        pm.MvNormal("y", pm.Normal("mu", shape=N), cov, observed=X[:, 2])
    approx = gaussian(model)
    with pytest.raises(ValueError, match=r"The observations of 'y' have no sites"):
        approx.sites()
