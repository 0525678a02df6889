"""What kinds of model can be fitted, and the error for each that can't."""

import warnings

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import pymc as pm

from pymc.data import MinibatchIndexRV, MinibatchOp
from pymc.distributions.simulator import SimulatorRV
from pymc.variational.minibatch_rv import MinibatchRandomVariable
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Variable
from pytensor.graph.traversal import ancestors, walk
from pytensor.tensor.shape import Shape, Shape_i

from pymc_ngvi.core.refusal import Reason, RefusedFor


def check_model(model: pm.Model) -> None:
    """Raise ValueError, with names and a cure, if the model can't be fitted by a continuous approximation."""
    simulators = [rv.name for rv in model.basic_RVs if isinstance(getattr(rv.owner, "op", None), SimulatorRV)]
    if simulators:
        raise ValueError(
            f"The model has pm.Simulator variables ({quoted(simulators)}), which have no log density with a gradient. "
            "Fit it with pm.sample_smc."
        )
    if not model.free_RVs:
        raise ValueError(
            f"The model has no free variables (variables: {quoted(v.name for v in model.basic_RVs) or 'none'}): "
            "there is nothing to fit. Add at least one unobserved continuous variable."
        )
    _check_minibatches(model)


def _check_minibatches(model: pm.Model) -> None:
    """Refuse variables that read a minibatch and are not scaled to the whole data; warn of those that can't be."""
    variables = set(model.basic_RVs)
    unscaled = [
        rv.name
        for rv in model.observed_RVs
        if not isinstance(rv.owner.op, MinibatchRandomVariable)
        and _reads_minibatch([*rv.owner.inputs, model.rvs_to_values[rv]], variables)
    ]
    if unscaled:
        raise ValueError(
            f"Observed variables {quoted(unscaled)} read pm.Minibatch data without a total_size: the batch would count "
            "as all of the data. Give each total_size=, the number of rows of the whole data."
        )
    free = [rv.name for rv in model.free_RVs if _reads_minibatch(rv.owner.inputs, variables)]
    if free:
        raise ValueError(
            f"Free variables {quoted(free)} depend on pm.Minibatch data, so that each batch has another prior; PyMC "
            "scales observed variables only. Let them depend on the full data."
        )
    potentials = [p.name for p in model.potentials if _reads_minibatch([p], variables)]
    if potentials:
        warnings.warn(
            f"Potentials {quoted(potentials)} depend on pm.Minibatch data, and PyMC can't scale them: multiply each by "
            "the number of rows of the whole data over the batch size, unless that is done already.",
            UserWarning,
            stacklevel=4,
        )


def of_batches(model: pm.Model) -> frozenset[str]:
    """Return the names of the Deterministics that read ``pm.Minibatch`` data: their rows are those of one batch."""
    free = set(model.free_RVs)
    return frozenset(d.name for d in model.deterministics if _reads_minibatch([d], free))


def _reads_minibatch(inputs: list[Variable], variables: set[Variable]) -> bool:
    """Tell whether values of Minibatch data enter, other than through the model's ``variables`` or through shapes."""

    def expand(var: Variable) -> list[Variable] | None:
        if var.owner is None or var in variables or isinstance(var.owner.op, Shape | Shape_i):
            return None
        return list(var.owner.inputs)

    return any(
        var.owner is not None and isinstance(var.owner.op, MinibatchOp | MinibatchIndexRV)
        for var in walk(inputs, expand)
    )


def quoted(names: Iterable[str]) -> str:
    """List names for a message."""
    return ", ".join(repr(name) for name in names)


# --- whether what was built of a model serves another fit of it: all but the values of the data is built in ---


class CannotReuse(RefusedFor):
    """What was built of a model does not serve the next fit; the message says why, as a clause."""

    reason = Reason.NOT_REUSED


@dataclass(frozen=True)
class ModelState:
    """What is built into the functions of a model."""

    #: Variables, their values, transforms and initial values: compared by identity.
    parts: tuple[object, ...]
    #: Of the data, and of all else that the model shares, by variable.
    shapes: dict[Variable, tuple[int, ...]]

    @classmethod
    def of(cls, model: pm.Model) -> "ModelState":
        """Note what a model is now."""
        of_variables = (model.rvs_to_values, model.rvs_to_transforms, model.rvs_to_initial_values)
        named = [*model.basic_RVs, *model.potentials, *model.deterministics]
        parts = (*named, model.check_bounds, *(part for mapping in of_variables for part in mapping.values()))
        values = [value for value in model.rvs_to_values.values() if value is not None]
        shared = [v for v in ancestors([*named, *values]) if isinstance(v, SharedVariable)]
        arrays = {v: v.get_value(borrow=True) for v in shared}
        return cls(parts, {v: array.shape for v, array in arrays.items() if hasattr(array, "shape")})

    def check(self, now: "ModelState") -> None:
        """Raise CannotReuse if the model is another one now, or the shapes of its data are."""
        same = len(self.parts) == len(now.parts) and self.shapes.keys() == now.shapes.keys()
        if not (same and all(a is b for a, b in zip(self.parts, now.parts, strict=True))):
            raise CannotReuse("its variables, or their initial values, have changed")
        changed = {v: shape for v, shape in self.shapes.items() if shape != now.shapes[v]}
        if changed:
            shapes = ", ".join(sorted({f"{shape} then and {now.shapes[v]} now" for v, shape in changed.items()}))
            names = quoted(sorted(str(v.name) for v in changed))
            raise CannotReuse(f"the shapes of {names} have changed ({shapes})")


def same_options(one: Mapping[str, object] | None, other: Mapping[str, object] | None) -> bool:
    """Tell whether options are the same; where their values can't be compared, they must be the same objects."""
    one, other = one or {}, other or {}
    return one.keys() == other.keys() and all(one[k] is other[k] or (one[k] == other[k]) is True for k in one)
