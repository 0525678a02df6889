"""Rows of ``prices.py``: those of other scripts, multilevel models that nothing was tuned on, and known hard ones."""

import sys

from functools import partial
from itertools import product
from pathlib import Path

import functionals_fields
import nested_models
import numpy as np
import posteriors_models
import posteriors_unstructured
import pymc as pm
import pytensor.tensor as pt
import rows_models
import scans_models
import sparse_models

from posteriors_cases import CASES as OTHERS
from posteriors_cases import Case, without_data
from pymc.distributions.transforms import ordered
from users_models import MODELS

sys.path.append(str(Path(__file__).parents[1]))  # some models are among the tests

import hierarchical

from real_models import epilepsy

# --- multilevel models ------------------------------------------------------------------------------------------------


def negative_binomial() -> pm.Model:
    """Return 900 overdispersed counts of 90 persons on 25 crossed occasions."""
    rng = np.random.default_rng(101)
    person, occasion, x = rng.integers(90, size=900), rng.integers(25, size=900), rng.normal(size=900)
    mean = np.exp(1.0 + 0.3 * x + rng.normal(0, 0.6, 90)[person] + rng.normal(0, 0.4, 25)[occasion])
    y = rng.negative_binomial(2.5, 2.5 / (2.5 + mean))
    with pm.Model() as model:
        beta, s = pm.Normal("beta", 0, 2, shape=2), pm.HalfNormal("s", 1, shape=2)
        u, v = pm.Normal("u", 0, s[0], shape=90), pm.Normal("v", 0, s[1], shape=25)
        rate = pm.math.exp(beta[0] + beta[1] * x + u[person] + v[occasion])
        pm.NegativeBinomial("y", mu=rate, alpha=pm.Gamma("alpha", 2, 0.5), observed=y)
    return model


def unbalanced() -> pm.Model:
    """Return measurements in 70 groups of 1 to 80 with correlated intercepts and slopes, centred."""
    rng = np.random.default_rng(102)
    group = np.repeat(np.arange(70), np.round(np.geomspace(1, 80, 70)).astype(int))
    x, own = rng.normal(size=len(group)), rng.normal(size=(70, 2)) @ np.array([[0.8, 0.3], [0.0, 0.4]])
    y = rng.normal(2.0 + own[group, 0] + (0.5 + own[group, 1]) * x, 0.9)
    with pm.Model() as model:
        beta, noise = pm.Normal("beta", 0, 5, shape=2), pm.HalfNormal("noise", 2)
        chol, _, _ = pm.LKJCholeskyCov("chol", n=2, eta=2, sd_dist=pm.Exponential.dist(1, shape=2))
        own = pm.MvNormal("own", beta, chol=chol, shape=(70, 2))
        pm.Normal("y", own[group, 0] + own[group, 1] * x, noise, observed=y)
    return model


def binomial_nested() -> pm.Model:
    """Return successes among 3 to 25 in 90 schools of 18 districts, centred at each level."""
    rng = np.random.default_rng(103)
    district, trials = np.repeat(np.arange(18), 5), rng.integers(3, 26, 90)
    eta = -0.4 + rng.normal(0, 0.7, 18)[district] + rng.normal(0, 0.5, 90)
    y = rng.binomial(trials, 1.0 / (1.0 + np.exp(-eta)))
    with pm.Model() as model:
        level, s = pm.Normal("level", 0, 2), pm.HalfNormal("s", 1, shape=2)
        of_district = pm.Normal("district", level, s[0], shape=18)
        school = pm.Normal("school", of_district[district], s[1], shape=90)
        pm.Binomial("y", trials, logit_p=school, observed=y)
    return model


def poisson_offset() -> pm.Model:
    """Return counts with exposures: 45 areas, and an effect of each of 360 rows."""
    rng = np.random.default_rng(104)
    area, x, exposure = np.repeat(np.arange(45), 8), rng.normal(size=360), rng.uniform(0.5, 20, 360)
    eta = -0.5 + 0.4 * x + rng.normal(0, 0.5, 45)[area] + rng.normal(0, 0.4, 360)
    y = rng.poisson(exposure * np.exp(eta))
    with pm.Model() as model:
        beta, s = pm.Normal("beta", 0, 2, shape=2), pm.Exponential("s", 1, shape=2)
        u, own = pm.Normal("u", 0, 1, shape=45), pm.Normal("own", 0, 1, shape=360)
        eta = np.log(exposure) + beta[0] + beta[1] * x + s[0] * u[area] + s[1] * own
        pm.Poisson("y", pm.math.exp(eta), observed=y)
    return model


def ordinal() -> pm.Model:
    """Return answers in five categories of 80 persons with intercepts, 640 rows."""
    rng = np.random.default_rng(105)
    person, x = np.repeat(np.arange(80), 8), rng.normal(size=640)
    latent = 0.6 * x + rng.normal(0, 1.0, 80)[person] + rng.logistic(size=640)
    with pm.Model() as model:
        cuts = pm.Normal("cuts", 0, 3, shape=4, transform=ordered, initval=np.array([-2.0, -1.0, 1.0, 2.0]))
        slope, s = pm.Normal("slope", 0, 2), pm.HalfNormal("s", 2)
        eta = slope * x + pm.Normal("u", 0, s, shape=80)[person]
        pm.OrderedLogistic("y", eta=eta, cutpoints=cuts, observed=np.digitize(latent, [-2.0, -0.5, 0.7, 2.0]))
    return model


def gamma() -> pm.Model:
    """Return positive measurements in 55 groups of 6, with a logarithmic link."""
    rng = np.random.default_rng(106)
    group, x = np.repeat(np.arange(55), 6), rng.normal(size=330)
    mean = np.exp(0.8 + 0.3 * x + rng.normal(0, 0.5, 55)[group])
    with pm.Model() as model:
        beta, s, shape = pm.Normal("beta", 0, 2, shape=2), pm.HalfNormal("s", 1), pm.Gamma("shape", 2, 0.2)
        rate = shape / pm.math.exp(beta[0] + beta[1] * x + s * pm.Normal("z", 0, 1, shape=55)[group])
        pm.Gamma("y", shape, rate, observed=rng.gamma(3.0, mean / 3.0))
    return model


def lkj_three(seed: int) -> pm.Model:
    """Return 0 and 1 in 100 groups of 12 with three correlated effects each."""
    rng = np.random.default_rng(seed)
    group, x = np.repeat(np.arange(100), 12), rng.normal(size=(1_200, 2))
    z = rng.normal(size=(100, 3)) * [1, 0.5, 0.4]
    eta = z[group, 0] + (0.5 + z[group, 1]) * x[:, 0] + z[group, 2] * x[:, 1]
    y = rng.binomial(1, 1 / (1 + np.exp(-eta)))
    with pm.Model() as model:
        b = pm.Normal("b", 0, 1, shape=3)
        chol, _, _ = pm.LKJCholeskyCov("chol", n=3, eta=2, sd_dist=pm.HalfNormal.dist(1))
        u = pm.Deterministic("u", pm.Normal("z", 0, 1, shape=(100, 3)) @ chol.T)
        eta = b[0] + u[group, 0] + (b[1] + u[group, 1]) * x[:, 0] + (b[2] + u[group, 2]) * x[:, 1]
        pm.Bernoulli("y", logit_p=eta, observed=y)
    return model


# --- others -----------------------------------------------------------------------------------------------------------


def hidden_markov() -> pm.Model:
    """Return the outcomes of ``scans_models``, 400 of two states, with a forward pass that is a tree of products."""
    y, counts = scans_models.hmm_data()
    with pm.Model() as model:
        moves, sigma = pm.Dirichlet("P", np.array([[4.0, 1.0], [1.0, 4.0]])), pm.HalfNormal("sigma", 2.0, shape=2)
        mu = pm.Normal("mu", 0.0, 2.0, shape=2, transform=ordered, initval=np.array([-1.0, 1.0]))
        rate = pm.Gamma("rate", 2.0, 0.5, shape=2)
        emitted = pm.logp(pm.Normal.dist(mu, sigma), y[:, None]) + pm.logp(pm.Poisson.dist(rate), counts[:, None])
        steps, n = pt.log(moves) + emitted[1:, None, :], len(y) - 1
        while n > 1:
            pairs = steps[: n - n % 2 : 2, :, :, None] + steps[1::2, None, :, :]
            steps, n = pt.concatenate([pt.logsumexp(pairs, axis=2), steps[n - n % 2 :]]), (n + 1) // 2
        pm.Potential("outcomes", pt.logsumexp(emitted[0][:, None] + np.log(0.5) + steps[0]))
    return model


def heavy_groups() -> pm.Model:
    """Return twelve groups of four, each with a mean and a standard deviation of its own."""
    rng = np.random.default_rng(122)
    group, mu, sd = np.repeat(np.arange(12), 4), rng.normal(5, 1, 12), np.exp(rng.normal(0, 0.7, 12))
    with pm.Model() as model:
        a, t, ms, ts = pm.Normal("a", 0, 10), pm.HalfNormal("t", 2), pm.Normal("ms", 0, 1), pm.HalfNormal("ts", 1)
        z, w = pm.Normal("z", 0, 1, shape=12), pm.Normal("w", 0, 1, shape=12)
        mean, spread = pm.Deterministic("gm", a + t * z), pm.math.exp(ms + ts * w)
        pm.Normal("y", mean[group], spread[group], observed=rng.normal(mu[group], sd[group]))
    return model


def walk_exact_narrow() -> pm.Model:
    """Return 50 counts whose log rate is a random walk."""
    rng = np.random.default_rng(77)
    for n in (33, 66, 180, 180, 40, 40):  # the data are those of a script with other draws before
        rng.normal(size=n)
    y = rng.poisson(np.exp(np.cumsum(rng.normal(0, 0.2, 60)) + 1))[:50]
    with pm.Model() as model:
        sd, first = pm.HalfNormal("sd", 1), pm.Normal.dist(0, 2)
        pm.Poisson("y", pm.math.exp(pm.GaussianRandomWalk("walk", sigma=sd, init_dist=first, shape=50)), observed=y)
    return model


def beta_binomial() -> pm.Model:
    """Return rare events among 20 in 70 groups, of which many have none."""
    rng = np.random.default_rng(107)
    y = rng.binomial(20, rng.beta(0.7, 9.0, 70))
    with pm.Model() as model:
        mean, size = pm.Beta("mean", 1, 1), pm.Gamma("size", 2, 0.1)
        p = pm.Beta("p", mean * size, (1 - mean) * size, shape=70)
        pm.Binomial("y", 20, p, observed=y)
    return model


def gamma_poisson() -> pm.Model:
    """Return counts of 60 groups with rates of their own, of which many are 0."""
    rng = np.random.default_rng(108)
    y = rng.poisson(rng.gamma(0.6, 2.0, 60))
    with pm.Model() as model:
        a, b = pm.Exponential("a", 1), pm.Exponential("b", 1)
        pm.Poisson("y", pm.Gamma("rate", a, b, shape=60), observed=y)
    return model


# --- rows -------------------------------------------------------------------------------------------------------------


_MADE = {
    "negative binomial, crossed": negative_binomial,
    "normal, unbalanced slopes": unbalanced,
    "binomial, nested": binomial_nested,
    "Poisson, offset, own effects": poisson_offset,
    "ordinal, intercepts": ordinal,
    "gamma, intercepts": gamma,
    "logistic, 50 x 10": partial(sparse_models.intercepts, 50),
    "logistic, 10,000 x 5": partial(hierarchical.intercepts, n_groups=10_000, per_group=5),
    **{f"LKJ of three, data {seed}": partial(lkj_three, seed) for seed in range(11, 16)},
    "Rasch, 3,000 x 30": partial(rows_models.rasch, 3_000, 30),
    "2PL, 500 x 20": partial(posteriors_models.two_parameters, 500, 20),
    "2PL, 144 unknowns": partial(posteriors_models.two_parameters, 104, 20),
    **{f"GP, {n:,}": partial(functionals_fields.gp_poisson, n) for n in (40, 70, 300, 1_000)},
    "volatility, 500": partial(nested_models.volatility_walk, 500),
    "volatility, 5,000": partial(nested_models.volatility_walk, 5_000),
    "ICAR, 30 x 30": partial(hierarchical.areas, "icar", 30, 30),
    "BYM2, 1,000": partial(nested_models.bym2, 1_000),
    "BYM2, 3,000": partial(nested_models.bym2, 3_000),
    "hidden Markov, 400": hidden_markov,
    "factors, 269 unknowns": partial(posteriors_unstructured.factors, 120, 10),
    "heavy groups": heavy_groups,
    "narrow walk": walk_exact_narrow,
    "beta-binomial, zeros": beta_binomial,
    "gamma-Poisson, zeros": gamma_poisson,
}
#: Of which the variance of log weights given the hyperparameters is looked at: their posterior is nested.
NESTED = {
    f"v: {kind}, {n:,} groups, sd {sd}": partial(hierarchical.intercepts, kind, n_groups=n, per_group=5, sd=sd)
    for kind, n, sd in product(("logistic", "poisson"), (60, 300, 2_000, 10_000), (0.5, 1.5, 4.0))
}
#: Of users' kinds, which are measured where they are named.
USERS = {"epilepsy": epilepsy, **{name: build for name, (_, build) in MODELS.items()}}
#: By the names that are given.
CASES: dict[str, Case] = {
    **{name: OTHERS[name] for name in ("slopes", "own_effects", "linear", "growth", "crossed")},
    **{name: OTHERS[name] for name in ("toenail", "hers", "insteval_linear")},
    **{name: Case(without_data(build)) for name, build in {**_MADE, **NESTED, **USERS}.items()},
}
#: Of these the model is one of the folder of references.
REFERENCED = ("toenail", "hers")
#: Standard deviations that are known: the variable, its element, and the right value.
KNOWN = {"heavy groups": ("gm", 5, 0.1453), "narrow walk": ("sd", 0, 0.0698)}
