"""What is used of PyMC and PyTensor under private names, in one place for new versions of either."""

from pymc.distributions.multivariate import _LKJCholeskyCovRV as LKJCholeskyCovRV
from pymc.distributions.transforms import _default_transform as default_transform
from pymc.logprob.abstract import _logprob as logprob
from pytensor.graph.op import _NoPythonOp as NoPythonOp
from pytensor.graph.replace import _vectorize_node as vectorize_node
from pytensor.link.c.op import _NoPythonCOp as NoPythonCOp
from pytensor.tensor.utils import _parse_gufunc_signature as parse_signature

__all__ = [
    "LKJCholeskyCovRV",
    "NoPythonCOp",
    "NoPythonOp",
    "default_transform",
    "logprob",
    "parse_signature",
    "vectorize_node",
]
