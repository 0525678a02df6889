"""How draws of q drift as they are moved towards the posterior: moments, the joint density, functionals."""

import functools
import math

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import batched, chain, combinations, islice
from typing import NamedTuple

import numpy as np

from numpy.typing import NDArray
from scipy import sparse
from scipy.special import chdtri, erfcx, ndtri, softmax

from pymc_ngvi.core.draws import density_of_normal
from pymc_ngvi.core.importance import smoothed
from pymc_ngvi.core.sizes import STREAMED
from pymc_ngvi.core.status import Elbo
from pymc_ngvi.core.types import Array, Bools, Indices
from pymc_ngvi.density import Layout, ModelDensity
from pymc_ngvi.density.constrain import Functionals
from pymc_ngvi.fitting.record import LOG_OUTSIDE, MOSTLY
from pymc_ngvi.graphs.layout import Variable
from pymc_ngvi.moves.chains import ChainCoordinates, PhasePoints, phase_points_at, trajectory
from pymc_ngvi.results.distributions import Distribution, MovePlan

#: A quarter of a period in whitened coordinates, and by how much, as a part, trajectories differ from it.
_QUARTER, _JITTER = 0.5 * np.pi, 0.2
#: Acceptance that is aimed at, and below which nothing is said of the moved draws.
AIM, LEAST_ACCEPTANCE = 0.8, 0.3
#: First step size times the fourth root of the dimension; steps of a trajectory at most.
_FIRST, MOST_STEPS = 1.2, 24
#: Draws below which nothing is said of anything; on so many a step size is tried, and so many are moved where gradients
#: are few. Draws that are moved otherwise, at least.
FEWEST, LEAST_MOVED = 32, 48
#: How often a step size is tried, and trajectories where gradients are few.
_TRIALS, _FEWEST_TRAJECTORIES = 8, 2


@dataclass(frozen=True)
class Moved:
    """Draws before and after trajectories, unconstrained."""

    #: Before and after; rows belong together; shape (n_draws, n_dim).
    start: Array
    end: Array
    #: Draws of q that are correlated with ``end``; shape (n_draws, n_dim).
    control: Array
    #: Of log p, from before to after; shape (n_draws,).
    change: Array
    #: Mean probability that a trajectory was accepted.
    acceptance: float
    n_trajectories: int
    #: Draws of q left out because log p or its gradient is not finite there.
    n_lost: int
    n_gradients: int


#: Where there are too few evaluations.
_NONE: Array = np.empty((0, 0))
NOT_MOVED = Moved(_NONE, _NONE, _NONE, np.empty(0), float("nan"), 0, 0, 0)


def move(
    density: ModelDensity,
    plan: MovePlan,
    base: Array,
    rng: np.random.Generator,
    *,
    n_trajectories: int,
    max_gradients: int,
) -> Moved:
    r"""Draws of q moved towards the posterior by short Hamiltonian trajectories.

    Trajectories leave the posterior as it is. If q is the posterior, moved draws have its moments; where they don't, q
    is wrong, and the drift says in which direction and by how much at least. In coordinates whitened by q, a quarter of
    a period makes a draw forget where it began, and a few steps make a quarter.

    Each draw has a *control*: a draw that moves with the same momenta, but in q. Its law is exactly q, and where q is
    near the posterior it stays near the draw, so that most of the noise of a drift cancels.

    References
    ----------
    .. [1] J. Heng and P. E. Jacob (2019). Unbiased Hamiltonian Monte Carlo with couplings. Biometrika 106.
       https://doi.org/10.1093/biomet/asy074
    """
    n_dim, before = plan.gaussian.n_dim, density.n_gradients
    step = _FIRST * n_dim**-0.25
    n_trajectories, n_draws = _within(max_gradients, step, n_trajectories, len(base))
    if not n_draws:
        return NOT_MOVED
    x = plan.draw(base[:n_draws])
    x = x[np.isfinite(x).all(axis=1)]
    coordinates = ChainCoordinates.of(plan.gaussian)
    points = phase_points_at(plan.target, coordinates, x)
    n_lost = n_draws - int(points.finite.sum())
    start = points = points[np.flatnonzero(points.finite)]
    acceptance = np.zeros(n_trajectories)
    if len(start.x):
        step = _tried_step(plan, coordinates, points, step, rng)
        n_draws = _within(max_gradients, step, n_trajectories, len(start.x), tried=True)[1]
        start = points = points[np.arange(n_draws)]
    control = start.x
    for t in range(n_trajectories if len(start.x) else 0):
        # A draw that is refused in the end loses its control: the last trajectory takes smaller steps.
        n_steps, size = _steps(step if t < n_trajectories - 1 else 0.5 * step, rng)
        momenta = rng.standard_normal(points.x.shape)
        if plan.coupled:
            # By the angle that the same leapfrog steps turn draws of a standard normal.
            angle, centre = n_steps * float(np.arccos(1.0 - 0.5 * size**2)), plan.gaussian.mean()
            turned = np.sin(angle) * (plan.gaussian.draws(momenta) - centre)
            control = centre + np.cos(angle) * (control - centre) + turned
        points, probability, _ = trajectory(plan.target, coordinates, points, momenta, n_steps, size, rng)
        acceptance[t] = probability.mean()
        if acceptance[t] < AIM - 0.15:
            step *= 0.5
    first, last, of_q = (plan.on_model_scale(p) for p in (start.x, points.x, control))
    kept = np.isfinite(first).all(axis=1) & np.isfinite(last).all(axis=1) & np.isfinite(of_q).all(axis=1)
    return Moved(
        start=first[kept],
        end=last[kept],
        control=of_q[kept],
        change=points.logp[kept] - start.logp[kept],
        acceptance=float(acceptance.mean()),
        n_trajectories=n_trajectories if len(start.x) else 0,
        n_lost=n_lost,
        n_gradients=density.n_gradients - before,
    )


def _within(
    max_gradients: int, step: float, n_trajectories: int, n_draws: int, *, tried: bool = False
) -> tuple[int, int]:
    """Return how many trajectories and draws a number of gradients allows: no draws where that is too few of them."""
    n_steps = min(np.ceil(_QUARTER / step), MOST_STEPS)
    for n in (n_trajectories,) if tried else (n_trajectories, min(n_trajectories, _FEWEST_TRAJECTORIES)):
        # A draw takes its start, trajectories, and a last one in smaller steps; the pilot half a trajectory.
        affordable = int((max_gradients - (0 if tried else 0.5 * FEWEST * n_steps)) // ((n + 1) * n_steps + 1))
        if affordable >= FEWEST:
            return n, min(n_draws, affordable)
    return n_trajectories, 0


def _steps(step: float, rng: np.random.Generator) -> tuple[int, float]:
    """Return the number of steps of a quarter of a period, as near as that may be, and their size, both jittered."""
    length = _QUARTER * (1.0 + _JITTER * (2.0 * rng.random() - 1.0))
    n_steps = int(np.clip(np.ceil(length / step), 1, MOST_STEPS))
    return n_steps, min(step, length / n_steps)


def _tried_step(
    plan: MovePlan, coordinates: ChainCoordinates, points: PhasePoints, step: float, rng: np.random.Generator
) -> float:
    """Return the first step size in a falling sequence that has the acceptance aimed at, on some of the draws."""
    pilot = points[np.arange(min(FEWEST, len(points.x)))]
    for _ in range(_TRIALS):
        n_steps, size = _steps(step, rng)
        # Half of a trajectory tells as much about its energy.
        momenta = rng.standard_normal(pilot.x.shape)
        _, probability, _ = trajectory(plan.target, coordinates, pilot, momenta, -(-n_steps // 2), size, rng)
        if probability.mean() >= AIM:
            break
        step *= 0.5
    return step


#: Probability beyond each limit of an 89 % interval, and those below the limits.
_TAIL = 0.055
LEVELS = {"lower": _TAIL, "upper": 1.0 - _TAIL}
#: Probability of a false alarm among all figures of a kind together: a verdict looks at a dozen kinds.
FAMILY_WISE = 0.001


@dataclass(frozen=True)
class Estimates:
    """Estimates of one quantity for each coordinate."""

    #: With Monte Carlo standard errors; shape (n_dim,).
    value: Array
    se: Array

    def beyond(self, size: float) -> Indices:
        """Return the coordinates whose value stands out, the largest first."""
        value = np.abs(self.value)
        found = np.flatnonzero((value > size) & (value > critical(len(value)) * self.se))
        return found[np.argsort(-np.abs(self.value[found]))]


def critical(n: int) -> float:
    """Return the standard errors that none of ``n`` estimates of 0 exceeds, but for a probability of `FAMILY_WISE`."""
    return float(-ndtri(0.5 * FAMILY_WISE / max(n, 1)))


#: Part of an error that moved draws show at least, less chance: mostly, it is half.
_SHOWN = 0.25
#: Drifts from which on q is not reliable: errors of 0.15 standard deviations in means, 12 % in standard deviations and
#: 0.2 in limits are seen in nine of ten cases (docs/benchmarks/verdict_power.md).
LIMITS = {"mean": 0.11, "sd": 0.09, **dict.fromkeys(LEVELS, 0.15)}


@dataclass(frozen=True)
class Drift:
    """By how much draws are off: in coordinates, or in what is computed of them."""

    #: "mean", in standard deviations of q; "sd", relative to that of q; "lower" and "upper", limits of 89 % intervals.
    measures: dict[str, Estimates]
    #: What is computed; None for coordinates.
    functionals: Functionals | None = None

    def beyond(self, measure: str) -> Indices:
        """Return the columns that stand out, the most certain first: among what is whole, and among single elements.

        There are few of the first, so that less has to be allowed for chance.
        """
        of = self.measures[measure]
        whole = np.zeros(len(of.value), dtype=bool) if self.functionals is None else self.functionals.is_whole
        kinds = [np.flatnonzero(kind) for kind in (whole, ~whole)]
        return np.concatenate([kind[Estimates(of.value[kind], of.se[kind]).beyond(LIMITS[measure])] for kind in kinds])

    def off(self) -> dict[str, Indices]:
        """Return the columns that are off by more than a limit, and not by chance, by measure."""
        found, known = dict[str, Indices](), np.empty(0, dtype=np.intp)
        for name in self.measures:
            columns = self.beyond(name)
            # What is said of a mean or a standard deviation is not said of limits again.
            found[name] = columns[~np.isin(columns, known)] if name in LEVELS else columns
            known = np.concatenate([known, columns])
        return {name: columns for name, columns in found.items() if len(columns)}

    @property
    def stands_out(self) -> bool:
        """Whether something is off by much."""
        return bool(self.off())

    @property
    def is_settled(self) -> bool:
        """Whether no moment drifts by what counts, certain or not, and each is known to within half of that."""
        known = ((self.measures[name], LIMITS[name]) for name in ("mean", "sd"))
        return all(np.all((np.abs(of.value) < size) & (2.0 * of.se < size)) for of, size in known)

    def confirmed_by(self, moved: "Drift | None") -> "Drift":
        """Return this drift, 0 where moved draws show less than a quarter of it, or no more than chance."""
        if moved is None:
            return self
        measures = {}
        for name, of in self.measures.items():
            by_moves = moved.measures[name]
            least = np.maximum(_SHOWN * np.abs(of.value), 2.0 * by_moves.se)
            measures[name] = Estimates(np.where(np.sign(of.value) * by_moves.value > least, of.value, 0.0), of.se)
        return replace(self, measures=measures)


#: Smallest ratio of variances that is told.
_LEAST_RATIO = 0.01


def diffused(z: Array, rate: Array, spread: Array, source: Indices) -> dict[str, Estimates]:
    """Return what rates of change say of columns, (n, k), that have mean 0 and variance 1 or about.

    With z the column, L z its rate and b half of the rate at which its variance grows, :math:`L f(z) = f'(z) L z +
    f''(z) b`. If z were normal, the means of L z, of L z^2 / 2, and of L f where f' is Stein's solution for z below a
    limit, would be what its mean, variance and probability are off by. Draws of one source are not independent.
    """
    of_sources = _sums_by(source)
    pace = spread.mean(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        rate, spread = rate / pace, spread / pace

    def estimates(values: Array, drift: Callable[[Array], Array]) -> Estimates:
        mean, se = values.mean(axis=0), np.sqrt(np.sum((of_sources @ values) ** 2, axis=0)) / len(values)
        value = drift(mean)
        with np.errstate(invalid="ignore"):
            se = se * np.where(mean != 0.0, value / mean, 1.0)  # as many errors from 0 as the mean is
        return where_usable(np.isfinite(value) & (se > 0.0), Estimates(value, se))

    found = {
        "mean": estimates(rate, np.asarray),
        "sd": estimates(z * rate + spread, lambda mean: np.maximum(1.0 - mean, _LEAST_RATIO) ** -0.5 - 1.0),
    }
    for name, level in LEVELS.items():
        limit = ndtri(level)
        below = z <= limit
        # The solution has the ratio of a tail of a normal to its density, by which it is bounded.
        ratio = np.sqrt(0.5 * np.pi) * erfcx(np.where(below, -z, z) / np.sqrt(2.0))
        solution = np.where(below, 1.0 - level, level) / density_of_normal(limit) * ratio
        slope = z * solution + (below - level) / density_of_normal(limit)
        found[name] = estimates(slope * spread + solution * rate, np.asarray)
    return found


def _sums_by(source: Indices) -> sparse.csr_array:
    return sparse.csr_array((np.ones(len(source)), (source, np.arange(len(source)))))


def on_scale_of(values: Array, *others: Array) -> list[Array]:
    """Return columns on a scale on which some of them have mean 0, standard deviation 1, and no heavy tails."""
    lower, centre, upper = np.quantile(values, (LEVELS["lower"], 0.5, LEVELS["upper"]), axis=0)
    with np.errstate(all="ignore"):
        middle, *rest = (np.arcsinh((x - centre) / (upper - lower)) for x in (values, *others))
        return [(x - middle.mean(axis=0)) / middle.std(axis=0) for x in rest]


#: Probability that a draw of a Gaussian posterior lies so far below the median of log p as counts as far.
_RARE = 1e-4
#: Part of the draws that have to be far, beyond those that go the other way, to count.
LEAST_FAR = 0.02
#: Drift of log p that counts, in its standard deviations.
_MUCH = 0.5


@dataclass(frozen=True)
class JointDrift:
    """How far log p drifts as draws are moved: of most draws, and of a minority that is far from the posterior.

    Along trajectories that leave the posterior as it is, log p of its draws rises as often as it falls, and as far,
    whatever its tails are. Of a Gaussian posterior in d dimensions, log p is a constant less half of a chi-square: its
    standard deviation is sqrt(d / 2), that of a change sqrt(d). A mean of changes is no test where a few of them are
    huge: these make its standard error as large. So what is far counts as far in the mean, and is counted.
    """

    #: Their mean, nats, with its standard error.
    mean: Elbo
    #: Nats about their median, beyond which a change counts as far: what one draw of a Gaussian posterior in 10,000 is
    #: below the median of log p.
    far: float
    #: Changes that are far above it; shape (n_rises,).
    rises: Array
    #: Changes that are far below it, and all of them.
    n_falls: int
    n_draws: int
    n_dim: int

    @property
    def limit(self) -> float:
        """Drift from which on it counts: as much may come of standard deviations whose errors do not count."""
        return max(_MUCH * math.sqrt(0.5 * self.n_dim), LIMITS["sd"] * self.n_dim)

    def in_words(self) -> str:
        """Return what was measured."""
        return (
            f"E[log p] drifts by {self.mean} nats; it rises by more than {self.far:.0f} at {len(self.rises):,}, and "
            f"falls as far at {self.n_falls:,} of {self.n_draws:,}"
        )


def joint_drift_of(moved: Moved) -> JointDrift:
    """Return the changes of log p of moved draws."""
    change, n_dim = moved.change, moved.start.shape[1]
    far = 0.5 * float(chdtri(n_dim, _RARE) - chdtri(n_dim, 0.5))
    apart = change - np.median(change)
    near = np.clip(apart, -far, far)
    mean = Elbo(float(near.mean() + np.median(change)), float(near.std() / np.sqrt(len(near))))
    return JointDrift(mean, far, change[apart > far], int(np.sum(apart < -far)), len(change), n_dim)


def compared(scores: Array, before: Array, after: Array, source: Indices) -> dict[str, Estimates]:
    """Return by how much moments and limits of columns, (n, k), change from weights of draws to other weights of them.

    Draws of one source, as before and after they were moved, are not independent. Whether a limit moves is judged by
    how many draws cross it: quantiles of few draws have longer tails.
    """
    of_sources, order, apart = _sums_by(source), np.argsort(scores, axis=0), (after - before)[:, None]

    def error(values: Array) -> Array:
        return np.asarray(np.sqrt(np.sum((of_sources @ values) ** 2, axis=0)))

    def quantile(weights: Array, level: float) -> Array:
        at = np.argmax(np.cumsum(weights[order], axis=0) >= level, axis=0)[None]
        return np.take_along_axis(scores, np.take_along_axis(order, at, axis=0), axis=0)[0]

    with np.errstate(invalid="ignore", divide="ignore"):
        first, last = scores - before @ scores, scores - after @ scores
        variance, ratio = before @ first**2, np.sqrt(after @ last**2 / (before @ first**2))
        growth = after[:, None] * ((last / ratio) ** 2 - variance) - before[:, None] * (first**2 - variance)
        found = {
            "mean": Estimates((first - last)[0], error(after[:, None] * last - before[:, None] * first)),
            "sd": Estimates(ratio - 1.0, 0.5 * error(growth) / variance),
        }
        for name, level in LEVELS.items():
            value = quantile(after, level) - quantile(before, level)
            crossed = apart * ((scores <= quantile(0.5 * (before + after), level)) - level)
            found[name] = Estimates(value, np.abs(value) * error(crossed) / np.abs(crossed.sum(axis=0)))
    return {name: where_usable(np.isfinite(of.value) & (of.se > 0.0), of) for name, of in found.items()}


def moved_drift_of(moved: Moved, scores: Array, functionals: Functionals | None = None) -> Drift:
    """Return the drift of columns, (2 n, k), from controls to moved draws."""
    n = len(moved.end)
    after = np.repeat((0.0, 1.0 / n), n)
    return Drift(compared(scores, after[::-1], after, np.tile(np.arange(n), 2)), functionals)


def normal_scores(values: Array) -> Array:
    """Return the quantiles of a standard normal at the ranks of values, by column.

    These are the same for any increasing function of a quantity, such as its logarithm, and their moments exist: what
    has heavy tails is compared as well as what has none.
    """
    from scipy.stats import rankdata  # 0.4 s to import

    with np.errstate(invalid="ignore"):
        return np.asarray(ndtri((rankdata(values, axis=0) - 0.5) / len(values)))


def where_usable(usable: Bools, estimates: Estimates) -> Estimates:
    """Return estimates, 0 with an error of 1 where they are of no use."""
    return Estimates(np.where(usable, estimates.value, 0.0), np.where(usable, estimates.se, 1.0))


def functional_drift_of(functionals: Functionals, moved: Moved, seconds: float) -> Drift | None:
    """Return the drift of functionals from draws of q to moved ones."""
    n = min(len(moved.end), functionals.affordable(seconds) // 2)
    if n < FEWEST:
        return None
    moved = replace(moved, control=moved.control[:n], end=moved.end[:n])
    try:
        values = np.concatenate([functionals.at(moved.control), functionals.at(moved.end)])
    except Exception:  # as above: it may fail at some draws alone
        return None
    return moved_drift_of(moved, normal_scores(values), functionals)


def weighted_shift_of(values: Array, log_ratio: Array, functionals: Functionals | None) -> Drift:
    """Return by how much importance weights move coordinates, or what is computed of draws, (n_draws, n_columns)."""
    n, weights = len(values), softmax(smoothed(log_ratio)[0])
    return Drift(compared(normal_scores(values), np.full(n, 1.0 / n), weights, np.arange(n)), functionals)


# --- symmetries that log p may have ---

# Symmetries that log p may have: exchanged labels and changed signs, proposed from the shapes of variables alone.
# All are linear maps of the unconstrained space that keep volumes, so that they leave the posterior as it is just where
# they leave log p as it is.

#: Transforms that act entry by entry; those of them that turn a sign on a symmetric support to one here.
_ENTRYWISE = ("", "log", "log_exp_m1", "logodds", "interval", "circular")
_MIRRORED = ("", "logodds", "interval", "zerosum")
#: Sets of up to so many axes or variables are all tried; of more, small ones, so many in all.
_MOST_IN_ALL_SETS, _MOST_SETS = 5, 64
#: Labels along an axis that are looked at.
_MOST_LABELS = 9


def transform_of(variable: Variable) -> str:
    """Return the name of the transform of a variable; empty where it has none."""
    transformed = variable.value_name != variable.name
    return variable.value_name.removeprefix(f"{variable.name}_").removesuffix("__") if transformed else ""


class _Item(NamedTuple):
    """What can be exchanged label by label, or change its sign: an axis of a variable."""

    variable: Variable
    axis: int
    #: Places of each label in the flat vector; shape (n_labels, ...).
    places: Indices


def _mapped(theta: Array, order: Indices, sign: NDArray[np.int8], sums: tuple[Indices, ...]) -> Array:
    """Return the images of draws, (n_draws, n_dim): places in another order, some with the opposite sign.

    A simplex is made of centred logarithms, of which the last is implied by the others: places behind the flat vector
    are such sums, with the opposite sign.
    """
    whole = np.concatenate([theta, *(-theta[:, at].sum(axis=1) for at in sums)], axis=1)
    return np.asarray((whole[:, order] * sign)[:, : theta.shape[1]])


@dataclass(frozen=True)
class SymmetryFamily:
    """Symmetries of one kind: of the labels along an axis, of the signs by label."""

    kind: str
    #: Of the variables.
    names: tuple[str, ...]
    #: Axes or variables that are part of it.
    where: frozenset[object]
    #: Exchanges of neighbours, in the order of the labels; signs label by label.
    members: tuple[Callable[[Array], Array], ...]


def families_of(layout: Layout) -> list[SymmetryFamily]:
    """Return all symmetries to try, those of few variables first."""
    axes, sums = _axes_by_length(layout)
    flat, n = np.arange(layout.n_dim), layout.n_dim + sum(of.shape[1] for of in sums)

    def family(kind: str, some: Sequence[_Item], mirrored: Sequence[Variable] = ()) -> SymmetryFamily:
        labels, members = range(min(len(some[0].places), _MOST_LABELS)), []
        for i in labels if kind == "sign" else labels[:-1]:
            order, sign = np.arange(n), np.ones(n, dtype=np.int8)
            for item in some:
                if kind == "labels":
                    order[item.places[[i, i + 1]]] = order[item.places[[i + 1, i]]]
                else:
                    sign[item.places[i]] *= -1
            for v in mirrored:
                sign[v.where] *= -1
            members.append(functools.partial(_mapped, order=order, sign=sign, sums=sums))
        names = dict.fromkeys(v.name for v in (*(item.variable for item in some), *mirrored))
        where = frozenset([*((item.variable, item.axis) for item in some), *mirrored])
        return SymmetryFamily(kind, tuple(names), where, tuple(members))

    # Scalars between bounds: as two labels are exchanged, the probability of one turns to that of the other.
    bounded = tuple(v for v in layout.variables if not v.shape and transform_of(v) in ("logodds", "interval"))
    mirrors = list(dict.fromkeys([(), bounded, *((v,) for v in bounded[:_MOST_IN_ALL_SETS])]))
    found = [
        family("labels", some, mirrored)
        for items in axes
        for some in _sets(items)
        for mirrored in (mirrors if len(items[0].places) == 2 else [()])
    ]
    whole = [_Item(v, 0, flat[None, v.where]) for v in layout.variables if transform_of(v) in _MIRRORED]
    signs = [[axis for axis in those if transform_of(axis.variable) in _MIRRORED] for those in axes]
    # Those of whole variables may be products of those by label.
    found += [family("sign", some) for items in (*signs, whole) for some in _sets(items)]
    return sorted(found, key=lambda family: len(family.where))


def _axes_by_length(layout: Layout) -> tuple[list[list[_Item]], tuple[Indices, ...]]:
    """Return the axes along which entries could be exchanged, by constrained length, and what is summed."""
    axes, sums, n = dict[int, list[_Item]](), [], layout.n_dim
    for variable in layout.variables:
        transform, shape = transform_of(variable), variable.shape
        places = np.arange(variable.where.start, variable.where.stop).reshape(shape)
        if transform == "simplex":
            sums.append(places.reshape(-1, shape[-1]).T)
            implied = np.arange(n, n + sums[-1].shape[1])
            places, n = np.concatenate([places, implied.reshape(*shape[:-1], 1)], axis=-1), n + len(implied)
        for axis, length in enumerate(places.shape):
            if (transform in _ENTRYWISE or transform == "simplex") and length > 1:
                axes.setdefault(length, []).append(_Item(variable, axis, np.moveaxis(places, axis, 0)))
    return list(axes.values()), tuple(sums)


def _sets[T](items: Sequence[T]) -> Iterator[tuple[T, ...]]:
    """Return sets of items: all of them at once where they are many, then small ones first."""
    n = len(items)
    if n > _MOST_IN_ALL_SETS:
        yield tuple(items)
    yield from islice(chain.from_iterable(combinations(items, size) for size in range(1, n + 1)), _MOST_SETS)


# --- modes that are equal by symmetry, of which q covers one: labels of a mixture, the sign of a factor ---

#: Draws at which log p is compared, and evaluations of log p at most.
N_COMPARED, MOST_EVALUATIONS = 8, 512
#: Standard deviations by which the mean of a q that covers one of several equal modes moves, at least somewhere.
_MOVES = 0.5
#: Rounding of log p, relative: far above that of sums of a million terms, far below any change that data make.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class EqualModes:
    """A symmetry of log p that q does not have."""

    kind: str
    #: Variables whose entries are exchanged, or change signs, together.
    names: tuple[str, ...]
    #: Of equal modes that it makes.
    number: int
    #: Whether signs change for each label along an axis on its own.
    by_label: bool = False
    #: How many of these modes q covers; "some": there may be more of them.
    covered: str = "one"


def equal_modes(
    density: ModelDensity, q: Distribution, theta: Array, layout: Layout, most: int = MOST_EVALUATIONS
) -> tuple[tuple[EqualModes, ...], int]:
    """Return the symmetries of log p that map q to somewhere else, and how many evaluations of log p that took.

    A symmetry leaves log p as it is at each draw, not only in the mean; a single draw rules out almost all candidates.
    """
    theta = theta[np.isfinite(theta).all(axis=1)]
    logp, n_log_p = density.logp(theta) if len(theta) else np.empty(0), len(theta)
    theta, logp = theta[np.isfinite(logp)], logp[np.isfinite(logp)]
    log_q, mean, sd = q.log_density(theta), q.mean()[None], q.sd()
    families = families_of(layout) if len(theta) else []
    # The first and the last of a family stand for all of it, at the first draw.
    ends = [(family, member) for family in families for member in (*family.members[:1], *family.members[1:][-1:])]
    ends = ends[: max(most - n_log_p, 0)]
    promising = set[int]()
    for some in batched(ends, max(STREAMED // layout.n_dim, 1)):
        holds = _equal(density.logp(np.concatenate([member(theta[:1]) for _, member in some])), logp[0])
        promising |= {id(family) for (family, _), held in zip(some, holds, strict=True) if held}
    n_log_p += len(ends)

    found, exchanged, of_signs = list[EqualModes](), set[object](), set[str]()
    for family in families:  # those of few variables first: exchanged labels of more variables have these as a part
        is_sign = family.kind == "sign"
        if id(family) not in promising or (not is_sign and family.where & exchanged):
            continue
        # Whether a candidate that maps q elsewhere is a symmetry of log p; None where it maps q into itself.
        images: list[bool | None] = []
        for member in family.members:
            to = member(theta)
            with np.errstate(invalid="ignore", over="ignore"):
                outside = ~(log_q - q.log_density(to) <= LOG_OUTSIDE)
            # Draws that cover all images have a mean that stays where it is.
            moves = np.abs(member(mean)[0] - mean[0]) > _MOVES * sd
            if outside.mean() <= MOSTLY or not moves.any():
                images.append(None)
            elif n_log_p + len(to) > most:
                images.append(False)
            else:
                n_log_p += len(to)
                images.append(bool(_equal(density.logp(to), logp).all()))
        number = 2 ** images.count(True) if is_sign else _orders(images)
        # Signs that follow from others, or that q has, make no more modes.
        if number > 1 and not (is_sign and of_signs.issuperset(family.names)):
            found.append(EqualModes(family.kind, family.names, number, is_sign and len(family.members) > 1))
        if is_sign and images.count(False) < len(images):
            of_signs.update(family.names)
        elif True in images:
            exchanged |= family.where
    return tuple(found), n_log_p


def _equal(one: Array, other: Array | float) -> Bools:
    return np.abs(one - other) <= _ROUNDING * (1.0 + np.abs(other))


def _orders(images: list[bool | None]) -> int:
    """Return in how many orders labels can be put of which some neighbours can be exchanged."""
    runs = "".join("x" if image else " " for image in images).split()
    return math.prod(math.factorial(len(run) + 1) for run in runs)
