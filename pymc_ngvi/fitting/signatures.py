"""Signatures that show each option of a fit, which `FitOptions` alone declares."""

import inspect

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Concatenate, Never

from pymc_ngvi.fitting.options import OF_CONSTRUCTOR

#: What stands in a signature for the names that are refused.
_UNKNOWN = inspect.Parameter("unknown", inspect.Parameter.VAR_KEYWORD, annotation=Never)


def takes[**P, R](arguments: Callable[P, object]) -> Callable[[Callable[..., R]], Callable[Concatenate[Any, P], R]]:
    """Let a method show the fields of a dataclass as its arguments.

    Parameters
    ----------
    arguments : type
        A dataclass with the fields of `OF_CONSTRUCTOR`.
    """

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
