"""What is known of a model beside its log density; which kinds of model can be fitted, and the errors for others."""

import contextlib
import warnings

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt

from pymc.backends.arviz import find_observations
from pymc.data import MinibatchIndexRV, MinibatchOp
from pymc.distributions.censored import CensoredRV
from pymc.distributions.multivariate import ICARRV
from pymc.distributions.shape_utils import change_dist_size
from pymc.distributions.simulator import SimulatorRV
from pymc.distributions.truncated import TruncatedRV
from pymc.initial_point import convert_str_to_rv_dict, make_initial_point_expression
from pymc.logprob.transforms import Transform
from pymc.model.fgraph import fgraph_from_model, model_from_fgraph
from pymc.pytensorf import compile as pymc_compile
from pymc.pytensorf import find_rng_nodes, replace_rng_nodes, reseed_rngs, toposort_replace
from pymc.variational.minibatch_rv import MinibatchRandomVariable, get_scaling
from pytensor.compile import SharedVariable
from pytensor.compile.rewriting import inline_ofg_node
from pytensor.graph import Apply, FunctionGraph, Variable, graph_replace
from pytensor.graph.rewriting.basic import dfs_rewriter, node_rewriter
from pytensor.graph.traversal import ancestors, toposort, walk
from pytensor.scalar import Cast
from pytensor.tensor.elemwise import Elemwise
from pytensor.tensor.random.basic import HalfNormalRV
from pytensor.tensor.shape import Shape, Shape_i
from pytensor.tensor.subtensor import AdvancedSubtensor, indices_from_subtensor
from pytensor.xtensor.type import XTensorType, as_xtensor

from pymc_ngvi.core.messages import N_NAMED, Refused, listed, warn
from pymc_ngvi.core.types import AnyArray, Indices
from pymc_ngvi.graphs.backends import Interpreted, is_plain, quickly, without_c
from pymc_ngvi.graphs.bambi import ATTRIBUTE, bambi_parameters
from pymc_ngvi.graphs.graph import simplify
from pymc_ngvi.graphs.rewrites import behind, named, rewritten, stored_value
from pymc_ngvi.reading.predictors import Factor, logp_of

# --- data that no fit can do much with: values that are not finite, and values that are all equal ---


def not_finite_data(model: pm.Model, names: Iterable[str]) -> list[str]:
    """Return the arrays with values that are not finite among what some variables are made of, in words.

    Infinite bounds of censored and truncated variables are none of these.
    """
    found: dict[str, None] = {}
    variables = set(model.basic_RVs)
    for name in names:
        var = model[name]
        of_rv = list(var.owner.inputs) if var in variables else [var]
        may_be_infinite = isinstance(getattr(var.owner, "op", None), CensoredRV | TruncatedRV)
        for part in walk(of_rv, lambda v: None if v.owner is None or v in variables else list(v.owner.inputs)):
            values = stored_value(part)
            if not isinstance(values, np.ndarray) or values.dtype.kind != "f" or values.ndim == 0:
                continue
            bad = np.isnan(values) if may_be_infinite else ~np.isfinite(values)
            if bad.any():
                which = repr(part.name) if part.name else f"an array in {name!r}"
                at = places(np.argwhere(bad))
                found[f"{which} ({int(bad.sum()):,} of {bad.size:,} values, at {at})"] = None
    return list(found)


def places(at: Indices) -> str:
    """Return positions in an array, (n, ndim), for a sentence."""
    return listed([", ".join(map(str, place)) for place in at], "[{}]", N_NAMED)


def outside_support(model: pm.Model, names: Iterable[str], point: Mapping[str, AnyArray]) -> list[str]:
    """Return the values of observed variables that have no density at a point, in words."""
    found = []
    for rv in [rv for rv in model.observed_RVs if rv.name in names]:
        with without_c(model):
            outputs = [*model.logp(vars=[rv], sum=False), model.rvs_to_values[rv]]
            both = model.compile_fn(outputs, inputs=model.value_vars, mode="FAST_COMPILE", on_unused_input="ignore")
            logp, values = map(np.asarray, both(dict(point)))
        bad = np.argwhere(np.isneginf(logp))
        verb, of = "is" if len(bad) == 1 else "are", type(rv.owner.op).__name__.removesuffix("RV")
        shown = [f"{rv.name}{places(at[None]) if len(at) else ''} = {values[tuple(at)]}" for at in bad]
        said = f"{len(bad):,} of {logp.size:,} values of {rv.name} {verb} outside the support of {of}"
        is_wrapped = values.dtype.kind == "i" and values.min(initial=0) < np.iinfo(np.int16).min
        large = " (as 32-bit integers, PyMC makes counts of 2,147,483,648 and more negative: give them as float)"
        found += [f"{said}: {listed(shown, '{}', N_NAMED)}{large if is_wrapped else ''}"] * bool(shown)
    return found


def check_indices(model: pm.Model) -> None:
    """Raise IndexError for an array of indices that points beyond an axis whose length is known."""
    lengths = {dim: stored_value(length) for dim, length in model.dim_lengths.items()}
    for node in toposort([*model.basic_RVs, *model.deterministics, *model.potentials]):
        of, *parts = node.inputs
        if not isinstance(node.op, AdvancedSubtensor) or any(part.type.dtype == "bool" for part in parts):
            continue
        indices = indices_from_subtensor(parts, node.op.idx_list)
        is_named = model.named_vars.get(of.name) is of
        dims = (is_named and model.named_vars_to_dims.get(of.name)) or (None,) * len(indices)
        for index, dim, static in zip(indices, dims, of.type.shape, strict=False):
            array, length = stored_value(index), lengths.get(dim, static)
            if length is None or not (isinstance(array, np.ndarray) and array.dtype.kind in "iu"):
                continue
            bad, name = np.argwhere((array >= length) | (array < -length)), index.name or "an index"
            if len(bad):
                axis = f"dim {dim!r}" if dim else "an axis"
                raise IndexError(
                    f"{len(bad):,} of {array.size:,} values of {name} are beyond {axis} of {of.name or 'a variable'}, "
                    f"which has length {length}: {name}{places(bad[:1])} = {array[tuple(bad[0])]}. Indices run from 0 "
                    f"to {length - 1}."
                )


def observations(model: pm.Model) -> dict[str, AnyArray]:
    """Return the values of each observed variable, by name, but of those that are a graph, such as minibatches."""
    with warnings.catch_warnings(action="ignore"):  # of the latter
        return find_observations(model)


def constant_data(model: pm.Model) -> list[str]:
    """Return the continuous observed variables whose values are all equal, in words."""
    continuous = {rv.name for rv in model.observed_RVs if rv.dtype.startswith("float")}
    values = {name: np.asarray(value) for name, value in observations(model).items() if name in continuous}
    return [f"{name!r} (all {v.flat[0]:g})" for name, v in values.items() if v.size > 1 and np.ptp(v) == 0.0]


def check_model(model: pm.Model) -> None:
    """Raise ValueError, with names and a cure, if the model can't be fitted by a continuous approximation."""
    simulators = [rv.name for rv in model.basic_RVs if isinstance(getattr(rv.owner, "op", None), SimulatorRV)]
    if simulators:
        raise ValueError(
            f"The model has pm.Simulator variables ({quoted(simulators)}), which have no log density with a gradient. "
            "Fit it with pm.sample_smc."
        )
    if not model.free_RVs:
        raise ValueError(
            f"The model has no free variables (variables: {quoted(v.name for v in model.basic_RVs) or 'none'}): "
            "there is nothing to fit. Add at least one unobserved continuous variable."
        )
    check_indices(model)
    variables = set(model.basic_RVs)
    if free_scale := [
        rv.name
        for rv in model.free_RVs
        if isinstance(rv.owner.op, ICARRV) and not variables.isdisjoint(ancestors(rv.owner.inputs))
    ]:
        warn(
            f"The sigma of pm.ICAR ({quoted(free_scale)}) is a parameter, and PyMC's density lacks its factor "
            "sigma**-(n - 1): sigma will be far too large, even where the fit is exact. Leave sigma out, and multiply: "
            "sigma * pm.ICAR(...)."
        )
    # Variables that read a minibatch have to be scaled to the whole data.
    unscaled = [
        rv.name
        for rv in model.observed_RVs
        if not isinstance(rv.owner.op, MinibatchRandomVariable)
        and _reads_minibatch([*rv.owner.inputs, model.rvs_to_values[rv]], variables)
    ]
    if unscaled:
        raise ValueError(
            f"Observed variables {quoted(unscaled)} read pm.Minibatch data without a total_size: the batch would count "
            "as all of the data. Give each total_size=, the number of rows of the whole data."
        )
    free = [rv.name for rv in model.free_RVs if _reads_minibatch(rv.owner.inputs, variables)]
    if free:
        raise ValueError(
            f"Free variables {quoted(free)} depend on pm.Minibatch data, so that each batch has another prior; PyMC "
            "scales observed variables only. Let them depend on the full data."
        )
    potentials = [p.name for p in model.potentials if _reads_minibatch([p], variables)]
    if potentials:
        warn(
            f"Potentials {quoted(potentials)} depend on pm.Minibatch data, and PyMC can't scale them: multiply each by "
            "the number of rows of the whole data over the batch size, unless that is done already."
        )


def of_batches(model: pm.Model) -> frozenset[str]:
    """Return the names of the Deterministics that read ``pm.Minibatch`` data: their rows are those of one batch."""
    free = set(model.free_RVs)
    return frozenset(d.name for d in model.deterministics if _reads_minibatch([d], free))


def _reads_minibatch(inputs: list[Variable], variables: set[Variable]) -> bool:
    """Tell whether values of Minibatch data enter, other than through the model's ``variables`` or through shapes."""
    found = behind(
        inputs, lambda v: () if v in variables or isinstance(v.owner.op, Shape | Shape_i) else v.owner.inputs
    )
    return any(var.owner is not None and isinstance(var.owner.op, MinibatchOp | MinibatchIndexRV) for var in found)


def broadcasts(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Tell whether an array of a shape can be broadcast to another one."""
    try:
        return np.broadcast_shapes(shape, wanted) == wanted
    except ValueError:
        return False


def quoted(names: Iterable[str]) -> str:
    """List names for a message."""
    return ", ".join(repr(name) for name in names)


# --- whether what was built of a model serves another fit of it: all but the values of the data is built in ---


class CannotReuse(Refused):
    """What was built of a model does not serve the next fit; the message says why, as a clause."""


@dataclass(frozen=True)
class ModelState:
    """What is built into the functions of a model."""

    #: Variables, their values, transforms and initial values: compared by identity.
    parts: tuple[object, ...]
    #: Of the data, and of all else that the model shares, by variable.
    shapes: dict[Variable, tuple[int, ...]]

    @classmethod
    def of(cls, model: pm.Model) -> "ModelState":
        """Note what a model is now."""
        of_variables = (model.rvs_to_values, model.rvs_to_transforms, model.rvs_to_initial_values)
        named = [*model.basic_RVs, *model.potentials, *model.deterministics]
        parts = (*named, model.check_bounds, *(part for mapping in of_variables for part in mapping.values()))
        values = [value for value in model.rvs_to_values.values() if value is not None]
        shared = [v for v in ancestors([*named, *values]) if isinstance(v, SharedVariable)]
        arrays = {v: v.get_value(borrow=True) for v in shared}
        return cls(parts, {v: array.shape for v, array in arrays.items() if hasattr(array, "shape")})

    def check(self, now: "ModelState") -> None:
        """Raise CannotReuse if the model is another one now, or the shapes of its data are."""
        same = len(self.parts) == len(now.parts) and self.shapes.keys() == now.shapes.keys()
        if not (same and all(a is b for a, b in zip(self.parts, now.parts, strict=True))):
            raise CannotReuse("its variables, or their initial values, have changed")
        changed = {v: shape for v, shape in self.shapes.items() if shape != now.shapes[v]}
        if changed:
            shapes = ", ".join(sorted({f"{shape} then and {now.shapes[v]} now" for v, shape in changed.items()}))
            names = quoted(sorted(str(v.name) for v in changed))
            raise CannotReuse(f"the shapes of {names} have changed ({shapes})")


def same_options(one: Mapping[str, object] | None, other: Mapping[str, object] | None) -> bool:
    """Tell whether options are the same; where their values can't be compared, they must be the same objects."""
    one, other = one or {}, other or {}
    return one.keys() == other.keys() and all(one[k] is other[k] or (one[k] == other[k]) is True for k in one)


# --- the Gauss-Newton matrix of a model, row by row: squares of the gradients of single observations ---
#
# Khan & Nielsen (2018), "Fast yet simple natural-gradient descent for variational inference in complex models": VOGN
# replaces the Hessian of the log likelihood by minus the sum of g_i g_i^T over its rows i, which is never indefinite.


_INSTEAD = "Use estimator='price', which needs only derivatives of the whole log density."


def likelihood_rows(model: pm.Model, factors: Sequence[Factor]) -> tuple[list[Variable], list[Variable], Variable]:
    """Return the log density by rows of observed variables, their scales, and all else, of the value variables."""
    observed, potentials = ([f for f in factors if f.role == role] for role in ("observed", "potential"))
    if not observed:
        raise ValueError(
            "The model has no observed variables; estimator='gauss_newton' squares the gradients of single "
            f"observations, and there are none. {_INSTEAD}"
        )
    if potentials:
        raise ValueError(
            f"The model has Potentials ({quoted(p.name for p in potentials)}), which may add anything to the "
            "log density; estimator='gauss_newton' squares the gradients of single observations, and can't tell "
            f"those of a Potential apart. Write them as observed variables (pm.CustomDist). {_INSTEAD}"
        )
    values = [model.rvs_to_values[factor.variable] for factor in observed]
    joint = [f.name for f, value in zip(observed, values, strict=True) if f.logp.type.ndim != value.type.ndim]
    if joint:
        raise ValueError(
            f"The log density of the observed variables {quoted(joint)} is not one of each element: their "
            "distribution is multivariate. estimator='gauss_newton' squares the gradients of single, independent "
            f"observations. {_INSTEAD}"
        )
    scales = [
        get_scaling(rv.owner.inputs[1:], value.shape)
        if isinstance(rv.owner.op, MinibatchRandomVariable)
        else pt.constant(1.0)
        for rv, value in zip([factor.variable for factor in observed], values, strict=True)
    ]
    return [factor.logp for factor in observed], scales, logp_of([f for f in factors if f.role == "prior"])


# --- minibatches: the random row indices of ``pm.Minibatch``, held fixed until the next batch is asked for ---
#
# PyMC draws new indices at every call of a compiled function, so that log p, its gradient and its Hessian, compiled
# apart, would each see other rows. Here they read the same shared vectors of indices.


#: Marks the random streams behind the orders of the rows.
_PASSES = 6
_NO_ROWS = "pm.Minibatch needs at least one row of data to choose from; there are none."


class Minibatches:
    """The row indices of all ``pm.Minibatch`` calls that some graphs depend on.

    Arrays of one call share their rows; separate calls have their own. The first batch is made with a fixed seed.
    """

    def __init__(self, outputs: list[Variable]) -> None:
        # PyMC clones graphs, but not the shared generator, which each call has for itself.
        self._rows: dict[Variable, Variable] = {}  # shared vectors of row indices
        #: Those of each call are uniform in low, ..., high - 1, with replacement: low and high, as data may be shared.
        self._ends: list[Variable] = []
        self._function: Callable[..., Any] | None = None
        self._orders: dict[tuple[int, int, int], Indices] = {}  # of the pass under way, of each call
        for node in _index_nodes(_inline(outputs)):
            if node.inputs[0] not in self._rows:
                [batch_size] = node.op.size_param(node).data
                first = np.zeros(batch_size, dtype="int64")
                # The bounds of a Minibatch of a Minibatch depend on indices, already made, of the one inside.
                self._ends += self.hold(list(node.op.dist_params(node)))
                self._rows[node.inputs[0]] = pytensor.shared(first, name="minibatch_rows", shape=(int(batch_size),))
        self.next_batch(np.random.default_rng(0))

    def __bool__(self) -> bool:
        return bool(self._rows)

    @property
    def rows(self) -> list[Variable]:
        """The shared vectors of row indices, one for each call."""
        return list(self._rows.values())

    def __getstate__(self) -> dict[str, object]:
        """Return what to pickle: the compiled function is made again when it is needed."""
        return {**self.__dict__, "_function": None, "_orders": {}}

    def hold(self, outputs: list[Variable]) -> list[Variable]:
        """Return ``outputs`` with the rows of the current batch in place of those that PyMC draws at random."""
        if not self._rows:
            return outputs
        outputs = _inline(outputs)
        rows = {
            node.outputs[1]: self._rows[node.inputs[0]]
            for node in _index_nodes(outputs)
            if node.inputs[0] in self._rows
        }
        return list(graph_replace(outputs, rows, strict=False)) if rows else outputs

    def next_batch(self, rng: np.random.Generator) -> None:
        """Draw new rows from ``rng``, for every graph that `hold` returned."""
        for rows, low, high in zip(self.rows, *self._bounds(), strict=True):
            if not low < high:
                raise ValueError(_NO_ROWS)
            rows.set_value(rng.integers(low, high, size=rows.type.shape[0]))

    @property
    def n_batches(self) -> int:
        """Batches that make one pass through the data, of the call with most; 1 where there are none."""
        sizes = [rows.type.shape[0] for rows in self.rows]
        counts = [-(-(high - low) // n) for n, low, high in zip(sizes, *self._bounds(), strict=True)]
        return max(counts, default=1)

    def take_batch(self, seed: int, number: int) -> None:
        """Take batch ``number``, from 0, of passes through the data, each in a random order that ``seed`` tells."""
        for call, (rows, low, high) in enumerate(zip(self.rows, *self._bounds(), strict=True)):
            n_rows, size = rows.type.shape[0], high - low
            if size < 1:
                raise ValueError(_NO_ROWS)
            first, last = number * n_rows, (number + 1) * n_rows
            parts = []
            for which in range(first // size, -(-last // size)):  # a batch may end one pass and begin another
                order = self._order(seed, which, call, size)
                parts.append(order[max(first - which * size, 0) : last - which * size])
            rows.set_value(low + np.concatenate(parts))

    def _order(self, seed: int, which: int, call: int, size: int) -> Indices:
        """Return the order of the rows in one pass; the last one of each call is kept."""
        key = (seed, which, call)
        order = self._orders.get(key)
        if order is None or len(order) != size:
            order = np.random.default_rng([seed, which, call, _PASSES]).permutation(size)
            self._orders = {k: v for k, v in self._orders.items() if k[2] != call} | {key: order}
        return order

    def _bounds(self) -> tuple[list[int], list[int]]:
        """Return the first row and the number of rows of each call, from the data as they are now."""
        if not self._rows:
            return [], []
        try:
            self._function = self._function or quickly([], self._ends)
            values = [int(value.item()) for value in self._function()]  # of one element, but not of no axes
        except AssertionError as error:
            raise ValueError(
                "The arrays of one pm.Minibatch call have different numbers of rows. Give arrays that go together "
                "row by row."
            ) from error
        return values[::2], values[1::2]


def _inline(outputs: list[Variable]) -> list[Variable]:
    """Put the graph that each ``pm.Minibatch`` wraps in its place, in a copy: the model's own graph stays as it is."""
    while True:
        node = next((node for node in toposort(outputs) if isinstance(node.op, MinibatchOp)), None)
        if node is None:
            return outputs
        inner = dict(zip(node.outputs, inline_ofg_node(node), strict=True))
        outputs = list(graph_replace(outputs, inner, strict=False))


def _index_nodes(outputs: list[Variable]) -> list[Variable]:
    return [node for node in toposort(outputs) if isinstance(node.op, MinibatchIndexRV)]


# --- the initial point of a model, as a function that can be called again when the data have changed ---


#: Of initial values that are drawn from the prior.
_SEED = 0


def initial_point_function(
    model: pm.Model, overrides: Mapping[Variable | str, object] | None = None
) -> Callable[[], dict[str, AnyArray]]:
    """Return a function that gives the initial point by value name, unconstrained, for the data as they are then."""
    with without_c(model):
        values = make_initial_point_expression(
            free_rvs=model.free_RVs,
            # Those of `pymc.dims` take the plain arrays that PyMC hands them.
            rvs_to_transforms={
                rv: _OfArrays(t, rv.type.dims) if t is not None and isinstance(rv.type, XTensorType) else t
                for rv, t in model.rvs_to_transforms.items()
            },
            initval_strategies={**model.rvs_to_initial_values, **convert_str_to_rv_dict(model, dict(overrides or {}))},
            return_transformed=True,
        )
        values = simplify(replace_rng_nodes(values))  # of variables that give a shape alone, none is drawn
        function, generators = quickly([], values), find_rng_nodes(values)

    def initial_point() -> dict[str, AnyArray]:
        reseed_rngs(generators, _SEED)
        return dict(zip([model.rvs_to_values[rv].name for rv in model.free_RVs], function(), strict=True))

    return initial_point


class _OfArrays:
    """A transform of variables with named dimensions, for values without."""

    def __init__(self, transform: Transform, dims: tuple[str, ...]) -> None:
        self.name = transform.name
        self.backward, self._transform, self._dims = transform.backward, transform, dims

    def forward(self, value: Variable, *inputs: Variable) -> Variable:
        """Transform a value to the unconstrained scale."""
        if not isinstance(value.type, XTensorType):
            value = as_xtensor(value, dims=self._dims)
        return self._transform.forward(value, *inputs)


# --- the data of a model: whether they are still what they were, and log p given those of then ---


def data_in(model: pm.Model) -> dict[str, Any]:
    """Return the data of a model whose values can be set, by name."""
    return {v.name: v for v in model.data_vars if isinstance(v, SharedVariable)}


class DataSnapshot:
    """Remembers the data that a model had, to tell later whether it was changed."""

    def __init__(self, model: pm.Model) -> None:
        self._model, data = model, data_in(model)
        # Lengths and labels of dims follow the data.
        shared = [*data.values(), *(v for v in model.dim_lengths.values() if isinstance(v, SharedVariable))]
        self._arrays: dict[str, AnyArray] = {name: v.get_value(borrow=True) for name, v in data.items()}
        self._values = [(v, v.get_value(borrow=True)) for v in shared]
        self._coords = dict(model.coords)

    def changed(self) -> list[str]:
        """Return the names of the data that differ from what they were."""
        return [
            name
            for name, then in self._arrays.items()
            if (now := self._model[name].get_value(borrow=True)) is not then and not np.array_equal(now, then)
        ]

    def put_back(self) -> None:
        """Give the model the data of then."""
        for variable, then in self._values:
            variable.set_value(then, borrow=True)
        self._model.coords.clear()
        self._model.coords.update(self._coords)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Give the model the data of then, for as long as the context lasts."""
        now = DataSnapshot(self._model)
        self.put_back()
        try:
            yield
        finally:
            now.put_back()


# --- draws of the prior on the unconstrained scale: dispersed points from which modes can be looked for ---

#: What PyMC and PyTensor raise where a prior can't be drawn from.
CAN_NOT_DRAW = (NotImplementedError, RuntimeError, ValueError, TypeError)


@node_rewriter([HalfNormalRV])  # type: ignore[untyped-decorator]
def _as_normal(fgraph: FunctionGraph, node: Apply) -> list[Variable]:
    """Draw the same numbers without SciPy, whose distributions take 0.4 s to import: most scales have this prior."""
    rng, size, loc, scale = node.inputs
    rng, z = pt.random.normal.make_node(rng, size, pt.zeros_like(loc), pt.ones_like(scale)).outputs
    return [rng, (loc + scale * abs(z)).astype(node.outputs[1].dtype)]


def drawing(outputs: list[Variable]) -> Callable[[int, int], list[list[AnyArray]]]:
    """Return a function of a number and a seed: draws of some variables, those of `pymc.draw` with this seed."""
    outputs, generators = rewritten(outputs, dfs_rewriter(_as_normal)), find_rng_nodes(outputs)
    if is_plain(outputs):  # generators are advanced in place
        function = Interpreted([], rewritten(outputs, named(("random_make_inplace",), ())))
    else:
        function = pymc_compile([], outputs, random_seed=False, mode="FAST_COMPILE")

    def draws(n: int, seed: int) -> list[list[AnyArray]]:
        reseed_rngs(generators, seed)
        return [function() for _ in range(n)]

    return draws


def unconstrained_variables(model: pm.Model, names: Iterable[str]) -> list[Variable]:
    """Return free variables on the unconstrained scale, of which they are random variables, too."""
    rvs = [model[name] for name in names]
    transforms = [model.rvs_to_transforms[rv] for rv in rvs]
    return [rv if t is None else t.forward(rv, *rv.owner.inputs) for rv, t in zip(rvs, transforms, strict=True)]


def terms_by_variable(model: pm.Model, point: Mapping[str, AnyArray]) -> dict[str, float]:
    """Return the terms of log p by the names of their variables, at a point by unconstrained values."""
    with without_c(model):
        terms: dict[str, float] = model.point_logps(dict(point), round_vals=4, mode="FAST_COMPILE")
    return terms


# --- observed arrays made data, whose values and lengths can change ---


def with_replacements(
    model: pm.Model,
    pairs: Callable[[Mapping[Variable, Variable]], Sequence[tuple[Variable, Variable]]] = lambda memo: (),
) -> pm.Model:
    """Return a copy of a model, whose data are copies, with parts of its graph replaced.

    ``pairs`` returns them, old and new, from a dict of what became of each variable in the graph of the copy.
    """
    with without_c(model), _without_initial_values(model) as initial_values:
        fgraph, memo = fgraph_from_model(model)
        if pairs is not None:
            toposort_replace(fgraph, pairs(memo))
        changed: pm.Model = model_from_fgraph(fgraph, mutate_fgraph=True)
    changed.check_bounds = model.check_bounds
    setattr(changed, ATTRIBUTE, bambi_parameters(model))
    for name, value in initial_values.items():
        changed.set_initval(changed[name], value)
    place = {name: number for number, name in enumerate(model.named_vars)}
    for variables in (changed.free_RVs, changed.observed_RVs, changed.deterministics, changed.potentials):
        variables.sort(key=lambda var: place[var.name])  # the graph has them in another order
    named = sorted(changed.named_vars.items(), key=lambda item: place[item[0]])
    changed.named_vars.clear()
    changed.named_vars.update(named)
    return changed


@contextlib.contextmanager
def _without_initial_values(model: pm.Model) -> Iterator[dict[str, Any]]:
    """Take initial values off a model, which PyMC does not copy with them, and give them back; yield those that differ.

    Graphs among them stay behind: they are of the variables of this model.
    """
    kept = dict(model.rvs_to_initial_values)
    try:
        model.rvs_to_initial_values.update(dict.fromkeys(kept))
        yield {rv.name: value for rv, value in kept.items() if value is not None and not isinstance(value, Variable)}
    finally:
        model.rvs_to_initial_values.update(kept)


def with_data_for(model: pm.Model, observed: Sequence[str]) -> tuple[pm.Model, dict[str, str]]:
    """Return a copy of a model whose observed variables have ``pm.Data`` for values, and the names of these."""
    copy: Any = with_replacements(model)
    names = {}
    with copy:
        for name in observed:
            rv = copy[name]
            before = copy.rvs_to_values[rv]
            names[name] = f"{name}_data"
            while names[name] in copy.named_vars:
                names[name] += "_"
            values = pm.Data(names[name], np.asarray(before.data), dims=copy.named_vars_to_dims.get(name))
            copy.values_to_rvs.pop(before)
            value = values if values.dtype == rv.dtype else values.astype(rv.dtype)  # as `observed=` does
            value.name = value.name or name
            copy.rvs_to_values[rv], copy.values_to_rvs[value] = value, rv
            _let_length_change(copy, rv, value)
    return copy, names


def without_casts(value: Variable) -> Variable:
    """Return what an observed value is before it is cast to the type of its variable."""
    while isinstance(getattr(value.owner, "op", None), Elemwise) and isinstance(value.owner.op.scalar_op, Cast):
        [value] = value.owner.inputs
    return value


def _let_length_change(model: Any, rv: Any, value: Variable) -> None:
    """Give an observed variable the lengths of its values, which are fixed where these were an array.

    It stays as it is where others depend on it, or where PyMC can't change its lengths.
    """
    n_batch = rv.ndim - getattr(rv.owner.op, "ndim_supp", rv.ndim)
    others = [v for v in model.named_vars.values() if v is not rv]
    if all(length is None for length in rv.type.shape[:n_batch]) or rv in ancestors(others):
        return
    try:
        new: Any = change_dist_size(rv, value.shape[:n_batch])
    except NotImplementedError:
        return
    new.name = rv.name
    model.named_vars[rv.name] = new
    model.observed_RVs = type(model.observed_RVs)([new if v is rv else v for v in model.observed_RVs])
    model.values_to_rvs[value] = new
    for of_rv in (model.rvs_to_values, model.rvs_to_transforms, model.rvs_to_initial_values):
        if rv in of_rv:
            of_rv[new] = of_rv.pop(rv)


Values = dict[str, AnyArray]


@dataclass(frozen=True)
class Simulated:
    """One draw of everything."""

    #: Free variables and Deterministics by name, as users know them.
    values: Values
    #: Free variables by the names of their value variables.
    unconstrained: Values
    #: Observed variables by name.
    observed: Values


def simulate(model: pm.Model, n: int, seed: int) -> list[Simulated]:
    """Draw parameters and data."""
    if not model.observed_RVs:
        raise ValueError("The model has no observed variables: there are no data to simulate.")
    if model.potentials:
        names = ", ".join(repr(p.name) for p in model.potentials)
        raise ValueError(
            f"The model has pm.Potential ({names}): draws of the variables are not draws of its prior, and it can't be "
            "simulated from. Write it as a distribution: pm.Censored, pm.Truncated, pm.CustomDist with random."
        )
    unconstrained = unconstrained_variables(model, [rv.name for rv in model.free_RVs])
    parts: list[list[tuple[str, Variable]]] = [
        [(v.name, v) for v in [*model.free_RVs, *model.deterministics]],
        [(model.rvs_to_values[rv].name, v) for rv, v in zip(model.free_RVs, unconstrained, strict=True)],
        [(rv.name, rv) for rv in model.observed_RVs],
    ]
    try:
        with without_c(model), warnings.catch_warnings(action="ignore"):  # of draws that are not finite
            drawn = drawing([v for part in parts for _, v in part])(n, seed)
    except NotImplementedError as error:
        raise ValueError(f"The prior of the model can't be drawn from: {error}. Give each variable a prior.") from error
    result = []
    for outputs in drawn:
        each = iter(outputs)
        result.append(Simulated(*({name: np.asarray(next(each)) for name, _ in part} for part in parts)))
    return result
