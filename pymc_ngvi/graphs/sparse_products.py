"""Products with sparse matrices, for all draws at once.

PyTensor vectorises no sparse operation. A product is linear in its dense operand: draws are further columns, or rows.
"""

import pytensor.tensor as pt

from pytensor.graph.basic import Apply, Variable
from pytensor.graph.replace import _vectorize_node
from pytensor.sparse.math import Dot, StructuredDot
from pytensor.sparse.type import SparseTensorType


@_vectorize_node.register(Dot)  # type: ignore[untyped-decorator]
@_vectorize_node.register(StructuredDot)  # type: ignore[untyped-decorator]
def _product_of_draws(op: Dot | StructuredDot, node: Apply, left: Variable, right: Variable) -> list[Variable]:
    if isinstance(left.type, SparseTensorType) == isinstance(right.type, SparseTensorType):
        raise NotImplementedError("batches of products of two sparse matrices")
    if isinstance(right.type, SparseTensorType):
        rows = left.reshape((-1, left.shape[-1]))
        product = op(rows, right)
        return [product.reshape((*(left.shape[i] for i in range(left.type.ndim - 1)), product.shape[-1]))]
    n_batch = right.type.ndim - 2
    first = pt.moveaxis(right, n_batch, 0)  # (n, ..., k)
    product = op(left, first.reshape((first.shape[0], -1)))
    shaped = product.reshape((product.shape[0], *(first.shape[i] for i in range(1, first.type.ndim))))
    return [pt.moveaxis(shaped, 0, n_batch)]
