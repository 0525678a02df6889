"""Whether what was built of a model serves another fit of it: all but the values of the data is built in."""

from collections.abc import Mapping
from dataclasses import dataclass

import pymc as pm

from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Variable
from pytensor.graph.traversal import ancestors

from pymc_ngvi.core.refusal import Reason, RefusedFor
from pymc_ngvi.density.checks import quoted


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
