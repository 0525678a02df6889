"""Operations that are not taken apart, and why."""

from pymc.distributions.dist_math import SplineWrapper
from pytensor.compile.builders import OpFromGraph
from pytensor.graph.basic import Apply
from pytensor.scan.op import Scan
from pytensor.tensor.basic import AllocEmpty, ARange, Eye
from pytensor.tensor.linalg.decomposition.eigen import Eigh
from pytensor.tensor.linalg.inverse import MatrixInverse
from pytensor.tensor.linalg.products import Expm
from pytensor.tensor.linalg.summary import Det, SLogDet
from pytensor.tensor.math import Argmax
from pytensor.tensor.random.op import RNGConsumerOp
from pytensor.tensor.shape import Shape, Shape_i
from pytensor.tensor.signal.conv import AbstractConvolveNd
from pytensor.tensor.sort import ArgSortOp, SortOp

from pymc_ngvi.graphs.odes import Solution
from pymc_ngvi.ops.record import Extra, OpRecord

_OF_MATRIX = "makes each element of all those of a matrix"
_LENGTHS = "tells or takes lengths, and moves no values"
_BY_ORDER = "depends on the order of values"


def _steps(node: Apply, unknown: int) -> Extra:
    n_steps = getattr(node.inputs[0], "data", None)
    return Extra(thunks=(unknown if n_steps is None else int(n_steps)) * len(node.op.fgraph.apply_nodes))


OPERATIONS: dict[type, OpRecord] = {
    **dict.fromkeys((Det, Eigh, Expm, SLogDet), OpRecord.refused(_OF_MATRIX)),
    MatrixInverse: OpRecord.refused(_OF_MATRIX, degrees=lambda node: [-1.0], by_batch=True),
    **dict.fromkeys((AllocEmpty, ARange, Eye, Shape, Shape_i), OpRecord.refused(_LENGTHS)),
    **dict.fromkeys((Argmax, ArgSortOp, SortOp), OpRecord.refused(_BY_ORDER)),
    AbstractConvolveNd: OpRecord.refused("adds up products of neighbours"),
    OpFromGraph: OpRecord.refused("stands for a graph, which is read in its place"),
    RNGConsumerOp: OpRecord.refused("draws at random"),
    Scan: OpRecord.refused("runs a graph of its own, step by step", work=_steps),
    Solution: OpRecord.refused("solves differential equations", work=lambda node, unknown: Extra(solutions=1)),
    SplineWrapper: OpRecord.refused("evaluates a spline, whose derivatives it alone knows"),
}
