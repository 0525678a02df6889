"""What a function of rows tells of its second derivatives before any is made: which are not 0, and that they exist."""

import itertools

from pytensor.graph.basic import Apply, Variable
from pytensor.graph.traversal import toposort

from pymc_ngvi.ops.scalars import ScalarForm
from pymc_ngvi.reading.terms import Rows

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
