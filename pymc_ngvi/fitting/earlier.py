"""A fit that starts from another one: from its mean and covariance, as far as the new family can hold them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import methodcaller
from typing import Protocol

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core import linalg
from pymc_ngvi.core.target import MatrixHessian
from pymc_ngvi.core.types import Array, FittedState, GaussianState, Rule, VariationalState
from pymc_ngvi.density import Layout, ModelDensity
from pymc_ngvi.families import MixtureState, SparseState, StudentTState, SummedState
from pymc_ngvi.families.gaussian import Gaussian
from pymc_ngvi.fitting.problem import Problem
from pymc_ngvi.reparam.row_space import RowSpaceDensity

#: Dimensions up to which covariances are taken over; above, standard deviations are.
_MOST_DIMS = 5_000


class EarlierFit(Protocol):
    """What is read of an approximation that a fit starts from."""

    @property
    def layout(self) -> Layout:
        """Where each variable is in the flat vector."""

    @property
    def _begins_with(self) -> VariationalState:
        """The approximation, or the Gaussian that belongs to an exact or a nested posterior."""


@dataclass(frozen=True)
class Earlier:
    """Mean and covariance of an earlier fit, for the variables that a model shares with it."""

    #: Of the earlier fit, unconstrained.
    q: VariationalState
    #: By name of the value variable.
    mean: dict[str, Array]
    #: Flat coordinates of the shared variables in the model, and in q; shape (n_shared,).
    ours: NDArray[np.intp]
    theirs: NDArray[np.intp]

    @classmethod
    def of(cls, approx: EarlierFit, density: ModelDensity) -> "Earlier":
        """Find the variables of an approximation in a model, by the names of their unconstrained values."""
        old, new = ({v.value_name: v for v in layout.variables} for layout in (approx.layout, density.layout))
        shared = [name for name in new if name in old]
        if not shared:
            raise ValueError(
                f"start is a fit of other variables, {', '.join(map(repr, old))}; those of the model are "
                f"{', '.join(map(repr, new))}. Variables are matched by the names of their unconstrained values."
            )
        for name in shared:
            if old[name].shape != new[name].shape:
                raise ValueError(
                    f"start is a fit in which {name!r} has shape {old[name].shape}; in the model it has shape "
                    f"{new[name].shape}. Give start as a dict of the values that fit."
                )
        q = approx._begins_with
        mean = q.mean()
        index = [[np.arange(of[n].where.start, of[n].where.stop) for n in shared] for of in (new, old)]
        ours, theirs = (np.concatenate(part) for part in index)
        return cls(q, {n: mean[old[n].where].reshape(old[n].shape) for n in shared}, ours, theirs)

    def state(self, rule: Rule, problem: Problem, point: Array, scales: Sequence[Array]) -> VariationalState | None:
        """Return the start with the best ELBO on the first draws; None where log p is not finite at all of them."""
        best, best_elbo = None, -np.inf
        for state in self._states(problem, point, scales):
            evaluation = rule.first_evaluation(state)
            if evaluation.finite.all() and evaluation.elbo > best_elbo:
                best, best_elbo = state, evaluation.elbo
        return best

    def _states(self, problem: Problem, point: Array, scales: Sequence[Array]) -> Iterator[VariationalState]:
        if isinstance(problem.target, RowSpaceDensity):
            yield from (problem.family.from_scale(point, scale) for scale in scales)
            return
        taken = np.arange(len(self.ours))
        if problem.transform is not None:  # relative to the global parameters, others are not what they were
            border = problem.transform.structure.border
            taken = np.flatnonzero(np.isin(self.ours, border))
        ours, theirs = self.ours[taken], self.theirs[taken]
        sd = self.q.sd()[theirs]
        for scale in scales if len(ours) < len(point) else scales[:1]:
            scale = scale.copy()
            scale[ours] = sd
            template = problem.family.from_scale(point, scale)
            if problem.transform is None and self._is_of_kind(template):
                yield self.q
            else:
                precision = self._precision(scale, ours, theirs)
                yield template if precision is None else _with_precision(template, precision)

    def _is_of_kind(self, template: VariationalState) -> bool:
        """Whether q is a state of the new family as it is: one of the same class, form and coordinates."""
        if type(template) is not type(self.q) or not np.array_equal(self.ours, self.theirs):
            return False
        new, old = map(methodcaller("arrays"), (template, self.q))
        params = template.params()  # the others are of the form
        return new.keys() == old.keys() and all(
            a.shape == old[name].shape and (name in params or np.array_equal(a, old[name])) for name, a in new.items()
        )

    def _precision(self, scale: Array, ours: NDArray[np.intp], theirs: NDArray[np.intp]) -> Array | None:
        """Return the precision of all coordinates, of which the others are independent; None where it is too large."""
        if max(len(scale), self.q.n_dim) > _MOST_DIMS:
            return None
        block = getattr(self.q, "cov_block", None)
        covariance = np.diag(scale**2)
        covariance[np.ix_(ours, ours)] = self.q.cov()[np.ix_(theirs, theirs)] if block is None else block(theirs)
        factor = linalg.cholesky(covariance)
        if factor is None:
            return None
        half = linalg.solve_lower(factor, np.eye(len(scale)))
        return half.T @ half  # families keep some of its entries


def _with_precision(state: FittedState, precision: Array) -> FittedState:
    """Return the state with a precision, or what its family holds of that; the state itself where that is no state."""
    if isinstance(state, MixtureState):
        return MixtureState.of([_gaussian_with(state.components[0], precision)])
    if isinstance(state, StudentTState):
        return replace(state, gaussian=_gaussian_with(state.gaussian, precision))
    return _gaussian_with(state, precision) if isinstance(state, Gaussian) else state


def _gaussian_with(state: GaussianState, precision: Array) -> GaussianState:
    if isinstance(state, SummedState):  # which sums a dense matrix has is not known
        return state
    hessian = MatrixHessian(-precision, state.structure.pattern if isinstance(state, SparseState) else None)
    found = state.precision_scaled_by(state.curvature(hessian), np.zeros(state.n_dim))
    return state if found is None else found[0]
