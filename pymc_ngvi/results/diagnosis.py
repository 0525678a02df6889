"""Whether an approximation can be relied on: what its checks found, how they are made, and what they cost."""

import contextlib
import copy
import functools
import math
import shutil
import textwrap

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import batched, chain, combinations, islice
from typing import NamedTuple

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import xarray as xr

from numpy.typing import NDArray
from scipy import sparse
from scipy.special import bdtrc, chdtri, erfcx, expit, ndtri, softmax

from pymc_ngvi.core.draws import chunks, density_of_normal, draws_of
from pymc_ngvi.core.importance import (
    MIN_KHAT_DRAWS,
    MOST_KHAT,
    SAME,
    Weights,
    WeightVerdict,
    khat_limit,
    smoothed,
    weigh,
)
from pymc_ngvi.core.linalg import logsumexp
from pymc_ngvi.core.messages import N_NAMED, percent
from pymc_ngvi.core.prices import fit_seconds, in_words
from pymc_ngvi.core.progress import task
from pymc_ngvi.core.sizes import (
    AT_ONCE,
    HELD,
    MAX_DENSE_DIM,
    N_SHOWN,
    N_WEIGHED,
    STREAMED,
    WEIGHTS,
    check_draws,
    seed_of,
)
from pymc_ngvi.core.status import Elbo, format_gap
from pymc_ngvi.core.types import Array, Bools, Indices
from pymc_ngvi.core.verdict import NOT_TESTED, Against, Condition, Verdict, Word
from pymc_ngvi.density import Layout, ModelDensity
from pymc_ngvi.density.constrain import Functionals, functionals_of
from pymc_ngvi.density.one_mode import has_one_mode
from pymc_ngvi.families import DENSE, SEVERAL_MODES, STRUCTURED, FullState, Traits, name_of, traits_of
from pymc_ngvi.fitting.modes import ModeSearch
from pymc_ngvi.fitting.record import LOG_OUTSIDE, MOSTLY, MUCH, N_DRAWS, FitRecord, OtherMode, of_modes
from pymc_ngvi.fitting.threads import few_threads
from pymc_ngvi.graphs.layout import Variable
from pymc_ngvi.moves.chains import ChainCoordinates, PhasePoints, phase_points_at, trajectory
from pymc_ngvi.posteriors.kinds import KINDS, if_available
from pymc_ngvi.posteriors.plan import Decision
from pymc_ngvi.results.distributions import (
    Distribution,
    MovePlan,
    Posterior,
    costs_of,
    distribution_of,
    flat_dataset,
    free_names,
)

# --- how draws of q drift as they are moved towards the posterior: moments, the joint density, functionals ---

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
#: 0.2 in limits are seen in nine of ten cases (tests/benchmarks/results/verdict_power.md).
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
    # By chance, few draws are in one tail: its limit seems far off then, and its error small.
    se = np.maximum(*(found[name].se for name in LEVELS))
    return found | {name: Estimates(found[name].value, se) for name in LEVELS}


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
        before, after = functionals.at(moved.control), functionals.at(moved.end)
    except Exception:  # as above: it may fail at some draws alone
        return None
    # By ranks among the controls. Among both, a pair has neighbouring ranks, however near its values are: where all
    # pairs are a little farther out, scores of a few dozen draws would grow by 15 %.
    scores = normal_scores(before)
    sources = zip(after.T, np.sort(before, axis=0).T, np.sort(scores, axis=0).T, strict=True)
    of_moved = np.column_stack([np.interp(*columns) for columns in sources])
    return moved_drift_of(moved, np.concatenate([scores, of_moved]), functionals)


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


# --- the report ---

#: What changes quantities that are off.
MOVED = "moving draws towards the posterior"
SCORED = "moving draws along the gradients of log p"


#: Characters in a line at most, fewer on a narrow terminal; coordinates in the table.
_MAX_WIDTH, _N_ROWS = 100, 8
#: What is left out where evaluations are too few to compare log p with its images.
SYMMETRIES = "symmetries of log p"


def wrap(text: str, first: str = "", then: str = "") -> str:
    """Return a text in lines of the width of the terminal, with what these begin with."""
    width = min(shutil.get_terminal_size().columns, _MAX_WIDTH)
    return textwrap.fill(
        text, width, initial_indent=first, subsequent_indent=then, break_long_words=False, break_on_hyphens=False
    )


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """What `NGVIApproximation.diagnose` returns.

    Parameters
    ----------
    checks : Verdict
        That of the approximation: all reports have the same one.
    outcome : str
        How the fit ended.
    gap : float
        Nats still to be gained within the family; NaN where unknown.
    elbo : Elbo
        On fresh draws.
    weights : Weights
        Pareto k-hat and effective sample size of importance weights.
    by_coordinate : dict of str to ndarray, shape (n_dim,)
        ``mean_drift`` in standard deviations of q, ``sd_drift`` relative to them, each with its standard error,
        ``_se``.
    log_p_drift : Elbo
        Drift of E[log p], nats.
    acceptance : float
        Of the trajectories that moved draws.
    n_moved, n_trajectories : int
        Draws that were moved, and how often.
    thorough : bool
        Whether other modes and fits were looked for.
    n_gradients, n_log_p : int
        Evaluations that it took: gradients, and log densities alone.
    layout : Layout
    left_out : tuple of str
        What was left out for want of evaluations within the budget.
    is_pool : bool
        Whether draws are weighted: outcome, gap and ELBO are then of the Gaussian fit before them.
    joint, computed : str
        What moved draws show of log p, and how many Deterministics and linear predictors were compared, in words.
    searched : bool
        Whether the fit looked for other modes.
    has_one_mode : bool
        Whether log p is known to have one alone.
    n_scored : int
        Draws at which gradients of log p were looked at.

    Examples
    --------
    >>> import pymc as pm
    >>> import pymc_ngvi
    >>> with pm.Model():
    ...     x = pm.Normal("x", 1.0, 2.0)
    ...     approx = pymc_ngvi.fit_ngvi(random_seed=1, progressbar=False)
    >>> diagnosis = approx.diagnose(random_seed=1)
    >>> diagnosis.reliable, diagnosis.reasons
    (True, [])
    """

    checks: Verdict
    outcome: str
    gap: float
    elbo: Elbo
    weights: Weights
    by_coordinate: dict[str, Array]
    log_p_drift: Elbo
    acceptance: float
    n_moved: int
    n_trajectories: int
    thorough: bool
    n_gradients: int
    n_log_p: int
    layout: Layout = field(repr=False)
    left_out: tuple[str, ...] = ()
    is_pool: bool = False
    joint: str = ""
    computed: str = ""
    searched: bool = False
    has_one_mode: bool = False
    n_scored: int = 0

    @property
    def verdict(self) -> Word:
        """The verdict in a word: "exact", "exact, few draws", "reliable", "not judged" or "not reliable"."""
        return self.checks.word

    @property
    def reliable(self) -> bool:
        """Whether means, standard deviations and limits can be relied on, as far as tests see."""
        return self.checks.is_reliable

    @property
    def reasons(self) -> list[str]:
        """Why q is not reliable: sentences that name variables and a cure; empty where it is."""
        return [str(condition) for condition in self.checks.failed]

    @property
    def remarks(self) -> list[str]:
        """What else was found, of less weight."""
        return [str(c) for c in self.checks.found if c.against is not Against.RELIABLE and not c.holds]

    @property
    def khat(self) -> float:
        """Pareto k-hat of the importance weights."""
        return self.weights.khat

    def to_dataset(self) -> xr.Dataset:
        """Return what is known of each coordinate.

        Returns
        -------
        xarray.Dataset
            By value name (``sd_log__``), with dims ``diagnostic`` (the names in ``by_coordinate``) and those of the
            variable; a dim of the model that is called ``diagnostic`` puts ``q_`` before it. Verdict, k-hat and the
            rest are in ``attrs``.
        """
        names = list(self.by_coordinate)
        (dim,) = free_names(self.layout, "diagnostic")
        result = flat_dataset(self.layout, np.stack([self.by_coordinate[n] for n in names]), {dim: names})
        attrs = {
            "reliable": int(self.reliable),
            "verdict": self.verdict.value,
            "reasons": self.reasons,
            "khat": self.khat,
            "gap": self.gap,
        }
        attrs |= {"elbo": self.elbo.value, "elbo_se": self.elbo.se, "effective_sample_size": self.weights.effective}
        return result.assign_attrs(attrs)

    def to_frame(self) -> pd.DataFrame:
        """Return a table with a row for each coordinate, by label."""
        return pd.DataFrame(self.by_coordinate, index=[self.layout.label(i) for i in range(self.layout.n_dim)])

    # --- in words ---

    def __str__(self) -> str:
        """Return the report, wrapped to the width of the terminal."""
        parts = [wrap(self.headline())]
        parts += [wrap(text, f"  {i}. ", "     ") for i, text in enumerate((c.text for c in self.checks.failed), 1)]
        parts += [wrap(cure, "  -> ", "     ") for cure in self.checks.cures]
        if remarks := self.remarks:
            parts += ["", "Also:", *(wrap(text, "  - ", "    ") for text in remarks)]
        pad = max(len(name) for name, _ in self._rows()) + 2
        parts += ["", *(wrap(text, name.ljust(pad), " " * pad) for name, text in self._rows())]
        how = "Change when draws are moved towards the posterior (a lower bound of the error)"
        if self.n_scored:
            how = "Errors, estimated from the gradients of log p at the draws"
        which = f" The worst {_N_ROWS} of {self.layout.n_dim:,} coordinates:" if self.layout.n_dim > _N_ROWS else ""
        return "\n".join([*parts, "", wrap(f"{how}, unconstrained scale.{which}"), self._table().to_string()])

    __repr__ = __str__

    def headline(self) -> str:
        """Return the verdict in a sentence."""
        if n := len(self.reasons):
            return f"Not reliable, for {n} reason{'s'[: n != 1]}:"
        return self.checks.sentence + f" Other modes: {self._search()}." * (self.reliable and not self.thorough)

    def _search(self) -> str:
        if self.has_one_mode:
            return "none, as the log density is concave"
        if self.searched:
            return f"looked for after the fit{', and none found' * self.reliable}"
        compared = self.n_log_p and SYMMETRIES not in self.left_out
        return f"not looked for{', except for those by symmetry' if compared else ''} (thorough=True looks for them)"

    def _rows(self) -> list[tuple[str, str]]:
        """Return what was measured, by name."""
        w, of_weights, of_draws = self.weights, "", ""
        if w.n_draws and not (self.is_pool and w.khat == -np.inf):  # draws of chains have no weights
            limit, verdict = khat_limit(w.n_draws), w.verdict(self.layout.n_dim)
            meaning = f": importance weights {'can' if verdict.helps else "can't"} correct q (limit {limit:.2f})"
            if self.is_pool:
                meaning = " of the weights of the global parameters"
            elif verdict is WeightVerdict.EVEN:
                meaning = ": of no weight, as importance weights are nearly equal"
            lost = f", {w.n_lost:,} of them lost" if w.n_lost else ""
            of_weights = f"{w.khat_text()}{meaning}"
            of_draws = f"{w.n_draws:,} are worth {w.effective:,.0f}{lost}"
        gap = "" if self.is_pool else f", gap {format_gap(self.gap, ' nats')}"
        moved = f"{self.n_moved:,} draws, {self.n_trajectories} trajectories each, acceptance {self.acceptance:.2f}"
        left_out = f"{'; '.join(self.left_out)} (this model is slow to evaluate; diagnose(draws=10_000) includes them)"
        rows = [
            ("Gaussian fit" if self.is_pool else "Fit", f"{self.outcome}{gap}, ELBO {self.elbo}"),
            ("Pareto k-hat", of_weights),
            ("Weighted draws", of_draws),
            ("Moved draws", moved if self.n_moved else ""),
            ("Gradients", f"at {self.n_scored:,} draws" if self.n_scored else ""),
            ("Joint density", self.joint),
            ("Computed", self.computed),
            ("Other modes", "searched for from dispersed starts" if self.thorough else self._search()),
            ("Cost", f"{self.n_gradients:,} gradients, {self.n_log_p:,} log densities"),
            ("Left out", left_out if self.left_out else ""),
        ]
        return [(name, text) for name, text in rows if text]

    def _table(self) -> pd.DataFrame:
        known, columns = self.by_coordinate, {}
        sizes = [np.abs(known[f"{name}_drift"]) / LIMITS[name] for name in ("mean", "sd")]
        worst = np.argsort(-np.nan_to_num(np.fmax(*sizes)), kind="stable")[:_N_ROWS]
        for name in ("mean", "sd"):
            pairs = zip(known[f"{name}_drift"][worst], known[f"{name}_drift_se"][worst], strict=True)
            unit = "%" if name == "sd" else "sd"
            cells = [in_figures(name, *of).removesuffix(f" {unit}") if np.isfinite(of[0]) else "-" for of in pairs]
            columns[f"{name}, {unit}"] = cells
        return pd.DataFrame(columns, index=[self.layout.label(int(i)) for i in worst])


# --- what is wrong with an approximation, in words, with what to do ---

#: Largest dimension for which a mixture of dense components is worth a try.
_MOST_MIXED = 300
#: Blocks from which on local coordinates count as effects of groups; global coordinates beside these at most.
_FEWEST_GROUPS, _MOST_GLOBAL = 3, 30


@dataclass(frozen=True)
class Context:
    """What cures depend on."""

    layout: Layout
    record: FitRecord | None
    #: What is known of the family.
    traits: Traits
    #: Whether effects of groups are independent given global parameters.
    has_groups: bool
    has_hessian: bool
    #: Whether Bambi made its group effects non-centred.
    of_bambi: bool = False
    #: Returns the option ``posterior`` that was left out for its cost, or because a Gaussian was asked for, and is
    #: worth a try; else what goes with any model, with its price, where that was not tried; empty where none is.
    other_posterior: Callable[[], str] = str
    #: Whether effects of groups can be fitted relative to their conditional modes in reasonable time.
    can_be_relative: bool = True

    #: Whether draws are weighted ones of a proposal: those of an exact or a nested posterior.
    is_pool: bool = False
    #: Whether effects of groups are relative to their conditional modes.
    relative: bool = False

    def shape_cure(self) -> str:
        """Return what may help where q has not the shape of the posterior."""
        options = [*filter(None, [self.other_posterior()])]
        if not self.traits.has_all_correlations:
            options.append(f"family={STRUCTURED if self.has_groups else DENSE!r}")
        if self.of_bambi:
            options.append("noncentered=False in bmb.Model")
        if self.has_groups and not self.relative:
            if self.can_be_relative:
                options.append("reparam='rvb2'")
            if not self.of_bambi:
                options.append("another parametrisation (non-centred in place of centred, or the reverse)")
        if self.traits.has_components:
            options.append("more components (n_components)")
        elif self.has_hessian and not self.relative and (self.has_groups or self.layout.n_dim <= _MOST_MIXED):
            options.append(f"family={SEVERAL_MODES!r}")
        if not options:
            options.append("another parametrisation of the model")
        return f"Try {', '.join(options)}, or pm.sample."

    def mode_cure(self) -> str:
        """Return what may help where q misses a mode."""
        others = "pm.sample with several chains"
        if self.traits.has_components:
            return f"Try more components (n_components), a wider start_sigma, or {others}."
        if self.has_hessian and not self.relative:
            others = f"family={SEVERAL_MODES!r}, which can cover a few, or {others}"
        return f"Bar all modes but one by an ordering or a prior, or try {others}."


def context_of(posterior: Posterior) -> Context:
    """Return what cures depend on."""
    record, layout, structure, q = posterior.record, posterior.layout, posterior.structure, posterior.distribution.q
    border = {v for part in structure.parts if part.kind == "global" for v in part.variables}
    # Not those of a chain that is cut, nor of a field.
    blocks = [part for part in structure.parts if part.kind == "blocks" and border.isdisjoint(part.variables)]
    local = sum(len(part.sizes) for part in blocks)
    # Of crossed effects, those of one factor are global: each costs two gradients of every draw. Their scale is a
    # block, which has no mode where all of them are 0, as at a start.
    of_groups = structure.n_global <= _MOST_GLOBAL and all(len(part.sizes) >= _FEWEST_GROUPS for part in blocks)
    family = getattr(q, "kind", None) or name_of(q) if record is None or record.is_pool else record.family
    return Context(
        layout=layout,
        record=record,
        traits=traits_of(family),
        has_groups=local >= _FEWEST_GROUPS and bool(border),
        has_hessian=posterior.density.has_hessian,
        of_bambi=any("|" in v.name and v.name.endswith("_offset") for v in layout.variables),
        other_posterior=functools.cache(lambda: _other_posterior(posterior)),
        can_be_relative=not posterior.density.is_streamed and of_groups,
        is_pool=family in KINDS,
        relative=family == "pushforward" or (record is not None and record.reparam is not None),
    )


def _other_posterior(posterior: Posterior) -> str:
    """Return the option that asks for a posterior worth a try: the likeliest exact, else what goes with any model."""
    density, record, best, option = posterior.density, posterior.record, 0.0, ""
    if record is None or record.is_pool or record.reparam is not None or density.is_streamed:
        return ""
    if not (traits_of(record.family).is_gaussian and record.status.can_be_followed):
        return ""
    for name, kind in KINDS.items():
        planned = None if record.plan is None else record.plan.of(name)
        is_left = not record.of_posterior or record.on_request == name  # not tried, or left out for its seconds
        if kind.is_last and planned is not None and planned.outcome in (Decision.TOO_DEAR, Decision.NOT_NEEDED):
            is_left = True
        if best == 1.0 or (kind.is_last and option) or not is_left:
            continue
        if (found := if_available(kind.possible, density)) is not None and (chance := kind.chance(found)) > best:
            seconds = kind.price(found, density, by_rows=density.n_directions is not None).seconds
            best, option = chance, f"posterior={name!r}" + (f" ({in_words(seconds)})" if kind.is_last else "")
    return option


# --- what was found, in sentences, and what may help: each names variables and a cure ---

#: Nats of a gap that are much for each coordinate, those of a mean that is off by 0.15; in any case.
_GAP_EACH, _GAP_MUCH = 0.01, 0.5
#: How to keep one of several equal modes.
_FIXED = {
    "labels": "Order a vector of these (transform=pm.distributions.transforms.ordered, increasing initval).",
    "sign": "Fix the sign by a positive prior (pm.HalfNormal) of one of these variables, or of one entry of it.",
}


def findings_of(
    context: Context,
    gap: float,
    weights: Weights,
    moved: Moved,
    drift: Drift | None,
    equal: Sequence[EqualModes],
    places: Sequence[OtherMode],
    q: Distribution,
    further: Sequence[Condition] = (),
    seen: str = MOVED,
) -> tuple[Condition, ...]:
    """Return all findings, the serious ones first."""
    modes = [] if context.record is None else [m for m in context.record.modes if not (m.is_equal and equal)]
    if any(p.share > MUCH for p in places):
        context = replace(context, other_posterior=str)  # they would miss the same modes
    found = [
        *of_fit(context, gap),
        *_of_equal_modes(context, equal),
        *of_modes([*modes, *(p for p in places if p.share > MUCH)], q, context.layout, context.mode_cure()),
        *_of_support(context, weights),
        *([] if drift is None or _stuck(moved) else of_drift(context, drift, seen)),
        *([] if _stuck(moved) else further),
        *_of_movement(context, moved, drift),
        *_of_weights(context, weights),
    ]
    return tuple(sorted(found, key=lambda c: c.against is not Against.RELIABLE))


def of_fit(context: Context, gap: float) -> list[Condition]:
    """Return what stands against a fit for how it ended."""
    n_dim, found = context.layout.n_dim, [] if context.record is None else context.record.of_fit
    much = min(_GAP_EACH * n_dim, max(_GAP_MUCH, 0.5 * _GAP_EACH * n_dim))
    said = f"{format_gap(gap)} nats of ELBO are still to be gained in this family, too much for {n_dim:,} dimensions"
    cure = "Continue with approx.refine(n, tol=...) and a smaller tol."
    return found if math.isnan(gap) else [*found, Condition("gap", gap, much, said, cure=cure)]


def _of_support(context: Context, weights: Weights) -> list[Condition]:
    if not weights.n_lost or context.is_pool:  # draws of a proposal may lie anywhere
        return []
    part = weights.n_lost / weights.n_draws
    lost = f"{weights.n_lost:,} of {weights.n_draws:,} draws ({percent(part, '.2g')})"
    said = f"log p or log q is not finite at {lost}"
    cure = "Give the variables their support by a prior or a transform rather than by a Potential or by the data."
    return [Condition("support", part, 0.0, said, Against.RELIABLE if part > MUCH else Against.NOTHING, cure=cure)]


# --- moved draws ---


#: What drifts, and how that is said.
_MEASURES = {
    "mean": "mean",
    "sd": "standard deviation",
    "lower": "lower 89 % limit",
    "upper": "upper 89 % limit",
}


def in_figures(measure: str, value: float, se: float) -> str:
    """Return a shift with its error: of a standard deviation in percent, else in posterior standard deviations."""
    if measure == "sd":
        return f"{percent(value, '+.0f').removesuffix(' %')} ± {percent(se)}"
    return f"{value:+.2f} ± {se:.2f} sd"


def _named(drift: Drift, layout: Layout | None, measure: str, columns: Indices) -> str:
    """Return what stands out, by variable: the first of each with figures, the others by their number."""
    of, estimates, groups = drift.functionals, drift.measures[measure], dict[str, tuple[str, int, list[int]]]()
    for column in columns.tolist():
        if of is not None:
            group, place = of.where(column)
            name, label, size = group.name, group.label(place), group.n_columns
        else:
            assert layout is not None
            variable = next(v for v in layout.variables if v.where.start <= column < v.where.stop)
            name, label, size = variable.name, f"`{layout.label(column)}`", variable.size
        groups.setdefault(name, (label, size, []))[2].append(column)
    names = []
    for label, size, own in list(groups.values())[:N_NAMED]:
        more = f" and {len(own) - 1:,} more of {size:,}" if len(own) > 1 else ""
        figures = in_figures(measure, float(estimates.value[own[0]]), float(estimates.se[own[0]]))
        names.append(f"{label}{more} ({figures})")
    if others := list(groups.values())[N_NAMED:]:
        n_more = sum(len(own) for *_, own in others)
        names.append(f"{n_more:,} more coordinates" if of is None else f"{len(others):,} others")
    return ", ".join(names)


def of_drift(context: Context, drift: Drift, seen: str) -> list[Condition]:
    """Return what is off in coordinates, or in what is computed of draws; ``seen``: what changes it."""
    found = []
    for measure, columns in drift.off().items():
        names = _named(drift, context.layout, measure, columns)
        said = f"{seen} changes the {_MEASURES[measure]} of {names}"
        worst = abs(float(drift.measures[measure].value[columns[0]]))
        found.append(Condition(measure, worst, LIMITS[measure], said, cure=context.shape_cure()))
    return found


def not_moved(moved: Moved) -> bool:
    """Tell whether no draws were moved for want of evaluations."""
    return moved.n_trajectories == 0 and not moved.n_lost


def _stuck(moved: Moved) -> bool:
    return moved.acceptance < LEAST_ACCEPTANCE


def _of_movement(context: Context, moved: Moved, drift: Drift | None) -> list[Condition]:
    """Say where moved draws tell nothing: of weighted draws, which have conditions of their own, that is no reason."""
    if not_moved(moved) or (drift is not None and not _stuck(moved)):
        return []
    if drift is None:
        said = "log p or its gradient is finite at too few draws to move them towards the posterior"
    else:
        said = (
            f"draws can hardly be moved towards the posterior (acceptance {moved.acceptance:.2f}): they are far from "
            "it, or log p has kinks or jumps"
        )
    against = Against.NOTHING if context.is_pool else Against.RELIABLE
    return [
        Condition("acceptance", moved.acceptance, LEAST_ACCEPTANCE, said, against, True, False, context.shape_cure())
    ]


# --- weights ---


def _of_weights(context: Context, weights: Weights) -> list[Condition]:
    """Say that weights are uneven: a reason where they say that q is far from the posterior."""
    verdict = weights.verdict(context.layout.n_dim)
    if verdict.helps or verdict is WeightVerdict.UNKNOWN or context.is_pool:
        return []
    is_far = verdict is WeightVerdict.FAR
    against, cure = (Against.RELIABLE, context.shape_cure()) if is_far else (Against.NOTHING, "")
    said = weights.sentence(context.layout.n_dim).removesuffix(".")
    return [Condition("k-hat", weights.khat, MOST_KHAT, said, against, cure=cure)]


def _of_equal_modes(context: Context, equal: Sequence[EqualModes]) -> list[Condition]:
    """Say what is symmetric where q is not."""
    result = []
    for kind in ("labels", "sign"):
        of_kind = [e for e in equal if e.kind == kind]
        if not of_kind:
            continue
        what, covers_all = ", or ".join(_changed(e) for e in of_kind[:N_NAMED]), of_kind[0].covered == "all"
        number = math.prod(e.number for e in of_kind)
        part = "some" if context.traits.has_components else of_kind[0].covered
        covers, against = f"{part} of {number:,} equal modes", Against.RELIABLE
        others, cure = f"what does not depend on the {kind}, such as predictions, is not affected", _FIXED[kind]
        if covers_all:
            covers, against = "all equal modes", Against.NOTHING
            others = f"means over all of them say little of what depends on the {kind}"
        else:
            cure = f"{cure} {context.mode_cure()}"
        said = f"log p stays the same when {what}: the approximation covers {covers}, and {others}"
        result.append(Condition("equal modes", number, 1, said, against, cure=cure))
    return result


def _changed(equal: EqualModes) -> str:
    """Return what a symmetry does, as a clause."""
    *others, last = (f"`{name}`" for name in equal.names)
    names = f"{', '.join(others)} and {last}" if others else last
    if equal.kind == "labels":
        return f"the labels of {names} are exchanged"
    changes = "change sign together" if others else "changes sign"
    return f"{names} {changes}{' at one label' if equal.by_label else ''}"


def of_joint(context: Context, joint: JointDrift, moments: Drift) -> list[Condition]:
    """Say where log p drifts: of a minority of draws; or of all, or of most, where no coordinate tells as much."""
    cure, n = context.shape_cure(), len(joint.rises)
    by_chance = bdtrc(n - 1, n + joint.n_falls, 0.5)  # that so many rise, were falls as likely
    if n - joint.n_falls > LEAST_FAR * joint.n_draws and by_chance < FAMILY_WISE:
        said = (
            f"some draws are far from the posterior: moving them towards it raises log p by more than "
            f"{joint.far:.0f} nats at {n:,} of {joint.n_draws:,} ({percent(n / joint.n_draws)}; median "
            f"{np.median(joint.rises):,.0f} nats), and lowers it as much at {joint.n_falls:,}"
        )
        return [Condition("draws far away", n, joint.n_falls, said, cure=cure)]
    drift = joint.mean
    said = (
        f"the joint density is off: moving draws towards the posterior changes the mean of log p by {drift} nats "
        f"(limit {joint.limit:.1f}), though no single parameter stands out"
    )
    is_much = abs(drift.value) > max(joint.limit, critical(1) * drift.se)
    is_excused = moments.stands_out or not is_much
    return [Condition("log p", abs(drift.value), joint.limit, said, is_excused=is_excused, cure=cure)]


# --- posterior mass far from where q is, at other modes of log p ---


def other_modes(density: ModelDensity, q: Distribution, elbo: float, rng: np.random.Generator) -> list[OtherMode]:
    """Look for modes once more, from other points; return those outside q, each with its part of the mass of both."""
    search, mean, sd = ModeSearch(density, seed_of(rng), "", "hessians"), q.mean(), q.sd()
    sd = np.where(np.isfinite(sd), sd, 1.0)
    # A Gaussian of a form whose curvatures can be had.
    around = FullState.from_scale(mean, sd) if q.n_dim <= MAX_DENSE_DIM else q.gaussian.with_scale(mean, sd)
    found = search.after(around, elbo, 0, 0, is_sound=True)
    if found is None:
        return []
    density.n_gradients += found.n_gradients
    result = []
    for candidate in (mode.gaussian for mode in found.modes):
        theta = draws_of(candidate, N_DRAWS, rng)
        with np.errstate(invalid="ignore"):
            log_p, log_q = density.logp(theta), q.log_density(theta)
            outside = np.isfinite(log_p) & ~(log_q >= log_p - elbo - LOG_OUTSIDE)
        if outside.mean() >= MOSTLY:
            ratio = log_p[outside] - candidate.log_density(theta[outside])
            result.append(OtherMode(candidate, float(expit(logsumexp(ratio) - np.log(len(theta)) - elbo))))
    return sorted(result, key=lambda mode: -mode.share)


# --- importance weights of draws of q, within a budget of evaluations ---

#: Estimated seconds that a diagnosis may take in any case, and as a part of the fit.
SECONDS, PART = 2.0, 0.5
#: Part of a budget for importance weights.
_OF_WEIGHTS = 0.25
#: Importance weights of fewer draws are not judged within a budget.
FEWEST_WEIGHED = 1_000
#: Part of the gradients for comparing log p with its mirror images; with too few for two of these, there are none.
_OF_SYMMETRIES = 0.05


def _seconds_of(posterior: Posterior) -> float:
    """Return the estimated seconds that a diagnosis may take."""
    record, took = posterior.record, 0.0
    if record is not None:
        took = fit_seconds(posterior.density, record.n_gradients, record.n_hessians, record.estimator)
    return max(SECONDS, PART * took)


@dataclass(frozen=True)
class Budget:
    """What a report may evaluate."""

    #: Draws for importance weights; 0: none.
    n_weights: int
    #: For moved draws, about.
    n_gradients: int
    #: Whether moved draws get less than they do where evaluations are cheap.
    cut: bool = False
    #: The same of importance weights.
    weights_cut: bool = False


def n_own(posterior: Posterior) -> int:
    """Return how many draws belong to the fit: those of a diagnosis, or where it has none, what costs as much."""
    n, (_, of_weight) = budget_of(posterior).n_weights, costs_of(posterior)
    return n or int(np.clip(_seconds_of(posterior) / of_weight, MIN_KHAT_DRAWS, FEWEST_WEIGHED))


def at_most(n: int, least: int, numbers: int, n_dim: int) -> int:
    """Return how many of ``n`` draws there may be at once, in so many numbers; ``least`` in any case."""
    return min(n, max(least, numbers // max(n_dim, 1)))


def own_generator(record: FitRecord | None, stream: int = WEIGHTS) -> np.random.Generator:
    """Return the generator of draws that belong to a fit."""
    return np.random.default_rng([stream, 0 if record is None else record.seed])


def draws_in_chunks(posterior: Posterior, n: int, rng: np.random.Generator) -> Iterator[Array]:
    """Yield draws that are weighed, in chunks: the same ones whenever the generator is in the same state."""
    for chunk in chunks(n, posterior.layout.n_dim):
        yield posterior.distribution.draw(chunk, rng)


def weighed(posterior: Posterior, n: int, rng: np.random.Generator) -> Array:
    """Return log weights of draws, (n,)."""
    q, density = posterior.distribution, posterior.density
    return np.concatenate([q.log_weights(theta, density) for theta in draws_in_chunks(posterior, n, rng)])


def log_ratio_of(posterior: Posterior, draws: int | None, rng: np.random.Generator | None) -> Array:
    """Return log p - log q at draws of q, (n_draws,).

    Without a generator, these belong to the fit: they are as many at least, and evaluated once for a q.
    """
    if (of_pool := posterior.distribution.kept_log_weights()) is not None:
        return of_pool
    if rng is not None:
        return weighed(posterior, N_WEIGHED if draws is None else check_draws(draws), rng)
    n = n_own(posterior) if draws is None else draws
    if posterior.log_ratio is None or len(posterior.log_ratio) < n:
        posterior.log_ratio = weighed(posterior, n, own_generator(posterior.record))
    return posterior.log_ratio


# --- gradients of log p at draws: how fast what is computed of these would drift, if they diffused ---

#: Draws that are moved, and trajectories of each; as many times as many where a diagnosis is thorough. Gradients are
#: looked at, at most, at as many draws as there are trajectories: 4 errors of a limit are then less than what counts.
_MOVED, _TRAJECTORIES = 1_024, 4
#: Time over which the diffusion is followed where what is computed is not linear: its bias is about as large.
_TIME = 1e-3


@dataclass(frozen=True)
class Drifts:
    """Moved draws, and what drifts."""

    moved: Moved
    #: Of coordinates, by gradients at draws where these are looked at, else of moved ones; None where too few could be.
    moments: Drift | None = None
    #: Of what is computed of draws; None where there is nothing, or it would take too long.
    functionals: Drift | None = None
    #: None where too few draws could be moved.
    joint: JointDrift | None = None
    #: Draws at which gradients are looked at.
    n_scored: int = 0

    @property
    def stands_out(self) -> bool:
        """Whether something is off by much."""
        return any(drift is not None and drift.stands_out for drift in (self.moments, self.functionals))

    def confirmed_by(self, moved: "Drifts") -> "Drifts":
        """Return what moved draws do not rule out: where log p jumps, means of gradients are no 0."""
        assert self.moments is not None
        of = None if self.functionals is None else self.functionals.confirmed_by(moved.functionals)
        return replace(self, moved=moved.moved, moments=self.moments.confirmed_by(moved.moments), functionals=of)


def score_drift_of(
    posterior: Posterior, rng: np.random.Generator, n: int, functionals: Functionals | None
) -> Drifts | None:
    r"""Return what gradients at draws say of coordinates, and of what is computed of draws.

    None where they are finite at too few of them.

    Notes
    -----
    Draws of the posterior that diffuse by :math:`\Sigma \nabla \log p` a unit of time, and noise of variance
    :math:`2 \Sigma`, stay draws of the posterior, so that :math:`E[L f] = 0` for all functions of these, L being the
    generator of the diffusion [1]_. It takes one gradient a draw, where moved draws take dozens. Of a coordinate,
    :math:`L f` is known; of others, it is the mean of two small steps with noise of opposite signs.

    References
    ----------
    .. [1] J. Gorham and L. Mackey (2015). Measuring sample quality with Stein's method. NeurIPS.
       https://doi.org/10.48550/arXiv.1506.03039
    """
    q = posterior.distribution
    plan = q.plan(posterior.density)
    n = at_most(n, LEAST_MOVED, AT_ONCE, q.n_dim)
    gaussian, theta = plan.gaussian, plan.draw(q.base(n, rng))
    with np.errstate(all="ignore"):
        step = gaussian.draws(gaussian.whiten(plan.target.logp_grad(theta)[1])) - gaussian.mean()
    finite = np.isfinite(theta).all(axis=1) & np.isfinite(step).all(axis=1)
    theta, step = theta[finite], step[finite]
    if len(theta) < FEWEST:
        return None
    source, sd = q.sources(theta), q.sd()
    spread = np.broadcast_to((gaussian.sd() / sd) ** 2, theta.shape)
    moments = Drift(diffused((theta - q.mean()) / sd, step / sd, spread, source))
    of_moments = Drifts(NOT_MOVED, moments, n_scored=len(theta))
    if functionals is None:
        return of_moments
    n = min(len(theta), functionals.affordable(n * posterior.density.gradient_seconds) // 2)
    if n < FEWEST:
        return of_moments
    noise = np.sqrt(2.0 * _TIME) * (gaussian.draws(rng.standard_normal((n, q.n_dim))) - gaussian.mean())
    ends = (theta[:n] + _TIME * step[:n] + noise, theta[:n] + _TIME * step[:n] - noise)
    try:
        before, *after = (functionals.at(x) for x in (theta[:n], *ends))
    except Exception:  # it may fail at some draws alone
        return of_moments
    before, *after = on_scale_of(before, before, *after)
    rate, noise = (sum(after) - 2.0 * before) / (2.0 * _TIME), 0.5 * (after[0] - after[1])
    spread = noise**2 / (2.0 * _TIME)
    return replace(of_moments, functionals=Drift(diffused(before, rate, spread, source[:n]), functionals))


# --- draws moved towards the posterior, and all that drifts: moments, log p, and what is computed of draws ---


def drifts_of(
    posterior: Posterior,
    rng: np.random.Generator,
    n_trajectories: int,
    budget: Budget,
    functionals: Functionals | None,
) -> Drifts:
    """Return what drifts: by gradients at draws of a pool, or by moved draws.

    Gradients at draws of a Gaussian that has converged have the mean 0, whatever the posterior is.
    """
    q, density, record = posterior.distribution, posterior.density, posterior.record
    scored, left, n_moved = None, budget.n_gradients, at_most(_MOVED, LEAST_MOVED, STREAMED, q.n_dim)
    if record is not None and record.is_pool and left >= FEWEST:
        scored = score_drift_of(posterior, rng, min(_MOVED * _TRAJECTORIES, left), functionals)
    if scored is not None:
        if not scored.stands_out:
            return scored
        # Of many draws that are moved once, chance is known best.
        left, n_trajectories = left - scored.n_scored, 1
        n_moved = at_most(scored.n_scored, LEAST_MOVED, STREAMED, q.n_dim)
    base, plan = q.base(n_moved, rng), q.plan(density)
    moved = move(density, plan, base, rng, n_trajectories=n_trajectories, max_gradients=left)
    by_moves = Drifts(moved)
    if len(moved.end) >= FEWEST:
        columns = (np.concatenate([moved.control, moved.end]) - q.mean()) / q.sd()
        took = moved.n_gradients * density.gradient_seconds
        of = None if functionals is None else functional_drift_of(functionals, moved, took)
        by_moves = Drifts(moved, moved_drift_of(moved, columns), of, joint_drift_of(moved))
    return by_moves if scored is None else scored.confirmed_by(by_moves)


# --- a diagnosis of an approximate posterior, made of its parts: weights, moved draws, and mass elsewhere ---

_NO_BUDGET = "approx.diagnose() has a larger budget, diagnose(draws=10_000) none"


def full_budget(posterior: Posterior, draws: int = N_WEIGHED, *, thorough: bool = False) -> Budget:
    """Return what a diagnosis takes where nothing is dear."""
    has_weights = posterior.distribution.kept_log_weights() is not None
    n_weights = at_most(draws, FEWEST_WEIGHED, HELD, posterior.layout.n_dim)
    n_gradients = MOST_STEPS * _MOVED * (_TRAJECTORIES if thorough else 1)
    return Budget(0 if has_weights else n_weights, n_gradients)


def budget_of(posterior: Posterior) -> Budget:
    """Return as much of a diagnosis as can be had in the seconds for it."""
    (of_gradient, of_weight), wanted = costs_of(posterior), full_budget(posterior)
    seconds = _seconds_of(posterior)
    n_weights = min(wanted.n_weights, int(_OF_WEIGHTS * seconds / of_weight))
    if n_weights < min(FEWEST_WEIGHED, wanted.n_weights):
        n_weights = 0
    n_gradients = min(wanted.n_gradients, int((seconds - n_weights * of_weight) / of_gradient))
    return Budget(n_weights, n_gradients, n_gradients < wanted.n_gradients, n_weights < wanted.n_weights)


def diagnose(
    posterior: Posterior,
    budget: Budget,
    of_weights: np.random.Generator,
    rng: np.random.Generator,
    *,
    is_of_fit: bool = False,
    thorough: bool = False,
) -> Diagnosis:
    """Make a diagnosis; log weights of the draws that belong to the fit are kept."""
    density, record, layout = posterior.density, posterior.record, posterior.layout
    before = density.n_gradients
    equal, n_compared = _equal_modes(posterior, budget)
    if budget.cut:
        budget = replace(budget, n_gradients=max(budget.n_gradients - n_compared, 0))
    of_gradient, of_weight = costs_of(posterior)
    seconds = budget.n_weights * of_weight + budget.n_gradients * of_gradient
    with task("Checking the approximation", seconds=seconds):
        again = copy.deepcopy(of_weights)
        weights, elbo, ratio = _weights_of(posterior, budget, of_weights, is_of_fit=is_of_fit)
        often = _TRAJECTORIES ** (2 if thorough else 1)
        functionals = functionals_of(density, posterior.constrain)
        found = drifts_of(posterior, rng, often, budget, functionals)
    moved, drift = found.moved, found.moments
    some = len(moved.end) + moved.n_lost < at_most(_MOVED, LEAST_MOVED, STREAMED, layout.n_dim)
    fewer = budget.cut and not found.n_scored and (some or moved.n_trajectories < often)
    places = other_modes(density, posterior.distribution, elbo.value, rng) if thorough else []
    gap = float("nan") if record is None or record.is_pool else record.gap
    q, of = posterior.distribution, None if found.functionals is None else found.functionals.functionals
    context, seen = context_of(posterior), SCORED if found.n_scored else MOVED
    # What moved draws and weights show beside moments of coordinates.
    further = [] if found.joint is None or drift is None else of_joint(context, found.joint, drift)
    further += [] if found.functionals is None else of_drift(context, found.functionals, seen)
    if not found.stands_out:
        for shift in _weighted_shifts(posterior, functionals, weights, ratio, again):
            further += of_drift(context, shift, "importance weighting")
    findings = findings_of(context, gap, weights, moved, drift, equal, places, q, further, seen)
    # What a fit knows of a Gaussian by its importance weights needs no other test to be known.
    known = NOT_TESTED if record is None else record.judged
    own = known if context.is_pool or not known.is_tested else NOT_TESTED
    cure = context.shape_cure()
    if record is not None and record.is_nested:
        cure = "Give the hyperparameters more informative priors, fit with another random_seed, or use pm.sample."
    verdict = replace(
        own,
        found=findings,
        open=_open(budget, found) if fewer and own.open and not context.is_pool else "",
        cure=cure if own.failures else "",
        is_tested=True,
        is_same=own.is_same
        or (weights.uneven < SAME and context.traits.is_gaussian and not (context.is_pool or context.relative)),
    )
    return Diagnosis(
        checks=verdict,
        outcome="not made by a fit" if record is None else str(record.status),
        gap=gap,
        elbo=elbo,
        weights=weights,
        by_coordinate=_columns(drift, layout.n_dim),
        log_p_drift=Elbo(np.nan, np.nan) if found.joint is None else found.joint.mean,
        acceptance=moved.acceptance,
        n_moved=len(moved.end),
        n_trajectories=moved.n_trajectories,
        n_scored=found.n_scored,
        thorough=thorough,
        n_gradients=density.n_gradients - before,
        n_log_p=weights.n_draws + n_compared,
        layout=layout,
        is_pool=context.is_pool,
        left_out=_left_out(budget, found, n_compared, fewer=fewer, has_weights=q.kept_log_weights() is not None),
        joint="" if found.joint is None else found.joint.in_words(),
        computed="" if of is None else of.of_elements(),
        searched=record is not None and record.searched,
        has_one_mode=record is not None and record.estimator == "quadrature" and has_one_mode(density),
    )


def standing_diagnosis(posterior: Posterior) -> Diagnosis:
    """Return the diagnosis that belongs to the fit, made with seeds of its own; made once, unless q changes."""
    if posterior.diagnosis is None:
        with few_threads(posterior.density):
            rngs = own_generator(posterior.record), own_generator(posterior.record, WEIGHTS + 1)
            posterior.diagnosis = diagnose(posterior, budget_of(posterior), *rngs, is_of_fit=True)
    return posterior.diagnosis


def requested_diagnosis(
    posterior: Posterior, rng: np.random.Generator, draws: int | None, *, thorough: bool
) -> Diagnosis:
    """Return a diagnosis as `NGVIApproximation.diagnose` takes its arguments; the standing one without any.

    Another one takes its place.
    """
    if draws is not None and check_draws(draws) < MIN_KHAT_DRAWS:
        raise ValueError(f"A diagnosis needs at least {MIN_KHAT_DRAWS} draws; got {draws}. Take 10,000.")
    if posterior.density.has_minibatch:
        return _not_judged(posterior)
    posterior.check_weights()
    if draws is None and not thorough:
        return standing_diagnosis(posterior)
    budget = full_budget(posterior, N_WEIGHED if draws is None else draws, thorough=thorough)
    with few_threads(posterior.density):
        posterior.diagnosis = diagnose(posterior, budget, rng, rng, thorough=thorough)
    return posterior.diagnosis


def _not_judged(posterior: Posterior) -> Diagnosis:
    """Return what is known of a fit to minibatches: how it ended."""
    record, layout, unknown = posterior.record, posterior.layout, Elbo(np.nan, np.nan)
    gap = float("nan") if record is None else record.gap
    return Diagnosis(
        checks=Verdict(
            found=tuple(of_fit(context_of(posterior), gap)),
            open="the model reads pm.Minibatch data, and log p is that of one batch. Load what `save` writes on a "
            "model of all of the data, pymc_ngvi.load(file, model), and ask there",
        ),
        outcome="not made by a fit" if record is None else str(record.status),
        gap=gap,
        elbo=unknown if record is None else record.elbo,
        weights=Weights(np.nan, np.nan, 0, 0),
        by_coordinate=_columns(None, layout.n_dim),
        log_p_drift=unknown,
        acceptance=float("nan"),
        n_moved=0,
        n_trajectories=0,
        thorough=False,
        n_gradients=0,
        n_log_p=0,
        layout=layout,
    )


def _weights_of(
    posterior: Posterior, budget: Budget, rng: np.random.Generator, *, is_of_fit: bool
) -> tuple[Weights, Elbo, Array]:
    """Return weights, the ELBO, and log weights of draws."""
    record, n, own = posterior.record, budget.n_weights, posterior.distribution.kept_log_weights()
    if own is not None or not n:
        weights = Weights(np.nan, np.nan, 0, 0) if own is None else weigh(own)[1]
        return weights, Elbo(np.nan, np.nan) if record is None else record.elbo, np.empty(0)
    ratio = log_ratio_of(posterior, n, None) if is_of_fit else weighed(posterior, n, rng)
    finite = ratio[np.isfinite(ratio)]
    with np.errstate(over="ignore"):  # far draws of a proposal may have next to no density
        value = float(finite.mean()) if len(finite) else -np.inf
        se = float(finite.std(ddof=1) / np.sqrt(len(finite))) if len(finite) > 1 else np.inf
    return weigh(ratio)[1], Elbo(value, se), ratio


def _weighted_shifts(
    posterior: Posterior,
    functionals: Functionals | None,
    weights: Weights,
    ratio: Array,
    rng: np.random.Generator,
) -> Iterator[Drift]:
    """Yield what importance weights say of coordinates and functionals, where they help and are not all but equal.

    The generator is in the state in which it made the draws that were weighed.
    """
    if not len(ratio) or not weights.verdict().helps:
        return
    # No mean moves by more than the root of their relative variance, in standard deviations.
    if weights.n_draws < FEWEST_WEIGHED or weights.uneven < LIMITS["mean"] ** 2:
        return
    took = costs_of(posterior)[1] * len(ratio)
    n = min(N_SHOWN, len(ratio))
    theta, finite = np.concatenate(list(draws_in_chunks(posterior, len(ratio), rng)))[:n], np.isfinite(ratio[:n])
    theta, ratio = theta[finite], ratio[:n][finite]
    yield weighted_shift_of(theta, ratio, None)
    if functionals is not None and functionals.affordable(took) >= n:
        with contextlib.suppress(Exception):  # what a Deterministic raises at single draws is not for this to tell
            yield weighted_shift_of(functionals.at(theta), ratio, functionals)


def _equal_modes(posterior: Posterior, budget: Budget) -> tuple[tuple[EqualModes, ...], int]:
    """Look for symmetries that q does not have; also return how many log densities that took."""
    rng, most = own_generator(posterior.record, WEIGHTS + 2), MOST_EVALUATIONS
    if budget.cut:
        most = int(min(most, _OF_SYMMETRIES * budget.n_gradients))
    if most < 2 * N_COMPARED:
        return (), 0
    q = posterior.distribution
    modes, n_compared = [distribution_of(mode) for mode in getattr(q.q, "in_modes", ())], 0
    for part in modes or [q]:
        theta = part.draw(N_COMPARED, rng)
        found, n = equal_modes(posterior.density, q, theta, posterior.layout, most // max(len(modes), 1))
        n_compared += n
        if found or not modes:
            return tuple(replace(of, covered="some" if modes else "one") for of in found), n_compared
    # The image of each mode is another one: which symmetry that is, one of them tells.
    found, n = equal_modes(posterior.density, modes[0], modes[0].draw(N_COMPARED, rng), posterior.layout, most)
    return tuple(replace(of, covered="all") for of in found), n_compared + n


def _columns(drift: Drift | None, n_dim: int) -> dict[str, Array]:
    result, unknown = dict[str, Array](), Estimates(np.full(n_dim, np.nan), np.full(n_dim, np.nan))
    for measure in ("mean", "sd"):
        known = unknown if drift is None else drift.measures[measure]
        result |= {f"{measure}_drift": known.value, f"{measure}_drift_se": known.se}
    return result


def _left_out(budget: Budget, found: Drifts, n_compared: int, *, fewer: bool, has_weights: bool) -> tuple[str, ...]:
    """Return what a budget does not allow; ``fewer``: whether draws or trajectories were wanted that it has not."""
    moved, none = found.moved, not_moved(found.moved)
    said = {
        "importance weights and their k-hat": not (budget.n_weights or has_weights),
        f"importance weights of more than {budget.n_weights:,} draws": budget.n_weights > 0 and budget.weights_cut,
        SYMMETRIES: not n_compared,
        "moved draws": none and not found.n_scored,
        f"more than {len(moved.end)} moved draws, {moved.n_trajectories} trajectories each": fewer and not none,
    }
    return tuple(text for text, is_left_out in said.items() if is_left_out)


def _open(budget: Budget, found: Drifts) -> str:
    """Return, in a clause, why few evaluations leave the verdict open; empty where they do not."""
    if found.moments is not None and found.moments.is_settled:
        return ""
    if not_moved(found.moved):
        return (
            f"the budget of {budget.n_gradients:,} gradients is too small to move draws towards the "
            f"posterior ({_NO_BUDGET})"
        )
    return (
        f"{len(found.moved.end)} moved draws, all that a budget of {budget.n_gradients:,} gradients allows, do not "
        f"show whether means and standard deviations are right ({_NO_BUDGET})"
    )
