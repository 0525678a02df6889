"""Which dims of a model whole numbers among its data index."""

import pymc as pm

from pytensor.compile.ops import ViewOp
from pytensor.graph.basic import Variable
from pytensor.graph.traversal import ancestors, walk
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.extra_ops import CumOp
from pytensor.tensor.math import Dot
from pytensor.tensor.subtensor import AdvancedSubtensor, IncSubtensor, indices_from_subtensor


def indexed_axes(model: pm.Model, name: str) -> tuple[set[str], set[tuple[str, int]]]:
    """Return the dims that a ``pm.Data`` indexes, and the variables, with the axis, where that has no dim."""
    data, dims = model[name], set()
    fixed: set[tuple[str, int]] = set()
    for var in ancestors([*model.basic_RVs, *model.deterministics, *model.potentials]):
        if var.owner is None or not isinstance(var.owner.op, AdvancedSubtensor):
            continue
        indices = indices_from_subtensor(var.owner.inputs[1:], var.owner.op.idx_list)
        for axis, index in enumerate(indices):
            if isinstance(index, Variable) and _is_made_of(index, data):
                for named in _named(model, var.owner.inputs[0]):
                    own = (model.named_vars_to_dims.get(named.name) or (None,) * named.type.ndim)[axis]
                    if own is None:
                        fixed.add((named.name, axis))
                    else:
                        dims.add(own)
    return dims, fixed


def _is_made_of(index: Variable, data: Variable) -> bool:
    """Tell whether data are an index, and not places in an array in which that is looked up."""

    def expand(var: Variable) -> list[Variable] | None:
        if var.owner is None:
            return None
        is_looked_up = isinstance(var.owner.op, AdvancedSubtensor)
        return list(var.owner.inputs[:1] if is_looked_up else var.owner.inputs)

    return any(var is data for var in walk([index], expand))


def _named(model: pm.Model, indexed: Variable) -> list[Variable]:
    """Return the variables of the model that what is indexed is, or is made of, with as many axes."""
    variables = {*model.basic_RVs, *model.deterministics}

    def expand(var: Variable) -> list[Variable] | None:
        """Go on where elements stay in their places: `concatenate([[0], effect])` has others than `effect`."""
        if var.owner is None or var in variables:
            return None
        if isinstance(var.owner.op, Elemwise | DimShuffle | ViewOp | CumOp):
            return list(var.owner.inputs)
        is_product = isinstance(var.owner.op, Dot) or getattr(var.owner.op, "core_op", None) == Dot()
        return list(var.owner.inputs[:1]) if is_product or isinstance(var.owner.op, IncSubtensor) else None

    return [v for v in walk([indexed], expand) if v in variables and v.type.ndim == indexed.type.ndim]
