"""What an engine does: it evaluates rows."""

from typing import Protocol

from pymc_ngvi.reading.terms import Rows
from pymc_ngvi.rows.expectation import RowFunction
from pymc_ngvi.rows.row_gradient import FirstDerivatives
from pymc_ngvi.rows.row_hessian import SecondDerivatives


class Engine(Protocol):
    """Evaluates rows, and their derivatives."""

    def row_function(self, rows: Rows) -> RowFunction:
        """Return the function of rows."""

    def with_data(self, function: RowFunction, rows: Rows) -> RowFunction:
        """Return the function of the same rows with other data."""

    def first_derivatives(self, rows: Rows) -> FirstDerivatives | None:
        """Return rows with their derivatives by predictors; None where the gradient of log p is to be compiled."""

    def second_derivatives(self, rows: Rows) -> SecondDerivatives:
        """Return the second derivatives of rows by their predictors, those alone that are not 0 everywhere."""
