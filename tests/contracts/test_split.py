"""Log p as a term of the globals and terms of local coordinates, of PyMC models."""

import functools

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

from marginal_terms import forest_of as by_hand
from marginal_terms import singles

from pymc_ngvi import LogDensity
from pymc_ngvi.core.messages import NotApart
from pymc_ngvi.density.expectations import RowTerms
from pymc_ngvi.marginal import quadrature as parts
from pymc_ngvi.marginal.exact import forest_of
from pymc_ngvi.marginal.quadrature import Forest, TermsByRows

N_GROUPS, N_OBS = 12, 40
_RNG = np.random.default_rng(5)
#: Observations in no order, and a last group without any.
GROUP = _RNG.permutation(np.concatenate([np.arange(N_GROUPS - 1), _RNG.integers(N_GROUPS - 1, size=N_OBS - 11)]))
X = _RNG.normal(size=N_OBS)
COUNTS = _RNG.poisson(1.3, size=N_OBS)
REALS = _RNG.normal(size=N_OBS)


def linear(centred=False):
    """Return a linear predictor with intercepts of groups."""
    beta = pm.Normal("beta", 0.1, 2.1, shape=2)
    sd = pm.HalfNormal("sd", 1.3)
    if centred:
        u = pm.Normal("u", 0.1, sd, shape=N_GROUPS)
    else:
        u = pm.Deterministic("u", sd * pm.Normal("z", 0.1, 1.1, shape=N_GROUPS))
    return beta[0] + beta[1] * X + u[GROUP]


def poisson():
    pm.Poisson("y", pt.exp(linear()), observed=COUNTS)


def centred():
    pm.Poisson("y", pt.exp(linear(centred=True)), observed=COUNTS)


def bernoulli_of_data():
    group, y = pm.Data("group", GROUP), pm.Data("y_data", (COUNTS > 1).astype(int))
    z = pm.Normal("z", 0.1, 1.1, shape=N_GROUPS)
    eta = pm.Deterministic("eta", pm.Normal("beta", 0.1, 2.1) + pm.HalfNormal("sd", 1.3) * z[group])
    pm.Bernoulli("y", logit_p=eta, observed=y)


def binomial_sorted():
    pm.Binomial("y", n=7, logit_p=linear()[np.argsort(GROUP, kind="stable")], observed=np.minimum(COUNTS, 7))


def normal_with_noise():
    """The sd of the noise belongs to elements of every group; the groups have a predictor of their own."""
    w = np.linspace(-1.0, 1.0, N_GROUPS)
    u = pm.Normal("u", pm.Normal("gamma", 0.1, 1.1) * w, pm.HalfNormal("sd", 1.3), shape=N_GROUPS)
    pm.Normal("y", u[GROUP], pm.HalfNormal("noise", 1.1), observed=REALS)


def negative_binomial_and_a_second_outcome():
    eta = linear()
    pm.NegativeBinomial("y", mu=pt.exp(eta), alpha=pm.Gamma("alpha", 2.1, 0.6), observed=COUNTS)
    pm.Normal("r", 0.3 * eta, 1.1, observed=REALS)
    pm.Normal("alone", pm.Normal("m", 0.1, 1.1), 1.3, observed=REALS[:3])


def student_t_with_weights():
    mu, weights = linear(centred=True), 1.0 / (1.0 + np.arange(N_OBS))
    pm.Potential("y", weights * pm.logp(pm.StudentT.dist(nu=4.1, mu=mu, sigma=1.1), REALS))


def summed_potential():
    """The sum over groups is in the model, beside another number."""
    mu = linear()
    per_observation = -0.3 * (REALS - mu) ** 2
    pm.Potential("y", pt.sum(per_observation) + pt.sum(-0.1 * mu**2) + 1.7)


def slopes_not_centred():
    beta = pm.Normal("beta", 0.1, 2.1, shape=2)
    chol, _, _ = pm.LKJCholeskyCov("chol", n=2, eta=2.1, sd_dist=pm.Exponential.dist(1.1, shape=2))
    b = pm.Normal("z", 0.1, 1.1, shape=(N_GROUPS, 2)) @ chol.T
    pm.Poisson("y", pt.exp(beta[0] + b[GROUP, 0] + (beta[1] + b[GROUP, 1]) * X), observed=COUNTS)


def two_vectors_of_effects():
    """Intercepts and slopes are variables of their own: blocks of coordinates far apart."""
    sd = pm.HalfNormal("sd", 1.3, shape=2)
    a, b = pm.Normal("a", 0.1, sd[0], shape=N_GROUPS), pm.Normal("b", 0.1, sd[1], shape=N_GROUPS)
    pm.Bernoulli("y", logit_p=a[GROUP] + b[GROUP] * X, observed=(COUNTS > 1).astype(int))


def nested_groups():
    sd = pm.HalfNormal("sd", 1.3, shape=2)
    above = np.arange(60) % 20
    d = pm.Normal("d", pm.Normal("m", 0.1, 1.1), sd[0], shape=20)
    s = pm.Normal("s", d[above], sd[1], shape=60)
    pm.Poisson("y", pt.exp(s[np.arange(80) % 60]), observed=_RNG.poisson(1.3, 80))


#: Models, and how many levels their trees have.
MODELS = {
    poisson: 1,
    centred: 1,
    bernoulli_of_data: 1,
    binomial_sorted: 1,
    normal_with_noise: 1,
    negative_binomial_and_a_second_outcome: 1,
    student_t_with_weights: 1,
    summed_potential: 1,
    slopes_not_centred: 2,
    two_vectors_of_effects: 2,
    nested_groups: 2,
}


@functools.cache
def made(make):
    """Return the density of a model, its forest and its terms, once for all tests."""
    with pm.Model() as model:
        make()
    density = LogDensity(model)
    forest = forest_of(density)
    return density, forest, terms_of(density, forest)


def terms_of(density, forest):
    return TermsByRows(RowTerms(density.rows, forest), forest)


def points(density, n, seed=1):
    return density.initial_point() + 0.5 * np.random.default_rng(seed).normal(size=(n, density.n_dim))


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_terms(make, rng):
    """They add up to log p; each depends on the coordinates of its path alone; batches are the terms of single ones."""
    density, forest, split = made(make)
    assert forest.n_levels == MODELS[make]
    theta = points(density, 6)
    g, b = theta[:, forest.globals_], theta[:, forest.locals_]
    of_globals, of_locals = split.terms(g, b[:, None])
    assert of_globals.shape == (6,)
    assert of_locals.shape == (6, 1, forest.n_local)
    np.testing.assert_allclose(of_globals + of_locals.sum(axis=(1, 2)), density.logp(theta), rtol=1e-6, atol=1e-6)

    # Three nodes beside each draw; then the same ones alone.
    nodes = b[:, None] + 0.3 * rng.normal(size=(6, 3, forest.n_local))
    together = split.terms(g, nodes)
    for i in range(6):
        for j in range(3):
            first, alone = split.terms(g[i : i + 1], nodes[i : i + 1, j : j + 1])
            np.testing.assert_allclose(first[0], together[0][i], rtol=1e-10, atol=1e-12)
            np.testing.assert_allclose(alone[0, 0], together[1][i, j], rtol=1e-10, atol=1e-12)

    for c in rng.permutation(forest.n_local)[:4]:
        moved = b[:, None].copy()
        moved[:, :, c] += 0.7
        changed = (split.terms(g, moved)[1] != of_locals).any(axis=(0, 1))
        below = (forest.path == c).any(axis=1)
        assert changed[below].any()
        assert not (changed & ~below).any()


@pytest.mark.parametrize("make", [poisson, nested_groups, normal_with_noise])
def test_parts_are_those_of_the_whole(make, rng, monkeypatch):
    density, forest, whole = made(make)
    theta = points(density, 6)
    g, b = theta[:, forest.globals_], theta[:, forest.locals_]
    nodes = b[:, None] + 0.3 * rng.normal(size=(6, 3, forest.n_local))
    expected = whole.terms(g, nodes)
    monkeypatch.setattr(parts, "CACHED", 32)
    terms = terms_of(density, forest)
    assert len(terms.plan(forest, 6, 3).parts) > 1
    for found, part in zip(terms.terms(g, nodes), expected, strict=True):
        np.testing.assert_allclose(found, part, rtol=1e-10, atol=1e-12)


def test_what_depends_on_globals_alone_is_their_term():
    """Also where the elements of one variable are of both kinds."""
    first_row = np.where(np.arange(N_OBS) < 5, 0.0, 1.0)
    with pm.Model() as model:
        m = pm.Normal("m", 0.1, 1.1)
        u = pm.Normal("u", 0.1, 1.3, shape=N_GROUPS)
        pm.Normal("y", m + first_row * u[GROUP], 1.1, observed=REALS)
    density = LogDensity(model)
    forest = forest_of(density)
    split = terms_of(density, forest)
    theta = points(density, 4)
    of_globals, of_locals = split.terms(theta[:, forest.globals_], theta[:, None, forest.locals_])
    np.testing.assert_allclose(of_globals + of_locals.sum(axis=(1, 2)), density.logp(theta), rtol=1e-6)
    m = theta[:, forest.globals_]
    apart = np.concatenate([m / 1.1 - 0.1 / 1.1, (REALS[:5] - m) / 1.1], axis=1)
    expected = (-0.5 * apart**2 - np.log(1.1) - 0.5 * np.log(2.0 * np.pi)).sum(axis=1)
    np.testing.assert_allclose(np.diff(of_globals), np.diff(expected), rtol=1e-6)


# --- what can't be split ----------------------------------------------------------------------------------------------


def sum_to_zero():
    u = pm.Normal("u", 0.1, 1.3, shape=N_GROUPS)
    pm.Potential("zero", -20.0 * pt.sum(u) ** 2)
    return N_GROUPS


def one_pair():
    """Of all elements, one depends on two blocks."""
    u = pm.Normal("u", 0.1, 1.3, shape=N_GROUPS)
    weights = np.eye(N_GROUPS)
    weights[2, 9] = 0.5
    pm.Normal("y", weights @ u, 1.1, observed=REALS[:N_GROUPS])
    return N_GROUPS


def zero_sum_normal():
    pm.ZeroSumNormal("u", 1.3, shape=N_GROUPS)
    return N_GROUPS - 1


@pytest.mark.parametrize("make", [sum_to_zero, one_pair, zero_sum_normal])
def test_an_element_of_several_blocks_is_refused(make):
    with pm.Model() as model:
        pm.Normal("m", 0.1, 1.1)
        n_local = make()
    density = LogDensity(model)
    with pytest.raises(NotApart, match="depends on several blocks of local coordinates at once"):
        RowTerms(density.rows, singles(n_local))


def test_two_coordinates_of_a_tree_that_are_not_on_one_path_are_refused():
    """A hub with leaves is no place for a term of two leaves; a path is."""
    with pm.Model() as model:
        pm.Normal("m", 0.1, 1.1)
        u = pm.Normal("u", 0.1, 1.3, shape=9)
        pm.Potential("three", -((u[0::3] - u[1::3] + u[2::3]) ** 2))
    density = LogDensity(model)
    with pytest.raises(NotApart):
        terms_of(density, by_hand([-1, 0, 0, -1, 3, 3, -1, 6, 6], 1))
    path = by_hand([-1, 0, 1, -1, 3, 4, -1, 6, 7], 1)
    split = terms_of(density, path)
    theta = points(density, 3)
    total = sum(part.sum(axis=tuple(range(1, part.ndim))) for part in split.terms(theta[:, :1], theta[:, None, 1:]))
    np.testing.assert_allclose(total, density.logp(theta), rtol=1e-6)


def test_globals_may_stand_anywhere():
    """A vector of which some elements are globals and others local."""
    with pm.Model() as model:
        v = pm.Normal("v", 0.1, 1.1, shape=10)
        pm.Normal("y", v[2] + v * pt.exp(0.3 * v[5]), 1.1, observed=REALS[:10])
    density = LogDensity(model)
    globals_, locals_ = np.array([2, 5]), np.array([0, 1, 3, 4, 6, 7, 8, 9])
    forest = Forest(globals_, locals_, np.full(8, -1), np.zeros(8, dtype=np.intp))
    split = terms_of(density, forest)
    theta = points(density, 3)
    first, rest = split.terms(theta[:, globals_], theta[:, None, locals_])
    np.testing.assert_allclose(first + rest.sum(axis=(1, 2)), density.logp(theta), rtol=1e-6)
