"""A better start for steps on minibatches: the solution for some of the data, held fixed.

On fixed data and fixed draws the problem is deterministic, and a step that overshoots is seen and shortened. The
solution for n rows is within about sqrt(N / n) posterior standard deviations of that for all N of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pymc_ngvi.core.types import Array, Density, GaussianState, MeanHessian, Target, Update, Whitener
from pymc_ngvi.estimators import price
from pymc_ngvi.steps.adaptive.rule import Adaptive

#: Minibatches that make up the data of a pilot fit, at most, and iterations on them.
_N_BATCHES, _MAX_ITERATIONS = 8, 100
#: Nats that the pilot fit may leave to gain in 100 dimensions.
_TOL = 0.5


class Pilot(NamedTuple):
    """A state, and how many minibatches it has seen."""

    q: GaussianState
    n_batches: int


class Pooled:
    """The log density on several minibatches: the mean over them, each scaled to all of the data.

    Parameters
    ----------
    target : Target
        Reads minibatches, and has second derivatives.
    seed : int
        Of the passes through the data.
    n_batches : int
    """

    has_hessian = True

    def __init__(self, target: Target, seed: int, n_batches: int) -> None:
        self._target, self._seed, self._n_batches = target, seed, n_batches
        self.n_dim = target.n_dim

    def _mean(self, evaluate: Callable[[], tuple[Array, ...]]) -> list[Array]:
        parts = []
        for number in range(self._n_batches):
            self._target.take_batch(self._seed, number)
            parts.append(evaluate())
        return [np.mean(part, axis=0) for part in zip(*parts, strict=True)]

    def logp_grad(self, theta: Array) -> tuple[Array, Array]:
        """Return log p, (n_draws,), and its gradient, (n_draws, n_dim)."""
        logp, grad = self._mean(lambda: self._target.logp_grad(theta))
        return logp, grad

    def mean_hessian(self, theta: Array) -> MeanHessian:
        """Return the mean of hess log p over draws and minibatches."""
        return _PooledHessian(self, theta)

    def mean_over_hessians(self, evaluate: Callable[[MeanHessian], Array], theta: Array) -> Array:
        """Return the mean over minibatches of what a function takes from the mean Hessian on each."""
        return self._mean(lambda: (evaluate(self._target.mean_hessian(theta)),))[0]


@dataclass(frozen=True)
class _PooledHessian(MeanHessian):
    pooled: Pooled
    theta: Array

    def products(self, directions: Array) -> Array:
        """Return the matrix times each direction, (n_directions, n_dim)."""
        return self.pooled.mean_over_hessians(lambda hessian: hessian.products(directions), self.theta)

    def diagonal(self) -> Array:
        """Return the diagonal, (n_dim,)."""
        return self.pooled.mean_over_hessians(lambda hessian: hessian.diagonal(), self.theta)

    def whitened(self, state: Whitener) -> Array:
        """Return the mean of the whitened curvatures: a batch has a pattern, where their mean may have none."""
        return self.pooled.mean_over_hessians(lambda hessian: hessian.whitened(state), self.theta)


def pilot_fit(target: Target, update: Update, q: GaussianState, seed: int) -> Pilot | None:
    """Solve the problem on the first minibatches.

    Parameters
    ----------
    target : Target
    update : Update
        One that takes steps of size 1 with Hessians.
    q : GaussianState
        Where to start.
    seed : int

    Returns
    -------
    Pilot or None
        None where the target has no second derivatives, or the start no finite draw on these data.
    """
    if not target.has_hessian:
        return None
    n_batches = min(target.n_batches, _N_BATCHES) if target.has_minibatch else 1
    pooled: Density = Pooled(target, seed, n_batches) if target.has_minibatch else target
    rule = Adaptive(pooled, update, price, seed=seed, tol=_TOL)
    if not rule.first_evaluation(q).finite.any():
        return None
    state = rule.init(q)
    for _ in range(_MAX_ITERATIONS):
        state = rule.step(state)
        if rule.terminate(state) is not None:
            break
    return Pilot(state.q, n_batches)
