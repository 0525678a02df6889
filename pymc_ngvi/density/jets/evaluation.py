"""Log p, its gradient and its Hessian at many points, from one pass through its graph."""

from collections.abc import Callable

import numpy as np

from pytensor.compile import Function
from pytensor.graph.basic import Constant, Variable
from pytensor.graph.traversal import toposort

from pymc_ngvi.core.values import AnyArray, Array
from pymc_ngvi.density.jets.arrays import JetKind, NoJet, Space
from pymc_ngvi.density.jets.program import Program, Rules
from pymc_ngvi.graphs.graph import MissingDerivativeError

#: Coordinates up to which second derivatives by all pairs are carried along.
MOST_DIMENSIONS = 20


class ForwardMode:
    """A log density as rules on jets.

    Parameters
    ----------
    logp : pytensor scalar
    theta : pytensor vector

    Raises
    ------
    NoJet
        Where an operation has no rule.
    """

    def __init__(self, logp: Variable, theta: Variable) -> None:
        varying = _depends_on(theta, logp)
        nodes = [node for node in toposort([logp]) if node.outputs[0] in varying]
        given = dict.fromkeys(i for node in nodes for i in node.inputs if i not in varying)
        self._given = [var for var in given if not isinstance(var, Constant)]
        rules = Rules()
        kinds = [JetKind.JET, *[JetKind.FIXED] * len(self._given)]
        self._program = Program([theta, *self._given], kinds, [logp], rules)
        try:
            rules.make()
        except MissingDerivativeError as error:
            raise NoJet(str(error)) from error

    def compiled(self, compile_: Callable[[list[Variable], list[Variable]], Function]) -> "Jets":
        """Return what evaluates it; ``compile_`` compiles a function, of what does not depend on theta."""
        return Jets(self._program, compile_([], self._given) if self._given else None)


class Jets:
    """Evaluates a log density and its derivatives.

    Parameters
    ----------
    program : Program
    given : Function, optional
        Returns what does not depend on theta.
    """

    def __init__(self, program: Program, given: Function | None) -> None:
        self._program, self._given = program, given

    def __call__(self, theta: Array, order: int) -> Array:
        """Return log p and its derivatives, (n_terms, n_points), at points, (n_points, n_dim)."""
        space = Space(theta.shape[1], len(theta), order)
        given: list[AnyArray] = [] if self._given is None else [np.asarray(x)[None, None] for x in self._given()]
        with np.errstate(all="ignore"):
            [jets] = self._program(space, [space.of_points(theta), *given])
        return space.lifted(jets)

    def logp(self, theta: Array) -> tuple[Array]:
        """Return log p, (n_points,)."""
        return (self(theta, 0)[0],)

    def logp_grad(self, theta: Array) -> tuple[Array, Array]:
        """Return log p, (n_points,), and its gradient, (n_points, n_dim)."""
        jets = self(theta, 1)
        return jets[0], np.ascontiguousarray(jets[1:].T)

    def hessians(self, theta: Array) -> Array:
        """Return the Hessian at each point, (n_points, n_dim, n_dim)."""
        n_points, n_dim = theta.shape
        space = Space(n_dim, n_points, 2)
        result, (i, j) = np.empty((n_points, n_dim, n_dim)), space.pairs
        result[:, i, j] = result[:, j, i] = space.seconds(self(theta, 2)).T
        return result


def _depends_on(theta: Variable, out: Variable) -> set[Variable]:
    found = {theta}
    for node in toposort([out]):
        if not found.isdisjoint(node.inputs):
            found.update(node.outputs)
    return found
