"""Log p as a function of some coordinates alone, at many values of the others: a sum over rows, whatever these are.

Where hyperparameters are given, a Gaussian process, a random walk, a map or crossed effects are latent Gaussian models:
the predictors of all rows are affine in what is left, by a matrix that depends on the hyperparameters. To the search
for rows these are data. Which elements are rows, and of what predictors, is found once; numbers of the rows, slopes and
matrices of the predictors are computed at many values at once. Where log p is not what they add up to, that is told.
"""

import functools
import math

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt

from pymc.distributions.transforms import CholeskyCovPacked
from pytensor.graph.basic import Variable
from pytensor.graph.replace import graph_replace
from pytensor.graph.traversal import ancestors

from pymc_ngvi.core.messages import NotApart, Reason, Refused
from pymc_ngvi.core.types import Array, Bools, Indices
from pymc_ngvi.density.logdensity import LogDensity
from pymc_ngvi.families.sparse import Precisions
from pymc_ngvi.graphs import graph, layout
from pymc_ngvi.graphs.backends import without_c
from pymc_ngvi.graphs.loops import vectorised
from pymc_ngvi.reading.predictors import ROUNDING, Compile, DataSeen, JointPredictors, Reading, Rows, Source, Terms
from pymc_ngvi.rows.engines import engine_for
from pymc_ngvi.rows.expectation import RowFunction
from pymc_ngvi.rows.linear_map import Entries, LinearMap, ManyMaps, Sparsity
from pymc_ngvi.rows.many import ManyRows, ManyRowsLeft, Narrowing, OwnEffects, find_own
from pymc_ngvi.rows.separable import is_concave, is_quadratic

# --- stands for the flat vector where graphs are put on two others: of some coordinates, and of the rest ---


class Pieces:
    """Pieces of the flat vector, taken from globals or local coordinates."""

    def __init__(self, globals_: Indices, n_dim: int, global_: Variable, local: Variable) -> None:
        self.global_, self.local = global_, local
        self._is_global = np.zeros(n_dim, dtype=bool)
        self._is_global[globals_] = True
        self._rank = np.where(self._is_global, np.cumsum(self._is_global), np.cumsum(~self._is_global)) - 1

    def __getitem__(self, where: slice) -> Variable:
        """Return a piece."""
        of_globals, rank = self._is_global[where], self._rank[where]
        if of_globals.all():
            return self.global_[int(rank[0]) : int(rank[-1]) + 1]
        if not of_globals.any():
            return self.local[int(rank[0]) : int(rank[-1]) + 1]
        at = np.empty(len(rank), dtype=np.intp)
        at[of_globals] = np.arange(int(of_globals.sum()))
        at[~of_globals] = int(of_globals.sum()) + np.arange(int((~of_globals).sum()))
        return pt.concatenate([self.global_[rank[of_globals]], self.local[rank[~of_globals]]])[at]


# --- graphs that hang on given values at many of these: the same graphs, with one more axis ---


class OverGiven:
    """Puts an axis of values in front of graphs that hang on what is given."""

    def __init__(self, given: Variable, compile_: Compile) -> None:
        self._given, self._compile = given, compile_
        [self._n] = given.type.shape

    def hangs(self, var: Variable) -> bool:
        """Tell whether a variable hangs on it."""
        return self._given in set(ancestors([var]))

    def outputs(self, outputs: list[Variable], inputs: list[Variable]) -> Callable[..., list[Array]]:
        """Return a function of values, (n, n_given), and inputs: outputs that hang on values have an axis in front.

        Others have one of length 1.
        """
        if not outputs:
            return lambda values, *others: []
        values = pt.matrix("values", dtype="float64", shape=(None, self._n))
        batched = self._vectorised(outputs, {self._given: values})
        batched = [
            b if self.hangs(o) and b.type.ndim > o.type.ndim else pt.expand_dims(b, 0)
            for b, o in zip(batched, outputs, strict=True)
        ]
        function = self._compile([values, *inputs], batched)
        return lambda at, *others: [np.asarray(out) for out in function(at, *others)]

    def pointwise(self, output: Variable, theta: Variable) -> Callable[[Array, Array], Array]:
        """Return a function of values, (n, n_given), and of points at each, (n, m, n_dim)."""
        points = pt.tensor3("points", dtype="float64", shape=(None, None, *theta.type.shape))

        def compiled(length: int | None) -> Callable[[Array, Array], Array]:
            values = pt.tensor3("values", dtype="float64", shape=(None, length, self._n))
            [batched] = self._vectorised([output], {self._given: values, theta: points})
            batched = batched + 0.0 * (values[:, :, 0] + points[:, :, 0])
            function = self._compile([values, points], batched)
            return lambda at, theta: np.asarray(
                function(np.repeat(at[:, None], length or theta.shape[1], axis=1), np.ascontiguousarray(theta))
            )

        once = compiled(1)
        try:
            once(np.zeros((2, self._n)), np.zeros((2, 2, *theta.type.shape)))
        except np.linalg.LinAlgError:  # of these values, not of shapes; it is a ValueError, too
            return once
        except ValueError:  # a static length of 1 is lost where PyTensor reshapes: values are repeated at each point
            return compiled(None)
        return once

    def _vectorised(self, outputs: list[Variable], new: dict[Variable, Variable]) -> list[Variable]:
        """Return outputs with an axis in front; what is given is an input, and not shared, by then."""
        with without_c():
            stand_in = pt.vector("given", dtype="float64", shape=(self._n,))
            apart = graph_replace(outputs, {self._given: stand_in}, strict=False)
            inputs = {stand_in if var is self._given else var: batch for var, batch in new.items()}
            return vectorised(list(apart), inputs)


def _numbers_of(source: Source, terms: Terms) -> Variable:
    """Return elements of a known variable, or weights of those of another."""
    if not source.is_weight:
        return source.var.ravel()[source.elements]
    total = pt.zeros(len(source.elements))
    for (_, var), weight in zip(terms.weigh.pairs, terms.weigh.outputs, strict=True):
        if var is source.var:
            total = total + weight.ravel()[source.elements]
    return total


class _Predictors:
    """The predictors' matrices at many values."""

    def __init__(self, reading: Reading, joint: JointPredictors | None, theta: Variable, over: OverGiven) -> None:
        found = self._found = reading.predictors
        variables, self._plan = (found.variables, found.plan) if joint is None else (joint.variables, joint.plan)
        point = theta if joint is None else joint.point
        hanging = [over.hangs(var) for var in variables]
        ends = np.cumsum([found.size(var) for var in found.variables])
        parts = [
            np.arange(end - found.size(var), end)
            for var, end, hangs in zip(found.variables, ends, hanging, strict=True)
            if hangs
        ]
        self._where = np.concatenate([*parts, np.empty(0, dtype=np.intp)]).astype(np.intp)
        order = self._order = np.lexsort((self._plan.cols, self._plan.rows))
        counts = np.bincount(self._plan.rows, minlength=self._plan.n_rows)
        [n_joint] = point.type.shape
        self.sparsity = Sparsity(np.concatenate([[0], np.cumsum(counts)]), self._plan.cols[order], n_joint)
        self.columns = self._plan.columns
        self._evaluate = None
        if parts:
            with without_c():
                points = pt.matrix("points", dtype="float64", shape=(None, n_joint))
                everything = pt.concatenate([v.ravel() for v, hangs in zip(variables, hanging, strict=True) if hangs])
                [at_points] = vectorised([everything], {point: points})
            self._evaluate = over.outputs([at_points], [points])
        self.renew(joint)

    def renew(self, joint: JointPredictors | None) -> None:
        """Take the values of data as they are now, for predictors that depend on the same coordinates as before."""
        self._fixed: LinearMap = self._found.linear_map if joint is None else joint.linear_map.joint
        self.weights = None if joint is None else joint.linear_map.weights
        origin = np.zeros(self.sparsity.n_dim) if joint is None else joint.origin
        self._points = origin + np.concatenate([np.zeros((1, len(origin))), self._plan.directions])
        rest = self._fixed.rest
        rows, cols = self._plan.rows[self._order], self._plan.cols[self._order]
        #: Entries of the sparse part, in the order of `sparsity`, where the linear map was found.
        self._of_fixed = np.asarray(rest[rows, cols]).ravel() if len(rows) else np.empty(0)

    @property
    def n_values(self) -> int:
        """Numbers that are computed at one value."""
        return len(self._points) * max(len(self._where), 1)

    def maps(self, values: Array) -> ManyMaps:
        """Return the predictors as functions of theta at values, (n, n_given)."""
        n, plan = len(values), self._plan
        offset = np.tile(self._fixed.offset, (n, 1))
        data, dense = np.tile(self._of_fixed, (n, 1)), self._fixed.dense[None]
        if self._evaluate is None:
            return ManyMaps(offset, dense, self.columns, data, self.sparsity, self.weights)
        [found] = self._evaluate(values, self._points)  # (n, 1 + n_directions, n_hanging)
        found = np.broadcast_to(found, (n, *found.shape[1:]))
        offset[:, self._where] = found[:, 0]
        apart = found[:, 1:] - found[:, :1]
        n_colours = len(plan.directions) - len(self.columns)
        if len(self.columns) and (apart[:, n_colours:] != self._fixed.dense[self._where].T).any():
            dense = np.repeat(dense, n, axis=0)
            dense[:, self._where] = np.swapaxes(apart[:, n_colours:], 1, 2)
        if data.shape[1]:
            place = np.full(plan.n_rows, -1, dtype=np.intp)
            place[self._where] = np.arange(len(self._where))
            rows, colours = plan.rows[self._order], plan.colours[self._order]
            some = np.flatnonzero(place[rows] >= 0)
            data[:, some] = apart[:, colours[some], place[rows[some]]]
        return ManyMaps(offset, dense, self.columns, data, self.sparsity, self.weights)


# --- log p as a function of some coordinates alone, the others being given: a sum over rows, whatever these are ---

#: How far from the start values are given first: at special ones, such as a correlation of 0, entries are missing.
_AROUND = 0.1
#: The same of points at which rows are compared with log p: far ones tell more, and are rough: where a covariance is
#: nearly singular, all digits of log p may be lost there.
_DISTANCES = (0.1, 1e-3)
#: Nats that what is constant in log p may be off by.
_NATS = 0.01
#: Points at which conditions of log p are looked at, and prior standard deviations of own effects there.
_N_POINTS, _FAR = 32, 6.0


class RowsGiven:
    """Log p as rows in the coordinates that are left where others are given, and effects of single rows integrated.

    Raises Refused where log p is no sum over rows of these: why, is a clause.
    """

    #: Whether weights of draws given hyperparameters turned out to be uneven.
    is_uneven = False

    def __init__(self, density: LogDensity, outside: Indices) -> None:
        graphs, functions = density.graphs, density.functions
        self.outside, self.inside = outside, np.setdiff1d(np.arange(density.n_dim), outside)
        start = density.initial_point()
        self._first_start = start[self.inside]
        self.first = start[outside] + _AROUND * np.random.default_rng(0).standard_normal(len(outside))
        self._apart = np.random.default_rng(1).standard_normal(len(self.inside))
        with without_c():
            given = pytensor.shared(self.first, "given", shape=(len(outside),))
            self.theta = pt.vector("inside", dtype="float64", shape=(len(self.inside),))
            pieces = Pieces(outside, density.n_dim, given, self.theta)
            sums = [factor.logp.sum() for factor in graphs.factors]
            parts = graphs.simplify(graph.on_flat_vector(density.model, density.layout, sums, pieces))
            compile_ = functions.compile_for_few
            try:
                self.reading = Reading(
                    parts, self.theta, functools.partial(graph.simplify, check_bounds=False), compile_
                )
                self.engine = engine_for(functions.backend, compile_)
                self._over = OverGiven(given, compile_)
                self._log_p = pt.add(pt.constant(0.0), *parts)
                self._take()
            except (ValueError, NotImplementedError) as error:  # of an operation whose values can't be computed
                raise Refused(Reason.NO_PREDICTORS, str(error)) from None
        self._data = DataSeen(parts, but=[given])

    def _take(self) -> None:
        """Set up what evaluates rows."""
        terms, found = self.reading.terms, self.reading.predictors
        if terms.rest:
            raise Refused(Reason.NOT_ALL_ROWS, terms.why[0])
        if any(rows.is_whole for rows in terms.rows):
            raise Refused(Reason.NOT_ALL_ROWS, "a row is more than arithmetic with numbers")
        every = np.arange(len(terms.slope))
        joint = found.with_sums(np.unique(np.concatenate([rows.index.ravel() for rows in terms.rows])))
        is_fixed = joint is not None and not any(map(self._over.hangs, joint.sums))
        self._joint = joint if is_fixed else None
        self._predictors = _Predictors(self.reading, self._joint, self.theta, self._over)
        sources = [source for kind in terms.rows for source in kind.sources.values()]
        sources.append(Source(found.vector, every, is_weight=True))
        self._zeros = terms.weigh.zeros()
        self._evaluate = self._over.outputs([_numbers_of(source, terms) for source in sources], terms.weigh.inputs)
        self._shares = any((r.index == r.index[0]).all(axis=0).any() for r in terms.rows if len(r.index) > 1)
        indices = [rows.index for rows in terms.rows]
        self._every = Entries(self._predictors.sparsity, self._predictors.columns, indices)
        self._narrowing: Narrowing | None = None
        #: Effects that single rows read, which are integrated out; None where there are none.
        self.own: OwnEffects | None = None
        #: Which of the coordinates that are not given are left, and entries of the precision that rows ask for.
        self.kept, self.entries = np.arange(len(self.inside)), self._every
        self._of_data()

    def _of_data(self) -> None:
        """Forget what hangs on the values of data."""
        self._start = self._first_start
        _, functions = self._numbers(np.repeat(self.first[None], 2, axis=0))
        #: Functions of the rows of log p, where values are given first; and those of what is left.
        self.functions = [f.some(np.arange(n := len(f.index) // 2), f.index[:n]) for f in functions]
        if self._narrowing is None:
            self.left = self.functions
        #: What was found of coefficients in closed form; see `gaussian_over`.
        self.closed_form: tuple[Any] | None = None

    def bind(self) -> None:
        """Take the data as they are now; raise Refused where log p is no sum over rows with these."""
        if self._data.are_current():
            return
        if self.reading.renew():
            self._joint = None if self._joint is None else self._joint.renewed()
            self._predictors.renew(self._joint)
            self._of_data()
        else:
            is_narrow = self._narrowing is not None
            self.reading.refresh(anew=True)
            self._take()
            if is_narrow:
                self.integrate_own()
        self._data.take()
        self.__dict__.pop("precisions", None)

    # --- what is left ---

    @property
    def n_dim(self) -> int:
        """Number of coordinates that are left, but for those that are integrated out."""
        return len(self.kept)

    @property
    def start(self) -> Array:
        """Where fits begin, (n_dim,): where the model does, unless `begin_at` says otherwise."""
        return self._start[self.kept]

    def begin_at(self, x: Array) -> None:
        """Let fits begin elsewhere, and take what is constant in log p from its value there."""
        self._start = x.copy()

    @functools.cached_property
    def precisions(self) -> Precisions:
        """What factors precisions of what is left."""
        weights = self._predictors.weights
        return Precisions(self.entries.pattern, None if weights is None else weights[:, self.kept])

    def integrate_own(self) -> str:
        """Integrate effects out that single rows read; return why not, in a clause."""
        found = self.reading.predictors
        sets = found.dependence.sets.tocsr()[found.dependence.index.ravel()]
        at_0, weights = found.linear_map.offset, self._predictors.weights
        effects, why = find_own(self.functions, sets, self.reading.terms.slope != 0.0, at_0)
        if effects is None:
            return why
        if weights is not None and weights[:, effects.coordinates].any():
            return "sums over many coordinates read the effects as well"
        try:
            narrowing = Narrowing(effects, self.functions, self._predictors.sparsity, self._predictors.columns)
        except NotApart as refused:
            return refused.sentence
        rows, agrees = self._whole(self.first[None])
        left, is_right = narrowing.of(rows)
        if not (agrees & is_right).all():
            return "a prior of effects is no normal density"
        if self.reading.leaves_out_conditions:
            assert isinstance(left, ManyRowsLeft)
            around = np.random.default_rng(0).uniform(-_FAR, _FAR, (1, len(effects.coordinates), _N_POINTS))
            x = np.repeat(self._start[None, effects.kept, None], _N_POINTS, axis=2)
            points = np.swapaxes(left.completed(x, around), 1, 2)
            if not np.isfinite(self.logp_of_whole(self.first[None], points)).all():
                return "log p is not finite wherever the effects are"
        self._narrowing, self.left = narrowing, left.functions
        self.own, self.kept, self.entries = effects, effects.kept, narrowing.entries
        return ""

    @functools.cached_property
    def is_concave(self) -> bool:
        """Whether log p is concave in what is left, as far as its rows are looked at: with no more than one mode."""
        with np.errstate(all="ignore"):
            [eta] = self.reading.predictors.linear_map(self._start[None])
        return all(is_quadratic(rows) or is_concave(rows, eta[rows.index]) for rows in self.functions)

    @functools.cached_property
    def is_quadratic(self) -> bool:
        """Whether log p is quadratic in what is left, and so a Gaussian, whatever is given."""
        conditions = self.reading.conditions
        may_end = self.reading.leaves_out_conditions and (
            conditions is None or self.reading.predictors.vector in set(ancestors(conditions))
        )
        return not may_end and all(map(is_quadratic, self.functions))

    @property
    def n_rows(self) -> int:
        """Rows of what is left, all kinds together."""
        return sum(len(rows.index) for rows in self.left)

    @property
    def n_evaluations(self) -> int:
        """Evaluations of functions of predictors that values of all rows take at a point."""
        return sum(len(rows.index) * rows.n_in_the_mean for rows in self.left)

    @property
    def n_values(self) -> int:
        """Numbers of the predictors at one value of what is given."""
        return self._predictors.n_values

    # --- at many values of what is given ---

    def at(self, values: Array) -> tuple[ManyRows, Bools]:
        """Return rows at some values, (n, n_outside), and at which of them they add up to log p.

        Elsewhere, numbers mean nothing.
        """
        rows, agrees = self._whole(values)
        if self._narrowing is None or not agrees.any():
            return rows, agrees
        with np.errstate(all="ignore"):
            left, is_right = self._narrowing.of(rows)
        return left, agrees & is_right

    def rows(self, values: Array) -> ManyRows:
        """Return rows at some values, (n, n_outside), but for what is constant in log p."""
        if len(values) == 1 and self._shares:  # an engine would put first what all rows of one value share
            return self.rows(np.repeat(values, 2, axis=0))[np.array([0])]
        with np.errstate(all="ignore"), without_c():
            maps = self._predictors.maps(values)
            slope, functions = self._numbers(values)
        nothing, tolerance = np.zeros(len(values)), _NATS / max(self.n_rows, 1)
        return ManyRows(maps, self._every, functions, slope, nothing, tolerance)

    def _numbers(self, values: Array) -> tuple[Array, list[RowFunction]]:
        """Return slopes, (n, n_predictors), and functions of rows at all values, those of one value after another."""
        numbers = [out.reshape(len(out), -1) for out in self._evaluate(values, *self._zeros)]
        slope = np.broadcast_to(last := numbers.pop(), (len(values), last.shape[1]))
        return slope, [self._function(kind, numbers, *slope.shape) for kind in self.reading.terms.rows]

    def _function(self, rows: Rows, numbers: list[Array], n: int, n_predictors: int) -> RowFunction:
        """Return the function of rows of one kind at ``n`` values, whose numbers are the next ones."""
        index = (rows.index + n_predictors * np.arange(n)[:, None, None]).reshape(-1, rows.index.shape[1])
        data = {}
        for var in rows.sources:
            own = np.broadcast_to(numbers.pop(0), (n, len(rows.index)))
            data[var] = own.reshape(1, -1).astype(var.type.dtype)
        for var, own in rows.data.items():  # of no source: the same at all values
            data.setdefault(var, np.tile(own, (1, n)) if own.shape[1] > 1 else own)
        return self.engine.row_function(replace(rows, index=index, data={var: data[var] for var in rows.data}))

    def _whole(self, values: Array) -> tuple[ManyRows, Bools]:
        rows = self.rows(values)
        constant, agrees = self._anchored(rows, values)
        return replace(rows, constant=np.where(np.isfinite(constant), constant, -np.inf)), agrees

    def _anchored(self, rows: ManyRows, values: Array) -> tuple[Array, Bools]:
        """Return what is constant in log p, and where rows agree with it."""
        constant, agrees = np.full(len(values), np.nan), np.zeros(len(values), dtype=bool)
        for distance in _DISTANCES:
            left = np.flatnonzero(~agrees)
            points = np.stack([self._start, self._start + distance * self._apart])
            at = np.broadcast_to(points, (len(left), *points.shape))
            logp = self.logp_of_whole(values[left], at)
            with np.errstate(all="ignore"):
                of_rows = rows[left].values(np.swapaxes(at, 1, 2))
                constant[left] = logp[:, 0] - of_rows[:, 0]
                size = 1.0 + np.abs(logp) + np.abs(constant[left])[:, None]
                apart = np.abs(of_rows + constant[left][:, None] - logp) > ROUNDING * size
                found = ~(apart & np.isfinite(logp)).any(axis=1) & np.isfinite(constant[left])
                # Where log p is so large that its last digit counts, what is constant in it would be rounding.
                agrees[left] = found & (np.spacing(np.abs(logp[:, 0])) < _NATS)
            if agrees.all():
                break
        return constant, agrees

    @functools.cached_property
    def _pointwise(self) -> Callable[[Array, Array], Array]:
        return self._over.pointwise(self._log_p, self.theta)

    @np.errstate(all="ignore")
    def logp_of_whole(self, values: Array, points: Array) -> Array:
        """Return log p, (n, m), at points (n, m, n_inside) for each of the values, (n, n_outside)."""
        return self._pointwise(values, points)

    def logp(self, rows: ManyRows, values: Array, points: Array) -> Array:
        """Return log p, (n, m), with its conditions, at points (n, n_dim, m) for each of the values, (n, n_outside)."""
        if not self.reading.leaves_out_conditions:
            return rows.values(points)
        if not isinstance(rows, ManyRowsLeft):
            return self.logp_of_whole(values, np.swapaxes(points, 1, 2))
        # Effects have been seen to matter nothing for conditions: they are at the means of their priors.
        at = np.zeros((len(points), len(rows.narrowing.effects.coordinates), points.shape[2]))
        whole = np.swapaxes(rows.completed(points, at), 1, 2)
        return np.where(np.isfinite(self.logp_of_whole(values, whole)), rows.values(points), -np.inf)


# --- which coordinates of a model to give, so that what is left is a latent Gaussian model: its hyperparameters ---

#: Elements of a variable that may be given, and of all of them, at most: at first; where that leads nowhere.
_FEW, _MANY = (6, 10), (40, 48)


def latent_rows(density: LogDensity) -> RowsGiven:
    """Return log p as rows, its hyperparameters being given.

    These are the few parameters with a transform (scales, correlations, shapes), and others that enter rows beside a
    predictor: what is left is Gaussian but for functions of one predictor each, or nearly so.
    """
    found = density.functions.once("latent rows", lambda: _found_or_not(density))
    if isinstance(found, Refused):
        raise found
    found.bind()
    return found


def ratios(density: LogDensity, outside: Indices) -> list[tuple[int, int]]:
    """Return which hyperparameters have the exponential of another one as their scale, and these others.

    So have the entries of a Cholesky factor beside the diagonal of their row, whose logarithms are coordinates.
    """
    found, model = [], density.model
    place = {coordinate: number for number, coordinate in enumerate(outside.tolist())}
    for variable in density.layout.variables:
        transform = model.rvs_to_transforms[model[variable.name]]
        if not isinstance(transform, CholeskyCovPacked):
            continue
        rows, cols = np.tril_indices(math.isqrt(2 * variable.shape[-1]))  # as packed factors have them
        diagonal = np.flatnonzero(rows == cols)[rows]
        for start in range(variable.where.start, variable.where.stop, len(rows)):
            for at, by in start + np.column_stack([np.arange(len(rows)), diagonal])[rows != cols]:
                if at in place and by in place:
                    found.append((place[at], place[by]))
    return found


def _found_or_not(density: LogDensity) -> RowsGiven | Refused:
    """Return what few hyperparameters give, or many, where with few there are no rows, or none that are concave."""
    few = _found(density, *_FEW)
    if not isinstance(few, Refused) and (few.is_concave or not _of_size(density, _FEW[0] + 1, _MANY[0])):
        return few
    many = _found(density, *_MANY)
    return few if isinstance(many, Refused) and not isinstance(few, Refused) else many


def _of_size(density: LogDensity, least: int, most: int) -> list[layout.Variable]:
    """Return the variables with a transform of such sizes."""
    return [v for v in density.layout.variables if v.value_name != v.name and least <= v.size <= most]


def _found(density: LogDensity, most_of_one: int, most: int) -> RowsGiven | Refused:
    if density.has_minibatch:
        return Refused(Reason.IN_PART, "the model reads pm.Minibatch data")
    outside = _of_size(density, 0, most_of_one)
    while True:
        every = [np.arange(v.where.start, v.where.stop) for v in outside]
        index = np.sort(np.concatenate([*every, np.empty(0)])).astype(np.intp)
        if not len(index):
            return Refused(Reason.NOT_LATENT, "it has no scale, correlation or other transformed parameter")
        if len(index) > most:
            return Refused(Reason.NOT_LATENT, f"{len(index)} hyperparameters are more than {most}")
        if len(index) == density.n_dim:
            return Refused(Reason.NOT_LATENT, "all of its parameters are hyperparameters")
        try:
            given = RowsGiven(density, index)
        except Refused as reason:
            return reason
        others = [v for v in density.layout.variables if v not in outside]
        more = next(_beside(given, others), None)
        if more is None:
            given.integrate_own()
            return given
        outside.append(more)


def _beside(given: RowsGiven, variables: list[layout.Variable]) -> Iterator[layout.Variable]:
    """Yield small variables that rows read by themselves, beside another predictor, and not as a product with it."""
    dependence = given.reading.predictors.dependence
    sets, index = dependence.sets.tocsr(), dependence.index.ravel()
    few = [v for v in variables if v.size <= _FEW[0]]
    for rows in given.functions:
        if rows.n_directions < 2 or is_quadratic(rows):
            continue
        for column in rows.index.T:
            read = sets[np.unique(index[column])]
            alone = given.inside[np.unique(read.indices)] if (np.diff(read.indptr) == 1).all() else []
            for variable in few:
                if len(alone) and ((alone >= variable.where.start) & (alone < variable.where.stop)).all():
                    yield variable
