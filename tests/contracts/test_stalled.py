"""What becomes of a fit by quadrature that stalled and went on with draws."""

import numpy as np
import pytest

from pymc_ngvi import Elbo, Status
from pymc_ngvi.fitting.loop import History, LoopState
from pymc_ngvi.fitting.session import Begun, FitSession

STALLED = -10.0


@pytest.mark.parametrize(
    ("status", "elbo", "kept"),
    [
        (Status.STALLED, STALLED - 1.0, "quadrature"),
        (Status.STALLED, STALLED + 1.0, "draws"),
        (Status.MAX_ITERATIONS, -np.inf, "quadrature"),
        (Status.CONVERGED, STALLED - 1.0, "draws"),  # its ELBO has an error: what converged is the answer
    ],
)
def test_the_better_end_is_the_result(status, elbo, kept):
    history = History().appended(12.0, 3.0).appended(11.0, 2.0)
    first = Begun("rows", "by rows", LoopState("quadrature", Status.STALLED, History().appended(12.0, 3.0)), "exact")
    second = Begun("log p", "by draws", LoopState("draws", status, history), "with draws")
    session = FitSession(second, 1, score=True, seconds=0.0, compile_seconds=0.0)
    session._assessed = Elbo(elbo, 0.1), 2.0
    session._choose_between((first, (Elbo(STALLED, 0.0), 3.0)))
    state, fit = session._state, (session._problem, session._rule, session.options)
    assert state.rule == kept
    assert fit == (("rows", "by rows", "exact") if kept == "quadrature" else ("log p", "by draws", "with draws"))
    assert (session._assessed[0].value, session._assessed[1]) == (
        (STALLED, 3.0) if kept == "quadrature" else (elbo, 2.0)
    )
    assert state.status is (Status.STALLED if kept == "quadrature" else status)
    assert state.n_iterations == 2  # those of both


def test_a_fit_that_never_stalled_keeps_its_end():
    begun = Begun("log p", "by draws", LoopState("draws", Status.STALLED, History()), "with draws")
    session = FitSession(begun, 1, score=True, seconds=0.0, compile_seconds=0.0)
    session._assessed = Elbo(-np.inf, np.inf), np.inf
    session._choose_between(None)
    assert session._state is begun.state
