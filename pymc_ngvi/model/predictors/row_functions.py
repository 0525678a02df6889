"""Functions of rows, compiled."""

import functools

from dataclasses import replace

import numpy as np
import pytensor
import pytensor.tensor as pt

from numpy.typing import NDArray
from pytensor.compile import Function
from pytensor.graph.basic import Variable
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors

from pymc_ngvi.core.values import Array
from pymc_ngvi.model.graphs.backends import without_c
from pymc_ngvi.model.predictors.compiled import CompiledOnce
from pymc_ngvi.model.predictors.expectation import RowFunction, SummedRowFunction, slices
from pymc_ngvi.model.predictors.interacting import interacting
from pymc_ngvi.model.predictors.terms import Rows

#: Points at a time of a function that is more than arithmetic with numbers.
_AT_A_TIME = 32


def row_function(rows: Rows, compile_: CompiledOnce) -> RowFunction:
    """Compile rows."""
    given, data = list(rows.data), list(rows.data.values())
    if rows.sum_ is None and not rows.is_whole:
        return _by_shared(rows, compile_)
    function, interacts = compile_([*rows.slots, *given], [rows.value]), _interacts(rows)
    if rows.sum_ is None:
        return RowFunction(functools.partial(_few_at_a_time, function), rows.index, data, interacts)
    with without_c():
        path = path_of(rows, rows.sum_)
        beside, inputs, value = of_sum(rows, rows.sum_)
    compiled = compile_([*rows.slots[: -rows.n_summed], *given], path), compile_([*inputs, *given], [value])
    per_row = [not d.type.broadcastable[1] for d in given]
    return SummedRowFunction(function, rows.index, data, interacts, rows.n_summed, *compiled, beside, per_row)


def with_data(function: RowFunction, rows: Rows) -> RowFunction:
    """Return the function of the same rows with other data."""
    return replace(function, data=list(rows.data.values()))


def _by_shared(rows: Rows, compile_: CompiledOnce) -> RowFunction:
    """Compile rows, with predictors that all of them share first, and these with one column."""
    rows, n_shared = shared_first(rows)
    slots, value = with_one_column(rows, n_shared)
    function = compile_([*slots, *rows.data], [value])
    return RowFunction(function, rows.index, list(rows.data.values()), _interacts(rows), n_shared=n_shared)


def shared_first(rows: Rows) -> tuple[Rows, int]:
    """Return rows with predictors that all of them share first, and how many these are; none of a single row."""
    is_shared = (rows.index == rows.index[0]).all(axis=0) & (len(rows.index) > 1)
    order = np.argsort(~is_shared, kind="stable")
    index, slots = np.ascontiguousarray(rows.index[:, order]), [rows.slots[a] for a in order]
    return replace(rows, index=index, slots=slots), int(is_shared.sum())


def with_one_column(rows: Rows, n_shared: int) -> tuple[list[Variable], Variable]:
    """Return predictors and function of rows where those that all share, which are first, have one column."""
    shared = [pt.matrix(slot.name, dtype="float64", shape=(None, 1)) for slot in rows.slots[:n_shared]]
    with without_c():
        [value] = clone_replace(
            [rows.value], dict(zip(rows.slots[:n_shared], shared, strict=True)), rebuild_strict=False
        )
    return [*shared, *rows.slots[n_shared:]], value


def _interacts(rows: Rows) -> NDArray[np.bool_]:
    """Return by which pairs of predictors second derivatives may differ from 0: any, of what is not looked into."""
    k = len(rows.slots)
    if rows.is_whole:
        return np.ones((k, k), dtype=bool)
    result = np.zeros((k, k), dtype=bool)
    for a, b in interacting(rows):
        result[a, b] = result[b, a] = True
    return result


def _few_at_a_time(function: Function, *predictors: Array) -> list[Array]:
    """Evaluate what may take much memory at a point."""
    parts = [function(*[p[at] for p in predictors])[0] for at in slices(len(predictors[0]), _AT_A_TIME)]
    return [np.concatenate(parts)]


def path_of(rows: Rows, sum_: Variable) -> list[Variable]:
    """Return the sum where all that it is a sum of is 0, and its slopes in these: functions of the others."""
    summed = rows.slots[-rows.n_summed :]
    zeros = {slot: pt.zeros((1, 1)) for slot in summed}
    outputs = [sum_, *pytensor.grad(sum_.sum(), summed)]
    result: list[Variable] = clone_replace(outputs, zeros, rebuild_strict=False)
    return result


def of_sum(rows: Rows, sum_: Variable) -> tuple[list[int], list[Variable], Variable]:
    """Return which of the others a row depends on beside the sum, its inputs (these, and the sum), and the row."""
    others = rows.slots[: -rows.n_summed]
    total = pt.matrix("sum", dtype="float64")
    flat = [pt.tensor("other", dtype="float64", shape=(1, None)) for _ in others]
    replaced = {sum_: total, **dict(zip(others, flat, strict=True))}
    [value] = clone_replace([rows.value], replaced, rebuild_strict=False)
    used = set(ancestors([value]))
    beside = [a for a, var in enumerate(flat) if var in used]
    return beside, [*(flat[a] for a in beside), total], value
