"""Base draws: in replicates, standard normal in every coordinate; quasi-random pairs, pairs, or plain."""

import numpy as np
import pytest

from matrix import two_seeds
from scipy.special import ndtr

from pymc_ngvi.core.draws import (
    BASE_DRAWS,
    MAX_SOBOL_DIM,
    N_REPLICATES,
    antithetic_draws,
    plain_draws,
    sobol_draws,
)

sizes = pytest.mark.parametrize("n_draws", [2, 4, 8, 32, 256])
in_pairs = pytest.mark.parametrize("draw", [sobol_draws, antithetic_draws])
each_kind = pytest.mark.parametrize("draw", BASE_DRAWS.values(), ids=BASE_DRAWS)


@sizes
@two_seeds
@in_pairs
def test_every_replicate_is_closed_under_reflection(n_draws, seed, draw):
    base = draw(n_draws, 3, np.random.default_rng(seed))
    assert base.antithetic
    assert base.z.shape == (n_draws, 3)
    assert base.n_draws == n_draws
    for rows in base.replicates():
        block = base.z[rows]
        np.testing.assert_allclose(np.sort(block, axis=0), np.sort(-block, axis=0), rtol=0)
        np.testing.assert_allclose(block.sum(axis=0), 0.0, atol=1e-12)


@sizes
@in_pairs
def test_pairs_are_reflections_and_cover_every_row_once(n_draws, draw, rng):
    base = draw(n_draws, 3, rng)
    pairs = base.pairs()
    np.testing.assert_array_equal(np.sort(pairs.ravel()), np.arange(n_draws))
    np.testing.assert_array_equal(base.z[pairs[:, 0]], -base.z[pairs[:, 1]])


@pytest.mark.parametrize(
    ("draw", "n_draws", "n_replicates"),
    [
        (antithetic_draws, 6, 3),
        (antithetic_draws, 10, 5),
        (antithetic_draws, 22, 1),
        (antithetic_draws, 100, 5),
        (plain_draws, 1, 1),
        (plain_draws, 7, 7),
        (plain_draws, 8, 8),
        (plain_draws, 11, 1),
        (plain_draws, 100, 5),
    ],
)
def test_replicates_of_numbers_that_are_no_powers_of_2(draw, n_draws, n_replicates, rng):
    """As many of equal size as there can be, up to eight, and no pair across two of them."""
    base = draw(n_draws, 3, rng)
    assert base.z.shape == (n_draws, 3)
    assert base.n_replicates == len(base.replicates()) == n_replicates
    rows = np.concatenate([np.arange(n_draws)[part] for part in base.replicates()])
    np.testing.assert_array_equal(rows, np.arange(n_draws))
    size = n_draws // n_replicates
    assert (base.pairs() // size == (base.pairs() // size)[:, :1]).all()
    if base.antithetic:
        np.testing.assert_array_equal(base.z[base.pairs()[:, 0]], -base.z[base.pairs()[:, 1]])


@pytest.mark.parametrize("n_draws", [1, 2, 7, 32])
def test_plain_draws_are_units_by_themselves(n_draws, rng):
    base = plain_draws(n_draws, 3, rng)
    assert not base.antithetic
    np.testing.assert_array_equal(base.pairs(), np.arange(n_draws)[:, None])
    assert len(np.unique(np.abs(base.z))) == base.z.size, "no draw is another one's reflection"


@two_seeds
@each_kind
def test_moments_are_those_of_standard_normals(seed, draw):
    """64 independent sets of 32: each mean of squares and of products within 5 standard errors, 14 comparisons."""
    rng = np.random.default_rng(seed)
    sets = np.array([draw(32, 4, rng).z for _ in range(64)])
    means = sets.mean(axis=1)
    assert (np.abs(means.mean(axis=0)) <= 5.0 * means.std(axis=0, ddof=1) / np.sqrt(len(sets)) + 1e-12).all()
    products = np.einsum("rni,rnj->rij", sets, sets) / 32
    error = products.mean(axis=0) - np.eye(4)
    se = products.std(axis=0, ddof=1) / np.sqrt(len(sets))
    assert (np.abs(error) < 5.0 * se).all()
    fourth = np.mean(sets**4, axis=1)
    assert (np.abs(fourth.mean(axis=0) - 3.0) < 5.0 * fourth.std(axis=0, ddof=1) / np.sqrt(len(sets))).all()


def test_quasi_random_normals_are_more_even_than_plain_ones(rng):
    """The error of E|z| over the 64 pairs of a replicate: plain normals have a root mean square of .6 / 8 = .075."""
    base = sobol_draws(1024, 2, rng)
    errors = [np.abs(base.z[rows]).mean(axis=0) - np.sqrt(2 / np.pi) for rows in base.replicates()]
    assert np.sqrt(np.mean(np.square(errors))) < 0.025


@two_seeds
@each_kind
def test_replicates_are_independent(seed, draw):
    """Means of z_1 z_2 in two replicates: uncorrelated over 400 sets, within 5 standard errors."""
    rng = np.random.default_rng(seed)
    means = []
    for _ in range(400):
        base = draw(64, 2, rng)
        means.append([base.z[rows].prod(axis=1).mean() for rows in base.replicates()[:2]])
    assert abs(np.corrcoef(np.transpose(means))[0, 1]) < 5.0 / np.sqrt(400)


@two_seeds
@each_kind
def test_the_generator_alone_decides(seed, draw):
    first, again = (draw(16, 3, np.random.default_rng(seed)).z for _ in range(2))
    np.testing.assert_array_equal(first, again)
    rng = np.random.default_rng(seed)
    assert not np.array_equal(draw(16, 3, rng).z, draw(16, 3, rng).z)


@two_seeds
def test_coordinates_beyond_those_of_sobol_points_are_stratified(seed):
    """One point of each replicate's half in each stratum of equal probability, in every coordinate, at random."""
    half = 8
    base = sobol_draws(2 * half * N_REPLICATES, MAX_SOBOL_DIM + 200, np.random.default_rng(seed))
    for rows in base.replicates():
        beyond = base.z[rows][:half, MAX_SOBOL_DIM:]
        strata = np.floor(half * ndtr(beyond)).astype(int)
        np.testing.assert_array_equal(np.sort(strata, axis=0), np.tile(np.arange(half)[:, None], 200))
        assert len(np.unique(strata, axis=1).T) > 150, "coordinates have orders of their own"
