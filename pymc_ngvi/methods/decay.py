r"""Stochastic natural gradients with steps 2/(2 + t), and the average of expectation parameters [1]_.

The first step has size 1 and forgets the start. The average :math:`\bar\omega_{t+1} = (1 - \gamma_t) \bar\omega_t +
\gamma_t \omega_{t+1}` of the expectation parameters :math:`\omega = (\mu, \Sigma + \mu \mu^T)` is the result; on
conjugate models its KL divergence from the posterior falls as O(1/t) when data are sub-sampled. The paper's bound
V/(t + 2) is too small by up to a factor of 4: what its proof gives is at most 4V/(t + 2).

Where a posterior is not conjugate, a step of size near 1 from a poor start can lead anywhere. A large step is
therefore looked at on the data and the draws that led to it: where the ELBO falls on these, the step is too long.
Then the fit begins again from a better start, the solution for some of the data, or, where it has one already, the
step is halved. As long as this does not happen, and on conjugate models it does not, steps are those of the paper.

With ``gauss_newton`` the curvature far from the optimum is not that of log p, and a first step of size 1 does not
forget the start. Steps are 0.1 until the ELBO has levelled off; only then they fall, and the average begins. A step
that is too long is always halved.

References
----------
.. [1] K. Wu and J. R. Gardner (2024). Understanding stochastic natural gradient variational inference. ICML.
   https://doi.org/10.48550/arXiv.2406.01870
"""

import functools

from dataclasses import dataclass, replace
from typing import ClassVar

from pymc_ngvi.core.status import Status
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import BaseDraws, Density, Evaluation, Target
from pymc_ngvi.families.gaussian import AnyGaussian
from pymc_ngvi.methods.adaptive import Adaptive
from pymc_ngvi.methods.estimators import Moments, Update, price
from pymc_ngvi.methods.schedule import ROUNDING, is_not_below, search
from pymc_ngvi.methods.stochastic import Pooled, Stochastic, StochasticState

#: Nats, to second order, by which a step may move q without a look at where it leads.
_SMALL = 1.0
#: Nats per dimension by which the ELBO on the draws of a step may fall: so few draws say no more of the scale.
_SLACK = 1.0
#: Valid steps after which the fit does not begin again.
_MAX_BEGUN = 30
#: Steps that the start is worth where steps are held until the ELBO has levelled off: their size is 0.1.
_HELD = 18


def moment_average[S: AnyGaussian](first: S, other: S, weight: float) -> S | None:
    """Return the Gaussian with the first two moments, within the structure, of a mixture with another of its class.

    For factors of the covariance only. None where their covariance is singular to rounding.
    """
    structure, apart = first.structure, other.location - first.location
    # Relative to this covariance, whose factor is that of the other one's.
    between = structure.solve(first.factor, apart)[None]
    of_means = (1.0 - weight) * structure.mirrored(structure.outer(between, between))
    relative = weight * (structure.gram(structure.left_quotient(first.factor, other.factor)) + of_means)
    root = structure.cholesky(first.add_to_diagonal(relative, 1.0 - weight), reverse=False)
    if root is None:
        return None
    return replace(first, location=first.location + weight * apart, factor=structure.product(first.factor, root))


@stored("decay.steps")
@dataclass(frozen=True)
class Steps:
    """What the rule remembers."""

    #: Valid steps behind the average, or what the start is worth in such steps.
    n_steps: int = 0
    #: Where the fit began; None when it is needed no more.
    start: AnyGaussian | None = None


class Decay(Stochastic[Steps]):
    """Steps 2/(2 + t) with averaging; options as for `Stochastic`, without step sizes."""

    path_draws_within: ClassVar[tuple[int, int]] = (128, 1_024)  # a first step of size 1 takes their noise as it is
    takes: ClassVar[frozenset[str]] = Stochastic.takes - {"step_size"}

    def _rate(self, t: int) -> float:
        return 2.0 / (2.0 + t)

    def _advance(self, state: StochasticState[Steps], moments: Moments) -> StochasticState[Steps] | None:
        n_steps = self._memory(state).n_steps  # valid ones: the first of them forgets the start
        size = self._rate(n_steps)
        if self._is_held(state):  # steps that had to be halved grow again
            size = min(size, 2.0 * state.step_size)
        found = self._updated(state, moments, size)
        return None if found is None else self._averaged(state, found.iterate, found.step_size)

    def _averaged(
        self, state: StochasticState[Steps], iterate: AnyGaussian, step_size: float
    ) -> StochasticState[Steps] | None:
        memory = self._memory(state)
        if self._is_held(state) and not state.levels.has_levelled:
            return replace(state, q=iterate, iterate=iterate, step_size=step_size, memory=memory)
        weight = self._rate(memory.n_steps)
        average = iterate if weight == 1.0 else moment_average(state.q, iterate, weight)
        if average is None:
            return None
        start = memory.start if memory.n_steps < _MAX_BEGUN else None
        memory = Steps(memory.n_steps + 1, start)
        return replace(state, q=average, iterate=iterate, step_size=step_size, memory=memory)

    def terminate(self, state: StochasticState[Steps]) -> Status | None:
        """Return why to stop, or None to go on: once the ELBO has levelled off, steps that were held begin to fall."""
        status = super().terminate(state)
        return None if status is Status.LEVELLED and self._is_held(state) else status

    def _memory(self, state: StochasticState[Steps]) -> Steps:
        # Steps of size 1 with Hessians forget the start; those with Gauss-Newton may lead to another one as far away.
        return state.memory or Steps(_HELD if self._takes_gauss_newton else 0, state.q)

    def _is_held(self, state: StochasticState[Steps]) -> bool:
        """Tell whether steps do not count yet."""
        return self._takes_gauss_newton and self._memory(state).n_steps == _HELD

    def _guarded(
        self,
        state: StochasticState[Steps],
        advance: StochasticState[Steps],
        moments: Moments,
        base: BaseDraws,
        evaluation: Evaluation,
    ) -> StochasticState[Steps] | None:
        if advance.step_size**2 * moments.gap < _SMALL:
            return advance
        of_noise = 0.0 if self._takes_gauss_newton else _SLACK * self._target.n_dim
        slack = of_noise + ROUNDING * abs(evaluation.elbo)
        accepts = functools.partial(is_not_below, evaluation, slack=slack)
        if accepts(self._estimator.evaluate(self._target, advance.iterate, base)):
            return advance
        start = self._memory(state).start
        if start is not None and not self._takes_gauss_newton:  # which is taken where Hessians take too long
            pilot = pilot_fit(self._target, self._update, start, self._seed)
            if pilot is not None:
                q, n_batches = pilot
                return replace(advance, q=q, iterate=q, memory=Steps(n_batches))
        found = search(
            lambda rho: self._update(state.iterate, moments, rho, True),
            lambda q: self._estimator.evaluate(self._target, q, base),
            accepts,
            elbo=evaluation.elbo,
            slope=2.0 * moments.gap,
            first=0.5 * advance.step_size,
        )
        return None if isinstance(found, Status) else self._averaged(state, found.q, found.size)


# --- a better start for steps on minibatches: the solution for some of the data, held fixed ---
# On fixed data and fixed draws the problem is deterministic, and a step that overshoots is seen and shortened. The
# solution for n rows is within about sqrt(N / n) posterior standard deviations of that for all N of them.

#: Minibatches that make up the data of a pilot fit, at most, and iterations on them.
_N_BATCHES, _MAX_ITERATIONS = 8, 100
#: Nats that the pilot fit may leave to gain in 100 dimensions.
_TOL = 0.5


def pilot_fit(target: Target, update: Update, q: AnyGaussian, seed: int) -> tuple[AnyGaussian, int] | None:
    """Solve the problem on the first minibatches; return the state, and how many these are."""
    if not target.has_hessian:
        return None
    n_batches = min(target.n_batches, _N_BATCHES) if target.has_minibatch else 1
    pooled: Density = Pooled(target, seed, n_batches) if target.has_minibatch else target
    rule = Adaptive(pooled, update, price, seed=seed, tol=_TOL)
    if not rule.first_evaluation(q).finite.any():
        return None
    state = rule.init(q)
    for _ in range(_MAX_ITERATIONS):
        state = rule.step(state)
        if rule.terminate(state) is not None:
            break
    return state.q, n_batches
