"""Values of this package as JSON and arrays, and back; nothing else can be made of a file.

A value is None, a number, a string, an array, an `Enum` member, a container of values, or an instance of a class that
has a tag (`pymc_ngvi.core.stored`). Nothing is imported by a name that a file gives, nothing is unpickled.
"""

import math

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.stored import Stored, entry_of, with_tag

#: A value as JSON, and one that is made of several.
type Json = Any
type Form = dict[str, Json]
#: Types of numbers that an array may have.
_NUMBERS = frozenset(
    ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"]
)
#: Arrays of other types (text, dates) go into the JSON; so do those of few elements, where the encoder is told so.
_FEW = 64


class DamagedError(ValueError):
    """The content of a file is not what this package writes."""


class UnknownTagError(ValueError):
    """A file holds something that this version does not know."""

    def __init__(self, tag: str) -> None:
        super().__init__(f"it holds a {tag!r}, which this version does not know")
        self.tag = tag


class Encoder:
    """Turns values into JSON, and collects their arrays by the path at which they stand.

    An array that stands in several places is stored once.
    """

    def __init__(self, *, inline: bool = False) -> None:
        self.arrays: dict[str, NDArray[np.generic]] = {}
        self._inline = inline
        # The object beside what it became, so that its id stays its own.
        self._seen: dict[int, tuple[object, Form]] = {}

    def encode(self, value: object, path: str) -> Json:
        """Return the JSON of a value."""
        if value is None or isinstance(value, bool | str) or type(value) is int:
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"float": str(value)}
        if isinstance(value, np.generic):
            return {"number": value.dtype.name, "of": self.encode(value.item(), path)}
        if isinstance(value, np.ndarray):
            return self._array(value, path)
        if isinstance(value, Enum):
            return {"enum": _entry_of(type(value), path).tag, "of": value.name}
        if type(value) is list:
            return [self.encode(v, f"{path}.{i}") for i, v in enumerate(value)]
        if type(value) is tuple:
            return {"tuple": [self.encode(v, f"{path}.{i}") for i, v in enumerate(value)]}
        if isinstance(value, Mapping):
            return {
                "dict": [[self.encode(k, path), self._entry(k, v, path, i)] for i, (k, v) in enumerate(value.items())]
            }
        return self._instance(value, path)

    def _entry(self, key: object, value: object, path: str, index: int) -> Json:
        """Encode the value of a dict, at a path that says its key where that is a plain word."""
        plain = isinstance(key, str) and key.isidentifier()
        return self.encode(value, f"{path}.{key if plain else index}")

    def _instance(self, value: object, path: str) -> Form:
        entry = _entry_of(type(value), path)
        return {"class": entry.tag, "of": {k: self.encode(v, f"{path}.{k}") for k, v in entry.fields(value).items()}}

    def _array(self, array: NDArray[np.generic], path: str) -> Form:
        if array.dtype.name not in _NUMBERS:
            return self._texts(array, path)
        if id(array) in self._seen:
            return self._seen[id(array)][1]
        # The same bits again need the same order in memory: BLAS adds up in another one otherwise.
        turned = array.flags.f_contiguous and not array.flags.c_contiguous
        form: Form = {"dtype": array.dtype.name} | ({"turned": True} if turned else {})
        if not array.size or (self._inline and array.size <= _FEW):
            values = [self.encode(v, path) for v in array.ravel().tolist()]
            form |= {"values": values, "shape": list(array.shape)}
        else:
            stored = array.T if turned else array
            self.arrays[path] = stored.view(np.uint8) if array.dtype == np.bool_ and array.ndim else stored
            form |= {"array": path}
        self._seen[id(array)] = (array, form)
        return form

    def _texts(self, array: NDArray[np.generic], path: str) -> Form:
        kind, shape = array.dtype.kind, list(array.shape)
        if kind in "mM":
            return {"dtype": array.dtype.str, "values": array.ravel().view(np.int64).tolist(), "shape": shape}
        if kind in "UO":
            values = [self.encode(_label(v), path) for v in array.ravel().tolist()]
            return {"dtype": "str" if kind == "U" else "object", "values": values, "shape": shape}
        raise TypeError(f"{path} is an array of {array.dtype}, which a file can't hold.")


def _label(value: object) -> object:
    """Return a label as something that a file can hold."""
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


class Decoder:
    """Makes values of JSON and arrays: the inverse of `Encoder`."""

    def __init__(self, arrays: Mapping[str, NDArray[np.generic]]) -> None:
        self._arrays = arrays
        self._made: dict[str, NDArray[np.generic]] = {}

    def decode(self, form: Json) -> Any:
        """Return the value."""
        if form is None or isinstance(form, bool | int | float | str):
            return form
        if isinstance(form, list):
            return [self.decode(v) for v in form]
        if not isinstance(form, dict):
            raise DamagedError(f"it holds {form!r}")
        for key, make in self._makers().items():
            if key in form:
                return make(form)
        raise DamagedError(f"it holds a value of unknown kind, {sorted(form)}")

    def _makers(self) -> dict[str, Callable[[Form], object]]:
        return {
            "float": lambda form: float(form["float"]),
            "number": lambda form: _dtype(form["number"]).type(self.decode(form["of"])),
            "tuple": lambda form: tuple(self.decode(v) for v in form["tuple"]),
            "dict": lambda form: {self.decode(k): self.decode(v) for k, v in form["dict"]},
            "enum": self._enum,
            "class": self._instance,
            "dtype": self._array,
        }

    def _enum(self, form: Form) -> object:
        cls = _with_tag(form["enum"]).cls
        if not issubclass(cls, Enum) or form["of"] not in cls.__members__:
            raise DamagedError(f"it names {form['of']!r} of {form['enum']!r}, which does not exist")
        return cls[form["of"]]

    def _instance(self, form: Form) -> object:
        entry = _with_tag(form["class"])
        if issubclass(entry.cls, Enum):
            raise DamagedError(f"it makes a {form['class']} of fields")
        return entry.make(**{str(k): self.decode(v) for k, v in form["of"].items()})

    def _array(self, form: Form) -> object:
        dtype = _dtype(form["dtype"])
        if "array" not in form:
            values = np.empty(len(form["values"]), dtype=object)
            values[:] = [self.decode(v) for v in form["values"]]
            return _laid_out(values.astype(dtype).reshape(form["shape"]), form)
        path = form["array"]
        if path not in self._made:
            if path not in self._arrays:
                raise DamagedError(f"it has no array {path!r}")
            stored = self._arrays[path]
            stored = stored.view(np.bool_) if dtype == np.bool_ and stored.dtype == np.uint8 else stored
            stored = np.ascontiguousarray(stored.astype(dtype, copy=False)).reshape(stored.shape)
            self._made[path] = stored.T if form.get("turned") else stored
        return self._made[path]


def _laid_out(array: NDArray[np.generic], form: Form) -> NDArray[np.generic]:
    return np.asfortranarray(array) if form.get("turned") else array


def _entry_of(cls: type, path: str) -> Stored:
    entry = entry_of(cls)
    if entry is None:
        raise TypeError(f"{path} is a {cls.__module__}.{cls.__qualname__}, of which a file can hold nothing.")
    return entry


def _with_tag(tag: object) -> Stored:
    """Return the class that has a tag."""
    if not isinstance(tag, str):
        raise DamagedError(f"it has {tag!r} where the name of a class should be")
    entry = with_tag(tag)
    if entry is None:
        raise UnknownTagError(tag)
    return entry


def _dtype(name: object) -> np.dtype:
    dated = isinstance(name, str) and name.startswith(("<M8", "<m8"))
    if not isinstance(name, str) or (name not in (*_NUMBERS, "str", "object") and not dated):
        raise DamagedError(f"it has an array of type {name!r}")
    return np.dtype(name)
