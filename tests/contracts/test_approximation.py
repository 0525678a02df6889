"""The result of a fit: draws, views, PyMC's own tools on it, and PyTensor nodes."""

import functools

from dataclasses import replace

import numpy as np
import pymc as pm
import pytensor
import pytest
import xarray as xr

from matrix import random_state
from numpy.testing import assert_allclose, assert_array_equal
from pymc.variational.opvi import Approximation
from scipy import stats

from pymc_ngvi import Elbo, FitRecord, LogDensity, NGVIApproximation, Status
from pymc_ngvi.core import draws
from pymc_ngvi.density import over_draws as on_draws
from pymc_ngvi.density.constrain import Constrainer
from pymc_ngvi.families import DiagonalState, FullState


def regression(y_dims: str | None = "obs") -> pm.Model:
    coords = {"obs": np.arange(10, 22), "group": ["a", "b", "c"]}
    x = np.linspace(-1, 1, 12)
    with pm.Model(coords=coords) as model:
        data = pm.Data("x", x, dims="obs")
        scale = pm.HalfNormal("scale", 2.0)
        slope = pm.Normal("slope", 0, 1, dims="group")
        level = pm.Normal("level", 0, 1, shape=2)
        mu = pm.Deterministic("mu", level.sum() + slope[0] * data, dims="obs")
        pm.Normal("y", mu, scale, observed=2 * x + 0.5, dims=y_dims)
    return model


def full_state(n_dim: int, seed: int = 3) -> FullState:
    rng = np.random.default_rng(seed)
    factor = np.tril(0.1 * rng.standard_normal((n_dim, n_dim)), -1) + np.diag(rng.uniform(0.1, 0.4, n_dim))
    return FullState(rng.standard_normal(n_dim), factor)


@functools.cache
def common_model() -> pm.Model:
    """Return the model that tests share; one that sets its data sets them back."""
    return regression()


@functools.cache
def common_density() -> LogDensity:
    return LogDensity(common_model())


@pytest.fixture
def model() -> pm.Model:
    return common_model()


@pytest.fixture
def kind() -> str:
    """Structure of q and what its factor is of."""
    return "full"


def state_of_kind(kind: str, n_dim: int, seed: int = 3):
    return full_state(n_dim, seed) if kind == "full" else random_state(kind, n_dim, np.random.default_rng(seed))


@pytest.fixture
def approx(kind) -> NGVIApproximation:
    density = common_density()
    return NGVIApproximation(density, state_of_kind(kind, density.n_dim), random_seed=1)


def assert_moments(draws, mean, cov, n_se=4.5):
    """Compare the moments of independent draws with known ones, in Monte Carlo errors."""
    n = len(draws)
    centred = draws - mean
    products = np.einsum("ni,nj->nij", centred, centred)
    assert np.all(np.abs(centred.mean(0)) < n_se * np.sqrt(np.diag(cov) / n))
    assert np.all(np.abs(products.mean(0) - cov) < n_se * products.std(0) / np.sqrt(n))


# -------------------------------------------------------------------- draws


def test_sample_has_the_form_of_pymc(python_mode, model, approx):
    with model:
        theirs = pm.fit(n=2, method="advi", progressbar=False, random_seed=1).sample(30, random_seed=1)
    ours = approx.sample(30, chains=1, random_seed=1)
    assert set(ours.children) == set(theirs.children) | {"sample_stats"}
    assert {"posterior", "observed_data", "constant_data"} <= set(theirs.children)
    for group in set(theirs.children) - {"sample_stats"}:
        a, b = ours[group].to_dataset(), theirs[group].to_dataset()
        assert list(a.data_vars) == list(b.data_vars)
        assert dict(a.sizes) == dict(b.sizes)
        assert set(a.attrs) == set(b.attrs)
        for name in b.variables:
            assert a[name].dims == b[name].dims
            assert a[name].dtype == b[name].dtype
        for name in b.coords:
            assert_array_equal(a[name], b[name])
    xr.testing.assert_equal(ours["observed_data"].to_dataset(), theirs["observed_data"].to_dataset())
    xr.testing.assert_equal(ours["constant_data"].to_dataset(), theirs["constant_data"].to_dataset())
    assert ours["posterior"].attrs["inference_library"] == "pymc_ngvi"
    assert ours["posterior"].attrs["inference_library_version"] == "0.1.0"


def test_sample_holds_draws_of_q_on_the_constrained_scale(approx):
    posterior = (
        approx.sample(4_000, chains=1, random_seed=5, include_transformed=True)["posterior"].to_dataset().isel(chain=0)
    )
    names = [v.value_name for v in approx.layout.variables]
    flat = np.concatenate([posterior[name].values.reshape(4_000, -1) for name in names], axis=1)
    assert_moments(flat, approx.mean_flat, approx.q.cov())
    assert_allclose(posterior["scale"], np.exp(posterior["scale_log__"]), rtol=1e-13)
    level, slope = posterior["level"].values, posterior["slope"].values
    assert_allclose(posterior["mu"], level.sum(1)[:, None] + slope[:, :1] * np.linspace(-1, 1, 12), rtol=1e-12)


def test_sample_stats_are_the_log_densities_on_the_unconstrained_scale(python_mode, model, approx):
    tree = approx.sample(5, chains=1, random_seed=2, include_transformed=True, log_p=True)
    posterior = tree["posterior"].to_dataset().isel(chain=0)
    logp = model.compile_logp()
    values = [v.value_name for v in approx.layout.variables]
    expected_p = [logp({name: posterior[name].values[i] for name in values}) for i in range(5)]
    flat = np.concatenate([posterior[name].values.reshape(5, -1) for name in values], axis=1)
    expected_q = stats.multivariate_normal(approx.mean_flat, approx.q.cov()).logpdf(flat)
    assert list(tree["sample_stats"].data_vars) == ["log_p", "log_q"]
    assert_allclose(tree["sample_stats"]["log_p"].values[0], expected_p, rtol=1e-10)
    assert_allclose(tree["sample_stats"]["log_q"].values[0], expected_q, rtol=1e-10)
    assert not approx.sample(5)["sample_stats"].data_vars  # unasked, nothing is evaluated


def test_seeds(approx):
    a, b = approx.sample(5, random_seed=1), approx.sample(5, random_seed=1)
    xr.testing.assert_equal(a["posterior"].to_dataset(), b["posterior"].to_dataset())
    assert not np.allclose(a["posterior"]["slope"], approx.sample(5, random_seed=2)["posterior"]["slope"])
    twin = NGVIApproximation(approx.density, approx.q, random_seed=1)
    first = approx.draw_flat(3)
    assert_array_equal(first, twin.draw_flat(3))
    assert not np.allclose(first, approx.draw_flat(3))  # the stream goes on
    assert_array_equal(approx.draw_flat(3, np.random.RandomState(1)), approx.draw_flat(3, np.random.RandomState(1)))


def test_large_draws_are_made_in_batches_and_are_the_same(approx, monkeypatch):
    """Nothing is left out, repeated or drawn from another stream, whatever the size of the last batch."""
    at_once = approx.draw_flat(50, random_seed=3)
    monkeypatch.setattr(draws, "STREAMED", 49 * approx.layout.n_dim)
    monkeypatch.setattr(draws, "CACHED", 7 * approx.layout.n_dim + 1)
    np.testing.assert_allclose(approx.draw_flat(50, random_seed=3), at_once, rtol=1e-12)


@pytest.mark.parametrize("n", [0, -1, 2.5])
def test_number_of_draws_is_checked(approx, n):
    with pytest.raises(ValueError, match=f"at least 1; got {n}"):
        approx.sample(n)


# -------------------------------------------------------------------- after pm.set_data


# -------------------------------------------------------------------- views of q


def test_cov_of(approx):
    where = {v.name: v.where for v in approx.layout.variables}
    index = np.r_[where["level"], where["scale"]]
    block = approx.cov_of(["level", "scale"])
    assert_allclose(block, approx.q.cov()[np.ix_(index, index)])
    assert list(block[block.dims[0]].values) == ["level[0]", "level[1]", "scale_log__"]
    assert_array_equal(approx.cov_of("scale_log__"), approx.cov_of(["scale"]))
    with pytest.raises(ValueError, match=r"'nope'; there are .*'slope'"):
        approx.cov_of(["slope", "nope"])


def test_large_covariance_is_refused_with_what_to_use_instead():
    with pm.Model() as model:
        pm.Normal("v", shape=5_001)
    q = DiagonalState.from_scale(np.zeros(5_001), np.full(5_001, 2.0))
    approx = NGVIApproximation(LogDensity(model), q)
    with pytest.raises(ValueError, match=r"5,001 coordinates would take 0.2 GiB.*sd_flat.*cov_of\(names\)"):
        _ = approx.cov
    with pytest.raises(ValueError, match="5,001"):
        approx.cov_of("v")
    assert_array_equal(approx.sd_flat, q.factor)


# -------------------------------------------------------------------- PyTensor nodes


@pytest.mark.parametrize(
    ("mode", "kind"),
    [(None, "full"), *(("FAST_COMPILE", kind) for kind in ("full", "full precision", "block"))],  # None: Numba
)
def test_moments_are_nodes_that_follow_the_state(approx, mode, kind):
    functions = {name: pytensor.function([], getattr(approx, name), mode=mode) for name in ("mean", "std", "cov")}
    for q in (approx.q, state_of_kind(kind, 6, 11)):
        approx.set_state(q)
        assert_allclose(functions["mean"](), q.mean())
        assert_allclose(functions["std"](), q.sd())
        assert_allclose(functions["cov"](), q.cov())


def test_params_are_shared_values(approx, kind):
    assert {p.name for p in approx.params} == set(approx.q.params())
    new = state_of_kind(kind, 6, 12)
    for param in approx.params:
        param.set_value(new.params()[param.name])
    assert_array_equal(approx.mean_flat, new.mean())  # what the user sets counts everywhere
    assert_array_equal(approx.draw_flat(2, 1), new.draws(np.random.default_rng(1).standard_normal((2, 6))))


def test_nodes_keep_a_state_that_one_of_another_kind_replaces(approx):
    before, mean = approx.mean, approx.q.mean()
    approx.set_state(DiagonalState.from_scale(np.zeros(6), np.ones(6)))
    assert_array_equal(approx.mean.eval(), approx.mean_flat)
    assert not approx.mean_flat.any()
    assert_array_equal(before.eval(), mean)
    with pytest.raises(ValueError, match="q has 4 dimensions, but the free variables of the model have 6"):
        NGVIApproximation(approx.density, full_state(4))


def test_sample_node(python_mode, model, approx):
    node = approx.sample_node(model["slope"] * 2 + model["scale"], size=3_000)
    draws = node.eval()
    where = {v.name: v.where for v in approx.layout.variables}
    reference = approx.draw_flat(100_000, 1)
    expected = 2 * reference[:, where["slope"]] + np.exp(reference[:, where["scale"]])
    assert_moments(draws, expected.mean(0), np.cov(expected.T))
    assert approx.sample_node(model["slope"]).eval().shape == (3,)
    at_mean = approx.sample_node([model["scale"], model["mu"]], size=2, deterministic=True)
    scale, mu = pytensor.function([], at_mean)()
    assert_allclose(scale, np.exp(approx.mean_flat[where["scale"]]).repeat(2))
    assert mu.shape == (2, 12)
    assert_array_equal(mu[0], mu[1])


def test_pymcs_own_sampling_of_a_group_works(python_mode, approx):
    tree = Approximation.sample(approx, 2_000, random_seed=1)
    where = {v.name: v.where for v in approx.layout.variables}["slope"]
    cov = approx.q.cov()[where, where]
    assert_moments(tree["posterior"]["slope"].values[0], approx.mean_flat[where], cov)


def test_variables_keep_their_coordinates_whatever_the_orders(python_mode):
    with pm.Model(coords={"k": range(3)}) as model:
        b = pm.Normal("b", dims="k")
        a = pm.HalfNormal("a")
        pm.Deterministic("c", b.sum() + a)
    frozen = pm.model.transform.optimization.freeze_dims_and_data(model)
    for m in (model, frozen):
        density = LogDensity(m)
        mean = density.layout.flatten({"b": [1.0, 2.0, 3.0], "a_log__": np.log(7.0)})
        approx = NGVIApproximation(density, DiagonalState.from_scale(mean, np.full(4, 1e-9)))
        names = [name for name in approx.groups[0].ordering]
        assert names == [v.value_name for v in density.layout.variables] == [v.name for v in m.value_vars]
        values = pytensor.function([], approx.sample_node([m["b"], m["a"], m["c"]]))()
        for value, expected in zip(values, ([1, 2, 3], 7, 13), strict=True):
            assert_allclose(value, expected, atol=1e-6)
        assert_allclose(approx.sample(1)["posterior"]["c"], 13, atol=1e-6)


# -------------------------------------------------------------------- quality


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(("scale", "low", "high"), [(0.5, 0.6, 1.2), (0.9, 0.05, 0.45), (1.5, -3.0, 0.0)])
def test_khat_tells_narrow_from_wide(seed, scale, low, high):
    # For p = N(0, 1) and q = N(0, s^2), s < 1, the weights have a Pareto tail of shape 1 - s^2.
    with pm.Model() as model:
        pm.Normal("v")
    q = DiagonalState.from_scale(np.zeros(1), np.array([scale]))
    assert low < NGVIApproximation(LogDensity(model), q).khat(random_seed=seed) < high


def record(status: Status) -> FitRecord:
    return FitRecord(
        status=status, elbo=Elbo(-12.5, 0.02), gap=0.03, n_iterations=7, n_gradients=320, n_hessians=80, n_dropped=1,
        compile_seconds=0.25, run_seconds=0.5, family="full", update="natural", estimator="price", step="adaptive",
        backend="quick",
    )  # fmt: skip


def test_record_is_shown(approx):
    approx.record = record(Status.CONVERGED)
    assert approx.elbo == (-12.5, 0.02)
    assert (approx.gap, approx.status, approx.converged) == (0.03, Status.CONVERGED, True)
    assert (approx.n_iterations, approx.n_gradients, approx.n_hessians) == (7, 320, 80)
    assert (approx.compile_seconds, approx.run_seconds, approx.backend) == (0.25, 0.5, "quick")
    assert repr(approx) == str(approx) == "NGVIApproximation(FullState, n_dim=6, converged: ELBO -12.50 +- 0.02)"


def test_without_a_fit_there_is_no_record(approx):
    assert approx.record is None
    for name in ("elbo", "gap", "status", "converged", "n_iterations", "backend"):
        with pytest.raises(RuntimeError, match=rf"{name} is known after a fit only.*pm\.fit"):
            getattr(approx, name)
    assert "not fitted" in repr(approx)
    assert approx.hist.shape == (0,)


@pytest.mark.parametrize("columns", [80, 100, 300])
def test_summary_fits_the_terminal(approx, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    approx.record = record(Status.NOISE_LIMITED)
    summary = approx.summary(100, khat_draws=100, random_seed=1)
    assert max(map(len, str(summary).splitlines())) <= min(columns, 100)
    assert "rows; all" not in str(summary)
    monkeypatch.setattr("pymc_ngvi.results.summary._MAX_ROWS", 5)
    summary = replace(summary, max_rows=5)
    assert f"({len(summary.table)} rows; all of them are in .table)" in str(summary)
    assert f"({len(summary.table)} rows; all of them are in .table)" in summary._repr_html_()


# -------------------------------------------------------------------- constrained values


def test_variables_without_entries(python_mode):
    with pm.Model() as model:
        a, b, c = pm.Normal("a", shape=0), pm.HalfNormal("b", shape=(0, 2)), pm.HalfNormal("c")
        pm.Deterministic("total", a.sum() + b.sum() + c)
    approx = NGVIApproximation(LogDensity(model), DiagonalState.from_scale(np.zeros(1), np.ones(1)))
    posterior = approx.sample(4)["posterior"]
    assert posterior["a"].shape == (4, 1, 0)
    assert posterior["b"].shape == (4, 1, 0, 2)
    assert_allclose(posterior["total"], posterior["c"])
    assert approx.state.std["b"].shape == (0, 2)
    values = pytensor.function([], approx.sample_node([model["a"], model["b"]], size=3))()
    assert [value.shape for value in values] == [(3, 0), (3, 0, 2)]


@pytest.mark.parametrize("where", ["vectorising", "running"])
def test_graphs_that_cannot_be_vectorised_are_looped_over(monkeypatch, model, where):
    density = LogDensity(model)
    theta = np.random.default_rng(0).normal(size=(5, density.n_dim))
    expected = Constrainer(density)(theta)

    def fail(*_):
        raise NotImplementedError

    looping = Constrainer(density)
    if where == "vectorising":
        monkeypatch.setattr(on_draws.graph, "over_draws", fail)
    else:
        monkeypatch.setattr(on_draws, "CACHED", None)
    values = looping(theta)
    assert looping._function._batched is None
    for name, value in expected.items():
        assert_allclose(values[name], value, rtol=1e-12)


def test_errors_of_the_model_itself_are_not_hidden():
    with pm.Model() as model:
        x, w = pm.Data("x", np.ones(2)), pm.Normal("w", shape=2)
        pm.Deterministic("product", x * w)
    constrainer = Constrainer(LogDensity(model))
    theta = np.ones((3, 2))
    constrainer(theta)
    with model:
        pm.set_data({"x": np.ones(3)})
        with pytest.raises(ValueError, match=r"shape|broadcast|dimension"):
            constrainer(theta)
        pm.set_data({"x": np.full(2, 4.0)})
    assert_array_equal(constrainer(theta)["product"], np.full((3, 2), 4.0))
    assert constrainer._function._batched is not None


def test_what_is_shown_of_q_is_a_copy(approx):
    before = {name: value.copy() for name, value in approx.q.params().items()}
    approx.mean_flat[:] = 99.0
    approx.sd_flat[:] = 99.0
    for data in (approx.mean_data, approx.std_data):
        for value in data.values():
            value.to_numpy()[...] = 99.0
    for name, value in approx.q.params().items():
        assert_array_equal(value, before[name])
