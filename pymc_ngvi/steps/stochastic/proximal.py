r"""Step rule `proximal`: proximal-gradient steps with the Kullback-Leibler divergence as the proximity term [1]_.

Each step maximises the linearised ELBO less :math:`\mathrm{KL}(q\,\|\,q_k)/\beta_k`, where the prior's share is kept
exact; in natural parameters that is the natural-gradient step of size :math:`\rho_k = \beta_k / (1 + \beta_k)`.

References
----------
.. [1] M. E. Khan, R. Babanezhad, W. Lin, M. Schmidt and M. Sugiyama (2016). Faster stochastic variational inference
   using proximal-gradient methods with general divergence functions. UAI. https://doi.org/10.48550/arXiv.1511.00146
"""

from typing import ClassVar

from pymc_ngvi.core.types import Moments
from pymc_ngvi.steps.stochastic.base import Advance, Stochastic, StochasticState

# --- step rule `constant`: the same step size in every iteration ---
#
# With the natural-parameter update, exact Hessians and one antithetic pair, a step of size 1 on the full data is exact
# for a Gaussian posterior.


class Constant(Stochastic[None]):
    """Apply the update with a constant step size, .1 by default; options as for `Stochastic`."""

    def _advance(self, state: StochasticState[None], moments: Moments) -> Advance[None] | None:
        found = self._updated(state.iterate, moments, self._rate(state.t - 1))
        return None if found is None else Advance(found[0], *found)


class Proximal(Stochastic[None]):
    """Proximal steps; options as for `Stochastic`.

    ``step_size`` is beta, .25 by default; with ``step_decay`` kappa, beta_k = beta / (1 + k)^kappa.
    """

    takes: ClassVar[frozenset[str]] = Stochastic.takes | {"step_decay"}
    default_step_size: ClassVar[float] = 0.25

    def _advance(self, state: StochasticState[None], moments: Moments) -> Advance[None] | None:
        beta = self._rate(state.t - 1)
        found = self._updated(state.iterate, moments, beta / (1.0 + beta))
        return None if found is None else Advance(found[0], *found)
