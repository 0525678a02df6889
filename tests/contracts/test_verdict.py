"""Verdicts on each kind of posterior: what fails is named in a clause, and stands against what it should."""

from dataclasses import replace

import numpy as np
import pytest

from pymc_ngvi.core.sizes import ENOUGH, SLIGHT
from pymc_ngvi.core.verdict import MOST_BEYOND, Against, Condition, Verdict, beyond_reach
from pymc_ngvi.marginal.pooled import LEAST_TAIL
from pymc_ngvi.marginal.sampler import size_asked
from pymc_ngvi.marginal.trees import (
    MOST_ERROR,
    MOST_KHAT,
    MOST_LOST,
    MOST_SHORT,
    Checks,
)
from pymc_ngvi.moves.posterior import MOST_HEIGHT, MOST_LIMIT_ERROR, MOST_RHAT, MovedChecks
from pymc_ngvi.nested.posterior import MOST_MOVED, MOST_VARIANCE, NestedChecks

TREES = Checks(0.2, 1_900.0, 2_250, 4, n_local=300, n_nodes=9, rule_error=0.01, effects=0.01)
NESTED = NestedChecks(0.1, 450.0, 600, 16, 8_000.0, 0.3, 3, 100, n_fits=700)
MOVED = MovedChecks(
    rhat=1.0, trend=0.0, most_trend=4.0, bulk=4e3, tail=4e3, n_quantities=9, n_draws=60, n_chains=128, n_starts=8,
    n_gradients=1, acceptance=0.8, peak=4e3, limit_error=0.03,
)  # fmt: skip
#: Of each condition: a value just within it, one beyond, and words of the clause.
CONDITIONS = {
    (TREES, "khat"): (MOST_KHAT - 0.01, MOST_KHAT + 0.3, "k-hat of the weights of the global parameters is 0.80"),
    (TREES, "effective_size"): (size_asked(4), size_asked(4) - 1.0, "effective size of the draws is 399, below 400"),
    (TREES, "rule_error"): (SLIGHT, SLIGHT + 0.01, "the quadrature has not settled with 9 nodes"),
    (TREES, "lost"): (MOST_LOST, MOST_LOST + 0.01, "1.5 % of the draws have quadrature nodes in the wrong place"),
    (TREES, "elsewhere"): (MOST_SHORT, 0.08, "a group effect has 8 % of its mass at another mode"),
    (TREES, "effects"): (MOST_SHORT - 1e-6, MOST_SHORT + 0.05, "of group effects, is wrong by 8 %"),
    (TREES, "sd_error"): (MOST_ERROR, 0.31, "within 31 % only"),
    (TREES, "tail"): (1_900.0 * LEAST_TAIL, 7.0, "an effective size of 7 draws beyond it, below 38"),
    (TREES, "missed"): (MOST_MOVED, 2.5, "missed"),
    (TREES, "beyond"): (MOST_BEYOND, 0.9, "90 % of it is beyond all draws"),
    (NESTED, "khat"): (0.51, 0.69, "k-hat"),  # within its error
    (NESTED, "effective_size"): (300.0, 290.0, "the effective size of the hyperparameters is 290, below 300"),
    (NESTED, "variance"): (MOST_VARIANCE, 4.0, "given the hyperparameters, log weights"),
    (NESTED, "moved"): (MOST_MOVED, 4.0, "change a mean by 4.0"),
    (NESTED, "lost"): (0.0, 0.1, "10 % of the hyperparameters"),
    (NESTED, "n_globals"): (15, 16, "the proposal of 16 hyperparameters was learned"),
    (MOVED, "rhat"): (MOST_RHAT, MOST_RHAT + 0.1, "R-hat"),
    (MOVED, "trend"): (4.0, 4.1, "4.1"),
    (MOVED, "beyond"): (MOST_BEYOND, 0.9, "90 % of it is beyond all draws"),
    (MOVED, "limit_error"): (MOST_LIMIT_ERROR, 0.3, "a 5 or 95 % quantile is known to 0.30 standard deviations only"),
    (MOVED, "height"): (MOST_HEIGHT, MOST_HEIGHT + 1.0, "narrow peak"),
    (MOVED, "bulk"): (ENOUGH, ENOUGH - 1.0, f"{ENOUGH - 1:,.0f}"),
    (MOVED, "peak"): (1e3, 50.0, "an effective sample size of 50"),
}
#: A posterior without these can be relied on, but not be called exact; with few draws, it is exact, but known roughly.
NOT_VITAL = {(NESTED, name) for name in ("khat", "variance", "n_globals")}
OF_SIZE = {(TREES, "effective_size"), (NESTED, "effective_size"), (MOVED, "bulk"), (MOVED, "limit_error")}


def test_of_few_draws_it_is_said_how_well_they_know():
    """With a quarter of what is wanted; with fewer, nothing is."""
    for good, name, wanted in (
        (TREES, "effective_size", 400.0),
        (NESTED, "effective_size", 300.0),
        (MOVED, "tail", 400.0),
    ):
        few, fewer = (replace(good, **{name: part * wanted}) for part in (0.26, 0.24))
        if good is TREES:
            few, fewer = replace(few, n_draws=200), replace(fewer, n_draws=200)
        assert f"There are few draws: the {few.shortfalls[0].removeprefix('the ')}." in few.sentence
        assert (few.word, few.is_reliable) == ("exact, few draws", True)
        assert (fewer.word, fewer.is_reliable) == ("not reliable", False)


def test_a_verdict_is_one_of_five():
    """What tests find counts as its own conditions do; remarks do not, and what is not known is not judged."""
    bad, lacks, remark = (
        Condition("x", 1.0, 0.0, "x is off", level) for level in (Against.RELIABLE, Against.EXACT, Against.NOTHING)
    )
    words = {(): "reliable", (remark,): "reliable", (lacks,): "reliable", (bad, remark): "not reliable"}
    for found, word in words.items():
        assert Verdict(found=found).word == word
    assert Verdict(found=(remark,), open="log p is dear").word == "not judged"
    assert not Verdict(open="log p is dear").is_reliable
    assert Verdict(found=(bad,), open="log p is dear").word == "not reliable"
    assert replace(TREES, found=(remark,)).word == "exact"
    assert replace(TREES, found=(lacks,)).word == "reliable"
    cured = Verdict(found=(bad._replace(cure="Do this."), bad._replace(cure="Do this.")))
    assert str(cured) == "Not reliable: x is off; x is off. Do this."
    assert [str(condition) for condition in cured.failed] == ["X is off. Do this."] * 2


def test_few_of_the_draws_know_little_of_what_is_missed():
    [clause] = replace(TREES, n_draws=25_000).failures
    assert "only 8 % of the draws are effective" in clause
    assert replace(TREES, n_draws=19_000).is_exact


def name_of(condition):
    return f"{type(condition[0]).__name__}-{condition[1]}"


@pytest.mark.parametrize("condition", CONDITIONS, ids=name_of)
def test_each_condition_has_its_clause(condition):
    good, name = condition
    within, beyond, words = CONDITIONS[condition]
    assert good.is_exact
    assert replace(good, **{name: within}).is_exact
    bad = replace(good, **{name: beyond})
    [clause] = bad.shortfalls
    assert words in clause
    assert clause in bad.sentence
    assert bad.is_exact == (condition in OF_SIZE)
    assert bad.is_reliable == (condition in NOT_VITAL | OF_SIZE)
    assert bad.word != "exact"


@pytest.mark.parametrize("condition", [c for c in CONDITIONS if c[1] not in ("n_globals", "peak")], ids=name_of)
def test_what_is_not_known_stands_against_it(condition):
    good, name = condition
    assert replace(good, **{name: np.nan}).word != "exact"


@pytest.mark.parametrize("good", [TREES, NESTED, MOVED], ids=lambda good: type(good).__name__)
def test_several_clauses(good):
    beyond = {name: value for (of, name), (_, value, _) in CONDITIONS.items() if of is good and name != "variance"}
    bad = replace(good, **beyond)
    assert len(bad.shortfalls) == len(beyond)
    assert bad.word == "not reliable"
    assert all(clause in bad.sentence for clause in bad.failures)


def test_khat_counts_with_its_error():
    """It has less of it with more draws; -inf where all weights are equal, inf where one draw has all the weight."""
    few, many = (replace(TREES, khat=MOST_KHAT + 0.06, n_draws=n) for n in (1_000, 1_000_000))
    assert few.is_exact
    assert not many.is_exact
    assert replace(TREES, khat=-np.inf).is_exact
    assert not replace(TREES, khat=np.inf).is_exact
    # Of hyperparameters, a heavy tail may be that of a scale near 0 that few draws have found.
    assert not replace(NESTED, khat=0.69).is_exact
    assert replace(NESTED, khat=0.65).is_reliable
    assert not replace(NESTED, khat=0.9, effective_size=590.0).is_reliable


def test_what_is_said():
    assert TREES.sentence == "Exact up to Monte Carlo error (effective sample size 1,900); one mode found."
    assert "Exact up to Monte Carlo error" in NESTED.sentence
    assert Verdict(is_same=True).sentence == "Exact: the posterior is Gaussian."
    assert "There are few draws: " in replace(NESTED, effective_size=290.0).sentence
    assert "A reliable approximation, not exact: given" in replace(NESTED, variance=4.0, error=0.05).sentence
    assert "Not reliable: k-hat" in replace(NESTED, khat=0.9, effective_size=50.0).sentence


# --- heavy tails ---


@pytest.mark.parametrize("is_spherical", [True, False])
@pytest.mark.parametrize(("df", "is_heavy"), [(1.2, True), (4.0, False), (1e6, False)])
def test_integrals_along_lines_see_variances_that_draws_do_not_reach(is_spherical, df, is_heavy):
    """Draws are cut off at 30 sds of a normal, as those of chains are that have not been in the tails."""
    rng = np.random.default_rng(1)
    root = rng.chisquare(df, (4_000, 1 if is_spherical else 4)) / df
    x = rng.standard_normal((4_000, 4)) / np.sqrt(root)
    x = 7.0 + 1e-3 * x[np.abs(x).max(axis=1) < 30.0]

    def log_p(x):
        square = ((x - 7.0) / 1e-3) ** 2
        if is_spherical:
            return -0.5 * (df + 4.0) * np.log1p(square.sum(axis=1) / df)
        return -0.5 * (df + 1.0) * np.log1p(square / df).sum(axis=1)

    assert (beyond_reach(log_p, x) > MOST_BEYOND) == is_heavy


def test_where_draws_have_one_value_the_whole_variance_is_out_of_their_reach():
    x = np.random.default_rng(1).standard_normal((400, 2))
    x[:, 1] = 0.3
    assert beyond_reach(lambda x: -0.5 * np.sum(x**2, axis=1), x) > MOST_BEYOND
