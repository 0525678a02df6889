"""Documents for the correlated topic model: the corpus, its split, and likelihoods of many documents at once.

What ``topics.py`` runs. A document with counts y has log likelihood ``sum_n y_n log sum_k beta_nk softmax(z)_k``.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from measure import Array
from scipy.special import softmax
from scipy.stats import norm, qmc

FILE, VOCABULARY = "ap_corpus.csv.gz", "ap_vocab.csv.gz"
#: Seed of the split, documents that are processed together, and what is added to counts of words in topics.
SPLIT_SEED, TOGETHER, SMOOTHING = 5, 48, 0.01
#: Random documents that a topic starts from, and the words of the whole corpus that are added to them.
STARTED_FROM, START_WEIGHT = 5, 200.0


class Documents(NamedTuple):
    """Some documents, padded to one length with counts of zero.

    ``which`` are their numbers, (b,); ``words`` and ``counts`` are (b, n).
    """

    which: Array
    words: Array
    counts: Array


class Topics(NamedTuple):
    """What the outer loop learns: beta (n_words, k) with columns that sum to 1, mu (k,) and Sigma (k, k)."""

    beta: Array
    mean: Array
    cov: Array


class Corpus(NamedTuple):
    """Documents to learn topics from, and two halves of those that are predicted."""

    n_words: int
    train: list[Documents]
    given: list[Documents]
    held_out: list[Documents]


class Likelihood(NamedTuple):
    """Log likelihoods at draws, (b, s), and means over draws: gradients (b, k), Hessians (b, k, k)."""

    values: Array
    gradient: Array
    hessian: Array


def read(data: Path) -> Corpus:
    """Read the corpus: half of the documents are learnt from; of the others, a random half of the words is given."""
    rows = pd.read_csv(data / FILE)
    rng = np.random.default_rng(SPLIT_SEED)
    doc, word, count = (rows[name].to_numpy() for name in ("doc", "word", "count"))
    n_docs = doc.max() + 1
    place = np.argsort(rng.permutation(n_docs))[doc]
    test = place >= n_docs // 2
    tokens = np.repeat(np.flatnonzero(test), count[test])
    tokens = tokens[np.lexsort((rng.random(len(tokens)), place[tokens]))]
    sizes = np.bincount(place[tokens] - n_docs // 2)
    rank = np.arange(len(tokens)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    given = np.bincount(tokens[rank < np.repeat(sizes, sizes) / 2], minlength=len(count))
    halves = [padded(place[test] - n_docs // 2, word[test], part[test]) for part in (given, count - given)]
    return Corpus(int(word.max()) + 1, padded(place[~test], word[~test], count[~test]), *halves)


def padded(place: Array, word: Array, count: Array, together: int = TOGETHER) -> list[Documents]:
    """Return documents with words, those of similar lengths together, from (document, word, count)."""
    kept = np.lexsort((word, place))
    kept = kept[count[kept] > 0]
    numbers, starts, sizes = np.unique(place[kept], return_index=True, return_counts=True)
    order, found = np.argsort(sizes, kind="stable"), []
    for first in range(0, len(order), together):
        some = order[first : first + together]
        at = starts[some, None] + np.arange(sizes[some].max())
        filled = np.arange(sizes[some].max()) < sizes[some, None]
        entries = kept[np.where(filled, at, 0)]
        found.append(
            Documents(numbers[some], np.where(filled, word[entries], 0), np.where(filled, count[entries], 0.0))
        )
    return found


def n_documents(documents: list[Documents]) -> int:
    """Return the number of documents, up to the last that has words."""
    return 1 + max(int(some.which.max()) for some in documents)


def start(corpus: Corpus, n_topics: int, seed: int) -> Topics:
    """Return topics from a few random documents each, and a standard normal for z."""
    rng = np.random.default_rng(seed)
    whole, owner = np.zeros(corpus.n_words), rng.permutation(n_documents(corpus.train))
    counts = np.zeros((corpus.n_words, n_topics))
    for some in corpus.train:
        np.add.at(whole, some.words, some.counts)
        for topic in range(n_topics):
            mine = owner[some.which] // STARTED_FROM == topic
            np.add.at(counts[:, topic], some.words[mine], some.counts[mine])
    return Topics(
        normalised(counts + START_WEIGHT * (whole / whole.sum())[:, None]), np.zeros(n_topics), np.eye(n_topics)
    )


def normalised(counts: Array) -> Array:
    """Return topics from expected counts (n_words, k), smoothed."""
    return (counts + SMOOTHING) / (counts + SMOOTHING).sum(axis=0)


def normal_draws(n: int, k: int, seed: int) -> Array:
    """Return n/2 standard normal points of a scrambled Sobol sequence and their mirror images, (n, k)."""
    half = norm.ppf(qmc.Sobol(k, rng=seed).random(n // 2))
    return np.concatenate([half, -half])


def log_likelihood(documents: Documents, beta: Array, z: Array) -> Array:
    """Return log p(y | z) at z (b, s, k), with beta of the words of the documents, (b, n, k)."""
    chances = softmax(z, axis=-1) @ beta.swapaxes(1, 2)
    return (np.log(chances) @ documents.counts[:, :, None])[..., 0]


def likelihood(documents: Documents, beta: Array, z: Array) -> Likelihood:
    """Return log likelihoods with mean gradients and Hessians at z (b, s, k)."""
    chances = softmax(z, axis=-1)
    phi = chances @ beta.swapaxes(1, 2)
    ratio = documents.counts[:, None] / phi
    assigned = chances * (ratio @ beta)
    total = documents.counts.sum(axis=1)
    gradient = (assigned - total[:, None, None] * chances).mean(axis=1)
    values = (np.log(phi) @ documents.counts[:, :, None])[..., 0]
    one, two = np.triu_indices(z.shape[-1])
    squares = (
        ((ratio / phi) @ (beta[..., one] * beta[..., two]) - total[:, None, None])
        * chances[..., one]
        * chances[..., two]
    )
    hessian = np.zeros((*gradient.shape, z.shape[-1]))
    hessian[:, one, two] = -squares.mean(axis=1)
    hessian[:, two, one] = hessian[:, one, two]
    diagonal = np.arange(z.shape[-1])
    hessian[:, diagonal, diagonal] += gradient
    return Likelihood(values, gradient, hessian)


def expected_counts(documents: Documents, beta: Array, z: Array) -> Array:
    """Return expected counts of words in topics, (b, n, k), with chances averaged over draws of z (b, s, k)."""
    chances = softmax(z, axis=-1)
    ratio = documents.counts[:, None] / (chances @ beta.swapaxes(1, 2))
    return beta * (ratio.swapaxes(1, 2) @ chances) / z.shape[1]
