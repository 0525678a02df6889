"""Rows and groups are left out of likelihoods of all kinds: beside integrals over grids."""

import numpy as np
import pymc as pm
import pytest

from scipy import stats
from scipy.special import logsumexp

import pymc_ngvi


def fitted(model, **options):
    return pymc_ngvi.fit_ngvi(model=model, random_seed=1, progressbar=False, **options)


# --- rows that are left out by a fit ---

GRID = np.linspace(-6.0, 6.0, 2_001)


#: Without the first seven rows, of which one is censored, the posterior is far wider.
Y = np.array([-0.9, -1.7, -0.2, 1.2, -0.7, -1.5, -2.4, 0.3])
PART = np.arange(8) == 7


def censored(a):
    y = np.minimum(Y, 1.0)
    pm.Censored("y", pm.Normal.dist(a, 1.0), lower=None, upper=1.0, observed=y)
    return np.where(y >= 1.0, stats.norm.logsf(1.0, GRID[:, None]), stats.norm.logpdf(y, GRID[:, None]))


def of_a_graph(a):
    pm.CustomDist("y", a, dist=lambda a, size: 2.0 * pm.Normal.dist(a, 1.0, size=size), observed=2.0 * Y)
    return stats.norm.logpdf(Y, GRID[:, None]) - np.log(2.0)


def with_labels(a):
    spread = np.array([0.95, 1.05])
    pm.Normal("y", a, pm.math.stack([0.95, 1.05])[pm.Bernoulli("wide", 0.3, shape=8)], observed=Y)
    parts = stats.norm.logpdf(Y[:, None], GRID[:, None, None], spread) + np.log([0.7, 0.3])
    return logsumexp(parts, axis=-1)


def read_by_another(a):
    """The second variable depends on the first one, whose rows are left out of the first one alone."""
    pm.Normal("z", 0.5 * pm.Normal("y", a, 1.0, observed=Y), 1.0, observed=Y)
    return stats.norm.logpdf(Y, GRID[:, None])


@pytest.mark.parametrize("kind", [censored, of_a_graph, with_labels, read_by_another])
def test_rows_that_are_left_out_by_a_fit(kind):
    with pm.Model() as model:
        rows = kind(pm.Normal("a", 0.0, 2.0, initval=0.1))
    rest = stats.norm.logpdf(GRID, scale=2.0) + rows[:, -1]
    of_part = rows[:, :-1].sum(axis=1)
    found = fitted(model).leave_out(groups=PART, var_name="y", random_seed=1)
    right = logsumexp(rest + of_part) - logsumexp(rest)
    error = float(found["mcse_i"][0])
    assert error < 0.03
    assert float(found.elpd_i[0]) == pytest.approx(right, abs=4 * error)


# --- groups that are integrated again ---

N_GROUPS, N_OF_GROUP = 6, 4
GROUP = np.repeat(np.arange(N_GROUPS), N_OF_GROUP)
TAU, Z = np.exp(np.linspace(-8.0, 2.0, 121)), np.linspace(-6.0, 6.0, 241)


def _by_groups(log_rows):
    """Return log p of each group given the others, from a function of effects that returns log p of rows."""
    rows = log_rows(TAU[:, None] * Z)
    groups = [logsumexp(stats.norm.logpdf(Z) + rows[g == GROUP].sum(axis=0), axis=1) for g in range(N_GROUPS)]
    groups = [group + np.log(Z[1] - Z[0]) for group in groups]
    joint = stats.halfnorm.logpdf(TAU) + np.log(TAU) + sum(groups)
    return np.array([logsumexp(joint) - logsumexp(joint - group) for group in groups])


def labelled_counts(effect):
    y = np.random.default_rng(4).poisson(np.exp(1.0 + 0.5 * np.arange(N_GROUPS)[GROUP] / N_GROUPS)) * (
        np.arange(len(GROUP)) % 3 > 0
    )
    pm.Poisson("y", pm.Bernoulli("active", 0.7, shape=len(y)) * pm.math.exp(1.0 + effect[GROUP]), observed=y)
    y = y[:, None, None]
    inactive = np.where(y == 0, np.log(0.3), -np.inf)
    return lambda at: np.logaddexp(np.log(0.7) + stats.poisson.logpmf(y, np.exp(1.0 + at)), inactive)


def censored_values(effect):
    y = np.minimum(np.random.default_rng(5).normal(0.3 * np.arange(N_GROUPS)[GROUP], 1.0), 1.0)
    pm.Censored("y", pm.Normal.dist(effect[GROUP], 1.0), lower=None, upper=1.0, observed=y)
    y = y[:, None, None]
    return lambda at: np.where(y >= 1.0, stats.norm.logsf(1.0, at), stats.norm.logpdf(y, at))


@pytest.mark.parametrize("kind", [labelled_counts, censored_values])
def test_groups(kind):
    with pm.Model(coords={"site": np.arange(N_GROUPS)}) as model:
        effect = pm.Normal("effect", 0.0, pm.HalfNormal("tau", 1.0), dims="site")
        rows = kind(effect)
    approx = fitted(model)
    assert approx.is_exact
    found = approx.leave_out(groups="site", random_seed=1)
    # Four errors of two thousand draws of tau, by which densities of groups vary by a half.
    np.testing.assert_allclose(found.elpd_i, _by_groups(rows), atol=4 * 0.5 / np.sqrt(2_000))


def test_the_model_is_fitted_with_all_rows_again():
    """What was built to leave rows out does not serve the next fit of the model."""
    with pm.Model() as model:
        censored(pm.Normal("a", 0.0, 2.0))
    approx = fitted(model, posterior="gaussian")
    approx.leave_out(groups=PART, random_seed=1)
    again = fitted(model, posterior="gaussian")
    np.testing.assert_array_equal(again.mean.eval(), approx.mean.eval())


@pytest.mark.parametrize("dims", [("site", "term"), ("term", "site")])
def test_groups_of_effects_with_two_dims(dims):
    x = np.random.default_rng(6).normal(size=len(GROUP))
    y = np.random.default_rng(7).normal(0.5 * x, 1.0)
    at = [(GROUP, k) if dims[0] == "site" else (k, GROUP) for k in range(2)]
    with pm.Model(coords={"site": list("abcdef"), "term": range(2)}) as model:
        effect = pm.Normal("effect", 0.0, pm.HalfNormal("tau", 1.0), dims=dims)
        pm.Normal("y", effect[at[0]] + effect[at[1]] * x, 1.0, observed=y)
    found = fitted(model).leave_out(groups="site", random_seed=1)
    assert found.elpd_i["site"].values.tolist() == list("abcdef")
    design = (GROUP[:, None] == GROUP) * (1.0 + np.outer(x, x))
    log_p = np.empty((2, N_GROUPS, len(TAU)))
    for j, tau in enumerate(TAU):
        whole = stats.multivariate_normal(cov=np.eye(len(y)) + tau**2 * design).logpdf(y)
        for g in range(N_GROUPS):
            some = np.flatnonzero(g != GROUP)
            cov = np.eye(len(some)) + tau**2 * design[np.ix_(some, some)]
            log_p[:, g, j] = whole, stats.multivariate_normal(cov=cov).logpdf(y[some])
    prior = stats.halfnorm.logpdf(TAU) + np.log(TAU)
    right = logsumexp(prior + log_p[0], axis=1) - logsumexp(prior + log_p[1], axis=1)
    assert (np.abs(found.elpd_i - right) < 4 * found["mcse_i"] + 1e-3).all()


# --- what can't be left out ---


def walk():
    pm.GaussianRandomWalk("y", sigma=pm.HalfNormal("s"), init_dist=pm.Normal.dist(), observed=np.arange(6.0))


def series():
    noise = {"sigma": pm.HalfNormal("s"), "init_dist": pm.Normal.dist()}
    pm.AR("y", pm.Normal("rho", 0.0, 0.5), **noise, observed=np.arange(6.0)[None])


def change_point():
    rate = pm.math.switch(np.arange(6) < pm.DiscreteUniform("when", 0, 5), pm.Normal("a"), pm.Normal("b"))
    pm.Normal("y", rate, 1.0, observed=np.arange(6.0))


def common_labels():
    label, m = pm.Bernoulli("label", 0.5, shape=3), pm.Normal("m", [0.0, 1.0], 1.0)
    for name in ("y", "z"):
        pm.Normal(name, m[label], 1.0, observed=np.arange(3.0))


def potential():
    pm.Potential("y", pm.logp(pm.Normal.dist(pm.Normal("m"), 1.0), np.arange(3.0)))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (walk, "The values of 'y' have one log density together"),
        (series, "The values of 'y' have one log density together"),
        (change_point, "The values of 'y' have one log density together"),
        (common_labels, "'y', 'z' have one log density together"),
        (potential, "which rows a pm.Potential is made of is not known"),
    ],
)
def test_what_has_no_rows_is_refused(kind, message):
    with pm.Model() as model:
        kind()
    approx = fitted(model, posterior="gaussian")
    with pytest.raises(ValueError, match=message):
        approx.leave_out(var_name=None if kind is potential else "y")
    if kind is common_labels:
        with pytest.raises(ValueError, match=message):
            approx.sample(10, log_likelihood=True)
    elif kind is not potential:  # that of all values
        tree = approx.sample(12, log_likelihood=True, random_seed=1)
        assert tree["log_likelihood"]["y"].size == 12
        assert np.isfinite(tree["log_likelihood"]["y"]).all()


@pytest.mark.filterwarnings("ignore::pymc.exceptions.ImputationWarning")
def test_log_likelihoods_of_rows():
    """Of a model with initial values, missing data and a correlation, which PyMC refuses or names otherwise."""
    y = np.ma.masked_array(np.random.default_rng(3).normal(size=(10, 2)), np.arange(20).reshape(10, 2) == 3)
    with pm.Model() as model:
        a = pm.Normal("a", 0.0, 2.0, initval=0.5)
        pm.Normal("y", a, 1.0, observed=y)
        pm.MvNormal("z", np.zeros(2), cov=pm.LKJCorr("r", n=2, eta=2.0), observed=y.data)
    tree = fitted(model).sample(100, chains=2, random_seed=1, log_likelihood=True)
    rows = tree.log_likelihood
    assert rows["y_observed"].shape == (2, 50, 19)
    assert rows["z"].shape == (2, 50, 10)
    expected = stats.norm.logpdf(y.compressed(), tree.posterior["a"].values[..., None])
    np.testing.assert_allclose(rows["y_observed"], expected, rtol=1e-10)
