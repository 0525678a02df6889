"""The data of one fit: checked, and put into the model."""

import contextlib
import hashlib

from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pymc as pm

from numpy.typing import ArrayLike

from pymc_ngvi.core.messages import shortened, suggestion
from pymc_ngvi.core.values import AnyArray
from pymc_ngvi.density.simulated import Simulated, with_data_for, without_casts
from pymc_ngvi.results.predictions import agreed_lengths, array_like, plain_array

#: The data of one fit: arrays by the name of a ``pm.Data``, of an observed variable, or of a dim, which takes labels.
type Entry = Mapping[str, ArrayLike]


class Case(NamedTuple):
    """What is fitted: data, and what they were simulated with, where they were."""

    entry: Entry
    #: Whose values are ranked among draws.
    truth: Simulated | None = None


def opened(data: Iterable[Entry]) -> tuple[Iterator[Entry], int | None]:
    """Return the entries one after the other, and how many there are, None where that is not known."""
    if isinstance(data, Mapping) or not isinstance(data, Iterable):
        what = "a dict, which is the data of one fit: write [data]" if isinstance(data, Mapping) else shortened(data)
        raise TypeError(f"data should be an iterable of dicts, one for each fit; got {what}.")
    return iter(data), len(data) if isinstance(data, Sized) else None


@dataclass(frozen=True)
class Slots:
    """Where the data of a fit go in a model."""

    #: The one that is fitted: that of the user, or a copy in which observed values can be changed.
    model: pm.Model
    #: Names in ``model`` by the names that entries have.
    names: dict[str, str]
    #: Those among the names of entries that are dims of the model.
    dims: frozenset[str]

    @classmethod
    def of(cls, model: pm.Model, entry: Entry) -> "Slots":
        """Return the places for entries that have the names of the first one."""
        _check_is_dict(entry)
        data = {v.name for v in model.data_vars if hasattr(v, "get_value")}
        observed = {rv.name: model.rvs_to_values[rv] for rv in model.observed_RVs}
        dims = frozenset(name for name in entry if name in model.coords and name not in data | observed.keys())
        names, constant = {}, []
        for name in entry:
            if name in dims:
                continue
            if name in data:
                names[name] = name
            elif name in observed and (of_data := without_casts(observed[name]).name) in data:
                names[name] = of_data
            elif name in observed and hasattr(observed[name], "data"):
                constant.append(name)
            else:
                raise ValueError(_not_settable(model, name, [*data, *observed]))
        if not names and not constant:
            raise ValueError("The first dict of data names no data: give arrays for pm.Data or observed variables.")
        if constant:
            model, made = with_data_for(model, constant)
            names |= made
        twice = [name for name in names.values() if list(names.values()).count(name) > 1]
        if twice:
            both = ", ".join(repr(k) for k, v in names.items() if v == twice[0])
            raise ValueError(f"{both} are the same data of the model: give one of them.")
        return cls(model, names, dims)

    def checked(self, entry: Entry) -> dict[str, AnyArray]:
        """Return the arrays of an entry by their names in the model, and the labels of dims."""
        _check_is_dict(entry)
        expected = {*self.names, *self.dims}
        if set(entry) != expected:
            lacks, more = sorted(expected - set(entry)), sorted(map(str, set(entry) - expected))
            parts = [f"lacks {', '.join(map(repr, lacks))}"] * bool(lacks)
            parts += [f"has {', '.join(map(repr, more))}, which the first has not"] * bool(more)
            raise ValueError(f"The dict {' and '.join(parts)}: all dicts need the same names, {_listed(expected)}.")
        arrays = {inner: self._array(name, entry[name]) for name, inner in self.names.items()}
        arrays |= {name: plain_array(name, entry[name]) for name in self.dims}
        self._check_lengths(arrays)
        return arrays

    def _array(self, name: str, values: ArrayLike) -> AnyArray:
        var = self.model[self.names[name]]
        array = array_like(var, name, values)
        for rv in self.model.observed_RVs:
            fixed = zip(array.shape, rv.type.shape, strict=False)
            if without_casts(self.model.rvs_to_values[rv]) is var and any(k not in (None, n) for n, k in fixed):
                raise ValueError(
                    f"{name!r} has shape {array.shape}; its shape is fixed in the model, {rv.type.shape}. Give its "
                    "values as pm.Data where the model is made, for shapes that differ."
                )
        return array

    def _check_lengths(self, arrays: Mapping[str, AnyArray]) -> None:
        """Raise ValueError where arrays with a dim in common differ in its length, or this can't change."""
        given: list[tuple[str, str | None, int]] = [(name, name, len(arrays[name])) for name in self.dims]
        for name, inner in self.names.items():
            dims = self.model.named_vars_to_dims.get(inner) or ()
            given += [(name, dim, n) for dim, n in zip(dims, arrays[inner].shape, strict=False)]
        lengths = agreed_lengths(given)
        for dim, (name, length) in lengths.items():
            now = int(self.model.dim_lengths[dim].eval())
            if length == now:
                continue
            if not hasattr(self.model.dim_lengths[dim], "set_value"):
                raise ValueError(
                    f"{name!r} has length {length:,} along dim {dim!r}, whose length is fixed at {now:,} in the model: "
                    "for sizes that differ, leave it out of coords, and let the dims of pm.Data make it."
                )
            if self.model.coords.get(dim) is not None and dim not in self.dims:
                raise ValueError(
                    f"{name!r} has length {length:,} along dim {dim!r}, which has {now:,} labels: give labels, too, "
                    f"as {dim!r} in each dict."
                )

    def put(self, arrays: Mapping[str, AnyArray]) -> None:
        """Give the model the data of an entry."""
        coords = {dim: arrays[dim].tolist() for dim in self.dims}
        for dim, labels in coords.items():
            if hasattr(self.model.dim_lengths[dim], "set_value"):
                self.model.set_dim(dim, len(labels), labels)
            elif list(self.model.coords[dim] or ()) != labels:
                raise ValueError(f"The length and labels of dim {dim!r} are fixed in the model: leave {dim!r} out.")
        pm.set_data({name: arrays[name] for name in self.names.values()}, model=self.model, coords=coords)

    @contextlib.contextmanager
    def left_as_it_was(self) -> Iterator[None]:
        """Give the model its own data back at the end."""
        coords = dict(self.model.coords)
        # Others are put in the place of these arrays, which are never written to.
        own = {v.name: v.get_value(borrow=True) for v in self.model.data_vars if hasattr(v, "get_value")}
        lengths = {n: v.get_value() for n, v in self.model.dim_lengths.items() if hasattr(v, "get_value")}
        try:
            yield
        finally:
            for name, values in own.items():
                self.model[name].set_value(values, borrow=True)
            for name, length in lengths.items():
                self.model.dim_lengths[name].set_value(length)
            self.model.coords.clear()
            self.model.coords.update(coords)


def digest_of(arrays: Mapping[str, AnyArray]) -> bytes:
    """Return what tells whether data are the same."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"{name}{array.dtype}{array.shape}".encode())
        digest.update(repr(array.tolist()).encode() if array.dtype.kind == "O" else np.ascontiguousarray(array).data)
    return digest.digest()


def _check_is_dict(entry: object) -> None:
    if not isinstance(entry, Mapping):
        raise ValueError(f"Each of the data should be a dict of arrays by name; got {shortened(entry)}.")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(names)))


def _not_settable(model: pm.Model, name: object, valid: list[str]) -> str:
    """Return why something can't be given data."""
    valid = list(dict.fromkeys(valid))
    if not valid:
        return "The model has neither pm.Data nor observed variables: there are no data to change."
    if name in model.named_vars:
        return (
            f"data has {name!r}, which is neither a pm.Data nor an observed variable whose values are all there. "
            f"Those of the model are {_listed(valid)}."
        )
    return f"data has {name!r}, which the model has not: {suggestion(name, valid)}"
