"""The iterations of a fit, with a look at the tails of the posterior where these may have no end."""

import dataclasses

from pymc_ngvi.core.status import Status
from pymc_ngvi.core.types import Rule
from pymc_ngvi.fitting import loop
from pymc_ngvi.fitting.problem import Problem
from pymc_ngvi.fitting.propriety import LOOK, Propriety


class Watched:
    """Iterates until a fit ends, or its posterior is found to be improper.

    Parameters
    ----------
    problem : Problem
    """

    def __init__(self, problem: Problem) -> None:
        self._problem, self._propriety = problem, Propriety(problem.density)

    @property
    def improper(self) -> tuple[str, ...]:
        """The variables in which the posterior is found to be improper."""
        return self._propriety.improper

    def run(self, rule: Rule, state: loop.LoopState, last: int, observe: loop.Observer) -> loop.LoopState:
        """Return where the loop ends, at iteration ``last`` at the latest; see `loop.run`."""

        def until(state: loop.LoopState, end: int) -> loop.LoopState:
            return loop.run(rule, state, end - state.n_iterations, observe)

        propriety = self._propriety
        if propriety.is_open and propriety.can_be_told and state.n_iterations < LOOK < last:
            state = until(state, LOOK)
            if state.status is Status.MAX_ITERATIONS and self._is_improper(state, ended=False):
                return dataclasses.replace(state, status=Status.UNBOUNDED)
        state = until(state, last)
        while state.status is Status.UNBOUNDED and state.n_iterations < last:
            if propriety.is_open and (self._is_improper(state, ended=False) or propriety.is_open):
                break
            # What is proper is only wide: the fit goes on, and standard deviations are compared with those of now.
            state = until(dataclasses.replace(state, rule=rule.reopen(state.rule), status=Status.RUNNING), last)
        return state

    def ended(self, state: loop.LoopState) -> loop.LoopState:
        """Return the end of a fit, which is none near a posterior that is improper."""
        if state.status.can_be_followed and self._is_improper(state, ended=True):
            return dataclasses.replace(state, status=Status.UNBOUNDED)
        return state

    def _is_improper(self, state: loop.LoopState, *, ended: bool) -> bool:
        return self._propriety.is_improper(*self._problem.mean_and_sd(state.rule.q), ended=ended)
