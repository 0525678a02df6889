"""The printed summary: sections, what is left out, digits."""

import re

from dataclasses import replace

import numpy as np
import pymc as pm
import pytest

from scipy import stats

from pymc_ngvi import Elbo, FitRecord, LogDensity, NGVIApproximation, Status, fit_many
from pymc_ngvi.core.verdict import Condition, Verdict
from pymc_ngvi.families import DiagonalState
from pymc_ngvi.results.summary import POPULATION, kept_rows

GROUP = np.repeat(np.arange(12), 4)
Y = np.random.default_rng(3).normal(size=48)


def approx_of(model, mean=None, sd=None):
    density = LogDensity(model)
    n = density.n_dim
    q = DiagonalState.from_scale(np.zeros(n) if mean is None else mean, np.full(n, 0.1) if sd is None else sd)
    return NGVIApproximation(density, q, random_seed=1)


@pytest.fixture(scope="module")
def multilevel():
    with pm.Model(coords={"patient": range(12), "term": ["intercept", "visit"]}) as model:
        chol, _, _ = pm.LKJCholeskyCov("chol", eta=2, n=2, sd_dist=pm.Exponential.dist(1))
        beta = pm.Normal("beta", shape=2)
        z = pm.Normal("z", dims=("patient", "term"))
        b = pm.Deterministic("b", z @ chol.T, dims=("patient", "term"))
        x = np.tile(np.arange(4.0), 12)
        mu = pm.Deterministic("mu", beta[0] + beta[1] * x + b[GROUP, 0] + b[GROUP, 1] * x)
        pm.Normal("y", mu, pm.HalfNormal("sigma"), observed=Y)
    return approx_of(model)


@pytest.fixture(scope="module")
def plain():
    with pm.Model() as model:
        beta = pm.Normal("beta", shape=50)
        mu = pm.Deterministic("mu", pm.math.concatenate([beta, -beta])[:48])
        pm.Deterministic("few", mu[:4])
        pm.Normal("y", mu, pm.HalfNormal("sigma"), observed=Y)
    return approx_of(model)


SCALES = "Standard deviations and correlations: patient (12 levels)"


def test_fixed_effects_come_first_and_group_effects_on_request(multilevel):
    summary = multilevel.summary(200, khat_draws=None, random_seed=1)
    assert list(summary.sections) == [POPULATION, SCALES]
    assert list(summary.sections[POPULATION].index) == ["beta[0]", "beta[1]", "sigma"]
    # A correlation once, behind the standard deviations; both with the names of the terms.
    labels = ["chol_stds[intercept]", "chol_stds[visit]", "chol_corr[intercept, visit]"]
    assert list(summary.sections[SCALES].index) == labels
    assert list(summary.table.index) == [label for part in summary.sections.values() for label in part.index]
    text = str(summary)
    assert text.index("beta[0]") < text.index(SCALES) < text.index("chol_stds[intercept]")
    below = " ".join(text.split())
    assert "48 observations; 12 levels of patient." in below
    assert "Not shown: 24 group effects (b); see summary(group_effects=True)." in below
    assert "standardised effects (z), packed Cholesky factors (chol), values for each observation (mu)" in below

    more = multilevel.summary(200, group_effects=True, khat_draws=None, random_seed=1)
    effects = more.sections["Effects: patient (12 levels)"]
    assert len(effects) == 24
    assert list(effects.index[:2]) == ["b[0, intercept]", "b[0, visit]"]
    np.testing.assert_array_equal(more.table.loc[summary.table.index], summary.table)


def test_names_are_shown_as_asked_for(multilevel):
    summary = multilevel.summary(50, khat_draws=None, var_names=["z", "mu"])
    assert list(summary.sections) == [""]
    assert len(summary.table) == 24 + 48
    assert set(summary.table.index.str.split("[").str[0]) == {"z", "mu"}
    few = multilevel.summary(50, khat_draws=None, var_names="chol", filter_vars="like", round_to=1)
    assert {"chol[0]", "chol_corr[1, 1]", "chol_stds[1]"} <= set(few.table.index)
    assert re.search(r"chol_corr\[1, 1\] +1.0 +0.0 ", str(few))


def test_a_model_without_groups_is_one_table(plain):
    summary = plain.summary(50, khat_draws=None)
    assert list(summary.sections) == [""]
    assert list(summary.table.index) == [*(f"beta[{i}]" for i in range(50)), "sigma", *(f"few[{i}]" for i in range(4))]
    assert POPULATION not in str(summary)
    assert 'Not shown: values for each observation (mu); see summary(var_names=["mu"]).' in " ".join(
        str(summary).split()
    )


def test_each_element_of_a_series_is_an_observation():
    with pm.Model() as model:
        pm.AR("y", [pm.Normal("rho")], sigma=1.0, init_dist=pm.Normal.dist(), observed=Y)
    assert "48 observations." in str(approx_of(model).summary(50, khat_draws=None))


def test_digits_follow_the_standard_deviation():
    with pm.Model() as model:
        pm.Normal("far", 1_000)
        pm.Normal("wide", sigma=1_000)
        pm.Normal("narrow", shape=2)
    approx = approx_of(model, mean=np.array([1034.56, -3e4, 0.5, 0.5]), sd=np.array([0.05, 200.0, 0.0104, 0.0096]))
    table = str(approx.summary(4_000, khat_draws=None)).split("\n\n")[1].splitlines()[1:]
    lines = {line.split()[0]: line.split()[1:3] for line in table}
    assert re.fullmatch(r"1,034\.5[56]\d", lines["far"][0])  # not 1000
    assert re.fullmatch(r"-(29,9|30,0)\d\d", lines["wide"][0])
    assert re.fullmatch(r"20\d|19\d", lines["wide"][1])
    # One vector, one number of digits, although its standard deviations lie on both sides of .01.
    assert [len(cell) for name in ("narrow[0]", "narrow[1]") for cell in lines[name]] == [6] * 4


def test_long_vectors_do_not_crowd_out_others():
    variables = [*100 * ["a"], "b", *100 * ["c"], "d"]
    places = kept_rows(variables, 60)
    assert len(places) <= 62
    assert {100, 201} <= set(places)
    assert [i for i in places if i is not None and i < 100][:2] == [0, 1]
    assert places[places.index(None) + 1] == 99
    scalars = kept_rows([str(i) for i in range(500)], 60)
    assert (scalars[0], scalars[-1], len(scalars)) == (0, 499, 61)


def test_html_is_escaped_and_takes_the_colours_of_the_page():
    with pm.Model() as model:
        pm.Normal("<script>alert(1)")
    html = approx_of(model).summary(20, khat_draws=None)._repr_html_()
    assert "<script" not in html
    assert "&lt;script&gt;" in html
    assert not re.search(r"#[0-9a-f]{3,6}\b|rgb\(", html)


def fitted(approx, status):
    approx.record = FitRecord(
        status, Elbo(-10.0, 0.02), 0.004, 9, 8, 7, 0, 0.1, 0.2, "full", "natural", "price", "adaptive", "quick"
    )
    return approx


def test_card(multilevel, monkeypatch):
    monkeypatch.setattr(LogDensity, "logp", None)  # evaluates no log density
    before = str(multilevel._rng.bit_generator.state)
    html = fitted(multilevel, Status.STALLED)._repr_html_()
    for part in (Status.STALLED.cure, "Not reliable: the fit", SCALES):
        assert part in html
    assert "b[0, intercept]" not in html
    assert not re.search(r"<script|#[0-9a-f]{3,6}\b|rgb\(", html)
    assert html == multilevel._repr_html_()
    assert str(multilevel._rng.bit_generator.state) == before
    judged = Verdict(found=(Condition("x", 1.0, 0.0, "1 <5"),), is_tested=True)
    multilevel.record = replace(multilevel.record, judged=judged)
    assert "Not reliable: 1 &lt;5." in multilevel._repr_html_()
    monkeypatch.setattr("pymc_ngvi.results.summary.MAX_COV_DIM", 10)  # a large model
    assert "<table" not in multilevel._repr_html_()


def test_a_card_is_short(plain):
    html = plain._repr_html_()
    assert html.count("<tr>") < 30
    assert "(55 rows; all of them are in summary().table)" in html


@pytest.mark.parametrize(("given", "named"), [(["bet"], "bet"), ("~bet", "~bet"), (["mu", "sd"], "sd")])
def test_a_variable_that_is_not_there_is_answered_with_the_names(multilevel, given, named):
    with pytest.raises(ValueError, match=rf"var_names has '{named}', which the model has not: .*Valid: .*'beta'"):
        multilevel.summary(100, var_names=given)


def test_names_of_all_kinds_can_be_shown(multilevel):
    shown = multilevel.summary(100, khat_draws=None, var_names=["~mu", "~z", "~chol"], kind="stats").table
    assert any(label.startswith("beta") for label in shown.index)
    assert list(multilevel.summary(100, khat_draws=None, var_names="sigma").table.index) == ["sigma"]


def test_truth_values_are_summarised_as_numbers():
    """Their mean is a probability: that of a sign, in all reports that subtract."""
    with pm.Model() as model:
        mu = pm.Normal("mu")
        pm.Deterministic("is_positive", mu > np.array([0.0, 1.0]))
        pm.Normal("y", mu, 1.0, observed=[0.6, 1.0])
        approx = pm.fit(method="ngvi", random_seed=1, progressbar=False)
    exact = stats.norm.sf([0.0, 1.0], 1.6 / 3.0, 3.0**-0.5)
    for table in (approx.summary(4_000).table, approx.summary(4_000, var_names=["is_positive"]).table):
        means = table.loc[["is_positive[0]", "is_positive[1]"], "mean"].astype(float)
        np.testing.assert_allclose(means, exact, atol=0.03)  # 4 standard errors of 4,000 draws
    assert approx.sample(3)["posterior"]["is_positive"].dtype == bool
    assert "is_positive[0]" in approx.prior_sensitivity().table.index
    many = fit_many(model, [{"y": [0.6, 1.0]}], random_seed=1, draws=4_000, progressbar=False)
    np.testing.assert_allclose(many.dataset["is_positive"].sel(statistic="mean")[0], exact, atol=0.03)
