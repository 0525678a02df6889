r"""Improved variational online Newton (IVON), for networks with thousands of weights [1]_.

With mean :math:`\mu` and precision S of each coordinate, mean gradients :math:`g_t` and curvatures :math:`H_t` over a
few draws, from gradients alone, and rates :math:`\alpha_t` of the mean and :math:`\rho_t` of the precision
(:math:`1 - \beta_2` in the paper):

.. math::
    m_t = 0.9\, m_{t-1} + 0.1\, g_t, \quad
    S_{t+1} = S_t + \rho_t (H_t - S_t) + \tfrac12 \rho_t^2 (H_t - S_t)^2 / S_t, \quad
    \mu_{t+1} = \mu_t + \alpha_t S_{t+1}^{-1} m_t / (1 - 0.9^t).

The second step is the update ``natural_pd``. In the paper both rates are set by hand, and that of the mean falls as a
cosine to 0 over a number of iterations that is known. Here both fall with t, the result is an average of the iterates
that forgets early ones, and steps are limited in every coordinate.

References
----------
.. [1] Y. Shen, N. Daheim, B. Cong, P. Nickl, G. M. Marconi, C. Bazan, R. Yokota, I. Gurevych, D. Cremers, M. E. Khan
   and T. Moellenhoff (2024). Variational learning is effective for large deep networks. ICML.
   https://doi.org/10.48550/arXiv.2402.17641
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from pymc_ngvi.core.draws import N_REPLICATES
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array
from pymc_ngvi.methods.estimators import Moments
from pymc_ngvi.methods.stochastic import FIRST_LENGTH, MOMENTUM, Stochastic, StochasticState

#: Iterations after which the rate of the mean begins to fall, and the exponent.
_LEVEL, _DECAY = 100, 0.7
#: The rate of the precision is the first number divided by t plus the second: a mean that forgets the start.
_WEIGHT, _FIRST = 3.0, 30
#: What becomes of the longest move of a coordinate where the ELBO still rises along the last step, at this part of its
#: slope before it, and where it does not.
_GROWTH, _STILL, _SHRINKAGE = 1.1, 0.5, 0.5
#: The weight of iterate t in the result is proportional to t to this power, less 1.
_LATE = 5.0


@stored("ivon.memory")
@dataclass(frozen=True)
class Memory:
    """What the rule remembers."""

    #: Exponential average of the gradients, which starts at 0; shape (n_dim,).
    momentum: Array
    #: Valid steps so far.
    n_steps: int
    #: The last one of the mean; shape (n_dim,).
    step: Array
    #: Of the ELBO along it, before it was taken.
    slope: float
    #: Standard deviations by which a coordinate may move.
    longest: float
    #: Whether that was less than some coordinate would have moved.
    is_limited: bool = False

    def next_longest(self, gradient: Array) -> float:
        """Return how far coordinates may move next, by the gradient after the last step."""
        if float(gradient @ self.step) < _STILL * self.slope:
            return max(_SHRINKAGE * self.longest, FIRST_LENGTH)
        return _GROWTH * self.longest if self.is_limited else self.longest


class IVON(Stochastic[Memory]):
    """Momentum for the mean, slow averages of noisy curvatures; options as for `Stochastic`.

    ``step_size`` is the rate of the mean, 1 being a Newton step, 0.1 by default; with ``step_decay`` kappa, 0.7 by
    default, it is divided by (1 + t/100)^kappa.
    """

    takes: ClassVar[frozenset[str]] = Stochastic.takes | {"step_decay"}
    default_step_decay: ClassVar[float] = _DECAY
    default_path_draws: ClassVar[int | None] = N_REPLICATES

    def _advance(self, state: StochasticState[Memory], moments: Moments) -> StochasticState[Memory] | None:
        if not moments.is_finite():
            return None
        old = state.iterate
        before = state.memory or Memory(np.zeros(old.n_dim), 0, np.zeros(old.n_dim), 0.0, FIRST_LENGTH)
        t = before.n_steps
        # Single draws have wild curvatures, whose squares would make precisions much too large.
        of_precision = _WEIGHT / (_FIRST + t)
        error = np.clip(old.add_to_diagonal(moments.curvature, -1.0), -1.0 / of_precision, 1.0 / of_precision)
        unknown, none = np.full(old.n_dim, np.inf), np.zeros(old.n_dim)
        limited = Moments(
            none, old.add_to_diagonal(error, 1.0), unknown, unknown, gap=np.nan, floor=np.inf, floor_sd=np.inf
        )
        found = self._updated(state, limited, of_precision)
        if found is None:
            return None
        narrowed = found.iterate  # the mean is left where it is
        gradient, rate = old.dewhiten(moments.grad), self._rate(t)
        momentum = MOMENTUM * before.momentum + (1.0 - MOMENTUM) * gradient
        # In standard deviations, S^-1 m is the whitened momentum.
        wanted = rate / (1.0 - MOMENTUM ** (t + 1)) * narrowed.whiten(momentum)
        longest = before.next_longest(gradient)
        step = narrowed.unwhiten(np.clip(wanted, -longest, longest))
        memory = Memory(momentum, t + 1, step, float(gradient @ step), longest, bool(np.abs(wanted).max() > longest))
        iterate = replace(narrowed, location=old.location + step)
        weight = _LATE / (_LATE + t)
        precision = (1.0 - weight) * state.q.sd() ** -2 + weight * iterate.sd() ** -2
        location = (1.0 - weight) * state.q.mean() + weight * iterate.mean()
        q = iterate.with_scale(location, precision**-0.5)
        return replace(state, q=q, iterate=iterate, step_size=rate, memory=memory)

    def _decayed(self, first: float, t: int) -> float:
        return float(first / (1.0 + t / _LEVEL) ** self._step_decay)
