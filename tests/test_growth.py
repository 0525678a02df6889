"""Improper posteriors: said to be so, early and by name; wide but proper ones are not taken for such."""

import warnings

import numpy as np
import pymc as pm
import pytest

from matrix import two_seeds

import pymc_ngvi

from pymc_ngvi.core.status import ConvergenceWarning, Status
from pymc_ngvi.steps.adaptive.growth import Growth

pytestmark = pytest.mark.usefixtures("_one_blas_thread")

QUIET = {"progressbar": False, "backend": "quick"}
X = np.linspace(-2.0, 2.0, 40)
Y = np.random.default_rng(1).standard_normal(20)


def flat():
    pm.Flat("x")


def separated(prior=lambda name: pm.Flat(name)):
    """A logistic regression on a predictor that tells zeros and ones apart."""
    pm.Bernoulli("y", logit_p=prior("a") + prior("b") * X, observed=(X > 0).astype(float))


def one_group():
    """A scale of group effects with one group, and a flat prior."""
    effect = pm.Normal("effect", pm.Flat("mu"), pm.HalfFlat("tau"))
    pm.Normal("y", effect, 1.0, observed=Y)


def unidentified(prior=lambda name: pm.Flat(name)):
    pm.Normal("y", prior("a") + prior("b"), 1.0, observed=Y)


def fitted(make, seed, **options):
    with pm.Model() as model:
        make()
    return pymc_ngvi.fit_ngvi(model=model, random_seed=seed, posterior="gaussian", **QUIET, **options)


@two_seeds
@pytest.mark.parametrize(
    ("make", "named"),
    [(flat, {"x"}), (separated, {"a", "b"}), (one_group, {"mu", "tau_log__"}), (unidentified, {"a", "b"})],
    ids=["flat", "separated", "one group", "unidentified"],
)
def test_what_keeps_growing_is_named_with_a_cure(make, named, seed):
    """Within 120 iterations, where the limit is 10,000 and the largest sets of draws used to take 600."""
    match = r"unbounded.*standard deviations? of `.*grow.*may be improper.*proper priors"
    with pytest.warns(ConvergenceWarning, match=match):
        approx = fitted(make, seed)
    assert approx.status is Status.UNBOUNDED
    assert approx.record.n_iterations <= 120
    assert approx.record.growing
    assert set(approx.record.growing) <= named


def test_the_gaussian_that_a_student_t_begins_from_names_it_too():
    with pytest.warns(ConvergenceWarning, match=r"unbounded.*standard deviation of `x` keeps growing"):
        assert fitted(flat, 1, family="student_t").status is Status.UNBOUNDED


def proper_separated():
    separated(lambda name: pm.Normal(name, 0, 100))


def wide_and_unidentified():
    unidentified(lambda name: pm.Normal(name, 0, 1e6))


def heavy_tails():
    pm.Cauchy("far", 1e4, 1e3)
    pm.StudentT("t", nu=3, mu=0, sigma=1e5)
    pm.HalfCauchy("scale", 25)


@pytest.mark.parametrize(
    ("make", "seed"), [(proper_separated, 1), (wide_and_unidentified, 2), (heavy_tails, 1), (heavy_tails, 2)]
)
def test_wide_but_proper_posteriors_raise_no_alarm(make, seed):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a posterior far from Gaussian may stay noise-limited
        approx = fitted(make, seed)
    # A likelihood with a bend far out may seem not smooth.
    assert approx.status in (Status.CONVERGED, Status.NOISE_LIMITED, Status.NOT_SMOOTH)
    assert approx.record.growing == ()


def test_growth_that_ends_is_none():
    """By doubling to a million, and there it stays; and growth that is going on."""

    class At:
        def __init__(self, sd):
            self._sd = np.array([1.0, sd])

        def sd(self):
            return self._sd

    ended = going_on = Growth()
    for n in range(100):
        ended, going_on = ended.after(At(min(2.0**n, 2.0**20))), going_on.after(At(2.0**n))
    assert not ended.is_unbounded
    assert not ended.seems_unbounded
    assert going_on.is_unbounded
    np.testing.assert_array_equal(going_on.coordinates(), [1])
