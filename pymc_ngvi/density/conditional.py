"""Compiled derivatives, up to the third, of a log density that guides a reparametrisation: one direction for each draw.

The modes of local coordinates given global ones, and the adjoint of their curvature, need derivatives of the *guide*:
the log density of the model itself, or another function of the same variables, given the data at the time.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytensor
import pytensor.tensor as pt

from pytensor.compile import Function, SharedVariable, ViewOp
from pytensor.graph import Variable, graph_inputs, graph_replace
from pytensor.scalar import Cast, Exp, Identity, Sigmoid
from pytensor.tensor.elemwise import Elemwise
from pytensor.tensor.random.basic import BernoulliRV, NormalRV, PoissonRV
from pytensor.tensor.type import TensorType
from pytensor.xtensor.shape import Transpose
from pytensor.xtensor.type import XTensorType, as_xtensor
from pytensor.xtensor.vectorization import XRV, XElemwise
from scipy.special import expit, logit

from pymc_ngvi.core.sparsity import slices
from pymc_ngvi.core.types import Array, Indices
from pymc_ngvi.density.logdensity import LogDensity
from pymc_ngvi.density.rows_given import Pieces
from pymc_ngvi.families.gaussian import Partition
from pymc_ngvi.graphs import graph
from pymc_ngvi.graphs.backends import quick_mode, without_c
from pymc_ngvi.graphs.loops import vectorised
from pymc_ngvi.ops.elements import Facts
from pymc_ngvi.reading.predictors import Dependences, logp_of

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
    expand: Callable[[Array, Indices], tuple[Array, Array, Array]] | None = None


def quadratic_guide(density: LogDensity, structure: Partition) -> Variable:
    """Return the guide as a function of the value variables of the model."""
    if not len(structure.locals_):
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
    expanded = [
        (rv, kind.expand, eta)
        for rv, (kind, eta) in zip(model.observed_RVs, found, strict=True)
        if kind.expand is not None
    ]
    by_expansion = {rv for rv, _, _ in expanded}
    rest = logp_of([factor for factor in density.graphs.factors if factor.variable not in by_expansion])
    with without_c():
        etas = model.replace_rvs_by_values([eta for _, _, eta in expanded])
        values = pytensor.function([], [model.rvs_to_values[rv] for rv, _, _ in expanded], mode=quick_mode())()
        data = [np.asarray(value, dtype=np.float64) for value in values]
        groups = _groups(density, structure, density.graphs.on_flat_vector(etas), [y.shape for y in data])
    for (_, expand, _), eta, y, group in zip(expanded, etas, data, groups, strict=True):
        centre, first, second = expand(y, group)  # of the second order, without its constant
        rest = rest + (first * (eta - centre) + 0.5 * second * (eta - centre) ** 2).sum()
    return rest


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
) -> list[Indices]:
    """Return the block that each element of some predictors depends on, -1 for none; the last, of several."""
    theta, etas = density.graphs.theta, density.graphs.simplify(etas) if etas else []
    facts = Facts(pt.add(pt.constant(0.0), *[eta.sum() for eta in etas]), theta)
    dependences, block = Dependences(facts, theta), np.full(structure.n_dim, -1)
    block[structure.order[: len(structure.locals_)]] = np.repeat(np.arange(len(structure.sizes)), structure.sizes)
    result = [np.full(shape, -1) for shape in shapes]
    for numbers, eta in zip(result, etas, strict=True):
        if facts.is_active(eta):
            depends = dependences.of(eta)
            sets, of_set = depends.sets, np.full(depends.sets.shape[0], -1)
            np.maximum.at(of_set, np.repeat(np.arange(len(of_set)), np.diff(sets.indptr)), block[sets.indices])
            numbers[...] = of_set[depends.index]
    return result


# --- expansions -------------------------------------------------------------------------------------------------------


def _group_means(y: Array, group: Indices) -> Array:
    """Return for each observation the mean of its block, shrunk towards the mean of all by one observation."""
    flat, of = y.ravel(), group.ravel() + 1
    counts, sums = np.bincount(of), np.bincount(of, weights=flat)
    return ((sums + flat.mean()) / (counts + 1.0))[of].reshape(y.shape)


def _of_bernoulli(y: Array, group: Indices) -> tuple[Array, Array, Array]:
    centre: Array = logit(np.clip(_group_means(y, group), 0.02, 0.98))
    p = expit(centre)
    return centre, y - p, -p * (1.0 - p)


def _of_poisson(y: Array, group: Indices) -> tuple[Array, Array, Array]:
    centre: Array = np.log(np.maximum(0.5 * (y + _group_means(y, group)), 0.05))
    mu = np.exp(centre)
    return centre, y - mu, -mu


_KINDS: dict[type, _Likelihood] = {
    BernoulliRV: _Likelihood("Bernoulli", Sigmoid, "logit_p=eta", _of_bernoulli),
    PoissonRV: _Likelihood("Poisson", Exp, "mu=exp(eta)", _of_poisson),
    NormalRV: _Likelihood("Normal", None, "mu=eta"),
}


class GuideFunctions:
    """Derivatives of a guide along local directions, batched over pairs of a draw and a direction, (n_rows, n_dim).

    Directions are 0 in the coordinates of the border.
    """

    def __init__(
        self, density: LogDensity, structure: Partition, guide: Variable | None = None, *, third: bool = True
    ) -> None:
        self.density, self.is_exact = density, guide is None
        self._functions: dict[str, Function] = {}
        n, local = density.n_dim, np.sort(structure.locals_)
        #: Local coordinates, and the others.
        self._where = [local, np.setdiff1d(np.arange(n), local)]
        inner, border, right, left = (
            pt.vector(dtype="float64", shape=(len(self._where[k]),)) for k in (False, True, False, False)
        )
        simplify, self._inputs = density.graphs.simplify, [inner, border, right, left]
        with density.functions.timed(), without_c():
            outputs = [logp_of(density.graphs.factors) if guide is None else guide]
            shared = [v for v in graph_inputs(outputs) if isinstance(v, SharedVariable)]
            constants = {v: _constant(v) for v in shared if isinstance(v.type, TensorType | XTensorType)}
            outputs = list(graph_replace(outputs, constants, strict=False)) if constants else outputs
            pieces = Pieces(self._where[1], n, border, inner)
            [f] = simplify(graph.on_flat_vector(density.model, density.layout, outputs, pieces))
            [slopes] = simplify([graph.gradient(f, inner)])
            [product] = simplify([graph.hessian_product(slopes, inner, right)])
            #: Of each function, its results, local parts first; those of the border where they are asked for.
            self._graphs = {"slopes": [[slopes], [product]]}
            if third:
                for name, cost in (("through", (slopes * right).sum()), ("third", (product * left).sum())):
                    self._graphs[name] = [simplify([graph.gradient(cost, by) for by in (inner, border)])]

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

    def _evaluate(self, name: str, theta: Array, *directions: Array) -> list[Array]:
        if name not in self._functions:
            with self.density.functions.timed():
                given = self._inputs[: 2 + len(directions)]
                matrices = [pt.matrix(dtype="float64", shape=(None, *var.type.shape)) for var in given]
                with without_c():
                    flat = [var for part in self._graphs[name] for var in part]
                    batched = vectorised(flat, dict(zip(given, matrices, strict=True)))
                    # What depends on no input comes back without the axis.
                    n_rows = matrices[0].shape[0]
                    batched = [b if b.type.ndim == 2 else pt.broadcast_to(b, (n_rows, b.shape[0])) for b in batched]
                self._functions[name] = self.density.functions.compile(matrices, batched)
        results = [np.zeros_like(theta) for _ in self._graphs[name]]
        local, fill = self._where[0], self.density.functions.filled_up
        inputs = [*(theta[:, at] for at in self._where), *(along[:, local] for along in directions)]
        for rows in slices(len(theta), self.density.batch_size):
            with np.errstate(all="ignore"):  # far from the mode, densities overflow: the caller sees it
                outputs = iter(self._functions[name](*[fill(np.ascontiguousarray(a[rows])) for a in inputs]))
            for result, graphs in zip(results, self._graphs[name], strict=True):
                for at, output in zip(self._where, [next(outputs) for _ in graphs], strict=False):
                    result[rows, at] = np.asarray(output)[: rows.stop - rows.start]
        return results


def _constant(shared: Variable) -> Variable:
    value = pt.as_tensor(np.array(shared.get_value(borrow=True)))
    return as_xtensor(value, dims=shared.type.dims) if isinstance(shared.type, XTensorType) else value
