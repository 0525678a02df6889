"""How many nats a state still lacks, measured on fresh draws, and what speaks against believing it."""

from typing import NamedTuple

import numpy as np

from pymc_ngvi.core.draws import sobol_draws
from pymc_ngvi.core.status import Status
from pymc_ngvi.core.types import BaseDraws, Estimator, Evaluation, GaussianState, Target
from pymc_ngvi.estimators import SEEN, in_full_metric, price, stein
from pymc_ngvi.steps.adaptive.certificate import is_kinked, loses_draws

#: Draws of a measurement with Hessians, and from gradients alone.
_N_HESSIANS, _N_GRADIENTS = 64, 2_048


class Measured(NamedTuple):
    """What is left to gain."""

    #: Nats, and the standard deviation of their error.
    gap: float
    sd: float
    #: What a fit deserves in spite of a small gap.
    against: Status | None = None
    #: Variance of log p - log q.
    spread: float = 0.0


#: Where the gap is unknown.
UNKNOWN = Measured(np.nan, np.inf)


def measured_gap(target: Target, q: GaussianState, rng: np.random.Generator, *, second_order: bool) -> Measured:
    """Measure the gap of a state on fresh draws.

    With Hessians where the fit has used them, or where they add little to what it has cost. They miss kinks: where
    gradients show another curvature, a fit by gradients is measured by gradients, and one by Hessians is not believed.
    """
    cheap = 2 * _N_HESSIANS * target.n_dim <= target.n_gradients
    if target.has_hessian and (second_order or cheap):
        measured = _measured(target, q, rng, price, _N_HESSIANS)
        if second_order or measured.against is not Status.NOT_SMOOTH:
            return measured
    return _measured(target, q, rng, stein, _N_GRADIENTS)


def _measured(
    target: Target, q: GaussianState, rng: np.random.Generator, estimator: Estimator, n_draws: int
) -> Measured:
    base = sobol_draws(n_draws, target.n_dim, rng)
    return measured_at(target, q, base, estimator.evaluate(target, q, base), estimator)


def measured_at(
    target: Target,
    q: GaussianState,
    base: BaseDraws,
    evaluation: Evaluation,
    estimator: Estimator,
    *,
    full_metric: bool = True,
) -> Measured:
    """Measure the gap of a state that has been evaluated."""
    if not evaluation.finite.any():
        return Measured(np.nan, np.inf, Status.OUTSIDE_SUPPORT)
    moments = estimator.moments(target, q, base, evaluation)
    against = Status.OUTSIDE_SUPPORT if loses_draws(evaluation) else None
    if against is None and estimator is price and is_kinked(q, base, evaluation, moments):
        against = Status.NOT_SMOOTH
    keep, full = evaluation.finite, None
    if full_metric and not q.exact_metric:
        full = in_full_metric(target, q, evaluation.theta[keep], moments)
    hidden = 1.0 if q.exact_metric or full is not None else SEEN
    moments = full or moments
    spread = float(np.var(evaluation.logp[keep] - q.log_density(evaluation.theta[keep])))
    return Measured(max(moments.gap - moments.floor, 0.0) / hidden, moments.floor_sd / hidden, against, spread)
