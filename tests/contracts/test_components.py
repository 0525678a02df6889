"""What the result of a fit shows of the components of a mixture: by name, in draws, in a picture, and their worth."""

import dataclasses
import warnings

import numpy as np
import pymc as pm
import pytest
import xarray as xr

from matplotlib import pyplot
from numpy.testing import assert_allclose, assert_array_equal
from scipy import integrate, stats

from pymc_ngvi import Elbo, FitRecord, LogDensity, NGVIApproximation, Status
from pymc_ngvi.families import FullState, MixtureState
from pymc_ngvi.graphs.layout import Layout, Variable
from pymc_ngvi.results.distributions import components_dataset

WEIGHTS = np.array([0.5, 0.3, 0.2])


def full_state(rng, mean, size=1.0):
    n_dim = len(mean)
    factor = np.tril(0.5 * rng.standard_normal((n_dim, n_dim)), -1) + np.diag(rng.uniform(0.5, 1.2, n_dim))
    return FullState(np.array(mean, dtype=float), size * factor)


def mixture_of(n_dim, weights=WEIGHTS, seed=3, apart=1.0):
    rng = np.random.default_rng(seed)
    return MixtureState.of([full_state(rng, apart * rng.standard_normal(n_dim)) for _ in weights], np.log(weights))


def gaussian_1d(mean, sd):
    return FullState(np.array([mean]), np.array([[sd]]))


def mixture_1d(means, sds, weights):
    return MixtureState.of([gaussian_1d(*of) for of in zip(means, sds, strict=True)], np.log(weights))


@pytest.fixture(scope="module")
def model():
    x = np.linspace(-1.0, 1.0, 8)
    with pm.Model(coords={"group": ["a", "b", "c"], "obs": range(8)}) as model:
        data = pm.Data("x", x, dims="obs")
        scale = pm.HalfNormal("scale", 2.0)
        slope = pm.Normal("slope", 0.0, 2.0, dims="group")
        level = pm.Normal("level", 0.0, 2.0, shape=2)
        pm.Normal("y", level.sum() + slope[0] * data, scale, observed=2.0 * x, dims="obs")
    return model


@pytest.fixture(scope="module")
def density(model):
    return LogDensity(model)


@pytest.fixture
def approx(density):
    return NGVIApproximation(density, mixture_of(6), random_seed=1)


@pytest.fixture
def gaussian_approx(density):
    return NGVIApproximation(density, mixture_of(6).components[0], random_seed=1)


POSTERIOR = {"w": [0.35, 0.65], "mu": [-2.0, 2.0], "sigma": [0.5, 0.7]}
EXACT = mixture_1d(POSTERIOR["mu"], POSTERIOR["sigma"], POSTERIOR["w"])


@pytest.fixture(scope="module")
def bimodal_density():
    with pm.Model() as model:
        pm.NormalMixture("x", **POSTERIOR)
    return LogDensity(model)


@pytest.fixture
def bimodal(bimodal_density):
    """A posterior of two modes, and q the posterior itself."""
    return NGVIApproximation(bimodal_density, EXACT, random_seed=1)


def record(**changes):
    made = FitRecord(
        status=Status.CONVERGED, elbo=Elbo(-12.5, 0.02), gap=0.03, n_iterations=7, n_gradients=320, n_hessians=80,
        n_dropped=0, compile_seconds=0.25, run_seconds=0.5, family="mixture", update="natural", estimator="price",
        step="trust_region", backend="quick",
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


# --- by name ----------------------------------------------------------------------------------------------------------


def test_components_by_name(approx):
    q, data = approx.q, approx.components
    assert set(data.data_vars) == {"scale_log__", "slope", "level", "weights"}
    assert data["slope"].dims == ("component", "moment", "group")
    assert data["level"].dims == ("component", "moment", "level_dim_0")
    assert list(data["group"].values) == ["a", "b", "c"]
    for v in approx.layout.variables:
        for c, component in enumerate(q.components):
            of = data[v.value_name].sel(component=c)
            assert_array_equal(of.sel(moment="mean"), component.location[v.where].reshape(v.shape))
            assert_allclose(of.sel(moment="sd"), np.sqrt(np.diag(component.cov()))[v.where].reshape(v.shape))
    assert_allclose(data["weights"], WEIGHTS)
    xr.testing.assert_equal(data["weights"], approx.weights)
    # The moments of q are those of its components.
    means, sds = data.sel(moment="mean"), data.sel(moment="sd")
    mean = means.weighted(means["weights"]).mean("component")
    square = (sds**2 + (means - mean) ** 2).weighted(data["weights"]).mean("component")
    for name in ("scale_log__", "slope", "level"):
        assert_allclose(mean[name], approx.mean_data[name])
        assert_allclose(np.sqrt(square[name]), approx.std_data[name])


def test_names_that_the_model_has_itself():
    with pm.Model(coords={"component": ["first", "second"]}) as model:
        pm.Normal("weights", dims="component")
        pm.HalfNormal("moment")
    approx = NGVIApproximation(LogDensity(model), mixture_of(3))
    data = approx.components
    assert data["weights"].dims == ("q_component", "moment", "component")
    assert list(data["component"].values) == ["first", "second"]
    assert_allclose(data["q_weights"], WEIGHTS)
    assert approx.weights.dims == data["q_weights"].dims
    tree = approx.sample(4, random_seed=1)
    xr.testing.assert_equal(tree["components"].to_dataset(), data)
    assert tree["posterior"]["weights"].dims == ("chain", "draw", "component")
    assert tree["sample_stats"]["component"].dims == ("chain", "draw")


def test_responsibilities(approx):
    theta = approx.draw_flat(50, 3)
    terms = [
        w * stats.multivariate_normal(c.mean(), c.cov()).pdf(theta)
        for w, c in zip(WEIGHTS, approx.q.components, strict=True)
    ]
    found = approx.responsibilities(theta)
    assert found.dims == ("draw", "component")
    assert_allclose(found, np.transpose(terms / np.sum(terms, axis=0)), rtol=1e-9)
    xr.testing.assert_equal(found, approx.responsibilities(50, random_seed=3))
    assert approx.responsibilities().sizes["draw"] == 1_000
    for wrong in (theta[:, :5], theta[0]):
        with pytest.raises(ValueError, match=r"of shape \(n_draws, 6\)"):
            approx.responsibilities(wrong)


def test_a_single_gaussian_has_no_components(gaussian_approx):
    for name in ("weights", "components"):
        assert not hasattr(gaussian_approx, name)
        with pytest.raises(AttributeError, match=rf"{name} is there for mixtures, and q is a FullState.*'mixture'"):
            getattr(gaussian_approx, name)
    for name in ("responsibilities", "worth"):
        with pytest.raises(ValueError, match=rf"{name}\(\) is there for mixtures, and q is a FullState.*'mixture'"):
            getattr(gaussian_approx, name)()


def test_labels_of_single_coordinates_name_them(approx):
    block = approx.cov_of(["level[1]", "slope"])
    where = {v.name: v.where.start for v in approx.layout.variables}
    index = [where["level"] + 1, *range(where["slope"], where["slope"] + 3)]
    assert_allclose(block, approx.q.cov()[np.ix_(index, index)])
    assert block.unconstrained.values[0] == "level[1]"
    with pytest.raises(ValueError, match=r"'level\[2\]'; there are"):
        approx.cov_of("level[2]")


# --- draws ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2])
def test_draws_of_a_component_have_its_distribution(approx, seed):
    """Components overlap: the nearest one, or any but the right law given the draw, would have other moments."""
    approx.set_state(mixture_of(6, apart=0.2))
    n = 20_000
    tree = approx.sample(n, chains=1, random_seed=seed, include_transformed=True, log_p=False)
    posterior, component = tree["posterior"].isel(chain=0), tree["sample_stats"]["component"].values[0]
    theta = np.column_stack([posterior[v.value_name].values.reshape(n, -1) for v in approx.layout.variables])
    for c, (weight, of) in enumerate(zip(WEIGHTS, approx.q.components, strict=True)):
        own = theta[component == c]
        assert abs(len(own) / n - weight) < 4 * np.sqrt(weight * (1 - weight) / n)
        z = np.linalg.solve(of.factor, (own - of.location).T)
        assert_allclose(z.mean(axis=1), 0.0, atol=4.5 / np.sqrt(len(own)))
        assert_allclose(np.cov(z), np.eye(6), atol=4.5 * np.sqrt(2 / len(own)))


def test_draws_are_those_of_the_seed_with_or_without_their_components(approx):
    tree = approx.sample(30, chains=1, random_seed=5, include_transformed=True, log_p=True)
    again = approx.sample(30, chains=1, random_seed=5, log_p=True)
    theta = approx.draw_flat(30, 5)
    assert_array_equal(tree["posterior"]["slope"].values[0], theta[:, approx.layout.variables[1].where])
    stats_of_draws = tree["sample_stats"].to_dataset()
    assert list(stats_of_draws.data_vars) == ["component", "log_p", "log_q"]
    assert_allclose(stats_of_draws["log_q"].values[0], approx.log_q(theta))
    assert np.issubdtype(stats_of_draws["component"].dtype, np.integer)
    xr.testing.assert_equal(stats_of_draws, again["sample_stats"].to_dataset())
    xr.testing.assert_equal(tree["components"].to_dataset(), approx.components)
    assert tree["components"].attrs["inference_library"] == "pymc_ngvi"
    trace = approx.sample(30, chains=1, random_seed=5, return_inferencedata=False)
    assert_array_equal(trace.get_sampler_stats("component"), stats_of_draws["component"].values[0])


# --- was it worth it? -------------------------------------------------------------------------------------------------


def elbo_1d(state):
    """Return the ELBO under the bimodal posterior, by quadrature."""
    sd = float(state.sd()[0])

    def integrand(x):
        point = np.array([[x]])
        log_q = state.log_density(point)[0]
        return np.exp(log_q) * (EXACT.log_density(point)[0] - log_q)

    mean = float(state.mean()[0])
    return integrate.quad(integrand, mean - 9 * sd, mean + 9 * sd, points=[-2.0, 0.0, 2.0], limit=200)[0]


GAUSSIANS = {
    "of one mode": gaussian_1d(2.0, 0.7),
    "across": gaussian_1d(0.6, 1.8),
    "narrow": gaussian_1d(0.6, 0.8),
    "a mixture of one": MixtureState.of([gaussian_1d(-2.0, 0.6)]),
}


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", GAUSSIANS)
def test_gain_is_the_difference_of_elbos(bimodal, name, seed):
    q = mixture_1d([-1.9, 2.1], [0.6, 0.6], [0.3, 0.7])
    bimodal.set_state(q)
    found = bimodal.worth(4_000, seed, gaussian=GAUSSIANS[name])
    exact = elbo_1d(q) - elbo_1d(GAUSSIANS[name])
    assert abs(found.gain - exact) < 4 * found.se
    assert 0.0 < found.se < 0.1
    assert (found.n_components, found.n_draws) == (2, 4_000)
    assert_allclose(found.n_effective, 0.3**-0.3 * 0.7**-0.7)


def test_error_of_the_gain_is_its_scatter(bimodal):
    found = [bimodal.worth(400, seed, gaussian=GAUSSIANS["across"]) for seed in range(60)]
    scatter = np.std([w.gain for w in found], ddof=1)
    # Four standard errors of a standard deviation from 60 values.
    assert_allclose(np.mean([w.se for w in found]), scatter, rtol=4 / np.sqrt(2 * 60))


def test_draws_where_the_density_is_not_finite_are_left_out():
    with pm.Model() as model:
        x = pm.Normal("x")
        pm.Potential("half", pm.math.switch(x > -1.0, 0.0, -np.inf))
    approx = NGVIApproximation(LogDensity(model), mixture_1d([0.0, 0.5], [0.5, 0.5], [0.5, 0.5]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.isfinite(approx.worth(500, 1, gaussian=gaussian_1d(0.0, 1.0)).gain)
        outside = approx.worth(500, 1, gaussian=gaussian_1d(-50.0, 1.0))
    assert np.isnan(outside.gain)
    assert "is not known" in outside.sentence()


def test_what_worth_needs(model, approx):
    with pytest.raises(ValueError, match=r"after a fit with family='mixture' only: pass gaussian="):
        approx.worth(200)
    approx.record = record(gaussian=approx.q.components[0])
    assert approx.worth(200, 1) == approx.worth(200, 1, gaussian=approx.q.components[0])
    for wrong in (0, 2.5):
        with pytest.raises(ValueError, match=f"at least 1; got {wrong}"):
            approx.worth(wrong)
    original = model["x"].get_value()
    with model:
        pm.set_data({"x": original + 1.0})
        try:
            with pytest.raises(ValueError, match="'x' were changed after the fit"):
                approx.worth(200)
            assert "effective" not in str(approx.summary(100))
        finally:
            pm.set_data({"x": original})


def test_summary_says_whether_it_was_worth_it(bimodal):
    bimodal.record = record(gaussian=GAUSSIANS["narrow"])
    bimodal.set_state(mixture_1d([-2.0, 2.0], [0.4, 0.6], [0.35, 0.65]))
    summary = bimodal.summary(100, khat_draws=1_000, random_seed=1)
    assert summary.notes[-1].startswith("With 1.9 effective components, the mixture gains 1.9")
    assert summary.notes[-1].endswith(": worth it.")
    assert f" is {summary.khat:.2f}: " in summary.notes[-1]
    assert "effective" not in str(bimodal.summary(100, khat_draws=None))
    bimodal.record = record()
    assert bimodal.summary(100, khat_draws=100).notes[-1] == "Mixture of 2 components, 1.9 effective."


# --- the picture ------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _closed():
    yield
    pyplot.close("all")


def layout_of(**shapes):
    variables, start = [], 0
    for name, shape in shapes.items():
        stop = start + int(np.prod(shape))
        variables.append(Variable(name.removesuffix("_log__"), name, shape, slice(start, stop), None))
        start = stop
    return Layout(tuple(variables), {})


LAYOUT = layout_of(beta=(2,), sd_log__=())


def draws_of(q, n, seed=1):
    rng = np.random.default_rng(seed)
    return q.draws(np.column_stack([rng.standard_normal((n, q.n_dim)), rng.random(n)]))


def test_components_of_variables_without_entries():
    data = components_dataset(mixture_of(2), layout_of(none=(0,), one=(2,)))
    assert data["none"].shape == (3, 2, 0)
