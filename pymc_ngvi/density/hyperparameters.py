"""Which coordinates of a model to give, so that what is left is a latent Gaussian model: its hyperparameters."""

import functools
import math

from collections.abc import Iterator

import numpy as np

from numpy.typing import NDArray
from pymc.distributions.transforms import CholeskyCovPacked

from pymc_ngvi.core.normal_rules import rule
from pymc_ngvi.core.pattern import Pattern, SummedPattern
from pymc_ngvi.core.refusal import NotApart, Reason, TooDenseError
from pymc_ngvi.core.types import Array, GaussianState
from pymc_ngvi.density.expectations import Expectations
from pymc_ngvi.density.logdensity import LogDensity
from pymc_ngvi.density.rows_given import NotRows, RowsGiven
from pymc_ngvi.density.rows_over import RowsLeftOver, RowsOver
from pymc_ngvi.density.sparse_hessian import is_dense
from pymc_ngvi.graphs.layout import Variable
from pymc_ngvi.rows.linear_map import AffineMap, PairCovariances, SummedMap
from pymc_ngvi.rows.own_effects import Narrowed, OwnEffects, find_own, narrowed
from pymc_ngvi.rows.pattern import pattern_of_rows
from pymc_ngvi.rows.quadratic import is_quadratic

# Log p as rows in which effects that one row alone reads are integrated out: in fewer coordinates, and with no error.
# What is left is nearer to a Gaussian. The effects are drawn afterwards, each given its row.

#: Level of the rule by which moments of effects are averaged over their rows' predictors.
_LEVEL = 2
#: Points at which conditions of log p are looked at, and prior standard deviations of the effects there.
_N_POINTS, _FAR = 32, 6.0


def own_effects_of(rows: Expectations) -> tuple[OwnEffects | None, str]:
    """Return the effects that single rows read; None where there are none, and why, in a clause."""
    dependence = rows.predictors.dependence
    sets = dependence.sets.tocsr()[dependence.index.ravel()]
    start = rows.linear_map(np.zeros((1, rows.linear_map.n_dim)))[0]
    found, why = find_own(rows.functions, sets, rows.terms.slope != 0.0, start)
    if found is not None and rows.joint is not None and rows.joint.linear_map.weights[:, found.coordinates].any():
        return None, "sums over many coordinates read the effects as well"
    return found, why


class RowsLeft(RowsGiven):
    """Log p as rows in the coordinates that are left when those that are given are, and effects are integrated out."""

    def __init__(self, whole: RowsGiven, effects: OwnEffects) -> None:
        self.whole, self.effects = whole, effects
        self.outside, self.inside, self.kept = whole.outside, whole.inside, effects.kept
        self.rows = whole.rows
        self.n_gradients = self.n_hessians = 0
        self._read = whole.rows.predictors.dependence
        self._now: Narrowed

    @property
    def n_dim(self) -> int:
        """Number of coordinates that are left."""
        return len(self.kept)

    def start(self) -> Array:
        """Return where the model starts, (n_dim,)."""
        return self.whole.start()[self.kept]

    def give(self, values: Array) -> bool:
        """Take values of the coordinates that are given, (n_outside,); tell whether rows add up to log p there."""
        return self.whole.give(values) and self._is_read_alike() and self.take()

    def _is_read_alike(self) -> bool:
        """Tell whether the same effects can be integrated out where rows were found anew."""
        if self.whole.rows.predictors.dependence is self._read:
            return True
        found, _ = own_effects_of(self.whole.rows)
        if found is None or not np.array_equal(found.kept, self.kept):
            return False
        self.effects, self._read = found, self.whole.rows.predictors.dependence
        return True

    def take(self) -> bool:
        """Take rows with the numbers that they have now; tell whether effects can be integrated out."""
        whole = self.whole.rows
        linear = whole.linear_map
        now = narrowed(self.effects, whole.functions, linear.joint)
        if now is None:
            return False
        left: AffineMap = now.linear
        if isinstance(linear, SummedMap):
            left = SummedMap(now.linear, np.ascontiguousarray(linear.weights[:, self.kept]))
        self.rows, self._now = whole.of_rows(now.functions, left, now.constant), now
        return True

    def meets_conditions(self) -> bool:
        """Tell whether log p is finite wherever the effects are, near the start."""
        if not self.whole.rows.leaves_out_conditions:
            return True
        around = np.random.default_rng(0).uniform(-_FAR, _FAR, (_N_POINTS, len(self.effects.coordinates)))
        eta = self.rows.linear_map(np.broadcast_to(self.start(), (_N_POINTS, self.n_dim)))
        points = self._joined(np.broadcast_to(self.start(), (_N_POINTS, self.n_dim)), self._now.at(eta, around))
        return bool(np.isfinite(self.whole.logp(points)).all())

    def logp(self, theta: Array) -> Array:
        """Return log p, (n_points,), at points (n_points, n_dim)."""
        with np.errstate(all="ignore"):
            values = self.rows.at(theta)
            if not self.whole.rows.leaves_out_conditions:
                return values
            completed = self._joined(theta, self._now.conditional_mean(self.rows.linear_map(theta)))
            return np.where(np.isfinite(self.whole.logp(completed)), values, -np.inf)

    def logp_of_all(self, theta: Array) -> Array:
        """Return log p, (n_points,), at points of all coordinates; what is given stays."""
        return self.whole.logp_of_all(theta)

    def drawn_inside(self, theta: Array, rng: np.random.Generator) -> Array:
        """Return draws of all that is not given, (n, n_inside), given those that are left, (n, n_dim)."""
        return self._joined(theta, self._now.drawn(self.rows.linear_map(theta), rng))

    def moments_inside(self, q: GaussianState) -> tuple[Array, Array]:
        """Return means and sds of all that is not given, (n_inside,) each, by a Gaussian of what is left."""
        linear, (nodes, weights) = self.rows.linear_map, rule(1, (_LEVEL,))
        covariances = PairCovariances(linear.joint, self._now.pairs()).of(linear.covariances(q))
        mean, sd = self._now.moments(linear(q.location[None])[0], covariances, nodes[:, 0], weights[0])
        own_mean, own_sd = super().moments_inside(q)
        return self._joined(own_mean[None], mean[None])[0], self._joined(own_sd[None], sd[None])[0]

    @functools.cached_property
    def over(self) -> RowsOver | RowsLeftOver | None:
        """The same at many values of what is given; None where that takes one after the other."""
        # Where log p has conditions, it is compared with them at one value after the other.
        whole = self.whole.over
        if not isinstance(whole, RowsOver) or self.whole.rows.leaves_out_conditions:
            return None
        try:
            return RowsLeftOver(whole, self.effects, self.whole.rows.functions)
        except (NotApart, TooDenseError):
            return None

    @functools.cached_property
    def pattern(self) -> Pattern | None:
        """Entries of the Hessian that can differ from 0; None where it counts as dense."""
        whole = self.whole.rows
        left = self.effects.dependence(whole.predictors.dependence, whole.functions)
        pattern = pattern_of_rows(self.rows.functions, left)
        return None if is_dense(pattern) else pattern

    @functools.cached_property
    def summed(self) -> SummedPattern | None:
        """The same beside sums over many coordinates; None where there are no such sums."""
        whole = self.whole.rows
        if whole.joint is None:
            return None
        pattern = pattern_of_rows(self.rows.functions, self.effects.dependence(whole.joint.dependence, whole.functions))
        return None if pattern is None else SummedPattern(pattern, whole.joint.linear_map.weights[:, self.kept])

    def _joined(self, left: Array, effects: Array) -> Array:
        result = np.empty((len(left), len(self.inside)))
        result[:, self.kept], result[:, self.effects.coordinates] = left, effects
        return result


# --- which coordinates of a model to give, so that what is left is a latent Gaussian model: its hyperparameters ---

#: Elements of a variable that may be given, and of all of them, at most: at first; where that leads nowhere.
_FEW, _MANY = (6, 10), (40, 48)


def latent_rows(density: LogDensity) -> RowsGiven:
    """Return log p as rows, its hyperparameters being given.

    These are the few parameters with a transform (scales, correlations, shapes), and others that enter rows beside a
    predictor: what is left is Gaussian but for functions of one predictor each, or nearly so.
    """
    found: RowsGiven | NotRows = density.functions.made.latent_rows.of(lambda: _found_or_not(density))
    if isinstance(found, NotRows):
        raise found
    return found


def ratios(density: LogDensity, outside: NDArray[np.intp]) -> list[tuple[int, int]]:
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


def _found_or_not(density: LogDensity) -> RowsGiven | NotRows:
    """Return what few hyperparameters give, or many, where with few there are no rows, or none that are concave."""
    few = _found(density, *_FEW)
    if not isinstance(few, NotRows) and (few.is_concave or not _of_size(density, _FEW[0] + 1, _MANY[0])):
        return few
    many = _found(density, *_MANY)
    return few if isinstance(many, NotRows) and not isinstance(few, NotRows) else many


def _of_size(density: LogDensity, least: int, most: int) -> list[Variable]:
    """Return the variables with a transform of such sizes."""
    return [v for v in density.layout.variables if v.value_name != v.name and least <= v.size <= most]


def _found(density: LogDensity, most_of_one: int, most: int) -> RowsGiven | NotRows:
    try:
        return _given(density, most_of_one, most)
    except NotRows as reason:
        return reason


def _given(density: LogDensity, most_of_one: int, most: int) -> RowsGiven:
    if density.has_minibatch:
        raise NotRows(Reason.IN_PART, "the model reads pm.Minibatch data")
    outside = _of_size(density, 0, most_of_one)
    while True:
        index = _index(outside)
        if not len(index):
            raise NotRows(Reason.NOT_LATENT, "it has no scale, correlation or other transformed parameter")
        if len(index) > most:
            raise NotRows(Reason.NOT_LATENT, f"{len(index)} hyperparameters are more than {most}")
        if len(index) == density.n_dim:
            raise NotRows(Reason.NOT_LATENT, "all of its parameters are hyperparameters")
        given = RowsGiven(density, index)
        others = [v for v in density.layout.variables if v not in outside]
        more = next(_beside(given, others), None)
        if more is None:
            found, _ = own_effects_of(given.rows)
            if found is None:
                return given
            left = RowsLeft(given, found)
            return left if left.take() and left.meets_conditions() else given
        outside.append(more)


def _index(variables: list[Variable]) -> NDArray[np.intp]:
    parts = [np.arange(v.where.start, v.where.stop) for v in variables]
    return np.sort(np.concatenate([*parts, np.empty(0)])).astype(np.intp)


def _beside(given: RowsGiven, variables: list[Variable]) -> Iterator[Variable]:
    """Yield small variables that rows read by themselves, beside another predictor, and not as a product with it."""
    sets = given.rows.predictors.dependence.sets.tocsr()
    index = given.rows.predictors.dependence.index.ravel()
    few = [v for v in variables if v.size <= _FEW[0]]
    for rows in given.rows.functions:
        if rows.n_directions < 2 or is_quadratic(rows):
            continue
        for column in rows.index.T:
            read = sets[np.unique(index[column])]
            alone = given.inside[np.unique(read.indices)] if (np.diff(read.indptr) == 1).all() else []
            for variable in few:
                if len(alone) and ((alone >= variable.where.start) & (alone < variable.where.stop)).all():
                    yield variable
