"""The loop: knows a step rule by its verbs, and nothing of families or models."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from pymc_ngvi.core.history import History
from pymc_ngvi.core.status import Status
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array, Rule, RuleState, VariationalState


@stored("loop.state")
@dataclass(frozen=True)
class LoopState:
    """A fit at the end of an iteration; the loop goes on from any such value as if it had never stopped.

    Parameters
    ----------
    rule : RuleState
    status : Status
    history : History
        -ELBO and estimated gap after each iteration, on the draws then in use or by quadrature.
    """

    rule: RuleState
    status: Status
    history: History

    @property
    def n_iterations(self) -> int:
        """Iterations done."""
        return self.history.n

    @property
    def losses(self) -> Array:
        """-ELBO after each iteration, (n_iterations,)."""
        return self.history.column(0)

    @property
    def gaps(self) -> Array:
        """Estimated gap after each iteration, (n_iterations,)."""
        return self.history.column(1)


class OutOfSeconds(StopIteration):
    """The estimated seconds that a fit may take are used up."""

    status = Status.OUT_OF_SECONDS


class Paused(OutOfSeconds):
    """The fit has taken so long that another posterior is to be tried from where it is."""

    status = Status.PAUSED


#: Called after each iteration with the state; may raise StopIteration.
Observer = Callable[[LoopState], None]


def start(rule: Rule, q: VariationalState) -> LoopState:
    """Return the state before the first iteration."""
    return LoopState(rule.init(q), Status.NOT_STARTED, History())


def run(rule: Rule, state: LoopState, n: int, observe: Observer) -> LoopState:
    """Run up to ``n`` more iterations.

    Parameters
    ----------
    rule : StepRule
    state : LoopState
        Not modified.
    n : int
    observe : callable
        Called after each iteration. StopIteration from it ends the fit (status STOPPED, OUT_OF_SECONDS or PAUSED).
    """
    if state.status is Status.CONVERGED or n == 0:
        return state
    status = rule.terminate(state.rule) if state.n_iterations == 0 else None
    last = state.n_iterations + n
    try:
        while status is None and state.n_iterations < last:
            new = rule.step(state.rule)
            state = LoopState(new, Status.RUNNING, state.history.appended(-new.elbo, new.gap))
            status = rule.terminate(new)
            observe(state)
    except StopIteration as stop:
        # A fit that had converged in this very iteration is no less converged for being stopped.
        status = status or (stop.status if isinstance(stop, OutOfSeconds) else Status.STOPPED)
    return replace(state, status=status or Status.MAX_ITERATIONS)


def reopen(rule: Rule, state: LoopState) -> LoopState:
    """Return a state from which a fit that stopped by itself may go on, if the rule's options allow."""
    if state.status is Status.CONVERGED and rule.terminate(state.rule) is Status.CONVERGED:
        return state
    if state.status.ended_by_itself:
        return replace(state, rule=rule.reopen(state.rule), status=Status.RUNNING)
    return state


def settled(rule: Rule, state: LoopState) -> LoopState:
    """Return a state that was kept while the fit was under way with the status that the loop would have seen next."""
    if state.status is Status.RUNNING and (status := rule.terminate(state.rule)) is not None:
        return replace(state, status=status)
    return state
