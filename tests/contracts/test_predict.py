"""Predictions for new data: of known and new levels, of walks and processes that go on, and what is refused."""

import numpy as np
import pandas as pd
import pymc as pm
import pytest
import xarray as xr

from pymc_ngvi import LogDensity, NGVIApproximation, fit_ngvi, load
from pymc_ngvi.density.predictive import indexed_axes
from pymc_ngvi.families import DiagonalState

N_DRAWS = 4_000
#: The error of a variance of so many normal draws, relative to it; tests allow four or five of it.
OF_VARIANCE = (2 / N_DRAWS) ** 0.5


def approximation(model, mean=0.0, sd=0.3):
    """Return an approximation that no fit has made: predictions are algebra on its draws."""
    density = LogDensity(model)
    state = DiagonalState.from_scale(np.full(density.n_dim, mean), np.full(density.n_dim, sd))
    return NGVIApproximation(density, state, random_seed=1)


def schools():
    rng = np.random.default_rng(1)
    with pm.Model(coords={"school": ["a", "b", "c", "d"]}) as model:
        x = pm.Data("x", rng.normal(size=20))
        index = pm.Data("school_of", rng.integers(4, size=20))
        mu, tau, slope = pm.Normal("mu"), pm.HalfNormal("tau"), pm.Normal("slope")
        centred = pm.Normal("centred", mu, tau, dims="school")
        raw = pm.Normal("raw", dims="school")
        effect = pm.Deterministic("effect", tau * raw, dims="school")
        eta = pm.Deterministic("eta", centred[index] + effect[index] + slope * x)
        pm.Normal("y", eta, 0.5, observed=rng.normal(size=20))
    return model


@pytest.fixture(scope="module")
def fitted():
    return approximation(schools())


def values(approx, *args, **options):
    """Return predictions as arrays by name, without the axis of chains."""
    predictions = approx.predict(*args, draws=N_DRAWS, random_seed=3, **options)["predictions"]
    return {str(name): np.concatenate(predictions[name].values) for name in predictions.data_vars}


# --- levels of groups ---


def test_known_levels_are_posterior_draws(fitted):
    names = ["centred", "effect", "slope", "eta", "y"]
    found = values(fitted, {"x": [1.0, -2.0], "school_of": [3, 0]}, var_names=names)
    expected = found["centred"][:, [3, 0]] + found["effect"][:, [3, 0]] + found["slope"][:, None] * [1.0, -2.0]
    np.testing.assert_allclose(found["eta"], expected, rtol=1e-12)
    noise = found["y"] - found["eta"]
    np.testing.assert_allclose(noise.var(axis=0), 0.25, rtol=5 * OF_VARIANCE)
    draws = fitted.density.layout.unflatten(fitted.draw_flat(N_DRAWS, random_seed=3))
    np.testing.assert_array_equal(found["centred"], draws["centred"])  # draws of q, and nothing else


def test_labels_stand_for_positions(fitted):
    by_position = values(fitted, {"x": [1.0, -2.0], "school_of": [3, 0]})
    by_label = values(fitted, {"x": [1.0, -2.0], "school_of": ["d", "a"]})
    picked = values(fitted, {"x": [1.0, -2.0], "school_of": [0, 1], "school": ["d", "a"]})
    np.testing.assert_array_equal(by_position["y"], by_label["y"])
    np.testing.assert_array_equal(by_position["y"], picked["y"])


def test_new_levels_have_the_variance_of_their_prior_over_draws(fitted):
    names = ["centred", "effect", "mu", "tau", "eta"]
    tree = fitted.predict(
        {"x": [0.0, 0.0], "school_of": ["b", "Z"]}, groups="new", var_names=names, draws=N_DRAWS, random_seed=3
    )
    found = tree["predictions"]
    assert found["centred"].coords["school"].values.tolist() == ["a", "b", "c", "d", "Z"]
    assert found.attrs["drawn_from_prior"] == "centred, raw"
    tau, mu, z = (np.concatenate(of.values) for of in (found["tau"], found["mu"], found["centred"].sel(school="Z")))
    # A scale mixture of normals has heavier tails than a normal, and its variance a larger error.
    expected = (tau**2).mean() + mu.var()
    assert z.var() == pytest.approx(expected, rel=8 * OF_VARIANCE)
    assert np.corrcoef(z, mu)[0, 1] == pytest.approx((mu.var() / expected) ** 0.5, abs=4 * N_DRAWS**-0.5)
    assert found["effect"].sel(school="Z").values.var() == pytest.approx((tau**2).mean(), rel=8 * OF_VARIANCE)
    known = values(fitted, {"x": [0.0], "school_of": ["b"]}, var_names=["centred"])["centred"]
    np.testing.assert_array_equal(np.concatenate(found["centred"].sel(school=["a", "b", "c", "d"]).values), known)


def test_each_new_level_has_draws_of_its_own(fitted):
    found = values(fitted, {"x": [0.0] * 3, "school_of": ["Y", "Z", "Y"]}, groups="new", var_names=["effect", "eta"])
    np.testing.assert_array_equal(found["eta"][:, 0], found["eta"][:, 2])
    assert abs(np.corrcoef(found["effect"][:, -2:].T)[0, 1]) < 4 * N_DRAWS**-0.5


def test_average_is_the_mean_of_the_prior_of_effects(fitted):
    new = {"x": [0.0, 1.0], "school_of": ["b", "Z"]}
    found = values(fitted, new, groups="average", var_names=["centred", "effect", "mu", "slope", "eta"])
    np.testing.assert_array_equal(found["effect"], 0.0)
    np.testing.assert_array_equal(found["centred"], np.repeat(found["mu"][:, None], 5, axis=1))
    np.testing.assert_allclose(found["eta"][:, 1], found["mu"] + found["slope"], rtol=1e-12)


def test_mean_of_effects_that_are_not_normal():
    with pm.Model(coords={"group": list("abc")}) as model:
        index = pm.Data("index", [0, 1, 2])
        scale = pm.HalfNormal("scale")
        effect = pm.LogNormal("effect", 0.5, scale, dims="group")
        pm.Poisson("y", effect[index], observed=[1, 2, 3])
    found = values(approximation(model), {"index": [0]}, groups="average", var_names=["effect", "scale"])
    np.testing.assert_allclose(found["effect"][:, 0], np.exp(0.5 + found["scale"] ** 2 / 2), rtol=1e-12)


def test_levels_within_levels_need_the_group_that_they_are_in():
    with pm.Model(coords={"school": list("abcd"), "district": ["N", "S"]}) as model:
        district = pm.Data("district_of", [0, 0, 1, 1], dims="school")
        index = pm.Data("school_of", [0, 1, 2, 3, 3])
        outer, inner = pm.HalfNormal("outer"), pm.HalfNormal("inner")
        u = pm.Normal("u", 0, outer, dims="district")
        v = pm.Normal("v", u[district], inner, dims="school")
        pm.Normal("y", v[index], observed=np.zeros(5))
    approx = approximation(model)
    with pytest.raises(ValueError, match="'district_of' has length 4 along dim 'school', which now has 5: give"):
        approx.predict({"school_of": ["Z"]}, groups="new")
    new = {"school": ["d", "Z"], "school_of": [0, 1], "district_of": ["S", "W"]}
    found = values(approx, new, groups="new", var_names=["u", "v", "outer", "inner"])
    expected = (found["outer"] ** 2 + found["inner"] ** 2).mean()
    assert found["v"][:, 1].var() == pytest.approx(expected, rel=8 * OF_VARIANCE)
    apart = found["v"][:, 1] - found["u"][:, 2]
    assert apart.var() == pytest.approx((found["inner"] ** 2).mean(), rel=8 * OF_VARIANCE)


def test_correlated_effects_of_new_levels():
    with pm.Model(coords={"group": list("abc"), "term": ["i", "s"]}) as model:
        index = pm.Data("index", [0, 1, 2])
        chol, _, _ = pm.LKJCholeskyCov("chol", n=2, eta=2, sd_dist=pm.HalfNormal.dist(1))
        u = pm.MvNormal("u", np.zeros(2), chol=chol, dims=("group", "term"))
        pm.Normal("y", u[index, 0], observed=np.zeros(3))
    found = values(approximation(model), {"index": ["Z"]}, groups="new", var_names=["u", "chol"])
    factor = np.zeros((N_DRAWS, 2, 2))
    factor[:, [0, 1, 1], [0, 0, 1]] = found["chol"]
    expected = (factor @ factor.swapaxes(1, 2)).mean(axis=0)
    np.testing.assert_allclose(np.cov(found["u"][:, -1].T), expected, atol=8 * OF_VARIANCE * expected.max())


def test_effects_by_rows_are_those_of_new_rows():
    with pm.Model() as model:
        x, scale = pm.Data("x", np.linspace(0.0, 1.0, 30)), pm.HalfNormal("scale")
        noise = pm.Normal("noise", 0.0, scale, size=x.shape[0])
        pm.Poisson("y", pm.math.exp(x + noise), observed=np.ones(30, dtype=int))
    approx = approximation(model)
    for rows in ([2.0, 3.0], np.linspace(5.0, 6.0, 30)):
        with pytest.raises(ValueError, match=r"'noise' has elements, at 0, 1.*that were not in the fit"):
            approx.predict({"x": rows})
    found = values(approx, {"x": [2.0, 3.0]}, groups="new", var_names=["noise", "scale", "y"])
    np.testing.assert_allclose(found["noise"].var(axis=0), (found["scale"] ** 2).mean(), rtol=8 * OF_VARIANCE)
    assert found["y"].shape == (N_DRAWS, 2)


def test_effects_of_rows_with_a_fixed_length_are_no_others():
    """The same number of rows, but other ones: an element for each belongs to the rows of the fit."""
    with pm.Model() as model:
        x, scale = pm.Data("x", np.arange(30.0)), pm.HalfNormal("scale")
        eta = pm.Deterministic("eta", x + pm.Normal("noise", 0.0, scale, shape=30))
        pm.Normal("y", eta, observed=np.zeros(30))
    approx = approximation(model)
    with pytest.raises(ValueError, match="'noise' has elements"):
        approx.predict({"x": 2 * np.arange(30.0)})
    assert approx.predict({"x": np.arange(30.0)}, draws=5)["predictions"].sizes["y_dim_0"] == 30


DATES = np.array(["2024-01-01", "2024-01-02", "2024-01-03"], dtype="datetime64[D]")


@pytest.mark.parametrize(
    ("levels", "same", "other"),
    [
        ([10, 20, 30], [30, "Z"], ["30"]),
        (DATES, [pd.Timestamp("2024-01-03"), pd.Timestamp("2024-02-01")], None),
        (DATES, ["2024-01-03", "2024-02-01"], None),
    ],
    ids=["numbers", "dates", "dates-as-text"],
)
def test_labels_are_compared_by_value_and_type(levels, same, other):
    with pm.Model(coords={"group": levels}) as model:
        index = pm.Data("index", [0, 1, 2])
        effect = pm.Normal("effect", dims="group")
        pm.Normal("y", effect[index], observed=np.zeros(3))
    approx = approximation(model)
    found = values(approx, {"group": same, "index": [0]}, groups="new", var_names=["effect"])["effect"]
    known = values(approx, var_names=["effect"])["effect"]
    np.testing.assert_array_equal(found[:, 0], known[:, 2])
    assert abs(np.corrcoef(found[:, 1], known[:, 2])[0, 1]) < 4 * N_DRAWS**-0.5
    if other is not None:
        with pytest.raises(ValueError, match="was in the fit: give labels of the same type"):
            approx.predict({"group": other, "index": [0]}, groups="new")


# --- what goes on ---

TIMES = np.arange(12)


def test_a_walk_goes_on_with_variance_in_proportion_to_time():
    with pm.Model(coords={"time": TIMES}) as model:
        scale = pm.HalfNormal("scale")
        walk = pm.GaussianRandomWalk("walk", 0.2, scale, init_dist=pm.Normal.dist(), dims="time")
        pm.Normal("y", walk, 0.1, observed=np.zeros(12), dims="time")
    approx = approximation(model)
    tree = approx.predict({"time": np.arange(18)}, var_names=["walk", "scale", "y"], draws=N_DRAWS, random_seed=3)
    walk, scale = tree["predictions"]["walk"], tree["predictions"]["scale"].values
    known = values(approx, var_names=["walk"])["walk"]
    np.testing.assert_array_equal(np.concatenate(walk.sel(time=TIMES).values), known)
    beyond = np.concatenate(walk.sel(time=slice(12, None)).values) - known[:, -1:]
    steps = np.arange(1, 7)
    sd = np.sqrt(steps * (scale**2).mean())
    np.testing.assert_allclose(beyond.mean(axis=0), 0.2 * steps, atol=4 * sd.max() * N_DRAWS**-0.5)
    np.testing.assert_allclose(beyond.var(axis=0), sd**2, rtol=8 * OF_VARIANCE)
    assert tree["predictions"]["y"].coords["time"].values.tolist() == list(range(18))


def test_several_walks_go_on_and_new_ones_begin():
    with pm.Model(coords={"time": TIMES, "shop": ["a", "b"]}) as model:
        walk = pm.GaussianRandomWalk("walk", 0.0, 1.0, init_dist=pm.Normal.dist(5.0, 0.1), dims=("shop", "time"))
        pm.Normal("y", walk, 0.1, observed=np.zeros((2, 12)), dims=("shop", "time"))
    approx = approximation(model)
    found = values(approx, {"time": np.arange(14), "shop": ["a", "b", "Z"]}, groups="new", var_names=["walk"])["walk"]
    known = values(approx, var_names=["walk"])["walk"]
    np.testing.assert_array_equal(found[:, :2, :12], known)
    np.testing.assert_allclose((found[:, :2, 13] - known[:, :, -1]).var(axis=0), 2.0, rtol=5 * OF_VARIANCE)
    assert found[:, 2, 0].mean() == pytest.approx(5.0, abs=4 * 0.1 * N_DRAWS**-0.5)
    assert found[:, 2, 13].var() == pytest.approx(13.01, rel=5 * OF_VARIANCE)


def test_numbers_of_shops_are_no_time():
    with pm.Model(coords={"time": TIMES, "shop": [1, 2, 3]}) as model:
        walk = pm.GaussianRandomWalk("walk", 0.0, 1.0, init_dist=pm.Normal.dist(5.0, 0.1), dims=("shop", "time"))
        pm.Normal("y", walk, 0.1, observed=np.zeros((3, 12)), dims=("shop", "time"))
    with pytest.raises(ValueError, match="'walk' has levels 7 along dim 'shop' that were not in the fit"):
        approximation(model).predict({"shop": [1, 2, 3, 7]}, var_names=["walk"])


def test_sums_of_innovations_go_on():
    with pm.Model(coords={"time": TIMES}) as model:
        scale, shock = pm.HalfNormal("scale"), pm.Normal("shock", dims="time")
        walk = pm.Deterministic("walk", scale * pm.math.cumsum(shock), dims="time")
        pm.Normal("y", walk, observed=np.zeros(12), dims="time")
    approx = approximation(model)
    found = values(approx, {"time": np.arange(15)}, groups="new", var_names=["walk", "scale"])
    beyond = found["walk"][:, -1] - found["walk"][:, 11]
    assert beyond.var() == pytest.approx(3 * (found["scale"] ** 2).mean(), rel=8 * OF_VARIANCE)
    with pytest.raises(ValueError, match=r"'shock' along dim 'time' depend on each other.*those of the fit first"):
        approx.predict({"time": np.arange(12, 15)}, groups="new")
    with pytest.raises(ValueError, match=r"'shock' has levels 12, 13, 14 along dim 'time'.*groups='new'"):
        approx.predict({"time": np.arange(15)})


@pytest.mark.parametrize("rho", [[0.5], [0.6, 0.3]], ids=["first-order", "second-order"])
@pytest.mark.parametrize("observed", [False, True], ids=["latent", "observed"])
def test_an_autoregression_goes_on(rho, observed):
    """With a constant, and from draws of a path or from the data: moments by the recursion itself."""
    data = np.cumsum(np.ones(12))
    with pm.Model(coords={"time": TIMES}) as model:
        pm.Normal("other")
        options = {"observed": data} if observed else {}
        init = pm.Normal.dist(0.0, 1.0, shape=len(rho))
        pm.AR("path", [0.4, *rho], sigma=0.7, constant=True, init_dist=init, dims="time", **options)
    approx = approximation(model, mean=2.0, sd=1e-9)
    path = values(approx, {"time": np.arange(15)}, var_names=["path"])["path"]
    expected, weights = list(data if observed else np.full(12, 2.0)), [1.0]
    for h in range(3):
        expected.append(0.4 + sum(r * expected[-1 - i] for i, r in enumerate(rho)))
        weights.append(sum(r * weights[h - i] for i, r in enumerate(rho) if h - i >= 0))
    np.testing.assert_allclose(path[:, :12].mean(axis=0), expected[:12], atol=1e-7)
    variance = 0.49 * np.cumsum(np.square(weights[:3]))
    np.testing.assert_allclose(path[:, 12:].mean(axis=0), expected[12:], atol=4 * (variance.max() / N_DRAWS) ** 0.5)
    np.testing.assert_allclose(path[:, 12:].var(axis=0), variance, rtol=5 * OF_VARIANCE)


POINTS = np.linspace(0.0, 1.0, 9)[:, None]
NEW_POINTS = np.vstack([POINTS, [[1.15], [0.55]]])


def conditional(noise, known):
    """Return mean and covariance of a process at the new points given its values at the others."""
    cov = np.exp(-0.5 * ((NEW_POINTS - NEW_POINTS.T) / 0.3) ** 2) + noise * np.eye(len(NEW_POINTS))
    weights = np.linalg.solve(cov[:9, :9], cov[:9, 9:])
    return weights.T @ known, cov[9:, 9:] - cov[9:, :9] @ weights


def process(latent=True, reparameterize=True):
    with pm.Model() as model:
        x, length = pm.Data("x", POINTS), pm.HalfNormal("length")
        cov = pm.gp.cov.ExpQuad(1, ls=0.3 + 0 * length)
        if latent:
            gp = pm.gp.Latent(cov_func=cov)
            f = gp.prior("f", X=x, reparameterize=reparameterize, jitter=1e-4)
            pm.Normal("y", f, 0.1, observed=np.zeros(9))
        else:
            gp = pm.gp.Marginal(cov_func=cov)
            gp.marginal_likelihood("y", X=x, y=np.sin(4 * POINTS[:, 0]), sigma=0.2, jitter=0.0)
    return model, gp


@pytest.mark.parametrize("reparameterize", [True, False])
def test_a_latent_process_is_conditioned_on_its_values(reparameterize):
    approx = approximation(process(reparameterize=reparameterize)[0], mean=0.5, sd=1e-9)
    f = values(approx, {"x": NEW_POINTS}, groups="new", var_names=["f"])["f"]
    assert f[:, :9].std(axis=0).max() < 1e-6
    mean, cov = conditional(1e-4, f[0, :9])
    sd = np.sqrt(np.diag(cov))
    np.testing.assert_allclose(f[:, 9:].mean(axis=0), mean, atol=4 * sd.max() * N_DRAWS**-0.5)
    np.testing.assert_allclose(np.cov(f[:, 9:].T), cov, atol=5 * OF_VARIANCE * cov.max())
    if reparameterize:
        average = values(approx, {"x": NEW_POINTS}, groups="average", var_names=["f"])["f"]
        np.testing.assert_allclose(average[0, 9:], mean, rtol=1e-5)  # the mean given the values in the fit


@pytest.mark.parametrize("new", [NEW_POINTS[9:], POINTS + 1.0], ids=["new-points-alone", "as-many-others"])
@pytest.mark.parametrize("latent", [True, False], ids=["latent", "marginal"])
def test_a_process_is_not_begun_anew(latent, new):
    approx = approximation(process(latent)[0])
    with pytest.raises(ValueError, match="depend on each other, as those of a walk or a process do"):
        approx.predict({"x": new}, groups="new")


def test_observations_of_a_process_go_on_from_the_data():
    approx = approximation(process(latent=False)[0])
    y = values(approx, {"x": NEW_POINTS})["y"]
    mean, cov = conditional(0.04, np.sin(4 * POINTS[:, 0]))
    np.testing.assert_array_equal(y[:, :9], np.broadcast_to(np.sin(4 * POINTS[:, 0]), (N_DRAWS, 9)))
    np.testing.assert_allclose(y[:, 9:].mean(axis=0), mean, atol=4 * (cov.max() / N_DRAWS) ** 0.5)
    np.testing.assert_allclose(np.cov(y[:, 9:].T), cov, atol=5 * OF_VARIANCE * cov.max())


@pytest.mark.parametrize("latent", [True, False], ids=["latent", "marginal"])
def test_conditionals_that_were_added_after_the_fit(latent):
    model, gp = process(latent)
    approx = approximation(model, mean=0.5, sd=1e-9)
    with model:
        at = pm.Data("at", NEW_POINTS[9:])
        gp.conditional("f_new", Xnew=at, jitter=1e-4 if latent else 0.0)
    names = ["f_new", "f"] if latent else ["f_new"]
    found = values(approx, {"at": [[0.55]]}, var_names=names)
    known = found["f"][0] if latent else np.sin(4 * POINTS[:, 0])
    mean, cov = conditional(1e-4 if latent else 0.04, known)
    variance = cov[1, 1] - (1e-4 if latent else 0.04)  # of the function, without noise
    assert found["f_new"].shape == (N_DRAWS, 1)
    assert found["f_new"].mean() == pytest.approx(mean[1], abs=4 * (cov[1, 1] / N_DRAWS) ** 0.5)
    assert found["f_new"].var() == pytest.approx(variance, rel=5 * OF_VARIANCE, abs=2e-6)  # PyMC adds jitter of 1e-6


def test_basis_functions_are_those_of_the_fit():
    with pm.Model() as model:
        x, scale = pm.Data("x", POINTS), pm.HalfNormal("scale")
        gp = pm.gp.HSGP(m=[5], c=1.5, cov_func=scale**2 * pm.gp.cov.ExpQuad(1, ls=0.3))
        f = gp.prior("f", X=x)
        pm.Normal("y", f, 0.1, observed=np.zeros(9))
    approx = approximation(model)
    known = values(approx, var_names=["f"])["f"]
    np.testing.assert_allclose(values(approx, {"x": POINTS[[3, 5]]}, var_names=["f"])["f"], known[:, [3, 5]])


# --- what is observed, and data ---

ROWS = 7
RESPONSES = {
    "poisson": (lambda eta: pm.Poisson("y", pm.math.exp(eta), observed=np.ones(ROWS, dtype=int)), 3),
    "bernoulli": (lambda eta: pm.Bernoulli("y", logit_p=eta, observed=np.ones(ROWS, dtype=int)), 3),
    "zeros": (lambda eta: pm.ZeroInflatedPoisson("y", 0.3, pm.math.exp(eta), observed=np.ones(ROWS, dtype=int)), 3),
    "censored": (lambda eta: pm.Censored("y", pm.Normal.dist(eta, 1), lower=0, upper=None, observed=np.ones(ROWS)), 3),
    "truncated": (lambda eta: pm.Truncated("y", pm.Normal.dist(eta, 1), lower=0, observed=np.ones(ROWS)), 3),
    "ordered": (lambda eta: pm.OrderedLogistic("y", eta, [-1.0, 1.0], observed=np.zeros(ROWS, dtype=int)), 3),
    "scalar": (lambda eta: pm.Normal("y", eta.sum() * 0, 1, observed=np.zeros(ROWS)), ROWS),
}


@pytest.mark.parametrize(("make", "n"), RESPONSES.values(), ids=RESPONSES)
def test_observed_variables_have_the_new_rows(make, n):
    """Their length is fixed by what was observed; draws differ, and so do rows."""
    with pm.Model() as model:
        x, slope = pm.Data("x", np.arange(float(ROWS))), pm.Normal("slope")
        make(slope * x if n == 3 else slope * np.ones(2))
    y = values(approximation(model), {"x": [0.0, 0.0, 0.0]})["y"]
    assert y.shape == (N_DRAWS, n)
    assert abs(np.corrcoef(y[:, :2].T)[0, 1]) < 4 * N_DRAWS**-0.5
    assert len(np.unique(y[:, 0])) > 1


def test_observed_data_follow_the_predictors():
    with pm.Model(coords={"row": range(ROWS)}) as model:
        y, x = pm.Data("y_seen", np.zeros(ROWS), dims="row"), pm.Data("x", np.arange(float(ROWS)), dims="row")
        pm.Normal("y", pm.Normal("slope") * x, observed=y, dims="row")
    predictions = approximation(model).predict({"x": [1.0, 2.0]}, draws=8)
    assert predictions["predictions"]["y"].dims == ("chain", "draw", "row")
    assert predictions["predictions"]["y"].shape == (4, 2, 2)
    assert predictions["predictions_constant_data"]["x"].values.tolist() == [1.0, 2.0]
    assert list(predictions["predictions_constant_data"].data_vars) == ["x"]


def test_statistics_of_the_data_are_those_of_the_fit():
    seen = np.arange(10.0) ** 2
    with pm.Model() as model:
        x, slope = pm.Data("x", seen), pm.Normal("slope")
        eta = pm.Deterministic("eta", slope * (x - x.mean()) / x.std())
        pm.Deterministic("scaled", slope * x / x.max())
        pm.Deterministic("total", eta.sum())
        pm.Deterministic("n", x.shape[0] + 0 * slope)
        pm.Deterministic("apart", slope * (x - x[1]) / pm.math.sqrt((x**2).sum()))
        # Weights of the rows that are there: no statistics of those of the fit.
        pm.Deterministic("average", (x * eta).sum() / x.sum())
        pm.Deterministic("normalised", ((x / x.sum()) * eta).sum())
        pm.Normal("y", eta, observed=seen)
    names = ["eta", "slope", "scaled", "total", "n", "average", "normalised", "apart"]
    found = values(approximation(model), {"x": [3.0, 8.0]}, var_names=names)
    np.testing.assert_allclose(found["scaled"], found["slope"][:, None] * np.array([3.0, 8.0]) / 81.0, rtol=1e-12)
    for name in ("average", "normalised"):
        np.testing.assert_allclose(found[name], found["eta"] @ [3 / 11, 8 / 11], rtol=1e-12)
    expected = found["slope"][:, None] * (np.array([3.0, 8.0]) - seen.mean()) / seen.std()
    np.testing.assert_allclose(found["eta"], expected, rtol=1e-12)
    np.testing.assert_allclose(found["total"], expected.sum(axis=1), rtol=1e-12)
    apart = (np.array([3.0, 8.0]) - seen[1]) / np.linalg.norm(seen)
    np.testing.assert_allclose(found["apart"], found["slope"][:, None] * apart, rtol=1e-12)
    np.testing.assert_array_equal(found["n"], 2)


@pytest.mark.parametrize("seed", [1, 2])
def test_priors_that_read_data_are_those_of_the_fit(seed):
    rng = np.random.default_rng(seed)
    seen = rng.normal(100, 10, 40)
    with pm.Model(coords={"g": list("ab")}) as model:
        y, x, g = pm.Data("y", seen), pm.Data("x", np.arange(40.0)), pm.Data("i", np.repeat([0, 1], 20))
        a, s = pm.Normal("a", y.mean(), 20), pm.HalfNormal("s", 1)
        u = pm.Normal("u", y.max(), 0.01 * s * y.std(), dims="g")
        pm.Normal("o", a + u[g] + x - x.mean(), 10, observed=y)
    found = values(approximation(model), {"y": [0.0], "x": [3.0], "i": ["c"]}, groups="new", var_names=["u", "o", "a"])
    new = found["u"][:, 2]
    assert abs(new.mean() - seen.max()) < 5 * new.std() / np.sqrt(N_DRAWS)
    mean = found["a"].mean() + seen.max() + 3.0 - 19.5
    assert abs(found["o"].mean() - mean) < 5 * found["o"].std() / np.sqrt(N_DRAWS)


@pytest.mark.parametrize(("dims", "n"), [(None, 3), (("obs", "out"), 50)])
def test_rows_of_vectors_are_independent(dims, n):
    rng = np.random.default_rng(1)
    x, true = rng.normal(size=(50, 2)), np.array([[1, 0.2], [-0.5, 0.8]])
    with pm.Model(coords={"obs": np.arange(50), "out": ["u", "v"]}) as model:
        data, b = pm.Data("x", x, dims=dims and ("obs", "p")), pm.Normal("b", 0, 1, shape=(2, 2))
        cov = np.array([[1.0, 0.8], [0.8, 1.0]])
        pm.MvNormal("y", data @ b, cov=cov, observed=x @ true, dims=dims)
    new = rng.normal(size=(n, 2))
    found = values(
        approximation(model), {"x": new} | ({"obs": np.arange(n) + 100} if dims else {}), var_names=["y", "b"]
    )
    assert found["y"].shape == (N_DRAWS, n, 2)
    noise = found["y"] - new @ found["b"]
    np.testing.assert_allclose(np.cov(noise[:, 0].T), cov, atol=5 * OF_VARIANCE)
    np.testing.assert_allclose(np.cov(noise[:, 0, 0], noise[:, 2, 0])[0, 1], 0.0, atol=5 / np.sqrt(N_DRAWS))


def test_the_model_keeps_its_data_whatever_happens(fitted):
    model = fitted.model
    before = {v.name: v.get_value() for v in model.data_vars}
    coords = dict(model.coords)
    fitted.predict({"x": [1.0], "school_of": ["Z"]}, groups="new", draws=5)
    with pytest.raises(ValueError, match="can't be evaluated"):
        fitted.predict({"x": [1.0, 2.0]}, draws=5)
    for name, array in before.items():
        np.testing.assert_array_equal(model[name].get_value(), array)
    assert dict(model.coords) == coords
    assert int(model.dim_lengths["school"].get_value()) == 4


def test_data_that_are_not_named_are_those_of_the_fit():
    model = schools()
    approx = approximation(model)
    expected = values(approx, {"x": np.ones(20)}, var_names=["eta"])["eta"]
    with model:
        pm.set_data({"x": np.zeros(2), "school_of": np.zeros(2, dtype=int)})
    np.testing.assert_array_equal(values(approx, {"x": np.ones(20)}, var_names=["eta"])["eta"], expected)
    assert model["x"].get_value().tolist() == [0.0, 0.0]


def test_seeds_and_files(fitted, tmp_path):
    new = {"x": [1.0], "school_of": ["Z"]}
    first, again, other = (fitted.predict(new, groups="new", draws=52, random_seed=s)["predictions"] for s in (1, 1, 2))
    xr.testing.assert_equal(first.to_dataset(), again.to_dataset())
    assert not np.array_equal(first["y"], other["y"])
    assert len(np.unique(first["y"])) == 52
    fitted.save(tmp_path / "fit.nc")
    loaded = load(tmp_path / "fit.nc", schools())
    xr.testing.assert_equal(
        first.to_dataset(), loaded.predict(new, groups="new", draws=50, random_seed=1)["predictions"].to_dataset()
    )
    fitted.predict(new, groups="new", draws=5).to_netcdf(tmp_path / "predictions.nc", engine="h5netcdf")


# --- what is refused ---

BAD = {
    "unknown level": ({"x": [0.0], "school_of": ["Z"]}, {}, r"'centred' has levels 'Z' along dim 'school'.*='new'"),
    "name": ({"xx": [0.0]}, {}, "which the model has not: did you mean 'x'"),
    "observed": ({"y": [0.0]}, {}, "'y', which is observed: it is what predictions are of"),
    "no data": ({"eta": [0.0]}, {}, r"'eta', which is no pm\.Data"),
    "index": ({"x": [0.0], "school_of": [4]}, {}, "'school_of' has 4, but dim 'school' has 4 elements, 0 to 3"),
    "negative index": ({"x": [0.0], "school_of": [-1]}, {}, "'school_of' has -1"),
    "ragged": ({"x": [[0.0, 1.0], [2.0]]}, {}, "'x' is ragged: its rows have lengths 1, 2"),
    "axes": ({"x": [[0.0]]}, {}, r"'x' has 2 axes, shape \(1, 1\); in the model it has 1 axis"),
    "text": ({"x": ["a"]}, {}, "'x' should be numbers"),
    "fractions": ({"school_of": [0.5]}, {}, "'school_of' should be whole numbers"),
    "lengths": ({"x": [0.0, 1.0]}, {}, r"can't be evaluated given 'x' \(2,\), beside .* 'school_of' \(20,\)"),
    "labels twice": ({"school": ["a", "a"]}, {}, "Labels of dim 'school' repeat: 'a'"),
    "label not listed": ({"school": ["a"], "school_of": ["b"]}, {}, "'b', which are not among the labels given"),
    "list": ([1.0], {}, "new_data should be a dict of arrays by name"),
    "groups": ({}, {"groups": "averaged"}, "did you mean 'average'"),
    "variable": ({}, {"var_names": "etta"}, "which the model has not: did you mean 'eta'"),
    "no variable": ({}, {"var_names": []}, "var_names is empty"),
}


@pytest.mark.parametrize(("new", "options", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_named(fitted, new, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        fitted.predict(new, draws=5, **options)


def test_arrays_that_are_no_data_are_named():
    with pm.Model(coords={"day": range(6)}) as model:
        level = pm.Normal("level", shape=2)
        pm.Normal("y", level[np.arange(6) % 2] + pm.Data("x", np.zeros(6), dims="day"), observed=np.zeros(6))
    said = r"An array of 6 values is fixed in 'y': make it a pm\.Data along 'day'"
    with pytest.raises(ValueError, match=said):
        approximation(model).predict({"x": np.zeros(8)}, draws=5)


def of_levels(effect, **options):
    with pm.Model(coords={"group": list("abc")}, **options) as model:
        index = pm.Data("index", [0, 1, 2])
        pm.Normal("y", effect()[index], observed=np.zeros(3))
    return model


def test_effects_that_sum_to_zero_have_no_new_levels():
    approx = approximation(of_levels(lambda: pm.ZeroSumNormal("effect", pm.HalfNormal("tau"), dims="group")))
    with pytest.raises(ValueError, match="'effect' has new elements, 'Z', along dim 'group', where elements have one"):
        approx.predict({"index": ["Z"]}, groups="new")
    found = values(approx, {"index": ["c", "Z"]}, groups="average", var_names=["effect"])["effect"]
    np.testing.assert_array_equal(found, np.zeros((N_DRAWS, 4)))
    assert values(approx, {"index": ["c"]})["y"].shape == (N_DRAWS, 1)


def test_elements_in_order_have_no_new_ones():
    ordered = pm.distributions.transforms.ordered
    effect = lambda: pm.Normal("effect", 0, 1, dims="group", transform=ordered, initval=[-1, 0, 1])  # noqa: E731
    with pytest.raises(ValueError, match=r"tied together \(Ordered\)"):
        approximation(of_levels(effect)).predict({"index": ["a", "b", "c", "Z"]}, groups="new")


def test_levels_without_a_dim_are_fixed():
    approx = approximation(of_levels(lambda: pm.Normal("effect", 0, pm.HalfNormal("tau"), shape=3)))
    with pytest.raises(ValueError, match="'index' has 3, but 'effect', along axis 0, has 3 elements, 0 to 2: a length"):
        approx.predict({"index": [3]}, groups="new")
    assert values(approx, {"index": [2]})["y"].shape == (N_DRAWS, 1)


def test_potentials_on_new_levels_are_said_to_be_left_out():
    def effect():
        effects = pm.Normal("effect", 0, pm.HalfNormal("tau"), dims="group")
        pm.Potential("more", -(effects**2).sum())
        return effects

    approx = approximation(of_levels(effect))
    with pytest.warns(UserWarning, match="New elements of 'effect' are drawn without regard to the Potentials"):
        approx.predict({"index": ["Z"]}, groups="new", draws=5)
    approx.predict({"index": ["a"]}, draws=5)


def test_without_effects_there_is_no_average():
    with pm.Model() as model:
        pm.Normal("y", pm.Normal("slope") * pm.Data("x", np.ones(3)), observed=np.zeros(3))
    with pytest.raises(ValueError, match="No effects of groups were found"):
        approximation(model).predict({"x": [1.0]}, groups="average")


def test_a_batch_is_not_predicted():
    with pm.Model() as model:
        x, y = pm.Minibatch(np.arange(20.0), np.zeros(20), batch_size=5)
        pm.Normal("y", pm.Normal("slope") * x, observed=y, total_size=20)
    with pytest.raises(ValueError, match=r"reads pm\.Minibatch data"):
        approximation(model).predict(draws=5)


def test_a_model_without_data_says_so():
    with pm.Model() as model:
        pm.Normal("y", pm.Normal("mu"), observed=np.zeros(3))
    approx = approximation(model)
    with pytest.raises(ValueError, match=r"the model has no pm\.Data"):
        approx.predict({"x": [1.0]})
    assert approx.predict(draws=7)["predictions"]["y"].shape == (4, 2, 3)


# --- what an index is of ---


def test_an_index_is_of_what_it_is_looked_up_in():
    with pm.Model(coords={"school": range(3), "pupil": range(6), "day": range(4)}) as model:
        pupil, weekday = pm.Data("pupil_of", [0, 5, 2]), pm.Data("weekday", [0, 4, 1])
        school_of = pm.Data("school_of", [0, 0, 1, 1, 2, 2])
        a, b = pm.Normal("a", dims="school"), pm.Normal("b", dims="pupil")
        effect, loading = pm.Normal("effect", dims="day"), pm.Normal("loading", shape=(2, 2))
        z = pm.Normal("z", shape=(6, 2))
        others = pm.math.concatenate([[0.0], effect])[weekday]
        pm.Normal("y", (2.0 * b)[pupil] + a[school_of[pupil]] + others + (z @ loading)[pupil, 0], observed=np.zeros(3))
    assert indexed_axes(model, "pupil_of") == ({"pupil"}, {("z", 0)})  # not school: pupil_of has more levels than that
    assert indexed_axes(model, "school_of") == ({"school"}, set())
    assert indexed_axes(model, "weekday") == (set(), set())  # levels beside one of reference


def test_predictions_with_a_level_of_reference():
    with pm.Model() as model:
        weekday = pm.Data("weekday", [0, 1, 2, 0, 1, 2])
        effect = pm.Normal("effect", 0.0, 1.0, shape=2)
        mu = pm.math.concatenate([[0.0], effect])[weekday]
        pm.Normal("y", mu, 0.1, observed=[0.0, 1.0, 2.0, 0.1, 1.1, 1.9])
        approx = fit_ngvi(model=model, random_seed=1, progressbar=False)
    found = approx.predict({"weekday": [2, 2, 0]}, random_seed=1)["predictions"]["y"].mean(("chain", "draw"))
    np.testing.assert_allclose(found, [1.93, 1.93, 0.0], atol=0.05)


@pytest.mark.parametrize(("name", "groups"), [("walk", "known"), ("shock", "new")])
def test_labels_of_series_go_on_in_steps(name, groups):
    with pm.Model(coords={"day": np.arange(20)}) as model:
        sd = pm.HalfNormal("sd", 1)
        walk = pm.GaussianRandomWalk("walk", sigma=sd, init_dist=pm.Normal.dist(0, 1), dims="day")
        total = pm.math.cumsum(pm.Normal("shock", 0, sd, dims="day"))
        level = pm.Deterministic("level", (walk + total)[pm.Data("at", np.arange(20))])
        pm.Normal("y", level, 1, observed=np.zeros(20))
    approx = approximation(model)
    for last in (25.5, 25):
        with pytest.raises(ValueError, match=rf"from 19(\.0)? to {last}, and each element is one step"):
            approx.predict({"day": [*range(20), last], "at": [20]}, var_names=[name], groups=groups)
    tree = approx.predict({"day": range(26), "at": [25]}, groups="new", var_names=["y"])
    assert tree["predictions"]["y"].shape == (4, 250, 1)
    assert tree["predictions_constant_data"]["at"].values.tolist() == [25]


def test_rows_of_the_fit_are_where_arviz_looks_for_them(fitted):
    import arviz_plots

    tree = fitted.predict(draws=50)
    np.testing.assert_array_equal(tree["posterior_predictive"]["y"], tree["predictions"]["y"])
    assert tree["observed_data"]["y"].dims == tree["posterior_predictive"]["y"].dims[2:]
    arviz_plots.plot_ppc_dist(tree)
    assert "posterior_predictive" not in fitted.predict({"x": [1.0], "school_of": [0]}, draws=50).children


def test_missing_covariates_are_named_by_row(fitted):
    with pytest.raises(ValueError, match="'x' has missing values, in rows 1"):
        fitted.predict({"x": [1.0, np.nan], "school_of": [0, 0]})
