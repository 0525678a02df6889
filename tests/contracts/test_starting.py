"""Where a fit starts: `start` on either scale, `start_sigma`, and the choice of a scale where none is given."""

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

from pymc_ngvi import LogDensity, StartError, fit_ngvi
from pymc_ngvi.fitting import problem as starting
from pymc_ngvi.fitting.problem import START_SCALES, large_scales, start_point, start_scales

QUIET = {"progressbar": False, "backend": "quick"}
COORDS = {"effect": ["a", "b", "c"]}


def model_of_all_kinds():
    """Each transform that a start has to go through, in an order that no sorting gives."""
    with pm.Model(coords=COORDS) as model:
        weights = pm.Dirichlet("weights", np.array([2.0, 3.0, 4.0]))
        beta = pm.Normal("beta", 0.0, 1.0, dims="effect", initval=[0.1, 0.2, 0.3])
        x = pm.Data("x", np.array([1.0, 2.0, 3.0]), dims="effect")
        sd = pm.HalfNormal("sd", 1.0)
        share = pm.Uniform("share", 1.0, 5.0)
        pm.Deterministic("total", beta.sum() + sd)
        pm.Normal("y", (beta * x).sum() + share * weights[0], sd, observed=0.5)
    return model


def small_model():
    """The posterior has its mode inside, on either scale."""
    with pm.Model(coords=COORDS) as model:
        sd = pm.HalfNormal("sd", 1.0)
        beta = pm.Normal("beta", 0.0, 1.0, dims="effect")
        pm.Deterministic("total", beta.sum() + sd)
        pm.Normal("y", beta, sd, observed=[[0.5, 1.5, 3.0], [1.0, 0.0, 2.0]])
    return model


def bounded_model():
    with pm.Model() as model:
        sd = pm.HalfNormal("sd", 1.0)
        share = pm.Uniform("share", 1.0, 5.0)
        beta = pm.Normal("beta", shape=3)
        pm.Normal("y", share * beta, sd, observed=[0.5, 1.5, 3.0])
        pm.Exponential("other", 1.0)
    return model


@pytest.fixture(scope="module")
def density():
    return LogDensity(model_of_all_kinds(), "quick")


def named(density, theta):
    """Return the unconstrained values of a flat vector by value name."""
    return {name: value.tolist() for name, value in density.layout.unflatten(theta).items()}


DEFAULT = {
    "weights_simplex__": (np.log([2, 3]) - np.log([2, 3, 4]).mean()).tolist(),
    "beta": [0.1, 0.2, 0.3],
    "sd_log__": 0.0,
    "share_interval__": 0.0,
}

# --- means ------------------------------------------------------------------------------------------------------------


def test_default_is_the_initial_point_of_the_model(density):
    point = density.model.initial_point()
    theta = start_point(density, None)
    assert set(named(density, theta)) == set(point) == set(DEFAULT)
    for name, value in named(density, theta).items():
        np.testing.assert_allclose(value, point[name])
    np.testing.assert_array_equal(start_point(density, {}), theta)


@pytest.mark.parametrize(
    ("start", "value_name", "expected"),
    [
        pytest.param({"beta": [3.0, 4.0, 5.0]}, "beta", [3.0, 4.0, 5.0], id="no-transform"),
        pytest.param({"beta": np.array([3, 4, 5])}, "beta", [3.0, 4.0, 5.0], id="integers"),
        pytest.param({"sd": 0.25}, "sd_log__", np.log(0.25), id="log"),
        pytest.param({"sd": np.float32(0.25)}, "sd_log__", np.log(0.25), id="float32"),
        pytest.param({"sd_log__": 0.25}, "sd_log__", 0.25, id="value-name"),
        pytest.param({"sd": 100.0, "sd_log__": 0.25}, "sd_log__", 0.25, id="value-name-wins"),
        pytest.param({"sd_log__": 0.25, "sd": 100.0}, "sd_log__", 0.25, id="value-name-wins-first"),
        pytest.param({"share": 2.0}, "share_interval__", np.log(1 / 3), id="interval"),
        # w = (.2, .3, .5): log w less the mean of log w, without the last.
        pytest.param(
            {"weights": [0.2, 0.3, 0.5]},
            "weights_simplex__",
            np.log([0.2, 0.3]) - np.log([0.2, 0.3, 0.5]).mean(),
            id="simplex",
        ),
        pytest.param({"weights_simplex__": [1.0, -1.0]}, "weights_simplex__", [1.0, -1.0], id="simplex-value"),
    ],
)
def test_start_by_name(density, start, value_name, expected):
    before = dict(start)
    got = named(density, start_point(density, start))
    np.testing.assert_allclose(got[value_name], expected, rtol=1e-12)
    assert list(start) == list(before), "the mapping is not modified"
    assert all(start[name] is before[name] for name in before)
    for name in set(DEFAULT) - {value_name}:
        np.testing.assert_allclose(got[name], DEFAULT[name], err_msg=f"{name} was not given", atol=1e-12)


def test_deterministics_and_data_are_without_effect(density):
    start = {"total": 1e9, "x": np.zeros(3), "y": 3.0, "sd": 2.0}
    np.testing.assert_array_equal(start_point(density, start), start_point(density, {"sd": 2.0}))


@pytest.mark.parametrize(
    ("start", "message"),
    [
        pytest.param(
            {"beta": 1.0}, r"start\['beta'\] leads to shape \(\) for 'beta', which has shape \(3,\)", id="scalar"
        ),
        pytest.param({"beta": [1.0, 2.0]}, r"start\['beta'\] leads to shape \(2,\) .* has shape \(3,\)", id="short"),
        pytest.param({"beta": np.zeros((3, 1))}, r"start\['beta'\] leads to shape \(3, 1\)", id="column"),
        pytest.param({"sd": [1.0, 2.0]}, r"start\['sd'\] leads to shape \(2,\) for 'sd_log__'.* shape \(\)", id="long"),
        pytest.param({"sd_log__": [1.0]}, r"start\['sd_log__'\] leads to shape \(1,\) for 'sd_log__'", id="value-name"),
        pytest.param(
            {"weights_simplex__": np.zeros(3)}, r"for 'weights_simplex__', which has shape \(2,\)", id="simplex"
        ),
    ],
)
def test_wrong_shape_says_which_is_right(density, start, message):
    with pytest.raises(ValueError, match=message):
        start_point(density, start)


@pytest.mark.parametrize(
    ("name", "hint"), [("bta", "did you mean 'beta'"), ("sd_log_", "did you mean 'sd_log__'"), ("zzz", "Valid")]
)
def test_unknown_name_lists_the_valid_ones(density, name, hint):
    with pytest.raises(
        ValueError, match=rf"^start has '{name}', which is not a variable of the model: {hint}"
    ) as error:
        start_point(density, {name: 1.0})
    assert all(repr(valid) in str(error.value) for valid in ("weights", "beta", "sd", "share", *DEFAULT))


@pytest.mark.parametrize("start", [[1.0, 2.0], "MAP", 3.0], ids=["list", "text", "number"])
def test_start_without_names(density, start):
    with pytest.raises(TypeError, match=r"^start should map names .* to values, or be an earlier fit by NGVI; got "):
        start_point(density, start)


def test_start_from_another_approximation(density):
    """Datasets by name, as ``mean_data`` gives them, are mappings."""
    approx = fit_ngvi(0, model=density.model, start={"sd": 0.25, "beta": [3.0, 4.0, 5.0]}, **QUIET)
    np.testing.assert_array_equal(start_point(density, approx.mean_data), approx.mean_flat)
    np.testing.assert_allclose(start_point(density, approx.state.mean), approx.mean_flat, rtol=1e-8, atol=1e-12)


# --- standard deviations ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sd", "sd_log__"])
def test_scale_by_either_name(density, name):
    scales = start_scales(density, {name: 0.7, "beta": [0.1, 0.2, 0.3]})
    assert len(scales) == len(START_SCALES)
    for scale, s in zip(scales, START_SCALES, strict=True):
        got = named(density, scale)
        assert got == {"weights_simplex__": [s, s], "beta": [0.1, 0.2, 0.3], "sd_log__": 0.7, "share_interval__": s}


@pytest.mark.parametrize(
    ("start_sigma", "message"),
    [
        pytest.param(
            {"sdd": 1.0}, r"start_sigma has 'sdd', which is not a free variable: did you mean 'sd'", id="name"
        ),
        pytest.param({"total": 1.0}, r"start_sigma has 'total', which is not a free variable", id="deterministic"),
        pytest.param({"beta": [1.0, 2.0]}, r"start_sigma\['beta'\] has shape \(2,\); give .* \(3,\)", id="short"),
        pytest.param(
            {"weights": np.ones(3)}, r"start_sigma\['weights'\] has shape \(3,\); give .* \(2,\)", id="simplex"
        ),
        pytest.param({"sd": 0.0}, r"start_sigma\['sd'\] should be positive and finite; got 0\.0", id="zero"),
        pytest.param({"beta": [1.0, -1.0, 1.0]}, r"start_sigma\['beta'\] should be positive", id="negative"),
        pytest.param({"sd": np.nan}, r"start_sigma\['sd'\] should be positive and finite; got nan", id="nan"),
        pytest.param(np.inf, r"should be positive and finite; got inf", id="inf-for-all"),
        pytest.param(-1.0, r"should be positive and finite; got -1\.0", id="negative-for-all"),
        pytest.param([0.1, 0.2], r"has shape \(2,\); give a number", id="list-for-all"),
    ],
)
def test_wrong_scale_says_what_is_right(density, start_sigma, message):
    with pytest.raises(ValueError, match=message):
        start_scales(density, start_sigma)


@pytest.mark.parametrize(
    "options",
    [
        {"family": "full"},
        {"family": "diagonal"},
        {"family": "block"},
        {"family": "full", "update": "cholesky_precision"},
        {"family": "full", "step": "decay"},
    ],
    ids=str,
)
def test_both_reach_the_fit(options):
    start, scales = {"sd": 0.25, "beta": [3.0, 4.0, 5.0]}, {"sd": 0.7, "beta": [0.1, 0.2, 0.3]}
    approx = fit_ngvi(0, model=small_model(), start=start, start_sigma=scales, **options, **QUIET)
    np.testing.assert_allclose(approx.mean_data["sd_log__"], np.log(0.25), rtol=1e-12)
    np.testing.assert_array_equal(approx.mean_data["beta"], [3.0, 4.0, 5.0])
    # A factor of the precision holds the inverses.
    np.testing.assert_allclose(approx.std_data["sd_log__"], 0.7, rtol=1e-14)
    np.testing.assert_allclose(approx.std_data["beta"], [0.1, 0.2, 0.3], rtol=1e-14)
    assert approx.record.family == options["family"]


@pytest.mark.parametrize("sd", START_SCALES)
def test_best_scale_is_chosen(sd):
    """For N(0, sd^2), log t - (t / sd)^2 / 2 is largest at t = sd; the other candidates are .1 nats or more below."""
    with pm.Model() as model:
        pm.Normal("x", 0.0, sd, shape=4)
    approx = fit_ngvi(0, model=model, estimator="price", random_seed=1, **QUIET)
    np.testing.assert_array_equal(approx.sd_flat, sd)


def test_scale_is_chosen_given_those_of_others():
    """x is given, y takes part in the choice: the density of y alone decides."""
    with pm.Model() as model:
        pm.Normal("x", 0.0, 1.0)
        pm.Normal("y", 0.0, 0.1, shape=4)
    approx = fit_ngvi(0, model=model, start_sigma={"x": 0.001}, random_seed=1, **QUIET)
    np.testing.assert_array_equal(approx.std_data["x"], 0.001)
    np.testing.assert_array_equal(approx.std_data["y"], 0.1)


def test_scale_with_draws_that_are_not_finite_is_no_candidate():
    """Outside |x| < .2 the density is 0: only scales whose draws all stay inside count, and the widest is the best."""
    with pm.Model() as model:
        x = pm.Flat("x")
        pm.Potential("inside", pt.switch(pt.abs(x) < 0.2, 0.0, -np.inf))
    approx = fit_ngvi(0, model=model, random_seed=1, **QUIET)
    assert approx.sd_flat in (0.1, 0.03)  # 8 draws reach to about 1.5 standard deviations
    assert approx.record.n_dropped == 0


@pytest.mark.parametrize("scale", [1e3, 1e6])
def test_rates_that_overflow_start_narrower(scale):
    """A start of .01 has an ELBO of -1e13 or none, and steps from it led anywhere."""
    rng = np.random.default_rng(0)
    x = scale * rng.normal(size=(100, 3))
    y = rng.poisson(np.exp(x @ [0.5, -0.3, 0.2] / scale))
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, 10.0, shape=3)
        pm.Poisson("y", pm.math.exp(x @ beta), observed=y)
    exact, drawn = (fit_ngvi(model=model, estimator=name, random_seed=1, **QUIET) for name in ("quadrature", "price"))
    assert drawn.converged
    assert drawn.record.n_iterations < 30
    assert abs(drawn.elbo.value - exact.elbo.value) < 0.05  # the tolerance


@pytest.mark.parametrize("sd", [1e-4, 1e-6])
def test_a_parabola_does_not_start_narrower(sd):
    """One natural step solves it; steps on minibatches from a narrow start overshoot."""
    with pm.Model() as model:
        pm.Normal("x", 0.0, sd, shape=4)
    approx = fit_ngvi(0, model=model, estimator="price", random_seed=1, **QUIET)
    np.testing.assert_array_equal(approx.sd_flat, min(START_SCALES))


def test_narrower_starts_leave_scales_that_are_given():
    x = np.linspace(-1e6, 1e6, 50)
    with pm.Model() as model:
        level, slope = pm.Normal("level", 0.0, 1.0), pm.Normal("slope", 0.0, 1.0)
        pm.Poisson("y", pm.math.exp(level + slope * x), observed=np.ones(50, dtype=int))
    approx = fit_ngvi(0, model=model, estimator="price", start_sigma={"level": 0.5}, random_seed=1, **QUIET)
    assert approx.std_data["level"] == 0.5
    assert approx.std_data["slope"] < 1e-5


# --- no good start ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "named_terms"),
    [
        pytest.param({"sd": -1.0}, ["sd"], id="outside-the-support"),
        pytest.param({"sd": 0.0}, ["sd"], id="on-its-edge"),
        pytest.param({"share": 7.0}, ["share"], id="outside-an-interval"),
        pytest.param({"beta": [0.0, np.nan, 0.0]}, ["beta", "y"], id="nan"),
    ],
)
def test_start_outside_the_support_is_named(start, named_terms):
    with pytest.raises(StartError, match="not finite at the start") as error:
        fit_ngvi(model=bounded_model(), start=start, **QUIET)
    listed = str(error.value).split("Terms that are not finite there: ")[1].split(". Check")[0]
    assert all(f"{name} (" in listed for name in named_terms), listed
    assert "other (" not in listed, "a term that is finite is not blamed"
    assert "`start`" in str(error.value)


def test_density_finite_at_the_start_only_says_so():
    with pm.Model() as model:
        x = pm.Flat("x")
        pm.Potential("point", pt.switch(pt.eq(x, 0.0), 0.0, -np.inf))
    with pytest.raises(StartError, match="finite at the starting point itself, but not around it") as error:
        fit_ngvi(model=model, **QUIET)
    assert "1e-11;" in str(error.value)


# --- scales of wide priors --------------------------------------------------------------------------------------------


def counts_by_group(prior_sd):
    """Group effects on a log scale, whose standard deviation has a prior as wide as Bambi's are."""
    rng = np.random.default_rng(5)
    group = np.repeat(np.arange(30), 4)
    x = rng.standard_normal(30)[group]
    y = rng.poisson(np.exp(1.0 + 0.5 * x + 0.5 * rng.standard_normal(30)[group]))
    with pm.Model() as model:
        level = pm.Normal("level", 0.0, 10.0)
        slope = pm.Normal("slope", 0.0, 10.0)
        sd = pm.HalfNormal("sd", prior_sd)
        offset = pm.Normal("offset", shape=30)
        pm.Poisson("y", pm.math.exp(level + slope * x + sd * offset[group]), observed=y)
    return model


def test_effects_of_groups_with_a_wide_prior_do_not_take_the_part_of_everything():
    """From a standard deviation of 40 the fit got lost, or took a hundred times the evaluations."""
    wide, narrow = (fit_ngvi(model=counts_by_group(sd), random_seed=1, progressbar=False) for sd in (40.0, 2.0))
    assert wide.converged
    assert wide.n_gradients < 3 * narrow.n_gradients
    # The priors differ by a factor that is the same wherever the likelihood has the scale.
    np.testing.assert_allclose(wide.mean_flat, narrow.mean_flat, atol=0.2 * narrow.sd_flat.max())


def test_a_scale_that_the_data_need_stays_high():
    """A residual standard deviation of 1 would cost a million nats."""
    rng = np.random.default_rng(6)
    with pm.Model() as model:
        sd = pm.HalfNormal("sd", 500.0)
        mu = pm.Normal("mu", 0.0, 1000.0)
        pm.Normal("y", mu, sd, observed=300.0 + 200.0 * rng.standard_normal(200))
    density = LogDensity(model, "quick")
    seen = []
    approx = fit_ngvi(model=model, random_seed=1, callbacks=[lambda a, losses, i: seen.append(-losses[0])], **QUIET)
    assert approx.converged
    assert len(large_scales(density, start_point(density, None), None)) == 1
    assert seen[0] > -5_000


# --- networks ---------------------------------------------------------------------------------------------------------


def start_of_network(seed=1, start=None, **options):
    with pm.Model() as model:
        w1, b1 = pm.Normal("w1", 0, 1, shape=(50, 40)), pm.Normal("b1", 0, 1, shape=40)
        w2, b2 = pm.Normal("w2", 0, 1, shape=40), pm.Normal("b2", 0, 1)
        sd, set_by_hand = pm.HalfNormal("sd", 1, shape=3), pm.Normal("set", 0, 1, shape=3, initval=[0.0, 0.0, 1.0])
        x = np.ones((4, 50))
        mean = pm.math.tanh(x @ w1 + b1) @ w2 + b2 + set_by_hand.sum()
        pm.Normal("y", mean, sd.sum(), observed=np.arange(4.0))
    density = LogDensity(model, "quick")
    return density, starting.units_apart(density, starting.start_point(density, start), start, seed)


def test_units_of_a_network_start_apart():
    """Weights about 0, with variance 2 / n; what else there is, and what the user gave, stays."""
    density, point = start_of_network()
    of = {v.name: point[v.where] for v in density.layout.variables}
    for name, n in {"w1": 50, "b1": 40, "w2": 40}.items():
        assert len(np.unique(of[name])) == of[name].size
        # The standard error of a standard deviation of m numbers is 1 / sqrt(2 m) of it.
        assert abs(of[name].std() / np.sqrt(2 / n) - 1) < 4 / np.sqrt(2 * of[name].size)
    same = density.initial_point()
    for name in ("b2", "sd", "set"):
        [v] = [v for v in density.layout.variables if v.name == name]
        np.testing.assert_array_equal(point[v.where], same[v.where])
    np.testing.assert_array_equal(start_of_network()[1], point)
    assert not np.array_equal(start_of_network(seed=2)[1], point)
    given = {"w1": np.full((50, 40), 0.5), "b1": np.zeros(40)}
    _, by_hand = start_of_network(start=given)
    np.testing.assert_array_equal(by_hand[:2000], 0.5)
    np.testing.assert_array_equal(by_hand[2000:2040], 0.0)


def test_coefficients_without_units_start_where_pymc_has_them():
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 1, shape=5)
        pm.Normal("y", np.ones((4, 5)) @ beta, 1.0, observed=np.arange(4.0))
    density = LogDensity(model, "quick")
    np.testing.assert_array_equal(starting.units_apart(density, np.zeros(5), None, 1), 0.0)
