"""Importance weights: smoothing, weighted moments and their errors, resampling, draws as users get them, refusals."""

import warnings

import numpy as np
import pymc as pm
import pytest
import xarray as xr

from numpy.testing import assert_allclose, assert_array_equal
from scipy import stats
from texts import DOCS, run

from pymc_ngvi import LogDensity, NGVIApproximation
from pymc_ngvi.core.psis import Weights, pareto_khat
from pymc_ngvi.families import DiagonalState, FullState, MixtureState
from pymc_ngvi.results.sampling import POOL, Correction, MomentSums, check_help, weighed, without_replacement

#: Errors of estimates that are allowed: four standard errors.
N_SE = 4.0


def verdict_of(theta, log_p, log_q):
    log_weights, found = weighed(log_p, log_q)
    sums = MomentSums(len(theta))
    sums.add(theta, np.exp(log_weights))
    return Correction.of(found, sums)


# --- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("constant", [0.0, 800.0])
def test_weights_are_the_ratios_but_in_the_tail(rng, constant):
    x = rng.normal(size=4_000)
    log_p, log_q = stats.norm(0.0, 1.2).logpdf(x), stats.norm.logpdf(x) + constant
    log_weights, found = weighed(log_p, log_q)
    assert np.exp(log_weights).sum() == pytest.approx(1.0, rel=1e-12)
    assert found.khat == pareto_khat(log_p, log_q)
    ratio = log_p - log_q + constant
    body = np.argsort(ratio)[: 4_000 - int(np.ceil(3 * 4_000**0.5))]  # the rest is smoothed
    difference = log_weights[body] - ratio[body]
    assert_allclose(difference, difference[0], rtol=0, atol=1e-10)
    # Means of ratios are 1: the tail is smoothed to about what it was.
    assert difference[0] == pytest.approx(-np.log(4_000 * np.exp(ratio).mean()), abs=0.01)
    assert found.effective == pytest.approx(1.0 / np.exp(2.0 * log_weights).sum())


def test_draws_outside_the_support_have_no_weight(rng):
    x = rng.normal(size=1_000)
    log_p = np.where(x > 0.5, stats.norm.logpdf(x), -np.inf)
    log_p[x < -2.0] = np.nan
    weights = np.exp(weighed(log_p, stats.norm.logpdf(x))[0])
    assert_array_equal(weights > 0.0, x > 0.5)
    assert_allclose(weights[x > 0.5], 1.0 / np.sum(x > 0.5))


def test_equal_weights_and_what_k_hat_allows(rng):
    x = rng.normal(size=2_000)
    log_weights, equal = weighed(3.0 + stats.norm.logpdf(x), stats.norm.logpdf(x))
    assert equal.khat == -np.inf
    assert_allclose(np.exp(log_weights), 1 / 2_000)
    check_help(equal)
    _, far = weighed(stats.t(2).logpdf(x), stats.norm(0, 0.4).logpdf(x))
    with pytest.raises(
        ValueError, match=r"k-hat is \d\.\d\d, and 2,000 draws of q allow for 0\.70 at most.*Fit a rich"
    ):
        check_help(far)
    uneven = Weights(0.7 - 1e-3, 150.0, 200, 0)
    with pytest.raises(ValueError, match=r"200 draws of q allow for 0\.57 at most.*Take 2,200 draws or more"):
        check_help(uneven)
    with pytest.raises(ValueError, match=r"allow for 0\.57 at most.*Take 2,000 draws or more"):
        check_help(uneven._replace(khat=0.6), 10)


# --- moments ----------------------------------------------------------------------------------------------------------


def test_sums_give_weighted_moments_however_draws_are_cut(rng):
    x = 1_000.0 + rng.normal(size=(500, 2, 3))
    weights = rng.random(500)
    weights /= weights.sum()
    results = []
    for cuts in ([], [7, 300]):
        sums = MomentSums(500)
        for values, of in zip(np.split(x, cuts), np.split(weights, cuts), strict=True):
            sums.add(values, of)
        results.append(sums.result())
    w = weights[:, None, None]
    mean = (w * x).sum(0)
    var = (w * (x - mean) ** 2).sum(0)
    for found in results:
        assert_allclose(found["mean"].corrected, mean, rtol=1e-12)
        assert_allclose(found["sd"].corrected, var**0.5, rtol=1e-10)
        assert_allclose(found["mean"].uncorrected, x.mean(0), rtol=1e-12)
        assert_allclose(found["sd"].uncorrected, x.std(0), rtol=1e-10)
        assert_allclose(found["mean"].se, (w**2 * (x - mean) ** 2).sum(0) ** 0.5, rtol=1e-9)
        assert_allclose(found["sd"].se, (w**2 * ((x - mean) ** 2 - var) ** 2).sum(0) ** 0.5 / (2 * var**0.5), rtol=1e-8)
        one = (x - x.mean(0)) / 500
        assert_allclose(found["mean"].change_se, ((w * (x - mean) - one) ** 2).sum(0) ** 0.5, rtol=1e-8)
        two = ((x - x.mean(0)) ** 2 - x.var(0)) / (1_000 * x.std(0))
        moved = w * ((x - mean) ** 2 - var) / (2 * var**0.5) - two
        assert_allclose(found["sd"].change_se, (moved**2).sum(0) ** 0.5, rtol=1e-8)


@pytest.mark.parametrize("seed", [1, 2])
def test_standard_errors_are_those_of_repetitions(seed):
    rng = np.random.default_rng(seed)
    n_runs, n = 400, 1_000
    found = []
    for _ in range(n_runs):
        x = 1.2 * rng.normal(size=n)
        weights = np.exp(-0.5 * (x - 0.2) ** 2 + 0.5 * (x / 1.2) ** 2)
        sums = MomentSums(n)
        sums.add(x, weights / weights.sum())
        pairs = [(of.corrected, of.se, of.change, of.change_se) for of in sums.result().values()]
        found.append(np.ravel(pairs))
    found = np.array(found).reshape(n_runs, 2, 4)
    # The standard deviation of 400 repetitions is known to 1 / 800^.5 = 3.5 %.
    for value, error in ((0, 1), (2, 3)):
        assert_allclose(found[:, :, error].mean(0), found[:, :, value].std(0), rtol=N_SE / 800**0.5)


# --- does it help? ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2])
def test_size_and_error_of_a_correction_that_is_known(seed):
    """Means off by .3, standard deviations by 20 %, in all of five coordinates."""
    n = 4_000
    x = 0.3 + 1.2 * np.random.default_rng(seed).normal(size=(n, 5))
    found = verdict_of(x, stats.norm.logpdf(x).sum(1), stats.norm(0.3, 1.2).logpdf(x).sum(1))
    assert found.size == pytest.approx(np.sqrt((0.3**2 + 0.2**2) / 2), abs=N_SE * found.error)
    # A mean has the error ess^-1/2, a standard deviation about (2 ess)^-1/2.
    assert found.error == pytest.approx(np.sqrt(0.75 / found.effective_sample_size), rel=0.15)
    assert found.helps
    assert "do not help" not in found.sentence()


@pytest.mark.parametrize("seed", [1, 2])
def test_a_correction_smaller_than_its_error_does_not_help_until_there_are_draws_enough(seed):
    rng = np.random.default_rng(seed)
    off = 0.02

    def of(n):
        x = off + rng.normal(size=(n, 30))
        return verdict_of(x, stats.norm.logpdf(x).sum(1), stats.norm(off, 1.0).logpdf(x).sum(1))

    few, many = of(1_000), of(20_000)
    assert not few.helps
    assert "do not help" in few.sentence()
    assert many.helps
    assert many.size == pytest.approx(off / 2**0.5, abs=0.003)


def test_the_size_of_a_correction_is_without_its_noise():
    """One coordinate is too wide; 59 are right, and all that weights change in them is noise."""
    rng, wide = np.random.default_rng(1), np.r_[1.8, np.ones(59)]
    squares = []
    for _ in range(60):
        x = wide * rng.normal(size=(400, 60))
        squares.append(verdict_of(x, stats.norm.logpdf(x[:, 0]), stats.norm(0.0, 1.8).logpdf(x[:, 0])).size ** 2)
    error = np.std(squares) / 60**0.5
    assert np.mean(squares) == pytest.approx(0.8**2 / 120, abs=3 * error)
    assert error < 2e-4  # the noise would add 8e-4


# --- resampling -------------------------------------------------------------------------------------------------------


def test_chances_are_the_weights_and_nothing_comes_twice(rng):
    weights = np.array([0.0, 0.05, 0.2, 0.05, 0.1, 0.1, 0.3, 0.2])
    count, n_runs = np.zeros(8), 4_000
    for _ in range(n_runs):
        chosen, left_out = without_replacement(weights, 3, rng)
        assert len(set(chosen.tolist())) == 3
        assert left_out == 0.0
        count[chosen] += 1
    expected = 3 * weights
    assert_allclose(count / n_runs, expected, atol=N_SE * np.sqrt(0.25 / n_runs))
    assert count[0] == 0


def test_a_weight_too_heavy_is_taken_for_certain_and_the_rest_left_out(rng):
    weights = np.array([0.5, 0.3, 0.1, 0.05, 0.05])
    count, n_runs = np.zeros(5), 4_000
    for _ in range(n_runs):
        chosen, left_out = without_replacement(weights, 3, rng)
        assert len(set(chosen.tolist())) == 3
        count[chosen] += 1
    assert left_out == pytest.approx(0.5 - 1 / 3)
    assert_allclose(count / n_runs, [1.0, 1.0, 0.5, 0.25, 0.25], atol=N_SE * np.sqrt(0.25 / n_runs))
    chosen, _ = without_replacement(weights, 5, rng)
    assert sorted(chosen) == [0, 1, 2, 3, 4]


# --- what users get ---------------------------------------------------------------------------------------------------

Y = np.array([[3, 1, 4], [1, 5, 9]])
SHAPE, RATE = 2.0 + Y.sum(0), 0.5 + len(Y)


@pytest.fixture(scope="module")
def model():
    """Independent conjugate rates: the posterior is Gamma(SHAPE, RATE)."""
    with pm.Model(coords={"group": ["a", "b", "c"], "day": [1, 2]}) as model:
        rate = pm.Gamma("rate", 2.0, 0.5, dims="group")
        pm.Deterministic("total", rate.sum())
        pm.Deterministic("twice", 2.0 * rate, dims="group")
        pm.Poisson("y", rate, observed=Y, dims=("day", "group"))
    return model


@pytest.fixture(scope="module")
def approx(model):
    """A Gaussian of the logarithms whose means are too high and whose standard deviations are too large."""
    sd = SHAPE**-0.5
    q = DiagonalState.from_scale(np.log(SHAPE / RATE) + 0.2 * sd, 1.3 * sd)
    return NGVIApproximation(LogDensity(model), q, random_seed=1)


@pytest.mark.parametrize("seed", [1, 2])
def test_corrected_moments_of_a_conjugate_posterior(approx, seed):
    found = approx.corrected(10_000, random_seed=seed)
    assert set(found.data_vars) == {"rate", "total", "twice"}
    assert found["rate"].dims == ("moment", "estimate", "group")
    assert list(found["group"].values) == ["a", "b", "c"]
    posterior = stats.gamma(SHAPE, scale=1 / RATE)
    exact = {
        "rate": (posterior.mean(), posterior.std()),
        "twice": (2 * posterior.mean(), 2 * posterior.std()),
        "total": (posterior.mean().sum(), np.sqrt(posterior.var().sum())),
    }
    for name, moments in exact.items():
        for moment, value in zip(("mean", "sd"), moments, strict=True):
            of = found[name].sel(moment=moment)
            corrected, se, uncorrected = (of.sel(estimate=e).values for e in ("corrected", "se", "uncorrected"))
            assert np.all(np.abs(corrected - value) < N_SE * se)
            assert np.all(np.abs(uncorrected - value) > N_SE * se)
            assert np.all(se < 0.03 * posterior.std().sum())
    assert found.attrs["khat"] < 0.5
    assert 1_000 < found.attrs["effective_sample_size"] < 10_000
    assert found.attrs["correction_size"] > found.attrs["correction_error"]
    again = approx.corrected(10_000, random_seed=seed)
    xr.testing.assert_equal(found, again)


@pytest.mark.parametrize("seed", [1, 2])
def test_psis_draws_are_those_of_q_with_weights(approx, seed):
    tree = approx.sample(3_000, importance="psis", random_seed=seed, log_p=True)
    plain = approx.sample(3_000, random_seed=seed, log_p=True)
    xr.testing.assert_equal(tree["posterior"].to_dataset(), plain["posterior"].to_dataset())
    given = tree["sample_stats"]
    assert set(given.data_vars) == {"log_p", "log_q", "log_weight"}
    xr.testing.assert_equal(given["log_p"], plain["sample_stats"]["log_p"])
    weights = np.exp(given["log_weight"])
    assert float(weights.sum()) == pytest.approx(1.0)
    posterior = stats.gamma(SHAPE, scale=1 / RATE)
    mean = tree["posterior"]["rate"].weighted(weights).mean(("chain", "draw"))
    error = posterior.std() / given.attrs["effective_sample_size"] ** 0.5
    assert np.all(np.abs(mean - posterior.mean()) < N_SE * error)
    assert given.attrs["khat"] == pytest.approx(pareto_khat(*(given[n].values[0] for n in ("log_p", "log_q"))))
    for group in ("posterior", "sample_stats"):
        assert "to be weighted by exp(log_weight)" in tree[group].attrs["importance"]
        assert tree[group].attrs["correction"].startswith("Importance weights change")


@pytest.mark.parametrize("seed", [1, 2])
def test_psir_draws_are_of_the_posterior_and_all_different(approx, seed):
    n = 2_000
    tree = approx.sample(n, importance="psir", random_seed=seed, log_p=True)
    draws = tree["posterior"]["rate"].isel(chain=0)
    assert dict(tree["posterior"].sizes) == {"chain": 1, "draw": n, "group": 3}
    assert len(np.unique(draws, axis=0)) == n
    posterior = stats.gamma(SHAPE, scale=1 / RATE)
    assert np.all(np.abs(draws.mean("draw") - posterior.mean()) < N_SE * posterior.std() / n**0.5)
    assert_allclose(draws.std("draw"), posterior.std(), rtol=N_SE * 1.2 / (2 * n) ** 0.5)  # tails heavier than normal
    assert_allclose(tree["posterior"]["twice"].isel(chain=0), 2 * draws)
    attrs = tree["sample_stats"].attrs
    assert attrs["pool_draws"] == POOL * n
    assert 0.0 <= attrs["weight_left_out"] < 0.02
    assert "resampled without replacement from 20,000 draws" in tree["posterior"].attrs["importance"]
    assert set(tree["sample_stats"].data_vars) == {"log_p", "log_q"}
    xr.testing.assert_equal(
        tree["posterior"].to_dataset(),
        approx.sample(n, importance="psir", random_seed=seed)["posterior"].to_dataset(),
    )


@pytest.mark.parametrize("importance", ["psis", "psir"])
def test_components_of_a_mixture_stay_with_their_draws(importance):
    """Two modes far apart whose weights in q are wrong: the draws, and their components, get them right."""
    with pm.Model() as model:
        x = pm.Normal("x", 0.0, 20.0)
        two = pm.NormalMixture.dist([0.8, 0.2], mu=[-5.0, 5.0], sigma=[1.0, 1.0])
        pm.Potential("modes", pm.logp(two, x))
    q = MixtureState.of([DiagonalState.from_scale(np.array([m]), np.array([1.1])) for m in (-5.0, 5.0)])
    approx = NGVIApproximation(LogDensity(model), q)
    tree = approx.sample(2_000, importance=importance, random_seed=1)
    draws, given = tree["posterior"]["x"].values[0], tree["sample_stats"]
    component = given["component"].values[0]
    assert_array_equal(component, (draws > 0).astype(int))
    weights = np.exp(given["log_weight"].values[0]) if importance == "psis" else np.full(2_000, 1 / 2_000)
    # The prior has hardly any slope: exp(-25 / 800) is the same on both sides.
    assert weights[component == 0].sum() == pytest.approx(0.8, abs=N_SE * 0.5 / 2_000**0.5)
    assert list(tree["components"]["component"].values) == [0, 1]


def test_a_warning_says_that_weights_do_not_help():
    with pm.Model() as model:
        pm.Normal("x", 0.0, 1.0, shape=3)
    approx = NGVIApproximation(LogDensity(model), FullState(np.zeros(3), np.diag([1.0, 1.0, 1.001])))
    for call in (
        lambda: approx.sample(500, importance="psis", random_seed=1),
        lambda: approx.sample(500, importance="psir", random_seed=1),
        lambda: approx.corrected(500, random_seed=1),
    ):
        with pytest.warns(UserWarning, match="do not help") as caught:
            found = call()
        assert len(caught) == 1
        assert caught[0].filename == __file__
        attrs = found.attrs if isinstance(found, xr.Dataset) else found["posterior"].attrs
        assert "do not help" in attrs["correction"]


# --- refusals ---------------------------------------------------------------------------------------------------------


def every_call(approx):
    return [
        lambda: approx.sample(1_000, importance="psis", random_seed=1),
        lambda: approx.sample(100, importance="psir", random_seed=1),
        lambda: approx.corrected(1_000, random_seed=1),
    ]


def test_a_q_too_narrow_is_refused():
    with pm.Model() as model:
        pm.StudentT("x", nu=2.0, mu=0.0, sigma=1.0)
    approx = NGVIApproximation(LogDensity(model), DiagonalState.from_scale(np.zeros(1), np.array([0.3])))
    for call in every_call(approx):
        with pytest.raises(ValueError, match=r"k-hat is .* allow for 0\.\d\d at most"):
            call()
    assert approx.sample(10)["posterior"].sizes["draw"] == 10


def test_other_data_than_those_of_the_fit_are_refused():
    with pm.Model() as model:
        y = pm.Data("y", [0.3, 0.6])
        x = pm.Normal("x", 0.0, 1.0)
        pm.Normal("obs", x, 1.0, observed=y)
    approx = NGVIApproximation(LogDensity(model), DiagonalState.from_scale(np.array([0.5]), np.ones(1)))
    with model:
        pm.set_data({"y": [3.0, 4.0]})
    for call in every_call(approx):
        with pytest.raises(ValueError, match="'y' were changed after the fit"):
            call()


def test_unknown_words_and_too_few_draws_are_refused(approx):
    with pytest.raises(ValueError, match="'psis', 'psir' or None; got 'sir'"):
        approx.sample(100, importance="sir")
    with pytest.raises(ValueError, match="at least 100 draws; got 99"):
        approx.sample(99, importance="psis")
    for call in (lambda n: approx.sample(n, importance="psir"), approx.corrected):
        with pytest.raises(ValueError, match="whole number of at least 1; got 0"):
            call(0)


# --- docs -------------------------------------------------------------------------------------------------------------


def test_the_examples_of_the_page_run():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run((DOCS / "corrections.md").read_text(encoding="utf-8"))
