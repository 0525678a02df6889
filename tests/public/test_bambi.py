"""Bambi models: the method by name, results that are Bambi's own parameters, and predictions."""

import cloudpickle
import numpy as np
import pandas as pd
import pymc as pm
import pytest
import xarray as xr

from pymc.model.fgraph import clone_model

import pymc_ngvi

from pymc_ngvi import NGVIApproximation

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
    "splines": ("y ~ bs(x, df=4) + C(kind)", {}),
    "distributional": (bambi.Formula("y ~ x + kind", "sigma ~ z"), {}),
    "classes": ("kind ~ x + group", {"family": "categorical"}),
    "logistic": ("hit ~ x + kind", {"family": "bernoulli"}),
}


@pytest.mark.parametrize(("formula", "options"), FORMULAS.values(), ids=FORMULAS)
def test_draws_are_of_bambis_own_parameters(data, formula, options):
    """The PyMC model gives the parameters of each row as Deterministics; Bambi computes them from the draws."""
    model, approx = fitted(formula, data, **options)
    draws = approx.sample(20, random_seed=2)["posterior"]
    of_rows = [d.name for d in approx.model.deterministics if d.name in model.family.likelihood.params]
    assert not any(name in of_rows or name.endswith("_offset") for name in draws.data_vars)
    expected = approx.sample(20, random_seed=2, var_names=of_rows)["posterior"]
    predicted = model.predict(approx.sample(20, random_seed=2), inplace=False)["posterior"]
    for name in of_rows:
        # Bambi's model of an intercept alone has one mean for all rows, without their dimension.
        values = np.broadcast_to(expected[name].values, predicted[name].shape)
        np.testing.assert_allclose(predicted[name], values, rtol=1e-9, atol=1e-12)


def test_dims_are_in_the_order_of_bambi(data):
    _, approx = fitted("y ~ x + (0 + kind | group)", data)
    moved = approx.sample(5, random_seed=2)["posterior"]
    assert moved["kind|group"].dims == ("chain", "draw", "kind__expr_dim", "group__factor_dim")


def test_every_result_has_the_intercept_of_least_squares(data, tmp_path):
    model = bambi.Model("y ~ x + z", data, auto_scale=False)
    flat = bambi.Prior("Normal", mu=0.0, sigma=1e5)
    model.set_priors({"x": flat, "z": flat, "Intercept": flat, "sigma": bambi.Prior("Normal", mu=0.5, sigma=1e-5)})
    model.build()
    approx = pm.fit(method="ngvi", model=model.backend.model, random_seed=1, **QUIET)
    design = np.column_stack([np.ones(len(data)), data["x"], data["z"]])
    cov = 0.25 * np.linalg.inv(design.T @ design)
    mean, sd = (np.linalg.lstsq(design, data["y"])[0])[0], cov[0, 0] ** 0.5
    approx.save(tmp_path / "fit.nc", random_seed=1)
    file = xr.open_datatree(tmp_path / "fit.nc", engine="h5netcdf")
    again = pymc_ngvi.load(tmp_path / "fit.nc", model.backend.model)
    sent = cloudpickle.loads(cloudpickle.dumps(approx))
    entry = {"y": data["y"].to_numpy()}
    many = pymc_ngvi.fit_many(model.backend.model, [entry], var_names=["Intercept"], random_seed=1, progressbar=False)
    table = approx.summary(round_to="none")
    state = approx.state
    pairs = [(of.mean_data["Intercept"], of.std_data["Intercept"]) for of in (approx, again, sent, approx.gaussian)]
    pairs += [(state.mean["Intercept"], state.std["Intercept"]), file["unconstrained"]["Intercept"].values]
    pairs += [
        (of["Intercept"].mean(), of["Intercept"].std()) for of in (file["posterior"], approx.sample(2_000)["posterior"])
    ]
    pairs += [
        many.dataset["Intercept"].values[0][:2],
        (table.table.loc["Intercept", "mean"], table.table.loc["Intercept", "sd"]),
    ]
    for value, error in pairs:
        assert abs(float(value) - mean) < 0.15 * sd
        assert float(error) == pytest.approx(sd, rel=0.12)
    correlation = approx.cov_of(["Intercept", "z"]).values / np.sqrt(np.outer(np.diag(cov), np.diag(cov)))[::2, ::2]
    assert correlation[0, 1] == pytest.approx(cov[0, 2] / (cov[0, 0] * cov[2, 2]) ** 0.5, abs=0.05)


def test_a_slope_with_a_bound_has_moments_of_draws(data):
    _, approx = fitted("y ~ x", data, n=10_000, priors={"x": bambi.Prior("HalfNormal", sigma=1.0)})
    draws = approx.sample(4_000, random_seed=3)["posterior"]["Intercept"]
    assert abs(float(approx.mean_data["Intercept"] - draws.mean())) < 0.1 * float(draws.std())
    variance = approx.cov_of("Intercept").item()
    assert [variance**0.5, float(approx.std_data["Intercept"])] == pytest.approx([float(draws.std())] * 2, rel=0.1)


def test_a_copy_of_the_pymc_model_is_warned_of(data):
    copy = clone_model(fitted("y ~ x", data)[1].model)
    with pytest.warns(UserWarning, match="those at mean predictors, not at predictors of zero"):
        pymc_ngvi.fit_ngvi(model=copy, n=0, **QUIET)


def test_models_of_other_packages_are_fitted_by_one_call(data):
    model = bambi.Model("y ~ x", data)
    assert pymc_ngvi.fit_model(model, n=0, random_seed=1, **QUIET).mean_data.equals(fitted("y ~ x", data)[1].mean_data)
    with pytest.raises(TypeError, match="has its data already"):
        pymc_ngvi.fit_model(model, data)
    with pytest.raises(TypeError, match=r"should be a bambi\.Model or a model of pymc-marketing"):
        pymc_ngvi.fit_model(model.backend.model)

    class Builder:
        def build_model(self, y):
            with pm.Model() as self.model:
                pm.Normal("y", pm.Normal("mu", 0.0, 10.0), 1.0, observed=y)

        def fit(self, y, *, method, random_seed, sample_kwargs):
            self.build_model(y)
            with self.model:
                self.idata = pm.fit(method=method, random_seed=random_seed).sample(**sample_kwargs)

    builder = Builder()
    approx = pymc_ngvi.fit_model(builder, np.full(4, 3.0), draws=50, random_seed=1, **QUIET)
    assert type(approx) is NGVIApproximation
    assert dict(builder.idata["posterior"].sizes) == {"chain": 4, "draw": 13}
    with builder.model:
        assert not isinstance(pm.fit(n=1, method="advi", progressbar=False), NGVIApproximation)


def test_options_arrive_through_bambi(data):
    model = bambi.Model("y ~ x", data)
    with pytest.raises(TypeError, match=r"method 'ngvi' does not take obj_n_mc=5: .*`n_draws`"):
        model.fit(inference_method="vi", method="ngvi", obj_n_mc=5, **QUIET)
    approx = model.fit(inference_method="vi", method="ngvi", n=0, start={"x": 3.0}, family="diagonal", **QUIET)
    assert type(approx) is NGVIApproximation
    assert float(approx.mean_data["x"]) == 3.0


# --- predictions ---


@pytest.fixture(scope="module")
def by_group(data):
    return fitted(bambi.Formula("y ~ x + (1 | group) + (x | group:kind)", "sigma ~ (1 | group)"), data)


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
        found = approx.predict(rows, draws=48, random_seed=2)["predictions"]
        draws = approx.sample(48, random_seed=2)
        expected = model.predict(draws, data=rows.reset_index(drop=True), inplace=False)["posterior"][parent]
        np.testing.assert_allclose(found[parent], expected, rtol=1e-9, atol=1e-12)
        [response] = {*found.data_vars} - {*expected.to_dataset(), *draws["posterior"].data_vars}
        assert found[response].shape == (4, 12, len(rows))


def test_new_groups_are_drawn_from_their_prior(by_group):
    """Rows of one new group have one effect, those of another have their own; Bambi gives both the same one."""
    _, approx = by_group
    rows = new_rows(group=["p", "new", "other", "new", "p"], kind=["a", "a", "a", "a", "none"])
    with pytest.raises(
        ValueError, match=r"levels 'new', 'other' along dim 'group__factor_dim' that were not in the fit"
    ):
        approx.predict(rows)
    n = 4_000
    found = approx.predict(rows, groups="new", draws=n, random_seed=2)["predictions"]
    assert set(found.data_vars) == {"mu", "sigma", "y"}
    mu = np.concatenate(found["mu"].values)
    np.testing.assert_array_equal(mu[:, 1], mu[:, 3])
    draws = approx.sample(n, random_seed=2)["posterior"]
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
    _, approx = by_group
    rows = new_rows(group=["p", "new"], kind=["a", "b"])
    found = approx.predict(rows, groups="average", var_names="mu", draws=50, random_seed=2)
    draws = approx.sample(50, random_seed=2)["posterior"]
    expected = (draws["Intercept"] + 30.0 * draws["x"]).values
    np.testing.assert_allclose(found["predictions"]["mu"], np.stack([expected] * 2, axis=2), rtol=1e-9)
    assert list(found["predictions"].data_vars) == ["mu"]


def test_what_bambi_can_not_predict_is_refused(data, by_group):
    _, approx = by_group
    rows = new_rows(group=["p"], kind=["a"])
    with pytest.raises(TypeError, match="a pickle has none"):
        cloudpickle.loads(cloudpickle.dumps(approx)).predict(rows)
    with pytest.raises(ValueError, match="var_names has 'nu', which is not predicted: Valid: 'mu', 'sigma', 'y'"):
        approx.predict(rows, var_names="nu")
    numbered = data.assign(group=data["group"].map(ord))
    _, by_number = fitted("y ~ x + (1 | group)", numbered)
    with pytest.raises(ValueError, match="Label '112' of column 'group' is not 112, which was in the fit"):
        by_number.predict(new_rows(group=["112"]), groups="new")
    _, with_predictor = fitted("y ~ kind + (1 | kind)", data)
    with pytest.raises(ValueError, match=r"levels \(none\) in 'kind' are not present in the original data"):
        with_predictor.predict(new_rows(group=["p"], kind=["none"]), groups="new")
    with pytest.raises(ValueError, match="'x' has missing values, in rows 1"):
        approx.predict(pd.concat([rows, rows.assign(x=np.nan)]))
    with pytest.raises(ValueError, match="new_data has no column 'y'"):
        approx.update(rows)


def test_new_rows_update_the_fit(data):
    """The noise is known, and what else there is has flat priors: least squares of all rows, one group of them new."""
    flat, noise = bambi.Prior("Normal", mu=0.0, sigma=1e4), bambi.Prior("Normal", mu=0.8, sigma=1e-4)
    model = bambi.Model("y ~ x + (1 | group)", data, auto_scale=False)
    between = bambi.Prior("Normal", mu=0.0, sigma=bambi.Prior("Normal", mu=2.0, sigma=1e-4))
    model.set_priors({"Intercept": flat, "x": flat, "sigma": noise, "1|group": between})
    approx = model.fit(inference_method="vi", method="ngvi", random_seed=1, **QUIET)
    new = pd.DataFrame({"x": [31.0, 29.0, 33.0], "group": ["p", "new", "new"], "y": [21.0, 17.0, 19.5]})
    found = approx.update(new)
    assert found.checks.is_reliable
    draws = found.sample(4_000, random_seed=1)["posterior"]
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
    at = found.predict(new.iloc[:1], var_names="mu", random_seed=1)["predictions"]["mu"]
    right = design[-3] @ mean
    assert abs(float(at.mean()) - right) < (5 / 500**0.5 + 0.03) * np.sqrt(
        design[-3] @ np.linalg.solve(precision, design[-3])
    )
