"""Globals at which log m was evaluated by the reference rule, and what was found there: none of them twice."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.types import Array
from pymc_ngvi.marginal.centres import Centres
from pymc_ngvi.marginal.nodes import PathRule

#: Numbers in what is remembered of all points.
_MOST_REMEMBERED = 2**24


@dataclass
class Referred:
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

    def __getitem__(self, rows: NDArray[np.intp]) -> "Referred":
        """Return some of them."""
        return Referred(self.g[rows], self.log_marginal[rows], self.centres[rows], self.skew[rows], self.lost[rows])


def joined_points(parts: Sequence[Referred]) -> Referred:
    """Return several sets of points as one."""
    return Referred(
        np.concatenate([p.g for p in parts]),
        np.concatenate([p.log_marginal for p in parts]),
        Centres.joined([p.centres for p in parts]),
        np.concatenate([p.skew for p in parts]),
        np.concatenate([p.lost for p in parts]),
    )


class Remembered:
    """What was found at globals, as long as the rule is the same; of too many, the last ones."""

    def __init__(self) -> None:
        self._rule: PathRule | None = None
        self._sets: list[Referred] = []
        self._where: dict[bytes, tuple[int, int]] = {}
        self._n_forgotten = 0

    def at(self, g: Array, rule: PathRule, evaluate: Callable[[Array], Referred]) -> Referred:
        """Return what is known at globals, (n, p), by a rule; what is not is evaluated."""
        if rule != self._rule:
            self._rule, self._sets, self._where, self._n_forgotten = rule, [], {}, 0
        keys = [row.tobytes() for row in np.ascontiguousarray(g)]
        known = np.array([key in self._where for key in keys], dtype=bool)
        if not known.any():
            return self._added(g, keys, evaluate)
        parts, order = [], []
        if len(new := np.flatnonzero(~known)):
            parts.append(self._added(g[new], [keys[i] for i in new], evaluate, keep=keys))
            order.append(new)
        old = np.flatnonzero(known)
        which = np.array([self._where[keys[i]] for i in old], dtype=np.intp)
        for number in np.unique(which[:, 0]):
            of_set = which[:, 0] == number
            parts.append(self._sets[number - self._n_forgotten][which[of_set, 1]])
            order.append(old[of_set])
        return joined_points(parts)[np.argsort(np.concatenate(order))]

    def _added(
        self, g: Array, keys: list[bytes], evaluate: Callable[[Array], Referred], keep: Sequence[bytes] = ()
    ) -> Referred:
        """Evaluate at globals, and remember all that are not lost: of these, better may be known later."""
        points = evaluate(g)
        n_kept = sum(map(_size, self._sets)) + _size(points)
        needed = {self._where[key][0] for key in keep if key in self._where}
        while self._sets and n_kept > _MOST_REMEMBERED and self._n_forgotten not in needed:
            n_kept -= _size(self._sets[0])
            self._where = {key: at for key, at in self._where.items() if at[0] != self._n_forgotten}
            self._sets, self._n_forgotten = self._sets[1:], self._n_forgotten + 1
        number = self._n_forgotten + len(self._sets)
        self._sets.append(points)
        self._where |= {keys[i]: (number, int(i)) for i in np.flatnonzero(~points.lost)}
        return points


def _size(points: Referred) -> int:
    return int(points.skew.size) * (2 + int(points.centres.factor.shape[2]))
