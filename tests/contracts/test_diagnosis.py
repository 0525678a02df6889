"""Whether `diagnose` sees what is wrong with an approximation, says where, and is quiet where nothing is."""

import dataclasses
import re

import numpy as np
import pymc as pm
import pytest
import xarray as xr

from gaussian import MEANS, SDS, SEEDS, fit, gaussian_model
from mixture_posteriors import eight_schools
from mixture_targets import target
from numpy.testing import assert_allclose

import pymc_ngvi

from pymc_ngvi import LogDensity, NGVIApproximation, Status
from pymc_ngvi.core.importance import Weights
from pymc_ngvi.families import DiagonalState, traits_of
from pymc_ngvi.fitting.record import OtherMode
from pymc_ngvi.results.diagnosis import Context, Moved, context_of, findings_of, other_modes
from pymc_ngvi.results.distributions import distribution_of

pytestmark = pytest.mark.usefixtures("_one_blas_thread")


@pytest.fixture(scope="module")
def gaussian():
    return LogDensity(gaussian_model())


# --- verdicts ---


def logistic():
    rng = np.random.default_rng(8)
    x = rng.normal(size=(150, 3))
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, 5.0, shape=3)
        pm.Bernoulli("y", logit_p=x @ beta, observed=rng.random(150) < 1.0 / (1.0 + np.exp(-x @ [1.0, -0.5, 0.2])))
    return model


def two_signs(constant=0.0, centre=0.0):
    with pm.Model() as model:
        theta = pm.Normal("theta", centre, 3.0)
        pm.Normal("y", theta**2, 0.4, observed=4.0)
        pm.Potential("constant", 0.0 * theta + constant)
    return model


WRONG = {
    "funnel": (lambda: target("funnel").build(), "`v`"),
    "banana": (lambda: target("banana").build(), "`x"),
    "eight schools": (lambda: eight_schools().build(), "`tau_log__`"),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", WRONG)
def test_a_posterior_that_no_gaussian_fits_is_seen_and_named(name, seed):
    build, variable = WRONG[name]
    diagnosis = fit(build(), random_seed=seed).diagnose(draws=2_000, random_seed=seed)
    assert not diagnosis.reliable
    assert any(variable in reason for reason in diagnosis.reasons)
    assert all("Try " in reason for reason in diagnosis.reasons)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("thorough", [False, True])
def test_a_regression_that_a_gaussian_fits_is_reliable(thorough, seed):
    diagnosis = fit(logistic(), random_seed=seed).diagnose(draws=2_000, random_seed=seed, thorough=thorough)
    assert diagnosis.reliable, diagnosis.reasons
    assert diagnosis.reasons == []
    assert diagnosis.thorough is thorough


@pytest.mark.parametrize("seed", SEEDS)
def test_a_missed_mode_is_told_of_by_the_fit_and_found_by_the_thorough_diagnosis(seed):
    approx = fit(two_signs(centre=0.3), random_seed=seed, start={"theta": 2.0}, start_sigma=0.1)
    (reason,) = approx.diagnose(draws=2_000, random_seed=seed).reasons
    assert "another mode" in reason
    assert "`theta` = -" in reason
    approx.record = dataclasses.replace(approx.record, modes=())  # as of a fit that has not found it
    diagnosis = approx.diagnose(draws=2_000, random_seed=seed, thorough=True)
    (reason,) = diagnosis.reasons
    assert "another mode" in reason
    assert "`theta` = -" in reason
    assert "family='mixture'" in reason


@pytest.mark.parametrize(("seed", "constant"), [(1, -40.0), (2, 40.0)])
def test_the_mass_of_a_missed_mode_is_half_of_all(seed, constant):
    """Whatever the evidence is."""
    approx = fit(two_signs(constant), start={"theta": 2.0}, start_sigma=0.1)
    places = other_modes(approx.density, distribution_of(approx.q), approx.elbo.value, np.random.default_rng(seed))
    assert len(places) == 1
    assert_allclose(places[0].share, 0.5, atol=0.03)  # the ELBO is .02 below the log mass of its mode
    assert places[0].q.mean()[0] < -1.5


def test_a_mixture_that_has_both_modes_misses_none():
    diagnosis = fit(two_signs(), family="mixture").diagnose(draws=2_000, random_seed=1, thorough=True)
    assert diagnosis.reliable, diagnosis.reasons


def test_a_fit_that_did_not_converge_says_so():
    with pytest.warns(pymc_ngvi.ConvergenceWarning):
        approx = fit(logistic(), n=1)
    diagnosis = approx.diagnose(draws=1_000, random_seed=1)
    assert diagnosis.reasons[0].startswith("The fit did not converge: the limit")
    assert "refine(n)" in diagnosis.reasons[0]


def test_a_large_gap_is_a_reason_and_a_small_one_is_none():
    approx = fit(logistic())
    record = approx.record
    for gap, expected in ((0.2, True), (0.002, False)):
        approx.record = dataclasses.replace(record, gap=gap)
        reasons = approx.diagnose(draws=1_000, random_seed=1).reasons
        assert any("still to be gained" in reason for reason in reasons) is expected


def test_lost_draws_are_a_reason():
    with pm.Model() as model:
        x = pm.Normal("x", 0.0, 1.0)
        pm.Potential("half", pm.math.switch(x > 0.0, 0.0, -np.inf))
    approx = NGVIApproximation(LogDensity(model), DiagonalState(np.zeros(1), np.ones(1)))
    diagnosis = approx.diagnose(draws=1_000, random_seed=1)
    assert any("not finite at" in reason and "of 1,000 draws" in reason for reason in diagnosis.reasons)
    assert 400 < diagnosis.weights.n_lost < 600


def test_a_posterior_without_a_draw_of_finite_density_is_no_error(gaussian):
    with pm.Model() as model:
        x = pm.Normal("x", 0.0, 1.0)
        pm.Potential("far", pm.math.switch(x > 50.0, 0.0, -np.inf))
    approx = NGVIApproximation(LogDensity(model), DiagonalState(np.zeros(1), np.ones(1)))
    diagnosis = approx.diagnose(draws=1_000, random_seed=1)
    assert not diagnosis.reliable
    assert np.isnan(diagnosis.by_coordinate["mean_drift"]).all()
    assert "too few draws" in str(diagnosis)


# --- cures ---


@pytest.mark.parametrize(
    ("family", "groups", "has_hessian", "expected", "absent"),
    [
        ("full", False, True, ["family='mixture'", "pm.sample"], ["rvb2", "family='full'"]),
        ("sparse", True, True, ["reparam='rvb2'", "non-centred", "family='mixture'"], []),
        ("diagonal", False, True, ["family='full'"], ["rvb2"]),
        ("diagonal", True, True, ["family='sparse'", "rvb2"], []),
        ("mixture", False, True, ["n_components"], ["family='mixture'"]),
        ("full", False, False, ["pm.sample"], ["mixture"]),
        ("pushforward", True, True, ["pm.sample"], ["rvb2", "mixture"]),
    ],
)
def test_cures_go_with_what_the_model_is(family, groups, has_hessian, expected, absent, gaussian):
    relative = family == "pushforward"
    cure = Context(gaussian.layout, None, traits_of(family), groups, has_hessian, relative=relative).shape_cure()
    assert all(word in cure for word in expected)
    assert not any(word in cure for word in absent)


@pytest.fixture(scope="module")
def schools():
    return fit(eight_schools().build())


def test_the_cure_of_a_model_with_groups_names_the_exact_posterior_and_the_reparametrisation(schools):
    diagnosis = schools.diagnose(draws=1_000, random_seed=1)
    assert "Try posterior='exact', reparam='rvb2'" in diagnosis.reasons[0]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),  # a Gaussian was asked for
        ({"of_posterior": "Gaussian: it would take long.", "on_request": "exact"}, True),
        ({"of_posterior": "Gaussian: it would take long, and so would posterior='exact'."}, False),
        ({"of_posterior": "Gaussian: it would take long.", "on_request": "nested"}, False),
        ({"of_posterior": "Gaussian: k-hat of the global parameters is 0.9."}, False),  # tried already
        ({"kind": "exact"}, False),
        ({"status": Status.UNBOUNDED}, False),
        ({"status": Status.MAX_ITERATIONS}, False),
        ({"family": "mixture"}, False),
        ({"reparam": "rvb2"}, False),
    ],
)
def test_an_exact_posterior_is_a_cure_where_it_was_not_tried(changes, expected, schools):
    record = dataclasses.replace(schools.record, **changes)
    cure = context_of(dataclasses.replace(schools._posterior, record=record)).shape_cure()
    assert cure.startswith("Try posterior='exact', ") is expected
    assert ("exact" in cure) is expected


@pytest.mark.parametrize("share", [0.4, 0.001])
def test_an_exact_posterior_is_no_cure_where_a_mode_is_missed(share, gaussian):
    """It would miss the same one."""
    context = Context(
        gaussian.layout,
        None,
        traits_of("full"),
        has_groups=False,
        has_hessian=True,
        other_posterior=lambda: "posterior='exact'",
    )
    none, where = np.empty((0, 4)), np.zeros(4)
    moved = Moved(none, none, none, none[:, 0], 0.0, 4, 0, 0)
    places = [OtherMode(DiagonalState(where + 9.0, where + 1.0), share)]
    q = DiagonalState(where, where + 1.0)
    found = findings_of(context, 0.0, Weights(0.1, 900.0, 1_000, 0), moved, None, [], places, q)
    assert any("exact" in finding.cure for finding in found) is (share < 0.1)


@pytest.mark.parametrize(("n_levels", "posterior"), [(6, "exact"), (40, "exact")])
def test_crossed_effects_are_told_of_a_posterior_and_not_of_the_reparametrisation(n_levels, posterior):
    """Those of one factor are global parameters: modes of the others given these do not help, and take long."""
    rng = np.random.default_rng(2)
    one, other = rng.integers(0, 50, 500), rng.integers(0, n_levels, 500)
    with pm.Model() as model:
        scales = pm.HalfNormal("sd_a", 1.0), pm.HalfNormal("sd_b", 1.0)
        a, b = (pm.Normal(name, 0.0, sd, shape=n) for name, sd, n in zip("ab", scales, (50, n_levels), strict=True))
        pm.Bernoulli("y", logit_p=a[one] + b[other], observed=rng.integers(0, 2, 500))
    context = context_of(fit(model)._posterior)
    assert context.has_groups
    assert context.shape_cure().startswith(f"Try posterior='{posterior}', another parametrisation")
    assert "reparam" not in context.shape_cure()


# --- the report ---


@pytest.fixture(scope="module")
def wrong(gaussian):
    """A diagnosis of a q that is shifted in one coordinate and too narrow in another."""
    q = DiagonalState(MEANS + np.array([0.0, 0.1, 0.0, 0.0]), SDS * [1.0, 1.0, 1.0, 0.6])
    return NGVIApproximation(gaussian, q).diagnose(random_seed=3)


def test_the_report_says_what_is_wrong_where(wrong, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = str(wrong)
    assert text.startswith("Not reliable, for 2 reasons:")
    assert max(map(len, text.splitlines())) <= 80
    flat = " ".join(text.split())
    assert "Moving draws towards the posterior changes the mean of `effect[0]` (-1.0" in flat
    assert "Moving draws towards the posterior changes the standard deviation of `effect[2]` (+" in flat
    assert "`level`" not in flat
    assert f"{wrong.n_log_p:,} log densities" in flat
    assert 10_000 < wrong.n_log_p < 10_100  # with those that symmetries take
    assert f"{wrong.n_gradients:,} gradients" in flat
    assert flat.count("-> Try") == 1  # one cure for both


def test_the_report_of_a_reliable_q_says_what_was_not_looked_for(gaussian):
    diagnosis = NGVIApproximation(gaussian, DiagonalState(MEANS, SDS)).diagnose(draws=1_000, random_seed=1)
    assert diagnosis.reliable
    assert str(diagnosis).startswith("Exact: the posterior is Gaussian. Other modes: not looked for")


@pytest.mark.parametrize(
    ("searched", "has_one_mode", "said"),
    [
        (True, False, "looked for after the fit, and none found"),
        (False, True, "none, as the log density is concave"),
    ],
)
def test_the_report_says_what_was_done_about_other_modes(gaussian, searched, has_one_mode, said):
    diagnosis = NGVIApproximation(gaussian, DiagonalState(MEANS, SDS)).diagnose(draws=1_000, random_seed=1)
    diagnosis = dataclasses.replace(diagnosis, searched=searched, has_one_mode=has_one_mode)
    assert diagnosis.headline().endswith(f"Other modes: {said}.")
    assert re.search(f"Other modes +{said}", str(diagnosis))


def test_many_coordinates_of_one_variable_are_counted_not_listed():
    with pm.Model() as model:
        pm.Normal("z", 0.0, 1.0, shape=40)
    approx = NGVIApproximation(LogDensity(model), DiagonalState(np.zeros(40), np.full(40, 0.5)))
    diagnosis = approx.diagnose(draws=1_000, random_seed=1)
    reason = next(r for r in diagnosis.reasons if "standard deviation" in r)
    assert "and 39 more of 40 (" in reason
    assert "worst 8 of 40" in str(diagnosis).replace("\n", " ")


def test_the_dataset_has_the_dims_of_the_model(wrong):
    data = wrong.to_dataset()
    assert isinstance(data, xr.Dataset)
    assert data["effect"].dims == ("diagnostic", "group")
    assert list(data["group"].values) == ["a", "b", "c"]
    assert float(data["effect"].sel(diagnostic="mean_drift", group="a")) == wrong.by_coordinate["mean_drift"][1]
    assert data.attrs["reliable"] == 0
    assert data.attrs["khat"] == wrong.khat
    assert list(wrong.to_frame().index) == ["level", "effect[0]", "effect[1]", "effect[2]"]


def test_a_dim_that_the_model_has_taken_stays_the_model_s():
    with pm.Model(coords={"diagnostic": ["p", "q"]}) as model:
        pm.Normal("x", 0.0, 1.0, dims="diagnostic")
    approx = NGVIApproximation(LogDensity(model), DiagonalState(np.zeros(2), np.ones(2)))
    assert approx.diagnose(draws=500, random_seed=1).to_dataset()["x"].dims == ("q_diagnostic", "diagnostic")


# --- what is refused, and what is large ---


@pytest.mark.parametrize(("draws", "message"), [(99, "at least 100 draws; got 99"), (500.5, "whole number")])
def test_numbers_of_draws_that_make_no_sense_are_refused(draws, message, gaussian):
    approx = NGVIApproximation(gaussian, DiagonalState(MEANS, SDS))
    with pytest.raises(ValueError, match=message):
        approx.diagnose(draws=draws)


def test_fits_to_minibatches_are_not_judged():
    """But say how they ended, and where they are."""
    with pm.Model() as model:
        mu = pm.Normal("mu")
        y = pm.Minibatch(np.arange(20.0), batch_size=5)
        pm.Normal("y", mu, 1.0, observed=y, total_size=20)
    approx = NGVIApproximation(LogDensity(model), DiagonalState(np.zeros(1), np.ones(1)))
    for diagnosis in (approx.diagnose(), approx.diagnose(draws=200, random_seed=1)):
        assert (diagnosis.verdict, diagnosis.reasons) == ("not judged", [])
        assert "Load what `save` writes on a model of all of the data" in diagnosis.headline()
        assert np.isnan(diagnosis.khat)
        assert np.isnan(diagnosis.by_coordinate["mean_drift"]).all()
        assert "mu" in str(diagnosis)
        assert set(diagnosis.to_dataset().data_vars) == {"mu"}
