"""Gaussians of the latent variables at many hyperparameters at once."""

from dataclasses import dataclass, replace

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.batch import Batch
from pymc_ngvi.core.types import Array, RowRules
from pymc_ngvi.families.matrices.sparse.precisions import Factors, Precisions
from pymc_ngvi.rows.linear_map import Seen
from pymc_ngvi.rows.many import ManyExpected, ManyRows

#: Steps at most, from a start that is near and from one that is not; their sizes, of which the first that raises the
#: ELBO is taken; nats that a fit may lack where none does.
_MOST_STEPS, _MOST_FROM_FAR, _SIZES, _USABLE = 15, 60, (1.0, 0.4, 0.15, 0.05, 0.015), 0.1

type Which = NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class ManyGaussians(Batch):
    """Gaussians that were fitted."""

    #: Of the hyperparameters that were asked for, those where there is one; shape (n,).
    which: Which
    #: There.
    rows: ManyRows
    #: shape (n, n_dim).
    mean: Array
    factors: Factors
    #: Nats, of log p at these hyperparameters; shape (n,).
    elbo: Array
    seen: Seen
    rules: RowRules

    def draws(self, base: Array) -> Array:
        """Return draws, (n, n_dim, m), of standard normals of that shape."""
        return self.mean[:, :, None] + self.factors.solve(base, transposed=True)

    def log_density(self, base: Array) -> Array:
        """Return the log densities, (n, m), of the draws of standard normals, (n, n_dim, m)."""
        d = base.shape[1]
        return 0.5 * (d - np.einsum("ndm,ndm->nm", base, base)) - self.factors.entropy[:, None]


@dataclass(frozen=True, eq=False)
class _State(Batch):
    """Gaussians, and what is known there."""

    mean: Array
    precision: Array
    covariance: Array
    log_det: Array
    seen: Seen
    expected: ManyExpected
    elbo: Array


class ManyFitter:
    """Fits Gaussians at many hyperparameters by natural steps that have to raise the ELBO."""

    def __init__(self, precisions: Precisions) -> None:
        self._precisions = precisions

    def fit(self, rows: ManyRows, start: Seen, rules: RowRules | None, left: float) -> ManyGaussians | None:
        """Return the fits, as far as there are any, begun from what rows may see of them."""
        return self._climb(rows, *self._begun(rows, start, rules), left, _MOST_STEPS)

    def fit_from_far(self, rows: ManyRows, mean: Array, sd: Array, left: float) -> ManyGaussians | None:
        """Return the same begun from independent coordinates, by rules that are chosen on the way."""
        precision = self._precisions.independent(sd**-2.0)
        there, factors = self._factored(precision, np.isfinite(mean).all(axis=1))
        if factors is None:
            return None
        state = self._at(rows[there], mean[there], precision[there], factors, None)
        return self._climb(rows, state, there, left, _MOST_FROM_FAR, adapt=True)

    def _climb(
        self, rows: ManyRows, state: _State | None, which: Which, left: float, most: int, *, adapt: bool = False
    ) -> ManyGaussians | None:
        parts = list[tuple[Which, _State]]()
        for _ in range(most):
            if state is None:
                break
            here = rows[which]
            gap, direction = self._direction(here, state)
            done = np.flatnonzero(gap < left)
            parts.append((which[done], state[done]))
            if not len(go := np.flatnonzero(np.isfinite(gap) & ~(gap < left))):
                break
            before = state[go]
            state, rose = self._stepped(here[go], before, direction[go], adapt=adapt)
            ends = np.setdiff1d(np.flatnonzero(gap[go] < _USABLE), rose)
            parts.append((which[go][ends], before[ends]))
            which = which[go][rose]
        return self._joined(rows, [part for part in parts if len(part[0])])

    def _joined(self, rows: ManyRows, parts: list[tuple[Which, _State]]) -> ManyGaussians | None:
        """Return the states in the order of their hyperparameters."""
        if not parts:
            return None
        which = np.concatenate([which for which, _ in parts])
        order = np.argsort(which)
        which, state = which[order], _State.joined([state for _, state in parts])[order]
        factors, _ = self._precisions.factored(state.precision)
        assert factors is not None
        assert len(factors.log_det) == len(which)  # of each there was one
        return ManyGaussians(which, rows[which], state.mean, factors, state.elbo, state.seen, state.expected.rules)

    def _begun(self, rows: ManyRows, seen: Seen, rules: RowRules | None) -> tuple[_State | None, Which]:
        """Return the states after a step of size 1 from where predictors are as rows may see them; and where any is."""
        expected = rows.expected(seen, rules)
        assert expected.matrix is not None
        with np.errstate(all="ignore"):
            back = (expected.matrix @ (rows.maps.offset - seen.mean).ravel()).reshape(len(rows), -1)
            slope = rows.maps.transposed_times(expected.slope + back)
        there, factors = self._factored(expected.precision, np.isfinite(slope).all(axis=1))
        if factors is None:
            return None, there
        mean = factors.times_covariance(slope[there])
        rules = expected.rules if rules is None else rules
        return self._at(rows[there], mean, expected.precision[there], factors, rules[there]), there

    def _factored(self, precision: Array, found: NDArray[np.bool_]) -> tuple[Which, Factors | None]:
        """Return which of some precisions have factors, and these."""
        there = found & np.isfinite(precision).all(axis=1)
        if not there.any():
            return np.flatnonzero(there), None
        factors, ok = self._precisions.factored(precision if there.all() else precision[there])
        return np.flatnonzero(there)[ok], factors

    def _at(
        self,
        rows: ManyRows,
        mean: Array,
        precision: Array,
        factors: Factors,
        rules: RowRules | None,
        *,
        adapt: bool = False,
    ) -> _State:
        seen = rows.seen(mean, factors.covariance)
        expected = replace(rows.expected(seen, rules, adapt=adapt), matrix=None)
        elbo = expected.value + factors.entropy
        elbo = np.where(np.isfinite(elbo), elbo, -np.inf)
        return _State(mean, precision, factors.covariance, factors.log_det, seen, expected, elbo)

    def _direction(self, rows: ManyRows, state: _State) -> tuple[Array, Array]:
        """Return how far a step of size 1 would go, as a divergence, and where its mean goes."""
        grad = rows.maps.transposed_times(state.expected.slope)
        n, d = grad.shape
        gap, direction = np.full(n, np.inf), np.zeros((n, d))
        found = np.isfinite(grad).all(axis=1) & np.isfinite(state.elbo)
        there, new = self._factored(state.expected.precision, found)
        if new is None:
            return gap, direction
        direction[there] = new.times_covariance(grad[there])
        traces = self._precisions.trace(state.expected.precision[there], state.covariance[there])
        turned = 0.5 * (traces - d) + state.log_det[there] - new.log_det
        gap[there] = np.maximum(turned, 0.0) + 0.5 * np.einsum("nd,nd->n", direction[there], grad[there])
        return gap, direction

    def _stepped(self, rows: ManyRows, state: _State, direction: Array, *, adapt: bool) -> tuple[_State | None, Which]:
        """Take a step from each that raises the ELBO, as large as may be; return where there is one."""
        left, parts = np.arange(len(rows)), list[tuple[Which, _State]]()
        for size in _SIZES:
            some, target = state[left], state.expected.precision[left]
            precision = target if size == 1.0 else (1.0 - size) * some.precision + size * target
            there, factors = self._factored(precision, np.ones(len(left), dtype=bool))
            if factors is not None:
                at = left[there]
                here = rows[at]
                if size == 1.0:
                    move = direction[at]
                else:
                    move = size * factors.times_covariance(here.maps.transposed_times(some.expected.slope[there]))
                mean, rules = some.mean[there] + move, some.expected.rules[there]
                new = self._at(here, mean, precision[there], factors, rules, adapt=adapt)
                if len(rose := np.flatnonzero(new.elbo > some.elbo[there])):
                    parts.append((at[rose], new[rose]))
                    left = np.setdiff1d(left, at[rose])
            if not len(left):
                break
        if not parts:
            return None, left[:0]
        return _State.joined([part for _, part in parts]), np.concatenate([at for at, _ in parts])
