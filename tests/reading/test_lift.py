"""Lifting elements of variables to rows: what was lifted is kept, and given up, as a whole."""

import numpy as np
import pytensor.tensor as pt

from pymc_ngvi.ops.facts import Facts
from pymc_ngvi.reading.lift import Lift, Source

WEIGHTS = np.array([2.0, 3.0, 5.0])
FIRST, SECOND = np.array([0, 2]), np.array([1, 1])


def lifted():
    """Return predictors times weights, a lift of these, and what two of their elements were lifted to."""
    predictors = pt.vector("predictors", shape=(3,))
    var = pt.exp(predictors) * pt.constant(WEIGHTS)
    lift = Lift(Facts(var, predictors), predictors)
    return lift, var, lift.of(var, FIRST)


def test_a_copy_knows_what_was_lifted_and_goes_on_by_itself():
    lift, var, value = lifted()
    copy = lift.copy()
    assert copy.of(var, FIRST) is value
    assert copy.slots.keys() == lift.slots.keys()
    assert list(copy.sources.values()) == list(lift.sources.values())
    copy.of(var, SECOND)
    assert (len(copy.slots), len(copy.data), len(copy.sources)) == (2, 2, 2)
    assert (len(lift.slots), len(lift.data), len(lift.sources)) == (1, 1, 1)


def test_what_was_lifted_since_is_forgotten_and_what_was_before_is_not():
    lift, var, value = lifted()
    before = lift.copy()
    lift.of(var, SECOND)
    lift.back_to(before)
    assert lift.of(var, FIRST) is value
    assert len(lift.slots) == 1
    [(given, data)] = lift.data.items()
    np.testing.assert_array_equal(data, [WEIGHTS[FIRST]])
    assert lift.sources.keys() == {given}
    source = lift.sources[given]
    assert isinstance(source, Source)
    np.testing.assert_array_equal(source.elements, FIRST)
