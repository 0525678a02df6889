"""A Hessian that turns out to have more entries than its structure: the fit goes on with them."""

import dataclasses

import numpy as np
import pymc as pm
import pytest

import pymc_ngvi

from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.model import LogDensity
from pymc_ngvi.model.by_rows import ByRows


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
    from pymc_ngvi.model.sparsity import interaction

    right = interaction.PatternSearch.run

    def narrow(search):
        found = right(search)
        assert isinstance(found.pattern, Pattern)
        return dataclasses.replace(found, pattern=without_entry(found.pattern, *missed))

    monkeypatch.setattr(ByRows, "gives_pattern", False)
    model = grouped()
    expected = pymc_ngvi.fit_ngvi(model=model, family="sparse", random_seed=1, progressbar=False)
    monkeypatch.setattr(interaction.PatternSearch, "run", narrow)
    model = grouped()  # what was built for the other has the whole pattern
    assert LogDensity(model).pattern.n_entries == expected.density.pattern.n_entries - 1
    with caplog.at_level("INFO", logger="pymc.ngvi"):
        approx = pymc_ngvi.fit_ngvi(model=model, family="sparse", random_seed=1, progressbar=False)
    assert "q gets them, too" in caplog.text
    assert approx.converged
    assert approx.density.pattern.n_entries == expected.density.pattern.n_entries
    np.testing.assert_allclose(approx.sd_flat, expected.sd_flat, rtol=0.05)
    np.testing.assert_allclose(approx.mean_flat, expected.mean_flat, atol=0.05 * expected.sd_flat.max())
