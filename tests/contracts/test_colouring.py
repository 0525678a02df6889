"""Colourings: every entry comes back, from no more products than the structure needs."""

import numpy as np
import pytest

from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse

from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.core.sparsity import Colouring


def pattern_of(rows, cols, n_dim):
    return Pattern.of(sparse.coo_array((np.ones(len(rows)), (rows, cols)), shape=(n_dim, n_dim)))


def with_globals(rows, cols, n_dim, n_globals):
    """Add coordinates, in the first places, that interact with all."""
    everything = np.arange(n_dim + n_globals)
    hubs = np.repeat(np.arange(n_globals), n_dim + n_globals)
    rows, cols = np.asarray(rows) + n_globals, np.asarray(cols) + n_globals
    return pattern_of(
        np.concatenate([rows, np.tile(everything, n_globals)]), np.concatenate([cols, hubs]), n_dim + n_globals
    )


def blocks(n_blocks, size):
    i, j = np.nonzero(np.ones((size, size)))
    start = size * np.arange(n_blocks)[:, None]
    return (start + i).ravel(), (start + j).ravel(), n_blocks * size


def grid(n):
    at = np.arange(n * n).reshape(n, n)
    return np.concatenate([at[1:].ravel(), at[:, 1:].ravel()]), np.concatenate([at[:-1].ravel(), at[:, :-1].ravel()])


def bipartite(n_left, n_right, n_edges, seed=1):
    rng = np.random.default_rng(seed)
    return rng.integers(0, n_left, n_edges), n_left + rng.integers(0, n_right, n_edges), n_left + n_right


def chain(n):
    order = np.random.default_rng(3).permutation(n)
    return order[1:], order[:-1], n


def check_recovery(pattern, colouring, seed=4):
    """A matrix of whole numbers comes back without any rounding."""
    values = np.random.default_rng(seed).integers(1, 1000, size=pattern.n_entries).astype(float)
    matrix = pattern.symmetric(values)
    products = (matrix @ colouring.directions().T).T
    np.testing.assert_array_equal(products.ravel()[colouring.places], values)


#: name: (pattern, the most colours that it may take)
STRUCTURES = {
    "diagonal": (pattern_of([], [], 9), 1),
    "random intercepts": (with_globals(*blocks(500, 1), 5), 6),
    "random slopes": (with_globals(*blocks(300, 3), 4), 7),
    "chain": (pattern_of(*chain(400)), 3),
    "grid": (with_globals(*grid(20), 400, 2), 7),
    "crossed": (with_globals(*bipartite(300, 200, 1500), 3), 20),
    "dense": (Pattern.of(np.ones((30, 30))), 30),
    "one": (Pattern.of(np.ones((1, 1))), 1),
    "none": (Pattern.of(np.ones((0, 0))), 0),
}


@pytest.mark.parametrize("name", list(STRUCTURES))
def test_few_colours_recover_all_entries(name):
    pattern, most = STRUCTURES[name]
    colouring = Colouring.of(pattern)
    assert colouring.n_colours <= most
    assert colouring.directions().shape == (colouring.n_colours, pattern.n_dim)
    np.testing.assert_array_equal(colouring.directions().sum(axis=0), np.ones(pattern.n_dim))
    check_recovery(pattern, colouring)


@st.composite
def graphs(draw):
    n_dim = draw(st.integers(1, 14))
    pairs = draw(st.lists(st.tuples(st.integers(0, n_dim - 1), st.integers(0, n_dim - 1)), max_size=40))
    hubs = draw(st.lists(st.integers(0, n_dim - 1), max_size=2))
    pairs += [(hub, i) for hub in hubs for i in range(n_dim)]
    rows, cols = np.array(pairs, dtype=int).reshape(-1, 2).T
    return pattern_of(rows, cols, n_dim)


@given(graphs())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_recovers_any_matrix(pattern):
    colouring = Colouring.of(pattern)
    assert colouring.n_colours <= pattern.n_dim
    check_recovery(pattern, colouring)
