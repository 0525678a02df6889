"""The quadratic guide: what it recognises in a model, where it expands, and what it is good for."""

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

from numpy.testing import assert_allclose
from scipy.special import expit

from pymc_ngvi import LogDensity
from pymc_ngvi.density import conditional as guide
from pymc_ngvi.density.conditional import quadratic_guide
from pymc_ngvi.families.gaussian import Partition
from pymc_ngvi.methods.reparam import reparametrised

GROUP = np.repeat(np.arange(4), [1, 2, 5, 3])
X = np.random.default_rng(5).normal(size=len(GROUP))
COUNTS = np.array([2, 0, 5, 1, 1, 3, 0, 12, 0, 0, 0])
BINARY = np.array([1, 0, 1, 0, 0, 0, 1, 0, 1, 1, 1])
LABELS = np.array([-1, -1, 0, 1, 2, 3])


def intercepts(likelihood):
    """A slope, a scale, and an effect of each of four groups; ``likelihood`` adds the observations."""
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.1, 1.1)
        s = pm.HalfNormal("s", 1.1)
        b = pm.Normal("b", 0.0, s, shape=4)
        likelihood(beta * X + b[GROUP])
    return model


LIKELIHOODS = {
    "poisson": lambda eta: pm.Poisson("y", mu=pt.exp(eta), observed=COUNTS),
    "bernoulli": lambda eta: pm.Bernoulli("y", logit_p=eta, observed=BINARY),
    "bernoulli_p": lambda eta: pm.Bernoulli("y", p=pm.math.invlogit(eta), observed=BINARY),
    "deterministic": lambda eta: pm.Poisson("y", mu=pm.Deterministic("mu", pt.exp(eta)), observed=COUNTS),
    "normal": lambda eta: pm.Normal("y", eta, 0.6, observed=COUNTS),
    "two": lambda eta: (
        pm.Poisson("y", mu=pt.exp(eta), observed=COUNTS),
        pm.Normal("z", 0.4 * eta, 0.6, observed=BINARY),
    ),
}


def density_of(likelihood):
    return LogDensity(intercepts(likelihood), backend="quick")


def made(name, reparam="rvb1"):
    return reparametrised(density_of(LIKELIHOODS[name]), Partition(LABELS), reparam)


def points(n=2):
    return 0.5 * np.random.default_rng(6).standard_normal((n, 6))


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_modes_take_one_step(name):
    """Found where the first step ends: one evaluation at the start, one there."""
    target = made(name)
    start = np.random.default_rng(7).standard_normal((2, 4))
    modes = target.transform.modes(points(), start)
    assert modes.found.all()
    assert modes.n_rounds == 2


@pytest.mark.parametrize(("name", "data"), [("poisson", COUNTS), ("bernoulli", BINARY)])
def test_modes_and_curvatures_are_those_of_working_observations(name, data):
    """The closed form of Tan (2021) for random intercepts, from the estimate of the predictors."""
    target = made(name)
    expand = {"poisson": guide._of_poisson, "bernoulli": guide._of_bernoulli}[name]
    eta, _, _ = expand(data.astype(float), GROUP)
    mean = np.exp(eta) if name == "poisson" else expit(eta)
    weight = mean if name == "poisson" else mean * (1.0 - mean)
    phi = points()
    modes = target.transform.modes(phi)
    beta, s = phi[:, :1], np.exp(phi[:, 1:2])
    precision = 1.0 / s**2 + np.bincount(GROUP, weights=weight)
    terms = data - mean + weight * (eta - beta * X)
    expected = np.stack([np.bincount(GROUP, weights=t) for t in terms]) / precision
    assert_allclose(modes.theta[:, 2:], expected, rtol=1e-10)
    assert_allclose(modes.log_det, -0.5 * np.log(precision).sum(axis=1), rtol=1e-10)


def test_the_gradient_is_that_of_the_density():
    target = made("bernoulli")
    phi, length = points(), 1e-5
    steps = length * np.eye(6)
    ends = [[target.logp_grad(phi + sign * s)[0] for sign in (1.0, -1.0)] for s in steps]
    expected = np.stack([(ahead - behind) / (2.0 * length) for ahead, behind in ends], axis=1)
    assert_allclose(target.logp_grad(phi)[1], expected, rtol=1e-6, atol=1e-6)


def test_a_normal_likelihood_is_its_own_guide():
    phi = points()
    first, second = made("normal", "rvb1"), made("normal", "rvb2")
    for one, other in zip(first.logp_grad(phi), second.logp_grad(phi), strict=True):
        assert_allclose(one, other, rtol=1e-10)
    assert_allclose(first.transform.forward(phi)[0], second.transform.forward(phi)[0], rtol=1e-10)


# --- what it refuses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("likelihood", "match"),
    [
        (lambda eta: pm.NegativeBinomial("y", mu=pt.exp(eta), alpha=2.1, observed=COUNTS), "'y' is"),
        (lambda eta: pm.Bernoulli("y", p=pm.math.invprobit(eta), observed=BINARY), "canonical link, logit_p=eta"),
        (lambda eta: pm.Poisson("y", mu=pt.softplus(eta), observed=COUNTS), r"canonical link, mu=exp\(eta\)"),
        (lambda eta: pm.Potential("y", -pt.sum(eta**2)), "no observed variables"),
    ],
)
def test_other_models_are_refused(likelihood, match):
    with pytest.raises(ValueError, match=match) as caught:
        quadratic_guide(density_of(likelihood), Partition(LABELS))
    assert "reparam='rvb2'" in str(caught.value)
