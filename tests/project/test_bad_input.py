"""Models and data that give trouble: a clear error before anything is lost, or a result with a status that says so.

Wrong options are in test_options.py, wrong starts in test_starting.py.
"""

import os
import warnings

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

from operations import OnceDifferentiableSquare, PlainSquare, UndefinedGradient
from scipy import integrate

from pymc_ngvi import ConvergenceWarning, MissingDerivativeError, StartError, Status, fit_ngvi
from pymc_ngvi.density.by_rows import ByRows

ALIKE = np.full(30, 2.0)
QUIET = {"progressbar": False, "backend": "quick"}


def build(*variables):
    """Return a model of variables, each made by a function that is called in its context."""
    with pm.Model() as model:
        for make in variables:
            make()
    return model


def fit(model, **options):
    """Fit; a fit that does not converge is no failure here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return fit_ngvi(model=model, **{**QUIET, "random_seed": 1, "posterior": "gaussian", **options})


# --- models that can't be fitted --------------------------------------------------------------------------------------


# PyMC's Simulator itself calls PyTensor in a way that is to go.
@pytest.mark.filterwarnings("ignore:RandomVariable Ops will stop hiding:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Calling a RandomVariable without an explicit rng:DeprecationWarning")
def test_simulator_is_refused():
    def simulator():
        a = pm.Normal("a")
        pm.Simulator("sim", lambda rng, a, size=None: rng.normal(a, size=size), a, observed=[1.0, 2.0])

    with pytest.raises(ValueError, match=r"pm\.Simulator variables \('sim'\).*pm\.sample_smc"):
        fit_ngvi(model=build(simulator), **QUIET)


def minibatch_model():
    x, y = pm.Minibatch(np.linspace(-1.0, 1.0, 200), np.linspace(-0.5, 1.5, 200), batch_size=20)
    return build(lambda: pm.Normal("y", pm.Normal("b") * x, 1.0, observed=y, total_size=200))


@pytest.mark.parametrize("options", [{}, {"family": "diagonal"}], ids=str)
def test_minibatches_without_a_step_rule_get_one_that_suits(options):
    """b | y ~ N(sum x y / (1 + sum x^2), 1 / (1 + sum x^2)), of which a batch alone would be nowhere near."""
    x, y = np.linspace(-1.0, 1.0, 200), np.linspace(-0.5, 1.5, 200)
    approx = fit(minibatch_model(), **options)
    assert approx.record.step == "decay"
    precision = 1.0 + x @ x
    assert abs(approx.mean_flat[0] - x @ y / precision) < 0.5 * precision**-0.5
    np.testing.assert_allclose(approx.sd_flat, precision**-0.5, rtol=0.2)


def test_total_size_without_a_minibatch_scales_the_likelihood():
    """Two observations that stand for ten: precision 1 + 5 * 2, mean 5 * sum / that."""
    model = build(lambda: pm.Normal("y", pm.Normal("mu"), 1.0, observed=[1.0, 3.0], total_size=10))
    approx = fit(model)
    np.testing.assert_allclose(approx.mean_flat, 5 * 4.0 / 11.0, rtol=1e-8)
    np.testing.assert_allclose(approx.sd_flat, 11.0**-0.5, rtol=1e-8)


@pytest.mark.parametrize(
    ("op", "message"),
    [
        pytest.param(PlainSquare, "gradient of .*PlainSquare.* has no first derivative", id="no-gradient"),
        pytest.param(UndefinedGradient, "gradient of .*UndefinedGradient.* has no first derivative", id="undefined"),
    ],
)
@pytest.mark.parametrize("options", [{}, {"estimator": "pathwise"}], ids=["default", "gradients"])
def test_missing_derivative_names_the_operation(op, message, options):
    model = build(lambda: pm.Potential("term", -op()(pm.Normal("x"))))
    with pytest.raises(MissingDerivativeError, match=message) as error:
        fit_ngvi(model=model, **options, **QUIET)
    assert "pm.sample" in str(error.value)
    assert isinstance(error.value, ValueError)


def once_differentiable_model():
    """log p = -x^2/2 - x^2: the posterior is N(0, 1/3)."""
    return build(lambda: pm.Potential("term", -OnceDifferentiableSquare()(pm.Normal("x"))))


@pytest.mark.parametrize("options", [{"estimator": "price"}, {"step": "adaptive"}], ids=["estimator", "step"])
def test_missing_second_derivative_where_one_is_asked_for(options):
    message = "Hessian-vector product of .*PlainIdentity.* no second derivative"
    with pytest.raises(MissingDerivativeError, match=message):
        fit_ngvi(model=once_differentiable_model(), **options, **QUIET)


@pytest.mark.parametrize("options", [{}, {"family": "diagonal"}])
def test_models_without_second_derivatives_are_fitted_without_draws_where_they_have_rows(options):
    approx = fit(once_differentiable_model(), **options)
    assert (approx.record.estimator, approx.converged) == ("quadrature", True)
    np.testing.assert_allclose(approx.sd_flat, 3**-0.5, rtol=1e-3)


@pytest.mark.parametrize("options", [{}, {"family": "diagonal"}, {"update": "natural_pd"}], ids=str)
def test_models_without_second_derivatives_are_fitted_from_gradients_and_say_so(options, monkeypatch):
    monkeypatch.setattr(ByRows, "found", None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        approx = fit_ngvi(model=once_differentiable_model(), random_seed=1, **options, **QUIET)
    [first, *_] = [w for w in caught if "second derivative" in str(w.message)]
    assert "PlainIdentity" in str(first.message)
    assert first.filename == __file__
    record = approx.record
    assert (record.estimator, record.n_hessians) == ("stein", 0)
    assert all(f"{axis}={getattr(record, axis)!r}" in str(first.message) for axis in ("estimator", "update", "step"))
    assert record.family == options.get("family", "full")
    # Rules of constant steps end within their noise: a few hundredths of a nat.
    np.testing.assert_allclose(approx.mean_flat, 0.0, atol=0.3 * 3**-0.5)
    np.testing.assert_allclose(approx.sd_flat, 3**-0.5, rtol=0.3)


# --- too large --------------------------------------------------------------------------------------------------------


def _memory(monkeypatch, n_bytes):
    values = {"SC_PAGE_SIZE": 1024, "SC_PHYS_PAGES": n_bytes // 1024}
    monkeypatch.setattr(os, "sysconf", values.__getitem__)


def test_dense_covariance_too_large_says_what_it_takes(monkeypatch):
    model = build(lambda: pm.Normal("x", shape=1000))
    _memory(monkeypatch, 2**25)  # 32 MiB: 56 matrices of 1000 x 1000 take 427 MiB
    with pytest.raises(MemoryError, match=r"'full' approximation in 1,000 dimensions .*0\.4 GiB") as error:
        fit_ngvi(model=model, family="full", **QUIET)
    assert "family='diagonal'" in str(error.value)
    approx = fit(model, n=0, family="diagonal")
    assert approx.record.family == "diagonal"


# --- log densities that are not finite --------------------------------------------------------------------------------


def _constant_data(values):
    """Data that PyMC does not look into, so that it does not impute what is missing."""
    return pt.as_tensor(np.array(values))


@pytest.mark.parametrize(
    ("term", "listed"),
    [
        pytest.param(
            lambda b: pm.Normal("y", b, 1.0, observed=_constant_data([1.0, np.nan])), "y (nan)", id="nan-data"
        ),
        pytest.param(lambda b: pm.Normal("y", b * np.array([1, np.nan]), observed=[1.0, 2.0]), "y (nan)", id="nan-x"),
        pytest.param(lambda b: pm.Normal("y", b * np.inf, observed=1.0), "y (", id="inf-x"),
        pytest.param(lambda b: pm.HalfNormal("y", pt.exp(b), observed=[1.0, -1.0]), "y[1] = -1", id="outside-support"),
        pytest.param(
            lambda b: pm.Poisson("y", pt.exp(b), observed=[1, -2]),
            "support of Poisson: y[1] = -2.",
            id="negative-count",
        ),
        pytest.param(
            lambda b: pm.Uniform("y", b, b + 1.0, observed=[0.0, 9.0]),
            "1 of 2 values of y is outside",
            id="empty-support",
        ),
        pytest.param(lambda b: pm.Potential("pot", pt.log(b - 9.0)), "pot (nan)", id="potential"),
    ],
)
def test_terms_that_are_not_finite_at_the_start_are_named(term, listed):
    model = build(lambda: term(pm.Normal("b")), lambda: pm.HalfNormal("innocent"))
    with pytest.raises(StartError, match="not finite at the start") as error:
        fit_ngvi(model=model, **QUIET)
    assert listed in str(error.value)
    assert "innocent" not in str(error.value)
    assert "b (" not in str(error.value)


def _moments(log_density, low, high):
    """Mean and standard deviation of an unnormalised density on an interval."""

    def moment(k):
        return integrate.quad(lambda x: x**k * np.exp(log_density(x)), low, high)[0]

    mean = moment(1) / moment(0)
    return mean, np.sqrt(moment(2) / moment(0) - mean**2)


@pytest.mark.parametrize(
    ("seed", "start_sigma"),
    [(1, None), (2, None), (2, 2.0), (3, 2.0), (4, 2.0)],
    ids=["chosen-1", "chosen-2", "wide-2", "wide-3", "wide-4"],
)
def test_some_draws_outside_the_support_are_left_out_and_counted(seed, start_sigma):
    """log(x + 2) has no value below x = -2: a wide start has draws there, and the optimum hardly any."""
    model = build(lambda: pm.Potential("edge", pt.log(pm.Normal("x") + 2.0)))
    approx = fit(model, random_seed=seed, start_sigma=start_sigma)
    assert np.isfinite(approx.hist).all()
    n_dropped = approx.record.n_dropped
    if start_sigma is None:
        assert approx.converged
    else:
        assert n_dropped > 0
    # A fit may get stuck on the edge, but then it does not say that it has converged.
    if approx.converged:
        mean, sd = _moments(lambda x: -0.5 * x * x + np.log(x + 2.0), -2.0, 10.0)
        # The posterior is skew: a Gaussian is off by about .05 sd, and the tolerance allows another .06.
        np.testing.assert_allclose(approx.mean_flat, mean, atol=0.15 * sd)
        np.testing.assert_allclose(approx.sd_flat, sd, rtol=0.15)


@pytest.mark.parametrize("edge", [-np.inf, np.inf, np.nan], ids=["minus-inf", "inf", "nan"])
def test_half_of_the_line_without_a_density(edge):
    model = build(lambda: pm.Potential("edge", pt.switch(pm.Normal("x") < -0.5, edge, 0.0)))
    approx = fit(model)
    assert not approx.converged
    assert approx.record.n_dropped > 0
    assert np.isfinite(approx.hist).all()
    assert np.isfinite([approx.mean_flat[0], approx.sd_flat[0], approx.elbo.value]).all()
    assert approx.mean_flat[0] > -0.5


# --- models that are unusual and fine ---------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Data in y contains missing values:pymc.exceptions.ImputationWarning")
def test_missing_data_are_imputed():
    """mu ~ N(0, 1), two of three y ~ N(mu, 1) seen: mu and the third have means 4/3, variances 1/3 and 4/3."""
    observed = np.ma.masked_invalid([1.0, np.nan, 3.0])
    approx = fit(build(lambda: pm.Normal("y", pm.Normal("mu"), 1.0, observed=observed)))
    np.testing.assert_allclose(approx.mean_flat, 4 / 3, rtol=1e-8)
    np.testing.assert_allclose(approx.cov_of(["mu", "y_unobserved"]), [[1 / 3, 1 / 3], [1 / 3, 4 / 3]], rtol=1e-8)
    draws = approx.sample(3, random_seed=1).posterior
    np.testing.assert_array_equal(draws["y"].isel(y_dim_0=1), draws["y_unobserved"].squeeze("y_unobserved_dim_0"))
    np.testing.assert_array_equal(draws["y"].isel(y_dim_0=[0, 2]), np.broadcast_to([1.0, 3.0], (4, 1, 2)))


def test_an_index_beyond_its_dim_is_named():
    with pm.Model(coords={"school": range(3)}) as model:
        effect = pm.Normal("effect", dims="school")
        pm.Normal("y", effect[np.array([0, 1, 3])], 1.0, observed=np.zeros(3))
    with pytest.raises(IndexError, match=r"beyond dim 'school' of effect, which has length 3: an index\[2\] = 3\."):
        fit(model)


# --- data that are at fault -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("through", ["array", "data"])
def test_predictors_that_are_not_finite_are_named(value, through):
    """``pm.Data`` refuses NaN itself."""
    x = np.linspace(-1.0, 1.0, 8)
    x[[2, 5]] = value
    with pm.Model() as model:
        predictor = pm.Data("dose", np.zeros(8)) if through == "data" else x
        pm.Normal("y", pm.Normal("a") + pm.Normal("b") * predictor, 1.0, observed=np.zeros(8))
    if through == "data":
        model["dose"].set_value(x)
    what = "'dose'" if through == "data" else "an array in 'y'"
    with pytest.raises(
        StartError,
        match=rf"because of data that are not: {what} \(2 of 8 values, at \[2\], \[5\]\).*Leave these",
    ):
        fit(model)


def test_infinite_bounds_are_no_bad_data():
    def make():
        latent = pm.Normal.dist(pm.Normal("a") - 1e200, 1.0)
        pm.Censored("y", latent, lower=-np.inf, upper=np.full(4, np.inf), observed=np.zeros(4))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with pytest.raises(StartError, match=r"not finite at the start.*give a `start`"):
            fit(build(make))


@pytest.mark.parametrize("named", [False, True])
def test_data_that_do_not_vary_are_named(named):
    """One warning, and no overflows."""

    def make():
        pm.Normal("y", pm.Normal("a"), pm.HalfNormal("sd"), observed=pm.Data("Y", ALIKE) if named else ALIKE)

    with pytest.warns(
        ConvergenceWarning, match=r"Observed values do not vary: 'y' \(all 2\)\..*check the data"
    ) as caught:
        approx = fit_ngvi(model=build(make), random_seed=1, posterior="gaussian" if named else "auto", **QUIET)
    assert [w.category for w in caught] == [ConvergenceWarning]
    assert "observed values do not vary: 'y' (all 2)" in approx.summary(100, khat_draws=None).lines[0]


# --- kinks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("family", ["full", "diagonal"])
def test_kinks_are_not_certified(seed, family):
    """x ~ Laplace(0, .3), y ~ N(x, .5): the Hessian sees nothing of the prior, and sd .5 is far from the best, .28."""
    model = build(lambda: pm.Normal("y", pm.Laplace("x", 0.0, 0.3), 0.5, observed=0.3))
    approx = fit(model, family=family, estimator="price", random_seed=seed)
    assert approx.status is Status.NOT_SMOOTH
    assert "kinks" in approx.status.sentence
    exact = fit(model, family=family, random_seed=seed)
    assert exact.converged
    np.testing.assert_allclose(exact.sd_flat, 0.28, atol=0.005)


def test_a_wall_says_that_it_is_one():
    """A Potential of -inf below -1.6 sd: two draws in a hundred lie there whatever q does."""
    model = build(lambda: pm.Potential("wall", pt.switch(pm.Normal("x") < -1.6, -np.inf, 0.0)))
    approx = fit(model)
    assert approx.status is Status.OUTSIDE_SUPPORT
    assert approx.record.n_dropped > 0


def test_a_diagonal_makeshift_is_announced(monkeypatch):
    """Dense, and larger than the machine: what is left out is said, and how to choose otherwise."""
    cov = np.eye(400) + 0.5
    model = build(lambda: pm.MvNormal("x", mu=np.zeros(400), cov=cov))
    _memory(monkeypatch, 2**25)
    with pytest.warns(UserWarning, match="diagonal covariance, which ignores correlations: the Hessian is dense"):
        approx = fit_ngvi(model=model, n=0, **QUIET)
    assert approx.record.family == "diagonal"
