r"""Exact expectations of rows, by quadrature in the space of their predictors.

Under a Gaussian q a row of log p sees no more than the Gaussian of the few predictors that it is a function of. Its
expectation, and those of its first and second derivatives, are integrals of few dimensions: no Monte Carlo
error, no draws, and an ELBO that says of itself whether a step has gained anything [1]_.

References
----------
.. [1] M. Opper and C. Archambeau (2009). The variational Gaussian approximation revisited. Neural Computation 21(3).
   https://doi.org/10.1162/neco.2008.08-07-592
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.types import (
    Array,
    BaseDraws,
    Density,
    Evaluation,
    Expectation,
    GaussianState,
    MeanHessian,
    Moments,
    RowRules,
    RowsTarget,
    VariationalState,
)

#: Part of the covariance of q that stands for none.
_NARROW = 1e-6


class _Narrow:
    """A Gaussian about the mean of another, all but a point."""

    def __init__(self, q: GaussianState) -> None:
        self._q, self.location = q, q.location

    def covariances(self, rows: NDArray[np.intp], cols: NDArray[np.intp]) -> Array:
        """Return entries of the covariance, (n,)."""
        return _NARROW * self._q.covariances(rows, cols)

    def covariance_times(self, vectors: Array) -> Array:
        """Return the covariance times each vector, (n_vectors, n_dim)."""
        return _NARROW * self._q.covariance_times(vectors)


@dataclass(frozen=True)
class ExactEvaluation(Evaluation):
    """An expectation in place of draws, of which there are none; ``finite`` has one element, for the expectation."""

    expectation: Expectation


class Quadrature:
    """Expectations of rows; no draws."""

    uses_hessians = True

    def evaluate(self, target: Density, state: VariationalState, base: BaseDraws) -> ExactEvaluation:
        """Take the expectation of log p under a Gaussian; there are no base draws.

        Raises
        ------
        ValueError
            If the target is no `RowsTarget`.
        """
        return self.by_rules(target, cast(GaussianState, state))

    def by_rules(
        self,
        target: Density,
        state: GaussianState,
        rules: RowRules | None = None,
        *,
        adapt: bool = False,
        least: float = -np.inf,
    ) -> ExactEvaluation:
        """As `evaluate`, by rules that are given; see `RowsTarget.expected`, where ``least`` is without the entropy."""
        if not isinstance(target, RowsTarget):
            raise ValueError("quadrature goes through the rows of log p: this target has none.")
        entropy = state.entropy()
        expectation = target.expected(state, rules, adapt=adapt, least=least - entropy)
        finite = bool(np.isfinite(expectation.value) and np.isfinite(expectation.grad).all())
        elbo = expectation.value + entropy if finite else -np.inf
        none = np.empty((0, state.n_dim))
        return ExactEvaluation(none, np.empty(0), none, np.array([finite]), elbo, expectation)

    def evaluate_each(self, target: Density, states: Sequence[VariationalState], base: BaseDraws) -> list[Evaluation]:
        """Take the expectations under several Gaussians."""
        return [self.evaluate(target, state, base) for state in states]

    def moments(
        self, target: Density, state: GaussianState, base: BaseDraws, evaluation: Evaluation, *, stl: bool = True
    ) -> Moments:
        """Return whitened gradient and curvature, without error."""
        expectation = cast(ExactEvaluation, evaluation).expectation
        grad: Array = state.whiten(expectation.grad[None])[0]
        curvature = expectation.hessian.whitened(state)
        error = state.flat(state.curvature_error(curvature))
        gap = 0.5 * float(grad @ grad) + 0.25 * state.inner(error, error)
        none = np.zeros(len(grad))
        return Moments(grad, curvature, none, none, gap, floor=0.0, floor_sd=0.0)

    def has_hessian(self, target: Density) -> bool:
        """Tell whether `hessian_at_mean` can be formed: it takes no second derivative of log p."""
        return True

    def hessian_at_mean(self, target: Density, state: GaussianState) -> MeanHessian:
        """Return the Hessian of log p at the mean of a state."""
        return cast(RowsTarget, target).expected(_Narrow(state)).hessian
