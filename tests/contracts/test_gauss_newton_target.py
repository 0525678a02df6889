"""The Gauss-Newton diagonal: sums over observations of squared gradients, against finite differences row by row."""

import models
import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

from pymc.pytensorf import compile as pymc_compile
from pytensor.compile.mode import Mode
from scipy import stats
from scipy.special import expit

from pymc_ngvi import LogDensity
from pymc_ngvi.density import without_c
from pymc_ngvi.graphs.backends import python_loops

_RNG = np.random.default_rng(41)
N = 40
X = _RNG.normal(size=(N, 2))
BINARY = (_RNG.random(N) < expit(0.3 + X @ [0.8, -1.1])).astype(float)
GROUP = _RNG.integers(0, 5, size=N)
COUNTS = _RNG.poisson(np.exp(0.4 + X @ [0.5, -0.3] + _RNG.normal(0.0, 0.5, size=5)[GROUP])).astype(float)
INSTEAD = r"estimator='price'"


def differences(function, theta, step=1e-5):
    """Return central differences of a function of the flat vector: (n_dim, ...)."""
    shifts = step * np.eye(len(theta))
    return np.stack([(function(theta + e) - function(theta - e)) / (2 * step) for e in shifts])


def by_rows(rows, prior, theta, scale=1.0):
    """Return the diagonal at one point: by first differences of each row and second differences of the prior."""
    squares = scale * (differences(rows, theta).reshape(len(theta), -1) ** 2).sum(axis=1)
    # Rounding 1e-16 / step^2 = 1e-9 of log p, truncation step^2 / 12 = 1e-8 of its fourth derivative.
    step, axes = 3e-4, np.eye(len(theta))
    second = [(prior(theta + step * e) - 2 * prior(theta) + prior(theta - step * e)) / step**2 for e in axes]
    return squares - np.array(second)


def check(density, rows, prior, theta, scale=1.0):
    expected = np.mean([by_rows(rows, prior, point, scale) for point in theta], axis=0)
    before = density.n_hessians
    diagonal = -density.gauss_newton(theta).diagonal()
    assert diagonal.shape == (density.n_dim,)
    assert density.n_hessians == before + len(theta)
    np.testing.assert_allclose(diagonal, expected, rtol=1e-5, atol=1e-5)


def logistic(x=X, y=BINARY, total_size=None):
    with pm.Model() as model:
        intercept = pm.Normal("intercept", 0.1, 3.1)
        slope = pm.Normal("slope", 0.1, 2.1, shape=2)
        pm.Bernoulli("y", logit_p=intercept + x @ slope, observed=y, total_size=total_size)
    return model


def logistic_rows(theta, rows=slice(None)):
    return stats.bernoulli.logpmf(BINARY[rows], expit(theta[0] + X[rows] @ theta[1:]))


def logistic_prior(theta):
    return stats.norm.logpdf(theta, 0.1, [3.1, 2.1, 2.1]).sum()


# --- values -----------------------------------------------------------------------------------------------------------


def test_minibatch():
    """Rows of the batch, each counted N / 8 times: not the squares of what is counted so."""
    x, y = pm.Minibatch(X, BINARY, batch_size=8)
    density = LogDensity(logistic(x, y, total_size=N), "quick")
    theta, rng = models.random_points(density, 2, 3), np.random.default_rng(4)
    for _ in range(3):  # compiled once
        [rows] = [rows.get_value() for rows in density.minibatches.rows]
        check(density, lambda point, rows=rows: logistic_rows(point, rows), logistic_prior, theta, scale=N / 8)
        density.next_batch(rng)


def test_observed_variables_with_scales_of_their_own():
    other = np.array([[0.3, -0.4], [1.2, 0.9], [0.1, -2.0]])  # elements, not rows of the matrix
    with pm.Model() as model:
        mu = pm.Normal("mu", 0.1, 1.3)
        sigma = pm.HalfNormal("sigma", 1.1)
        pm.Normal("y", mu, 0.7, observed=COUNTS, total_size=2 * N)
        pm.Normal("z", [mu, 0.0], sigma, observed=other, total_size=[12, None])
        pm.Normal("scalar", mu, sigma, observed=0.4)
    density = LogDensity(model, "quick")

    def rows(theta):
        mu, sigma = theta[0], np.exp(theta[1])
        z = stats.norm.logpdf(other, [mu, 0.0], sigma).ravel()
        # Squares are scaled by 2 and 4: gradients by their roots.
        y = stats.norm.logpdf(COUNTS, mu, 0.7)
        return np.concatenate([np.sqrt(2.0) * y, 2.0 * z, [stats.norm.logpdf(0.4, mu, sigma)]])

    def prior(theta):
        return stats.norm.logpdf(theta[0], 0.1, 1.3) + stats.halfnorm.logpdf(np.exp(theta[1]), scale=1.1) + theta[1]

    check(density, rows, prior, models.random_points(density, 2, 10))


def censored():
    with pm.Model() as model:
        mu = pm.Normal("mu", 0.1, 1.3, shape=2)
        sigma = pm.HalfNormal("sigma", 1.1)
        latent = pm.Normal.dist(X @ mu, sigma)
        pm.Censored("y", latent, lower=-1.0, upper=1.2, observed=np.clip(2.0 * X[:, 0], -1.0, 1.2))
    return model


def constant_likelihood():
    """One observed variable that no free variable has a part in."""
    with pm.Model() as model:
        pm.Normal("z", 0.1, 1.3, observed=COUNTS)
        pm.Normal("y", pm.Normal("mu", 0.1, 1.3), 0.9, observed=COUNTS)
    return model


MULTIVARIATE = ("lkj", "gp")
OTHERS = {
    **{name: make for name, make in models.FEATURES.items() if name not in (*MULTIVARIATE, "potential")},
    **models.STABILITY,
    "censored": censored,
    "constant": constant_likelihood,
}


#: Rows of one likelihood or another, where no more than the scalar functions differ.
ALIKE = set(models.STABILITY) - {"ordered", "student_t", "categorical"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in ALIKE)) for n in OTHERS])
def test_equals_differences_of_pymc(name):
    """Mixtures, censored and imputed data, a Scan: PyMC's own elementwise log density, and no loops in Python."""
    model = OTHERS[name]()
    density = LogDensity(model, "quick")
    with model, without_c():
        mode = Mode("py", "fast_compile")
        rows = pt.concatenate([row.ravel() for row in model.logp(vars=model.observed_RVs, sum=False)])
        function = pymc_compile(
            model.value_vars, [rows, model.logp(vars=model.free_RVs)], mode=mode, on_unused_input="ignore"
        )

        def part(i, theta):
            return function(*density.layout.unflatten(theta).values())[i]

        theta = models.random_points(density, 2, 11)
        check(density, lambda point: part(0, point), lambda point: part(1, point), theta)
    [compiled] = models.compiled(density, "squares")
    assert python_loops(models.all_nodes(compiled.maker.fgraph.apply_nodes)) == []


# --- how --------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:PyTensor could not link to a BLAS:UserWarning")  # slow, not wrong
@pytest.mark.parametrize("backend", ["jax", pytest.param("numba", marks=pytest.mark.slow)])
def test_backends_agree(backend):
    pytest.importorskip(backend)
    theta = 0.3 * np.random.default_rng(12).normal(size=(2, 3))
    expected = -LogDensity(logistic(), "quick").gauss_newton(theta).diagonal()
    diagonal = -LogDensity(logistic(), backend).gauss_newton(theta).diagonal()
    np.testing.assert_allclose(diagonal, expected, rtol=1e-10)


def test_blocks_of_coordinates():
    """More coordinates than directions in a call, and not a multiple of them."""
    with pm.Model() as model:
        x = pm.Normal("x", 0.1, 1.3, shape=37)
        pm.Normal("y", x**3 + x[0], 0.9, observed=np.linspace(-1.0, 1.0, 37))
    density = LogDensity(model, "quick")
    theta = models.random_points(density, 2, 13)
    expected = -density.gauss_newton(theta).diagonal()
    density = LogDensity(model, "quick")
    density.by_observation.rest.n_in_call = 16
    assert density.by_observation.squares().way == "axes"
    np.testing.assert_allclose(-density.gauss_newton(theta).diagonal(), expected, rtol=1e-12)


# --- models that are refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MULTIVARIATE[:1])
def test_multivariate_observations_are_refused(name):
    density = LogDensity(models.FEATURES[name](), "quick")
    with pytest.raises(ValueError, match=rf"observed variables 'y' is not one of each element.*{INSTEAD}"):
        -density.gauss_newton(density.initial_point()[None]).diagonal()


def test_potentials_are_refused():
    model = logistic()
    with model:
        pm.Potential("penalty", -(model["slope"] ** 4).sum())
    with pytest.raises(ValueError, match=rf"Potentials \('penalty'\).*CustomDist.*{INSTEAD}"):
        -LogDensity(model, "quick").gauss_newton(np.zeros((1, 3))).diagonal()


def test_models_without_observed_variables_are_refused():
    with pm.Model() as model:
        pm.Normal("x")
    with pytest.raises(ValueError, match=rf"no observed variables.*{INSTEAD}"):
        -LogDensity(model, "quick").gauss_newton(np.zeros((1, 1))).diagonal()
