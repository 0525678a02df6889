"""Log p as a sum over rows: value, slopes, curvatures and expectations are those of PyTensor and of draws."""

import warnings

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

from numpy.testing import assert_allclose
from scipy import stats

from pymc_ngvi import ConvergenceWarning, LogDensity
from pymc_ngvi.core.types import MatrixHessian, RowRules
from pymc_ngvi.density import by_rows
from pymc_ngvi.density.expectations import Expectations
from pymc_ngvi.families import DiagonalState, FullState
from pymc_ngvi.fitting.options import FitOptions
from pymc_ngvi.fitting.problem import make_family
from pymc_ngvi.rows.expectation import blocks, n_levels, rule
from pymc_ngvi.rows.row_hessian import SecondDerivatives

N, J = 24, 4
RNG = np.random.default_rng(3)
X, GROUP = RNG.normal(size=N), np.repeat(np.arange(J), N // J)
COUNTS, BINARY, REAL = RNG.poisson(1.3, N), RNG.binomial(1, 0.4, N), RNG.normal(size=N)


def predictor(*, centred=True):
    """A random intercept and a slope."""
    a, b, s = pm.Normal("a", 0, 2), pm.Normal("b", 0, 2), pm.HalfNormal("s", 1)
    u = pm.Normal("u", 0, s, shape=J) if centred else s * pm.Normal("z", 0, 1, shape=J)
    return a + b * X + u[GROUP]


def logistic():
    pm.Bernoulli("y", logit_p=predictor(), observed=BINARY)


def poisson():
    pm.Poisson("y", pm.math.exp(predictor()), observed=COUNTS)


def shared_data():
    counts, x = pm.Data("counts", COUNTS), pm.Data("x", X)
    pm.Poisson("y", pm.math.exp(pm.Normal("a", 0, 2) + pm.Normal("b", 0, 2) * x), observed=counts)


def negative_binomial():
    pm.NegativeBinomial("y", mu=pm.math.exp(predictor()), alpha=pm.Exponential("shape", 1), observed=COUNTS)


def zero_inflated():
    pm.ZeroInflatedPoisson("y", psi=pm.Beta("psi", 2, 2), mu=pm.math.exp(predictor()), observed=COUNTS)


def student():
    nu, sd = pm.Gamma("nu", 3, 0.3), pm.HalfNormal("sd", 1)
    pm.StudentT("y", nu=nu, mu=predictor(), sigma=sd, observed=REAL)


def censored():
    inner = pm.Normal.dist(predictor(), pm.HalfNormal("sd", 1))
    pm.Censored("y", inner, lower=-0.8, upper=0.8, observed=np.clip(REAL, -0.8, 0.8))


def missing():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pm.exceptions.ImputationWarning)
        pm.Normal("y", predictor(), pm.HalfNormal("sd", 1), observed=np.where(np.arange(N) == 3, np.nan, REAL))


def ordered():
    cut = pm.Normal("cut", 0, 2, shape=2, transform=pm.distributions.transforms.ordered, initval=[-1.0, 1.0])
    pm.OrderedLogistic("y", eta=pm.Normal("b", 0, 1) * X, cutpoints=cut, observed=RNG.integers(3, size=N))


def categorical():
    eta = pt.stack([np.zeros(N), pm.Normal("b", 0, 1) * X, pm.Normal("c", 0, 1) + 0.3 * X], axis=1)
    pm.Categorical("y", logit_p=eta, observed=RNG.integers(3, size=N))


def potential():
    eta = predictor()
    pm.Potential("y", (pt.as_tensor(REAL) * eta - pm.math.exp(eta)).sum())


def custom():
    pm.CustomDist("y", predictor(), logp=lambda value, mu: -(pt.abs(value - mu) ** 1.5), observed=REAL)


def noncentred():
    pm.Bernoulli("y", logit_p=predictor(centred=False), observed=BINARY)


def noncentred_normal():
    pm.Normal("y", predictor(centred=False), pm.HalfNormal("sd", 1), observed=REAL)


def walk():
    x = pm.GaussianRandomWalk("x", sigma=pm.HalfNormal("s", 1), init_dist=pm.Normal.dist(0, 1), steps=N - 1)
    pm.Poisson("y", pm.math.exp(x), observed=COUNTS)


def shared_last():
    """The number that is the same for all comes in after what is each row's own."""
    shift = pm.Normal("shift", 0, 1)
    pm.Potential("p", -pt.logaddexp(pt.sqr(predictor()), pt.sqr(shift)))


def correlated():
    """A Cholesky factor, whose elements are put in place one by one, times effects; its prior is one row of three."""
    chol, _, _ = pm.LKJCholeskyCov("chol", n=2, eta=2.0, sd_dist=pm.Exponential.dist(1.0))
    u = pm.Normal("z", 0, 1, shape=(J, 2)) @ chol.T
    pm.Bernoulli("y", logit_p=u[GROUP, 0] + u[GROUP, 1] * X, observed=BINARY)


def process():
    """A Gaussian process with unknown kernel, integrated out: one row of three predictors."""
    length, height, sd = pm.Gamma("length", 3, 2), pm.HalfNormal("height", 1), pm.HalfNormal("sd", 1)
    kernel = height**2 * pt.exp(-0.5 * ((X[:, None] - X) / length) ** 2)
    pm.MvNormal("y", np.zeros(N), kernel + (sd**2 + 1e-6) * pt.eye(N), observed=REAL)


def not_centred():
    sd, z = pm.HalfNormal("sd", 1.3, shape=2), pm.Normal("z", 0.1, 1.2, shape=(J, 2))
    eta = pm.Normal("a") + z[GROUP, 0] * sd[0] + z[GROUP, 1] * sd[1] * X
    pm.StudentT("y", 4, eta, sigma=pm.HalfNormal("noise"), observed=REAL)


def simplex():
    """Of two parts: a log-sum of exponentials of x and -x."""
    weight = pm.Dirichlet("weight", np.array([1.5, 2.5]))
    pm.Normal("y", X * pm.Normal("beta") + weight[0], 1.2, observed=REAL)


def branches():
    """Of which data choose one for each row, with other parameters."""
    sd, b = pm.HalfNormal("sd", 1.0), pm.Normal("b", shape=J)
    chosen = pt.switch(BINARY.astype(bool), sd, b[GROUP])
    pm.Potential("p", -pt.log1p(pt.exp(X * pm.Normal("beta") + chosen)).sum())


def clipped():
    b = pm.Normal("b", shape=J)
    pm.Potential("p", -(pt.exp(pt.clip(b[GROUP], -0.2, 0.3)) + pt.maximum(b[GROUP], 0.1) ** 2).sum())


def several_groups():
    """Rows that are functions of a sum, and a predictor that occurs in two rows of a kind."""
    sd, z, w = pm.HalfNormal("sd", shape=2), pm.Normal("z", shape=J), pm.Normal("w", shape=5)
    pm.Poisson("y", pt.exp(sd[0] * z[GROUP] + sd[1] * w[np.arange(N) % 5] * X), observed=COUNTS)


def wide():
    """As many coefficients as rows: predictors are looked at through the factor of a Gaussian."""
    design = np.random.default_rng(4).normal(size=(12, 9))
    pm.Bernoulli("y", logit_p=design @ pm.Normal("beta", 0.0, 1.0, shape=9), observed=BINARY[:12])


def sums():
    """Elements to which others are added."""
    a, b = pm.Normal("a", 0, 1, shape=N), pm.Normal("b", 0, 1, shape=3)
    pm.Poisson("y", pt.inc_subtensor(pt.exp(0.3 * a)[1:4], pt.exp(b)), observed=COUNTS)


MODELS = (
    logistic, poisson, shared_data, negative_binomial, zero_inflated, student, censored, missing, ordered, categorical,
    potential, custom, noncentred, noncentred_normal, walk,
    correlated, process, sums, shared_last, wide,
)  # fmt: skip
#: And some whose expectations draws do not show within the same errors.
OF_DERIVATIVES = (*MODELS, not_centred, simplex, branches, clipped, several_groups)


@pytest.fixture(scope="module")
def densities():
    """Each log density once."""
    made = {}

    def of(build):
        if build not in made:
            with pm.Model() as model:
                build()
            made[build] = LogDensity(model)
        return made[build]

    return of


@pytest.fixture(autouse=True)
def _always(monkeypatch):
    """Hessians by rows also where these have many predictors, and are few."""
    monkeypatch.setattr(by_rows, "FEW_PREDICTORS", 30)


def points(density, n, seed):
    """Points about the start."""
    return density.initial_point() + 0.7 * np.random.default_rng(seed).normal(size=(n, density.n_dim))


def dense(density, seed):
    """A Gaussian with correlations about the start."""
    rng, d = np.random.default_rng(seed), density.n_dim
    root = np.tril(0.1 * rng.normal(size=(d, d)), -1) + np.diag(rng.uniform(0.1, 0.4, d))
    return FullState(density.initial_point() + 0.2 * rng.normal(size=d), root)


@pytest.mark.parametrize("build", OF_DERIVATIVES, ids=lambda build: build.__name__)
def test_value_and_derivatives_are_those_of_pytensor(densities, build):
    """For one point as for several."""
    density = densities(build)
    assert density.rows is not None
    theta = points(density, 5, seed=7)
    expected, slope = density._batch("logp_grad", theta)  # from the graph of log p
    hessian = density.hessian(theta)
    for some in (slice(0, 1), slice(0, 5)):
        logp, grad = density.logp_grad(theta[some])
        assert_allclose(density.rows.at(theta[some]), expected[some], rtol=1e-10)
        assert_allclose(logp, expected[some], rtol=1e-10)
        assert_allclose(grad, slope[some], rtol=1e-8, atol=1e-8 * max(1.0, np.abs(slope).max()))
        mean, found = hessian[some].mean(axis=0), density.mean_hessian(theta[some])
        atol = 1e-11 * np.abs(mean).max()
        assert_allclose(found.products(np.eye(density.n_dim)), mean, atol=atol)
        assert_allclose(found.diagonal(), np.diagonal(mean), atol=atol)
        if density.pattern is not None:
            assert_allclose(density.pattern.symmetric(found.values()).toarray(), mean, atol=atol)
    assert density.rows is not None, "they were not given up"


@pytest.mark.parametrize(
    "build", [poisson, not_centred, ordered, simplex, branches, clipped], ids=lambda build: build.__name__
)
def test_the_pattern_is_that_of_the_graph(densities, build):
    density = densities(build)
    expected = density.second.pattern_by_graph.matrix.toarray()
    np.testing.assert_array_equal(density.structural_pattern.matrix.toarray(), expected)


def test_new_data_have_a_new_pattern_and_hessian():
    with pm.Model() as model:
        other = pm.Data("other", np.arange(12))
        effect = pm.Normal("effect", 0.1, 1.3, shape=12)
        pm.Poisson("y", pt.exp(effect + effect[other]), observed=COUNTS[:12])
    density, theta = LogDensity(model), np.full((1, 12), 0.2)
    assert density.pattern.n_entries == len(density.mean_hessian(theta).values()) == 12
    with model:
        pm.set_data({"other": np.roll(np.arange(12), 1)})
    assert density.pattern.n_entries == 24
    matrix = density.pattern.symmetric(density.mean_hessian(theta).values()).toarray()
    assert_allclose(matrix, density.hessian(theta)[0], rtol=1e-12)


def test_what_rows_get_wrong_is_not_used(monkeypatch):
    """Products and values come from the graph of log p then."""
    with pm.Model() as model:
        many_groups()
    entries, right = SecondDerivatives.entries, Expectations.at
    with monkeypatch.context() as patch:
        patch.setattr(SecondDerivatives, "entries", lambda self, mean: entries(self, 1.01 * mean))
        density = LogDensity(model)
        theta = points(density, 3, seed=3)
        expected = density.hessian(theta).mean(axis=0)
        values = density.mean_hessian(theta).values()
        assert_allclose(density.pattern.symmetric(values).toarray(), expected, atol=1e-12 * np.abs(expected).max())
        assert density.rows is not None  # their values are those of log p
        density = LogDensity(model)
        found = density.mean_hessian(theta).products(np.eye(density.n_dim))
        assert_allclose(found, expected, atol=1e-12 * np.abs(expected).max())
    density = LogDensity(model)
    expected, slope = density._batch("logp_grad", theta)
    monkeypatch.setattr(Expectations, "at", lambda self, at: right(self, at) + 1e-3 * np.abs(at[:, 0]))
    np.testing.assert_array_equal(density.logp(theta), expected)
    assert density.rows is None
    np.testing.assert_array_equal(density.logp_grad(theta)[1], slope)


def test_log_p_is_minus_infinity_where_a_condition_fails(densities):
    """The shape of a negative binomial is an exponential, which may be 0: all of its rows are -inf then."""
    density = densities(negative_binomial)
    assert density.rows.reading.leaves_out_conditions
    theta = points(density, 8, seed=1)
    [shape] = (v for v in density.layout.variables if v.name == "shape")
    theta[::2, shape.where] = -800.0
    for logp in (density.logp(theta), density.logp_grad(theta)[0]):
        assert np.isneginf(logp[::2]).all()
        assert np.isfinite(logp[1::2]).all()


@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
def test_expectations_are_those_of_draws(densities, build):
    density = densities(build)
    q = dense(density, 1)
    found = density.expected(q)
    z = np.random.default_rng(2).standard_normal((4_000, density.n_dim))
    theta = q.draws(np.concatenate([z, -z]))
    logp, grad = density.logp_grad(theta)
    for exact, drawn in ((found.value, logp), *zip(found.grad, grad.T, strict=True)):
        pairs = 0.5 * (drawn[: len(z)] + drawn[len(z) :])
        assert abs(pairs.mean() - exact) < 4.5 * pairs.std() / np.sqrt(len(z)) + 1e-9 * (1.0 + abs(exact))
    assert found.error < (0.5 if build is custom else 1e-3)
    dense_hessian = MatrixHessian(found.hessian.products(np.eye(density.n_dim)))
    for state in (q, dense(density, 3)):
        curvature = state.curvature(dense_hessian)
        assert_allclose(found.hessian.whitened(state), curvature, atol=1e-10 * np.abs(curvature).max())


@pytest.mark.parametrize(
    "build", [logistic, student, noncentred_normal, censored, wide], ids=lambda build: build.__name__
)
def test_gradient_and_hessian_are_derivatives_of_the_value(densities, build):
    """In the mean, and by Price's theorem in the covariance."""
    density = densities(build)
    q = dense(density, 4)
    found, d, step = density.expected(q), density.n_dim, 1e-4
    direction = np.random.default_rng(5).normal(size=d)

    def value(location, root):
        return density.expected(FullState(location, root), found.rules).value  # others err otherwise

    slope = (value(q.location + step * direction, q.factor) - value(q.location - step * direction, q.factor)) / step / 2
    assert_allclose(slope, found.grad @ direction, rtol=1e-4, atol=1e-4)
    lower = np.tril(np.random.default_rng(6).normal(size=(d, d)))
    change = lower @ q.factor.T + q.factor @ lower.T
    slope = (value(q.location, q.factor + step * lower) - value(q.location, q.factor - step * lower)) / step / 2
    hessian = found.hessian.products(np.eye(d))
    assert_allclose(slope, 0.5 * np.sum(hessian * change), rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_rules_are_exact_for_exponentials(k):
    slope = np.linspace(0.2, 0.5, k)
    for level in range(n_levels(blocks(k)[0]) if k != 2 else 7):
        nodes, weights = rule(k, (level,) * len(blocks(k)))
        found = weights @ np.exp(nodes @ slope)
        outer = np.multiply.outer(slope, slope)[np.tril_indices(k)]
        expected = np.exp(0.5 * slope @ slope) * np.concatenate([[1.0], slope, outer])
        finest = level == n_levels(blocks(k)[0]) - 1
        assert_allclose(found, expected, atol=1e-6 if finest else 0.05)
        assert_allclose(weights.sum(axis=1), np.eye(len(weights))[0], atol=1e-10)


@pytest.mark.parametrize("build", [logistic, student, noncentred, zero_inflated, censored], ids=lambda b: b.__name__)
@pytest.mark.parametrize("seed", [11, 12])
def test_the_error_is_not_less_than_what_finer_rules_tell(densities, build, seed):
    density = densities(build)
    q = dense(density, seed)
    found = density.expected(q)
    # Two levels more in each direction, where these are few.
    level = found.rules.level + sum(2 << 4 * block for block in range(2))
    few = np.concatenate(
        [np.full(len(f.index), f.n_levels[-1] > 4 and len(f.blocks) <= 2) for f in density.rows.functions]
    )
    finer = density.expected(q, RowRules(np.where(few, level, found.rules.level), found.rules.sd))
    assert abs(finer.value - found.value) <= found.error + 1e-9
    assert found.error < 2e-4


def test_bends_far_out_are_seen():
    """At four and a half standard deviations, where rules of few nodes have none."""
    with pm.Model() as model:
        pm.Potential("y", -1e4 * pt.maximum(pm.Normal("x", 0, 1) - 4.5, 0.0))
    q = FullState(np.zeros(1), np.eye(1))
    found = LogDensity(model).expected(q)
    beyond = stats.norm.pdf(4.5) - 4.5 * stats.norm.sf(4.5)
    prior = -0.5 * np.log(2.0 * np.pi) - 0.5
    assert abs(found.value - (prior - 1e4 * beyond)) < found.error + 1e-6
    assert found.error < 1e-3


def many_groups():
    s = pm.HalfNormal("s", 1)
    eta = pm.Normal("b", 0, 1) * np.tile(X, 5) + pm.Normal("u", 0, s, shape=5 * J)[np.repeat(np.arange(5 * J), N // J)]
    pm.Bernoulli("y", logit_p=eta, observed=np.tile(BINARY, 5))


@pytest.mark.parametrize("family", ["full", "diagonal", "block", "sparse"])
def test_families_know_the_covariances_of_rows(densities, family):
    density = densities(many_groups)
    options = FitOptions(family=family)
    q = make_family(options, density).from_scale(density.initial_point(), np.full(density.n_dim, 0.4))
    same = FullState(q.location, np.linalg.cholesky(q.cov()))
    assert_allclose(density.expected(q).value, density.expected(same).value, rtol=1e-9)
    assert_allclose(density.expected(q).grad, density.expected(same).grad, rtol=1e-7, atol=1e-8)


def overflowing():
    pm.Poisson("y", pm.math.exp(predictor(centred=False)), observed=COUNTS)


@pytest.mark.parametrize("build", [poisson, overflowing], ids=lambda build: build.__name__)
def test_a_gaussian_under_which_rows_overflow(densities, build):
    density = densities(build)
    q = FullState(density.initial_point(), np.diag(np.full(density.n_dim, 1e3)))
    assert not np.isfinite(density.expected(q).value)  # and no warning


def test_a_determinant_of_many_unknowns_is_no_row():
    with pm.Model() as model:
        x = pm.Normal("x", 0, 1, shape=(2, 2))
        pm.Potential("det", pt.log(pt.abs(pt.linalg.det(x + 5.0 * np.eye(2)))))
    assert LogDensity(model).rows is None


def test_exact_fits_hang_on_no_seed():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(200, 5))
    y = rng.binomial(1, stats.logistic.cdf(x @ [1.0, -0.5, 0.0, 0.3, 2.0]))
    fits = []
    for seed in (1, 2):
        with pm.Model():
            pm.Bernoulli("y", logit_p=x @ pm.Normal("b", 0, 10, shape=5), observed=y)
            fits.append(pm.fit(method="ngvi", random_seed=seed, posterior="gaussian", progressbar=False))
    assert [fit.record.estimator for fit in fits] == ["quadrature"] * 2
    assert fits[0].elbo == fits[1].elbo
    assert fits[0].elbo.se < 1e-3
    assert fits[0].n_gradients <= 16
    with pm.Model():
        pm.Bernoulli("y", logit_p=x @ pm.Normal("b", 0, 10, shape=5), observed=y)
        drawn = pm.fit(method="ngvi", estimator="price", tol=1e-3, random_seed=1, progressbar=False)
    assert abs(drawn.elbo.value - fits[0].elbo.value) < 4.0 * drawn.elbo.se + 1e-3
    assert_allclose(drawn.q.mean(), fits[0].q.mean(), atol=0.05 * fits[0].q.sd().min())


def test_kinks_are_seen():
    """A Laplace likelihood about one location, whose best Gaussian is found by quadrature on a fine grid."""
    y = np.random.default_rng(2).laplace(0.7, 1.0, 30)
    with pm.Model():
        pm.Laplace("y", pm.Normal("mu", 0, 3), 1.0, observed=y)
        approx = pm.fit(method="ngvi", random_seed=1, posterior="gaussian", progressbar=False)
    assert str(approx.status) == "converged"
    z = np.linspace(-8, 8, 4_001)
    w = stats.norm.pdf(z) / stats.norm.pdf(z).sum()

    def elbo(mean, sd):
        mu = mean + sd * z
        logp = stats.laplace.logpdf(y[:, None], mu).sum(axis=0) + stats.norm.logpdf(mu, 0, 3)
        return w @ logp + 0.5 * np.log(2 * np.pi * np.e) + np.log(sd)

    mean, sd = approx.q.mean()[0], approx.q.sd()[0]
    assert abs(elbo(mean, sd) - approx.elbo.value) < approx.elbo.se + 2e-3
    around = [elbo(mean + a * sd, sd * b) for a in (-0.1, 0.1) for b in (0.9, 1.0, 1.1)]
    assert max(around) < elbo(mean, sd) + 1e-3


def test_other_data_are_seen():
    with pm.Model() as model:
        x, y = pm.Data("x", X), pm.Data("y_obs", BINARY)
        pm.Bernoulli("y", logit_p=pm.Normal("b", 0, 1) * x, observed=y, shape=x.shape)
    density = LogDensity(model)
    q = DiagonalState.from_scale(np.zeros(1), np.full(1, 0.5))
    before = density.expected(q).value
    pm.set_data({"x": X + 1.0, "y_obs": 1 - BINARY}, model=model)
    after = density.again().expected(q).value
    fresh = LogDensity(model).expected(q).value
    assert abs(after - before) > 0.1
    assert_allclose(after, fresh, rtol=1e-12)


def test_what_is_no_row_is_told():
    with pm.Model() as model:
        kernel = pm.Exponential("scale", 1) * np.exp(-0.5 * np.subtract.outer(np.arange(30), np.arange(30)) ** 2)
        x = pm.MvNormal("x", np.zeros(30), cov=kernel + np.eye(30))
        pm.Poisson("y", pm.math.exp(x), observed=np.arange(30))
    density = LogDensity(model)
    assert density.rows is None
    with pytest.raises(ValueError, match="no sum over rows"):
        density.expected(DiagonalState.from_scale(np.zeros(31), np.ones(31)))
    with model, pytest.raises(ValueError, match="no sum over rows"):
        pm.fit(method="ngvi", estimator="quadrature", progressbar=False)


@pytest.mark.parametrize(("n", "statuses"), [(2, ["iteration limit"]), (100, ["not smooth", "outside the support"])])
def test_a_fit_goes_on_with_draws_where_a_gaussian_leaves_the_support(n, statuses):
    """At whatever iteration it ends: rates are linear in what they depend on, and may become negative."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        with pm.Model():
            rate = pm.Normal("level", 3.0, 1.0) + pm.Normal("slope", 0.0, 1.0) * X[:12]
            pm.Poisson("y", rate, observed=np.arange(12) % 4)
            approx = pm.fit(n, method="ngvi", posterior="gaussian", random_seed=1, progressbar=False)
    assert approx.record.estimator == "price"
    assert np.isfinite(approx.elbo.value)
    assert str(approx.status) in statuses
    assert approx.n_iterations <= n


@pytest.mark.parametrize(
    ("holds", "estimator"),
    [
        (lambda x: pt.all(x > -0.5), "price"),
        (lambda x: pt.all(x > -40.0), "quadrature"),
        (lambda x: pt.exp(x).sum() < 30.0, "price"),
    ],
    ids=["often", "all but never", "sum"],
)
def test_constraints_on_many_elements_are_seen(holds, estimator):
    """Rows leave them out, as they do PyMC's checks of parameters: draws tell whether they matter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        with pm.Model():
            x = pm.Normal("x", shape=20)
            pm.Potential("constraint", pt.switch(holds(x), 0.0, -np.inf))
            approx = pm.fit(30, method="ngvi", posterior="gaussian", random_seed=1, progressbar=False)
    assert approx.record.estimator == estimator
    assert (str(approx.status) == "converged") == (estimator == "quadrature")


def test_a_fit_that_stalls_goes_on_with_draws_and_loses_nothing():
    """Log-linear rates of scaled coefficients: far out, an exponential of a product of two weighs ever more."""
    rng = np.random.default_rng(66)
    x, y = rng.normal(size=(80, 6)), rng.gamma(2, 1, 80)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        with pm.Model():
            eta = pm.Normal("a") + x @ (pm.HalfNormal("scale", 3) * pm.Normal("z", shape=6))
            pm.Gamma("y", alpha=pm.HalfNormal("shape", 2), beta=pt.exp(-eta), observed=y)
            approx = pm.fit(method="ngvi", posterior="gaussian", random_seed=1, progressbar=False)
    assert approx.elbo.value > -130.0
    assert str(approx.status) in ("converged", "stalled")
    assert (approx.record.estimator == "price") == (str(approx.status) == "converged")
