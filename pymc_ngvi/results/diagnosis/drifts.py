"""How draws of q drift as they are moved towards the posterior: moments, the joint density, functionals."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from numpy.typing import NDArray
from scipy.special import ndtri, softmax
from scipy.stats import binom, chi2, rankdata

from pymc_ngvi.core.elbo import Elbo
from pymc_ngvi.core.psis import smoothed
from pymc_ngvi.core.types import Array, GaussianState
from pymc_ngvi.density import ModelDensity
from pymc_ngvi.density.constrain import Functionals
from pymc_ngvi.moves.chains import ChainCoordinates, PhasePoints, phase_points_at, trajectory
from pymc_ngvi.results.distributions import MovePlan

#: A quarter of a period in whitened coordinates, and by how much, as a part, trajectories differ from it.
_QUARTER, _JITTER = 0.5 * np.pi, 0.2
#: Acceptance that is aimed at, and below which nothing is said of the moved draws.
AIM, LEAST_ACCEPTANCE = 0.8, 0.3
#: First step size times the fourth root of the dimension; largest and smallest one; steps of a trajectory at most.
_FIRST, _LARGEST, _SMALLEST, _MOST_STEPS = 1.2, 0.9, 1e-3, 24
#: Draws on which a step size is tried, how often, and its factor from one trial to the next.
_N_PILOT, _TRIALS, _FACTOR = 32, 8, 1.6
#: Draws that are moved, at least.
_LEAST_MOVED = 48
#: The same where gradients are few, and trajectories then.
_LEAST_WITHIN, _FEWEST_TRAJECTORIES = 32, 2


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


def move(
    density: ModelDensity,
    plan: MovePlan,
    base: Array,
    rng: np.random.Generator,
    *,
    n_trajectories: int,
    max_gradients: int | None = None,
    strict: bool = False,
    advance: Callable[[float], None] = lambda _: None,
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
    step = min(_FIRST * n_dim**-0.25, _LARGEST)
    if strict and max_gradients is not None:
        n_trajectories, n_draws = _within(max_gradients, step, n_trajectories, len(base))
        if not n_draws:
            none = np.empty((0, n_dim))
            return Moved(none, none, none, np.empty(0), float("nan"), 0, 0, 0)
        base = base[:n_draws]
    x = plan.draw(base)
    x = x[np.isfinite(x).all(axis=1)]
    points = phase_points_at(plan.target, ChainCoordinates.of(plan.gaussian), x)
    n_lost = len(base) - int(points.finite.sum())
    start = points = points.at(np.flatnonzero(points.finite))
    acceptance = np.zeros(n_trajectories)
    if len(start.x):
        step = _tried_step(plan, points, step, rng)
        n_draws = len(start.x)
        if max_gradients is not None:
            n_steps = (n_trajectories + 1) * min(np.ceil(_QUARTER / step), _MOST_STEPS)
            n_draws = int(np.clip(max_gradients // n_steps, min(_LEAST_MOVED, n_draws), n_draws))
        if strict and max_gradients is not None:
            n_draws = min(n_draws, _within(max_gradients, step, n_trajectories, n_draws, tried=True)[1])
        start = points = points.at(np.arange(n_draws))
        advance(len(x) + _N_PILOT)
    control = start.x
    for t in range(n_trajectories if len(start.x) else 0):
        # A draw that is refused in the end loses its control: the last trajectory takes smaller steps.
        n_steps, size = _steps(step if t < n_trajectories - 1 else 0.5 * step, rng)
        momenta = rng.standard_normal(points.x.shape)
        if plan.coupled:
            control = _turned(plan.gaussian, control, momenta, n_steps, size)
        points, acceptance[t] = _trajectory(plan, points, momenta, n_steps, size, rng)
        advance(len(points.x) * n_steps)
        if acceptance[t] < AIM - 0.15:
            step = max(step / _FACTOR, _SMALLEST)
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
    n_steps = min(np.ceil(_QUARTER / step), _MOST_STEPS)
    for n in (n_trajectories,) if tried else (n_trajectories, min(n_trajectories, _FEWEST_TRAJECTORIES)):
        # A draw takes its start, trajectories, and a last one in smaller steps; the pilot half a trajectory.
        affordable = int((max_gradients - (0 if tried else 0.5 * _N_PILOT * n_steps)) // ((n + 1) * n_steps + 1))
        if affordable >= _LEAST_WITHIN:
            return n, min(n_draws, affordable)
    return n_trajectories, 0


def _steps(step: float, rng: np.random.Generator) -> tuple[int, float]:
    """Return the number of steps of a quarter of a period, as near as that may be, and their size, both jittered."""
    length = _QUARTER * (1.0 + _JITTER * (2.0 * rng.random() - 1.0))
    n_steps = int(np.clip(np.ceil(length / step), 1, _MOST_STEPS))
    return n_steps, min(step, length / n_steps)


def _tried_step(plan: MovePlan, points: PhasePoints, step: float, rng: np.random.Generator) -> float:
    """Return the first step size in a falling sequence that has the acceptance aimed at, on some of the draws."""
    pilot = points.at(np.arange(min(_N_PILOT, len(points.x))))
    for _ in range(_TRIALS):
        n_steps, size = _steps(step, rng)
        # Half of a trajectory tells as much about its energy.
        _, accepted = _trajectory(plan, pilot, rng.standard_normal(pilot.x.shape), -(-n_steps // 2), size, rng)
        if accepted >= AIM:
            break
        step = max(step / _FACTOR, _SMALLEST)
    return step


def _trajectory(
    plan: MovePlan, points: PhasePoints, momenta: Array, n_steps: int, size: float, rng: np.random.Generator
) -> tuple[PhasePoints, float]:
    """Return where the draws are after one leapfrog trajectory each, and the mean probability of acceptance."""
    points, probability, _ = trajectory(
        plan.target, ChainCoordinates.of(plan.gaussian), points, momenta, n_steps, size, rng
    )
    return points, float(probability.mean())


def _turned(gaussian: GaussianState, control: Array, momenta: Array, n_steps: int, size: float) -> Array:
    """Turn draws of a Gaussian by the angle that the same leapfrog steps turn those of a standard normal."""
    angle = n_steps * float(np.arccos(1.0 - 0.5 * min(size, 1.9) ** 2))
    centre = gaussian.mean()
    return centre + np.cos(angle) * (control - centre) + np.sin(angle) * (gaussian.draws(momenta) - centre)


#: Probability of a false alarm among all moments of a kind together.
FAMILY_WISE = 0.01


@dataclass(frozen=True)
class Estimates:
    """Estimates of one quantity for each coordinate."""

    #: With Monte Carlo standard errors; shape (n_dim,).
    value: Array
    se: Array

    def beyond(self, size: float, certain: float = 0.0) -> NDArray[np.intp]:
        """Return the coordinates whose value stands out, the largest first."""
        value = np.abs(self.value)
        found = np.flatnonzero((value - certain * self.se > size) & (value > critical(len(value)) * self.se))
        return found[np.argsort(-np.abs(self.value[found]))]

    def seen_again(self, other: "Estimates") -> "Estimates":
        """Return, of each coordinate, the estimate that stands out less; 0 where the two differ in sign."""
        less = np.abs(self.value) * other.se <= np.abs(other.value) * self.se
        value, se = np.where(less, self.value, other.value), np.where(less, self.se, other.se)
        return Estimates(np.where(self.value * other.value <= 0.0, 0.0, value), se)

    def with_others(self, other: "Estimates", part: float) -> "Estimates":
        """Return the mean of two estimates, of which this one has a part of the weight."""
        value = part * self.value + (1.0 - part) * other.value
        return Estimates(value, np.hypot(part * self.se, (1.0 - part) * other.se))


def critical(n: int) -> float:
    """Return the standard errors that none of ``n`` estimates of 0 exceeds, but for a probability of `FAMILY_WISE`."""
    return float(-ndtri(0.5 * FAMILY_WISE / max(n, 1)))


#: Drifts from which on q is not reliable, by measure, and those that are worth a remark: of coordinates, and of what is
#: computed of draws, by ranks, which show less than all of a large change.
_MEAN, _SLIGHT_MEAN = 0.3, 0.15
SERIOUS = {"mean": _MEAN, "sd": 0.2, "skewness": 1.5}
SLIGHT = {"mean": _SLIGHT_MEAN, "sd": 0.12, "skewness": 0.5}
COMPUTED = {"mean": _MEAN, "sd": 0.15, "lower": _MEAN, "upper": _MEAN}
COMPUTED_SLIGHT = {"mean": _SLIGHT_MEAN, "sd": 0.1, "lower": _SLIGHT_MEAN, "upper": _SLIGHT_MEAN}
#: Standard errors from which on a drift that counts is worth moving other draws for.
_SUSPICIOUS = 1.5


@dataclass(frozen=True)
class Drift:
    """By how much draws are off: in coordinates, or in what is computed of them."""

    #: "mean", in standard deviations of q; "sd", relative to that of q; of coordinates "skewness", beside that of q; of
    #: functionals "lower" and "upper", limits of 89 % intervals, all by ranks.
    measures: dict[str, Estimates]
    n_draws: int
    #: What is computed; None for coordinates.
    functionals: Functionals | None = None

    def beyond(self, measure: str, size: float, certain: float) -> NDArray[np.intp]:
        """Return the columns that stand out, the most certain first: among what is whole, and among single elements.

        There are few of the first, so that less has to be allowed for chance.
        """
        of = self.measures[measure]
        whole = np.zeros(len(of.value), dtype=bool) if self.functionals is None else self.functionals.is_whole
        kinds = [np.flatnonzero(kind) for kind in (whole, ~whole)]
        return np.concatenate([kind[Estimates(of.value[kind], of.se[kind]).beyond(size, certain)] for kind in kinds])

    def off(self, sizes: Mapping[str, float], certain: float) -> dict[str, NDArray[np.intp]]:
        """Return the columns that drift by more than a size, by measure, where there are any."""
        found = {name: self.beyond(name, size, certain) for name, size in sizes.items() if name in self.measures}
        return {name: columns for name, columns in found.items() if len(columns)}

    @property
    def limits(self) -> dict[str, float]:
        """Drifts from which on q is not reliable, by measure."""
        return SERIOUS if self.functionals is None else COMPUTED

    @property
    def stands_out(self) -> bool:
        """Whether something is off by much, and by a standard error more."""
        return bool(self.off(self.limits, 1.0))

    @property
    def is_settled(self) -> bool:
        """Whether no drift counts, certain or not, and each is known to within half of what counts."""
        known = ((of, self.limits[name]) for name, of in self.measures.items())
        return all(np.all((np.abs(of.value) < size) & (2.0 * of.se < size)) for of, size in known)

    @property
    def is_suspicious(self) -> bool:
        """Whether more draws may show that something whole is off, which these are too few to be certain of."""
        whole = False if self.functionals is None else self.functionals.is_whole
        known = ((of, self.limits[name]) for name, of in self.measures.items())
        return any(np.any(whole & (np.abs(of.value) > np.maximum(size, _SUSPICIOUS * of.se))) for of, size in known)

    def seen_again(self, other: "Drift") -> "Drift":
        """Return what this drift and an independent one have in common."""
        measures = {name: of.seen_again(other.measures[name]) for name, of in self.measures.items()}
        return Drift(measures, other.n_draws, self.functionals)

    def with_others(self, other: "Drift") -> "Drift":
        """Return what two sets of moved draws show together."""
        n = self.n_draws + other.n_draws
        measures = {name: of.with_others(other.measures[name], self.n_draws / n) for name, of in self.measures.items()}
        return Drift(measures, n, self.functionals)


def drift_of(moved: Moved, mean: Array, sd: Array) -> Drift:
    """Return the drift of the coordinates of moved draws."""
    x, control = (moved.end - mean) / sd, (moved.control - mean) / sd
    location = _controlled(x, control)
    square = _controlled((x - location.value) ** 2, control**2 - 1.0)
    scale = np.sqrt(np.maximum(square.value, 1e-12))
    (of_x, by_x), (of_control, by_control) = _influence(x), _influence(control)
    measures = {
        "mean": location,
        "sd": Estimates(scale - 1.0, square.se / (2.0 * scale)),
        "skewness": Estimates(of_x - of_control, _standard_error(by_x - by_control)),
    }
    return Drift(measures, len(x))


def _controlled(values: Array, control: Array) -> Estimates:
    """Return means over draws, less what draws of a control, whose mean is 0, say of their error.

    Where the control is further from 0 than its standard errors tell, it has missed what is rare but counts, such as a
    far mode with little mass; so may the others have, and the error is at least as large.
    """
    rest = values - _slope(values, control) * control
    se, own, own_se = _standard_error(rest), np.abs(control.mean(axis=0)), _standard_error(control)
    se = np.where(own > critical(len(own)) * own_se, np.maximum(se, own), se)
    return Estimates(rest.mean(axis=0), se)


def _standard_error(values: Array) -> Array:
    return values.std(axis=0, ddof=1) / np.sqrt(len(values))


def _slope(values: Array, control: Array) -> Array:
    """Return the coefficients of a regression on a control, between 0 and 1, by column."""
    apart = control - control.mean(axis=0)
    variance = np.sum(apart**2, axis=0)
    result: Array = np.sum(apart * (values - values.mean(axis=0)), axis=0) / np.where(variance > 0.0, variance, 1.0)
    return np.clip(result, 0.0, 1.0)


def _influence(x: Array) -> tuple[Array, Array]:
    """Return the skewness of each column and what each draw adds to it."""
    sd = x.std(axis=0)
    u = (x - x.mean(axis=0)) / np.where(sd > 0.0, sd, 1.0)
    square = u * u
    cube = square * u
    skewness = np.mean(cube, axis=0)
    return skewness, cube - skewness - 3.0 * u - 1.5 * skewness * (square - 1.0)


#: Part of the changes that a trimmed mean leaves out at either end.
_TRIMMED = 0.2
#: Probability that a draw of a Gaussian posterior lies so far below the median of log p as counts as far.
_RARE = 1e-4
#: Part of the draws that have to be far, beyond those that go the other way, to count; and draws that are worth moving
#: others for, where they are too few to be certain.
_LEAST_FAR, _FEWEST_FAR = 0.02, 2
#: Drift of most draws that counts, in standard deviations of log p, and standard errors that it has to exceed.
_MUCH, _CERTAIN = 0.5, 3.0


@dataclass(frozen=True)
class JointDrift:
    """How far log p drifts as draws are moved: of most draws, and of a minority that is far from the posterior.

    Along trajectories that leave the posterior as it is, log p of its draws rises as often as it falls, and as far,
    whatever its tails are. Of a Gaussian posterior in d dimensions, log p is a constant less half of a chi-square: its
    standard deviation is sqrt(d / 2), that of a change sqrt(d). A mean of changes is no test where a few of them are
    huge: these make its standard error as large. So most draws are judged by a trimmed mean, and the others are
    counted.
    """

    #: Their mean, by which E[log p] drifts, in nats, with its standard error; and their trimmed mean.
    mean: Elbo
    location: Elbo
    #: Nats about that, beyond which a change counts as far: what one draw of a Gaussian posterior in 10,000 is below
    #: the median of log p.
    far: float
    #: Changes that are far above it; shape (n_rises,).
    rises: Array
    #: Changes that are far below it, and all of them.
    n_falls: int
    n_draws: int
    n_dim: int

    def is_much(self, drift: Elbo) -> bool:
        """Tell whether a drift counts: by the standard deviation of log p, and by its own error."""
        return bool(abs(drift.value) > max(_MUCH * np.sqrt(0.5 * self.n_dim), _CERTAIN * drift.se))

    @property
    def _excess(self) -> int:
        return len(self.rises) - self.n_falls

    @property
    def has_minority(self) -> bool:
        """Whether log p rises far at a part of the draws that counts, more often than it would fall by chance."""
        n = len(self.rises) + self.n_falls
        return self._excess > _LEAST_FAR * self.n_draws and float(binom.sf(len(self.rises) - 1, n, 0.5)) < FAMILY_WISE

    @property
    def stands_out(self) -> bool:
        """Whether log p drifts by much."""
        return self.has_minority or self.is_much(self.mean) or self.is_much(self.location)

    @property
    def is_suspicious(self) -> bool:
        """Whether more draws may show a minority that these are too few to be certain of."""
        return not self.has_minority and self._excess >= max(_FEWEST_FAR, 0.5 * _LEAST_FAR * self.n_draws)

    def in_words(self) -> str:
        """Return what was measured."""
        return (
            f"log p of most draws drifts by {self.location} nats; it rises by more than {self.far:.0f} at "
            f"{len(self.rises):,}, and falls as far at {self.n_falls:,} of {self.n_draws:,}"
        )

    def with_others(self, other: "JointDrift") -> "JointDrift":
        """Return what two sets of moved draws show together."""
        n = self.n_draws + other.n_draws
        mine, others = self.n_draws / n, other.n_draws / n
        value = mine * self.location.value + others * other.location.value
        se = float(np.hypot(mine * self.location.se, others * other.location.se))
        return JointDrift(
            mean=other.mean,
            location=Elbo(value, se),
            far=self.far,
            rises=np.concatenate([self.rises, other.rises]),
            n_falls=self.n_falls + other.n_falls,
            n_draws=n,
            n_dim=self.n_dim,
        )


def joint_drift_of(moved: Moved, log_q: tuple[Array, Array] | None = None) -> JointDrift:
    """Return the changes of log p of moved draws; of their mean, less what log q at starts and controls explains."""
    change, n_dim, n_draws = moved.change, moved.start.shape[1], len(moved.start)
    rest = change
    if log_q is not None:
        rest = change - _slope(change, log_q[1] - log_q[0]) * (log_q[1] - log_q[0])
    mean = Elbo(float(rest.mean()), float(_standard_error(rest)) if n_draws > 1 else np.inf)
    location = trimmed_mean(change)
    far = 0.5 * float(chi2.isf(_RARE, n_dim) - chi2.median(n_dim))
    apart = change - location.value
    return JointDrift(mean, location, far, change[apart > far], int(np.sum(apart < -far)), n_draws, n_dim)


def trimmed_mean(values: Array) -> Elbo:
    """Return the mean without the fifths at both ends, with its standard error, by the winsorised variance.

    References
    ----------
    .. [1] K. K. Yuen (1974). The two-sample trimmed t for unequal population variances. Biometrika 61.
       https://doi.org/10.1093/biomet/61.1.165
    """
    ordered, n = np.sort(values), len(values)
    cut = int(_TRIMMED * n)
    kept = ordered[cut : n - cut]
    if len(kept) < 2:
        return Elbo(float(np.mean(values)) if n else np.nan, np.inf)
    winsorised = np.clip(ordered, kept[0], kept[-1])
    return Elbo(float(kept.mean()), float(winsorised.std(ddof=1) / ((1.0 - 2.0 * cut / n) * np.sqrt(n))))


#: Standard deviation of normal scores below which a quantity counts as constant.
_CONSTANT = 1e-3


def normal_scores(values: Array) -> Array:
    """Two samples of a quantity compared by ranks: what has heavy tails is compared as well as what has none.

    Values of both samples are replaced by normal scores, the quantiles of a standard normal at their ranks among all.
    These are the same for any increasing function of the quantity, such as its logarithm, and their moments exist.
    """
    with np.errstate(invalid="ignore"):
        ranks = rankdata(values, axis=0)
        result: Array = ndtri((ranks - 0.5) / len(values))
    return result


def rank_drift(before: Array, after: Array) -> tuple[Estimates, Estimates]:
    """Return by how much mean and standard deviation of normal scores change."""
    n = len(before)
    scores = normal_scores(np.concatenate([before, after]))
    old, new = scores[:n], scores[n:]
    old_mean, new_mean, old_sd, new_sd = old.mean(axis=0), new.mean(axis=0), old.std(axis=0), new.std(axis=0)
    usable = (old_sd > _CONSTANT) & (new_sd > _CONSTANT)  # False for NaN
    with np.errstate(invalid="ignore", divide="ignore"):
        shift = (new_mean - old_mean) / old_sd
        shift_se = (new - old).std(axis=0, ddof=1) / old_sd / np.sqrt(n)
        squares = ((new - new_mean) / new_sd) ** 2 - ((old - old_mean) / old_sd) ** 2
        growth = relative(np.log(new_sd / old_sd), 0.5 * squares.std(axis=0, ddof=1) / np.sqrt(n))
    return where_usable(usable, Estimates(shift, shift_se)), where_usable(usable, growth)


def limit_drift(before: Array, after: Array, level: float) -> Estimates:
    """Return by how much a quantile changes, in normal scores of the draws before.

    Its error is such that chance is judged by a sign test: of the outermost of all draws, as many should come from
    before as from after. Quantiles of few draws have longer tails.
    """
    n = len(before)
    at = np.sort(after, axis=0)[min(int(level * n), n - 1)]
    n_outer = max(int(2 * n * min(level, 1.0 - level)), 1)
    order = np.argsort(np.concatenate([before, after]), axis=0)
    outer = order[-n_outer:] if level > 0.5 else order[:n_outer]
    with np.errstate(invalid="ignore"):
        below = (np.sum(before <= at, axis=0) + 0.5) / (n + 1)
        varied = ~np.isnan(before + after).any(axis=0) & (np.sum(before == at, axis=0) <= 1)
    value = ndtri(below) - ndtri(level)
    certain = 2.0 * np.abs(np.sum(outer >= n, axis=0) - 0.5 * n_outer) / np.sqrt(n_outer)
    density = np.exp(-0.5 * ndtri(level) ** 2) / np.sqrt(2.0 * np.pi)
    least = np.sqrt(2.0 * level * (1.0 - level) / n) / density
    return where_usable(varied, Estimates(value, np.maximum(np.abs(value) / np.maximum(certain, 0.1), 0.5 * least)))


def relative(log_ratio: Array, se: Array) -> Estimates:
    """Return a ratio less 1 from its logarithm, as many standard errors from 0."""
    growth = np.expm1(log_ratio)
    with np.errstate(invalid="ignore", divide="ignore"):
        return Estimates(growth, se * np.where(log_ratio == 0.0, 1.0, growth / log_ratio))


def where_usable(usable: NDArray[np.bool_], estimates: Estimates) -> Estimates:
    """Return estimates, 0 with an error of 1 where they are of no use."""
    return Estimates(np.where(usable, estimates.value, 0.0), np.where(usable, estimates.se, 1.0))


#: Draws on each side below which nothing is compared.
_LEAST_DRAWS = 32
#: Probability below the lower limit, and above the upper one, of 89 % intervals.
TAIL = 0.055


def functional_drift_of(functionals: Functionals, before: Array, after: Array, seconds: float) -> Drift | None:
    """Return the drift of functionals from draws of q to moved ones."""
    n = min(len(before), functionals.affordable(seconds) // 2)
    if n < _LEAST_DRAWS:
        return None
    try:
        values = functionals.at(before[:n]), functionals.at(after[:n])
    except Exception:  # as above: it may fail at some draws alone
        return None
    mean, sd = rank_drift(*values)
    lower, upper = (limit_drift(*values, level) for level in (TAIL, 1.0 - TAIL))
    return Drift({"mean": mean, "sd": sd, "lower": lower, "upper": upper}, n, functionals)


#: Part of the values that has to differ from the next one.
_DIFFERENT = 0.9


def weighted_shift_of(functionals: Functionals, theta: Array, log_ratio: Array) -> Drift:
    """Return by how much importance weights move what is computed of draws: where q is no Gaussian's image of it.

    Quantities are compared as normal scores of the draws of q, as moved draws are. Both sides are the same draws, so
    that the error of a difference is that of the weights alone.
    """
    values = functionals.at(theta)
    order = np.argsort(values, axis=0)
    ordered = np.take_along_axis(values, order, axis=0)  # NaN is last
    with np.errstate(invalid="ignore"):
        different = np.mean(np.diff(ordered, axis=0) > 0.0, axis=0)
    usable = ~np.isnan(ordered[-1]) & (different > _DIFFERENT)
    scores = ndtri((np.arange(len(values)) + 0.5) / len(values))[:, None]
    weights = softmax(smoothed(log_ratio)[0])[order]  # of each column, in the order of its values: of equal scores
    mean, sd = _moments(scores, weights)
    lower, upper = (_limit(scores, weights, level) for level in (TAIL, 1.0 - TAIL))
    parts = {"mean": mean, "sd": sd, "lower": lower, "upper": upper}
    return Drift({name: where_usable(usable, of) for name, of in parts.items()}, len(values), functionals)


def _moments(scores: Array, weights: Array) -> tuple[Estimates, Estimates]:
    """Return mean and relative standard deviation."""
    apart, before = weights - 1.0 / len(weights), scores.std()
    mean = np.sum(weights * scores, axis=0)
    squares = (scores - mean) ** 2
    variance = np.sum(weights * squares, axis=0)
    shift = Estimates(mean / before, np.sqrt(np.sum(apart**2 * squares, axis=0)) / before)
    error = 0.5 * np.sqrt(np.sum((apart * (squares / variance - 1.0)) ** 2, axis=0))
    return shift, relative(0.5 * np.log(variance) - np.log(before), error)


def _limit(scores: Array, weights: Array, level: float) -> Estimates:
    """Return by how much a quantile is off; its error takes the density of a normal of the same moments."""
    below = np.cumsum(weights, axis=0) >= level
    found = scores[np.argmax(below, axis=0), 0]
    error = np.sqrt(np.sum(((weights - 1.0 / len(weights)) * ((scores <= found) - level)) ** 2, axis=0))
    mean = np.sum(weights * scores, axis=0)
    sd = np.sqrt(np.sum(weights * (scores - mean) ** 2, axis=0))
    density = np.exp(-0.5 * ((found - mean) / sd) ** 2) / (np.sqrt(2.0 * np.pi) * sd)
    return Estimates(found - ndtri(level), error / density)
