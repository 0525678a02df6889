"""Fits by Gaussians with a sparse precision of any shape are those by dense ones."""

import numpy as np
import pymc as pm
import pytest

from scipy import sparse

from pymc_ngvi import ConvergenceWarning, Status, fit_ngvi, load
from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.families import SparseState
from pymc_ngvi.families import sparse as fill
from pymc_ngvi.families.sparse import SparseStructure, find_filled

QUIET = {"progressbar": False, "random_seed": 1, "posterior": "gaussian"}


def lattice(side):
    """Return a lattice, and a coordinate that touches everything, before it."""
    one, path = sparse.eye_array(side), sparse.diags_array([np.ones(side - 1)] * 2, offsets=[-1, 1])
    inner = (sparse.kron(path, one) + sparse.kron(one, path)).toarray()
    return np.block([[np.ones((1, 1)), np.ones((1, side**2))], [np.zeros((side**2, 1)), inner]])


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("rows", lambda a: a[::-1]),
        ("cols", lambda a: a + 1),
        ("rows", lambda a: a[:-1]),
        ("part", lambda a: a + 1),
        ("depth", lambda a: a - 1),
    ],
    ids=["rows in reverse", "cols outside", "too few rows", "parts from 1", "depths below 0"],
)
def test_arrays_that_make_no_structure_are_refused(name, change):
    structure = SparseStructure.of(Pattern.of(lattice(5)))
    arrays = {kept: getattr(structure, kept) for kept in ("rows", "cols", "part", "depth")}
    arrays[name] = change(arrays[name])
    with pytest.raises(ValueError, match="is none"):
        SparseStructure.from_arrays(**arrays)


# --- fits -------------------------------------------------------------------------------------------------------------


def map_of_counts(side=18):
    rng = np.random.default_rng(7)
    index = np.arange(side**2).reshape(side, side)
    i = np.concatenate([index[:, :-1].ravel(), index[:-1].ravel()])
    j = np.concatenate([index[:, 1:].ravel(), index[1:].ravel()])
    y = rng.poisson(np.exp(np.add.outer(np.sin(np.arange(side) / 3), np.cos(np.arange(side) / 4)))).ravel()
    with pm.Model() as model:
        log_sd = pm.Normal("log_sd", -1, 1)
        field = pm.Normal("field", 0, 3, shape=side**2)
        scaled = (field[i] - field[j]) * pm.math.exp(-log_sd)
        pm.Potential("smooth", -0.5 * (scaled**2).sum() - side**2 * log_sd)
        pm.Poisson("y", pm.math.exp(field), observed=y)
    return model


@pytest.fixture(scope="module")
def always():
    """Take fill-in wherever it can be had: models that gain by it are large."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fill, "_MUCH", np.inf)
        patch.setattr(fill, "_LITTLE", 0.0)
        find_filled.cache_clear()
        yield
    find_filled.cache_clear()


@pytest.fixture(scope="module")
def fitted(always):
    model = map_of_counts()
    return model, {f: fit_ngvi(model=model, family=f, **QUIET) for f in ("sparse", "full")}


def test_a_fit_is_that_of_the_dense_family(fitted):
    filled, full = fitted[1]["sparse"], fitted[1]["full"]
    assert type(filled.q) is SparseState
    assert not filled.q.structure.is_closed
    assert filled.status is full.status is Status.CONVERGED
    assert abs(filled.elbo.value - full.elbo.value) < 1e-3  # nats; tol asks for 0.05
    np.testing.assert_allclose(filled.q.sd(), full.q.sd(), rtol=2e-3)
    assert np.abs((filled.q.mean() - full.q.mean()) / full.q.sd()).max() < 0.02


def test_results_are_saved_and_described(fitted, tmp_path):
    model, approx = fitted[0], fitted[1]["sparse"]
    approx.save(tmp_path / "map.nc")
    again = load(tmp_path / "map.nc", model)
    assert type(again.q) is SparseState
    assert not again.q.structure.is_closed
    np.testing.assert_array_equal(again.q.sd(), approx.q.sd())
    np.testing.assert_allclose(approx.cov_of("log_sd").to_numpy(), approx.q.sd()[:1, None] ** 2, rtol=1e-8)
    assert "55 global parameters (`log_sd`, `field` 54 of 324)" in str(approx.structure)
    assert approx.summary(var_names=["log_sd"]) is not None
    assert np.isfinite(approx.sample(20, random_seed=1).posterior["field"].to_numpy()).all()


def test_other_updates_and_components_take_an_arrow(always):
    model = map_of_counts(6)
    with pytest.warns(ConvergenceWarning):
        approx = fit_ngvi(2, model=model, family="sparse", update="cholesky_precision", **QUIET)
    with pytest.warns(ConvergenceWarning):
        mixture = fit_ngvi(2, model=model, family="mixture", components="sparse", n_components=1, **QUIET)
    assert approx.q.structure.is_closed
    assert mixture.q.components[0].structure.is_closed
