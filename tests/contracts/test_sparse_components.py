"""Sparse Gaussians as components of a mixture: beside each other, added, halved and joined, and as fitted."""

import warnings

import numpy as np
import pymc as pm
import pytest

from targets import Quadratic, restrict

import pymc_ngvi

from pymc_ngvi import ConvergenceWarning
from pymc_ngvi.core.draws import sobol_draws
from pymc_ngvi.families import DiagonalState, FullState, MixtureState, SparseFamily, SparseState
from pymc_ngvi.families.gaussian import Partition
from pymc_ngvi.families.sparse import SparseStructure
from pymc_ngvi.methods.estimators import price
from pymc_ngvi.methods.mixtures import evaluate_mixture, local_component, split

LABELS = {
    "several sizes": (7, -1, 3, 7, 1, 3, -1, 7, 0, 1),
    "numbers": (0, 1, 2, -1, 3),
    "empty border": (1, 0, 1, 2, 2),
    "no blocks": (-1, -1, -1),
}
each_structure = pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS)


def sparse(labels, rng):
    """Return a random state; it leaves out what its structure leaves out."""
    n_dim = len(labels)
    root = rng.standard_normal((n_dim, n_dim)) / np.sqrt(n_dim)
    precision = restrict(labels, root @ root.T)
    precision += (0.1 + max(-np.linalg.eigvalsh(precision)[0], 0.0)) * np.eye(n_dim)
    return of_precision(labels, rng.standard_normal(n_dim), precision)


def of_precision(labels, mean, precision):
    """Return the state with these entries of a precision."""
    start = SparseFamily(SparseStructure.of_blocks(Partition(labels))).from_scale(mean, np.ones(len(mean)))
    return start.precision_scaled_by(
        start.curvature(Target(labels, mean, precision).mean_hessian(mean[None])), np.zeros(len(mean))
    )[0]


class Target(Quadratic):
    """A Gaussian whose Hessian has the entries of a structure."""

    def __init__(self, labels, mean, precision):
        super().__init__(mean, precision)
        self.pattern = Partition(labels).pattern


# --- added, halved, joined --------------------------------------------------------------------------------------------


@each_structure
def test_a_local_component_has_the_curvature_of_log_p(labels, rng):
    truth, like = sparse(labels, rng), sparse(labels, rng)
    target = Target(labels, truth.location, np.linalg.inv(truth.cov()))
    found = local_component(target, like, truth.location)
    assert isinstance(found, SparseState)
    np.testing.assert_array_equal(found.location, truth.location)
    added = np.linalg.inv(found.cov()) - np.linalg.inv(truth.cov())
    # A part of the precision of what it is like, which keeps it from being too wide.
    np.testing.assert_allclose(added, 1e-3 * np.linalg.inv(like.cov()), rtol=1e-5, atol=1e-8)


class Bent(Quadratic):
    """A Gaussian, but for a term in one coordinate that makes it skewed."""

    def __init__(self, labels, at, rng):
        state = sparse(labels, rng)
        super().__init__(state.location, np.linalg.inv(state.cov()))
        self.pattern, self.at = Partition(labels).pattern, at

    def _logp(self, theta):
        return super()._logp(theta) - np.exp(0.5 * theta[:, self.at])

    def _grad(self, theta):
        result = super()._grad(theta).copy()
        result[:, self.at] -= 0.5 * np.exp(0.5 * theta[:, self.at])
        return result


@pytest.mark.parametrize("name", ["several sizes", "empty border"])
def test_halves_lie_along_the_border(name, rng):
    labels = LABELS[name]
    at = 1
    density = Bent(labels, at, rng)
    whole = MixtureState.of([of_precision(labels, density.mean, density.precision)])
    evaluation = evaluate_mixture(density, whole, sobol_draws(256, len(labels), rng), price)
    halves = split(whole, evaluation)
    assert halves.n_components == 2
    np.testing.assert_allclose(halves.mean(), whole.mean(), atol=1e-10)
    np.testing.assert_allclose(restrict(labels, halves.cov()), restrict(labels, whole.cov()), atol=1e-9)


# --- as fitted --------------------------------------------------------------------------------------------------------


def groups(n_groups, n_each=6, seed=3):
    """Return a logistic model of group effects: the posterior of their scale is skewed."""
    rng = np.random.default_rng(seed)
    group = np.repeat(np.arange(n_groups), n_each)
    y = rng.random(len(group)) < 1.0 / (1.0 + np.exp(-rng.standard_normal(n_groups)[group]))
    with pm.Model() as model:
        scale = pm.HalfNormal("scale", 2.0)
        level = pm.Normal("level", 0.0, 2.0)
        b = pm.Normal("b", level, scale, shape=n_groups)
        pm.Bernoulli("y", logit_p=b[group], observed=y)
    return model


def fit(model, seed, **options):
    return pymc_ngvi.fit_ngvi(model=model, family="mixture", random_seed=seed, progressbar=False, **options)


def test_sparse_components_gain_what_dense_ones_do_about():
    """What a dense component could add lies between groups given the border, where p has next to nothing."""
    model = groups(12)
    found = {kind: fit(model, 1, components=kind, n_components=2) for kind in ("sparse", "full")}
    assert {kind: type(a.q.components[0]) for kind, a in found.items()} == {"sparse": SparseState, "full": FullState}
    worth = found["sparse"].worth()
    assert worth.n_components == 2
    assert worth.gain > max(0.05, 3.0 * worth.se)
    full, sparse = found["full"].elbo, found["sparse"].elbo
    assert abs(full.value - sparse.value) < 0.1 + 4.0 * np.hypot(full.se, sparse.se)


def test_components_are_as_sparse_as_the_model():
    """Where a sparse precision is the quickest single Gaussian, it is what components are."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # three iterations
        approx = fit(groups(300), 1, n_components=2, n=3)
        few = fit(groups(4), 1, n_components=1, n=3)
        named = fit(groups(300), 1, n_components=1, components="diagonal", n=3)
    assert all(isinstance(c, SparseState) for c in approx.q.components)
    structure = approx.q.components[0].structure
    assert (structure.depth[structure.part] == 0).sum() == 2
    assert isinstance(few.q.components[0], FullState)
    assert isinstance(named.q.components[0], DiagonalState)


def test_sparse_components_of_a_model_whose_hessian_is_dense_are_refused():
    with pm.Model() as model:
        x = pm.Normal("x", shape=30)
        pm.Normal("y", x.sum() ** 2, 1.0, observed=3.0)
    with pytest.raises(ValueError, match=r"counts as dense.*such components"):
        fit(model, 1, components="sparse")


def test_updates_that_sparse_components_do_not_have_are_refused():
    with pytest.raises(ValueError, match=r"Sparse components.*take update='natural', not 'sqrt'"):
        fit(groups(4), 1, components="sparse", update="sqrt")
