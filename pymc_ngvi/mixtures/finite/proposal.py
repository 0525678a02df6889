r"""One step of a mixture within a trust region: each component, and the weights, moves by so many nats at most.

A natural step of size :math:`\rho` of one component is shortened until KL(new || old) is within the radius [1]_, so
that a component with a strange moment can't run away with the rest; likewise the weights.

References
----------
.. [1] O. Arenz, P. Dahlinger, Z. Ye, M. Volpp and G. Neumann (2023). A unified perspective on natural gradient
   variational inference with Gaussian mixture models. TMLR. https://doi.org/10.48550/arXiv.2209.11533
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from pymc_ngvi.core.types import Array, Moments, Update
from pymc_ngvi.families.mixture import MixtureState
from pymc_ngvi.mixtures.finite.evaluation import MixtureEvaluation, MixtureMoments
from pymc_ngvi.mixtures.finite.weights import stepped

#: Halvings of a step that leaves the trust region; a component that needs more stays where it is.
_MAX_HALVINGS = 30


@dataclass(frozen=True)
class Proposal:
    """How mixtures move.

    Parameters
    ----------
    update : Update
        Of the components.
    """

    update: Update

    def __call__(
        self,
        q: MixtureState,
        evaluation: MixtureEvaluation,
        moments: MixtureMoments,
        step_size: float,
        radius: float,
    ) -> MixtureState:
        """Return the mixture after one step of every component and of the weights.

        Parameters
        ----------
        q : MixtureState
        evaluation, moments
            There.
        step_size : float
            In (0, 1].
        radius : float
            Nats that KL(new || old) of a component, and of the weights, may have.
        """
        components = tuple(
            self._moved(component, part, step_size, radius)
            for component, part in zip(q.components, moments.parts, strict=True)
        )
        return MixtureState(_weights_within(q.log_weights, evaluation.rewards, step_size, radius), components)

    def _moved(self, component: Any, moments: Moments, step_size: float, radius: float) -> Any:
        rho = step_size
        for _ in range(_MAX_HALVINGS):
            new: Any = self.update(component, moments, rho, True)
            if new is not None and new.divergence(component) <= radius:
                return new
            rho *= 0.5
        return component


def _weights_within(log_weights: Array, direction: Array, step_size: float, radius: float) -> Array:
    # A component that lies where log p is not finite loses its weight.
    lowest = np.min(direction, where=np.isfinite(direction), initial=0.0) - 100.0
    direction = np.where(np.isfinite(direction), direction, lowest)
    rho = step_size
    for _ in range(_MAX_HALVINGS):
        new = stepped(log_weights, direction, rho)
        if float(np.exp(new) @ (new - log_weights)) <= radius:
            return new
        rho *= 0.5
    return log_weights
