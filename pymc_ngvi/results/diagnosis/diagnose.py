"""A diagnosis of an approximate posterior, made of its parts: weights, moved draws, and mass elsewhere."""

import contextlib
import copy
import logging

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from scipy.special import expit

from pymc_ngvi.core.draws import chunks, draws_of
from pymc_ngvi.core.linalg import logsumexp
from pymc_ngvi.core.psis import MIN_KHAT_DRAWS, Weights, weigh
from pymc_ngvi.core.sizes import HELD, MAX_DENSE_DIM, N_SHOWN, N_WEIGHED, STREAMED, WEIGHTS, check_draws, seed_of
from pymc_ngvi.core.status import Elbo
from pymc_ngvi.core.types import Array
from pymc_ngvi.core.verdict import NOT_TESTED, Verdict
from pymc_ngvi.density import ModelDensity
from pymc_ngvi.density.constrain import Functionals, functionals_of
from pymc_ngvi.density.one_mode import has_one_mode
from pymc_ngvi.families import FullState
from pymc_ngvi.fitting.modes.search import ModeSearch
from pymc_ngvi.fitting.progress import announced, few_threads
from pymc_ngvi.fitting.record import LOG_OUTSIDE, MOSTLY, N_DRAWS, FitRecord, OtherMode
from pymc_ngvi.results.diagnosis.diagnosis import (
    MOVED,
    SCORED,
    SYMMETRIES,
    WEIGHTED,
    Diagnosis,
    Kept,
    context_of,
    findings_of,
    not_moved,
    of_drift,
    of_fit,
    of_joint,
)
from pymc_ngvi.results.diagnosis.drifts import (
    FEWEST,
    LEAST_MOVED,
    MOST_EVALUATIONS,
    N_COMPARED,
    Drift,
    EqualModes,
    Estimates,
    JointDrift,
    Moved,
    drift_of,
    equal_modes,
    functional_drift_of,
    joint_drift_of,
    move,
    weighted_shift_of,
)
from pymc_ngvi.results.distributions import Costs, Distribution, Posterior

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
            log_p, log_q = density.logp(theta), q.rough_log_density(theta)
            outside = np.isfinite(log_p) & ~(log_q >= log_p - elbo - LOG_OUTSIDE)
        if outside.mean() >= MOSTLY:
            ratio = log_p[outside] - candidate.log_density(theta[outside])
            result.append(OtherMode(candidate, float(expit(logsumexp(ratio) - np.log(len(theta)) - elbo))))
    return sorted(result, key=lambda mode: -mode.share)


# --- importance weights of draws of q, within a budget of evaluations ---

#: Estimated seconds that a report may take in any case, and as a part of the fit.
SUMMARY, DIAGNOSIS = (1.2, 0.3), (4.0, 0.7)
#: Part of a budget for importance weights.
_OF_WEIGHTS = 0.25
#: Importance weights of fewer draws are not judged within a budget.
FEWEST_WEIGHED = 1_000
#: Part of the gradients for comparing log p with its mirror images; with too few for two of these, there are none.
_OF_SYMMETRIES = 0.05


def seconds_of(share: tuple[float, float], costs: Costs, record: FitRecord | None) -> float:
    """Return the estimated seconds that a share allows: some in any case, or a part of what the fit took."""
    floor, part = share
    took = 0.0 if record is None else costs.gradient * record.n_gradients + costs.hessian * record.n_hessians
    return max(floor, part * took)


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
    #: Whether gradients at draws are looked at, and few draws are moved: where a posterior has checks of its own, and
    #: these speak for it.
    scored: bool = False

    def compared(self, wanted: int) -> int:
        """Return how many log densities there are for symmetries: as many as wanted where nothing is cut."""
        n = int(min(wanted, _OF_SYMMETRIES * self.n_gradients)) if self.cut else wanted
        return n if n >= 2 * N_COMPARED else 0

    @classmethod
    def of(
        cls,
        share: tuple[float, float],
        costs: Costs,
        record: FitRecord | None,
        wanted: "Budget",
    ) -> "Budget":
        """Return as much of what is wanted as a share allows."""
        seconds = seconds_of(share, costs, record)
        n_weights = min(wanted.n_weights, int(_OF_WEIGHTS * seconds / costs.weight))
        if n_weights < min(FEWEST_WEIGHED, wanted.n_weights):
            n_weights = 0
        n_gradients = min(wanted.n_gradients, int((seconds - n_weights * costs.weight) / costs.gradient))
        return cls(n_weights, n_gradients, n_gradients < wanted.n_gradients, n_weights < wanted.n_weights)


logger = logging.getLogger("pymc.ngvi")


def n_own(posterior: Posterior) -> int:
    """Return how many draws belong to the fit: those of a diagnosis, or where it has none, what costs as much."""
    record, costs = posterior.record, posterior.distribution.costs(posterior.density, posterior.record)
    wanted = Budget(most_weighed(posterior, N_WEIGHED), 0)
    n = Budget.of(DIAGNOSIS, costs, record, wanted).n_weights
    n = n or int(np.clip(seconds_of(DIAGNOSIS, costs, record) / costs.weight, MIN_KHAT_DRAWS, FEWEST_WEIGHED))
    if n < wanted.n_weights:
        logger.info(f"Importance weights of {n:,} draws: evaluations of this model are dear, ask for more by draws=.")
    return n


def most_weighed(posterior: Posterior, draws: int) -> int:
    """Return how many of some draws can be held at once."""
    return min(draws, max(FEWEST_WEIGHED, HELD // max(posterior.layout.n_dim, 1)))


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


def own_log_ratio(posterior: Posterior, kept: Kept, n: int) -> Array:
    """Return log p - log q at ``n`` or more of the draws that belong to the fit, evaluated once for a q."""
    if (of_pool := posterior.distribution.kept_log_weights()) is not None:
        return of_pool
    if kept.log_ratio is None or len(kept.log_ratio) < n:
        kept.log_ratio = weighed(posterior, n, own_generator(posterior.record))
    return kept.log_ratio


def log_ratio_of(posterior: Posterior, kept: Kept, draws: int | None, rng: np.random.Generator | None) -> Array:
    """Return log p - log q at draws of q, (n_draws,): those that belong to the fit where no generator is given."""
    posterior.check_weights()
    if (of_pool := posterior.distribution.kept_log_weights()) is not None:
        return of_pool
    if rng is None:
        return own_log_ratio(posterior, kept, n_own(posterior))
    n = N_WEIGHED if draws is None else check_draws(draws)
    seconds = n * posterior.distribution.costs(posterior.density, posterior.record).weight
    with announced("Importance weights", seconds):
        return weighed(posterior, n, rng)


def weights_and_elbo(log_ratio: Array) -> tuple[Weights, Elbo]:
    """Return what log p - log q at draws says of weights, and the ELBO."""
    finite = np.isfinite(log_ratio)
    n = int(finite.sum())
    with np.errstate(over="ignore"):  # far draws of a proposal may have next to no density
        value = float(log_ratio[finite].mean()) if n else -np.inf
        se = float(log_ratio[finite].std(ddof=1) / np.sqrt(n)) if n > 1 else np.inf
    return weigh(log_ratio)[1], Elbo(value, se)


# --- gradients of log p at draws: means of their products with draws are known where these are of the posterior ---
# With s the gradient of log p at draws theta of the posterior, :math:`E[s] = 0` and :math:`E[(\theta - m) s^T] = -I`,
# whatever its shape [1]_. So :math:`u = \Sigma s`, with the covariance of a Gaussian near to it, has the mean 0, and
# :math:`E[w^T (\theta - m) \, w^T u] = -w^T \Sigma w` for coordinates, linear predictors and their sums. If both were
# Gaussian, the mean of u would be the distance from the mean of q to that of the posterior, and the other one would
# tell the ratio of their variances. That takes one gradient a draw, where moved draws take dozens.
#
# References
# ----------
# .. [1] J. Gorham and L. Mackey (2015). Measuring sample quality with Stein's method. NeurIPS.
#    https://doi.org/10.48550/arXiv.1506.03039

#: Smallest and largest ratio of variances that is told.
_RATIOS = 1e-2, 1e2


def score_drift_of(
    posterior: Posterior, rng: np.random.Generator, n: int, functionals: Functionals | None
) -> tuple[Drift, Drift | None] | None:
    """Return what gradients at ``n`` draws say of coordinates, and of linear predictors where there are some.

    None where they are finite at too few of them.
    """
    q = posterior.distribution
    plan = q.plan(posterior.density)
    theta = plan.draw(q.base(n, rng))
    with np.errstate(all="ignore"):
        step = plan.gaussian.draws(plan.gaussian.whiten(plan.target.logp_grad(theta)[1])) - plan.gaussian.mean()
    finite = np.isfinite(theta).all(axis=1) & np.isfinite(step).all(axis=1)
    n_draws = int(finite.sum())
    if n_draws < FEWEST:
        return None
    apart, step = theta[finite] - q.mean(), step[finite]
    moments = Drift(_estimates(apart, step, q.sd(), plan.gaussian.sd() ** 2), n_draws)
    if functionals is None or functionals.of_predictors is None:
        return moments, None
    matrix = functionals.of_predictors.matrix
    along, variances = apart @ matrix.T, np.sum(plan.gaussian.whiten(matrix) ** 2, axis=1)
    of_columns = _estimates(along, step @ matrix.T, along.std(axis=0), variances)
    return moments, Drift(of_columns, n_draws, functionals.only_predictors())


def _estimates(apart: Array, step: Array, sd: Array, variance: Array) -> dict[str, Estimates]:
    """Return drifts of means and of standard deviations, by column.

    Moments of q would take chance from both, as controls, and hide draws that have not these moments.
    """
    ratio = _mean_of(-apart * step / variance)
    # The posterior is narrower than q where products are larger. Tails of these are heavy where a scale may be near 0:
    # a drift is as many of its errors away from 0 as the mean of products is from 1, and no more.
    value = np.clip(ratio.value, *_RATIOS) ** -0.5 - 1.0
    beyond = np.abs(ratio.value - 1.0)
    se = ratio.se * np.where(beyond > 0.0, np.abs(value) / np.where(beyond > 0.0, beyond, 1.0), 0.5)
    return {"mean": _mean_of(step / sd), "sd": Estimates(value, se)}


def _mean_of(values: Array) -> Estimates:
    return Estimates(values.mean(axis=0), values.std(axis=0, ddof=1) / np.sqrt(len(values)))


# --- draws moved towards the posterior, and all that drifts: moments, log p, and what is computed of draws ---

#: How many times as many draws are moved where the first ask for more.
_AGAIN = 3
#: Draws that are moved where a posterior's own checks speak for it, and trajectories of each.
FEW_MOVED, FEW_TRAJECTORIES = 64, 2
#: Gradients at other draws, then; at least as many as draws are moved.
_SCORED = 512
#: Part of a budget that is too small for all of these that such gradients take.
_OF_SCORES = 0.4


@dataclass(frozen=True)
class Drifts:
    """Moved draws, and what drifts."""

    moved: Moved
    #: By gradients at other draws where these are looked at, else of moved ones; None where too few could be moved.
    moments: Drift | None = None
    #: Of moved draws, also where gradients are looked at.
    by_moves: Drift | None = None
    #: None where too few draws could be moved.
    joint: JointDrift | None = None
    #: Of what moved draws are to tell; None where there are none, or they would take too long.
    functionals: Drift | None = None
    #: Linear predictors, by gradients, where these are looked at; and at how many draws they are.
    predictors: Drift | None = None
    n_scored: int = 0

    @property
    def computed(self) -> str:
        """What of functionals was compared, in words."""
        of = None if self.functionals is None else self.functionals.functionals
        return "" if of is None else of.in_words()

    @property
    def scored(self) -> str:
        """Where gradients were looked at, in words; empty for nowhere."""
        if not self.n_scored:
            return ""
        of = None if self.predictors is None else self.predictors.functionals
        predictors = "" if of is None else f", and with {of.of_elements()}"
        return f"at {self.n_scored:,} draws: their means, and products with all coordinates{predictors}"

    @property
    def stands_out(self) -> bool:
        """Whether something is off by much: of few draws, errors are known roughly, and others may tell more."""
        known = (self.moments, self.functionals, self.predictors, self.joint)
        return any(drift is not None and drift.stands_out for drift in known)

    def seen_again(self, other: "Drifts") -> "Drifts":
        """Return, of coordinates and predictors, what this and an independent one have in common; else the other one.

        There are thousands of the former, and errors of few draws are known roughly.
        """
        if self.moments is None or other.moments is None:
            return other
        predictors, by_moves = other.predictors, None
        if other.n_scored and self.by_moves is not None and other.by_moves is not None:
            by_moves = self.by_moves.seen_again(other.by_moves, None)
        moments = self.moments.seen_again(other.moments, by_moves)
        if by_moves is not None and self.moments.stands_out and not moments.stands_out:
            predictors = None  # moved draws rule out what gradients tell
        elif self.predictors is not None and predictors is not None:
            predictors = self.predictors.seen_again(predictors, None)
        return replace(other, moments=moments, predictors=predictors)


def most_moved(n_dim: int, n_draws: int) -> int:
    """Return how many of some draws can be moved at once."""
    return min(n_draws, max(LEAST_MOVED, STREAMED // max(n_dim, 1)))


def drifts_of(
    posterior: Posterior,
    rng: np.random.Generator,
    n_draws: int,
    n_trajectories: int,
    budget: Budget,
    functionals: Functionals | None,
) -> Drifts:
    """Move draws and return what drifts.

    Notes
    -----
    Of a pool, thousands of coordinates err by chance: what other checks speak against has to be seen twice, in the same
    coordinates. What is computed of draws, and log p, are judged by the second set of draws, which is larger: no
    importance weights tell what is wrong with these.

    Where the own checks of a pool speak for it, few draws are moved first, and gradients at more of them looked at.
    """
    first = (FEW_MOVED, FEW_TRAJECTORIES) if budget.scored else (n_draws, n_trajectories)
    found = _once(posterior, rng, *first, budget, functionals)
    record = posterior.record
    if record is not None and record.is_pool and found.stands_out:
        if not budget.cut:
            factor = 1 if budget.scored else _AGAIN
            n_draws, budget = factor * n_draws, replace(budget, n_gradients=factor * budget.n_gradients)
        found = found.seen_again(_once(posterior, rng, n_draws, n_trajectories, budget, functionals))
    return found


def _once(
    posterior: Posterior,
    rng: np.random.Generator,
    n_draws: int,
    n_trajectories: int,
    budget: Budget,
    functionals: Functionals | None,
) -> Drifts:
    q, density, n_scored = posterior.distribution, posterior.density, 0
    if budget.scored:
        n = min(_SCORED, max(int(_OF_SCORES * budget.n_gradients), min(FEW_MOVED, budget.n_gradients)))
        n_scored = n if n >= FEW_MOVED else 0
    scores = score_drift_of(posterior, rng, n_scored, functionals) if n_scored else None
    if scores is not None and functionals is not None:
        functionals = functionals.without_predictors()
    base, plan = q.base(most_moved(q.n_dim, n_draws), rng), q.plan(density)
    left = budget.n_gradients - n_scored
    moved = move(density, plan, base, rng, n_trajectories=n_trajectories, max_gradients=left)
    found = Drifts(moved)
    if scores is not None:
        found = Drifts(moved, scores[0], predictors=scores[1], n_scored=scores[0].n_draws)
    if len(moved.end) < FEWEST:
        return found
    took = moved.n_gradients * density.gradient_seconds
    start, control = q.log_density(moved.start), q.log_density(moved.control)
    by_moves = drift_of(moved, q.mean(), q.sd())
    return replace(
        found,
        moments=found.moments or by_moves,
        by_moves=by_moves,
        joint=joint_drift_of(moved, None if start is None or control is None else (start, control)),
        functionals=None if functionals is None else functional_drift_of(functionals, moved.control, moved.end, took),
    )


# --- a diagnosis of an approximate posterior, made of its parts: weights, moved draws, and mass elsewhere ---

#: Draws that are moved, trajectories of each, and gradients of all, about: of a pool, which has conditions of its own;
#: of others, where 256 see a standard deviation that is 14 % off in half of the seeds; and thorough.
_OF_POOL, _QUICK, _THOROUGH = (256, 4, 6_000), (1_024, 4, 24_000), (1_024, 16, 80_000)
#: What weighed draws of which functionals are computed should be worth; relative variance of weights that can't move
#: these by as much as counts: no mean moves by more than its root, in standard deviations.
_WORTH, _EQUAL = 500, 0.02
_NO_BUDGET = "approx.diagnose() has more, diagnose(draws=10_000) no budget"
_IN_PART = (
    "the model reads pm.Minibatch data, and log p is that of one batch. Load what `save` writes on a model of all of "
    "the data, pymc_ngvi.load(file, model), and ask there"
)


def full_budget(posterior: Posterior, draws: int = N_WEIGHED, *, thorough: bool = False) -> Budget:
    """Return what a diagnosis takes where nothing is dear."""
    has_weights = posterior.distribution.kept_log_weights() is not None
    return Budget(0 if has_weights else most_weighed(posterior, draws), _moves(posterior, thorough=thorough)[2])


def _moves(posterior: Posterior, *, thorough: bool) -> tuple[int, int, int]:
    is_pool = posterior.record is not None and posterior.record.is_pool
    return _THOROUGH if thorough else _OF_POOL if is_pool else _QUICK


def budget_of(posterior: Posterior, share: tuple[float, float]) -> Budget:
    """Return as much of a quick diagnosis as a share allows."""
    costs = posterior.distribution.costs(posterior.density, posterior.record)
    budget = Budget.of(share, costs, posterior.record, full_budget(posterior))
    return replace(budget, scored=posterior.distribution.is_checked)


def diagnose(
    posterior: Posterior,
    budget: Budget,
    of_weights: np.random.Generator,
    rng: np.random.Generator,
    *,
    kept: Kept | None = None,
    thorough: bool = False,
) -> Diagnosis:
    """Make a diagnosis; log weights of the draws that belong to the fit are kept."""
    density, record, layout = posterior.density, posterior.record, posterior.layout
    before = density.n_gradients
    equal, n_compared = _equal_modes(posterior, budget)
    if budget.cut:
        budget = replace(budget, n_gradients=max(budget.n_gradients - n_compared, 0))
    costs = posterior.distribution.costs(density, record)
    with announced("Judging q", budget.n_weights * costs.weight + budget.n_gradients * costs.gradient):
        again = copy.deepcopy(of_weights)
        weights, elbo, ratio = _weights_of(posterior, budget, of_weights, kept)
        how = (*_moves(posterior, thorough=thorough)[:2], budget)
        functionals = functionals_of(density, posterior.constrain)
        found = drifts_of(posterior, rng, *how, functionals)
    moved, drift = found.moved, found.moments
    most, often = (FEW_MOVED, FEW_TRAJECTORIES) if budget.scored else _OF_POOL[:2]
    some = len(moved.end) + moved.n_lost < most_moved(layout.n_dim, most)
    fewer = budget.cut and (some or moved.n_trajectories < often)
    places = other_modes(density, posterior.distribution, elbo.value, rng) if thorough else []
    gap = float("nan") if record is None or record.is_pool else record.gap
    q = posterior.distribution
    context, seen = context_of(posterior), SCORED if found.n_scored else MOVED
    # What moved draws and weights show beside moments of coordinates.
    further = [] if found.predictors is None else of_drift(context, found.predictors, SCORED)
    if found.joint is not None and drift is not None:
        further += of_joint(context, found.joint, drift)
    further += [] if found.functionals is None else of_drift(context, found.functionals, MOVED)
    if not any(of is not None and of.stands_out for of in (drift, found.predictors, found.functionals)):
        for shift in _weighted_shifts(posterior, functionals, weights, ratio, again):
            further += of_drift(context, shift, WEIGHTED)
    findings = findings_of(context, gap, weights, moved, drift, equal, places, q, further, seen)
    own = NOT_TESTED if record is None or not record.is_pool else record.judged
    verdict = replace(
        own,
        found=findings,
        open=_open(budget, found) if fewer and not context.is_pool else "",
        cure=context.pool_cure() if own.failures else "",
        is_tested=True,
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
        scored=found.scored,
        thorough=thorough,
        n_gradients=density.n_gradients - before,
        n_log_p=weights.n_draws + n_compared,
        layout=layout,
        is_pool=context.is_pool,
        left_out=_left_out(budget, moved, often if fewer else 0, n_compared > 0, q.kept_log_weights() is not None),
        joint="" if found.joint is None else found.joint.in_words(),
        computed=found.computed,
        searched=record is not None and record.searched,
        has_one_mode=record is not None and record.estimator == "quadrature" and has_one_mode(density),
    )


def standing_diagnosis(posterior: Posterior, kept: Kept, share: tuple[float, float]) -> Diagnosis:
    """Return the diagnosis that belongs to the fit, made with seeds of its own; made once, unless q changes."""
    if kept.diagnosis is None or (kept.diagnosis.checks.open and share == DIAGNOSIS):
        with few_threads(posterior.density):
            rngs = own_generator(posterior.record), own_generator(posterior.record, WEIGHTS + 1)
            kept.diagnosis = diagnose(posterior, budget_of(posterior, share), *rngs, kept=kept)
    return kept.diagnosis


def requested_diagnosis(
    posterior: Posterior, kept: Kept, rng: np.random.Generator, draws: int | None, *, thorough: bool
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
        found = standing_diagnosis(posterior, kept, SUMMARY)
        return standing_diagnosis(posterior, kept, DIAGNOSIS) if found.checks.open else found
    budget = full_budget(posterior, N_WEIGHED if draws is None else draws, thorough=thorough)
    with few_threads(posterior.density):
        kept.diagnosis = diagnose(posterior, budget, rng, rng, thorough=thorough)
    return kept.diagnosis


def _not_judged(posterior: Posterior) -> Diagnosis:
    """Return what is known of a fit to minibatches: how it ended."""
    record, layout, unknown = posterior.record, posterior.layout, Elbo(np.nan, np.nan)
    gap = float("nan") if record is None else record.gap
    return Diagnosis(
        checks=Verdict(found=tuple(of_fit(context_of(posterior), gap)), open=_IN_PART),
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
    posterior: Posterior, budget: Budget, rng: np.random.Generator, kept: Kept | None
) -> tuple[Weights, Elbo, Array]:
    """Return weights, the ELBO, and log weights of draws."""
    record, n, own = posterior.record, budget.n_weights, posterior.distribution.kept_log_weights()
    if own is not None or not n:
        weights = Weights(np.nan, np.nan, 0, 0) if own is None else weights_and_elbo(own)[0]
        return weights, Elbo(np.nan, np.nan) if record is None else record.elbo, np.empty(0)
    ratio = weighed(posterior, n, rng) if kept is None else own_log_ratio(posterior, kept, n)
    return *weights_and_elbo(ratio), ratio


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
    if not len(ratio) or not weights.tells:
        return
    if weights.n_draws < FEWEST_WEIGHED or weights.n_draws < (1.0 + _EQUAL) * weights.effective:
        return
    took = posterior.distribution.costs(posterior.density, posterior.record).weight * len(ratio)
    wanted = min(N_SHOWN, int(_WORTH * weights.n_draws / max(weights.effective, 1.0)))
    n = min(max(wanted, FEWEST_WEIGHED), len(ratio))
    theta, finite = np.concatenate(list(draws_in_chunks(posterior, len(ratio), rng)))[:n], np.isfinite(ratio[:n])
    if posterior.distribution.log_density(theta[:1]) is None:
        return  # draws may be those of a proposal, and not of q
    theta, ratio = theta[finite], ratio[:n][finite]
    yield weighted_shift_of(theta, ratio, None)
    if functionals is not None and functionals.affordable(took) >= n:
        with contextlib.suppress(Exception):  # what a Deterministic raises at single draws is not for this to tell
            yield weighted_shift_of(functionals.at(theta), ratio, functionals)


def _equal_modes(posterior: Posterior, budget: Budget) -> tuple[tuple[EqualModes, ...], int]:
    """Look for symmetries that q does not have; also return how many log densities that took."""
    most, rng = budget.compared(MOST_EVALUATIONS), own_generator(posterior.record, WEIGHTS + 2)
    if not most:
        return (), 0
    q = posterior.distribution
    modes, n_compared = q.in_modes(), 0
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
    for measure in ("mean", "sd", "skewness"):
        known = unknown if drift is None else drift.measures.get(measure, unknown)
        result |= {f"{measure}_drift": known.value, f"{measure}_drift_se": known.se}
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


def _open(budget: Budget, found: Drifts) -> str:
    """Return, in a clause, why few evaluations leave the verdict open; empty where they do not.

    Where the own checks of a posterior speak for it, it is enough that gradients at draws do not speak against it.
    """
    is_settled = found.moments is not None and not not_moved(found.moved) and found.moments.is_settled
    if found.n_scored or is_settled:
        return ""
    if not_moved(found.moved):
        return (
            f"too few evaluations within the budget, {budget.n_gradients:,} gradients, to move draws of q towards the "
            f"posterior ({_NO_BUDGET})"
        )
    return (
        f"{len(found.moved.end)} moved draws, all that the budget of {budget.n_gradients:,} gradients allows, do not "
        f"tell whether means and standard deviations are right ({_NO_BUDGET})"
    )
