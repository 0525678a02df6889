"""What a log density offers where it is a sum over rows."""

from collections.abc import Callable

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.target import Expectation, RowRules, Spread
from pymc_ngvi.core.types import Array
from pymc_ngvi.density.by_rows import NO_ROWS, ByRows
from pymc_ngvi.density.expectations import Expectations
from pymc_ngvi.density.row_space import SeenFromRows
from pymc_ngvi.rows.mean_hessian import Patterns


class ByRowsMethods(Patterns):
    """The part of `LogDensity` that goes through its rows.

    Attributes
    ----------
    by_rows : ByRows
    n_gradients, n_hessians : int
    """

    by_rows: ByRows
    n_gradients: int
    n_hessians: int

    @property
    def rows(self) -> Expectations | None:
        """Log p as a sum over rows, each a function of a few linear predictors; None where it has other parts."""
        return self.by_rows.found

    @property
    def n_directions(self) -> int | None:
        """Directions in which the functions of rows vary, at most; None where log p is no sum over rows."""
        rows = self.rows
        return None if rows is None else rows.n_directions

    @property
    def seen_from_rows(self) -> SeenFromRows | None:
        """Log p in the space of its rows, where these are far fewer than coordinates with fixed normal priors."""
        return self.by_rows.seen

    def expected(
        self, q: Spread, rules: RowRules | None = None, *, adapt: bool = False, least: float = -np.inf
    ) -> Expectation:
        """Return the expectation of log p under a Gaussian, by quadrature; it counts as a gradient and a Hessian.

        See `RowsTarget` for the parameters. Rows are checked whenever rules are chosen.

        Raises
        ------
        ValueError
            Where log p is no sum over rows.
        RowsGivenUp
            Where the rows don't add up to log p: they are given up.
        """
        rows = self.rows
        if rows is None:
            raise ValueError(NO_ROWS)
        if rules is None:
            self.by_rows.check(q.location)
        self.count_expectation()
        return rows.under(q, self, rules, adapt=adapt, least=least)

    def rules_of_level(self, level: int) -> RowRules:
        """Return rules that are the same for all rows, by their code."""
        assert self.rows is not None
        return self.rows.rules_of_level(level)

    def directions(self, rows: NDArray[np.intp]) -> Array:
        """Return the slopes of the only predictor of each of some rows; see `RowsTarget`."""
        assert self.rows is not None
        return self.rows.directions(rows)

    def check_rows(self, theta: Array) -> None:
        """Compare rows with log p at a point, (n_dim,).

        Raises
        ------
        RowsGivenUp
            Where the rows don't add up to log p: they are given up.
        """
        self.by_rows.check(theta)

    def rows_cover(self, draw: Callable[[], Array]) -> bool:
        """Tell whether rows are all of log p at draws; see `RowsTarget`."""
        return self.by_rows.cover(draw)

    def count_expectation(self) -> None:
        """Count an expectation: as a gradient and a Hessian."""
        self.n_gradients += 1
        self.n_hessians += 1
