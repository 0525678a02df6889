"""Observed arrays made data, whose values and lengths can change."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pymc as pm

from pymc.distributions.shape_utils import change_dist_size
from pytensor.graph.basic import Variable
from pytensor.graph.traversal import ancestors
from pytensor.scalar import Cast
from pytensor.tensor.elemwise import Elemwise


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
