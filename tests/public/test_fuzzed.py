"""What models at random have shown to be wrong: `tests/benchmarks/fuzzed.py`."""

import numpy as np
import pymc as pm
import pytest

import pymc_ngvi

QUIET = {"random_seed": 1, "progressbar": False}


def test_a_covariance_of_the_rows_of_the_fit_is_refused_at_others():
    x = np.linspace(0.0, 1.0, 5)
    with pm.Model() as model:
        at = pm.Data("at", x)
        sd = pm.HalfNormal("sd")
        pm.MvNormal("y", pm.Normal("slope") * at, cov=sd**2 * np.eye(5), observed=x**2)
    approx = pymc_ngvi.fit_ngvi(model, **QUIET)
    with pytest.raises(ValueError, match="The model can't be evaluated given 'at'"):
        approx.predict({"at": x[:3]}, random_seed=1)


def test_a_prior_on_a_circle_is_named_by_its_limits():
    with pm.Model() as model:
        pm.VonMises("y", pm.VonMises("mean", 0.0, 2.0), 2.0, observed=[0.3, 0.8])
    approx = pymc_ngvi.fit_ngvi(model, **QUIET)
    with pytest.raises(ValueError, match=r"the old one on \(-3.142, 3.142\)"):
        approx.with_prior(mean=pm.Normal.dist())


@pytest.mark.parametrize("seed", [1, 2])
def test_a_tail_that_bends_away_is_seen(seed):
    """A level on an interval beside a walk: only their sum is known, which bends where the level comes to its ends."""
    n, shape, rng = 6, 40.0, np.random.default_rng(3)
    steps = np.tril(np.ones((n, n)))
    eta = np.cumsum(rng.normal(0.0, 0.5, n)) - 0.5
    y = rng.gamma(shape, np.exp(eta)[:, None] / shape, size=(n, 5))
    with pm.Model() as model:
        level = pm.Uniform("level", -2.0, 2.0)
        walk = pm.GaussianRandomWalk("walk", sigma=0.5, init_dist=pm.Normal.dist(0.0, 1.5), shape=n)
        pm.Gamma("y", alpha=shape, beta=(shape * pm.math.exp(-level - walk))[:, None], observed=y)
    approx = pymc_ngvi.fit_ngvi(model, random_seed=seed, progressbar=False)
    # Given the sums, the level is a normal on its interval; given the data and a flat prior, sums are minus log gammas.
    sums = -np.log(rng.gamma(5.0 * shape, 1.0 / (shape * y.sum(axis=1)), size=(20_000, n)))
    precision = np.linalg.inv(steps @ np.diag([1.5**2, *[0.25] * (n - 1)]) @ steps.T)
    at = np.linspace(-2.0, 2.0, 2_001)[1:-1]
    squares = np.einsum("ni,ij,nj->n", sums, precision, sums)[:, None] + precision.sum() * at**2
    log_p = (sums @ precision.sum(axis=1))[:, None] * at - 0.5 * squares
    p = np.exp(log_p - log_p.max()).mean(axis=0)
    p /= p.sum()
    draws = approx.sample(8_000, random_seed=1).posterior["level"].to_numpy().ravel()
    assert approx.is_exact
    for values, known in ((draws, at), (np.log((2.0 + draws) / (2.0 - draws)), np.log((2.0 + at) / (2.0 - at)))):
        mean = p @ known
        sd = np.sqrt(p @ (known - mean) ** 2)
        assert abs(values.mean() - mean) < 0.12 * sd
        assert abs(values.std() / sd - 1.0) < 0.08


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_value_without_weight_takes_no_pairs_for_uneven(seed):
    """Where the scale of a walk is large, log p of its draws overflows: such values have no weight."""
    rng = np.random.default_rng(7)
    y = rng.poisson(np.exp(np.cumsum(rng.normal(0.0, 0.3, 60))))
    with pm.Model() as model:
        scale = pm.HalfNormal("scale", 0.5)
        level = pm.GaussianRandomWalk("level", sigma=scale, init_dist=pm.Normal.dist(0.0, 1.0), shape=60)
        pm.Poisson("y", pm.math.exp(level), observed=y)
    approx = pymc_ngvi.fit_ngvi(model, posterior="nested", random_seed=seed, progressbar=False)
    assert approx.is_exact


def test_a_quantity_without_a_mean_is_told_so():
    with pm.Model() as model:
        mu = pm.Normal("mu")
        scale = pm.HalfCauchy("scale", 1.0)
        pm.Deterministic("variance", scale**2)
        pm.Deterministic("rate", pm.math.exp(mu))
        pm.Deterministic("is_rare", pm.math.where(mu > 1.4, 1, 0))
        pm.Normal("y", mu, 1.0, observed=[0.5, -0.2, 0.1])
    said = " ".join(pymc_ngvi.fit_ngvi(model, **QUIET).summary().notes)
    assert "`scale`, `variance` may have no mean: a few extreme draws decide the mean and the sd shown" in said


def test_there_may_be_fewer_draws_than_coordinates():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(50, 1_000))
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, 1.0, shape=1_000)
        pm.Normal("y", x @ beta, pm.HalfNormal("sigma", 1.0), observed=x[:, 0] + rng.normal(size=50))
    approx = pymc_ngvi.fit_ngvi(model, **QUIET)
    assert approx.is_nested
    assert np.isfinite(approx.sample(100, random_seed=1).posterior["beta"]).all()
