"""Values of this package as JSON and arrays, and back; nothing else can be made of a file.

A value is None, a number, a string, an array, an `Enum` member, a container of values, or an instance of a frozen
dataclass or NamedTuple that one of the modules in `_MODULES` defines. Nothing is imported by a name that a file gives,
nothing is unpickled.
"""

import dataclasses
import functools
import importlib
import math

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.families.arrow import ArrowStructure
from pymc_ngvi.families.block_structure import BlockStructure
from pymc_ngvi.history import History

#: Modules whose dataclasses, NamedTuples and Enums a file may hold.
_MODULES = (
    "families.block",
    "families.diagonal",
    "families.full",
    "families.full_precision",
    "families.mixture",
    "families.sparse",
    "families.student_t",
    "loop",
    "mixtures.evaluation",
    "mixtures.fitting",
    "mixtures.scale_metric",
    "mixtures.scale_mixture",
    "options",
    "persistence.matching",
    "registry",
    "result",
    "session",
    "status",
    "steps.adam",
    "steps.adaptive_state",
    "steps.belief",
    "steps.decay",
    "steps.drift",
    "steps.growth",
    "steps.levelling",
    "steps.scale_mixture",
    "steps.secant",
    "steps.stochastic",
    "steps.tails",
    "values",
)
#: Types of numbers that an array may have.
_NUMBERS = frozenset(
    ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"]
)
#: Arrays of other types (text, dates) go into the JSON; so do those of few elements, where the encoder is told so.
_FEW = 64

#: What is made of some classes in place of their fields, and of what they are made again.
_SPECIAL: dict[type, tuple[Callable[[Any], dict[str, Any]], Callable[..., Any]]] = {
    ArrowStructure: (lambda s: {"order": s.order, "sizes": s.sizes}, ArrowStructure.from_arrays),
    BlockStructure: (lambda s: {"order": s.order, "sizes": s.sizes}, BlockStructure.from_arrays),
    History: (
        lambda h: {"first": h.column(0), "second": h.column(1)},
        lambda first, second: _history(first, second),
    ),
}


class DamagedError(ValueError):
    """The content of a file is not what this package writes."""


@functools.cache
def _classes() -> dict[str, type]:
    """Return the classes that a file may hold, by name."""
    found: dict[str, type] = {_name(cls): cls for cls in _SPECIAL}
    for path in _MODULES:
        module = importlib.import_module(f"pymc_ngvi.{path}")
        for cls in vars(module).values():
            if isinstance(cls, type) and cls.__module__ == module.__name__ and _is_record(cls):
                found[_name(cls)] = cls
    return found


def _is_record(cls: type) -> bool:
    # Own decorator, not inherited: a subclass may have another constructor.
    return issubclass(cls, Enum) or "__dataclass_params__" in vars(cls) or _is_named_tuple(cls)


def _is_named_tuple(cls: type) -> bool:
    return issubclass(cls, tuple) and hasattr(cls, "_fields")


def _name(cls: type) -> str:
    return f"{cls.__module__.removeprefix('pymc_ngvi.')}.{cls.__qualname__}"


def _history(first: NDArray[Any], second: NDArray[Any]) -> History:
    history = History()
    for row in zip(first.tolist(), second.tolist(), strict=True):
        history = history.appended(*row)
    return history


class Encoder:
    """Turns values into JSON, and collects their arrays by the path at which they stand.

    An array that stands in several places is stored once.

    Parameters
    ----------
    inline : bool, default False
        Put arrays of few elements into the JSON.

    Attributes
    ----------
    arrays : dict
        Arrays by path.
    """

    def __init__(self, *, inline: bool = False) -> None:
        self.arrays: dict[str, NDArray[Any]] = {}
        self._inline = inline
        self._seen: dict[int, tuple[Any, Any]] = {}  # the object beside what it became, so that its id stays its own

    def encode(self, value: Any, path: str) -> Any:
        """Return the JSON of a value.

        Raises
        ------
        TypeError
            For a value of which a file can hold nothing, saying where it stands.
        """
        if value is None or isinstance(value, bool | str) or type(value) is int:
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"float": str(value)}
        if isinstance(value, np.generic):
            return {"number": value.dtype.name, "of": self.encode(value.item(), path)}
        if isinstance(value, np.ndarray):
            return self._array(value, path)
        if isinstance(value, Enum):
            self._check(type(value), path)
            return {"enum": _name(type(value)), "of": value.name}
        if type(value) is list:
            return [self.encode(v, f"{path}.{i}") for i, v in enumerate(value)]
        if type(value) is tuple:
            return {"tuple": [self.encode(v, f"{path}.{i}") for i, v in enumerate(value)]}
        if isinstance(value, Mapping):
            return {
                "dict": [[self.encode(k, path), self._entry(k, v, path, i)] for i, (k, v) in enumerate(value.items())]
            }
        return self._instance(value, path)

    def _entry(self, key: Any, value: Any, path: str, index: int) -> Any:
        """Encode the value of a dict, at a path that says its key where that is a plain word."""
        plain = isinstance(key, str) and key.isidentifier()
        return self.encode(value, f"{path}.{key if plain else index}")

    def _instance(self, value: Any, path: str) -> Any:
        self._check(type(value), path)
        if type(value) in _SPECIAL:
            fields = _SPECIAL[type(value)][0](value)
        elif dataclasses.is_dataclass(value):
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        else:
            fields = value._asdict()
        return {"class": _name(type(value)), "of": {k: self.encode(v, f"{path}.{k}") for k, v in fields.items()}}

    def _check(self, cls: type, path: str) -> None:
        if _classes().get(_name(cls)) is not cls:
            raise TypeError(f"{path} is a {cls.__module__}.{cls.__qualname__}, of which a file can hold nothing.")

    def _array(self, array: NDArray[Any], path: str) -> Any:
        if array.dtype.name not in _NUMBERS:
            return self._texts(array, path)
        if id(array) in self._seen:
            return self._seen[id(array)][1]
        # The same bits again need the same order in memory: BLAS adds up in another one otherwise.
        turned = array.flags.f_contiguous and not array.flags.c_contiguous
        form: dict[str, Any] = {"dtype": array.dtype.name} | ({"turned": True} if turned else {})
        if not array.size or (self._inline and array.size <= _FEW):
            values = [self.encode(v, path) for v in array.ravel().tolist()]
            form |= {"values": values, "shape": list(array.shape)}
        else:
            stored = array.T if turned else array
            self.arrays[path] = stored.view(np.uint8) if array.dtype == np.bool_ and array.ndim else stored
            form |= {"array": path}
        self._seen[id(array)] = (array, form)
        return form

    def _texts(self, array: NDArray[Any], path: str) -> Any:
        kind, shape = array.dtype.kind, list(array.shape)
        if kind in "mM":
            return {"dtype": array.dtype.str, "values": array.ravel().view(np.int64).tolist(), "shape": shape}
        if kind in "UO":
            values = [self.encode(_label(v), path) for v in array.ravel().tolist()]
            return {"dtype": "str" if kind == "U" else "object", "values": values, "shape": shape}
        raise TypeError(f"{path} is an array of {array.dtype}, which a file can't hold.")


def _label(value: Any) -> Any:
    """Return a label as something that a file can hold."""
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


class Decoder:
    """Makes values of JSON and arrays: the inverse of `Encoder`.

    Parameters
    ----------
    arrays : mapping of str to ndarray
    """

    def __init__(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self._arrays = arrays
        self._made: dict[str, NDArray[Any]] = {}

    def decode(self, form: Any) -> Any:
        """Return the value.

        Raises
        ------
        DamagedError
            For anything that `Encoder` does not write, and for classes that are not of this package.
        """
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

    def _makers(self) -> dict[str, Callable[[dict[str, Any]], Any]]:
        return {
            "float": lambda form: float(form["float"]),
            "number": lambda form: _dtype(form["number"]).type(self.decode(form["of"])),
            "tuple": lambda form: tuple(self.decode(v) for v in form["tuple"]),
            "dict": lambda form: {self.decode(k): self.decode(v) for k, v in form["dict"]},
            "enum": self._enum,
            "class": self._instance,
            "dtype": self._array,
        }

    def _enum(self, form: dict[str, Any]) -> Any:
        cls = _class(form["enum"])
        if not issubclass(cls, Enum) or form["of"] not in cls.__members__:
            raise DamagedError(f"it names {form['of']!r} of {form['enum']!r}, which there is not")
        return cls[form["of"]]

    def _instance(self, form: dict[str, Any]) -> Any:
        cls = _class(form["class"])
        fields = {str(k): self.decode(v) for k, v in form["of"].items()}
        if cls in _SPECIAL:
            return _SPECIAL[cls][1](**fields)
        if issubclass(cls, Enum):
            raise DamagedError(f"it makes a {form['class']} of fields")
        return cls(**fields)

    def _array(self, form: dict[str, Any]) -> Any:
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


def _laid_out(array: NDArray[Any], form: dict[str, Any]) -> NDArray[Any]:
    return np.asfortranarray(array) if form.get("turned") else array


def _class(name: Any) -> type:
    found = _classes().get(name) if isinstance(name, str) else None
    if found is None:
        raise DamagedError(f"it names {name!r}, which is none of the classes that such a file may hold")
    return found


def _dtype(name: Any) -> np.dtype[Any]:
    dated = isinstance(name, str) and name.startswith(("<M8", "<m8"))
    if not isinstance(name, str) or (name not in (*_NUMBERS, "str", "object") and not dated):
        raise DamagedError(f"it has an array of type {name!r}")
    result: np.dtype[Any] = np.dtype(name)
    return result
