"""Posterior draws of Bambi models: put the intercept where Bambi's own functions look for it.

Bambi subtracts the column means of the predictors inside the PyMC model, so that the intercept there is the linear
predictor at mean predictors. It moves the draws of a Markov chain to predictors of zero, which is what `predict` and
its like take for granted, but not the draws of a variational approximation.
"""

import contextlib

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import xarray as xr

from pymc_ngvi.core.messages import checked_names, listed, shortened
from pymc_ngvi.core.seeds import seed_of
from pymc_ngvi.core.types import Array
from pymc_ngvi.core.version import __version__
from pymc_ngvi.density.constrain import Constrainer
from pymc_ngvi.results.convert import to_datatree, to_multitrace
from pymc_ngvi.results.distributions import Posterior
from pymc_ngvi.results.predictions import Given as Given
from pymc_ngvi.results.predictions import Groups as Groups
from pymc_ngvi.results.predictions import check_types, predictions_at

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
            formula = getattr(getattr(model, "formula", None), "main", None) or type(model).__name__
            raise ValueError(
                f"The posterior has no {', '.join(map(repr, missing))}: these are not draws from the model "
                f"{formula!r}, or variables were left out of them."
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


# --- predictions of Bambi models for a data frame, with the effects of levels that were not in the fit ---

_OBS = "__obs__"


def predict_bambi(
    posterior: Posterior,
    model: Any,
    frame: Any,
    groups: Groups,
    var_names: str | Sequence[str] | None,
    theta: Array,
    rng: np.random.Generator,
) -> xr.DataTree:
    """Return the predictions of a Bambi model at unconstrained draws; see `NGVIApproximation.predict`.

    Bambi computes them for levels that it knows, one new level of each factor at a time: with the effects of the new
    level for those of the known ones.
    """
    if not hasattr(frame, "columns"):
        raise TypeError(f"For a Bambi model, new_data should be a DataFrame; got {shortened(frame)}.")
    if not getattr(model, "built", False) or model.backend is None:
        raise ValueError("The Bambi model is not built: call model.build() or model.fit(...) first.")
    draws = _draws(posterior, model, theta, rng)
    terms = list(_terms(model, posterior))
    levels = {factor: _levels(term, frame) for factor, term, *_ in terms}
    new = {factor: list(dict.fromkeys(v for v in found if v is not None)) for factor, found in levels.items()}
    if groups == "known" and any(new.values()):
        factor = next(f for f in new if new[f])
        raise ValueError(
            f"Factor {factor!r} has levels {listed(new[factor])} that were not in the fit. groups='new' draws their "
            "effects from their prior given its parameters; groups='average' takes the mean of that prior."
        )
    frame = _of_known_levels(model, terms, frame)
    effects = _effects(posterior, terms, new, groups, theta, seed_of(rng))
    parts, places = [], []
    for chosen, rows in _by_levels(levels, len(frame), groups):
        changed = draws.copy()
        for factor, _, name, dim in terms:
            if groups == "average":
                changed[name] = effects[name].transpose(*draws[name].dims)
            elif chosen.get(factor) is not None:
                one = effects[name].sel({dim: chosen[factor]}, drop=True)
                changed[name] = one.expand_dims({dim: draws[dim]}).transpose(*draws[name].dims)
        parts.append(_parameters(model, changed, frame.iloc[rows].reset_index(drop=True)))
        places.append(rows)
    order = np.argsort(np.concatenate(places), kind="stable")
    predictions = xr.concat(parts, dim=_OBS).isel({_OBS: order}).assign_coords({_OBS: np.arange(len(frame))})
    response = str(model.response_term.alias or model.response_term.name)
    wanted = [*map(str, predictions.data_vars), response]
    if var_names is not None:
        wanted = checked_names(var_names, wanted, "which is not predicted")
    if response in wanted:
        with _columns_named():
            predictions[response] = model.family.posterior_predictive(
                model=model,
                posterior=xr.merge([draws, predictions]),
                data=frame,
                random_seed=seed_of(rng),
            )
    attrs = {"inference_library": "pymc_ngvi", "inference_library_version": __version__, "groups": groups}
    predictions = predictions[wanted].transpose("chain", "draw", ...)
    predictions.attrs = attrs
    return xr.DataTree.from_dict({"predictions": predictions})


def _draws(posterior: Posterior, model: Any, theta: Array, rng: np.random.Generator) -> xr.Dataset:
    """Return draws of all parameters as Bambi has them."""
    dims = posterior.model.named_vars_to_dims
    named = [v.name for v in (*posterior.layout.variables, *posterior.density.deterministics)]
    names = frozenset(
        name for name in named if _OBS not in (dims.get(name) or ())
    )  # a value for each row is not needed
    constrain = Constrainer.of(posterior.density, names=names)
    values = constrain(theta, random_seed=seed_of(rng))
    tree = to_datatree(to_multitrace(posterior.model, values, {}, 1), posterior.model)
    return uncentre_bambi_intercept(model, tree)["posterior"].to_dataset()


def _terms(model: Any, posterior: Posterior) -> Iterator[tuple[str, Any, str, str]]:
    """Yield the factor, the term, the name and the dim of factors of all effects of groups."""
    for part in model.backend.distributional_components.values():
        for term in part.component.group_specific_terms.values():
            name = str(term.alias or term.name)
            dims = posterior.model.named_vars_to_dims.get(name) or ()
            dim = next((d for d in dims if d.endswith("__factor_dim")), None)
            if dim is None:
                raise ValueError(f"The approximation has no {name!r}: it is not one of this Bambi model.")
            yield term.name.split("|")[1], term, name, dim


def _unseen(term: Any, frame: Any) -> dict[str, tuple[Any, list[bool]]]:
    """Return the columns of a factor that have new levels: a level of the fit, and the rows with others."""
    found = {}
    for component in term.term.factor.components:
        if component.name not in frame.columns:
            if component.var_names == {component.name}:
                raise ValueError(f"new_data has no column {component.name!r}, which is a factor of the Bambi model.")
            continue  # a call, of whose new levels Bambi says something
        known, values = set(component.levels), frame[component.name].tolist()
        new = [value not in known for value in values]
        check_types(f"column {component.name!r}", list(dict.fromkeys(values)), component.levels)
        if any(new):
            found[component.name] = component.levels[0], new
    return found


def _levels(term: Any, frame: Any) -> list[str | None]:
    """Return, for each row, the level of a factor if that was not in the fit."""
    new = np.zeros(len(frame), dtype=bool)
    for _, rows in _unseen(term, frame).values():
        new |= rows
    if not new.any():
        return [None] * len(frame)
    columns = [c.name if c.name in frame.columns else sorted(c.var_names)[0] for c in term.term.factor.components]
    labels = frame[columns].astype(str).agg(":".join, axis=1).tolist()
    return [label if is_new else None for label, is_new in zip(labels, new, strict=True)]


def _of_known_levels(model: Any, terms: Sequence[tuple[str, Any, str, str]], frame: Any) -> Any:
    """Return a data frame with levels of the fit in the place of new ones, for Bambi to evaluate."""
    used = {name for _, term, *_ in terms for name in term.term.expr.var_names}
    for part in model.backend.distributional_components.values():
        common = part.component.design.common
        used |= {name for term in (common.terms.values() if common else ()) for name in term.var_names}
    frame = frame.copy()
    for _, term, *_ in terms:
        for column, (level, new) in _unseen(term, frame).items():
            if column in used:
                raise ValueError(
                    f"Column {column!r} has levels that were not in the fit, and is a predictor as well as a grouping "
                    "factor: it has no coefficient for them."
                )
            frame[column] = [level if is_new else old for old, is_new in zip(frame[column], new, strict=True)]
    return frame


def _effects(
    posterior: Posterior,
    terms: Sequence[tuple[str, Any, str, str]],
    new: dict[str, list[str]],
    groups: Groups,
    theta: Array,
    random_seed: int,
) -> xr.Dataset:
    """Return draws of the effects of all levels, those that are new included."""
    wanted = [name for factor, _, name, _ in terms if new[factor] or groups == "average"]
    if not wanted:
        return xr.Dataset()
    labels = {
        dim: [*posterior.layout.coords[dim].tolist(), *(new[factor] if groups == "new" else ())]
        for factor, _, name, dim in terms
        if name in wanted
    }
    dims = posterior.model.named_vars_to_dims
    raw = frozenset(v.name for v in posterior.layout.variables if set(labels) & set(dims.get(v.name) or ()))
    tree = predictions_at(posterior, theta, labels, groups, wanted, random_seed, effects=raw)
    return tree["predictions"].to_dataset()


def _by_levels(
    levels: dict[str, list[str | None]], n: int, groups: Groups
) -> Iterator[tuple[dict[str, str | None], list[int]]]:
    """Yield sets of new levels, one of each factor at most, and the rows that have them."""
    if groups == "average":
        yield {}, list(range(n))
        return
    rows: dict[tuple[str | None, ...], list[int]] = {}
    for i in range(n):
        rows.setdefault(tuple(found[i] for found in levels.values()), []).append(i)
    for key, places in rows.items():
        yield dict(zip(levels, key, strict=True)), places


def _parameters(model: Any, draws: xr.Dataset, frame: Any) -> xr.Dataset:
    """Return what Bambi predicts of the parameters of the response that have a value for each row."""
    tree = xr.DataTree.from_dict({"posterior": draws})
    with _columns_named():
        model.predict(tree, data=frame)
    found = tree["posterior"].to_dataset()
    return found[[name for name in found.data_vars if _OBS in found[name].dims]]


@contextlib.contextmanager
def _columns_named() -> Iterator[None]:
    """Say which column of a data frame is missing, in the place of an error from the depth of formulae."""
    try:
        yield
    except KeyError as error:
        raise ValueError(
            f"new_data has no column {error.args[0]!r}, which the formula of the Bambi model names. Bambi asks for the "
            "columns of the response, too, where there are trials."
        ) from error
