"""From arrays to what PyMC users expect: MultiTrace, DataTree, xarray Datasets."""

from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Never

import numpy as np
import pymc as pm
import xarray as xr

from numpy.typing import NDArray
from pymc.backends.arviz import find_observations
from pymc.backends.base import MultiTrace
from pymc.backends.ndarray import NDArray as NDArrayTrace

from pymc_ngvi.core.types import AnyArray, Array
from pymc_ngvi.core.version import __version__
from pymc_ngvi.density import Layout
from pymc_ngvi.graphs.layout import Variable

#: Labels along an axis.
type Labels = Sequence[str] | NDArray[np.generic]


def to_multitrace(
    model: pm.Model, values: dict[str, NDArray[np.generic]], stats: dict[str, NDArray[np.generic]], chains: int = 1
) -> MultiTrace:
    """Return draws as a PyMC trace."""
    return MultiTrace(
        [_chain(model, _part(values, chain, chains), _part(stats, chain, chains), chain) for chain in range(chains)]
    )


def _part(columns: dict[str, NDArray[np.generic]], chain: int, chains: int) -> dict[str, NDArray[np.generic]]:
    """Return the draws of one chain."""
    sizes = {name: len(column) // chains for name, column in columns.items()}
    return {name: column[chain * sizes[name] : (chain + 1) * sizes[name]] for name, column in columns.items()}


def _chain(
    model: pm.Model, values: dict[str, NDArray[np.generic]], stats: dict[str, NDArray[np.generic]], chain: int
) -> NDArrayTrace:
    n_draws = len(next(iter(values.values())))
    trace = NDArrayTrace(
        model=model,
        vars=[SimpleNamespace(name=name) for name in values],
        fn=_no_function,
        var_shapes={name: value.shape[1:] for name, value in values.items()},
        var_dtypes={name: value.dtype for name, value in values.items()},
    )
    trace.setup(draws=n_draws, chain=chain, sampler_vars=[{name: s.dtype for name, s in stats.items()}])
    trace.samples = values
    trace._stats = [stats]
    trace.draw_idx = n_draws
    trace.close()
    return trace


def _no_function(*_: object) -> Never:
    raise RuntimeError("This trace holds draws of a fitted approximation: no draw can be recorded.")


def to_datatree(
    trace: MultiTrace, model: pm.Model, more: Mapping[str, xr.Dataset] | None = None, **options: Any
) -> xr.DataTree:
    """Convert a trace of approximate draws as PyMC does, add groups to it, and sign it."""
    dims = _dims_that_do_not_fit(trace, model) | dict(options.pop("dims", None) or {})
    tree: xr.DataTree = pm.to_inference_data(trace, model=model, dims=dims, **options)
    for group, dataset in (more or {}).items():
        tree[group] = xr.DataTree(dataset)
    for group in ("posterior", "sample_stats", *(more or ())):
        if group in tree.children:
            attrs = tree[group].attrs
            attrs |= {"inference_library": "pymc_ngvi", "inference_library_version": __version__}
    if "sample_stats" in tree.children:
        stats = tree["sample_stats"].to_dataset()
        tree["sample_stats"] = xr.DataTree(stats[sorted(stats.data_vars, key=str)])  # PyMC keeps their names in a set
    return tree


def flat_dataset(
    layout: Layout, vectors: Array, leading: Mapping[str, Sequence[str] | NDArray[np.generic]] | None = None
) -> xr.Dataset:
    """Return unconstrained vectors as a Dataset by value name, dims and coords where they are named."""
    leading = leading or {}
    data = {}
    for v in layout.variables:
        dims = (*leading, *dims_of(v))
        coords = {**leading, **{d: layout.coords[d] for d in v.dims or ()}}
        part = vectors[..., v.where].reshape(vectors.shape[:-1] + v.shape)
        data[v.value_name] = xr.DataArray(part, dims=dims, coords=coords)
    return xr.Dataset(data)


def free_names(layout: Layout, *names: str) -> list[str]:
    """Return names, with ``q_`` before those that the variables or dims of a model have taken."""
    taken = {v.value_name for v in layout.variables}.union(*(dims_of(v) for v in layout.variables))
    return [f"q_{name}" if name in taken else name for name in names]


def labelled(labels: Sequence[str], matrix: Array, axis: str = "unconstrained") -> xr.DataArray:
    """Return a covariance with labels on both axes: ``beta[3]``, ``sd_log__``."""
    dims = (axis, f"{axis}_2")
    return xr.DataArray(matrix, dims=dims, coords=dict.fromkeys(dims, labels), name="covariance")


def dims_of(variable: Variable) -> tuple[str, ...]:
    """Return the names of the axes of an unconstrained variable."""
    return variable.dims or _plain_dims(variable.value_name, variable.shape)


def constrained_dataset(model: pm.Model, values: dict[str, NDArray[np.generic]]) -> xr.Dataset:
    """Return one value of each variable, (...), as a Dataset with the dims and coords of the model."""
    data = {}
    for name, value in values.items():
        dims, coords = axes_of(model, name, np.shape(value))
        data[name] = xr.DataArray(value, dims=dims, coords=coords)
    return xr.Dataset(data)


def axes_of(
    model: pm.Model, name: str, shape: tuple[int, ...], *, leading: bool = False
) -> tuple[tuple[str, ...], dict[str, AnyArray]]:
    """Return the dims and coords of a variable of a model, or of a part of it."""
    named = model.named_vars_to_dims.get(name)
    dims = None if named is None else named[: len(shape)] if leading else named
    if dims is None or None in dims or len(dims) != len(shape):
        dims = _plain_dims(name, shape)
    coords = {}
    for dim, length in zip(dims, shape, strict=True):
        labels = model.coords.get(dim)
        if labels is not None and len(labels) == length:
            coords[dim] = np.asarray(labels)
    return tuple(dims), coords


def _dims_that_do_not_fit(trace: MultiTrace, model: pm.Model) -> dict[str, list[str]]:
    """Return plain dims for the variables that are not of the length of their coords.

    Observations keep their length when ``pm.set_data`` brings predictors, and coords, of another. Bambi's models of an
    intercept alone have a Deterministic of length 1 along all observations.
    """
    shapes = {name: np.shape(values) for name, values in find_observations(model).items()}
    shapes |= {name: trace.get_values(name, burn=len(trace) - 1).shape[1:] for name in trace.varnames}
    plain = {}
    for name, lengths in shapes.items():
        labels = [model.coords.get(dim) for dim in model.named_vars_to_dims.get(name) or ()]
        if any(ls is not None and len(ls) != length for ls, length in zip(labels, lengths, strict=False)):
            plain[name] = list(_plain_dims(name, lengths))
    return plain


def _plain_dims(name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(f"{name}_dim_{i}" for i in range(len(shape)))


def indices_of(layout: Layout, names: str | Sequence[str], others: Iterable[str] = ()) -> NDArray[np.intp]:
    """Return the flat coordinates of the named variables, in the order of the names."""
    wanted = [names] if isinstance(names, str) else list(names)
    where = {v.name: v.where for v in layout.variables} | {v.value_name: v.where for v in layout.variables}
    if any(name not in where for name in wanted):
        where |= {layout.label(i): slice(i, i + 1) for i in range(layout.n_dim)}
    unknown = [name for name in wanted if name not in where]
    if unknown:
        known = ", ".join(map(repr, [*(v.name for v in layout.variables), *sorted(others)]))
        kind = "variable" if others else "free variable"
        raise ValueError(f"No {kind} is called {', '.join(map(repr, unknown))}; there are {known}.")
    ranges = [np.arange(where[name].start, where[name].stop) for name in wanted]
    return np.concatenate(ranges) if ranges else np.empty(0, dtype=np.intp)


def element_names(variable: xr.DataArray, leading: int) -> list[str]:
    """Return the names of elements in C order, the first dims left out: ``beta[age]``, or ``beta`` of a scalar."""
    dims = variable.dims[leading:]
    values = [variable[dim].values if dim in variable.coords else np.arange(variable.sizes[dim]) for dim in dims]
    labels = [
        ", ".join(str(v[i]) for v, i in zip(values, at, strict=True)) for at in np.ndindex(*variable.shape[leading:])
    ]
    return [f"{variable.name}[{label}]" if dims else str(variable.name) for label in labels]


def one_chain(columns: Mapping[str, Array]) -> xr.Dataset:
    """Return numbers by name, (n_draws,) each, as draws of one chain."""
    n = len(next(iter(columns.values())))
    data = {name: (("chain", "draw"), values[None]) for name, values in columns.items()}
    return xr.Dataset(data, coords={"chain": [0], "draw": np.arange(n)})


def elpd_attrs(log_density: Array) -> dict[str, float]:
    """Return the sum of log predictive densities, with its standard error."""
    n = len(log_density)
    spread = float(np.std(log_density, ddof=1)) if n > 1 else float("nan")
    return {"elpd": float(log_density.sum()), "elpd_se": spread * float(np.sqrt(n))}
