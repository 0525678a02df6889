"""Models written with pymc.dims: the same functions, fits and draws as their twins in ordinary PyMC."""

import numpy as np
import pymc as pm
import pymc.dims as pmd
import pytensor
import pytest

from scipy import stats

import pymc_ngvi

from pymc_ngvi import LogDensity
from pymc_ngvi.density.constrain import Constrainer

N_GROUPS, N_OBS = 60, 180
_RNG = np.random.default_rng(1)
GROUP = np.concatenate([np.arange(N_GROUPS), _RNG.integers(N_GROUPS, size=N_OBS - N_GROUPS)])
X = _RNG.normal(size=N_OBS)
Y = _RNG.poisson(np.exp(0.3 + 0.5 * X + 0.4 * _RNG.normal(size=N_GROUPS)[GROUP]))
COORDS = {"k": ["a", "b", "c"], "k2": ["a", "b", "c"], "g": range(4), "obs": range(10)}
SMALL_Y, SMALL_K, SMALL_G = _RNG.normal(size=10), _RNG.integers(3, size=10), _RNG.integers(4, size=10)
COV = np.array([[1.1, 0.3, 0.2], [0.3, 1.2, 0.1], [0.2, 0.1, 1.5]])


def xt(values, *dims):
    return pmd.as_xtensor(np.asarray(values), dims=dims)


def glmm(named):
    d, dims = (pmd, {}) if named else (pm, {"dims": "obs"})
    with pm.Model(coords={"group": [f"g{i}" for i in range(N_GROUPS)], "obs": range(N_OBS)}) as model:
        group, x, y = d.Data("group_of", GROUP, dims="obs"), d.Data("x", X, dims="obs"), d.Data("y_data", Y, dims="obs")
        a, b, sd = d.Normal("a", 0, 2), d.Normal("b", 0, 1), d.HalfNormal("sd", 1.0)
        u = d.Normal("u", 0, sd, dims="group")
        eta = a + b * x + (u.isel(group=group) if named else u[group])
        rate = d.Deterministic("rate", d.math.exp(eta), **dims)
        d.Poisson("y", rate, observed=y, **dims)
    return model


def scales(named):
    d = pmd if named else pm
    s, e = d.HalfNormal("s", 1.1, dims="g"), d.Exponential("e", 1.3)
    beta, u = d.Beta("beta", 2.1, 2.3), d.Uniform("u", -1.1, 2.3)
    if named:
        d.Normal("y", s.isel(g=xt(SMALL_G, "obs")) + u * beta, e, observed=xt(SMALL_Y, "obs"))
    else:
        d.Normal("y", s[SMALL_G] + u * beta, e, observed=SMALL_Y)


def simplex(named):
    if named:
        p = pmd.Dirichlet("p", xt([1.1, 2.1, 1.7], "k"), core_dims="k", dims=("g", "k"))
        pmd.Categorical("y", p.isel(g=xt(SMALL_G, "obs")), core_dims="k", observed=xt(SMALL_K, "obs"))
    else:
        p = pm.Dirichlet("p", [1.1, 2.1, 1.7], dims=("g", "k"))
        pm.Categorical("y", p[SMALL_G], observed=SMALL_K)


def multivariate(named):
    """Also: a Potential, a LogNormal, and dims in another order than the parameters give."""
    if named:
        z = pmd.ZeroSumNormal("z", 1.3, core_dims="k", dims="k")
        v = pmd.MvNormal("v", xt(np.zeros(3), "k"), xt(COV, "k", "k2"), core_dims=("k", "k2"))
        w = pmd.Normal("w", xt([0.1, 1.1, 2.1], "k"), pmd.LogNormal("sd", 0.1, 1.1), dims=("g", "k"))
        k, g = xt(SMALL_K, "obs"), xt(SMALL_G, "obs")
        pmd.Potential("potential", -(v**4))
        pmd.Normal("y", (z + v).isel(k=k) + w.isel(k=k, g=g), 1.1, observed=xt(SMALL_Y, "obs"))
    else:
        z = pm.ZeroSumNormal("z", 1.3, dims="k")
        v = pm.MvNormal("v", np.zeros(3), COV, dims="k")
        w = pm.Normal("w", [0.1, 1.1, 2.1], pm.LogNormal("sd", 0.1, 1.1), dims=("g", "k"))
        pm.Potential("potential", -(v**4))
        pm.Normal("y", (z + v)[SMALL_K] + w[SMALL_G, SMALL_K], 1.1, observed=SMALL_Y)


def twins(make):
    models = []
    for named in (True, False):
        with pm.Model(coords=COORDS) as model:
            make(named)
        models.append(model)
    return models


@pytest.mark.parametrize("make", [scales, simplex, multivariate])
def test_a_model_with_named_dims_has_the_functions_of_its_twin(make, rng):
    ours, theirs = (LogDensity(model) for model in twins(make))
    assert ours.layout.variables == theirs.layout.variables
    theta = 0.5 * rng.normal(size=(3, ours.n_dim))
    tol = {"rtol": 1e-12, "atol": 1e-12}
    np.testing.assert_allclose(ours.initial_point(), theirs.initial_point(), **tol)
    for one, other in zip(ours.logp_grad(theta), theirs.logp_grad(theta), strict=True):
        np.testing.assert_allclose(one, other, **tol)
    np.testing.assert_allclose(ours.hessian(theta), theirs.hessian(theta), **tol)
    values = Constrainer(ours)(theta)
    for name, expected in Constrainer(theirs)(theta).items():
        np.testing.assert_allclose(values[name], expected, **tol)
        assert values[name].dtype == expected.dtype
    assert len(ours.prior_draws(3, 1)) == len(theirs.prior_draws(3, 1)) == 3


@pytest.fixture(scope="module")
def fits():
    return [
        pymc_ngvi.fit_ngvi(model=glmm(named), random_seed=1, posterior="gaussian", progressbar=False)
        for named in (True, False)
    ]


def test_a_fit_takes_the_same_way_and_gives_the_same_draws(fits):
    ours, theirs = fits
    assert ours.record.family == theirs.record.family == "sparse"
    assert (ours.n_gradients, ours.n_hessians, ours.elbo) == (theirs.n_gradients, theirs.n_hessians, theirs.elbo)
    assert str(ours.structure) == str(theirs.structure)
    assert f"{N_GROUPS} independent blocks of size 1 from `u`" in str(ours.structure)
    ours, theirs = (fit.sample(20, random_seed=2).posterior.to_dataset() for fit in fits)
    assert ours.identical(theirs.assign_attrs(ours.attrs))


def test_what_follows_a_fit_works(fits, tmp_path):
    fit, plain = fits
    idata = fit.sample(20, random_seed=2)
    # PyMC's own functions without compilation: they are not what is tested.
    with fit.model, pytensor.config.change_flags(mode="FAST_COMPILE", cxx=""):
        pm.compute_log_likelihood(idata, progressbar=False)
        pm.sample_posterior_predictive(idata, random_seed=1, progressbar=False, extend_inferencedata=True)
    rate = idata.posterior["rate"].values
    np.testing.assert_allclose(idata.log_likelihood["y"], stats.poisson.logpmf(Y, rate), rtol=1e-10)
    # A draw of y has variance y.
    assert np.abs(idata.posterior_predictive["y"].values - rate).mean() < np.sqrt(rate).mean()
    fit.save(tmp_path / "named.nc")
    loaded = pymc_ngvi.load(tmp_path / "named.nc", model=fit.model)
    np.testing.assert_array_equal(loaded.draw_flat(5, 1), fit.draw_flat(5, 1))
    assert fit.khat(random_seed=1) == plain.khat(random_seed=1)
    node = fit.sample_node(fit.model["rate"].values, size=3, deterministic=True)
    assert node.eval().shape == (3, N_OBS)


def test_reparametrisations_know_likelihoods_and_data_with_dims():
    options = {"reparam": "rvb2", "random_seed": 1, "progressbar": False, "backend": "quick"}
    ours, theirs = (pymc_ngvi.fit_ngvi(model=glmm(named), **options) for named in (True, False))
    # The guides of the two round differently.
    assert ours.elbo.value == pytest.approx(theirs.elbo.value, abs=1e-6)
    np.testing.assert_allclose(ours.draw_flat(5, 1), theirs.draw_flat(5, 1), rtol=1e-6, atol=1e-8)
    # q depends on the data of the fit, and on no others.
    before = ours.draw_flat(5, 1)
    pm.set_data({"y_data": Y + 3, "x": X + 1.0}, model=ours.model)
    np.testing.assert_array_equal(ours.draw_flat(5, 1), before)


def test_initial_values_of_the_model_are_on_the_constrained_scale():
    points = []
    for d in (pmd, pm):
        with pm.Model(coords=COORDS) as model:
            s = d.HalfNormal("s", 1.0, dims="g", initval=np.arange(1.0, 5.0))
            d.HalfNormal("t", s, dims="g")
        points.append(LogDensity(model).initial_point())
    np.testing.assert_allclose(points[0], np.log([1.0, 2.0, 3.0, 4.0] * 2), rtol=1e-12)
    np.testing.assert_allclose(points[0], points[1], rtol=1e-12)


@pytest.mark.parametrize("reparam", [None, "rvb2"])
def test_float32_models_are_fitted_in_float64(reparam):
    """The random variables of `pymc.dims` are lowered in the precision that they were made in."""

    def fitted(dtype):
        with pytensor.config.change_flags(floatX=dtype), pm.Model(coords={"g": range(8)}):
            tau = pmd.HalfNormal("tau", 1.0)
            u = pmd.Normal("u", pmd.Normal("mu", 0, 2), tau, dims="g")
            pmd.Normal("y", u, 0.5, observed=xt(np.arange(8.0).astype(dtype), "g"))
            return pymc_ngvi.fit_ngvi(reparam=reparam, random_seed=1, posterior="gaussian", progressbar=False)

    single, double = fitted("float32"), fitted("float64")
    assert single.converged
    # Only constants and data of the model are rounded to float32.
    np.testing.assert_allclose(single.mean_flat, double.mean_flat, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(single.sd_flat, double.sd_flat, rtol=1e-4)
    with pytensor.config.change_flags(floatX="float32"):
        posterior = single.sample(5, random_seed=1)["posterior"]
    assert {draws.dtype for draws in posterior.data_vars.values()} == {np.dtype("float32")}
