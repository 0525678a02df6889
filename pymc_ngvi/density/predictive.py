"""The graph of a model given new data, and posterior draws of the elements that were in the fit."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt

from pymc.data import MinibatchOp
from pymc.distributions.moments import mean
from pymc.distributions.multivariate import ZeroSumNormalRV
from pymc.distributions.shape_utils import change_dist_size
from pymc.distributions.timeseries import AutoRegressiveRV, RandomWalkRV
from pymc.exceptions import UndefinedMomentException
from pytensor.compile.ops import ViewOp
from pytensor.graph import Apply, Constant, Variable, graph_replace
from pytensor.graph.traversal import ancestors, toposort
from pytensor.scalar.basic import Add, Pow, Sqrt
from pytensor.tensor.basic import Join, MakeVector
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.extra_ops import CumOp
from pytensor.tensor.linalg import cholesky, solve_triangular
from pytensor.tensor.math import Dot
from pytensor.tensor.random.basic import MvNormalRV
from pytensor.tensor.shape import Shape, Shape_i
from pytensor.tensor.subtensor import AdvancedSubtensor, IncSubtensor, Subtensor, indices_from_subtensor
from pytensor.xtensor.type import XTensorType

from pymc_ngvi.core.types import AnyArray, Array, Bools
from pymc_ngvi.density.info import data_in, with_replacements
from pymc_ngvi.density.over_draws import OnDraws, at_known
from pymc_ngvi.graphs.backends import quick_mode, without_c
from pymc_ngvi.graphs.rewrites import behind, inline_inner_graphs

#: Operations that leave elements in their places.
_IN_PLACE = (Elemwise, DimShuffle, ViewOp)

# --- which dims of a model whole numbers among its data index ---


def indexed_axes(model: pm.Model, name: str) -> tuple[set[str], set[tuple[str, int]]]:
    """Return the dims that a ``pm.Data`` indexes, and the variables, with the axis, where that has no dim."""
    data, dims = model[name], set()
    fixed: set[tuple[str, int]] = set()
    for var in ancestors([*model.basic_RVs, *model.deterministics, *model.potentials]):
        if var.owner is None or not isinstance(var.owner.op, AdvancedSubtensor):
            continue
        indices = indices_from_subtensor(var.owner.inputs[1:], var.owner.op.idx_list)
        for axis, index in enumerate(indices):
            # Data may also be places in an array in which an index is looked up.
            if isinstance(index, Variable) and data in behind(
                [index], lambda v: v.owner.inputs[:1] if isinstance(v.owner.op, AdvancedSubtensor) else v.owner.inputs
            ):
                for named in _named(model, var.owner.inputs[0]):
                    own = (model.named_vars_to_dims.get(named.name) or (None,) * named.type.ndim)[axis]
                    if own is None:
                        fixed.add((named.name, axis))
                    else:
                        dims.add(own)
    return dims, fixed


def _named(model: pm.Model, indexed: Variable) -> list[Variable]:
    """Return the variables of the model that what is indexed is, or is made of, with as many axes."""
    variables = {*model.basic_RVs, *model.deterministics}

    def inputs(var: Variable) -> list[Variable]:
        """Go on where elements stay in their places: `concatenate([[0], effect])` has others than `effect`."""
        node = var.owner
        if var in variables:
            return []
        if isinstance(node.op, (*_IN_PLACE, CumOp)):
            return list(node.inputs)
        is_product = isinstance(node.op, Dot) or getattr(node.op, "core_op", None) == Dot()
        return list(node.inputs[:1]) if is_product or isinstance(node.op, IncSubtensor) else []

    return [v for v in behind([indexed], inputs) if v in variables and v.type.ndim == indexed.type.ndim]


# --- random variables some of whose elements are known: the others given these and their parents ---


#: Distributions that go on from the elements that are known.
_CONTINUED = {RandomWalkRV: "a random walk", AutoRegressiveRV: "an autoregression", MvNormalRV: "a multivariate normal"}


def n_batch_axes(rv: Variable) -> int:
    """Return the number of leading axes along which the elements of a random variable are independent draws."""
    return int(rv.type.ndim - rv.owner.op.ndim_supp)


def is_continued(rv: Variable, axis: int) -> bool:
    """Tell whether a variable can go on along an axis from the elements that are known.

    That is the first axis of its support: time, or the points of a process.
    """
    return isinstance(rv.owner.op, tuple(_CONTINUED)) and axis == n_batch_axes(rv)


def continued(rv: Variable, known: Variable, n_known: int) -> Variable:
    """Return a random variable whose first elements along its support are known, with draws of the others."""
    op = rv.owner.op
    if isinstance(op, RandomWalkRV):
        return _walk(rv, known, n_known, axis=n_batch_axes(rv))
    if n_batch_axes(rv):
        raise NotImplementedError("several series in one variable")
    if isinstance(op, AutoRegressiveRV):
        return _autoregression(rv, known, n_known)
    return _multivariate_normal(rv, known, n_known)


def _walk(rv: Variable, known: Variable, n_known: int, axis: int) -> Variable:
    """Add the later steps of a new walk to the last known value: steps are independent of all before them."""
    before = (slice(None),) * axis
    last = (*before, n_known - 1)
    later = rv[(*before, slice(n_known, None))] + pt.expand_dims(known[last] - rv[last], axis)
    return pt.concatenate([known[(*before, slice(None, n_known))], later], axis=axis)


def _autoregression(rv: Variable, known: Variable, n_known: int) -> Variable:
    op = rv.owner.op
    coefficients, scale = rv.owner.inputs[:2]
    if n_known < op.ar_order:
        raise NotImplementedError(f"{n_known} known values for an autoregression of order {op.ar_order}")
    constant = coefficients[0] if op.constant_term else pt.constant(0.0)
    lags = coefficients[1:] if op.constant_term else coefficients
    noise = scale * pm.Normal.dist(0.0, 1.0, shape=(rv.shape[0] - n_known,))

    def step(*args: Variable) -> Variable:
        shock, *values, level, weights = args  # the oldest value first
        return level + pt.sum(pt.stack(values[::-1]) * weights) + shock

    # Of one value alone, a loop takes the value.
    last = known[n_known - 1] if op.ar_order == 1 else known[n_known - op.ar_order : n_known]
    later = pytensor.scan(
        step,
        sequences=[noise],
        outputs_info=[{"initial": last, "taps": list(range(-op.ar_order, 0))}],
        non_sequences=[constant, lags],
        strict=True,
        return_updates=False,
    )
    return pt.concatenate([known[:n_known], later])


def _multivariate_normal(rv: Variable, known: Variable, n_known: int) -> Variable:
    """Move a draw of all elements by what it misses the known ones by (Matheron's rule)."""
    cov = rv.owner.op.dist_params(rv.owner)[1]
    factor = cholesky(cov[:n_known, :n_known])
    missed = solve_triangular(factor, (known - rv)[:n_known], lower=True)
    weights = solve_triangular(factor, cov[:n_known, n_known:], lower=True)
    return pt.concatenate([known[:n_known], rv[n_known:] + weights.T @ missed])


def expected(rv: Variable) -> Variable:
    """Return the mean of a random variable given its parents."""
    if isinstance(rv.owner.op, ZeroSumNormalRV):
        return pt.zeros_like(rv)
    try:
        return pt.broadcast_to(mean(rv), rv.shape)
    except (NotImplementedError, UndefinedMomentException) as error:
        raise NotImplementedError(str(error)) from error


# --- statistics of the data by which a model standardises them, such as means: they stay those of the fit ---


def statistics(
    outputs: Sequence[Variable], data: Collection[Variable], lengths: Collection[int], priors: Sequence[Variable]
) -> dict[Variable, AnyArray]:
    """Return the values of means, norms, maxima, first rows and the like of data, by which rows are standardised.

    A sum is none of these as long as neither its root nor its quotient by the number of rows is taken: with it, weights
    of the rows that are there are made to add up to 1. Priors keep all of what they read.
    """
    nodes = list(toposort([*outputs, *priors]))
    from_data, of_prior = _from(nodes, set(data)), set(ancestors(priors))
    reduced = [
        node
        for node in nodes
        if isinstance(node.op, CAReduce | Subtensor) and node.inputs[0] in from_data and _reduced_axes(node)
    ]
    shapes = _shapes([node.inputs[0] for node in reduced])
    over_rows = [
        node
        for node, shape in zip(reduced, shapes, strict=True)
        if any(shape[axis] in lengths for axis in _reduced_axes(node))
    ]
    made, standard = _of_all_rows(nodes, over_rows)
    uses = [
        (used, output)
        for node in nodes
        for used in node.inputs
        for output in node.outputs
        if used in (made if output in of_prior else standard)
        and made.isdisjoint(node.outputs)
        and hasattr(output.type, "ndim")
    ]
    shapes = _shapes([output for _, output in uses])
    kept = {
        used: None
        for (used, output), shape in zip(uses, shapes, strict=True)
        if output in of_prior or not set(shape).isdisjoint(lengths)
    }
    return dict(zip(kept, _evaluated(list(kept)), strict=True))


def _reduced_axes(node: Apply) -> Sequence[int]:
    """Return the axes of an array over which it is reduced, or of which one place is taken."""
    if isinstance(node.op, CAReduce):
        return range(node.inputs[0].type.ndim) if node.op.axis is None else node.op.axis
    array, *places = node.inputs
    is_taken = bool(node.op.idx_list) and not isinstance(node.op.idx_list[0], slice)
    moved = behind([array], lambda v: v.owner.inputs if isinstance(v.owner.op, (*_IN_PLACE, MakeVector, Join)) else ())
    is_length = any(v.owner and isinstance(v.owner.op, Shape | Shape_i) for v in moved)
    return (0,) if is_taken and not is_length and all(isinstance(i, Constant) for i in places) else ()


def _of_all_rows(nodes: Sequence[Apply], over_rows: Sequence[Apply]) -> tuple[set[Variable], set[Variable]]:
    """Return what is made of reductions over rows alone, and what of it has more in it than sums."""
    made = {node.outputs[0] for node in over_rows}
    standard = {node.outputs[0] for node in over_rows if not isinstance(getattr(node.op, "scalar_op", None), Add)}
    constant, counts = set[Variable](), set[Variable]()  # counts: made of lengths of data
    for node in nodes:
        if isinstance(node.op, Shape | Shape_i):
            counts |= set(node.outputs)
            continue
        if not all(isinstance(i, Constant) or i in made or i in constant or i in counts for i in node.inputs):
            continue
        counted = any(i in counts for i in node.inputs)
        if any(i in made for i in node.inputs):
            made |= set(node.outputs)
            is_root = isinstance(getattr(node.op, "scalar_op", None), Sqrt | Pow)
            if counted or is_root or any(i in standard for i in node.inputs):
                standard |= set(node.outputs)
        else:
            (counts if counted else constant).update(node.outputs)
    return made, standard


def _from(nodes: Sequence[Apply], data: set[Variable]) -> set[Variable]:
    """Return what is computed from data, and from constants."""
    found, constant = set(data), set[Variable]()
    for node in nodes:
        if all(isinstance(i, Constant) or i in constant or i in found for i in node.inputs):
            (found if any(i in found for i in node.inputs) else constant).update(node.outputs)
    return found


def _shapes(variables: Sequence[Variable], given: Mapping[Variable, Variable] | None = None) -> list[tuple[int, ...]]:
    found = _evaluated(graph_replace([v.shape for v in variables], given or {}, strict=False))
    return [tuple(int(n) for n in shape) for shape in found]


def _evaluated(variables: Sequence[Variable]) -> list[AnyArray]:
    with without_c():
        outputs = inline_inner_graphs(list(variables))
        values: list[AnyArray] = pytensor.function([], outputs, mode=quick_mode(), on_unused_input="ignore")()
    return values


# --- the graph of a model given new data, and posterior draws of the elements that were in the fit ---


@dataclass(frozen=True)
class Treatment:
    """What becomes of a random variable in predictions. As it is, it is drawn given its parents."""

    #: Posterior draws, or observed values, in the shape that the variable has given the new data; shape (n_draws or
    #: 1, *shape), optional.
    known: AnyArray | None = None
    #: Which elements are known, in a shape that broadcasts; None for all.
    mask: Bools | None = None
    #: The number of elements from which the variable goes on along its support: a walk, or a process.
    n_known: int | None = None
    #: Whether what is not known is the mean given its parents, and not a draw.
    mean: bool = False
    #: Lengths of the axes of independent draws, where the graph does not give the right ones.
    size: tuple[int, ...] | None = None


class PredictiveGraph:
    """A model with other data, and what is asked of it; the model itself stays as it is."""

    def __init__(self, model: pm.Model, data: Mapping[str, AnyArray], lengths: Mapping[str, int]) -> None:
        self.model = model
        self._new: dict[Variable, Variable] = {model[name]: _constant(model[name], data[name]) for name in data}
        rows = {model[name].get_value(borrow=True).shape[0] for name in data if model[name].type.ndim}
        shapes = self.shapes(model.free_RVs, new=False)
        priors = [rv for rv, shape in zip(model.free_RVs, shapes, strict=True) if rows.isdisjoint(shape)]
        found = statistics([*model.basic_RVs, *model.deterministics], list(self._new), rows, priors)
        self._kept = found
        self._new |= {variable: _constant(variable, value) for variable, value in found.items()}
        for dim, length in lengths.items():
            variable = model.dim_lengths[dim]
            self._new[variable] = _constant(variable, np.asarray(length))

    def with_statistics(self) -> pm.Model:
        """Return a copy of the model whose data may change, and statistics of these that it is made of may not."""
        return with_replacements(
            self.model, lambda memo: [(memo[v], _constant(v, value)) for v, value in self._kept.items()]
        )

    def needed(self, names: Sequence[str]) -> list[Variable]:
        """Return the random variables that some variables are computed from, these included, parents first."""
        above = set(ancestors([self.model[name] for name in names]))
        if any(isinstance(var.type, XTensorType) for var in above):
            raise ValueError("predict does not take models of pymc.dims: use pm.sample_posterior_predictive.")
        if any(var.owner is not None and isinstance(var.owner.op, MinibatchOp) for var in above):
            raise ValueError(
                "The model reads pm.Minibatch data: predictions would be of the rows of one batch. Use "
                "pm.sample_posterior_predictive in a model of all rows, or of new ones, with the same names."
            )
        return [rv for rv in self.model.basic_RVs if rv in above]

    def depends_on_new(self, variable: Variable) -> bool:
        """Tell whether a variable is computed from what is new."""
        return not (self._new.keys() - self._kept).isdisjoint(ancestors([variable], self._kept))

    def prior_depends_on(self, rv: Variable, name: str) -> bool:
        """Tell whether the shape or the parameters of a random variable are made of some data."""
        return self.model[name] in ancestors(rv.owner.inputs, self._kept)

    def prior_reads(self, rv: Variable, name: str) -> bool:
        """Tell whether the parameters of a random variable are made of values of some data, not of their lengths."""
        return self.model[name] in behind(
            rv.owner.inputs,
            lambda v: () if v in self._kept or isinstance(v.owner.op, Shape | Shape_i) else v.owner.inputs,
        )

    def is_by_rows(self, rv: Variable) -> bool:
        """Tell whether an observed variable whose data are new has an element of a variable for each of its own."""
        return any(
            rv in behind(y.owner.inputs, lambda v: v.owner.inputs if isinstance(v.owner.op, _IN_PLACE) else ())
            for y in self.model.observed_RVs
            if self.depends_on_new(y)
        )

    def is_accumulated(self, rv: Variable) -> bool:
        """Tell whether elements of a variable are added up one after the other."""
        sums = [v for v in ancestors(self.model.observed_RVs) if v.owner and isinstance(v.owner.op, CumOp)]
        found = behind(sums, lambda v: v.owner.inputs if isinstance(v.owner.op, (*_IN_PLACE, CumOp)) else ())
        return rv in found or isinstance(rv.owner.op, RandomWalkRV | AutoRegressiveRV)

    def is_in_potential(self, rv: Variable) -> bool:
        """Tell whether a Potential of the model depends on a variable."""
        return rv in ancestors(self.model.potentials)

    def data_needed(self, names: Sequence[str]) -> list[str]:
        """Return the names of the data that some variables are computed from, but for the lengths of dims."""
        found = set(ancestors([self.model[name] for name in names], self._new))
        return [v.name for v in self.model.data_vars if v in found]

    def shapes(self, variables: Sequence[Variable], *, new: bool = True) -> list[tuple[int, ...]]:
        """Return the shapes of variables given the new data, or given those of the model."""
        return _shapes(variables, self._new if new else None)

    def observed(self, names: Sequence[str]) -> list[AnyArray]:
        """Return the values of observed variables given the new data."""
        values = [self.model.rvs_to_values[self.model[name]] for name in names]
        return _evaluated(graph_replace(values, self._new, strict=False))

    def compiled(
        self, names: Sequence[str], treatments: Mapping[str, Treatment], n_draws: int, *, means: bool = False
    ) -> tuple[OnDraws, Array]:
        """Return the function of the named variables, and the draws of what is known at which to evaluate it.

        ``means`` has the mean of an observed variable, given its parents, in the place of draws of it.
        """
        return self._over_draws(treatments, n_draws, lambda parts: self._outputs(names, treatments, parts, means))

    def log_densities(
        self, names: Sequence[str], values: Mapping[str, AnyArray], treatments: Mapping[str, Treatment], n_draws: int
    ) -> tuple[OnDraws, Array]:
        """Return the function of the log densities of variables, elementwise, and draws as `compiled` does.

        At values of observed variables, and at those that are known of others.
        """

        def outputs(parts: Mapping[str, Variable]) -> list[Variable]:
            done, found = dict(self._new), {}
            for rv in self.needed(names):
                treatment, at = treatments.get(rv.name, Treatment()), parts.get(rv.name)
                if rv.name in names:
                    given = values.get(rv.name)
                    known = at if given is None else pt.constant(np.asarray(given, dtype=rv.type.dtype))
                    found[rv.name] = pm.logp(self._resized(rv, treatment, done), known)
                done[rv] = self._treated(rv, treatment, at, done)
            return [found[name] for name in names]

        return self._over_draws(treatments, n_draws, outputs)

    def _over_draws(
        self,
        treatments: Mapping[str, Treatment],
        n_draws: int,
        make: Callable[[Mapping[str, Variable]], list[Variable]],
    ) -> tuple[OnDraws, Array]:
        """Return the function of what is made of the variables that are known, and the draws of these."""
        known = {self.model[name]: t.known for name, t in treatments.items() if t.known is not None}
        return at_known(self.model, known, n_draws, lambda parts: make({rv.name: p for rv, p in parts.items()}))

    def _outputs(
        self, names: Sequence[str], treatments: Mapping[str, Treatment], parts: Mapping[str, Variable], means: bool
    ) -> list[Variable]:
        done = dict(self._new)
        for rv in self.needed(names):
            treatment = treatments.get(rv.name, Treatment())
            try:
                done[rv] = self._treated(rv, treatment, parts.get(rv.name), done)
            except NotImplementedError as error:
                raise NotImplementedError(f"becomes of {rv.name!r} ({error})") from error
        others = [self.model[name] for name in names]
        replaced = iter(graph_replace([v for v in others if v not in done], done, strict=False))
        for rv in set(self.model.observed_RVs) & set(others) if means else ():
            try:
                done[rv] = expected(done[rv])
            except NotImplementedError as error:
                said = f"{str(error).rstrip('.')}; a Deterministic can be named in its place, as var_names"
                raise NotImplementedError(f"the mean of {rv.name!r} is ({said})") from error
        return [done[v] if v in done else next(replaced) for v in others]

    def _resized(self, rv: Variable, treatment: Treatment, done: Mapping[Variable, Variable]) -> Variable:
        [new] = graph_replace([rv], done, strict=False)
        return new if treatment.size is None else change_dist_size(new, treatment.size)

    def _treated(
        self, rv: Variable, treatment: Treatment, known: Variable | None, done: Mapping[Variable, Variable]
    ) -> Variable:
        if known is not None and treatment.mask is None and treatment.n_known is None:
            return known
        new = self._resized(rv, treatment, done)
        if treatment.mean:
            new = pt.cast(expected(new), rv.type.dtype)
        elif treatment.n_known is not None and known is not None:
            whole = continued(new, known, treatment.n_known)
            new = whole if treatment.mask is None else pt.where(pt.constant(treatment.mask), whole, new)
            known = None
        return new if known is None or treatment.mask is None else pt.where(pt.constant(treatment.mask), known, new)


def data_behind(model: pm.Model, rv: Variable) -> list[str]:
    """Return the names of the data that hold the values of an observed variable, or that they are made of."""
    settable = set(data_in(model).values())
    return [v.name for v in ancestors([model.rvs_to_values[rv]]) if v in settable]


def _constant(variable: Variable, value: AnyArray) -> Variable:
    return pt.constant(np.asarray(value, dtype=variable.type.dtype), dtype=variable.type.dtype)
