"""What a call may take, in estimated seconds: no clock decides, and what is left out says what asks for it."""

import re
import time
import warnings

import numpy as np
import pymc as pm
import pytest

from latent_models import grouped

from pymc_ngvi import ConvergenceWarning, NotExactError, Status, fit_ngvi
from pymc_ngvi.core import prices
from pymc_ngvi.core.messages import Reason
from pymc_ngvi.core.prices import in_words
from pymc_ngvi.density.logdensity import LogDensity
from pymc_ngvi.posteriors import plan
from pymc_ngvi.posteriors.kinds import KINDS
from pymc_ngvi.posteriors.plan import Decision, TimeBudget
from pymc_ngvi.results.diagnosis import context_of


def skewed():
    """Takes many draws to converge."""
    with pm.Model() as model:
        x = pm.Normal("x", 0.0, 1.0, shape=3)
        pm.Potential("p", -0.1 * pm.math.exp(x).sum() - (x[0] * x[1]) ** 2)
    return model


def fit(model, **options):
    return fit_ngvi(model, random_seed=1, progressbar=False, **options)


@pytest.fixture(name="scarce")
def _scarce(monkeypatch):
    """No posterior may follow a fit for long."""
    monkeypatch.setattr(plan, "_ALWAYS", 0.0)
    monkeypatch.setattr(plan, "_MOST_WORK", 0.01)


# --- what may be taken ------------------------------------------------------------------------------------------------


def test_what_is_asked_for_is_enough_and_round():
    for of_fit in (0.01, 3.0, 77.0, 1_234.0):
        for seconds in (0.5, 31.0, 999.0, 54_321.0):
            asked = TimeBudget(of_fit).asked_for(seconds)
            assert seconds <= TimeBudget(of_fit, float(asked)).left() < 2.5 * (of_fit + seconds) + 2.0
            assert len(asked.replace("_", "").rstrip("0")) <= 2


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0, "about 0 s"),
        (0.234, "about 0.2 s"),
        (1.8, "about 2 s"),
        (43.4, "about 43 s"),
        (200.0, "about 3 min"),
        (9_000.0, "about 2 h"),
    ],
)
def test_seconds_in_words(seconds, words):
    assert in_words(seconds) == words


@pytest.mark.parametrize("value", [0, -3, "60", float("nan"), float("inf"), True])
def test_max_seconds_that_make_no_sense(value):
    with pytest.raises(ValueError, match=r"max_seconds counts estimated seconds .* positive number; got"):
        fit(grouped(), max_seconds=value)


# --- the Gaussian fit -------------------------------------------------------------------------------------------------


def test_a_fit_ends_when_its_seconds_are_used_up():
    whole = fit(skewed(), posterior="gaussian", estimator="price")
    spent = prices.fit_seconds(whole.density, whole.record.n_gradients, whole.record.n_hessians, "price")
    with pytest.warns(ConvergenceWarning, match="max_seconds"):
        part = fit(skewed(), posterior="gaussian", estimator="price", max_seconds=0.3 * spent)
    assert part.status is Status.OUT_OF_SECONDS
    assert 0 < part.n_iterations < whole.n_iterations
    # It may go on for as many again, until it converges.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        for _ in range(5):
            part.refine(progressbar=False)
    assert part.converged
    assert part.elbo.value == pytest.approx(whole.elbo.value, abs=0.05)


def test_no_clock_decides(monkeypatch):
    """A thousand times slower, the same call gives the same bits."""
    with pytest.warns(ConvergenceWarning):
        quick = fit(skewed(), estimator="price", max_seconds=1e-3)
    clock, began = time.perf_counter, time.perf_counter()
    monkeypatch.setattr(time, "perf_counter", lambda: began + 1_000.0 * (clock() - began))
    with pytest.warns(ConvergenceWarning):
        slow = fit(skewed(), estimator="price", max_seconds=1e-3)
    assert slow.status is quick.status is Status.OUT_OF_SECONDS
    np.testing.assert_array_equal(slow.q.mean(), quick.q.mean())


# --- exact and nested posteriors --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("scarce")
def test_what_is_left_out_says_what_asks_for_it():
    model = grouped()
    approx = fit(model)
    assert not approx.is_exact
    assert (approx.record.reason, approx.record.on_request) == (Reason.TOO_DEAR, "exact")
    assert "exact" in context_of(approx._posterior).shape_cure()
    seconds = float(re.search(r"max_seconds=(\d+)", approx.record.posterior).group(1))
    assert fit(model, max_seconds=seconds).is_exact
    assert fit(model, posterior="exact").is_exact


def test_max_seconds_beside_a_posterior_that_is_asked_for():
    with pytest.raises(NotExactError, match=r"would take about [\d.]+ s, and max_seconds=0\.1 leaves") as error:
        fit(grouped(), posterior="exact", max_seconds=0.1)
    assert error.value.approx.converged


def test_a_process_of_many_points_is_exact_at_its_price():
    x = np.linspace(0.0, 10.0, 90)
    with pm.Model() as model:
        process = pm.gp.Marginal(cov_func=pm.gp.cov.Matern52(1, ls=pm.InverseGamma("ls", 5, 10)))
        y = np.sin(x) + 0.3 * np.random.default_rng(1).normal(size=90)
        process.marginal_likelihood("y", X=x[:, None], y=y, sigma=pm.HalfNormal("sd"))
    approx, kind = fit(model), KINDS["exact"]
    assert approx.is_exact
    price = kind.price(kind.possible(approx.density), approx.density, by_rows=False).seconds
    assert 0.5 * price < approx.plan.of("exact").seconds < 1.5 * price


def test_what_is_stopped_says_what_asks_for_it(monkeypatch):
    monkeypatch.setattr(type(KINDS["exact"]), "run", lambda self, start, found, work, is_only: work.count(1e3))
    approx = fit(skewed())
    assert approx.record.on_request == "exact"
    assert "exact posterior was stopped after about 17 min" in str(approx.summary())
    assert "posterior='exact' asks for it" in str(approx.plan)


# --- what is counted --------------------------------------------------------------------------------------------------


def test_what_is_counted_ends_at_twice_its_price():
    work = prices.Work(3.0, most=10.0)
    with work.counting():
        prices.count(5.9)
        with pytest.raises(prices.UsedUp, match="stopped after about"):
            prices.count(0.2)
    prices.count(1e9)  # beyond the context, nothing is
    work.expect(9.0)
    assert work.price == 9.0
    work.expect(19.0)
    assert work.price == 10.0
    with pytest.raises(prices.UsedUp) as caught:
        work.expect(21.0)
    assert caught.value.seconds == 21.0
    prices.Work().expect(1e9)


def test_values_by_rows_count_what_their_price_says():
    """Where all rows counted as logistic ones, regressions of counts were given up at twice a price that was right."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(400, 3))
    with pm.Model() as model:
        pm.Poisson("y", pm.math.exp(x @ pm.Normal("b", shape=3)), observed=rng.poisson(np.exp(x[:, 0])))
    density, work = LogDensity(model), prices.Work()
    assert density.rows is not None
    with work.counting():
        density.logp(0.1 * rng.normal(size=(50, 3)))
    assert work.spent == pytest.approx(50 * prices.of_value(density.gradient_seconds))


def test_a_nested_posterior_is_left_where_its_rounds_would_take_too_long(monkeypatch):
    """As is known once its mode is; rows and factors on the way to it are counted."""
    monkeypatch.setattr("pymc_ngvi.nested.posterior.n_expected", lambda given: 1e6)
    monkeypatch.setattr("pymc_ngvi.posteriors.kinds.nested_seconds", lambda given: 1.0)
    monkeypatch.setattr("pymc_ngvi.posteriors.kinds.TreeKind.chance", lambda self, found: 0.01)
    monkeypatch.setattr("pymc_ngvi.posteriors.kinds.LatentGaussianKind.may_come_first", False)
    approx = fit(grouped())
    assert approx.is_exact
    assert approx.plan.of("nested").outcome is Decision.TOO_DEAR
    assert "posterior='nested' asks for it" in approx.plan.of("nested").reason
    assert approx.plan.of("nested").seconds > 20.0
