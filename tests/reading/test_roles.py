"""Which variables of a model are effects of groups, their standard deviations, and rows of the data."""

import warnings

import numpy as np
import pymc as pm
import pytest

from pymc_ngvi import LogDensity, NGVIApproximation
from pymc_ngvi.families import DiagonalState
from pymc_ngvi.results import distributions

RNG = np.random.default_rng(7)
N = 60
GROUP, OTHER = np.repeat(np.arange(10), 6), RNG.integers(0, 7, N)
X, Y = RNG.normal(size=(2, N))


def approx_of(model):
    density = LogDensity(model)
    return NGVIApproximation(density, DiagonalState(np.zeros(density.n_dim), np.ones(density.n_dim)), random_seed=1)


def roles_of(model):
    approx = approx_of(model)
    return distributions.roles_of(approx._posterior, distributions.two_points(approx._posterior))


def groups_of(model):
    return [(g.name, g.n_levels, g.scales, g.effects, g.offsets) for g in roles_of(model).groups]


def observe(mean):
    pm.Normal("y", mean, pm.HalfNormal("sigma"), observed=Y)


def centred():
    a, tau = pm.Normal("a"), pm.HalfNormal("tau")
    observe(a + pm.Normal("b", 0, tau, shape=10)[GROUP])


def non_centred():
    a, tau = pm.Normal("a"), pm.HalfNormal("tau")
    z = pm.Normal("z", shape=10)
    observe(a + pm.Deterministic("b", a + z * tau)[GROUP])


def scaled_after_indexing():
    tau = pm.HalfNormal("tau")
    observe(pm.Normal("a") + tau * pm.Normal("z", shape=10)[GROUP])


def crossed():
    s, t = pm.HalfNormal("s"), pm.HalfNormal("t")
    observe(pm.Normal("u", 0, s, shape=10)[GROUP] + t * pm.Normal("v", shape=7)[OTHER])


def nested():
    s, t = pm.HalfNormal("s"), pm.HalfNormal("t")
    u = pm.Normal("u", 0, s, shape=5)
    observe(pm.Normal("v", u[np.arange(10) // 2], t, shape=10)[GROUP])


def slopes_apart():
    s, t = pm.HalfNormal("s"), pm.HalfNormal("t")
    observe(pm.Normal("u", 0, s, shape=10)[GROUP] + X * pm.Normal("v", 0, t, shape=10)[GROUP])


def cholesky():
    chol, _, _ = pm.LKJCholeskyCov("chol", eta=2, n=2, sd_dist=pm.Exponential.dist(1))
    b = pm.Deterministic("b", pm.Normal("z", shape=(10, 2)) @ chol.T)
    observe(b[GROUP, 0] + b[GROUP, 1] * X)


def uncoupled_terms():
    sd = pm.HalfNormal("sd", shape=2)
    b = pm.Normal("b", 0, sd, shape=(10, 2))
    observe(b[GROUP, OTHER % 2])


def sums_to_zero():
    observe(pm.Normal("a") + pm.ZeroSumNormal("b", pm.HalfNormal("tau"), shape=10)[GROUP])


def hyperprior_without_scale():
    theta = pm.Beta("theta", pm.HalfNormal("alpha", 5), pm.HalfNormal("beta", 5), shape=10)
    pm.Binomial("y", 9, theta, observed=np.arange(10))


def scale_shared_with_the_data():
    sigma = pm.HalfNormal("sigma")
    pm.Normal("y", pm.Normal("b", 0, sigma, shape=10)[GROUP], sigma, observed=Y)


WITH_GROUPS = {
    centred: [("b", 10, ["tau"], ["b"], [])],
    non_centred: [("b", 10, ["tau"], ["b"], ["z"])],
    scaled_after_indexing: [("z", 10, ["tau"], [], ["z"])],
    crossed: [("u", 10, ["s"], ["u"], []), ("v", 7, ["t"], [], ["v"])],
    nested: [("u", 5, ["s"], ["u"], []), ("v", 10, ["t"], ["v"], [])],
    slopes_apart: [("u, v", 10, ["s", "t"], ["u", "v"], [])],
    cholesky: [("b", 10, ["chol_corr", "chol_stds"], ["b"], ["z"])],
    uncoupled_terms: [("b", 10, ["sd"], ["b"], [])],
    sums_to_zero: [("b", 10, ["tau"], ["b"], [])],
    hyperprior_without_scale: [("theta", 10, [], ["theta"], [])],
    scale_shared_with_the_data: [("b", 10, [], ["b"], [])],
}


@pytest.mark.parametrize("build", WITH_GROUPS, ids=lambda f: f.__name__)
def test_groups(build):
    with pm.Model() as model:
        build()
    assert groups_of(model) == WITH_GROUPS[build]


def regression():
    observe(RNG.normal(size=(N, 12)) @ pm.Normal("beta", 0, pm.HalfNormal("tau"), shape=12))


def horseshoe():
    tau, lam = pm.HalfCauchy("tau", 1), pm.HalfCauchy("lam", 1, shape=12)
    observe(RNG.normal(size=(N, 12)) @ pm.Deterministic("beta", pm.Normal("z", shape=12) * lam * tau))


def horseshoe_with_scales_in_priors():
    lam = pm.HalfCauchy("lam", pm.HalfCauchy("tau", 1), shape=12)
    observe(RNG.normal(size=(N, 12)) @ pm.Normal("beta", 0, lam))


def levels_without_pooling():
    pm.Normal("y", pm.Normal("a", 0, 1, shape=30)[np.arange(N) // 2], pm.HalfNormal("s", shape=7)[OTHER], observed=Y)


def random_walk():
    observe(pm.GaussianRandomWalk("level", sigma=pm.HalfNormal("s"), init_dist=pm.Normal.dist(), shape=N))


def gaussian_process():
    cov = pm.HalfNormal("eta") ** 2 * pm.gp.cov.ExpQuad(1, pm.Gamma("ls", 2, 1))
    observe(pm.gp.Latent(cov_func=cov).prior("f", X=np.arange(N)[:, None], reparameterize=False))


def missing():
    pm.Normal("y", pm.Normal("a"), pm.HalfNormal("s"), observed=np.where(np.arange(N) % 9, Y, np.nan))


WITHOUT_GROUPS = [
    regression, horseshoe, horseshoe_with_scales_in_priors, levels_without_pooling, random_walk, gaussian_process,
    missing,
]  # fmt: skip


@pytest.mark.parametrize("build", WITHOUT_GROUPS, ids=lambda f: f.__name__)
def test_no_groups(build):
    with pm.Model() as model, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of missing data
        build()
    roles = roles_of(model)
    assert roles.groups == ()
    assert roles.raw == ()
    assert roles.rows == (("y",) if build is missing else ())


def test_abilities_and_difficulties_are_two_groups():
    person, item = np.divmod(np.arange(180), 6)
    with pm.Model(coords={"person": range(30), "item": range(6)}) as model:
        a = pm.LogNormal("a", 0, 0.5, dims="item")
        b = pm.Normal("b", pm.Normal("mu"), pm.HalfNormal("tau"), dims="item")
        ability = pm.Normal("ability", dims="person")
        pm.Bernoulli("y", logit_p=a[item] * (ability[person] - b[item]), observed=person % 2)
    assert groups_of(model) == [("item", 6, ["tau"], ["b"], []), ("person", 30, [], ["ability"], [])]


def test_what_is_computed_from_effects():
    with pm.Model(coords={"g": range(10)}) as model:
        a, tau, sigma = pm.Normal("a"), pm.HalfNormal("tau"), pm.HalfNormal("sigma")
        b = pm.Deterministic("b", pm.Normal("z", shape=10) * tau, dims="g")
        pm.Deterministic("total", a + b, dims="g")
        pm.Deterministic("variance", tau**2)
        pm.Deterministic("icc", tau**2 / (tau**2 + sigma**2))
        pm.Deterministic("difference", b[0] - b[1])
        mu = pm.Deterministic("mu", a + b[GROUP])
        pm.Normal("y", mu, sigma, observed=Y)
    roles = roles_of(model)
    [group] = roles.groups
    assert (group.name, group.effects, group.offsets) == ("g", ["b", "total"], ["z"])
    assert group.scales == ["tau", "variance"]
    assert roles.rows == ("mu",)
    assert dict(roles.observations) == {"y": N}


def test_observations_are_rows_of_vectors_and_elements_of_series():
    data = RNG.normal(size=(12, 3))
    with pm.Model() as model:
        a = pm.Normal("a")
        pm.MvNormal("vectors", a * np.ones(3), np.eye(3), observed=data)
        pm.MvNormal("function", a * np.ones(12), np.eye(12), observed=data[:, 0])
        pm.AR("series", [0.5], sigma=pm.math.exp(a), init_dist=pm.Normal.dist(), observed=data[:, 0])
        pm.AR("several", [0.5], sigma=pm.math.exp(a), init_dist=pm.Normal.dist(), observed=data.T)
        pm.MvGaussianRandomWalk(
            "walk", mu=a * np.ones(3), cov=np.eye(3), init_dist=pm.MvNormal.dist(np.zeros(3), np.eye(3)), observed=data
        )
        pm.Multinomial("counts", 9, pm.math.softmax(a * np.arange(3.0)), observed=[2, 3, 4])
        pm.Multinomial("tables", 9, pm.math.softmax(a * np.arange(3.0)), observed=[[2, 3, 4]] * 5)
        pm.Normal("matrix", a, observed=data)
    expected = {"vectors": 12, "function": 12, "series": 12, "several": 36, "walk": 12}
    assert roles_of(model).observations == expected | {"counts": 1, "tables": 5, "matrix": 36}


def test_observations_behind_minibatches_are_vectors_too():
    with pm.Model() as model:
        rows = pm.Minibatch(np.zeros((40, 3)), batch_size=10)
        pm.MvNormal("y", pm.Normal("a") * np.ones(3), np.eye(3), observed=rows, total_size=40)
    assert roles_of(model).observations == {"y": 40}


def test_a_latent_function_and_what_it_is_rotated_from_are_rows():
    with pm.Model() as model:
        gp = pm.gp.Latent(cov_func=pm.gp.cov.ExpQuad(1, pm.Gamma("ls", 2, 1)))
        observe(gp.prior("f", X=np.arange(N)[:, None]))
    roles = roles_of(model)
    assert (roles.rows, roles.raw, roles.groups) == (("f",), ("f_rotated_",), ())


@pytest.mark.filterwarnings("ignore:For backward compatibility, 'str' dtypes are included")
@pytest.mark.parametrize("noncentered", [True, False])
def test_bambi(noncentered):
    bmb = pytest.importorskip("bambi")
    pd = pytest.importorskip("pandas")
    data = pd.DataFrame({"y": Y, "x": X, "g": GROUP.astype(str), "h": (OTHER + 10).astype(str)})
    built = bmb.Model("y ~ x + (1|g) + (x|h)", data, noncentered=noncentered)
    built.build()
    effects = {"g": ["1|g"], "h": ["1|h", "x|h"]}
    levels = {"g": 10, "h": len(np.unique(OTHER))}
    assert groups_of(built.backend.model) == [
        (g, levels[g], [f"{e}_sigma" for e in es], es, [f"{e}_offset" for e in es] if noncentered else [])
        for g, es in effects.items()
    ]
