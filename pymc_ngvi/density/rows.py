"""The Gauss-Newton matrix of a model, row by row: squares of the gradients of single observations.

Khan & Nielsen (2018), "Fast yet simple natural-gradient descent for variational inference in complex models": VOGN
replaces the Hessian of the log likelihood by minus the sum of g_i g_i^T over its rows i, which is never indefinite.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import pymc as pm
import pytensor.tensor as pt

from pymc.variational.minibatch_rv import MinibatchRandomVariable, get_scaling
from pytensor.graph.basic import Variable

from pymc_ngvi.density.checks import quoted
from pymc_ngvi.reading.factors import Factor, Role, logp_of

_INSTEAD = "Use estimator='price', which needs only derivatives of the whole log density."


@dataclass(frozen=True)
class LikelihoodRows:
    """The log density of a model in two parts: the rows of its observed variables, and all else."""

    model: pm.Model
    #: Of the model.
    factors: Sequence[Factor]

    def graphs(self) -> tuple[list[Variable], list[Variable], Variable]:
        """Return the log density by rows, and what is left of it, as functions of the value variables."""
        observed = self._of_role("observed")
        self._check_kinds(observed)
        values = [self.model.rvs_to_values[factor.variable] for factor in observed]
        _check_rows(observed, values)
        scales = [_scale(factor.variable, value) for factor, value in zip(observed, values, strict=True)]
        return [factor.logp for factor in observed], scales, logp_of(self._of_role("prior"))

    def _of_role(self, role: Role) -> list[Factor]:
        return [factor for factor in self.factors if factor.role == role]

    def _check_kinds(self, observed: list[Factor]) -> None:
        if not observed:
            raise ValueError(
                "The model has no observed variables; estimator='gauss_newton' squares the gradients of single "
                f"observations, and there are none. {_INSTEAD}"
            )
        if potentials := self._of_role("potential"):
            raise ValueError(
                f"The model has Potentials ({quoted(p.name for p in potentials)}), which may add anything to the "
                "log density; estimator='gauss_newton' squares the gradients of single observations, and can't tell "
                f"those of a Potential apart. Write them as observed variables (pm.CustomDist). {_INSTEAD}"
            )


def _check_rows(observed: list[Factor], values: list[Variable]) -> None:
    joint = [f.name for f, value in zip(observed, values, strict=True) if f.logp.type.ndim != value.type.ndim]
    if joint:
        raise ValueError(
            f"The log density of the observed variables {quoted(joint)} is not one of each element: their "
            "distribution is multivariate. estimator='gauss_newton' squares the gradients of single, independent "
            f"observations. {_INSTEAD}"
        )


def _scale(rv: Variable, value: Variable) -> Variable:
    if not isinstance(rv.owner.op, MinibatchRandomVariable):
        return pt.constant(1.0)
    return get_scaling(rv.owner.inputs[1:], value.shape)
