"""Predictions for new data, and averages of them: contrasts, and slopes."""

import functools

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args
from unittest import mock

import numpy as np
import pymc as pm
import xarray as xr

from numpy.typing import ArrayLike
from pymc.backends.arviz import find_observations
from scipy import sparse

from pymc_ngvi.core.messages import checked_names, listed, shortened, suggestion, warn
from pymc_ngvi.core.sizes import N_CHAINS
from pymc_ngvi.core.types import AnyArray, Array, Bools, Indices
from pymc_ngvi.core.version import __version__
from pymc_ngvi.density.constrain import Constrainer
from pymc_ngvi.density.info import data_in, quoted
from pymc_ngvi.density.predictive import PredictiveGraph, Treatment, indexed_axes, is_continued, n_batch_axes
from pymc_ngvi.graphs.bambi import ATTRIBUTE, OBS
from pymc_ngvi.graphs.rewrites import behind, stored_value
from pymc_ngvi.reading.roles import uncoupled_axes
from pymc_ngvi.results.distributions import Posterior, roles_of, two_points

#: Arrays by the name of a ``pm.Data``, and labels by the name of a dim.
type Given = Mapping[str, ArrayLike]


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
        given = {} if given is None else checked_dict(given)
        data = list(data_in(model))
        of_fit = {dim: _levels(coords[dim]) for dim, own in model.coords.items() if own is not None and dim in coords}
        for name in given:
            if name not in data and name not in model.coords:
                raise ValueError(not_settable(model, name, data))
        labels = {name: _labels(name, given[name], of_fit.get(name, [])) for name in given if name not in data}
        arrays = {
            name: array_like(model[name], name, _positions(model, name, given[name], labels, of_fit))
            for name in given
            if name in data
        }
        return cls(model, arrays, labels, of_fit)

    def before(self, name: str) -> AnyArray:
        """Return some data of the fit."""
        return self.model[name].get_value(borrow=True)

    def dims(self, name: str) -> tuple[str | None, ...]:
        """Return the names of the axes of a variable of the model; None where one has no name."""
        return tuple(self.model.named_vars_to_dims.get(name) or (None,) * self.model[name].type.ndim)

    @functools.cached_property
    def lengths(self) -> dict[str, int]:
        """The new lengths of the dims that labels or arrays were given for; raise ValueError where these differ."""
        given = lengths_by_dim((name, dim, now) for name, dim, _, now in self.axes())
        return {dim: n for dim, (_, n) in given.items()}

    def axes(self) -> list[tuple[str, str | None, int, int]]:
        """Return what was given, the dim, and the length in the fit and now, of each axis."""
        of_labels = [(dim, dim, len(self.of_fit.get(dim, ())), len(labels)) for dim, labels in self.labels.items()]
        return of_labels + [
            (name, *of)
            for name, array in self.arrays.items()
            for of in zip(self.dims(name), self.before(name).shape, array.shape, strict=True)
        ]

    def relabelled(self, name: str, labels: Mapping[str, list[Any]]) -> AnyArray:
        """Return new data, those that are positions among labels as positions among others that have all of these."""
        array = self.arrays[name]
        if array.dtype.kind in "iu":
            for dim in sorted(indexed_axes(self.model, name)[0] & self.labels.keys() & labels.keys()):
                return places_among(self.labels[dim], labels[dim])[array].astype(array.dtype)
        return array

    def graph(self) -> PredictiveGraph:
        """Return the graph of predictions given the new data."""
        lengths = {dim: n for dim, n in self.lengths.items() if dim in self.model.dim_lengths}
        return PredictiveGraph(self.model, self.arrays, lengths)

    def goes_on(self, name: str) -> bool:
        """Tell whether new data are those of the fit where they have its labels, or its places without labels."""
        old, new = self.before(name), self.arrays[name]
        for axis, dim in enumerate(self.dims(name)):
            has_labels = dim in self.of_fit and dim in self.labels
            known = self.of_fit[str(dim)] if has_labels else range(old.shape[axis])
            labels = self.labels[str(dim)] if has_labels else range(new.shape[axis])
            place = {label: i for i, label in enumerate(known)}
            both = [(place[label], i) for i, label in enumerate(labels) if label in place]
            old, new = (np.take(a, [pair[k] for pair in both], axis) for k, a in enumerate((old, new)))
        return bool(np.array_equal(old, new))

    def check_indices(self, graph: PredictiveGraph, names: Sequence[str]) -> None:
        """Raise ValueError where whole numbers index levels that are not there, of dims or of some variables."""
        shapes = dict(zip(names, graph.shapes([self.model[name] for name in names]), strict=True))
        for name, array in self.arrays.items():
            if array.dtype.kind not in "iu" or not array.size:
                continue
            dims, fixed = indexed_axes(self.model, name)
            found = {
                f"dim {dim!r}": (
                    0,
                    self.lengths.get(dim, len(self.of_fit.get(dim, ()))),
                    f"for others, give the labels of all levels, as {dim!r}, or labels in the place of numbers in "
                    f"{name!r}",
                )
                for dim in sorted(dims)
            }
            for variable, axis in sorted(fixed & {(v, i) for v, shape in shapes.items() for i in range(len(shape))}):
                n = shapes[variable][axis]
                cure = "a length that is fixed in the model; for new levels, give it a dim with coords, and fit again"
                found[f"{variable!r}, along axis {axis},"] = -n, n, cure
            for what, (least, n, cure) in found.items():
                if n and not least <= array.min() <= array.max() < n:
                    bad = int(array.max() if array.max() >= n else array.min())
                    raise ValueError(f"{name!r} has {bad}, but {what} has {n:,} elements, 0 to {n - 1}: {cure}.")

    def check_complete(self, needed: Iterable[str]) -> None:
        """Raise ValueError where data that are needed still have the old length of a dim, or have missing values."""
        for name in needed:
            if name in self.arrays:
                if not np.isnan(self.before(name)).any():
                    _refuse_missing(name, np.isnan(self.arrays[name]))
                continue
            for dim, old in zip(self.dims(name), self.before(name).shape, strict=True):
                new = self.lengths.get(dim, old) if dim is not None else old
                if new != old:
                    raise ValueError(
                        f"{name!r} has length {old:,} along dim {dim!r}, which now has {new:,}: give {name!r}, too."
                    )


def _refuse_missing(name: str, is_missing: Bools) -> None:
    """Raise ValueError where values are missing."""
    if rows := np.unique(np.argwhere(is_missing)[:, :1]).tolist():
        raise ValueError(f"{name!r} has missing values, in rows {listed(rows)}: fill in, or leave out.")


def checked_dict(given: Given) -> Given:
    """Return arrays by name; raise TypeError for anything else."""
    if hasattr(given, "columns"):
        raise TypeError(
            "A DataFrame is for a Bambi model that is known: that of the fit, or of the PyMC model on which a file was "
            "loaded; a pickle has none. For other models, give a dict of arrays by the names of their pm.Data."
        )
    if not isinstance(given, Mapping):
        raise TypeError(f"new_data should be a dict of arrays by name; got {shortened(given)}.")
    return given


def lengths_by_dim(given: Iterable[tuple[str, str | None, int]]) -> dict[str, tuple[str, int]]:
    """Return the length of each dim, and what has it; raise ValueError where what was given differs in one."""
    found: dict[str, tuple[str, int]] = {}
    for name, dim, length in given:
        if dim is None:
            continue
        other, known = found.setdefault(dim, (name, length))
        if known != length:
            raise ValueError(f"Lengths of dim {dim!r} do not agree: {known:,} in {other!r} and {length:,} in {name!r}.")
    return found


def _levels(values: Any) -> list[Any]:
    """Return labels as they compare: whole numbers and text as Python's, times to the nanosecond."""
    are_times = isinstance(values, np.ndarray) and values.dtype.kind == "M"
    return list(values.astype("datetime64[ns]")) if are_times else [_plain(value) for value in values]


def places_among(labels: Sequence[Any], others: Sequence[Any]) -> Indices:
    """Return where labels are among others, all of which these have."""
    place = {label: i for i, label in enumerate(others)}
    return np.array([place[label] for label in labels], dtype=np.intp)


def _plain(label: Any) -> Any:
    if hasattr(label, "to_datetime64"):
        label = label.to_datetime64()
    if isinstance(label, np.datetime64):
        return label.astype("datetime64[ns]")
    return label.item() if isinstance(label, np.generic) else label


def _like(labels: list[Any], known: Sequence[Any]) -> list[Any]:
    """Return labels with times written as text in the place of times, where those of the fit are times."""
    are_times = bool(known) and isinstance(known[0], np.datetime64)
    return [np.datetime64(label, "ns") if are_times and isinstance(label, str) else label for label in labels]


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
    array = plain_array(name, values)
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
    flat = np.array(values, dtype=object).ravel() if array.dtype.kind in "OUS" else array.ravel()
    given = _like(_levels(flat), known)
    check_types(f"dim {dims[0]!r}", given, known)
    if unknown := [label for label in dict.fromkeys(given) if label not in place]:
        if dims[0] in labels:
            raise ValueError(f"{name!r} has {listed(unknown)}, which are not among the labels given for {dims[0]!r}.")
        labels |= {dim: [*known, *unknown] for dim in dims}
        place |= {label: len(known) + i for i, label in enumerate(unknown)}
    return np.array([place[label] for label in given]).reshape(array.shape)


def array_like(variable: Any, name: str, values: ArrayLike) -> AnyArray:
    """Return values as an array that may take the place of those of a variable; raise ValueError, with their name."""
    array = plain_array(name, values)
    if array.ndim != variable.ndim:
        raise ValueError(
            f"{name!r} has {_axes(array.ndim)}, shape {array.shape}; in the model it has {_axes(variable.ndim)}."
        )
    if array.dtype.kind not in "biuf":
        raise ValueError(f"{name!r} should be numbers; got an array of {array.dtype}.")
    if np.dtype(variable.dtype).kind in "iu" and not np.array_equal(array, np.round(array)):
        raise ValueError(f"{name!r} should be whole numbers, as in the model; got {shortened(array)}.")
    if any(fixed not in (None, given) for given, fixed in zip(array.shape, variable.type.shape, strict=True)):
        raise ValueError(f"{name!r} has shape {array.shape}; the model takes {variable.type.shape} only.")
    return array.astype(variable.dtype)


def plain_array(name: str, values: ArrayLike) -> AnyArray:
    """Return values as an array; raise ValueError where they are ragged."""
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


def not_settable(
    model: pm.Model, name: object, data: Sequence[str], option: str = "new_data", kind: str = "no pm.Data"
) -> str:
    """Return why something can't be given new values, which ``data`` can; ``kind``: what it is not."""
    if name in {rv.name for rv in model.observed_RVs}.difference(data):
        return f"{option} has {name!r}, which is observed: it is what predictions are of. Leave it out."
    if not data:
        return (
            f"{option} has {name!r}, but the model has no pm.Data, which alone can be given new values: make its "
            "predictors pm.Data, and fit it again."
        )
    if name in model.named_vars or name in model.coords:
        return f"{option} has {name!r}, which is {kind}. Those of the model are {quoted(sorted(data))}."
    return f"{option} has {name!r}, which the model has not: {suggestion(name, [*data, *model.coords])}"


Groups = Literal["known", "new", "average"]


@dataclass(frozen=True)
class _Axis:
    """Where the elements of an axis were in the fit: their positions then, -1 for new ones."""

    positions: Indices
    n_old: int
    labels: list[Any] | None

    @property
    def new(self) -> list[Any]:
        """Labels of the elements that were not in the fit, or their positions."""
        places = np.flatnonzero(self.positions < 0)
        return places.tolist() if self.labels is None else [self.labels[i] for i in places]

    @property
    def goes_on(self) -> bool:
        """Whether the elements of the fit come first, all of them, and in order."""
        first = self.positions[: self.n_old]
        return len(first) == self.n_old and bool((first == np.arange(self.n_old)).all())


@dataclass
class Treatments:
    """Decides on the treatment of random variables."""

    posterior: Posterior
    graph: PredictiveGraph
    new: NewData
    #: New as well, but for what data are set to.
    rows: NewData
    groups: Groups
    #: The free variables that are effects of groups; read with ``groups="average"`` alone.
    effects: frozenset[str]
    #: Of the free variables of the fit, (n_draws, *shape), constrained.
    draws: Mapping[str, AnyArray]
    #: Values of observed variables, where all are there.
    observed: Mapping[str, AnyArray]
    drawn: list[str] = field(default_factory=list)
    averaged: list[str] = field(default_factory=list)

    def of(self, needed: Sequence[Any]) -> dict[str, Treatment]:
        """Return the treatment of the random variables that are not just drawn given their parents."""
        shapes = dict(zip([rv.name for rv in needed], self.graph.shapes(needed), strict=True))
        found = {}
        for rv in needed:
            if rv.name in self.draws:
                found[rv.name] = self._free(rv, shapes[rv.name])
            elif rv in self.graph.model.observed_RVs:
                found[rv.name] = self._observed(rv, shapes[rv.name])
        said = sorted(name for name in self.drawn if self.graph.is_in_potential(self.graph.model[name]))
        if said:
            warn(f"New elements of {quoted(said)} are drawn without regard to the Potentials that depend on these.")
        return found

    @property
    def attrs(self) -> dict[str, str]:
        """What was done with effects of groups, for the attributes of predictions."""
        named = {"drawn_from_prior": self.drawn, "averaged": self.averaged}
        return {"groups": self.groups, **{key: ", ".join(names) for key, names in named.items() if names}}

    def _free(self, rv: Any, shape: tuple[int, ...]) -> Treatment:
        draws = self.draws[rv.name]
        if self.groups == "average" and rv.name in self.effects:
            self.averaged.append(rv.name)
            return Treatment(mean=True)
        axes = self._changed(rv, draws.shape[1:], shape)
        if not axes:
            return Treatment(known=draws)
        n_batch, n_known, mask = n_batch_axes(rv), None, np.ones((1,) * len(shape), dtype=bool)
        transform = self.graph.model.rvs_to_transforms.get(rv)
        tied = rv.type.ndim - (getattr(transform, "ndim_supp", 0) or 0)  # as the order of cutpoints ties them
        self._check_processes(rv, axes)
        for number, axis in axes.items():
            if not axis.new:
                continue
            self._check_steps(rv, number, axis)
            if number < n_batch:
                if self.groups == "known":
                    what = "levels" if axis.labels is not None else "elements, at"
                    raise ValueError(
                        f"{rv.name!r} has {what} {listed(axis.new)} along {self._axis(rv, number)} that were not in "
                        "the fit. groups='new' draws them from their prior given the other parameters; "
                        "groups='average' takes the mean of that prior."
                    )
                if number >= tied:
                    raise ValueError(
                        f"{rv.name!r} has new elements, {listed(axis.new)}, along {self._axis(rv, number)}, where "
                        f"elements are tied together ({type(transform).__name__}): what some are given the others "
                        "can't be told."
                    )
                mask = mask & np.expand_dims(axis.positions >= 0, tuple(range(1, len(shape) - number)))
            elif is_continued(rv, number):
                n_known = axis.n_old
            else:
                raise ValueError(
                    f"{rv.name!r} has new elements, {listed(axis.new)}, along {self._axis(rv, number)}, where elements "
                    f"have one distribution together ({type(rv.owner.op).__name__}): what some are given the others "
                    "can't be told."
                )
        known = draws
        for number, axis in axes.items():
            known = np.take(known, np.maximum(axis.positions, 0), axis=number + 1)
        if not mask.all():
            (self.averaged if self.groups == "average" else self.drawn).append(rv.name)
        return Treatment(
            known=known if mask.any() else None,
            mask=None if mask.all() or not mask.any() else mask,
            n_known=n_known if mask.any() else None,
            mean=self.groups == "average" and not mask.all(),
        )

    def _observed(self, rv: Any, shape: tuple[int, ...]) -> Treatment:
        """Return the treatment of an observed variable: its length, and whether it goes on from what was observed."""
        [old] = self.graph.shapes([rv], new=False)
        n_batch = n_batch_axes(rv)
        size = tuple(self._length(rv, axis, old[axis], shape[axis]) for axis in range(n_batch))
        resized = None if size == shape[:n_batch] else size
        # Of many series, or vectors, those of other rows are other ones.
        is_one = not n_batch or shape[n_batch:] != old[n_batch:]
        if n_batch < len(shape) and is_continued(rv, n_batch) and is_one:
            axes = self._changed(rv, old, (*size, *shape[n_batch:]))
            if n_batch in axes:
                if not axes[n_batch].goes_on:
                    raise ValueError(self._should_go_on(rv, n_batch))
                if rv.name not in self.observed:
                    raise ValueError(f"{rv.name!r} has missing values: how it goes on from them can't be told.")
                known, values = np.zeros((1, *shape)), self.observed[rv.name]
                known[0][tuple(slice(n) for n in values.shape)] = values
                return Treatment(known=known, n_known=old[n_batch], size=resized)
        return Treatment(size=resized)

    def _length(self, rv: Any, axis: int, old: int, now: int) -> int:
        """Return the new length of an axis of an observed variable, which may be that of its data."""
        dim = self.new.dims(rv.name)[axis]
        if dim is not None and dim in self.new.lengths:
            return self.new.lengths[dim]
        pairs = [(self.new.before(name).shape, array.shape) for name, array in self.new.arrays.items()]
        lengths = {n for before, after in pairs for of, n in zip(before, after, strict=True) if of == old}
        if now != old or not self.graph.depends_on_new(rv):
            return now
        if len(lengths) > 1:
            raise ValueError(
                f"The new length of {rv.name!r} can't be told: data that had its length, {old:,}, have "
                f"{', '.join(f'{n:,}' for n in sorted(lengths))} now. Give these, and {rv.name!r}, a dim."
            )
        return lengths.pop() if lengths else now

    # --- axes ---

    def _changed(self, rv: Any, old: tuple[int, ...], shape: tuple[int, ...]) -> dict[int, _Axis]:
        """Return the axes of a variable that do not have the elements that they had."""
        if len(old) != len(shape):
            raise ValueError(f"{rv.name!r} had shape {old} in the fit, and has {shape} given the new data.")
        found = {}
        for number, (before, now) in enumerate(zip(old, shape, strict=True)):
            axis = self._axis_of(rv, number, before, now)
            if len(axis.positions) != before or not axis.goes_on:
                found[number] = axis
        return found

    def _axis_of(self, rv: Any, number: int, before: int, now: int) -> _Axis:
        dim = self.new.dims(rv.name)[number]
        if dim is not None and dim in self.new.labels and dim in self.new.of_fit:
            place = {label: i for i, label in enumerate(self.new.of_fit[dim])}
            labels = self.new.labels[dim]
            return _Axis(np.array([place.get(label, -1) for label in labels], dtype=np.intp), before, labels)
        if dim is not None and dim in self.new.of_fit and now != before:
            raise ValueError(
                f"Dim {dim!r} of {rv.name!r} had {before:,} levels in the fit, and the new data have {now:,}: give the "
                f"labels of all levels, as {dim!r}, to tell which of them these are."
            )
        by_rows = rv.name in self.draws and self.graph.is_by_rows(rv)
        named = [] if dim is None or dim in self.new.of_fit else self.new.arrays
        arrays = [(name, axis) for name in named for axis, d in enumerate(self.new.dims(name)) if d == dim] or [
            (name, axis)
            for name, array in self.new.arrays.items()
            if by_rows or (dim is None and self.graph.prior_depends_on(rv, name))
            for axis in range(array.ndim)
            if (self.new.before(name).shape[axis], array.shape[axis]) == (before, now)
        ]
        same = min(before, now) if all(self._begins_as_before(rv, *place) for place in arrays) else 0
        positions = np.full(now, -1, dtype=np.intp)
        positions[:same] = np.arange(same)
        return _Axis(positions, before, None)

    def _begins_as_before(self, rv: Any, name: str, axis: int) -> bool:
        """Tell whether new data begin with those of the fit, or are the first of them, along an axis."""
        old, given = self.new.before(name), self.new if self.graph.prior_reads(rv, name) else self.rows
        new = given.arrays.get(name, old)
        n = min(old.shape[axis], new.shape[axis])
        return bool(np.array_equal(np.take(old, np.arange(n), axis), np.take(new, np.arange(n), axis)))

    def _check_processes(self, rv: Any, axes: Mapping[int, _Axis]) -> None:
        """Raise ValueError where elements that depend on each other are not all there, those of the fit first."""
        pattern, apart = self.posterior.pattern, tuple[int, ...]()
        for place in self.posterior.layout.variables:
            if place.name == rv.name and pattern is not None and len(place.shape) == rv.type.ndim:
                apart = uncoupled_axes(place, pattern)
        if rv.name in self.posterior.density.summed_out.names:  # each element is summed out by itself
            apart = tuple(range(n_batch_axes(rv)))
        for number, axis in axes.items():
            if axis.goes_on or axis.n_old < 2 or number in apart:
                continue
            if number < n_batch_axes(rv) or (axis.new and is_continued(rv, number)):
                raise ValueError(self._should_go_on(rv, number))

    def _check_steps(self, rv: Any, number: int, axis: _Axis) -> None:
        """Raise ValueError where labels of new elements leave out some that the steps of a series would have."""
        n, labels = axis.n_old, np.asarray(axis.labels)
        is_series = is_continued(rv, number) if number >= n_batch_axes(rv) else not rv.owner.op.ndim_supp
        if n <= 2 or labels.dtype.kind not in "iufM" or not (is_series and self.graph.is_accumulated(rv)):
            return
        is_one = np.isclose(np.diff(labels) / (labels[1] - labels[0]), 1.0)
        if is_one[: n - 1].all() and not is_one.all():
            first = int(np.argmin(is_one))
            raise ValueError(
                f"Labels along {self._axis(rv, number)} of {rv.name!r} go from {labels[first]} to {labels[first + 1]}, "
                f"and each element is one step, of {labels[1] - labels[0]}, from that before it: give those in between "
                "as well."
            )

    # --- messages ---

    def _axis(self, rv: Any, number: int) -> str:
        dim = self.new.dims(rv.name)[number]
        return f"axis {number}" if dim is None else f"dim {dim!r}"

    def _should_go_on(self, rv: Any, number: int) -> str:
        return (
            f"Elements of {rv.name!r} along {self._axis(rv, number)} depend on each other, as those of a walk or a "
            "process do, and new ones depend on those of the fit: give data and labels of all elements, those of the "
            "fit first, as they were."
        )


#: Characters of an error of PyTensor in a message.
_MOST_SAID = 200


def predictions_at(
    posterior: Posterior,
    theta: Array,
    random_seed: int,
    new_data: Given | None,
    groups: Groups,
    var_names: str | Sequence[str] | None,
    at: Given | None = None,
) -> xr.DataTree:
    """Return predictions at unconstrained draws, (n_draws, n_dim).

    ``at`` is what to set data to, in rows that stay what they are: with it, the means of observed variables are
    predicted.
    """
    if groups not in get_args(Groups):
        raise ValueError(f"groups={shortened(groups)}: {suggestion(groups, get_args(Groups))}")
    if posterior.density.is_sharded:
        raise ValueError("The data are in shards, and the model is that of one: it can't predict for others.")
    bambi_model = posterior.layout.bambi.spec if hasattr(new_data, "columns") else None
    with posterior.with_data_of_fit():
        if bambi_model is None:
            rows = new = NewData.of(posterior.density.given, posterior.layout.coords, new_data)
        else:
            rows = new = rows_of_bambi(posterior, new_data, observed=False)
        if at is not None:
            new = NewData.of(new.model, posterior.layout.coords, {**(new_data or {}), **at})
        model, graph = new.model, new.graph()
        names = _wanted(posterior, model, var_names, by_rows=bambi_model is not None)
        needed = graph.needed(names)
        needed_data = graph.data_needed(names)
        new.check_complete(needed_data)
        new.check_indices(graph, [*posterior.density.summed_out.names, *(v.name for v in posterior.layout.variables)])
        effects = frozenset(v.name for v in posterior.layout.variables if {*new.dims(v.name)} & {*new.labels})
        if bambi_model is None:
            of_groups = roles_of(posterior, two_points(posterior)).groups if groups == "average" else ()
            effects = frozenset(name for group in of_groups for name in (*group.effects, *group.offsets))
        observed = {name: values for name, values in find_observations(model).items() if not np.ma.is_masked(values)}
        named = frozenset(v.name for v in posterior.layout.variables)
        free = Constrainer.of(posterior.density, deterministics=False, names=named)(theta)
        # Discrete variables that are summed out are drawn given these, unless new data change what they depend on.
        discrete = posterior.density.discrete_given(free, random_seed)
        summed_out = posterior.density.summed_out.names
        free |= {
            name: discrete[name]
            for name in summed_out
            if not graph.depends_on_new(model[name])
            or model[name].owner.op.ndim_supp  # a chain goes on from its states
        }
        plan = Treatments(posterior, graph, new, rows, groups, effects, free, observed)
        treatments = plan.of(needed)
        if groups == "average" and not effects and not plan.averaged:
            raise ValueError(
                "No effects of groups were found in the model, so that groups='average' has none to take the mean of: "
                "leave it out."
            )
        function, known = given_new_data(
            lambda: graph.compiled(names, treatments, len(theta), means=at is not None),
            new,
            needed_data,
            "What {} can't be told.",
        )
        function.reseed(random_seed)
        values = given_new_data(
            lambda: function(known), new, needed_data, "The model can't draw what it is to predict: {}"
        )
        if bambi_model is not None:  # an intercept alone has one value for all rows
            values = [np.broadcast_to(v, (len(v), len(model.coords[OBS]), *v.shape[2:])) for v in values]
        tree = tree_of(new, dict(zip(names, values, strict=True)), needed_data, plan.attrs)
        if hasattr(getattr(bambi_model, "family", None), "transform_mean"):
            _with_probabilities(tree, bambi_model)
        if bambi_model is None and at is None and not new_data:  # of the rows of the fit: where ArviZ looks for them
            seen = [name for name in names if name in observed]
            tree["posterior_predictive"] = xr.DataTree(tree["predictions"].to_dataset()[seen])
            like = tree["predictions"].to_dataset().isel(chain=0, draw=0, drop=True)
            tree["observed_data"] = xr.DataTree(
                xr.Dataset({name: like[name].copy(data=observed[name]) for name in seen})
            )
        return tree


def _wanted(posterior: Posterior, model: Any, var_names: str | Sequence[str] | None, *, by_rows: bool) -> list[str]:
    """Return the names of what to predict: as asked, or what is observed, and what was added after the fit.

    ``by_rows``: what has a value for each row of a Bambi model, and nothing else.
    """
    fitted = {*(v.name for v in posterior.layout.variables), *posterior.density.summed_out.names}
    names = [rv.name for rv in model.basic_RVs if rv in model.observed_RVs or rv.name not in fitted]
    if by_rows:
        of_rows = [d.name for d in model.deterministics if OBS in (model.named_vars_to_dims.get(d.name) or ())]
        return checked_names(var_names, [*of_rows, *names], "which is not predicted")
    if var_names is not None:
        return checked_names(var_names, [v.name for v in (*model.basic_RVs, *model.deterministics)])
    if not names:
        raise ValueError("The model has no observed variables: name what to predict, as var_names.")
    return names


def given_new_data[T](
    do: Callable[[], T], new: NewData, needed: Sequence[str], unknown: str = "The model can't draw it: {}"
) -> T:
    """Do something with a model given new data; raise ValueError where it can't be done, ``unknown`` by PyTensor."""
    try:
        return do()
    except NotImplementedError as error:
        raise ValueError(unknown.format(error)) from error
    except (AssertionError, IndexError, ValueError, TypeError) as error:  # the first is that of fixed shapes
        raise ValueError(_do_not_fit(new, needed, error)) from error


def _do_not_fit(new: NewData, needed: Sequence[str], error: Exception) -> str:
    """Return what there is to say where the model can't be evaluated given the new data."""
    given = [f"{name!r} {array.shape}" for name, array in new.arrays.items()]
    given += [f"{len(labels):,} labels of {dim!r}" for dim, labels in new.labels.items()]
    rest = [f"{name!r} {new.before(name).shape}" for name in needed if name not in new.arrays]
    parts = [f"The model can't be evaluated given {', '.join(given) or 'its data'}"]
    parts += [f"beside what is left of the data of the fit, {', '.join(rest)}"] if rest else []
    said = (str(error).splitlines() or [""])[0][:_MOST_SAID]
    cure = " ".join(_fixed_arrays(new)) or (
        f"PyTensor says: {said} -- Lengths have to agree, an index has to be within what it indexes, and lengths that "
        "are fixed in the model, such as shape=8, can't change: give variables of groups a dim with coords for levels "
        "that are new."
    )
    return f"{', '.join(parts)}. {cure}"


def _fixed_arrays(new: NewData) -> list[str]:
    """Return sentences about arrays in the model whose length is that which data or a dim had in the fit."""
    changed = {old: dim for _, dim, old, now in new.axes() if old != now}
    return sorted(
        {
            f"An array of {n:,} values is fixed in {rv.name!r}: make it a pm.Data"
            f"{f' along {changed[n]!r}' if changed[n] else ''}, and give its new values, too."
            for rv in new.model.basic_RVs
            for part in behind(rv.owner.inputs, lambda v: [] if v in new.model.basic_RVs else v.owner.inputs)
            for n in getattr(stored_value(part), "shape", ())
            if n in changed and part.name not in new.model.named_vars
        }
    )


def _with_probabilities(tree: xr.DataTree, model: Any) -> None:
    """Give probabilities of ordered classes for those that the model has: up to each, or of going on beyond it."""
    parent, threshold = (model.parameters[name] for name in (model.family.likelihood.parent, "threshold"))
    name, response = parent.alias or parent.name, model.response_term.alias or model.response_term.name
    found = tree["predictions"].to_dataset()
    if name in found:
        dims = {f"{response}_dim": f"{threshold.alias or threshold.name}_dim"}
        probabilities = model.family.transform_mean(model, found[name].rename(dims))
        tree["predictions"] = xr.DataTree(found.drop_dims(dims).assign({name: probabilities}))


# --- the tree ---


def tree_of(new: NewData, values: Mapping[str, AnyArray], data: Sequence[str], said: Mapping[str, str]) -> xr.DataTree:
    """Return predictions as ArviZ has them, in as many chains as draws of the posterior."""
    predictions = {}
    for name, array in values.items():
        coords, dims = _axes_of(new, name, array.shape[1:])
        array = array.reshape(N_CHAINS, -1, *array.shape[1:])
        dtype = np.dtype(new.model[name].type.dtype)
        if not (dtype.kind != "f" and array.dtype.kind == "f"):  # as the mean of a count is
            array = array.astype(dtype, copy=False)
        predictions[name] = xr.DataArray(
            array,
            {**coords, "chain": np.arange(N_CHAINS), "draw": np.arange(array.shape[1])},
            ("chain", "draw", *dims),
        )
    constant = {name: xr.DataArray(_data(new, name), *_axes_of(new, name, _data(new, name).shape)) for name in data}
    attrs = {"inference_library": "pymc_ngvi", "inference_library_version": __version__, **said}
    found = {"predictions": xr.Dataset(predictions, attrs=attrs)}
    if constant:
        found["predictions_constant_data"] = xr.Dataset(constant, attrs=attrs)
    return xr.DataTree.from_dict(found)


def _axes_of(new: NewData, name: str, shape: tuple[int, ...]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the coords and dims of a variable given the new data."""
    dims, coords = [], {}
    for i, (named, n) in enumerate(zip(new.dims(name), shape, strict=True)):
        dim = f"{name}_dim_{i}" if named is None else named
        labels = new.labels.get(dim, None if dim in new.lengths else new.of_fit.get(dim))
        if named is not None and new.lengths.get(dim, n) != n:
            dim, labels = f"{name}_dim_{i}", None
        dims.append(dim)
        found = range(n) if labels is None or len(labels) != n else labels
        coords[dim] = np.array(found, dtype=object if len(set(map(type, found))) > 1 else None)
    return coords, tuple(dims)


# --- models that Bambi built, with the rows of a data frame: built again, with the means and transforms of the fit ---


class _Rows(np.ndarray[Any, Any]):
    """An array that keeps its rows, of which there may be one, where Bambi squeezes it."""

    def squeeze(self, axis: Any = None) -> Any:
        """Return it without further axes of length 1."""
        return self.reshape(len(self), *(n for n in self.shape[1:] if n > 1))


def rows_of_bambi(posterior: Posterior, frame: Any, *, observed: bool) -> NewData:
    """Return the model of the rows of a data frame, and the labels of groups, those of the fit first."""
    model = posterior.layout.bambi.spec
    spec, backend, frame = copy(model), type(model.backend)(), frame.reset_index(drop=True)
    spec._components = {name: copy(part) for name, part in model.parameters.items()}
    spec._response_component = copy(model._response_component)
    labels, processes = dict[str, list[Any]](), list[Any]()
    try:
        for part in spec.conditional_parameters.values():
            centred = part.common_terms if model.center_predictors and part.intercept_term is not None else ()
            processes += [term.hsgp for term in part.hsgp_terms.values()]
            part.terms = {k: _term_of(term, frame, labels, k in centred) for k, term in part.terms.items()}
        spec.center_predictors = False  # they are
        spec._response_component.term = _response_of(model, frame, observed=observed)
    except KeyError as error:
        raise ValueError(
            f"new_data has no column {error.args[0]!r}, which the formula of the Bambi model names. Those of the "
            "response are needed, too, where there are trials."
        ) from error
    centres = iter([gp._X_center for of in processes for gp in (of.values() if isinstance(of, dict) else [of])])
    linearized = pm.gp.HSGP.prior_linearized

    def centred_as_before(gp: Any, points: Any) -> Any:
        gp._X_center = next(centres)
        return linearized(gp, points)

    with mock.patch.object(pm.gp.HSGP, "prior_linearized", centred_as_before):
        backend.build(spec)
    setattr(backend.model, ATTRIBUTE, replace(posterior.layout.bambi, data=frame))
    of_fit = {dim: _levels(known) for dim, known in posterior.layout.coords.items() if dim != OBS}
    return NewData(backend.model, {}, labels, of_fit)


def _term_of(term: Any, frame: Any, labels: dict[str, list[Any]], is_centred: bool) -> Any:
    """Return a term of a linear predictor with the rows of a data frame; ``labels`` get those of its groups."""
    new, new.term = copy(term), copy(term.term)
    if not hasattr(term, "group_index"):
        data = _complete(term.name, term.term.eval_new_data(frame))
        if hasattr(term, "hsgp"):
            new.term.data, new.hsgp_attributes = data, {**term.hsgp_attributes, "L": term.L, "c": None}
        else:
            data = data.reshape(len(frame), *term.data.shape[1:])
            new.data = (data - term.data.mean(axis=0) if is_centred else data).view(_Rows)
        return new
    new.term.expr, factor = copy(term.term.expr), term.term.factor
    data = _complete(term.name, term.term.expr.eval_new_data(frame))
    new.term.expr.data = data.reshape(len(frame), *term.predictor.shape[1:])
    columns = [c.name if c.name in frame.columns else min(c.var_names) for c in factor.components]
    known, unseen = frame.copy(), np.zeros(len(frame), dtype=bool)
    for component, column in zip(factor.components, columns, strict=True):
        _refuse_missing(column, frame[column].isna().to_numpy())
        if component.name == column:
            check_types(f"column {column!r}", list(dict.fromkeys(frame[column].tolist())), component.levels)
            is_known = frame[column].isin(component.levels)
            known[column] = frame[column].where(is_known, component.levels[0])  # for any indicator
            unseen |= ~is_known.to_numpy()
    indicators = factor.eval_new_data(known)
    written = frame[columns].astype(str).agg(":".join, axis=1)
    groups = [*term.groups, *dict.fromkeys(written[unseen])]
    new.group_index = np.where(unseen, [groups.index(label) for label in written], indicators.argmax(axis=1))
    new.term.groups = labels[f"{term.alias or term.name.split('|')[1]}__factor_dim"] = groups
    new.data = sparse.csr_array(np.equal.outer(new.group_index, np.arange(len(groups))))
    return new


def _response_of(model: Any, frame: Any, *, observed: bool) -> Any:
    """Return the response of the rows of a data frame; where that is to be predicted, it may have any values."""
    new, of_fit = copy(model.response_term), np.asarray(model.response_term.data)
    columns, data = sorted(new.term.var_names), np.repeat(of_fit[:1], len(frame), axis=0)
    has_more = data.ndim > 1 and not new.categorical and bool((of_fit[:, 1:] != of_fit[0, 1:]).any())
    if observed or (has_more and not new.is_censored and not new.is_weighted):
        for column in columns:
            _refuse_missing(column, frame[column].isna().to_numpy())
        if new.categorical:
            known = dict(zip(new._response.data[columns[0]], of_fit, strict=True))
            if unknown := sorted({str(value) for value in frame[columns[0]] if value not in known}):
                raise ValueError(f"{columns[0]!r} has {listed(unknown)}, which it had not in the fit.")
            data = np.array([known[value] for value in frame[columns[0]]])
        else:
            data = np.asarray(new.evaluate_new_data(frame))
    elif new.is_censored:
        data[:, 1] = 0
    new.family = copy(new.family)
    new.family.get_data = lambda _: data.view(_Rows)
    return new


def _complete(name: str, values: Any) -> Array:
    """Return values without missing ones."""
    array = np.asarray(values, dtype=np.float64)
    _refuse_missing(name, np.isnan(array))
    return array


# --- averages over rows of the expected response: predictions at values of data, contrasts of these, and slopes ---

#: Values that data are set to, one after the other: by label, or as they are.
type Settings = Mapping[str, ArrayLike | Mapping[Any, ArrayLike]]


def averages(
    posterior: Posterior,
    predict: Callable[..., xr.DataTree],
    at: Settings | None,
    slope: str | None,
    by: str | Sequence[str],
    new_data: Given | None,
) -> xr.Dataset:
    """Return averages of predictions, ``at`` some values; see `NGVIApproximation.average_predictions`."""
    by = [by] if isinstance(by, str) else list(by)
    with posterior.with_data_of_fit():
        rows = NewData.of(posterior.density.given, posterior.layout.coords, new_data)
        data = list(data_in(rows.model))
        for option, names in {"at": at or (), "slope": () if slope is None else (slope,)}.items():
            for name in names:
                if name not in data:
                    raise ValueError(not_settable(rows.model, name, data, option))
        settings = {name: _settings(rows, name, values) for name, values in (at or {}).items()}
        if both := sorted(settings.keys() & set(by)):
            raise ValueError(f"{quoted(both)}, in by, is set to values by at: averages have it as a dim as it is.")

        def averaged(given: Given) -> xr.Dataset:
            predictions = predict(at=given)["predictions"].to_dataset()
            dims = [str(dim) for dim in predictions.dims if dim not in ("chain", "draw")]
            if by:
                checked_names(by, [*dims, *data], "which is neither a dim of what is predicted nor pm.Data", "by")
            indicators = [_indicators(rows, name) for name in by if name not in dims]
            return predictions.map(lambda of: _average(rows.model, of, by, indicators), keep_attrs=True)

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
    labels = [rows.labels.get(dims[0], rows.of_fit[dims[0]])[i] for i in levels] if dims else levels
    return xr.DataArray(values[:, None] == levels, dims=(dim, name), coords={name: labels})


def _average(
    model: pm.Model, predictions: xr.DataArray, by: Sequence[str], indicators: Sequence[xr.DataArray]
) -> xr.DataArray:
    """Return the mean over rows, of each combination of groups of these; categories and the like are no rows."""
    own = predictions.dims[2:]
    n_axes = {rv.name: n_batch_axes(rv) or rv.type.ndim for rv in model.observed_RVs}
    of_rows = {dim for name, n in n_axes.items() for dim in (model.named_vars_to_dims.get(name) or ())[:n]}
    of_response = [d for d in own if d in of_rows] or own[: max(n_axes.values(), default=len(own))]
    weights = xr.DataArray(1.0)
    for each in indicators:
        dim, name = each.dims
        along = [d for d in own if d == dim] or [d for d in own if predictions.sizes[d] == each.sizes[dim]]
        if len(along) != 1:
            raise ValueError(
                f"It can't be told along which dim of {predictions.name!r}, {own}, the rows of {name!r} are."
            )
        weights = weights * each.rename({dim: along[0]})
    over = [d for d in own if d not in by and (d in of_response or d in weights.dims)]
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
