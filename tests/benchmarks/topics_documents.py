"""A few dozen documents with topics fixed: approximations against importance sampling, and the package.

What ``topics.py`` runs.
"""

import functools
import time
import warnings

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pymc as pm
import pytensor.tensor as pt

from environment import today_and_here
from measure import Array
from records import Records
from scipy.special import logsumexp, softmax
from scipy.stats import multivariate_normal, multivariate_t
from topics_corpus import Corpus, Documents, Topics, log_likelihood, n_documents, normal_draws, padded
from topics_methods import (
    BATCH,
    DRAWS,
    Batch,
    Q,
    Sites,
    delta,
    fit_each,
    gaussian,
    laplace,
    mean_field,
    own_value,
    prepared,
    prior,
)

from pymc_ngvi import ConvergenceWarning, fit_ngvi
from pymc_ngvi.core.importance import pareto_khat

FIELDS = ("set", "document", "n_words", "method", "own", "elbo", "log_p", "log_p_error", "k", "em", "es", "score")
FIELDS += ("true_score", "from_optimum", "sd_from_optimum", "assignments")
FIELDS += ("log_sum_exp", "seconds", "status", "date", "environment")
#: Seed of the choice; documents; words of a short document.
CHOICE, N_DOCUMENTS, SHORT = 7, 40, 20
#: Draws of importance sampling; of the ELBO and the optimum; nats that the optimum may lack.
IMPORTANCE, MANY, CLOSE = 2**17, 2**11, 1e-4
#: Passes of PG-SVI.
PASSES = 40
#: Of the proposal: weights and widths of two t, the rest being the prior's weight; their degrees of freedom.
WEIGHTS, WIDTHS, FREEDOM = (0.3, 0.6), (1.5, 1.7), 5


class Chosen(NamedTuple):
    """Documents numbered from 0: what is given, and what is predicted."""

    given: list[Documents]
    held_out: list[Documents]

    @property
    def n(self) -> int:
        """Return their number."""
        return sum(len(some.which) for some in self.given)


class Truth(NamedTuple):
    """What importance sampling finds of one document; moments are of z less the mean of its coordinates."""

    log_p: float
    error: float
    k: float
    mean: Array
    sd: Array
    score: float


def chosen(corpus: Corpus) -> dict[str, Chosen]:
    """Return a random set of documents with their first halves given, and with twenty words of these."""
    rng = np.random.default_rng(CHOICE)
    given, held = (_by_number(part) for part in (corpus.given, corpus.held_out))
    fit = [number for number in sorted(given) if number in held and given[number][1].sum() >= SHORT]
    numbers = rng.choice(fit, N_DOCUMENTS, replace=False)
    short = {n: (given[n][0], rng.multivariate_hypergeometric(given[n][1].astype(int), SHORT)) for n in numbers}
    predicted = _padded([held[n] for n in numbers])
    return {
        "half of the words": Chosen(_padded([given[n] for n in numbers]), predicted),
        f"{SHORT} words": Chosen(_padded([short[n] for n in numbers]), predicted),
    }


def _by_number(documents: list[Documents]) -> dict[int, tuple[Array, Array]]:
    return {
        int(number): (words[counts > 0], counts[counts > 0])
        for some in documents
        for number, words, counts in zip(*some, strict=True)
    }


def _padded(documents: list[tuple[Array, Array]]) -> list[Documents]:
    number = np.repeat(np.arange(len(documents)), [len(words) for words, _ in documents])
    words, counts = (np.concatenate([part[i] for part in documents]) for i in range(2))
    return padded(number, words, counts, together=10)


# --- the truth --------------------------------------------------------------------------------------------------------


def weighed(batch: Batch, topics: Topics, at: tuple[Q, Q], rng: np.random.Generator) -> tuple[Array, Array, Array]:
    """Return draws of one document from a mixture of two t and the prior, (n, k), with log p and log q, (n,) each."""
    parts = [
        multivariate_t(q.mean[0], width * q.cov[0], df=FREEDOM, seed=rng) for q, width in zip(at, WIDTHS, strict=True)
    ]
    before = multivariate_normal(topics.mean, topics.cov, seed=rng)
    weights = np.array([*WEIGHTS, 1.0 - sum(WEIGHTS)])
    sizes = rng.multinomial(IMPORTANCE, weights)
    z = np.concatenate([part.rvs(size) for part, size in zip([*parts, before], sizes, strict=True)])
    log_q = logsumexp([np.log(w) + part.logpdf(z) for w, part in zip(weights, [*parts, before], strict=True)], axis=0)
    return z, log_likelihood(batch.documents, batch.beta, z[None])[0] + before.logpdf(z), log_q


def importance(batch: Batch, held_out: Batch, topics: Topics, at: tuple[Q, Q], rng: np.random.Generator) -> Truth:
    """Return log p(y), moments and the score of one document, by draws near its moments in draws near two Gaussians."""
    z, log_p, log_q = weighed(batch, topics, at, rng)
    w = np.exp(log_p - log_q - logsumexp(log_p - log_q))
    mean = w @ z
    z, log_p, log_q = weighed(batch, topics, (at[0], Q(mean[None], ((z - mean).T * w @ (z - mean))[None])), rng)
    ratio = log_p - log_q
    found = float(logsumexp(ratio) - np.log(len(z)))
    w = np.exp(ratio - logsumexp(ratio))
    error = float(np.sqrt(((w - 1.0 / len(z)) ** 2).sum()))
    chances = w @ softmax(z, axis=-1)
    z = centred(z)
    mean = w @ z
    sd = np.sqrt(w @ (z - mean) ** 2)
    return Truth(found, error, pareto_khat(log_p, log_q), mean, sd, _score(held_out, chances))


def centred(z: Array) -> Array:
    """Return z less the mean of its coordinates, of which words tell nothing."""
    return z - z.mean(axis=-1, keepdims=True)


def _score(held_out: Batch, chances: Array) -> float:
    """Return minus the mean log probability of a held-out word of one document."""
    counts = held_out.documents.counts[0]
    return -float(counts @ np.log(held_out.beta[0] @ chances) / counts.sum())


def elbo(batch: Batch, q: Q, base: Array) -> float:
    """Return the ELBO of a Gaussian for one document, with the assignments of words summed out."""
    factor = np.linalg.cholesky(q.cov[0])
    values = log_likelihood(batch.documents, batch.beta, (q.mean[0] + base @ factor.T)[None])[0]
    inside = np.linalg.slogdet(batch.precision @ q.cov[0])[1] - np.trace(batch.precision @ q.cov[0]) + len(factor)
    return float(values.mean() + batch.log_prior(q.mean)[0] + 0.5 * inside)


def price_of_assignments(batch: Batch, q: Q, base: Array) -> float:
    """Return by how many nats the ELBO of one document falls where q has the assignments of words, too."""
    mean, factor = q.mean[0], np.linalg.cholesky(q.cov[0])
    z = np.concatenate([mean + base @ factor.T, mean[None]])
    values = log_likelihood(batch.documents, batch.beta, z[None])[0] + batch.total[0, 0] * logsumexp(z, axis=1)
    return float(values[:-1].mean() - values[-1])


# --- the package ------------------------------------------------------------------------------------------------------


def model_of(documents: list[Documents], topics: Topics) -> pm.Model:
    """Return the documents as a PyMC model: z of all, and the log likelihood of their words."""
    entries = [(number, *entry) for number, entry in _by_number(documents).items()]
    owner = np.concatenate([np.full(len(words), number) for number, words, _ in entries])
    words, counts = (np.concatenate([entry[i] for entry in entries]) for i in (1, 2))
    with pm.Model() as model:
        z = pm.MvNormal("z", topics.mean, topics.cov, shape=(len(entries), len(topics.mean)))
        chances = (pm.math.softmax(z, axis=-1)[owner] * topics.beta[words]).sum(axis=-1)
        pm.Potential("words", (counts * pt.log(chances)).sum())
    return model


def by_package(documents: list[Documents], topics: Topics) -> tuple[Q, str]:
    """Fit all documents by default, as one model; return q of each, and the status."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the status is reported
        approx = fit_ngvi(model_of(documents, topics), posterior="gaussian", random_seed=1, progressbar=False)
    k = len(topics.mean)
    cov, places = approx.q.cov(), np.arange(approx.q.n_dim).reshape(-1, k)
    q = Q(approx.q.mean().reshape(-1, k), np.stack([cov[np.ix_(place, place)] for place in places]))
    return q, str(approx.status)


def by_sites(documents: list[Documents], topics: Topics, n: int) -> tuple[Q, str]:
    """Return q of each document after passes of PG-SVI, as documents among n."""
    n_docs, n_steps, k = sum(len(some.which) for some in documents), n // BATCH, len(topics.mean)
    sites, rng = Sites(np.zeros((n_docs, k)), np.zeros((n_docs, k, k)), diagonal=False), np.random.default_rng(1)
    for _ in range(PASSES):
        for some in documents:
            batch, steps = prepared(some, topics), rng.integers(n_steps, size=len(some.which))
            sites.visit(batch, topics, steps, n_steps, n, rng)
    return sites.q(topics, np.arange(n_docs), np.ones(n_docs)), ""


# --- the comparison ---------------------------------------------------------------------------------------------------


def approximations(topics: Topics, n: int) -> dict[str, Callable[[list[Documents]], tuple[Q, str]]]:
    """Return the methods: each gives q of some documents, and a status where it has one."""
    few, many = (normal_draws(n, len(topics.mean), seed=1) for n in (DRAWS, MANY))
    found = {
        "Laplace": laplace,
        "delta": delta,
        "mean field": mean_field,
        f"independent Gaussian, {DRAWS} draws": functools.partial(gaussian, base=few, diagonal=True, tolerance=CLOSE),
        f"full Gaussian, {DRAWS} draws": functools.partial(gaussian, base=few),
        f"full Gaussian, {MANY:,} draws": functools.partial(gaussian, base=many, tolerance=CLOSE),
    }

    def fit(step: Callable[[Batch, Q], Q], documents: list[Documents]) -> tuple[Q, str]:
        begin = prior(topics, sum(len(some.which) for some in documents))
        if step not in (laplace, delta, mean_field):
            begin = fit_each(laplace, documents, topics, begin)
        return fit_each(step, documents, topics, begin), ""

    return {name: functools.partial(fit, step) for name, step in found.items()} | {
        f"PG-SVI, {PASSES} passes": functools.partial(by_sites, topics=topics, n=n),
        "package": functools.partial(by_package, topics=topics),
    }


def compare(corpus: Corpus, topics: Topics, records: Records) -> None:
    """Fit the chosen documents by every method, and keep how far each is from importance sampling."""
    shared = today_and_here()
    done = {(row["set"], row["method"]) for row in records.read()}
    for name, documents in chosen(corpus).items():
        methods = {
            method: fit
            for method, fit in approximations(topics, n_documents(corpus.train)).items()
            if (name, method) not in done
        }
        if not methods:
            continue
        truths = _truths(documents, topics)
        best, _ = approximations(topics, 0)[f"full Gaussian, {MANY:,} draws"](documents.given)
        base = normal_draws(MANY, len(topics.mean), seed=3)
        for method, fit in methods.items():
            begun = time.process_time()
            q, status = fit(documents.given)
            row = {"set": name, "method": method, "status": status, "seconds": round(time.process_time() - begun, 2)}
            for number in range(documents.n):
                errors = _errors(method, documents, topics, q, truths[number], number, base)
                records.append(row | shared | errors | _apart(q, best, number))
            print(name, method, row["seconds"], status, flush=True)


def _one(documents: list[Documents], topics: Topics, number: int) -> Batch:
    some = next(some for some in documents if number in some.which)
    return prepared(Documents(*(part[some.which == number] for part in some)), topics)


def _truths(documents: Chosen, topics: Topics) -> list[Truth]:
    rng, found = np.random.default_rng(1), approximations(topics, 0)
    at = [found[name](documents.given)[0] for name in (f"full Gaussian, {DRAWS} draws", "Laplace")]
    truths = []
    for number in range(documents.n):
        given, held_out = (_one(part, topics, number) for part in documents)
        near = tuple(Q(q.mean[[number]], q.cov[[number]]) for q in at)
        truths.append(importance(given, held_out, topics, near, rng))
    return truths


def _apart(q: Q, best: Q, number: int) -> dict[str, object]:
    """Return how far means and standard deviations of a document are from the optimum's, in the latter's sds."""
    sd, best_sd = (np.sqrt(np.diag(one.cov[number])) for one in (q, best))
    mean = np.sqrt(np.mean(((q.mean[number] - best.mean[number]) / best_sd) ** 2))
    return {"from_optimum": float(mean), "sd_from_optimum": float(np.sqrt(np.mean((sd / best_sd - 1.0) ** 2)))}


def _errors(
    method: str, documents: Chosen, topics: Topics, q: Q, truth: Truth, number: int, base: Array
) -> dict[str, object]:
    given, held_out = (_one(part, topics, number) for part in documents)
    one = Q(q.mean[[number]], q.cov[[number]])
    reached = elbo(given, one, base)
    own = own_value(method, given, one)
    assigned = None if own is None else price_of_assignments(given, one, base)
    chances = softmax(one.mean[0] + base @ np.linalg.cholesky(one.cov[0]).T, axis=-1).mean(axis=0)
    em = np.sqrt(np.mean(((centred(one.mean[0]) - truth.mean) / truth.sd) ** 2))
    sd = np.sqrt(np.diag(centred(centred(one.cov[0]).T)))
    es = np.sqrt(np.mean((sd / truth.sd - 1.0) ** 2))
    return {
        "document": number,
        "n_words": int(given.total[0, 0]),
        "own": reached if own is None else own,
        "assignments": assigned,
        "log_sum_exp": None if own is None or assigned is None else reached - own - assigned,
        "elbo": reached,
        "log_p": truth.log_p,
        "log_p_error": truth.error,
        "k": truth.k,
        "em": float(em),
        "es": float(es),
        "score": _score(held_out, chances),
        "true_score": truth.score,
    }
