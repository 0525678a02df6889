"""Constrained values and Deterministics: PyMC's own, for all draws at once, with the data of the moment."""

import pickle

import cloudpickle
import models
import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest

from pymc.pytensorf import compile as pymc_compile
from pytensor.compile.mode import Mode

from pymc_ngvi import LogDensity
from pymc_ngvi.density import on_draws, without_c
from pymc_ngvi.density.constrain import Constrainer


def with_deterministics():
    model = models.transformed()
    with model:
        pm.Deterministic("product", model["scale"] * model["edge"], dims="row")
        pm.Deterministic("cut", pt.concatenate([model["part"][:1], model["beta"][0]]).sum())
        pm.Deterministic("fixed", pt.as_tensor([1.5, 2.5]))
    return model


def pymc_values(model, density, theta):
    """Evaluate the same names by PyMC's own graph, draw by draw."""
    with model, without_c():
        function = pymc_compile(
            model.value_vars,
            model.replace_rvs_by_values(model.unobserved_value_vars),
            mode=Mode("py", "fast_compile"),
            on_unused_input="ignore",
        )
        rows = [function(*density.layout.unflatten(row).values()) for row in theta]
    names = [v.name for v in model.unobserved_value_vars]
    return {name: np.stack([row[i] for row in rows]) for i, name in enumerate(names)}


@pytest.fixture(scope="module")
def density():
    return LogDensity(with_deterministics(), "quick")


@pytest.fixture(scope="module")
def constrainer(density):
    return Constrainer(density)


@pytest.mark.parametrize("n_draws", [1, 2, 3, 7])
def test_equals_pymc(density, constrainer, monkeypatch, n_draws):
    monkeypatch.setattr(on_draws, "_MAX_BATCH", 3)
    theta = models.random_points(density, n_draws, 1)
    values, expected = constrainer(theta), pymc_values(density.model, density, theta)
    assert list(values) == list(expected)
    for name, value in values.items():
        assert value.shape == expected[name].shape
        np.testing.assert_allclose(value, expected[name], rtol=1e-12, err_msg=name)


def test_order_of_unequal_draws(constrainer, density):
    theta = models.random_points(density, 5, 2)
    values = constrainer(theta)
    backwards = constrainer(theta[::-1])
    for name in values:
        np.testing.assert_allclose(backwards[name][::-1], values[name], rtol=1e-13, err_msg=name)


def test_without_deterministics(density):
    theta = models.random_points(density, 2, 3)
    names = list(Constrainer(density, deterministics=False)(theta))
    assert {"product", "cut", "fixed"}.isdisjoint(names)
    assert {"scale", "scale_log__", "part", "z"} <= set(names)


@pytest.mark.parametrize("name", ["scan", "lkj", "zero_sum", "imputed", "zero_size"])
def test_features_equal_pymc(name):
    density = LogDensity(models.FEATURES[name](), "quick")
    theta = models.random_points(density, 2, 4)
    values, expected = Constrainer(density)(theta), pymc_values(density.model, density, theta)
    assert list(values) == list(expected)
    for key, value in values.items():
        np.testing.assert_allclose(value, expected[key], rtol=1e-11, atol=1e-12, err_msg=key)


def model_of_data():
    with pm.Model() as model:
        x = pm.Data("x", np.array([1.0, 2.0]))
        scale = pm.HalfNormal("scale", 1.3)
        pm.Deterministic("line", scale * x)
    return model


def test_follows_the_data_also_when_they_grow(monkeypatch):
    monkeypatch.setattr(on_draws, "_BATCH_ELEMENTS", 8)
    model = model_of_data()
    constrainer, theta = Constrainer(LogDensity(model, "quick")), np.log(np.arange(1.0, 7.0))[:, None]
    for x in ([1.0, 2.0], [3.0, -1.0], np.arange(20.0), [5.0]):
        pm.set_data({"x": np.array(x)}, model=model)
        expected = np.arange(1.0, 7.0)[:, None] * np.array(x)
        np.testing.assert_allclose(constrainer(theta)["line"], expected, rtol=1e-14)


def random_deterministic():
    with pm.Model() as model:
        scale = pm.HalfNormal("scale", 1.3)
        pm.Deterministic("noise", pm.Normal.dist(0.0, scale, shape=3))
        pm.Deterministic("free_noise", pm.Normal.dist(shape=2))
    return model


def test_random_deterministics_differ_between_draws_and_repeat_by_seed():
    constrainer, theta = Constrainer(LogDensity(random_deterministic(), "quick")), np.zeros((4, 1))
    first, again = constrainer(theta, random_seed=1), constrainer(theta, random_seed=1)
    other = constrainer(theta, random_seed=2)
    for name in ("noise", "free_noise"):
        assert len(np.unique(first[name])) == first[name].size
        np.testing.assert_array_equal(first[name], again[name])
        assert (first[name] != other[name]).all()
    large = constrainer(theta + 20.0, random_seed=1)
    np.testing.assert_allclose(large["noise"], np.exp(20.0) * first["noise"], rtol=1e-9)


def test_float32_models_give_float32_draws():
    with pytensor.config.change_flags(floatX="float32"):
        density = LogDensity(with_deterministics(), "quick")
        values = Constrainer(density)(models.random_points(density, 2, 5))
    assert values["scale"].dtype == values["product"].dtype == values["z"].dtype == np.float32
    assert values["scale_log__"].dtype == np.float32


def test_overflow_gives_no_warning(density, constrainer):
    values = constrainer(np.full((1, density.n_dim), 1000.0))
    assert np.isinf(values["scale"]).all()


def test_survives_a_pickle(density, constrainer):
    theta = models.random_points(density, 3, 6)
    restored = pickle.loads(cloudpickle.dumps(constrainer))
    for name, value in constrainer(theta).items():
        np.testing.assert_array_equal(restored(theta)[name], value)


def test_what_is_added_to_a_model_after_a_fit_is_left_to_predictions():
    """As the values of a Gaussian process elsewhere: they are no part of what was fitted."""
    with pm.Model() as model:
        x = pm.Normal("x", 0.0, 1.0)
        pm.Deterministic("twice", 2.0 * x)
        pm.Normal("y", x, 1.0, observed=1.0)
    density = LogDensity(model)
    constrainer = Constrainer(density)
    before = constrainer(np.array([[0.3], [0.5]]))
    with model:
        new = pm.LogNormal("new", x, 1.0)
        pm.Deterministic("of_new", 2.0 * new)
        pm.Deterministic("more", 3.0 * x)
    after = Constrainer(density)(np.array([[0.3], [0.5]]))
    assert set(before) == {"x", "twice"}
    assert set(after) == {"x", "twice", "more"}
    np.testing.assert_allclose(after["more"], [0.9, 1.5])
