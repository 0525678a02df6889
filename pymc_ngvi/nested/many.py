"""Gaussians of the latent variables at many hyperparameters at once."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.batch import Batch
from pymc_ngvi.core.types import Array, RowRules
from pymc_ngvi.families.sparse import Factors, Precisions
from pymc_ngvi.rows.linear_map import Seen
from pymc_ngvi.rows.many import ManyRows

#: Steps at most, from a start that is near and from one that is not; their sizes, of which the first that raises the
#: ELBO is taken.
_MOST_STEPS, _MOST_FROM_FAR, _SIZES = 15, 60, (1.0, 0.4, 0.15, 0.05, 0.015)
#: Nats that the last step may gain: of a fit whose log m is wanted, and of one whose draws are weighted, or that no
#: step raises.
SOLVED, LEFT = 1e-3, 0.1

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
    #: What rows saw before the last step.
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
    elbo: Array
    #: Of the expectation of log p by the mean, and minus its mean Hessian.
    slope: Array
    target: Array
    rules: RowRules


class ManyFitter:
    """Fits Gaussians at many hyperparameters by natural steps that have to raise the ELBO, but for the last one.

    Where a step is to gain little, it is taken as it is, and what it gains is what it would if rows were quadratic: how
    little, is more of a fit that is far below the top.
    """

    def __init__(self, precisions: Precisions) -> None:
        self._precisions = precisions

    def fit(self, rows: ManyRows, start: Seen, rules: RowRules, left: float, top: float) -> Iterator[ManyGaussians]:
        """Yield the fits, as far as there are any, begun from what rows may see of them."""
        expected = rows.expected(start, rules)
        assert expected.matrix is not None
        with np.errstate(all="ignore"):
            back = (expected.matrix @ (rows.maps.offset - start.mean).ravel()).reshape(len(rows), -1)
            slope = rows.maps.transposed_times(expected.slope + back)
        there, factors = self._factored(expected.precision, np.isfinite(slope).all(axis=1))
        if factors is not None:
            state = self._at(
                rows[there], factors.times_covariance(slope[there]), expected.precision[there], factors, rules[there]
            )
            yield from self._climb(rows, state, there, left, top, _MOST_STEPS)

    def fit_from_far(self, rows: ManyRows, mean: Array, sd: Array, left: float) -> Iterator[ManyGaussians]:
        """Yield the same begun from independent coordinates, by rules that are chosen on the way."""
        means, sds = (np.broadcast_to(x, (len(rows), len(x))) for x in (mean, sd))
        precision = self._precisions.independent(sds**-2.0)
        there, factors = self._factored(precision, np.isfinite(means).all(axis=1))
        if factors is not None:
            state = self._at(rows[there], means[there], precision[there], factors, None)
            yield from self._climb(rows, state, there, left, -np.inf, _MOST_FROM_FAR, adapt=True)

    def _climb(
        self, rows: ManyRows, state: _State, which: Which, left: float, top: float, most: int, *, adapt: bool = False
    ) -> Iterator[ManyGaussians]:
        for _ in range(most):
            there, factors = self._factored(
                state.target, np.isfinite(state.slope).all(axis=1) & np.isfinite(state.elbo)
            )
            if factors is None:
                return
            state, which = state[there], which[there]
            move, here = factors.times_covariance(state.slope), rows[which]
            turned = 0.5 * (self._precisions.trace(state.target, state.covariance) - move.shape[1])
            gain = np.maximum(turned + state.log_det - factors.log_det, 0.0)
            gain += 0.5 * np.einsum("nd,nd->n", move, state.slope)
            enough = left * (1.0 + np.maximum(top - state.elbo - gain, 0.0)) ** 2
            has_ended, go = gain < np.maximum(enough, LEFT), np.flatnonzero(np.isfinite(gain) & (gain >= enough))
            new: _State | None = None
            if len(go):
                new, rose = self._stepped(here[go], state[go], factors[go], move[go], adapt=adapt)
                has_ended[go[rose]] = False
            if len(ends := np.flatnonzero(has_ended)):
                yield ManyGaussians(
                    which[ends], here[ends], (state.mean + move)[ends], factors[ends], (state.elbo + gain)[ends],
                    state.seen[ends], state.rules[ends],
                )  # fmt: skip
            if new is None:
                return
            state, which = new, which[go][rose]

    def _factored(self, precision: Array, found: NDArray[np.bool_]) -> tuple[Which, Factors | None]:
        """Return which of some precisions have factors, and these."""
        there = np.flatnonzero(found & np.isfinite(precision).all(axis=1))
        if not len(there):
            return there, None
        factors, ok = self._precisions.factored(precision if len(there) == len(precision) else precision[there])
        return there[ok], factors

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
        expected = rows.expected(seen, rules, adapt=adapt)
        elbo = expected.value + factors.entropy
        return _State(
            mean, precision, factors.covariance, factors.log_det, seen, np.where(np.isfinite(elbo), elbo, -np.inf),
            rows.maps.transposed_times(expected.slope), expected.precision, expected.rules,
        )  # fmt: skip

    def _stepped(
        self, rows: ManyRows, state: _State, factors: Factors, move: Array, *, adapt: bool
    ) -> tuple[_State | None, Which]:
        """Take a step from each that raises the ELBO, as large as may be; return where there is one."""
        left, parts = np.arange(len(rows)), list[tuple[Which, _State]]()
        for size in _SIZES:
            if not len(left):
                break
            some, at = state[left], left
            precision = (1.0 - size) * some.precision + size * some.target
            if size < 1.0:
                there, part = self._factored(precision, np.ones(len(left), dtype=bool))
                if part is None:
                    continue
                some, at, precision = some[there], left[there], precision[there]
                factors, move = part, size * part.times_covariance(some.slope)
            new = self._at(rows[at], some.mean + move, precision, factors, some.rules, adapt=adapt)
            if len(rose := np.flatnonzero(new.elbo > some.elbo)):
                parts.append((at[rose], new[rose]))
                left = np.setdiff1d(left, at[rose])
        if not parts:
            return None, left[:0]
        return _State.joined([part for _, part in parts]), np.concatenate([at for at, _ in parts])
