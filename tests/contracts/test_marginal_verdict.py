"""What stands against calling a posterior exact: a clause for each condition."""

import dataclasses

import numpy as np
import pytest

from pymc_ngvi.marginal.fitting import MOST_DIFFERENCE
from pymc_ngvi.marginal.log_marginal import TOLERANCE
from pymc_ngvi.marginal.verdict import LEAST_CANDIDATES, LEAST_SIZE, MOST_KHAT, MOST_LOST, Checks

GOOD = Checks(
    khat=0.2,
    effective_size=1_900.0,
    n_draws=2_250,
    n_globals=4,
    n_local=300,
    n_nodes=9,
    rule_error=0.01,
    difference=0.05,
    lost=0.0,
    candidates=0.9,
)
#: For each condition: a value just within it, one just beyond, and words of the clause.
CONDITIONS = {
    "khat": (MOST_KHAT - 0.01, MOST_KHAT + 0.3, "k-hat of the weights of the global parameters is 0.80"),
    "effective_size": (LEAST_SIZE, LEAST_SIZE - 1.0, "the effective size of the draws is 999, below 1,000"),
    "rule_error": (TOLERANCE - 1e-6, TOLERANCE + 0.01, "the quadrature has not settled with 9 nodes"),
    "difference": (MOST_DIFFERENCE - 1e-6, MOST_DIFFERENCE + 0.01, "the quick quadrature differs from the full one"),
    "lost": (MOST_LOST, MOST_LOST + 0.01, "1.2 % of the draws have quadrature nodes off their centres"),
    "candidates": (LEAST_CANDIDATES, LEAST_CANDIDATES - 0.15, "rest on 20 % of their candidates"),
}


def test_nothing_stands_against_it():
    assert GOOD.is_exact
    assert GOOD.failures == ()
    assert GOOD.sentence == "Exact up to simulation error (effective sample size 1,900), of the mode that was found."


@pytest.mark.parametrize("name", CONDITIONS)
def test_each_condition_has_its_clause(name):
    within, beyond, words = CONDITIONS[name]
    assert dataclasses.replace(GOOD, **{name: within}).is_exact
    bad = dataclasses.replace(GOOD, **{name: beyond})
    assert not bad.is_exact
    [clause] = bad.failures
    assert words in clause
    assert bad.sentence == f"Not exact: {clause}."


@pytest.mark.parametrize("name", ["khat", "effective_size", "rule_error", "difference", "lost"])
def test_what_is_not_known_stands_against_it(name):
    assert len(dataclasses.replace(GOOD, **{name: np.nan}).failures) == 1


@pytest.mark.parametrize("khat", [np.inf, -np.inf])
def test_khat_of_no_tail_and_of_one_draw(khat):
    """-inf where all weights are equal; inf where one draw has all the weight."""
    assert dataclasses.replace(GOOD, khat=khat).is_exact == (khat < 0.0)


def test_khat_counts_with_its_error():
    """It has less of it with more draws."""
    few, many = (dataclasses.replace(GOOD, khat=MOST_KHAT + 0.06, n_draws=n) for n in (1_000, 1_000_000))
    assert few.is_exact
    assert not many.is_exact


def test_without_local_coordinates():
    plain = Checks(0.1, 2_000.0, 2_250, 3, 0)
    assert plain.is_exact
    assert np.isnan(plain.candidates)


def test_several_clauses():
    bad = dataclasses.replace(GOOD, **{name: beyond for name, (_, beyond, _) in CONDITIONS.items()})
    assert len(bad.failures) == len(CONDITIONS)
    assert bad.sentence.count(";") == len(CONDITIONS) - 1
