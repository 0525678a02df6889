"""Blocks of coordinates by name."""

import numpy as np
import pymc as pm
import pytest

from pymc_ngvi.density import Layout
from pymc_ngvi.fitting.problem import block_labels


@pytest.fixture(scope="module")
def layout():
    """Coordinates: a 0, b 1..3, sd 4, z 5..8."""
    with pm.Model() as model:
        pm.Normal("a")
        pm.Normal("b", shape=3)
        pm.HalfNormal("sd")
        pm.Normal("z", shape=(2, 2))
    return Layout.from_model(model, model.initial_point())


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        (None, [0, 1, 1, 1, 2, 3, 3, 3, 3]),
        ([], [0, 1, 1, 1, 2, 3, 3, 3, 3]),
        ([["sd", "a"]], [0, 1, 1, 1, 0, 2, 2, 2, 2]),
        ([["sd_log__", "b"]], [0, 1, 1, 1, 1, 2, 2, 2, 2]),
        ([["z[0, 1]", "b[2]"]], [0, 1, 1, 2, 3, 4, 2, 4, 4]),
        ([["z[0,1]", "b[2]"]], [0, 1, 1, 2, 3, 4, 2, 4, 4]),
        ((("z", "sd"), ("b[0]",), {"b[1]", "a"}), [0, 1, 0, 2, 3, 3, 3, 3, 3]),
        ([["b", "b[1]"]], [0, 1, 1, 1, 2, 3, 3, 3, 3]),
        ([["a", "b", "sd", "z"]], [0] * 9),
    ],
)
def test_block_labels(layout, blocks, expected):
    np.testing.assert_array_equal(block_labels(layout, blocks), expected)


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ("ab", r"sequence of sequences of names.*blocks is 'ab'"),
        (["a", "b"], r"sequence of sequences.*blocks\[0\] is 'a'"),
        (3, r"sequence of sequences.*blocks is 3"),
        ([["a"], 3], r"blocks\[1\] is 3"),
        ([["a", 1]], r"in blocks\[0\] there is 1, no name"),
        ([["a"], []], r"blocks\[1\] is empty"),
        ([["a", "zz"]], r"'zz', which is no free variable: did you mean 'z'\? Valid: 'a', 'b', 'sd_log__', 'z', 'sd'"),
        ([["w[0]"]], r"'w\[0\]', which is no free variable"),
        (
            [["b[3]"]],
            r"'b\[3\]', which is no coordinate of 'b': .* shape \(3,\), coordinates from 'b\[0\]' to 'b\[2\]'",
        ),
        ([["b[-1]"]], r"'b\[-1\]', which is no coordinate"),
        ([["b[x]"]], r"'b\[x\]', which is no coordinate"),
        ([["b[0"]], r"'b\[0', which is no coordinate"),
        ([["z[0]"]], r"no coordinate of 'z': .* shape \(2, 2\), coordinates from 'z\[0, 0\]' to 'z\[1, 1\]'"),
        ([["sd[0]"]], r"no coordinate of 'sd': its value 'sd_log__' has shape \(\)\.$"),
        ([["a"], ["b", "a"]], r"blocks\[0\] = \['a'\] and blocks\[1\] = \['b', 'a'\] share 'a'"),
        ([["b[1]", "a"], ["b"]], r"share 'b\[1\]'; each coordinate should be in one block"),
        ([["sd"], ["sd_log__"]], r"share 'sd_log__'"),
    ],
)
def test_blocks_that_make_no_partition(layout, blocks, message):
    with pytest.raises(ValueError, match=message):
        block_labels(layout, blocks)


def test_variables_without_entries_have_no_block():
    with pm.Model() as model:
        pm.Normal("nothing", shape=0)
        pm.Normal("a", shape=2)
    layout = Layout.from_model(model, model.initial_point())
    np.testing.assert_array_equal(block_labels(layout, [["nothing"]]), [0, 0])
