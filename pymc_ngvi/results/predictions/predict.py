"""Draws of predictions: posterior draws of what was in the fit, and draws of the rest given these."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import numpy as np
import xarray as xr

from pymc.backends.arviz import find_observations

from pymc_ngvi.core.messages import shortened, suggestion
from pymc_ngvi.core.types import Array
from pymc_ngvi.core.values import AnyArray
from pymc_ngvi.core.version import __version__
from pymc_ngvi.density.constrain import Constrainer
from pymc_ngvi.density.predictive import PredictiveGraph
from pymc_ngvi.results.posterior import Posterior
from pymc_ngvi.results.predictions.new_data import Given, NewData
from pymc_ngvi.results.predictions.treatments import Groups, Treatments
from pymc_ngvi.results.summary.summary import roles_of, two_points

#: Characters of an error of PyTensor in a message.
_MOST_SAID = 200


def check_groups(groups: object) -> None:
    """Raise ValueError for a word that says nothing of groups."""
    if groups not in get_args(Groups):
        raise ValueError(f"groups={shortened(groups)}: {suggestion(groups, get_args(Groups))}")


def predictions_at(
    posterior: Posterior,
    theta: Array,
    new_data: Given | None,
    groups: Groups,
    var_names: str | Sequence[str] | None,
    random_seed: int,
    effects: frozenset[str] | None = None,
) -> xr.DataTree:
    """Return predictions at unconstrained draws, (n_draws, n_dim); ``effects`` are those of groups, where known."""
    if posterior.density.is_sharded:
        raise ValueError("The data are in shards, and the model is that of one: it can't predict for others.")
    with posterior.with_data_of_fit():
        model = posterior.density.given
        names = _wanted(posterior, var_names)
        new = NewData.of(model, posterior.layout.coords, new_data)
        lengths = {dim: n for dim, n in new.lengths.items() if dim in model.dim_lengths}
        graph = PredictiveGraph(model, new.arrays, lengths)
        needed = graph.needed(names)
        needed_data = graph.data_needed(names)
        new.check_complete(needed_data)
        if effects is None:
            effects = frozenset(_effects(posterior) if groups == "average" else ())
        observed = {name: values for name, values in find_observations(model).items() if not np.ma.is_masked(values)}
        free = _free(posterior, theta)
        free |= _discrete(posterior, graph, free, random_seed)
        new.check_fixed({name: draws.shape[1:] for name, draws in free.items()})
        plan = Treatments(posterior, graph, new, groups, effects, free, observed)
        treatments = plan.of(needed)
        if groups == "average" and not effects and not plan.averaged:
            raise ValueError(
                "No effects of groups were found in the model, so that groups='average' has none to take the mean of: "
                "leave it out."
            )
        function, known = given_new_data(
            lambda: graph.compiled(names, treatments, len(theta)), new, needed_data, "What {} can't be told."
        )
        function.reseed(random_seed)
        values = given_new_data(
            lambda: function(known), new, needed_data, "The model can't draw what it is to predict: {}"
        )
        return tree_of(new, dict(zip(names, values, strict=True)), needed_data, plan.attrs)


def _free(posterior: Posterior, theta: Array) -> dict[str, AnyArray]:
    """Return draws of the free variables on their constrained scale."""
    names = frozenset(v.name for v in posterior.layout.variables)
    return Constrainer.of(posterior.density, deterministics=False, names=names)(theta)


def _discrete(
    posterior: Posterior, graph: PredictiveGraph, free: dict[str, AnyArray], random_seed: int
) -> dict[str, AnyArray]:
    """Return draws of discrete variables that were summed out, but for those that the new data are about."""
    drawn = posterior.density.discrete_given(free, random_seed)
    names = posterior.density.summed_out_names
    return {name: drawn[name] for name in names if not graph.depends_on_new(graph.model[name])}


def _effects(posterior: Posterior) -> list[str]:
    """Return the names of the free variables that are effects of groups."""
    groups = roles_of(posterior, two_points(posterior)).groups
    return [name for group in groups for name in (*group.effects, *group.offsets)]


def _wanted(posterior: Posterior, var_names: str | Sequence[str] | None) -> list[str]:
    """Return the names of what to predict: as asked, or what is observed, and what was added after the fit."""
    model = posterior.density.given
    if var_names is None:
        fitted = {*(v.name for v in posterior.layout.variables), *posterior.density.summed_out_names}
        names = [rv.name for rv in model.basic_RVs if rv in model.observed_RVs or rv.name not in fitted]
        if not names:
            raise ValueError("The model has no observed variables: name what to predict, as var_names.")
        return names
    names = [var_names] if isinstance(var_names, str) else list(dict.fromkeys(var_names))
    valid = [v.name for v in (*model.basic_RVs, *model.deterministics)]
    if unknown := [name for name in names if name not in valid]:
        raise ValueError(f"var_names has {unknown[0]!r}, which the model has not: {suggestion(unknown[0], valid)}")
    if not names:
        raise ValueError("var_names is empty: name at least one variable, or leave it out for the observed ones.")
    return names


def given_new_data[T](
    do: Callable[[], T], new: NewData, needed: Sequence[str], unknown: str = "The model can't draw it: {}"
) -> T:
    """Do something with a model given new data; raise ValueError where it can't be done, ``unknown`` by PyTensor."""
    try:
        return do()
    except NotImplementedError as error:
        raise ValueError(unknown.format(error)) from error
    except (IndexError, ValueError, TypeError) as error:
        raise ValueError(_do_not_fit(new, needed, error)) from error


def _do_not_fit(new: NewData, needed: Sequence[str], error: Exception) -> str:
    """Return what there is to say where the model can't be evaluated given the new data."""
    given = [f"{name!r} {array.shape}" for name, array in new.arrays.items()]
    given += [f"{len(labels):,} labels of {dim!r}" for dim, labels in new.labels.items()]
    rest = [f"{name!r} {new.before(name).shape}" for name in needed if name not in new.arrays]
    parts = [f"The model can't be evaluated given {', '.join(given) or 'its data'}"]
    parts += [f"beside what is left of the data of the fit, {', '.join(rest)}"] * bool(rest)
    said = (str(error).splitlines() or [""])[0][:_MOST_SAID]
    return (
        f"{', '.join(parts)}. PyTensor says: {said} -- Lengths have to agree, an index has to be within what it "
        "indexes, and lengths that are fixed in the model, such as shape=8, can't change: give variables of groups a "
        "dim with coords for levels that are new."
    )


# --- the tree ---


def tree_of(new: NewData, values: Mapping[str, AnyArray], data: Sequence[str], said: Mapping[str, str]) -> xr.DataTree:
    """Return predictions as ArviZ has them, with one chain."""
    predictions = {}
    for name, array in values.items():
        dims, coords = _axes(new, name, array.shape[1:])
        coords |= {"chain": np.zeros(1, dtype=int), "draw": np.arange(len(array))}
        predictions[name] = xr.DataArray(
            array[None].astype(new.model[name].type.dtype, copy=False), dims=("chain", "draw", *dims), coords=coords
        )
    constant = {}
    for name in data:
        array = new.arrays[name] if name in new.arrays else new.before(name)
        dims, coords = _axes(new, name, array.shape)
        constant[name] = xr.DataArray(array, dims=dims, coords=coords)
    attrs = {"inference_library": "pymc_ngvi", "inference_library_version": __version__, **said}
    found = {"predictions": xr.Dataset(predictions, attrs=attrs)}
    if constant:
        found["predictions_constant_data"] = xr.Dataset(constant, attrs=attrs)
    return xr.DataTree.from_dict(found)


def _axes(new: NewData, name: str, shape: tuple[int, ...]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the dims and coords of a variable given the new data."""
    dims, coords = [], {}
    for i, (named, n) in enumerate(zip(new.dims(name), shape, strict=True)):
        dim = f"{name}_dim_{i}" if named is None else named
        labels = new.labels.get(dim, None if dim in new.lengths else new.of_fit.get(dim))
        if named is not None and new.lengths.get(dim, n) != n:
            dim, labels = f"{name}_dim_{i}", None
        dims.append(dim)
        coords[dim] = np.arange(n) if labels is None or len(labels) != n else _as_array(labels)
    return tuple(dims), coords


def _as_array(labels: Sequence[Any]) -> AnyArray:
    """Return labels as an array; numbers beside text stay numbers."""
    array: AnyArray = np.asarray(labels)
    return np.array(labels, dtype=object) if len({type(label) for label in labels}) > 1 else array
