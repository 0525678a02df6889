"""Fits that leave parameters at their prior begin once more, from the best draws of the prior."""

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

from pymc_ngvi import NGVI, fit_ngvi
from pymc_ngvi.core.status import ConvergenceWarning, Status
from pymc_ngvi.fitting.second_start import SecondStart, at_prior, best_mode
from pymc_ngvi.model import LogDensity

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


@pytest.fixture(scope="module")
def sines():
    return NGVI(model=sine(), posterior="gaussian", estimator="price")  # without draws, the first fit finds the sine


@pytest.fixture(scope="module")
def regressions():
    return NGVI(model=regression(), posterior="gaussian")


@pytest.fixture(scope="module")
def with_unused():
    with regression() as model:
        pm.Normal("unused")
    return NGVI(model=model, posterior="gaussian")


def fitted(solver, seed):
    solver.configure(random_seed=seed)
    return solver.fit(progressbar=False)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_an_amplitude_of_nothing_is_not_the_end(seed, sines, caplog):
    with caplog.at_level("INFO", "pymc.ngvi"):
        approx = fitted(sines, seed)
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


def test_what_was_looked_at_counts(sines, monkeypatch):
    """The record has the evaluations of both fits and of what lies between them."""
    one = fitted(sines, 4)
    assert one.record.restarted
    monkeypatch.setattr(SecondStart, "after", lambda *_: None)
    first = fitted(sines, 4)
    assert not first.record.restarted
    assert first.elbo.value < one.elbo.value - 30.0
    assert one.n_gradients > first.n_gradients + 1_024


@pytest.mark.slow
def test_the_same_seed_begins_again_at_the_same_place(sines):
    one, two = fitted(sines, 4), fitted(sines, 4)
    assert one.record.restarted
    np.testing.assert_array_equal(one.mean_flat, two.mean_flat)
    assert one.n_gradients == two.n_gradients


def test_a_fit_that_has_used_the_data_stays_as_it_is(regressions, monkeypatch):
    """Bit by bit, and without evaluations."""
    one = fitted(regressions, 2)
    monkeypatch.setattr(SecondStart, "after", lambda *_: None)
    two = fitted(regressions, 2)
    np.testing.assert_array_equal(one.mean_flat, two.mean_flat)
    assert one.n_gradients == two.n_gradients


@pytest.mark.parametrize("promise", [None, np.inf])
def test_a_parameter_at_its_prior_does_not_move_a_good_fit(promise, with_unused, monkeypatch):
    """There is nothing better elsewhere, not even where it is promised: the same bits, for some more evaluations."""
    if promise is not None:
        elsewhere = np.array([3.0, -2.0, 1.0, 2.0])
        monkeypatch.setattr("pymc_ngvi.fitting.second_start.best_mode", lambda *_: (elsewhere, promise, np.ones(4)))
    one = fitted(with_unused, 2)
    monkeypatch.setattr(SecondStart, "after", lambda *_: None)
    two = fitted(with_unused, 2)
    np.testing.assert_array_equal(one.mean_flat, two.mean_flat)
    assert one.elbo == two.elbo
    assert not one.record.restarted
    assert one.n_gradients > two.n_gradients


def test_a_density_that_costs_nothing_to_evaluate_ends_as_ever():
    """log p of a flat prior alone is a constant."""
    with pm.Model() as model:
        pm.Flat("x")
    with pytest.warns(ConvergenceWarning, match=r"posterior is improper.*`x`"):
        approx = fit_ngvi(model=model, random_seed=1, **QUIET)
    assert approx.status is Status.UNBOUNDED


@pytest.mark.slow
def test_a_start_of_the_user_is_the_only_one():
    approx = fit_ngvi(model=sine(), estimator="price", random_seed=2, start={"phase": 0.0}, **QUIET)
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
    point, log_mass, sd = best_mode(density, density.info.prior_draws(200, seed))
    sds = np.array([0.01, 2.0])
    np.testing.assert_allclose(point, np.array([7.0, -3.0]) / (1.0 + sds**2 / 100.0), rtol=1e-6)
    total = 100.0 + sds**2
    expected = -0.5 * np.sum(np.array([49.0, 9.0]) / total + np.log(2.0 * np.pi * total))
    assert log_mass == pytest.approx(expected, abs=1e-6)
    np.testing.assert_allclose(sd, 1.0 / np.sqrt(0.01 + 1.0 / sds**2), rtol=1e-6)


class Walled:
    """Two Gaussians on a half line; most draws of N(0, 1) climb to the one about 0, which has little mass."""

    gradient_seconds = 1e-6

    def logp_grad(self, theta):
        x = theta[:, 0]
        heights = np.stack([-0.5 * (x / 0.5) ** 2, 30.0 - 0.5 * ((x - 2.0) / 0.1) ** 2])
        total = np.logaddexp(*heights)
        slopes = np.stack([-x / 0.25, -(x - 2.0) / 0.01])
        grad = np.sum(np.exp(heights - total) * slopes, axis=0)
        outside = x > 2.05
        return np.where(outside, -np.inf, total), np.where(outside, np.nan, grad)[:, None]


def test_a_mode_that_few_draws_lead_to_is_found(rng):
    point, log_mass, sd = best_mode(Walled(), rng.standard_normal((1_024, 1)))
    assert point == pytest.approx(2.0, abs=1e-6)
    assert log_mass == pytest.approx(30.0 + np.log(0.1 * np.sqrt(2.0 * np.pi)), abs=1e-6)
    assert sd == pytest.approx(0.1, rel=1e-6)


def test_a_density_that_is_nowhere_finite_has_no_mode():
    _, log_mass, _ = best_mode(Walled(), np.linspace(3.0, 4.0, 100)[:, None])
    assert log_mass == -np.inf


@pytest.mark.slow
def test_the_search_does_not_hang_on_its_seed():
    """About one draw in six leads to the states of the data, of whatever height of log p."""
    density = LogDensity(two_states())
    masses = [best_mode(density, density.info.prior_draws(1_024, seed))[1] for seed in range(12)]
    np.testing.assert_allclose(masses, -64.15, atol=0.05)


@pytest.mark.parametrize(("sd", "asked"), [(0.3, []), (0.5, [192]), (2.0, [192, 1_024])])
def test_few_draws_of_the_prior_are_made_where_data_were_used(sd, asked, rng):
    class Density(Walled):
        has_hessian = True

        @property
        def info(self):
            return self

        def prior_draws(self, n, seed):
            made.append(n)
            return 2.0 * rng.standard_normal((n, 1))

    class Q:
        n_dim = 1

        def mean(self):
            return np.zeros(1)

        def sd(self):
            return np.array([sd])

    made = []
    assert SecondStart(Density(), [], 1).after(None, None, Q(), np.inf) is None
    assert made == asked
