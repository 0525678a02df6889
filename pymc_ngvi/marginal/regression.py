"""Regressions on polynomials of the globals, and rules for log m with such a polynomial for what they lack."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array
from pymc_ngvi.marginal.nodes import PathRule
from pymc_ngvi.marginal.tails import Bend

#: Globals up to which regressions have all products of two of them, and cubes; beyond, squares alone.
_MOST_PRODUCTS = 14
#: Whitened globals are cut off here in regressions, and in cubes.
_FARTHEST, _FARTHEST_CUBED = 7.0, 3.5
#: Ridge of the terms of the second order, for each draw; of all where there are few draws; of the others.
_RIDGE, _RIDGE_OF_FEW, _NO_RIDGE = 1e-3, 0.1, 1e-8

#: Part of the draws that are left beyond reach.
_BEYOND = 0.05


@dataclass(frozen=True, eq=False)
class Whitening:
    """Standardises the globals for regressions, in coordinates y without straight tails."""

    #: From globals to y.
    forward: Callable[[Array], Array]
    #: shape (p,).
    mean: Array
    #: Lower Cholesky factor of the covariance of y; shape (p, p).
    factor: Array
    #: Globals with a straight tail: in it, logarithms of scales are linear in these, not in y.
    tailed: tuple[int, ...] = ()
    #: From globals to coordinates that are linear there; by default, globals are.
    straight: Callable[[Array], Array] | None = None

    @classmethod
    def by(cls, bend: Bend, mean: Array, factor: Array) -> "Whitening":
        """Return that of coordinates without straight tails: those have them once ratios are taken."""
        return cls(bend.forward, mean, factor, tuple(tail.at for tail in bend.tails), bend.divided)

    def in_tails(self, g: Array) -> Array:
        """Return what is linear in straight tails, (n, n_tailed)."""
        return (g if self.straight is None else self.straight(g))[:, list(self.tailed)]

    def whitened(self, g: Array) -> Array:
        """Return the whitened globals, (n, p)."""
        u = np.linalg.solve(self.factor, (self.forward(g) - self.mean).T).T
        return np.clip(u, -_FARTHEST, _FARTHEST)

    def features(self, g: Array, *, cubes: bool = True) -> Array:
        """Return 1, the whitened globals, their products and cubes, and what is straight in tails, (n, n_features)."""
        u = self.whitened(g)
        parts = [np.ones((len(u), 1)), u, self.in_tails(g)]
        if not self._has_products:
            parts.append(u**2)
        else:
            i, j = np.triu_indices(u.shape[1])
            parts.append(u[:, i] * u[:, j])
            if cubes:
                parts.append(np.clip(u, -_FARTHEST_CUBED, _FARTHEST_CUBED) ** 3)
        return np.concatenate(parts, axis=1)

    @property
    def _has_products(self) -> bool:
        return len(self.mean) <= _MOST_PRODUCTS

    @property
    def n_features(self) -> int:
        """Number of features."""
        return n_polynomial(len(self.mean)) + len(self.tailed)

    @property
    def n_without_cubes(self) -> int:
        """Number of features without cubes."""
        return self.n_features - (len(self.mean) if self._has_products else 0)


def quadratic_terms(u: Array) -> Array:
    """Return 1, coordinates, (n, p), and their products, (n, n_terms)."""
    i, j = np.triu_indices(u.shape[1])
    return np.concatenate([np.ones((len(u), 1)), u, u[:, i] * u[:, j]], axis=1)


def n_polynomial(p: int) -> int:
    """Return how many numbers a polynomial of ``p`` globals has: products of two and cubes, of many squares alone."""
    return 1 + p + (p * (p + 1) // 2 + p if p <= _MOST_PRODUCTS else p)


def gram_of(features: Array, weights: Array) -> Array:
    """Return the matrix of a weighted ridge regression, (n_features, n_features)."""
    result: Array = (weights[:, None] * features).T @ features
    result += _RIDGE * weights.sum() * np.eye(features.shape[1])
    return result


def leverage_of(gram: Array, features: Array) -> Array:
    """Return the variances of predictions, in that of residuals."""
    return np.sum(features * np.linalg.solve(gram, features.T).T, axis=1)


def covering(gram: Array, features: Array, weights: Array, reach: float, most: int) -> NDArray[np.intp]:
    """Choose draws to add to those of a regression, so that it is within reach of all but the farthest.

    Each one is that which lowers the mean variance of predictions most.
    """
    cov = features @ np.linalg.solve(gram, features.T)
    # What is farthest would have all the say, and a polynomial may not be right there.
    near = np.flatnonzero(cov.diagonal() <= np.quantile(cov.diagonal(), 1.0 - _BEYOND))
    cov, weights = cov[np.ix_(near, near)], weights[near]
    chosen: list[int] = []
    while len(chosen) < min(most, len(near)) and (cov.diagonal() > reach).any():
        gain = weights * np.sum(cov**2, axis=0) / (1.0 + weights * cov.diagonal())
        gain[chosen] = 0.0
        chosen.append(i := int(np.argmax(gain)))
        cov -= np.multiply.outer(cov[i], cov[i] * (weights[i] / (1.0 + weights[i] * cov[i, i])))
    return near[np.sort(np.array(chosen, dtype=np.intp))]


def regressed(features: Array, values: Array, weights: Array, p: int) -> tuple[Array, float]:
    """Return coefficients of a weighted ridge regression, and the leave-one-out residual, an sd."""
    root = np.sqrt(weights)[:, None]
    a = features * root
    ridge = np.full(a.shape[1], _RIDGE)
    ridge[: 1 + p] = _NO_RIDGE
    solved = np.linalg.solve(a.T @ a + np.diag(ridge), a.T)
    coefficients = solved @ (values * root[:, 0])
    leverage = np.einsum("ij,ji->i", a, solved)
    residual = (values - features @ coefficients) / (1.0 - np.minimum(leverage, 0.95))
    near = weights**2  # weights are a small power of the density
    return coefficients, float(np.sqrt((near * residual**2).sum() / near.sum()))


def predictor(features: Array, targets: Array, weights: Array, p: int) -> Array:
    """Return the coefficients of weighted ridge regressions of many targets, (n_features, n_targets)."""
    n, n_features = float(weights.sum()), features.shape[1]
    ridge = np.full(n_features, _RIDGE * n)
    ridge[: 1 + p] = _NO_RIDGE
    if n_features > 0.8 * n:
        ridge[1 + p :] = _RIDGE_OF_FEW * n
    weighted = (weights[:, None] * features).T
    return np.linalg.solve(weighted @ features + np.diag(ridge), weighted @ targets)


@stored("exact.base_rule")
@dataclass(frozen=True, eq=False)
class BaseRule:
    """A cheap rule, and the polynomial of the globals that is added to its log m."""

    #: Of no nodes where the polynomial is log m by itself.
    rule: PathRule
    #: shape (n_features,).
    coefficients: Array
    #: Leave-one-out, an sd in nats.
    residual: float
    #: Of the features that the polynomial was fitted to; shape (n_features, n_features).
    gram: Array
    #: Variance of a prediction, in that of residuals, beyond which it extrapolates.
    reach: float

    def is_beyond(self, features: Array) -> NDArray[np.bool_]:
        """Tell at which globals the polynomial is far from all that it was fitted to.

        A low log m says nothing there: about the wrong centres, it is too low by any amount.
        """
        return leverage_of(self.gram, features) > self.reach

    @classmethod
    def fitted(
        cls,
        rule: PathRule,
        whitening: Whitening,
        g: Array,
        values: Array,
        weights: Array,
        tolerance: float,
        reach: float,
    ) -> "BaseRule | None":
        """Fit the polynomial to what it is to add; None where the residual is larger than the tolerance."""
        features = whitening.features(g)
        coefficients, residual = regressed(features, values, weights, g.shape[1])
        if not residual < tolerance:
            return None
        return cls(rule, coefficients, residual, gram_of(features, weights / weights.max()), reach)
