"""Whether global parameters of a hierarchical model still move, and where they do: larger strides.

Along the scale of group effects, or of a random walk, the ELBO can be a hundred times flatter than the Fisher
information says: q is far too narrow there, and its mean creeps by a fifth of a standard deviation a step, over tens of
them. Half the squared gradient tells of little, and the noise of one set of draws hides it. Over several sets it does
not: what is the same in all of them is no noise.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np

from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array, BaseDraws, Evaluation, GaussianState, Moments

#: Standard errors, and whitened units, beyond which a gradient that several sets share is no noise.
_N_SE, _LEAST = 3.0, 0.1
#: Sets of draws that tell, and sets of gradients alone that are added to them, at most.
_N_SETS, _MAX_SETS = 2, 16
#: Multiple of a gradient to go where it persists, at first and at most, its growth while it does, and whitened units to
#: go at most.
_FIRST_STRETCH, _MAX_STRETCH, _GROWTH, _STRIDE = 2.0, 16.0, 2.0, 1.0
#: Whitened error of a mean that a converged fit may have, and sampling error of a global one.
MAX_ERROR, _MAX_NOISE = 0.1, 0.05


@stored("adaptive.stride")
class Stride(NamedTuple):
    """A step of global parameters, whitened, (n_globals,), and the multiple of the gradient that it is."""

    step: Array
    stretch: float


@stored("adaptive.drift")
@dataclass(frozen=True)
class GlobalGradient:
    """Whitened gradient of the global parameters, averaged over fresh sets of draws along the way."""

    #: Sum of gradients, times draws; shape (n_globals,).
    total: Array
    #: Of ``total``; shape (n_globals,).
    variance: Array
    n_draws: int
    n_sets: int

    @classmethod
    def measured(cls, before: Self | None, q: GaussianState, moments: Moments, n_draws: int) -> Self | None:
        """Return it with one more set; None for a q that does not tell globals from the rest."""
        if q.globals_ is None:
            return None
        grad, se = moments.grad[q.globals_], moments.grad_se[q.globals_]
        if not np.isfinite(se).all():
            return None
        new = cls(n_draws * grad, (n_draws * se) ** 2, n_draws, 1)
        return new if before is None else before._with(new)

    def with_more_sets(self, q: GaussianState, evaluated: Callable[[int], tuple[BaseDraws, Evaluation]]) -> Self:
        """Return it with further sets of draws, of gradients alone, until its noise is low enough to judge."""
        new = self
        for k in range(_MAX_SETS):
            moves = np.abs(new.mean) > MAX_ERROR + _N_SE * new.se
            if bool(np.max(new.se, initial=0.0) <= _MAX_NOISE or moves.any()):
                break
            more = _of_gradients(q, *evaluated(k))
            if more is None:
                break
            new = replace(new._with(more), n_sets=new.n_sets)
        return new

    def _with(self, other: "GlobalGradient") -> Self:
        total, variance = self.total + other.total, self.variance + other.variance
        return type(self)(total, variance, self.n_draws + other.n_draws, self.n_sets + 1)

    @property
    def mean(self) -> Array:
        """Gradient, (n_globals,)."""
        return self.total / self.n_draws

    @property
    def se(self) -> Array:
        """Its standard error, (n_globals,)."""
        return np.sqrt(self.variance) / self.n_draws

    def is_settled(self) -> bool:
        """Tell whether no global parameter moves, as far as several sets tell."""
        error = np.abs(self.mean) - self.se
        return bool(np.max(error, initial=0.0) <= MAX_ERROR and np.max(self.se, initial=0.0) <= _MAX_NOISE)

    def stride(self, last: Stride | None) -> Stride | None:
        """Return how far to go in the parameters that move; None where none is known to."""
        mean = self.mean
        moves = (np.abs(mean) > np.maximum(_LEAST, _N_SE * self.se)) & (self.n_sets >= _N_SETS)
        if not moves.any():
            return None
        stretch = _FIRST_STRETCH
        if last is not None:
            onward = float(last.step @ np.where(moves, mean, 0.0)) >= 0.0
            stretch = min(_GROWTH * last.stretch, _MAX_STRETCH) if onward else max(last.stretch / _GROWTH**2, 1.0)
        return Stride(np.where(moves, np.clip(stretch * mean, -_STRIDE, _STRIDE), 0.0), stretch)


def _of_gradients(q: GaussianState, base: BaseDraws, evaluation: Evaluation) -> GlobalGradient | None:
    """Return the mean gradient at one more set of draws; None where one is not finite."""
    if base.n_replicates < 2 or not evaluation.finite.all():
        return None
    whitened = q.whiten(evaluation.grad)[:, q.globals_] + base.z[:, q.globals_]
    grads = np.array([whitened[rows].mean(axis=0) for rows in base.replicates()])
    variance = grads.var(axis=0, ddof=1) / base.n_replicates
    return GlobalGradient(base.n_draws * grads.mean(axis=0), base.n_draws**2 * variance, base.n_draws, 1)
