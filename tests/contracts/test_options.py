"""Options of a fit: every wrong one is refused before anything is computed, by name, with what to use instead."""

import dataclasses
import inspect
import re
import warnings

from typing import Never, get_args

import numpy as np
import pymc as pm
import pytest

from matrix import family_object, fit, make_rule
from pymc.variational.inference import Inference
from pymc.variational.opvi import ObjectiveFunction
from targets import logistic

from pymc_ngvi import NGVI, ConvergenceWarning, fit_ngvi
from pymc_ngvi.core.draws import BASE_DRAWS
from pymc_ngvi.families import COMPONENTS, FAMILIES
from pymc_ngvi.fitting import options as choices
from pymc_ngvi.fitting import options as registry
from pymc_ngvi.fitting.options import AUTO, FitOptions, refuse_unknown

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
    "chains": r"approx\.sample\(draws, chains=4\)",
    "cores": "OMP_NUM_THREADS",
    "tune": "`n` is the maximum number of iterations",
    "target_accept": "`step`",
    "init": "`start_sigma`",
    "initvals": "`start`",
    "learning_rate": "rules with a constant step take `step_size`",
    "cost_part_grad_scale": "not split",
    "scale_cost_to_minibatch": "always scaled to their `total_size`",
    "local_rv": "share one approximation",
}


#: A value of each option of a step rule that is valid wherever the rule takes it.
OF_RULES = {
    "n_draws": 16,
    "max_draws": 64,
    "base_draws": "antithetic",
    "step_size": 0.5,
    "step_decay": 0.25,
    "window": 20,
    "n_components": 3,
}
options = FitOptions


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


@pytest.mark.parametrize("name", ["n_draws", "max_draws", "window"])
@pytest.mark.parametrize(
    "value", [0, -8, 8.0, True, "8", [8]], ids=["zero", "negative", "float", "bool", "text", "list"]
)
def test_counts_should_be_whole_and_positive(name, value):
    with pytest.raises(ValueError, match=rf"^{name} should be a whole number of at least 1; got "):
        options(**{name: value})


@pytest.mark.parametrize("step", ["adaptive", "decay", "snngm"])
def test_antithetic_draws_should_be_even(step):
    with pytest.raises(ValueError, match=r"^n_draws should be even \(antithetic draws come in pairs\); got 7\.$"):
        options(step=step, base_draws="antithetic", n_draws=7)
    assert options(step=step, base_draws="antithetic", n_draws=6).n_draws == 6


#: What names each step rule: itself, or the family that implies it.
NAMED = {rule: f"step={rule!r}" for rule in registry.AXES["step"]}
NAMED |= {own: f"family={name!r}" for name, f in FAMILIES.items() if (own := f.traits.own_rule)}


def naming(rule):
    """Return the option by which a rule is chosen."""
    return dict([NAMED[rule].replace("'", "").split("=")])


each_rule = pytest.mark.parametrize("rule", NAMED)


@each_rule
@pytest.mark.parametrize("n_draws", [1, 2, 3, 5, 8])
def test_every_number_of_draws_is_refused_or_can_be_drawn(rule, n_draws):
    """Without a kind of draws: what passes here must not fail later."""
    if "n_draws" not in registry.RULES[rule].takes:
        with pytest.raises(ValueError, match=rf"'{rule}' does not use n_draws={n_draws}; it takes none"):
            options(**naming(rule), n_draws=n_draws)
        return
    if rule in registry.ON_FIXED_DRAWS and n_draws & (n_draws - 1 or 1):
        with pytest.raises(ValueError, match="n_draws should be"):
            options(**naming(rule), n_draws=n_draws)
        return
    target, validated = logistic(), options(**naming(rule), n_draws=n_draws)
    rule = make_rule(target, validated.choice, seed=1, n_draws=n_draws)
    state = rule.step(rule.init(family_object(validated.choice.family, 5).from_scale(np.zeros(5), np.ones(5))))
    assert state.n_draws >= n_draws


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (value, rf"step_size should be a positive number; got {value!r}")
        for value in (0, -1.0, np.inf, np.nan, True, "1")
    ],
)
def test_step_size_should_be_positive(value, message):
    with pytest.raises(ValueError, match=message):
        options(step="adam", step_size=value)
    assert options(step="adam", step_size=np.float32(0.5)).step_size == 0.5


@pytest.mark.parametrize("value", [-0.1, 1.5, np.nan, True, False, "0.5"], ids=str)
def test_step_decay_is_an_exponent(value):
    with pytest.raises(ValueError, match=r"^step_decay is an exponent from 0 \(no decay\) to 1; got "):
        options(step="adam", step_decay=value)


@pytest.mark.parametrize("stl", [0, 1, None, "yes"], ids=repr)
def test_stl_is_yes_or_no(stl):
    with pytest.raises(ValueError, match=r"^stl should be True or False; got "):
        options(stl=stl)
    assert options().stl is True
    assert options(stl=np.False_).stl is False


# --- options of the step rules ----------------------------------------------------------------------------------------


@each_rule
@pytest.mark.parametrize("name", OF_RULES)
def test_an_option_goes_with_some_rules_and_others_say_which(rule, name):
    """Those that are taken arrive at the rule; no rule takes a name that it does not have."""
    rules = registry.RULES
    given = {name: OF_RULES[name]}
    if name in rules[rule].takes:
        assert getattr(options(**naming(rule), **given), name) == OF_RULES[name]
        assert options(**naming(rule), **given).of_rule() == given
        make_rule(logistic(), options(**naming(rule)).choice, seed=1, **given)  # TypeError for a name it does not have
        return
    with pytest.raises(ValueError, match=rf"^{NAMED[rule]} does not use {name}={OF_RULES[name]!r}; it takes ") as error:
        options(**naming(rule), **given)
    own, others = str(error.value).split(f" {name} goes with ")
    assert all(taken in own for taken in rules[rule].takes)
    expected = [next(iter(naming(other).values())) for other, kind in rules.items() if name in kind.takes]
    assert re.findall(r"'(\w+)'", others) == expected


@pytest.mark.parametrize("max_draws", [2, 4])
def test_fewer_draws_than_the_default_first_set_are_honoured(max_draws):
    """`max_draws` alone, below the size that the first set has by default."""
    target, sizes = logistic().fresh(), []
    fit(target, registry.choose(), seed=1, n=5, max_draws=max_draws, observe=lambda s: sizes.append(s.rule.n_draws))
    assert max(sizes) <= max_draws


# --- which factor, which blocks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chosen", "factor"),
    [
        ({}, "covariance"),
        ({"update": "cholesky"}, "covariance"),
        ({"update": "cholesky_precision"}, "precision"),
        ({"update": "euclidean"}, "precision"),
        ({"update": "euclidean", "factor": "covariance"}, "covariance"),
        ({"update": "euclidean", "factor": "precision"}, "precision"),
        ({"update": "euclidean", "family": "diagonal"}, "covariance"),
        ({"update": "euclidean", "family": "block", "factor": "covariance"}, "covariance"),
        ({"update": "natural", "factor": "covariance"}, "covariance"),
        ({"update": "cholesky_precision", "factor": "precision"}, "precision"),
    ],
    ids=str,
)
def test_factor(chosen, factor):
    assert options(**chosen).factor == factor


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"factor": "cov"}, r"^factor should be 'covariance' or 'precision'; got 'cov'"),
        (
            {"update": "natural", "factor": "precision"},
            r"^update='natural' works on a factor of the covariance; factor='precision' goes with update='euclidean' "
            r"and update='cholesky_precision'\.$",
        ),
        (
            {"update": "cholesky_precision", "factor": "covariance"},
            r"^update='cholesky_precision' works on a factor of the precision; factor='covariance' goes with "
            r"update='euclidean'\.$",
        ),
        (
            {"update": "euclidean", "family": "diagonal", "factor": "precision"},
            r"^factor='precision' is for family='full': for 'diagonal' it would be the same family again\.$",
        ),
    ],
    ids=["unknown", "natural", "cholesky_precision", "diagonal"],
)
def test_factor_that_does_not_go_with_the_update(chosen, message):
    with pytest.raises(ValueError, match=message):
        options(**chosen)


@pytest.mark.parametrize("family", [None, "full", "diagonal"])
def test_blocks_are_those_of_the_block_family(family):
    with pytest.raises(
        ValueError, match=rf"^blocks are those of family='block'; the family is '{family or 'full'}'\.$"
    ):
        options(family=family, blocks=[["x"]])
    assert options(family="block", blocks=[["x"]]).blocks == [["x"]]


# --- changing them ----------------------------------------------------------------------------------------------------


def test_changed_options_are_checked_anew():
    before = options(family="block", blocks=[["x"]], n_draws=64)
    with pytest.raises(ValueError, match="max_draws=32 is below n_draws=64"):
        before.changed(max_draws=32)
    with pytest.raises(ValueError, match="does not use window=5"):
        before.changed(window=5)
    assert before.changed(max_draws=128).blocks == [["x"]]


def test_first_set_is_no_larger_than_the_largest():
    with pytest.raises(ValueError, match=r"max_draws=16 is below n_draws=32; raise it or lower n_draws"):
        options(n_draws=32, max_draws=16)
    assert options(n_draws=32, max_draws=32).max_draws == 32


def test_numbers_of_numpy_are_numbers():
    o = options(tol=np.float32(0.5), n_draws=np.int64(2), max_draws=np.uint8(4))
    assert (type(o.tol), type(o.n_draws), type(o.max_draws)) == (float, int, int)
    assert (o.tol, o.n_draws, o.max_draws) == (0.5, 2, 4)


# --- the four axes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("diagnal", "diagonal"),
        ("meanfield", "diagonal"),
        ("mean_field", "diagonal"),
        ("Mean-Field", "diagonal"),
        ("full-rank", "full"),
        ("fullrank_advi", "full"),
        ("mvn", "full"),
        ("laplace", "full"),
        ("Full", "full"),
        ("Student-t", "student_t"),
        ("gmm", "mixture"),
    ],
)
def test_near_misses_and_other_packages_words_are_suggested(given, meant):
    with pytest.raises(ValueError, match=rf"^Unknown family '{given}': did you mean '{meant}'\? Valid: 'full'"):
        options(family=given)


# --- through every door -----------------------------------------------------------------------------------------------

#: Options as a user gives them, and what has to have come of each.
GIVEN = [
    {"family": "block", "blocks": [["x", "y"]], "estimator": "price"},
    {"family": "block", "blocks": [["x[0]", "y"], ["x[1]"]], "estimator": "quadrature"},
    {"update": "euclidean", "factor": "covariance", "step": "sgd", "step_size": 1e-4, "step_decay": 0.5, "window": 5},
    {"update": "cholesky_precision", "factor": "precision", "base_draws": "plain", "n_draws": 7, "max_draws": 9},
    {"step": "snngm", "n_draws": 3, "base_draws": "plain", "stl": False, "estimator": "stein"},
    {"step": "proximal", "step_size": 0.5, "step_decay": 0.1, "base_draws": "sobol", "n_draws": 4},
]


WAYS = ("pm.fit", "fit_ngvi", "NGVI", "configure", "pm.fit of NGVI")
#: Each set of options in two ways, each way with two sets or more.
GIVEN_THROUGH = [(given, WAYS[j % 5]) for i, given in enumerate(GIVEN) for j in (i, i + 2)]


@pytest.mark.parametrize(("given", "through"), GIVEN_THROUGH, ids=str)
def test_every_option_arrives_whichever_way_it_is_given(given, through):
    """The same bits by every way, and a fit that has these options."""
    rest = {"progressbar": False, "backend": "quick"}
    with pm.Model() as model:
        pm.Normal("y", pm.Normal("x", [1.0, 2.0], shape=2).sum(), 0.5)

    def configured():
        inference = NGVI(model, random_seed=1)
        inference.configure(**given)
        return inference.fit(3, **rest)

    ways = {
        "pm.fit": lambda: pm.fit(3, "ngvi", model, random_seed=1, **given, **rest),
        "fit_ngvi": lambda: fit_ngvi(3, model=model, random_seed=1, **given, **rest),
        "NGVI": lambda: NGVI(model, random_seed=1, **given).fit(3, **rest),
        "configure": configured,
        "pm.fit of NGVI": lambda: pm.fit(3, NGVI(model), model, random_seed=1, **given, **rest),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        approx = ways[through]()
    expected = options(**given, posterior="gaussian")
    assert approx._session.options == expected
    assert {name: getattr(approx.record, name) for name in registry.AXES} == vars(expected.choice)
    state = {"precision": "FullPrecisionState", "covariance": "FullState"}[expected.factor]
    assert type(approx.q).__name__ == ("BlockState" if "blocks" in given else state)
    if "blocks" in given:
        apart = {"x", "y"} if len(given["blocks"]) == 1 else {"x[0]", "y"}
        labels = [approx.layout.label(i) for i in range(3)]
        block = approx.q.structure.labels
        together = {label for label, b in zip(labels, block, strict=True) if b == block[labels.index("y")]}
        assert together == ({"x[0]", "x[1]", "y"} if apart == {"x", "y"} else {"x[0]", "y"})


def test_configuring_checks_options_together():
    inference = NGVI(normal_model(), step="adam", step_size=0.1)
    with pytest.raises(ValueError, match=r"step='adaptive' does not use step_size=0\.1"):
        inference.configure(step="adaptive")
    inference.configure(step="sgd", n_draws=2)
    assert (inference._options.choice.step, inference._options.step_size, inference._options.n_draws) == ("sgd", 0.1, 2)


@pytest.mark.parametrize("change", [{"factor": "covariance"}, {"family": "block"}], ids=str)
def test_configuring_another_kind_of_state_makes_another_approximation(change):
    inference = NGVI(normal_model(), update="euclidean", random_seed=1)
    before = inference.approx
    assert type(before.q).__name__ == "FullPrecisionState"
    inference.configure(**change)
    assert inference.approx is not before
    assert type(inference.approx.q).__name__ == ("FullState" if "factor" in change else "BlockState")


# --- signatures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [NGVI.__init__, fit_ngvi], ids=["NGVI", "fit_ngvi"])
def test_signatures_show_the_options_as_they_are_declared(function):
    """Same names, in the same order, with the same types and defaults."""
    declared = {f.name: (f.type, f.default) for f in dataclasses.fields(FitOptions) if f.name != "family_reason"}
    shown = inspect.signature(function).parameters
    options = [p for p in shown.values() if p.name in declared]
    assert {p.name: (p.annotation, p.default) for p in options} == declared
    assert [p.name for p in options] == list(declared)
    assert shown["unknown"].annotation is Never, "type checkers refuse misspelt names"


def test_fit_ngvi_shows_what_the_constructor_and_the_fit_take():
    shown = dict(inspect.signature(fit_ngvi).parameters)
    del shown["model_or_n"]
    taken = dict(inspect.signature(NGVI.__init__).parameters) | dict(inspect.signature(NGVI.fit).parameters)
    assert shown.keys() == taken.keys() - {"self"}
    assert {n: (p.annotation, p.default) for n, p in shown.items()} == {
        n: (p.annotation, p.default) for n, p in taken.items() if n != "self"
    }


@pytest.mark.parametrize(
    ("words", "valid"),
    [
        (choices.FamilyName, [AUTO, *registry.AXES["family"]]),
        (choices.UpdateName, registry.AXES["update"]),
        (choices.EstimatorName, registry.AXES["estimator"]),
        (choices.StepName, registry.AXES["step"]),
        (choices.BaseDrawsName, BASE_DRAWS),
        (choices.ComponentsName, COMPONENTS),
    ],
    ids=["family", "update", "estimator", "step", "base draws", "components"],
)
def test_the_types_of_words_are_the_words_that_are_valid(words, valid):
    assert set(get_args(words)) == set(valid)


# --- names ------------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(("name", "meant"), [("n_iter", "n"), ("max_iter", "n"), ("num_samples", "n_draws")])
def test_words_of_other_packages_are_answered_with_ours(name, meant):
    with pytest.raises(TypeError, match=f"does not know the option '{name}': did you mean '{meant}'\\?"):
        fit_ngvi(model=normal_model(), **{name: 100})


def test_functions_that_are_refused_are_not_printed():
    with pytest.raises(TypeError, match=r"^method 'ngvi' does not take obj_optimizer: natural-gradient"):
        fit_ngvi(model=normal_model(), obj_optimizer=pm.adagrad_window(learning_rate=0.01))


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


@pytest.mark.parametrize("name", ["self", "unknown", "args"])
def test_names_of_the_signature_are_no_options(name):
    with pytest.raises(TypeError, match=f"does not know the option '{name}'"):
        refuse_unknown({name: 1}, NGVI.__init__, NGVI.fit)
