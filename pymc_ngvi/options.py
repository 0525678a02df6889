"""Options of a fit: validated once, frozen; every other name is refused with what to use instead."""

import inspect

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pymc_ngvi.registry import Choice, choose, suggestion

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
    "learning_rate": "natural-gradient steps need none",
    "cost_part_grad_scale": "the ELBO is not split",
    "scale_cost_to_minibatch": "the full data are used",
    "local_rv": "all free variables share one approximation",
}


@dataclass(frozen=True)
class FitOptions:
    """What can be chosen about a fit, beside the model and the start.

    Parameters
    ----------
    choice : Choice
        Family, update, estimator, step rule.
    tol : float
        Nats of ELBO that may be left to gain.
    n_draws, max_draws : int
        Sizes of the first and of the largest set of draws; powers of 2.
    """

    choice: Choice
    tol: float
    n_draws: int
    max_draws: int

    @classmethod
    def validated(
        cls,
        *,
        family: str | None,
        update: str | None,
        estimator: str | None,
        step: str | None,
        tol: float,
        n_draws: int,
        max_draws: int,
    ) -> "FitOptions":
        """Check each option; raise ValueError that says what was given and what is valid."""
        choice = choose(family=family, update=update, estimator=estimator, step=step)
        if not _is_positive(tol):
            raise ValueError(f"tol is in nats of ELBO and should be a positive number; got {tol!r}.")
        for name, value, least in (("n_draws", n_draws, 2), ("max_draws", max_draws, 2)):
            whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
            if not whole or value < least or value & (value - 1):
                raise ValueError(
                    f"{name} should be a power of 2, at least {least} (draws are quasi-random, in pairs); "
                    f"got {value!r}."
                )
        if max_draws < n_draws:
            raise ValueError(f"max_draws={max_draws} is below n_draws={n_draws}; raise it or lower n_draws.")
        return cls(choice, float(tol), int(n_draws), int(max_draws))

    def changed(self, **options: Any) -> "FitOptions":
        """Return these options with some replaced, checked anew; None leaves an option as it is."""
        given = {**vars(self.choice), "tol": self.tol, "n_draws": self.n_draws, "max_draws": self.max_draws}
        return FitOptions.validated(**given | {k: v for k, v in options.items() if v is not None})


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool) and bool(0 < value < np.inf)


def check_n(n: Any) -> int:
    """Return the number of iterations as an int; raise ValueError for a negative or broken number."""
    whole = isinstance(n, int | np.integer) and not isinstance(n, bool)
    if not whole or n < 0:
        raise ValueError(f"n is the most iterations, a whole number of at least 0; got {n!r}.")
    return int(n)


def check_callbacks(callbacks: Any) -> list[Callable[..., Any]]:
    """Return the callbacks as a list; raise TypeError for anything that can't be called."""
    if callable(callbacks):
        raise TypeError(f"callbacks should be a list of functions; got one function: write [{_name(callbacks)}].")
    listed = list(callbacks or [])
    for callback in listed:
        if not callable(callback):
            raise TypeError(f"callbacks should be functions of (approx, losses, i); got {callback!r}.")
    return listed


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def split_options(
    options: Mapping[str, Any], constructor: Callable[..., Any], method: Callable[..., Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options that a constructor takes, and those of a method; raise TypeError for any other."""
    refuse_unknown(options, constructor, method)
    of_method = inspect.signature(method).parameters
    return (
        {name: value for name, value in options.items() if name not in of_method},
        {name: value for name, value in options.items() if name in of_method},
    )


def refuse_unknown(given: Mapping[str, Any], *accepted_by: Callable[..., Any]) -> None:
    """Raise TypeError for the first option that none of the callables takes, with what to use instead."""
    valid = {
        name
        for function in accepted_by
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) and name != "self"
    }
    for name in given:
        if name in _REFUSED:
            raise TypeError(f"method 'ngvi' does not take {name}={given[name]!r}: {_REFUSED[name]}.")
        if name not in valid:
            raise TypeError(f"method 'ngvi' does not know the option {name!r}: {suggestion(name, sorted(valid))}")
