"""How many threads linear algebra takes."""

import numpy as np
import pymc as pm
import pytest

from threadpoolctl import threadpool_info, threadpool_limits

from pymc_ngvi import LogDensity
from pymc_ngvi.fitting.threads import ONE_THREAD, few_threads

N, D = 12_000, 100


def threads():
    return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}


def regression(n=N):
    x = np.random.default_rng(0).normal(size=(n, D))
    with pm.Model() as model:
        pm.Bernoulli("y", logit_p=x @ pm.Normal("beta", shape=D), observed=np.arange(n) % 2)
    return model


@pytest.fixture
def two_threads():
    with threadpool_limits(2, user_api="blas"):
        if threads() != {2}:
            pytest.skip("BLAS cannot have two threads here")
        yield


@pytest.mark.parametrize("first", [0, 1])
def test_several_that_keep_to_one_thread_leave_none_behind(two_threads, first):
    """As fits in the threads of a process do, whichever ends first: the other one keeps to it till its end."""
    both = ONE_THREAD, ONE_THREAD
    for one in both:
        one.__enter__()
    both[first].__exit__(None, None, None)
    assert threads() == {1}
    both[1 - first].__exit__(None, None, None)
    assert threads() == {2}


@pytest.mark.filterwarnings("ignore::pymc_ngvi.ConvergenceWarning")
def test_a_large_fit_takes_one_thread(two_threads):
    seen = []

    def look(*_):
        seen.append(threads())

    with regression():
        approx = pm.fit(1, method="ngvi", posterior="gaussian", random_seed=1, progressbar=False, callbacks=[look])
    assert approx.record.estimator == "quadrature"
    assert seen == [{1}]
    assert threads() == {2}


def test_large_models_without_rows_keep_their_threads(two_threads):
    with pm.Model() as model:
        x = pm.Normal("x", shape=D)
        mixed = pm.math.softmax(np.random.default_rng(0).normal(size=(N, D)) @ x)
        pm.Potential("p", -pm.math.sqr(pm.math.logsumexp(mixed)))
    density = LogDensity(model)
    assert density.rows is None
    assert not density.is_small
    with few_threads(density):
        assert threads() == {2}
