"""Draws of a posterior, weighted: by importance, and by what other priors and other rows make of log p."""

import math
import warnings

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy as np

from pymc_ngvi.core.bridge import Estimate, log_mean
from pymc_ngvi.core.messages import OURS
from pymc_ngvi.core.prices import rounded_up
from pymc_ngvi.core.psis import Weights, khat_limit, weigh
from pymc_ngvi.core.sizes import MOST_NUMBERS, N_SHOWN
from pymc_ngvi.core.types import Array
from pymc_ngvi.density import ModelDensity
from pymc_ngvi.families import DiagonalState
from pymc_ngvi.marginal.draws import Draws
from pymc_ngvi.marginal.pooled import PoolState
from pymc_ngvi.marginal.weighted import FEWEST, WeightChecks, WeightedDraws
from pymc_ngvi.results.distributions import LogMarginalLikelihood, Posterior

#: Part of the draws that weights are worth which leave nothing to correct, whatever the shape of their tail.
_NOTHING_TO_CORRECT = 0.99
#: More draws than these are not proposed to anybody; nor more than so many, where each has to be weighted.
_MOST_DRAWS, _MOST_WEIGHTED = 1_000_000, 14_000
#: Part of the draws asked for that come where they can be had.
_NEARLY = 0.9
#: Nats below the heaviest draw where a log weight has no digits left for what another log p, as low there, makes of it.
_NO_DIGITS = 1e9
_RICHER = "Fit a richer family (family='mixture', 'student_t'), reparametrise, or use pm.sample."


class ElsewhereDensity:
    """Log p that is that of other draws: only rows and data of its model are of use."""

    def __init__(self, density: ModelDensity, why_in_part: str) -> None:
        self._density, self.why_in_part = density, why_in_part

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_density":  # of a copy that has no attributes yet
            raise AttributeError(name)
        return getattr(self._density, name)


class Weighted(NamedTuple):
    """A posterior that is weighted draws of another one."""

    density: ModelDensity
    state: PoolState
    #: Log p over that of the other one at each draw, up to a constant; shape (n_draws,).
    log_ratio: Array
    #: Of the marginal likelihoods.
    change: Estimate
    #: Why marginal likelihoods can't be compared, in clauses.
    improper: Sequence[str] = ()

    @property
    def checks(self) -> WeightChecks:
        """How good the weights are."""
        return cast(WeightChecks, self.state.checks)

    def log_density(self, what: str, density: Callable[[], Estimate]) -> LogMarginalLikelihood:
        """Return a log density with its error; raise ValueError where weights do not tell it."""
        if not self.checks.weights_help:
            raise ValueError(f"There is no {what} to be relied on. {self.checks}")
        return LogMarginalLikelihood(*density()[:2])


def weighted(
    posterior: Posterior, made: Draws, log_ratio: Array, what: str, doubts: Sequence[str], cure: str,
    density: ModelDensity, n_wanted: int, theta: Array | None = None,
) -> Weighted:  # fmt: skip
    """Return the posterior that draws have with other weights; warn where they can't be relied on.

    ``theta`` are the draws in the coordinates of ``density``, where these are others.
    """
    q, new = posterior.distribution, made.reweighted(log_ratio)
    change = log_mean(log_ratio, made.log_weights, part=made.part)
    checks = WeightChecks.of(new, what, tuple(doubts), "", is_of_exact=q.is_checked)
    if checks.shortfalls:
        can_be_had = made.effective_size > _NEARLY * n_wanted
        needed = int(rounded_up(1.2 * FEWEST / max(checks.effective_size, 1.0) * n_wanted))
        if checks.weights_help and can_be_had and needed <= _MOST_WEIGHTED:
            cure = f"Take more draws, draws={needed:_}; or {cure[0].lower()}{cure[1:]}"
        checks = replace(checks, cure=cure)
    if not checks.is_reliable:
        warnings.warn(str(checks), UserWarning, skip_file_prefixes=OURS)
    before = q.q if isinstance(q.q, PoolState) else None
    mass = change if checks.weights_help and before is not None else Estimate(math.nan, math.nan)
    rest, plan = WeightedDraws(checks, mass, before), q.plan(posterior.density)
    is_as_before = theta is None and plan.transform is None
    whole = new if theta is None else new._replace(theta=theta)
    whole = whole.reweighted(np.where(np.isfinite(whole.theta).all(axis=1), 0.0, -np.inf))
    gaussian, others = (plan.gaussian, getattr(q.q, "others", ())) if is_as_before else (None, ())
    return Weighted(density, _state(rest, whole, gaussian, others), log_ratio, change)


def _state(rest: WeightedDraws, draws: Draws, gaussian: Any = None, others: tuple[Any, ...] = ()) -> PoolState:
    """Return weighted draws as a posterior; reports begin from a Gaussian, by default that of their moments."""
    pool = rest.pool_of(draws)
    weights = pool.weights()[0]
    mean = weights @ pool.g
    if gaussian is None:
        gaussian = DiagonalState.from_scale(mean, np.sqrt(weights @ (pool.g - mean) ** 2))
    return rest.with_pool(pool, gaussian, others)


def corrected(posterior: Posterior, draws: int, rng: np.random.Generator, what: str = "corrected()") -> Weighted:
    """Return draws of q with their importance weights; raise ValueError where these can't correct it."""
    posterior.check_correctable(what)
    posterior.check_weights()
    posterior.check_weighable(draws, "Importance weights take")
    if (most := MOST_NUMBERS // posterior.layout.n_dim) < draws:
        raise ValueError(f"{draws:,} draws of {posterior.layout.n_dim:,} coordinates are too much: take {most:,}.")
    theta = posterior.draw(draws, rng)
    log_ratio = posterior.density.logp(theta) - posterior.log_q(theta)
    finite = np.isfinite(log_ratio)
    if np.any(log_ratio == np.inf) or not finite.any():
        where = "infinite at some" if finite.any() else "finite at none"
        raise ValueError(f"log p is {where} of {draws:,} draws of q: weights p/q can't correct it.")
    check_help(weigh(log_ratio)[1])
    new = Draws.of_equal_weight(theta).reweighted(log_ratio)
    checks = WeightChecks.of(new, f"Draws of {posterior.kind}, with importance weights.", (), "", is_of_exact=False)
    mass = log_mean(log_ratio, np.zeros(draws))
    return Weighted(posterior.density, _state(WeightedDraws(checks, mass), new), log_ratio, mass)


def check_help(found: Weights) -> None:
    """Raise ValueError where k-hat says that weights can't help."""
    if found.verdict().helps or found.effective > _NOTHING_TO_CORRECT * found.n_draws:
        return
    cure, limit = _RICHER, khat_limit(found.n_draws)
    if found.khat < khat_limit(_MOST_DRAWS):
        needed = rounded_up(max(10.0 ** (1.0 / (1.0 - found.khat)), N_SHOWN))
        cure = f"Take {needed:,.0f} draws or more, if it stays so; or f{_RICHER[1:]}"
    raise ValueError(
        f"Pareto k-hat is {found.khat:.2f}, and {found.n_draws:,} draws of q allow for {limit:.2f} at most: importance "
        f"weights can't correct what q misses. {cure}"
    )


def joint_draws(posterior: Posterior, n: int, rng: np.random.Generator) -> tuple[Draws, tuple[str, ...]]:
    """Return draws with their weights, and what stands against relying on them, in clauses.

    An exact, nested or moved posterior has weights. Draws of another q get their importance weights where these help;
    where they can't, the draws are those of q.
    """
    q, density, record = posterior.distribution, posterior.density, posterior.record
    made = q.joint(n, rng)
    if q.kept_log_weights() is not None:
        log_weights = made.log_weights
        log_weights = np.where(log_weights > log_weights.max() - _NO_DIGITS, log_weights, -np.inf)
        return made._replace(log_weights=log_weights), () if record is None else record.doubts
    if density.why_in_part:
        return made, (
            f"the draws are those of {posterior.kind}, which is not compared with log p: {density.why_in_part}",
        )
    log_weights, found = weigh(q.log_weights(made.theta, density))
    if found.verdict().helps:
        return made._replace(log_weights=log_weights), ()
    return made, (
        f"the draws are those of {posterior.kind} as it is: Pareto k-hat {found.khat_text()} says that importance "
        "weights can't correct it",
    )
