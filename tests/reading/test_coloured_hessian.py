"""Mean Hessians by coloured products: those of dense products, from far fewer of them, and safe from missed entries."""

import models
import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest

from pymc_ngvi import LogDensity
from pymc_ngvi.core import sparsity as coloured
from pymc_ngvi.core.messages import PatternWidened
from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.density.by_rows import ByRows
from pymc_ngvi.reading import predictors as affine

_RNG = np.random.default_rng(51)
GROUP = np.repeat(np.arange(12), 4)
X = _RNG.normal(size=48)
COUNTS = _RNG.poisson(1.5, size=48)


def random_intercepts(group=GROUP):
    with pm.Model() as model:
        slope = pm.Normal("slope", 0.1, 2.1, shape=2)
        scale = pm.HalfNormal("scale", 1.3)
        effect = pm.Normal("effect", 0.1, scale, shape=12)
        pm.Poisson("y", pt.exp(slope[0] + slope[1] * X + effect[group]), observed=COUNTS)
    return model


def random_slopes():
    """Correlated, by a Cholesky factor with a prior of its own."""
    with pm.Model() as model:
        chol, _, _ = pm.LKJCholeskyCov("chol", n=2, eta=2.1, sd_dist=pm.Exponential.dist(1.1))
        z = pm.Normal("z", 0.1, 1.1, shape=(12, 2))
        effect = z @ chol.T
        pm.Poisson("y", pt.exp(effect[GROUP, 0] + effect[GROUP, 1] * X), observed=COUNTS)
    return model


def crossed():
    person, item = np.divmod(np.arange(96), 8)
    with pm.Model() as model:
        ability = pm.Normal("ability", 0.1, 1.1, shape=12)
        scale = pm.HalfNormal("scale", 1.2)
        difficulty = pm.Normal("difficulty", 0.1, scale, shape=8)
        pm.Bernoulli("y", logit_p=ability[person] - difficulty[item], observed=_RNG.integers(0, 2, 96))
    return model


def random_walk():
    with pm.Model() as model:
        sigma = pm.HalfNormal("sigma", 1.1)
        z = pm.GaussianRandomWalk("z", 0.1, sigma, init_dist=pm.Normal.dist(0.1, 2.2), shape=20)
        pm.Poisson("y", pt.exp(z), observed=COUNTS[:20])
    return model


def areas():
    """A 5 x 5 map whose neighbours are alike (pm.ICAR adds a penalty on the sum: dense)."""
    at = np.arange(25).reshape(5, 5)
    left = np.concatenate([at[1:].ravel(), at[:, 1:].ravel()])
    right = np.concatenate([at[:-1].ravel(), at[:, :-1].ravel()])
    with pm.Model() as model:
        phi = pm.Normal("phi", 0.1, 3.1, shape=25)
        pm.Potential("alike", -0.5 * ((phi[left] - phi[right]) ** 2).sum())
        sigma = pm.HalfNormal("sigma", 1.1)
        pm.Poisson("y", pt.exp(0.3 + sigma * phi), observed=COUNTS[:25])
    return model


def correlated_prior():
    cov = 0.5 * np.eye(12) + 0.5
    with pm.Model() as model:
        x = pm.MvNormal("x", np.full(12, 0.1), cov=cov)
        pm.Poisson("y", pt.exp(x), observed=COUNTS[:12])
    return model


def scan_of_elements():
    """Independent coordinates inside an operation that the graph's analysis can't look into."""
    with pm.Model() as model:
        x = pm.Normal("x", 0.1, 1.3, shape=12)
        power = pytensor.scan(lambda e: e**4, sequences=[x], return_updates=False)
        pm.Potential("p", -power.sum() - 0.3 * x[0] * x[11])
    return model


def _made(density):
    """Return the names of what was compiled."""
    return {name for name in density.functions.made if isinstance(name, str)} - {"initial point"}


@pytest.fixture(autouse=True, scope="module")
def _without_rows():
    """Hessians from all coordinates, also of models that are sums over rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ByRows, "found", None)
        yield


#: name: (model, the most colours that it may take)
SPARSE = {
    "random intercepts": (random_intercepts, 4),
    "random slopes": (random_slopes, 5),
    "crossed": (crossed, 10),
    "random walk": (random_walk, 4),
    "areas": (areas, 7),
    "scan": (scan_of_elements, 2),
}


@pytest.fixture(scope="module", params=list(SPARSE))
def pair(request):
    """A density, and another one of the same model, of which no Hessian is asked by its pattern."""
    make, most = SPARSE[request.param]
    density, dense = LogDensity(make(), "quick"), LogDensity(make(), "quick")
    return density, dense, most


def test_equals_the_dense_hessian(pair, monkeypatch):
    density, dense, most = pair
    theta = models.random_points(density, 5, 1)
    expected = dense.hessian(theta).mean(axis=0)
    scale = np.abs(expected).max()
    values = density.mean_hessian(theta).values()
    assert density.second.coloured.n_colours <= most
    assert density.n_hessians == len(theta)
    with monkeypatch.context() as patch:  # a call for each draw and direction
        patch.setattr(coloured, "CACHED_ELEMENTS", 1)
        patch.setattr(coloured, "_MOST_ELEMENTS", 1)
        np.testing.assert_allclose(density.mean_hessian(theta).values(), values, rtol=1e-12, atol=1e-13 * scale)
    matrix = density.pattern.symmetric(values).toarray()
    np.testing.assert_allclose(matrix, expected, rtol=1e-10, atol=1e-13 * scale)

    directions = np.random.default_rng(2).normal(size=(density.n_dim, density.n_dim))
    products = density.mean_hessian(theta).products(directions)
    np.testing.assert_allclose(products, directions @ expected, rtol=1e-10, atol=1e-12 * scale)
    few = density.mean_hessian(theta).products(directions[:2])
    np.testing.assert_allclose(few, directions[:2] @ expected, rtol=1e-10, atol=1e-12 * scale)
    diagonal = density.mean_hessian(theta).diagonal()
    np.testing.assert_allclose(diagonal, np.diagonal(expected), rtol=1e-10, atol=1e-13 * scale)
    assert density.n_hessians == 5 * len(theta)
    assert density.second.n_widened == 0
    assert density.has_hessian
    made = "products" if density.graphs.forward is None else "jets"
    assert _made(density) == {made}, "one function for all of them"
    np.testing.assert_allclose(density.hessian(theta).mean(axis=0), expected, rtol=1e-10, atol=1e-12 * scale)


@pytest.mark.parametrize("make", [correlated_prior, models.FEATURES["random_walk"]], ids=["dense", "few dimensions"])
def test_dense_hessians_have_no_pattern(make):
    density = LogDensity(make(), "quick")
    assert density.pattern is None
    theta = models.random_points(density, 2, 6)
    with pytest.raises(ValueError, match="counts as dense"):
        density.mean_hessian(theta).values()
    assert density.n_hessians == 0
    products = density.mean_hessian(theta).products(np.eye(density.n_dim))
    diagonal = density.mean_hessian(theta).diagonal()
    assert _made(density) == {"products"}  # one function, which takes several draws in a call
    np.testing.assert_allclose(products, density.hessian(theta).mean(axis=0), rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(diagonal, np.diagonal(products), rtol=1e-12, atol=1e-13)
    assert density.second.coloured is None
    assert not density.widen(theta)


# --- missed entries ---------------------------------------------------------------------------------------------------


@pytest.fixture
def blind(monkeypatch):
    """An analysis that misses what the first three effects have to do with the slopes, and with their scale."""
    right = affine.PatternSearch.run

    def wrong(*args, **kwargs):
        found = right(*args, **kwargs)[0]
        keep = ~((found.cols < 3) & (found.rows >= 3) & (found.rows < 6))
        return Pattern(found.rows[keep], found.cols[keep], found.n_dim), []

    monkeypatch.setattr(affine.PatternSearch, "run", wrong)
    return LogDensity(random_intercepts(), "quick")


def test_missed_entries_are_added(blind):
    theta = models.random_points(blind, 3, 9)
    before = blind.pattern
    assert len(blind.second.coloured.inconsistent_rows(theta[0], np.random.default_rng(10)))
    with pytest.raises(PatternWidened):
        blind.mean_hessian(theta).values()
    assert blind.second.n_widened == 1
    assert blind.pattern.n_entries == before.n_entries + 9
    assert not len(blind.second.coloured.inconsistent_rows(theta[0], np.random.default_rng(10)))
    matrix = blind.pattern.symmetric(blind.mean_hessian(theta).values()).toarray()
    dense = LogDensity(random_intercepts(), "quick")
    np.testing.assert_allclose(matrix, dense.hessian(theta).mean(axis=0), rtol=1e-10, atol=1e-12)
    assert not blind.widen(theta)
    assert blind.second.n_widened == 1
    assert blind.n_hessians == 3


# --- data that change -------------------------------------------------------------------------------------------------


def test_new_data_have_a_new_pattern():
    """Effects that belong to other observations interact with others: here, two effects in each of them."""
    with pm.Model() as model:
        other = pm.Data("other", np.arange(12))
        effect = pm.Normal("effect", 0.1, 1.3, shape=12)
        pm.Poisson("y", pt.exp(effect + effect[other]), observed=COUNTS[:12])
    density, theta = LogDensity(model, "quick"), np.full((1, 12), 0.2)
    assert density.pattern.n_entries == len(density.mean_hessian(theta).values()) == 12
    with model:
        pm.set_data({"other": np.roll(np.arange(12), 1)})
    assert density.pattern.n_entries == 24
    matrix = density.pattern.symmetric(density.mean_hessian(theta).values()).toarray()
    np.testing.assert_allclose(matrix, density.hessian(theta)[0], rtol=1e-12)
    assert density.second.n_widened == 0


# --- the choice of a backend ------------------------------------------------------------------------------------------
