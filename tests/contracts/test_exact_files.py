"""Exact posteriors in files and pickles: the same bits, of the data that were fitted, and nothing compiled in vain."""

import contextlib
import copy
import functools
import pickle

import cloudpickle
import numpy as np
import pymc as pm
import pytest
import xarray as xr

from exact import GROUP, MODELS, fit, one
from numpy.testing import assert_allclose, assert_array_equal

from pymc_ngvi import load
from pymc_ngvi.density.info import DataSnapshot
from pymc_ngvi.marginal import on_model
from pymc_ngvi.results.persistence import sealed

pytestmark = pytest.mark.usefixtures("_compiled_once")


@functools.cache
def model_of(name):
    return MODELS[name]()


@functools.cache
def fitted(name):
    """Return a fit that no test changes."""
    return fit(model_of(name))


@functools.cache
def coarse():
    """Return one whose Gaussian fit can go on; not to be changed either."""
    return fit(model_of("one"), tol=2.0)


@pytest.fixture
def file(tmp_path):
    fitted("one").save(tmp_path / "exact.nc")
    return tmp_path / "exact.nc"


def elsewhere(approx):
    """Return what is unpickled."""
    return pickle.loads(cloudpickle.dumps(approx))


def assert_same(left, right):
    """Assert that two exact posteriors have the same bits."""
    n = int(1.1 * left._state.effective_size)  # more than the pool is worth
    for size in (50, n):
        assert_array_equal(left.draw_flat(size, random_seed=3), right.draw_flat(size, random_seed=3))
    for moment in ("mean", "sd", "cov"):
        assert_array_equal(getattr(left._distribution, moment)(), getattr(right._distribution, moment)())
    assert repr(left._state.checks) == repr(right._state.checks)  # NaN is the same as NaN
    assert left._state.log_normaliser == right._state.log_normaliser
    assert left.khat() == right.khat()
    assert left.record.posterior == right.record.posterior
    assert_array_equal(left.gaussian.draw_flat(5, random_seed=1), right.gaussian.draw_flat(5, random_seed=1))
    assert left.gaussian.record.elbo == right.gaussian.record.elbo


# --- round trips ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_a_file_gives_the_same_bits(name, tmp_path):
    approx = fitted(name)
    approx.save(tmp_path / "exact.nc")
    again = load(tmp_path / "exact.nc", model_of(name))
    assert again._state is not approx._state
    assert_same(approx, again)


def test_a_loaded_one_is_saved_without_the_fit(file, tmp_path):
    load(file, model_of("one")).save(tmp_path / "again.nc", resumable=False)
    last = load(tmp_path / "again.nc", model_of("one"))
    assert_same(fitted("one"), last)
    with pytest.raises(RuntimeError, match="no fit to continue"):
        last.refine(1)


def test_generators_go_on():
    approx = copy.deepcopy(fitted("one"))
    again = load(approx.to_datatree(), model_of("one"))
    for part in (lambda a: a, lambda a: a.gaussian):
        assert_array_equal(part(approx).draw_flat(3), part(again).draw_flat(3))


@pytest.mark.parametrize("name", MODELS)
def test_a_pickle_gives_the_same_bits(name):
    approx = fitted(name)
    again = elsewhere(approx)
    assert again._state is not approx._state
    assert_same(approx, again)


def test_the_fit_goes_on():
    approx = fit(model_of("one"), tol=2.0)
    before = approx.mean_flat
    loaded, unpickled = load(approx.to_datatree(), model_of("one")), elsewhere(approx)
    for each in (approx, loaded, unpickled):
        assert each.refine(50, progressbar=False, tol=0.02) is each
    assert loaded.n_iterations > coarse().n_iterations
    assert not np.array_equal(loaded.mean_flat, before)
    assert_array_equal(loaded._state.gaussian.mean(), loaded.gaussian.mean_flat)
    assert_same(approx, loaded)
    assert_allclose(unpickled.mean_flat, approx.mean_flat, rtol=1e-6)  # log p is built anew, and rounds otherwise


def test_a_gaussian_that_has_gone_on_alone(tmp_path):
    """What the posterior began from, and what the fit has come to since."""
    approx = elsewhere(coarse())
    approx.gaussian.refine(50, progressbar=False, tol=0.02)
    again = load(approx.to_datatree(), model_of("one"))
    assert_array_equal(again.gaussian.mean_flat, approx.gaussian.mean_flat)
    assert_array_equal(again._state.gaussian.mean(), coarse().gaussian.mean_flat)
    assert not np.array_equal(again._state.gaussian.mean(), again.gaussian.mean_flat)
    assert_same(approx, again)


@pytest.mark.parametrize("name", ["one", "two"])
def test_moments_of_a_file_compile_nothing(name, monkeypatch):
    tree = fitted(name).to_datatree()

    def refuse(*args):
        raise AssertionError("terms were compiled")

    monkeypatch.setattr(on_model, "RowTerms", refuse)
    again = load(tree, model_of(name))
    assert_array_equal(again.mean_flat, fitted(name).mean_flat)
    assert again._state.checks == fitted(name)._state.checks
    assert np.isfinite(again.std_data["scale_log__"]).all()
    again.to_datatree()
    with pytest.raises(AssertionError, match="terms were compiled"):
        again.sample(2)


# --- data, and models -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loaded", [False, True])
def test_draws_are_of_the_data_that_were_fitted(loaded):
    """Also where they are first made after pm.set_data."""
    model, n = one(), 2_500
    approx = fit(model)
    expected = approx.draw_flat(n, random_seed=1)
    if loaded:
        approx = load(approx.to_datatree(), model)
    new = np.array([0, 0, 1])
    with model:
        pm.set_data({"member": new})
    assert_array_equal(approx.draw_flat(n, random_seed=1), expected)
    assert_array_equal(approx._distribution.cov().shape, (10, 10))
    assert model["member"].get_value() is not GROUP
    assert_array_equal(model["member"].get_value(), new)
    with pytest.warns(UserWarning, match="The data 'member' were changed after the fit"):
        assert "log_p" not in approx.sample(5, log_p=True).sample_stats
    assert "The data 'member' were changed" in str(approx.summary(100))
    assert_array_equal(model["member"].get_value(), new)
    for call in (approx.refine, approx.khat, approx.diagnose, approx.to_datatree)[: 3 + (not loaded)]:
        with pytest.raises(ValueError, match="The data 'member' were changed after the fit"):
            call()


def test_a_file_on_a_model_with_other_data(file):
    model = one()
    with model:
        pm.set_data({"member": GROUP[::-1].copy()})
    with pytest.warns(UserWarning, match="fitted to other data: 'member' differ"):
        approx = load(file, model)
    assert_array_equal(approx.mean_flat, fitted("one").mean_flat)
    with pytest.raises(ValueError, match="The data 'member' are not those of the fit"):
        approx.sample(5)
    with model:
        pm.set_data({"member": GROUP.copy()})
    expected = fitted("one").draw_flat(30, random_seed=1)
    assert_array_equal(approx.draw_flat(30, random_seed=1), expected)
    with model:
        pm.set_data({"member": GROUP[::-1].copy()})
    assert_array_equal(approx.draw_flat(30, random_seed=1), expected)


@pytest.mark.parametrize("name", ["one", "plain"])
def test_another_prior_is_refused(name):
    with pm.Model() as model:
        if name == "one":
            model = one(sd=1.1)
        else:
            rate = pm.Gamma("rate", 2.0, 1.1)
            shape = pm.HalfNormal("shape", 2.0)
            pm.NegativeBinomial("y", mu=rate, alpha=shape, observed=[0, 1, 0, 5, 2])
    approx = load(fitted(name).to_datatree(), model)
    with pytest.raises(ValueError, match="No draws can be made on this model: at the mean of the Gaussian fit its log"):
        approx.draw_flat(10_000)


def test_changed_data_are_put_back_where_an_evaluation_fails():
    """And lengths of dims with them."""
    with pm.Model() as model:
        model.add_coord("row", length=3)
        pm.Data("x", np.zeros(3), dims="row")
    data = DataSnapshot(model)
    with model:
        pm.set_data({"x": np.ones(2)}, coords={"row": [0, 1]})
    assert data.changed() == ["x"]
    with contextlib.suppress(RuntimeError), data.restored():
        assert_array_equal(model["x"].get_value(), np.zeros(3))
        assert model.dim_lengths["row"].eval() == 3
        assert not data.changed()
        raise RuntimeError
    assert_array_equal(model["x"].get_value(), np.ones(2))
    assert model.dim_lengths["row"].eval() == 2


# --- files that are none ----------------------------------------------------------------------------------------------

ARRAYS = {
    "q.content.pool.g": "of the pool",
    "q.content.pool.log_marginal": "of the pool",
    "q.content.pairs.skew": "integrals",
    "q.content.forest.globals_": "another dimension",
    "q.content.moments.0": "another dimension",
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_that_do_not_go_together(name):
    tree = fitted("two").to_datatree()
    group = tree["approximation"].to_dataset()
    if name in group:
        short = group[name].values[:-1]
        changed = group.drop_vars(name).assign({name: (("u", "v")[: short.ndim], short)})
        tree["approximation"] = xr.DataTree(sealed(changed))
    with pytest.raises(ValueError, match=f"is damaged: .*{ARRAYS[name]}"):
        load(tree, model_of("two"))
