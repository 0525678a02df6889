"""Averages of the expected response: predictions at values of data, their contrasts, and slopes, by closed forms."""

import numpy as np
import pymc as pm
import pytest

from scipy.special import expit

from pymc_ngvi import LogDensity, NGVIApproximation
from pymc_ngvi.families import DiagonalState

# Bambi 0.21 asks pandas for columns of objects in a way that is to change.
pytestmark = pytest.mark.filterwarnings("ignore:For backward compatibility, 'str' dtypes are included")
N_DRAWS = 500
SCHOOLS = ["north", "south", "east", "west"]


def approximation(model, sd=0.3):
    """Return an approximation that no fit has made: averages are algebra on its draws."""
    density = LogDensity(model)
    state = DiagonalState.from_scale(np.zeros(density.n_dim), np.full(density.n_dim, sd))
    return NGVIApproximation(density, state, random_seed=1)


def averages(approx, *args, **options):
    return approx.average_predictions(*args, draws=N_DRAWS, random_seed=3, **options)


def draws(approx, *names):
    """Return the draws that averages of the same seed are of."""
    found = approx.predict(var_names=list(names), draws=N_DRAWS, random_seed=3)["predictions"]
    return [found[name].values[0] for name in names]


@pytest.fixture(scope="module")
def logistic():
    rng = np.random.default_rng(1)
    with pm.Model(coords={"school": SCHOOLS}) as model:
        x = pm.Data("x", rng.normal(1.0, 1.0, size=30))
        index = pm.Data("school_of", rng.integers(4, size=30))
        b, effect = pm.Normal("b"), pm.Normal("effect", 0, pm.HalfNormal("tau"), dims="school")
        pm.Bernoulli("y", logit_p=effect[index] + b * (x - x.mean()), observed=rng.integers(2, size=30))
    return approximation(model)


def probabilities(approx, x, school):
    b, effect = draws(approx, "b", "effect")
    return expit(effect[:, school] + b[:, None] * (x - approx.density.given["x"].get_value().mean()))


def data_of(approx):
    return [approx.density.given[name].get_value() for name in ("x", "school_of")]


# --- predictions, comparisons, slopes ---


def test_average_predictions_are_of_probabilities_and_not_of_noise(logistic):
    found = averages(logistic)["y"]
    assert found.dims == ("chain", "draw")
    np.testing.assert_allclose(found.values[0], probabilities(logistic, *data_of(logistic)).mean(axis=1), rtol=1e-12)


def test_comparisons_are_differences_at_the_same_draws(logistic):
    _, school = data_of(logistic)
    found = averages(logistic, {"x": [0.0, 2.0]})["y"]
    assert found.dims == ("chain", "draw", "x")
    at = {x: probabilities(logistic, x, school).mean(axis=1) for x in (0.0, 2.0)}
    np.testing.assert_allclose(found.diff("x").values[0, :, 0], at[2.0] - at[0.0], rtol=1e-10)
    np.testing.assert_allclose((found.sel(x=2.0) / found.sel(x=0.0)).values[0], at[2.0] / at[0.0], rtol=1e-10)


def test_slopes_are_derivatives(logistic):
    [b] = draws(logistic, "b")
    p = probabilities(logistic, *data_of(logistic))
    found = averages(logistic, slope="x")["y"].values[0]
    np.testing.assert_allclose(found, (p * (1 - p)).mean(axis=1) * b, rtol=1e-7, atol=1e-10)


def test_slopes_at_values_and_by_groups(logistic):
    [b] = draws(logistic, "b")
    found = averages(logistic, {"x": [-1.0, 1.0]}, slope="x", by="school_of")["y"]
    assert found.dims == ("chain", "draw", "x", "school_of")
    for j, school in enumerate(SCHOOLS):
        p = probabilities(logistic, 1.0, [j])[:, 0]
        ours = found.sel(x=1.0, school_of=school).values[0]
        np.testing.assert_allclose(ours, p * (1 - p) * b, rtol=1e-7, atol=1e-10)


def test_groups_have_labels_and_their_own_averages(logistic):
    x, school = data_of(logistic)
    found = averages(logistic, by="school_of")["y"]
    assert found["school_of"].values.tolist() == SCHOOLS
    p = probabilities(logistic, x, school)
    for j, name in enumerate(SCHOOLS):
        np.testing.assert_allclose(found.sel(school_of=name).values[0], p[:, school == j].mean(axis=1), rtol=1e-12)


def test_groups_are_crossed_and_those_without_rows_have_no_average():
    with pm.Model(coords={"row": range(4), "time": range(2)}) as model:
        group, x = pm.Data("group", [0, 0, 1, 1], dims="row"), pm.Data("x", [1.0, 2.0, 2.0, 2.0], dims="row")
        b = pm.Normal("b")
        pm.Normal("y", b * x + group, 1.0, observed=np.zeros((2, 4)), dims=("time", "row"))
    approx = approximation(model)
    [b] = draws(approx, "b")
    found = averages(approx, by=("time", "group", "x"))["y"].transpose("chain", "draw", "time", "group", "x")
    expected = np.stack([b, 2 * b, np.full(len(b), np.nan), 2 * b + 1], axis=1).reshape(-1, 2, 2)
    for time in (0, 1):
        np.testing.assert_allclose(found.values[0, :, time], expected, rtol=1e-12)


def test_new_rows_and_new_groups(logistic):
    found = averages(logistic, {"x": [0.0, 1.0]}, new_data={"x": [9.0] * 3, "school_of": ["west", "west", "south"]})
    p = probabilities(logistic, 1.0, np.array([3, 3, 1])).mean(axis=1)
    np.testing.assert_allclose(found["y"].sel(x=1.0).values[0], p, rtol=1e-12)
    new = averages(logistic, {"school_of": ["hill"]}, groups="new", by="y_dim_0")
    assert new.attrs["drawn_from_prior"] == "effect"
    b, tau = draws(logistic, "b", "tau")
    p, x = new["y"].values[0, :, 0], data_of(logistic)[0]
    effects = np.log(p / (1 - p)) - b[:, None] * (x - x.mean())
    np.testing.assert_allclose(effects, effects[:, :1] + np.zeros(30), atol=1e-9)  # all rows are in one new group
    effect = effects[:, 0]
    assert (effect / tau).std() == pytest.approx(1, abs=4 * (2 * N_DRAWS) ** -0.5)
    none = averages(logistic, {"x": 1.0}, groups="average")["y"].values[0, :, 0]
    np.testing.assert_allclose(none, expit(b * (1 - x.mean())), rtol=1e-12)


def test_a_matrix_has_a_slope_for_each_column():
    rng = np.random.default_rng(2)
    columns = rng.normal(size=(20, 3)) * [0.01, 1.0, 100.0]
    with pm.Model(coords={"predictor": ["a", "b", "c"]}) as model:
        x = pm.Data("x", columns, dims=("row", "predictor"))
        beta = pm.Normal("beta", dims="predictor")
        pm.Normal("y", x @ beta, 1.0, observed=rng.normal(size=20), dims="row")
    approx = approximation(model)
    found = averages(approx, slope="x")["y"]
    assert found["predictor"].values.tolist() == ["a", "b", "c"]
    np.testing.assert_allclose(
        found.transpose("chain", "draw", "predictor").values[0], draws(approx, "beta")[0], rtol=1e-6, atol=1e-7
    )


@pytest.mark.parametrize("dims", [None, "day"])
def test_rows_with_other_covariates_stay_the_rows_that_they_are(dims):
    """So that values of a walk, and effects of rows, are those of the fit; in `predict` they would be of other rows."""
    rng = np.random.default_rng(5)
    with pm.Model(coords={"day": range(20)} if dims else {}) as model:
        x = pm.Data("x", rng.normal(size=20), dims=dims)
        walk = pm.GaussianRandomWalk("walk", sigma=0.3, init_dist=pm.Normal.dist(), dims=dims, shape=20)
        own, b = pm.Normal("own", shape=20), pm.Normal("b")
        pm.Poisson("y", pm.math.exp(walk + own + b * x), observed=rng.poisson(1, size=20), dims=dims)
    approx = approximation(model)
    walk, own, b = draws(approx, "walk", "own", "b")
    found = averages(approx, {"x": 1.0})["y"].values[0, :, 0]
    np.testing.assert_allclose(found, np.exp(walk + own + b[:, None]).mean(axis=1), rtol=1e-10)
    with pytest.raises(ValueError, match="depend on each other"):
        approx.predict({"x": np.ones(20)})
    with pytest.raises(ValueError, match="depend on each other"):
        averages(approx, {"x": 1.0}, new_data={"x": np.zeros(20)})


# --- what is averaged ---

MEANS = {
    "student": (lambda eta: pm.StudentT.dist(4, mu=eta, sigma=1.0), 0.5),
    "lognormal": (lambda eta: pm.LogNormal.dist(eta, 0.4), 0.5),
    "negative binomial": (lambda eta: pm.NegativeBinomial.dist(mu=pm.math.exp(eta), alpha=2.0), 1.0),
    "zero-inflated": (lambda eta: pm.ZeroInflatedPoisson.dist(0.6, pm.math.exp(eta)), 1.0),
    "beta": (lambda eta: pm.Beta.dist(mu=pm.math.invlogit(eta), nu=5.0), 0.5),
    "binomial": (lambda eta: pm.Binomial.dist(7, logit_p=eta), 1.0),
    "mixture": (lambda eta: pm.NormalMixture.dist([0.3, 0.7], pm.math.stack([eta, eta + 2], axis=-1), [1.0, 2.0]), 0.5),
}


@pytest.mark.parametrize(("make", "value"), MEANS.values(), ids=MEANS)
def test_means_are_those_of_predictions(make, value):
    with pm.Model() as model:
        y = make(pm.Normal("a") + pm.Data("x", np.linspace(-1, 1, 400)))
        model.register_rv(y, "y", observed=np.full(400, value).astype(y.dtype))
    approx = approximation(model)
    drawn = approx.predict(draws=N_DRAWS, random_seed=3)["predictions"]["y"].mean("y_dim_0")
    ours = averages(approx)["y"]
    noise = (drawn - ours).values
    assert abs(noise.mean()) < 5 * noise.std() / N_DRAWS**0.5
    assert ours.dtype == np.float64


def test_what_has_no_mean_takes_a_deterministic():
    with pm.Model(coords={"grade": list("ABC"), "row": range(4)}) as model:
        x = pm.Data("x", [0.0, 1.0, 2.0, 3.0], dims="row")
        slope = pm.Normal("slope", size=2)
        logits = pm.math.stack([0 * x, slope[0] * x, slope[1] * x], axis=1)
        p = pm.Deterministic("p", pm.math.softmax(logits, axis=1), dims=("row", "grade"))
        pm.Categorical("y", p=p, observed=[0, 1, 2, 2])
    approx = approximation(model)
    with pytest.raises(ValueError, match=r"the mean of 'y' is .* a Deterministic can be named in its place"):
        averages(approx)
    found = averages(approx, {"x": [0.0, 2.0]}, var_names="p", by="grade")["p"]
    assert found.dims == ("chain", "draw", "x", "grade")
    np.testing.assert_allclose(found.sum("grade"), 1.0, rtol=1e-12)
    np.testing.assert_allclose(found.sel(x=0.0), 1 / 3, rtol=1e-12)


def test_categories_are_no_rows():
    with pm.Model(coords={"row": range(6)}) as model:
        x = pm.Data("x", np.linspace(-1.0, 1.0, 6), dims="row")
        pm.OrderedLogistic("y", x * pm.Normal("b"), [-1.0, 1.0], observed=[0, 0, 1, 1, 2, 2], dims="row")
    found = averages(approximation(model), {"x": [0, 1]}, var_names="y_probs")["y_probs"]
    assert found.sizes["y_probs_dim_1"] == 3
    np.testing.assert_allclose(found.sum("y_probs_dim_1"), 1.0)
    np.testing.assert_allclose(found.sel(x=0)[..., 0], expit(-1.0))


def test_the_mean_of_one_variable_is_given_draws_of_others():
    """Of y = z**2 + noise, the mean given z, and not the square of the mean of z."""
    with pm.Model() as model:
        a = pm.Normal("a")
        z = pm.Normal("z", a, 1.0, observed=np.zeros(400))
        pm.Normal("y", z**2, 1.0, observed=np.zeros(400))
    approx = approximation(model)
    [a] = draws(approx, "a")
    found = averages(approx)
    np.testing.assert_allclose(found["z"].values[0], a, rtol=1e-12)
    error = found["y"].values[0] - (a**2 + 1)
    assert abs(error.mean()) < 5 * error.std() / N_DRAWS**0.5


def test_results_of_weighted_draws_have_them(logistic):
    with pytest.warns(UserWarning, match="Not reliable"):  # these draws are of no posterior
        found = logistic.with_prior(b=pm.Normal.dist(0.2, 1.0))
    b, effect = draws(found, "b", "effect")
    x, school = data_of(logistic)
    expected = expit(effect[:, school] + b[:, None] * (x - x.mean())).mean(axis=1)
    np.testing.assert_allclose(averages(found)["y"].values[0], expected, rtol=1e-12)
    assert b.mean() != draws(logistic, "b")[0].mean()


# --- what is refused ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"at": {"z": [1.0]}}, r"at has 'z', which the model has not: Valid: 'x', 'school_of'"),
        ({"at": {"school": ["north"]}}, r"at has 'school', which is no pm\.Data\. Those of the model are"),
        ({"slope": "y"}, r"slope has 'y', which is observed"),
        ({"slope": "school_of"}, r"'school_of' are whole numbers, and have no slope"),
        ({"by": "z"}, r"by has 'z', which is neither a dim of what is predicted nor pm\.Data: Valid: 'y_dim_0', 'x'"),
        ({"at": {"x": [1.0]}, "by": "x"}, r"'x', in by, is set to values by at"),
        ({"at": {"x": [np.zeros(30), np.ones(30)]}}, r"Values of 'x' are arrays: name them"),
        ({"at": {"school_of": ["hill"]}}, r"'effect' has levels 'hill' along dim 'school' that were not in the fit"),
        ({"groups": "knwon"}, r"groups='knwon': did you mean 'known'\?"),
        ({"by": "x", "var_names": "effect"}, r"can't be told along which dim of 'effect'"),
    ],
)
def test_what_cannot_be_averaged_is_refused(logistic, options, message):
    with pytest.raises(ValueError, match=message):
        averages(logistic, **options)
