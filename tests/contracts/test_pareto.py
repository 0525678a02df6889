"""Pareto-smoothed tails, beside those of ArviZ, which are another program's."""

import subprocess
import sys

import numpy as np
import pytest

from arviz_stats.base import array_stats

from pymc_ngvi.core.importance import smoothed, smoothed_tail


@pytest.mark.parametrize("n", [30, 100, 225, 226, 1_000, 4_097])
@pytest.mark.parametrize("heavy", [0.0, 0.3, 1.5])
def test_tails_are_those_of_arviz(n: int, heavy: float) -> None:
    rng = np.random.default_rng(n)
    log_weights = 700.0 + heavy * rng.standard_exponential(n) + 0.2 * rng.standard_normal(n)
    theirs, k = array_stats.psislw(-log_weights)
    ours, shape = smoothed_tail(log_weights)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)
    np.testing.assert_allclose(shape, k, rtol=1e-12)


def test_equal_weights_have_the_lightest_tail_and_wild_ones_the_heaviest() -> None:
    few = np.random.default_rng(0).standard_normal(24)
    assert smoothed_tail(few)[1] == -np.inf  # no tail of five
    np.testing.assert_allclose(smoothed_tail(few)[0], few - np.log(np.exp(few).sum()))
    tail_of_ones = np.concatenate([np.full(900, -1.0), np.zeros(100)])
    assert smoothed_tail(tail_of_ones)[1] == -np.inf
    all_but_one = np.full(1_000, -700.0)
    all_but_one[3] = 0.0
    assert smoothed_tail(all_but_one)[1] == np.inf
    assert smoothed(np.where(np.arange(200) < 100, -np.inf, 1.0 + np.arange(200.0)))[1] > 0.7


def test_weights_do_not_wait_for_arviz() -> None:
    code = "import sys, numpy as np; from pymc_ngvi.core.importance import smoothed; smoothed(np.arange(200.0)); "
    subprocess.run([sys.executable, "-c", code + "assert 'arviz_stats' not in sys.modules"], check=True)
