"""Compiled derivatives, up to the third, of a log density that guides a reparametrisation: one direction for each draw.

The modes of local coordinates given global ones, and the adjoint of their curvature, need derivatives of the *guide*:
the log density of the model itself, or another function of the same variables, given the data at the time. All but the
last derivative are by variables with local coordinates alone: what depends on global ones only, the priors of scales
and of correlations for instance, is in none of these graphs.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytensor
import pytensor.tensor as pt

from numpy.typing import NDArray
from pytensor.compile import Function, SharedVariable, ViewOp
from pytensor.gradient import DisconnectedType
from pytensor.graph import Variable, graph_inputs, graph_replace, vectorize_graph
from pytensor.scalar import Cast, Exp, Identity, Sigmoid
from pytensor.tensor.elemwise import Elemwise
from pytensor.tensor.random.basic import BernoulliRV, NormalRV, PoissonRV
from pytensor.tensor.type import TensorType
from pytensor.xtensor.shape import Transpose
from pytensor.xtensor.type import XTensorType, as_xtensor
from pytensor.xtensor.vectorization import XRV, XElemwise
from scipy.special import expit, logit

from pymc_ngvi.core.types import Array
from pymc_ngvi.density.logdensity import LogDensity
from pymc_ngvi.families.gaussian import Partition
from pymc_ngvi.graphs import graph
from pymc_ngvi.graphs.backends import quick_mode, without_c
from pymc_ngvi.graphs.layout import Layout
from pymc_ngvi.reading.affine import logp_of
from pymc_ngvi.reading.terms import ROUNDING

# --- guides of group effects other than log p itself: the prior alone, and a quadratic one from the data [1]_ ---
#
# In the second, each log likelihood of an observation is replaced by its Taylor polynomial of the second order in the
# linear predictor eta, about an estimate that does not depend on the parameters. Where the effects of a group have a
# Gaussian prior and enter eta linearly, the guide is quadratic in them: its mode takes one step of Newton's method.
#
# References
# ----------
# .. [1] L. S. L. Tan (2021). Use of model reparametrization to improve variational Bayes. Journal of the Royal
#    Statistical Society, Series B, 83. https://doi.org/10.1111/rssb.12399


_INSTEAD = "Use reparam='rvb2', which works with any likelihood."


@dataclass(frozen=True)
class _Likelihood:
    """A distribution with its canonical link."""

    name: str
    #: The inverse link; None for the identity.
    link: type | None
    #: How a model has to state it.
    written: str
    #: From data, and the block of each observation, to an estimate of eta, and to the first and second derivative there
    #: of the log likelihood; None where no expansion is needed.
    expand: Callable[[Array, NDArray[np.intp]], tuple[Array, Array, Array]] | None = None


def quadratic_guide(density: LogDensity, structure: Partition) -> Variable:
    """Return the guide as a function of the value variables of the model."""
    if not structure.n_local:
        raise ValueError(
            "reparam='rvb1' standardises local coordinates, such as the effects of groups that are independent given "
            "the others; this model has none. Fit it without reparam."
        )
    model = density.model
    if not model.observed_RVs:
        raise ValueError(
            f"The model has no observed variables, and reparam='rvb1' takes its guide from data. {_INSTEAD}"
        )
    found = [_recognised(rv) for rv in model.observed_RVs]
    expanded = [(rv, *f) for rv, f in zip(model.observed_RVs, found, strict=True) if f[0].expand is not None]
    by_expansion = {rv for rv, _, _ in expanded}
    rest = logp_of([factor for factor in density.graphs.factors if factor.variable not in by_expansion])
    with without_c():
        etas = model.replace_rvs_by_values([eta for _, _, eta in expanded])
        values = pytensor.function([], [model.rvs_to_values[rv] for rv, _, _ in expanded], mode=quick_mode())()
        data = [np.asarray(value, dtype=np.float64) for value in values]
        groups = _groups(density, structure, density.graphs.on_flat_vector(etas), [y.shape for y in data])
    terms = [
        _expansion(kind, eta, y, group)
        for (_, kind, _), eta, y, group in zip(expanded, etas, data, groups, strict=True)
    ]
    return pt.add(rest, *terms) if terms else rest


# --- what a model says ------------------------------------------------------------------------------------------------


def _recognised(rv: Variable) -> tuple[_Likelihood, Variable]:
    """Return the kind of an observed variable, and its linear predictor in terms of random variables."""
    drawn = rv.owner
    while isinstance(drawn.op, Transpose):  # dims in another order than those of the parameters
        drawn = drawn.inputs[0].owner
    op = drawn.op
    distribution = op.core_op if isinstance(op, XRV) else op
    kind = next((kind for op_class, kind in _KINDS.items() if isinstance(distribution, op_class)), None)
    if kind is None:
        name = getattr(op, "_print_name", None)
        kind_of = name[0] if name else type(op).__name__
        raise ValueError(
            f"The observed variable {rv.name!r} is {kind_of}; reparam='rvb1' knows Poisson, Bernoulli and Normal ones. "
            f"{_INSTEAD}"
        )
    parameter = op.dist_params(drawn)[0]
    while (node := parameter.owner) is not None:  # casts, and the copies that Deterministics are
        copies = isinstance(node.op, Elemwise | XElemwise) and isinstance(node.op.scalar_op, Identity | Cast)
        if not copies and not isinstance(node.op, ViewOp):
            break
        parameter = node.inputs[0]
    if kind.link is None:
        return kind, _in_order(parameter, rv)
    if node is None or not isinstance(node.op, Elemwise | XElemwise) or not isinstance(node.op.scalar_op, kind.link):
        raise ValueError(
            f"The observed variable {rv.name!r} is {kind.name}, but not with its canonical link, {kind.written}; "
            f"reparam='rvb1' has no expansion for another one. {_INSTEAD}"
        )
    return kind, _in_order(node.inputs[0], rv)


def _in_order(parameter: Variable, rv: Variable) -> Variable:
    """Return a parameter with named dimensions as a tensor whose axes are those of the variable."""
    if not isinstance(parameter.type, XTensorType):
        return parameter
    missing = [dim for dim in rv.type.dims if dim not in parameter.type.dims]
    return parameter.expand_dims(missing).transpose(*rv.type.dims).values


def _groups(
    density: LogDensity, structure: Partition, etas: list[Variable], shapes: list[tuple[int, ...]]
) -> list[NDArray[np.intp]]:
    """Return the block that each element of some predictors depends on, -1 for none.

    Blocks are numbered in binary, and one evaluation moves all blocks whose number has a certain digit.
    """
    if not etas:
        return []
    etas = [pt.broadcast_to(eta, shape) for eta, shape in zip(etas, shapes, strict=True)]
    function = pytensor.function([density.graphs.theta], etas, mode=quick_mode(), on_unused_input="ignore")
    rng = np.random.default_rng(0)
    local = structure.order[: structure.n_local]
    block = np.repeat(np.arange(len(structure.sizes)), structure.sizes) + 1
    point = density.initial_point() + 0.1 * rng.standard_normal(structure.n_dim)
    before = function(point)
    numbers = [np.zeros(shape, dtype=np.intp) for shape in shapes]
    for digit in range(int(block.max()).bit_length()):
        moved = point.copy()
        among = local[(block >> digit) & 1 == 1]
        moved[among] += 0.5 + rng.random(len(among))
        for number, a, b in zip(numbers, before, function(moved), strict=True):
            number += (np.abs(b - a) > ROUNDING * (1.0 + np.abs(a))).astype(np.intp) << digit
    return [number - 1 for number in numbers]


# --- expansions -------------------------------------------------------------------------------------------------------


def _expansion(kind: _Likelihood, eta: Variable, y: Array, group: NDArray[np.intp]) -> Variable:
    """Return the second-order expansion of a log likelihood, without its constant."""
    assert kind.expand is not None
    centre, first, second = kind.expand(y, group)
    away = eta - centre
    return (first * away + 0.5 * second * away**2).sum()


def _group_means(y: Array, group: NDArray[np.intp]) -> Array:
    """Return for each observation the mean of its block, shrunk towards the mean of all by one observation."""
    flat, of = y.ravel(), group.ravel() + 1
    counts, sums = np.bincount(of), np.bincount(of, weights=flat)
    return ((sums + flat.mean()) / (counts + 1.0))[of].reshape(y.shape)


def _of_bernoulli(y: Array, group: NDArray[np.intp]) -> tuple[Array, Array, Array]:
    centre: Array = logit(np.clip(_group_means(y, group), 0.02, 0.98))
    p = expit(centre)
    return centre, y - p, -p * (1.0 - p)


def _of_poisson(y: Array, group: NDArray[np.intp]) -> tuple[Array, Array, Array]:
    centre: Array = np.log(np.maximum(0.5 * (y + _group_means(y, group)), 0.05))
    mu = np.exp(centre)
    return centre, y - mu, -mu


_KINDS: dict[type, _Likelihood] = {
    BernoulliRV: _Likelihood("Bernoulli", Sigmoid, "logit_p=eta", _of_bernoulli),
    PoissonRV: _Likelihood("Poisson", Exp, "mu=exp(eta)", _of_poisson),
    NormalRV: _Likelihood("Normal", None, "mu=eta"),
}


#: Arrays of directions that each function takes.
_N_DIRECTIONS = {"slopes": 1, "through": 1, "third": 2}


class GuideFunctions:
    """Derivatives of a guide along local directions, batched over pairs of a draw and a direction.

    Directions, (n_rows, n_dim), are 0 in the coordinates of the border.
    """

    def __init__(
        self, density: LogDensity, structure: Partition, guide: Variable | None = None, order: int = 3
    ) -> None:
        self.density = density
        self.is_exact = guide is None
        self._functions: dict[str, Function] = {}
        local = set(structure.locals_.tolist())
        names = [v.name for v in density.layout.variables if not local.isdisjoint(range(v.where.start, v.where.stop))]
        with density.functions.timed(), without_c():
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
