"""What is known of a model beside its log density: names, places in the flat vector, data, start, prior draws."""

import contextlib
import warnings

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pymc as pm
import pytensor

from numpy.typing import NDArray
from pymc.data import MinibatchIndexRV, MinibatchOp
from pymc.distributions.shape_utils import change_dist_size
from pymc.initial_point import make_initial_point_fn
from pymc.logprob.transforms import Transform
from pymc.pytensorf import compile as pymc_compile
from pymc.pytensorf import reseed_rngs
from pytensor.compile import Function
from pytensor.compile.rewriting import inline_ofg_node
from pytensor.graph import Variable, graph_replace
from pytensor.graph.traversal import ancestors, toposort
from pytensor.scalar import Cast
from pytensor.tensor.elemwise import Elemwise
from pytensor.xtensor.type import XTensorType, as_xtensor

from pymc_ngvi.core.types import AnyArray, Array
from pymc_ngvi.graphs.backends import quick_mode, without_c
from pymc_ngvi.graphs.layout import Layout

# --- minibatches: the random row indices of ``pm.Minibatch``, held fixed until the next batch is asked for ---
#
# PyMC draws new indices at every call of a compiled function, so that log p, its gradient and its Hessian, compiled
# apart, would each see other rows. Here they read the same shared vectors of indices.


#: Marks the random streams behind the orders of the rows.
_PASSES = 6
_NO_ROWS = "pm.Minibatch needs at least one row of data to choose from; there are none."


@dataclass(frozen=True)
class _Index:
    """The rows that one call of ``pm.Minibatch`` selects: uniform in low, ..., high - 1, with replacement."""

    rows: Variable  # shared vector
    low: Variable
    high: Variable  # of a graph, for data may be shared variables


class Minibatches:
    """The row indices of all ``pm.Minibatch`` calls that some graphs depend on.

    Arrays of one call share their rows; separate calls have their own. The first batch is made with a fixed seed.
    """

    def __init__(self, outputs: list[Variable]) -> None:
        # PyMC clones graphs, but not the shared generator, which each call has for itself.
        self._indices: dict[Variable, _Index] = {}
        self._function: Function | None = None
        self._orders: dict[tuple[int, int, int], NDArray[np.intp]] = {}  # of the pass under way, of each call
        for node in _index_nodes(_inline(outputs)):
            if node.inputs[0] not in self._indices:
                [batch_size] = node.op.size_param(node).data
                first = np.zeros(batch_size, dtype="int64")
                rows = pytensor.shared(first, name="minibatch_rows", shape=(int(batch_size),))
                low, high = node.op.dist_params(node)
                # The bounds of a Minibatch of a Minibatch depend on indices, already made, of the one inside.
                self._indices[node.inputs[0]] = _Index(rows, *self.hold([low, high]))
        self.next_batch(np.random.default_rng(0))

    def __bool__(self) -> bool:
        return bool(self._indices)

    @property
    def rows(self) -> list[Variable]:
        """The shared vectors of row indices, one for each call."""
        return [index.rows for index in self._indices.values()]

    def __getstate__(self) -> dict[str, object]:
        """Return what to pickle: the compiled function is made again when it is needed."""
        return {**self.__dict__, "_function": None, "_orders": {}}

    def hold(self, outputs: list[Variable]) -> list[Variable]:
        """Return ``outputs`` with the rows of the current batch in place of those that PyMC draws at random."""
        if not self._indices:
            return outputs
        outputs = _inline(outputs)
        rows = {
            node.outputs[1]: self._indices[node.inputs[0]].rows
            for node in _index_nodes(outputs)
            if node.inputs[0] in self._indices
        }
        return list(graph_replace(outputs, rows, strict=False)) if rows else outputs

    def next_batch(self, rng: np.random.Generator) -> None:
        """Draw new rows from ``rng``, for every graph that `hold` returned."""
        for index, low, high in zip(self._indices.values(), *self._bounds(), strict=True):
            n_rows = index.rows.type.shape[0]
            if not low < high:
                raise ValueError(_NO_ROWS)
            index.rows.set_value(rng.integers(low, high, size=n_rows))

    @property
    def n_batches(self) -> int:
        """Batches that make one pass through the data, of the call with most; 1 where there are none."""
        sizes = [index.rows.type.shape[0] for index in self._indices.values()]
        counts = [-(-(high - low) // n) for n, low, high in zip(sizes, *self._bounds(), strict=True)]
        return max(counts, default=1)

    def take_batch(self, seed: int, number: int) -> None:
        """Take batch ``number``, from 0, of passes through the data, each in a random order that ``seed`` tells."""
        for call, (index, low, high) in enumerate(zip(self._indices.values(), *self._bounds(), strict=True)):
            n_rows, size = index.rows.type.shape[0], high - low
            if size < 1:
                raise ValueError(_NO_ROWS)
            first, last = number * n_rows, (number + 1) * n_rows
            parts = []
            for which in range(first // size, -(-last // size)):  # a batch may end one pass and begin another
                order = self._order(seed, which, call, size)
                parts.append(order[max(first - which * size, 0) : last - which * size])
            index.rows.set_value(low + np.concatenate(parts))

    def _order(self, seed: int, which: int, call: int, size: int) -> NDArray[np.intp]:
        """Return the order of the rows in one pass; the last one of each call is kept."""
        key = (seed, which, call)
        order = self._orders.get(key)
        if order is None or len(order) != size:
            order = np.random.default_rng([seed, which, call, _PASSES]).permutation(size)
            self._orders = {k: v for k, v in self._orders.items() if k[2] != call} | {key: order}
        return order

    def _bounds(self) -> tuple[list[int], list[int]]:
        """Return the first row and the number of rows of each call, from the data as they are now."""
        if not self._indices:
            return [], []
        bounds = [bound for index in self._indices.values() for bound in (index.low, index.high)]
        try:
            with without_c():
                self._function = self._function or pytensor.function([], bounds, mode=quick_mode())
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
        function = make_initial_point_fn(model=_for_initial_points(model), overrides=overrides, jitter_rvs=set())

    def initial_point() -> dict[str, AnyArray]:
        with without_c(model):
            return dict(function(_SEED))

    return initial_point


def _for_initial_points(model: pm.Model) -> pm.Model | SimpleNamespace:
    """Return what PyMC reads of a model, with transforms of `pymc.dims` that take the plain arrays it hands them."""
    transforms = model.rvs_to_transforms
    named = {rv: t for rv, t in transforms.items() if t is not None and isinstance(rv.type, XTensorType)}
    if not named:
        return model
    return SimpleNamespace(
        free_RVs=model.free_RVs,
        rvs_to_initial_values=model.rvs_to_initial_values,
        rvs_to_transforms={**transforms, **{rv: _OfArrays(t, rv.type.dims) for rv, t in named.items()}},
    )


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


class DataSnapshot:
    """Remembers the data that a model had, to tell later whether it was changed."""

    def __init__(self, model: pm.Model) -> None:
        self._model = model
        self._take()

    def _take(self) -> None:
        """Remember the data as they are now."""
        self._arrays: dict[str, AnyArray] = {
            var.name: var.get_value(borrow=True) for var in self._model.data_vars if hasattr(var, "get_value")
        }
        # Lengths of dims follow the data.
        self._lengths: dict[str, AnyArray] = {
            name: var.get_value(borrow=True)
            for name, var in self._model.dim_lengths.items()
            if hasattr(var, "get_value")
        }

    def changed(self) -> list[str]:
        """Return the names of the data that differ from what they were."""
        return [
            name
            for name, then in self._arrays.items()
            if (now := self._model[name].get_value(borrow=True)) is not then and not np.array_equal(now, then)
        ]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Give the model the data of then, for as long as the context lasts."""
        model = self._model
        pairs = [(model[name], then) for name, then in self._arrays.items()]
        pairs += [(model.dim_lengths[name], then) for name, then in self._lengths.items()]
        moved = [(var, then, now) for var, then in pairs if (now := var.get_value(borrow=True)) is not then]
        try:
            for var, then, _ in moved:
                var.set_value(then, borrow=True)
            yield
        finally:
            for var, _, now in moved:
                var.set_value(now, borrow=True)


# --- draws of the prior on the unconstrained scale: dispersed points from which modes can be looked for ---

#: What PyMC and PyTensor raise where a prior can't be drawn from.
_CAN_NOT = (NotImplementedError, RuntimeError, ValueError, TypeError)


def drawing(outputs: list[Variable]) -> Callable[[int, int], list[list[AnyArray]]]:
    """Return a function of a number and a seed: draws of some variables, those of `pymc.draw` with this seed."""
    function, updates = pymc_compile([], outputs, random_seed=False, mode="FAST_COMPILE", return_updates=True)

    def draws(n: int, seed: int) -> list[list[AnyArray]]:
        reseed_rngs(list(updates), seed)
        return [function() for _ in range(n)]

    return draws


class Prior:
    """Draws of the prior of a model, by one function for all fits of it: it reads the data as they are when called."""

    def __init__(self, model: pm.Model) -> None:
        self._model = model
        self._drawing: Callable[[int, int], list[list[AnyArray]]] | None = None

    def __getstate__(self) -> dict[str, object]:
        """Return what to pickle: the function is compiled again when it is needed."""
        return {"_model": self._model, "_drawing": None}

    def draws(self, layout: Layout, n_draws: int, seed: int) -> Array:
        """Return draws, finite ones alone; none where the prior can't be drawn from."""
        try:
            with without_c(self._model), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of draws that are not finite
                if self._drawing is None:
                    values: list[Variable] = []
                    for v in layout.variables:
                        rv = self._model[v.name]
                        transform = self._model.rvs_to_transforms[rv]
                        values.append(rv if transform is None else transform.forward(rv, *rv.owner.inputs))
                    self._drawing = drawing(values)
                drawn = list(zip(*self._drawing(n_draws, seed), strict=True))
        except _CAN_NOT:
            return np.empty((0, layout.n_dim))
        flat = np.concatenate([np.asarray(d, dtype=np.float64).reshape(n_draws, -1) for d in drawn], axis=1)
        return flat[np.isfinite(flat).all(axis=1)]


# --- what is known of a model beside its log density: names, places in the flat vector, data, start, prior ---


@dataclass(frozen=True)
class ModelInfo:
    """A model at the time when its log density was made."""

    model: pm.Model
    #: Where each variable is in the flat vector, with names, shapes, dims and coords.
    layout: Layout
    #: The data that the model had.
    data: DataSnapshot
    #: The model's initial point, flat and unconstrained; shape (n_dim,).
    start: Array
    #: Makes draws of the prior.
    prior: Prior

    @classmethod
    def of(cls, model: pm.Model, point: dict[str, AnyArray], prior: Prior | None = None) -> "ModelInfo":
        """Return what is known of a model now.

        Its initial point is given, by unconstrained values, and what drew from its prior before, if anything did.
        """
        layout = Layout.from_model(model, point)
        return cls(model, layout, DataSnapshot(model), layout.flatten(point), prior or Prior(model))

    @property
    def n_dim(self) -> int:
        """Number of unconstrained coordinates."""
        return self.layout.n_dim

    def prior_draws(self, n_draws: int, seed: int) -> Array:
        """Draw from the prior, (n, n_dim), unconstrained; fewer draws, or none, where it can't be drawn from."""
        return self.prior.draws(self.layout, n_draws, seed)


def terms_by_variable(model: pm.Model, point: Mapping[str, AnyArray]) -> dict[str, float]:
    """Return the terms of log p by the names of their variables, at a point by unconstrained values."""
    with without_c(model):
        terms: dict[str, float] = model.point_logps(dict(point), round_vals=4, mode="FAST_COMPILE")
    return terms


# --- observed arrays made data, whose values and lengths can change ---


def with_data_for(model: pm.Model, observed: Sequence[str]) -> tuple[pm.Model, dict[str, str]]:
    """Return a copy of a model whose observed variables have ``pm.Data`` for values, and the names of these."""
    copy: Any = model.copy()
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
    free = [(rv, model.rvs_to_transforms[rv]) for rv in model.free_RVs]
    parts: list[list[tuple[str, Variable]]] = [
        [(v.name, v) for v in [*model.free_RVs, *model.deterministics]],
        [(model.rvs_to_values[rv].name, t.forward(rv, *rv.owner.inputs) if t else rv) for rv, t in free],
        [(rv.name, rv) for rv in model.observed_RVs],
    ]
    try:
        with without_c(model), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of draws that are not finite
            drawn = drawing([v for part in parts for _, v in part])(n, seed)
    except NotImplementedError as error:
        raise ValueError(f"The prior of the model can't be drawn from: {error}. Give each variable a prior.") from error
    result = []
    for outputs in drawn:
        each = iter(outputs)
        result.append(Simulated(*({name: np.asarray(next(each)) for name, _ in part} for part in parts)))
    return result
