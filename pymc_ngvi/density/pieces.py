"""Stands for the flat vector where graphs are put on two others: of some coordinates, and of the rest."""

import numpy as np
import pytensor.tensor as pt

from numpy.typing import NDArray
from pytensor.graph.basic import Variable


class Pieces:
    """Pieces of the flat vector, taken from globals or local coordinates."""

    def __init__(self, globals_: NDArray[np.intp], n_dim: int, global_: Variable, local: Variable) -> None:
        self.global_, self.local = global_, local
        self._is_global = np.zeros(n_dim, dtype=bool)
        self._is_global[globals_] = True
        self._rank = np.where(self._is_global, np.cumsum(self._is_global), np.cumsum(~self._is_global)) - 1

    @classmethod
    def of(cls, globals_: NDArray[np.intp], n_dim: int) -> "Pieces":
        """Return pieces of two inputs."""
        global_ = pt.vector("g", dtype="float64", shape=(len(globals_),))
        return cls(globals_, n_dim, global_, local_input(n_dim - len(globals_)))

    def __getitem__(self, where: slice) -> Variable:
        """Return a piece."""
        of_globals, rank = self._is_global[where], self._rank[where]
        if of_globals.all():
            return self.global_[int(rank[0]) : int(rank[-1]) + 1]
        if not of_globals.any():
            return self.local[int(rank[0]) : int(rank[-1]) + 1]
        at = np.empty(len(rank), dtype=np.intp)
        at[of_globals] = np.arange(int(of_globals.sum()))
        at[~of_globals] = int(of_globals.sum()) + np.arange(int((~of_globals).sum()))
        return pt.concatenate([self.global_[rank[of_globals]], self.local[rank[~of_globals]]])[at]


def local_input(n: int) -> Variable:
    """Return the symbolic vector of local coordinates."""
    return pt.vector("b", dtype="float64", shape=(n,))
