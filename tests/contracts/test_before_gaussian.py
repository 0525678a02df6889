"""What comes in the place of a Gaussian fit by draws, or while it is left: chains from modes, exact posteriors."""

import numpy as np
import pymc as pm
import pytest

from numpy.testing import assert_allclose, assert_array_equal

from pymc_ngvi import LogDensity, NotExactError, Status, fit_ngvi
from pymc_ngvi.core import prices
from pymc_ngvi.core.messages import Reason, Unavailable
from pymc_ngvi.core.prices import UsedUp, Work
from pymc_ngvi.families import FullState
from pymc_ngvi.marginal.exact import exact_posterior, forest_of
from pymc_ngvi.posteriors.kinds import KINDS, PosteriorStart, highest_mode
from pymc_ngvi.posteriors.plan import Decision
from pymc_ngvi.results import choice

pytestmark = pytest.mark.usefixtures("_one_blas_thread")


def fit(model, seed=1, **options):
    return fit_ngvi(model=model, random_seed=seed, progressbar=False, **options)


def curved(d=40):
    """Turned: two numbers about a parabola, six of a multivariate t, others that are normal. It is no sum over rows."""
    turned = np.linalg.qr(np.random.default_rng(1).standard_normal((d, d)))[0]
    with pm.Model() as model:
        x = pm.Normal("x", shape=d)
        u = pm.Deterministic("u", x @ turned)
        pm.Potential("bent", -0.5 * (2.0 * u[1] - u[0] ** 2) ** 2)
        pm.Potential("t", -3.0 * pm.math.log1p((u[2:8] ** 2).sum()))
    return model


def moments_of_curved():
    """By quadrature: given u0, u1 is normal with precision 1 + 4 and mean 2 u0^2 / 5."""
    u = np.linspace(-8.0, 8.0, 4_001)
    log_p = -0.5 * u**2 - 0.5 * u**4 + 0.5 * (2.0 * u**2) ** 2 / 5.0
    w = np.exp(log_p - log_p.max())
    w /= w.sum()
    given = 2.0 * u**2 / 5.0
    mean = w @ given
    return (0.0, mean), (np.sqrt(w @ u**2), np.sqrt(0.2 + w @ (given - mean) ** 2))


# --- chains from modes ------------------------------------------------------------------------------------------------


@pytest.fixture
def _needed(monkeypatch):
    """Chains will be needed, so that they come first, however cheap a Gaussian fit is."""
    monkeypatch.setattr(choice, "_BEFORE_FIT", np.inf)


@pytest.mark.usefixtures("_needed")
@pytest.mark.parametrize("seed", [1, 2])
def test_chains_come_in_the_place_of_a_fit_by_draws(seed):
    """With the right moments, of functionals too, and without a Hessian."""
    approx = fit(curved(), seed=seed)
    assert approx.is_exact
    assert approx.plan.taken.kind == "moved"
    assert approx.plan.of("gaussian").outcome is Decision.ON_REQUEST
    assert approx.density.n_hessians == 0
    assert approx.record.n_gradients > 0
    assert "Gaussian fit" not in approx.record.closing_line()
    u = approx.chains().posterior["u"].values.reshape(-1, 40)
    error = 4.0 / np.sqrt(approx.checks.effective_size)
    for i, (mean, sd) in enumerate(zip(*moments_of_curved(), strict=True)):
        assert abs(u[:, i].mean() - mean) < error * sd
        assert abs(u[:, i].std() / sd - 1.0) < 2.0 * error  # kurtosis below 8


@pytest.mark.usefixtures("_needed")
def test_the_gaussian_is_made_when_it_is_asked_for():
    approx = fit(curved())
    assert_array_equal(approx.gaussian.mean_flat, fit(curved(), posterior="gaussian").mean_flat)


@pytest.mark.usefixtures("_needed")
def test_a_named_method_or_a_fit_by_rows_begins_as_before():
    assert fit(curved(), family="full").plan is None
    with pm.Model() as model:
        slope = pm.Normal("slope", shape=16)
        pm.Bernoulli("y", logit_p=np.eye(16)[np.arange(64) % 16] @ slope, observed=np.arange(64) % 3 == 0)
    assert fit(model).plan.of("gaussian").outcome is not Decision.ON_REQUEST


def test_without_a_mode_chains_do_not_begin():
    """Not in vain: they may begin from a fit."""
    with pm.Model() as model:
        x, s = pm.Normal("x", shape=40), pm.Normal("s")
        # log p rises without end as s falls, and the sum of squares with it.
        pm.Potential("funnel", -0.5 * (x[:8] ** 2).sum() / pm.math.exp(2.0 * s) - 2.0 * s + 0.5 * s**2)
    density, kind = LogDensity(model), KINDS["moved"]
    assert highest_mode(density, np.random.default_rng(1)) is None
    with pytest.raises(Unavailable, match="no mode") as caught:
        kind.run(PosteriorStart(density, None, 1, [], False), kind.possible(density), Work(), is_only=True)
    assert caught.value.code is Reason.HOPELESS


def no_work():
    """Nothing is left of it."""
    work = Work(0.0, 0.0)
    work.spent = work.left
    return work


@pytest.mark.usefixtures("_needed")
def test_chains_that_have_not_arrived_are_not_moved_again(monkeypatch):
    tried = []
    run = type(KINDS["moved"]).run

    def noted(self, start, found, work, *, is_only):
        tried.append(start.q is None)
        return run(self, start, found, no_work(), is_only=is_only)

    monkeypatch.setattr(type(KINDS["moved"]), "run", noted)
    approx = fit(curved())
    assert tried == [True]
    assert approx.plan.taken.kind == "gaussian"
    assert approx.plan.of("moved").outcome is Decision.FAILED
    assert "have not converged" in approx.plan.of("moved").reason


# --- after a fit ------------------------------------------------------------------------------------------------------


def few_events(n, events):
    """With more coefficients than are sampled."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((n, 61))
    score = x[:, 0] - x[:, 1] + rng.logistic(size=n)
    with pm.Model() as model:
        level, slope = pm.Normal("level", 0.0, 5.0), pm.Normal("slope", 0.0, 2.5, shape=61)
        pm.Bernoulli("y", logit_p=level + x @ slope, observed=(score >= np.sort(score)[-events]).astype(int))
    return model


def test_what_takes_seconds_needs_no_diagnosis(monkeypatch):
    monkeypatch.setattr(choice, "_is_off", lambda gaussian: False)
    assert fit(few_events(200, 24)).plan.taken.kind == "moved"
    monkeypatch.setattr(choice.TimeBudget, "left", lambda self, *, is_plain=False: 0.0 if is_plain else 20.0)
    assert fit(few_events(200, 24)).plan.taken.kind == "gaussian"


def test_a_gaussian_whose_weights_are_nearly_even_stays(monkeypatch):
    monkeypatch.setattr(choice, "_is_off", lambda gaussian: False)
    assert fit(few_events(30_000, 15_000)).plan.taken.kind == "gaussian"


# --- a fit that is left for a while -----------------------------------------------------------------------------------


@pytest.fixture
def _left_at_once(monkeypatch):
    monkeypatch.setattr("pymc_ngvi.results.choice.Candidates._pause_after", lambda *args: 1e-9)


@pytest.mark.usefixtures("_left_at_once")
def test_an_exact_posterior_begins_from_a_fit_that_is_paused():
    approx = fit(curved(8))
    assert approx.is_exact
    assert approx.record.status is Status.PAUSED
    assert approx.record.n_iterations <= 2
    mean, sd = moments_of_curved()
    u = approx.sample(4_000, chains=1, random_seed=1).posterior["u"].values[0]
    error = 4.0 / np.sqrt(min(approx.checks.effective_size, 4_000))
    assert_allclose((u[:, :2].mean(axis=0) - mean) / sd, 0.0, atol=error)
    approx.gaussian.refine()
    assert approx.gaussian.record.converged


@pytest.mark.usefixtures("_left_at_once", "_no_last_resort")
def test_without_one_the_fit_goes_on_where_it_was(monkeypatch):
    def refused(kind, density):
        raise Unavailable(Reason.NO_FOREST, "it is not to be")

    monkeypatch.setattr(type(KINDS["exact"]), "possible", refused)
    paused = fit(curved(8))
    monkeypatch.setattr("pymc_ngvi.results.choice.Candidates._pause_after", lambda *args: np.inf)
    without = fit(curved(8))
    assert paused.record.status is without.record.status is Status.CONVERGED
    assert paused.record.n_iterations == without.record.n_iterations > 1
    assert_array_equal(paused.mean_flat, without.mean_flat)


def test_an_exact_posterior_that_takes_far_more_values_is_left():
    """A banana and heavy tails in eight dimensions: it ends at twice its price, and has no limit once it is made."""
    density = LogDensity(curved(8))
    begin = density, FullState(np.zeros(8), np.eye(8)), forest_of(density), 1
    work = Work(0.0, 0.0)
    work.spent = work.left - 100.0 * prices.of_value(density.gradient_seconds)
    with work.counting(), pytest.raises(UsedUp, match="stopped after about"):
        exact_posterior(*begin)
    work = Work(1e3)
    with work.counting():
        state = exact_posterior(*begin)
    assert state.checks.is_exact
    before = work.spent
    assert len(state.draw(10, np.random.default_rng(1))) == 10
    assert 0.0 < before == work.spent


def test_what_was_asked_for_may_take_what_there_is(monkeypatch):
    """What is sure to be exact, with no other to come, too; twice its price elsewhere."""
    seen = []

    def run(self, start, found, work, *, is_only):
        seen.append(work.left / prices.MOST_TIMES)
        raise Unavailable(Reason.HOPELESS, "it is not to be")

    monkeypatch.setattr(type(KINDS["exact"]), "run", run)
    with pytest.raises(NotExactError):
        fit(curved(8), posterior="exact")
    with pytest.raises(NotExactError):
        fit(curved(8), posterior="exact", max_seconds=100.0)
    fit(curved(8), max_seconds=100.0)
    monkeypatch.setattr(type(KINDS["exact"]), "chance", lambda self, found: 0.9)
    fit(curved(8))
    assert seen[0] == np.inf
    assert 40.0 < seen[1] <= 50.0
    assert 40.0 < seen[2] <= 50.0
    assert seen[3] == prices.LEAST_PRICE


# --- what chains begin from -------------------------------------------------------------------------------------------


def test_the_highest_mode_of_a_gaussian_is_that():
    rng = np.random.default_rng(1)
    root = rng.standard_normal((20, 20)) / 4.0 + np.diag(np.geomspace(0.01, 10.0, 20))
    mean = rng.standard_normal(20)
    with pm.Model() as model:
        pm.MvNormal("x", mean, cov=root @ root.T, initval=np.zeros(20))
    mode = highest_mode(LogDensity(model), np.random.default_rng(1))
    # A climb ends where a step gains less than .05 nats.
    assert np.linalg.norm(np.linalg.solve(root, mode.point - mean)) < np.sqrt(2.0 * 0.05)
    assert_allclose(mode.gaussian.sd(), np.sqrt(np.diag(root @ root.T)), rtol=1e-3)
    assert_allclose(mode.log_mass, 0.0, atol=0.05)
