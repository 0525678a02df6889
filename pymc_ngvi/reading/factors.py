"""The factors of a model: the log density of each of its variables. Whatever reads a model begins with them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import pymc as pm
import pytensor
import pytensor.tensor as pt

from pytensor.compile import Function
from pytensor.graph.basic import Variable, equal_computations

from pymc_ngvi.graphs.backends import quick_mode, without_c

# --- functions that are compiled once, however often the graph that they are of is made ---


type CompileAll = Callable[[list[Variable], list[Variable]], Function]


class CompiledOnce:
    """Compiles functions; those of equal graphs, whose inputs have other names, are the same.

    Other data make rows anew, and mostly the same ones.
    """

    def __init__(self, compile_: CompileAll) -> None:
        self._compile = compile_
        self._made: list[tuple[list[Variable], list[Variable], Function]] = []

    def __call__(self, inputs: Sequence[Variable], outputs: Sequence[Variable]) -> Function:
        """Return the function of a graph."""
        new = list(inputs), list(outputs)
        for *old, function in self._made:
            alike = [[v.type for v in part] for part in old] == [[v.type for v in part] for part in new]
            if alike and equal_computations(new[1], old[1], new[0], old[0]):
                return function
        self._made.append((*new, self._compile(*new)))
        return self._made[-1][-1]


def quickly(inputs: list[Variable], outputs: list[Variable]) -> Function:
    """Compile a function that is called once for each set of data."""
    with without_c():
        return pytensor.function(inputs, outputs, mode=quick_mode(), on_unused_input="ignore")


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
