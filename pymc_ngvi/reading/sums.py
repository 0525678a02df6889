"""Sums over many coordinates among what predictors are made of: a row that sees them all makes the Hessian dense."""

import itertools
import math

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytensor.tensor as pt

from pytensor.compile import Function
from pytensor.graph.basic import Variable, equal_computations
from pytensor.graph.replace import graph_replace
from pytensor.graph.traversal import ancestors

from pymc_ngvi.core.sparsity.dependence_sets import Dependence, Ints
from pymc_ngvi.core.values import Array
from pymc_ngvi.graphs import graph
from pymc_ngvi.graphs.backends import without_c
from pymc_ngvi.ops.facts import Facts
from pymc_ngvi.reading.affine import Dependences, affine_functions, dependence_of
from pymc_ngvi.reading.factors import quickly
from pymc_ngvi.rows.linear_map import LinearMap, MatrixPlan

type Compile = Callable[[list[Variable], Variable], Function]

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
                evaluate, weights = _function(everything, point, compile_), _weights(theta, first, n_joint - n_dim)
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


def _function(everything: Variable, point: Variable, compile_: Compile) -> Callable[[Array], Array]:
    """Return the predictors as a function of coordinates and sums."""
    points, [values] = graph.over_draws([everything], point)
    function = compile_([points], values)
    return lambda at: np.asarray(function(at))


def _weights(theta: Variable, sums: list[Variable], n: int) -> Callable[[Array], list[Array]]:
    """Return the sums, and then the rows of their derivatives, as a function of theta."""
    flat = pt.concatenate([var.ravel() for var in sums])
    return quickly([theta], [flat, *(graph.gradient(flat[k], theta) for k in range(n))])


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
