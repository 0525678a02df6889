"""A model whose observations can be left out: each has a weight, 0 or 1, that data of the model hold."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pymc as pm

from pymc_ngvi.core.values import AnyArray


@dataclass(frozen=True)
class MaskedModel:
    """A copy of a model in which the log density of an observed variable is a weighted one.

    Parameters
    ----------
    model : pymc.Model
        With a Potential of the name of the variable.
    name : str
        Of the variable.
    weights : str
        Name of the ``pm.Data`` with the weights.
    """

    model: pm.Model
    name: str
    weights: str

    @classmethod
    def of(cls, model: pm.Model, name: str, shape: tuple[int, ...]) -> "MaskedModel":
        """Return the copy, in which all observations are there.

        Parameters
        ----------
        model : pymc.Model
        name : str
            Of an observed variable.
        shape : tuple of int
            Of its log density.
        """
        copy: Any = model.copy()
        order = {rv.name: i for i, rv in enumerate(model.free_RVs)}
        copy.free_RVs.sort(key=lambda rv: order[rv.name])  # a copy may have them in another order
        rv = copy[name]
        value, weights = copy.rvs_to_values[rv], f"{name}_weights"
        while weights in copy.named_vars:
            weights += "_"
        with copy:
            logp = pm.logp(rv, value)
            for known in (copy.rvs_to_values, copy.rvs_to_transforms):
                known.pop(rv, None)
            copy.values_to_rvs.pop(value)
            copy.observed_RVs.remove(rv)
            copy.named_vars.pop(name)
            pm.Potential(name, pm.Data(weights, np.ones(shape)) * logp)
        return cls(copy, name, weights)

    def leave_out(self, rows: AnyArray) -> None:
        """Give some observations, numbered in one row, a weight of 0, and all others one of 1."""
        weights = np.ones(self.model[self.weights].get_value(borrow=True).shape)
        weights.reshape(-1)[rows] = 0.0
        pm.set_data({self.weights: weights}, model=self.model)
