"""Fits on minibatches: one batch for each step, and results near those of the full data."""

import contextlib
import functools
import warnings

import numpy as np
import pymc as pm
import pytest

from matrix import state_of, two_seeds

import pymc_ngvi

from pymc_ngvi import ConvergenceWarning, LogDensity, Status
from pymc_ngvi.methods.stochastic import on_passes

pytestmark = pytest.mark.usefixtures("_one_blas_thread")

N, BATCH, NOISE = 400, 40, 0.5
_RNG = np.random.default_rng(8)
X = np.column_stack([np.ones(N), _RNG.standard_normal((N, 2)) @ [[1.0, 0.5], [0.0, 0.8]]])
Y = X @ np.array([0.5, -1.0, 0.7]) + NOISE * _RNG.standard_normal(N)
#: The exact posterior, prior N(0, I).
PRECISION = X.T @ X / NOISE**2 + np.eye(3)
MEAN = np.linalg.solve(PRECISION, X.T @ Y / NOISE**2)
COV = np.linalg.inv(PRECISION)


def model(batch_size=BATCH):
    x, y = pm.Minibatch(X, Y, batch_size=batch_size)
    with pm.Model() as made:
        beta = pm.Normal("beta", 0, 1, shape=3)
        pm.Normal("y", x @ beta, NOISE, observed=y, total_size=N)
    return made


def kl(mean, cov, to_mean=MEAN, to_precision=PRECISION):
    """Return the divergence of N(mean, cov) from the posterior."""
    product = to_precision @ cov
    apart = mean - to_mean
    return 0.5 * (np.trace(product) - len(mean) - np.linalg.slogdet(product)[1] + apart @ to_precision @ apart)


def quietly(**options):
    """Fit; that nothing tells how much is left to gain is said in a warning, and tested once."""
    n = options.pop("n", 300)
    options = {"model": model(), "random_seed": 1, "backend": "quick", "progressbar": False} | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return pymc_ngvi.fit_ngvi(n, **options)


#: Rules of each kind, with estimators of each kind. Small steps are made longer, for some hundreds to suffice.
RULES = {
    "decay": {"update": "natural", "estimator": "price", "step": "decay"},
    "decay-stein": {"update": "natural", "estimator": "stein", "step": "decay", "n_draws": 64},
    "decay-gauss_newton": {"family": "diagonal", "estimator": "gauss_newton", "step": "decay"},
    "proximal": {"update": "natural", "estimator": "price", "step": "proximal", "step_decay": 0.7},
    "proximal-pathwise": {"update": "natural", "estimator": "pathwise", "step": "proximal", "step_size": 0.05},
    "constant": {"update": "natural", "estimator": "price", "step": "constant", "step_size": 0.05},
    "constant-gauss_newton": {"family": "diagonal", "estimator": "gauss_newton", "step": "constant", "step_size": 0.05},
    "constant-sqrt": {"update": "sqrt", "estimator": "stein", "step": "constant", "step_size": 0.05},
    "snngm": {
        "update": "cholesky",
        "estimator": "pathwise",
        "step": "snngm",
        "step_size": 0.003,
        "n_draws": 8,
        "n": 2000,
    },
    "snngm-precision": {
        "update": "cholesky_precision",
        "estimator": "pathwise",
        "step": "snngm",
        "step_size": 0.1,
        "n_draws": 8,
        "n": 1000,
    },
    "adam": {
        "update": "euclidean",
        "estimator": "pathwise",
        "step": "adam",
        "factor": "covariance",
        "step_size": 0.003,
        "n": 1500,
    },
    "sgd": {
        "update": "euclidean",
        "estimator": "pathwise",
        "step": "sgd",
        "factor": "covariance",
        "step_size": 3e-5,
        "n": 600,
    },
    "ivon": {"step": "ivon"},
    "ivon-gauss_newton": {"estimator": "gauss_newton", "step": "ivon", "n": 1500},
}
#: All but one: the residuals of the start, squared, make a precision that is far too large, with which decaying steps
#: bring the means of correlated coordinates home in thousands of iterations only.
NEAR = [rule for rule in RULES if rule != "decay-gauss_newton"]


@pytest.mark.parametrize("rule", NEAR)
def test_near_the_posterior_of_the_full_data(rule):
    """Means within the scatter that batches leave; scales within a factor.

    Whitened by the posterior, the gradient of 40 rows of 400 has a variance of about N / BATCH = 10. Steps of size rho
    leave a variance of rho / 2 of that: .25 for rho = .05, half a standard deviation. The other rules are given steps
    that leave no more; decaying ones with averaging leave less, about 10 / t.
    """
    approx = quietly(**{"n": 300} | RULES[rule])
    mean, sd = approx.q.mean(), approx.q.sd()
    family = approx.record.family
    exact_sd = np.sqrt(np.diag(COV)) if family == "full" else 1.0 / np.sqrt(np.diag(PRECISION))
    off = (mean - MEAN) / np.sqrt(np.diag(COV))
    assert np.abs(off).max() < 4 * 0.5
    if rule == "decay":
        assert np.abs(off).max() < 4 * np.sqrt(10 / 300)
    np.testing.assert_array_less(np.abs(np.log(sd / exact_sd)), np.log(1.6))


def test_the_default_on_minibatches():
    approx = quietly(n=60)
    assert (approx.record.step, approx.record.update, approx.record.estimator) == ("decay", "natural", "price")
    assert approx.status is Status.MAX_ITERATIONS
    np.testing.assert_allclose(approx.q.sd(), np.sqrt(np.diag(COV)), rtol=0.3)
    draws = approx.sample(500, random_seed=1).posterior["beta"].values.reshape(-1, 3)
    # Five standard errors of a mean over 500 draws.
    np.testing.assert_allclose(draws.mean(axis=0), approx.q.mean(), atol=5 * approx.q.sd().max() / np.sqrt(500))


def test_options_of_a_rule_that_is_not_named_ask_for_its_name():
    """Before the model is seen, the default rule is another."""
    with pytest.raises(ValueError, match=r"the default here, does not use window=30.*'decay'.*name one"):
        quietly(n=4, window=30)


@pytest.mark.parametrize("update", ["sqrt", "cholesky", "cholesky_precision", "euclidean", "natural_pd"])
def test_the_default_step_for_other_updates_is_stochastic(update):
    approx = quietly(n=2, update=update)
    assert approx.record.update == update
    assert approx.record.step != "adaptive"


def test_adaptive_is_refused_with_the_rule_to_take():
    with pytest.raises(ValueError, match=r"pm\.Minibatch data.*take step='decay'.*or the full data"):
        quietly(step="adaptive")


@two_seeds
def test_short_fits_are_not_certified(seed):
    """All of the data would take more gradients than the fit did. It ends by levelling off only, and says so."""
    with pytest.warns(ConvergenceWarning, match=r"levelled off.*if that is known"):
        approx = pymc_ngvi.fit_ngvi(
            2_000,
            model=model(),
            random_seed=seed,
            step="decay",
            n_draws=2,
            window=30,
            backend="quick",
            progressbar=False,
        )
    assert approx.status is Status.LEVELLED
    assert approx.record.n_iterations >= 90
    assert np.isnan(approx.gap)
    assert np.isnan(approx.gap_hist).all()


@pytest.mark.parametrize("batch_size", [BATCH, 48])
@two_seeds
def test_the_gap_on_passes_is_that_of_all_data(seed, batch_size):
    """Unbiased, whether the batches of a pass have each row once or the last one begins another pass."""
    density = LogDensity(model(batch_size), "quick")
    sd = np.sqrt(np.diag(COV))
    q = state_of("full", MEAN + 0.8 * sd, 1.5 * COV)
    rng, found = np.random.default_rng(seed), []
    for _ in range(20):
        density.n_gradients = 4 * 128 * density.n_batches
        found.append(on_passes(density, q, rng))
    error = PRECISION @ (1.5 * COV) - np.eye(3)
    expected = 0.5 * (0.8 * sd) @ PRECISION @ (1.5 * COV) @ PRECISION @ (0.8 * sd) + 0.25 * np.trace(error @ error)
    gaps = np.array([measured.gap for measured, _, _ in found])
    assert abs(gaps.mean() - expected) < 4 * gaps.std() / np.sqrt(len(gaps))
    assert gaps.std() < 0.2 * expected
    assert all(of.theta.shape == (128, 3) and units.shape == (8, 16) for _, of, units in found)
    density.n_gradients = 4 * 63 * density.n_batches
    assert on_passes(density, q, rng) is None


@two_seeds
def test_a_fit_on_minibatches_is_certified_on_passes(seed):
    """Far from the posterior it is not, and the gap says how far; near it, it is."""
    far = quietly(random_seed=seed, step="constant", step_size=0.02, n=60, n_draws=64)
    exact = kl(far.q.mean(), far.q.cov())
    assert far.status is not Status.CONVERGED
    assert far.gap > 0.5 * exact > 1.0
    near = quietly(random_seed=seed, step="decay", n=2_000)
    assert near.status is Status.CONVERGED
    assert kl(near.q.mean(), near.q.cov()) < 0.01


@two_seeds
def test_the_elbo_is_that_of_the_full_data_within_its_error(seed):
    """Unbiased over batches, each scaled to all the data: eight of them make the mean and its standard error."""
    approx = quietly(random_seed=seed)
    q = approx.q
    beta = q.mean()
    residuals = Y - X @ beta
    likelihood = -0.5 * (residuals @ residuals + np.trace(X.T @ X @ q.cov())) / NOISE**2
    likelihood -= 0.5 * N * np.log(2 * np.pi * NOISE**2)
    prior = -0.5 * (beta @ beta + np.trace(q.cov()) + 3 * np.log(2 * np.pi))
    # The scatter between batches of 40: sd of the terms times N / sqrt(40) / sqrt(8).
    terms = 0.5 * residuals**2 / NOISE**2
    expected_se = N * terms.std() / np.sqrt(BATCH * 8)
    assert 1 / 3 < approx.elbo.se / expected_se < 3
    # Eight batches give a t-distribution with 7 degrees of freedom: 5 standard errors are 1 in 600.
    assert abs(approx.elbo.value - (likelihood + prior + q.entropy())) < 5 * approx.elbo.se


def test_refined_goes_on_with_the_next_batches():
    whole, parts = quietly(n=20), quietly(n=8)
    with contextlib.suppress(ConvergenceWarning):
        parts.refine(12, progressbar=False)
    np.testing.assert_array_equal(whole.hist, parts.hist)
    np.testing.assert_array_equal(whole.q.mean(), parts.q.mean())


def test_a_batch_of_all_rows_is_all_of_the_data():
    """Each row once: the posterior to rounding, and certified."""
    approx = quietly(model=model(N), n=40)
    assert approx.status is Status.CONVERGED
    assert approx.gap < 1e-8
    assert kl(approx.q.mean(), approx.q.cov()) < 1e-8


# --- far starts -------------------------------------------------------------------------------------------------------


def regression(n=2_000, batch_size=None):
    """Return a linear regression on predictors of raw scale, all of it unknown, on all rows or on minibatches."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((n, 3)) * [1.0, 1.0, 15.0] + [0.0, 0.0, 100.0]
    y = 1.5 + x @ [1.0, -2.0, 0.05] + rng.standard_normal(n)
    rows = (x, y) if batch_size is None else pm.Minibatch(x, y, batch_size=batch_size)
    with pm.Model() as made:
        intercept = pm.Normal("intercept", 0, 5)
        beta = pm.Normal("beta", 0, 5, shape=3)
        sigma = pm.HalfNormal("sigma", 5)
        pm.Normal("y", intercept + rows[0] @ beta, sigma, observed=rows[1], total_size=n)
    return made


@functools.cache
def full_fit():
    return pymc_ngvi.fit_ngvi(
        model=regression(), random_seed=1, posterior="gaussian", backend="quick", progressbar=False
    )


def test_a_regression_with_unknown_noise_is_fitted_from_its_default_start():
    """The first natural steps on single batches overshoot by far: seen, and begun again from a better start."""
    full = full_fit()
    approx = quietly(n=10_000, model=regression(batch_size=100), random_seed=1)
    assert approx.status is Status.CONVERGED
    # Passes through the data leave .01 to .03 standard deviations; batches drawn independently would leave .2.
    np.testing.assert_array_less(np.abs(approx.q.mean() - full.q.mean()) / full.q.sd(), 0.1)
    np.testing.assert_allclose(approx.q.sd(), full.q.sd(), rtol=0.05)


def test_a_fit_that_diverges_says_so_and_gives_no_draws(tmp_path):
    """Kept in a file, with what is left of q to look at."""
    options = {"update": "euclidean", "estimator": "pathwise", "step": "sgd", "factor": "covariance"}
    with pytest.warns(ConvergenceWarning, match=r"diverged.*smaller step_size"):
        approx = pymc_ngvi.fit_ngvi(
            200, model=model(), random_seed=1, step_size=0.1, backend="quick", progressbar=False, **options
        )
    approx.save(tmp_path / "fit.nc")
    for each in (approx, pymc_ngvi.load(tmp_path / "fit.nc", model=model())):
        assert each.status is Status.DIVERGED
        with pytest.raises(pymc_ngvi.DivergedError, match=r"no posterior to draw from.*Leave `step`.*mean_flat"):
            each.sample(10)
        assert each.mean_flat.shape == (3,)


def test_k_hat_is_not_taken_from_one_batch(rng):
    """It would compare q with the posterior given the last batch."""
    y = rng.standard_normal(200)
    with pm.Model() as model:
        mu = pm.Normal("mu", 0, 10)
        pm.Normal("y", mu, 1, observed=pm.Minibatch(y, batch_size=20), total_size=200)
    with pytest.warns(ConvergenceWarning, match="Whether the fit has converged is not known"):
        approx = pymc_ngvi.fit_ngvi(30, model=model, random_seed=1, window=5, step="decay", progressbar=False)
    with pytest.raises(ValueError, match=r"pm\.Minibatch data.*all of the data"):
        approx.khat()
    assert approx.summary(draws=100).khat is None
