r"""Natural gradients of the weights of a mixture.

In the Fisher metric of component and draw together, the natural gradient with respect to the log weights is
:math:`R_c = E_{q_c}[\log p - \log q]`, up to a constant [1]_: :math:`\log w_c' = \log w_c + \rho R_c`, normalised. A
step of size 1 is exact for components that do not overlap.

References
----------
.. [1] W. Lin, M. E. Khan and M. Schmidt (2019). Fast and simple natural-gradient variational inference with mixture of
   exponential-family approximations. ICML. https://doi.org/10.48550/arXiv.1906.02914
.. [2] L. S. L. Tan (2021). Complete natural gradients for structured variational approximations in mixtures of
   exponential families: theorem 2, whose extra terms cancel when all are kept. An early version of
   https://doi.org/10.48550/arXiv.2109.00375
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from scipy.special import logsumexp

from pymc_ngvi.core.types import Array, Moments, Outer
from pymc_ngvi.families.mixture import MixtureState

#: Least log weight of a component: far below it, nothing could raise it again.
LEAST_LOG_WEIGHT = -69.0
#: Rewards E_{q_c}[log p - log q], (n_components,), and whitened moments of each component, to what is added to the log
#: weights in a step of size 1.
WeightUpdate = Callable[[MixtureState, Array, Sequence[Moments]], Array]


def natural_weights(mixture: MixtureState, rewards: Array, moments: Sequence[Moments]) -> Array:
    """Return the natural gradient: the rewards themselves, (n_components,)."""
    return rewards


def tan_weights(mixture: MixtureState, rewards: Array, moments: Sequence[Moments]) -> Array:
    r"""Return the direction as printed in [2]_: the rewards plus :math:`b_c = m_c^T \partial L/\partial m_c`.

    With g_c and H_c, gradient and Hessian of log p - log q under the component,
    b_c = mu_c . g_c + tr((Sigma_c - mu_c mu_c^T) H_c) / 2, which changes with the origin of the coordinates. For
    comparison only.
    """
    result: Array = rewards + np.array([_b(c, m) for c, m in zip(mixture.components, moments, strict=True)])
    return result


def _b(component: Any, moments: Moments) -> float:
    # Whitened: H_c = -C^-T (A - I) C^-1, g_c = C^-T grad.
    error = component.curvature_error(moments.curvature)
    mean = component.location
    gradient = component.dewhiten(moments.grad)
    along = component.whiten(component.precision_product(mean[None])[0])  # C^-1 mu
    square = float(component.flat(error) @ component.flat(component.outer_mean(Outer(along[None], along[None], 0.0))))
    trace = float(np.sum(component.curvature_diagonal(moments.curvature) - 1.0))
    return float(mean @ gradient) - 0.5 * trace + 0.5 * square


def stepped(log_weights: Array, direction: Array, step_size: float) -> Array:
    """Return the log weights after a step, normalised, none below the least."""
    new = log_weights + step_size * (direction - direction.max())
    new = np.maximum(new - logsumexp(new), LEAST_LOG_WEIGHT)
    result: Array = new - logsumexp(new)
    return result


WEIGHT_UPDATES: dict[str, WeightUpdate] = {"natural": natural_weights, "tan": tan_weights}
