"""Posterior draws of Bambi models: put the intercept where Bambi's own functions look for it.

Bambi subtracts the column means of the predictors inside the PyMC model, so that the intercept there is the linear
predictor at mean predictors. It moves the draws of a Markov chain to predictors of zero, which is what `predict` and
its like take for granted, but not the draws of a variational approximation.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import xarray as xr

from pymc_ngvi.core.types import Array

#: Attribute of the posterior group that says that its intercepts are at predictors of zero.
MARK = "pymc_ngvi_intercept_uncentred"


def uncentre_bambi_intercept(model: Any, idata: xr.DataTree) -> xr.DataTree:
    """Move the intercepts of a variational posterior from mean predictors to predictors of zero.

    With this, ``model.predict`` and the functions that build on it give for variational draws what they give for the
    draws of a Markov chain.

    Parameters
    ----------
    model : bambi.Model
        Built: ``model.fit`` or ``model.build`` has been called.
    idata : xarray.DataTree
        Draws from the approximation of this model, as ``approx.sample`` returns them. Not modified.

    Returns
    -------
    xarray.DataTree
        A copy in which every component with both an intercept and common terms has
        ``intercept - sum_j mean(x_j) coefficient_j`` as its intercept, all else equal, and with the dimensions of
        group-specific effects in the order of Bambi's own results. An attribute of the posterior group records it;
        draws that are marked so, and draws that Bambi has moved itself, come back as they are.

    Raises
    ------
    TypeError
        If ``model`` is no Bambi model, or ``idata`` no DataTree.
    ValueError
        If the model is not built, or the draws are not of this model.

    Notes
    -----
    Nothing changes with ``center_predictors=False``, and for components without an intercept or without common terms.

    Examples
    --------
    >>> import bambi as bmb  # doctest: +SKIP
    >>> model = bmb.Model("y ~ x", data)  # doctest: +SKIP
    >>> approx = model.fit(inference_method="vi", method="ngvi")  # doctest: +SKIP
    >>> posterior = uncentre_bambi_intercept(model, approx.sample(2_000))  # doctest: +SKIP
    >>> model.predict(posterior)  # doctest: +SKIP
    """
    if not isinstance(idata, xr.DataTree):
        raise TypeError(f"idata should be a DataTree, as approx.sample(2_000) returns it; got {type(idata).__name__}.")
    if "posterior" not in idata.children:
        raise ValueError(f"idata has no group 'posterior'; its groups are {list(idata.children)}.")
    components = list(_centred_components(model))
    result = idata.copy()
    posterior = result["posterior"].to_dataset()
    if MARK in posterior.attrs or posterior.attrs.get("modeling_interface") == "bambi":
        return result
    for component, means in components:
        name = _label(component.intercept_term)
        terms = [_label(term) for term in component.common_terms.values()]
        missing = [n for n in (name, *terms) if n not in posterior]
        if missing:
            raise ValueError(
                f"The posterior has no {', '.join(map(repr, missing))}: these are not draws from the model "
                f"{_describe(model)}, or variables were left out of them."
            )
        shift = _shift(posterior[name], [posterior[term] for term in terms], means)
        posterior[name] = (posterior[name] - shift).assign_attrs(posterior[name].attrs)
    # As Bambi orders the draws of a chain: the groups of group-specific effects come last.
    factors = [dim for dim in posterior.dims if str(dim).endswith("__factor_dim")]
    # The mark is a string: netCDF has no booleans.
    result["posterior"].dataset = posterior.transpose(..., *factors).assign_attrs({MARK: "true"})
    return result


def _centred_components(model: Any) -> Iterator[tuple[Any, Array]]:
    """Yield each component whose predictors were centred, and the means of its columns."""
    if not all(hasattr(model, name) for name in ("built", "backend", "center_predictors")):
        raise TypeError(f"model should be a bambi.Model; got {type(model).__name__}.")
    if not model.built or model.backend is None:
        raise ValueError("The Bambi model is not built: call model.build() or model.fit(...) first.")
    for part in model.backend.distributional_components.values():
        design = part.design_matrix_without_intercept  # None where Bambi did not centre
        if design is not None:
            yield part.component, np.asarray(design, dtype=np.float64).mean(axis=0)


def _shift(intercept: xr.DataArray, coefficients: Sequence[xr.DataArray], means: Array) -> xr.DataArray:
    """Return the linear predictor of the common terms at mean predictors, with the dims of the intercept."""
    shift = xr.zeros_like(intercept)
    start = 0
    for coefficient in coefficients:
        # A term of several columns has one dim more than the intercept; the columns are in the order of the terms.
        own = [dim for dim in coefficient.dims if dim not in intercept.dims]
        width = int(np.prod([coefficient.sizes[dim] for dim in own], dtype=int))
        columns = xr.DataArray(means[start : start + width].reshape([coefficient.sizes[d] for d in own]), dims=own)
        shift = shift + (coefficient * columns).sum(own)
        start += width
    if start != len(means):
        raise ValueError(
            f"The common terms have {start} coefficients in the draws, but the model has {len(means)} columns of "
            "predictors: these are not draws from this model."
        )
    return shift.transpose(*intercept.dims)


def _label(term: Any) -> str:
    return str(term.alias or term.name)


def _describe(model: object) -> str:
    formula = getattr(model, "formula", None)
    return repr(getattr(formula, "main", None) or type(model).__name__)
