"""The methods of the topic experiment: their derivatives, their optima, and the halves of documents."""

import gzip

import numpy as np
import pytest

from topics_corpus import FILE, Documents, Topics, likelihood, log_likelihood, normal_draws, padded, read
from topics_methods import (
    Q,
    Sites,
    _delta,
    _laplace,
    _mean_field,
    delta,
    gaussian,
    laplace,
    mean_field,
    prepared,
    prior,
)

pytestmark = pytest.mark.usefixtures("_one_blas_thread")

K, N_WORDS, STEP = 3, 12, 1e-5


def topics(rng):
    """Return topics of a small vocabulary, with a correlated prior."""
    root = rng.normal(size=(K, K))
    beta = rng.dirichlet(np.full(N_WORDS, 0.5), size=K).T + 1e-3
    return Topics(beta / beta.sum(axis=0), rng.normal(size=K), root @ root.T / K + 0.5 * np.eye(K))


def batch(rng, n_docs=4, mean_count=5.0):
    """Return documents of a small vocabulary."""
    counts = rng.poisson(mean_count, size=(n_docs, N_WORDS)).astype(float)
    words = np.tile(np.arange(N_WORDS), (n_docs, 1))
    return prepared(Documents(np.arange(n_docs), words, counts), topics(rng))


def differences(function, x):
    """Return central differences of values (b,) or (b, p) in x (b, p), along a new last axis."""
    steps = STEP * np.eye(x.shape[1])
    return np.stack([(function(x + step) - function(x - step)) / (2 * STEP) for step in steps], axis=-1)


def test_likelihood():
    """Gradients and Hessians of the log likelihood are those of its values, averaged over draws."""
    rng = np.random.default_rng(1)
    documents, z = batch(rng), rng.normal(size=(4, 5, K))

    def values(shift):
        return log_likelihood(documents.documents, documents.beta, z + shift[:, None]).mean(axis=1)

    def gradient(shift):
        return likelihood(documents.documents, documents.beta, z + shift[:, None]).gradient

    found, zero = likelihood(documents.documents, documents.beta, z), np.zeros((4, K))
    np.testing.assert_allclose(found.values.mean(axis=1), values(zero))
    np.testing.assert_allclose(found.gradient, differences(values, zero), atol=1e-7)
    np.testing.assert_allclose(found.hessian, differences(gradient, zero), atol=1e-7)


@pytest.mark.parametrize(("objective", "size"), [(_laplace, K), (_delta, K), (_mean_field, 2 * K)])
def test_rivals_climb_along_gradients(objective, size):
    """Gradients of what the rivals maximise are those of its values."""
    rng = np.random.default_rng(2)
    documents, x = batch(rng), rng.normal(size=(4, size))
    found = objective(documents, x, alone=False)[1]
    slopes = differences(lambda x: objective(documents, x, alone=True)[0], x)
    np.testing.assert_allclose(found, slopes, atol=1e-7)


@pytest.mark.parametrize("method", [laplace, delta, mean_field])
def test_without_words_the_prior_is_left(method):
    """A document without words has the prior, or its nearest independent Gaussian."""
    rng = np.random.default_rng(3)
    documents = batch(rng, mean_count=0.0)
    known = topics(np.random.default_rng(4))
    documents = documents._replace(mean=known.mean, precision=np.linalg.inv(known.cov))
    q = method(documents, Q(rng.normal(size=(4, K)), prior(known, 4).cov))
    precision = np.diag(np.diag(documents.precision)) if method is mean_field else documents.precision
    np.testing.assert_allclose(q.mean, np.tile(known.mean, (4, 1)), atol=0.1)
    np.testing.assert_allclose(q.cov, np.tile(np.linalg.inv(precision), (4, 1, 1)), rtol=0.1)


def stationary(documents, q, mask):
    """Return, for each document, the gradient and the target precision of q in its own units, on other draws."""
    factor = np.linalg.cholesky(q.cov)
    z = q.mean[:, None] + normal_draws(4096, K, seed=9) @ factor.swapaxes(1, 2)
    found = likelihood(documents.documents, documents.beta, z)
    gradient = found.gradient - (q.mean - documents.mean) @ documents.precision
    target = mask * (documents.precision - found.hessian)
    return np.einsum("bij,bi->bj", factor, gradient), factor.swapaxes(1, 2) @ target @ factor


@pytest.mark.parametrize("diagonal", [False, True])
def test_gaussian_is_stationary(diagonal):
    """At the optimum of the ELBO, E grad = 0 and the precision is minus the mean Hessian."""
    rng = np.random.default_rng(5)
    documents, mask = batch(rng), np.eye(K) if diagonal else np.ones((K, K))
    start = Q(np.tile(documents.mean, (4, 1)), np.tile(np.linalg.inv(documents.precision), (4, 1, 1)))
    q = gaussian(documents, start, normal_draws(4096, K, seed=1), diagonal=diagonal, tolerance=1e-6)
    gradient, precision = stationary(documents, q, mask)
    np.testing.assert_allclose(gradient, 0.0, atol=0.02)
    np.testing.assert_allclose(precision, np.tile(np.eye(K), (4, 1, 1)), atol=0.05)


@pytest.mark.parametrize("diagonal", [False, True])
def test_sites_come_near_the_optimum(diagonal):
    """The sites of PG-SVI fluctuate around the optimum of the ELBO."""
    rng = np.random.default_rng(6)
    documents = batch(rng, mean_count=20.0)
    known = Topics(np.empty(0), documents.mean, np.linalg.inv(documents.precision))
    q = gaussian(documents, prior(known, 4), normal_draws(1024, K, seed=1), diagonal=diagonal, tolerance=1e-4)
    sites, found = Sites(np.zeros((4, K)), np.zeros((4, K, K)), diagonal), []
    for _ in range(2_000):
        sites.visit(documents, known, rng.integers(500, size=4), 500, 1_000, rng)
        found.append(sites.q(known, np.arange(4), np.ones(4)).mean)
    centring = np.eye(K) - 1.0 / K  # words tell nothing of the mean of z
    sd = np.sqrt(np.diagonal(centring @ q.cov @ centring, axis1=1, axis2=2))
    error = (np.mean(found[1_000:], axis=0) - q.mean) @ centring / sd
    assert abs(error).max() < 0.2, error


def test_halves(tmp_path):
    """The two halves of a test document make up its words, and differ by at most one."""
    rng = np.random.default_rng(7)
    counts = rng.poisson(2.0, size=(9, N_WORDS))
    lines = [f"{d},{w},{counts[d, w]}" for d in range(9) for w in range(N_WORDS) if counts[d, w]]
    with gzip.open(tmp_path / FILE, "wt") as file:
        file.write("\n".join(["doc,word,count", *lines]))
    corpus = read(tmp_path)

    def by_document(documents, n_docs):
        table = np.zeros((n_docs, N_WORDS))
        for some in documents:
            np.add.at(table, (some.which[:, None], some.words), some.counts)
        return table

    given, held_out = by_document(corpus.given, 5), by_document(corpus.held_out, 5)
    whole = np.concatenate([by_document(corpus.train, 4), given + held_out])
    assert sorted(map(tuple, whole)) == sorted(map(tuple, counts))
    apart = given.sum(axis=1) - held_out.sum(axis=1)
    assert set(apart) <= {0.0, 1.0}


def test_padding():
    """Padded entries have no words, and documents without words are left out."""
    some = padded(np.array([0, 0, 2, 3]), np.array([4, 1, 7, 2]), np.array([2, 1, 3, 0]), together=5)
    assert len(some) == 1
    assert some[0].which.tolist() == [2, 0]
    assert some[0].counts.tolist() == [[3.0, 0.0], [1.0, 2.0]]
    assert some[0].words.tolist() == [[7, 0], [1, 4]]
