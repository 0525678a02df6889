"""The loop: knows a step rule by its verbs, and nothing of families or models."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from pymc_ngvi.core.status import Status, format_elbo, format_gap
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array, Rule, RuleState, VariationalState

# --- a history of numbers that grows by one row in each iteration, without being copied each time ---


@stored("history", content=("losses", "gaps"), make="of_columns")
@dataclass(frozen=True)
class History:
    """-ELBO and estimated gap after each iteration; immutable, but the next one shares its memory."""

    #: Rows.
    n: int = 0
    _rows: list[tuple[float, float]] = field(default_factory=list)

    def appended(self, loss: float, gap: float) -> "History":
        """Return the history with one more row; takes constant time on average."""
        rows = self._rows if len(self._rows) == self.n else self._rows[: self.n]  # another went on from here already
        rows.append((loss, gap))
        return History(self.n + 1, rows)

    def _column(self, index: int) -> Array:
        """Return one column, (n,), read-only."""
        values: Array = np.array([row[index] for row in self._rows[: self.n]], dtype=np.float64)
        values.flags.writeable = False
        return values

    losses = property(lambda self: self._column(0))
    gaps = property(lambda self: self._column(1))

    @classmethod
    def of_columns(cls, losses: Array, gaps: Array) -> "History":
        """Return the history with these columns, (n,) each."""
        return cls(len(losses), list(zip(losses.tolist(), gaps.tolist(), strict=True)))


# --- the loop: knows a step rule by its verbs, and nothing of families or models ---


@stored("loop.state")
@dataclass(frozen=True)
class LoopState:
    """A fit at the end of an iteration; the loop goes on from any such value as if it had never stopped."""

    rule: RuleState
    status: Status
    #: On the draws then in use, or by quadrature.
    history: History

    @property
    def n_iterations(self) -> int:
        """Iterations done."""
        return self.history.n

    def numbers(self) -> dict[str, str]:
        """Return what is shown of it, by headers that are as wide as the largest numbers."""
        rule = self.rule
        return {
            "Iteration": f"{self.n_iterations:,}",
            "   ELBO (nats)": format_elbo(rule.elbo),
            "Nats to gain": format_gap(rule.gap),
            **({" Draws": f"{rule.n_draws:,}"} if rule.n_draws else {}),  # exact expectations take none
            "Step size": f"{rule.step_size:.2g}",
        }


#: Called after each iteration with the state; may raise StopIteration, with the status that is to be the fit's.
Observer = Callable[[LoopState], None]


def start(rule: Rule, q: VariationalState) -> LoopState:
    """Return the state before the first iteration."""
    return LoopState(rule.init(q), Status.NOT_STARTED, History())


def run(rule: Rule, state: LoopState, n: int, observe: Observer) -> LoopState:
    """Run up to ``n`` more iterations."""
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
        status = status or (stop.value if isinstance(stop.value, Status) else Status.STOPPED)
    return replace(state, status=status or Status.MAX_ITERATIONS)


def reopen(rule: Rule, state: LoopState) -> LoopState:
    """Return a state from which a fit that stopped by itself may go on, if the rule's options allow."""
    if state.status is Status.CONVERGED and rule.terminate(state.rule) is Status.CONVERGED:
        return state
    if state.status.ended_by_itself:
        return replace(state, rule=rule.reopen(state.rule), status=Status.RUNNING)
    return state
