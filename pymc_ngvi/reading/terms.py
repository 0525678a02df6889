"""Log p, a function of predictors, as a sum: of rows, each a function of a few of these, and of a rest."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytensor
import pytensor.tensor as pt

from pytensor.graph.basic import Variable
from pytensor.graph.replace import graph_replace

from pymc_ngvi.core.sparsity.dependence_sets import Ints
from pymc_ngvi.core.values import Array
from pymc_ngvi.graphs import graph
from pymc_ngvi.graphs.backends import without_c
from pymc_ngvi.ops.facts import Facts
from pymc_ngvi.ops.lifting import Apart, CannotLift
from pymc_ngvi.reading.affine import is_linear, varying_inputs
from pymc_ngvi.reading.compiled import CompiledOnce
from pymc_ngvi.reading.dependence import Dependences
from pymc_ngvi.reading.directions import sum_of
from pymc_ngvi.reading.lift import Lift, Source

#: Predictors of a row, at most, those that come in by one sum counted as one, and as many; groups of elements that
#: come from different variables, at most.
_MOST_PREDICTORS, _MOST_SLOTS, _MOST_GROUPS = 8, 24, 64
#: Predictors of a row that is more than arithmetic with numbers, such as a determinant.
_MOST_WHOLE = 3
#: Predictors of a row, up to which nothing is gained by taking sums of them together.
_FEW = 2


@dataclass(frozen=True, eq=False)
class Rows:
    """Elements of log p that are the same function of different predictors.

    Parameters
    ----------
    index : ndarray of int, shape (n_rows, k)
        The predictors of each row.
    slots : list of pytensor variables
        Inputs of the function, (n_points, n_rows), one for each of the k.
    data : dict
        Inputs for known values, (1, n_rows) or (1, 1), with these.
    value : pytensor variable
        The function, (n_points, n_rows).
    sum_ : pytensor variable or None
        Through which alone it depends on the last ``n_summed`` predictors, an affine function of these given the
        others.
    n_summed : int
    is_whole : bool
        Whether this is one row, and more than arithmetic with numbers.
    sources : dict
        Where data are from.
    """

    index: Ints
    slots: list[Variable]
    data: dict[Variable, Array]
    value: Variable
    sum_: Variable | None = None
    n_summed: int = 0
    is_whole: bool = False
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
class Terms:
    """A function of predictors as a sum.

    Parameters
    ----------
    rows : list of Rows
    slope : ndarray, shape (n_predictors,)
        What is linear.
    rest : list of pytensor scalars
        What is no sum over rows, as functions of the predictors.
    why : list of str
        Why each of these is none.
    weigh : callable
        Returns the variables that log p is linear in, with the weights of their elements, for the data as they are.
    """

    rows: list[Rows]
    slope: Array
    rest: list[Variable]
    why: list[str]
    weigh: Callable[[], list[tuple[Variable, Array]]]

    def renewed(self, predictors: Variable, facts: Facts) -> "Terms | None":
        """Return the same terms with the values that data have now; None where other elements count.

        What else hangs on values, such as which branch is taken, is as it was: that the sum is right, has to be seen.
        """
        weights = {var: weight.ravel() for var, weight in self.weigh()}
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
        n_counted = sum(np.count_nonzero(weight) for var, weight in weights.items() if var is not predictors)
        n_before = sum(len(s.elements) for rows in self.rows for s in rows.sources.values() if s.is_weight)
        return Terms(made, slope, [], [], self.weigh) if n_counted == n_before else None


def terms_of(logp: Variable, predictors: Variable, facts: Facts, compile_: CompiledOnce) -> Terms:
    """Take a function of predictors apart."""
    weigh = _summands(logp, predictors, facts, compile_)
    parts = weigh()
    slope = np.zeros(predictors.type.shape)
    rest: list[Variable] = []
    why: list[str] = []
    groups: dict[tuple[bytes, ...], list[Rows]] = {}
    wholes: list[Rows] = []
    dependences = Dependences(facts, predictors)
    for var, weight in parts:
        if var is predictors:
            slope += weight
            continue
        try:
            for rows in _rows(var, weight, predictors, facts):
                groups.setdefault(tuple(column.tobytes() for column in rows.index.T), []).append(rows)
        except CannotLift as error:
            whole = _whole(var, weight, predictors, dependences)
            if whole is None:
                rest.append(pt.sum(weight * var))
                why.append(str(error))
            else:
                wholes.append(whole)
    merged = [*[_merged(group).by_sum() for group in groups.values()], *wholes]
    wide = [rows for rows in merged if rows.n_directions > _MOST_PREDICTORS]
    rest += [rows.of(predictors) for rows in wide]
    why += [f"an element varies in {rows.n_directions} directions" for rows in wide]
    return Terms([rows for rows in merged if rows not in wide], slope, rest, why, weigh)


def _summands(
    logp: Variable, predictors: Variable, facts: Facts, compile_: CompiledOnce
) -> Callable[[], list[tuple[Variable, Array]]]:
    """Return what returns variables that log p is linear in, up to a constant, with the weights of their elements."""
    parts, stack, seen = [], [logp], {logp}
    while stack:
        var = stack.pop()
        node = var.owner
        if var is predictors or node is None or not is_linear(node, facts):
            parts.append(var)
            continue
        for other in varying_inputs(node, facts):
            if other not in seen:
                seen.add(other)
                stack.append(other)
    weights = _weights(logp, parts, facts, compile_)
    return lambda: [(var, w) for var, w in zip(parts, weights(), strict=True) if w.any()]


def _weights(logp: Variable, parts: list[Variable], facts: Facts, compile_: CompiledOnce) -> Callable[[], list[Array]]:
    if parts == [logp]:
        return lambda: [np.ones(())]
    # As a part may be an input of another, each stands in for itself.
    stand_in = [part.type() for part in parts]
    outer = pytensor.graph.replace.clone_replace([logp], dict(zip(parts, stand_in, strict=True)), rebuild_strict=False)[
        0
    ]
    with without_c():
        # The slopes are constant, but may be written with the shapes of what they are slopes in.
        function = compile_(stand_in, pytensor.grad(outer, stand_in))

    def weights() -> list[Array]:
        with without_c():
            found = function(*[np.zeros(facts.shape(part)) for part in parts])
        return [np.array(w, dtype=np.float64) for w in found]

    return weights


def _rows(var: Variable, weight: Array, predictors: Variable, facts: Facts) -> Iterator[Rows]:
    """Lift the elements of a variable that count, in as many groups as it takes."""
    flat = weight.ravel()
    for index, lift, value in lifted(var, np.flatnonzero(flat), predictors, facts):
        factor = pt.tensor("weight", dtype="float64", shape=(1, None))
        data = {**lift.data, factor: flat[index][None]}
        sources = {**lift.sources, factor: Source(var, index, is_weight=True)}
        yield Rows(lift.columns(len(index)), list(lift.slots), data, factor * value, sources=sources)


def lifted(var: Variable, index: Ints, predictors: Variable, facts: Facts) -> list[tuple[Ints, Lift, Variable]]:
    """Lift elements of a variable, in as many groups as it takes.

    Parameters
    ----------
    var : pytensor variable
    index : ndarray of int, shape (n_elements,)
        Flat positions in it.
    predictors : pytensor vector
    facts : Facts

    Returns
    -------
    list of (ndarray of int, Lift, pytensor variable)
        The elements of each group, what they were lifted by, and the function of rows.

    Raises
    ------
    CannotLift
    """
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


def _whole(var: Variable, weight: Array, predictors: Variable, dependences: Dependences) -> Rows | None:
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
    [inner] = graph_replace([pt.sum(weight * var)], {predictors: every}, strict=False)
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
            [same] = pytensor.graph.replace.clone_replace(
                [other.value], dict(zip(other.slots, first.slots, strict=True)), rebuild_strict=False
            )
        value = value + same
    return Rows(first.index, first.slots, data, value, sources=sources)
