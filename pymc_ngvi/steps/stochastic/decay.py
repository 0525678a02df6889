r"""Step rule `decay`: step sizes 2/(2 + t), and the weighted average of the expectation parameters [1]_.

The first step has size 1 and forgets the start. The average
:math:`\bar\omega_{t+1} = (1 - \gamma_t) \bar\omega_t + \gamma_t \omega_{t+1}` of the expectation parameters
:math:`\omega = (\mu, \Sigma + \mu \mu^T)` is the result; on conjugate models its KL divergence from the posterior falls
as O(1/t) when data are sub-sampled. The paper's bound V/(t + 2) is too small by up to a factor of 4: what its proof
gives is at most 4V/(t + 2).

Where a posterior is not conjugate, a step of size near 1 from a poor start can lead anywhere. A large step is therefore
looked at on the data and the draws that led to it: where the ELBO falls on these, the step is too long. Then the fit
begins again from a better start, the solution for some of the data, or, where it has one already, the step is halved.
As long as this does not happen, and on conjugate models it does not, steps are those of the paper.

With ``gauss_newton`` the curvature far from the optimum is not that of log p, and the first step does not forget the
start. A step that is too long is always halved, and steps count only once the ELBO has stopped rising: until then, a
window of steps in which it has risen is not counted, and the average begins again.

References
----------
.. [1] K. Wu and J. R. Gardner (2024). Understanding stochastic natural gradient variational inference. ICML.
   https://doi.org/10.48550/arXiv.2406.01870
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import BaseDraws, Evaluation, GaussianState, Moments
from pymc_ngvi.estimators import gauss_newton
from pymc_ngvi.steps.schedule.linesearch import Failure, search
from pymc_ngvi.steps.stochastic.base import Advance, Stochastic, StochasticState
from pymc_ngvi.steps.stochastic.levelling import Windows
from pymc_ngvi.steps.stochastic.pilot import pilot_fit

#: Nats, to second order, by which a step may move q without a look at where it leads.
_SMALL = 1.0
#: Nats per dimension by which the ELBO on the draws of a step may fall: so few draws say no more of the scale.
_SLACK = 1.0
#: Valid steps after which the fit does not begin again.
_MAX_BEGUN = 30
#: Steps in a window over which the ELBO is averaged to see whether it rises, about, and at most.
_WINDOW, _LONGEST = 16, 256
#: Steps that count, at least, once it has been seen to rise.
_LEAST = 14
#: Standard errors of a rise.
_RISES = 3.0


@stored("decay.steps")
@dataclass(frozen=True)
class Steps:
    """What the rule remembers.

    Parameters
    ----------
    n_steps : int
        Valid steps behind the average, or what the start is worth in such steps.
    start : GaussianState or None
        Where the fit began; None when it is needed no more.
    rise : Windows or None
        Of the ELBO, where steps count only once it has stopped rising.
    """

    n_steps: int = 0
    start: GaussianState | None = None
    rise: Windows | None = None


class Decay(Stochastic[Steps]):
    """Steps 2/(2 + t) with averaging; options as for `Stochastic`, without step sizes."""

    path_draws_within: ClassVar[tuple[int, int]] = (128, 1_024)  # a first step of size 1 takes their noise as it is
    takes: ClassVar[frozenset[str]] = Stochastic.takes - {"step_size"}

    def _rate(self, t: int) -> float:
        return 2.0 / (2.0 + t)

    def _advance(self, state: StochasticState[Steps], moments: Moments) -> Advance[Steps] | None:
        n_steps = _memory(state).n_steps  # valid ones: the first of them forgets the start
        found = self._updated(state.iterate, moments, self._rate(n_steps))
        if found is None:
            return None
        return self._averaged(state, *found)

    def _averaged(
        self, state: StochasticState[Steps], iterate: GaussianState, step_size: float
    ) -> Advance[Steps] | None:
        memory = _memory(state)
        weight = self._rate(memory.n_steps)
        try:
            average = iterate if weight == 1.0 else state.q.merged(iterate, weight)
        except np.linalg.LinAlgError:  # both singular to rounding, or all but
            return None
        start = memory.start if memory.n_steps < _MAX_BEGUN else None
        rise = self._rise(state, memory)
        n_steps = memory.n_steps + 1
        if rise is not None and rise.just_completed and rise.has_risen(_RISES):
            average, n_steps = iterate, max(n_steps - rise.size, min(n_steps, _LEAST))
        return Advance(average, iterate, step_size, Steps(n_steps, start, rise))

    def _rise(self, state: StochasticState[Steps], memory: Steps) -> Windows | None:
        """Return the windows of the ELBO with the last one."""
        if self._estimator is not gauss_newton:  # steps of size 1 with Hessians forget the start
            return None
        size = _WINDOW
        if self._target.has_minibatch:  # whole passes have none of the noise of single batches
            size = min(self._target.n_batches * -(-size // self._target.n_batches), _LONGEST)
        return (memory.rise or Windows(size)).with_value(state.elbo)

    def _guarded(
        self,
        state: StochasticState[Steps],
        advance: Advance[Steps],
        moments: Moments,
        base: BaseDraws,
        evaluation: Evaluation,
    ) -> Advance[Steps] | None:
        if advance.step_size**2 * moments.gap < _SMALL:
            return advance
        least = evaluation.elbo - _SLACK * self._target.n_dim - 1e-9 * abs(evaluation.elbo)

        def accepts(new: Evaluation) -> bool:
            return bool(new.elbo >= least and new.finite.sum() >= evaluation.finite.sum())

        if accepts(self._estimator.evaluate(self._target, advance.iterate, base)):
            return advance
        start = _memory(state).start
        if start is not None and self._estimator is not gauss_newton:  # which is taken where Hessians take too long
            pilot = pilot_fit(self._target, self._update, start, self._seed)
            if pilot is not None:
                return Advance(pilot.q, pilot.q, advance.step_size, Steps(pilot.n_batches))
        found = search(
            lambda rho: self._update(state.iterate, moments, rho, True),
            lambda q: self._estimator.evaluate(self._target, q, base),
            accepts,
            elbo=evaluation.elbo,
            slope=2.0 * moments.gap,
            first=0.5 * advance.step_size,
        )
        return None if isinstance(found, Failure) else self._averaged(state, found.q, found.size)


def _memory(state: StochasticState[Steps]) -> Steps:
    return state.memory or Steps(0, state.q)
