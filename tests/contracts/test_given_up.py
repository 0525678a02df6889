"""Rows that are given up: as long as the data are those they were given up with, and with a reason of their own."""

import numpy as np
import pymc as pm
import pytest

from pymc_ngvi import LogDensity
from pymc_ngvi.core.messages import RowsGivenUp
from pymc_ngvi.density.by_rows import NOT_LOG_P, ByRows
from pymc_ngvi.density.expectations import Expectations

X = np.random.default_rng(31).normal(size=30)
ONE, OTHER = (X > 0.3).astype(int), (X < -0.1).astype(int)
#: Outside the support: log p is finite nowhere.
IMPOSSIBLE = np.full(30, 2)


def logistic(y=ONE):
    with pm.Model() as model:
        slope, level = pm.Normal("slope", 0.0, 2.0), pm.Normal("level", 0.0, 2.0)
        pm.Bernoulli("y", logit_p=level + slope * X, observed=pm.Data("y_data", y))
    return model


def give(density, y):
    pm.set_data({"y_data": y}, model=density.model)


def assert_rows_are_log_p(density):
    theta = np.array([[0.3, -0.2], [1.1, 0.4]])
    np.testing.assert_allclose(density.rows.at(theta), density.logp(theta), rtol=1e-12)
    assert density.by_rows.why_not == ""


@pytest.fixture
def density(monkeypatch):
    """Rows that were found, and then given up at a point."""
    density = LogDensity(logistic(), "quick")
    assert density.rows is not None
    with monkeypatch.context() as patch:
        patch.setattr(Expectations, "agrees", lambda *args, **options: False)
        with pytest.raises(RowsGivenUp, match=NOT_LOG_P):
            density.by_rows.check(np.zeros(2))
    return density


def test_rows_that_were_given_up_say_why(density):
    assert density.rows is None
    assert not density.by_rows.are_known
    assert density.by_rows.why_not == NOT_LOG_P
    assert density.described_rows().why_not == NOT_LOG_P


def test_other_data_have_rows_again(density):
    give(density, OTHER)
    assert_rows_are_log_p(density)
    assert_rows_are_log_p(density.again("quick"))


def test_the_same_data_in_other_arrays_have_none(density):
    give(density, ONE.copy())
    assert density.rows is None
    assert density.again("quick").rows is None


def test_data_that_change_back_have_rows_again():
    density = LogDensity(logistic(), "quick")
    assert_rows_are_log_p(density)
    give(density, OTHER)
    density.by_rows.give_up("they are too wild")
    assert density.rows is None
    assert density.by_rows.why_not == "they are too wild"
    give(density, ONE)
    assert_rows_are_log_p(density)


def test_data_without_a_finite_density_leave_the_next_ones_their_rows():
    density = LogDensity(logistic(IMPOSSIBLE), "quick")
    assert density.rows is None
    assert density.by_rows.why_not == "rows don't add up to log p near the start"
    give(density, ONE)
    assert_rows_are_log_p(density)
    give(density, IMPOSSIBLE)
    assert density.rows is None
    assert density.by_rows.why_not == "rows don't add up to log p near the start"
    give(density, OTHER)
    assert_rows_are_log_p(density)


def test_nothing_is_looked_for_while_the_data_stay(density, monkeypatch):
    monkeypatch.setattr(ByRows, "_look", lambda *args, **options: pytest.fail("it looks for rows"))
    for _ in range(3):
        assert density.rows is None


def test_minibatches_say_that_they_are():
    with pm.Model() as model:
        x, y = pm.Minibatch(X, ONE.astype(float), batch_size=10)
        pm.Bernoulli("y", logit_p=pm.Normal("slope") * x, observed=y, total_size=30)
    density = LogDensity(model, "quick")
    assert density.rows is None
    assert density.by_rows.why_not == "the data are minibatches"
