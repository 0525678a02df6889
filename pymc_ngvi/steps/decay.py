r"""Step rule `decay`: step sizes 2/(2 + t), and the weighted average of the expectation parameters [1]_.

The first step has size 1 and forgets the start. The average
:math:`\bar\omega_{t+1} = (1 - \gamma_t) \bar\omega_t + \gamma_t \omega_{t+1}` of the expectation parameters
:math:`\omega = (\mu, \Sigma + \mu \mu^T)` is the result; on conjugate models its KL divergence from the posterior falls
as O(1/t) when data are sub-sampled. The paper's bound V/(t + 2) is too small by up to a factor of 4: what its proof
gives is at most 4V/(t + 2).

References
----------
.. [1] K. Wu and J. R. Gardner (2024). Understanding stochastic natural gradient variational inference. ICML.
   https://doi.org/10.48550/arXiv.2406.01870
"""

from typing import ClassVar

import numpy as np

from pymc_ngvi.steps.stochastic import Advance, Stochastic, StochasticState
from pymc_ngvi.types import Moments


class Decay(Stochastic):
    """Steps 2/(2 + t) with averaging; options as for `Stochastic`, without step sizes."""

    path_draws_within: ClassVar[tuple[int, int]] = (128, 1_024)  # a first step of size 1 takes their noise as it is
    takes: ClassVar[frozenset[str]] = Stochastic.takes - {"step_size"}

    def _rate(self, t: int) -> float:
        return 2.0 / (2.0 + t)

    def _advance(self, state: StochasticState, moments: Moments) -> Advance | None:
        n_steps = state.memory or 0  # valid ones: the first of them forgets the start
        weight = self._rate(n_steps)
        found = self._updated(state.iterate, moments, weight)
        if found is None:
            return None
        iterate, step_size = found
        try:
            average = iterate if weight == 1.0 else state.q.merged(iterate, weight)
        except np.linalg.LinAlgError:  # both singular to rounding, or all but
            return None
        return Advance(average, iterate, step_size, n_steps + 1)
