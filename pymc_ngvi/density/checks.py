"""What kinds of model can be fitted, and the error for each that can't."""

import warnings

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pymc as pm
import pytensor.tensor as pt

from pymc.backends.arviz import find_observations
from pymc.data import MinibatchIndexRV, MinibatchOp
from pymc.distributions.censored import CensoredRV
from pymc.distributions.simulator import SimulatorRV
from pymc.distributions.truncated import TruncatedRV
from pymc.variational.minibatch_rv import MinibatchRandomVariable, get_scaling
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Constant, Variable
from pytensor.graph.traversal import ancestors, walk
from pytensor.tensor.shape import Shape, Shape_i

from pymc_ngvi.core.refusal import Reason, RefusedFor
from pymc_ngvi.graphs.rewrites import behind
from pymc_ngvi.reading.affine import Factor, Role, logp_of

# --- data that no fit can do much with: values that are not finite, and values that are all equal ---


def not_finite_data(model: pm.Model, names: Iterable[str]) -> list[str]:
    """Return the arrays with values that are not finite among what some variables are made of, in words.

    Infinite bounds of censored and truncated variables are none of these.
    """
    found: dict[str, None] = {}
    variables = set(model.basic_RVs)
    for name in names:
        var = model[name]
        of_rv = list(var.owner.inputs) if var in variables else [var]
        may_be_infinite = isinstance(getattr(var.owner, "op", None), CensoredRV | TruncatedRV)
        for part in walk(of_rv, lambda v: None if v.owner is None or v in variables else list(v.owner.inputs)):
            values = _values(part)
            if values is None or values.ndim == 0:
                continue
            bad = np.isnan(values) if may_be_infinite else ~np.isfinite(values)
            if bad.any():
                which = repr(part.name) if part.name else f"an array in {name!r}"
                found[f"{which} ({int(bad.sum()):,} of {bad.size:,} values)"] = None
    return list(found)


def _values(var: Variable) -> np.ndarray | None:
    """Return the numbers of data; None for anything else."""
    if isinstance(var, SharedVariable):
        value = var.get_value(borrow=True)
    elif isinstance(var, Constant):
        value = var.data
    else:
        return None
    return value if isinstance(value, np.ndarray) and value.dtype.kind == "f" else None


def constant_data(model: pm.Model) -> list[str]:
    """Return the continuous observed variables whose values are all equal, in words."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of observations that are a graph
        observed = find_observations(model)
    continuous = {rv.name for rv in model.observed_RVs if rv.dtype.startswith("float")}
    values = {name: np.asarray(value) for name, value in observed.items() if name in continuous}
    return [f"{name!r} (all {v.flat[0]:g})" for name, v in values.items() if v.size > 1 and np.ptp(v) == 0.0]


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
    # Variables that read a minibatch have to be scaled to the whole data.
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
            stacklevel=3,
        )


def of_batches(model: pm.Model) -> frozenset[str]:
    """Return the names of the Deterministics that read ``pm.Minibatch`` data: their rows are those of one batch."""
    free = set(model.free_RVs)
    return frozenset(d.name for d in model.deterministics if _reads_minibatch([d], free))


def _reads_minibatch(inputs: list[Variable], variables: set[Variable]) -> bool:
    """Tell whether values of Minibatch data enter, other than through the model's ``variables`` or through shapes."""
    found = behind(
        inputs, lambda v: () if v in variables or isinstance(v.owner.op, Shape | Shape_i) else v.owner.inputs
    )
    return any(var.owner is not None and isinstance(var.owner.op, MinibatchOp | MinibatchIndexRV) for var in found)


def broadcasts(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Tell whether an array of a shape can be broadcast to another one."""
    try:
        return np.broadcast_shapes(shape, wanted) == wanted
    except ValueError:
        return False


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


# --- the Gauss-Newton matrix of a model, row by row: squares of the gradients of single observations ---
#
# Khan & Nielsen (2018), "Fast yet simple natural-gradient descent for variational inference in complex models": VOGN
# replaces the Hessian of the log likelihood by minus the sum of g_i g_i^T over its rows i, which is never indefinite.


_INSTEAD = "Use estimator='price', which needs only derivatives of the whole log density."


@dataclass(frozen=True)
class LikelihoodRows:
    """The log density of a model in two parts: the rows of its observed variables, and all else."""

    model: pm.Model
    #: Of the model.
    factors: Sequence[Factor]

    def graphs(self) -> tuple[list[Variable], list[Variable], Variable]:
        """Return the log density by rows, and what is left of it, as functions of the value variables."""
        observed = self._of_role("observed")
        self._check_kinds(observed)
        values = [self.model.rvs_to_values[factor.variable] for factor in observed]
        joint = [f.name for f, value in zip(observed, values, strict=True) if f.logp.type.ndim != value.type.ndim]
        if joint:
            raise ValueError(
                f"The log density of the observed variables {quoted(joint)} is not one of each element: their "
                "distribution is multivariate. estimator='gauss_newton' squares the gradients of single, independent "
                f"observations. {_INSTEAD}"
            )
        scales = [_scale(factor.variable, value) for factor, value in zip(observed, values, strict=True)]
        return [factor.logp for factor in observed], scales, logp_of(self._of_role("prior"))

    def _of_role(self, role: Role) -> list[Factor]:
        return [factor for factor in self.factors if factor.role == role]

    def _check_kinds(self, observed: list[Factor]) -> None:
        if not observed:
            raise ValueError(
                "The model has no observed variables; estimator='gauss_newton' squares the gradients of single "
                f"observations, and there are none. {_INSTEAD}"
            )
        if potentials := self._of_role("potential"):
            raise ValueError(
                f"The model has Potentials ({quoted(p.name for p in potentials)}), which may add anything to the "
                "log density; estimator='gauss_newton' squares the gradients of single observations, and can't tell "
                f"those of a Potential apart. Write them as observed variables (pm.CustomDist). {_INSTEAD}"
            )


def _scale(rv: Variable, value: Variable) -> Variable:
    if not isinstance(rv.owner.op, MinibatchRandomVariable):
        return pt.constant(1.0)
    return get_scaling(rv.owner.inputs[1:], value.shape)
