"""A fit that starts from another one: mean and covariance go over, as far as the new family can hold them."""

import functools

import numpy as np
import pymc as pm
import pytest

from pymc_ngvi import NGVI, fit_ngvi

QUIET = {"progressbar": False, "backend": "quick", "random_seed": 1}
Y = np.random.default_rng(3).normal(1.0, 1.2, 40)
D = len(Y) + 1


def groups(*, data=Y, extra=False):
    """Gaussian, with effects that are independent given `mu`: q is exact in every family that holds correlations."""
    with pm.Model() as model:
        if extra:
            pm.Normal("extra", 5.0, 0.1)
        mu = pm.Normal("mu", 0.0, 2.0)
        effects = pm.Normal("z", mu, 0.7, shape=len(data))
        pm.Normal("y", effects, 1.0, observed=data)
    return model


@functools.cache
def fitted(kind):
    kinds = {"mixture": {"family": "mixture", "n_components": 1}, "rvb2": {"reparam": "rvb2"}}
    return fit_ngvi(groups(), **kinds.get(kind, {"family": kind}), **QUIET)


def _pairs(*pairs):
    matrix = np.zeros((D, D))
    for i, j in pairs:
        matrix[i, j] = matrix[j, i] = 1.0
    return matrix


#: Options of a fit, and the pattern of the precision that its family holds.
HOLDS = {
    "full": ({"family": "full"}, np.ones((D, D))),
    "precision": ({"update": "euclidean"}, np.ones((D, D))),
    "sparse": ({"family": "sparse"}, np.ones((D, D))),
    "mixture": ({"family": "mixture"}, np.ones((D, D))),
    "student_t": ({"family": "student_t"}, np.ones((D, D))),
    "diagonal": ({"family": "diagonal"}, np.eye(D)),
    "block": (
        {"family": "block", "blocks": [["mu", "z[0]"], ["z[1]", "z[2]"], *([f"z[{i}]"] for i in range(3, 40))]},
        np.eye(D) + _pairs((0, 1), (2, 3)),
    ),
}
#: Each family from and to; all from a full one.
FROM_TO = [*(("full", to) for to in HOLDS), ("sparse", "sparse"), ("sparse", "diagonal"), ("mixture", "precision"),
           ("mixture", "block"), ("rvb2", "full"), ("rvb2", "mixture"), ("rvb2", "student_t")]  # fmt: skip


@pytest.mark.parametrize(("kind", "family"), FROM_TO)
def test_mean_and_covariance_go_to_every_family(kind, family):
    """What of the precision the family can hold: of all Gaussians of the family the nearest by KL(q || earlier)."""
    earlier = fitted(kind)
    options, pattern = HOLDS[family]
    started = fit_ngvi(groups(), 0, start=earlier, **options, **QUIET)
    np.testing.assert_allclose(started.mean_flat, earlier.mean_flat, rtol=1e-6, atol=1e-8)
    expected = np.linalg.inv(np.linalg.inv(earlier.q.cov()) * pattern)
    # A t with 10,000 degrees of freedom for a Gaussian; and moments of the reparametrised q are those of 4,096 draws.
    # Without the covariance, entries are off by .02: the exact ones tell.
    atol = 0.02 if earlier.record.reparam else 1e-4
    np.testing.assert_allclose(started.q.cov(), expected, rtol=1e-3, atol=atol)


@pytest.mark.parametrize("family", ["full", "sparse", "student_t"])
def test_the_same_family_starts_where_the_other_ended(family):
    model = groups()
    first = fit_ngvi(model, family=family, **QUIET)
    again = fit_ngvi(model, 0, family=family, start=first, **QUIET)
    assert all(np.array_equal(first.q.params()[name], again.q.params()[name]) for name in first.q.params())
    assert fit_ngvi(model, family=family, start=first, **QUIET).n_iterations <= first.n_iterations


def test_variables_go_by_name():
    """Another order, and one more, which starts as it would have."""
    first = fit_ngvi(groups(), **QUIET)
    more = fit_ngvi(groups(extra=True), 0, family="full", start=first, **QUIET)
    np.testing.assert_allclose(more.mean_flat, [5.0, *first.mean_flat], rtol=1e-12)
    np.testing.assert_allclose(more.cov_of(["mu", "z"]), first.q.cov(), rtol=1e-9)
    np.testing.assert_allclose(more.cov_of(["extra", "mu"])[0, 1], 0.0, atol=1e-12)
    assert 0.03 <= more.std_data["extra"] <= 0.3, "the scale with the best ELBO: .1 is that of the prior"
    back = fit_ngvi(groups(), 0, family="full", start=more, **QUIET)
    np.testing.assert_allclose(back.q.cov(), first.q.cov(), rtol=1e-9)


@pytest.mark.parametrize("kind", ["full", "rvb2"])
def test_start_sigma_takes_the_place_of_the_covariance(kind):
    earlier = fitted(kind)
    started = fit_ngvi(groups(), 0, start=earlier, start_sigma=0.25, family="full", **QUIET)
    np.testing.assert_allclose(started.mean_flat, earlier.mean_flat, rtol=1e-9)
    np.testing.assert_allclose(started.q.cov(), 0.25**2 * np.eye(D), rtol=1e-12)


@pytest.mark.parametrize("kind", ["full", "sparse", "rvb2"])
def test_a_reparametrised_fit_starts_from_the_global_parameters(kind):
    earlier = fitted(kind)
    started = fit_ngvi(groups(), 0, start=earlier, reparam="rvb2", **QUIET)
    np.testing.assert_allclose(started.mean_data["mu"], earlier.mean_data["mu"], rtol=1e-6)
    np.testing.assert_allclose(started.std_data["mu"], earlier.std_data["mu"], rtol=1e-6)


def test_other_data_of_the_same_shape():
    """As after new observations: the start is the earlier posterior, the end is that of the new data."""
    first, second = fit_ngvi(groups(), **QUIET), fit_ngvi(groups(data=Y + 1.0), **QUIET)
    warm = pm.fit(method=NGVI(groups(data=Y + 1.0)), start=first, **QUIET)
    np.testing.assert_allclose(warm.mean_flat, second.mean_flat, rtol=1e-6)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            lambda: groups(data=Y[:3]),
            r"^start is a fit in which 'z' has shape \(40,\); in the model it has shape \(3,\)\.",
        ),
        (lambda: pm.Model(), None),
    ],
    ids=["shape", "names"],
)
def test_fits_of_other_variables_are_refused(model, message):
    first = fit_ngvi(groups(), 0, **QUIET)
    other = model()
    if message is None:
        with other:
            pm.Normal("x")
        message = r"^start is a fit of other variables, 'mu', 'z'; those of the model are 'x'\."
    with pytest.raises(ValueError, match=message):
        fit_ngvi(other, start=first, **QUIET)
