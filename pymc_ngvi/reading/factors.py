"""The factors of a model: the log density of each of its variables. Whatever reads a model begins with them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import pymc as pm
import pytensor.tensor as pt

from pymc.logprob.basic import transformed_conditional_logp
from pytensor.graph.basic import Variable

from pymc_ngvi.graphs.backends import without_c

type Role = Literal["observed", "prior", "potential"]


@dataclass(frozen=True, eq=False)
class Factor:
    """The log density of a random variable given those that it depends on, or a Potential.

    Parameters
    ----------
    variable : pytensor variable
        Of the model.
    role : {"observed", "prior", "potential"}
    logp : pytensor variable
        Elementwise, Jacobian included; a function of the value variables of the model.
    """

    variable: Variable
    role: Role
    logp: Variable

    @property
    def name(self) -> str:
        """That of the variable."""
        return str(self.variable.name)


def factors_of(model: pm.Model, variables: Sequence[Variable] | None = None) -> tuple[Factor, ...]:
    """Return the factors of a model, made together, so that they share what they have in common.

    Parameters
    ----------
    model : pymc.Model
    variables : sequence of pytensor variables, optional
        Those whose factors are wanted. Default: all.
    """
    if variables is None:
        variables = [*model.free_RVs, *model.observed_RVs, *model.potentials]
    with without_c(model):
        made = model.logp(vars=list(variables), sum=False)
    return tuple(_factor(model, *of_variable) for of_variable in zip(variables, made, strict=True))


def likelihood_of(
    model: pm.Model, observed: Mapping[Variable, Variable], potentials: Sequence[Variable] = ()
) -> tuple[Factor, ...]:
    """Return the factors of observed variables alone, and of Potentials.

    Parameters
    ----------
    model : pymc.Model
    observed : mapping
        Random variables that are observed, each with its value: some of the model's, or others on its free variables.
    potentials : sequence of Variable
        Potentials of the model that count as likelihood.
    """
    values = {rv: model.rvs_to_values[rv] for rv in model.free_RVs}
    made = transformed_conditional_logp(
        rvs=list(observed),
        rvs_to_values={**values, **observed},
        rvs_to_transforms={**model.rvs_to_transforms, **dict.fromkeys(observed)},
    )
    made += model.replace_rvs_by_values(list(potentials))
    return tuple(_factor(model, *of_variable) for of_variable in zip([*observed, *potentials], made, strict=True))


def sum_of(factors: Sequence[Factor]) -> Variable:
    """Return the sum of some factors, a function of the value variables."""
    return pt.add(pt.constant(0.0), *[factor.logp.sum() for factor in factors])


def _factor(model: pm.Model, variable: Variable, logp: Variable) -> Factor:
    role: Role = "prior" if variable in model.free_RVs else "potential" if variable in model.potentials else "observed"
    return Factor(variable, role, pt.as_tensor(logp, allow_xtensor_conversion=True))
