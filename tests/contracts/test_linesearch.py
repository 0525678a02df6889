"""Back-tracking on functions of the step size alone."""

import numpy as np
import pytest

from pymc_ngvi.core.status import Status
from pymc_ngvi.core.types import Evaluation
from pymc_ngvi.methods.schedule import search


def run(elbo_at, *, slope=1.0, first=1.0, propose=lambda rho: rho):
    """Search along a function of the step size; return the result and the step sizes that were evaluated."""
    tried = []

    def evaluate(rho):
        tried.append(rho)
        return Evaluation(None, None, None, None, elbo_at(rho))

    found = search(propose, evaluate, lambda e: e.elbo >= 0.0, elbo=0.0, slope=slope, first=first)
    return found, tried


def test_an_acceptable_first_step_is_taken():
    (q, evaluation, rho, *_), tried = run(lambda rho: rho)
    assert (q, evaluation.elbo, rho, tried) == (1.0, 1.0, 1.0, [1.0])


@pytest.mark.parametrize("top", [0.3, 0.45])
def test_the_top_of_a_parabola_is_found_at_once(top):
    """rho - rho^2 / (2 top) has slope 1 at 0 and falls below 0 at 1."""
    (_, _, rho, *_), tried = run(lambda rho: rho - rho**2 / (2 * top))
    np.testing.assert_allclose(rho, top)
    assert len(tried) == 2


@pytest.mark.parametrize(("elbo", "n_trials"), [(-1.0, 8), (-900.0, 8), (-1e9, 32), (-np.inf, 32), (np.nan, 32)])
def test_each_step_is_between_a_quarter_and_half_of_the_one_before(elbo, n_trials):
    """Hopeless steps do not count among the eight, but there is an end to them; it is said whether any was finite."""
    found, tried = run(lambda rho: elbo)
    assert found is (Status.STALLED if np.isfinite(elbo) else Status.NO_FINITE_TRIAL)
    parts = np.divide(tried[1:], tried[:-1])
    assert ((parts >= 0.25) & (parts <= 0.5)).all()
    assert len(tried) == n_trials


def test_steps_without_a_state_are_not_evaluated():
    (_, _, rho, *_), tried = run(lambda rho: rho, propose=lambda rho: rho if rho < 0.3 else None)
    assert (rho, tried) == (0.25, [0.25])


def test_halving_to_where_there_is_a_state_costs_no_trial():
    """Nine steps without a state, then as many evaluations as ever, from the first that has one."""
    found, tried = run(lambda rho: -0.5 * rho, slope=0.0, propose=lambda rho: rho if rho < 0.003 else None)
    assert found is Status.STALLED
    assert tried == [0.5**9 * 0.25**i for i in range(8)]
