"""How the elements of outputs are made of those of inputs: dependence, interaction and linearity all follow from it."""

import math

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pytensor.graph.basic import Apply, Variable
from pytensor.graph.op import Op
from pytensor.raise_op import CheckAndRaise
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.utils import _parse_gufunc_signature

from pymc_ngvi.core.refusal import TooDenseError
from pymc_ngvi.core.sparsity.dependence_sets import Bools, Dependence, Ints, everything, joined, union
from pymc_ngvi.core.sparsity.interaction_pairs import Pairs
from pymc_ngvi.graphs.backends import without_c
from pymc_ngvi.ops.facts import Facts
from pymc_ngvi.ops.ways import Way

#: From a variable through which derivatives pass to its dependence.
type Of = Callable[[Variable], Dependence]
#: Which elements of inputs are used linearly.
type Uses = list[tuple[Variable, Bools]]


@dataclass(frozen=True)
class Elements:
    """How the elements of the outputs of a node are made of those of its inputs; nothing is known of it but that."""

    node: Apply
    facts: Facts

    def depends(self, of: Of) -> list[Dependence]:
        """Return the dependence of each output: each element on all elements of all inputs."""
        node, facts = self.node, self.facts
        steps = not all(facts.is_known(i) or facts.is_active(i) for i in node.inputs)
        if steps and any(None in out.type.shape for out in node.outputs):
            raise TooDenseError  # even the shape may depend on theta
        parts = [of(i) for i in facts.active_inputs(node)]
        return [everything(parts, facts.shape(out)) for out in node.outputs]

    def uses(self, used: list[Bools], of: Of, pairs: Pairs) -> Uses | None:
        """Return which elements of inputs come linearly into used ones of the outputs, and note what interacts."""
        return None

    def is_linear(self, varying: list[Variable]) -> bool:
        """Tell whether the outputs are affine functions of the inputs that vary, all others fixed."""
        return False

    def added_axes(self, var: Variable) -> tuple[int, ...] | None:
        """Return the axes of an input along which it is added up; None where it is not."""
        return None


@dataclass(frozen=True)
class FromWays(Elements):
    """An output that inputs come into, each in its way."""

    #: shape (Variable, Way).
    ways: Sequence[tuple[Variable, Way]]
    #: Those in which it is linear, given the others.
    linear: Sequence[Variable] = ()
    #: Pairs of these that multiply each other, or that one divides; shape (Variable, Variable).
    products: Sequence[tuple[Variable, Variable]] = ()
    #: Whether the products are those of the columns of one with the rows of the other.
    is_inner: bool = False
    #: Where one of these is known to be 0, so is the output.
    factors: Sequence[Variable] = ()

    def depends(self, of: Of) -> list[Dependence]:  # noqa: D102
        parts = [way.spread(of(var)) for var, way in self._active()]
        made = union(parts, self.facts.shape(self.node.outputs[0]))
        for keep in self._kept():
            made = made.kept(keep)
        return [made] * len(self.node.outputs)

    def uses(self, used: list[Bools], of: Of, pairs: Pairs) -> Uses | None:  # noqa: D102
        if not any(map(self.facts.is_active, self.linear)):
            return None
        mask = used[0]
        for keep in self._kept():
            mask = mask & keep
        for a, b in self.products:
            if self.facts.is_active(a) and self.facts.is_active(b):
                self._note(of(a), of(b), mask, pairs)
        uses = []
        for var, way in self._active():
            if var in self.linear:
                uses.append((var, way.gathered(mask)))
            else:
                pairs.add_within(of(var), way.gathered(mask))
        return uses

    def is_linear(self, varying: list[Variable]) -> bool:  # noqa: D102
        multiplied = any(a in varying and b in varying for a, b in self.products)
        return not multiplied and all(var in self.linear for var in varying)

    def added_axes(self, var: Variable) -> tuple[int, ...] | None:  # noqa: D102
        return next((way.adds for other, way in self.ways if other is var), None)

    def _active(self) -> list[tuple[Variable, Way]]:
        return [(var, way) for var, way in self.ways if self.facts.is_active(var)]

    def _kept(self) -> Iterator[Bools]:
        """Yield where known factors are not 0, of those that are so somewhere."""
        for var in self.factors:
            if self.facts.is_known(var):
                keep = np.asarray(self.facts.value(var)) != 0
                if not keep.all():
                    yield keep

    def _note(self, a: Dependence, b: Dependence, used: Bools, pairs: Pairs) -> None:
        if self.is_inner:
            a, b = a.reduced([-2]), b.reduced([-1])
            used = np.ones(np.broadcast_shapes(a.index.shape, b.index.shape), dtype=bool)
        pairs.add_across(a, b, used)


@dataclass(frozen=True)
class Rearranged(Elements):
    """Outputs each element of which is one element of an input, or known.

    The Op is run on whole numbers in the place of values, to see where these go.
    """

    #: The first ones, whose elements move.
    inputs: Sequence[Variable]

    def origins(self, numbers: list[Ints]) -> list[Ints]:
        """Run the node on whole numbers, those of each input in its shape."""
        if isinstance(self.node.op, CheckAndRaise):
            return numbers
        # In double precision, as the Op expects; it holds these numbers exactly.
        values = [np.asarray(n, dtype=np.float64) for n in numbers]
        values += [self.facts.value(i) for i in self.node.inputs[len(numbers) :]]
        storage: list[list[Any]] = [[None] for _ in self.node.outputs]
        with without_c():  # a Blockwise Op makes a function of its core
            self.node.op.perform(self.node, values, storage)
        return [np.asarray(cell[0]).astype(np.int64) for cell in storage]

    def numbered(self) -> tuple[list[Ints], Ints]:
        """Return the elements of all inputs, counted from 1; and where the numbers of each input end."""
        shapes = [self.facts.shape(var) for var in self.inputs]
        ends = 1 + np.cumsum([math.prod(shape) for shape in shapes])
        starts = [1, *ends[:-1].tolist()]
        return [start + np.arange(math.prod(s)).reshape(s) for start, s in zip(starts, shapes, strict=True)], ends

    def depends(self, of: Of) -> list[Dependence]:  # noqa: D102
        active = list(filter(self.facts.is_active, self.inputs))
        sets, indices = joined([of(var) for var in active])
        by_input = dict(zip(active, indices, strict=True))
        return [
            Dependence(sets, index)
            for index in self.origins(
                [by_input[i] if i in by_input else np.zeros(self.facts.shape(i), dtype=np.int64) for i in self.inputs]
            )
        ]

    def uses(self, used: list[Bools], of: Of, pairs: Pairs) -> Uses | None:  # noqa: D102
        numbers, ends = self.numbered()
        flags = np.zeros(ends[-1], dtype=bool)
        for origin, mask in zip(self.origins(numbers), used, strict=True):
            flags[origin[mask]] = True
        flags[0] = False
        return [(var, flags[number]) for var, number in zip(self.inputs, numbers, strict=True)]

    def is_linear(self, varying: list[Variable]) -> bool:  # noqa: D102
        return all(var in self.inputs for var in varying)


class EntryByEntry(Elements):
    """Outputs each entry of which is made of all of that entry of the inputs."""

    def depends(self, of: Of) -> list[Dependence]:  # noqa: D102
        signature = getattr(self.node.op, "signature", None) or self.node.op.gufunc_signature
        inputs, outputs = _parse_gufunc_signature(signature)
        n_in, n_out = [len(axes) for axes in inputs], [len(axes) for axes in outputs]
        shapes = [self.facts.shape(out) for out in self.node.outputs]
        parts = []
        for var, n_core in zip(self.node.inputs, n_in, strict=True):
            if self.facts.is_active(var):
                part = of(var)
                parts.append(part.reduced(range(part.index.ndim - n_core, part.index.ndim)))
        made = union(parts, shapes[0][: len(shapes[0]) - n_out[0]])
        return [
            Dependence(made.sets, made.index.reshape(made.index.shape + (1,) * n_core)).spread(shape)
            for shape, n_core in zip(shapes, n_out, strict=True)
        ]


def core_op(op: Op) -> Op:
    """Return what a Blockwise Op does with each entry of its batch; any other Op itself."""
    return op.core_op if isinstance(op, Blockwise) else op
