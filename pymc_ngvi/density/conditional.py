"""Compiled derivatives, up to the third, of a log density that guides a reparametrisation: one direction for each draw.

The modes of local coordinates given global ones, and the adjoint of their curvature, need derivatives of the *guide*:
the log density of the model itself, or another function of the same variables, given the data at the time. All but the
last derivative are by variables with local coordinates alone: what depends on global ones only, the priors of scales
and of correlations for instance, is in none of these graphs.
"""

import numpy as np
import pytensor.tensor as pt

from pytensor.compile import Function
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.gradient import DisconnectedType
from pytensor.graph.basic import Variable
from pytensor.graph.replace import graph_replace, vectorize_graph
from pytensor.graph.traversal import graph_inputs
from pytensor.tensor.type import TensorType
from pytensor.xtensor.type import XTensorType, as_xtensor

from pymc_ngvi.core.types import Array
from pymc_ngvi.density.logdensity import LogDensity
from pymc_ngvi.families.matrices.arrow import ArrowStructure
from pymc_ngvi.graphs import graph
from pymc_ngvi.graphs.backends import without_c
from pymc_ngvi.graphs.layout import Layout
from pymc_ngvi.reading.factors import logp_of

#: Arrays of directions that each function takes.
_N_DIRECTIONS = {"slopes": 1, "through": 1, "third": 2}


class GuideFunctions:
    """Derivatives of a guide along local directions, batched over pairs of a draw and a direction.

    Directions, (n_rows, n_dim), are 0 in the coordinates of the border.
    """

    def __init__(
        self, density: LogDensity, structure: ArrowStructure, guide: Variable | None = None, order: int = 3
    ) -> None:
        self.density = density
        self.is_exact = guide is None
        self._functions: dict[str, Function] = {}
        with density.functions.timed():
            self._build(density, structure, guide, order)

    def _build(self, density: LogDensity, structure: ArrowStructure, guide: Variable | None, order: int) -> None:
        local = set(structure.locals_.tolist())
        names = [v.name for v in density.layout.variables if not local.isdisjoint(range(v.where.start, v.where.stop))]
        with without_c():
            outputs = [logp_of(density.graphs.factors) if guide is None else guide]
            shared = [v for v in graph_inputs(outputs) if isinstance(v, SharedVariable)]
            constants = {v: _constant(v) for v in shared if isinstance(v.type, TensorType | XTensorType)}
            [guide] = list(graph_replace(outputs, constants, strict=False)) if constants else outputs
            self._pieces = _Pieces(density.layout, "theta")
            self._left, self._right = _Pieces(density.layout, "left"), _Pieces(density.layout, "right")
            [f] = graph.on_flat_vector(density.model, density.layout, [guide], self._pieces)
            [f] = density.graphs.simplify([f])
            slopes = density.graphs.simplify(self._derivatives(f, names))
            along = self._inner(slopes, self._right, names)
            products = density.graphs.simplify(self._derivatives(along, names))
            # Of each function, its results, in variables whose parts are the outputs one after the other.
            self._variables, self._graphs = {"slopes": [names, names]}, {"slopes": [*slopes, *products]}
            if order == 3:
                everything = list(self._pieces.by_name)
                curvature = self._inner(products, self._left, names)
                for name, cost in (("through", along), ("third", curvature)):
                    self._variables[name] = [everything]
                    self._graphs[name] = density.graphs.simplify(self._derivatives(cost, everything))

    def __getstate__(self) -> dict[str, object]:
        """Return what to pickle: compiled functions are made again when they are needed."""
        return {**self.__dict__, "_functions": {}}

    def slopes(self, theta: Array, directions: Array) -> tuple[Array, Array]:
        """Return the gradient of the guide at each point, and its Hessian times the direction of that row."""
        gradient, product = self._evaluate("slopes", theta, directions)
        return gradient, product

    def through(self, theta: Array, directions: Array) -> Array:
        """Return the Hessian at each point times the direction of that row, (n_rows, n_dim)."""
        return self._evaluate("through", theta, directions)[0]

    def third(self, theta: Array, left: Array, right: Array) -> Array:
        """Return the gradient of ``left^T hess right`` with constant directions, row by row, (n_rows, n_dim)."""
        return self._evaluate("third", theta, right, left)[0]

    # --- evaluation ---

    def _evaluate(self, name: str, *arguments: Array) -> list[Array]:
        n_rows, size = len(arguments[0]), self.density.batch_size
        function = self._function(name)
        results = [np.zeros_like(arguments[0]) for _ in self._variables[name]]
        parts = [
            result[:, self._pieces.where[v]]
            for result, names in zip(results, self._variables[name], strict=True)
            for v in names
        ]
        for start in range(0, n_rows, size):
            rows = slice(start, min(start + size, n_rows))
            inputs = [self.density.functions.filled_up(np.ascontiguousarray(a[rows])) for a in arguments]
            with np.errstate(all="ignore"):  # far from the mode, densities overflow: the caller sees it
                outputs = function(*inputs)
            for part, output in zip(parts, outputs, strict=True):
                part[rows] = np.asarray(output)[: rows.stop - rows.start]
        return results

    def _function(self, name: str) -> Function:
        if name not in self._functions:
            with self.density.functions.timed():
                with without_c():
                    n_dim = self.density.n_dim
                    pieces = [self._pieces, self._right, self._left][: 1 + _N_DIRECTIONS[name]]
                    vectors = [pt.vector(p.what, dtype="float64", shape=(n_dim,)) for p in pieces]
                    slices = {
                        piece: vector[p.where[key]]
                        for p, vector in zip(pieces, vectors, strict=True)
                        for key, piece in p.by_name.items()
                    }
                    outputs = graph.inline_inner_graphs(list(graph_replace(self._graphs[name], slices, strict=False)))
                    matrices = [pt.matrix(p.what, dtype="float64", shape=(None, n_dim)) for p in pieces]
                    batched = vectorize_graph(outputs, dict(zip(vectors, matrices, strict=True)))
                    # What depends on no input comes back without the axis.
                    n_rows = matrices[0].shape[0]
                    outputs = [b if b.type.ndim == 2 else pt.broadcast_to(b, (n_rows, b.shape[0])) for b in batched]
                self._functions[name] = self.density.functions.compile(matrices, outputs)
        return self._functions[name]

    # --- graphs ---

    def _derivatives(self, cost: Variable, names: list[str]) -> list[Variable]:
        """Return the derivatives of a scalar by the pieces of some variables, with constant directions."""
        wrt = [self._pieces.by_name[name] for name in names]
        constants = [*self._left.by_name.values(), *self._right.by_name.values()]
        try:
            results = pt.grad(cost, wrt, consider_constant=constants, disconnected_inputs="ignore")
        except (NotImplementedError, TypeError, AttributeError) as error:
            raise graph.MissingDerivativeError(
                f"A derivative of this model's log density, of the first to third order, can't be formed: {error}. A "
                "reparametrisation needs them. Rewrite that term with differentiable functions, or fit without reparam."
            ) from error
        return [
            pt.zeros_like(x) if isinstance(d.type, DisconnectedType) else d for d, x in zip(results, wrt, strict=True)
        ]

    def _inner(self, vectors: list[Variable], directions: "_Pieces", names: list[str]) -> Variable:
        terms = [(v * directions.by_name[name]).sum() for v, name in zip(vectors, names, strict=True)]
        return pt.add(pt.constant(0.0), *terms)


class _Pieces:
    """A flat vector as one vector for each variable: what depends on some of them alone can be told."""

    def __init__(self, layout: Layout, what: str) -> None:
        self.what = what
        self.where = {v.name: v.where for v in layout.variables}
        self.by_name = {
            v.name: pt.vector(f"{what}:{v.value_name}", dtype="float64", shape=(v.size,)) for v in layout.variables
        }
        self._by_place = {(v.where.start, v.where.stop): self.by_name[v.name] for v in layout.variables}

    def __getitem__(self, where: slice) -> Variable:
        """Return the piece of one variable, by its place in the flat vector."""
        return self._by_place[where.start, where.stop]


def _constant(shared: Variable) -> Variable:
    value = pt.as_tensor(np.array(shared.get_value(borrow=True)))
    return as_xtensor(value, dims=shared.type.dims) if isinstance(shared.type, XTensorType) else value
