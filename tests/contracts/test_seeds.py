"""Seeds of every kind: equal ones give equal draws, everywhere; what is none is refused."""

import numpy as np
import pymc as pm
import pytest

from pymc_ngvi import fit_ngvi
from pymc_ngvi.core.sizes import generator_of, seed_of

QUIET = {"progressbar": False, "backend": "quick"}
NO_SEEDS = ["one", 1.5, True, -1, [], [1, -2], [1, 0.5], [[1], [2]], {"a": 1}]


@pytest.mark.parametrize("value", NO_SEEDS, ids=str)
def test_seeds_that_are_none(value):
    with pm.Model() as model:
        pm.Normal("x")
    message = r"random_seed should be a whole number of at least 0, a list of such numbers, .*; got "
    for seeded in (seed_of, generator_of, lambda seed: fit_ngvi(model=model, random_seed=seed, **QUIET)):
        with pytest.raises(ValueError, match=message):
            seeded(value)


SEEDS = {
    "numbers": lambda: [1, 2],
    "tuple": lambda: (1, np.int64(2)),
    "array": lambda: np.array([1, 2]),
    "sequence": lambda: np.random.SeedSequence([1, 2]),
    "generator": lambda: np.random.default_rng([1, 2]),
    "bits": lambda: np.random.PCG64([1, 2]),
    "legacy": lambda: np.random.RandomState(3),
}


@pytest.mark.parametrize("kind", SEEDS)
def test_seeds_of_every_kind_go_everywhere(kind):
    """Equal seeds, equal draws; the fit and what draws afterwards take the same kinds."""
    make = SEEDS[kind]
    with pm.Model() as model:
        pm.Gamma("rate", 2.0, 3.0)
    options = QUIET if kind == "numbers" else QUIET | {"posterior": "gaussian", "estimator": "price"}
    first, second, other = (fit_ngvi(model, random_seed=seed, **options) for seed in (make(), make(), 5))
    np.testing.assert_array_equal(first.draw_flat(3), second.draw_flat(3))
    assert first.mean_flat != other.mean_flat
    for draws in (
        lambda approx: approx.sample(3, random_seed=make()).posterior["rate"].values,
        lambda approx: approx.sampler_init(2, random_seed=make()).points,
    ):
        np.testing.assert_array_equal(draws(first), draws(second))
    if kind != "legacy":
        np.testing.assert_array_equal(generator_of(make()).random(3), np.random.default_rng([1, 2]).random(3))


@pytest.mark.parametrize("value", [5, [5], np.array(5), (np.uint8(5),)], ids=repr)
def test_one_number_is_the_seed_itself(value):
    assert seed_of(value) == 5
    assert generator_of(value).random() == np.random.default_rng(5).random()


def test_numbers_that_are_a_seed_are_one_seed():
    assert len({seed_of(s) for s in ([1, 2], [2, 1], [1, 2, 3], 1, 2)}) == 5
    assert seed_of([1, 2]) == seed_of(np.random.SeedSequence([1, 2]))
