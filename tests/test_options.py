"""Options of a fit: every wrong one is refused before anything is computed, by name, with what to use instead."""

import dataclasses
import inspect

import numpy as np
import pymc as pm
import pytest

from pymc.variational.inference import Inference
from pymc.variational.opvi import ObjectiveFunction

import pymc_ngvi.options

from pymc_ngvi import NGVI, fit_ngvi, registry
from pymc_ngvi.options import FitOptions, check_n, refuse_unknown

#: Every option that is refused by name, and what its error has to mention.
REFUSED = {
    "obj_n_mc": "`n_draws`.*`max_draws`",
    "tf_n_mc": "`n_draws` or `max_draws`",
    "obj_optimizer": "no learning rate; choose a rule with `step`",
    "test_optimizer": "nothing to optimise",
    "more_obj_params": "only the parameters of the approximation",
    "more_tf_params": "no test functions",
    "more_updates": "`callbacks`",
    "more_replacements": "pm.set_data",
    "total_grad_norm_constraint": "nothing is to be clipped",
    "fn_kwargs": "`compile_kwargs`",
    "seed": "`random_seed`",
    "random_state": "`random_seed`",
    "draws": "approx.sample",
    "learning_rate": "need none",
    "cost_part_grad_scale": "not split",
    "scale_cost_to_minibatch": "full data",
    "local_rv": "share one approximation",
}


def options(**changed):
    defaults = {"family": None, "update": None, "estimator": None, "step": None, "tol": 0.05}
    return FitOptions.validated(**{**defaults, "n_draws": 8, "max_draws": 1024, **changed})


def normal_model():
    with pm.Model() as model:
        pm.Normal("x")
    return model


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tol",
    [0, -0.1, np.nan, np.inf, -np.inf, None, "0.05", [0.05], np.array([0.05, 0.1])],
    ids=["zero", "negative", "nan", "inf", "minus-inf", "none", "text", "list", "array"],
)
def test_tol_should_be_positive(tol):
    with pytest.raises(ValueError, match=r"^tol is in nats of ELBO and should be a positive number; got "):
        options(tol=tol)


@pytest.mark.parametrize("name", ["n_draws", "max_draws"])
@pytest.mark.parametrize(
    "value",
    [0, 1, -8, 3, 12, 8.0, True, "8", None, [8]],
    ids=["zero", "one", "negative", "odd", "even", "float", "bool", "text", "none", "list"],
)
def test_draws_should_be_powers_of_two(name, value):
    with pytest.raises(ValueError, match=rf"^{name} should be a power of 2, at least 2 .* got "):
        options(**{name: value})


def test_first_set_is_no_larger_than_the_largest():
    with pytest.raises(ValueError, match=r"max_draws=16 is below n_draws=32; raise it or lower n_draws"):
        options(n_draws=32, max_draws=16)
    assert options(n_draws=32, max_draws=32).max_draws == 32


def test_numbers_of_numpy_are_numbers():
    o = options(tol=np.float32(0.5), n_draws=np.int64(2), max_draws=np.uint8(4))
    assert (type(o.tol), type(o.n_draws), type(o.max_draws)) == (float, int, int)
    assert (o.tol, o.n_draws, o.max_draws) == (0.5, 2, 4)


def test_options_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        options().tol = 1.0


@pytest.mark.parametrize("n", [-1, 1.5, 2.0, True, False, None, "3", np.nan, [3]], ids=repr)
def test_broken_n(n):
    with pytest.raises(ValueError, match=r"^n is the most iterations, a whole number of at least 0; got "):
        check_n(n)


@pytest.mark.parametrize("n", [0, 3, 10_000, np.int32(7)])
def test_good_n(n):
    assert check_n(n) == n
    assert type(check_n(n)) is int


# --- the four axes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", ["family", "update", "estimator", "step"])
def test_unknown_name_on_an_axis_lists_the_valid_ones(axis):
    with pytest.raises(ValueError, match=rf"^Unknown {axis} 'nonsense': Valid: ") as error:
        options(**{axis: "nonsense"})
    assert all(repr(name) in str(error.value) for name in registry.AXES[axis])


def test_near_miss_is_suggested():
    with pytest.raises(ValueError, match="Unknown family 'diagnal': did you mean 'diagonal'"):
        options(family="diagnal")


@pytest.mark.parametrize("row", registry.ALLOWED, ids="-".join)
def test_every_allowed_row_can_be_chosen(row):
    choice = options(**dict(zip(("family", "update", "estimator", "step"), row, strict=True))).choice
    assert (choice.family, choice.update, choice.estimator, choice.step) == row
    assert all(name in registry.AXES[axis] for axis, name in vars(choice).items())


@pytest.mark.parametrize("family", registry.AXES["family"])
def test_every_family_has_defaults(family):
    assert options(family=family).choice.family == family


def test_default_is_the_dense_gaussian():
    assert options().choice == registry.Choice("full", "natural", "price", "adaptive")


def test_combination_that_is_not_allowed_lists_those_that_are(monkeypatch):
    monkeypatch.setattr(registry, "ALLOWED", (("full", "natural", "price", "adaptive"),))
    with pytest.raises(ValueError, match=r"family='diagonal', step='adaptive' don't go together\. Allowed .*: full, "):
        options(family="diagonal", step="adaptive")


# --- names ------------------------------------------------------------------------------------------------------------


def test_the_table_above_is_complete():
    assert set(REFUSED) == set(pymc_ngvi.options._REFUSED)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("through", ["pm.fit", "inf_kwargs", "fit_ngvi", "NGVI.fit"])
def test_refused_by_name_with_a_replacement(name, through):
    model = normal_model()
    calls = {
        "pm.fit": lambda: pm.fit(3, "ngvi", model, **{name: 1}),
        "inf_kwargs": lambda: pm.fit(3, "ngvi", model, inf_kwargs={name: 1}),
        "fit_ngvi": lambda: fit_ngvi(3, model=model, **{name: 1}),
        "NGVI.fit": lambda: NGVI(model).fit(3, **{name: 1}),
    }
    with pytest.raises(TypeError, match=rf"^method 'ngvi' does not take {name}=1: .*{REFUSED[name]}"):
        calls[through]()


def test_every_option_of_pymc_is_known():
    """Each option that ``pm.fit`` hands down is taken or refused with a replacement: none is called unknown."""
    of_pymc = {
        *inspect.signature(pm.fit.__wrapped__).parameters,
        *inspect.signature(Inference.fit).parameters,
        *inspect.signature(ObjectiveFunction.step_function).parameters,
    } - {"self", "method", "inf_kwargs", "kwargs", "model", "n"}
    assert {"obj_n_mc", "start_sigma", "callbacks", "backend"} <= of_pymc, "looked at the right functions"
    taken = {*inspect.signature(NGVI.__init__).parameters, *inspect.signature(NGVI.fit).parameters}
    assert of_pymc - taken <= set(REFUSED)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("randomseed", "random_seed"),
        ("callback", "callbacks"),
        ("max_draw", "max_draws"),
        ("start_sigmas", "start_sigma"),
    ],
)
def test_misspelt_option_is_suggested(name, near):
    with pytest.raises(TypeError, match=rf"does not know the option '{name}': did you mean '{near}'\?"):
        fit_ngvi(3, model=normal_model(), **{name: 1})


@pytest.mark.parametrize("name", ["self", "kwargs", "args"])
def test_names_of_the_signature_are_no_options(name):
    with pytest.raises(TypeError, match=f"does not know the option '{name}'"):
        refuse_unknown({name: 1}, NGVI.__init__, NGVI.fit)
