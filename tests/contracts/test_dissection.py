"""From the pattern of a precision to blocks and a border."""

import numpy as np
import pytest

from scipy import sparse

from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.families import dissection
from pymc_ngvi.families.dissection import find_structure, step_flops
from pymc_ngvi.families.matrices.sparse import order


def with_globals(local, n_globals):
    """Return a lower triangle with coordinates that touch all others, before them."""
    n = local.shape[0]
    beside = np.ones((n, n_globals))
    return sparse.block_array([[sparse.coo_array(np.ones((n_globals,) * 2)), None], [sparse.coo_array(beside), local]])


def chain(n):
    return sparse.diags_array([np.ones(n), np.ones(n - 1)], offsets=[0, -1])


def grid(side):
    line = chain(side)
    return sparse.kron(line, sparse.eye_array(side)) + sparse.kron(sparse.eye_array(side), line)


def groups(n, size):
    return sparse.kron(sparse.eye_array(n), np.ones((size, size)))


def rasch(n_persons, n_items):
    """Return persons and items that all meet: two blocks of numbers, all coupled between the two."""
    return sparse.block_array(
        [
            [sparse.eye_array(n_persons), None],
            [sparse.coo_array(np.ones((n_items, n_persons))), sparse.eye_array(n_items)],
        ]
    )


def crossed(n_first, n_second, n_pairs):
    """Return two factors of which some levels meet."""
    rng = np.random.default_rng(5)
    links = sparse.coo_array(
        (np.ones(n_pairs), (rng.integers(0, n_second, n_pairs), rng.integers(0, n_first, n_pairs))),
        shape=(n_second, n_first),
    )
    return sparse.block_array([[sparse.eye_array(n_first), None], [links, sparse.eye_array(n_second)]])


def nested(school):
    """Return pupils and their schools."""
    n_pupils, n_schools = len(school), max(school) + 1
    links = sparse.coo_array((np.ones(n_pupils), (school, np.arange(n_pupils))), shape=(n_schools, n_pupils))
    return sparse.block_array([[sparse.eye_array(n_pupils), None], [links, sparse.eye_array(n_schools)]])


#: Pattern, and how many times less a step should cost than with a dense precision.
MODELS = {
    "intercepts": (with_globals(groups(300, 1), 6), 2_000),
    "slopes": (with_globals(groups(59, 2), 8), 100),
    "nested": (with_globals(nested(np.random.default_rng(6).integers(0, 40, 900)), 5), 1_000),
    "crossed": (with_globals(crossed(150, 150, 600), 4), 4),
    "rasch": (with_globals(rasch(500, 20), 1), 500),
    "chain": (chain(400), 100),
    "chain and globals": (with_globals(chain(400), 3), 80),
    "grid": (grid(25), 12),
}
each_model = pytest.mark.parametrize("model", MODELS)


def dense_flops(n):
    return 3.0 * n**3


def assert_no_entry_between_blocks(structure, pattern):
    """Also: that no entry of the pattern is lost."""
    values = np.arange(1.0, pattern.n_entries + 1)
    packed = structure.from_values(pattern, values)
    np.testing.assert_array_equal(structure.dense(packed), pattern.symmetric(values).toarray())


@each_model
def test_blocks_are_independent_and_a_step_costs_far_less_than_a_dense_one(model):
    matrix, factor = MODELS[model]
    pattern = Pattern.of(matrix)
    structure = find_structure(pattern)
    assert_no_entry_between_blocks(structure, pattern)
    assert step_flops(structure.sizes, structure.n_border) < dense_flops(pattern.n_dim) / factor


@each_model
def test_the_order_of_the_coordinates_does_not_matter(model):
    matrix, factor = MODELS[model]
    n = matrix.shape[0]
    order = np.random.default_rng(3).permutation(n)
    pattern = Pattern.of(Pattern.of(matrix).matrix[order][:, order])
    structure = find_structure(pattern)
    assert_no_entry_between_blocks(structure, pattern)
    assert step_flops(structure.sizes, structure.n_border) < dense_flops(n) / factor


@each_model
def test_the_same_pattern_gives_the_same_structure(model):
    first, second = (find_structure(Pattern.of(MODELS[model][0])) for _ in range(2))
    assert first is not second  # nothing was remembered
    np.testing.assert_array_equal(first.order, second.order)
    np.testing.assert_array_equal(first.sizes, second.sizes)
    first, second = (dissection.by_independence(Pattern.of(MODELS[model][0]).matrix).labels for _ in range(2))
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize(
    ("model", "border", "sizes"),
    [
        ("intercepts", range(6), [1] * 300),
        ("slopes", range(8), [2] * 59),
        ("rasch", [0, *range(501, 521)], [1] * 500),
    ],
)
def test_what_a_model_s_own_grouping_is(model, border, sizes):
    structure = find_structure(Pattern.of(MODELS[model][0]))
    np.testing.assert_array_equal(structure.border, list(border))
    np.testing.assert_array_equal(structure.sizes, sizes)


def test_nested_groups_are_blocks_of_a_school_and_its_pupils():
    structure = find_structure(Pattern.of(with_globals(nested(np.arange(900) % 40), 5)))
    np.testing.assert_array_equal(structure.border, np.arange(5))
    np.testing.assert_array_equal(structure.sizes, [23] * 20 + [24] * 20)


def test_separators_cut_a_chain_evenly():
    structure = find_structure(Pattern.of(MODELS["chain"][0]))
    assert 10 < structure.n_border < 60
    assert structure.sizes.max() < 40
    assert len(structure.sizes) >= structure.n_border


@pytest.mark.parametrize("n", [1, 2, 30])
def test_a_dense_pattern_is_all_border(n):
    structure = find_structure(Pattern.of(np.ones((n, n))))
    np.testing.assert_array_equal(structure.border, np.arange(n))
    assert not structure.n_local


def test_coordinates_that_touch_nothing_are_blocks_of_their_own():
    matrix = np.eye(40)
    matrix[:20, 2] = 1.0
    structure = find_structure(Pattern.of(matrix))
    np.testing.assert_array_equal(structure.border, [2])
    np.testing.assert_array_equal(structure.sizes, np.ones(39))
    alone = find_structure(Pattern.of(np.eye(40)))
    assert (alone.n_border, len(alone.sizes)) == (0, 40)


def test_separate_groups_need_no_border():
    structure = find_structure(Pattern.of(groups(10, 4)))
    assert structure.n_border == 0
    np.testing.assert_array_equal(structure.sizes, [4] * 10)


def test_a_long_chain_takes_few_rounds(monkeypatch):
    """Ties broken in the order of the chain would take a round for every second coordinate."""
    calls, function = [], order._least_neighbour
    monkeypatch.setattr(order, "_least_neighbour", lambda *args: (calls.append(1), function(*args))[1])
    pattern = Pattern.of(chain(10_000))
    structure = find_structure(pattern)
    assert 0 < len(calls) < 40
    assert structure.n_border < 300
    assert structure.sizes.max() < 300


def test_independent_coordinates_touch_each_other_nowhere():
    graph = Pattern.of(grid(12)).matrix
    labels = dissection.by_independence(graph).labels
    inside = np.flatnonzero(labels >= 0)
    assert len(np.unique(labels[inside])) == len(inside) > 40
    # None of the others could be added.
    touched = (graph[inside].sum(axis=0) > 0)[labels < 0]
    assert touched.all()
