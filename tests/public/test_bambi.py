"""Bambi models: the method by name, and the intercept of the draws where Bambi's own functions look for it."""

import numpy as np
import pandas as pd
import pytest
import xarray as xr

from pymc_ngvi import NGVIApproximation, Status, uncentre_bambi_intercept

bambi = pytest.importorskip("bambi", reason="bambi is in the dependency group test")

# Bambi 0.21 asks pandas for columns of objects in a way that is to change.
pytestmark = pytest.mark.filterwarnings("ignore:For backward compatibility, 'str' dtypes are included")

QUIET = {"progressbar": False, "backend": "quick"}


@pytest.fixture(scope="module")
def data():
    """Predictors far from zero, so that a centred intercept is far from the one at zero."""
    rng = np.random.default_rng(20)
    n = 48
    frame = pd.DataFrame(
        {
            "x": rng.normal(30.0, 2.0, n),
            "z": rng.normal(-5.0, 0.5, n),
            "kind": rng.choice(list("abc"), n),
            "group": np.repeat(list("pqrstu"), n // 6),
        }
    )
    effect = frame["kind"].map({"a": 0.0, "b": 1.0, "c": -1.0})
    frame["y"] = 1.0 + 0.5 * frame["x"] - 0.8 * frame["z"] + effect + rng.normal(0.0, 0.5, n)
    frame["hit"] = (frame["y"] > frame["y"].median()).astype(int)
    return frame


def fitted(formula, data, n=0, **options):
    """Return a model and its fit; n = 0 is the start, which does for algebra."""
    model = bambi.Model(formula, data, **options)
    approx = model.fit(inference_method="vi", method="ngvi", n=n, random_seed=1, **QUIET)
    return model, approx


FORMULAS = {
    "numbers": ("y ~ x + z", {}),
    "categories": ("y ~ kind", {}),
    "interaction": ("y ~ x * kind", {}),
    "groups": ("y ~ x + kind + (x | group)", {}),
    "group-kinds": ("y ~ x + (0 + kind | group)", {}),
    "no-intercept": ("y ~ 0 + x + z", {}),
    "intercept-only": ("y ~ 1", {}),
    "not-centred": ("y ~ x", {"center_predictors": False}),
    "logistic": ("hit ~ x + kind", {"family": "bernoulli"}),
}


@pytest.mark.parametrize(("formula", "options"), FORMULAS.values(), ids=FORMULAS)
def test_predictions_are_those_of_the_pymc_model(data, formula, options):
    """The PyMC model itself gives the mean of each draw as a Deterministic: with its own, centred, intercept."""
    model, approx = fitted(formula, data, **options)
    draws = approx.sample(20, random_seed=2)
    parent = "p" if "family" in options else "mu"
    expected = draws["posterior"][parent]
    predicted = model.predict(uncentre_bambi_intercept(model, draws), inplace=False)["posterior"][parent]
    # Bambi's model of an intercept alone has one mean for all rows, without their dimension.
    expected = expected.values if expected.dims == predicted.dims else np.broadcast_to(expected, predicted.shape)
    np.testing.assert_allclose(predicted, expected, rtol=1e-9, atol=1e-12)


def test_every_component_is_moved(data):
    formula = bambi.Formula("y ~ x + kind", "sigma ~ z")
    model, approx = fitted(formula, data)
    draws = approx.sample(20, random_seed=2)
    moved = uncentre_bambi_intercept(model, draws)["posterior"]
    before = draws["posterior"]
    np.testing.assert_allclose(
        moved["sigma_Intercept"], before["sigma_Intercept"] - before["sigma_z"] * data["z"].mean()
    )
    kinds = [float((data["kind"] == kind).mean()) for kind in before["kind_dim"].values]
    expected = before["Intercept"] - before["x"] * data["x"].mean() - (before["kind"] * kinds).sum("kind_dim")
    np.testing.assert_allclose(moved["Intercept"], expected)
    for name in ("x", "kind", "sigma_z"):
        xr.testing.assert_equal(moved[name], before[name])


def test_dims_are_in_the_order_of_bambi(data):
    model, approx = fitted("y ~ x + (0 + kind | group)", data)
    moved = uncentre_bambi_intercept(model, approx.sample(5, random_seed=2))["posterior"]
    assert moved["kind|group"].dims == ("chain", "draw", "kind__expr_dim", "group__factor_dim")


def test_draws_are_moved_once_and_not_in_place(data, tmp_path):
    model, approx = fitted("y ~ x", data)
    draws = approx.sample(5, random_seed=2)
    before = draws["posterior"]["Intercept"].copy()
    once = uncentre_bambi_intercept(model, draws)
    xr.testing.assert_equal(draws["posterior"]["Intercept"], before)
    xr.testing.assert_equal(
        uncentre_bambi_intercept(model, once)["posterior"].to_dataset(), once["posterior"].to_dataset()
    )
    once.to_netcdf(tmp_path / "draws.nc", engine="h5netcdf")
    with xr.open_datatree(tmp_path / "draws.nc", engine="h5netcdf") as read:
        again = uncentre_bambi_intercept(model, read)["posterior"]["Intercept"]
        xr.testing.assert_equal(again, once["posterior"]["Intercept"])


def test_what_is_not_of_the_model_is_refused(data):
    model, approx = fitted("y ~ x", data)
    draws = approx.sample(5)
    with pytest.raises(TypeError, match=r"should be a bambi\.Model; got Model"):
        uncentre_bambi_intercept(approx.model, draws)
    with pytest.raises(ValueError, match=r"not built: call model\.build\(\)"):
        uncentre_bambi_intercept(bambi.Model("y ~ x", data), draws)
    with pytest.raises(TypeError, match=r"as approx\.sample\(2_000\) returns it; got Dataset"):
        uncentre_bambi_intercept(model, draws["posterior"].to_dataset())
    with pytest.raises(ValueError, match="no group 'posterior'"):
        uncentre_bambi_intercept(model, xr.DataTree())
    other, _ = fitted("y ~ x + z", data)
    with pytest.raises(ValueError, match=r"The posterior has no 'z': these are not draws from the model 'y ~ x \+ z'"):
        uncentre_bambi_intercept(other, draws)


def test_options_arrive_through_bambi(data):
    model = bambi.Model("y ~ x", data)
    with pytest.raises(TypeError, match=r"method 'ngvi' does not take obj_n_mc=5: .*`n_draws`"):
        model.fit(inference_method="vi", method="ngvi", obj_n_mc=5, **QUIET)
    approx = model.fit(inference_method="vi", method="ngvi", n=0, start={"x": 3.0}, family="diagonal", **QUIET)
    assert type(approx) is NGVIApproximation
    assert (approx.status, approx.record.family) == (Status.NOT_STARTED, "diagonal")
    assert float(approx.mean_data["x"]) == 3.0


# --- predictions ---


@pytest.fixture(scope="module")
def by_group(data):
    return fitted("y ~ x + (1 | group) + (x | group:kind)", data)


def new_rows(**columns):
    return pd.DataFrame({"x": [30.0] * len(columns["group"]), **columns})


PREDICTED = {
    "groups": ("y ~ x + (1 | group) + (x | group:kind)", {}, "mu"),
    "splines": ("y ~ bs(x, df=4) + scale(z)", {}, "mu"),
    "process": ("y ~ 0 + kind + hsgp(x, m=6, c=1.5, by=kind)", {}, "mu"),
    "offset": ("hit ~ 1 + offset(np.log(z ** 2))", {"family": "poisson"}, "mu"),
    "trials": ("p(hit, trials) ~ x + (1 | group)", {"family": "binomial"}, "p"),
    "ordered": ("level ~ 0 + x", {"family": "cumulative"}, "p"),
    "classes": ("kind ~ x", {"family": "categorical"}, "p"),
    "censored": ("censored(waited, status) ~ x", {"family": "weibull", "link": "log"}, "mu"),
}


@pytest.mark.parametrize(("formula", "options", "parent"), PREDICTED.values(), ids=PREDICTED)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_rows_are_predicted_as_bambi_does(data, formula, options, parent):
    ordered = pd.Categorical(np.digitize(data["y"], [17.0, 20.0]), ordered=True)
    status = np.where(data["hit"] == 1, "right", "none")
    model, approx = fitted(
        formula, data.assign(trials=5, level=ordered, waited=data["y"] ** 2, status=status), **options
    )
    for rows in (data.iloc[[3]], data.iloc[[3, 20, 40]]):  # one row has no axes to lose
        rows = rows.assign(trials=5)
        found = approx.predict(rows, bambi_model=model, draws=48, random_seed=2)["predictions"]
        draws = uncentre_bambi_intercept(model, approx.sample(48, random_seed=2))
        expected = model.predict(draws, data=rows.reset_index(drop=True), inplace=False)["posterior"][parent]
        np.testing.assert_allclose(found[parent], expected, rtol=1e-9, atol=1e-12)
        [response] = {*found.data_vars} - {*expected.to_dataset(), *draws["posterior"].data_vars}
        assert found[response].shape == (4, 12, len(rows))


def test_new_groups_are_drawn_from_their_prior(by_group):
    """Rows of one new group have one effect, those of another have their own; Bambi gives both the same one."""
    model, approx = by_group
    rows = new_rows(group=["p", "new", "other", "new", "p"], kind=["a", "a", "a", "a", "none"])
    with pytest.raises(
        ValueError, match=r"levels 'new', 'other' along dim 'group__factor_dim' that were not in the fit"
    ):
        approx.predict(rows, bambi_model=model)
    n = 4_000
    found = approx.predict(rows, bambi_model=model, groups="new", draws=n, random_seed=2)["predictions"]
    mu = np.concatenate(found["mu"].values)
    np.testing.assert_array_equal(mu[:, 1], mu[:, 3])
    draws = uncentre_bambi_intercept(model, approx.sample(n, random_seed=2))["posterior"]
    common = (draws["Intercept"] + 30.0 * draws["x"]).values.ravel()
    sds = [draws[name].values.ravel() for name in ("1|group_sigma", "1|group:kind_sigma", "x|group:kind_sigma")]
    apart = (mu[:, [1, 2]] - common[:, None]) / np.sqrt(sds[0] ** 2 + sds[1] ** 2 + 900.0 * sds[2] ** 2)[:, None]
    # Standard normal given the parameters: errors of a mean, a variance and a correlation of n draws.
    np.testing.assert_allclose(apart.mean(axis=0), 0.0, atol=4 * n**-0.5)
    np.testing.assert_allclose(apart.var(axis=0), 1.0, rtol=5 * (2 / n) ** 0.5)
    assert abs(np.corrcoef(apart.T)[0, 1]) < 4 * n**-0.5
    effect = draws["1|group"].sel(group__factor_dim="p").values.ravel()
    within = (mu[:, 4] - common - effect) / np.sqrt(sds[1] ** 2 + 900.0 * sds[2] ** 2)  # a known group, and a new pair
    assert within.var() == pytest.approx(1.0, rel=5 * (2 / n) ** 0.5)


def test_average_groups_are_those_of_common_effects_alone(by_group):
    model, approx = by_group
    rows = new_rows(group=["p", "new"], kind=["a", "b"])
    found = approx.predict(rows, bambi_model=model, groups="average", var_names="mu", draws=50, random_seed=2)
    draws = uncentre_bambi_intercept(model, approx.sample(50, random_seed=2))["posterior"]
    expected = (draws["Intercept"] + 30.0 * draws["x"]).values
    np.testing.assert_allclose(found["predictions"]["mu"], np.stack([expected] * 2, axis=2), rtol=1e-9)
    assert list(found["predictions"].data_vars) == ["mu"]


def test_groups_of_every_parameter_are_predicted(data):
    model, approx = fitted(bambi.Formula("y ~ x + (1 | group)", "sigma ~ (1 | group)"), data)
    found = approx.predict(new_rows(group=["p", "new"]), bambi_model=model, groups="new", draws=50, random_seed=1)
    assert set(found["predictions"].data_vars) == {"mu", "sigma", "y"}
    assert (found["predictions"]["sigma"] > 0).all()


def test_what_bambi_can_not_predict_is_refused(data, by_group):
    model, approx = by_group
    rows = new_rows(group=["p"], kind=["a"])
    with pytest.raises(TypeError, match=r"give the model, too, as bambi_model="):
        approx.predict(rows)
    with pytest.raises(TypeError, match=r"new_data should be a DataFrame; got \{'x'"):
        approx.predict({"x": [1.0]}, bambi_model=model)
    with pytest.raises(ValueError, match="new_data has no column 'x'"):
        approx.predict(rows.drop(columns="x"), bambi_model=model)
    with pytest.raises(ValueError, match="var_names has 'nu', which is not predicted: Valid: 'mu', 'y'"):
        approx.predict(rows, bambi_model=model, var_names="nu")
    with pytest.raises(ValueError, match="new_data has no column 'group', which the formula"):
        approx.predict(rows.drop(columns="group"), bambi_model=model)
    numbered = data.assign(group=data["group"].map(ord))
    of_numbers, by_number = fitted("y ~ x + (1 | group)", numbered)
    with pytest.raises(ValueError, match="Label '112' of column 'group' is not 112, which was in the fit"):
        by_number.predict(new_rows(group=["112"]), bambi_model=of_numbers, groups="new")
    other, with_predictor = fitted("y ~ kind + (1 | kind)", data)
    with pytest.raises(ValueError, match=r"levels \(none\) in 'kind' are not present in the original data"):
        with_predictor.predict(new_rows(group=["p"], kind=["none"]), bambi_model=other, groups="new")
    with pytest.raises(ValueError, match=r"not built: call model\.build\(\)"):
        approx.predict(rows, bambi_model=bambi.Model("y ~ x", data))
    with pytest.raises(ValueError, match="'x' has missing values, in rows 1"):
        approx.predict(pd.concat([rows, rows.assign(x=np.nan)]), bambi_model=model)
    with pytest.raises(ValueError, match="The approximation has 'kind'"):
        with_predictor.predict(rows.assign(y=0.0), bambi_model=fitted("y ~ x", data)[0])
    with pytest.raises(ValueError, match="new_data has no column 'y'"):
        approx.update(rows, bambi_model=model)


def test_new_rows_update_the_fit(data):
    """The noise is known, and what else there is has flat priors: least squares of all rows, one group of them new."""
    flat, noise = bambi.Prior("Normal", mu=0.0, sigma=1e4), bambi.Prior("Normal", mu=0.8, sigma=1e-4)
    model = bambi.Model("y ~ x + (1 | group)", data, auto_scale=False)
    between = bambi.Prior("Normal", mu=0.0, sigma=bambi.Prior("Normal", mu=2.0, sigma=1e-4))
    model.set_priors({"Intercept": flat, "x": flat, "sigma": noise, "1|group": between})
    approx = model.fit(inference_method="vi", method="ngvi", random_seed=1, **QUIET)
    new = pd.DataFrame({"x": [31.0, 29.0, 33.0], "group": ["p", "new", "new"], "y": [21.0, 17.0, 19.5]})
    found = approx.update(new, bambi_model=model)
    assert found.checks.is_reliable
    draws = uncentre_bambi_intercept(model, found.sample(4_000, random_seed=1))["posterior"]
    rows = pd.concat([data, new])
    labels = draws["group__factor_dim"].values
    design = np.column_stack([np.ones(len(rows)), rows["x"], np.equal.outer(rows["group"].to_numpy(), labels)])
    precision = design.T @ design / 0.64 + np.diag([0.0, 0.0, *np.full(len(labels), 0.25)])
    mean, sd = np.linalg.solve(precision, design.T @ rows["y"] / 0.64), np.sqrt(np.diag(np.linalg.inv(precision)))
    values = [draws["Intercept"], draws["x"], *(draws["1|group"].sel(group__factor_dim=k) for k in labels)]
    assert labels.tolist() == [*"pqrstu", "new"]
    for value, right, error in zip(values, mean, sd, strict=True):
        assert abs(float(value.mean()) - right) < (5 / 500**0.5 + 0.03) * error
        assert abs(float(value.std()) / error - 1) < 5 / 1_000**0.5 + 0.03
    at = found.predict(new.iloc[:1], bambi_model=model, var_names="mu", random_seed=1)["predictions"]["mu"]
    right = design[-3] @ mean
    assert abs(float(at.mean()) - right) < (5 / 500**0.5 + 0.03) * np.sqrt(
        design[-3] @ np.linalg.solve(precision, design[-3])
    )
