"""Shards with other groups, other rules of quadrature, and other kinds of rows: sums are those of all rows."""

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
import sharded_models as models

from operations import OnceDifferentiableSquare
from pymc.distributions.dist_math import check_parameters

import pymc_ngvi

from pymc_ngvi import Shards
from pymc_ngvi.core.messages import RowsGivenUp
from pymc_ngvi.density.expectations import Expectations
from pymc_ngvi.density.shards import ShardedDensity, forget, kept
from pymc_ngvi.families.gaussian import FullState
from pymc_ngvi.fitting.modes import ModeSearch
from pymc_ngvi.marginal.exact import forest_of
from pymc_ngvi.marginal.on_model import FittedDensity, TermsInShards

KEYS = range(models.N_SHARDS)


def by_group(rows=slice(None)):
    """Groups whose rows are in one shard each, and rows without a group; only the last shard has all predictors."""
    X, y, z, _ = (part[rows] for part in models.data())
    at = np.arange(models.N_ROWS)[rows]
    group, is_last = at // 15, at >= 450
    with pm.Model() as model:
        beta, sd = pm.Normal("beta", 0.0, 2.0, shape=3), pm.HalfNormal("sd", 1.0)
        b = pm.Normal("b", 0.0, sd, shape=40)
        eta = X[:, :2] @ beta[:2] + b[group]
        pm.Bernoulli("y", logit_p=eta + beta[2] * X[:, 2] * is_last if is_last.any() else eta, observed=y)
        pm.Normal("z", X[:, :2] @ beta[:2], 0.7, observed=z)
    return model


@pytest.fixture(scope="module")
def densities():
    return ShardedDensity(Shards(models.of_rows(by_group), KEYS)), pymc_ngvi.LogDensity(by_group())


def test_entries_that_one_shard_knows_of_are_in_the_pattern(densities):
    sharded, whole = densities
    one, other = (density.structural_pattern.matrix.toarray() != 0 for density in densities)
    np.testing.assert_array_equal(one, other)
    q = FullState.from_scale(whole.initial_point(), np.full(whole.n_dim, 0.3))
    found, all_rows = sharded.expected(q), whole.expected(q)
    assert found.value == pytest.approx(all_rows.value, abs=1e-6)
    assert found.error == pytest.approx(all_rows.error, rel=0.5)
    np.testing.assert_allclose(found.grad, all_rows.grad, atol=1e-6)
    directions = np.random.default_rng(2).standard_normal((2, whole.n_dim))
    np.testing.assert_allclose(found.hessian.products(directions), all_rows.hessian.products(directions), atol=1e-6)


def test_terms_of_groups_are_those_of_all_rows_where_each_is_in_one_shard(densities):
    sharded, whole = densities
    forest, rng = forest_of(sharded), np.random.default_rng(5)
    g, local = 0.5 * rng.standard_normal((3, forest.n_globals)), rng.standard_normal((3, 2, forest.n_local))
    found = TermsInShards(sharded, forest).terms(g, local)
    for one, other in zip(found, FittedDensity(whole, forest, whole.initial_point()).terms(g, local), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-10)


def of_one_slope(key):
    """Rows of each shard depend on a slope of its own."""
    X, y, *_ = models.data()
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, 2.0, shape=models.N_SHARDS)
        pm.Bernoulli("y", logit_p=3.0 * X[:30, 1] * beta[key], observed=y[:30])
    return model


def test_each_shard_keeps_to_the_rules_that_it_has_chosen():
    shards = Shards(of_one_slope, KEYS)
    density = ShardedDensity(shards)
    scales = np.full(density.n_dim, 0.2)
    first = density.expected(FullState.from_scale(density.initial_point(), scales))
    scales[2] = 3.0
    wide = FullState.from_scale(density.initial_point(), scales)
    second = density.expected(wide, first.rules, adapt=True)
    # One shard has chosen anew: all others go on with what they chose at first.
    changed = [one != other for one, other in zip(first.rules.which, second.rules.which, strict=True)]
    assert changed == [False, False, True, False]
    one, other = first.rules.level[-4:], second.rules.level[-4:]
    assert (one != other).tolist() == [False, False, True, False]
    scales[:] = 0.5
    now = FullState.from_scale(density.initial_point(), scales)
    third = density.expected(now, second.rules)
    np.testing.assert_array_equal(third.rules.level, second.rules.level)
    forget(shards._recipe.name)  # as where workers have died: rules are chosen for what they were chosen for
    again = density.expected(now, second.rules)
    np.testing.assert_array_equal(again.rules.level, second.rules.level)
    assert again.value == third.value
    np.testing.assert_array_equal(again.grad, third.grad)


def with_rows_only_in_some(key):
    X, _, z, _ = (part[models.rows_of(key)] for part in models.data())
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, 2.0, shape=models.N_DIM)
        mu = X @ beta
        if key == 2:
            pm.Potential("odd", -pm.math.logsumexp(mu))
        else:
            pm.Potential("odd", 0.0 * beta.sum())
        pm.Normal("z", mu, 0.7, observed=z)
    return model


def test_one_shard_that_is_no_sum_over_rows_is_enough():
    shards = Shards(with_rows_only_in_some, KEYS)
    density = ShardedDensity(shards)
    assert density.n_directions is None
    approx = pm.fit(method="ngvi", shards=shards, posterior="gaussian", random_seed=1, progressbar=False)
    assert approx.record.estimator == "price"
    assert approx.converged


def test_shards_are_not_searched_for_other_modes(monkeypatch):
    tried = []
    monkeypatch.setattr(ModeSearch, "after", lambda *_, **__: tried.append(1))
    shards = Shards(of_one_slope, KEYS)
    approx = pm.fit(method="ngvi", shards=shards, posterior="gaussian", random_seed=1, progressbar=False)
    assert approx.converged
    assert not tried
    assert not approx.record.searched


def with_a_term_in_the_third(term):
    """Return what builds shards, the third of which has another potential."""

    def build(key):
        X, _, z, _ = (part[models.rows_of(key)] for part in models.data())
        with pm.Model() as model:
            beta = pm.Normal("beta", 0.0, 2.0, shape=2)
            pm.Normal("z", X[:, :2] @ beta, 0.7, observed=z)
            pm.Potential("term", term(beta[0]) if key == 2 else 0.0 * beta[0])
        return model

    return build


def test_conditions_that_rows_of_one_shard_leave_out_are_looked_at():
    def below_one(slope):
        both = pt.stack([slope, 2.0 * slope])
        return check_parameters(-(both**2), pt.all(both < 1.0)).sum()

    density = ShardedDensity(Shards(with_a_term_in_the_third(below_one), KEYS))
    assert density.n_directions is not None
    inside, outside = np.zeros((1, 2)), np.full((1, 2), 1.5)
    assert density.rows_cover(lambda: inside)
    assert not density.rows_cover(lambda: outside)


def test_a_second_derivative_that_one_shard_lacks_is_named():
    density = ShardedDensity(Shards(with_a_term_in_the_third(lambda b: -OnceDifferentiableSquare()(b)), KEYS))
    assert not density.has_hessian
    assert "no second derivative" in str(density.hessian_error())


def test_rows_that_are_not_all_of_a_shard_are_given_up(monkeypatch):
    density = ShardedDensity(Shards(with_a_term_in_the_third(lambda b: -((b + 1.0) ** 2)), KEYS))
    q = FullState.from_scale(density.initial_point(), np.full(density.n_dim, 0.3))
    agrees = Expectations.agrees

    def but_for_the_third(self, theta, logp, **options):
        return agrees(self, theta, logp, **options) and not np.isclose(logp[0], of_third)

    of_third = kept(density.shards._recipe, 2)._likelihood.logp(q.location[None])[0]
    monkeypatch.setattr(Expectations, "agrees", but_for_the_third)
    with pytest.raises(RowsGivenUp, match="the rows of shard 2 are not all"):
        density.expected(q)
    assert density.n_directions is None
