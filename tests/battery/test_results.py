"""What with_prior, update and corrected return is an approximation: all that works with a fit works with it."""

import pickle

import numpy as np
import pymc as pm
import pytest

import pymc_ngvi

pytestmark = [pytest.mark.battery, pytest.mark.xdist_group("results")]  # they share their fits

GROUPS = [f"g{i}" for i in range(8)]


def data(seed=3, n_groups=10, n=12):
    rng = np.random.default_rng(seed)
    group = np.repeat(np.arange(n_groups), n)
    x = rng.normal(3.0, 1.0, len(group))
    return x, group, rng.poisson(np.exp(-0.8 + 0.3 * x + rng.normal(0, 0.5, n_groups)[group]))


def model_of(x, group, y, labels):
    with pm.Model(coords={"g": labels, "row": np.arange(len(y))}) as model:
        covariate = pm.Data("x", x, dims="row")
        index = pm.Data("index", group, dims="row")
        a, b, s = pm.Normal("a", 0, 2), pm.Normal("b", 0, 1), pm.HalfNormal("s", 1)
        u = pm.Normal("u", 0, s, dims="g")
        rate = pm.Deterministic("rate", pm.math.exp(a + b * (covariate - covariate.mean()) + u[index]), dims="row")
        pm.Poisson("y", rate, observed=y)
    return model


@pytest.fixture(scope="module")
def fit():
    x, group, y = data()
    known = group < len(GROUPS)
    approx = pymc_ngvi.fit_ngvi(
        model=model_of(x[known], group[known], y[known], GROUPS), random_seed=1, progressbar=False
    )
    assert approx.is_exact
    return approx


def new_rows(which):
    """Return rows of groups, in any order, with their labels."""
    x, group, y = data()
    rows = np.flatnonzero(np.isin(group, which))[:: 2 if 8 in which else 6]
    return {"x": x[rows], "index": [f"g{i}" for i in group[rows]], "y": y[rows]}


@pytest.fixture(scope="module")
def updated(fit):
    return fit.update(new_rows([9, 2, 8]), draws=8_000, random_seed=1)


def test_the_model_of_an_update_has_all_rows_and_levels(fit, updated):
    model, n = updated.model, len(new_rows([9, 2, 8])["y"])
    assert list(model.coords["g"]) == [*GROUPS, "g8", "g9"]
    assert len(model.coords["row"]) == 96 + n
    draws = updated.sample(200, random_seed=1, log_likelihood=True)
    assert draws["posterior"]["rate"].shape == (4, 50, 96 + n)
    assert draws["log_likelihood"]["y"].shape[-1] == 96 + n
    # what predictors are standardised by is that of the fit
    first = draws["posterior"]
    x, group, _ = data()
    rate = np.exp(first["a"] + first["b"] * (x[0] - x[group < 8].mean()) + first["u"].sel(g="g0"))
    np.testing.assert_allclose(first["rate"].isel(row=0), rate, rtol=1e-6)


def test_an_update_is_that_of_a_fit_of_all_rows(fit, updated):
    x, group, y = data()
    known, new = group < 8, new_rows([9, 2, 8])
    position = [[*GROUPS, "g8", "g9"].index(label) for label in new["index"]]
    rows = (np.append(a[known], b) for a, b in ((x, new["x"]), (group, position), (y, new["y"])))
    again = pymc_ngvi.fit_ngvi(model=model_of(*rows, [*GROUPS, "g8", "g9"]), random_seed=1, progressbar=False)
    error = 4 * np.hypot(updated.checks.effective_size**-0.5, again.checks.effective_size**-0.5)
    ours, theirs = (a.sample(8_000, random_seed=2)["posterior"] for a in (updated, again))
    for name in ("b", "s", "u"):  # the intercept is that of other means
        mean, sd = theirs[name].mean(("chain", "draw")), theirs[name].std(("chain", "draw"))
        assert float(abs((ours[name].mean(("chain", "draw")) - mean) / sd).max()) < error + 0.05
        np.testing.assert_allclose(ours[name].std(("chain", "draw")), sd, rtol=error + 0.05)
    left, refitted = updated.leave_out(random_seed=1), again.leave_out(random_seed=1)
    assert abs(left.elpd - refitted.elpd) < 0.3
    np.testing.assert_allclose(left.elpd_i, refitted.elpd_i, atol=0.08)
    difference = again.log_marginal_likelihood.value - fit.log_marginal_likelihood.value
    assert abs(updated.log_predictive_density.value - difference) < 0.1


def test_updates_in_any_order_and_priors_commute(fit):
    one, two, prior = new_rows([2]), new_rows([9, 8]), {"s": pm.Exponential.dist(2.0)}
    whole = fit.update({k: [*one[k], *two[k]] for k in one}, draws=8_000, random_seed=1).with_prior(prior)
    parts = fit.with_prior(prior, draws=8_000, random_seed=2).update(two).update(one)
    error = 4 * np.hypot(whole.checks.effective_size**-0.5, parts.checks.effective_size**-0.5)
    ours, theirs = (a.sample(8_000, random_seed=2)["posterior"] for a in (whole, parts))
    for name in ("a", "b", "s", "u"):
        mean, sd = ours[name].mean(("chain", "draw")), ours[name].std(("chain", "draw"))
        assert float(
            abs((theirs[name].sel(g=mean["g"]) if name == "u" else theirs[name]).mean(("chain", "draw")) - mean).max()
        ) < float((error + 0.05) * sd.max())


@pytest.mark.parametrize("kind", ["with_prior", "update", "corrected"])
def test_files_pickles_and_reports(fit, updated, kind, tmp_path):
    approx = {
        "with_prior": lambda: fit.with_prior(s=pm.Exponential.dist(2.0)),
        "update": lambda: updated,
        "corrected": lambda: pymc_ngvi.fit_ngvi(
            model=fit.model, posterior="gaussian", random_seed=1, progressbar=False
        ).corrected(20_000, random_seed=1),
    }[kind]()
    assert approx.checks.is_reliable
    approx.save(tmp_path / "file.nc")
    for again in (pymc_ngvi.load(tmp_path / "file.nc", approx.model), pickle.loads(pickle.dumps(approx))):
        np.testing.assert_array_equal(again.mean_flat, approx.mean_flat)
        assert str(again.checks) == str(approx.checks)
        assert str(again.record.verdict) == str(approx.checks)
    assert approx.checks.sentence.split(" (")[0] in " ".join(str(approx.summary()).split())
    found = approx.diagnose()
    assert found.reliable, found.reasons
    assert approx.checks is found.checks
    predicted = approx.predict({"x": [3.0], "index": ["g1"]}, draws=4_000, random_seed=1)["predictions"]["y"]
    fitted = fit.predict({"x": [3.0], "index": ["g1"]}, draws=4_000, random_seed=1)["predictions"]["y"]
    assert abs(float(predicted.mean() - fitted.mean())) < 0.15 * float(fitted.std())
    assert abs(approx.leave_out(random_seed=1).elpd / len(approx.model["y"].eval()) - fit.leave_out().elpd / 96) < 0.1
