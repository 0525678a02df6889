"""What the step rules share that add to the coordinates of mean and Cholesky factor, along a direction."""

import abc

from typing import ClassVar

import numpy as np

from pymc_ngvi.core.types import Array, GaussianState, Moments, Parameters
from pymc_ngvi.steps.stochastic.base import MAX_HALVINGS, Advance, Stochastic, StochasticState


class Coordinates[M](Stochastic[M]):
    """Small steps along the direction of the update; options as for `Stochastic`."""

    default_window: ClassVar[int | None] = 1_000
    default_path_draws: ClassVar[int | None] = 8

    def _advance(self, state: StochasticState[M], moments: Moments) -> Advance[M] | None:
        if not moments.is_finite():
            return None
        assert self._direction is not None
        return self._follow(state, self._direction(state.iterate, moments), moments)

    @abc.abstractmethod
    def _follow(self, state: StochasticState[M], direction: Parameters, moments: Moments) -> Advance[M] | None:
        """Return where one step along (a memory of) a direction leads; None where no step is valid."""

    def _moved(
        self, iterate: GaussianState, location_step: Array, factor_step: Array, *, step_size: float, memory: M
    ) -> Advance[M] | None:
        """Move mean and factor; a diagonal entry of the factor may change its sign, but not be 0."""
        for _ in range(MAX_HALVINGS):
            q = iterate.plus(location_step, factor_step, signed=True)
            if q is not None:
                return Advance(q.unsigned(), q, step_size, memory)
            location_step, factor_step = 0.5 * location_step, 0.5 * factor_step
        return None


def zeros_like(q: GaussianState) -> Parameters:
    """Return zeros in the coordinates of a state: a memory before the first iteration."""
    return Parameters(np.zeros_like(q.location), np.zeros_like(q.factor))
