"""Log p, a function of predictors, as a sum: of rows, each a function of a few of these, and of a rest."""

import functools
import hashlib
import itertools

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import pytensor
import pytensor.tensor as pt

from numpy.typing import NDArray
from pytensor.graph import Apply, Constant, Variable, clone_replace, graph_replace
from pytensor.graph.traversal import ancestors, toposort

from pymc_ngvi.core.sparsity.dependence_sets import Ints
from pymc_ngvi.core.types import Array
from pymc_ngvi.graphs import graph
from pymc_ngvi.graphs.backends import quickly, without_c
from pymc_ngvi.ops.elements import Apart, CannotLift, Facts, ScalarForm, core_op
from pymc_ngvi.ops.registry import operation
from pymc_ngvi.reading.affine import Dependences, is_linear, varying_inputs

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
                raise CannotLift(f"elements are made of more than {_MOST_OPERATIONS:,} operations")
            self._done[key] = self._lifted(var, index)
        return self._done[key]

    def copy(self) -> "Lift":
        """Return another one that has lifted the same, and goes on by itself."""
        return replace(
            self, slots=dict(self.slots), data=dict(self.data), sources=dict(self.sources), _done=dict(self._done)
        )

    def back_to(self, other: "Lift") -> None:
        """Forget what was lifted since another one was like this one."""
        self.slots, self.data, self.sources, self._done = other.slots, other.data, other.sources, other._done

    def reads(self, value: Variable) -> set[Variable]:
        """Return the slots that a function of rows reads."""
        return {v for v in ancestors([value]) if v in self.slots}

    def columns(self, n_rows: int) -> Ints:
        """Return the predictors of each row, (n_rows, n_slots)."""
        return np.stack([np.broadcast_to(at, n_rows) for at in self.slots.values()], axis=1)

    def _lifted(self, var: Variable, index: Ints) -> Variable:
        if var is self.predictors:
            slot = pt.matrix(f"predictor {len(self.slots)}", dtype="float64", shape=(None, None))
            self.slots[slot] = index
            return slot
        if self.facts.is_known(var):
            return self._known(var, index)
        node = var.owner
        if node is None:
            raise CannotLift(f"{var} varies")
        rule = operation(node.op).lift
        if isinstance(rule, str):
            raise CannotLift(f"PyTensor's {type(core_op(node.op)).__name__} {rule}")
        return rule(self, node, var, index)

    def _known(self, var: Variable, index: Ints) -> Variable:
        if isinstance(var, Constant) and np.size(var.data) == 1:
            return pt.constant(np.reshape(var.data, (1, 1)))
        try:
            value = np.asarray(self.facts.value(var))
        except KeyError as error:
            raise CannotLift(f"the value of {var} is not at hand") from error
        rows = value.reshape(1, -1)[:, index]
        given = pt.tensor(f"data {len(self.data)}", dtype=rows.dtype, shape=(1, 1 if len(index) == 1 else None))
        self.data[given], self.sources[given] = rows, Source(var, index)
        return given


# --- predictors of rows in terms of others: those that are the same numbers, written otherwise, are found by their
# values ---
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
_MOST_PREDICTORS, _MOST_SLOTS, _MOST_GROUPS = 8, 24, 64
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
            made.append(Rows(lift.columns(len(index)), list(lift.slots), data, factor * value, sources=sources))
    except CannotLift as error:
        weighed = pt.sum(total.reshape(facts.shape(var)) * var)
        whole = _whole(var, total, weighed, predictors, dependences)
        return Summand([], weighed, error.sentence, weights) if whole is None else Summand([whole], None, "", weights)
    return Summand(made, None, "", weights)


def _summed(found: list[Rows]) -> tuple[list[Rows], list[Rows]]:
    """Add up rows that are functions of the same predictors; return those of few directions, and of many."""
    groups: dict[tuple[bytes, ...], list[Rows]] = {}
    for rows in found:
        if not rows.is_whole:
            groups.setdefault(tuple(column.tobytes() for column in rows.index.T), []).append(rows)
    merged = [*[_merged(group).by_sum() for group in groups.values()], *(rows for rows in found if rows.is_whole)]
    wide = [rows for rows in merged if rows.n_directions > _MOST_PREDICTORS]
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
                raise CannotLift("elements come from too many variables") from apart
            continue
        if not 0 < len(lift.slots) <= _MOST_SLOTS:
            raise CannotLift(f"an element depends on {len(lift.slots)} predictors")
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


# --- what a function of rows tells of its second derivatives before any is made: which are not 0, and that they exist
# ---


type Pairs = frozenset[tuple[Variable, Variable]]


def is_smooth(rows: Rows) -> bool:
    """Tell whether a row is made of common operations alone, all of which have second derivatives."""
    return all(ScalarForm.of(node) is not ScalarForm.FUNCTION for node in toposort([rows.value]))


def interacts(rows: Rows) -> NDArray[np.bool_]:
    """Return by which pairs of predictors second derivatives may differ from 0: any, of what is not looked into."""
    k = len(rows.slots)
    if rows.is_whole:
        return np.ones((k, k), dtype=bool)
    number = {slot: i for i, slot in enumerate(rows.slots)}
    depends: dict[Variable, Slots] = {slot: frozenset([slot]) for slot in rows.slots}
    pairs: dict[Variable, Pairs] = {}
    for node in toposort([rows.value]):
        made = _pairs(node, depends, pairs)
        for out in node.outputs:
            depends[out] = frozenset().union(*(depends.get(i, _NONE) for i in node.inputs))
            pairs[out] = made
    result = np.zeros((k, k), dtype=bool)
    for a, b in pairs.get(rows.value, frozenset()):
        result[number[a], number[b]] = result[number[b], number[a]] = True
    return result


def _pairs(node: Apply, depends: dict[Variable, Slots], pairs: dict[Variable, Pairs]) -> Pairs:
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
