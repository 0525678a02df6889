"""The linear predictors of a log density: affine functions of theta that all else is made of."""

import functools

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pytensor.tensor as pt

from numpy.typing import NDArray
from pytensor.compile import Function
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.replace import graph_replace
from pytensor.graph.traversal import ancestors
from pytensor.tensor.elemwise import Elemwise

from pymc_ngvi.core.refusal import NotApart
from pymc_ngvi.core.sparsity.dependence_sets import Dependence, Ints
from pymc_ngvi.core.values import Array
from pymc_ngvi.graphs import graph
from pymc_ngvi.graphs.backends import without_c
from pymc_ngvi.ops.elements import Rearranged
from pymc_ngvi.ops.facts import Facts
from pymc_ngvi.ops.registry import elements, operation
from pymc_ngvi.reading.affine import dependence_of, factors_outside, grouped, predictors, with_others
from pymc_ngvi.reading.sums import JointPredictors, joint_predictors
from pymc_ngvi.rows.linear_map import LinearMap, MatrixPlan

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

type Compile = Callable[[list[Variable], Variable | list[Variable]], Function]


def together(parts: Sequence[Variable]) -> Variable:
    """Return a vector of the parts of log p, scalars, which are its inputs."""
    return pt.basic.MakeVector("float64")(*[pt.cast(part, "float64") for part in parts])


def written_apart(logp: Variable, theta: Variable) -> tuple[Variable, Facts]:
    """Write log p, or a vector of its parts, so that its predictors can be seen; return it with its facts."""
    facts = Facts(logp, theta)
    for write in (scales_outside, factors_outside, functools.partial(grouped, theta=theta)):
        before, logp = logp, write(logp, facts)
        facts = facts if logp is before else Facts(logp, theta)
    return logp, facts


class Predictors:
    """Linear predictors, and log p as a function of them."""

    def __init__(self, logp: Variable, theta: Variable, compile_: Compile) -> None:
        self._theta = theta
        self._logp, self._facts = written_apart(logp, theta)
        self._found = predictors(self._logp, theta, self._facts)
        if not self._found:
            raise NotApart("log p has no predictors")
        # Where shared variables hold their values: they are looked at often.
        self._cells = [v.container.storage for v in ancestors([logp]) if isinstance(v, SharedVariable)]
        self.vector = pt.vector("predictors", dtype="float64", shape=(sum(map(self.size, self._found)),))
        self._compile = compile_
        self.version = -1
        self._take()

    @functools.cached_property
    def _evaluate(self) -> Callable[[Array], Array]:
        if self._found == [self._theta]:
            return lambda theta: theta
        with without_c():
            everything = pt.concatenate([var.ravel() for var in self._found])
            points, [values] = graph.over_draws([everything], self._theta)
        function = self._compile([points], values)
        return lambda theta: np.asarray(function(theta))

    @functools.cached_property
    def are_coordinates(self) -> NDArray[np.bool_]:
        """Whether each is a coordinate itself, and no linear combination."""
        return np.repeat([var is self._theta for var in self._found], [self.size(var) for var in self._found])

    def density(self) -> Variable:
        """Return log p as a function of `vector`."""
        pieces, start = {}, 0
        for var in self._found:
            shape = self._facts.shape(var)
            pieces[var] = pt.specify_shape(self.vector[start : start + self.size(var)].reshape(shape), shape)
            start += self.size(var)
        [inner] = graph_replace([self._logp], pieces, strict=False)
        if self._theta in set(ancestors([inner])):
            raise NotApart("theta has a part that is no predictor's")
        return inner

    def refresh(self) -> bool:
        """Take the data as they are now: ``pm.set_data`` puts other arrays in the place of the old ones."""
        if all(new is old for new, old in zip(self._now(), self._data, strict=True)):
            return False
        self.retake()
        return True

    def _take(self) -> None:
        self._data, self.version = self._now(), self.version + 1
        self._forget("dependence", "plan", "linear_map")

    def _forget(self, *names: str) -> None:
        """Make what was computed anew when it is asked for."""
        for name in names:
            self.__dict__.pop(name, None)

    def renew(self) -> None:
        """Take the values of the data as they are now, for predictors that depend on the same coordinates as before."""
        self._data, self.version = self._now(), self.version + 1
        self._forget("linear_map")

    def retake(self) -> None:
        """Take the data as they are now, changed or not."""
        self._facts.refresh()
        self._take()

    @functools.cached_property
    def dependence(self) -> Dependence:
        """The coordinates that each depends on."""
        return dependence_of(self._found, self._facts, self._theta)

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
        return joint_predictors(self._found, self._theta, self._facts, used, self._compile)

    @property
    def variables(self) -> list[Variable]:
        """The variables that they are elements of, one after the other."""
        return self._found

    def size(self, var: Variable) -> int:
        """Return the number of elements of one."""
        return int(np.prod(self._facts.shape(var)))

    def _now(self) -> list[object]:
        return [cell[0] for cell in self._cells]
