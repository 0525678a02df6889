"""Incomplete beta and gamma functions: their derivatives by parameters, on arrays, and the models that need them."""

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest

from scipy import special, stats

import pymc_ngvi  # noqa: F401 (registers the method)

from pymc_ngvi import LogDensity
from pymc_ngvi.core import scalars as tails
from pymc_ngvi.graphs import programs
from pymc_ngvi.graphs.backends import python_loops, quick_mode

#: a, b, x, and the derivatives of I by a, b, a twice, a and b, b twice: differences in 80 digits.
BETA = [
    (0.05, 2, 0.01, [-3.05270357893, 0.0260735183584, 10.436782970968, 0.418276590591, -0.0155273293175]),
    (0.5, 0.5, 0.5, [-0.583121808062, 0.583121808062, 0.944295957927, 0.0, -0.944295957927]),
    (2, 3, 0.4, [-0.240869376088, 0.156344336414, 0.0583966012515, 0.00892340767003, -0.0357293592774]),
    (2, 3, 0.95, [-0.000502984489627, 0.00132294615665, -0.000321886416394, 0.00127775339221, -0.00360744929016]),
    (1, 7, 0.001, [-0.0371033366204, 0.000993517806773, 0.193694772139, -0.00435451618977, -9.94014897098e-07]),
    (30, 4, 0.88, [-0.0248508911988, 0.19107537597, 0.000808833630872, -0.00298919101847, -0.00295479519021]),
    (400, 800, 0.34, [-0.0143201738181, 0.00726632250922, -0.00027166970165, 0.000146927089222, -7.90900414204e-05]),
    (5000, 3, 0.9995, [-0.000128260992085, 0.247055045307, 1.28523957501e-08, 7.81581211751e-07, -0.0485577050539]),
    (2.5, 2.5, 0.001, [-1.1162850411e-06, 1.37670600801e-07, 7.24264226179e-06, -8.5756939996e-07, 6.42776892321e-08]),
    (60, 1, 0.3, [-5.10378017072e-32, 1.83561062261e-31, 6.14481252481e-32, -2.20306679372e-31, 7.25823188444e-31]),
]  # fmt: skip
#: k, x, and the derivatives of P by k, once and twice.
GAMMA = [
    (0.05, 0.01, [-3.357150848986, 12.58357748128]),
    (0.5, 3, [-0.047240326447974, -0.085989868973686]),
    (2, 0.001, [-3.912716130041e-6, 3.0441815023618e-5]),
    (2, 9, [-0.0023256903848455, -0.0035991641475042]),
    (40, 38, [-0.061575654662101, 0.0031682384596323]),
    (40, 90, [-9.6693770564033e-10, -7.8569160521951e-10]),
    (3000, 3100, [-0.0014031076087079, -4.6008914923739e-5]),
]
OF_BETA = (tails.betainc_a, tails.betainc_b, tails.betainc_aa, tails.betainc_ab, tails.betainc_bb)
OF_GAMMA = (tails.gammainc_k, tails.gammainc_kk)


@pytest.mark.parametrize(("a", "b", "x", "exact"), BETA)
def test_derivatives_of_the_incomplete_beta_function(a, b, x, exact):
    found = [float(function(a, b, x)) for function in OF_BETA]
    np.testing.assert_allclose(found, exact, rtol=1e-9, atol=1e-13 if a == b == 0.5 else 0.0)


@pytest.mark.parametrize(("k", "x", "exact"), GAMMA)
def test_derivatives_of_the_incomplete_gamma_function(k, x, exact):
    np.testing.assert_allclose([float(function(k, x)) for function in OF_GAMMA], exact, rtol=1e-9)


def slope(function, at, step):
    """Return a derivative by central differences of fourth order: about eight digits."""
    h = step * at
    near, far = (function(at + k * h) - function(at - k * h) for k in (1, 2))
    return (8.0 * near - far) / (12.0 * h)


def test_they_are_those_of_scipy_over_the_range_of_parameters():
    rng = np.random.default_rng(1)
    a, b = 10.0 ** rng.uniform(-1, 2, (2, 400))
    x = stats.beta.ppf(rng.uniform(0.01, 0.99, 400), a, b)
    inside = (x > 1e-10) & (x < 1.0 - 1e-10)
    a, b, x = a[inside], b[inside], x[inside]
    # What differences keep of a function near 1, with a step of .001 of the parameter.
    error = 1e-15 / (1e-3 * np.array([a, b]))
    assert np.all(abs(tails.betainc_a(a, b, x) - slope(lambda v: special.betainc(v, b, x), a, 1e-3)) < 1e-8 + error[0])
    assert np.all(abs(tails.betainc_b(a, b, x) - slope(lambda v: special.betainc(a, v, x), b, 1e-3)) < 1e-8 + error[1])
    k = 10.0 ** rng.uniform(-1, 4, 400)
    x = stats.gamma.ppf(rng.uniform(0.01, 0.99, 400), k)
    assert np.all(abs(tails.gammainc_k(k, x) - slope(lambda v: special.gammainc(v, x), k, 1e-4)) < 1e-7)


def test_at_the_ends_of_the_support_they_are_0_and_outside_not_a_number():
    values = tails.betainc_aa([2.0, 2.0, 2.0, -1.0, np.inf, 2.0], 3.0, [0.0, 1.0, 1.5, 0.5, 0.5, np.nan])
    np.testing.assert_array_equal(values, [0.0, 0.0, np.nan, np.nan, np.nan, np.nan])
    values = tails.gammainc_kk([2.0, 2.0, 0.0, 2.0], [0.0, np.inf, 1.0, -1.0])
    np.testing.assert_array_equal(values, [0.0, 0.0, np.nan, np.nan])
    assert tails.betainc_a(np.ones(0), 1.0, 0.5).shape == (0,)


def test_arguments_broadcast_and_what_is_kept_is_not_mixed_up():
    a, x = np.array([[0.5], [4.0]]), np.array([0.1, 0.6, 0.9])
    together = tails.betainc_ab(a, 2.0, x)
    assert together.shape == (2, 3)
    one_by_one = [[float(tails.betainc_ab(u, 2.0, v)) for v in x] for (u,) in a]
    np.testing.assert_allclose(together, one_by_one, rtol=1e-13)
    first = tails.betainc_a(a, 2.0, x)
    first[:] = np.nan  # a caller's own
    assert np.isfinite(tails.betainc_a(a, 2.0, x)).all()
    x[:] = x[::-1].copy()  # the same array, with other numbers
    np.testing.assert_allclose(tails.betainc_ab(a, 2.0, x), together[:, ::-1], rtol=1e-13)


def test_more_elements_than_are_evaluated_at_once():
    x = np.linspace(0.001, 0.999, 2 * tails._AT_A_TIME + 3)
    whole = tails.betainc_bb(3.0, 0.7, x)
    parts = np.concatenate([tails.betainc_bb(3.0, 0.7, part) for part in np.array_split(x, 5)])
    np.testing.assert_allclose(whole, parts, rtol=1e-14)


FUNCTIONS = {
    "betainc": (lambda v: pt.betainc(v[0], v[1], pt.sigmoid(v[2])), [2.3, 0.7, 0.4]),
    "gammainc": (lambda v: pt.gammainc(v[0], v[1]), [2.3, 1.7]),
    "gammaincc": (lambda v: pt.gammaincc(v[0] * v[1], v[1]), [2.3, 1.7]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_graph_has_gradient_and_hessian_and_none_runs_in_python(name):
    function, at = FUNCTIONS[name]
    v = pt.dvector("v")
    [smooth] = programs.with_derivatives([pt.log(function(v))])
    grad = pt.grad(smooth, v)
    hessian = pt.stack([pt.grad(grad[i], v) for i in range(len(at))])
    compiled = pytensor.function([v], [smooth, grad, hessian], mode=quick_mode())
    assert not python_loops(compiled.maker.fgraph.apply_nodes)
    at = np.array(at)
    steps = 1e-4 * np.eye(len(at))
    found = compiled(at)
    assert found[0] == pytest.approx(float(pt.log(function(pt.constant(at))).eval(mode=quick_mode())), rel=1e-13)
    # Central differences: errors of the square of a step, and of rounding.
    np.testing.assert_allclose(found[1], [(compiled(at + s)[0] - compiled(at - s)[0]) / 2e-4 for s in steps], atol=1e-7)
    np.testing.assert_allclose(found[2], [(compiled(at + s)[1] - compiled(at - s)[1]) / 2e-4 for s in steps], atol=1e-7)


def hurdle_of_counts(n=200):
    rng = np.random.default_rng(2)
    x = rng.normal(size=n)
    counts = np.zeros(n, dtype=int)
    positive = rng.random(n) < 0.7
    while (again := positive & (counts == 0)).any():
        mean = np.exp(1.0 + 0.5 * x[again])
        counts[again] = rng.negative_binomial(2.0, 2.0 / (2.0 + mean))
    with pm.Model() as model:
        level, slope_ = pm.Normal("level", 0, 2), pm.Normal("slope", 0, 1)
        alpha, psi = pm.Exponential("alpha", 0.5), pm.Beta("psi", 2, 2)
        pm.HurdleNegativeBinomial("y", psi=psi, mu=pm.math.exp(level + slope_ * x), alpha=alpha, observed=counts)
    return model


def censored_t(n=200):
    rng = np.random.default_rng(3)
    y = np.minimum(1.0 + 0.8 * rng.standard_t(4, n), 1.8)
    with pm.Model() as model:
        mu, sigma, nu = pm.Normal("mu", 0, 2), pm.HalfNormal("sigma", 2), pm.Gamma("nu", 2, 0.1)
        pm.Censored("y", pm.StudentT.dist(nu=nu, mu=mu, sigma=sigma), lower=None, upper=1.8, observed=y)
    return model


def censored_gamma(n=60):
    y = np.minimum(np.random.default_rng(4).gamma(2.0, 1.0, n), 2.5)
    with pm.Model() as model:
        alpha, rate = pm.Exponential("alpha", 0.5), pm.Exponential("rate", 1.0)
        pm.Censored("y", pm.Gamma.dist(alpha=alpha, beta=rate), lower=None, upper=2.5, observed=y)
    return model


@pytest.mark.parametrize("build", [hurdle_of_counts, censored_t, censored_gamma])
def test_derivatives_of_log_densities(build):
    density = LogDensity(build())
    theta = np.random.default_rng(5).normal(0, 0.2, (2, density.n_dim)) + 0.5
    grad, hessian = density.logp_grad(theta)[1], density.hessian(theta)
    steps = 1e-4 * np.eye(density.n_dim)
    for k, step in enumerate(steps):
        differences = (density.logp(theta + step) - density.logp(theta - step)) / 2e-4
        np.testing.assert_allclose(grad[:, k], differences, rtol=1e-5, atol=1e-4)
        differences = (density.logp_grad(theta + step)[1] - density.logp_grad(theta - step)[1]) / 2e-4
        np.testing.assert_allclose(hessian[:, k], differences, rtol=1e-5, atol=1e-4)


def test_jax_calls_numpy_for_them():
    """Rows share all predictors here, too."""
    pytest.importorskip("jax", reason="the backend needs JAX")
    with censored_gamma():
        quick, jax = (
            pm.fit(method="ngvi", random_seed=1, progressbar=False, backend=backend, posterior="gaussian")
            for backend in ("quick", "jax")
        )
    # Both end within the same tolerance, .005 nats, of the same optimum.
    assert jax.elbo.value == pytest.approx(quick.elbo.value, abs=0.005)
    np.testing.assert_allclose(jax.mean_data["alpha_log__"], quick.mean_data["alpha_log__"], atol=0.01)
