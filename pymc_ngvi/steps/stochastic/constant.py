"""Step rule `constant`: the same step size in every iteration.

With the natural-parameter update, exact Hessians and one antithetic pair, a step of size 1 on the full data is exact
for a Gaussian posterior.
"""

from pymc_ngvi.core.types import Moments
from pymc_ngvi.steps.stochastic.base import Advance, Stochastic, StochasticState


class Constant(Stochastic[None]):
    """Apply the update with a constant step size, .1 by default; options as for `Stochastic`."""

    def _advance(self, state: StochasticState[None], moments: Moments) -> Advance[None] | None:
        found = self._updated(state.iterate, moments, self._rate(state.t - 1))
        return None if found is None else Advance(found[0], *found)
