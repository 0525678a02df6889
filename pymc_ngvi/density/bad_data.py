"""Data that no fit can do much with: values that are not finite, and values that are all equal."""

import warnings

from collections.abc import Iterable

import numpy as np
import pymc as pm

from pymc.backends.arviz import find_observations
from pymc.distributions.censored import CensoredRV
from pymc.distributions.truncated import TruncatedRV
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Constant, Variable
from pytensor.graph.traversal import walk


def not_finite_data(model: pm.Model, names: Iterable[str]) -> list[str]:
    """Return the arrays with values that are not finite among what some variables are made of, in words.

    Infinite bounds of censored and truncated variables are none of these.
    """
    found: dict[str, None] = {}
    variables = set(model.basic_RVs)
    for name in names:
        var = model[name]
        of_rv = list(var.owner.inputs) if var in variables else [var]
        may_be_infinite = isinstance(getattr(var.owner, "op", None), CensoredRV | TruncatedRV)
        for part in walk(of_rv, lambda v: None if v.owner is None or v in variables else list(v.owner.inputs)):
            values = _values(part)
            if values is None or values.ndim == 0:
                continue
            bad = np.isnan(values) if may_be_infinite else ~np.isfinite(values)
            if bad.any():
                which = repr(part.name) if part.name else f"an array in {name!r}"
                found[f"{which} ({int(bad.sum()):,} of {bad.size:,} values)"] = None
    return list(found)


def _values(var: Variable) -> np.ndarray | None:
    """Return the numbers of data; None for anything else."""
    if isinstance(var, SharedVariable):
        value = var.get_value(borrow=True)
    elif isinstance(var, Constant):
        value = var.data
    else:
        return None
    return value if isinstance(value, np.ndarray) and value.dtype.kind == "f" else None


def constant_data(model: pm.Model) -> list[str]:
    """Return the continuous observed variables whose values are all equal, in words."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of observations that are a graph
        observed = find_observations(model)
    continuous = {rv.name for rv in model.observed_RVs if rv.dtype.startswith("float")}
    values = {name: np.asarray(value) for name, value in observed.items() if name in continuous}
    return [f"{name!r} (all {v.flat[0]:g})" for name, v in values.items() if v.size > 1 and np.ptp(v) == 0.0]
