"""The Gauss-Newton matrix of a model, row by row: squares of the gradients of single observations.

Khan & Nielsen (2018), "Fast yet simple natural-gradient descent for variational inference in complex models": VOGN
replaces the Hessian of the log likelihood by minus the sum of g_i g_i^T over its rows i, which is never indefinite.
"""

from dataclasses import dataclass

import pymc as pm
import pytensor.tensor as pt

from pymc.variational.minibatch_rv import MinibatchRandomVariable, get_scaling
from pytensor.graph.basic import Variable

from pymc_ngvi.density.checks import quoted
from pymc_ngvi.graphs.backends import without_c

_INSTEAD = "Use estimator='price', which needs only derivatives of the whole log density."


@dataclass(frozen=True)
class Rows:
    """The log density of a model in two parts: the rows of its observed variables, and all else.

    Parameters
    ----------
    model : pymc.Model
    free, observed, potentials : tuple of variables
        As they were when the log density was made.
    """

    model: pm.Model
    free: tuple[Variable, ...]
    observed: tuple[Variable, ...]
    potentials: tuple[Variable, ...]

    @classmethod
    def of(cls, model: pm.Model) -> "Rows":
        """Note the variables that a model has now."""
        return cls(model, tuple(model.free_RVs), tuple(model.observed_RVs), tuple(model.potentials))

    def graphs(self) -> tuple[list[Variable], list[Variable], Variable]:
        """Return the log density by rows, and what is left of it, as functions of the value variables.

        Returns
        -------
        rows : list of pytensor variables
            Elementwise log density of each observed variable, scaled by its ``total_size``.
        scales : list of pytensor scalars
            That factor, of each; 1 without a ``total_size``.
        rest : pytensor scalar
            Log density of the free variables, Jacobians included.

        Raises
        ------
        ValueError
            Without observed variables; with Potentials; with an observed variable whose log density is not a sum over
            its elements.
        """
        self._check_kinds()
        # Together, so that they share what they have in common.
        with without_c(self.model):
            terms = self.model.logp(vars=[*self.observed, *self.free], sum=False)
        terms = [pt.as_tensor(term, allow_xtensor_conversion=True) for term in terms]
        rows, rest = terms[: len(self.observed)], terms[len(self.observed) :]
        values = [self.model.rvs_to_values[rv] for rv in self.observed]
        self._check_rows(rows, values)
        scales = [_scale(rv, value) for rv, value in zip(self.observed, values, strict=True)]
        return rows, scales, pt.add(pt.constant(0.0), *[term.sum() for term in rest])

    def _check_kinds(self) -> None:
        if not self.observed:
            raise ValueError(
                "The model has no observed variables; estimator='gauss_newton' squares the gradients of single "
                f"observations, and there are none. {_INSTEAD}"
            )
        if self.potentials:
            raise ValueError(
                f"The model has Potentials ({quoted(p.name for p in self.potentials)}), which may add anything to the "
                "log density; estimator='gauss_newton' squares the gradients of single observations, and can't tell "
                f"those of a Potential apart. Write them as observed variables (pm.CustomDist). {_INSTEAD}"
            )

    def _check_rows(self, rows: list[Variable], values: list[Variable]) -> None:
        joint = [
            rv.name for rv, row, value in zip(self.observed, rows, values, strict=True) if row.ndim != value.type.ndim
        ]
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
