"""Gradients of global parameters over several sets of draws: what they share, where to go, when to rest."""

from types import SimpleNamespace

import numpy as np
import pytest

from numpy.testing import assert_allclose

from pymc_ngvi.core.types import BaseDraws, Evaluation, Moments
from pymc_ngvi.steps.adaptive.global_gradient import GlobalGradient, with_stride
from pymc_ngvi.steps.adaptive.nearness import is_solved_for_globals

Q = SimpleNamespace(globals_=np.array([1, 3]))


def moments(grad, se):
    unknown = np.full(4, np.nan)
    grads, ses = unknown.copy(), unknown.copy()
    grads[Q.globals_], ses[Q.globals_] = grad, se
    return Moments(grads, np.eye(4), ses, unknown, 0.0, 0.0, 0.0)


def measured(*sets):
    drift = None
    for grad, se, n_draws in sets:
        drift = GlobalGradient.measured(drift, Q, moments(grad, se), n_draws)
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
    assert GlobalGradient.measured(None, SimpleNamespace(globals_=None), moments([1.0, 1.0], [0.1, 0.1]), 64) is None


def test_a_stride_replaces_the_gradient_only_where_it_goes():
    new = with_stride(Q, moments([0.3, 0.1], [0.1, 0.1]), np.array([0.8, 0.0]))
    assert_allclose(new.grad[Q.globals_], [0.8, 0.1])


# --- gradients alone --------------------------------------------------------------------------------------------------


class Sets:
    """q and evaluations whose whitened gradient of the globals is a mean plus noise, counted."""

    def __init__(self, mean, sd, n_draws=64, seed=1):
        self.mean, self.sd, self.n_draws, self.n_sets = np.asarray(mean), sd, n_draws, 0
        self.q = SimpleNamespace(globals_=Q.globals_, whiten=lambda grad: grad)
        self._rng = np.random.default_rng(seed)

    def __call__(self, k):
        assert k == self.n_sets  # each set has a number of its own
        self.n_sets += 1
        grad = np.zeros((self.n_draws, 4))
        grad[:, Q.globals_] = self.mean + self.sd * self._rng.standard_normal((self.n_draws, 2))
        finite = np.ones(self.n_draws, dtype=bool)
        return BaseDraws(np.zeros((self.n_draws, 4)), 8), Evaluation(grad, finite * 1.0, grad, finite, 0.0)


@pytest.mark.parametrize("seed", [1, 2])
def test_adding_sets_ends_when_the_noise_is_low(seed):
    first = measured(([0.0, 0.0], [0.2, 0.2], 64))
    heard = Sets([0.05, -0.05], 0.8, seed=seed)
    drift = first.with_more_sets(heard.q, heard)
    assert 2 <= heard.n_sets < 16
    assert np.max(drift.se) <= 0.05
    assert drift.n_sets == first.n_sets  # sets between which q has moved are another matter
    weight = 64 / (64 * (heard.n_sets + 1))
    assert np.all(np.abs(drift.mean - (1 - weight) * heard.mean) < 5 * drift.se)


def test_adding_sets_ends_when_a_parameter_moves_for_certain():
    heard = Sets([2.0, 0.0], 0.8)
    measured(([2.0, 0.0], [0.2, 0.2], 64)).with_more_sets(heard.q, heard)
    assert heard.n_sets == 0


def test_adding_sets_does_not_go_on_for_ever():
    heard = Sets([0.0, 0.0], 50.0)
    measured(([0.0, 0.0], [9.0, 9.0], 64)).with_more_sets(heard.q, heard)
    assert heard.n_sets == 16


# --- when a set of draws has no more to give --------------------------------------------------------------------------


def test_global_parameters_come_to_rest_before_a_set_counts_as_solved():
    """The noise of thousands of effects does not hide a global parameter."""
    unit = np.zeros(4)

    def of(grad, floor=50.0, gap=20.0):
        grads, ses = unit.copy(), np.full(4, 0.2)
        grads[Q.globals_] = grad
        return Moments(grads, np.eye(4), ses, unit, gap, floor, 1.0)

    many = SimpleNamespace(globals_=Q.globals_, n_dim=5_000)
    assert not is_solved_for_globals(many, of([3.0, 0.0]), 0.1)
    assert is_solved_for_globals(many, of([0.15, -0.15]), 0.1)
    assert not is_solved_for_globals(many, of([0.0, 0.0], gap=101.0), 0.1)
    assert is_solved_for_globals(many, of([0.0, 0.0], gap=99.0), 0.1)
    assert is_solved_for_globals(many, of([0.09, 0.0], floor=0.0, gap=0.05), 0.1)
