"""What a user does with the result of ``pm.fit``, from end to end, and that looking at it compiles nothing."""

import dataclasses
import json
import subprocess
import sys
import warnings

import arviz as az
import cloudpickle
import numpy as np
import pymc as pm
import pytensor
import pytest
import xarray as xr

from scipy import stats

from pymc_ngvi import ConvergenceWarning, Elbo, NGVIApproximation

QUIET = {"progressbar": False, "backend": "quick"}
N = 40
X = np.linspace(-1.0, 1.0, N)
Y = 0.5 + 2.0 * X + np.random.default_rng(5).normal(0.0, 0.3, N)


@pytest.fixture(scope="module")
def model():
    with pm.Model(coords={"obs": np.arange(N), "term": ["level", "slope"]}) as model:
        x = pm.Data("x", X, dims="obs")
        beta = pm.Normal("beta", 0.0, 3.0, dims="term")
        sd = pm.HalfNormal("sd", 1.0)
        mu = pm.Deterministic("mu", beta[0] + beta[1] * x, dims="obs")
        pm.Normal("y", mu, sd, observed=Y, shape=x.shape, dims="obs")
    return model


@pytest.fixture(scope="module")
def approx(model):
    with model:
        return pm.fit(method="ngvi", random_seed=1, posterior="gaussian", **QUIET)


@pytest.fixture
def no_compilation(monkeypatch):
    """Make every call of PyTensor's compiler an error."""

    def refused(*args, **kwargs):
        raise AssertionError("a graph was compiled")

    monkeypatch.setattr("pytensor.compile.maker.function", refused)
    monkeypatch.setattr("pytensor.function", refused)
    monkeypatch.setattr("pymc.pytensorf.compile", refused)
    monkeypatch.setattr("pymc_ngvi.density.over_draws.pymc_compile", refused)


@pytest.fixture
def no_machine_code(monkeypatch):
    """Make generating C or Numba code an error; Python thunks are fine."""

    def refused(*args, **kwargs):
        raise AssertionError("machine code was generated")

    monkeypatch.setattr("pytensor.link.numba.linker.NumbaLinker.jit_compile", refused)
    monkeypatch.setattr("pytensor.link.c.basic.CLinker.compile_cmodule", refused)
    monkeypatch.setattr("pytensor.link.c.cmodule.GCC_compiler.compile_str", refused)


def test_posterior_predictive_loo_and_new_data(model, approx, python_mode):
    """The usual course: draws, log likelihood, loo, predictions, new data, predictions for them."""
    tree = approx.sample(2_000, random_seed=1)
    posterior = tree["posterior"]
    assert dict(posterior.sizes) == {"chain": 4, "draw": 500, "term": 2, "obs": N}
    assert list(posterior["term"].values) == ["level", "slope"]
    with model:
        pm.compute_log_likelihood(tree, progressbar=False)
    expected = stats.norm(posterior["mu"], posterior["sd"].values[..., None]).logpdf(Y)
    np.testing.assert_allclose(tree["log_likelihood"]["y"], expected, rtol=1e-9)
    elpd = az.loo(tree).elpd
    # Below the log pointwise predictive density, by about the number of parameters.
    lppd = float(np.log(np.exp(expected).mean((0, 1))).sum())
    assert lppd - 6.0 < elpd < lppd
    with model:
        seen = pm.sample_posterior_predictive(tree, progressbar=False, random_seed=1)["posterior_predictive"]["y"]
        try:
            pm.set_data({"x": [5.0, 6.0, 7.0]}, coords={"obs": [20, 21, 22]})
            new = pm.sample_posterior_predictive(
                tree, var_names=["mu", "y"], predictions=True, progressbar=False, random_seed=1
            )["predictions"]
            with pytest.warns(UserWarning, match="The data 'x' were changed after the fit"):
                of_new_draws = approx.sample(2_000, random_seed=1)
        finally:
            pm.set_data({"x": X}, coords={"obs": np.arange(N)})
    assert seen.dims == ("chain", "draw", "obs")
    line = posterior["beta"].values[..., :1] + posterior["beta"].values[..., 1:] * [5.0, 6.0, 7.0]
    np.testing.assert_allclose(new["mu"], line, rtol=1e-12)
    np.testing.assert_allclose(of_new_draws["posterior"]["mu"], line, rtol=1e-12)
    assert list(of_new_draws["posterior"]["obs"].values) == [20, 21, 22]
    np.testing.assert_array_equal(of_new_draws["observed_data"]["y"], Y)
    assert list(new["obs"].values) == [20, 21, 22]
    z = (new["y"] - new["mu"]).values / posterior["sd"].values[..., None]
    assert abs(z.mean()) < 4 / z.size**0.5
    assert abs(z.std() - 1.0) < 4 / (2 * z.size) ** 0.5


def test_moments_by_name_compile_nothing(approx, no_compilation):
    assert isinstance(approx, NGVIApproximation)
    assert approx.mean_data["beta"].dims == ("term",)
    assert set(approx.mean_data.data_vars) == set(approx.std_data.data_vars) == {"beta", "sd_log__"}
    np.testing.assert_array_equal(approx.std_data["beta"], approx.sd_flat[approx.layout.variables[0].where])
    with pytest.raises(AssertionError, match="a graph was compiled"):
        approx.mean.eval()


def test_state_and_draws_generate_no_code(approx, no_machine_code):
    state = approx.state
    assert set(state.mean.data_vars) == set(state.std.data_vars) == {"beta", "sd"}
    assert approx.sample(20, random_seed=1)["posterior"]["mu"].shape == (4, 5, N)
    with pytest.raises(AssertionError, match="machine code was generated"):
        pytensor.function([], pytensor.shared(np.ones(3)).sum(), mode="NUMBA")()


def test_state_is_that_of_many_draws(approx):
    """The standard deviation of sd itself, not the exponential of that of its logarithm."""
    draws = approx.sample(20_000, random_seed=3, log_p=False)["posterior"]
    for name in ("beta", "sd"):
        spread = draws[name].std(("chain", "draw"))
        # 4,000 draws behind the state: five times the error of a standard deviation, 1 / (2 * 4,000)^.5, and the
        # tails of sd are heavier than a normal's.
        np.testing.assert_allclose(approx.state.std[name], spread, rtol=0.08)
    np.testing.assert_allclose(approx.state.mean["sd"], np.exp(approx.mean_data["sd_log__"]))


# --- chains and variables ---------------------------------------------------------------------------------------------


def test_chains_are_the_same_draws_in_rows(approx):
    """Draws of a chain follow each other, statistics stay with their draws."""
    flat = approx.sample(12, chains=1, random_seed=1, log_p=True)
    rows = approx.sample(10, chains=3, random_seed=1, log_p=True)
    assert dict(rows["posterior"].sizes) == {"chain": 3, "draw": 4, "term": 2, "obs": N}
    for group in ("posterior", "sample_stats"):
        assert set(rows[group]) == set(flat[group])
        for name, values in flat[group].data_vars.items():
            np.testing.assert_array_equal(rows[group][name], values.values.reshape(3, 4, *values.shape[2:]))
    trace = approx.sample(12, chains=3, random_seed=1, return_inferencedata=False)
    assert (trace.nchains, len(trace)) == (3, 4)


@pytest.mark.parametrize(
    ("var_names", "options", "kept"),
    [
        ("mu", {}, ["mu"]),
        (["sd", "beta"], {}, ["beta", "sd"]),
        (["sd"], {"include_transformed": True}, ["sd", "sd_log__"]),
        ("sd_log__", {}, ["sd_log__"]),
    ],
    ids=str,
)
def test_only_named_variables_are_evaluated_and_kept(approx, var_names, options, kept):
    everything = approx.sample(5, random_seed=1, include_transformed=True)["posterior"]
    some = approx.sample(5, var_names=var_names, random_seed=1, **options)["posterior"]
    assert sorted(some.data_vars) == kept
    for name in kept:
        xr.testing.assert_identical(some[name], everything[name])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"var_names": ["sd", "bta"]},
            r"var_names has 'bta', which .*: did you mean 'beta'\? Valid: 'beta', 'sd', 'mu'",
        ),
        ({"var_names": []}, "name at least one variable"),
        ({"log_likelihood": "z"}, "log_likelihood has 'z', which the model has not"),
        ({"chains": 0}, "chains should be a whole number of at least 1; got 0"),
        ({"chains": 1.5}, "chains should be a whole number"),
    ],
    ids=str,
)
def test_chains_and_names_that_make_no_sense(approx, options, message):
    with pytest.raises(ValueError, match=message):
        approx.sample(5, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tune": 1_000}, "does not take tune=1000: .* no sampler to set. Leave it out"),
        ({"target_accept": 0.9, "return_inferencedata": False}, "does not take target_accept=0.9"),
        ({"seed": 1}, "did you mean 'random_seed'"),
    ],
    ids=str,
)
def test_options_of_samplers_are_refused(approx, options, message):
    with pytest.raises(TypeError, match=message):
        approx.sample(5, **options)


def test_a_summary_has_the_same_numbers_again(approx):
    assert approx.summary(400, khat_draws=None).table.equals(approx.summary(400, khat_draws=None).table)


READER = """
import sys
sys.modules["pymc_ngvi"] = None
import arviz as az, xarray as xr
for read in (az.from_netcdf, xr.open_datatree):
    tree = read(sys.argv[1])
    assert dict(tree["posterior"].sizes) == {"chain": 4, "draw": 250, "term": 2, "obs": 40}, tree
    assert list(tree["posterior"]["term"].values) == ["level", "slope"]
    assert tree["observed_data"]["y"].shape == (40,)
    assert (az.summary(tree, var_names=["beta", "sd"], round_to=4)["r_hat"] < 1.03).all()
    assert {"status", "elbo"} <= tree["posterior"].attrs.keys()
"""


def test_arviz_reads_a_file_without_this_package(approx, tmp_path):
    approx.save(tmp_path / "fit.nc", random_seed=1)
    command = [sys.executable, "-W", "error", "-c", READER, str(tmp_path / "fit.nc")]
    assert subprocess.run(command, capture_output=True, text=True, check=False).stderr == ""


def test_trees_say_how_the_fit_ended(approx, tmp_path):
    """In attributes that netCDF and JSON can hold."""
    tree = approx.sample(5, chains=2)
    expected = {"status": "converged", "family": "full", "elbo": approx.elbo.value, "elbo_se": approx.elbo.se}
    expected |= {"gap": approx.gap, "verdict": "not judged"}
    assert tree.attrs == expected
    assert expected.items() <= tree["posterior"].attrs.items()
    assert json.loads(json.dumps(tree["posterior"].attrs)) == tree["posterior"].attrs
    approx.save(tmp_path / "fit.nc", draws=5)
    assert expected.items() <= xr.open_datatree(tmp_path / "fit.nc").attrs.items()


def test_what_is_not_known_is_no_attribute(approx, monkeypatch):
    unknown = dataclasses.replace(approx.record, gap=np.nan, elbo=Elbo(-np.inf, np.inf))
    monkeypatch.setattr(approx, "record", unknown)
    assert approx.sample(2).attrs == {"status": "converged", "family": "full", "verdict": "not judged"}


# --- covariances of any variable --------------------------------------------------------------------------------------


def test_covariance_of_an_unknown_name(approx):
    with pytest.raises(ValueError, match=r"No free variable is called 'mu', 'nope'; there are 'beta', 'sd'"):
        approx.cov_of(["beta", "mu", "nope"])


# --- odd shapes -------------------------------------------------------------------------------------------------------


def test_draws_of_wrong_length_along_a_dimension_keep_their_values():
    """A Deterministic that does not have the length of its coords, as in Bambi's models of an intercept alone."""
    with pm.Model(coords={"obs": range(5)}):
        pm.Deterministic("mu", pm.Normal("level")[None], dims="obs")
        approx = pm.fit(0, method="ngvi", **QUIET)
    posterior = approx.sample(3)["posterior"]
    assert posterior["mu"].dims == ("chain", "draw", "mu_dim_0")
    np.testing.assert_array_equal(posterior["mu"][..., 0], posterior["level"])
    chosen = approx.sample(3, dims={"mu": ["one"]})["posterior"]
    assert chosen["mu"].dims == ("chain", "draw", "one")


KINDS = {
    "FullPrecisionState": {"update": "cholesky_precision"},
    "BlockState": {"family": "block", "blocks": [["beta[1]", "sd"]]},
    "DiagonalState": {"family": "diagonal", "step": "decay"},
}


@pytest.mark.parametrize("state", KINDS)
def test_every_kind_of_state_that_a_fit_ends_in_gives_all_of_it(state, model, approx, python_mode):
    """Draws, moments, nodes, copies, going on: with the figures of the state, near those of the default fit."""
    with model, warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        other = pm.fit(method="ngvi", random_seed=1, **KINDS[state], **QUIET)
    q = other.q
    assert type(q).__name__ == state
    # Means agree, whatever correlations are left out.
    np.testing.assert_array_less(np.abs(other.mean_flat - approx.mean_flat), 0.25 * approx.sd_flat)
    tree = other.sample(2_000, chains=1, random_seed=1, include_transformed=True)["posterior"].isel(chain=0)
    flat = np.column_stack([tree["beta"], tree["sd_log__"]])
    apart = np.linalg.solve(np.linalg.cholesky(q.cov()), (flat - q.mean()).T)
    np.testing.assert_allclose(apart.mean(axis=1), 0.0, atol=4.5 / 2_000**0.5)
    np.testing.assert_allclose(np.cov(apart), np.eye(3), atol=4.5 * (2 / 2_000) ** 0.5)
    np.testing.assert_allclose(tree["mu"], flat[:, :1] + flat[:, 1:2] * X, rtol=1e-12)
    for node, expected in ((other.mean, q.mean()), (other.std, q.sd()), (other.cov, q.cov())):
        np.testing.assert_allclose(node.eval(), expected, rtol=1e-12)
    np.testing.assert_allclose(other.cov_of(["beta", "sd"]), q.cov(), rtol=1e-12)
    np.testing.assert_array_equal(other.std_data["beta"], q.sd()[:2])
    nodes = other.sample_node(model["beta"], size=2_000).eval()
    np.testing.assert_array_less(np.abs(nodes.mean(axis=0) - q.mean()[:2]), 4.5 * q.sd()[:2] / 2_000**0.5)
    assert other.khat(500, random_seed=1) < 0.7
    copy = cloudpickle.loads(cloudpickle.dumps(other))
    np.testing.assert_array_equal(copy.draw_flat(3, 1), other.draw_flat(3, 1))
    assert type(copy.q).__name__ == state
