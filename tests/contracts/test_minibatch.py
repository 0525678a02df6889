"""Minibatches: one batch for everything that is compiled apart, until the next is asked for."""

import itertools
import pickle

import cloudpickle
import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest

from gaussian import needs
from scipy import stats

from pymc_ngvi import LogDensity
from pymc_ngvi.density.constrain import Constrainer

N, BATCH = 60, 8
_RNG = np.random.default_rng(31)
X = _RNG.normal(size=(N, 2))
Y = _RNG.poisson(np.exp(0.4 + X @ [0.5, -0.3])).astype(float)
GROUP = _RNG.integers(0, 3, size=N)
THETA = 0.4 * np.random.default_rng(1).normal(size=(3, 6))


def poisson_glmm(x=X, y=Y, group=GROUP, total_size=N):
    """Predictors, a group index and observations, by row."""
    with pm.Model() as model:
        intercept = pm.Normal("intercept", 0.1, 1.3)
        slope = pm.Normal("slope", 0.1, 2.1, shape=x.shape[1])
        effect = pm.Normal("effect", 0.1, 0.9, shape=3)
        pm.Poisson("y", mu=pt.exp(intercept + x @ slope + effect[group]), observed=y, total_size=total_size)
    return model


def minibatch_glmm():
    x, y, group = pm.Minibatch(X, Y, GROUP, batch_size=BATCH)
    return poisson_glmm(x, y, group)


def by_hand(rows, theta):
    """Log density of `poisson_glmm` on some rows, scaled to all."""
    prior = stats.norm.logpdf(theta, 0.1, [1.3, 2.1, 2.1, 0.9, 0.9, 0.9]).sum()
    mu = np.exp(theta[0] + X[rows] @ theta[1:3] + theta[3:][GROUP[rows]])
    return prior + N / len(rows) * stats.poisson.logpmf(Y[rows], mu).sum()


def rows_of(density):
    """Return the rows in use, one array for each call of ``pm.Minibatch``."""
    return [rows.get_value() for rows in density.minibatches.rows]


def check_one_batch(density):
    """log p is that of the rows in use, and the derivatives are those of log p."""
    [rows] = rows_of(density)
    logp, grad = density.logp_grad(THETA)
    np.testing.assert_allclose(logp, [by_hand(rows, theta) for theta in THETA], rtol=1e-11)
    shifts, step = np.eye(6), 1e-5
    # Central differences: truncation is 1e-11, rounding 1e-16 / step = 1e-11, of log p in the hundreds.
    difference = [
        (by_hand(rows, THETA[0] + step * e) - by_hand(rows, THETA[0] - step * e)) / (2 * step) for e in shifts
    ]
    np.testing.assert_allclose(grad[0], difference, rtol=1e-6, atol=1e-6)
    ahead, behind = density.grad(THETA[0] + step * shifts), density.grad(THETA[0] - step * shifts)
    hessian = density.hessian_products(THETA[:1], shifts)[0]
    np.testing.assert_allclose(hessian, (ahead - behind) / (2 * step), rtol=1e-6, atol=1e-6)
    return logp


@pytest.mark.filterwarnings("ignore:PyTensor could not link to a BLAS:UserWarning")  # slow, not wrong
@pytest.mark.parametrize(
    "backend",
    ["quick", "jax", pytest.param("numba", marks=pytest.mark.slow), pytest.param("c", marks=pytest.mark.slow)],
)
def test_everything_sees_the_same_batch_until_the_next(backend):
    """The functions are compiled once, and see each batch."""
    needs(backend)
    density = LogDensity(minibatch_glmm(), backend)
    assert density.has_minibatch
    rng = np.random.default_rng(2)
    seen = []
    for _ in range(3):
        seen.append((rows_of(density)[0], check_one_batch(density)))
        np.testing.assert_array_equal(density.logp(THETA), seen[-1][1])  # no batch of its own at each call
        density.next_batch(rng)
    for (a, logp_a), (b, logp_b) in itertools.pairwise(seen):
        assert (a != b).any()
        assert (logp_a != logp_b).all()


@pytest.mark.parametrize("seed", [3, 4])
def test_rows_are_drawn_uniformly_with_replacement(seed):
    density = LogDensity(minibatch_glmm(), "quick")
    rng, counts, repeated = np.random.default_rng(seed), np.zeros(N), 0
    for _ in range(1_500):
        density.next_batch(rng)
        [rows] = rows_of(density)
        counts += np.bincount(rows, minlength=N)
        repeated += len(np.unique(rows)) < BATCH
    assert len(counts) == N
    # 200 expected of each, with standard deviation 14; the statistic has 59 degrees of freedom.
    assert stats.chisquare(counts).pvalue > 1e-4
    # Without a repeat with probability prod(1 - k / 60) = .615.
    assert abs(repeated - 1_500 * 0.385) < 4 * np.sqrt(1_500 * 0.385 * 0.615)


def test_same_seeds_same_batches():
    """The first batch is the same too, whatever PyMC's own generator, and the global one, are."""
    densities = [LogDensity(minibatch_glmm(), "quick") for _ in range(2)]
    rngs = [np.random.default_rng(5) for _ in densities]
    for _ in range(3):
        np.testing.assert_array_equal(*[rows_of(density)[0] for density in densities])
        for density, rng in zip(densities, rngs, strict=True):
            density.next_batch(rng)
    densities[1].next_batch(np.random.default_rng(6))
    assert (rows_of(densities[0])[0] != rows_of(densities[1])[0]).any()


def test_separate_calls_have_their_own_rows():
    """Two data sets of different sizes, each scaled by its own; the sizes of the batches tell them apart."""
    other = np.linspace(-1.0, 1.0, 40)
    with pm.Model() as model:
        mu = pm.Normal("mu", 0.1, 1.3)
        pm.Normal("y", mu, 0.7, observed=pm.Minibatch(Y, batch_size=8), total_size=N)
        pm.Normal("z", mu, 0.7, observed=pm.Minibatch(other, batch_size=5), total_size=40)
    density, rng = LogDensity(model, "quick"), np.random.default_rng(13)
    for _ in range(2):
        rows = {len(rows): rows for rows in rows_of(density)}
        expected = stats.norm.logpdf(0.3, 0.1, 1.3)
        expected += N / 8 * stats.norm.logpdf(Y[rows[8]], 0.3, 0.7).sum()
        expected += 40 / 5 * stats.norm.logpdf(other[rows[5]], 0.3, 0.7).sum()
        np.testing.assert_allclose(density.logp(np.array([[0.3]])), expected, rtol=1e-12)
        assert (rows[8][:5] != rows[5]).any()
        density.next_batch(rng)


def test_a_minibatch_of_shared_data_follows_it():
    """The number of rows is read when a batch is drawn."""
    with pm.Model() as model:
        y = pm.Minibatch(pm.Data("data", Y), batch_size=BATCH)
        pm.Normal("y", pm.Normal("mu", 0.1, 1.3), 0.7, observed=y, total_size=N)
    density, rng = LogDensity(model, "quick"), np.random.default_rng(7)

    def check(data):
        seen = set()
        for _ in range(100):
            density.next_batch(rng)
            seen |= set(rows_of(density)[0].tolist())
        # 800 rows: one of at most 60 is missed with probability 1.4e-6.
        assert seen == set(range(len(data)))
        expected = N / BATCH * stats.norm.logpdf(data[rows_of(density)[0]], 0.3, 0.7).sum()
        np.testing.assert_allclose(
            density.logp(np.array([[0.3]])), stats.norm.logpdf(0.3, 0.1, 1.3) + expected, rtol=1e-12
        )

    check(Y)
    for data in (np.arange(20.0), np.arange(30.0)):  # fewer rows, then more
        with model:
            pm.set_data({"data": data})
        check(data)


def test_a_minibatch_of_a_minibatch():
    outer = pm.Minibatch(pm.Minibatch(Y, batch_size=20), batch_size=5)
    with pm.Model() as model:
        pm.Normal("y", pm.Normal("mu", 0.1, 1.3), 0.7, observed=outer, total_size=N)
    density = LogDensity(model, "quick")
    inner, outer = sorted(rows_of(density), key=len, reverse=True)
    assert (len(inner), len(outer)) == (20, 5)
    expected = stats.norm.logpdf(0.3, 0.1, 1.3) + N / 5 * stats.norm.logpdf(Y[inner[outer]], 0.3, 0.7).sum()
    np.testing.assert_allclose(density.logp(np.array([[0.3]])), expected, rtol=1e-12)


def test_survives_a_pickle():
    """The copy has the batch, and rows of its own; a Constrainer beside it has the same."""
    model = minibatch_glmm()
    with model:
        y = model.rvs_to_values[model["y"]]
        pm.Deterministic("shifted", y + model["intercept"])
    density = LogDensity(model, "quick")
    density.next_batch(np.random.default_rng(8))
    constrainer = Constrainer(density)
    expected, before = density.logp(THETA), constrainer(THETA)["shifted"]
    copy, copied_constrainer = pickle.loads(cloudpickle.dumps((density, constrainer)))
    assert copy.has_minibatch
    np.testing.assert_array_equal(copy.logp(THETA), expected)
    np.testing.assert_array_equal(copied_constrainer(THETA)["shifted"], before)
    copy.next_batch(np.random.default_rng(9))
    check_one_batch(copy)
    np.testing.assert_array_equal(density.logp(THETA), expected)
    shifted = Y[rows_of(copy)[0]] + THETA[:, :1]
    np.testing.assert_allclose(copied_constrainer(THETA)["shifted"], shifted, rtol=1e-13)


def test_a_minibatch_that_only_a_deterministic_reads():
    """The log density has none; the Deterministic gets rows at random."""
    with pm.Model() as model:
        mu = pm.Normal("mu")
        pm.Deterministic("shifted", mu + pm.Minibatch(Y, batch_size=BATCH))
    density = LogDensity(model, "quick")
    assert not density.has_minibatch
    shifted = Constrainer(density)(np.array([[0.5], [1.5]]), random_seed=1)["shifted"]
    assert shifted.shape == (2, BATCH)
    assert np.isin(shifted[0] - 0.5, Y).all()


def test_hessians_follow_the_batch():
    """Rows have one column or two that are not 0, which are others in each batch."""
    rng = np.random.default_rng(14)
    design = np.zeros((N, 24))
    design[np.arange(N), rng.integers(24, size=N)] = 1.0
    design[np.arange(0, N, 2), rng.integers(24, size=N // 2)] += 0.5
    x, y = pm.Minibatch(design, (Y > 0).astype(float), batch_size=BATCH)
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, 2.0, shape=24)
        pm.Bernoulli("y", logit_p=x @ beta, observed=y, total_size=N)
    density, theta = LogDensity(model, "quick"), rng.standard_normal((3, 24))
    for _ in range(5):
        density.next_batch(rng)
        [rows] = rows_of(density)
        p = 1.0 / (1.0 + np.exp(-theta @ design[rows].T))
        weights = N / BATCH * (p * (1.0 - p)).mean(axis=0)
        expected = -np.eye(24) / 4.0 - design[rows].T @ (weights[:, None] * design[rows])
        np.testing.assert_allclose(density.mean_hessian(theta).products(np.eye(24)), expected, rtol=1e-9, atol=1e-12)
    assert density.rows is None  # expectations over the rows of one batch would not be those of the data


# --- models that make no sense ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["data", "predictor", "both"])
@pytest.mark.filterwarnings("ignore:total_size not provided:UserWarning")
def test_observed_variables_without_a_total_size_are_refused(part):
    x, y = pm.Minibatch(X, Y, batch_size=BATCH)
    with pm.Model() as model:
        mu = pm.Normal("mu")
        pm.Normal("fine", mu, observed=Y)
        pm.Normal("scaled", x[:, 0] * mu, observed=y, total_size=N)
        mean = pm.Deterministic("mean", mu * x[:, 0]) if part != "data" else mu
        pm.Normal("unscaled", mean, observed=Y[:BATCH] if part == "predictor" else y)
    with pytest.raises(ValueError, match=r"^Observed variables 'unscaled' read.*total_size=, the number of rows"):
        LogDensity(model)


def test_free_variables_that_depend_on_a_minibatch_are_refused():
    x, y = pm.Minibatch(X, Y, batch_size=BATCH)
    with pm.Model() as model:
        local = pm.Normal("local", x[:, 0])
        pm.Normal("y", local, observed=y, total_size=N)
    with pytest.raises(ValueError, match=r"^Free variables 'local' depend on pm\.Minibatch.*full data"):
        LogDensity(model)


def test_potentials_that_depend_on_a_minibatch_give_a_warning():
    x = pm.Minibatch(X, batch_size=BATCH)
    with pm.Model() as model:
        mu = pm.Normal("mu", 0.1, 1.3)
        pm.Potential("fine", -(mu**4))
        pm.Potential("by_hand", N / BATCH * (x[:, 0] * mu).sum())
    with pytest.warns(UserWarning, match=r"^Potentials 'by_hand' depend on pm\.Minibatch.*multiply") as caught:
        density = LogDensity(model, "quick")
    assert caught[0].filename == __file__
    [rows] = rows_of(density)
    expected = stats.norm.logpdf(0.3, 0.1, 1.3) - 0.3**4 + N / BATCH * (0.3 * X[rows, 0]).sum()
    np.testing.assert_allclose(density.logp(np.array([[0.3]])), expected, rtol=1e-12)


def test_arrays_of_different_lengths():
    x, y = pm.Minibatch(X, pytensor.shared(Y[1:]), batch_size=BATCH)
    with pm.Model() as model:
        pm.Normal("y", pm.Normal("mu") * x[:, 0], observed=y, total_size=N)
    with pytest.raises(ValueError, match="different numbers of rows"):
        LogDensity(model)


def test_passes_take_each_row_once_in_an_order_of_their_own():
    """Batches of 4 from 10 rows: the third ends one pass and begins the next; any batch can be had by its number."""
    with pm.Model() as model:
        mu = pm.Normal("mu")
        pm.Normal("y", mu, observed=pm.Minibatch(np.arange(10.0), batch_size=4), total_size=10)
    density = LogDensity(model, backend="quick")
    assert density.n_batches == 3
    [index] = density.minibatches.rows

    def rows(seed, numbers):
        taken = []
        for number in numbers:
            density.take_batch(seed, number)
            taken.append(index.get_value())
        return np.concatenate(taken)

    passes = rows(1, range(5)).reshape(2, 10)
    np.testing.assert_array_equal(np.sort(passes, axis=1), [range(10)] * 2)
    assert (passes[0] != passes[1]).any()
    np.testing.assert_array_equal(rows(1, [3, 0]), np.concatenate([passes.ravel()[12:16], passes[0, :4]]))
    assert (rows(2, range(5)) != passes.ravel()).any()
