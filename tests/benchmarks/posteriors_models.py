"""Multilevel models, items and regressions of ``posteriors.py``, of the sizes that people have; all are simulated."""

import numpy as np
import pymc as pm
import pytensor.tensor as pt


def _generator(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def _bernoulli(eta: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return rng.binomial(1, 1.0 / (1.0 + np.exp(-eta)))


def _levels(n: int, n_levels: int, rng: np.random.Generator) -> np.ndarray:
    """Return the columns of a factor, the first level left out."""
    return np.eye(n_levels)[rng.integers(n_levels, size=n)][:, 1:]


def slopes() -> pm.Model:
    """Return 0 and 1 in 60 groups of 2 to 118, with correlated intercepts and slopes; 1,930 rows, 7 coefficients."""
    rng = _generator(1)
    sizes = np.maximum(2, rng.gamma(1.2, 27, 60).astype(int))
    group = np.repeat(np.arange(60), sizes)
    n = len(group)
    x = np.column_stack([np.ones(n), rng.normal(size=(n, 2)), rng.integers(2, size=n), _levels(n, 4, rng)])
    own = rng.normal(0, 1, (60, 2)) @ np.array([[0.6, 0], [-0.4, 0.6]]).T
    eta = x @ [-1.7, 0, -0.5, 0.8, 1, 1.2, 1.2] + own[group, 0] + own[group, 1] * x[:, 3]
    y = _bernoulli(eta, rng)
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 5, shape=7)
        chol, _, _ = pm.LKJCholeskyCov("chol", n=2, eta=2, sd_dist=pm.HalfNormal.dist(1, size=2))
        own = pm.Deterministic("b", pm.Normal("z", 0, 1, shape=(60, 2)) @ chol.T)
        eta = x @ beta + own[group, 0] + own[group, 1] * x[:, 3]
        pm.Deterministic("p", pm.math.sigmoid(eta[::20]))
        pm.Bernoulli("y", logit_p=eta, observed=y)
    return model


def own_effects() -> pm.Model:
    """Return counts of 118 broods in 63 places, with an effect of each of 403 rows, not centred."""
    rng = _generator(2)
    place = np.sort(np.concatenate([np.arange(63), rng.integers(63, size=55)]))
    brood = np.sort(np.concatenate([np.arange(118), rng.integers(118, size=285)]))
    n = len(brood)
    x = np.column_stack([np.ones(n), _levels(n, 3, rng), rng.normal(size=n)])
    of_places, of_broods = rng.normal(0, 0.6, 63)[place[brood]], rng.normal(0, 0.7, 118)[brood]
    y = rng.poisson(np.exp(x @ [0.4, 1.1, -1, -0.8] + of_places + of_broods + rng.normal(0, 0.5, n)))
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 5, shape=4)
        scales = [pm.HalfNormal(name, 1) for name in ("s_brood", "s_place", "s_own")]
        z = [pm.Normal(f"z_{name}", 0, 1, shape=m) for name, m in (("brood", 118), ("place", 63), ("own", n))]
        effects = scales[0] * z[0][brood] + scales[1] * z[1][place[brood]] + scales[2] * z[2]
        rate = pm.math.exp(x @ beta + effects)
        pm.Deterministic("total", rate.sum())
        pm.Poisson("y", rate, observed=y)
    return model


def linear() -> pm.Model:
    """Return measurements in 85 groups of 1 to 116, with intercepts and slopes that depend on a group's quantity."""
    rng = _generator(3)
    sizes = np.maximum(1, rng.gamma(0.6, 18, 85).astype(int))
    group = np.repeat(np.arange(85), sizes)
    n = len(group)
    x, u = rng.integers(2, size=n), rng.normal(0, 0.5, 85)
    mean = 1.5 + 0.8 * u[group] + rng.normal(0, 0.15, 85)[group] + (-0.7 + rng.normal(0, 0.2, 85)[group]) * x
    y = mean + rng.normal(0, 0.75, n)
    with pm.Model() as model:
        gamma, s = pm.Normal("gamma", 0, 5, shape=4), pm.HalfNormal("s", 1, shape=2)
        z, sigma = pm.Normal("z", 0, 1, shape=(85, 2)), pm.HalfNormal("sigma", 2)
        intercept = pm.Deterministic("a", gamma[0] + gamma[1] * u + s[0] * z[:, 0])
        slope = pm.Deterministic("b", gamma[2] + gamma[3] * u + s[1] * z[:, 1])
        pm.Normal("y", intercept[group] + slope[group] * x, sigma, observed=y)
    return model


def crossed() -> pm.Model:
    """Return the answers of 316 persons to 24 items, with crossed effects, centred; 7,584 rows."""
    rng = _generator(4)
    person, item = np.divmod(np.arange(316 * 24), 24)
    kind = np.eye(3)[np.arange(24) % 3][item][:, 1:]
    x = np.column_stack([np.ones(len(person)), rng.normal(size=316)[person], kind])
    effects = rng.normal(0, 1.3, 316)[person] + rng.normal(0, 0.5, 24)[item]
    y = _bernoulli(x @ [0.1, 0.3, -1, -2] + effects, rng)
    with pm.Model() as model:
        beta, s = pm.Normal("beta", 0, 3, shape=4), pm.HalfNormal("s", 2, shape=2)
        u, v = pm.Normal("u", 0, s[0], shape=316), pm.Normal("v", 0, s[1], shape=24)
        pm.Bernoulli("y", logit_p=x @ beta + u[person] + v[item], observed=y)
    return model


def growth() -> pm.Model:
    """Return reaction times, in milliseconds, of 18 subjects on 10 days, with correlated intercepts and slopes."""
    rng = _generator(5)
    subject, day = np.divmod(np.arange(180), 10)
    own = rng.normal(size=(18, 2)) @ np.diag([24, 6])
    y = 251 + own[subject, 0] + (10.5 + own[subject, 1]) * day + rng.normal(0, 25, 180)
    with pm.Model() as model:
        beta = pm.Normal("beta", [250, 10], [50, 20])
        chol, _, _ = pm.LKJCholeskyCov("chol", n=2, eta=2, sd_dist=pm.HalfNormal.dist([50, 20]))
        own = pm.Deterministic("b", pm.Normal("z", 0, 1, shape=(18, 2)) @ chol.T)
        mean = beta[0] + own[subject, 0] + (beta[1] + own[subject, 1]) * day
        pm.Normal("y", mean, pm.HalfNormal("sigma", 50), observed=y)
    return model


def two_parameters(n_persons: int = 300, n_items: int = 20) -> pm.Model:
    """Return answers to items with a difficulty and a discrimination each."""
    rng = _generator(6)
    ability, hard = rng.normal(size=n_persons), rng.normal(0, 1, n_items)
    steep = rng.lognormal(0.2, 0.3, n_items)
    y = _bernoulli(steep * (ability[:, None] - hard), rng)
    with pm.Model() as model:
        theta = pm.Normal("theta", 0, 1, shape=n_persons)
        b, a = pm.Normal("b", 0, 1.5, shape=n_items), pm.LogNormal("a", 0, 0.5, shape=n_items)
        pm.Bernoulli("y", logit_p=a * (theta[:, None] - b), observed=y)
    return model


def horseshoe(n_predictors: int) -> pm.Model:
    """Return a regression with a horseshoe prior; five coefficients are not zero, and there are two rows for each."""
    rng = _generator(7)
    n = 50 + 2 * n_predictors
    x = rng.normal(size=(n, n_predictors))
    y = x[:, :5] @ [2.0, -1.5, 1.0, 0.5, -0.25] + rng.normal(0.0, 1.0, n)
    with pm.Model() as model:
        tau, local = pm.HalfCauchy("tau", 0.1), pm.HalfCauchy("local", 1.0, shape=n_predictors)
        beta = pm.Deterministic("beta", tau * local * pm.Normal("z", 0.0, 1.0, shape=n_predictors))
        pm.Normal("y", pt.dot(x, beta), pm.HalfNormal("sigma", 2.0), observed=y)
    return model


def correlated(n_effects: int) -> pm.Model:
    """Return counts in 30 groups of 20 with so many correlated effects each: an intercept, and slopes."""
    rng, n_groups = _generator(8), 30
    group = np.repeat(np.arange(n_groups), 20)
    x = np.column_stack([np.ones(len(group)), rng.normal(size=(len(group), n_effects - 1))])
    root = 0.4 * np.linalg.cholesky(0.7 * np.eye(n_effects) + 0.3)
    own = rng.normal(size=(n_groups, n_effects)) @ root.T
    y = rng.poisson(np.exp(1.0 + 0.2 * x[:, 1:].sum(axis=1) + (x * own[group]).sum(axis=1)))
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 2, shape=n_effects)
        scales = pm.HalfNormal.dist(1, size=n_effects)
        chol, _, _ = pm.LKJCholeskyCov("chol", n=n_effects, eta=2, sd_dist=scales)
        own = pm.Deterministic("b", pm.Normal("z", 0, 1, shape=(n_groups, n_effects)) @ chol.T)
        pm.Poisson("y", pm.math.exp((x * (beta + own[group])).sum(axis=1)), observed=y)
    return model
