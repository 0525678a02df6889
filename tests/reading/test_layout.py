"""The layout of the flat vector."""

import models
import numpy as np
import pymc as pm
import pytest

from pymc_ngvi.density import Layout


@pytest.fixture(scope="module")
def layout():
    model = models.transformed()
    return Layout.from_model(model, model.initial_point())


@pytest.mark.parametrize("lead", [(), (4,), (2, 0), (2, 3)])
def test_unflatten_is_the_inverse_of_flatten(layout, lead):
    vectors = np.arange(float(np.prod((*lead, layout.n_dim)))).reshape((*lead, layout.n_dim))
    parts = layout.unflatten(vectors)
    assert list(parts) == [v.value_name for v in layout.variables]
    for v in layout.variables:
        assert parts[v.value_name].shape == (*lead, *v.shape)
    for index in np.ndindex(*lead):
        point = {name: part[index] for name, part in parts.items()}
        np.testing.assert_array_equal(layout.flatten(point), vectors[index])


def test_flatten_goes_by_name_in_c_order(layout):
    point = layout.unflatten(np.zeros(layout.n_dim))
    point["z"] = np.arange(6).reshape(2, 3)
    point["edge_interval__"] = 9
    backwards = dict(reversed(list(point.items())))
    np.testing.assert_array_equal(layout.flatten(backwards), [0, 1, 2, 3, 4, 5, 0, 0, 0, 0, 9, 0, 0])


def test_flatten_needs_every_variable(layout):
    with pytest.raises(KeyError, match="z"):
        layout.flatten({})


def test_labels(layout):
    labels = [layout.label(i) for i in range(layout.n_dim)]
    assert labels[:6] == ["z[0, 0]", "z[0, 1]", "z[0, 2]", "z[1, 0]", "z[1, 1]", "z[1, 2]"]
    assert labels[6:8] == ["scale_log__[0]", "scale_log__[1]"]
    assert labels[10:] == ["edge_interval__", "beta_logodds__[0, 0]", "beta_logodds__[0, 1]"]
    assert len(set(labels)) == layout.n_dim
    for outside in (-1, layout.n_dim):
        with pytest.raises(IndexError, match=r"0\.\.12"):
            layout.label(outside)


def test_labels_pass_over_empty_variables():
    model = models.zero_size()
    layout = Layout.from_model(model, model.initial_point())
    assert [layout.label(i) for i in range(layout.n_dim)] == ["a", "b_log__[0, 0]", "b_log__[1, 0]"]


def test_sizes_and_slices_are_contiguous(layout):
    ends = [0]
    for v in layout.variables:
        assert v.where.start == ends[-1]
        assert v.size == int(np.prod(v.shape, dtype=int))
        ends.append(v.where.stop)
    assert ends[-1] == layout.n_dim == 13


def test_dims_are_kept_where_the_transform_keeps_the_shape(layout):
    dims = {v.name: v.dims for v in layout.variables}
    # "part" has dim "column" of length 3, but 2 unconstrained entries; "edge" and "beta" were given none.
    assert dims == {"z": ("row", "column"), "scale": ("row",), "part": None, "edge": None, "beta": None}


def test_to_dataset(layout):
    data = layout.to_dataset(np.arange(13.0))
    assert float(data["z"].sel(row="b", column=20)) == 4.0
    assert float(data["scale_log__"].sel(row="b")) == 7.0
    np.testing.assert_array_equal(data["part_simplex__"], [8.0, 9.0])
    assert data["edge_interval__"].shape == ()


def test_dims_without_coords_count_from_zero():
    with pm.Model() as model:
        data = pm.Data("data", np.zeros(3), dims="case")
        pm.Normal("x", data, dims="case")
    layout = Layout.from_model(model, model.initial_point())
    assert layout.variables[0].dims == ("case",)
    np.testing.assert_array_equal(layout.to_dataset(np.zeros(3))["x"].coords["case"], [0, 1, 2])


def test_a_model_without_variables_has_no_dimensions():
    layout = Layout((), {})
    assert layout.n_dim == 0
    assert layout.flatten({}).shape == (0,)
