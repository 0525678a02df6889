"""Which pairs of coordinates interact in log p: the sparsity pattern of its Hessian, from its graph."""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from pytensor.graph.basic import Apply, Variable, clone

from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.core.refusal import TooDenseError
from pymc_ngvi.core.sparsity.dependence_sets import Bools, Pairs
from pymc_ngvi.graphs.graph import inline_inner_graphs
from pymc_ngvi.ops.elements import Uses
from pymc_ngvi.ops.facts import Facts
from pymc_ngvi.ops.registry import elements
from pymc_ngvi.reading.affine import Dependences

#: Entries of the lower triangle of a pattern, at most.
_MAX_ENTRIES = 40_000_000


@dataclass(frozen=True)
class HessianPattern:
    """The sparsity of a Hessian."""

    #: Every entry that is not 0 for all theta, and perhaps others; None where there are too many.
    pattern: Pattern | None
    #: Ops that were not understood, taken as functions in which all coordinates that they depend on interact.
    opaque: tuple[str, ...]


class PatternSearch:
    """Finds which entries of a Hessian can differ from 0, as often as data change.

    Notes
    -----
    A sum is linear, and so is what only moves elements. A product a b has the interactions of a, those of b, and those
    of the coordinates of a with the coordinates of b. In f(u) for any other function f, all coordinates of u interact,
    the kinks of absolute values and maxima included. The condition of a switch has no derivative, and counts for
    nothing.

    The work grows with the data and with the entries, never with the square of the dimension.
    """

    def __init__(self, logp: Variable, theta: Variable, varying: Collection[Variable] = ()) -> None:
        _, copied = clone([theta], [logp], copy_inputs=False)  # inlining replaces inputs of nodes
        [self._logp] = inline_inner_graphs(copied)
        self._theta = theta
        self._facts = Facts(self._logp, theta, varying)
        self._is_fresh = True

    def run(self, max_entries: int = _MAX_ENTRIES) -> HessianPattern:
        """Find the pattern for the data as they are now."""
        if not self._is_fresh:
            self._facts.refresh()
        self._is_fresh = False
        facts, dependences = self._facts, Dependences(self._facts, self._theta)
        pairs = Pairs(facts.shape(self._theta)[0])
        try:
            _Walk(facts, dependences, pairs).run(self._logp)
            pattern = pairs.pattern(max_entries)
        except TooDenseError:
            pattern = None
        return HessianPattern(pattern, tuple(sorted(dependences.opaque)))


class _Walk:
    """Goes from log p towards theta, through all that enters it linearly, and notes what interacts."""

    def __init__(self, facts: Facts, dependences: Dependences, pairs: Pairs) -> None:
        self.facts = facts
        self.dependences = dependences
        self.pairs = pairs

    def run(self, logp: Variable) -> None:
        """Visit each node once, after all that use it."""
        used: dict[Variable, Bools] = {logp: np.ones((), dtype=bool)}
        for node in reversed(self.facts.nodes):
            of_outputs = [used.pop(out, None) for out in node.outputs]
            if not any(u is not None and u.any() for u in of_outputs):
                continue
            for var, mask in self._visit(node, of_outputs):
                if self.facts.is_active(var):
                    used[var] = used[var] | mask if var in used else mask

    def _visit(self, node: Apply, used: list[Bools | None]) -> Uses:
        masks = [
            np.zeros(self.facts.shape(out), dtype=bool) if u is None else u
            for out, u in zip(node.outputs, used, strict=True)
        ]
        uses = elements(node, self.facts).uses(masks, self.dependences.of, self.pairs)
        if uses is not None:
            return uses
        for out, mask in zip(node.outputs, masks, strict=True):
            if mask.any() and self.facts.is_active(out):
                self.pairs.add_within(self.dependences.of(out), mask)
        return []
