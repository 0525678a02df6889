"""Linear predictors: affine functions of theta; and log p as a sum of rows, each a function of a few."""

import functools
import hashlib
import itertools
import math

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np
import pymc as pm
import pytensor
import pytensor.scalar as ps
import pytensor.tensor as pt

from pytensor.compile import Function, SharedVariable
from pytensor.graph import Apply, Constant, Variable, ancestors, clone_replace, graph_replace
from pytensor.graph.basic import clone, equal_computations
from pytensor.graph.traversal import toposort
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.math import Dot

from pymc_ngvi.core.messages import NotApart, TooDenseError
from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.core.sizes import HELD
from pymc_ngvi.core.sparsity import Dependence, Ints, Pairs, joined
from pymc_ngvi.core.types import Array, Bools
from pymc_ngvi.graphs import graph
from pymc_ngvi.graphs.backends import quickly, without_c
from pymc_ngvi.graphs.graph import inline_inner_graphs
from pymc_ngvi.ops.elements import Apart, Elements, Facts, Rearranged, ScalarForm, core_op
from pymc_ngvi.ops.registry import elements, operation
from pymc_ngvi.rows.linear_map import LinearMap, MatrixPlan

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
        copies = isinstance(var.owner.op, Elemwise) or isinstance(elements(var.owner, facts), Rearranged)
        if not copies or len(varying) != 1:
            break
        [var] = varying
    return var


def is_linear(node: Apply, facts: Facts) -> bool:
    """Tell whether the outputs of a node are affine functions of those of its inputs that are not known."""
    return elements(node, facts).is_linear(varying_inputs(node, facts))


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

    def is_outside(factor: Variable) -> bool:
        return not facts.is_known(factor) and all(facts.shape(factor)[axis] == 1 for axis in axes)

    if isinstance(op, ps.Add):
        for operand in node.inputs:
            yield from _factored(operand, axes, facts)
    elif isinstance(op, ps.Sub):
        yield from _factored(node.inputs[0], axes, facts)
        yield from ((factors, -inner) for factors, inner in _factored(node.inputs[1], axes, facts))
    elif isinstance(op, ps.Mul):
        outside = [i for i in node.inputs if is_outside(i)]
        inside = [i for i in node.inputs if i not in outside]
        yield outside, functools.reduce(pt.mul, inside) if inside else pt.constant(np.ones((1,) * var.type.ndim))
    elif isinstance(op, ps.TrueDiv):
        divisor = node.inputs[1]
        for factors, inner in _factored(node.inputs[0], axes, facts):
            yield ([*factors, 1.0 / divisor], inner) if is_outside(divisor) else (factors, inner / divisor)
    else:
        yield [], var


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
    checks = {node.outputs[0]: node.inputs[1] for node in toposort([logp]) if _is_check(node)}
    same = {out: value for out, value in checks.items() if out.type.broadcastable == value.type.broadcastable}
    return with_others(logp, same)


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
            varying = varying_inputs(node, facts)
            adds = _added_axes(node, facts) is not None or any(i in self._found for i in varying)
            if (adds and is_linear(node, facts)) or self.factor_of(node) is not None:
                self._found.update(node.outputs)

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
        self.facts = Facts(self._logp, theta, varying)

    def run(self, max_entries: int = HELD) -> tuple[Pattern | None, list[str]]:
        """Find the pattern for the data that `facts` are of.

        It has every entry that is not 0 for all theta, and perhaps others; None where there are too many. Ops that were
        not understood come beside it, taken as functions in which all coordinates that they depend on interact.
        """
        facts, dependences = self.facts, Dependences(self.facts, self._theta)
        pairs = Pairs(facts.shape(self._theta)[0])
        try:
            self._note(dependences, pairs)
            pattern = pairs.pattern(max_entries)
        except TooDenseError:
            pattern = None
        return pattern, sorted(dependences.opaque)

    def _note(self, dependences: Dependences, pairs: Pairs) -> None:
        """Go from log p towards theta, through all that enters it linearly, and note what interacts."""
        facts = self.facts
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


# --- elements of a variable, each as a function of the few predictors that it depends on ---
#
# An element of ``exp(log_sd)[group]`` is a function of one predictor, whichever the group: lifted, the variable is an
# elementwise function of as many rows as elements are asked for, in which each row has its own copy of what it reads.


#: Operations that elements are made of at most: a recursion that is written out has a hundred thousand.
_MOST_OPERATIONS = 4_096


class Source(NamedTuple):
    """Where known values of rows are from."""

    #: Whose value they are elements of; or, of weights, whose elements they weigh.
    var: Variable
    #: Which, flat.
    elements: Ints
    is_weight: bool = False


@dataclass
class Lift:
    """Lifts elements of variables to rows."""

    facts: Facts
    predictors: Variable
    #: Inputs of the lifted function, (n_points, n_rows) each, with the predictor that each row reads there.
    slots: dict[Variable, Ints] = field(default_factory=dict)
    #: Inputs for known values, (1, n_rows) each or (1, 1), with these.
    data: dict[Variable, Array] = field(default_factory=dict)
    #: Where these are from.
    sources: dict[Variable, Source] = field(default_factory=dict)
    _done: dict[tuple[Variable, bytes], Variable] = field(default_factory=dict)

    def of(self, var: Variable, index: Ints) -> Variable:
        """Return elements of a variable as a function of rows."""
        key = (var, hashlib.blake2b(index.tobytes()).digest())
        if key not in self._done:
            if len(self._done) >= _MOST_OPERATIONS:
                raise NotApart(f"elements are made of more than {_MOST_OPERATIONS:,} operations")
            self._done[key] = self._lifted(var, index)
        return self._done[key]

    def copy(self) -> "Lift":
        """Return another one that has lifted the same, and goes on by itself."""
        return replace(
            self, slots=dict(self.slots), data=dict(self.data), sources=dict(self.sources), _done=dict(self._done)
        )

    def _lifted(self, var: Variable, index: Ints) -> Variable:
        if var is self.predictors:
            slot = pt.matrix(f"predictor {len(self.slots)}", dtype="float64", shape=(None, None))
            self.slots[slot] = index
            return slot
        if self.facts.is_known(var):
            return self._known(var, index)
        node = var.owner
        if node is None:
            raise NotApart(f"{var} varies")
        rule = operation(node.op).lift
        if isinstance(rule, str):
            raise NotApart(f"PyTensor's {type(core_op(node.op)).__name__} {rule}")
        return rule(self, node, var, index)

    def _known(self, var: Variable, index: Ints) -> Variable:
        if isinstance(var, Constant) and np.size(var.data) == 1:
            return pt.constant(np.reshape(var.data, (1, 1)))
        try:
            value = np.asarray(self.facts.value(var))
        except KeyError as error:
            raise NotApart(f"the value of {var} is not at hand") from error
        rows = value.reshape(1, -1)[:, index]
        given = pt.tensor(f"data {len(self.data)}", dtype=rows.dtype, shape=(1, 1 if len(index) == 1 else None))
        self.data[given], self.sources[given] = rows, Source(var, index)
        return given


# --- predictors of rows in terms of others: the same numbers, written otherwise, are found by their values ---
#
# The mean of an observation, and what PyTensor makes of its distance from the data, may be two predictors of a row,
# which differ by an offset. Derivatives in the one mean something only where the other is gone.


#: Points beyond those that an affine relation takes.
_MORE = 3
#: Relative difference of values that is rounding.
ROUNDING = 1e-9


class Basis:
    """Some of the predictors of rows, of which all others are affine functions."""

    def __init__(
        self, lift: Lift, n_rows: int, predictors: Callable[[int], Array], first: Sequence[Variable] = ()
    ) -> None:
        order = list(dict.fromkeys([*first, *lift.slots]))
        self._index = {slot: np.broadcast_to(lift.slots[slot], n_rows) for slot in order}
        self.slots: list[Variable] = order[:1]
        self._relations: dict[Variable, tuple[Array, Array]] = {}
        eta = predictors(len(order) + _MORE) if len(order) > 1 else np.empty((0, 0))
        for slot in order[1:]:
            found = _combination(eta[:, self._index[slot]], [eta[:, self._index[other]] for other in self.slots])
            if found is None:
                self.slots.append(slot)
            else:
                self._relations[slot] = found

    def index(self, slots: Sequence[Variable]) -> Ints:
        """Return the predictors of each row, (n_rows, n_slots)."""
        return np.stack([self._index[slot] for slot in slots], axis=1)

    def of(self, value: Variable, data: dict[Variable, Array]) -> tuple[Variable, dict[Variable, Array]]:
        """Return a function of slots as one of those of the basis alone, and its data."""
        used, data, written = set(ancestors([value])), dict(data), {}
        for slot, (slopes, offset) in self._relations.items():
            if slot not in used:
                continue
            written[slot] = _given("offset", offset, data)
            for other, slope in zip(self.slots, slopes, strict=False):
                if slope.any():
                    written[slot] = written[slot] + _given("slope", slope, data) * other
        if written:
            [value] = clone_replace([value], written, rebuild_strict=False)
        return value, data


def _given(name: str, values: Array, data: dict[Variable, Array]) -> Variable:
    """Return an input for known values of rows."""
    var = pt.tensor(name, dtype="float64", shape=(1, None))
    data[var] = np.ascontiguousarray(values[None])
    return var


def _combination(values: Array, others: list[Array]) -> tuple[Array, Array] | None:
    """Return the slopes, (n_others, n_rows), and the offset of a predictor that is an affine function of others."""
    known = np.stack([np.ones_like(values), *others], axis=-1).swapaxes(0, 1)
    slopes = (np.linalg.pinv(known) @ values.T[..., None])[..., 0]
    slopes[np.abs(slopes) <= ROUNDING * np.abs(slopes).max(axis=1, keepdims=True)] = 0.0
    apart = np.abs((known @ slopes[..., None])[..., 0] - values.T)
    if (apart > ROUNDING * (1.0 + np.abs(values.T))).any():
        return None
    return slopes.T[1:], slopes.T[0]


# --- rows that depend on many predictors through one sum of these: given the others, that sum is all they see ---
# A group effect that is not centred enters as ``a + exp(s) * z``. Given s, a row is a function of one Gaussian
# variable, whatever the number of effects in the sum.

type Slots = frozenset[Variable]

_NONE: Slots = frozenset()


def sum_of(value: Variable, slots: Collection[Variable]) -> tuple[Variable, Slots] | None:
    """Return a variable through which alone a row depends on some of its predictors, and these, two at least.

    Given all other predictors, the variable is an affine function of them.
    """
    depends: dict[Variable, Slots] = {slot: frozenset([slot]) for slot in slots}
    affine = dict(depends)
    order = [node.outputs[0] for node in toposort([value]) if len(node.outputs) == 1]
    for var in order:
        node = var.owner
        depends[var] = frozenset().union(*(depends.get(i, _NONE) for i in node.inputs))
        affine[var] = _affine(node, depends, affine)
    for var in sorted(order, key=lambda v: -len(affine[v])):
        if len(affine[var]) < 2:
            return None
        [without] = clone_replace([value], {var: var.type()}, rebuild_strict=False)
        if not any(v in affine[var] for v in ancestors([without])):
            return var, affine[var]
    return None


def _affine(node: Apply, depends: dict[Variable, Slots], affine: dict[Variable, Slots]) -> Slots:
    """Return predictors in which the output of a node is affine, all together."""
    form, inputs = ScalarForm.of(node), node.inputs
    if form is ScalarForm.SUM:
        bent = frozenset().union(*(depends.get(i, _NONE) - affine.get(i, _NONE) for i in inputs))
        return frozenset().union(*(affine.get(i, _NONE) for i in inputs)) - bent
    if form in (ScalarForm.PRODUCT, ScalarForm.QUOTIENT):
        best = max((inputs[k] for k in form.linear_in(len(inputs))), key=lambda i: len(affine.get(i, _NONE)))
        return affine.get(best, _NONE).difference(*(depends.get(i, _NONE) for i in inputs if i is not best))
    return _NONE


# --- log p, a function of predictors, as a sum: of rows, each a function of a few of these, and of a rest ---

#: Predictors of a row, at most, those that come in by one sum counted as one, and as many; groups of elements that
#: come from different variables, at most.
MOST_PREDICTORS, _MOST_SLOTS, _MOST_GROUPS = 8, 24, 64
#: Predictors of a row that is more than arithmetic with numbers, such as a determinant.
_MOST_WHOLE = 3
#: Predictors of a row, up to which nothing is gained by taking sums of them together.
_FEW = 2


@dataclass(frozen=True, eq=False)
class Rows:
    """Elements of log p that are the same function of different predictors."""

    #: The predictors of each row; shape (n_rows, k).
    index: Ints
    #: Inputs of the function, (n_points, n_rows), one for each of the k.
    slots: list[Variable]
    #: Inputs for known values, (1, n_rows) or (1, 1), with these.
    data: dict[Variable, Array]
    #: The function, (n_points, n_rows).
    value: Variable
    #: Through which alone it depends on the last ``n_summed`` predictors, an affine function of these given the
    #: others.
    sum_: Variable | None = None
    n_summed: int = 0
    #: Whether this is one row, and more than arithmetic with numbers.
    is_whole: bool = False
    #: Where data are from.
    sources: dict[Variable, Source] = field(default_factory=dict)

    def by_sum(self) -> "Rows":
        """Return the same rows, with predictors that come in by one sum last."""
        found = sum_of(self.value, self.slots) if len(self.slots) > _FEW else None
        if found is None:
            return self
        order = [i for i, s in enumerate(self.slots) if s not in found[1]]
        order += [i for i, s in enumerate(self.slots) if s in found[1]]
        return Rows(
            np.ascontiguousarray(self.index[:, order]), [self.slots[i] for i in order], self.data, self.value,
            found[0], len(found[1]), sources=self.sources,
        )  # fmt: skip

    def of(self, predictors: Variable) -> Variable:
        """Return the sum over rows as a function of all predictors, a vector."""
        given = {slot: predictors[column][None] for slot, column in zip(self.slots, self.index.T, strict=True)}
        given |= {var: pt.constant(value) for var, value in self.data.items()}
        [total] = graph_replace([self.value.sum()], given, strict=False)
        return total

    @property
    def n_directions(self) -> int:
        """Predictors, those of the sum counted as one."""
        return len(self.slots) - max(self.n_summed - 1, 0)


@dataclass(frozen=True, eq=False)
class Summand:
    """Elements of a variable that log p is linear in, as rows or as what can't be rows."""

    rows: list[Rows]
    #: What is no sum over rows, as a function of the predictors.
    rest: Variable | None
    #: Why it is none.
    why: str
    #: Of all elements, flat, by the number of the part of log p that has them.
    weights: dict[int, Array]

    def of_part(self, part: int) -> Iterator[Rows]:
        """Yield the rows that a part of log p has, without their data: their weights are those of all parts."""
        for rows in self.rows:
            elements = [source.elements for source in rows.sources.values() if source.is_weight]
            counts = [self.weights[part][at] != 0.0 for at in elements] or [np.ones(1, dtype=np.bool_)]
            if counts[0].any():
                yield replace(rows, index=rows.index[counts[0]], data={}, sources={})


@dataclass(frozen=True, eq=False)
class Terms:
    """The sum of the parts of log p, functions of predictors, as another sum."""

    rows: list[Rows]
    #: What is linear; shape (n_predictors,).
    slope: Array
    #: What is no sum over rows, as functions of the predictors.
    rest: list[Variable]
    #: Why each of these is none.
    why: list[str]
    weigh: "Weighed"
    #: What rows and rest were found as.
    summands: list[Summand]

    def renewed(self, predictors: Variable, facts: Facts) -> "Terms | None":
        """Return the same terms with the values that data have now; None where elements count that did not.

        What else hangs on values, such as which branch is taken, is as it was: that the sum is right, has to be seen.
        """
        weights = {var: _total(by_part) for var, by_part in self.weigh()}
        slope, made = np.zeros_like(self.slope), []
        for var, weight in weights.items():
            if var is predictors:
                slope += weight
        for rows in self.rows:
            if rows.is_whole:
                return None
            data = {}
            for given, source in rows.sources.items():
                values = weights.get(source.var) if source.is_weight else np.asarray(facts.value(source.var)).ravel()
                if values is None:
                    return None
                data[given] = values[source.elements][None].astype(given.type.dtype)
            made.append(replace(rows, data=data))
        taken = [source for rows in self.rows for source in rows.sources.values() if source.is_weight]
        for var in weights.keys() - {predictors}:
            known = [np.empty(0, dtype=np.intp), *(source.elements for source in taken if source.var is var)]
            if np.delete(weights[var], np.concatenate(known)).any():
                return None
        return replace(self, rows=made, slope=slope)

    def of_part(self, part: int) -> tuple[list[Rows], list[str]]:
        """Return the rows of a part of log p alone, without their data, and why all else is none."""
        summands = [summand for summand in self.summands if part in summand.weights]
        rows, wide = _summed([rows for summand in summands for rows in summand.of_part(part)])
        return rows, [*(summand.why for summand in summands if summand.why), *map(_too_wide, wide)]


def terms_of(parts: Sequence[Variable], predictors: Variable, facts: Facts) -> Terms:
    """Take functions of predictors apart, of which log p is the sum; ``facts`` are of a vector of these."""
    weigh = Weighed(parts, [_linear_in(part, predictors, facts) for part in parts], facts)
    slope, summands = np.zeros(predictors.type.shape), list[Summand]()
    dependences = Dependences(facts, predictors)
    for var, weights in weigh():
        total = _total(weights)
        if var is predictors:
            slope += total
        elif total.any():
            summands.append(_summand(var, weights, predictors, facts, dependences))
    rows, wide = _summed([rows for summand in summands for rows in summand.rows])
    rest = [summand.rest for summand in summands if summand.rest is not None] + [r.of(predictors) for r in wide]
    why = [summand.why for summand in summands if summand.why] + [_too_wide(r) for r in wide]
    return Terms(rows, slope, rest, why, weigh, summands)


def _summand(
    var: Variable, weights: dict[int, Array], predictors: Variable, facts: Facts, dependences: Dependences
) -> Summand:
    """Lift the elements of a variable that count, in as many groups as it takes."""
    total, made = _total(weights), list[Rows]()
    try:
        for index, lift, value in lifted(var, np.flatnonzero(total), predictors, facts):
            factor = pt.tensor("weight", dtype="float64", shape=(1, None))
            data = {**lift.data, factor: total[index][None]}
            sources = {**lift.sources, factor: Source(var, index, is_weight=True)}
            columns = np.stack([np.broadcast_to(at, len(index)) for at in lift.slots.values()], axis=1)
            made.append(Rows(columns, list(lift.slots), data, factor * value, sources=sources))
    except NotApart as error:
        weighed = pt.sum(total.reshape(facts.shape(var)) * var)
        whole = _whole(var, total, weighed, predictors, dependences)
        return Summand([], weighed, str(error), weights) if whole is None else Summand([whole], None, "", weights)
    return Summand(made, None, "", weights)


def _summed(found: list[Rows]) -> tuple[list[Rows], list[Rows]]:
    """Add up rows that are functions of the same predictors; return those of few directions, and of many."""
    groups: dict[tuple[bytes, ...], list[Rows]] = {}
    for rows in found:
        if not rows.is_whole:
            groups.setdefault(tuple(column.tobytes() for column in rows.index.T), []).append(rows)
    merged = [*[_merged(group).by_sum() for group in groups.values()], *(rows for rows in found if rows.is_whole)]
    wide = [rows for rows in merged if rows.n_directions > MOST_PREDICTORS]
    return [rows for rows in merged if rows not in wide], wide


def _too_wide(rows: Rows) -> str:
    return f"an element varies in {rows.n_directions} directions"


def _total(weights: dict[int, Array]) -> Array:
    """Return the weights in the sum of all parts."""
    return functools.reduce(np.add, weights.values())


class Weighed:
    """The variables that parts of log p are linear in, and the weights of their elements by part.

    The slopes are constant, but may be written with the shapes of what they are slopes in.
    """

    def __init__(self, parts: Sequence[Variable], linear_in: list[list[Variable]], facts: Facts) -> None:
        # As a variable may be an input of another, each stands in for itself.
        self._facts, self._stand_in = facts, {var: var.type() for found in linear_in for var in found}
        outer = clone_replace(list(parts), self._stand_in, rebuild_strict=False)
        with without_c():
            self.pairs = [(part, var) for part, found in enumerate(linear_in) for var in found]
            slopes = [
                pytensor.grad(out, [self._stand_in[var] for var in found])
                for out, found in zip(outer, linear_in, strict=True)
            ]
            self.inputs, self.outputs = list(self._stand_in.values()), [slope for found in slopes for slope in found]
            self._function = quickly(self.inputs, self.outputs)

    def zeros(self) -> list[Array]:
        """Return values for the inputs, of their shapes."""
        return [np.zeros(self._facts.shape(var)) for var in self._stand_in]

    def __call__(self) -> list[tuple[Variable, dict[int, Array]]]:
        """Return the variables, with the weights of their elements by part, for the data as they are."""
        found = self._function(*self.zeros())
        weights: dict[Variable, dict[int, Array]] = {var: {} for var in self._stand_in}
        for (part, var), weight in zip(self.pairs, found, strict=True):
            weights[var][part] = np.array(weight, dtype=np.float64).ravel()
        return list(weights.items())


def _linear_in(part: Variable, predictors: Variable, facts: Facts) -> list[Variable]:
    """Return the variables that a part of log p is linear in."""
    found, stack, seen = list[Variable](), [part], {part}
    while stack:
        var = stack.pop()
        if facts.is_known(var):
            continue
        if var is predictors or var.owner is None or not is_linear(var.owner, facts):
            found.append(var)
            continue
        new = [other for other in varying_inputs(var.owner, facts) if other not in seen]
        seen.update(new)
        stack += dict.fromkeys(new)
    return found


def lifted(var: Variable, index: Ints, predictors: Variable, facts: Facts) -> list[tuple[Ints, Lift, Variable]]:
    """Lift elements of a variable, in as many groups as it takes."""
    waiting = [index]
    made: list[tuple[Ints, Lift, Variable]] = []
    while waiting:
        index = waiting.pop()
        lift = Lift(facts, predictors)
        try:
            value = lift.of(var, index)
        except Apart as apart:
            waiting += [index[apart.labels == label] for label in np.unique(apart.labels)]
            if len(waiting) + len(made) > _MOST_GROUPS:
                raise NotApart("elements come from too many variables") from apart
            continue
        if not 0 < len(lift.slots) <= _MOST_SLOTS:
            raise NotApart(f"an element depends on {len(lift.slots)} predictors")
        made.append((index, lift, value))
    return made


def _whole(
    var: Variable, weight: Array, weighed: Variable, predictors: Variable, dependences: Dependences
) -> Rows | None:
    """Return a variable, whatever it does, as one row, where it depends on few predictors; None where on more."""
    try:
        of_var = dependences.of(var)
    except KeyError:  # a variable that is not of this graph
        return None
    sets = of_var.sets.tocsr()[np.unique(of_var.index.ravel()[np.flatnonzero(weight)])]
    at = np.unique(sets.indices).astype(np.int64)
    if not 0 < len(at) <= _MOST_WHOLE:
        return None
    few = pt.vector("predictors of the row", dtype="float64", shape=(len(at),))
    every = pt.set_subtensor(pt.zeros(predictors.type.shape)[at], few)
    [inner] = graph_replace([weighed], {predictors: every}, strict=False)
    points, [values] = graph.over_draws([inner], few)
    slots: list[Variable] = [pt.matrix(f"predictor {n}", dtype="float64", shape=(None, 1)) for n in range(len(at))]
    [value] = graph_replace([values[:, None]], {points: pt.concatenate(slots, axis=1)}, strict=False)
    return Rows(at[None], slots, {}, value, is_whole=True)


def _merged(group: list[Rows]) -> Rows:
    """Return the sum of rows that are functions of the same predictors."""
    first, *others = group
    if not others:
        return first
    data, sources = dict(first.data), dict(first.sources)
    value = first.value
    for other in others:
        data.update(other.data)
        sources.update(other.sources)
        with without_c():
            [same] = clone_replace(
                [other.value], dict(zip(other.slots, first.slots, strict=True)), rebuild_strict=False
            )
        value = value + same
    return Rows(first.index, first.slots, data, value, sources=sources)


# --- what a function of rows tells of its second derivatives before any is made ---

type VariablePairs = frozenset[tuple[Variable, Variable]]


def is_smooth(rows: Rows) -> bool:
    """Tell whether a row is made of common operations alone, all of which have second derivatives."""
    return all(ScalarForm.of(node) is not ScalarForm.FUNCTION for node in toposort([rows.value]))


def interacts(rows: Rows) -> Bools:
    """Return by which pairs of predictors second derivatives may differ from 0: any, of what is not looked into."""
    k = len(rows.slots)
    if rows.is_whole:
        return np.ones((k, k), dtype=bool)
    number = {slot: i for i, slot in enumerate(rows.slots)}
    depends: dict[Variable, Slots] = {slot: frozenset([slot]) for slot in rows.slots}
    pairs: dict[Variable, VariablePairs] = {}
    for node in toposort([rows.value]):
        made = _pairs(node, depends, pairs)
        for out in node.outputs:
            depends[out] = frozenset().union(*(depends.get(i, _NONE) for i in node.inputs))
            pairs[out] = made
    result = np.zeros((k, k), dtype=bool)
    for a, b in pairs.get(rows.value, frozenset()):
        result[number[a], number[b]] = result[number[b], number[a]] = True
    return result


def _pairs(node: Apply, depends: dict[Variable, Slots], pairs: dict[Variable, VariablePairs]) -> VariablePairs:
    """Return the pairs that interact in the output of a node."""
    form, by_input = ScalarForm.of(node), [depends.get(i, _NONE) for i in node.inputs]
    linear = form.linear_in(len(by_input))
    found = [pairs.get(node.inputs[k], frozenset()) for k in linear]
    found += [frozenset(itertools.product(by_input[a], by_input[b])) for a, b in form.multiplied(len(by_input))]
    if form not in (ScalarForm.STEP, ScalarForm.CHOICE):
        bent: Slots = frozenset().union(*(slots for k, slots in enumerate(by_input) if k not in linear))
        found.append(frozenset(itertools.product(bent, bent)))
    return frozenset().union(*found)


def shared_first(rows: Rows) -> tuple[Rows, int]:
    """Return rows with predictors that all of them share first, and how many these are; none of a single row."""
    is_shared = (rows.index == rows.index[0]).all(axis=0) & (len(rows.index) > 1)
    order = np.argsort(~is_shared, kind="stable")
    index, slots = np.ascontiguousarray(rows.index[:, order]), [rows.slots[a] for a in order]
    return replace(rows, index=index, slots=slots), int(is_shared.sum())


# --- sums over many coordinates among what predictors are made of: a row that sees them all makes the Hessian dense ---

type Compile = Callable[[list[Variable], Variable | list[Variable]], Function]

#: Coordinates in a sum, at least, and sums, at most.
_MANY, _MOST_SUMS = 200, 6


def wide_sums(found: list[Variable], theta: Variable, facts: Facts) -> list[list[Variable]]:
    """Return affine functions of theta, few numbers each of which depends on many coordinates."""
    below, affine = set(ancestors(found)), affine_functions(theta, facts)[1]
    dependences, sums = Dependences(facts, theta), list[list[Variable]]()
    for node in facts.nodes:
        [out, *others] = node.outputs
        if node not in affine or others or out not in below or math.prod(facts.shape(out)) > _MOST_SUMS:
            continue
        if max(math.prod(facts.shape(i)) for i in facts.active_inputs(node)) < _MANY:  # of numbers that are few already
            continue
        depends = dependences.of(out)
        if not (np.diff(depends.sets.indptr)[depends.index] >= _MANY).all():
            continue
        equal = next((same for same in sums if equal_computations([out], [same[0]])), None)
        if equal is None:
            sums.append([out])
        else:
            equal.append(out)
    return sums if sum(math.prod(facts.shape(var)) for var, *_ in sums) <= _MOST_SUMS else []


@dataclass(frozen=True)
class JointPredictors:
    """Predictors as functions of coordinates and sums."""

    linear_map: LinearMap
    #: What they are elements of, as functions of a vector of coordinates and sums; and the sums, of coordinates.
    variables: list[Variable]
    point: Variable
    sums: list[Variable]
    #: On which coordinates, and then sums, each predictor depends.
    dependence: Dependence
    #: From coordinates and sums, (n, n_dim + n_sums), to predictors, (n, n_predictors).
    evaluate: Callable[[Array], Array]
    #: How to find their matrix.
    plan: MatrixPlan
    #: From theta, (n_dim,), to the sums and the rows of their derivatives.
    weights: Callable[[Array], list[Array]]

    @property
    def origin(self) -> Array:
        """Where theta is 0: coordinates and sums, (n_dim + n_sums,)."""
        n_dim = self.linear_map.n_dim
        return np.concatenate([np.zeros(n_dim), self.weights(np.zeros(n_dim))[0]])

    def renewed(self) -> "JointPredictors":
        """Return the same with the values of data as they are now."""
        return replace(self, linear_map=_map(self.plan, self.evaluate, self.weights, self.linear_map.n_dim))


def joint_predictors(
    found: list[Variable], theta: Variable, facts: Facts, used: Ints, compile_: Compile
) -> JointPredictors | None:
    """Return predictors as functions of coordinates and sums over many; None where there are no such sums."""
    sums = wide_sums(found, theta, facts)
    with without_c():
        while sums:
            outputs, point = _of_joint(found, theta, facts, sums)
            everything = pt.concatenate([var.ravel() for var in outputs])
            depends = dependence_of(outputs, Facts(everything, point), point)
            seen = np.asarray(depends.sets[np.unique(depends.index[used])].sum(axis=0)).ravel() > 0
            kept = [same for same, at in zip(sums, _places(theta, facts, sums), strict=True) if seen[at].any()]
            if len(kept) == len(sums):
                first = [var for var, *_ in sums]
                [n_joint], [n_dim] = point.type.shape, theta.type.shape
                points, [values] = graph.over_draws([everything], point)
                evaluate, flat = compile_([points], values), pt.concatenate([var.ravel() for var in first])
                slopes = [graph.gradient(flat[k], theta) for k in range(n_joint - n_dim)]
                weights = quickly([theta], [flat, *slopes])
                plan = MatrixPlan.of(depends, n_joint)
                linear_map = _map(plan, evaluate, weights, n_dim)
                return JointPredictors(linear_map, outputs, point, first, depends, evaluate, plan, weights)
            sums = kept
    return None


def _of_joint(
    found: list[Variable], theta: Variable, facts: Facts, sums: list[list[Variable]]
) -> tuple[list[Variable], Variable]:
    """Return predictors with sums as coordinates of their own, and the vector of both."""
    places = _places(theta, facts, sums)
    [n_dim] = theta.type.shape
    point = pt.vector("theta and sums", dtype="float64", shape=(places[-1].stop,))
    new = {theta: pt.specify_shape(point[:n_dim], (n_dim,))}
    for same, at in zip(sums, places, strict=True):
        shape = facts.shape(same[0])
        new.update(dict.fromkeys(same, pt.specify_shape(point[at].reshape(shape), shape)))
    others = [var for var in found if var not in new]
    made = dict(zip(others, graph_replace(others, new, strict=False), strict=True)) if others else {}
    return [new[var] if var in new else made[var] for var in found], point


def _places(theta: Variable, facts: Facts, sums: list[list[Variable]]) -> list[slice]:
    """Return where each of the sums is, after theta."""
    ends = np.cumsum([theta.type.shape[0], *(math.prod(facts.shape(var)) for var, *_ in sums)]).tolist()
    return [slice(start, stop) for start, stop in itertools.pairwise(ends)]


def _map(
    plan: MatrixPlan, evaluate: Callable[[Array], Array], weights: Callable[[Array], list[Array]], n_dim: int
) -> LinearMap:
    """Return the predictors as affine functions of coordinates and sums, by their values."""
    joint = plan.matrix(evaluate)
    offset, *rows = weights(np.zeros(n_dim))
    # Sums are counted without what they are where theta is 0.
    shift = joint.times(np.concatenate([np.zeros(n_dim), offset])[None])[0]
    of_sums = np.array(rows, dtype=np.float64)
    return replace(joint, offset=joint.offset + shift, weights=of_sums)


# --- known matrices times an unknown number: what is made of them is what is made of the matrices, scaled ---
# A normal prior with the covariance ``s**2 * K`` factorises an unknown matrix, as it is written. The Cholesky factor is
# that of K, times s: the prior is a sum over rows, each a function of s and of an element of a linear function.


class _Scaled(NamedTuple):
    """A number, a variable whose axes have length 1, times a matrix; and whether that is known."""

    factor: Variable
    matrix: Variable
    is_known: bool


def scales_outside(logp: Variable, facts: Facts) -> Variable:
    """Take unknown numbers out of factorisations, solutions and products of matrices that are known but for these."""
    scaled: dict[Variable, _Scaled] = {}
    written: dict[Variable, Variable] = {}
    for node in facts.nodes:
        found = _as_scaled(node, scaled, facts)
        if found is None:
            continue
        [out] = node.outputs
        if found.is_known:
            scaled[out] = found
        if not isinstance(node.op, Elemwise) and not isinstance(elements(node, facts), Rearranged):
            written[out] = found.factor * found.matrix
    return with_others(logp, written)


def _as_scaled(node: Apply, scaled: dict[Variable, _Scaled], facts: Facts) -> _Scaled | None:
    """Return what a node makes as a number times what it makes of matrices; None where no such number comes out."""
    rule, [out, *others] = operation(node.op).degrees, node.outputs
    is_elementwise = isinstance(node.op, Elemwise)
    if isinstance(rule, str) or others or (is_elementwise and out.type.ndim < 2):
        return None
    factors, matrices, unknown, has_matrix = [], list(node.inputs), False, False
    for k, (var, degree) in enumerate(zip(node.inputs, rule(node), strict=True)):
        if var in scaled:
            factor, matrices[k], _ = scaled[var]
        elif is_elementwise and not facts.is_known(var) and set(facts.shape(var)) <= {1}:
            factor, matrices[k] = var, pt.constant(np.ones((1,) * var.type.ndim))
        else:
            has_matrix, unknown = True, unknown or not facts.is_known(var)
            continue
        has_matrix = has_matrix or var in scaled
        if degree is None:
            return None
        same = factor if factor.type.ndim == out.type.ndim else factor.reshape((1,) * out.type.ndim)
        factors.append(same if degree == 1.0 else same**degree)
    if not factors or not has_matrix or (is_elementwise and unknown):
        return None
    return _Scaled(functools.reduce(pt.mul, factors), node.op(*matrices), not unknown)


# --- the linear predictors of a log density: affine functions of theta that all else is made of ---


def together(parts: Sequence[Variable]) -> Variable:
    """Return a vector of the parts of log p, scalars, which are its inputs."""
    return pt.basic.MakeVector("float64")(*[pt.cast(part, "float64") for part in parts])


class DataSeen:
    """The data that variables depend on, at some time."""

    def __init__(self, variables: Sequence[Variable], *, but: Collection[Variable] = ()) -> None:
        self._shared = [v for v in ancestors(variables) if isinstance(v, SharedVariable) and v not in but]
        self.take()

    def take(self) -> None:
        """Take the data as they are now."""
        self._arrays = self._now()

    def are_current(self) -> bool:
        """Tell whether the data are the same now, be it in other arrays: ``pm.set_data`` puts these in their place."""
        now = self._now()
        for one, other in zip(now, self._arrays, strict=True):
            if one is other or (
                isinstance(one, np.ndarray) and isinstance(other, np.ndarray) and np.array_equal(one, other)
            ):
                continue
            return False
        self._arrays = now
        return True

    def _now(self) -> list[object]:
        return [v.container.storage[0] for v in self._shared]  # they are looked at often


class Predictors:
    """Linear predictors, and log p as a function of them."""

    def __init__(self, logp: Variable, theta: Variable, compile_: Compile) -> None:
        self._theta, facts = theta, Facts(logp, theta)
        for write in (scales_outside, factors_outside, functools.partial(grouped, theta=theta)):
            before, logp = logp, write(logp, facts)  # so that predictors can be seen
            facts = facts if logp is before else Facts(logp, theta)
        self._logp, self._facts = logp, facts
        #: What they are elements of, one after the other.
        self.variables = predictors(self._logp, theta, self._facts)
        if not self.variables:
            raise NotApart("log p has no predictors")
        self._data = DataSeen(self.variables)
        self.vector = pt.vector("predictors", dtype="float64", shape=(sum(map(self.size, self.variables)),))
        self._compile = compile_
        self._joint: dict[bytes, JointPredictors | None] = {}

    @functools.cached_property
    def _evaluate(self) -> Callable[[Array], Array]:
        if self.variables == [self._theta]:
            return lambda theta: theta
        with without_c():
            everything = pt.concatenate([var.ravel() for var in self.variables])
            points, [values] = graph.over_draws([everything], self._theta)
        function = self._compile([points], values)
        return lambda theta: np.asarray(function(theta))

    def density(self) -> Variable:
        """Return log p as a function of `vector`."""
        pieces, start = {}, 0
        for var in self.variables:
            shape = self._facts.shape(var)
            pieces[var] = pt.specify_shape(self.vector[start : start + self.size(var)].reshape(shape), shape)
            start += self.size(var)
        [inner] = graph_replace([self._logp], pieces, strict=False)
        if self._theta in set(ancestors([inner])):
            raise NotApart("theta has a part that is no predictor's")
        return inner

    def refresh(self, *, depend_as_before: bool = False) -> None:
        """Take the data that they depend on as they are now; of others, such as those of responses, they know nothing.

        They may depend on the same coordinates as before.
        """
        if self._data.are_current():
            return
        self._data.take()
        self._joint.clear()
        if not depend_as_before:
            self._facts.refresh()
        for name in ("linear_map",) if depend_as_before else ("linear_map", "dependence", "plan"):
            self.__dict__.pop(name, None)  # made anew when it is asked for

    @functools.cached_property
    def dependence(self) -> Dependence:
        """The coordinates that each depends on."""
        return dependence_of(self.variables, self._facts, self._theta)

    @functools.cached_property
    def linear_map(self) -> LinearMap:
        """The predictors as functions of theta."""
        return self.plan.matrix(self._evaluate)

    @functools.cached_property
    def plan(self) -> MatrixPlan:
        """How their matrix is found."""
        return MatrixPlan.of(self.dependence, self._theta.type.shape[0])

    def with_sums(self, used: Ints) -> JointPredictors | None:
        """Return them as functions of coordinates and sums over many of these; None where there are no such sums."""
        key = used.tobytes()
        if key not in self._joint:
            self._joint[key] = joint_predictors(self.variables, self._theta, self._facts, used, self._compile)
        return self._joint[key]

    def size(self, var: Variable) -> int:
        """Return the number of elements of one."""
        return int(np.prod(self._facts.shape(var)))


# --- what is read of a log density, once: its predictors, and its parts as rows of these ---

type Simplify = Callable[[list[Variable]], list[Variable]]


class Reading:
    """A log density taken apart."""

    def __init__(self, parts: Sequence[Variable], theta: Variable, simplify: Simplify, compile_: Compile) -> None:
        self.predictors, self._data = Predictors(together(parts), theta, compile_), DataSeen(parts)
        with without_c():
            inner = simplify(list(self.predictors.density().owner.inputs))
            whole = together(graph.inline_inner_graphs(inner))
        checked, self.conditions = without_checks(whole), conditions_of(pt.add(pt.constant(0.0), *whole.owner.inputs))
        self.leaves_out_conditions = checked is not whole
        self._inner = as_sum(checked, self.predictors.vector)
        self._facts = Facts(self._inner, self.predictors.vector, conditions=True)
        self._take_apart()

    def _take_apart(self) -> None:
        with without_c():
            self.terms: Terms = terms_of(self._inner.owner.inputs, self.predictors.vector, self._facts)
        self._data.take()

    def refresh(self, *, anew: bool = False) -> bool:
        """Take the data as they are now; tell whether that was needed.

        The same elements of log p are rows as before: where these are no rows any more, or others are, rows do not add
        up to log p. ``anew``, log p is taken apart once more, whatever has changed.
        """
        if self._data.are_current() and not anew:
            return False
        self.predictors.refresh()
        if anew:
            self._facts.refresh()
        if anew or not self._renew():
            self._take_apart()
        return True

    def renew(self) -> bool:
        """Take the values of data as they are now, the same elements of log p being rows as before."""
        self.predictors.refresh(depend_as_before=True)
        return self._renew()

    def _renew(self) -> bool:
        self._facts.refresh()
        terms = None if self.terms.rest else self.terms.renewed(self.predictors.vector, self._facts)
        if terms is None:
            return False
        self.terms = terms
        self._data.take()
        return True
