"""The sparsity of a model in words and as a table."""

import numpy as np
import pytest

from scipy import sparse

from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.families.gaussian import BlockStructure
from pymc_ngvi.families.sparse import SparseStructure, find_blocks
from pymc_ngvi.families.sparse import structure_of as structure_of_form
from pymc_ngvi.graphs.layout import Layout, Variable
from pymc_ngvi.results.structure import ModelStructure


def layout_of(**shapes):
    """Return a layout with variables of these value names and shapes."""
    variables, start = [], 0
    for name, shape in shapes.items():
        shape = shape if isinstance(shape, tuple) else (shape,)
        stop = start + int(np.prod(shape))
        variables.append(Variable(name.removesuffix("_log__"), name, shape, slice(start, stop), None))
        start = stop
    return Layout(tuple(variables), {})


def with_globals(n_globals, local):
    n = local.shape[0]
    corner, beside = (sparse.coo_array(np.ones((m, n_globals))) for m in (n_globals, n))
    return sparse.block_array([[corner, None], [beside, local]]) if n_globals else local


def groups(n, size=1):
    return sparse.kron(sparse.eye_array(n), np.ones((size, size)))


def chain(n):
    return sparse.diags_array([np.ones(n), np.ones(n - 1)], offsets=[0, -1])


def grid(side):
    return sparse.kron(chain(side), sparse.eye_array(side)) + sparse.kron(sparse.eye_array(side), chain(side))


def block_diagonal(*parts):
    return sparse.block_diag([sparse.coo_array(p) for p in parts])


#: A path of an observation error beside each coordinate of a chain.
ERRORS = sparse.block_array([[chain(200), None], [sparse.eye_array(200), sparse.eye_array(200)]])

CASES = {
    "intercepts": (
        {"beta": 5, "s_log__": (), "b": 2031},
        with_globals(6, groups(2031)),
        "6 global parameters (`beta` 5, `s_log__`); 2,031 independent blocks of size 1 from `b`.",
    ),
    "slopes": (
        {"beta": 5, "chol": 3, "z": (59, 2)},
        with_globals(8, groups(59, 2)),
        "8 global parameters (`beta` 5, `chol` 3); 59 independent blocks of size 2 from `z`.",
    ),
    "singular": (
        {"mu": (), "z": 8, "y": 9},
        with_globals(1, block_diagonal(np.ones((8, 8)), np.eye(9))),
        "1 global parameter (`mu`); 1 block of size 8 from `z`; 9 independent blocks of size 1 from `y`.",
    ),
    "several variables in a block": (
        {"mu": (), "a": 40, "b": 40},
        with_globals(1, sparse.kron(np.ones((2, 2)), sparse.eye_array(40))),
        "1 global parameter (`mu`); 40 independent blocks of size 2 from `a`, `b`.",
    ),
    "several sizes": (
        {"mu": (2, 2), "z": 60},
        with_globals(4, block_diagonal(*[np.ones((k, k)) for k in (3, 5, 7, 4, 8, 10, 11, 12)])),
        "4 global parameters (`mu` 4); 8 independent blocks of size 3 to 12 from `z`.",
    ),
    "many kinds of blocks": (
        {"mu": (), **{name: (10,) for name in "abcdefghi"}},
        with_globals(1, groups(90)),
        "1 global parameter (`mu`); 90 independent blocks of size 1 from `a`, `b`, `c`, `d`, `e`, `f`, `g` and 2 more.",
    ),
    "no globals": ({"z": (30, 2)}, groups(30, 2), "30 independent blocks of size 2 from `z`."),
    "coordinates alone": (
        {"beta": 4, "b": 59, "c": 3, "d": ()},
        block_diagonal(with_globals(4, groups(59)), np.eye(4)),
        "4 global parameters (`beta` 4); 59 independent blocks of size 1 from `b`; 3 independent blocks of size 1 from "
        "`c`; 1 block of size 1 from `d`.",
    ),
    "one alone": (
        {"beta": 4, "b": 59, "c": 2},
        block_diagonal(with_globals(4, groups(60)), np.eye(1)),
        "4 global parameters (`beta` 4); 59 independent blocks of size 1 from `b`; 2 independent blocks of size 1 from "
        "`c`.",
    ),
    "chain": (
        {"x": 1000},
        chain(1000),
        "31 global parameters (`x` 31 of 1,000); 32 independent blocks of size 8 to 31 from `x`.",
    ),
    "chain with errors": (
        {"s_log__": (), "x": 200, "e": 200},
        with_globals(1, ERRORS),
        "25 global parameters (`s_log__`, `x` 12 of 200, `e` 12 of 200); 13 independent blocks of size 18 to 29 from "
        "`x`, `e`; 12 independent blocks of size 1 from `e`.",
    ),
    "grid": (
        {"tau_log__": (), "phi": (30, 30)},
        with_globals(1, grid(30)),
        "151 global parameters (`tau_log__`, `phi` 150 of 900); 10 independent blocks of size 15 to 135 from `phi`.",
    ),
    "dense": ({"w": (8, 6), "s_log__": ()}, None, "Dense: the Hessian of log p couples all 49 coordinates."),
    "dense pattern": ({"w": 49}, np.ones((49, 49)), "Dense: the Hessian of log p couples all 49 coordinates."),
    "one coordinate": ({"w": ()}, np.ones((1, 1)), "1 coordinate."),
}
each_case = pytest.mark.parametrize("case", CASES)


def structure_of(case):
    shapes, matrix, _ = CASES[case]
    return ModelStructure(layout_of(**shapes), None if matrix is None else Pattern.of(matrix))


# --- in words ---------------------------------------------------------------------------------------------------------


@each_case
def test_words(case):
    assert str(structure_of(case)) == CASES[case][2]


def test_a_pattern_that_blocks_would_not_help():
    matrix = np.ones((40, 40))
    matrix[0, 1] = matrix[1, 0] = 0.0
    words = str(ModelStructure(layout_of(w=40), Pattern.of(matrix)))
    expected = "Treated as dense: 99.9 % of the entries of the Hessian of log p can differ from 0, and to cut its 40 "
    assert words == f"{expected}coordinates into blocks would not pay."


def test_part_of_a_variable_may_be_global():
    matrix = with_globals(3, groups(80)).toarray()
    matrix[4:, 2] = 0.0
    structure = ModelStructure(layout_of(beta=3, b=80), Pattern.of(matrix))
    expected = (
        "2 global parameters (`beta` 2 of 3); 1 block of size 2 from `beta`, `b`; 79 independent blocks of size 1 "
    )
    assert str(structure) == f"{expected}from `b`."
    assert structure.globals == ["beta[0]", "beta[1]"]


# --- numbers ----------------------------------------------------------------------------------------------------------


@each_case
def test_numbers_are_those_of_the_pattern(case):
    structure, (shapes, matrix, _) = structure_of(case), CASES[case]
    n = structure.n_dim
    full = np.ones((n, n)) if matrix is None else Pattern.of(matrix).matrix.toarray()
    assert structure.n_entries == np.tril(full).astype(bool).sum()
    np.testing.assert_allclose(structure.density, full.astype(bool).mean(), rtol=1e-14)
    assert structure.n_global + structure.block_sizes.sum() == n
    assert structure.n_blocks == len(structure.block_sizes)
    assert len(structure.globals) == structure.n_global
    assert sum(np.prod(shape, dtype=int) for shape in shapes.values()) == n
    joined = np.concatenate([part.coordinates for part in structure.parts])
    np.testing.assert_array_equal(np.sort(joined), np.arange(n))


def test_frame():
    frame = structure_of("chain with errors").to_frame()
    assert frame.columns.tolist() == ["name", "size", "role", "block_sizes"]
    assert frame["name"].tolist() == ["s_log__", "x", "e"]
    assert frame["size"].tolist() == [1, 200, 200]
    assert frame["role"].tolist() == ["global", "both", "both"]
    assert frame["block_sizes"].tolist() == ["", "18 to 29", "1 to 29"]
    assert structure_of("slopes").to_frame()["role"].tolist() == ["global", "global", "local"]
    assert structure_of("slopes").to_frame()["block_sizes"].tolist() == ["", "", "2"]
    assert structure_of("dense").to_frame()["role"].tolist() == ["global", "global"]
    empty = ModelStructure(layout_of(none=0, b=30), Pattern.of(np.eye(30))).to_frame()
    assert empty["role"].tolist() == ["none", "local"]


@pytest.mark.parametrize("case", ["slopes", "several sizes", "chain", "no globals"])
def test_without_a_pattern_it_is_that_of_the_structure(case):
    """As for an approximation that was read from a file."""
    known = structure_of(case)
    structure = ModelStructure(known.layout, None, known.arrow)
    assert str(structure) == str(known)
    full = known.arrow.pattern.matrix.toarray()
    assert structure.n_entries == Pattern.of(full).n_entries


def test_structures_of_two_models_are_not_taken_for_each_other():
    """What was found for one is remembered by the structure itself."""
    for kind in (SparseStructure.of, lambda pattern: BlockStructure(find_blocks(pattern).labels)):
        one, other = (kind(Pattern.of(chain(n))) for n in (80, 100))
        assert one != other
        assert [structure_of_form(of).n_dim for of in (one, other)] == [80, 100]
