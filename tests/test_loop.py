"""The loop with a step rule that only counts: limits, stops, interrupts, resuming."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from matrix import ignore

from pymc_ngvi.core import history
from pymc_ngvi.core.history import History
from pymc_ngvi.core.status import Status
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
    np.testing.assert_array_equal(state.losses, 10.0 - np.arange(1, n + 1))
    np.testing.assert_array_equal(state.gaps, 1.0 / (2.0 + np.arange(n)))


def test_before_the_first_iteration():
    state = loop.start(Counting(), None)
    assert state.status is Status.NOT_STARTED
    assert_history(state, 0)


@pytest.mark.parametrize("n", [1, 5])
def test_iteration_limit(n):
    rule = Counting()
    state = loop.run(rule, loop.start(rule, None), n, ignore)
    assert state.status is Status.MAX_ITERATIONS
    assert_history(state, n)


def test_no_iterations_change_nothing():
    rule = Counting(last=0)
    state = loop.start(rule, None)
    assert loop.run(rule, state, 0, raise_at(0, AssertionError)) is state


@pytest.mark.parametrize("status", [Status.CONVERGED, Status.NOISE_LIMITED, Status.STALLED])
@pytest.mark.parametrize("last", [0, 3])
def test_the_rule_decides_when_to_stop(last, status):
    rule = Counting(last=last, status=status)
    state = loop.run(rule, loop.start(rule, None), 10, ignore)
    assert state.status is status
    assert_history(state, last)


def test_stopping_in_the_last_allowed_iteration_is_not_the_iteration_limit():
    rule = Counting(last=3)
    assert loop.run(rule, loop.start(rule, None), 3, ignore).status is Status.CONVERGED


def test_observer_sees_every_iteration_once():
    seen = []
    rule = Counting(last=4)
    loop.run(rule, loop.start(rule, None), 10, seen.append)
    assert [state.n_iterations for state in seen] == [1, 2, 3, 4]
    assert [len(state.losses) for state in seen] == [1, 2, 3, 4]
    assert all(state.status is Status.RUNNING for state in seen)


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


def test_other_errors_are_not_swallowed():
    rule = Counting()
    with pytest.raises(ZeroDivisionError):
        loop.run(rule, loop.start(rule, None), 10, raise_at(2, ZeroDivisionError))


@pytest.mark.parametrize("stop", [StopIteration, KeyboardInterrupt, None], ids=["stopped", "interrupted", "limit"])
def test_resuming_equals_never_having_stopped(stop):
    rule = Counting(last=7)
    whole = loop.run(rule, loop.start(rule, None), 100, ignore)
    if stop is KeyboardInterrupt:
        part = interrupted(rule, raise_at(3, stop))
    else:
        observe, n = (ignore, 3) if stop is None else (raise_at(3, stop), 100)
        part = loop.run(rule, loop.start(rule, None), n, observe)
        assert part.status.resumable
    assert part.n_iterations == 3
    resumed = loop.run(rule, loop.reopen(rule, part), 100, ignore)
    assert resumed.status is whole.status is Status.CONVERGED
    assert_history(resumed, 7)
    np.testing.assert_array_equal(resumed.losses, whole.losses)
    np.testing.assert_array_equal(resumed.gaps, whole.gaps)


def test_states_that_were_handed_out_are_not_modified():
    rule = Counting()
    first = loop.run(rule, loop.start(rule, None), 2, ignore)
    loop.run(rule, first, 5, ignore)
    assert_history(first, 2)


def test_a_converged_fit_does_not_go_on():
    rule = Counting(last=3)
    state = loop.run(rule, loop.start(rule, None), 10, ignore)
    assert loop.reopen(rule, state) is state
    assert loop.run(rule, state, 10, ignore) is state


def test_a_converged_fit_goes_on_where_the_rule_now_asks_for_more():
    state = loop.run(Counting(last=3), loop.start(Counting(last=3), None), 10, ignore)
    stricter = Counting(last=5)
    resumed = loop.run(stricter, loop.reopen(stricter, state), 10, ignore)
    assert resumed.n_iterations == 8  # the rule's own reopen starts its count anew
    assert resumed.status is Status.CONVERGED


@pytest.mark.parametrize("status", [Status.NOISE_LIMITED, Status.STALLED], ids=str)
def test_a_fit_that_gave_up_may_try_again(status):
    rule = Counting(last=3, status=status)
    state = loop.run(rule, loop.start(rule, None), 10, ignore)
    reopened = loop.reopen(rule, state)
    assert reopened.status is Status.RUNNING
    again = loop.run(rule, reopened, 10, ignore)
    assert again.n_iterations == 6
    assert again.status is status


# --- histories --------------------------------------------------------------------------------------------------------


def grown(n, start=None):
    """Return a history with rows (0, 0), (1, -1), ... appended to another."""
    result = History() if start is None else start
    for i in range(n):
        result = result.appended(float(i), -float(i))
    return result


@pytest.mark.parametrize("n", [0, 1, 63, 64, 65, 128, 129, 1000])
def test_history_holds_what_was_appended(n):
    rows = grown(n)
    assert rows.n == n
    np.testing.assert_array_equal(rows.column(0), np.arange(n))
    np.testing.assert_array_equal(rows.column(1), -np.arange(n))


def test_older_histories_stay_as_they_were():
    """Through every size at which the memory is full, and for columns that were taken before."""
    histories = [History()]
    for i in range(300):
        histories.append(histories[-1].appended(float(i), 0.5))
    columns = [h.column(0) for h in histories]
    grown(500, histories[-1])
    for n, (h, column) in enumerate(zip(histories, columns, strict=True)):
        assert h.n == n
        np.testing.assert_array_equal(column, np.arange(n))
        np.testing.assert_array_equal(h.column(0), np.arange(n))


@pytest.mark.parametrize("n", [0, 5, 64, 70])
def test_branches_of_one_history_do_not_disturb_each_other(n):
    trunk = grown(n)
    first = trunk.appended(1.5, 2.5)
    second = trunk.appended(3.5, 4.5)
    third, first = second.appended(7.0, 8.0), first.appended(5.0, 6.0)
    np.testing.assert_array_equal(trunk.column(0), np.arange(n))
    np.testing.assert_array_equal(first.column(0), [*range(n), 1.5, 5.0])
    np.testing.assert_array_equal(first.column(1)[n:], [2.5, 6.0])
    np.testing.assert_array_equal(third.column(0), [*range(n), 3.5, 7.0])
    np.testing.assert_array_equal(second.column(0), [*range(n), 3.5])


def test_new_histories_share_nothing():
    first, second = History().appended(1.0, 2.0), History().appended(3.0, 4.0)
    assert first.column(0).tolist() == [1.0]
    assert second.column(0).tolist() == [3.0]


def test_columns_are_read_only():
    column = grown(3).column(0)
    with pytest.raises(ValueError, match="read-only"):
        column[0] = 9.0


def test_appending_copies_rarely(monkeypatch):
    """10,000 rows: memory is taken anew when it is full, which doubles it, not for each row."""
    taken = []
    room = history._Room
    monkeypatch.setattr(history, "_Room", lambda rows, n: (taken.append(len(rows)), room(rows, n))[1])
    grown(10_000, History(0, room(np.empty((64, 2)), 0)))
    assert taken == [128, 256, 512, 1024, 2048, 4096, 8192, 16384]


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
