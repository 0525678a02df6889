r"""The gradients of rows, and the sums of their squares, as graphs: one backward pass for all rows.

Rows do not depend on each other, so that the derivatives of the sum of their log densities with respect to the outputs
of a layer, :math:`\delta`, (n_rows, n_out), are those of each row. The derivatives of row i with respect to the weights
are :math:`x_i \delta_i^T`, whose squares sum up to :math:`(x^2)^T (\delta^2)`. Where weights are used more than once,
:math:`\sum_{a, b} (x_a \circ x_b)^T (\delta_a \circ \delta_b)`. All else that rows share, biases and scales, is small:
its derivatives are found row by row.
"""

from collections import defaultdict

import numpy as np
import pytensor.tensor as pt

from numpy.typing import NDArray
from pytensor.graph.basic import Constant, Variable
from pytensor.graph.traversal import ancestors
from pytensor.tensor.subtensor import Subtensor, indices_from_subtensor

from pymc_ngvi.density.gauss_newton.taps import Copied, DenseLayer, NoLayers, Own, Tap, find_taps, is_part
from pymc_ngvi.graphs.loops import vectorised

#: Uses of one matrix of weights, whose products are formed in pairs.
_MOST_USES = 4
#: Elements of the derivatives of all rows with respect to what they share, where these are found row by row.
_MOST_ELEMENTS = 2**21


def squares_by_rows(row: Variable, theta: Variable, weights: Variable) -> Variable:
    """Return sum_i w_i^2 g_i^2, (n_dim,), where g_i is the gradient of an element of ``row``.

    Parameters
    ----------
    row : pytensor vector or matrix
        Log densities, with rows along the first axis.
    theta : pytensor vector
    weights : pytensor variable
        w, like ``row``.

    Raises
    ------
    NoLayers
        Where the graph does not show that one backward pass gives the gradients of all rows.
    """
    row, taps = find_taps(row, theta)
    if row.type.ndim == 1:
        return _squares((weights * row).sum(), theta, taps, row.type.shape[0])
    unit = _unit(row)
    total = _squares((weights * row * unit).sum(), theta, taps, row.type.shape[0])
    [batched] = vectorised([total], {unit: pt.constant(np.eye(unit.type.shape[0]))})
    return batched.sum(axis=0) if batched.type.ndim == 2 else batched


def gradients_by_rows(row: Variable, theta: Variable, weights: Variable) -> Variable:
    """Return w_i g_i, (n_rows, n_dim), where g_i is the gradient of an element of ``row``; as `squares_by_rows`.

    Where ``row`` has columns, the gradients of the first column come first.
    """
    row, taps = find_taps(row, theta)
    if row.type.ndim == 1:
        return _gradients((weights * row).sum(), row, theta, taps)
    unit = _unit(row)
    total = _gradients((weights * row * unit).sum(), row, theta, taps)
    [batched] = vectorised([total], {unit: pt.constant(np.eye(unit.type.shape[0]))})
    return batched.reshape((-1, theta.type.shape[0])) if batched.type.ndim == 3 else batched


def _unit(row: Variable) -> Variable:
    """Return a vector that takes one column of a matrix, or several."""
    n_columns = row.type.shape[1]
    if n_columns is None:
        raise NoLayers("columns without a number")
    return pt.vector("unit", dtype="float64", shape=(n_columns,))


def _slopes(cost: Variable, taps: list[Tap]) -> dict[Variable, Variable]:
    """Return the derivatives of a scalar with respect to the taps."""
    slopes = pt.grad(cost, [tap.tap for tap in taps], disconnected_inputs="ignore") if taps else []
    return dict(zip([tap.tap for tap in taps], slopes, strict=True))


def _squares(cost: Variable, theta: Variable, taps: list[Tap], n_rows: int | None) -> Variable:
    slopes, uses = _slopes(cost, taps), _uses(taps, theta)
    _check_apart([_elements(piece, theta) for piece in uses])
    total = pt.zeros_like(theta)
    for piece, its in uses.items():
        squares = _of_piece(piece, its, theta, slopes, n_rows)
        at = _elements(piece, theta)
        total = pt.inc_subtensor(total[int(at[0]) : int(at[-1]) + 1], squares.ravel()) if len(at) else total
    return total


def _gradients(cost: Variable, row: Variable, theta: Variable, taps: list[Tap]) -> Variable:
    slopes, uses = _slopes(cost, taps), _uses(taps, theta)
    _check_apart([_elements(piece, theta) for piece in uses])
    total = pt.zeros((row.shape[0], theta.type.shape[0]))
    for piece, its in uses.items():
        shared = [tap for tap in its if isinstance(tap, DenseLayer | Copied)]
        if len(shared) < len(its):
            raise NoLayers("parts of single rows")
        gradients = _each_row(piece, shared, slopes)
        at = _elements(piece, theta)
        where = total[:, int(at[0]) : int(at[-1]) + 1]
        total = pt.inc_subtensor(where, gradients.reshape((row.shape[0], len(at)))) if len(at) else total
    return total


def _uses(taps: list[Tap], theta: Variable) -> dict[Variable, list[Tap]]:
    """Return the taps that each part of theta leads to."""
    uses: defaultdict[Variable, list[Tap]] = defaultdict(list)
    for tap in taps:
        for piece in _pieces(tap.shared, theta):
            uses[piece].append(tap)
    return uses


def _pieces(var: Variable, theta: Variable) -> list[Variable]:
    """Return the parts of theta, as they are taken from it, that a variable depends on."""
    nodes = dict.fromkeys(v.owner for v in ancestors([var]) if v.owner is not None and theta in v.owner.inputs)
    pieces = [node.outputs[0] if isinstance(node.op, Subtensor) else theta for node in nodes]
    return list(dict.fromkeys(pieces)) or [theta]


def _elements(piece: Variable, theta: Variable) -> NDArray[np.intp]:
    """Return the indices of a part of theta: a range."""
    every = np.arange(theta.type.shape[0])
    if piece is theta:
        return every
    [index] = indices_from_subtensor(piece.owner.inputs[1:], piece.owner.op.idx_list)
    bounds = [index.start, index.stop, index.step] if isinstance(index, slice) else [index]
    if not all(bound is None or isinstance(bound, Constant) for bound in bounds):
        raise NoLayers("a part that is not fixed")
    values = [None if bound is None else int(bound.data) for bound in bounds]
    at = np.atleast_1d(every[slice(*values)] if isinstance(index, slice) else every[values[0]])
    if not np.array_equal(at, np.arange(at[0], at[0] + len(at)) if len(at) else at):
        raise NoLayers("a part with gaps")
    return at


def _check_apart(parts: list[NDArray[np.intp]]) -> None:
    every = np.concatenate([np.empty(0, dtype=np.intp), *parts])
    if len(np.unique(every)) < len(every):
        raise NoLayers("parts that overlap")


def _of_piece(
    piece: Variable, taps: list[Tap], theta: Variable, slopes: dict[Variable, Variable], n_rows: int | None
) -> Variable:
    """Return the sums of squares with respect to one part of theta."""
    dense = [tap for tap in taps if isinstance(tap, DenseLayer)]
    weights = taps[0].shared
    alike = all(tap.shared is weights for tap in dense) and len(dense) == len(taps) <= _MOST_USES
    if alike and is_part(weights, theta):
        return _back(weights, _products(dense, slopes), piece)
    if len(taps) == 1 and isinstance(taps[0], Own):
        return _back(taps[0].tap, slopes[taps[0].tap] ** 2, piece)
    shared = [tap for tap in taps if isinstance(tap, DenseLayer | Copied)]
    if len(shared) < len(taps):
        raise NoLayers("parts of single rows that are used more than once")
    sizes = [int(np.prod([n or 1 for n in tap.shared.type.shape])) for tap in shared]
    if (n_rows or 1) * sum(sizes) > _MOST_ELEMENTS:
        raise NoLayers("too many derivatives")
    return (_each_row(piece, shared, slopes) ** 2).sum(axis=0)


def _products(taps: list[DenseLayer], slopes: dict[Variable, Variable]) -> Variable:
    pairs = [tap.pair(slopes[tap.tap]) for tap in taps]
    total = pt.add(
        pt.constant(0.0),
        *[
            (1.0 if a == b else 2.0) * pt.dot((x * pairs[b][0]).T, slope * pairs[b][1])
            for a, (x, slope) in enumerate(pairs)
            for b in range(a + 1)
        ],
    )
    return total.T if taps[0].transposed else total


def _back(var: Variable, values: Variable, piece: Variable) -> Variable:
    """Return what stands at the elements of ``var``, at those of the part of theta that they are."""
    return pt.grad((var * values).sum(), piece, consider_constant=[values])


def _each_row(piece: Variable, taps: list[DenseLayer | Copied], slopes: dict[Variable, Variable]) -> Variable:
    """Return the gradient of each row with respect to a part of theta, (n_rows, ...)."""
    along = [tap.shared.type() for tap in taps]
    cost = pt.add(
        pt.constant(0.0), *[(tap.shared * direction).sum() for tap, direction in zip(taps, along, strict=True)]
    )
    back = pt.grad(cost, piece, consider_constant=along)
    by_rows = [tap.by_rows(slopes[tap.tap]) for tap in taps]
    [rows] = vectorised([back], dict(zip(along, by_rows, strict=True)))
    return rows
