"""Mixtures as fitted: modes found, weights, what is kept and what is dropped, how a fit ends."""

import warnings

import mixture_targets
import numpy as np
import pymc as pm
import pytest

from operations import PlainSquare

import pymc_ngvi

from pymc_ngvi import ConvergenceWarning, LogDensity, MissingDerivativeError, Status
from pymc_ngvi.core.draws import sobol_draws
from pymc_ngvi.families import FullState, MixtureState
from pymc_ngvi.fitting.options import ALLOWED
from pymc_ngvi.methods import natural
from pymc_ngvi.methods.estimators import price
from pymc_ngvi.methods.mixtures import (
    evaluate_mixture,
    mixture_moments,
    moved_within,
)

pytestmark = pytest.mark.usefixtures("_compiled_once")

SEEDS = (1, 2)
each_seed = pytest.mark.parametrize("seed", SEEDS)


def fit(model, seed, **options):
    return pymc_ngvi.fit_ngvi(model=model, family="mixture", random_seed=seed, progressbar=False, **options)


def density_of(name):
    return LogDensity(mixture_targets.target(name).build())


def gaussian(mean, sd):
    return FullState(np.atleast_1d(np.asarray(mean, dtype=float)), np.diag(np.atleast_1d(np.asarray(sd, dtype=float))))


def of_gaussian(approx, n=20_000):
    """Return the ELBO of the single Gaussian behind a mixture, and its standard error."""
    q = approx.record.gaussian
    theta = q.draws(np.random.default_rng(3).standard_normal((n, q.n_dim)))
    h = approx.log_p(theta) - q.log_density(theta)
    return h.mean(), h.std() / np.sqrt(n)


# --- what is found ----------------------------------------------------------------------------------------------------


@each_seed
def test_two_modes_are_found_with_their_weights(seed):
    target = mixture_targets.target("two modes")
    approx = fit(target.build(), seed, **target.options)
    assert approx.converged
    assert approx.q.n_components == 2
    order = np.argsort(approx.q.weights)
    np.testing.assert_allclose(approx.q.weights[order], np.sort(target.modes.weights), atol=1e-3)
    centres = target.modes.centres[np.argsort(target.modes.weights)]
    np.testing.assert_allclose(approx.q.means[order], centres, atol=1e-2)
    assert abs(approx.elbo.value - target.log_z) < 1e-3  # q can be the posterior: log p - log q has no noise then


def test_ten_components_in_twenty_dimensions():
    target = mixture_targets.target("ten components")
    approx = fit(target.build(), 1, **target.options)
    assert approx.q.n_components == 10
    distances = target.modes.distances(approx.q.means)
    assert np.all(distances.min(axis=0) < 0.1)
    assert abs(approx.elbo.value - target.log_z) < 0.01


@pytest.mark.parametrize(("name", "seed"), [("banana", 1), ("skewed logistic", 2)])
def test_a_mixture_gains_on_skewed_posteriors(name, seed):
    target = mixture_targets.target(name)
    approx = fit(target.build(), seed, **target.options)
    elbo, se = of_gaussian(approx)
    missing = target.log_z - elbo
    assert missing > 0.05 + 5 * se  # or the target is none
    assert target.log_z - approx.elbo.value < 0.6 * missing
    assert approx.elbo.value < target.log_z + 5 * approx.elbo.se


@each_seed
def test_a_gaussian_posterior_keeps_one_component(seed):
    with pm.Model() as model:
        x = pm.Normal("x", 1.0, 2.0, shape=3)
        pm.Normal("y", x.sum(), 1.0, observed=0.0)
    approx = fit(model, seed)
    assert approx.converged
    assert approx.q.n_components == 1
    alone = pymc_ngvi.fit_ngvi(model=model, family="full", random_seed=seed, progressbar=False)
    np.testing.assert_allclose(approx.mean_flat, alone.mean_flat, atol=1e-6)
    np.testing.assert_allclose(approx.sd_flat, alone.sd_flat, rtol=1e-6)


def test_a_number_of_components_is_kept_to():
    target = mixture_targets.target("banana")
    found = {k: fit(target.build(), 1, n_components=k) for k in (1, 2, 4)}
    assert [approx.q.n_components for approx in found.values()] == [1, 2, 4]
    elbos = [approx.elbo.value for approx in found.values()]
    assert elbos[0] < elbos[1] < elbos[2]


def test_diagonal_components():
    target = mixture_targets.target("two modes")
    approx = fit(target.build(), 1, components="diagonal", n_components=2, **target.options)
    assert type(approx.q.components[0]).__name__ == "DiagonalState"
    np.testing.assert_allclose(np.sort(approx.q.weights), np.sort(target.modes.weights), atol=0.06)


@pytest.mark.parametrize(
    ("update", "seed"), [(row[1], 1 + i % 2) for i, row in enumerate(row for row in ALLOWED if row[0] == "mixture")]
)
def test_every_update_fits_a_mixture(update, seed):
    target = mixture_targets.target("two modes")
    approx = fit(target.build(), seed, update=update, **target.options)
    assert approx.converged
    assert abs(approx.elbo.value - target.log_z) < 0.02
    np.testing.assert_allclose(np.sort(approx.q.weights), np.sort(target.modes.weights), atol=0.01)


@pytest.mark.filterwarnings("ignore::pymc_ngvi.core.status.ConvergenceWarning")  # few iterations: all may happen
def test_the_same_seed_gives_the_same_bits_and_refining_goes_on():
    target = mixture_targets.target("banana")
    first, second = (fit(target.build(), 5, n_components=2) for _ in range(2))
    assert np.array_equal(first.q.means, second.q.means)
    before = first.elbo.value
    first.refine(5)
    assert first.elbo.value > before - 3 * first.elbo.se - 0.01


def test_modes_far_from_the_start_are_found_from_the_prior():
    with pm.Model() as model:
        scale = pm.LogNormal("scale", 0.0, 0.1)
        x = pm.Normal("x", 0.0, 40.0)
        pm.Potential("modes", pm.math.logaddexp(-0.5 * x**2, -0.5 * (x - 60.0) ** 2 + np.log(3.0)))
        pm.Normal("y", 0.0, scale, observed=0.0)
    approx = fit(model, 1)
    assert approx.q.n_components == 2
    position = approx.layout.variables[1].where.start
    assert np.allclose(np.sort(approx.q.means[:, position]), [0.0, 60.0], atol=0.2)


def test_a_prior_that_can_not_be_drawn_from_is_left_out():
    with pm.Model() as model:
        pm.Flat("x")
        pm.Normal("y", 0.0, 1.0)
    assert LogDensity(model).prior_draws(5, 1).shape == (0, 2)
    with pm.Model() as model:
        pm.HalfNormal("s", 2.0)
    draws = LogDensity(model).prior_draws(4_000, 1)
    assert draws.shape == (4_000, 1)
    assert abs(np.exp(2.0 * draws).mean() - 4.0) < 5 * 4.0 * np.sqrt(2.0 / 4_000)


# --- what Hessians, or draws, don't see ---------------------------------------------------------------------------


@each_seed
def test_kinks_do_no_harm_and_are_told(seed):
    """Where log p has no curvature at all, steps of components would go on for ever."""
    with pm.Model() as model:
        pm.Laplace("x", 0.0, 1.0, shape=2)
    with pytest.warns(ConvergenceWarning, match="not smooth"):
        approx = fit(model, seed)
    elbo, se = of_gaussian(approx)
    assert approx.elbo.value > elbo - 3 * np.hypot(se, approx.elbo.se)
    assert approx.status is Status.NOT_SMOOTH


@each_seed
def test_a_wall_ends_with_a_reason(seed):
    with pm.Model() as model:
        x = pm.Normal("x", 0.0, 3.0, shape=2)
        pm.Potential("wall", pm.math.switch((abs(x) < 1.0).all(), 0.0, -np.inf))
    with pytest.warns(ConvergenceWarning):
        approx = fit(model, seed)
    assert approx.status in (Status.OUTSIDE_SUPPORT, Status.NOT_SMOOTH)


def test_equal_halves_have_the_error_of_the_whole():
    """All components share their base draws: taken for independent, eight of them would have a third of the error."""
    density = density_of("banana")
    one = gaussian([0.0, 3.0], [1.5, 2.5])
    base = sobol_draws(128, 2, np.random.default_rng(1))
    errors = [
        evaluate_mixture(density, MixtureState.of([one] * k, np.zeros(k)), base, price).elbo_se() for k in (1, 2, 8)
    ]
    np.testing.assert_allclose(errors, errors[0], rtol=1e-9)


@each_seed
def test_one_component_can_be_refined(seed):
    target = mixture_targets.target("skewed logistic")
    approx = fit(target.build(), seed, n_components=1)
    n = approx.n_iterations
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        approx.refine(30, tol=1e-4)
    assert approx.n_iterations > n


@pytest.mark.parametrize(
    "options", [{"base_draws": "antithetic", "max_draws": 50}, {"base_draws": "plain"}, {"n_draws": 4, "max_draws": 8}]
)
def test_kinds_and_numbers_of_draws(options):
    target = mixture_targets.target("two modes")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        approx = fit(target.build(), 1, **options, **target.options)
    assert approx.q.n_components == 2
    assert abs(approx.elbo.value - target.log_z) < 0.05


def test_more_components_than_there_is_anything_for():
    with pm.Model() as model:
        pm.Normal("x", 0.0, 1.0, shape=2)
    approx = fit(model, 1, n_components=6)
    assert 1 <= approx.q.n_components <= 6
    assert abs(approx.elbo.value) < 0.01


def test_a_model_without_second_derivatives_is_refused_with_the_reason():
    with pm.Model() as model:
        x = pm.Normal("x", 0.0, 1.0, shape=3)
        pm.Potential("square", -PlainSquare()(x).sum())
    with pytest.raises(MissingDerivativeError, match="PlainSquare"):
        fit(model, 1)


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -1, 2.5, "many", True])
def test_numbers_of_components_that_make_no_sense(value):
    with pytest.raises(ValueError, match=r"n_components should be 'auto' or a whole number of at least 1; got "):
        fit(mixture_targets.target("banana").build(), 1, n_components=value)


def test_components_that_do_not_exist():
    model = mixture_targets.target("banana").build()
    with pytest.raises(ValueError, match=r"Unknown components 'dense'.*'full', 'diagonal', 'sparse'"):
        fit(model, 1, components="dense")
    with pytest.raises(ValueError, match="components are those of family='mixture'; the family is 'full'"):
        pymc_ngvi.fit_ngvi(model=model, family="full", components="full", progressbar=False)
    with pytest.raises(ValueError, match="leave one of them out"):
        fit(model, 1, reparam="rvb2")


def test_more_than_fits_in_memory():
    with pm.Model() as model:
        pm.Normal("x", shape=2_000)
    with pytest.raises(MemoryError, match="'mixture' approximation in 2,000 dimensions"):
        fit(model, 1, n_components=10_000, components="full")


def test_minibatches_are_refused():
    with pm.Model() as model:
        rows = pm.Minibatch(np.arange(100.0), batch_size=10)
        mu = pm.Normal("mu")
        pm.Normal("y", mu, 1.0, observed=rows, total_size=100)
    with pytest.raises(ValueError, match=r"family='mixture' compares ELBOs on the same data"):
        fit(model, 1)


# --- pieces -----------------------------------------------------------------------------------------------------------


def test_steps_stay_within_the_radius():
    density = density_of("banana")
    q = MixtureState.of([gaussian([0.0, 3.0], [2.0, 2.0]), gaussian([1.0, 0.0], [0.5, 0.5])])
    base = sobol_draws(256, 2, np.random.default_rng(1))
    evaluation = evaluate_mixture(density, q, base, price)
    moments = mixture_moments(density, q, evaluation, price)
    far, near = (moved_within(r, natural, q, evaluation.rewards, moments.parts, 1.0) for r in (1e6, 0.05))
    for new, old in zip(near.components, q.components, strict=True):
        assert new.divergence(old) <= 0.05
    assert np.exp(near.log_weights) @ (near.log_weights - q.log_weights) <= 0.05
    assert max(new.divergence(old) for new, old in zip(far.components, q.components, strict=True)) > 0.05


def test_the_gap_is_half_the_squared_natural_gradient():
    """For a Gaussian posterior and one component: that of the component; for wrong weights, half their variance."""
    density = density_of("two modes")
    m = mixture_targets.target("two modes").modes
    covs = [np.linalg.inv(w.T @ w) for w in m.whiteners]
    states = [FullState(c, np.linalg.cholesky(v)) for c, v in zip(m.centres, covs, strict=True)]
    q = MixtureState.of(states, np.log(m.weights) + np.array([0.1, -0.1]))
    evaluation = evaluate_mixture(density, q, sobol_draws(128, 2, np.random.default_rng(1)), price)
    gap = mixture_moments(density, q, evaluation, price).gap
    lacking = mixture_targets.target("two modes").log_z - evaluation.elbo
    assert np.isclose(gap, lacking, rtol=0.05)
