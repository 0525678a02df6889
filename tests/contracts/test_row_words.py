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
    return rows_in_words(density.described_rows(), density.layout)


def multilevel(*, centred):
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, 2.0, shape=3)
        sd = pm.HalfNormal("sd", 1.0)
        u = pm.Normal("u", 0.0, sd, shape=8) if centred else sd * pm.Normal("z", 0.0, 1.0, shape=8)
        noise = pm.HalfNormal("noise", 1.0)
        pm.Normal("y", X @ beta + u[GROUP], noise, observed=RNG.normal(size=40))
    return model


def test_centred():
    assert words(multilevel(centred=True)) == [
        "Log p is a sum over 53 rows:",
        "- 40 rows of `y`, each a function of 2 predictors: one linear in `beta` and `u`; `noise_log__`, shared by all",
        "- 8 rows of the prior of `u`, each a function of 2 predictors: an element of `u`; `sd_log__`, shared by all",
        "- 5 rows of the priors of `beta`, `sd` and `noise`, each a function of one coordinate",
        "X, which makes the linear predictors: 40 x 13, 4 entries a row.",
    ]


def test_not_centred():
    """Given the scales, a row is a function of one sum."""
    assert words(multilevel(centred=False))[1] == (
        "- 40 rows of `y`, each a function of 4 predictors that varies in 3 directions: one linear in `beta`; "
        "an element of `z`; `sd_log__` and `noise_log__`, shared by all"
    )


def test_a_regression_has_a_dense_matrix():
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, 2.0, shape=3)
        pm.Poisson("y", pm.math.exp(X @ beta), observed=np.ones(40))
    assert words(model)[-1] == "X, which makes the linear predictors: 40 x 3, dense."


def test_pairs_with_an_unknown_covariance():
    """Each element of a pair is given the one before it."""
    with pm.Model() as model:
        factor, *_ = pm.LKJCholeskyCov("factor", n=2, eta=2.0, sd_dist=pm.HalfNormal.dist(1.0, shape=2))
        pm.MvNormal("y", pm.Normal("mu", shape=2), chol=factor, observed=X[:, :2])
    assert words(model)[0] == "Log p is a sum over 87 rows:"


def test_what_is_no_row_is_named():
    with pm.Model() as model:
        a = pm.Normal("a", 0.0, 2.0)
        pm.LKJCholeskyCov("chol", n=4, eta=2.0, sd_dist=pm.HalfNormal.dist(1.0, shape=4))
        z, local = pm.Normal("z", shape=20), pm.Normal("local", shape=20)
        pm.Normal("y", a + np.ones((40, 20)) @ (local * z), 1.0, observed=np.arange(40.0))
        pm.Normal("w", a, 1.0, observed=np.arange(3.0))
    found = LogDensity(model).described_rows()
    assert [(part.variable, part.role) for part in found.rest] == [("chol", "prior"), ("y", "observed")]
    kinds = [(kind.variable, kind.n) for kind in found.kinds if kind.variable != "chol"]
    assert kinds == [("w", 3), ("a", 1), ("z", 20), ("local", 20)]
    first, *others = words(model)
    assert first.startswith("Not all of log p is a sum over rows: the prior of `chol` is none (")
    assert others[0] == "- 3 rows of `w`, each a function of 1 predictor: `a`, shared by all"


def test_potentials_and_elements_of_many_kinds():
    with pm.Model() as model:
        eta = pm.Normal("eta", 0.0, 1.0, shape=40)
        cut = pm.Normal("cut", [-1.0, 0.0, 1.0], 1.0, transform=pm.distributions.transforms.ordered)
        pm.OrderedLogistic("y", eta=eta, cutpoints=cut, observed=np.arange(40) % 4)
        pm.Potential("bound", -(eta**4).sum())
    lines = words(model)
    assert lines[1] == "- 40 rows of `y`, functions of 2 to 4 predictors, of 4 kinds"
    assert lines[2] == "- 40 rows of the Potential `bound`, each a function of 1 predictor: an element of `eta`"
    assert lines[-1] == "All predictors are coordinates themselves."


def test_other_data_make_other_rows():
    with pm.Model() as model:
        x = pm.Data("x", X)
        beta = pm.Normal("beta", 0.0, 2.0, shape=3)
        pm.Poisson("y", pm.math.exp(x @ beta), observed=np.ones(40))
    density = LogDensity(model)
    assert density.described_rows().n_entries == 120
    pm.set_data({"x": np.where(np.arange(3) == 1, 0.0, X)}, model=model)
    assert density.described_rows().n_entries == 80


@pytest.mark.parametrize("given", [{}, {"estimator": "price"}], ids=["exact", "draws"])
def test_a_fit_shows_them(given):
    """By draws, too; the words on blocks come first."""
    approx = fit_ngvi(model=multilevel(centred=True), random_seed=1, posterior="gaussian", progressbar=False, **given)
    lines = str(approx.structure).splitlines()
    assert lines[0] == approx.structure.in_blocks
    assert lines[1] == "Log p is a sum over 53 rows:"


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
    assert rows_in_words(density.described_rows(), density.layout) == [
        "No rows: a recursion is written out in the graph."
    ]
