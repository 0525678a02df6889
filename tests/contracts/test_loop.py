"""The loop with a step rule that only counts: limits, stops, interrupts, resuming."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from matrix import ignore

from pymc_ngvi import Status
from pymc_ngvi.fitting import loop


@dataclass(frozen=True)
class Count:
    """State of the counting rule: loss and gap are made of the number of steps."""

    steps: int = 0
    rounds: int = 0
    q: None = None

    @property
    def elbo(self):
        return -10.0 + self.steps

    @property
    def gap(self):
        return 1.0 / (1 + self.steps)


class Counting:
    """Stops with a given status after a number of steps; may be interrupted in one of them."""

    def __init__(self, last=None, status=Status.CONVERGED, interrupt_at=None):
        self.last, self.status, self.interrupt_at = last, status, interrupt_at

    def init(self, q):
        return Count()

    def step(self, state):
        if state.steps + 1 == self.interrupt_at:
            raise KeyboardInterrupt
        return replace(state, steps=state.steps + 1)

    def terminate(self, state):
        done = self.last is not None and state.steps - state.rounds >= self.last
        return self.status if done else None

    def reopen(self, state):
        return replace(state, rounds=state.steps)


def raise_at(iteration, error):
    """Return an observer that raises after one iteration."""

    def observe(state):
        if state.n_iterations == iteration:
            raise error

    return observe


def assert_history(state, n):
    assert state.n_iterations == state.rule.steps == n
    np.testing.assert_array_equal(state.history.losses, 10.0 - np.arange(1, n + 1))
    np.testing.assert_array_equal(state.history.gaps, 1.0 / (2.0 + np.arange(n)))


@pytest.mark.parametrize("n", [1, 5])
def test_iteration_limit(n):
    rule = Counting()
    state = loop.run(rule, loop.start(rule, None), n, ignore)
    assert state.status is Status.MAX_ITERATIONS
    assert_history(state, n)


@pytest.mark.parametrize("status", [Status.CONVERGED, Status.NOISE_LIMITED, Status.STALLED])
@pytest.mark.parametrize("last", [0, 3])
def test_the_rule_decides_when_to_stop(last, status):
    rule = Counting(last=last, status=status)
    state = loop.run(rule, loop.start(rule, None), 10, ignore)
    assert state.status is status
    assert_history(state, last)


def interrupted(rule, observe=ignore):
    """Return the last state that is observed before an interrupt."""
    states = [loop.start(rule, None)]

    def keep(state):
        states.append(state)
        observe(state)

    with pytest.raises(KeyboardInterrupt):
        loop.run(rule, states[0], 100, keep)
    return states[-1]


def test_an_observer_that_stops_the_fit_keeps_the_iteration_it_saw():
    rule = Counting()
    state = loop.run(rule, loop.start(rule, None), 10, raise_at(3, StopIteration))
    assert state.status is Status.STOPPED
    assert_history(state, 3)


def test_an_interrupt_ends_the_loop_and_the_last_completed_iteration_was_observed():
    assert_history(interrupted(Counting(interrupt_at=4)), 3)
    assert_history(interrupted(Counting(), raise_at(3, KeyboardInterrupt)), 3)


def test_a_fit_that_had_converged_in_the_iteration_of_the_stop_is_converged():
    rule = Counting(last=3)
    assert loop.run(rule, loop.start(rule, None), 10, raise_at(3, StopIteration)).status is Status.CONVERGED


@pytest.mark.parametrize("status", list(Status), ids=str)
def test_every_status_says_what_happened_and_what_to_do(status):
    assert str(status) == status.label
    assert status.sentence.endswith(".")
    assert status.cure.endswith(".")
    assert len({s.sentence for s in Status}) == len({s.label for s in Status}) == len(Status)
    goes_on = (
        Status.NOT_STARTED,
        Status.MAX_ITERATIONS,
        Status.OUT_OF_SECONDS,
        Status.PAUSED,
        Status.INTERRUPTED,
        Status.STOPPED,
    )
    assert status.resumable == (status in goes_on)
    assert status.ended_by_itself == (status not in (*goes_on, Status.RUNNING))
