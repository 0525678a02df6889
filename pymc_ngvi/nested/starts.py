"""Where conditional fits begin: what rows see of a Gaussian, predicted from fits at other hyperparameters."""

from collections.abc import Sequence

import numpy as np

from pymc_ngvi.core.types import Array, RowRules
from pymc_ngvi.marginal.regression import Whitening, quadratic_terms
from pymc_ngvi.nested.found import EvaluatedMarginal
from pymc_ngvi.rows.seen import ManyRules, ManySeen, Seen

#: Fits for each number of a polynomial, at least, for which that has squares and products; ridge of a regression.
_PER_TERM, _RIDGE = 1.5, 1e-3
#: Largest correlation of two predictors of a row; least variance, over which there is a logarithm.
_LARGEST, _LEAST = 0.999, 1e-300


class Starts:
    """Regressions of what rows see on hyperparameters, frozen when they are made.

    As they are fixed, and as the steps from a start depend on nothing else, the Gaussian at some hyperparameters is a
    function of these alone: what is drawn from it has a known density.

    Parameters
    ----------
    known : sequence of EvaluatedMarginal
    whitening : Whitening
    kinds : sequence of int
        Predictors that rows have, kind by kind.
    """

    def __init__(self, known: Sequence[EvaluatedMarginal], whitening: Whitening, kinds: Sequence[int]) -> None:
        self._whitening, self._kinds = whitening, kinds
        self._seen, self._rules = [one.seen for one in known], [one.rules for one in known]
        self._points = whitening.whitened(np.array([one.g for one in known]))
        self._lowest, self._highest = self._points.min(axis=0), self._points.max(axis=0)
        terms = self._terms(self._points)
        targets = np.array([self._packed(seen) for seen in self._seen])
        values = np.array([one.value for one in known])
        weights = np.exp(0.25 * (values - values.max()))  # those near the mode count most
        gram = (weights[:, None] * terms).T @ terms
        gram += _RIDGE * weights.sum() * np.diag(np.r_[0.0, np.ones(terms.shape[1] - 1)])
        self._slopes: Array = np.linalg.solve(gram, (weights[:, None] * terms).T @ targets)

    def at(self, g: Array) -> tuple[list[Seen], RowRules]:
        """Return what rows may see at some hyperparameters, (p,): as predicted, and at the nearest fit; its rules."""
        predicted, nearest, rules = self.of(g[None])
        return [predicted.one(0), nearest.one(0)], rules.one(0)

    def of(self, g: Array) -> tuple[ManySeen, ManySeen, ManyRules]:
        """Return the same at many of them, (n, p)."""
        u = self._whitening.whitened(g)
        predicted = self._unpacked(self._terms(np.clip(u, self._lowest, self._highest)) @ self._slopes)
        nearest = ((self._points - u[:, None]) ** 2).sum(axis=2).argmin(axis=1)
        seen, rules = ManySeen.of([self._seen[k] for k in nearest]), ManyRules.of([self._rules[k] for k in nearest])
        return predicted, seen, rules

    def _terms(self, u: Array) -> Array:
        p = u.shape[1]
        if len(self._points) < _PER_TERM * (1 + p + p * (p + 1) // 2):
            return np.concatenate([np.ones((len(u), 1)), u], axis=1)
        return quadratic_terms(u)

    def _packed(self, seen: Seen) -> Array:
        """Return means, logarithms of variances, and correlations, one after the other."""
        parts, at = [seen.mean], 0
        for k in self._kinds:
            of_kind = seen.covariances[at : at + k * (k + 1) // 2]
            at += len(of_kind)
            sd = [np.sqrt(np.maximum(of_kind[a * (a + 3) // 2], _LEAST)) for a in range(k)]
            for a in range(k):
                parts += [of_kind[a * (a + 1) // 2 + b] / (sd[a] * sd[b]) for b in range(a)]
                parts.append(2.0 * np.log(sd[a]))
        return np.concatenate(parts)

    def _unpacked(self, packed: Array) -> ManySeen:
        first = self._seen[0]
        at = len(first.mean)
        mean, covariances, number = packed[:, :at], [], 0
        for k in self._kinds:
            rows: list[Array] = []
            for _ in range(k * (k + 1) // 2):
                size = len(first.covariances[number])
                rows.append(packed[:, at : at + size])
                at, number = at + size, number + 1
            sd = [np.exp(0.5 * rows[a * (a + 3) // 2]) for a in range(k)]
            for a in range(k):
                correlations = [np.clip(rows[a * (a + 1) // 2 + b], -_LARGEST, _LARGEST) for b in range(a)]
                covariances += [c * sd[a] * sd[b] for b, c in enumerate(correlations)]
                covariances.append(sd[a] ** 2)
        return ManySeen(mean, covariances)
