"""The model in whitened coordinates: its density and gradient, what samplers make of it, and the way back."""

import logging
import tracemalloc

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest
import test_filled_family
import test_sparse_family
import test_summed_family

from matrix import random_state
from numpy.testing import assert_allclose, assert_array_equal
from scipy import sparse
from test_reparam import approximation as reparametrised

from pymc_ngvi import LogDensity, NGVIApproximation, fit_ngvi
from pymc_ngvi.core.linear_maps import SparseTriangle
from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.density.whitened import WHITENED
from pymc_ngvi.families import DiagonalState, FullState, LowRankState, MixtureState, SparseFamily, StudentTState
from pymc_ngvi.families.matrices.sparse.structure import FilledStructure
from pymc_ngvi.graphs.linear_maps import mapped
from pymc_ngvi.graphs.triangles import serve_jax

N_DIM = 6
#: Unconstrained mean and factor of q: coordinates of very different scales, correlated.
MEAN = np.array([0.3, -1.0, 0.2, 0.1, -0.2, 0.4])
FACTOR = np.diag([0.2, 1.0, 0.05, 0.3, 0.4, 0.2]) + np.tril(np.full((N_DIM, N_DIM), 0.04), -1)


def arrow(seed):
    """Return a state of blocks of several sizes and a border, which are not in the order of the coordinates."""
    labels = test_sparse_family.LABELS["several sizes"]
    return test_sparse_family.Pair(labels, np.random.default_rng(seed)).state


def low_rank(seed):
    """Return a state of ten coordinates, whose precision has a part of rank 3."""
    rng = np.random.default_rng(seed)
    axes = np.linalg.qr(rng.standard_normal((10, 5)))[0]
    core = rng.standard_normal((3, 3))
    core = core @ core.T - 0.3 * np.eye(3)
    core += max(0.0, -0.8 - np.linalg.eigvalsh(core)[0]) * np.eye(3)
    return LowRankState(rng.standard_normal(10), np.exp(rng.standard_normal(10)), axes, core, np.zeros(2))


STATES = {
    **{
        name: lambda seed, name=name: random_state(name, 7, np.random.default_rng(seed))
        for name in ("full", "full precision", "diagonal", "block")
    },
    "arrow": arrow,
    "filled": lambda seed: test_filled_family.Pair(seed).state,
    "summed": lambda seed: test_summed_family.Pair(seed).state,
    "low rank": low_rank,
}


@pytest.fixture(scope="module")
def model():
    with pm.Model(coords={"effect": ["age", "dose"]}) as model:
        beta = pm.Normal("beta", 0.0, 2.0, dims="effect")
        scale = pm.HalfNormal("scale", 2.0)
        part = pm.Dirichlet("part", np.ones(3))
        rate = pm.Beta("rate", 2.0, 3.0)
        pm.Deterministic("total", beta.sum() + part[0])
        x = pm.Data("x", [0.3, 1.2, -0.4])
        pm.Normal("y", beta[0] + rate * x, scale, observed=[0.3, 1.2, -0.4])
        pm.Potential("more", -0.1 * beta[1] ** 4)
    return model


@pytest.fixture(scope="module")
def density(model):
    return LogDensity(model)


@pytest.fixture
def approx(density):
    return NGVIApproximation(density, FullState(MEAN, FACTOR), random_seed=1)


def density_of(white, mode):
    """Return the function that samplers compile: log density and gradient of the whitened model."""
    (z,) = white.model.value_vars
    logp = white.model.logp()
    return pytensor.function([z], [logp, pytensor.grad(logp, z)], mode=mode)


def tree_of(white, z):
    """Return draws of the whitened model as a sampler returns them, (n_chains, n_draws, n_dim)."""
    import xarray as xr

    posterior = xr.Dataset({WHITENED: (("chain", "draw", "whitened_dim_0"), z)})
    posterior = posterior.assign_coords(chain=np.arange(len(z)), draw=10 + np.arange(z.shape[1]))
    stats = xr.Dataset({"energy": (("chain", "draw"), z[:, :, 0])})
    groups = {
        "posterior": posterior,
        "sample_stats": stats,
        "warmup_posterior": posterior,
        "warmup_sample_stats": stats,
    }
    return xr.DataTree.from_dict(groups)


# --- maps -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["NUMBA", "FAST_COMPILE"])
@pytest.mark.parametrize("name", STATES)
def test_maps_are_those_of_the_family(name, mode):
    for seed in (1, 2) if mode == "FAST_COMPILE" else (1,):
        state = STATES[name](seed)
        z, slope = np.random.default_rng(seed).standard_normal((2, state.n_dim))
        vector, weights = pt.vector(shape=(state.n_dim,)), pt.vector()
        theta = mapped(state.maps(), vector)
        with pytensor.config.change_flags(cxx=""):
            both = pytensor.function([vector, weights], [theta, pytensor.grad(weights @ theta, vector)], mode=mode)
        found, gradient = both(z, slope)
        assert_allclose(found, state.unwhiten(z[None])[0], rtol=1e-9, atol=1e-10)
        assert_allclose(gradient, state.whiten(slope[None])[0], rtol=1e-9, atol=1e-10)


def test_sparse_factors_stay_sparse():
    """Of a chain with a global coordinate, 3,000 in all: neither maps nor the graph hold a matrix of their square."""
    n = 3_000
    rows = np.concatenate([np.arange(n), np.arange(1, n), np.full(n - 1, n - 1)])
    cols = np.concatenate([np.arange(n), np.arange(n - 1), np.arange(n - 1)])
    pattern = Pattern.of(sparse.csr_array((np.ones(len(rows)), (rows, cols)), shape=(n, n)))
    state = SparseFamily(FilledStructure.of(pattern)).from_scale(np.zeros(n), np.linspace(0.5, 2.0, n))
    with pm.Model() as model:
        pm.Normal("x", shape=n)
    approx = NGVIApproximation(LogDensity(model), state)
    tracemalloc.start()
    white = approx.whitened()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    (triangle,) = state.maps()
    assert isinstance(triangle, SparseTriangle)
    assert len(triangle.entries) < 20 * n
    assert peak < 8 * n**2 / 4
    assert_allclose(white.to_whitened(white.to_model(np.ones((1, n)))), 1.0)


@pytest.fixture
def _jax_in_float64():
    """JAX as PyMC's samplers set it, and as it was afterwards."""
    jax = pytest.importorskip("jax", reason="JAX is in the group bench")
    before = jax.config.jax_enable_x64

    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


@pytest.mark.usefixtures("_jax_in_float64")
@pytest.mark.parametrize("name", ["block", "arrow"])
def test_jax_has_values_and_gradients_of_sparse_factors(name):
    import jax

    from pymc.sampling.jax import get_jaxified_graph

    serve_jax()
    state = STATES[name](1)
    z, slope = np.random.default_rng(1).standard_normal((2, state.n_dim))
    vector = pt.vector(shape=(state.n_dim,))
    function = get_jaxified_graph([vector], [mapped(state.maps(), vector)])
    many = jax.vmap(lambda z: function(z)[0])(np.stack([z, 2.0 * z]))
    gradient = jax.jit(jax.grad(lambda z: (function(z)[0] * slope).sum()))(z)
    assert_allclose(many, state.unwhiten(np.stack([z, 2.0 * z])), rtol=1e-9)
    assert_allclose(gradient, state.whiten(slope[None])[0], rtol=1e-9)


@pytest.mark.usefixtures("_jax_in_float64")
def test_arguments_for_samplers_of_jax(approx):
    arguments = approx.whitened().jax_kwargs(chains=3, random_seed=1)
    assert set(arguments) == {"model", "chains", "initvals"}
    assert [set(values) for values in arguments["initvals"]] == [{WHITENED}] * 3


# --- the model --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2])
def test_log_density_and_gradient_are_those_of_the_model(approx, seed):
    white = approx.whitened()
    assert repr(white) == "Whitened(n_dim=6, by a FullState)"
    function = density_of(white, "NUMBA")
    for z in np.random.default_rng(seed).standard_normal((5, N_DIM)):
        logp, gradient = function(z)
        theta = MEAN + FACTOR @ z
        expected, slope = approx.density.logp_grad(theta[None])
        assert_allclose(logp, expected[0], rtol=1e-8)  # PyMC has constants of densities in lower precision
        assert_allclose(gradient, FACTOR.T @ slope[0], rtol=1e-8, atol=1e-8)


def test_the_model_follows_the_data(approx, model):
    function = density_of(approx.whitened(), "NUMBA")
    z = np.full(N_DIM, 0.2)
    before = function(z)[0]
    try:
        pm.set_data({"x": [2.0, -1.0, 0.5]}, model=model)
        assert_allclose(function(z)[0], approx.log_p((MEAN + FACTOR @ z)[None])[0], rtol=1e-8)
        assert abs(function(z)[0] - before) > 0.1
    finally:
        pm.set_data({"x": [0.3, 1.2, -0.4]}, model=model)


@pytest.mark.parametrize("in_context", [True, False])
def test_it_is_a_model_of_its_own(approx, model, in_context):
    names = set(model.named_vars)
    if in_context:
        with model:
            white = approx.whitened()
    else:
        white = approx.whitened()
    assert set(model.named_vars) == names
    assert set(white.model.named_vars) == {"whitened", "log_p"}
    assert white.model.check_bounds == model.check_bounds


def test_whatever_stands_for_q_whitens(density):
    """A mixture by the covariance within its components, a Student-t by its Gaussian."""
    components = [FullState(MEAN + shift, FACTOR) for shift in (-0.5, 0.5)]
    mixture = NGVIApproximation(density, MixtureState.of(components, np.log([0.5, 0.5]))).whitened()
    student = NGVIApproximation(density, StudentTState(FullState(MEAN, FACTOR), np.log(5.0))).whitened()
    for white in (mixture, student):
        assert_allclose(white.to_model(np.zeros((1, N_DIM)))[0], MEAN)
        jump = white.to_model(np.eye(N_DIM)) - MEAN
        assert_allclose(jump.T @ jump, FACTOR @ FACTOR.T, atol=1e-9)


@pytest.mark.parametrize("name", ["full", "full precision", "arrow"])
def test_points_go_there_and_back(name):
    state = STATES[name](1)
    with pm.Model() as model:
        pm.Normal("x", shape=state.n_dim)
    white = NGVIApproximation(LogDensity(model), state).whitened()
    z = np.random.default_rng(1).standard_normal((4, state.n_dim))
    assert_allclose(white.to_model(z), state.draws(z))
    assert_allclose(white.to_whitened(state.draws(z)), z, atol=1e-8)


def test_initial_points_are_whitened_draws(approx):
    white = approx.whitened()
    points = white.initial_points(4_000, 1)
    assert_allclose(points.mean(axis=0), 0.0, atol=4.0 / np.sqrt(4_000))
    assert_allclose(np.cov(points.T), np.eye(N_DIM), atol=4.5 * np.sqrt(2.0 / 4_000))
    assert_array_equal(white.initial_points(3, 5), white.initial_points(3, 5))
    assert not np.any(white.initial_points(3, 5) == white.initial_points(3, 6))


# --- the way back -----------------------------------------------------------------------------------------------------


def test_draws_come_back_as_those_of_the_model(approx):
    white = approx.whitened()
    z = np.random.default_rng(1).standard_normal((2, 5, N_DIM))
    tree = white.unwhiten(tree_of(white, z))
    posterior = tree["posterior"]
    theta = MEAN + z @ FACTOR.T
    assert set(posterior.data_vars) == {"beta", "scale", "part", "rate", "total"}
    assert_allclose(posterior["beta"], theta[..., :2])
    assert_allclose(posterior["scale"], np.exp(theta[..., 2]))
    logits = np.concatenate([theta[..., 3:5], -theta[..., 3:5].sum(axis=-1, keepdims=True)], axis=-1)
    parts = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    assert_allclose(posterior["part"], parts)
    assert_allclose(posterior["rate"], 1.0 / (1.0 + np.exp(-theta[..., 5])))
    assert_allclose(posterior["total"], theta[..., :2].sum(axis=-1) + parts[..., 0])
    assert posterior["beta"].dims == ("chain", "draw", "effect")
    assert list(posterior["effect"].values) == ["age", "dose"]
    assert list(posterior["draw"].values) == [10, 11, 12, 13, 14]
    assert_array_equal(tree["sample_stats"]["energy"], z[:, :, 0])
    assert "warmup_sample_stats" in tree.children
    assert "warmup_posterior" not in tree.children
    assert set(tree["observed_data"].data_vars) == {"y"}


# --- samplers ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def correlated():
    """A posterior with correlation .99, scales 1 and 10, and a positive variable; q is the posterior itself."""
    factor = np.array([[1.0, 0.0], [9.9, 1.41]])
    with pm.Model() as model:
        x = pm.MvNormal("x", np.array([3.0, -20.0]), chol=factor)
        pm.LogNormal("rate", 0.5, 0.2)
        pm.Deterministic("difference", x[1] - x[0])
    q = FullState(np.array([3.0, -20.0, 0.5]), np.block([[factor, np.zeros((2, 1))], [np.zeros((1, 2)), 0.2]]))
    return NGVIApproximation(LogDensity(model), q, random_seed=1)


@pytest.fixture(autouse=True)
def _quiet():
    logger = logging.getLogger("pymc")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


def check_moments(tree, n):
    """Compare draws worth n independent ones, at least, with the posterior."""
    posterior, error = tree["posterior"], 4.0 / np.sqrt(n)
    both = {"x": ([3.0, -20.0], [1.0, 10.0]), "difference": (-23.0, np.hypot(8.9, 1.41))}
    for name, (mean, sd) in both.items():
        draws = posterior[name].values.reshape(-1, *posterior[name].shape[2:])
        assert np.all(np.abs(draws.mean(axis=0) - mean) < error * np.asarray(sd))
        assert_allclose(draws.std(axis=0), sd, rtol=error)
    assert_allclose(np.log(posterior["rate"].values).mean(), 0.5, atol=0.2 * error)


@pytest.mark.parametrize("seed", [1, 2])
def test_pm_sample_takes_it(correlated, seed):
    white = correlated.whitened()
    with pytensor.config.change_flags(mode="FAST_COMPILE", cxx=""):
        draws = pm.sample(
            400, tune=60, **white.kwargs(chains=2, random_seed=seed), random_seed=seed, cores=1, progressbar=False,
            quiet=True, discard_tuned_samples=False, compute_convergence_checks=False,
        )  # fmt: skip
    check_moments(white.unwhiten(draws), 400)
    # Trajectories are short from the very first draws on.
    assert draws["sample_stats"]["n_steps"].max() <= 15
    assert np.median(draws["warmup_sample_stats"]["n_steps"][:, 10:]) <= 7


@pytest.mark.slow
def test_nutpie_takes_it(correlated):
    nutpie = pytest.importorskip("nutpie", reason="nutpie is in the group bench")
    white = correlated.whitened()
    compiled = nutpie.compile_pymc_model(white.model, **white.nutpie_kwargs())
    starts = [compiled.initial_point_func(seed) for seed in (1, 2, 3, 4)]
    assert_array_equal(np.abs(starts), 1.0)
    assert len(np.unique(starts, axis=0)) > 1
    draws = nutpie.sample(compiled, draws=400, tune=100, chains=2, cores=1, seed=1, progress_bar=False)
    tree = white.unwhiten(draws)
    check_moments(tree, 400)
    assert draws["sample_stats"]["n_steps"].mean() < 8
    assert tree["posterior"].attrs == draws["posterior"].attrs
    assert tree["sample_stats"].attrs["inference_library"] == "nutpie"


def test_nutpie_starts_at_a_draw_where_signs_are_no_points():
    with pm.Model() as model:
        x = pm.Normal("x")
        pm.Potential("positive", pm.math.switch(x > 0.0, 0.0, -np.inf))
    white = NGVIApproximation(LogDensity(model), DiagonalState(np.zeros(1), np.ones(1)), random_seed=1).whitened()
    start = white.nutpie_kwargs()["initial_points"][WHITENED]
    assert start.shape == (1,)
    assert start[0] > 0.0


def test_an_exact_posterior_is_sampled_in_coordinates_of_its_fit():
    rng = np.random.default_rng(1)
    with pm.Model():
        mu = pm.Normal("mu", 0.0, 2.0)
        u = pm.Normal("u", mu, 1.0, shape=8)
        pm.Poisson("y", pm.math.exp(u), observed=rng.poisson(np.exp(rng.standard_normal(8))))
        approx = fit_ngvi(random_seed=1, progressbar=False, posterior="exact")
    assert approx.record.is_pool
    white = approx.whitened()
    theta = approx.draw_flat(3, 1)
    function = density_of(white, "FAST_COMPILE")
    for z, point in zip(white.to_whitened(theta), theta, strict=True):
        assert_allclose(function(z)[0], approx.log_p(point[None])[0], rtol=1e-9)


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chains", [0, 2.5, True])
def test_bad_numbers_are_refused(approx, chains):
    with pytest.raises(ValueError, match="chains should be a whole number of at least 1; got"):
        approx.whitened().initial_points(chains)


def test_draws_of_another_model_are_refused(approx):
    white = approx.whitened()
    with pytest.raises(
        ValueError, match=r"draws should be .*whitened model.*got a DataTree with 'beta', .*white\.model"
    ):
        white.unwhiten(approx.sample(5, random_seed=1))
    with pytest.raises(ValueError, match="got a ndarray"):
        white.unwhiten(np.zeros((2, 3, N_DIM)))
    with pytest.raises(ValueError, match=r"have \(7,\) numbers each, and this model has 6 coordinates"):
        white.unwhiten(tree_of(white, np.zeros((1, 2, 7))))


def test_minibatches_are_refused():
    with pm.Model() as model:
        batch = pm.Minibatch(np.arange(20.0), batch_size=5)
        mu = pm.Normal("mu")
        pm.Normal("y", mu, observed=batch, total_size=20)
    approx = NGVIApproximation(LogDensity(model), DiagonalState(np.zeros(1), np.ones(1)))
    with pytest.raises(ValueError, match=r"pm\.Minibatch data"):
        approx.whitened()


@pytest.mark.parametrize("kind", ["is_sharded", "is_streamed"])
def test_a_part_of_the_data_is_refused(approx, monkeypatch, kind):
    monkeypatch.setattr(LogDensity, kind, True)
    for method in (approx.whitened, approx.sampler_init):
        with pytest.raises(ValueError, match=r"data of one shard or batch alone, .* Build the model on all"):
            method()


def test_a_gaussian_in_other_coordinates_is_refused():
    with pytest.raises(ValueError, match=r"A PushforwardState is a Gaussian in other coordinates .* without reparam"):
        reparametrised().whitened()


def test_other_variables_than_those_of_the_fit_are_refused():
    with pm.Model() as model:
        pm.Normal("x")
    approx = NGVIApproximation(LogDensity(model), DiagonalState(np.zeros(1), np.ones(1)))
    with model:
        pm.Normal("new")
    with pytest.raises(ValueError, match="others than those of the fit: new"):
        approx.whitened()


def test_a_q_that_is_not_finite_is_refused(approx, monkeypatch):
    monkeypatch.setattr(FullState, "sd", lambda self: np.full(N_DIM, np.inf))
    with pytest.raises(ValueError, match=r"standard deviations of q are not finite \(q is a FullState\)"):
        approx.whitened()
