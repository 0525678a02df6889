"""Parameters from the prior of a model, and data from the model given these."""

import warnings

from dataclasses import dataclass

import numpy as np
import pymc as pm

from pymc.pytensorf import compile as pymc_compile
from pymc.pytensorf import reseed_rngs
from pytensor.graph.basic import Variable

from pymc_ngvi.core.values import AnyArray
from pymc_ngvi.graphs.backends import without_c

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
