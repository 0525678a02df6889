"""Fits of one NGVI object to one data set after the other: built once, and each the fit of a new object."""

import functools
import logging

import cloudpickle
import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest

from pytensor.compile import FunctionMaker

import pymc_ngvi

from pymc_ngvi import LogDensity
from pymc_ngvi.density import CannotReuse
from pymc_ngvi.graphs.layout import Layout

N_GROUPS, N_OBS = 50, 150
#: Functions that PyTensor may compile for a fit of a model that was not seen before.
MOST_COMPILED = 4
_RNG = np.random.default_rng(3)
GROUP = np.concatenate([np.arange(N_GROUPS), _RNG.integers(N_GROUPS, size=N_OBS - N_GROUPS)])
X = _RNG.normal(size=N_OBS)
FIRST, SECOND = (_RNG.poisson(np.exp(0.3 + 0.5 * X + _RNG.normal(0.0, 0.5, N_GROUPS)[GROUP])) for _ in range(2))


@pytest.fixture
def compilations(monkeypatch, _anew):
    """A list with an entry for each function that PyTensor makes."""
    made, original = [], FunctionMaker.__init__

    def init(self, *args, **kwargs):
        made.append(self)
        original(self, *args, **kwargs)

    monkeypatch.setattr(FunctionMaker, "__init__", init)
    return made


def glmm():
    with pm.Model(coords={"group": [f"old {i}" for i in range(N_GROUPS)]}) as model:
        x, group, y = pm.Data("x", X), pm.Data("group_of", GROUP), pm.Data("y_data", FIRST)
        a, sd = pm.Normal("a", 0.0, 2.0, shape=2), pm.HalfNormal("sd", 1.0)
        u = pm.Normal("u", 0.0, sd, dims="group")
        rate = pm.Deterministic("rate", pm.math.exp(a[0] + a[1] * x + u[group]))
        pm.Poisson("y", rate, observed=y)
    return model


def correlated():
    rng = np.random.default_rng(5)
    with pm.Model() as model:
        beta, noise = pm.Normal("beta", 0.0, 5.0, shape=2), pm.HalfNormal("noise", 2.0)
        chol, _, _ = pm.LKJCholeskyCov("chol", n=2, eta=2, sd_dist=pm.Exponential.dist(1, shape=2))
        own = pm.Normal("own", 0.0, 1.0, shape=(N_GROUPS, 2)) @ chol.T
        mean = beta[0] + own[GROUP, 0] + (beta[1] + own[GROUP, 1]) * X
        pm.Normal("y", mean, noise, observed=rng.normal(1.0 + 0.5 * X + rng.normal(0.0, 0.7, N_GROUPS)[GROUP], 0.5))
    return model


@pytest.mark.parametrize("build", [glmm, correlated])
def test_a_first_fit_reads_the_model_once_and_compiles_nearly_nothing(compilations, monkeypatch, build):
    readings, of = [], Layout.from_model

    def counted(*arguments):
        readings.append(arguments)
        return of(*arguments)

    monkeypatch.setattr(Layout, "from_model", counted)
    assert pymc_ngvi.NGVI(build(), random_seed=1).fit(progressbar=False).record.is_exact
    assert len(readings) == 1
    assert len(compilations) <= MOST_COMPILED


def test_a_second_fit_builds_nothing_and_is_the_fit_of_a_new_object(compilations):
    model = glmm()
    inference = pymc_ngvi.NGVI(model, random_seed=1, posterior="gaussian")
    first = inference.fit(progressbar=False)
    first.sample(5)
    record, mean, evaluations = first.record, first.mean_flat.copy(), first.density.n_gradients
    assert record.family == "sparse"
    assert record.searched
    assert len(compilations) > 0 < record.compile_seconds
    compilations.clear()

    repeated = inference.fit(progressbar=False)
    np.testing.assert_array_equal(repeated.mean_flat, mean)
    with model:
        pm.set_data({"y_data": SECOND})
    model.set_dim("group", N_GROUPS, [f"new {i}" for i in range(N_GROUPS)])
    second = inference.fit(progressbar=False)
    draws = second.sample(5, random_seed=1).posterior
    assert not compilations
    assert repeated.compile_seconds == second.compile_seconds == 0.0

    new = pymc_ngvi.NGVI(model, random_seed=1, posterior="gaussian").fit(progressbar=False)
    assert (second.n_gradients, second.n_hessians, second.elbo) == (new.n_gradients, new.n_hessians, new.elbo)
    assert draws.to_dataset().identical(new.sample(5, random_seed=1).posterior.to_dataset().assign_attrs(draws.attrs))
    # The first is as it was.
    assert first.record is record
    assert first.density.n_gradients == evaluations
    np.testing.assert_array_equal(first.mean_flat, mean)
    assert first.layout.coords["group"][0] == "old 0"
    assert second.layout.coords["group"][0] == "new 0"
    with pytest.raises(ValueError, match="y_data"):
        first.refine(1, progressbar=False)


def test_terms_of_an_exact_step_serve_again_where_rows_have_other_groups(compilations):
    model = glmm()
    inference = pymc_ngvi.NGVI(model, random_seed=1, posterior="exact")
    assert inference.fit(progressbar=False).record.is_exact
    compilations.clear()
    with model:
        pm.set_data({"group_of": GROUP[::-1].copy()})
    again = inference.fit(progressbar=False)
    assert not compilations
    new = pymc_ngvi.NGVI(model, random_seed=1, posterior="exact").fit(progressbar=False)
    assert again.record.is_exact
    np.testing.assert_array_equal(again.mean_flat, new.mean_flat)
    np.testing.assert_array_equal(again.sd_flat, new.sd_flat)


def test_draws_of_the_prior_are_those_of_pymc_with_the_data_of_now(compilations):
    """Compiled once for all fits of a model, and anew after pickling."""
    with pm.Model() as model:
        centre = pm.Data("centre", np.array([0.0, 50.0]))
        sd = pm.HalfNormal("sd", 2.0)
        x = pm.Normal("x", centre, sd)
    first = LogDensity(model)
    theta = first.prior_draws(20, 7)
    drawn = pm.draw([pt.log(sd), x], 20, random_seed=7)
    np.testing.assert_allclose(theta, np.column_stack(drawn), rtol=1e-12)
    copied = cloudpickle.loads(cloudpickle.dumps(first)).prior_draws(20, 7)
    np.testing.assert_allclose(copied, theta, rtol=1e-12)
    again = first.again()
    compilations.clear()
    np.testing.assert_array_equal(again.prior_draws(20, 7), theta)
    pm.set_data({"centre": np.array([0.0, -50.0])}, model=model)
    moved = again.again().prior_draws(20, 7)
    np.testing.assert_allclose(moved - theta, np.tile([0.0, 0.0, -100.0], (20, 1)), atol=1e-10)
    assert not [made for made in compilations if len(made.fgraph.outputs) > 3]  # but for initial points


EYE = np.tile(np.eye(10), (2, 1))
DATA = {"design": EYE, "group_of": np.arange(20) % 5, "censored": np.zeros(20), "centre": 1.0}


def regression():
    """Of which data decide the pattern, the initial point, and which branch of a switch is taken."""
    with pm.Model() as model:
        design, group, censored, centre = (pm.Data(name, value) for name, value in DATA.items())
        b = pm.Normal("b", 0.0, 1.0, shape=10)
        u, sd = pm.Normal("u", centre, 1.0, shape=10), pm.HalfNormal("sd", 1.0)
        eta = pt.dot(design, b) + pt.switch(pt.gt(censored, 0), sd, u[group])
        pm.Potential("potential", -pt.log1p(pt.exp(eta)).sum())
    return model


CHANGES = {
    "nothing": {},
    "values": {"design": 2.0 * EYE},
    "zeros": {"design": EYE + np.roll(EYE, 1, axis=1)},
    "indices": {"group_of": np.arange(20) % 10},
    "switch": {"censored": np.arange(20) % 2.0},
    "initial point": {"centre": 5.0},
}


@functools.cache
def built():
    return LogDensity(regression())


@pytest.mark.parametrize("change", CHANGES)
def test_what_the_data_decide_is_that_of_a_new_density(change, compilations, rng):
    model = built().model
    pm.set_data(DATA, model=model)
    old = built().again()
    theta = rng.normal(size=(2, old.n_dim))
    before = old.logp_grad(theta), old.mean_hessian(theta).values(), old.pattern
    pm.set_data(CHANGES[change], model=model)
    compilations.clear()
    again = old.again()
    found = [*again.logp_grad(theta), again.mean_hessian(theta).values(), again.pattern, again.initial_point()]
    assert not compilations or change == "switch", "rows for which data choose another branch are other functions"
    new = LogDensity(model)
    expected = [*new.logp_grad(theta), new.mean_hessian(theta).values(), new.pattern, new.initial_point()]
    for one, other in zip(found, expected, strict=True):
        if one is again.pattern:
            one, other = one.matrix.toarray(), other.matrix.toarray()
        np.testing.assert_array_equal(one, other)
    same_pattern = np.array_equal(again.pattern.matrix.toarray(), before[2].matrix.toarray())
    assert same_pattern == (change in ("nothing", "values", "initial point"))
    assert (again.n_gradients, again.n_hessians) == (2, 2) == (old.n_gradients, old.n_hessians)


def test_a_pattern_found_by_probing_is_found_again_with_other_data():
    """A loop is not understood: dense Hessians tell, which the zeros of the data change."""
    with pm.Model() as model:
        scale = pm.Data("scale", np.array([1.0] + [0.0] * 29))
        x = pm.Normal("x", 0.0, 1.0, shape=31)
        terms = pytensor.scan(lambda a, b: (a + b) ** 4, sequences=[x[:-1] * scale, x[1:]], return_updates=False)
        pm.Potential("potential", -terms.sum())
    old = LogDensity(model)
    before = old.pattern
    pm.set_data({"scale": np.ones(30)}, model=model)
    after, new = old.again().pattern, LogDensity(model).pattern
    assert before.n_entries < after.n_entries == new.n_entries


def _add_a_potential(model):
    with model:
        pm.Potential("another", -(model["a"] ** 2).sum())


def _set_an_initial_value(model):
    model.set_initval(model["a"], np.ones(2))


def _drop_an_observation(model):
    pm.set_data({"x": X[:-1], "group_of": GROUP[:-1], "y_data": FIRST[:-1]}, model=model)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_add_a_potential, "its variables, or their initial values, have changed"),
        (_set_an_initial_value, "its variables, or their initial values, have changed"),
        (_drop_an_observation, r"the shapes of .*'y_data'.* have changed \(.*\(150,\) then and \(149,\) now"),
    ],
)
def test_a_changed_model_is_built_anew_and_that_is_said(change, reason, caplog):
    model = glmm()
    inference = pymc_ngvi.NGVI(model, random_seed=1, posterior="gaussian")
    inference.fit(0, progressbar=False)
    change(model)
    with pytest.raises(CannotReuse, match=reason):
        inference._density.again()
    with caplog.at_level(logging.DEBUG, logger="pymc.ngvi"):
        again = inference.fit(0, progressbar=False)
    assert caplog.text.count("The functions of the model are built anew: ") == 1
    new = pymc_ngvi.NGVI(model, random_seed=1, posterior="gaussian").fit(0, progressbar=False)
    assert again.elbo == new.elbo
    np.testing.assert_array_equal(again.mean_flat, new.mean_flat)


def test_other_options_of_the_compilation_take_other_functions():
    density = LogDensity(regression(), "quick")
    assert density.again("quick", {}).functions is density.functions
    with pytest.raises(CannotReuse, match="other options"):
        density.again("c")
    with pytest.raises(CannotReuse, match="other options"):
        density.again("quick", {"allow_input_downcast": True})
    with pytest.raises(ValueError, match="backend should be one of"):
        density.again("fortran")
