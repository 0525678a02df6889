"""Averages over rows of the expected response: predictions at values of data, contrasts of these, and slopes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr

from numpy.typing import ArrayLike

from pymc_ngvi.core.messages import checked_names
from pymc_ngvi.core.types import AnyArray
from pymc_ngvi.density.info import quoted
from pymc_ngvi.density.predictive import indexed_axes
from pymc_ngvi.results.distributions import Posterior
from pymc_ngvi.results.predictions import Given, NewData, not_settable, plain_array, tree_of

#: Values that data are set to, one after the other: by label, or as they are.
type Settings = Mapping[str, ArrayLike | Mapping[Any, ArrayLike]]
#: Predictions with some data set to arrays.
type Predict = Callable[[Given], xr.DataTree]


def averages(
    posterior: Posterior,
    predict: Predict,
    at: Settings | None,
    slope: str | None,
    by: str | Sequence[str],
    new_data: Given | None,
) -> xr.Dataset:
    """Return averages of predictions; see `NGVIApproximation.average_predictions`."""
    by = [by] if isinstance(by, str) else list(by)
    with posterior.with_data_of_fit():
        rows = NewData.of(posterior.density.given, posterior.layout.coords, new_data)
        data = [v.name for v in rows.model.data_vars if hasattr(v, "get_value")]
        for option, names in {"at": at or (), "slope": () if slope is None else (slope,)}.items():
            for name in names:
                if name not in data:
                    raise ValueError(not_settable(rows.model, name, data, option))
        settings = {name: _settings(rows, name, values) for name, values in (at or {}).items()}
        if both := sorted(settings.keys() & set(by)):
            raise ValueError(f"{quoted(both)}, in by, is set to values by at: averages have it as a dim as it is.")

        def averaged(given: Given) -> xr.Dataset:
            predictions = predict(given)["predictions"].to_dataset()
            dims = [str(dim) for dim in predictions.dims if dim not in ("chain", "draw")]
            if by:
                checked_names(by, [*dims, *data], "which is neither a dim of what is predicted nor pm.Data", "by")
            indicators = [_indicators(rows, name) for name in by if name not in dims]
            return predictions.map(lambda of: _average(of, by, indicators), keep_attrs=True)

        def on_grid(given: Given, left: Sequence[str]) -> xr.Dataset:
            """Return averages at all combinations of the values of data that are left to be set."""
            if not left:
                return averaged(given) if slope is None else _slopes(rows, slope, given, averaged)
            name, *others = left
            labels, arrays = settings[name]
            found = [on_grid({**given, name: array}, others) for array in arrays]
            return xr.concat(found, dim=xr.DataArray(labels, dims=name, name=name))

        return on_grid({}, list(settings)).transpose("chain", "draw", ...)


def _data(rows: NewData, name: str) -> AnyArray:
    return rows.arrays.get(name, rows.before(name))


def _settings(rows: NewData, name: str, values: Any) -> tuple[AnyArray, list[AnyArray]]:
    """Return labels of the values that data are set to, and arrays with these for all rows."""
    if not isinstance(values, Mapping):
        values = np.atleast_1d(plain_array(name, values))
        if values.ndim > 1:
            raise ValueError(f"Values of {name!r} are arrays: name them, as in {{{name!r}: {{'a': x, 'b': x + 1}}}}.")
        values = dict(zip(values.tolist(), values, strict=True))
    shape = _data(rows, name).shape
    return np.array(list(values)), [np.broadcast_to(array, shape) for array in values.values()]


def _indicators(rows: NewData, name: str) -> xr.DataArray:
    """Return which of the rows have each value of some data, with labels where these are an index."""
    values = _data(rows, name)
    if values.ndim != 1:
        raise ValueError(f"Averages are by data with one value for each row; {name!r} has shape {values.shape}.")
    dim = tree_of(rows, {}, [name], {})["predictions_constant_data"].to_dataset()[name].dims[0]
    levels = np.unique(values)
    dims = sorted(indexed_axes(rows.model, name)[0] & rows.of_fit.keys())
    known = rows.labels.get(dims[0], rows.of_fit[dims[0]]) if dims else levels
    labels = [known[i] for i in levels] if dims else levels
    return xr.DataArray(values[:, None] == levels, dims=(dim, name), coords={name: labels})


def _average(predictions: xr.DataArray, by: Sequence[str], indicators: Sequence[xr.DataArray]) -> xr.DataArray:
    """Return the mean over all dims but some, of each combination of groups of rows."""
    own = predictions.dims[2:]
    weights = xr.DataArray(1.0)
    for of_rows in indicators:
        dim, name = of_rows.dims
        along = [d for d in own if d == dim] or [d for d in own if predictions.sizes[d] == of_rows.sizes[dim]]
        if len(along) != 1:
            raise ValueError(
                f"It can't be told along which dim of {predictions.name!r}, {own}, the rows of {name!r} are."
            )
        weights = weights * of_rows.rename({dim: along[0]})
    over = [d for d in own if d not in by]
    rows = [d for d in over if d in weights.dims]
    of_groups = xr.dot(predictions, weights / weights.sum(rows), dim=rows, optimize=True)
    return of_groups.mean([d for d in over if d not in rows])


def _slopes(rows: NewData, name: str, given: Given, averaged: Callable[[Given], xr.Dataset]) -> xr.Dataset:
    """Return derivatives by data, by central differences with the same draws; of a matrix, by each of its columns."""
    values = np.asarray(given.get(name, _data(rows, name)))
    of_fit = rows.before(name)
    if of_fit.dtype.kind != "f":
        raise ValueError(f"{name!r} are whole numbers, and have no slope: compare averages at={{{name!r}: [...]}}.")
    columns = of_fit.reshape(-1, of_fit.shape[-1] if of_fit.ndim > 1 else 1)
    spread = np.where(np.ptp(columns, axis=0) > 0, np.ptp(columns, axis=0), abs(columns).max(axis=0))
    steps = np.finfo(of_fit.dtype).eps ** (1 / 3) * np.where(spread > 0, spread, 1.0)

    def slope(shift: AnyArray) -> xr.Dataset:
        upper, lower = (averaged({**given, name: values + sign * shift}) for sign in (1, -1))
        return (upper - lower) / (2 * shift.sum())

    if of_fit.ndim < 2:
        return slope(steps[0])
    like = tree_of(rows, {}, [name], {})["predictions_constant_data"].to_dataset()[name]
    return xr.concat([slope(shift) for shift in np.diag(steps)], dim=like[like.dims[-1]])
