"""What comes after a fit, each against a number that is known without the package."""

import functools
import re
import warnings

import arviz as az
import exact_models
import numpy as np
import pymc as pm
import pytest
import reports

from pymc.stats import compute_log_prior
from reports_models import Problem
from scipy import stats
from scipy.special import gammaln

import pymc_ngvi

from battery import closed
from battery.closed import grouped_data, grouped_moments, normal_posterior
from battery.test_cases import fit, near

pytestmark = pytest.mark.xdist_group("reports")  # they share their fits

N = 8_000
#: Standard errors of a mean of so many draws, and of a standard deviation, with the worth of most fits.
OF_MEAN, OF_SD = 5.0 / np.sqrt(1_500), 5.0 / np.sqrt(2 * 1_500)


@functools.cache
def groups():
    return fit(closed.grouped(), 1)


@functools.cache
def line():
    """The regression with known noise, with data that can be changed."""
    x, y = closed.line_data()
    with pm.Model() as model:
        data = pm.Data("x", x)
        pm.Normal("y", data @ pm.Normal("beta", 0.0, 2.0, shape=3), 0.8, observed=y)
    return fit(model, 1)


@functools.cache
def rate():
    return fit(closed.gamma_poisson(), 1)


def holds(draws, mean, sd):
    """Hold draws to a mean and a standard deviation."""
    draws = np.asarray(draws)
    axes = tuple(range(2))
    assert np.all(np.abs(draws.mean(axes) - mean) < (OF_MEAN + 0.03) * np.asarray(sd)), (draws.mean(axes), mean)
    assert np.all(np.abs(draws.std(axes) / sd - 1) < OF_SD + 0.03), (draws.std(axes), sd)


def test_summary_says_what_is_known():
    text = str(groups().summary())
    assert "Exact up to Monte Carlo error" in text
    assert "Not reliable" not in text
    mean, sd = grouped_moments(*grouped_data())["moments"]["mu"]
    found = re.search(r"\bmu\s+(-?[\d.]+)\s+([\d.]+)", text)
    near(float(found[1]), mean, (OF_MEAN + 0.05) * sd)
    near(float(found[2]), sd, (OF_SD + 0.05) * sd)


def test_moments_without_draws():
    mean, covariance, evidence = normal_posterior(*closed.line_data(), 2.0, 0.8)
    np.testing.assert_allclose(line().mean_data["beta"], mean, rtol=1e-3)
    np.testing.assert_allclose(line().cov_of(["beta"]), covariance, rtol=1e-2, atol=1e-4)
    near(line().elbo.value, evidence, 0.01)


def test_log_likelihood():
    tree = line().sample(500, random_seed=1, log_likelihood=True)
    x, y = closed.line_data()
    mu = tree["posterior"]["beta"].to_numpy() @ x.T
    np.testing.assert_allclose(tree["log_likelihood"]["y"], stats.norm.logpdf(y, mu, 0.8), rtol=1e-6)


def test_log_marginal_likelihood():
    [evidence, _] = closed.MODELS["closed: gamma-Poisson"][1]()["evidence"]
    found = rate().log_marginal_likelihood
    near(found.value, evidence, 5 * found.se + 0.005)


def test_predict_new_rows():
    mean, covariance, _ = normal_posterior(*closed.line_data(), 2.0, 0.8)
    at = np.array([[1.0, 2.0, -1.0], [1.0, 0.0, 3.0], [1.0, -1.0, 0.5]])
    found = line().predict({"x": at}, draws=N, random_seed=1)["predictions"]["y"]
    holds(found, at @ mean, np.sqrt(np.einsum("ri,ij,rj->r", at, covariance, at) + 0.64))


@pytest.mark.parametrize(
    "name",
    [
        "Normal",
        # What HurdlePoisson has besides effects is a factor of its own.
        *(pytest.param(name, marks=pytest.mark.battery) for name in ("StudentT", "OrderedLogistic", "HurdlePoisson")),
    ],
)
def test_reports_of_groups(name):
    """Rows and groups left out, an update, predictions: those of the benchmark, with fewer points of its integrals."""
    problem = Problem(name, 1)
    found = reports.compared(fit(problem.model(), 1), problem, problem.known(8, 512))
    assert not found["wrong"], found["wrong"]
    assert found["rows_not_relied_on"] == found["groups_not_relied_on"] == 0


def test_update_rows():
    x, y = closed.line_data()
    new_x, new_y = np.array([[1.0, 1.5, 0.0], [1.0, -0.5, 1.0]]), np.array([2.5, -0.5])
    found = line().update({"x": new_x, "y": new_y})
    mean, covariance, after = normal_posterior(np.vstack([x, new_x]), np.append(y, new_y), 2.0, 0.8)
    assert found.checks.is_reliable
    holds(found.sample(N)["posterior"]["beta"], mean, np.sqrt(np.diag(covariance)))
    near(found.log_predictive_density.value, after - normal_posterior(x, y, 2.0, 0.8)[2], 0.1)


def test_with_prior():
    data = grouped_data()
    before, after = (
        grouped_moments(*data, log_prior=prior) for prior in (None, lambda tau: stats.expon.logpdf(tau, scale=0.5))
    )
    found = groups().with_prior(tau=pm.Exponential.dist(2.0))
    assert found.checks.is_reliable
    draws = found.sample(N)["posterior"]
    for name in ("mu", "u", "tau"):
        holds(draws[name], *after["moments"][name][:2])
    near(
        found.log_bayes_factor.value, after["evidence"][0] - before["evidence"][0], 5 * found.log_bayes_factor.se + 0.02
    )


def test_prior_sensitivity():
    """ArviZ computes it from the draws alone."""
    ours = groups().prior_sensitivity()
    tree = groups().sample(4_000, random_seed=1, log_likelihood=True)
    with groups().model:
        compute_log_prior(tree, var_names=["mu", "tau"], progressbar=False)  # effects are given these
    theirs = az.psense_summary(tree, var_names=["mu", "tau"])
    for name in ("mu", "tau"):
        for what in ("prior", "likelihood"):
            near(float(table_of(ours).loc[name, what]), float(theirs.loc[name, what]), 0.05)


def table_of(found):
    return found.table if hasattr(found, "table") else found.to_dataframe()


def test_leave_out_rows_of_a_regression():
    x, y = closed.line_data()
    whole = normal_posterior(x, y, 2.0, 0.8)[2]
    without = np.arange(40)[:, None] != np.arange(40)
    right = np.array([whole - normal_posterior(x[k], y[k], 2.0, 0.8)[2] for k in without])
    found = line().leave_out(random_seed=1)
    np.testing.assert_allclose(found.elpd_i, right, atol=0.05)
    near(found.elpd, right.sum(), 0.1)


@pytest.mark.battery
def test_leave_out_of_eight_schools():
    found = fit(exact_models.schools(True), 1).leave_out(random_seed=1)
    near(found.elpd, exact_models.schools_answer(True).elpd, 0.1)


def test_save_and_load(tmp_path):
    groups().save(tmp_path / "fit.nc", draws=100)
    again = pymc_ngvi.load(tmp_path / "fit.nc", closed.grouped())
    ours, theirs = (a.sample(1_000, random_seed=4)["posterior"] for a in (groups(), again))
    np.testing.assert_array_equal(ours["u"], theirs["u"])
    holds(again.sample(N, random_seed=1)["posterior"]["mu"], *grouped_moments(*grouped_data())["moments"]["mu"])
    assert again.is_exact


def test_corrected():
    mean, covariance, _ = normal_posterior(*closed.line_data(), 2.0, 0.8)
    approx = fit(closed.line(), 1, family="diagonal")
    found, sd = approx.corrected(20_000, random_seed=1), np.sqrt(np.diag(covariance))
    error = 5 / np.sqrt(found.checks.effective_size) + 0.03
    assert found.checks.is_reliable
    assert np.all(np.abs(found.mean_flat - mean) < error * sd)
    assert np.all(np.abs(found.sd_flat - sd) < error * sd)


def test_fit_many():
    rng = np.random.default_rng(5)
    sets = [rng.poisson(r, 7) for r in (0.5, 2.0, 6.0, 11.0)]
    table = pymc_ngvi.fit_many(
        closed.gamma_poisson(), [{"y": y} for y in sets], random_seed=1, progressbar=False, draws=N
    ).dataset
    for i, y in enumerate(sets):
        law, row = stats.gamma(2.0 + y.sum(), scale=1 / 7.5), table.isel(fit=i)
        value = dict(zip(row["statistic"].values, row["rate"].values, strict=True))
        near(value["mean"], law.mean(), (OF_MEAN + 0.03) * law.std())
        near(value["sd"], law.std(), (OF_SD + 0.03) * law.std())
        near(law.cdf(value["lower"]), 0.055, 5 * np.sqrt(0.055 / 1_500))
        near(law.cdf(value["upper"]), 0.945, 5 * np.sqrt(0.055 / 1_500))
        evidence = 2 * np.log(0.5) + gammaln(2.0 + y.sum()) - (2.0 + y.sum()) * np.log(7.5) - gammaln(y + 1).sum()
        assert str(row["posterior"].values) == "exact" or i > 1
        if str(row["posterior"].values) == "exact":
            near(float(row["log_marginal_likelihood"]), evidence, 5 * float(row["log_marginal_likelihood_se"]) + 0.01)


@pytest.mark.battery
def test_calibrate():
    found = pymc_ngvi.calibrate(closed.gamma_poisson(), 60, random_seed=1, progressbar=False)
    assert found.is_calibrated, found.sentence
    near(float(found.summary().loc["rate", "coverage_90"]), 0.9, 5 * np.sqrt(0.09 / 60))


@pytest.mark.battery
def test_draws_of_a_change_point():
    log_p, *_ = closed.switch_sums(np.arange(60.0), closed.SWITCH)
    p = np.exp(log_p - log_p.max())
    draws = fit(closed.switch_point(), 1).sample(N, random_seed=1)["posterior"]["when"].to_numpy().ravel()
    shares = np.bincount(draws.astype(int), minlength=60) / len(draws)
    np.testing.assert_allclose(shares, p / p.sum(), atol=5 * np.sqrt(0.25 / 1_500) + 0.01)


def test_sampler_init():
    mean, covariance, _ = normal_posterior(*closed.line_data(), 2.0, 0.8)
    assert np.all(
        np.abs(np.mean([p["beta"] for p in points_of(line().sampler_init())], 0) - mean)
        < 5 * np.sqrt(np.diag(covariance))
    )


def points_of(init):
    points = init.kwargs()["initvals"]
    return points if isinstance(points, list) else [points]


def test_refine():
    mean, covariance, _ = normal_posterior(*closed.line_data(), 2.0, 0.8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # two iterations are too few
        short = fit(closed.line(), 1, n=2, posterior="gaussian")
    again = short.refine(200, progressbar=False)
    assert np.all(np.abs(again.mean_flat - mean) < 0.03 * np.sqrt(np.diag(covariance)))
