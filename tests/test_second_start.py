"""Fits that leave parameters at their prior begin once more, from the best draws of the prior."""

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

from pymc_ngvi import fit_ngvi
from pymc_ngvi.model import LogDensity
from pymc_ngvi.second_start import SecondStart, at_prior, best_mode
from pymc_ngvi.status import ConvergenceWarning, Status

QUIET = {"progressbar": False, "posterior": "gaussian"}


def sine():
    """The ELBO has a maximum at an amplitude of about 0, whatever the frequency, 40 nats below the right one."""
    rng = np.random.default_rng(16)
    t = np.sort(rng.uniform(0.0, 10.0, 60))
    y = 3.0 * np.sin(2.9 * t + 0.7) + rng.standard_normal(60)
    with pm.Model() as model:
        amplitude, frequency = pm.HalfNormal("amplitude", 5.0), pm.HalfNormal("frequency", 5.0)
        phase = pm.Normal("phase", 0.0, 2.0)
        mean = amplitude * pm.math.sin(frequency * t + phase)
        pm.Normal("y", mean, pm.HalfNormal("sigma", 3.0), observed=y)
    return model


def two_states():
    """A hidden Markov model of two states, four steps with ten observations each; both begin far below the data."""
    rng = np.random.default_rng(7)
    state = np.array([0, 0, 1, 1])
    y = np.array([20.0, 26.0])[state][:, None] + rng.standard_normal((4, 10))
    ordered = pm.distributions.transforms.ordered
    with pm.Model() as model:
        stay = pm.Beta("stay", 5.0, 2.0, shape=2)
        mu = pm.Normal("mu", 0.0, 20.0, shape=2, transform=ordered, initval=np.array([-1.0, 1.0]))
        emit = pm.logp(pm.Normal.dist(mu, pm.HalfNormal("sigma", 2.0)), y[:, :, None]).sum(axis=1)
        stays, leaves = pt.log(stay), pt.log1p(-stay)
        one, two = emit[0, 0] - np.log(2.0), emit[0, 1] - np.log(2.0)
        for t in range(1, len(y)):
            one, two = (
                emit[t, 0] + pt.logaddexp(one + stays[0], two + leaves[1]),
                emit[t, 1] + pt.logaddexp(one + leaves[0], two + stays[1]),
            )
        pm.Potential("y", pt.logaddexp(one, two))
    return model


def regression():
    rng = np.random.default_rng(3)
    x = rng.standard_normal(60)
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, 5.0, shape=2)
        pm.Normal("y", beta[0] + beta[1] * x, pm.HalfNormal("sigma", 2.0), observed=1.0 + x + rng.standard_normal(60))
    return model


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_an_amplitude_of_nothing_is_not_the_end(seed, caplog):
    with caplog.at_level("INFO", "pymc.ngvi"):
        approx = fit_ngvi(model=sine(), random_seed=seed, **QUIET)
    assert approx.converged
    assert approx.elbo.value == pytest.approx(-103.13, abs=0.3)
    assert np.exp(approx.mean_flat[1]) == pytest.approx(2.9, abs=0.1)
    assert "near the prior" in approx.record.restarted
    assert approx.record.restarted in caplog.text
    assert len(approx.hist) == approx.record.n_iterations


@pytest.mark.slow
def test_states_that_begin_far_away_find_their_data():
    approx = fit_ngvi(model=two_states(), random_seed=1, **QUIET)
    assert approx.converged
    mu = approx.sample(500, random_seed=1).posterior["mu"].mean(("chain", "draw"))
    np.testing.assert_allclose(mu, [20.0, 26.0], atol=0.8)


def test_the_same_seed_begins_again_at_the_same_place():
    one, two = (fit_ngvi(model=sine(), random_seed=4, **QUIET) for _ in range(2))
    assert one.record.restarted
    np.testing.assert_array_equal(one.mean_flat, two.mean_flat)
    assert one.n_gradients == two.n_gradients


def test_what_was_looked_at_counts(monkeypatch):
    """The record has the evaluations of both fits and of what lies between them."""
    both = fit_ngvi(model=sine(), random_seed=4, **QUIET)
    monkeypatch.setattr(SecondStart, "after", lambda *_: None)
    first = fit_ngvi(model=sine(), random_seed=4, **QUIET)
    assert not first.record.restarted
    assert first.elbo.value < both.elbo.value - 30.0
    assert both.n_gradients > first.n_gradients + 1_024


def test_a_fit_that_has_used_the_data_stays_as_it_is(monkeypatch):
    """Bit by bit, and without evaluations."""
    one = fit_ngvi(model=regression(), random_seed=2, **QUIET)
    monkeypatch.setattr(SecondStart, "after", lambda *_: None)
    two = fit_ngvi(model=regression(), random_seed=2, **QUIET)
    np.testing.assert_array_equal(one.mean_flat, two.mean_flat)
    assert one.n_gradients == two.n_gradients


def with_unused():
    with regression() as model:
        pm.Normal("unused")
    return model


@pytest.mark.parametrize("promise", [None, np.inf])
def test_a_parameter_at_its_prior_does_not_move_a_good_fit(promise, monkeypatch):
    """There is nothing better elsewhere, not even where it is promised: the same bits, for some more evaluations."""
    if promise is not None:
        elsewhere = np.array([3.0, -2.0, 1.0, 2.0])
        monkeypatch.setattr("pymc_ngvi.second_start.best_mode", lambda *_: (elsewhere, promise))
    one = fit_ngvi(model=with_unused(), random_seed=2, **QUIET)
    monkeypatch.setattr(SecondStart, "after", lambda *_: None)
    two = fit_ngvi(model=with_unused(), random_seed=2, **QUIET)
    np.testing.assert_array_equal(one.mean_flat, two.mean_flat)
    assert one.elbo == two.elbo
    assert not one.record.restarted
    assert one.n_gradients > two.n_gradients


def test_a_density_that_costs_nothing_to_evaluate_ends_as_ever():
    """log p of a flat prior alone is a constant."""
    with pm.Model() as model:
        pm.Flat("x")
    with pytest.warns(ConvergenceWarning, match="may be improper"):
        approx = fit_ngvi(model=model, random_seed=1, **QUIET)
    assert approx.status is Status.UNBOUNDED


def test_a_start_of_the_user_is_the_only_one():
    approx = fit_ngvi(model=sine(), random_seed=2, start={"phase": 0.0}, **QUIET)
    assert not approx.record.restarted
    assert approx.elbo.value < -140.0


def test_parameters_at_their_prior_are_told_from_others(rng):
    class Q:
        def mean(self):
            return np.array([0.2, 0.2, 40.0, 0.0])

        def sd(self):
            return np.array([1.9, 0.3, 2.0, 40.0])

    prior = rng.normal(size=(1_000, 4)) * 2.0
    assert at_prior(Q(), prior).tolist() == [0]
    assert at_prior(Q(), prior[:10]).tolist() == []


@pytest.mark.parametrize("seed", [1, 2])
def test_the_best_mode_is_that_with_most_mass(seed):
    """Of a Gaussian prior and a Gaussian likelihood the mass is known."""
    with pm.Model() as model:
        x = pm.Normal("x", 0.0, 10.0, shape=2)
        pm.Normal("y", x, np.array([0.01, 2.0]), observed=np.array([7.0, -3.0]))
    density = LogDensity(model)
    point, log_mass = best_mode(density, density.prior_draws(200, seed))
    sds = np.array([0.01, 2.0])
    np.testing.assert_allclose(point, np.array([7.0, -3.0]) / (1.0 + sds**2 / 100.0), rtol=1e-6)
    total = 100.0 + sds**2
    expected = -0.5 * np.sum(np.array([49.0, 9.0]) / total + np.log(2.0 * np.pi * total))
    assert log_mass == pytest.approx(expected, abs=1e-6)
