"""How an approximation is written to a file, and read."""

import contextlib
import hashlib
import json
import math
import os
import shutil
import sys
import uuid

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, cast

import h5py
import numpy as np
import pymc as pm
import xarray as xr

from numpy.typing import ArrayLike, NDArray

from pymc_ngvi.core.messages import N_NAMED
from pymc_ngvi.core.stored import BY_CLASS, BY_TAG, Stored
from pymc_ngvi.core.types import AnyArray, VariationalState
from pymc_ngvi.core.version import __version__
from pymc_ngvi.density import Layout, LogDensity, ModelDensity
from pymc_ngvi.density.info import DataSnapshot, data_in, observations
from pymc_ngvi.families import FAMILIES
from pymc_ngvi.fitting.record import FitRecord
from pymc_ngvi.methods.reparam import PushforwardState, reparametrised
from pymc_ngvi.results.distributions import Posterior

#: Suffixes of netCDF files.
_NETCDF = (".nc", ".nc4", ".netcdf", ".h5")


def check_path(path: str | os.PathLike[str]) -> Path:
    """Return where a tree is to be written, symbolic links followed."""
    given = Path(os.path.realpath(path))
    if given.suffix.lower() not in _NETCDF:
        raise ValueError(
            f"The suffix says in which format to save: {', '.join(_NETCDF)} for netCDF; got {os.fspath(path)!r}."
        )
    if not given.parent.is_dir():
        raise FileNotFoundError(f"There is no folder {str(given.parent)!r}: make it first.")
    if given.exists() and not given.is_file():
        raise FileExistsError(f"{str(given)!r} is there already, and is no file that could be replaced.")
    return given


def write(tree: xr.DataTree, path: Path) -> None:
    """Write a tree to a path; what was there is replaced at the end, with its rights, or kept where writing fails."""
    dask = sys.modules.get("dask")
    # Beside a client of Dask, xarray asks its cluster for a lock, by a name that a file in memory has not.
    with contextlib.nullcontext() if dask is None else dask.config.set(scheduler="threads"):
        content = tree.to_netcdf(None, engine="h5netcdf")  # in memory: a full disk would end HDF5, and this process
    beside = path.with_name(f".{uuid.uuid4().hex}")
    try:
        with beside.open("xb") as file:
            if path.exists():
                shutil.copymode(path, beside)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


@contextlib.contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[xr.DataTree]:
    """Open a file for reading."""
    given, name = Path(path), repr(os.fspath(path))
    if not given.exists():
        raise FileNotFoundError(f"There is no file {name}.")
    if not given.is_file() or not h5py.is_hdf5(given):
        raise ValueError(f"{name} is no netCDF-4 file: it was not written by approx.save.")
    try:
        with h5py.File(given) as file:
            _check_is_whole("/", file)
            file.visititems(_check_is_whole)
        tree = xr.open_datatree(given, decode_cf=False, engine="h5netcdf")
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, AttributeError) as error:
        raise ValueError(f"{name} is damaged, or was not written to its end: {error}") from error
    try:
        yield tree
    finally:
        tree.close()


def _check_is_whole(name: str, item: h5py.Group | h5py.Dataset) -> None:
    """Raise ValueError where a part of a file would be read from elsewhere, such as from another file."""
    if isinstance(item, h5py.Group):
        names = [key for key in item if not isinstance(item.get(key, getlink=True), h5py.HardLink)]
    else:
        names = [name] if item.external or item.is_virtual else []
    if names:
        raise ValueError(f"{names[0]!r} is a link to what is elsewhere, which is never followed")


#: A value as JSON; what files hold, by name.
type Json = Any
type Content = dict[str, Json]
#: Types of numbers that an array may have.
_NUMBERS = frozenset(
    ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"]
)
#: Arrays of other types (text, dates) go into the JSON; so do those of few elements, where the encoder is told so.
_FEW = 64


class UnknownTagError(ValueError):
    """A file holds something that this version does not know."""


class Encoder:
    """Values of this package as JSON and arrays, and back; nothing else can be made of a file.

    A value is None, a number, a string, an array, an `Enum` member, a container of values, or an instance of a class
    that has a tag (`pymc_ngvi.core.stored`). Nothing is imported by a name that a file gives, nothing is unpickled.
    """

    def __init__(self, *, inline: bool = False) -> None:
        self.arrays: dict[str, NDArray[np.generic]] = {}
        self._inline = inline
        # The object beside what it became, so that its id stays its own.
        self._seen: dict[int, tuple[object, Content]] = {}

    def encode(self, value: object, path: str) -> Json:
        """Return the JSON of a value."""
        match value:
            case None | bool() | str():
                return value
            case int() if type(value) is int:
                return value
            case float() if type(value) is float:
                return value if math.isfinite(value) else {"float": str(value)}
            case np.generic():
                return {"number": value.dtype.name, "of": self.encode(value.item(), path)}
            case np.ndarray():
                return self._array(value, path)
            case Enum():
                return {"enum": _entry_of(type(value), path).tag, "of": value.name}
            case list() if type(value) is list:
                return [self.encode(v, f"{path}.{i}") for i, v in enumerate(value)]
            case tuple() if type(value) is tuple:
                return {"tuple": [self.encode(v, f"{path}.{i}") for i, v in enumerate(value)]}
            case Mapping():
                # At a path that says the key where that is a plain word.
                plain = [k if isinstance(k, str) and k.isidentifier() else i for i, k in enumerate(value)]
                items = zip(value.items(), plain, strict=True)
                return {"dict": [[self.encode(k, path), self.encode(v, f"{path}.{at}")] for (k, v), at in items]}
        entry = _entry_of(type(value), path)
        return {"class": entry.tag, "of": {k: self.encode(v, f"{path}.{k}") for k, v in entry.fields(value).items()}}

    def _array(self, array: NDArray[np.generic], path: str) -> Content:
        kind, shape = array.dtype.kind, list(array.shape)
        if kind in "mM":
            return {"dtype": array.dtype.str, "values": array.ravel().view(np.int64).tolist(), "shape": shape}
        if kind in "UO":
            # A label that is nothing else is its text.
            values = [
                self.encode(v if v is None or isinstance(v, bool | int | float | str) else str(v), path)
                for v in array.ravel().tolist()
            ]
            return {"dtype": "str" if kind == "U" else "object", "values": values, "shape": shape}
        if array.dtype.name not in _NUMBERS:
            raise TypeError(f"{path} is an array of {array.dtype}, which a file can't hold.")
        if id(array) in self._seen:
            return self._seen[id(array)][1]
        # The same bits again need the same order in memory: BLAS adds up in another one otherwise.
        turned = array.flags.f_contiguous and not array.flags.c_contiguous
        form: Content = {"dtype": array.dtype.name} | ({"turned": True} if turned else {})
        if not array.size or (self._inline and array.size <= _FEW):
            form |= {"values": [self.encode(v, path) for v in array.ravel().tolist()], "shape": shape}
        else:
            stored = array.T if turned else array
            self.arrays[path] = stored.view(np.uint8) if array.dtype == np.bool_ and array.ndim else stored
            form |= {"array": path}
        self._seen[id(array)] = (array, form)
        return form


class Decoder:
    """Makes values of JSON and arrays: the inverse of `Encoder`."""

    def __init__(self, arrays: Mapping[str, NDArray[np.generic]]) -> None:
        self._arrays = arrays
        self._made: dict[str, NDArray[np.generic]] = {}

    def decode(self, form: Json) -> Any:
        """Return the value."""
        match form:
            case None | bool() | int() | float() | str():
                return form
            case list():
                return [self.decode(v) for v in form]
            case {"float": text}:
                return float(text)
            case {"number": name, "of": value}:
                return _dtype(name).type(self.decode(value))
            case {"tuple": values}:
                return tuple(self.decode(v) for v in values)
            case {"dict": pairs}:
                return {self.decode(k): self.decode(v) for k, v in pairs}
            case {"enum": tag, "of": name}:
                cls = _with_tag(tag).cls
                if not issubclass(cls, Enum) or name not in cls.__members__:
                    raise ValueError(f"it names {name!r} of {tag!r}, which does not exist")
                return cls[name]
            case {"class": tag, "of": fields}:
                entry = _with_tag(tag)
                if issubclass(entry.cls, Enum):
                    raise ValueError(f"it makes a {tag} of fields")
                return entry.make(**{str(k): self.decode(v) for k, v in fields.items()})
            case {"dtype": _}:
                return self._array(form)
            case dict():
                raise ValueError(f"it holds a value of unknown kind, {sorted(form)}")
        raise ValueError(f"it holds {form!r}")

    def _array(self, form: Content) -> object:
        dtype = _dtype(form["dtype"])
        if "array" not in form:
            values = np.empty(len(form["values"]), dtype=object)
            values[:] = [self.decode(v) for v in form["values"]]
            array = values.astype(dtype).reshape(form["shape"])
            return np.asfortranarray(array) if form.get("turned") else array
        path = form["array"]
        if path not in self._made:
            if path not in self._arrays:
                raise ValueError(f"it has no array {path!r}")
            stored = self._arrays[path]
            stored = stored.view(np.bool_) if dtype == np.bool_ and stored.dtype == np.uint8 else stored
            stored = np.ascontiguousarray(stored.astype(dtype, copy=False)).reshape(stored.shape)
            self._made[path] = stored.T if form.get("turned") else stored
        return self._made[path]


def _entry_of(cls: type, path: str) -> Stored:
    entry = BY_CLASS.get(cls)
    if entry is None:
        raise TypeError(f"{path} is a {cls.__module__}.{cls.__qualname__}, of which a file can hold nothing.")
    return entry


def _with_tag(tag: object) -> Stored:
    """Return the class that has a tag."""
    if not isinstance(tag, str):
        raise ValueError(f"it has {tag!r} where the name of a class should be")
    entry = BY_TAG.get(tag)
    if entry is None:
        raise UnknownTagError(f"it holds a {tag!r}, which this version does not know")
    return entry


def _dtype(name: object) -> np.dtype:
    dated = isinstance(name, str) and name.startswith(("<M8", "<m8"))
    if not isinstance(name, str) or (name not in (*_NUMBERS, "str", "object") and not dated):
        raise ValueError(f"it has an array of type {name!r}")
    return np.dtype(name)


def free_variables(model: pm.Model, layout: Layout) -> list[Content]:
    """Return what a file keeps of the free variables of a model, in the order of its layout.

    Names and shapes are those of unconstrained values, and so are dims, with their labels, where they have some;
    transforms are named by their classes, of a chain the outermost first.
    """
    parts = {
        rv.name: getattr(transform, "transform_list", [transform])[::-1]
        for rv, transform in model.rvs_to_transforms.items()
        if transform is not None
    }
    return [
        {
            "name": v.name,
            "value_name": v.value_name,
            "shape": v.shape,
            "transform": " of ".join(type(part).__name__ for part in parts.get(v.name, ())),
            "dims": v.dims,
            "coords": {dim: layout.coords[dim] for dim in v.dims or ()},
        }
        for v in layout.variables
    ]


def differences(saved: list[Content], now: list[Content]) -> list[str]:
    """Return a line for each difference between the free variables of a file and those of a model."""
    then, there = ({v["name"]: v for v in of} for of in (saved, now))
    lines = [f"{name!r} is not in the model" for name in then if name not in there]
    lines += [f"{name!r} is not in the file" for name in there if name not in then]
    for name in (name for name in then if name in there):
        one, other = then[name], there[name]
        compared = {"unconstrained value": "value_name", "transform": "transform", "shape": "shape", "dims": "dims"}
        pairs = [(what, one[key], other[key]) for what, key in compared.items()]
        differ = [(what, _shown(a), _shown(b)) for what, a, b in pairs if a != b] or [
            (f"other labels along {dim!r}:", _labels(labels), _labels(other["coords"][dim]))
            for dim, labels in one["coords"].items()
            if list(map(str, labels.tolist())) != list(map(str, other["coords"][dim].tolist()))
        ]
        lines += [f"{name!r} has {what} {a} in the file, {b} in the model" for what, a, b in differ]
    if not lines and list(then) != list(there):
        lines.append(f"the order is {', '.join(then)} in the file, {', '.join(there)} in the model")
    return lines


def _shown(value: object) -> str:
    return "none" if value in (None, "") else repr(value)


def _labels(labels: NDArray[np.generic]) -> str:
    shown = ", ".join(str(x) for x in labels[:N_NAMED].tolist())
    return f"{shown}, ... ({len(labels)})" if len(labels) > N_NAMED else shown or "none"


# --- data -------------------------------------------------------------------------------------------------------------


def data_of(model: pm.Model) -> dict[str, NDArray[np.generic]]:
    """Return each observed variable and each ``pm.Data`` of a model, by name."""
    return observations(model) | {name: v.get_value(borrow=True) for name, v in data_in(model).items()}


def digest(values: ArrayLike) -> str:
    """Return a digest of numbers, whatever their type, or of labels."""
    array = np.asarray(values)
    return digest_of({"": array.astype(np.float64 if array.dtype.kind in "biuf" else object)})


class SavedData(DataSnapshot):
    """Remembers the data that a model had when an approximation was fitted in another process."""

    def __init__(self, model: pm.Model, saved: Mapping[str, str]) -> None:
        super().__init__(model)
        #: The digests of then, by name.
        self.saved = dict(saved)
        self._known: dict[str, tuple[NDArray[np.generic], str]] = {}
        #: Where the model has had the data of then.
        self._of_fit = None if self.changed() else DataSnapshot(model)

    def changed(self) -> list[str]:
        """Return the names of the data that differ from what they were, or that are no longer there."""
        now = data_of(self._model)
        names = [*self.saved, *(name for name in now if name not in self.saved)]
        return [name for name in names if name not in now or self._digest(name, now[name]) != self.saved.get(name)]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Give the model the data of then, for as long as the context lasts."""
        if self._of_fit is None:
            if changed := self.changed():
                raise ValueError(
                    f"The data {', '.join(map(repr, changed))} are not those of the fit, and draws of an exact "
                    "posterior are made from log p given these: load it on the model with the data of the fit, and "
                    "call pm.set_data then."
                )
            self._of_fit = DataSnapshot(self._model)
        with self._of_fit.restored():
            yield

    def _digest(self, name: str, array: NDArray[np.generic]) -> str:
        # `pm.set_data` puts another array in the place of the old one: the same one needs to be read but once.
        if name not in self._known or self._known[name][0] is not array:
            self._known[name] = (array, digest(array))
        return self._known[name][1]


#: What the root of a tree is marked with.
FORMAT, VERSION = "pymc_ngvi approximation", 1
#: Groups: q with what belongs to it, the state of the fit, and moments for other readers.
APPROXIMATION, FIT, UNCONSTRAINED = "approximation", "fit", "unconstrained"
#: The variable of a group that holds its JSON, as bytes; the attribute with a digest of all its variables.
_JSON, _DIGEST = "json", "sha256"
#: Generators of random numbers whose state can be kept.
_GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
#: Classes of q by tag.
_STATES: dict[str, Any] = {
    tag: entry.cls
    for tag, entry in BY_TAG.items()
    if any(entry.cls in family.traits.states for family in FAMILIES.values())
}
#: Types of what is written of each approximation.
_OF_FIT: dict[str, type | UnionType] = {
    "q": dict,
    "record": FitRecord | None,
    "hist": np.ndarray,
    "gap_hist": np.ndarray,
    "generator": dict | None,
    "include_transformed": bool,
}
#: What damaged files lead to.
_ERRORS = (ArithmeticError, AttributeError, LookupError, MemoryError, OSError, RuntimeError, TypeError, ValueError)


def content_of_tree(tree: xr.DataTree, name: str) -> tuple[Content, Content | None]:
    """Return what a tree holds: q with what belongs to it, and the state of the fit if it is there.

    Raise ValueError if it is none of this package, of another format, or damaged.
    """
    if tree.attrs.get("format") != FORMAT:
        raise ValueError(f"{name} holds no approximation: it was not written by approx.save.")
    with damaged(name):
        version = int(tree.attrs["format_version"])
    if version != VERSION:
        raise ValueError(
            f"{name} was written by pymc_ngvi {tree.attrs.get('pymc_ngvi_version', '')} in format {version}, and "
            f"this version reads format {VERSION} only: load it with the version that wrote it, or fit again."
        )
    with damaged(name):
        content = _content_of(tree[APPROXIMATION])
        fit = _content_of(tree[FIT]) if FIT in tree.children else None
        _check_types(content, {**_OF_FIT, "variables": list, "data": dict, "backend": str})
        if content.get("gaussian") is not None:
            _check_types(content["gaussian"], _OF_FIT)
        if content.get("gaussian") is not None or content.get("exact_step") is not None:
            _check_types(content, {"exact_step": _with_tag("exact.step").cls})
        if fit is not None:
            _check_types(fit, {"snapshot": _with_tag("fit.snapshot").cls})
            fit["snapshot"].options.changed()  # checks each option
    return content, fit


def _check_types(content: Content, types: Mapping[str, type | UnionType]) -> None:
    """Raise ValueError where something is not of the type that is written."""
    for name, kind in types.items():
        if not isinstance(content[name], kind):
            raise ValueError(f"what it has as {name!r} is something else")


@contextlib.contextmanager
def damaged(name: str) -> Iterator[None]:
    """Say of errors in reading that the content is damaged, or that a newer version has written it."""
    try:
        yield
    except UnknownTagError as error:
        raise ValueError(
            f"{name} was written by a newer version of pymc_ngvi: {error}. Install the version that wrote it, or a "
            "newer one."
        ) from error
    except _ERRORS as error:
        what = f"it has no {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
        raise ValueError(f"{name} is damaged: {what}.") from error


def group_of(content: Mapping[str, object], *, inline: bool, attrs: Mapping[str, object] | None = None) -> xr.Dataset:
    """Return values as a dataset of their arrays, and of JSON for the rest."""
    encoder = Encoder(inline=inline)
    text = json.dumps({name: encoder.encode(value, name) for name, value in content.items()}, allow_nan=False)
    data = {}
    # As bytes, since netCDF limits the length of attributes; axes of one length share a dimension.
    for name, array in {_JSON: np.frombuffer(text.encode(), dtype=np.uint8), **encoder.arrays}.items():
        before = [array.shape[:axis].count(length) for axis, length in enumerate(array.shape)]
        dims = [f"n_{n}_{k + 1}" if k else f"n_{n}" for n, k in zip(array.shape, before, strict=True)]
        data[name] = xr.Variable(dims, array, encoding={"_FillValue": None})
    return sealed(xr.Dataset(data, attrs=attrs))


def sealed(group: xr.Dataset) -> xr.Dataset:
    """Return a group with the digest of its arrays."""
    return group.assign_attrs({_DIGEST: digest_of({name: group[name].values for name in group.variables})})


def digest_of(arrays: Mapping[Any, AnyArray]) -> str:
    """Return a digest of arrays and their names, which tells whether they are the same."""
    found = hashlib.sha256()
    for name in sorted(arrays):
        array = arrays[name]
        found.update(f"{name}{array.dtype}{array.shape}".encode())
        found.update(repr(array.tolist()).encode() if array.dtype.kind == "O" else np.ascontiguousarray(array).data)
    return found.hexdigest()


def _content_of(group: xr.DataTree | xr.DataArray) -> Content:
    variables = cast(xr.DataTree, group).to_dataset().variables
    arrays = {str(name): np.asarray(variable.values) for name, variable in variables.items()}
    if group.attrs.get(_DIGEST) != digest_of(arrays):
        raise ValueError("its numbers are not those that were written")
    listed = json.loads(arrays.pop(_JSON).astype(np.uint8).tobytes())
    decode = Decoder(arrays).decode
    return {str(name): decode(form) for name, form in listed.items()}


def versions() -> Content:
    """Return the attributes of the root: format, and versions of what has written it."""
    return {
        "format": FORMAT,
        "format_version": VERSION,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "pymc_ngvi_version": __version__,
        "pymc_version": pm.__version__,
        "numpy_version": np.__version__,
    }


def readable(posterior: Posterior) -> Content:
    """Return what other readers may want to know, as attributes."""
    attrs: Content = {"q": posterior.distribution.name, "n_dim": posterior.layout.n_dim}
    record = posterior.record
    if record is not None:
        names = ("family", "update", "estimator", "step", "n_iterations", "gap")
        attrs |= {name: getattr(record, name) for name in (*names, *["posterior"] * bool(record.posterior))}
        attrs |= {"status": str(record.status), "elbo": record.elbo.value, "elbo_se": record.elbo.se}
    return attrs


# --- q, and the generator ---------------------------------------------------------------------------------------------


def content_of_q(q: VariationalState, record: FitRecord | None) -> Content:
    """Return the arrays of q and what else defines it; raise TypeError for one that can't be made of a file.

    A class with a tag whose instances belong to a model says itself what is kept: by its methods ``content()``, which
    returns what a file can hold, and ``of_content(content, density)``.
    """
    if isinstance(q, PushforwardState):
        if record is None or record.reparam is None:
            raise TypeError(
                "Of an approximation with a transform that was made by hand, a file can hold nothing: only those of "
                "fits with reparam can be saved."
            )
        own = {"reparam": record.reparam, "structure": q.transform.structure}
        return {**content_of_q(q.gaussian, record), **own}
    entry = BY_CLASS.get(type(q))
    if entry is not None and hasattr(q, "content"):
        return {"class": entry.tag, "content": q.content()}
    if entry is not None and entry.tag in _STATES:
        return {"class": entry.tag, "content": q}
    known = ", ".join(kind.__name__ for kind in _STATES.values())
    raise TypeError(f"q is a {type(q).__name__}, which is none of {known}: it can't be saved.")


def q_of(content: Content, density: ModelDensity) -> VariationalState:
    """Return q on a model: the inverse of `content_of_q`."""
    tag, q = content["class"], content.get("content")
    entry = _with_tag(tag)
    if hasattr(entry.cls, "of_content"):
        return entry.cls.of_content(q, density)
    if not isinstance(q, _STATES.get(tag, ())):
        raise ValueError(f"q is a {tag!r}, which is none")
    theta = q.draws(np.full((1, density.n_dim + q.n_uniform), 0.5))
    if q.n_dim != density.n_dim or theta.shape != (1, density.n_dim) or not np.isfinite(q.log_density(theta)).all():
        raise ValueError("the arrays of q don't go together")
    if "reparam" not in content:
        return q
    if not isinstance(density, LogDensity):
        raise ValueError("its q is relative to the modes of groups, and the data of these are given in shards")
    return PushforwardState(q, reparametrised(density, content["structure"], content["reparam"]).transform)


def content_of_generator(rng: np.random.Generator) -> Content | None:
    """Return the state of a generator; None for one of a kind that is not NumPy's."""
    state = dict(rng.bit_generator.state)
    return state if state["bit_generator"] in _GENERATORS else None


def restored_generator(state: Content | None) -> np.random.Generator | None:
    """Return the generator in a state: the inverse of `content_of_generator`."""
    if state is None:
        return None
    if state["bit_generator"] not in _GENERATORS:
        raise ValueError(f"it names a generator {state['bit_generator']!r}")
    bits = getattr(np.random, state["bit_generator"])()
    bits.state = state
    return np.random.Generator(bits)
