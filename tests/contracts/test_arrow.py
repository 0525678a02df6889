"""Arrow matrices against dense ones."""

import numpy as np
import pytest

from matrix import two_seeds

from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.families.matrices.arrow import ArrowStructure
from pymc_ngvi.families.matrices.packing import Parts

#: Of each coordinate: its block, -1 in the border. Blocks of several sizes, no two of neighbouring coordinates only.
LABELS = {
    "several sizes": [7, -1, 3, 7, 1, 3, -1, 7, 0, 1],
    "one size": [0, 1, -1, 2, 0, 1, 2],
    "numbers": [0, 1, 2, -1, 3],
    "empty border": [1, 0, 1, 2, 2],
    "no blocks": [-1, -1, -1],
    "one block": [0, 0, -1, 0],
}
each_structure = pytest.mark.parametrize("name", LABELS)


@pytest.fixture
def structure(name):
    return ArrowStructure.of(LABELS[name])


@pytest.fixture
def rng(seed):
    return np.random.default_rng(seed)


def mask_of(labels):
    """Return which entries of a symmetric matrix are in the structure."""
    labels = np.asarray(labels)
    return (labels[:, None] == labels) | (labels[:, None] < 0) | (labels < 0)


def ordered_mask(structure, labels):
    return mask_of(np.asarray(labels)[structure.order])


def parts_of(structure, ordered):
    """Cut a dense matrix in the order of the structure into its parts, one block after the other."""
    n, starts = structure.n_local, np.cumsum(structure.sizes) - structure.sizes
    by_size = {}
    for start, size in zip(starts, structure.sizes, strict=True):
        by_size.setdefault(int(size), []).append(ordered[start : start + size, start : start + size])
    return Parts([np.array(blocks) for blocks in by_size.values()], ordered[n:, :n].T.copy(), ordered[n:, n:])


def packed(structure, ordered):
    return structure.pack(parts_of(structure, ordered))


def random_lower(rng, structure, labels):
    """Return a lower-triangular arrow matrix, dense, in the order of the structure."""
    lower = np.tril(rng.standard_normal((structure.n_dim,) * 2)) * ordered_mask(structure, labels)
    lower[np.diag_indices_from(lower)] = np.exp(0.5 * rng.standard_normal(structure.n_dim))
    return lower


def random_symmetric(rng, structure, labels):
    half = rng.standard_normal((structure.n_dim,) * 2)
    return (half + half.T) * ordered_mask(structure, labels)


def dense(structure, parts, *, triangular):
    """Return parts as a dense matrix in the order of the structure."""
    if triangular:
        return structure.dense(structure.pack(parts), triangular=True)
    return structure.dense(structure.pack(parts))[np.ix_(structure.order, structure.order)]


# --- packing ----------------------------------------------------------------------------------------------------------


def test_structure_of_interleaved_labels():
    structure = ArrowStructure.of(LABELS["several sizes"])
    np.testing.assert_array_equal(structure.order, [8, 2, 5, 4, 9, 0, 3, 7, 1, 6])
    np.testing.assert_array_equal(structure.order[structure.place], np.arange(10))
    np.testing.assert_array_equal(structure.border, [1, 6])
    np.testing.assert_array_equal(structure.sizes, [1, 2, 2, 3])
    assert (structure.n_dim, structure.n_local, structure.n_border) == (10, 8, 2)
    assert structure.n_entries == 1 + 2 * 4 + 9 + 8 * 2 + 4
    assert structure.n_lower(structure.n_dim) == 1 + 2 * 3 + 6 + 8 * 2 + 3


@each_structure
def test_packed_matrices_have_the_entries_of_the_structure(structure, name):
    mask = mask_of(LABELS[name])
    n = structure.n_dim
    matrix = np.arange(1.0, n**2 + 1).reshape(n, n)
    matrix = np.where(mask, matrix + matrix.T, 0.0)
    pattern = Pattern.of(mask)
    packed = structure.from_values(pattern, matrix[pattern.rows, pattern.cols])
    assert packed.shape == (structure.n_entries,)
    np.testing.assert_array_equal(structure.dense(packed), matrix)
    np.testing.assert_array_equal(structure.pack(structure.unpack(packed)), packed)
    np.testing.assert_array_equal(packed[structure.diagonal], np.diag(matrix))
    ordered = matrix[np.ix_(structure.order, structure.order)]
    np.testing.assert_array_equal(packed, structure.pack(parts_of(structure, ordered)))
    assert packed[structure.in_border].size == structure.n_local * structure.n_border
    assert structure.n_lower(structure.n_dim) == np.tril(mask).sum()


@each_structure
def test_columns_of_a_triangular_matrix(structure, name):
    """Each entry of a matrix whose columns are constant is the number of its column."""
    numbers = np.tile(structure.order.astype(float), (structure.n_dim, 1))
    np.testing.assert_array_equal(structure.pack(parts_of(structure, numbers)), structure.columns)


def test_entries_that_a_pattern_lacks_are_0_and_those_between_blocks_an_error():
    structure = ArrowStructure.of([0, 0, 1, -1])
    few = Pattern.of(np.eye(4) + np.eye(4)[:, [3, 1, 2, 0]])
    expected = np.zeros((4, 4))
    expected[few.rows, few.cols] = expected[few.cols, few.rows] = 2.0
    np.testing.assert_array_equal(structure.dense(structure.from_values(few, np.full(few.n_entries, 2.0))), expected)
    between = np.eye(4)
    between[1, 2] = 1.0
    pattern = Pattern.of(between)
    with pytest.raises(ValueError, match="entry between two blocks"):
        structure.from_values(pattern, np.ones(pattern.n_entries))


def test_patterns_in_turn_are_not_confused():
    structure = ArrowStructure.of([0, 1, -1])
    for matrix in (np.eye(3), np.eye(3) + np.eye(3)[[2, 1, 0]], np.eye(3) + np.eye(3)[[0, 2, 1]]) * 2:
        pattern = Pattern.of(matrix)
        values = np.arange(1.0, pattern.n_entries + 1)
        expected = pattern.symmetric(values).toarray()
        np.testing.assert_array_equal(structure.dense(structure.from_values(pattern, values)), expected)


@pytest.mark.parametrize("lead", [(), (1,), (4,), (2, 3)])
@each_structure
def test_join_is_the_inverse_of_split(structure, lead):
    vectors = np.arange(float(np.prod((*lead, structure.n_dim)))).reshape(*lead, structure.n_dim)
    local, border = structure.split(vectors)
    np.testing.assert_array_equal(
        np.concatenate([local, border]), vectors.reshape(-1, structure.n_dim).T[structure.order]
    )
    np.testing.assert_array_equal(structure.join(local, border, lead), vectors)


@each_structure
@pytest.mark.parametrize("dtype", [np.intp, np.float32])
def test_arrays_of_a_structure_make_it_again(structure, dtype):
    again = ArrowStructure.from_arrays(structure.order.astype(dtype), structure.sizes.astype(dtype))
    for attribute in ("order", "sizes", "border", "diagonal", "columns"):
        np.testing.assert_array_equal(getattr(again, attribute), getattr(structure, attribute))


@pytest.mark.parametrize(
    ("order", "sizes", "message"),
    [
        ([0, 2], [1], r"permutation of 0\.\.1; got \[0 2\]"),
        ([0, 1], [1, 2], r"add up to 2 at most; got \[1 2\]"),
        ([0, 1], [0, 1], r"positive .* got \[0 1\]"),
    ],
)
def test_bad_arrays(order, sizes, message):
    with pytest.raises(ValueError, match=message):
        ArrowStructure.from_arrays(order, sizes)


# --- algebra ----------------------------------------------------------------------------------------------------------


@two_seeds
@each_structure
def test_cholesky_is_the_dense_one(structure, name, rng):
    lower = random_lower(rng, structure, LABELS[name])
    factor = structure.cholesky(packed(structure, lower @ lower.T), reverse=False)
    np.testing.assert_allclose(structure.dense(factor, triangular=True), lower, rtol=1e-9, atol=1e-10)


@two_seeds
@each_structure
@pytest.mark.parametrize("operation", ["product", "left_quotient", "right_quotient"])
def test_factors_are_closed_under_products_and_quotients(structure, name, rng, operation):
    left, right = (random_lower(rng, structure, LABELS[name]) for _ in range(2))
    result = getattr(structure, operation)(packed(structure, left), packed(structure, right))
    inverse = np.linalg.inv
    expected = {
        "product": left @ right,
        "left_quotient": inverse(left) @ right,
        "right_quotient": left @ inverse(right),
    }
    np.testing.assert_allclose(
        structure.dense(result, triangular=True), expected[operation], rtol=1e-8, atol=1e-9 * np.abs(result).max()
    )


@two_seeds
@each_structure
def test_gram_and_standard_deviations_of_a_factor(structure, name, rng):
    lower = random_lower(rng, structure, LABELS[name])
    factor, product = packed(structure, lower), lower @ lower.T
    gram = dense(structure, structure.unpack(structure.gram(factor)), triangular=False)
    mask = ordered_mask(structure, LABELS[name])
    np.testing.assert_allclose(gram, product * mask, rtol=1e-10, atol=1e-11)
    for sign, matrix in ((1, product), (-1, np.linalg.inv(product))):
        sd = structure.sd(factor, sign)
        np.testing.assert_allclose(sd[structure.order] ** 2, np.diag(matrix), rtol=1e-8)
        vectors = rng.standard_normal((3, structure.n_dim))
        ordered = vectors[:, structure.order]
        expected = np.sum(ordered * np.linalg.solve(matrix, ordered.T).T, axis=1)
        np.testing.assert_allclose(structure.squares(factor, sign, vectors), expected, rtol=1e-6)


@two_seeds
@each_structure
def test_congruence_fills_nothing_in(structure, name, rng):
    lower, matrix = random_lower(rng, structure, LABELS[name]), random_symmetric(rng, structure, LABELS[name])
    result = structure.congruence(parts_of(structure, lower), parts_of(structure, matrix))
    expected = np.linalg.solve(lower, np.linalg.solve(lower, matrix).T)
    parts = structure.unpack(result)
    np.testing.assert_allclose(dense(structure, parts, triangular=False), expected, rtol=1e-8, atol=1e-9)
    for block in (*parts.blocks, parts.corner[None]):
        np.testing.assert_array_equal(block, block.swapaxes(1, 2))


@two_seeds
@each_structure
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("lead", [(), (1,), (3,), (2, 2)])
def test_factors_and_vectors(structure, name, rng, transposed, lead):
    lower, vectors = random_lower(rng, structure, LABELS[name]), rng.standard_normal((*lead, structure.n_dim))
    factor, matrix = packed(structure, lower), lower.T if transposed else lower
    inside = np.ix_(structure.place, structure.place)
    for operation, expected in ((structure.times, matrix), (structure.solve, np.linalg.inv(matrix))):
        result = operation(factor, vectors, transposed=transposed)
        np.testing.assert_allclose(result, vectors @ expected[inside].T, rtol=1e-8, atol=1e-9)


BAD = {
    "block": ([0, 0, -1], [[1.0, 2.0, 0.0], [2.0, 1.0, 0.0], [0.0, 0.0, 1.0]]),
    "corner": ([0, 1, -1], np.diag([1.0, 1.0, -1.0])),
    "border": ([0, 1, -1], [[1.0, 0.0, 0.8], [0.0, 1.0, 0.8], [0.8, 0.8, 1.0]]),
    "zero": ([0, 1, -1], np.zeros((3, 3))),
    # Neither the block nor what is left of the border is lost, yet the least eigenvalue is 1e-16.
    "lost across block and border": ([0, -1], [[1e-8, 1e-4], [1e-4, 1.0 + 1e-8]]),
    "singular": ([0, 1, -1], [[1.0, 0.0, 1.0], [0.0, 1.0, 0.0], [1.0, 0.0, 1.0 + 1e-15]]),
    "nan in a block": ([0, 1, -1], np.diag([1.0, np.nan, 1.0])),
    "nan in the border": ([0, 1, -1], [[1.0, 0.0, np.nan], [0.0, 1.0, 0.0], [np.nan, 0.0, 1.0]]),
    "inf in the corner": ([0, 1, -1], np.diag([1.0, 1.0, np.inf])),
    "nan without blocks": ([-1], [[np.nan]]),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_not_positive_definite_has_no_factor(case):
    labels, matrix = BAD[case]
    structure = ArrowStructure.of(labels)
    ordered = np.asarray(matrix)[np.ix_(structure.order, structure.order)]
    assert structure.cholesky(packed(structure, ordered), reverse=False) is None
