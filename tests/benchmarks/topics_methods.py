"""Approximate posteriors of the topics of documents, by seven methods, and the outer loop that learns the topics.

What ``topics.py`` runs. Every method gives Gaussians q(z), one for each document. The rivals hold the assignments of
words to topics in q as well, which can be maximised over in closed form: ``sum_n y_n log sum_k beta_nk exp(m_k)`` is
left of the words, and what they approximate is ``E log sum_k exp(z_k)``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from measure import Array
from scipy.special import logsumexp, softmax
from topics_corpus import Documents, Topics, expected_counts, likelihood, log_likelihood, normal_draws, normalised

#: Nats that a document may still gain where its iterations end, iterations at most, and halvings of a step at most.
TOLERANCE, MOST, HALVINGS = 1e-2, 50, 30
#: Draws behind an expectation: of fits to the optimum, and of a step of PG-SVI; those of predictions.
DRAWS, FEW_DRAWS, PREDICTED = 64, 16, 2_048
#: Largest log variance that is tried.
LARGEST = 50.0
#: Step size of the paper, and documents in a batch.
STEP_SIZE, BATCH = 1e-3, 2
#: Of natural steps: nats by which one may lower the ELBO, and the least eigenvalue that it may leave. Those of a
#: document get shorter, by a factor and down to a size, after one that leaves more than this share of the gap.
SLACK, LEAST_EIGENVALUE, SHORTER, SHORTEST, FASTER = 0.01, 0.1, 0.7, 0.35, 0.6


class Q(NamedTuple):
    """Means (d, k) and covariances (d, k, k) of documents."""

    mean: Array
    cov: Array


class Batch(NamedTuple):
    """Documents, beta of their words, and the prior of z as mean and precision."""

    documents: Documents
    beta: Array
    mean: Array
    precision: Array

    def at(self, some: Array) -> "Batch":
        """Return some of the documents."""
        return Batch(Documents(*(part[some] for part in self.documents)), self.beta[some], self.mean, self.precision)

    @property
    def total(self) -> Array:
        """Return the numbers of words, (b, 1)."""
        return self.documents.counts.sum(axis=1, keepdims=True)

    def log_prior(self, z: Array) -> Array:
        """Return the log prior at z (b, k), up to a constant."""
        apart = z - self.mean
        return -0.5 * np.einsum("bi,ij,bj->b", apart, self.precision, apart)


#: Values, gradients and Hessians of what a rival maximises, at x (b, p); values alone if told so.
Objective = Callable[[Batch, Array, bool], tuple[Array, Array, Array]]


def prepared(documents: Documents, topics: Topics) -> Batch:
    """Return documents with what is needed of the topics."""
    return Batch(documents, topics.beta[documents.words], topics.mean, np.linalg.inv(topics.cov))


def prior(topics: Topics, n: int) -> Q:
    """Return the prior, for n documents."""
    return Q(np.tile(topics.mean, (n, 1)), np.tile(topics.cov, (n, 1, 1)))


# --- the rivals -------------------------------------------------------------------------------------------------------


def _softmax_curvature(m: Array) -> Array:
    q = softmax(m, axis=-1)
    return q[..., None] * np.eye(m.shape[-1]) - q[:, :, None] * q[:, None, :]


def _laplace(batch: Batch, z: Array, alone: bool) -> tuple[Array, Array, Array]:
    values = log_likelihood(batch.documents, batch.beta, z[:, None])[:, 0] + batch.log_prior(z)
    if alone:
        return values, z, z
    found = likelihood(batch.documents, batch.beta, z[:, None])
    return values, found.gradient - (z - batch.mean) @ batch.precision, found.hessian - batch.precision


def _delta(batch: Batch, m: Array, alone: bool) -> tuple[Array, Array, Array]:
    values, gradient, hessian = _laplace(batch, m, alone)
    curvature = _softmax_curvature(m)
    precision = batch.precision + batch.total[..., None] * curvature
    values = values - 0.5 * np.linalg.slogdet(precision)[1]
    if alone:
        return values, m, m
    cov = np.linalg.inv(precision)
    inner = np.diagonal(cov, axis1=1, axis2=2) - 2.0 * np.einsum("bij,bj->bi", cov, softmax(m, axis=-1))
    return values, gradient - 0.5 * batch.total * np.einsum("bij,bj->bi", curvature, inner), hessian


def _mean_field(batch: Batch, x: Array, alone: bool) -> tuple[Array, Array, Array]:
    """Return what Blei and Lafferty maximise, in means and log variances: E log sum exp by Jensen's inequality."""
    m, u = np.split(x, 2, axis=1)
    k, v, own = m.shape[1], np.exp(np.minimum(u, LARGEST)), np.diag(batch.precision)
    above = logsumexp(m + v / 2.0, axis=1) - logsumexp(m, axis=1)
    values = _laplace(batch, m, alone=True)[0] - batch.total[:, 0] * above + 0.5 * (u - v * own).sum(axis=1)
    if alone:
        return values, x, x
    _, gradient, hessian = _laplace(batch, m, alone=False)
    q, curvature = softmax(m + v / 2.0, axis=1), batch.total[..., None] * _softmax_curvature(m + v / 2.0)
    gradient = gradient + batch.total * (softmax(m, axis=1) - q)
    of_u = 0.5 - 0.5 * v * (own + batch.total * q)
    whole = np.zeros((len(m), 2 * k, 2 * k))
    whole[:, :k, :k] = hessian + batch.total[..., None] * _softmax_curvature(m) - curvature
    whole[:, :k, k:] = -curvature * (v / 2.0)[:, None]
    whole[:, k:, :k] = whole[:, :k, k:].swapaxes(1, 2)
    whole[:, k:, k:] = -curvature * (v / 2.0)[:, None] * (v / 2.0)[..., None] + np.eye(k) * (of_u - 0.5)[..., None]
    return values, np.concatenate([gradient, of_u], axis=1), whole


def _ascend(objective: Objective, batch: Batch, x: Array) -> Array:
    """Maximise for each document, by Newton steps with the signs of curvatures turned where they are wrong."""
    x, active = x.copy(), np.arange(len(x))
    for _ in range(MOST):
        some = batch.at(active)
        values, gradient, hessian = objective(some, x[active], False)
        sizes, axes = np.linalg.eigh(hessian)
        along = np.einsum("bij,bi->bj", axes, gradient) / np.maximum(abs(sizes), 1e-6)
        direction = np.einsum("bij,bj->bi", axes, along)
        gain = 0.5 * (gradient * direction).sum(axis=1)
        length, left = np.ones(len(active)), gain > TOLERANCE
        for _ in range(HALVINGS):
            tried = np.flatnonzero(left)
            if not len(tried):
                break
            trial = x[active[tried]] + length[tried, None] * direction[tried]
            better = objective(some.at(tried), trial, True)[0] >= values[tried] + 1e-4 * length[tried] * gain[tried]
            x[active[tried[better]]] = trial[better]
            left[tried[better]] = False
            length[tried] /= 2.0
        active = active[(gain > TOLERANCE) & ~left]
        if not len(active):
            break
    return x


def laplace(batch: Batch, q: Q) -> Q:
    """Return the mode and the curvature there, with the assignments of words fixed (Wang and Blei 2013)."""
    return _curved(batch, _ascend(_laplace, batch, q.mean))


def delta(batch: Batch, q: Q) -> Q:
    """Return the optimum with log sum exp replaced by its second-order expansion at the mean (Wang and Blei 2013)."""
    return _curved(batch, _ascend(_delta, batch, q.mean))


def _curved(batch: Batch, m: Array) -> Q:
    return Q(m, np.linalg.inv(batch.precision + batch.total[..., None] * _softmax_curvature(m)))


def mean_field(batch: Batch, q: Q) -> Q:
    """Return the optimum of independent coordinates, with Jensen's inequality (Blei and Lafferty 2007)."""
    x = np.concatenate([q.mean, np.log(np.diagonal(q.cov, axis1=1, axis2=2))], axis=1)
    m, u = np.split(_ascend(_mean_field, batch, x), 2, axis=1)
    return Q(m, np.exp(u)[..., None] * np.eye(m.shape[1]))


def own_value(method: str, batch: Batch, q: Q) -> float | None:
    """Return log p(y) of one document as a rival has it; None for the others, who have the ELBO."""
    half_prior = 0.5 * float(np.linalg.slogdet(batch.precision)[1])
    if method == "Laplace":
        return float(_laplace(batch, q.mean, True)[0][0]) + half_prior + 0.5 * float(np.linalg.slogdet(q.cov[0])[1])
    if method == "delta":
        return float(_delta(batch, q.mean, True)[0][0]) + half_prior
    if method == "mean field":
        x = np.concatenate([q.mean, np.log(np.diagonal(q.cov, axis1=1, axis2=2))], axis=1)
        return float(_mean_field(batch, x, True)[0][0]) + half_prior + 0.5 * q.mean.shape[1]
    return None


# --- Gaussians with expectations by draws -----------------------------------------------------------------------------


class _Evaluated(NamedTuple):
    """ELBO up to a constant, factor of the covariance, and gradient and new precision where q is standard normal."""

    elbo: Array
    factor: Array
    gradient: Array
    precision: Array

    @property
    def gap(self) -> Array:
        """Return about how many nats there are to gain."""
        apart = self.precision - np.eye(self.precision.shape[1])
        return 0.5 * (self.gradient**2).sum(axis=1) + 0.25 * (apart**2).sum(axis=(1, 2))


def _evaluate(batch: Batch, q: Q, base: Array, mask: Array) -> _Evaluated:
    factor = np.linalg.cholesky(q.cov)
    found = likelihood(batch.documents, batch.beta, q.mean[:, None] + base @ factor.swapaxes(1, 2))
    log_det = np.log(np.diagonal(factor, axis1=1, axis2=2)).sum(axis=1)
    elbo = found.values.mean(axis=1) + batch.log_prior(q.mean) + log_det
    elbo -= 0.5 * np.einsum("ij,bij->b", batch.precision, q.cov)
    gradient = found.gradient - (q.mean - batch.mean) @ batch.precision
    target = factor.swapaxes(1, 2) @ (mask * (batch.precision - found.hessian)) @ factor
    return _Evaluated(elbo, factor, np.einsum("bij,bi->bj", factor, gradient), target)


def gaussian(batch: Batch, q: Q, base: Array, *, diagonal: bool = False, tolerance: float = TOLERANCE) -> Q:
    """Return the Gaussians that maximise the ELBO, by natural steps with a line search, all on the same draws."""
    k = len(batch.mean)
    eye = np.eye(k)
    mask = eye if diagonal else np.ones((k, k))
    mean, cov, active = q.mean.copy(), mask * q.cov, np.arange(len(q.mean))
    now, longest = _evaluate(batch, Q(mean, cov), base, mask), np.ones(len(mean))
    for _ in range(MOST):
        left = now.gap > tolerance
        active, longest, now = active[left], longest[left], _Evaluated(*(part[left] for part in now))
        if not len(active):
            break
        least = np.linalg.eigvalsh(now.precision)[:, 0]
        rho = np.minimum(longest, (1.0 - LEAST_EIGENVALUE) / np.maximum(1.0 - least, 1e-12))
        inner = eye + rho[:, None, None] * (now.precision - eye)
        move = rho[:, None] * np.linalg.solve(inner, now.gradient[..., None])[..., 0]
        trial = Q(
            mean[active] + np.einsum("bij,bj->bi", now.factor, move),
            now.factor @ np.linalg.inv(inner) @ now.factor.swapaxes(1, 2),
        )
        after = _evaluate(batch.at(active), trial, base, mask)
        better = after.elbo >= now.elbo - SLACK
        longest = np.where(
            better & (after.gap < FASTER * now.gap),
            longest,
            np.where(better, np.maximum(longest * SHORTER, SHORTEST), longest / 2.0),
        )
        mean[active[better]], cov[active[better]] = trial.mean[better], trial.cov[better]
        now = _Evaluated(
            *(
                np.where(np.expand_dims(better, tuple(range(1, new.ndim))), new, old)
                for new, old in zip(after, now, strict=True)
            )
        )
    return Q(mean, cov)


@dataclass
class Sites:
    """PG-SVI: the likelihood of each document replaced by exp(first z - z' second z / 2).

    A step of size beta on a batch multiplies all sites by r = 1/(1 + beta), and adds the gradients of the batch,
    weighted by the number of documents over that in the batch.
    """

    first: Array
    second: Array
    diagonal: bool

    def q(self, topics: Topics, which: Array, power: Array) -> Q:
        """Return prior times site, to some power; the nearest independent Gaussian where covariances are diagonal."""
        precision = np.linalg.inv(topics.cov)
        whole = precision + power[:, None, None] * self.second[which]
        right = precision @ topics.mean + power[:, None] * self.first[which]
        mean = np.linalg.solve(whole, right[..., None])[..., 0]
        own = whole * np.eye(len(precision)) if self.diagonal else whole
        return Q(mean, np.linalg.inv(own))

    def visit(self, batch: Batch, topics: Topics, steps: Array, n_steps: int, n: int, rng: np.random.Generator) -> None:
        """Take the steps of one pass on some documents, each at its place in the pass."""
        which, r = batch.documents.which, 1.0 / (1.0 + STEP_SIZE)
        q = self.q(topics, which, r**steps)
        half = rng.standard_normal((len(which), FEW_DRAWS // 2, len(topics.mean)))
        base = np.concatenate([half, -half], axis=1)
        found = likelihood(
            batch.documents, batch.beta, q.mean[:, None] + base @ np.linalg.cholesky(q.cov).swapaxes(1, 2)
        )
        sizes, axes = np.linalg.eigh(-found.hessian * (np.eye(len(topics.mean)) if self.diagonal else 1.0))
        curvature = (axes * np.maximum(sizes, 0.0)[:, None]) @ axes.swapaxes(1, 2)
        first = found.gradient + np.einsum("bij,bj->bi", curvature, q.mean)
        old, new = r**n_steps, r ** (n_steps - 1 - steps) * (1.0 - r) * n / BATCH
        self.first[which] = old * self.first[which] + new[:, None] * first
        self.second[which] = old * self.second[which] + new[:, None, None] * curvature


# --- the outer loop ---------------------------------------------------------------------------------------------------


def fit_each(step: Callable[[Batch, Q], Q], documents: list[Documents], topics: Topics, q: Q) -> Q:
    """Return q of all documents after a step on each, from where they are."""
    mean, cov = q.mean.copy(), q.cov.copy()
    for some in documents:
        mean[some.which], cov[some.which] = step(prepared(some, topics), Q(mean[some.which], cov[some.which]))
    return Q(mean, cov)


def learnt(documents: list[Documents], topics: Topics, q: Q, base: Array) -> Topics:
    """Return topics by an M step, with expectations at mean + factor @ base."""
    counts = np.zeros_like(topics.beta)
    for some in documents:
        z = q.mean[some.which][:, None] + base @ np.linalg.cholesky(q.cov[some.which]).swapaxes(1, 2)
        np.add.at(counts, some.words, expected_counts(some, topics.beta[some.words], z))
    apart = q.mean - q.mean.mean(axis=0)
    return Topics(normalised(counts), q.mean.mean(axis=0), q.cov.mean(axis=0) + apart.T @ apart / len(apart))


def score(held_out: list[Documents], topics: Topics, q: Q) -> float:
    """Return minus the mean over words of log int p(word | z) q(z) dz."""
    base, total, words = normal_draws(PREDICTED, len(topics.mean), seed=1), 0.0, 0.0
    for some in held_out:
        z = q.mean[some.which][:, None] + base @ np.linalg.cholesky(q.cov[some.which]).swapaxes(1, 2)
        chances = softmax(z, axis=-1).mean(axis=1)
        total += float((some.counts * np.log((topics.beta[some.words] @ chances[..., None])[..., 0])).sum())
        words += float(some.counts.sum())
    return -total / words
