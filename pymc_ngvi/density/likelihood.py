"""What a model says of data: log p of observed variables given the free ones, without the prior."""

from collections.abc import Mapping, Sequence

import pymc as pm

from pymc.logprob.basic import transformed_conditional_logp
from pytensor.graph.basic import Variable
from pytensor.tensor import as_tensor
from pytensor.tensor.math import variadic_add


def log_likelihood(
    model: pm.Model, observed: Mapping[Variable, Variable], potentials: Sequence[Variable] = ()
) -> Variable:
    """Return the log likelihood as a function of the value variables of a model.

    Parameters
    ----------
    model : pymc.Model
    observed : mapping
        Random variables that are observed, each with its value: some of the model's, or others on its free variables.
    potentials : sequence of Variable
        Potentials of the model that count as likelihood.
    """
    values = {rv: model.rvs_to_values[rv] for rv in model.free_RVs}
    terms = transformed_conditional_logp(
        rvs=list(observed),
        rvs_to_values={**values, **observed},
        rvs_to_transforms={**model.rvs_to_transforms, **dict.fromkeys(observed)},
    )
    terms += model.replace_rvs_by_values(list(potentials))
    total: Variable = variadic_add(*(as_tensor(term, allow_xtensor_conversion=True).sum() for term in terms))
    return total
