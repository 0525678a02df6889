"""`approx.update`: the posterior given new rows as well, beside sums over a grid, and beside fits of all rows."""

import pickle
import warnings

import numpy as np
import pandas as pd
import pymc as pm
import pytest

from scipy import stats
from scipy.special import gammaln

import pymc_ngvi

from pymc_ngvi.core.linalg import logsumexp
from pymc_ngvi.marginal.left_out import beside
from pymc_ngvi.marginal.quadrature import Centres, Forest

N_GROUPS, N_OF_GROUP = 12, 5
GRID = np.linspace(1e-3, 6.0, 6_000)
LABELS = [f"s{i}" for i in range(N_GROUPS)]


def group_data(seed=0):
    rng = np.random.default_rng(seed)
    a = rng.normal(0.0, 0.8, N_GROUPS + 2)
    group = np.repeat(np.arange(N_GROUPS), N_OF_GROUP)
    new = np.array([0, 0, 3, N_GROUPS, N_GROUPS, N_GROUPS, N_GROUPS + 1])
    return group, a[group] + rng.normal(size=len(group)), new, a[new] + rng.normal(size=len(new))


def groups_model(labels, group, y, *, with_mean=False):
    with pm.Model(coords={"group": labels}) as model:
        index = pm.Data("index", group)
        tau = pm.HalfNormal("tau", 1.0)
        a = pm.Normal("a", 0.0, tau, dims="group")
        pm.Deterministic("double", 2.0 * a, dims="group")
        pm.Normal("y", a[index], 1.0, observed=y)
    return model


class Grid:
    """The exact posterior of `groups_model`, by sums over tau."""

    def __init__(self, group, y, n_groups):
        n, total = np.bincount(group, minlength=n_groups), np.bincount(group, y, minlength=n_groups)
        square = np.bincount(group, y**2, minlength=n_groups)
        precision = n + 1.0 / GRID[:, None] ** 2
        self.mean, self.variance = total / precision, 1.0 / precision
        log_p = -0.5 * (n * np.log(2 * np.pi) + np.log(precision * GRID[:, None] ** 2) + square - total**2 / precision)
        log_p = log_p.sum(axis=1) + stats.halfnorm.logpdf(GRID)
        self.log_marginal = float(logsumexp(log_p) + np.log(GRID[1] - GRID[0]))
        self.weights = np.exp(log_p - logsumexp(log_p))

    def moments(self):
        """Means and standard deviations of tau, and of the groups."""
        tau = self.weights @ GRID
        mean = self.weights @ self.mean
        variance = self.weights @ (self.variance + self.mean**2) - mean**2
        return np.append(tau, mean), np.sqrt(np.append(self.weights @ (GRID - tau) ** 2, variance))


@pytest.fixture(scope="module")
def fit():
    group, y, _, _ = group_data()
    approx = pymc_ngvi.fit_ngvi(
        model=groups_model(LABELS, group, y), posterior="exact", random_seed=1, progressbar=False
    )
    assert approx.is_exact
    return approx


def moments_of(updated, n=20_000):
    posterior = updated.sample(n, chains=1, random_seed=2).posterior
    draws = np.column_stack([posterior["tau"].values[0], posterior["a"].values[0]])
    return draws.mean(axis=0), draws.std(axis=0)


# --- against sums ---


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("by_label", [True, False])
def test_new_groups_are_those_of_the_exact_posterior(fit, seed, by_label):
    group, y, new, y_new = group_data()
    labels = [*LABELS, "new", "newer"]
    rows = {"index": [labels[i] for i in new]} if by_label else {"index": new, "group": labels}
    updated = fit.update({**rows, "y": y_new}, random_seed=seed)
    before = Grid(group, y, N_GROUPS)
    all_rows = Grid(np.append(group, new), np.append(y, y_new), N_GROUPS + 2)
    assert updated.checks.is_reliable
    mean, sd = moments_of(updated)
    right, scale = all_rows.moments()
    np.testing.assert_allclose(mean, right, atol=0.06 * scale.max())
    np.testing.assert_allclose(sd, scale, rtol=0.08)
    density = updated.log_predictive_density
    assert abs(density.value - (all_rows.log_marginal - before.log_marginal)) < 4 * density.se + 0.02
    assert updated.sample(10).posterior["a"]["group"].values.tolist() == labels


def test_labels_in_another_order_go_with_their_own_effects(fit):
    _, _, new, y_new = group_data()
    known = new < N_GROUPS
    updated = fit.update({"index": new[known], "y": y_new[known]}, random_seed=1)
    turned = {"group": LABELS[::-1], "index": N_GROUPS - 1 - new[known], "y": y_new[known]}
    other = fit.update(turned, random_seed=1)
    a, b = (of.sample(500, random_seed=3).posterior["a"] for of in (updated, other))
    np.testing.assert_allclose(b.sel(group=LABELS).values, a.values)


def test_a_gaussian_is_updated_by_its_importance_weights():
    rng = np.random.default_rng(3)
    y, new = rng.normal(1.0, 1.0, size=50), rng.normal(1.5, 1.0, size=5)
    with pm.Model():
        mu = pm.Normal("mu", 0.0, 10.0)
        pm.Normal("y", mu, 1.0, observed=y)
        approx = pymc_ngvi.fit_ngvi(random_seed=1, progressbar=False)
    draws = approx.update({"y": new}, draws=4_000).sample(20_000).posterior["mu"].values
    precision = 55 + 0.01
    assert abs(draws.mean() - np.append(y, new).sum() / precision) < 5 / np.sqrt(4_000 * precision)
    np.testing.assert_allclose(draws.std(), precision**-0.5, rtol=5 / np.sqrt(2 * 4_000))


def test_observations_held_by_data_of_the_model_and_standardised_predictors():
    rng = np.random.default_rng(4)
    x, y = rng.normal(5.0, 2.0, size=80), rng.poisson(3.0, size=80)
    with pm.Model():
        predictor, counts = pm.Data("x", x), pm.Data("counts", y)
        a, b = pm.Normal("a", 0, 2), pm.Normal("b", 0, 2)
        pm.Poisson("y", pm.math.exp(a + b * (predictor - predictor.mean())), observed=counts)
        approx = pymc_ngvi.fit_ngvi(random_seed=1, progressbar=False)
    new = {"x": np.array([9.0, 9.5]), "counts": np.array([3, 4])}
    updated = approx.update(new, random_seed=1)
    draws = updated._state.pool.g
    eta = draws[:, [0]] + draws[:, [1]] * (new["x"] - x.mean())  # of the fit, not of the new rows
    np.testing.assert_allclose(updated._change.log_ratio, stats.poisson.logpmf(new["counts"], np.exp(eta)).sum(axis=1))
    other = approx.update({"x": new["x"], "y": new["counts"]}, random_seed=1)
    np.testing.assert_array_equal(other._change.log_ratio, updated._change.log_ratio)


def test_a_walk_goes_on():
    rng = np.random.default_rng(5)
    level = np.cumsum(rng.normal(0.0, 0.3, size=43))
    y = level + rng.normal(0.0, 0.5, size=43)

    def walk(n):
        with pm.Model(coords={"day": range(n)}) as model:
            day = pm.Data("at", np.arange(n))
            w = pm.GaussianRandomWalk("w", sigma=0.3, init_dist=pm.Normal.dist(0, 1), dims="day")
            pm.Normal("y", w[day], 0.5, observed=y[:n])
        return model

    approx = pymc_ngvi.fit_ngvi(model=walk(40), random_seed=1, progressbar=False)
    updated = approx.update({"day": list(range(43)), "at": [40, 41, 42], "y": y[40:]}, draws=4_000, random_seed=1)
    draws = updated.sample(8_000, chains=1).posterior["w"].values[0]
    # All is normal: precision of the walk and of the rows.
    steps = np.eye(43) - np.eye(43, k=-1)
    precision = steps.T @ np.diag([1.0, *[1 / 0.09] * 42]) @ steps + np.eye(43) / 0.25
    cov = np.linalg.inv(precision)
    sd = np.sqrt(np.diag(cov))
    assert updated.checks.is_reliable
    np.testing.assert_allclose(draws.mean(axis=0) / sd, cov @ (y / 0.25) / sd, atol=0.12)
    np.testing.assert_allclose(draws.std(axis=0), sd, rtol=0.1)


# --- without the rows of the fit ---


def test_a_file_is_updated_without_the_rows_of_the_fit(fit, tmp_path):
    _, _, new, y_new = group_data()
    known = new < N_GROUPS
    rows = {"index": new[known], "y": y_new[known]}
    fit.save(tmp_path / "fit.nc")
    with pytest.warns(UserWarning, match="fitted to other data"):
        loaded = pymc_ngvi.load(tmp_path / "fit.nc", groups_model(LABELS, new[known], y_new[known]))
    mine, other = (approx.update(rows, random_seed=1) for approx in (fit, loaded))
    np.testing.assert_array_equal(other._change.log_ratio, mine._change.log_ratio)
    np.testing.assert_array_equal(other.sample(100).posterior["a"], mine.sample(100).posterior["a"])


def test_a_gaussian_without_its_rows_is_told_of(tmp_path):
    with pm.Model() as model:
        pm.Normal("y", pm.Normal("mu", 0.0, 1.0), 1.0, observed=np.zeros(4))
        approx = pymc_ngvi.fit_ngvi(random_seed=1, progressbar=False)
    approx.save(tmp_path / "fit.nc")
    with pm.Model() as other:
        pm.Normal("y", pm.Normal("mu", 0.0, 1.0), 1.0, observed=np.ones(2))
    with pytest.warns(UserWarning, match="fitted to other data"):
        loaded = pymc_ngvi.load(tmp_path / "fit.nc", other)
    assert approx.update({"y": [1.0]}).checks.is_reliable
    with pytest.warns(UserWarning, match="not compared with log p: its data are not there"):
        assert not loaded.update({"y": [1.0]}).checks.is_reliable
    assert model.observed_RVs  # the model of the fit is as it was


def test_the_model_and_the_fit_stay_as_they_are(fit):
    before = fit.sample(100, random_seed=1).posterior["a"].values
    data, coords = fit.model["index"].get_value(), dict(fit.model.coords)
    fit.update({"index": ["new"], "y": [1.0]})
    np.testing.assert_array_equal(fit.model["index"].get_value(), data)
    assert dict(fit.model.coords) == coords
    np.testing.assert_array_equal(fit.sample(100, random_seed=1).posterior["a"].values, before)


# --- when a fit is due ---


def test_rows_that_do_not_go_with_the_fit_are_told_of(fit):
    with pytest.warns(UserWarning, match="Fit again with all of the rows"):
        updated = fit.update({"index": [0, 0, 0], "y": [9.0, 9.0, 9.0]})
    assert any("conditional mean of a group moves by" in doubt for doubt in updated.checks.failures)
    with pytest.warns(UserWarning, match="a few draws have most of the weight"):
        updated = fit.update({"index": ["a", "b", "c"] * 4, "y": [30.0, -30.0, 25.0] * 4})
    assert not updated.checks.is_reliable
    assert "not reliable" in repr(updated)


def test_new_levels_with_many_rows_are_told_of_or_right(fit):
    rng = np.random.default_rng(6)
    rows = {"index": ["new"] * 400, "y": rng.normal(0.5, 1.0, size=400)}
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        updated = fit.update(rows, random_seed=1)
    a = updated.sample(4_000).posterior["a"].sel(group="new").values
    assert not updated.checks.is_reliable or (abs(a.mean() - rows["y"].mean()) < 0.02 and 0.04 < a.std() < 0.06)


def test_what_it_prints(fit):
    updated = fit.update({"index": [0, 1], "y": [0.1, 0.2]})
    text = " ".join(str(updated.summary(1_000)).split())
    assert text.startswith("Posterior with 2 new rows. Exact up to Monte Carlo error (effective sample size")
    assert "tau" in text
    assert "a[s0]" not in text
    assert "a[s0]" in str(updated.summary(1_000, group_effects=True))
    assert "<table" in updated._repr_html_()
    assert updated.sample(100)["posterior"].attrs["effective_sample_size"] == updated.checks.effective_size


# --- bad input ---


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ([1, 2], TypeError, "should be a dict"),
        ({"index": [0]}, ValueError, "has no observations: give those of 'y'"),
        ({"index": [0], "y": []}, ValueError, "'y' has no new rows|can't be evaluated"),
        ({"index": [0, 1], "y": [1.0]}, ValueError, "can't be evaluated|do not agree|broadcast"),
        ({"index": [0], "y": [np.nan]}, ValueError, "missing values"),
        ({"index": [0], "y": ["x"]}, ValueError, "should be numbers"),
        (pd.DataFrame({"index": [0], "y": [1.0]}), TypeError, "A DataFrame is for a Bambi model that is known"),
        ({"index": [0], "y": [[1.0]]}, ValueError, "has shape"),
        ({"index": [0], "y": [1.0], "z": [1.0]}, ValueError, "new_data has 'z'"),
        ({"index": [N_GROUPS], "y": [1.0]}, ValueError, "give the labels of all levels"),
        ({"index": [[0], [1, 2]], "y": [1.0]}, ValueError, "ragged"),
    ],
)
def test_bad_rows_are_told_of(fit, given, error, said):
    with pytest.raises(error, match=said):
        fit.update(given)


def test_few_draws_are_told_of(fit):
    with pytest.raises(ValueError, match="at least 100 draws"):
        fit.update({"index": [0], "y": [1.0]}, draws=50)


def test_series_that_is_observed_is_told_of():
    with pm.Model():
        pm.AR("y", rho=[pm.Normal("r", 0, 0.3)], sigma=1.0, init_dist=pm.Normal.dist(), observed=np.zeros(20))
        approx = pymc_ngvi.fit_ngvi(random_seed=1, progressbar=False)
    with pytest.raises(ValueError, match="one distribution together"):
        approx.update({"y": np.zeros(3)})


def test_counts_are_whole_numbers():
    with pm.Model():
        pm.Poisson("y", pm.HalfNormal("rate", 2.0), observed=np.ones(10, dtype=int))
        approx = pymc_ngvi.fit_ngvi(random_seed=1, progressbar=False)
    with pytest.raises(ValueError, match="'y' should be whole numbers"):
        approx.update({"y": [1.5]})


# --- data that are no rows ---


def by_region(x, labels, group, y):
    with pm.Model(coords={"group": labels}) as model:
        predictor, index = pm.Data("x", x, dims="group"), pm.Data("index", group)
        slope, tau = pm.Normal("slope"), pm.HalfNormal("tau", 1.0)
        a = pm.Normal("a", slope * predictor, tau, dims="group")
        pm.Normal("y", a[index], 1.0, observed=y)
    return model


def test_predictors_of_groups_are_those_of_the_fit():
    group, y, new, y_new = group_data()
    x = np.linspace(-1.0, 1.0, N_GROUPS + 2)
    approx = pymc_ngvi.fit_ngvi(
        model=by_region(x[:N_GROUPS], LABELS, group, y), posterior="exact", random_seed=1, progressbar=False
    )
    rows = {"group": [*LABELS, "new", "newer"], "index": new, "y": y_new}
    updated = approx.update({**rows, "x": x}, random_seed=1)
    again = pymc_ngvi.fit_ngvi(
        model=by_region(x, rows["group"], np.append(group, new), np.append(y, y_new)), posterior="exact",
        random_seed=2, progressbar=False,
    )  # fmt: skip
    ours, theirs = (of.sample(8_000, chains=1, random_seed=3).posterior["a"].values[0] for of in (updated, again))
    np.testing.assert_allclose(ours.mean(axis=0), theirs.mean(axis=0), atol=0.1 * theirs.std(axis=0).max())
    np.testing.assert_allclose(ours.std(axis=0), theirs.std(axis=0), rtol=0.1)
    with pytest.raises(ValueError, match="prior of 'a' depends on 'x', which is not what it was in the fit"):
        approx.update({**rows, "x": x[::-1]})
    turned = approx.update({"group": LABELS[::-1], "index": [0], "y": [0.3], "x": x[:N_GROUPS][::-1]}, random_seed=1)
    np.testing.assert_array_equal(
        turned._change.log_ratio, approx.update({"index": [N_GROUPS - 1], "y": [0.3]}, random_seed=1)._change.log_ratio
    )


def test_a_potential_of_the_new_data_is_told_of():
    with pm.Model():
        x, mu = pm.Data("x", np.zeros(3)), pm.Normal("mu")
        pm.Potential("penalty", -(mu**2) * x.sum())
        pm.Normal("y", mu + x, 1.0, observed=np.zeros(3))
        approx = pymc_ngvi.fit_ngvi(random_seed=1, progressbar=False)
    with pytest.raises(ValueError, match="Potential 'penalty' depends on the new data"):
        approx.update({"x": [1.0], "y": [0.0]})


def test_effects_of_rows_are_new_with_each_row():
    rng = np.random.default_rng(9)
    x, y = rng.normal(size=60), rng.poisson(2.0, size=60)
    with pm.Model():
        predictor = pm.Data("x", x, dims="row")
        a, sd = pm.Normal("a"), pm.HalfNormal("sd", 0.5)
        e = pm.Normal("e", 0.0, sd, dims="row")
        pm.Poisson("y", pm.math.exp(a + 0.1 * predictor + e), observed=y)
        approx = pymc_ngvi.fit_ngvi(random_seed=1, progressbar=False)
    updated = approx.update({"x": [0.5, 1.0], "y": [7, 0]}, random_seed=1)
    e = updated.sample(2_000, chains=1).posterior["e"].values[0]
    assert e.shape == (2_000, 62)
    assert e[:, 60].mean() > 0.05
    assert e[:, 61].mean() < -0.02
    assert abs(e[:, :60].mean(axis=0) - approx.sample(2_000).posterior["e"].values.mean(axis=(0, 1))).max() < 0.1


# --- found by trying ---


def test_a_new_school_is_told_by_its_new_classes():
    rng = np.random.default_rng(11)
    school_of, n_schools = np.repeat(np.arange(12), 3), 12
    school, klass = rng.normal(0.0, 1.0, 12), rng.normal(0.0, 0.3, 36)
    index = np.repeat(np.arange(36), 3)
    y = (school[school_of] + klass)[index] + rng.normal(0.0, 0.5, len(index))
    new = {"school_of": np.append(school_of, [12, 12]), "index": [36, 36, 37, 37], "y": [1.6, 1.9, 1.7, 2.0]}

    def model(n_schools, school_of, index, y):
        with pm.Model(coords={"school": range(n_schools), "class": range(len(school_of))}) as made:
            of, i = pm.Data("school_of", school_of, dims="class"), pm.Data("index", index)
            above, below = pm.HalfNormal("above", 1.0), pm.HalfNormal("below", 1.0)
            s = pm.Normal("s", 0.0, above, dims="school")
            c = pm.Normal("c", s[of], below, dims="class")
            pm.Normal("y", c[i], 0.5, observed=y)
        return made

    approx = pymc_ngvi.fit_ngvi(model=model(n_schools, school_of, index, y), random_seed=1, progressbar=False)
    updated = approx.update({**new, "school": range(13), "class": range(38)}, random_seed=1)
    everything = model(13, new["school_of"], np.append(index, new["index"]), np.append(y, new["y"]))
    again = pymc_ngvi.fit_ngvi(model=everything, random_seed=2, progressbar=False)
    ours, theirs = (of.sample(8_000, random_seed=3).posterior for of in (updated, again))
    for name in ("s", "c"):
        sd = theirs[name].std(("chain", "draw"))
        gap = (ours[name].mean(("chain", "draw")) - theirs[name].mean(("chain", "draw"))) / sd
        assert abs(gap).max() < 0.15
        assert abs(ours[name].std(("chain", "draw")) / sd - 1.0).max() < 0.15


def test_a_coefficient_that_begins_at_0_hides_no_dependence():
    rng = np.random.default_rng(12)
    group, true = np.repeat(np.arange(30), 8), rng.normal(size=30)
    y = 0.9 * true[group] + rng.normal(0.0, 0.8, len(group))
    with pm.Model(coords={"group": range(30)}):
        index = pm.Data("index", group)
        size = pm.Normal("size", 0.0, 1.0, initval=0.0)
        u = pm.Normal("u", 0.0, 1.0, dims="group")
        pm.Normal("y", size * u[index], 0.8, observed=y)
        approx = pymc_ngvi.fit_ngvi(posterior="exact", random_seed=1, progressbar=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # two modes
        updated = approx.update({"group": range(31), "index": [30] * 3, "y": [1.0, 1.2, 0.8]}, random_seed=1)
    posterior = updated.sample(4_000).posterior
    effect = (posterior["size"] * posterior["u"].sel(group=30)).values
    precision = 3 / 0.64 + 1 / 0.81
    assert abs(effect.mean() - 3.0 / 0.64 / precision) < 0.1


def test_groups_without_new_rows_keep_their_tails():
    rng = np.random.default_rng(2)
    group, rate = np.repeat(np.arange(40), 3), rng.gamma(0.6, 1 / 0.6, size=40)
    y = rng.poisson(rate[group])
    with pm.Model(coords={"group": range(40)}):
        index = pm.Data("index", group)
        alpha, mean = pm.Exponential("alpha", 0.5), pm.LogNormal("mean", 0, 1)
        r = pm.Gamma("r", alpha=alpha, beta=alpha / mean, dims="group")
        pm.Poisson("y", r[index], observed=y)
        approx = pymc_ngvi.fit_ngvi(posterior="exact", random_seed=1, progressbar=False)
    largest = int(np.bincount(group, y).argmax())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        updated = approx.update({"index": [largest], "y": [y[group == largest][0]]}, random_seed=1)
    draws = updated.sample(8_000, chains=1).posterior
    # Given alpha and the mean, a rate has a gamma distribution.
    a, m = draws["alpha"].values[0][:, None], draws["mean"].values[0][:, None]
    shape = a + np.bincount(np.append(group, largest), np.append(y, y[group == largest][0]))
    precision = a / m + np.bincount(np.append(group, largest))
    right = shape / precision
    sd = np.sqrt((shape / precision**2).mean(axis=0) + right.var(axis=0))
    np.testing.assert_allclose(draws["r"].values[0].std(axis=0), sd, rtol=0.25)
    np.testing.assert_allclose(draws["r"].values[0].mean(axis=0) / sd, right.mean(axis=0) / sd, atol=0.15)


def test_a_row_depends_on_an_effect_that_is_narrow_at_half_of_the_draws():
    """Where a step of an effect changes nothing, as its scale is nearly 0, other draws tell which rows depend on it."""
    forest, log_sd = Forest(np.array([0]), np.array([1]), np.array([-1]), np.array([0])), np.zeros(33)
    log_sd[8:25] = -40.0
    theta = np.column_stack([log_sd, np.full(33, 0.4)])

    def logp(points):
        return stats.norm.logpdf(2.0, points[:, [1]], 0.8)

    def centres(g):
        return Centres(np.full((len(g), 1), 0.4), np.exp(g)[:, :, None])

    found = beside(theta, centres, forest, logp, np.zeros(1))
    np.testing.assert_allclose(
        found.log_ratio[log_sd == 0.0], stats.norm.logpdf(2.0, 0.4, np.hypot(1.0, 0.8)), atol=0.01
    )


@pytest.mark.parametrize("seed", [1, 2])
def test_a_summed_out_change_point_is_weighted_with_the_rest(seed):
    """By sums over change points of gamma-Poisson evidences: rows that agree, and rows that do not."""
    rng = np.random.default_rng(seed)
    t = np.arange(30.0)
    y = rng.poisson(np.where(t < 12, 4.0, 1.5))
    with pm.Model():
        time, when = pm.Data("t", t), pm.DiscreteUniform("when", 0, 29)
        early, late = pm.Exponential("early", 0.5), pm.Exponential("late", 0.5)
        pm.Deterministic("is_late", (when > 12).astype("float64"))
        pm.Poisson("y", pm.math.switch(time < when, early, late), observed=y)
        approx = pymc_ngvi.fit_ngvi(random_seed=1, progressbar=False)

    def known(t, y):
        before = t < np.arange(30)[:, None]
        log_p, rate = np.zeros(30), []
        for part in (before, ~before):
            total, n = part @ y, part.sum(axis=1)
            log_p += gammaln(1 + total) - (1 + total) * np.log(0.5 + n) + np.log(0.5)
            rate.append((1 + total) / (0.5 + n))
        p = np.exp(log_p - logsumexp(log_p))
        return p @ rate[0], p @ rate[1], p[13:].sum(), logsumexp(log_p) - gammaln(1 + y).sum()

    new = np.array([5.0, 13.0, 14.0]), np.array([3, 2, 3])
    found = approx.update({"t": new[0], "y": new[1]}, draws=4_000, random_seed=seed)
    assert found.checks.is_reliable
    draws = found.sample(4_000, random_seed=seed).posterior
    right = known(np.append(t, new[0]), np.append(y, new[1]))
    for name, value in zip(("early", "late", "is_late"), right, strict=False):
        # five Monte Carlo errors of as many draws as the weighted ones are worth
        error = float(draws[name].std()) / np.sqrt(found.checks.effective_size)
        assert abs(float(draws[name].mean()) - value) < 5 * error
    density = found.log_predictive_density
    assert abs(density.value - (right[3] - known(t, y)[3])) < 5 * density.se
    assert set(draws["when"].values.ravel().tolist()) <= set(range(30))
    with pytest.warns(UserWarning, match="Not reliable"):  # seven rows that say that the rates are another two
        approx.update({"t": np.full(7, 11.0), "y": np.full(7, 30)}, random_seed=seed)


def test_labels_of_new_rows_are_summed_over():
    rng = np.random.default_rng(3)
    label = rng.random(36) < 0.4
    y = np.where(label, 3.0, 0.0) + 0.7 * rng.normal(size=36)

    def model(y):
        with pm.Model() as made:
            data, w = pm.Data("data", y), pm.Beta("w", 2, 2)
            mu = pm.Normal("mu", [0.0, 3.0], 1.0, shape=2)
            pm.Normal("y", mu[pm.Categorical("z", pm.math.stack([1 - w, w]), shape=data.shape)], 0.7, observed=data)
        return made

    approx, again = (pymc_ngvi.fit_ngvi(model=model(of), random_seed=1, progressbar=False) for of in (y[:30], y))
    found = approx.update({"data": y[30:]}, random_seed=1)
    assert found.checks.is_reliable
    ours, theirs = (of.sample(4_000, random_seed=2).posterior for of in (found, again))
    sd = theirs["mu"].std(("chain", "draw"))
    # five errors of a difference of means of 2,000 draws and more each
    assert (abs((ours["mu"] - theirs["mu"]).mean(("chain", "draw"))) / sd).max() < 5 * np.sqrt(2 / 2_000)
    density, right = found.log_predictive_density, again.log_marginal_likelihood.value
    assert abs(density.value - (right - approx.log_marginal_likelihood.value)) < 5 * density.se + 0.02


@pytest.mark.parametrize("seed", [5, 6])
def test_the_error_of_the_density_of_rows_of_skewed_groups_holds(seed):
    """Of fits with and without the rows: groups of two counts each, many of which are 0."""
    rng = np.random.default_rng(seed)
    u, group = rng.normal(0, 1.5, 40), np.repeat(np.arange(40), 2)
    y, y_new = rng.poisson(np.exp(-1 + u[group])), rng.poisson(np.exp(-1 + u))

    def model(group, y):
        with pm.Model(coords={"group": np.arange(40)}) as made:
            index, mu, s = pm.Data("index", group), pm.Normal("mu", 0, 2), pm.HalfNormal("s", 3)
            pm.Poisson("y", pm.math.exp(mu + pm.Normal("u", 0, s, dims="group")[index]), observed=y)
        return made

    both = np.append(group, np.arange(40)), np.append(y, y_new)
    approx, again = (
        pymc_ngvi.fit_ngvi(model=model(*of), posterior="exact", random_seed=1, progressbar=False)
        for of in ((group, y), both)
    )
    density = approx.update({"index": np.arange(40), "y": y_new}, random_seed=1).log_predictive_density
    before, after = approx.log_marginal_likelihood, again.log_marginal_likelihood
    # rules of the fits are within 0.03 nats
    assert abs(density.value - (after.value - before.value)) < 5 * np.hypot(density.se, after.se) + 0.03
    assert density.se < 0.05


@pytest.mark.parametrize("seed", [1, 2])
def test_rows_of_vectors_are_independent(seed):
    rng = np.random.default_rng(seed)
    cov = np.array([[1.0, 0.6], [0.6, 2.0]])
    y = rng.multivariate_normal([1, -1], cov, 46)
    with pm.Model():
        pm.MvNormal("y", pm.Normal("mu", 0, 3, shape=2), cov=cov, observed=y[:40])
        approx = pymc_ngvi.fit_ngvi(random_seed=1, progressbar=False)
    found = approx.update({"y": y[40:]}, random_seed=seed)
    assert "6 new rows" in str(found.checks)

    def posterior(y):
        covariance = np.linalg.inv(np.eye(2) / 9 + len(y) * np.linalg.inv(cov))
        return covariance @ np.linalg.inv(cov) @ y.sum(axis=0), covariance

    mean, covariance = posterior(y)
    draws = found.sample(4_000, chains=1, random_seed=seed).posterior["mu"].values[0]
    error = np.sqrt(np.diag(covariance) / found.checks.effective_size)
    assert (np.abs(draws.mean(axis=0) - mean) < 5 * error).all()
    before = posterior(y[:40])
    whole = np.kron(np.ones((6, 6)), before[1]) + np.kron(np.eye(6), cov)
    right = stats.multivariate_normal.logpdf(y[40:].ravel(), np.tile(before[0], 6), whole)
    assert abs(found.log_predictive_density.value - right) < 5 * found.log_predictive_density.se
    with pytest.raises(ValueError, match="in the fit it had"):
        approx.update({"y": y[:3, :1]})


def test_impossible_rows_of_groups_are_named():
    rng = np.random.default_rng(0)
    with pm.Model(coords={"h": np.arange(10)}):
        index, s, a = pm.Data("index", np.repeat(np.arange(10), 6)), pm.HalfNormal("s", 1), pm.Normal("a", 2, 1)
        effect = pm.Normal("effect", 0, s, dims="h")
        pm.Exponential("t", pm.math.exp(-a - effect[index]), observed=rng.exponential(7, 60))
        approx = pymc_ngvi.fit_ngvi(random_seed=1, progressbar=False)
    with pytest.raises(ValueError, match=r"'t' can't have the values -5.0, of rows 1"):
        approx.update({"index": [0, 1], "t": [2.0, -5.0]})
    assert approx.update({"index": [0, 1], "t": [2.0, 5.0]}).checks.is_reliable


@pytest.fixture(scope="module")
def by_rows():
    rng = np.random.default_rng(0)
    x, g = rng.normal(size=30), np.repeat(np.arange(6), 5)
    with pm.Model(coords={"g": list("abcdef")}):
        data, index = pm.Data("x", x), pm.Data("index", g)
        a, b = pm.Normal("a", 0, 2), pm.Normal("b")
        u = pm.Normal("u", 0, pm.HalfNormal("t", 1), dims="g")
        pm.Normal("y", a + b * data + u[index], 1, observed=1 + x + rng.normal(size=30))
        return pymc_ngvi.fit_ngvi(random_seed=1, progressbar=False)


def test_covariates_of_new_rows_are_given(by_rows):
    for given, named in (({}, "'x', 'index'"), ({"x": np.zeros(30)}, "'index'")):
        with pytest.raises(ValueError, match=f"^{named} has a value for each row"):
            by_rows.update({**given, "y": np.zeros(30)})
    with pytest.raises(ValueError, match="'x' has missing values, in rows 1"):
        by_rows.update({"x": [0.0, np.nan], "index": ["a", "b"], "y": [0.0, 1.0]})


def test_an_update_is_pickled_and_predicts_and_names_what_is_new(by_rows):
    new = {"x": [0.0, 1.0], "index": ["a", "e"], "y": [3.0, 3.0]}
    found = by_rows.update(new, random_seed=1)
    again = pickle.loads(pickle.dumps(found))
    np.testing.assert_array_equal(again.sample(50).posterior["u"], found.sample(50).posterior["u"])
    assert again.log_predictive_density.value == found.log_predictive_density.value
    predicted = found.predict({"x": [0.5], "index": ["a"]}, draws=4_000, random_seed=2)["predictions"]["y"]
    draws = found.sample(4_000, random_seed=3).posterior
    mean = float((draws["a"] + 0.5 * draws["b"] + draws["u"].sel(g="a")).mean())
    assert abs(float(predicted.mean()) - mean) < 5 * float(predicted.std()) / np.sqrt(4_000)
    grown = by_rows.update({**new, "index": ["a", "aa"]}, random_seed=1)
    assert "new levels of 'g' 'aa'" in str(grown.checks)
    seen = grown.predict({"x": [0.5], "index": ["aa"]}, draws=4_000, random_seed=2)["predictions"]["y"]
    draws = grown.sample(4_000, random_seed=3).posterior
    mean = float((draws["a"] + 0.5 * draws["b"] + draws["u"].sel(g="aa")).mean())
    assert abs(float(seen.mean()) - mean) < 5 * float(seen.std()) / np.sqrt(4_000)
