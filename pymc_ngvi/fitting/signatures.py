"""Signatures that show each option of a fit, which `FitOptions` alone declares; other names are refused."""

import inspect

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Concatenate, Never

from pymc_ngvi.core.messages import shortened, suggestion
from pymc_ngvi.fitting.options import OF_CONSTRUCTOR

#: What stands in a signature for the names that are refused.
_UNKNOWN = inspect.Parameter("unknown", inspect.Parameter.VAR_KEYWORD, annotation=Never)
#: Options of stochastic-gradient variational inference, and what takes their place.
_REFUSED = {
    "obj_n_mc": "the number of draws grows by itself; set `n_draws` (the first set) or `max_draws`",
    "tf_n_mc": "there are no test functions; set `n_draws` or `max_draws` for the number of draws",
    "obj_optimizer": "natural-gradient steps need no optimiser and no learning rate; choose a rule with `step`",
    "test_optimizer": "there are no test functions, hence nothing to optimise",
    "more_obj_params": "only the parameters of the approximation are fitted",
    "more_tf_params": "there are no test functions",
    "more_updates": "use `callbacks` to do something after each iteration",
    "more_replacements": "set data with pm.set_data before the fit",
    "total_grad_norm_constraint": "steps are limited by the ELBO itself; nothing is to be clipped",
    "fn_kwargs": "use `compile_kwargs`",
    "seed": "use `random_seed`",
    "random_state": "use `random_seed`",
    "draws": "pass it to `approx.sample(draws)`; `n` is the most iterations",
    "chains": "there is one fit; pass it to `approx.sample(draws, chains=4)`, which arranges draws in chains",
    "cores": "BLAS has the threads that OMP_NUM_THREADS says; data in shards take processes",
    "tune": "nothing is tuned; `n` is the most iterations, and the fit stops by itself",
    "target_accept": "there are no proposals to accept; choose a rule with `step`",
    "init": "use `start` for means, and `start_sigma` for standard deviations",
    "initvals": "use `start`",
    "learning_rate": "the default needs none; rules with a constant step take `step_size`",
    "cost_part_grad_scale": "the ELBO is not split",
    "scale_cost_to_minibatch": "minibatches are always scaled to their `total_size`",
    "local_rv": "all free variables share one approximation",
}
#: Other words for options: those of other packages.
_ALSO_CALLED = {
    "n": "niter niterations numiterations iterations maxiter maxiters maxiterations nsteps numsteps steps epochs",
    "n_draws": "nsamples numsamples nmc samples elbosamples mcsamples",
    "tol": "tolerance tolrelobj",
    "progressbar": "progress showprogress verbose",
    "backend": "compiler",
    "family": "approximation guide",
}


def takes[**P, R](arguments: Callable[P, object]) -> Callable[[Callable[..., R]], Callable[Concatenate[Any, P], R]]:
    """Let a method show the fields of a dataclass as its arguments."""

    def decorate(method: Callable[..., R]) -> Callable[Concatenate[Any, P], R]:
        declared = {field.name: field for field in fields(arguments)}  # type: ignore[arg-type]
        shown = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)]
        for name in OF_CONSTRUCTOR:
            field = declared[name]
            kind = inspect.Parameter.KEYWORD_ONLY if field.kw_only else inspect.Parameter.POSITIONAL_OR_KEYWORD
            shown.append(inspect.Parameter(name, kind, default=field.default, annotation=field.type))
        sign(method, [*shown, _UNKNOWN])
        return method

    return decorate


def sign(function: Callable[..., object], parameters: list[inspect.Parameter]) -> None:
    """Give a function other parameters to show; what it returns stays."""
    function.__signature__ = inspect.signature(function).replace(parameters=parameters)  # type: ignore[attr-defined]


def joined_parameters(first: list[inspect.Parameter], *methods: Callable[..., object]) -> list[inspect.Parameter]:
    """Return some parameters, and after them, by keyword, those that methods take and that are not among them."""
    found: Mapping[str, inspect.Parameter] = {
        name: parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for method in methods
        for name, parameter in inspect.signature(method).parameters.items()
        if name not in ("self", "unknown")
    }
    known = [parameter.name for parameter in first]
    return [*first, *(p for name, p in found.items() if name not in known), _UNKNOWN]


def split_options(
    options: Mapping[str, Any], constructor: Callable[..., object], method: Callable[..., object]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options that a constructor takes, and those of a method; raise TypeError for any other."""
    refuse_unknown(options, constructor, method)
    of_method = inspect.signature(method).parameters
    return (
        {name: value for name, value in options.items() if name not in of_method},
        {name: value for name, value in options.items() if name in of_method},
    )


def refuse_unknown(given: Mapping[str, object], *accepted_by: Callable[..., object]) -> None:
    """Raise TypeError for the first option that none of the callables takes, with what to use instead."""
    valid = {
        name
        for function in accepted_by
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) and name != "self"
    }
    for name in given:
        if name in _REFUSED:
            value = "" if callable(given[name]) else f"={shortened(given[name])}"
            raise TypeError(f"method 'ngvi' does not take {name}{value}: {_REFUSED[name]}.")
        if name not in valid:
            also_called = {option: words for option, words in _ALSO_CALLED.items() if option in valid}
            listed = suggestion(name, sorted(valid), also_called)
            raise TypeError(f"method 'ngvi' does not know the option {name!r}: {listed}")


def refuse_for(given: Mapping[str, object], constructor: Callable[..., object], method: Callable[..., object]) -> None:
    """Raise TypeError for an option that a method of NGVI does not take, saying where it belongs."""
    refuse_unknown(given, constructor, method)
    if given:
        raise TypeError(f"{next(iter(given))} is an option of NGVI(...), not of its {method.__name__}: give it there.")
