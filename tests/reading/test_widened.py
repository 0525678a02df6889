"""A Hessian that turns out to have more entries than its structure: the fit goes on with them."""

import dataclasses

import numpy as np
import pymc as pm
import pytest

import pymc_ngvi

from pymc_ngvi import LogDensity
from pymc_ngvi.core.messages import OtherForm, RowsGivenUp
from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.density.by_rows import ByRows


def grouped(n_groups=20):
    rng = np.random.default_rng(5)
    group = np.repeat(np.arange(n_groups), 6)
    y = rng.poisson(np.exp(0.5 + 0.4 * rng.standard_normal(n_groups)[group]))
    with pm.Model() as model:
        mu = pm.Normal("mu", 0.0, 2.0)
        sd = pm.HalfNormal("sd", 1.0)
        b = pm.Normal("b", mu, sd, shape=n_groups)
        pm.Poisson("y", pm.math.exp(b[group]), observed=y)
    return model


def without_entry(pattern, row, col):
    keep = ~((pattern.rows == row) & (pattern.cols == col))
    return dataclasses.replace(pattern, rows=pattern.rows[keep], cols=pattern.cols[keep])


@pytest.mark.parametrize("missed", [(5, 1), (12, 0)], ids=["with the scale", "with the mean"])
def test_a_missed_entry_is_found_and_the_fit_goes_on(monkeypatch, missed, caplog):
    from pymc_ngvi.reading import predictors as affine

    right = affine.PatternSearch.run

    def narrow(search):
        pattern, opaque = right(search)
        assert isinstance(pattern, Pattern)
        return without_entry(pattern, *missed), opaque

    monkeypatch.setattr(ByRows, "gives_pattern", False)
    model = grouped()
    expected = pymc_ngvi.fit_ngvi(model=model, family="sparse", random_seed=1, progressbar=False)
    monkeypatch.setattr(affine.PatternSearch, "run", narrow)
    model = grouped()  # what was built for the other has the whole pattern
    assert LogDensity(model).pattern.n_entries == expected.density.pattern.n_entries - 1
    with caplog.at_level("DEBUG", logger="pymc.ngvi"):
        approx = pymc_ngvi.fit_ngvi(model=model, family="sparse", random_seed=1, progressbar=False)
    assert "q gets them, too" in caplog.text
    assert approx.converged
    assert approx.density.pattern.n_entries == expected.density.pattern.n_entries
    np.testing.assert_allclose(approx.sd_flat, expected.sd_flat, rtol=0.05)
    np.testing.assert_allclose(approx.mean_flat, expected.mean_flat, atol=0.05 * expected.sd_flat.max())


@pytest.mark.parametrize("start", [None, {"mu": 0.5, "sd": 0.4}, "earlier"])
def test_rows_that_fail_at_the_first_state_are_given_up(monkeypatch, start, caplog):
    model = grouped()
    expected = pymc_ngvi.fit_ngvi(model=model, posterior="gaussian", random_seed=1, progressbar=False)
    assert expected.record.estimator == "quadrature"

    def fails(by_rows, point):
        by_rows.give_up("the rows are not all of log p")
        raise RowsGivenUp("the rows are not all of log p")

    model = grouped()
    if start == "earlier":
        start = expected
    monkeypatch.setattr(ByRows, "check", fails)
    with caplog.at_level("DEBUG", logger="pymc.ngvi"):
        approx = pymc_ngvi.fit_ngvi(model=model, posterior="gaussian", random_seed=1, start=start, progressbar=False)
    assert "goes on with draws" in caplog.text
    assert approx.record.estimator == "price"
    assert approx.converged
    np.testing.assert_allclose(approx.sd_flat, expected.sd_flat, rtol=0.1)


def test_entries_that_are_missed_at_the_first_state_are_looked_for(monkeypatch, caplog):
    right, times = LogDensity.expected, iter([True, False, True])

    def expected(density, *args, **options):
        if next(times, False):
            raise OtherForm("rows have entries that the pattern lacks")
        return right(density, *args, **options)

    monkeypatch.setattr(LogDensity, "expected", expected)
    with caplog.at_level("DEBUG", logger="pymc.ngvi"):
        approx = pymc_ngvi.fit_ngvi(model=grouped(), posterior="gaussian", random_seed=1, progressbar=False)
    assert caplog.text.count("q gets them, too") == 2
    assert approx.record.estimator == "quadrature"
    assert approx.converged
