"""After the only pass through data that can be read once: what a few rows of each batch say now.

A site is what a batch said when it was read, and q has moved on. Some rows of each batch are kept, all together as many
as one batch has, and are asked once more: what they say now, less what they said then, stands for all rows of their
batch. That corrects q, and how it varies from batch to batch bounds the error that is left.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from pymc_ngvi.core.stream import StreamTarget
from pymc_ngvi.core.types import GaussianState
from pymc_ngvi.steps.incremental.sites import Quadratic, SeenByQuadratics, gap_by_newton, moves, packed
from pymc_ngvi.steps.incremental.state import IncrementalState

#: Times that rows are asked; nats that a correction gains, below which it is the last.
_MOST_ROUNDS, _NEAR_ONCE = 6, 1e-3
#: Takes a natural step on the prior and the sum of sites; returns the nats that it promised, and where it leads.
type Step = Callable[[GaussianState, Quadratic], tuple[float, GaussianState]]


def corrected(target: StreamTarget, step: Step, state: IncrementalState) -> IncrementalState:
    """Return the state after the only pass, corrected by the rows that were kept, with the error that is left."""
    q, total, error, changes = state.q, state.total, 0.0, list[Quadratic]()
    for _ in range(_MOST_ROUNDS):
        changes, error = _changes(target, q, state)
        total = sum(changes, state.total)
        gap, new = step(q, total)
        q = new
        if gap < _NEAR_ONCE:
            break
    # Of the changes' scatter no more is known than their squares, which have the changes themselves in them.
    seen = SeenByQuadratics.of(q)
    slopes = np.array([change.grad(seen) for change in changes])
    gap = sum(gap_by_newton(q, slope, -change.precision) for slope, change in zip(slopes, changes, strict=True))
    values = np.array([change.value(seen) for change in changes])
    return replace(
        state,
        q=q,
        total=total,
        gaps=(gap,),
        elbo_error=float(np.sqrt((values**2).sum())) + error,
        moved=float(np.sqrt((moves(q, slopes) ** 2).sum(axis=0)).max()),
    )


def _changes(target: StreamTarget, q: GaussianState, state: IncrementalState) -> tuple[list[Quadratic], float]:
    """Return what each batch is to be expected to say now, less what it said then, and the error of quadrature."""
    seen, result, error = SeenByQuadratics.of(q), [], 0.0
    for which, site in enumerate(state.sites):
        assert site is not None
        assert site.part is not None
        found = target.of_kept(which, q)
        now = Quadratic.of(site.part.n_rows, found.value, found.grad, packed(found, q), seen)
        weight = site.content.n_rows / site.part.n_rows
        result.append((now - site.part).times_number(weight))
        error += weight * found.error
    return result, error
