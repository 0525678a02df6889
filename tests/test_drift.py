"""Gradients of global parameters over several sets of draws: what they share, where to go, when to rest."""

from types import SimpleNamespace

import numpy as np
import pytest

from numpy.testing import assert_allclose

from pymc_ngvi.steps.drift import Drift, with_stride
from pymc_ngvi.values import Moments

Q = SimpleNamespace(globals_=np.array([1, 3]))


def moments(grad, se):
    unknown = np.full(4, np.nan)
    grads, ses = unknown.copy(), unknown.copy()
    grads[Q.globals_], ses[Q.globals_] = grad, se
    return Moments(grads, np.eye(4), ses, unknown, 0.0, 0.0, 0.0)


def measured(*sets):
    drift = None
    for grad, se, n_draws in sets:
        drift = Drift.measured(drift, Q, moments(grad, se), n_draws)
    return drift


def test_sets_count_by_their_draws():
    drift = measured(([0.4, 0.0], [0.3, 0.3], 32), ([0.1, -0.2], [0.1, 0.1], 64))
    assert_allclose(drift.mean, [(0.4 * 32 + 0.1 * 64) / 96, -0.2 * 64 / 96])
    assert_allclose(drift.se, np.hypot(0.3 * 32, 0.1 * 64) / 96)


def test_what_one_set_hides_several_show():
    one = ([-0.2, 0.0], [0.1, 0.1], 64)
    assert measured(one).stride(None) is None
    assert measured(one, one).stride(None) is None  # 2.8 standard errors
    several = measured(one, one, one).stride(None)
    assert_allclose(several.step, [2.0 * -0.2, 0.0])


def test_a_stride_grows_while_it_goes_on_and_shrinks_when_it_has_gone_too_far():
    on, back = (measured(*[([sign * 0.2, 0.0], [0.05, 0.05], 64)] * 4) for sign in (1.0, -1.0))
    first = on.stride(None)
    second = on.stride(first)
    assert second.stretch == 2.0 * first.stretch
    assert_allclose(second.step[0], min(1.0, second.stretch * 0.2))
    turned = back.stride(second)
    assert turned.stretch < first.stretch
    assert turned.step[0] < 0.0
    far = first
    for _ in range(10):
        far = on.stride(far)
    assert_allclose(far.step, [1.0, 0.0])  # one standard deviation of q at most


@pytest.mark.parametrize(
    ("grad", "se", "expected"),
    [([0.05, -0.05], 0.03, True), ([0.2, 0.0], 0.03, False), ([0.0, 0.0], 0.08, False), ([0.12, 0.0], 0.04, True)],
    ids=["at rest", "moves", "not known", "within its error"],
)
def test_when_globals_are_settled(grad, se, expected):
    assert measured((grad, [se, se], 64)).is_settled() is expected


def test_a_family_without_globals_has_no_drift():
    assert Drift.measured(None, SimpleNamespace(globals_=None), moments([1.0, 1.0], [0.1, 0.1]), 64) is None


def test_a_stride_replaces_the_gradient_only_where_it_goes():
    new = with_stride(Q, moments([0.3, 0.1], [0.1, 0.1]), np.array([0.8, 0.0]))
    assert_allclose(new.grad[Q.globals_], [0.8, 0.1])
