"""The rows of an observed variable: log p of each as a function of linear predictors, and log p without some."""

import contextlib
import functools

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pymc as pm
import pytensor.scalar as ps
import pytensor.tensor as pt

from pymc.variational.minibatch_rv import MinibatchRandomVariable
from pytensor import shared
from pytensor.compile import Function
from pytensor.graph import Variable, ancestors
from pytensor.tensor.elemwise import Elemwise
from pytensor.tensor.random.op import RNGConsumerOp
from scipy import sparse

from pymc_ngvi.core.messages import NotApart
from pymc_ngvi.core.sizes import STREAMED
from pymc_ngvi.core.sparsity import Ints
from pymc_ngvi.core.types import AnyArray, Array
from pymc_ngvi.density.by_rows import AROUND, N_CHECKED
from pymc_ngvi.density.info import broadcasts
from pymc_ngvi.density.logdensity import LogDensity, ModelDensity
from pymc_ngvi.graphs import graph
from pymc_ngvi.graphs.backends import quickly, without_c
from pymc_ngvi.graphs.rewrites import has_op
from pymc_ngvi.ops import cost
from pymc_ngvi.ops.elements import Apart, Facts, Rearranged
from pymc_ngvi.ops.registry import elements
from pymc_ngvi.reading.predictors import (
    MOST_PREDICTORS,
    ROUNDING,
    Basis,
    Dependences,
    Factor,
    Lift,
    Predictors,
    Rows,
    affine_functions,
    factors_of,
    lifted,
    shared_first,
    varying_inputs,
    without_checks,
)
from pymc_ngvi.rows.engines import engine_for
from pymc_ngvi.rows.expectation import RowFunction
from pymc_ngvi.rows.linear_map import LinearMap

# --- the log density of an observed variable, observation by observation, at draws ---


class ObservedLogp:
    """Log densities of the observations of a variable, functions of theta."""

    def __init__(self, density: LogDensity, name: str) -> None:
        self.name, self._density, self._theta = name, density, density.graphs.theta
        [factor] = [factor for factor in density.graphs.factors if factor.name == name]
        if isinstance(getattr(factor.variable.owner, "op", None), MinibatchRandomVariable):
            raise ValueError(f"{name!r} is scaled by total_size: its rows are a part of the data only.")
        with without_c():
            graphs = density.graphs
            [logp] = graph.inline_inner_graphs(list(graphs.simplify(graphs.on_flat_vector([factor.logp]))))
        self._logp: Variable = logp

    @functools.cached_property
    def _facts(self) -> Facts:
        with without_c():
            return Facts(self._logp, self._theta)

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the log density."""
        return self._facts.shape(self._logp)

    @functools.cached_property
    def _function(self) -> Function:
        with without_c():
            draws, batched = graph.over_draws([self._logp], self._theta)
        return self._density.functions.compile([draws], batched)

    def __call__(self, theta: Array) -> Array:
        """Return log densities, (n_draws, n_rows), at the rows of ``theta``."""
        size = max(1, STREAMED // max(cost.estimate([self._logp]).widest, 1))
        with np.errstate(all="ignore"):
            parts = [np.asarray(self._function(theta[i : i + size])[0]) for i in range(0, len(theta), size)]
        shape = (len(theta), *self.shape)
        whole = np.concatenate([np.broadcast_to(part, (len(part), *shape[1:])) for part in parts])
        return np.asarray(whole, dtype=np.float64).reshape(len(theta), -1)

    def dependence(self, *, of_parameters: bool = False) -> sparse.csr_array:
        """Return which coordinates each observation depends on, (n_rows, n_dim): True where it does.

        Of parameters: by its distribution, whatever the value that was observed.
        """
        facts, variables, model = self._facts, [self._logp], self._density.model
        if of_parameters:
            with without_c(model):
                given = model.replace_rvs_by_values([*_parameters(model[self.name], model.free_RVs)])
                flat = self._density.graphs.on_flat_vector([v for v in given if not has_op([v], RNGConsumerOp)])
                facts = Facts(pt.add(*[v.sum() for v in flat], 0.0, 0.0), self._theta)
            variables = [v for v in flat if not facts.is_known(v) and broadcasts(facts.shape(v), self.shape)]
        result = sparse.csr_array((int(np.prod(self.shape)), self._density.n_dim), dtype=bool)
        for variable in variables:
            depends = Dependences(facts, self._theta).of(variable)
            result = result + sparse.csr_array(depends.sets[np.broadcast_to(depends.index, self.shape).ravel()])
        return result


def observed_logp(density: ModelDensity, name: str, *, by_rows: bool = True) -> ObservedLogp:
    """Return the log densities of the rows of an observed variable; raise ValueError where these have none.

    ``by_rows`` False: that of all of its values does, too.
    """
    if not isinstance(density, LogDensity):
        raise ValueError("The rows are in shards or batches: not all are at hand. Fit a part of the data alone.")
    result, rv = ObservedLogp(density, name), density.model[name]
    beside = [str(v.name) for v in rv.owner.outputs if v is not rv and v in density.model.basic_RVs]
    if beside:
        raise ValueError(
            f"{', '.join(map(repr, [name, *beside]))} have one log density together: rows have none of their own. "
            "Fit a model that observes one variable, such as all of them in one array."
        )
    if by_rows and rv.ndim > len(result.shape) and np.prod(result.shape) == 1:
        raise ValueError(
            f"The values of {name!r} have one log density together, as those of a time series, of a multivariate "
            "normal, or with labels in common (a change point, a Markov chain): rows have none of their own. Write a "
            "series value by value, each given those before, as pm.Normal(..., observed=) with lagged values among the "
            "predictors; or compare models by approx.log_marginal_likelihood."
        )
    return result


class MaskedDensity:
    """The log density of a model whose factor of an observed variable has a weight for each row.

    Raises ValueError where log p is another one than that of ``given`` while all weights are 1.
    """

    def __init__(self, given: LogDensity, rows: ObservedLogp) -> None:
        self.name, self.rows, self._given = rows.name, rows, given
        self._weights = shared(np.ones(rows.shape), name=f"weights of {self.name}", shape=rows.shape)

    @functools.cached_property
    def density(self) -> LogDensity:
        """Log p, whose weights change with `leave_out`."""
        self.leave_out(np.empty(0, dtype=np.intp))
        density = LogDensity(self._given.model, factors=self._factors)
        points = density.initial_point() + 0.5 * np.random.default_rng(0).standard_normal((2, density.n_dim))
        logp, of_model = density.logp(points), self._given.logp(points)
        if not np.allclose(logp, of_model, rtol=ROUNDING, atol=ROUNDING, equal_nan=True):
            raise ValueError(
                f"Rows of {self.name!r} can't be left out: with a weight of 1 for each, log p is {logp[0]:.6g} near "
                f"the start, and {of_model[0]:.6g} in the model. Fit the model without these rows."
            )
        return density

    def _factors(self, model: pm.Model) -> Sequence[Factor]:
        """Return the factors, that with weights as a Potential, as it is the log density of no distribution."""
        factors = {factor.name: factor for factor in factors_of(model)}
        logp = self._weights * factors[self.name].logp
        logp.name = self.name
        return list((factors | {self.name: Factor(logp, "potential", logp)}).values())

    def leave_out(self, rows: AnyArray) -> None:
        """Give some observations, numbered in one row, a weight of 0, and all others one of 1."""
        weights = np.ones(self.rows.shape)
        weights.reshape(-1)[rows] = 0.0
        self._weights.set_value(weights)


# --- the rows of an observed variable, observation by observation: log p of each, a function of linear predictors ---


@dataclass(frozen=True, eq=False)
class LinearPredictor:
    """The linear predictor of rows, as a function of the predictors that these have."""

    function: RowFunction
    #: One of these in which it is linear, whatever the others are.
    along: int
    #: Its derivative in that one; shape (n_rows,).
    slope: Array


@dataclass(frozen=True, eq=False)
class ObservedKind:
    """Observations whose log densities are the same function of different predictors."""

    #: Which elements of the log density of the variable they are; shape (n_rows,).
    elements: Ints
    rows: RowFunction
    #: None where there is none that is like those of a generalised linear model.
    linear: LinearPredictor | None


@dataclass(frozen=True, eq=False)
class ObservedRows:
    """The rows of an observed variable."""

    #: Of its log density, elementwise.
    shape: tuple[int, ...]
    kinds: list[ObservedKind]
    #: Of all predictors.
    linear_map: LinearMap


def observed_rows(density: LogDensity, name: str) -> ObservedRows:
    """Return the rows of an observed variable."""
    [rv] = [rv for rv in density.model.observed_RVs if rv.name == name]
    if isinstance(rv.owner.op, MinibatchRandomVariable):
        raise NotApart("it is scaled by total_size")
    with without_c():
        return _found(density, rv)


def _found(density: LogDensity, rv: Variable) -> ObservedRows:
    graphs, model, theta = density.graphs, density.model, density.graphs.theta
    compile_ = density.functions.compile_for_few
    with without_c(model):
        parameters = model.replace_rvs_by_values(list(_parameters(rv, model.free_RVs)))
    flat = graphs.on_flat_vector([factor.logp for factor in graphs.factors if factor.variable is rv])
    function = compile_([theta], graphs.simplify(flat)[0])
    points = density.initial_point() + AROUND * np.random.default_rng(0).standard_normal((N_CHECKED, density.n_dim))
    wanted = np.stack([np.asarray(function(point)) for point in points])
    shape = wanted.shape[1:]
    known = graphs.on_flat_vector([var for var in parameters if not has_op([var], RNGConsumerOp)])
    whole = [(var + pt.zeros(shape)).ravel() for var in [*flat, *_candidates(known, theta, shape)]]
    predictors = Predictors(pt.join(0, *graphs.simplify(whole)), theta, compile_)
    [inner] = graph.inline_inner_graphs(graph.simplify([predictors.density()], check_bounds=False))
    inner = without_checks(inner)
    facts = Facts(inner, predictors.vector, conditions=True)
    joint = predictors.with_sums(np.arange(predictors.vector.type.shape[0]))
    linear_map = predictors.linear_map if joint is None else joint.linear_map
    n, kinds = int(np.prod(shape)), []
    starts = range(n, facts.shape(inner)[0], n)

    def predictors_at(n_points: int) -> Array:
        return linear_map(np.random.default_rng(0).standard_normal((n_points, density.n_dim)))

    for index, lift, value in lifted(inner, np.arange(n), predictors.vector, facts):
        beside = []
        for start in starts:  # other elements of the same rows, where these can be lifted, too
            both = lift.copy()
            with contextlib.suppress(Apart, NotApart):
                beside.append(both.of(inner, index + start))
                lift = both
        kinds.append(_kind(index, lift, value, beside, predictors_at))
    eta, values, wanted = linear_map(points), np.full((len(points), n), np.nan), wanted.reshape(len(points), n)
    with np.errstate(all="ignore"):
        for kind in kinds:
            values[:, kind.elements] = kind.rows.values([eta[:, at] for at in kind.rows.index.T], slice(None))
    keep = np.isfinite(wanted)
    if not bool(np.all(np.abs(values - wanted)[keep] <= ROUNDING * (1.0 + np.abs(wanted[keep])))):
        raise NotApart("its rows are not what its log density is made of")
    return ObservedRows(shape, kinds, linear_map)


def _candidates(parameters: list[Variable], theta: Variable, shape: tuple[int, ...]) -> list[Variable]:
    """Return what may be linear predictors of observations, those of the first parameter first."""
    total = pt.add(pt.constant(0.0), *[pt.as_tensor(p, allow_xtensor_conversion=True).sum() for p in parameters])
    facts = Facts(total, theta)
    affine, _ = affine_functions(theta, facts)
    found = dict.fromkeys(v for p in parameters for v in _linear_parts(p, affine, facts))
    return [var for var in found if broadcasts(facts.shape(var), shape)]


def _parameters(rv: Variable, free: list[Variable]) -> Iterator[Variable]:
    """Return the parameters of a distribution, and those of the distributions that it is made of."""
    try:
        parameters = rv.owner.op.dist_params(rv.owner)
    except (AttributeError, NotImplementedError, TypeError, ValueError):
        parameters = [i for i in rv.owner.inputs if str(getattr(i.type, "dtype", "")).startswith("float")]
    for var in parameters:
        if var.owner is not None and hasattr(var.owner.op, "dist_params") and var not in free:
            yield from _parameters(var, free)
        else:
            yield var


def _linear_parts(var: Variable, affine: set[Variable], facts: Facts) -> list[Variable]:
    """Return the first affine functions of theta on each way down, and sums of these with others.

    A linear function times another unknown is none.
    """
    node = var.owner
    if facts.is_known(var) or node is None:
        return []
    scalar_op, inputs = getattr(node.op, "scalar_op", None), varying_inputs(node, facts)
    adds = isinstance(node.op, Elemwise) and isinstance(scalar_op, ps.Add | ps.Sub)
    if (var in affine and not isinstance(scalar_op, ps.Neg)) or (adds and any(i in affine for i in inputs)):
        return [var]
    below = [(i, _linear_parts(i, affine, facts)) for i in inputs]
    copies = adds or isinstance(scalar_op, ps.Identity | ps.Cast) or isinstance(elements(node, facts), Rearranged)
    if len(below) == 1 and copies and below[0][1] == [below[0][0]]:
        return [var]
    if len(below) > 1 and isinstance(scalar_op, ps.Mul | ps.TrueDiv) and any(found == [i] for i, found in below):
        return []
    return [v for _, found in below for v in found]


def _kind(
    index: Ints,
    lift: Lift,
    value: Variable,
    candidates: list[Variable],
    predictors: Callable[[int], Array],
) -> ObservedKind:
    """Return rows as functions of the predictors that candidates are made of, as far as these go."""
    used = set(ancestors(candidates))
    basis = Basis(lift, len(index), predictors, [slot for slot in lift.slots if slot in used])
    value, data = basis.of(value, lift.data)
    needed = set(ancestors([value]))
    slots = [slot for slot in basis.slots if slot in needed]
    rows = Rows(basis.index(slots), slots, _of(value, data), value).by_sum()
    rows = rows if rows.n_summed else shared_first(rows)[0]  # in the order of the function that is compiled
    if rows.n_directions > MOST_PREDICTORS:
        raise NotApart(f"an observation varies in {rows.n_directions} directions")
    written = [basis.of(candidate, lift.data) for candidate in candidates]
    others = set(basis.slots) - needed
    usable = [(c, _of(c, data)) for c, data in written if others.isdisjoint(ancestors([c]))]
    found = [linear for value, data in usable if (linear := _as_linear(rows, value, data)) is not None]
    own = [linear for linear, is_own in found if is_own]
    return ObservedKind(
        index,
        engine_for("quick", quickly).row_function(rows),
        next(iter([*own, *(linear for linear, _ in found)]), None),
    )


def _of(value: Variable, data: dict[Variable, Array]) -> dict[Variable, Array]:
    """Return the data that a function has among its inputs."""
    needed = set(ancestors([value]))
    return {var: values for var, values in data.items() if var in needed}


def _as_linear(rows: Rows, value: Variable, data: dict[Variable, Array]) -> tuple[LinearPredictor, bool] | None:
    """Return a function of the predictors of rows, if it is linear in one; and whether rows have different ones."""
    slopes = graph.slopes(value.sum(), rows.slots, "first")
    n, k = rows.index.shape
    outputs = [pt.zeros((1, 1)) if slope is None else slope for slope in slopes]
    function = quickly([*rows.slots, *data], outputs)
    points = np.random.default_rng(0).standard_normal((2, k, 1, n))
    given = list(data.values())
    first, second = (np.stack([np.broadcast_to(s, (1, n))[0] for s in function(*p, *given)]) for p in points)
    used = (first != 0.0).any(axis=1)
    differs = np.array([used[a] and len(np.unique(rows.index[:, a])) > 1 for a in range(k)])
    linear = np.flatnonzero(
        (np.abs(first - second) <= ROUNDING * np.abs(first)).all(axis=1) & (first != 0.0).all(axis=1)
    )
    if not len(linear):
        return None
    along = max(linear.tolist(), key=lambda a: differs[a])
    of_row = RowFunction(quickly([*rows.slots, *data], [value]), rows.index, given, np.ones((k, k), dtype=np.bool_))
    return LinearPredictor(of_row, along, first[along]), bool(differs.any())
