"""What factorisations ask of fronts, whether these are of one matrix or of many as one."""

from typing import Protocol

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.families.matrices.sparse.fronts import FrontStack
from pymc_ngvi.families.matrices.sparse.order import Ints


class AnyFronts(Protocol):
    """Fronts as factorisations see them: those of one matrix, or of many as one; see `Fronts` and `RepeatedFronts`."""

    @property
    def n_dim(self) -> int:
        """Number of coordinates."""

    @property
    def n_panels(self) -> int:
        """Numbers in all panels."""

    @property
    def n_fronts(self) -> int:
        """Numbers in all fronts."""

    @property
    def place(self) -> Ints:
        """Places of the coordinates in the order of elimination."""

    @property
    def order(self) -> Ints:
        """The coordinates in the order of elimination."""

    @property
    def stacks(self) -> list[FrontStack]:
        """All fronts, those first that are eliminated first."""

    @property
    def diagonal(self) -> Ints:
        """Where the panels have the diagonal, in the order of the coordinates."""

    @property
    def used(self) -> NDArray[np.bool_]:
        """Which entries of the panels are in the lower triangle, and were not filled up."""
