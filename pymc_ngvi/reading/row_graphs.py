"""Graphs of rows, written for those who evaluate them."""

import itertools

from dataclasses import replace

import numpy as np
import pytensor.tensor as pt

from numpy.typing import NDArray
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors, toposort

from pymc_ngvi.ops.scalars import ScalarForm
from pymc_ngvi.reading.terms import Rows

# --- what a function of rows tells of its second derivatives before any is made: which are not 0, and that they exist
# ---


type Slots = frozenset[Variable]
type Pairs = frozenset[tuple[Variable, Variable]]

_NONE: Slots = frozenset()


def is_smooth(rows: Rows) -> bool:
    """Tell whether a row is made of common operations alone, all of which have second derivatives."""
    return all(ScalarForm.of(node) is not ScalarForm.FUNCTION for node in toposort([rows.value]))


def interacting(rows: Rows) -> list[tuple[int, int]]:
    """Return the pairs of predictors by which a row can have a second derivative other than 0."""
    number = {slot: i for i, slot in enumerate(rows.slots)}
    depends: dict[Variable, Slots] = {slot: frozenset([slot]) for slot in rows.slots}
    pairs: dict[Variable, Pairs] = {}
    for node in toposort([rows.value]):
        made = _pairs(node, depends, pairs)
        for out in node.outputs:
            depends[out] = frozenset().union(*(depends.get(i, _NONE) for i in node.inputs))
            pairs[out] = made
    found = {(number[a], number[b]) for a, b in pairs.get(rows.value, frozenset())}
    return sorted((max(pair), min(pair)) for pair in {(max(pair), min(pair)) for pair in found})


def _pairs(node: Apply, depends: dict[Variable, Slots], pairs: dict[Variable, Pairs]) -> Pairs:
    """Return the pairs that interact in the output of a node."""
    form, by_input = ScalarForm.of(node), [depends.get(i, _NONE) for i in node.inputs]
    linear = form.linear_in(len(by_input))
    found = [pairs.get(node.inputs[k], frozenset()) for k in linear]
    found += [frozenset(itertools.product(by_input[a], by_input[b])) for a, b in form.multiplied(len(by_input))]
    if form not in (ScalarForm.STEP, ScalarForm.CHOICE):
        bent: Slots = frozenset().union(*(slots for k, slots in enumerate(by_input) if k not in linear))
        found.append(frozenset(itertools.product(bent, bent)))
    return frozenset().union(*found)


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
