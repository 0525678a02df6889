"""The factors of a model: the log density of each of its variables. Whatever reads a model begins with them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import pymc as pm
import pytensor.tensor as pt

from pytensor.graph.basic import Variable

from pymc_ngvi.graphs.backends import without_c

type Role = Literal["observed", "prior", "potential"]


@dataclass(frozen=True, eq=False)
class Factor:
    """The log density of a random variable given those that it depends on, or a Potential."""

    #: Of the model.
    variable: Variable
    role: Role
    #: Elementwise, Jacobian included; a function of the value variables of the model.
    logp: Variable

    @property
    def name(self) -> str:
        """That of the variable."""
        return str(self.variable.name)


def factors_of(model: pm.Model, variables: Sequence[Variable] | None = None) -> tuple[Factor, ...]:
    """Return the factors of a model, made together, so that they share what they have in common."""
    if variables is None:
        variables = [*model.free_RVs, *model.observed_RVs, *model.potentials]
    with without_c(model):
        made = model.logp(vars=list(variables), sum=False)
    roles: dict[Variable, Role] = {
        **dict.fromkeys(model.free_RVs, "prior"),
        **dict.fromkeys(model.potentials, "potential"),
    }
    return tuple(
        Factor(variable, roles.get(variable, "observed"), pt.as_tensor(logp, allow_xtensor_conversion=True))
        for variable, logp in zip(variables, made, strict=True)
    )


def logp_of(factors: Sequence[Factor]) -> Variable:
    """Return the sum of some factors, a function of the value variables."""
    return pt.add(pt.constant(0.0), *[factor.logp.sum() for factor in factors])
