"""The layout of the flat vector."""

import models
import numpy as np
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


def test_labels(layout):
    labels = [layout.label(i) for i in range(layout.n_dim)]
    assert labels[:6] == ["z[0, 0]", "z[0, 1]", "z[0, 2]", "z[1, 0]", "z[1, 1]", "z[1, 2]"]
    assert labels[6:8] == ["scale_log__[0]", "scale_log__[1]"]
    assert labels[10:] == ["edge_interval__", "beta_logodds__[0, 0]", "beta_logodds__[0, 1]"]
    assert len(set(labels)) == layout.n_dim
    for outside in (-1, layout.n_dim):
        with pytest.raises(IndexError, match=r"0\.\.12"):
            layout.label(outside)


def test_dims_are_kept_where_the_transform_keeps_the_shape(layout):
    dims = {v.name: v.dims for v in layout.variables}
    # "part" has dim "column" of length 3, but 2 unconstrained entries; "edge" and "beta" were given none.
    assert dims == {"z": ("row", "column"), "scale": ("row",), "part": None, "edge": None, "beta": None}
