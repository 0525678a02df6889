"""What rows see of Gaussians, and by which rules they are integrated: of one, and of many at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.target import RowRules
from pymc_ngvi.core.values import Array
from pymc_ngvi.rows.levels import Levels


class Seen(NamedTuple):
    """What rows see of a Gaussian."""

    #: shape (n_predictors,).
    mean: Array
    #: Of all pairs of predictors that a row has: an array, (n_rows,), for each pair of each kind of rows.
    covariances: list[Array]


@dataclass(frozen=True, eq=False)
class ManySeen:
    """What rows see of Gaussians: means of predictors, (n, n_predictors), and covariances, (n, n_pairs) each."""

    mean: Array
    covariances: list[Array]

    @classmethod
    def of(cls, seen: Sequence[Seen]) -> "ManySeen":
        """Return what is seen of one after the other."""
        covariances = [np.array(c) for c in zip(*(one.covariances for one in seen), strict=True)]
        return cls(np.array([one.mean for one in seen]), covariances)

    def one(self, number: int) -> Seen:
        """Return what is seen of one."""
        return Seen(self.mean[number], [c[number] for c in self.covariances])

    def __getitem__(self, which: NDArray[np.intp]) -> "ManySeen":
        """Return that of some of them."""
        return ManySeen(self.mean[which], [c[which] for c in self.covariances])

    @classmethod
    def together(cls, parts: Sequence["ManySeen"]) -> "ManySeen":
        """Return several as one."""
        covariances = [np.concatenate(c) for c in zip(*(part.covariances for part in parts), strict=True)]
        return cls(np.concatenate([part.mean for part in parts]), covariances)


@dataclass(frozen=True, eq=False)
class ManyRules:
    """Rules of quadrature, and standard deviations that they were chosen for, (n, n_rows) each."""

    level: Levels
    sd: NDArray[np.float32]

    @classmethod
    def of(cls, rules: Sequence[RowRules]) -> "ManyRules":
        """Return those of one after the other."""
        return cls(np.array([one.level for one in rules]), np.array([one.sd for one in rules]))

    def one(self, number: int) -> RowRules:
        """Return those of one."""
        return RowRules(self.level[number], self.sd[number])

    def __getitem__(self, which: NDArray[np.intp]) -> "ManyRules":
        """Return those of some of them."""
        return ManyRules(self.level[which], self.sd[which])

    @classmethod
    def together(cls, parts: Sequence["ManyRules"]) -> "ManyRules":
        """Return several as one."""
        return cls(np.concatenate([part.level for part in parts]), np.concatenate([part.sd for part in parts]))
