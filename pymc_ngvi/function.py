"""`fit_ngvi`: a fit as one call, and what documentation says of its options."""

import inspect
import re

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Never

import pymc as pm

from rich.theme import Theme

from pymc_ngvi.core.seeds import Seed
from pymc_ngvi.fitting.choices import (
    BaseDrawsName,
    ComponentsName,
    EstimatorName,
    FactorName,
    FamilyName,
    PosteriorName,
    ReparamName,
    StepName,
    UpdateName,
    WeightUpdateName,
)
from pymc_ngvi.fitting.options import split_options
from pymc_ngvi.inference import MOST_ITERATIONS, NGVI
from pymc_ngvi.model.graphs.backends import Backend
from pymc_ngvi.results.approximation import NGVIApproximation


def fit_ngvi(
    model_or_n: pm.Model | int | None = None,
    /,
    n: int = MOST_ITERATIONS,
    *,
    model: pm.Model | None = None,
    random_seed: Seed = None,
    start: Mapping[str, Any] | NGVIApproximation | None = None,
    start_sigma: Mapping[str, Any] | float | None = None,
    family: FamilyName | None = None,
    update: UpdateName | None = None,
    estimator: EstimatorName | None = None,
    step: StepName | None = None,
    tol: float = 0.05,
    n_draws: int | None = None,
    max_draws: int | None = None,
    base_draws: BaseDrawsName | None = None,
    stl: bool = True,
    step_size: float | None = None,
    step_decay: float | None = None,
    window: int | None = None,
    factor: FactorName | None = None,
    blocks: Sequence[Sequence[str]] | None = None,
    reparam: ReparamName | None = None,
    posterior: PosteriorName = "auto",
    n_components: int | Literal["auto"] | None = None,
    components: ComponentsName | None = None,
    weight_update: WeightUpdateName | None = None,
    score: bool | None = None,
    callbacks: Sequence[Callable[..., Any]] | None = None,
    progressbar: bool = True,
    progressbar_theme: Theme | None = None,
    backend: Backend | None = None,
    include_transformed: bool = False,
    compile_kwargs: dict[str, Any] | None = None,
    **unknown: Never,
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
        Refused: an option of another method with what to use instead, a misspelt one with the name that was meant.

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
    options = dict(locals())  # first of all: the arguments by name
    del options["model_or_n"], options["unknown"]
    options |= unknown | _model_and_n(model_or_n, n, model)
    of_constructor, of_fit = split_options(options, NGVI.__init__, NGVI.fit)
    return NGVI(**of_constructor).fit(**of_fit)


def options_text() -> str:
    """Return what the documentation of `NGVI` and of `NGVI.fit` says of their options, as entries of numpydoc."""
    entries = [entry for of in (NGVI, NGVI.fit) for entry in re.split(r"\n(?=\S)", _parameters(of.__doc__))]
    ours = [entry for entry in entries if not entry.startswith(("model :", "n :", "**unknown"))]
    return re.sub(r" \[\d+\]_", "", "\n".join(ours))  # the references stay with `NGVI`


def _parameters(docstring: str | None) -> str:
    """Return the section "Parameters" of a numpydoc docstring, without its heading."""
    rest = inspect.cleandoc(docstring or "").partition("Parameters\n----------\n")[2]
    return rest.partition("\n\n")[0]


# Written in one place and shown in each: by `help(NGVI)`, `help(fit_ngvi)` and `help(pm.fit)`.
fit_ngvi.__doc__ = inspect.cleandoc(fit_ngvi.__doc__ or "").replace("{options}", options_text())


def _model_and_n(first: Any, n: Any, model: Any) -> dict[str, Any]:
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
