"""Fits whose posterior is exact, from models to draws, against brute force; and those that stay Gaussian, and why."""

import functools
import re

import numpy as np
import pymc as pm
import pytest

from marginal_terms import Groups

import pymc_ngvi

from pymc_ngvi import NotExactError
from pymc_ngvi.core.messages import NotApart, Reason, Unavailable
from pymc_ngvi.marginal.pooled import PoolState
from pymc_ngvi.posteriors import kinds as latent_gaussian
from pymc_ngvi.posteriors import plan
from pymc_ngvi.results import diagnosis

pytestmark = pytest.mark.usefixtures("_compiled_once")

SEEDS = [1, 2]
N_GROUPS, SIZE = 40, 4
_RNG = np.random.default_rng(12)
SUCCESSES = _RNG.binomial(SIZE, 1.0 / (1.0 + np.exp(-(-0.6 + 1.6 * _RNG.normal(size=N_GROUPS)))))
GROUP = np.repeat(np.arange(N_GROUPS), SIZE)
OUTCOMES = (np.arange(SIZE) < SUCCESSES[:, None]).ravel().astype(int)


def glmm(centred=True):
    """A logit model of binary outcomes in groups; observations in no order."""
    order = np.random.default_rng(1).permutation(len(GROUP))
    with pm.Model() as model:
        mu, sd = pm.Normal("mu", 0.0, 3.0), pm.HalfNormal("sd", 2.0)
        if centred:
            b = pm.Normal("b", mu, sd, shape=N_GROUPS)
        else:
            b = pm.Deterministic("b", mu + sd * pm.Normal("z", shape=N_GROUPS))
        pm.Bernoulli("y", logit_p=b[GROUP[order]], observed=OUTCOMES[order])
    return model


@pytest.fixture(scope="module")
def truth():
    """What brute force says: a grid of the two globals, with the tail of the log sd to the left, and of each effect."""
    return Groups.logit(SUCCESSES, SIZE).brute_force(np.linspace(-2.6, 1.4, 41), np.linspace(-14.0, 2.4, 165))


@pytest.fixture(scope="module")
def models():
    return {centred: glmm(centred) for centred in (True, False)}


def fit(model, seed=1, **options):
    return pymc_ngvi.fit_ngvi(model=model, random_seed=seed, progressbar=False, **options)


@pytest.fixture(scope="module")
def fitted(models):
    """Fits by default, each made once."""
    return functools.cache(lambda centred=True, seed=1: fit(models[centred], seed))


def flat(approx, draws=4_000, seed=3):
    """Return mu, log sd and effects of draws, (n, 2 + n_groups)."""
    posterior = approx.sample(draws, chains=1, random_seed=seed).posterior.dataset
    columns = [posterior["mu"].values[0], np.log(posterior["sd"].values[0])]
    return np.column_stack([*columns, posterior["b"].values[0]])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("centred", [True, False])
def test_a_glmm_against_brute_force(fitted, truth, centred, seed):
    """Means and sds of all parameters, by default; the Gaussian that it began from is at hand."""
    approx = fitted(centred, seed)
    assert approx.is_exact
    assert approx.record.is_exact
    assert approx.record.posterior.startswith("Exact up to Monte Carlo error (effective sample size")
    draws = flat(approx)
    em, es = (draws.mean(axis=0) - truth.mean) / truth.sd, draws.std(axis=0) / truth.sd - 1.0
    np.testing.assert_allclose(em[:2], 0.0, atol=0.05)
    np.testing.assert_allclose(es[:2], 0.0, atol=0.06)
    # Of 40 effects, 4 Monte Carlo errors of 2,000 effective draws.
    np.testing.assert_allclose(em[2:], 0.0, atol=4.0 / np.sqrt(2_000))
    np.testing.assert_allclose(es[2:], 0.0, atol=0.08)
    value, se = approx.log_marginal_likelihood
    assert abs(value - truth.log_normaliser) < 5.0 * se + 0.005

    gaussian = approx.gaussian
    assert gaussian is not approx
    assert not gaussian.is_exact
    if centred:  # where it is off, at the least
        worse = flat(gaussian)
        assert np.abs(worse.mean(axis=0) - truth.mean)[1] > 0.05 * truth.sd[1]
        assert worse[:, 1].std() < 0.95 * truth.sd[1]


@pytest.mark.parametrize("options", [{"family": "sparse"}, {"update": "cholesky"}])
def test_a_named_method_gives_its_gaussian(models, options):
    approx = fit(models[True], **options)
    assert not approx.is_exact
    assert not isinstance(approx._state, PoolState)


# --- what can't be had ------------------------------------------------------------------------------------------------


def test_exact_is_refused_before_anything_is_fitted(monkeypatch):
    """A dense model of too many parameters."""
    x = np.random.default_rng(1).normal(size=(30, 120))
    with pm.Model() as model:
        beta = pm.Normal("beta", shape=120)
        pm.Normal("y", x @ beta, 1.0, observed=x[:, 0])
    monkeypatch.setattr("pymc_ngvi.fitting.session.FitSession.run", lambda *_: pytest.fail("it was fitted"))
    with pytest.raises(ValueError, match=r"This model has no exact posterior: .*120 coordinates"):
        fit(model, posterior="exact")


@pytest.mark.parametrize("options", [{"family": "mixture"}, {"family": "student_t"}, {"reparam": "rvb2"}])
def test_exact_goes_with_no_other_family(models, options):
    with pytest.raises(ValueError, match="posterior='exact' begins from a Gaussian"):
        fit(models[True], posterior="exact", **options)


def test_unknown_words(models):
    with pytest.raises(ValueError, match=r"Unknown posterior 'exakt'.*exact"):
        fit(models[True], posterior="exakt")


def regression(n, p):
    rng = np.random.default_rng(2)
    x = rng.normal(size=(n, p))
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, 2.0, shape=p)
        sd = pm.HalfNormal("sd", 2.0)
        pm.Normal("y", x @ beta, sd, observed=x @ np.ones(p) + rng.normal(size=n))
    return model


def test_what_costs_too_much_is_left_out(models, monkeypatch):
    """By counts, not by the clock; the reason is kept, and asking for it is enough."""
    monkeypatch.setattr(plan, "_MOST_WORK", 0.1)
    monkeypatch.setattr(plan, "_ALWAYS", 0.0)
    approx = fit(models[True])
    assert not approx.is_exact
    assert not approx.is_nested
    cost = r"Gaussian: the exact posterior would take about [\d.]+ s; max_seconds=\d+ or posterior='exact' asks for it"
    assert re.match(cost, approx.record.posterior)
    # Also after a method that was named.
    assert fit(models[True], family="sparse", posterior="exact").is_exact


def test_a_large_regression_is_left_to_the_gaussian():
    """So many data leave it no skewness."""
    approx = fit(regression(8_000, 6))
    assert not approx.is_exact
    assert approx.record.posterior.startswith("Gaussian: ")


def test_a_gaussian_posterior_is_left_as_it_is(monkeypatch):
    """Nothing is to be gained, a Normal mean with a known sd; and it stays exact where data leave no time for tests."""
    monkeypatch.setattr(diagnosis, "budget_of", lambda posterior: diagnosis.Budget(0, 0, cut=True, weights_cut=True))
    with pm.Model() as model:
        mu = pm.Normal("mu", 0.0, 3.0, shape=2)
        pm.Normal("y", mu, 1.0, observed=np.ones((5, 2)))
    approx = fit(model)
    assert approx.record.closing_line().startswith("Exact posterior in ")
    assert approx.is_exact
    assert approx.record.posterior.startswith("Gaussian: importance weights are nearly equal")
    assert (approx.record.reason, approx.record.on_request) == (Reason.SUPERFLUOUS, "")


def _no_latent_rows(density):
    raise Unavailable(Reason.NOT_LATENT, "no latent Gaussian model")


@pytest.mark.usefixtures("_no_last_resort")
def test_a_check_that_fails(models, monkeypatch):
    """By default the Gaussian comes back with the reason; where an exact posterior was asked for, it is an error."""
    monkeypatch.setattr("pymc_ngvi.marginal.trees.size_asked", lambda n_outside: 1e6)
    monkeypatch.setattr(latent_gaussian, "latent_rows_of", _no_latent_rows)
    approx = fit(models[True])
    assert not approx.is_exact
    assert approx.record.posterior.startswith("Gaussian: the effective size of the draws is ")
    assert approx.record.reason == Reason.NOT_PASSED
    with pytest.raises(NotExactError, match="the effective size of the draws is") as caught:
        fit(models[True], posterior="exact")
    np.testing.assert_array_equal(caught.value.approx.mean_flat, approx.mean_flat)


@pytest.mark.usefixtures("_no_last_resort")
def test_terms_that_do_not_split(monkeypatch):
    """Another way to fail: the Gaussian is there all the same."""

    def refuse(*args):
        raise NotApart("an element of log p depends on two blocks")

    monkeypatch.setattr("pymc_ngvi.marginal.on_model.RowTerms", refuse)
    monkeypatch.setattr(latent_gaussian, "latent_rows_of", _no_latent_rows)
    approx = fit(glmm())
    assert not approx.is_exact
    assert approx.record.posterior == "Gaussian: an element of log p depends on two blocks."
