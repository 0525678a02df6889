"""Hierarchical models of real sizes with simulated data: each function makes a fresh model, the same in every run.

`MODELS` maps a name to a function without arguments.
"""

import functools

from collections.abc import Callable

import numpy as np
import pymc as pm
import pytensor.tensor as pt


def _rng(seed):
    return np.random.default_rng([20, seed])


def _sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def _sizes(n_groups, per_group):
    """Return the group of each observation for groups of equal size."""
    return np.repeat(np.arange(n_groups), per_group)


# --- random intercepts ------------------------------------------------------------------------------------------------


def intercepts(likelihood="logistic", centred=True, n_groups=60, per_group=8, sd=0.9, group=None, seed=1):
    """Random intercepts, centred or not, with one of four likelihoods."""
    rng = _rng(seed)
    group = _sizes(n_groups, per_group) if group is None else group
    x = rng.normal(size=len(group))
    eta = 0.4 + 0.7 * x + rng.normal(0.0, sd, n_groups)[group]
    with pm.Model() as model:
        intercept = pm.Normal("intercept", 0.0, 3.0)
        slope = pm.Normal("slope", 0.0, 3.0)
        scale = pm.HalfNormal("scale", 2.0)
        if centred:
            effect = pm.Normal("effect", 0.0, scale, shape=n_groups)
        else:
            effect = scale * pm.Normal("z", 0.0, 1.0, shape=n_groups)
        linear = intercept + slope * x + effect[group]
        if likelihood == "logistic":
            pm.Bernoulli("y", logit_p=linear, observed=rng.binomial(1, _sigmoid(eta)))
        elif likelihood == "poisson":
            pm.Poisson("y", mu=pt.exp(linear), observed=rng.poisson(np.exp(eta)))
        elif likelihood == "gaussian":
            noise = pm.HalfNormal("noise", 2.0)
            pm.Normal("y", linear, noise, observed=rng.normal(eta, 0.8))
        else:
            alpha = pm.Gamma("alpha", 2.0, 0.5)
            mean = np.exp(eta) * rng.gamma(3.0, 1.0 / 3.0, len(eta))
            pm.NegativeBinomial("y", mu=pt.exp(linear), alpha=alpha, observed=rng.poisson(mean))
    return model


def funnel(n_groups=40):
    """Neal's funnel, each leaf seen once with much noise."""
    y = _rng(3).normal(0.0, 1.5, n_groups)
    with pm.Model() as model:
        v = pm.Normal("v", 0.0, 3.0)
        x = pm.Normal("x", 0.0, pt.exp(0.5 * v), shape=n_groups)
        pm.Normal("y", x, 1.0, observed=y)
    return model


def one_each(n_groups=150):
    """One count a group: overdispersion."""
    return intercepts("poisson", n_groups=n_groups, per_group=1, sd=0.6, seed=5)


def unequal(likelihood="poisson", n_groups=60):
    """Groups of 1 to 500 observations."""
    sizes = np.round(np.geomspace(1, 500, n_groups)).astype(int)
    return intercepts(likelihood, n_groups=n_groups, group=np.repeat(np.arange(n_groups), sizes), seed=6)


def empty_groups(n_groups=60):
    """Every third level of the index has no observations."""
    rng = _rng(7)
    seen = np.flatnonzero(np.arange(n_groups) % 3 != 0)
    return intercepts("logistic", n_groups=n_groups, group=np.repeat(seen, rng.integers(2, 12, len(seen))), seed=7)


# --- intercept and slope ----------------------------------------------------------------------------------------------


def correlated(centred=True, n_groups=60, per_group=8, likelihood="gaussian", seed=8):
    """Correlated intercepts and slopes with an LKJ prior."""
    rng = _rng(seed)
    group = _sizes(n_groups, per_group)
    x = rng.normal(size=len(group))
    effects = rng.normal(size=(n_groups, 2)) @ np.array([[0.9, 0.4], [0.0, 0.5]])
    eta = 0.3 + 0.5 * x + effects[group, 0] + effects[group, 1] * x
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, 3.0, shape=2)
        chol, _, _ = pm.LKJCholeskyCov("chol", n=2, eta=2.0, sd_dist=pm.Exponential.dist(1.0, shape=2))
        if centred:
            b = pm.MvNormal("b", mu=np.zeros(2), chol=chol, shape=(n_groups, 2))
        else:
            b = pm.Normal("z", 0.0, 1.0, shape=(n_groups, 2)) @ chol.T
        linear = beta[0] + beta[1] * x + b[group, 0] + b[group, 1] * x
        if likelihood == "gaussian":
            noise = pm.HalfNormal("noise", 2.0)
            pm.Normal("y", linear, noise, observed=rng.normal(eta, 0.7))
        else:
            pm.Bernoulli("y", logit_p=linear, observed=rng.binomial(1, _sigmoid(eta)))
    return model


def joint(n_groups=60, per_group=5):
    """Two outcomes that share random effects."""
    rng = _rng(9)
    group = _sizes(n_groups, per_group)
    u = rng.normal(0.0, 0.8, n_groups)
    with pm.Model() as model:
        intercept = pm.Normal("intercept", 0.0, 3.0, shape=2)
        scale = pm.HalfNormal("scale", 2.0)
        loading = pm.Normal("loading", 1.0, 1.0)
        noise = pm.HalfNormal("noise", 2.0)
        effect = pm.Normal("effect", 0.0, scale, shape=n_groups)
        pm.Normal("size", intercept[0] + effect[group], noise, observed=rng.normal(1.0 + u[group], 0.6))
        event = rng.binomial(1, _sigmoid(-0.3 + 1.4 * u))
        pm.Bernoulli("event", logit_p=intercept[1] + loading * effect, observed=event)
    return model


# --- chains and fields ------------------------------------------------------------------------------------------------


def gaussian_process(n=80):
    """A latent field with a dense constant covariance."""
    rng = _rng(10)
    x = np.sort(rng.uniform(0.0, 10.0, n))
    covariance = np.exp(-np.abs(x[:, None] - x)) + 1e-6 * np.eye(n)
    f = np.linalg.cholesky(covariance) @ rng.normal(size=n)
    with pm.Model() as model:
        intercept = pm.Normal("intercept", 0.0, 2.0)
        field = pm.MvNormal("field", mu=np.zeros(n), cov=covariance)
        pm.Poisson("y", mu=pt.exp(intercept + field), observed=rng.poisson(np.exp(0.5 + f)))
    return model


def zero_sum(n_groups=60, per_group=8):
    """Effects that sum to 0."""
    rng = _rng(11)
    group = _sizes(n_groups, per_group)
    effect = rng.normal(0.0, 0.8, n_groups)
    effect -= effect.mean()
    with pm.Model() as model:
        intercept = pm.Normal("intercept", 0.0, 3.0)
        scale = pm.HalfNormal("scale", 2.0)
        b = pm.ZeroSumNormal("b", scale, shape=n_groups)
        pm.Bernoulli("y", logit_p=intercept + b[group], observed=rng.binomial(1, _sigmoid(0.3 + effect[group])))
    return model


def random_walk(n=300):
    """Counts whose log rate walks."""
    rng = _rng(12)
    path = np.cumsum(rng.normal(0.0, 0.15, n))
    with pm.Model() as model:
        scale = pm.HalfNormal("scale", 0.5)
        walk = pm.GaussianRandomWalk("walk", sigma=scale, init_dist=pm.Normal.dist(0.0, 2.0), steps=n - 1)
        pm.Poisson("y", mu=pt.exp(walk), observed=rng.poisson(np.exp(path)))
    return model


def autoregression(n=300):
    """Counts whose log rate is an AR(1)."""
    rng = _rng(13)
    path = np.zeros(n)
    for t in range(1, n):
        path[t] = 0.9 * path[t - 1] + rng.normal(0.0, 0.3)
    with pm.Model() as model:
        level = pm.Normal("level", 0.0, 2.0)
        rho = pm.Uniform("rho", -1.0, 1.0)
        scale = pm.HalfNormal("scale", 0.5)
        state = pm.AR("state", rho=rho, sigma=scale, init_dist=pm.Normal.dist(0.0, 1.0), steps=n - 1)
        pm.Poisson("y", mu=pt.exp(level + state), observed=rng.poisson(np.exp(1.0 + path)))
    return model


def stochastic_volatility(n=400):
    """Returns with a volatility that walks."""
    rng = _rng(14)
    h = -1.0 + np.cumsum(rng.normal(0.0, 0.12, n))
    with pm.Model() as model:
        scale = pm.Exponential("scale", 10.0)
        nu = pm.Exponential("nu", 0.1)
        h_ = pm.GaussianRandomWalk("h", sigma=scale, init_dist=pm.Normal.dist(0.0, 2.0), steps=n - 1)
        pm.StudentT("r", nu=nu, sigma=pt.exp(h_), observed=np.exp(h) * rng.standard_t(8, n))
    return model


def lattice(rows, columns):
    """Return the adjacency of a planar map: a lattice with one diagonal in every second cell."""
    number = np.arange(rows * columns).reshape(rows, columns)
    pairs = [
        (number[:, :-1], number[:, 1:]),
        (number[:-1], number[1:]),
        (number[:-1:2, :-1:2], number[1::2, 1::2] if rows % 2 == 0 and columns % 2 == 0 else number[1:-1:2, 1:-1:2]),
    ]
    adjacency = np.zeros((rows * columns,) * 2, dtype=int)
    for a, b in pairs:
        n = min(a.size, b.size)
        if a.shape == b.shape:
            adjacency[a.ravel()[:n], b.ravel()[:n]] = 1
    return adjacency + adjacency.T


def areas(kind="icar", rows=8, columns=8):
    """Counts in areas of a map with a spatial effect: intrinsic or proper conditional autoregression."""
    rng = _rng(15)
    adjacency = lattice(rows, columns)
    n = len(adjacency)
    precision = np.diag(adjacency.sum(axis=1)) - 0.95 * adjacency
    field = np.linalg.solve(np.linalg.cholesky(precision).T, rng.normal(size=n))
    expected = rng.uniform(2.0, 10.0, n)
    y = rng.poisson(expected * np.exp(0.7 * (field - field.mean())))
    with pm.Model() as model:
        intercept = pm.Normal("intercept", 0.0, 2.0)
        scale = pm.HalfNormal("scale", 1.0)
        if kind == "icar":
            effect = scale * pm.ICAR("phi", W=adjacency)
        else:
            alpha = pm.Beta("alpha", 4.0, 2.0)
            effect = pm.CAR("phi", mu=np.zeros(n), W=adjacency, alpha=alpha, tau=scale**-2)
        pm.Poisson("y", mu=expected * pt.exp(intercept + effect), observed=y)
    return model


# --- crossed and nested effects ---------------------------------------------------------------------------------------


def rasch(n_persons=80, n_items=20):
    """Every person answers every item."""
    rng = _rng(16)
    ability, difficulty = rng.normal(0.0, 1.2, n_persons), rng.normal(0.0, 0.8, n_items)
    with pm.Model() as model:
        mean = pm.Normal("mean", 0.0, 2.0)
        sd = pm.HalfNormal("sd", 2.0, shape=2)
        person = pm.Normal("person", 0.0, sd[0], shape=n_persons)
        item = pm.Normal("item", 0.0, sd[1], shape=n_items)
        y = rng.binomial(1, _sigmoid(0.3 + ability[:, None] - difficulty))
        pm.Bernoulli("y", logit_p=mean + person[:, None] - item, observed=y)
    return model


def crossed(n_subjects=400, n_items=400, per_subject=4):
    """Each subject meets a few items."""
    rng = _rng(17)
    subject = _sizes(n_subjects, per_subject)
    item = rng.integers(0, n_items, len(subject))
    eta = rng.normal(0.0, 0.8, n_subjects)[subject] + rng.normal(0.0, 0.6, n_items)[item]
    with pm.Model() as model:
        mean = pm.Normal("mean", 0.0, 2.0)
        sd = pm.HalfNormal("sd", 2.0, shape=2)
        noise = pm.HalfNormal("noise", 2.0)
        a = pm.Normal("a", 0.0, sd[0], shape=n_subjects)
        b = pm.Normal("b", 0.0, sd[1], shape=n_items)
        pm.Normal("y", mean + a[subject] + b[item], noise, observed=rng.normal(1.0 + eta, 0.7))
    return model


def nested(n_districts=12, schools_each=5, pupils_each=10):
    """Pupils in schools in districts, centred at each level."""
    rng = _rng(18)
    district = _sizes(n_districts, schools_each)
    school = _sizes(len(district), pupils_each)
    effect = rng.normal(0.0, 0.7, n_districts)[district] + rng.normal(0.0, 0.5, len(district))
    with pm.Model() as model:
        mean = pm.Normal("mean", 0.0, 3.0)
        sd = pm.HalfNormal("sd", 1.0, shape=3)
        d = pm.Normal("d", mean, sd[0], shape=n_districts)
        s = pm.Normal("s", d[district], sd[1], shape=len(district))
        pm.Normal("y", s[school], sd[2], observed=rng.normal(effect[school], 1.0))
    return model


# --- other priors and likelihoods -------------------------------------------------------------------------------------


def hurdle(n_groups=60, per_group=8):
    """Counts whose zeros come from another process."""
    rng = _rng(23)
    group = _sizes(n_groups, per_group)
    u = rng.normal(0.0, 0.6, n_groups)[group]
    y = np.where(rng.random(len(group)) < _sigmoid(-u), 0, 1 + rng.poisson(np.exp(0.5 + u)))
    with pm.Model() as model:
        mean = pm.Normal("mean", 0.0, 2.0, shape=2)
        scale = pm.HalfNormal("scale", 2.0, shape=2)
        effect = pm.Normal("effect", 0.0, scale, shape=(n_groups, 2))
        linear = mean + effect[group]
        pm.HurdlePoisson("y", psi=pm.math.sigmoid(linear[:, 0]), mu=pt.exp(linear[:, 1]), observed=y)
    return model


def potential(n_groups=60, per_group=8):
    """Prior and likelihood of the effects written by hand."""
    rng = _rng(25)
    y = rng.binomial(per_group, _sigmoid(0.4 + rng.normal(0.0, 0.8, n_groups)))
    with pm.Model() as model:
        mean = pm.Normal("mean", 0.0, 2.0)
        log_scale = pm.Normal("log_scale", 0.0, 1.0)
        effect = pm.Flat("effect", shape=n_groups)
        pm.Potential("prior", (-0.5 * (effect * pt.exp(-log_scale)) ** 2 - log_scale).sum())
        linear = mean + effect
        pm.Potential("likelihood", (y * linear - per_group * pt.softplus(linear)).sum())
    return model


def with_coords(n_groups=50, per_group=8):
    """Data containers with names of dimensions; the index is data, too."""
    rng = _rng(26)
    group = _sizes(n_groups, per_group)
    x = rng.normal(size=(len(group), 2))
    y = rng.poisson(np.exp(0.3 + x @ np.array([0.4, -0.3]) + rng.normal(0.0, 0.5, n_groups)[group]))
    coords = {"clinic": [f"c{i}" for i in range(n_groups)], "predictor": ["a", "b"], "row": np.arange(len(group))}
    with pm.Model(coords=coords) as model:
        x_ = pm.Data("x", x, dims=("row", "predictor"))
        group_ = pm.Data("group", group, dims="row")
        y_ = pm.Data("counts", y, dims="row")
        beta = pm.Normal("beta", 0.0, 2.0, dims="predictor")
        mean = pm.Normal("mean", 0.0, 2.0)
        scale = pm.HalfNormal("scale", 2.0)
        effect = pm.Normal("effect", mean, scale, dims="clinic")
        pm.Poisson("y", mu=pt.exp(x_ @ beta + effect[group_]), observed=y_, dims="row")
    return model


def student_effects(n_groups=60, per_group=8):
    """Heavy-tailed random effects."""
    rng = _rng(27)
    group = _sizes(n_groups, per_group)
    u = 0.6 * rng.standard_t(4, n_groups)
    with pm.Model() as model:
        mean = pm.Normal("mean", 0.0, 3.0)
        scale = pm.HalfNormal("scale", 2.0)
        nu = pm.Gamma("nu", 2.0, 0.1)
        noise = pm.HalfNormal("noise", 2.0)
        effect = pm.StudentT("effect", nu=nu, mu=0.0, sigma=scale, shape=n_groups)
        pm.Normal("y", mean + effect[group], noise, observed=rng.normal(0.5 + u[group], 0.8))
    return model


Models = dict[str, Callable[[], pm.Model]]
_of = functools.partial

MODELS: Models = {
    **{
        f"{likelihood}_{'centred' if centred else 'noncentred'}": _of(intercepts, likelihood, centred)
        for likelihood in ("logistic", "poisson", "gaussian", "negative_binomial")
        for centred in (True, False)
    },
    "correlated_centred": _of(correlated, True),
    "correlated_noncentred": _of(correlated, False),
    "funnel": funnel,
    "one_each": one_each,
    "unequal": unequal,
    "empty_groups": empty_groups,
    "joint": joint,
    "gaussian_process": gaussian_process,
    "zero_sum": zero_sum,
    "random_walk": random_walk,
    "autoregression": autoregression,
    "icar": _of(areas, "icar"),
    "car": _of(areas, "car"),
    "rasch": rasch,
    "crossed_small": _of(crossed, 60, 60, 3),
    "nested": nested,
    "hurdle": hurdle,
    "potential": potential,
    "with_coords": with_coords,
    "student_effects": student_effects,
}
