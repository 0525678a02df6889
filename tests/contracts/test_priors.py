"""Other priors by weights, and sensitivity to priors: closed forms, fits with these priors, ArviZ on the same draws."""

import re
import warnings

import arviz_stats
import latent_models
import numpy as np
import pymc as pm
import pymc.dims as pmd
import pytest
import sharded_models
import xarray as xr

from numpy.testing import assert_allclose, assert_array_equal
from scipy import stats
from scipy.special import betaln

import pymc_ngvi

from pymc_ngvi import LogDensity, NGVIApproximation
from pymc_ngvi.density.new_priors import NewPriors
from pymc_ngvi.families import DiagonalState
from pymc_ngvi.reading.roles import top_level_priors
from pymc_ngvi.results.summary import _log_likelihood

pytestmark = pytest.mark.usefixtures("_one_blas_thread")

Y = np.array([0.8, 1.1, 1.7, 0.2, 1.4])
#: Standard errors that none of some dozen estimates exceeds.
MOST_ERRORS = 4.0


def fitted(model, posterior="exact", **options):
    return pymc_ngvi.fit_ngvi(model=model, posterior=posterior, random_seed=1, progressbar=False, **options)


def normal_mean():
    """A normal mean: all is known under normal priors."""
    with pm.Model() as model:
        mu = pm.Normal("mu", 0.0, 1.0)
        pm.Deterministic("twice", 2.0 * mu)
        pm.Normal("y", mu, 1.0, observed=Y)
    return model


def of_normal_prior(mean, sd):
    """Return posterior mean, sd and log p(y) under a normal prior."""
    variance = 1.0 / (1.0 / sd**2 + len(Y))
    cov = np.eye(len(Y)) + sd**2
    log_m = stats.multivariate_normal(np.full(len(Y), mean), cov).logpdf(Y)
    return variance * (mean / sd**2 + Y.sum()), np.sqrt(variance), log_m


def groups(n=12, per_group=4):
    """Normal data in groups."""
    rng = np.random.default_rng(1)
    group = np.repeat(np.arange(n), per_group)
    with pm.Model(coords={"group": [f"g{i}" for i in range(n)]}) as model:
        level, sd = pm.Normal("level", 0.0, 2.0), pm.HalfNormal("sd", 1.0)
        effect = pm.Normal("effect", 0.0, sd, dims="group")
        y = 0.5 + rng.normal(0.0, 0.7, n)[group] + rng.normal(size=len(group))
        pm.Normal("y", level + effect[group], 1.0, observed=y)
    return model


@pytest.fixture(scope="module")
def exact():
    return fitted(normal_mean())


@pytest.fixture(scope="module")
def grouped():
    return fitted(groups())


# --- other priors: closed forms ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["exact", "moved"])
@pytest.mark.parametrize(("mean", "sd"), [(0.5, 0.5), (0.0, 3.0)])
def test_a_normal_mean_under_another_normal_prior(exact, kind, mean, sd):
    approx = exact if kind == "exact" else fitted(normal_mean(), "moved")
    found = approx.with_prior(mu=pm.Normal.dist(mean, sd))
    assert found.checks.is_reliable
    expected_mean, expected_sd, log_m = of_normal_prior(mean, sd)
    draws = found.sample(8_000, random_seed=1).posterior
    error = MOST_ERRORS / np.sqrt(found.checks.effective_size)
    assert abs(draws["mu"].mean() - expected_mean) < error * expected_sd
    assert abs(draws["mu"].std() / expected_sd - 1.0) < error  # sqrt(1/2) of it is the error of a normal one
    assert_allclose(draws["twice"], 2.0 * draws["mu"])
    value, se = found.log_marginal_likelihood
    assert se < 0.05
    assert abs(value - log_m) < MOST_ERRORS * se + 1e-3
    factor, se = found.log_bayes_factor
    assert abs(factor - (log_m - of_normal_prior(0.0, 1.0)[2])) < MOST_ERRORS * se + 1e-3


def test_a_prior_far_from_the_data_is_said_to_be_so(exact):
    with pytest.warns(UserWarning, match="Not reliable"):
        found = exact.with_prior(mu=pm.Normal.dist(-6.0, 0.05))
    assert not found.checks.is_reliable
    assert "pm.fit" in str(found.checks)
    assert found.checks.khat > 0.7
    with pytest.raises(ValueError, match="no marginal likelihood to be relied on"):
        found.log_marginal_likelihood  # noqa: B018
    again = fitted(found.model)
    mean, sd, log_m = of_normal_prior(-6.0, 0.05)
    assert_allclose([again.mean_flat[0], again.sd_flat[0]], [mean, sd], rtol=0.05)
    assert abs(again.log_marginal_likelihood.value - log_m) < 0.05


@pytest.mark.parametrize("seed", [7, 8])
def test_a_nested_posterior_with_thin_tails_under_a_prior_that_is_a_little_different(seed):
    """Weights that the fit has are nearly equal, and their tail is light: that of the change is, too."""
    approx = pymc_ngvi.fit_ngvi(model=latent_models.level(20), posterior="nested", random_seed=seed, progressbar=False)
    found = approx.with_prior(noise=pm.HalfNormal.dist(1.9))
    assert found.checks.is_reliable
    assert found.checks.khat < 0.5
    assert found.checks.effective_size > 0.8 * approx.checks.effective_size


def test_few_effective_draws_are_a_doubt_and_more_of_them_the_cure(exact):
    new = pm.Normal.dist(2.0, 0.3)
    found = exact.with_prior(mu=new, draws=1_000)
    assert re.search(r"There are few draws: the effective sample size is \d+, below 400", str(found.checks))
    assert found.checks.khat < 0.7
    assert found.checks.effective_size < 400
    needed = int(re.search(r"draws=([\d_]+)", str(found.checks)).group(1))
    assert exact.with_prior(mu=new, draws=needed).checks.is_reliable


def test_a_binomial_probability_whose_prior_has_another_transform():
    with pm.Model() as model:
        p = pm.Beta("p", 2.0, 2.0)
        pm.Binomial("y", 10, p, observed=7)
    approx = fitted(model)
    found = approx.with_prior(p=pm.Uniform.dist(0.0, 1.0))
    log_m = betaln(8.0, 4.0) + np.log(120.0)
    value, se = found.log_marginal_likelihood
    assert abs(value - log_m) < MOST_ERRORS * se + 1e-3
    assert abs(found.sample(4_000).posterior["p"].mean() - 8.0 / 12.0) < 0.01


def test_effects_of_groups_under_another_standard_deviation(grouped):
    """Beside a fit with that prior: of the group effects, too, which are drawn given each standard deviation."""
    found = grouped.with_prior(sd=pm.Gamma.dist(4.0, 10.0))
    assert found.checks.is_reliable
    again = fitted(found.model)
    error = MOST_ERRORS * np.sqrt(1.0 / found.checks.effective_size + 1.0 / 1_500)
    assert np.all(np.abs(found.mean_flat - again.mean_flat) < error * again.sd_flat)
    assert_allclose(found.sd_flat, again.sd_flat, rtol=error)
    (value, se), (expected, of_fit) = found.log_marginal_likelihood, again.log_marginal_likelihood
    assert abs(value - expected) < MOST_ERRORS * np.hypot(se, of_fit) + 2e-3
    before = grouped.sd_flat
    assert np.abs(found.mean_flat - grouped.mean_flat).max() > 0.1 * before.max()  # the prior does something


def test_a_new_prior_may_depend_on_variables_of_the_model(grouped):
    """Of the group effects given their standard deviation: the draws of these count."""
    new = pm.Normal.dist(0.0, 0.9 * grouped.model["sd"])
    found = grouped.with_prior(effect=new)
    again = fitted(found.model)
    error = MOST_ERRORS * np.sqrt(1.0 / found.checks.effective_size + 1.0 / 1_500)
    assert np.all(np.abs(found.mean_flat - again.mean_flat) < error * again.sd_flat)
    (value, se), (expected, of_fit) = found.log_marginal_likelihood, again.log_marginal_likelihood
    assert abs(value - expected) < MOST_ERRORS * np.hypot(se, of_fit) + 2e-3


def test_a_nested_posterior_under_another_prior():
    """Beside a fit with that prior."""
    model = latent_models.level(n=20)
    approx = fitted(model, "nested")
    found = approx.with_prior(noise=pm.HalfNormal.dist(0.7))
    again = fitted(found.model, "nested")
    error = MOST_ERRORS * np.sqrt(1.0 / found.checks.effective_size + 1.0 / again.checks.effective_size)
    assert np.all(np.abs(found.mean_flat - again.mean_flat) < error * again.sd_flat)
    (value, se), (expected, of_fit) = found.log_marginal_likelihood, again.log_marginal_likelihood
    assert abs(value - expected) < MOST_ERRORS * np.hypot(se, of_fit) + 0.01


# --- other priors: another q ------------------------------------------------------------------------------------------


def test_draws_of_a_gaussian_have_its_importance_weights():
    """Off by half a standard deviation, it is the posterior by its weights, and so is the one under another prior."""
    mean, sd, _ = of_normal_prior(0.0, 1.0)
    q = DiagonalState.from_scale(np.array([mean + 0.5 * sd]), np.array([1.2 * sd]))
    approx = NGVIApproximation(LogDensity(normal_mean()), q)
    found = approx.with_prior(mu=pm.Normal.dist(0.5, 0.5))
    expected, expected_sd, _ = of_normal_prior(0.5, 0.5)
    assert found.checks.is_reliable
    error = MOST_ERRORS / np.sqrt(found.checks.effective_size)
    assert abs(found.sample(8_000).posterior["mu"].mean() - expected) < error * expected_sd
    factor, se = found.log_bayes_factor
    assert abs(factor - (of_normal_prior(0.5, 0.5)[2] - of_normal_prior(0.0, 1.0)[2])) < MOST_ERRORS * se
    with pytest.raises(ValueError, match="exact posterior"):
        found.log_marginal_likelihood  # noqa: B018


def test_a_q_that_weights_can_not_correct_is_a_doubt():
    q = DiagonalState.from_scale(np.array([-2.0]), np.array([0.05]))
    approx = NGVIApproximation(LogDensity(normal_mean()), q)
    with pytest.warns(UserWarning, match="importance weights can't correct it"):
        found = approx.with_prior(mu=pm.Normal.dist(0.0, 1.1))
    assert not found.checks.is_reliable
    assert found.checks.khat < 0.7


# --- other priors: what goes in and out -------------------------------------------------------------------------------


def test_the_ratio_is_that_of_the_densities(grouped):
    """On the constrained scale, with Jacobians that cancel: for a vector, each element counts."""
    model, layout = grouped.model, grouped.layout
    theta = grouped.draw_flat(50, random_seed=2)
    values = grouped._posterior.constrain(theta)
    new = NewPriors.of(
        model, layout, {"sd": pm.Gamma.dist(3.0, 2.0), "effect": pm.StudentT.dist(4.0, mu=1.0, sigma=2.0)}
    )
    sd, effect = values["sd"], values["effect"]
    expected = stats.gamma(3.0, scale=0.5).logpdf(sd) - stats.halfnorm().logpdf(sd)
    expected += np.sum(stats.t(4.0, 1.0, 2.0).logpdf(effect) - stats.norm(0.0, sd[:, None]).logpdf(effect), axis=1)
    assert_allclose(new.log_ratio(theta), expected, rtol=1e-8)


def test_two_variables_may_be_given_one_distribution_each_by_its_own_draw():
    with pm.Model() as model:
        a, b = pm.Normal("a"), pm.Normal("b")
        pm.Normal("y", a + b, 1.0, observed=0.5)
    prior = pm.Normal.dist(0.0, 2.0)
    new = NewPriors.of(model, LogDensity(model).layout, {"a": prior, "b": prior})
    theta = np.array([[0.3, -2.0]])
    assert_allclose(new.log_ratio(theta), np.sum(stats.norm(0.0, 2.0).logpdf(theta) - stats.norm.logpdf(theta), axis=1))
    assert len(pm.draw([new.changed_model["a"], new.changed_model["b"]], random_seed=1)) == 2
    assert len(set(np.ravel(pm.draw([new.changed_model["a"], new.changed_model["b"]], random_seed=1)))) == 2


def test_variables_with_named_dims():
    """Distributions of `pymc.dims`: their graphs hold no draw of the old prior."""
    with pm.Model(coords={"k": range(3)}) as model:
        b, sd = pmd.Normal("b", 0.0, 1.0, dims="k"), pmd.HalfNormal("sd", 1.0)
        pmd.Normal("y", b, sd, dims="k", observed=pmd.as_xtensor(np.arange(3.0), dims=("k",)))
    layout = LogDensity(model).layout
    new = {"sd": pmd.HalfCauchy.dist(1.0), "b": pmd.Normal.dist(0.0, 2.0, dim_lengths={"k": 3})}
    theta = np.array([[0.5, -1.0, 2.0, 0.3]])
    sd, b = np.exp(0.3), theta[:, :3]
    expected = stats.halfcauchy.logpdf(sd) - stats.halfnorm.logpdf(sd)
    expected += np.sum(stats.norm(0.0, 2.0).logpdf(b) - stats.norm.logpdf(b), axis=1)
    assert_allclose(NewPriors.of(model, layout, new).log_ratio(theta), expected, rtol=1e-6)
    for prior, message in ((pmd.Normal.dist(0.0, 1.0), "other values"), (pmd.Uniform.dist(0.0, 1.0), "other values")):
        with pytest.raises(ValueError, match=message):
            NewPriors.of(model, layout, {"sd": prior})
    with pytest.raises(ValueError, match="has dims"):
        NewPriors.of(model, layout, {"b": pmd.Normal.dist(0.0, 1.0)})
    with pytest.raises(TypeError, match=r"a distribution of pymc\.dims"):
        NewPriors.of(model, layout, {"sd": pm.HalfNormal.dist(1.0)})


def test_a_cholesky_factor_is_given_as_it_is_packed():
    with pm.Model() as model:
        pm.LKJCholeskyCov("chol", n=2, eta=2.0, sd_dist=pm.Exponential.dist(1.0))
    layout = LogDensity(model).layout
    theta = np.array([[0.2, 0.5, -0.3], [0.2, -0.1, 0.4]])

    def given(eta):
        return pm.LKJCholeskyCov.dist(n=2, eta=eta, sd_dist=pm.Exponential.dist(1.0), compute_corr=False)

    new = NewPriors.of(model, layout, {"chol": given(5.0)})
    ratio = new.log_ratio(theta)
    assert "does not integrate to 1" in new.improper[0]
    low, high = theta[:, 1], np.exp(theta[:, 2])  # off the diagonal, and on it
    det = high**2 / (low**2 + high**2)  # 1 - r^2, which has the power eta - 1
    assert_allclose(np.diff(ratio), 3.0 * np.diff(np.log(det)), rtol=1e-8)
    with pytest.raises(TypeError, match="compute_corr=False"):
        NewPriors.of(model, layout, {"chol": pm.LKJCholeskyCov.dist(n=2, eta=5.0, sd_dist=pm.Exponential.dist(1.0))})


def test_ratios_may_be_large_where_there_is_no_weight():
    """A Cauchy prior of a scale over a normal one: far out, the ratio has no limit."""
    with pm.Model() as model:
        sd = pm.HalfNormal("sd", 1.0)
        b = pm.Normal("b", 0.0, 1.0, shape=3)
        pm.Normal("y", b, sd, observed=np.arange(1.0, 4.0))
    found = fitted(model).with_prior(sd=pm.HalfCauchy.dist(1.0))
    assert found._change.log_ratio.max() > 800.0
    (value, se), (expected, of_fit) = found.log_marginal_likelihood, fitted(found.model).log_marginal_likelihood
    assert abs(value - expected) < MOST_ERRORS * np.hypot(se, of_fit)
    assert se < 0.05


def test_a_vector_may_have_a_multivariate_prior():
    with pm.Model() as model:
        b = pm.Normal("b", 0.0, 1.0, shape=2)
        pm.Normal("y", b, 1.0, observed=[0.5, 1.0])
    cov = np.array([[1.0, 0.5], [0.5, 2.0]])
    new = NewPriors.of(model, LogDensity(model).layout, {"b": pm.MvNormal.dist(np.zeros(2), cov)})
    theta = np.random.default_rng(1).normal(size=(5, 2))
    expected = stats.multivariate_normal(np.zeros(2), cov).logpdf(theta) - stats.norm.logpdf(theta).sum(axis=1)
    assert_allclose(new.log_ratio(theta), expected, rtol=1e-8)


@pytest.mark.parametrize(
    ("prior", "message"),
    [
        (lambda: {"sdd": pm.HalfNormal.dist(1.0)}, "did you mean 'sd'"),
        (lambda: {"fitted": pm.Normal.dist()}, "'fitted' is a Deterministic"),
        (lambda: {"y": pm.Normal.dist()}, "'y' is no free variable"),
        (lambda: {"sd": pm.Normal.dist(0.0, 1.0)}, r"is on all real numbers, and the old one on \(0, inf\)"),
        (lambda: {"sd": pm.Uniform.dist(0.0, 5.0)}, r"is on \(0, 5\), and the old one on \(0, inf\)"),
        (lambda: {"b": pm.HalfNormal.dist(1.0)}, r"is on \(0, inf\), and the old one on all real numbers"),
        (lambda: {"p": pm.Uniform.dist(0.0, 1.1)}, r"is on \(0, 1.1\), and the old one on \(0, 1\)"),
        (lambda: {"w": pm.MvNormal.dist(np.zeros(3), np.eye(3))}, "is on other values"),
        (lambda: {"b": pm.Normal.dist(0.0, 1.0, shape=3)}, r"has shape \(3,\), and 'b' has shape \(2,\)"),
        (lambda: {"sd": pm.HalfNormal.dist(1.0, shape=1)}, r"has shape \(1,\), and 'sd' has shape \(\)"),
        (lambda: {"sd": pm.Poisson.dist(1.0)}, "is discrete"),
        (dict, "Name at least one free variable"),
    ],
)  # fmt: skip
def test_priors_that_do_not_fit_are_refused(prior, message):
    with pm.Model() as model:
        b, sd, p = pm.Normal("b", shape=2), pm.HalfNormal("sd"), pm.Beta("p", 1.0, 2.0)
        w = pm.Dirichlet("w", np.ones(3))
        pm.Deterministic("fitted", b + sd)
        pm.Normal("y", b.sum() + p + w[0], sd, observed=1.0)
    with pytest.raises(ValueError, match=message):
        NewPriors.of(model, LogDensity(model).layout, prior())


@pytest.mark.parametrize("prior", [3.0, "Normal", None, (1, 2)])
def test_what_is_no_distribution_is_refused_and_nothing_is_lost(exact, prior):
    before = exact.draw_flat(5, random_seed=1)
    with pytest.raises(TypeError, match="should be a distribution"):
        exact.with_prior(mu=prior)
    assert_array_equal(exact.draw_flat(5, random_seed=1), before)


@pytest.mark.parametrize(
    "prior", [pm.Gamma.dist(2.0, 1.0), pm.TruncatedNormal.dist(0.0, 1.0, lower=0.0), pm.Truncated.dist(
        pm.StudentT.dist(4.0), lower=0.0, upper=None)]
)  # fmt: skip
def test_the_same_support_by_another_transform_is_accepted(prior):
    with pm.Model() as model:
        pm.HalfNormal("sd")
    new = NewPriors.of(model, LogDensity(model).layout, {"sd": prior})
    assert np.isfinite(new.log_ratio(np.array([[0.3]]))).all()


def test_limits_that_depend_on_variables_are_refused():
    with pm.Model() as model:
        top = pm.HalfNormal("top")
        pm.Uniform("x", 0.0, top)
    with pytest.raises(ValueError, match="limits that depend on other variables"):
        NewPriors.of(model, LogDensity(model).layout, {"x": pm.Uniform.dist(0.0, 1.0)})


def test_the_changed_model_is_the_one_that_would_be_written(grouped):
    changed = NewPriors.of(grouped.model, grouped.layout, {"sd": pm.Exponential.dist(2.0)}).changed_model
    assert [rv.name for rv in changed.free_RVs] == ["level", "sd", "effect"]
    assert [value.name for value in changed.value_vars] == ["level", "sd_log__", "effect"]
    assert list(changed.named_vars_to_dims["effect"]) == ["group"]
    assert list(changed.coords["group"]) == list(grouped.model.coords["group"])
    with pm.Model() as written:
        level, sd = pm.Normal("level", 0.0, 2.0), pm.Exponential("sd", 2.0)
        effect = pm.Normal("effect", 0.0, sd, shape=12)
        data = grouped.model.rvs_to_values[grouped.model["y"]].data
        pm.Normal("y", level + effect[np.repeat(np.arange(12), 4)], 1.0, observed=data)
    theta = grouped.draw_flat(5, random_seed=3)
    assert_allclose(LogDensity(changed).logp(theta), LogDensity(written).logp(theta), rtol=1e-10)
    assert grouped.model["sd"].owner.op.name == "halfnormal"  # the model itself stays as it is


def test_an_improper_prior_has_no_marginal_likelihood(exact):
    found = exact.with_prior(mu=pm.Flat.dist())
    assert abs(found.sample(4_000).posterior["mu"].mean() - Y.mean()) < MOST_ERRORS * np.sqrt(0.2 / 2_000)
    with pytest.raises(ValueError, match="the prior of 'mu' is improper"):
        found.log_bayes_factor  # noqa: B018


def test_a_proper_prior_in_the_place_of_an_improper_one_has_a_posterior_but_no_factor():
    with pm.Model() as model:
        mu = pm.Flat("mu")
        pm.Normal("y", mu, 1.0, observed=Y)
    found = fitted(model).with_prior(mu=pm.Normal.dist(0.5, 0.5))
    mean, sd, _ = of_normal_prior(0.5, 0.5)
    assert abs(found.sample(4_000).posterior["mu"].mean() - mean) < MOST_ERRORS * sd / np.sqrt(2_000)
    with pytest.raises(ValueError, match="the prior of 'mu' is improper"):
        found.log_bayes_factor  # noqa: B018


def test_a_saved_posterior_has_the_same_under_another_prior(grouped):
    again = pymc_ngvi.load(grouped.to_datatree(), grouped.model)
    one, two = (approx.with_prior(sd=pm.Gamma.dist(4.0, 10.0)) for approx in (grouped, again))
    assert_allclose(one._state.pool.g, two._state.pool.g)
    assert_allclose(one.log_marginal_likelihood.value, two.log_marginal_likelihood.value)


def test_draws_and_the_summary_are_those_of_the_new_prior(grouped):
    found = grouped.with_prior(sd=pm.Gamma.dist(4.0, 10.0))
    tree = found.sample(500, var_names=["sd"])
    assert list(tree.posterior.data_vars) == ["sd"]
    assert tree.posterior.attrs["effective_sample_size"] == found.checks.effective_size
    assert found.sample(10).posterior["effect"].dims == ("chain", "draw", "group")
    shown = found.summary()
    assert list(shown.table.index) == ["level", "sd"]
    assert abs(shown.table.loc["level", "mean"] - found.mean_flat[0]) < 0.02 * found.sd_flat[0] + 0.005
    assert str(found.checks) in shown.lines
    assert "Exact up to Monte Carlo error (effective" in str(found.checks)


def test_data_that_were_changed_since_do_not_count():
    with pm.Model() as model:
        y = pm.Data("y", Y)
        mu = pm.Normal("mu", 0.0, 1.0)
        pm.Normal("seen", mu, 1.0, observed=y)
    approx = fitted(model)
    expected = approx.with_prior(mu=pm.Normal.dist(0.5, 0.5))
    pm.set_data({"y": Y + 10.0}, model=model)
    found = approx.with_prior(mu=pm.Normal.dist(0.5, 0.5))
    assert_allclose(found.checks.khat, expected.checks.khat)
    assert_array_equal(found.sample(20).posterior["mu"], expected.sample(20).posterior["mu"])
    assert_allclose(found.log_marginal_likelihood.value, expected.log_marginal_likelihood.value)
    assert_array_equal(found.model["y"].get_value(), Y)
    assert_array_equal(model["y"].get_value(), Y + 10.0)


def test_data_in_shards_are_all_seen():
    """Beside one model of all rows; the Potential is part of the prior. There is no one model to fit again."""
    shards = pymc_ngvi.Shards(sharded_models.of_rows(sharded_models.normal), range(sharded_models.N_SHARDS))
    whole, parts = fitted(sharded_models.normal()), fitted(None, shards=shards)
    pairs = [approx.with_prior(sigma=pm.HalfNormal.dist(0.5)) for approx in (whole, parts)]
    assert_allclose(*(found.sample(4_000).posterior["beta"].mean(("chain", "draw")) for found in pairs), atol=0.01)
    assert_allclose(*(found.log_bayes_factor.value for found in pairs), atol=0.01)
    assert "its priors are others than those of the models of its data" in pairs[1].density.why_in_part
    tables = [approx.prior_sensitivity("beta", draws=2_000).table for approx in (whole, parts)]
    assert_allclose(*(table[["prior", "likelihood"]].to_numpy(float) for table in tables), atol=0.06)
    theta = parts.draw_flat(3, random_seed=1)
    sums = [_log_likelihood(approx._posterior, theta, [], is_all=True) for approx in (whole, parts)]
    assert_allclose(*sums, rtol=1e-8)


# --- power scaling ----------------------------------------------------------------------------------------------------


def scaled_by_arviz(model, posterior):
    """Return ArviZ's table from PyMC's own log prior and log likelihood."""
    tree = xr.DataTree.from_dict({"posterior": posterior})
    with model, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = pm.compute_log_likelihood(tree, progressbar=False)
        return pm.compute_log_prior(tree, progressbar=False)


def test_sensitivity_is_that_of_arviz_with_sums_by_pymc(grouped):
    """By default of the priors at the top alone: that of the effects is part of the model."""
    found = grouped.prior_sensitivity(["level", "sd", "effect"], draws=1_000)
    assert found.priors == ("level", "sd")
    tree = scaled_by_arviz(grouped.model, found.tree.posterior.to_dataset())
    expected = arviz_stats.psense_summary(tree, prior_var_names=["level", "sd"])
    assert_allclose(found.table[["prior", "likelihood"]], expected[["prior", "likelihood"]], atol=1.1e-3)
    assert list(found.table["diagnosis"]) == list(expected["diagnosis"])
    likelihood = tree.log_likelihood["y"].sum("y_dim_0").to_numpy()
    assert_allclose(found.tree.log_likelihood["likelihood"], likelihood, rtol=1e-8)
    whole = grouped.prior_sensitivity(["level", "sd"], prior_var_names=["level", "sd", "effect"], draws=1_000)
    assert np.abs(whole.table["prior"] - found.table["prior"][:2]).max() > 0.01


def test_a_prior_far_from_the_data_is_a_conflict_and_no_data_are_a_strong_prior():
    with pm.Model() as model:
        far, idle = pm.Normal("far", 0.0, 1.0), pm.Normal("idle", 0.0, 1.0)
        vague = pm.Normal("vague", 0.0, 100.0)
        pm.Normal("y", far + 0.01 * idle, 1.0, observed=np.full(4, 8.0))
        pm.Normal("z", vague, 1.0, observed=Y)
    diagnosis = fitted(model).prior_sensitivity().table["diagnosis"]
    assert diagnosis["far"] == "potential prior-data conflict"
    assert diagnosis["idle"] == "potential strong prior / weak likelihood"
    assert diagnosis["vague"] == "✓"


@pytest.mark.parametrize("centred", [True, False])
def test_effects_are_not_at_the_top_however_they_are_written(centred):
    with pm.Model() as model:
        rate, size = pm.HalfNormal("rate"), pm.Normal("size")
        sd = pm.HalfNormal("sd")
        u = pm.Normal("u", 0.0, sd, shape=5) if centred else sd * pm.Normal("u", 0.0, 1.0, shape=5)
        pm.Normal("y", size * pm.math.exp(-rate) + u, 1.0, observed=np.zeros(5))
    assert top_level_priors(model, [rv.name for rv in model.free_RVs]) == ["rate", "size", "sd"]


def test_missing_data_are_no_prior():
    with pm.Model() as model, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyMC says that there are some
        mu = pm.Normal("mu")
        pm.Normal("y", mu * 0.0, 1.0, observed=np.ma.masked_invalid([1.0, np.nan, 2.0]))
    assert top_level_priors(model, ["mu", "y_unobserved"]) == ["mu"]


def test_a_likelihood_in_a_potential_is_named():
    with pm.Model() as model:
        mu = pm.Normal("mu", 0.0, 1.0)
        pm.Potential("of_data", pm.logp(pm.Normal.dist(mu, 1.0), Y).sum())
    approx = fitted(model)
    with pytest.raises(ValueError, match="name the Potentials that are its likelihood"):
        approx.prior_sensitivity()
    found = approx.prior_sensitivity(likelihood_var_names="of_data", draws=2_000).table.loc["mu"]
    expected = fitted(normal_mean()).prior_sensitivity("mu", draws=2_000).table.loc["mu"]
    assert_allclose(
        found[["prior", "likelihood"]].astype(float), expected[["prior", "likelihood"]].astype(float), rtol=0.1
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"var_names": ["nu"]}, "var_names has 'nu'"),
        ({"prior_var_names": ["twice"]}, "prior_var_names has 'twice'"),
        ({"prior_var_names": []}, "prior_var_names is empty"),
        ({"likelihood_var_names": ["mu"]}, "likelihood_var_names has 'mu'"),
        ({"draws": 50}, "at least 100 draws"),
    ],
)
def test_bad_names_are_refused(exact, options, message):
    with pytest.raises(ValueError, match=message):
        exact.prior_sensitivity(**options)


def test_an_off_gaussian_is_weighted_before_it_is_scaled():
    mean, sd, _ = of_normal_prior(0.0, 1.0)
    q = DiagonalState.from_scale(np.array([mean + 0.5 * sd]), np.array([1.2 * sd]))
    found = NGVIApproximation(LogDensity(normal_mean()), q).prior_sensitivity("mu")
    assert abs(found.tree.posterior["mu"].mean() - mean) < 0.1 * sd
    assert found.doubts == ()


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("weight", [0.5, 0.1])
def test_mass_of_a_new_prior_where_there_are_no_draws_is_a_doubt(weight, seed):
    y, sd = np.array([28.0, 8, -3, 7, -1, 1, 18, 12]), np.array([15.0, 10, 16, 11, 9, 11, 10, 18])
    with pm.Model():
        mu, tau = pm.Normal("mu", 0, 5), pm.HalfCauchy("tau", 5)
        pm.Normal("y", pm.Normal("theta", mu, tau, shape=8), sd, observed=y)
        approx = pymc_ngvi.fit_ngvi(random_seed=seed, progressbar=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parts = [pm.HalfNormal.dist(1e-6), pm.HalfNormal.dist(5)]
        found = approx.with_prior(tau=pm.Mixture.dist([weight, 1 - weight], parts), random_seed=seed)
        wide = approx.with_prior(mu=pm.Normal.dist(0, 100), random_seed=seed)
    # the spike has 0.547 and 0.118 of the posterior mass
    [said] = [doubt for doubt in found.checks.failures if "'tau'" in doubt]
    assert float(said.split()[0]) == pytest.approx({0.5: 55, 0.1: 12}[weight], abs=6)
    # most of a wide prior is where there are no draws as well, and the data rule it out
    assert not any("'mu'" in doubt for doubt in wide.checks.failures)


def test_further_priors_and_predictions_under_other_priors(grouped):
    one = grouped.with_prior(level=pm.Normal.dist(0.0, 3.0))
    both = one.with_prior(sd=pm.HalfNormal.dist(3.0), random_seed=5)
    at_once = grouped.with_prior(level=pm.Normal.dist(0.0, 3.0), sd=pm.HalfNormal.dist(3.0), random_seed=5)
    factor = one.log_bayes_factor.value + both.log_bayes_factor.value
    assert_allclose(factor, at_once.log_bayes_factor.value, atol=0.02)
    error = MOST_ERRORS * np.sqrt(2.0 / at_once.checks.effective_size)
    assert np.all(np.abs(both.mean_flat - at_once.mean_flat) < error * at_once.sd_flat)
    predicted = one.predict(draws=4_000, var_names=["level"], random_seed=2)["predictions"]["level"]
    draws = one.sample(4_000, random_seed=1).posterior["level"]
    assert abs(float(predicted.mean() - draws.mean())) < 5 * float(draws.std()) * np.sqrt(2 / 4_000)


def test_sensitivities_have_their_errors(exact):
    """Of many sets of draws: as large as they say, within a factor of 2."""
    tables = [exact.prior_sensitivity("mu", draws=1_000, random_seed=seed).table.loc["mu"] for seed in range(12)]
    for kind in ("prior", "likelihood"):
        spread = np.std([table[kind] for table in tables], ddof=1)
        said = np.mean([table[f"{kind}_se"] for table in tables])
        assert 0.4 < said / spread < 2.5
