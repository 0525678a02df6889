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
    LIMITS,
    MOST_EVALUATIONS,
    MOST_STEPS,
    N_COMPARED,
    NOT_MOVED,
    Drift,
    EqualModes,
    Estimates,
    JointDrift,
    Moved,
    diffused,
    equal_modes,
    functional_drift_of,
    joint_drift_of,
    move,
    moved_drift_of,
    on_scale_of,
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

#: Estimated seconds that a diagnosis may take in any case, and as a part of the fit.
SECONDS, PART = 2.0, 0.5
#: Part of a budget for importance weights.
_OF_WEIGHTS = 0.25
#: Importance weights of fewer draws are not judged within a budget.
FEWEST_WEIGHED = 1_000
#: Part of the gradients for comparing log p with its mirror images; with too few for two of these, there are none.
_OF_SYMMETRIES = 0.05


def _seconds_of(costs: Costs, record: FitRecord | None) -> float:
    took = 0.0 if record is None else costs.gradient * record.n_gradients + costs.hessian * record.n_hessians
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

    def compared(self, wanted: int) -> int:
        """Return how many log densities there are for symmetries: as many as wanted where nothing is cut."""
        n = int(min(wanted, _OF_SYMMETRIES * self.n_gradients)) if self.cut else wanted
        return n if n >= 2 * N_COMPARED else 0


logger = logging.getLogger("pymc.ngvi")


def n_own(posterior: Posterior) -> int:
    """Return how many draws belong to the fit: those of a diagnosis, or where it has none, what costs as much."""
    costs, n = posterior.distribution.costs(posterior.density, posterior.record), budget_of(posterior).n_weights
    seconds = _seconds_of(costs, posterior.record)
    n = n or int(np.clip(seconds / costs.weight, MIN_KHAT_DRAWS, FEWEST_WEIGHED))
    if n < most_weighed(posterior, N_WEIGHED):
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


# --- gradients of log p at draws: how fast what is computed of these would drift, if they diffused ---

#: Draws that are moved, and trajectories of each; as many times as many where a diagnosis is thorough. Gradients are
#: looked at, at most, at as many draws as there are trajectories: 4 errors of a limit are then less than what counts.
_MOVED, _TRAJECTORIES = 1_024, 4
#: Time over which the diffusion is followed where what is computed is not linear: its bias is about as large.
_TIME = 1e-3


def score_drift_of(
    posterior: Posterior, rng: np.random.Generator, n: int, functionals: Functionals | None
) -> tuple[Drift, Drift | None] | None:
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
    n = min(n, max(LEAST_MOVED, AT_ONCE // max(q.n_dim, 1)))
    gaussian, theta = plan.gaussian, plan.draw(q.base(n, rng))
    with np.errstate(all="ignore"):
        step = gaussian.draws(gaussian.whiten(plan.target.logp_grad(theta)[1])) - gaussian.mean()
    finite = np.isfinite(theta).all(axis=1) & np.isfinite(step).all(axis=1)
    theta, step = theta[finite], step[finite]
    if len(theta) < FEWEST:
        return None
    source, sd = q.sources(theta), q.sd()
    spread = np.broadcast_to((gaussian.sd() / sd) ** 2, theta.shape)
    moments = Drift(diffused((theta - q.mean()) / sd, step / sd, spread, source), len(theta))
    if functionals is None:
        return moments, None
    n = min(len(theta), functionals.affordable(n * posterior.density.gradient_seconds) // 2)
    if n < FEWEST:
        return moments, None
    noise = np.sqrt(2.0 * _TIME) * (gaussian.draws(rng.standard_normal((n, q.n_dim))) - gaussian.mean())
    ends = (theta[:n] + _TIME * step[:n] + noise, theta[:n] + _TIME * step[:n] - noise)
    try:
        before, *after = (functionals.at(x) for x in (theta[:n], *ends))
    except Exception:  # it may fail at some draws alone
        return moments, None
    before, *after = on_scale_of(before, before, *after)
    rate, noise = (sum(after) - 2.0 * before) / (2.0 * _TIME), 0.5 * (after[0] - after[1])
    spread = noise**2 / (2.0 * _TIME)
    return moments, Drift(diffused(before, rate, spread, source[:n]), n, functionals)


# --- draws moved towards the posterior, and all that drifts: moments, log p, and what is computed of draws ---


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


def most_moved(n_dim: int, n_draws: int = _MOVED) -> int:
    """Return how many of some draws can be moved at once."""
    return min(n_draws, max(LEAST_MOVED, STREAMED // max(n_dim, 1)))


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
    scored, n_scored, n_moved = None, min(_MOVED * _TRAJECTORIES, budget.n_gradients), most_moved(q.n_dim)
    if record is not None and record.is_pool and n_scored >= FEWEST:
        scored = score_drift_of(posterior, rng, n_scored, functionals)
    if scored is not None:
        n_scored = scored[0].n_draws
        found = Drifts(NOT_MOVED, *scored, n_scored=n_scored)
        if not found.stands_out:
            return found
        # Of many draws that are moved once, chance is known best.
        n_moved, n_trajectories = most_moved(q.n_dim, n_scored), 1
    left = budget.n_gradients - (0 if scored is None else n_scored)
    base, plan = q.base(n_moved, rng), q.plan(density)
    moved = move(density, plan, base, rng, n_trajectories=n_trajectories, max_gradients=left)
    by_moves = Drifts(moved)
    if len(moved.end) >= FEWEST:
        columns = (np.concatenate([moved.control, moved.end]) - q.mean()) / q.sd()
        took = moved.n_gradients * density.gradient_seconds
        of = None if functionals is None else functional_drift_of(functionals, moved, took)
        by_moves = Drifts(moved, moved_drift_of(moved, columns), of, joint_drift_of(moved))
    return by_moves if scored is None else found.confirmed_by(by_moves)


# --- a diagnosis of an approximate posterior, made of its parts: weights, moved draws, and mass elsewhere ---

_NO_BUDGET = "approx.diagnose() has more, diagnose(draws=10_000) no budget"
_IN_PART = (
    "the model reads pm.Minibatch data, and log p is that of one batch. Load what `save` writes on a model of all of "
    "the data, pymc_ngvi.load(file, model), and ask there"
)


def full_budget(posterior: Posterior, draws: int = N_WEIGHED, *, thorough: bool = False) -> Budget:
    """Return what a diagnosis takes where nothing is dear."""
    has_weights = posterior.distribution.kept_log_weights() is not None
    n_gradients = MOST_STEPS * _MOVED * (_TRAJECTORIES if thorough else 1)
    return Budget(0 if has_weights else most_weighed(posterior, draws), n_gradients)


def budget_of(posterior: Posterior) -> Budget:
    """Return as much of a diagnosis as can be had in the seconds for it."""
    costs, wanted = posterior.distribution.costs(posterior.density, posterior.record), full_budget(posterior)
    seconds = _seconds_of(costs, posterior.record)
    n_weights = min(wanted.n_weights, int(_OF_WEIGHTS * seconds / costs.weight))
    if n_weights < min(FEWEST_WEIGHED, wanted.n_weights):
        n_weights = 0
    n_gradients = min(wanted.n_gradients, int((seconds - n_weights * costs.weight) / costs.gradient))
    return Budget(n_weights, n_gradients, n_gradients < wanted.n_gradients, n_weights < wanted.n_weights)


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
        often = _TRAJECTORIES ** (2 if thorough else 1)
        functionals = functionals_of(density, posterior.constrain)
        found = drifts_of(posterior, rng, often, budget, functionals)
    moved, drift = found.moved, found.moments
    some = len(moved.end) + moved.n_lost < most_moved(layout.n_dim)
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
        n_scored=found.n_scored,
        thorough=thorough,
        n_gradients=density.n_gradients - before,
        n_log_p=weights.n_draws + n_compared,
        layout=layout,
        is_pool=context.is_pool,
        left_out=_left_out(budget, found, often if fewer else 0, n_compared > 0, q.kept_log_weights() is not None),
        joint="" if found.joint is None else found.joint.in_words(),
        computed="" if of is None else of.of_elements(),
        searched=record is not None and record.searched,
        has_one_mode=record is not None and record.estimator == "quadrature" and has_one_mode(density),
    )


def standing_diagnosis(posterior: Posterior, kept: Kept) -> Diagnosis:
    """Return the diagnosis that belongs to the fit, made with seeds of its own; made once, unless q changes."""
    if kept.diagnosis is None:
        with few_threads(posterior.density):
            rngs = own_generator(posterior.record), own_generator(posterior.record, WEIGHTS + 1)
            kept.diagnosis = diagnose(posterior, budget_of(posterior), *rngs, kept=kept)
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
        return standing_diagnosis(posterior, kept)
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
    if not len(ratio) or not weights.verdict().helps:
        return
    # No mean moves by more than the root of their relative variance, in standard deviations.
    if weights.n_draws < FEWEST_WEIGHED or weights.uneven < LIMITS["mean"] ** 2:
        return
    took = posterior.distribution.costs(posterior.density, posterior.record).weight * len(ratio)
    n = min(N_SHOWN, len(ratio))
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


def _left_out(budget: Budget, found: Drifts, often: int, compared: bool, has_weights: bool) -> tuple[str, ...]:
    """Return what a budget does not allow; ``often``: trajectories that were wanted, 0 where all draws were moved."""
    result, moved = [], found.moved
    if budget.n_weights == 0 and not has_weights:
        result.append("importance weights and their k-hat")
    elif budget.weights_cut:
        result.append(f"importance weights of more than {budget.n_weights:,} draws")
    if not compared:
        result.append(SYMMETRIES)
    if not_moved(moved) and not found.n_scored:
        result.append("moved draws")
    elif often:
        times = f", {moved.n_trajectories} trajectories each" if moved.n_trajectories < often else ""
        result.append(f"more than {len(moved.end)} moved draws{times}")
    return tuple(result)


def _open(budget: Budget, found: Drifts) -> str:
    """Return, in a clause, why few evaluations leave the verdict open; empty where they do not."""
    if found.moments is not None and found.moments.is_settled:
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
