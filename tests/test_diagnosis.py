"""Whether `diagnose` sees what is wrong with an approximation, says where, and is quiet where nothing is."""

import dataclasses

from pathlib import Path

import numpy as np
import pymc as pm
import pytest
import xarray as xr

from mixture_posteriors import posterior
from mixture_targets import target
from numpy.testing import assert_allclose
from scipy import stats
from test_docs import run

import pymc_ngvi

from pymc_ngvi.approximation import NGVIApproximation
from pymc_ngvi.diagnosis.drift import critical, drift_of
from pymc_ngvi.diagnosis.elsewhere import other_modes
from pymc_ngvi.diagnosis.findings import Context, Finding
from pymc_ngvi.diagnosis.moves import move, plan_of
from pymc_ngvi.diagnosis.tails import coordinate_khats, tail_shapes, weights_of
from pymc_ngvi.diagnostics import pareto_khat
from pymc_ngvi.families import DiagonalState, FullState, MixtureState
from pymc_ngvi.families.student_t import StudentTState
from pymc_ngvi.model import LogDensity
from pymc_ngvi.result import Elbo, FitRecord
from pymc_ngvi.status import Status

pytestmark = pytest.mark.usefixtures("_one_blas_thread")

SEEDS = (1, 2)
MEANS, SDS = np.array([1.0, -2.0, 0.0, 3.0]), np.array([2.0, 0.1, 1.0, 30.0])


def fit(model, **options):
    with model:
        return pymc_ngvi.fit_ngvi(progressbar=False, **{"random_seed": 1, **options})


def gaussian_model():
    """Independent coordinates of different scales, with dims."""
    with pm.Model(coords={"group": ["a", "b", "c"]}) as model:
        pm.Normal("level", MEANS[0], SDS[0])
        pm.Normal("effect", MEANS[1:], SDS[1:], dims="group")
    return model


@pytest.fixture(scope="module")
def gaussian():
    return LogDensity(gaussian_model())


def chain():
    """A Gaussian posterior with correlations, and its covariance."""
    with pm.Model() as model:
        a = pm.Normal("a", 1.0, 2.0)
        pm.Normal("b", a, 0.5, shape=3)
    cov = np.full((4, 4), 4.0) + np.diag([0.0, 0.25, 0.25, 0.25])
    return model, FullState(np.ones(4), np.linalg.cholesky(cov))


def moved_from(density, q, seed, n_draws=256, **options):
    rng = np.random.default_rng(seed)
    base = rng.standard_normal((n_draws, q.n_dim))
    if q.n_uniform:
        base = np.concatenate([base, rng.random((n_draws, 1))], axis=1)
    moved = move(density, q, base, rng, **{"n_trajectories": 4, **options})
    return moved, drift_of(moved, q.mean(), q.sd(), (q.log_density(moved.start), q.log_density(moved.control)))


def assert_none(estimates, expected=0.0):
    assert np.all(np.abs(estimates.value - expected) < critical(len(estimates.value)) * estimates.se + 1e-9)


# --- draws that are moved ---


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["diagonal", "full"])
def test_nothing_drifts_where_q_is_the_posterior(kind, seed, gaussian):
    model, q = chain()
    density = LogDensity(model) if kind == "full" else gaussian
    q = q if kind == "full" else DiagonalState(MEANS, SDS)
    moved, drift = moved_from(density, q, seed)
    for estimates in (drift.mean, drift.sd, drift.skewness):
        assert_none(estimates)
    assert abs(drift.log_p.value) < 4.0 * drift.log_p.se
    # Controls take most of the noise: independent draws would have .06 and .04.
    assert drift.mean.se.max() < 0.03
    assert drift.sd.se.max() < 0.03
    assert moved.acceptance > 0.8
    # They have forgotten where they began.
    correlation = [np.corrcoef(x, y)[0, 1] for x, y in zip(moved.start.T, moved.end.T, strict=True)]
    assert np.abs(correlation).max() < 0.3


@pytest.mark.parametrize("seed", SEEDS)
def test_drift_is_the_error_where_that_is_known(seed, gaussian):
    shift, scale = np.array([0.0, 0.8, 0.0, -0.4]), np.array([0.6, 1.0, 1.3, 1.0])
    _, drift = moved_from(gaussian, DiagonalState(MEANS + shift * SDS, scale * SDS), seed)
    assert_none(drift.mean, -shift / scale)
    assert_none(drift.sd, 1.0 / scale - 1.0)
    assert drift.mean.beyond(0.3).tolist() == [1, 3]
    assert drift.sd.beyond(0.15).tolist() == [0, 2]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_drift_of_log_p_is_that_of_the_scale(seed, gaussian):
    """E_p[log p] - E_q[log p] = -d/2 (1 - s^2) where q has s times the standard deviations."""
    _, drift = moved_from(gaussian, DiagonalState(MEANS, 0.5 * SDS), seed, n_trajectories=8)
    assert abs(drift.log_p.value + 0.5 * 4 * 0.75) < 4.0 * drift.log_p.se
    assert 0.02 < drift.log_p.se < 0.2


def mixture_density(q):
    with pm.Model() as model:
        pm.NormalMixture("x", q.weights, mu=q.means[:, 0], sigma=q.sds[:, 0])
    return LogDensity(model)


def t_density():
    with pm.Model() as model:
        pm.StudentT("x", 8.0, mu=1.0, sigma=2.0)
    return LogDensity(model)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["mixture", "student_t"])
def test_nothing_drifts_where_a_posterior_that_is_not_gaussian_is_q(kind, seed):
    """Trajectories are refused where they should be: otherwise moments would move."""
    two = [FullState(np.array([m]), np.array([[s]])) for m, s in ((-1.5, 0.2), (1.5, 1.5))]
    q = MixtureState.of(two, np.log([0.3, 0.7]))
    if kind == "student_t":
        q = StudentTState(FullState(np.array([1.0]), np.array([[2.0]])), np.log(4.0))
    density = mixture_density(q) if kind == "mixture" else t_density()
    _, drift = moved_from(density, q, seed, n_draws=4_000, n_trajectories=8)
    for estimates in (drift.mean, drift.sd, drift.skewness):
        assert_none(estimates)
        assert estimates.se[0] < 0.2
    assert abs(drift.log_p.value) < 4.0 * drift.log_p.se


def test_a_reparametrised_q_moves_in_the_coordinates_of_its_gaussian():
    rng = np.random.default_rng(5)
    with pm.Model() as model:
        mu, tau = pm.Normal("mu", 0.0, 2.0), pm.HalfNormal("tau", 1.0)
        effect = pm.Normal("effect", mu, tau, shape=6)
        pm.Normal("y", effect, 0.5, observed=rng.normal(1.0, 1.0, size=(5, 6)))
    approx = fit(model, reparam="rvb2")
    assert plan_of(approx.density, approx.q).coupled
    diagnosis = approx.diagnose(draws=1_000, random_seed=1)
    assert diagnosis.reliable, diagnosis.reasons
    assert np.all(diagnosis.by_coordinate["mean_drift_se"] < 0.06)


def test_fewer_draws_are_moved_where_steps_are_small(gaussian):
    q = DiagonalState(MEANS, SDS)
    all_of_them, _ = moved_from(gaussian, q, 1)
    fewer, _ = moved_from(gaussian, q, 1, max_gradients=1_000)
    assert len(all_of_them.end) == 256
    assert 48 <= len(fewer.end) < 128
    assert fewer.n_gradients < 2_000


def test_draws_outside_the_support_are_left_out():
    with pm.Model() as model:
        x = pm.Normal("x", 0.0, 1.0, shape=2)
        pm.Potential("half", pm.math.switch(x[0] > 0.0, 0.0, -np.inf))
    moved, _ = moved_from(LogDensity(model), DiagonalState(np.zeros(2), np.ones(2)), 1)
    assert moved.n_lost + len(moved.end) == 256
    assert 90 < moved.n_lost < 166
    assert moved.end[:, 0].min() > 0.0


# --- weights ---


@pytest.mark.parametrize("n_draws", [200, 1_000, 10_000])
@pytest.mark.parametrize("seed", SEEDS)
def test_shapes_of_tails_are_those_of_single_ones(n_draws, seed):
    log_ratio = 0.4 * np.random.default_rng(seed).standard_normal((n_draws, 3)) ** 2
    expected = [pareto_khat(column, np.zeros(n_draws)) for column in log_ratio.T]
    assert_allclose(tail_shapes(log_ratio), expected, rtol=1e-8)


def test_equal_values_have_no_tail():
    assert np.all(tail_shapes(np.zeros((1_000, 2))) == -np.inf)


@pytest.mark.parametrize("seed", SEEDS)
def test_khats_by_coordinate_point_at_the_one_that_is_too_narrow(seed, gaussian):
    x = np.random.default_rng(seed).standard_normal((40_000, 4))
    khats = coordinate_khats(0.5 * (1.0 - 0.65**2) * x[:, 2] ** 2, x)
    assert np.argmax(khats) == 2
    assert khats[2] > np.delete(khats, 2).max() + 0.05
    approx = NGVIApproximation(gaussian, DiagonalState(MEANS, SDS * [1.0, 1.0, 0.5, 1.0]))
    assert np.argmax(approx.diagnose(random_seed=seed).by_coordinate["khat"]) == 2


def test_the_effective_sample_size_is_that_of_known_weights(rng):
    """For p = N(m, 1) and q = N(0, 1): E[w]^2 / E[w^2] = exp(-m^2)."""
    x = rng.standard_normal(100_000)
    weights = weights_of(-0.5 * (x - 0.5) ** 2, -0.5 * x**2)
    assert_allclose(weights.effective / len(x), np.exp(-0.25), rtol=0.02)
    assert weights_of(np.zeros(1_000), np.zeros(1_000)).effective == pytest.approx(1_000)


def test_weights_at_lost_draws_are_left_out_and_counted(rng):
    x = rng.standard_normal(1_000)
    log_p = np.where(x < -1.0, -np.inf, -0.5 * x**2)
    weights = weights_of(log_p, -0.5 * x**2)
    assert weights.n_lost == np.sum(x < -1.0)
    assert weights.effective == pytest.approx(np.sum(x >= -1.0))


def test_khats_see_the_second_moment():
    """A coordinate on which weights do not depend has the k-hat of its own tails and of the weights."""
    x = stats.t(3).rvs(size=(20_000, 1), random_state=np.random.default_rng(1))
    of_square = coordinate_khats(np.zeros(len(x)), x)[0]
    assert 0.5 < of_square < 0.85  # of t^2 with 3 degrees of freedom: 2/3


# --- verdicts ---


def logistic():
    rng = np.random.default_rng(8)
    x = rng.normal(size=(150, 3))
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, 5.0, shape=3)
        pm.Bernoulli("y", logit_p=x @ beta, observed=rng.random(150) < 1.0 / (1.0 + np.exp(-x @ [1.0, -0.5, 0.2])))
    return model


def two_signs():
    with pm.Model() as model:
        theta = pm.Normal("theta", 0.0, 3.0)
        pm.Normal("y", theta**2, 0.4, observed=4.0)
    return model


WRONG = {
    "funnel": (lambda: target("funnel").build(), "`v`"),
    "banana": (lambda: target("banana").build(), "`x"),
    "eight schools": (lambda: posterior("eight schools").build(), "`tau_log__`"),
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
def test_a_missed_mode_is_found_by_the_thorough_diagnosis_only(seed):
    approx = fit(two_signs(), random_seed=seed, start={"theta": 2.0}, start_sigma=0.1)
    assert approx.diagnose(draws=2_000, random_seed=seed).reliable
    diagnosis = approx.diagnose(draws=2_000, random_seed=seed, thorough=True)
    (reason,) = diagnosis.reasons
    assert "misses a mode" in reason
    assert "`theta` = -" in reason
    assert "family='mixture'" in reason


@pytest.mark.parametrize("seed", SEEDS)
def test_the_mass_of_a_missed_mode_is_half_of_all(seed):
    approx = fit(two_signs(), start={"theta": 2.0}, start_sigma=0.1)
    places = other_modes(approx.density, approx.q, approx.elbo.value, np.random.default_rng(seed))
    assert len(places) == 1
    assert_allclose(places[0].share, 0.5, atol=0.03)  # the ELBO is .02 below the log mass of its mode
    assert places[0].location[0] < -1.5


def test_a_mixture_that_has_both_modes_misses_none():
    diagnosis = fit(two_signs(), family="mixture").diagnose(draws=2_000, random_seed=1, thorough=True)
    assert diagnosis.reliable, diagnosis.reasons


def test_a_fit_that_did_not_converge_says_so():
    with pytest.warns(pymc_ngvi.ConvergenceWarning):
        approx = fit(logistic(), n=1)
    diagnosis = approx.diagnose(draws=1_000, random_seed=1)
    assert diagnosis.reasons[0].startswith("The fit did not converge (iteration limit)")
    assert "refine(n)" in diagnosis.reasons[0]


def test_a_large_gap_is_a_reason_and_a_small_one_is_none():
    approx = fit(logistic())
    record = approx.record
    for gap, expected in ((0.2, True), (0.002, False)):
        approx.record = dataclasses.replace(record, gap=gap)
        reasons = approx.diagnose(draws=1_000, random_seed=1).reasons
        assert any("nats away" in reason for reason in reasons) is expected


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
    cure = Context(gaussian.layout, None, family, groups, has_hessian).shape_cure()
    assert all(word in cure for word in expected)
    assert not any(word in cure for word in absent)


def test_the_cure_of_a_model_with_groups_names_the_reparametrisation():
    diagnosis = fit(posterior("eight schools").build()).diagnose(draws=1_000, random_seed=1)
    assert "reparam='rvb2'" in diagnosis.reasons[0]


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
    assert "The mean of q is off: draws that are moved towards the posterior drift in `effect[0]` (-1.0" in flat
    assert (
        "The standard deviation of q is off: draws that are moved towards the posterior drift in `effect[2]` (+" in flat
    )
    assert "`level`" not in flat
    assert "10,000 log densities" in flat
    assert f"{wrong.n_gradients:,} gradients" in flat
    assert flat.count("-> Try") == 1  # one cure for both


def test_the_report_of_a_reliable_q_says_what_was_not_looked_for(gaussian):
    diagnosis = NGVIApproximation(gaussian, DiagonalState(MEANS, SDS)).diagnose(draws=1_000, random_seed=1)
    assert diagnosis.reliable
    assert str(diagnosis).startswith("Reliable, as far as these checks see. Other modes were not looked for")


def test_the_report_is_html_in_notebooks(wrong):
    html = wrong._repr_html_()
    assert "<b>Not reliable" in html
    assert "family=&#x27;full&#x27;" in html
    assert html.count("<li>") == len(wrong.findings)


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


def test_the_same_seed_gives_the_same_diagnosis(gaussian):
    approx = NGVIApproximation(gaussian, DiagonalState(MEANS, SDS))
    first, second, third = (approx.diagnose(draws=500, random_seed=seed) for seed in (4, 4, 5))
    assert str(first) == str(second) != str(third)


# --- what is refused, and what is large ---


@pytest.mark.parametrize(("draws", "message"), [(99, "at least 100 draws; got 99"), (500.5, "whole number")])
def test_numbers_of_draws_that_make_no_sense_are_refused(draws, message, gaussian):
    approx = NGVIApproximation(gaussian, DiagonalState(MEANS, SDS))
    with pytest.raises(ValueError, match=message):
        approx.diagnose(draws=draws)


def test_models_of_minibatches_are_refused():
    with pm.Model() as model:
        mu = pm.Normal("mu")
        y = pm.Minibatch(np.arange(20.0), batch_size=5)
        pm.Normal("y", mu, 1.0, observed=y, total_size=20)
    approx = NGVIApproximation(LogDensity(model), DiagonalState(np.zeros(1), np.ones(1)))
    with pytest.raises(ValueError, match="Minibatch"):
        approx.diagnose()


def test_changed_data_are_refused():
    with pm.Model() as model:
        data = pm.Data("data", np.zeros(3))
        mu = pm.Normal("mu")
        pm.Normal("y", mu, 1.0, observed=data)
    approx = NGVIApproximation(LogDensity(model), DiagonalState(np.zeros(1), np.ones(1)))
    with model:
        pm.set_data({"data": np.ones(3)})
    with pytest.raises(ValueError, match="changed after the fit"):
        approx.diagnose()


def test_thousands_of_dimensions_take_fewer_draws():
    n = 8_000
    with pm.Model() as model:
        pm.Normal("z", 0.0, 1.0, shape=n)
    diagnosis = NGVIApproximation(LogDensity(model), DiagonalState(np.zeros(n), np.ones(n))).diagnose(random_seed=1)
    assert diagnosis.reliable, diagnosis.reasons
    assert 48 <= diagnosis.n_moved < 140
    assert 1_000 <= diagnosis.n_log_p < 5_000
    assert 0 < np.isfinite(diagnosis.by_coordinate["khat"]).sum() < n


def test_a_finding_is_its_sentence_and_its_cure():
    assert str(Finding("It is wrong.", "Mend it.", True)) == "It is wrong. Mend it."
    assert str(Finding("It is so.", "", False)) == "It is so."


def test_other_figures_are_those_of_the_fit():
    approx = fit(logistic())
    diagnosis = approx.diagnose(random_seed=1)
    assert isinstance(approx.record, FitRecord)
    assert approx.status is Status.CONVERGED
    assert diagnosis.outcome == "converged"
    assert diagnosis.gap == approx.gap
    assert isinstance(diagnosis.elbo, Elbo)
    assert abs(diagnosis.elbo.value - approx.elbo.value) < 4.0 * np.hypot(diagnosis.elbo.se, approx.elbo.se)
    assert diagnosis.khat == pytest.approx(approx.khat(random_seed=2), abs=0.2)


def test_the_examples_of_the_page_run():
    run((Path(__file__).parents[1] / "docs" / "diagnostics.md").read_text(encoding="utf-8"))
