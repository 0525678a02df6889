"""Simulation-based calibration: ranks are uniform where fits are right, and say in what way they are wrong."""

import copy
import importlib

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

from scipy.stats import norm

import pymc_ngvi

from pymc_ngvi.core.sizes import seed_of
from pymc_ngvi.density.info import simulate

module = importlib.import_module("pymc_ngvi.many")
QUIET = {"random_seed": 3, "progressbar": False}


def regression(prior_sd=2.0):
    x = np.linspace(-1.0, 1.0, 12)
    with pm.Model(coords={"of": ["intercept", "slope"]}) as model:
        b = pm.Normal("b", 0.0, prior_sd, dims="of")
        pm.Deterministic("end", b[0] + b[1])
        pm.Normal("y", b[0] + b[1] * x, 1.0, observed=np.zeros(12))
    return model


def poisson():
    with pm.Model() as model:
        rate = pm.Gamma("rate", 2.0, 1.0)
        pm.Poisson("y", rate, observed=np.array([1, 2, 3]))
    return model


@pytest.fixture(scope="module")
def calibration():
    return pymc_ngvi.calibrate(regression(), 100, **QUIET)


# --- simulation ---


@pytest.mark.parametrize("seed", [1, 2])
def test_simulated_data_belong_to_the_parameters_beside_them(seed):
    x = np.linspace(-1.0, 1.0, 12)
    drawn = simulate(regression(), 2_000, seed)
    b = np.array([one.values["b"] for one in drawn])
    residuals = np.array([one.observed["y"] for one in drawn]) - b[:, :1] - b[:, 1:] * x
    assert abs(b.std() - 2.0) < 4 * 2.0 / np.sqrt(2 * 4_000)
    assert abs(residuals.std() - 1.0) < 4 / np.sqrt(2 * 24_000)
    np.testing.assert_allclose([one.values["end"] for one in drawn], b.sum(axis=1))


def test_unconstrained_values_are_those_of_the_same_draw():
    for one in simulate(poisson(), 5, 1):
        np.testing.assert_allclose(one.unconstrained["rate_log__"], np.log(one.values["rate"]))


# --- ranks ---


def test_fits_that_are_the_posterior_are_calibrated(calibration):
    assert calibration.is_calibrated
    assert calibration.sentence.startswith("Calibrated, as far as 100 fits tell: ranks of 4 quantities are uniform")
    table = calibration.summary()
    assert list(table.index) == ["b[intercept]", "b[slope]", "end", "log_density"]
    assert (table.n == 100).all()
    assert (abs(table["mean"]) < 4).all()
    assert (abs(table.coverage_90 - 0.9) < 4 * 0.03).all()
    assert repr(calibration) == f"Calibration({calibration.sentence})"


def test_ranks_are_those_among_the_draws_of_the_posterior(calibration):
    """In closed form: the part below the truth, within the error of 999 draws."""
    x = np.column_stack([np.ones(12), np.linspace(-1.0, 1.0, 12)])
    cov = np.linalg.inv(x.T @ x + np.eye(2) / 4.0)
    drawn = simulate(regression(), 100, seed_of(np.random.SeedSequence(seed_of(3), spawn_key=(0,))))
    mean = np.array([one.observed["y"] for one in drawn]) @ x @ cov
    exact = norm.cdf((np.array([one.values["b"] for one in drawn]) - mean) / np.sqrt(np.diag(cov)))
    np.testing.assert_allclose(calibration.pit.b, exact, atol=4 * 0.5 / np.sqrt(999))


def test_fits_that_are_too_narrow_are_found(monkeypatch):
    """A fit to data that are there twice, as it were: its standard deviations are a half of what they should be."""
    with pm.Model() as model:
        mu = pm.Normal("mu", 0.0, 3.0)
        pm.Normal("y", mu, 1.0, observed=np.zeros(4))
    honest = module.simulate

    def noisier(*args):
        rng = np.random.default_rng(5)
        drawn = honest(*args)
        return [
            type(one)(one.values, one.unconstrained, {"y": one.values["mu"] + 2.0 * rng.standard_normal(4)})
            for one in drawn
        ]

    monkeypatch.setattr(module, "simulate", noisier)
    found = pymc_ngvi.calibrate(model, 100, **QUIET)
    assert not found.is_calibrated
    assert "mu is too narrow (P = " in found.sentence
    assert found.summary().loc["mu", "sd"] > 1.15
    assert found.summary().loc["mu", "coverage_90"] < 0.8


def test_counts_that_equal_the_truth_are_ranked_at_random():
    """A Deterministic with few values: ranks are uniform all the same."""
    with pm.Model() as model:
        mu = pm.Normal("mu", 0.0, 1.0)
        pm.Deterministic("sign", pt.sign(mu))
        pm.Normal("y", mu, 1.0, observed=np.zeros(2))
    pit = pymc_ngvi.calibrate(model, 36, **QUIET).pit.sign.values
    assert len(np.unique(pit)) > 28
    assert abs(pit.mean() - 0.5) < 4 * 0.289 / 6


def test_arviz_draws_it(calibration):
    tree = calibration.datatree
    assert dict(tree["prior_sbc"].sizes) == {"chain": 1, "draw": 100, "of": 2}
    drawn = calibration.plot(["b", "log_density"])
    assert "b" in drawn.viz["plot"]
    assert "end" not in drawn.viz["plot"]


def test_unreliable_fits_are_left_out_where_that_is_asked_for(calibration):
    fits = copy.copy(calibration.fits)
    fits.dataset = fits.dataset.assign(verdict=("fit", ["not reliable"] * 40 + ["reliable"] * 60))
    found = pymc_ngvi.Calibration(calibration.pit, fits)
    assert (found.summary(only_reliable=True).n == 60).all()
    assert "Fits that are not reliable: 40" in found.sentence


# --- bad input ---


def with_potential():
    model = poisson()
    with model:
        pm.Potential("more", -model["rate"])
    return model


def flat():
    with pm.Model() as model:
        pm.Normal("y", pm.Flat("mu"), 1.0, observed=np.zeros(3))
    return model


def unobserved():
    with pm.Model() as model:
        pm.Normal("mu")
    return model


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (with_potential, {}, r"pm.Potential \('more'\).* can't be simulated from"),
        (flat, {}, "The prior of the model can't be drawn from"),
        (unobserved, {}, "no observed variables"),
        (poisson, {"n": 5}, "at least 20; got 5"),
        (poisson, {"var_names": ["lambda"]}, "'lambda', which the model has not"),
    ],
)
def test_bad_input(model, options, message):
    with pytest.raises(ValueError, match=message):
        pymc_ngvi.calibrate(model(), **options, **QUIET)


def test_what_is_no_model_is_refused():
    with pytest.raises(TypeError, match=r"calibrate takes a model first: calibrate\(model\). Got 3"):
        pymc_ngvi.calibrate(3)
