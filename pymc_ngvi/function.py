"""`fit_ngvi`: a fit as one call, and what documentation says of its options."""

import inspect
import re

from typing import Any

import pymc as pm

from pymc_ngvi.fitting.options import MOST_ITERATIONS, joined_parameters, sign, split_options
from pymc_ngvi.inference import NGVI
from pymc_ngvi.results.approximation import NGVIApproximation


def fit_ngvi(
    model_or_n: pm.Model | int | None = None,
    /,
    n: int = MOST_ITERATIONS,
    *,
    model: pm.Model | None = None,
    **options: Any,
) -> NGVIApproximation:
    """Fit a model by natural-gradient variational inference, without going through ``pm.fit``.

    Parameters
    ----------
    model_or_n : pymc.Model or int, optional
        By position only: the model, or ``n`` as in ``pm.fit``.
    n : int, default 10_000
        The most iterations; the fit stops earlier by itself.
    model : pymc.Model, optional
        Default: the model of the context.
    {options}
    **unknown
        Other options are refused. The message says what to use instead, or which name was meant.

    Returns
    -------
    NGVIApproximation

    Raises
    ------
    TypeError, ValueError
        As `NGVI` and `NGVI.fit`.

    Examples
    --------
    >>> import pymc as pm
    >>> import pymc_ngvi
    >>> with pm.Model() as model:
    ...     x = pm.Normal("x", 1.0, 2.0)
    >>> approx = pymc_ngvi.fit_ngvi(model, random_seed=1, progressbar=False)
    >>> approx.converged
    True
    """
    of_constructor, of_fit = split_options(options | _model_and_n(model_or_n, n, model), NGVI.__init__, NGVI.fit)
    return NGVI(**of_constructor).fit(**of_fit)


def options_text() -> str:
    """Return what the documentation of `NGVI` and of `NGVI.fit` says of their options, as entries of numpydoc."""
    entries = [entry for of in (NGVI, NGVI.fit) for entry in re.split(r"\n(?=\S)", _parameters(of.__doc__))]
    ours = [entry for entry in entries if not entry.startswith(("model :", "n :", "**unknown"))]
    return re.sub(r" \[\d+\]_", "", "\n".join(ours))  # the references stay with `NGVI`


def _parameters(docstring: str | None) -> str:
    """Return the section "Parameters" of a numpydoc docstring, without its heading."""
    return inspect.cleandoc(docstring or "").partition("Parameters\n----------\n")[2].partition("\n\n")[0]


# Written in one place and shown in each: by `help(NGVI)`, `help(fit_ngvi)` and `help(pm.fit)`; so are the options.
sign(fit_ngvi, joined_parameters(list(inspect.signature(fit_ngvi).parameters.values())[:-1], NGVI.__init__, NGVI.fit))
fit_ngvi.__doc__ = inspect.cleandoc(fit_ngvi.__doc__ or "").replace("{options}", options_text())


def _model_and_n(first: object, n: object, model: object) -> dict[str, object]:
    """Return the model and ``n`` of a call of `fit_ngvi`, which takes either of them first."""
    if first is None:
        return {"model": model, "n": n}
    if isinstance(first, pm.Model) and model is None:
        return {"model": first, "n": n}
    if not isinstance(first, pm.Model) and n == MOST_ITERATIONS:
        return {"model": model, "n": first}
    raise TypeError(
        f"fit_ngvi takes one model and one n: write fit_ngvi(model, n=...). Got {first!r} first, model={model!r} and "
        f"n={n!r}."
    )
