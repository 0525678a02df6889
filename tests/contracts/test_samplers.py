"""What a sampler is given to start from: points and mass matrix of q, in the form that PyMC and nutpie take."""

import logging

from pathlib import Path

import numpy as np
import pymc as pm
import pytest

from numpy.testing import assert_allclose, assert_array_equal
from pymc.step_methods.hmc import quadpotential
from texts import run

from pymc_ngvi import LogDensity, NGVIApproximation
from pymc_ngvi.families import DiagonalState, FullState, MixtureState
from pymc_ngvi.results.sampling import SamplerInit

#: Unconstrained mean and factor of q: coordinates of very different scales, correlated.
MEAN = np.array([0.3, -1.0, 2.0, 0.1, -0.2])
FACTOR = np.diag([0.2, 1.0, 0.05, 0.3, 0.4]) + np.tril(np.full((5, 5), 0.04), -1)


@pytest.fixture(scope="module")
def model():
    with pm.Model(coords={"effect": ["age", "dose"]}) as model:
        beta = pm.Normal("beta", 0.0, 2.0, dims="effect")
        scale = pm.HalfNormal("scale", 2.0)
        part = pm.Dirichlet("part", np.ones(3))
        pm.Deterministic("total", beta.sum() + part[0])
        pm.Normal("y", beta[0], scale, observed=[0.3, 1.2, -0.4])
    return model


@pytest.fixture(scope="module")
def density(model):
    return LogDensity(model)


@pytest.fixture
def approx(density):
    return NGVIApproximation(density, FullState(MEAN, FACTOR), random_seed=1)


def by_name(values):
    return {name: np.asarray(value) for name, value in values.items()}


def test_starts_are_draws_of_q(approx):
    points = np.concatenate([approx.sampler_init(500, (1, i)).points for i in range(8)])
    assert points.shape == (4_000, 5)
    error = (points.mean(axis=0) - MEAN) / approx.sd_flat
    assert np.abs(error).max() < 4.0 / np.sqrt(4_000)
    whitened = np.linalg.solve(FACTOR, (points - MEAN).T)
    assert_allclose(np.cov(whitened), np.eye(5), atol=4.0 * np.sqrt(2.0 / 4_000))


# --- points -----------------------------------------------------------------------------------------------------------


def test_pymc_makes_the_points_of_initvals(approx, model):
    """As ``pm.sample`` does with a step that it is given: back to the unconstrained points, without jitter."""
    from pymc.initial_point import make_initial_point_fns_per_chain

    init = approx.sampler_init(2, random_seed=1)
    functions = make_initial_point_fns_per_chain(model=model, overrides=init.initvals, jitter_rvs=set(), chains=2)
    for function, point in zip(functions, init.points, strict=True):
        assert_allclose(approx.layout.flatten(by_name(function(0))), point, atol=1e-9)


def test_same_seed_same_starts(approx):
    first, again, other = (approx.sampler_init(4, seed) for seed in (3, 3, 4))
    assert_array_equal(first.points, again.points)
    assert not np.any(first.points == other.points)
    assert len(np.unique(first.points[:, 0])) == 4
    assert not np.array_equal(approx.sampler_init().points, approx.sampler_init().points)  # goes on


def test_points_where_log_p_is_not_finite_are_left_out():
    with pm.Model() as model:
        x = pm.Normal("x")
        pm.Potential("positive", pm.math.switch(x > 0.5, 0.0, -np.inf))
    approx = NGVIApproximation(LogDensity(model), DiagonalState(np.zeros(1), np.ones(1)), random_seed=1)
    points = approx.sampler_init(200, random_seed=1).points
    assert points.shape == (200, 1)
    assert points.min() > 0.5
    hopeless = NGVIApproximation(LogDensity(model), DiagonalState(np.full(1, -50.0), np.ones(1)))
    with pytest.raises(ValueError, match=r"finite at 0 of 200 draws of q: too few to start 2 chains"):
        hopeless.sampler_init(2)


def test_starts_of_a_mixture_are_in_all_components(density):
    means = [MEAN - 5.0, MEAN + 5.0]
    q = MixtureState.of([FullState(m, FACTOR) for m in means], np.log([0.5, 0.5]))
    init = NGVIApproximation(density, q, random_seed=1).sampler_init(40, random_seed=2)
    n_first = np.sum(init.points[:, 0] < MEAN[0])
    assert 8 <= n_first <= 32  # of 40, binomial: four standard deviations
    assert_allclose(init.covariance, FACTOR @ FACTOR.T + 25.0, rtol=1e-9)


# --- mass matrix ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("covariance", ["auto", "dense", "diagonal"])
def test_covariance_is_that_of_q(approx, covariance):
    init = approx.sampler_init(2, 1, covariance=covariance)
    exact = FACTOR @ FACTOR.T
    assert init.is_dense == (covariance != "diagonal")
    assert_allclose(init.covariance, exact if init.is_dense else np.diag(exact))
    assert_array_equal(init.mean, MEAN)
    kind = "dense" if init.is_dense else "diagonal"
    assert repr(init) == f"SamplerInit(chains=2, n_dim=5, {kind} covariance)"


@pytest.mark.parametrize("covariance", ["dense", "diagonal"])
@pytest.mark.parametrize("adapt", [False, True])
def test_potential_is_that_of_the_covariance(approx, covariance, adapt):
    init = approx.sampler_init(1, 1, covariance=covariance)
    potential = init.potential(adapt=adapt, random_seed=1)
    kinds = {
        ("dense", False): quadpotential.QuadPotentialFull,
        ("dense", True): quadpotential.QuadPotentialFullAdapt,
        ("diagonal", False): quadpotential.QuadPotentialDiag,
        ("diagonal", True): quadpotential.QuadPotentialDiagAdapt,
    }
    assert type(potential) is kinds[covariance, adapt]
    exact = np.diag(np.diag(FACTOR @ FACTOR.T)) if covariance == "diagonal" else FACTOR @ FACTOR.T
    momentum = np.arange(1.0, 6.0)
    assert_allclose(potential.velocity(momentum), exact @ momentum)
    momenta = np.array([potential.random() for _ in range(4_000)])
    factor = np.linalg.cholesky(exact)
    assert_allclose(np.cov(momenta @ factor, rowvar=False), np.eye(5), atol=4.0 * np.sqrt(2.0 / 4_000))


# --- in PyMC and nutpie -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def correlated():
    """A posterior with correlation .99 and scales 1 and 10, and q the posterior itself."""
    factor = np.array([[1.0, 0.0], [9.9, 1.41]])
    with pm.Model() as model:
        pm.MvNormal("x", np.array([3.0, -20.0]), chol=factor)
    return NGVIApproximation(LogDensity(model), FullState(np.array([3.0, -20.0]), factor), random_seed=1)


@pytest.fixture(autouse=True)
def _quiet():
    logger = logging.getLogger("pymc")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


@pytest.mark.usefixtures("python_mode")
@pytest.mark.parametrize("seed", [1, 2])
def test_pm_sample_takes_kwargs(correlated, seed):
    init = correlated.sampler_init(2, random_seed=seed)
    tree = pm.sample(
        400, tune=60, **init.kwargs(), random_seed=seed, cores=1, progressbar=False, quiet=True,
        discard_tuned_samples=False, compute_convergence_checks=False,
    )  # fmt: skip
    draws = tree["posterior"]["x"].values
    assert draws.shape == (2, 400, 2)
    # Antithetic draws of NUTS: an effective sample size of 400 at least.
    assert np.all(np.abs(draws.mean(axis=(0, 1)) - [3.0, -20.0]) < 4.0 * np.array([1.0, 10.0]) / 20.0)
    # In whitened coordinates, a trajectory of a few steps is long enough from the very first draw on.
    assert tree["sample_stats"]["n_steps"].max() <= 15
    assert np.median(tree["warmup_sample_stats"]["n_steps"][:, 10:]) <= 7


@pytest.mark.usefixtures("python_mode")
def test_step_has_the_options_of_nuts(approx):
    step = approx.sampler_init(2, 1).pymc_step(target_accept=0.93, max_treedepth=7)
    assert isinstance(step, pm.NUTS)
    assert step.target_accept == 0.93
    assert step.max_treedepth == 7
    assert [v.name for v in step.vars] == [v.value_name for v in approx.layout.variables]
    ones = np.ones(5)
    assert_allclose(step.potential.velocity(ones), FACTOR @ FACTOR.T @ ones)
    adapting = approx.sampler_init(2, 1, covariance="diagonal").kwargs(adapt=True)["step"]
    assert isinstance(adapting.potential, quadpotential.QuadPotentialDiagAdapt)


def test_what_is_settled_is_not_taken_again(approx):
    with pytest.raises(ValueError, match=r"model, potential: sampler_init sets this already"):
        approx.sampler_init(2, 1).kwargs(potential=None, model=None)


def test_nutpie_starts_where_it_is_told(approx, model):
    nutpie = pytest.importorskip("nutpie")
    from nutpie.compile_pymc import _rv_dict_to_flat_array_wrapper
    from pymc.initial_point import make_initial_point_fn

    kwargs = approx.sampler_init(2, 1).nutpie_kwargs()
    assert kwargs["jitter_rvs"] == set()  # None would jitter all
    assert set(kwargs) <= set(nutpie.compile_pymc_model.__annotations__)
    # What compile_pymc_model makes of them, without its compilation.
    function = make_initial_point_fn(
        model=model, overrides=kwargs["initial_points"], jitter_rvs=kwargs["jitter_rvs"], return_transformed=True
    )
    names = [v.value_name for v in approx.layout.variables]
    flat = _rv_dict_to_flat_array_wrapper(function, names, [v.shape for v in approx.layout.variables])
    for seed in (1, 2):
        assert_allclose(flat(seed), approx.sampler_init(2, 1).points[0], atol=1e-9)


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"chains": 0}, "chains should be a whole number of at least 1; got 0"),
        ({"chains": 2.5}, "chains should be a whole number of at least 1; got 2.5"),
        ({"covariance": "full"}, "'auto', 'dense' or 'diagonal'; got 'full'"),
    ],
)
def test_bad_input_is_refused(approx, arguments, message):
    with pytest.raises(ValueError, match=message):
        approx.sampler_init(**arguments)


def test_minibatches_are_refused():
    data = np.arange(20.0)
    with pm.Model() as model:
        batch = pm.Minibatch(data, batch_size=5)
        mu = pm.Normal("mu")
        pm.Normal("y", mu, observed=batch, total_size=20)
    approx = NGVIApproximation(LogDensity(model), DiagonalState(np.zeros(1), np.ones(1)))
    with pytest.raises(ValueError, match=r"pm\.Minibatch data, and a sampler needs"):
        approx.sampler_init()


def test_a_covariance_that_is_not_finite_is_refused(approx, monkeypatch):
    monkeypatch.setattr(FullState, "cov", lambda self: np.full((5, 5), np.inf))
    with pytest.raises(ValueError, match=r"covariance of q is not finite .* FullState"):
        approx.sampler_init()


def test_dense_covariances_have_a_limit():
    n_dim = 5_001
    with pm.Model() as model:
        pm.Normal("x", shape=n_dim)
    approx = NGVIApproximation(LogDensity(model), DiagonalState(np.zeros(n_dim), np.ones(n_dim)))
    with pytest.raises(ValueError, match="5,001 coordinates would take"):
        approx.sampler_init(1, covariance="dense")
    assert isinstance(approx.sampler_init(1), SamplerInit)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NUTS looks where log p overflows, or is not finite
@pytest.mark.usefixtures("python_mode")
def test_the_examples_of_the_page_run():
    run((Path(__file__).parents[2] / "docs" / "samplers.md").read_text(encoding="utf-8"))
