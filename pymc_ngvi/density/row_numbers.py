"""What the coefficients of log p are made of where rows are polynomials of the second degree, and where it belongs."""

from typing import NamedTuple

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.refusal import NotApart
from pymc_ngvi.core.values import Array
from pymc_ngvi.density.expectations import Expectations
from pymc_ngvi.rows.expectation import RowFunction
from pymc_ngvi.rows.quadratic_rows import derivatives_of, pairs_of_slots


class Numbers(NamedTuple):
    """What coefficients are made of, at one value of what is given.

    Parameters
    ----------
    designs : ndarray
        Entries of X: the sparse ones, and all of the dense columns.
    slopes : ndarray
        Of each row by each of its predictors, and what is linear in predictors.
    bends : ndarray
        Second derivatives of rows, by pairs of predictors.
    """

    designs: Array
    slopes: Array
    bends: Array


class Places(NamedTuple):
    """Where these are; all arrays are as long as they are.

    Parameters
    ----------
    rows, cols : ndarray of int
        Of entries of X.
    directions : ndarray of int
        Of the plan of the predictors' matrix, from which each entry is read.
    slope_of : ndarray of int
        The predictor that each slope is by.
    slope_kind : ndarray of int
        Slopes of one kind and slot.
    slope_row : ndarray of int, shape (n_slopes, 3)
        Kind, row and slot; -1 for what is linear.
    bend_of : ndarray of int, shape (n_bends, 2)
        The predictors that each second derivative is by.
    bend_row : ndarray of int, shape (n_bends, 3)
        Kind, row and pair of slots.
    """

    rows: NDArray[np.intp]
    cols: NDArray[np.intp]
    directions: NDArray[np.intp]
    slope_of: NDArray[np.intp]
    slope_kind: NDArray[np.intp]
    slope_row: NDArray[np.intp]
    bend_of: NDArray[np.intp]
    bend_row: NDArray[np.intp]

    @classmethod
    def of(cls, rows: Expectations) -> "Places":
        """Return those of rows."""
        plan = rows.predictors.plan
        n, n_dense = plan.n_rows, len(plan.columns)
        order = np.lexsort((plan.cols, plan.rows))
        n_colours = len(plan.directions) - n_dense
        slope_of, slope_kind, slope_row, bend_of, bend_row = (list[NDArray[np.intp]]() for _ in range(5))
        for number, kind in enumerate(rows.terms.rows):
            every = np.arange(len(kind.index))
            for slot in range(kind.index.shape[1]):
                slope_of.append(kind.index[:, slot])
                slope_kind.append(np.full(len(every), len(slope_kind)))
                slope_row.append(np.column_stack(np.broadcast_arrays(number, every, slot)))
            for pair, (a, b) in enumerate(zip(*pairs_of_slots(kind.index.shape[1]), strict=True)):
                bend_of.append(kind.index[:, [a, b]])
                bend_row.append(np.column_stack(np.broadcast_arrays(number, every, pair)))
        slope_of.append(np.arange(n))
        slope_kind.append(np.full(n, len(slope_kind)))
        slope_row.append(np.full((n, 3), -1))
        return cls(
            np.concatenate([plan.rows[order], np.repeat(np.arange(n), n_dense)]),
            np.concatenate([plan.cols[order], np.tile(plan.columns, n)]),
            np.concatenate([plan.colours[order], np.tile(n_colours + np.arange(n_dense), n)]),
            *map(np.concatenate, (slope_of, slope_kind, slope_row, bend_of, bend_row)),
        )


def _slots(function: RowFunction, index: NDArray[np.int64]) -> list[int]:
    """Return in which column a function, which may have those first that rows share, has each predictor of rows."""
    left, result = list(range(function.k)), list[int]()
    for column in index.T:
        found = [at for at in left if np.array_equal(function.index[:, at], column)]
        if not found:
            raise NotApart("predictors of rows are put together")
        result.append(found[0])
        left.remove(found[0])
    return result


def of_rows(function: RowFunction, index: NDArray[np.int64], eta: Array) -> tuple[Array, Array]:
    """Return the derivatives of rows, in the order of their predictors' columns, (n_rows, k), there."""
    slots = _slots(function, index)
    grad, second = derivatives_of(function, eta[function.index])
    a, b = pairs_of_slots(function.k)
    of_pair = {(i, j): at for at, (i, j) in enumerate(zip(a.tolist(), b.tolist(), strict=True))}
    order = [of_pair[max(slots[i], slots[j]), min(slots[i], slots[j])] for i, j in zip(a, b, strict=True)]
    return grad[:, slots], second[:, order]


def numbers_of(rows: Expectations, x: Array) -> Numbers:
    """Return the numbers of rows as they are now, slopes at a point, (n_dim,)."""
    linear = rows.linear_map.plain
    rest = linear.rest
    rest.sort_indices()
    eta = linear(x[None])[0]
    found = [of_rows(f, kind.index, eta) for f, kind in zip(rows.functions, rows.terms.rows, strict=True)]
    slopes = [grad.T.ravel() for grad, _ in found]
    bends = [second.T.ravel() for _, second in found]
    return Numbers(
        np.concatenate([rest.data, linear.dense.ravel()]),
        np.concatenate([*slopes, rows.terms.slope]),
        np.concatenate(bends),
    )
