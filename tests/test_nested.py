"""Nested posteriors from end to end: against a grid, as results, in files."""

import cloudpickle
import numpy as np
import pymc as pm
import pytest

from latent_models import counts, level, process, regression
from scipy.special import logsumexp

import pymc_ngvi

from pymc_ngvi import fit_ngvi
from pymc_ngvi.marginal import exact
from pymc_ngvi.model import LogDensity
from pymc_ngvi.model.hyperparameters import latent_rows
from pymc_ngvi.nested import exploring
from pymc_ngvi.nested.log_marginal import LatentMarginal
from pymc_ngvi.nested.posterior import nested_posterior
from pymc_ngvi.nested.verdict import NestedChecks

FITTED = {}


def fitted(make):
    if make not in FITTED:
        # Few steps of a walk have an exact posterior, too.
        asked = {} if make is process else {"posterior": "nested"}
        FITTED[make] = fit_ngvi(model=make(), random_seed=1, progressbar=False, **asked)
    return FITTED[make]


def on_grid(make, *axes):
    """Return means and standard deviations of hyperparameters, and log p(y), by summing over a grid."""
    marginal = LatentMarginal(latent_rows(LogDensity(make())), 1)
    points = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, len(axes))
    values = np.empty(len(points))
    for i, point in enumerate(points):
        marginal.known = marginal.known[-len(axes[-1]) - 2 :]
        values[i] = marginal(point)
    weights = np.exp(values - values.max())
    weights /= weights.sum()
    mean = weights @ points
    cell = np.prod([axis[1] - axis[0] for axis in axes])
    return mean, np.sqrt(weights @ (points - mean) ** 2), float(logsumexp(values) + np.log(cell))


def test_hyperparameters_are_those_of_a_grid():
    """A model whose log m is exact: steps of a walk may vanish, which leaves a tail."""
    mean, sd, evidence = on_grid(level, np.linspace(-9.0, 1.2, 45), np.linspace(-1.0, 0.8, 19))
    for seed in (1, 2):
        state = nested_posterior(LogDensity(level()), None, seed)
        error = 5.0 / np.sqrt(state.effective_size)
        np.testing.assert_allclose((state.mean()[:2] - mean) / sd, 0.0, atol=error + 0.02)
        np.testing.assert_allclose(state.sd()[:2] / sd, 1.0, atol=error + 0.02)
        value, se = state.log_normaliser()
        assert abs(value - evidence) < 4.0 * se + 0.02
        assert state.checks.is_reliable
        assert state.checks.n_fits < 200


@pytest.mark.parametrize("make", [level, process, counts])
def test_what_users_get(make):
    approx = fitted(make)
    assert approx.is_nested
    assert not approx.is_exact
    assert approx.record.posterior.startswith("Nested: 2 hyperparameters sampled")
    assert "approximate" in approx.record.posterior
    assert approx.checks.error < 0.1
    assert "Reliable" in str(approx.summary())
    assert np.isfinite(approx.log_marginal_likelihood.value)
    draws = approx.sample(1_000, random_seed=1).posterior
    assert draws.sizes["draw"] == 1_000
    sd = np.sqrt(np.diag(approx.cov_of([v.name for v in approx.layout.variables[:2]])))
    np.testing.assert_allclose(sd, approx.sd_flat[:2], rtol=1e-6)


def test_a_kernel_that_is_unknown_needs_no_fit_of_all_coordinates():
    approx = fitted(process)
    assert "Gaussian fits of the latent variables" in approx.record.closing_line()
    assert approx.gaussian.record.family_reason == "it has the moments of the nested posterior"
    np.testing.assert_allclose(approx.gaussian.mean_flat, approx.mean_flat)
    np.testing.assert_allclose(approx.gaussian.sd_flat, approx.sd_flat, rtol=1e-6)
    with pytest.raises(RuntimeError, match="no fit to go on with"):
        approx.refine(10)


def test_callbacks_are_of_a_fit_of_all_coordinates():
    seen = []
    with pytest.warns(pymc_ngvi.ConvergenceWarning, match="iteration limit"):
        fit_ngvi(3, model=process(), random_seed=1, progressbar=False, callbacks=[lambda *args: seen.append(args[2])])
    assert seen == [1, 2, 3]


def test_a_fit_that_goes_on_is_followed_by_another():
    approx = fit_ngvi(model=counts(), posterior="nested", random_seed=1, progressbar=False, tol=0.5)
    before = approx.mean_flat
    approx.refine(tol=0.01)
    assert approx.is_nested
    np.testing.assert_allclose(approx.mean_flat, before, atol=0.1)


def test_asked_for():
    assert not fit_ngvi(model=counts(), posterior="gaussian", random_seed=1, progressbar=False).is_nested
    with pytest.raises(
        ValueError, match="This model has no nested posterior: no latent Gaussian model: it has no scale"
    ):
        fit_ngvi(model=regression(), posterior="nested", progressbar=False)
    with pytest.raises(ValueError, match="posterior='nested' begins from a Gaussian"):
        fit_ngvi(model=counts(), posterior="nested", family="mixture", progressbar=False)


@pytest.mark.parametrize("make", [level, process])
def test_files_and_pickles_give_the_same_bits(make, tmp_path):
    approx = fitted(make)
    model = approx.model
    approx.save(tmp_path / "approx.nc")
    again = pymc_ngvi.load(tmp_path / "approx.nc", model)
    for other in (again, cloudpickle.loads(cloudpickle.dumps(approx._state))):
        state = other._state if hasattr(other, "_state") else other
        np.testing.assert_array_equal(state.mean(), approx._state.mean())
        np.testing.assert_array_equal(state.sd(), approx._state.sd())
        draws = [s.draw(100, np.random.default_rng(1)) for s in (state, approx._state)]
        np.testing.assert_array_equal(*draws)
    assert again.is_nested
    assert again.checks == approx.checks
    # More draws of the hyperparameters than the pool is worth: without the model.
    n = int(approx._state.effective_size) + 2_000
    np.testing.assert_array_equal(again._state.for_draws(n).g, approx._state.for_draws(n).g)


def test_the_same_seed_gives_the_same_bits():
    density = LogDensity(counts())
    first, second = (nested_posterior(density, None, 3) for _ in range(2))
    np.testing.assert_array_equal(first.pool.g, second.pool.g)
    np.testing.assert_array_equal(first.mean(), second.mean())


def test_predictions_that_are_off_are_found():
    """Checked where they were not made from; told of these, they are mended."""
    density = LogDensity(counts())
    given = latent_rows(density)
    marginal = LatentMarginal(given, 1)
    at = density.initial_point()[given.outside]
    explored = exploring.explore(marginal, at, np.full(2, 0.5), 1)
    emulated = exploring.Emulated(marginal, 10)
    for point in marginal.known[:12]:
        emulated.tell(point.g, point.value + 0.3 * float(np.sin(9.0 * point.g.sum())))
    predicted = explored.predicted
    emulated.standardise(predicted.whitening, predicted.bend)
    pool = explored.sampled.pool
    wrong = type(pool)(pool.g, emulated.predict(pool.g)[0], pool.log_density, pool.scrambling, pool.lost)
    assert exploring._supported(marginal, emulated, wrong, 0.5).difference > 0.05


def test_checks_say_what_is_wrong():
    good = NestedChecks(0.1, 4_000.0, 5_000, 2, 100, 60, 0.01, 0.02, 0.3)
    assert good.is_reliable
    assert good.error == pytest.approx(np.hypot(0.01, 0.02))
    bad = NestedChecks(0.9, 400.0, 5_000, 1, 100, 60, 0.2, 0.02, 0.3)
    assert len(bad.failures) == 3
    assert "known to 0.20 nats only" in bad.sentence
    assert "1 hyperparameter sampled" in bad.sentence


def _no_forest(density):
    raise exact.Unavailable("there are no blocks")


def test_what_can_t_be_fitted_falls_back(monkeypatch):
    """The Gaussian is kept, with the reason."""
    monkeypatch.setattr("pymc_ngvi.nested.exploring.find_mode", lambda *args: None)
    monkeypatch.setattr("pymc_ngvi.results.exact_step.forest_of", _no_forest)
    approx = fit_ngvi(model=counts(), random_seed=1, progressbar=False)
    assert not approx.is_nested
    assert approx.record.posterior == "Gaussian: there are no blocks."
    with pytest.raises(pymc_ngvi.NotExactError, match="No nested posterior: the latent variables can't be fitted"):
        fit_ngvi(model=counts(), posterior="nested", random_seed=1, progressbar=False)


def test_more_data_of_one_model():
    """The next fit of a model reads its data as they are then."""
    with pm.Model() as model:
        y = pm.Data("y_data", np.random.default_rng(1).normal(size=20))
        step, noise = pm.HalfNormal("step", 1.0), pm.HalfNormal("noise", 2.0)
        x = pm.GaussianRandomWalk("x", sigma=step, init_dist=pm.Normal.dist(0.0, 3.0), shape=20)
        pm.Normal("y", x, noise, observed=y)
    first = fit_ngvi(model=model, posterior="nested", random_seed=1, progressbar=False)
    with model:
        pm.set_data({"y_data": 5.0 + np.random.default_rng(2).normal(size=20)})
    second = fit_ngvi(model=model, posterior="nested", random_seed=1, progressbar=False)
    assert first.is_nested
    assert second.is_nested
    assert second.mean_flat[5] > 4.0 > first.mean_flat[5]
