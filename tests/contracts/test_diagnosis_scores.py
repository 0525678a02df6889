"""Gradients at draws: what they tell of a posterior that is right, and of one that is not."""

import functools

import numpy as np
import pymc as pm
import pytest

from pymc_ngvi import fit_ngvi
from pymc_ngvi.density.constrain import functionals_of
from pymc_ngvi.results import diagnosis as making
from pymc_ngvi.results.diagnosis import score_drift_of

N_GROUPS, SIZE, N_DRAWS = 40, 8, 512
SEEDS = [1, 2]


def groups():
    rng = np.random.default_rng(4)
    group = np.repeat(np.arange(N_GROUPS), SIZE)
    y = rng.binomial(1, 1.0 / (1.0 + np.exp(-(0.3 + 1.2 * rng.standard_normal(N_GROUPS)[group]))))
    with pm.Model() as model:
        level, s = pm.Normal("level", 0, 2), pm.HalfNormal("s", 2)
        b = pm.Normal("b", 0, s, shape=N_GROUPS)
        pm.Deterministic("spread", b.std())
        pm.Bernoulli("y", logit_p=level + b[group], observed=y)
    return model


@pytest.fixture(scope="module")
def exact():
    approx = fit_ngvi(model=groups(), posterior="exact", random_seed=1, progressbar=False)
    assert approx.is_exact
    return approx


class Changed:
    """A distribution whose draws are changed, and whose moments and checks are as they were."""

    def __init__(self, whole, change):
        self._whole, self._change = whole, change

    def __getattr__(self, name):
        return getattr(self._whole, name)

    def base(self, n, rng):
        return self._change(self._whole.base(n, rng))

    draw = base


def changed(approx, change):
    posterior = approx._posterior
    return making.replace(posterior, distribution=Changed(posterior.distribution, change))


def test_a_tail_that_is_empty_by_chance_is_no_error():
    """Of 10,000 columns of right draws, some have next to none beyond a limit."""
    z = np.random.default_rng(5).standard_normal((300, 10_000))
    drift = making.Drift(making.diffused(z, -z, np.ones_like(z), np.arange(len(z))))
    assert not drift.stands_out


def wider(theta, factor, where=slice(2, None)):
    theta = theta.copy()
    theta[:, where] = theta[:, where].mean(axis=0) + factor * (theta[:, where] - theta[:, where].mean(axis=0))
    return theta


def judged(posterior, seed):
    rng = np.random.default_rng(seed)
    return making.diagnose(posterior, making.budget_of(posterior), rng, rng)


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_drifts_where_draws_are_of_the_posterior(exact, seed):
    """By five standard errors at most of 42 coordinates, and of 41 predictors: their figures are normal, about."""
    functionals = functionals_of(exact.density, exact._posterior.constrain)
    found = score_drift_of(exact._posterior, np.random.default_rng(seed), N_DRAWS, functionals)
    for of in (found.moments, found.functionals):
        for estimates in of.measures.values():
            assert (np.abs(estimates.value) < 5.0 * estimates.se + 0.02).all()  # the pool is worth some 2,000 draws
            assert np.median(estimates.se) < 0.13
            # Chance is about as large as is said.
            assert 0.5 < np.std(estimates.value / estimates.se) < 2.0
    assert [group.name for group in found.functionals.functionals.groups] == ["spread", "linear predictors"]


@pytest.mark.parametrize("factor", [0.7, 1.4])
def test_draws_that_are_too_wide_or_too_narrow_are_seen(exact, factor):
    posterior = changed(exact, functools.partial(wider, factor=factor))
    found = score_drift_of(
        posterior, np.random.default_rng(1), N_DRAWS, functionals_of(posterior.density, posterior.constrain)
    )
    # Products with gradients grow with the square of the factor; q's own sd is what it was.
    assert np.median(found.moments.measures["sd"].value[2:]) == pytest.approx(1.0 / factor - 1.0, abs=0.1)
    diagnosis = judged(posterior, 1)
    assert diagnosis.verdict == "not reliable"
    assert "along the gradients of log p changes the" in " ".join(diagnosis.reasons)


def test_of_draws_in_the_wrong_order_predictors_tell(exact):
    """Each coordinate has its distribution, but effects do not go with the level: sums are too wide."""

    def shuffled(theta):
        theta = theta.copy()
        theta[:, 0] = theta[np.random.default_rng(0).permutation(len(theta)), 0]
        return theta

    diagnosis = judged(changed(exact, shuffled), 3)
    assert diagnosis.verdict == "not reliable"
    assert "linear predictor" in " ".join(diagnosis.reasons).lower()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_deterministic_that_is_wrong_is_seen(exact, seed):
    """Effects are right one by one, but those of a draw are more alike than they should be."""
    assert judged(exact._posterior, seed).computed.startswith("300 elements of `spread`")

    def alike(theta):
        theta, n = theta.copy(), N_GROUPS // 2
        order = np.argsort(theta[:, 2 : 2 + n].var(axis=1))
        theta[order, 2 + n :] = theta[np.argsort(theta[:, 2 + n :].var(axis=1)), 2 + n :]
        return theta

    diagnosis = judged(changed(exact, alike), seed)
    assert diagnosis.verdict == "not reliable"
    assert any("`spread`" in reason for reason in diagnosis.reasons)
