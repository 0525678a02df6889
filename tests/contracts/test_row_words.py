"""What `approx.structure` says of a model's rows."""

import numpy as np
import pymc as pm
import pytest

from pymc_ngvi import LogDensity, fit_ngvi
from pymc_ngvi.results.structure import rows_in_words

RNG = np.random.default_rng(5)
GROUP = np.repeat(np.arange(8), 5)
X = RNG.normal(size=(40, 3))


def words(model):
    density = LogDensity(model, backend="quick")
    return rows_in_words(density.described_rows())


def multilevel(*, centred):
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, 2.0, shape=3)
        sd = pm.HalfNormal("sd", 1.0)
        u = pm.Normal("u", 0.0, sd, shape=8) if centred else sd * pm.Normal("z", 0.0, 1.0, shape=8)
        noise = pm.HalfNormal("noise", 1.0)
        pm.Normal("y", X @ beta + u[GROUP], noise, observed=RNG.normal(size=40))
    return model


@pytest.mark.parametrize(("centred", "of_effects"), [(True, "u"), (False, "z")])
def test_rows_are_counted_by_variable(centred, of_effects):
    of_priors = f"3 of `beta`, 1 of `sd`, 8 of `{of_effects}`, 1 of `noise`"
    assert words(multilevel(centred=centred)) == [f"Log p is a sum over 53 rows: 40 of `y`; of priors, {of_priors}."]


def test_pairs_with_an_unknown_covariance():
    """Each element of a pair is given the one before it."""
    with pm.Model() as model:
        factor, *_ = pm.LKJCholeskyCov("factor", n=2, eta=2.0, sd_dist=pm.HalfNormal.dist(1.0, shape=2))
        pm.MvNormal("y", pm.Normal("mu", shape=2), chol=factor, observed=X[:, :2])
    assert words(model)[0].startswith("Log p is a sum over 87 rows: ")


def test_what_is_no_row_is_named():
    with pm.Model() as model:
        a = pm.Normal("a", 0.0, 2.0)
        pm.LKJCholeskyCov("chol", n=4, eta=2.0, sd_dist=pm.HalfNormal.dist(1.0, shape=4))
        z, local = pm.Normal("z", shape=20), pm.Normal("local", shape=20)
        pm.Normal("y", a + np.ones((40, 20)) @ (local * z), 1.0, observed=np.arange(40.0))
        pm.Normal("w", a, 1.0, observed=np.arange(3.0))
    found = LogDensity(model).described_rows()
    assert [(part.variable, part.role) for part in found.rest] == [("chol", "prior"), ("y", "observed")]
    parts = [(part.variable, part.n) for part in found.parts if part.variable != "chol"]
    assert parts == [("w", 3), ("a", 1), ("z", 20), ("local", 20)]
    [line] = words(model)
    assert line.startswith("Not all of log p is a sum over rows: the prior of `chol` is none (")
    assert "The other parts are: 3 of `w`; of priors, " in line


def test_a_potential_is_called_one():
    with pm.Model() as model:
        eta = pm.Normal("eta", 0.0, 1.0, shape=40)
        pm.Potential("bound", -(eta**4).sum())
    assert words(model) == ["Log p is a sum over 80 rows: 40 of the Potential `bound`; of priors, 40 of `eta`."]


@pytest.mark.parametrize("given", [{}, {"estimator": "price"}], ids=["exact", "draws"])
def test_a_fit_shows_them(given):
    """By draws, too; the words on blocks come first."""
    approx = fit_ngvi(model=multilevel(centred=True), random_seed=1, posterior="gaussian", progressbar=False, **given)
    lines = str(approx.structure).splitlines()
    assert lines[0] == approx.structure.in_blocks
    assert lines[1].startswith("Log p is a sum over 53 rows: ")


def test_where_they_are_of_no_use_it_says_why():
    y = pm.Minibatch(RNG.normal(size=40), batch_size=10)
    with pm.Model() as model:
        mu = pm.Normal("mu")
        pm.Normal("y", mu, 1.0, observed=y, total_size=40)
    assert "minibatches" in words(model)[-1]


def test_a_long_recursion_is_not_looked_at(monkeypatch):
    """Each of its thousands of nodes would be."""
    density = LogDensity(multilevel(centred=True))
    monkeypatch.setattr(density.graphs, "is_large", True)
    assert rows_in_words(density.described_rows()) == ["No rows: a recursion is written out in the graph."]
