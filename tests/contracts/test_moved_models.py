"""Moved posteriors from end to end: against NUTS and other posteriors, in the plan, as results, in files."""

import functools

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
import xarray as xr

from numpy.testing import assert_allclose, assert_array_equal

import pymc_ngvi

from pymc_ngvi import NotExactError, fit_ngvi
from pymc_ngvi.posteriors.plan import Decision
from pymc_ngvi.results.persistence import sealed

pytestmark = pytest.mark.usefixtures("_one_blas_thread")

#: Standard errors that none of some fifty estimates exceeds.
MOST_ERRORS = 4.0


def fit(model, **options):
    return fit_ngvi(model=model, random_seed=1, progressbar=False, **options)


def rare(n=300, events=30):
    """Many coefficients, few events."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((n, 20))
    x[:, 1] = 0.8 * x[:, 0] + 0.6 * x[:, 1]
    score = x[:, :4] @ np.array([1.0, -1.0, 0.8, 0.5]) + rng.logistic(size=n)
    with pm.Model() as model:
        level, slope = pm.Normal("level", 0.0, 5.0), pm.Normal("slope", 0.0, 2.5, shape=20)
        pm.Deterministic("odds", pm.math.exp(slope[0]))
        pm.Bernoulli("y", logit_p=level + x @ slope, observed=(score >= np.sort(score)[-events]).astype(int))
    return model


def horseshoe():
    rng = np.random.default_rng(4)
    x = rng.standard_normal((40, 8))
    y = 2.0 * x[:, 0] - 1.0 * x[:, 1] + rng.standard_normal(40)
    with pm.Model() as model:
        tau, lam = pm.HalfCauchy("tau", 0.2), pm.HalfCauchy("lam", 1.0, shape=8)
        c2, z = pm.InverseGamma("c2", 2.0, 8.0), pm.Normal("z", shape=8)
        beta = pm.Deterministic("beta", z * tau * lam * pt.sqrt(c2 / (c2 + tau**2 * lam**2)))
        pm.Normal("y", x @ beta, pm.HalfNormal("sd", 2.0), observed=y)
    return model


def overdispersed():
    rng = np.random.default_rng(5)
    n, x = rng.integers(5, 20, 40), rng.standard_normal((40, 3))
    y = rng.binomial(n, 1.0 / (1.0 + np.exp(1.0 - 0.7 * x[:, 0])))
    with pm.Model() as model:
        p = pm.math.sigmoid(pm.Normal("level", 0.0, 2.0) + x @ pm.Normal("slope", 0.0, 1.5, shape=3))
        size = pm.HalfNormal("size", 50.0)
        pm.BetaBinomial("y", alpha=p * size, beta=(1.0 - p) * size, n=n, observed=y)
    return model


def bent(d=16):
    """Far from any Gaussian, and without independent blocks: no other posterior goes with it."""
    turned = np.linalg.qr(np.random.default_rng(1).standard_normal((d, d)))[0]
    with pm.Model() as model:
        x = pm.Normal("x", shape=d)
        u = pm.Deterministic("u", x @ turned)
        pm.Potential("bent", -4.0 * ((u[1:4] - u[0] ** 2) ** 2).sum())
    return model


#: Means and standard deviations of 100,000 draws by NUTS (nutpie 0.16), of effective sizes above 40,000.
BY_NUTS = {
    "slope": (
        [0.562, -1.004, 0.747, 0.17, -0.024, 0.699, -0.422, 0.187, -0.104, 0.077, -0.311, 0.231, -0.259, -0.689, -0.045,
         0.615, 0.316, -0.106, 0.368, -0.22],
        [0.422, 0.429, 0.251, 0.258, 0.251, 0.275, 0.242, 0.214, 0.247, 0.218, 0.243, 0.241, 0.238, 0.231, 0.259, 0.257,
         0.226, 0.243, 0.243, 0.258],
    ),
    "beta": (
        [1.793, -1.123, -0.01, -0.104, 0.086, 0.004, 0.036, -0.022],
        [0.125, 0.153, 0.093, 0.122, 0.109, 0.091, 0.1, 0.101],
    ),
}  # fmt: skip


@functools.cache
def moved(make):
    return fit(make(), posterior="moved", tol=1.0)  # any fit will do to begin at


@pytest.mark.parametrize(("make", "name"), [(rare, "slope"), pytest.param(horseshoe, "beta", marks=pytest.mark.slow)])
def test_it_is_that_of_nuts(make, name):
    approx = moved(make)
    assert approx.is_exact
    assert approx.diagnose().reliable
    draws = approx.chains().posterior[name].values
    draws = draws.reshape(-1, draws.shape[-1])
    mean, sd = map(np.array, BY_NUTS[name])
    size = approx.checks.effective_size
    # The references have three digits, and an error of their own.
    assert_allclose((draws.mean(axis=0) - mean) / sd, 0.0, atol=MOST_ERRORS / np.sqrt(size) + 0.02)
    # Of tails like those of a horseshoe, squares have a kurtosis of some ten.
    assert_allclose(draws.std(axis=0) / sd, 1.0, atol=MOST_ERRORS * np.sqrt(10.0 / (4.0 * size)) + 0.02)


def test_it_is_the_exact_posterior_where_there_is_one():
    approx, exact = moved(overdispersed), fit(overdispersed(), posterior="exact")
    size = min(approx.checks.effective_size, exact.checks.effective_size)
    error = np.sqrt(2.0 / size)
    assert_allclose((approx.mean_flat - exact.mean_flat) / exact.sd_flat, 0.0, atol=MOST_ERRORS * error)
    assert_allclose(approx.sd_flat / exact.sd_flat, 1.0, atol=MOST_ERRORS * error)


# --- in the plan ------------------------------------------------------------------------------------------------------


def test_it_is_taken_where_nothing_else_can_be_relied_on():
    approx = fit(bent())
    assert approx.record.plan.taken.kind == "moved"
    assert approx.record.plan.of("gaussian").outcome is Decision.CAME_FIRST
    assert approx.is_exact
    assert "Exact up to Monte Carlo error" in approx.summary().lines[-1]
    asked = fit(bent(), posterior="moved")
    assert_array_equal(approx.draw_flat(10, 1), asked.draw_flat(10, 1))


def test_its_price_is_named_where_it_is_too_dear():
    gaussian, dear = fit(bent(), posterior="gaussian"), fit(bent(), max_seconds=0.01)
    assert dear.record.plan.of("moved").outcome is Decision.TOO_DEAR
    assert dear.record.plan.taken.kind == "gaussian"
    for approx in (gaussian, dear):
        assert "Not reliable" in str(approx.summary())
        assert "posterior='moved' (about " in approx.diagnose().reasons[0]
    assert "max_seconds=0.01 leaves" in dear.record.posterior


def test_chains_that_do_not_arrive_leave_the_gaussian(monkeypatch):
    monkeypatch.setattr("pymc_ngvi.posteriors.kinds._MOST", 0.1)
    with pytest.raises(NotExactError, match=r"the chains have not converged \(128 chains from 8 points") as caught:
        fit(bent(), posterior="moved")
    gaussian = fit(bent(), posterior="gaussian")
    assert_array_equal(caught.value.approx.mean_flat, gaussian.mean_flat)
    approx = fit(bent())
    assert approx.record.plan.of("moved").outcome is Decision.FAILED
    assert "have not converged" in approx.record.posterior
    assert "posterior='moved'" not in str(approx.diagnose())


def test_it_does_not_go_with_minibatches():
    with pm.Model() as model:
        batch = pm.Minibatch(np.arange(100.0), batch_size=10)
        pm.Normal("y", pm.Normal("x"), observed=batch, total_size=100)
    with pytest.raises(ValueError, match=r"no moved posterior: the model reads pm.Minibatch data"):
        fit(model, posterior="moved")


def test_a_deterministic_that_fails_is_left_out(monkeypatch):
    def fails(*args, **options):
        raise FloatingPointError

    with pm.Model() as model:
        x = pm.Normal("x", shape=2)
        pm.Deterministic("y", x.sum())
        pm.Potential("bent", -((x[0] ** 2 - x[1]) ** 2))
    monkeypatch.setattr("pymc_ngvi.density.constrain.Functionals.at", fails)
    assert fit(model, posterior="moved").checks.n_quantities == 3


# --- as a result ------------------------------------------------------------------------------------------------------


def test_chains_are_chains():
    approx = moved(rare)
    tree, checks = approx.chains(), approx.checks
    assert dict(tree.posterior.sizes)["chain"] == checks.n_chains == 128
    assert tree.posterior.sizes["draw"] == checks.n_draws
    start = tree.sample_stats["superchain"].values
    assert_array_equal(start[:, 0], np.repeat(np.arange(8), 16))
    assert_allclose(tree.posterior["odds"], np.exp(tree.posterior["slope"].values[..., 0]))
    log_p = approx.density.logp(approx._state.x[3])
    assert_allclose(tree.sample_stats["log_p"].values[:, 3], log_p, rtol=1e-8)
    with pytest.raises(ValueError, match="There are no chains"):
        approx.gaussian.chains()


def test_draws_are_those_of_the_chains():
    approx = moved(rare)
    theta = approx.draw_flat(4_000, 1)
    kept = {row.tobytes() for row in approx._state.pool.g}
    assert all(row.tobytes() in kept for row in theta)
    assert_allclose((theta.mean(axis=0) - approx.mean_flat) / approx.sd_flat, 0.0, atol=0.1)
    cov = np.cov(approx._state.pool.g.T, bias=True)
    assert_allclose(approx._state.cov_block(np.array([3, 0])), cov[np.ix_([3, 0], [3, 0])])
    assert approx.sample(500, random_seed=1).posterior.attrs["effective_sample_size"] == approx.checks.effective_size


def test_the_marginal_likelihood_is_that_of_the_exact_posterior():
    found, exact = moved(overdispersed).log_marginal_likelihood, fit(overdispersed(), posterior="exact")
    expected = exact.log_marginal_likelihood
    assert 0.0 < found.se < 0.05
    assert_allclose(found.value, expected.value, atol=MOST_ERRORS * np.hypot(found.se, expected.se))


def test_there_is_no_marginal_likelihood_where_no_gaussian_is_near(monkeypatch):
    approx = fit(overdispersed(), posterior="moved", tol=1.0)
    monkeypatch.setattr("pymc_ngvi.moves.posterior.MOST_ERROR", 1e-6)
    with pytest.raises(ValueError, match="moved posterior has no log_marginal_likelihood: no Gaussian is near enough"):
        approx.log_marginal_likelihood  # noqa: B018
    with pytest.raises(ValueError, match=r"nothing for corrected.. to correct"):
        moved(overdispersed).corrected(100)


@pytest.mark.parametrize("name", ["x", "logp"])
def test_arrays_that_do_not_go_together(name):
    tree = moved(overdispersed).to_datatree()
    group = tree["approximation"].to_dataset()
    key = f"q.content.{name}"
    short = group[key].values[:-1]
    dims = ("u", "v", "w")[: short.ndim]
    tree["approximation"] = xr.DataTree(sealed(group.drop_vars(key).assign({key: (dims, short)})))
    with pytest.raises(ValueError, match=r"is damaged: .*do not go together"):
        pymc_ngvi.load(tree, overdispersed())
