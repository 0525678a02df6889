"""Graphs of rows, written for those who evaluate them."""

from dataclasses import replace

import numpy as np
import pytensor.tensor as pt

from numpy.typing import NDArray
from pytensor.graph.basic import Variable
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors

from pymc_ngvi.reading.interacting import interacting
from pymc_ngvi.reading.terms import Rows


def shared_first(rows: Rows) -> tuple[Rows, int]:
    """Return rows with predictors that all of them share first, and how many these are; none of a single row."""
    is_shared = (rows.index == rows.index[0]).all(axis=0) & (len(rows.index) > 1)
    order = np.argsort(~is_shared, kind="stable")
    index, slots = np.ascontiguousarray(rows.index[:, order]), [rows.slots[a] for a in order]
    return replace(rows, index=index, slots=slots), int(is_shared.sum())


def interacts(rows: Rows) -> NDArray[np.bool_]:
    """Return by which pairs of predictors second derivatives may differ from 0: any, of what is not looked into."""
    k = len(rows.slots)
    if rows.is_whole:
        return np.ones((k, k), dtype=bool)
    result = np.zeros((k, k), dtype=bool)
    for a, b in interacting(rows):
        result[a, b] = result[b, a] = True
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
