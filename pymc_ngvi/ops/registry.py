"""All operations: what is known of each, by the type of its Op."""

from pytensor.graph.basic import Apply
from pytensor.graph.op import Op
from pytensor.tensor.blockwise import Blockwise

from pymc_ngvi.ops import elementwise, movement, products, reductions, refused
from pymc_ngvi.ops.elements import Elements, EntryByEntry, has_core_axes
from pymc_ngvi.ops.facts import Facts
from pymc_ngvi.ops.record import OpRecord

OPERATIONS: dict[type, OpRecord] = {}
#: Of what is not in the table.
UNKNOWN = OpRecord.refused("makes each element of many")
#: Of batches of what is said of single ones alone.
BATCH = OpRecord.refused("makes each element of all of its entry of a batch")


def register(operations: dict[type, OpRecord]) -> None:
    """Add the records of operations, by the types of their Ops; subclasses have those of the nearest class."""
    OPERATIONS.update(operations)


for family in (movement, elementwise, reductions, products, refused):
    register(family.OPERATIONS)


def operation(op: Op) -> OpRecord:
    """Return what is known of an operation."""
    is_batch = isinstance(op, Blockwise)
    kind = type(op.core_op if is_batch else op)
    found = next((OPERATIONS[base] for base in kind.__mro__ if base in OPERATIONS), UNKNOWN)
    return BATCH if is_batch and not found.by_batch and found is not UNKNOWN else found


def elements(node: Apply, facts: Facts) -> Elements:
    """Return how the elements of the outputs of a node are made of those of its inputs."""
    rule = operation(node.op).elements
    found = None if isinstance(rule, str) else rule(node, facts)
    return found or (EntryByEntry if has_core_axes(node.op) else Elements)(node, facts)
