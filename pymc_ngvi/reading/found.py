"""The linear predictors of a log density: affine functions of theta that all else is made of."""

import functools
import itertools
import math

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pytensor.tensor as pt

from numpy.typing import NDArray
from pytensor.compile import Function, SharedVariable
from pytensor.graph import ancestors, graph_replace
from pytensor.graph.basic import Apply, Variable, equal_computations
from pytensor.tensor.elemwise import Elemwise

from pymc_ngvi.core.refusal import NotApart
from pymc_ngvi.core.sparsity.dependence_sets import Dependence, Ints
from pymc_ngvi.core.types import Array
from pymc_ngvi.graphs import graph
from pymc_ngvi.graphs.backends import quickly, without_c
from pymc_ngvi.ops.elements import Facts, Rearranged
from pymc_ngvi.ops.registry import elements, operation
from pymc_ngvi.reading.affine import (
    Dependences,
    affine_functions,
    as_sum,
    conditions_of,
    dependence_of,
    factors_outside,
    grouped,
    predictors,
    with_others,
    without_checks,
)
from pymc_ngvi.reading.terms import Terms, terms_of
from pymc_ngvi.rows.linear_map import LinearMap, MatrixPlan

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
        factors.append(
            _power(factor if factor.type.ndim == out.type.ndim else factor.reshape((1,) * out.type.ndim), degree)
        )
    if not factors or not has_matrix or (is_elementwise and unknown):
        return None
    return _Scaled(functools.reduce(pt.mul, factors), node.op(*matrices), not unknown)


def _power(factor: Variable, degree: float) -> Variable:
    """Return a power of a positive number, in the shortest form."""
    if degree == 1.0:
        return factor
    return pt.sqrt(factor) if degree == 0.5 else 1.0 / factor if degree == -1.0 else factor**degree


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

    @functools.cached_property
    def are_coordinates(self) -> NDArray[np.bool_]:
        """Whether each is a coordinate itself, and no linear combination."""
        return np.repeat([var is self._theta for var in self.variables], [self.size(var) for var in self.variables])

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

    def refresh(self) -> bool:
        """Take the data as they are now, the same elements of log p being rows as before; tell whether they changed.

        Where these are no rows any more, or others are, rows do not add up to log p.
        """
        if self._data.are_current():
            return False
        self.predictors.refresh()
        if not self._renew():
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

    def retake(self) -> None:
        """Take the data as they are now, and log p apart once more; raises as `refresh`."""
        self.predictors.refresh()
        self._facts.refresh()
        self._take_apart()
