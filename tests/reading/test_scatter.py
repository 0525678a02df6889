"""Adding up by group: equal to PyTensor's own for every form of index, and used where it can be."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

from pymc_ngvi.graphs.backends import AddByGroup, quick_mode

#: Unsorted, with repetitions, and with a group that has no member.
INDEX = np.array([3, 0, 3, 5, 1, 0, 3])

FORMS = {
    "vector": (lambda x, y: pt.inc_subtensor(x[INDEX], y), (6,), (7,), True),
    "first of two axes": (lambda x, y: pt.inc_subtensor(x[INDEX], y), (6, 2), (7, 2), True),
    "second of two axes": (lambda x, y: pt.inc_subtensor(x[:, INDEX], y), (4, 6), (4, 7), True),
    "middle of three axes": (lambda x, y: pt.inc_subtensor(x[:, INDEX], y), (4, 6, 2), (4, 7, 2), True),
    "beside a scalar": (lambda x, y: pt.inc_subtensor(x[:, INDEX, 1], y), (4, 6, 2), (4, 7), True),
    "whole columns": (lambda x, y: pt.inc_subtensor(x[INDEX, 1], y), (6, 2), (7,), True),
    "negative": (lambda x, y: pt.inc_subtensor(x[INDEX - 6], y), (6,), (7,), False),
    "set": (lambda x, y: pt.set_subtensor(x[INDEX], y), (6,), (7,), False),
    "two vectors": (lambda x, y: pt.inc_subtensor(x[INDEX, INDEX[::-1] % 2], y), (6, 2), (7,), False),
    "broadcast": (lambda x, y: pt.inc_subtensor(x[INDEX], y), (6,), (1,), False),
}


@pytest.mark.parametrize("form", list(FORMS))
def test_equals_numpy_add_at(form, rng):
    make, x_shape, y_shape, used = FORMS[form]
    x, y = pt.tensor("x", shape=x_shape), pt.tensor("y", shape=y_shape)
    arguments = rng.standard_normal(x_shape), rng.standard_normal(y_shape)
    before = [a.copy() for a in arguments]
    quick = pytensor.function([x, y], make(x, y), mode=quick_mode())
    plain = pytensor.function([x, y], make(x, y), mode=pytensor.compile.mode.Mode("py", None))
    assert any(isinstance(node.op, AddByGroup) for node in quick.maker.fgraph.apply_nodes) is used
    np.testing.assert_allclose(quick(*arguments), plain(*arguments), rtol=1e-14, atol=1e-15)
    for argument, old in zip(arguments, before, strict=True):
        np.testing.assert_array_equal(argument, old)


def test_an_index_that_is_data_is_left_alone(rng):
    """It may change with ``pm.set_data``."""
    x, index = pt.vector("x", shape=(6,)), pytensor.shared(INDEX, "index")
    function = pytensor.function([x], pt.inc_subtensor(x[index], 1.0), mode=quick_mode())
    index.set_value(np.array([2, 2]))
    np.testing.assert_array_equal(function(np.zeros(6)), [0, 0, 2, 0, 0, 0])
