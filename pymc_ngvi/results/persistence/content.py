"""What a tree holds of an approximation: groups of arrays with JSON, q, the generator, versions."""

import contextlib
import json

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from types import UnionType
from typing import Any

import numpy as np
import pymc as pm
import xarray as xr

from pymc_ngvi.core.stored import all_stored, entry_of, with_tag
from pymc_ngvi.core.types import VariationalState
from pymc_ngvi.core.version import __version__
from pymc_ngvi.density import LogDensity, ModelDensity
from pymc_ngvi.families import FAMILIES
from pymc_ngvi.families.pushforward import PushforwardState
from pymc_ngvi.fitting.memory import memory_of, remember
from pymc_ngvi.fitting.record import FitRecord
from pymc_ngvi.reparam import reparametrised
from pymc_ngvi.results.persistence import files
from pymc_ngvi.results.persistence.encoding import DamagedError, Decoder, Encoder, UnknownTagError
from pymc_ngvi.results.persistence.matching import FreeVariable
from pymc_ngvi.results.posterior import Posterior

#: What files hold, by name.
type Content = dict[str, Any]
#: What the root of a tree is marked with.
FORMAT, VERSION = "pymc_ngvi approximation", 1
#: Groups: q with what belongs to it, the state of the fit, and moments for other readers.
APPROXIMATION, FIT, UNCONSTRAINED = "approximation", "fit", "unconstrained"
#: The variable of a group that holds its JSON, as bytes.
_JSON = "json"
#: Generators of random numbers whose state can be kept.
_GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
#: Classes of q by tag.
_STATES: dict[str, Any] = {
    tag: entry.cls
    for tag, entry in all_stored().items()
    if any(entry.cls in family.traits.states for family in FAMILIES.values())
}
#: Types of what is written of each approximation; and of one as a whole.
_OF_FIT: dict[str, type | UnionType] = {
    "q": dict,
    "record": FitRecord | None,
    "hist": np.ndarray,
    "gap_hist": np.ndarray,
    "generator": dict | None,
    "include_transformed": bool,
}
_TYPES: dict[str, type | UnionType] = {**_OF_FIT, "variables": list, "data": dict, "backend": str}
#: What damaged files lead to.
_ERRORS = (ArithmeticError, AttributeError, LookupError, MemoryError, OSError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class Saved:
    """What a tree holds: q with what belongs to it, and the state of the fit if it is there."""

    content: Content
    fit: Content | None

    @classmethod
    def of(cls, tree: xr.DataTree, name: str) -> "Saved":
        """Read a tree; raise ValueError if it is none of this package, of another format, or damaged."""
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
            _check_types(content, _TYPES)
            if content.get("gaussian") is not None:
                _check_types(content["gaussian"], _OF_FIT)
            if content.get("gaussian") is not None or content.get("exact_step") is not None:
                _check_types(content, {"exact_step": _class_of("exact.step")})
            if fit is not None:
                _check_types(fit, {"snapshot": _class_of("fit.snapshot"), "log_p": float | None})
                fit["snapshot"].options.changed()  # checks each option
        return cls(content, fit)


def _check_types(content: Content, types: Mapping[str, type | UnionType]) -> None:
    """Raise DamagedError where something is not of the type that is written."""
    for name, kind in types.items():
        if not isinstance(content[name], kind):
            raise DamagedError(f"what it has as {name!r} is something else")
    if not all(isinstance(v, FreeVariable) for v in content.get("variables", ())):
        raise DamagedError("what it has as variables is something else")


def _class_of(tag: str) -> type:
    entry = with_tag(tag)
    assert entry is not None
    return entry.cls


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
    as_bytes = np.frombuffer(text.encode(), dtype=np.uint8)  # netCDF limits the length of attributes
    return files.dataset_of({_JSON: as_bytes, **encoder.arrays}).assign_attrs(attrs or {})


def _content_of(group: xr.DataTree | xr.DataArray) -> Content:
    assert isinstance(group, xr.DataTree)
    arrays = files.arrays_of(group)
    listed = json.loads(arrays.pop(_JSON).astype(np.uint8).tobytes())
    decoder = Decoder(arrays)
    return {str(name): decoder.decode(form) for name, form in listed.items()}


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
        attrs |= {name: getattr(record, name) for name in names}
        attrs |= {"status": str(record.status), "elbo": record.elbo.value, "elbo_se": record.elbo.se}
        attrs |= {"posterior": record.posterior} if record.posterior else {}
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
        own = {"reparam": record.reparam, "structure": q.transform.structure, "memory": memory_of(q.transform)}
        return {**content_of_q(q.gaussian, record), **own}
    entry = entry_of(type(q))
    if entry is not None and hasattr(q, "content"):
        return {"class": entry.tag, "content": q.content()}
    if entry is None or not hasattr(q, "arrays"):
        known = ", ".join(kind.__name__ for kind in _STATES.values())
        raise TypeError(f"q is a {type(q).__name__}, which is none of {known}: it can't be saved.")
    return {"class": entry.tag, **q.arrays()}


def q_of(content: Content, density: ModelDensity) -> VariationalState:
    """Return q on a model: the inverse of `content_of_q`."""
    params = dict(content)
    tag = params.pop("class")
    entry = with_tag(tag)
    if entry is None:
        raise UnknownTagError(tag)
    if hasattr(entry.cls, "of_content"):
        return entry.cls.of_content(params["content"], density)
    if tag not in _STATES:
        raise DamagedError(f"q is a {tag!r}, which is none")
    kind = _STATES[tag]
    reparam, structure, memory = (params.pop(name, None) for name in ("reparam", "structure", "memory"))
    q = kind.of_arrays(params)
    base = np.full((1, density.n_dim + q.n_uniform), 0.5)
    theta = q.draws(base)
    if q.n_dim != density.n_dim or theta.shape != (1, density.n_dim) or not np.isfinite(q.log_density(theta)).all():
        raise DamagedError("the arrays of q don't go together")
    if reparam is None:
        return q
    if not isinstance(density, LogDensity):
        raise DamagedError("its q is relative to the modes of groups, and the data of these are given in shards")
    transform = reparametrised(density, structure, reparam).transform
    remember(transform, memory)
    return PushforwardState(q, transform)


def content_of_generator(rng: np.random.Generator) -> Content | None:
    """Return the state of a generator; None for one of a kind that is not NumPy's."""
    state = dict(rng.bit_generator.state)
    return state if state["bit_generator"] in _GENERATORS else None


def restored_generator(state: Content | None) -> np.random.Generator | None:
    """Return the generator in a state: the inverse of `content_of_generator`."""
    if state is None:
        return None
    if state["bit_generator"] not in _GENERATORS:
        raise DamagedError(f"it names a generator {state['bit_generator']!r}")
    bits = getattr(np.random, state["bit_generator"])()
    bits.state = state
    return np.random.Generator(bits)
