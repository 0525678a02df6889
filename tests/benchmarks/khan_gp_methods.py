"""Gaussian processes for classification: exact expectations, PG-SVI, and gradient descent with its rules.

What ``khan_gp.py`` runs.
"""

import functools

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from khan_gp_data import NUGGET, SETTINGS, Setting, split
from measure import Array
from scipy.linalg import solve_triangular
from scipy.linalg.blas import dtrmm
from scipy.optimize import least_squares
from scipy.special import expit, ndtr

#: Seed of the order of rows; what the rules of the authors' code add to squares.
SEED, EPSILON = 5, 1e-8


# --- expectations and scores ------------------------------------------------------------------------------------------


@functools.cache
def mixture(n: int = 8) -> tuple[Array, Array]:
    """Return weights and scales of a mixture of normal distribution functions that is sigma(f), to about 3e-9."""
    f = np.linspace(0.0, 40.0, 6_001)
    whole = 1e3  # weight of the condition that the weights of the mixture sum to 1

    def weights(log_scales: Array) -> tuple[Array, Array]:
        functions = ndtr(f[:, None] / np.exp(log_scales)) - 0.5
        left = np.vstack([functions, np.full((1, n), whole)])
        found = np.linalg.lstsq(left, np.append(expit(f) - 0.5, whole), rcond=None)[0]
        return found, functions @ found - (expit(f) - 0.5)

    best = least_squares(
        lambda log_scales: weights(log_scales)[1],
        -np.log(np.geomspace(0.16, 1.6, n)),
        xtol=1e-15,
        ftol=1e-15,
        gtol=1e-15,
        max_nfev=400,
    )
    return weights(best.x)[0], np.exp(best.x)


def expected(sign: Array, mean: Array, variance: Array) -> tuple[Array, Array, Array]:
    """Return E log p, E of its slope and of minus its curvature, (n,) each."""
    weights, scales = mixture()
    spread = np.sqrt(scales**2 + variance[:, None])
    z = -(sign * mean)[:, None] / spread
    density = np.exp(-0.5 * z**2) / np.sqrt(2.0 * np.pi)
    below = ndtr(z)
    return -(spread * (z * below + density)) @ weights, sign * (below @ weights), (density / spread) @ weights


@dataclass(frozen=True)
class Problem:
    """A classification: rows to fit and rows to predict, with signs for labels."""

    setting: Setting
    x: Array
    sign: Array
    x_test: Array
    sign_test: Array

    def _kernel(self, a: Array, b: Array) -> Array:
        squared = (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1) - 2.0 * a @ b.T
        length, sd = np.exp(self.setting.log_length), np.exp(self.setting.log_sd)
        return sd**2 * np.exp(-0.5 * np.maximum(squared, 0.0) / length**2)

    @cached_property
    def kernel(self) -> Array:
        """Return K, with the nugget of the authors' code."""
        return self._kernel(self.x, self.x) + NUGGET * np.eye(len(self.x))

    @cached_property
    def inverse(self) -> Array:
        """Return K^-1, in Fortran's order."""
        inverse = np.linalg.inv(self.kernel)
        return np.asfortranarray((inverse + inverse.T) / 2.0)

    @cached_property
    def log_det(self) -> float:
        """Return log det K."""
        return float(np.linalg.slogdet(self.kernel)[1])

    @cached_property
    def _test(self) -> tuple[Array, Array]:
        cross = self._kernel(self.x, self.x_test)
        weights = self.inverse @ cross
        return weights, np.exp(2 * self.setting.log_sd) - (weights * cross).sum(axis=0)

    def loss(self, mean: Array, cov: Array) -> float:
        """Return -ELBO of N(mean, cov)."""
        divergence = (self.inverse * cov).sum() - len(mean) + self.log_det - np.linalg.slogdet(cov)[1]
        divergence += mean @ self.inverse @ mean
        return float(0.5 * divergence - expected(self.sign, mean, np.diag(cov))[0].sum())

    def log_loss(self, mean: Array, cov: Array) -> float:
        """Return -mean log2 of the predictive probability of the labels of the test rows."""
        weights, rest = self._test
        variance = rest + (weights * (cov @ weights)).sum(axis=0)
        _, against, _ = expected(np.ones(len(rest)), -self.sign_test * (weights.T @ mean), variance)
        return float(-np.log2(against).mean())

    def of_sites(self, mean: Array, cov: Array) -> Array:
        """Return the covariance of the prior times sites, whose precisions are the expected curvatures of the rows."""
        root = np.sqrt(expected(self.sign, mean, np.diag(cov))[2])
        factor = np.linalg.cholesky(np.eye(len(mean)) + root[:, None] * self.kernel * root)
        half = solve_triangular(factor, root[:, None] * self.kernel, lower=True)
        return self.kernel - half.T @ half

    def batches(self) -> Iterator[list[Array]]:
        """Return the batches of pass after pass, each a random order of all rows."""
        rng, n, size = np.random.default_rng(SEED), len(self.sign), self.setting.batch
        while True:
            order = rng.permutation(n)
            yield [order[first : first + size] for first in range(0, n, size)]


def read(data: Path, name: str) -> Problem:
    """Return a data set: Sonar's rows as the authors split them, those of USPS at random."""
    setting = SETTINGS[name]
    x, y, is_test = split(data / setting.file, setting.n_train)
    sign = 2.0 * y - 1.0
    return Problem(setting, x[~is_test], sign[~is_test], x[is_test], sign[is_test])


# --- methods: mean and covariance after each pass ---------------------------------------------------------------------

Q = tuple[Array, Array]


def proximal(problem: Problem, beta: float, *, whole: bool = False) -> Iterator[Q]:
    """PG-SVI, equation 19 as printed: on batches, or on all rows at once, which is a step of CVI."""
    kernel, n, r = problem.kernel, len(problem.sign), 1.0 / (1.0 + beta)
    mean, variance, precision = np.zeros(n), np.diag(kernel), np.zeros(n)
    batches = problem.batches()
    while True:
        for rows in [np.arange(n)] if whole else next(batches):
            scale = n / len(rows)
            _, alpha, gamma = expected(problem.sign[rows], mean[rows], variance[rows])
            precision = r * precision
            precision[rows] += (1.0 - r) * scale * gamma
            root = np.sqrt(precision)
            factor = np.linalg.cholesky(np.eye(n) + root[:, None] * kernel * root)
            half = solve_triangular(factor, root[:, None] * kernel, lower=True, check_finite=False)
            target = scale * kernel[:, rows] @ alpha - mean
            mean = mean + (1.0 - r) * (target - half.T @ solve_triangular(factor, root * target, lower=True))
            variance = np.diag(kernel) - (half**2).sum(axis=0)
        yield mean, kernel - half.T @ half


Rule = Callable[[Array, dict[str, Array], int], Array]


def descent(
    problem: Problem, rule: Rule, *, whole: bool = False, logs: bool = False, weighted: bool = True
) -> Iterator[Q]:
    """Gradients in the mean and the Cholesky factor of the covariance, with logs of its diagonal or without.

    Gradients of the rows of a batch count n / batch times, unless ``weighted`` is false.
    """
    n, inverse = len(problem.sign), problem.inverse
    mean, factor = np.zeros(n), np.linalg.cholesky(problem.kernel)
    of_mean: dict[str, Array] = {}
    of_factor: dict[str, Array] = {}
    diagonal, number, batches = np.diag_indices(n), 0, problem.batches()
    while True:
        for rows in [np.arange(n)] if whole else next(batches):
            number += 1
            scale = n / len(rows) if weighted else 1.0
            _, alpha, gamma = expected(problem.sign[rows], mean[rows], (factor[rows] ** 2).sum(axis=1))
            slope = inverse @ mean
            slope[rows] -= scale * alpha
            slopes = dtrmm(1.0, factor, inverse, side=1, lower=1)
            slopes[rows] += scale * gamma[:, None] * factor[rows]
            slopes = np.tril(slopes)
            own = factor[diagonal]
            slopes[diagonal] = slopes[diagonal] * own - 1.0 if logs else slopes[diagonal] - 1.0 / own
            mean = mean - rule(slope, of_mean, number)
            step = rule(slopes, of_factor, number)
            factor = factor - step
            factor[diagonal] = own * np.exp(-step[diagonal]) if logs else own - step[diagonal]
        yield mean, factor @ factor.T


def sgd(first: float, decay: float = 0.0) -> Rule:
    """Return steps of a first size that decay."""
    return lambda slope, memory, number: first * number**-decay * slope


def adagrad(size: float) -> Rule:
    """Return steps over the root of the sum of squares."""

    def rule(slope: Array, memory: dict[str, Array], number: int) -> Array:
        memory["squares"] = memory.get("squares", 0.0) + slope**2
        return size * slope / np.sqrt(memory["squares"] + EPSILON)

    return rule


def rmsprop(size: float, rho: float) -> Rule:
    """Return steps over the root of a running mean of squares."""

    def rule(slope: Array, memory: dict[str, Array], number: int) -> Array:
        memory["squares"] = rho * memory.get("squares", 0.0) + (1.0 - rho) * slope**2
        return size * slope / np.sqrt(memory["squares"] + EPSILON)

    return rule


def adadelta(size: float, forget: float) -> Rule:
    """Return steps in proportion to the running size of steps."""

    def rule(slope: Array, memory: dict[str, Array], number: int) -> Array:
        memory["squares"] = (1.0 - forget) * memory.get("squares", 0.0) + forget * slope**2
        step = size * slope * np.sqrt((memory.get("steps", 0.0) + EPSILON) / (memory["squares"] + EPSILON))
        memory["steps"] = (1.0 - forget) * memory.get("steps", 0.0) + forget * step**2
        return step

    return rule


def adam(size: float, first: float = 0.9, second: float = 0.999) -> Rule:
    """Return steps by running means of slopes and of squares."""

    def rule(slope: Array, memory: dict[str, Array], number: int) -> Array:
        memory["slopes"] = first * memory.get("slopes", 0.0) + (1.0 - first) * slope
        memory["squares"] = second * memory.get("squares", 0.0) + (1.0 - second) * slope**2
        mean, square = memory["slopes"] / (1.0 - first**number), memory["squares"] / (1.0 - second**number)
        return size * mean / (np.sqrt(square) + EPSILON)

    return rule


def rivals(problem: Problem) -> dict[str, tuple[float, Rule]]:
    """Return step size and rule of the paper's rivals."""
    setting = problem.setting
    kappa, first = setting.sgd
    return {
        "SGD": (first / len(problem.sign), sgd(first / len(problem.sign), kappa)),
        "Adagrad": (setting.adagrad, adagrad(setting.adagrad)),
        "RMSprop": (setting.rmsprop[0], rmsprop(*setting.rmsprop)),
        "Adadelta": (setting.adadelta[0], adadelta(*setting.adadelta)),
        "Adam": (setting.adam, adam(setting.adam)),
    }
