"""Whether a model is the one that an approximation was saved with: its free variables, and its data."""

import contextlib
import hashlib
import warnings

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pymc as pm

from numpy.typing import ArrayLike, NDArray
from pymc.backends.arviz import find_observations

from pymc_ngvi.core.stored import stored
from pymc_ngvi.density import Layout
from pymc_ngvi.density.info import DataSnapshot

#: Labels of a dimension that an error shows.
_N_SHOWN = 3


@stored("model.free_variable")
@dataclass(frozen=True)
class FreeVariable:
    """What a file keeps of a free variable, and what of it has to agree with the model."""

    #: Of the random variable, and of its unconstrained value.
    name: str
    value_name: str
    #: Unconstrained.
    shape: tuple[int, ...]
    #: Class names of its transform; empty where there is none.
    transform: str
    #: Where they are those of the unconstrained value.
    dims: tuple[str, ...] | None
    #: Labels of the dims.
    coords: dict[str, NDArray[np.generic]]


def free_variables(model: pm.Model, layout: Layout) -> list[FreeVariable]:
    """Return the free variables of a model in the order of its layout."""
    transforms = {rv.name: transform for rv, transform in model.rvs_to_transforms.items()}
    return [
        FreeVariable(
            name=v.name,
            value_name=v.value_name,
            shape=v.shape,
            transform=_transform_name(transforms.get(v.name)),
            dims=v.dims,
            coords={dim: layout.coords[dim] for dim in v.dims or ()},
        )
        for v in layout.variables
    ]


def _transform_name(transform: object) -> str:
    if transform is None:
        return ""
    parts = getattr(transform, "transform_list", [transform])  # of a chain
    return " of ".join(type(part).__name__ for part in reversed(parts))


def differences(saved: list[FreeVariable], now: list[FreeVariable]) -> list[str]:
    """Return a line for each difference between the free variables of a file and those of a model."""
    then, there = {v.name: v for v in saved}, {v.name: v for v in now}
    lines = [f"{name!r} is not in the model" for name in then if name not in there]
    lines += [f"{name!r} is not in the file" for name in there if name not in then]
    lines += [line for name in then if name in there for line in _of_one(then[name], there[name])]
    if not lines and list(then) != list(there):
        lines.append(f"the order is {', '.join(then)} in the file, {', '.join(there)} in the model")
    return lines


def _of_one(then: FreeVariable, now: FreeVariable) -> list[str]:
    lines = []
    for what in ("value_name", "transform", "shape", "dims"):
        in_file, in_model = getattr(then, what), getattr(now, what)
        if in_file != in_model:
            word = "unconstrained value" if what == "value_name" else what
            lines.append(f"{then.name!r} has {word} {_shown(in_file)} in the file, {_shown(in_model)} in the model")
    if lines:
        return lines
    return [
        f"{then.name!r} has other labels along {dim!r}: {_labels(labels)} in the file, {_labels(now.coords[dim])} in "
        "the model"
        for dim, labels in then.coords.items()
        if not _same_labels(labels, now.coords[dim])
    ]


def _shown(value: object) -> str:
    return "none" if value in (None, "") else repr(value)


def _same_labels(left: NDArray[np.generic], right: NDArray[np.generic]) -> bool:
    return left.shape == right.shape and [str(x) for x in left.tolist()] == [str(x) for x in right.tolist()]


def _labels(labels: NDArray[np.generic]) -> str:
    shown = ", ".join(str(x) for x in labels[:_N_SHOWN].tolist())
    return f"{shown}, ... ({len(labels)})" if len(labels) > _N_SHOWN else shown or "none"


# --- data -------------------------------------------------------------------------------------------------------------


def fingerprints(model: pm.Model) -> dict[str, str]:
    """Return a digest of each observed variable and of each ``pm.Data`` of a model, by name."""
    return {name: digest(array) for name, array in _data_of(model).items()}


def _data_of(model: pm.Model) -> dict[str, NDArray[np.generic]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of observations that are a graph, such as minibatches: their data have a name
        observed = find_observations(model)
    named = {v.name: v.get_value(borrow=True) for v in model.data_vars if hasattr(v, "get_value")}
    return {**observed, **named}


def digest(values: ArrayLike) -> str:
    """Return a digest of numbers, whatever their type, or of labels."""
    array = np.asarray(values)
    if array.dtype.kind in "biuf":
        content = np.ascontiguousarray(array, dtype=np.float64).tobytes()
    else:
        content = repr(array.tolist()).encode()
    return hashlib.sha256(repr(array.shape).encode() + content).hexdigest()


class SavedData(DataSnapshot):
    """Remembers the data that a model had when an approximation was fitted in another process."""

    def __init__(self, model: pm.Model, saved: Mapping[str, str]) -> None:
        super().__init__(model)
        self._of_model, self._saved = model, dict(saved)
        self._known: dict[str, tuple[NDArray[np.generic], str]] = {}
        self._is_known = not self.changed()  # whether the data that are remembered are those of then

    @property
    def saved(self) -> dict[str, str]:
        """The digests of then, by name."""
        return dict(self._saved)

    def changed(self) -> list[str]:
        """Return the names of the data that differ from what they were, or that are no longer there."""
        now = _data_of(self._of_model)
        names = [*self._saved, *(name for name in now if name not in self._saved)]
        return [name for name in names if name not in now or self._digest(name, now[name]) != self._saved.get(name)]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Give the model the data of then, for as long as the context lasts."""
        if not self._is_known:
            if changed := self.changed():
                raise ValueError(
                    f"The data {', '.join(map(repr, changed))} are not those of the fit, and draws of an exact "
                    "posterior are made from log p given these: load it on the model with the data of the fit, and "
                    "call pm.set_data then."
                )
            self._take()
            self._is_known = True
        with super().restored():
            yield

    def _digest(self, name: str, array: NDArray[np.generic]) -> str:
        # `pm.set_data` puts another array in the place of the old one: the same one needs to be read but once.
        if name not in self._known or self._known[name][0] is not array:
            self._known[name] = (array, digest(array))
        return self._known[name][1]
