"""New data for a model: checked, with the levels of each dim by their labels."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pymc as pm

from numpy.typing import ArrayLike

from pymc_ngvi.core.messages import shortened, suggestion
from pymc_ngvi.core.values import AnyArray
from pymc_ngvi.density.checks import quoted
from pymc_ngvi.density.predictive import indexed_axes

#: Arrays by the name of a ``pm.Data``, and labels by the name of a dim.
type Given = Mapping[str, ArrayLike]

#: Labels that a message lists.
_LISTED = 5


@dataclass(frozen=True)
class NewData:
    """What is new in a model."""

    #: With the data of the fit.
    model: pm.Model
    #: By the name of a ``pm.Data``.
    arrays: dict[str, AnyArray]
    #: By dim, where these were given, or are those of the fit with others behind them.
    labels: dict[str, list[Any]]
    #: Labels of the dims of the model, when it was fitted.
    of_fit: dict[str, list[Any]]

    @classmethod
    def of(cls, model: pm.Model, coords: Mapping[str, AnyArray], given: Given | None) -> "NewData":
        """Check what was given."""
        if hasattr(given, "columns"):
            raise TypeError(
                "A DataFrame is for models of Bambi: give the model, too, as bambi_model=. For others, give a dict of "
                "arrays by the names of their pm.Data."
            )
        if given is not None and not isinstance(given, Mapping):
            raise TypeError(f"new_data should be a dict of arrays by name; got {shortened(given)}.")
        given = given or {}
        data = [v.name for v in model.data_vars if hasattr(v, "get_value")]
        of_fit = {dim: _levels(coords[dim]) for dim, own in model.coords.items() if own is not None and dim in coords}
        for name in given:
            if name not in data and name not in model.coords:
                raise ValueError(_not_settable(model, name, data))
        labels = {name: _labels(name, given[name], of_fit.get(name, [])) for name in given if name not in data}
        arrays = {}
        for name in given:
            if name in data:
                arrays[name] = _array(model, name, _positions(model, name, given[name], labels, of_fit))
        made = cls(model, arrays, labels, of_fit)
        made.check_lengths()
        made.check_positions()
        return made

    def before(self, name: str) -> AnyArray:
        """Return some data of the fit."""
        return self.model[name].get_value(borrow=True)

    def dims(self, name: str) -> tuple[str | None, ...]:
        """Return the names of the axes of a variable of the model; None where one has no name."""
        return tuple(self.model.named_vars_to_dims.get(name) or (None,) * self.model[name].type.ndim)

    def along(self, dim: str) -> list[tuple[str, int]]:
        """Return the new arrays that have a dim, and the axis of each."""
        return [(name, axis) for name in self.arrays for axis, d in enumerate(self.dims(name)) if d == dim]

    @property
    def lengths(self) -> dict[str, int]:
        """The new lengths of the dims that labels or arrays were given for."""
        lengths = {dim: len(labels) for dim, labels in self.labels.items()}
        for name, array in self.arrays.items():
            lengths |= {d: n for d, n in zip(self.dims(name), array.shape, strict=True) if d is not None}
        return lengths

    @property
    def rows(self) -> dict[int, set[int]]:
        """The new lengths of axes of data, by those that they had."""
        found: dict[int, set[int]] = {}
        for name, array in self.arrays.items():
            for old, new in zip(self.before(name).shape, array.shape, strict=True):
                found.setdefault(old, set()).add(new)
        return found

    def goes_on(self, name: str) -> bool:
        """Tell whether new data are those of the fit where they have its labels, or its places without labels."""
        old, new = self.before(name), self.arrays[name]
        for axis, dim in enumerate(self.dims(name)):
            labels = self.labels.get(dim) if dim is not None and dim in self.of_fit else None
            if labels is None:
                n = min(old.shape[axis], new.shape[axis])
                old, new = np.take(old, np.arange(n), axis), np.take(new, np.arange(n), axis)
                continue
            place = {label: i for i, label in enumerate(self.of_fit[str(dim)])}
            both = [(place[label], i) for i, label in enumerate(labels) if label in place]
            old, new = (np.take(a, [pair[k] for pair in both], axis) for k, a in enumerate((old, new)))
        return bool(np.array_equal(old, new))

    def check_lengths(self) -> None:
        """Raise ValueError where what was given differs in the length of a dim."""
        seen = {dim: (dim, len(labels)) for dim, labels in self.labels.items()}
        for name, array in self.arrays.items():
            for dim, length in zip(self.dims(name), array.shape, strict=True):
                if dim is None:
                    continue
                other, known = seen.setdefault(dim, (name, length))
                if known != length:
                    raise ValueError(
                        f"Lengths of dim {dim!r} do not agree: {known:,} in {other!r} and {length:,} in {name!r}."
                    )

    def check_positions(self) -> None:
        """Raise ValueError where whole numbers index levels that are not there."""
        lengths = self.lengths
        for name, array in self.arrays.items():
            if array.dtype.kind not in "iu" or not array.size:
                continue
            for dim in sorted(indexed_axes(self.model, name)[0]):
                n = lengths.get(dim, len(self.of_fit.get(dim, ())))
                if n and (array.min() < 0 or array.max() >= n):
                    bad = int(array.min() if array.min() < 0 else array.max())
                    raise ValueError(
                        f"{name!r} has {bad}, but dim {dim!r} has {n:,} levels, 0 to {n - 1}: for others, give the "
                        f"labels of all levels, as {dim!r}, or labels in the place of numbers in {name!r}."
                    )

    def check_fixed(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ValueError where whole numbers index beyond the end of a free variable whose length is fixed."""
        for name, array in self.arrays.items():
            if array.dtype.kind not in "iu" or not array.size:
                continue
            for variable, axis in sorted(indexed_axes(self.model, name)[1]):
                n = shapes[variable][axis] if variable in shapes else None
                if n is not None and not -n <= array.min() <= array.max() < n:
                    raise ValueError(
                        f"{name!r} has {int(array.max())}, but {variable!r} has {n:,} elements along axis {axis}, 0 to "
                        f"{n - 1}, a length that is fixed in the model: for new levels, give it a dim with coords, and "
                        "fit again."
                    )

    def check_complete(self, needed: Iterable[str]) -> None:
        """Raise ValueError where data that are needed still have the old length of a dim."""
        for name in needed:
            if name in self.arrays:
                continue
            for dim, old in zip(self.dims(name), self.before(name).shape, strict=True):
                new = self.lengths.get(dim, old) if dim is not None else old
                if new != old:
                    raise ValueError(
                        f"{name!r} has length {old:,} along dim {dim!r}, which now has {new:,}: give {name!r}, too."
                    )


def listed(labels: Sequence[object]) -> str:
    """Return labels for a message, the first few of many."""
    shown = ", ".join(repr(label) for label in labels[:_LISTED])
    return shown if len(labels) <= _LISTED else f"{shown} and {len(labels) - _LISTED:,} more"


def _levels(values: Any) -> list[Any]:
    """Return labels as they compare: whole numbers and text as Python's, times to the nanosecond."""
    if isinstance(values, np.ndarray) and values.dtype.kind == "M":
        return list(values.astype("datetime64[ns]"))
    return [_plain(value) for value in values]


def _plain(label: Any) -> Any:
    if hasattr(label, "to_datetime64"):
        label = label.to_datetime64()
    if isinstance(label, np.datetime64):
        return label.astype("datetime64[ns]")
    return label.item() if isinstance(label, np.generic) else label


def _like(labels: list[Any], known: Sequence[Any]) -> list[Any]:
    """Return labels with times written as text in the place of times, where those of the fit are times."""
    if not known or not isinstance(known[0], np.datetime64):
        return labels
    return [np.datetime64(label, "ns") if isinstance(label, str) else label for label in labels]


def _labels(dim: str, values: Any, known: Sequence[Any]) -> list[Any]:
    """Return the labels that were given for a dim."""
    if np.ndim(np.asarray(values, dtype=object)) != 1:
        raise ValueError(f"{dim!r} is a dim of the model, and takes a list of labels; got {shortened(values)}.")
    found = _like(_levels(values), known)
    if len(set(found)) < len(found):
        twice = [label for label in dict.fromkeys(found) if found.count(label) > 1]
        raise ValueError(f"Labels of dim {dim!r} repeat: {listed(twice)}. Give each level once.")
    check_types(f"dim {dim!r}", found, known)
    return found


def check_types(what: str, labels: Sequence[Any], known: Sequence[Any]) -> None:
    """Raise ValueError where labels would be new for no reason but their type: "3" beside 3."""
    levels, written = set(known), {str(label): label for label in known}
    for label in labels:
        if label not in levels and str(label) in written:
            raise ValueError(
                f"Label {label!r} of {what} is not {written[str(label)]!r}, which was in the fit: give labels of the "
                "same type."
            )


def _positions(
    model: pm.Model, name: str, values: ArrayLike, labels: dict[str, list[Any]], of_fit: Mapping[str, list[Any]]
) -> ArrayLike:
    """Return positions in the place of labels, where labels were given; those that are new go behind the others."""
    array = _plain_array(name, values)
    if np.dtype(model[name].type.dtype).kind not in "iu" or array.dtype.kind in "biuf":
        return array
    dims = [dim for dim in sorted(indexed_axes(model, name)[0]) if dim in of_fit]
    if not dims:
        raise ValueError(
            f"{name!r} should be whole numbers; got {shortened(array.tolist())}. Labels can be given for an index "
            "into variables that have a dim with coords."
        )
    if any(of_fit[dim] != of_fit[dims[0]] for dim in dims):
        raise ValueError(f"{name!r} is an index into the dims {quoted(dims)}, which differ in labels: give positions.")
    known = labels.get(dims[0], of_fit[dims[0]])
    place = {label: i for i, label in enumerate(known)}
    given = _levels(np.array(values, dtype=object).ravel() if array.dtype.kind in "OUS" else array.ravel())
    given = _like(given, known)
    check_types(f"dim {dims[0]!r}", given, known)
    if unknown := [label for label in dict.fromkeys(given) if label not in place]:
        if dims[0] in labels:
            raise ValueError(f"{name!r} has {listed(unknown)}, which are not among the labels given for {dims[0]!r}.")
        labels |= {dim: [*known, *unknown] for dim in dims}
        place |= {label: len(known) + i for i, label in enumerate(unknown)}
    return np.array([place[label] for label in given]).reshape(array.shape)


def _array(model: pm.Model, name: str, values: ArrayLike) -> AnyArray:
    variable, array = model[name], _plain_array(name, values)
    if array.ndim != variable.ndim:
        raise ValueError(
            f"{name!r} has {_axes(array.ndim)}, shape {array.shape}; in the model it has {_axes(variable.ndim)}."
        )
    if array.dtype.kind not in "biuf":
        raise ValueError(f"{name!r} should be numbers; got an array of {array.dtype}.")
    if np.dtype(variable.dtype).kind in "iu" and not np.array_equal(array, np.round(array)):
        raise ValueError(f"{name!r} should be whole numbers, as in the model; got {shortened(array)}.")
    for given, fixed in zip(array.shape, variable.type.shape, strict=True):
        if fixed not in (None, given):
            raise ValueError(f"{name!r} has shape {array.shape}; the model takes {variable.type.shape} only.")
    return array.astype(variable.dtype)


def _plain_array(name: str, values: ArrayLike) -> AnyArray:
    try:
        return np.asarray(values)
    except ValueError:
        lengths = sorted({np.size(row) for row in values})  # type: ignore[union-attr]
        raise ValueError(
            f"{name!r} is ragged: its rows have lengths {', '.join(map(str, lengths))}. Give one long array, and "
            "another that says which group each row belongs to."
        ) from None


def _axes(n: int) -> str:
    return f"{n} {'axis' if n == 1 else 'axes'}"


def _not_settable(model: pm.Model, name: object, data: list[str]) -> str:
    """Return why something can't be given new values."""
    if name in {rv.name for rv in model.observed_RVs}:
        return f"new_data has {name!r}, which is observed: it is what predictions are of. Leave it out."
    if not data:
        return (
            f"new_data has {name!r}, but the model has no pm.Data, which alone can be given new values: make its "
            "predictors pm.Data, and fit it again."
        )
    if name in model.named_vars:
        return f"new_data has {name!r}, which is no pm.Data. Those of the model are {quoted(sorted(data))}."
    return f"new_data has {name!r}, which the model has not: {suggestion(name, [*data, *model.coords])}"
