"""From flat unconstrained draws to what users know: constrained values, Deterministics, linear predictors and sums."""

import math

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pymc as pm
import pytensor.tensor as pt

from pytensor.graph import Variable, ancestors, graph_replace
from pytensor.tensor.random.op import RNGConsumerOp
from scipy import sparse

from pymc_ngvi.core.messages import listed
from pymc_ngvi.core.sizes import AT_ONCE
from pymc_ngvi.core.types import AnyArray, Array, Bools, Indices
from pymc_ngvi.density.info import Values, unconstrained_variables
from pymc_ngvi.density.logdensity import ModelDensity
from pymc_ngvi.density.over_draws import OnDraws as OnDraws
from pymc_ngvi.density.over_draws import at_known
from pymc_ngvi.graphs import graph
from pymc_ngvi.graphs.backends import without_c
from pymc_ngvi.graphs.layout import Layout
from pymc_ngvi.graphs.rewrites import has_op
from pymc_ngvi.rows.linear_map import LinearMap


def on_draws(model: pm.Model, layout: Layout, outputs: list[Variable]) -> OnDraws:
    """Return what evaluates functions of the value variables of a model at unconstrained draws.

    It reads the model's shared data when it is called, so that it follows ``pm.set_data``. Where functions draw random
    numbers, draws are evaluated one by one.
    """
    with without_c():
        theta = pt.vector("theta", dtype="float64", shape=(layout.n_dim,))
        outputs = graph.on_flat_vector(model, layout, outputs, theta)
        outputs = graph.simplify(outputs, check_bounds=model.check_bounds)
        # Vectorised, a random number that does not depend on theta would be the same in every draw.
        return OnDraws(model, theta, outputs, one_by_one=has_op(outputs, RNGConsumerOp))


def unconstrained(
    density: ModelDensity, names: Collection[str], values: Mapping[str, AnyArray], theta: Array | None = None
) -> Array:
    """Return flat vectors, (n_draws, n_dim), of values of variables on their constrained scale, (n_draws, *shape).

    Those that are not named are as they are in ``theta``, where it is given.
    """
    model, layout = density.model, density.layout
    known = {rv: np.asarray(values[rv.name], dtype=np.float64) for rv in model.free_RVs if rv.name in values}
    n = len(next(iter(known.values())))
    function, draws = at_known(
        model, known, n, lambda parts: graph_replace(unconstrained_variables(model, names), parts, strict=False)
    )
    made = function(draws)
    result = np.full((n, layout.n_dim), np.nan) if theta is None else theta.copy()
    for variable in layout.variables:
        if variable.name in names:
            result[:, variable.where] = made[list(names).index(variable.name)].reshape(n, -1)
    return result


# --- sums of the log densities of some variables of a model, at draws: priors, likelihoods, and their changes ---


def term_sums(model: pm.Model, layout: Layout, make: Callable[[], list[Variable]], theta: Array) -> Array:
    """Return sums of terms of log p, (n_draws,), at unconstrained draws, (n_draws, n_dim)."""
    with without_c():
        function = on_draws(model, layout, [term.sum() for term in make()])
    with np.errstate(invalid="ignore"):  # of terms that are infinite
        sums = function(np.ascontiguousarray(theta, dtype=np.float64))
        return np.sum(sums, axis=0, dtype=np.float64) + np.zeros(len(theta))


def log_densities(model: pm.Model, names: Sequence[str], *, jacobian: bool = False) -> list[Variable]:
    """Return the log densities of variables and Potentials by name, elementwise, in the value variables."""
    if not names:
        return []
    return model.logp(vars=[model[name] for name in names], jacobian=jacobian, sum=False)


class Constrainer:
    """Evaluates free variables on their constrained scale, and Deterministics, at unconstrained draws.

    Notes
    -----
    Deterministics that read ``pm.Minibatch`` data have, in all draws, the rows of the batch that ``density`` has then.
    Beside Deterministics, the intercepts of a Bambi model are its own; alone, free variables are those of log p.
    """

    def __init__(
        self, density: ModelDensity, *, deterministics: bool = True, names: Collection[str] | None = None
    ) -> None:
        self.model = density.model
        self.layout = density.layout
        self._minibatches = density.minibatches
        self._deterministics = deterministics
        self._left_out = {d.name for d in self.model.deterministics} - {d.name for d in density.deterministics}
        self.names = names
        of_intercepts = [coefficients for coefficients, _ in self.layout.bambi.centrings.values()]
        self._evaluated = names and frozenset(names).union(*of_intercepts)
        self._function: OnDraws | None = None

    @classmethod
    def of(
        cls, density: ModelDensity, *, deterministics: bool = True, names: frozenset[str] | None = None
    ) -> "Constrainer":
        """Return the one that all fits share for which nothing is built anew (`LogDensity.again`)."""
        return density.functions.once(
            ("constrained", deterministics, names),
            lambda: cls(density, deterministics=deterministics, names=names),
        )

    def __getstate__(self) -> dict[str, object]:
        """Return what to pickle: the compiled function is made again when it is needed."""
        return {**self.__dict__, "_function": None}

    def coordinates(self) -> Indices:
        """Return the flat coordinates that the named variables are computed from, through priors, too."""
        of_values = {v.value_name: v.name for v in self.layout.variables}
        below = set(ancestors([self.model[of_values.get(name, name)] for name in self._evaluated or ()]))
        read = (v.where for v in self.layout.variables if self.model[v.name] in below)
        return np.concatenate([np.arange(0), *(np.arange(where.start, where.stop) for where in read)])

    def __call__(self, theta: Array, *, random_seed: int | None = None) -> Values:
        """Evaluate all variables at draws."""
        flat = self.layout.unflatten(np.ascontiguousarray(theta, dtype=np.float64))
        value_vars = [self.model.rvs_to_values[rv] for rv in self._fitted()]
        values: Values = {
            v.name: flat[v.name].astype(v.type.dtype, copy=False) for v in value_vars if self._is_wanted(v.name)
        }
        if self.computed:
            function = self._compiled()
            if random_seed is not None:
                function.reseed(random_seed)
            for name, value in zip(self.computed, function(theta), strict=True):
                # A float32 model gives float32 draws, like PyMC.
                values[name] = value.astype(self.model[name].type.dtype, copy=False)
        if self._deterministics:
            values = self.layout.bambi.uncentred(values)
        return values if self.names is None else {k: v for k, v in values.items() if k in self.names}

    @property
    def seconds(self) -> float:
        """Estimated time of one draw, from the graph and the sizes of the data alone."""
        return self._compiled().seconds if self.computed else 0.0

    def _fitted(self) -> list[Variable]:
        """Return the free variables, but for those that were added to the model after the fit, to be predicted."""
        names = {v.name for v in self.layout.variables}
        return [rv for rv in self.model.free_RVs if rv.name in names]

    def _is_known(self, deterministic: Variable) -> bool:
        """Tell whether a Deterministic is one of what was fitted."""
        if deterministic.name in self._left_out:
            return False
        added = set(self.model.free_RVs) - set(self._fitted())
        return not added or added.isdisjoint(ancestors([deterministic]))

    @property
    def computed(self) -> list[str]:
        """Names of what is computed: transformed variables, then Deterministics."""
        model = self.model
        transformed = [rv.name for rv in self._fitted() if model.rvs_to_transforms[rv] is not None]
        listed = transformed + [d.name for d in model.deterministics if self._deterministics and self._is_known(d)]
        return [name for name in listed if self._is_wanted(name)]

    def _is_wanted(self, name: str) -> bool:
        return self._evaluated is None or name in self._evaluated

    def _compiled(self) -> OnDraws:
        """Return what evaluates what is computed: made once."""
        if self._function is None:
            with without_c(self.model):
                outputs = self.model.replace_rvs_by_values([self.model[name] for name in self.computed])
                self._function = on_draws(self.model, self.layout, self._minibatches.hold(outputs))
        return self._function


# --- what people look at beside coordinates: Deterministics, linear predictors, and their sums ---

#: Elements that are looked at, at most.
_MOST = 300
#: Time of the evaluations, as a part of that of the gradients that moved the draws, and seconds in any case.
_PART, _FLOOR = 0.15, 0.02
#: The group of linear predictors.
PREDICTORS = "linear predictors"

type Evaluate = Callable[[Array], dict[str, AnyArray]]


@dataclass(frozen=True)
class Group:
    """Elements of one quantity that are compared, and their sum."""

    #: Of a Deterministic, or `PREDICTORS`.
    name: str
    shape: tuple[int, ...]
    #: Elements that are compared; the sum is that of all, where these are two at least.
    index: Indices

    @property
    def size(self) -> int:
        """Elements in all."""
        return math.prod(self.shape)

    @property
    def has_sum(self) -> bool:
        """Whether the last of its columns is the sum."""
        return self.size > 1

    @property
    def n_columns(self) -> int:
        """Columns that it has: elements, and the sum."""
        return len(self.index) + self.has_sum

    def columns(self, values: AnyArray) -> Array:
        """Return these, (n_draws, n_columns), of values, (n_draws, *shape)."""
        flat = values.reshape(len(values), -1).astype(np.float64, copy=False)
        if not self.has_sum:
            return flat[:, self.index]
        with np.errstate(all="ignore"):
            return np.column_stack([flat[:, self.index], flat.sum(axis=1)])

    def label(self, column: int) -> str:
        """Return what a column is, for a sentence."""
        of_predictors = self.name == PREDICTORS
        if column == len(self.index):
            return f"the sum of {self.name if of_predictors else f'`{self.name}`'}"
        element = int(self.index[column])
        if of_predictors:
            return f"linear predictor {element}"
        position = ", ".join(str(int(i)) for i in np.unravel_index(element, self.shape))
        return f"`{self.name}[{position}]`" if self.shape else f"`{self.name}`"


@dataclass(frozen=True)
class Functionals:
    """Quantities that can be computed of draws, and are no coordinates."""

    #: In the order of their columns.
    groups: tuple[Group, ...]
    #: Values by name of group, (n_draws, *shape), of draws, (n_draws, n_dim).
    evaluate: Evaluate
    #: Estimated, of one draw.
    seconds: float
    #: Those of the last group, where that is of linear predictors.
    of_predictors: LinearMap | None = None

    @property
    def is_whole(self) -> Bools:
        """Which columns are a sum, or all that there is of a quantity."""
        parts = [np.arange(g.n_columns) == g.n_columns - 1 for g in self.groups]
        return np.concatenate(parts) if parts else np.empty(0, dtype=bool)

    def at(self, theta: Array) -> Array:
        """Return all columns at draws, (n_draws, n_columns)."""
        held = max(1, AT_ONCE // max(sum(g.size for g in self.groups if g.name != PREDICTORS), 1))
        rows = []
        for start in range(0, len(theta), held):
            values = self.evaluate(theta[start : start + held])
            rows.append(np.column_stack([self._columns(g, values, theta[start : start + held]) for g in self.groups]))
        return np.concatenate(rows)

    def _columns(self, group: Group, values: dict[str, AnyArray], theta: Array) -> Array:
        if group.name == PREDICTORS and self.of_predictors is not None:
            return self.of_predictors(theta)
        return group.columns(values[group.name])

    def of_elements(self) -> str:
        """Return how many there are, in words."""
        named = [f"{PREDICTORS}" if g.name == PREDICTORS else f"`{g.name}`" for g in self.groups]
        sums = ", and sums" if any(g.has_sum for g in self.groups) else ""
        n = sum(len(g.index) for g in self.groups)
        return f"{n:,} element{'s'[: n != 1]} of {listed(named, '{}')}{sums}"

    def affordable(self, seconds: float) -> int:
        """Return how many draws can be evaluated in estimated seconds, beside some that always may be."""
        return int((_PART * seconds + _FLOOR) / max(self.seconds, np.finfo(np.float64).eps))

    def where(self, column: int) -> tuple[Group, int]:
        """Return the group of a column, and which of its columns that is."""
        for group in self.groups:
            if column < group.n_columns:
                return group, column
            column -= group.n_columns
        raise IndexError("there is no such column")


def functionals_of(density: ModelDensity, constrain: Constrainer) -> Functionals | None:
    """Return what can be computed of draws; None where there is nothing, or it can't be computed."""
    known = {d.name for d in density.deterministics}
    names = [name for name in constrain.computed if name in known]
    predictors = _predictors(density)
    point = density.initial_point()[None]
    try:
        seconds = constrain.seconds if names else 0.0
        values = constrain(point, random_seed=0) if names else {}
    except Exception:  # what a Deterministic raises is not for a diagnosis to tell
        names, values, seconds = [], {}, 0.0
    shapes = {name: values[name].shape[1:] for name in names}
    if predictors is not None:
        shapes[PREDICTORS] = (len(predictors[1]),)
    sizes = {name: math.prod(shape) for name, shape in shapes.items() if math.prod(shape)}
    each = _MOST
    while each > 1 and sum(min(size, each) for size in sizes.values()) > _MOST:
        each -= 1
    groups = tuple(
        Group(name, shapes[name], np.unique(np.linspace(0, size - 1, min(size, each)).round().astype(np.intp)))
        for name, size in sizes.items()
    )
    if not groups:
        return None
    of_predictors = None if predictors is None else _of_columns(*predictors, groups[-1])

    def evaluate(theta: Array) -> dict[str, AnyArray]:
        return constrain(theta, random_seed=0) if names else {}

    return Functionals(groups, evaluate, seconds, of_predictors)


def _predictors(density: ModelDensity) -> tuple[LinearMap, Indices] | None:
    """Return linear predictors, and those that people look at, where rows are known already.

    These depend on two coordinates or more, and a likelihood or a Potential is a function of them: what a prior is
    written by, such as the whitened vector of a normal distribution, means nothing to anybody.
    """
    if not density.by_rows.are_known or density.n_directions is None or (rows := density.by_rows.found) is None:
        return None
    linear = rows.linear_map.plain
    entries = np.count_nonzero(linear.dense, axis=1) + np.diff(linear.rest.indptr)
    parts = described.parts if (described := density.described_rows()) is not None else ()
    numbers = [part.predictors for part in parts if part.role != "prior"]
    is_looked_at = np.zeros(len(entries), dtype=bool)
    is_looked_at[np.concatenate([np.empty(0, dtype=np.intp), *numbers])] = True
    several = np.flatnonzero((entries > 1) & is_looked_at)
    return (linear, several) if len(several) else None


def _of_columns(linear: LinearMap, several: Indices, group: Group) -> LinearMap:
    """Return the columns of the group of predictors, without the others."""
    shown = several[group.index]
    offset, dense, rest = linear.offset[shown], linear.dense[shown], linear.rest[shown]
    if group.has_sum:
        total = linear.rest[several].sum(axis=0)[None]
        offset = np.append(offset, linear.offset[several].sum())
        dense = np.vstack([dense, linear.dense[several].sum(axis=0)])
        rest = sparse.vstack([rest, sparse.csr_array(total)], format="csr")
    return LinearMap(offset, dense, linear.columns, rest)
