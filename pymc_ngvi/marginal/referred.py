"""Globals at which log m was evaluated by the reference rule, and what was found there: none of them twice."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.batch import Batch
from pymc_ngvi.core.types import Array
from pymc_ngvi.marginal.centres import Centres
from pymc_ngvi.marginal.nodes import PathRule

#: Numbers in what is remembered of all points.
_MOST_REMEMBERED = 2**24


@dataclass(frozen=True, eq=False)
class Referred(Batch):
    """Globals at which the reference rule was evaluated."""

    #: shape (n, p).
    g: Array
    #: shape (n,).
    log_marginal: Array
    centres: Centres
    #: shape (n, n_local).
    skew: Array
    #: Whose centres were not found; shape (n,).
    lost: NDArray[np.bool_]


class Remembered:
    """What was found at globals, as long as the rule is the same; nothing is kept of too many."""

    def __init__(self) -> None:
        self._rule: PathRule | None = None
        self._sets: list[Referred] = []
        self._where: dict[bytes, tuple[int, int]] = {}

    def at(self, g: Array, rule: PathRule, evaluate: Callable[[Array], Referred]) -> Referred:
        """Return what is known at globals, (n, p), by a rule; what is not is evaluated."""
        n_kept = sum(points.skew.size * (2 + points.centres.factor.shape[2]) for points in self._sets)
        if rule != self._rule or n_kept > _MOST_REMEMBERED:
            self._rule, self._sets, self._where = rule, [], {}
        keys = [row.tobytes() for row in np.ascontiguousarray(g)]
        where = dict(self._where)
        if len(new := np.array([i for i, key in enumerate(keys) if key not in where], dtype=np.intp)):
            points = evaluate(g[new])
            where |= {keys[i]: (len(self._sets), k) for k, i in enumerate(new)}
            # Of those that are lost, better may be known later.
            self._where |= {keys[new[k]]: (len(self._sets), int(k)) for k in np.flatnonzero(~points.lost)}
            self._sets.append(points)
        which = np.array([where[key] for key in keys], dtype=np.intp)
        rows = [np.flatnonzero(which[:, 0] == number) for number in np.unique(which[:, 0])]
        parts = [self._sets[which[at[0], 0]][which[at, 1]] for at in rows]
        return Referred.joined(parts)[np.argsort(np.concatenate(rows))]
