"""What is known of one operation of a graph: a record with an answer to each reading, or a refusal in words."""

import math

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pytensor.graph.basic import Apply, Variable

from pymc_ngvi.core.sparsity.dependence_sets import Ints
from pymc_ngvi.ops.elements import Elements
from pymc_ngvi.ops.facts import Facts
from pymc_ngvi.ops.lifting import Lifting

#: Refusals that many operations share; each follows the name of the operation.
OF_MANY = "makes each element of many"
PASS = "takes a pass over its elements"
MIXES = "is not known to keep rows apart"
NOT_HOMOGENEOUS = "does not multiply its result by a power of what its argument is multiplied by"


class Extra(NamedTuple):
    """What a node takes beside a pass over its elements: counts of each sort."""

    #: Calls of other functions.
    thunks: int = 0
    #: Elements that Python computes one by one.
    in_python: int = 0
    #: Derivatives of incomplete beta and gamma functions.
    in_tails: int = 0
    #: Of differential equations.
    solutions: int = 0
    #: Elements of a matrix that is multiplied.
    read: int = 0
    #: Elements of an exp, a log and the like.
    functions: int = 0


def largest(variables: Sequence[Variable], unknown: int) -> int:
    """Return the elements of the largest of some variables; those of ``unknown`` size, at least."""
    return max((_elements(var, unknown) for var in variables), default=1)


def _elements(var: Variable, unknown: int) -> int:
    shape = getattr(var.type, "shape", ())
    size = int(math.prod(length for length in shape if length is not None))
    return max(size, unknown) if None in shape else size


@dataclass(frozen=True)
class OpRecord:
    """What is known of an operation.

    A string in the place of a function says why there is none, in words that follow the name of the operation.
    """

    #: From a node and what is known of its graph to how its elements are made of those of its inputs: on what they
    #: depend, in what they are linear, what interacts in them, and what moves. None where this node is like one of
    #: which nothing is known.
    elements: Callable[[Apply, Facts], Elements | None] | str
    #: From what lifts, a node, an output and flat positions in it to these elements as a function of rows.
    lift: Callable[[Lifting, Apply, Variable, Ints], Variable] | str = OF_MANY
    #: From a node to the power of each input's factor in that of the output, where an input is multiplied by a
    #: number: what can be factored out. None for an input that no factor comes out of.
    degrees: Callable[[Apply], Sequence[float | None]] | str = NOT_HOMOGENEOUS
    #: From a node, an output and an axis of it to the axis of the inputs that it is, so that rows along it stay
    #: apart. None where there is no such axis.
    axis: Callable[[Apply, Variable, int], int | None] | str = MIXES
    #: From a node, and the size of what has none that is known, to what it takes beside a pass over its elements.
    work: Callable[[Apply, int], Extra] | str = PASS
    #: Whether the same holds of a batch of it.
    by_batch: bool = field(default=False, kw_only=True)

    @classmethod
    def refused(cls, why: str, **others: Any) -> "OpRecord":
        """Return the record of an operation that is not taken apart, but for some readings."""
        return cls(**dict.fromkeys(("elements", "lift", "degrees", "axis"), why) | others)
