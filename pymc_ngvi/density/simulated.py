"""Parameters from the prior of a model, and data from the model given these."""

import warnings

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pymc as pm

from pymc.distributions.shape_utils import change_dist_size
from pymc.pytensorf import compile as pymc_compile
from pymc.pytensorf import reseed_rngs
from pytensor.graph.basic import Variable
from pytensor.graph.traversal import ancestors
from pytensor.scalar import Cast
from pytensor.tensor.elemwise import Elemwise

from pymc_ngvi.core.types import AnyArray
from pymc_ngvi.graphs.backends import without_c

# --- observed arrays made data, whose values and lengths can change ---


def with_data_for(model: pm.Model, observed: Sequence[str]) -> tuple[pm.Model, dict[str, str]]:
    """Return a copy of a model whose observed variables have ``pm.Data`` for values, and the names of these."""
    copy: Any = model.copy()
    names = {}
    with copy:
        for name in observed:
            rv = copy[name]
            before = copy.rvs_to_values[rv]
            names[name] = f"{name}_data"
            while names[name] in copy.named_vars:
                names[name] += "_"
            values = pm.Data(names[name], np.asarray(before.data), dims=copy.named_vars_to_dims.get(name))
            copy.values_to_rvs.pop(before)
            value = values if values.dtype == rv.dtype else values.astype(rv.dtype)  # as `observed=` does
            value.name = value.name or name
            copy.rvs_to_values[rv], copy.values_to_rvs[value] = value, rv
            _let_length_change(copy, rv, value)
    return copy, names


def without_casts(value: Variable) -> Variable:
    """Return what an observed value is before it is cast to the type of its variable."""
    while isinstance(getattr(value.owner, "op", None), Elemwise) and isinstance(value.owner.op.scalar_op, Cast):
        [value] = value.owner.inputs
    return value


def _let_length_change(model: Any, rv: Any, value: Variable) -> None:
    """Give an observed variable the lengths of its values, which are fixed where these were an array.

    It stays as it is where others depend on it, or where PyMC can't change its lengths.
    """
    n_batch = rv.ndim - getattr(rv.owner.op, "ndim_supp", rv.ndim)
    others = [v for v in model.named_vars.values() if v is not rv]
    if all(length is None for length in rv.type.shape[:n_batch]) or rv in ancestors(others):
        return
    try:
        new: Any = change_dist_size(rv, value.shape[:n_batch])
    except NotImplementedError:
        return
    new.name = rv.name
    model.named_vars[rv.name] = new
    model.observed_RVs = type(model.observed_RVs)([new if v is rv else v for v in model.observed_RVs])
    model.values_to_rvs[value] = new
    for of_rv in (model.rvs_to_values, model.rvs_to_transforms, model.rvs_to_initial_values):
        if rv in of_rv:
            of_rv[new] = of_rv.pop(rv)


Values = dict[str, AnyArray]


@dataclass(frozen=True)
class Simulated:
    """One draw of everything."""

    #: Free variables and Deterministics by name, as users know them.
    values: Values
    #: Free variables by the names of their value variables.
    unconstrained: Values
    #: Observed variables by name.
    observed: Values


def simulate(model: pm.Model, n: int, seed: int) -> list[Simulated]:
    """Draw parameters and data."""
    if not model.observed_RVs:
        raise ValueError("The model has no observed variables: there are no data to simulate.")
    if model.potentials:
        names = ", ".join(repr(p.name) for p in model.potentials)
        raise ValueError(
            f"The model has pm.Potential ({names}): draws of the variables are not draws of its prior, and it can't be "
            "simulated from. Write it as a distribution: pm.Censored, pm.Truncated, pm.CustomDist with random."
        )
    free = [(rv, model.rvs_to_transforms[rv]) for rv in model.free_RVs]
    parts: list[list[tuple[str, Variable]]] = [
        [(v.name, v) for v in [*model.free_RVs, *model.deterministics]],
        [(model.rvs_to_values[rv].name, t.forward(rv, *rv.owner.inputs) if t else rv) for rv, t in free],
        [(rv.name, rv) for rv in model.observed_RVs],
    ]
    drawn = _drawn(model, [v for part in parts for _, v in part], n, seed)
    result = []
    for outputs in drawn:
        each = iter(outputs)
        result.append(Simulated(*({name: np.asarray(next(each)) for name, _ in part} for part in parts)))
    return result


def _drawn(model: pm.Model, outputs: list[Variable], n: int, seed: int) -> list[list[AnyArray]]:
    try:
        with without_c(model), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of draws that are not finite
            function, updates = pymc_compile([], outputs, random_seed=False, mode="FAST_COMPILE", return_updates=True)
            reseed_rngs(list(updates), seed)
            return [function() for _ in range(n)]
    except NotImplementedError as error:
        raise ValueError(f"The prior of the model can't be drawn from: {error}. Give each variable a prior.") from error
