"""A diagnosis of an approximate posterior, made of its parts: weights, moved draws, and mass elsewhere."""

import copy
import functools

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.elbo import Elbo
from pymc_ngvi.core.psis import MIN_KHAT_DRAWS, Weights
from pymc_ngvi.core.sizes import STREAMED, check_draws
from pymc_ngvi.core.types import Array
from pymc_ngvi.density.functionals import Functionals, functionals_of
from pymc_ngvi.density.one_mode import has_one_mode
from pymc_ngvi.fitting.progress import WorkProgress, few_threads
from pymc_ngvi.results.diagnosis.diagnosis import MOVED, SCORED, SYMMETRIES, Diagnosis, Finding, Kept
from pymc_ngvi.results.diagnosis.drifts import (
    Estimates,
    FunctionalDrift,
    JointDrift,
    MomentDrift,
    Moved,
    drift_of,
    first_order_of,
    functional_drift_of,
    joint_drift_of,
    move,
    weighted_shift_of,
)
from pymc_ngvi.results.diagnosis.equal_modes import MOST_EVALUATIONS, N_DRAWS, EqualModes, equal_modes
from pymc_ngvi.results.diagnosis.findings import (
    Context,
    context_of,
    findings_of,
    functional_stands_out,
    is_suspicious,
    joint_stands_out,
    not_moved,
    of_first_order,
    of_fit,
    of_functionals,
    of_joint,
    of_weighted,
    stands_out,
    unsettled,
)
from pymc_ngvi.results.diagnosis.missed_mass import other_modes
from pymc_ngvi.results.diagnosis.weights import (
    DIAGNOSIS,
    DRAWS,
    FEWEST_WEIGHED,
    Budget,
    coordinate_khats,
    first_weighed,
    most_weighed,
    own_coordinates,
    own_generator,
    own_log_ratio,
    weighed,
    weights_and_elbo,
)
from pymc_ngvi.results.posterior import Posterior

# --- gradients of log p at draws: means of their products with draws are known where these are of the posterior ---
# With s the gradient of log p at draws theta of the posterior, :math:`E[s] = 0` and :math:`E[(\theta - m) s^T] = -I`,
# whatever its shape [1]_. So :math:`u = \Sigma s`, with the covariance of a Gaussian near to it, has the mean 0, and
# :math:`E[w^T (\theta - m) \, w^T u] = -w^T \Sigma w` for coordinates, linear predictors and their sums. If both were
# Gaussian, the mean of u would be the distance from the mean of q to that of the posterior, and the other one would
#    tell
# the ratio of their variances. That takes one gradient a draw, where moved draws take dozens.
#
# References
# ----------
# .. [1] J. Gorham and L. Mackey (2015). Measuring sample quality with Stein's method. NeurIPS.
#    https://doi.org/10.48550/arXiv.1506.03039

#: Draws below which nothing is said.
_LEAST = 32
#: Smallest and largest ratio of variances that is told.
_RATIOS = 1e-2, 1e2


@dataclass(frozen=True)
class ScoreDrift:
    """By how much gradients say that draws are off."""

    #: Of coordinates, as moved draws tell it: of skewness and of log p nothing.
    moments: MomentDrift

    n_draws: int
    #: The same of linear predictors and their sum, of limits nothing; None where there are none.
    predictors: FunctionalDrift | None = None

    def in_words(self) -> str:
        """Return what was looked at."""
        predictors = "" if self.predictors is None else f", and with {self.predictors.functionals.of_elements()}"
        return f"at {self.n_draws:,} draws: their means, and products with all coordinates{predictors}"

    def seen_again(self, other: "ScoreDrift") -> "ScoreDrift":
        """Return what this and an independent one have in common."""
        one, two = self.predictors, other.predictors
        predictors = None if one is None or two is None else one.seen_again(two)
        return ScoreDrift(self.moments.seen_again(other.moments), other.n_draws, predictors)


def score_drift_of(
    posterior: Posterior, rng: np.random.Generator, n: int, functionals: Functionals | None
) -> ScoreDrift | None:
    """Return what gradients at ``n`` draws say; None where they are finite at too few of them."""
    q = posterior.distribution
    plan = q.plan(posterior.density)
    theta = plan.draw(q.base(n, rng))
    with np.errstate(all="ignore"):
        grad = plan.target.logp_grad(theta)[1]
        whitened = plan.gaussian.whiten(grad)
        step = plan.gaussian.draws(whitened) - plan.gaussian.mean()
    finite = np.isfinite(theta).all(axis=1) & np.isfinite(step).all(axis=1)
    if finite.sum() < _LEAST:
        return None
    apart, step, sd = theta[finite] - q.mean(), step[finite], q.sd()
    both = _estimates(apart, step, sd, plan.gaussian.sd() ** 2)
    moments, n_draws = MomentDrift(*both, _nothing(len(sd)), Elbo(np.nan, np.nan)), int(finite.sum())
    if functionals is None or functionals.of_predictors is None:
        return ScoreDrift(moments, n_draws)
    matrix = functionals.of_predictors.matrix
    along, variances = apart @ matrix.T, np.sum(plan.gaussian.whiten(matrix) ** 2, axis=1)
    of_columns = _estimates(along, step @ matrix.T, along.std(axis=0), variances)
    nothing = _nothing(len(matrix))
    predictors = FunctionalDrift(functionals.only_predictors(), *of_columns, nothing, nothing, n_draws)
    return ScoreDrift(moments, n_draws, predictors)


def _estimates(apart: Array, step: Array, sd: Array, variance: Array) -> tuple[Estimates, Estimates]:
    """Return drifts of means and of standard deviations, by column.

    Moments of q would take chance from both, as controls, and hide draws that have not these moments.
    """
    ratio = _mean_of(-apart * step / variance)
    # The posterior is narrower than q where products are larger. Tails of these are heavy where a scale may be near 0:
    # a drift is as many of its errors away from 0 as the mean of products is from 1, and no more.
    value = np.clip(ratio.value, *_RATIOS) ** -0.5 - 1.0
    beyond = np.abs(ratio.value - 1.0)
    se = ratio.se * np.where(beyond > 0.0, np.abs(value) / np.where(beyond > 0.0, beyond, 1.0), 0.5)
    return _mean_of(step / sd), Estimates(value, se)


def _mean_of(values: Array) -> Estimates:
    return Estimates(values.mean(axis=0), values.std(axis=0, ddof=1) / np.sqrt(len(values)))


def _nothing(n: int) -> Estimates:
    return Estimates(np.full(n, np.nan), np.full(n, np.nan))


# --- draws moved towards the posterior, and all that drifts: moments, log p, and what is computed of draws ---

#: Draws that are moved, at least.
_FEWEST_MOVED = 48
#: Moved draws below which nothing is said of their moments.
_LEAST_MOVED = 32
#: How many times as many draws are moved where the first ask for more.
_AGAIN = 3
#: Draws that are moved where a posterior's own checks speak for it, and trajectories of each.
FEW_MOVED, FEW_TRAJECTORIES = 64, 2
#: Gradients at other draws, then, and fewest of these.
_SCORED, _FEWEST_SCORED = 512, 64
#: Part of a budget that is too small for all of these that such gradients take.
_OF_SCORES = 0.4


@dataclass(frozen=True)
class Drifts:
    """Moved draws, and what drifts."""

    moved: Moved
    #: By gradients at other draws where these are looked at, else of moved ones; None where too few could be moved.
    moments: MomentDrift | None = None
    #: None where too few draws could be moved.
    joint: JointDrift | None = None
    #: Of what moved draws are to tell; None where there are none, or they would take too long.
    functionals: FunctionalDrift | None = None
    #: What gradients at other draws say.
    scores: ScoreDrift | None = None

    def asks_for_more(self, is_nested: bool) -> bool:
        """Tell whether other moved draws may tell what is error from what is chance.

        Where gradients at many draws were looked at as well, that takes more than a suspicion. A nested posterior
        without them is Gaussian given its hyperparameters, and has no check of its own of what is computed of draws:
        there, a suspicion is enough.
        """
        moments, joint, functionals, scores = self.moments, self.joint, self.functionals, self.scores
        if moments is not None and stands_out(moments):
            return True
        # Of few draws, errors are known roughly: nothing is said before it was seen of more.
        if functionals is not None and functional_stands_out(functionals):
            return True
        if self.predictors is not None and functional_stands_out(self.predictors):
            return True
        if moments is None or joint is None:
            return False
        if joint_stands_out(joint, moments):
            return True
        of_functionals = is_nested and functionals is not None and is_suspicious(functionals)
        return scores is None and (of_functionals or joint.is_suspicious)

    @property
    def predictors(self) -> FunctionalDrift | None:
        """Linear predictors by gradients, where these are looked at."""
        return None if self.scores is None else self.scores.predictors

    def seen_again(self, other: "Drifts") -> "Drifts":
        """Return, of moments, what this and an independent one have in common; of all else, what both show together.

        Where gradients were looked at, a posterior's own checks speak for it, and all has to be seen twice: errors of
        few draws are known roughly, and of products with gradients as well.
        """
        if self.moments is None or other.moments is None:
            return other
        joint, functionals, scores = other.joint, other.functionals, other.scores
        if self.joint is not None and joint is not None:
            joint = self.joint.with_others(joint)
        if self.scores is not None and scores is not None:
            scores = self.scores.seen_again(scores)
        if self.functionals is not None and functionals is not None:
            both = self.functionals.with_others if scores is None else self.functionals.seen_again
            functionals = both(functionals)
        return Drifts(other.moved, self.moments.seen_again(other.moments), joint, functionals, scores)


def most_moved(n_dim: int, n_draws: int) -> int:
    """Return how many of some draws can be moved at once."""
    return min(n_draws, max(_FEWEST_MOVED, STREAMED // max(n_dim, 1)))


def drifts_of(
    posterior: Posterior,
    rng: np.random.Generator,
    n_draws: int,
    n_trajectories: int,
    budget: Budget,
    functionals: Functionals | None,
    advance: Callable[[float], None],
) -> Drifts:
    """Move draws and return what drifts.

    Notes
    -----
    Of a pool, thousands of coordinates err by chance: what other checks speak against has to be seen twice, in the same
    coordinates. What is computed of draws, and log p, are judged by both sets of draws together, of which the second is
    larger: no importance weights tell what is wrong with these.

    Where the own checks of a pool speak for it, few draws are moved first, and gradients at more of them looked at.
    """
    first = (FEW_MOVED, FEW_TRAJECTORIES) if budget.scored else (n_draws, n_trajectories)
    found = _once(posterior, rng, *first, budget, functionals, advance)
    record = posterior.record
    if record is not None and record.is_pool and found.asks_for_more(record.is_nested):
        if not budget.cut:
            factor = 1 if budget.scored else _AGAIN
            n_draws, budget = factor * n_draws, replace(budget, n_gradients=factor * budget.n_gradients)
        found = found.seen_again(_once(posterior, rng, n_draws, n_trajectories, budget, functionals, lambda _: None))
    return found


def most_scored(budget: Budget) -> int:
    """Return at how many draws a budget has gradients evaluated, beside those of moved draws: 0 for too few."""
    if not budget.scored:
        return 0
    n = min(_SCORED, max(int(_OF_SCORES * budget.n_gradients), min(_FEWEST_SCORED, budget.n_gradients)))
    return n if n >= _FEWEST_SCORED else 0


def _once(
    posterior: Posterior,
    rng: np.random.Generator,
    n_draws: int,
    n_trajectories: int,
    budget: Budget,
    functionals: Functionals | None,
    advance: Callable[[float], None],
) -> Drifts:
    q, density = posterior.distribution, posterior.density
    scores, n_scored = None, most_scored(budget)
    if n_scored and (scores := score_drift_of(posterior, rng, n_scored, functionals)) is not None:
        functionals = None if functionals is None else functionals.without_predictors()
    advance(n_scored)
    base, plan = q.base(most_moved(q.n_dim, n_draws), rng), q.plan(density)
    moved = move(
        density, plan, base, rng, n_trajectories=n_trajectories, max_gradients=budget.n_gradients - n_scored,
        strict=budget.cut, advance=advance,
    )  # fmt: skip
    if len(moved.end) < _LEAST_MOVED:
        return Drifts(moved, None if scores is None else scores.moments, scores=scores)
    took = moved.n_gradients * density.gradient_seconds
    moments = drift_of(moved, q.mean(), q.sd(), _log_q(posterior, moved))
    return Drifts(
        moved,
        moments if scores is None else replace(scores.moments, log_p=moments.log_p),
        joint_drift_of(moved),
        None if functionals is None else functional_drift_of(functionals, moved.control, moved.end, took),
        scores,
    )


def _log_q(posterior: Posterior, moved: Moved) -> tuple[Array, Array] | None:
    """Return log q at starts and at controls; None where it is not known."""
    q = posterior.distribution
    start, control = q.log_density(moved.start), q.log_density(moved.control)
    return None if start is None or control is None else (start, control)


# --- a diagnosis of an approximate posterior, made of its parts: weights, moved draws, and mass elsewhere ---

#: Draws that are moved, trajectories of each, and gradients of all, about: by default, and thorough.
_QUICK, _THOROUGH = (256, 4, 6_000), (512, 16, 40_000)
#: Coordinates that get a k-hat of their own, at most: each takes two milliseconds.
_MOST_KHATS = 200
#: Weighed draws of which functionals are computed, at most, and what they should be worth; relative variance of weights
#: that can't move these by as much as counts: no mean moves by more than its root, in standard deviations.
_MOST_COMPUTED, _WORTH, _EQUAL = 2_000, 500, 0.02
#: Values of hyperparameters at which functionals are compared with what Gaussians miss.
_N_VALUES = 64
#: Number of the random stream behind the draws at which symmetries are looked for.
_SYMMETRY_STREAM = 3_000_002
#: Number of the random stream behind the draws of the standing diagnosis that are moved.
_MOVES_STREAM = 3_000_001
_NO_BUDGET = "diagnose(draws=10_000) has no budget."
_IN_PART = (
    "the model reads pm.Minibatch data, and log p is that of one batch. Load what `save` writes on a model of all of "
    "the data, pymc_ngvi.load(file, model), and ask there."
)
#: Importance weights of draws that belong to the fit: of a number of draws, telling how many are done.
OwnRatio = Callable[[int, Callable[[float], None]], Array]


def full_budget(posterior: Posterior, draws: int = DRAWS, *, thorough: bool = False) -> Budget:
    """Return what a diagnosis takes where nothing is dear."""
    gradients = (_THOROUGH if thorough else _QUICK)[2]
    if posterior.distribution.kept_log_weights() is not None:
        return Budget(0, 0, gradients)
    return Budget(most_weighed(posterior, draws), min(_MOST_KHATS, posterior.layout.n_dim), gradients)


def budget_of(posterior: Posterior, share: tuple[float, float]) -> Budget:
    """Return as much of a quick diagnosis as a share allows."""
    costs = posterior.distribution.costs(posterior.density, posterior.record)
    budget = Budget.of(share, costs, posterior.record, full_budget(posterior))
    return replace(budget, scored=posterior.distribution.is_checked)


def diagnose(
    posterior: Posterior,
    budget: Budget,
    of_weights: np.random.Generator | OwnRatio,
    rng: np.random.Generator,
    *,
    thorough: bool = False,
) -> Diagnosis:
    """Make a diagnosis."""
    density, record, layout = posterior.density, posterior.record, posterior.layout
    before = density.n_gradients
    equal, n_compared = _equal_modes(posterior, budget)
    if budget.cut:
        budget = replace(budget, n_gradients=max(budget.n_gradients - n_compared, 0))
    with WorkProgress("Judging q", budget.n_weights + budget.n_gradients) as progress:
        again = copy.deepcopy(of_weights) if isinstance(of_weights, np.random.Generator) else None
        weights, elbo, khats, ratio = _weights_of(posterior, budget, of_weights, progress)
        how = (*(_THOROUGH if thorough else _QUICK)[:2], budget)
        functionals = functionals_of(density, posterior.constrain)
        found = drifts_of(posterior, rng, *how, functionals, progress.advance)
    moved, drift = found.moved, found.moments
    most, often = (FEW_MOVED, FEW_TRAJECTORIES) if budget.scored else _QUICK[:2]
    some = len(moved.end) + moved.n_lost < most_moved(layout.n_dim, most)
    fewer = budget.cut and (some or moved.n_trajectories < often)
    n_gradients = density.n_gradients - before
    places = other_modes(density, posterior.distribution, elbo.value, rng) if thorough else []
    gap = float("nan") if record is None or record.is_pool else record.gap
    q = posterior.distribution
    context = context_of(posterior)
    further = [
        *_of_drifts(context, found),
        *_of_weighted(posterior, functionals, weights, ratio, again),
        *_of_first_order(posterior, functionals),
    ]
    findings = findings_of(
        context,
        gap,
        weights,
        moved,
        drift,
        equal,
        places,
        q,
        further,
        MOVED if found.scores is None else SCORED,
    )
    return Diagnosis(
        findings=findings,
        outcome="not made by a fit" if record is None else str(record.status),
        gap=gap,
        elbo=elbo,
        weights=weights,
        by_coordinate={**_columns(drift, layout.n_dim), "khat": khats},
        log_p_drift=Elbo(np.nan, np.nan) if drift is None else drift.log_p,
        acceptance=moved.acceptance,
        n_moved=len(moved.end),
        n_trajectories=moved.n_trajectories,
        scored="" if found.scores is None else found.scores.in_words(),
        thorough=thorough,
        n_gradients=density.n_gradients - before if thorough else n_gradients,
        n_log_p=weights.n_draws + n_compared,
        layout=layout,
        posterior=record.posterior if record is not None and record.is_pool else "",
        left_out=_left_out(budget, moved, often if fewer else 0, n_compared > 0, q.kept_log_weights() is not None),
        open=_open(budget, moved, drift, found.scores)
        if fewer and not (record is not None and record.is_nested)
        else "",
        joint="" if found.joint is None else found.joint.in_words(),
        computed="" if found.functionals is None else found.functionals.functionals.in_words(),
        searched=record is not None and record.searched,
        has_one_mode=record is not None and record.estimator == "quadrature" and has_one_mode(density),
    )


def standing_diagnosis(posterior: Posterior, kept: Kept, share: tuple[float, float]) -> Diagnosis:
    """Return the diagnosis that belongs to the fit, made with seeds of its own; made once, unless q changes."""
    if kept.diagnosis is None or (kept.diagnosis.left_out and kept.share < share):
        with few_threads(posterior.density):
            budget, rng = budget_of(posterior, share), own_generator(posterior.record, _MOVES_STREAM)
            ratio = functools.partial(own_log_ratio, posterior, kept)
            kept.diagnosis, kept.share = diagnose(posterior, budget, ratio, rng), share
    return kept.diagnosis


def requested_diagnosis(
    posterior: Posterior, kept: Kept, rng: np.random.Generator | None, draws: int | None, *, thorough: bool
) -> Diagnosis:
    """Return a diagnosis as `NGVIApproximation.diagnose` takes its arguments; without ``rng``, the standing one.

    A thorough one is kept as that of the fit.
    """
    if draws is not None and check_draws(draws) < MIN_KHAT_DRAWS:
        raise ValueError(f"A diagnosis needs at least {MIN_KHAT_DRAWS} draws; got {draws}. Take 10,000.")
    if posterior.density.has_minibatch:
        return _not_judged(posterior)
    posterior.check_weights()
    if rng is None:
        return standing_diagnosis(posterior, kept, DIAGNOSIS)
    if thorough or draws is not None:
        budget = full_budget(posterior, DRAWS if draws is None else draws, thorough=thorough)
    else:
        budget = budget_of(posterior, DIAGNOSIS)
    with few_threads(posterior.density):
        found = diagnose(posterior, budget, rng, rng, thorough=thorough)
    if thorough:
        kept.diagnosis, kept.share = found, DIAGNOSIS
    return found


def _not_judged(posterior: Posterior) -> Diagnosis:
    """Return what is known of a fit to minibatches: how it ended."""
    record, layout, unknown = posterior.record, posterior.layout, Elbo(np.nan, np.nan)
    none = np.full(layout.n_dim, np.nan)
    gap = float("nan") if record is None else record.gap
    return Diagnosis(
        findings=tuple(of_fit(context_of(posterior), gap)),
        outcome="not made by a fit" if record is None else str(record.status),
        gap=gap,
        elbo=unknown if record is None else record.elbo,
        weights=Weights(np.nan, np.nan, 0, 0),
        by_coordinate={**_columns(None, layout.n_dim), "khat": none},
        log_p_drift=unknown,
        acceptance=float("nan"),
        n_moved=0,
        n_trajectories=0,
        thorough=False,
        n_gradients=0,
        n_log_p=0,
        layout=layout,
        open=_IN_PART,
    )


def _weights_of(
    posterior: Posterior, budget: Budget, of_weights: np.random.Generator | OwnRatio, progress: WorkProgress
) -> tuple[Weights, Elbo, Array, Array | None]:
    """Return importance weights, the ELBO, k-hats by coordinate, NaN where there are none, and log weights of draws."""
    record, n = posterior.record, budget.n_weights
    khats = np.full(posterior.layout.n_dim, np.nan)
    if (kept := posterior.distribution.kept_log_weights()) is not None:
        return weights_and_elbo(kept)[0], Elbo(np.nan, np.nan) if record is None else record.elbo, khats, None
    if not n:
        elbo = Elbo(np.nan, np.nan) if record is None else record.elbo
        return Weights(np.nan, np.nan, 0, 0), elbo, khats, None
    index = _shown_first(posterior, budget.n_khats)
    if isinstance(of_weights, np.random.Generator):
        ratio, of_draws = weighed(posterior, n, of_weights, index, progress.advance)
    else:
        ratio = of_weights(n, progress.advance)
        of_draws = own_coordinates(posterior, len(ratio), index) if len(index) else np.empty((len(ratio), 0))
    finite = np.isfinite(ratio)
    if finite.sum() >= MIN_KHAT_DRAWS:
        mean, sd = posterior.distribution.mean()[index], posterior.distribution.sd()[index]
        khats[index] = coordinate_khats(ratio[finite], (of_draws[finite] - mean) / sd)
    return *weights_and_elbo(ratio), khats, ratio


def _shown_first(posterior: Posterior, n_most: int) -> NDArray[np.intp]:
    """Return the coordinates whose k-hats are computed: all, or global ones first."""
    n_dim = posterior.layout.n_dim
    if n_dim <= n_most:
        return np.arange(n_dim)
    border = posterior.structure.border
    return np.concatenate([border, np.setdiff1d(np.arange(n_dim), border)])[:n_most]


def _of_drifts(context: Context, found: Drifts) -> list[Finding]:
    """Return what moved draws show beside moments of coordinates."""
    result = [] if found.predictors is None else of_functionals(context, found.predictors, SCORED)
    if found.joint is not None and found.moments is not None:
        result += of_joint(context, found.joint, found.moments)
    return result + ([] if found.functionals is None else of_functionals(context, found.functionals))


def _of_first_order(posterior: Posterior, functionals: Functionals | None) -> list[Finding]:
    """Return what an approximate nested posterior has off."""
    found = None if functionals is None else posterior.distribution.draws_with_ratio(_N_VALUES)
    if functionals is None or found is None:
        return []
    try:
        return of_first_order(functionals, first_order_of(functionals, *found))
    except Exception:  # what a Deterministic raises at single draws is not for a diagnosis to tell
        return []


def _of_weighted(
    posterior: Posterior,
    functionals: Functionals | None,
    weights: Weights,
    ratio: Array | None,
    rng: np.random.Generator | None,
) -> list[Finding]:
    """Return what importance weights say of functionals, where they can be used and are not all but equal."""
    if functionals is None or ratio is None or not weights.verdict(posterior.layout.n_dim).helps:
        return []
    if weights.n_draws < FEWEST_WEIGHED or weights.n_draws < (1.0 + _EQUAL) * weights.effective:
        return []
    took = posterior.distribution.costs(posterior.density, posterior.record).weight * len(ratio)
    wanted = min(_MOST_COMPUTED, int(_WORTH * weights.n_draws / max(weights.effective, 1.0)))
    n = min(max(wanted, FEWEST_WEIGHED), len(ratio), functionals.affordable(took))
    if n < FEWEST_WEIGHED:
        return []
    theta = first_weighed(posterior, len(ratio), n, rng)
    if posterior.distribution.log_density(theta[:1]) is None:
        return []  # these are draws of a proposal, and not of q
    finite = np.isfinite(ratio[:n])
    try:
        return of_weighted(weighted_shift_of(functionals, theta[finite], ratio[:n][finite]))
    except Exception:  # what a Deterministic raises at single draws is not for a diagnosis to tell
        return []


def _equal_modes(posterior: Posterior, budget: Budget) -> tuple[tuple[EqualModes, ...], int]:
    """Look for symmetries that q does not have; also return how many log densities that took."""
    most, rng = budget.compared(MOST_EVALUATIONS), own_generator(posterior.record, _SYMMETRY_STREAM)
    if not most:
        return (), 0
    q = posterior.distribution
    modes, n_compared = q.in_modes(), 0
    for part in modes or [q]:
        theta = part.draw(N_DRAWS, rng)
        found, n = equal_modes(posterior.density, q, theta, posterior.layout, most // max(len(modes), 1))
        n_compared += n
        if found or not modes:
            return tuple(replace(of, covered="some" if modes else "one") for of in found), n_compared
    # The image of each mode is another one: which symmetry that is, one of them tells.
    found, n = equal_modes(posterior.density, modes[0], modes[0].draw(N_DRAWS, rng), posterior.layout, most)
    return tuple(replace(of, covered="all") for of in found), n_compared + n


def _columns(drift: MomentDrift | None, n_dim: int) -> dict[str, Array]:
    names = {"mean_drift": "mean", "sd_drift": "sd", "skewness_drift": "skewness"}
    result = {}
    for name, of in names.items():
        estimates = None if drift is None else getattr(drift, of)
        result[name] = np.full(n_dim, np.nan) if estimates is None else estimates.value
        result[f"{name}_se"] = np.full(n_dim, np.nan) if estimates is None else estimates.se
    return result


def _left_out(budget: Budget, moved: Moved, often: int, compared: bool, has_weights: bool) -> tuple[str, ...]:
    """Return what a budget does not allow; ``often``: trajectories that were wanted, 0 where all draws were moved."""
    result = []
    if budget.n_weights == 0 and not has_weights:
        result.append("importance weights and their k-hat")
    elif budget.weights_cut:
        result.append(f"importance weights of more than {budget.n_weights:,} draws")
    if not compared:
        result.append(SYMMETRIES)
    if not_moved(moved):
        result.append("moved draws" + ", which tell of log p and of Deterministics" * budget.scored)
    elif often:
        times = f", {moved.n_trajectories} trajectories each" if moved.n_trajectories < often else ""
        result.append(f"more than {len(moved.end)} moved draws{times}")
    return tuple(result)


def _open(budget: Budget, moved: Moved, drift: MomentDrift | None, scores: ScoreDrift | None) -> str:
    """Return why few evaluations leave the verdict open; empty where they do not.

    Where the own checks of a posterior speak for it, it is enough that gradients at draws do not speak against it.
    """
    if scores is not None or not unsettled(moved, drift):
        return ""
    if not_moved(moved):
        return (
            f"too few evaluations within the budget, {budget.n_gradients:,} gradients, to move draws of q towards the "
            f"posterior. {_NO_BUDGET}"
        )
    return (
        f"{len(moved.end)} moved draws, all that the budget of {budget.n_gradients:,} gradients allows, do not tell "
        f"whether means and standard deviations are right. {_NO_BUDGET}"
    )
