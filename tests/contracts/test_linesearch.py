"""Back-tracking on functions of the step size alone."""

import numpy as np
import pytest

from pymc_ngvi.core.types import Evaluation
from pymc_ngvi.steps.schedule.linesearch import Failure, search


def run(elbo_at, *, slope=1.0, first=1.0, propose=lambda rho: rho):
    """Search along a function of the step size; return the result and the step sizes that were evaluated."""
    tried = []

    def evaluate(rho):
        tried.append(rho)
        return Evaluation(None, None, None, None, elbo_at(rho))

    found = search(propose, evaluate, lambda e: e.elbo >= 0.0, elbo=0.0, slope=slope, first=first)
    return found, tried


def test_an_acceptable_first_step_is_taken():
    (q, evaluation, rho, _), tried = run(lambda rho: rho)
    assert (q, evaluation.elbo, rho, tried) == (1.0, 1.0, 1.0, [1.0])


def test_it_starts_where_it_is_told():
    assert run(lambda rho: rho, first=0.25)[1] == [0.25]


@pytest.mark.parametrize("top", [0.3, 0.45])
def test_the_top_of_a_parabola_is_found_at_once(top):
    """rho - rho^2 / (2 top) has slope 1 at 0 and falls below 0 at 1."""
    (_, _, rho, _), tried = run(lambda rho: rho - rho**2 / (2 * top))
    np.testing.assert_allclose(rho, top)
    assert len(tried) == 2


@pytest.mark.parametrize(("elbo", "n_trials"), [(-1.0, 8), (-900.0, 8), (-1e9, 30), (-np.inf, 30), (np.nan, 30)])
def test_each_step_is_between_a_quarter_and_half_of_the_one_before(elbo, n_trials):
    """Hopeless steps do not count among the eight, but there is an end to them; it is said whether any was finite."""
    found, tried = run(lambda rho: elbo)
    assert found is (Failure.NOT_ACCEPTED if np.isfinite(elbo) else Failure.NOT_FINITE)
    parts = np.divide(tried[1:], tried[:-1])
    assert ((parts >= 0.25) & (parts <= 0.5)).all()
    assert len(tried) == n_trials


@pytest.mark.parametrize("hopeless", [-1e16, -np.inf])
def test_a_direction_that_starts_far_too_long_is_not_given_up(hopeless):
    """Steps 1e-6 as long as the first gain."""
    (_, _, rho, _), _ = run(lambda rho: rho if rho < 1e-6 else hopeless, slope=1e3)
    assert 0.25e-6 <= rho < 1e-6


def test_one_finite_trial_makes_a_search_that_was_not_blind():
    assert run(lambda rho: -1.0 if rho < 1e-6 else -np.inf)[0] is Failure.NOT_ACCEPTED


def test_a_fall_that_was_to_be_expected_of_a_long_step_counts():
    """A rise of a million nats was promised: a fall of a few millions is no reason to go on for longer."""
    assert len(run(lambda rho: -5e6 * rho, slope=1e6)[1]) == 8


def test_steps_without_a_state_are_not_evaluated():
    (_, _, rho, _), tried = run(lambda rho: rho, propose=lambda rho: rho if rho < 0.3 else None)
    assert (rho, tried) == (0.25, [0.25])


def test_halving_to_where_there_is_a_state_costs_no_trial():
    """Nine steps without a state, then as many evaluations as ever, from the first that has one."""
    found, tried = run(lambda rho: -0.5 * rho, slope=0.0, propose=lambda rho: rho if rho < 0.003 else None)
    assert found is Failure.NOT_ACCEPTED
    assert tried == [0.5**9 * 0.25**i for i in range(8)]


def test_steps_without_a_state_between_others_do_not_count_either():
    """Bad luck of every kind in turn: eight evaluations at most, and the search goes on where it was."""
    calls = iter([None, 1.0] * 8 + [2.0])
    _, tried = run(lambda rho: -1.0, slope=0.0, propose=lambda rho: None if next(calls) is None else rho)
    assert tried == [0.5 ** (1 + i) * 0.25**i for i in range(8)]


def test_a_direction_without_any_state_ends():
    proposed = []
    found, tried = run(lambda rho: rho, propose=proposed.append)
    assert found is Failure.NOT_ACCEPTED
    assert not tried
    assert proposed == [0.5**i for i in range(30)]
