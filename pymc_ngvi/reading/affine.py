"""Which variables of a graph are affine functions of theta, and which of them all else is made of."""

import functools

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pymc as pm
import pytensor.scalar as ps
import pytensor.tensor as pt

from pytensor.graph import clone_replace
from pytensor.graph.basic import Apply, Variable, clone
from pytensor.graph.traversal import ancestors, toposort
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.math import Dot

from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.core.refusal import TooDenseError
from pymc_ngvi.core.sparsity.dependence_sets import Bools, Dependence, Pairs, joined
from pymc_ngvi.graphs.backends import without_c
from pymc_ngvi.graphs.graph import inline_inner_graphs
from pymc_ngvi.ops.elements import Elements, Facts, Rearranged, core_op
from pymc_ngvi.ops.registry import elements
from pymc_ngvi.rows.row_hessian import MOST_ENTRIES

# --- which coordinates of theta each element of each variable of a graph depends on ---


class Dependences:
    """Computes the dependence of variables when it is asked for, and keeps it."""

    def __init__(self, facts: Facts, theta: Variable) -> None:
        self.facts = facts
        self.opaque: set[str] = set()
        self._done: dict[Variable, Dependence] = {theta: Dependence.identity(facts.shape(theta)[0])}
        self._position = {node: i for i, node in enumerate(facts.nodes)}

    def of(self, var: Variable) -> Dependence:
        """Return the dependence of an active variable."""
        for node in self._missing(var):
            found = elements(node, self.facts)
            if type(found) is Elements:
                self.opaque.add(type(core_op(node.op)).__name__)
            for out, made in zip(node.outputs, found.depends(self._done.__getitem__), strict=True):
                self._done[out] = made
        return self._done[var]

    def _missing(self, var: Variable) -> list[Apply]:
        missing: set[Apply] = set()
        stack = [var]
        while stack:
            node = stack.pop().owner
            if node is not None and node not in missing and node.outputs[0] not in self._done:
                missing.add(node)
                stack.extend(i for i in self.facts.active_inputs(node) if i not in self._done)
        return sorted(missing, key=self._position.__getitem__)


def dependence_of(outputs: list[Variable], facts: Facts, theta: Variable) -> Dependence:
    """Return the dependence of the elements of some variables, one after the other."""
    dependences = Dependences(facts, theta)
    sets, indices = joined([dependences.of(var) for var in outputs])
    return Dependence(sets, np.concatenate([index.ravel() for index in indices]))


def predictors(logp: Variable, theta: Variable, facts: Facts) -> list[Variable]:
    """Return the affine functions of theta that what is not affine is made of, in the order of the graph."""
    affine, nodes = affine_functions(theta, facts)
    # Conditions count, too, through which no derivative passes.
    others = (node for node in toposort([logp]) if node not in nodes)
    return list(dict.fromkeys(_root(i, facts) for node in others for i in node.inputs if i in affine))


def grouped(logp: Variable, facts: Facts, theta: Variable) -> Variable:
    """Return log p with the affine operands of sums that are not affine added up first."""
    affine, nodes = affine_functions(theta, facts)
    sums = {}
    for node in facts.nodes:
        if node in nodes or not isinstance(node.op, Elemwise) or not isinstance(node.op.scalar_op, ps.Add):
            continue
        parts = [i for i in node.inputs if i in affine]
        others = [i for i in node.inputs if i not in affine]
        if len(parts) > 1:
            sums[node.outputs[0]] = node.op(node.op(*parts), *others)
    return with_others(logp, sums)


def with_others(logp: Variable, others: dict[Variable, Variable]) -> Variable:
    """Return log p with other variables in the place of some; these may be made of one another."""
    if not others:
        return logp
    [result] = clone_replace([logp], others, rebuild_strict=False)
    return result


def affine_functions(theta: Variable, facts: Facts) -> tuple[set[Variable], set[Apply]]:
    """Return the variables that are affine functions of theta, and the nodes that make them."""
    affine, nodes = {theta}, set[Apply]()
    for node in facts.nodes:
        if all(i in affine for i in varying_inputs(node, facts)) and is_linear(node, facts):
            affine.update(node.outputs)
            nodes.add(node)
    return affine, nodes


def _root(var: Variable, facts: Facts) -> Variable:
    """Return the affine function that a variable is a rescaled, shifted or rearranged copy of."""
    while var.owner is not None:
        varying = set(varying_inputs(var.owner, facts))
        copies = isinstance(var.owner.op, Elemwise) or is_moved(var.owner, facts)
        if not copies or len(varying) != 1:
            break
        [var] = varying
    return var


def is_linear(node: Apply, facts: Facts) -> bool:
    """Tell whether the outputs of a node are affine functions of those of its inputs that are not known."""
    return elements(node, facts).is_linear(varying_inputs(node, facts))


def is_moved(node: Apply, facts: Facts) -> bool:
    """Tell whether a node does nothing but move elements."""
    return isinstance(elements(node, facts), Rearranged)


def varying_inputs(node: Apply, facts: Facts) -> list[Variable]:
    """Return the inputs of a node that are not known: those through which derivatives pass, and steps."""
    return [i for i in node.inputs if not facts.is_known(i)]


# --- products of unknowns written so that linear predictors, and sums over rows, can be seen ---
#
# ``X @ (tau * z)`` is no affine function of theta, but ``tau`` times one; ``tau * sum(x**2)`` is no sum over rows, but
# ``sum(tau * x**2)`` is. PyTensor simplifies the second into the first, which is the shorter to evaluate.


#: Summands with factors of their own, at most, of what is multiplied by a matrix.
_MOST_SUMMANDS = 8
#: Sums within sums, at most, that a factor goes to.
_MOST_NESTED = 50


def factors_outside(logp: Variable, facts: Facts) -> Variable:
    """Take unknown factors out of linear functions, where they are the same for all elements that are added up."""
    written = {}
    for node in facts.nodes:
        axes = _added_axes(node, facts)
        if axes is None:
            continue
        [operand] = varying_inputs(node, facts)
        summands = list(_factored(operand, axes, facts))
        if len(summands) <= _MOST_SUMMANDS and any(factors for factors, _ in summands):
            written[node.outputs[0]] = _added(node, operand, summands, facts)
    return with_others(logp, written)


def _added_axes(node: Apply, facts: Facts) -> tuple[int, ...] | None:
    """Return the axes of its unknown operand along which a linear function adds up; None where it is no such thing."""
    varying = varying_inputs(node, facts)
    return elements(node, facts).added_axes(varying[0]) if len(varying) == 1 and is_linear(node, facts) else None


def _factored(var: Variable, axes: tuple[int, ...], facts: Facts) -> Iterator[tuple[list[Variable], Variable]]:
    """Yield the summands of a variable, each as its unknown factors that don't vary along axes, and what they multiply.

    Factors and summands may be shorter than the variable where they are the same all along an axis.
    """
    node = var.owner
    op = node.op.scalar_op if node is not None and isinstance(node.op, Elemwise) and not facts.is_known(var) else None
    if isinstance(op, ps.Add):
        for operand in node.inputs:
            yield from _factored(operand, axes, facts)
    elif isinstance(op, ps.Sub):
        yield from _factored(node.inputs[0], axes, facts)
        yield from ((factors, -inner) for factors, inner in _factored(node.inputs[1], axes, facts))
    elif isinstance(op, ps.Mul):
        outside = [i for i in node.inputs if not facts.is_known(i) and _is_constant_along(axes, facts.shape(i))]
        inside = [i for i in node.inputs if i not in outside]
        yield outside, functools.reduce(pt.mul, inside) if inside else pt.constant(np.ones((1,) * var.type.ndim))
    elif isinstance(op, ps.TrueDiv):
        divisor = node.inputs[1]
        is_outside = not facts.is_known(divisor) and _is_constant_along(axes, facts.shape(divisor))
        for factors, inner in _factored(node.inputs[0], axes, facts):
            yield ([*factors, 1.0 / divisor], inner) if is_outside else (factors, inner / divisor)
    else:
        yield [], var


def _is_constant_along(axes: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return all(shape[axis] == 1 for axis in axes)


def _shape(var: Variable, facts: Facts) -> tuple[int, ...]:
    """Return the shape of a summand."""
    try:
        return facts.shape(var)
    except KeyError:  # it is an elementwise function that was written here
        return np.broadcast_shapes(*(_shape(i, facts) for i in var.owner.inputs))


def _added(node: Apply, operand: Variable, summands: list[tuple[list[Variable], Variable]], facts: Facts) -> Variable:
    """Return what a linear function makes of a sum, by summands."""
    shape = facts.shape(operand)
    parts = []
    for factors, var in summands:
        whole = var if _shape(var, facts) == shape else var + np.zeros(shape)
        [linear] = node.clone_with_new_inputs([whole if i is operand else i for i in node.inputs], strict=False).outputs
        of_sum = [f.sum(axis=node.op.axis) if isinstance(node.op, CAReduce) else f for f in factors]
        parts.append(functools.reduce(pt.mul, of_sum, linear))
    return functools.reduce(pt.add, parts)


def as_sum(logp: Variable, predictors: Variable) -> Variable:
    """Write log p, or a vector of its parts, as a function of predictors, with sums outermost."""
    facts = Facts(logp, predictors)
    written = {}
    for node in facts.nodes:
        if isinstance(node.op, Dot) and len(varying_inputs(node, facts)) == 2:
            [product], (left, right) = node.outputs, node.inputs
            if max(facts.shape(product), default=1) == 1:
                written[product] = (left.ravel() * right.ravel()).sum().reshape(facts.shape(product))
    logp = with_others(logp, written)
    facts = Facts(logp, predictors)
    sums = _LinearSums(facts)
    written, stack, seen = {}, [logp], {logp}
    while stack:
        node = stack.pop().owner
        if node is None:
            continue
        if (found := sums.factor_of(node)) is not None:
            written[node.outputs[0]] = sums.times(*found)
        elif is_linear(node, facts):
            stack += [i for i in varying_inputs(node, facts) if i not in seen]
            seen.update(node.inputs)
    return with_others(logp, written)


def without_checks(logp: Variable) -> Variable:
    """Return log p, or a vector of its parts, without conditions that tie many elements, -inf where one fails.

    PyMC checks parameters so; where such a check fails, log p is mostly not finite without it, either. A constraint may
    look the same: what is left out has to be looked for where it matters.
    """
    checks = {}
    for node in toposort([logp]):
        if _is_check(node) and node.inputs[1].type.broadcastable == node.outputs[0].type.broadcastable:
            checks[node.outputs[0]] = node.inputs[1]
    return with_others(logp, checks)


def conditions_of(logp: Variable) -> list[Variable] | None:
    """Return the conditions that `without_checks` leaves out, if log p is -inf wherever one of them fails; else None.

    So it is where what they are conditions of is added to all else.
    """
    found, stack, seen = list[Variable](), [logp], set[Variable]()
    while stack:
        var = stack.pop()
        if var.owner is None or var in seen:
            continue
        seen.add(var)
        op = var.owner.op
        if _is_check(var.owner):
            found.append(var.owner.inputs[0])
            stack.append(var.owner.inputs[1])
        elif isinstance(op, DimShuffle) or (isinstance(op, Elemwise | CAReduce) and isinstance(op.scalar_op, ps.Add)):
            stack += var.owner.inputs  # each element is added to something, or is where it was
    return found if len(found) == sum(map(_is_check, toposort([logp]))) else None


def _is_check(node: Apply) -> bool:
    """Tell whether a node is a value under one condition on several elements, -inf where that fails."""
    if not (isinstance(node.op, Elemwise) and isinstance(node.op.scalar_op, ps.Switch)):
        return False
    condition, _, otherwise = node.inputs
    if not all(condition.type.broadcastable) or not np.all(getattr(otherwise, "data", 0.0) == -np.inf):
        return False
    return any(var.owner is not None and isinstance(var.owner.op, CAReduce) for var in ancestors([condition]))


class _LinearSums:
    """Variables that are linear functions of others, some of which are added up."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._found: set[Variable] = set()
        for node in facts.nodes:
            if self._has_sum(node):
                self._found.update(node.outputs)

    def _has_sum(self, node: Apply) -> bool:
        if self.factor_of(node) is not None:
            return True
        varying = varying_inputs(node, self._facts)
        adds = _added_axes(node, self._facts) is not None or any(i in self._found for i in varying)
        return adds and is_linear(node, self._facts)

    def factor_of(self, node: Apply) -> tuple[Variable, Variable] | None:
        """Return the sum that a product has among its factors, and the others; None for what is no such product."""
        if not isinstance(node.op, Elemwise) or len(varying := varying_inputs(node, self._facts)) < 2:
            return None
        if isinstance(node.op.scalar_op, ps.TrueDiv):
            numerator, divisor = node.inputs
            return (numerator, 1.0 / divisor) if numerator in self._found else None
        found = [i for i in varying if i in self._found] if isinstance(node.op.scalar_op, ps.Mul) else []
        others = [i for i in node.inputs if i not in found]
        return (found[0], functools.reduce(pt.mul, others)) if len(found) == 1 else None

    def times(self, var: Variable, factor: Variable, depth: int = 0) -> Variable:
        """Return a variable times a factor of as many axes, which goes to what is added up."""
        node = var.owner
        if var not in self._found or depth > _MOST_NESTED:
            return factor * var
        if (found := self.factor_of(node)) is not None:
            return self.times(found[0], found[1] * factor, depth + 1)
        multiplied = self._multiplied(node)
        if isinstance(node.op, CAReduce):
            factor = pt.expand_dims(factor, _added_axes(node, self._facts) or ())
        elif not isinstance(node.op, Elemwise):
            if not multiplied or not all(factor.type.broadcastable):  # it has to be a number
                return factor * var
            factor = factor.reshape((1,) * multiplied[0].type.ndim)
        return node.op(*[self.times(i, factor, depth + 1) if i in multiplied else i for i in node.inputs])

    def _multiplied(self, node: Apply) -> list[Variable]:
        """Return the inputs to multiply, in order to multiply what a node makes; none where that can't be told."""
        varying = varying_inputs(node, self._facts)
        if isinstance(node.op, Elemwise):
            scalar_op = node.op.scalar_op
            if isinstance(scalar_op, ps.Add | ps.Sub):
                return list(node.inputs)
            return list(node.inputs[1:]) if isinstance(scalar_op, ps.Switch) else varying
        found = elements(node, self._facts)
        moves = isinstance(found, Rearranged) and found.inputs == varying
        return varying if len(varying) == 1 and (moves or found.added_axes(varying[0]) is not None) else []


# --- the factors of a model: the log density of each of its variables. Whatever reads a model begins with them ---

type Role = Literal["observed", "prior", "potential"]


@dataclass(frozen=True, eq=False)
class Factor:
    """The log density of a random variable given those that it depends on, or a Potential."""

    #: Of the model.
    variable: Variable
    role: Role
    #: Elementwise, Jacobian included; a function of the value variables of the model.
    logp: Variable

    @property
    def name(self) -> str:
        """That of the variable."""
        return str(self.variable.name)


def factors_of(model: pm.Model, variables: Sequence[Variable] | None = None) -> tuple[Factor, ...]:
    """Return the factors of a model, made together, so that they share what they have in common."""
    if variables is None:
        variables = [*model.free_RVs, *model.observed_RVs, *model.potentials]
    with without_c(model):
        made = model.logp(vars=list(variables), sum=False)
    roles: dict[Variable, Role] = {
        **dict.fromkeys(model.free_RVs, "prior"),
        **dict.fromkeys(model.potentials, "potential"),
    }
    return tuple(
        Factor(variable, roles.get(variable, "observed"), pt.as_tensor(logp, allow_xtensor_conversion=True))
        for variable, logp in zip(variables, made, strict=True)
    )


def logp_of(factors: Sequence[Factor]) -> Variable:
    """Return the sum of some factors, a function of the value variables."""
    return pt.add(pt.constant(0.0), *[factor.logp.sum() for factor in factors])


# --- which pairs of coordinates interact in log p: the sparsity pattern of its Hessian, from its graph ---


@dataclass(frozen=True)
class HessianPattern:
    """The sparsity of a Hessian."""

    #: Every entry that is not 0 for all theta, and perhaps others; None where there are too many.
    pattern: Pattern | None
    #: Ops that were not understood, taken as functions in which all coordinates that they depend on interact.
    opaque: tuple[str, ...]


class PatternSearch:
    """Finds which entries of a Hessian can differ from 0, as often as data change.

    Notes
    -----
    A sum is linear, and so is what only moves elements. A product a b has the interactions of a, those of b, and those
    of the coordinates of a with the coordinates of b. In f(u) for any other function f, all coordinates of u interact,
    the kinks of absolute values and maxima included. The condition of a switch has no derivative, and counts for
    nothing.

    The work grows with the data and with the entries, never with the square of the dimension.
    """

    def __init__(self, logp: Variable, theta: Variable, varying: Collection[Variable] = ()) -> None:
        _, copied = clone([theta], [logp], copy_inputs=False)  # inlining replaces inputs of nodes
        [self._logp] = inline_inner_graphs(copied)
        self._theta = theta
        self._facts = Facts(self._logp, theta, varying)
        self._is_fresh = True

    def run(self, max_entries: int = MOST_ENTRIES) -> HessianPattern:
        """Find the pattern for the data as they are now."""
        if not self._is_fresh:
            self._facts.refresh()
        self._is_fresh = False
        facts, dependences = self._facts, Dependences(self._facts, self._theta)
        pairs = Pairs(facts.shape(self._theta)[0])
        try:
            self._note(dependences, pairs)
            pattern = pairs.pattern(max_entries)
        except TooDenseError:
            pattern = None
        return HessianPattern(pattern, tuple(sorted(dependences.opaque)))

    def _note(self, dependences: Dependences, pairs: Pairs) -> None:
        """Go from log p towards theta, through all that enters it linearly, and note what interacts."""
        facts = self._facts
        used: dict[Variable, Bools] = {self._logp: np.ones((), dtype=bool)}
        for node in reversed(facts.nodes):  # each once, after all that use it
            of_outputs = [used.pop(out, None) for out in node.outputs]
            if not any(u is not None and u.any() for u in of_outputs):
                continue
            masks = [
                np.zeros(facts.shape(out), dtype=bool) if u is None else u
                for out, u in zip(node.outputs, of_outputs, strict=True)
            ]
            uses = elements(node, facts).uses(masks, dependences.of, pairs)
            if uses is None:
                for out, mask in zip(node.outputs, masks, strict=True):
                    if mask.any() and facts.is_active(out):
                        pairs.add_within(dependences.of(out), mask)
            for var, mask in uses or ():
                if facts.is_active(var):
                    used[var] = used[var] | mask if var in used else mask
