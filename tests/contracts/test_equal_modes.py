"""Modes that are equal by symmetry: found where q covers one of them, and nowhere else."""

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

from gaussian import SEEDS, fit
from numpy.testing import assert_allclose

from pymc_ngvi import LogDensity
from pymc_ngvi.families import DiagonalState, FullState, MixtureState
from pymc_ngvi.results.diagnosis import equal_modes, families_of
from pymc_ngvi.results.distributions import distribution_of

pytestmark = pytest.mark.usefixtures("_one_blas_thread")


def place(model, sd=0.05, **values):
    """Return a narrow q about constrained values, and its log density."""
    density = LogDensity(model)
    point = density.layout.unflatten(density.initial_point())
    for variable in density.layout.variables:
        if variable.name in values:
            transform = model.rvs_to_transforms[model[variable.name]]
            value = np.asarray(values[variable.name], dtype=float)
            point[variable.value_name] = value if transform is None else transform.forward(pt.constant(value)).eval()
    q = DiagonalState(density.layout.flatten(point), np.full(density.n_dim, sd))
    return density, q


def found_in(density, q, seed=1, **options):
    theta = q.draws(np.random.default_rng(seed).standard_normal((8, q.n_dim + q.n_uniform)))
    return equal_modes(density, distribution_of(q), theta, density.layout, **options)


def normal_mixture(k, *, weights=None, order=False, extra=False):
    y = np.random.default_rng(1).normal(size=40) + np.repeat(3.0 * np.arange(4), 10)
    ordered = {"transform": pm.distributions.transforms.ordered} if order else {}
    with pm.Model() as model:
        w = pm.Dirichlet("w", np.ones(k)) if weights is None else np.array(weights)
        mu = pm.Normal("mu", 0.0, 5.0, shape=k, initval=np.arange(float(k)), **ordered)
        sigma = pm.HalfNormal("sigma", 2.0, shape=k)
        slope = pm.Normal("slope", 0.0, 2.0, shape=k) if extra else 0.0
        design = np.random.default_rng(2).normal(size=(40, k))
        pm.NormalMixture("y", w=w, mu=mu + (pt.dot(design, slope)[:, None] if extra else 0.0), sigma=sigma, observed=y)
    return model


@pytest.mark.parametrize(("k", "number"), [(2, 2), (4, 24)])
def test_labels_of_a_mixture_are_exchanged_with_its_weights(k, number):
    w = np.arange(1.0, k + 1.0)
    density, q = place(normal_mixture(k), w=w / w.sum(), mu=3.0 * np.arange(k), sigma=np.linspace(1.0, 2.0, k))
    (found,), n_log_p = found_in(density, q)
    assert (found.kind, found.names, found.number) == ("labels", ("w", "mu", "sigma"), number)
    assert n_log_p < 80


def test_a_vector_that_is_as_long_by_chance_stays_as_it_is():
    density, q = place(normal_mixture(3, weights=[1 / 3] * 3, extra=True), mu=[0.0, 3.0, 6.0], slope=[1.0, 2.0, 3.0])
    (found,), _ = found_in(density, q)
    assert (found.names, found.number) == (("mu", "sigma"), 6)


@pytest.mark.parametrize("weights", [None, [0.4999, 0.5001]])
def test_an_order_or_known_weights_tell_labels_apart(weights):
    density, q = place(normal_mixture(2, weights=weights, order=weights is None), mu=[0.0, 3.0], w=[0.3, 0.7])
    assert found_in(density, q)[0] == ()


def test_only_labels_with_the_same_weight_are_exchanged():
    density, q = place(normal_mixture(4, weights=[0.3, 0.3, 0.2, 0.2]), mu=[0.0, 3.0, 6.0, 9.0])
    (found,), _ = found_in(density, q)
    assert found.number == 4


def test_a_probability_turns_to_its_complement_as_two_labels_are_exchanged():
    y = np.random.default_rng(1).normal(size=20)
    with pm.Model() as model:
        w = pm.Beta("w", 2.0, 2.0)
        mu = pm.Normal("mu", 0.0, 5.0, shape=2)
        pm.NormalMixture("y", w=pt.stack([w, 1.0 - w]), mu=mu, sigma=1.0, observed=y)
    density, q = place(model, w=0.3, mu=[0.0, 3.0])
    (found,), _ = found_in(density, q)
    assert (found.kind, found.number) == ("labels", 2)
    assert set(found.names) == {"w", "mu"}


def test_both_axes_of_a_transition_matrix_are_exchanged():
    """p(y_1, ..., y_n) of a Markov chain whose states are seen through their means only."""
    y = np.random.default_rng(1).normal(size=8)
    with pm.Model() as model:
        move = pm.Dirichlet("move", np.ones((2, 2)), shape=(2, 2))
        mu = pm.Normal("mu", 0.0, 5.0, shape=2)
        a = pt.exp(-((y[0] - mu) ** 2)) * 0.5
        for value in y[1:]:
            a = pt.dot(a, move) * pt.exp(-((value - mu) ** 2))
        pm.Potential("y", pt.log(a.sum()))
    density, q = place(model, move=[[0.9, 0.1], [0.3, 0.7]], mu=[-1.0, 2.0])
    (found,), _ = found_in(density, q)
    assert (found.names, found.number) == (("move", "mu"), 2)


def factors(n_factors, *, positive=False):
    rng = np.random.default_rng(7)
    y = rng.normal(size=(12, 4))
    with pm.Model() as model:
        factor = pm.Normal("factor", shape=(12, n_factors))
        load = (pm.HalfNormal if positive else pm.Normal)("load", sigma=1.5, shape=(4, n_factors))
        pm.Normal("y", pt.dot(factor, load.T), pm.HalfNormal("sigma", 1.0, shape=4), observed=y)
    return model


def at_factors(n_factors, **options):
    rng = np.random.default_rng(8)
    values = {"factor": rng.normal(size=(12, n_factors)), "load": 1.0 + rng.random((4, n_factors))}
    return place(factors(n_factors, **options), **values)


def test_the_signs_and_the_labels_of_factors_are_counted():
    found, _ = found_in(*at_factors(1))
    assert [(f.kind, f.names, f.number, f.by_label) for f in found] == [("sign", ("factor", "load"), 2, False)]
    found, _ = found_in(*at_factors(3))
    assert [(f.kind, f.number, f.by_label) for f in found] == [("labels", 6, False), ("sign", 8, True)]
    found, _ = found_in(*at_factors(1, positive=True))
    assert found == ()


def test_a_sign_of_three_variables_is_found_among_others():
    """Items with a slope of unknown sign: logit p = a (theta - b)."""
    rng = np.random.default_rng(3)
    with pm.Model() as model:
        theta, b = pm.Normal("theta", shape=10), pm.Normal("b", shape=5)
        a, level = pm.Normal("a"), pm.Normal("level")
        pm.Bernoulli("y", logit_p=level + a * (theta[:, None] - b), observed=rng.random((10, 5)) < 0.5)
    density, q = place(model, theta=rng.normal(size=10), b=rng.normal(size=5), a=1.0, level=0.5)
    (found,), _ = found_in(density, q)
    assert (found.kind, set(found.names), found.number) == ("sign", {"theta", "b", "a"}, 2)


def prior_only():
    with pm.Model() as model:
        pm.Normal("a", shape=3)
        pm.HalfNormal("sd", shape=3)
        pm.Dirichlet("w", np.ones(3))
    return model


@pytest.mark.parametrize("seed", SEEDS)
def test_a_symmetric_posterior_with_one_mode_is_no_finding(seed):
    approx = fit(prior_only(), random_seed=seed)
    assert not any("equal modes" in reason for reason in approx.diagnose(draws=500, random_seed=seed).reasons)
    density = approx.density
    moved = DiagonalState(approx.mean_flat + 3.0 * np.eye(density.n_dim)[0], approx.sd_flat)
    assert [(f.kind, f.number) for f in found_in(density, moved, seed)[0]] == [("labels", 2), ("sign", 2)]


def sign_of_one():
    with pm.Model() as model:
        theta = pm.Normal("theta", 0.0, 3.0)
        pm.Normal("y", theta**2, 0.4, observed=4.0)
    return model


def test_a_mixture_that_covers_both_signs_is_no_finding():
    density = LogDensity(sign_of_one())
    one, other = (FullState(np.array([m]), np.array([[0.1]])) for m in (2.0, -2.0))
    assert found_in(density, MixtureState.of([one, other], np.log([0.6, 0.4])))[0] == ()
    assert len(found_in(density, MixtureState.of([one, one], np.log([0.6, 0.4])))[0]) == 1
    assert len(found_in(density, one)[0]) == 1


def test_regressions_with_group_effects_have_none():
    rng = np.random.default_rng(3)
    group, x = np.repeat(np.arange(8), 6), rng.normal(size=(48, 8))
    with pm.Model() as model:
        mu, sd = pm.Normal("mu", 0.0, 3.0), pm.HalfNormal("sd", 1.0)
        effect, beta = pm.Normal("effect", 0.0, sd, shape=8), pm.Normal("beta", 0.0, 2.0, shape=8)
        pm.Bernoulli("y", logit_p=mu + effect[group] + x @ beta, observed=rng.random(48) < 0.7)
    density, q = place(model, mu=1.0, effect=rng.normal(size=8), beta=3.0 * rng.normal(size=8))
    assert found_in(density, q)[0] == ()


@pytest.mark.parametrize("model", ["mixture", "factors", "prior"])
def test_images_keep_volumes_and_come_back(model):
    """Else a symmetry of log p were none of the posterior."""
    made = {"mixture": normal_mixture(3), "factors": factors(2), "prior": prior_only()}[model]
    layout = LogDensity(made).layout
    identity = np.eye(layout.n_dim)
    for member in (m for family in families_of(layout) for m in family.members):
        assert_allclose(member(member(identity)), identity, atol=1e-12)
        assert_allclose(abs(np.linalg.det(member(identity))), 1.0, rtol=1e-9)


# --- in the report ---


@pytest.mark.parametrize("seed", SEEDS)
def test_the_diagnosis_and_the_summary_name_what_is_symmetric(seed):
    approx = fit(sign_of_one(), random_seed=seed, start={"theta": 2.0}, start_sigma=0.1)
    diagnosis = approx.diagnose()
    (reason,) = diagnosis.reasons
    assert "`theta` changes sign: the approximation covers one of 2 equal modes" in reason
    assert "pm.HalfNormal" in reason
    summary = " ".join(str(approx.summary()).split())
    assert "the approximation covers one of 2 equal modes" in summary
    assert "Not reliable" in summary
