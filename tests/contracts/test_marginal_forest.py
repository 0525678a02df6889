"""Globals and trees of local coordinates, found in the pattern of a Hessian."""

import numpy as np
import pytest

from pymc_ngvi.core.messages import Unavailable
from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.marginal.quadrature import MOST_GLOBALS, MOST_LEVELS, find_forest


def pattern_of(n_globals, blocks):
    """Return the pattern of globals that touch everything, and of blocks given as the number of vertices and edges."""
    n = n_globals + sum(size for size, _ in blocks)
    matrix = np.eye(n)
    matrix[:n_globals] = matrix[:, :n_globals] = 1.0
    first = n_globals
    for size, edges in blocks:
        for i, j in edges:
            matrix[first + i, first + j] = matrix[first + j, first + i] = 1.0
        first += size
    return Pattern.of(matrix)


def dense(size):
    return size, [(i, j) for i in range(size) for j in range(i)]


def chain(size):
    return size, [(i, i + 1) for i in range(size - 1)]


def hub(n_leaves):
    return 1 + n_leaves, [(0, i + 1) for i in range(n_leaves)]


def nested(n_middle, n_leaves):
    """A coordinate a, coordinates b under it, and c under each: c touches b and a, as effects of nested groups do."""
    edges, size = [], 1
    for _ in range(n_middle):
        b, size = size, size + 1
        edges.append((0, b))
        for _ in range(n_leaves):
            edges += [(b, size), (0, size)]
            size += 1
    return size, edges


def check(forest, pattern):
    """Assert that parents, levels and paths go together, and that every entry of the pattern is on one path."""
    n_local, places = forest.n_local, np.arange(forest.n_local)
    np.testing.assert_array_equal(np.sort(np.r_[forest.globals_, forest.locals_]), np.arange(pattern.n_dim))
    assert (np.diff(forest.globals_) > 0).all()
    assert (np.diff(forest.locals_) > 0).all()
    roots = forest.parent < 0
    np.testing.assert_array_equal(forest.level[roots], 0)
    np.testing.assert_array_equal(forest.level[~roots], forest.level[forest.parent[~roots]] + 1)
    np.testing.assert_array_equal(np.sort(np.concatenate(forest.at_level)), places)
    assert forest.path.shape == (n_local, forest.n_levels)
    for c in places:
        level = forest.level[c]
        assert (forest.path[c, level:] == c).all()
        if level:
            assert forest.path[c, level - 1] == forest.parent[c]
            np.testing.assert_array_equal(forest.path[c, :level], forest.path[forest.parent[c], :level])
    inside = pattern.matrix[forest.locals_][:, forest.locals_].toarray()
    for i, j in np.argwhere(inside):
        assert j in forest.path[i] or i in forest.path[j]
    assert forest.n_blocks == roots.sum() == forest.block.max() + 1
    np.testing.assert_array_equal(forest.block, forest.block[forest.path[:, 0]])


#: Blocks, of which there are several of each kind, and the levels of the trees.
SHAPES = {
    "intercepts": (dense(1), 1),
    "slopes": (dense(2), 2),
    "three of each": (dense(3), 3),
    "hubs": (hub(4), 2),
    "nested": (nested(3, 2), 3),
    "chain of 7": (chain(7), 3),
    "chain of 25": (chain(25), 5),
    "chain of 31": (chain(31), 5),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name):
    block, n_levels = SHAPES[name]
    pattern = pattern_of(2, [block] * 20)
    forest = find_forest(pattern, pattern.n_dim)
    check(forest, pattern)
    assert (forest.n_globals, forest.n_blocks, forest.n_levels) == (2, 20, n_levels)
    assert np.bincount(forest.block).max() == block[0]
    assert forest.n_dim == pattern.n_dim


def test_the_root_of_a_hub_is_the_hub_wherever_it_stands():
    for first in (0, 2, 4):
        size, edges = 5, [(first, i) for i in range(5) if i != first]
        pattern = pattern_of(1, [(size, edges)] * 20)
        forest = find_forest(pattern, pattern.n_dim)
        np.testing.assert_array_equal(np.flatnonzero(forest.parent < 0), first + 5 * np.arange(20))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_order_of_coordinates_does_not_matter(seed):
    """Where nothing is equally central: the trees are those of the coordinates' names."""
    blocks = [hub(3), nested(3, 2), chain(7), nested(2, 3), hub(5), dense(1)] * 8
    pattern = pattern_of(2, blocks)
    order = np.random.default_rng(seed).permutation(pattern.n_dim)
    other = Pattern.of(pattern.matrix.toarray()[np.ix_(order, order)])
    forest, moved = find_forest(pattern, pattern.n_dim), find_forest(other, pattern.n_dim)
    check(moved, other)
    np.testing.assert_array_equal(np.sort(order[moved.globals_]), forest.globals_)

    def above(forest, names):
        local = names[forest.locals_]
        return {int(c): int(local[p]) if p >= 0 else -1 for c, p in zip(local, forest.parent, strict=True)}

    assert above(moved, order) == above(forest, np.arange(pattern.n_dim))


@pytest.mark.parametrize("seed", range(4))
def test_random_trees_and_blocks(seed):
    rng = np.random.default_rng(seed)
    blocks = []
    for _ in range(12):
        size = int(rng.integers(1, 12))
        edges = [(i, int(rng.integers(max(0, i - 3), i))) for i in range(1, size)]
        blocks.append((size, edges))
    pattern = pattern_of(int(rng.integers(1, 5)), blocks)
    forest = find_forest(pattern, pattern.n_dim)
    check(forest, pattern)
    assert forest.n_levels <= MOST_LEVELS


def test_a_term_between_two_blocks_joins_them():
    matrix = pattern_of(2, [hub(2)] * 50).matrix.toarray()
    matrix[3, 6] = matrix[6, 3] = True  # leaves of two hubs
    pattern = Pattern.of(matrix)
    forest = find_forest(pattern, pattern.n_dim)
    check(forest, pattern)
    assert (forest.n_globals, forest.n_blocks, forest.n_levels) == (2, 49, 3)


def test_one_coordinate_that_joins_blocks_is_a_global():
    """A global more costs less than a level more."""
    matrix = pattern_of(2, [dense(1)] * 30).matrix.toarray()
    matrix[5, 5:] = matrix[5:, 5] = True
    pattern = Pattern.of(matrix)
    forest = find_forest(pattern, pattern.n_dim)
    check(forest, pattern)
    np.testing.assert_array_equal(forest.globals_, [0, 1, 5])


# --- without local coordinates, and limits ----------------------------------------------------------------------------


def only_globals(forest, n_dim):
    np.testing.assert_array_equal(forest.globals_, np.arange(n_dim))
    assert forest.n_local == forest.n_levels == forest.n_blocks == 0
    assert forest.path.shape == (0, 0)
    assert forest.at_level == ()


@pytest.mark.parametrize("n_dim", [1, 3, 12, MOST_GLOBALS])
def test_a_dense_pattern_has_globals_only(n_dim):
    only_globals(find_forest(None, n_dim), n_dim)
    only_globals(find_forest(Pattern.of(np.ones((n_dim, n_dim))), n_dim), n_dim)


def test_crossed_effects_of_which_one_has_few_levels():
    """The levels of the factor that has few are globals; where both have many, there is no forest."""
    for n_few in (20, 2 * MOST_GLOBALS):
        n_many = 3 * MOST_GLOBALS
        matrix = np.eye(2 + n_few + n_many)
        matrix[:2] = 1.0
        matrix[2 : 2 + n_few, 2 + n_few :] = 1.0
        pattern = Pattern.of(matrix)
        if n_few == 20:
            forest = find_forest(pattern, pattern.n_dim)
            assert (forest.n_globals, forest.n_local, forest.n_levels) == (2 + n_few, n_many, 1)
        else:
            with pytest.raises(Unavailable):
                find_forest(pattern, pattern.n_dim)


def test_scales_that_touch_fewer_coordinates_than_an_effect_does():
    """What is above many leaves touches more than its own scale: sizes of variables tell which are the globals."""
    n_hubs, n_leaves = 20, 40
    n = 3 + n_hubs * (1 + n_leaves)
    hubs = 3 + np.arange(n_hubs)
    leaves = 3 + n_hubs + np.arange(n_hubs * n_leaves)
    matrix = np.eye(n)
    matrix[0, 1] = matrix[0, hubs] = matrix[1, hubs] = 1.0  # a mean and the scale of the hubs
    matrix[2, hubs] = matrix[2, leaves] = 1.0  # the scale of the leaves
    matrix[np.repeat(hubs, n_leaves), leaves] = 1.0
    pattern = Pattern.of(matrix)
    variables = [slice(0, 1), slice(1, 2), slice(2, 3), slice(3, 3 + n_hubs), slice(3 + n_hubs, n)]
    forest = find_forest(pattern, n, tuple(variables))
    check(forest, pattern)
    np.testing.assert_array_equal(forest.globals_, [0, 1, 2])
    np.testing.assert_array_equal(forest.locals_[forest.level == 0], hubs)
    assert find_forest(pattern, n).n_globals > 3
