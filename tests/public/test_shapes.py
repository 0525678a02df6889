"""Models whose axes have a length of 1, or sum to 0, are fitted as others are."""

import numpy as np
import pymc as pm
import pytest

import pymc_ngvi


def zero_sums():
    """Effects of rows, columns, and of both."""
    rng = np.random.default_rng(2)
    row, column, y = rng.integers(0, 3, 40), rng.integers(0, 3, 40), rng.binomial(1, 0.5, 40)
    mu, scale = pm.Normal("mu", 0.0, 1.0), pm.HalfNormal("scale", 0.5)
    of_row, both = pm.ZeroSumNormal("of_row", shape=3), pm.ZeroSumNormal("both", shape=(3, 3), n_zerosum_axes=2)
    pm.Bernoulli("y", logit_p=mu + of_row[row] + scale * both[row, column], observed=y)


def one_row():
    """Effects of two axes in one row."""
    y = np.random.default_rng(4).poisson(2.0, 12)
    of_cell = pm.ZeroSumNormal("of_cell", shape=(1, 6)).reshape((3, 2))
    effect = pm.HalfNormal("scale", 0.5) * (of_cell - of_cell.mean(axis=0, keepdims=True))
    mu = pm.Normal("mu", 0.0, 1.0, shape=1)
    pm.Poisson("y", pm.math.exp(mu + effect[np.arange(12) % 3, np.arange(12) % 2]), observed=y)


@pytest.mark.parametrize("kind", [zero_sums, one_row])
def test_a_nested_posterior_is_the_exact_one(kind):
    with pm.Model() as model:
        kind()
    nested, exact = (
        pymc_ngvi.fit_ngvi(model=model, posterior=posterior, random_seed=1, progressbar=False)
        .sample(2_000, random_seed=1)
        .posterior["mu"]
        for posterior in ("nested", "exact")
    )
    # Four errors of two sets of at least 300 draws' worth.
    atol = 4 * np.sqrt(2 / 300) * float(exact.std())
    np.testing.assert_allclose(nested.mean(("chain", "draw")), exact.mean(("chain", "draw")), atol=atol)


def test_a_posterior_of_two_modes_with_a_straight_tail():
    """The proposal has components of one df each, and one more for the tail of the scale."""
    rng = np.random.default_rng(4)
    y = np.r_[-2.0 + 0.15 * rng.normal(size=12), 2.0 + 0.15 * rng.normal(size=12)]
    with pm.Model():
        s, f0, z = pm.HalfNormal("s", 1), pm.Normal("f0", 0, 3), pm.Normal("z", 0, 1, shape=12)
        f = f0 + s * pm.math.cumsum(z)
        pm.StudentT("y", nu=3, mu=pm.math.concatenate([f, f]), sigma=0.3, observed=y)
        approx = pymc_ngvi.fit_ngvi(random_seed=2, progressbar=False)
    assert np.isfinite(approx.sample(500, random_seed=1).posterior["s"]).all()
