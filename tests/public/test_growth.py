"""Improper posteriors: said to be so, early and by name; wide but proper ones are not taken for such."""

import warnings

import numpy as np
import pymc as pm
import pytest

import pymc_ngvi

from pymc_ngvi import ConvergenceWarning, Status

pytestmark = pytest.mark.usefixtures("_one_blas_thread")

two_seeds = pytest.mark.parametrize("seed", [1, 2], ids=["seed1", "seed2"])
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
    match = r"unbounded.*(standard deviations? of `.*grow.*may be improper|is improper: .*`).*proper priors"
    with pytest.warns(ConvergenceWarning, match=match):
        approx = fitted(make, seed)
    assert approx.status is Status.UNBOUNDED
    assert approx.record.n_iterations <= 120
    assert approx.record.growing
    assert set(approx.record.growing) <= named
    assert {name.removesuffix("_log__") for name in named} >= set(approx.record.improper)


def in_groups(n_groups, *, centred=True, mean=lambda: pm.Flat("mu"), jeffreys=False):
    """A regression on a mean and effects of groups whose scale has a flat prior."""
    g = np.repeat(np.arange(n_groups), 10)
    mu, tau, sd = mean(), pm.HalfFlat("tau"), pm.HalfNormal("sd", 1.0)
    if jeffreys:
        pm.Potential("of tau", -pm.math.log(tau))
    effects = pm.Normal("z", shape=n_groups) * tau if not centred else pm.Normal("a", 0.0, tau, shape=n_groups)
    noise = np.random.default_rng(1).standard_normal(len(g))
    pm.Normal("y", mu + effects[g], sd, observed=noise + g)


def proper_mean():
    return pm.Normal("mu", 0.0, 10.0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: in_groups(1),
        lambda: in_groups(1, mean=proper_mean),
        lambda: in_groups(1, mean=proper_mean, centred=False),
        lambda: in_groups(2),
        lambda: in_groups(5, mean=proper_mean, jeffreys=True),
    ],
    ids=["one group", "and a proper mean", "not centred", "two groups", "a tail at 0"],
)
def test_an_improper_posterior_is_named_and_nothing_follows_it(make):
    """Some of these Gaussians converge, and pools after them would be taken for posteriors, after half a minute."""
    with pm.Model() as model:
        make()
    with pytest.warns(ConvergenceWarning, match=r"unbounded.*does not fall off with `tau`\..*proper priors"):
        approx = pymc_ngvi.fit_ngvi(model, random_seed=1, **QUIET)
    assert approx.record.improper == ("tau",)
    assert approx.record.n_iterations <= 120
    assert not approx.record.is_pool
    assert approx.diagnose().verdict == "not reliable"


@pytest.mark.parametrize("n_groups", [3, 5])
def test_proper_posteriors_with_flat_priors_are_not_improper(n_groups):
    """With three groups the posterior of their standard deviation has no mean, but an integral."""
    approx = fitted(lambda: in_groups(n_groups), 1)
    assert approx.converged
    assert approx.record.improper == ()


LARGE = 1e8 * (3.0 + 2.0 * X + np.random.default_rng(2).standard_normal(len(X)))


@pytest.mark.parametrize(
    "prior", [lambda name: pm.Flat(name), lambda name: pm.Normal(name, 0.0, 1e9)], ids=["flat", "wide"]
)
@pytest.mark.parametrize("scale", [lambda: 1e8, lambda: pm.HalfNormal("sd", 1e9)], ids=["given", "unknown"])
def test_a_regression_of_large_numbers_fits(prior, scale):
    """Standard deviations grow by orders of magnitude, and then stay."""
    approx = fitted(lambda: pm.Normal("y", prior("a") + prior("b") * X, scale(), observed=LARGE), 1)
    assert approx.converged
    least_squares = np.polynomial.polynomial.polyfit(X, LARGE, 1)
    np.testing.assert_allclose(approx.mean_flat[:2], least_squares, rtol=0.03)  # .04 sd of the slope; priors shrink


def test_the_gaussian_that_a_student_t_begins_from_names_it_too():
    with pytest.warns(ConvergenceWarning, match=r"unbounded.*does not fall off with `x`"):
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
