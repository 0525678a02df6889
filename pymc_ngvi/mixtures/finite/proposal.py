r"""One step of a mixture within a trust region: each component, and the weights, moves by so many nats at most.

A natural step of size :math:`\rho` of one component is shortened until KL(new || old) is within the radius [1]_, so
that a component with a strange moment can't run away with the rest; likewise the weights.

In the Fisher metric of component and draw together, the natural gradient with respect to the log weights is
:math:`R_c = E_{q_c}[\log p - \log q]`, up to a constant [2]_: :math:`\log w_c' = \log w_c + \rho R_c`, normalised. A
step of size 1 is exact for components that do not overlap.

References
----------
.. [1] O. Arenz, P. Dahlinger, Z. Ye, M. Volpp and G. Neumann (2023). A unified perspective on natural gradient
   variational inference with Gaussian mixture models. TMLR. https://doi.org/10.48550/arXiv.2209.11533
.. [2] W. Lin, M. E. Khan and M. Schmidt (2019). Fast and simple natural-gradient variational inference with mixture of
   exponential-family approximations. ICML. https://doi.org/10.48550/arXiv.1906.02914
"""

from collections.abc import Sequence

import numpy as np

from pymc_ngvi.core.linalg import logsumexp
from pymc_ngvi.core.types import Array, GaussianState, Moments, Update
from pymc_ngvi.families.mixture import MixtureState

#: Halvings of a step that leaves the trust region; a component that needs more stays where it is.
_MAX_HALVINGS = 30
#: Least log weight of a component: far below it, nothing could raise it again.
LEAST_LOG_WEIGHT = -69.0


def moved_within(
    radius: float, update: Update, q: MixtureState, rewards: Array, moments: Sequence[Moments], step_size: float
) -> MixtureState:
    """Return the mixture after one step of every component and of the weights.

    Parameters
    ----------
    radius : float
        Nats that KL(new || old) of a component, and of the weights, may have.
    update : Update
        Of the components.
    q : MixtureState
    rewards : ndarray, shape (n_components,)
        Mean of log p - log q under each of them.
    moments : sequence of Moments
        Of each of them.
    step_size : float
        In (0, 1].
    """
    components = tuple(
        _component_within(radius, update, component, of_it, step_size)
        for component, of_it in zip(q.components, moments, strict=True)
    )
    return MixtureState(_weights_within(radius, q.log_weights, rewards, step_size), components)


def _component_within(
    radius: float, update: Update, component: GaussianState, moments: Moments, rho: float
) -> GaussianState:
    for _ in range(_MAX_HALVINGS):
        new = update(component, moments, rho, True)
        if new is not None and new.divergence(component) <= radius:
            return new
        rho *= 0.5
    return component


def _weights_within(radius: float, log_weights: Array, direction: Array, rho: float) -> Array:
    # A component that lies where log p is not finite loses its weight.
    lowest = np.min(direction, where=np.isfinite(direction), initial=0.0) - 100.0
    direction = np.where(np.isfinite(direction), direction, lowest)
    for _ in range(_MAX_HALVINGS):
        new = stepped_weights(log_weights, direction, rho)
        if float(np.exp(new) @ (new - log_weights)) <= radius:
            return new
        rho *= 0.5
    return log_weights


def stepped_weights(log_weights: Array, direction: Array, step_size: float) -> Array:
    """Return the log weights after a step, normalised, none below the least."""
    new = log_weights + step_size * (direction - direction.max())
    new = np.maximum(new - logsumexp(new), LEAST_LOG_WEIGHT)
    return new - logsumexp(new)
