"""Teach ``pm.fit`` the name "ngvi", for PyMC and what is built on it. The only file that touches PyMC's own functions.

PyMC's table of methods is local to ``pm.fit``, so the function itself is wrapped, in the three places where it is
bound. Whatever is not ours passes through untouched. ``from pymc import fit`` *before* importing this package keeps
the old function: import this package first, or call `pymc_ngvi.fit_ngvi`.
"""

import functools
import inspect
import re

from collections.abc import Callable
from contextvars import ContextVar
from difflib import get_close_matches
from typing import Any

import pymc
import pymc.variational
import pymc.variational.inference

from pymc.variational.opvi import Approximation

from pymc_ngvi.core.messages import listed, shortened
from pymc_ngvi.core.sizes import N_PREDICTED, Seed
from pymc_ngvi.fitting.options import MOST_ITERATIONS, split_options
from pymc_ngvi.inference import NGVI, fit_ngvi, options_text
from pymc_ngvi.results.approximation import NGVIApproximation

METHOD = "ngvi"
_PLACES = (pymc, pymc.variational, pymc.variational.inference)
#: What ``pm.fit`` calls in the place of any method, while `fit_model` runs.
_INSTEAD: ContextVar[Callable[[], NGVIApproximation] | None] = ContextVar("pymc_ngvi_instead", default=None)
#: Marks our wrapper and keeps what it wraps.
_WRAPPED = "__pymc_ngvi_wrapped__"
_ABOUT = (
    "As of `pymc_ngvi.NGVI` and its `fit`. `n` is the maximum number of iterations. Options of other methods are\n"
    "refused, with what to use instead."
)


def register() -> None:
    """Make ``pm.fit(method="ngvi")`` work; does nothing if it does already."""
    current = pymc.variational.inference.fit
    wrapper = current if hasattr(current, _WRAPPED) else _wrap(current)
    for place in _PLACES:
        place.fit = wrapper


def _wrap(original: Callable[..., Approximation]) -> Callable[..., Approximation]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def fit(*args: Any, **kwargs: Any) -> Approximation:
        if (instead := _INSTEAD.get()) is not None:
            return instead()
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return original(*args, **kwargs)
        method = given.get("method")
        if isinstance(method, str) and method.lower() == METHOD:
            options = _merged(given)
            return fit_ngvi(options.pop("n", MOST_ITERATIONS), model=options.pop("model", None), **options)
        if isinstance(method, NGVI) or (isinstance(method, type) and issubclass(method, NGVI)):
            return _fit_with(method, given)
        try:
            return original(*args, **kwargs)
        except KeyError as error:
            if isinstance(method, str) and get_close_matches(method.lower(), [METHOD]):
                raise KeyError(f"Unknown method {method!r}: did you mean {METHOD!r}?") from error
            raise

    setattr(fit, _WRAPPED, original)
    fit.__doc__ = _with_our_options(original.__doc__)
    return fit


def fit_model(
    model: Any, *data: Any, draws: int = N_PREDICTED, random_seed: Seed = None, **options: Any
) -> NGVIApproximation:
    """Fit a model of Bambi or of pymc-marketing.

    Parameters
    ----------
    model : bambi.Model or pymc_marketing.model_builder.ModelBuilder
        Such as ``bmb.Model(formula, frame)``, ``MMM(...)`` or ``BetaGeoModel()``. It is built where it is not yet.
    *data
        What the ``fit`` of a model of pymc-marketing takes: ``X, y`` of an ``MMM``, a data frame of a ``BetaGeoModel``.
        A Bambi model has its data.
    draws : int, default 1_000
        Draws that a model of pymc-marketing keeps as its ``idata``.
    random_seed : int, list of int, SeedSequence, Generator, RandomState or None
    **options
        Of `pymc_ngvi.fit_ngvi`.

    Returns
    -------
    NGVIApproximation
        Of a Bambi model, what ``model.fit(inference_method="vi", method="ngvi")`` returns: draws, summaries and moments
        are those of Bambi's own parameters, with intercepts at predictors of zero.

    Raises
    ------
    TypeError
        For a model of another kind, and for data beside a Bambi model.

    Notes
    -----
    A model of pymc-marketing is as its own ``fit`` leaves it: contributions, predictions, plots and ``save`` use
    ``model.idata``.

    Examples
    --------
    >>> from pymc_marketing.clv import BetaGeoModel  # doctest: +SKIP
    >>> model = BetaGeoModel()  # doctest: +SKIP
    >>> approx = pymc_ngvi.fit_model(model, customers, random_seed=1)  # doctest: +SKIP
    >>> model.expected_probability_alive()  # doctest: +SKIP
    """
    if hasattr(model, "formula") and hasattr(model, "backend"):
        if data:
            raise TypeError(f"A Bambi model has its data already; got {shortened(data)}.")
        found: NGVIApproximation = model.fit(inference_method="vi", method=METHOD, random_seed=random_seed, **options)
        return found
    if not hasattr(model, "build_model"):
        raise TypeError(
            f"model should be a bambi.Model or a model of pymc-marketing, such as MMM(...); got {shortened(model)}. "
            f'For a PyMC model, use pm.fit(method="{METHOD}", model=model).'
        )
    fits = list[NGVIApproximation]()

    def fit() -> NGVIApproximation:
        fits.append(fit_ngvi(random_seed=random_seed, **options))
        return fits[-1]

    register()
    token = _INSTEAD.set(fit)
    try:
        model.fit(*data, method="advi", random_seed=random_seed, sample_kwargs={"draws": draws})
    finally:
        _INSTEAD.reset(token)
    return fits[-1]


def _with_our_options(docstring: str | None) -> str:
    """Return PyMC's documentation of ``fit`` with our method among the others, and its options at the end."""
    documented = inspect.cleandoc(docstring or "")
    what = "Natural-Gradient Variational Inference (pymc_ngvi): no learning rate, stops by itself"
    listed = re.sub(r"(?m)^( *)-( +)'asvgd'.*$", rf"\g<0>\n\1-\2'{METHOD}'  for {what}", documented)
    title = f'Options of method="{METHOD}"'
    return f"{listed}\n\n{title}\n{'-' * len(title)}\n{_ABOUT}\n\n{options_text()}\n"


def _merged(given: dict[str, Any]) -> dict[str, Any]:
    """Return all options of one call, from the arguments and from ``inf_kwargs``.

    None is as good as not given: front ends pass it on.
    """
    options = {k: v for k, v in given.items() if k not in ("method", "inf_kwargs", "kwargs")}
    options |= given.get("kwargs", {})
    more = {name: value for name, value in (given.get("inf_kwargs") or {}).items() if value is not None}
    if twice := [name for name in more if options.get(name) is not None]:
        raise ValueError(f"{listed(twice)} is given directly and in inf_kwargs: give it once.")
    return options | more


def _fit_with(method: type[NGVI] | NGVI, given: dict[str, Any]) -> NGVIApproximation:
    """Fit with a class or an instance; PyMC would drop the seed and the start beside the latter, we use them."""
    of_constructor, of_fit = split_options(_merged(given), NGVI.__init__, NGVI.fit)
    if isinstance(method, type):
        return method(**of_constructor).fit(**of_fit)
    method.configure(**of_constructor)
    return method.fit(**of_fit)
