r"""Natural gradients of the weights of a mixture.

In the Fisher metric of component and draw together, the natural gradient with respect to the log weights is
:math:`R_c = E_{q_c}[\log p - \log q]`, up to a constant [1]_: :math:`\log w_c' = \log w_c + \rho R_c`, normalised. A
step of size 1 is exact for components that do not overlap.

References
----------
.. [1] W. Lin, M. E. Khan and M. Schmidt (2019). Fast and simple natural-gradient variational inference with mixture of
   exponential-family approximations. ICML. https://doi.org/10.48550/arXiv.1906.02914
"""

import numpy as np

from pymc_ngvi.core.linalg import logsumexp
from pymc_ngvi.core.types import Array

#: Least log weight of a component: far below it, nothing could raise it again.
LEAST_LOG_WEIGHT = -69.0


def stepped_weights(log_weights: Array, direction: Array, step_size: float) -> Array:
    """Return the log weights after a step, normalised, none below the least."""
    new = log_weights + step_size * (direction - direction.max())
    new = np.maximum(new - logsumexp(new), LEAST_LOG_WEIGHT)
    result: Array = new - logsumexp(new)
    return result
